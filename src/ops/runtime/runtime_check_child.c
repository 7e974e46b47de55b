/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A process of the cases about ranks that die or stop: joins a world with its likes and makes calls
 * until one of them ends. What it finds wrong it writes to standard output, and exits with 1. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "core/clock.h"
#include "ops/runtime/runtime_check.h"

enum { MAX_BYTES = 2000, GOOD_CALLS = 20, GOOD_CALLS_BY_TURNS = 5 };
#define DEATH_NS INT64_C(2000000000) /* from a death to the error of every other rank */

struct life {
    cof_world *world;
    cof_team *team;
    int rank, n_ranks, victim, end;
    int n_good; /* calls before the end */
    bool stops;
    struct cofi_job job; /* for cofi_check_arena_open */
    struct cofi_check_arena a;
    struct cofi_runtime_op op;
    struct cofi_check_blocks stamps; /* by rank: the time of the end, that all may write */
};

static int complain(const char *what, cof_status status)
{
    printf("%s: %s: %.300s\n", what, cof_status_name(status), cof_last_error());
    fflush(stdout);
    return 1;
}

/* ---- the end -------------------------------------------------------------------------------- */

/* The others get to know when it was, and this process is no more. */
static void end_now(struct life *l)
{
    int64_t now = cofi_now();
    for (int r = 0; r < l->n_ranks; r++)
        atomic_store((_Atomic int64_t *)l->stamps.base[r], now);
    kill(getpid(), l->stops ? SIGSTOP : SIGKILL);
}

static void end_in_call(void *arg, enum cofi_runtime_point point)
{
    struct life *l = arg;
    if (l->op.n_made <= (uint64_t)l->n_good)
        return;
    if (point == (l->end == COFI_RUNTIME_IN_CALL ? COFI_RUNTIME_BEGUN : COFI_RUNTIME_PUBLISHED))
        end_now(l);
}

static void *end_soon(void *arg)
{
    cofi_runtime_sleep_us(20000 + (unsigned)cofi_check_random((uint64_t)cofi_now(), 1, 1) % 5000);
    end_now(arg);
    return NULL;
}

/* ---- what the ranks do until then ----------------------------------------------------------- */

static cof_status one_call(struct life *l)
{
    struct cofi_runtime_call call = {.bytes = 1 + l->op.n_made * 37 % MAX_BYTES};
    return cofi_runtime_op_call(l->world, &l->op, &call, COF_STREAM_NOW);
}

static cof_status make_arena(struct life *l)
{
    struct cofi_check_arena a;
    COF_TRY(cofi_check_arena_open(&l->job, l->team, 10000, 1, 0, &a));
    cofi_check_arena_close(&a);
    return COF_OK;
}

static cof_status one_step(struct life *l)
{
    switch (l->end) {
    case COFI_RUNTIME_IN_BARRIER: return cof_team_barrier(l->team);
    case COFI_RUNTIME_IN_CREATE: return make_arena(l);
    case COFI_RUNTIME_IN_WAIT:
        if (l->rank == l->victim) /* for a signal that nobody sends */
            return cof_wait(l->a.arena, (l->rank + 1) % l->n_ranks, 0, COF_STREAM_NOW);
        return one_call(l);
    default: return one_call(l);
    }
}

static cof_status live(struct life *l)
{
    pthread_t thread;
    for (int i = 0; i < l->n_good; i++)
        COF_TRY(one_call(l));
    COF_TRY(cof_team_barrier(l->team));
    if (l->stops) /* only where the deadline is to pass */
        l->a.arena->run_timeout = 1;
    COF_TRY(cof_team_barrier(l->team));
    bool by_call = l->end == COFI_RUNTIME_IN_CALL || l->end == COFI_RUNTIME_AT_PUBLISH;
    if (l->rank == l->victim && by_call) {
        l->op.hook = end_in_call;
        l->op.hook_arg = l;
    } else if (l->rank == l->victim) {
        COF_FAIL_IF(pthread_create(&thread, NULL, end_soon, l) != 0, COF_ERR_SYSTEM, "no thread");
    }
    cof_status status = COF_OK;
    for (int64_t end = cofi_now() + 30 * INT64_C(1000000000); status == COF_OK && cofi_now() < end;)
        status = one_step(l);
    return status;
}

/* ---- what a survivor must see --------------------------------------------------------------- */

static int inspect(struct life *l, cof_status status)
{
    char names[2][64];
    int64_t now = cofi_now(), stamp = atomic_load((_Atomic int64_t *)l->stamps.base[l->rank]);
    cof_status wanted = l->stops ? COF_ERR_TIMEOUT : COF_ERR_PEER_DEAD;
    snprintf(names[0], sizeof names[0], "rank %d (process", l->victim);
    /* With a third rank, one may wait for another that waits for the stopped one. */
    if (l->end == COFI_RUNTIME_IN_CALL && cof_team_size(l->team) == 2)
        snprintf(names[1], sizeof names[1], "waited for rank %d at", l->victim);
    else
        snprintf(names[1], sizeof names[1], "deadline passed");
    if (status != wanted)
        return complain(l->stops ? "a rank stopped" : "a rank died", status);
    if (!strstr(cof_last_error(), names[l->stops]))
        return complain("the text does not name the rank", status);
    if (stamp == 0)
        return complain("an error before the end of the rank", status);
    if (!l->stops && now - stamp > DEATH_NS) {
        printf("the error came %.1f s after the death\n", (double)(now - stamp) * 1e-9);
        return 1;
    }
    cof_status later = one_call(l);
    if (later == COF_OK)
        return complain("a later call passed", later);
    cof_status query = cof_team_query(l->team);
    return query == COF_OK ? complain("cof_team_query knows nothing", query) : 0;
}

/* The ranks that are left make a team of their own, and it works. */
static int go_on(struct life *l)
{
    int left[COFI_RUNTIME_MAX_RANKS], n = 0;
    cof_team *team;
    for (int r = 0; r < l->n_ranks; r++)
        if (r != l->victim)
            left[n++] = r;
    cof_status status = cof_team_create(l->world, left, n, 77, &team);
    if (status != COF_OK)
        return complain("a team of the ranks that are left", status);
    cofi_runtime_op_close(&l->op);
    cofi_check_arena_close(&l->a);
    status = cofi_check_arena_open(&l->job, team, 20000, 1, 0, &l->a);
    if (status == COF_OK)
        status = cofi_runtime_op_open(team, l->a.arena, "after", COFI_RUNTIME_PULL, MAX_BYTES,
                                      &l->op);
    for (int i = 0; i < 5 && status == COF_OK; i++)
        status = one_call(l);
    if (status == COF_OK)
        status = cof_team_barrier(team); /* nobody leaves while another looks */
    int code = status != COF_OK ? complain("calls of the ranks that are left", status) : 0;
    const char *wrong = code == 0 ? cofi_runtime_op_wrong(&l->op) : "";
    if (*wrong) {
        printf("%s\n", wrong);
        code = 1;
    }
    cofi_runtime_op_close(&l->op);
    cofi_check_arena_close(&l->a);
    cof_team_destroy(team);
    return code;
}

/* ---- the process ---------------------------------------------------------------------------- */

static cof_status join(struct life *l)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.n_threads = 1;
    o.init_timeout = 30;
    o.run_timeout = 20;
    COF_TRY(cof_world_create(&o, &l->world));
    l->team = cof_world_team(l->world);
    l->rank = cof_world_rank(l->world);
    l->n_ranks = cof_world_size(l->world);
    l->victim = l->victim ? 0 : l->n_ranks - 1;
    l->job.world = l->world;
    l->job.team = l->team;
    const struct cofi_check_device *device = cofi_check_device(l->world);
    if (device)
        COF_TRY(device->open(l->world));
    const bool by_turns = device && device->runtime->n_turns(l->world) > 1;
    l->n_good = by_turns ? GOOD_CALLS_BY_TURNS : GOOD_CALLS;
    COF_TRY(cofi_check_host_blocks_open(l->team, sizeof(int64_t), &l->stamps));
    COF_TRY(cofi_check_arena_open(&l->job, l->team, 40000 + MAX_BYTES * (size_t)l->n_ranks, 1, 0,
                                  &l->a));
    return cofi_runtime_op_open(l->team, l->a.arena, "mortal", COFI_RUNTIME_PUSH, MAX_BYTES,
                                &l->op);
}

int cofi_runtime_child(const char *words)
{
    unsigned long long arg;
    int attach, parent;
    struct life l = {.stamps.fd = -1};
    if (sscanf(words, "%llu:%d:%d", &arg, &attach, &parent) != 3)
        return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) /* it died before prctl */
        return 2;
    l.end = (int)(arg & 0xff);
    l.stops = arg & COFI_RUNTIME_STOPS;
    l.victim = arg & COFI_RUNTIME_RANK0 ? 1 : 0; /* until the number of ranks is known */
    l.job.attach = attach;
    cof_status status = join(&l);
    if (status != COF_OK)
        return complain("before the end", status);
    status = live(&l);
    int code = inspect(&l, status);
    if (code == 0)
        code = go_on(&l);
    if (code == 0)
        cof_world_destroy(l.world);
    cofi_check_blocks_close(&l.stamps);
    return code;
}
