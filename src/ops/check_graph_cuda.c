/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Work as a graph, and timed by events: what checks and benches of all operators share. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "ops/runtime/runtime_check_cuda.h"
#include "symm/engine_cuda.h"

/* ---- graphs --------------------------------------------------------------------------------- */

/* In the mode that refuses what a caller's capture would refuse. */
static cof_status capture_graph(const struct cofi_check_work *work, cof_stream stream,
                                cudaStream_t handle, cudaGraph_t *graph_out)
{
    COF_CUDA(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal));
    cof_status status = work->fn(work->arg, stream);
    cudaError_t error = cudaStreamEndCapture(handle, graph_out);
    COF_TRY(status);
    COF_CUDA(error);
    return COF_OK;
}

static cof_status capture_here(const struct cofi_check_work *work, cof_stream stream,
                               cudaStream_t handle, cudaGraphExec_t *exec_out)
{
    cudaGraph_t graph = NULL;
    cof_status status = capture_graph(work, stream, handle, &graph);
    cudaError_t error = status == COF_OK ? cudaGraphInstantiate(exec_out, graph, 0) : cudaSuccess;
    if (graph)
        cudaGraphDestroy(graph);
    COF_TRY(status);
    COF_CUDA(error);
    COF_CUDA(cudaGraphUpload(*exec_out, handle));
    COF_CUDA(cudaStreamSynchronize(handle));
    return COF_OK;
}

cof_status cofi_check_cuda_capture(cof_world *world, const struct cofi_check_work *work,
                                   cof_stream stream, void **graph_out)
{
    struct cofi_cuda_scope scope;
    cudaGraphExec_t exec = NULL;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = capture_here(work, stream, cofi_check_cuda_stream(world, stream), &exec);
    cofi_cuda_leave(&scope);
    *graph_out = exec;
    return status;
}

cof_status cofi_check_cuda_replay(cof_world *world, void *graph, cof_stream stream)
{
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cudaError_t error = cudaGraphLaunch(graph, cofi_check_cuda_stream(world, stream));
    cofi_cuda_leave(&scope);
    COF_CUDA(error);
    return COF_OK;
}

void cofi_check_cuda_release(cof_world *world, void *graph)
{
    struct cofi_cuda_scope scope;
    if (!graph || cofi_cuda_enter(world->device->device, &scope) != COF_OK)
        return;
    cudaGraphExecDestroy(graph);
    cofi_cuda_leave(&scope);
}

/* ---- time ----------------------------------------------------------------------------------- */

struct timer {
    cudaEvent_t begin, end;
};

static cof_status open_events(struct timer *t)
{
    COF_CUDA(cudaEventCreate(&t->begin));
    COF_CUDA(cudaEventCreate(&t->end));
    return COF_OK;
}

cof_status cofi_check_cuda_timer_open(cof_world *world, void **timer_out)
{
    struct cofi_cuda_scope scope;
    struct timer *t = *timer_out = calloc(1, sizeof *t);
    COF_FAIL_IF(!t, COF_ERR_NOMEM, "check: no memory");
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = open_events(t);
    cofi_cuda_leave(&scope);
    return status;
}

void cofi_check_cuda_timer_close(cof_world *world, void *timer)
{
    struct timer *t = timer;
    struct cofi_cuda_scope scope;
    if (!t || cofi_cuda_enter(world->device->device, &scope) != COF_OK)
        return;
    if (t->begin)
        cudaEventDestroy(t->begin);
    if (t->end)
        cudaEventDestroy(t->end);
    cofi_cuda_leave(&scope);
    free(t);
}

static cof_status time_here(const struct timer *t, const struct cofi_check_work *work,
                            cof_stream stream, cudaStream_t handle, double *seconds_out)
{
    float ms = 0;
    COF_CUDA(cudaEventRecord(t->begin, handle));
    COF_TRY(work->fn(work->arg, stream));
    COF_CUDA(cudaEventRecord(t->end, handle));
    COF_CUDA(cudaStreamSynchronize(handle));
    COF_CUDA(cudaEventElapsedTime(&ms, t->begin, t->end));
    *seconds_out = (double)ms * 1e-3;
    return COF_OK;
}

cof_status cofi_check_cuda_time(cof_world *world, void *timer, const struct cofi_check_work *work,
                                cof_stream stream, double *seconds_out)
{
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = time_here(timer, work, stream, cofi_check_cuda_stream(world, stream),
                                  seconds_out);
    cofi_cuda_leave(&scope);
    return status;
}
