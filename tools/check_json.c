/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The document of `cofuse check`. bench/README.md describes every field. */
#include <stdlib.h>
#include <string.h>

#include "check_job.h"
#include "json_document.h"

static const struct cofi_json_field report_fields[] = {
    COFI_JSON_FIELD(cofi_check_report, TEXT, "device", device),
    COFI_JSON_FIELD(cofi_check_report, TEXT, "engine", engine),
    COFI_JSON_FIELD(cofi_check_report, INT64, "seed", seed),
    COFI_JSON_FIELD(cofi_check_report, BOOL, "full", full),
    COFI_JSON_FIELD(cofi_check_report, INT64, "passed", n_passed),
    COFI_JSON_FIELD(cofi_check_report, INT64, "failed", n_failed),
    COFI_JSON_FIELD(cofi_check_report, INT64, "skipped", n_skipped),
};
static const struct cofi_json_field record_fields[] = {
    COFI_JSON_FIELD(cofi_check_record, TEXT, "case", line),
    COFI_JSON_FIELD(cofi_check_record, INT, "ranks", ranks),
    COFI_JSON_FIELD(cofi_check_record, TEXT, "verdict", verdict),
    COFI_JSON_FIELD(cofi_check_record, REAL, "seconds", seconds),
    COFI_JSON_FIELD(cofi_check_record, TEXT, "text", text),
};

bool cofi_check_report_add(struct cofi_check_report *report, struct cofi_check_job *job)
{
    int64_t n = report->n_records + job->n_records;
    report->n_passed += job->n_passed;
    report->n_failed += job->n_failed;
    report->n_skipped += job->n_skipped;
    if (n == report->n_records)
        return true;
    struct cofi_check_record *more = realloc(report->records, (size_t)n * sizeof *more);
    if (!more) {
        cofi_cli_error("out of memory");
        return false;
    }
    memcpy(more + report->n_records, cofi_check_records(job),
           (size_t)job->n_records * sizeof *more);
    report->records = more;
    report->n_records = n;
    return true;
}

bool cofi_check_json_write(const struct cofi_check_report *report, const char *path)
{
    json_t *document = cofi_json_begin(COFI_CHECK_SCHEMA, &report->run, &report->machine);
    json_t *cases = json_array();
    bool ok = cofi_json_put(document, COFI_JSON_ALL(report_fields), report);
    for (int64_t i = 0; i < report->n_records && ok; i++)
        ok = json_array_append_new(cases, cofi_json_object(COFI_JSON_ALL(record_fields),
                                                           &report->records[i])) == 0;
    ok &= json_object_set_new(document, "cases", cases) == 0;
    if (!ok) {
        json_decref(document);
        document = NULL;
    }
    return cofi_json_write(document, path);
}
