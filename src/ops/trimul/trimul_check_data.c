/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/trimul/trimul_check_data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/check.h"

/* Numbers of random streams: weights are 0 .. 11. */
enum { X = 20, MASK, RESIDUAL, DOUT, SIGN };

/* ---- places --------------------------------------------------------------------------------- */

struct room {
    char *base; /* NULL: only count */
    size_t used;
};

static void *place(struct room *room, int64_t n, size_t element_bytes)
{
    void *p = room->base ? room->base + room->used : NULL;
    room->used += ((size_t)n * element_bytes + 63) / 64 * 64;
    return p;
}

static bool has_weight(const struct cofi_tm_case *c, int which)
{
    if (cofi_tm_weights[which].is_required || c->bias == COFI_TM_BIAS_ALL)
        return true;
    return c->bias == COFI_TM_BIAS_OUT &&
           (which == COFI_TRI_P_OUT_B || which == COFI_TRI_G_OUT_B || which == COFI_TRI_NORM_OUT_W);
}

cof_dtype cofi_tm_weight_dtype(const struct cofi_tm_case *c, int which)
{
    return cofi_tri_is_norm(which) && c->norm ? COF_F32 : cofi_tm_dtype(c);
}

static cof_dtype mask_dtype(const struct cofi_tm_case *c)
{
    return c->mask_dtype ? COF_F32 : cofi_tm_dtype(c);
}

static void place_problem(const struct cofi_tm_case *c, struct room *room, int64_t grad_elements,
                          struct cofi_tm_problem *p)
{
    int64_t pairs = c->b * p->n * p->n, n = pairs * c->d;
    size_t element = (size_t)cofi_dtype_bytes(cofi_tm_dtype(c));
    bool has_own = c->residual == COFI_TM_OWN || c->residual == COFI_TM_IS_OUT;
    bool is_x = c->residual == COFI_TM_IS_X || c->residual == COFI_TM_IN_PLACE;
    p->x = place(room, n, element);
    p->residual = has_own ? place(room, n, element) : is_x ? p->x : NULL;
    p->mask = c->mask ? place(room, pairs, (size_t)cofi_dtype_bytes(mask_dtype(c))) : NULL;
    p->out = place(room, n, sizeof *p->out);
    p->alone_out = place(room, n, element);
    p->maxima = place(room, c->b * COFI_TM_E_N, sizeof *p->maxima);
    if (!cofi_tm_has_backward(c))
        return;
    p->dout = place(room, n, element);
    p->dx = place(room, n, sizeof *p->dx);
    p->alone_dx = place(room, n, element);
    p->grads = place(room, c->b * grad_elements, sizeof *p->grads);
}

void cofi_tm_data_lay_grads(struct cofi_tm_data *data)
{
    data->grad_elements = 0;
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++) {
        data->grad_at[w] = data->grad_elements;
        data->grad_elements += cofi_tm_weight_elements(w, data->c->d, data->c->h);
    }
}

static void place_data(const struct cofi_tm_case *c, int n_ranks, struct room *room,
                       struct cofi_tm_data *data)
{
    *data = (struct cofi_tm_data){.c = c};
    cofi_tm_data_lay_grads(data);
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        if (has_weight(c, w))
            data->weight[w] = place(room, cofi_tm_weight_elements(w, c->d, c->h),
                                    (size_t)cofi_dtype_bytes(cofi_tm_weight_dtype(c, w)));
    for (int call = 0; call < c->n.n; call++) {
        int at = 0;
        while (at < data->n_problems && data->problem[at].n != c->n.at[call])
            at++;
        data->problem_of[call] = at;
        if (at < data->n_problems)
            continue;
        data->problem[at].n = c->n.at[call];
        place_problem(c, room, data->grad_elements, &data->problem[data->n_problems++]);
    }
    if (cofi_tm_has_backward(c))
        data->partial = place(room, c->n.n * n_ranks * data->grad_elements, sizeof(float));
}

size_t cofi_tm_data_bytes(const struct cofi_tm_case *c, int n_ranks)
{
    struct cofi_tm_data data;
    struct room room = {0};
    place_data(c, n_ranks, &room, &data);
    return room.used;
}

/* ---- inputs --------------------------------------------------------------------------------- */

static float uniform(uint64_t seed, uint64_t tensor, uint64_t idx)
{
    return (float)(cofi_check_random(seed, tensor, idx) >> 40) * 0x1p-24f;
}

static bool coin(uint64_t seed, uint64_t tensor, uint64_t idx)
{
    return cofi_check_random(seed, tensor, idx) >> 63;
}

/* Integer data. A row of x is +-1, each beside its opposite, and (1, -1) come first: mean 0,
 * variance 1, so the first norm changes nothing. p_in picks an element for every a and b; feature
 * h + 1 is the opposite of feature h, so the second norm takes no mean away, and its large eps
 * makes it a product with a power of 2, which p_out undoes. An odd last feature is 0. Gates are
 * sigmoid(100) = 1. */
static float integer_weight(const struct cofi_tm_data *data, int which, int64_t row, int64_t col)
{
    const struct cofi_tm_case *c = data->c;
    if (which == COFI_TRI_NORM_IN_W || which == COFI_TRI_NORM_OUT_W)
        return 1;
    if (which == COFI_TRI_G_IN || which == COFI_TRI_G_OUT)
        return col == 0 ? 100 : 0;
    if (which == COFI_TRI_P_OUT)
        return col == (7 * row + 3) % c->h ? (c->dtype == 2 ? 0x1p30f : 0x1p15f) : 0;
    if (which != COFI_TRI_P_IN)
        return 0;
    bool is_b = row >= c->h;
    int64_t h = row % c->h, pair = h / 2 + (is_b ? c->h : 0);
    uint64_t pick = cofi_check_random(data->seed, SIGN, (uint64_t)pair) % (uint64_t)(c->d - 2);
    if (h == c->h - 1 && c->h % 2)
        return 0;
    return col != 2 + (int64_t)pick ? 0 : is_b && h % 2 ? -1 : 1;
}

static float weight_value(const struct cofi_tm_data *data, int which, int64_t row, int64_t col,
                          int64_t idx)
{
    const struct cofi_tm_case *c = data->c;
    const struct cofi_tm_weight_info *info = &cofi_tm_weights[which];
    float x = cofi_check_normal(data->seed, (uint64_t)which, (uint64_t)idx);
    bool is_large = c->data == COFI_TM_LARGE;
    if (c->data == COFI_TM_INTEGER)
        return integer_weight(data, which, row, col);
    if (which == COFI_TRI_NORM_IN_W || which == COFI_TRI_NORM_OUT_W)
        return 1 + 0.1f * x;
    if (which == COFI_TRI_P_IN_B && is_large) /* b's have one sign, a's one for each feature */
        return row < c->h && row % 2 ? -16 : 16;
    if (which == COFI_TRI_G_IN_B && is_large)
        return 8;
    if (!info->n_in)
        return 0.1f * x;
    return x / sqrtf((float)(info->n_in == 'D' ? c->d : c->h)) *
           (which == COFI_TRI_P_IN && is_large ? 0.25f : 1);
}

void cofi_tm_data_fill_weight(const struct cofi_tm_data *data, int which)
{
    int64_t shape[2];
    cofi_tm_weight_shape(which, data->c->d, data->c->h, shape);
    for (int64_t i = 0; i < shape[0] * shape[1] && data->weight[which]; i++)
        cofi_check_store(data->weight[which], cofi_tm_weight_dtype(data->c, which), i,
                         weight_value(data, which, i / shape[1], i % shape[1], i));
}

/* Element idx of x of the problem with this N. */
static float x_value(const struct cofi_tm_data *data, int64_t idx, uint64_t seed)
{
    const struct cofi_tm_case *c = data->c;
    int64_t d = idx % c->d;
    if (c->data == COFI_TM_INTEGER)
        return (d < 2 || coin(seed, X, (uint64_t)(idx / 2))) == (d % 2 == 0) ? 1 : -1;
    float mean = (float)c->mean;
    if (c->data != COFI_TM_CAUCHY)
        return mean + cofi_check_normal(seed, X, (uint64_t)idx);
    float x = tanf((float)M_PI * (uniform(seed, X, (uint64_t)idx) - 0.4999f));
    return mean + fminf(fmaxf(x, -3e4f), 3e4f); /* fp16 holds it */
}

static float mask_value(const struct cofi_tm_case *c, int64_t idx, uint64_t seed)
{
    float x = uniform(seed, MASK, (uint64_t)idx);
    return c->mask == COFI_TM_ZERO ? 0 : c->mask == COFI_TM_REAL ? x : x < 0.7f;
}

/* One batch entry. */
static void fill_problem(const struct cofi_tm_data *data, const struct cofi_tm_problem *p,
                         int64_t b)
{
    const struct cofi_tm_case *c = data->c;
    cof_dtype dtype = cofi_tm_dtype(c);
    uint64_t seed = data->seed * 1000 + (uint64_t)p->n;
    int64_t pairs = p->n * p->n, n = pairs * c->d;
    for (int64_t i = b * n; i < (b + 1) * n; i++) {
        cofi_check_store(p->x, dtype, i, x_value(data, i, seed));
        if (p->residual && p->residual != p->x)
            cofi_check_store(p->residual, dtype, i,
                             cofi_check_normal(seed, RESIDUAL, (uint64_t)i));
        if (p->dout)
            cofi_check_store(p->dout, dtype, i, cofi_check_normal(seed, DOUT, (uint64_t)i));
    }
    for (int64_t i = b * pairs; i < (b + 1) * pairs && p->mask; i++)
        cofi_check_store(p->mask, mask_dtype(c), i, mask_value(c, i, seed));
    bool is_bad = c->data == COFI_TM_NAN || c->data == COFI_TM_INF;
    if (is_bad && b == c->b - 1) {
        uint64_t at = cofi_check_random(seed, SIGN, 0) % (uint64_t)n;
        cofi_check_store(p->x, dtype, b * n + (int64_t)at,
                         c->data == COFI_TM_NAN ? NAN : INFINITY);
    }
}

/* ---- the reference -------------------------------------------------------------------------- */

/* A tensor's part in fp64; NULL stays NULL. */
static double *widen(const void *from, cof_dtype dtype, int64_t first, int64_t n, double **at)
{
    double *to = *at;
    if (!from)
        return NULL;
    for (int64_t i = 0; i < n; i++)
        to[i] = cofi_check_load(from, dtype, first + i);
    *at += n;
    return to;
}

static double max_abs(const double *values, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = isfinite(values[i]) ? fmax(most, fabs(values[i])) : most;
    return most;
}

/* Of batch entry b. `memory` has room for its inputs and for the weights. */
static cof_status make_reference(const struct cofi_tm_data *data, const struct cofi_tm_problem *p,
                                 int64_t b, double *memory)
{
    const struct cofi_tm_case *c = data->c;
    cof_dtype dtype = cofi_tm_dtype(c);
    int64_t pairs = p->n * p->n, n = pairs * c->d;
    double *maxima = p->maxima + b * COFI_TM_E_N;
    struct cofi_trimul_ref_problem ref = {
        .n_batch = 1, .n = p->n, .dim = c->d, .hidden = c->h, .incoming = c->direction == 1,
        .eps_in = c->eps_in > 0 ? c->eps_in : 1e-5, .eps_out = c->eps_out > 0 ? c->eps_out : 1e-5};
    ref.x = widen(p->x, dtype, b * n, n, &memory);
    ref.mask = widen(p->mask, mask_dtype(c), b * pairs, pairs, &memory);
    ref.residual = widen(p->residual, dtype, b * n, n, &memory);
    const double *dout = widen(p->dout, dtype, b * n, n, &memory);
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        cofi_tm_ref_bind(&ref.weights, w,
                          widen(data->weight[w], cofi_tm_weight_dtype(c, w), 0,
                                cofi_tm_weight_elements(w, c->d, c->h), &memory));
    struct cofi_trimul_ref_out out = {.out = p->out + b * n};
    if (!dout) {
        COF_TRY(cofi_trimul_ref_forward(&ref, &out));
        maxima[COFI_TM_E_OUT] = max_abs(out.out, n);
        return COF_OK;
    }
    struct cofi_trimul_ref_grads grads = {.x = p->dx + b * n, .out = out.out};
    double *all = p->grads + b * data->grad_elements;
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        cofi_tm_ref_grads_bind(&grads, w, all + data->grad_at[w]);
    COF_TRY(cofi_trimul_ref_backward(&ref, dout, &grads));
    maxima[COFI_TM_E_OUT] = max_abs(out.out, n);
    for (int64_t i = 0; i < n && c->residual == COFI_TM_IS_X; i++)
        grads.x[i] += dout[i];
    maxima[COFI_TM_E_DX] = max_abs(grads.x, n);
    return COF_OK;
}

/* Item: a weight, or a problem's batch entry. */
static cof_status fill_item(void *arg, int64_t item)
{
    const struct cofi_tm_data *data = arg;
    if (item < COFI_TRI_WEIGHTS)
        cofi_tm_data_fill_weight(data, (int)item);
    else
        fill_problem(data, &data->problem[(item - COFI_TRI_WEIGHTS) / data->c->b],
                     (item - COFI_TRI_WEIGHTS) % data->c->b);
    return COF_OK;
}

cof_status cofi_tm_data_reference(const struct cofi_tm_data *data,
                                   const struct cofi_tm_problem *p, int64_t b)
{
    int64_t n = p->n * p->n * (3 * data->c->d + 1) + data->grad_elements;
    double *memory = malloc((size_t)n * sizeof *memory);
    COF_FAIL_IF(!memory, COF_ERR_NOMEM, "check: no memory for %lld values", (long long)n);
    cof_status status = make_reference(data, p, b, memory);
    free(memory);
    return status;
}

static cof_status reference_item(void *arg, int64_t item)
{
    const struct cofi_tm_data *data = arg;
    return cofi_tm_data_reference(data, &data->problem[item / data->c->b], item % data->c->b);
}

cof_status cofi_tm_data_make(const struct cofi_job *job, const struct cofi_tm_case *c,
                              uint64_t seed, struct cofi_tm_data *data)
{
    struct room room = {.base = job->shared};
    COF_FAIL_IF(c->n.n > COFI_TM_CALLS, COF_ERR_INVALID, "check: %d calls, at most %d", c->n.n,
                COFI_TM_CALLS);
    place_data(c, job->n_ranks, &room, data);
    data->seed = seed;
    COF_FAIL_IF(room.used > job->shared_bytes, COF_ERR_INTERNAL,
                "check: a case needs %zu shared bytes of %zu", room.used, job->shared_bytes);
    int64_t n_items = data->n_problems * c->b;
    COF_TRY(cofi_check_share(job, COFI_TRI_WEIGHTS + n_items, fill_item, data));
    return cofi_check_share(job, n_items, reference_item, data);
}
