/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A rank of `cofuse bench runtime` on a CUDA device. Times are those of the device, by events round
 * all operations of a call; every wait is bounded: those of cof_wait by the world's timeout, those
 * of kernels within, those of the stream from here. */
#include <cuda.h>
#include <stdlib.h>
#include <time.h>

#include "core/clock.h"
#include "ops/runtime/runtime_bench_cuda.h"
#include "symm/engine_cuda.h"
#include "symm/kernels_cuda.h"

enum { MAX_EAGER = 100, SHARED_ROUNDS = 20 };
static const int64_t start_limit_ns = 2000000000, stream_limit_ns = 10000000000;

typedef CUresult (*stream_value_fn)(CUstream, CUdeviceptr, cuuint64_t, unsigned);

struct cuda_part {
    int device;
    cudaStream_t stream, busy, aside; /* of the highest priority, of the lowest, for the host */
    cudaEvent_t begin, end;
    cudaGraph_t graph;
    cudaGraphExec_t replay; /* `count` operations; NULL: eager */
    int64_t n_launches;     /* of the graph, in a call */
    char *peers_data;
    uint64_t *own_word, *peers_word; /* of cof_signal; here rounds without it keep theirs */
    uint64_t n_rounds;               /* within kernels so far */
    uint64_t *flags;                 /* pinned: what STOP shall become, STARTED, LATE */
    uint64_t *stop;                  /* device memory */
    float *sink;
    stream_value_fn write_value, wait_value;
};
enum { STOP, STARTED, LATE, N_FLAGS };

/* ---- operations ----------------------------------------------------------------------------- */

/* A word has the values 2 to count + 1 one after the other; 1 is the round before a call. Waits are
 * for equality, for a captured call stores the same values each time. No value is missed: the next
 * one is stored only when its writer has seen the answer to the one before. */
static cof_status enqueue_stream_round(struct cofi_rb *b, uint64_t value)
{
    struct cuda_part *p = b->cuda;
    bool begins = b->job.rank <= b->peer;
    CUdeviceptr own = (CUdeviceptr)p->own_word, peers = (CUdeviceptr)p->peers_word;
    CUresult result = CUDA_SUCCESS;
    if (begins)
        result = p->write_value(p->stream, peers, value, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (result == CUDA_SUCCESS)
        result = p->wait_value(p->stream, own, value, CU_STREAM_WAIT_VALUE_EQ);
    if (result == CUDA_SUCCESS && !begins)
        result = p->write_value(p->stream, peers, value, CU_STREAM_WRITE_VALUE_DEFAULT);
    COF_FAIL_IF(result != CUDA_SUCCESS, COF_ERR_SYSTEM,
                "cuStreamWriteValue64, cuStreamWaitValue64: CUDA's error %d", (int)result);
    return COF_OK;
}

static cof_status enqueue_kernel_rounds(struct cofi_rb *b, uint64_t n)
{
    struct cuda_part *p = b->cuda;
    struct cofi_rb_rounds rounds = {.own = p->own_word, .peers = p->peers_word,
                                    .first = p->n_rounds + 1, .n = n, .late = &p->flags[LATE],
                                    .begins = b->job.rank <= b->peer};
    p->n_rounds += n;
    COF_CUDA(cofi_rb_launch_rounds(&rounds, p->stream));
    return COF_OK;
}

static cof_status enqueue_transfer(struct cofi_rb *b, int64_t idx)
{
    struct cuda_part *p = b->cuda;
    size_t bytes = (size_t)b->c.bytes, at = (size_t)(idx % b->n_slots) * bytes;
    bool is_put = b->c.form == COFI_RB_PUT;
    char *dst = is_put ? p->peers_data + at : b->local + at;
    const char *src = is_put ? b->local + at : p->peers_data + at;
    if (b->c.by == COFI_RB_ENGINE)
        COF_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, p->stream));
    else
        COF_CUDA(cofi_launch_copy(b->arena->on_device, dst, src, bytes, !is_put, (int)b->c.blocks,
                                  p->stream));
    return COF_OK;
}

static cof_status enqueue_one(struct cofi_rb *b, int64_t idx)
{
    struct cuda_part *p = b->cuda;
    if (b->c.by == COFI_RB_CALL)
        return cofi_rb_call(b, idx);
    if (b->c.by == COFI_RB_STREAM)
        return enqueue_stream_round(b, (uint64_t)idx + 2);
    if (b->c.form != COFI_RB_EMPTY)
        return enqueue_transfer(b, idx);
    COF_CUDA(cofi_rb_launch_empty(p->stream));
    return COF_OK;
}

static cof_status enqueue_all(struct cofi_rb *b)
{
    if (b->c.form == COFI_RB_ROUND && b->c.by == COFI_RB_KERNEL)
        return enqueue_kernel_rounds(b, (uint64_t)b->c.count);
    for (int64_t i = 0; i < b->c.count; i++)
        COF_TRY(enqueue_one(b, i));
    return COF_OK;
}

static cof_status enqueue_call(struct cofi_rb *b)
{
    struct cuda_part *p = b->cuda;
    if (!p->replay)
        return enqueue_all(b);
    for (int64_t i = 0; i < p->n_launches; i++)
        COF_CUDA(cudaGraphLaunch(p->replay, p->stream));
    return COF_OK;
}

/* The pair meets on the device: its clocks then begin together, whenever the hosts came. */
static cof_status enqueue_meeting(struct cofi_rb *b)
{
    if (b->c.form != COFI_RB_ROUND)
        return COF_OK;
    if (b->c.by == COFI_RB_KERNEL)
        return enqueue_kernel_rounds(b, 1);
    return b->c.by == COFI_RB_STREAM ? enqueue_stream_round(b, 1) : cofi_rb_call(b, 0);
}

/* ---- a busy device -------------------------------------------------------------------------- */

/* By the copy engine, beside the kernel. */
static cof_status set_stop(struct cuda_part *p, uint64_t value)
{
    p->flags[STOP] = value;
    COF_CUDA(cudaMemcpyAsync(p->stop, &p->flags[STOP], sizeof *p->stop, cudaMemcpyHostToDevice,
                             p->aside));
    COF_CUDA(cudaStreamSynchronize(p->aside));
    return COF_OK;
}

static cof_status start_busy(struct cuda_part *p)
{
    COF_TRY(set_stop(p, 0));
    __atomic_store_n(&p->flags[STARTED], 0, __ATOMIC_SEQ_CST);
    COF_CUDA(cofi_rb_launch_busy(p->stop, &p->flags[STARTED], p->sink, p->busy));
    for (int64_t begin = cofi_now(); !__atomic_load_n(&p->flags[STARTED], __ATOMIC_SEQ_CST);)
        COF_FAIL_IF(cofi_now() - begin > start_limit_ns, COF_ERR_TIMEOUT,
                    "bench: the busy kernel did not start within 2 s");
    return COF_OK;
}

static cof_status stop_busy(struct cuda_part *p)
{
    COF_TRY(set_stop(p, 1));
    COF_CUDA(cudaStreamSynchronize(p->busy));
    return COF_OK;
}

/* ---- waiting for the end -------------------------------------------------------------------- */

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* A stream's wait has no deadline of its own: the host stores the values that it may be at, one
 * after the other, until the stream has ended or been through them all. */
static cof_status release_stream(struct cofi_rb *b)
{
    struct cuda_part *p = b->cuda;
    for (int64_t n = 0; n <= b->c.count && cudaStreamQuery(p->stream) == cudaErrorNotReady; n++) {
        uint64_t value = (uint64_t)n + 1;
        COF_CUDA(cudaMemcpyAsync(p->own_word, &value, sizeof value, cudaMemcpyHostToDevice,
                                 p->aside));
        COF_CUDA(cudaStreamSynchronize(p->aside));
        sleep_ms(1);
    }
    return COF_FAIL(COF_ERR_TIMEOUT, "bench: rank %d: the stream still waited for rank %d after "
                    "%lld s", b->job.rank, b->peer, (long long)(stream_limit_ns / 1000000000));
}

static cof_status finish(struct cofi_rb *b)
{
    struct cuda_part *p = b->cuda;
    if (b->c.by == COFI_RB_STREAM) {
        cudaError_t state = cudaErrorNotReady;
        for (int64_t begin = cofi_now(); state == cudaErrorNotReady;) {
            if (cofi_now() - begin > stream_limit_ns)
                return release_stream(b);
            state = cudaEventQuery(p->end);
        }
    }
    COF_CUDA(cudaStreamSynchronize(p->stream));
    COF_FAIL_IF(p->flags[LATE], COF_ERR_TIMEOUT,
                "bench: rank %d: a round with rank %d took over 5 s", b->job.rank, b->peer);
    return COF_OK;
}

static cof_status time_once(struct cofi_rb *b, int direction, double *seconds)
{
    struct cuda_part *p = b->cuda;
    float ms = 0;
    COF_TRY(enqueue_meeting(b));
    COF_CUDA(cudaEventRecord(p->begin, p->stream));
    int64_t begin = cofi_now();
    COF_TRY(enqueue_call(b));
    int64_t enqueued = cofi_now() - begin;
    COF_CUDA(cudaEventRecord(p->end, p->stream));
    COF_TRY(finish(b));
    COF_CUDA(cudaEventElapsedTime(&ms, p->begin, p->end));
    *seconds = direction == COFI_RB_ENQUEUE ? (double)enqueued * 1e-9 : (double)ms * 1e-3;
    *seconds /= (double)(b->c.count * p->n_launches);
    return COF_OK;
}

cof_status cofi_rb_cuda_time(struct cofi_rb *b, int direction, double *seconds)
{
    struct cuda_part *p = b->cuda;
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(p->device, &scope));
    cof_status status = b->c.busy ? start_busy(p) : COF_OK;
    if (status == COF_OK && b->c.busy) /* what went before took each rank another while */
        status = cof_team_barrier(b->job.team);
    if (status == COF_OK && b->peer >= 0)
        status = time_once(b, direction, seconds);
    if (b->c.busy) {
        cof_status stopped = stop_busy(p);
        status = status == COF_OK ? stopped : status;
    }
    cofi_cuda_leave(&scope);
    return status;
}

/* ---- open and close ------------------------------------------------------------------------- */

static cof_status find_entry(const char *name, stream_value_fn *fn_out)
{
    enum cudaDriverEntryPointQueryResult found;
    void *fn = NULL;
    COF_CUDA(cudaGetDriverEntryPointByVersion(name, &fn, 12000, cudaEnableDefault, &found));
    COF_FAIL_IF(found != cudaDriverEntryPointSuccess || !fn, COF_ERR_UNSUPPORTED,
                "by=stream: the driver has no %s", name);
    *fn_out = (stream_value_fn)fn;
    return COF_OK;
}

static cof_status open_streams(struct cuda_part *p)
{
    int least = 0, greatest = 0;
    COF_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    COF_CUDA(cudaStreamCreateWithPriority(&p->stream, cudaStreamNonBlocking, greatest));
    COF_CUDA(cudaStreamCreateWithPriority(&p->busy, cudaStreamNonBlocking, least));
    COF_CUDA(cudaStreamCreateWithFlags(&p->aside, cudaStreamNonBlocking));
    COF_CUDA(cudaEventCreate(&p->begin));
    COF_CUDA(cudaEventCreate(&p->end));
    COF_CUDA(cudaHostAlloc((void **)&p->flags, N_FLAGS * sizeof *p->flags,
                           cudaHostAllocMapped | cudaHostAllocPortable));
    for (int i = 0; i < N_FLAGS; i++)
        p->flags[i] = 0;
    COF_CUDA(cudaMalloc((void **)&p->stop, sizeof *p->stop));
    COF_CUDA(cudaMalloc((void **)&p->sink, sizeof *p->sink));
    return COF_OK;
}

static cof_status open_memory(struct cofi_rb *b)
{
    struct cuda_part *p = b->cuda;
    size_t bytes = (size_t)b->n_slots * (size_t)b->c.bytes;
    cof_arena_pointers view = COF_ARENA_POINTERS_INIT;
    COF_CUDA(cudaMalloc((void **)&b->local, bytes ? bytes : 1));
    COF_CUDA(cudaMemsetAsync(b->local, 1, bytes ? bytes : 1, p->stream));
    COF_CUDA(cudaStreamSynchronize(p->stream));
    COF_TRY(cof_arena_view(b->arena, &view));
    if (b->peer < 0)
        return COF_OK;
    COF_FAIL_IF(b->c.by != COFI_RB_CALL && !view.base[b->peer], COF_ERR_UNSUPPORTED,
                "by: wanted call where peers' memory is not at hand (staged form)");
    if (!view.base[b->peer])
        return COF_OK;
    p->peers_data = view.base[b->peer];
    p->own_word = (uint64_t *)(void *)((char *)view.words[b->job.rank] +
                                       (size_t)b->peer * view.word_stride);
    p->peers_word = (uint64_t *)(void *)((char *)view.words[b->peer] +
                                         (size_t)b->job.rank * view.word_stride);
    return COF_OK;
}

static cof_status capture(struct cofi_rb *b)
{
    struct cuda_part *p = b->cuda;
    p->n_launches = b->c.count < MAX_EAGER ? MAX_EAGER / b->c.count : 1;
    if (b->c.form == COFI_RB_ROUND && b->c.by == COFI_RB_STREAM)
        p->n_launches = 1; /* with count = 1 a value would be seen twice */
    COF_CUDA(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeThreadLocal));
    cof_status status = enqueue_all(b);
    cudaError_t ended = cudaStreamEndCapture(p->stream, &p->graph);
    COF_TRY(status);
    COF_CUDA(ended);
    COF_CUDA(cudaGraphInstantiate(&p->replay, p->graph, 0));
    COF_CUDA(cudaGraphUpload(p->replay, p->stream));
    COF_CUDA(cudaStreamSynchronize(p->stream));
    return COF_OK;
}

static cof_status open_part(struct cofi_rb *b)
{
    struct cuda_part *p = b->cuda;
    COF_TRY(open_streams(p));
    b->stream = (cof_stream){COF_STREAM_KIND_CUDA, p->stream};
    COF_TRY(open_memory(b));
    if (b->c.by == COFI_RB_STREAM) {
        COF_TRY(find_entry("cuStreamWriteValue64", &p->write_value));
        COF_TRY(find_entry("cuStreamWaitValue64", &p->wait_value));
    }
    return b->c.how == COFI_RB_GRAPH && b->peer >= 0 ? capture(b) : COF_OK;
}

cof_status cofi_rb_cuda_open(struct cofi_rb *b)
{
    struct cuda_part *p = calloc(1, sizeof *p);
    struct cofi_cuda_scope scope;
    COF_FAIL_IF(!p, COF_ERR_NOMEM, "bench: no memory");
    p->device = b->job.world->device->device;
    p->n_launches = 1;
    b->cuda = p;
    /* Ranks that take turns on a device answer once in a turn, of milliseconds. */
    if (b->c.form == COFI_RB_ROUND && b->job.world->device->most_ranks > 1 &&
        b->c.count > SHARED_ROUNDS)
        b->c.count = SHARED_ROUNDS;
    COF_TRY(cofi_cuda_enter(p->device, &scope));
    cof_status status = open_part(b);
    cofi_cuda_leave(&scope);
    return status;
}

/* Everything has ended, or failed: what is left is released as far as it can be. */
void cofi_rb_cuda_close(struct cofi_rb *b)
{
    struct cuda_part *p = b->cuda;
    struct cofi_cuda_scope scope;
    if (!p || cofi_cuda_enter(p->device, &scope) != COF_OK)
        return;
    if (p->replay)
        cudaGraphExecDestroy(p->replay);
    if (p->graph)
        cudaGraphDestroy(p->graph);
    if (p->begin)
        cudaEventDestroy(p->begin);
    if (p->end)
        cudaEventDestroy(p->end);
    cudaStream_t streams[] = {p->stream, p->busy, p->aside};
    for (int i = 0; i < 3; i++)
        if (streams[i])
            cudaStreamDestroy(streams[i]);
    cudaFree(p->stop);
    cudaFree(p->sink);
    cudaFree(b->local);
    cudaFreeHost(p->flags);
    cofi_cuda_leave(&scope);
    free(p);
}
