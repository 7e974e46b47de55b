/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks are threads of one process: rank 0 takes one block from the system and tells the others its
 * number, by which they find it in the process's list; it is freed by whoever lets go last. A rank
 * that comes when all have let go, since something failed, finds none: never memory that is gone,
 * or another block in its place. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/faults.h"
#include "core/wait.h"
#include "symm/engine.h"
#include "symm/fork.h"
#include "symm/memory.h"

struct shared_block {
    uintptr_t number; /* never 0 */
    int n_holders;
    char *slabs;
    size_t bytes;
    struct shared_block *next;
};

/* Under the lock of fork.h, which a child of fork finds free. */
static struct shared_block *blocks;

static void enter(struct shared_block *block)
{
    static uintptr_t last_number;
    cofi_fork_hold();
    block->number = ++last_number;
    block->next = blocks;
    blocks = block;
    cofi_fork_release();
}

static struct shared_block *hold(uintptr_t number)
{
    cofi_fork_hold();
    struct shared_block *block = blocks;
    while (block && block->number != number)
        block = block->next;
    if (block)
        block->n_holders++;
    cofi_fork_release();
    return block;
}

static void let_go(struct shared_block *block)
{
    cofi_fork_hold();
    bool is_last = --block->n_holders == 0;
    struct shared_block **at = &blocks;
    while (is_last && *at != block)
        at = &(*at)->next;
    if (is_last)
        *at = block->next;
    cofi_fork_release();
    if (!is_last)
        return;
    munmap(block->slabs, block->bytes);
    free(block);
}

static cof_status take_block(const cof_arena *a, struct shared_block **block_out)
{
    size_t bytes = (size_t)a->n_ranks * a->slab_bytes;
    COF_FAIL_IF(COFI_FAULT(ARENA_NOMEM, a->rank), COF_ERR_NOMEM, "arena: refused by a fault hook");
    if (a->rank != 0)
        return COF_OK;
    COF_TRY(cofi_memory_check(bytes));
    struct shared_block *block = malloc(sizeof *block);
    COF_FAIL_IF(!block, COF_ERR_NOMEM, "arena: no memory");
    *block = (struct shared_block){.n_holders = 1, .bytes = bytes};
    block->slabs = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block->slabs == MAP_FAILED) {
        free(block);
        return COF_FAIL(COF_ERR_NOMEM, "arena: no memory for %zu bytes", bytes);
    }
    enter(block);
    *block_out = block;
    return COF_OK;
}

/* Rank 0's block, held. */
static cof_status find_block(cof_arena *a, struct shared_block **block)
{
    void *number = *block ? (void *)(*block)->number : NULL;
    COF_TRY(cofi_team_bcast_pointer(a->team, number, &number));
    if (a->rank != 0)
        *block = hold((uintptr_t)number);
    return *block ? COF_OK : COF_FAIL(COF_ERR_TIMEOUT, "arena: rank %d has let go of it already",
                                      a->team->world_rank[0]);
}

static void unmap(cof_arena *a)
{
    let_go(a->mapping);
}

static cof_status map(cof_arena *a, void *const *peers)
{
    (void)peers;
    struct shared_block *block = NULL;
    cof_status status = cofi_team_agree(a->team, "arena create", take_block(a, &block));
    if (status == COF_OK) {
        status = find_block(a, &block);
        status = cofi_team_agree(a->team, "arena reserve", status);
    }
    if (status != COF_OK) { /* others may have the block already: let go of this rank's part only */
        if (block)
            let_go(block);
        return status;
    }
    a->mapping = block;
    a->mapping_bytes = block->bytes;
    for (int r = 0; r < a->n_ranks; r++)
        a->base[r] = block->slabs + (size_t)r * a->slab_bytes;
    cofi_control_in_slabs(a);
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
