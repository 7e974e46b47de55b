/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Teams: making, splitting, failing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "symm/engine.h"

/* ---- create and destroy --------------------------------------------------------------------- */

cof_status cofi_team_make(cof_world *w, const int *ranks, int n, uint64_t tag, cof_team **team_out)
{
    cof_team *t = calloc(1, sizeof *t);
    int *world_rank = malloc((size_t)n * sizeof *world_rank);
    void *table = calloc((size_t)n, sizeof(struct cofi_vote));
    if (!t || !world_rank || !table) {
        free(t);
        free(world_rank);
        free(table);
        return COF_FAIL(COF_ERR_NOMEM, "team of %d: no memory", n);
    }
    memcpy(world_rank, ranks, (size_t)n * sizeof *ranks);
    t->world = w;
    t->abort = &t->own_abort;
    t->n_ranks = n;
    t->world_rank = world_rank;
    t->table = table;
    t->rank = -1;
    t->id = cofi_hash_u64(COFI_HASH_SEED, tag);
    for (int i = 0; i < n; i++) {
        t->rank = ranks[i] == w->rank ? i : t->rank;
        t->hub = ranks[i] < ranks[t->hub] ? i : t->hub;
        t->id = cofi_hash_u64(t->id, (uint64_t)ranks[i]);
    }
    pthread_mutex_lock(&w->lock);
    t->next = w->teams;
    w->teams = t;
    w->n_holders++;
    pthread_mutex_unlock(&w->lock);
    *team_out = t;
    return COF_OK;
}

cof_status cofi_team_take_abort_word(cof_team *t)
{
    const struct cofi_device_ops *device = t->world->ops->device;
    if (!device)
        return COF_OK;
    _Atomic uint64_t *word = device->take_abort_word(t->world);
    if (!word)
        return COF_ERR_NOMEM;
    pthread_mutex_lock(&t->world->lock); /* the watcher may be ending the team */
    atomic_store(word, atomic_load(&t->own_abort));
    t->abort = word;
    pthread_mutex_unlock(&t->world->lock);
    return COF_OK;
}

static cof_status check_members(const cof_world *w, const int *ranks, int n)
{
    COF_FAIL_IF(!ranks, COF_ERR_INVALID, "ranks: NULL");
    COF_FAIL_IF(n < 1 || n > w->n_ranks, COF_ERR_INVALID, "n = %d: wanted 1 .. %d", n, w->n_ranks);
    bool member = false;
    for (int i = 0; i < n; i++) {
        COF_FAIL_IF(ranks[i] < 0 || ranks[i] >= w->n_ranks, COF_ERR_INVALID,
                    "ranks[%d] = %d: wanted 0 .. %d", i, ranks[i], w->n_ranks - 1);
        for (int j = 0; j < i; j++)
            COF_FAIL_IF(ranks[j] == ranks[i], COF_ERR_INVALID,
                        "ranks[%d] and ranks[%d] are both %d", j, i, ranks[i]);
        member |= ranks[i] == w->rank;
    }
    COF_FAIL_IF(!member, COF_ERR_INVALID, "ranks: this rank (%d) is not among them", w->rank);
    return COF_OK;
}

cof_status cof_team_create(cof_world *w, const int *ranks, int n, uint64_t tag, cof_team **team_out)
{
    COF_FAIL_IF(!w, COF_ERR_INVALID, "world: NULL");
    COF_FAIL_IF(!team_out, COF_ERR_INVALID, "team_out: NULL");
    *team_out = NULL;
    COF_TRY(cofi_world_usable(w));
    COF_TRY(check_members(w, ranks, n));
    cof_team *t;
    COF_TRY(cofi_team_make(w, ranks, n, tag, &t));
    cof_status status = cof_team_barrier(t); /* the head's team number compares list and tag */
    if (status == COF_OK && w->ops->device)
        status = cofi_team_agree(t, "team create", cofi_team_take_abort_word(t));
    if (status != COF_OK) {
        char text[COFI_ERROR_TEXT_BYTES];
        memcpy(text, cof_last_error(), sizeof text);
        cof_team_destroy(t);
        return cofi_fail_text(status, text);
    }
    *team_out = t;
    return COF_OK;
}

/* Under the world's lock. Where memory is short, messages still to come are a mismatch. */
static void remember_dead(cof_world *w, const cof_team *t)
{
    if (atomic_load(&t->status) != COF_ERR_PEER_DEAD)
        return;
    uint64_t *more = realloc(w->dead_teams, (size_t)(w->n_dead_teams + 1) * sizeof *more);
    if (!more)
        return;
    w->dead_teams = more;
    more[w->n_dead_teams++] = t->id;
}

void cof_team_destroy(cof_team *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->world->lock);
    remember_dead(t->world, t);
    for (cof_team **at = &t->world->teams; *at; at = &(*at)->next)
        if (*at == t) {
            *at = t->next;
            break;
        }
    pthread_mutex_unlock(&t->world->lock);
    if (t->abort != &t->own_abort)
        t->world->ops->device->drop_abort_word(t->world, t->abort);
    cofi_world_release(t->world);
    free(t->world_rank);
    free(t->table);
    free(t);
}

int cof_team_rank(const cof_team *t)
{
    return t->rank;
}

int cof_team_size(const cof_team *t)
{
    return t->n_ranks;
}

/* ---- split ---------------------------------------------------------------------------------- */

struct split_vote {
    int32_t inner, status;
};
_Static_assert(sizeof(struct split_vote) <= sizeof(struct cofi_vote), "fits the team's table");

/* Consecutive ranks of the team are `stride` apart in the parent, from `first` on. */
static cof_status make_part(cof_team *parent, int first, int stride, int n, uint64_t tag,
                            cof_team **team_out)
{
    int *ranks = malloc((size_t)n * sizeof *ranks);
    COF_FAIL_IF(!ranks, COF_ERR_NOMEM, "team of %d: no memory", n);
    for (int i = 0; i < n; i++)
        ranks[i] = parent->world_rank[first + i * stride];
    cof_status status = cofi_team_make(parent->world, ranks, n, tag, team_out);
    free(ranks);
    return status == COF_OK ? cofi_team_take_abort_word(*team_out) : status;
}

/* Local. The number of the parent's collective call tells this split from others. */
static cof_status make_parts(cof_team *t, int inner, cof_team **inner_out, cof_team **outer_out)
{
    COF_FAIL_IF(inner < 1 || t->n_ranks % inner, COF_ERR_INVALID,
                "inner = %d: wanted a divisor of the team's size, %d", inner, t->n_ranks);
    uint64_t tag = cofi_hash_u64(cofi_hash_u64(COFI_HASH_SEED, t->id), t->n_calls);
    COF_TRY(make_part(t, t->rank - t->rank % inner, 1, inner, cofi_hash_u64(tag, 1), inner_out));
    return make_part(t, t->rank % inner, inner, t->n_ranks / inner, cofi_hash_u64(tag, 2),
                     outer_out);
}

/* The same verdict on all ranks, that of the first one that failed. A rank that found the same by
 * itself keeps its text. */
static cof_status compare_split(const cof_team *t, const struct split_vote *votes, cof_status own)
{
    for (int i = 1; i < t->n_ranks; i++)
        COF_FAIL_IF(votes[i].inner != votes[0].inner, COF_ERR_MISMATCH,
                    "inner = %d on rank %d, %d on rank %d", votes[0].inner, t->world_rank[0],
                    votes[i].inner, t->world_rank[i]);
    for (int i = 0; i < t->n_ranks; i++) {
        cof_status status = (cof_status)votes[i].status;
        if (status != COF_OK && status == own)
            return own;
        COF_FAIL_IF(status != COF_OK, status, "team split: rank %d: %s", t->world_rank[i],
                    cof_status_text(status));
    }
    return COF_OK;
}

static cof_status split(cof_team *t, int inner, cof_team **inner_out, cof_team **outer_out)
{
    struct split_vote *votes = t->table;
    cof_status own = make_parts(t, inner, inner_out, outer_out);
    char text[COFI_ERROR_TEXT_BYTES];
    memcpy(text, cof_last_error(), sizeof text);
    struct split_vote mine = {inner, own};
    COF_TRY(cofi_team_exchange(t, "team split", &mine, votes, sizeof mine));
    cofi_fail_text(own, text);
    return compare_split(t, votes, own);
}

cof_status cof_team_split(cof_team *t, int inner, cof_team **inner_out, cof_team **outer_out)
{
    COF_FAIL_IF(!t, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(!inner_out, COF_ERR_INVALID, "inner_out: NULL");
    COF_FAIL_IF(!outer_out, COF_ERR_INVALID, "outer_out: NULL");
    *inner_out = *outer_out = NULL;
    COF_TRY(cofi_team_status(t));
    cof_status status = split(t, inner, inner_out, outer_out);
    if (status != COF_OK) {
        cof_team_destroy(*inner_out);
        cof_team_destroy(*outer_out);
        *inner_out = *outer_out = NULL;
    }
    return status;
}

/* ---- failure -------------------------------------------------------------------------------- */

void cofi_team_abort(cof_team *t, cof_status status, int world_rank, const char *text)
{
    uint64_t word = (uint16_t)(int16_t)status | (uint64_t)(world_rank + 1) << 32;
    int ok = COF_OK, writing = 1;
    if (atomic_compare_exchange_strong(&t->status, &ok, writing)) {
        snprintf(t->text, sizeof t->text, "%s", text);
        atomic_store_explicit(&t->status, status, memory_order_release);
        atomic_store_explicit(t->abort, word, memory_order_release);
    }
}

cof_status cofi_team_status(cof_team *t)
{
    COF_TRY(cofi_world_usable(t->world));
    int status = atomic_load_explicit(&t->status, memory_order_acquire);
    if (status >= COF_OK) /* 1: its text is being written on another thread; it fails next time */
        return COF_OK;
    return cofi_fail_text((cof_status)status, t->text);
}

cof_status cof_team_query(cof_team *t)
{
    COF_FAIL_IF(!t, COF_ERR_INVALID, "team: NULL");
    COF_TRY(cofi_world_usable(t->world));
    cofi_world_poll(t->world);
    COF_TRY(cofi_team_status(t));
    for (int i = 0; i < t->n_ranks; i++)
        COF_FAIL_IF(atomic_load(&t->world->state[t->world_rank[i]]) == COFI_PEER_LEFT,
                    COF_ERR_PEER_DEAD, "rank %d has left the world", t->world_rank[i]);
    cof_status first = COF_OK;
    pthread_mutex_lock(&t->world->lock);
    for (cof_arena *a = t->arenas; a && first == COF_OK; a = a->next)
        first = cofi_arena_look(a);
    pthread_mutex_unlock(&t->world->lock);
    return first;
}
