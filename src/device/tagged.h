/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Tagged words: 4 bytes of payload and the 4 of the call's epoch in one 8-byte store, which is
 * single-copy atomic, so that data is its own signal. A reader that sees the tag has the payload:
 * no order between words is needed, relaxed accesses do. A word is rewritten only after its reader
 * is known to have left it; tag 0 is none (epoch 0 is never used). */
#ifndef COFI_TAGGED_H
#define COFI_TAGGED_H

#include "device/spin.h"

COFD_FN uint64_t cofd_tagged(uint32_t payload, uint32_t epoch)
{
    return (uint64_t)epoch << 32 | payload;
}

COFD_FN void cofd_tagged_store(uint64_t *at, uint32_t payload, uint32_t epoch)
{
    cofd_store_relaxed_sys(at, cofd_tagged(payload, epoch));
}

/* Two words, 16-byte aligned, in one access. */
COFD_FN void cofd_tagged_store2(uint64_t *at, const uint32_t payload[2], uint32_t epoch)
{
    const uint64_t words[2] = {cofd_tagged(payload[0], epoch), cofd_tagged(payload[1], epoch)};
    cofd_store2_relaxed_sys(at, words);
}

/* Looks once: true with the payloads when both words have the tag; `seen` is a tag that was found,
 * the wrong one where there is one. */
COFD_FN bool cofd_tagged_load2(const uint64_t *at, uint32_t epoch, uint32_t payload[2],
                               uint32_t *seen)
{
    uint64_t words[2];
    cofd_load2_relaxed_sys(at, words);
    payload[0] = (uint32_t)words[0];
    payload[1] = (uint32_t)words[1];
    const uint32_t first = (uint32_t)(words[0] >> 32), second = (uint32_t)(words[1] >> 32);
    *seen = first != epoch ? first : second;
    return *seen == epoch;
}

/* Waits for both words of a call, by equality of the tag. False when the arena is dead. */
COFD_FN bool cofd_tagged_wait2(const struct cofd_binding *b, int writer, const uint64_t *at,
                               uint32_t payload[2], const struct cofd_wait_options *options)
{
    const struct cofd_wait wait = {b->arena, b, writer, COFI_READY, at, b->epoch, options};
    struct cofd_patience patience = {0, 0, 0};
    uint32_t seen;
    while (!cofd_tagged_load2(at, b->epoch, payload, &seen))
        if (!cofd_wait_goes_on(&wait, &patience, seen))
            return false;
    return true;
}

#endif
