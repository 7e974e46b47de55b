/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CPUs. A call is cut into parts of at most `capacity` rows, small enough that
 * all ranks' rows of a part stay in the last cache; every part takes an epoch of its own. Of a part
 * each rank does, on the thread that dispatches its stream and its helpers:
 *
 *   one shot  publish x | READY to all, wait for all | reduce and norm all rows
 *   two shot  publish x | READY to all, wait for all | reduce the own share | SUMS to all, wait for
 *             all | norm all rows
 *
 * and, where x lies in the arena, at the end of the call: ACK to all, wait for all.
 *
 * Words and buffers (w -> r: stored by rank w in r's slab, or read by r in w's; `a` is an epoch)
 *   READY   w -> r  w's rows of part a are there. A word for each parity: w is at a + 1 as soon as
 *                   it has r's READY of a, and r may not have looked at w's by then.
 *   halves  w -> r  x, in the half of a's parity. w writes it again at a + 2: then it has ended
 *                   a + 1, so has seen r's READY of a + 1, which r sends after it has ended a.
 *   SUMS    w -> r  w's share of part a is reduced. One word, and one buffer: w stores them again
 *                   at a + 1 after r's READY of a + 1, so after r has ended a.
 *   ACK     r -> w  r is done with w's x: w's call ends, and x may be overwritten.
 * Each is a release of its writer's stores, and the wait for it an acquire. Parity fails where
 * epoch 0xffffffff is followed by 1; there the ranks meet in between (call.h). */
#include "core/faults.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_cpu.h"
#include "symm/call.h"
#include "symm/stream.h"

enum { READY_EVEN, READY_ODD, SUMS, ACK, PURPOSES };

static void lay_out(struct cofi_arn_plan *plan)
{
    plan->n_purposes = PURPOSES;
    plan->acks = 1u << ACK;
    cofi_arn_cpu_lay_out(plan);
}

static int peer_of(const struct cofi_arn_plan *plan, int i)
{
    return (plan->rank + i) % plan->n_ranks;
}

static void signal_all(struct cofi_arn_plan *plan, int purpose)
{
    for (int i = 1; i < plan->n_ranks; i++)
        cofi_call_signal(&plan->binding, peer_of(plan, i), purpose);
}

static cof_status publish(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p)
{
    struct cofi_arn_plan *plan = p->plan;
    if (plan->n_ranks > 1 && !p->call->x_source)
        cofi_arn_cpu_publish(s, p);
    signal_all(plan, p->ready);
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(ARN_READY_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ready(&plan->binding, peer_of(plan, i), p->ready,
                                     "rows published"));
    return COF_OK;
}

static cof_status exchange_sums(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p)
{
    struct cofi_arn_plan *plan = p->plan;
    int64_t end = cofi_arn_cpu_share_begin(p->n, plan->rank + 1, plan->n_ranks);
    p->share = cofi_arn_cpu_share_begin(p->n, plan->rank, plan->n_ranks);
    for (int r = 0; r < plan->n_ranks; r++)
        cofi_arn_cpu_find_x(p, r, p->share, end);
    cofi_arn_cpu_reduce_share(s, p, p->share, end);
    signal_all(plan, SUMS);
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(ARN_SUM_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ready(&plan->binding, peer_of(plan, i), SUMS, "share summed"));
    for (int r = 0; r < plan->n_ranks; r++)
        cofi_arn_cpu_find_sums(p, r);
    return COF_OK;
}

static cof_status run_part(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p)
{
    COF_TRY(publish(s, p));
    if (p->two_shots)
        COF_TRY(exchange_sums(s, p));
    else
        for (int r = 0; r < p->plan->n_ranks; r++)
            cofi_arn_cpu_find_x(p, r, 0, p->n);
    cofi_arn_cpu_finish(s, p);
    return COF_OK;
}

/* The peers have read x where it lies. */
static cof_status wait_for_readers(struct cofi_arn_plan *plan)
{
    signal_all(plan, ACK);
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(ARN_ACK_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ack(&plan->binding, peer_of(plan, i), ACK,
                                   cofi_call_epoch(&plan->binding), "rows read"));
    return COF_OK;
}

struct run_args {
    struct cofi_arn_plan *plan;
    struct cofi_arn_call call;
    uint64_t n_empty;
};

static cof_status begin_part(const struct run_args *a, struct cofi_arn_cpu_part *p)
{
    struct cofi_arn_plan *plan = a->plan;
    const struct cofi_call call = {
        .n_empty = a->n_empty,
        .sizes = {(uint64_t)a->call.n_tokens, (uint64_t)p->first, (uint64_t)a->call.x_source,
                  a->call.x_source ? (uint64_t)a->call.x.pitch : 0}};
    COF_TRY(cofi_call_begin(&plan->binding, &call));
    int parity = cofi_call_epoch(&plan->binding) & 1;
    p->ready = parity ? READY_ODD : READY_EVEN;
    p->half = parity && !COFI_FAULT(ARN_HALF, plan->rank) ? p->state->sizes.half_bytes : 0;
    p->sums = 2 * p->state->sizes.half_bytes;
    return COF_OK;
}

static cof_status run_parts(struct cofi_cpu_stream *s, const struct run_args *a)
{
    struct cofi_arn_plan *plan = a->plan;
    struct cofi_arn_cpu_state *st = plan->state;
    int64_t one_shot_rows = st->one_shot_bytes / plan->row_bytes;
    struct cofi_arn_cpu_part p = {.plan = plan, .state = st, .call = &a->call,
                                  .two_shots = plan->n_ranks > 1 &&
                                               a->call.n_tokens > one_shot_rows};
    for (; p.first < a->call.n_tokens; p.first += p.n) {
        int64_t left = a->call.n_tokens - p.first;
        p.n = left < st->sizes.capacity ? left : st->sizes.capacity;
        COF_TRY(begin_part(a, &p));
        COF_TRY(run_part(s, &p));
    }
    if (a->call.x_source)
        COF_TRY(wait_for_readers(plan));
    cofi_call_end(&plan->binding);
    return COF_OK;
}

static cof_status run_call(struct cofi_cpu_stream *s, const void *args)
{
    struct run_args a = *(const struct run_args *)args;
    cof_status status = cofi_call_failure(&a.plan->binding, s);
    if (status == COF_OK)
        status = run_parts(s, &a);
    if (status != COF_OK) {
        cofi_arn_cpu_fill_nan(a.plan, &a.call.residual_out, a.call.n_tokens);
        cofi_arn_cpu_fill_nan(a.plan, &a.call.norm_out, a.call.n_tokens);
    }
    return status;
}

static cof_status enqueue(struct cofi_arn_plan *plan, const struct run_args *a,
                          struct cofi_cpu_stream *s)
{
    cof_status status = cofi_cpu_stream_sticky(s);
    if (status != COF_OK) /* its outputs are NaN all the same */
        cofi_arena_fail(plan->binding.arena, status);
    cof_status enqueued = cofi_cpu_enqueue(s, run_call, a, sizeof *a, COFI_CALL_ALWAYS);
    if (enqueued != COF_OK)
        cofi_arena_fail(plan->binding.arena, enqueued);
    return status != COF_OK ? status : enqueued;
}

static cof_status run(struct cofi_arn_plan *plan, const struct cofi_arn_call *call,
                      cof_stream stream)
{
    const struct run_args a = {plan, *call, plan->n_empty};
    cof_world *world = plan->base.team->world;
    struct cofi_cpu_stream *s;
    COF_TRY(cofi_stream_begin(world, stream, &s));
    return cofi_stream_end(world, stream, enqueue(plan, &a, s));
}

const struct cofi_arn_backend cofi_arn_cpu = {
    .name = "cpu", .lay_out = lay_out, .describe = cofi_arn_cpu_describe,
    .open = cofi_arn_cpu_open, .close = cofi_arn_cpu_close, .run = run};
