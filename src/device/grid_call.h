/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A plan's call made by one kernel of several blocks, all of which run at once. The protocol is
 * device_call.h's, with as little before the first store and after the last load as can be:
 *
 *   - every block reads the arena's epoch; the last one to have read it takes the call's
 *     (cofd_grid_arrive), so that none waits for another
 *   - what is rare (a reset, another plan's call before) block 0 does, while the others wait at the
 *     gate
 *   - the record of the call is written by the first wait that lasts, not before the first signal:
 *     it serves ranks that wait, and texts
 *   - every rank ends the call only when it has seen that all have begun it: by what they have sent
 *     it, where each sends each other something and that has the call's digest, or by a word that
 *     announces the call, with no payload behind it. So buffers and words in two halves by the
 *     epoch's parity need no acks
 *
 *   epoch      the last block to arrive               every block, at its beginning
 *   arrived    one thread of a block                  likewise
 *   gate       block 0; closed by the last to arrive  the others
 *
 * Called by all threads of a block, but where another is said. */
#ifndef COFI_GRID_CALL_H
#define COFI_GRID_CALL_H

#include "device/device_call.h"

/* A word for each parity of the epoch (COFD_GRID_PURPOSES), for a rank that has ended a call
 * announces the next one before a slower rank has looked at its last word (models/tagged_push.pml,
 * SIGNAL_WITHOUT_HALF). */
#define COFD_ANNOUNCED(epoch) ((epoch) & 1)
#define COFD_ROUNDS 16   /* of a wait: of these, blocks but the first look at host memory once */
#define COFD_GATE_OPEN 1
#define COFD_GATE_DEAD 2

struct cofd_grid {
    const struct cofd_grid_call *c;
    uint32_t epoch;
};

/* What data of the call carries: its epoch, and the digest of its sizes. */
COFD_FN uint64_t cofd_grid_tag(const struct cofd_grid *g)
{
    return (uint64_t)g->epoch | g->c->call.digest << 32;
}

/* The binding as it is in this call, for words and texts: the one in memory becomes so only when
 * all have arrived, at a time when other blocks may be here. */
COFD_FN struct cofd_binding cofd_grid_binding(const struct cofd_grid *g)
{
    struct cofd_binding b = {};
    b.arena = g->c->arena;
    b.words_offset = g->c->words_offset;
    b.ordinal = g->c->ordinal;
    COFD_ONE_BY_ONE
    for (int i = 0; i < COFI_NAME_WORDS; i++)
        b.name[i] = g->c->binding->name[i];
    b.epoch = g->epoch;
    b.direction = g->c->call.direction;
    b.digest = g->c->call.digest;
    return b;
}

/* ---- failure -------------------------------------------------------------------------------- */

/* A wait for what `writer` sends, the last look at which found `seen` for its tag. */
struct cofd_grid_wait {
    int writer;
    uint64_t seen;
    struct cofd_patience patience; /* zero at its beginning */
};

/* Of a wait in memory, so that few registers hold it. */
COFD_RARE void cofd_fail_apart(const struct cofd_wait *wait, int status, uint64_t seen)
{
    cofd_fail(wait, status, seen);
}

COFD_RARE void cofd_grid_fail(struct cofd_grid g, const struct cofd_grid_wait *wait)
{
    const struct cofd_binding b = cofd_grid_binding(&g);
    const struct cofd_wait w = {g.c->arena, &b, wait->writer, COFI_READY, 0, g.epoch,
                                &g.c->binding->tagged_wait};
    cofd_fail_apart(&w, wait->patience.status, wait->seen);
}

/* ---- begin ---------------------------------------------------------------------------------- */

/* Block 0: what precedes the call. */
COFD_FN bool cofd_grid_prepare(const struct cofd_grid *g, uint32_t before)
{
    const struct cofd_binding b = cofd_grid_binding(g);
    return (g->epoch & COFI_EPOCH_RESET_MASK) == 1
               ? cofd_meet_and_reset(&b, before, &g->c->call)
               : cofd_wait_end_acks(&b, before, &g->c->call);
}

/* One thread of another block. Block 0 has at most two waits, one after the other, and ends the
 * arena when one passes its deadline: who waits for four has found something else wrong. */
COFD_FN bool cofd_grid_wait_gate(const struct cofd_grid *g)
{
    const uint64_t begin = cofd_now_ns(), timeout_ns = g->c->call.timeout_ns;
    for (;;) {
        const uint64_t gate = cofd_load_acquire_gpu(&g->c->binding->gate);
        if (gate != 0)
            return gate == COFD_GATE_OPEN;
        if (cofd_is_dead(g->c->arena))
            return false;
        if (timeout_ns != 0 && cofd_now_ns() - begin > 4 * timeout_ns) {
            const struct cofd_grid_wait own = {g->c->rank, 0, {begin, 0, COFD_ERR_TIMEOUT}};
            cofd_grid_fail(*g, &own);
            return false;
        }
        cofd_pause();
    }
}

COFD_RARE bool cofd_grid_pass_gate(struct cofd_grid g, uint32_t before)
{
    if (cofd_block() == 0) {
        const bool ok = cofd_grid_prepare(&g, before);
        cofd_block_sync();
        if (cofd_thread() == 0)
            cofd_store_release_gpu(&g.c->binding->gate, ok ? COFD_GATE_OPEN : COFD_GATE_DEAD);
        return ok;
    }
    return cofd_block_all(cofd_thread() != 0 || cofd_grid_wait_gate(&g));
}

/* Finds the call's epoch. What it returns is this thread's view: false when the arena is dead; the
 * block agrees on it (cofd_block_all) before anything else happens. */
COFD_FN bool cofd_grid_begin(struct cofd_grid *g)
{
    const struct cofd_arena *a = g->c->arena;
    const uint32_t before = cofd_load_relaxed_gpu_u32(&a->epoch);
    const uint64_t last = cofd_load_relaxed_gpu(&a->last);
    const bool is_alive = cofd_load_relaxed_gpu(&a->dead) == 0;
    g->epoch = before == 0 ? a->first_epoch : before == UINT32_MAX ? 1 : before + 1;
    if (before != 0 &&
        ((g->epoch & COFI_EPOCH_RESET_MASK) == 1 || last != g->c->ordinal + 1))
        return cofd_block_all(is_alive) && cofd_grid_pass_gate(*g, before);
    return is_alive;
}

/* One thread of the block, when all of it have begun: each has used the epoch that it read, before
 * the barrier, so that the count needs no order of its own. True for the last block. */
COFD_FN bool cofd_grid_arrive(const struct cofd_grid *g)
{
    struct cofd_binding *b = g->c->binding;
    if (cofd_count_gpu_u32(&b->arrived) != cofd_n_blocks() - 1)
        return false;
    b->arrived = 0;
    b->gate = 0;
    b->epoch = g->epoch;
    b->direction = g->c->call.direction;
    b->digest = g->c->call.digest;
    g->c->arena->last = g->c->ordinal + 1;
    g->c->arena->epoch = g->epoch;
    return true;
}

COFD_FN struct cofi_line *cofd_grid_word(const struct cofd_grid *g, int rank, int writer)
{
    return (struct cofi_line *)(void *)(g->c->slab[rank] + g->c->words_offset) +
           (uint64_t)COFD_ANNOUNCED(g->epoch) * (uint64_t)g->c->n_ranks + (uint64_t)writer;
}

/* Block 0: tells all ranks of the call. */
COFD_FN void cofd_grid_announce(const struct cofd_grid *g)
{
    for (uint32_t i = cofd_thread(); i + 1 < (uint32_t)g->c->n_ranks; i += cofd_n_threads()) {
        const int to = (g->c->rank + 1 + (int)i) % g->c->n_ranks;
        cofd_store_relaxed_sys((uint64_t *)&cofd_grid_word(g, to, g->c->rank)->value,
                               cofd_grid_tag(g));
    }
}

/* ---- waits ---------------------------------------------------------------------------------- */

/* Once per call and rank. */
COFD_RARE void cofd_grid_record(struct cofd_grid g)
{
    if (cofd_exchange_gpu_u32(&g.c->binding->recorded, g.epoch) == g.epoch)
        return;
    const struct cofd_binding b = cofd_grid_binding(&g);
    cofd_record_call(&b, &g.c->call);
}

/* Whether a tag or an announcement is of this epoch, but of another call. */
COFD_FN bool cofd_grid_differs(const struct cofd_grid *g, uint64_t tag)
{
    return (uint32_t)tag == g->epoch && (tag >> 32 & COFI_DIGEST_MASK) != g->c->call.digest;
}

/* One thread of the block, after COFD_LOOKS looks. False when the arena is dead. Blocks but the
 * first look at the words of hosts seldom: all of them would fill the bus to the host. */
COFD_FN bool cofd_grid_goes_on(const struct cofd_grid *g, struct cofd_grid_wait *wait)
{
    const int writer = wait->writer;
    struct cofd_patience *p = &wait->patience;
    if (cofd_is_dead(g->c->arena))
        return false;
    const struct cofd_binding b = cofd_grid_binding(g);
    const struct cofd_wait w = {g->c->arena, &b, writer, COFI_READY, 0, g->epoch,
                                &g->c->binding->tagged_wait};
    const uint64_t word =
        cofd_load_acquire_sys((const uint64_t *)&cofd_grid_word(g, g->c->rank, writer)->value);
    if (p->status != 0) {
        cofd_grid_fail(*g, wait);
        return false;
    }
    if (p->begin == 0) {
        p->begin = cofd_now_ns();
        cofd_grid_record(*g);
    }
    cofd_pause();
    if (cofd_block() == 0 || p->looks++ % COFD_ROUNDS == COFD_ROUNDS - 1)
        p->status = cofd_look(&w);
    if (p->status == 0 && (cofd_grid_differs(g, wait->seen) || cofd_grid_differs(g, word)))
        p->status = COFD_ERR_MISMATCH;
    const uint64_t timeout_ns = g->c->call.timeout_ns;
    if (p->status == 0 && timeout_ns != 0 && cofd_now_ns() - p->begin > timeout_ns)
        p->status = COFD_ERR_TIMEOUT;
    return p->status != COFD_IS_DEAD;
}

/* A block, at its end: every rank has begun this call, with the same sizes. Mostly the words are
 * there: what a wait loads from memory besides would take longer than the call's last hop. */
COFD_RARE bool cofd_grid_wait_announced(struct cofd_grid g)
{
    bool is_there = true;
    for (uint32_t i = cofd_thread(); i + 1 < (uint32_t)g.c->n_ranks; i += cofd_n_threads()) {
        const int from = (g.c->rank + 1 + (int)i) % g.c->n_ranks;
        const uint64_t *word = (const uint64_t *)&cofd_grid_word(&g, g.c->rank, from)->value;
        is_there = is_there && cofd_load_acquire_sys(word) == cofd_grid_tag(&g);
    }
    if (cofd_block_all(is_there))
        return true;
    const struct cofd_binding b = cofd_grid_binding(&g);
    const struct cofd_wait_options o =
        cofd_wait_named(g.c->call.timeout_ns, "all ranks to begin");
    return cofd_wait_words(&b, COFD_ALL_OTHERS, b.words_offset, COFD_ANNOUNCED(b.epoch), COFI_READY,
                           b.epoch, &o);
}

/* ---- end ------------------------------------------------------------------------------------ */

COFD_RARE void cofd_grid_end_shared(struct cofd_grid g)
{
    cofd_block_sync();
    if (cofd_thread() != 0 ||
        cofd_add_gpu_u32(&g.c->binding->finished, 1) != cofd_n_blocks() - 1)
        return;
    g.c->binding->finished = 0;
    const struct cofd_binding b = cofd_grid_binding(&g);
    for (int i = 1; i < g.c->n_ranks; i++) {
        const int to = (g.c->rank + i) % g.c->n_ranks;
        struct cofi_line *line = cofd_line(b.arena, to, cofd_words_of_arena(), COFI_END_ACK,
                                           g.c->rank);
        cofd_store_release_sys((uint64_t *)&line->value, cofd_grid_tag(&g));
    }
}

/* After everything of the block that reads or writes symmetric memory. */
COFD_FN void cofd_grid_end(const struct cofd_grid *g)
{
    if (!g->c->is_private)
        cofd_grid_end_shared(*g);
}

#endif
