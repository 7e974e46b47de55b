/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases about several worlds and teams, at once and one after the other. */
#include <string.h>

#include "ops/runtime/runtime_check.h"

enum { MAX_BYTES = 700 };

/* An arena with one plan, on some team. */
struct place {
    cof_world *world;
    struct cofi_check_arena a;
    struct cofi_runtime_op op;
};

static cof_status open_place(struct cofi_runtime *rt, cof_world *world, cof_team *team,
                             struct place *p)
{
    int n = cof_team_size(team);
    p->world = world;
    COF_TRY(cofi_runtime_arena(rt, team,
                               cofi_runtime_op_payload(n, COFI_RUNTIME_PUSH, MAX_BYTES) +
                                   cofi_arena_words_bytes(n, 2), 0, &p->a));
    return cofi_runtime_op_open(team, p->a.arena, "op", COFI_RUNTIME_PUSH, MAX_BYTES, &p->op);
}

static cof_status call_place(struct place *p, size_t bytes)
{
    struct cofi_runtime_call call = {.bytes = bytes};
    return cofi_runtime_op_call(p->world, &p->op, &call, COF_STREAM_NOW);
}

static void close_place(struct cofi_runtime *rt, struct place *p)
{
    cofi_runtime_op_inspect(rt, &p->op);
    cofi_runtime_op_close(&p->op);
    cofi_check_arena_close(&p->a);
}

/* Calls in two worlds in turn; the second one goes, the first one stays. */
cof_status cofi_runtime_worlds(struct cofi_runtime *rt)
{
    cof_world *other;
    struct place p[2];
    COF_TRY(cofi_runtime_world(rt, &other));
    COF_TRY(open_place(rt, rt->job->world, rt->job->team, &p[0]));
    COF_TRY(open_place(rt, other, cof_world_team(other), &p[1]));
    cof_status status = COF_OK;
    for (int i = 0; i < cofi_runtime_rounds(rt, 40) && status == COF_OK; i++)
        status = call_place(&p[i % 2], 1 + (size_t)i);
    if (status == COF_OK)
        status = cof_team_barrier(cof_world_team(other));
    close_place(rt, &p[1]);
    cof_world_destroy(other);
    if (status == COF_OK)
        status = cofi_runtime_settle(rt);
    for (int i = 0; i < 5 && status == COF_OK; i++)
        status = call_place(&p[0], 300);
    cofi_runtime_wants(rt, "the first world's team", cof_team_query(rt->job->team), COF_OK, NULL);
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    close_place(rt, &p[0]);
    return status;
}

/* All ranks backwards, and every second rank: rank numbers of the team are not the world's. */
cof_status cofi_runtime_teams(struct cofi_runtime *rt)
{
    int backwards[COFI_RUNTIME_MAX_RANKS], half[COFI_RUNTIME_MAX_RANKS], n_half = 0;
    for (int r = 0; r < rt->n_ranks; r++) {
        backwards[r] = rt->n_ranks - 1 - r;
        if (r % 2 == rt->rank % 2)
            half[n_half++] = r;
    }
    cof_team *team[2];
    struct place p[3];
    cof_world *world = rt->job->world;
    COF_TRY(cof_team_create(world, backwards, rt->n_ranks, 11, &team[0]));
    COF_TRY(cof_team_create(world, half, n_half, 12, &team[1]));
    COF_TRY(open_place(rt, world, rt->job->team, &p[0]));
    COF_TRY(open_place(rt, world, team[0], &p[1]));
    COF_TRY(open_place(rt, world, team[1], &p[2]));
    const cof_arena *all = p[1].a.arena, *some = p[2].a.arena;
    COFI_EXPECT(rt, all->rank == rt->n_ranks - 1 - rt->rank && some->n_ranks == n_half,
                "rank %d of the team, %d of the other's ranks", all->rank, some->n_ranks);
    cof_status status = COF_OK;
    for (int i = 0; i < cofi_runtime_rounds(rt, 60) && status == COF_OK; i++)
        status = call_place(&p[i % 3], 1 + (size_t)i);
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    for (int i = 0; i < 3; i++)
        close_place(rt, &p[i]);
    cof_team_destroy(team[0]);
    cof_team_destroy(team[1]);
    return status;
}

/* Made, used and destroyed again and again, with nothing left behind. */
cof_status cofi_runtime_reinit(struct cofi_runtime *rt)
{
    enum { N_FIRST = 5 };
    struct cofi_runtime_use before = {0};
    int n = cofi_runtime_rounds(rt, 20);
    for (int i = 0; i < n || i < N_FIRST + 3; i++) {
        cof_world *world;
        struct place p;
        COF_TRY(cofi_runtime_world(rt, &world));
        COF_TRY(open_place(rt, world, cof_world_team(world), &p));
        cof_status status = call_place(&p, 10 + (size_t)i);
        if (status == COF_OK)
            status = cof_team_barrier(cof_world_team(world));
        close_place(rt, &p);
        cof_world_destroy(world);
        COF_TRY(status);
        COF_TRY(cof_team_barrier(rt->job->team));
        if (i == N_FIRST - 1)
            before = cofi_runtime_use(rt->job->world);
    }
    struct cofi_runtime_use after = cofi_runtime_use(rt->job->world);
    COFI_EXPECT(rt, after.n_fds <= before.n_fds + 8 && after.n_maps <= before.n_maps + 60,
                "%ld descriptors and %ld mappings after %d worlds, %ld and %ld after all",
                before.n_fds, before.n_maps, N_FIRST, after.n_fds, after.n_maps);
    return cof_team_barrier(rt->job->team);
}
