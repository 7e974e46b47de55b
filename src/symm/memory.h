/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef COFI_MEMORY_H
#define COFI_MEMORY_H

#include <stddef.h>

#include "cofuse/status.h"

/* COF_ERR_NOMEM when `bytes` more cannot be had: compares with the memory available, the cgroup's
 * limit (v1 and v2) and RLIMIT_FSIZE. Past these the kernel would kill (OOM, SIGXFSZ), not refuse.
 */
cof_status cofi_memory_check(size_t bytes);

#endif
