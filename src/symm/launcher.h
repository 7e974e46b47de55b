/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which rank of which job this process is, as the launcher that started it tells by environment
 * variables. */
#ifndef COFI_LAUNCHER_H
#define COFI_LAUNCHER_H

#include <stdbool.h>

#include "cofuse/status.h"

/* Room for w->job: this text, and the number of the world. */
#define COFI_JOB_TOKEN_BYTES 64

struct cofi_identity {
    const char *launcher; /* NULL: none, a world of one */
    int rank, n_ranks;
    bool has_sockets; /* inherited by number (COFUSE_FDS), for the first world of the process */
    /* The same on all ranks of the job and on no other job of this user on this host at this time.
     * "" for a world of one, and where there are only the inherited sockets. */
    char job[COFI_JOB_TOKEN_BYTES];
};

/* Reads the environment. COF_ERR_INVALID names the variable, its value and its rule;
 * COF_ERR_UNSUPPORTED when the job's ranks are on several hosts. */
cof_status cofi_launcher_identity(struct cofi_identity *out);

#endif
