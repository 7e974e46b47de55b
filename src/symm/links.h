/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Bounded transfers over the unix sockets between ranks. All return COF_OK, COF_ERR_TIMEOUT,
 * COF_ERR_PEER_DEAD (hang-up) or COF_ERR_SYSTEM, and write no text: the caller knows which rank it
 * was and says so. */
#ifndef COFI_LINKS_H
#define COFI_LINKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cofuse/status.h"

/* Making and closing the descriptors of a world: close on exec, and no child of fork keeps them
 * (fork.h). -1 with errno where none was made. */
int cofi_link_socket(int flags); /* 0 or SOCK_NONBLOCK */
int cofi_link_accept(int listener);    /* which must not block */
int cofi_link_pair(int pair_out[2]);   /* 0, or -1 with none made */
int cofi_link_adopt(int inherited_fd); /* that one, or -1: it is closed then */
void cofi_link_close(int fd);

cof_status cofi_link_send(int socket, const void *data, size_t bytes, int64_t deadline);
/* The same, and moves *data and *bytes past what went: to be called again after COF_ERR_TIMEOUT. */
cof_status cofi_link_send_on(int socket, const char **data, size_t *bytes, int64_t deadline);
/* Until a message begins; reads nothing. COF_ERR_PEER_DEAD where none comes any more: after a
 * hang-up, and before a bye, which so stays unread (a message never begins like one). */
cof_status cofi_link_wait(int socket, int64_t deadline);
/* Copies what has come, at most `bytes`, and leaves it unread; how much that was. Never waits. */
size_t cofi_link_peek(int socket, void *data, size_t bytes);
cof_status cofi_link_recv(int socket, void *data, size_t bytes, int64_t deadline);

/* One descriptor with `bytes` bytes of data beside it; the sender keeps its own copy. *fd_out is -1
 * when the data came and no descriptor: this process has none left. */
cof_status cofi_link_send_fd(int socket, int fd, const void *data, size_t bytes, int64_t deadline);
cof_status cofi_link_recv_fd(int socket, int *fd_out, void *data, size_t bytes, int64_t deadline);
/* The same for a descriptor of the world, to be closed by cofi_link_close. */
cof_status cofi_link_recv_socket(int socket, int *fd_out, void *data, size_t bytes,
                                 int64_t deadline);

/* Whether the peer's end is closed; does not read. Any thread. */
bool cofi_link_hung_up(int socket);
/* A rank that leaves in order says so by its last eight bytes, and shuts the socket down; one that
 * dies hangs up without. To be asked of a socket that hung up; any thread, also while another one
 * reads. */
bool cofi_link_said_bye(int socket);
void cofi_link_say_bye(int socket);

#endif
