/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What a call of grad_return launches on a CUDA device: one kernel; or, by section, staged and in
 * the caller's memory, on the caller's stream S and the plan's C, as on the CPU:
 *
 *   S  begin | store for rank-1 | store for rank-2 | ...          | wait C | own rows | mark, end
 *   C        | sum of rank+1    | sum of rank+2    | ... in order |
 *
 * Staged: the store goes into an outbox, or the sum comes from what was fetched; signals are
 * launches of their own, behind the copies. */
#include <string.h>

#include "backend/cuda/driver_cuda.h"
#include "core/faults.h"
#include "ops/grad_return/grad_return_plan_cuda.h"
#include "symm/call_cuda.h"
#include "symm/engine_cuda.h"
#include "symm/options_cuda.h"
#include "symm/stream.h"

enum { STAGED_STORE = COFD_GR_WAIT_FREE | COFD_GR_STORE, STORE = STAGED_STORE | COFD_GR_READY };
enum { STAGED_SUM = COFD_GR_ADD | COFD_GR_ACK, SUM = COFD_GR_WAIT_READY | STAGED_SUM };

/* ---- arguments ------------------------------------------------------------------------------ */

static struct cofi_gr_rows rows_of(const struct cofi_grad_return_plan *plan, int owner)
{
    const cof_layout *l = &plan->layout;
    const int n_halves = cof_layout_halves(l);
    struct cofi_gr_rows r = {.n_rows = (int32_t)cof_layout_local_rows(l, owner)};
    r.second = n_halves == 2 ? (int32_t)cof_layout_half_start(l, owner, 1) : r.n_rows;
    for (int h = 0; h < n_halves; h++) {
        int64_t chunk = cof_layout_chunk(l, owner, h);
        r.n_valid[h] = (int32_t)cof_layout_chunk_rows(l, chunk);
        r.source[h] = plan->params.by_section ? cof_layout_half_start(l, owner, h)
                                              : cof_layout_chunk_start(l, chunk);
    }
    return r;
}

static char *data_of(const struct cofi_grad_return_plan *plan, int rank, size_t offset)
{
    const cof_arena *a = plan->binding.arena;
    return a->base[rank] + a->data_offset + offset;
}

static size_t published_at(const struct cofi_grad_return_plan *plan, int is_v, int owner,
                           int64_t row)
{
    return cofi_kv_at(&plan->published, is_v, owner * plan->max_rows + row);
}

static char *peer_slot(const struct cofi_grad_return_plan *plan, int owner, int writer, int is_v)
{
    const struct cofi_gr_cuda *st = plan->state;
    return st->peer[is_v][owner] +
           (size_t)(writer * plan->local_rows * plan->home.row_elements[is_v]) *
               (size_t)cofi_elem_bytes(plan->wire);
}

/* Where rank `rank - step`'s first row goes, and where that of rank + step is. */
static void set_places(const struct cofi_grad_return_plan *plan, int step, int is_v,
                       struct cofi_gr_step *s)
{
    const struct cofi_gr_cuda *st = plan->state;
    const int owner = cofi_grad_owner(&plan->home, step);
    const int writer = cofi_grad_writer(&plan->home, step);
    const struct cofi_kv_buffer *slot = &plan->home.slot[(step - 1) & 1];
    const struct cofi_kv_buffer *outbox = &plan->home.outbox[(step - 1) & 1];
    if (plan->transport == &cofi_gr_caller) {
        s->to[is_v] = peer_slot(plan, owner, plan->rank, is_v);
        s->from[is_v] = peer_slot(plan, plan->rank, writer, is_v);
    } else if (plan->transport == &cofi_gr_pull) {
        s->to[is_v] = data_of(plan, plan->rank, published_at(plan, is_v, owner, 0));
        s->from[is_v] = st->is_staged
                            ? plan->staging.local + cofi_kv_at(&plan->staging, is_v, 0)
                            : data_of(plan, writer, published_at(plan, is_v, plan->rank, 0));
    } else {
        s->to[is_v] = st->is_staged ? outbox->local + cofi_kv_at(outbox, is_v, 0)
                                    : data_of(plan, owner, cofi_kv_at(slot, is_v, 0));
        s->from[is_v] = data_of(plan, plan->rank, cofi_kv_at(slot, is_v, 0));
    }
}

static void set_step(const struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                     int step, struct cofi_gr_step *s)
{
    const cof_layout *l = &plan->layout;
    const int owner = cofi_grad_owner(&plan->home, step);
    const int writer = cofi_grad_writer(&plan->home, step);
    int64_t begin, end;
    s->rows = rows_of(plan, owner);
    cofi_gr_rows(l, owner, cofi_gr_halves(l, call->args, plan->rank, owner), &begin, &end);
    s->push_begin = (int32_t)begin;
    s->push_end = (int32_t)end;
    cofi_gr_rows(l, plan->rank, cofi_gr_halves(l, call->args, writer, plan->rank), &begin, &end);
    s->sum_begin = (int32_t)begin;
    s->sum_end = (int32_t)end;
    for (int is_v = 0; is_v < 2; is_v++)
        set_places(plan, step, is_v, s);
}

static struct cofi_gr_tensor tensor_of(const struct cofi_gr_view *view)
{
    struct cofi_gr_tensor t;
    for (int is_v = 0; is_v < 2; is_v++) {
        t.data[is_v] = view->data[is_v];
        t.row[is_v] = view->row_stride[is_v];
        t.batch[is_v] = view->batch_stride[is_v];
        t.head[is_v] = view->head_stride[is_v];
    }
    return t;
}

/* Nothing between its elements; of one batch entry or head the stride does not count. */
static bool is_compact(const struct cofi_grad_return_plan *plan, const struct cofi_gr_view *view)
{
    const int64_t batch = plan->params.n_batch, heads = plan->params.n_heads;
    for (int is_v = 0; is_v < 2; is_v++)
        if ((heads > 1 && view->head_stride[is_v] != plan->dim[is_v]) ||
            (batch > 1 && view->batch_stride[is_v] != heads * plan->dim[is_v]) ||
            view->row_stride[is_v] != batch * heads * plan->dim[is_v])
            return false;
    return true;
}

static enum cofi_gr_elem elem_of(enum cofi_elem elem)
{
    return elem == COFI_ELEM_BF16 ? COFI_GR_BF16 : elem == COFI_ELEM_F16 ? COFI_GR_F16
                                                                         : COFI_GR_F32;
}

static struct cofd_grid_call grid_of(const struct cofi_grad_return_plan *plan)
{
    const cof_arena *a = plan->binding.arena;
    struct cofd_grid_call g = {
        .arena = a->on_device, .rank = plan->rank, .n_ranks = plan->n_ranks,
        .ordinal = plan->binding.ordinal, .words_offset = plan->binding.words_offset,
        .binding = plan->binding.on_device, .is_private = a->is_private};
    for (int r = 0; r < plan->n_ranks; r++)
        g.slab[r] = a->base[r];
    return g;
}

static uint32_t faults(const struct cofi_grad_return_plan *plan, uint32_t parts)
{
    const bool is_pull = plan->transport == &cofi_gr_pull;
    if (is_pull ? COFI_FAULT(PULL_ACK_WAIT, plan->rank) : COFI_FAULT(GRAD_ACK_WAIT, plan->rank))
        parts &= ~(uint32_t)COFD_GR_WAIT_FREE;
    if (is_pull ? COFI_FAULT(PULL_READY_WAIT, plan->rank) : COFI_FAULT(GRAD_READY_WAIT, plan->rank))
        parts &= ~(uint32_t)COFD_GR_WAIT_READY;
    if (COFI_FAULT(GRAD_SKIP_LAST, plan->rank))
        parts |= COFD_GR_LEAVE_LAST;
    return is_pull ? parts | COFD_GR_PULL : parts;
}

static void set_call(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                     struct cofi_gr_kernel *k)
{
    const struct cofi_gr_cuda *st = plan->state;
    const cof_grad_return_params *p = &plan->params;
    const cof_arena *a = plan->binding.arena;
    const struct cofi_call c = {.n_empty = plan->n_empty, .sizes = {call->writers}};
    *k = (struct cofi_gr_kernel){
        .call = {.grid = grid_of(plan), .cut = st->cut, .ready = plan->binding.tagged_offset,
                 .ack = plan->binding.tagged_offset + cofd_gr_ready_bytes(&st->cut, plan->n_ranks),
                 .is_ready = cofi_wait_options(a, plan->transport == &cofi_gr_pull
                                                      ? "partial published"
                                                      : "gradient returned"),
                 .is_free = cofi_wait_options(a, plan->transport == &cofi_gr_pull
                                                     ? "last partial read"
                                                     : "gradient slot free")},
        .partial = tensor_of(&call->partial), .out = tensor_of(&call->out),
        .own = rows_of(plan, plan->rank),
        .own_halves = cofi_gr_halves(&plan->layout, call->args, plan->rank, plan->rank),
        .grain = st->grain,
        .is_compact = is_compact(plan, &call->partial) && is_compact(plan, &call->out),
        .acc = st->acc, .acc_v = st->acc_v,
        .partial_elem = elem_of(plan->partial), .wire_elem = elem_of(plan->wire),
        .out_elem = elem_of(plan->elem)};
    cofi_cuda_call_make(&plan->binding, &c, &k->call.grid.call);
    for (int is_v = 0; is_v < 2; is_v++)
        k->shape[is_v] = cofi_gr_shape_make(p->n_batch, p->n_heads, plan->dim[is_v], st->grain);
    for (int i = call->first; i <= call->last && i < plan->n_ranks; i++)
        set_step(plan, call, i, &k->step[i - 1]);
}

/* ---- launches ------------------------------------------------------------------------------- */

static bool is_aligned(const struct cofi_gr_view *v, enum cofi_elem elem)
{
    const int64_t bytes = cofi_elem_bytes(elem);
    bool ok = true;
    for (int is_v = 0; is_v < 2; is_v++)
        ok &= (uintptr_t)v->data[is_v] % 16 == 0 && v->row_stride[is_v] * bytes % 16 == 0 &&
              v->batch_stride[is_v] * bytes % 16 == 0 && v->head_stride[is_v] * bytes % 16 == 0;
    return ok;
}

struct launcher {
    struct cofi_grad_return_plan *plan;
    const struct cofi_gr_call *call;
    const void *entry;
    cudaStream_t s;
    bool is_forked; /* C has work of this whole */
    struct cofi_gr_kernel k;
};

/* Steps by which rows go out, and those that are summed; 0: none. */
struct steps {
    int first_push, last_push, first_sum, last_sum;
};

static cof_status launch(struct launcher *l, uint32_t parts, struct steps steps, cudaStream_t on)
{
    const struct cofi_gr_cuda *st = l->plan->state;
    const bool pushes = steps.first_push > 0, sums = steps.first_sum > 0;
    l->k.call.parts = faults(l->plan, parts);
    if (parts == COFD_GR_WHOLE && pushes && st->is_apart)
        l->k.call.parts |= COFD_GR_APART;
    l->k.call.first_push = pushes ? steps.first_push : 1;
    l->k.call.last_push = pushes ? steps.last_push : 0;
    l->k.call.first_sum = sums ? steps.first_sum : 1;
    l->k.call.last_sum = sums ? steps.last_sum : 0;
    COFI_LAUNCH(l->plan->binding.arena, on, cofi_gr_launch(l->entry, &l->k, on));
    return COF_OK;
}

static cof_status launch_push(struct launcher *l, uint32_t parts, int step)
{
    return launch(l, parts, (struct steps){.first_push = step, .last_push = step}, l->s);
}

static cof_status launch_sum(struct launcher *l, uint32_t parts, int step, cudaStream_t on)
{
    return launch(l, parts, (struct steps){.first_sum = step, .last_sum = step}, on);
}

/* ---- the caller's memory -------------------------------------------------------------------- */

static uint32_t *epoch_word(const struct cofi_grad_return_plan *plan, int owner, int writer)
{
    const struct cofi_gr_cuda *st = plan->state;
    return (uint32_t *)(void *)(st->ready[owner] + (size_t)writer * st->ready_stride);
}

static cof_status driver_value(const struct cofi_grad_return_plan *plan, uint32_t *word,
                               uint32_t epoch, bool is_wait, cudaStream_t stream)
{
    struct cofi_cuda_scope scope;
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)word;
    COF_TRY(cofi_cuda_enter(plan->base.team->world->device->device, &scope));
    const struct cofi_driver *driver = cofi_driver();
    CUresult error =
        is_wait ? driver->wait_value(stream, at, epoch, CU_STREAM_WAIT_VALUE_GEQ)
                : driver->write_value(stream, at, epoch, CU_STREAM_WRITE_VALUE_DEFAULT);
    cofi_cuda_leave(&scope);
    COF_DRIVER(error);
    return COF_OK;
}

/* The write is ordered behind the stores of the kernel before it, for all of the system. */
static cof_status send_to_caller(struct launcher *l, int step)
{
    const struct cofi_gr_step *s = &l->k.step[step - 1];
    if (s->push_begin == s->push_end) /* its owner does not wait */
        return COF_OK;
    COF_TRY(launch_push(l, COFD_GR_STORE, step));
    return driver_value(l->plan, epoch_word(l->plan, cofi_grad_owner(&l->plan->home, step),
                                            l->plan->rank), l->call->args->epoch, false, l->s);
}

static cof_status wait_for_caller(struct launcher *l, int writer, cudaStream_t comm)
{
    const struct cofi_grad_return_plan *plan = l->plan;
    const cof_arena *a = plan->binding.arena;
    uint32_t *word = epoch_word(plan, plan->rank, writer);
    const struct cofd_wait_options o = cofi_wait_options(a, "gradient returned");
    if (plan->params.driver_wait)
        return driver_value(plan, word, l->call->args->epoch, true, comm);
    COFI_LAUNCH(a, comm, cofi_gr_launch_wait(a->on_device, plan->binding.on_device, word,
                                             l->call->args->epoch, writer, &o, comm));
    return COF_OK;
}

cof_status cofi_gr_cuda_release(const struct cofi_grad_return_plan *plan, uint32_t epoch)
{
    cudaStream_t setup = plan->base.team->world->device->setup;
    for (int r = 0; r < plan->n_ranks; r++)
        if (r != plan->rank)
            COF_TRY(driver_value(plan, epoch_word(plan, plan->rank, r), epoch, false, setup));
    return COF_OK;
}

/* ---- steps ---------------------------------------------------------------------------------- */

static cof_status put_rows(struct launcher *l, int step)
{
    const struct cofi_grad_return_plan *plan = l->plan;
    const struct cofi_gr_step *s = &l->k.step[step - 1];
    const struct cofi_kv_buffer *slot = &plan->home.slot[(step - 1) & 1];
    cof_arena *a = plan->binding.arena;
    for (int is_v = 0; is_v < 2 && s->push_begin < s->push_end; is_v++) {
        const size_t row = cofi_kv_bytes(slot, is_v, 1);
        COF_TRY(a->ops->device->put(a, cofi_grad_owner(&plan->home, step),
                                    cofi_kv_at(slot, is_v, s->push_begin),
                                    s->to[is_v] + (size_t)s->push_begin * row,
                                    (size_t)(s->push_end - s->push_begin) * row, l->s));
    }
    return COF_OK;
}

static cof_status get_rows(struct launcher *l, int step, cudaStream_t comm)
{
    const struct cofi_grad_return_plan *plan = l->plan;
    const struct cofi_gr_step *s = &l->k.step[step - 1];
    const struct cofi_kv_buffer *to = &plan->staging;
    cof_arena *a = plan->binding.arena;
    for (int is_v = 0; is_v < 2 && s->sum_begin < s->sum_end; is_v++)
        COF_TRY(a->ops->device->get(a, to->local + cofi_kv_at(to, is_v, s->sum_begin),
                                    cofi_grad_writer(&plan->home, step),
                                    published_at(plan, is_v, plan->rank, s->sum_begin),
                                    cofi_kv_bytes(to, is_v, s->sum_end - s->sum_begin), comm));
    return COF_OK;
}

static cof_status send(struct launcher *l, int step)
{
    const struct cofi_gr_cuda *st = l->plan->state;
    if (l->plan->transport == &cofi_gr_caller)
        return send_to_caller(l, step);
    if (!st->is_staged || l->plan->transport == &cofi_gr_pull)
        return launch_push(l, STORE, step);
    COF_TRY(launch_push(l, STAGED_STORE, step));
    COF_TRY(put_rows(l, step));
    return launch_push(l, COFD_GR_READY, step);
}

static cof_status sum(struct launcher *l, int step)
{
    const struct cofi_gr_cuda *st = l->plan->state;
    const struct cofi_gr_step *s = &l->k.step[step - 1];
    if (l->plan->transport == &cofi_gr_caller) {
        if (s->sum_begin < s->sum_end)
            COF_TRY(wait_for_caller(l, cofi_grad_writer(&l->plan->home, step), st->comm));
        return launch_sum(l, COFD_GR_ADD, step, st->comm);
    }
    if (!st->is_staged || l->plan->transport != &cofi_gr_pull)
        return launch_sum(l, SUM, step, st->comm);
    COF_TRY(launch_sum(l, COFD_GR_WAIT_READY, step, st->comm));
    COF_TRY(get_rows(l, step, st->comm));
    return launch_sum(l, STAGED_SUM, step, st->comm);
}

static cof_status follow(const struct launcher *l, cudaStream_t stream, cudaStream_t leader,
                         cudaEvent_t event)
{
    COFI_LAUNCH(l->plan->binding.arena, leader, cudaEventRecord(event, leader));
    COFI_LAUNCH(l->plan->binding.arena, stream, cudaStreamWaitEvent(stream, event, 0));
    return COF_OK;
}

static cof_status begin_steps(struct launcher *l)
{
    struct cofi_grad_return_plan *plan = l->plan;
    const struct cofi_gr_cuda *st = plan->state;
    const struct cofi_call c = {.n_empty = plan->n_empty, .sizes = {l->call->writers}};
    if (plan->transport != &cofi_gr_caller)
        COF_TRY(cofi_cuda_call_begin(&plan->binding, &c, l->s));
    if (plan->n_ranks > 1)
        COF_TRY(follow(l, st->comm, l->s, st->fork));
    l->is_forked = plan->n_ranks > 1;
    return COF_OK;
}

static cof_status end_steps(struct launcher *l)
{
    struct cofi_grad_return_plan *plan = l->plan;
    const struct cofi_gr_cuda *st = plan->state;
    if (plan->n_ranks > 1)
        COF_TRY(follow(l, l->s, st->comm, st->joined));
    COF_TRY(launch_sum(l, COFD_GR_FINISH, plan->n_ranks, l->s));
    if (plan->transport == &cofi_gr_caller)
        return COF_OK;
    COF_TRY(cofi_cuda_call_mark(&plan->binding, COFD_GR_MARK, l->s));
    return cofi_cuda_call_end(&plan->binding, l->s);
}

/* Half a call: the others are told, and what waits on C ends by that too. S is joined with it all
 * the same, so that nothing of the plan runs when S is through. */
static cof_status fail_steps(struct launcher *l, cof_status status)
{
    struct cofi_grad_return_plan *plan = l->plan;
    const struct cofi_gr_cuda *st = plan->state;
    char text[COFI_ERROR_TEXT_BYTES];
    memcpy(text, cof_last_error(), sizeof text);
    cofi_arena_fail(plan->binding.arena, status);
    if (plan->params.driver_wait && l->is_forked)
        cofi_gr_cuda_release(plan, l->call->args->epoch);
    if (l->is_forked)
        follow(l, l->s, st->comm, st->joined);
    return cofi_fail_text(status, text);
}

static cof_status run_steps(struct launcher *l)
{
    const int n = l->plan->n_ranks;
    if (l->call->first == 1)
        COF_TRY(begin_steps(l));
    for (int i = l->call->first; i <= l->call->last && i < n; i++) {
        COF_TRY(send(l, i));
        COF_TRY(sum(l, i));
    }
    return l->call->last == n ? end_steps(l) : COF_OK;
}

/* ---- calls ---------------------------------------------------------------------------------- */

static cof_status run_whole(struct launcher *l)
{
    const int last = l->plan->n_ranks - 1;
    return launch(l, COFD_GR_WHOLE,
                  (struct steps){last > 0, last, 1, last > 0 ? last : 1}, l->s);
}

/* The epoch of the caller's would be the same in every replay. */
static cof_status check_capture(const struct cofi_grad_return_plan *plan, cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (plan->transport != &cofi_gr_caller)
        return COF_OK;
    COFI_LAUNCH(plan->binding.arena, stream, cudaStreamIsCapturing(stream, &status));
    COF_FAIL_IF(status != cudaStreamCaptureStatusNone, COF_ERR_UNSUPPORTED,
                "stream: it is being captured, wanted a call with params.peers outside: args.epoch "
                "would be the same in every replay");
    return COF_OK;
}

static cof_status enqueue(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                          cudaStream_t stream, bool *is_made)
{
    const struct cofi_gr_cuda *st = plan->state;
    struct launcher l = {.plan = plan, .call = call, .entry = st->any, .s = stream,
                         .is_forked = call->first > 1};
    const bool is_caller = plan->transport == &cofi_gr_caller;
    COF_TRY(cofi_arena_look(plan->binding.arena));
    COF_TRY(check_capture(plan, stream));
    if (st->fast && is_aligned(&call->partial, plan->partial) &&
        is_aligned(&call->out, plan->elem) && (!is_caller || st->peers_aligned))
        l.entry = st->fast;
    set_call(plan, call, &l.k);
    *is_made = true;
    if (!st->by_steps)
        return run_whole(&l);
    cof_status status = run_steps(&l);
    return status == COF_OK ? status : fail_steps(&l, status);
}

cof_status cofi_gr_cuda_run(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                            cof_stream stream, bool *is_made)
{
    void *handle;
    COF_TRY(cofi_stream_begin_device(plan->base.team->world, stream, &handle));
    cof_status status = enqueue(plan, call, handle, is_made);
    return cofi_stream_end_device(plan->binding.arena, stream, status);
}
