/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "file_io.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool cofi_file_fail(char *error, const char *path, const char *format, ...)
{
    int n = snprintf(error, COFI_FILE_ERROR_BYTES, "%.200s: ", path);
    va_list args;
    va_start(args, format);
    vsnprintf(error + n, (size_t)(COFI_FILE_ERROR_BYTES - n), format, args);
    va_end(args);
    return false;
}

/* ---- reading -------------------------------------------------------------------------------- */

bool cofi_file_open(const char *path, int *fd_out, uint64_t *bytes_out, char *error)
{
    /* O_NONBLOCK: opening a pipe must not wait; no effect on a regular file */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return cofi_file_fail(error, path, "%s", strerror(errno));
    struct stat info;
    if (fstat(fd, &info) || !S_ISREG(info.st_mode)) {
        close(fd);
        return cofi_file_fail(error, path, "not a regular file");
    }
    *fd_out = fd;
    *bytes_out = (uint64_t)info.st_size;
    return true;
}

bool cofi_file_read(const char *path, int fd, void *dst, size_t bytes, uint64_t offset, char *error)
{
    for (char *to = dst; bytes;) {
        ssize_t n = pread(fd, to, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return cofi_file_fail(error, path, "%s", strerror(errno));
        if (n == 0)
            return cofi_file_fail(error, path, "the file became shorter while it was read");
        to += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return true;
}

/* ---- writing -------------------------------------------------------------------------------- */

/* The directory part of a path, "." when it has none. */
static void directory_of(const char *path, char directory[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    size_t n = slash == path ? 1 : slash ? (size_t)(slash - path) : 0;
    memcpy(directory, n ? path : ".", n ? n : 1);
    directory[n ? n : 1] = '\0';
}

/* Where the links at `path` lead, though there is no file yet. */
static bool follow_links(const char *path, char target[PATH_MAX])
{
    char link[PATH_MAX], directory[PATH_MAX];
    if (strlen(path) >= PATH_MAX)
        return false;
    strcpy(target, path);
    for (int i = 0; i < 40; i++) { /* as many as the system follows */
        ssize_t n = readlink(target, link, sizeof link - 1);
        if (n < 0)
            return true;
        link[n] = '\0';
        directory_of(target, directory);
        bool is_absolute = link[0] == '/';
        int length = snprintf(target, PATH_MAX, "%s%s%s", is_absolute ? "" : directory,
                              is_absolute ? "" : "/", link);
        if (length >= PATH_MAX)
            return false;
    }
    return false;
}

bool cofi_file_resolve(const char *path, char target[PATH_MAX], char *error)
{
    struct stat info;
    bool exists = !stat(path, &info);
    if (!exists && errno != ENOENT)
        return cofi_file_fail(error, path, "%s", strerror(errno));
    if (exists && !S_ISREG(info.st_mode))
        return cofi_file_fail(error, path, "it exists and is not a regular file");
    if (!(exists ? realpath(path, target) != NULL : follow_links(path, target)) ||
        strlen(target) + 16 > PATH_MAX)
        return cofi_file_fail(error, path, "%s", strerror(ENAMETOOLONG));
    if (!*target || target[strlen(target) - 1] == '/')
        return cofi_file_fail(error, path, "not a file name");
    return true;
}

/* Ctrl-C must not leave a temporary behind: it acts when this is over. */
static void hold_signals(sigset_t *before)
{
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &mask, before);
}

/* Its descriptor, or -1 after a message. */
static int make_temporary(struct cofi_file_new *file, char *error)
{
    if (!cofi_file_resolve(file->path, file->target, error))
        return -1;
    snprintf(file->temporary, sizeof file->temporary, "%s.tmp-XXXXXX", file->target);
    int fd = mkostemp(file->temporary, O_CLOEXEC);
    if (fd < 0)
        cofi_file_fail(error, file->path, "no temporary file beside it: %s", strerror(errno));
    return fd;
}

bool cofi_file_may_write(const char *path, char *error)
{
    struct cofi_file_new file = {.path = path};
    char directory[PATH_MAX];
    if (!cofi_file_resolve(path, file.target, error))
        return false;
    directory_of(file.target, directory);
    if (access(directory, W_OK | X_OK))
        return cofi_file_fail(error, path, "directory %.200s: %s", directory, strerror(errno));
    sigset_t before;
    hold_signals(&before);
    int fd = make_temporary(&file, error);
    if (fd >= 0) {
        unlink(file.temporary);
        close(fd);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return fd >= 0;
}

static bool write_all(int fd, const void *src, size_t bytes)
{
    for (const char *from = src; bytes;) {
        ssize_t n = write(fd, from, bytes < (1u << 30) ? bytes : 1u << 30);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        from += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool write_parts(int fd, const struct cofi_file_part *parts, int n_parts)
{
    mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd, 0666 & ~mask))
        return false;
    for (int i = 0; i < n_parts; i++)
        if (!write_all(fd, parts[i].data, parts[i].bytes))
            return false;
    return fsync(fd) == 0;
}

/* On failure there is no temporary file. */
static bool write_temporary(struct cofi_file_new *file, char *error)
{
    int fd = make_temporary(file, error);
    if (fd < 0)
        return false;
    bool ok = write_parts(fd, file->parts, file->n_parts);
    int saved_errno = errno;
    if (close(fd) && ok) {
        ok = false;
        saved_errno = errno;
    }
    if (ok)
        return true;
    unlink(file->temporary);
    return cofi_file_fail(error, file->path, "writing failed: %s", strerror(saved_errno));
}

static bool rename_temporary(const struct cofi_file_new *file, char *error)
{
    char directory[PATH_MAX];
    if (rename(file->temporary, file->target))
        return cofi_file_fail(error, file->path, "writing failed: %s", strerror(errno));
    directory_of(file->target, directory);
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd); /* some file systems refuse; the file itself is synced */
        close(fd);
    }
    return true;
}

static bool replace(struct cofi_file_new *files, int n_files, char *error)
{
    int n_written = 0, n_renamed = 0;
    while (n_written < n_files && write_temporary(&files[n_written], error))
        n_written++;
    while (n_written == n_files && n_renamed < n_files &&
           rename_temporary(&files[n_renamed], error))
        n_renamed++;
    for (int i = n_renamed; i < n_written; i++)
        unlink(files[i].temporary);
    return n_renamed == n_files;
}

bool cofi_file_replace(struct cofi_file_new *files, int n_files, char *error)
{
    sigset_t before;
    hold_signals(&before);
    bool ok = replace(files, n_files, error);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return ok;
}
