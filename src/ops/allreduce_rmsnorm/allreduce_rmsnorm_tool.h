/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run allreduce_rmsnorm`: parent and ranks share one block of memory. It begins with struct
 * cofi_arn_run, which tells the ranks everything; the tensors follow. */
#ifndef COFI_ALLREDUCE_RMSNORM_TOOL_H
#define COFI_ALLREDUCE_RMSNORM_TOOL_H

#include "cofuse/cofuse.h"
#include "tools/cli.h"
#include "tools/run_op.h"

enum { COFI_ARN_X, COFI_ARN_RESIDUAL, COFI_ARN_WEIGHT, COFI_ARN_N_INPUTS };
enum { COFI_ARN_RESIDUAL_OUT, COFI_ARN_NORM_OUT, COFI_ARN_N_OUTPUTS };
extern const char *const cofi_arn_input_names[COFI_ARN_N_INPUTS];
extern const char *const cofi_arn_output_names[COFI_ARN_N_OUTPUTS];

/* By the numbers of the parameters. */
#define COFI_ARN_VARIANTS "residual_norm|norm|only"
#define COFI_ARN_ROUNDINGS "match_unfused|exact"

struct cofi_arn_options {
    struct cofi_run_options run;
    int64_t n_ranks;                    /* 0: as x has addends */
    int variant, rounding, weight_bias; /* -1: from the file's metadata */
    int algorithm;
    double eps;               /* 0: likewise */
    int64_t max_tokens, seed; /* max_tokens 0: all; seed -1: x is in the file */
};
COFI_RUN_FIRST(struct cofi_arn_options);

struct cofi_arn_run {
    struct cofi_run_head head;
    cof_allreduce_rmsnorm_params params;
    bool new_x; /* made from the seed, not read */
    int64_t n_tokens;
    size_t times; /* offset of double [n_ranks]: best seconds of a call */
    size_t in[COFI_ARN_N_INPUTS];   /* of x [P, T, H], residual [T, H], weight [H]; 0: none */
    size_t out[COFI_ARN_N_OUTPUTS]; /* of [P, T, H], what every rank has; 0: none */
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

/* allreduce_rmsnorm_tool_rank.c: one rank of a struct cofi_arn_run. */
int cofi_arn_tool_rank(void *run, const cof_world_options *options, int rank);

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
