/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check trimul`: out, dx and the gradients of the weights beside the fp64 reference; out
 * and dx bit for bit beside those of one rank alone, whose calls have one batch entry each; all of
 * them bit for bit the same when the calls are made again. */
#define _GNU_SOURCE /* usleep */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/trimul/trimul_check_local.h"

enum { MAX_PLANS = 2, N_PASSES = 2 };

struct run {
    struct cofi_job *job;
    struct cofi_tm_case c;
    struct cofi_tm_data data;
    struct cofi_check_result *result;
    int n_plans;
    cof_trimul_params params[MAX_PLANS];
    size_t saved_bytes[MAX_PLANS];
    cof_plan *plan[MAX_PLANS];
    struct cofi_check_arena arena;
    cof_stream stream; /* of FLIGHT; else COF_STREAM_NOW */
    struct cofi_tm_local_weights weights;
    struct cofi_tm_local local[COFI_TM_CALLS];
    uint64_t n_delays;
    double worst[COFI_TM_E_N]; /* largest error, in units of its bound */
};

/* ---- one rank alone ------------------------------------------------------------------------- */

static cof_status run_alone(struct run *run, cof_plan *plan, const struct cofi_tm_problem *p,
                            int64_t b)
{
    struct cofi_tm_local local;
    cof_trimul_args args;
    bool backward = cofi_tm_has_backward(&run->c);
    struct cofi_tm_span span = {.c = &run->c, .problem = p, .block = {0, p->n, 0, p->n},
                                 .first_batch = b, .n_batch = 1, .backward = backward};
    cof_status status = cofi_tm_local_open(run->job->world, &span, &local);
    if (status == COF_OK)
        status = cofi_tm_local_prepare(&local);
    cofi_tm_local_args(&local, false, &args);
    if (status == COF_OK)
        status = cof_trimul_forward(plan, &args, COF_STREAM_NOW);
    cofi_tm_local_args(&local, true, &args);
    if (status == COF_OK && backward)
        status = cof_trimul_backward(plan, &args, COF_STREAM_NOW);
    if (status == COF_OK)
        status = cofi_tm_local_collect(&local, run->result);
    if (status == COF_OK)
        cofi_tm_local_take(&local, p->alone_out, p->alone_dx);
    cofi_tm_local_close(&local);
    return status;
}

static cof_status with_plan_alone(struct run *run, cof_team *team)
{
    cof_trimul_params params;
    cof_plan *plan = NULL;
    cofi_tm_params(&run->c, &params);
    params.n_batch = 1;
    params.grid_rows = params.grid_cols = 0;
    params.shard = COF_TRIMUL_BALANCED;
    params.row_offsets = params.col_offsets = NULL;
    params.save = COF_TRIMUL_SAVE_NONE;
    params.reduce_param_grads = params.chunk_features = 0;
    COF_TRY(cof_trimul_plan_create(team, &params, NULL, &plan));
    cof_status status = cof_trimul_set_weights(plan, &run->weights.weights, 0, COF_STREAM_NOW);
    for (int i = 0; i < run->data.n_problems; i++)
        for (int64_t b = 0; b < run->c.b && status == COF_OK; b++)
            status = run_alone(run, plan, &run->data.problem[i], b);
    cof_plan_destroy(plan);
    return status;
}

/* Rank 0's, while the others wait. */
static cof_status results_alone(struct run *run)
{
    cof_status status = COF_OK;
    if (run->job->rank == 0) {
        cof_team *team;
        COF_TRY(cof_team_create(run->job->world, &run->job->rank, 1, 1, &team));
        status = with_plan_alone(run, team);
        cof_team_destroy(team);
    }
    COF_TRY(status);
    return cof_team_barrier(run->job->team);
}

/* ---- values --------------------------------------------------------------------------------- */

/* Where a value is, for a message. */
struct at {
    const char *name;
    int64_t b, i, j, d; /* j < 0: element d of a gradient */
};

static void report(struct run *run, const struct at *at, const char *what, double ours,
                   double wanted)
{
    if (at->j < 0)
        cofi_check_fail(run->result, "gradient of %s [%lld] = %.9g, %s%.9g", at->name,
                        (long long)at->d, ours, what, wanted);
    else
        cofi_check_fail(run->result, "%s[b %lld, i %lld, j %lld, d %lld] = %.9g, %s%.9g", at->name,
                        (long long)at->b, (long long)at->i, (long long)at->j, (long long)at->d,
                        ours, what, wanted);
}

static void judge(struct run *run, const struct at *at, int which, double ours, double ref,
                  double max_ref)
{
    if (!isfinite(ref) || !isfinite(ours)) {
        if (!(isnan(ref) ? isnan(ours) : ours == ref))
            report(run, at, "wanted ", ours, ref);
        return;
    }
    double bound = cofi_tm_tolerance(&run->c, which) * (max_ref + fabs(ref));
    double error = fabs(ours - ref);
    double ratio = error == 0 ? 0 : error / bound;
    run->worst[which] = fmax(run->worst[which], ratio);
    if (!(ratio <= 1))
        report(run, at, "too far from ", ours, ref);
}

/* out or dx of a call. */
static void compare(struct run *run, const struct cofi_tm_local *local, int which)
{
    const struct cofi_tm_problem *p = local->problem;
    bool is_out = which == COFI_TM_E_OUT;
    const struct cofi_tm_view *v = &local->view[is_out ? local->which_out : COFI_TM_T_DX];
    const double *ref = is_out ? p->out : p->dx;
    const void *alone = is_out ? p->alone_out : p->alone_dx;
    cof_dtype dtype = v->tensor.dtype;
    struct at at = {.name = is_out ? "out" : "dx"};
    for (at.b = 0; at.b < run->c.b; at.b++)
        for (int64_t i = 0; i < local->block.n_rows; i++)
            for (int64_t j = 0; j < local->block.n_cols; j++)
                for (at.d = 0; at.d < run->c.d; at.d++) {
                    at.i = local->block.row + i;
                    at.j = local->block.col + j;
                    int64_t idx = ((at.b * p->n + at.i) * p->n + at.j) * run->c.d + at.d;
                    double ours = cofi_check_load(v->memory.host, dtype,
                                                  cofi_tm_view_idx(v, at.b, i, j, at.d));
                    double other = cofi_check_load(alone, dtype, idx);
                    double rounded = cofi_check_rounded(ref[idx], dtype);
                    judge(run, &at, which, ours, ref[idx],
                          p->maxima[at.b * COFI_TM_E_N + which]);
                    if (!(isnan(ours) && isnan(other)) && (ours != other ||
                                                           signbit(ours) != signbit(other)))
                        report(run, &at, "other bits than one rank alone: ", ours, other);
                    if (run->c.data == COFI_TM_INTEGER && ours != rounded)
                        report(run, &at, "exact is ", ours, rounded);
                }
}

/* The ranks' gradients of a call in the shared memory, then each compares some. */
static cof_status compare_grads(struct run *run, int call)
{
    struct cofi_tm_data *data = &run->data;
    const struct cofi_tm_local *local = &run->local[call];
    int n_ranks = run->job->n_ranks;
    float *all = data->partial + (int64_t)call * n_ranks * data->grad_elements;
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        if (local->grad[w].base)
            memcpy(all + run->job->rank * data->grad_elements + data->grad_at[w],
                   local->grad[w].host, local->grad[w].bytes);
    COF_TRY(cof_team_barrier(run->job->team));
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++) {
        int64_t n = cofi_tm_weight_elements(w, run->c.d, run->c.h);
        double *ref = calloc((size_t)n, sizeof *ref), max_ref = 0;
        COF_FAIL_IF(!ref, COF_ERR_NOMEM, "check: no memory");
        for (int64_t b = 0; b < run->c.b; b++)
            for (int64_t i = 0; i < n; i++)
                ref[i] += local->problem->grads[b * data->grad_elements + data->grad_at[w] + i];
        for (int64_t i = 0; i < n; i++)
            max_ref = fmax(max_ref, fabs(ref[i]));
        struct at at = {.name = cofi_tm_weights[w].name, .j = -1};
        for (at.d = run->job->rank; at.d < n && local->grad[w].base; at.d += n_ranks) {
            const float *values = all + data->grad_at[w] + at.d;
            double sum = values[0];
            for (int r = 1; r < n_ranks; r++) {
                float value = values[r * data->grad_elements];
                sum += run->c.reduce ? 0 : value;
                if (run->c.reduce && value != values[0])
                    report(run, &at, "on another rank than rank 0, which has ", value, values[0]);
            }
            judge(run, &at, COFI_TM_E_GRADS + w, sum, ref[at.d], max_ref);
        }
        free(ref);
    }
    return COF_OK;
}

/* ---- calls ---------------------------------------------------------------------------------- */

static void delay(struct run *run)
{
    uint64_t x = cofi_check_random(run->data.seed, 70 + (uint64_t)run->job->rank, run->n_delays++);
    if (run->c.delays && x % 4 == 0)
        usleep((useconds_t)(x / 64 % 2000));
}

static cof_status call(struct run *run, int i, bool backward)
{
    cof_trimul_args args;
    cofi_tm_local_args(&run->local[i], backward, &args);
    delay(run);
    cof_plan *plan = run->plan[i % run->n_plans];
    return backward ? cof_trimul_backward(plan, &args, run->stream)
                    : cof_trimul_forward(plan, &args, run->stream);
}

static cof_status make_calls(struct run *run)
{
    int n = run->c.n.n;
    bool backward = cofi_tm_has_backward(&run->c), flight = run->c.calls == COFI_TM_FLIGHT;
    for (int i = 0; i < n; i++) {
        COF_TRY(call(run, i, false));
        if (backward && !flight)
            COF_TRY(call(run, i, true));
    }
    for (int i = 0; i < n && flight; i++)
        COF_TRY(call(run, i, true));
    return cof_stream_sync(run->stream);
}

static cof_status set_weights(struct run *run, unsigned flags)
{
    for (int i = 0; i < run->n_plans; i++)
        COF_TRY(cof_trimul_set_weights(run->plan[i], &run->weights.weights, flags, run->stream));
    return COF_OK;
}

static cof_status inspect(struct run *run, int pass)
{
    for (int i = 0; i < run->c.n.n; i++) {
        struct cofi_tm_local *local = &run->local[i];
        COF_TRY(cofi_tm_local_collect(local, run->result));
        if (pass > 0) {
            cofi_tm_local_compare_kept(local, run->result);
            continue;
        }
        cofi_tm_local_keep(local);
        compare(run, local, COFI_TM_E_OUT);
        if (!cofi_tm_has_backward(&run->c))
            continue;
        compare(run, local, COFI_TM_E_DX);
        COF_TRY(compare_grads(run, i));
    }
    return COF_OK;
}

static cof_status run_passes(struct run *run)
{
    for (int pass = 0; pass < N_PASSES; pass++) {
        for (int i = 0; i < run->c.n.n; i++)
            COF_TRY(cofi_tm_local_prepare(&run->local[i]));
        COF_TRY(cof_team_barrier(run->job->team));
        COF_TRY(set_weights(run, pass == 0 ? COF_TRIMUL_CHECK : 0));
        COF_TRY(make_calls(run));
        COF_TRY(inspect(run, pass));
    }
    return COF_OK;
}

/* ---- a case --------------------------------------------------------------------------------- */

/* The second plan cuts its features differently, and keeps nothing where the first one does. */
static cof_status choose_params(struct run *run)
{
    run->n_plans = run->c.two_plans ? 2 : 1;
    for (int i = 0; i < run->n_plans; i++) {
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
        cofi_tm_params(&run->c, &run->params[i]);
        if (i == 1) {
            run->params[1].chunk_features = run->c.chunk == 8 ? 16 : 8;
            run->params[1].save = COF_TRIMUL_SAVE_NONE;
        }
        COF_TRY(cof_trimul_workspace(run->job->team, &run->params[i], &sizes));
        run->saved_bytes[i] = sizes.saved;
    }
    return COF_OK;
}

/* One for all plans, as large as the workspace call says; each its own otherwise. */
static cof_status open_arena(struct run *run)
{
    size_t most = 0, sum = 0;
    for (int i = 0; i < run->n_plans; i++) {
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
        COF_TRY(cof_trimul_workspace(run->job->team, &run->params[i], &sizes));
        most = sizes.symmetric > most ? sizes.symmetric : most;
        sum += sizes.words;
    }
    static const uint32_t first_epochs[] = {1, 0x40000000 - 2, UINT32_MAX - 2};
    if (run->n_plans == 1 && !run->job->attach && !run->c.epoch)
        return COF_OK;
    return cofi_check_arena_open(run->job, run->job->team, most + sum, 0,
                                 first_epochs[run->c.epoch], &run->arena);
}

static cof_status open_calls(struct run *run)
{
    for (int i = 0; i < run->c.n.n; i++) {
        const struct cofi_tm_problem *p = &run->data.problem[run->data.problem_of[i]];
        struct cofi_tm_span span = {.c = &run->c, .problem = p, .n_batch = run->c.b,
                                     .saved_bytes = run->saved_bytes[i % run->n_plans],
                                     .backward = cofi_tm_has_backward(&run->c),
                                     .grads = run->c.grads != 1};
        COF_TRY(cof_trimul_block_of(&run->params[0], run->job->n_ranks, run->job->rank, p->n,
                                    &span.block));
        COF_TRY(cofi_tm_local_open(run->job->world, &span, &run->local[i]));
    }
    return COF_OK;
}

static cof_status open_plans(struct run *run)
{
    for (int i = 0; i < run->n_plans; i++)
        COF_TRY(cof_trimul_plan_create(run->job->team, &run->params[i], run->arena.arena,
                                       &run->plan[i]));
    run->stream = COF_STREAM_NOW;
    return run->c.calls == COFI_TM_FLIGHT ? cof_stream_create(run->job->world, 0, &run->stream)
                                           : COF_OK;
}

static cof_status judge_case(struct run *run)
{
    static const char *const names[] = {"out", "dx"};
    COF_TRY(cofi_check_max(run->job->team, run->worst, COFI_TM_E_N));
    COF_TRY(cofi_check_agree(run->job->team, run->result));
    if (run->result->verdict != COFI_PASSED)
        return COF_OK;
    run->result->text[0] = 0;
    for (int e = 0; e < (cofi_tm_has_backward(&run->c) ? COFI_TM_E_N : 1); e++)
        cofi_check_append(run->result->text, sizeof run->result->text, " %s %.2g",
                          e < COFI_TM_E_GRADS ? names[e]
                                               : cofi_tm_weights[e - COFI_TM_E_GRADS].name,
                          run->worst[e]);
    return COF_OK;
}

static cof_status open_and_run(struct run *run)
{
    COF_TRY(choose_params(run));
    COF_TRY(cofi_tm_weights_open(run->job->world, &run->data, &run->weights));
    COF_TRY(results_alone(run));
    COF_TRY(open_arena(run));
    COF_TRY(open_calls(run));
    COF_TRY(open_plans(run));
    COF_TRY(run_passes(run));
    COF_TRY(cof_team_barrier(run->job->team)); /* nobody closes while another one is in a call */
    return judge_case(run);
}

static cof_status run_case(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result)
{
    struct run *run = calloc(1, sizeof *run);
    COF_FAIL_IF(!run, COF_ERR_NOMEM, "check: no memory");
    *result = (struct cofi_check_result){COFI_PASSED, ""};
    *run = (struct run){.job = job, .result = result, .arena.blocks.fd = -1};
    cofi_tm_case(options, idx, &run->c);
    cof_status status = cofi_tm_data_make(job, &run->c, options->seed, &run->data);
    if (status == COF_OK)
        status = open_and_run(run);
    if (run->c.calls == COFI_TM_FLIGHT && run->stream.handle)
        cof_stream_destroy(run->stream);
    for (int i = 0; i < run->n_plans; i++)
        cof_plan_destroy(run->plan[i]);
    cofi_check_arena_close(&run->arena);
    for (int i = 0; i < run->c.n.n; i++)
        cofi_tm_local_close(&run->local[i]);
    cofi_tm_weights_close(&run->weights);
    free(run);
    return status;
}

static size_t shared_bytes(const struct cofi_check_options *options)
{
    size_t most = 0;
    for (int64_t i = 0; i < cofi_tm_n_cases(options); i++) {
        struct cofi_tm_case c;
        cofi_tm_case(options, i, &c);
        size_t bytes = cofi_tm_data_bytes(&c, options->n_ranks);
        most = bytes > most ? bytes : most;
    }
    return most;
}

extern const struct cofi_op_check cofi_trimul_check;
const struct cofi_op_check cofi_trimul_check = {
    .n_cases = cofi_tm_n_cases,
    .case_line = cofi_tm_case_line,
    .shared_bytes = shared_bytes,
    .run_case = run_case,
};
