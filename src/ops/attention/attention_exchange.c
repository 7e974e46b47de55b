/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The transfers of the ring schedule: keys and values out of their owners, gradients home to them.
 * The protocol is told at the head of attention_ring.c. */
#include <string.h>

#include "backend/cpu/vec.h"
#include "core/faults.h"
#include "ops/attention/attention_ring.h"
#include "symm/symm.h"

/* ---- exchange buffers ----------------------------------------------------------------------- */

static int64_t row_elements(const struct cofi_attention_plan *plan, bool is_v)
{
    return plan->dims.n_batch * plan->dims.n_kv_heads *
           (is_v ? plan->dims.dim_v : plan->dims.dim_qk);
}

static size_t rows_bytes(const struct cofi_attention_plan *plan, const struct cofi_kv_buffer *b,
                         bool is_v, int64_t rows)
{
    return (size_t)(rows * row_elements(plan, is_v)) * (size_t)b->element_bytes;
}

/* Offset of a row, in the arena's data or in local memory. */
static size_t row_offset(const struct cofi_attention_plan *plan, const struct cofi_kv_buffer *b,
                         bool is_v, int64_t row)
{
    return (is_v ? b->v_offset : b->offset) + rows_bytes(plan, b, is_v, row);
}

/* `data` seen as rows of [B][Hkv][dim]. */
struct cofi_attention_view cofi_attention_ring_view(const struct cofi_attention_plan *plan,
                                                    void *data, bool is_v)
{
    int64_t dim = is_v ? plan->dims.dim_v : plan->dims.dim_qk;
    return (struct cofi_attention_view){data, plan->dims.n_kv_heads * dim, row_elements(plan, is_v),
                                        dim};
}

/* ---- open: both directions ------------------------------------------------------------------ */

/* One row of K and of V into the exchange layout. */
static void copy_out_row(void *arg, int64_t row, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct cofi_ring_open_args *a = arg;
    struct cofi_attention_plan *plan = a->plan;
    size_t element = (size_t)plan->published.element_bytes;
    for (int is_v = 0; is_v < 2; is_v++) {
        const struct cofi_attention_view *from = is_v ? &a->v : &a->k;
        size_t dim_bytes = (size_t)(is_v ? plan->dims.dim_v : plan->dims.dim_qk) * element;
        char *to =
            cofi_arena_data(plan->binding.arena) + row_offset(plan, &plan->published, is_v, row);
        for (int64_t b = 0; b < plan->dims.n_batch; b++)
            for (int64_t h = 0; h < plan->dims.n_kv_heads; h++, to += dim_bytes)
                memcpy(to,
                       (const char *)from->data + (size_t)(b * from->batch_stride +
                                                           row * from->row_stride +
                                                           h * from->head_stride) * element,
                       dim_bytes);
    }
}

cof_status cofi_attention_ring_open(struct cofi_cpu_stream *s, const void *args)
{
    struct cofi_ring_open_args a = *(const struct cofi_ring_open_args *)args;
    struct cofi_attention_plan *plan = a.plan;
    struct cofi_binding *b = &plan->binding;
    const struct cofi_call call = {.direction = (uint32_t)a.direction, .n_empty = a.n_empty};
    COF_TRY(cofi_call_begin(b, &call));
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(KV_ACK_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ack(b, cofi_ring_writer(plan, i), COFI_KV_ACK,
                                   b->mark[COFI_KV_MARK], "keys of the last call read"));
    b->mark[COFI_KV_MARK] = cofi_call_epoch(b);
    if (a.direction == COFI_BACKWARD) {
        b->mark[COFI_PREV_GRAD_MARK] = b->mark[COFI_GRAD_MARK];
        b->mark[COFI_GRAD_MARK] = cofi_call_epoch(b);
    }
    if (plan->n_ranks == 1)
        return COF_OK;
    cofi_cpu_parallel(s, plan->local_rows, copy_out_row, &a);
    for (int i = 1; i < plan->n_ranks; i++)
        cofi_call_signal(b, cofi_ring_writer(plan, i), COFI_KV_READY);
    return COF_OK;
}

/* ---- fetch: both directions, on C ----------------------------------------------------------- */

cof_status cofi_attention_ring_fetch(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    struct cofi_ring_step_args a = *(const struct cofi_ring_step_args *)args;
    struct cofi_attention_plan *plan = a.plan;
    int owner = cofi_ring_owner(plan, a.step);
    int64_t begin, end;
    cofi_attention_needed_rows(&plan->layout, plan->params.mask, plan->rank, owner, &begin, &end);
    if (begin < end) {
        if (!COFI_FAULT(KV_READY_WAIT, plan->rank))
            COF_TRY(cofi_call_wait_ready(&plan->binding, owner, COFI_KV_READY, "keys published"));
        const struct cofi_kv_buffer *to = &plan->staging[(a.step - 1) & 1];
        const struct cofi_kv_buffer *from = &plan->published;
        for (int is_v = 0; is_v < 2; is_v++)
            cofi_arena_get(plan->binding.arena, to->local + row_offset(plan, to, is_v, begin),
                           owner, row_offset(plan, from, is_v, begin),
                           rows_bytes(plan, from, is_v, end - begin));
    }
    if (!COFI_FAULT(KV_ACK, plan->rank))
        cofi_call_signal(&plan->binding, owner, COFI_KV_ACK);
    return COF_OK;
}

/* ---- gradients home: the writer's side ------------------------------------------------------- */

cof_status cofi_attention_ring_return(struct cofi_cpu_stream *s, struct cofi_attention_plan *plan,
                                      int step, int owner, int64_t begin, int64_t end)
{
    const struct cofi_kv_buffer *slot = &plan->slot[(step - 1) & 1];
    const struct cofi_kv_buffer *outbox = &plan->outbox[(step - 1) & 1];
    uint32_t free_since = plan->binding.mark[step <= 2 ? COFI_PREV_GRAD_MARK : COFI_GRAD_MARK];
    if (!COFI_FAULT(GRAD_ACK_WAIT, plan->rank))
        COF_TRY(cofi_call_wait_ack(&plan->binding, owner, COFI_GRAD_ACK, free_since,
                                   "gradient slot free"));
    struct cofi_attention_view view[2];
    void *to[2];
    for (int is_v = 0; is_v < 2; is_v++) {
        to[is_v] =
            cofi_arena_destination(plan->binding.arena, owner, row_offset(plan, slot, is_v, begin),
                                   outbox->local + row_offset(plan, outbox, is_v, begin));
        view[is_v] = cofi_attention_ring_view(plan, to[is_v], is_v);
    }
    cofi_attention_cpu_partial_store(s, &plan->dims, &plan->grad, begin, end - begin, NULL, NULL,
                                     plan->params.wire_f32, &view[0], &view[1]);
    for (int is_v = 0; is_v < 2; is_v++)
        cofi_arena_deliver(plan->binding.arena, owner, row_offset(plan, slot, is_v, begin),
                           to[is_v], rows_bytes(plan, slot, is_v, end - begin));
    cofi_call_signal(&plan->binding, owner, COFI_GRAD_READY);
    return COF_OK;
}

/* ---- gradients home: the owner's side, on C -------------------------------------------------- */

static void add_rows(const struct cofi_attention_plan *plan, const struct cofi_kv_buffer *slot,
                     bool is_v, int64_t begin, int64_t end)
{
    const char *from = cofi_arena_data(plan->binding.arena) + row_offset(plan, slot, is_v, begin);
    float *acc = (is_v ? plan->acc_v : plan->acc_k) + begin * row_elements(plan, is_v);
    int64_t n = (end - begin) * row_elements(plan, is_v);
    cofi_vec_add(cofi_vec(), plan->params.wire_f32 ? COFI_ELEM_F32 : plan->dims.elem, acc, from, n);
}

cof_status cofi_attention_ring_sum(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    struct cofi_ring_step_args a = *(const struct cofi_ring_step_args *)args;
    struct cofi_attention_plan *plan = a.plan;
    int writer = cofi_ring_writer(plan, a.step), last = plan->n_ranks - 1;
    if (a.step == 1) {
        memset(plan->acc_k, 0,
               (size_t)(plan->local_rows * row_elements(plan, false)) * sizeof(float));
        memset(plan->acc_v, 0,
               (size_t)(plan->local_rows * row_elements(plan, true)) * sizeof(float));
    }
    int64_t begin, end;
    cofi_attention_needed_rows(&plan->layout, plan->params.mask, writer, plan->rank, &begin, &end);
    if (begin < end && !(a.step == last && COFI_FAULT(GRAD_SKIP_LAST, plan->rank))) {
        if (!COFI_FAULT(GRAD_READY_WAIT, plan->rank))
            COF_TRY(cofi_call_wait_ready(&plan->binding, writer, COFI_GRAD_READY,
                                         "gradient returned"));
        for (int is_v = 0; is_v < 2; is_v++)
            add_rows(plan, &plan->slot[(a.step - 1) & 1], is_v, begin, end);
    }
    /* The next user of this slot: two steps on, or the first user in the next call. */
    int next = a.step + 2 <= last ? a.step + 2 : (a.step - 1) % 2 + 1;
    cofi_call_signal(&plan->binding, cofi_ring_writer(plan, next), COFI_GRAD_ACK);
    return COF_OK;
}

