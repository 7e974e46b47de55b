/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run allreduce_rmsnorm`: parent and ranks share one block of memory. It begins with struct
 * cofi_arn_run, which tells the ranks everything; the tensors follow. */
#ifndef COFI_ALLREDUCE_RMSNORM_TOOL_H
#define COFI_ALLREDUCE_RMSNORM_TOOL_H

#include "cofuse/cofuse.h"
#include "tools/cli.h"
#include "tools/safetensors.h"

enum { COFI_ARN_X, COFI_ARN_RESIDUAL, COFI_ARN_WEIGHT, COFI_ARN_N_INPUTS };
enum { COFI_ARN_RESIDUAL_OUT, COFI_ARN_NORM_OUT, COFI_ARN_N_OUTPUTS };
extern const char *const cofi_arn_input_names[COFI_ARN_N_INPUTS];
extern const char *const cofi_arn_output_names[COFI_ARN_N_OUTPUTS];

struct cofi_arn_options {
    int n_ranks; /* 0: as x has addends */
    cof_engine engine;
    int variant, rounding, weight_bias; /* -1: from the file's metadata */
    int algorithm;
    double eps; /* 0: likewise */
    int64_t max_tokens, n_threads, repeat, seed; /* max_tokens 0: all; seed -1: x is in the file */
    const char *input, *output;
    char *names[COFI_ARN_N_INPUTS]; /* keys in the file */
    char names_text[512];
    bool compare, cuda;
};

struct cofi_arn_run {
    cof_allreduce_rmsnorm_params params;
    cof_engine engine;
    int n_threads, n_ranks, repeat;
    bool new_x; /* made from the seed, not read */
    int64_t n_tokens;
    size_t bytes;
    size_t times; /* offset of double [n_ranks]: best seconds of a call */
    size_t in[COFI_ARN_N_INPUTS];   /* of x [P, T, H], residual [T, H], weight [H]; 0: none */
    size_t out[COFI_ARN_N_OUTPUTS]; /* of [P, T, H], what every rank has; 0: none */
    char describe[512];
};

/* Bytes of a tensor with T rows. */
static inline size_t cofi_arn_run_bytes(const struct cofi_arn_run *run)
{
    return (size_t)(run->n_tokens * run->params.hidden) * (run->params.dtype.bits / 8);
}

static inline size_t cofi_arn_run_weight_bytes(const struct cofi_arn_run *run)
{
    return (size_t)run->params.hidden * (run->params.weight_dtype.bits / 8);
}

/* An output of a rank; NULL: there is none. */
static inline void *cofi_arn_run_out(struct cofi_arn_run *run, int which, int rank)
{
    return run->out[which]
               ? (char *)run + run->out[which] + (size_t)rank * cofi_arn_run_bytes(run)
               : NULL;
}

/* allreduce_rmsnorm_tool_files.c: false after a message. */
bool cofi_arn_tool_load(const struct cofi_arn_options *options, struct cofi_arn_run **run_out,
                        int *fd_out);
bool cofi_arn_tool_save(const struct cofi_arn_options *options, struct cofi_arn_run *run);

/* allreduce_rmsnorm_tool_rank.c: one rank; returns the exit code, after a message where it is not
 * 0. */
int cofi_arn_tool_rank(struct cofi_arn_run *run, const cof_world_options *options, int rank);

/* allreduce_rmsnorm_tool_compare.c: all ranks' outputs beside both references. False after a
 * message. */
struct cofi_arn_verdict {
    bool has;
    int64_t n_different; /* elements of all ranks whose bits are not the reference's */
    int64_t n_far;       /* elements further from fp64 than promised */
    double rel_rmse;     /* from fp64, over what is finite */
};
bool cofi_arn_tool_compare(struct cofi_arn_run *run,
                           struct cofi_arn_verdict verdicts_out[COFI_ARN_N_OUTPUTS]);

#endif
