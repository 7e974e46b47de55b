/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The caller's memory. Every rank writes a random number into its own block and looks for the
 * others' numbers in the blocks that were called theirs: that proves mapping and order. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "core/faults.h"
#include "symm/engine.h"

/* A system call says EFAULT where a load of ours would end the process. */
static bool is_readable(const int pipe_fd[2], const char *at)
{
    char scrap;
    return write(pipe_fd[1], at, 1) == 1 && read(pipe_fd[0], &scrap, 1) == 1;
}

/* Puts the byte back where it was. */
static bool is_writable(const int pipe_fd[2], char *at)
{
    return write(pipe_fd[1], at, 1) == 1 && read(pipe_fd[0], at, 1) == 1;
}

/* The first byte of the next page of the front. */
static size_t next_page(const char *base, size_t offset)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return offset + page - (uintptr_t)(base + offset) % page;
}

/* A byte of every page of the front, and the last one of the block. */
static cof_status check_readable(const cof_arena *a, const int pipe_fd[2])
{
    for (int r = 0; r < a->n_ranks; r++) {
        const char *base = a->base[r];
        COF_FAIL_IF(!is_readable(pipe_fd, base + a->slab_bytes - 1), COF_ERR_INVALID,
                    "peers.base[%d] = %p: no %zu bytes can be read there", r, (const void *)base,
                    a->slab_bytes);
        for (size_t offset = 0; offset < a->data_offset; offset = next_page(base, offset))
            COF_FAIL_IF(!is_readable(pipe_fd, base + offset), COF_ERR_INVALID,
                        "peers.base[%d] = %p: byte %zu of %zu cannot be read", r,
                        (const void *)base, offset, a->slab_bytes);
    }
    return COF_OK;
}

static cof_status check_writable(const cof_arena *a, const int pipe_fd[2])
{
    char *base = a->base[a->rank];
    for (size_t offset = 0; offset < a->data_offset; offset = next_page(base, offset))
        COF_FAIL_IF(!is_writable(pipe_fd, base + offset), COF_ERR_INVALID,
                    "peers.base[%d] = %p: byte %zu of the own block cannot be written", a->rank,
                    (void *)base, offset);
    return COF_OK;
}

/* A check that fails may leave a byte in its pipe, so each has its own. */
static cof_status with_pipe(const cof_arena *a,
                            cof_status (*check)(const cof_arena *a, const int pipe_fd[2]))
{
    int fd[2];
    COF_FAIL_IF(pipe2(fd, O_CLOEXEC) != 0, COF_ERR_SYSTEM, "arena: pipe: %s", strerror(errno));
    cof_status status = check(a, fd);
    close(fd[0]);
    close(fd[1]);
    return status;
}

static cof_status compare_cookies(cof_arena *a, const uint64_t *cookies)
{
    for (int r = 0; r < a->n_ranks; r++)
        COF_FAIL_IF(
            cofi_mapped_load(a, r, offsetof(struct cofi_control, cookie)) != cookies[r],
            COF_ERR_INVALID, "peers.base[%d] = %p: is not the block of rank %d", r,
            (void *)a->base[r], a->team->world_rank[r]);
    return COF_OK;
}

static cof_status take_blocks(cof_arena *a, void *const *peers)
{
    for (int r = 0; r < a->n_ranks; r++)
        a->base[r] = peers[r];
    cofi_control_in_slabs(a);
    COF_FAIL_IF(COFI_FAULT(ARENA_NOMEM, a->rank), COF_ERR_NOMEM, "arena: refused by a fault hook");
    return with_pipe(a, check_readable);
}

static cof_status begin_own(cof_arena *a, uint64_t *cookie_out)
{
    COF_TRY(with_pipe(a, check_writable));
    COF_FAIL_IF(getrandom(cookie_out, sizeof *cookie_out, 0) != (ssize_t)sizeof *cookie_out,
                COF_ERR_SYSTEM, "arena: getrandom: %s", strerror(errno));
    *cookie_out |= 1;
    memset(a->base[a->rank], 0, a->data_offset);
    atomic_store(&cofi_own_control(a)->cookie, *cookie_out);
    return COF_OK;
}

static cof_status map(cof_arena *a, void *const *peers)
{
    uint64_t cookie = 0, *cookies = calloc((size_t)a->n_ranks, sizeof *cookies);
    cof_status status = cookies ? take_blocks(a, peers)
                                : COF_FAIL(COF_ERR_NOMEM, "arena: no memory");
    status = cofi_team_agree(a->team, "arena attach", status);
    if (status == COF_OK) { /* all have looked at what each one now writes */
        status = begin_own(a, &cookie);
        status = cofi_team_agree(a->team, "arena attach", status);
    }
    if (status == COF_OK)
        status = cofi_team_exchange(a->team, "arena attach", &cookie, cookies, sizeof cookie);
    if (status == COF_OK && !COFI_FAULT(COOKIE, a->rank)) {
        status = compare_cookies(a, cookies);
        status = cofi_team_agree(a->team, "arena attach", status);
    }
    if (status == COF_OK) /* all have looked; nobody uses it before all have zeroed */
        atomic_store(&cofi_own_control(a)->cookie, 0);
    if (status == COF_OK)
        status = cofi_team_agree(a->team, "arena attach", COF_OK);
    free(cookies);
    return status;
}

static void unmap(cof_arena *a)
{
    (void)a; /* the caller's */
}

const struct cofi_engine_ops cofi_engine_attach = {
    .name = "attach",
    .caps = COFI_CAP_MAPPED | COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH | COFI_CAP_WORLDS |
            COFI_CAP_REINIT,
    .map = map,
    .unmap = unmap,
    .put = cofi_mapped_put,
    .get = cofi_mapped_get,
    .signal = cofi_mapped_signal,
    .load = cofi_mapped_load,
};
