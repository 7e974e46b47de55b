/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/grad_return/grad_return_exchange.h"

#include <string.h>

#include "backend/cpu/vec.h"
#include "core/faults.h"

void cofi_grad_begin(struct cofi_grad_exchange *x)
{
    x->binding->mark[x->prev_mark] = x->binding->mark[x->mark];
    x->binding->mark[x->mark] = cofi_call_epoch(x->binding);
}

/* ---- the writer's side ---------------------------------------------------------------------- */

cof_status cofi_grad_open(struct cofi_grad_exchange *x, int step, int64_t begin, void *to[2])
{
    const struct cofi_kv_buffer *slot = &x->slot[(step - 1) & 1];
    const struct cofi_kv_buffer *outbox = &x->outbox[(step - 1) & 1];
    int owner = cofi_grad_owner(x, step);
    uint32_t free_since = x->binding->mark[step <= 2 ? x->prev_mark : x->mark];
    if (!COFI_FAULT(GRAD_ACK_WAIT, x->rank))
        COF_TRY(cofi_call_wait_ack(x->binding, owner, x->ack, free_since, "gradient slot free"));
    for (int is_v = 0; is_v < 2; is_v++)
        to[is_v] = cofi_arena_destination(x->binding->arena, owner, cofi_kv_at(slot, is_v, begin),
                                          outbox->local + cofi_kv_at(outbox, is_v, begin));
    return COF_OK;
}

void cofi_grad_close(struct cofi_grad_exchange *x, int step, int64_t begin, int64_t end,
                     void *const to[2])
{
    const struct cofi_kv_buffer *slot = &x->slot[(step - 1) & 1];
    int owner = cofi_grad_owner(x, step);
    for (int is_v = 0; is_v < 2; is_v++)
        cofi_arena_deliver(x->binding->arena, owner, cofi_kv_at(slot, is_v, begin), to[is_v],
                           cofi_kv_bytes(slot, is_v, end - begin));
    cofi_call_signal(x->binding, owner, x->ready);
}

/* ---- the owner's side ----------------------------------------------------------------------- */

void cofi_grad_clear(struct cofi_grad_exchange *x)
{
    for (int is_v = 0; is_v < 2; is_v++)
        memset(x->acc[is_v], 0,
               (size_t)(x->local_rows * x->row_elements[is_v]) * sizeof(float));
}

cof_status cofi_grad_sum(struct cofi_grad_exchange *x, int step, int64_t begin, int64_t end,
                         bool announced)
{
    const struct cofi_kv_buffer *slot = &x->slot[(step - 1) & 1];
    int last = x->n_ranks - 1;
    if (step == 1)
        cofi_grad_clear(x);
    if (announced && !COFI_FAULT(GRAD_READY_WAIT, x->rank))
        COF_TRY(cofi_call_wait_ready(x->binding, cofi_grad_writer(x, step), x->ready,
                                     "gradient returned"));
    if (begin < end && !(step == last && COFI_FAULT(GRAD_SKIP_LAST, x->rank)))
        for (int is_v = 0; is_v < 2; is_v++)
            cofi_vec_add(cofi_vec(), slot->elem, x->acc[is_v] + begin * slot->row_elements[is_v],
                         cofi_arena_data(x->binding->arena) + cofi_kv_at(slot, is_v, begin),
                         (end - begin) * slot->row_elements[is_v]);
    /* The next user of this slot: two steps on, or the first user in the next call. */
    int next = step + 2 <= last ? step + 2 : (step - 1) % 2 + 1;
    cofi_call_signal(x->binding, cofi_grad_writer(x, next), x->ack);
    return COF_OK;
}
