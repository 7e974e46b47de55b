/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A kernel that waits cannot look at sockets. So one thread of the world sleeps in poll() on those
 * of the other ranks, for hang-ups only: it sets the abort words and states that kernels read. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "symm/engine_cuda.h"
#include "symm/fork.h"

struct cofi_cuda_watch {
    cof_world *world;
    pthread_t thread;
    int end_fd;
    nfds_t n_polled;
    struct pollfd *polled; /* the eventfd first */
};

static void *watch_main(void *arg)
{
    struct cofi_cuda_watch *w = arg;
    for (;;) {
        if (poll(w->polled, w->n_polled, -1) < 0) {
            if (errno == EINTR || errno == EAGAIN || errno == ENOMEM)
                continue;
            return NULL;
        }
        if (w->polled[0].revents)
            return NULL;
        cofi_world_poll(w->world);
        for (nfds_t i = 1; i < w->n_polled; i++)
            if (w->polled[i].revents)
                w->polled[i].fd = -1; /* seen: nothing more comes */
    }
}

/* Signals are for the caller's threads. */
static int start_thread(struct cofi_cuda_watch *w)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&w->thread, NULL, watch_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        pthread_setname_np(w->thread, "cofuse-watch");
    return error;
}

static cof_status start(cof_world *world, struct cofi_cuda_watch *w)
{
    w->world = world;
    w->polled = calloc((size_t)world->n_ranks + 1, sizeof *w->polled);
    COF_FAIL_IF(!w->polled, COF_ERR_NOMEM, "world: no memory");
    cofi_fork_hold();
    w->end_fd = cofi_fork_enter_fd(eventfd(0, EFD_CLOEXEC));
    cofi_fork_release();
    COF_FAIL_IF(w->end_fd < 0, COF_ERR_SYSTEM, "world: eventfd: %s", strerror(errno));
    w->polled[w->n_polled++] = (struct pollfd){.fd = w->end_fd, .events = POLLIN};
    for (int r = 0; r < world->n_ranks; r++)
        if (world->socket[r] >= 0)
            w->polled[w->n_polled++] =
                (struct pollfd){.fd = world->socket[r], .events = POLLRDHUP};
    int error = start_thread(w);
    COF_FAIL_IF(error, COF_ERR_SYSTEM, "world: no thread to watch the ranks: %s", strerror(error));
    return COF_OK;
}

cof_status cofi_cuda_watch_start(cof_world *world, struct cofi_cuda_watch **out)
{
    struct cofi_cuda_watch *w = calloc(1, sizeof *w);
    COF_FAIL_IF(!w, COF_ERR_NOMEM, "world: no memory");
    w->end_fd = -1;
    cof_status status = start(world, w);
    if (status == COF_OK) {
        *out = w;
        return COF_OK;
    }
    if (w->end_fd >= 0)
        cofi_link_close(w->end_fd);
    cofi_cuda_watch_forget(w);
    return status;
}

void cofi_cuda_watch_stop(struct cofi_cuda_watch *w)
{
    if (!w)
        return;
    while (eventfd_write(w->end_fd, 1) != 0 && errno == EINTR)
        continue;
    pthread_join(w->thread, NULL);
    cofi_link_close(w->end_fd);
    cofi_cuda_watch_forget(w);
}

void cofi_cuda_watch_forget(struct cofi_cuda_watch *w)
{
    if (w)
        free(w->polled);
    free(w);
}
