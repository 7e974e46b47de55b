/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Structs that begin with `size_t size` and grow at their end from version to version. */
#ifndef COFI_SIZED_H
#define COFI_SIZED_H

#include <stddef.h>

#include "cofuse/status.h"

#define COFI_SIZED_MAX_BYTES (1 << 16) /* what is more is no size */

/* Copies a caller's struct into ours, `bytes` long, of which the first version had `first_bytes`
 * (COFI_SIZE_THROUGH its last field): a shorter one of an older caller is filled up with zeros (the
 * defaults), a longer one of a newer caller is taken when what we do not know in it is zero.
 * COF_ERR_INVALID otherwise; `name` is the argument's, for the text. */
#define COFI_SIZE_THROUGH(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

cof_status cofi_sized_read(void *dst, size_t bytes, size_t first_bytes, const void *src,
                           const char *name);

#endif
