/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8, HEADER_ALIGN = 8 };

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
            cofi_file_fail(error, path, "tensor \"%.60s\" cannot be written (its name or dtype)",
                           t->name);
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
        cofi_file_fail(error, path, "the header could not be made");
    }
    free(text);
done:
    json_decref(root);
    return header;
}

bool cofi_st_write(const char *path, const struct cofi_st_metadata *metadata, int n_metadata,
                   const struct cofi_st_tensor *tensors, int n_tensors, char *error)
{
    const struct cofi_st_tensor **order = calloc((size_t)n_tensors + 1, sizeof *order);
    struct cofi_file_part *parts = calloc((size_t)n_tensors + 1, sizeof *parts);
    char *header = NULL;
    bool ok = false;
    if (!order || !parts) {
        cofi_file_fail(error, path, "out of memory");
        goto done;
    }
    for (int i = 0; i < n_tensors; i++)
        order[i] = &tensors[i];
    qsort(order, (size_t)n_tensors, sizeof *order, by_width);
    size_t header_bytes = 0;
    header = make_header(path, metadata, n_metadata, order, n_tensors, &header_bytes, error);
    if (!header)
        goto done;
    parts[0] = (struct cofi_file_part){header, header_bytes};
    for (int i = 0; i < n_tensors; i++)
        parts[i + 1] = (struct cofi_file_part){order[i]->data, order[i]->bytes};
    struct cofi_file_new file = {.path = path, .parts = parts, .n_parts = n_tensors + 1};
    ok = cofi_file_replace(&file, 1, error);
done:
    free(header);
    free(parts);
    free(order);
    return ok;
}
