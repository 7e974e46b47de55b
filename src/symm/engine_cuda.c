/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Worlds whose ranks work on CUDA devices: opening the device, streams, and the tables of
 * functions. */
#include "symm/engine_cuda.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/driver_cuda.h"
#include "core/config.h"

/* device/spin.h, which is C++, has these numbers as COFD_ERR_* and COFD_PEER_LEFT. */
_Static_assert(COF_ERR_MISMATCH == -10 && COF_ERR_TIMEOUT == -20 && COF_ERR_PEER_DEAD == -30 &&
                   COFI_PEER_LEFT == 1 && sizeof(_Atomic int) == 4,
               "what devices store and read");

/* ---- the device ----------------------------------------------------------------------------- */

static cof_status identify(int n, struct cofi_device_id *ids)
{
    for (int i = 0; i < n; i++) {
        CUuuid uuid;
        COF_DRIVER(cofi_driver()->device_name(ids[i].name, (int)sizeof ids[i].name, i));
        COF_DRIVER(cofi_driver()->device_uuid(&uuid, i));
        memcpy(ids[i].uuid, &uuid, sizeof ids[i].uuid);
    }
    return COF_OK;
}

static cof_status match_device(const char *what, const char *text, int n, int *device_out)
{
    struct cofi_device_id ids[COFI_CUDA_MAX_DEVICES];
    COF_TRY(identify(n, ids));
    return cofi_device_match(what, text, ids, n, device_out);
}

/* As the comment of cof_world_options.device says. */
static cof_status choose_device(const cof_world *w, const cof_world_options *o, int n,
                                int *device_out)
{
    const char *variable = cofi_config_text(COFI_VAR_DEVICE);
    CUcontext current = NULL;
    CUdevice device;
    if (o->device)
        return match_device("options.device", o->device, n, device_out);
    if (*variable)
        return match_device("variable COFUSE_DEVICE", variable, n, device_out);
    COF_DRIVER(cofi_driver()->context_get(&current));
    if (current)
        COF_DRIVER(cofi_driver()->context_device(&device));
    *device_out = current ? (int)device : w->rank % n;
    return COF_OK;
}

static cof_status count_devices(int *n_out)
{
    cudaError_t error = cudaGetDeviceCount(n_out);
    if (error != cudaSuccess)
        cudaGetLastError();
    COF_FAIL_IF(error != cudaSuccess, COF_ERR_UNSUPPORTED,
                "engine cuda: no device can be used here: %s (%s)", cudaGetErrorName(error),
                cudaGetErrorString(error));
    COF_FAIL_IF(*n_out < 1, COF_ERR_UNSUPPORTED, "engine cuda: there is no device here");
    *n_out = *n_out < COFI_CUDA_MAX_DEVICES ? *n_out : COFI_CUDA_MAX_DEVICES;
    return cofi_driver_load();
}

static cof_status choose_max_ctas(struct cofi_cuda_world *d, const cof_world_options *o)
{
    int64_t wanted = o->max_ctas ? o->max_ctas : cofi_config_int(COFI_VAR_MAX_CTAS);
    COF_FAIL_IF(wanted < 0 || wanted > INT_MAX, COF_ERR_INVALID,
                "%s = %lld: wanted at least 0", o->max_ctas ? "options.max_ctas"
                                                            : "variable COFUSE_MAX_CTAS",
                (long long)wanted);
    d->max_ctas = (int)wanted;
    return COF_OK;
}

static cof_status check_architecture(int device)
{
    int major = 0, minor = 0;
    COF_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    COF_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    COF_FAIL_IF(major < 8, COF_ERR_UNSUPPORTED, "engine cuda: device %d is sm_%d%d: wanted sm_80 "
                "or later", device, major, minor);
    return COF_OK;
}

/* One for all worlds of the process on this device, for ever: what it does never waits for a peer,
 * and streams share the device's few queues, where work of one can get behind a wait of another. */
static cof_status take_setup_stream(int device, cudaStream_t *stream_out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static cudaStream_t streams[COFI_CUDA_MAX_DEVICES];
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (!streams[device])
        error = cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking);
    *stream_out = streams[device];
    pthread_mutex_unlock(&lock);
    COF_CUDA(error);
    return COF_OK;
}

/* In the device's context. */
static cof_status open_here(cof_world *w, struct cofi_cuda_world *d)
{
    COF_CUDA(cudaDeviceGetAttribute(&d->n_sms, cudaDevAttrMultiProcessorCount, d->device));
    COF_TRY(cofi_cuda_load_kernels());
    COF_CUDA(cudaStreamCreateWithFlags(&d->now, cudaStreamNonBlocking));
    COF_TRY(take_setup_stream(d->device, &d->setup));
    return cofi_cuda_page_open(w);
}

/* What it has made so far is undone by close. */
static cof_status open_world(cof_world *w, const cof_world_options *o)
{
    int n_devices = 0;
    struct cofi_cuda_scope scope;
    COF_TRY(count_devices(&n_devices));
    struct cofi_cuda_world *d = calloc(1, sizeof *d);
    COF_FAIL_IF(!d, COF_ERR_NOMEM, "world: no memory");
    d->n_ranks_here = d->most_ranks = 1;
    w->device = d;
    COF_TRY(choose_max_ctas(d, o));
    COF_TRY(choose_device(w, o, n_devices, &d->device));
    COF_TRY(check_architecture(d->device));
    COF_TRY(cofi_cuda_enter(d->device, &scope));
    cof_status status = open_here(w, d);
    cofi_cuda_leave(&scope);
    return status;
}

static void close_now(const struct cofi_cuda_world *d)
{
    if (d->now && cudaStreamDestroy(d->now) != cudaSuccess)
        cudaGetLastError();
}

static void close_world(cof_world *w)
{
    struct cofi_cuda_world *d = w->device;
    struct cofi_cuda_scope scope;
    bool is_child = !cofi_process_is_this(&w->made_by);
    if (is_child)
        cofi_cuda_watch_forget(d->watch);
    else
        cofi_cuda_watch_stop(d->watch);
    bool is_entered = !is_child && (d->now || d->page) &&
                      cofi_cuda_enter(d->device, &scope) == COF_OK;
    pthread_mutex_lock(&w->lock);
    cofi_cuda_page_leave(w, is_child);
    w->device = NULL;
    pthread_mutex_unlock(&w->lock);
    cofi_cuda_page_close(d->page, is_child);
    if (is_entered) {
        close_now(d);
        cofi_cuda_leave(&scope);
    }
    if (!is_child)
        cofi_cuda_control_sweep();
    free(d);
}

/* ---- streams -------------------------------------------------------------------------------- */

static int number(const cof_world *w)
{
    return w->device->device;
}

/* A default stream is that of the device whose context is entered. */
static cof_status check_stream(cof_world *w, void *stream)
{
    struct cofi_cuda_scope scope;
    int device = w->device->device;
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
        return COF_OK;
    COF_TRY(cofi_cuda_enter_stream(stream, &scope, &device));
    cofi_cuda_leave(&scope);
    COF_FAIL_IF(device != w->device->device, COF_ERR_INVALID,
                "stream: handle = %p is of device %d; wanted this rank's device, %d", stream,
                device, w->device->device);
    return COF_OK;
}

static void *stream_now(cof_world *w)
{
    return w->device->now;
}

static cof_status create_stream(cudaStream_t *stream)
{
    COF_CUDA(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    return COF_OK;
}

static cof_status stream_open(cof_world *w, void **stream_out)
{
    struct cofi_cuda_scope scope;
    cudaStream_t stream = NULL;
    COF_TRY(cofi_cuda_enter(w->device->device, &scope));
    cof_status status = create_stream(&stream);
    cofi_cuda_leave(&scope);
    *stream_out = stream;
    return status;
}

/* CUDA's default streams are nobody's. */
static void stream_close(void *stream)
{
    cudaStream_t s = stream;
    struct cofi_cuda_scope scope;
    int device;
    if (!s || s == cudaStreamLegacy || s == cudaStreamPerThread ||
        cofi_cuda_enter_stream(s, &scope, &device) != COF_OK)
        return;
    if (cudaStreamDestroy(s) != cudaSuccess)
        cudaGetLastError();
    cofi_cuda_leave(&scope);
}

static cof_status synchronize(cudaStream_t stream)
{
    COF_CUDA(cudaStreamSynchronize(stream));
    return COF_OK;
}

static cof_status stream_sync(void *stream)
{
    struct cofi_cuda_scope scope;
    int device;
    COF_TRY(cofi_cuda_enter_stream(stream, &scope, &device));
    cof_status status = synchronize(stream);
    cofi_cuda_leave(&scope);
    return status;
}

/* What another device holds may not be mapped for this one's kernels: a fault would end the context
 * with all that is in it. */
static cof_status check_memory(cof_arena *a, const char *name, const void *at)
{
    const int own = cofi_cuda_arena(a)->device;
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(own, &scope));
    int device = own;
    enum cudaMemoryType type = cofi_cuda_memory_type(at, &device);
    cofi_cuda_leave(&scope);
    COF_FAIL_IF(type == cudaMemoryTypeDevice && device != own, COF_ERR_INVALID,
                "%s = %p: memory of device %d: wanted memory of this rank's device, %d, or pinned "
                "memory of the host", name, at, device, own);
    const char *is =
        type == cudaMemoryTypeManaged ? "managed memory" : "memory that CUDA does not know";
    COF_FAIL_IF(type != cudaMemoryTypeDevice && type != cudaMemoryTypeHost, COF_ERR_INVALID,
                "%s = %p: %s: wanted device memory, or pinned memory of the host", name, at, is);
    return COF_OK;
}

/* ---- control blocks, from the host ---------------------------------------------------------- */

static char *control_at(const cof_arena *a, int peer, size_t offset)
{
    return (char *)(void *)a->control[peer] + offset;
}

static void put(cof_arena *a, int peer, size_t dst_offset, const void *src, size_t bytes)
{
    memmove(control_at(a, peer, dst_offset), src, bytes);
}

static void get(cof_arena *a, void *dst, int peer, size_t src_offset, size_t bytes)
{
    memmove(dst, control_at(a, peer, src_offset), bytes);
}

/* Devices poll: nobody sleeps on it. */
static void store_word(cof_arena *a, int peer, size_t word_offset, uint64_t value)
{
    atomic_store((_Atomic uint64_t *)(void *)control_at(a, peer, word_offset), value);
}

static uint64_t load(cof_arena *a, int peer, size_t word_offset)
{
    return atomic_load((_Atomic uint64_t *)(void *)control_at(a, peer, word_offset));
}

/* ---- tables --------------------------------------------------------------------------------- */

static const struct cofi_device_ops device_ops = {
    .open = open_world,
    .join = cofi_cuda_join,
    .close = close_world,
    .take_abort_word = cofi_cuda_take_abort_word,
    .drop_abort_word = cofi_cuda_drop_abort_word,
    .number = number,
    .stream_now = stream_now,
    .check_stream = check_stream,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .stream_sync = stream_sync,
    .event_record = cofi_cuda_event_record,
    .event_wait = cofi_cuda_event_wait,
    .check_memory = check_memory,
    .put = cofi_cuda_put,
    .get = cofi_cuda_get,
    .signal = cofi_cuda_signal,
    .wait = cofi_cuda_wait,
    .fill = cofi_cuda_fill,
    .set_words = cofi_cuda_set_words,
    .bind = cofi_cuda_bind,
    .unbind = cofi_cuda_unbind,
};

#define CAPS                                                                                       \
    (COFI_CAP_MAPPED | COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH | COFI_CAP_WORLDS |            \
     COFI_CAP_REINIT)

static const struct cofi_engine_ops engine = {
    .name = "cuda",
    .caps = CAPS,
    .map = cofi_cuda_map,
    .unmap = cofi_cuda_unmap,
    .put = put,
    .get = get,
    .signal = store_word,
    .load = load,
    .device = &device_ops,
};

static const struct cofi_engine_ops attach_engine = {
    .name = "cuda-attach",
    .caps = CAPS,
    .map = cofi_cuda_attach_map,
    .unmap = cofi_cuda_unmap,
    .put = put,
    .get = get,
    .signal = store_word,
    .load = load,
    .device = &device_ops,
};

const struct cofi_engine_ops *cofi_engine_cuda(void)
{
    return &engine;
}

const struct cofi_engine_ops *cofi_engine_cuda_attach(void)
{
    return &attach_engine;
}

const struct cofi_device_ops *cofi_cuda_device(void)
{
    return &device_ops;
}
