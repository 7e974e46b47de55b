/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs, steps 7 and 8 and their backward, by tiles of tokens. tri comes with a row across
 * the tile for each feature: its norms are taken across rows, and trin^T [H][tokens] is an operand
 * as it is. */
#include "ops/trimul/trimul_cpu_tiles.h"

/* What steps 7 and 8 have for a tile. */
struct back {
    char *xn, *trin;      /* [n][D], [H][n], in the type of products */
    float *z;             /* [H][n]: tri normed, without gain and bias */
    float *rstd;          /* [n] */
    float *proj, *gate;   /* [n][D], without bias */
};

/* z, rstd and trin. */
static void norm_out(struct cofi_tri_tile *t, struct back *b)
{
    const int64_t hidden = t->plan->params.hidden, n = t->n;
    float *mean = cofi_tri_take_floats(t, n), *row = cofi_tri_take_floats(t, n);
    float *const *weights = t->st->weights.norm_out;
    b->z = cofi_tri_take_floats(t, hidden * n);
    b->rstd = cofi_tri_take_floats(t, n);
    b->trin = cofi_tri_take_typed(t, hidden * n);
    memset(mean, 0, (size_t)n * sizeof *mean);
    memset(b->rstd, 0, (size_t)n * sizeof *b->rstd);
    for (int64_t h = 0; h < hidden; h++) {
        cofi_tri_load_across(t, &t->st->inbox[COFI_TRI_TRI], t->plan->wide, 0, h, b->z + h * n);
        t->vec->add_f32(mean, b->z + h * n, n);
    }
    t->vec->scale(mean, 1 / (float)hidden, n);
    for (int64_t h = 0; h < hidden; h++)
        t->gate->add_squares(b->rstd, b->z + h * n, mean, n);
    t->gate->rstd(b->rstd, (float)hidden, (float)t->plan->params.eps_out, n);
    for (int64_t h = 0; h < hidden; h++) {
        float *z = b->z + h * n;
        float *to = t->st->type == COFI_GEMM_F32 ? (float *)(void *)b->trin + h * n : row;
        t->gate->norm_across(to, z, z, mean, b->rstd, weights[0][h], weights[1][h], n);
        cofi_tri_to_typed(t, b->trin, h * n, to, n);
    }
}

static void back_open(struct cofi_tri_tile *t, struct back *b)
{
    const int64_t d = t->plan->params.dim, hidden = t->plan->params.hidden, n = t->n;
    b->xn = cofi_tri_norm_in(t, NULL, NULL);
    norm_out(t, b);
    b->proj = cofi_tri_take_floats(t, n * d);
    b->gate = cofi_tri_take_floats(t, n * d);
    cofi_tri_product(t, COFI_GEMM_TN, n, d, hidden, b->trin, n, t->st->weights.out_t, d, false,
                     b->proj);
    cofi_tri_product(t, COFI_GEMM_NT, n, d, d, b->xn, d, t->st->weights.gate, d, false, b->gate);
}

/* ---- forward -------------------------------------------------------------------------------- */

static void back_tile(struct cofi_tri_tile *t, const struct cofi_tri_cpu_grads *grads,
                      const void *arg)
{
    const struct cofi_tri_call *call = &t->st->call;
    const struct cofi_tri_cpu_weights *w = &t->st->weights;
    const int64_t d = t->plan->params.dim;
    struct back b;
    (void)grads;
    (void)arg;
    back_open(t, &b);
    float *add = call->residual.data ? cofi_tri_take_floats(t, d) : NULL;
    for (int64_t j = t->begin; j < t->end; j++) {
        float *row = b.proj + j * d;
        if (add)
            cofi_tri_load_row(t, &call->residual, j, add);
        t->gate->out_gate(row, row, w->out_bias, b.gate + j * d, w->gate_bias, add, d);
        cofi_tri_store_row(t, &call->out, j, row);
    }
}

void cofi_tri_cpu_back(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    cofi_tri_each_tile(s, plan, false, back_tile, NULL);
}

/* ---- backward ------------------------------------------------------------------------------- */

/* d proj and d gate in the place of proj and gate; rows without data become 0. */
static void grad_gate(struct cofi_tri_tile *t, struct back *b)
{
    const struct cofi_tri_cpu_weights *w = &t->st->weights;
    const int64_t d = t->plan->params.dim;
    float *dout = cofi_tri_take_floats(t, d);
    for (int64_t j = 0; j < t->n; j++) {
        float *proj = b->proj + j * d, *gate = b->gate + j * d;
        if (j < t->begin || j >= t->end) {
            memset(proj, 0, (size_t)d * sizeof *proj);
            memset(gate, 0, (size_t)d * sizeof *gate);
            continue;
        }
        cofi_tri_load_row(t, &t->st->call.dout, j, dout);
        t->gate->out_gate_grad(proj, gate, dout, proj, w->out_bias, gate, w->gate_bias, d);
    }
}

/* From d trin [H][n] to d tri, at the owners of features. */
static void grad_norm_out(struct cofi_tri_tile *t, const struct back *b, float *dtrin,
                          const struct cofi_tri_cpu_grads *grads)
{
    const int64_t hidden = t->plan->params.hidden, n = t->n;
    const float *gain = t->st->weights.norm_out[0];
    float *sum = cofi_tri_take_floats(t, n), *sum_z = cofi_tri_take_floats(t, n);
    memset(sum, 0, (size_t)n * sizeof *sum);
    memset(sum_z, 0, (size_t)n * sizeof *sum_z);
    for (int64_t h = 0; h < hidden; h++) {
        const float *dy = dtrin + h * n, *z = b->z + h * n;
        t->gate->add_grads(sum, sum_z, dy, z, gain[h], n);
        if (grads) {
            grads->norm_out[0][h] += t->vec->dot_f32(dy, z, n);
            grads->norm_out[1][h] += t->gate->sum(dy, n);
        }
    }
    for (int64_t h = 0; h < hidden; h++) {
        float *dy = dtrin + h * n;
        const struct cofi_tri_port *port = t->st->ports + COFI_TRI_DTRI * t->plan->n_ranks +
                                           t->st->owner[h / COFI_TRI_GROUP];
        t->gate->norm_grad_across(dy, dy, b->z + h * n, b->rstd, sum, sum_z, gain[h],
                                  (float)hidden, n);
        cofi_tri_store_across(t, port, t->plan->wide, 0, h, dy);
    }
}

static void add_out_grads(const struct cofi_tri_tile *t, const struct cofi_tri_cpu_grads *grads,
                          const struct back *b, const char *dproj, const char *dgate)
{
    const int64_t d = t->plan->params.dim, hidden = t->plan->params.hidden, n = t->n;
    cofi_tri_product(t, COFI_GEMM_NN, hidden, d, n, b->trin, n, dproj, d, true, grads->out_t);
    cofi_tri_product(t, COFI_GEMM_TN, d, d, n, dgate, d, b->xn, d, true, grads->gate);
    for (int64_t j = t->begin; j < t->end; j++) {
        t->vec->add_f32(grads->out_bias, b->proj + j * d, d);
        t->vec->add_f32(grads->gate_bias, b->gate + j * d, d);
    }
}

static void store_stash(const struct cofi_tri_tile *t, const float *dxn)
{
    const int64_t d = t->plan->params.dim;
    const struct cofi_tri_shape *s = &t->st->shape;
    const int64_t row = (t->b * s->own.n_rows + t->i - s->own.row) * s->own.n_cols;
    const int64_t at = row + t->j0 + t->begin - s->own.col;
    cofi_vec_store(t->vec, t->plan->wide, t->st->stash + at * d * cofi_elem_bytes(t->plan->wide),
                   dxn + t->begin * d, (t->end - t->begin) * d);
}

static void back_grad_tile(struct cofi_tri_tile *t, const struct cofi_tri_cpu_grads *grads,
                           const void *arg)
{
    const int64_t d = t->plan->params.dim, hidden = t->plan->params.hidden, n = t->n;
    struct back b;
    (void)arg;
    back_open(t, &b);
    grad_gate(t, &b);
    const char *dproj = cofi_tri_typed(t, b.proj, n * d), *dgate = cofi_tri_typed(t, b.gate, n * d);
    float *dtrin = cofi_tri_take_floats(t, hidden * n), *dxn = cofi_tri_take_floats(t, n * d);
    cofi_tri_product(t, COFI_GEMM_NT, hidden, n, d, t->st->weights.out_t, d, dproj, d, false,
                     dtrin);
    cofi_tri_product(t, COFI_GEMM_NN, n, d, d, dgate, d, t->st->weights.gate, d, false, dxn);
    store_stash(t, dxn);
    if (grads)
        add_out_grads(t, grads, &b, dproj, dgate);
    grad_norm_out(t, &b, dtrin, grads);
}

void cofi_tri_cpu_back_grad(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    cofi_tri_each_tile(s, plan, cofi_tri_wants_grads(&st->call), back_grad_tile, NULL);
    cofi_tri_cpu_deliver(plan, COFI_TRI_DTRI, 0, plan->params.hidden);
}
