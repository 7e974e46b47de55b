/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CUDA devices where a rank is killed, passes another T, or never comes: an
 * error by the deadline on whoever is left, outputs NaN, and a device that can be used again. Ranks
 * are processes, made by exec: this program once more. Skipped where no device is. */
#define _GNU_SOURCE
#include "test_allreduce_rmsnorm.h"

#ifdef COFI_CUDA
#include <cuda_runtime_api.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { N = 2, TOKENS = 6, HIDDEN = 1000, MAX_TOKENS = 4, PATIENCE = 60 };

/* ---- tensors on the device ------------------------------------------------------------------ */

/* The host's tensors and their copies, which calls get. */
struct tensors {
    struct test_arn host;
    cof_tensor x, residual, weight, residual_out, norm_out;
    cof_allreduce_rmsnorm_args args;
};

static void copy(void *dst, const void *src, size_t bytes)
{
    cudaError_t error = cudaMemcpy(dst, src, bytes, cudaMemcpyDefault);
    CHECK(error == cudaSuccess, "cudaMemcpy: %s", cudaGetErrorString(error));
}

static cof_tensor on_device(const cof_tensor *host, size_t bytes, int device)
{
    cof_tensor t = *host;
    t.device = (cof_device){COF_DEVICE_CUDA, device};
    t.data = NULL;
    cudaError_t error = cudaMalloc(&t.data, bytes);
    CHECK(error == cudaSuccess, "cudaMalloc: %s", cudaGetErrorString(error));
    copy(t.data, host->data, bytes);
    return t;
}

static void make_tensors(struct tensors *t, const cof_allreduce_rmsnorm_params *p, int64_t n_tokens,
                         const cof_world *world, int seed)
{
    int device = cof_world_device(world);
    test_arn_make(&t->host, p, n_tokens, cof_world_rank(world), cof_world_size(world), seed);
    const size_t bytes = test_arn_bytes(&t->host);
    cudaSetDevice(device);
    t->x = on_device(&t->host.x, bytes, device);
    t->residual = on_device(&t->host.residual, bytes, device);
    t->residual_out = on_device(&t->host.residual_out, bytes, device);
    t->norm_out = on_device(&t->host.norm_out, bytes, device);
    t->weight = on_device(&t->host.weight, (size_t)p->hidden * sizeof(float), device);
    t->args = (cof_allreduce_rmsnorm_args){.size = sizeof t->args, .x = &t->x,
                                           .residual = &t->residual, .weight = &t->weight,
                                           .residual_out = &t->residual_out,
                                           .norm_out = &t->norm_out};
}

static void free_tensors(struct tensors *t)
{
    cof_tensor *all[] = {&t->x, &t->residual, &t->weight, &t->residual_out, &t->norm_out};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        cudaFree(all[i]->data);
    test_arn_free(&t->host);
}

static void poison(struct tensors *t)
{
    test_arn_poison(&t->host);
    copy(t->residual_out.data, t->host.residual_out.data, test_arn_bytes(&t->host));
    copy(t->norm_out.data, t->host.norm_out.data, test_arn_bytes(&t->host));
}

/* Of the outputs. */
static void download(struct tensors *t)
{
    copy(t->host.residual_out.data, t->residual_out.data, test_arn_bytes(&t->host));
    copy(t->host.norm_out.data, t->norm_out.data, test_arn_bytes(&t->host));
}

static void check_right(struct tensors *t)
{
    download(t);
    int64_t n_wrong = test_arn_wrong(&t->host);
    CHECK(n_wrong == 0, "%lld elements", (long long)n_wrong);
}

static void check_nan(struct tensors *t)
{
    download(t);
    CHECK(test_arn_all_nan(&t->host), "outputs are not NaN");
}

/* ---- a rank --------------------------------------------------------------------------------- */

struct rank {
    int rank;
    cof_world *world;
    cof_team *team;
    cof_plan *plan;
    cof_allreduce_rmsnorm_params params;
    struct tensors t;
};

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
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(r->team, &r->params, NULL, &r->plan));
    return r->plan != NULL;
}

/* With a call behind it that passes. */
static bool set_up(struct rank *r, const char *job, cof_allreduce_algorithm algorithm)
{
    r->params = test_arn_params(HIDDEN, MAX_TOKENS);
    r->params.algorithm = algorithm;
    if (!join(r, N, job, NULL))
        return false;
    make_tensors(&r->t, &r->params, TOKENS, r->world, 1);
    CHECK_OK(cof_team_barrier(r->team)); /* the deadline may be short */
    CHECK_OK(cof_allreduce_rmsnorm_run(r->plan, &r->t.args, COF_STREAM_NOW));
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
    poison(&r->t);
    cof_status status = cof_allreduce_rmsnorm_run(r->plan, &r->t.args, COF_STREAM_NOW);
    CHECK(status != COF_OK, "a call on the failed plan passed");
    status = cof_team_query(r->team);
    CHECK(status != COF_OK, "the team knows of nothing");
    free_tensors(&r->t);
    cof_plan_destroy(r->plan);
    cof_world_destroy(r->world);
    r->plan = NULL;
    r->world = NULL;
    if (!join(r, 1, alone, device))
        return;
    make_tensors(&r->t, &r->params, TOKENS, r->world, 2);
    CHECK_OK(cof_allreduce_rmsnorm_run(r->plan, &r->t.args, COF_STREAM_NOW));
    check_right(&r->t);
    free_tensors(&r->t);
    cof_plan_destroy(r->plan);
    cof_world_destroy(r->world);
}

/* Rank 1 dies before its call. */
static void killed(struct rank *r, const char *job)
{
    if (r->rank == 1)
        raise(SIGKILL);
    double begin = seconds();
    cof_status status = cof_allreduce_rmsnorm_run(r->plan, &r->t.args, COF_STREAM_NOW);
    double took = seconds() - begin;
    CHECK(status == COF_ERR_PEER_DEAD && strstr(cof_last_error(), "rank 1"), "%s: %s",
          cof_status_name(status), cof_last_error());
    CHECK(took < 5, "it took %g s", took);
    check_nan(&r->t);
    CHECK_FAILS(cof_team_query(r->team), COF_ERR_PEER_DEAD, "rank 1");
    look_after(r, job);
}

/* Rank 1 has one row. */
static void tokens_differ(struct rank *r, const char *job)
{
    if (r->rank == 1) {
        free_tensors(&r->t);
        make_tensors(&r->t, &r->params, 1, r->world, 1);
    }
    CHECK_FAILS(cof_allreduce_rmsnorm_run(r->plan, &r->t.args, COF_STREAM_NOW), COF_ERR_MISMATCH,
                "ranks disagree about this call");
    check_nan(&r->t);
    CHECK_OK(cof_team_barrier(r->team)); /* nobody leaves while the other one waits */
    look_after(r, job);
}

/* Rank 1 does not call until rank 0's deadline has passed. */
static void absent(struct rank *r, const char *job)
{
    if (r->rank == 0) {
        double begin = seconds();
        CHECK_FAILS(cof_allreduce_rmsnorm_run(r->plan, &r->t.args, COF_STREAM_NOW),
                    COF_ERR_TIMEOUT, "rank 0 waited for rank 1 at \"rows");
        double took = seconds() - begin;
        CHECK(took > 0.9 && took < 10, "it took %g s with a deadline of 1 s", took);
        CHECK(strstr(cof_last_error(), "deadline passed"), "%s", cof_last_error());
        check_nan(&r->t);
    }
    CHECK_OK(cof_team_barrier(r->team));
    if (r->rank == 1)
        CHECK_FAILS(cof_allreduce_rmsnorm_run(r->plan, &r->t.args, COF_STREAM_NOW),
                    COF_ERR_TIMEOUT, "told by rank 0");
    CHECK_OK(cof_team_barrier(r->team));
    look_after(r, job);
}

/* ---- processes ------------------------------------------------------------------------------ */

static const struct test {
    const char *name;
    void (*fn)(struct rank *r, const char *job);
    bool kills; /* rank 1 */
    const char *timeout;
} tests[] = {{"killed", killed, true, "30"},
             {"tokens_differ", tokens_differ, false, "30"},
             {"absent", absent, false, "1"}};
enum { N_TESTS = sizeof tests / sizeof tests[0] };

/* "TEST ALGORITHM RANK JOB PARENT" */
static int child_main(char **words)
{
    struct rank r = {.rank = atoi(words[2])};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != atoi(words[4])) /* it died before prctl */
        return 2;
    alarm(PATIENCE);
    if (set_up(&r, words[3], (cof_allreduce_algorithm)atoi(words[1])))
        tests[atoi(words[0])].fn(&r, words[3]);
    fflush(stdout);
    return test_n_failed != 0;
}

static pid_t start(int test, cof_allreduce_algorithm algorithm, int rank, const char *job)
{
    static char program[] = "unit_cuda_allreduce";
    char words[4][16], name[64];
    pid_t pid = -1;
    snprintf(words[0], sizeof words[0], "%d", test);
    snprintf(words[1], sizeof words[1], "%d", (int)algorithm);
    snprintf(words[2], sizeof words[2], "%d", rank);
    snprintf(words[3], sizeof words[3], "%d", (int)getpid());
    snprintf(name, sizeof name, "%s", job);
    char *argv[] = {program, words[0], words[1], words[2], name, words[3], NULL};
    int error = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ);
    CHECK(error == 0, "posix_spawn: %s", strerror(error));
    return error == 0 ? pid : -1;
}

static void run_test(int test, cof_allreduce_algorithm algorithm, const char *units)
{
    static int n_jobs;
    pid_t child[N];
    char job[48];
    snprintf(job, sizeof job, "test-cuda-arn-%d-%d", (int)getpid(), n_jobs++);
    setenv("COFUSE_TIMEOUT", tests[test].timeout, 1);
    setenv("COFUSE_TAGGED_UNITS", units, 1);
    fflush(stdout);
    for (int r = 0; r < N; r++)
        child[r] = start(test, algorithm, r, job);
    for (int r = 0; r < N; r++) {
        int status = 0;
        bool dies = tests[test].kills && r == 1;
        CHECK(child[r] > 0 && waitpid(child[r], &status, 0) == child[r], "rank %d is no process",
              r);
        CHECK(dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0,
              "%s, algorithm %d, units=%s: rank %d ended with %x", tests[test].name,
              (int)algorithm, units, r, (unsigned)status);
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
    for (int test = 0; test < N_TESTS; test++) {
        run_test(test, COF_ALLREDUCE_ONE_SHOT, "auto");
        run_test(test, COF_ALLREDUCE_TWO_SHOT, "auto");
        run_test(test, COF_ALLREDUCE_ONE_SHOT, "words");
    }
    return test_done();
}
#else
int main(void)
{
    printf("# built without CUDA\n");
    return 77;
}
#endif
