/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Parameters, plan and arguments of grad_return; what a call does is the back ends': on the CPU
 * grad_return_cpu.c and grad_return_run.c, on devices grad_return_cuda.c. */
#include "ops/grad_return/grad_return.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "core/log.h"
#include "core/sized.h"
#include "core/tensor.h"
#include "symm/engine.h"
#include "symm/stream.h"

#define MAX_HEAD_DIM 65536
#define MAX_SIZE (INT64_C(1) << 56)

/* ---- parameters ----------------------------------------------------------------------------- */

static cof_status check_flag(int value, const char *name)
{
    COF_FAIL_IF(value != 0 && value != 1, COF_ERR_INVALID, "params.%s = %d: wanted 0 or 1", name,
                value);
    return COF_OK;
}

static cof_status check_choices(const cof_grad_return_params *p)
{
    COF_FAIL_IF(!cofi_dtype_is_elem(p->dtype), COF_ERR_INVALID,
                "params.dtype = %s: wanted bf16, f16 or f32", cof_dtype_name(p->dtype));
    COF_TRY(check_flag(p->partial_f32, "partial_f32"));
    COF_TRY(check_flag(p->wire_f32, "wire_f32"));
    COF_TRY(check_flag(p->by_section, "by_section"));
    COF_TRY(check_flag(p->caller_orders_reuse, "caller_orders_reuse"));
    COF_TRY(check_flag(p->driver_wait, "driver_wait"));
    COF_FAIL_IF(p->max_ctas < 0, COF_ERR_INVALID, "params.max_ctas = %d: wanted at least 0",
                p->max_ctas);
    COF_FAIL_IF(p->layout != COF_LAYOUT_ZIGZAG && p->layout != COF_LAYOUT_CONTIGUOUS,
                COF_ERR_INVALID, "params.layout = %d: wanted 0 (zigzag) or 1 (contiguous)",
                (int)p->layout);
    COF_FAIL_IF(p->chunking != COF_CHUNKING_BALANCED && p->chunking != COF_CHUNKING_PADDED,
                COF_ERR_INVALID, "params.chunking = %d: wanted 0 (balanced) or 1 (padded)",
                (int)p->chunking);
    COF_FAIL_IF(p->transfer != COF_TRANSFER_PUSH && p->transfer != COF_TRANSFER_PULL,
                COF_ERR_INVALID, "params.transfer = %d: wanted 0 (push) or 1 (pull)",
                (int)p->transfer);
    COF_FAIL_IF(!p->caller_orders_reuse != !p->peers, COF_ERR_INVALID,
                "params.peers %s: wanted with caller_orders_reuse = 1, and only then",
                p->peers ? "given" : "NULL");
    COF_FAIL_IF(p->driver_wait && !p->peers, COF_ERR_INVALID,
                "params.driver_wait = 1: wanted 0 without params.peers");
    COF_FAIL_IF(p->peers && (p->wire_f32 || p->transfer != COF_TRANSFER_PUSH), COF_ERR_UNSUPPORTED,
                "params.%s: with peers rows are pushed in dtype",
                p->wire_f32 ? "wire_f32" : "transfer");
    return COF_OK;
}

static cof_layout layout_of(const cof_team *team, const cof_grad_return_params *p)
{
    return (cof_layout){p->layout, p->chunking, team->n_ranks, p->n_rows};
}

static cof_status check_sizes(const cof_team *team, const cof_grad_return_params *p)
{
    const struct {
        const char *name;
        int64_t value, least, most;
    } rules[] = {{"n_batch", p->n_batch, 1, MAX_SIZE},
                 {"n_rows", p->n_rows, 0, MAX_SIZE},
                 {"n_heads", p->n_heads, 1, MAX_SIZE},
                 {"head_dim_k", p->head_dim_k, 1, MAX_HEAD_DIM},
                 {"head_dim_v", p->head_dim_v, 1, MAX_HEAD_DIM}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        COF_FAIL_IF(rules[i].value < rules[i].least || rules[i].value > rules[i].most,
                    COF_ERR_INVALID, "params.%s = %lld: wanted %lld .. %lld", rules[i].name,
                    (long long)rules[i].value, (long long)rules[i].least, (long long)rules[i].most);
    cof_layout layout = layout_of(team, p);
    return cofi_plan_check_size(&layout, p->n_batch, p->n_heads, MAX_HEAD_DIM);
}

static cof_status check_peers(const cof_team *team, const cof_grad_return_params *p)
{
    cof_grad_return_peers peers = COF_GRAD_RETURN_PEERS_INIT;
    COF_TRY(cofi_sized_read(&peers, sizeof peers,
                            COFI_SIZE_THROUGH(cof_grad_return_peers, ready_stride), p->peers,
                            "params.peers"));
    COF_FAIL_IF(peers.n_ranks != team->n_ranks, COF_ERR_INVALID,
                "params.peers.n_ranks = %d: wanted %d, as the team has", peers.n_ranks,
                team->n_ranks);
    COF_FAIL_IF(!peers.dk || !peers.dv || !peers.ready, COF_ERR_INVALID, "params.peers.%s: NULL",
                !peers.dk ? "dk" : !peers.dv ? "dv" : "ready");
    COF_FAIL_IF(peers.ready_stride % 4, COF_ERR_INVALID,
                "params.peers.ready_stride = %zu: wanted a multiple of 4", peers.ready_stride);
    for (int r = 0; r < peers.n_ranks; r++)
        COF_FAIL_IF(!peers.dk[r] || !peers.dv[r] || !peers.ready[r] ||
                        (uintptr_t)peers.ready[r] % 4 || (uintptr_t)peers.dk[r] % 4 ||
                        (uintptr_t)peers.dv[r] % 4,
                    COF_ERR_INVALID,
                    "params.peers: entry %d is dk %p, dv %p, ready %p: wanted addresses aligned to "
                    "4 bytes",
                    r, peers.dk[r], peers.dv[r], (void *)peers.ready[r]);
    cof_layout layout = layout_of(team, p);
    int64_t rows = cof_layout_local_rows(&layout, 0);
    for (int r = 1; r < team->n_ranks; r++)
        COF_FAIL_IF(cof_layout_local_rows(&layout, r) != rows, COF_ERR_INVALID,
                    "params.n_rows = %lld: rank 0 has %lld rows, rank %d has %lld; with peers all "
                    "have the same",
                    (long long)p->n_rows, (long long)rows, r,
                    (long long)cof_layout_local_rows(&layout, r));
    size_t row = (size_t)(team->n_ranks * rows * p->n_batch * p->n_heads) *
                 (size_t)cofi_dtype_bytes(p->dtype);
    size_t dk = row * (size_t)p->head_dim_k, dv = row * (size_t)p->head_dim_v;
    COF_FAIL_IF(peers.dk_bytes < dk || peers.dv_bytes < dv, COF_ERR_INVALID,
                "params.peers.%s = %zu: wanted at least %zu",
                peers.dk_bytes < dk ? "dk_bytes" : "dv_bytes",
                peers.dk_bytes < dk ? peers.dk_bytes : peers.dv_bytes,
                peers.dk_bytes < dk ? dk : dv);
    return COF_OK;
}

/* Validates, and fills defaults in. */
static cof_status read_params(const cof_team *team, const cof_grad_return_params *given,
                              cof_grad_return_params *p)
{
    COF_TRY(cofi_sized_read(p, sizeof *p, COFI_SIZE_THROUGH(cof_grad_return_params, peers), given,
                            "params"));
    p->head_dim_v = p->head_dim_v ? p->head_dim_v : p->head_dim_k;
    COF_TRY(check_choices(p));
    COF_TRY(check_sizes(team, p));
    return p->peers ? check_peers(team, p) : COF_OK;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

static void set_shape(struct cofi_grad_return_plan *plan, const cof_team *team,
                      const cof_grad_return_params *p)
{
    plan->params = *p;
    plan->backend = team->world->ops->device ? cofi_gr_cuda() : &cofi_gr_cpu;
    plan->rank = cof_team_rank(team);
    plan->n_ranks = cof_team_size(team);
    plan->layout = layout_of(team, p);
    plan->local_rows = cof_layout_local_rows(&plan->layout, plan->rank);
    plan->max_rows = cofi_plan_max_rows(&plan->layout);
    plan->dim[0] = p->head_dim_k;
    plan->dim[1] = p->head_dim_v;
    plan->elem = cofi_elem_of(p->dtype);
    plan->wire = p->wire_f32 ? COFI_ELEM_F32 : plan->elem;
    plan->partial = p->partial_f32 ? COFI_ELEM_F32 : plan->elem;
    plan->transport = p->peers                             ? &cofi_gr_caller
                      : p->transfer == COF_TRANSFER_PULL ? &cofi_gr_pull
                                                           : &cofi_gr_push;
    plan->home.ready = COFI_GR_READY;
    plan->home.ack = COFI_GR_ACK;
    plan->home.mark = COFI_GR_MARK;
    plan->home.prev_mark = COFI_GR_PREV_MARK;
    plan->home.rank = plan->rank;
    plan->home.n_ranks = plan->n_ranks;
    plan->home.local_rows = plan->local_rows;
    for (int is_v = 0; is_v < 2; is_v++)
        plan->home.row_elements[is_v] = p->n_batch * p->n_heads * plan->dim[is_v];
}

struct cofi_kv_buffer cofi_gr_take_rows(const struct cofi_grad_return_plan *plan, char *base,
                                        size_t *used, int64_t rows)
{
    return cofi_kv_take(base, used, rows, plan->home.row_elements, plan->wire);
}

/* Of the arena's data; sets the offsets. */
static void lay_out_symmetric(struct cofi_grad_return_plan *plan)
{
    size_t used = 0;
    if (plan->n_ranks > 1 && plan->transport == &cofi_gr_pull)
        plan->published = cofi_gr_take_rows(plan, NULL, &used, plan->n_ranks * plan->max_rows);
    for (int s = 0; s < cofi_grad_slots(plan->n_ranks) && plan->transport == &cofi_gr_push; s++)
        plan->home.slot[s] = cofi_gr_take_rows(plan, NULL, &used, plan->max_rows);
    plan->payload_bytes = used;
}

/* From params to sizes; local. */
static cof_status set_up(struct cofi_grad_return_plan *plan, cof_team *team,
                         const cof_grad_return_params *params)
{
    cof_grad_return_params p;
    plan->base.team = team;
    COF_TRY(read_params(team, params, &p));
    set_shape(plan, team, &p);
    COF_FAIL_IF(!plan->backend, COF_ERR_UNSUPPORTED,
                "grad_return: this library was built without CUDA");
    lay_out_symmetric(plan);
    return plan->backend->lay_out(plan);
}

/* Of the slab, but for words: what carries tags lies behind the payload, or anywhere else. */
static size_t symmetric_data(const struct cofi_grad_return_plan *plan)
{
    return cofi_round_up(plan->payload_bytes, COFI_LINE) +
           cofi_round_up(plan->tagged_bytes, COFI_LINE);
}

cof_status cof_grad_return_workspace(cof_team *team, const cof_grad_return_params *params,
                                     cof_workspace_sizes *sizes)
{
    struct cofi_grad_return_plan plan = {0};
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_TRY(cofi_world_usable(team->world));
    COF_TRY(set_up(&plan, team, params));
    size_t symmetric =
        plan.has_arena
            ? cofi_arena_slab_bytes(plan.n_ranks, symmetric_data(&plan), plan.n_purposes)
            : 0;
    return cofi_workspace_write(
        sizes,
        &(cof_workspace_sizes){.local = plan.local_bytes + sizeof plan,
                               .symmetric = symmetric,
                               .words = cofi_arena_words_bytes(plan.n_ranks, plan.n_purposes) +
                                        cofi_round_up(plan.tagged_bytes, COFI_LINE)});
}

/* ---- plan ----------------------------------------------------------------------------------- */

size_t cofi_gr_ready_stride(const cof_grad_return_peers *peers)
{
    return peers->ready_stride ? peers->ready_stride : sizeof(uint32_t);
}

static void describe(struct cofi_grad_return_plan *plan, const cof_arena *arena)
{
    const cof_grad_return_params *p = &plan->params;
    char engine[40], stride[64] = "", words[120] = "";
    cofi_arena_name(plan->base.team, arena, engine, sizeof engine);
    if (p->peers) /* of the caller's memory what ranks must agree on */
        snprintf(stride, sizeof stride, " ready_stride=%zu driver_wait=%d",
                 cofi_gr_ready_stride(p->peers), p->driver_wait);
    plan->backend->describe(plan, words, sizeof words);
    snprintf(plan->base.describe, sizeof plan->base.describe,
             "grad_return dtype=%s partial=%s wire=%s B=%lld S=%lld Hkv=%lld Dk=%lld Dv=%lld "
             "layout=%s chunking=%s transfer=%s%s by=%s P=%d engine=%s device=%s %s",
             cof_dtype_name(p->dtype), p->partial_f32 ? "f32" : cof_dtype_name(p->dtype),
             p->wire_f32 ? "f32" : cof_dtype_name(p->dtype), (long long)p->n_batch,
             (long long)p->n_rows, (long long)p->n_heads, (long long)p->head_dim_k,
             (long long)p->head_dim_v, p->layout == COF_LAYOUT_ZIGZAG ? "zigzag" : "contiguous",
             p->chunking == COF_CHUNKING_BALANCED ? "balanced" : "padded", plan->transport->name,
             stride, p->by_section ? "section" : "whole", plan->n_ranks, engine,
             plan->backend->name, words);
}

/* In the middle of a whole: the plan's own stream may wait for rows of ranks that come late, or
 * never, and those for the calls that are not made. Both end by the arena's failure. */
static void give_up(struct cofi_grad_return_plan *plan)
{
    cof_arena *a = plan->binding.arena;
    if (plan->section == 0 || plan->params.n_rows == 0 || !a ||
        !cofi_process_is_this(&plan->base.team->world->made_by))
        return;
    if (cofi_arena_status(a) == COF_OK)
        cofi_arena_fail(a, COF_FAIL(COF_ERR_POISONED,
                                    "grad_return: plan destroyed after %d of %d calls of a whole",
                                    plan->section, plan->n_ranks));
}

static void destroy(cof_plan *base)
{
    struct cofi_grad_return_plan *plan = (struct cofi_grad_return_plan *)base;
    give_up(plan);
    if (plan->backend && !plan->backend->close(plan)) {
        cofi_log(COFI_LOG_ERROR, "grad_return: a plan with driver_wait was destroyed while the "
                 "driver waits for epoch words: its memory stays until the process ends");
        return;
    }
    cofi_arena_unbind(&plan->binding);
    free(plan->memory);
    free(plan);
}

static cof_status open_plan(struct cofi_grad_return_plan *plan)
{
    cof_status status = plan->backend->open(plan);
    plan->params.peers = NULL; /* the caller's struct is not kept */
    return status;
}

/* On every rank alike, whatever its own status: the exchanges must match. */
static cof_status build(struct cofi_grad_return_plan *plan, cof_team *team,
                        const cof_grad_return_params *params, cof_arena *arena)
{
    cof_status status = set_up(plan, team, params);
    if (status == COF_OK)
        status = cofi_arena_check(team, arena);
    if (status == COF_OK && arena && plan->params.peers)
        status = COF_FAIL(COF_ERR_INVALID, "arena: wanted NULL with params.peers");
    if (status == COF_OK)
        describe(plan, arena);
    COF_TRY(cofi_plan_agree(team, "grad_return", status, plan->base.describe));
    COF_TRY(cofi_team_agree(team, "plan allocate", open_plan(plan)));
    const struct cofi_binding_spec spec = {.op = "grad_return",
                                           .payload_bytes = plan->payload_bytes,
                                           .tagged_bytes = plan->tagged_bytes,
                                           .n_purposes = plan->n_purposes,
                                           .acks = plan->acks};
    if (plan->has_arena)
        COF_TRY(cofi_arena_bind(team, arena, &spec, &plan->binding));
    plan->home.binding = &plan->binding;
    cofi_log(COFI_LOG_PLAN, "plan: %s", plan->base.describe);
    return COF_OK;
}

cof_status cof_grad_return_plan_create(cof_team *team, const cof_grad_return_params *params,
                                       cof_arena *arena, cof_plan **plan_out)
{
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(!plan_out, COF_ERR_INVALID, "plan_out: NULL");
    *plan_out = NULL;
    cof_plan *plan;
    COF_TRY(cofi_plan_open(team, "grad_return", sizeof(struct cofi_grad_return_plan), destroy,
                           &plan));
    cof_status status = build((struct cofi_grad_return_plan *)plan, team, params, arena);
    return cofi_plan_finish(plan, status, plan_out);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static cof_device device_of(const struct cofi_grad_return_plan *plan)
{
    int number = cof_world_device(plan->base.team->world);
    return number < 0 ? (cof_device){COF_DEVICE_CPU, 0} : (cof_device){COF_DEVICE_CUDA, number};
}

static cof_status read_tensor(const struct cofi_grad_return_plan *plan, const cof_tensor *t,
                              const char *name, int is_v, int64_t rows, cof_dtype dtype,
                              struct cofi_gr_view *view)
{
    static const char *const dims[] = {"S", "B", "Hkv", "D"};
    int64_t shape[4] = {rows, plan->params.n_batch, plan->params.n_heads, plan->dim[is_v]};
    int64_t stride[8];
    COF_TRY(cofi_tensor_check_on(t, &(struct cofi_tensor_rule){name, dtype, 4, shape, dims},
                                 device_of(plan)));
    cofi_tensor_strides(t, stride);
    view->data[is_v] = cofi_tensor_data(t);
    view->row_stride[is_v] = stride[0];
    view->batch_stride[is_v] = stride[1];
    view->head_stride[is_v] = stride[2];
    return COF_OK;
}

static cof_status read_outputs(const struct cofi_grad_return_plan *plan,
                               const cof_grad_return_args *a, struct cofi_gr_view *out)
{
    COF_TRY(read_tensor(plan, a->dk_out, "dk_out", 0, plan->local_rows, plan->params.dtype, out));
    COF_TRY(read_tensor(plan, a->dv_out, "dv_out", 1, plan->local_rows, plan->params.dtype, out));
    COF_TRY(cofi_tensor_check_apart(a->dk_out, "dk_out", a->dv_out, "dv_out"));
    COF_TRY(cofi_tensor_check_apart(a->dk_out, "dk_out", a->dk, "dk"));
    COF_TRY(cofi_tensor_check_apart(a->dk_out, "dk_out", a->dv, "dv"));
    COF_TRY(cofi_tensor_check_apart(a->dv_out, "dv_out", a->dk, "dk"));
    return cofi_tensor_check_apart(a->dv_out, "dv_out", a->dv, "dv");
}

static cof_status read_writers(struct cofi_grad_return_plan *plan, const cof_grad_return_args *a,
                               uint64_t *hash)
{
    COF_FAIL_IF(a->writers != COF_WRITERS_ALL && a->writers != COF_WRITERS_CAUSAL &&
                    a->writers != COF_WRITERS_TABLE,
                COF_ERR_INVALID, "args.writers = %d: wanted 0 (all), 1 (causal) or 2 (table)",
                (int)a->writers);
    COF_FAIL_IF((a->writers == COF_WRITERS_TABLE) != (a->writer_table != NULL), COF_ERR_INVALID,
                "args.writer_table %s with writers = %d", a->writer_table ? "given" : "NULL",
                (int)a->writers);
    *hash = cofi_hash_u64(COFI_HASH_SEED, (uint64_t)a->writers);
    if (a->writer_table) {
        size_t n = (size_t)cof_layout_chunks(&plan->layout) * (size_t)((plan->n_ranks + 63) / 64);
        *hash = cofi_hash(*hash, a->writer_table, n * sizeof *a->writer_table);
    }
    COF_FAIL_IF(plan->section > 0 && *hash != plan->whole, COF_ERR_INVALID,
                "args.writers: other ones than in the first of these %d calls (call %d)",
                plan->n_ranks, plan->section + 1);
    return COF_OK;
}

static cof_status read_epoch(const struct cofi_grad_return_plan *plan,
                             const cof_grad_return_args *a)
{
    bool caller = plan->transport == &cofi_gr_caller;
    uint32_t want = plan->section > 0 ? plan->last_epoch : plan->last_epoch + 1;
    COF_FAIL_IF(!caller && a->epoch != 0, COF_ERR_INVALID,
                "args.epoch = %u: wanted 0 without caller_orders_reuse", a->epoch);
    COF_FAIL_IF(caller && (a->epoch < 1 || a->epoch > INT32_MAX), COF_ERR_INVALID,
                "args.epoch = %u: wanted 1 .. %d", a->epoch, INT32_MAX);
    COF_FAIL_IF(caller && plan->last_epoch && a->epoch != want, COF_ERR_INVALID,
                "args.epoch = %u: wanted %u, %s the last call's", a->epoch, want,
                plan->section > 0 ? "equal to" : "one more than");
    return COF_OK;
}

static cof_status read_call(struct cofi_grad_return_plan *plan, const cof_grad_return_args *a,
                            struct cofi_gr_call *call)
{
    const cof_grad_return_params *p = &plan->params;
    cof_dtype partial = p->partial_f32 ? COF_F32 : p->dtype;
    int step = p->by_section ? plan->section + 1 : 1;
    int owner = cofi_grad_owner(&plan->home, step);
    int64_t rows = p->by_section ? cof_layout_local_rows(&plan->layout, owner) : p->n_rows;
    *call = (struct cofi_gr_call){.args = a, .first = step,
                                  .last = p->by_section ? step : plan->n_ranks};
    COF_TRY(read_tensor(plan, a->dk, "dk", 0, rows, partial, &call->partial));
    COF_TRY(read_tensor(plan, a->dv, "dv", 1, rows, partial, &call->partial));
    if (call->last == plan->n_ranks)
        COF_TRY(read_outputs(plan, a, &call->out));
    COF_TRY(read_writers(plan, a, &call->writers));
    return read_epoch(plan, a);
}

/* The plan goes on to its next call: of the same whole, or of the next. */
static void advance(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call)
{
    plan->whole = call->writers;
    plan->last_epoch = call->args->epoch;
    plan->section = call->last == plan->n_ranks ? 0 : plan->section + 1;
}

cof_status cof_grad_return_run(cof_plan *base, const cof_grad_return_args *args, cof_stream stream)
{
    COF_FAIL_IF(!base, COF_ERR_INVALID, "plan: NULL");
    COF_FAIL_IF(strcmp(base->op, "grad_return"), COF_ERR_INVALID,
                "plan: a plan of %s, wanted grad_return", base->op);
    struct cofi_grad_return_plan *plan = (struct cofi_grad_return_plan *)base;
    cof_grad_return_args a;
    struct cofi_gr_call call;
    bool is_made = false;
    COF_TRY(cofi_sized_read(&a, sizeof a, COFI_SIZE_THROUGH(cof_grad_return_args, epoch), args,
                            "args"));
    COF_TRY(read_call(plan, &a, &call));
    COF_TRY(cofi_team_status(base->team));
    if (plan->binding.arena && cofi_arena_status(plan->binding.arena) != COF_OK)
        return cofi_fail_text(COF_ERR_POISONED, cof_last_error());
    if (plan->binding.arena)
        COF_TRY(cofi_call_allowed(&plan->binding));
    if (plan->params.n_rows == 0) { /* there is nothing to do on any rank */
        plan->n_empty += call.last == plan->n_ranks;
        advance(plan, &call);
        return COF_OK;
    }
    cof_status status = plan->backend->run(plan, &call, stream, &is_made);
    if (is_made && plan->binding.arena)
        cofi_call_made(&plan->binding, call.last, plan->n_ranks);
    if (is_made)
        advance(plan, &call);
    return status;
}
