/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The engine of CUDA devices, as its files see it.
 *
 *   engine_cuda.c    worlds: device, abort words, tables of functions
 *   arena_cuda.c     arenas: slabs in device memory, control blocks in shared host memory
 *   attach_cuda.c    arenas of the caller's memory
 *   peers_cuda.c     who reaches whom, from what all ranks told (no CUDA calls)
 *   watch_cuda.c     the thread that looks at the sockets
 *   transfer_cuda.c  put, get, signal, wait
 *   call_cuda.c      plans' calls
 *   kernels_cuda.cu  all kernels of the runtime */
#ifndef COFI_ENGINE_CUDA_H
#define COFI_ENGINE_CUDA_H

#include "backend/cuda/device_cuda.h"
#include "device/device_arena.h"
#include "symm/engine.h"

struct cofi_cuda_world {
    int device;      /* CUDA's number in this process */
    int n_sms;
    int n_ranks_here; /* ranks of the world on this device, this one included */
    int max_ctas;     /* 0: no cap */
    cudaStream_t now;   /* serves COF_STREAM_NOW */
    cudaStream_t setup; /* for what creation calls copy and clear; never waits for a peer */
    struct cofi_cuda_page *page;   /* abort words and the ranks' states, host memory */
    struct cofi_cuda_watch *watch; /* NULL: not started */
    int memory; /* enum cofi_cuda_memory: agreed over the ranks */
};

/* What cof_arena.mapping is. */
struct cofi_cuda_arena {
    int device;
    cudaStream_t setup; /* the world's */
    struct cofd_arena *on_device;    /* = cof_arena.on_device */
    struct cofd_binding *bindings;   /* COFD_MAX_PLANS, in device memory */
    _Atomic uint64_t *binding_table; /* COFD_MAX_PLANS, in this rank's host mapping, of device
                                        pointers into `bindings`; 0: free */
    /* What undoes it: see arena_cuda.c. */
    void *owned;
};

static inline struct cofi_cuda_arena *cofi_cuda_arena(const cof_arena *a)
{
    return a->mapping;
}

/* transfer_cuda.c: the slots of struct cofi_device_ops of the same names. */
cof_status cofi_cuda_put(cof_arena *arena, int peer, size_t offset, const void *src, size_t bytes,
                         void *stream);
cof_status cofi_cuda_get(cof_arena *arena, void *dst, int peer, size_t offset, size_t bytes,
                         void *stream);
cof_status cofi_cuda_signal(cof_arena *arena, int peer, int word, void *stream);
cof_status cofi_cuda_wait(cof_arena *arena, int peer, int word, void *stream);
cof_status cofi_cuda_fill(cof_arena *arena, void *dst, size_t bytes, void *stream);
cof_status cofi_cuda_set_words(cof_arena *arena, size_t words_offset, int purpose, uint64_t value);

/* kernels_cuda.cu: loads every kernel of the runtime on the current device, so that no first launch
 * has to wait behind a kernel that waits. */
cof_status cofi_cuda_load_kernels(void);

#endif
