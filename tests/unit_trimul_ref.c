/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The trimul reference: results against the formulas written once more, gradients against
 * differences of the loss sum(dout * out), for every set of optional inputs and both directions. */
#include <math.h>

#include "trimul_ref_test.h"

/* The formulas once more, from the inputs for each value asked for. */

static double in_or(const struct test *t, int which, int64_t at, double otherwise)
{
    const double *data = input(t, which);
    return data ? data[at] : otherwise;
}

/* [(x - E x) / sqrt(E x^2 - (E x)^2 + eps)] w + b */
static double norm_at(const struct test *t, const double *x, int64_t n, int64_t at, double eps,
                      int w, int b)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i];
        squares += x[i] * x[i];
    }
    const double mean = sum / (double)n, var = squares / (double)n - mean * mean;
    return (x[at] - mean) / sqrt(var + eps) * in_or(t, w, at, 1) + in_or(t, b, at, 0);
}

/* bias_o + sum_d w_od norm(x[batch, i, j])_d */
static double linear_at(const struct test *t, int w, int bias, int64_t o, int64_t batch, int64_t i,
                        int64_t j)
{
    double sum = in_or(t, bias, o, 0);
    const double *x = t->in[X] + ((batch * t->n + i) * t->n + j) * t->dim;
    for (int64_t d = 0; d < t->dim; d++)
        sum += norm_at(t, x, t->dim, d, t->eps_in, NORM_IN_W, NORM_IN_B) * t->in[w][o * t->dim + d];
    return sum;
}

static double ab_at(const struct test *t, int64_t c, int64_t batch, int64_t i, int64_t j)
{
    return linear_at(t, P_IN, P_IN_B, c, batch, i, j) /
           (1 + exp(-linear_at(t, G_IN, G_IN_B, c, batch, i, j))) *
           in_or(t, MASK, (batch * t->n + i) * t->n + j, 1);
}

static double tri_at(const struct test *t, int64_t h, int64_t batch, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t k = 0; k < t->n; k++)
        sum += t->incoming
                   ? ab_at(t, h, batch, k, i) * ab_at(t, t->hidden + h, batch, k, j)
                   : ab_at(t, h, batch, i, k) * ab_at(t, t->hidden + h, batch, j, k);
    return sum;
}

static void require_near(double ours, double expected)
{
    REQUIRE(fabs(ours - expected) <= 1e-12 * (1 + fabs(expected)));
}

static void check_pair(const struct test *t, int64_t batch, int64_t i, int64_t j)
{
    const int64_t pair = (batch * t->n + i) * t->n + j, hidden = t->hidden;
    double tri[8];
    for (int64_t h = 0; h < hidden; h++) {
        tri[h] = tri_at(t, h, batch, i, j);
        require_near(t->out[A][pair * hidden + h], ab_at(t, h, batch, i, j));
        require_near(t->out[B][pair * hidden + h], ab_at(t, hidden + h, batch, i, j));
        require_near(t->out[TRI][pair * hidden + h], tri[h]);
    }
    for (int64_t d = 0; d < t->dim; d++) {
        double sum = in_or(t, P_OUT_B, d, 0);
        for (int64_t h = 0; h < hidden; h++)
            sum += t->in[P_OUT][d * hidden + h] *
                   norm_at(t, tri, hidden, h, t->eps_out, NORM_OUT_W, NORM_OUT_B);
        require_near(t->out[OUT][pair * t->dim + d],
                     sum / (1 + exp(-linear_at(t, G_OUT, G_OUT_B, d, batch, i, j))) +
                         in_or(t, RESIDUAL, pair * t->dim + d, 0));
    }
}

static void check_forward(const struct test *t)
{
    forward(t);
    for (int64_t pair = 0; pair < t->n_batch * t->n * t->n; pair++)
        check_pair(t, pair / (t->n * t->n), pair / t->n % t->n, pair % t->n);
}

/* sum(dout * out) at inputs + step * way. */
static double loss(const struct test *t, double *const *way, double step)
{
    double sum = 0;
    struct test moved = *t;
    for (int i = 0; i < N_GRADS; i++) {
        if (!way[i])
            continue;
        moved.in[i] = tensor_open(t->in_size[i]);
        for (int64_t at = 0; at < t->in_size[i]; at++)
            moved.in[i][at] = t->in[i][at] + step * way[i][at];
    }
    forward(&moved);
    for (int64_t at = 0; at < t->out_size[OUT]; at++)
        sum += t->in[DOUT][at] * t->out[OUT][at];
    for (int i = 0; i < N_GRADS; i++)
        if (way[i])
            tensor_close(moved.in[i], t->in_size[i]);
    return sum;
}

/* Differences of the fourth order: their error is the rounding of the losses over the step. */
static double derivative(const struct test *t, double *const *way)
{
    const double step = 1.0 / 32768;
    double near = loss(t, way, step) - loss(t, way, -step);
    double far = loss(t, way, 2 * step) - loss(t, way, -2 * step);
    return (8 * near - far) / (12 * step);
}

/* All inputs at once, each element its own way. The gradients are written, not added to. */
static void check_direction(const struct test *t)
{
    double *way[N_GRADS], sum = 0, size = 1;
    for (int i = 0; i < N_GRADS; i++) {
        set(t->grad[i], t->in_size[i], NAN);
        way[i] = tensor_open(t->in_size[i]);
    }
    backward(t);
    for (int i = 0; i < N_GRADS; i++)
        for (int64_t at = 0; input(t, i) && at < t->in_size[i]; at++) {
            sum += t->grad[i][at] * way[i][at];
            size += fabs(t->grad[i][at] * way[i][at]);
        }
    REQUIRE(fabs(derivative(t, way) - sum) <= 1e-9 * size);
    for (int i = 0; i < N_GRADS; i++)
        tensor_close(way[i], t->in_size[i]);
}

/* Each element of each input alone. */
static void check_elements(const struct test *t)
{
    backward(t);
    for (int i = 0; i < N_GRADS; i++) {
        double *way[N_GRADS] = {0};
        if (!input(t, i))
            continue;
        way[i] = tensor_open(t->in_size[i]);
        set(way[i], t->in_size[i], 0);
        for (int64_t at = 0; at < t->in_size[i]; at++) {
            way[i][at] = 1;
            REQUIRE(fabs(derivative(t, way) - t->grad[i][at]) <=
                    5e-9 * (1 + fabs(t->grad[i][at])));
            way[i][at] = 0;
        }
        tensor_close(way[i], t->in_size[i]);
    }
}

static void check_options(int64_t n, int64_t dim, int64_t hidden)
{
    struct test tests[2] = {test_open(1, n, dim, hidden), test_open(2, n, dim, hidden)};
    for (int i = 0; i < 2 << N_OPTIONAL; i++) {
        const int incoming = i & 1, options = i >> 1;
        struct test *t = &tests[options % 3 == 0]; /* B = 2 has both 0 and ALL */
        t->incoming = incoming;
        t->options = options;
        if (n > 2 && options % 13 != 0 && options != ALL) /* some, for time */
            continue;
        snprintf(now, sizeof now, "B=%d N=%d D=%d H=%d incoming=%d options=%d", (int)t->n_batch,
                 (int)n, (int)dim, (int)hidden, incoming, options);
        check_forward(t);
        check_direction(t);
        if (options == 0 || options == ALL)
            check_elements(t);
    }
    test_close(&tests[0]);
    test_close(&tests[1]);
}

int main(void)
{
    for (int64_t n = 1; n <= 5; n += n == 1 ? 1 : 3)
        for (int64_t dim = 3; dim <= 8; dim += 5)
            for (int64_t hidden = 2; hidden <= 5; hidden += 3)
                check_options(n, dim, hidden);
    return 0;
}
