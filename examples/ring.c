/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Every rank's number travels round a ring by put, signal and wait: started plainly it is a world
 * of one, by `cofuse launch`, torchrun, mpirun or srun it is that launcher's ranks. */
#include <cofuse/cofuse.h>
#include <stdio.h>
#include <stdlib.h>

static cof_arena *arena;

static void check(cof_status status)
{
    if (status == COF_OK)
        return;
    fprintf(stderr, "ring: %s: %s\n", cof_status_name(status), cof_last_error());
    exit(1);
}

/* In step i a rank hands on what it got in the step before: the number of rank - i. */
static void go_round(int rank, int n_ranks)
{
    int next = (rank + 1) % n_ranks, previous = (rank + n_ranks - 1) % n_ranks, number = rank;
    check(cof_put(arena, rank, (size_t)rank * sizeof number, &number, sizeof number,
                  COF_STREAM_NOW));
    for (int i = 0; i < n_ranks - 1; i++) {
        size_t at = (size_t)((rank - i + n_ranks) % n_ranks) * sizeof number;
        check(cof_get(arena, &number, rank, at, sizeof number, COF_STREAM_NOW));
        check(cof_put(arena, next, at, &number, sizeof number, COF_STREAM_NOW));
        check(cof_signal(arena, next, 0, COF_STREAM_NOW));
        check(cof_wait(arena, previous, 0, COF_STREAM_NOW));
    }
}

int main(void)
{
    cof_world *world;
    check(cof_world_create(NULL, &world));
    cof_team *team = cof_world_team(world);
    int rank = cof_team_rank(team), n_ranks = cof_team_size(team), sum = 0, number;

    check(cof_arena_create(team, (size_t)n_ranks * sizeof(int), 1, &arena));
    go_round(rank, n_ranks);
    for (int r = 0; r < n_ranks; r++) {
        check(cof_get(arena, &number, rank, (size_t)r * sizeof number, sizeof number,
                      COF_STREAM_NOW));
        sum += number;
    }
    printf("rank %d of %d: engine %s, sum %d\n", rank, n_ranks, cof_world_engine(world), sum);

    /* A rank that leaves while others still wait for it looks like one that died. */
    check(cof_team_barrier(team));
    cof_arena_destroy(arena);
    cof_world_destroy(world);
    return sum != n_ranks * (n_ranks - 1) / 2;
}
