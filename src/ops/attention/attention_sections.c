/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which part of a rank's queries meets which part of an owner's keys. With the causal zigzag layout
 * this gives, for owner k and rank r:
 *     k = r   half 0 x half 0 banded, half 1 x half 0 full, half 1 x half 1 banded
 *     k < r   all queries x half 0, full
 *     k > r   half 1 x all keys, full
 * With a window a pair is cut to the keys that some of its queries see and the queries that see
 * some of its keys. */
#include "ops/attention/attention.h"

/* Row i sees rows i - left .. i + right. Both at most the length of the sequence. */
struct reach {
    int64_t left, right;
};

static int64_t limit_of(const cof_layout *l, int64_t limit)
{
    return limit < 0 || limit > l->n_rows ? l->n_rows : limit;
}

static struct reach reach_of(const cof_layout *l, const struct cofi_sight *sight)
{
    bool is_causal = sight->mask == COF_MASK_CAUSAL;
    return (struct reach){
        .left = sight->has_window ? limit_of(l, sight->window.left) : l->n_rows,
        .right = is_causal           ? 0
                 : sight->has_window ? limit_of(l, sight->window.right)
                                     : l->n_rows,
    };
}

struct cofi_band cofi_attention_band(const cof_layout *l, const struct cofi_sight *sight,
                                     int64_t q_start, int64_t q_rows, int64_t k_start,
                                     int64_t k_rows)
{
    struct reach reach = reach_of(l, sight);
    bool left = q_start + q_rows - 1 - reach.left > k_start;
    bool right = q_start + reach.right < k_start + k_rows - 1;
    return (struct cofi_band){left || right ? q_start - k_start : 0,
                              left ? reach.left : INT64_MAX, right ? reach.right : INT64_MAX};
}

void cofi_attention_keys_of(const cof_layout *l, const struct cofi_sight *sight, int64_t q_start,
                            int64_t q_rows, int64_t *begin, int64_t *end)
{
    struct reach reach = reach_of(l, sight);
    *begin = q_start > reach.left ? q_start - reach.left : 0;
    *end = q_start + q_rows + reach.right < l->n_rows ? q_start + q_rows + reach.right : l->n_rows;
}

static bool is_full(const struct cofi_pair *p)
{
    return p->band.left == INT64_MAX && p->band.right == INT64_MAX;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* One query chunk against one key chunk; false when nothing is visible. */
static bool make_pair(const cof_layout *l, const struct cofi_sight *sight, int rank, int half,
                      int owner, int owner_half, struct cofi_pair *pair)
{
    int64_t q = cof_layout_chunk(l, rank, half), k = cof_layout_chunk(l, owner, owner_half);
    int64_t q_start = cof_layout_chunk_start(l, q), k_start = cof_layout_chunk_start(l, k);
    int64_t q_stop = q_start + cof_layout_chunk_rows(l, q);
    int64_t k_stop = k_start + cof_layout_chunk_rows(l, k);
    struct reach reach = reach_of(l, sight);
    if (q_start == q_stop)
        return false;
    int64_t k_begin = most(k_start, q_start - reach.left);
    int64_t k_end = least(k_stop, q_stop + reach.right);
    if (k_begin >= k_end)
        return false;
    int64_t q_begin = most(q_start, k_begin - reach.right);
    int64_t q_end = least(q_stop, k_end + reach.left);
    *pair = (struct cofi_pair){
        .q_begin = cof_layout_half_start(l, rank, half) + q_begin - q_start,
        .q_rows = q_end - q_begin,
        .k_begin = cof_layout_half_start(l, owner, owner_half) + k_begin - k_start,
        .k_rows = k_end - k_begin,
        .band = cofi_attention_band(l, sight, q_begin, q_end - q_begin, k_begin, k_end - k_begin),
    };
    return true;
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

int cofi_attention_pairs(const cof_layout *l, const struct cofi_sight *sight, int rank, int owner,
                         struct cofi_pair *pairs)
{
    int n = 0, halves = cof_layout_halves(l);
    for (int a = 0; a < halves; a++) {
        for (int b = 0; b < halves; b++) {
            struct cofi_pair pair;
            if (make_pair(l, sight, rank, a, owner, b, &pair) &&
                (n == 0 || !join(&pairs[n - 1], &pair)))
                pairs[n++] = pair;
        }
        if (n >= 2 && join(&pairs[n - 2], &pairs[n - 1])) /* the row of pairs above this one */
            n--;
    }
    return n;
}

int cofi_attention_own_pairs(const cof_layout *l, const struct cofi_sight *sight, int rank,
                             struct cofi_pair *pairs, int *n_first)
{
    int n = 0, halves = cof_layout_halves(l);
    int64_t rows = cof_layout_valid_rows(l, rank); /* one behind the other: padding is behind all */
    *n_first = 0;
    if (rows == 0)
        return 0;
    if (!sight->has_window) { /* causal by local numbers as by global ones */
        int64_t right = sight->mask == COF_MASK_CAUSAL && rows > 1 ? 0 : INT64_MAX;
        pairs[0] = (struct cofi_pair){0, rows, 0, rows, {0, INT64_MAX, right}};
        return *n_first = 1;
    }
    for (int a = 0; a < halves; a++)
        n += make_pair(l, sight, rank, a, rank, a, &pairs[n]);
    *n_first = n;
    for (int a = 0; a < halves && halves > 1; a++)
        n += make_pair(l, sight, rank, a, rank, 1 - a, &pairs[n]);
    return n;
}

int cofi_attention_needed(const cof_layout *l, const struct cofi_sight *sight, int rank, int owner,
                          struct cofi_rows_range rows[2])
{
    int n = 0;
    for (int half = 0; half < cof_layout_halves(l); half++) {
        int64_t chunk = cof_layout_chunk(l, owner, half), begin, end;
        if (!cof_layout_needed_rows(l, sight->mask, sight->has_window ? &sight->window : NULL, rank,
                                    chunk, &begin, &end))
            continue;
        int64_t from = cof_layout_half_start(l, owner, half) - cof_layout_chunk_start(l, chunk);
        if (n == 1 && rows[0].end == from + begin)
            rows[0].end = from + end;
        else
            rows[n++] = (struct cofi_rows_range){from + begin, from + end};
    }
    return n;
}

void cofi_attention_needed_rows(const cof_layout *l, const struct cofi_sight *sight, int rank,
                                int owner, int64_t *begin, int64_t *end)
{
    struct cofi_rows_range rows[2];
    int n = cofi_attention_needed(l, sight, rank, owner, rows);
    *begin = n ? rows[0].begin : 0;
    *end = n ? rows[n - 1].end : 0;
}
