/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Blocks of device memory for cof_arena_attach, exchanged by CUDA IPC, as a caller would. For ranks
 * that are processes: some of these calls wait for all that runs in the process.
 *
 * CUDA must not free memory that another process has open. So each rank counts, in host memory
 * beside the owner's block, that it let go, and the owner frees when all have; until then the block
 * waits here. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "ops/runtime/runtime_check_cuda.h"
#include "symm/engine_cuda.h"

struct block {
    int device, n_ranks, rank;
    void *data;
    bool *is_open; /* by rank: to be closed */
    struct cofi_check_blocks counts;
    struct block *next;
};

static struct {
    pthread_mutex_t lock;
    struct block *first;
} left_behind = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Where a rank's block is to be found by the others. */
struct place {
    cudaIpcMemHandle_t handle;
    void *data;
    uint64_t bytes;
    int32_t pid, device, is_there;
};

static _Atomic int *count_of(const struct block *block, int rank)
{
    return block->counts.base[rank];
}

static void free_block(struct block *block)
{
    struct cofi_cuda_scope scope;
    if (block->data && cofi_cuda_enter(block->device, &scope) == COF_OK) {
        cudaFree(block->data);
        cofi_cuda_leave(&scope);
    }
    cofi_check_blocks_close(&block->counts);
    free(block->is_open);
    free(block);
}

/* Frees what all others have let go. */
static void sweep(void)
{
    pthread_mutex_lock(&left_behind.lock);
    for (struct block **at = &left_behind.first; *at;) {
        struct block *block = *at;
        if (atomic_load(count_of(block, block->rank)) < block->n_ranks - 1) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        free_block(block);
    }
    pthread_mutex_unlock(&left_behind.lock);
}

/* Whole pages of the device's, so that nothing else shares the mapping of the others. */
static cof_status make_block(cof_world *world, struct block *block, size_t bytes,
                             struct place *place)
{
    const size_t page = (size_t)2 << 20;
    size_t whole = bytes + page;
    COF_FAIL_IF(whole < bytes, COF_ERR_NOMEM, "check: a block of %zu bytes", bytes);
    COF_CUDA(cudaMalloc(&block->data, whole / page * page));
    COF_CUDA(cudaIpcGetMemHandle(&place->handle, block->data));
    place->data = block->data;
    return cofi_check_cuda()->fill(world, block->data, 0, whole / page * page);
}

static cof_status enable_access(int device)
{
    cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError(); /* forget it */
        return COF_OK;
    }
    COF_CUDA(error);
    return COF_OK;
}

static cof_status open_block(struct block *block, int rank, const struct place *place,
                             void **base_out)
{
    COF_FAIL_IF(!place->is_there, COF_ERR_NOMEM, "check: rank %d has no block", rank);
    if (place->pid == (int32_t)getpid()) { /* handles are for other processes */
        *base_out = place->data;
        return place->device == block->device ? COF_OK : enable_access(place->device);
    }
    COF_CUDA(cudaIpcOpenMemHandle(base_out, place->handle, cudaIpcMemLazyEnablePeerAccess));
    block->is_open[rank] = true;
    return COF_OK;
}

static cof_status exchange_blocks(cof_team *team, struct cofi_check_blocks *b, size_t bytes,
                                  struct place *places, cof_status own)
{
    struct block *block = b->own;
    struct place mine = {.bytes = bytes, .pid = (int32_t)getpid(),
                         .device = team->world->device->device};
    if (own == COF_OK)
        own = make_block(team->world, block, bytes, &mine);
    mine.is_there = own == COF_OK;
    COF_TRY(cof_team_allgather(team, &mine, places, sizeof mine));
    sweep(); /* all are here, and have let go of what came before */
    for (int r = 0; r < b->n_ranks && own == COF_OK; r++) {
        own = open_block(block, r, &places[r], &b->base[r]);
        b->bytes[r] = places[r].bytes;
    }
    return own;
}

cof_status cofi_check_cuda_blocks_open(cof_team *team, size_t bytes, struct cofi_check_blocks *b)
{
    size_t n = (size_t)cof_team_size(team);
    struct cofi_cuda_scope scope;
    struct block *block = calloc(1, sizeof *block);
    struct place *places = calloc(n, sizeof *places);
    *b = (struct cofi_check_blocks){.n_ranks = (int)n, .fd = -1, .own = block,
                                    .device = cofi_check_cuda(),
                                    .base = calloc(n, sizeof *b->base),
                                    .bytes = calloc(n, sizeof *b->bytes)};
    cof_status status = COF_FAIL(COF_ERR_NOMEM, "check: no memory for the blocks of %zu ranks", n);
    if (!block || !places || !b->base || !b->bytes)
        goto out; /* the others see it at their deadline: no memory for a few bytes */
    *block = (struct block){.device = team->world->device->device, .n_ranks = (int)n,
                            .rank = cof_team_rank(team), .counts.fd = -1,
                            .is_open = calloc(n, sizeof *block->is_open)};
    if (!block->is_open)
        goto out;
    status = cofi_check_host_blocks_open(team, sizeof(int), &block->counts);
    b->fd = block->counts.fd;
    block->counts.fd = -1;
    if (cofi_cuda_enter(block->device, &scope) == COF_OK) {
        status = exchange_blocks(team, b, bytes, places, status);
        cofi_cuda_leave(&scope);
    }
out:
    free(places);
    return status;
}

/* The own block stays until the others have let go; one that nobody heard of does not. */
static void let_go(struct block *block)
{
    bool all = block->counts.base && block->counts.base[block->rank] && block->data;
    for (int r = 0; r < block->n_ranks; r++)
        if (r != block->rank && block->counts.base && block->counts.base[r])
            atomic_fetch_add(count_of(block, r), 1);
    if (!all) {
        free_block(block);
        return;
    }
    pthread_mutex_lock(&left_behind.lock);
    block->next = left_behind.first;
    left_behind.first = block;
    pthread_mutex_unlock(&left_behind.lock);
    sweep();
}

void cofi_check_cuda_blocks_close(struct cofi_check_blocks *b)
{
    struct cofi_cuda_scope scope;
    struct block *block = b->own;
    if (block && block->is_open && cofi_cuda_enter(block->device, &scope) == COF_OK) {
        for (int r = 0; r < b->n_ranks; r++)
            if (block->is_open[r])
                cudaIpcCloseMemHandle(b->base[r]);
        cofi_cuda_leave(&scope);
    }
    if (block && block->is_open)
        let_go(block);
    else
        free(block);
    if (b->fd >= 0)
        close(b->fd);
    free(b->base);
    free(b->bytes);
    *b = (struct cofi_check_blocks){.fd = -1};
}
