/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What an engine whose ranks work on devices adds to struct cofi_engine_ops: slabs lie in device
 * memory, work is enqueued on the device's streams. A stream here is the handle of a cof_stream of
 * kind COF_STREAM_KIND_CUDA; all calls but open and join find the world's device themselves, and
 * leave the calling thread's current device as it was.
 *
 * Enqueuing calls (put .. wait) allocate nothing, take no lock and wait for nothing; they may be
 * captured into a graph. The caller has checked arguments and looked at the arena. */
#ifndef COFI_DEVICE_OPS_H
#define COFI_DEVICE_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "cofuse/status.h"

struct cofi_binding;
struct cof_arena;
struct cof_world;
struct cof_world_options;

struct cofi_device_ops {
    /* Local, before the world's team is made: chooses the device, makes its context, loads every
     * kernel, takes the page of abort words. world->device is set early: what an open that
     * fails has made is undone by close. */
    cof_status (*open)(struct cof_world *world, const struct cof_world_options *options);
    /* Collective over the world's team, after all ranks have opened: compares devices, proves with
     * real bytes that all reach each other, starts the watcher. */
    cof_status (*join)(struct cof_world *world);
    /* Local; of a world half made too, and of a child's copy. Teams may live on: they get their
     * abort words back. */
    void (*close)(struct cof_world *world);

    /* The word of a new team that kernels can see, zero; NULL after a text: there is none left. */
    _Atomic uint64_t *(*take_abort_word)(struct cof_world *world);
    void (*drop_abort_word)(struct cof_world *world, _Atomic uint64_t *word);

    int (*number)(const struct cof_world *world); /* of the device, in this process */
    /* The stream behind COF_STREAM_NOW. */
    void *(*stream_now)(struct cof_world *world);
    /* COF_ERR_INVALID for a stream of another device: CUDA would run the work there. */
    cof_status (*check_stream)(struct cof_world *world, void *stream);
    cof_status (*stream_open)(struct cof_world *world, void **stream_out);
    void (*stream_close)(void *stream);
    cof_status (*stream_sync)(void *stream);
    /* Events come from a pool of the process; a ticket is good for the next 1024 records. */
    cof_status (*event_record)(void *stream, uint64_t *ticket_out);
    cof_status (*event_wait)(void *stream, uint64_t ticket);

    /* COF_ERR_INVALID naming the argument where the device cannot reach memory by itself. */
    cof_status (*check_memory)(struct cof_arena *arena, const char *name, const void *at);

    /* `offset` into the peer's data. */
    cof_status (*put)(struct cof_arena *arena, int peer, size_t offset, const void *src,
                      size_t bytes, void *stream);
    cof_status (*get)(struct cof_arena *arena, void *dst, int peer, size_t offset, size_t bytes,
                      void *stream);
    cof_status (*signal)(struct cof_arena *arena, int peer, int word, void *stream);
    cof_status (*wait)(struct cof_arena *arena, int peer, int word, void *stream);
    /* Bytes of 0xff, where a get cannot be had. */
    cof_status (*fill)(struct cof_arena *arena, void *dst, size_t bytes, void *stream);

    /* Own words of a purpose, of all writers. Done when it returns. */
    cof_status (*set_words)(struct cof_arena *arena, size_t words_offset, int purpose,
                            uint64_t value);
    /* A plan's place in an arena, for kernels: binding->on_device. Local; unbind after the last
     * call on it has run. */
    cof_status (*bind)(struct cofi_binding *binding);
    void (*unbind)(struct cofi_binding *binding);
};

/* NULL in a build without CUDA. */
const struct cofi_device_ops *cofi_cuda_device(void);

#endif
