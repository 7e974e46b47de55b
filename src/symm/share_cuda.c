/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Every rank's block of device memory, mapped on every rank. A descriptor goes from one rank to all
 * others at a time, over a team that begins with it, and is closed as soon as it is mapped: never
 * more than two are open, however many ranks there are. */
#include <stdlib.h>
#include <unistd.h>

#include "core/hash.h"
#include "symm/engine_cuda.h"

static void destroy_turns(cof_team **turns, int n)
{
    for (int i = 0; turns && i < n; i++)
        cof_team_destroy(turns[i]);
    free(turns);
}

/* turns[i]: the team's ranks, from rank i on. Local. */
static cof_status make_turns(cof_team *t, cof_team ***turns_out)
{
    int n = t->n_ranks, *ranks = malloc((size_t)n * sizeof *ranks);
    cof_team **turns = *turns_out = calloc((size_t)n, sizeof *turns);
    cof_status status = ranks && turns ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
    uint64_t tag = cofi_hash_u64(cofi_hash_u64(COFI_HASH_SEED, t->id), t->n_calls);
    for (int i = 0; i < n && status == COF_OK; i++) {
        for (int j = 0; j < n; j++)
            ranks[j] = t->world_rank[(i + j) % n];
        status = cofi_team_make(t->world, ranks, n, tag, &turns[i]);
    }
    free(ranks);
    return status;
}

struct share {
    cof_team *team;
    const struct cofi_cuda_block *own;
    int own_fd;
    cof_team **turns; /* of vmm */
    struct cofi_cuda_handle *handles;
    struct cofi_cuda_block *blocks;
};

static cof_status prepare(struct share *s)
{
    cof_team *t = s->team;
    struct cofi_cuda_handle own;
    s->handles = calloc((size_t)t->n_ranks, sizeof *s->handles);
    COF_FAIL_IF(!s->handles, COF_ERR_NOMEM, "arena: no memory");
    if (s->own->is_vmm)
        COF_TRY(make_turns(t, &s->turns));
    COF_TRY(cofi_cuda_block_export(s->own, t->world->device->device, &own, &s->own_fd));
    s->handles[t->rank] = own;
    return COF_OK;
}

static cof_status import(struct share *s, int rank, int fd)
{
    if (rank == s->team->rank)
        return COF_OK;
    return cofi_cuda_block_import(s->team->world->device->device, s->own->is_vmm,
                                  &s->handles[rank], fd, &s->blocks[rank]);
}

/* The agreement tells all of a descriptor that did not come, or could not be mapped. */
static cof_status take_turn(struct share *s, int rank)
{
    cof_team *turn = s->turns[rank];
    int fd = -1;
    COF_TRY(cofi_team_bcast_fd(turn, rank == s->team->rank ? s->own_fd : -1, &fd));
    cof_status status = COF_OK;
    if (fd < 0)
        status = COF_FAIL(COF_ERR_SYSTEM, "arena: no descriptor left for memory (ulimit -n)");
    else
        status = import(s, rank, fd);
    if (fd >= 0 && rank != s->team->rank)
        close(fd);
    return cofi_team_agree(turn, "device memory", status);
}

/* Every turn ends with an agreement. */
static cof_status take_turns(struct share *s)
{
    for (int r = 0; r < s->team->n_ranks; r++)
        COF_TRY(take_turn(s, r));
    return COF_OK;
}

static cof_status open_handles(struct share *s)
{
    cof_status status = COF_OK;
    for (int r = 0; r < s->team->n_ranks && status == COF_OK; r++)
        status = import(s, r, -1);
    return cofi_team_agree(s->team, "device memory", status);
}

cof_status cofi_cuda_map_blocks(cof_team *t, const struct cofi_cuda_block *own,
                                struct cofi_cuda_block *blocks)
{
    struct share s = {.team = t, .own = own, .own_fd = -1, .blocks = blocks};
    cof_status status = prepare(&s);
    status = cofi_team_agree(t, "device memory", status);
    if (status == COF_OK) {
        struct cofi_cuda_handle handle = s.handles[t->rank];
        status = cofi_team_exchange(t, "device memory", &handle, s.handles, sizeof handle);
    }
    if (status == COF_OK)
        status = own->is_vmm ? take_turns(&s) : open_handles(&s);
    for (int r = 0; r < t->n_ranks && status != COF_OK; r++)
        cofi_cuda_block_close(&blocks[r]);
    if (s.own_fd >= 0)
        close(s.own_fd);
    destroy_turns(s.turns, t->n_ranks);
    free(s.handles);
    return status;
}
