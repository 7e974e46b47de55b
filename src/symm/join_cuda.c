/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* How ranks on CUDA devices join: they tell each other what they have, decide by that
 * (device_peers.h), and then prove it. The proof is with real bytes: that a driver says yes to peer
 * access, or opens a handle, has been seen to mean nothing. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "backend/cuda/driver_cuda.h"
#include "core/config.h"
#include "core/log.h"
#include "symm/engine_cuda.h"

/* ---- what a rank tells ---------------------------------------------------------------------- */

static int wanted_memory(void)
{
    const char *wanted = cofi_config_text(COFI_VAR_CUDA_MEMORY);
    return !strcmp(wanted, "vmm")   ? COFI_MEMORY_VMM
           : !strcmp(wanted, "ipc") ? COFI_MEMORY_IPC
                                    : COFI_MEMORY_ANY;
}

static cof_status describe_own(const cof_world *w, struct cofi_device_info *own)
{
    const struct cofi_driver *d = cofi_driver();
    const struct cofi_cuda_world *device = w->device;
    CUuuid uuid;
    int has_vmm = 0, has_fd = 0, is_unified = 0;
    *own = (struct cofi_device_info){.n_sms = device->n_sms, .wanted = wanted_memory()};
    COF_DRIVER(d->device_name(own->id.name, (int)sizeof own->id.name, device->device));
    COF_DRIVER(d->device_uuid(&uuid, device->device));
    memcpy(own->id.uuid, &uuid, sizeof own->id.uuid);
    COF_DRIVER(d->device_attribute(
        &has_vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device->device));
    COF_DRIVER(d->device_attribute(
        &has_fd, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device->device));
    COF_DRIVER(d->device_attribute(&is_unified, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
                                   device->device));
    own->has_vmm = has_vmm && has_fd;
    own->has_ipc = is_unified;
    return COF_OK;
}

/* The device of this process with that UUID; -1: none. */
static int find_visible(const struct cofi_device_id *id, int n_devices)
{
    for (int i = 0; i < n_devices; i++) {
        CUuuid uuid;
        if (cofi_driver()->device_uuid(&uuid, i) == CUDA_SUCCESS &&
            !memcmp(&uuid, id->uuid, sizeof id->uuid))
            return i;
    }
    return -1;
}

static cof_status check_access(const cof_world *w, const struct cofi_device_info *ranks)
{
    int n_devices = 0;
    COF_CUDA(cudaGetDeviceCount(&n_devices));
    signed char *can = malloc((size_t)w->n_ranks);
    COF_FAIL_IF(!can, COF_ERR_NOMEM, "world of %d: no memory", w->n_ranks);
    for (int r = 0; r < w->n_ranks; r++) {
        int peer = find_visible(&ranks[r].id, n_devices), yes = 1;
        if (peer >= 0 && peer != w->device->device &&
            cudaDeviceCanAccessPeer(&yes, w->device->device, peer) != cudaSuccess) {
            cudaGetLastError();
            yes = 0;
        }
        can[r] = (signed char)(peer < 0 ? -1 : yes);
    }
    cof_status status = cofi_device_check_access(ranks, w->n_ranks, w->rank, can);
    free(can);
    return status;
}

/* Lines arrive whole within a device and over NVLink, as far as has been seen: on sm_90. A link by
 * which atomics reach the peer is NVLink. */
static cof_status have_lines(const cof_world *w, const struct cofi_device_info *ranks, bool *have)
{
    int n_devices = 0, major = 0;
    COF_CUDA(cudaGetDeviceCount(&n_devices));
    COF_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, w->device->device));
    *have = major == 9;
    for (int r = 0; r < w->n_ranks; r++) {
        int peer = find_visible(&ranks[r].id, n_devices), has_atomics = 1;
        if (peer >= 0 && peer != w->device->device)
            COF_CUDA(cudaDeviceGetP2PAttribute(&has_atomics, cudaDevP2PAttrNativeAtomicSupported,
                                               w->device->device, peer));
        *have &= peer >= 0 && has_atomics;
    }
    return COF_OK;
}

/* The same on all ranks. */
static cof_status agree_on_lines(cof_world *w, struct cofi_device_info *ranks)
{
    bool have = false;
    cof_status status = have_lines(w, ranks, &have);
    for (int r = 0; r < w->n_ranks; r++)
        ranks[r].has_lines = 0;
    ranks[w->rank].has_lines = have;
    struct cofi_device_info mine = ranks[w->rank];
    COF_TRY(cofi_team_agree(w->team, "devices", status));
    COF_TRY(cofi_team_exchange(w->team, "devices", &mine, ranks, sizeof mine));
    w->device->has_lines = true;
    for (int r = 0; r < w->n_ranks; r++)
        w->device->has_lines &= ranks[r].has_lines != 0;
    return COF_OK;
}

/* ---- proof ---------------------------------------------------------------------------------- */

/* What rank `by` leaves for the rank with that cookie. */
static uint64_t mark_of(uint64_t cookie, int by)
{
    return cookie ^ UINT64_C(0x0101010101010101) * (uint64_t)(by + 1);
}

struct proof {
    cof_world *world;
    struct cofi_cuda_block own, *blocks;
    uint64_t *cookies, *words; /* by rank */
};

/* A block is the cookie of its rank, then a word of each rank's. */
static char *word_of(const struct proof *p, int owner, int by)
{
    char *base = owner == p->world->rank ? p->own.base : p->blocks[owner].base;
    return base + sizeof(uint64_t) * (size_t)(by + 1);
}

static cof_status copy(const struct proof *p, void *dst, const void *src, size_t bytes,
                       enum cudaMemcpyKind kind)
{
    COF_CUDA(cudaMemcpyAsync(dst, src, bytes, kind, p->world->device->setup));
    COF_CUDA(cudaStreamSynchronize(p->world->device->setup));
    return COF_OK;
}

static cof_status allocate_proof(struct proof *p)
{
    size_t n = (size_t)p->world->n_ranks;
    p->blocks = calloc(n, sizeof *p->blocks);
    p->cookies = calloc(n, sizeof *p->cookies);
    p->words = calloc(n, sizeof *p->words);
    COF_FAIL_IF(!p->blocks || !p->cookies || !p->words, COF_ERR_NOMEM, "world: no memory");
    return COF_OK;
}

static cof_status make_own(struct proof *p, bool is_vmm, uint64_t *cookie)
{
    size_t bytes = sizeof *cookie * ((size_t)p->world->n_ranks + 1);
    COF_FAIL_IF(getrandom(cookie, sizeof *cookie, 0) != (ssize_t)sizeof *cookie, COF_ERR_SYSTEM,
                "world: getrandom: %s", strerror(errno));
    COF_TRY(cofi_cuda_block_make(p->world->device->device, is_vmm, bytes, &p->own));
    COF_CUDA(cudaMemsetAsync(p->own.base, 0, bytes, p->world->device->setup));
    return copy(p, p->own.base, cookie, sizeof *cookie, cudaMemcpyHostToDevice);
}

static cof_status visit_peers(const struct proof *p)
{
    int rank = p->world->rank;
    for (int r = 0; r < p->world->n_ranks; r++) {
        uint64_t seen = 0, mark = mark_of(p->cookies[r], rank);
        COF_TRY(copy(p, &seen, word_of(p, r, -1), sizeof seen, cudaMemcpyDeviceToHost));
        COF_FAIL_IF(seen != p->cookies[r], COF_ERR_SYSTEM,
                    "rank %d reads %016llx in the memory of rank %d, which holds %016llx", rank,
                    (unsigned long long)seen, r, (unsigned long long)p->cookies[r]);
        COF_TRY(copy(p, word_of(p, r, rank), &mark, sizeof mark, cudaMemcpyHostToDevice));
    }
    return COF_OK;
}

static cof_status check_marks(const struct proof *p)
{
    int n = p->world->n_ranks, rank = p->world->rank;
    COF_TRY(copy(p, p->words, word_of(p, rank, 0), (size_t)n * sizeof *p->words,
                 cudaMemcpyDeviceToHost));
    for (int r = 0; r < n; r++)
        COF_FAIL_IF(p->words[r] != mark_of(p->cookies[rank], r), COF_ERR_SYSTEM,
                    "what rank %d wrote into the memory of rank %d is not there", r, rank);
    return COF_OK;
}

static cof_status run_proof(struct proof *p, bool is_vmm)
{
    cof_team *t = p->world->team;
    uint64_t cookie = 0;
    cof_status status = allocate_proof(p);
    if (status == COF_OK)
        status = make_own(p, is_vmm, &cookie);
    COF_TRY(cofi_team_agree(t, "device proof", status));
    COF_TRY(cofi_cuda_map_blocks(t, &p->own, p->blocks));
    COF_TRY(cofi_team_exchange(t, "device proof", &cookie, p->cookies, sizeof cookie));
    COF_TRY(cofi_team_agree(t, "device proof", visit_peers(p)));
    return cofi_team_agree(t, "device proof", check_marks(p));
}

/* All have closed what is another rank's before anyone frees it. */
static cof_status prove(cof_world *w, enum cofi_device_memory memory)
{
    struct proof p = {.world = w};
    cof_status status = run_proof(&p, memory == COFI_MEMORY_VMM);
    char text[COFI_ERROR_TEXT_BYTES];
    memcpy(text, cof_last_error(), sizeof text);
    for (int r = 0; r < w->n_ranks && p.blocks; r++)
        cofi_cuda_block_close(&p.blocks[r]);
    cof_status closed = cofi_team_agree(w->team, "device proof", COF_OK);
    cofi_cuda_block_close(&p.own);
    free(p.blocks);
    free(p.cookies);
    free(p.words);
    return status != COF_OK ? cofi_fail_text(status, text) : closed;
}

/* ---- joining -------------------------------------------------------------------------------- */

/* Not after a rank that is late, gone or in another call: it would be waited for once more. */
static bool may_try_ipc(const cof_world *w, const struct cofi_device_info *ranks,
                        enum cofi_device_memory tried, cof_status status)
{
    bool may = tried == COFI_MEMORY_VMM && (status == COF_ERR_SYSTEM || status == COF_ERR_NOMEM);
    for (int r = 0; r < w->n_ranks; r++)
        may &= ranks[r].has_ipc && ranks[r].wanted == COFI_MEMORY_ANY;
    return may;
}

/* Kinds of memory, from the better one on, until one holds what it promises: alike on all ranks. */
static cof_status prove_memory(cof_world *w, const struct cofi_device_info *ranks)
{
    enum cofi_device_memory memory;
    COF_TRY(cofi_device_choose_memory(ranks, w->n_ranks, &memory));
    cof_status status = prove(w, memory);
    if (status != COF_OK && may_try_ipc(w, ranks, memory, status)) {
        cofi_log(COFI_LOG_PROCESS, "engine cuda: no memory by descriptors: %s", cof_last_error());
        memory = COFI_MEMORY_IPC;
        status = prove(w, memory);
    }
    if (status == COF_ERR_SYSTEM) {
        char text[COFI_ERROR_TEXT_BYTES];
        memcpy(text, cof_last_error(), sizeof text);
        return COF_FAIL(COF_ERR_UNSUPPORTED,
                        "engine cuda: the ranks' devices do not reach each other's memory: %s",
                        text);
    }
    w->device->memory = (int)memory;
    return status;
}

static cof_status decide(cof_world *w, struct cofi_device_info *ranks, cof_status own)
{
    struct cofi_cuda_world *d = w->device;
    struct cofi_device_info mine = {0};
    if (own == COF_OK)
        own = describe_own(w, &mine);
    COF_TRY(cofi_team_agree(w->team, "devices", own));
    COF_TRY(cofi_team_exchange(w->team, "devices", &mine, ranks, sizeof mine));
    COF_TRY(cofi_device_check_kinds(ranks, w->n_ranks));
    COF_TRY(cofi_team_agree(w->team, "devices", check_access(w, ranks)));
    COF_TRY(agree_on_lines(w, ranks));
    d->n_ranks_here = cofi_device_n_ranks(ranks, w->n_ranks, w->rank);
    d->most_ranks = cofi_device_most_ranks(ranks, w->n_ranks);
    d->n_sms = cofi_device_n_sms(ranks, w->n_ranks);
    COF_TRY(prove_memory(w, ranks));
    cof_status watching = w->n_ranks > 1 ? cofi_cuda_watch_start(w, &d->watch) : COF_OK;
    COF_TRY(cofi_team_agree(w->team, "devices", watching));
    cofi_log(COFI_LOG_PROCESS,
             "rank %d of %d, engine cuda, device %d (%s), %d ranks on it, memory by %s", w->rank,
             w->n_ranks, d->device, mine.id.name, d->n_ranks_here,
             d->memory == COFI_MEMORY_VMM ? "descriptors" : "ipc handles");
    return COF_OK;
}

cof_status cofi_cuda_join(cof_world *w)
{
    struct cofi_cuda_scope scope;
    struct cofi_device_info *ranks = calloc((size_t)w->n_ranks, sizeof *ranks);
    cof_status entered = cofi_cuda_enter(w->device->device, &scope), own = entered;
    if (!ranks)
        own = COF_FAIL(COF_ERR_NOMEM, "world of %d: no memory", w->n_ranks);
    cof_status status = decide(w, ranks, own);
    if (entered == COF_OK)
        cofi_cuda_leave(&scope);
    free(ranks);
    return status;
}
