/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run grad_return`: parent and ranks share one block of memory. It begins with struct
 * cofi_gr_run, which tells the ranks everything; the global tensors follow. */
#ifndef COFI_GRAD_RETURN_TOOL_H
#define COFI_GRAD_RETURN_TOOL_H

#include "cofuse/cofuse.h"
#include "tools/cli.h"
#include "tools/run_op.h"

extern const char *const cofi_gr_tensor_names[2];

struct cofi_gr_options {
    struct cofi_run_options run;
    int64_t n_ranks;                         /* 0: as the file has writers */
    int layout, chunking, transfer, writers; /* -1: from the file's metadata */
    int by, wire;                            /* 1: section; 1: f32 */
};
COFI_RUN_FIRST(struct cofi_gr_options);

struct cofi_gr_run {
    struct cofi_run_head head;
    cof_grad_return_params params;
    cof_writers writers;
    size_t times;         /* offset of double [n_ranks]: best seconds of a call */
    size_t in[2], out[2]; /* offsets of [P, S, B, Hkv, D] and [S, B, Hkv, D] */
};

static inline size_t cofi_gr_row_bytes(const struct cofi_gr_run *run, int is_v)
{
    const cof_grad_return_params *p = &run->params;
    return (size_t)(p->n_batch * p->n_heads * (is_v ? p->head_dim_v : p->head_dim_k)) *
           (p->dtype.bits / 8);
}

/* grad_return_tool_files.c: false after a message. */
bool cofi_gr_load(const struct cofi_gr_options *options, struct cofi_gr_run **run_out, int *fd_out);
bool cofi_gr_save(const struct cofi_gr_options *options, struct cofi_gr_run *run);

/* grad_return_tool_rank.c: one rank of a struct cofi_gr_run. */
int cofi_gr_rank(void *run, const cof_world_options *options, int rank);

#endif
