/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The ring schedule. S is the caller's stream, C the plan's communication stream; r this rank, P
 * ranks; step i = 1 .. P-1 deals with the owner r-i and, for returned gradients, the writer r+i.
 *
 * Forward                                     Backward
 *   S open   wait acks of the last call,        S open, delta
 *            copy K, V out, announce            C fetch 1, 2
 *   C fetch 1, 2                                for i: S wait fetch i; section i; wait until the
 *   S section own                                        owner's slot is free; store dK, dV there;
 *   for i: S wait fetch i; section i                     announce
 *          C wait section i; fetch i+2                 C wait section i; fetch i+2; wait for the
 *   S finish                                               writer r+i; sum its slot; ack
 *                                               S section own; wait sums; finish
 *
 * Words and buffers (w -> o: stored by w in o's slab)
 *   KV_READY   owner -> reader   K, V of call e lie in the owner's `published`
 *   KV_ACK     reader -> owner   reader has copied all it needs of call e; the owner overwrites
 *                                `published` in its next call only after the acks of all ranks
 *   GRAD_READY writer -> owner   the writer's dK, dV lie in the owner's slot (i-1) mod 2
 *   GRAD_ACK   owner -> writer   the slot that this writer uses is free. Each call sends it once to
 *              every rank: to the writer of step i+2 when step i is summed (same slot), and at a
 *              slot's last use to the writer of its first use, who waits for it in the next call:
 *              steps 1, 2 wait for the ack of the last backward call, later steps for this one's.
 *   staging    (i-1) mod 2, local: written by fetch i, read by section i, free after it
 *
 * Every copy-out and every fetch is enqueued before any wait that a peer's copy-out or fetch of the
 * same call needs, and step i waits only for steps below i elsewhere: no cycle. All ranks ack in
 * every call, contributors or not.
 *
 * Two ranks, forward:      rank 0  S |open|  own   |  step 1 |finish
 *                                  C      |fetch 1|ack
 *                          rank 1  S |open|  own   |  step 1 |finish
 *                                  C      |fetch 1|ack */
#include <math.h>

#include "core/faults.h"
#include "ops/attention/attention_ring.h"
#include "symm/symm.h"

/* ---- sections ------------------------------------------------------------------------------- */

struct section_args {
    struct cofi_attention_plan *plan;
    int step; /* 0: own keys, read from the caller's tensors */
    struct cofi_attention_view q, k, v, dout;
};

/* Keys of a step: the caller's own, or those fetched. */
static void section_keys(const struct section_args *a, struct cofi_attention_section *section)
{
    struct cofi_attention_plan *plan = a->plan;
    section->k = a->k;
    section->v = a->v;
    if (a->step > 0) {
        const struct cofi_kv_buffer *b = &plan->staging[(a->step - 1) & 1];
        section->k = cofi_attention_ring_view(plan, b->local + b->offset, false);
        section->v = cofi_attention_ring_view(plan, b->local + b->v_offset, true);
    }
}

typedef cof_status (*pair_fn)(struct cofi_cpu_stream *s, const struct section_args *a,
                              const struct cofi_attention_section *section);

static cof_status for_pairs(struct cofi_cpu_stream *s, const struct section_args *a, pair_fn fn)
{
    struct cofi_attention_plan *plan = a->plan;
    struct cofi_pair pairs[COFI_MAX_PAIRS];
    struct cofi_attention_section section = {.dims = &plan->dims, .q = a->q};
    section_keys(a, &section);
    int n = cofi_attention_pairs(&plan->layout, plan->params.mask, plan->rank,
                                 cofi_ring_owner(plan, a->step), pairs);
    for (int i = 0; i < n; i++) {
        section.q_begin = pairs[i].q_begin;
        section.q_rows = pairs[i].q_rows;
        section.k_begin = pairs[i].k_begin;
        section.k_rows = pairs[i].k_rows;
        section.band = pairs[i].band;
        COF_TRY(fn(s, a, &section));
    }
    return COF_OK;
}

static cof_status forward_pair(struct cofi_cpu_stream *s, const struct section_args *a,
                               const struct cofi_attention_section *section)
{
    return cofi_attention_cpu_forward(s, section, &a->plan->state);
}

static cof_status section_forward(struct cofi_cpu_stream *s, const void *args)
{
    struct section_args a = *(const struct section_args *)args;
    if (a.step == 0)
        cofi_attention_cpu_begin(s, &a.plan->dims, &a.plan->state);
    return for_pairs(s, &a, forward_pair);
}

static cof_status backward_pair(struct cofi_cpu_stream *s, const struct section_args *a,
                                const struct cofi_attention_section *section)
{
    return cofi_attention_cpu_backward(s, section, &a->dout, &a->plan->grad);
}

static cof_status section_backward(struct cofi_cpu_stream *s, const void *args)
{
    struct section_args a = *(const struct section_args *)args;
    struct cofi_attention_plan *plan = a.plan;
    int64_t begin = 0, end = plan->local_rows;
    int owner = cofi_ring_owner(plan, a.step);
    if (a.step > 0)
        cofi_attention_needed_rows(&plan->layout, plan->params.mask, plan->rank, owner, &begin,
                                   &end);
    cofi_attention_cpu_partial_begin(s, &plan->dims, &plan->grad, end);
    COF_TRY(for_pairs(s, &a, backward_pair));
    return a.step > 0 && begin < end
               ? cofi_attention_ring_return(s, plan, a.step, owner, begin, end)
               : COF_OK;
}

/* ---- begin of the gradient, ends of both ---------------------------------------------------- */

struct output_args {
    struct cofi_attention_plan *plan;
    struct cofi_attention_view a, b, c;
    float *lse;
    int64_t lse_batch_stride, lse_head_stride;
};

static cof_status gradient_begin(struct cofi_cpu_stream *s, const void *args)
{
    const struct output_args *a = args;
    cofi_attention_cpu_grad_begin(s, &a->plan->dims, &a->plan->grad, &a->a, &a->b, a->lse,
                                  a->lse_batch_stride, a->lse_head_stride);
    return COF_OK;
}

static void fill_nan(const struct cofi_attention_plan *plan, const struct cofi_attention_view *v,
                     int64_t n_heads, int64_t dim)
{
    for (int64_t b = 0; b < plan->dims.n_batch; b++)
        for (int64_t row = 0; row < plan->local_rows; row++)
            for (int64_t h = 0; h < n_heads; h++) {
                int64_t at = b * v->batch_stride + row * v->row_stride + h * v->head_stride;
                for (int64_t d = 0; d < dim; d++)
                    if (plan->dims.elem != COFI_ELEM_F32)
                        ((uint16_t *)v->data)[at + d] = 0x7fc0; /* NaN as bf16 and as fp16 */
                    else
                        ((float *)v->data)[at + d] = NAN;
            }
}

/* A call that failed on this rank fails on all: the arena is poisoned, and outputs are NaN. */
static bool has_failed(struct cofi_cpu_stream *s, struct cofi_attention_plan *plan)
{
    cof_status status = cofi_cpu_stream_status(s);
    if (status != COF_OK && cofi_arena_status(plan->binding.arena) == COF_OK) {
        COF_FAIL(status, "attention: rank %d did not run its part of a call: its stream had failed",
                 plan->base.team->world->rank);
        cofi_arena_fail(plan->binding.arena, status);
    }
    return cofi_arena_status(plan->binding.arena) != COF_OK;
}

static cof_status finish_forward(struct cofi_cpu_stream *s, const void *args)
{
    const struct output_args *a = args;
    struct cofi_attention_plan *plan = a->plan;
    if (!has_failed(s, plan)) {
        cofi_attention_cpu_finish(s, &plan->dims, &plan->state, &a->a, a->lse, a->lse_batch_stride,
                                  a->lse_head_stride);
        cofi_call_end(&plan->binding);
        return COF_OK;
    }
    fill_nan(plan, &a->a, plan->dims.n_heads, plan->dims.dim_v);
    for (int64_t b = 0; b < plan->dims.n_batch; b++)
        for (int64_t h = 0; h < plan->dims.n_heads; h++)
            for (int64_t row = 0; row < plan->local_rows; row++)
                a->lse[b * a->lse_batch_stride + h * a->lse_head_stride + row] = NAN;
    return cofi_arena_status(plan->binding.arena);
}

static cof_status finish_backward(struct cofi_cpu_stream *s, const void *args)
{
    const struct output_args *a = args;
    struct cofi_attention_plan *plan = a->plan;
    const struct cofi_attention_dims *d = &plan->dims;
    if (!has_failed(s, plan)) {
        cofi_attention_cpu_dq_store(s, d, &plan->grad, &a->a);
        cofi_attention_cpu_partial_store(s, d, &plan->grad, 0, plan->local_rows, plan->acc_k,
                                         plan->acc_v, false, &a->b, &a->c);
        cofi_call_end(&plan->binding);
        return COF_OK;
    }
    fill_nan(plan, &a->a, d->n_heads, d->dim_qk);
    fill_nan(plan, &a->b, d->n_kv_heads, d->dim_qk);
    fill_nan(plan, &a->c, d->n_kv_heads, d->dim_v);
    return cofi_arena_status(plan->binding.arena);
}

/* ---- the schedule --------------------------------------------------------------------------- */

/* One call being enqueued. After a refusal nothing more is, but for the end. */
struct schedule {
    struct cofi_attention_plan *plan;
    struct cofi_cpu_stream *s, *c;
    cof_status status;
    uint64_t fetched[2]; /* place on C of the fetch into each staging buffer */
};

static void put(struct schedule *x, struct cofi_cpu_stream *stream, cofi_call_fn fn,
                const void *args, size_t bytes)
{
    if (x->status == COF_OK)
        x->status = cofi_cpu_enqueue(stream, fn, args, bytes, 0);
}

/* Work put on `stream` from now on runs after the first `sequence` calls on `other`. */
static void order(struct schedule *x, struct cofi_cpu_stream *stream, struct cofi_cpu_stream *other,
                  uint64_t sequence)
{
    if (x->status == COF_OK)
        x->status = cofi_cpu_wait_event(stream, other, sequence);
}

static void order_all(struct schedule *x, struct cofi_cpu_stream *stream,
                      struct cofi_cpu_stream *other)
{
    order(x, stream, other, cofi_cpu_stream_tail(other));
}

static void fetch(struct schedule *x, int step)
{
    struct cofi_ring_step_args a = {x->plan, step};
    if (step >= x->plan->n_ranks)
        return;
    put(x, x->c, cofi_attention_ring_fetch, &a, sizeof a);
    x->fetched[(step - 1) & 1] = cofi_cpu_stream_tail(x->c);
}

/* The section of `step` is on S: when it is done, its staging buffer takes the step after next. */
static void refill(struct schedule *x, int step)
{
    if (step + 2 >= x->plan->n_ranks)
        return;
    if (!COFI_FAULT(STAGING_WAIT, x->plan->rank))
        order_all(x, x->c, x->s);
    fetch(x, step + 2);
}

static void open(struct schedule *x, int direction, const struct cofi_attention_call *call)
{
    struct cofi_ring_open_args a = {x->plan, direction, x->plan->n_empty, call->k, call->v};
    put(x, x->s, cofi_attention_ring_open, &a, sizeof a);
    if (x->plan->n_ranks == 1)
        return;
    order_all(x, x->c, x->s);
    fetch(x, 1);
    fetch(x, 2);
}

/* The end is enqueued whatever happened: it poisons and fills the outputs when something did. */
static cof_status end(struct schedule *x, cofi_call_fn fn, const struct output_args *a)
{
    if (x->status != COF_OK)
        cofi_arena_fail(x->plan->binding.arena, x->status);
    cof_status status = cofi_cpu_enqueue(x->s, fn, a, sizeof *a, COFI_CALL_ALWAYS);
    return x->status != COF_OK ? x->status : status;
}

cof_status cofi_attention_ring_forward(struct cofi_attention_plan *plan,
                                       const struct cofi_attention_call *call,
                                       struct cofi_cpu_stream *stream)
{
    struct schedule x = {plan, stream, plan->comm, COF_OK, {0, 0}};
    struct section_args a = {.plan = plan, .q = call->q, .k = call->k, .v = call->v};
    open(&x, COFI_FORWARD, call);
    put(&x, x.s, section_forward, &a, sizeof a);
    for (a.step = 1; a.step < plan->n_ranks; a.step++) {
        if (!COFI_FAULT(ARRIVAL_WAIT, plan->rank))
            order(&x, x.s, x.c, x.fetched[(a.step - 1) & 1]);
        put(&x, x.s, section_forward, &a, sizeof a);
        refill(&x, a.step);
    }
    struct output_args out = {.plan = plan, .a = call->o, .lse = call->lse,
                              .lse_batch_stride = call->lse_batch_stride,
                              .lse_head_stride = call->lse_head_stride};
    return end(&x, finish_forward, &out);
}

cof_status cofi_attention_ring_backward(struct cofi_attention_plan *plan,
                                        const struct cofi_attention_call *call,
                                        struct cofi_cpu_stream *stream)
{
    struct schedule x = {plan, stream, plan->comm, COF_OK, {0, 0}};
    struct section_args a = {.plan = plan, .q = call->q, .k = call->k, .v = call->v,
                             .dout = call->dout};
    struct output_args in = {.plan = plan, .a = call->o, .b = call->dout, .lse = call->lse,
                             .lse_batch_stride = call->lse_batch_stride,
                             .lse_head_stride = call->lse_head_stride};
    open(&x, COFI_BACKWARD, call);
    put(&x, x.s, gradient_begin, &in, sizeof in);
    for (a.step = 1; a.step < plan->n_ranks; a.step++) {
        struct cofi_ring_step_args sum = {plan, a.step};
        order(&x, x.s, x.c, x.fetched[(a.step - 1) & 1]);
        put(&x, x.s, section_backward, &a, sizeof a);
        refill(&x, a.step);
        put(&x, x.c, cofi_attention_ring_sum, &sum, sizeof sum);
    }
    a.step = 0;
    put(&x, x.s, section_backward, &a, sizeof a);
    if (plan->n_ranks > 1)
        order_all(&x, x.s, x.c); /* all sums */
    struct output_args out = {.plan = plan, .a = call->dq, .b = call->dk, .c = call->dv};
    return end(&x, finish_backward, &out);
}
