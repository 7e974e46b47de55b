/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Streams and events.
 *
 * A stream is an in-order queue of work. On the CPU it has a dispatcher thread and helpers; the
 * calls that run plans only enqueue. Two streams are ordered only by an event.
 *
 * A CPU stream holds 256 queued calls; a call on a full stream waits for room until the run
 * deadline (COF_ERR_BUSY). When queued work fails, the stream becomes *sticky*: later work on it is
 * skipped, later calls and cof_stream_sync return the error with its text, and it can only be
 * destroyed. Argument errors are returned by the call itself and do not make a stream sticky.
 */
#ifndef COFUSE_STREAM_H
#define COFUSE_STREAM_H

#include "world.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cof_stream_kind {
    COF_STREAM_KIND_NOW = 0, /* run on the world's own CPU stream and wait for the end */
    COF_STREAM_KIND_CPU = 1, /* handle is a CPU stream made by cof_stream_create */
    COF_STREAM_KIND_CUDA = 2 /* handle is a cudaStream_t: the caller's, or cof_stream_create's on a
                                world of devices; NULL is CUDA's default stream */
} cof_stream_kind;

/** A stream, by value. Any thread may use it, one at a time; COF_ERR_INVALID where two are seen. */
typedef struct cof_stream {
    int kind; /* cof_stream_kind */
    void *handle;
} cof_stream;

/**
 * The call returns when its work is done, and returns the work's own status. One
 * thread of a world at a time: a second one is refused (COF_ERR_INVALID). A thread that drives more
 * than one rank of a team must use streams instead: with NOW it waits for itself, until the
 * deadline.
 */
#ifdef __cplusplus
#define COF_STREAM_NOW (cof_stream{COF_STREAM_KIND_NOW, nullptr})
#else
#define COF_STREAM_NOW ((cof_stream){COF_STREAM_KIND_NOW, NULL})
#endif

/** A point in a stream's queue, by value; nothing to destroy. */
typedef struct cof_event {
    cof_stream stream;
    uint64_t sequence;
} cof_event;

/**
 * Makes a CPU stream with `n_threads` threads (0: the world's number; at most 256). Local.
 * COF_ERR_INVALID, COF_ERR_NOMEM, COF_ERR_SYSTEM (no thread to be had).
 */
COF_API cof_status cof_stream_create(cof_world *world, int n_threads, cof_stream *stream_out);

/** Ends the threads after the queued work has run. Local. A NOW stream is left alone. */
COF_API void cof_stream_destroy(cof_stream stream);

/** Waits until all work queued so far has run; returns the stream's sticky error, if any. */
COF_API cof_status cof_stream_sync(cof_stream stream);

/** Marks the end of the work queued on `stream` so far. */
COF_API cof_status cof_event_record(cof_stream stream, cof_event *event_out);

/**
 * Work queued on `stream` from now on runs after the event's point. An error of the event's stream
 * passes to this one. The event's stream must outlive the wait.
 */
COF_API cof_status cof_stream_wait_event(cof_stream stream, cof_event event);

#ifdef __cplusplus
}
#endif
#endif
