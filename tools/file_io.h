/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Reading and replacing whole files, for the formats of tensors. Each function that returns false
 * has written one line to `error` that begins with the path. */
#ifndef COFI_FILE_IO_H
#define COFI_FILE_IO_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COFI_FILE_ERROR_BYTES 512 /* that every `error` below points to */

/* "path: text" to `error`. Returns false. */
bool cofi_file_fail(char *error, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Opens a regular file for reading; anything else is refused without waiting for it. */
bool cofi_file_open(const char *path, int *fd_out, uint64_t *bytes_out, char *error);

/* Reads exactly `bytes` bytes from `offset` on. */
bool cofi_file_read(const char *path, int fd, void *dst, size_t bytes, uint64_t offset,
                    char *error);

/* The file to write for `path`, which is free or a regular file: symbolic links are followed, also
 * to where no file is yet. */
bool cofi_file_resolve(const char *path, char target[PATH_MAX], char *error);

/* Whether cofi_file_replace could begin: the path is free or a regular file, and a temporary file
 * could be made beside it. */
bool cofi_file_may_write(const char *path, char *error);

struct cofi_file_part {
    const void *data;
    size_t bytes;
};

/* A file to be: its parts go to a temporary name beside `path`. */
struct cofi_file_new {
    const char *path;
    const struct cofi_file_part *parts;
    int n_parts;
    char target[PATH_MAX], temporary[PATH_MAX + 16]; /* of cofi_file_replace */
};

/* Writes and syncs every file under its temporary name, then renames each. When one cannot be
 * written, the old files are untouched and nothing is left. A path that exists and is no regular
 * file is refused; a symbolic link is followed. */
bool cofi_file_replace(struct cofi_file_new *files, int n_files, char *error);

#endif
