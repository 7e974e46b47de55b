/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CUDA devices where a rank is killed, passes another T, or never comes: an
 * error by the deadline on whoever is left, outputs NaN, and a device that can be used again. Then
 * many pairs of T that differ, between 2, 3 and 4 ranks, each on a plan of its own. Ranks are
 * processes, made by exec: this program once more. Skipped where no device is. */
#define _GNU_SOURCE
#include "test_cuda_allreduce.h"
#include "test_cuda_ranks.h"

#ifdef COFI_CUDA
enum { TOKENS = 6, HIDDEN = 1000, MAX_TOKENS = 4 };

/* ---- tensors on the device ------------------------------------------------------------------ */

static struct test_cuda_arn own;
static cof_allreduce_rmsnorm_params params;

static void make_tensors(struct test_cuda_rank *r, int seed)
{
    test_cuda_arn_make(&own, &params, TOKENS, r->world, seed);
}

static void free_tensors(struct test_cuda_rank *r)
{
    (void)r;
    test_cuda_arn_free(&own);
}

static void poison(struct test_cuda_rank *r)
{
    (void)r;
    test_cuda_arn_poison(&own);
}

static int n_numbers(const cof_tensor *out, int64_t row)
{
    const float *x = (const float *)out->data + row * own.host.pitch;
    int n = 0;
    for (int h = 0; h < HIDDEN; h++)
        n += !isnan(x[h]);
    return n;
}

/* Rows of the outputs that are not NaN all through, and how many elements of each are not. */
static void print_numbers(void)
{
    const cof_tensor *out[2] = {&own.host.residual_out, &own.host.norm_out};
    for (int i = 0; i < 2; i++) {
        printf("#   %s, rows that keep numbers:", i ? "norm_out" : "residual_out");
        for (int64_t row = 0; row < own.host.n_tokens; row++)
            if (n_numbers(out[i], row) > 0)
                printf(" %lld (%d)", (long long)row, n_numbers(out[i], row));
        printf("\n");
    }
}

static void check(struct test_cuda_rank *r, bool are_nan)
{
    (void)r;
    test_cuda_arn_fetch(&own);
    if (are_nan) {
        CHECK(test_arn_all_nan(&own.host), "outputs are not NaN");
        if (!test_arn_all_nan(&own.host))
            print_numbers();
    } else {
        int64_t n_wrong = test_arn_wrong(&own.host);
        CHECK(n_wrong == 0, "%lld elements", (long long)n_wrong);
    }
}

/* ---- calls and cases ------------------------------------------------------------------------ */

static const struct form {
    cof_allreduce_algorithm algorithm;
    const char *units, *name;
} forms[] = {{COF_ALLREDUCE_ONE_SHOT, "auto", "one-shot, units=auto"},
             {COF_ALLREDUCE_TWO_SHOT, "auto", "two-shot, units=auto"},
             {COF_ALLREDUCE_ONE_SHOT, "words", "one-shot, units=words"},
             {COF_ALLREDUCE_TWO_SHOT, "words", "two-shot, units=words"}};
enum { N_FORMS = sizeof forms / sizeof forms[0] };

static cof_status make_plan(struct test_cuda_rank *r)
{
    params = test_arn_params(HIDDEN, MAX_TOKENS);
    params.algorithm = r->form < N_FORMS ? forms[r->form].algorithm : COF_ALLREDUCE_AUTO;
    return cof_allreduce_rmsnorm_plan_create(r->team, &params, NULL, &r->plan);
}

static cof_status call(struct test_cuda_rank *r)
{
    return cof_allreduce_rmsnorm_run(r->plan, &own.args, COF_STREAM_NOW);
}

/* Rank 1 has one row. */
static void tokens_differ(struct test_cuda_rank *r, const char *job)
{
    if (r->rank == 1) {
        free_tensors(r);
        test_cuda_arn_make(&own, &params, 1, r->world, 1);
    }
    CHECK_FAILS(call(r), COF_ERR_MISMATCH, "ranks disagree about this call");
    check(r, true);
    CHECK_OK(cof_team_barrier(r->team)); /* nobody leaves while the other one waits */
    test_cuda_look_after(r, job);
}

static void absent(struct test_cuda_rank *r, const char *job)
{
    test_cuda_absent(r, job, "rank 0 waited for rank 1 at \"rows", "told by rank 0");
}

static const struct test_cuda_case cases[] = {{"killed", test_cuda_killed, true, "30"},
                                              {"tokens_differ", tokens_differ, false, "30"},
                                              {"absent", absent, false, "1"}};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static const struct test_cuda_op op = {
    .name = "allreduce",
    .n_ranks = 2,
    .cases = cases,
    .make_plan = make_plan,
    .make_tensors = make_tensors,
    .free_tensors = free_tensors,
    .poison = poison,
    .call = call,
    .check = check,
};

/* ---- ranks that disagree, in many ways ------------------------------------------------------ */

enum { LEAST_RANKS = 2, MOST_RANKS = 4, DISAGREE = N_FORMS }; /* DISAGREE: as a form */

#define ONE COF_ALLREDUCE_ONE_SHOT
#define TWO COF_ALLREDUCE_TWO_SHOT
#define BY_SIZE COF_ALLREDUCE_AUTO

/* All ranks but one have `most` rows, that one has `odd`. The same pair is on the same side of P or
 * on both, as P is: in two shots calls with less than P rows go another way than others. */
static const struct dispute {
    cof_allreduce_algorithm algorithm;
    int one_shot_rows; /* BY_SIZE: calls with more take two shots */
    int max_tokens;    /* calls with more go in parts */
    int max_ctas, most, odd;
} disputes[] = {
    {ONE, 0, 8, 0, 6, 7}, {ONE, 0, 8, 0, 1, 8}, {ONE, 0, 8, 0, 2, 1}, {ONE, 0, 8, 1, 7, 6},
    {ONE, 0, 8, 3, 7, 6}, {ONE, 0, 4, 0, 4, 5}, {ONE, 0, 4, 0, 9, 6},
    /* As P is 2, 3, 4: one call with less than P rows, none, or all. */
    {TWO, 0, 8, 0, 1, 2}, {TWO, 0, 8, 0, 2, 3}, {TWO, 0, 8, 0, 3, 4}, {TWO, 0, 8, 0, 2, 1},
    {TWO, 0, 8, 0, 3, 2}, {TWO, 0, 8, 0, 4, 3}, {TWO, 0, 8, 0, 1, 3}, {TWO, 0, 8, 1, 3, 1},
    {TWO, 0, 8, 0, 1, 8}, {TWO, 0, 8, 0, 8, 1},
    /* P rows and more; with 3 blocks some are done with their own rows before anything lacks. */
    {TWO, 0, 8, 0, 6, 7}, {TWO, 0, 8, 0, 8, 5}, {TWO, 0, 8, 1, 6, 7}, {TWO, 0, 8, 3, 7, 6},
    {TWO, 0, 8, 3, 6, 7}, {TWO, 0, 4, 0, 4, 5}, {TWO, 0, 4, 0, 9, 6}, {TWO, 0, 4, 3, 4, 7},
    /* On both sides of one_shot_bytes. */
    {BY_SIZE, 1, 8, 0, 1, 2}, {BY_SIZE, 1, 8, 0, 2, 1}, {BY_SIZE, 1, 8, 0, 1, 3},
    {BY_SIZE, 2, 8, 0, 2, 3}, {BY_SIZE, 2, 8, 0, 3, 2}, {BY_SIZE, 2, 8, 3, 8, 2},
    {BY_SIZE, 4, 8, 0, 4, 5}, {BY_SIZE, 4, 8, 0, 8, 4}, {BY_SIZE, 4, 8, 0, 1, 8},
    {BY_SIZE, 4, 8, 1, 8, 3},
    /* On one side of them. */
    {BY_SIZE, 4, 8, 0, 3, 4}, {BY_SIZE, 2, 8, 0, 3, 8},
};
enum { N_DISPUTES = sizeof disputes / sizeof disputes[0] };

/* A plan of its own, on a team whose last one may have failed; a call on it that passes. */
static bool agree(struct test_cuda_rank *r, const struct dispute *d)
{
    params = test_arn_params(HIDDEN, d->max_tokens);
    params.algorithm = d->algorithm;
    params.one_shot_bytes = d->one_shot_rows * HIDDEN * (int64_t)sizeof(float);
    params.max_ctas = d->max_ctas;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(r->team, &params, NULL, &r->plan));
    if (!r->plan)
        return false;
    test_cuda_arn_make(&own, &params, d->most, r->world, 1);
    CHECK_OK(call(r));
    check(r, false);
    return true;
}

static void end_plan(struct test_cuda_rank *r)
{
    free_tensors(r);
    cof_plan_destroy(r->plan);
    r->plan = NULL;
}

static bool disagree(struct test_cuda_rank *r, const struct dispute *d, bool is_odd)
{
    if (!agree(r, d))
        return false;
    free_tensors(r);
    test_cuda_arn_make(&own, &params, is_odd ? d->odd : d->most, r->world, 2);
    CHECK_OK(cof_team_barrier(r->team));
    const double begin = test_cuda_seconds();
    CHECK_FAILS(call(r), COF_ERR_MISMATCH, "ranks disagree about this call");
    const double took = test_cuda_seconds() - begin;
    CHECK(took < 2, "it took %g s", took);
    check(r, true);
    CHECK_OK(cof_team_barrier(r->team)); /* nobody leaves while another one waits */
    CHECK(call(r) != COF_OK, "a call on the failed plan passed");
    end_plan(r);
    CHECK_OK(cof_team_query(r->team));
    return true;
}

/* All disputes in a world that has no plan; the odd rank is another one each time. */
static void disagree_in_world(struct test_cuda_rank *r, int n_ranks)
{
    static const char *const units[] = {"auto", "words"}, *const names[] = {"auto", "one", "two"};
    for (int u = 0; u < 2; u++) {
        setenv("COFUSE_TAGGED_UNITS", units[u], 1);
        for (int i = 0; i < N_DISPUTES; i++) {
            const struct dispute *d = &disputes[i];
            const int n_failed = test_n_failed, odd = (i + u) % n_ranks;
            const bool goes_on = disagree(r, d, r->rank == odd);
            if (test_n_failed != n_failed)
                printf("#   was rank %d of %d, units=%s algorithm=%s one_shot_rows=%d "
                       "max_tokens=%d max_ctas=%d: T = %d, on rank %d %d\n", r->rank, n_ranks,
                       units[u], names[d->algorithm], d->one_shot_rows, d->max_tokens, d->max_ctas,
                       d->most, odd, d->odd);
            fflush(stdout);
            if (!goes_on)
                return;
        }
    }
    agree(r, &disputes[0]);
}

/* In worlds of 4, 3 and 2 ranks, one after the other: a process's first call takes the longest. */
static void disagree_in_worlds(struct test_cuda_rank *r, const char *job)
{
    end_plan(r);
    for (int n = MOST_RANKS; n >= LEAST_RANKS && r->rank < n; n--) {
        char name[80];
        snprintf(name, sizeof name, "%s-of-%d", job, n);
        if (n < MOST_RANKS && !test_cuda_enter(r, n, name, NULL))
            return;
        disagree_in_world(r, n);
        if (!r->plan)
            return;
        CHECK_OK(cof_team_barrier(r->team));
        test_cuda_leave(r);
    }
}

static const struct test_cuda_case disagreements[] = {{"disagree", disagree_in_worlds, false, "6"}};

static const struct test_cuda_op crowd = {
    .name = "allreduce",
    .n_ranks = MOST_RANKS,
    .cases = disagreements,
    .make_plan = make_plan,
    .make_tensors = make_tensors,
    .free_tensors = free_tensors,
    .poison = poison,
    .call = call,
    .check = check,
};

int main(int argc, char **argv)
{
    if (argc == TEST_CUDA_WORDS)
        return test_cuda_rank_main(atoi(argv[2]) == DISAGREE ? &crowd : &op, argv);
    if (!test_cuda_devices())
        return 77;
    for (int i = 0; i < N_CASES; i++)
        for (int form = 0; form < N_FORMS; form++) {
            setenv("COFUSE_TAGGED_UNITS", forms[form].units, 1);
            test_cuda_run(&op, i, form, forms[form].name);
        }
    unsetenv("COFUSE_TAGGED_UNITS");
    test_cuda_run(&crowd, 0, DISAGREE, "2 to 4 ranks");
    return test_done();
}
#endif
