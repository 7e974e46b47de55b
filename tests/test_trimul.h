/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Whole problems of trimul for tests: global tensors that follow from a seed, their parts for a
 * rank, results gathered again, and the reference of them. */
#ifndef COFUSE_TEST_TRIMUL_H
#define COFUSE_TEST_TRIMUL_H

#include <math.h>
#include <stdbool.h>

#include "backend/cpu/vec.h"
#include "ops/trimul/trimul_ref.h"
#include "test.h"

enum { TEST_TRI_WEIGHTS = 12 };

struct test_tri_problem {
    cof_trimul_params params;
    int64_t n, n_batch; /* of the call */
    int n_ranks;
    bool with_mask, with_biases, with_residual, with_grads;
    int seed, n_repeats;
    float offset; /* added to x */
};

/* Global tensors; x, mask, residual, dout hold values of the type. */
struct test_tri {
    struct test_tri_problem p;
    float *x, *mask, *residual, *dout, *weights[TEST_TRI_WEIGHTS];
    float *out, *dx, *grads[TEST_TRI_WEIGHTS];
    int64_t n_pairs, weight_elements[TEST_TRI_WEIGHTS];
};

static inline void test_tri_weight_dims(const cof_trimul_params *p, int64_t dims[][2])
{
    const int64_t d = p->dim, h = p->hidden ? p->hidden : p->dim;
    const int64_t all[TEST_TRI_WEIGHTS][2] = {{0, d}, {0, d}, {2 * h, d}, {0, 2 * h}, {2 * h, d},
                                              {0, 2 * h}, {0, h}, {0, h}, {d, h}, {0, d}, {d, d},
                                              {0, d}};
    memcpy(dims, all, sizeof all);
}

static inline enum cofi_elem test_tri_elem(cof_dtype dtype)
{
    return cofi_elem_of(dtype);
}

/* Rounds to the type. */
static inline void test_tri_round(cof_dtype dtype, float *x, int64_t n)
{
    void *typed = malloc((size_t)n * sizeof *x);
    cofi_vec_store(&cofi_vec_scalar, test_tri_elem(dtype), typed, x, n);
    cofi_vec_load(&cofi_vec_scalar, test_tri_elem(dtype), x, typed, n);
    free(typed);
}

static inline float *test_tri_random(cof_dtype dtype, int64_t n, unsigned *seed, float scale,
                                     float offset)
{
    float *x = malloc((size_t)n * sizeof *x + 64);
    for (int64_t i = 0; i < n; i++)
        x[i] = offset + scale * ((float)(rand_r(seed) % 4001) / 2000 - 1);
    test_tri_round(dtype, x, n);
    return x;
}

static inline void test_tri_make(struct test_tri *t, const struct test_tri_problem *p)
{
    unsigned seed = (unsigned)p->seed;
    const cof_dtype dtype = p->params.dtype;
    const int64_t d = p->params.dim;
    int64_t dims[TEST_TRI_WEIGHTS][2];
    *t = (struct test_tri){.p = *p, .n_pairs = p->n_batch * p->n * p->n};
    t->x = test_tri_random(dtype, t->n_pairs * d, &seed, 1.5f, p->offset);
    t->mask = p->with_mask ? test_tri_random(dtype, t->n_pairs, &seed, 1, 0.2f) : NULL;
    t->residual = p->with_residual ? test_tri_random(dtype, t->n_pairs * d, &seed, 1, 0) : NULL;
    t->dout = test_tri_random(dtype, t->n_pairs * d, &seed, 1, 0);
    test_tri_weight_dims(&p->params, dims);
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++) {
        const bool is_gain = i == 0 || i == 6, is_vector = dims[i][0] == 0;
        const int64_t n = dims[i][1] * (is_vector ? 1 : dims[i][0]);
        t->weight_elements[i] = n;
        if (!is_vector || p->with_biases)
            t->weights[i] = test_tri_random(dtype, n, &seed,
                                            is_vector ? 0.5f : 1.5f / sqrtf((float)dims[i][1]),
                                            is_gain ? 1 : 0);
        t->grads[i] = calloc((size_t)n, sizeof(float));
    }
    t->out = calloc((size_t)(t->n_pairs * d), sizeof(float));
    t->dx = calloc((size_t)(t->n_pairs * d), sizeof(float));
}

static inline void test_tri_free(struct test_tri *t)
{
    float *all[] = {t->x, t->mask, t->residual, t->dout, t->out, t->dx};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++) {
        free(t->weights[i]);
        free(t->grads[i]);
    }
}

/* ---- a rank's part -------------------------------------------------------------------------- */

struct test_tri_part {
    cof_trimul_block block;
    cof_shape shape, weight_shape[TEST_TRI_WEIGHTS];
    cof_tensor x, mask, residual, out, dout, dx, saved;
    cof_tensor weights[TEST_TRI_WEIGHTS], grads[TEST_TRI_WEIGHTS];
    cof_shape saved_shape;
    cof_trimul_weights weight_args;
    cof_trimul_grads grad_args;
    cof_trimul_args args;
};

/* Rows of `width` values of the rank's block, to or from a global tensor. */
static inline void test_tri_copy(const struct test_tri *t, const cof_trimul_block *block,
                                 float *global, int64_t width, void *local, bool to_local)
{
    const enum cofi_elem elem = test_tri_elem(t->p.params.dtype);
    int64_t at = 0;
    for (int64_t b = 0; b < t->p.n_batch; b++)
        for (int64_t i = block->row; i < block->row + block->n_rows; i++)
            for (int64_t j = block->col; j < block->col + block->n_cols; j++, at += width) {
                float *g = global + ((b * t->p.n + i) * t->p.n + j) * width;
                char *l = (char *)local + at * cofi_elem_bytes(elem);
                if (to_local)
                    cofi_vec_store(&cofi_vec_scalar, elem, l, g, width);
                else
                    cofi_vec_load(&cofi_vec_scalar, elem, g, l, width);
            }
}

static inline cof_tensor test_tri_tensor(const struct test_tri *t, struct test_tri_part *part,
                                         float *global, int ndim)
{
    const int64_t width = ndim == 4 ? t->p.params.dim : 1;
    const int64_t n = t->p.n_batch * part->block.n_rows * part->block.n_cols * width;
    void *data = malloc((size_t)n * 4 + 64);
    if (global)
        test_tri_copy(t, &part->block, global, width, data, true);
    return cof_tensor_make(data, (cof_device){COF_DEVICE_CPU, 0}, t->p.params.dtype, ndim,
                           &part->shape);
}

static inline void test_tri_part_make(struct test_tri_part *part, struct test_tri *t, int rank,
                                      size_t saved_bytes)
{
    const cof_device cpu = {COF_DEVICE_CPU, 0};
    const cof_dtype dtype = t->p.params.dtype;
    int64_t dims[TEST_TRI_WEIGHTS][2];
    memset(part, 0, sizeof *part);
    CHECK_OK(cof_trimul_block_of(&t->p.params, t->p.n_ranks, rank, t->p.n, &part->block));
    part->shape = (cof_shape){{t->p.n_batch, part->block.n_rows, part->block.n_cols,
                               t->p.params.dim}};
    part->x = test_tri_tensor(t, part, t->x, 4);
    part->mask = test_tri_tensor(t, part, t->mask, 3);
    part->residual = test_tri_tensor(t, part, t->residual, 4);
    part->dout = test_tri_tensor(t, part, t->dout, 4);
    part->out = test_tri_tensor(t, part, t->out, 4);
    part->dx = test_tri_tensor(t, part, t->dx, 4);
    part->saved_shape = (cof_shape){{(int64_t)saved_bytes}};
    part->saved = cof_tensor_make(aligned_alloc(128, (saved_bytes + 128) & ~(size_t)127), cpu,
                                  COF_U8, 1, &part->saved_shape);
    test_tri_weight_dims(&t->p.params, dims);
    const cof_tensor **w = &part->weight_args.norm_in_w, **g = &part->grad_args.norm_in_w;
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++) {
        const int ndim = dims[i][0] ? 2 : 1;
        part->weight_shape[i] = ndim == 2 ? (cof_shape){{dims[i][0], dims[i][1]}}
                                          : (cof_shape){{dims[i][1]}};
        void *data = malloc((size_t)t->weight_elements[i] * 4);
        if (t->weights[i])
            cofi_vec_store(&cofi_vec_scalar, test_tri_elem(dtype), data, t->weights[i],
                           t->weight_elements[i]);
        part->weights[i] = cof_tensor_make(data, cpu, dtype, ndim, &part->weight_shape[i]);
        part->grads[i] = cof_tensor_make(calloc((size_t)t->weight_elements[i], 4), cpu, COF_F32,
                                         ndim, &part->weight_shape[i]);
        w[i] = t->weights[i] ? &part->weights[i] : NULL;
        g[i] = &part->grads[i];
    }
    part->weight_args.size = sizeof part->weight_args;
    part->grad_args.size = sizeof part->grad_args;
    part->args = (cof_trimul_args){.size = sizeof part->args, .n = t->p.n, .x = &part->x,
                                   .mask = t->mask ? &part->mask : NULL,
                                   .residual = t->residual ? &part->residual : NULL,
                                   .out = &part->out, .dout = &part->dout, .dx = &part->dx,
                                   .saved = saved_bytes ? &part->saved : NULL,
                                   .grads = t->p.with_grads ? &part->grad_args : NULL};
}

static inline void test_tri_part_free(struct test_tri_part *part)
{
    cof_tensor *all[] = {&part->x,    &part->mask, &part->residual, &part->out,
                         &part->dout, &part->dx,   &part->saved};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]->data);
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++) {
        free(part->weights[i].data);
        free(part->grads[i].data);
    }
}

/* ---- runs ----------------------------------------------------------------------------------- */

static pthread_mutex_t test_tri_lock = PTHREAD_MUTEX_INITIALIZER;

/* out, dx and gradients of one call, gathered; of a rank that runs it on a plan. */
static inline void test_tri_call(struct test_tri *t, cof_plan *plan, int rank, size_t saved_bytes,
                                 cof_stream stream)
{
    struct test_tri_part part;
    test_tri_part_make(&part, t, rank, saved_bytes);
    CHECK_OK(cof_trimul_set_weights(plan, &part.weight_args, COF_TRIMUL_CHECK, stream));
    for (int i = 0; i < (t->p.n_repeats ? t->p.n_repeats : 1); i++) {
        CHECK_OK(cof_trimul_forward(plan, &part.args, stream));
        if (!t->p.params.forward_only)
            CHECK_OK(cof_trimul_backward(plan, &part.args, stream));
    }
    if (stream.kind != (COF_STREAM_NOW).kind)
        CHECK_OK(cof_stream_sync(stream));
    test_tri_copy(t, &part.block, t->out, t->p.params.dim, part.out.data, false);
    pthread_mutex_lock(&test_tri_lock);
    if (!t->p.params.forward_only)
        test_tri_copy(t, &part.block, t->dx, t->p.params.dim, part.dx.data, false);
    for (int i = 0; i < TEST_TRI_WEIGHTS && !t->p.params.forward_only; i++)
        for (int64_t k = 0; k < t->weight_elements[i]; k++)
            t->grads[i][k] = ((float *)part.grads[i].data)[k] +
                             (t->p.params.reduce_param_grads ? 0 : t->grads[i][k]);
    pthread_mutex_unlock(&test_tri_lock);
    test_tri_part_free(&part);
}

static inline void test_tri_rank(int rank, int n_ranks, const char *job, void *arg)
{
    struct test_tri *t = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_plan *plan;
    CHECK_OK(cof_trimul_workspace(team, &t->p.params, &sizes));
    CHECK_OK(cof_trimul_plan_create(team, &t->p.params, NULL, &plan));
    test_tri_call(t, plan, rank, sizes.saved, COF_STREAM_NOW);
    CHECK_OK(cof_team_barrier(team));
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

static inline void test_tri_run(struct test_tri *t)
{
    test_ranks(t->p.n_ranks, test_tri_rank, t);
}

/* ---- the reference -------------------------------------------------------------------------- */

static inline double *test_tri_widen(const float *x, int64_t n)
{
    double *wide = x ? malloc((size_t)n * sizeof *wide) : NULL;
    for (int64_t i = 0; i < n && x; i++)
        wide[i] = (double)x[i];
    return wide;
}

/* Largest |got - want| / (max |want| + |want|) of a tensor. What cancels, as d x of D = 1 does, is
 * held against 0.1. */
static inline double test_tri_error(const float *got, const double *want, int64_t n)
{
    double most = 0.1, worst = 0;
    for (int64_t i = 0; i < n; i++)
        most = fabs(want[i]) > most ? fabs(want[i]) : most;
    for (int64_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]) / (most + fabs(want[i]));
        worst = error > worst || error != error ? (error == error ? error : INFINITY) : worst;
    }
    return worst;
}

static inline const char *test_tri_text(const struct test_tri *t)
{
    static _Thread_local char text[200];
    const cof_trimul_params *p = &t->p.params;
    snprintf(text, sizeof text, "%s %s N=%d B=%d D=%d H=%d P=%d grid=%dx%d mask=%d bias=%d save=%d",
             cof_dtype_name(p->dtype), p->direction ? "incoming" : "outgoing", (int)t->p.n,
             (int)t->p.n_batch, (int)p->dim, (int)p->hidden, t->p.n_ranks, p->grid_rows,
             p->grid_cols, t->p.with_mask, t->p.with_biases, (int)p->save);
    return text;
}

/* Checks everything against fp64, with a bound for out, and one for gradients. */
static inline void test_tri_compare(const struct test_tri *t, double bound, double grad_bound)
{
    const cof_trimul_params *p = &t->p.params;
    const int64_t n = t->n_pairs * p->dim;
    double *w[TEST_TRI_WEIGHTS], *dw[TEST_TRI_WEIGHTS];
    double *x = test_tri_widen(t->x, n), *mask = test_tri_widen(t->mask, t->n_pairs);
    double *residual = test_tri_widen(t->residual, n), *dout = test_tri_widen(t->dout, n);
    double *out = malloc((size_t)n * sizeof *out), *dx = malloc((size_t)n * sizeof *dx);
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++) {
        w[i] = test_tri_widen(t->weights[i], t->weight_elements[i]);
        dw[i] = malloc((size_t)t->weight_elements[i] * sizeof(double));
    }
    const struct cofi_trimul_ref_problem problem = {
        .n_batch = t->p.n_batch, .n = t->p.n, .dim = p->dim,
        .hidden = p->hidden ? p->hidden : p->dim, .incoming = p->direction,
        .eps_in = 1e-5, .eps_out = 1e-5, .x = x, .mask = mask, .residual = residual,
        .weights = {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11]}};
    const struct cofi_trimul_ref_grads grads = {dx,    dw[0], dw[1], dw[2], dw[3],  dw[4], dw[5],
                                                dw[6], dw[7], dw[8], dw[9], dw[10], dw[11],
                                                NULL};
    CHECK_OK(cofi_trimul_ref_forward(&problem, &(struct cofi_trimul_ref_out){.out = out}));
    double error = test_tri_error(t->out, out, n);
    CHECK(error <= bound, "%s: out %g", test_tri_text(t), error);
    if (!p->forward_only) {
        CHECK_OK(cofi_trimul_ref_backward(&problem, dout, &grads));
        error = test_tri_error(t->dx, dx, n);
        CHECK(error <= grad_bound, "%s: dx %g", test_tri_text(t), error);
    }
    for (int i = 0; i < TEST_TRI_WEIGHTS && !p->forward_only && t->p.with_grads; i++) {
        error = test_tri_error(t->grads[i], dw[i], t->weight_elements[i]);
        CHECK(error <= grad_bound, "%s: gradient %d %g", test_tri_text(t), i, error);
    }
    double *all[] = {x, mask, residual, dout, out, dx};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++) {
        free(w[i]);
        free(dw[i]);
    }
}

#endif
