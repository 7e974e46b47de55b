/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The vector kernels of vec_gate.h, compiled once per instruction set like vec_tmpl.c. A tail goes
 * through a vector on the stack by the same arithmetic; its other lanes are 0 where they are read
 * and dropped where they are written. */
#include "backend/cpu/vec_gate.h"

#ifndef COFI_VEC_SUFFIX
#define COFI_VEC_SUFFIX scalar
#define COFI_VEC_WIDTH 4
#endif

#ifdef __FAST_MATH__
#error "vec_gate_tmpl.c relies on IEEE arithmetic"
#endif

#define W COFI_VEC_WIDTH
#define INLINE static inline __attribute__((always_inline))

#include "backend/cpu/vec_exp.h"
#include "backend/cpu/vec_lanes.h"

/* Elements i .. i + W - 1 of n. */
INLINE vf at(const float *x, int64_t i, int64_t n)
{
    return n - i >= W ? load(x + i) : load_part(x + i, n - i, 0);
}

INLINE void put(float *dst, int64_t i, int64_t n, vf x)
{
    if (n - i >= W)
        store(dst + i, x);
    else
        store_part(dst + i, x, n - i);
}

/* Lanes past n become 0. */
INLINE vf cut_at(vf x, int64_t i, int64_t n)
{
    float lanes[W];
    if (n - i >= W)
        return x;
    store(lanes, x);
    return load_part(lanes, n - i, 0);
}

INLINE void sigmoid_block(vf x[N_EXP])
{
    EACH x[u] = -x[u];
    exp_block(x);
    EACH x[u] = 1.0f / (1.0f + x[u]);
}

/* ---- norms of a row ------------------------------------------------------------------------- */

static float sum(const float *x, int64_t n)
{
    vf sums[2] = {{0}, {0}};
    for (int64_t i = 0; i < n; i += 2 * W) {
        sums[0] += at(x, i, n);
        if (i + W < n)
            sums[1] += at(x, i + W, n);
    }
    return sum_lanes(sums[0] + sums[1]);
}

/* x - mean: subtracted in two steps, of which the first is exact for what is near the mean. */
INLINE vf centred(const struct cofi_norm_row *row, int64_t i)
{
    return (at(row->x, i, row->n) - row->mean) - row->shift;
}

static void norm(float *dst, struct cofi_norm_row *row)
{
    const int64_t n = row->n;
    vf sums = {0}, squares = {0};
    row->mean = sum(row->x, n) / (float)n;
    for (int64_t i = 0; i < n; i += W) {
        vf d = cut_at(at(row->x, i, n) - row->mean, i, n);
        sums += d;
        squares += d * d;
    }
    row->shift = sum_lanes(sums) / (float)n;
    float var = sum_lanes(squares) / (float)n - row->shift * row->shift;
    var = var < 0 ? 0 : var; /* of equal elements, by rounding */
    row->rstd = 1 / __builtin_sqrtf(var + row->eps);
    for (int64_t i = 0; i < n; i += W)
        put(dst, i, n, centred(row, i) * row->rstd * at(row->gain, i, n) + at(row->bias, i, n));
}

static void norm_grad(float *dx, const float *dy, const struct cofi_norm_row *row, float *d_gain,
                      float *d_bias)
{
    const int64_t n = row->n;
    vf sums = {0}, sums_z = {0};
    for (int64_t i = 0; i < n; i += W) {
        vf y = at(dy, i, n), z = centred(row, i) * row->rstd;
        vf dz = y * at(row->gain, i, n);
        sums += dz;
        sums_z += cut_at(dz * z, i, n);
        if (d_gain) {
            put(d_gain, i, n, at(d_gain, i, n) + y * z);
            put(d_bias, i, n, at(d_bias, i, n) + y);
        }
    }
    const float dz_mean = sum_lanes(sums) / (float)n, dzz_mean = sum_lanes(sums_z) / (float)n;
    for (int64_t i = 0; i < n; i += W) {
        vf z = centred(row, i) * row->rstd, dz = at(dy, i, n) * at(row->gain, i, n);
        put(dx, i, n, row->rstd * (dz - dz_mean - z * dzz_mean));
    }
}

/* ---- norms across rows ---------------------------------------------------------------------- */

static void add_squares(float *acc, const float *x, const float *mean, int64_t n)
{
    for (int64_t i = 0; i < n; i += W) {
        vf d = at(x, i, n) - at(mean, i, n);
        put(acc, i, n, at(acc, i, n) + d * d);
    }
}

static void rstd(float *var, float count, float eps, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        var[i] = 1 / __builtin_sqrtf(var[i] / count + eps);
}

static void norm_across(float *dst, float *z, const float *x, const float *mean, const float *rstds,
                        float gain, float bias, int64_t n)
{
    for (int64_t i = 0; i < n; i += W) {
        vf v = (at(x, i, n) - at(mean, i, n)) * at(rstds, i, n);
        put(z, i, n, v);
        put(dst, i, n, v * gain + bias);
    }
}

static void add_grads(float *sums, float *sums_z, const float *dy, const float *z, float gain,
                      int64_t n)
{
    for (int64_t i = 0; i < n; i += W) {
        vf dz = at(dy, i, n) * gain;
        put(sums, i, n, at(sums, i, n) + dz);
        put(sums_z, i, n, at(sums_z, i, n) + dz * at(z, i, n));
    }
}

static void norm_grad_across(float *dst, const float *dy, const float *z, const float *rstds,
                             const float *sums, const float *sums_z, float gain, float count,
                             int64_t n)
{
    const float part = 1 / count;
    for (int64_t i = 0; i < n; i += W) {
        vf d = at(dy, i, n) * gain - at(sums, i, n) * part - at(z, i, n) * at(sums_z, i, n) * part;
        put(dst, i, n, at(rstds, i, n) * d);
    }
}

/* ---- gates ---------------------------------------------------------------------------------- */

/* N_EXP vectors from i on, as far as there are any; the others are 0. */
#define EACH_OF(i, n) for (int u = 0; u < N_EXP && (i) + u * W < (n); u++)

static void gate(float *dst, const struct cofi_gate_row *r)
{
    for (int64_t i = 0; i < r->n; i += N_EXP * W) {
        vf s[N_EXP] = {{0}};
        EACH_OF(i, r->n) s[u] = at(r->g, i + u * W, r->n) + r->g_bias;
        sigmoid_block(s);
        EACH_OF(i, r->n) {
            vf y = (at(r->p, i + u * W, r->n) + r->p_bias) * s[u];
            put(dst, i + u * W, r->n, r->mask ? y * at(r->mask, i + u * W, r->n) : y);
        }
    }
}

static void gate_grad(float *dp, float *dg, const float *dy, const struct cofi_gate_row *r)
{
    for (int64_t i = 0; i < r->n; i += N_EXP * W) {
        vf s[N_EXP] = {{0}};
        EACH_OF(i, r->n) s[u] = at(r->g, i + u * W, r->n) + r->g_bias;
        sigmoid_block(s);
        EACH_OF(i, r->n) {
            vf y = at(dy, i + u * W, r->n), value = at(r->p, i + u * W, r->n) + r->p_bias;
            y = (r->mask ? y * at(r->mask, i + u * W, r->n) : y) * s[u];
            put(dp, i + u * W, r->n, y);
            put(dg, i + u * W, r->n, y * value * (1.0f - s[u]));
        }
    }
}

static void out_gate(float *dst, const float *p, const float *p_bias, const float *g,
                     const float *g_bias, const float *add, int64_t n)
{
    for (int64_t i = 0; i < n; i += N_EXP * W) {
        vf s[N_EXP] = {{0}};
        EACH_OF(i, n) s[u] = at(g, i + u * W, n) + at(g_bias, i + u * W, n);
        sigmoid_block(s);
        EACH_OF(i, n) {
            vf y = (at(p, i + u * W, n) + at(p_bias, i + u * W, n)) * s[u];
            put(dst, i + u * W, n, add ? y + at(add, i + u * W, n) : y);
        }
    }
}

static void out_gate_grad(float *dp, float *dg, const float *dy, const float *p,
                          const float *p_bias, const float *g, const float *g_bias, int64_t n)
{
    for (int64_t i = 0; i < n; i += N_EXP * W) {
        vf s[N_EXP] = {{0}};
        EACH_OF(i, n) s[u] = at(g, i + u * W, n) + at(g_bias, i + u * W, n);
        sigmoid_block(s);
        EACH_OF(i, n) {
            vf y = at(dy, i + u * W, n) * s[u];
            vf value = at(p, i + u * W, n) + at(p_bias, i + u * W, n);
            put(dp, i + u * W, n, y);
            put(dg, i + u * W, n, y * value * (1.0f - s[u]));
        }
    }
}

#define JOIN_TEXT(a, b) a##b
#define JOIN(a, b) JOIN_TEXT(a, b)
#define TEXT_OF(a) #a
#define TEXT(a) TEXT_OF(a)

const struct cofi_gate_ops JOIN(cofi_gate_, COFI_VEC_SUFFIX) = {
    .name = TEXT(COFI_VEC_SUFFIX),
    .norm = norm,
    .norm_grad = norm_grad,
    .add_squares = add_squares,
    .rstd = rstd,
    .norm_across = norm_across,
    .add_grads = add_grads,
    .norm_grad_across = norm_grad_across,
    .gate = gate,
    .gate_grad = gate_grad,
    .out_gate = out_gate,
    .out_gate_grad = out_gate_grad,
    .sum = sum,
};
