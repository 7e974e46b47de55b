/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The wait for a signal word, and the texts of the ways it can end badly. */
#include <stdio.h>
#include <string.h>

#include "core/faults.h"
#include "core/wait.h"
#include "symm/engine.h"

static bool is_there(const struct cofi_word *w, uint64_t value)
{
    uint32_t epoch = (uint32_t)value;
    switch (w->kind) {
    case COFI_READY: return epoch == (uint32_t)w->want;
    case COFI_ACK: return (int32_t)(epoch - (uint32_t)w->want) >= 0;
    default: return value >= w->want;
    }
}

static uint64_t value_of(const struct cofi_word *w)
{
    return atomic_load_explicit(&cofi_own_line(w->arena, w->offset)->value, memory_order_seq_cst);
}

static uint64_t own_poison(const struct cofi_word *w)
{
    return atomic_load_explicit(&cofi_own_control(w->arena)->poison.value, memory_order_acquire);
}

static bool word_ready(void *ctx)
{
    const struct cofi_word *w = ctx;
    return is_there(w, value_of(w)) || own_poison(w) != 0 ||
           atomic_load_explicit(w->arena->team->abort, memory_order_acquire) != 0;
}

/* ---- what the other rank is doing ----------------------------------------------------------- */

struct record {
    uint32_t epoch; /* 0: none, or it changed while it was read */
    uint32_t ordinal, direction;
    uint64_t digest, sizes[4];
    char name[17];
};

static uint64_t load(cof_arena *a, int rank, size_t field)
{
    return a->ops->load(a, rank, offsetof(struct cofi_control, record) + field);
}

static struct record read_record(cof_arena *a, int rank)
{
    struct record r = {0};
    uint64_t call = load(a, rank, offsetof(struct cofi_call_record, call));
    uint64_t detail = load(a, rank, offsetof(struct cofi_call_record, detail));
    for (int i = 0; i < 2; i++) {
        uint64_t part = load(a, rank, offsetof(struct cofi_call_record, name) + 8 * (size_t)i);
        memcpy(r.name + 8 * i, &part, sizeof part);
    }
    for (int i = 0; i < 4; i++)
        r.sizes[i] = load(a, rank, offsetof(struct cofi_call_record, sizes) + 8 * (size_t)i);
    r.epoch = call == load(a, rank, offsetof(struct cofi_call_record, call)) ? (uint32_t)call : 0;
    r.ordinal = (uint32_t)(call >> 32);
    r.direction = (uint32_t)detail;
    r.digest = detail >> 32;
    return r;
}

static const char *direction_name(uint32_t direction)
{
    return direction == 1 ? " forward" : direction == 2 ? " backward" : "";
}

/* "its call 7 (attention backward, plan 2; sizes 4 0 0 0)" */
static void describe_record(const struct record *r, char *text, size_t bytes)
{
    if (!r->epoch) {
        snprintf(text, bytes, "no call yet");
        return;
    }
    int n = snprintf(text, bytes, "its call %u (%s%s, plan %u", r->epoch, r->name,
                     direction_name(r->direction), r->ordinal);
    if (r->sizes[0] | r->sizes[1] | r->sizes[2] | r->sizes[3])
        n += snprintf(text + n, bytes - (size_t)n, "; sizes %llu %llu %llu %llu",
                      (unsigned long long)r->sizes[0], (unsigned long long)r->sizes[1],
                      (unsigned long long)r->sizes[2], (unsigned long long)r->sizes[3]);
    snprintf(text + n, bytes - (size_t)n, ")");
}

/* ---- the end of a wait ---------------------------------------------------------------------- */

/* Runs every few milliseconds of a long wait. A rank that is at the same epoch in another call will
 * never send the word. */
static cof_status word_poll(void *ctx)
{
    const struct cofi_word *w = ctx;
    cof_arena *a = w->arena;
    cof_world *world = a->team->world;
    cofi_world_poll(world);
    int r = a->team->world_rank[w->writer];
    if (r != world->rank && atomic_load(&world->state[r]) == COFI_PEER_LEFT)
        return COF_ERR_PEER_DEAD;
    if (!w->binding || atomic_load(&world->state[r]) != COFI_PEER_ALIVE)
        return COF_OK;
    struct record record = read_record(a, w->writer);
    uint32_t epoch = atomic_load_explicit(&a->epoch, memory_order_relaxed);
    return record.epoch == epoch && record.digest != w->binding->digest ? COF_ERR_MISMATCH : COF_OK;
}

static const char *reason(cof_status status)
{
    return status == COF_ERR_MISMATCH  ? "ranks disagree about this call"
           : status == COF_ERR_TIMEOUT ? "deadline passed"
                                       : "that rank is gone";
}

cof_status cofi_wait_text(cof_arena *a, const struct cofi_wait_end *end)
{
    int own = a->team->world_rank[end->rank], r = a->team->world_rank[end->writer];
    char doing[160], own_doing[160];
    struct record record = read_record(a, end->writer), own_record = read_record(a, end->rank);
    describe_record(&record, doing, sizeof doing);
    describe_record(&own_record, own_doing, sizeof own_doing);
    if (end->op)
        return COF_FAIL(
            end->status,
            "%s%s: rank %d waited for rank %d at \"%s\": %s (waited %g s at most); wanted "
            "epoch %u digest %08x, saw epoch %u digest %08x; rank %d is in %s, rank %d in %s",
            end->op, direction_name(end->direction), own, r, end->step, reason(end->status),
            end->timeout, (uint32_t)end->want, (unsigned)end->digest, (uint32_t)end->seen,
            (unsigned)(end->seen >> 32 & COFI_DIGEST_MASK), r, doing, own, own_doing);
    return COF_FAIL(end->status,
                    "%s: rank %d waited for rank %d: %s (waited %g s at most); wanted signal %llu, "
                    "saw %llu",
                    end->step, own, r, reason(end->status), end->timeout,
                    (unsigned long long)end->want, (unsigned long long)end->seen);
}

static cof_status wait_failed(const struct cofi_word *w, cof_status status)
{
    const struct cofi_binding *b = w->binding;
    struct cofi_wait_end end = {
        .rank = w->arena->rank, .writer = w->writer, .status = status, .want = w->want,
        .seen = value_of(w), .step = w->step, .timeout = w->arena->run_timeout};
    if (b) {
        end.op = b->op;
        end.direction = b->direction;
        end.digest = b->digest;
    }
    cofi_wait_text(w->arena, &end);
    return cofi_arena_fail(w->arena, status);
}

cof_status cofi_arena_wait(const struct cofi_word *w)
{
    cof_arena *a = w->arena;
    struct cofi_line *line = cofi_own_line(a, w->offset);
    cof_status status = cofi_wait(&(struct cofi_wait){
        .ready = word_ready, .poll = word_poll, .ctx = (void *)(uintptr_t)w,
        .word = (_Atomic uint32_t *)(void *)&line->value, .sleepers = &line->sleepers,
        .deadline = cofi_deadline(a->run_timeout), .max_sleep = COFI_SLEEP_NS,
        .spin = a->team->world->own_cores, .shared = true});
    /* The word as it was before the look at poison: a rank that fails later tells of it before it
     * lets anybody go on (models/poison.pml). */
    uint64_t value = value_of(w);
    COF_TRY(cofi_arena_look(a));
    if (status != COF_OK)
        return wait_failed(w, status);
    if (!is_there(w, value)) { /* the team's abort word ended the wait */
        status = cofi_team_status(a->team);
        return cofi_arena_fail(a, status == COF_OK ? COF_ERR_PEER_DEAD : status);
    }
    if (w->kind == COFI_READY && !COFI_FAULT(DIGEST, a->rank) &&
        (value >> 32 & 0x7fffffff) != w->binding->digest)
        return wait_failed(w, COF_ERR_MISMATCH);
    return COF_OK;
}
