/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the test programs share: CHECK, which goes on after a failure and makes the program fail,
 * and ranks as threads. A program ends with `return test_done()`. */
#ifndef COFUSE_TEST_H
#define COFUSE_TEST_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cofuse/cofuse.h"

/* A sanitizer looks at every access, ten times as slow, and finds no more in the tenth size or
 * instruction set than in the first: the tests that take it longest do fewer of them. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { TEST_FEWER = 1 };
#elif defined(__has_feature)
enum { TEST_FEWER = __has_feature(thread_sanitizer) || __has_feature(address_sanitizer) };
#else
enum { TEST_FEWER = 0 };
#endif

static atomic_int test_n_failed, test_n_passed;

#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (cond) {                                                                                \
            test_n_passed++;                                                                       \
        } else {                                                                                   \
            test_n_failed++;                                                                       \
            printf("not ok %s:%d: %s: ", __func__, __LINE__, #cond);                               \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)

/* The call fails with this status, and its text has this part. */
#define CHECK_FAILS(expr, wanted, part)                                                            \
    do {                                                                                           \
        cof_status check_status = (expr);                                                          \
        CHECK(check_status == (wanted) && strstr(cof_last_error(), part),                          \
              "got %s \"%s\", wanted %s with \"%s\"", cof_status_name(check_status),               \
              check_status == COF_OK ? "" : cof_last_error(), #wanted, part);                      \
    } while (0)

/* A failure that other ranks may see first: then this one's call is refused, and its outputs stay
 * as they were; else it is told where it waits for the call. */
#define CHECK_FAILS_OR_REFUSED(refused, run, sync, wanted, part)                                   \
    do {                                                                                           \
        cof_status check_run = (run);                                                              \
        (refused) = check_run != COF_OK;                                                           \
        CHECK_FAILS((refused) ? check_run : (sync), wanted, part);                                 \
    } while (0)

#define CHECK_OK(expr)                                                                             \
    do {                                                                                           \
        cof_status check_status = (expr);                                                          \
        CHECK(check_status == COF_OK, "got %s \"%s\"", cof_status_name(check_status),              \
              cof_last_error());                                                                   \
    } while (0)

static inline int test_done(void)
{
    printf("%d checks passed, %d failed\n", test_n_passed, test_n_failed);
    return test_n_failed || !test_n_passed;
}

typedef void (*test_rank_fn)(int rank, int n_ranks, const char *job, void *arg);

struct test_rank {
    pthread_t id;
    int rank, n_ranks;
    const char *job;
    test_rank_fn fn;
    void *arg;
};

static inline void *test_rank_main(void *arg)
{
    struct test_rank *t = arg;
    t->fn(t->rank, t->n_ranks, t->job, t->arg);
    return NULL;
}

/* fn on n_ranks threads, with a job name of their own. */
static inline void test_ranks(int n_ranks, test_rank_fn fn, void *arg)
{
    static atomic_int n_jobs;
    struct test_rank ranks[32];
    char job[64];
    snprintf(job, sizeof job, "test-%d-%d", (int)getpid(), atomic_fetch_add(&n_jobs, 1));
    for (int r = 0; r < n_ranks; r++) {
        ranks[r] = (struct test_rank){
            .rank = r, .n_ranks = n_ranks, .job = job, .fn = fn, .arg = arg};
        pthread_create(&ranks[r].id, NULL, test_rank_main, &ranks[r]);
    }
    for (int r = 0; r < n_ranks; r++)
        pthread_join(ranks[r].id, NULL);
}

/* A world of the thread engine; exits when it cannot be made, for the tests that only need one. */
static inline cof_world *test_world(int rank, int n_ranks, const char *job, double run_timeout)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_THREAD;
    o.n_threads = 1;
    o.init_timeout = 20;
    o.run_timeout = run_timeout;
    cof_world *world;
    if (cof_world_create(&o, &world) != COF_OK) {
        printf("not ok world of %d, rank %d: %s\n", n_ranks, rank, cof_last_error());
        exit(1);
    }
    return world;
}

/* ---- one attention call's tensors, compact, bshd ---- */

struct test_attention {
    cof_attention_params params;
    int64_t rows;
    cof_shape q_shape, k_shape, v_shape, o_shape, lse_shape;
    cof_tensor q, k, v, o, lse, dout, dq, dk, dv;
    cof_attention_args args;
};

static inline cof_tensor test_tensor(cof_dtype dtype, int ndim, cof_shape *shape, unsigned seed)
{
    size_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= (size_t)shape->dim[i];
    float *data = malloc(n * sizeof *data + 64); /* room for either type */
    for (size_t i = 0; i < n; i++) {
        float x = (float)(rand_r(&seed) % 2001 - 1000) / 1000;
        if (dtype.bits == 32)
            data[i] = x;
        else
            ((uint16_t *)(void *)data)[i] = (uint16_t)((union { float f; uint32_t u; }){x}.u >> 16);
    }
    return cof_tensor_make(data, (cof_device){COF_DEVICE_CPU, 0}, dtype, ndim, shape);
}

static inline void test_attention_make(struct test_attention *t, const cof_attention_params *p,
                                       int rank, int n_ranks, unsigned seed)
{
    cof_layout layout = {p->layout, p->chunking, n_ranks, p->n_rows};
    int64_t s = cof_layout_local_rows(&layout, rank), b = p->n_batch, h = p->n_heads;
    int64_t kv = p->n_kv_heads ? p->n_kv_heads : h, d = p->head_dim_qk;
    int64_t dv = p->head_dim_v ? p->head_dim_v : d;
    t->params = *p;
    t->rows = s;
    t->q_shape = (cof_shape){{b, s, h, d}};
    t->k_shape = (cof_shape){{b, s, kv, d}};
    t->v_shape = (cof_shape){{b, s, kv, dv}};
    t->o_shape = (cof_shape){{b, s, h, dv}};
    t->lse_shape = (cof_shape){{b, h, s}};
    t->q = test_tensor(p->dtype, 4, &t->q_shape, seed + 1);
    t->k = test_tensor(p->dtype, 4, &t->k_shape, seed + 2);
    t->v = test_tensor(p->dtype, 4, &t->v_shape, seed + 3);
    t->o = test_tensor(p->dtype, 4, &t->o_shape, seed + 4);
    t->lse = test_tensor(COF_F32, 3, &t->lse_shape, seed + 5);
    t->dout = test_tensor(p->dtype, 4, &t->o_shape, seed + 6);
    t->dq = test_tensor(p->dtype, 4, &t->q_shape, seed + 7);
    t->dk = test_tensor(p->dtype, 4, &t->k_shape, seed + 8);
    t->dv = test_tensor(p->dtype, 4, &t->v_shape, seed + 9);
    t->args = (cof_attention_args){.size = sizeof t->args, .q = &t->q, .k = &t->k, .v = &t->v,
                                   .o = &t->o, .lse = &t->lse, .dout = &t->dout, .dq = &t->dq,
                                   .dk = &t->dk, .dv = &t->dv};
}

static inline void test_attention_free(struct test_attention *t)
{
    cof_tensor *all[] = {&t->q, &t->k, &t->v, &t->o, &t->lse, &t->dout, &t->dq, &t->dk, &t->dv};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]->data);
}

static inline cof_attention_params test_attention_params(int64_t n_rows)
{
    cof_attention_params p = COF_ATTENTION_PARAMS_INIT;
    p.dtype = COF_F32;
    p.n_batch = 1;
    p.n_rows = n_rows;
    p.n_heads = 2;
    p.head_dim_qk = 16;
    p.mask = COF_MASK_CAUSAL;
    return p;
}

/* ---- ranks that meet, without a word of the library's ---- */

/* Shared with the children of fork. */
static struct test_meeting {
    atomic_int n_here, n_held;
} *test_meeting;

__attribute__((constructor)) static void test_meeting_make(void)
{
    test_meeting = mmap(NULL, sizeof *test_meeting, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (test_meeting == MAP_FAILED)
        abort();
}

/* All n_ranks threads or processes come, one after the other's failure, say, or its death before it
 * is seen; at most for a minute. */
static inline void test_meet(int n_ranks)
{
    const int n_held = atomic_load(&test_meeting->n_held);
    if (atomic_fetch_add(&test_meeting->n_here, 1) + 1 == n_ranks) {
        atomic_store(&test_meeting->n_here, 0);
        atomic_fetch_add(&test_meeting->n_held, 1);
        return;
    }
    for (int i = 0; i < 60000 && atomic_load(&test_meeting->n_held) == n_held; i++)
        usleep(1000);
    CHECK(atomic_load(&test_meeting->n_held) != n_held, "some rank did not come to the meeting");
}

#endif
