/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Attention on CUDA devices where a rank is killed, or comes too late: an error by the deadline on
 * whoever is left, also in the middle of a ring; outputs NaN, and a device that can be used again.
 * And what plans on devices refuse. Ranks are processes, made by exec: this program once more.
 * Skipped where no device is. */
#define _GNU_SOURCE
#include "test.h"

#ifdef COFI_CUDA
#include <cuda_runtime_api.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { N = 3, HEADS = 2, DIM = 8, ROWS = 66, PATIENCE = 60 };

/* ---- tensors on the device ------------------------------------------------------------------ */

enum { Q, K, V, O, LSE, N_TENSORS };

/* q = 0, so that every query takes the mean of v, whose rows hold their own numbers. */
struct tensors {
    int64_t n_rows; /* local */
    float *host[N_TENSORS];
    cof_shape shape[N_TENSORS];
    cof_tensor tensor[N_TENSORS];
    cof_attention_args args;
};

static size_t bytes_of(const struct tensors *t, int which)
{
    return (size_t)(t->n_rows * HEADS * (which == LSE ? 1 : DIM)) * sizeof(float);
}

static void copy(void *dst, const void *src, size_t bytes)
{
    cudaError_t error = cudaMemcpy(dst, src, bytes, cudaMemcpyDefault);
    CHECK(error == cudaSuccess, "cudaMemcpy: %s", cudaGetErrorString(error));
}

static float value_of(int which, int64_t global, int64_t i)
{
    switch (which) {
    case K: return (float)(i % 5) - 2;
    case V: return (float)global;
    case Q: return 0;
    default: return NAN;
    }
}

static void fill(struct tensors *t, int which, const cof_layout *layout, int rank)
{
    int64_t per_row = which == LSE ? HEADS : HEADS * DIM;
    for (int64_t i = 0; i < t->n_rows * per_row; i++)
        t->host[which][i] = value_of(which, cof_layout_global_row(layout, rank, i / per_row), i);
    copy(t->tensor[which].data, t->host[which], bytes_of(t, which));
}

static void make_tensors(struct tensors *t, cof_world *world)
{
    cof_layout layout = {COF_LAYOUT_ZIGZAG, COF_CHUNKING_BALANCED, cof_world_size(world), ROWS};
    cof_device device = {COF_DEVICE_CUDA, cof_world_device(world)};
    cudaSetDevice(cof_world_device(world));
    t->n_rows = cof_layout_local_rows(&layout, cof_world_rank(world));
    for (int i = 0; i < N_TENSORS; i++) {
        void *data = NULL;
        cudaError_t error = cudaMalloc(&data, bytes_of(t, i));
        CHECK(error == cudaSuccess, "cudaMalloc: %s", cudaGetErrorString(error));
        t->host[i] = malloc(bytes_of(t, i));
        t->shape[i] = i == LSE ? (cof_shape){{1, HEADS, t->n_rows}}
                               : (cof_shape){{1, t->n_rows, HEADS, DIM}};
        t->tensor[i] = cof_tensor_make(data, device, COF_F32, i == LSE ? 3 : 4, &t->shape[i]);
        fill(t, i, &layout, cof_world_rank(world));
    }
    t->args = (cof_attention_args){.size = sizeof t->args, .q = &t->tensor[Q], .k = &t->tensor[K],
                                   .v = &t->tensor[V], .o = &t->tensor[O], .lse = &t->tensor[LSE]};
}

static void free_tensors(struct tensors *t)
{
    for (int i = 0; i < N_TENSORS; i++) {
        cudaFree(t->tensor[i].data);
        free(t->host[i]);
    }
}

static void poison(struct tensors *t)
{
    for (int which = O; which <= LSE; which++) {
        memset(t->host[which], 0, bytes_of(t, which));
        copy(t->tensor[which].data, t->host[which], bytes_of(t, which));
    }
}

static void check_outputs(struct tensors *t, bool are_nan)
{
    const double wanted[] = {[O] = (ROWS - 1) / 2.0, [LSE] = log((double)ROWS)};
    for (int which = O; which <= LSE; which++) {
        int64_t n = (int64_t)(bytes_of(t, which) / sizeof(float)), n_bad = 0;
        copy(t->host[which], t->tensor[which].data, bytes_of(t, which));
        for (int64_t i = 0; i < n; i++) {
            double x = t->host[which][i];
            n_bad += are_nan ? !isnan(x) : !(fabs(x - wanted[which]) < 1e-3);
        }
        CHECK(n_bad == 0, "%s: %lld of %lld elements are not %s, the first is %g",
              which == O ? "o" : "lse", (long long)n_bad, (long long)n, are_nan ? "NaN" : "right",
              (double)t->host[which][0]);
    }
}

/* ---- a rank --------------------------------------------------------------------------------- */

struct rank {
    int rank;
    cof_world *world;
    cof_team *team;
    cof_plan *plan;
    cof_attention_params params;
    struct tensors t;
};

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static cof_attention_params params_of(cof_attention_schedule schedule)
{
    cof_attention_params p = COF_ATTENTION_PARAMS_INIT;
    p.dtype = COF_F32;
    p.n_batch = 1;
    p.n_rows = ROWS;
    p.n_heads = HEADS;
    p.head_dim_qk = DIM;
    p.forward_only = 1;
    p.schedule = schedule;
    return p;
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
    CHECK_OK(cof_attention_plan_create(r->team, &r->params, NULL, &r->plan));
    return r->plan != NULL;
}

/* With a call behind it that passes. */
static bool set_up(struct rank *r, const char *job, cof_attention_schedule schedule)
{
    r->params = params_of(schedule);
    if (!join(r, N, job, NULL))
        return false;
    make_tensors(&r->t, r->world);
    CHECK_OK(cof_team_barrier(r->team)); /* the deadline may be short */
    CHECK_OK(cof_attention_forward(r->plan, &r->t.args, COF_STREAM_NOW));
    check_outputs(&r->t, false);
    poison(&r->t);
    CHECK_OK(cof_team_barrier(r->team));
    return true;
}

static void leave(struct rank *r)
{
    free_tensors(&r->t);
    cof_plan_destroy(r->plan);
    cof_world_destroy(r->world);
    r->plan = NULL;
    r->world = NULL;
}

/* After the failure: the plan is refused, the team tells; a new world works on the same device. */
static void look_after(struct rank *r, const char *job)
{
    char device[16], alone[80];
    snprintf(device, sizeof device, "%d", cof_world_device(r->world));
    snprintf(alone, sizeof alone, "%s-alone-%d", job, r->rank);
    cof_status status = cof_attention_forward(r->plan, &r->t.args, COF_STREAM_NOW);
    CHECK(status != COF_OK, "a call on the failed plan passed");
    status = cof_team_query(r->team);
    CHECK(status != COF_OK, "the team knows of nothing");
    leave(r);
    if (!join(r, 1, alone, device))
        return;
    make_tensors(&r->t, r->world);
    CHECK_OK(cof_attention_forward(r->plan, &r->t.args, COF_STREAM_NOW));
    check_outputs(&r->t, false);
    leave(r);
}

/* The last rank dies before its call: of the two others one waits for it in the first step of its
 * ring, and the other one in the second, with a section done. */
static void killed(struct rank *r, const char *job)
{
    if (r->rank == N - 1)
        raise(SIGKILL);
    double begin = seconds();
    CHECK_FAILS(cof_attention_forward(r->plan, &r->t.args, COF_STREAM_NOW), COF_ERR_PEER_DEAD,
                "rank 2");
    double took = seconds() - begin;
    CHECK(took < 5, "it took %g s", took);
    check_outputs(&r->t, true);
    CHECK_FAILS(cof_team_query(r->team), COF_ERR_PEER_DEAD, "rank 2");
    look_after(r, job);
}

/* The last rank does not call until the others' deadlines have passed. */
static void absent(struct rank *r, const char *job)
{
    if (r->rank != N - 1) {
        double begin = seconds();
        CHECK_FAILS(cof_attention_forward(r->plan, &r->t.args, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                    "keys published");
        double took = seconds() - begin;
        CHECK(took > 0.9 && took < 10, "it took %g s with a deadline of 1 s", took);
        check_outputs(&r->t, true);
    }
    CHECK_OK(cof_team_barrier(r->team));
    if (r->rank == N - 1)
        CHECK_FAILS(cof_attention_forward(r->plan, &r->t.args, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                    "told by rank");
    CHECK_OK(cof_team_barrier(r->team));
    look_after(r, job);
}

/* Strides of other tensors, and what there is none of on devices yet. */
static void refused(struct rank *r, const char *job)
{
    cof_attention_params p = r->params;
    cof_plan *plan = NULL;
    (void)job;
    p.forward_only = 0;
    CHECK_FAILS(cof_attention_plan_create(r->team, &p, NULL, &plan), COF_ERR_UNSUPPORTED,
                "set params.forward_only");
    CHECK(plan == NULL, "a plan");
    p = r->params;
    p.only_compact = 1;
    CHECK_OK(cof_attention_plan_create(r->team, &p, NULL, &plan));
    if (plan) {
        cof_shape strides = {{0, HEADS * DIM, DIM, 1}};
        cof_tensor half = r->t.tensor[Q]; /* every head row twice as far from the next */
        strides.dim[1] *= 2;
        half.strides = strides.dim;
        cof_attention_args args = r->t.args;
        args.q = &half;
        CHECK_FAILS(cof_attention_forward(plan, &args, COF_STREAM_NOW), COF_ERR_INVALID,
                    "only_compact");
        CHECK_OK(cof_attention_forward(plan, &r->t.args, COF_STREAM_NOW));
        check_outputs(&r->t, false);
        CHECK_OK(cof_team_barrier(r->team));
        cof_plan_destroy(plan);
    }
    leave(r);
}

/* ---- processes ------------------------------------------------------------------------------ */

static const struct test {
    const char *name;
    void (*fn)(struct rank *r, const char *job);
    bool kills; /* the last rank */
    const char *timeout;
} tests[] = {{"killed", killed, true, "30"},
             {"absent", absent, false, "1"},
             {"refused", refused, false, "30"}};
enum { N_TESTS = sizeof tests / sizeof tests[0] };

/* "TEST SCHEDULE RANK JOB PARENT" */
static int child_main(char **words)
{
    struct rank r = {.rank = atoi(words[2])};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != atoi(words[4])) /* it died before prctl */
        return 2;
    alarm(PATIENCE);
    if (set_up(&r, words[3], (cof_attention_schedule)atoi(words[1])))
        tests[atoi(words[0])].fn(&r, words[3]);
    fflush(stdout);
    return test_n_failed != 0;
}

static pid_t start(int test, cof_attention_schedule schedule, int rank, const char *job)
{
    static char program[] = "unit_cuda_attention";
    char words[4][16], name[64];
    pid_t pid = -1;
    snprintf(words[0], sizeof words[0], "%d", test);
    snprintf(words[1], sizeof words[1], "%d", (int)schedule);
    snprintf(words[2], sizeof words[2], "%d", rank);
    snprintf(words[3], sizeof words[3], "%d", (int)getpid());
    snprintf(name, sizeof name, "%s", job);
    char *argv[] = {program, words[0], words[1], words[2], name, words[3], NULL};
    int error = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ);
    CHECK(error == 0, "posix_spawn: %s", strerror(error));
    return error == 0 ? pid : -1;
}

static void run_test(int test, cof_attention_schedule schedule)
{
    static int n_jobs;
    pid_t child[N];
    char job[48];
    snprintf(job, sizeof job, "test-cuda-attention-%d-%d", (int)getpid(), n_jobs++);
    setenv("COFUSE_TIMEOUT", tests[test].timeout, 1);
    fflush(stdout);
    for (int r = 0; r < N; r++)
        child[r] = start(test, schedule, r, job);
    for (int r = 0; r < N; r++) {
        int status = 0;
        bool dies = tests[test].kills && r == N - 1;
        CHECK(child[r] > 0 && waitpid(child[r], &status, 0) == child[r], "rank %d is no process",
              r);
        CHECK(dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0,
              "%s, schedule %d: rank %d ended with %x", tests[test].name, (int)schedule, r,
              (unsigned)status);
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
        run_test(test, COF_SCHEDULE_RING);
        run_test(test, COF_SCHEDULE_GATHER);
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
