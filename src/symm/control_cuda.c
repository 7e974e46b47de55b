/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What an arena has beside its slabs: the control blocks of all ranks, in host memory that hosts
 * and devices of all of them map, and what this rank's kernels read, in its device's memory. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/log.h"
#include "symm/device_peers.h"
#include "symm/engine_cuda.h"

_Static_assert(offsetof(struct cofi_cuda_control, control) == 0, "the engine's offsets");

/* ---- control blocks ------------------------------------------------------------------------- */

static void take_control(cof_arena *a, struct cofi_cuda_arena *m)
{
    m->setup = a->team->world->device->setup;
    m->rank = a->rank;
    m->n_ranks = a->n_ranks;
    m->binding_table = cofi_cuda_control(m, a->rank)->bindings;
    for (int r = 0; r < a->n_ranks; r++)
        a->control[r] = &cofi_cuda_control(m, r)->control;
    a->mapping = m;
    a->mapping_bytes = m->control_bytes * (size_t)a->n_ranks;
}

/* Rank 0's part: bytes and descriptor; 0 where the driver has no such memory. */
static uint64_t make_driver_memory(const cof_arena *a, struct cofi_cuda_arena *m, int *fd_out)
{
    struct cofi_cuda_handle handle;
    const size_t bytes = m->control_bytes * (size_t)a->n_ranks;
    cof_status status = cofi_cuda_host_make(m->device, bytes, &m->control_block);
    if (status == COF_OK)
        status = cofi_cuda_block_export(&m->control_block, m->device, &handle, fd_out);
    return status == COF_OK ? m->control_block.bytes : 0;
}

static cof_status take_driver_memory(const cof_arena *a, struct cofi_cuda_arena *m, uint64_t bytes,
                                     int own_fd, bool *is_mapped_out)
{
    int fd = -1;
    *is_mapped_out = a->rank == 0;
    COF_TRY(cofi_team_bcast_fd(a->team, own_fd, &fd));
    if (a->rank == 0)
        return COF_OK;
    *is_mapped_out = fd >= 0 && cofi_cuda_host_import(m->device, bytes, fd,
                                                      &m->control_block) == COF_OK;
    if (fd >= 0)
        close(fd);
    return COF_OK;
}

/* Rank 0's block of the driver's host memory, on every rank, or on none: *is_mapped_out is alike on
 * all. Letting it go never waits, as cudaHostUnregister does for all kernels of the process. */
static cof_status map_driver_memory(const cof_arena *a, struct cofi_cuda_arena *m,
                                    bool *is_mapped_out)
{
    uint64_t *all = a->team->table;
    int own_fd = -1;
    bool is_mapped = false;
    uint64_t own = a->rank == 0 ? make_driver_memory(a, m, &own_fd) : 0;
    cof_status status = cofi_team_exchange(a->team, "arena control", &own, all, sizeof own);
    if (status == COF_OK && all[0] != 0)
        status = take_driver_memory(a, m, all[0], own_fd, &is_mapped);
    if (own_fd >= 0)
        close(own_fd);
    own = is_mapped;
    if (status == COF_OK)
        status = cofi_team_exchange(a->team, "arena control", &own, all, sizeof own);
    for (int r = 0; r < a->n_ranks && status == COF_OK; r++)
        is_mapped &= all[r] != 0;
    if (!is_mapped)
        cofi_log(COFI_LOG_PROCESS, "engine cuda: control blocks in a memfd: %s", cof_last_error());
    if (status != COF_OK || !is_mapped)
        cofi_cuda_block_close(&m->control_block);
    *is_mapped_out = is_mapped;
    return status;
}

static cof_status map_control(cof_arena *a, struct cofi_cuda_arena *m)
{
    struct cofi_cuda_scope scope;
    bool has_block = false;
    void *base = NULL;
    cof_status entered = cofi_cuda_enter(m->device, &scope);
    cof_status status = cofi_team_agree(a->team, "arena device", entered);
    if (status == COF_OK && a->team->world->device->memory == COFI_MEMORY_VMM)
        status = map_driver_memory(a, m, &has_block);
    if (status == COF_OK && has_block)
        base = m->control_on_device = m->control_block.base;
    else if (status == COF_OK)
        status = cofi_shared_map(a->team, m->control_bytes, &base);
    if (entered == COF_OK)
        cofi_cuda_leave(&scope);
    m->control = base;
    return status;
}

cof_status cofi_cuda_control_open(cof_arena *a)
{
    struct cofi_cuda_arena *m = calloc(1, sizeof *m);
    cof_status status = m ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
    status = cofi_team_agree(a->team, "arena create", status);
    if (status == COF_OK) {
        m->device = a->team->world->device->device;
        m->control_bytes = cofi_round_up(sizeof(struct cofi_cuda_control),
                                         (size_t)sysconf(_SC_PAGESIZE));
        status = map_control(a, m);
    }
    if (status != COF_OK) {
        free(m);
        return status;
    }
    take_control(a, m);
    return COF_OK;
}

/* For all devices of the process, at the address that this one sees. */
static cof_status register_control(struct cofi_cuda_arena *m)
{
    void *at = NULL;
    if (m->control_on_device)
        return COF_OK;
    COF_CUDA(cudaHostRegister(m->control, m->control_bytes * (size_t)m->n_ranks,
                              cudaHostRegisterPortable | cudaHostRegisterMapped));
    cudaError_t error = cudaHostGetDevicePointer(&at, m->control, 0);
    if (error != cudaSuccess) {
        cudaHostUnregister(m->control);
        COF_CUDA(error);
    }
    m->control_on_device = at;
    return COF_OK;
}

/* ---- what kernels read ---------------------------------------------------------------------- */

/* From struct cofd_arena on; what follows `counts` is zero. */
struct places {
    size_t base, control, world_rank, counts, bindings, bytes;
    size_t n_counts;
};

static struct places places_of(const cof_arena *a)
{
    size_t n = (size_t)a->n_ranks;
    struct places p = {.n_counts = n * (size_t)a->n_words};
    p.base = cofi_round_up(sizeof(struct cofd_arena), COFI_LINE);
    p.control = p.base + n * sizeof(char *);
    p.world_rank = p.control + n * sizeof(char *);
    p.counts = cofi_round_up(p.world_rank + n * sizeof(int32_t), COFI_LINE);
    p.bindings = cofi_round_up(p.counts + 2 * p.n_counts * sizeof(uint64_t), COFI_LINE);
    p.bytes = p.bindings + COFD_MAX_PLANS * sizeof(struct cofd_binding);
    return p;
}

size_t cofi_cuda_tables_bytes(const cof_arena *a)
{
    return places_of(a).bytes;
}

static const void *page_on_device(const cof_world *w, const volatile void *at)
{
    const struct cofi_cuda_page *page = w->device->page;
    return page->device + ((const volatile char *)at - (const volatile char *)page->host);
}

/* The image of what lies at `at`. */
static void fill_tables(const cof_arena *a, const struct places *p, char *at, char *image)
{
    const struct cofi_cuda_arena *m = cofi_cuda_arena(a);
    const cof_team *t = a->team;
    char **base = (char **)(void *)(image + p->base);
    char **control = (char **)(void *)(image + p->control);
    int32_t *world_rank = (int32_t *)(void *)(image + p->world_rank);
    for (int r = 0; r < a->n_ranks; r++) {
        base[r] = a->base[r];
        control[r] = m->control_on_device + (size_t)r * m->control_bytes;
        world_rank[r] = t->world_rank[r];
    }
    struct cofd_arena d = {
        .rank = a->rank, .n_ranks = a->n_ranks, .is_private = a->is_private,
        .first_epoch = a->first_epoch, .user_words_offset = a->user_words_offset,
        .base = (char **)(void *)(at + p->base),
        .control = (struct cofi_control **)(void *)(at + p->control),
        .abort = page_on_device(t->world, t->abort),
        .peer_state = page_on_device(t->world, t->world->state),
        .world_rank = (const int32_t *)(void *)(at + p->world_rank),
        .sent = (uint64_t *)(void *)(at + p->counts),
        .awaited = (uint64_t *)(void *)(at + p->counts) + p->n_counts,
        .bindings = (uint64_t *)(void *)(m->control_on_device +
                                         (size_t)a->rank * m->control_bytes +
                                         offsetof(struct cofi_cuda_control, bindings))};
    memcpy(image, &d, sizeof d);
}

static cof_status copy_tables(const cof_arena *a, const struct places *p, char *at, char *image)
{
    cudaStream_t setup = cofi_cuda_arena(a)->setup;
    fill_tables(a, p, at, image);
    COF_CUDA(cudaMemcpyAsync(at, image, p->counts, cudaMemcpyHostToDevice, setup));
    COF_CUDA(cudaMemsetAsync(at + p->counts, 0, p->bytes - p->counts, setup));
    COF_CUDA(cudaStreamSynchronize(setup));
    return COF_OK;
}

cof_status cofi_cuda_tables_make(cof_arena *a, char *at)
{
    struct cofi_cuda_arena *m = cofi_cuda_arena(a);
    const struct places p = places_of(a);
    COF_TRY(register_control(m));
    char *image = calloc(1, p.counts);
    COF_FAIL_IF(!image, COF_ERR_NOMEM, "arena: no memory");
    cof_status status = copy_tables(a, &p, at, image);
    free(image);
    m->on_device = (struct cofd_arena *)(void *)at;
    m->bindings = (struct cofd_binding *)(void *)(at + p.bindings);
    a->on_device = m->on_device;
    return status;
}

/* ---- letting go ----------------------------------------------------------------------------- */

/* Arenas of ipc memory that is still open elsewhere; what never closes it stays until the process
 * ends. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cofi_cuda_arena *waiting;

/* The memory of vmm lives with its mappings; that of ipc must be the owner's until the last. */
static bool can_go(const struct cofi_cuda_arena *m)
{
    return m->own.is_vmm || !m->peers ||
           (int)atomic_load(&cofi_cuda_control(m, m->rank)->n_closed) >= m->n_ranks - 1;
}

/* A rank that failed before it had any says so too. */
static void close_peers(struct cofi_cuda_arena *m)
{
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank)
            continue;
        if (m->peers)
            cofi_cuda_block_close(&m->peers[r]);
        atomic_fetch_add(&cofi_cuda_control(m, r)->n_closed, 1);
    }
}

/* In the device's context. */
static void finish(struct cofi_cuda_arena *m)
{
    cofi_cuda_block_close(&m->own);
    if (m->control_block.base) {
        cofi_cuda_block_close(&m->control_block);
    } else {
        if (m->control_on_device && cudaHostUnregister(m->control) != cudaSuccess)
            cudaGetLastError();
        munmap(m->control, m->control_bytes * (size_t)m->n_ranks);
    }
    free(m->peers);
    free(m);
}

static struct cofi_cuda_arena *take_next_that_can_go(void)
{
    pthread_mutex_lock(&lock);
    struct cofi_cuda_arena **at = &waiting;
    while (*at && !can_go(*at))
        at = &(*at)->next;
    struct cofi_cuda_arena *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

void cofi_cuda_control_sweep(void)
{
    struct cofi_cuda_arena *m;
    while ((m = take_next_that_can_go())) {
        struct cofi_cuda_scope scope;
        if (cofi_cuda_enter(m->device, &scope) != COF_OK)
            return; /* the device is lost, and its memory with it */
        finish(m);
        cofi_cuda_leave(&scope);
    }
}

void cofi_cuda_control_close(cof_arena *a)
{
    struct cofi_cuda_arena *m = cofi_cuda_arena(a);
    struct cofi_cuda_scope scope;
    a->mapping = NULL;
    if (!m || cofi_cuda_enter(m->device, &scope) != COF_OK)
        return;
    close_peers(m);
    if (can_go(m)) {
        finish(m);
    } else {
        pthread_mutex_lock(&lock);
        m->next = waiting;
        waiting = m;
        pthread_mutex_unlock(&lock);
    }
    cofi_cuda_leave(&scope);
}
