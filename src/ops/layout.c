/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "cofuse/layout.h"

#include <stdbool.h>
#include <stddef.h>

#define MAX_ROWS ((int64_t)1 << 56)
#define MAX_RANKS (1 << 20)

__extension__ typedef unsigned __int128 wide; /* (row + 1) * chunks needs 78 bits */

static bool layout_ok(const cof_layout *layout)
{
    return layout && (layout->kind == COF_LAYOUT_ZIGZAG || layout->kind == COF_LAYOUT_CONTIGUOUS) &&
           (layout->chunking == COF_CHUNKING_BALANCED || layout->chunking == COF_CHUNKING_PADDED) &&
           layout->n_ranks >= 1 && layout->n_ranks <= MAX_RANKS && layout->n_rows >= 0 &&
           layout->n_rows <= MAX_ROWS;
}

static bool rank_ok(const cof_layout *layout, int rank)
{
    return layout_ok(layout) && rank >= 0 && rank < layout->n_ranks;
}

int cof_layout_halves(const cof_layout *layout)
{
    if (!layout_ok(layout))
        return 0;
    return layout->kind == COF_LAYOUT_ZIGZAG ? 2 : 1;
}

int64_t cof_layout_chunks(const cof_layout *layout)
{
    return layout_ok(layout) ? (int64_t)cof_layout_halves(layout) * layout->n_ranks : 0;
}

static bool chunk_ok(const cof_layout *layout, int64_t chunk)
{
    return layout_ok(layout) && chunk >= 0 && chunk < cof_layout_chunks(layout);
}

int64_t cof_layout_chunk(const cof_layout *layout, int rank, int half)
{
    if (!rank_ok(layout, rank) || half < 0 || half >= cof_layout_halves(layout))
        return -1;
    return half == 0 ? rank : cof_layout_chunks(layout) - 1 - rank;
}

int cof_layout_chunk_owner(const cof_layout *layout, int64_t chunk)
{
    if (!chunk_ok(layout, chunk))
        return -1;
    return (int)(chunk < layout->n_ranks ? chunk : cof_layout_chunks(layout) - 1 - chunk);
}

int cof_layout_chunk_half(const cof_layout *layout, int64_t chunk)
{
    if (!chunk_ok(layout, chunk))
        return -1;
    return chunk < layout->n_ranks ? 0 : 1;
}

/* ceil(S / n): the rows of a PADDED chunk. */
static int64_t padded_rows(const cof_layout *layout)
{
    int64_t n = cof_layout_chunks(layout);
    return (layout->n_rows + n - 1) / n;
}

/* floor(j S / n) without the product: with S = a n + b it is j a + floor(j b / n); j, b < 2^22. */
static int64_t balanced_start(const cof_layout *layout, int64_t j)
{
    int64_t n = cof_layout_chunks(layout);
    int64_t a = layout->n_rows / n, b = layout->n_rows % n;
    return j * a + j * b / n;
}

int64_t cof_layout_chunk_start(const cof_layout *layout, int64_t chunk)
{
    if (!chunk_ok(layout, chunk))
        return -1;
    return layout->chunking == COF_CHUNKING_PADDED ? chunk * padded_rows(layout)
                                                   : balanced_start(layout, chunk);
}

int64_t cof_layout_chunk_rows(const cof_layout *layout, int64_t chunk)
{
    if (!chunk_ok(layout, chunk))
        return 0;
    if (layout->chunking == COF_CHUNKING_BALANCED)
        return balanced_start(layout, chunk + 1) - balanced_start(layout, chunk);
    int64_t c = padded_rows(layout), left = layout->n_rows - chunk * c;
    return left < 0 ? 0 : left < c ? left : c;
}

/* Rows the chunk takes up in its owner's tensors. */
static int64_t chunk_room(const cof_layout *layout, int64_t chunk)
{
    return layout->chunking == COF_CHUNKING_PADDED ? padded_rows(layout)
                                                   : cof_layout_chunk_rows(layout, chunk);
}

int64_t cof_layout_local_rows(const cof_layout *layout, int rank)
{
    if (!rank_ok(layout, rank))
        return 0;
    int64_t rows = 0;
    for (int half = 0; half < cof_layout_halves(layout); half++)
        rows += chunk_room(layout, cof_layout_chunk(layout, rank, half));
    return rows;
}

int64_t cof_layout_valid_rows(const cof_layout *layout, int rank)
{
    if (!rank_ok(layout, rank))
        return 0;
    int64_t rows = 0;
    for (int half = 0; half < cof_layout_halves(layout); half++)
        rows += cof_layout_chunk_rows(layout, cof_layout_chunk(layout, rank, half));
    return rows;
}

int64_t cof_layout_half_start(const cof_layout *layout, int rank, int half)
{
    if (!rank_ok(layout, rank) || half < 0 || half >= cof_layout_halves(layout))
        return -1;
    return half == 0 ? 0 : chunk_room(layout, rank);
}

int64_t cof_layout_global_row(const cof_layout *layout, int rank, int64_t local_row)
{
    if (!rank_ok(layout, rank) || local_row < 0)
        return -1;
    for (int half = cof_layout_halves(layout) - 1; half >= 0; half--) {
        int64_t chunk = cof_layout_chunk(layout, rank, half);
        int64_t row = local_row - cof_layout_half_start(layout, rank, half);
        if (row >= 0)
            return row < cof_layout_chunk_rows(layout, chunk)
                       ? cof_layout_chunk_start(layout, chunk) + row
                       : -1;
    }
    return -1;
}

/* BALANCED: the largest j with floor(j S / n) <= row, that is j S < (row + 1) n. */
static int64_t chunk_of_row(const cof_layout *layout, int64_t row)
{
    if (layout->chunking == COF_CHUNKING_PADDED)
        return row / padded_rows(layout);
    wide n = (wide)cof_layout_chunks(layout);
    return (int64_t)((((wide)row + 1) * n - 1) / (wide)layout->n_rows);
}

int cof_layout_owner(const cof_layout *layout, int64_t global_row)
{
    if (!layout_ok(layout) || global_row < 0 || global_row >= layout->n_rows)
        return -1;
    return cof_layout_chunk_owner(layout, chunk_of_row(layout, global_row));
}

int64_t cof_layout_local_row(const cof_layout *layout, int64_t global_row)
{
    if (!layout_ok(layout) || global_row < 0 || global_row >= layout->n_rows)
        return -1;
    int64_t chunk = chunk_of_row(layout, global_row);
    int rank = cof_layout_chunk_owner(layout, chunk);
    int half = cof_layout_chunk_half(layout, chunk);
    return cof_layout_half_start(layout, rank, half) + global_row -
           cof_layout_chunk_start(layout, chunk);
}

/* A limit of a window in rows; the whole sequence where there is none. */
static int64_t limit_of(const cof_layout *layout, int64_t limit)
{
    return limit < 0 || limit > layout->n_rows ? layout->n_rows : limit;
}

int cof_layout_needed_rows(const cof_layout *layout, cof_mask mask, const cof_window *window,
                           int rank, int64_t chunk, int64_t *begin_out, int64_t *end_out)
{
    *begin_out = *end_out = 0;
    if (!rank_ok(layout, rank) || !chunk_ok(layout, chunk) ||
        (mask != COF_MASK_NONE && mask != COF_MASK_CAUSAL))
        return 0;
    const bool is_causal = mask == COF_MASK_CAUSAL;
    const int64_t left = limit_of(layout, window ? window->left : -1);
    const int64_t right = is_causal ? 0 : limit_of(layout, window ? window->right : -1);
    const int64_t start = cof_layout_chunk_start(layout, chunk);
    const int64_t stop = start + cof_layout_chunk_rows(layout, chunk);
    for (int half = 0; half < cof_layout_halves(layout); half++) {
        const int64_t own = cof_layout_chunk(layout, rank, half);
        const int64_t first = cof_layout_chunk_start(layout, own);
        const int64_t rows = cof_layout_chunk_rows(layout, own);
        const int64_t begin = start > first - left ? start : first - left;
        const int64_t end = stop < first + rows + right ? stop : first + rows + right;
        if (rows == 0 || begin >= end)
            continue;
        *begin_out = *end_out == 0 || begin < *begin_out ? begin : *begin_out;
        *end_out = end > *end_out ? end : *end_out;
    }
    return *end_out > 0;
}

int cof_layout_needs(const cof_layout *layout, cof_mask mask, int rank, int64_t chunk)
{
    int64_t begin, end;
    return cof_layout_needed_rows(layout, mask, NULL, rank, chunk, &begin, &end);
}
