/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* FNV-1a, 64 bits: for comparing descriptions over ranks, not against malice. */
#ifndef COFI_HASH_H
#define COFI_HASH_H

#include <stddef.h>
#include <stdint.h>

#define COFI_HASH_SEED UINT64_C(0xcbf29ce484222325)

static inline uint64_t cofi_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* One more 64-bit value into a hash. */
static inline uint64_t cofi_hash_u64(uint64_t hash, uint64_t value)
{
    return cofi_hash(hash, &value, sizeof value);
}

#endif
