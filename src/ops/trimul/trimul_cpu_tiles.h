/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs: tiles of tokens. A tile is `tokens` columns of one row of pairs, beginning at a
 * multiple of `tokens` of the global columns; [begin, end) of them are this rank's and have data,
 * the others are zeros. A tile's arrays lie in a worker's scratch. */
#ifndef COFI_TRIMUL_CPU_TILES_H
#define COFI_TRIMUL_CPU_TILES_H

#include <string.h>

#include "ops/trimul/trimul_cpu.h"

struct cofi_tri_tile {
    struct cofi_tri_plan *plan;
    struct cofi_tri_cpu_state *st;
    const struct cofi_vec_ops *vec;
    const struct cofi_gate_ops *gate;
    struct cofi_gemm *gemm;
    char *scratch;
    size_t used;
    int64_t n;             /* tokens of it */
    int64_t b, i, j0;      /* batch entry, row, first column */
    int64_t begin, end;    /* columns with data, counted from j0 */
};

/* Tile `idx` of the call in hand. */
void cofi_tri_tile_open(struct cofi_tri_tile *t, struct cofi_tri_plan *plan,
                        struct cofi_cpu_worker *worker, int64_t idx);

static inline void *cofi_tri_take(struct cofi_tri_tile *t, int64_t bytes)
{
    char *at = t->scratch + t->used;
    t->used += ((size_t)bytes + 63) & ~(size_t)63;
    return at;
}

static inline float *cofi_tri_take_floats(struct cofi_tri_tile *t, int64_t n)
{
    return cofi_tri_take(t, n * (int64_t)sizeof(float));
}

/* A matrix in the type of products. */
static inline char *cofi_tri_take_typed(struct cofi_tri_tile *t, int64_t n)
{
    return cofi_tri_take(t, n * t->st->type_bytes);
}

/* n fp32 values to item `at` of such a matrix; it may be the values themselves. */
static inline void cofi_tri_to_typed(const struct cofi_tri_tile *t, char *matrix, int64_t at,
                                     const float *src, int64_t n)
{
    char *dst = matrix + at * t->st->type_bytes;
    if (t->st->type == COFI_GEMM_BF16)
        t->vec->f32_to_bf16((uint16_t *)(void *)dst, src, n);
    else if (dst != (const char *)src)
        memcpy(dst, src, (size_t)n * sizeof *src);
}

/* The matrix of fp32 values in the type of products: itself, or a new one. */
char *cofi_tri_typed(struct cofi_tri_tile *t, float *src, int64_t n);

static inline const char *cofi_tri_typed_at(const struct cofi_tri_tile *t, const char *matrix,
                                            int64_t at)
{
    return matrix + at * t->st->type_bytes;
}

/* Row `j` (from j0) of a tensor [.., D], in fp32. */
static inline void cofi_tri_load_row(const struct cofi_tri_tile *t,
                                     const struct cofi_tri_tensor *tensor, int64_t j, float *dst)
{
    cofi_vec_load(t->vec, t->plan->elem, dst, cofi_tri_at(tensor, t->b, t->i - t->st->shape.own.row,
                                                          t->j0 + j - t->st->shape.own.col),
                  t->plan->params.dim);
}

static inline void cofi_tri_store_row(const struct cofi_tri_tile *t,
                                      const struct cofi_tri_tensor *tensor, int64_t j,
                                      const float *src)
{
    cofi_vec_store(t->vec, t->plan->elem, cofi_tri_at(tensor, t->b, t->i - t->st->shape.own.row,
                                                      t->j0 + j - t->st->shape.own.col),
                   src, t->plan->params.dim);
}

/* A row across the tile, of one feature, from where it was received; zeros where there is no data.
 */
void cofi_tri_load_across(const struct cofi_tri_tile *t, const struct cofi_tri_port *port,
                          enum cofi_elem elem, int half, int64_t h, float *dst);
/* The data of a row across the tile. */
void cofi_tri_store_across(const struct cofi_tri_tile *t, const struct cofi_tri_port *port,
                           enum cofi_elem elem, int half, int64_t h, const float *src);

/* xn [n][D] in the type of products, zero rows where there is no data. x [n][D] and rows [n]: what
 * norm_grad needs; NULL: not wanted. */
char *cofi_tri_norm_in(struct cofi_tri_tile *t, float *x, struct cofi_norm_row *rows);

/* The mask across the tile; NULL: there is none. */
const float *cofi_tri_mask(struct cofi_tri_tile *t);

/* p and g of a block across the tile, without bias: [4 block][n]. */
void cofi_tri_project(struct cofi_tri_tile *t, const char *xn, int64_t block, float *pg);

/* C [m][n] of products of the tile. One that fails is noted: its step ends with the failure. */
void cofi_tri_product(const struct cofi_tri_tile *t, enum cofi_gemm_form form, int64_t m, int64_t n,
                      int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb,
                      bool accumulate, float *c);

/* The places of a slice's gradients. */
struct cofi_tri_cpu_grads cofi_tri_slice(struct cofi_tri_plan *plan, int64_t slice);

/* fn for all tiles of the call in hand, in parallel: one by one, or, where gradients of weights are
 * wanted, the tiles of a slice in order. grads is NULL where they are not. */
typedef void (*cofi_tri_tile_fn)(struct cofi_tri_tile *t, const struct cofi_tri_cpu_grads *grads,
                                 const void *arg);
void cofi_tri_each_tile(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, bool by_slice,
                        cofi_tri_tile_fn fn, const void *arg);

#endif
