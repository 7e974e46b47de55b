/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A plan's call on its arena, enqueued on a CUDA stream, for schedules that consist of several
 * kernels and copies; a kernel that does all of a call includes device/device_call.h itself. Same
 * protocol as call.h, with epochs and marks in device memory: a captured graph replays.
 *
 * Everything here is a launch. When the arena is dead by the time it runs, it does nothing, and
 * nothing after it is released; the host learns of it by cofi_arena_look. */
#ifndef COFI_CALL_CUDA_H
#define COFI_CALL_CUDA_H

#include "device/device_arena.h"
#include "symm/call.h"

#define COFI_ALL_OTHERS (-1) /* as a peer or a writer: every other rank, from the next one on */

/* What a kernel that makes the whole call gets (device/grid_call.h). */
void cofi_cuda_call_make(struct cofi_binding *binding, const struct cofi_call *call,
                         struct cofd_call *out);

/* Next epoch, with meeting and reset where it comes round. Returns the arena's failure, if any. */
cof_status cofi_cuda_call_begin(struct cofi_binding *binding, const struct cofi_call *call,
                                void *stream);
/* After everything of the call that reads or writes symmetric memory. */
cof_status cofi_cuda_call_end(struct cofi_binding *binding, void *stream);

/* {epoch of the call, digest} into the peer's word of this purpose and this writer. */
cof_status cofi_cuda_call_signal(struct cofi_binding *binding, int peer, int purpose, void *stream);

cof_status cofi_cuda_call_wait_ready(struct cofi_binding *binding, int writer, int purpose,
                                     const char *step, void *stream);
/* For the epoch that the mark holds when the wait runs; none where it holds 0. */
cof_status cofi_cuda_call_wait_ack(struct cofi_binding *binding, int writer, int purpose, int mark,
                                   const char *step, void *stream);
/* mark = epoch of this call. */
cof_status cofi_cuda_call_mark(struct cofi_binding *binding, int mark, void *stream);

/* Blocks that run at once on this rank's device without those of the other ranks there: what a
 * kernel whose blocks wait for each other, or for peers, may launch; at least 1. Where more than
 * two ranks share a device it is half of that, so that two plans may run at once, but for plans
 * with a cap of their own. `max_ctas` of the world's options caps it, and the plan's own, where
 * not 0. */
cof_status cofi_cuda_max_blocks(const cof_team *team, const void *kernel, int threads,
                                size_t shared_bytes, int max_ctas, int *n_blocks_out);

#endif
