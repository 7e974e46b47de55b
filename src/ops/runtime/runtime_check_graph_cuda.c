/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Captured calls: a graph is replayed again and again among eager calls of the same, with ranks
 * that are late, and each replay is compared on the device. */
#include <string.h>

#include "core/clock.h"
#include "ops/runtime/runtime_check_cuda.h"
#include "symm/engine_cuda.h"

/* Work that may be enqueued eagerly or as a graph; the ranks need not do the same. */
struct captured {
    struct cofi_runtime *rt;
    cof_world *world;
    cof_stream stream;
    struct cofi_check_work work;
    void *graph;
};

/* ---- capture and replay --------------------------------------------------------------------- */

/* Collective: no rank waits on the device while another one still makes its graph. */
static cof_status capture(struct captured *c)
{
    COF_TRY(cofi_check_cuda_capture(c->world, &c->work, c->stream, &c->graph));
    return cof_team_barrier(cof_world_team(c->world));
}

static cof_status replay(struct captured *c)
{
    return cofi_check_cuda_replay(c->world, c->graph, c->stream);
}

static void release(struct captured *c)
{
    cofi_check_cuda_release(c->world, c->graph);
    c->graph = NULL;
}

/* n times, of which every fifth is eager, another one on each rank. */
static cof_status mix(struct captured *c, int n)
{
    for (int i = 0; i < n; i++) {
        if (cofi_runtime_random(c->rt, 16) == 0)
            cofi_runtime_sleep_us(cofi_runtime_random(c->rt, 1000));
        COF_TRY(i % 5 == c->rt->rank % 5 ? c->work.fn(c->work.arg, c->stream) : replay(c));
        if (i % 6 == 5)
            COF_TRY(cof_stream_sync(c->stream));
    }
    return cof_stream_sync(c->stream);
}

/* ---- put, get, signal, wait ----------------------------------------------------------------- */

static cof_status mail_work(void *arg, cof_stream stream)
{
    return cofi_mail_round(arg, stream);
}

static struct captured captured_mail(struct cofi_mail *m)
{
    return (struct captured){.rt = m->rt, .world = m->world, .stream = m->stream,
                             .work = {mail_work, m}};
}

static cof_status mix_mail(struct cofi_mail *m, struct captured *c)
{
    int n = cofi_runtime_rounds(m->rt, 1250); /* 1000 replays, but where ranks take turns */
    COF_TRY(capture(c));
    COF_TRY(mix(c, n));
    m->n_rounds += (uint64_t)n;
    COF_TRY(cofi_mail_inspect(m));
    return cof_team_barrier(cof_world_team(m->world));
}

cof_status cofi_runtime_cuda_graph(struct cofi_runtime *rt)
{
    struct cofi_mail m;
    cof_status status = cofi_mail_open(rt, rt->job->world, 3001, &m);
    struct captured c = captured_mail(&m);
    if (status == COF_OK)
        status = mix_mail(&m, &c);
    release(&c);
    cofi_mail_close(&m);
    return status;
}

/* ---- calls of plans ------------------------------------------------------------------------- */

enum { MAX_BYTES = 2000 };

struct pair {
    cof_world *world;
    struct cofi_check_arena a;
    struct cofi_runtime_op op[2];
};

/* A call of each: they share the arena, so each waits for the end of the other's. */
static cof_status pair_work(void *arg, cof_stream stream)
{
    struct pair *p = arg;
    const struct cofi_runtime_call call = {.bytes = MAX_BYTES - 7, .direction = 1};
    COF_TRY(cofi_runtime_op_call(p->world, &p->op[0], &call, stream));
    return cofi_runtime_op_call(p->world, &p->op[1], &call, stream);
}

static cof_status open_pair(struct cofi_runtime *rt, struct pair *p)
{
    cof_team *team = rt->job->team;
    size_t bytes = cofi_runtime_op_payload(rt->n_ranks, COFI_RUNTIME_PUSH, MAX_BYTES) +
                   2 * cofi_arena_words_bytes(rt->n_ranks, COFI_RUNTIME_PURPOSES);
    p->world = rt->job->world;
    /* The epoch comes round in the midst of it. */
    COF_TRY(cofi_runtime_arena(rt, team, bytes, (UINT32_C(1) << 30) - 100, &p->a));
    COF_TRY(cofi_runtime_op_open(team, p->a.arena, "pulled", COFI_RUNTIME_PULL, MAX_BYTES,
                                 &p->op[0]));
    return cofi_runtime_op_open(team, p->a.arena, "pushed", COFI_RUNTIME_PUSH, MAX_BYTES,
                                &p->op[1]);
}

static cof_status mix_pair(struct cofi_runtime *rt, struct captured *c)
{
    COF_TRY(capture(c));
    COF_TRY(mix(c, cofi_runtime_rounds(rt, 400)));
    COF_TRY(cof_team_query(rt->job->team));
    return cof_team_barrier(rt->job->team);
}

cof_status cofi_runtime_cuda_graph_calls(struct cofi_runtime *rt)
{
    struct pair p;
    struct captured c = {.rt = rt, .world = rt->job->world, .work = {pair_work, &p}};
    COF_TRY(open_pair(rt, &p));
    cof_status status = cof_stream_create(rt->job->world, 1, &c.stream);
    if (status == COF_OK)
        status = mix_pair(rt, &c);
    release(&c);
    for (int i = 0; i < 2; i++) {
        cofi_runtime_op_inspect(rt, &p.op[i]);
        cofi_runtime_op_close(&p.op[i]);
    }
    cof_stream_destroy(c.stream);
    cofi_check_arena_close(&p.a);
    return status;
}

/* ---- a replay with one rank away ------------------------------------------------------------ */

#define DEADLINE 1.0 /* seconds; baked into the graph */

static cof_status await_poison(cof_team *team)
{
    cof_status status = COF_OK;
    for (int64_t end = cofi_now() + 30 * INT64_C(1000000000); status == COF_OK && cofi_now() < end;)
    {
        cofi_runtime_sleep_us(2000);
        status = cof_team_query(team);
    }
    return status;
}

static void expect_timeout(struct cofi_runtime *rt, struct captured *c)
{
    cof_team *team = cof_world_team(c->world);
    bool away = rt->rank == rt->n_ranks - 1;
    int64_t begin = cofi_now();
    if (!away) {
        cofi_runtime_wants(rt, "a replay", replay(c), COF_OK, NULL);
        cofi_runtime_wants(rt, "the stream", cof_stream_sync(c->stream), COF_OK, NULL);
    }
    cofi_runtime_wants(rt, "a rank stays away from a replay",
                       away ? await_poison(team) : cof_team_query(team), COF_ERR_TIMEOUT,
                       "deadline passed");
    double seconds = (double)(cofi_now() - begin) * 1e-9;
    COFI_EXPECT(rt, seconds < DEADLINE + 4, "the error came after %.1f s", seconds);
    begin = cofi_now();
    cofi_runtime_wants(rt, "a later replay", replay(c), COF_OK, NULL); /* does nothing */
    cofi_runtime_wants(rt, "the stream after it", cof_stream_sync(c->stream), COF_OK, NULL);
    seconds = (double)(cofi_now() - begin) * 1e-9;
    COFI_EXPECT(rt, seconds < DEADLINE, "a replay on a dead arena took %.1f s", seconds);
}

static cof_status good_rounds(struct cofi_mail *m, int n)
{
    for (int i = 0; i < n; i++) {
        m->n_rounds++;
        COF_TRY(cofi_mail_round(m, m->stream));
    }
    COF_TRY(cofi_mail_inspect(m));
    return cof_team_barrier(cof_world_team(m->world));
}

static cof_status poison_graph(struct cofi_mail *m, struct captured *c)
{
    COF_TRY(good_rounds(m, 3));
    m->a.arena->run_timeout = DEADLINE;
    COF_TRY(capture(c));
    m->n_rounds += 2;
    COF_TRY(replay(c));
    COF_TRY(replay(c));
    COF_TRY(cofi_mail_inspect(m));
    COF_TRY(cof_team_barrier(cof_world_team(m->world)));
    expect_timeout(m->rt, c);
    return cof_team_barrier(cof_world_team(m->world));
}

static cof_status poison_and_go_on(struct cofi_runtime *rt, cof_world *world)
{
    struct cofi_mail m;
    cof_status status = cofi_mail_open(rt, world, 777, &m);
    struct captured c = captured_mail(&m);
    if (status == COF_OK)
        status = poison_graph(&m, &c);
    release(&c);
    cofi_mail_close(&m);
    COF_TRY(status);
    COF_TRY(cofi_mail_open(rt, world, 778, &m));
    status = good_rounds(&m, 3);
    cofi_mail_close(&m);
    return status;
}

cof_status cofi_runtime_cuda_graph_poison(struct cofi_runtime *rt)
{
    cof_world *world;
    COF_TRY(cofi_runtime_world(rt, &world));
    cof_status status = poison_and_go_on(rt, world);
    cof_world_destroy(world);
    cofi_runtime_wants(rt, "the job's own team", cof_team_query(rt->job->team), COF_OK, NULL);
    return status;
}
