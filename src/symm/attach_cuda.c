/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The caller's device memory, as engine_attach.c takes that of hosts: every rank writes a random
 * number into its own block and looks for the others' numbers in the blocks that were called
 * theirs. Bytes are looked at by copies, which refuse an address where a kernel would fault. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "backend/cuda/driver_cuda.h"
#include "core/faults.h"
#include "symm/engine_cuda.h"

#define COOKIE_OFFSET offsetof(struct cofi_control, cookie)

static cudaError_t read_bytes(const cof_arena *a, void *dst, const char *src, size_t bytes)
{
    cudaStream_t setup = cofi_cuda_arena(a)->setup;
    cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, setup);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(setup);
    if (error != cudaSuccess)
        cudaGetLastError();
    return error;
}

/* ---- what can be known of a block ----------------------------------------------------------- */

/* What is wrong with the memory there; NULL: nothing. An address that the driver does not know must
 * not be copied from: where devices page host memory in, that may end the process. */
static const char *wrong_memory(const char *at)
{
    int device;
    switch (cofi_cuda_memory_type(at, &device)) {
    case cudaMemoryTypeDevice: return NULL;
    case cudaMemoryTypeHost: return "is memory of the host";
    case cudaMemoryTypeManaged: return "is managed memory";
    default: return "is memory that CUDA does not know";
    }
}

static cof_status check_type(const cof_arena *a, int r)
{
    const char *base = a->base[r], *wrong = wrong_memory(base);
    COF_FAIL_IF(wrong, COF_ERR_INVALID, "peers.base[%d] = %p: %s; wanted device memory", r,
                (const void *)base, wrong);
    wrong = wrong_memory(base + a->slab_bytes - 1);
    COF_FAIL_IF(wrong, COF_ERR_INVALID, "peers.base[%d] = %p: byte %zu %s; wanted device memory", r,
                (const void *)base, a->slab_bytes - 1, wrong);
    return COF_OK;
}

/* The own block is of the own device: what others store there, this rank's kernels see. */
static cof_status check_own_device(const cof_arena *a)
{
    const int wanted = cofi_cuda_arena(a)->device;
    int device = wanted;
    cofi_cuda_memory_type(a->base[a->rank], &device);
    COF_FAIL_IF(device != wanted, COF_ERR_INVALID,
                "peers.base[%d] = %p: is memory of device %d; wanted this rank's device, %d",
                a->rank, (void *)a->base[a->rank], device, wanted);
    return COF_OK;
}

/* Where the driver tells of allocations, they follow each other up to the block's end. */
static cof_status check_range(const cof_arena *a, int r)
{
    CUdeviceptr begin = (CUdeviceptr)(uintptr_t)a->base[r], end = begin + a->slab_bytes;
    for (CUdeviceptr at = begin; at < end;) {
        CUdeviceptr base = 0;
        size_t bytes = 0;
        CUresult error = cofi_driver()->address_range(&base, &bytes, at);
        if (error != CUDA_SUCCESS && at == begin)
            return COF_OK; /* it does not tell: the last byte is read below */
        COF_FAIL_IF(error != CUDA_SUCCESS || base + bytes <= at, COF_ERR_INVALID,
                    "peers.base[%d] = %p: wanted %zu bytes, its memory ends after %zu", r,
                    (void *)a->base[r], a->slab_bytes, (size_t)(at - begin));
        at = base + bytes;
    }
    return COF_OK;
}

static cof_status check_block(const cof_arena *a, int r)
{
    char scrap;
    COF_TRY(check_type(a, r));
    COF_TRY(check_range(a, r));
    const size_t at[2] = {0, a->slab_bytes - 1};
    for (int i = 0; i < 2; i++) {
        cudaError_t error = read_bytes(a, &scrap, a->base[r] + at[i], 1);
        COF_FAIL_IF(error != cudaSuccess, COF_ERR_INVALID,
                    "peers.base[%d] = %p: byte %zu of %zu cannot be read: %s", r,
                    (void *)a->base[r], at[i], a->slab_bytes, cudaGetErrorName(error));
    }
    return COF_OK;
}

/* ---- cookies -------------------------------------------------------------------------------- */

static cof_status take_blocks(cof_arena *a, void *const *peers)
{
    struct cofi_cuda_arena *m = cofi_cuda_arena(a);
    bool is_vmm = a->team->world->device->memory == COFI_MEMORY_VMM;
    for (int r = 0; r < a->n_ranks; r++)
        a->base[r] = peers[r];
    COF_FAIL_IF(COFI_FAULT(ARENA_NOMEM, a->rank), COF_ERR_NOMEM, "arena: refused by a fault hook");
    for (int r = 0; r < a->n_ranks; r++)
        COF_TRY(check_block(a, r));
    COF_TRY(check_own_device(a));
    return cofi_cuda_block_make(m->device, is_vmm, cofi_cuda_tables_bytes(a), &m->own);
}

static cof_status write_cookie(const cof_arena *a, uint64_t cookie)
{
    cudaStream_t setup = cofi_cuda_arena(a)->setup;
    COF_CUDA(cudaMemcpyAsync(a->base[a->rank] + COOKIE_OFFSET, &cookie, sizeof cookie,
                             cudaMemcpyHostToDevice, setup));
    COF_CUDA(cudaStreamSynchronize(setup));
    return COF_OK;
}

static cof_status begin_own(const cof_arena *a, uint64_t *cookie_out)
{
    COF_FAIL_IF(getrandom(cookie_out, sizeof *cookie_out, 0) != (ssize_t)sizeof *cookie_out,
                COF_ERR_SYSTEM, "arena: getrandom: %s", strerror(errno));
    *cookie_out |= 1;
    COF_CUDA(cudaMemsetAsync(a->base[a->rank], 0, a->data_offset, cofi_cuda_arena(a)->setup));
    return write_cookie(a, *cookie_out);
}

static cof_status compare_cookies(const cof_arena *a, const uint64_t *cookies)
{
    for (int r = 0; r < a->n_ranks; r++) {
        uint64_t seen = 0;
        cudaError_t error = read_bytes(a, &seen, a->base[r] + COOKIE_OFFSET, sizeof seen);
        COF_FAIL_IF(error != cudaSuccess, COF_ERR_INVALID,
                    "peers.base[%d] = %p: cannot be read: %s", r, (void *)a->base[r],
                    cudaGetErrorName(error));
        COF_FAIL_IF(seen != cookies[r], COF_ERR_INVALID,
                    "peers.base[%d] = %p: is not the block of rank %d", r, (void *)a->base[r],
                    a->team->world_rank[r]);
    }
    return COF_OK;
}

/* Nobody uses the arena before all have zeroed. */
static cof_status prove(cof_arena *a, void *const *peers, cof_status own, uint64_t *cookies)
{
    uint64_t cookie = 0;
    if (own == COF_OK)
        own = take_blocks(a, peers);
    COF_TRY(cofi_team_agree(a->team, "arena attach", own));
    COF_TRY(cofi_team_agree(a->team, "arena attach", begin_own(a, &cookie)));
    COF_TRY(cofi_team_exchange(a->team, "arena attach", &cookie, cookies, sizeof cookie));
    if (!COFI_FAULT(COOKIE, a->rank))
        COF_TRY(cofi_team_agree(a->team, "arena attach", compare_cookies(a, cookies)));
    own = write_cookie(a, 0);
    if (own == COF_OK)
        own = cofi_cuda_tables_make(a, cofi_cuda_arena(a)->own.base);
    return cofi_team_agree(a->team, "arena attach", own);
}

cof_status cofi_cuda_attach_map(cof_arena *a, void *const *peers)
{
    struct cofi_cuda_scope scope;
    cofi_cuda_control_sweep();
    COF_TRY(cofi_cuda_control_open(a));
    uint64_t *cookies = calloc((size_t)a->n_ranks, sizeof *cookies);
    cof_status entered = cofi_cuda_enter(cofi_cuda_arena(a)->device, &scope), own = entered;
    if (!cookies)
        own = COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
    cof_status status = prove(a, peers, own, cookies);
    if (entered == COF_OK)
        cofi_cuda_leave(&scope);
    free(cookies);
    if (status != COF_OK)
        cofi_cuda_unmap(a);
    return status;
}
