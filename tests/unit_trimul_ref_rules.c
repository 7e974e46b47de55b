/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the trimul reference promises beside values: absent inputs, batches, transposed and swapped
 * operands, zero rows, gates that overflow, and where NaN goes. */
#include <math.h>

#include "trimul_ref_test.h"

/* Same values (and so no NaN), moved or not. */
static int is_same(const double *x, const double *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (x[i] != y[i])
            return 0;
    return 1;
}

static int is_finite(const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return 0;
    return 1;
}

static int64_t transposed(int64_t pair, int64_t n)
{
    return (pair / (n * n) * n + pair % n) * n + pair / n % n;
}

/* Input `which` of src to dst. */
static void transpose(const struct test *src, const struct test *dst, int which)
{
    const int64_t n_pairs = src->n_batch * src->n * src->n, width = src->in_size[which] / n_pairs;
    for (int64_t pair = 0; pair < n_pairs; pair++) {
        const int64_t to = transposed(pair, src->n);
        for (int64_t d = 0; d < width; d++)
            dst->in[which][to * width + d] = src->in[which][pair * width + d];
    }
}

static void copy(const struct test *src, const struct test *dst)
{
    for (int i = 0; i < N_INPUTS; i++)
        for (int64_t at = 0; at < src->in_size[i]; at++)
            dst->in[i][at] = src->in[i][at];
}

/* What is absent counts as ones (gains, mask) or zeros, in gradients too, and a gradient is the
 * same whether others are wanted or not. */
static void check_absent(int incoming)
{
    struct test some = test_open(2, 5, 8, 5), none = test_open(2, 5, 8, 5);
    copy(&some, &none);
    some.incoming = none.incoming = incoming;
    none.options = 0;
    for (int i = 0; i < N_OPTIONAL; i++)
        set(some.in[optional[i]], some.in_size[optional[i]],
            optional[i] == NORM_IN_W || optional[i] == NORM_OUT_W || optional[i] == MASK);
    forward(&some), backward(&some);
    forward(&none), backward(&none);
    for (int i = 0; i < N_RESULTS; i++)
        REQUIRE(is_same(some.out[i], none.out[i], some.out_size[i]));
    for (int i = 0; i < N_GRADS; i++)
        REQUIRE(is_same(some.grad[i], none.grad[i], some.in_size[i]));

    struct cofi_trimul_ref_problem problem = problem_of(&none);
    struct cofi_trimul_ref_grads one = {.p_out_b = some.grad[P_OUT_B]};
    struct cofi_trimul_ref_out tri = {.tri = some.out[TRI]};
    set(some.grad[P_OUT_B], some.in_size[P_OUT_B], NAN);
    set(some.out[TRI], some.out_size[TRI], NAN);
    REQUIRE(cofi_trimul_ref_backward(&problem, none.in[DOUT], &one) == COF_OK);
    REQUIRE(cofi_trimul_ref_forward(&problem, &tri) == COF_OK);
    REQUIRE(is_same(some.grad[P_OUT_B], none.grad[P_OUT_B], some.in_size[P_OUT_B]));
    REQUIRE(is_same(some.out[TRI], none.out[TRI], some.out_size[TRI]));
    test_close(&some);
    test_close(&none);
}

/* B = 2 is two B = 1, but for the sums of the weights' gradients. */
static void check_batch(int incoming)
{
    struct test two = test_open(2, 5, 8, 5), one = test_open(1, 5, 8, 5);
    two.incoming = one.incoming = incoming;
    forward(&two), backward(&two);
    for (int64_t batch = 0; batch < 2; batch++) {
        for (int i = 0; i < N_INPUTS; i++) {
            const int64_t skip = two.in_size[i] > one.in_size[i] ? batch * one.in_size[i] : 0;
            for (int64_t at = 0; at < one.in_size[i]; at++)
                one.in[i][at] = two.in[i][skip + at];
        }
        forward(&one), backward(&one);
        for (int i = 0; i < N_RESULTS; i++)
            REQUIRE(is_same(one.out[i], two.out[i] + batch * one.out_size[i], one.out_size[i]));
        REQUIRE(is_same(one.grad[X], two.grad[X] + batch * one.in_size[X], one.in_size[X]));
    }
    test_close(&two);
    test_close(&one);
}

/* Incoming is outgoing of the transposed a and b. With the halves of p_in and g_in swapped tri is
 * transposed: AlphaFold 2's incoming, sum_k a_kj b_ki, is ours with swapped weights. */
static void check_incoming(int64_t n)
{
    struct test in = test_open(2, n, 8, 5), out = test_open(2, n, 8, 5);
    static const int halves[] = {P_IN, P_IN_B, G_IN, G_IN_B};
    copy(&in, &out);
    transpose(&in, &out, X);
    transpose(&in, &out, MASK);
    in.incoming = 1;
    forward(&in), forward(&out);
    REQUIRE(is_same(in.out[TRI], out.out[TRI], in.out_size[TRI]));
    REQUIRE(n == 1 || !is_same(in.out[A], out.out[A], in.out_size[A]));

    copy(&in, &out);
    for (int i = 0; i < 4; i++)
        for (int64_t size = in.in_size[halves[i]], at = 0; at < size; at++)
            out.in[halves[i]][at] = in.in[halves[i]][(at + size / 2) % size];
    for (int incoming = 0; incoming < 2; incoming++) {
        in.incoming = out.incoming = incoming;
        forward(&in), forward(&out);
        REQUIRE(is_same(in.out[A], out.out[B], in.out_size[A]));
        REQUIRE(is_same(in.out[B], out.out[A], in.out_size[A]));
        for (int64_t pair = 0; pair < 2 * n * n; pair++) {
            const int64_t to = transposed(pair, n);
            REQUIRE(is_same(in.out[TRI] + pair * 5, out.out[TRI] + to * 5, 5));
        }
    }
    test_close(&in);
    test_close(&out);
}

static void require_finite(const struct test *t)
{
    for (int i = 0; i < N_RESULTS; i++)
        REQUIRE(is_finite(t->out[i], t->out_size[i]));
    for (int i = 0; i < N_GRADS; i++)
        REQUIRE(is_finite(t->grad[i], t->in_size[i]));
}

/* With x zero nothing but biases is left, with the mask zero nothing of tri; eps keeps the norms
 * finite, and the gradients. */
static void check_zeros(int64_t n, int incoming, int options, int which, int64_t size)
{
    struct test t = test_open(2, n, 8, 5);
    const int result = which == MASK ? TRI : OUT;
    t.incoming = incoming;
    t.options = options;
    t.eps_in = t.eps_out = 1e-5;
    set(t.in[which], size, 0);
    forward(&t), backward(&t);
    require_finite(&t);
    if (size == t.in_size[which] && (which == MASK || options == 0))
        for (int64_t at = 0; at < t.out_size[result]; at++)
            REQUIRE(t.out[result][at] == 0);
    test_close(&t);
}

/* Gates far from 0, where exp overflows: open ones have no slope, shut ones leave the residual. */
static void check_gates(int incoming, double gate)
{
    struct test t = test_open(2, 5, 8, 5);
    t.incoming = incoming;
    set(t.in[G_IN_B], t.in_size[G_IN_B], gate);
    set(t.in[G_OUT_B], t.in_size[G_OUT_B], gate);
    forward(&t), backward(&t);
    require_finite(&t);
    for (int64_t at = 0; at < t.in_size[G_IN]; at++)
        REQUIRE(t.grad[G_IN][at] == 0);
    for (int64_t at = 0; at < t.in_size[G_OUT]; at++)
        REQUIRE(t.grad[G_OUT][at] == 0);
    REQUIRE(is_same(t.out[OUT], t.in[RESIDUAL], t.out_size[OUT]) == (gate < 0));
    test_close(&t);
}

/* x[i, k] is a factor of tri[i, *] as a and of tri[*, i] as b (incoming: of [k, *] and [*, k]), and
 * gates out[i, k]; a mask of 0 does not hold it back. The mask is a factor of the same, no gate. */
static int is_reached(int incoming, int64_t i, int64_t k, int64_t row, int64_t column, int which)
{
    const int64_t line = incoming ? k : i;
    return row == line || column == line || (which == X && row == i && column == k);
}

static void check_reach(int incoming)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    struct test clean = test_open(2, 5, 8, 5), t = test_open(2, 5, 8, 5);
    copy(&clean, &t);
    t.incoming = clean.incoming = incoming;
    forward(&clean);
    for (int64_t at = 0; at < 2 * 3 * 25; at++) {
        const int64_t i = at / 5 % 5, k = at % 5, pair = 25 + i * 5 + k; /* of the last batch */
        const int which = at / 25 % 2 ? MASK : X;
        double *place = t.in[which] + (which == X ? pair * t.dim + at % t.dim : pair);
        const double saved = *place, mask = t.in[MASK][pair];
        t.in[MASK][pair] *= which == X && at % 2 ? 0 : 1;
        forward(&t);
        REQUIRE(is_finite(t.out[OUT], t.out_size[OUT]));
        *place = bad[at / 50];
        forward(&t);
        for (int64_t to = 0; to < 50; to++) {
            const int reached = to >= 25 && is_reached(incoming, i, k, to / 5 % 5, to % 5, which);
            for (int64_t d = to * t.dim; d < (to + 1) * t.dim; d++)
                REQUIRE(reached ? isnan(t.out[OUT][d]) : t.out[OUT][d] == clean.out[OUT][d]);
        }
        *place = saved;
        t.in[MASK][pair] = mask;
    }
    test_close(&clean);
    test_close(&t);
}

int main(void)
{
    for (int incoming = 0; incoming < 2; incoming++) {
        snprintf(now, sizeof now, "incoming=%d", incoming);
        check_absent(incoming);
        check_batch(incoming);
        check_reach(incoming);
        check_gates(incoming, 1000);
        check_gates(incoming, -1000);
        for (int64_t n = 1; n <= 5; n += 2) {
            check_zeros(n, incoming, 0, X, 8); /* one pair */
            check_zeros(n, incoming, ALL, X, 8);
            check_zeros(n, incoming, 0, X, 2 * n * n * 8);
            check_zeros(n, incoming, ALL, X, 2 * n * n * 8);
            check_zeros(n, incoming, ALL, MASK, 2 * n * n);
        }
    }
    snprintf(now, sizeof now, "both directions");
    check_incoming(1);
    check_incoming(5);
    return 0;
}
