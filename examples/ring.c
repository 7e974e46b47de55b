/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Every rank tells its number to all: started plainly it is a world of one, by `cofuse launch`,
 * torchrun, mpirun or srun it is that launcher's ranks. */
#include <cofuse/cofuse.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(void)
{
    fprintf(stderr, "ring: %s\n", cof_last_error());
    return 1;
}

int main(void)
{
    cof_world *world;
    if (cof_world_create(NULL, &world) != COF_OK)
        return fail();
    cof_team *team = cof_world_team(world);
    int rank = cof_team_rank(team), n_ranks = cof_team_size(team);

    int *ranks = malloc((size_t)n_ranks * sizeof *ranks), sum = 0;
    if (!ranks)
        return 1;
    if (cof_team_allgather(team, &rank, ranks, sizeof rank) != COF_OK)
        return fail();
    for (int r = 0; r < n_ranks; r++)
        sum += ranks[r];
    free(ranks);
    printf("rank %d of %d: engine %s, sum %d\n", rank, n_ranks, cof_world_engine(world), sum);
    if (sum != n_ranks * (n_ranks - 1) / 2)
        return fprintf(stderr, "ring: sum %d is wrong\n", sum), 1;

    /* A rank that leaves while others still wait for it looks like one that died. */
    if (cof_team_barrier(team) != COF_OK)
        return fail();
    cof_world_destroy(world);
    return 0;
}
