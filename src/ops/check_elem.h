/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* bf16 and fp16 for references and checks: plain C, independent of the kernels. To nearest, ties to
 * even, beyond the largest number to infinity; NaN stays NaN. */
#ifndef COFI_CHECK_ELEM_H
#define COFI_CHECK_ELEM_H

#include <math.h>
#include <string.h>

#include "core/tensor.h"

static inline float cofi_check_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t cofi_check_to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint16_t cofi_check_to_bf16(float x)
{
    uint32_t bits = cofi_check_to_bits(x);
    return (uint16_t)((x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float cofi_check_from_bf16(uint16_t x)
{
    return cofi_check_from_bits((uint32_t)x << 16);
}

static inline uint16_t cofi_check_to_f16(float x)
{
    uint32_t bits = cofi_check_to_bits(x), sign = bits >> 16 & 0x8000, half;
    bits &= 0x7fffffff;
    if (x != x)
        half = 0x7e00 | (bits >> 13 & 0x3ff);
    else if (fabsf(x) >= 65520) /* half a unit past the largest number */
        half = 0x7c00;
    else if (fabsf(x) < 0x1p-14f) /* subnormal: a multiple of 2^-24 */
        half = (uint32_t)lrintf(fabsf(x) * 0x1p24f);
    else /* the exponent's bias is 15, not 127 */
        half = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
    return (uint16_t)(sign | half);
}

static inline float cofi_check_from_f16(uint16_t x)
{
    uint32_t exponent = x >> 10 & 31, fraction = x & 0x3ff;
    float size = (float)fraction * 0x1p-24f;
    if (exponent > 0)
        size = cofi_check_from_bits((exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
    return x & 0x8000 ? -size : size;
}

/* As to fp16 and back, without branches: adding 1/2 rounds to a multiple of 2^-24. */
static inline float cofi_check_round_f16(float x)
{
    uint32_t bits = cofi_check_to_bits(fabsf(x));
    float subnormal = (fabsf(x) + 0.5f) - 0.5f;
    float normal = cofi_check_from_bits((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
    float size = fabsf(x) < 0x1p-14f ? subnormal : fabsf(x) >= 65520 ? INFINITY : normal;
    return x != x ? x : copysignf(size, x);
}

static inline float cofi_check_elem_load(const void *data, enum cofi_elem elem, int64_t idx)
{
    return elem == COFI_ELEM_BF16  ? cofi_check_from_bf16(((const uint16_t *)data)[idx])
           : elem == COFI_ELEM_F16 ? cofi_check_from_f16(((const uint16_t *)data)[idx])
                                   : ((const float *)data)[idx];
}

/* x as the type would hold it. */
static inline float cofi_check_elem_round(float x, enum cofi_elem elem)
{
    return elem == COFI_ELEM_BF16  ? cofi_check_from_bf16(cofi_check_to_bf16(x))
           : elem == COFI_ELEM_F16 ? cofi_check_round_f16(x)
                                   : x;
}

#endif
