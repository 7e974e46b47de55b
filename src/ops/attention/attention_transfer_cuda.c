/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The transfers of a forward call on CUDA devices: puts and turns of the ring, copies of gather.
 * The protocol is told at the head of attention_schedule_cuda.c. */
#include <time.h>

#include "core/faults.h"
#include "ops/attention/attention_forward_cuda.h"
#include "symm/call_cuda.h"
#include "symm/options_cuda.h"

#define MOVE_MIN_BATCH 5 /* gather: from so many on one kernel copies, not a copy for each entry */

/* ---- S with B and C ------------------------------------------------------------------------- */

/* Transfers that are late by more than sections take. */
static void CUDART_CB be_late(void *none)
{
    (void)none;
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
}

/* C goes on behind the begin, once. */
static cof_status fork_comm(struct cofi_forward *x)
{
    if (x->is_forked)
        return COF_OK;
    x->is_forked = x->is_ahead = true;
    COF_CUDA(cudaStreamWaitEvent(x->c, x->d->begun, 0));
    if (COFI_FAULT(COMM_LATE, x->plan->rank))
        COF_CUDA(cudaLaunchHostFunc(x->c, be_late, NULL));
    return COF_OK;
}

cof_status cofi_forward_fork_beside(struct cofi_forward *x, cudaEvent_t event)
{
    COF_CUDA(cudaEventRecord(event, x->s));
    COF_CUDA(cudaStreamWaitEvent(x->b, event, 0));
    x->is_beside = true;
    return COF_OK;
}

cof_status cofi_forward_join_beside(struct cofi_forward *x)
{
    if (!x->is_beside)
        return COF_OK;
    COF_CUDA(cudaEventRecord(x->d->beside_done, x->b));
    COF_CUDA(cudaStreamWaitEvent(x->s, x->d->beside_done, 0));
    x->is_beside = false;
    return COF_OK;
}

static cof_status join_comm(struct cofi_forward *x)
{
    if (!x->is_ahead)
        return COF_OK;
    COF_CUDA(cudaEventRecord(x->d->joined, x->c));
    COF_CUDA(cudaStreamWaitEvent(x->s, x->d->joined, 0));
    x->is_ahead = x->is_merged = false;
    return COF_OK;
}

cof_status cofi_forward_join(struct cofi_forward *x)
{
    cof_status beside = cofi_forward_join_beside(x), comm = join_comm(x);
    return beside != COF_OK ? beside : comm;
}

/* ---- ring: puts, on C ----------------------------------------------------------------------- */

/* The rank to which this one's keys go in a step, and that whose keys come. */
static int reader_of(const struct cofi_attention_plan *plan, int step)
{
    return (plan->rank + step) % plan->n_ranks;
}

static int owner_of(const struct cofi_attention_plan *plan, int step)
{
    return (plan->rank - step + plan->n_ranks) % plan->n_ranks;
}

/* Of the layout alone: owner and reader agree. None past the last step. */
static int rows_out(const struct cofi_attention_plan *plan, int step,
                    struct cofi_rows_range rows[2])
{
    return step >= plan->n_ranks ? 0
                                 : cofi_attention_needed(&plan->layout, &plan->sight,
                                                         reader_of(plan, step), plan->rank, rows);
}

static bool has_rows_in(const struct cofi_attention_plan *plan, int step)
{
    struct cofi_rows_range rows[2];
    return step < plan->n_ranks && cofi_attention_needed(&plan->layout, &plan->sight, plan->rank,
                                                         owner_of(plan, step), rows) > 0;
}

/* Row `row` of a compact tensor whose entries have so many rows. */
struct place {
    char *data;
    int64_t row, entry_rows;
};

/* Rows of a slot lie as those of the caller's tensor, but for the number of rows of a batch entry:
 * one copy where both have the same, else one for each entry. (A copy with a pitch may be a kernel;
 * these never are, between two devices.) */
static cof_status put_rows(const struct cofi_forward *x, const struct place *to,
                           const struct place *from, size_t row_bytes, int64_t n_rows)
{
    const bool by_rows = x->plan->params.format == COF_FORMAT_SBHD;
    size_t n_entries = by_rows ? 1 : (size_t)x->plan->dims.n_batch;
    size_t width = row_bytes * (size_t)n_rows;
    const size_t to_pitch = row_bytes * (size_t)to->entry_rows;
    const size_t from_pitch = row_bytes * (size_t)from->entry_rows;
    char *dst = to->data + row_bytes * (size_t)to->row;
    const char *src = from->data + row_bytes * (size_t)from->row;
    if (width == to_pitch && width == from_pitch) {
        width *= n_entries;
        n_entries = 1;
    }
    for (size_t b = 0; b < n_entries; b++)
        COF_CUDA(cudaMemcpyAsync(dst + b * to_pitch, src + b * from_pitch, width,
                                 cudaMemcpyDefault, x->c));
    return COF_OK;
}

/* The ranges one behind the other, as the reader's sections expect them (attention_steps.h). */
static cof_status put_ranges(const struct cofi_forward *x, int step,
                             const struct cofi_rows_range *rows, int n_ranges)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const cof_arena *a = plan->binding.arena;
    const struct cofi_kv_buffer *slot = &x->d->slot[(step - 1) & 1];
    char *slab = (char *)a->base[reader_of(plan, step)] + a->data_offset;
    char *const kv[2] = {x->k, x->v};
    const int64_t dim[2] = {n->dim_qk, n->dim_v};
    struct place to = {.entry_rows = plan->max_rows}, from = {.entry_rows = plan->local_rows};
    for (int i = 0; i < n_ranges; i++) {
        const int64_t n_rows = rows[i].end - rows[i].begin;
        from.row = rows[i].begin;
        for (int is_v = 0; is_v < 2; is_v++) {
            to.data = slab + slot->offset[is_v];
            from.data = kv[is_v];
            COF_TRY(put_rows(x, &to, &from,
                             (size_t)(cofi_attention_slot_strides(plan, n->n_kv_heads,
                                                                  dim[is_v]).row *
                                      cofi_forward_elem_bytes(x)),
                             n_rows));
        }
        to.row += n_rows;
    }
    return COF_OK;
}

cof_status cofi_forward_put(struct cofi_forward *x, int step)
{
    struct cofi_rows_range rows[2];
    const int n_ranges = x->c ? rows_out(x->plan, step, rows) : 0;
    if (n_ranges == 0)
        return COF_OK;
    COF_TRY(fork_comm(x));
    x->is_ahead = true;
    x->last_put = step;
    if (step > 2 && !COFI_FAULT(STAGING_WAIT, x->plan->rank))
        COF_CUDA(cudaStreamWaitEvent(x->c, x->d->turned, 0));
    COF_TRY(put_ranges(x, step, rows, n_ranges));
    COF_CUDA(cudaEventRecord(x->d->sent[(step - 1) & 1], x->c));
    return COF_OK;
}

/* ---- ring: turns, on S ---------------------------------------------------------------------- */

cof_status cofi_forward_turn(struct cofi_forward *x, int step)
{
    struct cofi_attention_plan *plan = x->plan;
    const int rank = plan->rank, next = step + 1; /* which uses the slot of step - 1 again */
    struct cofi_rows_range rows[2];
    if (!x->c)
        return COF_OK;
    x->is_merged = false;
    struct cofi_attention_turn turn = {
        .binding = plan->binding.on_device, .ready = COFI_KV_READY, .ack = COFI_KV_ACK,
        .ready_to = -1, .ready_from = -1, .ack_to = -1, .ack_from = -1,
        .ready_wait = cofi_wait_options(plan->binding.arena, "keys published"),
        .ack_wait = cofi_wait_options(plan->binding.arena, "slot for keys read")};
    if (rows_out(plan, step, rows) > 0)
        turn.ready_to = reader_of(plan, step);
    if (has_rows_in(plan, step) && !COFI_FAULT(KV_READY_WAIT, rank))
        turn.ready_from = owner_of(plan, step);
    if (next > 2 && has_rows_in(plan, next) && !COFI_FAULT(KV_ACK, rank))
        turn.ack_to = owner_of(plan, next);
    const bool refills = next > 2 && rows_out(plan, next, rows) > 0;
    if (refills && !COFI_FAULT(STAGING_WAIT, rank))
        turn.ack_from = reader_of(plan, next);
    if (turn.ready_to >= 0 && !COFI_FAULT(ARRIVAL_WAIT, rank)) {
        COF_CUDA(cudaStreamWaitEvent(x->s, x->d->sent[(step - 1) & 1], 0));
        x->is_ahead = x->last_put > step;
    }
    if (turn.ready_to >= 0 || turn.ready_from >= 0 || turn.ack_to >= 0 || turn.ack_from >= 0)
        COF_TRY(cofi_forward_launched(x, __FILE_NAME__, __LINE__, x->s,
                                      cofi_launch_attention_turn(&turn, x->s), "turn"));
    if (refills)
        COF_CUDA(cudaEventRecord(x->d->turned, x->s));
    return COF_OK;
}

bool cofi_forward_acks_all(const struct cofi_forward *x)
{
    return x->c && !cofi_attention_gathers(x->plan) && !COFI_FAULT(KV_ACK, x->plan->rank);
}

cof_status cofi_forward_ack_all(const struct cofi_forward *x)
{
    return cofi_forward_acks_all(x)
               ? cofi_cuda_call_signal(&x->plan->binding, COFI_ALL_OTHERS, COFI_KV_ACK, x->s)
               : COF_OK;
}

/* ---- gather, on C --------------------------------------------------------------------------- */

/* K or V into the arena, [rows, B, Hkv, dim]. */
static cof_status copy_out(const struct cofi_forward *x, int is_v)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_kv_buffer *to = &plan->published;
    char *from = is_v ? x->v : x->k;
    char *at = cofi_arena_data(plan->binding.arena) + cofi_kv_at(to, is_v, 0);
    const int64_t dim = is_v ? n->dim_v : n->dim_qk, element = cofi_forward_elem_bytes(x);
    const size_t width = (size_t)(n->n_kv_heads * dim * element), rows = (size_t)plan->local_rows;
    if (n->n_batch == 1 || plan->params.format == COF_FORMAT_SBHD) {
        COF_CUDA(cudaMemcpyAsync(at, from, cofi_kv_bytes(to, is_v, plan->local_rows),
                                 cudaMemcpyDeviceToDevice, x->c));
        return COF_OK;
    }
    if (n->n_batch >= MOVE_MIN_BATCH)
        return cofi_forward_by_rows(x, at, from, n->n_kv_heads, dim, x->c);
    for (size_t b = 0; b < (size_t)n->n_batch; b++)
        COF_CUDA(cudaMemcpy2DAsync(at + b * width, width * (size_t)n->n_batch,
                                   from + b * rows * width, width, width, rows,
                                   cudaMemcpyDeviceToDevice, x->c));
    return COF_OK;
}

static cof_status publish(const struct cofi_forward *x)
{
    if (x->plan->local_rows > 0) {
        COF_TRY(copy_out(x, 0));
        COF_TRY(copy_out(x, 1));
    }
    return cofi_cuda_call_signal(&x->plan->binding, COFI_ALL_OTHERS, COFI_KV_READY, x->c);
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

static cof_status get(const struct cofi_forward *x, const struct cofi_attention_fetch *f)
{
    const struct cofi_attention_plan *plan = x->plan;
    const cof_arena *a = plan->binding.arena;
    const struct cofi_kv_buffer *from = &plan->published, *to = &x->d->at.gathered;
    for (int i = 0; i < f->n_ranges; i++)
        for (int is_v = 0; is_v < 2; is_v++)
            COF_CUDA(cudaMemcpyAsync(
                to->local + cofi_kv_at(to, is_v, f->to[i]),
                a->base[f->owner] + a->data_offset + cofi_kv_at(from, is_v, f->rows[i].begin),
                cofi_kv_bytes(from, is_v, f->rows[i].end - f->rows[i].begin), cudaMemcpyDefault,
                x->c));
    return COF_OK;
}

static cof_status fetch(const struct cofi_forward *x,
                        const struct cofi_attention_fetch *f)
{
    struct cofi_attention_plan *plan = x->plan;
    if (!COFI_FAULT(KV_READY_WAIT, plan->rank))
        COF_TRY(cofi_cuda_call_wait_ready(&plan->binding, f->owner, COFI_KV_READY,
                                          "keys published", x->c));
    COF_TRY(get(x, f));
    return ack(x, f->owner);
}

/* Own keys to their global rows, from where they were published. */
static cof_status keep_own(const struct cofi_forward *x)
{
    const struct cofi_attention_plan *plan = x->plan;
    const cof_layout *l = &plan->layout;
    const struct cofi_kv_buffer *from = &plan->published, *to = &x->d->at.gathered;
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

cof_status cofi_forward_gather(struct cofi_forward *x)
{
    COF_TRY(fork_comm(x));
    COF_TRY(publish(x));
    COF_TRY(ack_others(x));
    COF_TRY(keep_own(x));
    for (int i = 0; i < x->d->steps.n_fetches; i++)
        COF_TRY(fetch(x, &x->d->steps.fetches[i]));
    return COF_OK;
}
