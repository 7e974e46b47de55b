/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which process made an object. A child of fork has copies of its parent's objects, but none of its
 * threads and no place among its ranks: the objects remember their maker, and calls refuse. */
#ifndef COFI_PROCESS_H
#define COFI_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

struct cofi_process {
    uint32_t generation; /* forks between the first process that asked and this one */
    int pid;
};

/* This process, which from now on tells its children apart from itself. */
cof_status cofi_process_this(struct cofi_process *out);

/* Any thread, no system call. */
bool cofi_process_is_this(const struct cofi_process *maker);

/* COF_ERR_INVALID in a child of the maker; `what` is the object: "world". */
cof_status cofi_process_check(const struct cofi_process *maker, const char *what);

#endif
