/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Unblocked attention in pieces, for the bulk of the checks: included once for fp64 (the reference,
 * attention_ref_fast.c) and once for fp32 (the plain implementation, attention_plain.c), which
 * define
 *
 *     REAL            the type of all arithmetic
 *     MATH(name)      name or namef, the function of that type
 *     ROUNDED(p, x)   x as an unfused program would store it in a tensor of the problem's type
 *     RESULT          the struct of results
 *     NAME(part)      the public function of that part
 *
 * LANES rows (of queries, or in dkv of keys) are computed side by side; all else follows the
 * formulas of attention_ref.c, with which tests/unit_attention_ref.c compares it. */
#include <math.h>
#include <stdlib.h>

#include "core/error.h"
#include "ops/attention/attention_ref_lanes.h"

enum { LANES = COFI_ATTENTION_REF_LANES };

/* A vector of the compiler's, and how many of them make a row of lanes. */
typedef REAL vec __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
enum { N_VECS = LANES * sizeof(REAL) / sizeof(vec) };

/* out_jr = sum_d x_jd y_dr */
COFI_REF_CLONES
static void dot_lanes(REAL (*out)[LANES], const REAL *x, REAL (*y)[LANES], int64_t n, int64_t dim)
{
    for (int64_t j = 0; j < n; j++) {
        vec sum[N_VECS] = {{0}};
        for (int64_t d = 0; d < dim; d++)
            for (int v = 0; v < N_VECS; v++)
                sum[v] += x[j * dim + d] * ((const vec *)y[d])[v];
        for (int v = 0; v < N_VECS; v++)
            ((vec *)out[j])[v] = sum[v];
    }
}

/* acc_dr += sum_j w_jr x_jd */
COFI_REF_CLONES
static void sum_lanes(REAL (*acc)[LANES], REAL (*w)[LANES], const REAL *x, int64_t n, int64_t dim)
{
    for (int64_t j = 0; j < n; j++) {
        vec wj[N_VECS];
        for (int v = 0; v < N_VECS; v++)
            wj[v] = ((const vec *)w[j])[v];
        for (int64_t d = 0; d < dim; d++)
            for (int v = 0; v < N_VECS; v++)
                ((vec *)acc[d])[v] += wj[v] * x[j * dim + d];
    }
}

/* All rows of one head, [n_rows, dim]. */
static REAL *head_rows(const struct cofi_attention_problem *p, const struct cofi_attention_view *v,
                        int64_t batch, int64_t head, int64_t dim)
{
    REAL *rows = malloc((size_t)(p->n_rows * dim + 1) * sizeof *rows);
    for (int64_t i = 0; rows && i < p->n_rows; i++)
        for (int64_t d = 0; d < dim; d++)
            rows[i * dim + d] = cofi_ref_value(p, v, batch, i, head, d);
    return rows;
}

/* Rows begin .. begin+n-1 of a head as lanes; lanes past n are 0. */
static void head_lanes(const struct cofi_attention_problem *p, const struct cofi_attention_view *v,
                       int64_t batch, int64_t head, int64_t dim, int64_t begin, int64_t n,
                       REAL (*lanes)[LANES])
{
    for (int64_t d = 0; d < dim; d++)
        for (int64_t r = 0; r < LANES; r++)
            lanes[d][r] = r < n ? cofi_ref_value(p, v, batch, begin + r, head, d) : 0;
}

static bool visible(const struct cofi_attention_problem *p, int64_t i, int64_t j)
{
    const struct cofi_attention_keys seen = cofi_attention_problem_keys(p, i);
    return j >= seen.begin && j < seen.end;
}

/* Keys 0 .. end-1 hold all that rows before row_end see. */
static int64_t keys_end(const struct cofi_attention_problem *p, int64_t row_end)
{
    int64_t last = row_end < p->n_rows ? row_end - 1 : p->n_rows - 1;
    return cofi_attention_problem_keys(p, last).end;
}

/* Of n rows from `first` on those that all lanes see, or that see all lanes. */
static struct cofi_attention_keys common(const struct cofi_attention_problem *p, int64_t lane_row,
                                         int64_t n_lanes, int64_t first, int64_t n,
                                         bool lanes_are_queries)
{
    const int64_t last = lane_row + n_lanes - 1;
    struct cofi_attention_keys all = {first, first + n};
    if (lanes_are_queries) {
        all.begin = cofi_attention_problem_keys(p, last).begin;
        all.end = cofi_attention_problem_keys(p, lane_row).end;
    } else {
        if (p->mask == COF_MASK_CAUSAL)
            all.begin = last;
        else if (p->has_window && p->window.right >= 0 && p->window.right < last)
            all.begin = last - p->window.right;
        if (p->has_window && p->window.left >= 0 && p->window.left < p->n_rows - lane_row)
            all.end = lane_row + p->window.left + 1;
    }
    all.begin = (all.begin < first ? first : all.begin) - first;
    all.end = (all.end > first + n ? first + n : all.end) - first;
    return all;
}

struct buffers {
    REAL *k, *v;                   /* whole heads */
    REAL (*s)[LANES], (*t)[LANES]; /* scores and their like, [n_rows][LANES] */
    REAL (*a)[LANES], (*b)[LANES], (*x)[LANES], (*y)[LANES]; /* [dim][LANES] */
};

static void buffers_free(struct buffers *b)
{
    free(b->k);
    free(b->v);
    free(b->s);
}

static cof_status buffers_alloc(const struct cofi_attention_problem *p, struct buffers *b,
                                REAL *k, REAL *v)
{
    int64_t dim = p->dim_qk > p->dim_v ? p->dim_qk : p->dim_v;
    b->k = k;
    b->v = v;
    b->s = malloc((size_t)(2 * p->n_rows + 4 * dim) * sizeof *b->s);
    if (!b->k || !b->v || !b->s) {
        buffers_free(b);
        return COF_FAIL(COF_ERR_NOMEM, "attention reference: no memory for a head of %lld rows",
                        (long long)p->n_rows);
    }
    b->t = b->s + p->n_rows;
    b->a = b->t + p->n_rows;
    b->b = b->a + dim;
    b->x = b->b + dim;
    b->y = b->x + dim;
    return COF_OK;
}

static void clear(REAL (*lanes)[LANES], int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int r = 0; r < LANES; r++)
            lanes[i][r] = 0;
}

/* acc_dr += sum_j w_jr x_jd over the j that lane r sees: a NaN must not come through a weight of 0.
 * Lanes are queries lane_row .. and j keys, or the other way round; j counts from `first`. */
static void sum_visible(const struct cofi_attention_problem *p, REAL (*acc)[LANES],
                        REAL (*w)[LANES], const REAL *x, int64_t n, int64_t dim, int64_t lane_row,
                        int64_t n_lanes, int64_t first, bool lanes_are_queries)
{
    const struct cofi_attention_keys all = common(p, lane_row, n_lanes, first, n,
                                                  lanes_are_queries);
    for (int64_t j = 0; j < n; j++) {
        if (j == all.begin && all.begin < all.end) {
            sum_lanes(acc, w + j, x + j * dim, all.end - j, dim);
            j = all.end;
            if (j == n)
                return;
        }
        for (int64_t r = 0; r < n_lanes; r++)
            if (lanes_are_queries ? visible(p, lane_row + r, first + j)
                                  : visible(p, first + j, lane_row + r))
                for (int64_t d = 0; d < dim; d++)
                    acc[d][r] += w[j][r] * x[j * dim + d];
    }
}

static void forward_lanes(const struct cofi_attention_problem *p,
                          const struct RESULT *result, struct buffers *b,
                          int64_t batch, int64_t head, int64_t row, int64_t n)
{
    int64_t n_keys = keys_end(p, row + n), at = (batch * p->n_heads + head) * p->n_rows + row;
    head_lanes(p, &p->q, batch, head, p->dim_qk, row, n, b->x);

    /* s_ij = round(scale * sum_d q_id k_jd), or -inf where j is hidden from i */
    dot_lanes(b->s, b->k, b->x, n_keys, p->dim_qk);
    for (int64_t j = 0; j < n_keys; j++)
        for (int r = 0; r < LANES; r++)
            b->s[j][r] = visible(p, row + r, j) ? ROUNDED(p, (REAL)p->scale * b->s[j][r])
                                                : -INFINITY;

    /* m_i = max_j s_ij;  l_i = sum_j exp(s_ij - m_i);  lse_i = m_i + log l_i;
     * p_ij = round(exp(s_ij - m_i) / l_i) */
    for (int r = 0; r < n; r++) {
        REAL m = -INFINITY, l = 0;
        for (int64_t j = 0; j < n_keys; j++)
            m = b->s[j][r] > m || b->s[j][r] != b->s[j][r] ? b->s[j][r] : m;
        for (int64_t j = 0; j < n_keys; j++)
            l += b->s[j][r] = visible(p, row + r, j) ? MATH(exp)(b->s[j][r] - m) : 0;
        result->lse[at + r] = m + MATH(log)(l);
        for (int64_t j = 0; j < n_keys; j++)
            b->s[j][r] = ROUNDED(p, b->s[j][r] / l);
    }

    /* o_id = round(sum_j p_ij v_jd);  delta_i = sum_d dout_id o_id */
    clear(b->a, p->dim_v);
    sum_visible(p, b->a, b->s, b->v, n_keys, p->dim_v, row, n, 0, true);
    for (int r = 0; r < n; r++) {
        REAL delta = 0;
        for (int64_t d = 0; d < p->dim_v; d++) {
            REAL o = result->o[(at + r) * p->dim_v + d] = ROUNDED(p, b->a[d][r]);
            if (p->dout.data)
                delta += o * cofi_ref_value(p, &p->dout, batch, row + r, head, d);
        }
        if (p->dout.data)
            result->delta[at + r] = delta;
    }
}

/* p_ij = round(exp(s_ij - lse_i)), 0 where j is hidden; left in s.
 * ds_ij = round(p_ij (dp_ij - delta_i) scale); left in t. */
static void softmax_grad(const struct cofi_attention_problem *p, bool is_visible, REAL lse,
                         REAL delta, REAL *s, REAL *t)
{
    REAL score = ROUNDED(p, (REAL)p->scale * *s);
    REAL prob = is_visible ? ROUNDED(p, MATH(exp)(score - lse)) : 0;
    *t = ROUNDED(p, prob * (*t - delta) * (REAL)p->scale);
    *s = prob;
}

static void dq_lanes(const struct cofi_attention_problem *p,
                     const struct RESULT *result, struct buffers *b, int64_t batch,
                     int64_t head, int64_t row, int64_t n)
{
    int64_t n_keys = keys_end(p, row + n), at = (batch * p->n_heads + head) * p->n_rows + row;
    head_lanes(p, &p->q, batch, head, p->dim_qk, row, n, b->x);
    head_lanes(p, &p->dout, batch, head, p->dim_v, row, n, b->y);

    /* dp_ij = sum_d dout_id v_jd */
    dot_lanes(b->s, b->k, b->x, n_keys, p->dim_qk);
    dot_lanes(b->t, b->v, b->y, n_keys, p->dim_v);
    for (int64_t j = 0; j < n_keys; j++)
        for (int r = 0; r < n; r++)
            softmax_grad(p, visible(p, row + r, j), result->lse[at + r], result->delta[at + r],
                         &b->s[j][r], &b->t[j][r]);

    /* dq_id = round(sum_j ds_ij k_jd) */
    clear(b->a, p->dim_qk);
    sum_visible(p, b->a, b->t, b->k, n_keys, p->dim_qk, row, n, 0, true);
    for (int r = 0; r < n; r++)
        for (int64_t d = 0; d < p->dim_qk; d++)
            result->dq[(at + r) * p->dim_qk + d] = ROUNDED(p, b->a[d][r]);
}

/* One query head's part in dk and dv of the key rows in the lanes; k is that head's q and v its
 * dout here: rows are queries, lanes keys. */
static void dkv_lanes(const struct cofi_attention_problem *p,
                      const struct RESULT *result, struct buffers *b, int64_t batch,
                      int64_t head, int64_t row, int64_t n)
{
    int64_t first = p->mask == COF_MASK_CAUSAL ? row : 0, n_queries = p->n_rows - first;
    int64_t at = (batch * p->n_heads + head) * p->n_rows + first;
    const REAL *q = b->k + first * p->dim_qk, *dout = b->v + first * p->dim_v;

    dot_lanes(b->s, q, b->x, n_queries, p->dim_qk);
    dot_lanes(b->t, dout, b->y, n_queries, p->dim_v);
    for (int64_t i = 0; i < n_queries; i++)
        for (int r = 0; r < LANES; r++)
            softmax_grad(p, r < n && visible(p, first + i, row + r), result->lse[at + i],
                         result->delta[at + i], &b->s[i][r], &b->t[i][r]);

    /* dk_jd = round(sum_h sum_i ds_ij q_id);  dv_jd = round(sum_h sum_i p_ij dout_id) */
    sum_visible(p, b->a, b->t, q, n_queries, p->dim_qk, row, n, first, false);
    sum_visible(p, b->b, b->s, dout, n_queries, p->dim_v, row, n, first, false);
}

cof_status NAME(forward)(const struct cofi_attention_problem *p,
                                      const struct RESULT *result, int64_t batch,
                                      int64_t head, int64_t row_begin, int64_t row_end)
{
    int64_t kv_head = head / (p->n_heads / p->n_kv_heads);
    struct buffers b;
    COF_TRY(buffers_alloc(p, &b, head_rows(p, &p->k, batch, kv_head, p->dim_qk),
                          head_rows(p, &p->v, batch, kv_head, p->dim_v)));
    for (int64_t row = row_begin; row < row_end; row += LANES)
        forward_lanes(p, result, &b, batch, head, row,
                      row_end - row < LANES ? row_end - row : LANES);
    buffers_free(&b);
    return COF_OK;
}

cof_status NAME(dq)(const struct cofi_attention_problem *p,
                                   const struct RESULT *result, int64_t batch,
                                   int64_t head, int64_t row_begin, int64_t row_end)
{
    int64_t kv_head = head / (p->n_heads / p->n_kv_heads);
    struct buffers b;
    COF_TRY(buffers_alloc(p, &b, head_rows(p, &p->k, batch, kv_head, p->dim_qk),
                          head_rows(p, &p->v, batch, kv_head, p->dim_v)));
    for (int64_t row = row_begin; row < row_end; row += LANES)
        dq_lanes(p, result, &b, batch, head, row, row_end - row < LANES ? row_end - row : LANES);
    buffers_free(&b);
    return COF_OK;
}

/* One query head's part of dk and dv, added to what result holds. */
static cof_status dkv_head(const struct cofi_attention_problem *p,
                           const struct RESULT *result, int64_t batch, int64_t head,
                           int64_t row_begin, int64_t row_end)
{
    int64_t kv_head = head / (p->n_heads / p->n_kv_heads);
    struct buffers b;
    COF_TRY(buffers_alloc(p, &b, head_rows(p, &p->q, batch, head, p->dim_qk),
                          head_rows(p, &p->dout, batch, head, p->dim_v)));
    for (int64_t row = row_begin; row < row_end; row += LANES) {
        int64_t n = row_end - row < LANES ? row_end - row : LANES;
        int64_t at = (batch * p->n_kv_heads + kv_head) * p->n_rows + row;
        head_lanes(p, &p->k, batch, kv_head, p->dim_qk, row, n, b.x);
        head_lanes(p, &p->v, batch, kv_head, p->dim_v, row, n, b.y);
        clear(b.a, p->dim_qk);
        clear(b.b, p->dim_v);
        dkv_lanes(p, result, &b, batch, head, row, n);
        for (int r = 0; r < n; r++) {
            for (int64_t d = 0; d < p->dim_qk; d++)
                result->dk[(at + r) * p->dim_qk + d] += b.a[d][r];
            for (int64_t d = 0; d < p->dim_v; d++)
                result->dv[(at + r) * p->dim_v + d] += b.b[d][r];
        }
    }
    buffers_free(&b);
    return COF_OK;
}

cof_status NAME(dkv)(const struct cofi_attention_problem *p,
                                  const struct RESULT *result, int64_t batch,
                                  int64_t kv_head, int64_t row_begin, int64_t row_end)
{
    int64_t group = p->n_heads / p->n_kv_heads;
    int64_t at = (batch * p->n_kv_heads + kv_head) * p->n_rows;
    for (int64_t i = (at + row_begin) * p->dim_qk; i < (at + row_end) * p->dim_qk; i++)
        result->dk[i] = 0;
    for (int64_t i = (at + row_begin) * p->dim_v; i < (at + row_end) * p->dim_v; i++)
        result->dv[i] = 0;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        COF_TRY(dkv_head(p, result, batch, head, row_begin, row_end));
    for (int64_t i = (at + row_begin) * p->dim_qk; i < (at + row_end) * p->dim_qk; i++)
        result->dk[i] = ROUNDED(p, result->dk[i]);
    for (int64_t i = (at + row_begin) * p->dim_v; i < (at + row_end) * p->dim_v; i++)
        result->dv[i] = ROUNDED(p, result->dv[i]);
    return COF_OK;
}

cof_status NAME(all)(const struct cofi_attention_problem *p,
                                  const struct RESULT *result)
{
    for (int64_t batch = 0; batch < p->n_batch; batch++) {
        for (int64_t h = 0; h < p->n_heads; h++) {
            COF_TRY(NAME(forward)(p, result, batch, h, 0, p->n_rows));
            if (p->dout.data)
                COF_TRY(NAME(dq)(p, result, batch, h, 0, p->n_rows));
        }
        for (int64_t h = 0; h < p->n_kv_heads && p->dout.data; h++)
            COF_TRY(NAME(dkv)(p, result, batch, h, 0, p->n_rows));
    }
    return COF_OK;
}
