/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The address where ranks meet: an abstract unix socket, named by a hash of user and job. It goes
 * with the process that holds it, so that a killed job leaves nothing in the way of the next one.
 * Whoever knows the name can connect: the kernel tells the user, the hello's token the job. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/hash.h"
#include "symm/bootstrap.h"

#define HELLO_NS INT64_C(2000000000)  /* for a connection to say hello */
#define IN_USE_NS INT64_C(2000000000) /* for a killed rank 0 of the same job to be gone */
#define RETRY_NS 5000000

static socklen_t abstract_address(const cof_world *w, struct sockaddr_un *address)
{
    uint64_t hash = cofi_hash_u64(COFI_HASH_SEED, (uint64_t)getuid());
    hash = cofi_hash(hash, w->job, strlen(w->job));
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "cofuse-%016llx",
                     (unsigned long long)hash);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static cof_status check_user(int socket)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    COF_FAIL_IF(getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0, COF_ERR_SYSTEM,
                "bootstrap: peer credentials: %s", strerror(errno));
    COF_FAIL_IF(peer.uid != getuid(), COF_ERR_INVALID,
                "bootstrap: a process of user %d answered, wanted user %d", (int)peer.uid,
                (int)getuid());
    return COF_OK;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, RETRY_NS}, NULL);
}

/* ---- the other ranks, and a second rank 0 --------------------------------------------------- */

cof_status cofi_connect_to_rank0(cof_world *w, int64_t deadline)
{
    struct sockaddr_un address;
    socklen_t bytes = abstract_address(w, &address);
    /* Not blocking: a connect to a full queue has no deadline. */
    int fd = cofi_link_socket(SOCK_NONBLOCK);
    COF_FAIL_IF(fd < 0, COF_ERR_SYSTEM, "bootstrap: socket: %s", strerror(errno));
    w->socket[0] = fd;
    while (connect(fd, (struct sockaddr *)&address, bytes) != 0) {
        COF_FAIL_IF(errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR, COF_ERR_SYSTEM,
                    "bootstrap: connect to rank 0 of job \"%s\": %s", w->job, strerror(errno));
        COF_FAIL_IF(deadline != COFI_NEVER && cofi_now() >= deadline, COF_ERR_TIMEOUT,
                    "bootstrap: rank 0 of job \"%s\" did not arrive within %g s" COFI_ONE_HOST,
                    w->job, w->init_timeout);
        nap();
    }
    return check_user(fd);
}

/* ---- rank 0 --------------------------------------------------------------------------------- */

cof_status cofi_listener_open(const cof_world *w, struct cofi_listener *l, bool *is_taken,
                              int64_t deadline)
{
    struct sockaddr_un address;
    socklen_t bytes = abstract_address(w, &address);
    int64_t patience = cofi_now() + IN_USE_NS;
    *is_taken = false;
    *l = (struct cofi_listener){.fd = -1, .room = w->n_ranks + 16};
    l->pending = calloc((size_t)l->room, sizeof *l->pending);
    l->poll = calloc((size_t)l->room + 1, sizeof *l->poll);
    COF_FAIL_IF(!l->pending || !l->poll, COF_ERR_NOMEM, "world of %d: no memory", w->n_ranks);
    l->fd = cofi_link_socket(SOCK_NONBLOCK);
    COF_FAIL_IF(l->fd < 0, COF_ERR_SYSTEM, "bootstrap: socket: %s", strerror(errno));
    while (bind(l->fd, (struct sockaddr *)&address, bytes) != 0) {
        COF_FAIL_IF(errno != EADDRINUSE, COF_ERR_SYSTEM, "bootstrap: bind: %s", strerror(errno));
        *is_taken = cofi_now() >= (patience < deadline ? patience : deadline);
        COF_FAIL_IF(*is_taken, COF_ERR_INVALID, "bootstrap: address in use");
        nap();
    }
    COF_FAIL_IF(listen(l->fd, l->room) != 0, COF_ERR_SYSTEM, "bootstrap: listen: %s",
                strerror(errno));
    return COF_OK;
}

void cofi_listener_close(struct cofi_listener *l)
{
    for (int i = 0; i < l->n_pending; i++)
        cofi_link_close(l->pending[i].fd);
    if (l->fd >= 0) {
        shutdown(l->fd, SHUT_RDWR); /* also where a child of this process holds it too */
        cofi_link_close(l->fd);
    }
    free(l->pending);
    free(l->poll);
    *l = (struct cofi_listener){.fd = -1};
}

static void drop(struct cofi_listener *l, int i)
{
    cofi_link_close(l->pending[i].fd);
    l->pending[i] = l->pending[--l->n_pending];
}

static cof_status accept_all(struct cofi_listener *l)
{
    for (;;) {
        int fd = cofi_link_accept(l->fd);
        if (fd < 0) {
            COF_FAIL_IF(errno != EAGAIN && errno != EINTR && errno != ECONNABORTED, COF_ERR_SYSTEM,
                        "bootstrap: accept: %s", strerror(errno));
            return COF_OK;
        }
        if (check_user(fd) != COF_OK) {
            cofi_link_close(fd);
            continue;
        }
        if (l->n_pending == l->room) { /* more than there are ranks: the oldest is none */
            int oldest = 0;
            for (int i = 1; i < l->n_pending; i++)
                if (l->pending[i].until < l->pending[oldest].until)
                    oldest = i;
            drop(l, oldest);
        }
        l->pending[l->n_pending++] = (struct cofi_pending){fd, cofi_now() + HELLO_NS};
    }
}

/* A rank sends its hello in one piece. */
enum who { SILENT, STRANGER, RANK };

static enum who look_at(int fd, const struct cofi_hello *own)
{
    struct cofi_hello h;
    ssize_t n = recv(fd, &h, sizeof h, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return SILENT;
    return n == (ssize_t)sizeof h && h.magic == own->magic && h.token == own->token ? RANK
                                                                                     : STRANGER;
}

/* The place of a connection that has said hello; -1 when there is none. */
static int find_rank(struct cofi_listener *l, const struct cofi_hello *own)
{
    for (int i = 0; i < l->n_pending;) {
        enum who who = look_at(l->pending[i].fd, own);
        if (who == RANK)
            return i;
        if (who == STRANGER || cofi_now() >= l->pending[i].until)
            drop(l, i);
        else
            i++;
    }
    return -1;
}

static void wait_for_any(struct cofi_listener *l, int64_t deadline)
{
    int64_t rest = deadline - cofi_now(), longest = 100000000; /* also for silent ones to run out */
    l->poll[0] = (struct pollfd){.fd = l->fd, .events = POLLIN};
    for (int i = 0; i < l->n_pending; i++)
        l->poll[i + 1] = (struct pollfd){.fd = l->pending[i].fd, .events = POLLIN};
    if (rest > 0)
        poll(l->poll, (nfds_t)l->n_pending + 1,
             (int)((rest < longest ? rest : longest) / 1000000 + 1));
}

cof_status cofi_listener_next(struct cofi_listener *l, const struct cofi_hello *own,
                              struct cofi_hello *hello_out, int *fd_out, int64_t deadline)
{
    for (;;) {
        COF_TRY(accept_all(l));
        int i = find_rank(l, own);
        if (i >= 0) {
            *fd_out = l->pending[i].fd;
            l->pending[i] = l->pending[--l->n_pending];
            if (cofi_link_recv(*fd_out, hello_out, sizeof *hello_out, cofi_now()) == COF_OK)
                return COF_OK;
            cofi_link_close(*fd_out);
        }
        if (deadline != COFI_NEVER && cofi_now() >= deadline)
            return COF_ERR_TIMEOUT;
        wait_for_any(l, deadline);
    }
}
