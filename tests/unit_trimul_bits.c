/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Bits of trimul on CPUs: out and dx are the same for every grid, shard, chunk, batch and from run
 * to run, gradients of weights from run to run. A problem of another seed differs, so that the
 * comparison sees something. */
#include "test_trimul.h"

static struct test_tri_problem problem_of(cof_dtype dtype, int64_t n, int64_t dim, int64_t hidden)
{
    struct test_tri_problem p = {.params = COF_TRIMUL_PARAMS_INIT, .n = n, .n_batch = 1,
                                 .n_ranks = 1, .with_mask = true, .with_biases = true,
                                 .with_residual = true, .with_grads = true, .seed = 3};
    p.params.dtype = dtype;
    p.params.n_rows = n;
    p.params.n_batch = 2;
    p.params.dim = dim;
    p.params.hidden = hidden;
    return p;
}

static int64_t n_different(const float *a, const float *b, int64_t n)
{
    int64_t n_bad = 0;
    for (int64_t i = 0; i < n; i++)
        n_bad += memcmp(&a[i], &b[i], sizeof *a) != 0;
    return n_bad;
}

/* out and dx of `problem` against those of `one`, pairs from `first` on. */
static void check_same(const struct test_tri *one, const struct test_tri_problem *problem,
                       const char *what)
{
    struct test_tri t;
    test_tri_make(&t, problem);
    test_tri_run(&t);
    const int64_t n = one->n_pairs * one->p.params.dim;
    CHECK(n_different(t.out, one->out, n) == 0, "%s, %s: out differs in %d", what,
          test_tri_text(&t), (int)n_different(t.out, one->out, n));
    CHECK(n_different(t.dx, one->dx, n) == 0, "%s, %s: dx differs in %d", what, test_tri_text(&t),
          (int)n_different(t.dx, one->dx, n));
    test_tri_free(&t);
}

static void test_grids(const struct test_tri *one)
{
    static const int grids[][2] = {{2, 1}, {1, 2}, {2, 2}, {3, 1}, {1, 3}, {2, 3}};
    for (size_t i = 0; i < sizeof grids / sizeof grids[0]; i++) {
        struct test_tri_problem p = one->p;
        p.n_ranks = grids[i][0] * grids[i][1];
        p.params.grid_rows = grids[i][0];
        p.params.grid_cols = grids[i][1];
        p.params.shard = i % 2 ? COF_TRIMUL_CHUNK : COF_TRIMUL_BALANCED;
        p.params.chunk_features = i % 2 ? 8 : 0;
        p.params.save = i % 2 ? COF_TRIMUL_SAVE_AB : COF_TRIMUL_SAVE_NONE;
        p.n_repeats = 2;
        check_same(one, &p, "grid");
    }
}

/* The first entry of a batch of two, whose values are those of a batch of one. */
static void test_batch(const struct test_tri *one)
{
    struct test_tri two;
    struct test_tri_problem p = one->p;
    p.n_batch = 2;
    p.n_ranks = 2;
    test_tri_make(&two, &p);
    const int64_t n = one->n_pairs * p.params.dim;
    for (int b = 0; b < 2; b++) {
        memcpy(two.x + b * n, one->x, (size_t)n * sizeof(float));
        memcpy(two.mask + b * one->n_pairs, one->mask, (size_t)one->n_pairs * sizeof(float));
        memcpy(two.residual + b * n, one->residual, (size_t)n * sizeof(float));
        memcpy(two.dout + b * n, one->dout, (size_t)n * sizeof(float));
    }
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++)
        if (one->weights[i])
            memcpy(two.weights[i], one->weights[i],
                   (size_t)one->weight_elements[i] * sizeof(float));
    test_tri_run(&two);
    for (int b = 0; b < 2; b++) {
        CHECK(n_different(two.out + b * n, one->out, n) == 0, "batch, %s: out of entry %d",
              test_tri_text(one), b);
        CHECK(n_different(two.dx + b * n, one->dx, n) == 0, "batch, %s: dx of entry %d",
              test_tri_text(one), b);
    }
    test_tri_free(&two);
}

/* Gradients of weights of the same call once more, with each rank's own threads. */
static void test_repeat(const struct test_tri *one)
{
    struct test_tri_problem p = one->p;
    p.n_ranks = 2;
    p.params.reduce_param_grads = 1;
    struct test_tri a, b;
    test_tri_make(&a, &p);
    test_tri_make(&b, &p);
    test_tri_run(&a);
    b.p.n_repeats = 3;
    test_tri_run(&b);
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++)
        CHECK(n_different(a.grads[i], b.grads[i], a.weight_elements[i]) == 0,
              "repeat, %s: gradient %d", test_tri_text(one), i);
    test_tri_free(&a);
    test_tri_free(&b);
}

static void test_problem(cof_dtype dtype, int64_t n, int64_t dim, int64_t hidden, int direction)
{
    struct test_tri one, other;
    struct test_tri_problem p = problem_of(dtype, n, dim, hidden);
    p.params.direction = (cof_trimul_direction)direction;
    test_tri_make(&one, &p);
    test_tri_run(&one);
    check_same(&one, &p, "again");
    test_grids(&one);
    test_batch(&one);
    test_repeat(&one);
    p.seed++;
    test_tri_make(&other, &p);
    test_tri_run(&other);
    CHECK(n_different(one.out, other.out, one.n_pairs * dim) > 0, "control: another seed");
    test_tri_free(&other);
    test_tri_free(&one);
}

int main(void)
{
    test_problem(COF_BF16, 37, 24, 40, 0);
    if (TEST_FEWER)
        return test_done();
    test_problem(COF_F32, 37, 24, 72, 1);
    test_problem(COF_F16, 20, 16, 16, 1);
    test_problem(COF_BF16, 150, 16, 24, 1); /* tokens of a row in two tiles */
    test_problem(COF_F32, 270, 8, 16, 0);   /* so are planes */
    return test_done();
}
