/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Parameters, plan and arguments of attention, on any device; a back end does the rest. */
#include "ops/attention/attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "core/log.h"
#include "core/sized.h"
#include "symm/engine.h"

#define MAX_HEAD_DIM 512
#define MAX_WINDOW (INT64_C(1) << 56)

/* ---- parameters ----------------------------------------------------------------------------- */

static cof_status check_choices(const cof_attention_params *p)
{
    COF_FAIL_IF(!cofi_dtype_is_elem(p->dtype), COF_ERR_INVALID,
                "params.dtype = %s: wanted bf16, f16 or f32", cof_dtype_name(p->dtype));
    COF_FAIL_IF(p->format != COF_FORMAT_BSHD && p->format != COF_FORMAT_SBHD, COF_ERR_INVALID,
                "params.format = %d: wanted 0 (bshd) or 1 (sbhd)", (int)p->format);
    COF_FAIL_IF(p->mask != COF_MASK_NONE && p->mask != COF_MASK_CAUSAL, COF_ERR_INVALID,
                "params.mask = %d: wanted 0 (none) or 1 (causal)", (int)p->mask);
    COF_FAIL_IF(p->layout != COF_LAYOUT_ZIGZAG && p->layout != COF_LAYOUT_CONTIGUOUS,
                COF_ERR_INVALID, "params.layout = %d: wanted 0 (zigzag) or 1 (contiguous)",
                (int)p->layout);
    COF_FAIL_IF(p->chunking != COF_CHUNKING_BALANCED && p->chunking != COF_CHUNKING_PADDED,
                COF_ERR_INVALID, "params.chunking = %d: wanted 0 (balanced) or 1 (padded)",
                (int)p->chunking);
    COF_FAIL_IF(p->schedule != COF_SCHEDULE_DEFAULT && p->schedule != COF_SCHEDULE_RING &&
                    p->schedule != COF_SCHEDULE_GATHER,
                COF_ERR_INVALID,
                "params.schedule = %d: wanted 0 (default), 1 (ring) or 2 (gather)",
                (int)p->schedule);
    const struct {
        const char *name;
        int value;
    } flags[] = {{"forward_only", p->forward_only}, {"wire_f32", p->wire_f32},
                 {"save_kv", p->save_kv}, {"has_window", p->has_window},
                 {"only_compact", p->only_compact}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        COF_FAIL_IF((flags[i].value | 1) != 1, COF_ERR_INVALID, "params.%s = %d: wanted 0 or 1",
                    flags[i].name, flags[i].value);
    COF_FAIL_IF(p->save_kv && p->forward_only, COF_ERR_INVALID,
                "params.save_kv = 1: with forward_only nothing reads what is saved");
    return COF_OK;
}

static cof_status check_window(const cof_attention_params *p)
{
    const struct {
        const char *name;
        int64_t value;
    } sides[] = {{"window_left", p->window_left}, {"window_right", p->window_right}};
    for (size_t i = 0; i < sizeof sides / sizeof sides[0]; i++)
        COF_FAIL_IF(p->has_window ? sides[i].value < -1 || sides[i].value > MAX_WINDOW
                                  : sides[i].value != 0,
                    COF_ERR_INVALID, "params.%s = %lld: wanted %s", sides[i].name,
                    (long long)sides[i].value,
                    p->has_window ? "-1 (no limit) .. 2^56" : "0 without has_window");
    return COF_OK;
}

static cof_layout layout_of(const cof_team *team, const cof_attention_params *p)
{
    return (cof_layout){p->layout, p->chunking, cof_team_size(team), p->n_rows};
}

static cof_status check_sizes(const cof_team *team, const cof_attention_params *p)
{
    COF_FAIL_IF(p->n_batch < 1, COF_ERR_INVALID, "params.n_batch = %lld: wanted >= 1",
                (long long)p->n_batch);
    COF_FAIL_IF(p->n_rows < 0, COF_ERR_INVALID, "params.n_rows = %lld: wanted >= 0",
                (long long)p->n_rows);
    COF_FAIL_IF(p->n_heads < 1, COF_ERR_INVALID, "params.n_heads = %lld: wanted >= 1",
                (long long)p->n_heads);
    COF_FAIL_IF(p->n_kv_heads < 1 || p->n_heads % p->n_kv_heads, COF_ERR_INVALID,
                "params.n_kv_heads = %lld: wanted a divisor of n_heads = %lld",
                (long long)p->n_kv_heads, (long long)p->n_heads);
    COF_FAIL_IF(p->head_dim_qk < 1 || p->head_dim_qk > MAX_HEAD_DIM, COF_ERR_INVALID,
                "params.head_dim_qk = %lld: wanted 1 .. %d", (long long)p->head_dim_qk,
                MAX_HEAD_DIM);
    COF_FAIL_IF(p->head_dim_v < 1 || p->head_dim_v > MAX_HEAD_DIM, COF_ERR_INVALID,
                "params.head_dim_v = %lld: wanted 1 .. %d", (long long)p->head_dim_v, MAX_HEAD_DIM);
    COF_FAIL_IF(!isfinite((float)p->scale), COF_ERR_INVALID,
                "params.scale = %g: wanted a number that is finite in fp32", p->scale);
    cof_layout layout = layout_of(team, p);
    return cofi_plan_check_size(&layout, p->n_batch, p->n_heads, MAX_HEAD_DIM);
}

/* Validates, and fills defaults in. */
static cof_status read_params(const cof_team *team, const struct cofi_attention_backend *backend,
                              const cof_attention_params *given, cof_attention_params *p)
{
    COF_TRY(cofi_sized_read(p, sizeof *p, COFI_SIZE_THROUGH(cof_attention_params, only_compact),
                            given, "params"));
    p->n_kv_heads = p->n_kv_heads ? p->n_kv_heads : p->n_heads;
    p->head_dim_v = p->head_dim_v ? p->head_dim_v : p->head_dim_qk;
    COF_TRY(check_choices(p));
    COF_TRY(check_window(p));
    COF_TRY(check_sizes(team, p));
    if (p->schedule == COF_SCHEDULE_DEFAULT)
        p->schedule =
            p->n_rows <= backend->gather_max_rows ? COF_SCHEDULE_GATHER : COF_SCHEDULE_RING;
    p->scale = p->scale != 0 ? p->scale : 1 / sqrt((double)p->head_dim_qk);
    return COF_OK;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

static bool is_limit(int64_t side, int64_t n_rows)
{
    return side >= 0 && side < n_rows - 1;
}

/* A window that leaves all keys is none. */
static struct cofi_sight sight_of(const cof_attention_params *p)
{
    bool is_causal = p->mask == COF_MASK_CAUSAL;
    bool has_window =
        p->has_window && (is_limit(p->window_left, p->n_rows) ||
                          (!is_causal && is_limit(p->window_right, p->n_rows)));
    return (struct cofi_sight){p->mask, has_window, {p->window_left, p->window_right}};
}

/* From params to sizes; local. */
static cof_status set_up(struct cofi_attention_plan *plan, cof_team *team,
                         const cof_attention_params *params)
{
    plan->base.team = team;
    plan->backend = team->world->ops->device ? cofi_attention_cuda() : &cofi_attention_cpu;
    COF_FAIL_IF(!plan->backend, COF_ERR_UNSUPPORTED,
                "attention: this library was built without CUDA");
    cof_attention_params *p = &plan->params;
    COF_TRY(read_params(team, plan->backend, params, p));
    plan->sight = sight_of(p);
    plan->rank = cof_team_rank(team);
    plan->n_ranks = cof_team_size(team);
    plan->layout = layout_of(team, p);
    plan->local_rows = cof_layout_local_rows(&plan->layout, plan->rank);
    plan->max_rows = cofi_plan_max_rows(&plan->layout);
    plan->dims = (struct cofi_attention_dims){
        .n_batch = p->n_batch,
        .n_heads = p->n_heads,
        .n_kv_heads = p->n_kv_heads,
        .dim_qk = p->head_dim_qk,
        .dim_v = p->head_dim_v,
        .elem = cofi_elem_of(p->dtype),
        .scale = (float)p->scale,
    };
    if (plan->backend->check)
        COF_TRY(plan->backend->check(plan));
    return plan->backend->lay_out(plan);
}

cof_status cof_attention_workspace(cof_team *team, const cof_attention_params *params,
                                   cof_workspace_sizes *sizes)
{
    struct cofi_attention_plan plan = {0};
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_TRY(cofi_world_usable(team->world));
    COF_TRY(set_up(&plan, team, params));
    return cofi_workspace_write(
        sizes, &(cof_workspace_sizes){
                   .local = plan.local_bytes + sizeof plan,
                   .symmetric = cofi_arena_slab_bytes(plan.n_ranks, plan.symmetric_bytes,
                                                      COFI_ATTENTION_PURPOSES),
                   .saved = plan.saved_bytes,
                   .words = cofi_arena_words_bytes(plan.n_ranks, COFI_ATTENTION_PURPOSES)});
}

/* ---- plan ----------------------------------------------------------------------------------- */

static void describe_window(const cof_attention_params *p, char *text, size_t bytes)
{
    if (p->has_window)
        snprintf(text, bytes, "%lld:%lld", (long long)p->window_left, (long long)p->window_right);
    else
        snprintf(text, bytes, "none");
}

static void describe(struct cofi_attention_plan *plan, const cof_arena *arena)
{
    const cof_attention_params *p = &plan->params;
    char engine[40], window[48], words[120] = "";
    cofi_arena_name(plan->base.team, arena, engine, sizeof engine);
    describe_window(p, window, sizeof window);
    plan->backend->describe(plan, words, sizeof words);
    snprintf(plan->base.describe, sizeof plan->base.describe,
             "attention format=%s dtype=%s B=%lld S=%lld H=%lld Hkv=%lld Dqk=%lld Dv=%lld mask=%s "
             "window=%s layout=%s chunking=%s scale=%.9g wire=%s direction=%s schedule=%s "
             "save_kv=%d P=%d engine=%s device=%s %s",
             p->format == COF_FORMAT_BSHD ? "bshd" : "sbhd", cof_dtype_name(p->dtype),
             (long long)p->n_batch, (long long)p->n_rows, (long long)p->n_heads,
             (long long)p->n_kv_heads, (long long)p->head_dim_qk, (long long)p->head_dim_v,
             p->mask == COF_MASK_CAUSAL ? "causal" : "none", window,
             p->layout == COF_LAYOUT_ZIGZAG ? "zigzag" : "contiguous",
             p->chunking == COF_CHUNKING_BALANCED ? "balanced" : "padded", p->scale,
             p->wire_f32 ? "f32" : cof_dtype_name(p->dtype), p->forward_only ? "forward" : "both",
             p->schedule == COF_SCHEDULE_GATHER ? "gather" : "ring", p->save_kv, plan->n_ranks,
             engine, plan->backend->name, words);
}

static void destroy(cof_plan *base)
{
    struct cofi_attention_plan *plan = (struct cofi_attention_plan *)base;
    if (plan->backend)
        plan->backend->close(plan);
    cofi_arena_unbind(&plan->binding);
    free(plan);
}

/* On every rank alike, whatever its own status: the exchanges must match. */
static cof_status build(struct cofi_attention_plan *plan, cof_team *team,
                        const cof_attention_params *params, cof_arena *arena)
{
    cof_status status = set_up(plan, team, params);
    if (status == COF_OK)
        status = cofi_arena_check(team, arena);
    if (status == COF_OK)
        describe(plan, arena);
    COF_TRY(cofi_plan_agree(team, "attention", status, plan->base.describe));
    const struct cofi_binding_spec spec = {.op = "attention",
                                           .payload_bytes = plan->symmetric_bytes,
                                           .n_purposes = COFI_ATTENTION_PURPOSES,
                                           .acks = COFI_ATTENTION_ACKS};
    COF_TRY(cofi_arena_bind(team, arena, &spec, &plan->binding));
    COF_TRY(cofi_team_agree(team, "plan open", plan->backend->open(plan)));
    cofi_log(COFI_LOG_PLAN, "plan: %s", plan->base.describe);
    return COF_OK;
}

cof_status cof_attention_plan_create(cof_team *team, const cof_attention_params *params,
                                     cof_arena *arena, cof_plan **plan_out)
{
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(!plan_out, COF_ERR_INVALID, "plan_out: NULL");
    *plan_out = NULL;
    cof_plan *plan;
    COF_TRY(cofi_plan_open(team, "attention", sizeof(struct cofi_attention_plan), destroy, &plan));
    cof_status status = build((struct cofi_attention_plan *)plan, team, params, arena);
    return cofi_plan_finish(plan, status, plan_out);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static cof_device device_of(const struct cofi_attention_plan *plan)
{
    int number = cof_world_device(plan->base.team->world);
    return number < 0 ? (cof_device){COF_DEVICE_CPU, 0} : (cof_device){COF_DEVICE_CUDA, number};
}

static cof_status read_view(const struct cofi_attention_plan *plan, const cof_tensor *t,
                            const char *name, int64_t n_heads, int64_t dim,
                            struct cofi_attention_view *view)
{
    static const char *const bshd[] = {"B", "S_local", "H", "D"};
    static const char *const sbhd[] = {"S_local", "B", "H", "D"};
    bool is_bshd = plan->params.format == COF_FORMAT_BSHD;
    int64_t b = plan->dims.n_batch, s = plan->local_rows;
    int64_t shape[4] = {is_bshd ? b : s, is_bshd ? s : b, n_heads, dim}, stride[8];
    const struct cofi_tensor_rule rule = {name, plan->params.dtype, 4, shape,
                                          is_bshd ? bshd : sbhd};
    COF_TRY(cofi_tensor_check_on(t, &rule, device_of(plan)));
    cofi_tensor_strides(t, stride);
    *view = (struct cofi_attention_view){cofi_tensor_data(t), stride[is_bshd ? 0 : 1],
                                         stride[is_bshd ? 1 : 0], stride[2]};
    /* A row is walked with row_stride as leading dimension, which must not be below its length. */
    if (s <= 1) /* any stride is legal then */
        view->row_stride = dim;
    return COF_OK;
}

static cof_status read_lse(const struct cofi_attention_plan *plan, const cof_tensor *t,
                           struct cofi_attention_call *call)
{
    static const char *const dims[] = {"B", "H", "S_local"};
    int64_t shape[3] = {plan->dims.n_batch, plan->dims.n_heads, plan->local_rows}, stride[8];
    const struct cofi_tensor_rule rule = {"lse", COF_F32, 3, shape, dims};
    COF_TRY(cofi_tensor_check_on(t, &rule, device_of(plan)));
    cofi_tensor_strides(t, stride);
    call->lse = cofi_tensor_data(t);
    call->lse_batch_stride = stride[0];
    call->lse_head_stride = stride[1];
    return COF_OK;
}

static cof_status read_saved(const struct cofi_attention_plan *plan, const cof_tensor *t,
                             struct cofi_attention_call *call)
{
    static const char *const dims[] = {"n"};
    COF_FAIL_IF(t && !plan->params.save_kv, COF_ERR_INVALID,
                "saved_kv: wanted NULL, the plan was made without save_kv");
    if (!t && plan->saved_bytes == 0)
        return COF_OK;
    int64_t n = t && t->ndim == 1 && t->shape ? t->shape[0] : (int64_t)plan->saved_bytes;
    const struct cofi_tensor_rule rule = {"saved_kv", COF_U8, 1, &n, dims};
    COF_TRY(cofi_tensor_check_on(t, &rule, device_of(plan)));
    COF_FAIL_IF(n < (int64_t)plan->saved_bytes, COF_ERR_INVALID,
                "saved_kv: %lld bytes, wanted at least %zu (cof_attention_workspace)", (long long)n,
                plan->saved_bytes);
    call->saved_kv = cofi_tensor_data(t);
    COF_FAIL_IF((uintptr_t)call->saved_kv % 128, COF_ERR_INVALID,
                "saved_kv: data at %p, wanted alignment to 128 bytes", call->saved_kv);
    return COF_OK;
}

struct named_tensor {
    const char *name;
    const cof_tensor *tensor;
};

/* Outputs must lie apart from every other tensor of the call. */
static cof_status check_apart(const struct named_tensor *outputs, int n_outputs,
                              const struct named_tensor *inputs, int n_inputs)
{
    for (int i = 0; i < n_outputs; i++) {
        for (int j = 0; j < i; j++)
            COF_TRY(cofi_tensor_check_apart(outputs[i].tensor, outputs[i].name, outputs[j].tensor,
                                            outputs[j].name));
        for (int j = 0; j < n_inputs; j++)
            COF_TRY(cofi_tensor_check_apart(outputs[i].tensor, outputs[i].name, inputs[j].tensor,
                                            inputs[j].name));
    }
    return COF_OK;
}

cof_status cofi_attention_read_call(const struct cofi_attention_plan *plan,
                                    const cof_attention_args *given, bool backward,
                                    struct cofi_attention_call *call)
{
    const struct cofi_attention_dims *d = &plan->dims;
    cof_attention_args a;
    COF_TRY(
        cofi_sized_read(&a, sizeof a, COFI_SIZE_THROUGH(cof_attention_args, dv), given, "args"));
    *call = (struct cofi_attention_call){0};
    COF_TRY(read_view(plan, a.q, "q", d->n_heads, d->dim_qk, &call->q));
    COF_TRY(read_view(plan, a.k, "k", d->n_kv_heads, d->dim_qk, &call->k));
    COF_TRY(read_view(plan, a.v, "v", d->n_kv_heads, d->dim_v, &call->v));
    COF_TRY(read_view(plan, a.o, "o", d->n_heads, d->dim_v, &call->o));
    COF_TRY(read_lse(plan, a.lse, call));
    COF_TRY(read_saved(plan, a.saved_kv, call));
    struct named_tensor forward_in[] = {{"q", a.q}, {"k", a.k}, {"v", a.v}};
    struct named_tensor forward_out[] = {{"o", a.o}, {"lse", a.lse}, {"saved_kv", a.saved_kv}};
    int n_saved = a.saved_kv != NULL; /* forward stores it, backward reads it */
    if (!backward)
        return check_apart(forward_out, 2 + n_saved, forward_in, 3);
    COF_TRY(read_view(plan, a.dout, "dout", d->n_heads, d->dim_v, &call->dout));
    COF_TRY(read_view(plan, a.dq, "dq", d->n_heads, d->dim_qk, &call->dq));
    COF_TRY(read_view(plan, a.dk, "dk", d->n_kv_heads, d->dim_qk, &call->dk));
    COF_TRY(read_view(plan, a.dv, "dv", d->n_kv_heads, d->dim_v, &call->dv));
    struct named_tensor inputs[] = {{"q", a.q},     {"k", a.k},       {"v", a.v},
                                    {"o", a.o},     {"lse", a.lse},   {"dout", a.dout},
                                    {"saved_kv", a.saved_kv}};
    struct named_tensor outputs[] = {{"dq", a.dq}, {"dk", a.dk}, {"dv", a.dv}};
    return check_apart(outputs, 3, inputs, 6 + n_saved);
}

static cof_status run(cof_plan *base, const cof_attention_args *args, cof_stream stream,
                      bool backward)
{
    COF_FAIL_IF(!base, COF_ERR_INVALID, "plan: NULL");
    COF_FAIL_IF(strcmp(base->op, "attention"), COF_ERR_INVALID,
                "plan: a plan of %s, wanted attention", base->op);
    struct cofi_attention_plan *plan = (struct cofi_attention_plan *)base;
    struct cofi_attention_call call;
    COF_FAIL_IF(backward && plan->params.forward_only, COF_ERR_INVALID,
                "plan: made with forward_only = 1, it has no backward");
    COF_TRY(cofi_attention_read_call(plan, args, backward, &call));
    COF_TRY(cofi_team_status(base->team));
    if (cofi_arena_status(plan->binding.arena) != COF_OK)
        return cofi_fail_text(COF_ERR_POISONED, cof_last_error());
    COF_TRY(cofi_call_allowed(&plan->binding));
    if (plan->params.n_rows == 0) { /* there is nothing to do on any rank */
        plan->n_empty++;
        return COF_OK;
    }
    return plan->backend->run(plan, &call, backward, stream);
}

cof_status cof_attention_forward(cof_plan *plan, const cof_attention_args *args, cof_stream stream)
{
    return run(plan, args, stream, false);
}

cof_status cof_attention_backward(cof_plan *plan, const cof_attention_args *args, cof_stream stream)
{
    return run(plan, args, stream, true);
}
