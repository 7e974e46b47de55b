/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Two results over disjoint keys become one (attention_engine.h has the formula). A block has some
 * rows of one head, a row has 1 to 32 neighbouring threads, and each of them up to two vectors of
 * eight elements. It reads all of both parts before it writes, and the threads of a row have all
 * read both lse before one of them writes: so the result may lie where a part does. */
#include "device/elements.cuh"
#include "device/order.h"
#include "ops/attention/attention_kernels_cuda.h"

static_assert(COFI_MERGE_VECTORS * COFK_VECTOR * 32 >= COFI_EXACT_MAX_DIM, "a warp holds a row");

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
    const float a = expf(la - m), b = expf(lb - m), s = a + b, r = 1 / s;
    const struct cofk_weights w = {a * r, b * r, m + logf(s)};
    return w;
}

/* A part that weighs nothing may be anything, NaN too: it becomes 0. */
template <class Elem>
COFK_INLINE void cofk_drop(struct cofk_vector<Elem> *vector, float weight)
{
#pragma unroll
    for (int i = 0; i < cofk_vector<Elem>::n_words; i++)
        vector->word[i] = weight == 0 ? 0 : vector->word[i];
}

/* First byte of the row's part in a view. */
template <class Elem>
COFK_INLINE int64_t cofk_row_bytes(const struct cofi_attention_strides &stride, int64_t batch,
                                   int64_t row, int head)
{
    return (batch * stride.batch + row * stride.row + head * stride.head) *
           (int)sizeof(typename Elem::bits);
}

/* Of one row, or of none: all threads of a warp come here together. A, B, O: types of the parts and
 * of the result. */
template <class A, class B, class O>
COFK_INLINE void cofk_merge_row(const struct cofi_merge_arguments &k, int64_t batch, int64_t row,
                                int head, int lane)
{
    const struct cofi_attention_merge &m = k.merge;
    const int dim = (int)m.dim_v;
    const bool is_row = row < m.n_rows;
    const char *a = (const char *)m.a.o + cofk_row_bytes<A>(m.a.stride, batch, row, head);
    const char *b = (const char *)m.b.o + cofk_row_bytes<B>(m.b.stride, batch, row, head);
    char *o = (char *)m.o + cofk_row_bytes<O>(m.stride, batch, row, head);
    float la = 0, lb = 0;
    struct cofk_vector<A> va[COFI_MERGE_VECTORS];
    struct cofk_vector<B> vb[COFI_MERGE_VECTORS];
    if (is_row) {
        la = m.a.lse[batch * m.a.lse_batch + head * m.a.lse_head + row];
        lb = m.b.lse[batch * m.b.lse_batch + head * m.b.lse_head + row];
#pragma unroll
        for (int i = 0; i < COFI_MERGE_VECTORS; i++)
            if ((lane + i * k.lanes) * COFK_VECTOR < dim) {
                va[i] = cofk_load_vector<A>(a, lane + i * k.lanes, dim, k.is_aligned);
                vb[i] = cofk_load_vector<B>(b, lane + i * k.lanes, dim, k.is_aligned);
            }
    }
    __syncwarp();
    if (!is_row)
        return;
    const struct cofk_weights w = cofk_weights_of(la, lb);
    if (lane == 0)
        m.lse[batch * m.lse_batch + head * m.lse_head + row] = w.lse;
#pragma unroll
    for (int i = 0; i < COFI_MERGE_VECTORS; i++) {
        float xa[COFK_VECTOR], xb[COFK_VECTOR];
        if ((lane + i * k.lanes) * COFK_VECTOR >= dim)
            break;
        cofk_drop(&va[i], w.a);
        cofk_drop(&vb[i], w.b);
        cofk_unpack<A>(va[i], xa);
        cofk_unpack<B>(vb[i], xb);
#pragma unroll
        for (int d = 0; d < COFK_VECTOR; d++)
            xa[d] = fmaf(w.a, xa[d], w.b * xb[d]);
        cofk_store_vector<O>(o, lane + i * k.lanes, dim, k.is_aligned, cofk_pack<O>(xa));
    }
}

template <class A, class B, class O>
__global__ void __launch_bounds__(COFI_MERGE_THREADS, 4)
cofk_attention_merge(const __grid_constant__ struct cofi_merge_arguments k)
{
    if (k.merge.lets_next_begin)
        cofd_let_next_kernel_begin();
    const int n_heads = (int)k.merge.n_heads, per_block = COFI_MERGE_THREADS / k.lanes;
    const int head = (int)blockIdx.x % n_heads;
    const int64_t row =
        (int64_t)((int)blockIdx.x / n_heads) * per_block + (int)threadIdx.x / k.lanes;
    for (int64_t batch = blockIdx.y; batch < k.merge.n_batch; batch += gridDim.y)
        cofk_merge_row<A, B, O>(k, batch, row, head, (int)threadIdx.x % k.lanes);
}

/* ---- which of them -------------------------------------------------------------------------- */

template <class A, class B, class Elem>
static const void *kernel_into(const struct cofi_attention_merge *m)
{
    return m->o_f32 ? (const void *)cofk_attention_merge<A, B, cofk_f32>
                    : (const void *)cofk_attention_merge<A, B, Elem>;
}

template <class Elem> static const void *kernel_of(const struct cofi_attention_merge *m)
{
    if (m->a.o_f32)
        return m->b.o_f32 ? kernel_into<cofk_f32, cofk_f32, Elem>(m)
                          : kernel_into<cofk_f32, Elem, Elem>(m);
    return m->b.o_f32 ? kernel_into<Elem, cofk_f32, Elem>(m) : kernel_into<Elem, Elem, Elem>(m);
}

const void *cofi_merge_kernel(const struct cofi_attention_merge *merge)
{
    switch (merge->elem) {
    case COFI_ELEM_BF16: return kernel_of<cofk_bf16>(merge);
    case COFI_ELEM_F16: return kernel_of<cofk_f16>(merge);
    default: return kernel_of<cofk_f32>(merge);
    }
}

cudaError_t cofi_merge_launch(const struct cofi_merge_arguments *arguments, unsigned n_blocks,
                              unsigned n_batches, cudaStream_t stream)
{
    void *list[] = {(void *)arguments};
    return cudaLaunchKernel(cofi_merge_kernel(&arguments->merge), dim3(n_blocks, n_batches),
                            dim3(COFI_MERGE_THREADS), list, 0, stream);
}
