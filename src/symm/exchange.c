/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The exchanges of teams, through rank 0 of the team: each member sends to it, it answers all.
 * Every message begins with a head that names team, call and number, so that ranks in different
 * calls find out at once.
 *
 * A failed exchange ends the team, but not the others that share its sockets. Rank 0 answers every
 * member with the error, also those it has not heard yet, and skips their next request, which is
 * answered by that; a member that gives up skips rank 0's next reply (world->stale).
 *
 * Not so when a rank died: every rank may see that by itself, before it sends or after, so nobody
 * knows what is still to come. But such a team can never be made again, so that messages of its
 * number are skipped whenever they come.
 *
 * A deadline that passes within a message leaves the socket there: what comes next is no head. In
 * that direction it serves no team any more (is_cut_in, is_cut_out). */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/clock.h"
#include "symm/symm.h"

#define GRACE_NS INT64_C(2000000000) /* members wait longer than rank 0, whose error tells more */
#define WHAT_BYTES 16
#define MAX_EXCHANGE_BYTES ((size_t)1 << 20)

enum { REQUEST = 1, REPLY = 2 }; /* member to rank 0, rank 0 to member */

struct head {
    int32_t kind, status;       /* a reply that is an error: the text follows instead of data */
    uint64_t team, call, bytes; /* bytes: of one rank, compared */
    uint64_t payload;           /* bytes that follow */
    char what[WHAT_BYTES];
};

static int socket_of(const cof_team *t, int rank)
{
    return t->world->socket[t->world_rank[rank]];
}

static struct cofi_stale *stale_of(const cof_team *t, int rank)
{
    return &t->world->stale[t->world_rank[rank]];
}

static cof_status peer_error(cof_team *t, const char *what, int rank, cof_status status)
{
    int r = t->world_rank[rank];
    if (cofi_team_status(t) != COF_OK)
        return cofi_team_status(t);
    COF_FAIL_IF(status == COF_ERR_TIMEOUT && (stale_of(t, rank)->is_cut_in ||
                                              stale_of(t, rank)->is_cut_out), status,
                "%s: a message between ranks %d and %d was cut off when %g s had passed; their "
                "socket cannot be used any more", what, t->world->rank, r, t->world->init_timeout);
    if (status == COF_ERR_TIMEOUT)
        return COF_FAIL(status, "%s: rank %d%s did not come within %g s; rank %d waited for it",
                        what, r,
                        rank == 0 && t->n_ranks > 2 ? ", or a rank that it waits for," : "",
                        t->world->init_timeout, t->world->rank);
    if (status == COF_ERR_PEER_DEAD) {
        cofi_world_poll(t->world);
        /* A bye is there a moment before the hang-up that the poll looks for. */
        bool left = atomic_load(&t->world->state[r]) == COFI_PEER_LEFT ||
                    cofi_link_said_bye(t->world->socket[r]);
        return COF_FAIL(status, "%s: rank %d (process %d) %s; rank %d waited for it", what, r,
                        t->world->hello[r].pid, left ? "has left the world" : "died",
                        t->world->rank);
    }
    return COF_FAIL(status, "%s: socket to rank %d failed", what, r);
}

/* ---- messages ------------------------------------------------------------------------------- */

/* A head is short: the socket takes it whole or not at all. */
static cof_status send_message(cof_team *t, int rank, const struct head *head, const void *payload,
                               int64_t deadline)
{
    bool *is_cut = &stale_of(t, rank)->is_cut_out;
    if (*is_cut)
        return COF_ERR_TIMEOUT;
    COF_TRY(cofi_link_send(socket_of(t, rank), head, sizeof *head, deadline));
    cof_status status = cofi_link_send(socket_of(t, rank), payload, head->payload, deadline);
    *is_cut = status == COF_ERR_TIMEOUT;
    return status;
}

static cof_status send_fd(cof_team *t, int rank, const struct head *head, int fd, int64_t deadline)
{
    bool *is_cut = &stale_of(t, rank)->is_cut_out;
    if (*is_cut)
        return COF_ERR_TIMEOUT;
    cof_status status = cofi_link_send_fd(socket_of(t, rank), fd, head, sizeof *head, deadline);
    *is_cut = status == COF_ERR_TIMEOUT; /* perhaps before the first byte: not told apart */
    return status;
}

/* Of a message that has begun. */
static cof_status receive(cof_team *t, int rank, void *data, size_t bytes, int64_t deadline)
{
    cof_status status = cofi_link_recv(socket_of(t, rank), data, bytes, deadline);
    stale_of(t, rank)->is_cut_in |= status == COF_ERR_TIMEOUT;
    return status;
}

static cof_status receive_fd(cof_team *t, int rank, struct head *h, int *fd_out, int64_t deadline)
{
    cof_status status = cofi_link_recv_fd(socket_of(t, rank), fd_out, h, sizeof *h, deadline);
    stale_of(t, rank)->is_cut_in |= status == COF_ERR_TIMEOUT;
    if (status != COF_OK && *fd_out >= 0) {
        close(*fd_out);
        *fd_out = -1;
    }
    return status;
}

static cof_status check_head(const cof_team *t, const struct head *own, const struct head *h,
                             int rank)
{
    int r = t->world_rank[rank];
    COF_FAIL_IF(strncmp(h->what, own->what, WHAT_BYTES), COF_ERR_MISMATCH,
                "rank %d is in \"%.15s\" while rank %d is in \"%.15s\"", r, h->what, t->world->rank,
                own->what);
    COF_FAIL_IF(
        h->team != own->team, COF_ERR_MISMATCH,
        "%.15s: rank %d calls it on another team (other members, order or tag) than rank %d",
        own->what, r, t->world->rank);
    COF_FAIL_IF(h->call != own->call, COF_ERR_MISMATCH,
                "%.15s: it is collective call %llu of the team on rank %d, call %llu on rank %d",
                own->what, (unsigned long long)h->call, r, (unsigned long long)own->call,
                t->world->rank);
    COF_FAIL_IF(h->bytes != own->bytes, COF_ERR_MISMATCH,
                "%.15s: bytes = %llu on rank %d, %llu on %d", own->what,
                (unsigned long long)h->bytes, r, (unsigned long long)own->bytes, t->world->rank);
    return COF_OK;
}

/* Waits for the peer's message in slices, and looks at all ranks of the world in between: the death
 * of any member ends the exchange, whomever it waits for. */
static cof_status await_message(cof_team *t, int rank, int64_t deadline)
{
    while (!stale_of(t, rank)->is_cut_in) {
        int64_t slice = cofi_now() + 200000000;
        cof_status status = cofi_link_wait(socket_of(t, rank), slice < deadline ? slice : deadline);
        if (status != COF_ERR_TIMEOUT || cofi_now() >= deadline)
            return status;
        cofi_world_poll(t->world);
        COF_TRY(cofi_team_status(t));
    }
    return COF_ERR_TIMEOUT;
}

static cof_status skip(cof_team *t, int rank, uint64_t bytes, int64_t deadline)
{
    char scrap[1024];
    cof_status status = COF_OK;
    for (; bytes > 0 && status == COF_OK; bytes -= bytes < sizeof scrap ? bytes : sizeof scrap)
        status = receive(t, rank, scrap, bytes < sizeof scrap ? bytes : sizeof scrap, deadline);
    return status;
}

/* A message of another team than `t`, one that has lost a rank. */
static bool is_of_dead_team(cof_team *t, const struct head *h)
{
    cof_world *w = t->world;
    if (h->team == t->id)
        return false;
    if (h->kind == REPLY && h->status == COF_ERR_PEER_DEAD)
        return true;
    cofi_world_poll(w);
    bool found = false;
    pthread_mutex_lock(&w->lock);
    for (const cof_team *other = w->teams; other; other = other->next)
        found |= other->id == h->team && atomic_load(&other->status) == COF_ERR_PEER_DEAD;
    for (int i = 0; i < w->n_dead_teams; i++)
        found |= w->dead_teams[i] == h->team;
    pthread_mutex_unlock(&w->lock);
    return found;
}

/* The next message of this kind that is not stale. With `fd_out` it brings a descriptor (-1 when
 * there was none to be had for it). Writes no text, but for a message of the other kind. */
static cof_status read_head(cof_team *t, int rank, int kind, struct head *h, int *fd_out,
                            int64_t deadline)
{
    struct cofi_stale *stale = stale_of(t, rank);
    for (;;) {
        COF_TRY(await_message(t, rank, deadline));
        COF_TRY(fd_out ? receive_fd(t, rank, h, fd_out, deadline)
                       : receive(t, rank, h, sizeof *h, deadline));
        int *n_stale = h->kind == REQUEST ? &stale->requests : &stale->replies;
        bool of_dead_team = is_of_dead_team(t, h);
        if (!of_dead_team && *n_stale == 0 && h->kind == kind)
            return COF_OK;
        if (fd_out && *fd_out >= 0)
            close(*fd_out);
        COF_TRY(skip(t, rank, h->payload, deadline));
        if (of_dead_team)
            continue;
        COF_FAIL_IF(*n_stale == 0, COF_ERR_MISMATCH,
                    "rank %d is in \"%.15s\" of another team, which rank %d is not in",
                    t->world_rank[rank], h->what, t->world->rank);
        --*n_stale;
    }
}

static cof_status receive_request(cof_team *t, const struct head *own, int rank, void *dst,
                                  int64_t deadline)
{
    struct head h;
    cof_status status = read_head(t, rank, REQUEST, &h, NULL, deadline);
    if (status != COF_OK) { /* its request is still to come, and is answered by the error */
        stale_of(t, rank)->requests += status != COF_ERR_PEER_DEAD;
        return status == COF_ERR_MISMATCH ? status : peer_error(t, own->what, rank, status);
    }
    status = check_head(t, own, &h, rank);
    if (status != COF_OK) {
        skip(t, rank, h.payload, deadline);
        return status;
    }
    status = receive(t, rank, dst, own->bytes, deadline);
    return status == COF_OK ? COF_OK : peer_error(t, own->what, rank, status);
}

/* Rank 0 tells its error to everyone it can reach. A member i, begin <= i < end, is answered before
 * its request was read. */
static void reply_error(cof_team *t, struct head head, cof_status status, int begin, int end)
{
    char text[COFI_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "%s", cof_last_error());
    head.kind = REPLY;
    head.status = status;
    head.payload = sizeof text;
    for (int i = 1; i < t->n_ranks; i++) {
        int64_t soon = cofi_now() + GRACE_NS / 10;
        stale_of(t, i)->requests += i >= begin && i < end && status != COF_ERR_PEER_DEAD;
        send_message(t, i, &head, text, soon);
    }
    cofi_fail_text(status, text);
}

static cof_status exchange_rank0(cof_team *t, struct head head, char *dst, int64_t deadline)
{
    for (int i = 1; i < t->n_ranks; i++) {
        cof_status status = receive_request(t, &head, i, dst + (size_t)i * head.bytes, deadline);
        if (status != COF_OK) {
            reply_error(t, head, status, i + 1, t->n_ranks);
            return status;
        }
    }
    head.kind = REPLY;
    head.payload = (uint64_t)t->n_ranks * head.bytes;
    cof_status first = COF_OK;
    for (int i = 1; i < t->n_ranks; i++) { /* to all that can be reached, whoever cannot */
        cof_status status = send_message(t, i, &head, dst, deadline);
        if (status != COF_OK && first == COF_OK)
            first = peer_error(t, head.what, i, status);
    }
    return first;
}

static int64_t members_deadline(int64_t deadline)
{
    return deadline == COFI_NEVER ? COFI_NEVER : deadline + GRACE_NS;
}

static cof_status no_reply(cof_team *t, const char *what, cof_status status)
{
    stale_of(t, 0)->replies += status != COF_ERR_PEER_DEAD;
    return status == COF_ERR_MISMATCH ? status : peer_error(t, what, 0, status);
}

/* What follows the head of a reply_error. */
static cof_status take_error(cof_team *t, const struct head *h)
{
    char text[COFI_ERROR_TEXT_BYTES] = "";
    receive(t, 0, text, sizeof text, cofi_now() + GRACE_NS);
    text[sizeof text - 1] = '\0';
    return cofi_fail_text((cof_status)h->status, text);
}

static cof_status exchange_member(cof_team *t, struct head own, const void *src, char *dst,
                                  int64_t deadline)
{
    struct head h;
    int64_t patience = members_deadline(deadline);
    own.kind = REQUEST;
    own.payload = own.bytes;
    cof_status status = send_message(t, 0, &own, src, deadline);
    /* A rank 0 that has hung up may have left its error before: read on. */
    if (status == COF_OK || status == COF_ERR_PEER_DEAD)
        status = read_head(t, 0, REPLY, &h, NULL, patience);
    if (status != COF_OK)
        return no_reply(t, own.what, status);
    if (h.status != COF_OK)
        return take_error(t, &h);
    status = check_head(t, &own, &h, 0);
    if (status != COF_OK) {
        skip(t, 0, h.payload, patience);
        return status;
    }
    status = receive(t, 0, dst, h.payload, patience);
    return status == COF_OK ? COF_OK : peer_error(t, own.what, 0, status);
}

static struct head next_head(cof_team *t, const char *what, size_t bytes)
{
    struct head head = {.team = t->id, .call = t->n_calls++, .bytes = bytes};
    snprintf(head.what, sizeof head.what, "%s", what);
    return head;
}

cof_status cofi_team_exchange(cof_team *t, const char *what, const void *src, void *dst,
                              size_t bytes)
{
    COF_TRY(cofi_team_status(t));
    struct head head = next_head(t, what, bytes);
    int64_t deadline = cofi_deadline(t->world->init_timeout);
    memcpy((char *)dst + (size_t)t->rank * bytes, src, bytes);
    if (t->n_ranks == 1)
        return COF_OK;
    cof_status status = t->rank == 0 ? exchange_rank0(t, head, dst, deadline)
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

static cof_status hand_out_fd(cof_team *t, struct head head, int fd, int64_t deadline)
{
    head.kind = REPLY;
    for (int i = 1; i < t->n_ranks; i++) {
        cof_status status = send_fd(t, i, &head, fd, deadline);
        if (status == COF_OK)
            continue;
        status = peer_error(t, head.what, i, status);
        reply_error(t, head, status, 1, i); /* those that have it ask for the next exchange */
        return status;
    }
    return COF_OK;
}

static cof_status take_fd(cof_team *t, struct head own, int *fd_out, int64_t deadline)
{
    struct head h;
    cof_status status = read_head(t, 0, REPLY, &h, fd_out, members_deadline(deadline));
    if (status != COF_OK)
        return no_reply(t, own.what, status);
    if (h.status != COF_OK)
        return take_error(t, &h);
    status = check_head(t, &own, &h, 0);
    if (status != COF_OK && *fd_out >= 0) {
        close(*fd_out);
        *fd_out = -1;
    }
    return status;
}

cof_status cofi_team_bcast_fd(cof_team *t, int fd, int *fd_out)
{
    COF_TRY(cofi_team_status(t));
    struct head head = next_head(t, "memory handover", 0);
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
