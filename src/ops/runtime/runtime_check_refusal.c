/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arenas that cannot be had: every rank gets an error, nothing is kept, the next one works. */
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "ops/runtime/runtime_check.h"

/* On shm and thread made by the engine; on attach of the first bytes of blocks mapped before. */
static cof_status create(struct cofi_runtime *rt, const struct cofi_check_blocks *blocks,
                         size_t bytes, int n_words, cof_arena **arena_out)
{
    cof_team *team = rt->job->team;
    if (!rt->job->attach)
        return cof_arena_create(team, bytes, n_words, arena_out);
    cof_peers peers = COF_PEERS_INIT;
    peers.n_ranks = rt->n_ranks;
    peers.base = blocks->base;
    peers.bytes = bytes < SIZE_MAX / 8 ? cof_arena_attach_bytes(team, bytes, n_words) : bytes;
    peers.n_words = n_words;
    return cof_arena_attach(team, &peers, arena_out);
}

static cof_status open_blocks(struct cofi_runtime *rt, struct cofi_check_blocks *blocks)
{
    *blocks = (struct cofi_check_blocks){.fd = -1};
    return rt->job->attach ? cofi_check_blocks_open(rt->job->team, 1 << 20, blocks) : COF_OK;
}

/* A refusal leaves nothing behind, and the next arena can be had. */
static cof_status expect_fine(struct cofi_runtime *rt, const struct cofi_check_blocks *blocks,
                              const char *after)
{
    cof_arena *arena = NULL;
    cofi_runtime_wants(rt, after, create(rt, blocks, 4096, 1, &arena), COF_OK, NULL);
    if (arena) {
        cof_status status = cof_signal(arena, (rt->rank + 1) % rt->n_ranks, 0, COF_STREAM_NOW);
        if (status == COF_OK)
            status = cof_wait(arena, (rt->rank + rt->n_ranks - 1) % rt->n_ranks, 0, COF_STREAM_NOW);
        cofi_runtime_wants(rt, after, status, COF_OK, NULL);
    }
    COF_TRY(cof_team_barrier(rt->job->team));
    cof_arena_destroy(arena);
    cofi_runtime_wants(rt, after, cof_team_query(rt->job->team), COF_OK, NULL);
    return COF_OK;
}

static void expect_none(struct cofi_runtime *rt, cof_arena *arena, const char *what)
{
    COFI_EXPECT(rt, !arena, "%s: an arena came out", what);
    cof_arena_destroy(arena);
}

/* Files of this process are limited for the time of the call. */
static cof_status create_limited(struct cofi_runtime *rt, const struct cofi_check_blocks *blocks,
                                 bool limited, cof_arena **arena_out)
{
    struct rlimit old, small;
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 8192;
    if (limited)
        setrlimit(RLIMIT_FSIZE, &small);
    cof_status status = create(rt, blocks, 1 << 19, 1, arena_out);
    setrlimit(RLIMIT_FSIZE, &old);
    return status;
}

/* One rank in turn cannot have the memory; then no rank can. */
static void refuse(struct cofi_runtime *rt, const struct cofi_check_blocks *blocks, bool by_limit)
{
    for (int r = 0; by_limit && r < rt->n_ranks; r++) {
        cof_arena *arena = NULL;
        cof_status got = create_limited(rt, blocks, r == rt->rank, &arena);
        cofi_runtime_wants(rt, "file size limited on one rank", got, COF_ERR_NOMEM,
                           "files are limited to 8192");
        expect_none(rt, arena, "file size limited on one rank");
    }
    static const size_t absurd[] = {(size_t)1 << 50, SIZE_MAX / 2048, SIZE_MAX / 2, SIZE_MAX};
    for (int i = 0; i < 4; i++) {
        cof_arena *arena = NULL;
        cof_status got = create(rt, blocks, absurd[i], 1, &arena);
        COFI_EXPECT(rt, got == COF_ERR_NOMEM || got == COF_ERR_INVALID, "%zu bytes: %s (%.200s)",
                    absurd[i], cof_status_name(got), cof_last_error());
        expect_none(rt, arena, "an absurd size");
    }
}

/* Many refusals, so that the smallest leak is more than the allocator's own mappings, and, where
 * ranks are threads, than what the others are about. */
cof_status cofi_runtime_refused(struct cofi_runtime *rt)
{
    enum { N_ROUNDS = 30 };
    struct cofi_check_blocks blocks;
    bool is_shm = !strcmp(rt->ops->name, "shm");
    int slack = is_shm ? 0 : rt->ops->device ? 8 : 2; /* a driver's own come and go */
    COF_TRY(open_blocks(rt, &blocks));
    refuse(rt, &blocks, is_shm);
    cof_status status = expect_fine(rt, &blocks, "after the first refusals");
    struct cofi_runtime_use before = cofi_runtime_use(rt->job->world);
    for (int i = 0; i < N_ROUNDS; i++)
        refuse(rt, &blocks, is_shm);
    if (status == COF_OK)
        status = expect_fine(rt, &blocks, "after refusals");
    struct cofi_runtime_use after = cofi_runtime_use(rt->job->world);
    COFI_EXPECT(rt, after.n_fds <= before.n_fds + slack &&
                        after.n_maps <= before.n_maps + 20,
                "%ld descriptors and %ld mappings before refusals, %ld and %ld after", before.n_fds,
                before.n_maps, after.n_fds, after.n_maps);
    cofi_check_blocks_close(&blocks);
    return status;
}

/* The last rank passes something else than the others. */
cof_status cofi_runtime_differ(struct cofi_runtime *rt)
{
    static const struct {
        size_t bytes, other_bytes;
        int n_words, other_words;
        cof_status wanted;
        const char *part;
    } rows[] = {
        {4096, 8192, 1, 1, COF_ERR_MISMATCH, "bytes = "},
        {4096, 4096, 1, 2, COF_ERR_MISMATCH, NULL},
        {4096, 4096, 1, -1, COF_ERR_INVALID, NULL},
        {4096, 4096, 1, 65536, COF_ERR_INVALID, NULL},
    };
    struct cofi_check_blocks blocks;
    bool last = rt->rank == rt->n_ranks - 1;
    COF_TRY(open_blocks(rt, &blocks));
    cof_status status = COF_OK;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && status == COF_OK; i++) {
        cof_arena *arena = NULL;
        cof_status got = create(rt, &blocks, last ? rows[i].other_bytes : rows[i].bytes,
                                last ? rows[i].other_words : rows[i].n_words, &arena);
        cofi_runtime_wants(rt, "arguments that differ", got, rows[i].wanted, rows[i].part);
        expect_none(rt, arena, "arguments that differ");
        status = expect_fine(rt, &blocks, "after arguments that differed");
    }
    cofi_check_blocks_close(&blocks);
    return status;
}

/* One entry of one rank's peers is wrong; the others say on which rank. */
static void attach_wrongly(struct cofi_runtime *rt, const struct cofi_check_blocks *blocks,
                           void *wrong, int entry, const char *what)
{
    void *base[COFI_RUNTIME_MAX_RANKS];
    cof_arena *arena = NULL;
    memcpy(base, blocks->base, (size_t)rt->n_ranks * sizeof *base);
    bool on_this_rank = rt->rank == rt->n_ranks - 1;
    if (on_this_rank)
        base[entry] = wrong;
    struct cofi_check_blocks passed = {.base = base};
    char part[64];
    snprintf(part, sizeof part, "peers.base[%d] = ", entry);
    cof_status status = create(rt, &passed, 4096, 1, &arena);
    cofi_runtime_wants(rt, what, status, COF_ERR_INVALID, part);
    expect_none(rt, arena, what);
}

cof_status cofi_runtime_wrong_peers(struct cofi_runtime *rt)
{
    if (!rt->job->attach) {
        rt->result->verdict = COFI_SKIPPED;
        snprintf(rt->result->text, sizeof rt->result->text, "engine %s takes no peers",
                 rt->ops->name);
        return COF_OK;
    }
    struct cofi_check_blocks blocks;
    COF_TRY(open_blocks(rt, &blocks));
    char *own = blocks.base[rt->rank];
    void *gone = (void *)(uintptr_t)COFI_LINE; /* the first page is never mapped */
    attach_wrongly(rt, &blocks, blocks.base[rt->rank], 0, "the own block as rank 0's");
    attach_wrongly(rt, &blocks, NULL, 0, "NULL");
    attach_wrongly(rt, &blocks, own + 64, 0, "not aligned");
    attach_wrongly(rt, &blocks, own + COFI_LINE, 0, "a line too far");
    attach_wrongly(rt, &blocks, gone, 0, "not mapped");
    attach_wrongly(rt, &blocks, gone, rt->n_ranks - 1, "its own not mapped");
    cof_status status = expect_fine(rt, &blocks, "after wrong peers");
    cofi_check_blocks_close(&blocks);
    return status;
}
