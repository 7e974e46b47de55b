/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "safetensors.h"

enum { LENGTH_BYTES = 8, HEADER_ALIGN = 8 };

static bool fail(char *error, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static bool fail(char *error, const char *path, const char *format, ...)
{
    int n = snprintf(error, COFI_SAFETENSORS_ERROR_BYTES, "%.200s: ", path);
    va_list args;
    va_start(args, format);
    vsnprintf(error + n, (size_t)(COFI_SAFETENSORS_ERROR_BYTES - n), format, args);
    va_end(args);
    return false;
}

/* The place to rename to: `path`, or what it links to. */
static bool resolve(const char *path, char target[PATH_MAX], char *error)
{
    struct stat info;
    if (stat(path, &info)) {
        if (errno != ENOENT)
            return fail(error, path, "%s", strerror(errno));
        if (strlen(path) + 16 > PATH_MAX)
            return fail(error, path, "%s", strerror(ENAMETOOLONG));
        if (!*path || path[strlen(path) - 1] == '/')
            return fail(error, path, "not a file name");
        strcpy(target, path);
        return true;
    }
    if (!S_ISREG(info.st_mode))
        return fail(error, path, "it exists and is not a regular file");
    if (!realpath(path, target) || strlen(target) + 16 > PATH_MAX)
        return fail(error, path, "%s", strerror(ENAMETOOLONG));
    return true;
}

/* The directory part of a path, "." when it has none. */
static void directory_of(const char *path, char directory[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    size_t n = slash == path ? 1 : slash ? (size_t)(slash - path) : 0;
    memcpy(directory, n ? path : ".", n ? n : 1);
    directory[n ? n : 1] = '\0';
}

bool cofi_st_may_write(const char *path, char *error)
{
    char target[PATH_MAX], directory[PATH_MAX];
    if (!resolve(path, target, error))
        return false;
    directory_of(target, directory);
    if (access(directory, W_OK | X_OK))
        return fail(error, path, "directory %.200s: %s", directory, strerror(errno));
    return true;
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

static int by_width(const void *a, const void *b)
{
    const struct cofi_st_tensor *x = *(const struct cofi_st_tensor *const *)a;
    const struct cofi_st_tensor *y = *(const struct cofi_st_tensor *const *)b;
    if (x->dtype.bits != y->dtype.bits)
        return y->dtype.bits - x->dtype.bits;
    return (x > y) - (x < y); /* as given */
}

static json_t *tensor_entry(const struct cofi_st_tensor *t, size_t offset)
{
    const char *dtype = cofi_st_dtype_name(t->dtype);
    json_t *shape = json_array();
    for (int i = 0; i < t->ndim; i++)
        json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype ? dtype : "?", "shape", shape,
                     "data_offsets", (json_int_t)offset, (json_int_t)(offset + t->bytes));
}

/* The header as text, padded with spaces so that the data begins at a multiple of 8; NULL with a
 * text when it cannot be made. */
static char *make_header(const char *path, const struct cofi_st_metadata *metadata, int n_metadata,
                         const struct cofi_st_tensor *const *order, int n, size_t *bytes_out,
                         char *error)
{
    json_t *root = json_object();
    char *header = NULL;
    if (n_metadata) {
        json_t *object = json_object();
        for (int i = 0; i < n_metadata; i++)
            json_object_set_new(object, metadata[i].key, json_string(metadata[i].value));
        json_object_set_new(root, "__metadata__", object);
    }
    size_t offset = 0;
    for (int i = 0; i < n; i++) {
        const struct cofi_st_tensor *t = order[i];
        if (!cofi_st_dtype_name(t->dtype) || json_object_get(root, t->name) ||
            json_object_set_new(root, t->name, tensor_entry(t, offset))) {
            fail(error, path, "tensor \"%.60s\" cannot be written (its name or dtype)", t->name);
            goto done;
        }
        offset += t->bytes;
    }
    char *text = json_dumps(root, JSON_COMPACT);
    size_t n_text = text ? strlen(text) : 0;
    size_t bytes = (n_text + HEADER_ALIGN - 1) / HEADER_ALIGN * HEADER_ALIGN;
    if (text && bytes <= COFI_SAFETENSORS_HEADER_BYTES_MAX)
        header = malloc(LENGTH_BYTES + bytes);
    if (header) {
        for (int i = 0; i < LENGTH_BYTES; i++)
            header[i] = (char)(bytes >> 8 * i);
        memcpy(header + LENGTH_BYTES, text, n_text);
        memset(header + LENGTH_BYTES + n_text, ' ', bytes - n_text);
        *bytes_out = LENGTH_BYTES + bytes;
    } else {
        fail(error, path, "the header could not be made");
    }
    free(text);
done:
    json_decref(root);
    return header;
}

static bool write_file(int fd, const char *header, size_t header_bytes,
                       const struct cofi_st_tensor *const *order, int n)
{
    mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd, 0666 & ~mask) || !write_all(fd, header, header_bytes))
        return false;
    for (int i = 0; i < n; i++)
        if (!write_all(fd, order[i]->data, order[i]->bytes))
            return false;
    return fsync(fd) == 0;
}

/* Temporary file beside the target, then rename. */
static bool write_and_rename(const char *path, const char *header, size_t header_bytes,
                             const struct cofi_st_tensor *const *order, int n, char *error)
{
    char target[PATH_MAX], temporary[PATH_MAX + 16], directory[PATH_MAX];
    if (!resolve(path, target, error))
        return false;
    snprintf(temporary, sizeof temporary, "%s.tmp-XXXXXX", target);
    int fd = mkostemp(temporary, O_CLOEXEC);
    if (fd < 0)
        return fail(error, path, "no temporary file beside it: %s", strerror(errno));
    bool ok = write_file(fd, header, header_bytes, order, n);
    int saved_errno = errno;
    if (close(fd) && ok) {
        ok = false;
        saved_errno = errno;
    }
    if (ok && rename(temporary, target)) {
        ok = false;
        saved_errno = errno;
    }
    if (!ok) {
        unlink(temporary);
        return fail(error, path, "writing failed: %s", strerror(saved_errno));
    }
    directory_of(target, directory);
    int directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory_fd >= 0) {
        fsync(directory_fd); /* some file systems refuse; the file itself is synced */
        close(directory_fd);
    }
    return true;
}

bool cofi_st_write(const char *path, const struct cofi_st_metadata *metadata, int n_metadata,
                   const struct cofi_st_tensor *tensors, int n_tensors, char *error)
{
    const struct cofi_st_tensor **order = calloc((size_t)n_tensors + 1, sizeof *order);
    if (!order)
        return fail(error, path, "out of memory");
    for (int i = 0; i < n_tensors; i++)
        order[i] = &tensors[i];
    qsort(order, (size_t)n_tensors, sizeof *order, by_width);
    size_t header_bytes = 0;
    char *header = make_header(path, metadata, n_metadata, order, n_tensors, &header_bytes, error);
    bool ok = false;
    if (header) {
        /* Ctrl-C must not leave the temporary behind: it acts when this is over. */
        sigset_t mask, old_mask;
        sigemptyset(&mask);
        sigaddset(&mask, SIGINT);
        sigaddset(&mask, SIGTERM);
        sigaddset(&mask, SIGHUP);
        sigprocmask(SIG_BLOCK, &mask, &old_mask);
        ok = write_and_rename(path, header, header_bytes, order, n_tensors, error);
        sigprocmask(SIG_SETMASK, &old_mask, NULL);
    }
    free(header);
    free(order);
    return ok;
}
