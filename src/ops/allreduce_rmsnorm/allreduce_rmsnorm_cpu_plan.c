/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CPUs: sizes, and a plan's own memory. */
#include <stdio.h>
#include <stdlib.h>

#include "core/config.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_cpu.h"
#include "symm/engine.h"
#include "symm/memory.h"

/* Bytes of a rank's rows in a part. */
#define PART_BYTES (INT64_C(1) << 20)
/* Above so many bytes of x, and with more than two ranks, two shots. Of 512 KiB they take 0.67 ms
 * against 0.74 with 4 ranks, 1.9 against 2.4 with 8, of 8 MiB 13.6 against 15.5, 29.7 against 41
 * (two cores of an EPYC, AVX2). */
#define ONE_SHOT_BYTES (INT64_C(1) << 17)

static bool may_take_two_shots(const struct cofi_arn_plan *plan)
{
    return plan->n_ranks > 1 && plan->params.algorithm != COF_ALLREDUCE_ONE_SHOT;
}

static bool is_staged(const struct cofi_arn_plan *plan)
{
    return plan->n_ranks > 1 && (!(plan->base.team->world->ops->caps & COFI_CAP_MAPPED) ||
                                 cofi_config_int(COFI_VAR_FORCE_STAGED) != 0);
}

static struct cofi_arn_cpu_sizes sizes_of(const struct cofi_arn_plan *plan)
{
    int64_t rows = PART_BYTES / plan->row_bytes;
    struct cofi_arn_cpu_sizes s = {.capacity = plan->params.max_tokens};
    s.capacity = rows < s.capacity ? rows : s.capacity;
    s.capacity = s.capacity < 1 ? 1 : s.capacity;
    s.sums = cofi_arn_cpu_z_is_wide(plan) ? COFI_ELEM_F32 : plan->elem;
    s.sums_row_bytes = plan->params.hidden * cofi_elem_bytes(s.sums);
    if (plan->n_ranks > 1)
        s.half_bytes = cofi_round_up((size_t)(s.capacity * plan->row_bytes), COFI_LINE);
    if (may_take_two_shots(plan)) {
        int64_t share = (s.capacity + plan->n_ranks - 1) / plan->n_ranks;
        s.sums_bytes = (size_t)(share * s.sums_row_bytes);
    }
    if (is_staged(plan)) {
        s.stage_x = (size_t)plan->n_ranks * s.half_bytes;
        s.stage_sums = s.sums_bytes ? (size_t)(s.capacity * s.sums_row_bytes) : 0;
    }
    size_t row = (size_t)plan->params.hidden * sizeof(float);
    s.wide_row = cofi_arn_cpu_z_is_wide(plan) && row > COFI_WORKER_SCRATCH_BYTES ? row : 0;
    return s;
}

void cofi_arn_cpu_lay_out(struct cofi_arn_plan *plan)
{
    struct cofi_arn_cpu_sizes s = sizes_of(plan);
    plan->payload_bytes = 2 * s.half_bytes + s.sums_bytes;
    plan->tagged_bytes = 0;
    plan->local_bytes = cofi_round_up(s.stage_x, COFI_LINE) +
                        cofi_round_up(s.stage_sums, COFI_LINE) +
                        cofi_round_up(s.wide_row, COFI_LINE);
}

static int64_t one_shot_bytes(const struct cofi_arn_plan *plan)
{
    const cof_allreduce_rmsnorm_params *p = &plan->params;
    if (p->algorithm != COF_ALLREDUCE_AUTO)
        return p->algorithm == COF_ALLREDUCE_ONE_SHOT ? INT64_MAX : 0;
    return p->one_shot_bytes ? p->one_shot_bytes : plan->n_ranks <= 2 ? INT64_MAX : ONE_SHOT_BYTES;
}

void cofi_arn_cpu_describe(const struct cofi_arn_plan *plan, char *text, size_t bytes)
{
    static const char *const names[] = {"auto", "one_shot", "two_shot"};
    char limit[48] = "";
    if (plan->params.algorithm == COF_ALLREDUCE_AUTO && one_shot_bytes(plan) == INT64_MAX)
        snprintf(limit, sizeof limit, " one_shot_bytes=all");
    else if (plan->params.algorithm == COF_ALLREDUCE_AUTO)
        snprintf(limit, sizeof limit, " one_shot_bytes=%lld", (long long)one_shot_bytes(plan));
    snprintf(text, bytes, "algorithm=%s%s part=%lld", names[plan->params.algorithm], limit,
             (long long)sizes_of(plan).capacity);
}

static char *take(struct cofi_arn_cpu_state *st, size_t *used, size_t bytes)
{
    char *at = bytes ? st->memory + *used : NULL;
    *used += cofi_round_up(bytes, COFI_LINE);
    return at;
}

cof_status cofi_arn_cpu_open(struct cofi_arn_plan *plan)
{
    struct cofi_arn_cpu_state *st;
    size_t used = 0, bytes = cofi_round_up(sizeof *st, COFI_LINE) + plan->local_bytes;
    COF_TRY(cofi_memory_check(bytes));
    st = aligned_alloc(COFI_LINE, bytes);
    COF_FAIL_IF(!st, COF_ERR_NOMEM, "allreduce_rmsnorm plan: no memory for %zu bytes", bytes);
    st->sizes = sizes_of(plan);
    st->one_shot_bytes = one_shot_bytes(plan);
    st->stage_x = take(st, &used, st->sizes.stage_x);
    st->stage_sums = take(st, &used, st->sizes.stage_sums);
    st->wide_row = (float *)(void *)take(st, &used, st->sizes.wide_row);
    plan->state = st;
    return COF_OK;
}

void cofi_arn_cpu_close(struct cofi_arn_plan *plan)
{
    free(plan->state);
}
