/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CPUs: what is done to the rows of a part. */
#include <math.h>
#include <string.h>

#include "backend/cpu/vec_exact.h"
#include "core/faults.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_cpu.h"

/* Bytes of rows that a task takes. */
#define TASK_BYTES (INT64_C(1) << 15)

_Static_assert(COFI_ARN_SEGMENT == COFI_EXACT_SEGMENT, "one definition of the sum of squares");

static bool is_exact(const struct cofi_arn_plan *plan)
{
    return plan->params.rounding == COF_ALLREDUCE_EXACT ||
           plan->params.variant == COF_ALLREDUCE_ONLY; /* rounded once, where it is stored */
}

/* fn for the rows [begin, end) of the part, a few at a time. */
static void each_rows(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p, int64_t begin,
                      int64_t end, cofi_task_fn fn)
{
    int64_t rows = TASK_BYTES / p->plan->row_bytes;
    p->begin = begin;
    p->end = end;
    p->per_task = p->state->wide_row ? end - begin + !(end - begin) : rows < 1 ? 1 : rows;
    cofi_cpu_parallel(s, (end - begin + p->per_task - 1) / p->per_task, fn, p);
}

static int64_t task_end(const struct cofi_arn_cpu_part *p, int64_t begin)
{
    return p->end - begin < p->per_task ? p->end : begin + p->per_task;
}

static void publish_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct cofi_arn_cpu_part *p = arg;
    int64_t row = p->begin + task * p->per_task, end = task_end(p, row);
    size_t row_bytes = (size_t)p->plan->row_bytes;
    char *to = cofi_arena_data(p->plan->binding.arena) + p->half + (size_t)row * row_bytes;
    const char *from = p->call->x.data + (p->first + row) * p->call->x.pitch;
    if (p->call->x.pitch == p->plan->row_bytes) {
        memcpy(to, from, (size_t)(end - row) * row_bytes);
        return;
    }
    for (; row < end; row++, to += row_bytes, from += p->call->x.pitch)
        memcpy(to, from, row_bytes);
}

void cofi_arn_cpu_publish(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p)
{
    each_rows(s, p, 0, p->n, publish_task);
}

static void share_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct cofi_arn_cpu_part *p = arg;
    const struct cofi_arn_plan *plan = p->plan;
    bool is_wide = p->state->sizes.sums != plan->elem;
    int64_t row = p->begin + task * p->per_task, end = task_end(p, row);
    char *to = cofi_arena_data(plan->binding.arena) + p->sums;
    for (; row < end; row++) {
        const void *src[COFI_ARN_MAX_RANKS];
        char *sum = to + (row - p->share) * p->state->sizes.sums_row_bytes;
        for (int r = 0; r < plan->n_ranks; r++)
            src[r] = p->x[r] + row * p->x_pitch[r];
        cofi_exact_row(cofi_exact(), plan->elem, plan->elem,
                       &(struct cofi_exact_row){.src = src, .n_src = plan->n_ranks,
                                                .n = plan->params.hidden, .exact = is_exact(plan),
                                                .out = is_wide ? NULL : sum,
                                                .z = is_wide ? (float *)(void *)sum : NULL});
    }
}

void cofi_arn_cpu_reduce_share(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p,
                               int64_t begin, int64_t end)
{
    each_rows(s, p, begin, end, share_task);
}

/* A row's sources: all ranks' x, or the sums of the rank whose share it is in. */
static int sources_of(const struct cofi_arn_cpu_part *p, int64_t row,
                      const void *src[COFI_ARN_MAX_RANKS])
{
    int n_ranks = p->plan->n_ranks, owner = 0;
    for (int r = 0; r < n_ranks && !p->two_shots; r++)
        src[r] = p->x[r] + row * p->x_pitch[r];
    if (!p->two_shots)
        return n_ranks;
    while (cofi_arn_cpu_share_begin(p->n, owner + 1, n_ranks) <= row)
        owner++;
    row -= cofi_arn_cpu_share_begin(p->n, owner, n_ranks);
    src[0] = p->sums_of[owner] + row * p->state->sizes.sums_row_bytes;
    return 1;
}

static void *at_row(const struct cofi_arn_rows *rows, int64_t row)
{
    return rows->data ? rows->data + row * rows->pitch : NULL;
}

static void finish_row(const struct cofi_arn_cpu_part *p, int64_t row, float *z)
{
    const struct cofi_arn_plan *plan = p->plan;
    const cof_allreduce_rmsnorm_params *params = &plan->params;
    const void *src[COFI_ARN_MAX_RANKS];
    char *sum_out = at_row(&p->call->residual_out, p->first + row);
    char *norm_out = at_row(&p->call->norm_out, p->first + row);
    bool normed = params->variant != COF_ALLREDUCE_ONLY, keeps_z = cofi_arn_cpu_z_is_wide(plan);
    float squares;
    struct cofi_exact_row r = {.src = src, .n_src = sources_of(p, row, src), .n = params->hidden,
                               .exact = is_exact(plan),
                               .residual = at_row(&p->call->residual, p->first + row),
                               .out = sum_out || keeps_z ? sum_out : norm_out,
                               .z = keeps_z ? z : NULL, .squares = normed ? &squares : NULL};
    cofi_exact_row(cofi_exact(), p->two_shots ? p->state->sizes.sums : plan->elem, plan->elem, &r);
    if (!normed)
        return;
    float mean = squares / (float)params->hidden, inv = 1.0f / sqrtf(mean + params->eps);
    cofi_exact_norm(cofi_exact(), plan->elem,
                    &(struct cofi_exact_norm){.dst = norm_out, .z = keeps_z ? z : r.out,
                                              .z_elem = keeps_z ? COFI_ELEM_F32 : plan->elem,
                                              .weight = p->call->weight,
                                              .weight_elem = plan->weight_elem, .inv = inv,
                                              .bias = params->weight_bias != 0,
                                              .n = params->hidden});
}

static void finish_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    const struct cofi_arn_cpu_part *p = arg;
    float *z = p->state->wide_row ? p->state->wide_row : worker->scratch;
    int64_t row = p->begin + task * p->per_task, end = task_end(p, row);
    for (; row < end; row++)
        finish_row(p, row, z);
}

void cofi_arn_cpu_finish(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p)
{
    each_rows(s, p, 0, p->n, finish_task);
}

void cofi_arn_cpu_find_x(struct cofi_arn_cpu_part *p, int peer, int64_t begin, int64_t end)
{
    struct cofi_arn_plan *plan = p->plan;
    const struct cofi_arn_rows *x = &p->call->x;
    bool in_arena = p->call->x_source != 0;
    size_t offset = in_arena ? (size_t)(p->call->x_source - 1 + p->first * x->pitch) : p->half;
    p->x_pitch[peer] = peer == plan->rank || in_arena ? x->pitch : plan->row_bytes;
    p->x[peer] = peer == plan->rank ? x->data + p->first * x->pitch
                                    : cofi_arena_source(plan->binding.arena, peer, offset);
    if (p->x[peer])
        return;
    char *staging = p->state->stage_x + (size_t)peer * p->state->sizes.half_bytes;
    for (int64_t row = begin; row < end; row++)
        cofi_arena_get(plan->binding.arena, staging + row * plan->row_bytes, peer,
                       offset + (size_t)(row * p->x_pitch[peer]), (size_t)plan->row_bytes);
    p->x_pitch[peer] = plan->row_bytes;
    p->x[peer] = staging;
}

void cofi_arn_cpu_find_sums(struct cofi_arn_cpu_part *p, int owner)
{
    struct cofi_arn_plan *plan = p->plan;
    cof_arena *arena = plan->binding.arena;
    int64_t begin = cofi_arn_cpu_share_begin(p->n, owner, plan->n_ranks);
    int64_t rows = cofi_arn_cpu_share_begin(p->n, owner + 1, plan->n_ranks) - begin;
    p->sums_of[owner] = owner == plan->rank ? cofi_arena_data(arena) + p->sums
                                            : cofi_arena_source(arena, owner, p->sums);
    if (p->sums_of[owner])
        return;
    char *staging = p->state->stage_sums + begin * p->state->sizes.sums_row_bytes;
    cofi_arena_get(arena, staging, owner, p->sums,
                   (size_t)(rows * p->state->sizes.sums_row_bytes));
    p->sums_of[owner] = staging;
}

void cofi_arn_cpu_fill_nan(const struct cofi_arn_plan *plan, const struct cofi_arn_rows *rows,
                           int64_t n)
{
    for (int64_t row = 0; row < n && rows->data; row++) {
        uint16_t *half = at_row(rows, row);
        uint32_t *word = at_row(rows, row);
        for (int64_t i = 0; i < plan->params.hidden; i++)
            if (plan->elem == COFI_ELEM_F32)
                word[i] = 0x7fffffff;
            else
                half[i] = 0x7fff;
    }
}
