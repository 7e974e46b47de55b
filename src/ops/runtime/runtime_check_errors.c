/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases about ranks that disagree or stay away: an error with its reason on every rank, and after
 * it a world that works. */
#include <stdio.h>
#include <string.h>

#include "core/clock.h"
#include "ops/runtime/runtime_check.h"

enum { MAX_BYTES = 512 };

struct pair {
    struct cofi_check_arena a;
    struct cofi_runtime_op op[2];
};

static cof_status open_pair(struct cofi_runtime *rt, cof_team *team, struct pair *p)
{
    size_t bytes = cofi_runtime_op_payload(rt->n_ranks, COFI_RUNTIME_PUSH, MAX_BYTES) +
                   2 * cofi_arena_words_bytes(rt->n_ranks, 2);
    COF_TRY(cofi_runtime_arena(rt, team, bytes, 0, &p->a));
    COF_TRY(cofi_runtime_op_open(team, p->a.arena, "first", COFI_RUNTIME_PULL, MAX_BYTES,
                                 &p->op[0]));
    return cofi_runtime_op_open(team, p->a.arena, "second", COFI_RUNTIME_PUSH, MAX_BYTES,
                                &p->op[1]);
}

static void close_pair(struct pair *p)
{
    cofi_runtime_op_close(&p->op[0]);
    cofi_runtime_op_close(&p->op[1]);
    cofi_check_arena_close(&p->a);
}

static cof_status call(cof_world *world, struct cofi_runtime_op *op, size_t bytes,
                       uint32_t direction)
{
    struct cofi_runtime_call c = {.bytes = bytes, .direction = direction};
    return cofi_runtime_op_call(world, op, &c, COF_STREAM_NOW);
}

static cof_status good_calls(struct cofi_runtime *rt, cof_world *world, struct pair *p)
{
    for (int i = 0; i < 4; i++)
        COF_TRY(call(world, &p->op[i % 2], 100 + (size_t)i, 1));
    cofi_runtime_op_inspect(rt, &p->op[0]);
    cofi_runtime_op_inspect(rt, &p->op[1]);
    return COF_OK;
}

/* Every call on the arena returns its error; a get fills its 37 bytes of `x`. */
static void expect_refused(struct cofi_runtime *rt, cof_world *world, struct pair *p,
                           cof_status failed, unsigned char *x)
{
    unsigned char all[40];
    memset(all, 0xff, sizeof all);
    cofi_runtime_wants(rt, "a later call", call(world, &p->op[0], 8, 1), failed, NULL);
    cofi_runtime_wants(rt, "a later call of another plan", call(world, &p->op[1], 8, 1), failed,
                       NULL);
    cofi_runtime_wants(rt, "a later cof_put", cof_put(p->a.arena, 0, 0, x, 8, COF_STREAM_NOW),
                       failed, NULL);
    cofi_runtime_wants(rt, "a later cof_signal", cof_signal(p->a.arena, 0, 0, COF_STREAM_NOW),
                       failed, NULL);
    cofi_runtime_wants(rt, "a later cof_wait", cof_wait(p->a.arena, 0, 0, COF_STREAM_NOW), failed,
                       NULL);
    cofi_runtime_wants(rt, "a later cof_get", cof_get(p->a.arena, x, 0, 0, 37, COF_STREAM_NOW),
                       failed, NULL);
    COFI_EXPECT(rt, !memcmp(x, all, 37) && x[37] == 0,
                "a failed cof_get of 37 bytes left %#x .. %#x, %#x", x[0], x[36], x[37]);
}

/* After a failure `failed`: the arena stays refused, and the world works without it. */
static cof_status look_after(struct cofi_runtime *rt, cof_world *world, struct pair *p,
                             cof_status failed)
{
    cof_team *team = cof_world_team(world);
    unsigned char *x = cofi_runtime_alloc(world, 40);
    COF_FAIL_IF(!x, COF_ERR_NOMEM, "check: no memory");
    expect_refused(rt, world, p, failed, x);
    cofi_runtime_free(world, x);
    cofi_runtime_wants(rt, "cof_team_query", cof_team_query(team), failed, NULL);
    COF_TRY(cof_team_barrier(team));
    close_pair(p);
    cofi_runtime_wants(rt, "cof_team_query without the arena", cof_team_query(team), COF_OK, NULL);
    COF_TRY(open_pair(rt, team, p));
    COF_TRY(good_calls(rt, world, p));
    cofi_runtime_wants(rt, "cof_team_query with a new arena", cof_team_query(team), COF_OK, NULL);
    COF_TRY(cof_team_barrier(team));
    close_pair(p);
    return COF_OK;
}

/* ---- disagreement --------------------------------------------------------------------------- */

/* What the last rank does otherwise. */
static cof_status disagree(struct cofi_runtime *rt, struct pair *p)
{
    bool odd = rt->rank == rt->n_ranks - 1;
    cof_world *world = rt->job->world;
    switch (rt->arg) {
    case COFI_RUNTIME_SIZES: return call(world, &p->op[0], odd ? 222 : 111, 1);
    case COFI_RUNTIME_DIRECTION: return call(world, &p->op[0], 111, odd ? 2 : 1);
    case COFI_RUNTIME_ORDER: return call(world, &p->op[odd], 111, 1);
    default: p->op[0].n_empty += odd; return call(world, &p->op[0], 111, 1);
    }
}

/* Both parties are in every rank's text, whoever found it: its own rank's or the other's. */
static void expect_parties(struct cofi_runtime *rt, const char *a, const char *b)
{
    const char *text = cof_last_error();
    COFI_EXPECT(rt, strstr(text, a) && strstr(text, b),
                "wanted \"%s\" and \"%s\" in the text \"%.280s\"", a, b, text);
}

cof_status cofi_runtime_digest(struct cofi_runtime *rt)
{
    struct pair p;
    COF_TRY(open_pair(rt, rt->job->team, &p));
    COF_TRY(good_calls(rt, rt->job->world, &p));
    int64_t begin = cofi_now();
    cof_status status = disagree(rt, &p);
    cofi_runtime_wants(rt, "ranks disagree", status, COF_ERR_MISMATCH, "ranks disagree");
    double seconds = (double)(cofi_now() - begin) * 1e-9;
    COFI_EXPECT(rt, seconds < p.a.arena->run_timeout / 2 || p.a.arena->run_timeout <= 0,
                "the error came after %.1f s", seconds);
    if (rt->arg == COFI_RUNTIME_SIZES)
        expect_parties(rt, "sizes 111 ", "sizes 222 ");
    if (rt->arg == COFI_RUNTIME_DIRECTION)
        expect_parties(rt, "first forward", "first backward");
    if (rt->arg == COFI_RUNTIME_ORDER)
        expect_parties(rt, "first", "second");
    return look_after(rt, rt->job->world, &p, COF_ERR_MISMATCH);
}

/* An empty call on every rank changes nothing. */
cof_status cofi_runtime_empty(struct cofi_runtime *rt)
{
    struct pair p;
    COF_TRY(open_pair(rt, rt->job->team, &p));
    cof_status status = good_calls(rt, rt->job->world, &p);
    for (uint32_t i = 0; i < 3 && status == COF_OK; i++) {
        p.op[0].n_empty += 1 + i;
        status = call(rt->job->world, &p.op[0], 64, 1);
        uint32_t epoch = cofi_runtime_epoch(p.a.arena);
        COFI_EXPECT(rt, epoch == 5 + i, "epoch %u after empty calls", epoch);
    }
    cofi_runtime_op_inspect(rt, &p.op[0]);
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    close_pair(&p);
    return status;
}

/* ---- ranks that stay away ------------------------------------------------------------------- */

/* The deadline is short only where it is to pass: no busy machine ends what shall succeed. */
static cof_status shorten(struct cofi_runtime *rt, struct pair *p)
{
    COF_TRY(cof_team_barrier(p->a.arena->team));
    p->a.arena->run_timeout = 0.5;
    return cof_team_barrier(rt->job->team);
}

/* Until the poison of the others is here. */
static cof_status stay_away(cof_team *team)
{
    cof_status status = COF_OK;
    for (int64_t end = cofi_now() + 30 * INT64_C(1000000000); status == COF_OK && cofi_now() < end;)
    {
        cofi_runtime_sleep_us(2000);
        status = cof_team_query(team);
    }
    return status;
}

static cof_status poison_in(struct cofi_runtime *rt, cof_world *world)
{
    struct pair p;
    cof_team *team = cof_world_team(world);
    int away = rt->arg ? 0 : rt->n_ranks - 1;
    char part[80];
    COF_TRY(open_pair(rt, team, &p));
    COF_TRY(good_calls(rt, world, &p));
    COF_TRY(shorten(rt, &p));
    cof_status status = rt->rank == away ? stay_away(team) : call(world, &p.op[0], 9, 1);
    snprintf(part, sizeof part, "waited for rank %d at \"message written\": deadline passed", away);
    cofi_runtime_wants(rt, "a rank stays away", status, COF_ERR_TIMEOUT, part);
    expect_parties(rt, "first forward: rank ", "wanted epoch 5 digest ");
    expect_parties(rt, ", saw epoch 3 digest ", "its call 4 (second forward");
    return look_after(rt, world, &p, COF_ERR_TIMEOUT);
}

cof_status cofi_runtime_poison(struct cofi_runtime *rt)
{
    cof_world *world;
    COF_TRY(cofi_runtime_world(rt, &world));
    cof_status status = poison_in(rt, world);
    if (status == COF_OK)
        status = cof_team_barrier(cof_world_team(world));
    cof_world_destroy(world);
    cofi_runtime_wants(rt, "the job's own team", cof_team_query(rt->job->team), COF_OK, NULL);
    return status;
}

/* The same with a signal that does not come: the last rank waits for rank 0's third. */
static cof_status no_signal_in(struct cofi_runtime *rt, cof_world *world)
{
    struct pair p;
    cof_team *team = cof_world_team(world);
    cof_status status = COF_OK;
    COF_TRY(open_pair(rt, team, &p));
    COF_TRY(shorten(rt, &p));
    if (rt->rank == 0) {
        COF_TRY(cof_signal(p.a.arena, rt->n_ranks - 1, 1, COF_STREAM_NOW));
        COF_TRY(cof_signal(p.a.arena, rt->n_ranks - 1, 1, COF_STREAM_NOW));
    }
    if (rt->rank == rt->n_ranks - 1)
        for (int i = 0; i < 3 && status == COF_OK; i++)
            status = cof_wait(p.a.arena, 0, 1, COF_STREAM_NOW);
    else
        status = stay_away(team);
    cofi_runtime_wants(rt, "a signal does not come", status, COF_ERR_TIMEOUT,
                       "cof_wait: rank ");
    expect_parties(rt, "waited for rank 0: deadline passed", "wanted signal 3, saw 2");
    return look_after(rt, world, &p, COF_ERR_TIMEOUT);
}

cof_status cofi_runtime_no_signal(struct cofi_runtime *rt)
{
    cof_world *world;
    COF_TRY(cofi_runtime_world(rt, &world));
    cof_status status = no_signal_in(rt, world);
    if (status == COF_OK)
        status = cof_team_barrier(cof_world_team(world));
    cof_world_destroy(world);
    return status;
}
