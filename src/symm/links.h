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

cof_status cofi_link_send(int socket, const void *data, size_t bytes, int64_t deadline);
/* Until there is something to read, or a hang-up. */
cof_status cofi_link_wait(int socket, int64_t deadline);
cof_status cofi_link_recv(int socket, void *data, size_t bytes, int64_t deadline);

/* One descriptor with `bytes` bytes of data beside it; the sender keeps its own copy. *fd_out is -1
 * when the data came and no descriptor: this process has none left. */
cof_status cofi_link_send_fd(int socket, int fd, const void *data, size_t bytes, int64_t deadline);
cof_status cofi_link_recv_fd(int socket, int *fd_out, void *data, size_t bytes, int64_t deadline);

/* Whether the peer's end is closed; does not read. Any thread. */
bool cofi_link_hung_up(int socket);
/* A rank that leaves in order says so by its last eight bytes, and shuts the socket down; one that
 * dies hangs up without. To be asked of a socket that hung up, by one thread at a time. */
bool cofi_link_said_bye(int socket);
void cofi_link_say_bye(int socket);

#endif
