/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The one wait of devices, and what follows when it ends badly.
 *
 *   word       writer: one peer, by store_release_sys   reader: this rank's waits
 *   poison     any rank's host or device                every wait, about every 1000 looks
 *   abort      this rank's host (a thread that watches the sockets)   likewise
 *   dead       whichever block of this rank claims it first           every kernel, at its start
 *
 * Poison first, release second: who fails stores poison to all ranks and then publishes nothing
 * more, so no word of a failed call is ever released (models/poison.pml). */
#ifndef COFI_SPIN_H
#define COFI_SPIN_H

#include "device/device_arena.h"
#include "device/order.h"

#define COFD_LOOKS 1000 /* at the word, between looks at clock, poison and abort word */

#define COFD_STATUS_BITS(status) ((uint64_t)(uint16_t)(int16_t)(status))
/* cof_status and enum cofi_peer_state, which C++ does not include from here; asserted in
 * symm/engine_cuda.c. */
enum { COFD_ERR_MISMATCH = -10, COFD_ERR_TIMEOUT = -20, COFD_ERR_PEER_DEAD = -30 };
enum { COFD_PEER_LEFT = 1 };
enum { COFD_IS_DEAD = 1 }; /* beside these: the end is known already */

COFD_FN bool cofd_is_dead(const struct cofd_arena *a)
{
    return cofd_load_acquire_gpu(&a->dead) != 0;
}

COFD_FN struct cofi_line *cofd_line(const struct cofd_arena *a, int rank, uint64_t words_offset,
                                    uint32_t purpose, int writer)
{
    return (struct cofi_line *)(void *)(a->base[rank] + words_offset) +
           (uint64_t)purpose * (uint64_t)a->n_ranks + (uint64_t)writer;
}

/* ---- the end of an arena -------------------------------------------------------------------- */

struct cofd_wait {
    struct cofd_arena *arena;
    const struct cofd_binding *binding; /* of the call in progress; NULL: cof_wait */
    int writer;
    enum cofi_wait_kind kind;
    const uint64_t *word;
    uint64_t want;
    const struct cofd_wait_options *options;
};

/* The first failure of this rank tells everybody: the record, then the poison. Its own host is told
 * first: kernels that find the arena dead end at once, and the host may look when they have. */
COFD_FN void cofd_fail(const struct cofd_wait *w, int status, uint64_t seen)
{
    struct cofd_arena *a = w->arena;
    const struct cofd_binding *b = w->binding;
    if (!cofd_claim_gpu(&a->dead, 1))
        return;
    struct cofi_fault *f = &a->control[a->rank]->fault;
    cofd_store_relaxed_sys(&f->kind, (uint64_t)w->kind);
    cofd_store_relaxed_sys(&f->writer, (uint64_t)w->writer);
    cofd_store_relaxed_sys(&f->want, w->want);
    cofd_store_relaxed_sys(&f->seen, seen);
    cofd_store_relaxed_sys(&f->timeout_ns, w->options->timeout_ns);
    cofd_store_relaxed_sys(&f->digest, b ? b->digest : 0);
    cofd_store_relaxed_sys(&f->direction, b ? b->direction : 0);
    COFD_ONE_BY_ONE
    for (int i = 0; i < COFI_NAME_WORDS; i++)
        cofd_store_relaxed_sys(&f->name[i], b ? b->name[i] : 0);
    COFD_ONE_BY_ONE
    for (int i = 0; i < COFI_STEP_WORDS; i++)
        cofd_store_relaxed_sys(&f->step[i], w->options->step[i]);
    cofd_store_release_sys(&f->status, COFD_STATUS_BITS(status));
    uint64_t code = COFD_STATUS_BITS(status) | COFI_POISON_FAULT | (uint64_t)(a->rank + 1) << 32;
    COFD_ONE_BY_ONE
    for (int i = 0; i < a->n_ranks; i++)
        cofd_store_release_sys(&a->control[(a->rank + i) % a->n_ranks]->poison.value, code);
}

/* A rank that has left the world signals no more. */
COFD_FN bool cofd_has_left(const struct cofd_arena *a, int writer)
{
    return writer != a->rank &&
           cofd_load_acquire_sys_u32(&a->peer_state[a->world_rank[writer]]) == COFD_PEER_LEFT;
}

/* A rank that is at the same epoch in another call will never send the word. The record is read as
 * its writer makes it: `call` before and after the rest. */
COFD_FN bool cofd_is_in_another_call(const struct cofd_wait *w)
{
    const struct cofi_call_record *r = &w->arena->control[w->writer]->record;
    uint64_t call = cofd_load_acquire_sys(&r->call);
    uint64_t detail = cofd_load_acquire_sys(&r->detail);
    return (uint32_t)call == w->binding->epoch && detail >> 32 != w->binding->digest &&
           cofd_load_acquire_sys(&r->call) == call;
}

/* Whether the arena is dead, or another rank has said so. For the end of a call as well: copy
 * engines do not look, so the copies of a rank that failed may have overwritten what this one read,
 * but its poison came first (models/poison.pml, LOOK_AFTER_READ). */
COFD_FN bool cofd_is_told(struct cofd_arena *a)
{
    if (cofd_is_dead(a))
        return true;
    if (cofd_load_acquire_sys(&a->control[a->rank]->poison.value) == 0)
        return false;
    cofd_claim_gpu(&a->dead, 1);
    return true;
}

/* One thread, at the end of a kernel that found the arena dead and that copies follow: those go on,
 * and who failed may not have told all others by now (models/poison.pml, PASS_ON). */
COFD_FN void cofd_pass_on(const struct cofd_arena *a)
{
    const uint64_t code = cofd_load_acquire_sys(&a->control[a->rank]->poison.value);
    COFD_ONE_BY_ONE
    for (int i = 1; code != 0 && i < a->n_ranks; i++)
        cofd_store_release_sys(&a->control[(a->rank + i) % a->n_ranks]->poison.value, code);
}

/* What ends this wait: a status to fail with, COFD_IS_DEAD, or 0. Another rank's poison is taken by
 * the host; an end of the team, whose status the host knows, is told to ranks that may not. */
COFD_FN int cofd_look(const struct cofd_wait *w)
{
    struct cofd_arena *a = w->arena;
    if (cofd_is_told(a))
        return COFD_IS_DEAD;
    if (cofd_load_acquire_sys(a->abort) != 0 || cofd_has_left(a, w->writer))
        return COFD_ERR_PEER_DEAD;
    return w->binding && cofd_is_in_another_call(w) ? COFD_ERR_MISMATCH : 0;
}

/* ---- the wait ------------------------------------------------------------------------------- */

COFD_FN bool cofd_is_there(enum cofi_wait_kind kind, uint64_t value, uint64_t want)
{
    uint32_t epoch = (uint32_t)value;
    switch (kind) {
    case COFI_READY: return epoch == (uint32_t)want;
    case COFI_ACK: return (int32_t)(epoch - (uint32_t)want) >= 0;
    default: return value >= want;
    }
}

/* A wait in progress; zero before its first look at the word. */
struct cofd_patience {
    uint64_t begin;
    uint32_t looks; /* comes round in a long wait, where it does no harm */
    int status;     /* what ends the wait, unless the next look finds the word */
};

/* Between two looks at a word, the last of which found `seen`, not what is wanted. False when the
 * arena is dead. After what ends a wait the word is looked at once more: a rank that left may have
 * stored it just before, and ranks that take turns on a device miss each other's. */
COFD_FN bool cofd_wait_goes_on(const struct cofd_wait *w, struct cofd_patience *p, uint64_t seen)
{
    if (p->status != 0) {
        cofd_fail(w, p->status, seen);
        return false;
    }
    if (p->begin == 0)
        p->begin = cofd_now_ns();
    const uint32_t looks = p->looks++;
    if (looks < COFD_LOOKS)
        return true;
    cofd_pause();
    if (looks % COFD_LOOKS != 0)
        return true;
    p->status = cofd_look(w);
    const uint64_t timeout_ns = w->options->timeout_ns;
    if (p->status == 0 && timeout_ns != 0 && cofd_now_ns() - p->begin > timeout_ns)
        p->status = COFD_ERR_TIMEOUT;
    return p->status != COFD_IS_DEAD;
}

/* One thread. True when the word is there, and of this call; false when the arena is dead. */
COFD_FN bool cofd_wait(const struct cofd_wait *w)
{
    struct cofd_patience patience = {0, 0, 0};
    uint64_t value = cofd_load_acquire_sys(w->word);
    while (!cofd_is_there(w->kind, value, w->want)) {
        if (!cofd_wait_goes_on(w, &patience, value))
            return false;
        value = cofd_load_acquire_sys(w->word);
    }
    if (w->kind != COFI_READY || (value >> 32 & COFI_DIGEST_MASK) == w->binding->digest)
        return true;
    cofd_fail(w, COFD_ERR_MISMATCH, value);
    return false;
}

#endif
