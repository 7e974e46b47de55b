/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check attention`: runs a case and compares every local row with the reference. */
#define _GNU_SOURCE /* usleep */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/attention/attention_check_local.h"

enum { MAX_MICRO = 2, N_REPEATS = 20, N_MANY = 1000 };

/* One case as it runs. */
struct run {
    struct cofi_job *job;
    struct cofi_attention_case c;
    uint64_t seed;
    int n_micro;
    struct cofi_attention_data data[MAX_MICRO];
    struct cofi_attention_local local[MAX_MICRO];
    struct cofi_check_arena arena; /* with --engine attach */
    struct cofi_guard saved[MAX_MICRO]; /* saved_kv, where the plan wants one */
    cof_shape saved_shape;
    cof_tensor saved_view[MAX_MICRO];
    cof_plan *plan;
    cof_stream stream;
    const struct cofi_check_device *device; /* NULL: the CPU */
    void *graph; /* of a forward on `stream` */
    uint64_t n_calls; /* numbers the random delays */
};

/* ---- Calls ---- */

static void delay(struct run *run)
{
    uint64_t x = cofi_check_random(run->seed, 70 + (uint64_t)run->job->rank, run->n_calls++);
    if (run->c.random_delays)
        usleep((useconds_t)(x % 3000));
}

static cof_status forward(struct run *run, int micro, cof_stream stream)
{
    cof_attention_args args;
    cofi_attention_local_args(&run->local[micro], false, &args);
    args.saved_kv = run->saved_shape.dim[0] ? &run->saved_view[micro] : NULL;
    delay(run);
    return cof_attention_forward(run->plan, &args, stream);
}

static cof_status backward(struct run *run, int micro, cof_stream stream)
{
    cof_attention_args args;
    cofi_attention_local_args(&run->local[micro], true, &args);
    args.saved_kv = run->saved_shape.dim[0] ? &run->saved_view[micro] : NULL;
    delay(run);
    return cof_attention_backward(run->plan, &args, stream);
}

static cof_status sync_stream(struct run *run)
{
    COF_TRY(cof_stream_sync(run->stream));
    return cof_team_query(run->job->team); /* streams of devices do not tell */
}

/* The calls whose results are compared with the reference. */
static cof_status first_calls(struct run *run)
{
    if (run->c.calls != COFI_CALLS_TWO) {
        COF_TRY(forward(run, 0, COF_STREAM_NOW));
        return run->c.calls == COFI_CALLS_BACKWARD ? backward(run, 0, COF_STREAM_NOW) : COF_OK;
    }
    COF_TRY(forward(run, 0, run->stream));
    COF_TRY(forward(run, 1, run->stream));
    for (int m = 0; m < 2 && cofi_attention_case_has_backward(&run->c); m++)
        COF_TRY(backward(run, m, run->stream));
    return sync_stream(run);
}

static cof_status captured(void *arg, cof_stream stream)
{
    struct run *run = arg;
    cof_attention_args args;
    cofi_attention_local_args(&run->local[0], false, &args);
    return cof_attention_forward(run->plan, &args, stream);
}

/* One more time: of a graph every fifth call is eager, another one on each rank. */
static cof_status repeat_call(struct run *run, int number, int micro)
{
    if (run->c.calls != COFI_CALLS_GRAPH)
        return forward(run, micro, COF_STREAM_NOW);
    if (number % 5 == run->job->rank % 5) {
        COF_TRY(forward(run, 0, run->stream));
    } else {
        delay(run);
        COF_TRY(run->device->replay(run->job->world, run->graph, run->stream));
    }
    return sync_stream(run);
}

static int n_repeats(const struct run *run)
{
    if (run->c.params.n_rows > COFI_ATTENTION_SAMPLE_ROWS)
        return 0; /* a run takes seconds */
    switch (run->c.calls) {
    case COFI_CALLS_REPEAT:
    case COFI_CALLS_GRAPH: return N_REPEATS - 1;
    case COFI_CALLS_MANY: return N_MANY - 1;
    default: return 1;
    }
}

/* The same calls again, one at a time: forward after backward, same bits as the first time. */
static cof_status repeat_calls(struct run *run, struct cofi_check_result *result)
{
    const struct cofi_check_work work = {captured, run};
    if (run->c.calls == COFI_CALLS_GRAPH) {
        COF_TRY(cof_team_barrier(run->job->team));
        COF_TRY(run->device->capture(run->job->world, &work, run->stream, &run->graph));
        COF_TRY(cof_team_barrier(run->job->team));
    }
    for (int i = 0; i < n_repeats(run); i++) {
        for (int m = 0; m < run->n_micro; m++) {
            COF_TRY(cofi_attention_local_poison(&run->local[m]));
            COF_TRY(repeat_call(run, i, m));
            if (cofi_attention_case_has_backward(&run->c))
                COF_TRY(backward(run, m, COF_STREAM_NOW));
        }
        for (int m = 0; m < run->n_micro; m++) {
            COF_TRY(cofi_attention_local_download(&run->local[m]));
            cofi_attention_local_compare_kept(&run->local[m], "a repeated call", result);
        }
    }
    return COF_OK;
}

/* ---- Comparison ---- */

enum { E_O, E_DQ, E_DK, E_DV, N_ERRORS };

static const struct {
    enum cofi_attention_tensor tensor;
    bool is_kv;
} compared[N_ERRORS] = {
    [E_O] = {COFI_CT_O, false},
    [E_DQ] = {COFI_CT_DQ, false},
    [E_DK] = {COFI_CT_DK, true},
    [E_DV] = {COFI_CT_DV, true},
};

/* Whether the broken element of NAN and INF data reaches (b, row, h) of o, or of lse (d < 0). */
static bool is_reached(const struct run *run, const struct cofi_attention_bad_element *bad,
                       int64_t b, int64_t row, int64_t h, int64_t d)
{
    const cof_attention_params *p = &run->c.params;
    if (bad->tensor == COFI_CT_N || b != bad->batch)
        return false;
    if (bad->tensor == COFI_CT_Q)
        return h == bad->head && row == bad->row;
    const struct cofi_attention_keys seen = cofi_attention_problem_keys(&run->data[0].problem, row);
    if (h / (p->n_heads / p->n_kv_heads) != bad->head || bad->row < seen.begin ||
        bad->row >= seen.end)
        return false;
    return bad->tensor == COFI_CT_K || d == bad->dim;
}

static void compare_value(const struct run *run, const struct cofi_attention_local *local,
                          int which, const int64_t at[4], double ours, double plain, double ref,
                          struct cofi_check_error *error, struct cofi_check_result *result)
{
    const char *name = cofi_attention_check_names[compared[which].tensor];
    if (which == E_O && is_reached(run, &local->bad, at[0], at[1], at[2], at[3]))
        plain = ref = local->bad.value;
    if (run->c.data == COFI_DATA_INTEGER && ours != cofi_check_rounded(ref, run->c.params.dtype))
        cofi_check_fail(result, "%s[b %lld, row %lld, head %lld, dim %lld] = %.9g, exact is %.9g",
                        name, (long long)at[0], (long long)at[1], (long long)at[2],
                        (long long)at[3], ours, cofi_check_rounded(ref, run->c.params.dtype));
    if (isfinite(ref) != isfinite(ours))
        cofi_check_fail(result, "%s[b %lld, row %lld, head %lld, dim %lld] = %g, wanted %g", name,
                        (long long)at[0], (long long)at[1], (long long)at[2], (long long)at[3],
                        ours, ref);
    cofi_check_error_add(error, ours, isfinite(ref) ? plain : ref, ref);
}

/* One local row of o, dq, dk or dv; global < 0: padding. */
static void compare_row(const struct run *run, int micro, int which, int64_t local_row,
                        int64_t global, struct cofi_check_error *error,
                        struct cofi_check_result *result)
{
    const struct cofi_attention_local *local = &run->local[micro];
    const struct cofi_attention_data *data = &run->data[micro];
    const struct cofi_attention_local_tensor *t = &local->tensor[compared[which].tensor];
    const double *refs[] = {data->ref.o, data->ref.dq, data->ref.dk, data->ref.dv};
    const float *plains[] = {data->plain.o, data->plain.dq, data->plain.dk, data->plain.dv};
    for (int64_t b = 0; b < data->problem.n_batch; b++)
        for (int64_t h = 0; h < t->n_heads; h++) {
            int64_t from = ((b * t->n_heads + h) * data->problem.n_rows + global) * t->dim;
            int64_t to = cofi_attention_local_idx(t, b, local_row, h, 0);
            for (int64_t d = 0; d < t->dim; d++) {
                double ours = cofi_check_load(cofi_attention_local_data(t), t->view.dtype, to + d);
                if (global >= 0)
                    compare_value(run, local, which, (int64_t[]){b, global, h, d}, ours,
                                  plains[which][from + d], refs[which][from + d], error, result);
                else if (ours != 0)
                    cofi_check_fail(result, "%s: padding row %lld holds %g, wanted 0",
                                    cofi_attention_check_names[compared[which].tensor],
                                    (long long)local_row, ours);
            }
        }
}

/* lse is computed in fp32 from the inputs as they are, in either type: its error is that of a
 * score, a sum of products of up to |q| |k|, and of the last roundings. */
static void compare_lse(const struct run *run, int micro, int64_t local_row, int64_t global,
                        struct cofi_check_result *result)
{
    const struct cofi_attention_local *local = &run->local[micro];
    const struct cofi_attention_data *data = &run->data[micro];
    const struct cofi_attention_local_tensor *t = &local->tensor[COFI_CT_LSE];
    const float *lse = cofi_attention_local_data(t);
    const double *m = data->maxima;
    double score = data->problem.scale * m[COFI_MAX_ROW_Q] * m[COFI_MAX_ROW_K];
    for (int64_t b = 0; b < data->problem.n_batch; b++)
        for (int64_t h = 0; h < t->n_heads; h++) {
            double ours = lse[cofi_attention_local_idx(t, b, local_row, h, 0)], ref = -INFINITY;
            if (global >= 0)
                ref = data->ref.lse[(b * t->n_heads + h) * data->problem.n_rows + global];
            if (global >= 0 && is_reached(run, &local->bad, b, global, h, -1)) {
                if (!isnan(ours))
                    cofi_check_fail(result, "lse[b %lld, row %lld, head %lld] = %g, wanted nan",
                                    (long long)b, (long long)global, (long long)h, ours);
                continue;
            }
            double bound = 1e-5 * fmax(1, fabs(ref)) + 2.5e-7 * score;
            if (ours != ref && !(fabs(ours - ref) <= bound))
                cofi_check_fail(result,
                                "lse[b %lld, row %lld (local %lld), head %lld] = %.9g, wanted %.9g "
                                "+- %.2g", (long long)b, (long long)global, (long long)local_row,
                                (long long)h, ours, ref, bound);
        }
}

static bool in_ranges(const struct cofi_attention_ranges *r, int64_t row)
{
    for (int i = 0; i < r->n; i++)
        if (row >= r->begin[i] && row < r->end[i])
            return true;
    return false;
}

static void compare(const struct run *run, int micro, struct cofi_check_error *errors,
                    struct cofi_check_result *result)
{
    const struct cofi_attention_local *local = &run->local[micro];
    bool sampled = run->c.params.n_rows > COFI_ATTENTION_SAMPLE_ROWS;
    for (int64_t row = 0; row < local->n_rows; row++) {
        int64_t global = cof_layout_global_row(&local->layout, run->job->rank, row);
        if (global >= 0 && sampled && !in_ranges(&run->data[micro].compared, global))
            continue;
        compare_lse(run, micro, row, global, result);
        for (int e = 0; e < (cofi_attention_case_has_backward(&run->c) ? N_ERRORS : 1); e++)
            compare_row(run, micro, e, row, global, &errors[e], result);
    }
    cofi_attention_local_inspect(local, result);
}

/* Judges one microbatch by all ranks' errors: the same on all. Backward has p = exp(s - lse) from
 * an fp32 lse, which alone makes p wrong by up to 2^-24 |lse|, whoever computes it. */
static void judge(const struct run *run, int micro, struct cofi_check_error *errors,
                  struct cofi_check_result *result)
{
    const struct cofi_attention_data *data = &run->data[micro];
    const double *m = data->maxima;
    double size = data->problem.scale * m[COFI_MAX_ROW_DOUT] * m[COFI_MAX_ROW_V];
    double scales[N_ERRORS] = {0, size * m[COFI_MAX_ABS_K], size * m[COFI_MAX_ABS_Q], 0};
    char text[sizeof result->text] = "";
    bool ok = true;
    for (int e = 0; e < (cofi_attention_case_has_backward(&run->c) ? N_ERRORS : 1); e++) {
        errors[e].input_error =
            e == E_O ? 0 : fmin(0x1p-24 * m[COFI_MAX_LSE], COFI_CHECK_MAX_INPUT_ERROR);
        ok &= cofi_check_error_judge(&errors[e], run->c.params.dtype, scales[e],
                                     cofi_attention_check_names[compared[e].tensor], text,
                                     sizeof text);
    }
    if (!ok)
        cofi_check_fail(result, "%s", text);
    else if (result->verdict == COFI_PASSED)
        memcpy(result->text, text, sizeof text);
}

/* ---- One case ---- */

static cof_status run_plan(struct run *run, struct cofi_check_result *result)
{
    struct cofi_check_error errors[MAX_MICRO][N_ERRORS];
    memset(errors, 0, sizeof errors);
    COF_TRY(first_calls(run));
    for (int m = 0; m < run->n_micro; m++) {
        COF_TRY(cofi_attention_local_download(&run->local[m]));
        compare(run, m, errors[m], result);
        cofi_attention_local_keep(&run->local[m]);
    }
    COF_TRY(repeat_calls(run, result));
    for (int m = 0; m < run->n_micro; m++) {
        cofi_attention_local_inspect(&run->local[m], result);
        COF_TRY(cofi_check_error_combine(run->job->team, errors[m], N_ERRORS));
        judge(run, m, errors[m], result);
    }
    return cofi_check_agree(run->job->team, result);
}

/* On an arena of its own; with --engine attach on one as large as the workspace call says. */
static cof_status make_plan(struct run *run)
{
    cof_team *team = run->job->team;
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    if (run->job->attach) {
        COF_TRY(cof_attention_workspace(team, &run->c.params, &sizes));
        COF_TRY(cofi_check_arena_open(run->job, team, sizes.symmetric + sizes.words, 0, 0,
                                      &run->arena));
    }
    cof_status status = cof_attention_plan_create(team, &run->c.params, run->arena.arena,
                                                  &run->plan);
    if (status != COF_OK)
        cofi_check_arena_close(&run->arena);
    return status;
}

static cof_status make_saved(struct run *run)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    COF_TRY(cof_attention_workspace(run->job->team, &run->c.params, &sizes));
    run->saved_shape.dim[0] = (int64_t)sizes.saved;
    for (int m = 0; m < run->n_micro && sizes.saved; m++) {
        COF_TRY(cofi_guard_alloc(&run->saved[m], sizes.saved));
        run->saved_view[m] = cof_tensor_make(run->saved[m].data, (cof_device){COF_DEVICE_CPU, 0},
                                             COF_U8, 1, &run->saved_shape);
    }
    return COF_OK;
}

static void free_saved(struct run *run, struct cofi_check_result *result)
{
    for (int m = 0; m < run->n_micro; m++) {
        if (run->saved[m].base && !cofi_guard_intact(&run->saved[m]))
            cofi_check_fail(result, "the red zone of saved_kv was written to");
        cofi_guard_free(&run->saved[m]);
    }
}

static cof_status with_plan(struct run *run, struct cofi_check_result *result)
{
    cof_status status = make_plan(run);
    if (status == COF_ERR_UNSUPPORTED) {
        result->verdict = COFI_SKIPPED;
        snprintf(result->text, sizeof result->text, "%.399s", cof_last_error());
        return COF_OK;
    }
    COF_TRY(status);
    status = make_saved(run);
    if (status == COF_OK && (run->c.calls == COFI_CALLS_TWO || run->c.calls == COFI_CALLS_GRAPH))
        status = cof_stream_create(run->job->world, 0, &run->stream);
    if (status == COF_OK)
        status = run_plan(run, result);
    if (run->device && status == COF_OK) /* nobody closes while another one is in a call */
        status = cof_team_barrier(run->job->team);
    if (run->device)
        run->device->release(run->job->world, run->graph);
    if (run->stream.handle)
        cof_stream_destroy(run->stream);
    cof_plan_destroy(run->plan);
    cofi_check_arena_close(&run->arena);
    free_saved(run, result);
    return status == COF_OK ? cofi_check_agree(run->job->team, result) : status;
}

static cof_status run_case(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result)
{
    struct run run = {.job = job, .seed = options->seed,
                      .device = cofi_check_device(job->world)};
    *result = (struct cofi_check_result){COFI_PASSED, ""};
    cofi_attention_case(options, idx, &run.c);
    run.n_micro = run.c.calls == COFI_CALLS_TWO ? 2 : 1;
    size_t wanted = cofi_attention_data_bytes(&run.c);
    COF_FAIL_IF(wanted > job->shared_bytes, COF_ERR_INTERNAL,
                "check: a case needs %zu shared bytes of %zu", wanted, job->shared_bytes);
    cof_status status = COF_OK;
    for (int m = 0; m < run.n_micro && status == COF_OK; m++) {
        status = cofi_attention_data_make(job, &run.c, run.seed, m, &run.data[m]);
        if (status == COF_OK)
            status = cofi_attention_local_make(job, &run.c, run.seed, &run.data[m], &run.local[m]);
    }
    if (status == COF_OK)
        status = cof_team_barrier(job->team);
    if (status == COF_OK)
        status = with_plan(&run, result);
    for (int m = 0; m < run.n_micro; m++)
        cofi_attention_local_free(&run.local[m]);
    return status;
}

static size_t shared_bytes(const struct cofi_check_options *options)
{
    size_t most = 0;
    for (int64_t i = 0; i < cofi_attention_n_cases(options); i++) {
        struct cofi_attention_case c;
        cofi_attention_case(options, i, &c);
        size_t bytes = cofi_attention_data_bytes(&c);
        most = bytes > most ? bytes : most;
    }
    return most;
}

const struct cofi_op_check cofi_attention_check = {
    .has_cuda = true,
    .n_cases = cofi_attention_n_cases,
    .case_line = cofi_attention_case_line,
    .shared_bytes = shared_bytes,
    .run_case = run_case,
};
