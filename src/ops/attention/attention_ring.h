/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Between the schedule (attention_ring.c) and its transfers (attention_exchange.c). Functions that
 * take `const void *args` are calls of a stream. */
#ifndef COFI_ATTENTION_RING_H
#define COFI_ATTENTION_RING_H

#include "ops/attention/attention.h"

enum { COFI_FORWARD = 1, COFI_BACKWARD = 2 };

static inline int cofi_ring_owner(const struct cofi_attention_plan *plan, int step)
{
    return (plan->rank - step + plan->n_ranks) % plan->n_ranks;
}

static inline int cofi_ring_writer(const struct cofi_attention_plan *plan, int step)
{
    return (plan->rank + step) % plan->n_ranks;
}

/* `data` seen as rows of [B][Hkv][dim]. */
struct cofi_attention_view cofi_attention_ring_view(const struct cofi_attention_plan *plan,
                                                    void *data, bool is_v);

/* Begins a call: the next epoch; waits until the last call's keys are read; copies K and V out and
 * announces them. */
struct cofi_ring_open_args {
    struct cofi_attention_plan *plan;
    int direction;
    uint64_t n_empty;
    struct cofi_attention_view k, v;
};
cof_status cofi_attention_ring_open(struct cofi_cpu_stream *s, const void *args);

struct cofi_ring_step_args {
    struct cofi_attention_plan *plan;
    int step;
};
/* K and V of the step's owner into its staging buffer; acks. */
cof_status cofi_attention_ring_fetch(struct cofi_cpu_stream *s, const void *args);
/* The slot of the step's writer into the sums; acks. */
cof_status cofi_attention_ring_sum(struct cofi_cpu_stream *s, const void *args);

/* The partial of rows [begin, end) of the step's owner into its slot. */
cof_status cofi_attention_ring_return(struct cofi_cpu_stream *s, struct cofi_attention_plan *plan,
                                      int step, int64_t begin, int64_t end);

#endif
