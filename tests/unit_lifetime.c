/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Nothing is left behind: a thousand worlds, teams, streams and plans made and destroyed, with
 * calls, leave descriptors, threads and memory where they were. A thousand forward calls on one
 * plan. */
#include <dirent.h>

#include "test.h"

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int n = 0;
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n;
}

static long resident_kib(void)
{
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file) {
        if (fscanf(file, "%ld %ld", &pages, &resident) != 2)
            resident = 0;
        fclose(file);
    }
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

struct census {
    int n_fds, n_threads, n_shm;
    long kib;
};

static struct census take_census(void)
{
    return (struct census){count_entries("/proc/self/fd"), count_entries("/proc/self/task"),
                           count_entries("/dev/shm"), resident_kib()};
}

static void make_and_destroy(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    struct test_attention t;
    cof_attention_params p = test_attention_params(33);
    cof_plan *plan;
    cof_stream stream;
    test_attention_make(&t, &p, rank, n_ranks, 1);
    CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
    CHECK_OK(cof_stream_create(w, 1, &stream));
    CHECK_OK(cof_attention_forward(plan, &t.args, stream));
    CHECK_OK(cof_attention_backward(plan, &t.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    cof_stream_destroy(stream);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
    test_attention_free(&t);
}

static void plans_on_one_world(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_attention_params p = test_attention_params(33);
    struct test_attention t;
    test_attention_make(&t, &p, rank, n_ranks, 1);
    for (int i = 0; i < *(int *)arg; i++) {
        cof_plan *plan;
        CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
        CHECK_OK(cof_attention_forward(plan, &t.args, COF_STREAM_NOW));
        cof_plan_destroy(plan);
    }
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
    test_attention_free(&t);
}

/* Forward only, a thousand calls in flight on a stream: the last result is the first one. */
static void forward_only(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    struct test_attention t;
    cof_attention_params p = test_attention_params(33);
    cof_plan *plan;
    cof_stream stream;
    test_attention_make(&t, &p, rank, n_ranks, 1);
    size_t bytes = (size_t)t.rows * 2 * 16 * 4;
    void *first = malloc(bytes);
    CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
    CHECK_OK(cof_attention_forward(plan, &t.args, COF_STREAM_NOW));
    memcpy(first, t.o.data, bytes);
    CHECK_OK(cof_stream_create(w, 1, &stream));
    for (int i = 0; i < 1000; i++)
        CHECK_OK(cof_attention_forward(plan, &t.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    CHECK(!memcmp(first, t.o.data, bytes), "the thousandth call gave another result");
    cof_stream_destroy(stream);
    cof_plan_destroy(plan);
    cof_team_barrier(cof_world_team(w));
    cof_world_destroy(w);
    test_attention_free(&t);
    free(first);
}

/* A team outlives its world, and every call on it says that the world is gone. */
static void team_without_world(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    const char *why = "its world has been destroyed";
    int ranks[2] = {0, 1};
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *t = NULL, *in, *out;
    cof_arena *a = NULL;
    cof_plan *plan = NULL;
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    CHECK_OK(cof_team_create(w, ranks, 2, 1, &t));
    test_meet(n_ranks);
    cof_world_destroy(w);
    cof_attention_params attention = test_attention_params(33);
    CHECK_FAILS(cof_attention_workspace(t, &attention, &sizes), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_attention_plan_create(t, &attention, NULL, &plan), COF_ERR_INVALID, why);
    cof_grad_return_params grad = COF_GRAD_RETURN_PARAMS_INIT;
    CHECK_FAILS(cof_grad_return_workspace(t, &grad, &sizes), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_grad_return_plan_create(t, &grad, NULL, &plan), COF_ERR_INVALID, why);
    cof_allreduce_rmsnorm_params norm = COF_ALLREDUCE_RMSNORM_PARAMS_INIT;
    CHECK_FAILS(cof_allreduce_rmsnorm_workspace(t, &norm, &sizes), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(t, &norm, NULL, &plan), COF_ERR_INVALID, why);
    cof_trimul_params trimul = COF_TRIMUL_PARAMS_INIT;
    CHECK_FAILS(cof_trimul_workspace(t, &trimul, &sizes), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_trimul_plan_create(t, &trimul, NULL, &plan), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_arena_create(t, 128, 0, &a), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_team_split(t, 1, &in, &out), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_team_barrier(t), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_team_query(t), COF_ERR_INVALID, why);
    CHECK(!plan && !a, "something came out");
    cof_team_destroy(t);
}

/* `n` rounds after at most 20 to warm up: what is there is what was there. */
static void repeat(const char *what, int n, int n_ranks, test_rank_fn fn, int *arg)
{
    for (int i = 0; i < n && i < 20; i++)
        test_ranks(n_ranks, fn, arg);
    struct census before = take_census();
    for (int i = 0; i < n; i++)
        test_ranks(n_ranks, fn, arg);
    struct census after = take_census();
    CHECK(before.n_fds == after.n_fds, "%s: %d descriptors, before %d", what, after.n_fds,
          before.n_fds);
    CHECK(before.n_threads == after.n_threads, "%s: %d threads, before %d", what, after.n_threads,
          before.n_threads);
    CHECK(before.n_shm == after.n_shm, "%s: /dev/shm has %d entries, before %d", what, after.n_shm,
          before.n_shm);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    CHECK(after.kib < before.kib + 16 * 1024, "%s: %ld KiB, before %ld", what, after.kib,
          before.kib);
#endif
}

int main(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    int n = 50, n_plans = 50;
#else
    int n = 1000, n_plans = 1000;
#endif
    int few = 5;
    repeat("worlds", n, 2, make_and_destroy, NULL);
    repeat("plans", 1, 3, plans_on_one_world, &n_plans);
    repeat("both", 5, 3, plans_on_one_world, &few);
    test_ranks(3, forward_only, NULL);
    test_ranks(2, team_without_world, NULL);
    return test_done();
}
