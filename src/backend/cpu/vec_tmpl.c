/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The vector kernels of vec.h, compiled once per instruction set:
 *     -DCOFI_VEC_SUFFIX=scalar -DCOFI_VEC_WIDTH=4     the baseline: any compiler's 128-bit vectors
 *     -DCOFI_VEC_SUFFIX=avx2   -DCOFI_VEC_WIDTH=8     with -mavx2 -mfma -mf16c
 *     -DCOFI_VEC_SUFFIX=avx512 -DCOFI_VEC_WIDTH=16    with -mavx512f and its kin
 *
 * A tail shorter than a vector goes through a vector on the stack, by the same arithmetic, so an
 * element's result depends on its value alone, and nothing past n is read or written. Sums depend
 * on n, the width and the order of elements. Never compile this with -ffast-math: NaN tests are
 * x != x, and rounding to an integer adds and subtracts 1.5 * 2^23. */
#include <stdint.h>

#include "backend/cpu/vec.h"

#ifndef COFI_VEC_SUFFIX
#define COFI_VEC_SUFFIX scalar
#define COFI_VEC_WIDTH 4
#endif

#ifdef __FAST_MATH__
#error "vec_tmpl.c relies on IEEE arithmetic"
#endif

#define W COFI_VEC_WIDTH
#define N_UNROLL 4 /* enough independent sums to hide the latency of an addition */
#define EACH_PAIR for (int u = 0; u < N_EXP; u += 2)
#define INLINE static inline __attribute__((always_inline))

#include "backend/cpu/vec_exp.h"
#include "backend/cpu/vec_lanes.h"

INLINE float sum_all(const vf sums[N_UNROLL])
{
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

INLINE void half_to_f32(enum cofi_elem elem, float *dst, const uint16_t *src, int64_t n)
{
    int64_t i = 0;
    for (; i + W <= n; i += W)
        store(dst + i, load_half(elem, src + i));
    if (i < n)
        store_part(dst + i, load_part_half(elem, src + i, n - i), n - i);
}

static void bf16_to_f32(float *dst, const uint16_t *src, int64_t n)
{
    half_to_f32(COFI_ELEM_BF16, dst, src, n);
}

static void f16_to_f32(float *dst, const uint16_t *src, int64_t n)
{
    half_to_f32(COFI_ELEM_F16, dst, src, n);
}

static void f32_to_bf16(uint16_t *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        store_pair_bf16(dst + i, load(src + i), load(src + i + W));
    for (; i + W <= n; i += W)
        store_bf16(dst + i, load(src + i));
    if (i < n)
        store_part_half(COFI_ELEM_BF16, dst + i, load_part(src + i, n - i, 0), n - i);
}

static void f32_to_f16(uint16_t *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + W <= n; i += W)
        store_f16(dst + i, load(src + i));
    if (i < n)
        store_part_half(COFI_ELEM_F16, dst + i, load_part(src + i, n - i, 0), n - i);
}

static void add_f32(float *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + W <= n; i += W)
        store(dst + i, load(dst + i) + load(src + i));
    if (i < n)
        store_part(dst + i, load_part(dst + i, n - i, 0) + load_part(src + i, n - i, 0), n - i);
}

INLINE void add_half(enum cofi_elem elem, float *dst, const uint16_t *src, int64_t n)
{
    int64_t i = 0;
    for (; i + W <= n; i += W)
        store(dst + i, load(dst + i) + load_half(elem, src + i));
    if (i < n)
        store_part(dst + i, load_part(dst + i, n - i, 0) + load_part_half(elem, src + i, n - i),
                   n - i);
}

static void add_bf16(float *dst, const uint16_t *src, int64_t n)
{
    add_half(COFI_ELEM_BF16, dst, src, n);
}

static void add_f16(float *dst, const uint16_t *src, int64_t n)
{
    add_half(COFI_ELEM_F16, dst, src, n);
}

static void scale(float *x, float factor, int64_t n)
{
    int64_t i = 0;
    for (; i + W <= n; i += W)
        store(x + i, load(x + i) * factor);
    if (i < n)
        store_part(x + i, load_part(x + i, n - i, 0) * factor, n - i);
}

static float dot_f32(const float *a, const float *b, int64_t n)
{
    vf sums[N_UNROLL] = {{0}};
    int64_t i = 0;
    for (; i + N_UNROLL * W <= n; i += N_UNROLL * W)
        for (int u = 0; u < N_UNROLL; u++)
            sums[u] += load(a + i + u * W) * load(b + i + u * W);
    for (; i + W <= n; i += W)
        sums[0] += load(a + i) * load(b + i);
    if (i < n)
        sums[1] += load_part(a + i, n - i, 0) * load_part(b + i, n - i, 0);
    return sum_all(sums);
}

INLINE float dot_half(enum cofi_elem elem, const uint16_t *a, const uint16_t *b, int64_t n)
{
    vf sums[N_UNROLL] = {{0}};
    int64_t i = 0;
    for (; i + N_UNROLL * W <= n; i += N_UNROLL * W)
        for (int u = 0; u < N_UNROLL; u++)
            sums[u] += load_half(elem, a + i + u * W) * load_half(elem, b + i + u * W);
    for (; i + W <= n; i += W)
        sums[0] += load_half(elem, a + i) * load_half(elem, b + i);
    if (i < n)
        sums[1] += load_part_half(elem, a + i, n - i) * load_part_half(elem, b + i, n - i);
    return sum_all(sums);
}

static float dot_bf16(const uint16_t *a, const uint16_t *b, int64_t n)
{
    return dot_half(COFI_ELEM_BF16, a, b, n);
}

static float dot_f16(const uint16_t *a, const uint16_t *b, int64_t n)
{
    return dot_half(COFI_ELEM_F16, a, b, n);
}

/* A NaN in `top` stays: nothing is greater than it. */
INLINE vf max_keeping_nan(vf top, vf x)
{
    return blend((vi)(x > top) | (vi)(x != x), x, top);
}

static float max(const float *s, int64_t n)
{
    vf tops[N_UNROLL];
    for (int u = 0; u < N_UNROLL; u++)
        tops[u] = splat(-__builtin_inff());
    int64_t i = 0;
    for (; i + N_UNROLL * W <= n; i += N_UNROLL * W)
        for (int u = 0; u < N_UNROLL; u++)
            tops[u] = max_keeping_nan(tops[u], load(s + i + u * W));
    for (; i + W <= n; i += W)
        tops[0] = max_keeping_nan(tops[0], load(s + i));
    if (i < n)
        tops[1] = max_keeping_nan(tops[1], load_part(s + i, n - i, -__builtin_inff()));

    float lanes[W], top = -__builtin_inff();
    store(lanes, max_keeping_nan(max_keeping_nan(tops[0], tops[1]),
                                 max_keeping_nan(tops[2], tops[3])));
    for (int j = 0; j < W; j++)
        top = lanes[j] > top || lanes[j] != lanes[j] ? lanes[j] : top;
    return top;
}

/* Zeroes the lanes from n on, which a tail must not add to the sum. */
INLINE vf cut(vf x, int64_t n)
{
    float lanes[W];
    store(lanes, x);
    return load_part(lanes, n, 0);
}

/* x * factor, rounded: not to be contracted to an FMA with the subtraction that follows. The
 * callers subtract the largest of these products (or its like), and only between rounded products
 * is the difference 0 there; what an FMA would leave of a score of 1e10 is hundreds. */
INLINE vf times(vf x, float factor)
{
    vf product = x * factor;
#if defined(__AVX512F__) && W == 16
    __asm__("" : "+v"(product));
#elif defined(__AVX__) && W == 8
    __asm__("" : "+x"(product));
#elif defined(__FMA__) || !defined(__x86_64__)
    __asm__("" : "+m"(product));
#endif
    return product;
}

static float exp_f32(float *p, const float *s, float scale, float shift, int64_t n)
{
    vf sums[N_UNROLL] = {{0}};
    int64_t i = 0;
    for (; i + N_EXP * W <= n; i += N_EXP * W) {
        vf x[N_EXP];
        EACH x[u] = times(load(s + i + u * W), scale) - shift;
        exp_block(x);
        EACH store(p + i + u * W, x[u]);
        EACH sums[u] += x[u];
    }
    for (; i + W <= n; i += W) {
        vf e = exp_one(times(load(s + i), scale) - shift);
        store(p + i, e);
        sums[0] += e;
    }
    if (i < n) {
        vf e = exp_one(times(load_part(s + i, n - i, 0), scale) - shift);
        store_part(p + i, e, n - i);
        sums[1] += cut(e, n - i);
    }
    return sum_all(sums);
}

static float exp_bf16(uint16_t *p, const float *s, float scale, float shift, int64_t n)
{
    vf sums[N_UNROLL] = {{0}};
    int64_t i = 0;
    for (; i + N_EXP * W <= n; i += N_EXP * W) {
        vf x[N_EXP];
        EACH x[u] = times(load(s + i + u * W), scale) - shift;
        exp_block(x);
        EACH_PAIR store_pair_bf16(p + i + u * W, x[u], x[u + 1]);
        EACH sums[u] += x[u];
    }
    for (; i + W <= n; i += W) {
        vf e = exp_one(times(load(s + i), scale) - shift);
        store_bf16(p + i, e);
        sums[0] += e;
    }
    if (i < n) {
        vf e = exp_one(times(load_part(s + i, n - i, 0), scale) - shift);
        store_part_half(COFI_ELEM_BF16, p + i, e, n - i);
        sums[1] += cut(e, n - i);
    }
    return sum_all(sums);
}

static void softmax_grad_f32(float *p, float *ds, const float *s, const float *dp, float scale,
                             float lse, float delta, int64_t n)
{
    int64_t i = 0;
    for (; i + N_EXP * W <= n; i += N_EXP * W) {
        vf x[N_EXP], d[N_EXP];
        EACH x[u] = times(load(s + i + u * W), scale) - lse;
        exp_block(x);
        EACH d[u] = x[u] * (load(dp + i + u * W) - delta) * scale;
        EACH store(p + i + u * W, x[u]);
        EACH store(ds + i + u * W, d[u]);
    }
    for (int64_t k; i < n; i += k) {
        k = n - i < W ? n - i : W;
        vf e = exp_one(times(load_part(s + i, k, 0), scale) - lse);
        vf d = e * (load_part(dp + i, k, 0) - delta) * scale;
        store_part(p + i, e, k);
        store_part(ds + i, d, k);
    }
}

static void softmax_grad_bf16(uint16_t *p, uint16_t *ds, const float *s, const float *dp,
                              float scale, float lse, float delta, int64_t n)
{
    int64_t i = 0;
    for (; i + N_EXP * W <= n; i += N_EXP * W) {
        vf x[N_EXP], d[N_EXP];
        EACH x[u] = times(load(s + i + u * W), scale) - lse;
        exp_block(x);
        EACH d[u] = x[u] * (load(dp + i + u * W) - delta) * scale;
        EACH_PAIR store_pair_bf16(p + i + u * W, x[u], x[u + 1]);
        EACH_PAIR store_pair_bf16(ds + i + u * W, d[u], d[u + 1]);
    }
    for (int64_t k; i < n; i += k) {
        k = n - i < W ? n - i : W;
        vf e = exp_one(times(load_part(s + i, k, 0), scale) - lse);
        vf d = e * (load_part(dp + i, k, 0) - delta) * scale;
        store_part_half(COFI_ELEM_BF16, p + i, e, k);
        store_part_half(COFI_ELEM_BF16, ds + i, d, k);
    }
}

#define JOIN_TEXT(a, b) a##b
#define JOIN(a, b) JOIN_TEXT(a, b)
#define TEXT_OF(a) #a
#define TEXT(a) TEXT_OF(a)

const struct cofi_vec_ops JOIN(cofi_vec_, COFI_VEC_SUFFIX) = {
    .name = TEXT(COFI_VEC_SUFFIX),
    .bf16_to_f32 = bf16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .f16_to_f32 = f16_to_f32,
    .f32_to_f16 = f32_to_f16,
    .add_f32 = add_f32,
    .add_bf16 = add_bf16,
    .add_f16 = add_f16,
    .scale = scale,
    .dot_f32 = dot_f32,
    .dot_bf16 = dot_bf16,
    .dot_f16 = dot_f16,
    .max = max,
    .exp_f32 = exp_f32,
    .exp_bf16 = exp_bf16,
    .softmax_grad_f32 = softmax_grad_f32,
    .softmax_grad_bf16 = softmax_grad_bf16,
};
