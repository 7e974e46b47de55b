/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return on CUDA devices where a rank is killed, passes other writers, or never comes: an
 * error by the deadline on whoever is left, outputs NaN, and a device that can be used again. A
 * plan that is destroyed in the middle of a whole. And what is refused with the caller's memory.
 * Ranks are processes, made by exec: this program once more. Skipped where no device is. */
#define _GNU_SOURCE
#include "test_cuda_ranks.h"
#include "test_grad_return.h"

#ifdef COFI_CUDA
enum { ROWS = 301 };
enum { PUSH, PULL, SECTION, STAGED, N_WAYS };
static const char *const ways[] = {"push", "pull", "section", "staged"};

/* ---- tensors on the device ------------------------------------------------------------------ */

/* The host's tensors and their copies, which calls get. */
static struct {
    struct test_gr host, there;
} own;

static cof_grad_return_params params;

static size_t bytes_of(const cof_tensor *t)
{
    size_t n = sizeof(float);
    for (int i = 0; i < t->ndim; i++)
        n *= (size_t)t->shape[i];
    return n;
}

static void to_device(cof_tensor *t, int device)
{
    void *data = test_cuda_alloc(bytes_of(t) + 1);
    test_cuda_copy(data, t->data, bytes_of(t));
    t->data = data;
    t->device = (cof_device){COF_DEVICE_CUDA, device};
}

static void make_tensors(struct test_cuda_rank *r, int seed)
{
    int device = cof_world_device(r->world);
    cudaSetDevice(device);
    test_gr_make(&own.host, &params, cof_world_rank(r->world), cof_world_size(r->world), seed);
    own.there = own.host;
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int s = 0; s < own.there.n_sections; s++)
            to_device(&own.there.in[s][is_v], device);
        to_device(&own.there.out[is_v], device);
    }
    own.there.args.dk_out = &own.there.out[0];
    own.there.args.dv_out = &own.there.out[1];
}

static void free_tensors(struct test_cuda_rank *r)
{
    (void)r;
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int s = 0; s < own.there.n_sections; s++)
            cudaFree(own.there.in[s][is_v].data);
        cudaFree(own.there.out[is_v].data);
    }
    test_gr_free(&own.host);
}

static void poison(struct test_cuda_rank *r)
{
    const cof_tensor *from = own.host.out, *to = own.there.out;
    (void)r;
    test_gr_poison(&own.host);
    for (int is_v = 0; is_v < 2; is_v++)
        test_cuda_copy(to[is_v].data, from[is_v].data, bytes_of(&from[is_v]));
}

static void check(struct test_cuda_rank *r, bool are_nan)
{
    const cof_tensor *from = own.there.out, *to = own.host.out;
    for (int is_v = 0; is_v < 2; is_v++)
        test_cuda_copy(to[is_v].data, from[is_v].data, bytes_of(&to[is_v]));
    if (!are_nan) {
        int64_t n_wrong = test_gr_wrong(&own.host);
        CHECK(n_wrong == 0, "%lld elements", (long long)n_wrong);
    } else if (r->form != SECTION) { /* there it may be told before the run that stores them */
        CHECK(test_gr_all_nan(&own.host), "outputs are not NaN");
    }
}

/* ---- calls and cases ------------------------------------------------------------------------ */

static cof_status make_plan(struct test_cuda_rank *r)
{
    params = test_gr_params(ROWS);
    params.transfer = r->form == PULL ? COF_TRANSFER_PULL : COF_TRANSFER_PUSH;
    params.by_section = r->form == SECTION;
    return cof_grad_return_plan_create(r->team, &params, NULL, &r->plan);
}

static cof_status call(struct test_cuda_rank *r)
{
    return test_gr_run(r->plan, &own.there, COF_STREAM_NOW);
}

/* Rank 1 leaves out who does not see a chunk. */
static void writers_differ(struct test_cuda_rank *r, const char *job)
{
    if (r->rank == 1)
        own.there.args.writers = COF_WRITERS_CAUSAL;
    CHECK_FAILS(call(r), COF_ERR_MISMATCH, "ranks disagree about this call");
    check(r, true);
    CHECK_OK(cof_team_barrier(r->team)); /* nobody leaves while the other one waits */
    test_cuda_look_after(r, job);
}

static void absent(struct test_cuda_rank *r, const char *job)
{
    test_cuda_absent(r, job,
                     r->form == PULL ? "rank 0 waited for rank 1 at \"partial published"
                                     : "rank 0 waited for rank 1 at \"gradient returned",
                     "told by rank 0");
}

/* The first section alone, and its plan destroyed: the plan's own stream waits for another rank. */
static void give_up(struct test_cuda_rank *r, uint32_t epoch)
{
    cof_grad_return_args first = own.there.args;
    cof_stream stream;
    first.dk = &own.there.in[0][0];
    first.dv = &own.there.in[0][1];
    first.dk_out = first.dv_out = NULL;
    first.epoch = epoch;
    CHECK_OK(cof_stream_create(r->world, 0, &stream));
    CHECK_OK(cof_grad_return_run(r->plan, &first, stream));
    CHECK_OK(cof_stream_sync(stream));
    double begin = test_cuda_seconds();
    cof_plan_destroy(r->plan);
    r->plan = NULL;
    cudaError_t error = cudaDeviceSynchronize();
    double took = test_cuda_seconds() - begin;
    CHECK(error == cudaSuccess, "%s", cudaGetErrorString(error));
    CHECK(took < 10, "it took %g s", took);
    cof_stream_destroy(stream);
}

/* Rank 0, while rank 1 makes no call: that one is told. Then both go on. */
static void given_up(struct test_cuda_rank *r, const char *job)
{
    (void)job;
    if (r->rank == 0)
        give_up(r, 0);
    CHECK_OK(cof_team_barrier(r->team));
    if (r->rank == 1)
        CHECK_FAILS(call(r), COF_ERR_POISONED, "told by rank 0: grad_return: plan destroyed after");
    cof_plan_destroy(r->plan);
    CHECK_OK(cof_team_query(r->team));
    CHECK_OK(make_plan(r));
    CHECK_OK(call(r));
    check(r, false);
    CHECK_OK(cof_team_barrier(r->team)); /* nobody leaves while the other one waits */
    test_cuda_leave(r);
}

/* Killed: by section the last run waits; those before may pass. Given up: by section alone. */
static const struct test_cuda_case cases[] = {{"killed", test_cuda_killed, true, "30"},
                                              {"writers_differ", writers_differ, false, "30"},
                                              {"absent", absent, false, "1"},
                                              {"given_up", given_up, false, "30"}};
enum { N_CASES = sizeof cases / sizeof cases[0], GIVEN_UP = N_CASES - 1 };

static const struct test_cuda_op op = {
    .name = "grad_return",
    .n_ranks = 2,
    .cases = cases,
    .make_plan = make_plan,
    .make_tensors = make_tensors,
    .free_tensors = free_tensors,
    .poison = poison,
    .call = call,
    .check = check,
};

/* ---- the caller's memory, of one rank ------------------------------------------------------- */

static cof_status run_captured(struct test_cuda_rank *r, cof_stream stream, uint32_t epoch)
{
    cudaGraph_t graph = NULL;
    own.there.args.epoch = epoch;
    cudaError_t error = cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal);
    CHECK(error == cudaSuccess, "begin: %s", cudaGetErrorString(error));
    cof_status status = test_gr_run(r->plan, &own.there, stream);
    error = cudaStreamEndCapture(stream.handle, &graph);
    CHECK(error == cudaSuccess, "end: %s", cudaGetErrorString(error));
    if (graph)
        cudaGraphDestroy(graph);
    return status;
}

static void callers_memory(void)
{
    struct test_cuda_rank r = {.op = &op, .form = PUSH};
    void *block = NULL, *plain = malloc(1 << 20);
    cof_stream stream;
    char job[48];
    snprintf(job, sizeof job, "test-cuda-gr-caller-%d", (int)getpid());
    CHECK(cudaSetDevice(0) == cudaSuccess && cudaMalloc(&block, 1 << 21) == cudaSuccess, "memory");
    CHECK(cudaMemset(block, 0, 1 << 21) == cudaSuccess, "memset");
    void *dk = block, *dv = (char *)block + (1 << 20);
    uint32_t *ready = (uint32_t *)(void *)((char *)block + (1 << 21) - 128);
    cof_grad_return_peers peers = COF_GRAD_RETURN_PEERS_INIT;
    peers.n_ranks = 1;
    peers.dk = &dk;
    peers.dv = &dv;
    peers.dk_bytes = 1 << 20;
    peers.dv_bytes = (1 << 20) - 128;
    peers.ready = &ready;
    if (!test_cuda_join(&r, 1, job, "0"))
        return;
    cof_plan_destroy(r.plan);
    r.plan = NULL;
    params.peers = &peers;
    params.caller_orders_reuse = COF_CALLER_ORDERS_REUSE;
    params.driver_wait = COF_DRIVER_WAIT;
    dk = plain;
    CHECK_FAILS(cof_grad_return_plan_create(r.team, &params, NULL, &r.plan), COF_ERR_INVALID,
                "memory that CUDA knows");
    dk = block;
    CHECK_OK(cof_grad_return_plan_create(r.team, &params, NULL, &r.plan));
    CHECK(strstr(cof_plan_describe(r.plan), "driver_wait=1"), "%s", cof_plan_describe(r.plan));
    make_tensors(&r, 3);
    CHECK_OK(cof_stream_create(r.world, 0, &stream));
    CHECK_FAILS(run_captured(&r, stream, 1), COF_ERR_UNSUPPORTED, "captured");
    CHECK_OK(test_gr_run(r.plan, &own.there, stream)); /* epoch 1: the refused one was none */
    CHECK_OK(cof_stream_sync(stream));
    check(&r, false);
    cof_stream_destroy(stream);
    test_cuda_leave(&r);
    cudaFree(block);
    free(plain);
}

/* Of two ranks, which are threads: as given_up, and the caller's memory is free again. */
static void callers_whole(int rank, int n_ranks, const char *job, void *arg)
{
    struct test_cuda_rank r = {.op = &op, .form = SECTION, .rank = rank};
    (void)arg;
    if (!test_cuda_enter(&r, n_ranks, job, "0"))
        return;
    CHECK_OK(cof_grad_return_plan_create(r.team, &params, NULL, &r.plan));
    if (rank == 0 && r.plan) {
        make_tensors(&r, 3);
        give_up(&r, 1);
        free_tensors(&r);
    }
    test_meet(n_ranks);
    cof_plan_destroy(r.plan);
    cof_world_destroy(r.world);
}

static void give_up_callers_memory(int driver_wait)
{
    enum { BYTES = 1 << 20, N = 2 };
    char *block = NULL;
    void *dk[N], *dv[N];
    uint32_t *ready[N];
    CHECK(cudaSetDevice(0) == cudaSuccess && cudaMalloc((void **)&block, 3 * N * BYTES) ==
                                                 cudaSuccess, "memory");
    CHECK(cudaMemset(block, 0, 3 * N * BYTES) == cudaSuccess, "memset");
    for (int i = 0; i < N; i++) {
        dk[i] = block + (size_t)(3 * i) * BYTES;
        dv[i] = block + (size_t)(3 * i + 1) * BYTES;
        ready[i] = (uint32_t *)(void *)(block + (size_t)(3 * i + 2) * BYTES);
    }
    const cof_grad_return_peers peers = {.size = sizeof peers, .n_ranks = N, .dk = dk, .dv = dv,
                                         .dk_bytes = BYTES, .dv_bytes = BYTES, .ready = ready};
    params = test_gr_params(ROWS);
    params.by_section = 1;
    params.chunking = COF_CHUNKING_PADDED;
    params.peers = &peers;
    params.caller_orders_reuse = COF_CALLER_ORDERS_REUSE;
    params.driver_wait = driver_wait;
    fflush(stdout);
    alarm(TEST_CUDA_PATIENCE); /* a driver's wait that stays has no deadline */
    test_ranks(N, callers_whole, NULL);
    cudaFree(block);
    alarm(0);
}

int main(int argc, char **argv)
{
    if (argc == TEST_CUDA_WORDS)
        return test_cuda_rank_main(&op, argv);
    if (!test_cuda_devices())
        return 77;
    for (int i = 0; i < N_CASES; i++)
        for (int way = 0; way < N_WAYS; way++) {
            if (i == GIVEN_UP && way != SECTION)
                continue;
            setenv("COFUSE_FORCE_STAGED", way == STAGED ? "1" : "0", 1);
            test_cuda_run(&op, i, way, ways[way]);
        }
    setenv("COFUSE_FORCE_STAGED", "0", 1);
    callers_memory();
    setenv("COFUSE_TIMEOUT", "30", 1);
    give_up_callers_memory(0);
    give_up_callers_memory(COF_DRIVER_WAIT);
    return test_done();
}
#endif
