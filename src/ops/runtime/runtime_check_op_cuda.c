/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The operator for tests on a CUDA stream: the words and the order of runtime_check_op.c, each step
 * a launch. Nothing here allocates or waits, so a call may be captured; its messages are numbered
 * on the device, so a replay is a call like any other. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/runtime/runtime_check_cuda.h"
#include "symm/call_cuda.h"
#include "symm/engine_cuda.h"

enum { READY = COFI_RUNTIME_READY, ACK = COFI_RUNTIME_ACK };
enum { PUBLISHED_MARK = COFI_RUNTIME_PUBLISHED_MARK };

struct cofi_runtime_op_cuda {
    cof_world *world;
    struct cofi_cuda_tally *tally; /* device memory */
    void *staging; /* device memory: a message that was fetched, or the staged form of one */
};

struct one_call {
    struct cofi_runtime_op *op;
    const struct cofi_runtime_call *call;
    cudaStream_t stream;
};

/* ---- opening -------------------------------------------------------------------------------- */

static cof_status alloc_parts(struct cofi_runtime_op *op)
{
    struct cofi_runtime_op_cuda *on = op->on_device;
    void *tally;
    COF_TRY(cofi_check_cuda_alloc(on->world, sizeof *on->tally, &tally));
    on->tally = tally;
    return cofi_check_cuda_alloc(on->world, op->max_bytes + 1, &on->staging);
}

cof_status cofi_runtime_cuda_op_open(struct cofi_runtime_op *op)
{
    op->on_device = calloc(1, sizeof *op->on_device);
    COF_FAIL_IF(!op->on_device, COF_ERR_NOMEM, "check: no memory");
    op->on_device->world = op->binding.arena->team->world;
    return alloc_parts(op);
}

void cofi_runtime_cuda_op_close(struct cofi_runtime_op *op)
{
    struct cofi_runtime_op_cuda *on = op->on_device;
    cofi_check_cuda_free(on->world, on->tally);
    cofi_check_cuda_free(on->world, on->staging);
    free(on);
    op->on_device = NULL;
}

void cofi_runtime_cuda_op_inspect(struct cofi_runtime_op *op)
{
    struct cofi_cuda_tally tally;
    struct cofi_runtime_op_cuda *on = op->on_device;
    if (!on->tally || op->wrong[0])
        return;
    if (cofi_check_cuda()->copy(on->world, &tally, on->tally, sizeof tally) != COF_OK)
        snprintf(op->wrong, sizeof op->wrong, "%s: the tally: %.150s", op->binding.op,
                 cof_last_error());
    else if (tally.n_wrong)
        snprintf(op->wrong, sizeof op->wrong,
                 "%s: call %llu (epoch %llu): byte %llu of %llu of the message from rank %llu is "
                 "wrong",
                 op->binding.op, (unsigned long long)tally.idx, (unsigned long long)tally.epoch,
                 (unsigned long long)tally.at, (unsigned long long)tally.bytes,
                 (unsigned long long)(tally.from & 0xffff));
}

/* ---- steps ---------------------------------------------------------------------------------- */

static void CUDART_CB sleep_there(void *us)
{
    cofi_runtime_sleep_us((unsigned)(uintptr_t)us);
}

static void CUDART_CB hook_begun(void *arg)
{
    const struct cofi_runtime_op *op = arg;
    op->hook(op->hook_arg, COFI_RUNTIME_BEGUN);
}

static void CUDART_CB hook_published(void *arg)
{
    const struct cofi_runtime_op *op = arg;
    op->hook(op->hook_arg, COFI_RUNTIME_PUBLISHED);
}

static cof_status delay(const struct one_call *c, unsigned us)
{
    if (us)
        COF_CUDA(cudaLaunchHostFunc(c->stream, sleep_there, (void *)(uintptr_t)us));
    return COF_OK;
}

static cof_status hook(const struct one_call *c, enum cofi_runtime_point point)
{
    if (c->op->hook)
        COF_CUDA(cudaLaunchHostFunc(
            c->stream, point == COFI_RUNTIME_BEGUN ? hook_begun : hook_published, c->op));
    return COF_OK;
}

static uint64_t name_of(const struct cofi_binding *b, int rank)
{
    return b->ordinal << 16 | (uint64_t)rank;
}

static cof_status fill(const struct one_call *c, void *message, int to)
{
    const struct cofi_binding *b = &c->op->binding;
    COF_CUDA(cofi_check_cuda_fill(b->arena->on_device, c->op->on_device->tally, message,
                                  c->call->bytes, name_of(b, b->arena->rank), (uint64_t)to,
                                  c->stream));
    return COF_OK;
}

static cof_status inspect(const struct one_call *c, int from, int to, const void *message)
{
    const struct cofi_binding *b = &c->op->binding;
    COF_CUDA(cofi_check_cuda_compare(b->arena->on_device, b->on_device, c->op->on_device->tally,
                                     message, c->call->bytes, name_of(b, from), (uint64_t)to,
                                     c->stream));
    return COF_OK;
}

/* ---- one call ------------------------------------------------------------------------------- */

static cof_status pull_from(const struct one_call *c, int owner)
{
    struct cofi_binding *b = &c->op->binding;
    void *fetched = c->op->on_device->staging;
    COF_TRY(cofi_cuda_call_wait_ready(b, owner, READY, "message written", c->stream));
    COF_TRY(delay(c, c->call->read_delay));
    COF_TRY(b->arena->ops->device->get(b->arena, fetched, owner, 0, c->call->bytes, c->stream));
    COF_TRY(inspect(c, owner, 0, fetched));
    return cofi_cuda_call_signal(b, owner, ACK, c->stream);
}

static cof_status pull(const struct one_call *c)
{
    struct cofi_binding *b = &c->op->binding;
    int n = b->arena->n_ranks, rank = b->arena->rank;
    COF_TRY(cofi_cuda_call_wait_ack(b, COFI_ALL_OTHERS, ACK, PUBLISHED_MARK, "message read",
                                    c->stream));
    COF_TRY(delay(c, c->call->write_delay));
    COF_TRY(fill(c, cofi_arena_data(b->arena), 0));
    COF_TRY(cofi_cuda_call_signal(b, COFI_ALL_OTHERS, READY, c->stream));
    COF_TRY(cofi_cuda_call_mark(b, PUBLISHED_MARK, c->stream));
    COF_TRY(hook(c, COFI_RUNTIME_PUBLISHED));
    for (int i = 1; i < n; i++)
        COF_TRY(pull_from(c, (rank + i) % n));
    return COF_OK;
}

/* By a kernel that stores into the peer's slab; or into staging, and then a put. */
static cof_status push_to(const struct one_call *c, int reader, size_t slot)
{
    struct cofi_binding *b = &c->op->binding;
    cof_arena *a = b->arena;
    size_t offset = (size_t)a->rank * slot;
    void *staging = c->op->on_device->staging;
    COF_TRY(cofi_cuda_call_wait_ack(b, reader, ACK, PUBLISHED_MARK, "message read", c->stream));
    void *to = cofi_arena_destination(a, reader, offset, staging);
    COF_TRY(fill(c, to, reader));
    if (to == staging)
        COF_TRY(a->ops->device->put(a, reader, offset, to, c->call->bytes, c->stream));
    return cofi_cuda_call_signal(b, reader, READY, c->stream);
}

static cof_status read_from(const struct one_call *c, int writer, size_t slot)
{
    struct cofi_binding *b = &c->op->binding;
    COF_TRY(cofi_cuda_call_wait_ready(b, writer, READY, "message written", c->stream));
    COF_TRY(delay(c, c->call->read_delay));
    COF_TRY(inspect(c, writer, b->arena->rank,
                    cofi_arena_data(b->arena) + (size_t)writer * slot));
    return cofi_cuda_call_signal(b, writer, ACK, c->stream);
}

static cof_status push(const struct one_call *c)
{
    struct cofi_binding *b = &c->op->binding;
    int n = b->arena->n_ranks, rank = b->arena->rank;
    size_t slot = cofi_runtime_op_slot(c->op->max_bytes);
    COF_TRY(delay(c, c->call->write_delay));
    for (int i = 1; i < n; i++)
        COF_TRY(push_to(c, (rank + i) % n, slot));
    COF_TRY(cofi_cuda_call_mark(b, PUBLISHED_MARK, c->stream));
    COF_TRY(hook(c, COFI_RUNTIME_PUBLISHED));
    for (int i = 1; i < n; i++)
        COF_TRY(read_from(c, (rank + i) % n, slot));
    return COF_OK;
}

static cof_status enqueue(const struct one_call *c, uint64_t n_empty)
{
    struct cofi_binding *b = &c->op->binding;
    const struct cofi_call call = {.direction = c->call->direction, .n_empty = n_empty,
                                   .sizes = {c->call->bytes}};
    COF_TRY(cofi_cuda_call_begin(b, &call, c->stream));
    COF_CUDA(cofi_check_cuda_next(b->arena->on_device, c->op->on_device->tally, c->stream));
    COF_TRY(hook(c, COFI_RUNTIME_BEGUN));
    COF_TRY(c->op->form == COFI_RUNTIME_PULL ? pull(c) : push(c));
    return cofi_cuda_call_end(b, c->stream);
}

static cof_status wait_for(cof_arena *arena, cudaStream_t stream)
{
    COF_CUDA(cudaStreamSynchronize(stream));
    return cofi_arena_look(arena);
}

cof_status cofi_runtime_cuda_op_call(cof_world *world, struct cofi_runtime_op *op,
                                     const struct cofi_runtime_call *call, cof_stream stream)
{
    const struct one_call c = {op, call, cofi_check_cuda_stream(world, stream)};
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    op->n_made++;
    cof_status status = enqueue(&c, op->n_empty);
    if (stream.kind == COF_STREAM_KIND_NOW && status == COF_OK)
        status = wait_for(op->binding.arena, c.stream);
    cofi_cuda_leave(&scope);
    return status;
}
