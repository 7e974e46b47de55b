/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The kernels of the exact engine and of the merge, as the host sees them. */
#ifndef COFI_ATTENTION_KERNELS_CUDA_H
#define COFI_ATTENTION_KERNELS_CUDA_H

#include <cuda_runtime_api.h>

#include "ops/attention/attention_engine.h"

#ifdef __CUDACC__
#define COFI_HOST_AND_DEVICE static __host__ __device__ __forceinline__
#else
#define COFI_HOST_AND_DEVICE static inline
#endif

/* ---- exact ---------------------------------------------------------------------------------- */

#define COFI_EXACT_MAX_DIM 512

enum { COFI_EXACT_QUERIES = 64 }; /* rows of a block */

/* Row i sees key j  <=>  i + low <= j <= i + high: a band without infinities. Both lie within
 * -q_rows .. k_rows, so nothing that is computed from them leaves int64. */
struct cofi_exact_limits {
    int64_t low, high;
};

static inline int64_t cofi_exact_limit(int64_t limit, int64_t q_rows, int64_t k_rows)
{
    return limit < -q_rows ? -q_rows : limit > k_rows ? k_rows : limit;
}

static inline struct cofi_exact_limits cofi_exact_limits_of(const struct cofi_band *band,
                                                            int64_t q_rows, int64_t k_rows)
{
    struct cofi_exact_limits limits = {-q_rows, k_rows};
    int64_t sum;
    if (band->left != INT64_MAX) {
        if (__builtin_sub_overflow(band->diag, band->left, &sum))
            sum = band->left > 0 ? INT64_MIN : INT64_MAX;
        limits.low = cofi_exact_limit(sum, q_rows, k_rows);
    }
    if (band->right != INT64_MAX) {
        if (__builtin_add_overflow(band->diag, band->right, &sum))
            sum = band->right > 0 ? INT64_MAX : INT64_MIN;
        limits.high = cofi_exact_limit(sum, q_rows, k_rows);
    }
    return limits;
}

/* Keys that some of these rows may see: begin <= j < end, none where begin >= end. */
struct cofi_exact_keys {
    int64_t begin, end;
};

COFI_HOST_AND_DEVICE struct cofi_exact_keys
cofi_exact_keys_of(struct cofi_exact_limits limits, int64_t row, int64_t n_rows, int64_t k_rows)
{
    const int64_t begin = row + limits.low, end = row + n_rows + limits.high;
    struct cofi_exact_keys keys = {begin > 0 ? begin : 0, end < k_rows ? end : k_rows};
    return keys;
}

/* Arguments of the kernel; the pointers differ from run to run. */
struct cofi_exact_arguments {
    const void *q, *k, *v;
    void *o;
    float *lse;
    struct cofi_attention_strides q_stride, k_stride, v_stride, o_stride;
    int64_t lse_batch, lse_head;
    int64_t q_rows, k_rows;
    struct cofi_exact_limits limits;
    int32_t n_tiles; /* blocks for q_rows */
    int32_t n_heads, group; /* query heads of a kv head */
    int32_t dim_qk, dim_v;
    float scale;
    bool o_f32;
};

/* ---- merge ---------------------------------------------------------------------------------- */

struct cofi_merge_arguments {
    struct cofi_attention_merge merge;
    int32_t lanes;   /* threads of a row: a power of two up to 32 */
    bool is_aligned; /* all rows at multiples of 16 bytes */
};

/* Vectors of eight elements for each thread of a row: two, so that what a thread does once for its
 * row is less than what it does for them. */
enum { COFI_MERGE_THREADS = 256, COFI_MERGE_VECTORS = 2 };

#ifdef __cplusplus
extern "C" {
#endif

/* Their entries, for loading. */
const void *cofi_exact_kernel(enum cofi_elem elem, int64_t dim_v);
const void *cofi_merge_kernel(const struct cofi_attention_merge *merge);

cudaError_t cofi_exact_launch(enum cofi_elem elem, const struct cofi_exact_arguments *arguments,
                              unsigned n_blocks, cudaStream_t stream);
cudaError_t cofi_merge_launch(const struct cofi_merge_arguments *arguments, unsigned n_blocks,
                              unsigned n_batches, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
