/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/attention/attention_check_data.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/check.h"

enum { Q, K, V, DOUT, N_INPUTS };

/* ---- Places ---- */

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

/* Sets all pointers of the next microbatch. */
static void place_data(const struct cofi_attention_case *c, struct room *room,
                       struct cofi_attention_data *data)
{
    const cof_attention_params *a = &c->params;
    struct cofi_attention_problem *p = &data->problem;
    *p = (struct cofi_attention_problem){
        .n_batch = a->n_batch, .n_rows = a->n_rows, .n_heads = a->n_heads,
        .n_kv_heads = a->n_kv_heads, .dim_qk = a->head_dim_qk, .dim_v = a->head_dim_v,
        .mask = a->mask, .has_window = a->has_window,
        .window = {a->window_left, a->window_right},
        .scale = a->scale != 0 ? a->scale : 1 / sqrt((double)a->head_dim_qk),
        .elem = cofi_elem_of(a->dtype)};
    bool backward = cofi_attention_case_has_backward(c);
    struct cofi_attention_view *views[N_INPUTS] = {&p->q, &p->k, &p->v, &p->dout};
    for (int t = 0; t < N_INPUTS && (t != DOUT || backward); t++) {
        int64_t heads = t == Q || t == DOUT ? p->n_heads : p->n_kv_heads;
        int64_t dim = t == Q || t == K ? p->dim_qk : p->dim_v;
        void *memory = place(room, p->n_batch * p->n_rows * heads * dim,
                             (size_t)cofi_elem_bytes(p->elem));
        *views[t] = (struct cofi_attention_view){memory, p->n_rows * heads * dim, heads * dim, dim};
    }
    int64_t n = p->n_batch * p->n_heads * p->n_rows, n_kv = n / p->n_heads * p->n_kv_heads;
    struct cofi_attention_ref *r = &data->ref;
    struct cofi_attention_plain *l = &data->plain;
    r->o = place(room, n * p->dim_v, sizeof *r->o);
    l->o = place(room, n * p->dim_v, sizeof *l->o);
    r->lse = place(room, n, sizeof *r->lse);
    l->lse = place(room, n, sizeof *l->lse);
    if (!backward)
        return;
    r->delta = place(room, n, sizeof *r->delta);
    l->delta = place(room, n, sizeof *l->delta);
    r->dq = place(room, n * p->dim_qk, sizeof *r->dq);
    l->dq = place(room, n * p->dim_qk, sizeof *l->dq);
    r->dk = place(room, n_kv * p->dim_qk, sizeof *r->dk);
    l->dk = place(room, n_kv * p->dim_qk, sizeof *l->dk);
    r->dv = place(room, n_kv * p->dim_v, sizeof *r->dv);
    l->dv = place(room, n_kv * p->dim_v, sizeof *l->dv);
}

static int n_micro(const struct cofi_attention_case *c)
{
    return c->calls == COFI_CALLS_TWO ? 2 : 1;
}

size_t cofi_attention_data_bytes(const struct cofi_attention_case *c)
{
    struct cofi_attention_data data;
    struct room room = {0};
    for (int i = 0; i < n_micro(c); i++)
        place_data(c, &room, &data);
    return room.used;
}

/* ---- Which rows ---- */

static void add_range(struct cofi_attention_ranges *r, int64_t begin, int64_t n_rows, int64_t rows)
{
    for (int i = 0; i < r->n; i++)
        if (r->begin[i] == begin)
            return;
    if (begin < 0 || begin >= n_rows || r->n == COFI_ATTENTION_RANGES)
        return;
    r->begin[r->n] = begin;
    r->end[r->n++] = begin + rows < n_rows ? begin + rows : n_rows;
}

static void choose_ranges(const struct cofi_job *job, const struct cofi_attention_case *c,
                          uint64_t seed, struct cofi_attention_data *data)
{
    enum { LANES = COFI_ATTENTION_REF_LANES };
    int64_t s = c->params.n_rows, rows = (s / 128 + LANES - 1) / LANES * LANES;
    rows = rows < 64 ? 64 : rows;
    data->all.n = data->compared.n = 0;
    for (int64_t begin = 0; begin < s; begin += rows)
        add_range(&data->all, begin, s, rows);
    if (s <= COFI_ATTENTION_SAMPLE_ROWS) {
        data->compared = data->all;
        return;
    }
    /* both sides of every chunk bound, the last rows, and 24 blocks anywhere */
    cof_layout layout = {c->params.layout, c->params.chunking, job->n_ranks, s};
    for (int64_t chunk = 0; chunk < cof_layout_chunks(&layout) && chunk < 32; chunk++) {
        int64_t start = cof_layout_chunk_start(&layout, chunk);
        add_range(&data->compared, start / LANES * LANES, s, LANES);
        add_range(&data->compared, (start - 1) / LANES * LANES, s, LANES);
    }
    add_range(&data->compared, (s - 1) / LANES * LANES, s, LANES);
    for (uint64_t i = 0; i < 24; i++) {
        int64_t row = (int64_t)(cofi_check_random(seed, 100, i) % (uint64_t)s);
        add_range(&data->compared, row / LANES * LANES, s, LANES);
    }
}

/* ---- Inputs ---- */

struct work {
    const struct cofi_attention_case *c;
    struct cofi_attention_data *data;
    uint64_t seed;
    int micro;
    bool sampled;
    pthread_mutex_t lock; /* of maxima */
};

static bool is_compared(const struct cofi_attention_data *data, int64_t row)
{
    for (int i = 0; i < data->compared.n; i++)
        if (row >= data->compared.begin[i] && row < data->compared.end[i])
            return true;
    return false;
}

/* Bit d of a row's number as +-1: the integer data's key, which scores highest with itself. */
static float code(int64_t row, int64_t d)
{
    return d >= 20 ? 0 : row >> d & 1 ? 1 : -1;
}

/* The one key that query (b, h, row) of integer data is to see. */
static int64_t target(const struct work *w, int64_t b, int64_t h, int64_t row)
{
    const cof_attention_params *a = &w->c->params;
    const struct cofi_attention_keys seen = cofi_attention_problem_keys(&w->data->problem, row);
    uint64_t n = (uint64_t)(seen.end - seen.begin);
    uint64_t idx = (uint64_t)((b * a->n_heads + h) * a->n_rows + row);
    return seen.begin +
           (int64_t)(cofi_check_random(w->seed, 50 + (uint64_t)w->micro, idx) % n);
}

/* Integer data: q = 64 code(target), k = code(row), scale 1, so that every other key lies at least
 * 128 below the target and exp gives exactly 0 in fp32; v and dout are small integers. */
static float input_value(const struct work *w, int t, int64_t b, int64_t row, int64_t h, int64_t d,
                         uint64_t idx)
{
    if (t == DOUT && w->sampled && !is_compared(w->data, row))
        return 0;
    uint64_t tensor = (uint64_t)(t + 8 * w->micro);
    if (w->c->data != COFI_DATA_INTEGER) {
        float x = cofi_check_normal(w->seed, tensor, idx);
        return w->c->data == COFI_DATA_LOGITS && (t == Q || t == K) ? 2 * x : x;
    }
    if (t == Q)
        return 64 * code(target(w, b, h, row), d);
    return t == K ? code(row, d) : cofi_check_integer(w->seed, tensor, idx, 2);
}

/* Item: (input, batch, range of `all`). */
static cof_status fill_item(void *arg, int64_t item)
{
    struct work *w = arg;
    const struct cofi_attention_problem *p = &w->data->problem;
    int64_t n_ranges = w->data->all.n, range = item % n_ranges;
    int64_t b = item / n_ranges % p->n_batch;
    int t = (int)(item / n_ranges / p->n_batch);
    const struct cofi_attention_view *view = t == Q ? &p->q : t == K ? &p->k : t == V ? &p->v
                                                                                     : &p->dout;
    cof_dtype dtype = w->c->params.dtype;
    int64_t heads = t == Q || t == DOUT ? p->n_heads : p->n_kv_heads;
    int64_t dim = t == Q || t == K ? p->dim_qk : p->dim_v;
    double max_row = 0, max_abs = 0;
    if (!view->data)
        return COF_OK;
    for (int64_t row = w->data->all.begin[range]; row < w->data->all.end[range]; row++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t at = b * view->batch_stride + row * view->row_stride + h * view->head_stride;
            double norm2 = 0;
            for (int64_t d = 0; d < dim; d++) {
                float x = input_value(w, t, b, row, h, d, (uint64_t)(at + d));
                cofi_check_store(view->data, dtype, at + d, x);
                norm2 += (double)x * x;
                max_abs = fmax(max_abs, fabs(x));
            }
            max_row = fmax(max_row, sqrt(norm2));
        }
    double *m = w->data->maxima;
    pthread_mutex_lock(&w->lock);
    m[COFI_MAX_ROW_Q + t] = fmax(m[COFI_MAX_ROW_Q + t], max_row);
    if (t == Q || t == K)
        m[COFI_MAX_ABS_Q + t] = fmax(m[COFI_MAX_ABS_Q + t], max_abs);
    pthread_mutex_unlock(&w->lock);
    return COF_OK;
}

/* ---- Results ---- */

/* Item: (batch, head, range of `compared`). */
static cof_status forward_item(void *arg, int64_t item)
{
    struct work *w = arg;
    const struct cofi_attention_problem *p = &w->data->problem;
    const struct cofi_attention_ranges *r = &w->data->compared;
    int64_t b = item / r->n / p->n_heads, h = item / r->n % p->n_heads;
    int64_t begin = r->begin[item % r->n], end = r->end[item % r->n];
    cof_status status = cofi_attention_ref_forward(p, &w->data->ref, b, h, begin, end);
    if (status == COF_OK)
        status = cofi_attention_plain_forward(p, &w->data->plain, b, h, begin, end);
    double most = 0;
    for (int64_t i = begin; i < end && status == COF_OK; i++)
        most = fmax(most, fabs(w->data->ref.lse[(b * p->n_heads + h) * p->n_rows + i]));
    pthread_mutex_lock(&w->lock);
    w->data->maxima[COFI_MAX_LSE] = fmax(w->data->maxima[COFI_MAX_LSE], most);
    pthread_mutex_unlock(&w->lock);
    return status;
}

/* A sampled case's dout is 0 in the rows that are not compared: they add nothing to dk and dv,
 * whatever their lse, so the reference need not compute it. Item: (batch, head). */
static cof_status skip_item(void *arg, int64_t item)
{
    struct work *w = arg;
    int64_t s = w->data->problem.n_rows;
    for (int64_t i = 0; i < s && w->data->ref.delta; i++) {
        w->data->ref.lse[item * s + i] = INFINITY;
        w->data->plain.lse[item * s + i] = INFINITY;
        w->data->ref.delta[item * s + i] = 0;
        w->data->plain.delta[item * s + i] = 0;
    }
    return COF_OK;
}

/* Item: (batch, head, range of `compared`), query heads for dq, then kv heads for dk and dv. */
static cof_status backward_item(void *arg, int64_t item)
{
    struct work *w = arg;
    const struct cofi_attention_problem *p = &w->data->problem;
    const struct cofi_attention_ranges *r = &w->data->compared;
    int64_t n_dq = p->n_batch * p->n_heads * r->n, heads = p->n_heads;
    int64_t begin = r->begin[item % r->n], end = r->end[item % r->n];
    bool is_dq = item < n_dq;
    if (!is_dq) {
        item -= n_dq;
        heads = p->n_kv_heads;
    }
    int64_t b = item / r->n / heads, h = item / r->n % heads;
    cof_status status = is_dq ? cofi_attention_ref_dq(p, &w->data->ref, b, h, begin, end)
                              : cofi_attention_ref_dkv(p, &w->data->ref, b, h, begin, end);
    if (status != COF_OK)
        return status;
    return is_dq ? cofi_attention_plain_dq(p, &w->data->plain, b, h, begin, end)
                 : cofi_attention_plain_dkv(p, &w->data->plain, b, h, begin, end);
}

static cof_status compute(const struct cofi_job *job, struct work *w)
{
    const struct cofi_attention_problem *p = &w->data->problem;
    const struct cofi_attention_ranges *all = &w->data->all, *compared = &w->data->compared;
    cof_status status = cofi_check_share(job, N_INPUTS * p->n_batch * all->n, fill_item, w);
    if (status == COF_OK && w->sampled)
        status = cofi_check_share(job, p->n_batch * p->n_heads, skip_item, w);
    if (status == COF_OK)
        status = cofi_check_share(job, p->n_batch * p->n_heads * compared->n, forward_item, w);
    if (status == COF_OK)
        status = cofi_check_max(job->team, w->data->maxima, COFI_N_MAXIMA);
    if (status == COF_OK && p->dout.data)
        status = cofi_check_share(job, p->n_batch * (p->n_heads + p->n_kv_heads) * compared->n,
                                  backward_item, w);
    return status;
}

cof_status cofi_attention_data_make(const struct cofi_job *job,
                                    const struct cofi_attention_case *c, uint64_t seed, int micro,
                                    struct cofi_attention_data *data)
{
    struct work w = {.c = c, .data = data, .seed = seed, .micro = micro,
                     .sampled = c->params.n_rows > COFI_ATTENTION_SAMPLE_ROWS,
                     .lock = PTHREAD_MUTEX_INITIALIZER};
    struct room room = {.base = job->shared};
    memset(data, 0, sizeof *data);
    for (int i = 0; i <= micro; i++)
        place_data(c, &room, data);
    choose_ranges(job, c, seed, data);
    cof_status status = compute(job, &w);
    pthread_mutex_destroy(&w.lock);
    return status;
}
