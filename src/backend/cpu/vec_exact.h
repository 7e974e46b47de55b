/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Vector kernels with promised bits: the same from every table, and on devices. Each step is one
 * fp32 operation, rounded to nearest even: vec_exact_tmpl.c is compiled without contraction to FMA.
 * A NaN is stored as the type's quiet NaN with all other bits set, its sign clear. */
#ifndef COFI_VEC_EXACT_H
#define COFI_VEC_EXACT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/tensor.h"

#define COFI_EXACT_SEGMENT 256 /* elements of a row whose squares form one tree */
#define COFI_EXACT_MAX_SOURCES 16

/* sum[i] = src[0][i] + src[1][i] + ...          in this order
 * z[i]   = exact ? sum[i] + residual[i] : round(round(sum[i]) + residual[i])
 * out[i] = round(z[i])
 *
 * Without a residual nothing is added to sum or round(sum). squares: z[i]^2, in segments of 256:
 * within one a balanced binary tree over neighbours, filled up with 0; the segments in order. */
struct cofi_exact_row {
    const void *const *src; /* n_src rows, in the type of sources */
    int n_src;              /* 1 .. 16 */
    int64_t n;
    bool exact;
    const void *residual; /* this and below: NULL where there is none, or it is not wanted */
    void *out;            /* may be `residual`, or a source of the same type */
    float *z;
    float *squares;
};

/* dst[i] = round((z[i] * inv) * weight[i]); with `bias`: * (weight[i] + 1) */
struct cofi_exact_norm {
    void *dst; /* may be `z` of the same type */
    const void *z, *weight;
    enum cofi_elem z_elem, weight_elem; /* the type of dst, or fp32 */
    float inv;
    bool bias;
    int64_t n;
};

struct cofi_exact_ops {
    const char *name; /* "scalar", "avx2", "avx512" */

    /* From sources of a type to a type. */
    void (*row_f32)(const struct cofi_exact_row *row);
    void (*row_bf16)(const struct cofi_exact_row *row);
    void (*row_f16)(const struct cofi_exact_row *row);
    void (*row_f32_to_bf16)(const struct cofi_exact_row *row);
    void (*row_f32_to_f16)(const struct cofi_exact_row *row);

    void (*norm_f32)(const struct cofi_exact_norm *norm);
    void (*norm_bf16)(const struct cofi_exact_norm *norm);
    void (*norm_f16)(const struct cofi_exact_norm *norm);
};

extern const struct cofi_exact_ops cofi_exact_scalar, cofi_exact_avx2, cofi_exact_avx512;

/* The table for cofi_isa(). */
const struct cofi_exact_ops *cofi_exact(void);

/* Of types that are known at run time only: `src` is `elem` or fp32. */
static inline void cofi_exact_row(const struct cofi_exact_ops *ops, enum cofi_elem src,
                                  enum cofi_elem elem, const struct cofi_exact_row *row)
{
    switch (elem) {
    case COFI_ELEM_F32: ops->row_f32(row); break;
    case COFI_ELEM_BF16: (src == elem ? ops->row_bf16 : ops->row_f32_to_bf16)(row); break;
    case COFI_ELEM_F16: (src == elem ? ops->row_f16 : ops->row_f32_to_f16)(row); break;
    }
}

static inline void cofi_exact_norm(const struct cofi_exact_ops *ops, enum cofi_elem elem,
                                   const struct cofi_exact_norm *norm)
{
    switch (elem) {
    case COFI_ELEM_F32: ops->norm_f32(norm); break;
    case COFI_ELEM_BF16: ops->norm_bf16(norm); break;
    case COFI_ELEM_F16: ops->norm_f16(norm); break;
    }
}

#endif
