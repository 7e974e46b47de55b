/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What launches of waits and copies have in common. */
#ifndef COFI_OPTIONS_CUDA_H
#define COFI_OPTIONS_CUDA_H

#include "device/device_arena.h"
#include "symm/engine_cuda.h"

/* The arena's deadline, and the name of the wait, cut where it is too long. */
struct cofd_wait_options cofi_wait_options(const cof_arena *arena, const char *step);

/* Of blocks that the device runs at once, those that one rank may have: at least 1; caps of 0 are
 * none. */
int cofi_cuda_share(const struct cofi_cuda_world *world, int n_blocks, int max_ctas);

/* What a launch for an arena came to; `what`: the call. */
cof_status cofi_cuda_launched(const char *file, int line, const cof_arena *arena,
                              const void *stream, cudaError_t error, const char *what);

/* One launch on the arena's device; returns where it fails. */
#define COFI_LAUNCH(arena, stream, launch)                                                         \
    do {                                                                                           \
        struct cofi_cuda_scope scope_;                                                             \
        COF_TRY(cofi_cuda_enter(cofi_cuda_arena(arena)->device, &scope_));                         \
        cudaError_t error_ = (launch);                                                             \
        cofi_cuda_leave(&scope_);                                                                  \
        COF_TRY(cofi_cuda_launched(__FILE_NAME__, __LINE__, arena, stream, error_, #launch));      \
    } while (0)

#endif
