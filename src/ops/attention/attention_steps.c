/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/attention/attention_steps.h"

#include <stdlib.h>

struct making {
    const struct cofi_attention_steps_spec *spec;
    struct cofi_attention_steps *steps;
    int64_t *bound; /* where jobs that are merged begin or end, ascending; n_bounds of them */
    int n_bounds;
    int *n_left, *n_done; /* merges of the rows between two bounds */
};

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- gather --------------------------------------------------------------------------------- */

/* A range that spans both halves of its owner lies in two places. */
static void fetch_to_global(const cof_layout *l, struct cofi_attention_fetch *f)
{
    int64_t second = cof_layout_halves(l) > 1 ? cof_layout_half_start(l, f->owner, 1) : INT64_MAX;
    if (f->n_ranges == 1 && f->rows[0].begin < second && second < f->rows[0].end) {
        f->rows[1] = (struct cofi_rows_range){second, f->rows[0].end};
        f->rows[0].end = second;
        f->n_ranges = 2;
    }
    for (int i = 0; i < f->n_ranges; i++)
        f->to[i] = cof_layout_global_row(l, f->owner, f->rows[i].begin);
}

static void add_halves(struct making *m)
{
    const cof_layout *l = &m->spec->layout;
    struct cofi_attention_steps *s = m->steps;
    for (int half = 0; half < cof_layout_halves(l); half++) {
        int64_t chunk = cof_layout_chunk(l, m->spec->rank, half);
        int64_t start = cof_layout_chunk_start(l, chunk), rows = cof_layout_chunk_rows(l, chunk);
        int64_t begin, end;
        if (rows == 0)
            continue;
        cofi_attention_keys_of(l, &m->spec->sight, start, rows, &begin, &end);
        s->jobs[s->n_jobs++] = (struct cofi_attention_job){
            .step = 1,
            .is_first = true,
            .pair = {cof_layout_half_start(l, m->spec->rank, half), rows, begin, end - begin,
                     cofi_attention_band(l, &m->spec->sight, start, rows, begin, end - begin)},
        };
    }
}

/* ---- ring ----------------------------------------------------------------------------------- */

static void add_own(struct making *m)
{
    struct cofi_pair pairs[COFI_MAX_PAIRS];
    struct cofi_attention_steps *s = m->steps;
    int n_first;
    int n = cofi_attention_own_pairs(&m->spec->layout, &m->spec->sight, m->spec->rank, pairs,
                                     &n_first);
    for (int i = 0; i < n; i++)
        s->jobs[s->n_jobs++] =
            (struct cofi_attention_job){.is_first = i < n_first, .pair = pairs[i]};
}

/* A range of an owner's rows, from row `to` of the buffer on. */
struct piece {
    struct cofi_rows_range rows;
    int64_t to;
};

/* The part of the pair whose keys are in the piece. */
static bool cut_pair(const struct cofi_pair *from, const struct piece *piece,
                     struct cofi_pair *pair)
{
    int64_t begin = most(from->k_begin, piece->rows.begin);
    int64_t end = from->k_begin + from->k_rows;
    end = end < piece->rows.end ? end : piece->rows.end;
    *pair = *from;
    pair->k_begin = piece->to + begin - piece->rows.begin;
    pair->k_rows = end - begin;
    if (pair->band.left != INT64_MAX || pair->band.right != INT64_MAX)
        pair->band.diag -= begin - from->k_begin;
    return begin < end;
}

static void add_pairs(struct making *m, const struct cofi_attention_fetch *f)
{
    struct cofi_pair pairs[COFI_MAX_PAIRS], pair;
    struct cofi_attention_steps *s = m->steps;
    int n = cofi_attention_pairs(&m->spec->layout, &m->spec->sight, m->spec->rank, f->owner, pairs);
    for (int i = 0; i < n; i++)
        for (int r = 0; r < f->n_ranges; r++) {
            const struct piece piece = {f->rows[r], f->to[r]};
            if (cut_pair(&pairs[i], &piece, &pair))
                s->jobs[s->n_jobs++] =
                    (struct cofi_attention_job){.step = s->n_fetches, .pair = pair};
        }
}

/* The fetch as one, its ranges one behind the other. */
static void add_fetch(struct making *m, struct cofi_attention_fetch f)
{
    struct cofi_attention_steps *s = m->steps;
    int64_t rows = f.rows[0].end - f.rows[0].begin;
    f.to[1] = rows;
    rows += f.n_ranges == 2 ? f.rows[1].end - f.rows[1].begin : 0;
    s->buffer_rows = most(s->buffer_rows, rows);
    s->fetches[s->n_fetches++] = f;
    add_pairs(m, &f);
}

static void add_steps(struct making *m)
{
    const struct cofi_attention_steps_spec *spec = m->spec;
    struct cofi_attention_steps *s = m->steps;
    const int n_ranks = spec->layout.n_ranks;
    if (!spec->gathers)
        add_own(m);
    for (int i = 1; i < n_ranks; i++) {
        struct cofi_attention_fetch f = {.owner = (spec->rank - i + n_ranks) % n_ranks};
        f.n_ranges =
            cofi_attention_needed(&spec->layout, &spec->sight, spec->rank, f.owner, f.rows);
        if (f.n_ranges == 0)
            continue;
        if (spec->gathers) {
            fetch_to_global(&spec->layout, &f);
            s->fetches[s->n_fetches++] = f;
        } else {
            add_fetch(m, f);
        }
    }
    if (spec->gathers) {
        s->buffer_rows = spec->layout.n_rows;
        add_halves(m);
    }
}

/* ---- merges --------------------------------------------------------------------------------- */

static int by_row(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void set_bounds(struct making *m)
{
    const struct cofi_attention_steps *s = m->steps;
    int n = 0;
    for (int i = 0; i < s->n_jobs; i++)
        if (!s->jobs[i].is_first) {
            m->bound[n++] = s->jobs[i].pair.q_begin;
            m->bound[n++] = s->jobs[i].pair.q_begin + s->jobs[i].pair.q_rows;
        }
    qsort(m->bound, (size_t)n, sizeof *m->bound, by_row);
    for (int i = 0; i < n; i++)
        if (m->n_bounds == 0 || m->bound[m->n_bounds - 1] != m->bound[i])
            m->bound[m->n_bounds++] = m->bound[i];
}

static bool covers(const struct cofi_attention_job *job, int64_t row)
{
    return !job->is_first && row >= job->pair.q_begin && row < job->pair.q_begin + job->pair.q_rows;
}

/* The rows of a job, cut where their past or future differs; not stored, they are only counted. */
static void cut_job(struct making *m, struct cofi_attention_job *job, bool stores)
{
    struct cofi_attention_steps *s = m->steps;
    job->first_merge = s->n_merged;
    job->n_merges = 0;
    for (int i = 0; i + 1 < m->n_bounds; i++) {
        if (!covers(job, m->bound[i]))
            continue;
        struct cofi_attention_merged part = {
            .begin = m->bound[i],
            .rows = m->bound[i + 1] - m->bound[i],
            .from_acc = m->n_done[i] > 0 && !m->spec->is_exact,
            .to_acc = m->n_left[i] > 1 && !m->spec->is_exact,
        };
        m->n_done[i]++;
        m->n_left[i]--;
        s->has_acc |= part.to_acc;
        struct cofi_attention_merged *last =
            stores && job->n_merges > 0 ? &s->merged[s->n_merged - 1] : NULL;
        if (last && last->from_acc == part.from_acc && last->to_acc == part.to_acc) {
            last->rows += part.rows;
            continue;
        }
        if (stores)
            s->merged[s->n_merged] = part;
        s->n_merged++;
        job->n_merges++;
    }
    s->partial_rows = job->is_first ? s->partial_rows : most(s->partial_rows, job->pair.q_rows);
}

/* First to count, at most so many; then to store. */
static void cut_jobs(struct making *m, bool stores)
{
    struct cofi_attention_steps *s = m->steps;
    s->n_merged = 0;
    for (int i = 0; i + 1 < m->n_bounds; i++) {
        m->n_left[i] = m->n_done[i] = 0;
        for (int j = 0; j < s->n_jobs; j++)
            m->n_left[i] += covers(&s->jobs[j], m->bound[i]);
    }
    for (int i = 0; i < s->n_jobs; i++)
        cut_job(m, &s->jobs[i], stores);
}

static cof_status make_merges(struct making *m)
{
    struct cofi_attention_steps *s = m->steps;
    size_t n = 2 * (size_t)s->n_jobs + 1;
    m->bound = malloc(n * (sizeof *m->bound + 2 * sizeof *m->n_left));
    COF_FAIL_IF(!m->bound, COF_ERR_NOMEM, "attention plan: no memory for %zu bounds", n);
    m->n_left = (int *)(void *)(m->bound + n);
    m->n_done = m->n_left + n;
    set_bounds(m);
    cut_jobs(m, false);
    s->merged = calloc((size_t)s->n_merged + 1, sizeof *s->merged);
    if (s->merged)
        cut_jobs(m, true);
    free(m->bound);
    COF_FAIL_IF(!s->merged, COF_ERR_NOMEM, "attention plan: no memory for %d merges", s->n_merged);
    return COF_OK;
}

/* ---- both ----------------------------------------------------------------------------------- */

cof_status cofi_attention_steps_make(const struct cofi_attention_steps_spec *spec,
                                     struct cofi_attention_steps *s)
{
    const size_t n = (size_t)spec->layout.n_ranks;
    struct making m = {.spec = spec, .steps = s};
    *s = (struct cofi_attention_steps){0};
    s->fetches = calloc(n + 1, sizeof *s->fetches);
    s->jobs = calloc((n + 1) * 2 * COFI_MAX_PAIRS, sizeof *s->jobs);
    cof_status status = COF_OK;
    if (!s->fetches || !s->jobs)
        status = COF_FAIL(COF_ERR_NOMEM, "attention plan: no memory for steps of %zu ranks", n);
    if (status == COF_OK) {
        add_steps(&m);
        status = make_merges(&m);
    }
    if (status != COF_OK)
        cofi_attention_steps_free(s);
    return status;
}

void cofi_attention_steps_free(struct cofi_attention_steps *s)
{
    free(s->fetches);
    free(s->jobs);
    free(s->merged);
    *s = (struct cofi_attention_steps){0};
}
