/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Vector kernels of the CPU back end, one table per instruction set.
 *
 * vec_tmpl.c is compiled once per set, with GCC vector extensions of that set's width; the scalar
 * table has width 4. All follow IEEE: NaN and infinities pass through, nothing is flushed. Rounding
 * to bf16 and fp16 is to nearest even, beyond the largest number to infinity; a NaN becomes quiet
 * and keeps what fits of its payload: the same bits from every table. exp is within 2 ulp of fp32,
 * 0 below the smallest subnormal, exact at -inf (0) and +inf. */
#ifndef COFI_VEC_H
#define COFI_VEC_H

#include <stdint.h>
#include <string.h>

#include "core/tensor.h"

struct cofi_vec_ops {
    const char *name; /* "scalar", "avx2", "avx512" */

    void (*bf16_to_f32)(float *dst, const uint16_t *src, int64_t n);
    void (*f32_to_bf16)(uint16_t *dst, const float *src, int64_t n);
    void (*f16_to_f32)(float *dst, const uint16_t *src, int64_t n);
    void (*f32_to_f16)(uint16_t *dst, const float *src, int64_t n);

    /* dst[i] += src[i] */
    void (*add_f32)(float *dst, const float *src, int64_t n);
    void (*add_bf16)(float *dst, const uint16_t *src, int64_t n);
    void (*add_f16)(float *dst, const uint16_t *src, int64_t n);

    /* x[i] *= factor */
    void (*scale)(float *x, float factor, int64_t n);

    /* sum a[i] * b[i] in fp32 (fixed lane order) */
    float (*dot_f32)(const float *a, const float *b, int64_t n);
    float (*dot_bf16)(const uint16_t *a, const uint16_t *b, int64_t n);
    float (*dot_f16)(const uint16_t *a, const uint16_t *b, int64_t n);

    /* max s[i], NaN if any is; -inf for n = 0 */
    float (*max)(const float *s, int64_t n);

    /* p[i] = exp(scale * s[i] - shift); returns the fp32 sum of the unrounded p. p may be s itself
     * in the fp32 form. */
    float (*exp_f32)(float *p, const float *s, float scale, float shift, int64_t n);
    float (*exp_bf16)(uint16_t *p, const float *s, float scale, float shift, int64_t n);

    /* p[i] = exp(scale * s[i] - lse);  ds[i] = p[i] * (dp[i] - delta) * scale.
     * p may be s and ds may be dp in the fp32 form. */
    void (*softmax_grad_f32)(float *p, float *ds, const float *s, const float *dp, float scale,
                             float lse, float delta, int64_t n);
    void (*softmax_grad_bf16)(uint16_t *p, uint16_t *ds, const float *s, const float *dp,
                              float scale, float lse, float delta, int64_t n);
};

extern const struct cofi_vec_ops cofi_vec_scalar, cofi_vec_avx2, cofi_vec_avx512;

enum cofi_isa { COFI_ISA_SCALAR, COFI_ISA_AVX2, COFI_ISA_AVX512, COFI_ISA_AVX512_BF16 };

/* The highest set of this processor, capped by COFUSE_CPU_ISA; lower it for the whole process with
 * cofi_isa_cap (ranks agree on the common one). "scalar", "avx2", "avx512", "avx512_bf16". */
enum cofi_isa cofi_isa(void);
void cofi_isa_cap(enum cofi_isa isa);
const char *cofi_isa_name(enum cofi_isa isa);

/* The table for cofi_isa(). */
const struct cofi_vec_ops *cofi_vec(void);

/* The kernels of an element type that is known at run time only. */

static inline void cofi_vec_load(const struct cofi_vec_ops *vec, enum cofi_elem elem, float *dst,
                                 const void *src, int64_t n)
{
    switch (elem) {
    case COFI_ELEM_F32: memcpy(dst, src, (size_t)n * sizeof *dst); break;
    case COFI_ELEM_BF16: vec->bf16_to_f32(dst, src, n); break;
    case COFI_ELEM_F16: vec->f16_to_f32(dst, src, n); break;
    }
}

static inline void cofi_vec_store(const struct cofi_vec_ops *vec, enum cofi_elem elem, void *dst,
                                  const float *src, int64_t n)
{
    switch (elem) {
    case COFI_ELEM_F32: memcpy(dst, src, (size_t)n * sizeof *src); break;
    case COFI_ELEM_BF16: vec->f32_to_bf16(dst, src, n); break;
    case COFI_ELEM_F16: vec->f32_to_f16(dst, src, n); break;
    }
}

static inline void cofi_vec_add(const struct cofi_vec_ops *vec, enum cofi_elem elem, float *dst,
                                const void *src, int64_t n)
{
    switch (elem) {
    case COFI_ELEM_F32: vec->add_f32(dst, src, n); break;
    case COFI_ELEM_BF16: vec->add_bf16(dst, src, n); break;
    case COFI_ELEM_F16: vec->add_f16(dst, src, n); break;
    }
}

static inline float cofi_vec_dot(const struct cofi_vec_ops *vec, enum cofi_elem elem,
                                 const void *a, const void *b, int64_t n)
{
    return elem == COFI_ELEM_BF16  ? vec->dot_bf16(a, b, n)
           : elem == COFI_ELEM_F16 ? vec->dot_f16(a, b, n)
                                   : vec->dot_f32(a, b, n);
}

#endif
