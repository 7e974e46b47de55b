/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The vector kernels of vec_exact.h, compiled once per instruction set like vec_tmpl.c, and with
 * -ffp-contract=off: a square and the addition of it are two roundings on every machine. */
#include "backend/cpu/vec_exact.h"

#ifndef COFI_VEC_SUFFIX
#define COFI_VEC_SUFFIX scalar
#define COFI_VEC_WIDTH 4
#endif

#ifdef __FAST_MATH__
#error "vec_exact_tmpl.c relies on IEEE arithmetic"
#endif

#define W COFI_VEC_WIDTH
#define N_BLOCK 4 /* vectors that are summed together: enough to hide the latency of an addition */
#define N_SQUARES (COFI_EXACT_SEGMENT / W)
#define INLINE static inline __attribute__((always_inline))

#include "backend/cpu/vec_lanes.h"

_Static_assert(N_SQUARES % N_BLOCK == 0, "a segment is whole blocks");

#define EVEN_LANES_4 0, 2, 4, 6
#define EVEN_LANES_8 EVEN_LANES_4, 8, 10, 12, 14
#define EVEN_LANES_16 EVEN_LANES_8, 16, 18, 20, 22, 24, 26, 28, 30
#define EVEN_LANES_JOIN(n) EVEN_LANES_##n
#define EVEN_LANES(n) EVEN_LANES_JOIN(n)

/* ---- elements ------------------------------------------------------------------------------- */

INLINE vf load_elem(enum cofi_elem elem, const void *src, int64_t i)
{
    return elem == COFI_ELEM_F32 ? load((const float *)src + i)
                                 : load_half(elem, (const uint16_t *)src + i);
}

/* The first n < W elements, then +0. */
INLINE vf load_part_elem(enum cofi_elem elem, const void *src, int64_t i, int64_t n)
{
    return elem == COFI_ELEM_F32 ? load_part((const float *)src + i, n, 0)
                                 : load_part_half(elem, (const uint16_t *)src + i, n);
}

INLINE vf one_nan(vf x)
{
    return blend((vi)(x != x), (vf)((vi){0} + 0x7fffffff), x);
}

INLINE void store_elem(enum cofi_elem elem, void *dst, int64_t i, vf x)
{
    if (elem == COFI_ELEM_F32)
        store((float *)dst + i, one_nan(x));
    else
        store_half(elem, (uint16_t *)dst + i, one_nan(x));
}

INLINE void store_part_elem(enum cofi_elem elem, void *dst, int64_t i, vf x, int64_t n)
{
    if (elem == COFI_ELEM_F32)
        store_part((float *)dst + i, one_nan(x), n);
    else
        store_part_half(elem, (uint16_t *)dst + i, one_nan(x), n);
}

INLINE void store_block(enum cofi_elem elem, void *dst, int64_t i, const vf x[N_BLOCK])
{
    for (int u = 0; u < N_BLOCK; u += 2)
        if (elem == COFI_ELEM_BF16) {
            store_pair_bf16((uint16_t *)dst + i + u * W, one_nan(x[u]), one_nan(x[u + 1]));
        } else {
            store_elem(elem, dst, i + u * W, x[u]);
            store_elem(elem, dst, i + (u + 1) * W, x[u + 1]);
        }
}

/* To the type and back. */
INLINE vf rounded(enum cofi_elem elem, vf x)
{
    return elem == COFI_ELEM_BF16  ? (vf)(round_bf16(x) & 0xffff0000u)
           : elem == COFI_ELEM_F16 ? from_f16(to_f16(x))
                                   : x;
}

/* ---- sums ----------------------------------------------------------------------------------- */

INLINE vf add_residual(enum cofi_elem elem, bool exact, vf sum, vf residual)
{
    return exact ? sum + residual : rounded(elem, rounded(elem, sum) + residual);
}

INLINE void row_block(enum cofi_elem src, enum cofi_elem elem, bool exact,
                      const struct cofi_exact_row *row, int64_t i, vf squares[N_BLOCK])
{
    vf x[N_BLOCK];
    for (int u = 0; u < N_BLOCK; u++)
        x[u] = load_elem(src, row->src[0], i + u * W);
    for (int r = 1; r < row->n_src; r++)
        for (int u = 0; u < N_BLOCK; u++)
            x[u] += load_elem(src, row->src[r], i + u * W);
    if (row->residual)
        for (int u = 0; u < N_BLOCK; u++)
            x[u] = add_residual(elem, exact, x[u], load_elem(elem, row->residual, i + u * W));
    else if (!exact)
        for (int u = 0; u < N_BLOCK; u++)
            x[u] = rounded(elem, x[u]);
    if (row->out)
        store_block(elem, row->out, i, x);
    if (row->z)
        for (int u = 0; u < N_BLOCK; u++)
            store(row->z + i + u * W, x[u]);
    for (int u = 0; u < N_BLOCK; u++)
        squares[u] = x[u] * x[u];
}

/* n <= W elements. */
INLINE vf row_part(enum cofi_elem src, enum cofi_elem elem, bool exact,
                   const struct cofi_exact_row *row, int64_t i, int64_t n)
{
    vf x = load_part_elem(src, row->src[0], i, n);
    for (int r = 1; r < row->n_src; r++)
        x += load_part_elem(src, row->src[r], i, n);
    if (row->residual)
        x = add_residual(elem, exact, x, load_part_elem(elem, row->residual, i, n));
    else if (!exact)
        x = rounded(elem, x);
    if (row->out)
        store_part_elem(elem, row->out, i, x, n);
    if (row->z)
        store_part(row->z + i, x, n);
    return x * x; /* what was filled up is +0 */
}

/* Sums of neighbours: half as many vectors. */
INLINE void tree_level(vf *x, int n)
{
    for (int j = 0; j < n / 2; j++)
        x[j] = __builtin_shufflevector(x[2 * j], x[2 * j + 1], EVEN_LANES(W)) +
               __builtin_shufflevector(x[2 * j], x[2 * j + 1], ODD_LANES(W));
}

INLINE float tree(vf x[N_SQUARES])
{
    float lanes[W];
    if (N_SQUARES > 32)
        tree_level(x, 64);
    if (N_SQUARES > 16)
        tree_level(x, 32);
    tree_level(x, 16);
    tree_level(x, 8);
    tree_level(x, 4);
    tree_level(x, 2);
    store(lanes, x[0]);
    for (int n = W / 2; n; n /= 2)
        for (int j = 0; j < n; j++)
            lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    return lanes[0];
}

INLINE void whole_row(enum cofi_elem src, enum cofi_elem elem, bool exact,
                      const struct cofi_exact_row *row)
{
    vf squares[N_SQUARES];
    int64_t i = 0;
    float total = 0;
    for (; i + COFI_EXACT_SEGMENT <= row->n; i += COFI_EXACT_SEGMENT) {
        for (int j = 0; j < N_SQUARES; j += N_BLOCK)
            row_block(src, elem, exact, row, i + j * W, squares + j);
        if (row->squares)
            total += tree(squares);
    }
    if (i < row->n) {
        for (int j = 0; j < N_SQUARES; j++) {
            int64_t at = i + j * W, n = row->n - at < W ? row->n - at : W;
            squares[j] = n > 0 ? row_part(src, elem, exact, row, at, n) : (vf){0};
        }
        if (row->squares)
            total += tree(squares);
    }
    if (row->squares)
        *row->squares = total;
}

/* `exact` as a constant: two loops instead of a choice for every vector. */
INLINE void any_row(enum cofi_elem src, enum cofi_elem elem, const struct cofi_exact_row *row)
{
    if (row->exact)
        whole_row(src, elem, true, row);
    else
        whole_row(src, elem, false, row);
}

static void row_f32(const struct cofi_exact_row *row)
{
    whole_row(COFI_ELEM_F32, COFI_ELEM_F32, true, row); /* the same either way */
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

INLINE void norm(enum cofi_elem elem, enum cofi_elem weight_elem, void *dst, const float *z,
                 float inv, const void *weight, bool bias, int64_t n)
{
    int64_t i = 0;
    for (; i + N_BLOCK * W <= n; i += N_BLOCK * W) {
        vf x[N_BLOCK];
        for (int u = 0; u < N_BLOCK; u++)
            x[u] = normed(load(z + i + u * W), inv, load_elem(weight_elem, weight, i + u * W),
                          bias);
        store_block(elem, dst, i, x);
    }
    for (int64_t k; i < n; i += k) {
        k = n - i < W ? n - i : W;
        vf x = normed(load_part(z + i, k, 0), inv, load_part_elem(weight_elem, weight, i, k), bias);
        store_part_elem(elem, dst, i, x, k);
    }
}

#define NORM(name, elem, weight_elem)                                                              \
    static void name(void *dst, const float *z, float inv, const void *weight, bool bias,          \
                     int64_t n)                                                                    \
    {                                                                                              \
        norm(elem, weight_elem, dst, z, inv, weight, bias, n);                                     \
    }

NORM(norm_f32, COFI_ELEM_F32, COFI_ELEM_F32)
NORM(norm_bf16, COFI_ELEM_BF16, COFI_ELEM_BF16)
NORM(norm_f16, COFI_ELEM_F16, COFI_ELEM_F16)
NORM(norm_bf16_w32, COFI_ELEM_BF16, COFI_ELEM_F32)
NORM(norm_f16_w32, COFI_ELEM_F16, COFI_ELEM_F32)

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
    .norm_bf16_w32 = norm_bf16_w32,
    .norm_f16_w32 = norm_f16_w32,
};
