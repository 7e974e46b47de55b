/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Two results over disjoint keys become one (attention_engine.h has the formula). A block has some
 * rows of one head, a row has 1 to 32 neighbouring threads, and a thread eight elements at a time:
 * it reads them of both parts before it writes them, and the threads of a row have all read both
 * lse before one of them writes. So the result may lie where a part does. */
#include "device/elements.cuh"
#include "ops/attention/attention_kernels_cuda.h"

/* What each part counts for. */
struct cofk_weights {
    float a, b, lse;
};

COFK_INLINE struct cofk_weights cofk_weights_of(float la, float lb)
{
    la = la == INFINITY ? -INFINITY : la;
    lb = lb == INFINITY ? -INFINITY : lb;
    const struct cofk_weights none = {0, 0, -INFINITY};
    if (la == -INFINITY && lb == -INFINITY)
        return none;
    const float m = fmaxf(la, lb); /* the other one where one is NaN, and then s is NaN */
    const float a = expf(la - m), b = expf(lb - m), s = a + b;
    const struct cofk_weights w = {a / s, b / s, m + logf(s)};
    return w;
}

/* Where a row of a view begins. */
COFK_INLINE int64_t cofk_row_at(const struct cofi_attention_strides &stride, int64_t batch,
                                int64_t row, int head)
{
    return batch * stride.batch + row * stride.row + head * stride.head;
}

template <class Elem>
COFK_INLINE void cofk_load_part(const struct cofi_attention_partial &part, int64_t at, int v,
                                int dim, bool is_aligned, float *to)
{
    if (part.o_f32)
        cofk_unpack<cofk_f32>(
            cofk_load_vector<cofk_f32>((const char *)part.o + at * 4, v, dim, is_aligned), to);
    else
        cofk_unpack<Elem>(
            cofk_load_vector<Elem>((const char *)part.o + at * (int)sizeof(typename Elem::bits), v,
                                   dim, is_aligned), to);
}

template <class Elem>
COFK_INLINE void cofk_store_merged(const struct cofi_merge_arguments &k, int64_t at, int v,
                                   const float *x)
{
    const int dim = (int)k.merge.dim_v;
    if (k.merge.o_f32)
        cofk_store_vector<cofk_f32>((char *)k.merge.o + at * 4, v, dim, k.o_aligned,
                                    cofk_pack<cofk_f32>(x));
    else
        cofk_store_vector<Elem>((char *)k.merge.o + at * (int)sizeof(typename Elem::bits), v, dim,
                                k.o_aligned, cofk_pack<Elem>(x));
}

/* Of one row, or of none: all threads of a warp come here together. */
template <class Elem>
COFK_INLINE void cofk_merge_row(const struct cofi_merge_arguments &k, int64_t batch, int64_t row,
                                int head, int lane)
{
    const struct cofi_attention_merge &m = k.merge;
    const int dim = (int)m.dim_v, n_vectors = (dim + COFK_VECTOR - 1) / COFK_VECTOR;
    const bool is_row = row < m.n_rows;
    const int64_t a = cofk_row_at(m.a.stride, batch, row, head);
    const int64_t b = cofk_row_at(m.b.stride, batch, row, head);
    const int64_t o = cofk_row_at(m.stride, batch, row, head);
    float la = 0, lb = 0, xa[COFK_VECTOR], xb[COFK_VECTOR];
    if (is_row) {
        la = m.a.lse[batch * m.a.lse_batch + head * m.a.lse_head + row];
        lb = m.b.lse[batch * m.b.lse_batch + head * m.b.lse_head + row];
        cofk_load_part<Elem>(m.a, a, lane, dim, k.a_aligned, xa);
        cofk_load_part<Elem>(m.b, b, lane, dim, k.b_aligned, xb);
    }
    __syncwarp();
    if (!is_row)
        return;
    const struct cofk_weights w = cofk_weights_of(la, lb);
    if (lane == 0)
        m.lse[batch * m.lse_batch + head * m.lse_head + row] = w.lse;
    for (int v = lane; v < n_vectors; v += k.lanes) {
        if (v > lane) {
            cofk_load_part<Elem>(m.a, a, v, dim, k.a_aligned, xa);
            cofk_load_part<Elem>(m.b, b, v, dim, k.b_aligned, xb);
        }
#pragma unroll
        for (int i = 0; i < COFK_VECTOR; i++)
            xa[i] = (w.a == 0 ? 0.0f : w.a * xa[i]) + (w.b == 0 ? 0.0f : w.b * xb[i]);
        cofk_store_merged<Elem>(k, o, v, xa);
    }
}

template <class Elem>
__global__ void __launch_bounds__(COFI_MERGE_THREADS)
cofk_attention_merge(const __grid_constant__ struct cofi_merge_arguments k)
{
    const int n_heads = (int)k.merge.n_heads, per_block = COFI_MERGE_THREADS / k.lanes;
    const int head = (int)blockIdx.x % n_heads;
    const int64_t row =
        (int64_t)((int)blockIdx.x / n_heads) * per_block + (int)threadIdx.x / k.lanes;
    for (int64_t batch = blockIdx.y; batch < k.merge.n_batch; batch += gridDim.y)
        cofk_merge_row<Elem>(k, batch, row, head, (int)threadIdx.x % k.lanes);
}

/* ---- which of them -------------------------------------------------------------------------- */

const void *cofi_merge_kernel(enum cofi_elem elem)
{
    switch (elem) {
    case COFI_ELEM_BF16: return (const void *)cofk_attention_merge<cofk_bf16>;
    case COFI_ELEM_F16: return (const void *)cofk_attention_merge<cofk_f16>;
    default: return (const void *)cofk_attention_merge<cofk_f32>;
    }
}

cudaError_t cofi_merge_launch(const struct cofi_merge_arguments *arguments, unsigned n_blocks,
                              unsigned n_batches, cudaStream_t stream)
{
    void *list[] = {(void *)arguments};
    return cudaLaunchKernel(cofi_merge_kernel(arguments->merge.elem), dim3(n_blocks, n_batches),
                            dim3(COFI_MERGE_THREADS), list, 0, stream);
}
