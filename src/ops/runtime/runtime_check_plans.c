/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases about plans' calls: epochs, acks, the wrap, and plans that share an arena. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/runtime/runtime_check.h"

enum { MAX_BYTES = 6000 };

/* The same on all ranks: sizes and directions of call `idx`. */
static struct cofi_runtime_call call_of(const struct cofi_runtime *rt, uint64_t idx)
{
    uint64_t x = cofi_check_random(rt->options->seed, 41, idx);
    return (struct cofi_runtime_call){.bytes = 1 + x % (MAX_BYTES - 1),
                                      .direction = (uint32_t)(x >> 20 & 1) + 1};
}

static void delay_some(struct cofi_runtime *rt, struct cofi_runtime_call *call)
{
    if (cofi_runtime_random(rt, 8) == 0)
        call->write_delay = cofi_runtime_random(rt, 1000);
    if (cofi_runtime_random(rt, 8) == 0)
        call->read_delay = cofi_runtime_random(rt, 500);
}

/* The ranks go their own ways again, when nobody looks at the arena any more. */
static cof_status leave(struct cofi_runtime *rt, cof_status status, cof_stream stream)
{
    cof_status synced = cof_stream_sync(stream);
    if (status == COF_OK)
        status = synced;
    return status == COF_OK ? cof_team_barrier(rt->job->team) : status;
}

/* ---- calls one after the other -------------------------------------------------------------- */

/* On an arena of the plan's own, or (attach) on one for it. */
static cof_status open_one(struct cofi_runtime *rt, uint32_t first_epoch,
                           struct cofi_check_arena *a, struct cofi_runtime_op *op)
{
    enum cofi_runtime_form form = rt->arg & 1;
    size_t bytes = cofi_runtime_op_payload(rt->n_ranks, form, MAX_BYTES) +
                   2 * cofi_arena_words_bytes(rt->n_ranks, 2);
    *a = (struct cofi_check_arena){.blocks.fd = -1};
    if (rt->job->attach || first_epoch || rt->arg >= 2)
        COF_TRY(cofi_runtime_arena(rt, rt->job->team, bytes, first_epoch, a));
    return cofi_runtime_op_open(rt->job->team, a->arena, "first", form, MAX_BYTES, op);
}

cof_status cofi_runtime_calls(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    struct cofi_runtime_op op;
    cof_stream stream;
    COF_TRY(open_one(rt, 0, &a, &op));
    COF_TRY(cof_stream_create(rt->job->world, 1, &stream));
    cof_status status = COF_OK;
    for (int i = 0; i < cofi_runtime_rounds(rt, rt->arg < 2 ? 200 : 100) && status == COF_OK; i++) {
        struct cofi_runtime_call call = call_of(rt, (uint64_t)i);
        delay_some(rt, &call);
        status = cofi_runtime_op_call(rt->job->world, &op, &call, stream);
        if (status == COF_OK)
            status = cofi_runtime_pace(rt, i, stream);
    }
    status = leave(rt, status, stream);
    cofi_runtime_op_inspect(rt, &op);
    cof_stream_destroy(stream);
    cofi_runtime_op_close(&op);
    cofi_check_arena_close(&a);
    return status;
}

/* One rank, another each time, is late by 200 ms in each place where a call can be late. */
cof_status cofi_runtime_skew(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    struct cofi_runtime_op op;
    COF_TRY(open_one(rt, 0, &a, &op));
    cof_status status = COF_OK;
    for (int i = 0; i < cofi_runtime_rounds(rt, 3) && status == COF_OK; i++) {
        struct cofi_runtime_call call = call_of(rt, (uint64_t)i);
        unsigned late = i % rt->n_ranks == rt->rank ? 200000 : 0;
        if (i % 3 == 0)
            cofi_runtime_sleep_us(late);
        call.write_delay = i % 3 == 1 ? late : 0;
        call.read_delay = i % 3 == 2 ? late / (unsigned)rt->n_ranks : 0;
        for (int k = 0; k < 3 && status == COF_OK; k++) {
            status = cofi_runtime_op_call(rt->job->world, &op, &call, COF_STREAM_NOW);
            call.write_delay = call.read_delay = 0;
        }
    }
    status = leave(rt, status, COF_STREAM_NOW);
    cofi_runtime_op_inspect(rt, &op);
    cofi_runtime_op_close(&op);
    cofi_check_arena_close(&a);
    return status;
}

/* ---- where the epoch comes round ------------------------------------------------------------ */

/* A signal and a wait of the user's between two calls. */
static cof_status signal_round(struct cofi_runtime *rt, cof_arena *a)
{
    COF_TRY(cof_signal(a, (rt->rank + 1) % rt->n_ranks, 2, COF_STREAM_NOW));
    return cof_wait(a, (rt->rank + rt->n_ranks - 1) % rt->n_ranks, 2, COF_STREAM_NOW);
}

static uint32_t after(uint32_t epoch, unsigned n)
{
    uint32_t later = epoch + n;
    return later < epoch ? later + 1 : later; /* epoch 0 is left out */
}

/* Calls of one plan, from a few before the reset to a few after it, and seldom of a second plan. */
cof_status cofi_runtime_wrap(struct cofi_runtime *rt)
{
    uint32_t reset = (uint32_t)(rt->arg >> 1), first = reset == 1 ? UINT32_MAX - 4 : reset - 5;
    struct cofi_check_arena a;
    struct cofi_runtime_op op, seldom;
    COF_TRY(open_one(rt, first, &a, &op));
    COF_TRY(cofi_runtime_op_open(rt->job->team, a.arena, "seldom", COFI_RUNTIME_PULL, 100,
                                 &seldom));
    cof_status status = COF_OK;
    for (unsigned i = 0; i < 14 && status == COF_OK; i++) {
        struct cofi_runtime_call call = call_of(rt, i);
        bool is_seldom = i == 2 || i == 10;
        call.bytes = is_seldom ? 100 : call.bytes;
        delay_some(rt, &call);
        status = cofi_runtime_op_call(rt->job->world, is_seldom ? &seldom : &op, &call,
                                      COF_STREAM_NOW);
        uint32_t epoch = cofi_runtime_epoch(a.arena);
        COFI_EXPECT(rt, epoch == after(first, i), "call %u has epoch %u, wanted %u", i, epoch,
                    after(first, i));
        if (status == COF_OK && i % 3 == 0)
            status = signal_round(rt, a.arena);
    }
    status = leave(rt, status, COF_STREAM_NOW);
    cofi_runtime_op_inspect(rt, &op);
    cofi_runtime_op_inspect(rt, &seldom);
    cofi_runtime_op_close(&seldom);
    cofi_runtime_op_close(&op);
    cofi_check_arena_close(&a);
    return status;
}

static cof_status some_calls(struct cofi_runtime *rt, struct cofi_runtime_op *op, int n)
{
    for (int i = 0; i < n; i++) {
        struct cofi_runtime_call call = call_of(rt, op->n_made);
        call.bytes = call.bytes > op->max_bytes ? op->max_bytes : call.bytes;
        COF_TRY(cofi_runtime_op_call(rt->job->world, op, &call, COF_STREAM_NOW));
    }
    return COF_OK;
}

/* As after as many calls of the last plan as that takes: its words would differ only in epochs that
 * nobody compares any more. The ranks stand still. */
static cof_status jump(struct cofi_runtime *rt, cof_arena *a, uint32_t epoch)
{
    COF_TRY(cof_team_barrier(rt->job->team));
    COF_TRY(cofi_runtime_set_epoch(a, epoch));
    return cof_team_barrier(rt->job->team);
}

/* All the way round: the seldom used plan comes again at the epoch of its last call, where words
 * that were not reset would look like this call's. One rank publishes late. */
static cof_status lap(struct cofi_runtime *rt, cof_arena *a, struct cofi_runtime_op *op,
                      struct cofi_runtime_op *seldom)
{
    static const uint32_t resets[] = {(UINT32_C(1) << 30) + 1, (UINT32_C(1) << 31) + 1,
                                      (UINT32_C(3) << 30) + 1, 1};
    COF_TRY(some_calls(rt, op, 6));
    COF_TRY(some_calls(rt, seldom, 1));
    COF_TRY(some_calls(rt, op, 2));
    for (int i = 0; i < 4; i++) {
        COF_TRY(jump(rt, a, resets[i] - 2 - (resets[i] == 1)));
        COF_TRY(some_calls(rt, op, 4));
    }
    COF_TRY(some_calls(rt, op, 3)); /* the epoch is 6 */
    struct cofi_runtime_call call = {.bytes = 100, .direction = 1};
    call.write_delay = rt->rank == rt->n_ranks - 1 ? 20000 : 0;
    COF_TRY(cofi_runtime_op_call(rt->job->world, seldom, &call, COF_STREAM_NOW));
    uint32_t epoch = cofi_runtime_epoch(a);
    COFI_EXPECT(rt, epoch == 7, "epoch %u, wanted 7 again", epoch);
    return some_calls(rt, op, 3);
}

cof_status cofi_runtime_lap(struct cofi_runtime *rt)
{
    enum cofi_runtime_form form = rt->arg & 1;
    struct cofi_check_arena a;
    struct cofi_runtime_op op, seldom;
    COF_TRY(open_one(rt, 1, &a, &op));
    COF_TRY(cofi_runtime_op_open(rt->job->team, a.arena, "seldom", form, 100, &seldom));
    cof_status status = leave(rt, lap(rt, a.arena, &op, &seldom), COF_STREAM_NOW);
    cofi_runtime_op_inspect(rt, &op);
    cofi_runtime_op_inspect(rt, &seldom);
    cofi_runtime_op_close(&seldom);
    cofi_runtime_op_close(&op);
    cofi_check_arena_close(&a);
    return status;
}
