/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A forward call on a CUDA device as it is enqueued, between its files: attention_schedule_cuda.c
 * has the order, attention_transfer_cuda.c what passes between ranks, attention_tensors_cuda.c what
 * becomes of the caller's tensors. */
#ifndef COFI_ATTENTION_FORWARD_CUDA_H
#define COFI_ATTENTION_FORWARD_CUDA_H

#include "ops/attention/attention_device.h"
#include "ops/attention/attention_move_cuda.h"

struct cofi_forward {
    struct cofi_attention_plan *plan;
    struct cofi_attention_device *d;
    const struct cofi_attention_call *call;
    cudaStream_t s, c; /* c NULL: nothing is transferred */
    cudaStream_t b;    /* B; S where the plan has none, or nothing is transferred */
    int parts;         /* COFI_PART_.. bits */
    bool is_forked;    /* C goes on behind the begin on S */
    bool is_ahead;     /* C has what S does not wait for yet */
    bool is_beside;    /* B likewise */
    bool is_merged;    /* what S has last is a merge */
    int last_put;      /* ring: step of the last put on C */
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
/* Behind all of a call on S: outputs of other strides, padding, NaN after a failure; acks. */
cof_status cofi_forward_finish(const struct cofi_forward *x);
/* [rows, B, heads, dim] at `to` from a compact tensor. */
cof_status cofi_forward_by_rows(const struct cofi_forward *x, char *to, char *from,
                                int64_t heads, int64_t dim, cudaStream_t stream);

/* ---- attention_transfer_cuda.c ---- */

/* B goes on behind what S has now, marked by the event. */
cof_status cofi_forward_fork_beside(struct cofi_forward *x, cudaEvent_t event);
/* S waits for all of B, if it does not yet. */
cof_status cofi_forward_join_beside(struct cofi_forward *x);
/* For all of B and C. */
cof_status cofi_forward_join(struct cofi_forward *x);

/* Ring. On C: this rank's keys of a step into its reader's slot; none past the last step. */
cof_status cofi_forward_put(struct cofi_forward *x, int step);
/* On S, between the section of the step before and that of this one: tells the step's reader that
 * its keys are there, waits for those of its owner; hands over the slot that was just read. */
cof_status cofi_forward_turn(struct cofi_forward *x, int step);
/* Whether the call ends by an ack to all others: in its last kernel, or, without one, by this. */
bool cofi_forward_acks_all(const struct cofi_forward *x);
cof_status cofi_forward_ack_all(const struct cofi_forward *x);

/* Gather. On C: keys out, and all keys to their global rows. */
cof_status cofi_forward_gather(struct cofi_forward *x);

#endif
