/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks that already have an all-gather (MPI, torch.distributed): one call of it checks that all
 * are on one host, and tells all the address of rank 0, which nobody else can guess. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/hash.h"
#include "symm/bootstrap.h"

#define RECORD_MAGIC UINT64_C(0x636f667573656167) /* "cofuseag" */

_Static_assert(sizeof(struct cofi_record) == 64, "callers of all versions exchange 64 bytes");

/* 0 where there is no such file: then it tells nothing, on any rank of the host. */
static uint64_t hash_boot_id(void)
{
    char text[64];
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    return n > 0 ? cofi_hash(COFI_HASH_SEED, text, (size_t)n) : 0;
}

/* Of this thread: abstract addresses belong to it. */
static uint64_t hash_net_namespace(void)
{
    struct stat info;
    if (stat("/proc/thread-self/ns/net", &info) != 0)
        return 0;
    return cofi_hash_u64(cofi_hash_u64(COFI_HASH_SEED, info.st_dev), info.st_ino);
}

static cof_status fill_record(const cof_world_options *o, cof_status own,
                              struct cofi_record *record)
{
    *record = (struct cofi_record){
        .magic = RECORD_MAGIC,
        .version = COF_VERSION_MAJOR << 16 | COF_VERSION_MINOR << 8 | COF_VERSION_PATCH,
        .rank = o->rank, .n_ranks = o->n_ranks, .user = (uint32_t)getuid(),
        .boot = hash_boot_id(), .net = hash_net_namespace()};
    if (own == COF_OK &&
        getrandom(record->token, sizeof record->token, 0) != (ssize_t)sizeof record->token)
        own = COF_FAIL(COF_ERR_SYSTEM, "bootstrap: getrandom: %s", strerror(errno));
    record->status = own;
    return own;
}

static cof_status check_record(const struct cofi_record *own, const struct cofi_record *all, int r)
{
    const struct cofi_record *a = &all[0], *b = &all[r];
    COF_FAIL_IF(b->magic != RECORD_MAGIC, COF_ERR_MISMATCH,
                "options.allgather: place %d holds no record of a rank", r);
    COF_FAIL_IF(b->status != COF_OK, COF_ERR_MISMATCH,
                "rank %d could not join (%s); its own error says why", r,
                cof_status_name((cof_status)b->status));
    COF_FAIL_IF(b->rank != r, COF_ERR_MISMATCH,
                "options.allgather: place %d holds the record of rank %d; wanted rank order", r,
                b->rank);
    COF_FAIL_IF(b->version != own->version, COF_ERR_MISMATCH,
                "rank %d has Cofuse version %u, rank %d has %u", r, b->version, own->rank,
                own->version);
    COF_FAIL_IF(b->n_ranks != own->n_ranks, COF_ERR_MISMATCH,
                "rank %d has n_ranks = %d, rank %d has %d", r, b->n_ranks, own->rank,
                own->n_ranks);
    COF_FAIL_IF(b->boot != a->boot || b->net != a->net, COF_ERR_UNSUPPORTED,
                "rank %d is %s than rank 0; wanted all ranks on one host, in one network namespace",
                r, b->boot != a->boot ? "on another host" : "in another network namespace");
    COF_FAIL_IF(b->user != a->user, COF_ERR_MISMATCH, "rank %d runs as user %u, rank 0 as %u", r,
                b->user, a->user);
    return COF_OK;
}

static cof_status gather_records(const cof_world_options *o, cof_status own,
                                 struct cofi_record *all)
{
    struct cofi_record record;
    char text[COFI_ERROR_TEXT_BYTES];
    own = fill_record(o, own, &record);
    memcpy(text, cof_last_error(), sizeof text); /* the callback may call Cofuse */
    int rc = o->allgather(o->allgather_ctx, &record, all, sizeof record);
    if (own != COF_OK)
        return cofi_fail_text(own, text);
    COF_FAIL_IF(rc != 0, COF_ERR_SYSTEM, "options.allgather returned %d; wanted 0", rc);
    for (int r = 0; r < o->n_ranks; r++)
        COF_TRY(check_record(&record, all, r));
    return COF_OK;
}

cof_status cofi_bootstrap_allgather(const cof_world_options *o, cof_status own,
                                    char job[COFI_JOB_BYTES])
{
    /* For ranks without memory, which leave with that error: nobody reads what comes here. */
    static struct cofi_record unread[INT16_MAX];
    struct cofi_record *all = calloc((size_t)o->n_ranks, sizeof *all);
    if (!all && own == COF_OK)
        own = COF_FAIL(COF_ERR_NOMEM, "world of %d: no memory", o->n_ranks);
    cof_status status = gather_records(o, own, all ? all : unread);
    int n = snprintf(job, COFI_JOB_BYTES, "allgather:");
    for (int i = 0; all && i < (int)sizeof all[0].token; i++)
        n += snprintf(job + n, COFI_JOB_BYTES - (size_t)n, "%02x", all[0].token[i]);
    free(all);
    return status;
}
