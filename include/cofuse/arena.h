/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Arenas: symmetric memory, shared by plans or used by hand.
 *
 * An arena gives every rank of a team the same number of bytes, which the other ranks reach: with
 * the calls below, or through the pointers of cof_arena_view. Offsets count from the first byte of
 * a rank's data and mean the same place on every rank. All calls on one arena are made in one
 * order, the same on all ranks: on one stream, or on several ordered by events. Calls that may run
 * at once need an arena each.
 *
 * Plans take an arena or NULL, which gives them one of their own. Plans that share an arena run one
 * at a time, so their exchange buffers lie over each other from offset 0 on: the arena holds the
 * largest of them, not the sum. Kept apart, from the end of the data downwards, are each plan's
 * signal words and the regions of cof_arena_alloc: user data that shall outlive a plan's call
 * belongs there.
 *
 * On a world of CUDA devices the data and signal words lie in device memory; `src` and `dst` below
 * are memory of this rank's device or pinned memory of the host (cudaMallocHost, cudaHostRegister),
 * and other memory is refused.
 *
 * A wait that passes its deadline, a dead rank or a disagreement ends the arena on all ranks: later
 * calls return the error, cof_arena_alloc and making a plan too, outputs are NaN (bytes of cof_get:
 * 0xff), and only destroying is left.
 */
#ifndef COFUSE_ARENA_H
#define COFUSE_ARENA_H

#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cof_arena cof_arena;

/**
 * Makes an arena of `bytes` bytes per rank, zeroed, and `n_words` words for cof_signal (0 .. 65535
 * per pair of ranks). Collective over all ranks of the team, with the same arguments. Two-phase:
 * all ranks get it, or all return the same error and keep nothing.
 *
 * The team outlives its arenas.
 *
 * COF_ERR_INVALID   n_words out of range, or `bytes` past the address space
 * COF_ERR_MISMATCH  the ranks passed different arguments
 * COF_ERR_NOMEM     some rank has no memory for it; checked before any is taken
 * COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_SYSTEM
 */
COF_API cof_status cof_arena_create(cof_team *team, size_t bytes, int n_words,
                                    cof_arena **arena_out);

/**
 * Memory that the caller has mapped between the ranks: from other symmetric-memory libraries, or by
 * hand. base[r] is where rank r's block lies in this process (base[own rank]: its own block); a
 * NULL is refused. Blocks are aligned to 128 bytes and `bytes` long, the same on all ranks.
 */
typedef struct cof_peers {
    size_t size; /* sizeof(cof_peers) */
    int n_ranks; /* of the team */
    void *const *base;
    size_t bytes; /* of a block: cof_arena_attach_bytes says how many for how much data */
    int n_words;  /* words for cof_signal, per pair of ranks: 0 .. 65535 */
} cof_peers;
#ifdef __cplusplus
#define COF_PEERS_INIT {sizeof(cof_peers)}
#else
#define COF_PEERS_INIT {.size = sizeof(cof_peers)}
#endif

/**
 * Makes an arena of the caller's memory. Collective over all ranks of the team. At the front of
 * each block Cofuse keeps its control block and signal words, which it zeroes; the data behind them
 * is left as it is. Every rank proves that base[r] is rank r's block: each writes a random number
 * into its own block, and all read it there.
 *
 * On a world of CUDA devices the blocks are device memory, however it was made and mapped. Memory
 * that is mapped for reading only is found out by no check there.
 *
 * The blocks stay mapped until *every* rank has destroyed the arena. `peers` is not kept.
 *
 * COF_ERR_INVALID   a rule of cof_peers is broken (the text names entry and rule), base[r] cannot
 *                   be read or is not rank r's block, the own block cannot be written, or `bytes`
 *                   is too small; of a block, the front and the last byte are looked at
 * COF_ERR_MISMATCH  the ranks passed different sizes
 * COF_ERR_NOMEM, COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_SYSTEM
 */
COF_API cof_status cof_arena_attach(cof_team *team, const cof_peers *peers, cof_arena **arena_out);

/**
 * Bytes of a block for cof_arena_attach that holds `bytes` of data. Local; 0 for team = NULL,
 * n_words not 0 .. 65535, or `bytes` past the address space.
 */
COF_API size_t cof_arena_attach_bytes(const cof_team *team, size_t bytes, int n_words);

/**
 * Lets go of the arena. Local, never waits; the caller has synchronised the streams that use it and
 * destroyed its plans. Memory of cof_arena_create lives until the last rank let go. NULL is
 * allowed. Device memory that is shared by ipc handles (COFUSE_CUDA_MEMORY) and that others still
 * have open is freed by a later call that makes or destroys an arena or a world of the process.
 */
COF_API void cof_arena_destroy(cof_arena *arena);

/** Bytes of data per rank. Local, any thread. */
COF_API size_t cof_arena_bytes(const cof_arena *arena);

/**
 * Sets `bytes` bytes of every rank's data aside (128-byte aligned); no plan's buffers touch them.
 * They are freed with the arena. Collective over all ranks, while no call on the arena runs.
 *
 * COF_ERR_INVALID (bytes = 0), COF_ERR_MISMATCH (other `bytes` elsewhere), COF_ERR_NOMEM (no room
 * beside what plans and earlier regions have), COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD
 */
COF_API cof_status cof_arena_alloc(cof_arena *arena, size_t bytes, size_t *offset_out);

/** Where the arena lies, for kernels of the caller's own. */
typedef struct cof_arena_pointers {
    size_t size;        /* sizeof(cof_arena_pointers), set by the caller */
    int rank, n_ranks;  /* of the team */
    size_t bytes;       /* of data per rank */
    void *const *base;  /* by rank: its data here; NULL where a peer is not mapped */
    void *const *words; /* by rank: its signal words here; NULL likewise */
    int n_words;
    size_t word_stride; /* bytes: word i of writer w begins at (i * n_ranks + w) * word_stride */
} cof_arena_pointers;
#ifdef __cplusplus
#define COF_ARENA_POINTERS_INIT {sizeof(cof_arena_pointers)}
#else
#define COF_ARENA_POINTERS_INIT {.size = sizeof(cof_arena_pointers)}
#endif

/**
 * Fills in the arena's pointers; they are valid until it is destroyed. Local. A signal word is 64
 * bits; use one either with cof_signal and cof_wait or by kernels of your own, not with both.
 * COF_ERR_INVALID, and what ended the arena
 */
COF_API cof_status cof_arena_view(cof_arena *arena, cof_arena_pointers *pointers);

/**
 * Enqueues a copy of `bytes` bytes at `src` to `dst_offset` of the peer's data. One rank calls;
 * `peer` is a rank of the team, 0 .. size-1, this one included. A put is seen by the peer before a
 * later cof_signal of the same stream to it. `src` is read when the stream gets there.
 *
 * COF_ERR_INVALID (an argument out of range, named), the error of the stream or of the arena
 */
COF_API cof_status cof_put(cof_arena *arena, int peer, size_t dst_offset, const void *src,
                           size_t bytes, cof_stream stream);

/**
 * Enqueues a copy of `bytes` bytes at `src_offset` of the peer's data to `dst`. One rank calls.
 * When the stream or the arena has failed, dst is filled with 0xff: NaN in every floating type.
 * Errors as cof_put.
 */
COF_API cof_status cof_get(cof_arena *arena, void *dst, int peer, size_t src_offset, size_t bytes,
                           cof_stream stream);

/**
 * Enqueues a signal to `peer` on `word`, 0 .. n_words-1: everything put to it on this stream before
 * is there when it sees the signal. Signals count: the n-th cof_wait of the peer on (this rank,
 * word) is released by the n-th signal. One rank calls. Errors as cof_put.
 */
COF_API cof_status cof_signal(cof_arena *arena, int peer, int word, cof_stream stream);

/**
 * Enqueues a wait for the next signal of `peer` on `word`; what the peer put before it can be read
 * after the wait in stream order. One rank calls. The wait has the world's run_timeout: past it, or
 * when the peer is gone, the stream (on a device: the arena alone) fails with COF_ERR_TIMEOUT or
 * COF_ERR_PEER_DEAD and the arena ends on all ranks. Errors as cof_put.
 */
COF_API cof_status cof_wait(cof_arena *arena, int peer, int word, cof_stream stream);

#ifdef __cplusplus
}
#endif
#endif
