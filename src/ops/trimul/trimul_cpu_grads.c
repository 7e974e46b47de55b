/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs: gradients of weights. The tokens of a rank are cut into slices, whose gradients
 * are summed each by itself, on one thread and in order; then the slices are added in order: how
 * many threads there are changes nothing. */
#include <string.h>

#include "ops/trimul/trimul_cpu_tiles.h"

#define ADD_FLOATS 4096 /* of a task */

static void clear_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    const struct cofi_tri_cpu_state *st = arg;
    (void)worker;
    memset(st->slices + task * st->sizes.slice_floats, 0,
           (size_t)st->sizes.slice_floats * sizeof *st->slices);
}

void cofi_tri_cpu_clear_slices(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    cofi_cpu_parallel(s, st->n_slices, clear_task, st);
}

/* Adds all slices to the first one. */
static void add_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    const struct cofi_tri_cpu_state *st = arg;
    const int64_t at = task * ADD_FLOATS, left = st->sizes.slice_floats - at;
    (void)worker;
    for (int64_t slice = 1; slice < st->n_slices; slice++)
        cofi_vec()->add_f32(st->slices + at, st->slices + slice * st->sizes.slice_floats + at,
                            left < ADD_FLOATS ? left : ADD_FLOATS);
}

/* Rows of p_in or g_in and their biases, out of their places in the blocks. */
static float *copy_in(const struct cofi_tri_plan *plan, const struct cofi_tri_cpu_grads *g,
                      bool is_gate, bool is_bias, float *to)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const int64_t hidden = plan->params.hidden, block = st->sizes.block;
    const int64_t width = is_bias ? 1 : plan->params.dim;
    const float *from = is_bias ? g->in_bias : g->in;
    for (int64_t c = 0; c < 2 * hidden; c++) {
        const int64_t h = c % hidden, part = (is_gate ? 2 : 0) + c / hidden;
        const int64_t row = (h / block * 4 + part) * block + h % block;
        memcpy(to, from + row * width, (size_t)width * sizeof *to);
        to += width;
    }
    return to;
}

static float *copy(const float *from, int64_t n, float *to)
{
    memcpy(to, from, (size_t)n * sizeof *to);
    return to + n;
}

void cofi_tri_cpu_sum_slices(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const int64_t d = plan->params.dim, hidden = plan->params.hidden;
    const struct cofi_tri_cpu_grads g = cofi_tri_slice(plan, 0);
    float *to = st->grads;
    cofi_cpu_parallel(s, (st->sizes.slice_floats + ADD_FLOATS - 1) / ADD_FLOATS, add_task, st);
    to = copy(g.norm_in[0], d, to);
    to = copy(g.norm_in[1], d, to);
    for (int is_gate = 0; is_gate < 2; is_gate++)
        for (int is_bias = 0; is_bias < 2; is_bias++)
            to = copy_in(plan, &g, is_gate, is_bias, to);
    to = copy(g.norm_out[0], hidden, to);
    to = copy(g.norm_out[1], hidden, to);
    for (int64_t i = 0; i < d; i++)
        for (int64_t h = 0; h < hidden; h++)
            *to++ = g.out_t[h * d + i];
    to = copy(g.out_bias, d, to);
    to = copy(g.gate, d * d, to);
    copy(g.gate_bias, d, to);
}

void cofi_tri_cpu_store_grads(struct cofi_tri_plan *plan, const float *grads)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++) {
        int64_t shape[2];
        cofi_tri_weight_shape(&plan->params, i, shape);
        const int64_t n = shape[0] * shape[1];
        if (st->call.grads[i])
            memcpy(st->call.grads[i], grads, (size_t)n * sizeof *grads);
        grads += n;
    }
}
