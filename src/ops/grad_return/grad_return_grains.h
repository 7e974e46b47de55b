/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Where the elements of an owner's rows lie, for kernels and for tests on the host. C, C++, CUDA.
 *
 * The rows of an owner, dK then dV, are numbered by grains in the order in which slots hold them:
 * [rows][B][Hkv][dim / grain]. A grain is 8 elements of a head where both head dims are multiples
 * of 8, else one element. Grains are cut into pieces, which go to lanes by turns: piece p is number
 * p / n_lanes of lane p mod n_lanes. Nothing of that changes a sum: it is of one element. */
#ifndef COFI_GRAD_RETURN_GRAINS_H
#define COFI_GRAD_RETURN_GRAINS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define COFI_GR_FN static __host__ __device__ __forceinline__
#else
#define COFI_GR_FN static inline
#endif

/* ---- division of numbers below 2^31 --------------------------------------------------------- */

/* n / by = n * factor >> shift with factor = ceil(2^shift / by), shift = 31 + ceil(log2 by): the
 * excess n (factor by - 2^shift) / (by 2^shift) is below n / 2^31 / by, hence below 1 / by. */
struct cofi_gr_divisor {
    uint32_t by, factor, shift;
};

COFI_GR_FN struct cofi_gr_divisor cofi_gr_divisor_make(uint32_t by)
{
    struct cofi_gr_divisor d = {by, 0, 31};
    while (((uint64_t)1 << (d.shift - 31)) < by)
        d.shift++;
    d.factor = (uint32_t)((((uint64_t)1 << d.shift) + by - 1) / by);
    return d;
}

COFI_GR_FN uint32_t cofi_gr_divide(uint32_t n, struct cofi_gr_divisor d)
{
    return (uint32_t)((uint64_t)n * d.factor >> d.shift);
}

/* ---- places --------------------------------------------------------------------------------- */

/* Of dK or dV: divisors by grains of a row, of a batch entry and of a head. */
struct cofi_gr_shape {
    struct cofi_gr_divisor row, batch, head;
};

COFI_GR_FN struct cofi_gr_shape cofi_gr_shape_make(int64_t n_batch, int64_t n_heads, int64_t dim,
                                                   int grain)
{
    const uint32_t head = (uint32_t)(dim / grain), batch = head * (uint32_t)n_heads;
    struct cofi_gr_shape s;
    s.head = cofi_gr_divisor_make(head);
    s.batch = cofi_gr_divisor_make(batch);
    s.row = cofi_gr_divisor_make(batch * (uint32_t)n_batch);
    return s;
}

struct cofi_gr_at {
    int is_v;
    uint32_t in_slot; /* grains before it there, of dK or of dV */
    int32_t row, batch, head, in_head; /* in_head: grains */
};

/* Grain g of n_rows rows: all but batch, head and place in it. */
COFI_GR_FN struct cofi_gr_at cofi_gr_find_row(const struct cofi_gr_shape shape[2], int32_t n_rows,
                                              uint32_t g)
{
    struct cofi_gr_at at;
    const uint32_t n_k = (uint32_t)n_rows * shape[0].row.by;
    at.is_v = g >= n_k;
    at.in_slot = at.is_v ? g - n_k : g;
    at.row = (int32_t)cofi_gr_divide(at.in_slot, at.is_v ? shape[1].row : shape[0].row);
    at.batch = at.head = at.in_head = 0;
    return at;
}

COFI_GR_FN struct cofi_gr_at cofi_gr_find(const struct cofi_gr_shape shape[2], int32_t n_rows,
                                          uint32_t g)
{
    struct cofi_gr_at at = cofi_gr_find_row(shape, n_rows, g);
    const struct cofi_gr_shape s = at.is_v ? shape[1] : shape[0];
    const uint32_t in_row = at.in_slot - (uint32_t)at.row * s.row.by;
    const uint32_t batch = cofi_gr_divide(in_row, s.batch);
    const uint32_t in_batch = in_row - batch * s.batch.by;
    const uint32_t head = cofi_gr_divide(in_batch, s.head);
    at.batch = (int32_t)batch;
    at.head = (int32_t)head;
    at.in_head = (int32_t)(in_batch - head * s.head.by);
    return at;
}

/* Grains before that of `at` in a compact tensor that has its row as number `row`. */
COFI_GR_FN int64_t cofi_gr_compact(const struct cofi_gr_shape shape[2], const struct cofi_gr_at *at,
                                   int64_t row)
{
    const uint32_t by = at->is_v ? shape[1].row.by : shape[0].row.by;
    return (int64_t)at->in_slot + (row - at->row) * (int64_t)by;
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* An owner's local rows: two halves, each of valid rows and padding behind them. A layout with one
 * half has no row in the second. */
struct cofi_gr_rows {
    int32_t n_rows, second; /* first row of half 1 */
    int32_t n_valid[2];
    int64_t source[2]; /* row of the partial that has the first row of a half */
};

COFI_GR_FN int cofi_gr_half(const struct cofi_gr_rows *r, int32_t row)
{
    return row >= r->second;
}

/* The partial's row for a local one; -1: padding. */
COFI_GR_FN int64_t cofi_gr_source(const struct cofi_gr_rows *r, int32_t row)
{
    const int half = cofi_gr_half(r, row);
    const int32_t in_half = half ? row - r->second : row;
    const int32_t n_valid = half ? r->n_valid[1] : r->n_valid[0];
    const int64_t first = half ? r->source[1] : r->source[0];
    return in_half < n_valid ? first + in_half : -1;
}

/* ---- pieces --------------------------------------------------------------------------------- */

struct cofi_gr_cut {
    uint32_t n_lanes, n_pieces; /* pieces of each lane: 1 .. COFI_GR_MAX_PIECES */
    uint32_t piece;             /* grains */
};

/* A block of 512 threads moves so many grains in one turn of its loop, 4 of each thread. Fewer
 * pieces of more turns have fewer signals, more pieces leave less to sum behind the last transfer:
 * 16 of 16 MiB at 256 MiB, whose sum takes about 15 us of 760. */
#define COFI_GR_THREADS 512
#define COFI_GR_TURN (COFI_GR_THREADS * 4)
#define COFI_GR_MAX_PIECES 16

COFI_GR_FN uint64_t cofi_gr_ceil(uint64_t n, uint64_t by)
{
    return (n + by - 1) / by;
}

/* For the owner that has most grains; others have pieces that are empty. A piece is whole turns,
 * or nearly. */
COFI_GR_FN struct cofi_gr_cut cofi_gr_cut_make(uint64_t n_grains, int most_lanes)
{
    struct cofi_gr_cut c;
    const uint64_t most = (uint64_t)(most_lanes > 1 ? most_lanes : 1);
    uint64_t lanes = cofi_gr_ceil(n_grains, COFI_GR_THREADS);
    lanes = lanes < 1 ? 1 : lanes > most ? most : lanes;
    uint64_t turns = cofi_gr_ceil(n_grains, lanes * COFI_GR_MAX_PIECES * COFI_GR_TURN);
    turns = turns < 1 ? 1 : turns;
    uint64_t pieces = cofi_gr_ceil(n_grains, lanes * turns * COFI_GR_TURN);
    pieces = pieces < 1 ? 1 : pieces;
    uint64_t grains = cofi_gr_ceil(n_grains, lanes * pieces);
    c.n_lanes = (uint32_t)lanes;
    c.n_pieces = (uint32_t)pieces;
    c.piece = (uint32_t)(cofi_gr_ceil(grains, COFI_GR_THREADS) * COFI_GR_THREADS);
    c.piece = c.piece ? c.piece : COFI_GR_THREADS;
    return c;
}

/* Grains [*begin, *end) of a lane's piece, of n in all. */
COFI_GR_FN void cofi_gr_piece(const struct cofi_gr_cut *c, uint32_t lane, uint32_t piece,
                              uint32_t n, uint32_t *begin, uint32_t *end)
{
    const uint64_t first = ((uint64_t)piece * c->n_lanes + lane) * c->piece;
    const uint64_t last = first + c->piece;
    *begin = first < n ? (uint32_t)first : n;
    *end = last < n ? (uint32_t)last : n;
}

#endif
