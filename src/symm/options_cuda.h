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

/* Blocks of a copy of so many bytes. */
cof_status cofi_cuda_copy_blocks(const cof_arena *arena, size_t bytes, int *n_blocks_out);

#endif
