/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases about cof_put, cof_get, cof_signal and cof_wait. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/runtime/runtime_check.h"

enum { CANARY = 192 }; /* bytes in front of each slot, of this value (0xc0) */

/* ---- all pairs of put and get --------------------------------------------------------------- */

/* One slot per writer, at an odd offset. */
struct slots {
    size_t bytes, stride;
};

static size_t slot_offset(const struct slots *s, int writer)
{
    return (size_t)writer * s->stride + CANARY + 3 + (size_t)writer % 5;
}

static bool is_canary(const unsigned char *data, size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++)
        if (data[i] != CANARY)
            return false;
    return true;
}

/* Every slot has its message, and not a byte beside them has changed. */
static void inspect_slots(struct cofi_runtime *rt, cof_arena *a, const struct slots *s,
                          uint64_t idx)
{
    const unsigned char *data = cofi_runtime_look(rt, a);
    size_t end = 0;
    for (int w = 0; data && w < rt->n_ranks; w++) {
        size_t at = slot_offset(s, w);
        long bad = cofi_runtime_compare(data + at, s->bytes, (uint64_t)w, (uint64_t)rt->rank, idx);
        COFI_EXPECT(rt, bad < 0, "put by rank %d: byte %ld of %zu is wrong", w, bad, s->bytes);
        COFI_EXPECT(rt, is_canary(data, end, at), "put by rank %d: wrote in front of it", w);
        end = at + s->bytes;
    }
    COFI_EXPECT(rt, !data || is_canary(data, end, cof_arena_bytes(a)),
                "a put wrote behind the last slot");
    cofi_runtime_look_end(a, data);
}

/* Sources and destinations at odd addresses. */
static cof_status put_to_all(struct cofi_runtime *rt, cof_arena *a, const struct slots *s,
                             uint64_t idx, unsigned char *sources, cof_stream stream)
{
    for (int i = 0; i < rt->n_ranks; i++) {
        int peer = (rt->rank + i) % rt->n_ranks;
        unsigned char *src = sources + (size_t)peer * s->stride + 1 + peer % 7;
        cofi_runtime_fill(src, s->bytes, (uint64_t)rt->rank, (uint64_t)peer, idx);
        COF_TRY(cof_put(a, peer, slot_offset(s, rt->rank), src, s->bytes, stream));
    }
    return cof_stream_sync(stream);
}

/* Every message that lies anywhere, fetched back; of long ones one a rank. */
static cof_status get_from_all(struct cofi_runtime *rt, cof_arena *a, const struct slots *s,
                               uint64_t idx, cof_stream stream)
{
    struct cofi_guard guard;
    COF_TRY(cofi_guard_alloc_for(cofi_check_device(rt->job->world), &guard, s->bytes + 8));
    cof_status status = COF_OK;
    for (int i = 0; i < rt->n_ranks * rt->n_ranks && status == COF_OK; i++) {
        int peer = i % rt->n_ranks, writer = i / rt->n_ranks;
        if (s->bytes > 100000 && writer != (peer + rt->rank) % rt->n_ranks)
            continue;
        unsigned char *dst = guard.data + 1 + i % 7;
        cofi_guard_poison(&guard);
        status = cof_get(a, dst, peer, slot_offset(s, writer), s->bytes, stream);
        if (status == COF_OK)
            status = cof_stream_sync(stream);
        long bad = cofi_runtime_compare(dst, s->bytes, (uint64_t)writer, (uint64_t)peer, idx);
        COFI_EXPECT(rt, bad < 0, "get from rank %d: byte %ld of %zu is wrong", peer, bad, s->bytes);
        COFI_EXPECT(rt, dst[-1] == 0xff && dst[s->bytes] == 0xff && cofi_guard_intact(&guard),
                    "get from rank %d of %zu bytes: wrote beside them", peer, s->bytes);
    }
    cofi_guard_free(&guard);
    return status;
}

static cof_status put_get_round(struct cofi_runtime *rt, cof_arena *a, const struct slots *s,
                                uint64_t idx, unsigned char *sources, cof_stream stream)
{
    COF_TRY(cofi_runtime_set(a, 0, CANARY, cof_arena_bytes(a)));
    COF_TRY(cof_team_barrier(rt->job->team));
    COF_TRY(put_to_all(rt, a, s, idx, sources, stream));
    COF_TRY(cof_team_barrier(rt->job->team));
    inspect_slots(rt, a, s, idx);
    COF_TRY(get_from_all(rt, a, s, idx, stream));
    return cof_team_barrier(rt->job->team);
}

cof_status cofi_runtime_put_get(struct cofi_runtime *rt)
{
    struct slots s = {.bytes = rt->arg, .stride = rt->arg + CANARY + 16};
    struct cofi_check_arena a;
    cof_stream stream;
    unsigned char *sources = cofi_runtime_alloc(rt->job->world, (size_t)rt->n_ranks * s.stride);
    COF_FAIL_IF(!sources, COF_ERR_NOMEM, "check: no memory for messages of %zu bytes", s.bytes);
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, (size_t)rt->n_ranks * s.stride + CANARY, 0, &a));
    cof_status status = cof_stream_create(rt->job->world, 1, &stream);
    for (int i = 0; i < cofi_runtime_rounds(rt, 2) && status == COF_OK; i++)
        status = put_get_round(rt, a.arena, &s, (uint64_t)i, sources, i % 2 ? stream
                                                                           : COF_STREAM_NOW);
    cof_stream_destroy(stream);
    cofi_check_arena_close(&a);
    cofi_runtime_free(rt->job->world, sources);
    return status;
}

/* ---- arguments ------------------------------------------------------------------------------ */

static void expect_refusals(struct cofi_runtime *rt, cof_arena *a, char *x)
{
    const cof_stream now = COF_STREAM_NOW;
    size_t end = cof_arena_bytes(a);
    int n = rt->n_ranks;
#define WANTS(call, part) cofi_runtime_wants(rt, #call, call, COF_ERR_INVALID, part)
    WANTS(cof_put(a, n, 0, x, 8, now), "peer = ");
    WANTS(cof_put(a, -1, 0, x, 8, now), "peer = -1");
    WANTS(cof_put(a, 0, end, x, 1, now), "dst_offset = 256");
    WANTS(cof_put(a, 0, end - 7, x, 8, now), "dst_offset = 249, bytes = 8");
    WANTS(cof_put(a, 0, SIZE_MAX - 3, x, 8, now), "dst_offset = ");
    WANTS(cof_put(a, 0, 8, x, SIZE_MAX - 3, now), "bytes = ");
    WANTS(cof_put(a, 0, 0, NULL, 8, now), "src");
    WANTS(cof_get(a, x, n, 0, 8, now), "peer = ");
    WANTS(cof_get(a, x, 0, end - 7, 8, now), "src_offset = 249, bytes = 8");
    WANTS(cof_get(a, x, 0, SIZE_MAX, 2, now), "src_offset = ");
    WANTS(cof_get(a, NULL, 0, 0, 8, now), "dst");
    WANTS(cof_signal(a, 0, 4, now), "word = 4");
    WANTS(cof_signal(a, 0, -1, now), "word = -1");
    WANTS(cof_signal(a, n, 0, now), "peer = ");
    WANTS(cof_wait(a, 0, 4, now), "word = 4");
    WANTS(cof_wait(a, -2, 0, now), "peer = -2");
    WANTS(cof_put(NULL, 0, 0, x, 8, now), "arena");
#undef WANTS
    cofi_runtime_wants(rt, "0 bytes at the end", cof_put(a, 0, end, x, 0, now), COF_OK, NULL);
    cofi_runtime_wants(rt, "0 bytes from the end", cof_get(a, x, 0, end, 0, now), COF_OK, NULL);
}

/* Memory that the device does not reach. */
static void expect_unreachable(struct cofi_runtime *rt, cof_arena *a)
{
    char x[8] = "";
    cofi_runtime_wants(rt, "a source on the stack", cof_put(a, 0, 0, x, 8, COF_STREAM_NOW),
                       COF_ERR_INVALID, "src");
    cofi_runtime_wants(rt, "a destination on the stack", cof_get(a, x, 0, 0, 8, COF_STREAM_NOW),
                       COF_ERR_INVALID, "dst");
}

cof_status cofi_runtime_ranges(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    char *x = cofi_runtime_alloc(rt->job->world, 16);
    COF_FAIL_IF(!x, COF_ERR_NOMEM, "check: no memory");
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, 256, 0, &a));
    expect_refusals(rt, a.arena, x);
    if (cofi_check_device(rt->job->world))
        expect_unreachable(rt, a.arena);
    cofi_runtime_wants(rt, "team after refused arguments", cof_team_query(rt->job->team), COF_OK,
                       NULL);
    COF_TRY(cof_team_barrier(rt->job->team));
    cofi_runtime_free(rt->job->world, x);
    cofi_check_arena_close(&a);
    return COF_OK;
}

/* ---- message passing ------------------------------------------------------------------------ */

enum { DATA_WORD, FREE_WORD, CHAIN_WORD };

enum { BATCH = 16 }; /* rounds that are enqueued at once */

/* One rank's messages of a batch of rounds, by round and peer. */
struct mail {
    size_t bytes;
    unsigned char *sent, *received;
};

static unsigned char *letter(const struct cofi_runtime *rt, const struct mail *m,
                             unsigned char *letters, uint64_t round, int peer)
{
    return letters + ((round % BATCH) * (size_t)rt->n_ranks + (size_t)peer) * m->bytes;
}

/* One message to every peer. A peer's "free" signal hands its slot back. */
static cof_status send_all(struct cofi_runtime *rt, cof_arena *a, const struct mail *m,
                           uint64_t round, cof_stream stream)
{
    for (int i = 1; i < rt->n_ranks; i++) {
        int peer = (rt->rank + i) % rt->n_ranks;
        unsigned char *src = letter(rt, m, m->sent, round, peer);
        cofi_runtime_fill(src, m->bytes, (uint64_t)rt->rank, (uint64_t)peer, round);
        if (round > 0)
            COF_TRY(cof_wait(a, peer, FREE_WORD, stream));
        COF_TRY(cof_put(a, peer, (size_t)rt->rank * m->bytes, src, m->bytes, stream));
        COF_TRY(cof_signal(a, peer, DATA_WORD, stream));
    }
    return COF_OK;
}

static cof_status receive_all(struct cofi_runtime *rt, cof_arena *a, const struct mail *m,
                              uint64_t round, cof_stream stream)
{
    for (int i = 1; i < rt->n_ranks; i++) {
        int peer = (rt->rank + i) % rt->n_ranks;
        COF_TRY(cof_wait(a, peer, DATA_WORD, stream));
        COF_TRY(cof_get(a, letter(rt, m, m->received, round, peer), rt->rank,
                        (size_t)peer * m->bytes, m->bytes, stream));
        COF_TRY(cof_signal(a, peer, FREE_WORD, stream));
    }
    return COF_OK;
}

static cof_status pass_batch(struct cofi_runtime *rt, cof_arena *a, const struct mail *m,
                             uint64_t first, cof_stream stream)
{
    memset(m->received, 0, BATCH * (size_t)rt->n_ranks * m->bytes);
    if (cofi_runtime_random(rt, 4) == 0)
        cofi_runtime_sleep_us(cofi_runtime_random(rt, 1000));
    for (uint64_t round = first; round < first + BATCH; round++) {
        COF_TRY(send_all(rt, a, m, round, stream));
        COF_TRY(receive_all(rt, a, m, round, stream));
    }
    COF_TRY(cof_stream_sync(stream));
    for (uint64_t round = first; round < first + BATCH; round++)
        for (int i = 1; i < rt->n_ranks; i++) {
            int peer = (rt->rank + i) % rt->n_ranks;
            long bad = cofi_runtime_compare(letter(rt, m, m->received, round, peer), m->bytes,
                                            (uint64_t)peer, (uint64_t)rt->rank, round);
            COFI_EXPECT(rt, bad < 0, "round %llu: signal of rank %d seen before byte %ld of its "
                        "put, or its slot written before it was free", (unsigned long long)round,
                        peer, bad);
        }
    return COF_OK;
}

cof_status cofi_runtime_message_passing(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    cof_stream stream;
    size_t bytes = BATCH * (size_t)rt->n_ranks * rt->arg;
    const cof_world *world = rt->job->world;
    struct mail m = {rt->arg, cofi_runtime_alloc(world, bytes), cofi_runtime_alloc(world, bytes)};
    cof_status status = m.sent && m.received ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "check: no memory");
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, (size_t)rt->n_ranks * rt->arg, 0, &a));
    COF_TRY(cof_stream_create(rt->job->world, 1, &stream));
    int n_batches = cofi_runtime_rounds(rt, rt->arg < 1000 ? 80 : 30);
    for (int i = 0; i < n_batches && status == COF_OK; i++)
        status = pass_batch(rt, a.arena, &m, (uint64_t)i * BATCH, stream);
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    cof_stream_destroy(stream);
    cofi_check_arena_close(&a);
    cofi_runtime_free(world, m.sent);
    cofi_runtime_free(world, m.received);
    return status;
}

/* A message goes round the ranks, each link a put and a signal to the next one, or a put into the
 * own memory and a get by the next one; each rank adds its own number. */
static cof_status pass_on(struct cofi_runtime *rt, cof_arena *a, bool by_get, uint64_t *message)
{
    int next = (rt->rank + 1) % rt->n_ranks;
    COF_TRY(cof_put(a, by_get ? rt->rank : next, 64, message, 64, COF_STREAM_NOW));
    return cof_signal(a, next, CHAIN_WORD, COF_STREAM_NOW);
}

static cof_status take_over(struct cofi_runtime *rt, cof_arena *a, bool by_get, uint64_t *message)
{
    int previous = (rt->rank + rt->n_ranks - 1) % rt->n_ranks;
    COF_TRY(cof_wait(a, previous, CHAIN_WORD, COF_STREAM_NOW));
    return cof_get(a, message, by_get ? previous : rt->rank, 64, 64, COF_STREAM_NOW);
}

cof_status cofi_runtime_causality(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, 128, 0, &a));
    int n_rounds = cofi_runtime_rounds(rt, 600 / rt->n_ranks);
    uint64_t *message = cofi_runtime_alloc(rt->job->world, 64);
    uint64_t sum = (uint64_t)(rt->n_ranks * (rt->n_ranks - 1) / 2);
    cof_status status = message ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "check: no memory");
    for (int i = 0; i < n_rounds && status == COF_OK; i++) {
        bool by_get = i % 2;
        if (rt->rank == 0)
            status = pass_on(rt, a.arena, by_get, message);
        if (status == COF_OK)
            status = take_over(rt, a.arena, by_get, message);
        for (int k = 0; k < 8 && status == COF_OK; k++)
            message[k] += (uint64_t)rt->rank;
        if (status == COF_OK && rt->rank != 0)
            status = pass_on(rt, a.arena, by_get, message);
        for (int k = 0; k < 8 && rt->rank == 0 && status == COF_OK; k++)
            COFI_EXPECT(rt, message[k] == (uint64_t)(i + 1) * sum,
                        "round %d: number %d is %llu after all ranks, wanted %llu", i, k,
                        (unsigned long long)message[k], (unsigned long long)(i + 1) * sum);
    }
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    cofi_runtime_free(rt->job->world, message);
    cofi_check_arena_close(&a);
    return status;
}

/* ---- counts --------------------------------------------------------------------------------- */

static int n_signals(int from, int to, int word)
{
    return 1 + (from * 7 + to * 5 + word * 3) % 9;
}

/* All signals ahead of all waits; signals peer by peer, waits word by word and backwards. */
cof_status cofi_runtime_signal_count(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    cof_stream stream;
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, 0, 0, &a));
    COF_TRY(cof_stream_create(rt->job->world, 1, &stream));
    cof_status status = COF_OK;
    for (int round = 0; round < cofi_runtime_rounds(rt, 6); round++) {
        cof_stream s = round % 2 ? stream : COF_STREAM_NOW;
        for (int peer = 0; peer < rt->n_ranks; peer++)
            for (int i = 0; i < 4 * 9 && status == COF_OK; i++)
                if (i / 4 < n_signals(rt->rank, peer, i % 4))
                    status = cof_signal(a.arena, peer, i % 4, s);
        if (status == COF_OK && round % 3)
            status = cof_team_barrier(rt->job->team);
        for (int word = 3; word >= 0; word--)
            for (int peer = rt->n_ranks - 1; peer >= 0; peer--)
                for (int i = 0; i < n_signals(peer, rt->rank, word) && status == COF_OK; i++)
                    status = cof_wait(a.arena, peer, word, s);
        if (status == COF_OK)
            status = cof_stream_sync(s);
    }
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    cof_stream_destroy(stream);
    cofi_check_arena_close(&a);
    return status;
}

/* N signals, late a put and signal N + 1. */
static cof_status signal_late(struct cofi_runtime *rt, cof_arena *a, int n_early,
                              const uint64_t *round)
{
    for (int i = 0; i < n_early * rt->n_ranks; i++)
        if (i % rt->n_ranks != rt->rank)
            COF_TRY(cof_signal(a, i % rt->n_ranks, 1, COF_STREAM_NOW));
    COF_TRY(cof_team_barrier(rt->job->team));
    cofi_runtime_sleep_us(3000);
    for (int i = 1; i < rt->n_ranks; i++) {
        int peer = (rt->rank + i) % rt->n_ranks;
        COF_TRY(cof_put(a, peer, 0, round, 8, COF_STREAM_NOW));
        COF_TRY(cof_signal(a, peer, 1, COF_STREAM_NOW));
    }
    return COF_OK;
}

static cof_status wait_for_next(struct cofi_runtime *rt, cof_arena *a, int n_early, uint64_t round,
                                uint64_t *seen, cof_stream stream)
{
    int signaller = (int)(round % (uint64_t)rt->n_ranks);
    *seen = 0;
    for (int i = 0; i < n_early + 1; i++)
        COF_TRY(cof_wait(a, signaller, 1, stream));
    COF_TRY(cof_get(a, seen, rt->rank, 0, 8, stream));
    cof_status met = cof_team_barrier(rt->job->team), read = cof_stream_sync(stream);
    COFI_EXPECT(rt, *seen == round, "wait %d was released by signal %d (round %llu, read %llu)",
                n_early + 1, n_early, (unsigned long long)round, (unsigned long long)*seen);
    return met != COF_OK ? met : read;
}

/* n signals release n waits and not one more: what a rank reads after its wait n + 1 was put there
 * late, before signal n + 1. */
cof_status cofi_runtime_next_signal(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    cof_stream stream;
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, 64, 0, &a));
    COF_TRY(cof_stream_create(rt->job->world, 1, &stream));
    uint64_t *number = cofi_runtime_alloc(rt->job->world, 8);
    cof_status status = number ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "check: no memory");
    for (int round = 1; round <= cofi_runtime_rounds(rt, 12) && status == COF_OK; round++) {
        *number = (uint64_t)round;
        status = round % rt->n_ranks == rt->rank
                     ? signal_late(rt, a.arena, round % 6, number)
                     : wait_for_next(rt, a.arena, round % 6, (uint64_t)round, number, stream);
        if (status == COF_OK)
            status = cof_team_barrier(rt->job->team);
    }
    cofi_runtime_free(rt->job->world, number);
    cof_stream_destroy(stream);
    cofi_check_arena_close(&a);
    return status;
}
