/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check` from the inside: a *request* is what its options say, a *job* one rank count with
 * all its cases, a *record* what came of a case. */
#ifndef COFI_CHECK_JOB_H
#define COFI_CHECK_JOB_H

#include <stdatomic.h>

#include "bench_harness.h"
#include "cli.h"
#include "ops/check.h"

enum { COFI_CHECK_LINE_BYTES = 512, COFI_CHECK_HEADER_BYTES = 8192, COFI_CHECK_SCHEMA = 1 };

struct cofi_check_request {
    struct cofi_rank_counts ranks;
    cof_engine engine;
    bool attach; /* over worlds of COF_ENGINE_SHM, or of devices */
    bool cuda;   /* worlds of COF_ENGINE_CUDA; `engine` says what the ranks are */
    int64_t seed;
    bool full, list, verbose;
    const char *json;
    int n_patterns;
    char **patterns;
};

struct cofi_check_record {
    char line[COFI_CHECK_LINE_BYTES]; /* without the rank count */
    int ranks;
    char verdict[8]; /* passed, failed, skipped */
    double seconds;
    char text[sizeof((struct cofi_check_result *)0)->text];
};

/* At the beginning of the memory that parent and ranks share. At COFI_CHECK_HEADER_BYTES begins the
 * part of the cases, and behind it, for --json, one record for each selected case. */
struct cofi_check_job {
    uint64_t magic;
    int n_ranks;
    size_t case_bytes;
    int64_t max_records; /* 0: none are kept */
    _Atomic int64_t n_records;
    _Atomic int64_t n_passed, n_failed, n_skipped;
    _Atomic bool finished;
    char line[COFI_CHECK_LINE_BYTES]; /* of the case in hand, "" between cases */
};
#define COFI_CHECK_MAGIC UINT64_C(0x6b63656863666f63)
_Static_assert(sizeof(struct cofi_check_job) <= COFI_CHECK_HEADER_BYTES, "the header has room");

/* ---- check_cases.c ---- */

struct cofi_check_options cofi_check_job_options(const struct cofi_check_request *request,
                                                 int n_ranks);
/* The check of the i-th operator; NULL: it has none for these devices. */
const struct cofi_op_check *cofi_check_of(int i, bool cuda);
/* The case's line with the rank count behind it; whether the request selects it. */
bool cofi_check_selects(const struct cofi_check_request *request,
                        const struct cofi_op_check *check,
                        const struct cofi_check_options *options, int64_t idx, char *line);
int64_t cofi_check_count(const struct cofi_check_request *request, int n_ranks, bool print);
/* Prints the command that runs a failed case again. */
void cofi_check_print_again(const struct cofi_check_options *options,
                            const struct cofi_check_request *request, const char *line);

/* ---- check_rank.c: a rank, process or thread ---- */

size_t cofi_check_job_bytes(size_t case_bytes, int64_t max_records);
struct cofi_check_record *cofi_check_records(struct cofi_check_job *job);
/* Keeps what came of a case, where records are kept. `line` has the rank count behind it. */
void cofi_check_keep(struct cofi_check_job *job, const char *line,
                     const struct cofi_check_result *result, double seconds);

/* Returns the rank's exit code. */
int cofi_check_rank(const struct cofi_check_request *request, cof_world_options *options,
                    struct cofi_check_job *job);

/* ---- check_json.c ---- */

struct cofi_check_report {
    struct cofi_cli_run run;
    struct cofi_bench_machine machine;
    char device[8], engine[8];
    int64_t seed, n_passed, n_failed, n_skipped, n_records;
    bool full;
    struct cofi_check_record *records;
};
/* False after a message, both. */
bool cofi_check_report_add(struct cofi_check_report *report, struct cofi_check_job *job);
bool cofi_check_json_write(const struct cofi_check_report *report, const char *path);

#endif
