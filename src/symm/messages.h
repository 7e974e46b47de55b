/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Messages between the ranks of teams: one socket between two ranks serves all teams that hold
 * both, the living, the failed and the dead.
 *
 * An exchange of a team goes through its hub, the member of the lowest world rank, so that between
 * two ranks requests go to the lower one only, whatever the team: each member sends a request, the
 * hub replies to all. A handover goes from the team's rank 0 to each member. Every message begins
 * with a head that names team and call. A rank is in one collective call at a time.
 *
 * A call can fail on one side while the other is late, in another call, or never comes. What each
 * side has to know then to stay in step, and from where it knows it:
 *
 *   Which request a reply answers: it has the request's number, of those from that rank to the hub.
 *     A member waits for one number and skips replies with another: it gave those up.
 *   That a request was given up: something follows it, for a rank that waits sends nothing. A
 *     member that gives up sends a notice, so that something does. The hub skips such a request,
 *     and fails at once where the notice is of the call that it is in.
 *   That the hub failed before the request came: it sends a notice of its call, and remembers the
 *     call (stale->answered): that request, if it comes, is skipped. A member that is in that call
 *     takes the notice for its reply; else the notice ends the team on it, if it has not made the
 *     call yet, so that it never will, and it reads on. No other team is concerned.
 *   That a rank died: each rank sees it by itself, before it sends or after, so nobody knows what
 *     is still to come. But such a team is never made again: its requests are skipped whenever they
 *     come. A rank that has seen it may be in another team already, so before a message of another
 *     team is read and called a mismatch, this rank looks for deaths, until it knows as many as the
 *     head says that the sender knows (look_ahead); the message stays for the next call.
 *
 * A team may be made again with the number of one that failed: requests that come from a rank after
 * its first one of the new team are of the new team, so then what was remembered goes.
 *
 * A deadline that passes within a message leaves the socket there: what comes next is no head. In
 * that direction it serves no team any more (is_cut_in, is_cut_out). So a hub that fails reads the
 * requests that have begun, members send for as long as they wait for the reply, and a rank that
 * the other one tells of the failure before its message is out sends zeros for the rest of it,
 * before the next message (stale->owed). The last byte of such a message says so, and it is
 * skipped. */
#ifndef COFI_MESSAGES_H
#define COFI_MESSAGES_H

#include "symm/symm.h"

/* Members wait longer than the hub, whose error tells more; also for what is left of a message. */
#define COFI_MESSAGE_GRACE_NS INT64_C(2000000000)

/* Member to hub; hub to member; rank 0 to each member, with a descriptor; an error, to whom it may
 * concern. */
enum cofi_message_kind { COFI_REQUEST = 1, COFI_REPLY, COFI_HANDOVER, COFI_NOTICE };

struct cofi_head {
    int32_t kind, status;       /* an error's text follows instead of data */
    uint64_t team, call, bytes; /* bytes: of one rank, compared */
    uint64_t payload;           /* bytes that follow */
    uint64_t number; /* of a request, and of the one that a reply answers or a notice withdraws */
    int64_t n_dead;  /* ranks that the sender knows to have died */
    char what[16];
};

/* What is read from a rank of the team, and what came. */
struct cofi_inbox {
    cof_team *team;
    int rank; /* of the team */
    enum cofi_message_kind kind;
    const struct cofi_head *own; /* the call that this rank is in */
    void *dst;       /* NULL: data are skipped */
    int *fd_out;     /* of a handover: -1 when there was none to be had for it */
    bool of_team_only; /* a message of another team stays unread: COF_ERR_TIMEOUT */
    int64_t deadline;
    bool is_over; /* out: the error came from that rank, which does not wait for an answer */
    bool has_text; /* out: of the error */
};

/* The message of this kind for the call. On failure there is a text. A request that was read has to
 * be answered, after errors too (cofi_message_answer). */
cof_status cofi_message_next(struct cofi_inbox *inbox);
/* Whether a message of the team waits at that rank's socket. */
bool cofi_message_is_here(cof_team *team, int rank);

/* `payload` with head.payload bytes; with fd >= 0 none, but the descriptor. No text. It may
 * stop early with COF_OK when the call has failed: what is read next tells why. */
cof_status cofi_message_send(cof_team *team, int rank, struct cofi_head head, const void *payload,
                             int fd, int64_t deadline);
/* Replies to the request that was read from that rank, if there is one; an error with its text. */
cof_status cofi_message_answer(cof_team *team, int rank, struct cofi_head head,
                               const void *payload, int64_t deadline);
bool cofi_message_is_open(const cof_team *team, int rank);
/* The call is over for this rank. With `answers` that rank's request, which is still to come, is
 * answered by that. */
void cofi_message_notify(cof_team *team, int rank, struct cofi_head head, const char *text,
                         bool answers);
/* Writes the text of a failed transfer. */
cof_status cofi_message_error(cof_team *team, const char *what, int rank, cof_status status);

#endif
