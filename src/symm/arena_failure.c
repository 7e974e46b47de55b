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

/* Another rank's poison becomes this rank's failure, with the text that rank left. */
static cof_status take_poison(cof_arena *a, uint64_t code)
{
    int by = (int)(code >> 32) - 1;
    cof_status status = (cof_status)(int16_t)(code & 0xffff);
    char theirs[COFI_ERROR_TEXT_BYTES] = "(no text)", text[COFI_ERROR_TEXT_BYTES];
    a->ops->get(a, theirs, by, offsetof(struct cofi_control, text), sizeof theirs);
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
