/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A forward call on CUDA devices. S is the caller's stream, C the plan's; r this rank. Words, their
 * writers and readers, and when a buffer is free are those of the CPU (attention_ring.c,
 * attention_gather.c). But for its begin all of the protocol is on C, so that S only computes.
 *
 * Ring
 *   S  begin, acks | own section | wait fetch 0 | section | merge | wait fetch 1 | section | merge
 *   C  K, V -> arena | announce | wait owner 0 | get | ack | wait owner 1 | get | ack
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
#include "core/faults.h"
#include "ops/attention/attention_forward_cuda.h"
#include "symm/call_cuda.h"
#include "symm/options_cuda.h"

/* ---- sections and merges, on S -------------------------------------------------------------- */

static cof_status section(const struct cofi_forward *x, int idx)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_device *d = x->d;
    const struct cofi_attention_job *job = &d->steps.jobs[idx];
    const int64_t element = cofi_forward_elem_bytes(x), q_begin = job->pair.q_begin;
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
    const int64_t o_row = cofi_attention_compact(plan, n->n_heads, n->dim_v).row;
    char *o = job->is_first ? x->o + q_begin * o_row * element : d->at.partial;
    float *lse = job->is_first ? x->lse + q_begin : d->at.partial_lse;
    return cofi_attention_kernels_run(&d->kernels, d->kernel[idx], q, kv[0], kv[1], o, lse,
                                      d->workspace.base, x->s);
}

static cof_status merge(const struct cofi_forward *x, const struct cofi_attention_job *job,
                        const struct cofi_attention_merged *part)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_device *d = x->d;
    const struct cofi_attention_strides compact =
        cofi_attention_compact(plan, n->n_heads, n->dim_v);
    const struct cofi_attention_strides by_rows =
        cofi_attention_by_rows(plan, n->n_heads, n->dim_v);
    const int64_t element = cofi_forward_elem_bytes(x), partial_rows = d->steps.partial_rows;
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
static cof_status run_job(const struct cofi_forward *x, int idx, cudaEvent_t read)
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
static cof_status run_step(const struct cofi_forward *x, int step)
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

static cof_status wait_fetched(const struct cofi_forward *x, int slot)
{
    if (x->c && !COFI_FAULT(ARRIVAL_WAIT, x->plan->rank))
        COF_CUDA(cudaStreamWaitEvent(x->s, x->d->fetched[slot], 0));
    return COF_OK;
}

static cof_status ring(const struct cofi_forward *x)
{
    COF_TRY(run_step(x, 0));
    if (x->c)
        COF_TRY(cofi_forward_publish(x));
    COF_TRY(cofi_forward_fetch(x, 0));
    COF_TRY(cofi_forward_fetch(x, 1));
    for (int i = 0; i < x->d->steps.n_fetches; i++) {
        COF_TRY(wait_fetched(x, i & 1));
        COF_TRY(run_step(x, i + 1));
        COF_TRY(cofi_forward_fetch(x, i + 2));
    }
    return COF_OK;
}

static cof_status gather(const struct cofi_forward *x)
{
    if (x->c) {
        COF_TRY(cofi_forward_publish(x));
        COF_TRY(cofi_forward_gather(x));
    }
    COF_TRY(wait_fetched(x, 0));
    return run_step(x, 1);
}

/* ---- begin and end -------------------------------------------------------------------------- */

/* On S, where the first section cannot have taken all multiprocessors yet. */
static cof_status begin(const struct cofi_forward *x)
{
    struct cofi_attention_plan *plan = x->plan;
    struct cofi_binding *b = &plan->binding;
    const struct cofi_call call = {.direction = 1, .n_empty = plan->n_empty};
    const struct cofd_wait_options options =
        cofi_wait_options(b->arena, "keys of the last call read");
    struct cofd_call c;
    cofi_cuda_call_make(b, &call, &c);
    const int acks = COFI_FAULT(KV_ACK_WAIT, plan->rank) ? -1 : COFI_KV_ACK;
    return cofi_forward_launched(x, __FILE_NAME__, __LINE__, x->s,
                                 cofi_launch_attention_begin(b->on_device, &c, &options, acks,
                                                             COFI_KV_MARK, x->s),
                                 "begin");
}

static cof_status fork_comm(struct cofi_forward *x)
{
    if (!x->c)
        return COF_OK;
    COF_TRY(begin(x));
    COF_CUDA(cudaEventRecord(x->d->forked, x->s));
    COF_CUDA(cudaStreamWaitEvent(x->c, x->d->forked, 0));
    x->is_forked = true;
    return COF_OK;
}

static cof_status join_comm(const struct cofi_forward *x)
{
    if (!x->is_forked)
        return COF_OK;
    COF_TRY(cofi_cuda_call_end(&x->plan->binding, x->c));
    COF_CUDA(cudaEventRecord(x->d->joined, x->c));
    COF_CUDA(cudaStreamWaitEvent(x->s, x->d->joined, 0));
    return COF_OK;
}

cof_status cofi_attention_device_forward(struct cofi_attention_plan *plan,
                                         const struct cofi_attention_call *call, int parts,
                                         cudaStream_t stream)
{
    struct cofi_attention_device *d = plan->device;
    struct cofi_forward x = {.plan = plan, .d = d, .call = call, .s = stream,
                        .c = parts & COFI_PART_TRANSFER ? d->comm : NULL, .parts = parts};
    if (plan->params.only_compact)
        COF_TRY(cofi_forward_check(&x));
    cof_status status = cofi_forward_take(&x);
    if (status == COF_OK)
        status = fork_comm(&x);
    if (status == COF_OK)
        status = (cofi_attention_gathers(plan) ? gather : ring)(&x);
    if (status != COF_OK) /* half a call: the others are told */
        cofi_arena_fail(plan->binding.arena, status);
    cof_status joined = join_comm(&x);
    status = status != COF_OK ? status : joined;
    cof_status finished = cofi_forward_finish(&x);
    return status != COF_OK ? status : finished;
}
