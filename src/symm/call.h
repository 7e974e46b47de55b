/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A plan's call on its arena, on the dispatchers of streams.
 *
 * Every call that does something takes the arena's next epoch, in stream order, on all ranks alike.
 *   ready words  "what I announced for call e is there": waited for by equality of the epoch, then
 *                the digest is compared: another one is COF_ERR_MISMATCH
 *   ack words    "I am done with what you gave me up to call e": at least e, wrap-safe
 * The digest covers the plan, the direction, the sizes of this run and the number of empty calls
 * before it: ranks that disagree in any find out at the first word.
 *
 * An empty call does nothing on any rank: it launches nothing and leaves the epoch as it is; the
 * plan counts it, and the next digest holds the count.
 *
 * Sharing: on an arena that several plans may use, every call ends with an end-ack to all ranks,
 * and a call that finds another plan's behind it waits for all end-acks of the last epoch.
 *
 * Wrap: where (epoch & 0x3fffffff) == 1, the arena's first call apart, the call begins with a
 * meeting of all ranks, after which no word of an earlier call is on its way or waited for; each
 * rank then resets its own words of all plans (ready: 0; acks and end-acks: the epoch before) and
 * all marks, and a second meeting lets nobody signal before all have reset. So a comparison never
 * spans more than 2^30 epochs. */
#ifndef COFI_CALL_H
#define COFI_CALL_H

#include "symm/arena.h"

struct cofi_cpu_stream;

struct cofi_call {
    uint32_t direction; /* 1 forward, 2 backward; 0: the operator has one */
    uint64_t n_empty;   /* empty calls of the plan before this one, counted as they were made */
    uint64_t sizes[COFI_CALL_SIZES]; /* free per run */
};

/* On the host, as calls are enqueued: COF_ERR_INVALID while another plan's whole is unfinished. */
cof_status cofi_call_allowed(const struct cofi_binding *binding);
/* The plan has made n_made of the n_calls calls of a whole. */
void cofi_call_made(struct cofi_binding *binding, int n_made, int n_calls);

/* Next epoch. Returns the arena's failure, if any. */
cof_status cofi_call_begin(struct cofi_binding *binding, const struct cofi_call *call);

/* After everything of the call that reads or writes symmetric memory. */
void cofi_call_end(struct cofi_binding *binding);

/* In a call with COFI_CALL_ALWAYS: the arena's failure. Where the stream had failed, and so this
 * rank's part of a call did not run, the arena fails on all ranks. */
cof_status cofi_call_failure(struct cofi_binding *binding, struct cofi_cpu_stream *stream);

/* The 31 bits by which ranks find out that they are not in the same call. */
uint64_t cofi_call_digest(const struct cofi_binding *binding, const struct cofi_call *call);

static inline uint32_t cofi_call_epoch(const struct cofi_binding *binding)
{
    return atomic_load_explicit(&binding->arena->epoch, memory_order_relaxed);
}

/* Stores {epoch of the call, digest} in the peer's word of this purpose and this writer. */
void cofi_call_signal(struct cofi_binding *binding, int peer, int purpose);

/* Waits for the writer's word of this purpose. An ack for epoch 0 is none: there at once. */
cof_status cofi_call_wait_ready(struct cofi_binding *binding, int writer, int purpose,
                                const char *step);
cof_status cofi_call_wait_ack(struct cofi_binding *binding, int writer, int purpose, uint32_t epoch,
                              const char *step);

#endif
