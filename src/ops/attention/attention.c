/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Parameters, plan and arguments of attention; the schedule is attention_calls.c. */
#include "ops/attention/attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "core/tensor.h"
#include "core/log.h"
#include "core/sized.h"
#include "symm/engine.h"
#include "symm/memory.h"
#include "symm/stream.h"

#define MAX_HEAD_DIM 512
/* Up to here gather is no slower than ring (docs/performance.md). Of the global shape alone: the
 * two have other bits. */
#define GATHER_MAX_ROWS 512

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
                 {"save_kv", p->save_kv}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        COF_FAIL_IF((flags[i].value | 1) != 1, COF_ERR_INVALID, "params.%s = %d: wanted 0 or 1",
                    flags[i].name, flags[i].value);
    COF_FAIL_IF(p->save_kv && p->forward_only, COF_ERR_INVALID,
                "params.save_kv = 1: with forward_only nothing reads what is saved");
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
static cof_status read_params(const cof_team *team, const cof_attention_params *given,
                              cof_attention_params *p)
{
    COF_TRY(cofi_sized_read(p, sizeof *p, COFI_SIZE_THROUGH(cof_attention_params, save_kv), given,
                            "params"));
    p->n_kv_heads = p->n_kv_heads ? p->n_kv_heads : p->n_heads;
    p->head_dim_v = p->head_dim_v ? p->head_dim_v : p->head_dim_qk;
    COF_TRY(check_choices(p));
    COF_TRY(check_sizes(team, p));
    if (p->schedule == COF_SCHEDULE_DEFAULT)
        p->schedule = p->n_rows <= GATHER_MAX_ROWS ? COF_SCHEDULE_GATHER : COF_SCHEDULE_RING;
    p->scale = p->scale != 0 ? p->scale : 1 / sqrt((double)p->head_dim_qk);
    return COF_OK;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

static void set_shape(struct cofi_attention_plan *plan, const cof_team *team,
                      const cof_attention_params *p)
{
    plan->params = *p;
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
}

static enum cofi_elem wire_elem(const struct cofi_attention_plan *plan)
{
    return plan->params.wire_f32 ? COFI_ELEM_F32 : plan->dims.elem;
}

static int n_slots(const struct cofi_attention_plan *plan)
{
    return plan->params.forward_only ? 0 : cofi_grad_slots(plan->n_ranks);
}

static struct cofi_kv_buffer take_kv(const struct cofi_attention_plan *plan, char *base,
                                     size_t *used, int64_t rows, enum cofi_elem elem)
{
    const struct cofi_attention_dims *d = &plan->dims;
    int64_t heads = d->n_batch * d->n_kv_heads;
    int64_t row_elements[2] = {heads * d->dim_qk, heads * d->dim_v};
    return cofi_kv_take(base, used, rows, row_elements, elem);
}

/* Rows of others' keys that are held at once, in a buffer. */
static int64_t kept_rows(const struct cofi_attention_plan *plan)
{
    return cofi_attention_gathers(plan) ? plan->params.n_rows : plan->max_rows;
}

/* Buffers for fetched keys: the plan's own, or in saved_kv. */
static size_t lay_out_kept(struct cofi_attention_plan *plan, char *base, size_t *used)
{
    size_t counted = 0;
    bool saves = plan->params.save_kv, gathers = cofi_attention_gathers(plan);
    for (int s = 0; s < (gathers || saves ? 1 : 2); s++)
        plan->staging[s] =
            take_kv(plan, saves ? NULL : base, saves ? &counted : used, kept_rows(plan),
                    plan->dims.elem);
    plan->kept_bytes = counted;
    return !saves ? 0 : gathers ? counted : counted * (size_t)(plan->n_ranks - 1);
}

/* Bytes of the arena's data; sets the offsets. */
static size_t lay_out_symmetric(struct cofi_attention_plan *plan)
{
    size_t used = 0;
    if (plan->n_ranks == 1)
        return 0;
    plan->published = take_kv(plan, NULL, &used, plan->max_rows, plan->dims.elem);
    for (int s = 0; s < n_slots(plan); s++)
        plan->home.slot[s] = take_kv(plan, NULL, &used, plan->max_rows, wire_elem(plan));
    return used;
}

/* Bytes of local memory; sets the pointers when `base` is not NULL. */
static size_t lay_out_local(struct cofi_attention_plan *plan, char *base)
{
    const struct cofi_attention_dims *d = &plan->dims;
    size_t used = 0, f = sizeof(float);
    size_t q_heads = (size_t)(d->n_batch * d->n_heads * plan->local_rows);
    int64_t k_rows = kept_rows(plan);
    size_t k_heads = (size_t)(d->n_batch * d->n_heads * k_rows); /* per query head */
    size_t own_kv = (size_t)(d->n_batch * d->n_kv_heads * plan->local_rows);
    size_t dim[2] = {(size_t)d->dim_qk, (size_t)d->dim_v};
    plan->state = (struct cofi_attention_state){
        .acc = cofi_take(base, &used, q_heads * dim[1] * f),
        .m = cofi_take(base, &used, q_heads * f),
        .l = cofi_take(base, &used, q_heads * f),
        .n_rows = plan->local_rows,
    };
    if (plan->n_ranks > 1)
        plan->saved_bytes = lay_out_kept(plan, base, &used);
    if (plan->params.forward_only)
        return used;
    plan->grad = (struct cofi_attention_grad_state){
        .delta = cofi_take(base, &used, q_heads * f),
        .lse = cofi_take(base, &used, q_heads * f),
        .dq = cofi_take(base, &used, q_heads * dim[0] * f),
        .dk = cofi_take(base, &used, k_heads * dim[0] * f),
        .dv = cofi_take(base, &used, k_heads * dim[1] * f),
        .n_q_rows = plan->local_rows,
        .n_k_rows = k_rows,
    };
    for (int is_v = 0; is_v < 2 && plan->n_ranks > 1; is_v++)
        plan->home.acc[is_v] = cofi_take(base, &used, own_kv * dim[is_v] * f);
    for (int s = 0; s < n_slots(plan); s++)
        plan->home.outbox[s] = take_kv(plan, base, &used, plan->max_rows, wire_elem(plan));
    return used;
}

cof_status cof_attention_workspace(cof_team *team, const cof_attention_params *params,
                                   cof_workspace_sizes *sizes)
{
    struct cofi_attention_plan plan = {0};
    cof_attention_params p;
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_TRY(read_params(team, params, &p));
    set_shape(&plan, team, &p);
    size_t symmetric = lay_out_symmetric(&plan);
    return cofi_workspace_write(
        sizes,
        &(cof_workspace_sizes){
            .local = lay_out_local(&plan, NULL) + sizeof plan,
            .symmetric = cofi_arena_slab_bytes(plan.n_ranks, symmetric, COFI_ATTENTION_PURPOSES),
            .saved = plan.saved_bytes,
            .words = cofi_arena_words_bytes(plan.n_ranks, COFI_ATTENTION_PURPOSES)});
}

/* ---- plan ----------------------------------------------------------------------------------- */

static void describe(struct cofi_attention_plan *plan, const cof_arena *arena)
{
    const cof_attention_params *p = &plan->params;
    char engine[40];
    cofi_arena_name(plan->base.team, arena, engine, sizeof engine);
    snprintf(plan->base.describe, sizeof plan->base.describe,
             "attention format=%s dtype=%s B=%lld S=%lld H=%lld Hkv=%lld Dqk=%lld Dv=%lld mask=%s "
             "layout=%s chunking=%s scale=%.9g wire=%s direction=%s schedule=%s save_kv=%d P=%d "
             "engine=%s device=cpu isa=%s gemm=%s",
             p->format == COF_FORMAT_BSHD ? "bshd" : "sbhd", cof_dtype_name(p->dtype),
             (long long)p->n_batch, (long long)p->n_rows, (long long)p->n_heads,
             (long long)p->n_kv_heads, (long long)p->head_dim_qk, (long long)p->head_dim_v,
             p->mask == COF_MASK_CAUSAL ? "causal" : "none",
             p->layout == COF_LAYOUT_ZIGZAG ? "zigzag" : "contiguous",
             p->chunking == COF_CHUNKING_BALANCED ? "balanced" : "padded", p->scale,
             p->wire_f32 ? "f32" : cof_dtype_name(p->dtype), p->forward_only ? "forward" : "both",
             p->schedule == COF_SCHEDULE_GATHER ? "gather" : "ring", p->save_kv, plan->n_ranks,
             engine, cofi_isa_name(cofi_isa()), cofi_gemm_name());
}

static void destroy(cof_plan *base)
{
    struct cofi_attention_plan *plan = (struct cofi_attention_plan *)base;
    cofi_cpu_stream_close(plan->comm);
    cofi_arena_unbind(&plan->binding);
    free(plan->memory);
    free(plan);
}

static cof_status allocate_local(struct cofi_attention_plan *plan)
{
    size_t bytes = lay_out_local(plan, NULL);
    COF_TRY(cofi_memory_check(bytes));
    plan->memory = aligned_alloc(128, bytes ? bytes : 128);
    COF_FAIL_IF(!plan->memory, COF_ERR_NOMEM, "attention plan: no memory for %zu bytes", bytes);
    lay_out_local(plan, plan->memory);
    return plan->n_ranks == 1 ? COF_OK
                              : cofi_world_stream_open(plan->base.team->world, 1, false,
                                                       "cofuse-comm", &plan->comm);
}

static void set_home(struct cofi_attention_plan *plan)
{
    struct cofi_grad_exchange *home = &plan->home;
    home->binding = &plan->binding;
    home->ready = COFI_GRAD_READY;
    home->ack = COFI_GRAD_ACK;
    home->mark = COFI_GRAD_MARK;
    home->prev_mark = COFI_PREV_GRAD_MARK;
    home->rank = plan->rank;
    home->n_ranks = plan->n_ranks;
    home->local_rows = plan->local_rows;
    memcpy(home->row_elements, plan->published.row_elements, sizeof home->row_elements);
}

/* On every rank alike, whatever its own status: the exchanges must match. */
static cof_status build(struct cofi_attention_plan *plan, cof_team *team,
                        const cof_attention_params *params, cof_arena *arena)
{
    cof_attention_params p;
    cof_status status = read_params(team, params, &p);
    if (status == COF_OK)
        status = cofi_arena_check(team, arena);
    if (status == COF_OK) {
        set_shape(plan, team, &p);
        describe(plan, arena);
    }
    COF_TRY(cofi_plan_agree(team, "attention", status, plan->base.describe));
    COF_TRY(cofi_team_agree(team, "plan allocate", allocate_local(plan)));
    const struct cofi_binding_spec spec = {.op = "attention",
                                           .payload_bytes = lay_out_symmetric(plan),
                                           .n_purposes = COFI_ATTENTION_PURPOSES,
                                           .acks = COFI_ATTENTION_ACKS};
    COF_TRY(cofi_arena_bind(team, arena, &spec, &plan->binding));
    set_home(plan);
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

static cof_status read_view(const struct cofi_attention_plan *plan, const cof_tensor *t,
                            const char *name, int64_t n_heads, int64_t dim,
                            struct cofi_attention_view *view)
{
    static const char *const bshd[] = {"B", "S_local", "H", "D"};
    static const char *const sbhd[] = {"S_local", "B", "H", "D"};
    bool is_bshd = plan->params.format == COF_FORMAT_BSHD;
    int64_t b = plan->dims.n_batch, s = plan->local_rows;
    int64_t shape[4] = {is_bshd ? b : s, is_bshd ? s : b, n_heads, dim}, stride[8];
    COF_TRY(cofi_tensor_check(t, &(struct cofi_tensor_rule){name, plan->params.dtype, 4, shape,
                                                            is_bshd ? bshd : sbhd}));
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
    COF_TRY(cofi_tensor_check(t, &(struct cofi_tensor_rule){"lse", COF_F32, 3, shape, dims}));
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
    COF_TRY(cofi_tensor_check(t, &(struct cofi_tensor_rule){"saved_kv", COF_U8, 1, &n, dims}));
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

static cof_status read_call(const struct cofi_attention_plan *plan, const cof_attention_args *given,
                            bool backward, struct cofi_attention_call *call)
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
    struct cofi_cpu_stream *s;
    COF_FAIL_IF(backward && plan->params.forward_only, COF_ERR_INVALID,
                "plan: made with forward_only = 1, it has no backward");
    COF_TRY(read_call(plan, args, backward, &call));
    COF_TRY(cofi_team_status(base->team));
    if (cofi_arena_status(plan->binding.arena) != COF_OK)
        return cofi_fail_text(COF_ERR_POISONED, cof_last_error());
    COF_TRY(cofi_call_allowed(&plan->binding));
    if (plan->params.n_rows == 0) { /* there is nothing to do on any rank */
        plan->n_empty++;
        return COF_OK;
    }
    COF_TRY(cofi_stream_begin(base->team->world, stream, &s));
    cof_status status = cofi_attention_enqueue(plan, &call, backward, s);
    return cofi_stream_end(base->team->world, stream, status);
}

cof_status cof_attention_forward(cof_plan *plan, const cof_attention_args *args, cof_stream stream)
{
    return run(plan, args, stream, false);
}

cof_status cof_attention_backward(cof_plan *plan, const cof_attention_args *args, cof_stream stream)
{
    return run(plan, args, stream, true);
}
