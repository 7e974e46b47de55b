/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Streams and events.
 *
 * A stream is an in-order queue of work. On the CPU it has a dispatcher thread and helpers; on a
 * world of CUDA devices it is a CUDA stream. The calls that run plans only enqueue. Two streams are
 * ordered only by an event. A world takes streams of its own kind, and COF_STREAM_NOW.
 *
 * A CPU stream holds 256 queued calls; a call on a full stream waits for room until the run
 * deadline (COF_ERR_BUSY). When queued work fails, the stream becomes *sticky*: later work on it is
 * skipped, later calls and cof_stream_sync return the error with its text, and it can only be
 * destroyed. Argument errors are returned by the call itself and do not make a stream sticky.
 *
 * A CUDA stream has no such state, for no call of Cofuse waits for it: when a wait on it fails, its
 * *arena* has failed, the rest of the work on that arena does nothing and fills outputs with NaN,
 * and the stream goes on. cof_team_query tells of it at any time, and so does the next call on the
 * arena. Calls on CUDA streams may be captured into a graph, which may be replayed and mixed with
 * direct calls; creating, destroying and COF_STREAM_NOW may not.
 *
 * A CUDA stream is one of the world's device: work for another one is refused (COF_ERR_INVALID).
 * The handle NULL is that device's default stream in calls on an arena or a plan, and that of the
 * thread's current device in calls that name neither (cof_stream_sync, events).
 *
 * Several ranks in one process: calls that create or destroy objects, of Cofuse or of CUDA, may
 * wait for kernels that run, and these for work that another rank has not enqueued yet. Then both
 * wait until the deadline. Synchronise the streams first.
 */
#ifndef COFUSE_STREAM_H
#define COFUSE_STREAM_H

#include "world.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cof_stream_kind {
    COF_STREAM_KIND_NOW = 0, /* run on the world's own stream and wait for the end */
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
 * The call returns when its work is done, and returns the work's own status (on a device: that of
 * its arena). One thread of a world at a time: a second one is refused (COF_ERR_INVALID). A thread
 * that drives more than one rank of a team must use streams instead: with NOW it waits for itself,
 * until the deadline.
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
 * Makes a CPU stream with `n_threads` threads (0: the world's number; at most 256); on a world of
 * CUDA devices a CUDA stream of the world's device that does not wait for the default stream
 * (`n_threads` has the same rule and no effect). Local.
 * COF_ERR_INVALID, COF_ERR_NOMEM, COF_ERR_SYSTEM (no thread to be had, or CUDA refuses).
 */
COF_API cof_status cof_stream_create(cof_world *world, int n_threads, cof_stream *stream_out);

/**
 * Ends the threads after the queued work has run; a CUDA stream (of cof_stream_create, or the
 * caller's own) goes at once, its work runs to the end. Local. A NOW stream is left alone, and so
 * are CUDA's default streams.
 */
COF_API void cof_stream_destroy(cof_stream stream);

/**
 * Waits until all work queued so far has run; returns the stream's sticky error, if any. Of a CUDA
 * stream: CUDA's own errors only (COF_ERR_SYSTEM); cof_team_query tells how waits ended.
 */
COF_API cof_status cof_stream_sync(cof_stream stream);

/**
 * Marks the end of the work queued on `stream` so far. Of CUDA streams the process has 1024 events
 * for each device, used in turn: one is good until 1024 more have been recorded there.
 */
COF_API cof_status cof_event_record(cof_stream stream, cof_event *event_out);

/**
 * Work queued on `stream` from now on runs after the event's point. An error of the event's stream
 * passes to this one. The event's stream must outlive the wait. Both streams are of one kind.
 * COF_ERR_INVALID: also an event of a CUDA stream that has been overwritten.
 */
COF_API cof_status cof_stream_wait_event(cof_stream stream, cof_event event);

#ifdef __cplusplus
}
#endif
#endif
