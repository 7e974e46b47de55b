/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases that only CUDA devices have: device memory on both sides, two streams, a device that is
 * busy, tagged words. */
#include <string.h>

#include "ops/runtime/runtime_check_cuda.h"
#include "symm/call_cuda.h"
#include "symm/engine_cuda.h"

/* ---- device memory -------------------------------------------------------------------------- */

static cof_status make_rounds(struct cofi_mail *m, int n_rounds)
{
    for (int i = 0; i < n_rounds; i++) {
        if (cofi_runtime_random(m->rt, 20) == 0)
            cofi_runtime_sleep_us(cofi_runtime_random(m->rt, 1000));
        m->n_rounds++;
        COF_TRY(cofi_mail_round(m, m->stream));
        if (i % 6 == 5)
            COF_TRY(cof_stream_sync(m->stream));
    }
    return cofi_mail_inspect(m);
}

static cof_status pass_mail(struct cofi_runtime *rt, int n_rounds)
{
    struct cofi_mail m;
    cof_status status = cofi_mail_open(rt, rt->job->world, rt->arg, &m);
    if (status == COF_OK)
        status = make_rounds(&m, n_rounds);
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    cofi_mail_close(&m);
    return status;
}

cof_status cofi_runtime_cuda_put_get(struct cofi_runtime *rt)
{
    return pass_mail(rt, 2);
}

cof_status cofi_runtime_cuda_message_passing(struct cofi_runtime *rt)
{
    return pass_mail(rt, cofi_runtime_rounds(rt, rt->arg < 100000 ? 200 : 60));
}

/* ---- two streams ---------------------------------------------------------------------------- */

static cof_status hand_over(cof_stream from, cof_stream to)
{
    cof_event event;
    COF_TRY(cof_event_record(from, &event));
    return cof_stream_wait_event(to, event);
}

/* Signals and waits on one stream, data on the other. */
static cof_status round_of_two(struct cofi_mail *m, cof_stream words)
{
    COF_TRY(cofi_mail_await_free(m, words));
    COF_TRY(hand_over(words, m->stream));
    COF_TRY(cofi_mail_put(m, m->stream));
    COF_TRY(hand_over(m->stream, words));
    COF_TRY(cofi_mail_announce(m, words));
    COF_TRY(cofi_mail_await(m, words));
    COF_TRY(hand_over(words, m->stream));
    COF_TRY(cofi_mail_read(m, m->stream));
    COF_TRY(hand_over(m->stream, words));
    return cofi_mail_free(m, words);
}

static cof_status rounds_of_two(struct cofi_mail *m, cof_stream words)
{
    int n_rounds = cofi_runtime_rounds(m->rt, 100);
    for (int i = 0; i < n_rounds; i++) {
        m->n_rounds++;
        COF_TRY(round_of_two(m, words));
        if (i % 6 == 5)
            COF_TRY(cof_stream_sync(words));
    }
    COF_TRY(cof_stream_sync(words));
    COF_TRY(cofi_mail_inspect(m));
    return cof_team_barrier(m->rt->job->team);
}

cof_status cofi_runtime_cuda_streams(struct cofi_runtime *rt)
{
    struct cofi_mail m;
    cof_stream words = COF_STREAM_NOW;
    cof_status status = cofi_mail_open(rt, rt->job->world, 40001, &m);
    if (status == COF_OK)
        status = cof_stream_create(rt->job->world, 1, &words);
    if (status == COF_OK)
        status = rounds_of_two(&m, words);
    cof_stream_destroy(words);
    cofi_mail_close(&m);
    return status;
}

/* ---- a busy device -------------------------------------------------------------------------- */

static cof_status occupy(cof_world *world, cof_stream stream)
{
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cudaError_t error = cofi_check_cuda_busy(world->device->n_sms, 50000000,
                                             cofi_check_cuda_stream(world, stream));
    cofi_cuda_leave(&scope);
    COF_CUDA(error);
    return COF_OK;
}

/* One rank in turn is late by a kernel that leaves no SM free. */
static cof_status busy_rounds(struct cofi_mail *m, cof_stream other)
{
    for (int i = 0; i < 4; i++) {
        if (i % m->rt->n_ranks == m->rt->rank)
            COF_TRY(occupy(m->world, other));
        m->n_rounds++;
        COF_TRY(cofi_mail_round(m, m->stream));
        COF_TRY(cof_stream_sync(m->stream));
        COF_TRY(cof_stream_sync(other));
    }
    COF_TRY(cofi_mail_inspect(m));
    return cof_team_barrier(m->rt->job->team);
}

cof_status cofi_runtime_cuda_busy(struct cofi_runtime *rt)
{
    struct cofi_mail m;
    cof_stream other = COF_STREAM_NOW;
    cof_status status = cofi_mail_open(rt, rt->job->world, 100003, &m);
    if (status == COF_OK)
        status = cof_stream_create(rt->job->world, 1, &other);
    if (status == COF_OK)
        status = busy_rounds(&m, other);
    cof_stream_destroy(other);
    cofi_mail_close(&m);
    return status;
}

/* ---- tagged words --------------------------------------------------------------------------- */

static cof_status enqueue_tagged(struct cofi_binding *b, struct cofi_cuda_tally *tally,
                                 int n_rounds, cudaStream_t stream)
{
    const struct cofi_call call = {.direction = 1, .sizes = {(uint64_t)n_rounds}};
    uint64_t timeout_ns = b->arena->run_timeout > 0 ? (uint64_t)(b->arena->run_timeout * 1e9) : 0;
    COF_TRY(cofi_cuda_call_begin(b, &call, stream));
    COF_CUDA(cofi_check_cuda_tagged(b->on_device, tally, b->arena->data_offset, (uint32_t)n_rounds,
                                    timeout_ns, stream));
    COF_TRY(cofi_cuda_call_end(b, stream));
    COF_CUDA(cudaStreamSynchronize(stream));
    return cofi_arena_look(b->arena);
}

static cof_status run_tagged(struct cofi_runtime *rt, struct cofi_binding *b,
                             struct cofi_cuda_tally *tally)
{
    struct cofi_cuda_scope scope;
    struct cofi_cuda_tally t = {0};
    cof_world *world = rt->job->world;
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = enqueue_tagged(b, tally, cofi_runtime_rounds(rt, 1000),
                                       world->device->now);
    cofi_cuda_leave(&scope);
    COF_TRY(status);
    COF_TRY(cofi_check_cuda()->copy(world, &t, tally, sizeof t));
    COFI_EXPECT(rt, t.n_calls == 1, "the kernel did not end");
    COFI_EXPECT(rt, t.n_wrong == 0, "round %llu: the tagged words of lane %llu from rank %llu are "
                "wrong, %llu in all", (unsigned long long)t.idx, (unsigned long long)t.at,
                (unsigned long long)t.from, (unsigned long long)t.n_wrong);
    return cof_team_barrier(rt->job->team);
}

cof_status cofi_runtime_cuda_tagged(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    struct cofi_runtime_op op; /* for its place in the arena */
    size_t own = cofi_tagged_bytes(1);
    size_t bytes = cofi_runtime_op_payload(rt->n_ranks, COFI_RUNTIME_PUSH, own);
    void *tally = NULL;
    COF_TRY(cofi_runtime_arena(rt, rt->job->team,
                               bytes + 2 * cofi_arena_words_bytes(rt->n_ranks, 2), 0, &a));
    COF_TRY(cofi_runtime_set(a.arena, 0, 0, bytes)); /* attached memory is as it was */
    COF_TRY(cofi_runtime_op_open(rt->job->team, a.arena, "tagged", COFI_RUNTIME_PUSH, own, &op));
    COF_TRY(cof_team_barrier(rt->job->team));
    cof_status status = cofi_check_cuda_alloc(rt->job->world, sizeof(struct cofi_cuda_tally),
                                              &tally);
    if (status == COF_OK)
        status = run_tagged(rt, &op.binding, tally);
    cofi_check_cuda_free(rt->job->world, tally);
    cofi_runtime_op_close(&op);
    cofi_check_arena_close(&a);
    return status;
}
