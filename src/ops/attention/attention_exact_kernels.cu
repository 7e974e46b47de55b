/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The exact engine: one block computes 64 query rows of one head, 64 keys at a time, all in fp32
 * without tensor cores. For every tile of keys, with running m, l and acc per row:
 *     s = scale q k^T, -inf where the band hides the key
 *     m' = max(m, max s);  p = exp(s - m');  l' = l exp(m - m') + sum p
 *     acc' = acc exp(m - m') + p v
 * and at the end o = acc / l, lse = m + log l. A row that has seen no key has m = -inf, l = 0.
 * A hidden key takes no part: its p is COFK_HIDDEN, and its v is left out, not taken 0 times, as
 * it may be NaN. A tile that every row sees whole has no such p, and is spared the comparisons.
 *
 * Thread (tx, ty) of 16 x 16 has rows 4 ty .. 4 ty + 3, of the scores keys tx, tx + 16, .., and of
 * the output columns 64 c + 4 tx .. 64 c + 4 tx + 3. Shared memory of a block:
 *
 *   q, k   32 dims of the tiles, written by all, read for the scores     } the same
 *   v      some keys' values, written by all, read for acc               } memory in turn
 *   p      written by the threads of a row, read by the same; a barrier lies between
 *
 * Rows are padded so that the 16-byte loads of eight neighbours touch all banks once. */
#include "device/elements.cuh"
#include "ops/attention/attention_kernels_cuda.h"

enum {
    COFK_QUERIES = COFI_EXACT_QUERIES,
    COFK_KEYS = 64,
    COFK_DIMS = 32,
    COFK_VALUES = 4096, /* elements of v at once */
    COFK_SIDE = 16,     /* of the square of threads */
    COFK_THREADS = COFK_SIDE * COFK_SIDE,
    COFK_PER_THREAD = COFK_QUERIES / COFK_SIDE,
    COFK_PAD = 4,
    COFK_AT_ONCE = 4, /* loads of a thread in flight: more cost registers for their addresses */
    COFK_HIDDEN = -1, /* for p of a hidden key; others are >= 0, or NaN */
};
static_assert(COFK_KEYS == COFK_QUERIES && COFK_PER_THREAD == 4, "float4 holds a thread's share");

struct cofk_exact_memory {
    union {
        struct {
            float q[COFK_QUERIES][COFK_DIMS + COFK_PAD], k[COFK_KEYS][COFK_DIMS + COFK_PAD];
        } scores;
        float v[COFK_VALUES];
    };
    float p[COFK_QUERIES][COFK_KEYS + COFK_PAD];
};
static_assert(sizeof(struct cofk_exact_memory) <= 48 << 10, "static shared memory");

/* Of one head: row 0 of the tile. */
template <class Elem> struct cofk_rows {
    const typename Elem::bits *data;
    int64_t stride; /* elements */
    int n_rows, dim;
};

template <class Elem>
COFK_INLINE struct cofk_rows<Elem> cofk_rows_of(const void *data,
                                                const struct cofi_attention_strides &stride,
                                                int64_t batch, int64_t row, int64_t head, int dim)
{
    const struct cofk_rows<Elem> rows = {(const typename Elem::bits *)data + batch * stride.batch +
                                             row * stride.row + head * stride.head,
                                         stride.row, 0, dim};
    return rows;
}

/* 0 behind the last row and the last dim. */
template <class Elem>
COFK_INLINE float cofk_element(const struct cofk_rows<Elem> &rows, int row, int dim)
{
    float x[2] = {0, 0};
    if (row < rows.n_rows && dim < rows.dim)
        Elem::unpack(__ldg(rows.data + row * rows.stride + dim), x);
    return x[0];
}

/* Dims first .. first + 31 of a tile of 64 rows. */
template <class Elem>
COFK_INLINE void cofk_fetch_dims(const struct cofk_rows<Elem> &rows, int first,
                                 float (*to)[COFK_DIMS + COFK_PAD])
{
    const int dim = (int)threadIdx.x % COFK_DIMS, row = (int)threadIdx.x / COFK_DIMS;
    const int step = COFK_THREADS / COFK_DIMS;
#pragma unroll 1
    for (int begin = row; begin < COFK_QUERIES; begin += COFK_AT_ONCE * step) {
        float x[COFK_AT_ONCE];
#pragma unroll
        for (int i = 0; i < COFK_AT_ONCE; i++)
            x[i] = cofk_element(rows, begin + i * step, first + dim);
#pragma unroll
        for (int i = 0; i < COFK_AT_ONCE; i++)
            to[begin + i * step][dim] = x[i];
    }
}

/* All dims, up to dim_max, of rows first .. first + COFK_VALUES / dim_max - 1. */
template <class Elem, int dim_max>
COFK_INLINE void cofk_fetch_values(const struct cofk_rows<Elem> &rows, int first, float *to)
{
#pragma unroll 1
    for (int begin = (int)threadIdx.x; begin < COFK_VALUES; begin += COFK_AT_ONCE * COFK_THREADS) {
        float x[COFK_AT_ONCE];
#pragma unroll
        for (int i = 0; i < COFK_AT_ONCE; i++) {
            const int at = begin + i * COFK_THREADS;
            x[i] = cofk_element(rows, first + at / dim_max, at % dim_max);
        }
#pragma unroll
        for (int i = 0; i < COFK_AT_ONCE; i++)
            to[begin + i * COFK_THREADS] = x[i];
    }
}

COFK_INLINE void cofk_add_product(const float4 &a, const float4 &b, float *sum)
{
    *sum = fmaf(a.x, b.x, *sum);
    *sum = fmaf(a.y, b.y, *sum);
    *sum = fmaf(a.z, b.z, *sum);
    *sum = fmaf(a.w, b.w, *sum);
}

/* s = q k^T of this thread's rows and keys. */
template <class Elem>
COFK_INLINE void cofk_scores(const struct cofk_rows<Elem> &q, const struct cofk_rows<Elem> &k,
                             struct cofk_exact_memory *memory, float (*s)[COFK_PER_THREAD])
{
    const int tx = (int)threadIdx.x % COFK_SIDE, ty = (int)threadIdx.x / COFK_SIDE;
#pragma unroll
    for (int i = 0; i < COFK_PER_THREAD; i++)
#pragma unroll
        for (int j = 0; j < COFK_PER_THREAD; j++)
            s[i][j] = 0;
    for (int first = 0; first < q.dim; first += COFK_DIMS) {
        __syncthreads(); /* all have read what is there */
        cofk_fetch_dims(q, first, memory->scores.q);
        cofk_fetch_dims(k, first, memory->scores.k);
        __syncthreads();
#pragma unroll 1
        for (int d = 0; d < COFK_DIMS; d += 4) {
            float4 key[COFK_PER_THREAD];
#pragma unroll
            for (int j = 0; j < COFK_PER_THREAD; j++)
                key[j] = *(const float4 *)&memory->scores.k[tx + COFK_SIDE * j][d];
#pragma unroll
            for (int i = 0; i < COFK_PER_THREAD; i++) {
                const float4 query =
                    *(const float4 *)&memory->scores.q[COFK_PER_THREAD * ty + i][d];
#pragma unroll
                for (int j = 0; j < COFK_PER_THREAD; j++)
                    cofk_add_product(query, key[j], &s[i][j]);
            }
        }
    }
}

/* The 16 threads of a row are neighbours in a warp. */
COFK_INLINE float cofk_row_max(float x)
{
#pragma unroll
    for (int step = COFK_SIDE / 2; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

COFK_INLINE float cofk_row_sum(float x)
{
#pragma unroll
    for (int step = COFK_SIDE / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* Running state of one row: m is the row's, l this thread's share of it. */
struct cofk_row_state {
    float m, l;
};

/* p of this thread's keys of one row, into memory; keys first .. last of the tile are seen. Returns
 * the factor for what was summed before. */
COFK_INLINE float cofk_weigh_row(const float *s, float scale, int64_t first, int64_t last,
                                 struct cofk_row_state *state, float *p)
{
    const int tx = (int)threadIdx.x % COFK_SIDE;
    float x[COFK_PER_THREAD], m = state->m;
#pragma unroll
    for (int j = 0; j < COFK_PER_THREAD; j++) {
        const int key = tx + COFK_SIDE * j;
        x[j] = key >= first && key <= last ? s[j] * scale : -INFINITY;
        m = fmaxf(m, x[j]);
    }
    m = cofk_row_max(m);
    const float from = m == -INFINITY ? 0.0f : m; /* so that exp(-inf) is 0, not NaN */
    const float factor = expf(state->m - from);
    state->l *= factor;
    state->m = m;
#pragma unroll
    for (int j = 0; j < COFK_PER_THREAD; j++) {
        const int key = tx + COFK_SIDE * j;
        x[j] = expf(x[j] - from);
        state->l += x[j];
        p[key] = key >= first && key <= last ? x[j] : (float)COFK_HIDDEN;
    }
    return factor;
}

/* sum + p value, or sum where the key is hidden. */
template <bool is_cut> COFK_INLINE float cofk_add_value(float p, float value, float sum)
{
    const float added = fmaf(p, value, sum);
    return is_cut && p < 0 ? sum : added;
}

/* acc += p v, over the keys of the tile; is_cut: some of them may be hidden from some rows. */
template <class Elem, int dim_max, bool is_cut>
COFK_INLINE void cofk_add_values(const struct cofk_rows<Elem> &v, struct cofk_exact_memory *memory,
                                 float (*acc)[dim_max / COFK_SIDE])
{
    const int tx = (int)threadIdx.x % COFK_SIDE, ty = (int)threadIdx.x / COFK_SIDE;
    const int at_once = COFK_VALUES / dim_max;
    for (int first = 0; first < v.n_rows; first += at_once) {
        __syncthreads(); /* p is there, and all have read what lies in v's place */
        cofk_fetch_values<Elem, dim_max>(v, first, memory->v);
        __syncthreads();
#pragma unroll 1
        for (int key = 0; key < at_once; key += 4) {
            float p[COFK_PER_THREAD][4];
#pragma unroll
            for (int i = 0; i < COFK_PER_THREAD; i++)
                *(float4 *)p[i] =
                    *(const float4 *)&memory->p[COFK_PER_THREAD * ty + i][first + key];
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int c = 0; c < dim_max / 64; c++) {
                    const float4 value =
                        *(const float4 *)&memory->v[(key + j) * dim_max + 64 * c + 4 * tx];
#pragma unroll
                    for (int i = 0; i < COFK_PER_THREAD; i++) {
                        acc[i][4 * c] =
                            cofk_add_value<is_cut>(p[i][j], value.x, acc[i][4 * c]);
                        acc[i][4 * c + 1] =
                            cofk_add_value<is_cut>(p[i][j], value.y, acc[i][4 * c + 1]);
                        acc[i][4 * c + 2] =
                            cofk_add_value<is_cut>(p[i][j], value.z, acc[i][4 * c + 2]);
                        acc[i][4 * c + 3] =
                            cofk_add_value<is_cut>(p[i][j], value.w, acc[i][4 * c + 3]);
                    }
                }
        }
    }
}

/* One element of o. */
template <class Elem>
COFK_INLINE void cofk_store_output(const struct cofi_exact_arguments &a, int64_t at, float x)
{
    const float pair[2] = {x, 0};
    if (a.o_f32)
        ((float *)a.o)[at] = x;
    else
        ((typename Elem::bits *)a.o)[at] = (typename Elem::bits)Elem::pack(pair);
}

template <class Elem, int dim_max>
__global__ void __launch_bounds__(COFK_THREADS, dim_max <= 128 ? 2 : 1)
cofk_attention_exact(const __grid_constant__ struct cofi_exact_arguments a)
{
    __shared__ __align__(16) struct cofk_exact_memory memory;
    const int tx = (int)threadIdx.x % COFK_SIDE, ty = (int)threadIdx.x / COFK_SIDE;
    const int head = (int)blockIdx.x % a.n_heads, rest = (int)blockIdx.x / a.n_heads;
    const int64_t batch = rest / a.n_tiles;
    /* The last rows first: under a causal mask they have most to do. */
    const int64_t row = (int64_t)(a.n_tiles - 1 - rest % a.n_tiles) * COFK_QUERIES;
    const int64_t left = a.q_rows - row;
    const int n_rows = left < COFK_QUERIES ? (int)left : (int)COFK_QUERIES;
    struct cofk_rows<Elem> q =
        cofk_rows_of<Elem>(a.q, a.q_stride, batch, row, head, a.dim_qk);
    q.n_rows = n_rows;

    struct cofk_row_state state[COFK_PER_THREAD];
    float acc[COFK_PER_THREAD][dim_max / COFK_SIDE];
#pragma unroll
    for (int i = 0; i < COFK_PER_THREAD; i++) {
        state[i].m = -INFINITY;
        state[i].l = 0;
#pragma unroll
        for (int c = 0; c < dim_max / COFK_SIDE; c++)
            acc[i][c] = 0;
    }
    const struct cofi_exact_keys keys = cofi_exact_keys_of(a.limits, row, n_rows, a.k_rows);
    for (int64_t first = keys.begin; first < keys.end; first += COFK_KEYS) {
        float s[COFK_PER_THREAD][COFK_PER_THREAD];
        struct cofk_rows<Elem> k =
            cofk_rows_of<Elem>(a.k, a.k_stride, batch, first, head / a.group, a.dim_qk);
        struct cofk_rows<Elem> v =
            cofk_rows_of<Elem>(a.v, a.v_stride, batch, first, head / a.group, a.dim_v);
        k.n_rows = v.n_rows =
            keys.end - first < COFK_KEYS ? (int)(keys.end - first) : (int)COFK_KEYS;
        cofk_scores(q, k, &memory, s);
#pragma unroll
        for (int i = 0; i < COFK_PER_THREAD; i++) {
            const int at = COFK_PER_THREAD * ty + i;
            const int64_t seen_from = row + at + a.limits.low - first;
            const int64_t seen_to = row + at + a.limits.high - first;
            const float factor =
                cofk_weigh_row(s[i], a.scale, seen_from,
                               seen_to < k.n_rows ? seen_to : k.n_rows - 1, &state[i],
                               memory.p[at]);
#pragma unroll
            for (int c = 0; c < dim_max / COFK_SIDE; c++)
                acc[i][c] *= factor;
        }
        /* keys 0 .. 63 seen by rows 0 .. 63: the same for all threads */
        const bool is_whole = k.n_rows == COFK_KEYS &&
                              row + COFK_QUERIES - 1 + a.limits.low <= first &&
                              row + a.limits.high >= first + COFK_KEYS - 1;
        if (is_whole)
            cofk_add_values<Elem, dim_max, false>(v, &memory, acc);
        else
            cofk_add_values<Elem, dim_max, true>(v, &memory, acc);
    }
#pragma unroll
    for (int i = 0; i < COFK_PER_THREAD; i++) {
        const int at = COFK_PER_THREAD * ty + i;
        const float l = cofk_row_sum(state[i].l);
        if (at >= n_rows)
            continue;
        const int64_t o = batch * a.o_stride.batch + (row + at) * a.o_stride.row +
                          head * a.o_stride.head;
#pragma unroll
        for (int c = 0; c < dim_max / COFK_SIDE; c++) {
            const int dim = 64 * (c / 4) + 4 * tx + c % 4;
            if (dim < a.dim_v)
                cofk_store_output<Elem>(a, o + dim, l == 0 ? 0.0f : acc[i][c] / l);
        }
        if (tx == 0)
            a.lse[batch * a.lse_batch + head * a.lse_head + row + at] =
                l == 0 ? -INFINITY : state[i].m + logf(l);
    }
}

/* ---- which of them -------------------------------------------------------------------------- */

template <class Elem> static const void *kernel_of(int64_t dim_v)
{
    return dim_v <= 64    ? (const void *)cofk_attention_exact<Elem, 64>
           : dim_v <= 128 ? (const void *)cofk_attention_exact<Elem, 128>
           : dim_v <= 256 ? (const void *)cofk_attention_exact<Elem, 256>
                          : (const void *)cofk_attention_exact<Elem, COFI_EXACT_MAX_DIM>;
}

const void *cofi_exact_kernel(enum cofi_elem elem, int64_t dim_v)
{
    switch (elem) {
    case COFI_ELEM_BF16: return kernel_of<cofk_bf16>(dim_v);
    case COFI_ELEM_F16: return kernel_of<cofk_f16>(dim_v);
    default: return kernel_of<cofk_f32>(dim_v);
    }
}

cudaError_t cofi_exact_launch(enum cofi_elem elem, const struct cofi_exact_arguments *arguments,
                              unsigned n_blocks, cudaStream_t stream)
{
    void *list[] = {(void *)arguments};
    return cudaLaunchKernel(cofi_exact_kernel(elem, arguments->dim_v), dim3(n_blocks),
                            dim3(COFK_THREADS), list, 0, stream);
}
