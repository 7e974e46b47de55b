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
 *   GRAD_READY, GRAD_ACK and the receive slots: ops/grad_return/grad_return_exchange.h
 *   staging    (i-1) mod 2, local: written by fetch i, read by section i, free after it
 *   saved_kv   with save_kv, in the place of staging: a buffer a step, written by fetch i of
 *              forward; backward then neither publishes nor fetches
 *
 * Every copy-out and every fetch is enqueued before any wait that a peer's copy-out or fetch of the
 * same call needs, and step i waits only for steps below i elsewhere: no cycle. All ranks ack in
 * every call that publishes, contributors or not.
 *
 * Two ranks, forward:      rank 0  S |open|  own   |  step 1 |finish
 *                                  C      |fetch 1|ack
 *                          rank 1  S |open|  own   |  step 1 |finish
 *                                  C      |fetch 1|ack */
#include "core/faults.h"
#include "ops/attention/attention_schedule.h"
#include "symm/symm.h"

/* ---- sections ------------------------------------------------------------------------------- */

struct section_args {
    struct cofi_attention_plan *plan;
    int step; /* 0: own keys, read from the caller's tensors */
    struct cofi_attention_view q, k, v, dout;
};

typedef cof_status (*pair_fn)(struct cofi_cpu_stream *s, const struct section_args *a,
                              const struct cofi_attention_section *section);

static cof_status for_pairs(struct cofi_cpu_stream *s, const struct section_args *a, pair_fn fn)
{
    struct cofi_attention_plan *plan = a->plan;
    struct cofi_pair pairs[COFI_MAX_PAIRS];
    struct cofi_attention_section section = {.dims = &plan->dims, .q = a->q, .k = a->k, .v = a->v};
    int n = cofi_attention_pairs(&plan->layout, &plan->sight, plan->rank,
                                 cofi_grad_owner(&plan->home, a->step), pairs);
    for (int i = 0; i < n; i++) {
        section.q_begin = pairs[i].q_begin;
        section.q_rows = pairs[i].q_rows;
        section.k_begin = pairs[i].k_begin;
        section.k_rows = pairs[i].k_rows;
        section.band = pairs[i].band;
        COF_TRY(cofi_schedule_section(plan, fn(s, a, &section)));
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
    int64_t begin, end = plan->local_rows;
    if (a.step > 0)
        cofi_attention_needed_rows(&plan->layout, &plan->sight, plan->rank,
                                   cofi_grad_owner(&plan->home, a.step), &begin, &end);
    cofi_attention_cpu_partial_begin(s, &plan->dims, &plan->grad, end);
    COF_TRY(for_pairs(s, &a, backward_pair));
    return a.step > 0 ? cofi_attention_return(s, plan, a.step) : COF_OK;
}

/* ---- the schedule --------------------------------------------------------------------------- */

struct ring {
    struct cofi_schedule *x;
    bool fetches;        /* else keys were saved by forward */
    uint64_t fetched[2]; /* place on C of the fetch into each staging buffer */
};

static void fetch(struct ring *ring, int step)
{
    struct cofi_attention_plan *plan = ring->x->plan;
    if (step >= plan->n_ranks || !ring->fetches)
        return;
    struct cofi_fetch_args a = {plan, step,
                                cofi_attention_kept(plan, ring->x->call->saved_kv, step)};
    cofi_schedule_put(ring->x, ring->x->c, cofi_attention_fetch, &a, sizeof a);
    ring->fetched[(step - 1) & 1] = cofi_cpu_stream_tail(ring->x->c);
}

static void arrive(struct ring *ring, int step)
{
    if (ring->fetches && !COFI_FAULT(ARRIVAL_WAIT, ring->x->plan->rank))
        cofi_schedule_order(ring->x, ring->x->s, ring->x->c, ring->fetched[(step - 1) & 1]);
}

/* The section of `step` is on S: when it is done, its staging buffer takes the step after next. */
static void refill(struct ring *ring, int step)
{
    if (step + 2 >= ring->x->plan->n_ranks || !ring->fetches)
        return;
    if (!COFI_FAULT(STAGING_WAIT, ring->x->plan->rank))
        cofi_schedule_order_all(ring->x, ring->x->c, ring->x->s);
    fetch(ring, step + 2);
}

/* Keys of a step: the caller's own, or those kept. */
static struct section_args section(const struct cofi_schedule *x, int step)
{
    const struct cofi_attention_call *call = x->call;
    struct section_args a = {x->plan, step, call->q, call->k, call->v, call->dout};
    if (step > 0) {
        struct cofi_kv_buffer b = cofi_attention_kept(x->plan, call->saved_kv, step);
        a.k = cofi_attention_rows(x->plan, b.local + b.offset[0], 0);
        a.v = cofi_attention_rows(x->plan, b.local + b.offset[1], 1);
    }
    return a;
}

static void put_section(struct cofi_schedule *x, cofi_call_fn fn, int step)
{
    struct section_args a = section(x, step);
    cofi_schedule_put(x, x->s, fn, &a, sizeof a);
}

void cofi_ring_forward(struct cofi_schedule *x)
{
    struct ring ring = {x, true, {0, 0}};
    fetch(&ring, 1);
    fetch(&ring, 2);
    put_section(x, section_forward, 0);
    for (int step = 1; step < x->plan->n_ranks; step++) {
        arrive(&ring, step);
        put_section(x, section_forward, step);
        refill(&ring, step);
    }
}

void cofi_ring_backward(struct cofi_schedule *x)
{
    struct ring ring = {x, !x->plan->params.save_kv, {0, 0}};
    fetch(&ring, 1);
    fetch(&ring, 2);
    cofi_schedule_grad_begin(x);
    for (int step = 1; step < x->plan->n_ranks; step++) {
        struct cofi_step_args sum = {x->plan, step};
        arrive(&ring, step);
        put_section(x, section_backward, step);
        refill(&ring, step);
        cofi_schedule_put(x, x->c, cofi_attention_sum, &sum, sizeof sum);
    }
    put_section(x, section_backward, 0);
}
