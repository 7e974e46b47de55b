/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The vector kernels of vec_exact.h, compiled once per instruction set like vec_tmpl.c, and with
 * -ffp-contract=off: a square and the addition of it are two roundings on every machine. */
#include "backend/cpu/vec_exact.h"

#include <string.h>

#ifndef COFI_VEC_SUFFIX
#define COFI_VEC_SUFFIX scalar
#define COFI_VEC_WIDTH 4
#endif

#ifdef __FAST_MATH__
#error "vec_exact_tmpl.c relies on IEEE arithmetic"
#endif

#define W COFI_VEC_WIDTH
#define N_PAIRS 2 /* pairs of vectors that are summed together, to hide the latency of additions */
#define BLOCK (N_PAIRS * 2 * W)
#define N_SUMS (COFI_EXACT_SEGMENT / (2 * W)) /* vectors of sums of two neighbours */
#define INLINE static inline __attribute__((always_inline))

#include "backend/cpu/vec_lanes.h"

_Static_assert(COFI_EXACT_SEGMENT % BLOCK == 0, "a segment is whole blocks");

/* Lanes of two vectors after each other, by groups of 4: the even ones, the odd ones; the order
 * that makes of such a result what even or odd lanes of the whole would be. */
#if W == 4
#define IN_GROUPS(i) i, i + 2, i + 4, i + 6
#define ORDER 0, 1, 2, 3
#define INTERLEAVE(i) i, i + 4, i + 1, i + 5
#elif W == 8
#define IN_GROUPS(i) i, i + 2, i + 8, i + 10, i + 4, i + 6, i + 12, i + 14
#define ORDER 0, 1, 4, 5, 2, 3, 6, 7
#define INTERLEAVE(i) i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11
#else
#define IN_GROUPS(i)                                                                               \
    i, i + 2, i + 16, i + 18, i + 4, i + 6, i + 20, i + 22, i + 8, i + 10, i + 24, i + 26, i + 12, \
        i + 14, i + 28, i + 30
#define ORDER 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15
#define INTERLEAVE(i)                                                                              \
    i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, i + 4, i + 20, i + 5, i + 21, i + 6,   \
        i + 22, i + 7, i + 23
#endif

/* ---- elements ------------------------------------------------------------------------------- */

/* 2 W elements. As bf16 has them in memory, a has the even ones and b the odd ones: that takes no
 * shuffles. Otherwise a has the first W and b the others. The arrangement `as` is that of the type
 * a kernel writes; all it reads comes in the same. */
struct pair {
    vf a, b;
};

INLINE vf one_nan(vf x)
{
    return blend((vi)(x != x), (vf)((vi){0} + 0x7fffffff), x);
}

INLINE vf in_order(vf x)
{
    return __builtin_shufflevector(x, x, ORDER);
}

INLINE struct pair load_pair(enum cofi_elem as, enum cofi_elem elem, const void *src, int64_t i)
{
    const float *word = (const float *)src + i;
    const uint16_t *half = (const uint16_t *)src + i;
    if (elem == COFI_ELEM_BF16) {
        vu both = (vu)*(const vh2_mem *)half;
        return (struct pair){(vf)(both << 16), (vf)(both & 0xffff0000u)};
    }
    if (elem == COFI_ELEM_F16)
        return (struct pair){load_f16(half), load_f16(half + W)};
    struct pair x = {load(word), load(word + W)};
    if (as != COFI_ELEM_BF16)
        return x;
    return (struct pair){in_order(__builtin_shufflevector(x.a, x.b, IN_GROUPS(0))),
                         in_order(__builtin_shufflevector(x.a, x.b, IN_GROUPS(1)))};
}

/* Numbers of the type, or any fp32 for fp32. A bf16 has its NaN already. */
INLINE void store_pair(enum cofi_elem elem, void *dst, int64_t i, struct pair x)
{
    uint16_t *half = (uint16_t *)dst + i;
    if (elem == COFI_ELEM_BF16) {
        *(vh2_mem *)half = (vh2)((vu)x.a >> 16 | (vu)x.b);
    } else if (elem == COFI_ELEM_F16) {
        store_f16(half, one_nan(x.a));
        store_f16(half + W, one_nan(x.b));
    } else {
        store((float *)dst + i, one_nan(x.a));
        store((float *)dst + i + W, one_nan(x.b));
    }
}

INLINE void store_words(enum cofi_elem as, float *dst, int64_t i, struct pair x)
{
    bool split = as == COFI_ELEM_BF16;
    store(dst + i, split ? __builtin_shufflevector(x.a, x.b, INTERLEAVE(0)) : x.a);
    store(dst + i + W, split ? __builtin_shufflevector(x.a, x.b, INTERLEAVE(W / 2)) : x.b);
}

/* To the type and back. A NaN becomes the one that bf16 stores. */
INLINE vf rounded_to_bf16(vf x)
{
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return blend((vi)(x != x), (vf)((vi){0} + 0x7fff0000), (vf)rounded);
}

INLINE struct pair rounded(enum cofi_elem elem, struct pair x)
{
    if (elem == COFI_ELEM_BF16)
        return (struct pair){rounded_to_bf16(x.a), rounded_to_bf16(x.b)};
    if (elem == COFI_ELEM_F16)
        return (struct pair){from_f16(to_f16(x.a)), from_f16(to_f16(x.b))};
    return x;
}

INLINE struct pair plus(struct pair x, struct pair y)
{
    return (struct pair){x.a + y.a, x.b + y.b};
}

/* ---- sums ----------------------------------------------------------------------------------- */

/* Sums of neighbours of x and y after each other, in order. */
INLINE vf neighbours(vf x, vf y)
{
    return in_order(__builtin_shufflevector(x, y, IN_GROUPS(0)) +
                    __builtin_shufflevector(x, y, IN_GROUPS(1)));
}

/* Of squares: the first level of the tree. */
INLINE vf squares_of(enum cofi_elem as, struct pair x)
{
    vf a = x.a * x.a, b = x.b * x.b;
    return as == COFI_ELEM_BF16 ? a + b : neighbours(a, b);
}

INLINE float tree(vf x[N_SUMS])
{
    float lanes[W];
#pragma GCC unroll 8
    for (int n = N_SUMS / 2; n; n /= 2)
#pragma GCC unroll 16
        for (int j = 0; j < n; j++)
            x[j] = neighbours(x[2 * j], x[2 * j + 1]);
    store(lanes, x[0]);
    for (int n = W / 2; n; n /= 2)
        for (int j = 0; j < n; j++)
            lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    return lanes[0];
}

INLINE void row_block(enum cofi_elem src, enum cofi_elem elem, bool exact,
                      const struct cofi_exact_row *row, int64_t i, vf sums[N_PAIRS])
{
    struct pair x[N_PAIRS];
    for (int u = 0; u < N_PAIRS; u++)
        x[u] = load_pair(elem, src, row->src[0], i + u * 2 * W);
    for (int r = 1; r < row->n_src; r++)
        for (int u = 0; u < N_PAIRS; u++)
            x[u] = plus(x[u], load_pair(elem, src, row->src[r], i + u * 2 * W));
    for (int u = 0; u < N_PAIRS; u++)
        x[u] = exact ? x[u] : rounded(elem, x[u]);
    if (row->residual)
        for (int u = 0; u < N_PAIRS; u++) {
            x[u] = plus(x[u], load_pair(elem, elem, row->residual, i + u * 2 * W));
            x[u] = exact ? x[u] : rounded(elem, x[u]);
        }
    if (row->out)
        for (int u = 0; u < N_PAIRS; u++)
            store_pair(elem, row->out, i + u * 2 * W, exact ? rounded(elem, x[u]) : x[u]);
    if (row->z)
        for (int u = 0; u < N_PAIRS; u++)
            store_words(elem, row->z, i + u * 2 * W, x[u]);
    if (row->squares)
        for (int u = 0; u < N_PAIRS; u++)
            sums[u] = squares_of(elem, x[u]);
}

INLINE float row_segment(enum cofi_elem src, enum cofi_elem elem, bool exact,
                         const struct cofi_exact_row *row, int64_t i)
{
    vf sums[N_SUMS];
    for (int j = 0; j < N_SUMS; j += N_PAIRS)
        row_block(src, elem, exact, row, i + j * 2 * W, sums + j);
    return row->squares ? tree(sums) : 0;
}

/* The last n < 256 elements: a segment of their copies, filled up with 0. */
INLINE float row_end(enum cofi_elem src, enum cofi_elem elem, bool exact,
                     const struct cofi_exact_row *row, int64_t i, int64_t n)
{
    float z[COFI_EXACT_SEGMENT], sources[COFI_EXACT_MAX_SOURCES][COFI_EXACT_SEGMENT];
    float residual[COFI_EXACT_SEGMENT] = {0}, out[COFI_EXACT_SEGMENT];
    const void *src_rows[COFI_EXACT_MAX_SOURCES];
    size_t src_bytes = (size_t)cofi_elem_bytes(src), bytes = (size_t)cofi_elem_bytes(elem);
    for (int r = 0; r < row->n_src; r++) {
        memset(sources[r], 0, sizeof sources[r]);
        memcpy(sources[r], (const char *)row->src[r] + (size_t)i * src_bytes,
               (size_t)n * src_bytes);
        src_rows[r] = sources[r];
    }
    if (row->residual)
        memcpy(residual, (const char *)row->residual + (size_t)i * bytes, (size_t)n * bytes);
    const struct cofi_exact_row copy = {.src = src_rows, .n_src = row->n_src,
                                        .residual = row->residual ? residual : NULL,
                                        .out = row->out ? out : NULL, .z = row->z ? z : NULL,
                                        .squares = row->squares};
    float sum = row_segment(src, elem, exact, &copy, 0);
    if (row->out)
        memcpy((char *)row->out + (size_t)i * bytes, out, (size_t)n * bytes);
    if (row->z)
        memcpy(row->z + i, z, (size_t)n * sizeof *z);
    return sum;
}

INLINE void whole_row(enum cofi_elem src, enum cofi_elem elem, bool exact,
                      const struct cofi_exact_row *row)
{
    int64_t i = 0;
    float total = 0;
    for (; i + COFI_EXACT_SEGMENT <= row->n; i += COFI_EXACT_SEGMENT)
        total += row_segment(src, elem, exact, row, i);
    if (i < row->n)
        total += row_end(src, elem, exact, row, i, row->n - i);
    if (row->squares)
        *row->squares = total;
}

/* `exact` as a constant: two loops instead of a choice for every vector; a copy of the row's
 * description: what is stored cannot change it. */
INLINE void any_row(enum cofi_elem src, enum cofi_elem elem, const struct cofi_exact_row *row)
{
    const struct cofi_exact_row copy = *row;
    if (elem == COFI_ELEM_F32 || row->exact) /* in fp32 the same either way */
        whole_row(src, elem, true, &copy);
    else
        whole_row(src, elem, false, &copy);
}

static void row_f32(const struct cofi_exact_row *row)
{
    any_row(COFI_ELEM_F32, COFI_ELEM_F32, row);
}

static void row_bf16(const struct cofi_exact_row *row)
{
    any_row(COFI_ELEM_BF16, COFI_ELEM_BF16, row);
}

static void row_f16(const struct cofi_exact_row *row)
{
    any_row(COFI_ELEM_F16, COFI_ELEM_F16, row);
}

static void row_f32_to_bf16(const struct cofi_exact_row *row)
{
    any_row(COFI_ELEM_F32, COFI_ELEM_BF16, row);
}

static void row_f32_to_f16(const struct cofi_exact_row *row)
{
    any_row(COFI_ELEM_F32, COFI_ELEM_F16, row);
}

/* ---- norms ---------------------------------------------------------------------------------- */

INLINE vf normed(vf z, float inv, vf weight, bool bias)
{
    return (z * inv) * (bias ? weight + 1.0f : weight);
}

INLINE void norm_pair(enum cofi_elem z_elem, enum cofi_elem weight_elem, enum cofi_elem elem,
                      const struct cofi_exact_norm *m, void *dst, const void *z,
                      const void *weight, int64_t i)
{
    struct pair x = load_pair(elem, z_elem, z, i), w = load_pair(elem, weight_elem, weight, i);
    x.a = normed(x.a, m->inv, w.a, m->bias);
    x.b = normed(x.b, m->inv, w.b, m->bias);
    store_pair(elem, dst, i, rounded(elem, x));
}

INLINE void norm(enum cofi_elem z_elem, enum cofi_elem weight_elem, enum cofi_elem elem,
                 const struct cofi_exact_norm *m)
{
    const struct cofi_exact_norm copy = *m; /* as in any_row */
    int64_t i = 0;
    for (; i + 2 * W <= copy.n; i += 2 * W)
        norm_pair(z_elem, weight_elem, elem, &copy, copy.dst, copy.z, copy.weight, i);
    if (i == m->n)
        return;
    float z[2 * W] = {0}, weight[2 * W] = {0}, out[2 * W];
    size_t n = (size_t)(m->n - i), z_bytes = (size_t)cofi_elem_bytes(z_elem);
    size_t weight_bytes = (size_t)cofi_elem_bytes(weight_elem);
    size_t bytes = (size_t)cofi_elem_bytes(elem);
    memcpy(z, (const char *)m->z + (size_t)i * z_bytes, n * z_bytes);
    memcpy(weight, (const char *)m->weight + (size_t)i * weight_bytes, n * weight_bytes);
    norm_pair(z_elem, weight_elem, elem, m, out, z, weight, 0);
    memcpy((char *)m->dst + (size_t)i * bytes, out, n * bytes);
}

INLINE void norm_half(enum cofi_elem elem, const struct cofi_exact_norm *m)
{
    if (m->z_elem == elem && m->weight_elem == elem)
        norm(elem, elem, elem, m);
    else if (m->z_elem == elem)
        norm(elem, COFI_ELEM_F32, elem, m);
    else if (m->weight_elem == elem)
        norm(COFI_ELEM_F32, elem, elem, m);
    else
        norm(COFI_ELEM_F32, COFI_ELEM_F32, elem, m);
}

static void norm_f32(const struct cofi_exact_norm *m)
{
    norm(COFI_ELEM_F32, COFI_ELEM_F32, COFI_ELEM_F32, m);
}

static void norm_bf16(const struct cofi_exact_norm *m)
{
    norm_half(COFI_ELEM_BF16, m);
}

static void norm_f16(const struct cofi_exact_norm *m)
{
    norm_half(COFI_ELEM_F16, m);
}

#define JOIN_TEXT(a, b) a##b
#define JOIN(a, b) JOIN_TEXT(a, b)
#define TEXT_OF(a) #a
#define TEXT(a) TEXT_OF(a)

const struct cofi_exact_ops JOIN(cofi_exact_, COFI_VEC_SUFFIX) = {
    .name = TEXT(COFI_VEC_SUFFIX),
    .row_f32 = row_f32,
    .row_bf16 = row_bf16,
    .row_f16 = row_f16,
    .row_f32_to_bf16 = row_f32_to_bf16,
    .row_f32_to_f16 = row_f32_to_f16,
    .norm_f32 = norm_f32,
    .norm_bf16 = norm_bf16,
    .norm_f16 = norm_f16,
};
