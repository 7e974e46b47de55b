/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* K and V, or dK and dV, as they lie in exchange buffers: [rows][B][Hkv][dim], K before V. In every
 * array of two, entry 0 is for K and entry 1 for V. */
#ifndef COFI_KV_BUFFER_H
#define COFI_KV_BUFFER_H

#include <stddef.h>
#include <stdint.h>

#include "core/tensor.h"

struct cofi_kv_buffer {
    size_t offset[2];        /* in the arena's data, or in `local` */
    char *local;             /* staging: memory of its own; NULL: in the arena */
    enum cofi_elem elem;
    int64_t row_elements[2]; /* B * Hkv * dim */
};

static inline size_t cofi_kv_bytes(const struct cofi_kv_buffer *b, int is_v, int64_t rows)
{
    return (size_t)(rows * b->row_elements[is_v]) * (size_t)cofi_elem_bytes(b->elem);
}

/* Offset of a row. */
static inline size_t cofi_kv_at(const struct cofi_kv_buffer *b, int is_v, int64_t row)
{
    return b->offset[is_v] + cofi_kv_bytes(b, is_v, row);
}

/* Takes the next bytes of a block that begins at `base` (NULL while only counting). */
static inline void *cofi_take(char *base, size_t *used, size_t bytes)
{
    size_t at = *used;
    *used += (bytes + 127) & ~(size_t)127;
    return base ? base + at : NULL;
}

/* A buffer of `rows` rows in such a block; base = NULL: in an arena's data, or while counting. */
static inline struct cofi_kv_buffer cofi_kv_take(char *base, size_t *used, int64_t rows,
                                                 const int64_t row_elements[2],
                                                 enum cofi_elem elem)
{
    struct cofi_kv_buffer b = {.local = base, .elem = elem,
                               .row_elements = {row_elements[0], row_elements[1]}};
    for (int is_v = 0; is_v < 2; is_v++) {
        b.offset[is_v] = *used;
        cofi_take(NULL, used, cofi_kv_bytes(&b, is_v, rows));
    }
    return b;
}

#endif
