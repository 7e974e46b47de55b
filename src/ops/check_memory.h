/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Buffers of checks where the ranks work, host memory or their device's, each between two red zones
 * and with a copy in host memory: so one case runs on all devices. */
#ifndef COFI_CHECK_MEMORY_H
#define COFI_CHECK_MEMORY_H

#include "ops/check.h"

struct cofi_check_memory {
    char *data; /* where the ranks work; 128-byte aligned */
    char *host; /* what an upload takes there, and what a download found */
    size_t bytes;
    cof_world *world;
    char *base, *host_base; /* with the red zones */
    bool is_borrowed, is_pooled;
};

/* Poisoned: NaN in every type, here and there. Local; calls on other streams may be on. */
cof_status cofi_check_memory_open(cof_world *world, size_t bytes, struct cofi_check_memory *memory);
/* In cofi_check_memory_span(bytes) bytes that the caller has there, as from cof_arena_alloc. The
 * data begins COFI_CHECK_RED_BYTES behind `base`. */
enum { COFI_CHECK_RED_BYTES = 512 };
size_t cofi_check_memory_span(size_t bytes);
cof_status cofi_check_memory_open_at(cof_world *world, void *base, size_t bytes,
                                     struct cofi_check_memory *memory);
void cofi_check_memory_close(struct cofi_check_memory *memory); /* unopened is fine */

/* Whole buffers. Done when they return; nothing that uses the buffer is on. */
cof_status cofi_check_memory_upload(struct cofi_check_memory *memory);
cof_status cofi_check_memory_download(struct cofi_check_memory *memory); /* red zones too */
cof_status cofi_check_memory_poison(struct cofi_check_memory *memory); /* there alone */
bool cofi_check_memory_intact(const struct cofi_check_memory *memory); /* at the last download */

/* For tensors in such memory. */
cof_device cofi_check_memory_device(const cof_world *world);

#endif
