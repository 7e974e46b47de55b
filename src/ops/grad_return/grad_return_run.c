/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What a call enqueues. S is the caller's stream, C the plan's communication stream:
 *
 *   S begin | send to rank-1 | send to rank-2 | ...          | wait C | own rows, round, store
 *   C       | sum of rank+1  | sum of rank+2  | ... in order |
 *
 * A whole by sections has the same calls, spread over P runs. Sends wait for slots that other
 * ranks' C frees, and C waits for other ranks' sends of steps below: no cycle. */
#include <math.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "ops/grad_return/grad_return.h"
#include "symm/symm.h"

/* ---- writers and rows ----------------------------------------------------------------------- */

static bool contributes(const cof_layout *l, const cof_grad_return_args *args, int writer,
                        int64_t chunk)
{
    if (cof_layout_chunk_rows(l, chunk) == 0)
        return false;
    if (args->writers == COF_WRITERS_ALL)
        return true;
    if (args->writers == COF_WRITERS_CAUSAL)
        return cof_layout_needs(l, COF_MASK_CAUSAL, writer, chunk);
    const uint64_t *mask = args->writer_table + chunk * ((l->n_ranks + 63) / 64);
    return mask[writer / 64] >> (writer % 64) & 1;
}

unsigned cofi_gr_halves(const cof_layout *l, const cof_grad_return_args *args, int writer,
                        int owner)
{
    unsigned halves = 0;
    for (int h = 0; h < cof_layout_halves(l); h++)
        halves |= (unsigned)contributes(l, args, writer, cof_layout_chunk(l, owner, h)) << h;
    return halves;
}

void cofi_gr_rows(const cof_layout *l, int owner, unsigned halves, int64_t *begin, int64_t *end)
{
    *begin = *end = 0;
    for (int h = 0; h < cof_layout_halves(l); h++) {
        if (!(halves >> h & 1))
            continue;
        int64_t start = cof_layout_half_start(l, owner, h);
        *begin = *end == 0 ? start : *begin;
        *end = start + cof_layout_chunk_rows(l, cof_layout_chunk(l, owner, h));
    }
}

static int half_of(const cof_layout *l, int owner, int64_t row)
{
    return cof_layout_halves(l) == 2 && row >= cof_layout_half_start(l, owner, 1);
}

/* ---- elements ------------------------------------------------------------------------------- */

/* Of two types at least one is fp32, or they are the same. */
static void convert(void *dst, enum cofi_elem dst_elem, const void *src, enum cofi_elem src_elem,
                    int64_t n)
{
    if (dst_elem == src_elem)
        memcpy(dst, src, (size_t)n * (size_t)cofi_elem_bytes(src_elem));
    else if (src_elem == COFI_ELEM_F32)
        cofi_vec_store(cofi_vec(), dst_elem, dst, src, n);
    else
        cofi_vec_load(cofi_vec(), src_elem, dst, src, n);
}

/* ---- send ----------------------------------------------------------------------------------- */

struct send_args {
    struct cofi_grad_return_plan *plan;
    struct cofi_gr_view partial;
    uint32_t epoch; /* the caller's */
    int step;
    unsigned halves;
    int64_t begin; /* set where it runs */
    void *to[2];
};

/* The partial's row for a local row of the owner; -1 for padding. */
static int64_t source_row(const struct cofi_grad_return_plan *plan, int owner, int64_t row)
{
    int64_t global = cof_layout_global_row(&plan->layout, owner, row);
    return global < 0 || plan->params.by_section ? (global < 0 ? -1 : row) : global;
}

static void send_row(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct send_args *a = arg;
    const struct cofi_grad_return_plan *plan = a->plan;
    int64_t row = source_row(plan, cofi_grad_owner(&plan->home, a->step), a->begin + task);
    for (int is_v = 0; is_v < 2; is_v++) {
        int64_t dim = plan->dim[is_v], heads = plan->params.n_heads;
        size_t bytes = (size_t)(dim * cofi_elem_bytes(plan->wire));
        size_t row_bytes = bytes * (size_t)(plan->params.n_batch * heads);
        char *to = (char *)a->to[is_v] + (size_t)task * row_bytes;
        if (row < 0) {
            memset(to, 0, row_bytes);
            continue;
        }
        for (int64_t b = 0; b < plan->params.n_batch; b++)
            for (int64_t h = 0; h < heads; h++, to += bytes)
                convert(to, plan->wire,
                        a->partial.data[is_v] +
                            (row * a->partial.row_stride[is_v] + b * a->partial.batch_stride[is_v] +
                             h * a->partial.head_stride[is_v]) * cofi_elem_bytes(plan->partial),
                        plan->partial, dim);
    }
}

static cof_status send(struct cofi_cpu_stream *s, const void *args)
{
    struct send_args a = *(const struct send_args *)args;
    struct cofi_grad_return_plan *plan = a.plan;
    int64_t end;
    cofi_gr_rows(&plan->layout, cofi_grad_owner(&plan->home, a.step), a.halves, &a.begin, &end);
    /* Without rows too: what it announces says that it agrees about that. */
    COF_TRY(plan->transport->open(plan, a.epoch, a.step, a.begin, a.to));
    cofi_cpu_parallel(s, end - a.begin, send_row, &a);
    return plan->transport->close(plan, a.epoch, a.step, a.begin, end, a.to);
}

/* ---- sum, on C ------------------------------------------------------------------------------ */

struct sum_args {
    struct cofi_grad_return_plan *plan;
    uint32_t epoch;
    int step;
    unsigned halves;
};

static cof_status sum(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    struct sum_args a = *(const struct sum_args *)args;
    int64_t begin, end;
    cofi_gr_rows(&a.plan->layout, a.plan->rank, a.halves, &begin, &end);
    return a.plan->transport->sum(a.plan, a.epoch, a.step, begin, end);
}

/* ---- begin and finish ----------------------------------------------------------------------- */

struct begin_args {
    struct cofi_grad_return_plan *plan;
    uint64_t writers, n_empty;
};

static cof_status begin(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    const struct begin_args *a = args;
    const struct cofi_call call = {.n_empty = a->n_empty, .sizes = {a->writers}};
    COF_TRY(cofi_call_begin(&a->plan->binding, &call));
    cofi_grad_begin(&a->plan->home);
    return COF_OK;
}

struct finish_args {
    struct cofi_grad_return_plan *plan;
    struct cofi_gr_view partial, out;
    unsigned halves; /* own contribution */
    bool failed;     /* already as the call was made: it has no sums */
};

/* One row of an output: the sum, own last; 0 for padding; NaN after a failure. */
static void finish_row(const struct finish_args *a, int64_t row, int is_v)
{
    const struct cofi_grad_return_plan *plan = a->plan;
    int64_t dim = plan->dim[is_v], from = source_row(plan, plan->rank, row);
    bool own = from >= 0 && a->halves >> half_of(&plan->layout, plan->rank, row) & 1;
    int out_bytes = cofi_elem_bytes(plan->elem), in_bytes = cofi_elem_bytes(plan->partial);
    const float *acc = plan->n_ranks == 1 ? NULL : plan->home.acc[is_v] +
                                                       row * plan->params.n_batch *
                                                           plan->params.n_heads * dim;
    for (int64_t b = 0; b < plan->params.n_batch; b++)
        for (int64_t h = 0; h < plan->params.n_heads; h++) {
            char *to = a->out.data[is_v] +
                       (row * a->out.row_stride[is_v] + b * a->out.batch_stride[is_v] +
                        h * a->out.head_stride[is_v]) * out_bytes;
            const char *mine = a->partial.data[is_v] +
                               (from * a->partial.row_stride[is_v] +
                                b * a->partial.batch_stride[is_v] +
                                h * a->partial.head_stride[is_v]) * in_bytes;
            for (int64_t d = 0; d < dim; d += COFI_GR_PIECE) {
                int64_t n = dim - d < COFI_GR_PIECE ? dim - d : COFI_GR_PIECE;
                float sum_of[COFI_GR_PIECE];
                for (int64_t i = 0; i < n; i++)
                    sum_of[i] = a->failed ? NAN : acc && from >= 0 ? acc[d + i] : 0;
                if (own && !a->failed)
                    cofi_vec_add(cofi_vec(), plan->partial, sum_of, mine + d * in_bytes, n);
                cofi_vec_store(cofi_vec(), plan->elem, to + d * out_bytes, sum_of, n);
            }
            acc += acc ? dim : 0;
        }
}

static void finish_task(void *arg, int64_t row, struct cofi_cpu_worker *worker)
{
    (void)worker;
    for (int is_v = 0; is_v < 2; is_v++)
        finish_row(arg, row, is_v);
}

static cof_status finish(struct cofi_cpu_stream *s, const void *args)
{
    struct finish_args a = *(const struct finish_args *)args;
    struct cofi_binding *binding = &a.plan->binding;
    cof_status status =
        binding->arena ? cofi_call_failure(binding, s) : cofi_cpu_stream_status(s);
    a.failed |= status != COF_OK;
    cofi_cpu_parallel(s, a.plan->local_rows, finish_task, &a);
    if (!a.failed && binding->arena)
        cofi_call_end(binding);
    return status;
}

/* ---- enqueuing ------------------------------------------------------------------------------ */

/* S waits for all that C has been given. */
static cof_status join(struct cofi_grad_return_plan *plan, struct cofi_cpu_stream *s)
{
    return cofi_cpu_wait_event(s, plan->comm, cofi_cpu_stream_tail(plan->comm));
}

static cof_status enqueue_steps(struct cofi_grad_return_plan *plan,
                                const struct cofi_gr_call *call, struct cofi_cpu_stream *s)
{
    const cof_layout *l = &plan->layout;
    if (call->first == 1) {
        struct begin_args b = {plan, call->writers, plan->n_empty};
        if (plan->binding.arena)
            COF_TRY(cofi_cpu_enqueue(s, begin, &b, sizeof b, 0));
        /* And back: C has looked at S for the last time when S goes on, so that between the calls
         * of a whole S may be destroyed. */
        if (plan->n_ranks > 1) {
            COF_TRY(cofi_cpu_wait_event(plan->comm, s, cofi_cpu_stream_tail(s)));
            COF_TRY(join(plan, s));
        }
    }
    for (int i = call->first; i <= call->last && i < plan->n_ranks; i++) {
        int owner = cofi_grad_owner(&plan->home, i), writer = cofi_grad_writer(&plan->home, i);
        struct send_args out = {.plan = plan, .partial = call->partial, .epoch = call->args->epoch,
                                .step = i,
                                .halves = cofi_gr_halves(l, call->args, plan->rank, owner)};
        struct sum_args in = {plan, call->args->epoch, i,
                              cofi_gr_halves(l, call->args, writer, plan->rank)};
        COF_TRY(cofi_cpu_enqueue(s, send, &out, sizeof out, 0));
        COF_TRY(cofi_cpu_enqueue(plan->comm, sum, &in, sizeof in, 0));
    }
    return COF_OK;
}

cof_status cofi_gr_enqueue(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                           struct cofi_cpu_stream *s)
{
    cof_status status = enqueue_steps(plan, call, s);
    if (status != COF_OK && plan->binding.arena)
        cofi_arena_fail(plan->binding.arena, status);
    /* Whatever has happened: C may still look at S, and write what finish reads. */
    if (plan->n_ranks > 1 && (status != COF_OK || call->last == plan->n_ranks)) {
        cof_status joined = join(plan, s);
        status = status != COF_OK ? status : joined;
    }
    if (call->last < plan->n_ranks)
        return status;
    struct finish_args a = {plan, call->partial, call->out,
                            cofi_gr_halves(&plan->layout, call->args, plan->rank, plan->rank),
                            status != COF_OK};
    cof_status ended = cofi_cpu_enqueue(s, finish, &a, sizeof a, COFI_CALL_ALWAYS);
    return status != COF_OK ? status : ended;
}
