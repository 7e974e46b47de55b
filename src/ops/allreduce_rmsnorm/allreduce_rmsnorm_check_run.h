/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One case on one rank, and the tensors of its calls. */
#ifndef COFI_ALLREDUCE_RMSNORM_CHECK_RUN_H
#define COFI_ALLREDUCE_RMSNORM_CHECK_RUN_H

#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_check_data.h"
#include "ops/check_memory.h"

enum cofi_arn_which {
    COFI_ARN_X,
    COFI_ARN_RESIDUAL,
    COFI_ARN_RESIDUAL_OUT,
    COFI_ARN_NORM_OUT,
    COFI_ARN_TENSORS
};
enum { COFI_ARN_MAX_PLANS = 2 };

struct cofi_arn_tensor {
    struct cofi_check_memory memory; /* none: bytes = 0, data = NULL */
    int64_t pitch, shift;            /* elements */
    char *image;                     /* of an input: what was uploaded */
};

struct cofi_arn_set {
    struct cofi_arn_tensor tensor[COFI_ARN_TENSORS];
    size_t x_offset; /* in the arena: of the memory with its red zones */
};

struct cofi_arn_run {
    struct cofi_job *job;
    struct cofi_arn_case c;
    struct cofi_arn_source source;
    const struct cofi_check_device *device; /* NULL: the CPU */
    struct cofi_check_result *result;
    int64_t element, row_bytes;
    int n_plans;
    uint64_t n_delays;
    cof_allreduce_rmsnorm_params params[COFI_ARN_MAX_PLANS];
    struct cofi_check_arena arena[COFI_ARN_MAX_PLANS];
    cof_plan *plan[COFI_ARN_MAX_PLANS];
    cof_stream stream[COFI_ARN_MAX_PLANS];
    struct cofi_check_memory weight;
    int64_t weight_shift; /* bytes */
    struct cofi_arn_set set[COFI_ARN_MAX_SETS];
    void *graph;
    int64_t first, n_in_round; /* calls of the round in hand */
};

/* ---- allreduce_rmsnorm_check_run.c ---- */

/* x in the arena: plans[0]'s is open, and its places are taken. */
cof_status cofi_arn_open_tensors(struct cofi_arn_run *run);
void cofi_arn_close_tensors(struct cofi_arn_run *run);
size_t cofi_arn_x_bytes(const struct cofi_arn_run *run);

struct cofi_arn_view {
    cof_tensor tensor;
    int64_t shape[3], strides[3];
};

/* The first T rows of an argument, of three dims where the layout has them; NULL: it has none. */
const cof_tensor *cofi_arn_view(const struct cofi_arn_run *run, const struct cofi_arn_set *set,
                                enum cofi_arn_which which, int64_t n_rows,
                                struct cofi_arn_view *view);
cof_tensor cofi_arn_view_weight(const struct cofi_arn_run *run, cof_shape *shape);

/* Outputs are poison, inputs that were written over are themselves again. */
cof_status cofi_arn_prepare(struct cofi_arn_run *run, int set);
/* A caller may write to x at once when its stream has got past the call. */
cof_status cofi_arn_spoil_x(struct cofi_arn_run *run, int set);
/* After the call: fails the case where a byte is not what it should be. */
cof_status cofi_arn_inspect(struct cofi_arn_run *run, int64_t call);

#endif
