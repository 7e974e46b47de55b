/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* An engine: how the slabs of an arena come to be, and how bytes and words reach a peer's slab. */
#ifndef COFI_ENGINE_H
#define COFI_ENGINE_H

#include "symm/arena.h"
#include "symm/symm.h"

enum {
    COFI_CAP_MAPPED = 1,          /* every peer's slab is mapped: base[] is set */
    COFI_CAP_PROCESSES = 2,       /* ranks may be processes (else threads of one) */
    COFI_CAP_SURVIVES_DEATH = 4   /* a slab stays readable when its rank is gone */
};

struct cofi_engine_ops {
    const char *name;
    unsigned caps;
    /* Collective, two-phase: on success every rank has all slabs, zeroed, and knows that the others
     * have them too; on failure none keeps anything. Fills arena->base[] and arena->mapping. */
    cof_status (*map)(cof_arena *arena);
    void (*unmap)(cof_arena *arena); /* local */
    /* Transfers by offset into the peer's slab, in order per peer. */
    void (*put)(cof_arena *arena, int peer, size_t dst_offset, const void *src, size_t bytes);
    void (*get)(cof_arena *arena, void *dst, int peer, size_t src_offset, size_t bytes);
    /* Stores a signal word in the peer's slab, after everything put there before, and wakes it. */
    void (*signal)(cof_arena *arena, int peer, size_t word_offset, uint64_t value);
};

/* NULL for a code that is none. */
const struct cofi_engine_ops *cofi_engine(cof_engine engine);

extern const struct cofi_engine_ops cofi_engine_thread, cofi_engine_shm;

/* Shared by engines whose slabs are all mapped. */
void cofi_mapped_put(cof_arena *arena, int peer, size_t dst_offset, const void *src, size_t bytes);
void cofi_mapped_get(cof_arena *arena, void *dst, int peer, size_t src_offset, size_t bytes);
void cofi_mapped_signal(cof_arena *arena, int peer, size_t word_offset, uint64_t value);

/* world.c: a stream of the world's timeouts. */
cof_status cofi_world_stream_open(cof_world *world, int n_threads, bool with_gemm, const char *name,
                                  struct cofi_cpu_stream **stream_out);

#endif
