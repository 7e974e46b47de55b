/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of `cofuse bench`: quantiles, spread, efficiency, and the size of a case. */
#include <math.h>

#include "test.h"

extern const struct cofi_op cofi_op_attention, cofi_op_grad_return, cofi_op_runtime;
#include "tools/bench_harness.h"
#include "tools/job.h"

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-12 * fmax(1, fabs(b));
}

static void test_quantiles(void)
{
    double x[100];
    for (int i = 0; i < 100; i++)
        x[i] = i + 1;
    CHECK(cofi_bench_quantile(x, 100, 0.5) == 50.5, "even count");
    CHECK(cofi_bench_quantile(x, 99, 0.5) == 50, "odd count");
    CHECK(cofi_bench_quantile(x, 100, 0.9) == 90, "p90 of 100");
    CHECK(cofi_bench_quantile(x, 10, 0.9) == 9, "p90 of 10");
    CHECK(cofi_bench_quantile(x, 100, 0.99) == 99, "p99 of 100");
    CHECK(cofi_bench_quantile(x, 5, 0.99) == 5, "p99 of 5");
    CHECK(cofi_bench_quantile(x, 1, 0.9) == 1, "one value");
    CHECK(cofi_bench_quantile(x, 0, 0.9) == 0, "no value");
}

/* Two jobs of three calls: medians 2 and 4 s, and of all calls 3.5 s. */
static void test_result(void)
{
    double forward[] = {3, 2, 1, 4, 6, 4}, backward[] = {1, 1, 1, 1, 1, 1};
    struct cofi_bench_options options = {.engine = COF_ENGINE_THREAD};
    struct cofi_bench_variant variant = {.op = &cofi_op_attention,
                                         .line = "attention S=1",
                                         .n_ranks = 3,
                                         .cold = true,
                                         .key = "attention S=1 ranks=3",
                                         .size = {.n_directions = 2, .flops = {80, 160}}};
    static struct cofi_bench_samples s = {
        .n_processes = 2, .threads = 1, .n_calls = {{3, 3}, {3, 3}}, .n = {6, 6},
        .plan_first = {9, 7}, .plan_later = {1, 2}, .rate = {{30, 50, 70}, {20, 60, 10}}};
    s.calls[0] = forward;
    s.calls[1] = backward;
    static struct cofi_bench_result r;
    cofi_bench_result_make(&variant, &options, 0, &s, &r);
    CHECK(near(r.median, 3.5) && r.min == 1 && r.p90 == 6, "%g %g %g", r.median, r.min, r.p90);
    CHECK(r.job_median[0] == 2 && r.job_median[1] == 4, "%g %g", r.job_median[0], r.job_median[1]);
    CHECK(near(r.spread, 2 / 3.5), "%g", r.spread);
    CHECK(near(r.rate, 40), "%g", r.rate); /* before and after forward: 40, 40 */
    CHECK(near(r.efficiency, (80 / 2.0 / 40 + 80 / 4.0 / 40) / 2), "%g", r.efficiency);
    CHECK(near(r.plan_first, 8) && near(r.plan_later, 1.5), "%g %g", r.plan_first, r.plan_later);
    CHECK(!strcmp(r.key, "attention S=1 ranks=3 call=forward"), "%s", r.key);
    CHECK(!strcmp(r.cache, "cold") && !strcmp(r.engine, "thread"), "%s %s", r.cache, r.engine);
    cofi_bench_result_make(&variant, &options, 1, &s, &r);
    CHECK(near(r.rate, (60 + 35) / 2.0), "%g", r.rate); /* windows 2 and 3 */
    CHECK(r.spread == 0 && r.flops == 160, "%g %g", r.spread, r.flops);
}

static struct cofi_bench_report one_result(double median, double spread)
{
    struct cofi_bench_report report = {0};
    struct cofi_bench_result *r = cofi_bench_report_add(&report);
    snprintf(r->key, sizeof r->key, "attention S=1");
    r->n_processes = 5;
    r->median = median;
    r->spread = spread;
    return report;
}

static int compare(double ours, double our_spread, double baseline, double spread, double band)
{
    struct cofi_bench_report a = one_result(ours, our_spread), b = one_result(baseline, spread);
    int code = cofi_bench_compare(&a, &b, band);
    cofi_bench_report_free(&a);
    cofi_bench_report_free(&b);
    return code;
}

static void test_band(void)
{
    CHECK(compare(1.04, 0, 1, 0, -1) == COFI_EXIT_OK, "within 5 percent");
    CHECK(compare(1.06, 0, 1, 0, -1) == COFI_EXIT_CHECK, "beyond 5 percent");
    CHECK(compare(1.29, 0.1, 1, 0, -1) == COFI_EXIT_OK, "within thrice our spread");
    CHECK(compare(1.29, 0, 1, 0.1, -1) == COFI_EXIT_OK, "within thrice the baseline's spread");
    CHECK(compare(1.31, 0.1, 1, 0.1, -1) == COFI_EXIT_CHECK, "beyond thrice the spread");
    CHECK(compare(0.1, 0, 1, 0, -1) == COFI_EXIT_OK, "faster");
    CHECK(compare(1.29, 0.1, 1, 0, 0.2) == COFI_EXIT_CHECK, "beyond the band that was given");
}

/* Two ranks, causal zigzag: rank 0 has chunks 0 and 3, rank 1 has 1 and 2. Rank 0 needs both chunks
 * of rank 1, rank 1 needs chunk 0 of rank 0: 6 of 8 rows. */
static void test_size(void)
{
    struct cofi_bench_size size;
    const struct cofi_op_bench *bench = cofi_op_attention.bench;
    CHECK_OK(bench->size("attention S=8 H=4 Hkv=2 Dqk=16 Dv=8 mask=causal", 2, &size));
    CHECK(size.n_directions == 2, "%d", size.n_directions);
    CHECK(size.flops[0] == 2.0 * 4 * 36 * (16 + 8), "%g", size.flops[0]);
    CHECK(size.flops[1] == 2.5 * size.flops[0], "%g", size.flops[1]);
    CHECK(size.wire_bytes[0] == 6 * 2 * (16 + 8) * 2, "%g", size.wire_bytes[0]);
    CHECK(size.wire_bytes[1] == 2 * size.wire_bytes[0], "%g", size.wire_bytes[1]);
    /* q, k, v, o and lse; backward's dout and gradients are as many as the first four */
    size_t half = 8 * 4 * (16 + 8) * 2 + 8 * 2 * (16 + 8) * 2, lse = 8 * 4 * 4;
    CHECK(size.set_bytes == 2 * half + lse, "%zu, wanted %zu", size.set_bytes, 2 * half + lse);
    CHECK_OK(bench->size("attention S=8 H=4 Dqk=16 direction=forward wire=f32", 1, &size));
    CHECK(size.n_directions == 1 && size.wire_bytes[0] == 0, "%d", size.n_directions);
    CHECK_FAILS(bench->size("attention S=8 H=4", 1, &size), COF_ERR_INVALID, "Dqk is missing");
    CHECK_FAILS(bench->size("attention S=8 H=4 Dqk", 1, &size), COF_ERR_INVALID, "key=value");
}

/* In backward, gradients move, and keys where forward did not save them. */
static void test_size_saved(void)
{
    struct cofi_bench_size fetched, saved;
    const struct cofi_op_bench *bench = cofi_op_attention.bench;
    CHECK_OK(bench->size("attention S=8 H=4 Dqk=16 schedule=gather wire=f32", 2, &fetched));
    CHECK_OK(bench->size("attention S=8 H=4 Dqk=16 schedule=ring wire=f32 save_kv=1", 2, &saved));
    double keys = 8 * 4 * (16 + 16) * 2; /* each of 8 rows is fetched by the other rank */
    CHECK(fetched.wire_bytes[0] == keys && saved.wire_bytes[0] == keys, "%g %g",
          fetched.wire_bytes[0], saved.wire_bytes[0]);
    CHECK(fetched.wire_bytes[1] == 3 * keys && saved.wire_bytes[1] == 2 * keys, "%g %g",
          fetched.wire_bytes[1], saved.wire_bytes[1]);
    CHECK(saved.set_bytes == fetched.set_bytes + (size_t)keys, "%zu %zu", saved.set_bytes,
          fetched.set_bytes);
}

/* Two ranks, causal zigzag: writer 1 has rows for chunk 0 of owner 0, writer 0 for both chunks of
 * owner 1: 6 of 8 rows leave two ranks. */
static void test_size_grad_return(void)
{
    struct cofi_bench_size size;
    const struct cofi_op_bench *bench = cofi_op_grad_return.bench;
    CHECK_OK(bench->size("grad_return S=8 Hkv=2 Dk=16 Dv=8 writers=causal", 2, &size));
    CHECK(size.n_directions == 1 && size.flops[0] == 0, "%d %g", size.n_directions, size.flops[0]);
    CHECK(size.wire_bytes[0] == 6 * 2 * (16 + 8) * 2, "%g", size.wire_bytes[0]);
    size_t row = 2 * (16 + 8) * 2;
    CHECK(size.set_bytes == (2 * 8 + 8) * row, "%zu", size.set_bytes);
    CHECK_OK(bench->size("grad_return S=8 Hkv=2 Dk=16 Dv=8 wire=f32 partial=f32", 2, &size));
    CHECK(size.wire_bytes[0] == 8 * 2 * (16 + 8) * 4, "%g", size.wire_bytes[0]);
    CHECK(size.set_bytes == (2 * 8 * 2 + 8) * row, "%zu", size.set_bytes);
    /* 7 rows in 4 chunks of 2: partials by section and outputs have padding */
    CHECK_OK(bench->size("grad_return S=7 Hkv=2 Dk=16 Dv=8 chunking=padded by=section", 2, &size));
    CHECK(size.set_bytes == (2 * 8 + 8) * row, "%zu", size.set_bytes);
    CHECK_OK(bench->size("grad_return S=8 Hkv=2 Dk=16", 1, &size));
    CHECK(size.wire_bytes[0] == 0, "%g", size.wire_bytes[0]);
    CHECK_FAILS(bench->size("grad_return S=8 Dk=4", 1, &size), COF_ERR_INVALID, "Hkv is missing");
}

/* wire and partial name dtype or f32, wherever they stand in the line. */
static void test_types(void)
{
    static const struct {
        const struct cofi_op *op;
        const char *words; /* the last but those of the shape */
        const char *error; /* NULL: legal */
        size_t wire_element;
    } cases[] = {
        {&cofi_op_attention, "wire=f16", "wire = \"f16\": wanted dtype, f32 or", 0},
        {&cofi_op_attention, "dtype=f32 wire=bf16", "the dtype of the case, f32", 0},
        {&cofi_op_attention, "wire=bf16 dtype=f16", "wire = \"bf16\": wanted", 0},
        {&cofi_op_attention, "dtype=f16 wire=f16", NULL, 2},
        {&cofi_op_attention, "wire=dtype dtype=f16", NULL, 2},
        {&cofi_op_attention, "dtype=f16 wire=f32", NULL, 4},
        {&cofi_op_attention, "dtype=f32 wire=f32", NULL, 4},
        {&cofi_op_grad_return, "dtype=f16", NULL, 2},
        {&cofi_op_grad_return, "dtype=f16 wire=f16 partial=f16", NULL, 2},
        {&cofi_op_grad_return, "dtype=f16 wire=f32 partial=dtype", NULL, 4},
        {&cofi_op_grad_return, "wire=f16", "wire = \"f16\": wanted", 0},
        {&cofi_op_grad_return, "partial=bf16 dtype=f16", "partial = \"bf16\": wanted", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool is_attention = cases[i].op == &cofi_op_attention;
        struct cofi_bench_size size;
        char line[200];
        snprintf(line, sizeof line, "%s %s S=8 %s", cases[i].op->name, cases[i].words,
                 is_attention ? "H=1 Dqk=8" : "Hkv=1 Dk=8");
        if (cases[i].error) {
            CHECK_FAILS(cases[i].op->bench->size(line, 2, &size), COF_ERR_INVALID, cases[i].error);
            continue;
        }
        CHECK_OK(cases[i].op->bench->size(line, 2, &size));
        double element = strstr(line, "dtype=f32") ? 4 : 2, rows = 8 * 2 * 8; /* keys too */
        double wanted = rows * (double)cases[i].wire_element + (is_attention ? rows * element : 0);
        double seen = size.wire_bytes[is_attention];
        CHECK(seen == wanted, "%s: %g, wanted %g", line, seen, wanted);
    }
}

/* Each rank sends to the next one, or rank 0 alone; large transfers have no enqueuing to time. */
static void test_size_runtime(void)
{
    struct cofi_bench_size size;
    const struct cofi_op_bench *bench = cofi_op_runtime.bench;
    CHECK_OK(bench->size("runtime form=put bytes=65536", 3, &size));
    CHECK(size.n_flows == 3 && size.wire_bytes[0] == 3 * 65536.0, "%d %g", size.n_flows,
          size.wire_bytes[0]);
    CHECK(size.n_directions == 2 && size.wire_bytes[1] == 0, "%d %g", size.n_directions,
          size.wire_bytes[1]);
    CHECK_OK(bench->size("runtime form=get by=engine ways=one bytes=65537", 3, &size));
    CHECK(size.n_flows == 1 && size.wire_bytes[0] == 65537, "%d %g", size.n_flows,
          size.wire_bytes[0]);
    CHECK(size.n_directions == 1, "%d", size.n_directions);
    CHECK_OK(bench->size("runtime form=round by=stream how=graph count=7", 2, &size));
    CHECK(size.n_flows == 0 && size.wire_bytes[0] == 0 && size.n_directions == 2, "%d %d",
          size.n_flows, size.n_directions);
    CHECK_FAILS(bench->size("runtime form=round bytes=8", 2, &size), COF_ERR_INVALID, "bytes = 8");
    CHECK_FAILS(bench->size("runtime form=empty", 2, &size), COF_ERR_INVALID, "kernel of empty");
    CHECK_FAILS(bench->size("runtime form=signal count=10001", 2, &size), COF_ERR_INVALID,
                "count = \"10001\"");
}

int main(void)
{
    test_size_runtime();
    test_quantiles();
    test_result();
    test_band();
    test_size();
    test_size_saved();
    test_size_grad_return();
    test_types();
    return test_done();
}
