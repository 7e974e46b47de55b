/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* An engine: how the slabs of an arena come to be, and how bytes and words reach a peer's slab. */
#ifndef COFI_ENGINE_H
#define COFI_ENGINE_H

#include "symm/arena.h"
#include "symm/device_ops.h"
#include "symm/symm.h"

/* What an engine keeps. `cofuse check runtime` compares every bit with what happens. */
#define COFI_CAPS(X)                                                                               \
    X(MAPPED, 1, "mapped", "every peer's slab is mapped: base[] is set")                           \
    X(PROCESSES, 2, "processes", "ranks may be processes (else threads of one)")                   \
    X(SURVIVES_DEATH, 4, "survives-death", "the others go on when a rank dies")                    \
    X(WORLDS, 8, "worlds", "several worlds at once")                                               \
    X(REINIT, 16, "reinit", "worlds may be made again after the last one was destroyed")

enum {
#define COFI_CAP_ENUM(symbol, value, name, text) COFI_CAP_##symbol = (value),
    COFI_CAPS(COFI_CAP_ENUM)
#undef COFI_CAP_ENUM
};

struct cofi_engine_ops {
    const char *name;
    unsigned caps;
    /* Collective, two-phase: on success every rank has all slabs, control block and words zeroed,
     * and knows that the others have them too; on failure none keeps anything. Fills arena->base[]
     * (the own entry at least) and arena->mapping. `peers`: the caller's blocks, of the attach
     * engine. */
    cof_status (*map)(cof_arena *arena, void *const *peers);
    void (*unmap)(cof_arena *arena); /* local */
    /* Transfers by offset into the peer's slab, in order per peer. */
    void (*put)(cof_arena *arena, int peer, size_t dst_offset, const void *src, size_t bytes);
    void (*get)(cof_arena *arena, void *dst, int peer, size_t src_offset, size_t bytes);
    /* Stores a signal word in the peer's slab, after everything put there before, and wakes it. */
    void (*signal)(cof_arena *arena, int peer, size_t word_offset, uint64_t value);
    /* Reads 8 bytes of the peer's slab that it stores atomically. */
    uint64_t (*load)(cof_arena *arena, int peer, size_t word_offset);
    /* Where ranks work on devices, else NULL. put, get, signal and load are then the host's, and
     * reach control blocks only. */
    const struct cofi_device_ops *device;
};

/* NULL for a code that is none. */
const struct cofi_engine_ops *cofi_engine(cof_engine engine);

extern const struct cofi_engine_ops cofi_engine_thread, cofi_engine_shm, cofi_engine_attach;

/* The engines of CUDA devices, their memory or the caller's; NULL in a build without. */
const struct cofi_engine_ops *cofi_engine_cuda(void);
const struct cofi_engine_ops *cofi_engine_cuda_attach(void);

/* One block of host memory, n_ranks times `bytes` (a multiple of the page), which all ranks of the
 * team map: rank r's part at r * bytes. Collective, two-phase: all have it, zeroed and reserved, or
 * none keeps anything. *base_out is unmapped with munmap. */
cof_status cofi_shared_map(cof_team *team, size_t bytes, void **base_out);

/* Shared by engines whose slabs are all mapped. */
void cofi_control_in_slabs(cof_arena *arena);
void cofi_mapped_put(cof_arena *arena, int peer, size_t dst_offset, const void *src, size_t bytes);
void cofi_mapped_get(cof_arena *arena, void *dst, int peer, size_t src_offset, size_t bytes);
void cofi_mapped_signal(cof_arena *arena, int peer, size_t word_offset, uint64_t value);
uint64_t cofi_mapped_load(cof_arena *arena, int peer, size_t word_offset);

/* world.c: a stream of the world's timeouts. */
cof_status cofi_world_stream_open(cof_world *world, int n_threads, bool with_gemm, const char *name,
                                  struct cofi_cpu_stream **stream_out);

#endif
