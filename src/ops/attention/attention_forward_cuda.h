/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A forward call on a CUDA device as it is enqueued, between its files: attention_schedule_cuda.c
 * has the order, attention_transfer_cuda.c what is on C, attention_tensors_cuda.c what becomes of
 * the caller's tensors. */
#ifndef COFI_ATTENTION_FORWARD_CUDA_H
#define COFI_ATTENTION_FORWARD_CUDA_H

#include "ops/attention/attention_device.h"
#include "ops/attention/attention_move_cuda.h"

struct cofi_forward {
    struct cofi_attention_plan *plan;
    struct cofi_attention_device *d;
    const struct cofi_attention_call *call;
    cudaStream_t s, c; /* c NULL: nothing is transferred */
    int parts;         /* COFI_PART_.. bits */
    bool is_forked;    /* C goes on behind S, and must be joined */
    /* Compact: the caller's tensors, or copies of them. */
    char *q, *k, *v, *o;
    float *lse;
};

static inline int64_t cofi_forward_elem_bytes(const struct cofi_forward *x)
{
    return cofi_elem_bytes(x->plan->dims.elem);
}

/* What a launch came to; `what`: the launch. */
cof_status cofi_forward_launched(const struct cofi_forward *x, const char *file, int line,
                                 const void *stream, cudaError_t error, const char *what);

/* ---- attention_tensors_cuda.c ---- */

/* With only_compact, before anything is enqueued. */
cof_status cofi_forward_check(const struct cofi_forward *x);
/* On S: q, k, v, o, lse as sections take them; inputs of other strides are copied. */
cof_status cofi_forward_take(struct cofi_forward *x);
/* Behind all of a call on S: outputs of other strides, padding, and NaN after a failure. */
cof_status cofi_forward_finish(const struct cofi_forward *x);
/* [rows, B, heads, dim] at `to` from a compact tensor. */
cof_status cofi_forward_by_rows(const struct cofi_forward *x, char *to, char *from,
                                int64_t heads, int64_t dim, cudaStream_t stream);

/* ---- attention_transfer_cuda.c, all on C ---- */

/* K and V into the arena, and their announcement to all ranks; acks to owners of whom nothing is
 * needed. */
cof_status cofi_forward_publish(const struct cofi_forward *x);
/* Ring: fetch `idx` into the staging buffer whose turn it is, whose last section is on S. Nothing
 * without such a fetch. */
cof_status cofi_forward_fetch(const struct cofi_forward *x, int idx);
/* Gather: all keys to their global rows. */
cof_status cofi_forward_gather(const struct cofi_forward *x);

#endif
