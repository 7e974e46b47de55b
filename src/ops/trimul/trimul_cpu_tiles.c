/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/trimul/trimul_cpu_tiles.h"

#define SLICE_TILES 4 /* at least, or what is cleared and added takes longer than the tiles */

/* Tiles of a row that have columns of this rank: the first, and one past the last. */
static void tiles_of_row(const struct cofi_tri_shape *s, int64_t *first, int64_t *last)
{
    *first = s->own.col / s->tokens;
    *last = s->own.n_cols ? (s->own.col + s->own.n_cols - 1) / s->tokens + 1 : *first;
}

void cofi_tri_cpu_set_tiles(struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    int64_t first, last;
    tiles_of_row(&st->shape, &first, &last);
    st->n_tiles = st->shape.n_batch * st->shape.own.n_rows * (last - first);
    st->n_slices = st->n_tiles / SLICE_TILES + 1;
    if (st->n_slices > st->sizes.n_slices)
        st->n_slices = st->sizes.n_slices;
}

void cofi_tri_tile_open(struct cofi_tri_tile *t, struct cofi_tri_plan *plan,
                        struct cofi_cpu_worker *worker, int64_t idx)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_shape *s = &st->shape;
    int64_t first, last;
    tiles_of_row(s, &first, &last);
    const int64_t row = idx / (last - first);
    *t = (struct cofi_tri_tile){.plan = plan, .st = st, .vec = cofi_vec(), .gate = cofi_gate(),
                                .gemm = worker->gemm, .scratch = worker->scratch, .n = s->tokens,
                                .b = row / s->own.n_rows, .i = s->own.row + row % s->own.n_rows,
                                .j0 = (first + idx % (last - first)) * s->tokens};
    const int64_t begin = s->own.col - t->j0, end = s->own.col + s->own.n_cols - t->j0;
    t->begin = begin > 0 ? begin : 0;
    t->end = end < t->n ? end : t->n;
}

char *cofi_tri_typed(struct cofi_tri_tile *t, float *src, int64_t n)
{
    if (t->st->type == COFI_GEMM_F32)
        return (char *)src;
    char *typed = cofi_tri_take_typed(t, n);
    cofi_tri_to_typed(t, typed, 0, src, n);
    return typed;
}

static void zero_outside(const struct cofi_tri_tile *t, float *row)
{
    memset(row, 0, (size_t)t->begin * sizeof *row);
    memset(row + t->end, 0, (size_t)(t->n - t->end) * sizeof *row);
}

void cofi_tri_load_across(const struct cofi_tri_tile *t, const struct cofi_tri_port *port,
                          enum cofi_elem elem, int half, int64_t h, float *dst)
{
    zero_outside(t, dst);
    cofi_vec_load(t->vec, elem, dst + t->begin,
                  cofi_tri_port_at(port, half, h, t->b, t->i, t->j0 + t->begin),
                  t->end - t->begin);
}

void cofi_tri_store_across(const struct cofi_tri_tile *t, const struct cofi_tri_port *port,
                           enum cofi_elem elem, int half, int64_t h, const float *src)
{
    cofi_vec_store(t->vec, elem, cofi_tri_port_at(port, half, h, t->b, t->i, t->j0 + t->begin),
                   src + t->begin, t->end - t->begin);
}

char *cofi_tri_norm_in(struct cofi_tri_tile *t, float *x, struct cofi_norm_row *rows)
{
    const int64_t d = t->plan->params.dim;
    float *const *weights = t->st->weights.norm_in;
    char *xn = cofi_tri_take_typed(t, t->n * d);
    float *row = cofi_tri_take_floats(t, d);
    memset(xn, 0, (size_t)(t->n * d * t->st->type_bytes));
    for (int64_t j = t->begin; j < t->end; j++) {
        float *from = x ? x + j * d : row;
        float *to = t->st->type == COFI_GEMM_F32 ? (float *)(void *)xn + j * d : row;
        struct cofi_norm_row norm = {.x = from, .gain = weights[0], .bias = weights[1],
                                     .eps = (float)t->plan->params.eps_in, .n = d};
        cofi_tri_load_row(t, &t->st->call.x, j, from);
        t->gate->norm(to, &norm);
        cofi_tri_to_typed(t, xn, j * d, to, d);
        if (rows)
            rows[j] = norm;
    }
    return xn;
}

const float *cofi_tri_mask(struct cofi_tri_tile *t)
{
    const struct cofi_tri_tensor *mask = &t->st->call.mask;
    if (!mask->data)
        return NULL;
    float *row = cofi_tri_take_floats(t, t->n);
    zero_outside(t, row);
    for (int64_t j = t->begin; j < t->end; j++) /* columns have any stride */
        cofi_vec_load(t->vec, t->plan->mask_elem, row + j,
                      cofi_tri_at(mask, t->b, t->i - t->st->shape.own.row,
                                  t->j0 + j - t->st->shape.own.col),
                      1);
    return row;
}

void cofi_tri_product(const struct cofi_tri_tile *t, enum cofi_gemm_form form, int64_t m, int64_t n,
                      int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
                      bool accumulate, float *c)
{
    cofi_gemm_note(&t->st->failure, cofi_gemm_run(t->gemm, form, t->st->type, m, n, k, a, lda, b,
                                                  ldb, accumulate, c, n));
}

void cofi_tri_project(struct cofi_tri_tile *t, const char *xn, int64_t block, float *pg)
{
    const int64_t d = t->plan->params.dim, rows = 4 * t->st->sizes.block;
    cofi_tri_product(t, COFI_GEMM_NT, rows, t->n, d,
                     cofi_tri_typed_at(t, t->st->weights.in, block * rows * d), d, xn, d, false,
                     pg);
}

struct cofi_tri_cpu_grads cofi_tri_slice(struct cofi_tri_plan *plan, int64_t slice)
{
    struct cofi_tri_cpu_state *st = plan->state;
    struct cofi_tri_cpu_grads grads;
    cofi_tri_cpu_grads_at(plan, &st->sizes, st->slices + slice * st->sizes.slice_floats, &grads);
    return grads;
}

/* ---- all tiles ------------------------------------------------------------------------------ */

struct tile_job {
    struct cofi_tri_plan *plan;
    bool by_slice;
    cofi_tri_tile_fn fn;
    const void *arg;
};

static void tile_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    const struct tile_job *job = arg;
    const struct cofi_tri_cpu_state *st = job->plan->state;
    const int64_t n_tiles = st->n_tiles, n_slices = st->n_slices;
    struct cofi_tri_cpu_grads grads;
    struct cofi_tri_tile tile;
    int64_t first = task, last = task + 1;
    if (job->by_slice) {
        grads = cofi_tri_slice(job->plan, task);
        first = n_tiles * task / n_slices;
        last = n_tiles * (task + 1) / n_slices;
    }
    for (int64_t idx = first; idx < last; idx++) {
        cofi_tri_tile_open(&tile, job->plan, worker, idx);
        job->fn(&tile, job->by_slice ? &grads : NULL, job->arg);
    }
}

void cofi_tri_each_tile(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, bool by_slice,
                        cofi_tri_tile_fn fn, const void *arg)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    struct tile_job job = {plan, by_slice, fn, arg};
    cofi_cpu_parallel(s, by_slice ? st->n_slices : st->n_tiles, tile_task, &job);
}
