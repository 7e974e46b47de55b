/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check allreduce_rmsnorm`: on every rank every byte of the outputs is that of the
 * reference, and no other byte has changed. The calls of a case go over its sets by turns, as many
 * in flight as there are sets. */
#define _GNU_SOURCE /* usleep */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_check_run.h"
#include "ops/runtime/runtime_check.h"

enum { N_PASSES = 3 }; /* of a captured round */

/* ---- plans and arenas ----------------------------------------------------------------------- */

/* The second plan goes another way. */
static void choose_params(struct cofi_arn_run *run)
{
    static const cof_allreduce_algorithm other[] = {
        [COF_ALLREDUCE_AUTO] = COF_ALLREDUCE_TWO_SHOT,
        [COF_ALLREDUCE_ONE_SHOT] = COF_ALLREDUCE_TWO_SHOT,
        [COF_ALLREDUCE_TWO_SHOT] = COF_ALLREDUCE_ONE_SHOT};
    run->params[0] = run->params[1] = run->c.params;
    run->params[1].algorithm = other[run->c.params.algorithm];
    run->params[1].one_shot_bytes = 0;
    run->params[1].max_tokens += 3;
    run->n_plans = run->c.plans == COFI_ARN_ONE ? 1 : 2;
}

static cof_status set_x_aside(struct cofi_arn_run *run)
{
    for (int s = 0; run->c.in_arena && s < run->c.n_sets; s++)
        COF_TRY(cof_arena_alloc(run->arena[0].arena,
                                cofi_check_memory_span(cofi_arn_x_bytes(run)),
                                &run->set[s].x_offset));
    return COF_OK;
}

/* As large as the workspace call says, for the plans from `first` on and the regions of x. */
static cof_status open_arena(struct cofi_arn_run *run, int first, int n,
                             struct cofi_check_arena *arena_out)
{
    size_t most = 0, sum = 0;
    for (int i = first; i < first + n; i++) {
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
        COF_TRY(cof_allreduce_rmsnorm_workspace(run->job->team, &run->params[i], &sizes));
        most = sizes.symmetric > most ? sizes.symmetric : most;
        sum += sizes.words;
    }
    if (run->c.in_arena)
        sum += (size_t)run->c.n_sets * (cofi_check_memory_span(cofi_arn_x_bytes(run)) + 128);
    return cofi_check_arena_open(run->job, run->job->team, most + sum, 0, run->c.first_epoch,
                                 arena_out);
}

static cof_status open_arenas(struct cofi_arn_run *run)
{
    if (run->c.plans == COFI_ARN_SHARED || run->c.in_arena)
        return open_arena(run, 0, run->n_plans, &run->arena[0]);
    bool is_own = run->job->attach || run->c.first_epoch != 1;
    for (int i = 0; is_own && i < run->n_plans; i++)
        COF_TRY(open_arena(run, i, 1, &run->arena[i]));
    return COF_OK;
}

static cof_status open_plans(struct cofi_arn_run *run)
{
    for (int i = 0; i < run->n_plans; i++) {
        cof_arena *arena = run->arena[run->c.plans == COFI_ARN_SHARED ? 0 : i].arena;
        COF_TRY(cof_allreduce_rmsnorm_plan_create(run->job->team, &run->params[i], arena,
                                                  &run->plan[i]));
        if (run->c.plans != COFI_ARN_STREAMS && i > 0)
            run->stream[i] = run->stream[0];
        else if (!run->c.now)
            COF_TRY(cof_stream_create(run->job->world, 0, &run->stream[i]));
    }
    return COF_OK;
}

/* All ranks have done their calls. */
static void close_plans(struct cofi_arn_run *run)
{
    if (run->device)
        run->device->release(run->job->world, run->graph);
    for (int i = 0; i < run->n_plans; i++) {
        if (i == 0 || run->c.plans == COFI_ARN_STREAMS)
            cof_stream_destroy(run->stream[i]);
        cof_plan_destroy(run->plan[i]);
    }
}

/* ---- calls ---------------------------------------------------------------------------------- */

static void delay(struct cofi_arn_run *run)
{
    uint64_t x = cofi_check_random(run->source.seed, 70 + (uint64_t)run->job->rank,
                                   run->n_delays++);
    unsigned seldom = run->c.n_calls > 1000 ? 64 : 4;
    if (run->c.delays && x % seldom == 0)
        usleep((useconds_t)(x / 64 % 2000));
}

static cof_status enqueue(struct cofi_arn_run *run, int64_t call)
{
    int at = (int)(call % run->c.n_sets), plan = (int)(call % run->n_plans);
    const struct cofi_arn_set *set = &run->set[at];
    int64_t n_rows = cofi_arn_case_tokens(&run->c, run->source.seed, call);
    struct cofi_arn_view view[COFI_ARN_TENSORS];
    const cof_tensor *tensor[COFI_ARN_TENSORS];
    cof_shape hidden;
    cof_tensor weight = cofi_arn_view_weight(run, &hidden);
    for (int i = 0; i < COFI_ARN_TENSORS; i++)
        tensor[i] = cofi_arn_view(run, set, (enum cofi_arn_which)i, n_rows, &view[i]);
    cof_allreduce_rmsnorm_args args = COF_ALLREDUCE_RMSNORM_ARGS_INIT;
    args.x = tensor[COFI_ARN_X];
    args.residual = tensor[COFI_ARN_RESIDUAL];
    args.weight = run->c.params.variant == COF_ALLREDUCE_ONLY ? NULL : &weight;
    args.residual_out = tensor[COFI_ARN_RESIDUAL_OUT];
    args.norm_out = tensor[COFI_ARN_NORM_OUT];
    if (run->c.in_arena)
        args.x_source = COF_IN_ARENA(set->x_offset + COFI_CHECK_RED_BYTES +
                                     (size_t)(set->tensor[COFI_ARN_X].shift * run->element));
    return cof_allreduce_rmsnorm_run(run->plan[plan], &args, run->stream[plan]);
}

static cof_status enqueue_round(struct cofi_arn_run *run)
{
    for (int64_t i = 0; i < run->n_in_round; i++) {
        delay(run);
        COF_TRY(enqueue(run, run->first + i));
    }
    return COF_OK;
}

static cof_status captured_round(void *arg, cof_stream stream)
{
    struct cofi_arn_run *run = arg;
    (void)stream; /* the run's */
    for (int64_t i = 0; i < run->n_in_round; i++)
        COF_TRY(enqueue(run, run->first + i));
    return COF_OK;
}

/* Of which every fifth is eager, another one on each rank. */
static cof_status replay_rounds(struct cofi_arn_run *run)
{
    for (int pass = 0; pass < N_PASSES; pass++) {
        int64_t number = run->first / run->c.n_sets * N_PASSES + pass;
        delay(run);
        if (number % 5 == run->job->rank % 5)
            COF_TRY(enqueue_round(run));
        else
            COF_TRY(run->device->replay(run->job->world, run->graph, run->stream[0]));
    }
    return COF_OK;
}

/* ---- rounds of calls ------------------------------------------------------------------------ */

static cof_status sync_streams(struct cofi_arn_run *run)
{
    for (int i = 0; i < run->n_plans; i++)
        COF_TRY(cof_stream_sync(run->stream[i]));
    return cof_team_query(run->job->team); /* on devices streams do not tell */
}

static cof_status make_round(struct cofi_arn_run *run)
{
    for (int64_t i = 0; i < run->n_in_round; i++)
        COF_TRY(cofi_arn_prepare(run, (int)((run->first + i) % run->c.n_sets)));
    COF_TRY(run->graph ? replay_rounds(run) : enqueue_round(run));
    COF_TRY(sync_streams(run));
    bool ends = run->first + run->n_in_round > run->c.n_calls - run->c.n_sets; /* x is inspected */
    for (int64_t i = run->n_in_round; i-- > 0 && !ends;)
        COF_TRY(cofi_arn_spoil_x(run, (int)((run->first + i) % run->c.n_sets)));
    for (int64_t i = 0; i < run->n_in_round; i++)
        COF_TRY(cofi_arn_inspect(run, run->first + i));
    return COF_OK;
}

/* Processes that take turns on a device wait for whole turns, of milliseconds. */
static int64_t count_calls(const struct cofi_arn_run *run)
{
    const struct cofi_runtime_device *device = cofi_runtime_device(run->job->world);
    int n_turns = device ? device->n_turns(run->job->world) : 1;
    int64_t most = COFI_ARN_MAX_SETS + 400 / (n_turns * n_turns);
    int64_t n = n_turns > 1 && run->c.n_calls > most ? most : run->c.n_calls;
    return run->c.is_captured ? n - n % run->c.n_sets : n; /* a graph is a whole round */
}

static cof_status capture(struct cofi_arn_run *run)
{
    const struct cofi_check_work work = {captured_round, run};
    run->n_in_round = run->c.n_sets;
    COF_TRY(run->device->capture(run->job->world, &work, run->stream[0], &run->graph));
    return cof_team_barrier(run->job->team);
}

static cof_status make_calls(struct cofi_arn_run *run)
{
    run->c.n_calls = count_calls(run);
    COF_TRY(cof_team_barrier(run->job->team));
    if (run->c.is_captured)
        COF_TRY(capture(run));
    for (; run->first < run->c.n_calls; run->first += run->n_in_round) {
        int64_t left = run->c.n_calls - run->first;
        run->n_in_round = left < run->c.n_sets ? left : run->c.n_sets;
        COF_TRY(make_round(run));
    }
    COF_TRY(cofi_check_memory_download(&run->weight));
    if (!cofi_check_memory_intact(&run->weight))
        cofi_check_fail(run->result, "weight: a red zone was written to");
    COF_TRY(cof_team_barrier(run->job->team)); /* nobody closes while another one is in a call */
    return cofi_check_agree(run->job->team, run->result);
}

/* ---- one case ------------------------------------------------------------------------------- */

static cof_status open_and_run(struct cofi_arn_run *run)
{
    COF_TRY(cofi_arn_expect(run->job, &run->source, run->result));
    COF_TRY(open_arenas(run));
    COF_TRY(set_x_aside(run));
    COF_TRY(cofi_arn_open_tensors(run));
    COF_TRY(open_plans(run));
    return make_calls(run);
}

static cof_status run_case(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result)
{
    struct cofi_arn_run *run = calloc(1, sizeof *run);
    COF_FAIL_IF(!run, COF_ERR_NOMEM, "check: no memory");
    *result = (struct cofi_check_result){COFI_PASSED, ""};
    *run = (struct cofi_arn_run){.job = job, .result = result,
                                 .device = cofi_check_device(job->world)};
    for (int i = 0; i < COFI_ARN_MAX_PLANS; i++)
        run->arena[i].blocks.fd = -1;
    cofi_arn_case(options, idx, &run->c);
    run->source = (struct cofi_arn_source){&run->c, options->seed, job->n_ranks};
    run->element = cofi_dtype_bytes(run->c.params.dtype);
    run->row_bytes = run->c.params.hidden * run->element;
    choose_params(run);
    cof_status status = open_and_run(run);
    close_plans(run);
    cofi_arn_close_tensors(run);
    for (int i = 0; i < COFI_ARN_MAX_PLANS; i++)
        cofi_check_arena_close(&run->arena[i]);
    free(run);
    return status;
}

static size_t shared_bytes(const struct cofi_check_options *options)
{
    size_t most = 0;
    for (int64_t i = 0; i < cofi_arn_n_cases(options); i++) {
        struct cofi_arn_case c;
        cofi_arn_case(options, i, &c);
        size_t bytes = cofi_arn_expected_bytes(&c);
        most = bytes > most ? bytes : most;
    }
    return most;
}

extern const struct cofi_op_check cofi_allreduce_rmsnorm_check;
const struct cofi_op_check cofi_allreduce_rmsnorm_check = {
    .has_cuda = true,
    .n_cases = cofi_arn_n_cases,
    .case_line = cofi_arn_case_line,
    .shared_bytes = shared_bytes,
    .run_case = run_case,
};
