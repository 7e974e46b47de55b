/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Layout of a sequence over the ranks of a context-parallel team: which rank holds which global
 * row. One file of index functions for loaders, rotary embeddings and losses as much as for the
 * operators.
 *
 * The sequence of S tokens is cut into *chunks*: 2P for ZIGZAG, P for CONTIGUOUS.
 *   ZIGZAG      rank r holds chunk r as its half 0 and chunk 2P-1-r as its half 1, in this order.
 *               Under a causal mask every rank then has the same work.
 *   CONTIGUOUS  rank r holds chunk r.
 * Chunk bounds, with n chunks:
 *   BALANCED    chunk j is rows floor(j*S/n) .. floor((j+1)*S/n) - 1; no padding.
 *   PADDED      chunk j is rows j*c .. (j+1)*c - 1 with c = ceil(S/n); rows >= S are padding. Local
 *               tensors hold n/P * c rows on every rank.
 *
 * All functions are local, pure and usable from any thread. S <= 2^56, P <= 2^20; arguments out of
 * range return -1 (or 0 where a count is returned).
 */
#ifndef COFUSE_LAYOUT_H
#define COFUSE_LAYOUT_H

#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cof_layout_kind { COF_LAYOUT_ZIGZAG = 0, COF_LAYOUT_CONTIGUOUS = 1 } cof_layout_kind;
typedef enum cof_chunking { COF_CHUNKING_BALANCED = 0, COF_CHUNKING_PADDED = 1 } cof_chunking;

typedef struct cof_layout {
    cof_layout_kind kind;
    cof_chunking chunking;
    int n_ranks;    /* P >= 1 */
    int64_t n_rows; /* S >= 0, the whole sequence */
} cof_layout;

/** Masks as far as a layout is concerned. */
typedef enum cof_mask { COF_MASK_NONE = 0, COF_MASK_CAUSAL = 1 } cof_mask;

/** A sliding window: query row i sees, of the keys that the mask leaves, i - left .. i + right.
 * -1: no limit on that side. */
typedef struct cof_window {
    int64_t left, right;
} cof_window;

/** Number of chunks: 2P or P. */
COF_API int64_t cof_layout_chunks(const cof_layout *layout);

/** Chunks a rank holds: 2 or 1. Its chunk number `half` is cof_layout_chunk(layout, rank, half). */
COF_API int cof_layout_halves(const cof_layout *layout);

/** The chunk that `rank` holds as its `half` (0 or 1). */
COF_API int64_t cof_layout_chunk(const cof_layout *layout, int rank, int half);

/** The rank that holds `chunk`, and as which half. */
COF_API int cof_layout_chunk_owner(const cof_layout *layout, int64_t chunk);
COF_API int cof_layout_chunk_half(const cof_layout *layout, int64_t chunk);

/** First global row of `chunk`, and its number of valid (non-padding) rows. */
COF_API int64_t cof_layout_chunk_start(const cof_layout *layout, int64_t chunk);
COF_API int64_t cof_layout_chunk_rows(const cof_layout *layout, int64_t chunk);

/** Rows of the local tensors of `rank`, padding included. */
COF_API int64_t cof_layout_local_rows(const cof_layout *layout, int rank);

/** Valid rows of `rank`. */
COF_API int64_t cof_layout_valid_rows(const cof_layout *layout, int rank);

/** First local row of the rank's `half`. */
COF_API int64_t cof_layout_half_start(const cof_layout *layout, int rank, int half);

/** Global row of a local row; -1 for padding or out of range. */
COF_API int64_t cof_layout_global_row(const cof_layout *layout, int rank, int64_t local_row);

/** Owner and local row of a global row; -1 out of range. */
COF_API int cof_layout_owner(const cof_layout *layout, int64_t global_row);
COF_API int64_t cof_layout_local_row(const cof_layout *layout, int64_t global_row);

/**
 * 1 when some query of `rank` sees some key of `chunk` under `mask`: the rank then fetches the
 * chunk's keys and values in forward and contributes to its gradient in backward; else 0. The same
 * answer serves reader, writer and owner.
 */
COF_API int cof_layout_needs(const cof_layout *layout, cof_mask mask, int rank, int64_t chunk);

/**
 * The same with a window (NULL: none): global rows [*begin_out, *end_out) of `chunk` are those from
 * the first key that some query of `rank` sees to the last one. 0, and both 0, when it sees none.
 */
COF_API int cof_layout_needed_rows(const cof_layout *layout, cof_mask mask,
                                   const cof_window *window, int rank, int64_t chunk,
                                   int64_t *begin_out, int64_t *end_out);

#ifdef __cplusplus
}
#endif
#endif
