/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run grad_return`: parent and ranks share one block of memory. It begins with struct
 * cofi_gr_run, which tells the ranks everything; the global tensors follow. */
#ifndef COFI_GRAD_RETURN_TOOL_H
#define COFI_GRAD_RETURN_TOOL_H

#include "cofuse/cofuse.h"
#include "tools/cli.h"
#include "tools/safetensors.h"

extern const char *const cofi_gr_tensor_names[2];

struct cofi_gr_options {
    int n_ranks; /* 0: as the file has writers */
    cof_engine engine;
    int layout, chunking, transfer, writers; /* -1: from the file's metadata */
    int64_t n_threads, repeat;
    const char *input, *output;
    char *names[2]; /* keys of dk and dv */
    char names_text[256];
    bool cuda, by_section, compare, wire_f32;
};

struct cofi_gr_run {
    cof_grad_return_params params;
    cof_writers writers;
    cof_engine engine;
    int n_threads, n_ranks, repeat;
    size_t bytes;
    size_t times;     /* offset of double [n_ranks]: best seconds of a call */
    size_t in[2], out[2]; /* offsets of [P, S, B, Hkv, D] and [S, B, Hkv, D] */
    char describe[512];
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

/* grad_return_tool_rank.c: one rank; returns the exit code, after a message where it is not 0. */
int cofi_gr_rank(struct cofi_gr_run *run, const cof_world_options *options, int rank);

#endif
