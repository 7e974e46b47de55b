/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What fork does to worlds.
 *
 * A rank is alive to the others as long as one process holds its sockets. A child of fork must not
 * hold them, or a rank that is killed seems to live on in its child. So every descriptor of a world
 * is in one table, from the moment it is made until it is closed, and the child closes them all:
 * with close alone, since bye and shutdown would be the parent's.
 *
 * The locks of all worlds are taken across fork, so that the child finds the lists whole and the
 * locks free, and can destroy what it has copies of. Order: the lock here, then those of worlds. */
#ifndef COFI_FORK_H
#define COFI_FORK_H

#include "core/error.h"

struct cof_world;

/* A world is added before its first descriptor is made and its lock is taken. The first world of
 * the process registers the handlers: a fork that another thread is in at that moment has none. */
cof_status cofi_fork_add_world(struct cof_world *world);
void cofi_fork_remove_world(struct cof_world *world); /* one that is not there is fine */

/* Around system calls on the descriptors of worlds that belong together, and none of which waits,
 * and around looking at a list of the whole process: neither a fork nor another thread's calls come
 * between. Not with the lock of a world held. */
void cofi_fork_hold(void);
void cofi_fork_release(void);

/* While held. Enters `fd` and returns it; where there is no memory it closes it and returns -1 with
 * errno set; a negative one is returned as it is. */
int cofi_fork_enter_fd(int fd);
/* Closes a descriptor that was entered. */
void cofi_fork_close_fd(int fd);

#endif
