/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Worlds on CUDA devices, ranks as threads: options, streams and events, memory that is refused,
 * attached memory, and what a rank that fails does to the others. Skipped where no device is. That
 * transfers and plans keep their promises is the matter of `cofuse check --device cuda`. */
#include "test_cuda.h"

#ifdef COFI_CUDA
#include <sys/wait.h>

#include "symm/call_cuda.h"

void cofk_runtime_copy(void); /* the kernel's name on the host */

#define N 2
#define BYTES 4096

static cof_status open_world(int rank, int n_ranks, const char *job, const char *device,
                             double run_timeout, cof_world **world_out)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_CUDA;
    o.device = device;
    o.init_timeout = 20;
    o.run_timeout = run_timeout;
    return cof_world_create(&o, world_out);
}

static cof_world *make_world(int rank, int n_ranks, const char *job)
{
    cof_world *w = NULL;
    if (open_world(rank, n_ranks, job, NULL, 5, &w) != COF_OK) {
        printf("not ok world of %d, rank %d: %s\n", n_ranks, rank, cof_last_error());
        exit(1);
    }
    return w;
}

/* A rank whose device is none fails, and so do the others, which learn why. */
static void test_bad_device(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = NULL;
    (void)arg;
    cof_status status = open_world(rank, n_ranks, job, rank == 1 ? "GPU-00000000" : NULL, 5, &w);
    CHECK(status == COF_ERR_INVALID && !w && strstr(cof_last_error(), "options.device"), "%s: %s",
          cof_status_name(status), cof_last_error());
}

/* No call changes the thread's current device, or makes one current where none was. */
static void test_current(int rank, int n_ranks, const char *job, void *arg)
{
    int n_devices = 0, before = -1, after = -2;
    (void)arg;
    cudaGetDeviceCount(&n_devices);
    cudaSetDevice((rank + 1) % n_devices);
    cudaGetDevice(&before);
    cof_world *w = NULL;
    CHECK_OK(open_world(rank, n_ranks, job, "0", 5, &w));
    cof_arena *a = NULL;
    CHECK_OK(cof_arena_create(cof_world_team(w), BYTES, 1, &a));
    CHECK_OK(cof_signal(a, rank, 0, COF_STREAM_NOW));
    CHECK_OK(cof_wait(a, rank, 0, COF_STREAM_NOW));
    cudaGetDevice(&after);
    CHECK(before == after, "device %d before, %d after", before, after);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_arena_destroy(a);
    cof_world_destroy(w);
    cudaGetDevice(&after);
    CHECK(before == after, "device %d before, %d at the end", before, after);
}

static void check_memory(cof_arena *a, int rank)
{
    char *pinned = NULL, *device = NULL;
    static char plain[N][64];
    cudaMallocHost((void **)&pinned, 64);
    cudaMalloc((void **)&device, 64);
    for (int i = 0; i < 64; i++)
        pinned[i] = (char)(i + 1);
    CHECK_FAILS(cof_put(a, rank, 0, plain[rank], 64, COF_STREAM_NOW), COF_ERR_INVALID, "src = ");
    CHECK_FAILS(cof_get(a, plain[rank], rank, 0, 64, COF_STREAM_NOW), COF_ERR_INVALID, "dst = ");
    CHECK_OK(cof_put(a, rank, 1, pinned, 63, COF_STREAM_NOW));
    CHECK_OK(cof_get(a, device, rank, 0, 64, COF_STREAM_NOW));
    memset(pinned, 0, 64);
    cudaMemcpy(pinned, device, 64, cudaMemcpyDeviceToHost);
    CHECK(pinned[0] == 0 && pinned[1] == 1 && pinned[63] == 63, "%d %d %d", pinned[0], pinned[1],
          pinned[63]);
    cudaFreeHost(pinned);
    cudaFree(device);
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices < 2)
        return;
    cudaSetDevice(1);
    cudaMalloc((void **)&device, 64);
    CHECK_FAILS(cof_get(a, device, rank, 0, 64, COF_STREAM_NOW), COF_ERR_INVALID,
                "memory of device 1: wanted memory of this rank's device, 0");
    cudaFree(device);
    cudaSetDevice(0);
}

static void check_streams(cof_world *w, cof_arena *a, int rank)
{
    cof_stream first, second, cpu = {COF_STREAM_KIND_CPU, w};
    cof_event event, old;
    CHECK_OK(cof_stream_create(w, 0, &first));
    CHECK_OK(cof_stream_create(w, 0, &second));
    CHECK(first.kind == COF_STREAM_KIND_CUDA && first.handle, "kind %d", first.kind);
    CHECK_FAILS(cof_signal(a, rank, 0, cpu), COF_ERR_INVALID, "on a world of engine cuda");
    CHECK_OK(cof_signal(a, rank, 0, first));
    CHECK_OK(cof_event_record(first, &event));
    CHECK_OK(cof_stream_wait_event(second, event));
    CHECK_OK(cof_wait(a, rank, 0, second));
    CHECK_OK(cof_stream_sync(second));
    old = event;
    for (int i = 0; i < 1024; i++)
        CHECK_OK(cof_event_record(first, &event));
    CHECK_FAILS(cof_stream_wait_event(second, old), COF_ERR_INVALID, "was overwritten");
    CHECK_OK(cof_stream_wait_event(second, event));
    event.sequence += 1 << 20;
    CHECK_FAILS(cof_stream_wait_event(second, event), COF_ERR_INVALID, "no event");
    CHECK_FAILS(cof_stream_wait_event(cpu, old), COF_ERR_INVALID, "wanted 2 (CUDA) for both");
    CHECK_OK(cof_stream_sync(first));
    cof_stream_destroy(first);
    cof_stream_destroy(second);
    CHECK_OK(cof_team_query(cof_world_team(w)));
}

/* The world is on device 0. */
static void check_foreign_stream(cof_arena *a, int rank)
{
    cof_stream foreign = {COF_STREAM_KIND_CUDA, NULL};
    int n_devices = 0;
    cudaGetDeviceCount(&n_devices);
    if (n_devices < 2)
        return;
    cudaSetDevice(1);
    CHECK(cudaStreamCreate((cudaStream_t *)&foreign.handle) == cudaSuccess, "no stream");
    CHECK_FAILS(cof_signal(a, rank, 0, foreign), COF_ERR_INVALID, "wanted this rank's device, 0");
    CHECK(cudaGetLastError() == cudaSuccess, "an error of ours was left to the caller");
    cof_stream_destroy(foreign);
}

/* A child is refused before CUDA is asked, and what it destroys are copies. */
static void check_child(cof_world *w, cof_arena *a, int rank)
{
    cof_stream stream = {0};
    cof_event event;
    CHECK_OK(cof_stream_create(w, 0, &stream));
    CHECK_OK(cof_event_record(stream, &event));
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        test_n_failed = 0;
        CHECK_FAILS(cof_put(a, rank, 0, w, 64, stream), COF_ERR_INVALID, "before fork");
        CHECK_FAILS(cof_signal(a, rank, 0, COF_STREAM_NOW), COF_ERR_INVALID, "before fork");
        CHECK_FAILS(cof_stream_sync(stream), COF_ERR_INVALID, "before fork");
        CHECK_FAILS(cof_event_record(stream, &event), COF_ERR_INVALID, "before fork");
        CHECK_FAILS(cof_stream_wait_event(stream, event), COF_ERR_INVALID, "before fork");
        cof_stream_destroy(stream);
        cof_arena_destroy(a);
        cof_world_destroy(w);
        fflush(stdout);
        _exit(test_n_failed != 0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child ended with %x", (unsigned)status);
    CHECK_OK(cof_stream_sync(stream));
    cof_stream_destroy(stream);
}

/* A signal to itself on a second stream, with events on both sides, captured and replayed. */
static void check_capture(cof_world *w, cof_arena *a, int rank)
{
    enum { N_REPLAYS = 50 };
    cof_stream s[2];
    cof_event event;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CHECK_OK(cof_stream_create(w, 1, &s[0]));
    CHECK_OK(cof_stream_create(w, 1, &s[1]));
    CHECK(cudaStreamBeginCapture(s[0].handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
          "no capture");
    CHECK_OK(cof_event_record(s[0], &event));
    CHECK_OK(cof_stream_wait_event(s[1], event));
    CHECK_OK(cof_signal(a, rank, 0, s[1]));
    CHECK_OK(cof_event_record(s[1], &event));
    CHECK_OK(cof_stream_wait_event(s[0], event));
    CHECK_OK(cof_wait(a, rank, 0, s[0]));
    CHECK(cudaStreamEndCapture(s[0].handle, &graph) == cudaSuccess, "%s",
          cudaGetErrorString(cudaGetLastError()));
    CHECK(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess, "no graph");
    for (int i = 0; i < N_REPLAYS; i++)
        CHECK(cudaGraphLaunch(replay, s[0].handle) == cudaSuccess, "replay %d", i);
    CHECK_OK(cof_stream_sync(s[0]));
    CHECK_OK(cof_signal(a, rank, 0, s[0]));
    CHECK_OK(cof_wait(a, rank, 0, s[0]));
    CHECK_OK(cof_stream_sync(s[0]));
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cof_stream_destroy(s[0]);
    cof_stream_destroy(s[1]);
}

static void test_calls(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = NULL;
    CHECK_OK(open_world(rank, n_ranks, job, "0", 5, &w));
    cof_team *team = cof_world_team(w);
    cof_arena *a = NULL;
    cof_plan *plan = NULL;
    CHECK(!strcmp(cof_world_engine(w), "cuda"), "engine %s", cof_world_engine(w));
    CHECK(cof_world_device(w) == 0, "device %d", cof_world_device(w));
    CHECK_OK(cof_arena_create(team, BYTES, 1, &a));
    check_memory(a, rank);
    check_streams(w, a, rank);
    check_capture(w, a, rank);
    check_child(w, a, rank);
    check_foreign_stream(a, rank);
    const cof_attention_params params = test_attention_params(64);
    CHECK_FAILS(cof_attention_plan_create(team, &params, NULL, &plan), COF_ERR_UNSUPPORTED,
                "attention: backward on CUDA devices is not there yet");
    CHECK_OK(cof_team_barrier(team));
    cof_arena_destroy(a);
    cof_world_destroy(w);
}

/* The 512 abort words of a world: one team more fails on all ranks, and those there live on. */
static void test_many_teams(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = make_world(rank, n_ranks, job);
    cof_team *teams[512] = {0}, *more = NULL;
    const int ranks[N] = {0, 1};
    int n = 0;
    while (n < 511 && cof_team_create(w, ranks, N, (uint64_t)n, &teams[n]) == COF_OK)
        n++;
    CHECK(n == 511, "%d teams beside the world's: %s", n, cof_last_error());
    CHECK_FAILS(cof_team_create(w, ranks, N, 1000, &more), COF_ERR_NOMEM, "512 teams");
    cof_team_destroy(teams[--n]);
    CHECK_OK(cof_team_create(w, ranks, N, 1001, &more));
    CHECK_OK(cof_team_barrier(more));
    cof_team_destroy(more);
    while (n > 0)
        cof_team_destroy(teams[--n]);
    cof_world_destroy(w);
}

/* Rank 1 is away: rank 0's wait ends by the deadline, and both learn of it without a stream. */
static void test_deadline(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = NULL;
    cof_arena *a = NULL;
    (void)arg;
    CHECK_OK(open_world(rank, n_ranks, job, NULL, 0.5, &w));
    cof_team *team = cof_world_team(w);
    CHECK_OK(cof_arena_create(team, BYTES, 1, &a));
    if (rank == 0)
        CHECK_FAILS(cof_wait(a, 1, 0, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                    "cof_wait: rank 0 waited for rank 1: deadline passed");
    CHECK_OK(cof_team_barrier(team));
    CHECK_FAILS(cof_team_query(team), COF_ERR_TIMEOUT, "rank 0 waited for rank 1");
    CHECK((rank == 1) == (strstr(cof_last_error(), "told by rank 0") != NULL), "%s",
          cof_last_error());
    CHECK_FAILS(cof_signal(a, 0, 0, COF_STREAM_NOW), COF_ERR_TIMEOUT, "rank 0 waited for rank 1");
    char *pinned = NULL;
    cudaMallocHost((void **)&pinned, 64);
    memset(pinned, 0, 64);
    CHECK_FAILS(cof_get(a, pinned, 0, 0, 64, COF_STREAM_NOW), COF_ERR_TIMEOUT, "rank 0 waited");
    CHECK(pinned[0] == (char)0xff && pinned[63] == (char)0xff, "%d %d", pinned[0], pinned[63]);
    cudaFreeHost(pinned);
    CHECK_OK(cof_team_barrier(team));
    cof_arena_destroy(a);
    cof_world_destroy(w);
}

static void *blocks[N];

static void test_attach(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = make_world(rank, n_ranks, job);
    cof_team *team = cof_world_team(w);
    cof_arena *a = NULL;
    static char host[BYTES] __attribute__((aligned(128)));
    size_t bytes = cof_arena_attach_bytes(team, BYTES, 1);
    int n_devices = 0;
    cudaGetDeviceCount(&n_devices);
    cudaSetDevice(rank % n_devices);
    if (n_devices > 1) /* plain pointers serve in one process, once peers may be reached */
        cudaDeviceEnablePeerAccess((rank + 1) % n_devices, 0);
    cudaGetLastError(); /* they were before */
    CHECK(cudaMalloc(&blocks[rank], bytes) == cudaSuccess, "no device memory");
    CHECK_OK(cof_team_barrier(team));
    void *base[N] = {blocks[0], blocks[1]}, *swapped[N] = {blocks[1], blocks[1]};
    cof_peers peers = COF_PEERS_INIT;
    peers.n_ranks = n_ranks;
    peers.base = rank == 1 ? swapped : base;
    peers.bytes = bytes;
    peers.n_words = 1;
    CHECK_FAILS(cof_arena_attach(team, &peers, &a), COF_ERR_INVALID, "is not the block of rank");
    void *wrong[N] = {host, host};
    peers.base = wrong;
    CHECK_FAILS(cof_arena_attach(team, &peers, &a), COF_ERR_INVALID, "peers.base[0]");
    void *foreign[N] = {blocks[1 - rank], blocks[1 - rank]};
    peers.base = foreign;
    if (n_devices > 1)
        CHECK_FAILS(cof_arena_attach(team, &peers, &a), COF_ERR_INVALID, "is memory of device");
    peers.base = base;
    CHECK_OK(cof_arena_attach(team, &peers, &a));
    CHECK_OK(cof_signal(a, 1 - rank, 0, COF_STREAM_NOW));
    CHECK_OK(cof_wait(a, 1 - rank, 0, COF_STREAM_NOW));
    CHECK_OK(cof_team_barrier(team));
    cof_arena_destroy(a);
    CHECK_OK(cof_team_barrier(team));
    cudaFree(blocks[rank]);
    cof_world_destroy(w);
}

/* Blocks that may wait for each other: what the device runs at once, divided by its ranks, and no
 * more than either cap. */
static void test_max_blocks(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = NULL, *small = NULL;
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    int n_sms = 0, n = 0, fewer = 0;
    char text[128];
    (void)arg;
    CHECK_OK(open_world(rank, n_ranks, job, "0", 5, &w)); /* all on one device */
    cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, 0);
    cof_team *team = cof_world_team(w);
    const void *kernel = (const void *)cofk_runtime_copy;
    CHECK_OK(cofi_cuda_max_blocks(team, kernel, 512, 0, 0, &n));
    CHECK(n >= n_sms / n_ranks && n <= 4 * n_sms / n_ranks, "%d blocks of 512 threads on %d SMs", n,
          n_sms);
    CHECK_OK(cofi_cuda_max_blocks(team, kernel, 512, 0, 5, &fewer));
    CHECK(fewer == 5, "%d blocks, wanted 5", fewer);
    CHECK_OK(cofi_cuda_max_blocks(team, kernel, 512, (size_t)40 << 10, n, &fewer));
    CHECK(fewer >= 1 && fewer <= n, "%d blocks with shared memory, %d without", fewer, n);
    CHECK_FAILS(cofi_cuda_max_blocks(team, kernel, 512, (size_t)4 << 20, 0, &n),
                COF_ERR_UNSUPPORTED, "cannot hold a block of 512 threads");
    snprintf(text, sizeof text, "%s-small", job);
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = text;
    o.engine = COF_ENGINE_CUDA;
    o.device = "0";
    o.max_ctas = 3;
    CHECK_OK(cof_world_create(&o, &small));
    CHECK_OK(cofi_cuda_max_blocks(cof_world_team(small), kernel, 512, 0, 0, &n));
    CHECK(n == 3, "%d blocks, wanted max_ctas = 3", n);
    cof_world_destroy(small);
    cof_world_destroy(w);
}

/* A stream of CUDA's on a world of the CPU. */
static void test_cpu_world(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 5);
    cof_arena *a = NULL;
    CHECK_OK(cof_arena_create(cof_world_team(w), BYTES, 1, &a));
    CHECK_FAILS(cof_signal(a, 0, 0, (cof_stream){COF_STREAM_KIND_CUDA, NULL}), COF_ERR_INVALID,
                "on a world of engine thread");
    CHECK(cof_world_device(w) == -1, "device %d", cof_world_device(w));
    cof_arena_destroy(a);
    cof_world_destroy(w);
}

static void run_all(void)
{
    test_ranks(N, test_bad_device, NULL);
    test_ranks(N, test_current, NULL);
    test_ranks(1, test_calls, NULL);
    test_ranks(N, test_deadline, NULL);
    test_ranks(N, test_attach, NULL);
}

int main(void)
{
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* ranks of a process run side by side */
    test_ranks(1, test_cpu_world, NULL);
    if (!test_cuda_devices())
        return test_n_failed ? 1 : 77;
    run_all();
    test_ranks(N, test_many_teams, NULL);
    test_ranks(N, test_max_blocks, NULL);
    setenv("COFUSE_CUDA_MEMORY", "ipc", 1);
    run_all();
    return test_done();
}
#endif
