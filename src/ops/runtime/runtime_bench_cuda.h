/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench runtime` on CUDA devices: runtime_bench_cuda.c and its kernels. The first three are
 * the parts of a rank; the others are launches, and C on both sides. */
#ifndef COFI_RUNTIME_BENCH_CUDA_H
#define COFI_RUNTIME_BENCH_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#else
#include "ops/runtime/runtime_bench.h"

/* After the arena is made. Fills local, stream and cuda. */
cof_status cofi_rb_cuda_open(struct cofi_rb *b);
cof_status cofi_rb_cuda_time(struct cofi_rb *b, int direction, double *seconds_out);
void cofi_rb_cuda_close(struct cofi_rb *b);
#endif

cudaError_t cofi_rb_launch_empty(cudaStream_t stream);

/* Rounds first .. first + n - 1 between two ranks; the words count them. *late becomes 1 when a
 * round took over 5 s, and no more are made. */
struct cofi_rb_rounds {
    uint64_t *own, *peers; /* words: written by the peer, by this rank */
    uint64_t first, n;
    uint64_t *late;
    int begins; /* it signals first */
};
cudaError_t cofi_rb_launch_rounds(const struct cofi_rb_rounds *rounds, cudaStream_t stream);

/* Multiply-adds on all threads of all SMs, about 0.2 s of them: blocks of 0.1 ms, and none once
 * *stop is not 0. *started becomes 1. `stop` is device memory: every block reads it, and would keep
 * the link to the host from what is timed. `started` is pinned host memory. */
cudaError_t cofi_rb_launch_busy(const uint64_t *stop, uint64_t *started, float *sink,
                                cudaStream_t stream);

/* Of the kernels, on the current device: "sm_90", "sm_86 from PTX of 80", or "none: " and why. */
void cofi_runtime_bench_code(char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
