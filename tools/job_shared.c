/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
/* The memory that the parent of a job shares with its ranks. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "job.h"
#include "symm/memory.h"

static const char shared_variable[] = "COFUSE_SHARED_FD";

int cofi_job_shared_create(size_t bytes, void **memory_out)
{
    if (cofi_memory_check_file(bytes, bytes) != COF_OK) {
        cofi_cli_error("%zu bytes of shared memory: %s", bytes, cof_last_error());
        return -1;
    }
    int fd = memfd_create("cofuse-job", MFD_CLOEXEC);
    /* fallocate: memory that cannot be had is an error here and no SIGBUS later */
    if (fd < 0 || ftruncate(fd, (off_t)bytes) || (bytes && fallocate(fd, 0, 0, (off_t)bytes)))
        goto failed;
    void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        goto failed;
    *memory_out = memory;
    return fd;
failed:
    cofi_cli_error("%zu bytes of shared memory: %s", bytes, strerror(errno));
    if (fd >= 0)
        close(fd);
    return -1;
}

bool cofi_job_is_rank(void)
{
    const char *text = getenv(shared_variable);
    return text && *text;
}

void *cofi_job_shared(size_t *bytes_out)
{
    static void *memory;
    static size_t bytes;
    const char *text = getenv(shared_variable);
    if (!memory && text && atoi(text) > STDERR_FILENO) {
        int fd = atoi(text);
        struct stat info;
        if (!fstat(fd, &info) && S_ISREG(info.st_mode)) {
            bytes = (size_t)info.st_size;
            void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            memory = mapped == MAP_FAILED ? NULL : mapped;
            fcntl(fd, F_SETFD, FD_CLOEXEC);
        }
    }
    *bytes_out = memory ? bytes : 0;
    return memory;
}
