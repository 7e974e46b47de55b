/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The one bounded wait of the host: spin briefly (only where every thread has a core of its own),
 * then yield, then sleep on a futex, until a condition holds, a poll reports an error, or the
 * deadline passes.
 *
 * Pairing: the waiter counts itself in `sleepers` before it looks at the condition for the last
 * time and sleeps; the waker stores the word (sequentially consistent) and then reads `sleepers`
 * (likewise), so one of the two sees the other. A sleep is bounded all the same. */
#ifndef COFI_WAIT_H
#define COFI_WAIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/clock.h"
#include "cofuse/status.h"

#define COFI_SLEEP_NS INT64_C(5000000)       /* longest sleep of a wait for another rank */
#define COFI_IDLE_SLEEP_NS INT64_C(1000000000) /* longest sleep of a thread without work */

struct cofi_wait {
    bool (*ready)(void *ctx);
    cof_status (*poll)(void *ctx); /* before the first sleep and after each one; NULL: none */
    void *ctx;
    _Atomic uint32_t *word; /* changes when the condition may have come true */
    _Atomic uint32_t *sleepers;
    int64_t deadline;  /* of cofi_now(); COFI_NEVER */
    int64_t max_sleep; /* ns */
    bool spin;         /* every thread has a core of its own */
    bool shared;       /* the words lie in memory shared between processes */
};

/* COF_OK when ready, COF_ERR_TIMEOUT (no text written), or what poll returned. */
cof_status cofi_wait(const struct cofi_wait *wait);

/* After the word was stored: wakes all sleepers, if any. */
void cofi_wake(_Atomic uint32_t *word, _Atomic uint32_t *sleepers, bool shared);

#endif
