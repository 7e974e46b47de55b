/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Whether lines of 128 bytes, and words of 16, arrive whole, as device/lines.h needs them: every
 * rank stores into the next one's slab while that one looks. Words must, by PTX; lines must where
 * the world takes them to (has_lines). That torn ones are noticed is shown by words that are stored
 * half by half. */
#include <stdio.h>

#include "ops/runtime/runtime_check_cuda.h"
#include "symm/call_cuda.h"
#include "symm/engine_cuda.h"

enum { MAX_TRIES = 5, LINE_BYTES = 128, WORD_BYTES = 16 };
#define N_LOOKS UINT64_C(50000000) /* of a rank at units, once it has seen one change */
#define TRY_NS UINT64_C(200000000) /* also where fewer were made by then */

struct litmus {
    struct cofi_runtime *rt;
    cof_arena *arena;
    enum cofi_litmus_unit unit;
    size_t bytes;
    struct cofi_litmus run;
    int n_blocks;
    struct cofi_litmus_counts all[COFI_RUNTIME_MAX_RANKS]; /* of the last try, by rank */
};

static uint64_t *data_of(const cof_arena *a, int rank)
{
    return (uint64_t *)(void *)(a->base[rank] + a->data_offset);
}

static cof_status launch(const struct litmus *l, cudaStream_t stream)
{
    COF_CUDA(cofi_check_cuda_litmus(&l->run, l->unit, l->n_blocks, stream));
    COF_CUDA(cudaStreamSynchronize(stream));
    return COF_OK;
}

/* When the ranks have met at its end, nobody stores any more. */
static cof_status try_once(struct litmus *l)
{
    cof_world *world = l->rt->job->world;
    const struct cofi_check_device *device = cofi_check_cuda();
    struct cofi_litmus_counts mine;
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_runtime_set(l->arena, 0, 0, l->bytes));
    COF_TRY(device->fill(world, l->run.counts, 0, sizeof mine));
    COF_TRY(cof_team_barrier(l->rt->job->team));
    COF_TRY(cofi_cuda_enter(world->device->device, &scope));
    cof_status status = launch(l, world->device->now);
    cofi_cuda_leave(&scope);
    COF_TRY(status);
    COF_TRY(device->copy(world, &mine, l->run.counts, sizeof mine));
    return cof_team_allgather(l->rt->job->team, &mine, l->all, sizeof mine);
}

/* The rank saw what tells something. */
static bool has_seen(const struct litmus *l, int rank)
{
    const struct cofi_litmus_counts *c = &l->all[rank];
    return c->n_changes > 0 && (l->unit != COFI_LITMUS_HALVES || c->n_torn > 0);
}

/* Ranks of which that is true. */
static int n_seen(const struct litmus *l)
{
    int n = 0;
    for (int r = 0; r < l->rt->n_ranks; r++)
        n += has_seen(l, r);
    return n;
}

static void report(const struct litmus *l)
{
    struct cofi_check_result *result = l->rt->result;
    struct cofi_litmus_counts sum = {0};
    int n_missing = l->rt->n_ranks - n_seen(l);
    for (int r = 0; r < l->rt->n_ranks; r++) {
        sum.n_looks += l->all[r].n_looks;
        sum.n_changes += l->all[r].n_changes;
        sum.n_torn += l->all[r].n_torn;
    }
    if (result->verdict != COFI_PASSED)
        return;
    snprintf(result->text, sizeof result->text, "%llu looks, %llu changes seen, %llu torn%s",
             (unsigned long long)sum.n_looks, (unsigned long long)sum.n_changes,
             (unsigned long long)sum.n_torn,
             l->unit == COFI_LITMUS_LINE && sum.n_torn ? ": lines are not relied on here" : "");
    if (n_missing)
        cofi_check_append(result->text, sizeof result->text,
                          "; no overlap seen by %d of %d ranks, which share devices", n_missing,
                          l->rt->n_ranks);
}

static void judge(const struct litmus *l)
{
    const struct cofi_cuda_world *device = l->rt->job->world->device;
    const struct cofi_litmus_counts *c = &l->all[l->rt->rank];
    bool may_tear = l->unit == COFI_LITMUS_HALVES ||
                    (l->unit == COFI_LITMUS_LINE && !device->has_lines);
    COFI_EXPECT(l->rt, c->n_torn == 0 || may_tear,
                "%llu torn %s in %llu looks; at byte %llu one with data of pass %llu, the tag of "
                "pass %llu",
                (unsigned long long)c->n_torn, l->unit == COFI_LITMUS_LINE ? "lines" : "words",
                (unsigned long long)c->n_looks, (unsigned long long)c->slot * 16,
                (unsigned long long)c->word, (unsigned long long)c->tag);
    COFI_EXPECT(l->rt, has_seen(l, l->rt->rank) || device->most_ranks > 1,
                "%llu changes and %llu torn units seen in %d tries: nothing was tested",
                (unsigned long long)c->n_changes, (unsigned long long)c->n_torn, MAX_TRIES);
    report(l);
}

static cof_status look(struct litmus *l)
{
    const struct cofi_cuda_world *device = l->rt->job->world->device;
    int n_threads = 0, n_tries = device->most_ranks > 1 ? 1 : MAX_TRIES;
    const void *kernel = cofi_check_cuda_litmus_kernel(l->unit, &n_threads);
    COF_TRY(cofi_cuda_max_blocks(l->rt->job->team, kernel, n_threads, 0, 0, &l->n_blocks));
    uint64_t n_lookers = (uint64_t)l->n_blocks * (uint64_t)n_threads / 2;
    if (l->unit == COFI_LITMUS_LINE) /* eight threads look at one */
        n_lookers /= 8;
    l->run.n_looks = (l->rt->options->full ? 10 : 1) * N_LOOKS / n_lookers + 1;
    l->run.ns = (l->rt->options->full ? 10 : 1) * TRY_NS;
    for (int i = 0; i < n_tries; i++) {
        COF_TRY(try_once(l));
        if (n_seen(l) == l->rt->n_ranks)
            break;
    }
    judge(l);
    return cof_team_barrier(l->rt->job->team);
}

cof_status cofi_runtime_cuda_litmus(struct cofi_runtime *rt)
{
    struct cofi_check_arena a;
    struct litmus l = {.rt = rt, .unit = (enum cofi_litmus_unit)(rt->arg & 3)};
    void *counts = NULL;
    l.bytes = (size_t)(rt->arg >> 2) * (l.unit == COFI_LITMUS_LINE ? LINE_BYTES : WORD_BYTES);
    COF_TRY(cofi_runtime_arena(rt, rt->job->team, l.bytes, 0, &a));
    cof_status status = cofi_check_cuda_alloc(rt->job->world, sizeof *l.run.counts, &counts);
    l.arena = a.arena;
    l.run.n_slots = (uint32_t)(l.bytes / 16);
    l.run.out = data_of(a.arena, (rt->rank + 1) % rt->n_ranks);
    l.run.in = data_of(a.arena, rt->rank);
    l.run.counts = counts;
    if (status == COF_OK)
        status = look(&l);
    cofi_check_cuda_free(rt->job->world, counts);
    cofi_check_arena_close(&a);
    return status;
}
