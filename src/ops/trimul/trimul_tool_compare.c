/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The results of a run beside the fp64 reference, within the bound of `cofuse check trimul`. */
#include <math.h>
#include <stdlib.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/check.h"
#include "ops/trimul/trimul_tool.h"

static void judge(const void *ours, cof_dtype dtype, const double *ref, int64_t n, double tolerance,
                  struct cofi_tm_verdict *verdict)
{
    double max_ref = 0, err2 = 0, ref2 = 0;
    for (int64_t i = 0; i < n; i++)
        max_ref = isfinite(ref[i]) ? fmax(max_ref, fabs(ref[i])) : max_ref;
    verdict->n = n;
    for (int64_t i = 0; i < n; i++) {
        double x = cofi_check_load(ours, dtype, i);
        if (!isfinite(x) || !isfinite(ref[i])) {
            verdict->n_far += !(isnan(ref[i]) ? isnan(x) : x == ref[i]);
            continue;
        }
        verdict->n_far += fabs(x - ref[i]) > tolerance * (max_ref + fabs(ref[i]));
        err2 += (x - ref[i]) * (x - ref[i]);
        ref2 += ref[i] * ref[i];
    }
    verdict->rel_rmse = ref2 > 0 ? sqrt(err2 / ref2) : 0;
}

static void compare_grads(const struct cofi_tm_run *run, const struct cofi_tm_data *data,
                          struct cofi_tm_verdict *verdicts)
{
    const struct cofi_tm_problem *p = &data->problem[0];
    const float *ours = cofi_tm_run_at(run, run->grads);
    for (int64_t b = 1; b < run->c.b; b++)
        for (int64_t i = 0; i < data->grad_elements; i++)
            p->grads[i] += p->grads[b * data->grad_elements + i];
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        judge(ours + data->grad_at[w], COF_F32, p->grads + data->grad_at[w],
              cofi_tm_weight_elements(w, run->c.d, run->c.h),
              cofi_tm_tolerance(&run->c, COFI_TM_E_GRADS), &verdicts[COFI_TM_E_GRADS + w]);
}

bool cofi_tm_tool_compare(const struct cofi_tm_run *run,
                           struct cofi_tm_verdict verdicts_out[COFI_TM_E_N])
{
    struct cofi_tm_data data;
    cofi_tm_run_data(run, &data);
    struct cofi_tm_problem *p = &data.problem[0];
    int64_t n = run->c.b * p->n * p->n * run->c.d;
    bool backward = !run->c.forward_only;
    double tolerance = cofi_tm_tolerance(&run->c, COFI_TM_E_OUT);
    int64_t n_entries = run->c.b > 0 ? run->c.b : 1; /* zeros are the sum of none */
    int64_t n_all = n * (backward ? 2 : 1) + run->c.b * COFI_TM_E_N +
                    (backward ? n_entries * data.grad_elements : 0);
    double *memory = calloc((size_t)n_all + 1, sizeof *memory);
    cof_status status = memory ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "the reference");
    p->out = memory;
    p->maxima = memory + n;
    p->dx = p->maxima + run->c.b * COFI_TM_E_N;
    p->grads = p->dx + n;
    for (int64_t b = 0; b < run->c.b && status == COF_OK; b++)
        status = cofi_tm_data_reference(&data, p, b);
    if (status == COF_OK) {
        judge(cofi_tm_run_at(run, run->out), cofi_tm_dtype(&run->c), p->out, n, tolerance,
              &verdicts_out[COFI_TM_E_OUT]);
        if (backward) {
            judge(cofi_tm_run_at(run, run->dx), cofi_tm_dtype(&run->c), p->dx, n, tolerance,
                  &verdicts_out[COFI_TM_E_DX]);
            compare_grads(run, &data, verdicts_out);
        }
    } else {
        cofi_cli_error("reference: %s: %s", cof_status_name(status), cof_last_error());
    }
    free(memory);
    return status == COF_OK;
}
