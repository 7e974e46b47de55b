/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Launchers of the runtime's kernels, on the current device. A dead arena makes every one of them
 * do nothing, but for what is said. */
#ifndef COFI_KERNELS_CUDA_H
#define COFI_KERNELS_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct cofd_arena;
struct cofd_binding;
struct cofd_call;
struct cofd_wait_options;

/* Loads every kernel of the runtime. */
cudaError_t cofi_load_kernels(void);

/* Counted signals of users. */
cudaError_t cofi_launch_signal(struct cofd_arena *arena, int peer, int word, cudaStream_t stream);
cudaError_t cofi_launch_wait(struct cofd_arena *arena, int peer, int word,
                             const struct cofd_wait_options *options, cudaStream_t stream);

/* Copies by n_blocks blocks; any alignment. `dst_is_output`: filled with 0xff where the arena is
 * dead. */
cudaError_t cofi_launch_copy(struct cofd_arena *arena, void *dst, const void *src, size_t bytes,
                             int dst_is_output, int n_blocks, cudaStream_t stream);
/* 0xff over an output, where the arena is dead. */
cudaError_t cofi_launch_guard(struct cofd_arena *arena, void *output, size_t bytes, int n_blocks,
                              cudaStream_t stream);

/* Own words of a purpose, of all writers; of a dead arena too. */
cudaError_t cofi_launch_set_words(struct cofd_arena *arena, uint64_t words_offset, int purpose,
                                  uint64_t value, cudaStream_t stream);

/* Plans' calls: device/device_call.h. */
cudaError_t cofi_launch_call_begin(struct cofd_binding *binding, const struct cofd_call *call,
                                   cudaStream_t stream);
cudaError_t cofi_launch_call_end(struct cofd_binding *binding, cudaStream_t stream);
cudaError_t cofi_launch_call_signal(struct cofd_binding *binding, int peer, int purpose,
                                    cudaStream_t stream);
cudaError_t cofi_launch_call_wait_ready(struct cofd_binding *binding, int writer, int purpose,
                                        const struct cofd_wait_options *options,
                                        cudaStream_t stream);
cudaError_t cofi_launch_call_wait_ack(struct cofd_binding *binding, int writer, int purpose,
                                      int mark, const struct cofd_wait_options *options,
                                      cudaStream_t stream);
cudaError_t cofi_launch_call_mark(struct cofd_binding *binding, int mark, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
