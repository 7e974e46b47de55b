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
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_check_data.h"
#include "ops/check_memory.h"
#include "ops/runtime/runtime_check.h"

enum { X, RESIDUAL, RESIDUAL_OUT, NORM_OUT, N_TENSORS };
enum { MAX_PLANS = 2, N_PASSES = 3 };
static const char *const names[N_TENSORS] = {"x", "residual", "residual_out", "norm_out"};

struct tensor {
    struct cofi_check_memory memory; /* none: bytes = 0, data = NULL */
    int64_t pitch, shift;            /* elements */
    char *image;                     /* of an input: what was uploaded */
};

struct set {
    struct tensor tensor[N_TENSORS];
    size_t x_offset; /* in the arena: of the memory with its red zones */
};

struct run {
    struct cofi_job *job;
    struct cofi_arn_case c;
    struct cofi_arn_source source;
    const struct cofi_check_device *device; /* NULL: the CPU */
    struct cofi_check_result *result;
    int64_t element, row_bytes;
    int n_plans;
    uint64_t n_delays;
    cof_allreduce_rmsnorm_params params[MAX_PLANS];
    struct cofi_check_arena arena[MAX_PLANS];
    cof_plan *plan[MAX_PLANS];
    cof_stream stream[MAX_PLANS];
    struct cofi_check_memory weight;
    int64_t weight_shift; /* bytes */
    struct set set[COFI_ARN_MAX_SETS];
    void *graph;
    int64_t first, n_in_round; /* calls of the round in hand */
};

/* ---- tensors -------------------------------------------------------------------------------- */

static void choose_layout(const struct run *run, int which, struct tensor *t)
{
    int64_t hidden = run->c.params.hidden;
    t->pitch = hidden;
    t->shift = 0;
    switch (run->c.layout) {
    case COFI_ARN_PITCHED:
    case COFI_ARN_3D_PITCHED: t->pitch += 8 * (which + 1); break;
    case COFI_ARN_ODD:
        t->pitch += 2 * which + 1;
        t->shift = 2 * which + 1;
        break;
    default: break;
    }
}

static size_t tensor_bytes(const struct run *run, const struct tensor *t)
{
    return (size_t)((t->shift + run->c.max_rows * t->pitch) * run->element);
}

/* An input's rows; the rest stays poison. */
static cof_status fill_input(struct run *run, int set, int which)
{
    struct tensor *t = &run->set[set].tensor[which];
    for (int64_t row = 0; row < run->c.max_rows; row++) {
        char *at = t->memory.host + (t->shift + row * t->pitch) * run->element;
        if (which == X)
            cofi_arn_make_x(&run->source, set, run->job->rank, row, at);
        else
            cofi_arn_make_residual(&run->source, set, row, at);
    }
    t->image = malloc(t->memory.bytes + 1);
    COF_FAIL_IF(!t->image, COF_ERR_NOMEM, "check: no memory for %zu bytes", t->memory.bytes);
    memcpy(t->image, t->memory.host, t->memory.bytes);
    return cofi_check_memory_upload(&t->memory);
}

static bool has_tensor(const struct run *run, int which)
{
    cof_allreduce_variant variant = run->c.params.variant;
    switch (which) {
    case RESIDUAL: return variant == COF_ALLREDUCE_RESIDUAL_NORM;
    case RESIDUAL_OUT: return run->c.wants_residual_out && !run->c.alias_residual;
    case NORM_OUT: return variant != COF_ALLREDUCE_ONLY && !run->c.alias_x;
    default: return true;
    }
}

static cof_status open_tensor(struct run *run, int set, int which)
{
    struct tensor *t = &run->set[set].tensor[which];
    choose_layout(run, which, t);
    size_t bytes = tensor_bytes(run, t);
    if (!has_tensor(run, which))
        return COF_OK;
    if (which == X && run->c.in_arena) {
        cof_arena_pointers view = COF_ARENA_POINTERS_INIT;
        COF_TRY(cof_arena_view(run->arena[0].arena, &view));
        char *base = (char *)view.base[run->job->rank] + run->set[set].x_offset;
        COF_TRY(cofi_check_memory_open_at(run->job->world, base, bytes, &t->memory));
    } else {
        COF_TRY(cofi_check_memory_open(run->job->world, bytes, &t->memory));
    }
    return which == X || which == RESIDUAL ? fill_input(run, set, which) : COF_OK;
}

static cof_status open_weight(struct run *run)
{
    const cof_allreduce_rmsnorm_params *p = &run->c.params;
    int64_t element = cofi_dtype_bytes(p->weight_dtype.bits ? p->weight_dtype : p->dtype);
    run->weight_shift = run->c.layout == COFI_ARN_ODD ? element : 0;
    COF_TRY(cofi_check_memory_open(run->job->world,
                                   (size_t)(run->weight_shift + p->hidden * element),
                                   &run->weight));
    cofi_arn_make_weight(&run->source, run->weight.host + run->weight_shift);
    return cofi_check_memory_upload(&run->weight);
}

static cof_status open_tensors(struct run *run)
{
    COF_TRY(open_weight(run));
    for (int s = 0; s < run->c.n_sets; s++)
        for (int which = 0; which < N_TENSORS; which++)
            COF_TRY(open_tensor(run, s, which));
    return COF_OK;
}

static void close_tensors(struct run *run)
{
    for (int s = 0; s < run->c.n_sets; s++)
        for (int which = 0; which < N_TENSORS; which++) {
            free(run->set[s].tensor[which].image);
            cofi_check_memory_close(&run->set[s].tensor[which].memory);
        }
    cofi_check_memory_close(&run->weight);
}

/* ---- plans and arenas ----------------------------------------------------------------------- */

/* The second plan goes another way. */
static void choose_params(struct run *run)
{
    static const cof_allreduce_algorithm other[] = {
        [COF_ALLREDUCE_AUTO] = COF_ALLREDUCE_TWO_SHOT,
        [COF_ALLREDUCE_ONE_SHOT] = COF_ALLREDUCE_TWO_SHOT,
        [COF_ALLREDUCE_TWO_SHOT] = COF_ALLREDUCE_ONE_SHOT,
        [COF_ALLREDUCE_PIPELINE] = COF_ALLREDUCE_ONE_SHOT};
    run->params[0] = run->params[1] = run->c.params;
    run->params[1].algorithm = other[run->c.params.algorithm];
    run->params[1].one_shot_bytes = 0;
    run->params[1].max_tokens += 3;
    run->n_plans = run->c.plans == COFI_ARN_ONE ? 1 : 2;
}

static cof_status set_x_aside(struct run *run)
{
    struct tensor t;
    choose_layout(run, X, &t);
    for (int s = 0; run->c.in_arena && s < run->c.n_sets; s++)
        COF_TRY(cof_arena_alloc(run->arena[0].arena,
                                cofi_check_memory_span(tensor_bytes(run, &t)),
                                &run->set[s].x_offset));
    return COF_OK;
}

/* As large as the workspace call says, for the plans from `first` on and the regions of x. */
static cof_status open_arena(struct run *run, int first, int n, struct cofi_check_arena *arena_out)
{
    size_t most = 0, sum = 0;
    struct tensor t;
    choose_layout(run, X, &t);
    for (int i = first; i < first + n; i++) {
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
        COF_TRY(cof_allreduce_rmsnorm_workspace(run->job->team, &run->params[i], &sizes));
        most = sizes.symmetric > most ? sizes.symmetric : most;
        sum += sizes.words;
    }
    if (run->c.in_arena)
        sum += (size_t)run->c.n_sets * (cofi_check_memory_span(tensor_bytes(run, &t)) + 128);
    return cofi_check_arena_open(run->job, run->job->team, most + sum, 0, run->c.first_epoch,
                                 arena_out);
}

static cof_status open_arenas(struct run *run)
{
    if (run->c.plans == COFI_ARN_SHARED || run->c.in_arena)
        return open_arena(run, 0, run->n_plans, &run->arena[0]);
    bool is_own = run->job->attach || run->c.first_epoch != 1;
    for (int i = 0; is_own && i < run->n_plans; i++)
        COF_TRY(open_arena(run, i, 1, &run->arena[i]));
    return COF_OK;
}

static cof_status open_plans(struct run *run)
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
static void close_plans(struct run *run)
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

static void delay(struct run *run)
{
    uint64_t x = cofi_check_random(run->source.seed, 70 + (uint64_t)run->job->rank,
                                   run->n_delays++);
    unsigned seldom = run->c.n_calls > 1000 ? 64 : 4;
    if (run->c.delays && x % seldom == 0)
        usleep((useconds_t)(x / 64 % 2000));
}

struct view {
    cof_tensor tensor;
    int64_t shape[3], strides[3];
};

/* T rows, of three dims where the layout has them: T = 2 * T/2, 3 * T/3 or T * 1. */
static const cof_tensor *view_rows(const struct run *run, const struct tensor *t, int64_t n_rows,
                                   struct view *v)
{
    bool is_3d = run->c.layout == COFI_ARN_3D || run->c.layout == COFI_ARN_3D_PITCHED;
    int64_t outer = n_rows % 2 == 0 ? 2 : n_rows % 3 == 0 ? 3 : n_rows;
    if (!t->memory.data)
        return NULL;
    *v = (struct view){.shape = {n_rows, run->c.params.hidden}, .strides = {t->pitch, 1}};
    if (is_3d)
        *v = (struct view){.shape = {outer, n_rows / outer, run->c.params.hidden},
                           .strides = {n_rows / outer * t->pitch, t->pitch, 1}};
    bool is_compact = t->pitch == run->c.params.hidden;
    v->tensor = (cof_tensor){.data = t->memory.data, .ndim = is_3d ? 3 : 2,
                             .device = cofi_check_memory_device(run->job->world),
                             .dtype = run->c.params.dtype, .shape = v->shape,
                             .strides = is_compact ? NULL : v->strides,
                             .byte_offset = (uint64_t)(t->shift * run->element)};
    return &v->tensor;
}

/* Where a result goes. */
static int place_of(const struct run *run, int which)
{
    return which == RESIDUAL_OUT && run->c.alias_residual ? RESIDUAL
           : which == NORM_OUT && run->c.alias_x          ? X
                                                          : which;
}

static cof_status enqueue(struct run *run, int64_t call)
{
    int at = (int)(call % run->c.n_sets), plan = (int)(call % run->n_plans);
    const struct set *set = &run->set[at];
    int64_t n_rows = cofi_arn_case_tokens(&run->c, run->source.seed, call);
    struct view view[N_TENSORS];
    const cof_tensor *tensor[N_TENSORS];
    cof_shape hidden = {{run->c.params.hidden}};
    cof_tensor weight = cof_tensor_make(run->weight.data,
                                        cofi_check_memory_device(run->job->world),
                                        run->c.params.weight_dtype.bits ? run->c.params.weight_dtype
                                                                        : run->c.params.dtype,
                                        1, &hidden);
    weight.byte_offset = (uint64_t)run->weight_shift;
    for (int i = 0; i < N_TENSORS; i++)
        tensor[i] = view_rows(run, &set->tensor[place_of(run, i)], n_rows, &view[i]);
    cof_allreduce_rmsnorm_args args = COF_ALLREDUCE_RMSNORM_ARGS_INIT;
    args.x = tensor[X];
    args.residual = tensor[RESIDUAL];
    args.weight = run->c.params.variant == COF_ALLREDUCE_ONLY ? NULL : &weight;
    args.residual_out = tensor[RESIDUAL_OUT];
    args.norm_out = tensor[NORM_OUT];
    if (run->c.in_arena)
        args.x_source = COF_IN_ARENA(set->x_offset + COFI_CHECK_RED_BYTES +
                                     (size_t)(set->tensor[X].shift * run->element));
    return cof_allreduce_rmsnorm_run(run->plan[plan], &args, run->stream[plan]);
}

static cof_status enqueue_round(struct run *run)
{
    for (int64_t i = 0; i < run->n_in_round; i++) {
        delay(run);
        COF_TRY(enqueue(run, run->first + i));
    }
    return COF_OK;
}

static cof_status captured_round(void *arg, cof_stream stream)
{
    struct run *run = arg;
    (void)stream; /* the run's */
    for (int64_t i = 0; i < run->n_in_round; i++)
        COF_TRY(enqueue(run, run->first + i));
    return COF_OK;
}

/* Of which every fifth is eager, another one on each rank. */
static cof_status replay_rounds(struct run *run)
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

/* ---- comparison ----------------------------------------------------------------------------- */

static uint32_t bits_of(const char *at, int64_t element)
{
    uint32_t bits = 0;
    memcpy(&bits, at, (size_t)element);
    return bits;
}

static void compare_row(struct run *run, int which, int64_t call, int64_t row, const char *ours,
                        const char *wanted)
{
    if (!memcmp(ours, wanted, (size_t)run->row_bytes))
        return;
    int64_t h = 0, element = run->element;
    while (!memcmp(ours + h * element, wanted + h * element, (size_t)element))
        h++;
    cofi_check_fail(run->result, "%s[row %lld, element %lld] of call %lld (T = %lld) = %#x (%.9g), "
                    "wanted %#x (%.9g)",
                    names[which], (long long)row, (long long)h, (long long)call,
                    (long long)cofi_arn_case_tokens(&run->c, run->source.seed, call),
                    bits_of(ours + h * element, element),
                    cofi_check_load(ours, run->c.params.dtype, h),
                    bits_of(wanted + h * element, element),
                    cofi_check_load(wanted, run->c.params.dtype, h));
}

/* Bytes from `begin` on that no call writes: those of the input, or poison. */
static bool is_untouched(const struct tensor *t, int64_t begin, int64_t end)
{
    const unsigned char *ours = (const unsigned char *)t->memory.host;
    if (t->image)
        return !memcmp(ours + begin, t->image + begin, (size_t)(end - begin));
    for (int64_t i = begin; i < end; i++)
        if (ours[i] != 0xff)
            return false;
    return true;
}

/* A tensor that has the results of a call, in its first n_rows rows; expected = NULL: it has none. */
static void compare_tensor(struct run *run, int which, int place, int64_t call, int64_t n_rows,
                           const char *expected)
{
    const struct tensor *t = &run->set[call % run->c.n_sets].tensor[place];
    int64_t end = 0;
    for (int64_t row = 0; expected && row < n_rows; row++) {
        int64_t begin = (t->shift + row * t->pitch) * run->element;
        compare_row(run, which, call, row, t->memory.host + begin, expected + row * run->row_bytes);
        if (!is_untouched(t, end, begin))
            cofi_check_fail(run->result, "%s: bytes before row %lld of call %lld were written to",
                            names[which], (long long)row, (long long)call);
        end = begin + run->row_bytes;
    }
    if (!is_untouched(t, end, (int64_t)t->memory.bytes))
        cofi_check_fail(run->result, expected ? "%s: bytes behind the %lld rows of call %lld were "
                                                "written to" : "%s was written to",
                        names[which], (long long)n_rows, (long long)call);
    if (!cofi_check_memory_intact(&t->memory))
        cofi_check_fail(run->result, "%s: a red zone was written to in call %lld", names[which],
                        (long long)call);
}

static cof_status inspect(struct run *run, int64_t call)
{
    int at = (int)(call % run->c.n_sets);
    struct set *set = &run->set[at];
    int64_t n_rows = cofi_arn_case_tokens(&run->c, run->source.seed, call);
    bool holds_result[N_TENSORS] = {false};
    for (int which = RESIDUAL_OUT; which <= NORM_OUT; which++) {
        int place = place_of(run, which);
        if (!set->tensor[place].memory.data)
            continue;
        COF_TRY(cofi_check_memory_download(&set->tensor[place].memory));
        compare_tensor(run, which, place, call, n_rows,
                       cofi_arn_expected(&run->c, run->job->shared, at, which == NORM_OUT));
        holds_result[place] = true;
    }
    /* Inputs: of the last calls, for theirs have been there all the time. */
    for (int which = X; which <= RESIDUAL && call >= run->c.n_calls - run->c.n_sets; which++) {
        if (holds_result[which] || !set->tensor[which].memory.data)
            continue;
        COF_TRY(cofi_check_memory_download(&set->tensor[which].memory));
        compare_tensor(run, which, which, call, 0, NULL);
    }
    return COF_OK;
}

/* ---- rounds of calls ------------------------------------------------------------------------ */

/* Outputs are poison, inputs that a call may have written over are themselves again. */
static cof_status prepare(struct run *run)
{
    for (int64_t i = 0; i < run->n_in_round; i++)
        for (int which = 0; which < N_TENSORS; which++) {
            struct tensor *t = &run->set[(run->first + i) % run->c.n_sets].tensor[which];
            bool is_alias = (which == X && run->c.alias_x) ||
                            (which == RESIDUAL && run->c.alias_residual);
            if (!t->memory.data || (t->image && !is_alias))
                continue;
            if (!t->image)
                COF_TRY(cofi_check_memory_poison(&t->memory));
            else {
                memcpy(t->memory.host, t->image, t->memory.bytes);
                COF_TRY(cofi_check_memory_upload(&t->memory));
            }
        }
    return COF_OK;
}

static cof_status sync_streams(struct run *run)
{
    for (int i = 0; i < run->n_plans; i++)
        COF_TRY(cof_stream_sync(run->stream[i]));
    return cof_team_query(run->job->team); /* on devices streams do not tell */
}

static cof_status make_round(struct run *run)
{
    COF_TRY(prepare(run));
    COF_TRY(run->graph ? replay_rounds(run) : enqueue_round(run));
    COF_TRY(sync_streams(run));
    for (int64_t i = 0; i < run->n_in_round; i++)
        COF_TRY(inspect(run, run->first + i));
    return COF_OK;
}

/* Processes that take turns on a device wait for whole turns, of milliseconds. */
static int64_t count_calls(const struct run *run)
{
    const struct cofi_runtime_device *device = cofi_runtime_device(run->job->world);
    int n_turns = device ? device->n_turns(run->job->world) : 1;
    int64_t most = COFI_ARN_MAX_SETS + 400 / (n_turns * n_turns);
    int64_t n = n_turns > 1 && run->c.n_calls > most ? most : run->c.n_calls;
    return run->c.is_captured ? n - n % run->c.n_sets : n; /* a graph is a whole round */
}

static cof_status capture(struct run *run)
{
    const struct cofi_check_work work = {captured_round, run};
    run->n_in_round = run->c.n_sets;
    COF_TRY(run->device->capture(run->job->world, &work, run->stream[0], &run->graph));
    return cof_team_barrier(run->job->team);
}

static cof_status make_calls(struct run *run)
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

static cof_status open_and_run(struct run *run)
{
    COF_TRY(cofi_arn_expect(run->job, &run->source, run->result));
    COF_TRY(open_arenas(run));
    COF_TRY(set_x_aside(run));
    COF_TRY(open_tensors(run));
    COF_TRY(open_plans(run));
    return make_calls(run);
}

static cof_status run_case(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result)
{
    struct run *run = calloc(1, sizeof *run);
    COF_FAIL_IF(!run, COF_ERR_NOMEM, "check: no memory");
    *result = (struct cofi_check_result){COFI_PASSED, ""};
    *run = (struct run){.job = job, .result = result, .device = cofi_check_device(job->world)};
    for (int i = 0; i < MAX_PLANS; i++)
        run->arena[i].blocks.fd = -1;
    cofi_arn_case(options, idx, &run->c);
    run->source = (struct cofi_arn_source){&run->c, options->seed, job->n_ranks};
    run->element = cofi_dtype_bytes(run->c.params.dtype);
    run->row_bytes = run->c.params.hidden * run->element;
    choose_params(run);
    cof_status status = open_and_run(run);
    close_plans(run);
    close_tensors(run);
    for (int i = 0; i < MAX_PLANS; i++)
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
