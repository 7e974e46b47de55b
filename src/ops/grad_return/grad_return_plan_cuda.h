/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A plan of grad_return on CUDA devices.
 *
 *   grad_return_cuda.c         sizes, memory, kernels
 *   grad_return_calls_cuda.c   the launches of a call
 *   grad_return_kernels.cu     the kernels; grad_return_lane.cuh has their protocol */
#ifndef COFI_GRAD_RETURN_PLAN_CUDA_H
#define COFI_GRAD_RETURN_PLAN_CUDA_H

#include "backend/cuda/memory_cuda.h"
#include "ops/grad_return/grad_return.h"
#include "ops/grad_return/grad_return_cuda.h"

struct cofi_gr_cuda {
    struct cofi_gr_cut cut;
    bool is_apart; /* blocks of a lane that store from those that sum */
    int grain;
    const void *fast, *any; /* kernels; fast: NULL where a grain is one element */
    bool by_steps;          /* several launches a call: by section, staged, the caller's memory */
    bool is_staged;         /* rows get into another rank's memory by put and get alone */
    cudaStream_t comm;      /* by_steps: sums */
    cudaEvent_t fork, joined;
    struct cofi_cuda_block local;
    float *acc;
    uint64_t acc_v;
    /* The caller's memory, by rank. */
    char *peer[2][COFD_GRID_MAX_RANKS];
    char *ready[COFD_GRID_MAX_RANKS];
    size_t ready_stride;
    bool peers_aligned;
};

/* grad_return_calls_cuda.c: the slot of struct cofi_gr_backend. */
cof_status cofi_gr_cuda_run(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                            cof_stream stream, bool *is_made_out);
/* driver_wait, of an arena that has failed: the driver's waits know no poison, but their words lie
 * in this rank's memory. They get the epoch that is waited for; nobody uses the sums. */
cof_status cofi_gr_cuda_release(const struct cofi_grad_return_plan *plan, uint32_t epoch);

#endif
