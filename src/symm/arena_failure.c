/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* How an arena fails: on this rank, and by the poison of another. */
#include <stdio.h>
#include <string.h>

#include "core/faults.h"
#include "symm/engine.h"

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

/* The text lies in this rank's control block before anyone's poison word points there. Where two
 * ranks fail at once the later code stands: either has a text behind it. */
cof_status cofi_arena_fail(cof_arena *a, cof_status status)
{
    if (!remember(a, status) || COFI_FAULT(POISON, a->rank))
        return status;
    struct cofi_control *own = cofi_own_control(a);
    snprintf(own->text, sizeof own->text, "%s", a->text);
    uint64_t code = (uint16_t)(int16_t)status | (uint64_t)(a->rank + 1) << 32;
    for (int i = 1; i <= a->n_ranks; i++)
        a->ops->signal(a, (a->rank + i) % a->n_ranks, offsetof(struct cofi_control, poison), code);
    return status;
}

static uint64_t load_fault(cof_arena *a, int rank, size_t field)
{
    return a->ops->load(a, rank, offsetof(struct cofi_control, fault) + field);
}

static void load_fault_text(cof_arena *a, int rank, size_t field, int n_words, char *text)
{
    for (int i = 0; i < n_words; i++) {
        uint64_t word = load_fault(a, rank, field + 8 * (size_t)i);
        memcpy(text + 8 * i, &word, sizeof word);
    }
    text[8 * n_words] = '\0';
}

/* What the device of a rank found, as the text that its host would have written. */
static void describe_fault(cof_arena *a, int by, cof_status status)
{
#define FIELD(name) offsetof(struct cofi_fault, name)
    char op[8 * COFI_NAME_WORDS + 1], step[8 * COFI_STEP_WORDS + 1];
    load_fault_text(a, by, FIELD(name), COFI_NAME_WORDS, op);
    load_fault_text(a, by, FIELD(step), COFI_STEP_WORDS, step);
    struct cofi_wait_end end = {
        .rank = by, .writer = (int)(load_fault(a, by, FIELD(writer)) % (uint64_t)a->n_ranks),
        .status = status, .op = *op ? op : NULL,
        .direction = (uint32_t)load_fault(a, by, FIELD(direction)),
        .want = load_fault(a, by, FIELD(want)), .seen = load_fault(a, by, FIELD(seen)),
        .digest = load_fault(a, by, FIELD(digest)), .step = step,
        .timeout = 1e-9 * (double)load_fault(a, by, FIELD(timeout_ns))};
#undef FIELD
    cofi_wait_text(a, &end);
}

/* The text that belongs to a poison code, from the rank that wrote it. */
static void describe_poison(cof_arena *a, int by, cof_status status, uint64_t code, char *text)
{
    if (code & COFI_POISON_FAULT) {
        describe_fault(a, by, status);
        snprintf(text, COFI_ERROR_TEXT_BYTES, "%s", cof_last_error());
    } else {
        a->ops->get(a, text, by, offsetof(struct cofi_control, text), COFI_ERROR_TEXT_BYTES);
    }
}

/* What ended the team, where a device's wait ended by that: the wait itself knows only that it is
 * so. COF_OK: something else did. */
static cof_status team_end(cof_arena *a, cof_status status, uint64_t code)
{
    bool may_be = (code & COFI_POISON_FAULT) && status == COF_ERR_PEER_DEAD;
    return may_be ? cofi_team_status(a->team) : COF_OK;
}

/* A poison becomes this rank's failure, with the text of the rank that wrote it: another one, or
 * this rank's own device. */
static cof_status take_poison(cof_arena *a, uint64_t code)
{
    int by = (int)(code >> 32) - 1;
    cof_status status = (cof_status)(int16_t)(code & 0xffff);
    char theirs[COFI_ERROR_TEXT_BYTES] = "(no text)", text[COFI_ERROR_TEXT_BYTES];
    cof_status ended = team_end(a, status, code);
    if (ended != COF_OK) {
        remember(a, ended);
        return ended;
    }
    describe_poison(a, by, status, code, theirs);
    if (by == a->rank)
        snprintf(text, sizeof text, "%s", theirs);
    else
        snprintf(text, sizeof text, "told by rank %d: %.*s", a->team->world_rank[by],
                 (int)sizeof text - 32, theirs);
    cofi_fail_text(status, text);
    remember(a, status);
    return status;
}

cof_status cofi_arena_look(cof_arena *a)
{
    COF_TRY(cofi_arena_status(a));
    uint64_t poison =
        atomic_load_explicit(&cofi_own_control(a)->poison.value, memory_order_acquire);
    return poison ? take_poison(a, poison) : COF_OK;
}
