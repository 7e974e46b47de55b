/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Keys and values on their way between CUDA devices: all of this is on the plan's stream C. The
 * protocol is told at the head of attention_schedule_cuda.c. */
#include "core/faults.h"
#include "ops/attention/attention_forward_cuda.h"
#include "symm/call_cuda.h"

#define MOVE_MIN_BATCH 5 /* from so many on one kernel copies, instead of a copy for each entry */

/* ---- publishing ----------------------------------------------------------------------------- */

/* K or V into the arena, [rows, B, Hkv, dim]. */
static cof_status copy_out(const struct cofi_forward *x, int is_v)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_kv_buffer *to = &plan->published;
    const char *from = is_v ? x->v : x->k;
    char *at = cofi_arena_data(plan->binding.arena) + cofi_kv_at(to, is_v, 0);
    const int64_t dim = is_v ? n->dim_v : n->dim_qk, element = cofi_forward_elem_bytes(x);
    const size_t width = (size_t)(n->n_kv_heads * dim * element), rows = (size_t)plan->local_rows;
    if (n->n_batch == 1 || plan->params.format == COF_FORMAT_SBHD) {
        COF_CUDA(cudaMemcpyAsync(at, from, cofi_kv_bytes(to, is_v, plan->local_rows),
                                 cudaMemcpyDeviceToDevice, x->c));
        return COF_OK;
    }
    if (n->n_batch >= MOVE_MIN_BATCH)
        return cofi_forward_by_rows(x, at, is_v ? x->v : x->k, n->n_kv_heads, dim, x->c);
    for (size_t b = 0; b < (size_t)n->n_batch; b++)
        COF_CUDA(cudaMemcpy2DAsync(at + b * width, width * (size_t)n->n_batch,
                                   from + b * rows * width, width, width, rows,
                                   cudaMemcpyDeviceToDevice, x->c));
    return COF_OK;
}

static cof_status ack(const struct cofi_forward *x, int owner)
{
    return COFI_FAULT(KV_ACK, x->plan->rank)
               ? COF_OK
               : cofi_cuda_call_signal(&x->plan->binding, owner, COFI_KV_ACK, x->c);
}

/* Owners of whom nothing is needed. */
static cof_status ack_others(const struct cofi_forward *x)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_steps *steps = &x->d->steps;
    if (steps->n_fetches == 0)
        return ack(x, COFI_ALL_OTHERS);
    for (int i = 1; i < plan->n_ranks; i++) {
        int owner = (plan->rank - i + plan->n_ranks) % plan->n_ranks;
        bool is_fetched = false;
        for (int k = 0; k < steps->n_fetches; k++)
            is_fetched |= steps->fetches[k].owner == owner;
        if (!is_fetched)
            COF_TRY(ack(x, owner));
    }
    return COF_OK;
}

cof_status cofi_forward_publish(const struct cofi_forward *x)
{
    if (x->plan->local_rows > 0) {
        COF_TRY(copy_out(x, 0));
        COF_TRY(copy_out(x, 1));
    }
    COF_TRY(cofi_cuda_call_signal(&x->plan->binding, COFI_ALL_OTHERS, COFI_KV_READY, x->c));
    return ack_others(x);
}

/* ---- fetching ------------------------------------------------------------------------------- */

static cof_status get(const struct cofi_forward *x, const struct cofi_attention_fetch *f,
                      const struct cofi_kv_buffer *to)
{
    const struct cofi_attention_plan *plan = x->plan;
    const cof_arena *a = plan->binding.arena;
    const struct cofi_kv_buffer *from = &plan->published;
    for (int i = 0; i < f->n_ranges; i++)
        for (int is_v = 0; is_v < 2; is_v++)
            COF_CUDA(cudaMemcpyAsync(
                to->local + cofi_kv_at(to, is_v, f->to[i]),
                a->base[f->owner] + a->data_offset + cofi_kv_at(from, is_v, f->rows[i].begin),
                cofi_kv_bytes(from, is_v, f->rows[i].end - f->rows[i].begin), cudaMemcpyDefault,
                x->c));
    return COF_OK;
}

/* Into `to`; `arrived` (NULL: none) is recorded before the ack, which nobody here waits for. */
static cof_status fetch(const struct cofi_forward *x, int idx, const struct cofi_kv_buffer *to,
                        cudaEvent_t arrived)
{
    struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_fetch *f = &x->d->steps.fetches[idx];
    if (!f->is_more && !COFI_FAULT(KV_READY_WAIT, plan->rank))
        COF_TRY(cofi_cuda_call_wait_ready(&plan->binding, f->owner, COFI_KV_READY,
                                          "keys published", x->c));
    COF_TRY(get(x, f, to));
    if (arrived)
        COF_CUDA(cudaEventRecord(arrived, x->c));
    return f->has_more ? COF_OK : ack(x, f->owner);
}

cof_status cofi_forward_fetch(const struct cofi_forward *x, int idx)
{
    const int slot = idx & 1;
    if (!x->c || idx >= x->d->steps.n_fetches)
        return COF_OK;
    if (idx >= 2 && (x->parts & COFI_PART_SECTIONS) && !COFI_FAULT(STAGING_WAIT, x->plan->rank))
        COF_CUDA(cudaStreamWaitEvent(x->c, x->d->freed[slot], 0));
    return fetch(x, idx, &x->d->at.staging[slot], x->d->fetched[slot]);
}

/* Own keys to their global rows, from where they were published. */
static cof_status keep_own(const struct cofi_forward *x)
{
    const struct cofi_attention_plan *plan = x->plan;
    const cof_layout *l = &plan->layout;
    const struct cofi_kv_buffer *from = &plan->published, *to = &x->d->at.staging[0];
    for (int half = 0; half < cof_layout_halves(l); half++) {
        int64_t chunk = cof_layout_chunk(l, plan->rank, half);
        int64_t begin = cof_layout_half_start(l, plan->rank, half);
        int64_t rows = cof_layout_chunk_rows(l, chunk);
        for (int is_v = 0; is_v < 2 && rows > 0; is_v++)
            COF_CUDA(cudaMemcpyAsync(
                to->local + cofi_kv_at(to, is_v, cof_layout_chunk_start(l, chunk)),
                cofi_arena_data(plan->binding.arena) + cofi_kv_at(from, is_v, begin),
                cofi_kv_bytes(from, is_v, rows), cudaMemcpyDeviceToDevice, x->c));
    }
    return COF_OK;
}

cof_status cofi_forward_gather(const struct cofi_forward *x)
{
    COF_TRY(keep_own(x));
    for (int i = 0; i < x->d->steps.n_fetches; i++)
        COF_TRY(fetch(x, i, &x->d->at.staging[0], NULL));
    COF_CUDA(cudaEventRecord(x->d->fetched[0], x->c));
    return COF_OK;
}
