/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The document of a report. bench/README.md describes every field. */
#include <jansson.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_harness.h"
#include "file_io.h"

enum kind { TEXT, INT, INT64, REAL, BOOL };

/* A field of one of the structs: the same table writes and reads it. */
struct field {
    const char *name;
    enum kind kind;
    size_t offset, bytes;
    bool is_optional; /* documents of earlier versions do not have it */
};
#define FIELD(type, kind, name, member)                                                            \
    {name, kind, offsetof(struct type, member), sizeof((struct type *)0)->member, false}
#define LATER(type, kind, name, member)                                                            \
    {name, kind, offsetof(struct type, member), sizeof((struct type *)0)->member, true}

static const struct field result_fields[] = {
    FIELD(cofi_bench_result, TEXT, "key", key),
    FIELD(cofi_bench_result, TEXT, "case", line),
    FIELD(cofi_bench_result, TEXT, "call", direction),
    FIELD(cofi_bench_result, INT, "ranks", ranks),
    FIELD(cofi_bench_result, INT, "threads", threads),
    FIELD(cofi_bench_result, TEXT, "engine", engine),
    FIELD(cofi_bench_result, BOOL, "pinned", pinned),
    FIELD(cofi_bench_result, BOOL, "staged", staged),
    FIELD(cofi_bench_result, TEXT, "cache", cache),
    FIELD(cofi_bench_result, INT, "buffer_sets", n_sets),
    FIELD(cofi_bench_result, REAL, "set_bytes", set_bytes),
    FIELD(cofi_bench_result, REAL, "flops", flops),
    FIELD(cofi_bench_result, REAL, "wire_bytes", wire_bytes),
    FIELD(cofi_bench_result, INT64, "calls", n_calls),
    FIELD(cofi_bench_result, REAL, "median_s", median),
    FIELD(cofi_bench_result, REAL, "p90_s", p90),
    FIELD(cofi_bench_result, REAL, "p99_s", p99),
    FIELD(cofi_bench_result, REAL, "min_s", min),
    FIELD(cofi_bench_result, REAL, "spread", spread),
    FIELD(cofi_bench_result, REAL, "yardstick_flops_per_s", rate),
    FIELD(cofi_bench_result, REAL, "efficiency", efficiency),
    FIELD(cofi_bench_result, REAL, "plan_first_s", plan_first),
    FIELD(cofi_bench_result, REAL, "plan_later_s", plan_later),
    FIELD(cofi_bench_result, TEXT, "plan", describe),
    LATER(cofi_bench_result, INT, "devices", devices),
    LATER(cofi_bench_result, INT, "flows", flows),
};
static const struct field machine_fields[] = {
    FIELD(cofi_bench_machine, TEXT, "cpu", cpu),
    FIELD(cofi_bench_machine, INT, "cores", cores),
    FIELD(cofi_bench_machine, TEXT, "isa", isa),
    FIELD(cofi_bench_machine, TEXT, "gemm", gemm),
    FIELD(cofi_bench_machine, TEXT, "kernel", kernel),
    FIELD(cofi_bench_machine, REAL, "memory_bytes", memory_bytes),
    FIELD(cofi_bench_machine, REAL, "cache_bytes", cache_bytes),
    LATER(cofi_bench_machine, TEXT, "gpu", gpu),
    LATER(cofi_bench_machine, INT, "gpus", gpus),
    LATER(cofi_bench_machine, TEXT, "gpu_driver", gpu_driver),
    LATER(cofi_bench_machine, TEXT, "gpu_runtime", gpu_runtime),
};
static const struct field head_fields[] = {
    FIELD(cofi_bench_report, TEXT, "date", date),
    FIELD(cofi_bench_report, TEXT, "version", version),
    FIELD(cofi_bench_report, TEXT, "command", command),
};
static const struct field setting_fields[] = {
    FIELD(cofi_bench_report, INT64, "processes", n_processes),
    FIELD(cofi_bench_report, INT64, "repeat", repeat),
    FIELD(cofi_bench_report, INT64, "warmup", warmup),
    FIELD(cofi_bench_report, INT64, "threads", n_threads),
    FIELD(cofi_bench_report, REAL, "seconds", seconds),
    LATER(cofi_bench_report, TEXT, "device", device),
};
static const struct field failure_fields[] = {
    FIELD(cofi_bench_failure, TEXT, "key", key),
    FIELD(cofi_bench_failure, TEXT, "error", text),
};
#define COUNT(fields) (int)(sizeof(fields) / sizeof(fields)[0])

/* ---- Writing ---- */

/* A text in UTF-8, with '?' for what is none: of an argument, or where the end was cut off. */
static json_t *text_value(const char *text)
{
    char clean[sizeof((struct cofi_bench_report *)0)->command];
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

static json_t *field_value(const struct field *f, const void *from)
{
    const char *at = (const char *)from + f->offset;
    switch (f->kind) {
    case TEXT: return text_value(at);
    case INT: return json_integer(*(const int *)at);
    case INT64: return json_integer(*(const int64_t *)at);
    case REAL: return json_real(*(const double *)at);
    case BOOL: return json_boolean(*(const bool *)at);
    }
    return NULL;
}

/* json_*_new steal references and refuse NULL, so one check at the end is enough. */
static bool put_fields(json_t *object, const struct field *fields, int n, const void *from)
{
    bool ok = object != NULL;
    for (int i = 0; i < n && ok; i++)
        ok = json_object_set_new(object, fields[i].name, field_value(&fields[i], from)) == 0;
    return ok;
}

static json_t *make_object(const struct field *fields, int n, const void *from)
{
    json_t *object = json_object();
    if (!put_fields(object, fields, n, from)) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static json_t *make_result(const struct cofi_bench_result *r)
{
    json_t *object = make_object(result_fields, COUNT(result_fields), r);
    json_t *medians = json_array();
    for (int i = 0; i < r->n_processes; i++)
        json_array_append_new(medians, json_real(r->job_median[i]));
    if (object && json_object_set_new(object, "job_medians_s", medians) == 0)
        return object;
    json_decref(object);
    return NULL;
}

static json_t *make_document(const struct cofi_bench_report *report)
{
    json_t *document = json_object(), *results = json_array(), *failures = json_array();
    bool ok = json_object_set_new(document, "schema", json_integer(COFI_BENCH_SCHEMA)) == 0 &&
              put_fields(document, head_fields, COUNT(head_fields), report) &&
              json_object_set_new(document, "machine",
                                  make_object(machine_fields, COUNT(machine_fields),
                                              &report->machine)) == 0 &&
              json_object_set_new(document, "settings",
                                  make_object(setting_fields, COUNT(setting_fields),
                                              report)) == 0;
    for (int i = 0; i < report->n_results && ok; i++)
        ok = json_array_append_new(results, make_result(&report->results[i])) == 0;
    for (int i = 0; i < report->n_failures && ok; i++)
        ok = json_array_append_new(failures, make_object(failure_fields, COUNT(failure_fields),
                                                         &report->failures[i])) == 0;
    ok &= json_object_set_new(document, "results", results) == 0;
    ok &= json_object_set_new(document, "failures", failures) == 0;
    if (ok)
        return document;
    json_decref(document);
    return NULL;
}

bool cofi_bench_json_write(const struct cofi_bench_report *report, const char *path)
{
    char error[COFI_FILE_ERROR_BYTES] = "out of memory";
    json_t *document = make_document(report);
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

/* ---- Reading ---- */

static bool read_field(const struct field *f, const json_t *value, void *to)
{
    char *at = (char *)to + f->offset;
    switch (f->kind) {
    case TEXT:
        if (!json_is_string(value) || json_string_length(value) >= f->bytes)
            return false;
        memcpy(at, json_string_value(value), json_string_length(value) + 1);
        return true;
    case INT:
        if (!json_is_integer(value) || json_integer_value(value) < 0 ||
            json_integer_value(value) > INT32_MAX)
            return false;
        *(int *)at = (int)json_integer_value(value);
        return true;
    case INT64: *(int64_t *)at = json_integer_value(value); return json_is_integer(value);
    case REAL:
        *(double *)at = json_number_value(value);
        return json_is_number(value) && json_number_value(value) >= 0;
    case BOOL: *(bool *)at = json_is_true(value); return json_is_boolean(value);
    }
    return false;
}

static const char *kind_name(enum kind kind)
{
    static const char *const names[] = {[TEXT] = "a text", [INT] = "an integer >= 0",
                                        [INT64] = "an integer", [REAL] = "a number >= 0",
                                        [BOOL] = "true or false"};
    return names[kind];
}

/* `what` names the object in messages. */
static bool read_fields(const char *path, const char *what, const json_t *object,
                        const struct field *fields, int n, void *to)
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

static bool read_result(const char *path, int idx, const json_t *object,
                        struct cofi_bench_result *r)
{
    char what[40];
    snprintf(what, sizeof what, "results[%d]", idx);
    if (!read_fields(path, what, object, result_fields, COUNT(result_fields), r))
        return false;
    const json_t *medians = json_object_get(object, "job_medians_s");
    size_t n = json_array_size(medians);
    if (n < 1 || n > COFI_BENCH_MAX_PROCESSES || r->median <= 0) {
        cofi_cli_error("%s: %s: wanted 1 to %d numbers in \"job_medians_s\" and a \"median_s\" "
                       "above 0", path, what, COFI_BENCH_MAX_PROCESSES);
        return false;
    }
    for (size_t i = 0; i < n; i++)
        r->job_median[i] = json_number_value(json_array_get(medians, i));
    r->n_processes = (int)n;
    return true;
}

static bool read_lists(const char *path, const json_t *document, struct cofi_bench_report *report)
{
    const json_t *results = json_object_get(document, "results");
    const json_t *failures = json_object_get(document, "failures");
    for (size_t i = 0; i < json_array_size(results); i++) {
        struct cofi_bench_result *r = cofi_bench_report_add(report);
        if (!r || !read_result(path, (int)i, json_array_get(results, i), r))
            return false;
    }
    for (size_t i = 0; i < json_array_size(failures); i++) {
        struct cofi_bench_failure *f = cofi_bench_report_add_failure(report);
        if (!f || !read_fields(path, "failures", json_array_get(failures, i), failure_fields,
                               COUNT(failure_fields), f))
            return false;
    }
    return true;
}

static bool read_document(const char *path, const json_t *document,
                          struct cofi_bench_report *report)
{
    const json_t *schema = json_object_get(document, "schema");
    if (!json_is_integer(schema) || json_integer_value(schema) != COFI_BENCH_SCHEMA) {
        cofi_cli_error("%s: \"schema\" = %lld: wanted %d", path,
                       (long long)json_integer_value(schema), COFI_BENCH_SCHEMA);
        return false;
    }
    return read_fields(path, "document", document, head_fields, COUNT(head_fields), report) &&
           read_fields(path, "machine", json_object_get(document, "machine"), machine_fields,
                       COUNT(machine_fields), &report->machine) &&
           read_fields(path, "settings", json_object_get(document, "settings"), setting_fields,
                       COUNT(setting_fields), report) &&
           read_lists(path, document, report);
}

bool cofi_bench_json_read(const char *path, struct cofi_bench_report *report_out)
{
    json_error_t error;
    *report_out = (struct cofi_bench_report){0};
    json_t *document = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!document) {
        if (error.line < 0)
            cofi_cli_error("%s", error.text); /* which names the file */
        else
            cofi_cli_error("%s:%d: %s", path, error.line, error.text);
        return false;
    }
    bool ok = read_document(path, document, report_out);
    json_decref(document);
    if (!ok)
        cofi_bench_report_free(report_out);
    return ok;
}
