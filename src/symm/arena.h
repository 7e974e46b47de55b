/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arenas: symmetric memory and the signal words that order its use.
 *
 * Every rank has a slab, laid out alike on all ranks:
 *
 *   control | words of the arena | words of cof_signal | data
 *
 * and its data, from both ends:
 *
 *   payload of plans, one over the other | free | regions: words of plans, cof_arena_alloc
 *
 * Signal word, 64 bits: epoch (low 32) | digest (31) | 0 (1, poison where kernels of a device
 * publish it); one per writer and purpose, on its own 128-byte line, stored by its writer only.
 * Epoch 0 is never used. call.h says how plans use them. A word of cof_signal holds a count
 * instead.
 *
 * Poison: a rank whose wait fails writes its error text into its own control block and then a code
 * into the poison word of every rank, which every wait polls. It is never zero again.
 *
 * Everything here goes through the engine's put, get, signal and load: only cofi_arena_destination
 * and cof_arena_view hand out a peer's pointer, and in staged form not even they. */
#ifndef COFI_ARENA_H
#define COFI_ARENA_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cofuse/arena.h"
#include "core/error.h"
#include "device/slab.h"

_Static_assert(COFI_CONTROL_TEXT_BYTES >= COFI_ERROR_TEXT_BYTES, "a text fits");

/* A part of the data that nothing overlays. */
struct cofi_region {
    size_t offset, bytes;         /* in the data */
    size_t payload_bytes;         /* of its plan, from offset 0 on */
    struct cofi_binding *binding; /* whose words these are; NULL: cof_arena_alloc, or released */
    bool released;                /* the plan is gone on this rank */
};

/* Several calls of one plan between which no other plan may use the arena; op = NULL: none such is
 * begun. A copy, for the plan may go in the middle. */
struct cofi_whole {
    const char *op;
    uint64_t ordinal;
    int n_made, n_calls;
};

struct cof_arena {
    cof_team *team;
    const struct cofi_engine_ops *ops;
    int rank, n_ranks; /* of the team */
    int n_words;       /* of cof_signal, per pair */
    bool is_private;   /* one plan's own */
    bool force_staged; /* COFUSE_FORCE_STAGED */
    size_t user_words_offset, data_offset, slab_bytes;
    size_t data_bytes;
    char **base;       /* by rank: its slab here, of device memory where the engine is a device's */
    /* By rank: its control block, in this host's memory; at the front of the slab, but for a
     * device's slab. */
    struct cofi_control **control;
    char **view[2];    /* by rank, for cof_arena_view: data, words */
    void *mapping;     /* the engine's */
    void *on_device;   /* struct cofd_arena, in device memory; NULL: the CPU's */
    size_t mapping_bytes;
    double run_timeout;

    /* The host's, and read by the call that resets all words: under the lock. */
    pthread_mutex_t lock;
    struct cofi_region *regions; /* from high to low offsets; alike on all ranks, but `released` */
    int n_regions;

    uint32_t first_epoch;
    _Atomic uint32_t epoch; /* of the call in progress, advanced in stream order; 0: none yet */
    _Atomic uint64_t last;  /* plan of the last call: its ordinal + 1; in stream order */
    struct cofi_whole whole; /* as its calls are enqueued, on the host */

    uint64_t *sent, *awaited; /* cof_signal, cof_wait: by word and peer; in stream order */

    _Atomic int failing; /* 1: taken by the thread that writes the text */
    _Atomic int status;  /* this rank's failure, sticky; the text is written before it */
    char text[COFI_ERROR_TEXT_BYTES];
    cof_arena *next; /* in the team's list */
};

struct cofi_arena_spec {
    size_t bytes; /* of data; with peers: of their blocks */
    int n_words;
    void *const *peers;   /* the caller's blocks; NULL: memory of the world's engine */
    uint32_t first_epoch; /* tests begin near the wrap; 0: 1 */
    bool is_private;
};

/* Collective, two-phase; a rank whose own arguments are bad takes part with their status. */
cof_status cofi_arena_open(cof_team *team, const struct cofi_arena_spec *spec, cof_status own,
                           cof_arena **arena_out);

/* Bytes of a slab before its data. */
size_t cofi_arena_front_bytes(int n_ranks, int n_words);
/* Data that one plan needs. */
size_t cofi_arena_plan_bytes(int n_ranks, size_t payload_bytes, int n_purposes);
/* Bytes of a plan's words. */
size_t cofi_arena_words_bytes(int n_ranks, int n_purposes);
/* Bytes of a slab with one plan's payload and words in it. */
size_t cofi_arena_slab_bytes(int n_ranks, size_t payload_bytes, int n_purposes);

/* ---- a plan's place in an arena ---- */

struct cofi_binding {
    cof_arena *arena;
    const char *op;
    int n_purposes;      /* signal words per writer */
    uint32_t acks;       /* bit per purpose: an ack word, else a ready word */
    size_t words_offset; /* in the slab */
    size_t tagged_offset, tagged_bytes; /* likewise */
    const char *tagged_step;
    uint64_t ordinal;    /* among the team's plans: numbers them alike on all ranks */
    /* Last-use epochs, the plan's own, by what they mark; 0: not since the last reset. */
    uint32_t mark[COFI_MARKS];
    /* Of the call in progress. */
    uint32_t direction;
    uint64_t digest;
    /* struct cofd_binding, in device memory, and its place among the arena's. There marks, epoch
     * and digest are kept that a device's calls use, not here. */
    void *on_device;
    int on_device_idx;
};

struct cofi_binding_spec {
    const char *op;
    size_t payload_bytes; /* from offset 0 of the data on; plans lie over each other there */
    size_t tagged_bytes;  /* data of kernels that carries tags, behind the words: the plan's own,
                             zero at the beginning and after a reset */
    const char *tagged_step; /* names waits for it in error texts; NULL: there are none */
    int n_purposes;
    uint32_t acks;
};

/* Collective. arena = NULL opens a private one. `binding` is zero before, and stays where it is
 * until unbound. */
cof_status cofi_arena_bind(cof_team *team, cof_arena *arena, const struct cofi_binding_spec *spec,
                           struct cofi_binding *binding);
/* Local. Closes a private arena. A binding that was never made is fine. */
void cofi_arena_unbind(struct cofi_binding *binding);

/* COF_ERR_INVALID where a plan of this team cannot take the arena; NULL is fine. Local. */
cof_status cofi_arena_check(const cof_team *team, const cof_arena *arena);

/* For describe lines: "shm arena=own". */
void cofi_arena_name(const cof_team *team, const cof_arena *arena, char *text, size_t bytes);

/* ---- failure: arena_failure.c ---- */

/* COF_OK, or this arena's failure with its text. */
cof_status cofi_arena_status(cof_arena *arena);
/* The same, and takes another rank's poison where it is seen for the first time. */
cof_status cofi_arena_look(cof_arena *arena);
/* The failure of this rank, whose text is cof_last_error(): remembered, told to the others
 * (poison), returned. */
cof_status cofi_arena_fail(cof_arena *arena, cof_status status);

/* ---- waits: arena_wait.c ---- */

struct cofi_word {
    cof_arena *arena;
    const struct cofi_binding *binding; /* of the call in progress; NULL: cof_wait */
    int writer;                         /* rank of the team */
    size_t offset;                      /* in the own slab */
    enum cofi_wait_kind kind;
    uint64_t want;
    const char *step; /* names the wait in error texts */
};

/* One text for every way a wait can end badly, on a host or a device: operator, ranks, step, value
 * wanted, value seen. Becomes cof_last_error(); returns the status. */
struct cofi_wait_end {
    int rank, writer; /* of the team: who waited, and for whom */
    cof_status status;
    const char *op; /* NULL: cof_wait */
    uint32_t direction;
    uint64_t want, seen, digest;
    const char *step;
    double timeout; /* seconds */
};
cof_status cofi_wait_text(cof_arena *arena, const struct cofi_wait_end *end);

/* Until the word is there; every way it can end badly poisons the arena. */
cof_status cofi_arena_wait(const struct cofi_word *word);

/* ---- transfers ---- */

/* Destination of a remote store: the peer's own memory where it is mapped, else `staging` (laid out
 * like it); then cofi_arena_deliver moves what was stored there. */
void *cofi_arena_destination(cof_arena *arena, int peer, size_t offset, void *staging);
void cofi_arena_deliver(cof_arena *arena, int peer, size_t offset, const void *destination,
                        size_t bytes);

/* A peer's own memory to read from, where it is mapped; else NULL: cofi_arena_get has it. */
const void *cofi_arena_source(const cof_arena *arena, int peer, size_t offset);

/* A peer's data into local memory. */
void cofi_arena_get(cof_arena *arena, void *dst, int peer, size_t offset, size_t bytes);

static inline char *cofi_arena_data(cof_arena *arena)
{
    return arena->base[arena->rank] + arena->data_offset;
}

/* ---- lines of a slab ---- */

static inline size_t cofi_line_offset(const cof_arena *a, size_t words_offset, int purpose,
                                      int writer)
{
    return words_offset +
           ((size_t)purpose * (size_t)a->n_ranks + (size_t)writer) * sizeof(struct cofi_line);
}

static inline size_t cofi_arena_words_offset(void)
{
    return sizeof(struct cofi_control);
}

static inline struct cofi_line *cofi_own_line(cof_arena *a, size_t offset)
{
    return (struct cofi_line *)(void *)(a->base[a->rank] + offset);
}

/* Own words of a purpose, of all writers; a device's too. */
cof_status cofi_set_lines(cof_arena *arena, size_t words_offset, int purpose, uint64_t value);

static inline size_t cofi_round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static inline struct cofi_control *cofi_own_control(cof_arena *a)
{
    return a->control[a->rank];
}

#endif
