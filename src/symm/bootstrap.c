/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of one host find each other.
 *
 *   1  Every rank gets a socket to rank 0: inherited from the launcher (COFUSE_FDS), or by an
 *      abstract unix address named by a hash of user and job, where rank 0 listens
 *      (bootstrap_address.c).
 *   2  Every rank says hello; rank 0 checks that all are there and agree.
 *   3  Rank 0 hands a socketpair to every other pair of ranks, so that each sees each die.
 *   4  Rank 0 sends the table of hellos, or the error that all of them return.
 *
 * Other ranks wait a little longer than rank 0 does, so that its error, which names the missing
 * ranks, reaches them. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/clock.h"
#include "core/config.h"
#include "core/hash.h"
#include "symm/bootstrap.h"
#include "symm/symm.h"

#define TOKEN_SEED UINT64_C(0x746f6b656e736565)
#define GRACE_NS INT64_C(2000000000)
/* How long a rank 0 that has failed stays to tell ranks that come late. */
#define LATE_NS INT64_C(500000000)

struct verdict {
    int32_t status;
    char text[COFI_ERROR_TEXT_BYTES];
};

/* ---- 1: a socket to rank 0 ------------------------------------------------------------------ */

static cof_status parse_fds(cof_world *w, const char *text)
{
    const char *at = text;
    for (int r = 0; r < w->n_ranks; r++) {
        char *end;
        long fd = strtol(at, &end, 10);
        COF_FAIL_IF(end == at || fd < -1 || fd > INT32_MAX || (*end && *end != ','),
                    COF_ERR_INVALID, "variable COFUSE_FDS = \"%s\": wanted %d numbers", text,
                    w->n_ranks);
        bool wanted = r != w->rank && (r == 0 || w->rank == 0);
        COF_FAIL_IF(wanted && fd < 0, COF_ERR_INVALID,
                    "variable COFUSE_FDS = \"%s\": no descriptor for rank %d", text, r);
        int domain = 0;
        socklen_t domain_bytes = sizeof domain;
        COF_FAIL_IF(wanted && (getsockopt((int)fd, SOL_SOCKET, SO_DOMAIN, &domain, &domain_bytes) ||
                               domain != AF_UNIX),
                    COF_ERR_INVALID,
                    "variable COFUSE_FDS = \"%s\": %ld is no unix socket of this process", text,
                    fd);
        w->socket[r] = wanted ? cofi_link_adopt((int)fd) : -1; /* not for children */
        COF_FAIL_IF(wanted && w->socket[r] < 0, COF_ERR_NOMEM, "bootstrap: no memory");
        at = *end ? end + 1 : end;
    }
    return COF_OK;
}

/* ---- 2: hellos ------------------------------------------------------------------------------ */

static cof_status check_hello(const cof_world *w, const struct cofi_hello *h)
{
    const struct cofi_hello *own = &w->hello[w->rank];
    COF_FAIL_IF(h->magic != COFI_HELLO_MAGIC || h->token != own->token, COF_ERR_MISMATCH,
                "bootstrap: a stranger connected");
    COF_FAIL_IF(h->version != own->version, COF_ERR_MISMATCH,
                "rank %d has Cofuse version %u, rank 0 has %u", h->rank, h->version, own->version);
    COF_FAIL_IF(h->n_ranks != w->n_ranks, COF_ERR_MISMATCH,
                "rank %d has n_ranks = %d, rank 0 has %d", h->rank, h->n_ranks, w->n_ranks);
    COF_FAIL_IF(h->engine != own->engine, COF_ERR_MISMATCH, "rank %d has engine %u, rank 0 has %u",
                h->rank, h->engine, own->engine);
    COF_FAIL_IF(h->rank < 0 || h->rank >= w->n_ranks, COF_ERR_MISMATCH,
                "a rank calls itself %d in a world of %d", h->rank, w->n_ranks);
    COF_FAIL_IF(w->hello[h->rank].magic == COFI_HELLO_MAGIC, COF_ERR_MISMATCH,
                "two ranks call themselves rank %d", h->rank);
    return COF_OK;
}

/* "2, 5, 6": ranks that have not said hello. */
static void missing_ranks(const cof_world *w, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int r = 0; r < w->n_ranks && used + 16 < bytes; r++)
        if (w->hello[r].magic != COFI_HELLO_MAGIC)
            used += (size_t)snprintf(text + used, bytes - used, "%s%d", used ? ", " : "", r);
}

/* `rank`: whose socket it was, -1 when that is not known. */
static cof_status hello_error(const cof_world *w, cof_status status, int rank)
{
    char missing[200];
    missing_ranks(w, missing, sizeof missing);
    if (status == COF_ERR_TIMEOUT)
        return COF_FAIL(status, "world of %d: within %g s these ranks did not arrive: %s%s",
                        w->n_ranks, w->init_timeout, missing, w->job[0] ? COFI_ONE_HOST : "");
    COF_FAIL_IF(rank >= 0, status, "world of %d: rank %d went away before it joined", w->n_ranks,
                rank);
    return COF_FAIL(status, "world of %d: a rank went away while joining, one of: %s", w->n_ranks,
                    missing);
}

static cof_status take_hello(cof_world *w, int socket, int expected, int *rank_out,
                             int64_t deadline)
{
    struct cofi_hello h;
    cof_status status = cofi_link_recv(socket, &h, sizeof h, deadline);
    if (status != COF_OK)
        return hello_error(w, status, expected);
    COF_TRY(check_hello(w, &h));
    w->hello[h.rank] = h;
    *rank_out = h.rank;
    return COF_OK;
}

static cof_status gather_inherited(cof_world *w, int64_t deadline)
{
    /* By arrival, so that the ranks that are there are counted before the deadline ends it. */
    struct pollfd *p = calloc((size_t)w->n_ranks, sizeof *p);
    COF_FAIL_IF(!p, COF_ERR_NOMEM, "bootstrap: no memory");
    cof_status status = COF_OK;
    for (int left = w->n_ranks - 1; left > 0 && status == COF_OK;) {
        for (int r = 0; r < w->n_ranks; r++)
            p[r] = (struct pollfd){.fd = w->hello[r].magic ? -1 : w->socket[r], .events = POLLIN};
        int64_t rest = deadline == COFI_NEVER ? 1000000000 : deadline - cofi_now();
        if (rest <= 0) {
            status = hello_error(w, COF_ERR_TIMEOUT, -1);
            break;
        }
        poll(p, (nfds_t)w->n_ranks, (int)(rest / 1000000 > 1000 ? 1000 : rest / 1000000 + 1));
        for (int r = 1; r < w->n_ranks && status == COF_OK; r++)
            if (p[r].fd >= 0 && p[r].revents) {
                int rank = -1;
                status = take_hello(w, w->socket[r], r, &rank, deadline);
                if (status == COF_OK && rank != r)
                    status = COF_FAIL(COF_ERR_MISMATCH, "rank %d sits on the socket of rank %d",
                                      rank, r);
                left--;
            }
    }
    free(p);
    return status;
}

static void send_verdict(int socket, const struct verdict *v)
{
    cofi_link_send(socket, v, sizeof *v, cofi_now() + GRACE_NS);
}

static void write_verdict(struct verdict *v, cof_status status)
{
    *v = (struct verdict){.status = status};
    if (status != COF_OK)
        snprintf(v->text, sizeof v->text, "%s", cof_last_error());
}

static cof_status gather_accepted(cof_world *w, struct cofi_listener *l, int64_t deadline)
{
    for (int left = w->n_ranks - 1; left > 0; left--) {
        struct cofi_hello h;
        int fd;
        cof_status status = cofi_listener_next(l, &w->hello[0], &h, &fd, deadline);
        if (status == COF_ERR_TIMEOUT)
            return hello_error(w, status, -1);
        COF_TRY(status);
        status = check_hello(w, &h);
        if (status != COF_OK) { /* it has no place among w->socket[] */
            struct verdict v;
            write_verdict(&v, status);
            send_verdict(fd, &v);
            cofi_link_close(fd);
            return status;
        }
        w->hello[h.rank] = h;
        w->socket[h.rank] = fd;
    }
    return COF_OK;
}

/* Ranks that wait at the address, or come to it soon, get the verdict too. */
static void tell_late_ranks(cof_world *w, struct cofi_listener *l, const struct verdict *v)
{
    int64_t until = cofi_now() + LATE_NS;
    struct cofi_hello h;
    int fd;
    while (cofi_listener_next(l, &w->hello[0], &h, &fd, until) == COF_OK) {
        send_verdict(fd, v);
        cofi_link_close(fd);
    }
}

/* ---- 3: a socket between every other pair --------------------------------------------------- */

static cof_status hand_out_pair(cof_world *w, int i, int j, int64_t deadline)
{
    int pair[2];
    int32_t peer_of[2] = {j, i};
    COF_FAIL_IF(cofi_link_pair(pair) != 0, COF_ERR_SYSTEM, "bootstrap: socketpair: %s",
                strerror(errno));
    int to = i;
    cof_status status = cofi_link_send_fd(w->socket[i], pair[0], &peer_of[0], sizeof peer_of[0],
                                          deadline);
    if (status == COF_OK) {
        to = j;
        status = cofi_link_send_fd(w->socket[j], pair[1], &peer_of[1], sizeof peer_of[1], deadline);
    }
    cofi_link_close(pair[0]);
    cofi_link_close(pair[1]);
    COF_FAIL_IF(status != COF_OK, status, "world of %d: handing a socket to rank %d: %s",
                w->n_ranks, to, cof_status_text(status));
    return COF_OK;
}

static cof_status receive_sockets(cof_world *w, int64_t deadline)
{
    for (int n = 0; n < w->n_ranks - 2; n++) {
        int32_t peer = -1;
        int fd = -1;
        cof_status status =
            cofi_link_recv_socket(w->socket[0], &fd, &peer, sizeof peer, deadline);
        COF_FAIL_IF(status == COF_OK && fd < 0, COF_ERR_SYSTEM,
                    "world of %d: no descriptor left for the socket to rank %d (ulimit -n)",
                    w->n_ranks, peer);
        if (status == COF_OK && (peer <= 0 || peer >= w->n_ranks || w->socket[peer] >= 0))
            status = COF_ERR_SYSTEM;
        if (status != COF_OK) {
            if (fd >= 0)
                cofi_link_close(fd);
            return COF_FAIL(status, "world of %d: no socket from rank 0 (%s)", w->n_ranks,
                            cof_status_text(status));
        }
        w->socket[peer] = fd;
    }
    return COF_OK;
}

/* ---- 4: both sides -------------------------------------------------------------------------- */

/* On the socket to rank 0: its verdict, or *is_told = false and what kept it. */
static cof_status say_hello(cof_world *w, int64_t deadline, int64_t patience, bool *is_told)
{
    struct verdict v;
    cof_status status = cofi_link_send(w->socket[0], &w->hello[w->rank], sizeof w->hello[0],
                                       deadline);
    /* A rank 0 that has hung up may have left its verdict before: read on. */
    if (status == COF_OK || status == COF_ERR_PEER_DEAD)
        status = cofi_link_recv(w->socket[0], &v, sizeof v, patience);
    *is_told = status == COF_OK;
    COF_FAIL_IF(status != COF_OK, status, "world of %d: rank 0 %s", w->n_ranks,
                status == COF_ERR_TIMEOUT ? "did not answer in time" : "went away while joining");
    v.text[sizeof v.text - 1] = '\0';
    return v.status == COF_OK ? COF_OK : cofi_fail_text((cof_status)v.status, v.text);
}

/* Another process has the address: where it is a rank 0 of this job, it tells both that they are
 * two. */
static cof_status meet_other_rank0(cof_world *w)
{
    int64_t soon = cofi_now() + GRACE_NS;
    bool is_told = false;
    cof_status status = cofi_connect_to_rank0(w, soon);
    if (status == COF_OK)
        status = say_hello(w, soon, soon, &is_told);
    cofi_link_close(w->socket[0]);
    w->socket[0] = -1;
    COF_FAIL_IF(status == COF_OK || (!is_told && status != COF_ERR_INVALID), COF_ERR_INVALID,
                "job: \"%s\" is in use by another process", w->job);
    return status;
}

static cof_status open_listener(cof_world *w, struct cofi_listener *l, int64_t deadline)
{
    bool is_taken;
    cof_status status = cofi_listener_open(w, l, &is_taken, deadline);
    return is_taken ? meet_other_rank0(w) : status;
}

static cof_status gather(cof_world *w, bool inherited, int64_t deadline)
{
    struct cofi_listener listener = {.fd = -1};
    cof_status status =
        inherited ? gather_inherited(w, deadline) : open_listener(w, &listener, deadline);
    if (!inherited && status == COF_OK)
        status = gather_accepted(w, &listener, deadline);
    struct verdict v;
    write_verdict(&v, status);
    for (int r = 1; r < w->n_ranks; r++)
        if (w->socket[r] >= 0)
            send_verdict(w->socket[r], &v);
    if (listener.fd >= 0 && status != COF_OK)
        tell_late_ranks(w, &listener, &v);
    cofi_listener_close(&listener);
    return status == COF_OK ? COF_OK : cofi_fail_text(status, v.text);
}

static cof_status bootstrap_rank0(cof_world *w, bool inherited, int64_t deadline)
{
    cof_status status = gather(w, inherited, deadline);
    COF_TRY(status);
    for (int i = 1; i < w->n_ranks; i++)
        for (int j = i + 1; j < w->n_ranks; j++)
            COF_TRY(hand_out_pair(w, i, j, deadline));
    for (int r = 1; r < w->n_ranks; r++) {
        status = cofi_link_send(w->socket[r], w->hello, (size_t)w->n_ranks * sizeof w->hello[0],
                                deadline);
        COF_FAIL_IF(status != COF_OK, status, "world of %d: rank %d went away while joining",
                    w->n_ranks, r);
    }
    return COF_OK;
}

static cof_status bootstrap_other(cof_world *w, bool inherited, int64_t deadline)
{
    if (!inherited)
        COF_TRY(cofi_connect_to_rank0(w, deadline));
    int64_t patience = deadline == COFI_NEVER ? COFI_NEVER : deadline + GRACE_NS;
    bool is_told;
    COF_TRY(say_hello(w, deadline, patience, &is_told));
    COF_TRY(receive_sockets(w, patience));
    size_t bytes = (size_t)w->n_ranks * sizeof w->hello[0];
    cof_status status = cofi_link_recv(w->socket[0], w->hello, bytes, patience);
    COF_FAIL_IF(status != COF_OK, status, "world of %d: rank 0 went away while joining",
                w->n_ranks);
    return COF_OK;
}

cof_status cofi_bootstrap(cof_world *w, int64_t deadline)
{
    w->hello[w->rank].magic = COFI_HELLO_MAGIC;
    w->hello[w->rank].token = cofi_hash(TOKEN_SEED, w->job, strlen(w->job));
    if (w->n_ranks == 1)
        return COF_OK;
    bool inherited = w->job[0] == '\0';
    if (inherited)
        COF_TRY(parse_fds(w, cofi_config_text(COFI_VAR_FDS)));
    return w->rank == 0 ? bootstrap_rank0(w, inherited, deadline)
                        : bootstrap_other(w, inherited, deadline);
}
