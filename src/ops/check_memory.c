/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/check_memory.h"

#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "symm/symm.h"

enum { RED = COFI_CHECK_RED_BYTES, ALIGNMENT = 128, POISON = 0xff };

static cof_status copy(cof_world *world, void *dst, const void *src, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(world);
    if (device)
        return device->copy(world, dst, src, bytes);
    memcpy(dst, src, bytes);
    return COF_OK;
}

static void *open_host(size_t bytes)
{
    void *data = NULL;
    return posix_memalign(&data, ALIGNMENT, bytes) == 0 ? data : NULL;
}

/* Of the device's pool while there is room: such memory is copied without a detour. */
static void *open_host_copy(struct cofi_check_memory *m, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(m->world);
    void *data = device ? device->alloc(bytes) : NULL;
    m->is_pooled = data != NULL;
    return data ? data : open_host(bytes);
}

static cof_status open_base(struct cofi_check_memory *m, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(m->world);
    void *data = NULL;
    if (device)
        COF_TRY(device->memory_open(m->world, bytes, &data));
    else
        data = open_host(bytes);
    COF_FAIL_IF(!data, COF_ERR_NOMEM, "check: no memory for a buffer of %zu bytes", bytes);
    m->base = data;
    return COF_OK;
}

size_t cofi_check_memory_span(size_t bytes)
{
    return bytes + 2 * RED;
}

static cof_status open_around(struct cofi_check_memory *m)
{
    size_t span = cofi_check_memory_span(m->bytes);
    m->host_base = open_host_copy(m, span);
    COF_FAIL_IF(!m->host_base, COF_ERR_NOMEM, "check: no memory for a buffer of %zu bytes", span);
    if (!m->is_borrowed)
        COF_TRY(open_base(m, span));
    m->data = m->base + RED;
    m->host = m->host_base + RED;
    cofi_check_red_fill(m->host_base, RED);
    cofi_check_red_fill(m->host + m->bytes, RED);
    memset(m->host, POISON, m->bytes);
    return copy(m->world, m->base, m->host_base, span);
}

static cof_status open_memory(struct cofi_check_memory *m)
{
    cof_status status = open_around(m);
    if (status != COF_OK)
        cofi_check_memory_close(m);
    return status;
}

cof_status cofi_check_memory_open(cof_world *world, size_t bytes, struct cofi_check_memory *m)
{
    *m = (struct cofi_check_memory){.world = world, .bytes = bytes};
    return open_memory(m);
}

cof_status cofi_check_memory_open_at(cof_world *world, void *base, size_t bytes,
                                     struct cofi_check_memory *m)
{
    *m = (struct cofi_check_memory){.world = world, .bytes = bytes, .base = base,
                                    .is_borrowed = true};
    return open_memory(m);
}

void cofi_check_memory_close(struct cofi_check_memory *m)
{
    const struct cofi_check_device *device = m->world ? cofi_check_device(m->world) : NULL;
    if (m->is_pooled)
        device->free(m->host_base);
    else
        free(m->host_base);
    if (!m->is_borrowed && device)
        device->memory_close(m->world, m->base);
    else if (!m->is_borrowed)
        free(m->base);
    *m = (struct cofi_check_memory){0};
}

cof_status cofi_check_memory_upload(struct cofi_check_memory *m)
{
    return copy(m->world, m->data, m->host, m->bytes);
}

cof_status cofi_check_memory_download(struct cofi_check_memory *m)
{
    return copy(m->world, m->host_base, m->base, cofi_check_memory_span(m->bytes));
}

cof_status cofi_check_memory_poison(struct cofi_check_memory *m)
{
    const struct cofi_check_device *device = cofi_check_device(m->world);
    if (device)
        return device->fill(m->world, m->data, POISON, m->bytes);
    memset(m->data, POISON, m->bytes);
    return COF_OK;
}

bool cofi_check_memory_intact(const struct cofi_check_memory *m)
{
    return cofi_check_red_intact(m->host_base, RED) &&
           cofi_check_red_intact(m->host + m->bytes, RED);
}

cof_device cofi_check_memory_device(const cof_world *world)
{
    int device = cof_world_device(world);
    return device < 0 ? (cof_device){COF_DEVICE_CPU, 0} : (cof_device){COF_DEVICE_CUDA, device};
}
