/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Vector kernels of layer norms and of gates by a sigmoid, forward and backward, in fp32; one table
 * per instruction set, as in vec.h. An element's result depends on its inputs alone, a sum along a
 * row on n, the width and the order of its elements. NaN and infinities pass through.
 *
 * "row" kernels walk one row of n elements whose norm they take; "rows across" kernels walk one of
 * many rows, element i of each belonging to norm i. */
#ifndef COFI_VEC_GATE_H
#define COFI_VEC_GATE_H

#include <stdint.h>

/* A row and its statistics. */
struct cofi_norm_row {
    const float *x;
    const float *gain, *bias;
    float eps;
    int64_t n;
    float mean, shift, rstd; /* made by norm, read by norm_grad; mean + shift is the mean: of rows
                                far from 0, fp32 has it to their ulp only */
};

/* value = p + p_bias, gate = g + g_bias; each a scalar for all elements. */
struct cofi_gate_row {
    const float *p, *g;
    float p_bias, g_bias;
    const float *mask; /* NULL: ones */
    int64_t n;
};

struct cofi_gate_ops {
    const char *name; /* "scalar", "avx2", "avx512" */

    /* dst[i] = (x[i] - mean - shift) rstd gain[i] + bias[i]; sets these. dst may be x. */
    void (*norm)(float *dst, struct cofi_norm_row *row);
    /* dx[i] = rstd (dz[i] - mean(dz) - z[i] mean(dz z)), dz = dy gain, z = (x - mean - shift) rstd;
     * d_gain[i] += dy[i] z[i], d_bias[i] += dy[i], unless NULL (both are). dx may be dy. */
    void (*norm_grad)(float *dx, const float *dy, const struct cofi_norm_row *row, float *d_gain,
                      float *d_bias);

    /* Rows across. acc[i] += (x[i] - mean[i])^2 */
    void (*add_squares)(float *acc, const float *x, const float *mean, int64_t n);
    /* var[i] becomes 1 / sqrt(var[i] / count + eps) */
    void (*rstd)(float *var, float count, float eps, int64_t n);
    /* z[i] = (x[i] - mean[i]) rstd[i];  dst[i] = z[i] gain + bias. z may be x; dst may be either */
    void (*norm_across)(float *dst, float *z, const float *x, const float *mean, const float *rstd,
                        float gain, float bias, int64_t n);
    /* sum[i] += dy[i] gain;  sum_z[i] += dy[i] gain z[i] */
    void (*add_grads)(float *sum, float *sum_z, const float *dy, const float *z, float gain,
                      int64_t n);
    /* dst[i] = rstd[i] (dy[i] gain - sum[i] / count - z[i] sum_z[i] / count). dst may be dy. */
    void (*norm_grad_across)(float *dst, const float *dy, const float *z, const float *rstd,
                             const float *sum, const float *sum_z, float gain, float count,
                             int64_t n);

    /* dst[i] = value[i] sigmoid(gate[i]) mask[i] */
    void (*gate)(float *dst, const struct cofi_gate_row *row);
    /* With s = sigmoid(gate): dp[i] = dy[i] s mask[i];  dg[i] = dy[i] value[i] s (1 - s) mask[i].
     * dp may be row->p, dg row->g. */
    void (*gate_grad)(float *dp, float *dg, const float *dy, const struct cofi_gate_row *row);

    /* dst[i] = (p[i] + p_bias[i]) sigmoid(g[i] + g_bias[i]) + add[i]; add = NULL: zeros.
     * dst may be p. */
    void (*out_gate)(float *dst, const float *p, const float *p_bias, const float *g,
                     const float *g_bias, const float *add, int64_t n);
    /* As gate_grad, of out_gate; dp may be p, dg may be g. */
    void (*out_gate_grad)(float *dp, float *dg, const float *dy, const float *p,
                          const float *p_bias, const float *g, const float *g_bias, int64_t n);

    /* Sum of x[i], in a fixed order. */
    float (*sum)(const float *x, int64_t n);
};

extern const struct cofi_gate_ops cofi_gate_scalar, cofi_gate_avx2, cofi_gate_avx512;

/* The table for cofi_isa(). */
const struct cofi_gate_ops *cofi_gate(void);

#endif
