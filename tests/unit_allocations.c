/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Running a plan allocates nothing and reads no environment: the program is linked with malloc and
 * its kin, getenv and pthread_mutex_lock wrapped for Cofuse's own objects (a GEMM library has its
 * own heap calls, which do not count), and no call may be seen between enqueue and sync. Making one
 * with a rank out of memory fails on all ranks. */
#include <stdbool.h>

#include "test_trimul.h"

static atomic_int counting, n_calls;
static const char *volatile last_call = "";

static _Thread_local bool refuse_next; /* the next calloc of this thread */

static void count(const char *name)
{
    if (atomic_load(&counting)) {
        atomic_fetch_add(&n_calls, 1);
        last_call = name;
    }
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__real_mmap(void *at, size_t bytes, int prot, int flags, int fd, long offset);
char *__real_getenv(const char *name);
int __real_pthread_mutex_lock(pthread_mutex_t *m);

void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, long offset);
char *__wrap_getenv(const char *name);
int __wrap_pthread_mutex_lock(pthread_mutex_t *m);

void *__wrap_malloc(size_t bytes)
{
    count("malloc");
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    count("calloc");
    if (refuse_next) {
        refuse_next = false;
        return NULL;
    }
    return __real_calloc(n, bytes);
}

void *__wrap_realloc(void *p, size_t bytes)
{
    count("realloc");
    return __real_realloc(p, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    count("aligned_alloc");
    return __real_aligned_alloc(align, bytes);
}

void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, long offset)
{
    count("mmap");
    return __real_mmap(at, bytes, prot, flags, fd, offset);
}

char *__wrap_getenv(const char *name)
{
    count("getenv");
    return __real_getenv(name);
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *m)
{
    count("pthread_mutex_lock");
    return __real_pthread_mutex_lock(m);
}

static pthread_barrier_t meet;

static void run_plan(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_attention_params p = test_attention_params(300);
    struct test_attention t;
    cof_plan *plan;
    cof_stream stream;
    p.dtype = arg ? COF_BF16 : COF_F32;
    p.n_kv_heads = 1;
    test_attention_make(&t, &p, rank, n_ranks, 1);
    CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
    CHECK_OK(cof_stream_create(w, 2, &stream));
    pthread_barrier_wait(&meet);
    atomic_store(&counting, 1);
    pthread_barrier_wait(&meet);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(cof_attention_forward(plan, &t.args, stream));
        CHECK_OK(cof_attention_backward(plan, &t.args, stream));
        CHECK_OK(cof_stream_sync(stream)); /* NOW is another stream */
        CHECK_OK(cof_attention_forward(plan, &t.args, COF_STREAM_NOW));
    }
    pthread_barrier_wait(&meet);
    atomic_store(&counting, 0);
    pthread_barrier_wait(&meet);
    cof_stream_destroy(stream);
    cof_plan_destroy(plan);
    cof_team_barrier(cof_world_team(w));
    cof_world_destroy(w);
    test_attention_free(&t);
}

static void run_trimul(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    struct test_tri_problem p = {.params = COF_TRIMUL_PARAMS_INIT, .n = 20, .n_batch = 1,
                                 .n_ranks = n_ranks, .with_mask = true, .with_grads = true};
    struct test_tri t;
    struct test_tri_part part;
    cof_plan *plan;
    cof_stream stream;
    p.params.dtype = arg ? COF_BF16 : COF_F32;
    p.params.n_rows = 20;
    p.params.dim = 24;
    p.params.reduce_param_grads = 1;
    test_tri_make(&t, &p);
    test_tri_part_make(&part, &t, rank, 0);
    CHECK_OK(cof_trimul_plan_create(cof_world_team(w), &p.params, NULL, &plan));
    CHECK_OK(cof_stream_create(w, 2, &stream));
    pthread_barrier_wait(&meet);
    atomic_store(&counting, 1);
    pthread_barrier_wait(&meet);
    CHECK_OK(cof_trimul_set_weights(plan, &part.weight_args, COF_TRIMUL_CHECK, stream));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(cof_trimul_forward(plan, &part.args, stream));
        CHECK_OK(cof_trimul_backward(plan, &part.args, stream));
        CHECK_OK(cof_stream_sync(stream));
    }
    pthread_barrier_wait(&meet);
    atomic_store(&counting, 0);
    pthread_barrier_wait(&meet);
    cof_stream_destroy(stream);
    cof_plan_destroy(plan);
    cof_team_barrier(cof_world_team(w));
    cof_world_destroy(w);
    test_tri_part_free(&part);
    test_tri_free(&t);
}

/* A rank without memory for a plan tells the others, and the team goes on. The deadline of a silent
 * rank is 20 s. */
static void refused(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_attention_params p = test_attention_params(30);
    cof_grad_return_params q = COF_GRAD_RETURN_PARAMS_INIT;
    const char *text = rank == 1 ? "plan: no memory" : "rank 1 could not make it";
    q.dtype = COF_F32;
    q.n_batch = q.n_rows = q.n_heads = q.head_dim_k = 8;
    for (int i = 0; i < 2; i++) {
        cof_plan *plan[2] = {NULL, NULL};
        refuse_next = i == 0 && rank == 1;
        cof_status status = cof_attention_plan_create(team, &p, NULL, &plan[0]);
        CHECK(status == (i ? COF_OK : COF_ERR_NOMEM) && (i || strstr(cof_last_error(), text)),
              "%s %s", cof_status_name(status), cof_last_error());
        refuse_next = i == 0 && rank == 1;
        status = cof_grad_return_plan_create(team, &q, NULL, &plan[1]);
        CHECK(status == (i ? COF_OK : COF_ERR_NOMEM) && (i || strstr(cof_last_error(), text)),
              "%s %s", cof_status_name(status), cof_last_error());
        CHECK(!plan[0] == !i && !plan[1] == !i, "a plan came out, or none");
        CHECK_OK(cof_team_barrier(team));
        cof_plan_destroy(plan[0]);
        cof_plan_destroy(plan[1]);
    }
    cof_world_destroy(w);
}

int main(void)
{
    test_ranks(3, refused, NULL);
    for (int n_ranks = 1; n_ranks <= 3; n_ranks++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            pthread_barrier_init(&meet, NULL, (unsigned)n_ranks);
            test_ranks(n_ranks, run_plan, bf16 ? &meet : NULL);
            test_ranks(n_ranks, run_trimul, bf16 ? &meet : NULL);
            pthread_barrier_destroy(&meet);
        }
    CHECK(n_calls == 0, "%d calls while plans ran, the last of %s", n_calls, last_call);
    /* The counter works: a plan is made with it on. */
    atomic_store(&counting, 1);
    cof_world *w = test_world(0, 1, NULL, 20);
    atomic_store(&counting, 0);
    CHECK(n_calls > 0, "nothing was counted where there is something to count");
    cof_world_destroy(w);
    return test_done();
}
