/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The ranks of one job of `cofuse bench`: processes, or threads of one fresh process. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_harness.h"
#include "core/clock.h"
#include "core/config.h"
#include "core/error.h"
#include "job.h"
#include "ranks.h"
#include "symm/symm.h"

enum { MIN_CALLS = 3, N_LATER = 3 };
static const int64_t min_margin_ns = 200000, max_margin_ns = 20000000;

/* What ranks tell each other before a timed call. */
struct arrival {
    int64_t now;
    int64_t exchange_ns; /* from the last arrival to the end of the exchange, the last time */
};

struct rank {
    struct cofi_bench_job *job;
    const struct cofi_op_bench *op;
    struct cofi_job place;
    void *bench;
    cof_plan *plan;
    int64_t exchange_ns;
    struct arrival arrivals[COFI_MAX_RANKS];
};

/* The same time on all ranks, a little after the last one has arrived and all know of it. */
static cof_status agree_start(struct rank *r, int64_t *start_out)
{
    struct arrival own = {cofi_now(), r->exchange_ns};
    COF_TRY(cof_team_allgather(r->place.team, &own, r->arrivals, sizeof own));
    int64_t last = 0, margin = min_margin_ns;
    for (int i = 0; i < r->place.n_ranks; i++) {
        const struct arrival *a = &r->arrivals[i];
        last = a->now > last ? a->now : last;
        margin = 2 * a->exchange_ns > margin ? 2 * a->exchange_ns : margin;
    }
    r->exchange_ns = cofi_now() - last;
    *start_out = last + (margin < max_margin_ns ? margin : max_margin_ns);
    return COF_OK;
}

static void wait_until(int64_t time)
{
    while (cofi_now() < time)
        sched_yield(); /* ranks that share a core with this one have to get there too */
}

static cof_status make_plan(struct rank *r, double *seconds)
{
    int64_t start;
    cof_plan_destroy(r->plan);
    r->plan = NULL;
    COF_TRY(agree_start(r, &start));
    wait_until(start);
    COF_TRY(r->op->make_plan(r->bench, &r->plan));
    *seconds = (double)(cofi_now() - start) * 1e-9;
    return COF_OK;
}

/* The first plan of this process, which loads what is loaded once; and the best of later ones. */
static cof_status make_plans(struct rank *r)
{
    double *later = &r->job->plan_later[r->place.rank], seconds = 0;
    if (!r->op->make_plan)
        return COF_OK;
    COF_TRY(make_plan(r, &r->job->plan_first[r->place.rank]));
    for (int i = 0; i < N_LATER; i++) {
        COF_TRY(make_plan(r, &seconds));
        *later = i == 0 || seconds < *later ? seconds : *later;
    }
    if (r->place.rank == 0)
        snprintf(r->job->describe, sizeof r->job->describe, "%s", cof_plan_describe(r->plan));
    return COF_OK;
}

static cof_status measure_rate(struct rank *r, int window)
{
    return r->op->rate ? r->op->rate(r->bench, r->job->rate_seconds,
                                     &r->job->rate[window][r->place.rank])
                       : COF_OK;
}

/* One call, begun at `start`. */
static cof_status time_call(struct rank *r, int direction, int set, int64_t start, double *seconds)
{
    if (r->op->time)
        return r->op->time(r->bench, direction, set, seconds);
    COF_TRY(r->op->run(r->bench, r->plan, direction, set, COF_STREAM_NOW));
    *seconds = (double)(cofi_now() - start) * 1e-9;
    return COF_OK;
}

/* Every set once at least, so that its pages are there and later directions find what they need. */
static cof_status warm_up(struct rank *r, int direction)
{
    int n = r->job->warmup > r->job->n_sets ? r->job->warmup : r->job->n_sets;
    double seconds;
    for (int i = 0; i < n; i++)
        COF_TRY(time_call(r, direction, i % r->job->n_sets, 0, &seconds));
    return COF_OK;
}

/* A call lasts from the common start to this rank's end. All ranks see the same starts, and so stop
 * at the same call. */
static cof_status time_direction(struct rank *r, int direction)
{
    struct cofi_bench_job *job = r->job;
    int64_t first = 0, start, limit = (int64_t)(job->seconds * 1e9);
    int n = 0;
    COF_TRY(warm_up(r, direction));
    for (; n < job->repeat; n++) {
        COF_TRY(agree_start(r, &start));
        first = n == 0 ? start : first;
        if (limit > 0 && n >= MIN_CALLS && start - first >= limit)
            break;
        wait_until(start);
        COF_TRY(time_call(r, direction, n % job->n_sets, start,
                          &cofi_bench_times(job, direction, n)[r->place.rank]));
    }
    if (r->place.rank == 0)
        job->n_calls[direction] = n;
    return COF_OK;
}

static cof_status measure(struct rank *r, const cof_world_options *options)
{
    COF_TRY(cof_world_create(options, &r->place.world));
    cof_world *world = r->place.world;
    r->place.team = cof_world_team(world);
    r->place.rank = cof_world_rank(world);
    r->place.n_ranks = cof_world_size(world);
    if (r->place.rank == 0) {
        r->job->threads = world->n_threads;
        r->job->pinned = world->own_cores && !r->job->unpinned;
    }
    cofi_device_of_world(world, r->job->device[r->place.rank]);
    COF_TRY(r->op->create(&r->place, r->job->line, r->job->n_sets, &r->bench));
    COF_TRY(make_plans(r));
    COF_TRY(measure_rate(r, 0));
    for (int d = 0; d < r->job->n_directions; d++) {
        COF_TRY(time_direction(r, d));
        COF_TRY(measure_rate(r, d + 1));
    }
    return cof_team_barrier(r->place.team); /* nobody leaves while another measures */
}

static int fail(const struct rank *r, cof_status status)
{
    char text[COFI_BENCH_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d: %s: %s", r->place.rank, cof_status_name(status),
             cof_last_error());
    cofi_cli_error("%s\n  in %s", text, r->job->line);
    if (!atomic_flag_test_and_set(&r->job->has_failed))
        memcpy(r->job->failure, text, sizeof text);
    return status == COF_ERR_UNSUPPORTED ? COFI_EXIT_UNSUPPORTED
           : status == COF_ERR_INVALID   ? COFI_EXIT_USAGE
                                         : COFI_EXIT_RANK;
}

static const struct cofi_op_bench *find_bench(const char *name)
{
    for (int i = 0; cofi_ops[i]; i++)
        if (!strcmp(cofi_ops[i]->name, name))
            return cofi_ops[i]->bench;
    return NULL;
}

/* `rank` is that of a thread; a process has it from its environment. */
static int run_rank(void *arg, const cof_world_options *options, int rank)
{
    struct cofi_bench_job *job = arg;
    struct rank *r = calloc(1, sizeof *r);
    if (!r) {
        cofi_cli_error("out of memory");
        return COFI_EXIT_RANK;
    }
    *r = (struct rank){.job = job, .op = find_bench(job->op), .place.rank = rank};
    cof_status status = r->op ? measure(r, options)
                              : COF_FAIL(COF_ERR_INTERNAL, "no operator \"%s\"", job->op);
    int code = status == COF_OK ? COFI_EXIT_OK : fail(r, status);
    if (code == COFI_EXIT_OK && r->place.rank == 0)
        job->finished = true;
    cof_plan_destroy(r->plan);
    if (r->bench)
        r->op->destroy(r->bench);
    cof_world_destroy(r->place.world);
    free(r);
    return code;
}

int cofi_bench_rank_main(void)
{
    size_t bytes;
    struct cofi_bench_job *job = cofi_job_shared(&bytes);
    if (!job || bytes < sizeof *job || job->magic != COFI_BENCH_MAGIC) {
        cofi_cli_error("COFUSE_SHARED_FD is set, but is no memory of a parent `cofuse bench`");
        return COFI_EXIT_RANK;
    }
    struct cofi_ranks_spec spec = {.n_ranks = job->n_ranks, .options = COF_WORLD_OPTIONS_INIT,
                                   .body = run_rank, .arg = job};
    spec.options.engine = job->cuda ? COF_ENGINE_CUDA : job->engine;
    spec.options.n_threads = job->n_threads;
    cofi_ranks_timeouts(&spec.options, job->timeout);
    return job->engine == COF_ENGINE_THREAD
               ? cofi_ranks_run_threads(&spec)
               : run_rank(job, &spec.options, (int)cofi_config_int(COFI_VAR_RANK));
}
