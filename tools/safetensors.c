/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "safetensors.h"

#include <jansson.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LENGTH_BYTES = 8 };

/* Codes of DLPack; bool is 6, float8_e5m2 12. */
static const struct {
    const char *name;
    cof_dtype dtype;
} dtypes[] = {
    {"F64", {COF_DTYPE_CODE_FLOAT, 64, 1}},  {"F32", {COF_DTYPE_CODE_FLOAT, 32, 1}},
    {"F16", {COF_DTYPE_CODE_FLOAT, 16, 1}},  {"BF16", {COF_DTYPE_CODE_BFLOAT, 16, 1}},
    {"I64", {COF_DTYPE_CODE_INT, 64, 1}},    {"I32", {COF_DTYPE_CODE_INT, 32, 1}},
    {"I16", {COF_DTYPE_CODE_INT, 16, 1}},    {"I8", {COF_DTYPE_CODE_INT, 8, 1}},
    {"U64", {COF_DTYPE_CODE_UINT, 64, 1}},   {"U32", {COF_DTYPE_CODE_UINT, 32, 1}},
    {"U16", {COF_DTYPE_CODE_UINT, 16, 1}},   {"U8", {COF_DTYPE_CODE_UINT, 8, 1}},
    {"BOOL", {6, 8, 1}},                     {"F8_E4M3", {COF_DTYPE_CODE_FLOAT8_E4M3FN, 8, 1}},
    {"F8_E5M2", {12, 8, 1}},
};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

const char *cofi_st_dtype_name(cof_dtype dtype)
{
    for (int i = 0; i < N_DTYPES; i++)
        if (dtypes[i].dtype.code == dtype.code && dtypes[i].dtype.bits == dtype.bits)
            return dtypes[i].name;
    return NULL;
}

struct context {
    const char *path;
    char *error;
};

static bool fail(const struct context *at, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool fail(const struct context *at, const char *format, ...)
{
    char text[COFI_FILE_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return cofi_file_fail(at->error, at->path, "%s", text);
}

static bool parse_metadata(const struct context *at, json_t *object, struct cofi_st_file *file)
{
    if (!json_is_object(object))
        return fail(at, "__metadata__ must be an object of strings");
    file->metadata = calloc(json_object_size(object) + 1, sizeof *file->metadata);
    if (!file->metadata)
        return fail(at, "out of memory");
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) {
        if (!json_is_string(value))
            return fail(at, "__metadata__ \"%.60s\" must be a string", key);
        file->metadata[file->n_metadata++] =
            (struct cofi_st_metadata){key, json_string_value(value)};
    }
    return true;
}

static bool parse_shape(const struct context *at, json_t *list, struct cofi_st_tensor *t,
                        uint64_t *elements_out)
{
    if (!json_is_array(list))
        return fail(at, "tensor \"%.60s\": shape must be a list of integers", t->name);
    if (json_array_size(list) > COFI_SAFETENSORS_NDIM_MAX)
        return fail(at, "tensor \"%.60s\": shape has %zu dims, at most %d are supported", t->name,
                    json_array_size(list), COFI_SAFETENSORS_NDIM_MAX);
    t->ndim = (int)json_array_size(list);
    uint64_t elements = 1;
    for (int i = 0; i < t->ndim; i++) {
        json_t *dim = json_array_get(list, (size_t)i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return fail(at, "tensor \"%.60s\": shape[%d] must be an integer >= 0", t->name, i);
        t->shape[i] = json_integer_value(dim);
        if (__builtin_mul_overflow(elements, (uint64_t)t->shape[i], &elements))
            return fail(at, "tensor \"%.60s\": the product of its shape overflows", t->name);
    }
    *elements_out = elements;
    return true;
}

static bool parse_dtype(const struct context *at, json_t *name, struct cofi_st_tensor *t)
{
    if (!json_is_string(name))
        return fail(at, "tensor \"%.60s\": dtype must be a string", t->name);
    for (int i = 0; i < N_DTYPES; i++) {
        if (!strcmp(json_string_value(name), dtypes[i].name)) {
            t->dtype = dtypes[i].dtype;
            return true;
        }
    }
    return fail(at, "tensor \"%.60s\": unknown dtype \"%.20s\"", t->name, json_string_value(name));
}

static bool parse_tensor(const struct context *at, json_t *object, struct cofi_st_tensor *t,
                         uint64_t data_bytes)
{
    if (!json_is_object(object))
        return fail(at, "tensor \"%.60s\": must be an object", t->name);
    const char *key;
    json_t *value, *dtype = NULL, *shape = NULL, *offsets = NULL;
    json_object_foreach(object, key, value) {
        json_t **slot = !strcmp(key, "dtype") ? &dtype
                        : !strcmp(key, "shape") ? &shape
                        : !strcmp(key, "data_offsets") ? &offsets : NULL;
        if (!slot)
            return fail(at, "tensor \"%.60s\": unknown key \"%.40s\"", t->name, key);
        *slot = value;
    }
    if (!dtype || !shape || !offsets)
        return fail(at, "tensor \"%.60s\": key %s is missing", t->name,
                    !dtype ? "dtype" : !shape ? "shape" : "data_offsets");
    uint64_t elements = 0, bytes;
    if (!parse_dtype(at, dtype, t) || !parse_shape(at, shape, t, &elements))
        return false;
    if (__builtin_mul_overflow(elements, (uint64_t)t->dtype.bits / 8, &bytes))
        return fail(at, "tensor \"%.60s\": its size in bytes overflows", t->name);

    json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !json_is_integer(begin) ||
        !json_is_integer(end) || json_integer_value(begin) < 0 || json_integer_value(end) < 0)
        return fail(at, "tensor \"%.60s\": data_offsets must be two integers >= 0", t->name);
    uint64_t from = (uint64_t)json_integer_value(begin), to = (uint64_t)json_integer_value(end);
    if (from > to)
        return fail(at, "tensor \"%.60s\": data_offsets begin at %ju, after their end %ju", t->name,
                    (uintmax_t)from, (uintmax_t)to);
    if (to > data_bytes)
        return fail(at, "tensor \"%.60s\": data_offsets end at %ju, the file has %ju data bytes",
                    t->name, (uintmax_t)to, (uintmax_t)data_bytes);
    if (to - from != bytes)
        return fail(at, "tensor \"%.60s\": data_offsets hold %ju bytes, dtype and shape need %ju",
                    t->name, (uintmax_t)(to - from), (uintmax_t)bytes);
    t->bytes = (size_t)bytes;
    t->offset = from;
    return true;
}

static int by_offset(const void *a, const void *b)
{
    const struct cofi_st_tensor *x = *(const struct cofi_st_tensor *const *)a;
    const struct cofi_st_tensor *y = *(const struct cofi_st_tensor *const *)b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty ones first */
}

/* The tensors must tile the data: each begins where the one before it ends. */
static bool check_tiling(const struct context *at, const struct cofi_st_file *file,
                         uint64_t data_bytes)
{
    size_t n = (size_t)file->n_tensors;
    const struct cofi_st_tensor **order = calloc(n + 1, sizeof *order);
    if (!order)
        return fail(at, "out of memory");
    for (size_t i = 0; i < n; i++)
        order[i] = &file->tensors[i];
    qsort(order, n, sizeof *order, by_offset);
    uint64_t end = 0;
    bool ok = true;
    for (size_t i = 0; i < n && ok; i++) {
        if (order[i]->offset < end)
            ok = fail(at, "tensor \"%.60s\": its data overlaps that of \"%.60s\"", order[i]->name,
                      order[i - 1]->name);
        else if (order[i]->offset > end)
            ok = fail(at, "tensor \"%.60s\": there is a hole of %ju bytes before its data",
                      order[i]->name, (uintmax_t)(order[i]->offset - end));
        end = order[i]->offset + order[i]->bytes;
    }
    free(order);
    if (ok && end != data_bytes)
        return fail(at, "the file has %ju bytes after the last tensor",
                    (uintmax_t)(data_bytes - end));
    return ok;
}

static bool parse_header(const struct context *at, const char *text, size_t header_bytes,
                         uint64_t data_bytes, struct cofi_st_file *file)
{
    if (text[0] != '{')
        return fail(at, "the header does not begin with '{'");
    json_error_t where;
    json_t *root = json_loadb(text, header_bytes, JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return fail(at, "the header is no valid JSON: %s (byte %d)", where.text, where.position);
    file->json = root;
    if (json_object_size(root) > INT_MAX - 1)
        return fail(at, "too many tensors");
    file->tensors = calloc(json_object_size(root) + 1, sizeof *file->tensors);
    if (!file->tensors)
        return fail(at, "out of memory");
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        if (!strcmp(key, "__metadata__")) {
            if (!parse_metadata(at, value, file))
                return false;
            continue;
        }
        struct cofi_st_tensor *t = &file->tensors[file->n_tensors++];
        t->name = key;
        if (!parse_tensor(at, value, t, data_bytes))
            return false;
    }
    if (!check_tiling(at, file, data_bytes))
        return false;
    for (int i = 0; i < file->n_tensors; i++)
        file->tensors[i].offset += LENGTH_BYTES + header_bytes;
    return true;
}

bool cofi_st_open(const char *path, struct cofi_st_file *file, char *error)
{
    struct context at = {path, error};
    *file = (struct cofi_st_file){.fd = -1};
    uint64_t file_bytes, header_bytes = 0;
    if (!cofi_file_open(path, &file->fd, &file_bytes, error))
        return false;
    char *text = NULL;
    bool ok = false;
    unsigned char length[LENGTH_BYTES];
    if (file_bytes < LENGTH_BYTES) {
        fail(&at, "the file has %ju bytes, a safetensors file begins with 8 of header length",
             (uintmax_t)file_bytes);
        goto done;
    }
    if (!cofi_file_read(path, file->fd, length, sizeof length, 0, error))
        goto done;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        header_bytes = header_bytes << 8 | length[i];
    if (header_bytes < 2 || header_bytes > COFI_SAFETENSORS_HEADER_BYTES_MAX) {
        fail(&at, "header length %ju: wanted 2 to %d bytes (is this a safetensors file?)",
             (uintmax_t)header_bytes, COFI_SAFETENSORS_HEADER_BYTES_MAX);
        goto done;
    }
    if (header_bytes > file_bytes - LENGTH_BYTES) {
        fail(&at, "header length %ju: the file ends after %ju bytes", (uintmax_t)header_bytes,
             (uintmax_t)file_bytes);
        goto done;
    }
    text = malloc(header_bytes);
    if (!text) {
        fail(&at, "out of memory");
        goto done;
    }
    ok = cofi_file_read(path, file->fd, text, header_bytes, LENGTH_BYTES, error) &&
         parse_header(&at, text, header_bytes, file_bytes - LENGTH_BYTES - header_bytes, file);
    file->path = ok ? strdup(path) : NULL;
    if (ok && !file->path)
        ok = fail(&at, "out of memory");
    for (int i = 0; i < file->n_tensors; i++) {
        file->tensors[i].path = file->path;
        file->tensors[i].fd = file->fd;
    }
done:
    free(text);
    if (!ok)
        cofi_st_close(file);
    return ok;
}

void cofi_st_close(struct cofi_st_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    for (int i = 0; i < file->n_tensors && file->list; i++)
        close(file->tensors[i].fd);
    free(file->list);
    free(file->tensors);
    free(file->metadata);
    free(file->path);
    json_decref(file->json);
    *file = (struct cofi_st_file){.fd = -1};
}

const struct cofi_st_tensor *cofi_st_find(const struct cofi_st_file *file, const char *name)
{
    for (int i = 0; i < file->n_tensors; i++)
        if (!strcmp(file->tensors[i].name, name))
            return &file->tensors[i];
    return NULL;
}

const char *cofi_st_metadata(const struct cofi_st_file *file, const char *key)
{
    for (int i = 0; i < file->n_metadata; i++)
        if (!strcmp(file->metadata[i].key, key))
            return file->metadata[i].value;
    return NULL;
}

bool cofi_st_load(const struct cofi_st_tensor *tensor, void *dst, char *error)
{
    return cofi_file_read(tensor->path, tensor->fd, dst, tensor->bytes, tensor->offset, error);
}
