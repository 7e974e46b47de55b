/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "json_document.h"

#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "file_io.h"

static const struct cofi_json_field run_fields[] = {
    COFI_JSON_FIELD(cofi_cli_run, TEXT, "date", date),
    COFI_JSON_FIELD(cofi_cli_run, TEXT, "version", version),
    COFI_JSON_FIELD(cofi_cli_run, TEXT, "command", command),
};
static const struct cofi_json_field machine_fields[] = {
    COFI_JSON_FIELD(cofi_bench_machine, TEXT, "cpu", cpu),
    COFI_JSON_FIELD(cofi_bench_machine, INT, "cores", cores),
    COFI_JSON_FIELD(cofi_bench_machine, TEXT, "isa", isa),
    COFI_JSON_FIELD(cofi_bench_machine, TEXT, "gemm", gemm),
    COFI_JSON_FIELD(cofi_bench_machine, TEXT, "kernel", kernel),
    COFI_JSON_FIELD(cofi_bench_machine, REAL, "memory_bytes", memory_bytes),
    COFI_JSON_FIELD(cofi_bench_machine, REAL, "cache_bytes", cache_bytes),
    COFI_JSON_LATER(cofi_bench_machine, TEXT, "gpu", gpu),
    COFI_JSON_LATER(cofi_bench_machine, INT, "gpus", gpus),
    COFI_JSON_LATER(cofi_bench_machine, TEXT, "gpu_driver", gpu_driver),
    COFI_JSON_LATER(cofi_bench_machine, TEXT, "gpu_runtime", gpu_runtime),
};

/* ---- writing ---- */

/* A text in UTF-8, with '?' for what is none: of an argument, or where the end was cut off. */
static json_t *text_value(const char *text)
{
    char clean[sizeof((struct cofi_cli_run *)0)->command];
    json_t *value = json_string(text);
    size_t at = 0;
    while (!value && text[at] && at + 1 < sizeof clean) {
        json_t *character = NULL;
        size_t n = 0;
        while (!character && n < 4 && text[at + n] && at + n + 1 < sizeof clean)
            character = json_stringn(text + at, ++n);
        memcpy(clean + at, character ? text + at : "?", character ? n : 1);
        at += character ? n : 1;
        json_decref(character);
    }
    return value ? value : json_stringn(clean, at);
}

static json_t *field_value(const struct cofi_json_field *f, const void *from)
{
    const char *at = (const char *)from + f->offset;
    switch (f->kind) {
    case COFI_JSON_TEXT: return text_value(at);
    case COFI_JSON_INT: return json_integer(*(const int *)at);
    case COFI_JSON_INT64: return json_integer(*(const int64_t *)at);
    case COFI_JSON_REAL: return json_real(*(const double *)at);
    case COFI_JSON_BOOL: return json_boolean(*(const bool *)at);
    }
    return NULL;
}

/* json_*_new steal references and refuse NULL, so one check at the end is enough. */
bool cofi_json_put(json_t *object, const struct cofi_json_field *fields, int n, const void *from)
{
    bool ok = object != NULL;
    for (int i = 0; i < n && ok; i++)
        ok = json_object_set_new(object, fields[i].name, field_value(&fields[i], from)) == 0;
    return ok;
}

json_t *cofi_json_object(const struct cofi_json_field *fields, int n, const void *from)
{
    json_t *object = json_object();
    if (!cofi_json_put(object, fields, n, from)) {
        json_decref(object);
        return NULL;
    }
    return object;
}

json_t *cofi_json_begin(int schema, const struct cofi_cli_run *run,
                        const struct cofi_bench_machine *machine)
{
    json_t *document = json_object();
    bool ok = json_object_set_new(document, "schema", json_integer(schema)) == 0 &&
              cofi_json_put(document, COFI_JSON_ALL(run_fields), run) &&
              json_object_set_new(document, "machine",
                                  cofi_json_object(COFI_JSON_ALL(machine_fields), machine)) == 0;
    if (ok)
        return document;
    json_decref(document);
    return NULL;
}

bool cofi_json_write(json_t *document, const char *path)
{
    char error[COFI_FILE_ERROR_BYTES] = "out of memory";
    char *text = document ? json_dumps(document, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) : NULL;
    struct cofi_file_part parts[] = {{text, text ? strlen(text) : 0}, {"\n", 1}};
    struct cofi_file_new file = {.path = path, .parts = parts, .n_parts = 2};
    bool ok = text && cofi_file_replace(&file, 1, error);
    if (!ok)
        cofi_cli_error("option --json: %s", error);
    free(text);
    json_decref(document);
    return ok;
}

/* ---- reading ---- */

static bool read_field(const struct cofi_json_field *f, const json_t *value, void *to)
{
    char *at = (char *)to + f->offset;
    switch (f->kind) {
    case COFI_JSON_TEXT:
        if (!json_is_string(value) || json_string_length(value) >= f->bytes)
            return false;
        memcpy(at, json_string_value(value), json_string_length(value) + 1);
        return true;
    case COFI_JSON_INT:
        if (!json_is_integer(value) || json_integer_value(value) < 0 ||
            json_integer_value(value) > INT32_MAX)
            return false;
        *(int *)at = (int)json_integer_value(value);
        return true;
    case COFI_JSON_INT64: *(int64_t *)at = json_integer_value(value); return json_is_integer(value);
    case COFI_JSON_REAL:
        *(double *)at = json_number_value(value);
        return json_is_number(value) && json_number_value(value) >= 0;
    case COFI_JSON_BOOL: *(bool *)at = json_is_true(value); return json_is_boolean(value);
    }
    return false;
}

static const char *kind_name(enum cofi_json_kind kind)
{
    static const char *const names[] = {
        [COFI_JSON_TEXT] = "a text", [COFI_JSON_INT] = "an integer >= 0",
        [COFI_JSON_INT64] = "an integer", [COFI_JSON_REAL] = "a number >= 0",
        [COFI_JSON_BOOL] = "true or false"};
    return names[kind];
}

bool cofi_json_read(const char *path, const char *what, const json_t *object,
                    const struct cofi_json_field *fields, int n, void *to)
{
    for (int i = 0; i < n; i++) {
        const json_t *value = json_object_get(object, fields[i].name);
        if ((!value && fields[i].is_optional) || read_field(&fields[i], value, to))
            continue;
        cofi_cli_error("%s: %s: \"%s\" is missing or wrong: wanted %s", path, what,
                       fields[i].name, kind_name(fields[i].kind));
        return false;
    }
    return true;
}

bool cofi_json_read_head(const char *path, const json_t *document, int schema,
                         struct cofi_cli_run *run, struct cofi_bench_machine *machine)
{
    const json_t *found = json_object_get(document, "schema");
    if (!json_is_integer(found) || json_integer_value(found) != schema) {
        cofi_cli_error("%s: \"schema\" = %lld: wanted %d", path,
                       (long long)json_integer_value(found), schema);
        return false;
    }
    return cofi_json_read(path, "document", document, COFI_JSON_ALL(run_fields), run) &&
           cofi_json_read(path, "machine", json_object_get(document, "machine"),
                          COFI_JSON_ALL(machine_fields), machine);
}
