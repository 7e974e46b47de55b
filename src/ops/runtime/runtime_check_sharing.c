/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases about plans that share an arena. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/runtime/runtime_check.h"

enum { MAX_PLANS = 3, MAX_BYTES = 3000, REGION_BYTES = 1000, N_REGIONS = 2 };

struct shared_arena {
    struct cofi_check_arena a;
    int n_plans;
    struct cofi_runtime_op op[MAX_PLANS];
    size_t region[N_REGIONS]; /* offsets */
};

static const char *const names[MAX_PLANS] = {"first", "second", "third"};

static cof_status fill_region(struct shared_arena *s, int i)
{
    unsigned char bytes[REGION_BYTES];
    cofi_runtime_fill(bytes, REGION_BYTES, 5, (uint64_t)i, 0);
    return cofi_runtime_write(s->a.arena, s->region[i], bytes, REGION_BYTES);
}

static void inspect_region(struct cofi_runtime *rt, struct shared_arena *s, int i)
{
    unsigned char bytes[REGION_BYTES];
    cof_status status = cofi_runtime_read(s->a.arena, s->region[i], bytes, REGION_BYTES);
    cofi_runtime_wants(rt, "reading a region", status, COF_OK, NULL);
    COFI_EXPECT(rt, cofi_runtime_compare(bytes, REGION_BYTES, 5, (uint64_t)i, 0) < 0,
                "region %d of cof_arena_alloc was written by a plan", i);
}

/* Room for the largest payload, all words, and the regions; one region before all plans are there,
 * one after. */
static cof_status open_shared(struct cofi_runtime *rt, uint32_t first_epoch, struct shared_arena *s)
{
    size_t payload = cofi_runtime_op_payload(rt->n_ranks, COFI_RUNTIME_PUSH, MAX_BYTES);
    size_t words = cofi_arena_words_bytes(rt->n_ranks, 2);
    size_t bytes = payload + (size_t)s->n_plans * words + N_REGIONS * 1024;
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, bytes, first_epoch, &s->a));
    for (int i = 0; i < s->n_plans; i++) {
        if (i < N_REGIONS)
            COF_TRY(cof_arena_alloc(s->a.arena, REGION_BYTES, &s->region[i]));
        COF_TRY(cofi_runtime_op_open(rt->job->team, s->a.arena, names[i],
                                     i % 2 ? COFI_RUNTIME_PULL : COFI_RUNTIME_PUSH, MAX_BYTES,
                                     &s->op[i]));
    }
    for (int i = 0; i < N_REGIONS; i++) {
        COFI_EXPECT(rt, s->region[i] % COFI_LINE == 0 && s->region[i] >= payload,
                    "region %d at %zu, under the payload of %zu or not aligned", i, s->region[i],
                    payload);
        COF_TRY(fill_region(s, i));
    }
    return cof_team_barrier(rt->job->team);
}

static void close_shared(struct cofi_runtime *rt, struct shared_arena *s)
{
    for (int i = 0; i < N_REGIONS; i++)
        inspect_region(rt, s, i);
    for (int i = 0; i < s->n_plans; i++) {
        cofi_runtime_op_inspect(rt, &s->op[i]);
        cofi_runtime_op_close(&s->op[i]);
    }
    cofi_check_arena_close(&s->a);
}

static struct cofi_runtime_call random_call(struct cofi_runtime *rt, uint64_t idx)
{
    struct cofi_runtime_call call = {
        .bytes = 1 + cofi_check_random(rt->options->seed, 42, idx) % (MAX_BYTES - 1)};
    if (cofi_runtime_random(rt, 4) == 0)
        call.read_delay = cofi_runtime_random(rt, 1000);
    return call;
}

/* In one random order, the same on all ranks. Readers are slow, so that a plan which does not wait
 * for the end of another's call destroys what is being read. */
cof_status cofi_runtime_overlay(struct cofi_runtime *rt)
{
    struct shared_arena s = {.n_plans = (int)rt->arg};
    cof_stream stream;
    COF_TRY(open_shared(rt, 0, &s));
    COF_TRY(cof_stream_create(rt->job->world, 1, &stream));
    cof_status status = COF_OK;
    for (int i = 0; i < cofi_runtime_rounds(rt, 100) && status == COF_OK; i++) {
        struct cofi_runtime_call call = random_call(rt, (uint64_t)i);
        uint64_t plan = cofi_check_random(rt->options->seed, 43, (uint64_t)i);
        status = cofi_runtime_op_call(rt->job->world, &s.op[plan % (uint64_t)s.n_plans], &call,
                                      stream);
        if (status == COF_OK)
            status = cofi_runtime_pace(rt, i, stream);
    }
    cof_status synced = cof_stream_sync(stream);
    status = status == COF_OK ? synced : status;
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    cof_stream_destroy(stream);
    close_shared(rt, &s);
    return status;
}

/* ---- a plan made where another one was ------------------------------------------------------- */

/* The last rank reads slowly on its stream while the others are done, let their plan go, and make
 * another one in the same place: it must still wait for the last rank. */
static cof_status rebind_once(struct cofi_runtime *rt, struct shared_arena *s, cof_stream stream,
                              int round)
{
    bool slow = rt->rank == rt->n_ranks - 1;
    struct cofi_runtime_op kept = {0}, *op = &s->op[1];
    struct cofi_runtime_call call = {.bytes = MAX_BYTES, .read_delay = slow ? 5000 : 0};
    COF_TRY(cofi_runtime_op_open(rt->job->team, s->a.arena, "before", COFI_RUNTIME_PULL, MAX_BYTES,
                                 slow ? &kept : op));
    COF_TRY(cofi_runtime_op_call(rt->job->world, slow ? &kept : op, &call, stream));
    if (!slow) {
        COF_TRY(cof_stream_sync(stream));
        cofi_runtime_op_inspect(rt, op);
        cofi_runtime_op_close(op);
    }
    COF_TRY(cofi_runtime_op_open(rt->job->team, s->a.arena, "after",
                                 round % 2 ? COFI_RUNTIME_PULL : COFI_RUNTIME_PUSH, MAX_BYTES, op));
    call.read_delay = 0;
    COF_TRY(cofi_runtime_op_call(rt->job->world, op, &call, stream));
    COF_TRY(cof_stream_sync(stream));
    cofi_runtime_op_inspect(rt, slow ? &kept : op);
    cofi_runtime_op_inspect(rt, op);
    if (slow)
        cofi_runtime_op_close(&kept);
    cofi_runtime_op_close(op);
    return cof_team_barrier(rt->job->team);
}

cof_status cofi_runtime_rebind(struct cofi_runtime *rt)
{
    struct shared_arena s = {.n_plans = MAX_PLANS};
    cof_stream stream;
    COF_TRY(open_shared(rt, 0, &s));
    cofi_runtime_op_close(&s.op[1]); /* room for two beside the first one */
    cofi_runtime_op_close(&s.op[2]);
    s.n_plans = 1;
    COF_TRY(cof_stream_create(rt->job->world, 1, &stream));
    cof_status status = COF_OK;
    for (int i = 0; i < cofi_runtime_rounds(rt, 8) && status == COF_OK; i++)
        status = rebind_once(rt, &s, stream, i);
    cof_stream_destroy(stream);
    close_shared(rt, &s);
    return status;
}

/* As after many calls; the ranks stand still. */
static cof_status jump(struct cofi_runtime *rt, struct shared_arena *s, uint32_t epoch)
{
    struct cofi_runtime_call call = {.bytes = 9};
    COF_TRY(cofi_runtime_op_call(rt->job->world, &s->op[0], &call, COF_STREAM_NOW));
    COF_TRY(cof_team_barrier(rt->job->team));
    COF_TRY(cofi_runtime_set_epoch(s->a.arena, epoch));
    return cof_team_barrier(rt->job->team);
}

/* Made when the epoch is past the half of its range, where words that are 0 would count as acks of
 * any call to come. Readers are slow. */
cof_status cofi_runtime_late(struct cofi_runtime *rt)
{
    const uint32_t epoch = (UINT32_C(1) << 31) + 12345;
    struct shared_arena s = {.n_plans = 2};
    COF_TRY(open_shared(rt, rt->arg ? 0 : epoch, &s));
    cof_status status = rt->arg ? jump(rt, &s, epoch) : COF_OK;
    for (int i = 0; i < cofi_runtime_rounds(rt, 6) && status == COF_OK; i++) {
        struct cofi_runtime_call call = {.bytes = 5 + (size_t)i};
        status = cofi_runtime_op_call(rt->job->world, &s.op[0], &call, COF_STREAM_NOW);
        cofi_runtime_op_inspect(rt, &s.op[1]);
        cofi_runtime_op_close(&s.op[1]);
        COF_TRY(cofi_runtime_op_open(rt->job->team, s.a.arena, "late",
                                     i % 2 ? COFI_RUNTIME_PULL : COFI_RUNTIME_PUSH, MAX_BYTES,
                                     &s.op[1]));
        call.bytes = MAX_BYTES;
        call.read_delay = rt->rank == i % rt->n_ranks ? 3000 : 0;
        for (int k = 0; k < 3 && status == COF_OK; k++)
            status = cofi_runtime_op_call(rt->job->world, &s.op[1], &call, COF_STREAM_NOW);
    }
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    close_shared(rt, &s);
    return status;
}

/* ---- room ----------------------------------------------------------------------------------- */

/* Words of plans that are gone are free again: 300 plans where three have room, at high epochs. */
cof_status cofi_runtime_words_reused(struct cofi_runtime *rt)
{
    struct shared_arena s = {.n_plans = MAX_PLANS};
    COF_TRY(open_shared(rt, (UINT32_C(1) << 31) + 12345, &s));
    cof_status status = COF_OK;
    for (int i = 0; i < cofi_runtime_turns(rt, 300) && status == COF_OK; i++) {
        struct cofi_runtime_op *op = &s.op[1 + i % 2];
        struct cofi_runtime_call call = {.bytes = 1 + (size_t)i};
        cofi_runtime_op_inspect(rt, op);
        cofi_runtime_op_close(op);
        COF_TRY(cofi_runtime_op_open(rt->job->team, s.a.arena, names[1 + i % 2],
                                     i % 3 ? COFI_RUNTIME_PULL : COFI_RUNTIME_PUSH, MAX_BYTES, op));
        status = cofi_runtime_op_call(rt->job->world, op, &call, COF_STREAM_NOW);
        if (status == COF_OK && i % 5 == 0)
            status = cofi_runtime_op_call(rt->job->world, &s.op[0], &call, COF_STREAM_NOW);
    }
    COFI_EXPECT(rt, s.a.arena->n_regions == MAX_PLANS + N_REGIONS,
                "%d regions for %d plans and %d allocations", s.a.arena->n_regions, MAX_PLANS,
                N_REGIONS);
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    close_shared(rt, &s);
    return status;
}

/* Without room every rank is refused, the plans that are there go on, and a smaller one fits. */
cof_status cofi_runtime_no_room(struct cofi_runtime *rt)
{
    struct shared_arena s = {.n_plans = 2};
    struct cofi_runtime_op more;
    size_t offset, large = 4000 * (size_t)MAX_BYTES;
    struct cofi_runtime_call call = {.bytes = 77};
    COF_TRY(open_shared(rt, 0, &s));
    cof_team *team = rt->job->team;
    cofi_runtime_wants(rt, "a plan without room for its payload",
                       cofi_runtime_op_open(team, s.a.arena, "more", COFI_RUNTIME_PULL, large,
                                            &more), COF_ERR_NOMEM, "no room");
    cofi_runtime_wants(rt, "a plan without room for its words",
                       cofi_runtime_op_open(team, s.a.arena, "more", COFI_RUNTIME_PUSH, MAX_BYTES,
                                            &more), COF_ERR_NOMEM, "no room");
    cofi_runtime_wants(rt, "a region without room", cof_arena_alloc(s.a.arena, 3000, &offset),
                       COF_ERR_NOMEM, NULL);
    cofi_runtime_wants(rt, "a region larger than the arena",
                       cof_arena_alloc(s.a.arena, SIZE_MAX, &offset), COF_ERR_NOMEM, NULL);
    cofi_runtime_wants(rt, "an empty region", cof_arena_alloc(s.a.arena, 0, &offset),
                       COF_ERR_INVALID, "bytes = 0");
    if (rt->n_ranks > 1)
        cofi_runtime_wants(rt, "regions that differ",
                           cof_arena_alloc(s.a.arena, rt->rank ? 128 : 256, &offset),
                           COF_ERR_MISMATCH, "bytes = 256 on rank 0, 128 on rank 1");
    cof_status status = COF_OK;
    for (int i = 0; i < 6 && status == COF_OK; i++)
        status = cofi_runtime_op_call(rt->job->world, &s.op[i % 2], &call, COF_STREAM_NOW);
    cofi_runtime_op_inspect(rt, &s.op[1]);
    cofi_runtime_op_close(&s.op[1]);
    cof_status reopened = cofi_runtime_op_open(team, s.a.arena, "again", COFI_RUNTIME_PULL,
                                               MAX_BYTES, &s.op[1]);
    cofi_runtime_wants(rt, "a plan in the place of one that is gone", reopened, COF_OK, NULL);
    for (int i = 0; i < 4 && status == COF_OK && reopened == COF_OK; i++)
        status = cofi_runtime_op_call(rt->job->world, &s.op[1 - i % 2], &call, COF_STREAM_NOW);
    if (status == COF_OK)
        status = cof_team_barrier(team);
    close_shared(rt, &s);
    return status;
}
