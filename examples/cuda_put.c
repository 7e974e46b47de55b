/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Each rank puts a line of numbers into the next rank's device memory and signals; all on a stream
 * of this program's own, so the host waits once, at the end. As two ranks:
 * build/cofuse launch -n 2 -- build/examples/cuda_put */
#include <cofuse/cofuse.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 1 << 20 };
static const size_t bytes = N * sizeof(float);

static void check(cof_status status)
{
    if (status == COF_OK)
        return;
    fprintf(stderr, "cuda_put: %s: %s\n", cof_status_name(status), cof_last_error());
    exit(1);
}

static void check_cuda(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "cuda_put: %s\n", cudaGetErrorString(error));
    exit(1);
}

/* Numbers on the device: this rank's, in all places. */
static float *make_numbers(float value)
{
    float *host = malloc(bytes), *device = NULL;
    if (!host)
        exit(1);
    for (int i = 0; i < N; i++)
        host[i] = value;
    check_cuda(cudaMalloc((void **)&device, bytes));
    check_cuda(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    free(host);
    return device;
}

int main(void)
{
    cof_world *world;
    cof_arena *arena;
    cudaStream_t stream;
    float got[2];
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.engine = COF_ENGINE_CUDA; /* the device: COFUSE_DEVICE, else rank modulo devices */
    check(cof_world_create(&options, &world));
    cof_team *team = cof_world_team(world);
    int rank = cof_team_rank(team), n = cof_team_size(team);
    int next = (rank + 1) % n, previous = (rank + n - 1) % n;

    /* Streams and memory are made on the device of this rank. */
    check_cuda(cudaSetDevice(cof_world_device(world)));

    /* Memory first, work later: what allocates may wait for the device. */
    check(cof_arena_create(team, bytes, 1, &arena));
    float *numbers = make_numbers((float)rank), *copy = make_numbers(-1);
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cof_stream on = {COF_STREAM_KIND_CUDA, stream};

    /* Nothing here waits on the host; the wait is a kernel, with a deadline. */
    check(cof_put(arena, next, 0, numbers, bytes, on));
    check(cof_signal(arena, next, 0, on));
    check(cof_wait(arena, previous, 0, on));
    check(cof_get(arena, copy, rank, 0, bytes, on));
    check_cuda(cudaMemcpyAsync(&got[0], copy, sizeof(float), cudaMemcpyDeviceToHost, stream));
    check_cuda(cudaMemcpyAsync(&got[1], copy + N - 1, sizeof(float), cudaMemcpyDeviceToHost,
                               stream));
    check_cuda(cudaStreamSynchronize(stream));
    check(cof_team_query(team)); /* a wait that failed is told here, not by CUDA */
    printf("rank %d of %d: got %.0f .. %.0f from rank %d\n", rank, n, got[0], got[1], previous);

    /* A rank that leaves while others still wait for it looks like one that died. */
    check(cof_team_barrier(team));
    cof_arena_destroy(arena);
    cof_world_destroy(world);
    cudaStreamDestroy(stream);
    cudaFree(numbers);
    cudaFree(copy);
    return (int)got[0] != previous || (int)got[1] != previous;
}
