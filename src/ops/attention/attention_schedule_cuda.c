/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A forward call on CUDA devices. S is the caller's stream, C the plan's; r this rank. Words, their
 * writers and readers, and when a buffer is free are those of the CPU (attention_ring.c,
 * attention_gather.c). But for its begin all of the protocol is on C, so that S only computes.
 *
 * Ring
 *   S  begin, acks of the last call | own section | wait fetch 0 | section | merge | wait fetch 1 ..
 *   C  (behind begin)  K, V -> arena | announce | wait owner 0 | get | ack | wait owner 1 | get | ack
 *      | wait S: section 0 | wait owner 2 | get ..
 * Gather
 *   S  begin, acks | ................................. wait C | half 0 x prefix | half 1 x prefix
 *   C  K, V -> arena | announce | own keys | wait owner, get, ack | ..
 *
 * The own section reads the caller's k and v, and begins at once: it is enqueued before what is on
 * C, which needs a place beside it for its small kernels, and is joined to S at the end. Copies are
 * those of copy engines: sections have the multiprocessors.
 *
 * Local buffers     written by                       read by             free again
 *   staging[i mod 2]  fetch i, on C                  section i, on S     event freed[i mod 2]
 *   partial           a section, on S                its merges, on S    in the order of S
 *   acc               merges, on S                   later merges        likewise
 * The next call's fetches begin behind its fork, hence behind all of this call on S.
 *
 * Where the arena is dead, waits are over at once and sections compute what there is; the last
 * kernel, behind both streams, then fills the outputs with NaN. */
#include <string.h>

#include "core/faults.h"
#include "ops/attention/attention_device.h"
#include "ops/attention/attention_move_cuda.h"
#include "symm/call_cuda.h"
#include "symm/options_cuda.h"

#define MOVE_MIN_BATCH 5 /* from so many on one kernel copies, instead of a copy for each entry */

/* A call being enqueued. */
struct forward {
    struct cofi_attention_plan *plan;
    struct cofi_attention_device *d;
    const struct cofi_attention_call *call;
    cudaStream_t s, c;
    int parts; /* COFI_PART_.. bits */
    bool is_forked; /* C goes on behind S, and must be joined */
    /* Compact: the caller's tensors, or copies of them. */
    char *q, *k, *v, *o;
    float *lse;
};

static int64_t elem_bytes(const struct forward *x)
{
    return cofi_elem_bytes(x->plan->dims.elem);
}

static cof_status launched(const struct forward *x, int line, const void *stream, cudaError_t error,
                           const char *what)
{
    return cofi_cuda_launched(__FILE_NAME__, line, x->plan->binding.arena, stream, error, what);
}

/* ---- tensors of other strides --------------------------------------------------------------- */

static struct cofi_attention_block block_of(const struct cofi_attention_view *v, int64_t element)
{
    return (struct cofi_attention_block){v->data, v->batch_stride * element,
                                         v->row_stride * element, v->head_stride * element};
}

static struct cofi_attention_block compact_block(const struct forward *x, char *data, int64_t heads,
                                                 int64_t dim)
{
    struct cofi_attention_strides s = cofi_attention_compact(x->plan, heads, dim);
    int64_t element = elem_bytes(x);
    return (struct cofi_attention_block){data, s.batch * element, s.row * element,
                                         s.head * element};
}

static struct cofi_attention_extent extent_of(const struct forward *x, int64_t heads,
                                              int64_t dim_bytes)
{
    return (struct cofi_attention_extent){x->plan->dims.n_batch, x->plan->local_rows, heads,
                                          dim_bytes};
}

/* Strides of dims of one entry do not count. Engines load 16 bytes at a time. */
static bool is_compact(const struct forward *x, const struct cofi_attention_view *v, int64_t heads,
                       int64_t dim)
{
    struct cofi_attention_strides s = cofi_attention_compact(x->plan, heads, dim);
    return (x->plan->dims.n_batch == 1 || v->batch_stride == s.batch) &&
           (x->plan->local_rows <= 1 || v->row_stride == s.row) &&
           (heads == 1 || v->head_stride == s.head) && (uintptr_t)v->data % 16 == 0;
}

static bool lse_is_compact(const struct forward *x)
{
    const struct cofi_attention_call *call = x->call;
    int64_t rows = x->plan->local_rows, heads = x->plan->dims.n_heads;
    return (x->plan->dims.n_batch == 1 || call->lse_batch_stride == heads * rows) &&
           (heads == 1 || call->lse_head_stride == rows);
}

static cof_status move(const struct forward *x, const struct cofi_attention_move *m, void *stream)
{
    return launched(x, __LINE__, stream,
                    cofi_launch_attention_move(m, x->d->n_move_blocks, stream), "move rows");
}

/* An input as sections take it: itself, or copied. */
static cof_status take_input(const struct forward *x, const struct cofi_attention_view *v,
                             int64_t heads, int64_t dim, char *room, char **out)
{
    *out = v->data;
    if (is_compact(x, v, heads, dim))
        return COF_OK;
    *out = room;
    return move(x,
                &(struct cofi_attention_move){extent_of(x, heads, dim * elem_bytes(x)),
                                              compact_block(x, room, heads, dim),
                                              block_of(v, elem_bytes(x))},
                x->s);
}

static cof_status take_tensors(struct forward *x)
{
    const struct cofi_attention_dims *n = &x->plan->dims;
    const struct cofi_attention_call *call = x->call;
    const struct cofi_attention_places *at = &x->d->at;
    COF_TRY(take_input(x, &call->q, n->n_heads, n->dim_qk, at->q, &x->q));
    COF_TRY(take_input(x, &call->k, n->n_kv_heads, n->dim_qk, at->k, &x->k));
    COF_TRY(take_input(x, &call->v, n->n_kv_heads, n->dim_v, at->v, &x->v));
    x->o = is_compact(x, &call->o, n->n_heads, n->dim_v) ? call->o.data : at->o;
    x->lse = lse_is_compact(x) ? call->lse : at->lse;
    return COF_OK;
}

/* With only_compact, before anything is enqueued. */
static cof_status check_tensors(const struct forward *x)
{
    const struct cofi_attention_dims *n = &x->plan->dims;
    const struct cofi_attention_call *call = x->call;
    const struct {
        const char *name;
        const struct cofi_attention_view *view;
        int64_t heads, dim;
    } tensors[] = {{"q", &call->q, n->n_heads, n->dim_qk},
                   {"k", &call->k, n->n_kv_heads, n->dim_qk},
                   {"v", &call->v, n->n_kv_heads, n->dim_v},
                   {"o", &call->o, n->n_heads, n->dim_v}};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        COF_FAIL_IF(!is_compact(x, tensors[i].view, tensors[i].heads, tensors[i].dim),
                    COF_ERR_INVALID,
                    "%s: data at %p, strides of batch, row and head %lld, %lld, %lld: wanted a "
                    "compact tensor, aligned to 16 bytes, on a plan made with only_compact",
                    tensors[i].name, tensors[i].view->data,
                    (long long)tensors[i].view->batch_stride,
                    (long long)tensors[i].view->row_stride,
                    (long long)tensors[i].view->head_stride);
    COF_FAIL_IF(!lse_is_compact(x), COF_ERR_INVALID,
                "lse: strides of batch and head %lld, %lld: wanted a compact tensor on a plan made "
                "with only_compact",
                (long long)call->lse_batch_stride, (long long)call->lse_head_stride);
    return COF_OK;
}

/* ---- publishing, on C ----------------------------------------------------------------------- */

/* K or V into the arena, [rows, B, Hkv, dim]. */
static cof_status copy_out(const struct forward *x, int is_v)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_kv_buffer *to = &plan->published;
    const char *from = is_v ? x->v : x->k;
    char *at = cofi_arena_data(plan->binding.arena) + cofi_kv_at(to, is_v, 0);
    const int64_t dim = is_v ? n->dim_v : n->dim_qk, element = elem_bytes(x);
    const size_t width = (size_t)(n->n_kv_heads * dim * element), rows = (size_t)plan->local_rows;
    if (n->n_batch == 1 || plan->params.format == COF_FORMAT_SBHD) {
        COF_CUDA(cudaMemcpyAsync(at, from, cofi_kv_bytes(to, is_v, plan->local_rows),
                                 cudaMemcpyDeviceToDevice, x->c));
        return COF_OK;
    }
    if (n->n_batch >= MOVE_MIN_BATCH) {
        struct cofi_attention_strides s = cofi_attention_by_rows(plan, n->n_kv_heads, dim);
        const struct cofi_attention_move m = {
            extent_of(x, n->n_kv_heads, dim * element),
            {at, s.batch * element, s.row * element, s.head * element},
            compact_block(x, is_v ? x->v : x->k, n->n_kv_heads, dim)};
        return move(x, &m, x->c);
    }
    for (size_t b = 0; b < (size_t)n->n_batch; b++)
        COF_CUDA(cudaMemcpy2DAsync(at + b * width, width * (size_t)n->n_batch,
                                   from + b * rows * width, width, width, rows,
                                   cudaMemcpyDeviceToDevice, x->c));
    return COF_OK;
}

static cof_status publish(const struct forward *x)
{
    if (x->plan->local_rows > 0) {
        COF_TRY(copy_out(x, 0));
        COF_TRY(copy_out(x, 1));
    }
    return cofi_cuda_call_signal(&x->plan->binding, COFI_ALL_OTHERS, COFI_KV_READY, x->c);
}

/* ---- fetching, on C ------------------------------------------------------------------------- */

static cof_status ack(const struct forward *x, int owner)
{
    return COFI_FAULT(KV_ACK, x->plan->rank)
               ? COF_OK
               : cofi_cuda_call_signal(&x->plan->binding, owner, COFI_KV_ACK, x->c);
}

/* Owners of whom nothing is needed. */
static cof_status ack_others(const struct forward *x)
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

static cof_status get(const struct forward *x, const struct cofi_attention_fetch *f,
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
static cof_status fetch(const struct forward *x, int idx, const struct cofi_kv_buffer *to,
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

/* Into the staging buffer whose turn it is; its last section is on S. */
static cof_status fetch_next(const struct forward *x, int idx)
{
    const int slot = idx & 1;
    if (!x->c || idx >= x->d->steps.n_fetches)
        return COF_OK;
    if (idx >= 2 && (x->parts & COFI_PART_SECTIONS) && !COFI_FAULT(STAGING_WAIT, x->plan->rank))
        COF_CUDA(cudaStreamWaitEvent(x->c, x->d->freed[slot], 0));
    return fetch(x, idx, &x->d->at.staging[slot], x->d->fetched[slot]);
}

/* Own keys to their global rows, from where they were published. */
static cof_status keep_own(const struct forward *x)
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

/* ---- sections and merges, on S -------------------------------------------------------------- */

static cof_status section(const struct forward *x, int idx)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_device *d = x->d;
    const struct cofi_attention_job *job = &d->steps.jobs[idx];
    const int64_t element = elem_bytes(x), q_begin = job->pair.q_begin;
    const struct cofi_kv_buffer *keys = &d->at.staging[(job->step - 1) & 1];
    const char *kv[2] = {x->k, x->v};
    const int64_t dim[2] = {n->dim_qk, n->dim_v};
    for (int is_v = 0; is_v < 2; is_v++)
        kv[is_v] = job->step == 0
                       ? kv[is_v] + job->pair.k_begin * element *
                                        cofi_attention_compact(plan, n->n_kv_heads, dim[is_v]).row
                       : keys->local + cofi_kv_at(keys, is_v, job->pair.k_begin);
    const char *q = x->q + q_begin * cofi_attention_compact(plan, n->n_heads, n->dim_qk).row *
                               element;
    char *o = job->is_first
                  ? x->o + q_begin * cofi_attention_compact(plan, n->n_heads, n->dim_v).row * element
                  : d->at.partial;
    float *lse = job->is_first ? x->lse + q_begin : d->at.partial_lse;
    return cofi_attention_kernels_run(&d->kernels, d->kernel[idx], q, kv[0], kv[1], o, lse,
                                      d->workspace.base, x->s);
}

static cof_status merge(const struct forward *x, const struct cofi_attention_job *job,
                        const struct cofi_attention_merged *part)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_device *d = x->d;
    const struct cofi_attention_strides compact =
        cofi_attention_compact(plan, n->n_heads, n->dim_v);
    const struct cofi_attention_strides by_rows =
        cofi_attention_by_rows(plan, n->n_heads, n->dim_v);
    const int64_t element = elem_bytes(x), partial_rows = d->steps.partial_rows;
    char *o = x->o + part->begin * compact.row * element;
    float *acc = d->at.acc ? d->at.acc + part->begin * by_rows.row : NULL;
    float *lse = x->lse + part->begin;
    const int64_t row = part->begin - job->pair.q_begin; /* of the partial result */
    const struct cofi_attention_merge m = {
        .elem = n->elem, .n_batch = n->n_batch, .n_rows = part->rows, .n_heads = n->n_heads,
        .dim_v = n->dim_v,
        .a = {.o = part->from_acc ? (const void *)acc : o, .o_f32 = part->from_acc,
              .stride = part->from_acc ? by_rows : compact, .lse = lse,
              .lse_batch = n->n_heads * plan->local_rows, .lse_head = plan->local_rows},
        .b = {.o = d->at.partial + row * by_rows.row * element, .stride = by_rows,
              .lse = d->at.partial_lse + row, .lse_batch = n->n_heads * partial_rows,
              .lse_head = partial_rows},
        .o = part->to_acc ? (void *)acc : o, .o_f32 = part->to_acc,
        .stride = part->to_acc ? by_rows : compact, .lse = lse,
        .lse_batch = n->n_heads * plan->local_rows, .lse_head = plan->local_rows};
    return cofi_attention_merge(&m, x->s);
}

/* A job and its merges; `read` (NULL: none) is recorded when its keys have been read. */
static cof_status run_job(const struct forward *x, int idx, cudaEvent_t read)
{
    const struct cofi_attention_job *job = &x->d->steps.jobs[idx];
    if (x->parts & COFI_PART_SECTIONS)
        COF_TRY(section(x, idx));
    if (read)
        COF_CUDA(cudaEventRecord(read, x->s));
    for (int i = 0; i < job->n_merges && (x->parts & COFI_PART_MERGES); i++)
        COF_TRY(merge(x, job, &x->d->steps.merged[job->first_merge + i]));
    return COF_OK;
}

/* All jobs of a step. */
static cof_status run_step(const struct forward *x, int step)
{
    const struct cofi_attention_steps *steps = &x->d->steps;
    const bool refills = x->c && step > 0 && step + 1 < steps->n_fetches;
    int last = -1;
    for (int i = 0; i < steps->n_jobs; i++)
        last = steps->jobs[i].step == step ? i : last;
    for (int i = 0; i <= last; i++)
        if (steps->jobs[i].step == step)
            COF_TRY(run_job(x, i, refills && i == last ? x->d->freed[(step - 1) & 1] : NULL));
    return COF_OK;
}

/* ---- schedules ------------------------------------------------------------------------------ */

static cof_status wait_fetched(const struct forward *x, int slot)
{
    if (x->c && !COFI_FAULT(ARRIVAL_WAIT, x->plan->rank))
        COF_CUDA(cudaStreamWaitEvent(x->s, x->d->fetched[slot], 0));
    return COF_OK;
}

static cof_status ring(const struct forward *x)
{
    COF_TRY(run_step(x, 0));
    if (x->c) {
        COF_TRY(publish(x));
        COF_TRY(ack_others(x));
    }
    COF_TRY(fetch_next(x, 0));
    COF_TRY(fetch_next(x, 1));
    for (int i = 0; i < x->d->steps.n_fetches; i++) {
        COF_TRY(wait_fetched(x, i & 1));
        COF_TRY(run_step(x, i + 1));
        COF_TRY(fetch_next(x, i + 2));
    }
    return COF_OK;
}

static cof_status gather(const struct forward *x)
{
    if (x->c) {
        COF_TRY(publish(x));
        COF_TRY(ack_others(x));
        COF_TRY(keep_own(x));
        for (int i = 0; i < x->d->steps.n_fetches; i++)
            COF_TRY(fetch(x, i, &x->d->at.staging[0], NULL));
        COF_CUDA(cudaEventRecord(x->d->fetched[0], x->c));
    }
    COF_TRY(wait_fetched(x, 0));
    return run_step(x, 1);
}

/* ---- begin and end -------------------------------------------------------------------------- */

/* On S, where the first section cannot have taken all multiprocessors yet. */
static cof_status begin(const struct forward *x)
{
    struct cofi_attention_plan *plan = x->plan;
    struct cofi_binding *b = &plan->binding;
    const struct cofi_call call = {.direction = 1, .n_empty = plan->n_empty};
    const struct cofd_wait_options options =
        cofi_wait_options(b->arena, "keys of the last call read");
    struct cofd_call c;
    cofi_cuda_call_make(b, &call, &c);
    return launched(x, __LINE__, x->s,
                    cofi_launch_attention_begin(
                        b->on_device, &c, &options,
                        COFI_FAULT(KV_ACK_WAIT, plan->rank) ? -1 : COFI_KV_ACK, COFI_KV_MARK, x->s),
                    "begin");
}

static cof_status fork_comm(struct forward *x)
{
    if (!x->c)
        return COF_OK;
    COF_TRY(begin(x));
    COF_CUDA(cudaEventRecord(x->d->forked, x->s));
    COF_CUDA(cudaStreamWaitEvent(x->c, x->d->forked, 0));
    x->is_forked = true;
    return COF_OK;
}

static cof_status join_comm(const struct forward *x)
{
    if (!x->is_forked)
        return COF_OK;
    COF_TRY(cofi_cuda_call_end(&x->plan->binding, x->c));
    COF_CUDA(cudaEventRecord(x->d->joined, x->c));
    COF_CUDA(cudaStreamWaitEvent(x->s, x->d->joined, 0));
    return COF_OK;
}

/* Outputs of other strides, padding, and NaN after a failure. */
static cof_status finish(const struct forward *x)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_call *call = x->call;
    const int64_t f = sizeof(float), rows = plan->local_rows, element = elem_bytes(x);
    if (rows == 0 || x->parts != COFI_PART_ALL)
        return COF_OK;
    if (x->o != call->o.data)
        COF_TRY(move(x,
                     &(struct cofi_attention_move){extent_of(x, n->n_heads, n->dim_v * element),
                                                   block_of(&call->o, element),
                                                   compact_block(x, x->o, n->n_heads, n->dim_v)},
                     x->s));
    if (x->lse != call->lse)
        COF_TRY(move(x,
                     &(struct cofi_attention_move){
                         extent_of(x, n->n_heads, f),
                         {(char *)call->lse, call->lse_batch_stride * f, f,
                          call->lse_head_stride * f},
                         {(char *)x->lse, n->n_heads * rows * f, f, rows * f}},
                     x->s));
    const struct cofi_attention_finish end = {
        .arena = plan->binding.arena->on_device, .n = extent_of(x, n->n_heads, n->dim_v * element),
        .o = block_of(&call->o, element), .lse = call->lse, .lse_batch = call->lse_batch_stride,
        .lse_head = call->lse_head_stride,
        .pad_begin = cof_layout_valid_rows(&plan->layout, plan->rank)};
    return launched(x, __LINE__, x->s,
                    cofi_launch_attention_finish(&end, x->d->n_finish_blocks, x->s),
                    "finish");
}

cof_status cofi_attention_device_forward(struct cofi_attention_plan *plan,
                                         const struct cofi_attention_call *call, int parts,
                                         cudaStream_t stream)
{
    struct cofi_attention_device *d = plan->device;
    struct forward x = {.plan = plan, .d = d, .call = call, .s = stream,
                        .c = parts & COFI_PART_TRANSFER ? d->comm : NULL, .parts = parts};
    if (plan->params.only_compact)
        COF_TRY(check_tensors(&x));
    cof_status status = take_tensors(&x);
    if (status == COF_OK)
        status = fork_comm(&x);
    if (status == COF_OK)
        status = (cofi_attention_gathers(plan) ? gather : ring)(&x);
    if (status != COF_OK) /* half a call: the others are told */
        cofi_arena_fail(plan->binding.arena, status);
    cof_status joined = join_comm(&x);
    status = status != COF_OK ? status : joined;
    cof_status finished = finish(&x);
    return status != COF_OK ? status : finished;
}
