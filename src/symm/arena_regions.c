/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Who has which part of an arena's data: regions set aside, and the words and payloads of plans. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "symm/engine.h"

/* ---- regions: alike on all ranks ------------------------------------------------------------ */

/* Regions whose plan is gone on every rank are free again. */
static cof_status drop_released(cof_arena *a)
{
    if (a->n_regions == 0)
        return COF_OK;
    size_t n = (size_t)a->n_regions;
    char *own = calloc(n, 1), *all = calloc(n * (size_t)a->n_ranks, 1);
    cof_status status = own && all ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
    status = cofi_team_agree(a->team, "arena regions", status);
    for (size_t i = 0; i < n && status == COF_OK; i++)
        own[i] = a->regions[i].released;
    if (status == COF_OK)
        status = cofi_team_exchange(a->team, "arena regions", own, all, n);
    int kept = 0;
    pthread_mutex_lock(&a->lock);
    for (size_t i = 0; i < n && status == COF_OK; i++) {
        bool free_everywhere = true;
        for (int r = 0; r < a->n_ranks; r++)
            free_everywhere &= all[(size_t)r * n + i] != 0;
        if (!free_everywhere)
            a->regions[kept++] = a->regions[i];
    }
    if (status == COF_OK)
        a->n_regions = kept;
    pthread_mutex_unlock(&a->lock);
    free(own);
    free(all);
    return status;
}

/* Where the payloads of the plans end, those released on this rank alone included: ranks must come
 * to the same answer. */
static size_t payload_end(const cof_arena *a)
{
    size_t end = 0;
    for (int i = 0; i < a->n_regions; i++)
        if (a->regions[i].payload_bytes > end)
            end = a->regions[i].payload_bytes;
    return end;
}

static struct cofi_region *insert_region(cof_arena *a, int at, const struct cofi_region *region)
{
    pthread_mutex_lock(&a->lock);
    struct cofi_region *more = realloc(a->regions, (size_t)(a->n_regions + 1) * sizeof *more);
    if (more) {
        a->regions = more;
        memmove(more + at + 1, more + at, (size_t)(a->n_regions - at) * sizeof *more);
        more[at] = *region;
        a->n_regions++;
    } else {
        COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
    }
    pthread_mutex_unlock(&a->lock);
    return more ? &more[at] : NULL;
}

/* The highest gap that holds `bytes` above all payloads; the new region, or NULL after a text. */
static struct cofi_region *place_region(cof_arena *a, size_t bytes, size_t payload_bytes)
{
    size_t floor = payload_end(a) > payload_bytes ? payload_end(a) : payload_bytes;
    size_t end = a->data_bytes;
    int at = 0;
    for (; at < a->n_regions; at++) {
        const struct cofi_region *next = &a->regions[at];
        if (end - (next->offset + next->bytes) >= bytes)
            break;
        end = next->offset;
    }
    size_t lowest = a->n_regions ? a->regions[a->n_regions - 1].offset : a->data_bytes;
    size_t new_lowest = at < a->n_regions ? lowest : end >= bytes ? end - bytes : 0;
    if (end < bytes || new_lowest < floor) {
        COF_FAIL(COF_ERR_NOMEM,
                 "arena: %zu bytes of data, %zu of them set aside; no room for %zu more above "
                 "plans' buffers of %zu",
                 a->data_bytes, a->data_bytes - lowest, bytes, floor);
        return NULL;
    }
    const struct cofi_region region = {.offset = end - bytes, .bytes = bytes,
                                       .payload_bytes = payload_bytes};
    return insert_region(a, at, &region);
}

static void remove_region(cof_arena *a, struct cofi_region *region)
{
    pthread_mutex_lock(&a->lock);
    size_t after = (size_t)(a->regions + a->n_regions - (region + 1));
    memmove(region, region + 1, after * sizeof *region);
    a->n_regions--;
    pthread_mutex_unlock(&a->lock);
}

static cof_status compare_bytes(cof_arena *a, size_t bytes)
{
    uint64_t own = bytes, *all = a->team->table;
    cof_status status = cofi_team_exchange(a->team, "arena alloc", &own, all, sizeof own);
    for (int i = 1; i < a->n_ranks && status == COF_OK; i++)
        if (all[i] != all[0])
            status = COF_FAIL(COF_ERR_MISMATCH, "bytes = %llu on rank %d, %llu on rank %d",
                              (unsigned long long)all[0], a->team->world_rank[0],
                              (unsigned long long)all[i], a->team->world_rank[i]);
    return status;
}

cof_status cof_arena_alloc(cof_arena *a, size_t bytes, size_t *offset_out)
{
    COF_FAIL_IF(!a, COF_ERR_INVALID, "arena: NULL");
    COF_FAIL_IF(!offset_out, COF_ERR_INVALID, "offset_out: NULL");
    COF_TRY(compare_bytes(a, bytes));
    COF_FAIL_IF(bytes == 0, COF_ERR_INVALID, "bytes = 0: wanted at least 1");
    COF_TRY(drop_released(a));
    struct cofi_region *region = NULL;
    cof_status status = cofi_arena_look(a); /* ranks may notice a failure one after the other */
    if (status == COF_OK && bytes > a->data_bytes)
        status = COF_FAIL(COF_ERR_NOMEM, "bytes = %zu: the arena has %zu", bytes, a->data_bytes);
    if (status == COF_OK) {
        region = place_region(a, cofi_round_up(bytes, COFI_LINE), 0);
        status = region ? COF_OK : COF_ERR_NOMEM;
    }
    status = cofi_team_agree(a->team, "arena alloc", status);
    if (status == COF_OK)
        *offset_out = region->offset;
    else if (region)
        remove_region(a, region);
    return status;
}

/* ---- plans ---------------------------------------------------------------------------------- */

cof_status cofi_arena_check(const cof_team *team, const cof_arena *a)
{
    COF_FAIL_IF(a && a->team != team, COF_ERR_INVALID,
                "arena: made for another team than this plan's (of %d ranks)", a->n_ranks);
    return COF_OK;
}

void cofi_arena_name(const cof_team *team, const cof_arena *a, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s arena=%s", a ? a->ops->name : team->world->ops->name,
             a ? "shared" : "own");
}

/* Words begin as after a reset: nothing ready, acks of an epoch before any that will be asked for.
 * Calls of other plans may be on their way on other ranks: any epoch near the present will do. */
static cof_status begin_words(struct cofi_binding *b)
{
    cof_arena *a = b->arena;
    uint32_t now = atomic_load_explicit(&a->epoch, memory_order_relaxed);
    uint32_t before = now ? now : a->first_epoch - 1;
    for (int p = 0; p < b->n_purposes; p++)
        COF_TRY(cofi_set_lines(a, b->words_offset, p, b->acks >> p & 1 ? before : 0));
    return a->ops->device ? a->ops->device->bind(b) : COF_OK;
}

static cof_status place_words(cof_arena *a, const struct cofi_binding_spec *spec,
                              struct cofi_region **region_out)
{
    COF_TRY(drop_released(a));
    cof_status status = cofi_arena_look(a); /* as in cof_arena_alloc */
    if (status == COF_OK) {
        *region_out = place_region(a,
                                   cofi_arena_words_bytes(a->n_ranks, spec->n_purposes) +
                                       cofi_round_up(spec->tagged_bytes, COFI_LINE),
                                   cofi_round_up(spec->payload_bytes, COFI_LINE));
        status = *region_out ? COF_OK : COF_ERR_NOMEM;
    }
    return cofi_team_agree(a->team, "arena words", status);
}

static cof_status open_private(cof_team *team, const struct cofi_binding_spec *spec,
                               cof_arena **out)
{
    size_t bytes = cofi_arena_plan_bytes(team->n_ranks, spec->payload_bytes, spec->n_purposes) +
                   cofi_round_up(spec->tagged_bytes, COFI_LINE);
    return cofi_arena_open(team, &(struct cofi_arena_spec){.bytes = bytes, .is_private = true},
                           COF_OK, out);
}

cof_status cofi_arena_bind(cof_team *team, cof_arena *a, const struct cofi_binding_spec *spec,
                           struct cofi_binding *b)
{
    cof_arena *own = NULL;
    struct cofi_region *region = NULL;
    if (!a)
        COF_TRY(open_private(team, spec, &own));
    a = a ? a : own;
    cof_status status = place_words(a, spec, &region);
    if (status == COF_OK) {
        *b = (struct cofi_binding){.arena = a, .op = spec->op, .n_purposes = spec->n_purposes,
                                   .acks = spec->acks, .ordinal = team->n_plans,
                                   .words_offset = a->data_offset + region->offset,
                                   .tagged_step = spec->tagged_step,
                                   .tagged_bytes = cofi_round_up(spec->tagged_bytes, COFI_LINE)};
        b->tagged_offset =
            b->words_offset + cofi_arena_words_bytes(a->n_ranks, spec->n_purposes);
        pthread_mutex_lock(&a->lock);
        region->binding = b;
        pthread_mutex_unlock(&a->lock);
        status = begin_words(b);
        status = cofi_team_agree(team, "arena bind", status); /* nobody signals before all have */
    }
    if (status != COF_OK) {
        if (region)
            remove_region(a, region);
        if (b->on_device)
            a->ops->device->unbind(b);
        cof_arena_destroy(own);
        *b = (struct cofi_binding){0};
        return status;
    }
    team->n_plans++;
    return COF_OK;
}

static void release_words(cof_arena *a, const struct cofi_binding *b)
{
    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < a->n_regions; i++)
        if (a->regions[i].binding == b) {
            a->regions[i].binding = NULL;
            a->regions[i].released = true;
        }
    pthread_mutex_unlock(&a->lock);
}

void cofi_arena_unbind(struct cofi_binding *b)
{
    cof_arena *a = b->arena;
    if (!a)
        return;
    /* In a child of fork the lock may be held for ever. */
    if (cofi_process_is_this(&a->team->world->made_by)) {
        release_words(a, b);
        if (b->on_device)
            a->ops->device->unbind(b);
    }
    if (a->is_private)
        cof_arena_destroy(a);
    b->arena = NULL;
}
