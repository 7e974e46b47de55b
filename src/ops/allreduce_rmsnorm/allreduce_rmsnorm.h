/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm from the inside: plan, calls, back ends.
 *
 * One rule makes all its exchange buffers safe without acknowledgements: a call ends on a rank only
 * when the rank has seen of every peer that it has begun that call, by its signal word or by the
 * tags of its rows, and buffers come in two halves, by the parity of the epoch. Who is past call n
 * has seen that everybody began n, hence left n - 1, whose half it writes next
 * (models/tagged_push.pml, two_shot.pml). */
#ifndef COFI_ALLREDUCE_RMSNORM_H
#define COFI_ALLREDUCE_RMSNORM_H

#include "cofuse/allreduce_rmsnorm.h"
#include "core/tensor.h"
#include "ops/plan.h"
#include "symm/arena.h"

#define COFI_ARN_SEGMENT 256 /* elements of a row whose squares form one tree */
#define COFI_ARN_MAX_RANKS 16

/* Rows of a call's tensor; data = NULL: there is none. */
struct cofi_arn_rows {
    char *data;
    int64_t pitch; /* bytes from row to row */
};

struct cofi_arn_call {
    int64_t n_tokens; /* > 0 */
    struct cofi_arn_rows x, residual, residual_out, norm_out;
    const void *weight; /* NULL with ONLY */
    int64_t x_source;
};

struct cofi_arn_plan;

/* What the devices do, each in its own way. */
struct cofi_arn_backend {
    const char *name; /* "cpu", "cuda" */
    /* COF_ERR_UNSUPPORTED for what only the other one can; NULL: takes all. */
    cof_status (*check)(const struct cofi_arn_plan *plan);
    /* Chooses algorithm and sizes: n_purposes, payload_bytes, tagged_bytes, local_bytes; nothing is
     * allocated. The only place where capacities are computed. */
    void (*lay_out)(struct cofi_arn_plan *plan);
    /* Words for the describe line: algorithm, thresholds, kernels. */
    void (*describe)(const struct cofi_arn_plan *plan, char *text, size_t bytes);
    /* Local: memory, kernels. */
    cof_status (*open)(struct cofi_arn_plan *plan);
    void (*close)(struct cofi_arn_plan *plan); /* of a half-opened one too */
    cof_status (*run)(struct cofi_arn_plan *plan, const struct cofi_arn_call *call,
                      cof_stream stream);
};

extern const struct cofi_arn_backend cofi_arn_cpu;
/* NULL in a build without CUDA. */
const struct cofi_arn_backend *cofi_arn_cuda(void);

struct cofi_arn_plan {
    struct cof_plan base;
    cof_allreduce_rmsnorm_params params; /* defaults filled in */
    const struct cofi_arn_backend *backend;
    int rank, n_ranks;
    enum cofi_elem elem, weight_elem;
    int64_t row_bytes; /* H elements */
    /* lay_out's. */
    int n_purposes;
    uint32_t acks;        /* bit per purpose, as in struct cofi_binding_spec */
    size_t payload_bytes; /* in the arena, overlaid by other plans' */
    size_t tagged_bytes;  /* in the arena, the plan's own: slots that carry tags */
    size_t local_bytes;
    struct cofi_binding binding;
    uint64_t n_empty; /* calls with T = 0 so far */
    void *state;      /* the back end's */
};

#endif
