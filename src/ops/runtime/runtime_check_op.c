/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* An operator for tests, as small as one can be that uses all of call.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu_stream.h"
#include "ops/runtime/runtime_check.h"
#include "symm/stream.h"

enum { READY = COFI_RUNTIME_READY, ACK = COFI_RUNTIME_ACK };
enum { PUBLISHED_MARK = COFI_RUNTIME_PUBLISHED_MARK };

struct one_call {
    struct cofi_runtime_op *op;
    struct cofi_runtime_call call;
    uint64_t idx, n_empty;
};

size_t cofi_runtime_op_payload(int n_ranks, enum cofi_runtime_form form, size_t max_bytes)
{
    return cofi_runtime_op_slot(max_bytes) * (form == COFI_RUNTIME_PULL ? 1 : (size_t)n_ranks);
}

cof_status cofi_runtime_op_open(cof_team *team, cof_arena *arena, const char *name,
                                enum cofi_runtime_form form, size_t max_bytes,
                                struct cofi_runtime_op *op)
{
    *op = (struct cofi_runtime_op){.form = form, .max_bytes = max_bytes,
                                   .fetched = malloc(max_bytes + 1)};
    COF_FAIL_IF(!op->fetched, COF_ERR_NOMEM, "check: no memory for %zu bytes", max_bytes);
    cof_status status = cofi_arena_bind(
        team, arena,
        &(struct cofi_binding_spec){
            .op = name, .payload_bytes = cofi_runtime_op_payload(cof_team_size(team), form,
                                                                 max_bytes),
            .n_purposes = COFI_RUNTIME_PURPOSES, .acks = 1u << ACK},
        &op->binding);
    const struct cofi_runtime_device *device = cofi_runtime_device(team->world);
    if (status == COF_OK && device)
        status = device->op_open(op);
    if (status != COF_OK) {
        char text[COFI_ERROR_TEXT_BYTES];
        memcpy(text, cof_last_error(), sizeof text);
        cofi_runtime_op_close(op);
        return cofi_fail_text(status, text);
    }
    return COF_OK;
}

void cofi_runtime_op_close(struct cofi_runtime_op *op)
{
    if (op->on_device)
        cofi_check_cuda()->runtime->op_close(op);
    cofi_arena_unbind(&op->binding);
    free(op->fetched);
    op->fetched = NULL;
}

const char *cofi_runtime_op_wrong(struct cofi_runtime_op *op)
{
    if (op->on_device)
        cofi_check_cuda()->runtime->op_inspect(op);
    return op->wrong;
}

void cofi_runtime_op_inspect(struct cofi_runtime *rt, struct cofi_runtime_op *op)
{
    const char *wrong = cofi_runtime_op_wrong(op);
    COFI_EXPECT(rt, !*wrong, "%s", wrong);
}

/* ---- one call, on a stream ---- */

static void hook(const struct cofi_runtime_op *op, enum cofi_runtime_point point)
{
    if (op->hook)
        op->hook(op->hook_arg, point);
}

static void inspect(const struct one_call *c, int from, int to, const void *message)
{
    struct cofi_runtime_op *op = c->op;
    uint64_t key = op->binding.ordinal << 16 | (uint64_t)from;
    long at = cofi_runtime_compare(message, c->call.bytes, key, (uint64_t)to, c->idx);
    if (at >= 0 && !op->wrong[0])
        snprintf(op->wrong, sizeof op->wrong,
                 "%s: call %llu (epoch %u): byte %ld of %zu of the message from rank %d is wrong",
                 op->binding.op, (unsigned long long)c->idx, cofi_call_epoch(&op->binding), at,
                 c->call.bytes, from);
}

static void fill(const struct one_call *c, void *message, int to)
{
    const struct cofi_binding *b = &c->op->binding;
    cofi_runtime_fill(message, c->call.bytes, b->ordinal << 16 | (uint64_t)b->arena->rank,
                      (uint64_t)to, c->idx);
}

static cof_status wait_ack(struct cofi_binding *b, int reader)
{
    return cofi_call_wait_ack(b, reader, ACK, b->mark[PUBLISHED_MARK], "message read");
}

static cof_status pull(const struct one_call *c)
{
    struct cofi_binding *b = &c->op->binding;
    int n = b->arena->n_ranks, rank = b->arena->rank;
    for (int i = 1; i < n; i++)
        COF_TRY(wait_ack(b, (rank + i) % n));
    cofi_runtime_sleep_us(c->call.write_delay);
    fill(c, cofi_arena_data(b->arena), 0);
    for (int i = 1; i < n; i++)
        cofi_call_signal(b, (rank + i) % n, READY);
    b->mark[PUBLISHED_MARK] = cofi_call_epoch(b);
    hook(c->op, COFI_RUNTIME_PUBLISHED);
    for (int i = 1; i < n; i++) {
        int owner = (rank + i) % n;
        COF_TRY(cofi_call_wait_ready(b, owner, READY, "message written"));
        cofi_runtime_sleep_us(c->call.read_delay);
        cofi_arena_get(b->arena, c->op->fetched, owner, 0, c->call.bytes);
        inspect(c, owner, 0, c->op->fetched);
        cofi_call_signal(b, owner, ACK);
    }
    return COF_OK;
}

static cof_status push(const struct one_call *c)
{
    struct cofi_binding *b = &c->op->binding;
    int n = b->arena->n_ranks, rank = b->arena->rank;
    size_t slot = cofi_runtime_op_slot(c->op->max_bytes);
    cofi_runtime_sleep_us(c->call.write_delay);
    for (int i = 1; i < n; i++) {
        int reader = (rank + i) % n;
        COF_TRY(wait_ack(b, reader));
        void *to = cofi_arena_destination(b->arena, reader, (size_t)rank * slot, c->op->fetched);
        fill(c, to, reader);
        cofi_arena_deliver(b->arena, reader, (size_t)rank * slot, to, c->call.bytes);
        cofi_call_signal(b, reader, READY);
    }
    b->mark[PUBLISHED_MARK] = cofi_call_epoch(b);
    hook(c->op, COFI_RUNTIME_PUBLISHED);
    for (int i = 1; i < n; i++) {
        int writer = (rank + i) % n;
        COF_TRY(cofi_call_wait_ready(b, writer, READY, "message written"));
        cofi_runtime_sleep_us(c->call.read_delay);
        inspect(c, writer, rank, cofi_arena_data(b->arena) + (size_t)writer * slot);
        cofi_call_signal(b, writer, ACK);
    }
    return COF_OK;
}

static cof_status run_call(struct cofi_cpu_stream *stream, const void *args)
{
    const struct one_call *c = args;
    struct cofi_binding *b = &c->op->binding;
    (void)stream;
    COF_TRY(cofi_call_begin(b, &(struct cofi_call){.direction = c->call.direction,
                                                   .n_empty = c->n_empty,
                                                   .sizes = {c->call.bytes}}));
    hook(c->op, COFI_RUNTIME_BEGUN);
    COF_TRY(c->op->form == COFI_RUNTIME_PULL ? pull(c) : push(c));
    cofi_call_end(b);
    return COF_OK;
}

cof_status cofi_runtime_op_call(cof_world *world, struct cofi_runtime_op *op,
                                const struct cofi_runtime_call *call, cof_stream stream)
{
    struct one_call c = {op, *call, op->n_made++, op->n_empty};
    struct cofi_cpu_stream *s;
    COF_FAIL_IF(call->bytes > op->max_bytes, COF_ERR_INTERNAL, "check: a message of %zu bytes",
                call->bytes);
    if (op->on_device)
        return cofi_runtime_device(world)->op_call(world, op, call, stream);
    COF_TRY(cofi_stream_begin(world, stream, &s));
    return cofi_stream_end(world, stream, cofi_cpu_enqueue(s, run_call, &c, sizeof c, 0));
}
