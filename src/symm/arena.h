/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arenas: symmetric memory and the signal words that order its use.
 *
 * Every rank has a slab:  control | signal words | data,  the same layout on all ranks.
 *
 * Signal word, 64 bits: epoch (low 32) | digest (31) | poison (1). One per purpose and writer, on
 * its own 128-byte line, stored by its writer only. Epoch 0 is never used. ready words  say "what I
 * announced for call `epoch` is there"; waited for by equality of the epoch, then digest and poison
 * are looked at: another digest is COF_ERR_MISMATCH ack words    say "I am done with what you gave
 * me up to call `epoch`"; wrap-safe >=
 *
 * Poison: a rank whose wait fails writes its error text into its own control block and then a code
 * into the poison word of every rank, which every wait polls. First poison wins.
 *
 * Every call on the arena takes the next epoch, in stream order, on all ranks alike. */
#ifndef COFI_ARENA_H
#define COFI_ARENA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cofuse/plan.h"
#include "core/error.h"

#define COFI_LINE 128

struct cofi_line {
    _Alignas(COFI_LINE) _Atomic uint64_t value;
    _Atomic uint32_t sleepers;
};

/* What a rank is doing, for the error texts of others: stored before the call's first signal. */
struct cofi_call_record {
    _Atomic uint32_t epoch;
    _Atomic uint32_t direction; /* 0 none, 1 forward, 2 backward */
};

struct cofi_control {
    struct cofi_line poison; /* value: status (16) | rank that wrote it + 1 (32, high) */
    struct cofi_call_record record;
    _Alignas(COFI_LINE) char text[COFI_ERROR_TEXT_BYTES]; /* of this rank's own failure */
};

struct cof_arena {
    cof_team *team;
    int rank, n_ranks; /* of the team */
    int n_purposes;    /* signal words per writer */
    size_t words_offset, data_offset, slab_bytes;
    char **base;       /* by rank: its slab here */
    void *mapping;     /* the engine's */
    size_t mapping_bytes;
    bool force_staged; /* COFUSE_FORCE_STAGED */
    uint32_t epoch;    /* of the call in progress; advanced in stream order */
    uint32_t direction;
    uint64_t digest;   /* 31 bits, of the call in progress */
    const char *op;    /* operator, for texts */
    double run_timeout;
    _Atomic int failing; /* 1: taken by the thread that writes the text */
    _Atomic int status;  /* this rank's failure, sticky; the text is written before it */
    char text[COFI_ERROR_TEXT_BYTES];
    cof_arena *next;    /* in the team's list */
};

/* Collective, two-phase. `data_bytes` per rank, `n_purposes` signal words per writer. */
cof_status cofi_arena_open(cof_team *team, const char *op, size_t data_bytes, int n_purposes,
                           cof_arena **arena_out);
void cofi_arena_close(cof_arena *arena); /* local; NULL is fine */

/* Bytes of a rank's slab with these sizes. */
size_t cofi_arena_slab_bytes(int n_ranks, size_t data_bytes, int n_purposes);

/* COF_OK, or this arena's failure with its text. */
cof_status cofi_arena_status(cof_arena *arena);
/* The same, and takes another rank's poison where it is seen for the first time. */
cof_status cofi_arena_look(cof_arena *arena);

/* The failure of this rank: remembered, told to the others (poison), returned. */
cof_status cofi_arena_fail(cof_arena *arena, cof_status status);

/* ---- in a running call, on the dispatcher of a stream ---- */

/* Next epoch. Returns the arena's failure, if any. */
cof_status cofi_arena_begin(cof_arena *arena, uint32_t direction, uint64_t digest);

/* Stores {epoch of the call, digest} in the peer's word of this purpose and this writer. */
void cofi_arena_signal(cof_arena *arena, int peer, int purpose);

/* Waits for the writer's word of this purpose: ready by equality with the call's epoch, ack until
 * it is at least `epoch`. `step` names the wait in error texts. */
cof_status cofi_arena_wait_ready(cof_arena *arena, int writer, int purpose, const char *step);
cof_status cofi_arena_wait_ack(cof_arena *arena, int writer, int purpose, uint32_t epoch,
                               const char *step);

/* Destination of a remote store: the peer's own memory where it is mapped, else `staging` (laid out
 * like it); then cofi_arena_deliver moves what was stored there. */
void *cofi_arena_destination(cof_arena *arena, int peer, size_t offset, void *staging);
void cofi_arena_deliver(cof_arena *arena, int peer, size_t offset, const void *destination,
                        size_t bytes);

/* A peer's data into local memory. */
void cofi_arena_get(cof_arena *arena, void *dst, int peer, size_t offset, size_t bytes);

static inline char *cofi_arena_data(cof_arena *arena)
{
    return arena->base[arena->rank] + arena->data_offset;
}

#endif
