/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the schedules of attention share: one call being enqueued, its begin and end
 * (attention_calls.c), and its transfers (attention_exchange.c). Functions that take `const void
 * *args` are calls of a stream. */
#ifndef COFI_ATTENTION_SCHEDULE_H
#define COFI_ATTENTION_SCHEDULE_H

#include "ops/attention/attention.h"

enum { COFI_FORWARD = 1, COFI_BACKWARD = 2 };

/* ---- a call being enqueued ------------------------------------------------------------------ */

/* S is the caller's stream, C the plan's communication stream. After a refusal nothing more is
 * enqueued, but for the end. */
struct cofi_schedule {
    struct cofi_attention_plan *plan;
    const struct cofi_attention_call *call;
    struct cofi_cpu_stream *s, *c;
    cof_status status;
};

void cofi_schedule_put(struct cofi_schedule *x, struct cofi_cpu_stream *stream, cofi_call_fn fn,
                       const void *args, size_t bytes);
/* Work put on `stream` from now on runs after the first `sequence` calls on `other`, or all. */
void cofi_schedule_order(struct cofi_schedule *x, struct cofi_cpu_stream *stream,
                         struct cofi_cpu_stream *other, uint64_t sequence);
void cofi_schedule_order_all(struct cofi_schedule *x, struct cofi_cpu_stream *stream,
                             struct cofi_cpu_stream *other);

/* Begins a call on S: the next epoch; where keys travel, waits until those of the last call are
 * read, copies K and V out and announces them. C goes on behind it. */
void cofi_schedule_open(struct cofi_schedule *x, int direction);
/* Backward, on S: delta, lse, dq = 0. */
void cofi_schedule_grad_begin(struct cofi_schedule *x);
/* In a section, what the engine has returned: its failure fails the arena at once, so that no rank
 * waits for a gradient that does not come. */
cof_status cofi_schedule_section(struct cofi_attention_plan *plan, cof_status status);
/* On S behind all of C, whatever happened: stores the outputs; after a failure poisons the arena
 * and fills them with NaN. Returns what the call returns. */
cof_status cofi_schedule_end_forward(struct cofi_schedule *x);
cof_status cofi_schedule_end_backward(struct cofi_schedule *x);

/* attention_ring.c, attention_gather.c: all between open and end. */
void cofi_ring_forward(struct cofi_schedule *x);
void cofi_ring_backward(struct cofi_schedule *x);
void cofi_gather_forward(struct cofi_schedule *x);
void cofi_gather_backward(struct cofi_schedule *x);

/* ---- transfers ------------------------------------------------------------------------------ */

/* `data` seen as rows of [B][Hkv][dim]. */
struct cofi_attention_view cofi_attention_rows(const struct cofi_attention_plan *plan, void *data,
                                               int is_v);

/* Where a call keeps the keys that travel: staging buffer or the caller's saved_kv. */
struct cofi_kv_buffer cofi_attention_kept(const struct cofi_attention_plan *plan, void *saved,
                                          int step);

/* K and V of the step's owner into `to`: ring: at the owner's local rows; gather: at their global
 * ones. Acks. */
struct cofi_fetch_args {
    struct cofi_attention_plan *plan;
    int step;
    struct cofi_kv_buffer to;
};
cof_status cofi_attention_fetch(struct cofi_cpu_stream *s, const void *args);

/* On C: the rows of the step's writer into the sums; acks. */
struct cofi_step_args {
    struct cofi_attention_plan *plan;
    int step;
};
cof_status cofi_attention_sum(struct cofi_cpu_stream *s, const void *args);

/* The gradient of the step's owner into its slot. */
cof_status cofi_attention_return(struct cofi_cpu_stream *s, struct cofi_attention_plan *plan,
                                 int step);

#endif
