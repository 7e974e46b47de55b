/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the forward and the backward tiles of the CPU engine share: sizes, the visible range of a
 * query, operands of the products, and the test for values that a zero would not hide.
 *
 * A tile is TILE_Q query rows of one head against TILE_K keys. Inside it, entries that the band
 * hides get p = ds = 0, and the products run over them. That is right as long as what they meet is
 * finite: 0 * NaN would carry a NaN into a row that cannot see it. So a tile that is only partly
 * visible and holds a NaN or an infinity is computed one query row at a time, each over its own
 * visible range, by the same function (one row has no hidden entries). */
#ifndef COFI_ATTENTION_CPU_TILES_H
#define COFI_ATTENTION_CPU_TILES_H

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "backend/cpu/gemm.h"
#include "backend/cpu/vec.h"
#include "core/error.h"
#include "ops/attention/attention_cpu.h"

#define TILE_Q 128
#define TILE_K 512
#define TILE_LD (TILE_K + 16) /* row stride of a score tile: not a power of 2, for the caches */
#define TILE_DIM 512          /* largest head dim */

/* Keys lo .. hi-1 of a section. */
struct cofi_range {
    int64_t lo, hi;
};

static inline int64_t cofi_add_saturated(int64_t a, int64_t b)
{
    int64_t sum;
    if (!__builtin_add_overflow(a, b, &sum))
        return sum;
    return b > 0 ? INT64_MAX : INT64_MIN;
}

static inline int64_t cofi_clamp(int64_t x, int64_t lo, int64_t hi)
{
    return x < lo ? lo : x > hi ? hi : x;
}

/* The keys within [keys.lo, keys.hi) that query i sees; lo = hi when there is none. */
static inline struct cofi_range cofi_visible(const struct cofi_band *band, int64_t i,
                                             struct cofi_range keys)
{
    int64_t centre = cofi_add_saturated(i, band->diag);
    struct cofi_range r = keys;
    if (band->left == INT64_MIN)
        r.lo = keys.hi;
    else if (band->left != INT64_MAX)
        r.lo = cofi_clamp(cofi_add_saturated(centre, -band->left), keys.lo, keys.hi);
    if (band->right != INT64_MAX)
        r.hi = cofi_clamp(cofi_add_saturated(cofi_add_saturated(centre, band->right), 1), r.lo,
                          keys.hi);
    return r;
}

/* How n_q queries from q0 on see some keys: `any` is seen by one of them at least (rounded outwards
 * to 16 keys, for aligned products, when there are several queries), `all` by every one. */
struct cofi_cut {
    struct cofi_range any, all;
};

static inline struct cofi_cut cofi_cut_tile(const struct cofi_band *band, int64_t q0, int64_t n_q,
                                            struct cofi_range keys)
{
    struct cofi_range first = cofi_visible(band, q0, keys);
    struct cofi_range last = cofi_visible(band, q0 + n_q - 1, keys);
    struct cofi_cut cut = {{first.lo, last.hi}, {last.lo, first.hi}};
    if (cut.any.lo >= cut.any.hi)
        cut.any.hi = cut.any.lo;
    else if (n_q > 1) {
        cut.any.lo = keys.lo + (cut.any.lo - keys.lo) / 16 * 16;
        cut.any.hi = cofi_clamp(keys.lo + (cut.any.hi - keys.lo + 15) / 16 * 16, 0, keys.hi);
    }
    if (cut.all.hi < cut.all.lo)
        cut.all.lo = cut.all.hi = cut.any.lo;
    return cut;
}

/* Rows of one head as the products read them: bf16 where those run natively, else fp32. */
struct cofi_rows {
    const char *data;
    int64_t ld; /* elements */
    enum cofi_gemm_type type;
};

static inline const char *cofi_rows_at(const struct cofi_rows *rows, int64_t row)
{
    return rows->data + row * rows->ld * (rows->type == COFI_GEMM_BF16 ? 2 : 4);
}

static inline void *cofi_view_at(const struct cofi_attention_view *view, int64_t elem_bytes,
                                 int64_t batch, int64_t row, int64_t head)
{
    return (char *)view->data + (batch * view->batch_stride + row * view->row_stride +
                                 head * view->head_stride) * elem_bytes;
}

/* The product type of a plan. */
static inline enum cofi_gemm_type cofi_tile_type(const struct cofi_attention_dims *dims)
{
    return dims->elem == COFI_ELEM_BF16 && cofi_gemm_has(COFI_GEMM_BF16) ? COFI_GEMM_BF16
                                                                         : COFI_GEMM_F32;
}

/* n_rows rows of a view as operands: bf16 products read the view itself; fp32 products get a dense
 * copy in `panel` (converted from bf16 or fp16, or gathered from strided rows: measured on Zen 3,
 * oneDNN is 1.4 times as fast on it as on rows 4 KiB apart), or the view where it is dense already.
 */
static inline struct cofi_rows cofi_rows_load(const struct cofi_attention_view *view,
                                              enum cofi_elem elem, enum cofi_gemm_type type,
                                              int64_t batch, int64_t row, int64_t head,
                                              int64_t n_rows, int64_t dim, float *panel)
{
    const int64_t elem_bytes = cofi_elem_bytes(elem);
    const char *src = cofi_view_at(view, elem_bytes, batch, row, head);
    if (type == COFI_GEMM_BF16 || (elem == COFI_ELEM_F32 && view->row_stride == dim))
        return (struct cofi_rows){src, view->row_stride, type};
    const struct cofi_vec_ops *vec = cofi_vec();
    for (int64_t r = 0; r < n_rows; r++)
        cofi_vec_load(vec, elem, panel + r * dim, src + r * view->row_stride * elem_bytes, dim);
    return (struct cofi_rows){(const char *)panel, dim, type};
}

/* Whether rows lo .. hi-1 hold neither NaN nor infinity. */
static inline bool cofi_rows_finite(const struct cofi_rows *rows, struct cofi_range r, int64_t dim)
{
    uint32_t bad = 0;
    for (int64_t row = r.lo; row < r.hi && !bad; row++) {
        const char *x = cofi_rows_at(rows, row);
        if (rows->type == COFI_GEMM_BF16) {
            for (int64_t d = 0; d < dim; d++)
                bad |= (((const uint16_t *)(const void *)x)[d] & 0x7f80) == 0x7f80;
        } else {
            for (int64_t d = 0; d < dim; d++)
                bad |= (((const uint32_t *)(const void *)x)[d] & 0x7f800000) == 0x7f800000;
        }
    }
    return !bad;
}

/* The same for the rows of [any) that [all) leaves out, rows counted from `origin`. */
static inline bool cofi_rows_finite_outside(const struct cofi_rows *rows,
                                            const struct cofi_cut *cut, int64_t origin,
                                            int64_t dim)
{
    struct cofi_range below = {cut->any.lo - origin, cut->all.lo - origin};
    struct cofi_range above = {cut->all.hi - origin, cut->any.hi - origin};
    return cofi_rows_finite(rows, below, dim) && cofi_rows_finite(rows, above, dim);
}

#endif
