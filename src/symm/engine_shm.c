/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks are processes of one host: rank 0 makes one memfd, which has no name and is gone with its
 * last user, and hands it over a socket. Every rank reserves its own slab of it before anyone
 * touches it, so that memory that is not there is an error and never a SIGBUS, and so that a slab's
 * pages lie near its rank. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/faults.h"
#include "symm/engine.h"
#include "symm/memory.h"

static cof_status make_memfd(cof_arena *a, int *fd_out)
{
    *fd_out = -1;
    if (a->rank != 0)
        return COF_OK;
    size_t bytes = (size_t)a->n_ranks * a->slab_bytes;
    COF_TRY(cofi_memory_check_file(bytes, bytes));
    int fd = memfd_create("cofuse", MFD_CLOEXEC);
    COF_FAIL_IF(fd < 0, COF_ERR_SYSTEM, "arena: memfd_create: %s", strerror(errno));
    *fd_out = fd;
    COF_FAIL_IF(ftruncate(fd, (off_t)bytes) != 0, COF_ERR_NOMEM, "arena: %zu bytes: %s", bytes,
                strerror(errno));
    return COF_OK;
}

/* Piecewise: some kernels undo an allocation that a signal interrupts. */
static cof_status reserve(int fd, size_t offset, size_t bytes)
{
    const size_t piece = (size_t)16 << 20;
    for (size_t done = 0; done < bytes; done += piece) {
        size_t n = bytes - done < piece ? bytes - done : piece;
        int error;
        do
            error = posix_fallocate(fd, (off_t)(offset + done), (off_t)n);
        while (error == EINTR);
        COF_FAIL_IF(error, COF_ERR_NOMEM, "arena: %zu bytes of shared memory: %s", bytes,
                    strerror(error));
    }
    return COF_OK;
}

static cof_status reserve_and_map(cof_arena *a, int fd)
{
    size_t bytes = (size_t)a->n_ranks * a->slab_bytes;
    COF_FAIL_IF(COFI_FAULT(ARENA_NOMEM, a->rank), COF_ERR_NOMEM, "arena: refused by a fault hook");
    COF_FAIL_IF(fd < 0, COF_ERR_SYSTEM, "arena: no descriptor left for shared memory (ulimit -n)");
    COF_TRY(cofi_memory_check_file(a->slab_bytes, bytes));
    COF_TRY(reserve(fd, (size_t)a->rank * a->slab_bytes, a->slab_bytes));
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    COF_FAIL_IF(base == MAP_FAILED, COF_ERR_NOMEM, "arena: mapping %zu bytes: %s", bytes,
                strerror(errno));
    madvise(base, bytes, MADV_DONTFORK); /* a child must not keep the memory of a dead rank */
    a->mapping = base;
    a->mapping_bytes = bytes;
    for (int r = 0; r < a->n_ranks; r++)
        a->base[r] = (char *)base + (size_t)r * a->slab_bytes;
    cofi_control_in_slabs(a);
    return COF_OK;
}

static void unmap(cof_arena *a)
{
    if (a->mapping)
        munmap(a->mapping, a->mapping_bytes);
    a->mapping = NULL;
}

static cof_status map(cof_arena *a, void *const *peers)
{
    (void)peers;
    int made, fd = -1;
    cof_status status = make_memfd(a, &made);
    status = cofi_team_agree(a->team, "arena create", status);
    if (status == COF_OK)
        status = cofi_team_bcast_fd(a->team, made, &fd);
    if (status == COF_OK) {
        status = reserve_and_map(a, fd);
        status = cofi_team_agree(a->team, "arena reserve", status);
        if (status != COF_OK)
            unmap(a);
    }
    if (made >= 0)
        close(made);
    if (fd >= 0 && fd != made)
        close(fd);
    return status;
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
    default: return NULL;
    }
}
