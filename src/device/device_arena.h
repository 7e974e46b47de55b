/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* An arena and a plan's place in it, as kernels see them. Both lie in the device's own memory, one
 * for each rank, and are changed in stream order only: so epochs advance in replays of a captured
 * graph as in eager calls. */
#ifndef COFI_DEVICE_ARENA_H
#define COFI_DEVICE_ARENA_H

#include <stdbool.h>

#include "device/slab.h"

#define COFD_MAX_PLANS 1024 /* of one arena at a time */

struct cofd_arena;

struct cofd_wait_options {
    uint64_t timeout_ns; /* 0: none */
    uint64_t step[COFI_STEP_WORDS]; /* names the wait in error texts */
};

struct cofd_binding {
    struct cofd_arena *arena;
    uint64_t words_offset; /* in the slab */
    uint64_t ordinal;      /* among the team's plans */
    uint64_t name[COFI_NAME_WORDS];
    uint32_t n_purposes, acks; /* bit per purpose: an ack word, else a ready word */
    /* Of the call in progress. */
    uint32_t epoch, direction;
    uint64_t digest;
    uint32_t mark[COFI_MARKS]; /* last-use epochs; 0: not since the last reset */
    /* In the slab: data that is its own signal (lines.h); zero at first, and after a reset. */
    uint64_t tagged_offset, tagged_bytes;
    struct cofd_wait_options tagged_wait;
    /* Of a call that one kernel of several blocks makes (grid_call.h). */
    uint32_t arrived, finished; /* blocks */
    uint64_t gate;              /* 0: closed */
    uint32_t recorded, unused;  /* epoch of the call whose record was written */
};

struct cofd_arena {
    int32_t rank, n_ranks;
    int32_t is_private; /* one plan's own: calls end without an end-ack */
    uint32_t first_epoch;
    uint64_t user_words_offset; /* in the slab */
    char **base;                /* by rank: its slab, of device memory, as this device sees it */
    struct cofi_control **control; /* by rank: host memory, likewise */
    const uint64_t *abort;         /* the team's abort word: host memory */
    const uint32_t *peer_state;    /* enum cofi_peer_state by rank of the world: host memory */
    const int32_t *world_rank;     /* by rank */
    uint64_t *sent, *awaited;      /* of cof_signal and cof_wait: by word and peer */
    /* Places of plans; 0: free. Host memory, in this rank's mapping. The host stores an entry when
     * its binding is ready, and takes it away when no call of it is left. */
    uint64_t *bindings; /* COFD_MAX_PLANS of struct cofd_binding * */
    /* In stream order. */
    uint32_t epoch;  /* of the call in progress; 0: none yet */
    uint32_t unused;
    uint64_t last;   /* plan of the last call: its ordinal + 1 */
    uint64_t dead;   /* not 0: nothing more happens here. Any block, any time */
};

/* ---- arguments of kernels, by value ---- */

#define COFD_ALL_OTHERS (-1) /* as a peer or a writer: every other rank, from the next one on */

enum { COFD_LEAVE_RESET = 1, COFD_LEAVE_END_ACK_WAIT = 2 };

struct cofd_call {
    uint32_t direction;
    uint32_t left_out; /* COFD_LEAVE_.. bits: negative controls */
    uint64_t digest;   /* 31 bits */
    uint64_t sizes[COFI_CALL_SIZES];
    uint64_t timeout_ns; /* of its waits; 0: none */
};

/* A call that one kernel of several blocks makes (grid_call.h). By value, with what the kernel
 * would else load from memory, one address after the other, before its first store. */
#define COFD_GRID_PURPOSES 2 /* of its plan */
#define COFD_GRID_MAX_RANKS 16

struct cofd_grid_call {
    struct cofd_arena *arena;
    int32_t rank, n_ranks;
    uint64_t ordinal, words_offset; /* the binding's */
    struct cofd_binding *binding;
    char *slab[COFD_GRID_MAX_RANKS]; /* by rank */
    bool is_private; /* the arena's */
    bool announces;  /* that a rank has begun shows by its word; else by what it always sends */
    struct cofd_call call;
};

#endif
