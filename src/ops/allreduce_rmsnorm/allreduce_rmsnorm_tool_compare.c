/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The outputs of all ranks beside both references: the bits of the same order in fp32, and fp64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_ref.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_tool.h"
#include "ops/check.h"

/* One row's references. */
struct row {
    char *bits[COFI_ARN_N_OUTPUTS];
    struct cofi_arn_exact *exact;
    double err2[COFI_ARN_N_OUTPUTS], ref2[COFI_ARN_N_OUTPUTS]; /* sums over all rows */
};

static int64_t count_different(const char *a, const char *b, int64_t n, size_t item)
{
    int64_t different = 0;
    for (int64_t i = 0; i < n; i++)
        different += memcmp(a + (size_t)i * item, b + (size_t)i * item, item) != 0;
    return different;
}

static void judge_row(struct cofi_arn_run *run, int64_t t, int which, struct row *row,
                      struct cofi_arn_verdict *verdict)
{
    const cof_allreduce_rmsnorm_params *p = &run->params;
    size_t item = p->dtype.bits / 8, at = (size_t)(t * p->hidden) * item;
    for (int r = 0; r < run->head.n_ranks; r++) {
        const char *ours = (char *)cofi_arn_run_out(run, which, r) + at;
        verdict->n_different += count_different(ours, row->bits[which], p->hidden, item);
    }
    const char *first = (char *)cofi_arn_run_out(run, which, 0) + at;
    for (int64_t h = 0; h < p->hidden; h++) {
        const struct cofi_arn_exact *e = &row->exact[h];
        bool is_norm = which == COFI_ARN_NORM_OUT;
        double ours = cofi_check_load(first, p->dtype, h);
        double exact = is_norm ? e->norm_out : e->residual_out;
        double slack = is_norm ? e->norm_slack : e->residual_slack;
        verdict->n_far += !cofi_arn_ref_is_near(ours, exact, slack, p->dtype);
        if (isfinite(ours) && isfinite(exact)) {
            row->err2[which] += (ours - exact) * (ours - exact);
            row->ref2[which] += exact * exact;
        }
    }
}

static void compare_row(struct cofi_arn_run *run, int64_t t, struct row *row,
                        struct cofi_arn_verdict verdicts[COFI_ARN_N_OUTPUTS])
{
    const cof_allreduce_rmsnorm_params *p = &run->params;
    size_t row_bytes = (size_t)p->hidden * (p->dtype.bits / 8), at = (size_t)t * row_bytes;
    const char *base = (const char *)run;
    const void *x[COFI_MAX_RANKS];
    for (int r = 0; r < run->head.n_ranks; r++)
        x[r] = base + run->in[COFI_ARN_X] + (size_t)r * cofi_arn_run_bytes(run) + at;
    struct cofi_arn_ref ref = {p, run->head.n_ranks, x, base + run->in[COFI_ARN_RESIDUAL] + at,
                               base + run->in[COFI_ARN_WEIGHT]};
    cofi_arn_ref_bits(&ref, row->bits[COFI_ARN_RESIDUAL_OUT], row->bits[COFI_ARN_NORM_OUT]);
    cofi_arn_ref_exact(&ref, row->exact);
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (run->out[i])
            judge_row(run, t, i, row, &verdicts[i]);
}

bool cofi_arn_tool_compare(struct cofi_arn_run *run,
                           struct cofi_arn_verdict verdicts_out[COFI_ARN_N_OUTPUTS])
{
    const cof_allreduce_rmsnorm_params *p = &run->params;
    size_t row_bytes = (size_t)p->hidden * (p->dtype.bits / 8);
    struct row row = {.exact = calloc((size_t)p->hidden, sizeof *row.exact)};
    bool ok = row.exact;
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++) {
        verdicts_out[i] = (struct cofi_arn_verdict){.has = run->out[i] != 0};
        row.bits[i] = malloc(row_bytes);
        ok &= row.bits[i] != NULL;
    }
    for (int64_t t = 0; t < run->n_tokens && ok; t++)
        compare_row(run, t, &row, verdicts_out);
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++) {
        verdicts_out[i].rel_rmse = row.ref2[i] > 0 ? sqrt(row.err2[i] / row.ref2[i]) : 0;
        free(row.bits[i]);
    }
    free(row.exact);
    if (!ok)
        cofi_cli_error("out of memory");
    return ok;
}
