/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The table that `cofuse run attention` prints: one row per rank count. */
#ifndef COFI_ATTENTION_TOOL_TABLE_H
#define COFI_ATTENTION_TOOL_TABLE_H

#include "ops/attention/attention_tool.h"

struct cofi_attention_row {
    int n_ranks;
    double seconds[2]; /* forward, backward: best repetition of the slowest rank */
    double tile_rate;  /* flop/s, all ranks together; best window */
    struct cofi_attention_verdict verdicts[COFI_AT_N];
    char describe[1024];
};

/* Takes what a finished run of one rank count left in the shared memory. */
void cofi_attention_row_take(struct cofi_attention_row *row, struct cofi_attention_run *run);

void cofi_attention_table_print(const struct cofi_attention_options *options,
                                const struct cofi_attention_run *run,
                                const struct cofi_attention_row *rows, int n_rows);

/* Flops of one call on the whole problem, by mask area. */
double cofi_attention_flops(const cof_attention_params *params, bool backward);

#endif
