/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_check_data.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_ref.h"
#include "ops/check.h"

/* ---- rows ----------------------------------------------------------------------------------- */

/* Normal numbers that rows begin in at random; the first so many places, which are prime, and room
 * for the longest row. */
enum { N_PLACES = 65521, MAX_HIDDEN = 32768 };
static float numbers[N_PLACES + MAX_HIDDEN];

static void make_numbers(void)
{
    for (uint64_t i = 0; i < N_PLACES + MAX_HIDDEN; i++)
        numbers[i] = cofi_check_normal(1, 0, i);
}

enum { RESIDUAL = 1000, WEIGHT = 1001 }; /* beside ranks */

static uint64_t key_of(const struct cofi_arn_source *s, int set, int who, int64_t row)
{
    return cofi_check_random(s->seed, (uint64_t)who << 32 | (uint64_t)set, (uint64_t)row);
}

static void make_normal(uint64_t key, cof_dtype dtype, int64_t n, void *dst)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_numbers);
    const float *from = numbers + key % N_PLACES;
    for (int64_t h = 0; h < n; h++)
        cofi_check_store(dst, dtype, h, from[h]);
}

static void store_bits(void *dst, cof_dtype dtype, int64_t h, uint64_t bits)
{
    if (dtype.bits == 32)
        ((uint32_t *)dst)[h] = (uint32_t)bits;
    else
        ((uint16_t *)dst)[h] = (uint16_t)bits;
}

/* All bits of the exponent. */
static uint64_t exponent_mask(cof_dtype dtype)
{
    return dtype.bits == 32 ? 0x7f800000 : cofi_elem_of(dtype) == COFI_ELEM_F16 ? 0x7c00 : 0x7f80;
}

enum { ORDINARY, ONE_NAN, SUBNORMAL, ANY_BITS, ANY_FINITE, N_KINDS };

static void make_special(const struct cofi_arn_source *s, uint64_t key, int64_t row, bool has_nan,
                         void *dst)
{
    cof_dtype dtype = s->c->params.dtype;
    int kind = (int)(row % N_KINDS);
    uint64_t mask = exponent_mask(dtype);
    make_normal(key, dtype, s->c->params.hidden, dst);
    if (kind == ONE_NAN && has_nan)
        store_bits(dst, dtype, (int64_t)(key % (uint64_t)s->c->params.hidden),
                   mask | key >> 40 | 1);
    for (int64_t h = 0; kind >= SUBNORMAL && h < s->c->params.hidden; h++) {
        uint64_t bits = cofi_check_random(key, 1, (uint64_t)h);
        if (kind == SUBNORMAL || (kind == ANY_FINITE && (bits & mask) == mask))
            bits &= ~mask;
        store_bits(dst, dtype, h, bits);
    }
}

static void make_zeros(uint64_t key, cof_dtype dtype, int64_t n, void *dst)
{
    for (int64_t h = 0; h < n; h++)
        cofi_check_store(dst, dtype, h, cofi_check_random(key, 2, (uint64_t)h) & 1 ? -0.0f : 0.0f);
}

/* -0 + x has x's bits, whatever x is. */
static void make_pattern_row(const struct cofi_arn_source *s, int set, int who, int64_t row,
                             uint64_t key, void *dst)
{
    int64_t n = s->c->params.hidden;
    cof_dtype dtype = s->c->params.dtype;
    if (who == set % s->n_ranks) {
        for (int64_t h = 0; h < n; h++)
            store_bits(dst, dtype, h, (uint64_t)(row * n + h));
    } else if (set < s->n_ranks) {
        for (int64_t h = 0; h < n; h++)
            cofi_check_store(dst, dtype, h, -0.0f);
    } else {
        make_normal(key, dtype, n, dst);
    }
}

/* What is sent in call n lies there until call n + 2: who waits then for another rank's row must
 * not take it for that call's tag. A set is taken again every n_sets calls. */
static void make_epochs(const struct cofi_arn_source *s, int set, uint64_t key, void *dst)
{
    for (int64_t h = 0; h < s->c->params.hidden; h++) {
        uint64_t turn = cofi_check_random(key, 4, (uint64_t)h) % 2;
        store_bits(dst, s->c->params.dtype, h,
                   s->c->first_epoch + (uint64_t)set + 2 + turn * (uint64_t)s->c->n_sets);
    }
}

static void make_row(const struct cofi_arn_source *s, int set, int who, int64_t row, void *dst)
{
    const cof_allreduce_rmsnorm_params *p = &s->c->params;
    uint64_t key = key_of(s, set, who, row), hidden = (uint64_t)p->hidden;
    bool is_chosen = who == (int)((row + set) % s->n_ranks);
    switch (s->c->data) {
    case COFI_ARN_SPECIAL: make_special(s, key, row, is_chosen, dst); return;
    case COFI_ARN_ZERO: make_zeros(key, p->dtype, p->hidden, dst); return;
    case COFI_ARN_PATTERNS: make_pattern_row(s, set, who, row, key, dst); return;
    case COFI_ARN_EPOCHS:
        if (who < RESIDUAL)
            make_epochs(s, set, key, dst);
        else
            make_normal(key, p->dtype, p->hidden, dst);
        return;
    case COFI_ARN_INTEGER:
        for (uint64_t h = 0; h < hidden; h++)
            cofi_check_store(dst, p->dtype, (int64_t)h, cofi_check_integer(key, 3, h, 8));
        return;
    default: make_normal(key, p->dtype, p->hidden, dst);
    }
    if (s->c->data == COFI_ARN_OUTLIER && is_chosen)
        cofi_check_store(dst, p->dtype, (int64_t)(key % hidden),
                         cofi_elem_of(p->dtype) == COFI_ELEM_F16 ? 300 : 75000);
}

void cofi_arn_make_x(const struct cofi_arn_source *s, int set, int rank, int64_t row, void *dst)
{
    make_row(s, set, rank, row, dst);
}

void cofi_arn_make_residual(const struct cofi_arn_source *s, int set, int64_t row, void *dst)
{
    make_row(s, set, RESIDUAL, row, dst);
}

void cofi_arn_make_weight(const struct cofi_arn_source *s, void *dst)
{
    const cof_allreduce_rmsnorm_params *p = &s->c->params;
    cof_dtype dtype = p->weight_dtype.bits ? p->weight_dtype : p->dtype;
    make_normal(key_of(s, 0, WEIGHT, 0), dtype, p->hidden, dst);
    for (int64_t h = 0; s->c->max_error > 0 && h < p->hidden; h++)
        cofi_check_store(dst, dtype, h, 1 + cofi_check_load(dst, dtype, h) / 8);
}

/* ---- what must come out --------------------------------------------------------------------- */

static size_t row_bytes(const struct cofi_arn_case *c)
{
    return (size_t)(c->params.hidden * cofi_dtype_bytes(c->params.dtype));
}

size_t cofi_arn_expected_bytes(const struct cofi_arn_case *c)
{
    return 2 * (size_t)c->n_sets * (size_t)c->max_rows * row_bytes(c);
}

const char *cofi_arn_expected(const struct cofi_arn_case *c, const void *shared, int set,
                              bool is_norm)
{
    return (const char *)shared +
           (2 * (size_t)set + is_norm) * (size_t)c->max_rows * row_bytes(c);
}

/* Of this rank's threads. */
struct expecting {
    const struct cofi_arn_source *source;
    char *shared;
    const void *weight;
    pthread_mutex_t lock; /* of what follows */
    struct cofi_check_result *result;
    double max_error;
};

struct scratch {
    const void *x[COFI_ARN_MAX_RANKS];
    char *rows; /* of all ranks, and the residual */
    struct cofi_arn_exact *exact;
};

static void compare_exact(struct expecting *e, int set, int64_t row, const void *residual_out,
                          const void *norm_out, const struct cofi_arn_exact *exact)
{
    cof_dtype dtype = e->source->c->params.dtype;
    bool is_normed = e->source->c->params.variant != COF_ALLREDUCE_ONLY;
    for (int64_t h = 0; h < e->source->c->params.hidden; h++) {
        double sum = cofi_check_load(residual_out, dtype, h);
        double norm = is_normed ? cofi_check_load(norm_out, dtype, h) : 0;
        bool is_sum = !cofi_arn_ref_is_near(sum, exact[h].residual_out, exact[h].residual_slack,
                                            dtype);
        if (!is_sum && (!is_normed || cofi_arn_ref_is_near(norm, exact[h].norm_out,
                                                           exact[h].norm_slack, dtype)))
            continue;
        pthread_mutex_lock(&e->lock);
        cofi_check_fail(e->result, "the reference: %s[row %lld, element %lld] of set %d = %.9g, "
                        "in fp64 %.9g, too far", is_sum ? "residual_out" : "norm_out",
                        (long long)row, (long long)h, set, is_sum ? sum : norm,
                        is_sum ? exact[h].residual_out : exact[h].norm_out);
        pthread_mutex_unlock(&e->lock);
    }
}

/* Against fp64 without any rounding between. */
static void measure_error(struct expecting *e, const struct cofi_arn_ref *ref,
                          const void *norm_out, struct cofi_arn_exact *exact)
{
    cof_allreduce_rmsnorm_params params = *ref->params;
    struct cofi_arn_ref unrounded = *ref;
    double most = 0;
    params.rounding = COF_ALLREDUCE_EXACT;
    unrounded.params = &params;
    cofi_arn_ref_exact(&unrounded, exact);
    for (int64_t h = 0; h < params.hidden; h++)
        most = fmax(most, fabs(cofi_check_load(norm_out, params.dtype, h) - exact[h].norm_out));
    pthread_mutex_lock(&e->lock);
    e->max_error = fmax(e->max_error, most);
    pthread_mutex_unlock(&e->lock);
}

static void expect_row(struct expecting *e, int set, int64_t row, struct scratch *scratch)
{
    const struct cofi_arn_source *s = e->source;
    size_t bytes = row_bytes(s->c), at = (size_t)row * bytes;
    char *residual = scratch->rows + (size_t)s->n_ranks * bytes;
    char *residual_out = e->shared + (2 * (size_t)set * (size_t)s->c->max_rows) * bytes + at;
    char *norm_out = residual_out + (size_t)s->c->max_rows * bytes;
    for (int r = 0; r < s->n_ranks; r++) {
        scratch->x[r] = scratch->rows + (size_t)r * bytes;
        cofi_arn_make_x(s, set, r, row, scratch->rows + (size_t)r * bytes);
    }
    cofi_arn_make_residual(s, set, row, residual);
    struct cofi_arn_ref ref = {&s->c->params, s->n_ranks, scratch->x, residual, e->weight};
    cofi_arn_ref_bits(&ref, residual_out, norm_out);
    cofi_arn_ref_exact(&ref, scratch->exact);
    compare_exact(e, set, row, residual_out, norm_out, scratch->exact);
    if (s->c->max_error > 0)
        measure_error(e, &ref, norm_out, scratch->exact);
}

static cof_status expect_item(void *arg, int64_t item)
{
    struct expecting *e = arg;
    const struct cofi_arn_case *c = e->source->c;
    struct scratch scratch = {
        .rows = malloc((size_t)(e->source->n_ranks + 1) * row_bytes(c)),
        .exact = malloc((size_t)c->params.hidden * sizeof *scratch.exact)};
    bool has_room = scratch.rows && scratch.exact;
    if (has_room)
        expect_row(e, (int)(item / c->max_rows), item % c->max_rows, &scratch);
    free(scratch.rows);
    free(scratch.exact);
    COF_FAIL_IF(!has_room, COF_ERR_NOMEM, "check: no memory for rows of the reference");
    return COF_OK;
}

static cof_status judge_error(const struct cofi_job *job, struct expecting *e)
{
    double bound = e->source->c->max_error;
    COF_TRY(cofi_check_max(job->team, &e->max_error, 1));
    if (!(e->max_error <= bound))
        cofi_check_fail(e->result, "max error %.4g OVER %.4g", e->max_error, bound);
    else if (e->result->verdict == COFI_PASSED)
        cofi_check_append(e->result->text, sizeof e->result->text, " max %.4g<=%.4g", e->max_error,
                          bound);
    return COF_OK;
}

cof_status cofi_arn_expect(const struct cofi_job *job, const struct cofi_arn_source *source,
                           struct cofi_check_result *result)
{
    const struct cofi_arn_case *c = source->c;
    float *weight = malloc((size_t)c->params.hidden * sizeof *weight);
    COF_FAIL_IF(!weight, COF_ERR_NOMEM, "check: no memory");
    COF_FAIL_IF(cofi_arn_expected_bytes(c) > job->shared_bytes, COF_ERR_INTERNAL,
                "check: a case needs %zu shared bytes of %zu", cofi_arn_expected_bytes(c),
                job->shared_bytes);
    cofi_arn_make_weight(source, weight);
    struct expecting e = {.source = source, .shared = job->shared, .weight = weight,
                          .lock = PTHREAD_MUTEX_INITIALIZER, .result = result};
    cof_status status = cofi_check_share(job, c->n_sets * c->max_rows, expect_item, &e);
    free(weight);
    if (status == COF_OK && c->max_error > 0)
        status = judge_error(job, &e);
    return status;
}
