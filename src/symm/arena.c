/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arenas: how they are made, and who has which part of the data. */
#include "symm/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/config.h"
#include "core/sized.h"
#include "symm/engine.h"

#define MAX_WORDS 65535
#define MAX_BYTES (SIZE_MAX / 4)

/* ---- sizes ---------------------------------------------------------------------------------- */

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

size_t cofi_arena_words_bytes(int n_ranks, int n_purposes)
{
    return (size_t)n_ranks * (size_t)n_purposes * sizeof(struct cofi_line);
}

size_t cofi_arena_front_bytes(int n_ranks, int n_words)
{
    return cofi_arena_words_offset() +
           cofi_arena_words_bytes(n_ranks, COFI_ARENA_PURPOSES + n_words);
}

/* Data that one plan needs. */
static size_t plan_bytes(int n_ranks, size_t payload_bytes, int n_purposes)
{
    return round_up(payload_bytes, COFI_LINE) + cofi_arena_words_bytes(n_ranks, n_purposes);
}

size_t cofi_arena_slab_bytes(int n_ranks, size_t payload_bytes, int n_purposes)
{
    return round_up(cofi_arena_front_bytes(n_ranks, 0) +
                        plan_bytes(n_ranks, payload_bytes, n_purposes),
                    4096);
}

/* ---- open and close ------------------------------------------------------------------------- */

static void set_sizes(cof_arena *a, const struct cofi_arena_spec *spec)
{
    size_t front = cofi_arena_front_bytes(a->n_ranks, a->n_words);
    a->user_words_offset = cofi_arena_front_bytes(a->n_ranks, 0);
    a->data_offset = front;
    if (spec->peers) {
        a->slab_bytes = spec->bytes / COFI_LINE * COFI_LINE;
        a->data_bytes = a->slab_bytes - front;
    } else {
        a->data_bytes = round_up(spec->bytes, COFI_LINE);
        a->slab_bytes = round_up(front + a->data_bytes, 4096);
    }
}

static void release(cof_arena *a)
{
    if (!a)
        return;
    free(a->base);
    free(a->view[0]);
    free(a->view[1]);
    free(a->regions);
    free(a->sent);
    free(a->awaited);
    free(a);
}

static cof_status allocate(cof_team *team, const struct cofi_arena_spec *spec, cof_arena **out)
{
    size_t n = (size_t)team->n_ranks, n_counts = n * (size_t)spec->n_words;
    cof_arena *a = *out = calloc(1, sizeof *a);
    COF_FAIL_IF(!a, COF_ERR_NOMEM, "arena: no memory");
    a->team = team;
    a->ops = spec->peers ? &cofi_engine_attach : team->world->ops;
    a->rank = team->rank;
    a->n_ranks = team->n_ranks;
    a->n_words = spec->n_words;
    a->is_private = spec->is_private;
    a->force_staged = cofi_config_int(COFI_VAR_FORCE_STAGED) != 0;
    a->run_timeout = team->world->run_timeout;
    a->first_epoch = spec->first_epoch ? spec->first_epoch : 1;
    a->base = calloc(n, sizeof *a->base);
    a->view[0] = calloc(n, sizeof *a->view[0]);
    a->view[1] = calloc(n, sizeof *a->view[1]);
    a->sent = calloc(n_counts + 1, sizeof *a->sent);
    a->awaited = calloc(n_counts + 1, sizeof *a->awaited);
    COF_FAIL_IF(!a->base || !a->view[0] || !a->view[1] || !a->sent || !a->awaited, COF_ERR_NOMEM,
                "arena: no memory for its tables");
    set_sizes(a, spec);
    return COF_OK;
}

/* The ranks must lay the slabs out alike. */
static cof_status compare_shapes(cof_team *team, const struct cofi_arena_spec *spec)
{
    struct shape {
        uint64_t bytes, n_words, is_attached;
    } own = {spec->bytes, (uint64_t)spec->n_words, spec->peers != NULL}, *all = team->table;
    _Static_assert(sizeof own <= sizeof(struct cofi_vote), "fits the team's table");
    cof_status status = cofi_team_exchange(team, "arena compare", &own, all, sizeof own);
    for (int i = 1; i < team->n_ranks && status == COF_OK; i++) {
        int r0 = team->world_rank[0], r = team->world_rank[i];
        if (all[i].bytes != all[0].bytes)
            status = COF_FAIL(COF_ERR_MISMATCH, "arena: bytes = %llu on rank %d, %llu on rank %d",
                              (unsigned long long)all[0].bytes, r0,
                              (unsigned long long)all[i].bytes, r);
        else if (all[i].n_words != all[0].n_words)
            status = COF_FAIL(COF_ERR_MISMATCH, "arena: n_words = %llu on rank %d, %llu on rank %d",
                              (unsigned long long)all[0].n_words, r0,
                              (unsigned long long)all[i].n_words, r);
        else if (all[i].is_attached != all[0].is_attached)
            status = COF_FAIL(COF_ERR_MISMATCH,
                              "arena: ranks %d and %d differ in whether they attach memory", r0, r);
    }
    return status;
}

/* Acks of no call yet: what an ack of the epoch before the first would be. */
static void set_lines(cof_arena *a, size_t words_offset, int purpose, uint64_t value)
{
    for (int w = 0; w < a->n_ranks; w++)
        atomic_store(&cofi_own_line(a, cofi_line_offset(a, words_offset, purpose, w))->value,
                     value);
}

static void publish(cof_arena *a)
{
    cof_team *team = a->team;
    bool mapped = (a->ops->caps & COFI_CAP_MAPPED) && !a->force_staged;
    for (int r = 0; r < a->n_ranks; r++)
        if (mapped || r == a->rank) {
            a->view[0][r] = a->base[r] + a->data_offset;
            a->view[1][r] = a->base[r] + a->user_words_offset;
        }
    pthread_mutex_lock(&team->world->lock);
    a->next = team->arenas;
    team->arenas = a;
    pthread_mutex_unlock(&team->world->lock);
}

cof_status cofi_arena_open(cof_team *team, const struct cofi_arena_spec *spec, cof_status own,
                           cof_arena **arena_out)
{
    cof_arena *a = NULL;
    *arena_out = NULL;
    cof_status status = own;
    if (status == COF_OK && !spec->peers && spec->bytes > MAX_BYTES / (size_t)team->n_ranks)
        status = COF_FAIL(COF_ERR_INVALID, "bytes = %zu: past the address space for %d ranks",
                          spec->bytes, team->n_ranks);
    if (status == COF_OK)
        status = allocate(team, spec, &a);
    status = cofi_team_agree(team, "arena create", status);
    if (status == COF_OK)
        status = compare_shapes(team, spec);
    if (status == COF_OK)
        status = a->ops->map(a, spec->peers);
    if (status == COF_OK && a->first_epoch > 1) {
        set_lines(a, cofi_arena_words_offset(), COFI_END_ACK, a->first_epoch - 1);
        status = cof_team_barrier(team);
        if (status != COF_OK)
            a->ops->unmap(a);
    }
    if (status != COF_OK) {
        release(a);
        return status;
    }
    publish(a);
    *arena_out = a;
    return COF_OK;
}

void cof_arena_destroy(cof_arena *a)
{
    if (!a)
        return;
    pthread_mutex_lock(&a->team->world->lock);
    for (cof_arena **at = &a->team->arenas; *at; at = &(*at)->next)
        if (*at == a) {
            *at = a->next;
            break;
        }
    pthread_mutex_unlock(&a->team->world->lock);
    /* A child of fork has no part in who lets go last, and of shared memory nothing to unmap. */
    if (cofi_process_is_this(&a->team->world->made_by))
        a->ops->unmap(a);
    release(a);
}

/* ---- the public ways to make one ------------------------------------------------------------ */

static cof_status check_words(int n_words, const char *name)
{
    COF_FAIL_IF(n_words < 0 || n_words > MAX_WORDS, COF_ERR_INVALID, "%s = %d: wanted 0 .. %d",
                name, n_words, MAX_WORDS);
    return COF_OK;
}

cof_status cof_arena_create(cof_team *team, size_t bytes, int n_words, cof_arena **arena_out)
{
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(!arena_out, COF_ERR_INVALID, "arena_out: NULL");
    cof_status own = check_words(n_words, "n_words");
    return cofi_arena_open(team, &(struct cofi_arena_spec){.bytes = bytes, .n_words = n_words}, own,
                           arena_out);
}

size_t cof_arena_attach_bytes(const cof_team *team, size_t bytes, int n_words)
{
    if (!team || n_words < 0 || n_words > MAX_WORDS || bytes > MAX_BYTES)
        return 0;
    return cofi_arena_front_bytes(team->n_ranks, n_words) + round_up(bytes, COFI_LINE);
}

static cof_status check_peers(const cof_team *team, const cof_peers *p)
{
    COF_FAIL_IF(p->n_ranks != team->n_ranks, COF_ERR_INVALID,
                "peers.n_ranks = %d: wanted %d, as the team has", p->n_ranks, team->n_ranks);
    COF_FAIL_IF(!p->base, COF_ERR_INVALID, "peers.base: NULL");
    COF_TRY(check_words(p->n_words, "peers.n_words"));
    size_t front = cofi_arena_front_bytes(p->n_ranks, p->n_words);
    COF_FAIL_IF(p->bytes < front || p->bytes > MAX_BYTES, COF_ERR_INVALID,
                "peers.bytes = %zu: wanted at least %zu for %d ranks and %d words "
                "(cof_arena_attach_bytes)",
                p->bytes, front, p->n_ranks, p->n_words);
    for (int r = 0; r < p->n_ranks; r++)
        COF_FAIL_IF(!p->base[r] || (uintptr_t)p->base[r] % COFI_LINE, COF_ERR_INVALID,
                    "peers.base[%d] = %p: wanted an address aligned to %d bytes", r, p->base[r],
                    COFI_LINE);
    return COF_OK;
}

cof_status cof_arena_attach(cof_team *team, const cof_peers *peers, cof_arena **arena_out)
{
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(!arena_out, COF_ERR_INVALID, "arena_out: NULL");
    cof_peers p = COF_PEERS_INIT;
    cof_status own = cofi_sized_read(&p, sizeof p, COFI_SIZE_THROUGH(cof_peers, n_words), peers,
                                     "peers");
    if (own == COF_OK)
        own = check_peers(team, &p);
    return cofi_arena_open(
        team, &(struct cofi_arena_spec){.bytes = p.bytes, .n_words = p.n_words, .peers = p.base},
        own, arena_out);
}

size_t cof_arena_bytes(const cof_arena *a)
{
    return a ? a->data_bytes : 0;
}

cof_status cof_arena_view(cof_arena *a, cof_arena_pointers *pointers)
{
    COF_FAIL_IF(!a, COF_ERR_INVALID, "arena: NULL");
    COF_TRY(cofi_world_usable(a->team->world));
    COF_FAIL_IF(!pointers, COF_ERR_INVALID, "pointers: NULL");
    COF_FAIL_IF(pointers->size < COFI_SIZE_THROUGH(cof_arena_pointers, word_stride),
                COF_ERR_INVALID, "pointers->size = %zu: wanted %zu", pointers->size,
                sizeof *pointers);
    const cof_arena_pointers full = {
        .size = pointers->size, .rank = a->rank, .n_ranks = a->n_ranks, .bytes = a->data_bytes,
        .base = (void *const *)a->view[0], .words = (void *const *)a->view[1],
        .n_words = a->n_words, .word_stride = sizeof(struct cofi_line)};
    memcpy(pointers, &full, pointers->size < sizeof full ? pointers->size : sizeof full);
    return COF_OK;
}

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
    for (size_t i = 0; i < n && status == COF_OK; i++) {
        bool free_everywhere = true;
        for (int r = 0; r < a->n_ranks; r++)
            free_everywhere &= all[(size_t)r * n + i] != 0;
        if (!free_everywhere)
            a->regions[kept++] = a->regions[i];
    }
    if (status == COF_OK)
        a->n_regions = kept;
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
    struct cofi_region *more = realloc(a->regions, (size_t)(a->n_regions + 1) * sizeof *more);
    if (!more) {
        COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
        return NULL;
    }
    a->regions = more;
    memmove(more + at + 1, more + at, (size_t)(a->n_regions - at) * sizeof *more);
    a->n_regions++;
    more[at] = (struct cofi_region){.offset = end - bytes, .bytes = bytes,
                                    .payload_bytes = payload_bytes};
    return &more[at];
}

static void remove_region(cof_arena *a, struct cofi_region *region)
{
    size_t after = (size_t)(a->regions + a->n_regions - (region + 1));
    memmove(region, region + 1, after * sizeof *region);
    a->n_regions--;
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
    struct cofi_region *region =
        bytes > a->data_bytes ? NULL : place_region(a, round_up(bytes, COFI_LINE), 0);
    COF_FAIL_IF(bytes > a->data_bytes, COF_ERR_NOMEM, "bytes = %zu: the arena has %zu", bytes,
                a->data_bytes);
    cof_status status = cofi_team_agree(a->team, "arena alloc", region ? COF_OK : COF_ERR_NOMEM);
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
static void begin_words(struct cofi_binding *b)
{
    cof_arena *a = b->arena;
    uint32_t now = atomic_load_explicit(&a->epoch, memory_order_relaxed);
    uint32_t before = now ? now : a->first_epoch - 1;
    for (int p = 0; p < b->n_purposes; p++)
        set_lines(a, b->words_offset, p, b->acks >> p & 1 ? before : 0);
}

static cof_status place_words(cof_arena *a, const struct cofi_binding_spec *spec,
                              struct cofi_region **region_out)
{
    COF_TRY(drop_released(a));
    *region_out = place_region(a, cofi_arena_words_bytes(a->n_ranks, spec->n_purposes),
                               round_up(spec->payload_bytes, COFI_LINE));
    return cofi_team_agree(a->team, "arena words", *region_out ? COF_OK : COF_ERR_NOMEM);
}

static cof_status open_private(cof_team *team, const struct cofi_binding_spec *spec,
                               cof_arena **out)
{
    size_t bytes = plan_bytes(team->n_ranks, spec->payload_bytes, spec->n_purposes);
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
                                   .acks = spec->acks,
                                   .words_offset = a->data_offset + region->offset};
        region->binding = b;
        begin_words(b);
        status = cof_team_barrier(team); /* nobody signals before all have begun */
    }
    if (status != COF_OK) {
        if (region)
            remove_region(a, region);
        cof_arena_destroy(own);
        *b = (struct cofi_binding){0};
        return status;
    }
    b->ordinal = team->n_plans++;
    return COF_OK;
}

void cofi_arena_unbind(struct cofi_binding *b)
{
    cof_arena *a = b->arena;
    if (!a)
        return;
    for (int i = 0; i < a->n_regions; i++)
        if (a->regions[i].binding == b) {
            a->regions[i].binding = NULL;
            a->regions[i].released = true;
        }
    if (a->last == b) /* the next plan may lie in its place */
        a->last = NULL;
    if (a->is_private)
        cof_arena_destroy(a);
    b->arena = NULL;
}

/* ---- transfers ------------------------------------------------------------------------------ */

static bool is_direct(const cof_arena *a)
{
    return (a->ops->caps & COFI_CAP_MAPPED) && !a->force_staged;
}

void *cofi_arena_destination(cof_arena *a, int peer, size_t offset, void *staging)
{
    return is_direct(a) ? a->base[peer] + a->data_offset + offset : staging;
}

void cofi_arena_deliver(cof_arena *a, int peer, size_t offset, const void *destination,
                        size_t bytes)
{
    if (!is_direct(a))
        a->ops->put(a, peer, a->data_offset + offset, destination, bytes);
}

void cofi_arena_get(cof_arena *a, void *dst, int peer, size_t offset, size_t bytes)
{
    a->ops->get(a, dst, peer, a->data_offset + offset, bytes);
}
