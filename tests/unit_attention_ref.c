/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The attention reference: o and lse against the formula written once more, gradients against
 * central differences of the loss sum(dout * o); the plain implementation against the reference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/attention/attention_ref.h"
#include "ops/check.h"

#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "unit_attention_ref.c:%d: %s [%s]\n", __LINE__, #cond, now);           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { MAX = 20000 };

static char now[100];
static float in_q[MAX], in_k[MAX], in_v[MAX], in_dout[MAX];
static double r_o[MAX], r_lse[MAX], r_delta[MAX], r_dq[MAX], r_dk[MAX], r_dv[MAX];
static double s_o[MAX], s_lse[MAX], s_delta[MAX], s_dq[MAX], s_dk[MAX], s_dv[MAX];
static float p_o[MAX], p_lse[MAX], p_delta[MAX], p_dq[MAX], p_dk[MAX], p_dv[MAX];

static const struct cofi_attention_ref ref = {r_o, r_lse, r_delta, r_dq, r_dk, r_dv};
static const struct cofi_attention_ref other = {s_o, s_lse, s_delta, s_dq, s_dk, s_dv};
static const struct cofi_attention_plain plain = {p_o, p_lse, p_delta, p_dq, p_dk, p_dv};

static void fill(float *x, uint32_t seed)
{
    for (int i = 0; i < MAX; i++) {
        seed = seed * 1664525 + 1013904223;
        x[i] = (float)((int)(seed >> 16) % 1024 - 512) / 256; /* a step of 2^-12 stays exact */
    }
}

static struct cofi_attention_view view(float *data, int64_t rows, int64_t heads, int64_t dim)
{
    return (struct cofi_attention_view){data, rows * heads * dim, heads * dim, dim};
}

static double loss(const struct cofi_attention_problem *p)
{
    double sum = 0;
    REQUIRE(cofi_attention_ref_all(p, &other) == COF_OK);
    for (int64_t b = 0; b < p->n_batch; b++)
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < p->n_rows; i++)
                for (int64_t d = 0; d < p->dim_v; d++)
                    sum += s_o[((b * p->n_heads + h) * p->n_rows + i) * p->dim_v + d] *
                           in_dout[((b * p->n_rows + i) * p->n_heads + h) * p->dim_v + d];
    return sum;
}

/* d loss / d x[at] by central differences against `grad`. */
static void check_gradient(const struct cofi_attention_problem *p, float *x, int64_t at,
                           double grad)
{
    const float step = 1.0f / 4096, saved = x[at];
    x[at] = saved + step;
    double up = loss(p);
    x[at] = saved - step;
    double down = loss(p);
    x[at] = saved;
    REQUIRE(fabs((up - down) / (2 * step) - grad) < 1e-6 * (1 + fabs(grad)));
}

static void check_forward(const struct cofi_attention_problem *p)
{
    int64_t g = p->n_heads / p->n_kv_heads;
    for (int64_t b = 0; b < p->n_batch; b++)
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < p->n_rows; i++) {
                int64_t at = (b * p->n_heads + h) * p->n_rows + i;
                double sum = 0, o[64] = {0};
                for (int64_t j = 0; j < p->n_rows; j++) {
                    double s = 0;
                    if ((p->mask == COF_MASK_CAUSAL && j > i) ||
                        (p->has_window && ((p->window.left >= 0 && j < i - p->window.left) ||
                                           (p->window.right >= 0 && j > i + p->window.right))))
                        continue;
                    int64_t kv = (b * p->n_rows + j) * p->n_kv_heads + h / g;
                    for (int64_t d = 0; d < p->dim_qk; d++)
                        s += (double)in_q[((b * p->n_rows + i) * p->n_heads + h) * p->dim_qk + d] *
                             in_k[kv * p->dim_qk + d];
                    sum += exp(p->scale * s);
                    for (int64_t d = 0; d < p->dim_v; d++)
                        o[d] += exp(p->scale * s) * in_v[kv * p->dim_v + d];
                }
                REQUIRE(fabs(r_lse[at] - log(sum)) < 1e-12 * (1 + fabs(r_lse[at])));
                for (int64_t d = 0; d < p->dim_v; d++)
                    REQUIRE(fabs(r_o[at * p->dim_v + d] - o[d] / sum) < 1e-12);
            }
}

static void check_backward(const struct cofi_attention_problem *p)
{
    for (int64_t n = 0; n < 24; n++) { /* scattered elements, all heads in turn */
        int64_t b = n % p->n_batch, i = n * 7 % p->n_rows, h = n % p->n_heads;
        int64_t kv = n % p->n_kv_heads, d = n * 3 % p->dim_qk, e = n * 5 % p->dim_v;
        check_gradient(p, in_q, ((b * p->n_rows + i) * p->n_heads + h) * p->dim_qk + d,
                       r_dq[((b * p->n_heads + h) * p->n_rows + i) * p->dim_qk + d]);
        check_gradient(p, in_k, ((b * p->n_rows + i) * p->n_kv_heads + kv) * p->dim_qk + d,
                       r_dk[((b * p->n_kv_heads + kv) * p->n_rows + i) * p->dim_qk + d]);
        check_gradient(p, in_v, ((b * p->n_rows + i) * p->n_kv_heads + kv) * p->dim_v + e,
                       r_dv[((b * p->n_kv_heads + kv) * p->n_rows + i) * p->dim_v + e]);
    }
}

static void check_near(const float *x, const double *y, int64_t n, double bound)
{
    double err = 0, most = 1e-3;
    for (int64_t i = 0; i < n; i++) {
        err = fmax(err, fabs(x[i] - y[i]));
        most = fmax(most, fabs(y[i]));
    }
    REQUIRE(err <= bound * most);
}

/* fp32: a few units in the last place; bf16 and fp16 (of rounded inputs): a few 2^-8, 2^-11. */
static void check_plain(struct cofi_attention_problem p, double bound)
{
    int64_t nq = p.n_batch * p.n_heads * p.n_rows, nk = p.n_batch * p.n_kv_heads * p.n_rows;
    REQUIRE(cofi_attention_ref_all(&p, &ref) == COF_OK);
    REQUIRE(cofi_attention_plain_all(&p, &plain) == COF_OK);
    check_near(p_o, r_o, nq * p.dim_v, bound);
    check_near(p_lse, r_lse, nq, bound);
    check_near(p_dq, r_dq, nq * p.dim_qk, bound);
    check_near(p_dk, r_dk, nk * p.dim_qk, bound);
    check_near(p_dv, r_dv, nk * p.dim_v, bound);
}

static void check_half(struct cofi_attention_problem p, cof_dtype dtype, double bound)
{
    static uint16_t half[4][MAX];
    float *from[4] = {in_q, in_k, in_v, in_dout};
    struct cofi_attention_view *to[4] = {&p.q, &p.k, &p.v, &p.dout};
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < MAX; i++)
            cofi_check_store(half[t], dtype, i, from[t][i]);
        to[t]->data = half[t];
    }
    p.elem = cofi_elem_of(dtype);
    check_plain(p, bound);
}

static void check_same(const double *x, const double *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        REQUIRE(x[i] == y[i] || fabs(x[i] - y[i]) <= 1e-12 * (1 + fabs(y[i])) ||
                (isnan(x[i]) && isnan(y[i])));
}

/* The fast reference is the one by the formulas. */
static void check_formulas(const struct cofi_attention_problem *p)
{
    int64_t nq = p->n_batch * p->n_heads * p->n_rows, nk = p->n_batch * p->n_kv_heads * p->n_rows;
    cofi_attention_ref(p, &other);
    check_same(r_o, s_o, nq * p->dim_v);
    check_same(r_lse, s_lse, nq);
    check_same(r_delta, s_delta, nq);
    check_same(r_dq, s_dq, nq * p->dim_qk);
    check_same(r_dk, s_dk, nk * p->dim_qk);
    check_same(r_dv, s_dv, nk * p->dim_v);
}

/* A NaN or an infinity reaches the results that the formulas take it to, and no other. */
static void check_poison(const struct cofi_attention_problem *p)
{
    float *inputs[] = {in_q, in_k, in_v, in_dout};
    const float poison[] = {NAN, INFINITY, -INFINITY};
    for (int t = 0; t < 4; t++)
        for (int n = 0; n < 3; n++) {
            int64_t at = p->n_rows / 2 * p->n_kv_heads * (t == 2 ? p->dim_v : p->dim_qk);
            float saved = inputs[t][at];
            inputs[t][at] = poison[n];
            REQUIRE(cofi_attention_ref_all(p, &ref) == COF_OK);
            check_formulas(p);
            inputs[t][at] = saved;
        }
    REQUIRE(cofi_attention_ref_all(p, &ref) == COF_OK);
}

/* Pieces of any cut give the same bits as the whole. */
static void check_pieces(const struct cofi_attention_problem *p)
{
    int64_t cut = p->n_rows / 3;
    for (int64_t b = 0; b < p->n_batch; b++)
        for (int part = 0; part < 2; part++) {
            int64_t begin = part ? cut : 0, end = part ? p->n_rows : cut;
            for (int64_t h = 0; h < p->n_heads; h++) {
                REQUIRE(!cofi_attention_ref_forward(p, &other, b, h, begin, end));
                REQUIRE(!cofi_attention_ref_dq(p, &ref, b, h, begin, end));
            }
            for (int64_t h = 0; h < p->n_kv_heads; h++)
                REQUIRE(!cofi_attention_ref_dkv(p, &ref, b, h, begin, end));
        }
    int64_t n = p->n_batch * p->n_heads * p->n_rows;
    REQUIRE(memcmp(s_o, r_o, (size_t)(n * p->dim_v) * sizeof *r_o) == 0);
    REQUIRE(memcmp(s_lse, r_lse, (size_t)n * sizeof *r_lse) == 0);
}

int main(void)
{
    static const int64_t shapes[][6] = {/* B S H Hkv Dqk Dv */
                                        {1, 1, 1, 1, 4, 4},  {1, 5, 2, 1, 5, 3},
                                        {2, 17, 4, 2, 8, 8}, {1, 33, 3, 3, 6, 12},
                                        {1, 40, 4, 1, 16, 5}};
    static const cof_window windows[] = {{-1, -1}, {0, 0}, {3, 1}, {-1, 2}, {18, -1}};
    enum { N_MASKS = 2, N_WINDOWS = sizeof windows / sizeof windows[0] };
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++)
        for (int m = 0; m < N_MASKS * N_WINDOWS; m++) {
            const int64_t *s = shapes[n];
            int mask = m % N_MASKS, window = m / N_MASKS;
            snprintf(now, sizeof now, "shape %d mask %d window %d", (int)n, mask, window);
            fill(in_q, 1), fill(in_k, 2), fill(in_v, 3), fill(in_dout, 4);
            struct cofi_attention_problem p = {
                .n_batch = s[0], .n_rows = s[1], .n_heads = s[2], .n_kv_heads = s[3],
                .dim_qk = s[4], .dim_v = s[5], .mask = (cof_mask)mask, .has_window = window > 0,
                .window = windows[window], .scale = 0.3,
                .q = view(in_q, s[1], s[2], s[4]), .k = view(in_k, s[1], s[3], s[4]),
                .v = view(in_v, s[1], s[3], s[5]), .dout = view(in_dout, s[1], s[2], s[5])};
            REQUIRE(cofi_attention_ref_all(&p, &ref) == COF_OK);
            check_formulas(&p);
            check_poison(&p);
            check_forward(&p);
            check_backward(&p);
            check_pieces(&p);
            check_plain(p, 4e-6);
            check_half(p, COF_BF16, 0.03);
            check_half(p, COF_F16, 0.03 / 8);
        }
    return 0;
}
