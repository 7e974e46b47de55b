/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What every call of attention begins and ends with, whatever its schedule. */
#include <math.h>
#include <string.h>

#include "core/faults.h"
#include "ops/attention/attention_schedule.h"
#include "symm/symm.h"

/* ---- enqueuing ------------------------------------------------------------------------------ */

void cofi_schedule_put(struct cofi_schedule *x, struct cofi_cpu_stream *stream, cofi_call_fn fn,
                       const void *args, size_t bytes)
{
    if (x->status == COF_OK)
        x->status = cofi_cpu_enqueue(stream, fn, args, bytes, 0);
}

void cofi_schedule_order(struct cofi_schedule *x, struct cofi_cpu_stream *stream,
                         struct cofi_cpu_stream *other, uint64_t sequence)
{
    if (x->status == COF_OK)
        x->status = cofi_cpu_wait_event(stream, other, sequence);
}

void cofi_schedule_order_all(struct cofi_schedule *x, struct cofi_cpu_stream *stream,
                             struct cofi_cpu_stream *other)
{
    cofi_schedule_order(x, stream, other, cofi_cpu_stream_tail(other));
}

/* ---- open ----------------------------------------------------------------------------------- */

struct open_args {
    struct cofi_attention_plan *plan;
    int direction;
    bool publish;
    uint64_t n_empty;
    struct cofi_attention_view k, v;
};

/* One row of K and of V into the exchange layout. */
static void copy_out_row(void *arg, int64_t row, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct open_args *a = arg;
    struct cofi_attention_plan *plan = a->plan;
    size_t element = (size_t)cofi_elem_bytes(plan->dims.elem);
    for (int is_v = 0; is_v < 2; is_v++) {
        const struct cofi_attention_view *from = is_v ? &a->v : &a->k;
        size_t dim_bytes = (size_t)(is_v ? plan->dims.dim_v : plan->dims.dim_qk) * element;
        char *to = cofi_arena_data(plan->binding.arena) + cofi_kv_at(&plan->published, is_v, row);
        for (int64_t b = 0; b < plan->dims.n_batch; b++)
            for (int64_t h = 0; h < plan->dims.n_kv_heads; h++, to += dim_bytes)
                memcpy(to,
                       (const char *)from->data + (size_t)(b * from->batch_stride +
                                                           row * from->row_stride +
                                                           h * from->head_stride) * element,
                       dim_bytes);
    }
}

static cof_status publish(struct cofi_cpu_stream *s, struct open_args *a)
{
    struct cofi_attention_plan *plan = a->plan;
    struct cofi_binding *b = &plan->binding;
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(KV_ACK_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ack(b, cofi_grad_writer(&plan->home, i), COFI_KV_ACK,
                                   b->mark[COFI_KV_MARK], "keys of the last call read"));
    b->mark[COFI_KV_MARK] = cofi_call_epoch(b);
    cofi_cpu_parallel(s, plan->local_rows, copy_out_row, a);
    for (int i = 1; i < plan->n_ranks; i++)
        cofi_call_signal(b, cofi_grad_writer(&plan->home, i), COFI_KV_READY);
    return COF_OK;
}

static cof_status open(struct cofi_cpu_stream *s, const void *args)
{
    struct open_args a = *(const struct open_args *)args;
    const struct cofi_call call = {.direction = (uint32_t)a.direction, .n_empty = a.n_empty};
    COF_TRY(cofi_call_begin(&a.plan->binding, &call));
    if (a.direction == COFI_BACKWARD && a.plan->n_ranks > 1)
        cofi_grad_begin(&a.plan->home);
    return a.publish ? publish(s, &a) : COF_OK;
}

void cofi_schedule_open(struct cofi_schedule *x, int direction)
{
    bool saved = direction == COFI_BACKWARD && x->plan->params.save_kv;
    struct open_args a = {x->plan, direction, x->plan->n_ranks > 1 && !saved, x->plan->n_empty,
                          x->call->k, x->call->v};
    cofi_schedule_put(x, x->s, open, &a, sizeof a);
    if (x->plan->n_ranks > 1)
        cofi_schedule_order_all(x, x->c, x->s);
}

/* ---- begin of the gradient, ends of both ---------------------------------------------------- */

struct output_args {
    struct cofi_attention_plan *plan;
    struct cofi_attention_view a, b, c;
    float *lse;
    int64_t lse_batch_stride, lse_head_stride;
};

static cof_status grad_begin(struct cofi_cpu_stream *s, const void *args)
{
    const struct output_args *a = args;
    cofi_attention_cpu_grad_begin(s, &a->plan->dims, &a->plan->grad, &a->a, &a->b, a->lse,
                                  a->lse_batch_stride, a->lse_head_stride);
    return COF_OK;
}

void cofi_schedule_grad_begin(struct cofi_schedule *x)
{
    struct output_args a = {.plan = x->plan, .a = x->call->o, .b = x->call->dout,
                            .lse = x->call->lse, .lse_batch_stride = x->call->lse_batch_stride,
                            .lse_head_stride = x->call->lse_head_stride};
    cofi_schedule_put(x, x->s, grad_begin, &a, sizeof a);
}

cof_status cofi_schedule_section(struct cofi_attention_plan *plan, cof_status status)
{
    return status == COF_OK ? COF_OK : cofi_arena_fail(plan->binding.arena, status);
}

/* Rows [begin, end) of a view: all NaN, or all 0. */
static void fill_rows(const struct cofi_attention_plan *plan, const struct cofi_attention_view *v,
                      int64_t n_heads, int64_t dim, int64_t begin, int64_t end, bool nan)
{
    for (int64_t b = 0; b < plan->dims.n_batch; b++)
        for (int64_t row = begin; row < end; row++)
            for (int64_t h = 0; h < n_heads; h++) {
                int64_t at = b * v->batch_stride + row * v->row_stride + h * v->head_stride;
                for (int64_t d = 0; d < dim; d++)
                    if (plan->dims.elem != COFI_ELEM_F32) /* 0x7fc0 is NaN in both */
                        ((uint16_t *)v->data)[at + d] = nan ? 0x7fc0 : 0;
                    else
                        ((float *)v->data)[at + d] = nan ? NAN : 0;
            }
}

static cof_status finish_forward(struct cofi_cpu_stream *s, const void *args)
{
    const struct output_args *a = args;
    struct cofi_attention_plan *plan = a->plan;
    if (cofi_call_failure(&plan->binding, s) == COF_OK) {
        cofi_attention_cpu_finish(s, &plan->dims, &plan->state, &a->a, a->lse, a->lse_batch_stride,
                                  a->lse_head_stride);
        cofi_call_end(&plan->binding);
        return COF_OK;
    }
    fill_rows(plan, &a->a, plan->dims.n_heads, plan->dims.dim_v, 0, plan->local_rows, true);
    for (int64_t b = 0; b < plan->dims.n_batch; b++)
        for (int64_t h = 0; h < plan->dims.n_heads; h++)
            for (int64_t row = 0; row < plan->local_rows; row++)
                a->lse[b * a->lse_batch_stride + h * a->lse_head_stride + row] = NAN;
    return cofi_arena_status(plan->binding.arena);
}

/* Own rows [begin, end), of which the partial holds the first at `from`, with the others' sums. */
static void store_own(struct cofi_cpu_stream *s, const struct output_args *a, int64_t begin,
                      int64_t end, int64_t from)
{
    struct cofi_attention_plan *plan = a->plan;
    struct cofi_attention_view out[2] = {a->b, a->c};
    const float *acc[2];
    size_t element = (size_t)cofi_elem_bytes(plan->dims.elem);
    for (int is_v = 0; is_v < 2; is_v++) {
        out[is_v].data = (char *)out[is_v].data + (size_t)(begin * out[is_v].row_stride) * element;
        acc[is_v] = plan->n_ranks == 1
                        ? NULL
                        : plan->home.acc[is_v] + begin * plan->home.row_elements[is_v];
    }
    cofi_attention_cpu_partial_store(s, &plan->dims, &plan->grad, from, end - begin, acc[0], acc[1],
                                     false, &out[0], &out[1]);
}

/* In gather the partial has global rows; padding has none. */
static void store_own_chunks(struct cofi_cpu_stream *s, const struct output_args *a)
{
    struct cofi_attention_plan *plan = a->plan;
    const cof_layout *l = &plan->layout;
    int64_t row = 0;
    for (int half = 0; half < cof_layout_halves(l); half++) {
        int64_t chunk = cof_layout_chunk(l, plan->rank, half);
        int64_t next = half + 1 < cof_layout_halves(l)
                           ? cof_layout_half_start(l, plan->rank, half + 1)
                           : plan->local_rows;
        int64_t end = row + cof_layout_chunk_rows(l, chunk);
        store_own(s, a, row, end, cof_layout_chunk_start(l, chunk));
        fill_rows(plan, &a->b, plan->dims.n_kv_heads, plan->dims.dim_qk, end, next, false);
        fill_rows(plan, &a->c, plan->dims.n_kv_heads, plan->dims.dim_v, end, next, false);
        row = next;
    }
}

static cof_status finish_backward(struct cofi_cpu_stream *s, const void *args)
{
    const struct output_args *a = args;
    struct cofi_attention_plan *plan = a->plan;
    const struct cofi_attention_dims *d = &plan->dims;
    if (cofi_call_failure(&plan->binding, s) == COF_OK) {
        cofi_attention_cpu_dq_store(s, d, &plan->grad, &a->a);
        if (cofi_attention_gathers(plan))
            store_own_chunks(s, a);
        else
            store_own(s, a, 0, plan->local_rows, 0);
        cofi_call_end(&plan->binding);
        return COF_OK;
    }
    fill_rows(plan, &a->a, d->n_heads, d->dim_qk, 0, plan->local_rows, true);
    fill_rows(plan, &a->b, d->n_kv_heads, d->dim_qk, 0, plan->local_rows, true);
    fill_rows(plan, &a->c, d->n_kv_heads, d->dim_v, 0, plan->local_rows, true);
    return cofi_arena_status(plan->binding.arena);
}

static cof_status end(struct cofi_schedule *x, cofi_call_fn fn, const struct output_args *a)
{
    if (x->status != COF_OK)
        cofi_arena_fail(x->plan->binding.arena, x->status);
    if (x->plan->n_ranks > 1) {
        /* Not by _order, which a refusal ends: what C has may write to the caller's saved_kv. */
        cof_status joined = cofi_cpu_wait_event(x->s, x->c, cofi_cpu_stream_tail(x->c));
        if (joined != COF_OK)
            cofi_arena_fail(x->plan->binding.arena, joined);
        x->status = x->status != COF_OK ? x->status : joined;
    }
    cof_status status = cofi_cpu_enqueue(x->s, fn, a, sizeof *a, COFI_CALL_ALWAYS);
    return x->status != COF_OK ? x->status : status;
}

cof_status cofi_schedule_end_forward(struct cofi_schedule *x)
{
    struct output_args a = {.plan = x->plan, .a = x->call->o, .lse = x->call->lse,
                            .lse_batch_stride = x->call->lse_batch_stride,
                            .lse_head_stride = x->call->lse_head_stride};
    return end(x, finish_forward, &a);
}

cof_status cofi_schedule_end_backward(struct cofi_schedule *x)
{
    struct output_args a = {.plan = x->plan, .a = x->call->dq, .b = x->call->dk, .c = x->call->dv};
    return end(x, finish_backward, &a);
}

/* ---- the calls ------------------------------------------------------------------------------ */

cof_status cofi_attention_enqueue(struct cofi_attention_plan *plan,
                                  const struct cofi_attention_call *call, bool backward,
                                  struct cofi_cpu_stream *stream)
{
    struct cofi_schedule x = {plan, call, stream, plan->comm, COF_OK};
    bool gathers = cofi_attention_gathers(plan);
    cofi_schedule_open(&x, backward ? COFI_BACKWARD : COFI_FORWARD);
    if (!backward) {
        (gathers ? cofi_gather_forward : cofi_ring_forward)(&x);
        return cofi_schedule_end_forward(&x);
    }
    (gathers ? cofi_gather_backward : cofi_ring_backward)(&x);
    return cofi_schedule_end_backward(&x);
}
