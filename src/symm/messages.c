/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "symm/messages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"

#define SLICE_NS INT64_C(200000000) /* between two looks at all ranks of the world */
#define SOON_NS INT64_C(200000000)  /* for an error to go into a socket */
#define PIECE_BYTES 1024            /* a head, and an error's text */

/* The last byte of a message; 0 in one that stopped early, whose data end in zeros. */
static const char whole = 1;

static int socket_of(const cof_team *t, int rank)
{
    return t->world->socket[t->world_rank[rank]];
}

static struct cofi_stale *stale_of(const cof_team *t, int rank)
{
    return &t->world->stale[t->world_rank[rank]];
}

static int64_t earlier(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t n_dead(const cof_world *w)
{
    int64_t n = 0;
    for (int r = 0; r < w->n_ranks; r++)
        n += atomic_load(&w->state[r]) == COFI_PEER_DEAD;
    return n;
}

cof_status cofi_message_error(cof_team *t, const char *what, int rank, cof_status status)
{
    int r = t->world_rank[rank];
    COF_TRY(cofi_team_status(t));
    COF_FAIL_IF(status == COF_ERR_TIMEOUT && (stale_of(t, rank)->is_cut_in ||
                                              stale_of(t, rank)->is_cut_out), status,
                "%s: a message between ranks %d and %d was cut off when %g s had passed; their "
                "socket cannot be used any more", what, t->world->rank, r, t->world->init_timeout);
    if (status == COF_ERR_TIMEOUT)
        return COF_FAIL(status, "%s: rank %d%s did not come within %g s; rank %d waited for it",
                        what, r,
                        rank == t->hub && t->n_ranks > 2 ? ", or a rank that it waits for," : "",
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

/* ---- sending -------------------------------------------------------------------------------- */

/* Whether nobody needs the rest of a message: that rank tells that the call has failed. A death
 * that this rank alone has seen is no reason: that rank may be about to read, and would wait for
 * the rest until this one has more to say. */
static bool is_of_no_use(cof_team *t, int rank, const struct cofi_head *head)
{
    struct cofi_head h;
    if (head->kind == COFI_NOTICE)
        return false;
    return cofi_link_peek(socket_of(t, rank), &h, sizeof h) == sizeof h && h.kind == COFI_NOTICE &&
           h.team == head->team && h.call == head->call &&
           (head->kind == COFI_REQUEST || h.number == head->number);
}

/* In slices, as messages are awaited; moves *data and *bytes on. With `head` it may stop early,
 * with COF_OK. */
static cof_status send_on(cof_team *t, int rank, const char **data, size_t *bytes,
                          const struct cofi_head *head, int64_t deadline)
{
    for (;;) {
        int64_t slice = earlier(cofi_now() + SLICE_NS, deadline);
        cof_status status = cofi_link_send_on(socket_of(t, rank), data, bytes, slice);
        if (status != COF_ERR_TIMEOUT || cofi_now() >= deadline)
            return status;
        cofi_world_poll(t->world);
        if (head && is_of_no_use(t, rank, head))
            return COF_OK;
    }
}

/* The rest of a message that stopped early, up to and with its last byte, which says so. */
static cof_status send_owed(cof_team *t, int rank, int64_t deadline)
{
    static const char zeros[4096];
    struct cofi_stale *stale = stale_of(t, rank);
    while (stale->owed > 0) {
        const char *at = zeros;
        size_t piece = stale->owed < sizeof zeros ? stale->owed : sizeof zeros, left = piece;
        cof_status status = send_on(t, rank, &at, &left, NULL, deadline);
        stale->owed -= piece - left;
        COF_TRY(status);
    }
    return COF_OK;
}

/* Short ones in one piece, so that their reader wakes once; the socket takes it whole or not at
 * all, as it does a head. */
cof_status cofi_message_send(cof_team *t, int rank, struct cofi_head head, const void *payload,
                             int fd, int64_t deadline)
{
    struct cofi_stale *stale = stale_of(t, rank);
    if (stale->is_cut_out)
        return COF_ERR_TIMEOUT;
    COF_TRY(send_owed(t, rank, deadline));
    head.n_dead = n_dead(t->world);
    if (fd >= 0) {
        cof_status status = cofi_link_send_fd(socket_of(t, rank), fd, &head, sizeof head, deadline);
        stale->is_cut_out = status == COF_ERR_TIMEOUT; /* perhaps before it began: not told apart */
        return status;
    }
    char piece[PIECE_BYTES];
    const char *at = piece;
    size_t left = sizeof head + head.payload + sizeof whole;
    if (left <= sizeof piece) {
        memcpy(piece, &head, sizeof head);
        if (head.payload > 0)
            memcpy(piece + sizeof head, payload, head.payload);
        piece[left - sizeof whole] = whole;
        return send_on(t, rank, &at, &left, NULL, deadline);
    }
    at = (const char *)&head;
    left = sizeof head;
    COF_TRY(send_on(t, rank, &at, &left, NULL, deadline));
    at = payload;
    left = head.payload;
    cof_status status = send_on(t, rank, &at, &left, &head, deadline);
    bool is_stopped = status == COF_OK && left > 0;
    left += sizeof whole;
    if (status == COF_OK && !is_stopped) {
        at = &whole;
        status = send_on(t, rank, &at, &left, &head, deadline);
        is_stopped = status == COF_OK && left > 0;
    }
    if (is_stopped || (status == COF_ERR_TIMEOUT && head.kind != COFI_REQUEST))
        stale->owed = left; /* but a hub that did not read a request in time may not be there */
    else
        stale->is_cut_out = status == COF_ERR_TIMEOUT;
    return status;
}

bool cofi_message_is_open(const cof_team *t, int rank)
{
    return stale_of(t, rank)->open != 0;
}

cof_status cofi_message_answer(cof_team *t, int rank, struct cofi_head head, const void *payload,
                               int64_t deadline)
{
    struct cofi_stale *stale = stale_of(t, rank);
    if (stale->open == 0)
        return COF_OK;
    head.kind = COFI_REPLY;
    head.number = stale->last = stale->open;
    stale->open = 0;
    if (head.status != COF_OK) {
        head.payload = COFI_ERROR_TEXT_BYTES;
        deadline = cofi_now() + SOON_NS;
    }
    return cofi_message_send(t, rank, head, payload, -1, deadline);
}

/* Where memory is short, the request is a mismatch when it comes. */
static void remember_answered(struct cofi_stale *stale, uint64_t team, uint64_t call)
{
    struct cofi_call_id *more =
        realloc(stale->answered, (size_t)(stale->n_answered + 1) * sizeof *more);
    if (!more)
        return;
    stale->answered = more;
    more[stale->n_answered++] = (struct cofi_call_id){team, call};
}

void cofi_message_notify(cof_team *t, int rank, struct cofi_head head, const char *text,
                         bool answers)
{
    head.kind = COFI_NOTICE;
    head.payload = COFI_ERROR_TEXT_BYTES;
    if (answers)
        remember_answered(stale_of(t, rank), head.team, head.call);
    cofi_message_send(t, rank, head, text, -1, cofi_now() + SOON_NS);
}

/* ---- receiving ------------------------------------------------------------------------------ */

/* Of a message that has begun. */
static cof_status receive(struct cofi_inbox *in, void *data, size_t bytes)
{
    int64_t least = cofi_now() + COFI_MESSAGE_GRACE_NS;
    cof_status status = cofi_link_recv(socket_of(in->team, in->rank), data, bytes,
                                       in->deadline > least ? in->deadline : least);
    stale_of(in->team, in->rank)->is_cut_in |= status == COF_ERR_TIMEOUT;
    return status;
}

/* What follows a head; with to = NULL it is thrown away. */
static cof_status receive_data(struct cofi_inbox *in, void *to, uint64_t bytes, bool *is_whole)
{
    char scrap[1024], last = 0;
    if (to)
        COF_TRY(receive(in, to, bytes));
    while (!to && bytes > 0) {
        size_t piece = bytes < sizeof scrap ? bytes : sizeof scrap;
        COF_TRY(receive(in, scrap, piece));
        bytes -= piece;
    }
    COF_TRY(receive(in, &last, sizeof last));
    *is_whole = last == whole;
    return COF_OK;
}

static void drop_fd(struct cofi_inbox *in)
{
    if (in->fd_out && *in->fd_out >= 0) {
        close(*in->fd_out);
        *in->fd_out = -1;
    }
}

static cof_status receive_head(struct cofi_inbox *in, struct cofi_head *h)
{
    struct cofi_stale *stale = stale_of(in->team, in->rank);
    if (!in->fd_out)
        return receive(in, h, sizeof *h);
    cof_status status = cofi_link_recv_fd(socket_of(in->team, in->rank), in->fd_out, h, sizeof *h,
                                          in->deadline);
    stale->is_cut_in |= status == COF_ERR_TIMEOUT;
    if (status != COF_OK)
        drop_fd(in);
    return status;
}

/* Waits for a message in slices, and looks at all ranks of the world in between: the death of any
 * member ends the call, whomever it waits for. */
static cof_status await_message(struct cofi_inbox *in)
{
    while (!stale_of(in->team, in->rank)->is_cut_in) {
        int64_t slice = earlier(cofi_now() + SLICE_NS, in->deadline);
        cof_status status = cofi_link_wait(socket_of(in->team, in->rank), slice);
        if (status != COF_ERR_TIMEOUT || cofi_now() >= in->deadline)
            return status;
        cofi_world_poll(in->team->world);
        COF_TRY(cofi_team_status(in->team));
    }
    return COF_ERR_TIMEOUT;
}

/* What waits may be for a later call, when this one's team has lost a rank: then it stays. */
static cof_status look_ahead(struct cofi_inbox *in)
{
    cof_world *w = in->team->world;
    struct cofi_head h;
    if (cofi_link_peek(socket_of(in->team, in->rank), &h, sizeof h) < sizeof h ||
        h.team == in->own->team)
        return COF_OK;
    if (in->of_team_only)
        return COF_ERR_TIMEOUT;
    for (int64_t patience = cofi_now() + COFI_MESSAGE_GRACE_NS;;) {
        cofi_world_poll(w);
        COF_TRY(cofi_team_status(in->team));
        if (h.n_dead <= n_dead(w) || cofi_now() >= patience)
            return COF_OK;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

bool cofi_message_is_here(cof_team *t, int rank)
{
    struct cofi_head h;
    return cofi_link_peek(socket_of(t, rank), &h, sizeof h) == sizeof h && h.team == t->id;
}

static cof_status check_head(struct cofi_inbox *in, const struct cofi_head *h)
{
    const struct cofi_head *own = in->own;
    int r = in->team->world_rank[in->rank], self = in->team->world->rank;
    COF_FAIL_IF(strncmp(h->what, own->what, sizeof own->what), COF_ERR_MISMATCH,
                "rank %d is in \"%.15s\" while rank %d is in \"%.15s\"", r, h->what, self,
                own->what);
    COF_FAIL_IF(
        h->team != own->team, COF_ERR_MISMATCH,
        "%.15s: rank %d calls it on another team (other members, order or tag) than rank %d",
        own->what, r, self);
    COF_FAIL_IF(h->call != own->call, COF_ERR_MISMATCH,
                "%.15s: it is collective call %llu of the team on rank %d, call %llu on rank %d",
                own->what, (unsigned long long)h->call, r, (unsigned long long)own->call, self);
    COF_FAIL_IF(h->bytes != own->bytes, COF_ERR_MISMATCH,
                "%.15s: bytes = %llu on rank %d, %llu on %d", own->what,
                (unsigned long long)h->bytes, r, (unsigned long long)own->bytes, self);
    COF_FAIL_IF(h->kind != (int32_t)in->kind, COF_ERR_MISMATCH,
                "%.15s: rank %d is in another step of it than rank %d", own->what, r, self);
    return COF_OK;
}

static cof_status take_text(struct cofi_inbox *in, const struct cofi_head *h)
{
    char text[COFI_ERROR_TEXT_BYTES];
    bool is_whole;
    COF_TRY(receive_data(in, text, sizeof text, &is_whole));
    text[sizeof text - 1] = '\0';
    in->has_text = in->is_over = true;
    return cofi_fail_text((cof_status)h->status, text);
}

/* ---- each kind: *is_done, and the call's status, or it is read past ------------------------- */

/* A team other than this inbox's that has lost a rank. */
static bool is_of_dead_team(struct cofi_inbox *in, const struct cofi_head *h)
{
    cof_world *w = in->team->world;
    bool found = false;
    if (h->team == in->own->team)
        return false;
    pthread_mutex_lock(&w->lock);
    for (const cof_team *t = w->teams; t; t = t->next)
        found |= t->id == h->team && atomic_load(&t->status) == COF_ERR_PEER_DEAD;
    for (int i = 0; i < w->n_dead_teams; i++)
        found |= w->dead_teams[i] == h->team;
    pthread_mutex_unlock(&w->lock);
    return found;
}

static bool forget_answered(struct cofi_stale *stale, const struct cofi_head *h)
{
    for (int i = 0; i < stale->n_answered; i++)
        if (stale->answered[i].team == h->team && stale->answered[i].call == h->call) {
            stale->answered[i] = stale->answered[--stale->n_answered];
            stale->last = h->number;
            return true;
        }
    return false;
}

/* That rank has begun the team anew. */
static void forget_team(struct cofi_stale *stale, uint64_t team)
{
    int kept = 0;
    for (int i = 0; i < stale->n_answered; i++)
        if (stale->answered[i].team != team)
            stale->answered[kept++] = stale->answered[i];
    stale->n_answered = kept;
}

static cof_status take_request(struct cofi_inbox *in, const struct cofi_head *h, bool *is_done)
{
    struct cofi_stale *stale = stale_of(in->team, in->rank);
    bool is_whole = false;
    char next;
    cof_status check = check_head(in, h);
    bool is_wanted = check == COF_OK && in->dst && h->payload == in->own->bytes;
    stale->open = h->number; /* also of one that is cut off */
    COF_TRY(receive_data(in, is_wanted ? in->dst : NULL, h->payload, &is_whole));
    if (forget_answered(stale, h) || !is_whole ||
        cofi_link_peek(socket_of(in->team, in->rank), &next, 1) || is_of_dead_team(in, h)) {
        stale->open = 0;
        return COF_OK;
    }
    if (check == COF_OK && h->call == 0)
        forget_team(stale, h->team);
    *is_done = in->has_text = true;
    return check;
}

static cof_status take_reply(struct cofi_inbox *in, const struct cofi_head *h, bool *is_done)
{
    bool is_mine = in->kind == COFI_REPLY && h->number == in->own->number, is_whole;
    if (is_mine && h->status != COF_OK) {
        *is_done = true;
        return take_text(in, h);
    }
    cof_status check = is_mine ? check_head(in, h) : COF_OK;
    COF_TRY(receive_data(in, is_mine && check == COF_OK ? in->dst : NULL, h->payload, &is_whole));
    *is_done = in->is_over = is_mine && is_whole; /* else the hub has seen the team fail */
    in->has_text = check != COF_OK;
    return check;
}

static cof_status take_handover(struct cofi_inbox *in, const struct cofi_head *h, bool *is_done)
{
    *is_done = in->kind == COFI_HANDOVER && h->team == in->own->team && h->call == in->own->call;
    if (!*is_done)
        drop_fd(in);
    return COF_OK;
}

/* A team whose next call has failed on its hub: this rank has not made the call, and never will. */
static void end_team(struct cofi_inbox *in, const struct cofi_head *h, const char *text)
{
    cof_world *w = in->team->world;
    pthread_mutex_lock(&w->lock);
    for (cof_team *t = w->teams; t; t = t->next)
        if (t->id == h->team && t->n_calls == h->call)
            cofi_team_abort(t, (cof_status)h->status, -1, text);
    pthread_mutex_unlock(&w->lock);
}

/* Of the call that this rank is in, or of the one before, which that rank gave up when it had
 * succeeded here. Notices of a team that had this number before are not for this one. */
static cof_status take_notice(struct cofi_inbox *in, const struct cofi_head *h, bool *is_done)
{
    const struct cofi_stale *stale = stale_of(in->team, in->rank);
    bool was_answered = h->number != 0 && h->number == stale->last;
    *is_done = h->team == in->own->team && ((h->call == in->own->call && !was_answered) ||
                                            h->call + 1 == in->own->call);
    if (*is_done)
        return take_text(in, h);
    char text[COFI_ERROR_TEXT_BYTES];
    bool is_whole;
    COF_TRY(receive_data(in, text, sizeof text, &is_whole));
    text[sizeof text - 1] = '\0';
    if (h->team != in->own->team && in->team->world_rank[in->rank] < in->team->world->rank)
        end_team(in, h, text);
    return COF_OK;
}

static cof_status read_message(struct cofi_inbox *in)
{
    for (bool is_done = false;;) {
        struct cofi_head h;
        cof_status status;
        COF_TRY(await_message(in));
        COF_TRY(look_ahead(in));
        COF_TRY(receive_head(in, &h));
        switch ((enum cofi_message_kind)h.kind) {
        case COFI_REQUEST: status = take_request(in, &h, &is_done); break;
        case COFI_REPLY: status = take_reply(in, &h, &is_done); break;
        case COFI_HANDOVER: status = take_handover(in, &h, &is_done); break;
        case COFI_NOTICE: status = take_notice(in, &h, &is_done); break;
        default: status = COF_ERR_SYSTEM; break;
        }
        if (is_done || status != COF_OK)
            return status;
    }
}

cof_status cofi_message_next(struct cofi_inbox *in)
{
    in->is_over = in->has_text = false;
    cof_status status = read_message(in);
    return status == COF_OK || in->has_text
               ? status
               : cofi_message_error(in->team, in->own->what, in->rank, status);
}
