/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef COFI_MEMORY_H
#define COFI_MEMORY_H

#include <stddef.h>

#include "cofuse/status.h"

/* COF_ERR_NOMEM when `bytes` more cannot be had: compares with the memory available and the limits
 * of the cgroup and of those above it (v1 and v2). Past these the kernel would kill, not refuse. */
cof_status cofi_memory_check(size_t bytes);
/* The same with /proc and /sys below `root`, for tests. */
cof_status cofi_memory_check_below(const char *root, size_t bytes);

/* The same for a memfd that will be `file_bytes` long, with `bytes` more of it filled: past
 * RLIMIT_FSIZE the kernel sends SIGXFSZ. */
cof_status cofi_memory_check_file(size_t bytes, size_t file_bytes);

#endif
