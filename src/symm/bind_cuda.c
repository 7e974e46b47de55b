/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Places of plans in an arena, which the arena's kernels find in its table. */
#include <string.h>

#include "symm/engine_cuda.h"
#include "symm/options_cuda.h"

/* Plans of one arena are made by one thread at a time; others may take theirs away. */
static int free_place(const struct cofi_cuda_arena *m)
{
    for (int i = 0; i < COFD_MAX_PLANS; i++)
        if (atomic_load(&m->binding_table[i]) == 0)
            return i;
    return -1;
}

static cof_status copy_binding(const struct cofi_binding *b, struct cofd_binding *at)
{
    const struct cofi_cuda_arena *m = cofi_cuda_arena(b->arena);
    struct cofd_binding d = {.arena = m->on_device, .words_offset = b->words_offset,
                             .ordinal = b->ordinal, .n_purposes = (uint32_t)b->n_purposes,
                             .acks = b->acks, .tagged_offset = b->tagged_offset,
                             .tagged_bytes = b->tagged_bytes};
    if (b->tagged_step)
        d.tagged_wait = cofi_wait_options(b->arena, b->tagged_step);
    memcpy(d.name, b->op, strnlen(b->op, sizeof d.name));
    if (b->tagged_bytes)
        COF_CUDA(cudaMemsetAsync(b->arena->base[b->arena->rank] + b->tagged_offset, 0,
                                 b->tagged_bytes, m->setup));
    COF_CUDA(cudaMemcpyAsync(at, &d, sizeof d, cudaMemcpyHostToDevice, m->setup));
    COF_CUDA(cudaStreamSynchronize(m->setup));
    return COF_OK;
}

/* Ack words begin near the present epoch, which only the device knows once it has made calls: from
 * 2^31 on an ack of 0 would look like one to come. */
static cof_status begin_acks(const struct cofi_binding *b)
{
    const struct cofi_cuda_arena *m = cofi_cuda_arena(b->arena);
    uint32_t now = 0;
    if (b->acks == 0)
        return COF_OK;
    COF_CUDA(cudaMemcpyAsync(&now, &m->on_device->epoch, sizeof now, cudaMemcpyDeviceToHost,
                             m->setup));
    COF_CUDA(cudaStreamSynchronize(m->setup));
    for (int p = 0; p < b->n_purposes && now != 0; p++)
        if (b->acks >> p & 1)
            COF_TRY(cofi_cuda_set_words(b->arena, b->words_offset, p, now));
    return COF_OK;
}

cof_status cofi_cuda_bind(struct cofi_binding *b)
{
    struct cofi_cuda_arena *m = cofi_cuda_arena(b->arena);
    struct cofi_cuda_scope scope;
    int place = free_place(m);
    COF_FAIL_IF(place < 0, COF_ERR_NOMEM, "arena: it has %d plans, and takes no more",
                COFD_MAX_PLANS);
    COF_TRY(cofi_cuda_enter(m->device, &scope));
    cof_status status = copy_binding(b, m->bindings + place);
    if (status == COF_OK)
        status = begin_acks(b);
    cofi_cuda_leave(&scope);
    COF_TRY(status);
    b->on_device = m->bindings + place;
    b->on_device_idx = place;
    atomic_store(&m->binding_table[place], (uint64_t)(uintptr_t)b->on_device);
    return COF_OK;
}

void cofi_cuda_unbind(struct cofi_binding *b)
{
    atomic_store(&cofi_cuda_arena(b->arena)->binding_table[b->on_device_idx], 0);
    b->on_device = NULL;
}
