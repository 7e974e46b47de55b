/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks are threads of one process: rank 0 takes one block from the system and hands its address to
 * the others; it is freed by whoever lets go last. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "core/faults.h"
#include "core/wait.h"
#include "symm/engine.h"
#include "symm/memory.h"

/* At the front of the block, before the slabs. */
struct shared_block {
    _Alignas(4096) _Atomic int n_holders;
};

static size_t block_bytes(const cof_arena *a)
{
    return sizeof(struct shared_block) + (size_t)a->n_ranks * a->slab_bytes;
}

static cof_status take_block(cof_arena *a, void **block_out)
{
    *block_out = NULL;
    COF_FAIL_IF(COFI_FAULT(ARENA_NOMEM, a->rank), COF_ERR_NOMEM, "arena: refused by a fault hook");
    if (a->rank != 0)
        return COF_OK;
    COF_TRY(cofi_memory_check(block_bytes(a)));
    void *block = mmap(NULL, block_bytes(a), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0);
    COF_FAIL_IF(block == MAP_FAILED, COF_ERR_NOMEM, "arena: no memory for %zu bytes",
                block_bytes(a));
    atomic_store(&((struct shared_block *)block)->n_holders, a->n_ranks);
    *block_out = block;
    return COF_OK;
}

static void unmap(cof_arena *a)
{
    struct shared_block *block = a->mapping;
    if (atomic_fetch_sub(&block->n_holders, 1) == 1)
        munmap(block, a->mapping_bytes);
}

static cof_status map(cof_arena *a, void *const *peers)
{
    (void)peers;
    void *own, *block = NULL;
    cof_status status = cofi_team_agree(a->team, "arena create", take_block(a, &own));
    if (status != COF_OK) {
        if (own)
            munmap(own, block_bytes(a));
        return status;
    }
    status = cofi_team_bcast_pointer(a->team, own, &block);
    a->mapping = status == COF_OK ? block : own;
    a->mapping_bytes = block_bytes(a);
    if (status == COF_OK)
        status = cofi_team_agree(a->team, "arena reserve", COF_OK);
    if (status != COF_OK) { /* others may have the block already: let go of this rank's part only */
        if (a->mapping)
            unmap(a);
        return status;
    }
    for (int r = 0; r < a->n_ranks; r++)
        a->base[r] = (char *)block + sizeof(struct shared_block) + (size_t)r * a->slab_bytes;
    return COF_OK;
}

void cofi_mapped_put(cof_arena *a, int peer, size_t dst_offset, const void *src, size_t bytes)
{
    memmove(a->base[peer] + dst_offset, src, bytes); /* the peer may be this rank itself */
}

void cofi_mapped_get(cof_arena *a, void *dst, int peer, size_t src_offset, size_t bytes)
{
    memmove(dst, a->base[peer] + src_offset, bytes);
}

void cofi_mapped_signal(cof_arena *a, int peer, size_t word_offset, uint64_t value)
{
    struct cofi_line *line = (struct cofi_line *)(a->base[peer] + word_offset);
    atomic_store_explicit(&line->value, value, memory_order_seq_cst);
    cofi_wake((_Atomic uint32_t *)(void *)&line->value, &line->sleepers, true);
}

uint64_t cofi_mapped_load(cof_arena *a, int peer, size_t word_offset)
{
    return atomic_load((_Atomic uint64_t *)(void *)(a->base[peer] + word_offset));
}

const struct cofi_engine_ops cofi_engine_thread = {
    .name = "thread",
    .caps = COFI_CAP_MAPPED | COFI_CAP_WORLDS | COFI_CAP_REINIT,
    .map = map,
    .unmap = unmap,
    .put = cofi_mapped_put,
    .get = cofi_mapped_get,
    .signal = cofi_mapped_signal,
    .load = cofi_mapped_load,
};
