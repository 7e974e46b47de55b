/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench` from the inside. A *case* is a line of bench/shapes; a *variant* is a case with a
 * rank count and the ways to run it; a *job* is one fresh start of a variant's ranks; a *result* is
 * the statistics of one direction of a variant over all its jobs; a *report* holds the results of a
 * run of the command, and is what the JSON document says. */
#ifndef COFI_BENCH_HARNESS_H
#define COFI_BENCH_HARNESS_H

#include <stdatomic.h>

#include "cli.h"
#include "device_info.h"
#include "ops/bench.h"

enum { COFI_BENCH_KEY_BYTES = COFI_BENCH_LINE_BYTES + 120, COFI_BENCH_TEXT_BYTES = 512,
       COFI_BENCH_MAX_PROCESSES = 100, COFI_BENCH_MAX_CALLS = 10000,
       COFI_BENCH_RATES = COFI_BENCH_DIRECTIONS + 1, COFI_BENCH_SCHEMA = 1 };

enum cofi_bench_ways { COFI_BENCH_FIRST = 1, COFI_BENCH_SECOND = 2, COFI_BENCH_BOTH = 3 };

struct cofi_bench_options {
    struct cofi_rank_counts ranks;
    cof_engine engine; /* thread: ranks are threads of one process; shm: processes */
    int64_t n_threads, n_processes, repeat, warmup;
    double seconds;           /* of timed calls per job and direction; 0: no limit */
    double rate_seconds;      /* of each window of the yardstick */
    double band;              /* fraction; < 0: by the spreads */
    int pin, cache, staged;   /* enum cofi_bench_ways: yes, no; warm, cold; no, yes */
    bool tiny, list, markdown, cuda, measures; /* measures: an option that says how was given */
    const char *shapes, *json, *baseline, *from;
    int n_patterns;
    char **patterns;
};

/* ---- bench_cases.c ---- */

struct cofi_bench_variant {
    const struct cofi_op *op;
    char line[COFI_BENCH_LINE_BYTES];
    char key[COFI_BENCH_KEY_BYTES]; /* line and ways: what names it everywhere */
    int n_ranks, n_sets;
    bool unpinned, cold, staged;
    struct cofi_bench_size size;
};

struct cofi_bench_list {
    int n;
    struct cofi_bench_variant *variants; /* those of a case side by side */
};

/* The selected variants; COFI_EXIT_OK, or the exit code after a message. */
int cofi_bench_list_make(const struct cofi_bench_options *options, size_t cache_bytes,
                         struct cofi_bench_list *list_out);
/* Variants from `first` on that are of one case. */
int cofi_bench_list_case(const struct cofi_bench_list *list, int first);

/* ---- bench_job.c: one start of the ranks ---- */

/* The memory that parent and ranks share; the times follow. */
struct cofi_bench_job {
    uint64_t magic;
    char op[32], line[COFI_BENCH_LINE_BYTES];
    int n_ranks, n_threads, n_sets, n_directions, repeat, warmup;
    cof_engine engine;
    bool unpinned, cuda;
    double seconds, rate_seconds, timeout;
    /* from the ranks */
    _Atomic bool finished;
    atomic_flag has_failed; /* taken by the rank whose `failure` it is */
    char failure[COFI_BENCH_TEXT_BYTES];
    int threads;
    bool pinned;
    char describe[COFI_BENCH_TEXT_BYTES];
    char device[COFI_MAX_RANKS][COFI_DEVICE_UUID_BYTES]; /* by rank; "": the CPU */
    int n_calls[COFI_BENCH_DIRECTIONS];
    double plan_first[COFI_MAX_RANKS], plan_later[COFI_MAX_RANKS]; /* seconds */
    double rate[COFI_BENCH_RATES][COFI_MAX_RANKS]; /* before direction i, and after the last */
    double times[]; /* [direction][call][rank], seconds */
};
#define COFI_BENCH_MAGIC UINT64_C(0x68636e6562666f63)

static inline double *cofi_bench_times(struct cofi_bench_job *job, int direction, int call)
{
    return job->times + ((int64_t)direction * job->repeat + call) * job->n_ranks;
}

/* All that the jobs of a variant left. */
struct cofi_bench_samples {
    int n_processes, threads, devices;
    bool pinned, failed;
    char describe[COFI_BENCH_TEXT_BYTES], failure[COFI_BENCH_TEXT_BYTES];
    int n_calls[COFI_BENCH_MAX_PROCESSES][COFI_BENCH_DIRECTIONS];
    double plan_first[COFI_BENCH_MAX_PROCESSES], plan_later[COFI_BENCH_MAX_PROCESSES];
    double rate[COFI_BENCH_MAX_PROCESSES][COFI_BENCH_RATES]; /* all ranks together */
    double *calls[COFI_BENCH_DIRECTIONS]; /* seconds of the slowest rank, job by job */
    int64_t n[COFI_BENCH_DIRECTIONS];
};

/* What results and keys call the way in which ranks share memory. */
const char *cofi_bench_engine_name(const struct cofi_bench_options *options);

/* Starts the ranks once and adds what they measured. Returns the exit code of the job. */
int cofi_bench_job_run(const struct cofi_bench_options *options,
                       const struct cofi_bench_variant *variant,
                       struct cofi_bench_samples *samples);
void cofi_bench_samples_free(struct cofi_bench_samples *samples);

/* bench_rank.c: the process that cofi_bench_job_run starts; returns its exit code. */
int cofi_bench_rank_main(void);

/* ---- bench_stats.c ---- */

struct cofi_bench_result {
    char key[COFI_BENCH_KEY_BYTES + 32]; /* of the variant, and " call=direction" */
    char line[COFI_BENCH_LINE_BYTES], direction[24], engine[16], cache[8];
    char describe[COFI_BENCH_TEXT_BYTES];
    int ranks, threads, n_sets, n_processes;
    int devices; /* that the ranks work on: fewer than ranks where some share one; 0: the CPU */
    int flows;
    int64_t n_calls;
    bool pinned, staged;
    double set_bytes, flops, wire_bytes;
    double median, p90, p99, min; /* seconds, of all calls of all jobs */
    double spread;                /* (max - min of the jobs' medians) / median */
    double rate, efficiency;      /* medians over the jobs; 0: no yardstick */
    double plan_first, plan_later; /* seconds, medians over the jobs */
    double job_median[COFI_BENCH_MAX_PROCESSES];
};

/* Value at fraction q (0 .. 1) of sorted values: the smallest that q of them do not exceed; the
 * mean of the middle two for q = 0.5. */
double cofi_bench_quantile(const double *sorted, int64_t n, double q);
void cofi_bench_result_make(const struct cofi_bench_variant *variant,
                            const struct cofi_bench_options *options, int direction,
                            const struct cofi_bench_samples *samples,
                            struct cofi_bench_result *result_out);

/* ---- bench_machine.c ---- */

struct cofi_bench_machine {
    char cpu[128], isa[24], gemm[40], kernel[128];
    int cores; /* that this process may use */
    double memory_bytes, cache_bytes; /* last level of cache */
    char gpu[128], gpu_driver[24], gpu_runtime[24]; /* "": of a run on the CPU */
    int gpus;
};
void cofi_bench_machine_read(bool cuda, struct cofi_bench_machine *machine_out);

/* ---- the report: bench_json.c, bench_table.c, bench_compare.c ---- */

struct cofi_bench_failure {
    char key[COFI_BENCH_KEY_BYTES], text[COFI_BENCH_TEXT_BYTES];
};

struct cofi_bench_report {
    struct cofi_cli_run run;
    char device[8];
    struct cofi_bench_machine machine;
    int64_t n_processes, repeat, warmup, n_threads;
    double seconds;
    int n_results, n_failures;
    struct cofi_bench_result *results;
    struct cofi_bench_failure *failures;
};

/* Room for one more; NULL after a message. */
struct cofi_bench_result *cofi_bench_report_add(struct cofi_bench_report *report);
struct cofi_bench_failure *cofi_bench_report_add_failure(struct cofi_bench_report *report);
void cofi_bench_report_free(struct cofi_bench_report *report);

/* Each false after a message. Written as cofi_file_replace does. */
bool cofi_bench_json_write(const struct cofi_bench_report *report, const char *path);
bool cofi_bench_json_read(const char *path, struct cofi_bench_report *report_out);

/* Results first .. n_results-1 of one case after the other. */
void cofi_bench_table_print(const struct cofi_bench_report *report, int first);
void cofi_bench_table_markdown(const struct cofi_bench_report *report);
/* The same variant on one rank, for a comparison; NULL: was not measured. */
const struct cofi_bench_result *cofi_bench_one_rank(const struct cofi_bench_report *report,
                                                    const struct cofi_bench_result *result);

/* Prints what is slower than in the baseline, and what is in one of them only. COFI_EXIT_OK,
 * COFI_EXIT_CHECK when something is slower, COFI_EXIT_USAGE when they share no result. */
int cofi_bench_compare(const struct cofi_bench_report *report,
                       const struct cofi_bench_report *baseline, double band);

#endif
