/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The way home of gradients, inside a plan that has them: partials of rank r for owner r-i go into
 * that owner's receive slot (i-1) mod 2, and the owner sums what writers r+1, r+2, ... sent.
 *
 * Words and buffers (w -> o: stored by w in o's slab)
 *   ready  writer -> owner   the writer's rows lie in the owner's slot (i-1) mod 2
 *   ack    owner -> writer   the slot that this writer uses is free. Each call sends it once to
 *          every rank: to the writer of step i+2 when step i is summed or skipped (same slot), and
 *          at a slot's last use to the writer of its first use, who waits for it in the next call:
 *          steps 1, 2 wait for the ack of the last call that returned gradients, later steps for
 *          this one's.
 *
 * Two slots suffice: step i+2 is stored only after step i was summed. No slot for one rank, one for
 * two. Sums are fp32, in the order rank+1, rank+2, ..., own last, and rounded once. */
#ifndef COFI_GRAD_RETURN_EXCHANGE_H
#define COFI_GRAD_RETURN_EXCHANGE_H

#include <stdbool.h>

#include "ops/kv_buffer.h"
#include "symm/call.h"

struct cofi_grad_exchange {
    struct cofi_binding *binding;
    int ready, ack;      /* purposes of its signal words */
    int mark, prev_mark; /* last-use epochs: this and the last call that returned gradients */
    int rank, n_ranks;
    int64_t local_rows, row_elements[2];
    struct cofi_kv_buffer slot[2];   /* receive slots, in the arena */
    struct cofi_kv_buffer outbox[2]; /* staged form of the remote store */
    float *acc[2];                   /* sums [local_rows][row_elements] */
};

static inline int cofi_grad_owner(const struct cofi_grad_exchange *x, int step)
{
    return (x->rank - step + x->n_ranks) % x->n_ranks;
}

static inline int cofi_grad_writer(const struct cofi_grad_exchange *x, int step)
{
    return (x->rank + step) % x->n_ranks;
}

/* Slots needed for a number of ranks. */
static inline int cofi_grad_slots(int n_ranks)
{
    return n_ranks < 3 ? n_ranks - 1 : 2;
}

/* At the beginning of a call that returns gradients. */
void cofi_grad_begin(struct cofi_grad_exchange *x);

/* The writer's side of a step: waits for the owner's slot and says where K's and V's first row go
 * that this rank has for it (`begin`, a local row of the owner); then announces rows [begin, end)
 * stored there. */
cof_status cofi_grad_open(struct cofi_grad_exchange *x, int step, int64_t begin, void *to[2]);
void cofi_grad_close(struct cofi_grad_exchange *x, int step, int64_t begin, int64_t end,
                     void *const to[2]);

/* The owner's side of a step: adds rows [begin, end) of the step's writer; acks. `announced`: the
 * writer opens and closes this step, with rows or without; else it leaves it out. */
cof_status cofi_grad_sum(struct cofi_grad_exchange *x, int step, int64_t begin, int64_t end,
                         bool announced);

/* What steps add to: zero before step 1. */
void cofi_grad_clear(struct cofi_grad_exchange *x);

#endif
