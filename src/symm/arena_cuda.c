/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arenas of the engine's own memory: one block of device memory per rank, with the slab at its
 * front and what this rank's kernels read behind it. */
#include <stdlib.h>

#include "core/faults.h"
#include "symm/engine_cuda.h"

/* Zeroed before any other rank learns of it. */
static cof_status make_own(cof_arena *a)
{
    struct cofi_cuda_arena *m = cofi_cuda_arena(a);
    bool is_vmm = a->team->world->device->memory == COFI_MEMORY_VMM;
    COF_FAIL_IF(COFI_FAULT(ARENA_NOMEM, a->rank), COF_ERR_NOMEM, "arena: refused by a fault hook");
    m->peers = calloc((size_t)a->n_ranks, sizeof *m->peers);
    COF_FAIL_IF(!m->peers, COF_ERR_NOMEM, "arena: no memory");
    COF_TRY(cofi_cuda_block_make(m->device, is_vmm, a->slab_bytes + cofi_cuda_tables_bytes(a),
                                 &m->own));
    a->base[a->rank] = m->own.base;
    COF_CUDA(cudaMemsetAsync(m->own.base, 0, a->slab_bytes, m->setup));
    COF_CUDA(cudaStreamSynchronize(m->setup));
    return COF_OK;
}

static cof_status share(cof_arena *a)
{
    struct cofi_cuda_arena *m = cofi_cuda_arena(a);
    COF_TRY(cofi_team_agree(a->team, "arena memory", make_own(a)));
    COF_TRY(cofi_cuda_map_blocks(a->team, &m->own, m->peers));
    for (int r = 0; r < a->n_ranks; r++)
        if (r != a->rank)
            a->base[r] = m->peers[r].base;
    return cofi_team_agree(a->team, "arena map",
                           cofi_cuda_tables_make(a, m->own.base + a->slab_bytes));
}

cof_status cofi_cuda_map(cof_arena *a, void *const *peers)
{
    (void)peers;
    struct cofi_cuda_scope scope;
    cofi_cuda_control_sweep();
    COF_TRY(cofi_cuda_control_open(a));
    cof_status entered = cofi_cuda_enter(cofi_cuda_arena(a)->device, &scope);
    cof_status status = cofi_team_agree(a->team, "arena device", entered);
    if (status == COF_OK)
        status = share(a);
    if (entered == COF_OK)
        cofi_cuda_leave(&scope);
    if (status != COF_OK)
        cofi_cuda_unmap(a);
    return status;
}

void cofi_cuda_unmap(cof_arena *a)
{
    cofi_cuda_control_close(a);
    cofi_cuda_control_sweep();
}
