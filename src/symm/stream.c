/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The public face of streams. */
#include "symm/engine.h"
#include "symm/stream.h"

/* The queue of a CPU stream; COF_ERR_INVALID for anything else. */
static cof_status resolve(cof_stream stream, struct cofi_cpu_stream **out)
{
    COF_FAIL_IF(stream.kind != COF_STREAM_KIND_NOW && stream.kind != COF_STREAM_KIND_CPU,
                COF_ERR_INVALID, "stream: kind = %d, wanted 0 (now) or 1 (CPU)", stream.kind);
    COF_FAIL_IF(stream.kind == COF_STREAM_KIND_NOW, COF_ERR_INVALID,
                "stream: COF_STREAM_NOW has no queue of its own");
    COF_FAIL_IF(!stream.handle, COF_ERR_INVALID, "stream: handle is NULL");
    *out = stream.handle;
    return cofi_cpu_stream_check(*out);
}

cof_status cofi_stream_begin(cof_world *world, cof_stream stream, struct cofi_cpu_stream **out)
{
    if (stream.kind != COF_STREAM_KIND_NOW)
        return resolve(stream, out);
    COF_TRY(cofi_world_usable(world));
    COF_FAIL_IF(atomic_flag_test_and_set_explicit(&world->now_in_use, memory_order_acquire),
                COF_ERR_INVALID,
                "stream: another thread is in a call with COF_STREAM_NOW; threads need streams");
    *out = world->stream;
    return COF_OK;
}

cof_status cofi_stream_end(cof_world *world, cof_stream stream, cof_status enqueued)
{
    if (stream.kind != COF_STREAM_KIND_NOW)
        return enqueued;
    cof_status ended = cofi_cpu_stream_sync_and_clear(world->stream);
    atomic_flag_clear_explicit(&world->now_in_use, memory_order_release);
    return enqueued != COF_OK ? enqueued : ended;
}

cof_status cof_stream_create(cof_world *world, int n_threads, cof_stream *stream_out)
{
    COF_FAIL_IF(!world, COF_ERR_INVALID, "world: NULL");
    COF_TRY(cofi_world_usable(world));
    COF_FAIL_IF(!stream_out, COF_ERR_INVALID, "stream_out: NULL");
    COF_FAIL_IF(n_threads < 0 || n_threads > 256, COF_ERR_INVALID,
                "n_threads = %d: wanted 0 .. 256", n_threads);
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
}

cof_status cof_stream_sync(cof_stream stream)
{
    struct cofi_cpu_stream *s = NULL;
    if (stream.kind == COF_STREAM_KIND_NOW)
        return COF_OK; /* every call on it has ended before it returned */
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
    COF_TRY(resolve(stream, &s));
    event_out->sequence = cofi_cpu_stream_tail(s);
    return COF_OK;
}

cof_status cof_stream_wait_event(cof_stream stream, cof_event event)
{
    struct cofi_cpu_stream *s = NULL, *other = NULL;
    if (event.stream.kind == COF_STREAM_KIND_NOW)
        return COF_OK; /* passed already */
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
