/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "tensor_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "npy.h"

enum { ITEMS_MAX = 64 };

/* An option's value, cut in pieces. A safetensors file is one item without a key. */
struct list {
    int n_items;
    struct {
        const char *key, *path;
    } items[ITEMS_MAX];
    char *text; /* owns the strings */
};

static bool is_npy(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, ".npy");
}

/* A list begins with a key and '=', and one of its items names a .npy file: directories may have
 * '=' in their names, too. */
static bool is_list(const char *text)
{
    size_t key_bytes = strcspn(text, "=/,");
    if (key_bytes == 0 || text[key_bytes] != '=')
        return false;
    for (const char *at = text; (at = strstr(at, ".npy")); at += 4)
        if (at[4] == '\0' || at[4] == ',')
            return true;
    return false;
}

/* An item's place in list->items, or -1. */
static int find_key(const struct list *list, const char *key)
{
    for (int i = 0; i < list->n_items; i++)
        if (!strcmp(list->items[i].key, key))
            return i;
    return -1;
}

static bool add_item(const char *option, struct list *list, char *item, char *error)
{
    char *equals = strchr(item, '=');
    if (!equals || equals == item || !is_npy(equals + 1))
        return cofi_file_fail(error, option, "\"%.100s\": wanted key=FILE.npy in a list", item);
    *equals = '\0';
    if (find_key(list, item) >= 0)
        return cofi_file_fail(error, option, "\"%.100s\" is there twice", item);
    if (list->n_items == ITEMS_MAX)
        return cofi_file_fail(error, option, "a list of over %d files", ITEMS_MAX);
    list->items[list->n_items].key = item;
    list->items[list->n_items++].path = equals + 1;
    return true;
}

/* On success the caller frees list->text; on failure there is none. */
static bool parse_list(const char *option, const char *text, struct list *list, char *error)
{
    *list = (struct list){.text = strdup(text)};
    if (!list->text)
        return cofi_file_fail(error, option, "out of memory");
    bool ok = true;
    if (is_list(text)) {
        char *rest = list->text, *item;
        while (ok && (item = strsep(&rest, ",")))
            ok = add_item(option, list, item, error);
    } else if (is_npy(text)) {
        ok = cofi_file_fail(error, option, "\"%.100s\": a .npy file is given as key=FILE.npy",
                            text);
    } else {
        list->n_items = 1;
        list->items[0].path = list->text;
    }
    if (!ok) {
        free(list->text);
        list->text = NULL;
    }
    return ok;
}

/* ---- reading -------------------------------------------------------------------------------- */

static bool is_among(const char *key, const char *const names[], int n_names)
{
    for (int i = 0; i < n_names; i++)
        if (!strcmp(key, names[i]))
            return true;
    return false;
}

static bool open_items(const struct list *list, const char *const names[], int n_names,
                       struct cofi_st_file *file, char *error)
{
    for (int i = 0; i < list->n_items; i++) {
        const char *key = list->items[i].key;
        struct cofi_st_tensor *t = &file->tensors[file->n_tensors];
        if (!is_among(key, names, n_names))
            return cofi_file_fail(error, "option -i", "\"%.100s\" is no tensor that is read", key);
        if (!cofi_npy_open(list->items[i].path, t, error))
            return false;
        t->name = key;
        file->n_tensors++;
    }
    return true;
}

bool cofi_tensors_open(const char *input, const char *const names[], int n_names,
                       struct cofi_st_file *file, char *error)
{
    struct list list;
    *file = (struct cofi_st_file){.fd = -1};
    if (!parse_list("option -i", input, &list, error))
        return false;
    if (!list.items[0].key) {
        free(list.text);
        return cofi_st_open(input, file, error);
    }
    *file = (struct cofi_st_file){.fd = -1, .list = list.text, .path = strdup(input),
                                  .tensors = calloc(ITEMS_MAX, sizeof *file->tensors)};
    bool ok = file->path && file->tensors;
    if (!ok)
        cofi_file_fail(error, "option -i", "out of memory");
    ok = ok && open_items(&list, names, n_names, file, error);
    if (!ok)
        cofi_st_close(file);
    return ok;
}

/* ---- writing -------------------------------------------------------------------------------- */

/* Whether two names are one file, or would be once it is written. */
static bool same_place(const char *a, const char *b)
{
    char a_target[PATH_MAX], b_target[PATH_MAX], error[COFI_FILE_ERROR_BYTES];
    a = cofi_file_resolve(a, a_target, error) ? a_target : a;
    b = cofi_file_resolve(b, b_target, error) ? b_target : b;
    const char *a_slash = strrchr(a, '/'), *b_slash = strrchr(b, '/');
    const char *a_base = a_slash ? a_slash + 1 : a, *b_base = b_slash ? b_slash + 1 : b;
    if (!strcmp(a, b) || cofi_cli_same_file(a, b))
        return true;
    if (strcmp(a_base, b_base))
        return false;
    char a_directory[PATH_MAX], b_directory[PATH_MAX];
    snprintf(a_directory, sizeof a_directory, "%.*s.", (int)(a_base - a), a);
    snprintf(b_directory, sizeof b_directory, "%.*s.", (int)(b_base - b), b);
    return cofi_cli_same_file(a_directory, b_directory);
}

static bool may_write(const struct list *in, const struct list *out, char *error)
{
    for (int i = 0; i < out->n_items; i++) {
        const char *path = out->items[i].path;
        for (int j = 0; j < in->n_items; j++)
            if (cofi_cli_same_file(in->items[j].path, path))
                return cofi_file_fail(error, "option -o", "\"%.200s\": it is the input", path);
        for (int j = 0; j < i; j++)
            if (same_place(out->items[j].path, path))
                return cofi_file_fail(error, "option -o", "\"%.200s\": one file for %s and %s",
                                      path, out->items[j].key, out->items[i].key);
        if (!cofi_file_may_write(path, error))
            return false;
    }
    return true;
}

bool cofi_tensors_may_write(const char *input, const char *output, char *error)
{
    struct list in, out;
    if (!parse_list("option -i", input, &in, error))
        return false;
    bool ok = parse_list("option -o", output, &out, error);
    if (ok) {
        ok = may_write(&in, &out, error);
        free(out.text);
    }
    free(in.text);
    return ok;
}

static const struct cofi_st_tensor *find_tensor(const struct cofi_st_tensor *tensors, int n_tensors,
                                                const char *name)
{
    for (int i = 0; i < n_tensors; i++)
        if (!strcmp(tensors[i].name, name))
            return &tensors[i];
    return NULL;
}

static bool check_item(const char *key, const struct cofi_st_tensor *tensors, int n_tensors,
                       char *error)
{
    const struct cofi_st_tensor *t = find_tensor(tensors, n_tensors, key);
    char made[200] = "";
    for (int i = 0, n = 0; i < n_tensors && n < (int)sizeof made; i++)
        n += snprintf(made + n, sizeof made - (size_t)n, "%s%s", i ? ", " : "", tensors[i].name);
    if (!t)
        return cofi_file_fail(error, "option -o", "\"%.100s\": this run makes %s", key, made);
    if (cofi_npy_has_dtype(t->dtype))
        return true;
    const char *dtype = cofi_st_dtype_name(t->dtype);
    return cofi_file_fail(error, "option -o",
                          "\"%s\" has dtype %s, which .npy does not have: give a safetensors file",
                          key, dtype ? dtype : "?");
}

bool cofi_tensors_check(const char *output, const struct cofi_st_tensor *tensors, int n_tensors,
                        char *error)
{
    struct list list;
    if (!parse_list("option -o", output, &list, error))
        return false;
    bool ok = true;
    for (int i = 0; i < list.n_items && list.items[i].key && ok; i++)
        ok = check_item(list.items[i].key, tensors, n_tensors, error);
    free(list.text);
    return ok;
}

/* What one .npy file consists of. */
struct npy_parts {
    char header[COFI_NPY_NEW_HEADER_BYTES];
    struct cofi_file_part parts[2];
};

static bool write_items(const struct list *list, const struct cofi_st_tensor *tensors,
                        int n_tensors, char *error)
{
    struct cofi_file_new *files = calloc((size_t)list->n_items, sizeof *files);
    struct npy_parts *parts = calloc((size_t)list->n_items, sizeof *parts);
    bool ok = files && parts;
    if (!ok)
        cofi_file_fail(error, "option -o", "out of memory");
    for (int i = 0; i < list->n_items && ok; i++) {
        const struct cofi_st_tensor *t = find_tensor(tensors, n_tensors, list->items[i].key);
        ok = check_item(list->items[i].key, tensors, n_tensors, error);
        if (!ok)
            break;
        parts[i].parts[0] = (struct cofi_file_part){parts[i].header,
                                                    cofi_npy_header(t, parts[i].header)};
        parts[i].parts[1] = (struct cofi_file_part){t->data, t->bytes};
        files[i].path = list->items[i].path;
        files[i].parts = parts[i].parts;
        files[i].n_parts = 2;
    }
    ok = ok && cofi_file_replace(files, list->n_items, error);
    free(parts);
    free(files);
    return ok;
}

bool cofi_tensors_write(const char *output, const struct cofi_st_metadata *metadata, int n_metadata,
                        const struct cofi_st_tensor *tensors, int n_tensors, char *error)
{
    struct list list;
    if (!parse_list("option -o", output, &list, error))
        return false;
    bool ok = list.items[0].key
                  ? write_items(&list, tensors, n_tensors, error)
                  : cofi_st_write(output, metadata, n_metadata, tensors, n_tensors, error);
    free(list.text);
    return ok;
}

/* ---- metadata ------------------------------------------------------------------------------- */

bool cofi_tensors_choice(const struct cofi_st_file *file, const char *key, const char *choices,
                         int given, int *value_out)
{
    const char *text = cofi_st_metadata(file, key);
    char name[300];
    *value_out = given < 0 ? 0 : given;
    snprintf(name, sizeof name, "%s: metadata %s", file->path, key);
    return given >= 0 || !text || cofi_cli_choice(name, text, choices, value_out);
}
