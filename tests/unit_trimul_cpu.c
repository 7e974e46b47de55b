/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs against the fp64 reference: sizes, types, directions, grids, shards, masks,
 * biases, saved and recomputed. */
#include "backend/cpu/gemm.h"
#include "test_trimul.h"

struct bounds {
    double out, grad;
};

/* Of 16 bits, out is held to 1 % of its largest value. Products of bf16 round xn and trin too,
 * which a few tokens do not average out. */
static struct bounds bounds_of(cof_dtype dtype)
{
    if (dtype.bits == 32)
        return (struct bounds){1e-5, 1e-5};
    return dtype.code == COF_DTYPE_CODE_BFLOAT && cofi_gemm_has(COFI_GEMM_BF16)
               ? (struct bounds){0.015, 0.03}
               : (struct bounds){0.01, 0.02};
}

static struct test_tri_problem problem_of(cof_dtype dtype, int64_t n, int64_t dim, int64_t hidden)
{
    struct test_tri_problem p = {.params = COF_TRIMUL_PARAMS_INIT, .n = n, .n_batch = 1,
                                 .n_ranks = 1, .with_mask = true, .with_biases = true,
                                 .with_grads = true, .seed = (int)(n * 7 + dim)};
    p.params.dtype = dtype;
    p.params.n_rows = n;
    p.params.dim = dim;
    p.params.hidden = hidden;
    return p;
}

static void check(const struct test_tri_problem *p)
{
    struct test_tri t;
    test_tri_make(&t, p);
    test_tri_run(&t);
    const struct bounds bounds = bounds_of(p->params.dtype); /* a world has chosen the provider */
    test_tri_compare(&t, bounds.out, bounds.grad);
    test_tri_free(&t);
}

static void test_sizes(void)
{
    static const int64_t sizes[][3] = {{1, 8, 8},   {2, 1, 3},   {7, 16, 8},  {8, 5, 16},
                                       {17, 32, 24}, {33, 24, 40}, {64, 8, 32}, {20, 130, 70}};
    const cof_dtype dtypes[] = {COF_F32, COF_BF16, COF_F16};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int type = 0; type < 3; type++)
            for (int direction = 0; direction < 2; direction++) {
                struct test_tri_problem p =
                    problem_of(dtypes[type], sizes[i][0], sizes[i][1], sizes[i][2]);
                p.params.direction = (cof_trimul_direction)direction;
                p.params.save = i % 2 ? COF_TRIMUL_SAVE_AB : COF_TRIMUL_SAVE_NONE;
                p.with_mask = i % 3 != 1;
                p.with_biases = i % 4 != 2;
                p.with_residual = i % 2 == 0;
                check(&p);
            }
}

static void test_grids(void)
{
    static const int grids[][2] = {{2, 1}, {1, 2}, {2, 2}, {3, 1}, {1, 4}, {2, 3}, {8, 1}};
    for (size_t i = 0; i < sizeof grids / sizeof grids[0]; i++)
        for (int direction = 0; direction < 2; direction++) {
            struct test_tri_problem p = problem_of(i % 2 ? COF_BF16 : COF_F32, i % 3 ? 19 : 5, 12,
                                                   i % 2 ? 20 : 44);
            p.n_ranks = grids[i][0] * grids[i][1];
            p.n_batch = p.params.n_batch = 1 + (int64_t)i % 2;
            p.params.grid_rows = grids[i][0];
            p.params.grid_cols = grids[i][1];
            p.params.direction = (cof_trimul_direction)direction;
            p.params.shard = i % 2 ? COF_TRIMUL_CHUNK : COF_TRIMUL_BALANCED;
            p.params.save = i % 2 ? COF_TRIMUL_SAVE_NONE : COF_TRIMUL_SAVE_AB;
            p.params.reduce_param_grads = (int)(i / 2 % 2);
            p.n_repeats = 3;
            check(&p);
        }
}

static void test_explicit(void)
{
    static const int64_t rows[] = {0, 0, 9, 14}, cols[] = {0, 3, 14};
    struct test_tri_problem p = problem_of(COF_F32, 14, 8, 72);
    p.n_ranks = 6;
    p.params.grid_rows = 3;
    p.params.grid_cols = 2;
    p.params.shard = COF_TRIMUL_EXPLICIT;
    p.params.row_offsets = rows;
    p.params.col_offsets = cols;
    p.params.chunk_features = 8;
    p.n_repeats = 2;
    check(&p);
}

int main(void)
{
    test_sizes();
    test_grids();
    test_explicit();
    return test_done();
}
