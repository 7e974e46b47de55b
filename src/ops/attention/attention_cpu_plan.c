/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans of attention on the CPU: sizes, memory, and the place where a call goes to its stream. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "ops/attention/attention.h"
#include "symm/engine.h"
#include "symm/memory.h"
#include "symm/stream.h"

/* ---- sizes ---------------------------------------------------------------------------------- */

static enum cofi_elem wire_elem(const struct cofi_attention_plan *plan)
{
    return plan->params.wire_f32 ? COFI_ELEM_F32 : plan->dims.elem;
}

static int n_slots(const struct cofi_attention_plan *plan)
{
    return plan->params.forward_only ? 0 : cofi_grad_slots(plan->n_ranks);
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
            cofi_attention_take_kv(plan, saves ? NULL : base, saves ? &counted : used,
                                   kept_rows(plan), plan->dims.elem);
    plan->kept_bytes = counted;
    return !saves ? 0 : gathers ? counted : counted * (size_t)(plan->n_ranks - 1);
}

/* Bytes of the arena's data; sets the offsets. */
static size_t lay_out_symmetric(struct cofi_attention_plan *plan)
{
    size_t used = 0;
    if (plan->n_ranks == 1)
        return 0;
    plan->published = cofi_attention_take_kv(plan, NULL, &used, plan->max_rows, plan->dims.elem);
    for (int s = 0; s < n_slots(plan); s++)
        plan->home.slot[s] =
            cofi_attention_take_kv(plan, NULL, &used, plan->max_rows, wire_elem(plan));
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
        plan->home.outbox[s] =
            cofi_attention_take_kv(plan, base, &used, plan->max_rows, wire_elem(plan));
    return used;
}

static cof_status lay_out(struct cofi_attention_plan *plan)
{
    plan->symmetric_bytes = lay_out_symmetric(plan);
    plan->local_bytes = lay_out_local(plan, NULL);
    return COF_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

static void describe(const struct cofi_attention_plan *plan, char *text, size_t bytes)
{
    (void)plan;
    snprintf(text, bytes, "isa=%s gemm=%s", cofi_isa_name(cofi_isa()), cofi_gemm_name());
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

static cof_status open_plan(struct cofi_attention_plan *plan)
{
    size_t bytes = plan->local_bytes;
    set_home(plan);
    COF_TRY(cofi_memory_check(bytes));
    plan->memory = aligned_alloc(128, bytes ? bytes : 128);
    COF_FAIL_IF(!plan->memory, COF_ERR_NOMEM, "attention plan: no memory for %zu bytes", bytes);
    lay_out_local(plan, plan->memory);
    return plan->n_ranks == 1 ? COF_OK
                              : cofi_world_stream_open(plan->base.team->world, 1, false,
                                                       "cofuse-comm", &plan->comm);
}

static void close_plan(struct cofi_attention_plan *plan)
{
    cofi_cpu_stream_close(plan->comm);
    free(plan->memory);
}

static cof_status run(struct cofi_attention_plan *plan, const struct cofi_attention_call *call,
                      bool backward, cof_stream stream)
{
    struct cofi_cpu_stream *s;
    COF_TRY(cofi_stream_begin(plan->base.team->world, stream, &s));
    cof_status status = cofi_attention_enqueue(plan, call, backward, s);
    return cofi_stream_end(plan->base.team->world, stream, status);
}

/* Up to 512 rows gather is no slower than ring (docs/performance.md). Of the global shape alone:
 * the two have other bits. */
const struct cofi_attention_backend cofi_attention_cpu = {.name = "cpu", .gather_max_rows = 512,
                                                          .lay_out = lay_out, .describe = describe,
                                                          .open = open_plan, .close = close_plan,
                                                          .run = run};
