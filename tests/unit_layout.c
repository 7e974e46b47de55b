/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* layout.h against brute force: every row has one owner, inverses agree, needs() is the mask. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cofuse/layout.h"

#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "unit_layout.c:%d: %s [kind %d chunking %d P %d S %lld]\n", __LINE__,  \
                    #cond, (int)now.kind, (int)now.chunking, now.n_ranks, (long long)now.n_rows);  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { MAX_S = 3000 };

static cof_layout now; /* the layout under test, for the message */

/* Rows and their owners, from the definition alone. */
static void check_rows(const cof_layout *l)
{
    static int seen[MAX_S];
    int64_t s = l->n_rows, n = cof_layout_chunks(l), total = 0, next = 0;
    memset(seen, 0, sizeof seen);
    REQUIRE(n == (l->kind == COF_LAYOUT_ZIGZAG ? 2 : 1) * (int64_t)l->n_ranks);
    for (int64_t j = 0; j < n; j++) { /* chunks cover 0 .. S-1 in order */
        int64_t c = (s + n - 1) / n, rows = cof_layout_chunk_rows(l, j);
        int64_t start = l->chunking == COF_CHUNKING_PADDED ? j * c : j * s / n;
        REQUIRE(cof_layout_chunk_start(l, j) == start);
        REQUIRE(rows == 0 || start == next);
        next += rows;
        int owner = cof_layout_chunk_owner(l, j), half = cof_layout_chunk_half(l, j);
        REQUIRE(owner == (j < l->n_ranks ? j : 2 * l->n_ranks - 1 - j));
        REQUIRE(half == (j < l->n_ranks ? 0 : 1));
        REQUIRE(cof_layout_chunk(l, owner, half) == j);
    }
    REQUIRE(next == s);
    for (int r = 0; r < l->n_ranks; r++) {
        int64_t local = cof_layout_local_rows(l, r), valid = 0, c = (s + n - 1) / n;
        if (l->chunking == COF_CHUNKING_PADDED)
            REQUIRE(local == n / l->n_ranks * c);
        for (int64_t i = 0; i < local; i++) {
            int64_t g = cof_layout_global_row(l, r, i);
            if (g == -1)
                continue; /* padding */
            REQUIRE(g >= 0 && g < s && !seen[g]++);
            REQUIRE(cof_layout_owner(l, g) == r && cof_layout_local_row(l, g) == i);
            valid++;
        }
        REQUIRE(valid == cof_layout_valid_rows(l, r));
        REQUIRE(l->chunking == COF_CHUNKING_PADDED || valid == local);
        REQUIRE(cof_layout_global_row(l, r, local) == -1);
        REQUIRE(cof_layout_global_row(l, r, -1) == -1);
        total += valid;
    }
    REQUIRE(total == s);
    REQUIRE(cof_layout_owner(l, s) == -1 && cof_layout_owner(l, -1) == -1);
    REQUIRE(cof_layout_local_row(l, s) == -1 && cof_layout_local_row(l, -1) == -1);
}

static void check_needs(const cof_layout *l)
{
    static int owner[MAX_S];
    for (int64_t i = 0; i < l->n_rows; i++)
        owner[i] = cof_layout_owner(l, i);
    for (int mask = COF_MASK_NONE; mask <= COF_MASK_CAUSAL; mask++)
        for (int r = 0; r < l->n_ranks; r++)
            for (int64_t chunk = 0; chunk < cof_layout_chunks(l); chunk++) {
                int64_t begin = cof_layout_chunk_start(l, chunk);
                int64_t end = begin + cof_layout_chunk_rows(l, chunk);
                int wanted = 0;
                for (int64_t i = 0; i < l->n_rows; i++)
                    for (int64_t j = begin; j < end && owner[i] == r; j++)
                        wanted |= mask == COF_MASK_NONE || j <= i;
                REQUIRE(cof_layout_needs(l, (cof_mask)mask, r, chunk) == wanted);
            }
}

/* Causal zigzag: ranks differ by at most one row of S keys for each of their two chunks. */
static void check_balance(const cof_layout *l)
{
    int64_t least = INT64_MAX, most = 0;
    for (int r = 0; r < l->n_ranks; r++) {
        int64_t work = 0;
        for (int64_t i = 0; i < cof_layout_local_rows(l, r); i++)
            work += cof_layout_global_row(l, r, i) + 1;
        least = work < least ? work : least;
        most = work > most ? work : most;
    }
    REQUIRE(most - least <= 2 * l->n_rows);
}

static void check_large(void)
{
    static const int ranks[] = {1, 3, 7, 1000, 1 << 20};
    for (int i = 0; i < 5; i++)
        for (int kind = 0; kind < 2; kind++)
            for (int chunking = 0; chunking < 2; chunking++)
                for (int64_t s = ((int64_t)1 << 56) - 1; s <= (int64_t)1 << 56; s++) {
                    now = (cof_layout){(cof_layout_kind)kind, (cof_chunking)chunking, ranks[i], s};
                    int64_t n = cof_layout_chunks(&now);
                    int64_t rows[] = {0, 1, s / 3, s / 2, s - 2, s - 1};
                    for (int k = 0; k < 6; k++) {
                        int r = cof_layout_owner(&now, rows[k]);
                        int64_t local = cof_layout_local_row(&now, rows[k]);
                        REQUIRE(r >= 0 && local >= 0);
                        REQUIRE(cof_layout_global_row(&now, r, local) == rows[k]);
                    }
                    for (int64_t j = 1; j < n; j += n / 97 + 1) {
                        int64_t end = cof_layout_chunk_start(&now, j - 1) +
                                      cof_layout_chunk_rows(&now, j - 1);
                        REQUIRE(end == cof_layout_chunk_start(&now, j));
                    }
                    REQUIRE(cof_layout_chunk_start(&now, n - 1) +
                                cof_layout_chunk_rows(&now, n - 1) == s);
                }
}

static void check_errors(void)
{
    cof_layout good = {COF_LAYOUT_ZIGZAG, COF_CHUNKING_BALANCED, 4, 100};
    cof_layout bad[] = {good, good, good, good, good, good};
    bad[0].n_ranks = 0;
    bad[1].n_ranks = (1 << 20) + 1;
    bad[2].n_rows = -1;
    bad[3].n_rows = ((int64_t)1 << 56) + 1;
    bad[4].kind = (cof_layout_kind)2;
    bad[5].chunking = (cof_chunking)7;
    for (int i = 0; i <= 6; i++) {
        const cof_layout *l = i < 6 ? &bad[i] : NULL;
        now = l ? *l : good;
        REQUIRE(cof_layout_chunks(l) == 0 && cof_layout_halves(l) == 0);
        REQUIRE(cof_layout_chunk(l, 0, 0) == -1 && cof_layout_chunk_owner(l, 0) == -1);
        REQUIRE(cof_layout_chunk_half(l, 0) == -1 && cof_layout_chunk_start(l, 0) == -1);
        REQUIRE(cof_layout_chunk_rows(l, 0) == 0 && cof_layout_local_rows(l, 0) == 0);
        REQUIRE(cof_layout_valid_rows(l, 0) == 0 && cof_layout_half_start(l, 0, 0) == -1);
        REQUIRE(cof_layout_global_row(l, 0, 0) == -1 && cof_layout_owner(l, 0) == -1);
        REQUIRE(cof_layout_local_row(l, 0) == -1);
        REQUIRE(cof_layout_needs(l, COF_MASK_NONE, 0, 0) == 0);
    }
    now = good;
    REQUIRE(cof_layout_chunk(&good, 4, 0) == -1 && cof_layout_chunk(&good, -1, 0) == -1);
    REQUIRE(cof_layout_chunk(&good, 0, 2) == -1 && cof_layout_chunk(&good, 0, -1) == -1);
    REQUIRE(cof_layout_chunk_owner(&good, 8) == -1 && cof_layout_chunk_owner(&good, -1) == -1);
    REQUIRE(cof_layout_chunk_start(&good, 8) == -1 && cof_layout_chunk_rows(&good, 8) == 0);
    REQUIRE(cof_layout_half_start(&good, 0, 2) == -1 && cof_layout_half_start(&good, 4, 0) == -1);
    REQUIRE(cof_layout_local_rows(&good, 4) == 0 && cof_layout_valid_rows(&good, -1) == 0);
    REQUIRE(cof_layout_needs(&good, COF_MASK_NONE, 4, 0) == 0);
    REQUIRE(cof_layout_needs(&good, COF_MASK_NONE, 0, 8) == 0);
    REQUIRE(cof_layout_needs(&good, (cof_mask)2, 0, 0) == 0);
    cof_layout one = {COF_LAYOUT_CONTIGUOUS, COF_CHUNKING_BALANCED, 4, 100};
    REQUIRE(cof_layout_chunk(&one, 0, 1) == -1 && cof_layout_half_start(&one, 0, 1) == -1);
}

int main(void)
{
    static const int64_t odd[] = {97, 127, 129, 698, 1021, 2999};
    for (int p = 1; p <= 12; p++)
        for (int kind = 0; kind < 2; kind++)
            for (int chunking = 0; chunking < 2; chunking++) {
                for (int64_t i = 0; i <= 60 + 6; i++) {
                    int64_t s = i <= 60 ? i : odd[i - 61];
                    now = (cof_layout){(cof_layout_kind)kind, (cof_chunking)chunking, p, s};
                    check_rows(&now);
                    if (s <= 60)
                        check_needs(&now);
                    if (kind == COF_LAYOUT_ZIGZAG && chunking == COF_CHUNKING_BALANCED)
                        check_balance(&now);
                }
            }
    now = (cof_layout){COF_LAYOUT_ZIGZAG, COF_CHUNKING_PADDED, 4, 698};
    for (int r = 0; r < 4; r++)
        REQUIRE(cof_layout_valid_rows(&now, r) == (r == 0 ? 170 : 176));
    check_large();
    check_errors();
    return 0;
}
