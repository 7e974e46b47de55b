/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Host memory of all ranks of a team: rank 0 makes one memfd, which has no name and is gone with
 * its last user, and hands it over a socket. Every rank reserves its own part of it before anyone
 * touches it, so that memory that is not there is an error and never a SIGBUS, and so that a part's
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

static cof_status make_memfd(const cof_team *t, size_t bytes, int *fd_out)
{
    *fd_out = -1;
    if (t->rank != 0)
        return COF_OK;
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

static cof_status reserve_and_map(const cof_team *t, int fd, size_t part_bytes, void **base_out)
{
    size_t bytes = (size_t)t->n_ranks * part_bytes;
    COF_FAIL_IF(COFI_FAULT(ARENA_NOMEM, t->rank), COF_ERR_NOMEM, "arena: refused by a fault hook");
    COF_FAIL_IF(fd < 0, COF_ERR_SYSTEM, "arena: no descriptor left for shared memory (ulimit -n)");
    COF_TRY(cofi_memory_check_file(part_bytes, bytes));
    COF_TRY(reserve(fd, (size_t)t->rank * part_bytes, part_bytes));
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    COF_FAIL_IF(base == MAP_FAILED, COF_ERR_NOMEM, "arena: mapping %zu bytes: %s", bytes,
                strerror(errno));
    madvise(base, bytes, MADV_DONTFORK); /* a child must not keep the memory of a dead rank */
    *base_out = base;
    return COF_OK;
}

cof_status cofi_shared_map(cof_team *t, size_t part_bytes, void **base_out)
{
    int made, fd = -1;
    *base_out = NULL;
    cof_status status = make_memfd(t, (size_t)t->n_ranks * part_bytes, &made);
    status = cofi_team_agree(t, "arena create", status);
    if (status == COF_OK)
        status = cofi_team_bcast_fd(t, made, &fd);
    if (status == COF_OK) {
        status = reserve_and_map(t, fd, part_bytes, base_out);
        status = cofi_team_agree(t, "arena reserve", status);
        if (status != COF_OK && *base_out) {
            munmap(*base_out, (size_t)t->n_ranks * part_bytes);
            *base_out = NULL;
        }
    }
    if (made >= 0)
        close(made);
    if (fd >= 0 && fd != made)
        close(fd);
    return status;
}
