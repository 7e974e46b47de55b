/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which part of a rank's queries meets which part of an owner's keys. With the causal zigzag layout
 * this gives, for owner k and rank r:
 *     k = r   half 0 x half 0 banded, half 1 x half 0 full, half 1 x half 1 banded
 *     k < r   all queries x half 0, full
 *     k > r   half 1 x all keys, full */
#include "ops/attention/attention.h"

static bool is_full(const struct cofi_pair *p)
{
    return p->band.left == INT64_MAX && p->band.right == INT64_MAX;
}

/* One query chunk against one key chunk; false when nothing is visible. */
static bool make_pair(const cof_layout *l, cof_mask mask, int rank, int half, int owner,
                      int owner_half, struct cofi_pair *pair)
{
    int64_t q = cof_layout_chunk(l, rank, half), k = cof_layout_chunk(l, owner, owner_half);
    int64_t q_start = cof_layout_chunk_start(l, q), k_start = cof_layout_chunk_start(l, k);
    *pair = (struct cofi_pair){
        .q_begin = cof_layout_half_start(l, rank, half),
        .q_rows = cof_layout_chunk_rows(l, q),
        .k_begin = cof_layout_half_start(l, owner, owner_half),
        .k_rows = cof_layout_chunk_rows(l, k),
        .band = {0, INT64_MAX, INT64_MAX},
    };
    if (pair->q_rows == 0 || !cof_layout_needs(l, mask, rank, k) || pair->k_rows == 0)
        return false;
    if (mask == COF_MASK_NONE || k_start + pair->k_rows - 1 <= q_start)
        return true;
    pair->band = (struct cofi_band){q_start - k_start, INT64_MAX, 0};
    return k_start <= q_start + pair->q_rows - 1;
}

/* Joins b to a when both are full and together a rectangle. */
static bool join(struct cofi_pair *a, const struct cofi_pair *b)
{
    if (!is_full(a) || !is_full(b))
        return false;
    if (a->q_begin == b->q_begin && a->q_rows == b->q_rows &&
        a->k_begin + a->k_rows == b->k_begin) {
        a->k_rows += b->k_rows;
        return true;
    }
    if (a->k_begin == b->k_begin && a->k_rows == b->k_rows &&
        a->q_begin + a->q_rows == b->q_begin) {
        a->q_rows += b->q_rows;
        return true;
    }
    return false;
}

int cofi_attention_pairs(const cof_layout *l, cof_mask mask, int rank, int owner,
                         struct cofi_pair *pairs)
{
    int n = 0, halves = cof_layout_halves(l);
    for (int a = 0; a < halves; a++) {
        for (int b = 0; b < halves; b++) {
            struct cofi_pair pair;
            if (make_pair(l, mask, rank, a, owner, b, &pair) &&
                (n == 0 || !join(&pairs[n - 1], &pair)))
                pairs[n++] = pair;
        }
        if (n >= 2 && join(&pairs[n - 2], &pairs[n - 1])) /* the row of pairs above this one */
            n--;
    }
    return n;
}

void cofi_attention_needed_rows(const cof_layout *l, cof_mask mask, int rank, int owner,
                                int64_t *begin, int64_t *end)
{
    *begin = *end = 0;
    for (int half = 0; half < cof_layout_halves(l); half++) {
        int64_t chunk = cof_layout_chunk(l, owner, half);
        int64_t start = cof_layout_half_start(l, owner, half);
        if (!cof_layout_needs(l, mask, rank, chunk))
            continue;
        *begin = *end == 0 ? start : *begin;
        *end = start + cof_layout_chunk_rows(l, chunk);
    }
}
