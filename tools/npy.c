/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "npy.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAGIC_BYTES = 6, PREFIX_BYTES_MAX = 12, ALIGN = 64, STRING_BYTES = 64 };
static const char magic[] = "\x93NUMPY";

/* Without the byte order that begins a descr. Codes of DLPack; bool is 6. */
static const struct {
    const char *name;
    cof_dtype dtype;
} dtypes[] = {
    {"f8", {COF_DTYPE_CODE_FLOAT, 64, 1}}, {"f4", {COF_DTYPE_CODE_FLOAT, 32, 1}},
    {"f2", {COF_DTYPE_CODE_FLOAT, 16, 1}}, {"i8", {COF_DTYPE_CODE_INT, 64, 1}},
    {"i4", {COF_DTYPE_CODE_INT, 32, 1}},   {"i2", {COF_DTYPE_CODE_INT, 16, 1}},
    {"i1", {COF_DTYPE_CODE_INT, 8, 1}},    {"u8", {COF_DTYPE_CODE_UINT, 64, 1}},
    {"u4", {COF_DTYPE_CODE_UINT, 32, 1}},  {"u2", {COF_DTYPE_CODE_UINT, 16, 1}},
    {"u1", {COF_DTYPE_CODE_UINT, 8, 1}},   {"b1", {6, 8, 1}},
};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* Kinds of NumPy that hold no plain numbers. */
static const struct {
    char kind;
    const char *what;
} refused_kinds[] = {
    {'O', "Python objects"},
    {'V', "raw bytes (NumPy's form of bf16: give a safetensors file)"},
    {'S', "byte strings"}, {'a', "byte strings"}, {'U', "strings"}, {'c', "complex numbers"},
    {'m', "times"}, {'M', "times"},
};
enum { N_REFUSED_KINDS = sizeof refused_kinds / sizeof refused_kinds[0] };

/* The header as it is read: a Python dict of three keys, and no other Python. */
struct parser {
    const char *path;
    char *error;
    const char *begin, *at, *end;
};

static bool fail(const struct parser *p, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool fail(const struct parser *p, const char *format, ...)
{
    char text[COFI_FILE_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return cofi_file_fail(p->error, p->path, "%s", text);
}

static bool fail_here(const struct parser *p, const char *wanted)
{
    int byte = (int)(p->at - p->begin);
    if (p->at == p->end)
        return fail(p, "the header ends after %d bytes: wanted %s", byte, wanted);
    return fail(p, "header byte %d: wanted %s", byte, wanted);
}

static void skip_space(struct parser *p)
{
    while (p->at < p->end && memchr(" \t\r\n", *p->at, 4))
        p->at++;
}

/* Takes this character and the space before it, when it is there. */
static bool take(struct parser *p, char c)
{
    skip_space(p);
    if (p->at == p->end || *p->at != c)
        return false;
    p->at++;
    return true;
}

static bool take_word(struct parser *p, const char *word)
{
    size_t n = strlen(word);
    skip_space(p);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, word, n))
        return false;
    p->at += n;
    return true;
}

/* A string in single or double quotes, of printable ASCII and without escapes. */
static bool parse_string(struct parser *p, char text[STRING_BYTES])
{
    skip_space(p);
    char quote = p->at < p->end ? *p->at : '\0';
    if (quote != '\'' && quote != '"')
        return fail_here(p, "a string");
    p->at++;
    for (int n = 0; p->at < p->end && n < STRING_BYTES; n++, p->at++) {
        if (*p->at == quote) {
            text[n] = '\0';
            p->at++;
            return true;
        }
        if (*p->at < ' ' || *p->at > '~' || *p->at == '\\')
            return fail_here(p, "printable ASCII without escapes in a string");
        text[n] = *p->at;
    }
    return fail_here(p, "the end of a string of at most 63 bytes");
}

static bool parse_descr(struct parser *p, struct cofi_st_tensor *t)
{
    char text[STRING_BYTES];
    skip_space(p);
    if (p->at < p->end && *p->at == '[')
        return fail(p, "descr is a list: structures are not supported");
    if (!parse_string(p, text))
        return false;
    if (!text[0] || !strchr("<>=|", text[0]))
        return fail(p, "descr '%s': wanted a byte order and a type, as in '<f4'", text);
    for (int i = 0; i < N_REFUSED_KINDS; i++)
        if (text[1] == refused_kinds[i].kind)
            return fail(p, "descr '%s': %s are not supported", text, refused_kinds[i].what);
    if (text[0] == '>')
        return fail(p, "descr '%s': big-endian numbers are not supported", text);
    for (int i = 0; i < N_DTYPES; i++) {
        if (strcmp(text + 1, dtypes[i].name))
            continue;
        if (text[0] == '|' && dtypes[i].dtype.bits > 8)
            return fail(p, "descr '%s': the byte order is missing", text);
        t->dtype = dtypes[i].dtype;
        return true;
    }
    return fail(p, "descr '%s': unknown type", text);
}

static bool parse_fortran_order(struct parser *p, bool *fortran_order_out)
{
    *fortran_order_out = take_word(p, "True");
    return *fortran_order_out || take_word(p, "False") || fail_here(p, "True or False");
}

static bool parse_dim(struct parser *p, int64_t *dim_out)
{
    skip_space(p);
    const char *first = p->at;
    int64_t value = 0;
    for (; p->at < p->end && *p->at >= '0' && *p->at <= '9'; p->at++)
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, *p->at - '0', &value))
            return fail(p, "a dim of the shape is over 2^63 - 1");
    if (p->at == first)
        return fail_here(p, "an integer >= 0 in the shape");
    if (*first == '0' && p->at - first > 1)
        return fail(p, "a dim of the shape begins with 0");
    *dim_out = value;
    return true;
}

/* (), (3,), (3, 4) or (3, 4,): in Python (3) is a number. */
static bool parse_shape(struct parser *p, struct cofi_st_tensor *t)
{
    if (!take(p, '('))
        return fail_here(p, "the shape as a tuple, as in (3, 4)");
    bool has_comma = true;
    for (t->ndim = 0; !take(p, ')'); t->ndim++) {
        if (!has_comma)
            return fail_here(p, "a comma or the end of the shape");
        if (t->ndim == COFI_SAFETENSORS_NDIM_MAX)
            return fail(p, "the shape has over %d dims", COFI_SAFETENSORS_NDIM_MAX);
        if (!parse_dim(p, &t->shape[t->ndim]))
            return false;
        has_comma = take(p, ',');
    }
    if (t->ndim == 1 && !has_comma)
        return fail(p, "the shape is a number: a tuple of one dim is written (3,)");
    return true;
}

/* All of the header: each key once, in any order. */
static bool parse_dict(struct parser *p, struct cofi_st_tensor *t, bool *fortran_order_out)
{
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    bool seen[3] = {false}, has_comma = true;
    if (!take(p, '{'))
        return fail_here(p, "'{'");
    while (!take(p, '}')) {
        char key[STRING_BYTES];
        int k = 0;
        if (!has_comma)
            return fail_here(p, "a comma or '}'");
        if (!parse_string(p, key))
            return false;
        while (k < 3 && strcmp(key, keys[k]))
            k++;
        if (k == 3)
            return fail(p, "unknown key '%s'", key);
        if (seen[k])
            return fail(p, "duplicate key '%s'", key);
        seen[k] = true;
        if (!take(p, ':'))
            return fail_here(p, "':'");
        if (!(k == 0   ? parse_descr(p, t)
              : k == 1 ? parse_fortran_order(p, fortran_order_out)
                       : parse_shape(p, t)))
            return false;
        has_comma = take(p, ',');
    }
    skip_space(p);
    if (p->at != p->end)
        return fail_here(p, "nothing after '}'");
    for (int k = 0; k < 3; k++)
        if (!seen[k])
            return fail(p, "key '%s' is missing", keys[k]);
    return true;
}

/* The header against itself and against the bytes that follow it. */
static bool check_size(const struct parser *p, struct cofi_st_tensor *t, bool fortran_order,
                       uint64_t data_bytes)
{
    uint64_t elements = 1, bytes;
    int n_long = 0;
    for (int i = 0; i < t->ndim; i++) {
        n_long += t->shape[i] > 1;
        if (__builtin_mul_overflow(elements, (uint64_t)t->shape[i], &elements))
            return fail(p, "the product of its shape overflows");
    }
    if (__builtin_mul_overflow(elements, (uint64_t)t->dtype.bits / 8, &bytes))
        return fail(p, "its size in bytes overflows");
    if (fortran_order && n_long > 1) /* with one long dim both orders are the same */
        return fail(p, "fortran_order is True: wanted rows that are contiguous (C order)");
    if (bytes != data_bytes)
        return fail(p, "the file has %ju data bytes, descr and shape need %ju",
                    (uintmax_t)data_bytes, (uintmax_t)bytes);
    t->bytes = (size_t)bytes;
    return true;
}

/* Magic, version and length. */
static bool read_prefix(const struct parser *p, int fd, uint64_t file_bytes,
                        uint64_t *prefix_bytes_out, uint64_t *header_bytes_out)
{
    unsigned char prefix[PREFIX_BYTES_MAX] = {0};
    uint64_t has = file_bytes < sizeof prefix ? file_bytes : sizeof prefix, header_bytes = 0;
    if (!cofi_file_read(p->path, fd, prefix, (size_t)has, 0, p->error))
        return false;
    if (has < MAGIC_BYTES + 2 || memcmp(prefix, magic, MAGIC_BYTES))
        return fail(p, "the file does not begin with \\x93NUMPY and a version (is this .npy?)");
    int major = prefix[MAGIC_BYTES], minor = prefix[MAGIC_BYTES + 1];
    if (major < 1 || major > 3 || minor != 0)
        return fail(p, "format version %d.%d: wanted 1.0, 2.0 or 3.0", major, minor);
    uint64_t prefix_bytes = major == 1 ? 10 : 12;
    if (has < prefix_bytes)
        return fail(p, "the file ends after %ju bytes, within the header's length", (uintmax_t)has);
    for (uint64_t i = prefix_bytes - 1; i >= MAGIC_BYTES + 2; i--)
        header_bytes = header_bytes << 8 | prefix[i];
    if (header_bytes > COFI_NPY_HEADER_BYTES_MAX)
        return fail(p, "header length %ju: wanted at most %d bytes", (uintmax_t)header_bytes,
                    COFI_NPY_HEADER_BYTES_MAX);
    if (header_bytes > file_bytes - prefix_bytes)
        return fail(p, "header length %ju: the file ends after %ju bytes", (uintmax_t)header_bytes,
                    (uintmax_t)file_bytes);
    *prefix_bytes_out = prefix_bytes;
    *header_bytes_out = header_bytes;
    return true;
}

static bool read_header(struct parser *p, int fd, uint64_t file_bytes, struct cofi_st_tensor *t)
{
    uint64_t prefix_bytes = 0, header_bytes = 0;
    if (!read_prefix(p, fd, file_bytes, &prefix_bytes, &header_bytes))
        return false;
    char *text = malloc(header_bytes + 1);
    if (!text)
        return fail(p, "out of memory");
    p->begin = p->at = text;
    p->end = text + header_bytes;
    bool fortran_order = false;
    t->offset = prefix_bytes + header_bytes;
    bool ok = cofi_file_read(p->path, fd, text, header_bytes, prefix_bytes, p->error) &&
              parse_dict(p, t, &fortran_order) &&
              check_size(p, t, fortran_order, file_bytes - t->offset);
    free(text);
    return ok;
}

bool cofi_npy_open(const char *path, struct cofi_st_tensor *tensor, char *error)
{
    struct parser p = {.path = path, .error = error};
    uint64_t file_bytes;
    *tensor = (struct cofi_st_tensor){.path = path, .fd = -1};
    if (!cofi_file_open(path, &tensor->fd, &file_bytes, error))
        return false;
    if (read_header(&p, tensor->fd, file_bytes, tensor))
        return true;
    close(tensor->fd);
    tensor->fd = -1;
    return false;
}

/* ---- writing -------------------------------------------------------------------------------- */

static const char *dtype_name(cof_dtype dtype)
{
    for (int i = 0; i < N_DTYPES; i++)
        if (dtypes[i].dtype.code == dtype.code && dtypes[i].dtype.bits == dtype.bits)
            return dtypes[i].name;
    return NULL;
}

bool cofi_npy_has_dtype(cof_dtype dtype)
{
    return dtype_name(dtype) != NULL;
}

/* The longest header, of 8 dims of 19 digits, has 256 bytes. */
size_t cofi_npy_header(const struct cofi_st_tensor *tensor, char header[COFI_NPY_NEW_HEADER_BYTES])
{
    const size_t prefix_bytes = 10;
    char text[COFI_NPY_NEW_HEADER_BYTES];
    int n = snprintf(text, sizeof text, "{'descr': '%s%s', 'fortran_order': False, 'shape': (",
                     tensor->dtype.bits > 8 ? "<" : "|", dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->ndim; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%lld%s", i ? " " : "",
                      (long long)tensor->shape[i],
                      i + 1 < tensor->ndim || tensor->ndim == 1 ? "," : "");
    n += snprintf(text + n, sizeof text - (size_t)n, "), }");
    size_t bytes = (prefix_bytes + (size_t)n + 1 + ALIGN - 1) / ALIGN * ALIGN;
    memcpy(header, magic, MAGIC_BYTES);
    header[MAGIC_BYTES] = 1;
    header[MAGIC_BYTES + 1] = 0;
    header[MAGIC_BYTES + 2] = (char)((bytes - prefix_bytes) & 255);
    header[MAGIC_BYTES + 3] = (char)((bytes - prefix_bytes) >> 8);
    memcpy(header + prefix_bytes, text, (size_t)n);
    memset(header + prefix_bytes + n, ' ', bytes - prefix_bytes - (size_t)n - 1);
    header[bytes - 1] = '\n';
    return bytes;
}
