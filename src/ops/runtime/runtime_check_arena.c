/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases about arenas as such: what they promise, what a new one holds, what they leave behind. */
#include <stdio.h>
#include <string.h>

#include "ops/runtime/runtime_check.h"

/* ---- capabilities --------------------------------------------------------------------------- */

/* What each engine is known to keep. A new engine gets its line here. */
static const struct {
    const char *name;
    unsigned caps;
} expected[] = {
    {"thread", COFI_CAP_MAPPED | COFI_CAP_WORLDS | COFI_CAP_REINIT},
    {"shm", COFI_CAP_MAPPED | COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH | COFI_CAP_WORLDS |
                COFI_CAP_REINIT},
    {"attach", COFI_CAP_MAPPED | COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH | COFI_CAP_WORLDS |
                   COFI_CAP_REINIT},
    {"cuda", COFI_CAP_MAPPED | COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH | COFI_CAP_WORLDS |
                 COFI_CAP_REINIT},
    {"cuda-attach", COFI_CAP_MAPPED | COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH |
                        COFI_CAP_WORLDS | COFI_CAP_REINIT},
};

static void compare_caps(struct cofi_runtime *rt)
{
    bool found = false;
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        if (!strcmp(expected[i].name, rt->ops->name)) {
            found = true;
            COFI_EXPECT(rt, expected[i].caps == rt->ops->caps, "engine %s has bits %#x, wanted %#x",
                        rt->ops->name, rt->ops->caps, expected[i].caps);
        }
    COFI_EXPECT(rt, found, "engine %s has no line in the table of expected bits", rt->ops->name);
}

static void compare_view(struct cofi_runtime *rt, const cof_arena *a, const cof_arena_pointers *p,
                         bool mapped)
{
    COFI_EXPECT(rt, p->rank == rt->rank && p->n_ranks == rt->n_ranks && p->n_words == 4,
                "view: rank %d of %d with %d words", p->rank, p->n_ranks, p->n_words);
    COFI_EXPECT(rt, p->bytes == cof_arena_bytes(a) && p->bytes >= 1000, "view: %zu bytes",
                p->bytes);
    for (int r = 0; r < rt->n_ranks; r++) {
        bool wanted = mapped || r == rt->rank;
        COFI_EXPECT(rt, (p->base[r] != NULL) == wanted && (p->words[r] != NULL) == wanted,
                    "view of rank %d: base %p, words %p; it is %s", r, p->base[r], p->words[r],
                    wanted ? "mapped" : "not to be had");
    }
}

/* Numbers that the ranks store into each other's slab: through the view where there is one. */
static cof_status store_through_view(struct cofi_runtime *rt, cof_arena *a,
                                     const cof_arena_pointers *p, uint64_t *number)
{
    *number = 1000 + (uint64_t)rt->rank;
    for (int i = 0; i < rt->n_ranks; i++) {
        int peer = (rt->rank + i) % rt->n_ranks;
        if (p->base[peer])
            COF_TRY(cofi_runtime_copy(a, (uint64_t *)p->base[peer] + rt->rank, number, 8));
        else
            COF_TRY(cof_put(a, peer, 8 * (size_t)rt->rank, number, 8, COF_STREAM_NOW));
        COF_TRY(cof_signal(a, peer, 3, COF_STREAM_NOW));
    }
    for (int r = 0; r < rt->n_ranks; r++) {
        uint64_t seen, count;
        COF_TRY(cof_wait(a, r, 3, COF_STREAM_NOW));
        COF_TRY(cofi_runtime_copy(a, &seen, (uint64_t *)p->base[rt->rank] + r, 8));
        COFI_EXPECT(rt, seen == 1000 + (uint64_t)r, "rank %d stored %d, here is %llu", r, 1000 + r,
                    (unsigned long long)seen);
        const char *word = (const char *)p->words[rt->rank] +
                           (3 * (size_t)rt->n_ranks + (size_t)r) * p->word_stride;
        COF_TRY(cofi_runtime_copy(a, &count, word, 8));
        COFI_EXPECT(rt, count == 1, "word 3 of writer %d holds %llu after one signal", r,
                    (unsigned long long)count);
    }
    return COF_OK;
}

cof_status cofi_runtime_capabilities(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    cof_arena_pointers p = COF_ARENA_POINTERS_INIT;
    compare_caps(rt);
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, 8 * COFI_RUNTIME_MAX_RANKS, 0, &a));
    COFI_EXPECT(rt, a.arena->ops == rt->ops, "the arena is of engine %s", a.arena->ops->name);
    cofi_runtime_wants(rt, "cof_arena_view", cof_arena_view(a.arena, &p), COF_OK, NULL);
    compare_view(rt, a.arena, &p, (rt->ops->caps & COFI_CAP_MAPPED) && !a.arena->force_staged);
    uint64_t *number = cofi_runtime_alloc(rt->job->world, 8);
    cof_status status = number ? store_through_view(rt, a.arena, &p, number)
                               : COF_FAIL(COF_ERR_NOMEM, "check: no memory");
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    cofi_runtime_free(rt->job->world, number);
    cofi_check_arena_close(&a);
    return status;
}

/* ---- a new arena ---------------------------------------------------------------------------- */

static void expect_zero(struct cofi_runtime *rt, cof_arena *a)
{
    const unsigned char *data = cofi_runtime_look(rt, a);
    for (size_t i = 0; data && i < cof_arena_bytes(a); i++)
        if (data[i] != 0) {
            cofi_check_fail(rt->result, "byte %zu of a new arena of %zu is %#x", i,
                            cof_arena_bytes(a), data[i]);
            break;
        }
    cofi_runtime_look_end(a, data);
}

/* Sizes odd and even, each filled before it is destroyed: the next one may get the same memory. */
cof_status cofi_runtime_zeroed(struct cofi_runtime *rt)
{
    static const size_t sizes[] = {0, (1 << 20) + 5, 127, 4097, 1, 128, 4095, 1 << 20};
    for (int i = 0; i < cofi_runtime_rounds(rt, 24); i++) {
        struct cofi_check_arena a;
        size_t bytes = sizes[i % 8];
        COF_TRY(cofi_runtime_arena(rt, rt->job->team, bytes, 0, &a));
        COFI_EXPECT(rt, cof_arena_bytes(a.arena) >= bytes, "an arena of %zu bytes has %zu", bytes,
                    cof_arena_bytes(a.arena));
        expect_zero(rt, a.arena);
        COF_TRY(cofi_runtime_set(a.arena, 0, 0xee, cof_arena_bytes(a.arena)));
        cof_status status = cof_signal(a.arena, (rt->rank + 1) % rt->n_ranks, 0, COF_STREAM_NOW);
        if (status == COF_OK)
            status = cof_wait(a.arena, (rt->rank + rt->n_ranks - 1) % rt->n_ranks, 0,
                              COF_STREAM_NOW);
        if (status == COF_OK)
            status = cofi_runtime_settle(rt);
        cofi_check_arena_close(&a);
        COF_TRY(status);
    }
    return COF_OK;
}

static cof_status make_and_destroy(struct cofi_runtime *rt, int n, size_t bytes)
{
    for (int i = 0; i < n; i++) {
        struct cofi_check_arena a;
        COF_TRY(cofi_runtime_arena(rt, rt->job->team, bytes, 0, &a));
        COF_TRY(cofi_runtime_set(a.arena, bytes - 1, 1, 1));
        cofi_check_arena_close(&a);
    }
    return cof_team_barrier(rt->job->team);
}

/* A leak of one mapping or descriptor a time would show a hundredfold; the slack is for the
 * allocator and for what other threads of a process do. */
cof_status cofi_runtime_flat(struct cofi_runtime *rt)
{
    const size_t bytes = (size_t)1 << 19;
    COF_TRY(make_and_destroy(rt, 10, bytes));
    struct cofi_runtime_use before = cofi_runtime_use(rt->job->world);
    COF_TRY(make_and_destroy(rt, 100, bytes));
    struct cofi_runtime_use after = cofi_runtime_use(rt->job->world);
    COFI_EXPECT(rt, after.n_fds <= before.n_fds + 8, "%ld descriptors, %ld after 100 arenas",
                before.n_fds, after.n_fds);
    COFI_EXPECT(rt, after.n_maps <= before.n_maps + 40, "%ld mappings, %ld after 100 arenas",
                before.n_maps, after.n_maps);
    COFI_EXPECT(rt, after.bytes <= before.bytes + 50 * bytes,
                "%zu bytes mapped, %zu after 100 arenas of %zu", before.bytes, after.bytes, bytes);
    COFI_EXPECT(rt, after.device_bytes <= before.device_bytes + 200 * bytes,
                "%zu bytes of the device are taken, %zu after 100 arenas of %zu",
                before.device_bytes, after.device_bytes, bytes);
    return cof_team_barrier(rt->job->team);
}

/* A number to the next rank, in each of the arenas. */
static cof_status send_numbers(struct cofi_runtime *rt, struct cofi_check_arena *a,
                               uint64_t *number)
{
    int next = (rt->rank + 1) % rt->n_ranks;
    for (int i = 0; i < 2; i++) {
        number[i] = (uint64_t)(7000 + 1000 * i + rt->rank);
        COF_TRY(cof_put(a[i].arena, next, 8, &number[i], 8, COF_STREAM_NOW));
        COF_TRY(cof_signal(a[i].arena, next, i, COF_STREAM_NOW));
    }
    return COF_OK;
}

/* Two at once keep apart; ranks destroy them in different orders, while peers still use them. */
cof_status cofi_runtime_two_arenas(struct cofi_runtime *rt)
{
    struct cofi_check_arena a[2];
    int previous = (rt->rank + rt->n_ranks - 1) % rt->n_ranks;
    uint64_t *number = cofi_runtime_alloc(rt->job->world, 16);
    COF_FAIL_IF(!number, COF_ERR_NOMEM, "check: no memory");
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, 4097, 0, &a[0]));
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, 64, 0, &a[1]));
    COF_TRY(send_numbers(rt, a, number));
    for (int k = 0; k < 2; k++) {
        int i = rt->rank % 2 ? 1 - k : k;
        uint64_t seen;
        COF_TRY(cof_wait(a[i].arena, previous, i, COF_STREAM_NOW));
        COF_TRY(cofi_runtime_read(a[i].arena, 8, &seen, 8));
        COFI_EXPECT(rt, seen == (uint64_t)(7000 + 1000 * i + previous),
                    "arena %d: %llu from rank %d", i, (unsigned long long)seen, previous);
        cofi_runtime_sleep_us(cofi_runtime_random(rt, 2000));
        COF_TRY(cofi_runtime_settle(rt));
        cofi_check_arena_close(&a[i]);
    }
    cofi_runtime_free(rt->job->world, number);
    return cof_team_barrier(rt->job->team);
}
