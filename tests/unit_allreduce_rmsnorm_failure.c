/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks that disagree or fall away around an allreduce_rmsnorm plan: an error on every rank that
 * names the rank, the step and the values; outputs NaN; nothing hangs. Ranks are threads, but for
 * the one that is killed. */
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "test_allreduce_rmsnorm.h"

static void params_differ(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_plan *plan;
    (void)arg;
#define DIFFERS(change, part)                                                                      \
    do {                                                                                           \
        cof_allreduce_rmsnorm_params p = test_arn_params(16, 8);                                   \
        if (rank == 1) {                                                                           \
            change;                                                                                \
        }                                                                                          \
        CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan), COF_ERR_MISMATCH,    \
                    "ranks 0 and 1 differ: " part);                                                \
        CHECK(!plan, "a plan came out");                                                           \
    } while (0)
    DIFFERS(p.dtype = COF_BF16, "dtype=f32 | dtype=bf16");
    DIFFERS(p.hidden = 17, "H=16 | H=17");
    DIFFERS(p.max_tokens = 9, "max_tokens=8 | max_tokens=9");
    DIFFERS(p.variant = COF_ALLREDUCE_NORM, "variant=residual_norm | variant=norm");
    DIFFERS(p.rounding = COF_ALLREDUCE_EXACT, "rounding=match_unfused | rounding=exact");
    DIFFERS(p.eps = 1, "eps=9.99999975e-06 | eps=1");
    DIFFERS(p.eps = nextafterf(p.eps, 1), "eps=9.99999975e-06 | eps=1.00000007e-05");
    DIFFERS(p.weight_bias = 1, "weight_bias=0 | weight_bias=1");
    DIFFERS(p.algorithm = COF_ALLREDUCE_TWO_SHOT, "algorithm=auto | algorithm=two_shot");
    DIFFERS(p.one_shot_bytes = 64, "one_shot_bytes=131072 | one_shot_bytes=64");
    cof_allreduce_rmsnorm_params p = test_arn_params(16, 8);
    p.dtype = COF_BF16;
    p.weight_dtype = rank == 2 ? COF_F32 : COF_BF16;
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan), COF_ERR_MISMATCH,
                "ranks 0 and 2 differ: weight=bf16 | weight=f32");
    p = test_arn_params(16, rank == 1 ? 0 : 8);
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan),
                rank == 1 ? COF_ERR_INVALID : COF_ERR_MISMATCH, "params.max_tokens = 0");
    p = test_arn_params(16, 8); /* and the team still works */
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan));
    cof_plan_destroy(plan);
    CHECK_OK(cof_team_barrier(team));
    cof_world_destroy(w);
}

struct fixture {
    cof_world *world;
    cof_team *team;
    cof_arena *arena;
    size_t at; /* x of 6 rows in it */
    char *own;
    cof_plan *plan;
    cof_stream stream;
    struct test_arn t;
};

enum { TOKENS = 6, HIDDEN = 40, MAX_TOKENS = 4, ROOM = 8192 };

static const cof_allreduce_algorithm ways[] = {COF_ALLREDUCE_ONE_SHOT, COF_ALLREDUCE_TWO_SHOT};

static void check_right(const struct fixture *f)
{
    CHECK(test_arn_wrong(&f->t) == 0, "%lld elements", (long long)test_arn_wrong(&f->t));
}

/* With a call of two parts behind it that passes. */
static void set_up(struct fixture *f, cof_allreduce_algorithm algorithm, int rank, int n_ranks,
                   const char *job, double run_timeout)
{
    cof_allreduce_rmsnorm_params p = test_arn_params(HIDDEN, MAX_TOKENS);
    cof_arena_pointers view = COF_ARENA_POINTERS_INIT;
    p.algorithm = algorithm;
    f->world = test_world(rank, n_ranks, job, run_timeout);
    f->team = cof_world_team(f->world);
    CHECK_OK(cof_arena_create(f->team, 65536, 0, &f->arena));
    CHECK_OK(cof_arena_alloc(f->arena, ROOM, &f->at));
    CHECK_OK(cof_arena_view(f->arena, &view));
    f->own = view.base[rank];
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(f->team, &p, f->arena, &f->plan));
    CHECK_OK(cof_stream_create(f->world, 1, &f->stream));
    test_arn_make(&f->t, &p, TOKENS, rank, n_ranks, 1);
    CHECK_OK(cof_allreduce_rmsnorm_run(f->plan, &f->t.args, f->stream));
    CHECK_OK(cof_stream_sync(f->stream));
    check_right(f);
    CHECK_OK(cof_team_barrier(f->team));
    test_arn_poison(&f->t);
}

static void tear_down(struct fixture *f)
{
    CHECK_OK(cof_team_barrier(f->team));
    cof_stream_destroy(f->stream);
    cof_plan_destroy(f->plan);
    cof_arena_destroy(f->arena);
    cof_world_destroy(f->world);
    test_arn_free(&f->t);
}

/* After a failure: the plan is refused, the team tells, a new plan on the same team works. */
static void look_after(struct fixture *f)
{
    struct test_arn *t = &f->t;
    test_arn_poison(t);
    cof_status status = cof_allreduce_rmsnorm_run(f->plan, &t->args, COF_STREAM_NOW);
    CHECK(status == COF_ERR_POISONED, "%s: %s", cof_status_name(status), cof_last_error());
    CHECK(test_arn_untouched(t), "a refused call touched the outputs");
    CHECK(cof_team_query(f->team) != COF_OK, "the team knows of nothing");
    cof_stream_destroy(f->stream);
    cof_plan_destroy(f->plan);
    cof_arena_destroy(f->arena);
    f->arena = NULL;
    CHECK_OK(cof_team_query(f->team));
    CHECK_OK(cof_team_barrier(f->team));
    int rank = t->rank, n_ranks = t->n_ranks;
    cof_allreduce_rmsnorm_params p = t->params;
    test_arn_free(t);
    test_arn_make(t, &p, TOKENS, rank, n_ranks, 2);
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(f->team, &p, NULL, &f->plan));
    CHECK_OK(cof_stream_create(f->world, 1, &f->stream));
    CHECK_OK(cof_allreduce_rmsnorm_run(f->plan, &t->args, f->stream));
    CHECK_OK(cof_stream_sync(f->stream));
    check_right(f);
}

static void mismatched(struct fixture *f)
{
    bool refused;
    CHECK_FAILS_OR_REFUSED(refused, cof_allreduce_rmsnorm_run(f->plan, &f->t.args, f->stream),
                           cof_stream_sync(f->stream), COF_ERR_MISMATCH,
                           "ranks disagree about this call");
    CHECK(refused ? test_arn_untouched(&f->t) : test_arn_all_nan(&f->t), "outputs");
}

/* The last rank has fewer rows, or more parts. */
static void tokens_differ(int rank, int n_ranks, const char *job, void *arg)
{
    for (int64_t n = 1; n <= 9; n += 4) {
        struct fixture f;
        set_up(&f, *(const cof_allreduce_algorithm *)arg, rank, n_ranks, job, 20);
        cof_allreduce_rmsnorm_params p = f.t.params;
        if (rank == n_ranks - 1) {
            test_arn_free(&f.t);
            test_arn_make(&f.t, &p, n, rank, n_ranks, 1);
        }
        mismatched(&f);
        char text[40];
        snprintf(text, sizeof text, "; sizes %lld 0", (long long)n);
        CHECK(strstr(cof_last_error(), text), "%s", cof_last_error());
        CHECK(strstr(cof_last_error(), "; sizes 6 0"), "%s", cof_last_error());
        look_after(&f);
        tear_down(&f);
    }
}

/* On rank 0 x lies elsewhere: in ordinary memory, at another offset, with another pitch. */
static void sources_differ(int rank, int n_ranks, const char *job, void *arg)
{
    for (int how = 0; how < 3; how++) {
        struct fixture f;
        set_up(&f, *(const cof_allreduce_algorithm *)arg, rank, n_ranks, job, 20);
        int64_t strides[2] = {rank == 0 && how == 2 ? HIDDEN + 1 : HIDDEN, 1};
        size_t at = f.at + (rank == 0 && how == 1 ? 128 : 0);
        if (rank != 0 || how != 0) {
            f.t.x.data = f.own + at;
            f.t.x.strides = strides;
            f.t.args.x_source = COF_IN_ARENA(at);
        }
        mismatched(&f);
        look_after(&f);
        tear_down(&f);
    }
}

/* Rank 1 has an empty call more: the next call finds out. */
static void empty_on_one(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    set_up(&f, *(const cof_allreduce_algorithm *)arg, rank, n_ranks, job, 20);
    if (rank == 1) {
        struct test_arn none;
        test_arn_make(&none, &f.t.params, 0, rank, n_ranks, 1);
        CHECK_OK(cof_allreduce_rmsnorm_run(f.plan, &none.args, f.stream));
        test_arn_free(&none);
    }
    mismatched(&f);
    look_after(&f);
    tear_down(&f);
}

/* Rank 1 does not call: the others' deadline passes, and names it. */
static void one_absent(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    set_up(&f, *(const cof_allreduce_algorithm *)arg, rank, n_ranks, job, 2);
    if (rank != 1) {
        CHECK_OK(cof_allreduce_rmsnorm_run(f.plan, &f.t.args, f.stream));
        CHECK_FAILS(cof_stream_sync(f.stream), COF_ERR_TIMEOUT, "rank 1 at \"rows published\"");
        CHECK(strstr(cof_last_error(), "wanted epoch 3"), "%s", cof_last_error());
        test_meet(n_ranks);
    } else {
        test_meet(n_ranks);
        CHECK_FAILS(cof_allreduce_rmsnorm_run(f.plan, &f.t.args, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                    "told by rank");
    }
    CHECK(test_arn_all_nan(&f.t), "outputs are not NaN");
    look_after(&f);
    tear_down(&f);
}

/* A call that was enqueued before the failure of the one before it was known leaves NaN, too. */
static void calls_in_flight(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    struct test_arn later;
    set_up(&f, *(const cof_allreduce_algorithm *)arg, rank, n_ranks, job, 20);
    cof_allreduce_rmsnorm_params p = f.t.params;
    test_arn_make(&later, &p, TOKENS, rank, n_ranks, 1);
    if (rank == 0) {
        test_arn_free(&f.t);
        test_arn_make(&f.t, &p, 1, rank, n_ranks, 1);
    }
    bool refused;
    cof_status status = COF_ERR_POISONED;
    CHECK_FAILS_OR_REFUSED(refused, cof_allreduce_rmsnorm_run(f.plan, &f.t.args, f.stream),
                           (status = cof_allreduce_rmsnorm_run(f.plan, &later.args, f.stream),
                            cof_stream_sync(f.stream)),
                           COF_ERR_MISMATCH, "ranks disagree about this call");
    CHECK(refused ? test_arn_untouched(&f.t) : test_arn_all_nan(&f.t), "outputs");
    CHECK(status == COF_ERR_POISONED ? test_arn_untouched(&later) : test_arn_all_nan(&later),
          "outputs of a later call that returned %s", cof_status_name(status));
    test_arn_free(&later);
    look_after(&f);
    tear_down(&f);
}

/* Rank 1 leaves the world in order, without its part of the call. */
static void one_leaves(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    set_up(&f, *(const cof_allreduce_algorithm *)arg, rank, n_ranks, job, 30);
    if (rank != 1) {
        bool refused;
        CHECK_FAILS_OR_REFUSED(refused, cof_allreduce_rmsnorm_run(f.plan, &f.t.args, f.stream),
                               cof_stream_sync(f.stream), COF_ERR_PEER_DEAD, "rank 1");
        CHECK(refused ? test_arn_untouched(&f.t) : test_arn_all_nan(&f.t), "outputs");
        test_meet(n_ranks - 1);
    }
    cof_stream_destroy(f.stream);
    cof_plan_destroy(f.plan);
    cof_arena_destroy(f.arena);
    cof_world_destroy(f.world);
    test_arn_free(&f.t);
}

/* ---- a rank that is killed ------------------------------------------------------------------ */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int live_or_die(int rank, int n_ranks, const char *job, cof_allreduce_algorithm algorithm)
{
    cof_allreduce_rmsnorm_params p = test_arn_params(HIDDEN, MAX_TOKENS);
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    cof_world *world;
    cof_plan *plan;
    struct test_arn t;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_SHM;
    o.n_threads = 1;
    o.init_timeout = 20;
    o.run_timeout = 60;
    p.algorithm = algorithm;
    CHECK_OK(cof_world_create(&o, &world));
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(world), &p, NULL, &plan));
    test_arn_make(&t, &p, TOKENS, rank, n_ranks, 1);
    CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW));
    CHECK(test_arn_wrong(&t) == 0, "%lld elements", (long long)test_arn_wrong(&t));
    test_meet(n_ranks);
    if (rank == 1)
        raise(SIGKILL);
    double begin = seconds();
    cof_status status = cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW);
    CHECK(status == COF_ERR_PEER_DEAD && strstr(cof_last_error(), "rank 1"), "%s: %s",
          cof_status_name(status), cof_last_error());
    CHECK(seconds() - begin < 10, "it took %g s", seconds() - begin);
    CHECK(test_arn_all_nan(&t), "outputs are not NaN");
    test_arn_free(&t);
    cof_plan_destroy(plan);
    cof_world_destroy(world);
    return test_n_failed != 0;
}

static void one_killed(int n_ranks, cof_allreduce_algorithm algorithm)
{
    pid_t child[8];
    char job[64];
    snprintf(job, sizeof job, "test-kill-%d-%d", (int)getpid(), (int)algorithm);
    fflush(stdout);
    for (int r = 0; r < n_ranks; r++) {
        child[r] = fork();
        if (child[r] == 0) {
            int failed = live_or_die(r, n_ranks, job, algorithm);
            fflush(stdout);
            _exit(failed);
        }
    }
    for (int r = 0; r < n_ranks; r++) {
        int status = 0;
        waitpid(child[r], &status, 0);
        CHECK(r == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "rank %d ended with %x", r, (unsigned)status);
    }
}

int main(void)
{
    for (int i = 0; i < 2; i++) /* while this process has one thread */
        one_killed(3, ways[i]);
    test_ranks(3, params_differ, NULL);
    for (int i = 0; i < 2; i++) {
        void *way = (void *)(uintptr_t)&ways[i];
        for (int n = 2; n <= 3; n++) {
            test_ranks(n, tokens_differ, way);
            test_ranks(n, empty_on_one, way);
            test_ranks(n, calls_in_flight, way);
        }
        test_ranks(3, sources_differ, way);
        test_ranks(3, one_absent, way);
        test_ranks(3, one_leaves, way);
    }
    return test_done();
}
