/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run trimul`: parent and ranks share one block of memory. It begins with struct
 * cofi_tm_run, which tells the ranks everything; the tensors follow. */
#ifndef COFI_TRIMUL_TOOL_H
#define COFI_TRIMUL_TOOL_H

#include "ops/trimul/trimul_check_data.h"
#include "tools/cli.h"
#include "tools/run_op.h"

enum { COFI_TM_IN_X, COFI_TM_IN_MASK, COFI_TM_IN_RESIDUAL, COFI_TM_IN_DOUT, COFI_TM_INPUTS };
extern const char *const cofi_tm_input_names[COFI_TM_INPUTS];

struct cofi_tm_options {
    struct cofi_run_options run;
    struct cofi_tm_case c; /* direction -1, eps 0: from the file's metadata */
    int64_t n_ranks, seed;
    int order; /* of the weights: cof_trimul_order; -1: from the file's metadata */
    const char *weights;
    bool backward, swap_ab;
};
COFI_RUN_FIRST(struct cofi_tm_options);

struct cofi_tm_run {
    struct cofi_run_head head;
    struct cofi_tm_case c; /* one call: c.n.at[0] */
    bool new_dout; /* made from the seed, not read */
    /* Offsets; 0: there is none. */
    size_t times; /* double [n_ranks][2]: best seconds of forward, backward */
    size_t in[COFI_TM_INPUTS], weight[COFI_TRI_WEIGHTS];
    size_t out, dx;
    size_t grads; /* float: the 12 one after the other, of all ranks together */
};

static inline void *cofi_tm_run_at(const struct cofi_tm_run *run, size_t offset)
{
    return offset ? (char *)(uintptr_t)run + offset : NULL;
}

/* The tensors of a run as those of a case. */
void cofi_tm_run_data(const struct cofi_tm_run *run, struct cofi_tm_data *data_out);

/* trimul_tool_files.c: false after a message. */
bool cofi_tm_tool_load(const struct cofi_tm_options *options, struct cofi_tm_run **run_out,
                        int *fd_out);
bool cofi_tm_tool_save(const struct cofi_tm_options *options, struct cofi_tm_run *run);

/* trimul_tool_rank.c: one rank of a struct cofi_tm_run. */
int cofi_tm_tool_rank(void *run, const cof_world_options *options, int rank);

/* trimul_tool_compare.c: out, dx and the gradients beside the fp64 reference. False after a
 * message. */
struct cofi_tm_verdict {
    int64_t n, n_far; /* values; those further off than the bound */
    double rel_rmse;  /* over what is finite */
};
bool cofi_tm_tool_compare(const struct cofi_tm_run *run,
                           struct cofi_tm_verdict verdicts_out[COFI_TM_E_N]);

#endif
