/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/sized.h"

#include <string.h>

#include "core/error.h"

cof_status cofi_sized_read(void *dst, size_t bytes, size_t first_bytes, const void *src,
                           const char *name)
{
    COF_FAIL_IF(!src, COF_ERR_INVALID, "%s: NULL", name);
    size_t given;
    memcpy(&given, src, sizeof given);
    COF_FAIL_IF(given < first_bytes || given > COFI_SIZED_MAX_BYTES, COF_ERR_INVALID,
                "%s.size = %zu: wanted the size of the struct, %zu in version %s", name, given,
                bytes, cof_version());
    for (size_t i = bytes; i < given; i++)
        COF_FAIL_IF(((const unsigned char *)src)[i] != 0, COF_ERR_INVALID,
                    "%s.size = %zu: byte %zu is set, in a field that version %s does not know",
                    name, given, i, cof_version());
    size_t known = given < bytes ? given : bytes;
    memcpy(dst, src, known);
    memset((char *)dst + known, 0, bytes - known);
    memcpy(dst, &bytes, sizeof bytes); /* ours is whole now */
    return COF_OK;
}
