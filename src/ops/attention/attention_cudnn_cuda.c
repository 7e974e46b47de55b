/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The engine "cudnn": attention sections by cuDNN 9.
 *
 * Making an execution plan compiles a kernel, which takes a second or two, so the process keeps the
 * plans of the shapes it has seen, also of those that cuDNN refuses. A plan is immutable and serves
 * any number of kernels; each kernel has a handle of its own, since cuDNN's handles, which carry
 * the stream, are for one thread at a time. One lock is held while plans are made and handed out;
 * runs take none. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/cuda/device_cuda.h"
#include "core/log.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_engine.h"
#include "ops/attention/attention_unseen_cuda.h"

enum {
    MAX_WORKSPACE = 512 << 20, /* bytes */
    MAX_IDLE = 64,             /* plans kept without a kernel that uses them */
};

/* A shape, and what cuDNN made of it. */
struct planned {
    struct planned *next; /* the last used one first */
    int device;
    struct cofi_attention_shape shape;
    struct cofi_cudnn_part part;
    cof_status status;
    char why[COFI_ERROR_TEXT_BYTES]; /* where status is an error */
    struct cofi_cudnn_plan plan;     /* no descriptor where no row sees a key */
    bool has_run;
    int n_kernels;
};

/* A handle that no kernel has. */
struct idle_handle {
    struct idle_handle *next;
    int device;
    void *handle;
};

static struct {
    pthread_mutex_t lock;
    struct planned *plans;
    struct idle_handle *handles;
} cache = {PTHREAD_MUTEX_INITIALIZER, NULL, NULL};

struct cofi_attention_kernel {
    const struct cofi_cudnn *lib;
    struct planned *planned;
    void *handle; /* NULL where no row sees a key */
};

/* ---- handles, under the lock and in the device's context ------------------------------------ */

static cof_status take_handle(const struct cofi_cudnn *lib, int device, void **handle)
{
    for (struct idle_handle **at = &cache.handles; *at; at = &(*at)->next) {
        struct idle_handle *found = *at;
        if (found->device != device)
            continue;
        *at = found->next;
        *handle = found->handle;
        free(found);
        COF_CUDNN(lib, SetStream(*handle, NULL)); /* its last one may be gone */
        return COF_OK;
    }
    COF_CUDNN(lib, Create(handle));
    return COF_OK;
}

static void give_handle(const struct cofi_cudnn *lib, int device, void *handle)
{
    struct idle_handle *idle = handle ? malloc(sizeof *idle) : NULL;
    if (idle) {
        *idle = (struct idle_handle){cache.handles, device, handle};
        cache.handles = idle;
    } else if (handle) {
        lib->Destroy(handle);
    }
}

/* ---- plans, under the lock ------------------------------------------------------------------ */

/* Without what lies between the fields, so that shapes compare as bytes. */
static void copy_shape(struct cofi_attention_shape *key, const struct cofi_attention_shape *s)
{
    memset(key, 0, sizeof *key);
    key->elem = s->elem;
    key->o_f32 = s->o_f32;
    key->n_batch = s->n_batch;
    key->n_heads = s->n_heads;
    key->n_kv_heads = s->n_kv_heads;
    key->dim_qk = s->dim_qk;
    key->dim_v = s->dim_v;
    key->q_rows = s->q_rows;
    key->k_rows = s->k_rows;
    key->band = s->band;
    key->scale = s->scale;
    key->q = s->q;
    key->k = s->k;
    key->v = s->v;
    key->o = s->o;
    key->lse_batch = s->lse_batch;
    key->lse_head = s->lse_head;
}

static cof_status make_graph_plan(const struct cofi_cudnn *lib, struct planned *p, void *handle,
                                  bool is_unified)
{
    struct cofi_cudnn_graph graph;
    const struct cofi_cudnn_target target = {handle, NULL};
    cofi_cudnn_graph_begin(&graph, lib);
    cofi_cudnn_forward_graph(&graph, &p->shape, &p->part, is_unified);
    cof_status status = cofi_cudnn_graph_plan(&graph, &target, MAX_WORKSPACE, &p->plan);
    cofi_cudnn_graph_end(&graph);
    return status;
}

/* A release may know attention as one operation, but have no engine for it on this device. */
static cof_status make_plan(const struct cofi_cudnn *lib, struct planned *p, void *handle)
{
    if (cofi_cudnn_forward_is_unified(lib, &p->part) &&
        make_graph_plan(lib, p, handle, true) == COF_OK)
        return COF_OK;
    return make_graph_plan(lib, p, handle, false);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static cof_status prepare(const struct cofi_cudnn *lib, struct planned *p)
{
    void *handle = NULL;
    const double begin = seconds();
    cofi_cudnn_part(&p->shape, &p->part);
    COF_TRY(cofi_cudnn_forward_check(lib, &p->shape, &p->part));
    COF_CUDA(cofi_load_attention_unseen());
    if (p->part.q_rows == 0)
        return COF_OK;
    COF_TRY(take_handle(lib, p->device, &handle));
    cof_status status = make_plan(lib, p, handle);
    give_handle(lib, p->device, handle);
    if (status == COF_OK)
        cofi_log(COFI_LOG_PLAN,
                 "cuDNN: a plan for %lld rows by %lld keys, %lld bytes of workspace, in %.0f ms",
                 (long long)p->part.q_rows, (long long)p->part.k_rows,
                 (long long)p->plan.workspace_bytes, 1e3 * (seconds() - begin));
    return status;
}

/* The plans that have not been used for longest go, beyond MAX_IDLE. */
static void evict(const struct cofi_cudnn *lib)
{
    struct cofi_cuda_scope scope;
    int n_idle = 0;
    for (struct planned **at = &cache.plans; *at;) {
        struct planned *p = *at;
        n_idle += p->n_kernels == 0;
        if (p->n_kernels || n_idle <= MAX_IDLE) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        if (cofi_cuda_enter(p->device, &scope) == COF_OK) {
            cofi_cudnn_plan_close(lib, &p->plan);
            cofi_cuda_leave(&scope);
        }
        free(p);
    }
}

/* NULL: not seen yet. It becomes the first. */
static struct planned *look_up(int device, const struct cofi_attention_shape *key)
{
    for (struct planned **at = &cache.plans; *at; at = &(*at)->next) {
        struct planned *p = *at;
        if (p->device != device || memcmp(&p->shape, key, sizeof *key) != 0)
            continue;
        *at = p->next;
        p->next = cache.plans;
        cache.plans = p;
        return p;
    }
    return NULL;
}

/* The shape's plan, made where it is new; the error again where cuDNN had one for it. */
static cof_status get_plan(const struct cofi_cudnn *lib, int device,
                           const struct cofi_attention_shape *shape, struct planned **out)
{
    struct cofi_attention_shape key;
    copy_shape(&key, shape);
    struct planned *p = look_up(device, &key);
    if (!p) {
        p = calloc(1, sizeof *p);
        COF_FAIL_IF(!p, COF_ERR_NOMEM, "cuDNN: no memory for a plan");
        p->device = device;
        p->shape = key;
        p->status = prepare(lib, p);
        if (p->status != COF_OK && p->status != COF_ERR_UNSUPPORTED) { /* it may work later */
            cof_status status = p->status;
            free(p);
            return status;
        }
        if (p->status != COF_OK)
            snprintf(p->why, sizeof p->why, "%s", cof_last_error());
        p->next = cache.plans;
        cache.plans = p;
        evict(lib);
    }
    if (p->status != COF_OK)
        return cofi_fail_text(p->status, p->why);
    *out = p;
    return COF_OK;
}

/* ---- runs ----------------------------------------------------------------------------------- */

/* Elements from the first to behind the last. */
static int64_t extent(const struct cofi_attention_shape *s, int64_t heads, int64_t rows,
                      int64_t dim, const struct cofi_attention_strides *t)
{
    return (s->n_batch - 1) * t->batch + (rows - 1) * t->row + (heads - 1) * t->head + dim;
}

static cof_status check_pointer(const char *name, const void *pointer, uintptr_t alignment)
{
    COF_FAIL_IF((uintptr_t)pointer % alignment, COF_ERR_INVALID,
                "attention by cuDNN: %s at %p: wanted %d-byte aligned", name, pointer,
                (int)alignment);
    return COF_OK;
}

static cof_status fill_unseen(const struct planned *p, void *o, float *lse, cudaStream_t stream)
{
    const struct cofi_attention_shape *s = &p->shape;
    const int64_t behind = p->part.q_begin + p->part.q_rows;
    const struct cofi_attention_unseen unseen = {
        .o = o, .lse = lse, .n_batch = s->n_batch, .n_heads = s->n_heads, .dim_v = s->dim_v,
        .o_batch = s->o.batch, .o_row = s->o.row, .o_head = s->o.head,
        .lse_batch = s->lse_batch, .lse_head = s->lse_head, .rows_before = p->part.q_begin,
        .behind_begin = behind, .rows_behind = s->q_rows - behind};
    COF_CUDA(cofi_launch_attention_unseen(&unseen, stream));
    return COF_OK;
}

static cof_status run(const struct cofi_attention_kernel *kernel, const void *q, const void *k,
                      const void *v, void *o, float *lse, void *workspace, void *stream)
{
    static const int64_t uids[5] = {COFI_CUDNN_Q, COFI_CUDNN_K, COFI_CUDNN_V, COFI_CUDNN_O,
                                    COFI_CUDNN_LSE};
    const struct planned *p = kernel->planned;
    const struct cofi_attention_shape *s = &p->shape;
    const struct cofi_cudnn_part *part = &p->part;
    COF_TRY(check_pointer("q", q, COFI_CUDNN_ALIGNMENT));
    COF_TRY(check_pointer("k", k, COFI_CUDNN_ALIGNMENT));
    COF_TRY(check_pointer("v", v, COFI_CUDNN_ALIGNMENT));
    COF_TRY(check_pointer("o", o, COFI_CUDNN_ALIGNMENT));
    COF_TRY(check_pointer("lse", lse, sizeof *lse));
    COF_TRY(fill_unseen(p, o, lse, stream));
    if (part->q_rows == 0)
        return COF_OK;
    void *const pointers[5] = {
        (char *)(uintptr_t)q + 2 * part->q_begin * s->q.row, /* cuDNN takes no const pointers */
        (char *)(uintptr_t)k + 2 * part->k_begin * s->k.row,
        (char *)(uintptr_t)v + 2 * part->k_begin * s->v.row,
        (char *)o + 2 * part->q_begin * s->o.row, lse + part->q_begin};
    COF_CUDNN(kernel->lib, SetStream(kernel->handle, stream));
    return cofi_cudnn_plan_run(kernel->lib, &p->plan, kernel->handle, 5, uids, pointers, workspace);
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* All tensors of the run are the same memory, of any contents; the workspace is behind it. */
static cof_status run_once(const struct cofi_attention_kernel *kernel, char *memory,
                           int64_t tensor_bytes, cudaStream_t stream)
{
    COF_TRY(run(kernel, memory, memory, memory, memory, (float *)(void *)memory,
                memory + tensor_bytes, stream));
    COF_CUDA(cudaStreamSynchronize(stream));
    COF_CUDNN(kernel->lib, SetStream(kernel->handle, NULL)); /* for this stream goes */
    return COF_OK;
}

static int64_t warm_up_bytes(const struct cofi_attention_shape *s)
{
    int64_t bytes = most(most(extent(s, s->n_heads, s->q_rows, s->dim_qk, &s->q),
                              extent(s, s->n_heads, s->q_rows, s->dim_v, &s->o)),
                         most(extent(s, s->n_kv_heads, s->k_rows, s->dim_qk, &s->k),
                              extent(s, s->n_kv_heads, s->k_rows, s->dim_v, &s->v))) * 2;
    bytes = most(bytes, 4 * ((s->n_batch - 1) * s->lse_batch + (s->n_heads - 1) * s->lse_head +
                             s->q_rows));
    return (bytes + 255) / 256 * 256;
}

/* The first run of a plan may load its kernel, which is wrong while a stream captures, and waits
 * where a kernel that waits for a peer is running: so it is here. The memory is the stream's, for
 * cudaFree would wait for such kernels as well; without it the run is left out. */
static cof_status warm_up(const struct cofi_attention_kernel *kernel)
{
    struct planned *p = kernel->planned;
    cudaStream_t stream;
    void *memory = NULL;
    int64_t bytes = warm_up_bytes(&p->shape);
    COF_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (cudaMallocAsync(&memory, (size_t)(bytes + p->plan.workspace_bytes), stream) !=
        cudaSuccess) {
        cudaGetLastError();
        cudaStreamDestroy(stream);
        cofi_log(COFI_LOG_PLAN, "cuDNN: no memory for a first run of a plan: its kernel is loaded "
                 "by the first call");
        return COF_OK;
    }
    cof_status status = run_once(kernel, memory, bytes, stream);
    cudaFreeAsync(memory, stream);
    cudaStreamDestroy(stream);
    p->has_run = status == COF_OK;
    return status;
}

/* ---- the table's functions ------------------------------------------------------------------ */

/* Under the lock and in the device's context. */
static cof_status open_here(const struct cofi_cudnn *lib, int device,
                            const struct cofi_attention_shape *shape,
                            struct cofi_attention_kernel *kernel)
{
    COF_TRY(get_plan(lib, device, shape, &kernel->planned));
    kernel->lib = lib;
    if (kernel->planned->part.q_rows == 0)
        return COF_OK;
    COF_TRY(take_handle(lib, device, &kernel->handle));
    cof_status status = kernel->planned->has_run ? COF_OK : warm_up(kernel);
    if (status != COF_OK)
        give_handle(lib, device, kernel->handle);
    return status;
}

static cof_status open_kernel(int device, const struct cofi_attention_shape *shape,
                              struct cofi_attention_kernel **kernel_out, size_t *workspace_bytes)
{
    const struct cofi_cudnn *lib;
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cudnn_load(&lib));
    struct cofi_attention_kernel *kernel = calloc(1, sizeof *kernel);
    COF_FAIL_IF(!kernel, COF_ERR_NOMEM, "cuDNN: no memory for a kernel");
    cof_status status = cofi_cuda_enter(device, &scope);
    if (status == COF_OK) {
        pthread_mutex_lock(&cache.lock);
        status = open_here(lib, device, shape, kernel);
        if (status == COF_OK)
            kernel->planned->n_kernels++;
        pthread_mutex_unlock(&cache.lock);
        cofi_cuda_leave(&scope);
    }
    if (status != COF_OK) {
        free(kernel);
        return status;
    }
    *kernel_out = kernel;
    *workspace_bytes = (size_t)kernel->planned->plan.workspace_bytes;
    return COF_OK;
}

static void close_kernel(struct cofi_attention_kernel *kernel)
{
    if (!kernel)
        return;
    pthread_mutex_lock(&cache.lock);
    give_handle(kernel->lib, kernel->planned->device, kernel->handle);
    kernel->planned->n_kernels--;
    evict(kernel->lib);
    pthread_mutex_unlock(&cache.lock);
    free(kernel);
}

static cof_status look(int device, const struct cofi_attention_shape *shape)
{
    const struct cofi_cudnn *lib;
    struct planned *planned;
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cudnn_load(&lib));
    COF_TRY(cofi_cuda_enter(device, &scope));
    pthread_mutex_lock(&cache.lock);
    cof_status status = get_plan(lib, device, shape, &planned);
    pthread_mutex_unlock(&cache.lock);
    cofi_cuda_leave(&scope);
    return status;
}

/* Makes the plan: only so is it known. */
static bool can(int device, const struct cofi_attention_shape *shape, char *why, size_t bytes)
{
    if (look(device, shape) == COF_OK)
        return true;
    snprintf(why, bytes, "%s", cof_last_error());
    return false;
}

const struct cofi_attention_engine cofi_attention_cudnn = {
    .name = "cudnn", .can = can, .open = open_kernel, .run = run, .close = close_kernel};
