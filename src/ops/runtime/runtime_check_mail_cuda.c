/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Messages between all ranks whose sources and destinations are device memory at odd addresses, by
 * the public calls, made and compared by kernels.
 *
 * Own data: a slot for each writer, and one from which the others get.
 * Words: DATA "my put is there, and what you may get", FREE "I have read both". */
#include <stdio.h>
#include <string.h>

#include "ops/runtime/runtime_check_cuda.h"
#include "symm/engine_cuda.h"

enum { DATA, FREE };
enum { CANARY = 192 }; /* bytes between slots, of this value (0xc0) */

static size_t slot_offset(const struct cofi_mail *m, int slot)
{
    return (size_t)slot * m->stride + CANARY + 3 + (size_t)slot % 5;
}

/* Where a message of or for a peer begins in src or dst. */
static size_t begin_of(int peer)
{
    return 1 + (size_t)peer % 7;
}

static uint64_t name_of(const struct cofi_mail *m)
{
    return (uint64_t)m->rt->rank;
}

static const struct cofd_arena *on_device(const struct cofi_mail *m)
{
    return m->a.arena->on_device;
}

/* ---- opening -------------------------------------------------------------------------------- */

static cof_status alloc_parts(struct cofi_mail *m)
{
    void *src, *dst, *tally;
    COF_TRY(cofi_check_cuda_alloc(m->world, m->bytes + COFI_MAIL_GUARD, &src));
    m->src = src;
    COF_TRY(cofi_check_cuda_alloc(m->world, m->bytes + COFI_MAIL_GUARD, &dst));
    m->dst = dst;
    COF_TRY(cofi_check_cuda_alloc(m->world, sizeof *m->tally, &tally));
    m->tally = tally;
    COF_TRY(cofi_check_cuda()->fill(m->world, m->dst, CANARY, m->bytes + COFI_MAIL_GUARD));
    COF_TRY(cofi_runtime_set(m->a.arena, 0, CANARY, cof_arena_bytes(m->a.arena)));
    return cof_stream_create(m->world, 1, &m->stream);
}

/* All may write to all. */
static cof_status free_all(struct cofi_mail *m)
{
    COF_TRY(cof_team_barrier(cof_world_team(m->world)));
    COF_TRY(cofi_mail_free(m, m->stream));
    COF_TRY(cof_stream_sync(m->stream));
    return cof_team_barrier(cof_world_team(m->world));
}

cof_status cofi_mail_open(struct cofi_runtime *rt, cof_world *world, size_t bytes,
                          struct cofi_mail *m)
{
    *m = (struct cofi_mail){.rt = rt, .world = world, .bytes = bytes,
                            .stride = bytes + CANARY + 16, .a.blocks.fd = -1};
    size_t all = (size_t)(rt->n_ranks + 1) * m->stride + CANARY;
    COF_TRY(cofi_runtime_arena(rt, cof_world_team(world), all, 0, &m->a));
    COF_TRY(alloc_parts(m));
    return free_all(m);
}

void cofi_mail_close(struct cofi_mail *m)
{
    cof_stream_destroy(m->stream);
    cofi_check_cuda_free(m->world, m->src);
    cofi_check_cuda_free(m->world, m->dst);
    cofi_check_cuda_free(m->world, m->tally);
    cofi_check_arena_close(&m->a);
    *m = (struct cofi_mail){.world = m->world, .a.blocks.fd = -1};
}

/* ---- kernels -------------------------------------------------------------------------------- */

static cof_status next_here(struct cofi_mail *m, cof_stream stream)
{
    COF_CUDA(cofi_check_cuda_next(on_device(m), m->tally,
                                  cofi_check_cuda_stream(m->world, stream)));
    return COF_OK;
}

static cof_status fill_here(struct cofi_mail *m, void *dst, int to, cof_stream stream)
{
    COF_CUDA(cofi_check_cuda_fill(on_device(m), m->tally, dst, m->bytes, name_of(m), (uint64_t)to,
                                  cofi_check_cuda_stream(m->world, stream)));
    return COF_OK;
}

static cof_status compare_here(struct cofi_mail *m, const void *src, int from, int to,
                               cof_stream stream)
{
    COF_CUDA(cofi_check_cuda_compare(on_device(m), NULL, m->tally, src, m->bytes, (uint64_t)from,
                                     (uint64_t)to, cofi_check_cuda_stream(m->world, stream)));
    return COF_OK;
}

/* ---- a round -------------------------------------------------------------------------------- */

static int peer_at(const struct cofi_mail *m, int i)
{
    return (m->rt->rank + i) % m->rt->n_ranks;
}

cof_status cofi_mail_await_free(struct cofi_mail *m, cof_stream stream)
{
    for (int i = 1; i < m->rt->n_ranks; i++)
        COF_TRY(cof_wait(m->a.arena, peer_at(m, i), FREE, stream));
    return COF_OK;
}

/* The last message is for this rank itself, and for the others to get. */
static cof_status put_here(struct cofi_mail *m, cof_stream stream)
{
    int n = m->rt->n_ranks, rank = m->rt->rank;
    COF_TRY(next_here(m, stream));
    for (int i = 1; i <= n; i++) {
        int to = peer_at(m, i);
        char *src = m->src + begin_of(to);
        COF_TRY(fill_here(m, src, to, stream));
        COF_TRY(cof_put(m->a.arena, to, slot_offset(m, rank), src, m->bytes, stream));
    }
    return cof_put(m->a.arena, rank, slot_offset(m, n), m->src + begin_of(rank), m->bytes, stream);
}

cof_status cofi_mail_announce(struct cofi_mail *m, cof_stream stream)
{
    for (int i = 1; i < m->rt->n_ranks; i++)
        COF_TRY(cof_signal(m->a.arena, peer_at(m, i), DATA, stream));
    return COF_OK;
}

cof_status cofi_mail_await(struct cofi_mail *m, cof_stream stream)
{
    for (int i = 1; i < m->rt->n_ranks; i++)
        COF_TRY(cof_wait(m->a.arena, peer_at(m, i), DATA, stream));
    return COF_OK;
}

static cof_status read_here(struct cofi_mail *m, cof_stream stream)
{
    int n = m->rt->n_ranks, rank = m->rt->rank;
    for (int i = 1; i <= n; i++) {
        int from = peer_at(m, i);
        char *dst = m->dst + begin_of(from);
        COF_TRY(compare_here(m, cofi_arena_data(m->a.arena) + slot_offset(m, from), from, rank,
                             stream));
        COF_TRY(cof_get(m->a.arena, dst, from, slot_offset(m, n), m->bytes, stream));
        COF_TRY(compare_here(m, dst, from, from, stream));
    }
    return COF_OK;
}

cof_status cofi_mail_free(struct cofi_mail *m, cof_stream stream)
{
    for (int i = 1; i < m->rt->n_ranks; i++)
        COF_TRY(cof_signal(m->a.arena, peer_at(m, i), FREE, stream));
    return COF_OK;
}

static cof_status on_world_device(struct cofi_mail *m, cof_stream stream,
                                  cof_status (*fn)(struct cofi_mail *m, cof_stream stream))
{
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(m->world->device->device, &scope));
    cof_status status = fn(m, stream);
    cofi_cuda_leave(&scope);
    return status;
}

cof_status cofi_mail_put(struct cofi_mail *m, cof_stream stream)
{
    return on_world_device(m, stream, put_here);
}

cof_status cofi_mail_read(struct cofi_mail *m, cof_stream stream)
{
    return on_world_device(m, stream, read_here);
}

cof_status cofi_mail_round(struct cofi_mail *m, cof_stream stream)
{
    COF_TRY(cofi_mail_await_free(m, stream));
    COF_TRY(cofi_mail_put(m, stream));
    COF_TRY(cofi_mail_announce(m, stream));
    COF_TRY(cofi_mail_await(m, stream));
    COF_TRY(cofi_mail_read(m, stream));
    return cofi_mail_free(m, stream);
}

/* ---- what came ------------------------------------------------------------------------------ */

static bool is_canary(const unsigned char *data, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (data[i] != CANARY)
            return false;
    return true;
}

/* The bytes in front of a slot, and behind the one before; slot n + 1 is the end. */
static void inspect_gap(struct cofi_mail *m, int slot)
{
    unsigned char gap[2 * CANARY];
    size_t begin = slot ? slot_offset(m, slot - 1) + m->bytes : 0;
    size_t end = slot <= m->rt->n_ranks ? slot_offset(m, slot) : begin + CANARY;
    cof_status status = cofi_runtime_read(m->a.arena, begin, gap, end - begin);
    COFI_EXPECT(m->rt, status == COF_OK && is_canary(gap, end - begin),
                "bytes %zu .. %zu, before slot %d, were written", begin, end, slot);
}

/* A message begins at one of 7 places; the bytes that none touches. */
static void inspect_edges(struct cofi_mail *m)
{
    unsigned char head, tail[COFI_MAIL_GUARD - 8];
    cof_status status = cofi_runtime_copy(m->a.arena, &head, m->dst, 1);
    if (status == COF_OK)
        status = cofi_runtime_copy(m->a.arena, tail, m->dst + m->bytes + 8, sizeof tail);
    COFI_EXPECT(m->rt, status == COF_OK && head == CANARY && is_canary(tail, sizeof tail),
                "a get of %zu bytes wrote beside them", m->bytes);
}

cof_status cofi_mail_inspect(struct cofi_mail *m)
{
    struct cofi_cuda_tally t;
    COF_TRY(cof_stream_sync(m->stream));
    COF_TRY(cof_team_query(cof_world_team(m->world)));
    COF_TRY(cofi_check_cuda()->copy(m->world, &t, m->tally, sizeof t));
    COFI_EXPECT(m->rt, t.n_wrong == 0, "round %llu: byte %llu of %llu of rank %llu's message is "
                "wrong, and %llu in all", (unsigned long long)t.idx, (unsigned long long)t.at,
                (unsigned long long)t.bytes, (unsigned long long)t.from,
                (unsigned long long)t.n_wrong);
    COFI_EXPECT(m->rt, t.n_calls == m->n_rounds, "%llu rounds were run, %llu were made",
                (unsigned long long)t.n_calls, (unsigned long long)m->n_rounds);
    for (int slot = 0; slot <= m->rt->n_ranks + 1; slot++)
        inspect_gap(m, slot);
    inspect_edges(m);
    return COF_OK;
}
