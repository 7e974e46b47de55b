/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The document of a report. bench/README.md describes every field. */
#include <stdio.h>

#include "json_document.h"

static const struct cofi_json_field result_fields[] = {
    COFI_JSON_FIELD(cofi_bench_result, TEXT, "key", key),
    COFI_JSON_FIELD(cofi_bench_result, TEXT, "case", line),
    COFI_JSON_FIELD(cofi_bench_result, TEXT, "call", direction),
    COFI_JSON_FIELD(cofi_bench_result, INT, "ranks", ranks),
    COFI_JSON_FIELD(cofi_bench_result, INT, "threads", threads),
    COFI_JSON_FIELD(cofi_bench_result, TEXT, "engine", engine),
    COFI_JSON_FIELD(cofi_bench_result, BOOL, "pinned", pinned),
    COFI_JSON_FIELD(cofi_bench_result, BOOL, "staged", staged),
    COFI_JSON_FIELD(cofi_bench_result, TEXT, "cache", cache),
    COFI_JSON_FIELD(cofi_bench_result, INT, "buffer_sets", n_sets),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "set_bytes", set_bytes),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "flops", flops),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "wire_bytes", wire_bytes),
    COFI_JSON_FIELD(cofi_bench_result, INT64, "calls", n_calls),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "median_s", median),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "p90_s", p90),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "p99_s", p99),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "min_s", min),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "spread", spread),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "yardstick_flops_per_s", rate),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "efficiency", efficiency),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "plan_first_s", plan_first),
    COFI_JSON_FIELD(cofi_bench_result, REAL, "plan_later_s", plan_later),
    COFI_JSON_FIELD(cofi_bench_result, TEXT, "plan", describe),
    COFI_JSON_LATER(cofi_bench_result, INT, "devices", devices),
    COFI_JSON_LATER(cofi_bench_result, INT, "flows", flows),
};
static const struct cofi_json_field setting_fields[] = {
    COFI_JSON_FIELD(cofi_bench_report, INT64, "processes", n_processes),
    COFI_JSON_FIELD(cofi_bench_report, INT64, "repeat", repeat),
    COFI_JSON_FIELD(cofi_bench_report, INT64, "warmup", warmup),
    COFI_JSON_FIELD(cofi_bench_report, INT64, "threads", n_threads),
    COFI_JSON_FIELD(cofi_bench_report, REAL, "seconds", seconds),
    COFI_JSON_LATER(cofi_bench_report, TEXT, "device", device),
};
static const struct cofi_json_field failure_fields[] = {
    COFI_JSON_FIELD(cofi_bench_failure, TEXT, "key", key),
    COFI_JSON_FIELD(cofi_bench_failure, TEXT, "error", text),
};

/* ---- Writing ---- */

static json_t *make_result(const struct cofi_bench_result *r)
{
    json_t *object = cofi_json_object(COFI_JSON_ALL(result_fields), r);
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
    json_t *document = cofi_json_begin(COFI_BENCH_SCHEMA, &report->run, &report->machine);
    json_t *results = json_array(), *failures = json_array();
    bool ok = json_object_set_new(document, "settings",
                                  cofi_json_object(COFI_JSON_ALL(setting_fields), report)) == 0;
    for (int i = 0; i < report->n_results && ok; i++)
        ok = json_array_append_new(results, make_result(&report->results[i])) == 0;
    for (int i = 0; i < report->n_failures && ok; i++)
        ok = json_array_append_new(failures, cofi_json_object(COFI_JSON_ALL(failure_fields),
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
    return cofi_json_write(make_document(report), path);
}

/* ---- Reading ---- */

static bool read_result(const char *path, int idx, const json_t *object,
                        struct cofi_bench_result *r)
{
    char what[40];
    snprintf(what, sizeof what, "results[%d]", idx);
    if (!cofi_json_read(path, what, object, COFI_JSON_ALL(result_fields), r))
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
        if (!f || !cofi_json_read(path, "failures", json_array_get(failures, i),
                                  COFI_JSON_ALL(failure_fields), f))
            return false;
    }
    return true;
}

static bool read_document(const char *path, const json_t *document,
                          struct cofi_bench_report *report)
{
    return cofi_json_read_head(path, document, COFI_BENCH_SCHEMA, &report->run,
                               &report->machine) &&
           cofi_json_read(path, "settings", json_object_get(document, "settings"),
                          COFI_JSON_ALL(setting_fields), report) &&
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
