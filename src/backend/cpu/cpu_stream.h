/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* CPU streams: an in-order ring of calls, one dispatcher thread, n_threads - 1 helpers.
 *
 * A call is a function and up to COFI_CALL_BYTES of arguments, copied by value: enqueuing allocates
 * nothing. The dispatcher runs calls in order; a call may spread over the helpers with
 * cofi_cpu_parallel. A call that returns an error makes the stream sticky: later calls are skipped,
 * except those enqueued with COFI_CALL_ALWAYS. */
#ifndef COFI_CPU_STREAM_H
#define COFI_CPU_STREAM_H

#include <stdbool.h>

#include "backend/cpu/gemm.h"
#include "cofuse/stream.h"

#define COFI_STREAM_RING 256
#define COFI_CALL_BYTES 192
/* Scratch of every worker, touched only when used. Holds the tiles of head dims up to 512. */
#define COFI_WORKER_SCRATCH_BYTES ((size_t)4 << 20)

struct cofi_cpu_stream;

/* One thread of a stream, as a task sees it. */
struct cofi_cpu_worker {
    int idx;                /* 0: the dispatcher */
    struct cofi_gemm *gemm; /* NULL on streams made without */
    void *scratch;          /* 64-byte aligned */
};

struct cofi_cpu_stream_options {
    int n_threads;       /* >= 1 */
    bool with_gemm;      /* open the GEMM provider on every thread, with scratch */
    bool pin;            /* pin thread i to the (first_core + i)-th allowed core */
    int first_core;
    double run_timeout;  /* seconds; <= 0: none */
    const char *name;    /* thread name, at most 15 bytes */
};

cof_status cofi_cpu_stream_open(const struct cofi_cpu_stream_options *options,
                                struct cofi_cpu_stream **stream_out);
/* Ends the threads after the queued calls have run; NULL is fine. In a child of fork, where there
 * are no threads: frees the memory, but for what a thread's matrix products held. */
void cofi_cpu_stream_close(struct cofi_cpu_stream *stream);

/* COF_ERR_INVALID in a child of the process that opened it: nothing but close is possible there. */
cof_status cofi_cpu_stream_check(const struct cofi_cpu_stream *stream);

int cofi_cpu_stream_threads(const struct cofi_cpu_stream *stream);

typedef cof_status (*cofi_call_fn)(struct cofi_cpu_stream *stream, const void *args);

enum { COFI_CALL_ALWAYS = 1 }; /* run it on a sticky stream too (it sees the error by _status) */

/* One thread at a time: COF_ERR_INVALID when two are in it. COF_ERR_BUSY when the ring stays full
 * until the deadline; the sticky error of a failed stream (COFI_CALL_ALWAYS calls are taken all the
 * same). */
cof_status cofi_cpu_enqueue(struct cofi_cpu_stream *stream, cofi_call_fn fn, const void *args,
                            size_t bytes, unsigned flags);

/* The sequence number of the last call enqueued. */
uint64_t cofi_cpu_stream_tail(struct cofi_cpu_stream *stream);

/* Enqueues a wait until `other` has run everything up to `sequence`; takes over its error. */
cof_status cofi_cpu_wait_event(struct cofi_cpu_stream *stream, struct cofi_cpu_stream *other,
                               uint64_t sequence);

/* Host wait for an empty queue; returns the sticky error. */
cof_status cofi_cpu_stream_sync(struct cofi_cpu_stream *stream);

/* The sticky status (COF_OK: none); no wait, no text. */
cof_status cofi_cpu_stream_status(struct cofi_cpu_stream *stream);
/* The same with its text. */
cof_status cofi_cpu_stream_sticky(struct cofi_cpu_stream *stream);

/* Syncs, and forgets a sticky error after returning it: for the world's own stream, whose caller
 * has got the error in hand. */
cof_status cofi_cpu_stream_sync_and_clear(struct cofi_cpu_stream *stream);

/* fn(arg, task, worker) for task = 0 .. n_tasks-1, over all threads of the stream, in no promised
 * order; returns when all are done. From a call running on the stream only. */
typedef void (*cofi_task_fn)(void *arg, int64_t task, struct cofi_cpu_worker *worker);
void cofi_cpu_parallel(struct cofi_cpu_stream *stream, int64_t n_tasks, cofi_task_fn fn, void *arg);

#endif
