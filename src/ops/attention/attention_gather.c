/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The gather schedule: all keys and values that a rank sees are staged in global order, once,
 * and each of its halves then meets a prefix of them (or its window) in one section: no merges, and
 * no small sections that starve the tiles. It takes memory for all S rows, so it is for short
 * sequences.
 *
 *   S open | copy own keys | wait C | half 0 x prefix | half 1 x prefix | [return i] | finish
 *   C      | fetch 1 | fetch 2 | ...                                    | [sum i]
 *
 * Words are those of the ring (attention_ring.c); the staging buffer of a call is free for the next
 * one's fetches because they follow its open on S, which follows this call's finish. In backward
 * both halves add to one partial in fp32, so a rank is one writer. */
#include <string.h>

#include "ops/attention/attention_schedule.h"

struct gather_args {
    struct cofi_attention_plan *plan;
    struct cofi_attention_view q, dout;
    struct cofi_kv_buffer kept;
};

/* ---- own keys ------------------------------------------------------------------------------- */

/* From where they were published for the others. */
static cof_status keep_own(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    const struct gather_args *a = args;
    struct cofi_attention_plan *plan = a->plan;
    const cof_layout *l = &plan->layout;
    const struct cofi_kv_buffer *from = &plan->published, *to = &a->kept;
    for (int half = 0; half < cof_layout_halves(l); half++) {
        int64_t chunk = cof_layout_chunk(l, plan->rank, half);
        for (int is_v = 0; is_v < 2; is_v++)
            memcpy(to->local + cofi_kv_at(to, is_v, cof_layout_chunk_start(l, chunk)),
                   cofi_arena_data(plan->binding.arena) +
                       cofi_kv_at(from, is_v, cof_layout_half_start(l, plan->rank, half)),
                   cofi_kv_bytes(from, is_v, cof_layout_chunk_rows(l, chunk)));
    }
    return COF_OK;
}

/* ---- sections ------------------------------------------------------------------------------- */

/* Of one half: the keys that its rows see, first to last. False for a half without rows. */
static bool section_of(const struct gather_args *a, int half,
                       struct cofi_attention_section *section)
{
    const struct cofi_attention_plan *plan = a->plan;
    const cof_layout *l = &plan->layout;
    int64_t chunk = cof_layout_chunk(l, plan->rank, half), start = cof_layout_chunk_start(l, chunk);
    int64_t rows = cof_layout_chunk_rows(l, chunk), begin, end;
    cofi_attention_keys_of(l, &plan->sight, start, rows, &begin, &end);
    *section = (struct cofi_attention_section){
        .dims = &plan->dims, .q_begin = cof_layout_half_start(l, plan->rank, half), .q_rows = rows,
        .k_begin = begin, .k_rows = end - begin,
        .band = cofi_attention_band(l, &plan->sight, start, rows, begin, end - begin), .q = a->q,
        .k = cofi_attention_rows(plan, a->kept.local + a->kept.offset[0], 0),
        .v = cofi_attention_rows(plan, a->kept.local + a->kept.offset[1], 1)};
    return rows > 0;
}

static cof_status sections_forward(struct cofi_cpu_stream *s, const void *args)
{
    struct gather_args a = *(const struct gather_args *)args;
    struct cofi_attention_section section;
    cofi_attention_cpu_begin(s, &a.plan->dims, &a.plan->state);
    for (int half = 0; half < cof_layout_halves(&a.plan->layout); half++)
        if (section_of(&a, half, &section))
            COF_TRY(cofi_schedule_section(
                a.plan, cofi_attention_cpu_forward(s, &section, &a.plan->state)));
    return COF_OK;
}

static cof_status sections_backward(struct cofi_cpu_stream *s, const void *args)
{
    struct gather_args a = *(const struct gather_args *)args;
    struct cofi_attention_section section;
    cofi_attention_cpu_partial_begin(s, &a.plan->dims, &a.plan->grad, a.plan->params.n_rows);
    for (int half = 0; half < cof_layout_halves(&a.plan->layout); half++)
        if (section_of(&a, half, &section))
            COF_TRY(cofi_schedule_section(
                a.plan, cofi_attention_cpu_backward(s, &section, &a.dout, &a.plan->grad)));
    return COF_OK;
}

static cof_status return_step(struct cofi_cpu_stream *s, const void *args)
{
    const struct cofi_step_args *a = args;
    return cofi_attention_return(s, a->plan, a->step);
}

/* ---- the schedule --------------------------------------------------------------------------- */

static struct gather_args gather_args(const struct cofi_schedule *x)
{
    return (struct gather_args){x->plan, x->call->q, x->call->dout,
                                cofi_attention_kept(x->plan, x->call->saved_kv, 1)};
}

static void gather_keys(struct cofi_schedule *x, const struct gather_args *a)
{
    for (int step = 1; step < x->plan->n_ranks; step++) {
        struct cofi_fetch_args f = {x->plan, step, a->kept};
        cofi_schedule_put(x, x->c, cofi_attention_fetch, &f, sizeof f);
    }
    cofi_schedule_put(x, x->s, keep_own, a, sizeof *a);
    cofi_schedule_order_all(x, x->s, x->c);
}

void cofi_gather_forward(struct cofi_schedule *x)
{
    struct gather_args a = gather_args(x);
    gather_keys(x, &a);
    cofi_schedule_put(x, x->s, sections_forward, &a, sizeof a);
}

void cofi_gather_backward(struct cofi_schedule *x)
{
    struct gather_args a = gather_args(x);
    if (!x->plan->params.save_kv)
        gather_keys(x, &a);
    cofi_schedule_grad_begin(x);
    cofi_schedule_put(x, x->s, sections_backward, &a, sizeof a);
    for (int step = 1; step < x->plan->n_ranks; step++) {
        struct cofi_step_args i = {x->plan, step};
        cofi_schedule_put(x, x->s, return_step, &i, sizeof i);
        cofi_schedule_put(x, x->c, cofi_attention_sum, &i, sizeof i);
    }
}
