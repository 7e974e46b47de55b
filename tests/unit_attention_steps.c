/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Windows and the steps of a forward call on devices against the mask itself: every visible pair of
 * query and key is computed once, no other, and what is merged is found where it was left. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/attention/attention_steps.h"

static struct cofi_attention_steps_spec now;

static void fail(int line, const char *what)
{
    const struct cofi_sight *s = &now.sight;
    fprintf(stderr,
            "unit_attention_steps.c:%d: %s [kind %d chunking %d P %d S %lld rank %d mask %d window "
            "%d %lld:%lld gathers %d exact %d]\n",
            line, what, (int)now.layout.kind, (int)now.layout.chunking, now.layout.n_ranks,
            (long long)now.layout.n_rows, now.rank, (int)s->mask, s->has_window,
            (long long)s->window.left, (long long)s->window.right, now.gathers, now.is_exact);
    exit(1);
}

#ifdef __SANITIZE_ADDRESS__ /* no other lines with more ranks, ten times as slow */
enum { MAX_P = 5 };
#else
enum { MAX_P = 12 };
#endif

#define REQUIRE(cond) ((cond) ? (void)0 : fail(__LINE__, #cond))

enum { MAX_S = 130 };

static int n_checked;

static bool is_visible(int64_t i, int64_t j)
{
    const struct cofi_sight *s = &now.sight;
    return (s->mask != COF_MASK_CAUSAL || j <= i) &&
           (!s->has_window || ((s->window.left < 0 || i - s->window.left <= j) &&
                               (s->window.right < 0 || j <= i + s->window.right)));
}

/* From the first to the last key of the chunk that the rank sees. */
static void check_needed_rows(void)
{
    const cof_layout *l = &now.layout;
    for (int64_t chunk = 0; chunk < cof_layout_chunks(l); chunk++) {
        int64_t first = cof_layout_chunk_start(l, chunk), begin = 0, end = 0, b, e;
        for (int64_t j = first; j < first + cof_layout_chunk_rows(l, chunk); j++)
            for (int64_t row = 0; row < cof_layout_local_rows(l, now.rank); row++) {
                int64_t i = cof_layout_global_row(l, now.rank, row);
                if (i < 0 || !is_visible(i, j))
                    continue;
                begin = end == 0 ? j : begin;
                end = j + 1;
            }
        const cof_window *window = now.sight.has_window ? &now.sight.window : NULL;
        REQUIRE(cof_layout_needed_rows(l, now.sight.mask, window, now.rank, chunk, &b, &e) ==
                (end > 0));
        REQUIRE(b == begin && e == end);
        if (!window)
            REQUIRE(cof_layout_needs(l, now.sight.mask, now.rank, chunk) == (end > 0));
    }
}

/* Global row of each row of the buffer of a step; -1: nothing was fetched there. Own keys: 0. */
static void fill_buffer(const struct cofi_attention_steps *s, int step, int64_t *global)
{
    const cof_layout *l = &now.layout;
    for (int64_t i = 0; i < MAX_S; i++)
        global[i] = step == 0 ? cof_layout_global_row(l, now.rank, i) : -1;
    for (int f = 0; f < s->n_fetches; f++) {
        const struct cofi_attention_fetch *x = &s->fetches[f];
        if (!now.gathers && f != step - 1)
            continue;
        for (int r = 0; r < x->n_ranges; r++)
            for (int64_t row = x->rows[r].begin; row < x->rows[r].end; row++) {
                int64_t to = x->to[r] + row - x->rows[r].begin;
                REQUIRE(to >= 0 && to < s->buffer_rows && global[to] == -1);
                global[to] = cof_layout_global_row(l, x->owner, row);
                REQUIRE(global[to] >= 0);
            }
    }
    for (int64_t row = 0; now.gathers && row < cof_layout_local_rows(l, now.rank); row++) {
        int64_t i = cof_layout_global_row(l, now.rank, row); /* own keys lie there too */
        if (i >= 0)
            global[i] = i;
    }
}

static bool in_band(const struct cofi_band *b, int64_t i, int64_t j)
{
    return (b->left == INT64_MAX || j >= i + b->diag - b->left) &&
           (b->right == INT64_MAX || j <= i + b->diag + b->right);
}

/* Where the results of local rows lie. */
enum place { NOWHERE, IN_O, IN_ACC };

static void check_merges(const struct cofi_attention_steps *s, const struct cofi_attention_job *job,
                         enum place *place)
{
    int64_t next = job->pair.q_begin;
    if (job->is_first) {
        REQUIRE(job->n_merges == 0);
        for (int64_t i = 0; i < job->pair.q_rows; i++) {
            REQUIRE(place[job->pair.q_begin + i] == NOWHERE);
            place[job->pair.q_begin + i] = IN_O;
        }
        return;
    }
    REQUIRE(job->pair.q_rows <= s->partial_rows);
    for (int m = 0; m < job->n_merges; m++) {
        const struct cofi_attention_merged *x = &s->merged[job->first_merge + m];
        REQUIRE(job->first_merge + m < s->n_merged && x->begin == next && x->rows > 0);
        REQUIRE(!x->to_acc || (s->has_acc && !now.is_exact));
        next = x->begin + x->rows;
        for (int64_t i = x->begin; i < next; i++) {
            REQUIRE(place[i] == (x->from_acc ? IN_ACC : IN_O));
            place[i] = x->to_acc ? IN_ACC : IN_O;
        }
    }
    REQUIRE(next == job->pair.q_begin + job->pair.q_rows);
}

/* In the ring a fetch is what its owner puts: the rows that it knows from the layout, one range
 * behind the other, in a slot for the most rows of any rank. */
static void check_put(const struct cofi_attention_fetch *x)
{
    struct cofi_rows_range rows[2];
    int64_t to = 0;
    REQUIRE(cofi_attention_needed(&now.layout, &now.sight, now.rank, x->owner, rows) ==
            x->n_ranges);
    for (int r = 0; r < x->n_ranges; r++) {
        REQUIRE(x->rows[r].begin == rows[r].begin && x->rows[r].end == rows[r].end);
        REQUIRE(rows[r].begin < rows[r].end && x->to[r] == to);
        to += rows[r].end - rows[r].begin;
    }
    REQUIRE(to > 0 && to <= cofi_plan_max_rows(&now.layout));
}

/* Every owner once, from the rank before this one down; all whose keys are seen. */
static void check_owners(const struct cofi_attention_steps *s)
{
    const int n = now.layout.n_ranks;
    int last = 0, n_seen = 0;
    for (int f = 0; f < s->n_fetches; f++) {
        int step = (now.rank - s->fetches[f].owner + n) % n;
        REQUIRE(step > last);
        last = step;
        if (!now.gathers)
            check_put(&s->fetches[f]);
    }
    for (int owner = 0; owner < n; owner++) {
        struct cofi_rows_range rows[2];
        n_seen += owner != now.rank &&
                  cofi_attention_needed(&now.layout, &now.sight, now.rank, owner, rows) > 0;
    }
    REQUIRE(n_seen == s->n_fetches);
}

static void check_steps(void)
{
    static int8_t n_seen[MAX_S][MAX_S]; /* local query row, global key row */
    static int64_t global[MAX_S];
    enum place place[MAX_S] = {NOWHERE};
    struct cofi_attention_steps s;
    const cof_layout *l = &now.layout;
    REQUIRE(cofi_attention_steps_make(&now, &s) == COF_OK);
    memset(n_seen, 0, sizeof n_seen);
    check_owners(&s);
    for (int n = 0, step = -1; n < s.n_jobs; n++) {
        const struct cofi_attention_job *job = &s.jobs[n];
        const struct cofi_pair *p = &job->pair;
        REQUIRE(job->step >= step && job->step <= (now.gathers ? 1 : s.n_fetches));
        if (job->step != step)
            fill_buffer(&s, step = job->step, global);
        REQUIRE(p->q_rows > 0 && p->k_rows > 0);
        for (int64_t i = 0; i < p->q_rows; i++)
            for (int64_t j = 0; j < p->k_rows; j++) {
                REQUIRE(global[p->k_begin + j] >= 0);
                if (in_band(&p->band, i, j))
                    n_seen[p->q_begin + i][global[p->k_begin + j]]++;
            }
        check_merges(&s, job, place);
    }
    for (int64_t row = 0; row < cof_layout_local_rows(l, now.rank); row++) {
        int64_t i = cof_layout_global_row(l, now.rank, row);
        REQUIRE(place[row] == (i < 0 ? NOWHERE : IN_O));
        for (int64_t j = 0; j < l->n_rows; j++)
            REQUIRE(n_seen[row][j] == (i >= 0 && is_visible(i, j)));
    }
    cofi_attention_steps_free(&s);
    n_checked++;
}

/* Pairs of all owners, as the CPU takes them: the same keys, each once. */
static void check_pairs(void)
{
    static int8_t n_seen[MAX_S][MAX_S];
    const cof_layout *l = &now.layout;
    memset(n_seen, 0, sizeof n_seen);
    for (int owner = 0; owner < l->n_ranks; owner++) {
        struct cofi_pair pairs[COFI_MAX_PAIRS];
        struct cofi_rows_range rows[2];
        int64_t begin, end;
        int n = cofi_attention_pairs(l, &now.sight, now.rank, owner, pairs);
        int n_ranges = cofi_attention_needed(l, &now.sight, now.rank, owner, rows);
        cofi_attention_needed_rows(l, &now.sight, now.rank, owner, &begin, &end);
        REQUIRE((n > 0) == (n_ranges > 0) && (n > 0) == (begin < end));
        for (int k = 0; k < n; k++) {
            const struct cofi_pair *p = &pairs[k];
            bool is_fetched = false;
            for (int r = 0; r < n_ranges; r++)
                is_fetched |= p->k_begin >= rows[r].begin && p->k_begin + p->k_rows <= rows[r].end;
            REQUIRE(is_fetched && p->k_begin >= begin && p->k_begin + p->k_rows <= end);
            for (int64_t i = 0; i < p->q_rows; i++)
                for (int64_t j = 0; j < p->k_rows; j++)
                    if (in_band(&p->band, i, j))
                        n_seen[p->q_begin + i][cof_layout_global_row(l, owner, p->k_begin + j)]++;
        }
    }
    for (int64_t row = 0; row < cof_layout_local_rows(l, now.rank); row++) {
        int64_t i = cof_layout_global_row(l, now.rank, row);
        for (int64_t j = 0; j < l->n_rows && i >= 0; j++)
            REQUIRE(n_seen[row][j] == is_visible(i, j));
    }
}

static void check_sight(struct cofi_sight sight)
{
    now.sight = sight;
    for (now.rank = 0; now.rank < now.layout.n_ranks; now.rank++) {
        check_needed_rows();
        check_pairs();
        for (int how = 0; how < 3; how++) {
            now.gathers = how == 2 && now.layout.n_ranks > 1;
            now.is_exact = how == 1;
            check_steps();
        }
    }
}

static void check_layout(void)
{
    const int64_t c = now.layout.n_rows / cof_layout_chunks(&now.layout);
    const int64_t sides[] = {-1, 0, 1, c - 1, c, c + 1, 3 * c};
    enum { N_SIDES = sizeof sides / sizeof sides[0] };
    for (int mask = COF_MASK_NONE; mask <= COF_MASK_CAUSAL; mask++) {
        check_sight((struct cofi_sight){.mask = (cof_mask)mask});
        for (int a = 0; a < N_SIDES; a++)
            for (int b = 0; b < N_SIDES; b += mask == COF_MASK_CAUSAL ? 3 : 1)
                check_sight((struct cofi_sight){(cof_mask)mask, true, {sides[a], sides[b]}});
    }
}

int main(void)
{
    static const int64_t sizes[] = {0, 1, 7, 24, 61};
    for (int p = 1; p <= MAX_P; p++)
        for (int kind = 0; kind < 2; kind++)
            for (int chunking = 0; chunking < 2; chunking++)
                for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                    now = (struct cofi_attention_steps_spec){
                        .layout = {(cof_layout_kind)kind, (cof_chunking)chunking, p, sizes[i]}};
                    check_layout();
                }
    printf("%d lists of steps\n", n_checked);
    return n_checked == 0;
}
