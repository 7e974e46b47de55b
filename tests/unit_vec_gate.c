/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Every table of norm and gate kernels this processor can run, against fp64 loops: every tail,
 * special values, results in the place of inputs, nothing written past n. An element's result does
 * not depend on where it is. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "backend/cpu/vec_gate.h"

enum { MAX_N = 140, GUARD = 8 };
#define CANARY 12345.5f

static int n_failed, n_compared;
static char context[100];

static void compare(const char *what, int64_t i, float got, double want, double bound)
{
    const double error = fabs((double)got - want);
    n_compared++;
    if (!(error <= bound * (1 + fabs(want))) && !(isnan(want) && isnan(got)) &&
        !(isinf(want) && (double)got == want)) {
        n_failed++;
        printf("not ok %s: %s[%d] = %.9g, wanted %.9g\n", context, what, (int)i, (double)got, want);
    }
}

/* n values, then canaries. */
static void fill(float *x, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = scale * ((float)(rand() % 2001) / 1000 - 1);
    for (int64_t i = n; i < n + GUARD; i++)
        x[i] = CANARY;
}

static void check_guard(const char *what, const float *x, int64_t n)
{
    for (int64_t i = n; i < n + GUARD; i++)
        compare(what, i, x[i], (double)CANARY, 0);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

typedef float row[MAX_N + GUARD];

static void test_norm(const struct cofi_gate_ops *ops, int64_t n)
{
    row x, gain, bias, y, dy, dx, d_gain, d_bias;
    double mean = 0, var = 0, sum = 0, sum_z = 0;
    fill(x, n, 3);
    fill(gain, n, 2);
    fill(bias, n, 1);
    fill(dy, n, 1);
    fill(y, n, 0);
    fill(dx, n, 0);
    fill(d_gain, n, 1);
    memcpy(d_bias, d_gain, sizeof d_bias);
    struct cofi_norm_row r = {.x = x, .gain = gain, .bias = bias, .eps = 1e-3f, .n = n};
    ops->norm(y, &r);
    row before;
    memcpy(before, d_gain, sizeof before);
    ops->norm_grad(dx, dy, &r, d_gain, d_bias);
    for (int64_t i = 0; i < n; i++)
        mean += (double)x[i] / (double)n;
    for (int64_t i = 0; i < n; i++)
        var += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
    const double rstd = 1 / sqrt(var + (double)r.eps);
    for (int64_t i = 0; i < n; i++) {
        const double z = ((double)x[i] - mean) * rstd, dz = (double)dy[i] * (double)gain[i];
        sum += dz / (double)n;
        sum_z += dz * z / (double)n;
        compare("norm", i, y[i], z * (double)gain[i] + (double)bias[i], 2e-5);
        compare("d_gain", i, d_gain[i], (double)before[i] + (double)dy[i] * z, 2e-5);
        compare("d_bias", i, d_bias[i], (double)before[i] + (double)dy[i], 1e-6);
    }
    for (int64_t i = 0; i < n; i++) {
        const double z = ((double)x[i] - mean) * rstd, dz = (double)dy[i] * (double)gain[i];
        compare("norm_grad", i, dx[i], rstd * (dz - sum - z * sum_z), rstd * 2e-5);
    }
    check_guard("norm", y, n);
    check_guard("norm_grad", dx, n);
    check_guard("d_gain", d_gain, n);
    ops->norm_grad(dy, dy, &r, NULL, NULL);
    compare("norm_grad in place", 0, dy[n - 1], (double)dx[n - 1], 0);
    ops->norm(x, &r);
    compare("norm in place", 0, x[n - 1], (double)y[n - 1], 0);
}

static void test_across(const struct cofi_gate_ops *ops, int64_t n)
{
    row x, mean, var, rstd, z, y, dy, sum, sum_z, dx;
    fill(x, n, 3);
    fill(mean, n, 1);
    fill(var, n, 1);
    fill(dy, n, 1);
    fill(sum, n, 1);
    fill(sum_z, n, 1);
    for (int64_t i = 0; i < n; i++)
        var[i] = fabsf(var[i]);
    memcpy(rstd, var, sizeof rstd);
    fill(z, n, 0);
    fill(y, n, 0);
    fill(dx, n, 0);
    row sum_before, sum_z_before;
    memcpy(sum_before, sum, sizeof sum);
    memcpy(sum_z_before, sum_z, sizeof sum_z);
    ops->add_squares(rstd, x, mean, n);
    ops->rstd(rstd, 3, 0.25f, n);
    ops->norm_across(y, z, x, mean, rstd, 1.5f, -0.25f, n);
    ops->add_grads(sum, sum_z, dy, z, 1.5f, n);
    ops->norm_grad_across(dx, dy, z, rstd, sum, sum_z, 1.5f, 3, n);
    for (int64_t i = 0; i < n; i++) {
        const double d = (double)x[i] - (double)mean[i];
        const double r = 1 / sqrt(((double)var[i] + d * d) / 3 + 0.25), want_z = d * r;
        const double g = (double)dy[i] * 1.5;
        compare("rstd", i, rstd[i], r, 1e-5);
        compare("z", i, z[i], want_z, 1e-5);
        compare("norm_across", i, y[i], want_z * 1.5 - 0.25, 1e-5);
        compare("sum", i, sum[i], (double)sum_before[i] + g, 1e-5);
        compare("sum_z", i, sum_z[i], (double)sum_z_before[i] + g * want_z, 1e-5);
        compare("norm_grad_across", i, dx[i],
                r * (g - (double)sum[i] / 3 - want_z * (double)sum_z[i] / 3), 1e-5);
    }
    check_guard("rstd", rstd, n);
    check_guard("z", z, n);
    check_guard("norm_across", y, n);
    check_guard("norm_grad_across", dx, n);
}

static void test_gates(const struct cofi_gate_ops *ops, int64_t n)
{
    row p, g, mask, y, dy, dp, dg, p_bias, g_bias, add;
    fill(p, n, 2);
    fill(g, n, 12);
    fill(mask, n, 1);
    fill(dy, n, 1);
    fill(p_bias, n, 1);
    fill(g_bias, n, 1);
    fill(add, n, 1);
    for (int with_mask = 0; with_mask < 2; with_mask++) {
        const struct cofi_gate_row r = {.p = p, .g = g, .p_bias = 0.5f, .g_bias = -0.25f,
                                        .mask = with_mask ? mask : NULL, .n = n};
        fill(y, n, 0);
        fill(dp, n, 0);
        fill(dg, n, 0);
        ops->gate(y, &r);
        ops->gate_grad(dp, dg, dy, &r);
        for (int64_t i = 0; i < n; i++) {
            const double s = sigmoid((double)g[i] - 0.25), v = (double)p[i] + 0.5;
            const double m = with_mask ? (double)mask[i] : 1;
            compare("gate", i, y[i], v * s * m, 1e-6);
            compare("gate_grad dp", i, dp[i], (double)dy[i] * s * m, 1e-6);
            compare("gate_grad dg", i, dg[i], (double)dy[i] * v * s * (1 - s) * m, 1e-6);
        }
        check_guard("gate", y, n);
        check_guard("gate_grad", dp, n);
        check_guard("gate_grad", dg, n);
    }
    ops->out_gate(y, p, p_bias, g, g_bias, add, n);
    ops->out_gate_grad(dp, dg, dy, p, p_bias, g, g_bias, n);
    for (int64_t i = 0; i < n; i++) {
        const double s = sigmoid((double)g[i] + (double)g_bias[i]);
        const double v = (double)p[i] + (double)p_bias[i];
        compare("out_gate", i, y[i], v * s + (double)add[i], 1e-6);
        compare("out_gate_grad dp", i, dp[i], (double)dy[i] * s, 1e-6);
        compare("out_gate_grad dg", i, dg[i], (double)dy[i] * v * s * (1 - s), 1e-6);
    }
    ops->out_gate_grad(p, g, dy, p, p_bias, g, g_bias, n);
    compare("out_gate_grad in place", n - 1, p[n - 1], (double)dp[n - 1], 0);
    compare("out_gate_grad in place", n - 1, g[n - 1], (double)dg[n - 1], 0);
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)add[i];
    compare("sum", 0, ops->sum(add, n), sum, 1e-5);
}

/* Infinities and NaN; the same element at every place. */
static void test_special(const struct cofi_gate_ops *ops)
{
    static const float values[] = {INFINITY, -INFINITY, NAN, 0, 100, -100, 1e-40f};
    row p, g, y;
    for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
        for (int64_t i = 0; i < MAX_N; i++) {
            p[i] = 2;
            g[i] = values[v];
        }
        const struct cofi_gate_row r = {.p = p, .g = g, .n = MAX_N};
        ops->gate(y, &r);
        for (int64_t i = 0; i < MAX_N; i++) {
            compare("gate of a special value", i, y[i], 2 * sigmoid((double)values[v]), 1e-6);
            compare("gate at another place", i, memcmp(&y[i], &y[0], sizeof y[0]) != 0, 0, 0);
        }
    }
}

static void test_table(const struct cofi_gate_ops *ops)
{
    for (int64_t n = 1; n <= MAX_N; n++) {
        snprintf(context, sizeof context, "%s, n = %d", ops->name, (int)n);
        test_norm(ops, n);
        test_across(ops, n);
        test_gates(ops, n);
    }
    test_special(ops);
}

int main(void)
{
    const enum cofi_isa isa = cofi_isa();
    test_table(&cofi_gate_scalar);
#if defined(__x86_64__)
    if (isa >= COFI_ISA_AVX2)
        test_table(&cofi_gate_avx2);
    if (isa >= COFI_ISA_AVX512)
        test_table(&cofi_gate_avx512);
#endif
    printf("%s: %d compared, %d failed\n", cofi_isa_name(isa), n_compared, n_failed);
    return n_failed != 0 || n_compared == 0;
}
