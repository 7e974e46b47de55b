/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "symm/fork.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "symm/symm.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cof_world *worlds;
static int register_error;

/* By descriptor: whether it is a world's. */
static struct {
    bool *is_ours;
    int n_slots, n_ours;
} table;

/* ---- handlers ------------------------------------------------------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
    for (cof_world *w = worlds; w; w = w->next)
        pthread_mutex_lock(&w->lock);
}

static void unlock_all(void)
{
    for (cof_world *w = worlds; w; w = w->next)
        pthread_mutex_unlock(&w->lock);
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    for (int fd = 0; fd < table.n_slots; fd++)
        if (table.is_ours[fd])
            close(fd);
    if (table.n_slots > 0)
        memset(table.is_ours, 0, (size_t)table.n_slots * sizeof *table.is_ours);
    table.n_ours = 0;
    unlock_all();
}

static void register_handlers(void)
{
    register_error = pthread_atfork(before_fork, unlock_all, in_child);
}

/* ---- worlds --------------------------------------------------------------------------------- */

cof_status cofi_fork_add_world(cof_world *w)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handlers);
    COF_FAIL_IF(register_error, COF_ERR_NOMEM, "fork handlers: %s", strerror(register_error));
    pthread_mutex_lock(&lock);
    w->next = worlds;
    worlds = w;
    pthread_mutex_unlock(&lock);
    return COF_OK;
}

void cofi_fork_remove_world(cof_world *w)
{
    pthread_mutex_lock(&lock);
    for (cof_world **at = &worlds; *at; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* ---- descriptors ---------------------------------------------------------------------------- */

void cofi_fork_hold(void)
{
    pthread_mutex_lock(&lock);
}

void cofi_fork_release(void)
{
    pthread_mutex_unlock(&lock);
}

static bool make_room(int fd)
{
    if (fd < table.n_slots)
        return true;
    int n = fd < 512 ? 1024 : fd < INT32_MAX / 2 ? 2 * fd : fd + 1;
    bool *grown = realloc(table.is_ours, (size_t)n * sizeof *grown);
    if (!grown)
        return false;
    memset(grown + table.n_slots, 0, (size_t)(n - table.n_slots) * sizeof *grown);
    table.is_ours = grown;
    table.n_slots = n;
    return true;
}

int cofi_fork_enter_fd(int fd)
{
    if (fd < 0)
        return fd;
    if (!make_room(fd)) {
        close(fd);
        errno = ENOMEM;
        return -1;
    }
    table.n_ours += !table.is_ours[fd];
    table.is_ours[fd] = true;
    return fd;
}

void cofi_fork_close_fd(int fd)
{
    pthread_mutex_lock(&lock);
    if (fd >= 0 && fd < table.n_slots && table.is_ours[fd]) {
        table.is_ours[fd] = false;
        close(fd);
        if (--table.n_ours == 0) { /* leaves nothing behind with the last world */
            free(table.is_ours);
            table.is_ours = NULL;
            table.n_slots = 0;
        }
    }
    pthread_mutex_unlock(&lock);
}
