/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The exchanges of teams, through the hub of the team: each member sends to it, it answers all.
 * Every message begins with a head that names team, call and number, so that ranks in different
 * calls find out at once. The hub is the member of the lowest world rank, so that ranks that list
 * the same members in another order meet at one hub, which tells them.
 *
 * A failed exchange ends the team, but not the others that share its sockets. The hub answers every
 * request that has come with the error; after a mismatch, which those in other calls must learn of,
 * it waits a little for the requests of all. To the others it sends a notice, and a member that
 * gives up sends one to it (messages.h). */
#include <stdio.h>
#include <string.h>

#include "core/clock.h"
#include "symm/messages.h"

#define MAX_EXCHANGE_BYTES ((size_t)1 << 20)

static int64_t members_deadline(int64_t deadline)
{
    return deadline == COFI_NEVER ? COFI_NEVER : deadline + COFI_MESSAGE_GRACE_NS;
}

/* ---- hub ------------------------------------------------------------------------------------ */

/* A member whose request had not been read. A mismatch answers whatever call it is in. */
static void tell_unread(cof_team *t, int rank, const struct cofi_head *head, const char *text,
                        int64_t until)
{
    bool waits = head->status == COF_ERR_MISMATCH;
    struct cofi_inbox in = {.team = t, .rank = rank, .kind = COFI_REQUEST, .own = head,
                            .of_team_only = !waits, .deadline = until};
    if (waits || cofi_message_is_here(t, rank))
        cofi_message_next(&in);
    if (cofi_message_is_open(t, rank))
        cofi_message_answer(t, rank, *head, text, 0);
    else if (!in.is_over) /* of a team that lost a rank requests are skipped anyway */
        cofi_message_notify(t, rank, *head, text, head->status != COF_ERR_PEER_DEAD);
}

/* The hub's error, which it met at this inbox, to all. */
static cof_status fail_all(struct cofi_inbox *in, struct cofi_head head, cof_status status)
{
    cof_team *t = in->team;
    char text[COFI_ERROR_TEXT_BYTES] = "";
    snprintf(text, sizeof text, "%s", cof_last_error());
    head.status = status;
    bool is_read = in->is_over || cofi_message_is_open(t, in->rank);
    int64_t until = cofi_now() + COFI_MESSAGE_GRACE_NS;
    for (int i = 0; i < t->n_ranks; i++)
        if (i != t->rank)
            cofi_message_answer(t, i, head, text, 0);
    for (int i = in->rank + is_read; i < t->n_ranks; i++)
        if (i != t->rank)
            tell_unread(t, i, &head, text, until < in->deadline ? until : in->deadline);
    return cofi_fail_text(status, text);
}

static cof_status exchange_hub(cof_team *t, struct cofi_head head, char *dst, int64_t deadline)
{
    for (int i = 0; i < t->n_ranks; i++) {
        struct cofi_inbox in = {.team = t, .rank = i, .kind = COFI_REQUEST, .own = &head,
                                .dst = dst + (size_t)i * head.bytes, .deadline = deadline};
        cof_status status = i == t->rank ? COF_OK : cofi_message_next(&in);
        if (status != COF_OK)
            return fail_all(&in, head, status);
    }
    head.payload = (uint64_t)t->n_ranks * head.bytes;
    cof_status first = COF_OK;
    for (int i = 0; i < t->n_ranks; i++) { /* to all that can be reached, whoever cannot */
        cof_status status =
            i == t->rank ? COF_OK
                         : cofi_message_answer(t, i, head, dst, members_deadline(deadline));
        if (status != COF_OK && first == COF_OK)
            first = cofi_message_error(t, head.what, i, status);
    }
    return first;
}

/* ---- member --------------------------------------------------------------------------------- */

static void give_up(cof_team *t, struct cofi_head own, cof_status status)
{
    char text[COFI_ERROR_TEXT_BYTES] = "";
    snprintf(text, sizeof text, "%s", cof_last_error());
    own.status = status;
    cofi_message_notify(t, t->hub, own, text, false);
    cofi_fail_text(status, text);
}

static cof_status exchange_member(cof_team *t, struct cofi_head own, const void *src, char *dst,
                                  int64_t deadline)
{
    own.kind = COFI_REQUEST;
    own.payload = own.bytes;
    own.number = ++t->world->stale[t->world_rank[t->hub]].n_sent;
    struct cofi_inbox in = {.team = t, .rank = t->hub, .kind = COFI_REPLY, .own = &own, .dst = dst,
                            .deadline = members_deadline(deadline)};
    cof_status status = cofi_message_send(t, t->hub, own, src, -1, in.deadline);
    /* A hub that has hung up may have left its error before: read on. */
    if (status == COF_OK || status == COF_ERR_PEER_DEAD)
        status = cofi_message_next(&in);
    else
        status = cofi_message_error(t, own.what, t->hub, status);
    if (status != COF_OK && !in.is_over)
        give_up(t, own, status);
    return status;
}

static struct cofi_head next_head(cof_team *t, const char *what, size_t bytes)
{
    struct cofi_head head = {.team = t->id, .call = t->n_calls++, .bytes = bytes};
    snprintf(head.what, sizeof head.what, "%s", what);
    return head;
}

cof_status cofi_team_exchange(cof_team *t, const char *what, const void *src, void *dst,
                              size_t bytes)
{
    COF_TRY(cofi_team_status(t));
    struct cofi_head head = next_head(t, what, bytes);
    int64_t deadline = cofi_deadline(t->world->init_timeout);
    memcpy((char *)dst + (size_t)t->rank * bytes, src, bytes);
    if (t->n_ranks == 1)
        return COF_OK;
    cof_status status = t->rank == t->hub ? exchange_hub(t, head, dst, deadline)
                                          : exchange_member(t, head, src, dst, deadline);
    if (status != COF_OK)
        cofi_team_abort(t, status, -1, cof_last_error());
    return status;
}

cof_status cof_team_barrier(cof_team *t)
{
    COF_FAIL_IF(!t, COF_ERR_INVALID, "team: NULL");
    char dst[1];
    return cofi_team_exchange(t, "barrier", "", dst, 0);
}

cof_status cof_team_allgather(cof_team *t, const void *src, void *dst, size_t bytes)
{
    COF_FAIL_IF(!t, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(bytes && (!src || !dst), COF_ERR_INVALID, "%s: NULL", src ? "dst" : "src");
    COF_FAIL_IF(bytes > MAX_EXCHANGE_BYTES, COF_ERR_INVALID, "bytes = %zu: wanted at most %zu",
                bytes, MAX_EXCHANGE_BYTES);
    return cofi_team_exchange(t, "allgather", src, dst, bytes);
}

/* ---- agreement ------------------------------------------------------------------------------ */

cof_status cofi_team_agree(cof_team *t, const char *what, cof_status own)
{
    struct cofi_vote mine = {.status = own}, *votes = t->table;
    int32_t *statuses = t->table;
    if (own != COF_OK)
        snprintf(mine.text, sizeof mine.text, "%s", cof_last_error());
    COF_TRY(cofi_team_exchange(t, what, &mine.status, statuses, sizeof mine.status));
    int first = 0;
    while (first < t->n_ranks && statuses[first] == COF_OK)
        first++;
    if (first == t->n_ranks)
        return COF_OK;
    COF_TRY(cofi_team_exchange(t, what, &mine, votes, sizeof mine));
    if (first == t->rank)
        return cofi_fail_text(own, mine.text);
    votes[first].text[sizeof votes[first].text - 1] = '\0';
    return COF_FAIL((cof_status)votes[first].status, "on rank %d: %s", t->world_rank[first],
                    votes[first].text);
}

/* ---- handing over --------------------------------------------------------------------------- */

/* The call has failed on this rank: notices to all. Those before `end` have the descriptor, and ask
 * the hub for the next exchange. */
static void fail_handover(cof_team *t, struct cofi_head head, cof_status status, int end)
{
    char text[COFI_ERROR_TEXT_BYTES] = "";
    snprintf(text, sizeof text, "%s", cof_last_error());
    head.status = status;
    for (int i = 0; i < t->n_ranks; i++) {
        struct cofi_head next = head;
        next.call += i < end;
        if (i != t->rank)
            cofi_message_notify(t, i, next, text, t->rank == t->hub && i < end);
    }
    cofi_fail_text(status, text);
}

static cof_status hand_out_fd(cof_team *t, struct cofi_head head, int fd, int64_t deadline)
{
    head.kind = COFI_HANDOVER;
    for (int i = 1; i < t->n_ranks; i++) {
        cof_status status = cofi_message_send(t, i, head, NULL, fd, deadline);
        if (status == COF_OK)
            continue;
        status = cofi_message_error(t, head.what, i, status);
        fail_handover(t, head, status, i);
        return status;
    }
    return COF_OK;
}

static cof_status take_fd(cof_team *t, struct cofi_head own, int *fd_out, int64_t deadline)
{
    struct cofi_inbox in = {.team = t, .rank = 0, .kind = COFI_HANDOVER, .own = &own,
                            .fd_out = fd_out, .deadline = members_deadline(deadline)};
    cof_status status = cofi_message_next(&in);
    if (status == COF_OK)
        return status;
    char text[COFI_ERROR_TEXT_BYTES] = "";
    snprintf(text, sizeof text, "%s", cof_last_error());
    own.status = status;
    cofi_message_answer(t, 0, own, text, 0); /* it may have sent a request of another call */
    cofi_fail_text(status, text);
    if (t->rank == t->hub)
        fail_handover(t, own, status, t->n_ranks);
    return status;
}

cof_status cofi_team_bcast_fd(cof_team *t, int fd, int *fd_out)
{
    COF_TRY(cofi_team_status(t));
    struct cofi_head head = next_head(t, "memory handover", 0);
    int64_t deadline = cofi_deadline(t->world->init_timeout);
    *fd_out = t->rank == 0 ? fd : -1;
    cof_status status = t->rank == 0 ? hand_out_fd(t, head, fd, deadline)
                                     : take_fd(t, head, fd_out, deadline);
    if (status != COF_OK)
        cofi_team_abort(t, status, -1, cof_last_error());
    return status;
}

cof_status cofi_team_bcast_pointer(cof_team *t, void *pointer, void **pointer_out)
{
    void **all = t->table;
    COF_TRY(cofi_team_exchange(t, "memory handover", &pointer, all, sizeof pointer));
    *pointer_out = all[0];
    return COF_OK;
}
