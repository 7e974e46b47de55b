/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "symm/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/config.h"
#include "core/faults.h"
#include "core/wait.h"
#include "symm/engine.h"

#define POISON_BIT (UINT64_C(1) << 63)

/* ---- open and close ------------------------------------------------------------------------- */

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

size_t cofi_arena_slab_bytes(int n_ranks, size_t data_bytes, int n_purposes)
{
    size_t words = (size_t)n_ranks * (size_t)n_purposes * sizeof(struct cofi_line);
    return round_up(sizeof(struct cofi_control) + words + data_bytes, 4096);
}

cof_status cofi_arena_open(cof_team *team, const char *op, size_t data_bytes, int n_purposes,
                           cof_arena **arena_out)
{
    *arena_out = NULL;
    cof_arena *a = calloc(1, sizeof *a);
    char **base = calloc((size_t)team->n_ranks, sizeof *base);
    cof_status status = a && base ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
    status = cofi_team_agree(team, "arena create", status);
    if (status == COF_OK) {
        a->team = team;
        a->rank = team->rank;
        a->n_ranks = team->n_ranks;
        a->n_purposes = n_purposes;
        a->words_offset = sizeof(struct cofi_control);
        a->data_offset = a->words_offset + (size_t)a->n_ranks * (size_t)n_purposes *
                                               sizeof(struct cofi_line);
        a->slab_bytes = cofi_arena_slab_bytes(a->n_ranks, data_bytes, n_purposes);
        a->base = base;
        a->op = op;
        a->run_timeout = team->world->run_timeout;
        a->force_staged = cofi_config_int(COFI_VAR_FORCE_STAGED) != 0;
        status = team->world->ops->map(a);
    }
    if (status != COF_OK) {
        free(base);
        free(a);
        return status;
    }
    pthread_mutex_lock(&team->world->lock);
    a->next = team->arenas;
    team->arenas = a;
    pthread_mutex_unlock(&team->world->lock);
    *arena_out = a;
    return COF_OK;
}

void cofi_arena_close(cof_arena *a)
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
    a->team->world->ops->unmap(a);
    free(a->base);
    free(a);
}

static struct cofi_control *control_of(cof_arena *a, int rank)
{
    return (struct cofi_control *)a->base[rank];
}

static size_t word_offset(const cof_arena *a, int writer, int purpose)
{
    return a->words_offset +
           ((size_t)purpose * (size_t)a->n_ranks + (size_t)writer) * sizeof(struct cofi_line);
}

/* ---- failure -------------------------------------------------------------------------------- */

cof_status cofi_arena_status(cof_arena *a)
{
    int status = atomic_load_explicit(&a->status, memory_order_acquire);
    return status == COF_OK ? COF_OK : cofi_fail_text((cof_status)status, a->text);
}

/* True for the first failure of this rank. */
static bool remember(cof_arena *a, cof_status status)
{
    int ok = COF_OK;
    if (!atomic_compare_exchange_strong(&a->failing, &ok, 1))
        return false;
    snprintf(a->text, sizeof a->text, "%s", cof_last_error());
    atomic_store_explicit(&a->status, status, memory_order_release);
    return true;
}

cof_status cofi_arena_fail(cof_arena *a, cof_status status)
{
    if (!remember(a, status) || COFI_FAULT(POISON, a->rank))
        return status;
    struct cofi_control *own = control_of(a, a->rank);
    snprintf(own->text, sizeof own->text, "%s", a->text);
    uint64_t code = (uint16_t)(int16_t)status | (uint64_t)(a->rank + 1) << 32;
    for (int r = 0; r < a->n_ranks; r++) {
        struct cofi_line *poison = &control_of(a, r)->poison;
        uint64_t none = 0;
        atomic_compare_exchange_strong(&poison->value, &none, code);
    }
    return status;
}

/* Another rank's poison becomes this rank's failure, with the text that rank left. */
static cof_status take_poison(cof_arena *a, uint64_t code)
{
    int by = (int)(code >> 32) - 1;
    cof_status status = (cof_status)(int16_t)(code & 0xffff);
    char text[COFI_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "told by rank %d: %.*s", a->team->world_rank[by],
             (int)sizeof text - 32, control_of(a, by)->text);
    cofi_fail_text(status, text);
    remember(a, status);
    return status;
}

static uint64_t own_poison(cof_arena *a)
{
    return atomic_load_explicit(&control_of(a, a->rank)->poison.value, memory_order_acquire);
}

cof_status cofi_arena_look(cof_arena *a)
{
    COF_TRY(cofi_arena_status(a));
    uint64_t poison = own_poison(a);
    return poison ? take_poison(a, poison) : COF_OK;
}

/* ---- calls ---------------------------------------------------------------------------------- */

cof_status cofi_arena_begin(cof_arena *a, uint32_t direction, uint64_t digest)
{
    COF_TRY(cofi_arena_look(a));
    a->epoch = a->epoch == UINT32_MAX ? 1 : a->epoch + 1;
    a->direction = direction;
    a->digest = digest & 0x7fffffff;
    struct cofi_call_record *record = &control_of(a, a->rank)->record;
    atomic_store_explicit(&record->direction, direction, memory_order_relaxed);
    atomic_store_explicit(&record->epoch, a->epoch, memory_order_release);
    return COF_OK;
}

void cofi_arena_signal(cof_arena *a, int peer, int purpose)
{
    a->team->world->ops->signal(a, peer, word_offset(a, a->rank, purpose),
                                (uint64_t)a->epoch | a->digest << 32);
}

struct word_wait {
    cof_arena *arena;
    struct cofi_line *line;
    uint32_t want;
    bool is_ack;
    int peer; /* of the team */
};

static bool word_is_there(const struct word_wait *w, uint64_t value)
{
    uint32_t epoch = (uint32_t)value;
    return w->is_ack ? (int32_t)(epoch - w->want) >= 0 : epoch == w->want;
}

static bool word_ready(void *ctx)
{
    struct word_wait *w = ctx;
    cof_arena *a = w->arena;
    uint64_t value = atomic_load_explicit(&w->line->value, memory_order_seq_cst);
    return word_is_there(w, value) || value & POISON_BIT || own_poison(a) != 0 ||
           atomic_load_explicit(&a->team->abort, memory_order_acquire) != 0;
}

/* Runs every few milliseconds of a long wait. */
static cof_status word_poll(void *ctx)
{
    struct word_wait *w = ctx;
    cof_world *world = w->arena->team->world;
    cofi_world_poll(world);
    int r = w->arena->team->world_rank[w->peer];
    if (r != world->rank && atomic_load(&world->state[r]) == COFI_PEER_LEFT)
        return COF_ERR_PEER_DEAD;
    return COF_OK;
}

static const char *direction_name(uint32_t direction)
{
    return direction == 1 ? "forward" : direction == 2 ? "backward" : "no call";
}

/* One text for every way a wait can end badly: operator, ranks, step, value wanted, value seen. */
static cof_status wait_failed(const struct word_wait *w, cof_status status, const char *step)
{
    cof_arena *a = w->arena;
    uint64_t value = atomic_load_explicit(&w->line->value, memory_order_acquire);
    struct cofi_call_record *record = &control_of(a, w->peer)->record;
    uint32_t at = atomic_load_explicit(&record->epoch, memory_order_acquire);
    int r = a->team->world_rank[w->peer];
    const char *why = status == COF_ERR_MISMATCH ? "ranks disagree about this call"
                      : status == COF_ERR_TIMEOUT ? "deadline passed"
                                                  : "that rank is gone";
    COF_FAIL(
        status,
        "%s %s: rank %d waited for rank %d at \"%s\": %s (waited %g s at most); wanted epoch %u "
        "digest %08x, saw epoch %u digest %08x; rank %d is in its call %u (%s)",
        a->op, direction_name(a->direction), a->team->world->rank, r, step, why, a->run_timeout,
        w->want, (unsigned)a->digest, (uint32_t)value, (unsigned)(value >> 32 & 0x7fffffff), r, at,
        direction_name(atomic_load_explicit(&record->direction, memory_order_relaxed)));
    return cofi_arena_fail(a, status);
}

static cof_status wait_word(cof_arena *a, int writer, int purpose, uint32_t want, bool is_ack,
                            const char *step)
{
    struct word_wait w = {
        .arena = a,
        .line = (struct cofi_line *)(a->base[a->rank] + word_offset(a, writer, purpose)),
        .want = want,
        .is_ack = is_ack,
        .peer = writer,
    };
    cof_status status = cofi_wait(&(struct cofi_wait){
        .ready = word_ready, .poll = word_poll, .ctx = &w,
        .word = (_Atomic uint32_t *)(void *)&w.line->value, .sleepers = &w.line->sleepers,
        .deadline = cofi_deadline(a->run_timeout), .max_sleep = COFI_SLEEP_NS,
        .spin = a->team->world->own_cores, .shared = true});
    uint64_t poison = own_poison(a);
    if (poison)
        return take_poison(a, poison);
    if (status != COF_OK)
        return wait_failed(&w, status, step);
    uint64_t value = atomic_load_explicit(&w.line->value, memory_order_acquire);
    if (!word_is_there(&w, value)) { /* the team's abort word ended the wait */
        status = cofi_team_status(a->team);
        return cofi_arena_fail(a, status == COF_OK ? COF_ERR_PEER_DEAD : status);
    }
    if (!is_ack && (value >> 32 & 0x7fffffff) != a->digest)
        return wait_failed(&w, COF_ERR_MISMATCH, step);
    return COF_OK;
}

cof_status cofi_arena_wait_ready(cof_arena *a, int writer, int purpose, const char *step)
{
    return wait_word(a, writer, purpose, a->epoch, false, step);
}

cof_status cofi_arena_wait_ack(cof_arena *a, int writer, int purpose, uint32_t epoch,
                               const char *step)
{
    return wait_word(a, writer, purpose, epoch, true, step);
}

/* ---- transfers ------------------------------------------------------------------------------ */

static bool is_direct(const cof_arena *a)
{
    return (a->team->world->ops->caps & COFI_CAP_MAPPED) && !a->force_staged;
}

void *cofi_arena_destination(cof_arena *a, int peer, size_t offset, void *staging)
{
    return is_direct(a) ? a->base[peer] + a->data_offset + offset : staging;
}

void cofi_arena_deliver(cof_arena *a, int peer, size_t offset, const void *destination,
                        size_t bytes)
{
    if (!is_direct(a))
        a->team->world->ops->put(a, peer, a->data_offset + offset, destination, bytes);
}

void cofi_arena_get(cof_arena *a, void *dst, int peer, size_t offset, size_t bytes)
{
    a->team->world->ops->get(a, dst, peer, a->data_offset + offset, bytes);
}
