/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans of allreduce_rmsnorm that share one device: another row length on the same kernel, and two
 * plans on two streams, to which ranks come in another order, of two ranks and more. Ranks are
 * threads, all on the first device. Skipped where no device is. */
#include "test_cuda_allreduce.h"

#ifdef COFI_CUDA
#include "symm/call_cuda.h"

void cofk_runtime_copy(void); /* the kernel's name on the host */

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

/* Long rows take more shared memory than a kernel may have unasked. */
enum { LONG = 8192, SHORT = 64, TOKENS = 4 };

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

/* ---- two plans on two streams --------------------------------------------------------------- */

/* Of rows so long that a multiprocessor holds one block, a call that is small beside its plan's
 * largest, and one that takes all that a plan may have of 132 multiprocessors. */
enum { ROUNDS = 16, HIDDEN = 32768, SMALL = 8, LARGE = 64 };

struct lane {
    cof_plan *plan;
    cof_stream stream;
    struct test_cuda_arn small, large;
};

static bool open_lane(struct lane *l, cof_world *w, int seed)
{
    const cof_allreduce_rmsnorm_params params = test_arn_params(HIDDEN, LARGE);
    l->plan = make_plan(w, HIDDEN, LARGE);
    CHECK_OK(cof_stream_create(w, 0, &l->stream));
    test_cuda_arn_make(&l->small, &params, SMALL, w, seed);
    test_cuda_arn_make(&l->large, &params, LARGE, w, seed + 1);
    return l->plan != NULL;
}

static void close_lane(struct lane *l)
{
    cof_stream_destroy(l->stream);
    test_cuda_arn_free(&l->small);
    test_cuda_arn_free(&l->large);
    cof_plan_destroy(l->plan);
}

static cof_status enqueue(struct lane *l)
{
    const cof_status status = cof_allreduce_rmsnorm_run(l->plan, &l->small.args, l->stream);
    return status == COF_OK ? cof_allreduce_rmsnorm_run(l->plan, &l->large.args, l->stream)
                            : status;
}

/* Every rank comes to one stream first, neighbours to different ones, and to the other when all
 * ranks' first calls are on their way: then each has on the device what waits for others' second
 * ones. Who is last at one meeting waits at the next for the others to wake up. */
static cof_status make_round(int rank, int n_ranks, struct lane lanes[2])
{
    cof_status first = enqueue(&lanes[rank % 2]);
    test_meet(n_ranks);
    test_meet(n_ranks);
    cof_status second = enqueue(&lanes[1 - rank % 2]);
    for (int i = 0; i < 2; i++)
        CHECK_OK(cof_stream_sync(lanes[i].stream));
    return first != COF_OK ? first : second;
}

static void make_rounds(int rank, int n_ranks, cof_world *w, struct lane lanes[2])
{
    bool is_alive = true;
    for (int i = 0; i < ROUNDS; i++) { /* all of them, for the meetings */
        cof_status status = make_round(rank, n_ranks, lanes);
        if (status == COF_OK)
            status = cof_team_query(cof_world_team(w));
        CHECK(!is_alive || status == COF_OK, "rank %d of %d, round %d: %s \"%s\"", rank, n_ranks,
              i, cof_status_name(status), cof_last_error());
        is_alive = is_alive && status == COF_OK;
    }
    for (int i = 0; i < 2 && is_alive; i++) {
        check_outputs(&lanes[i].small, "small call");
        check_outputs(&lanes[i].large, "large call");
    }
}

static void test_streams(int rank, int n_ranks, const char *job, void *arg)
{
    struct lane *lanes = calloc(2, sizeof *lanes);
    cof_world *w = NULL;
    (void)arg;
    if (!lanes || !open_world(rank, n_ranks, job, &w)) {
        free(lanes);
        return;
    }
    bool is_open = open_lane(&lanes[0], w, 1);
    is_open = open_lane(&lanes[1], w, 3) && is_open;
    CHECK_OK(cof_team_barrier(cof_world_team(w))); /* nobody allocates while another one waits */
    if (is_open)
        make_rounds(rank, n_ranks, w, lanes);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    close_lane(&lanes[0]);
    close_lane(&lanes[1]);
    free(lanes);
    cof_world_destroy(w);
}

/* Of more than two ranks a plan without a cap of its own has half of a rank's share. */
static void test_shares(int rank, int n_ranks, const char *job, void *arg)
{
    const void *kernel = (const void *)cofk_runtime_copy;
    int n_sms = 0, n = 0, with_cap = 0;
    cof_world *w = NULL;
    (void)arg;
    if (!open_world(rank, n_ranks, job, &w))
        return;
    cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, 0);
    CHECK_OK(cofi_cuda_max_blocks(cof_world_team(w), kernel, 64, 0, 0, &n));
    CHECK_OK(cofi_cuda_max_blocks(cof_world_team(w), kernel, 64, 0, n_sms, &with_cap));
    CHECK(n == n_sms / n_ranks / (n_ranks > 2 ? 2 : 1) && with_cap == n_sms / n_ranks,
          "%d ranks on %d multiprocessors: %d blocks, with a cap %d", n_ranks, n_sms, n, with_cap);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}

int main(void)
{
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* ranks of a process run side by side */
    if (!test_cuda_devices())
        return 77;
    test_ranks(1, test_lengths, NULL);
    for (int n = 2; n <= 4; n++) {
        test_ranks(n, test_shares, NULL);
        test_ranks(n, test_streams, NULL);
    }
    return test_done();
}
#endif
