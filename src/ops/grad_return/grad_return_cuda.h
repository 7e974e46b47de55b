/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The kernels of grad_return, as the host sees them. */
#ifndef COFI_GRAD_RETURN_CUDA_H
#define COFI_GRAD_RETURN_CUDA_H

#include <cuda_runtime_api.h>

#include "ops/grad_return/grad_return_call.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COFI_GR_CUDA_STEPS (COFD_GRID_MAX_RANKS - 1)

/* Tensors of the caller's: dK, dV; strides in elements. */
struct cofi_gr_tensor {
    char *data[2];
    int64_t row[2], batch[2], head[2];
};

/* Step i: the rows of owner rank-i go out, those of writer rank+i are added. */
struct cofi_gr_step {
    char *to[2];              /* first row of the owner's, contiguous, in the wire's type */
    struct cofi_gr_rows rows; /* the owner's */
    const char *from[2];      /* first own row */
    int32_t push_begin, push_end, sum_begin, sum_end; /* rows that travel */
};

enum cofi_gr_elem { COFI_GR_BF16, COFI_GR_F16, COFI_GR_F32 };

/* By value. */
struct cofi_gr_kernel {
    struct cofd_gr_call call;
    struct cofi_gr_shape shape[2];
    struct cofi_gr_tensor partial, out;
    struct cofi_gr_rows own;
    uint32_t own_halves; /* bit per half: the own partial is added */
    int32_t grain;       /* elements */
    bool is_compact;     /* partials and outputs have nothing between their elements */
    uint64_t acc_v;      /* floats in acc before those of dV */
    float *acc;          /* sums; not touched between two ranks in a whole call */
    enum cofi_gr_elem partial_elem, wire_elem, out_elem;
    struct cofi_gr_step step[COFI_GR_CUDA_STEPS];
};

/* Grains of 8 elements at aligned addresses, or any. */
const void *cofi_gr_kernel_fast(enum cofi_gr_elem out, bool partial_f32, bool wire_f32);
const void *cofi_gr_kernel_any(void);
const void *cofi_gr_kernel_wait(void);

/* A block of COFI_GR_THREADS for each lane, or two (COFD_GR_APART). */
cudaError_t cofi_gr_launch(const void *entry, const struct cofi_gr_kernel *kernel,
                           cudaStream_t stream);

/* The caller's epoch word, from this writer: at least `want`, by signed difference. */
cudaError_t cofi_gr_launch_wait(struct cofd_arena *arena, const struct cofd_binding *binding,
                                const uint32_t *word, uint32_t want, int writer,
                                const struct cofd_wait_options *options, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
