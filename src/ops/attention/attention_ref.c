/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The contract of attention in code: fp64, serial, straight from the formulas. Slow; the checks use
 * attention_ref_fast.c, which tests/unit_attention_ref.c holds against this. */
#include "ops/attention/attention_ref.h"

#include <math.h>

#include "ops/attention/attention_ref_lanes.h"

/* One batch entry and query head: i counts query rows, j the key rows that i sees, d head dims. */
struct head {
    const struct cofi_attention_problem *p;
    const struct cofi_attention_ref *ref;
    int64_t b, h, kv_head;
};

#define Q(i, d) cofi_ref_value(x->p, &x->p->q, x->b, i, x->h, d)
#define K(j, d) cofi_ref_value(x->p, &x->p->k, x->b, j, x->kv_head, d)
#define V(j, d) cofi_ref_value(x->p, &x->p->v, x->b, j, x->kv_head, d)
#define DOUT(i, d) cofi_ref_value(x->p, &x->p->dout, x->b, i, x->h, d)

/* s_ij = scale * sum_d q_id k_jd */
static double score(const struct head *x, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t d = 0; d < x->p->dim_qk; d++)
        sum += (double)Q(i, d) * (double)K(j, d);
    return x->p->scale * sum;
}

static void forward_row(const struct head *x, int64_t i)
{
    const int64_t row = (x->b * x->p->n_heads + x->h) * x->p->n_rows + i, dim = x->p->dim_v;
    const struct cofi_attention_keys seen = cofi_attention_problem_keys(x->p, i);
    double *o = x->ref->o + row * dim, max = -INFINITY, sum = 0;

    /* lse_i = log sum_j exp(s_ij) */
    for (int64_t j = seen.begin; j < seen.end; j++)
        max = fmax(max, score(x, i, j));
    for (int64_t j = seen.begin; j < seen.end; j++)
        sum += exp(score(x, i, j) - max);
    x->ref->lse[row] = max + log(sum);

    /* o_id = sum_j exp(s_ij - lse_i) v_jd */
    for (int64_t d = 0; d < dim; d++)
        o[d] = 0;
    for (int64_t j = seen.begin; j < seen.end; j++)
        for (int64_t d = 0; d < dim; d++)
            o[d] += exp(score(x, i, j) - x->ref->lse[row]) * (double)V(j, d);
}

static void backward_row(const struct head *x, int64_t i)
{
    const struct cofi_attention_problem *p = x->p;
    const int64_t row = (x->b * p->n_heads + x->h) * p->n_rows + i;
    const struct cofi_attention_keys seen = cofi_attention_problem_keys(p, i);

    /* delta_i = sum_d dout_id o_id */
    double delta = 0;
    for (int64_t d = 0; d < p->dim_v; d++)
        delta += (double)DOUT(i, d) * x->ref->o[row * p->dim_v + d];
    x->ref->delta[row] = delta;

    for (int64_t j = seen.begin; j < seen.end; j++) {
        const int64_t key = (x->b * p->n_kv_heads + x->kv_head) * p->n_rows + j;

        /* p_ij = exp(s_ij - lse_i);  ds_ij = p_ij (sum_d dout_id v_jd - delta_i) scale */
        double prob = exp(score(x, i, j) - x->ref->lse[row]), dp = 0;
        for (int64_t d = 0; d < p->dim_v; d++)
            dp += (double)DOUT(i, d) * (double)V(j, d);
        double ds = prob * (dp - delta) * p->scale;

        /* dq_id = sum_j ds_ij k_jd;  dk_jd = sum_h sum_i ds_ij q_id */
        for (int64_t d = 0; d < p->dim_qk; d++) {
            x->ref->dq[row * p->dim_qk + d] += ds * (double)K(j, d);
            x->ref->dk[key * p->dim_qk + d] += ds * (double)Q(i, d);
        }
        /* dv_jd = sum_h sum_i p_ij dout_id */
        for (int64_t d = 0; d < p->dim_v; d++)
            x->ref->dv[key * p->dim_v + d] += prob * (double)DOUT(i, d);
    }
}

static void clear(double *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        values[i] = 0;
}

void cofi_attention_ref(const struct cofi_attention_problem *p,
                        const struct cofi_attention_ref *ref)
{
    const int64_t q_rows = p->n_batch * p->n_heads * p->n_rows;
    const int64_t kv_rows = p->n_batch * p->n_kv_heads * p->n_rows;
    if (p->dout.data) {
        clear(ref->dq, q_rows * p->dim_qk);
        clear(ref->dk, kv_rows * p->dim_qk);
        clear(ref->dv, kv_rows * p->dim_v);
    }
    for (int64_t b = 0; b < p->n_batch; b++)
        for (int64_t h = 0; h < p->n_heads; h++)
            for (int64_t i = 0; i < p->n_rows; i++) {
                struct head x = {p, ref, b, h, h / (p->n_heads / p->n_kv_heads)};
                forward_row(&x, i);
                if (p->dout.data)
                    backward_row(&x, i);
            }
}
