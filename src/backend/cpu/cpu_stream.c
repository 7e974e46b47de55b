/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Words and who stores them:
 *   tail     calls enqueued            the caller (one thread at a time)
 *   done     calls run                 the dispatcher
 *   round    parallel sections begun   the dispatcher; helpers wait for it to change
 *   busy     helpers still in the round; helpers; the dispatcher waits for 0
 * Ring slot n % 256 is written by the caller before tail becomes n + 1 (release) and may be written
 * again once done is past n (acquire), so the two sides never touch a slot together. */
#define _GNU_SOURCE
#include "backend/cpu/cpu_stream.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/process.h"
#include "core/wait.h"

struct call {
    cofi_call_fn fn;
    unsigned flags;
    _Alignas(16) unsigned char args[COFI_CALL_BYTES];
};

/* A counter to wait on; the low half of the value is the futex word. */
struct counter {
    _Alignas(128) _Atomic uint64_t value;
    _Atomic uint32_t sleepers;
};

struct thread {
    struct cofi_cpu_stream *stream;
    struct cofi_cpu_worker worker;
    pthread_t id;
};

struct cofi_cpu_stream {
    struct counter tail, done, round, busy;
    atomic_flag enqueuing; /* held while a call is put into the ring */
    _Alignas(128) atomic_bool closing;
    _Atomic int status; /* sticky cof_status; the text is written before it */
    char text[COFI_ERROR_TEXT_BYTES];
    struct call ring[COFI_STREAM_RING];

    /* the parallel section in hand: written before round changes */
    _Alignas(128) _Atomic int64_t next_task;
    int64_t n_tasks;
    cofi_task_fn task_fn;
    void *task_arg;

    struct cofi_cpu_stream_options options;
    struct cofi_process made_by;
    _Atomic int n_started;  /* threads whose start is decided */
    _Atomic int start_status;
    struct counter started;
    int n_threads; /* threads created */
    struct thread threads[];
};

static _Atomic uint32_t *futex_word(struct counter *c)
{
    return (_Atomic uint32_t *)(void *)&c->value; /* little-endian: the low half */
}

static uint64_t counter_get(struct counter *c)
{
    return atomic_load_explicit(&c->value, memory_order_acquire);
}

static void counter_add(struct counter *c, uint64_t n)
{
    atomic_fetch_add_explicit(&c->value, n, memory_order_seq_cst);
    cofi_wake(futex_word(c), &c->sleepers, false);
}

/* Waits until `ready`; sleeps on `c`. */
static cof_status counter_wait(struct cofi_cpu_stream *s, struct counter *c, bool (*ready)(void *),
                               void *ctx, int64_t deadline, int64_t max_sleep)
{
    return cofi_wait(&(struct cofi_wait){.ready = ready, .ctx = ctx, .word = futex_word(c),
                                         .sleepers = &c->sleepers, .deadline = deadline,
                                         .max_sleep = max_sleep, .spin = s->options.pin});
}

/* ---- threads -------------------------------------------------------------------------------- */

static void pin_thread(const struct cofi_cpu_stream_options *options, int idx)
{
    cpu_set_t allowed, one;
    if (!options->pin || sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    int want = options->first_core + idx;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && want-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one); /* a hint: may be refused */
            return;
        }
}

/* On the thread itself: its provider and scratch. Reports to the opener. */
static bool thread_start(struct thread *t)
{
    struct cofi_cpu_stream *s = t->stream;
    cof_status status = COF_OK;
    fesetenv(FE_DFL_ENV); /* not the creator's: it may flush subnormals, or round otherwise */
    pin_thread(&s->options, t->worker.idx);
    if (s->options.with_gemm) {
        t->worker.scratch = aligned_alloc(64, COFI_WORKER_SCRATCH_BYTES);
        status = t->worker.scratch
                     ? cofi_gemm_open(&t->worker.gemm)
                     : COF_FAIL(COF_ERR_NOMEM, "stream thread: no memory for %zu bytes",
                                COFI_WORKER_SCRATCH_BYTES);
    }
    int expected = COF_OK;
    if (status != COF_OK && atomic_compare_exchange_strong(&s->start_status, &expected, status))
        memcpy(s->text, cof_last_error(), sizeof s->text);
    counter_add(&s->started, 1);
    return status == COF_OK;
}

static void thread_end(struct thread *t)
{
    if (t->worker.gemm)
        cofi_gemm_close(t->worker.gemm);
    free(t->worker.scratch);
}

static void run_tasks(struct cofi_cpu_stream *s, struct cofi_cpu_worker *worker)
{
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&s->next_task, 1, memory_order_relaxed);
        if (task >= s->n_tasks)
            return;
        s->task_fn(s->task_arg, task, worker);
    }
}

struct helper_ctx {
    struct cofi_cpu_stream *stream;
    uint64_t round;
};

static bool round_changed(void *ctx)
{
    struct helper_ctx *h = ctx;
    return counter_get(&h->stream->round) != h->round;
}

static void *helper_main(void *arg)
{
    struct thread *t = arg;
    struct cofi_cpu_stream *s = t->stream;
    struct helper_ctx ctx = {s, 0};
    if (thread_start(t))
        for (;;) {
            counter_wait(s, &s->round, round_changed, &ctx, COFI_NEVER, COFI_IDLE_SLEEP_NS);
            ctx.round++;
            if (atomic_load_explicit(&s->closing, memory_order_acquire))
                break;
            run_tasks(s, &t->worker);
            counter_add(&s->busy, (uint64_t)-1);
        }
    thread_end(t);
    return NULL;
}

static bool call_waiting(void *ctx)
{
    struct cofi_cpu_stream *s = ctx;
    return counter_get(&s->tail) != counter_get(&s->done);
}

static void make_sticky(struct cofi_cpu_stream *s, cof_status status)
{
    if (cofi_cpu_stream_status(s) != COF_OK)
        return;
    memcpy(s->text, cof_last_error(), sizeof s->text);
    atomic_store_explicit(&s->status, status, memory_order_release);
}

static void run_call(struct cofi_cpu_stream *s, const struct call *call)
{
    if (cofi_cpu_stream_status(s) != COF_OK && !(call->flags & COFI_CALL_ALWAYS))
        return;
    cof_status status = call->fn(s, call->args);
    if (status != COF_OK)
        make_sticky(s, status);
}

static void *dispatcher_main(void *arg)
{
    struct thread *t = arg;
    struct cofi_cpu_stream *s = t->stream;
    if (s->options.name)
        pthread_setname_np(pthread_self(), s->options.name);
    if (thread_start(t))
        for (;;) {
            counter_wait(s, &s->tail, call_waiting, s, COFI_NEVER, COFI_IDLE_SLEEP_NS);
            if (atomic_load_explicit(&s->closing, memory_order_acquire))
                break;
            run_call(s, &s->ring[counter_get(&s->done) % COFI_STREAM_RING]);
            counter_add(&s->done, 1);
        }
    thread_end(t);
    return NULL;
}

/* ---- open and close ------------------------------------------------------------------------- */

static bool all_started(void *ctx)
{
    struct cofi_cpu_stream *s = ctx;
    return counter_get(&s->started) == (uint64_t)s->n_threads;
}

static cof_status create_threads(struct cofi_cpu_stream *s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the application's */
    int error = 0;
    for (int i = 0; i < s->options.n_threads && !error; i++) {
        s->threads[i] = (struct thread){.stream = s, .worker.idx = i};
        error = pthread_create(&s->threads[i].id, NULL, i == 0 ? dispatcher_main : helper_main,
                               &s->threads[i]);
        s->n_threads += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    /* Starting is bounded: it loads a library and makes a few kernels; no other rank takes part. */
    counter_wait(s, &s->started, all_started, s, COFI_NEVER, COFI_SLEEP_NS);
    COF_FAIL_IF(error, COF_ERR_SYSTEM, "stream: thread %d of %d could not be made: %s",
                s->n_threads, s->options.n_threads, strerror(error));
    cof_status status = (cof_status)atomic_load(&s->start_status);
    return status == COF_OK ? COF_OK : cofi_fail_text(status, s->text);
}

cof_status cofi_cpu_stream_open(const struct cofi_cpu_stream_options *options,
                                struct cofi_cpu_stream **stream_out)
{
    *stream_out = NULL;
    size_t bytes = sizeof(struct cofi_cpu_stream) +
                   (size_t)options->n_threads * sizeof(struct thread);
    bytes = (bytes + 127) & ~(size_t)127;
    struct cofi_cpu_stream *s = aligned_alloc(128, bytes);
    COF_FAIL_IF(!s, COF_ERR_NOMEM, "stream: no memory for %zu bytes", bytes);
    memset(s, 0, bytes);
    s->options = *options;
    cof_status status = cofi_process_this(&s->made_by);
    if (status == COF_OK)
        status = create_threads(s);
    if (status != COF_OK) {
        char text[COFI_ERROR_TEXT_BYTES];
        memcpy(text, cof_last_error(), sizeof text);
        cofi_cpu_stream_close(s);
        return cofi_fail_text(status, text);
    }
    *stream_out = s;
    return COF_OK;
}

static void free_copy_in_child(struct cofi_cpu_stream *s)
{
    for (int i = 0; i < s->n_threads; i++)
        free(s->threads[i].worker.scratch);
    free(s);
}

void cofi_cpu_stream_close(struct cofi_cpu_stream *s)
{
    if (!s)
        return;
    if (!cofi_process_is_this(&s->made_by)) {
        free_copy_in_child(s);
        return;
    }
    /* Closing is told by a change of the words the threads sleep on, after all calls have run. */
    if (s->n_threads > 0)
        cofi_cpu_stream_sync(s);
    atomic_store_explicit(&s->closing, true, memory_order_release);
    counter_add(&s->tail, 1);
    counter_add(&s->round, 1);
    for (int i = 0; i < s->n_threads; i++)
        pthread_join(s->threads[i].id, NULL);
    free(s);
}

cof_status cofi_cpu_stream_check(const struct cofi_cpu_stream *s)
{
    return cofi_process_check(&s->made_by, "stream");
}

int cofi_cpu_stream_threads(const struct cofi_cpu_stream *s)
{
    return s->n_threads;
}

/* ---- calls ---------------------------------------------------------------------------------- */

static bool has_room(void *ctx)
{
    struct cofi_cpu_stream *s = ctx;
    return counter_get(&s->tail) - counter_get(&s->done) < COFI_STREAM_RING;
}

static cof_status enqueue(struct cofi_cpu_stream *s, cofi_call_fn fn, const void *args,
                          size_t bytes, unsigned flags)
{
    if (!(flags & COFI_CALL_ALWAYS))
        COF_TRY(cofi_cpu_stream_sticky(s));
    if (!has_room(s)) {
        int64_t deadline = cofi_deadline(s->options.run_timeout);
        COF_FAIL_IF(counter_wait(s, &s->done, has_room, s, deadline, COFI_SLEEP_NS) != COF_OK,
                    COF_ERR_BUSY, "stream: %d calls are queued and none ended within %g s",
                    COFI_STREAM_RING, s->options.run_timeout);
    }
    struct call *call = &s->ring[counter_get(&s->tail) % COFI_STREAM_RING];
    call->fn = fn;
    call->flags = flags;
    memcpy(call->args, args, bytes);
    counter_add(&s->tail, 1);
    return COF_OK;
}

cof_status cofi_cpu_enqueue(struct cofi_cpu_stream *s, cofi_call_fn fn, const void *args,
                            size_t bytes, unsigned flags)
{
    COF_FAIL_IF(bytes > COFI_CALL_BYTES, COF_ERR_INTERNAL, "call of %zu argument bytes", bytes);
    COF_FAIL_IF(atomic_flag_test_and_set_explicit(&s->enqueuing, memory_order_acquire),
                COF_ERR_INVALID, "stream: two threads use it at once, one at a time may");
    cof_status status = enqueue(s, fn, args, bytes, flags);
    atomic_flag_clear_explicit(&s->enqueuing, memory_order_release);
    return status;
}

uint64_t cofi_cpu_stream_tail(struct cofi_cpu_stream *s)
{
    return counter_get(&s->tail);
}

struct event_args {
    struct cofi_cpu_stream *other;
    uint64_t sequence;
};

static bool event_passed(void *ctx)
{
    const struct event_args *e = ctx;
    return counter_get(&e->other->done) >= e->sequence;
}

/* No deadline of its own: what the other stream waits for has one, and fails it. */
static cof_status wait_event_call(struct cofi_cpu_stream *s, const void *args)
{
    struct event_args e = *(const struct event_args *)args;
    counter_wait(s, &e.other->done, event_passed, &e, COFI_NEVER, COFI_SLEEP_NS);
    return cofi_cpu_stream_sticky(e.other);
}

cof_status cofi_cpu_wait_event(struct cofi_cpu_stream *s, struct cofi_cpu_stream *other,
                               uint64_t sequence)
{
    struct event_args e = {other, sequence};
    if (s == other)
        return COF_OK; /* in order already */
    return cofi_cpu_enqueue(s, wait_event_call, &e, sizeof e, COFI_CALL_ALWAYS);
}

static bool is_idle(void *ctx)
{
    struct cofi_cpu_stream *s = ctx;
    return counter_get(&s->tail) == counter_get(&s->done);
}

cof_status cofi_cpu_stream_sync(struct cofi_cpu_stream *s)
{
    /* Each queued call is bounded by its own waits, so this wait needs no deadline. */
    counter_wait(s, &s->done, is_idle, s, COFI_NEVER, COFI_SLEEP_NS);
    return cofi_cpu_stream_sticky(s);
}

cof_status cofi_cpu_stream_status(struct cofi_cpu_stream *s)
{
    return (cof_status)atomic_load_explicit(&s->status, memory_order_acquire);
}

cof_status cofi_cpu_stream_sticky(struct cofi_cpu_stream *s)
{
    cof_status status = cofi_cpu_stream_status(s);
    return status == COF_OK ? COF_OK : cofi_fail_text(status, s->text);
}

cof_status cofi_cpu_stream_sync_and_clear(struct cofi_cpu_stream *s)
{
    cof_status status = cofi_cpu_stream_sync(s);
    atomic_store_explicit(&s->status, COF_OK, memory_order_release);
    return status;
}

/* ---- parallel sections ---------------------------------------------------------------------- */

static bool helpers_done(void *ctx)
{
    struct cofi_cpu_stream *s = ctx;
    return counter_get(&s->busy) == 0;
}

void cofi_cpu_parallel(struct cofi_cpu_stream *s, int64_t n_tasks, cofi_task_fn fn, void *arg)
{
    struct cofi_cpu_worker *self = &s->threads[0].worker;
    if (s->n_threads == 1 || n_tasks <= 1) {
        for (int64_t task = 0; task < n_tasks; task++)
            fn(arg, task, self);
        return;
    }
    s->task_fn = fn;
    s->task_arg = arg;
    s->n_tasks = n_tasks;
    atomic_store_explicit(&s->next_task, 0, memory_order_relaxed);
    atomic_store_explicit(&s->busy.value, (uint64_t)(s->n_threads - 1), memory_order_relaxed);
    counter_add(&s->round, 1);
    run_tasks(s, self);
    counter_wait(s, &s->busy, helpers_done, s, COFI_NEVER, COFI_SLEEP_NS);
}
