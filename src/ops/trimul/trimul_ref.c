/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The contract of trimul in code; tests/unit_trimul_ref.c holds it against the formulas written
 * once more and against differences. */
#include "ops/trimul/trimul_ref.h"

#include <math.h>
#include <stdlib.h>

#include "core/error.h"

/* A row for every pair: what forward computes on the way, or the gradients of it. */
struct stages {
    double *xn;          /* [B, N, N, D] */
    double *p, *g, *ab;  /* [B, N, N, 2H] */
    double *tri, *trin;  /* [B, N, N, H] */
    double *proj, *gate; /* [B, N, N, D]: the factors of step 8, the gate before its sigmoid */
    double *all;
};

/* All zeros. */
static cof_status stages_open(struct stages *s, const struct cofi_trimul_ref_problem *t)
{
    const size_t n_pairs = (size_t)(t->n_batch * t->n * t->n);
    const size_t n_dim = n_pairs * (size_t)t->dim, n_hidden = n_pairs * (size_t)t->hidden;
    const size_t n_all = 3 * n_dim + 8 * n_hidden;
    double *at = s->all = calloc(n_all, sizeof(double));
    COF_FAIL_IF(!at, COF_ERR_NOMEM, "reference of trimul: no memory for %zu values", n_all);
    s->xn = at, at += n_dim;
    s->proj = at, at += n_dim;
    s->gate = at, at += n_dim;
    s->p = at, at += 2 * n_hidden;
    s->g = at, at += 2 * n_hidden;
    s->ab = at, at += 2 * n_hidden;
    s->tri = at, at += n_hidden;
    s->trin = at;
    return COF_OK;
}

static int64_t n_pairs(const struct cofi_trimul_ref_problem *t)
{
    return t->n_batch * t->n * t->n;
}

/* The pair whose a (or b) takes part in tri_ij (line is i or j): outgoing [line, k], incoming
 * [k, line]. */
static int64_t edge(const struct cofi_trimul_ref_problem *t, int64_t batch, int64_t line, int64_t k)
{
    return (batch * t->n + (t->incoming ? k : line)) * t->n + (t->incoming ? line : k);
}

static double sigmoid(double v)
{
    return 1 / (1 + exp(-v));
}

/* sigmoid' = sigmoid(v) (1 - sigmoid(v)), without the cancellation. */
static double sigmoid_slope(double v)
{
    return sigmoid(v) * sigmoid(-v);
}

/* mean = sum_d x_d / n;  rstd = 1 / sqrt(sum_d (x_d - mean)^2 / n + eps) */
static void statistics(const double *x, int64_t n, double eps, double *mean_out, double *rstd_out)
{
    double mean = 0, var = 0;
    for (int64_t d = 0; d < n; d++)
        mean += x[d] / (double)n;
    for (int64_t d = 0; d < n; d++)
        var += (x[d] - mean) * (x[d] - mean) / (double)n;
    *mean_out = mean;
    *rstd_out = 1 / sqrt(var + eps);
}

/* y_d = (x_d - mean) rstd w_d + b_d */
static void norm(const double *x, const double *w, const double *b, int64_t n, double eps,
                 double *y)
{
    double mean, rstd;
    statistics(x, n, eps, &mean, &rstd);
    for (int64_t d = 0; d < n; d++)
        y[d] = (x[d] - mean) * rstd * (w ? w[d] : 1) + (b ? b[d] : 0);
}

/* With z_d = (x_d - mean) rstd and dz_d = dy_d w_d:
 * dw_d += dy_d z_d;  db_d += dy_d;  dx_d = rstd (dz_d - mean_d(dz) - z_d mean_d(dz z)) */
static void norm_backward(const double *x, const double *w, int64_t n, double eps, const double *dy,
                          double *dx, double *dw, double *db)
{
    double mean, rstd, dz_mean = 0, dzz_mean = 0;
    statistics(x, n, eps, &mean, &rstd);
    for (int64_t d = 0; d < n; d++) {
        double z = (x[d] - mean) * rstd, dz = dy[d] * (w ? w[d] : 1);
        dz_mean += dz / (double)n;
        dzz_mean += dz * z / (double)n;
        if (dw)
            dw[d] += dy[d] * z;
        if (db)
            db[d] += dy[d];
    }
    for (int64_t d = 0; d < n; d++) {
        double z = (x[d] - mean) * rstd, dz = dy[d] * (w ? w[d] : 1);
        dx[d] = rstd * (dz - dz_mean - z * dzz_mean);
    }
}

/* sum_d w_d x_d, in four sums: each add waits for the one before. */
static double dot(const double *w, const double *x, int64_t n)
{
    double sum[4] = {0, 0, 0, 0};
    int64_t d = 0;
    for (; d + 4 <= n; d += 4)
        for (int i = 0; i < 4; i++)
            sum[i] += w[d + i] * x[d + i];
    for (; d < n; d++)
        sum[0] += w[d] * x[d];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* y_o = sum_d w_od x_d + b_o */
static void linear(const double *x, const double *w, const double *b, int64_t n_out, int64_t n_in,
                   double *y)
{
    for (int64_t o = 0; o < n_out; o++)
        y[o] = dot(w + o * n_in, x, n_in) + (b ? b[o] : 0);
}

/* dx_d += sum_o w_od dy_o;  dw_od += dy_o x_d;  db_o += dy_o */
static void linear_backward(const double *x, const double *w, int64_t n_out, int64_t n_in,
                            const double *dy, double *restrict dx, double *restrict dw, double *db)
{
    for (int64_t o = 0; o < n_out; o++) {
        for (int64_t d = 0; d < n_in; d++)
            dx[d] += w[o * n_in + d] * dy[o];
        for (int64_t d = 0; dw && d < n_in; d++)
            dw[o * n_in + d] += dy[o] * x[d];
        if (db)
            db[o] += dy[o];
    }
}

/* Steps 1 to 5 for a pair, and the gate of step 8. */
static void front(const struct cofi_trimul_ref_problem *t, const struct stages *s, int64_t pair)
{
    const struct cofi_trimul_ref_weights *w = &t->weights;
    const int64_t dim = t->dim, n_ab = 2 * t->hidden;
    const double mask = t->mask ? t->mask[pair] : 1;
    double *xn = s->xn + pair * dim, *p = s->p + pair * n_ab, *g = s->g + pair * n_ab;

    /* xn = norm(x);  p = xn p_in^T + p_in_b;  g = xn g_in^T + g_in_b */
    norm(t->x + pair * dim, w->norm_in_w, w->norm_in_b, dim, t->eps_in, xn);
    linear(xn, w->p_in, w->p_in_b, n_ab, dim, p);
    linear(xn, w->g_in, w->g_in_b, n_ab, dim, g);

    /* ab_c = p_c sigmoid(g_c) mask */
    for (int64_t c = 0; c < n_ab; c++)
        s->ab[pair * n_ab + c] = p[c] * sigmoid(g[c]) * mask;

    /* gate = xn g_out^T + g_out_b */
    linear(xn, w->g_out, w->g_out_b, dim, dim, s->gate + pair * dim);
}

/* tri_ijh = sum_k a_ikh b_jkh (outgoing), sum_k a_kih b_kjh (incoming), of n features h from
 * `first` on: at most a block's, whose sums stay in registers. */
enum { BLOCK = 8 };
static inline void triangle_block(const struct cofi_trimul_ref_problem *t, const struct stages *s,
                                  int64_t batch, int64_t i, int64_t j, int64_t first, int64_t n)
{
    const int64_t n_ab = 2 * t->hidden, n_k = t->n;
    double sum[BLOCK] = {0};
    for (int64_t k = 0; k < n_k; k++) {
        const double *a = s->ab + edge(t, batch, i, k) * n_ab + first;
        const double *b = s->ab + edge(t, batch, j, k) * n_ab + t->hidden + first;
        for (int64_t h = 0; h < n; h++)
            sum[h] += a[h] * b[h];
    }
    double *tri = s->tri + ((batch * t->n + i) * t->n + j) * t->hidden + first;
    for (int64_t h = 0; h < n; h++)
        tri[h] = sum[h];
}

static void triangle(const struct cofi_trimul_ref_problem *t, const struct stages *s, int64_t batch,
                     int64_t i, int64_t j)
{
    int64_t first = 0;
    for (; first + BLOCK <= t->hidden; first += BLOCK)
        triangle_block(t, s, batch, i, j, first, BLOCK);
    if (first < t->hidden)
        triangle_block(t, s, batch, i, j, first, t->hidden - first);
}

/* trin = norm(tri);  proj = trin p_out^T + p_out_b */
static void back(const struct cofi_trimul_ref_problem *t, const struct stages *s, int64_t pair)
{
    const struct cofi_trimul_ref_weights *w = &t->weights;
    double *trin = s->trin + pair * t->hidden;
    norm(s->tri + pair * t->hidden, w->norm_out_w, w->norm_out_b, t->hidden, t->eps_out, trin);
    linear(trin, w->p_out, w->p_out_b, t->dim, t->hidden, s->proj + pair * t->dim);
}

static void forward(const struct cofi_trimul_ref_problem *t, const struct stages *s)
{
    for (int64_t pair = 0; pair < n_pairs(t); pair++)
        front(t, s, pair);
    for (int64_t batch = 0; batch < t->n_batch; batch++)
        for (int64_t i = 0; i < t->n; i++)
            for (int64_t j = 0; j < t->n; j++)
                triangle(t, s, batch, i, j);
    for (int64_t pair = 0; pair < n_pairs(t); pair++)
        back(t, s, pair);
}

/* out = proj sigmoid(gate) + residual */
static void write_out(const struct cofi_trimul_ref_problem *t, const struct stages *s, double *out)
{
    for (int64_t at = 0; out && at < n_pairs(t) * t->dim; at++)
        out[at] = s->proj[at] * sigmoid(s->gate[at]) + (t->residual ? t->residual[at] : 0);
}

cof_status cofi_trimul_ref_forward(const struct cofi_trimul_ref_problem *t,
                                   const struct cofi_trimul_ref_out *results)
{
    struct stages s;
    COF_TRY(stages_open(&s, t));
    forward(t, &s);
    write_out(t, &s, results->out);
    for (int64_t pair = 0; pair < n_pairs(t); pair++) {
        for (int64_t h = 0; h < t->hidden; h++) {
            const int64_t at = pair * t->hidden + h;
            if (results->a)
                results->a[at] = s.ab[2 * pair * t->hidden + h];
            if (results->b)
                results->b[at] = s.ab[(2 * pair + 1) * t->hidden + h];
            if (results->tri)
                results->tri[at] = s.tri[at];
        }
    }
    free(s.all);
    return COF_OK;
}

/* From dout to the gradients of tri and, through the gate, of xn. */
static void back_backward(const struct cofi_trimul_ref_problem *t, const struct stages *s,
                          const double *dout, const struct stages *ds,
                          const struct cofi_trimul_ref_grads *dw, int64_t pair)
{
    const struct cofi_trimul_ref_weights *w = &t->weights;
    const int64_t dim = t->dim, hidden = t->hidden;
    double *dproj = ds->proj + pair * dim, *dgate = ds->gate + pair * dim;
    double *dtrin = ds->trin + pair * hidden;

    /* dproj = dout sigmoid(gate);  dgate = dout proj sigmoid'(gate) */
    for (int64_t d = 0; d < dim; d++) {
        const int64_t at = pair * dim + d;
        dproj[d] = dout[at] * sigmoid(s->gate[at]);
        dgate[d] = dout[at] * s->proj[at] * sigmoid_slope(s->gate[at]);
    }
    linear_backward(s->xn + pair * dim, w->g_out, dim, dim, dgate, ds->xn + pair * dim, dw->g_out,
                    dw->g_out_b);
    linear_backward(s->trin + pair * hidden, w->p_out, dim, hidden, dproj, dtrin, dw->p_out,
                    dw->p_out_b);
    norm_backward(s->tri + pair * hidden, w->norm_out_w, hidden, t->eps_out, dtrin,
                  ds->tri + pair * hidden, dw->norm_out_w, dw->norm_out_b);
}

/* Outgoing: da_ikh += dtri_ijh b_jkh;  db_jkh += dtri_ijh a_ikh.
 * Incoming: da_kih += dtri_ijh b_kjh;  db_kjh += dtri_ijh a_kih. */
static void triangle_backward(const struct cofi_trimul_ref_problem *t, const struct stages *s,
                              const struct stages *ds, int64_t batch, int64_t i, int64_t j)
{
    const int64_t n_ab = 2 * t->hidden;
    const double *dtri = ds->tri + ((batch * t->n + i) * t->n + j) * t->hidden;
    for (int64_t k = 0; k < t->n; k++) {
        const int64_t at_a = edge(t, batch, i, k) * n_ab, hidden = t->hidden;
        const int64_t at_b = edge(t, batch, j, k) * n_ab + hidden;
        const double *a = s->ab + at_a, *b = s->ab + at_b;
        double *restrict da = ds->ab + at_a, *restrict db = ds->ab + at_b;
        for (int64_t h = 0; h < hidden; h++)
            da[h] += dtri[h] * b[h];
        for (int64_t h = 0; h < hidden; h++)
            db[h] += dtri[h] * a[h];
    }
}

/* From the gradients of a, b and xn to dx. */
static void front_backward(const struct cofi_trimul_ref_problem *t, const struct stages *s,
                           const struct stages *ds, const struct cofi_trimul_ref_grads *dw,
                           double *dx, int64_t pair)
{
    const struct cofi_trimul_ref_weights *w = &t->weights;
    const int64_t dim = t->dim, n_ab = 2 * t->hidden;
    const double mask = t->mask ? t->mask[pair] : 1;
    const double *p = s->p + pair * n_ab, *g = s->g + pair * n_ab, *dab = ds->ab + pair * n_ab;
    double *dp = ds->p + pair * n_ab, *dg = ds->g + pair * n_ab, *dxn = ds->xn + pair * dim;

    /* dp = dab sigmoid(g) mask;  dg = dab p sigmoid'(g) mask */
    for (int64_t c = 0; c < n_ab; c++) {
        dp[c] = dab[c] * sigmoid(g[c]) * mask;
        dg[c] = dab[c] * p[c] * sigmoid_slope(g[c]) * mask;
    }
    linear_backward(s->xn + pair * dim, w->p_in, n_ab, dim, dp, dxn, dw->p_in, dw->p_in_b);
    linear_backward(s->xn + pair * dim, w->g_in, n_ab, dim, dg, dxn, dw->g_in, dw->g_in_b);
    norm_backward(t->x + pair * dim, w->norm_in_w, dim, t->eps_in, dxn, dx, dw->norm_in_w,
                  dw->norm_in_b);
}

static void clear(double *values, int64_t n)
{
    for (int64_t i = 0; values && i < n; i++)
        values[i] = 0;
}

static void clear_grads(const struct cofi_trimul_ref_problem *t,
                        const struct cofi_trimul_ref_grads *dw)
{
    const int64_t dim = t->dim, hidden = t->hidden;
    clear(dw->norm_in_w, dim);
    clear(dw->norm_in_b, dim);
    clear(dw->p_in, 2 * hidden * dim);
    clear(dw->p_in_b, 2 * hidden);
    clear(dw->g_in, 2 * hidden * dim);
    clear(dw->g_in_b, 2 * hidden);
    clear(dw->norm_out_w, hidden);
    clear(dw->norm_out_b, hidden);
    clear(dw->p_out, dim * hidden);
    clear(dw->p_out_b, dim);
    clear(dw->g_out, dim * dim);
    clear(dw->g_out_b, dim);
}

cof_status cofi_trimul_ref_backward(const struct cofi_trimul_ref_problem *t, const double *dout,
                                    const struct cofi_trimul_ref_grads *grads)
{
    struct stages s, ds = {0};
    cof_status status = stages_open(&s, t);
    if (status == COF_OK)
        status = stages_open(&ds, t);
    if (status != COF_OK)
        goto close;

    forward(t, &s);
    write_out(t, &s, grads->out);
    clear_grads(t, grads);
    for (int64_t pair = 0; pair < n_pairs(t); pair++)
        back_backward(t, &s, dout, &ds, grads, pair);
    for (int64_t batch = 0; batch < t->n_batch; batch++)
        for (int64_t i = 0; i < t->n; i++)
            for (int64_t j = 0; j < t->n; j++)
                triangle_backward(t, &s, &ds, batch, i, j);
    for (int64_t pair = 0; pair < n_pairs(t); pair++) {
        /* Where dx is not wanted it replaces xn, which nothing reads any more. */
        double *dx = (grads->x ? grads->x : s.xn) + pair * t->dim;
        front_backward(t, &s, &ds, grads, dx, pair);
    }
close:
    free(ds.all);
    free(s.all);
    return status;
}
