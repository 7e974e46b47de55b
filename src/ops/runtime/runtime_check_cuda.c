/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What checks need of CUDA: host memory that devices reach, device memory, copies. Nothing here
 * waits for a kernel of another rank: copies have a stream that no wait is ever enqueued on, and
 * calls of CUDA that wait for the whole device are made only before the ranks begin. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/runtime/runtime_check_cuda.h"
#include "symm/engine_cuda.h"

/* ---- the world's device --------------------------------------------------------------------- */

static cof_status available(void)
{
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    COF_FAIL_IF(error != cudaSuccess, COF_ERR_UNSUPPORTED, "no CUDA device: %s",
                cudaGetErrorString(error));
    COF_FAIL_IF(n == 0, COF_ERR_UNSUPPORTED, "no CUDA device: CUDA counts none in this process");
    return COF_OK;
}

cudaStream_t cofi_check_cuda_stream(const cof_world *world, cof_stream stream)
{
    return stream.kind == COF_STREAM_KIND_NOW ? world->device->now : stream.handle;
}

static void device_name(const cof_world *world, char *text, size_t bytes)
{
    snprintf(text, bytes, "%d", world->device->device);
}

static int n_turns(const cof_world *world)
{
    return cofi_runtime_are_threads(world) ? 1 : world->device->most_ranks;
}

static size_t used_bytes(const cof_world *world)
{
    struct cofi_cuda_scope scope;
    size_t left = 0, total = 0;
    if (cofi_cuda_enter(world->device->device, &scope) != COF_OK)
        return 0;
    bool ok = cudaMemGetInfo(&left, &total) == cudaSuccess;
    cofi_cuda_leave(&scope);
    return ok ? total - left : 0;
}

/* ---- copies --------------------------------------------------------------------------------- */

static cof_status copy_here(cudaStream_t stream, void *dst, const void *src, size_t bytes)
{
    COF_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
    COF_CUDA(cudaStreamSynchronize(stream));
    return COF_OK;
}

static cof_status fill_here(cudaStream_t stream, void *dst, int byte, size_t bytes)
{
    COF_CUDA(cudaMemsetAsync(dst, byte, bytes, stream));
    COF_CUDA(cudaStreamSynchronize(stream));
    return COF_OK;
}

static cof_status copy(cof_world *world, void *dst, const void *src, size_t bytes)
{
    struct cofi_cuda_scope scope;
    if (bytes == 0)
        return COF_OK;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = copy_here(world->device->setup, dst, src, bytes);
    cofi_cuda_leave(&scope);
    return status;
}

static cof_status fill(cof_world *world, void *dst, int byte, size_t bytes)
{
    struct cofi_cuda_scope scope;
    if (bytes == 0)
        return COF_OK;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = fill_here(world->device->setup, dst, byte, bytes);
    cofi_cuda_leave(&scope);
    return status;
}

/* ---- device memory, in stream order --------------------------------------------------------- */

static cof_status alloc_here(cudaStream_t stream, size_t bytes, void **data_out)
{
    void *data;
    COF_CUDA(cudaMallocAsync(&data, bytes, stream));
    *data_out = data;
    return fill_here(stream, data, 0, bytes);
}

cof_status cofi_check_cuda_alloc(cof_world *world, size_t bytes, void **data_out)
{
    struct cofi_cuda_scope scope;
    *data_out = NULL;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = alloc_here(world->device->setup, bytes, data_out);
    cofi_cuda_leave(&scope);
    return status;
}

void cofi_check_cuda_free(cof_world *world, void *data)
{
    struct cofi_cuda_scope scope;
    if (!data || cofi_cuda_enter(world->device->device, &scope) != COF_OK)
        return;
    cudaFreeAsync(data, world->device->setup);
    cofi_cuda_leave(&scope);
}

/* ---- host memory: a pool of pages ----------------------------------------------------------- */

enum { PAGE_BYTES = 4096, CHUNK_PAGES = 8192, MAX_CHUNKS = 512 };
#define INSIDE UINT32_MAX

struct chunk {
    char *base;
    uint32_t piece[CHUNK_PAGES]; /* pages of the piece that begins here; INSIDE one; 0: free */
};

static struct {
    pthread_mutex_t lock;
    struct chunk *chunks[MAX_CHUNKS];
    int n_chunks, n_open;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static cof_status add_chunk(void)
{
    COF_FAIL_IF(pool.n_chunks == MAX_CHUNKS, COF_ERR_NOMEM, "check: %d ranks in one process",
                pool.n_open);
    struct chunk *chunk = calloc(1, sizeof *chunk);
    COF_FAIL_IF(!chunk, COF_ERR_NOMEM, "check: no memory");
    cudaError_t error = cudaHostAlloc((void **)&chunk->base, (size_t)PAGE_BYTES * CHUNK_PAGES,
                                      cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) {
        free(chunk);
        return cofi_cuda_error(__FILE_NAME__, __LINE__, error, "cudaHostAlloc");
    }
    pool.chunks[pool.n_chunks++] = chunk;
    return COF_OK;
}

/* The first page of so many free ones; CHUNK_PAGES: there are not. */
static uint32_t find_room(const struct chunk *chunk, uint32_t n)
{
    uint32_t n_free = 0;
    for (uint32_t i = 0; i < CHUNK_PAGES; i++) {
        n_free = chunk->piece[i] ? 0 : n_free + 1;
        if (n_free == n)
            return i + 1 - n;
    }
    return CHUNK_PAGES;
}

static void *take_pages(struct chunk *chunk, uint32_t n)
{
    uint32_t first = find_room(chunk, n);
    if (first == CHUNK_PAGES)
        return NULL;
    for (uint32_t i = 1; i < n; i++)
        chunk->piece[first + i] = INSIDE;
    chunk->piece[first] = n;
    return chunk->base + (size_t)first * PAGE_BYTES;
}

static void *pool_alloc(size_t bytes)
{
    void *data = NULL;
    if (bytes > (size_t)PAGE_BYTES * CHUNK_PAGES)
        return NULL;
    uint32_t n = bytes ? (uint32_t)((bytes + PAGE_BYTES - 1) / PAGE_BYTES) : 1;
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < pool.n_chunks && !data; i++)
        data = take_pages(pool.chunks[i], n);
    pthread_mutex_unlock(&pool.lock);
    return data;
}

static void pool_free(void *data)
{
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; data && i < pool.n_chunks; i++) {
        struct chunk *chunk = pool.chunks[i];
        size_t offset = (size_t)((char *)data - chunk->base);
        if ((char *)data < chunk->base || offset >= (size_t)PAGE_BYTES * CHUNK_PAGES)
            continue;
        uint32_t first = (uint32_t)(offset / PAGE_BYTES);
        memset(&chunk->piece[first], 0, chunk->piece[first] * sizeof chunk->piece[0]);
    }
    pthread_mutex_unlock(&pool.lock);
}

/* A chunk for each rank of this process. */
static cof_status grow_pool(void)
{
    cof_status status = COF_OK;
    pthread_mutex_lock(&pool.lock);
    pool.n_open++;
    if (pool.n_chunks < pool.n_open)
        status = add_chunk();
    pthread_mutex_unlock(&pool.lock);
    return status;
}

/* ---- opening -------------------------------------------------------------------------------- */

static void CUDART_CB do_nothing(void *arg)
{
    (void)arg;
}

/* The first call of a kind loads, makes threads, takes memory: none of that may wait behind a
 * kernel that waits. What the device's pool has had once, it keeps. */
static cof_status warm_up(const struct cofi_cuda_world *device)
{
    cudaMemPool_t memory;
    uint64_t all = UINT64_MAX;
    void *data;
    COF_CUDA(cofi_check_cuda_load());
    COF_CUDA(cudaDeviceGetDefaultMemPool(&memory, device->device));
    COF_CUDA(cudaMemPoolSetAttribute(memory, cudaMemPoolAttrReleaseThreshold, &all));
    COF_CUDA(cudaMallocAsync(&data, (size_t)32 << 20, device->setup));
    COF_CUDA(cudaFreeAsync(data, device->setup));
    COF_CUDA(cudaLaunchHostFunc(device->setup, do_nothing, NULL));
    COF_CUDA(cudaStreamSynchronize(device->setup));
    return grow_pool();
}

static cof_status open_world(cof_world *world)
{
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = warm_up(world->device);
    cofi_cuda_leave(&scope);
    return status;
}

static void close_world(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.n_open--;
    pthread_mutex_unlock(&pool.lock);
}

/* ---- the arena's epoch ---------------------------------------------------------------------- */

static cof_status epoch(cof_arena *arena, uint32_t *epoch_out)
{
    const struct cofd_arena *on_device = arena->on_device;
    return copy(arena->team->world, epoch_out, &on_device->epoch, sizeof *epoch_out);
}

static cof_status set_epoch(cof_arena *arena, uint32_t value)
{
    struct cofd_arena *on_device = arena->on_device;
    return copy(arena->team->world, &on_device->epoch, &value, sizeof value);
}

/* ---- tables --------------------------------------------------------------------------------- */

#define LINES(n) (UINT64_C(n) << 2 | COFI_LITMUS_LINE)
#define WORDS(n) (UINT64_C(n) << 2 | COFI_LITMUS_WORD)
#define HALVES(n) (UINT64_C(n) << 2 | COFI_LITMUS_HALVES)

static const struct cofi_runtime_case cases[] = {
    {"case=put_get memory=device bytes=1", cofi_runtime_cuda_put_get, 1, 1, 0},
    {"case=put_get memory=device bytes=4099", cofi_runtime_cuda_put_get, 4099, 1, 0},
    {"case=put_get memory=device bytes=1048581", cofi_runtime_cuda_put_get, 1048581, 1, 0},
    {"case=put_get memory=device bytes=67108864", cofi_runtime_cuda_put_get, 1 << 26, 1, 0},
    {"case=message_passing memory=device bytes=5001", cofi_runtime_cuda_message_passing, 5001, 2,
     0},
    {"case=message_passing memory=device bytes=1048581", cofi_runtime_cuda_message_passing, 1048581,
     2, 0},
    {"case=sharing form=late epoch=jumped", cofi_runtime_late, 1, 1, 0},
    {"case=streams", cofi_runtime_cuda_streams, 0, 2, 0},
    {"case=busy", cofi_runtime_cuda_busy, 0, 2, 0},
    {"case=tagged", cofi_runtime_cuda_tagged, 0, 2, 0},
    {"case=litmus unit=line count=8", cofi_runtime_cuda_litmus, LINES(8), 1, 0},
    {"case=litmus unit=line count=65536", cofi_runtime_cuda_litmus, LINES(65536), 1, 0},
    {"case=litmus unit=word count=64", cofi_runtime_cuda_litmus, WORDS(64), 1, 0},
    {"case=litmus unit=word count=524288", cofi_runtime_cuda_litmus, WORDS(524288), 1, 0},
    {"case=litmus unit=halves count=64", cofi_runtime_cuda_litmus, HALVES(64), 1, 0},
    {"case=graph form=transfers", cofi_runtime_cuda_graph, 0, 1, 0},
    {"case=graph form=calls", cofi_runtime_cuda_graph_calls, 0, 1, 0},
    {"case=graph form=poison", cofi_runtime_cuda_graph_poison, 0, 2, COFI_CAP_WORLDS},
};

static const struct cofi_runtime_device runtime = {
    .cases = cases,
    .n_cases = sizeof cases / sizeof cases[0],
    .name = device_name,
    .n_turns = n_turns,
    .used_bytes = used_bytes,
    .epoch = epoch,
    .set_epoch = set_epoch,
    .op_open = cofi_runtime_cuda_op_open,
    .op_call = cofi_runtime_cuda_op_call,
    .op_inspect = cofi_runtime_cuda_op_inspect,
    .op_close = cofi_runtime_cuda_op_close,
};

extern const struct cofi_check_device cofi_check_device_cuda;
const struct cofi_check_device cofi_check_device_cuda = {
    .available = available,
    .open = open_world,
    .close = close_world,
    .alloc = pool_alloc,
    .free = pool_free,
    .copy = copy,
    .fill = fill,
    .blocks_open = cofi_check_cuda_blocks_open,
    .blocks_close = cofi_check_cuda_blocks_close,
    .memory_open = cofi_check_cuda_alloc,
    .memory_close = cofi_check_cuda_free,
    .capture = cofi_check_cuda_capture,
    .replay = cofi_check_cuda_replay,
    .release = cofi_check_cuda_release,
    .time = cofi_check_cuda_time,
    .timer_open = cofi_check_cuda_timer_open,
    .timer_close = cofi_check_cuda_timer_close,
    .runtime = &runtime,
};
