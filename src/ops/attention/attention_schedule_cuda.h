/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A forward call on CUDA devices as its two files see it: attention_schedule_cuda.c, which tells
 * the protocol, and attention_transfer_cuda.c. */
#ifndef COFI_ATTENTION_SCHEDULE_CUDA_H
#define COFI_ATTENTION_SCHEDULE_CUDA_H

#include "ops/attention/attention_device.h"
#include "ops/attention/attention_move_cuda.h"

/* A call being enqueued. S is the caller's stream, C the plan's. */
struct cofi_attention_forward {
    struct cofi_attention_plan *plan;
    struct cofi_attention_device *d;
    const struct cofi_attention_call *call;
    cudaStream_t s, c; /* c NULL: nothing is transferred */
    int parts;         /* COFI_PART_.. bits */
    bool is_forked;    /* C goes on behind the begin on S */
    bool is_ahead;     /* C has what S does not wait for yet */
    int last_put;      /* ring: step of the last put on C */
    /* Compact: the caller's tensors, or copies of them. */
    char *q, *k, *v, *o;
    float *lse;
};

/* Where cofi_cuda_launched says that a launch of the call failed. */
cof_status cofi_attention_launched(const struct cofi_attention_forward *x, int line,
                                   const void *stream, cudaError_t error, const char *what);

/* C goes on behind the begin, once. */
cof_status cofi_attention_fork(struct cofi_attention_forward *x);
/* S waits for all of C, if it does not yet. */
cof_status cofi_attention_join(struct cofi_attention_forward *x);

/* Ring. On C: this rank's keys of a step into its reader's slot; none past the last step. */
cof_status cofi_attention_put(struct cofi_attention_forward *x, int step);
/* On S, between the section of the step before and that of this one: tells the step's reader that
 * its keys are there, waits for those of its owner; hands over the slot that was just read. */
cof_status cofi_attention_turn(struct cofi_attention_forward *x, int step);
/* Ring: whether the last kernel of the call acks to all others. */
bool cofi_attention_acks_last(const struct cofi_attention_forward *x);

/* Gather. On C: everything of a call. */
cof_status cofi_attention_gather_keys(struct cofi_attention_forward *x);

#endif
