/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return on CUDA devices where a rank is killed, passes other writers, or never comes: an
 * error by the deadline on whoever is left, outputs NaN, and a device that can be used again. And
 * what is refused with the caller's memory. Ranks are processes, made by exec: this program once
 * more. Skipped where no device is. */
#define _GNU_SOURCE
#include "test_grad_return.h"

#ifdef COFI_CUDA
#include <cuda_runtime_api.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { N = 2, ROWS = 301, PATIENCE = 60 };
enum { PUSH, PULL, SECTION, STAGED, N_WAYS };
static const char *const ways[] = {"push", "pull", "section", "staged"};

/* ---- tensors on the device ------------------------------------------------------------------ */

/* The host's tensors and their copies, which calls get. */
struct tensors {
    struct test_gr host, there;
};

static void copy(void *dst, const void *src, size_t bytes)
{
    cudaError_t error = cudaMemcpy(dst, src, bytes, cudaMemcpyDefault);
    CHECK(error == cudaSuccess, "cudaMemcpy: %s", cudaGetErrorString(error));
}

static size_t bytes_of(const cof_tensor *t)
{
    size_t n = sizeof(float);
    for (int i = 0; i < t->ndim; i++)
        n *= (size_t)t->shape[i];
    return n;
}

static void to_device(cof_tensor *t, int device)
{
    void *data = NULL;
    cudaError_t error = cudaMalloc(&data, bytes_of(t) + 1);
    CHECK(error == cudaSuccess, "cudaMalloc: %s", cudaGetErrorString(error));
    copy(data, t->data, bytes_of(t));
    t->data = data;
    t->device = (cof_device){COF_DEVICE_CUDA, device};
}

static void make_tensors(struct tensors *t, const cof_grad_return_params *p, const cof_world *world,
                         int seed)
{
    int device = cof_world_device(world);
    cudaSetDevice(device);
    test_gr_make(&t->host, p, cof_world_rank(world), cof_world_size(world), seed);
    t->there = t->host;
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int s = 0; s < t->there.n_sections; s++)
            to_device(&t->there.in[s][is_v], device);
        to_device(&t->there.out[is_v], device);
    }
    t->there.args.dk_out = &t->there.out[0];
    t->there.args.dv_out = &t->there.out[1];
}

static void free_tensors(struct tensors *t)
{
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int s = 0; s < t->there.n_sections; s++)
            cudaFree(t->there.in[s][is_v].data);
        cudaFree(t->there.out[is_v].data);
    }
    test_gr_free(&t->host);
}

static void poison(struct tensors *t)
{
    test_gr_poison(&t->host);
    for (int is_v = 0; is_v < 2; is_v++)
        copy(t->there.out[is_v].data, t->host.out[is_v].data, bytes_of(&t->host.out[is_v]));
}

static void download(struct tensors *t)
{
    for (int is_v = 0; is_v < 2; is_v++)
        copy(t->host.out[is_v].data, t->there.out[is_v].data, bytes_of(&t->host.out[is_v]));
}

static void check_right(struct tensors *t)
{
    download(t);
    int64_t n_wrong = test_gr_wrong(&t->host);
    CHECK(n_wrong == 0, "%lld elements", (long long)n_wrong);
}

static void check_nan(struct tensors *t)
{
    download(t);
    CHECK(test_gr_all_nan(&t->host), "outputs are not NaN");
}

/* ---- a rank --------------------------------------------------------------------------------- */

struct rank {
    int rank, way;
    cof_world *world;
    cof_team *team;
    cof_plan *plan;
    cof_grad_return_params params;
    struct tensors t;
};

static cof_status run(struct rank *r)
{
    return test_gr_run(r->plan, &r->t.there, COF_STREAM_NOW);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool join(struct rank *r, int n_ranks, const char *job, const char *device)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = n_ranks == 1 ? 0 : r->rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_CUDA;
    o.device = device;
    o.init_timeout = 30; /* run_timeout: COFUSE_TIMEOUT */
    CHECK_OK(cof_world_create(&o, &r->world));
    if (!r->world)
        return false;
    r->team = cof_world_team(r->world);
    CHECK_OK(cof_grad_return_plan_create(r->team, &r->params, NULL, &r->plan));
    return r->plan != NULL;
}

/* With a call behind it that passes. */
static bool set_up(struct rank *r, const char *job)
{
    r->params = test_gr_params(ROWS);
    r->params.transfer = r->way == PULL ? COF_TRANSFER_PULL : COF_TRANSFER_PUSH;
    r->params.by_section = r->way == SECTION;
    if (!join(r, N, job, NULL))
        return false;
    make_tensors(&r->t, &r->params, r->world, 1);
    CHECK_OK(cof_team_barrier(r->team)); /* the deadline may be short */
    CHECK_OK(run(r));
    check_right(&r->t);
    poison(&r->t);
    CHECK_OK(cof_team_barrier(r->team));
    return true;
}

/* After the failure: the plan is refused, the team tells; a new world works on the same device. */
static void look_after(struct rank *r, const char *job)
{
    char device[16], alone[80];
    snprintf(device, sizeof device, "%d", cof_world_device(r->world));
    snprintf(alone, sizeof alone, "%s-alone-%d", job, r->rank);
    CHECK(run(r) != COF_OK, "a call on the failed plan passed");
    CHECK(cof_team_query(r->team) != COF_OK, "the team knows of nothing");
    free_tensors(&r->t);
    cof_plan_destroy(r->plan);
    cof_world_destroy(r->world);
    r->plan = NULL;
    r->world = NULL;
    if (!join(r, 1, alone, device))
        return;
    make_tensors(&r->t, &r->params, r->world, 2);
    CHECK_OK(run(r));
    check_right(&r->t);
    free_tensors(&r->t);
    cof_plan_destroy(r->plan);
    cof_world_destroy(r->world);
}

/* Rank 1 dies before its call. By section the last run waits; those before may pass. */
static void killed(struct rank *r, const char *job)
{
    if (r->rank == 1)
        raise(SIGKILL);
    double begin = seconds();
    cof_status status = run(r);
    double took = seconds() - begin;
    CHECK(status == COF_ERR_PEER_DEAD && strstr(cof_last_error(), "rank 1"), "%s: %s",
          cof_status_name(status), cof_last_error());
    CHECK(took < 5, "it took %g s", took);
    if (r->way != SECTION) /* there it may be told before the run that stores the outputs */
        check_nan(&r->t);
    CHECK_FAILS(cof_team_query(r->team), COF_ERR_PEER_DEAD, "rank 1");
    look_after(r, job);
}

/* Rank 1 leaves out who does not see a chunk. */
static void writers_differ(struct rank *r, const char *job)
{
    if (r->rank == 1)
        r->t.there.args.writers = COF_WRITERS_CAUSAL;
    CHECK_FAILS(run(r), COF_ERR_MISMATCH, "ranks disagree about this call");
    if (r->way != SECTION)
        check_nan(&r->t);
    CHECK_OK(cof_team_barrier(r->team)); /* nobody leaves while the other one waits */
    look_after(r, job);
}

/* Rank 1 does not call until rank 0's deadline has passed. */
static void absent(struct rank *r, const char *job)
{
    const char *step = r->way == PULL ? "rank 0 waited for rank 1 at \"partial published"
                                      : "rank 0 waited for rank 1 at \"gradient returned";
    if (r->rank == 0) {
        double begin = seconds();
        CHECK_FAILS(run(r), COF_ERR_TIMEOUT, step);
        double took = seconds() - begin;
        CHECK(took > 0.9 && took < 10, "it took %g s with a deadline of 1 s", took);
        CHECK(strstr(cof_last_error(), "deadline passed"), "%s", cof_last_error());
        if (r->way != SECTION)
            check_nan(&r->t);
    }
    CHECK_OK(cof_team_barrier(r->team));
    if (r->rank == 1)
        CHECK_FAILS(run(r), COF_ERR_TIMEOUT, "told by rank 0");
    CHECK_OK(cof_team_barrier(r->team));
    look_after(r, job);
}

/* ---- the caller's memory, of one rank ------------------------------------------------------- */

static cof_status run_captured(struct rank *r, cof_stream stream, uint32_t epoch)
{
    cudaGraph_t graph = NULL;
    r->t.there.args.epoch = epoch;
    cudaError_t error = cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal);
    CHECK(error == cudaSuccess, "begin: %s", cudaGetErrorString(error));
    cof_status status = test_gr_run(r->plan, &r->t.there, stream);
    error = cudaStreamEndCapture(stream.handle, &graph);
    CHECK(error == cudaSuccess, "end: %s", cudaGetErrorString(error));
    if (graph)
        cudaGraphDestroy(graph);
    return status;
}

static void callers_memory(void)
{
    struct rank r = {.params = test_gr_params(ROWS)};
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
    if (!join(&r, 1, job, "0"))
        return;
    cof_plan_destroy(r.plan);
    r.plan = NULL;
    r.params.peers = &peers;
    r.params.caller_orders_reuse = COF_CALLER_ORDERS_REUSE;
    r.params.driver_wait = COF_DRIVER_WAIT;
    dk = plain;
    CHECK_FAILS(cof_grad_return_plan_create(r.team, &r.params, NULL, &r.plan), COF_ERR_INVALID,
                "memory that CUDA knows");
    dk = block;
    CHECK_OK(cof_grad_return_plan_create(r.team, &r.params, NULL, &r.plan));
    CHECK(strstr(cof_plan_describe(r.plan), "driver_wait=1"), "%s", cof_plan_describe(r.plan));
    make_tensors(&r.t, &r.params, r.world, 3);
    CHECK_OK(cof_stream_create(r.world, 0, &stream));
    CHECK_FAILS(run_captured(&r, stream, 1), COF_ERR_UNSUPPORTED, "captured");
    CHECK_OK(test_gr_run(r.plan, &r.t.there, stream)); /* epoch 1: the refused one was none */
    CHECK_OK(cof_stream_sync(stream));
    check_right(&r.t);
    free_tensors(&r.t);
    cof_stream_destroy(stream);
    cof_plan_destroy(r.plan);
    cof_world_destroy(r.world);
    cudaFree(block);
    free(plain);
}

/* ---- processes ------------------------------------------------------------------------------ */

static const struct test {
    const char *name;
    void (*fn)(struct rank *r, const char *job);
    bool kills; /* rank 1 */
    const char *timeout;
} tests[] = {{"killed", killed, true, "30"},
             {"writers_differ", writers_differ, false, "30"},
             {"absent", absent, false, "1"}};
enum { N_TESTS = sizeof tests / sizeof tests[0] };

/* "TEST WAY RANK JOB PARENT" */
static int child_main(char **words)
{
    struct rank r = {.way = atoi(words[1]), .rank = atoi(words[2])};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != atoi(words[4])) /* it died before prctl */
        return 2;
    alarm(PATIENCE);
    if (set_up(&r, words[3]))
        tests[atoi(words[0])].fn(&r, words[3]);
    fflush(stdout);
    return test_n_failed != 0;
}

static pid_t start(int test, int way, int rank, const char *job)
{
    static char program[] = "unit_cuda_grad_return";
    char words[4][16], name[64];
    pid_t pid = -1;
    snprintf(words[0], sizeof words[0], "%d", test);
    snprintf(words[1], sizeof words[1], "%d", way);
    snprintf(words[2], sizeof words[2], "%d", rank);
    snprintf(words[3], sizeof words[3], "%d", (int)getpid());
    snprintf(name, sizeof name, "%s", job);
    char *argv[] = {program, words[0], words[1], words[2], name, words[3], NULL};
    int error = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ);
    CHECK(error == 0, "posix_spawn: %s", strerror(error));
    return error == 0 ? pid : -1;
}

static void run_test(int test, int way)
{
    static int n_jobs;
    pid_t child[N];
    char job[48];
    snprintf(job, sizeof job, "test-cuda-gr-%d-%d", (int)getpid(), n_jobs++);
    setenv("COFUSE_TIMEOUT", tests[test].timeout, 1);
    setenv("COFUSE_FORCE_STAGED", way == STAGED ? "1" : "0", 1);
    fflush(stdout);
    for (int r = 0; r < N; r++)
        child[r] = start(test, way, r, job);
    for (int r = 0; r < N; r++) {
        int status = 0;
        bool dies = tests[test].kills && r == 1;
        CHECK(child[r] > 0 && waitpid(child[r], &status, 0) == child[r], "rank %d is no process",
              r);
        CHECK(dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0,
              "%s, %s: rank %d ended with %x", tests[test].name, ways[way], r, (unsigned)status);
    }
}

int main(int argc, char **argv)
{
    int n_devices = 0;
    if (argc == 6)
        return child_main(argv + 1);
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices < 1) {
        printf("# no CUDA device\n");
        return 77;
    }
    for (int test = 0; test < N_TESTS; test++)
        for (int way = 0; way < N_WAYS; way++)
            run_test(test, way);
    setenv("COFUSE_FORCE_STAGED", "0", 1);
    callers_memory();
    return test_done();
}
#else
int main(void)
{
    printf("# built without CUDA\n");
    return 77;
}
#endif
