/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The kernel beside cuDNN's, as the host sees it. */
#ifndef COFI_ATTENTION_UNSEEN_CUDA_H
#define COFI_ATTENTION_UNSEEN_CUDA_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rows 0 .. rows_before - 1 and behind_begin .. behind_begin + rows_behind - 1. o is of two bytes
 * an element, 16-byte aligned, its dim and strides (in elements) multiples of 8. */
struct cofi_attention_unseen {
    char *o;
    float *lse;
    int64_t n_batch, n_heads, dim_v;
    int64_t o_batch, o_row, o_head, lse_batch, lse_head;
    int64_t rows_before, behind_begin, rows_behind;
};

cudaError_t cofi_launch_attention_unseen(const struct cofi_attention_unseen *unseen,
                                         cudaStream_t stream);
/* On the current device, so that its first launch loads nothing. */
cudaError_t cofi_load_attention_unseen(void);

#ifdef __cplusplus
}
#endif
#endif
