/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A problem for the tests of the trimul reference, with results and gradients, and its calls. */
#ifndef COFI_TRIMUL_REF_TEST_H
#define COFI_TRIMUL_REF_TEST_H

#include <stdio.h>
#include <stdlib.h>

#include "ops/trimul/trimul_ref.h"

#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s [%s]\n", __FILE_NAME__, __LINE__, #cond, now);              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { NORM_IN_W, NORM_IN_B, P_IN, P_IN_B, G_IN, G_IN_B, NORM_OUT_W, NORM_OUT_B };
enum { P_OUT = NORM_OUT_B + 1, P_OUT_B, G_OUT, G_OUT_B, X, N_GRADS };
enum { MASK = N_GRADS, RESIDUAL, DOUT, N_INPUTS };
enum { OUT, A, B, TRI, N_RESULTS };

static const int optional[] = {NORM_IN_W,  NORM_IN_B, P_IN_B,  G_IN_B, NORM_OUT_W,
                               NORM_OUT_B, P_OUT_B,   G_OUT_B, MASK,   RESIDUAL};
enum { N_OPTIONAL = sizeof(optional) / sizeof(optional[0]), ALL = (1 << N_OPTIONAL) - 1 };

static const double canary = 12345.678;
static char now[100];
static uint32_t seed = 1;

/* Tensors of their own sizes, a canary behind each. options says which optional ones take part. */
struct test {
    int64_t n_batch, n, dim, hidden;
    int incoming, options;
    double eps_in, eps_out;
    int64_t in_size[N_INPUTS], out_size[N_RESULTS];
    double *in[N_INPUTS], *grad[N_GRADS], *out[N_RESULTS];
};

static inline double uniform(void)
{
    seed = seed * 1664525 + 1013904223;
    return (double)(int32_t)seed / 2147483648.0;
}

static inline double *tensor_open(int64_t n)
{
    double *data = malloc((size_t)(n + 1) * sizeof(double));
    REQUIRE(data);
    for (int64_t i = 0; i < n; i++)
        data[i] = uniform();
    data[n] = canary;
    return data;
}

static inline struct test test_open(int64_t n_batch, int64_t n, int64_t dim, int64_t hidden)
{
    const int64_t pairs = n_batch * n * n;
    struct test t = {
        n_batch, n, dim, hidden, 0, ALL, 0.05, 0.02,
        {dim, dim, 2 * hidden * dim, 2 * hidden, 2 * hidden * dim, 2 * hidden, hidden, hidden,
         dim * hidden, dim, dim * dim, dim, pairs * dim, pairs, pairs * dim, pairs * dim},
        {pairs * dim, pairs * hidden, pairs * hidden, pairs * hidden},
        {0}, {0}, {0}};
    for (int i = 0; i < N_INPUTS; i++)
        t.in[i] = tensor_open(t.in_size[i]);
    for (int i = 0; i < N_GRADS; i++)
        t.grad[i] = tensor_open(t.in_size[i]);
    for (int i = 0; i < N_RESULTS; i++)
        t.out[i] = tensor_open(t.out_size[i]);
    return t;
}

static inline void set(double *x, int64_t n, double value)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = value;
}

static inline void tensor_close(double *data, int64_t n)
{
    REQUIRE(data[n] == canary);
    free(data);
}

static inline void test_close(const struct test *t)
{
    for (int i = 0; i < N_INPUTS; i++)
        tensor_close(t->in[i], t->in_size[i]);
    for (int i = 0; i < N_GRADS; i++)
        tensor_close(t->grad[i], t->in_size[i]);
    for (int i = 0; i < N_RESULTS; i++)
        tensor_close(t->out[i], t->out_size[i]);
}

static inline const double *input(const struct test *t, int which)
{
    for (int i = 0; i < N_OPTIONAL; i++)
        if (optional[i] == which && !(t->options >> i & 1))
            return NULL;
    return t->in[which];
}

static inline struct cofi_trimul_ref_problem problem_of(const struct test *t)
{
    return (struct cofi_trimul_ref_problem){
        t->n_batch, t->n, t->dim, t->hidden, t->incoming, t->eps_in, t->eps_out,
        input(t, X), input(t, MASK), input(t, RESIDUAL),
        {input(t, NORM_IN_W), input(t, NORM_IN_B), input(t, P_IN), input(t, P_IN_B),
         input(t, G_IN), input(t, G_IN_B), input(t, NORM_OUT_W), input(t, NORM_OUT_B),
         input(t, P_OUT), input(t, P_OUT_B), input(t, G_OUT), input(t, G_OUT_B)}};
}

static inline void forward(const struct test *t)
{
    struct cofi_trimul_ref_problem problem = problem_of(t);
    struct cofi_trimul_ref_out out = {t->out[OUT], t->out[A], t->out[B], t->out[TRI]};
    REQUIRE(cofi_trimul_ref_forward(&problem, &out) == COF_OK);
}

static inline void backward(const struct test *t)
{
    struct cofi_trimul_ref_problem problem = problem_of(t);
    double *const *g = t->grad;
    struct cofi_trimul_ref_grads grads = {
        g[X], g[NORM_IN_W], g[NORM_IN_B], g[P_IN], g[P_IN_B], g[G_IN], g[G_IN_B],
        g[NORM_OUT_W], g[NORM_OUT_B], g[P_OUT], g[P_OUT_B], g[G_OUT], g[G_OUT_B], NULL};
    REQUIRE(cofi_trimul_ref_backward(&problem, t->in[DOUT], &grads) == COF_OK);
}

#endif
