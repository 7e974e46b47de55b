/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans of allreduce_rmsnorm that share one device: rows of another length on the same
 * kernel. Ranks are threads, all on the first device. Skipped where no device is. */
#include "test_cuda_allreduce.h"

#ifdef COFI_CUDA
static bool open_world(int rank, int n_ranks, const char *job, cof_world **world_out)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_CUDA;
    o.device = "0";
    o.init_timeout = 30;
    o.run_timeout = 10;
    CHECK_OK(cof_world_create(&o, world_out));
    return *world_out != NULL;
}

static cof_plan *make_plan(cof_world *w, int64_t hidden, int64_t max_tokens)
{
    const cof_allreduce_rmsnorm_params params = test_arn_params(hidden, max_tokens);
    cof_plan *plan = NULL;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &params, NULL, &plan));
    return plan;
}

static void check_outputs(struct test_cuda_arn *t, const char *what)
{
    test_cuda_arn_fetch(t);
    const int64_t n_wrong = test_arn_wrong(&t->host);
    CHECK(n_wrong == 0, "%s: %lld elements", what, (long long)n_wrong);
}

/* ---- rows of two lengths -------------------------------------------------------------------- */

enum { LONG = 8192, SHORT = 64, TOKENS = 4 }; /* LONG: more shared memory than kernels have unasked */

static void run_once(cof_plan *plan, struct test_cuda_arn *t, const char *what)
{
    test_cuda_arn_poison(t);
    CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t->args, COF_STREAM_NOW));
    check_outputs(t, what);
}

/* Both plans are there before either runs. */
static void test_lengths(int rank, int n_ranks, const char *job, void *arg)
{
    const cof_allreduce_rmsnorm_params of_long = test_arn_params(LONG, TOKENS);
    const cof_allreduce_rmsnorm_params of_short = test_arn_params(SHORT, TOKENS);
    struct test_cuda_arn on_long, on_short;
    cof_world *w = NULL;
    (void)arg;
    if (!open_world(rank, n_ranks, job, &w))
        return;
    cof_plan *long_plan = make_plan(w, LONG, TOKENS), *short_plan = make_plan(w, SHORT, TOKENS);
    test_cuda_arn_make(&on_long, &of_long, TOKENS, w, 1);
    test_cuda_arn_make(&on_short, &of_short, TOKENS, w, 2);
    if (long_plan && short_plan) {
        run_once(long_plan, &on_long, "long rows, behind the making of a plan of short ones");
        run_once(short_plan, &on_short, "short rows");
        run_once(long_plan, &on_long, "long rows, behind short ones");
    }
    test_cuda_arn_free(&on_long);
    test_cuda_arn_free(&on_short);
    cof_plan_destroy(long_plan);
    cof_plan_destroy(short_plan);
    cof_world_destroy(w);
}

int main(void)
{
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* ranks of a process run side by side */
    if (!test_cuda_devices())
        return 77;
    test_ranks(1, test_lengths, NULL);
    return test_done();
}
#endif
