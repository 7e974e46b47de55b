/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The engine of CUDA devices, as its files see it.
 *
 *   engine_cuda.c    worlds: device, streams, tables of functions
 *   page_cuda.c      abort words and states of ranks, where kernels see them
 *   join_cuda.c      what ranks tell each other, and the proof that they reach each other
 *   device_peers.c   who reaches whom, from what all ranks told (no CUDA calls)
 *   share_cuda.c     device memory of all ranks, mapped on all
 *   control_cuda.c   an arena's control blocks in host memory, and what its kernels read
 *   bind_cuda.c      places of plans in an arena
 *   arena_cuda.c     arenas: slabs in device memory
 *   attach_cuda.c    arenas of the caller's memory
 *   watch_cuda.c     the thread that looks at the sockets
 *   transfer_cuda.c  put, get, signal, wait
 *   call_cuda.c      plans' calls
 *   kernels_cuda.cu  all kernels of the runtime */
#ifndef COFI_ENGINE_CUDA_H
#define COFI_ENGINE_CUDA_H

#include "backend/cuda/device_cuda.h"
#include "backend/cuda/memory_cuda.h"
#include "device/device_arena.h"
#include "symm/device_peers.h"
#include "symm/engine.h"

#define COFI_CUDA_TEAMS 512 /* of a world at a time */

/* Host memory that the device reads: abort words of the teams, then the ranks' states. */
struct cofi_cuda_page {
    char *host, *device; /* NULL: none */
    size_t bytes;
    bool is_registered;
    _Atomic bool is_taken[COFI_CUDA_TEAMS];
    _Atomic int *own_state; /* world->state as it was before */
};

struct cofi_cuda_world {
    int device;      /* CUDA's number in this process */
    int n_sms;       /* before the ranks have joined: of this device; then the fewest of any */
    int n_ranks_here; /* ranks of the world on this device, this one included */
    int most_ranks;   /* on any device of the world's: the same on all ranks */
    int max_ctas;     /* 0: no cap */
    bool has_lines;   /* 128-byte lines arrive whole (device/lines.h), between all ranks */
    cudaStream_t now;   /* serves COF_STREAM_NOW */
    cudaStream_t setup; /* for what creation calls copy and clear; never waits for a peer;
                           the device's, in this process */
    struct cofi_cuda_page *page;   /* abort words and the ranks' states, host memory */
    struct cofi_cuda_watch *watch; /* NULL: not started */
    int memory; /* enum cofi_device_memory: agreed over the ranks */
};

/* What cof_arena.mapping is. */
struct cofi_cuda_arena {
    int device;
    cudaStream_t setup; /* the device's */
    struct cofd_arena *on_device;    /* = cof_arena.on_device */
    struct cofd_binding *bindings;   /* COFD_MAX_PLANS, in device memory */
    _Atomic uint64_t *binding_table; /* COFD_MAX_PLANS, in this rank's host mapping, of device
                                        pointers into `bindings`; 0: free */
    /* What undoes it. */
    int rank, n_ranks;
    struct cofi_cuda_block own;    /* the slab, then what kernels read; of attached memory that
                                      alone */
    struct cofi_cuda_block *peers; /* by rank; NULL: none */
    char *control;                 /* all ranks' struct cofi_cuda_control, host memory */
    size_t control_bytes;          /* of one rank */
    struct cofi_cuda_block control_block; /* what it lies in; none: a memfd, registered */
    char *control_on_device;       /* NULL: not known yet */
    struct cofi_cuda_arena *next;  /* in the list of those that others still have open */
};

/* A rank's part of the control blocks. */
struct cofi_cuda_control {
    struct cofi_control control;
    _Atomic uint64_t bindings[COFD_MAX_PLANS];
    _Atomic uint32_t n_closed; /* other ranks that have let go of this rank's slab */
};

static inline struct cofi_cuda_arena *cofi_cuda_arena(const cof_arena *a)
{
    return a->mapping;
}

static inline struct cofi_cuda_control *cofi_cuda_control(const struct cofi_cuda_arena *m, int rank)
{
    return (struct cofi_cuda_control *)(void *)(m->control + (size_t)rank * m->control_bytes);
}

/* join_cuda.c: the slot of struct cofi_device_ops. */
cof_status cofi_cuda_join(cof_world *world);

/* page_cuda.c. What open has made so far is undone by leave and close. */
cof_status cofi_cuda_page_open(cof_world *world);
/* Under the world's lock: teams that live on get their words back. In a child of fork the page is
 * left as it is: it is the parent's. */
void cofi_cuda_page_leave(cof_world *world, bool is_child);
void cofi_cuda_page_close(struct cofi_cuda_page *page, bool is_child); /* NULL: none */
/* The slots of struct cofi_device_ops. */
_Atomic uint64_t *cofi_cuda_take_abort_word(cof_world *world);
void cofi_cuda_drop_abort_word(cof_world *world, _Atomic uint64_t *word);

/* watch_cuda.c: a thread that notices ranks that die or leave while kernels wait. */
cof_status cofi_cuda_watch_start(cof_world *world, struct cofi_cuda_watch **watch_out);
void cofi_cuda_watch_stop(struct cofi_cuda_watch *watch); /* in the process that started it */
void cofi_cuda_watch_forget(struct cofi_cuda_watch *watch); /* in a child */

/* share_cuda.c: collective over the team, from inside the device's context. All ranks' blocks in
 * `blocks`, but this rank's own; on failure of any rank none keeps anything. */
cof_status cofi_cuda_map_blocks(cof_team *team, const struct cofi_cuda_block *own,
                                struct cofi_cuda_block *blocks);

/* control_cuda.c: local but for open, and from inside the device's context. */
/* Collective, two-phase: a->mapping with the control blocks, and a->control. */
cof_status cofi_cuda_control_open(cof_arena *a);
/* Bytes of device memory for what kernels read, and its making in there, when a->base[] is
 * complete. Done when it returns. */
size_t cofi_cuda_tables_bytes(const cof_arena *a);
cof_status cofi_cuda_tables_make(cof_arena *a, char *at);
/* Frees the arena's mapping, or leaves it until other ranks have let go of the slab. */
void cofi_cuda_control_close(cof_arena *a);
/* Frees what was left and can go by now. */
void cofi_cuda_control_sweep(void);

/* bind_cuda.c: the slots of struct cofi_device_ops of the same names. */
cof_status cofi_cuda_bind(struct cofi_binding *binding);
void cofi_cuda_unbind(struct cofi_binding *binding);

/* arena_cuda.c, attach_cuda.c: the slots of struct cofi_engine_ops. */
cof_status cofi_cuda_map(cof_arena *arena, void *const *peers);
cof_status cofi_cuda_attach_map(cof_arena *arena, void *const *peers);
void cofi_cuda_unmap(cof_arena *arena);

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
