/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Parameters, plan and arguments of allreduce_rmsnorm, on any device; a back end does the rest. */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "core/log.h"
#include "core/sized.h"
#include "symm/call.h"
#include "symm/engine.h"

#define MAX_SIZE (INT64_C(1) << 56)

/* ---- parameters ----------------------------------------------------------------------------- */

static cof_status check_dtypes(const cof_allreduce_rmsnorm_params *p)
{
    COF_FAIL_IF(!cofi_dtype_is_elem(p->dtype), COF_ERR_INVALID,
                "params.dtype = %s: wanted bf16, f16 or f32", cof_dtype_name(p->dtype));
    if (!cofi_dtype_equal(p->weight_dtype, p->dtype) &&
        !cofi_dtype_equal(p->weight_dtype, COF_F32)) {
        char text[40];
        snprintf(text, sizeof text, "%s", cof_dtype_name(p->weight_dtype));
        return COF_FAIL(COF_ERR_INVALID, "params.weight_dtype = %s: wanted %s, as dtype, or f32",
                        text, cof_dtype_name(p->dtype));
    }
    return COF_OK;
}

static cof_status check_choices(const cof_allreduce_rmsnorm_params *p)
{
    COF_FAIL_IF((unsigned)p->variant > COF_ALLREDUCE_ONLY, COF_ERR_INVALID,
                "params.variant = %d: wanted 0 (residual, norm), 1 (norm) or 2 (all-reduce only)",
                (int)p->variant);
    COF_FAIL_IF((unsigned)p->rounding > COF_ALLREDUCE_EXACT, COF_ERR_INVALID,
                "params.rounding = %d: wanted 0 (match unfused) or 1 (exact)", (int)p->rounding);
    COF_FAIL_IF((unsigned)p->algorithm > COF_ALLREDUCE_TWO_SHOT, COF_ERR_INVALID,
                "params.algorithm = %d: wanted 0 (auto), 1 (one shot) or 2 (two shot)",
                (int)p->algorithm);
    COF_FAIL_IF(p->weight_bias != 0 && p->weight_bias != 1, COF_ERR_INVALID,
                "params.weight_bias = %d: wanted 0 or 1", p->weight_bias);
    if (p->variant == COF_ALLREDUCE_ONLY)
        COF_FAIL_IF(p->eps != 0, COF_ERR_INVALID, "params.eps = %g: wanted 0 with variant 2",
                    (double)p->eps);
    else
        COF_FAIL_IF(!(p->eps > 0) || !isfinite(p->eps), COF_ERR_INVALID,
                    "params.eps = %g: wanted a finite number > 0", (double)p->eps);
    return COF_OK;
}

static cof_status check_sizes(const cof_allreduce_rmsnorm_params *p)
{
    const struct {
        const char *name;
        int64_t value, least;
    } rules[] = {{"hidden", p->hidden, 1},
                 {"max_tokens", p->max_tokens, 1},
                 {"one_shot_bytes", p->one_shot_bytes, 0},
                 {"max_ctas", p->max_ctas, 0}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        COF_FAIL_IF(rules[i].value < rules[i].least || rules[i].value > MAX_SIZE, COF_ERR_INVALID,
                    "params.%s = %lld: wanted %lld .. %lld", rules[i].name,
                    (long long)rules[i].value, (long long)rules[i].least, (long long)MAX_SIZE);
    COF_FAIL_IF((__int128)p->max_tokens * p->hidden > MAX_SIZE / 2 / COFI_ARN_MAX_RANKS,
                COF_ERR_INVALID, "params: max_tokens * hidden is past the address space");
    return COF_OK;
}

/* Validates, and fills defaults in. */
static cof_status read_params(const cof_allreduce_rmsnorm_params *given,
                              cof_allreduce_rmsnorm_params *p)
{
    COF_TRY(cofi_sized_read(p, sizeof *p, COFI_SIZE_THROUGH(cof_allreduce_rmsnorm_params, max_ctas),
                            given, "params"));
    if (cofi_dtype_equal(p->weight_dtype, (cof_dtype){0, 0, 0}))
        p->weight_dtype = p->dtype;
    COF_TRY(check_dtypes(p));
    COF_TRY(check_choices(p));
    return check_sizes(p);
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* From params to sizes; local. */
static cof_status set_up(struct cofi_arn_plan *plan, cof_team *team,
                         const cof_allreduce_rmsnorm_params *params)
{
    plan->base.team = team;
    plan->rank = cof_team_rank(team);
    plan->n_ranks = cof_team_size(team);
    plan->backend = team->world->ops->device ? cofi_arn_cuda() : &cofi_arn_cpu;
    COF_TRY(read_params(params, &plan->params));
    COF_FAIL_IF(plan->n_ranks > COFI_ARN_MAX_RANKS, COF_ERR_UNSUPPORTED,
                "team: %d ranks, wanted at most %d", plan->n_ranks, COFI_ARN_MAX_RANKS);
    COF_FAIL_IF(!plan->backend, COF_ERR_UNSUPPORTED,
                "allreduce_rmsnorm: this library was built without CUDA");
    plan->elem = cofi_elem_of(plan->params.dtype);
    plan->weight_elem = cofi_elem_of(plan->params.weight_dtype);
    plan->row_bytes = plan->params.hidden * cofi_elem_bytes(plan->elem);
    if (plan->backend->check)
        COF_TRY(plan->backend->check(plan));
    plan->backend->lay_out(plan);
    return COF_OK;
}

/* Of the slab, but for words: tagged words lie behind the payload, or anywhere else. */
static size_t symmetric_data(const struct cofi_arn_plan *plan)
{
    return cofi_round_up(plan->payload_bytes, COFI_LINE) +
           cofi_round_up(plan->tagged_bytes, COFI_LINE);
}

cof_status cof_allreduce_rmsnorm_workspace(cof_team *team,
                                           const cof_allreduce_rmsnorm_params *params,
                                           cof_workspace_sizes *sizes)
{
    struct cofi_arn_plan plan = {0};
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_TRY(cofi_world_usable(team->world));
    COF_TRY(set_up(&plan, team, params));
    return cofi_workspace_write(
        sizes, &(cof_workspace_sizes){
                   .local = plan.local_bytes + sizeof plan,
                   .symmetric = cofi_arena_slab_bytes(plan.n_ranks, symmetric_data(&plan),
                                                      plan.n_purposes),
                   .words = cofi_arena_words_bytes(plan.n_ranks, plan.n_purposes) +
                            cofi_round_up(plan.tagged_bytes, COFI_LINE)});
}

static void describe(struct cofi_arn_plan *plan, const cof_arena *arena)
{
    static const char *const variants[] = {"residual_norm", "norm", "only"};
    static const char *const roundings[] = {"match_unfused", "exact"};
    const cof_allreduce_rmsnorm_params *p = &plan->params;
    char engine[40], words[200] = "", weight[40];
    cofi_arena_name(plan->base.team, arena, engine, sizeof engine);
    plan->backend->describe(plan, words, sizeof words);
    snprintf(weight, sizeof weight, "%s",
             p->variant == COF_ALLREDUCE_ONLY ? "none" : cof_dtype_name(p->weight_dtype));
    snprintf(plan->base.describe, sizeof plan->base.describe,
             "allreduce_rmsnorm dtype=%s weight=%s H=%lld max_tokens=%lld variant=%s rounding=%s "
             "eps=%.9g weight_bias=%d %s P=%d engine=%s device=%s",
             cof_dtype_name(p->dtype), weight, (long long)p->hidden, (long long)p->max_tokens,
             variants[p->variant], roundings[p->rounding], (double)p->eps, p->weight_bias, words,
             plan->n_ranks, engine, plan->backend->name);
    size_t used = strlen(plan->base.describe);
    if (plan->backend == &cofi_arn_cpu)
        snprintf(plan->base.describe + used, sizeof plan->base.describe - used, " isa=%s",
                 cofi_isa_name(cofi_isa()));
}

static void destroy(cof_plan *base)
{
    struct cofi_arn_plan *plan = (struct cofi_arn_plan *)base;
    if (plan->backend)
        plan->backend->close(plan);
    cofi_arena_unbind(&plan->binding);
    free(plan);
}

/* On every rank alike, whatever its own status: the exchanges must match. */
static cof_status build(struct cofi_arn_plan *plan, cof_team *team,
                        const cof_allreduce_rmsnorm_params *params, cof_arena *arena)
{
    cof_status status = set_up(plan, team, params);
    if (status == COF_OK)
        status = cofi_arena_check(team, arena);
    if (status == COF_OK)
        describe(plan, arena);
    COF_TRY(cofi_plan_agree(team, "allreduce_rmsnorm", status, plan->base.describe));
    const struct cofi_binding_spec spec = {.op = "allreduce_rmsnorm",
                                           .payload_bytes = plan->payload_bytes,
                                           .tagged_bytes = plan->tagged_bytes,
                                           .tagged_step = "rows",
                                           .n_purposes = plan->n_purposes,
                                           .acks = plan->acks};
    COF_TRY(cofi_arena_bind(team, arena, &spec, &plan->binding));
    COF_TRY(cofi_team_agree(team, "plan open", plan->backend->open(plan)));
    cofi_log(COFI_LOG_PLAN, "plan: %s", plan->base.describe);
    return COF_OK;
}

cof_status cof_allreduce_rmsnorm_plan_create(cof_team *team,
                                             const cof_allreduce_rmsnorm_params *params,
                                             cof_arena *arena, cof_plan **plan_out)
{
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(!plan_out, COF_ERR_INVALID, "plan_out: NULL");
    *plan_out = NULL;
    cof_plan *plan;
    COF_TRY(cofi_plan_open(team, "allreduce_rmsnorm", sizeof(struct cofi_arn_plan), destroy,
                           &plan));
    cof_status status = build((struct cofi_arn_plan *)plan, team, params, arena);
    return cofi_plan_finish(plan, status, plan_out);
}

/* ---- tensors of a call ---------------------------------------------------------------------- */

struct operand {
    const cof_tensor *tensor;
    const char *name;
    struct cofi_arn_rows *rows;
};

static cof_device device_of(const struct cofi_arn_plan *plan)
{
    int number = cof_world_device(plan->base.team->world);
    return number < 0 ? (cof_device){COF_DEVICE_CPU, 0} : (cof_device){COF_DEVICE_CUDA, number};
}

/* Elements from row to row. Dims of one entry have no stride that counts. */
static cof_status read_pitch(const struct operand *o, int64_t hidden, int64_t *pitch)
{
    const cof_tensor *t = o->tensor;
    int64_t stride[8], n = 1;
    cofi_tensor_strides(t, stride);
    *pitch = hidden;
    for (int i = t->ndim - 2; i >= 0; i--) {
        if (t->shape[i] == 1)
            continue;
        if (n == 1)
            *pitch = stride[i];
        COF_FAIL_IF(stride[i] != *pitch * n, COF_ERR_UNSUPPORTED,
                    "%s: stride of dim %d = %lld, wanted %lld: rows evenly spaced", o->name, i,
                    (long long)stride[i], (long long)(*pitch * n));
        n *= t->shape[i];
    }
    return COF_OK;
}

/* [.., H] as rows; their number is `*n_tokens`, or becomes it where that is negative. */
static cof_status read_rows(const struct cofi_arn_plan *plan, const struct operand *o,
                            int64_t *n_tokens)
{
    static const char *const dims[] = {"T", "T", "T", "T", "T", "T", "T", "H"};
    const cof_tensor *t = o->tensor;
    int64_t shape[8], n = 1, pitch;
    COF_FAIL_IF(!t, COF_ERR_INVALID, "%s: NULL, wanted a tensor", o->name);
    COF_FAIL_IF(t->ndim < 2 || t->ndim > 8, COF_ERR_INVALID, "%s: ndim = %d, wanted 2 .. 8",
                o->name, t->ndim);
    COF_FAIL_IF(!t->shape, COF_ERR_INVALID, "%s: shape is NULL", o->name);
    for (int i = 0; i < t->ndim - 1; i++) {
        shape[i] = t->shape[i];
        COF_FAIL_IF(shape[i] < 0 || shape[i] > MAX_SIZE, COF_ERR_INVALID,
                    "%s: dim %d (T) = %lld, wanted 0 .. %lld", o->name, i, (long long)shape[i],
                    (long long)MAX_SIZE);
        __int128 product = (__int128)n * shape[i];
        COF_FAIL_IF(product > MAX_SIZE, COF_ERR_INVALID, "%s: more than %lld rows", o->name,
                    (long long)MAX_SIZE);
        n = (int64_t)product;
    }
    shape[t->ndim - 1] = plan->params.hidden;
    struct cofi_tensor_rule rule = {o->name, plan->params.dtype, t->ndim, shape,
                                    dims + 8 - t->ndim};
    COF_TRY(cofi_tensor_check_on(t, &rule, device_of(plan)));
    *n_tokens = *n_tokens < 0 ? n : *n_tokens;
    COF_FAIL_IF(n != *n_tokens, COF_ERR_INVALID, "%s: %lld rows, wanted %lld, as x has", o->name,
                (long long)n, (long long)*n_tokens);
    if (n == 0)
        return COF_OK;
    COF_TRY(read_pitch(o, plan->params.hidden, &pitch));
    *o->rows = (struct cofi_arn_rows){cofi_tensor_data(t),
                                      pitch * cofi_dtype_bytes(plan->params.dtype)};
    return COF_OK;
}

static cof_status read_weight(const struct cofi_arn_plan *plan, const cof_tensor *weight,
                              struct cofi_arn_call *call)
{
    static const char *const dims[] = {"H"};
    const cof_allreduce_rmsnorm_params *p = &plan->params;
    struct cofi_tensor_rule rule = {"weight", p->weight_dtype, 1, &p->hidden, dims};
    COF_TRY(cofi_tensor_check_on(weight, &rule, device_of(plan)));
    call->weight = cofi_tensor_data(weight);
    return COF_OK;
}

/* ---- overlaps ------------------------------------------------------------------------------- */

static bool is_same(const struct cofi_arn_rows *a, const struct cofi_arn_rows *b, int64_t n)
{
    return a->data == b->data && (a->pitch == b->pitch || n == 1);
}

static cof_status check_apart(const struct operand *a, const struct operand *b)
{
    return a->tensor && b->tensor ? cofi_tensor_check_apart(a->tensor, a->name, b->tensor, b->name)
                                  : COF_OK;
}

/* `out` may be `in` itself, row by row. */
static cof_status check_same_or_apart(const struct operand *out, const struct operand *in,
                                      int64_t n)
{
    return out->tensor && in->tensor && is_same(out->rows, in->rows, n) ? COF_OK
                                                                        : check_apart(out, in);
}

static cof_status check_overlaps(const struct operand *x, const struct operand *residual,
                                 const struct operand *weight, const struct operand *sum,
                                 const struct operand *norm, const struct cofi_arn_call *call)
{
    COF_TRY(check_apart(sum, norm));
    COF_TRY(check_apart(sum, x));
    COF_TRY(check_same_or_apart(sum, residual, call->n_tokens));
    COF_TRY(check_apart(sum, weight));
    COF_TRY(call->x_source ? check_apart(norm, x) : check_same_or_apart(norm, x, call->n_tokens));
    COF_TRY(check_apart(norm, residual));
    return check_apart(norm, weight);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static cof_status check_x_source(const struct cofi_arn_plan *plan, const struct cofi_arn_call *call)
{
    if (call->x_source == 0)
        return COF_OK;
    cof_arena *arena = plan->binding.arena;
    long long offset = (long long)call->x_source - 1;
    COF_FAIL_IF(arena->is_private, COF_ERR_INVALID,
                "args.x_source = %lld: wanted 0 for a plan without an arena of the caller's",
                (long long)call->x_source);
    __int128 span = (__int128)call->x.pitch * (call->n_tokens - 1) + plan->row_bytes;
    COF_FAIL_IF(offset < (long long)plan->payload_bytes || offset + span > arena->data_bytes,
                COF_ERR_INVALID,
                "args.x_source: x at offset %lld of the arena, wanted within the memory of "
                "cof_arena_alloc, between %zu and %zu",
                offset, plan->payload_bytes, arena->data_bytes);
    COF_FAIL_IF(call->x.data != cofi_arena_data(arena) + offset, COF_ERR_INVALID,
                "x: data at %p, wanted %p, which is offset %lld (args.x_source) of the arena",
                (void *)call->x.data, (void *)(cofi_arena_data(arena) + offset), offset);
    return COF_OK;
}

/* Tensors that the plan's variant has no use for. */
static cof_status check_unused(const struct cofi_arn_plan *plan,
                               const cof_allreduce_rmsnorm_args *a)
{
    cof_allreduce_variant v = plan->params.variant;
    COF_FAIL_IF(a->residual && v != COF_ALLREDUCE_RESIDUAL_NORM, COF_ERR_INVALID,
                "residual: given, wanted NULL with variant %d", (int)v);
    COF_FAIL_IF(a->weight && v == COF_ALLREDUCE_ONLY, COF_ERR_INVALID,
                "weight: given, wanted NULL with variant 2");
    COF_FAIL_IF(a->norm_out && v == COF_ALLREDUCE_ONLY, COF_ERR_INVALID,
                "norm_out: given, wanted NULL with variant 2");
    COF_FAIL_IF(a->x_source < 0, COF_ERR_INVALID,
                "args.x_source = %lld: wanted 0 or COF_IN_ARENA(offset)", (long long)a->x_source);
    return COF_OK;
}

static cof_status read_call(const struct cofi_arn_plan *plan, const cof_allreduce_rmsnorm_args *a,
                            struct cofi_arn_call *call)
{
    cof_allreduce_variant v = plan->params.variant;
    *call = (struct cofi_arn_call){.n_tokens = -1, .x_source = a->x_source};
    struct operand x = {a->x, "x", &call->x}, weight = {a->weight, "weight", NULL},
                   residual = {a->residual, "residual", &call->residual},
                   sum = {a->residual_out, "residual_out", &call->residual_out},
                   norm = {a->norm_out, "norm_out", &call->norm_out};
    COF_TRY(check_unused(plan, a));
    COF_TRY(read_rows(plan, &x, &call->n_tokens));
    if (v == COF_ALLREDUCE_RESIDUAL_NORM)
        COF_TRY(read_rows(plan, &residual, &call->n_tokens));
    if (v != COF_ALLREDUCE_NORM || a->residual_out)
        COF_TRY(read_rows(plan, &sum, &call->n_tokens));
    if (v != COF_ALLREDUCE_ONLY) {
        COF_TRY(read_weight(plan, a->weight, call));
        COF_TRY(read_rows(plan, &norm, &call->n_tokens));
    }
    if (call->n_tokens == 0)
        return COF_OK;
    COF_TRY(check_overlaps(&x, &residual, &weight, &sum, &norm, call));
    return check_x_source(plan, call);
}

cof_status cof_allreduce_rmsnorm_run(cof_plan *base, const cof_allreduce_rmsnorm_args *args,
                                     cof_stream stream)
{
    COF_FAIL_IF(!base, COF_ERR_INVALID, "plan: NULL");
    COF_FAIL_IF(strcmp(base->op, "allreduce_rmsnorm"), COF_ERR_INVALID,
                "plan: a plan of %s, wanted allreduce_rmsnorm", base->op);
    struct cofi_arn_plan *plan = (struct cofi_arn_plan *)base;
    cof_allreduce_rmsnorm_args a;
    struct cofi_arn_call call;
    COF_TRY(cofi_sized_read(&a, sizeof a, COFI_SIZE_THROUGH(cof_allreduce_rmsnorm_args, x_source),
                            args, "args"));
    COF_TRY(read_call(plan, &a, &call));
    COF_TRY(cofi_team_status(base->team));
    if (cofi_arena_status(plan->binding.arena) != COF_OK)
        return cofi_fail_text(COF_ERR_POISONED, cof_last_error());
    COF_TRY(cofi_call_allowed(&plan->binding));
    if (call.n_tokens == 0) { /* on all ranks, or they find out by the count */
        plan->n_empty++;
        return COF_OK;
    }
    return plan->backend->run(plan, &call, stream);
}
