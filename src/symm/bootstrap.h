/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Parts of the bootstrap: the address where ranks meet that have no socket yet, and the caller's
 * all-gather that names it. */
#ifndef COFI_BOOTSTRAP_H
#define COFI_BOOTSTRAP_H

#include <poll.h>

#include "symm/symm.h"

#define COFI_HELLO_MAGIC UINT64_C(0x636f667573653032) /* "cofuse02" */
#define COFI_ONE_HOST " (all ranks must be on one host, in one network namespace)"

/* ---- bootstrap_address.c ---- */

struct cofi_pending {
    int fd;
    int64_t until; /* a rank says hello at once */
};

/* Rank 0's side of the address, and who has connected and not said hello yet. */
struct cofi_listener {
    int fd; /* -1: not open */
    int n_pending, room;
    struct cofi_pending *pending;
    struct pollfd *poll; /* room + 1 */
};

/* *is_taken: it failed because another process has had the address for some time. */
cof_status cofi_listener_open(const cof_world *world, struct cofi_listener *listener,
                              bool *is_taken, int64_t deadline);
/* The next connection that says hello with the magic and token of `own`: its hello, read, and its
 * socket. Others are hung up on, and hold nobody up. COF_ERR_TIMEOUT comes without a text. */
cof_status cofi_listener_next(struct cofi_listener *listener, const struct cofi_hello *own,
                              struct cofi_hello *hello_out, int *fd_out, int64_t deadline);
void cofi_listener_close(struct cofi_listener *listener);

/* Any other rank, and one that is a second rank 0: world->socket[0], as soon as rank 0 listens. */
cof_status cofi_connect_to_rank0(cof_world *world, int64_t deadline);

/* ---- bootstrap_allgather.c ---- */

/* What ranks exchange through the caller's all-gather. The size is for all versions. */
struct cofi_record {
    uint64_t magic;
    uint32_t version;
    int32_t rank, n_ranks;
    int32_t status;    /* this rank's own, of what it did before */
    uint32_t user, unused;
    uint64_t boot, net; /* hashes of the boot id and of the network namespace: the host */
    uint8_t token[16]; /* random; rank 0's names the address */
};

/* Calls options->allgather, whatever `own` is: what this rank found before, so that an error of one
 * rank becomes an error of all. On success `job` names the world. */
cof_status cofi_bootstrap_allgather(const cof_world_options *options, cof_status own,
                                    char job[COFI_JOB_BYTES]);

#endif
