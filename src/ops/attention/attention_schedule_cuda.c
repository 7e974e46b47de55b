/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A forward call on CUDA devices. S is the caller's stream, B and C are the plan's; r this rank, P
 * ranks.
 *
 * Ring, by push: in step i = 1 .. P-1 this rank's keys go to the reader r+i, and those of the owner
 * r-i come, each into its reader's receive slot (i-1) mod 2.
 *   S  begin |          turn 1 | section 1 .. merge | turn 2 | section 2, merge | .. | finish
 *   B  own section ............           |                  | (a part of the last one)
 *   C        | put 1, put 2    |                    |        | put 3            | ..
 *   begin   waits until all have read this rank's keys of the last call
 *   turn i  waits for the end of put i, tells reader r+i, and acks section i-1 to the owner of step
 *           i+1, whose keys come into that slot next; then waits for the keys of owner r-i, and for
 *           the ack of the reader of step i+1. Behind it put i+1 runs, beside section i; puts 1 and
 *           2, for whose slots begin has waited, run behind begin
 *   finish  acks to all
 * A step in which the reader sees none of the owner's keys has no put and no signal, and nobody
 * waits on its behalf: both ranks know from the layout. A turn with nothing to do is not launched.
 *
 * Why copy engines: a section has all multiprocessors, with their registers and shared memory, from
 * its first block to the first that ends. Another kernel begins only then, whatever its priority.
 * Keys that readers fetch have to be copied to where others may read them, by a kernel too, and
 * nothing lay under a section: at S = 8192, P = 2 a call took 553 us, its sections 343, its
 * transfer 183 and its merge 16. By puts it took 381. (Two H200, 2026-11-30.)
 *
 * Why B: cuDNN's kernels are a block for each multiprocessor, which take tiles of 128 rows of a
 * head from one counter, those of a causal section in rising order of their length. So the blocks
 * of the own section end one by one, over the time of its longest tile: at S = 8192, reckoned so,
 * from 119 to 173 us; it was seen to take 180. The blocks of turn 1 and section 1 take the places
 * that become free. Begin has its place before the own section fills the device, which begins
 * behind an event and a memset; else it begins, and with it the puts, when the first block ends. A
 * begin that waits keeps one multiprocessor of 132. Where a part of the own section is merged
 * (windows), or step 1 has no section, the own section is on S behind begin. Likewise the last
 * section, where its merge is long, is one of three quarters of the heads on S and one of the rest
 * on B: the merge of the first is under the end of the second.
 *
 * Words and buffers (w -> o: stored by w in o's slab)
 *   KV_READY   owner -> reader   the owner's rows of this call lie in the reader's slot (i-1) mod 2
 *   KV_ACK     reader -> owner   the slot that this owner uses is free: in turn i-1 to the owner of
 *                                step i > 2, at the end of a call to all. Puts of steps 1 and 2
 *                                wait for that of the last call, later ones for that of this call
 *   slot       in the reader's slab: written by the owner's put, read by section i
 * No circle: a turn signals before it waits. Turn i needs turns i of others only up to their
 * signals, behind their sections below i and puts up to i, and put i stands behind turn i-1. B
 * waits for the beginning of the call, and the rest of the last section for the last turn, which
 * all ranks have begun to wait in by then. This holds where S, B and C share one queue of the
 * device too: S waits for puts and sections alone, which wait for nothing but S, and stand before
 * that.
 *
 * Gather: words are those of the CPU (attention_gather.c).
 *   S  begin | .............................. wait C | half 0 x prefix | half 1 x prefix | finish
 *   C  K, V -> arena | announce | own keys | wait owner, get, ack | ..
 *
 * Local buffers     written by               read by            free again
 *   gathered        C                        sections, on S     begin of the next call, on S
 *   partial         a section, on S, and     its merges, on S   in the order of S
 *                   its other heads on B
 *   acc             merges, on S             later merges       likewise
 *   o, lse          the own section, on B    merges, on S       S joins B before the first merge,
 *                                                               and before that of the other heads
 *   workspace       sections of a stream     the same           one for S and one for B
 *
 * Where the arena is dead, waits are over at once, nothing is signalled and sections compute what
 * there is; the last kernel, behind all streams, then fills the outputs with NaN. */
#include "core/faults.h"
#include "ops/attention/attention_forward_cuda.h"
#include "symm/call_cuda.h"
#include "symm/options_cuda.h"

/* ---- sections and merges -------------------------------------------------------------------- */

/* Of a step of the plan's list, from 1, that of the ring. */
static int ring_step(const struct cofi_forward *x, int listed)
{
    const struct cofi_attention_plan *plan = x->plan;
    return (plan->rank - x->d->steps.fetches[listed - 1].owner + plan->n_ranks) % plan->n_ranks;
}

/* K's and V's first row of a job: the caller's, gathered, or in the slot of its owner's step. */
static void keys_of(const struct cofi_forward *x, const struct cofi_attention_job *job,
                    const char *kv[2])
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_kv_buffer *gathered = &x->d->at.gathered;
    const int64_t dim[2] = {n->dim_qk, n->dim_v}, row = job->pair.k_begin;
    for (int is_v = 0; is_v < 2; is_v++) {
        const int64_t at = row * cofi_forward_elem_bytes(x) *
                           cofi_attention_compact(plan, n->n_kv_heads, dim[is_v]).row;
        if (cofi_attention_gathers(plan))
            kv[is_v] = gathered->local + cofi_kv_at(gathered, is_v, row);
        else if (job->step == 0)
            kv[is_v] = (is_v ? x->v : x->k) + at;
        else
            kv[is_v] = cofi_arena_data(plan->binding.arena) +
                       x->d->slot[(ring_step(x, job->step) - 1) & 1].offset[is_v] + at;
    }
}

/* Some kv heads, and the query heads that read them. */
struct heads {
    int64_t begin, n;
};

static struct heads all_heads(const struct cofi_forward *x)
{
    return (struct heads){0, x->plan->dims.n_kv_heads};
}

/* Of a job, by a kernel for those heads; beside: on B. */
static cof_status section(const struct cofi_forward *x, int idx, struct heads heads, int kernel,
                          bool is_beside)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_device *d = x->d;
    const struct cofi_attention_job *job = &d->steps.jobs[idx];
    const int64_t element = cofi_forward_elem_bytes(x), q_begin = job->pair.q_begin;
    const int64_t q_head = heads.begin * (n->n_heads / n->n_kv_heads);
    const int64_t q_row = cofi_attention_compact(plan, n->n_heads, n->dim_qk).row;
    const int64_t o_row = cofi_attention_compact(plan, n->n_heads, n->dim_v).row;
    const char *kv[2];
    keys_of(x, job, kv);
    const char *q = x->q + (q_begin * q_row + q_head * n->dim_qk) * element;
    const char *k = kv[0] + heads.begin * n->dim_qk * element;
    const char *v = kv[1] + heads.begin * n->dim_v * element;
    char *o = job->is_first ? x->o + q_begin * o_row * element : d->at.partial;
    float *lse = job->is_first ? x->lse + q_begin : d->at.partial_lse;
    o += q_head * n->dim_v * element;
    lse += q_head * (job->is_first ? plan->local_rows : d->steps.partial_rows);
    char *workspace = d->workspace.base; /* sections that run at once need one each */
    if (is_beside && workspace)
        workspace += d->beside_workspace;
    return cofi_attention_kernels_run(&d->kernels, kernel, q, k, v, o, lse, workspace,
                                      is_beside ? x->b : x->s);
}

static cof_status merge(const struct cofi_forward *x, const struct cofi_attention_job *job,
                        const struct cofi_attention_merged *part, struct heads heads)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_device *d = x->d;
    const struct cofi_attention_strides compact =
        cofi_attention_compact(plan, n->n_heads, n->dim_v);
    const struct cofi_attention_strides by_rows =
        cofi_attention_by_rows(plan, n->n_heads, n->dim_v);
    const int64_t element = cofi_forward_elem_bytes(x), partial_rows = d->steps.partial_rows;
    const int64_t group = n->n_heads / n->n_kv_heads, head = heads.begin * group;
    const int64_t row = part->begin - job->pair.q_begin; /* of the partial result */
    char *o = x->o + (part->begin * compact.row + head * n->dim_v) * element;
    float *acc = d->at.acc ? d->at.acc + part->begin * by_rows.row + head * n->dim_v : NULL;
    float *lse = x->lse + part->begin + head * plan->local_rows;
    const struct cofi_attention_merge m = {
        .elem = n->elem, .n_batch = n->n_batch, .n_rows = part->rows, .n_heads = heads.n * group,
        .dim_v = n->dim_v,
        .a = {.o = part->from_acc ? (const void *)acc : o, .o_f32 = part->from_acc,
              .stride = part->from_acc ? by_rows : compact, .lse = lse,
              .lse_batch = n->n_heads * plan->local_rows, .lse_head = plan->local_rows},
        .b = {.o = d->at.partial + (row * by_rows.row + head * n->dim_v) * element,
              .stride = by_rows, .lse = d->at.partial_lse + row + head * partial_rows,
              .lse_batch = n->n_heads * partial_rows, .lse_head = partial_rows},
        .o = part->to_acc ? (void *)acc : o, .o_f32 = part->to_acc,
        .stride = part->to_acc ? by_rows : compact, .lse = lse,
        .lse_batch = n->n_heads * plan->local_rows, .lse_head = plan->local_rows,
        .lets_next_begin = job == &d->steps.jobs[d->steps.n_jobs - 1]}; /* finish follows */
    return cofi_attention_merge(&m, x->s);
}

static cof_status merges(const struct cofi_forward *x, const struct cofi_attention_job *job,
                         struct heads heads)
{
    for (int i = 0; i < job->n_merges && (x->parts & COFI_PART_MERGES); i++)
        COF_TRY(merge(x, job, &x->d->steps.merged[job->first_merge + i], heads));
    return COF_OK;
}

/* The last job: the rest of its heads on B, where their blocks take the places that those of the
 * first heads leave, and leave theirs to the merge of the first heads. */
static cof_status run_split(struct cofi_forward *x, int idx)
{
    const struct cofi_attention_device *d = x->d;
    const struct cofi_attention_job *job = &d->steps.jobs[idx];
    const struct heads first = {0, d->split_kv_heads};
    const struct heads rest = {first.n, x->plan->dims.n_kv_heads - first.n};
    const bool computes = x->parts & COFI_PART_SECTIONS;
    COF_TRY(cofi_forward_fork_beside(x, d->split));
    if (computes)
        COF_TRY(section(x, idx, first, d->split_kernel[0], false));
    COF_TRY(cofi_forward_join_beside(x)); /* the own section is done */
    x->is_beside = true;
    if (computes)
        COF_TRY(section(x, idx, rest, d->split_kernel[1], true));
    COF_TRY(merges(x, job, first));
    COF_TRY(cofi_forward_join_beside(x));
    return merges(x, job, rest);
}

/* A job and its merges, which want the own section's result. */
static cof_status run_job(struct cofi_forward *x, int idx)
{
    const struct cofi_attention_job *job = &x->d->steps.jobs[idx];
    if (idx == x->d->split_job && x->b != x->s)
        return run_split(x, idx);
    if (x->parts & COFI_PART_SECTIONS)
        COF_TRY(section(x, idx, all_heads(x), x->d->kernel[idx],
                        job->step == 0 && x->b != x->s));
    if (job->n_merges > 0)
        COF_TRY(cofi_forward_join_beside(x));
    return merges(x, job, all_heads(x));
}

/* All jobs of a step of the plan's list; 0: own keys. */
static cof_status run_listed(struct cofi_forward *x, int listed)
{
    const struct cofi_attention_steps *steps = &x->d->steps;
    for (int i = 0; i < steps->n_jobs; i++) {
        if (steps->jobs[i].step != listed)
            continue;
        COF_TRY(run_job(x, i));
        x->is_merged = steps->jobs[i].n_merges > 0;
    }
    return COF_OK;
}

/* ---- schedules ------------------------------------------------------------------------------ */

/* Puts are enqueued behind the section that hides them, so that S has work first. */
static cof_status ring(struct cofi_forward *x)
{
    int listed = 1;
    COF_TRY(run_listed(x, 0));
    COF_TRY(cofi_forward_put(x, 1));
    COF_TRY(cofi_forward_put(x, 2));
    for (int step = 1; step < x->plan->n_ranks; step++) {
        COF_TRY(cofi_forward_turn(x, step));
        if (listed <= x->d->steps.n_fetches && ring_step(x, listed) == step)
            COF_TRY(run_listed(x, listed++));
        if (step > 1)
            COF_TRY(cofi_forward_put(x, step + 1));
    }
    return COF_OK;
}

static cof_status gather(struct cofi_forward *x)
{
    if (x->c)
        COF_TRY(cofi_forward_gather(x));
    if (!COFI_FAULT(ARRIVAL_WAIT, x->plan->rank))
        COF_TRY(cofi_forward_join(x));
    return run_listed(x, 1);
}

/* ---- begin and end -------------------------------------------------------------------------- */

static cof_status begin(const struct cofi_forward *x)
{
    struct cofi_attention_plan *plan = x->plan;
    struct cofi_binding *b = &plan->binding;
    const struct cofi_call call = {.direction = 1, .n_empty = plan->n_empty};
    const struct cofd_wait_options options =
        cofi_wait_options(b->arena, "keys of the last call read");
    struct cofd_call c;
    if (!x->c)
        return COF_OK;
    cofi_cuda_call_make(b, &call, &c);
    const int acks = COFI_FAULT(KV_ACK_WAIT, plan->rank) ? -1 : COFI_KV_ACK;
    COF_TRY(cofi_forward_launched(x, __FILE_NAME__, __LINE__, x->s,
                                  cofi_launch_attention_begin(b->on_device, &c, &options, acks,
                                                              COFI_KV_MARK, x->s),
                                  "begin"));
    COF_CUDA(cudaEventRecord(x->d->begun, x->s));
    return COF_OK;
}

cof_status cofi_attention_device_forward(struct cofi_attention_plan *plan,
                                         const struct cofi_attention_call *call, int parts,
                                         cudaStream_t stream)
{
    struct cofi_attention_device *d = plan->device;
    struct cofi_forward x = {.plan = plan, .d = d, .call = call, .s = stream,
                             .c = parts & COFI_PART_TRANSFER ? d->comm : NULL, .b = stream,
                             .parts = parts};
    if (x.c && d->beside)
        x.b = d->beside;
    if (plan->params.only_compact)
        COF_TRY(cofi_forward_check(&x));
    cof_status status = cofi_forward_take(&x);
    if (status == COF_OK && x.b != x.s)
        status = cofi_forward_fork_beside(&x, d->called);
    if (status == COF_OK)
        status = begin(&x);
    if (status == COF_OK)
        status = (cofi_attention_gathers(plan) ? gather : ring)(&x);
    if (status != COF_OK) /* half a call: the others are told */
        cofi_arena_fail(plan->binding.arena, status);
    cof_status ended = cofi_forward_join(&x);
    if (ended != COF_OK) /* C may go on when S is through: not past a wait */
        cofi_arena_fail(plan->binding.arena, ended);
    status = status != COF_OK ? status : ended;
    ended = cofi_forward_finish(&x);
    status = status != COF_OK ? status : ended;
    return status != COF_OK || !x.c ? status : cofi_cuda_call_end(&plan->binding, x.s);
}
