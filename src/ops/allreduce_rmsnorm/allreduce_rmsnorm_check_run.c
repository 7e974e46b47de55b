/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_check_run.h"

#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"

enum {
    X = COFI_ARN_X,
    RESIDUAL = COFI_ARN_RESIDUAL,
    RESIDUAL_OUT = COFI_ARN_RESIDUAL_OUT,
    NORM_OUT = COFI_ARN_NORM_OUT,
    N_TENSORS = COFI_ARN_TENSORS
};
static const char *const names[N_TENSORS] = {"x", "residual", "residual_out", "norm_out"};

/* ---- tensors -------------------------------------------------------------------------------- */

static void choose_layout(const struct cofi_arn_run *run, int which, struct cofi_arn_tensor *t)
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

static size_t tensor_bytes(const struct cofi_arn_run *run, const struct cofi_arn_tensor *t)
{
    return (size_t)((t->shift + run->c.max_rows * t->pitch) * run->element);
}

/* An input's rows; the rest stays poison. */
static cof_status fill_input(struct cofi_arn_run *run, int set, int which)
{
    struct cofi_arn_tensor *t = &run->set[set].tensor[which];
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

static bool has_tensor(const struct cofi_arn_run *run, int which)
{
    cof_allreduce_variant variant = run->c.params.variant;
    switch (which) {
    case RESIDUAL: return variant == COF_ALLREDUCE_RESIDUAL_NORM;
    case RESIDUAL_OUT: return run->c.wants_residual_out && !run->c.alias_residual;
    case NORM_OUT: return variant != COF_ALLREDUCE_ONLY && !run->c.alias_x;
    default: return true;
    }
}

static cof_status open_tensor(struct cofi_arn_run *run, int set, int which)
{
    struct cofi_arn_tensor *t = &run->set[set].tensor[which];
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

size_t cofi_arn_x_bytes(const struct cofi_arn_run *run)
{
    struct cofi_arn_tensor t;
    choose_layout(run, X, &t);
    return tensor_bytes(run, &t);
}

static cof_status open_weight(struct cofi_arn_run *run)
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

cof_status cofi_arn_open_tensors(struct cofi_arn_run *run)
{
    COF_TRY(open_weight(run));
    for (int s = 0; s < run->c.n_sets; s++)
        for (int which = 0; which < N_TENSORS; which++)
            COF_TRY(open_tensor(run, s, which));
    return COF_OK;
}

void cofi_arn_close_tensors(struct cofi_arn_run *run)
{
    for (int s = 0; s < run->c.n_sets; s++)
        for (int which = 0; which < N_TENSORS; which++) {
            free(run->set[s].tensor[which].image);
            cofi_check_memory_close(&run->set[s].tensor[which].memory);
        }
    cofi_check_memory_close(&run->weight);
}

/* ---- views ---------------------------------------------------------------------------------- */

/* Where a result goes. */
static int place_of(const struct cofi_arn_run *run, int which)
{
    return which == RESIDUAL_OUT && run->c.alias_residual ? RESIDUAL
           : which == NORM_OUT && run->c.alias_x          ? X
                                                          : which;
}

/* T = 2 * T/2, 3 * T/3 or T * 1. */
const cof_tensor *cofi_arn_view(const struct cofi_arn_run *run, const struct cofi_arn_set *set,
                                enum cofi_arn_which which, int64_t n_rows, struct cofi_arn_view *v)
{
    const struct cofi_arn_tensor *t = &set->tensor[place_of(run, which)];
    bool is_3d = run->c.layout == COFI_ARN_3D || run->c.layout == COFI_ARN_3D_PITCHED;
    int64_t outer = n_rows % 2 == 0 ? 2 : n_rows % 3 == 0 ? 3 : n_rows;
    if (!t->memory.data)
        return NULL;
    *v = (struct cofi_arn_view){.shape = {n_rows, run->c.params.hidden}, .strides = {t->pitch, 1}};
    if (is_3d)
        *v = (struct cofi_arn_view){.shape = {outer, n_rows / outer, run->c.params.hidden},
                           .strides = {n_rows / outer * t->pitch, t->pitch, 1}};
    bool is_compact = t->pitch == run->c.params.hidden;
    v->tensor = (cof_tensor){.data = t->memory.data, .ndim = is_3d ? 3 : 2,
                             .device = cofi_check_memory_device(run->job->world),
                             .dtype = run->c.params.dtype, .shape = v->shape,
                             .strides = is_compact ? NULL : v->strides,
                             .byte_offset = (uint64_t)(t->shift * run->element)};
    return &v->tensor;
}

cof_tensor cofi_arn_view_weight(const struct cofi_arn_run *run, cof_shape *shape)
{
    const cof_allreduce_rmsnorm_params *p = &run->c.params;
    *shape = (cof_shape){{p->hidden}};
    cof_tensor weight = cof_tensor_make(run->weight.data,
                                        cofi_check_memory_device(run->job->world),
                                        p->weight_dtype.bits ? p->weight_dtype : p->dtype, 1,
                                        shape);
    weight.byte_offset = (uint64_t)run->weight_shift;
    return weight;
}

/* ---- comparison ----------------------------------------------------------------------------- */

static uint32_t bits_of(const char *at, int64_t element)
{
    uint32_t bits = 0;
    memcpy(&bits, at, (size_t)element);
    return bits;
}

static void compare_row(struct cofi_arn_run *run, int which, int64_t call, int64_t row,
                        const char *ours, const char *wanted)
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
static bool is_untouched(const struct cofi_arn_tensor *t, int64_t begin, int64_t end)
{
    const unsigned char *ours = (const unsigned char *)t->memory.host;
    if (t->image)
        return !memcmp(ours + begin, t->image + begin, (size_t)(end - begin));
    for (int64_t i = begin; i < end; i++)
        if (ours[i] != 0xff)
            return false;
    return true;
}

/* A tensor that has the results of a call in its first rows; expected = NULL: it has none. */
static void compare_tensor(struct cofi_arn_run *run, int which, int place, int64_t call,
                           int64_t n_rows, const char *expected)
{
    const struct cofi_arn_tensor *t = &run->set[call % run->c.n_sets].tensor[place];
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

cof_status cofi_arn_inspect(struct cofi_arn_run *run, int64_t call)
{
    int at = (int)(call % run->c.n_sets);
    struct cofi_arn_set *set = &run->set[at];
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

cof_status cofi_arn_prepare(struct cofi_arn_run *run, int set)
{
    for (int which = 0; which < N_TENSORS; which++) {
        struct cofi_arn_tensor *t = &run->set[set].tensor[which];
        bool is_changed = which == X || (which == RESIDUAL && run->c.alias_residual);
        if (t->memory.data && !t->image)
            COF_TRY(cofi_check_memory_poison(&t->memory));
        if (!t->image || !is_changed)
            continue;
        memcpy(t->memory.host, t->image, t->memory.bytes);
        COF_TRY(cofi_check_memory_upload(&t->memory));
    }
    return COF_OK;
}

cof_status cofi_arn_spoil_x(struct cofi_arn_run *run, int set)
{
    return run->c.alias_x ? COF_OK : cofi_check_memory_poison(&run->set[set].tensor[X].memory);
}
