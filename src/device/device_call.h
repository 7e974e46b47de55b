/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A plan's call on its arena, from kernels: the protocol of symm/call.h, word for word. What the
 * host knows when it enqueues (direction, digest, sizes) comes as arguments; epochs, marks and the
 * arena's last plan are the device's. The functions are called by all threads of one block.
 *
 *   rank 0                                  rank 1
 *   call_begin: epoch e                     call_begin: epoch e
 *   data into rank 1's slab
 *   call_signal(1, READY)  -- release -->   call_wait(0, READY): acquire, epoch and digest compared
 *                                           reads the data
 *   call_wait(1, ACK)      <-- release --   call_signal(0, ACK)
 *   may overwrite the data
 *   call_end (end-acks, unless the arena is one plan's own)     call_end */
#ifndef COFI_DEVICE_CALL_H
#define COFI_DEVICE_CALL_H

#include "device/spin.h"

/* Eight letters of the name of a wait. */
template <uint32_t n> constexpr COFD_FN uint64_t cofd_letters(const char (&name)[n], uint32_t first)
{
    uint64_t word = 0;
    for (uint32_t i = first; i < first + 8 && i + 1 < n; i++)
        word |= (uint64_t)(unsigned char)name[i] << (i - first) * 8;
    return word;
}

/* Options of a wait that the kernel names itself. */
template <uint32_t n>
COFD_FN struct cofd_wait_options cofd_wait_named(uint64_t timeout_ns, const char (&name)[n])
{
    static_assert(COFI_STEP_WORDS == 5 && n <= 5 * 8 + 1, "the name would be cut");
    return {timeout_ns, {cofd_letters(name, 0), cofd_letters(name, 8), cofd_letters(name, 16),
                         cofd_letters(name, 24), cofd_letters(name, 32)}};
}

COFD_FN uint64_t cofd_words_of_arena(void)
{
    return sizeof(struct cofi_control);
}

/* ---- signals and waits ---------------------------------------------------------------------- */

/* `peer`, or all other ranks: one thread for each, beginning with the next rank. */
COFD_FN void cofd_signal_words(const struct cofd_binding *b, int peer, uint64_t words_offset,
                               uint32_t purpose)
{
    const struct cofd_arena *a = b->arena;
    uint64_t value = (uint64_t)b->epoch | b->digest << 32;
    uint32_t n = peer == COFD_ALL_OTHERS ? (uint32_t)a->n_ranks - 1 : 1;
    for (uint32_t i = cofd_thread(); i < n; i += cofd_n_threads()) {
        int to = peer == COFD_ALL_OTHERS ? (a->rank + 1 + (int)i) % a->n_ranks : peer;
        cofd_store_release_sys((uint64_t *)&cofd_line(a, to, words_offset, purpose, a->rank)->value,
                               value);
    }
}

/* The same for waits; false on all threads when any of them ended badly. */
COFD_FN bool cofd_wait_words(const struct cofd_binding *b, int writer, uint64_t words_offset,
                             uint32_t purpose, enum cofi_wait_kind kind, uint32_t want,
                             const struct cofd_wait_options *options)
{
    struct cofd_arena *a = b->arena;
    uint32_t n = writer == COFD_ALL_OTHERS ? (uint32_t)a->n_ranks - 1 : 1;
    bool ok = true;
    for (uint32_t i = cofd_thread(); i < n && ok; i += cofd_n_threads()) {
        int from = writer == COFD_ALL_OTHERS ? (a->rank + 1 + (int)i) % a->n_ranks : writer;
        const struct cofi_line *line = cofd_line(a, a->rank, words_offset, purpose, from);
        const struct cofd_wait wait = {a, b, from, kind, (const uint64_t *)&line->value, want,
                                       options};
        ok = cofd_wait(&wait);
    }
    return cofd_block_all(ok);
}

COFD_FN void cofd_call_signal(const struct cofd_binding *b, int peer, uint32_t purpose)
{
    cofd_block_sync();
    cofd_signal_words(b, peer, b->words_offset, purpose);
}

COFD_FN bool cofd_call_wait_ready(const struct cofd_binding *b, int writer, uint32_t purpose,
                                  const struct cofd_wait_options *options)
{
    return cofd_wait_words(b, writer, b->words_offset, purpose, COFI_READY, b->epoch, options);
}

/* An ack for epoch 0 is none: there at once. */
COFD_FN bool cofd_call_wait_ack(const struct cofd_binding *b, int writer, uint32_t purpose,
                                uint32_t epoch, const struct cofd_wait_options *options)
{
    return epoch == 0 || cofd_wait_words(b, writer, b->words_offset, purpose, COFI_ACK, epoch,
                                         options);
}

/* ---- reset ---------------------------------------------------------------------------------- */

/* This rank's own words of a purpose, of all writers. */
COFD_FN void cofd_set_words(const struct cofd_arena *a, uint64_t words_offset, uint32_t purpose,
                            uint64_t value)
{
    for (uint32_t w = cofd_thread(); w < (uint32_t)a->n_ranks; w += cofd_n_threads())
        cofd_store_relaxed_sys(
            (uint64_t *)&cofd_line(a, a->rank, words_offset, purpose, (int)w)->value, value);
}

COFD_FN void cofd_clear_tagged(const struct cofd_arena *a, const struct cofd_binding *b)
{
    uint64_t *at = (uint64_t *)(void *)(a->base[a->rank] + b->tagged_offset);
    for (uint64_t i = cofd_thread(); i < b->tagged_bytes / sizeof *at; i += cofd_n_threads())
        cofd_store_relaxed_sys(at + i, 0);
}

COFD_FN void cofd_reset_words(struct cofd_arena *a, uint32_t before)
{
    cofd_set_words(a, cofd_words_of_arena(), COFI_END_ACK, before);
    for (int i = 0; i < COFD_MAX_PLANS; i++) {
        struct cofd_binding *b =
            (struct cofd_binding *)(uintptr_t)cofd_load_acquire_sys(&a->bindings[i]);
        for (uint32_t p = 0; b && p < b->n_purposes; p++)
            cofd_set_words(a, b->words_offset, p, b->acks >> p & 1 ? before : 0);
        if (b && cofd_thread() == 0)
            for (int m = 0; m < COFI_MARKS; m++)
                b->mark[m] = 0;
        if (b)
            cofd_clear_tagged(a, b);
    }
    cofd_block_sync();
}

COFD_FN bool cofd_meet(const struct cofd_binding *b, uint32_t purpose,
                       const struct cofd_wait_options &options)
{
    cofd_block_sync();
    cofd_signal_words(b, COFD_ALL_OTHERS, cofd_words_of_arena(), purpose);
    return cofd_wait_words(b, COFD_ALL_OTHERS, cofd_words_of_arena(), purpose, COFI_READY,
                           b->epoch, &options);
}

/* All ranks meet before each resets its own words, and after. */
COFD_FN bool cofd_meet_and_reset(const struct cofd_binding *b, uint32_t before,
                                 const struct cofd_call *call)
{
    if (!cofd_meet(b, COFI_MEET, cofd_wait_named(call->timeout_ns, "meeting before a reset")))
        return false;
    if (!(call->left_out & COFD_LEAVE_RESET))
        cofd_reset_words(b->arena, before);
    return cofd_meet(b, COFI_RESET, cofd_wait_named(call->timeout_ns, "meeting after a reset"));
}

/* The last call, another plan's, has ended on all ranks. */
COFD_FN bool cofd_wait_end_acks(const struct cofd_binding *b, uint32_t before,
                                const struct cofd_call *call)
{
    const struct cofd_wait_options o =
        cofd_wait_named(call->timeout_ns, "last call of another plan ended");
    return (call->left_out & COFD_LEAVE_END_ACK_WAIT) ||
           cofd_wait_words(b, COFD_ALL_OTHERS, cofd_words_of_arena(), COFI_END_ACK, COFI_ACK,
                           before, &o);
}

/* ---- begin and end -------------------------------------------------------------------------- */

/* One fence and one release for all of it: each waits for the stores before it to reach the host's
 * memory. Whoever reads a field of this call, by an acquire, then finds `call` changed. */
COFD_FN void cofd_record_call(const struct cofd_binding *b, const struct cofd_call *call)
{
    struct cofi_call_record *r = &b->arena->control[b->arena->rank]->record;
    cofd_store_relaxed_sys((uint64_t *)&r->call, 0);
    cofd_fence_acq_rel_sys();
    cofd_store_relaxed_sys((uint64_t *)&r->detail, b->direction | b->digest << 32);
    for (int i = 0; i < COFI_NAME_WORDS; i++)
        cofd_store_relaxed_sys((uint64_t *)&r->name[i], b->name[i]);
    for (int i = 0; i < COFI_CALL_SIZES; i++)
        cofd_store_relaxed_sys((uint64_t *)&r->sizes[i], call->sizes[i]);
    cofd_store_release_sys((uint64_t *)&r->call, (uint64_t)b->epoch | b->ordinal << 32);
}

/* Takes the next epoch; meets and resets where it comes round, and waits for the end of another
 * plan's call where one was before. False on all threads when the arena is dead. */
COFD_FN bool cofd_call_begin(struct cofd_binding *b, const struct cofd_call *call)
{
    struct cofd_arena *a = b->arena;
    if (!cofd_block_all(!cofd_is_dead(a)))
        return false;
    const uint32_t before = a->epoch;
    const uint64_t last = a->last;
    cofd_block_sync(); /* all have read */
    if (cofd_thread() == 0) {
        a->epoch = before == 0 ? a->first_epoch : before == UINT32_MAX ? 1 : before + 1;
        a->last = b->ordinal + 1;
        b->epoch = a->epoch;
        b->direction = call->direction;
        b->digest = call->digest;
        cofd_record_call(b, call);
    }
    cofd_block_sync();
    if (before != 0 && (b->epoch & COFI_EPOCH_RESET_MASK) == 1)
        return cofd_meet_and_reset(b, before, call);
    return before == 0 || last == b->ordinal + 1 || cofd_wait_end_acks(b, before, call);
}

/* After everything of the call that reads or writes symmetric memory. */
COFD_FN void cofd_call_end(const struct cofd_binding *b)
{
    cofd_block_sync();
    if (!b->arena->is_private)
        cofd_signal_words(b, COFD_ALL_OTHERS, cofd_words_of_arena(), COFI_END_ACK);
}

#endif
