/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The launch of a merge. */
#include "backend/cuda/device_cuda.h"
#include "ops/attention/attention_kernels_cuda.h"

enum { VECTOR = 8, MAX_LANES = 32, MAX_GRID_Y = 65535 };

/* Whether every row begins at a multiple of 16 bytes. */
static bool is_aligned(const void *o, const struct cofi_attention_strides *stride, bool is_f32,
                       enum cofi_elem elem)
{
    int64_t bytes = cofi_elem_bytes(is_f32 ? COFI_ELEM_F32 : elem);
    int64_t all = (stride->batch | stride->row | stride->head) * bytes;
    return ((uintptr_t)o | (uintptr_t)all) % 16 == 0;
}

/* Threads for a row: a power of two. */
static int32_t lanes_for(int64_t dim_v)
{
    int32_t lanes = 1;
    while (lanes < MAX_LANES && lanes * VECTOR * COFI_MERGE_VECTORS < dim_v)
        lanes *= 2;
    return lanes;
}

cof_status cofi_attention_merge(const struct cofi_attention_merge *merge, void *stream)
{
    struct cofi_merge_arguments k = {.merge = *merge, .lanes = lanes_for(merge->dim_v)};
    if (merge->n_rows == 0 || merge->n_batch == 0)
        return COF_OK;
    int64_t per_block = COFI_MERGE_THREADS / k.lanes, n_blocks;
    COF_FAIL_IF(merge->dim_v > COFI_EXACT_MAX_DIM, COF_ERR_UNSUPPORTED,
                "merge of head dim %lld: wanted at most %d", (long long)merge->dim_v,
                COFI_EXACT_MAX_DIM);
    COF_FAIL_IF(__builtin_mul_overflow((merge->n_rows - 1) / per_block + 1, merge->n_heads,
                                       &n_blocks) || n_blocks > INT32_MAX,
                COF_ERR_UNSUPPORTED,
                "merge of %lld rows of %lld heads: wanted at most %lld rows in all",
                (long long)merge->n_rows, (long long)merge->n_heads,
                (long long)INT32_MAX * per_block);
    k.is_aligned = is_aligned(merge->a.o, &merge->a.stride, merge->a.o_f32, merge->elem) &&
                   is_aligned(merge->b.o, &merge->b.stride, merge->b.o_f32, merge->elem) &&
                   is_aligned(merge->o, &merge->stride, merge->o_f32, merge->elem);
    unsigned n_batches = merge->n_batch < MAX_GRID_Y ? (unsigned)merge->n_batch : MAX_GRID_Y;
    COF_CUDA(cofi_merge_launch(&k, (unsigned)n_blocks, n_batches, stream));
    return COF_OK;
}
