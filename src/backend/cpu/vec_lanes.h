/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Vectors of W fp32 lanes for vec_tmpl.c and vec_exact_tmpl.c, which set W and INLINE: how elements
 * of fp32, bf16 and fp16 become lanes and lanes elements. "half" is either type of 16 bits; `elem`
 * is constant where these are inlined. */
#ifndef COFI_VEC_LANES_H
#define COFI_VEC_LANES_H

#include <stdint.h>

#include "core/tensor.h"

#if (defined(__F16C__) && W == 8) || (defined(__AVX512F__) && W == 16)
#include <immintrin.h>
#define HAS_F16_CONVERSION 1
#endif

/* Vectors wider than the target's registers pass between inlined functions only. */
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint16_t vh2 __attribute__((vector_size(4 * W)));
typedef float vf_mem __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint16_t vh2_mem __attribute__((vector_size(4 * W), aligned(2), may_alias));

#define ODD_LANES_4 1, 3, 5, 7
#define ODD_LANES_8 ODD_LANES_4, 9, 11, 13, 15
#define ODD_LANES_16 ODD_LANES_8, 17, 19, 21, 23, 25, 27, 29, 31
#define ODD_LANES_32                                                                               \
    ODD_LANES_16, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63
#define ODD_LANES_JOIN(n) ODD_LANES_##n
#define ODD_LANES(n) ODD_LANES_JOIN(n)

INLINE vf splat(float x)
{
    return x - (vf){0};
}

INLINE vf load(const float *src)
{
    return *(const vf_mem *)src;
}

INLINE void store(float *dst, vf x)
{
    *(vf_mem *)dst = x;
}

INLINE vf blend(vi mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

INLINE vf load_bf16(const uint16_t *src)
{
    return (vf)(__builtin_convertvector(*(const vh_mem *)src, vu) << 16);
}

/* To nearest, ties to even, in the upper half; a NaN becomes quiet and keeps its upper payload. */
INLINE vu round_bf16(vf x)
{
    vu bits = (vu)x;
    vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (vu)blend((vi)(x != x), (vf)(bits | 0x400000u), (vf)rounded);
}

/* The upper halves are the odd 16-bit lanes (little-endian). */
INLINE void store_bf16(uint16_t *dst, vf x)
{
    vh2 bits = (vh2)round_bf16(x);
    *(vh_mem *)dst = __builtin_shufflevector(bits, bits, ODD_LANES(W));
}

/* Two vectors in one store take half the shuffles. */
INLINE void store_pair_bf16(uint16_t *dst, vf x0, vf x1)
{
    vh2 bits0 = (vh2)round_bf16(x0), bits1 = (vh2)round_bf16(x1);
#if W == 4
    *(vh2_mem *)dst = __builtin_shufflevector(bits0, bits1, ODD_LANES(8));
#elif W == 8
    *(vh2_mem *)dst = __builtin_shufflevector(bits0, bits1, ODD_LANES(16));
#else
    *(vh2_mem *)dst = __builtin_shufflevector(bits0, bits1, ODD_LANES(32));
#endif
}

#ifdef HAS_F16_CONVERSION
#if W == 8
#define F16_TO_F32(x) _mm256_cvtph_ps((__m128i)(x))
#define F32_TO_F16(x) _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT)
#else
#define F16_TO_F32(x) _mm512_cvtph_ps((__m256i)(x))
#define F32_TO_F16(x)                                                                              \
    _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#endif

INLINE vf from_f16(vh x)
{
    return (vf)F16_TO_F32(x);
}

INLINE vh to_f16(vf x)
{
    return (vh)F32_TO_F16(x);
}

#else

/* The exponent of fp16 has 5 bits and bias 15, that of fp32 8 bits and bias 127: with the mantissas
 * aligned, 112 is added to it. A subnormal gets exponent 113, which stands for 2^-14 (1 + m), and
 * loses the 2^-14. Infinity and NaN get 112 once more. */
INLINE vf from_f16(vh bits)
{
    vu half = __builtin_convertvector(bits, vu), size = (half & 0x7fffu) << 13;
    vf small = (vf)(size + (113u << 23)) - 0x1p-14f;
    vu large = size + (224u << 23);
    large |= (vu)((vi)size > 0x0f800000) & 0x400000u;
    vf x = (vf)(size + (112u << 23));
    x = blend((vi)size < 0x00800000, small, x);
    x = blend((vi)size >= 0x0f800000, (vf)large, x);
    return (vf)((vu)x | (half & 0x8000u) << 16);
}

/* Below 2^-14 the unit is 2^-24, that of fp32 in [1/2, 1): adding 1/2 rounds to it and leaves the
 * multiple in the low bits. Above, a carry of the rounding moves the exponent as it should, up to
 * infinity. From 2^16 on there are infinity and NaN only. */
INLINE vh to_f16(vf x)
{
    vu bits = (vu)x, size = bits & 0x7fffffffu;
    vu small = (vu)((vf)size + 0.5f) - 0x3f000000u;
    vu half = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    vu large = 0x7c00u | ((vu)((vi)size > 0x7f800000) & (0x200u | (size >> 13 & 0x3ffu)));
    half = (vu)blend((vi)size < 0x38800000, (vf)small, (vf)half);
    half = (vu)blend((vi)size >= 0x47800000, (vf)large, (vf)half);
    return __builtin_convertvector(half | (bits >> 16 & 0x8000u), vh);
}
#endif

INLINE vf load_f16(const uint16_t *src)
{
    return from_f16(*(const vh_mem *)src);
}

INLINE void store_f16(uint16_t *dst, vf x)
{
    *(vh_mem *)dst = to_f16(x);
}

INLINE vf load_half(enum cofi_elem elem, const uint16_t *src)
{
    return elem == COFI_ELEM_F16 ? load_f16(src) : load_bf16(src);
}

INLINE void store_half(enum cofi_elem elem, uint16_t *dst, vf x)
{
    if (elem == COFI_ELEM_F16)
        store_f16(dst, x);
    else
        store_bf16(dst, x);
}

/* The first n < W elements, then `fill`. */
INLINE vf load_part(const float *src, int64_t n, float fill)
{
    float lanes[W];
    for (int i = 0; i < W; i++)
        lanes[i] = i < n ? src[i] : fill;
    return load(lanes);
}

INLINE void store_part(float *dst, vf x, int64_t n)
{
    float lanes[W];
    store(lanes, x);
    for (int64_t i = 0; i < n; i++)
        dst[i] = lanes[i];
}

INLINE vf load_part_half(enum cofi_elem elem, const uint16_t *src, int64_t n)
{
    uint16_t lanes[W];
    for (int i = 0; i < W; i++)
        lanes[i] = i < n ? src[i] : 0;
    return load_half(elem, lanes);
}

INLINE void store_part_half(enum cofi_elem elem, uint16_t *dst, vf x, int64_t n)
{
    uint16_t lanes[W];
    store_half(elem, lanes, x);
    for (int64_t i = 0; i < n; i++)
        dst[i] = lanes[i];
}

#endif
