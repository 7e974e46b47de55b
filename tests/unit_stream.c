/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* CPU streams: order, a full ring, events between streams, parallel sections, errors that stick. */
#include "backend/cpu/cpu_stream.h"
#include "core/error.h"
#include "test.h"

static struct cofi_cpu_stream *open_stream(int n_threads, double run_timeout)
{
    struct cofi_cpu_stream *s = NULL;
    CHECK_OK(cofi_cpu_stream_open(
        &(struct cofi_cpu_stream_options){.n_threads = n_threads, .run_timeout = run_timeout}, &s));
    return s;
}

struct append {
    int *list, *n, value, sleep_us;
};

static cof_status append(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    const struct append *a = args;
    if (a->sleep_us)
        usleep((useconds_t)a->sleep_us);
    a->list[(*a->n)++] = a->value;
    return COF_OK;
}

static cof_status fail(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    (void)args;
    return COF_FAIL(COF_ERR_TIMEOUT, "made to fail");
}

static void test_order(void)
{
    enum { N = 3 * COFI_STREAM_RING };
    static int list[N];
    int n = 0;
    struct cofi_cpu_stream *s = open_stream(1, 10);
    for (int i = 0; i < N; i++) /* more than the ring holds: the enqueuer waits for room */
        CHECK_OK(cofi_cpu_enqueue(s, append, &(struct append){list, &n, i, i == 0 ? 20000 : 0},
                                  sizeof(struct append), 0));
    CHECK_OK(cofi_cpu_stream_sync(s));
    CHECK(n == N, "%d calls ran", n);
    for (int i = 0; i < N; i++)
        CHECK(list[i] == i, "call %d ran at place %d", list[i], i);
    cofi_cpu_stream_close(s);
}

static cof_status pass_gate(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    atomic_bool *const *is_open = args;
    while (!atomic_load(*is_open))
        usleep(1000);
    return COF_OK;
}

static void test_full(void)
{
    int list[COFI_STREAM_RING + 1], n = 0;
    atomic_bool is_open = false, *gate = &is_open;
    struct cofi_cpu_stream *s = open_stream(1, 0.05);
    struct append call = {list, &n, 0, 0};
    cof_status status = cofi_cpu_enqueue(s, pass_gate, &gate, sizeof gate, 0);
    for (int i = 0; i < COFI_STREAM_RING && status == COF_OK; i++)
        status = cofi_cpu_enqueue(s, append, &call, sizeof call, 0);
    CHECK_FAILS(status, COF_ERR_BUSY, "256 calls are queued");
    atomic_store(&is_open, true);
    CHECK_OK(cofi_cpu_stream_sync(s));
    CHECK(n == COFI_STREAM_RING - 1, "%d calls ran", n);
    cofi_cpu_stream_close(s);
}

static void test_events(void)
{
    int list[200], n = 0;
    struct cofi_cpu_stream *a = open_stream(1, 10), *b = open_stream(1, 10);
    for (int i = 0; i < 100; i++) {
        struct append first = {list, &n, 2 * i, 300}, second = {list, &n, 2 * i + 1, 0};
        cofi_cpu_enqueue(a, append, &first, sizeof first, 0);
        cofi_cpu_wait_event(b, a, cofi_cpu_stream_tail(a));
        cofi_cpu_enqueue(b, append, &second, sizeof second, 0);
        cofi_cpu_wait_event(a, b, cofi_cpu_stream_tail(b));
    }
    CHECK_OK(cofi_cpu_stream_sync(a));
    CHECK_OK(cofi_cpu_stream_sync(b));
    for (int i = 0; i < 200; i++)
        CHECK(list[i] == i, "call %d ran at place %d", list[i], i);
    cofi_cpu_stream_close(a);
    cofi_cpu_stream_close(b);
}

static void test_sticky(void)
{
    int list[4], n = 0;
    struct cofi_cpu_stream *a = open_stream(2, 10), *b = open_stream(1, 10);
    struct append one = {list, &n, 1, 0};
    cofi_cpu_enqueue(a, fail, "", 1, 0);
    cofi_cpu_enqueue(a, append, &one, sizeof one, 0);                /* skipped, or refused */
    cofi_cpu_enqueue(a, append, &one, sizeof one, COFI_CALL_ALWAYS); /* runs */
    CHECK_FAILS(cofi_cpu_stream_sync(a), COF_ERR_TIMEOUT, "made to fail");
    CHECK(n == 1, "%d calls ran", n);
    CHECK_FAILS(cofi_cpu_enqueue(a, append, &one, sizeof one, 0), COF_ERR_TIMEOUT, "made to fail");
    cofi_cpu_wait_event(b, a, cofi_cpu_stream_tail(a)); /* the error passes on */
    CHECK_FAILS(cofi_cpu_stream_sync(b), COF_ERR_TIMEOUT, "made to fail");
    CHECK_FAILS(cofi_cpu_stream_sync_and_clear(a), COF_ERR_TIMEOUT, "made to fail");
    CHECK_OK(cofi_cpu_enqueue(a, append, &one, sizeof one, 0));
    CHECK_OK(cofi_cpu_stream_sync(a));
    cofi_cpu_stream_close(a);
    cofi_cpu_stream_close(b);
}

struct tally {
    int64_t n;
    _Atomic int seen[1000];
    _Atomic int workers[8];
};

static void count_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    struct tally *t = arg;
    t->seen[task]++;
    t->workers[worker->idx]++;
    if (task < 8)
        usleep(1000); /* so that every thread gets some */
}

static cof_status run_tally(struct cofi_cpu_stream *s, const void *args)
{
    struct tally *t = *(struct tally *const *)args;
    cofi_cpu_parallel(s, t->n, count_task, t);
    return COF_OK;
}

static void test_parallel(void)
{
    struct cofi_cpu_stream *s = open_stream(4, 10);
    const int64_t sizes[] = {0, 1, 2, 3, 7, 1000};
    for (int round = 0; round < 50; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            static struct tally tally, *t = &tally;
            memset((void *)t, 0, sizeof *t);
            t->n = sizes[i];
            cofi_cpu_enqueue(s, run_tally, &t, sizeof t, 0);
            cofi_cpu_stream_sync(s);
            for (int64_t task = 0; task < 1000; task++)
                CHECK(t->seen[task] == (task < sizes[i]), "task %lld of %lld ran %d times",
                      (long long)task, (long long)sizes[i], t->seen[task]);
        }
    cofi_cpu_stream_close(s);
}

static void test_public(void)
{
    cof_world *world = test_world(0, 1, NULL, 10);
    cof_stream a, b;
    cof_event event;
    CHECK_FAILS(cof_stream_create(world, -1, &a), COF_ERR_INVALID, "n_threads = -1");
    CHECK_FAILS(cof_stream_create(world, 257, &a), COF_ERR_INVALID, "n_threads = 257");
    CHECK_FAILS(cof_stream_create(NULL, 1, &a), COF_ERR_INVALID, "world");
    CHECK_FAILS(cof_stream_sync((cof_stream){7, NULL}), COF_ERR_INVALID, "kind = 7");
    CHECK_OK(cof_stream_create(world, 2, &a));
    CHECK_OK(cof_stream_create(world, 0, &b));
    CHECK_OK(cof_event_record(a, &event));
    CHECK_OK(cof_stream_wait_event(b, event));
    event.sequence += 1000;
    CHECK_FAILS(cof_stream_wait_event(b, event), COF_ERR_INVALID, "past the end");
    CHECK_OK(cof_stream_sync(a));
    CHECK_OK(cof_stream_sync(b));
    cof_stream_destroy(a);
    cof_stream_destroy(b);
    cof_world_destroy(world);
}

struct caller {
    cof_plan *plan;
    struct test_attention t;
    int n_refused, n_wrong;
};

static void *call_now(void *arg)
{
    struct caller *c = arg;
    size_t bytes = (size_t)c->t.rows * 2 * 16 * 4;
    void *first = malloc(bytes);
    while (cof_attention_forward(c->plan, &c->t.args, COF_STREAM_NOW) != COF_OK)
        continue;
    memcpy(first, c->t.o.data, bytes);
    for (int i = 0; i < 500; i++) {
        cof_status status = cof_attention_forward(c->plan, &c->t.args, COF_STREAM_NOW);
        c->n_refused += status == COF_ERR_INVALID;
        c->n_wrong += status != COF_ERR_INVALID &&
                      (status != COF_OK || memcmp(first, c->t.o.data, bytes) != 0);
    }
    free(first);
    return NULL;
}

/* Threads that meet in COF_STREAM_NOW are told so; a call that was taken is right. */
static void test_now_on_threads(void)
{
    enum { N = 4 };
    cof_world *world = test_world(0, 1, NULL, 10);
    struct caller callers[N];
    pthread_t threads[N];
    cof_attention_params p = test_attention_params(40);
    for (int i = 0; i < N; i++) {
        callers[i] = (struct caller){0};
        test_attention_make(&callers[i].t, &p, 0, 1, (unsigned)i);
        CHECK_OK(cof_attention_plan_create(cof_world_team(world), &p, NULL, &callers[i].plan));
    }
    for (int i = 0; i < N; i++)
        pthread_create(&threads[i], NULL, call_now, &callers[i]);
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        CHECK(callers[i].n_wrong == 0, "%d wrong results", callers[i].n_wrong);
        cof_plan_destroy(callers[i].plan);
        test_attention_free(&callers[i].t);
    }
    cof_world_destroy(world);
}

int main(void)
{
    test_order();
    test_full();
    test_events();
    test_sticky();
    test_parallel();
    test_public();
    test_now_on_threads();
    return test_done();
}
