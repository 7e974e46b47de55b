/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The references of allreduce_rmsnorm against rows that were worked out by hand, and each against
 * the other. */
#include <math.h>

#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_ref.h"
#include "ops/check.h"
#include "ops/check_elem.h"
#include "test.h"

enum { MAX_HIDDEN = 2000, MAX_RANKS = 4 };

struct row {
    cof_allreduce_rmsnorm_params p;
    int n_ranks;
    float x[MAX_RANKS][MAX_HIDDEN], residual[MAX_HIDDEN], weight[MAX_HIDDEN];
    float residual_out[MAX_HIDDEN], norm_out[MAX_HIDDEN]; /* or 16-bit elements */
    struct cofi_arn_exact exact[MAX_HIDDEN];
};

/* Zeros, weights of 1. */
static struct row *make_row(cof_dtype dtype, int64_t hidden, int n_ranks)
{
    static struct row row;
    row = (struct row){.p = COF_ALLREDUCE_RMSNORM_PARAMS_INIT, .n_ranks = n_ranks};
    row.p.dtype = dtype;
    row.p.hidden = hidden;
    row.p.variant = COF_ALLREDUCE_NORM;
    row.p.eps = 0x1p-20f;
    for (int64_t h = 0; h < hidden; h++)
        cofi_check_store(row.weight, dtype, h, 1);
    return &row;
}

static struct cofi_arn_ref ref_of(const struct row *row, const void **x)
{
    for (int r = 0; r < row->n_ranks; r++)
        x[r] = row->x[r];
    return (struct cofi_arn_ref){&row->p, row->n_ranks, x, row->residual, row->weight};
}

static void compute(struct row *row)
{
    const void *x[MAX_RANKS];
    struct cofi_arn_ref ref = ref_of(row, x);
    memset(row->residual_out, 0xee, sizeof row->residual_out);
    memset(row->norm_out, 0xee, sizeof row->norm_out);
    cofi_arn_ref_bits(&ref, row->residual_out, row->norm_out);
    cofi_arn_ref_exact(&ref, row->exact);
}

static void set(struct row *row, int rank, int64_t h, float value)
{
    cofi_check_store(row->x[rank], row->p.dtype, h, value);
}

static uint32_t bits_at(const float *data, const struct row *row, int64_t h)
{
    return row->p.dtype.bits == 32 ? cofi_check_to_bits(data[h])
                                   : ((const uint16_t *)(const void *)data)[h];
}

/* 2^24 + 1 + 1: in rank order the ones are lost one by one; in another order they are not. */
static void test_rank_order(void)
{
    struct row *row = make_row(COF_F32, 2, 3);
    const float x[2][3] = {{0x1p24f, 1, 1}, {1, 1, 0x1p24f}};
    for (int r = 0; r < 3; r++)
        for (int h = 0; h < 2; h++)
            set(row, r, h, x[h][r]);
    row->p.variant = COF_ALLREDUCE_ONLY;
    compute(row);
    CHECK(row->residual_out[0] == 0x1p24f, "%.9g", row->residual_out[0]);
    CHECK(row->residual_out[1] == 0x1p24f + 2, "%.9g", row->residual_out[1]);
    CHECK(cofi_check_to_bits(row->norm_out[0]) == 0xeeeeeeee, "norm_out was written to");
    CHECK(row->exact[0].residual_out == 0x1p24 + 2, "%.9g", row->exact[0].residual_out);
    CHECK(row->exact[0].residual_slack >= 2, "slack %.9g", row->exact[0].residual_slack);
}

static void test_signed_zeros_and_nan(void)
{
    static const struct {
        cof_dtype dtype;
        uint32_t minus, nan;
    } types[] = {{{COF_DTYPE_CODE_BFLOAT, 16, 1}, 0x8000, 0x7fff},
                 {{COF_DTYPE_CODE_FLOAT, 16, 1}, 0x8000, 0x7fff},
                 {{COF_DTYPE_CODE_FLOAT, 32, 1}, 0x80000000, 0x7fffffff}};
    for (int i = 0; i < 3; i++) {
        struct row *row = make_row(types[i].dtype, 4, 2);
        const float x[2][4] = {{-0.0f, -0.0f, INFINITY, -NAN}, {-0.0f, 0.0f, -INFINITY, 1}};
        for (int r = 0; r < 2; r++)
            for (int h = 0; h < 4; h++)
                set(row, r, h, x[r][h]);
        compute(row);
        CHECK(bits_at(row->residual_out, row, 0) == types[i].minus, "-0 + -0");
        CHECK(bits_at(row->residual_out, row, 1) == 0, "-0 + 0");
        CHECK(bits_at(row->residual_out, row, 2) == types[i].nan, "inf - inf");
        CHECK(bits_at(row->residual_out, row, 3) == types[i].nan, "NaN");
        for (int h = 0; h < 4; h++)
            CHECK(bits_at(row->norm_out, row, h) == types[i].nan, "norm of a row with NaN");
        row->n_ranks = 1;
        set(row, 0, 3, 1);
        compute(row); /* -0, -0, inf, 1: 1 / inf = 0 */
        CHECK(bits_at(row->norm_out, row, 0) == types[i].minus, "-0 * 0");
        CHECK(bits_at(row->norm_out, row, 2) == types[i].nan, "inf * 0");
        CHECK(bits_at(row->norm_out, row, 3) == 0, "1 * 0");
    }
}

/* 256 + 1 in bf16, whose neighbours are 256 and 258, and -256: 0 when the sum is rounded before
 * the residual is added, else 1. Squares: 255 zeros and that. */
static void test_roundings(void)
{
    struct row *row = make_row(COF_BF16, 256, 2);
    row->p.variant = COF_ALLREDUCE_RESIDUAL_NORM;
    row->p.eps = 1;
    set(row, 0, 7, 256);
    set(row, 1, 7, 1);
    cofi_check_store(row->residual, COF_BF16, 7, -256);
    compute(row);
    CHECK(bits_at(row->residual_out, row, 7) == 0, "match_unfused");
    CHECK(row->exact[7].residual_out == 0, "%g", row->exact[7].residual_out);
    row->p.rounding = COF_ALLREDUCE_EXACT;
    compute(row);
    CHECK(bits_at(row->residual_out, row, 7) == 0x3f80, "exact");
    CHECK(row->exact[7].residual_out == 1, "%g", row->exact[7].residual_out);
    /* 1 / sqrt(1 / 256 + 1) = 0.998053: as bf16 1 - 2^-8 or 1: halfway is 0.998047 */
    CHECK(bits_at(row->norm_out, row, 7) == 0x3f80, "norm of 1");
    CHECK(fabs(row->exact[7].norm_out - 16 / sqrt(257)) < 1e-12, "%.9f", row->exact[7].norm_out);
}

/* The norm is of z, not of what residual_out holds, with EXACT. */
static void test_norm_of_unrounded(void)
{
    struct row *row = make_row(COF_BF16, 2, 2);
    row->p.eps = 0x1p-100f;
    set(row, 0, 0, 256);
    set(row, 1, 0, 1);
    set(row, 0, 1, 255);
    for (int rounding = 0; rounding < 2; rounding++) {
        row->p.rounding = (cof_allreduce_rounding)rounding;
        compute(row);
        double z = rounding == COF_ALLREDUCE_EXACT ? 257 : 256;
        double wanted = z / sqrt((z * z + 255.0 * 255.0) / 2);
        CHECK(fabs(row->exact[0].norm_out - wanted) < 1e-12, "%.9f", row->exact[0].norm_out);
        CHECK(bits_at(row->residual_out, row, 0) == 0x4380, "256 of 257: ties to even");
    }
}

/* A square that is lost beside 2^24 alone and not with its neighbour, in every place that the tree
 * and the segments have. eps makes no difference, weights of 1. */
static void test_order_of_squares(void)
{
    static const struct {
        int64_t hidden, big, one[2];
        float sum;
    } cases[] = {
        {4, 0, {2, 3}, 0x1p24f + 2},      /* (big + 0) + (1 + 1) */
        {4, 0, {1, 2}, 0x1p24f},          /* (big + 1) + (1 + 0) */
        {4, 3, {0, 1}, 0x1p24f + 2},
        {256, 0, {254, 255}, 0x1p24f + 2},
        {256, 0, {127, 128}, 0x1p24f},    /* one in each half */
        {257, 0, {255, 256}, 0x1p24f},    /* the second segment alone: lost too */
        {258, 0, {256, 257}, 0x1p24f + 2},
        {768, 0, {256, 512}, 0x1p24f},    /* (s0 + s1) + s2 */
        {768, 512, {0, 256}, 0x1p24f + 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct row *row = make_row(COF_F32, cases[i].hidden, 1);
        set(row, 0, cases[i].big, 0x1p12f);
        set(row, 0, cases[i].one[0], 1);
        set(row, 0, cases[i].one[1], -1);
        compute(row);
        float mean = cases[i].sum / (float)cases[i].hidden;
        float inv = 1.0f / sqrtf(mean + row->p.eps);
        CHECK(row->norm_out[cases[i].one[0]] == inv, "case %zu: %.9g, wanted %.9g", i,
              row->norm_out[cases[i].one[0]], inv);
        CHECK(row->norm_out[cases[i].one[1]] == -inv, "case %zu", i);
    }
}

static void test_weights(void)
{
    struct row *row = make_row(COF_F16, 4, 1);
    for (int h = 0; h < 4; h++)
        set(row, 0, h, 1);
    row->p.eps = 3;
    row->p.weight_dtype = COF_F32;
    for (int h = 0; h < 4; h++)
        row->weight[h] = 0.25f * (float)h;
    for (row->p.weight_bias = 0; row->p.weight_bias < 2; row->p.weight_bias++) {
        compute(row); /* inv = 1 / sqrt(1 + 3) */
        for (int h = 0; h < 4; h++) {
            double wanted = 0.5 * (0.25 * h + row->p.weight_bias);
            double ours = cofi_check_load(row->norm_out, COF_F16, h);
            CHECK(ours == wanted && row->exact[h].norm_out == wanted, "%g, wanted %g", ours,
                  wanted);
        }
    }
}

/* 300^2 is past fp16; 75000 is a number of bf16 near enough. */
static void test_outliers(void)
{
    struct row *row = make_row(COF_F16, 1024, 1);
    set(row, 0, 500, 300);
    compute(row);
    CHECK(cofi_check_load(row->norm_out, COF_F16, 500) == 32, "%g",
          cofi_check_load(row->norm_out, COF_F16, 500)); /* 300 / (300 / sqrt(1024)) */
    row = make_row(COF_BF16, 1024, 1);
    set(row, 0, 500, 75000);
    compute(row);
    CHECK(cofi_check_load(row->norm_out, COF_BF16, 500) == 32, "outlier of bf16");
}

static void fill_random(struct row *row, uint64_t seed)
{
    for (int64_t h = 0; h < row->p.hidden; h++) {
        for (int r = 0; r < row->n_ranks; r++)
            set(row, r, h, cofi_check_normal(seed, (uint64_t)r, (uint64_t)h));
        cofi_check_store(row->residual, row->p.dtype, h,
                         cofi_check_normal(seed, 8, (uint64_t)h));
        cofi_check_store(row->weight, row->p.dtype, h, cofi_check_normal(seed, 9, (uint64_t)h));
    }
}

static int64_t count_far(const struct row *row)
{
    cof_dtype dtype = row->p.dtype;
    int64_t n = 0;
    for (int64_t h = 0; h < row->p.hidden; h++) {
        const struct cofi_arn_exact *e = &row->exact[h];
        n += !cofi_arn_ref_is_near(cofi_check_load(row->residual_out, dtype, h), e->residual_out,
                                   e->residual_slack, dtype);
        n += !cofi_arn_ref_is_near(cofi_check_load(row->norm_out, dtype, h), e->norm_out,
                                   e->norm_slack, dtype);
    }
    return n;
}

/* The two agree, and a value two units away does not pass. */
static void test_agreement(void)
{
    static const cof_dtype types[] = {{COF_DTYPE_CODE_BFLOAT, 16, 1},
                                      {COF_DTYPE_CODE_FLOAT, 16, 1},
                                      {COF_DTYPE_CODE_FLOAT, 32, 1}};
    for (uint64_t i = 0; i < 60; i++) {
        struct row *row = make_row(types[i % 3], 1 + (int64_t)i * 33, 1 + (int)(i % 4));
        row->p.rounding = (cof_allreduce_rounding)(i / 3 % 2);
        row->p.variant = (cof_allreduce_variant)(i / 6 % 2);
        fill_random(row, i);
        compute(row);
        CHECK(count_far(row) == 0, "row %d: %lld values are far", (int)i,
              (long long)count_far(row));
        row->exact[0].norm_slack = 0; /* sums of few terms may cancel */
        if (row->p.dtype.bits == 32)
            row->norm_out[0] *= 1 + 1e-5f;
        else
            ((uint16_t *)(void *)row->norm_out)[0] += 3;
        CHECK(count_far(row) == 1, "row %d: a wrong value passes", (int)i);
    }
}

int main(void)
{
    test_rank_order();
    test_signed_zeros_and_nan();
    test_roundings();
    test_norm_of_unrounded();
    test_order_of_squares();
    test_weights();
    test_outliers();
    test_agreement();
    return test_done();
}
