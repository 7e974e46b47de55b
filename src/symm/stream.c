/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The public face of streams. */
#include "symm/stream.h"

#include <string.h>

#include "symm/engine.h"

/* The queue of a CPU stream; COF_ERR_INVALID for anything else. */
static cof_status resolve(cof_stream stream, struct cofi_cpu_stream **out)
{
    COF_FAIL_IF(stream.kind != COF_STREAM_KIND_NOW && stream.kind != COF_STREAM_KIND_CPU,
                COF_ERR_INVALID, "stream: kind = %d, wanted 0 (now), 1 (CPU) or 2 (CUDA)",
                stream.kind);
    COF_FAIL_IF(stream.kind == COF_STREAM_KIND_NOW, COF_ERR_INVALID,
                "stream: COF_STREAM_NOW has no queue of its own");
    COF_FAIL_IF(!stream.handle, COF_ERR_INVALID, "stream: handle is NULL");
    *out = stream.handle;
    return cofi_cpu_stream_check(*out);
}

/* The streams of a world are of the kind that its ranks work on. */
static cof_status check_kind(const cof_world *world, cof_stream stream, int wanted)
{
    COF_FAIL_IF(stream.kind != COF_STREAM_KIND_NOW && stream.kind != wanted, COF_ERR_INVALID,
                "stream: kind = %d on a world of engine %s, wanted 0 (now) or %s", stream.kind,
                world->ops->name, wanted == COF_STREAM_KIND_CUDA ? "2 (CUDA)" : "1 (CPU)");
    return COF_OK;
}

static cof_status take_now(cof_world *world)
{
    COF_TRY(cofi_world_usable(world));
    COF_FAIL_IF(atomic_flag_test_and_set_explicit(&world->now_in_use, memory_order_acquire),
                COF_ERR_INVALID,
                "stream: another thread is in a call with COF_STREAM_NOW; threads need streams");
    return COF_OK;
}

static void drop_now(cof_world *world)
{
    atomic_flag_clear_explicit(&world->now_in_use, memory_order_release);
}

cof_status cofi_stream_begin(cof_world *world, cof_stream stream, struct cofi_cpu_stream **out)
{
    COF_TRY(check_kind(world, stream, COF_STREAM_KIND_CPU));
    if (stream.kind != COF_STREAM_KIND_NOW)
        return resolve(stream, out);
    COF_TRY(take_now(world));
    *out = world->stream;
    return COF_OK;
}

cof_status cofi_stream_end(cof_world *world, cof_stream stream, cof_status enqueued)
{
    if (stream.kind != COF_STREAM_KIND_NOW)
        return enqueued;
    cof_status ended = cofi_cpu_stream_sync_and_clear(world->stream);
    drop_now(world);
    return enqueued != COF_OK ? enqueued : ended;
}

cof_status cofi_stream_begin_device(cof_world *world, cof_stream stream, void **out)
{
    COF_TRY(check_kind(world, stream, COF_STREAM_KIND_CUDA));
    *out = stream.handle;
    if (stream.kind != COF_STREAM_KIND_NOW) {
        COF_TRY(cofi_world_usable(world));
        return world->ops->device->check_stream(world, stream.handle);
    }
    COF_TRY(take_now(world));
    *out = world->ops->device->stream_now(world);
    return COF_OK;
}

/* What fails first is what is told: a wait that ended badly left the arena's text, not a status. */
cof_status cofi_stream_end_device(cof_arena *arena, cof_stream stream, cof_status enqueued)
{
    cof_world *world = arena->team->world;
    if (stream.kind != COF_STREAM_KIND_NOW)
        return enqueued;
    const struct cofi_device_ops *device = world->ops->device;
    cof_status ended = enqueued;
    if (enqueued == COF_OK) {
        ended = device->stream_sync(device->stream_now(world));
        if (ended == COF_OK)
            ended = cofi_arena_look(arena);
    } else {
        char text[COFI_ERROR_TEXT_BYTES];
        memcpy(text, cof_last_error(), sizeof text);
        device->stream_sync(device->stream_now(world));
        cofi_fail_text(enqueued, text);
    }
    drop_now(world);
    return ended;
}

/* ---- streams of devices --------------------------------------------------------------------- */

/* The calls on a stream that name no world. */
static cof_status device_of(const struct cofi_device_ops **out)
{
    *out = cofi_cuda_device();
    COF_FAIL_IF(!*out, COF_ERR_UNSUPPORTED,
                "stream: kind = 2 (CUDA): this library was built without CUDA");
    return COF_OK;
}

static cof_status create_on_device(cof_world *world, cof_stream *stream_out)
{
    void *handle = NULL;
    COF_TRY(world->ops->device->stream_open(world, &handle));
    *stream_out = (cof_stream){COF_STREAM_KIND_CUDA, handle};
    return COF_OK;
}

static cof_status record_on_device(cof_event *event)
{
    const struct cofi_device_ops *device;
    COF_TRY(device_of(&device));
    return device->event_record(event->stream.handle, &event->sequence);
}

static cof_status wait_on_device(cof_stream stream, cof_event event)
{
    const struct cofi_device_ops *device;
    COF_TRY(device_of(&device));
    COF_FAIL_IF(stream.kind != event.stream.kind, COF_ERR_INVALID,
                "stream: kind = %d, event.stream: kind = %d: wanted 2 (CUDA) for both; call "
                "cof_stream_sync between streams of two kinds", stream.kind, event.stream.kind);
    return device->event_wait(stream.handle, event.sequence);
}

/* ---- public --------------------------------------------------------------------------------- */

cof_status cof_stream_create(cof_world *world, int n_threads, cof_stream *stream_out)
{
    COF_FAIL_IF(!world, COF_ERR_INVALID, "world: NULL");
    COF_TRY(cofi_world_usable(world));
    COF_FAIL_IF(!stream_out, COF_ERR_INVALID, "stream_out: NULL");
    COF_FAIL_IF(n_threads < 0 || n_threads > 256, COF_ERR_INVALID,
                "n_threads = %d: wanted 0 .. 256", n_threads);
    if (world->ops->device)
        return create_on_device(world, stream_out);
    struct cofi_cpu_stream *s;
    COF_TRY(cofi_world_stream_open(world, n_threads ? n_threads : world->n_threads, true,
                                   "cofuse-stream", &s));
    *stream_out = (cof_stream){COF_STREAM_KIND_CPU, s};
    return COF_OK;
}

void cof_stream_destroy(cof_stream stream)
{
    if (stream.kind == COF_STREAM_KIND_CPU)
        cofi_cpu_stream_close(stream.handle);
    else if (stream.kind == COF_STREAM_KIND_CUDA && cofi_cuda_device())
        cofi_cuda_device()->stream_close(stream.handle);
}

cof_status cof_stream_sync(cof_stream stream)
{
    struct cofi_cpu_stream *s = NULL;
    if (stream.kind == COF_STREAM_KIND_NOW)
        return COF_OK; /* every call on it has ended before it returned */
    if (stream.kind == COF_STREAM_KIND_CUDA) {
        const struct cofi_device_ops *device;
        COF_TRY(device_of(&device));
        return device->stream_sync(stream.handle);
    }
    COF_TRY(resolve(stream, &s));
    return cofi_cpu_stream_sync(s);
}

cof_status cof_event_record(cof_stream stream, cof_event *event_out)
{
    struct cofi_cpu_stream *s = NULL;
    COF_FAIL_IF(!event_out, COF_ERR_INVALID, "event_out: NULL");
    *event_out = (cof_event){stream, 0};
    if (stream.kind == COF_STREAM_KIND_NOW)
        return COF_OK;
    if (stream.kind == COF_STREAM_KIND_CUDA)
        return record_on_device(event_out);
    COF_TRY(resolve(stream, &s));
    event_out->sequence = cofi_cpu_stream_tail(s);
    return COF_OK;
}

cof_status cof_stream_wait_event(cof_stream stream, cof_event event)
{
    struct cofi_cpu_stream *s = NULL, *other = NULL;
    if (event.stream.kind == COF_STREAM_KIND_NOW)
        return COF_OK; /* passed already */
    if (event.stream.kind == COF_STREAM_KIND_CUDA || stream.kind == COF_STREAM_KIND_CUDA)
        return wait_on_device(stream, event);
    COF_TRY(resolve(event.stream, &other));
    COF_FAIL_IF(
        stream.kind == COF_STREAM_KIND_NOW, COF_ERR_INVALID,
        "stream: COF_STREAM_NOW cannot wait for an event; call cof_stream_sync on its stream");
    COF_TRY(resolve(stream, &s));
    COF_FAIL_IF(event.sequence > cofi_cpu_stream_tail(other), COF_ERR_INVALID,
                "event: sequence %llu is past the end of its stream (%llu)",
                (unsigned long long)event.sequence,
                (unsigned long long)cofi_cpu_stream_tail(other));
    cof_status status = cofi_cpu_wait_event(s, other, event.sequence);
    return status != COF_OK ? status : cofi_cpu_stream_sticky(s);
}
