/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arenas: how they are made and let go, their pointers, and transfers. */
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

size_t cofi_arena_words_bytes(int n_ranks, int n_purposes)
{
    return (size_t)n_ranks * (size_t)n_purposes * sizeof(struct cofi_line);
}

size_t cofi_arena_front_bytes(int n_ranks, int n_words)
{
    return cofi_arena_words_offset() +
           cofi_arena_words_bytes(n_ranks, COFI_ARENA_PURPOSES + n_words);
}

size_t cofi_arena_plan_bytes(int n_ranks, size_t payload_bytes, int n_purposes)
{
    return cofi_round_up(payload_bytes, COFI_LINE) + cofi_arena_words_bytes(n_ranks, n_purposes);
}

size_t cofi_arena_slab_bytes(int n_ranks, size_t payload_bytes, int n_purposes)
{
    return cofi_round_up(cofi_arena_front_bytes(n_ranks, 0) +
                        cofi_arena_plan_bytes(n_ranks, payload_bytes, n_purposes),
                    4096);
}

/* ---- words ---------------------------------------------------------------------------------- */

cof_status cofi_set_lines(cof_arena *a, size_t words_offset, int purpose, uint64_t value)
{
    if (a->ops->device)
        return a->ops->device->set_words(a, words_offset, purpose, value);
    for (int w = 0; w < a->n_ranks; w++)
        atomic_store(&cofi_own_line(a, cofi_line_offset(a, words_offset, purpose, w))->value,
                     value);
    return COF_OK;
}

void cofi_control_in_slabs(cof_arena *a)
{
    for (int r = 0; r < a->n_ranks; r++)
        a->control[r] = (struct cofi_control *)(void *)a->base[r];
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
        a->data_bytes = cofi_round_up(spec->bytes, COFI_LINE);
        a->slab_bytes = cofi_round_up(front + a->data_bytes, 4096);
    }
}

static void release(cof_arena *a)
{
    if (!a)
        return;
    free(a->base);
    free(a->control);
    free(a->view[0]);
    free(a->view[1]);
    free(a->regions);
    free(a->sent);
    free(a->awaited);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

static cof_status allocate(cof_team *team, const struct cofi_arena_spec *spec, cof_arena **out)
{
    size_t n = (size_t)team->n_ranks, n_counts = n * (size_t)spec->n_words;
    cof_arena *a = *out = calloc(1, sizeof *a);
    COF_FAIL_IF(!a, COF_ERR_NOMEM, "arena: no memory");
    pthread_mutex_init(&a->lock, NULL);
    a->team = team;
    a->ops = !spec->peers             ? team->world->ops
             : team->world->ops->device ? cofi_engine_cuda_attach() : &cofi_engine_attach;
    a->rank = team->rank;
    a->n_ranks = team->n_ranks;
    a->n_words = spec->n_words;
    a->is_private = spec->is_private;
    a->force_staged = cofi_config_int(COFI_VAR_FORCE_STAGED) != 0;
    a->run_timeout = team->world->run_timeout;
    a->first_epoch = spec->first_epoch ? spec->first_epoch : 1;
    a->base = calloc(n, sizeof *a->base);
    a->control = calloc(n, sizeof *a->control);
    a->view[0] = calloc(n, sizeof *a->view[0]);
    a->view[1] = calloc(n, sizeof *a->view[1]);
    a->sent = calloc(n_counts + 1, sizeof *a->sent);
    a->awaited = calloc(n_counts + 1, sizeof *a->awaited);
    COF_FAIL_IF(!a->base || !a->control || !a->view[0] || !a->view[1] || !a->sent || !a->awaited,
                COF_ERR_NOMEM, "arena: no memory for its tables");
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
    COF_TRY(cofi_world_usable(team->world));
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
        status = cofi_set_lines(a, cofi_arena_words_offset(), COFI_END_ACK, a->first_epoch - 1);
        status = cofi_team_agree(team, "arena epoch", status);
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
    return cofi_arena_front_bytes(team->n_ranks, n_words) + cofi_round_up(bytes, COFI_LINE);
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
    COF_TRY(cofi_arena_look(a));
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

const void *cofi_arena_source(const cof_arena *a, int peer, size_t offset)
{
    return is_direct(a) ? a->base[peer] + a->data_offset + offset : NULL;
}

void cofi_arena_get(cof_arena *a, void *dst, int peer, size_t offset, size_t bytes)
{
    a->ops->get(a, dst, peer, a->data_offset + offset, bytes);
}
