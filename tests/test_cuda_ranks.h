/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* An operator on CUDA devices where a rank fails. Ranks are processes, made by exec: the test's
 * program once more, which finds its part in its arguments. A process is one rank, so that the
 * operator's tensors can lie at file scope. Needs _GNU_SOURCE. */
#ifndef COFUSE_TEST_CUDA_RANKS_H
#define COFUSE_TEST_CUDA_RANKS_H

#include "test_cuda.h"

#ifdef COFI_CUDA
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { TEST_CUDA_PATIENCE = 60, TEST_CUDA_MAX_RANKS = 8 }; /* seconds that a rank may take */

struct test_cuda_rank {
    const struct test_cuda_op *op;
    int rank, form; /* form: the test's own number */
    cof_world *world;
    cof_team *team;
    cof_plan *plan;
};

struct test_cuda_case {
    const char *name;
    void (*run)(struct test_cuda_rank *r, const char *job);
    bool kills; /* the last rank */
    const char *timeout;
};

struct test_cuda_op {
    const char *name; /* in those of jobs */
    int n_ranks;
    const struct test_cuda_case *cases;
    cof_status (*make_plan)(struct test_cuda_rank *r);
    void (*make_tensors)(struct test_cuda_rank *r, int seed); /* of the plan */
    void (*free_tensors)(struct test_cuda_rank *r);
    void (*poison)(struct test_cuda_rank *r); /* the outputs */
    cof_status (*call)(struct test_cuda_rank *r);
    void (*check)(struct test_cuda_rank *r, bool are_nan); /* the outputs: right, or all NaN */
};

static inline double test_cuda_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- a rank --------------------------------------------------------------------------------- */

static inline bool test_cuda_enter(struct test_cuda_rank *r, int n_ranks, const char *job,
                                   const char *device)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = n_ranks == 1 ? 0 : r->rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_CUDA;
    o.device = device;
    o.init_timeout = 30; /* run_timeout: COFUSE_TIMEOUT */
    CHECK_OK(cof_world_create(&o, &r->world));
    if (r->world)
        r->team = cof_world_team(r->world);
    return r->world != NULL;
}

static inline bool test_cuda_join(struct test_cuda_rank *r, int n_ranks, const char *job,
                                  const char *device)
{
    if (!test_cuda_enter(r, n_ranks, job, device))
        return false;
    CHECK_OK(r->op->make_plan(r));
    return r->plan != NULL;
}

/* With a call behind it that passes. */
static inline bool test_cuda_set_up(struct test_cuda_rank *r, const char *job)
{
    if (!test_cuda_join(r, r->op->n_ranks, job, NULL))
        return false;
    r->op->make_tensors(r, 1);
    CHECK_OK(cof_team_barrier(r->team)); /* the deadline may be short */
    CHECK_OK(r->op->call(r));
    r->op->check(r, false);
    r->op->poison(r);
    CHECK_OK(cof_team_barrier(r->team));
    return true;
}

static inline void test_cuda_leave(struct test_cuda_rank *r)
{
    r->op->free_tensors(r);
    cof_plan_destroy(r->plan);
    cof_world_destroy(r->world);
    r->plan = NULL;
    r->world = NULL;
}

/* After the failure: the plan is refused, the team tells; a new world works on the same device. */
static inline void test_cuda_look_after(struct test_cuda_rank *r, const char *job)
{
    char device[16], alone[80];
    snprintf(device, sizeof device, "%d", cof_world_device(r->world));
    snprintf(alone, sizeof alone, "%s-alone-%d", job, r->rank);
    r->op->poison(r);
    CHECK(r->op->call(r) != COF_OK, "a call on the failed plan passed");
    CHECK(cof_team_query(r->team) != COF_OK, "the team knows of nothing");
    test_cuda_leave(r);
    if (!test_cuda_join(r, 1, alone, device))
        return;
    r->op->make_tensors(r, 2);
    CHECK_OK(r->op->call(r));
    r->op->check(r, false);
    test_cuda_leave(r);
}

/* A case: the last rank dies before its call. */
static inline void test_cuda_killed(struct test_cuda_rank *r, const char *job)
{
    char last[24];
    snprintf(last, sizeof last, "rank %d", r->op->n_ranks - 1);
    if (r->rank == r->op->n_ranks - 1) {
        usleep(300000); /* the others are past the barrier */
        raise(SIGKILL);
    }
    double begin = test_cuda_seconds();
    CHECK_FAILS(r->op->call(r), COF_ERR_PEER_DEAD, last);
    double took = test_cuda_seconds() - begin;
    CHECK(took < 5, "it took %g s", took);
    r->op->check(r, true);
    CHECK_FAILS(cof_team_query(r->team), COF_ERR_PEER_DEAD, last);
    test_cuda_look_after(r, job);
}

/* The last rank does not call until the others' deadline of 1 s has passed. Texts: of who waited,
 * and of who came late. */
static inline void test_cuda_absent(struct test_cuda_rank *r, const char *job, const char *waited,
                                    const char *told)
{
    const bool is_late = r->rank == r->op->n_ranks - 1;
    if (!is_late) {
        double begin = test_cuda_seconds();
        CHECK_FAILS(r->op->call(r), COF_ERR_TIMEOUT, waited);
        double took = test_cuda_seconds() - begin;
        CHECK(took > 0.9 && took < 10, "it took %g s with a deadline of 1 s", took);
        if (r->op->n_ranks == 2) /* else the other one's may have passed */
            CHECK(strstr(cof_last_error(), "deadline passed"), "%s", cof_last_error());
        r->op->check(r, true);
    }
    CHECK_OK(cof_team_barrier(r->team));
    if (is_late)
        CHECK_FAILS(r->op->call(r), COF_ERR_TIMEOUT, told);
    CHECK_OK(cof_team_barrier(r->team));
    test_cuda_look_after(r, job);
}

/* ---- processes ------------------------------------------------------------------------------ */

enum { TEST_CUDA_WORDS = 6 }; /* a rank's arguments: program, case, form, rank, job, parent */

static inline int test_cuda_rank_main(const struct test_cuda_op *op, char **argv)
{
    struct test_cuda_rank r = {.op = op, .form = atoi(argv[2]), .rank = atoi(argv[3])};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != atoi(argv[5])) /* it died before prctl */
        return 2;
    alarm(TEST_CUDA_PATIENCE);
    if (test_cuda_set_up(&r, argv[4]))
        op->cases[atoi(argv[1])].run(&r, argv[4]);
    fflush(stdout);
    return test_n_failed != 0;
}

static inline pid_t test_cuda_start(const struct test_cuda_op *op, int idx, int form, int rank,
                                    const char *job)
{
    char words[TEST_CUDA_WORDS][64], *argv[TEST_CUDA_WORDS + 1] = {NULL};
    pid_t pid = -1;
    for (int i = 0; i < TEST_CUDA_WORDS; i++)
        argv[i] = words[i];
    snprintf(words[0], sizeof words[0], "unit_cuda_%s", op->name);
    snprintf(words[1], sizeof words[1], "%d", idx);
    snprintf(words[2], sizeof words[2], "%d", form);
    snprintf(words[3], sizeof words[3], "%d", rank);
    snprintf(words[4], sizeof words[4], "%s", job);
    snprintf(words[5], sizeof words[5], "%d", (int)getpid());
    int error = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ);
    CHECK(error == 0, "posix_spawn: %s", strerror(error));
    return error == 0 ? pid : -1;
}

/* One case in one form, as `how` says; waits for all ranks. */
static inline void test_cuda_run(const struct test_cuda_op *op, int idx, int form, const char *how)
{
    static int n_jobs;
    const struct test_cuda_case *c = &op->cases[idx];
    pid_t child[TEST_CUDA_MAX_RANKS];
    char job[48];
    snprintf(job, sizeof job, "test-cuda-%s-%d-%d", op->name, (int)getpid(), n_jobs++);
    setenv("COFUSE_TIMEOUT", c->timeout, 1);
    fflush(stdout);
    for (int r = 0; r < op->n_ranks; r++)
        child[r] = test_cuda_start(op, idx, form, r, job);
    for (int r = 0; r < op->n_ranks; r++) {
        int status = 0;
        bool dies = c->kills && r == op->n_ranks - 1;
        CHECK(child[r] > 0 && waitpid(child[r], &status, 0) == child[r], "rank %d is no process",
              r);
        CHECK(dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0,
              "%s, %s: rank %d ended with %x", c->name, how, r, (unsigned)status);
    }
}
#endif

#endif
