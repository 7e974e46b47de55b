/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs, steps 1 to 5 and their backward: tiles of tokens against blocks of features. The
 * product p^T, g^T = w xn^T has a row for each feature: that of a or b is gated and stored where
 * the owner of the feature contracts it, without a transpose. */
#include "ops/trimul/trimul_cpu_tiles.h"

/* ---- forward -------------------------------------------------------------------------------- */

/* a (half 0) or b of the features of a block. */
static void store_half(struct cofi_tri_tile *t, const float *pg, int64_t block, int half,
                       const float *mask, float *row)
{
    const struct cofi_tri_cpu_state *st = t->st;
    const int64_t features = st->sizes.block, n = t->n;
    const float *bias = st->weights.in_bias + block * 4 * features;
    for (int64_t f = 0; f < features; f++) {
        const int64_t h = block * features + f, p = half * features + f, g = p + 2 * features;
        if (h >= t->plan->params.hidden)
            return;
        const struct cofi_tri_port *port =
            st->ports + COFI_TRI_AB * t->plan->n_ranks + st->owner[h / COFI_TRI_GROUP];
        const struct cofi_gate_row gate = {.p = pg + p * n, .g = pg + g * n, .p_bias = bias[p],
                                           .g_bias = bias[g], .mask = mask, .n = n};
        t->gate->gate(row, &gate);
        cofi_tri_store_across(t, port, t->plan->elem, half, h, row);
    }
}

static void front_tile(struct cofi_tri_tile *t, const struct cofi_tri_cpu_grads *grads,
                       const void *arg)
{
    const int round = *(const int *)arg;
    const float *mask = cofi_tri_mask(t);
    const char *xn = cofi_tri_norm_in(t, NULL, NULL);
    float *pg = cofi_tri_take_floats(t, 4 * t->st->sizes.block * t->n);
    float *row = cofi_tri_take_floats(t, t->n);
    (void)grads;
    for (int64_t block = 0; block < t->st->sizes.n_blocks; block++) {
        if (t->st->round[block] != round)
            continue;
        cofi_tri_project(t, xn, block, pg);
        store_half(t, pg, block, 0, mask, row);
        store_half(t, pg, block, 1, mask, row);
    }
}

void cofi_tri_cpu_front(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, int round)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const int64_t block = st->sizes.block;
    cofi_tri_each_tile(s, plan, false, front_tile, &round);
    for (int64_t k = 0; k < st->sizes.n_blocks; k++)
        if (st->round[k] == round)
            cofi_tri_cpu_deliver(plan, COFI_TRI_AB, k * block, (k + 1) * block);
}

/* ---- backward ------------------------------------------------------------------------------- */

/* dp and dg in the place of p and g; rows past H become 0. */
static void grad_half(struct cofi_tri_tile *t, float *pg, int64_t block, int half,
                      const float *mask, float *row)
{
    const struct cofi_tri_cpu_state *st = t->st;
    const int64_t features = st->sizes.block, n = t->n;
    const float *bias = st->weights.in_bias + block * 4 * features;
    for (int64_t f = 0; f < features; f++) {
        const int64_t h = block * features + f, p = half * features + f, g = p + 2 * features;
        if (h >= t->plan->params.hidden) {
            memset(pg + p * n, 0, (size_t)n * sizeof *pg);
            memset(pg + g * n, 0, (size_t)n * sizeof *pg);
            continue;
        }
        const struct cofi_gate_row gate = {.p = pg + p * n, .g = pg + g * n, .p_bias = bias[p],
                                           .g_bias = bias[g], .mask = mask, .n = n};
        cofi_tri_load_across(t, &st->inbox[COFI_TRI_DAB], COFI_ELEM_F32, half, h, row);
        t->gate->gate_grad(pg + p * n, pg + g * n, row, &gate);
    }
}

static void add_in_grads(const struct cofi_tri_tile *t, const struct cofi_tri_cpu_grads *grads,
                         int64_t block, const float *dpg, const char *typed, const char *xn)
{
    const int64_t d = t->plan->params.dim, rows = 4 * t->st->sizes.block;
    cofi_tri_product(t, COFI_GEMM_NN, rows, d, t->n, typed, t->n, xn, d, true,
                     grads->in + block * rows * d);
    for (int64_t r = 0; r < rows; r++)
        grads->in_bias[block * rows + r] += t->gate->sum(dpg + r * t->n, t->n);
}

/* The part of d xn that came by the gate, as back_grad left it. */
static void load_stash(const struct cofi_tri_tile *t, float *dxn)
{
    const int64_t d = t->plan->params.dim;
    const struct cofi_tri_shape *s = &t->st->shape;
    const int64_t row = (t->b * s->own.n_rows + t->i - s->own.row) * s->own.n_cols;
    const int64_t at = row + t->j0 + t->begin - s->own.col;
    memset(dxn, 0, (size_t)(t->n * d) * sizeof *dxn);
    cofi_vec_load(t->vec, t->plan->wide, dxn + t->begin * d,
                  t->st->stash + at * d * cofi_elem_bytes(t->plan->wide),
                  (t->end - t->begin) * d);
}

static void store_dx(struct cofi_tri_tile *t, const struct cofi_norm_row *rows, float *dxn,
                     const struct cofi_tri_cpu_grads *grads)
{
    const int64_t d = t->plan->params.dim;
    float *dout = cofi_tri_take_floats(t, d);
    for (int64_t j = t->begin; j < t->end; j++) {
        float *row = dxn + j * d;
        t->gate->norm_grad(row, row, &rows[j], grads ? grads->norm_in[0] : NULL,
                           grads ? grads->norm_in[1] : NULL);
        if (t->st->call.add_dout) {
            cofi_tri_load_row(t, &t->st->call.dout, j, dout);
            t->vec->add_f32(row, dout, d);
        }
        cofi_tri_store_row(t, &t->st->call.dx, j, row);
    }
}

static void front_grad_tile(struct cofi_tri_tile *t, const struct cofi_tri_cpu_grads *grads,
                            const void *arg)
{
    const int64_t d = t->plan->params.dim, pg_rows = 4 * t->st->sizes.block;
    struct cofi_norm_row *rows = cofi_tri_take(t, t->n * (int64_t)sizeof *rows);
    float *x = cofi_tri_take_floats(t, t->n * d), *dxn = cofi_tri_take_floats(t, t->n * d);
    float *pg = cofi_tri_take_floats(t, pg_rows * t->n), *row = cofi_tri_take_floats(t, t->n);
    const float *mask = cofi_tri_mask(t);
    const char *xn = cofi_tri_norm_in(t, x, rows);
    (void)arg;
    load_stash(t, dxn);
    for (int64_t block = 0; block < t->st->sizes.n_blocks; block++) {
        const size_t used = t->used;
        cofi_tri_project(t, xn, block, pg);
        grad_half(t, pg, block, 0, mask, row);
        grad_half(t, pg, block, 1, mask, row);
        const char *typed = cofi_tri_typed(t, pg, pg_rows * t->n);
        cofi_tri_product(t, COFI_GEMM_TN, t->n, d, pg_rows, typed, t->n,
                         cofi_tri_typed_at(t, t->st->weights.in, block * pg_rows * d), d, true,
                         dxn);
        if (grads)
            add_in_grads(t, grads, block, pg, typed, xn);
        t->used = used;
    }
    store_dx(t, rows, dxn, grads);
}

void cofi_tri_cpu_front_grad(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    cofi_tri_each_tile(s, plan, cofi_tri_wants_grads(&st->call), front_grad_tile, NULL);
}
