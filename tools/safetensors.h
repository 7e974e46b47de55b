/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The file format safetensors: 8 bytes little-endian header length, a JSON header, the data.
 *
 * The reader believes nothing: every length, offset and shape is checked against the file before it
 * is used, and data is read (not mapped), so that no file can crash the program. Each error is one
 * line that names the file, the tensor and the broken rule. */
#ifndef COFI_SAFETENSORS_H
#define COFI_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cofuse/tensor.h"
#include "file_io.h"

#define COFI_SAFETENSORS_HEADER_BYTES_MAX 100000000
#define COFI_SAFETENSORS_NDIM_MAX 8
#define COFI_SAFETENSORS_ERROR_BYTES COFI_FILE_ERROR_BYTES /* that every `error` below points to */

struct cofi_st_tensor {
    const char *name;
    cof_dtype dtype;
    int ndim;
    int64_t shape[COFI_SAFETENSORS_NDIM_MAX];
    void *data; /* writer only: what to write */
    size_t bytes;
    /* reader only: the file that holds it */
    const char *path;
    int fd;
    uint64_t offset;
};

struct cofi_st_metadata {
    const char *key, *value;
};

/* One safetensors file, or a list of .npy files (tensor_files.h). */
struct cofi_st_file {
    char *path; /* of a list: all of it */
    int fd;     /* of a list: -1, each tensor has one of its own */
    int n_tensors, n_metadata;
    struct cofi_st_tensor *tensors;    /* in the order of the header */
    struct cofi_st_metadata *metadata; /* in the order of the header */
    void *json;                        /* owns the strings */
    char *list;                        /* owns the strings of a list, else NULL */
};

/* Opens a file and checks all of its header. false: *file owns nothing, error has the text. */
bool cofi_st_open(const char *path, struct cofi_st_file *file, char *error);
void cofi_st_close(struct cofi_st_file *file);

/* The format's name of a dtype ("BF16"); NULL when it has none. */
const char *cofi_st_dtype_name(cof_dtype dtype);

/* NULL when there is none. */
const struct cofi_st_tensor *cofi_st_find(const struct cofi_st_file *file, const char *name);
const char *cofi_st_metadata(const struct cofi_st_file *file, const char *key);

/* Reads a tensor's bytes to `dst`. */
bool cofi_st_load(const struct cofi_st_tensor *tensor, void *dst, char *error);

/* Writes tensors (widest dtype first, so that each is aligned) and metadata, by cofi_file_replace.
 */
bool cofi_st_write(const char *path, const struct cofi_st_metadata *metadata, int n_metadata,
                   const struct cofi_st_tensor *tensors, int n_tensors, char *error);

#endif
