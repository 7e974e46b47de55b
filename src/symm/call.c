/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "symm/call.h"

#include <string.h>

#include "core/faults.h"
#include "core/hash.h"
#include "symm/engine.h"

uint64_t cofi_call_digest(const struct cofi_binding *b, const struct cofi_call *call)
{
    uint64_t hash = cofi_hash(COFI_HASH_SEED, b->op, strlen(b->op));
    hash = cofi_hash_u64(cofi_hash_u64(hash, b->ordinal), call->direction);
    hash = cofi_hash_u64(hash, call->n_empty);
    for (int i = 0; i < COFI_CALL_SIZES; i++)
        hash = cofi_hash_u64(hash, call->sizes[i]);
    return (hash ^ hash >> 32) & COFI_DIGEST_MASK;
}

static void record_call(const struct cofi_binding *b, const struct cofi_call *call)
{
    struct cofi_call_record *r = &cofi_own_control(b->arena)->record;
    uint64_t name[2] = {0, 0};
    memcpy(name, b->op, strnlen(b->op, sizeof name));
    atomic_store(&r->call, 0);
    atomic_store(&r->detail, call->direction | b->digest << 32);
    for (int i = 0; i < 2; i++)
        atomic_store(&r->name[i], name[i]);
    for (int i = 0; i < COFI_CALL_SIZES; i++)
        atomic_store(&r->sizes[i], call->sizes[i]);
    atomic_store(&r->call, cofi_call_epoch(b) | b->ordinal << 32);
}

/* ---- wholes --------------------------------------------------------------------------------- */

cof_status cofi_call_allowed(const struct cofi_binding *b)
{
    const struct cofi_whole *w = &b->arena->whole;
    COF_FAIL_IF(w->op && w->ordinal != b->ordinal, COF_ERR_INVALID,
                "%s, plan %llu: on its arena plan %llu (%s) has made %d of the %d calls of a whole "
                "by section; wanted the others first",
                b->op, (unsigned long long)b->ordinal, (unsigned long long)w->ordinal, w->op,
                w->n_made, w->n_calls);
    return COF_OK;
}

void cofi_call_made(struct cofi_binding *b, int n_made, int n_calls)
{
    b->arena->whole = n_made == n_calls
                          ? (struct cofi_whole){0}
                          : (struct cofi_whole){b->op, b->ordinal, n_made, n_calls};
}

/* ---- signals and waits ---------------------------------------------------------------------- */

static void signal_word(struct cofi_binding *b, int peer, size_t words_offset, int purpose)
{
    cof_arena *a = b->arena;
    a->ops->signal(a, peer, cofi_line_offset(a, words_offset, purpose, a->rank),
                   (uint64_t)cofi_call_epoch(b) | b->digest << 32);
}

static cof_status wait_word(struct cofi_binding *b, int writer, size_t words_offset, int purpose,
                            enum cofi_wait_kind kind, uint32_t want, const char *step)
{
    return cofi_arena_wait(&(struct cofi_word){
        .arena = b->arena, .binding = b, .writer = writer,
        .offset = cofi_line_offset(b->arena, words_offset, purpose, writer), .kind = kind,
        .want = want, .step = step});
}

void cofi_call_signal(struct cofi_binding *b, int peer, int purpose)
{
    signal_word(b, peer, b->words_offset, purpose);
}

cof_status cofi_call_wait_ready(struct cofi_binding *b, int writer, int purpose, const char *step)
{
    return wait_word(b, writer, b->words_offset, purpose, COFI_READY, cofi_call_epoch(b), step);
}

cof_status cofi_call_wait_ack(struct cofi_binding *b, int writer, int purpose, uint32_t epoch,
                              const char *step)
{
    return epoch == 0 ? COF_OK
                      : wait_word(b, writer, b->words_offset, purpose, COFI_ACK, epoch, step);
}

/* ---- the arena's own words: every other rank, from the next one on -------------------------- */

static void signal_all(struct cofi_binding *b, int purpose)
{
    for (int i = 1; i < b->arena->n_ranks; i++)
        signal_word(b, (b->arena->rank + i) % b->arena->n_ranks, cofi_arena_words_offset(),
                    purpose);
}

static cof_status wait_all(struct cofi_binding *b, int purpose, enum cofi_wait_kind kind,
                           uint32_t want, const char *step)
{
    for (int i = 1; i < b->arena->n_ranks; i++)
        COF_TRY(wait_word(b, (b->arena->rank + i) % b->arena->n_ranks, cofi_arena_words_offset(),
                          purpose, kind, want, step));
    return COF_OK;
}

static cof_status meet(struct cofi_binding *b, int purpose, const char *step)
{
    signal_all(b, purpose);
    return wait_all(b, purpose, COFI_READY, cofi_call_epoch(b), step);
}

/* ---- reset ---------------------------------------------------------------------------------- */

/* Of the CPU's engines alone, where setting words cannot fail. */
static void reset_words(cof_arena *a, uint32_t before)
{
    cofi_set_lines(a, cofi_arena_words_offset(), COFI_END_ACK, before);
    pthread_mutex_lock(&a->lock); /* once in 2^30 calls */
    for (int i = 0; i < a->n_regions; i++) {
        struct cofi_binding *b = a->regions[i].binding;
        for (int p = 0; b && p < b->n_purposes; p++)
            cofi_set_lines(a, b->words_offset, p, b->acks >> p & 1 ? before : 0);
        if (b)
            memset(b->mark, 0, sizeof b->mark);
    }
    pthread_mutex_unlock(&a->lock);
}

static cof_status meet_and_reset(struct cofi_binding *b, uint32_t before)
{
    COF_TRY(meet(b, COFI_MEET, "meeting before a reset"));
    if (!COFI_FAULT(EPOCH_RESET, b->arena->rank))
        reset_words(b->arena, before);
    return meet(b, COFI_RESET, "meeting after a reset");
}

/* ---- begin and end -------------------------------------------------------------------------- */

static bool must_reset(uint32_t epoch)
{
    return (epoch & COFI_EPOCH_RESET_MASK) == 1;
}

cof_status cofi_call_begin(struct cofi_binding *b, const struct cofi_call *call)
{
    cof_arena *a = b->arena;
    COF_TRY(cofi_arena_look(a));
    uint32_t before = cofi_call_epoch(b);
    uint32_t epoch = before == 0 ? a->first_epoch : before == UINT32_MAX ? 1 : before + 1;
    uint64_t last = atomic_exchange_explicit(&a->last, b->ordinal + 1, memory_order_relaxed);
    b->direction = call->direction;
    b->digest = cofi_call_digest(b, call);
    atomic_store_explicit(&a->epoch, epoch, memory_order_relaxed);
    record_call(b, call);
    if (before != 0 && must_reset(epoch))
        return meet_and_reset(b, before);
    if (before != 0 && last != b->ordinal + 1 && !COFI_FAULT(END_ACK_WAIT, a->rank))
        return wait_all(b, COFI_END_ACK, COFI_ACK, before, "last call of another plan ended");
    return COF_OK;
}

void cofi_call_end(struct cofi_binding *b)
{
    if (!b->arena->is_private)
        signal_all(b, COFI_END_ACK);
}

cof_status cofi_call_failure(struct cofi_binding *b, struct cofi_cpu_stream *stream)
{
    cof_status status = cofi_cpu_stream_status(stream);
    if (status != COF_OK && cofi_arena_status(b->arena) == COF_OK) {
        COF_FAIL(status, "%s: rank %d did not run its part of a call: its stream had failed", b->op,
                 b->arena->team->world->rank);
        cofi_arena_fail(b->arena, status);
    }
    return cofi_arena_status(b->arena);
}
