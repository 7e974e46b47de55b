/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Statuses and error texts.
 *
 * Every call that can fail returns a cof_status: 0 is success, negatives are errors. The groups say
 * what the caller has to rebuild: nothing but the call, the plan, the arena, the team, or the
 * process. The text behind a status is had from cof_last_error() on the same thread.
 */
#ifndef COFUSE_STATUS_H
#define COFUSE_STATUS_H

#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * One line per status: X(name, value, text).
 *
 *  -1 ..  -9  the call:    correct the arguments and call again; nothing was changed.
 * -10 .. -19  the plan:    the ranks disagree; destroy the plan (or the object being made).
 * -20 .. -29  the arena:   a wait ran out, a queue stayed full in the middle of a call, or a rank
 *                          poisoned the arena; destroy plan and arena.
 * -30 .. -39  the team:    a rank of the team is gone; destroy every team that holds it.
 * -40 .. -49  the process: the operating system refused something, or Cofuse has a bug.
 */
#define COF_STATUS_MAP(X)                                                                          \
    X(COF_OK, 0, "ok")                                                                             \
    X(COF_ERR_INVALID, -1, "invalid argument")                                                     \
    X(COF_ERR_UNSUPPORTED, -2, "not supported here")                                               \
    X(COF_ERR_NOMEM, -3, "out of memory")                                                          \
    X(COF_ERR_MISMATCH, -10, "the ranks disagree")                                                 \
    X(COF_ERR_TIMEOUT, -20, "deadline passed")                                                     \
    X(COF_ERR_POISONED, -21, "arena poisoned by an earlier failure")                               \
    X(COF_ERR_BUSY, -22, "queue stayed full until the deadline")                                   \
    X(COF_ERR_PEER_DEAD, -30, "a rank of the team is gone")                                        \
    X(COF_ERR_SYSTEM, -40, "the operating system refused")                                         \
    X(COF_ERR_INTERNAL, -41, "internal error")

typedef enum cof_status {
#define COF_STATUS_ENUM(name, value, text) name = value,
    COF_STATUS_MAP(COF_STATUS_ENUM)
#undef COF_STATUS_ENUM
} cof_status;

/** The status as its C name ("COF_ERR_TIMEOUT"); "COF_ERR_?" for a value that is none. */
COF_API const char *cof_status_name(cof_status status);

/** The status in a few words ("deadline passed"); "unknown status" for a value that is none. */
COF_API const char *cof_status_text(cof_status status);

/**
 * The text of the last error on this thread: what was found, with the argument or rank, the values
 * wanted and seen, and where in the source. At most 511 bytes, "" when no call has failed yet on
 * this thread. Valid until the next failing call of the same thread. Success does not clear it.
 */
COF_API const char *cof_last_error(void);

/**
 * Log callback. `level` is 1 (error), 2 (once per process) or 3 (once per plan): runs log nothing
 * but errors. `text` has no newline and is valid during the call only. It may be called from
 * Cofuse's worker threads, several at once, and must not call Cofuse.
 */
typedef void (*cof_log_fn)(void *user, int level, const char *text);

/**
 * Sends log lines of level <= `level` to `fn`; fn = NULL returns to the default (stderr for the
 * level in the variable COFUSE_LOG, nothing when that is 0). Process-wide; call it while no other
 * Cofuse call runs.
 */
COF_API void cof_log_set(cof_log_fn fn, void *user, int level);

#ifdef __cplusplus
}
#endif
#endif
