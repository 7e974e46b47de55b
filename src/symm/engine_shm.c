/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks are processes of one host: the slabs are host memory that all of them map. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "symm/engine.h"

static void unmap(cof_arena *a)
{
    if (a->mapping)
        munmap(a->mapping, a->mapping_bytes);
    a->mapping = NULL;
}

static cof_status map(cof_arena *a, void *const *peers)
{
    (void)peers;
    COF_TRY(cofi_shared_map(a->team, a->slab_bytes, &a->mapping));
    a->mapping_bytes = (size_t)a->n_ranks * a->slab_bytes;
    for (int r = 0; r < a->n_ranks; r++)
        a->base[r] = (char *)a->mapping + (size_t)r * a->slab_bytes;
    cofi_control_in_slabs(a);
    return COF_OK;
}

const struct cofi_engine_ops cofi_engine_shm = {
    .name = "shm",
    .caps = COFI_CAP_MAPPED | COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH | COFI_CAP_WORLDS |
            COFI_CAP_REINIT,
    .map = map,
    .unmap = unmap,
    .put = cofi_mapped_put,
    .get = cofi_mapped_get,
    .signal = cofi_mapped_signal,
    .load = cofi_mapped_load,
};

const struct cofi_engine_ops *cofi_engine(cof_engine engine)
{
    switch (engine) {
    case COF_ENGINE_THREAD: return &cofi_engine_thread;
    case COF_ENGINE_SHM: return &cofi_engine_shm;
    case COF_ENGINE_CUDA: return cofi_engine_cuda();
    default: return NULL;
    }
}
