/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench`: options, the order of the jobs, and what becomes of their results. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_harness.h"
#include "commands.h"
#include "core/clock.h"
#include "core/config.h"
#include "job.h"
#include "ranks.h"

static const char usage[] =
    "usage: cofuse bench [PATTERN...] [options]\n"
    "       cofuse bench --from FILE [--baseline FILE | --markdown]\n"
    "\n"
    "Times the calls that `cofuse check` compares. A case is a line of bench/shapes; a rank count\n"
    "and the ways to run it make a variant of it (--list). PATTERN selects the variants that hold\n"
    "it, or that it matches with * and ?. Every variant is started afresh --processes times, in\n"
    "turn with the others of its case. A call lasts from a start common to all ranks to the end\n"
    "of the slowest. docs/performance.md tells what the columns mean, bench/README.md the JSON.\n"
    "\n"
    "      --ranks LIST     rank counts [1,2,4]\n"
    "      --device D       cpu; cuda: the cases that have a form on CUDA devices [cpu]\n"
    "      --engine E       shm: processes; thread: threads of one process [COFUSE_ENGINE]\n"
    "      --threads N      per rank; 0: COFUSE_THREADS, else cores / ranks [0]\n"
    "      --pin W          yes: where ranks x threads fit the cores; no; both [COFUSE_PIN]\n"
    "      --cache W        warm: the same buffers each call; cold: in turn; both [warm]\n"
    "      --staged W       via staging buffers: no, yes, both [COFUSE_FORCE_STAGED]\n"
    "      --processes N    starts of each variant [5; 1 with --tiny]\n"
    "      --repeat N       timed calls of each direction and start, at most [50; 3]\n"
    "      --warmup N       calls before them, at least one of each buffer set [1]\n"
    "      --seconds S      after which no further call is begun, but for three; 0: none [2; 0]\n"
    "      --shapes FILE    cases to run instead of those built in\n"
    "      --tiny           small cases, once: that everything runs\n"
    "      --json FILE      write the results, after each case\n"
    "      --baseline FILE  exit 1 when a median is slower than there, beyond the band\n"
    "      --band X         percent [the larger of 5 and three times the larger spread]\n"
    "      --from FILE      results of an earlier --json instead of measuring\n"
    "      --markdown       with --from: as a table in Markdown\n"
    "      --list           print the variants and run none\n";

/* ---- Options ---- */

/* Up to OPT_JSON they say how to measure. */
enum { OPT_RANKS = 256, OPT_DEVICE, OPT_ENGINE, OPT_THREADS, OPT_PIN, OPT_CACHE, OPT_STAGED,
       OPT_PROCESSES, OPT_REPEAT, OPT_WARMUP, OPT_SECONDS, OPT_SHAPES, OPT_TINY, OPT_JSON,
       OPT_BASELINE, OPT_BAND, OPT_FROM, OPT_MARKDOWN, OPT_LIST };

static const struct option long_options[] = {
    {"ranks", required_argument, NULL, OPT_RANKS},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"engine", required_argument, NULL, OPT_ENGINE},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"pin", required_argument, NULL, OPT_PIN},
    {"cache", required_argument, NULL, OPT_CACHE},
    {"staged", required_argument, NULL, OPT_STAGED},
    {"processes", required_argument, NULL, OPT_PROCESSES},
    {"repeat", required_argument, NULL, OPT_REPEAT},
    {"warmup", required_argument, NULL, OPT_WARMUP},
    {"seconds", required_argument, NULL, OPT_SECONDS},
    {"shapes", required_argument, NULL, OPT_SHAPES},
    {"tiny", no_argument, NULL, OPT_TINY},
    {"json", required_argument, NULL, OPT_JSON},
    {"baseline", required_argument, NULL, OPT_BASELINE},
    {"band", required_argument, NULL, OPT_BAND},
    {"from", required_argument, NULL, OPT_FROM},
    {"markdown", no_argument, NULL, OPT_MARKDOWN},
    {"list", no_argument, NULL, OPT_LIST},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* "first|second|both" as bits. */
static bool parse_ways(const char *option, const char *choices, int *ways)
{
    int choice;
    if (!cofi_cli_choice(option, optarg, choices, &choice))
        return false;
    *ways = choice + 1;
    return true;
}

static bool parse_engine(cof_engine *engine)
{
    int choice;
    if (!cofi_cli_choice("--engine", optarg, "thread|shm", &choice))
        return false;
    *engine = choice == 0 ? COF_ENGINE_THREAD : COF_ENGINE_SHM;
    return true;
}

static bool parse_device(bool *cuda)
{
    int choice;
    if (!cofi_cli_choice("--device", optarg, "cpu|cuda", &choice))
        return false;
    *cuda = choice == 1;
    return true;
}

static bool parse_option(struct cofi_bench_options *o, int c)
{
    switch (c) {
    case OPT_RANKS: return cofi_cli_ranks("--ranks", optarg, &o->ranks);
    case OPT_DEVICE: return parse_device(&o->cuda);
    case OPT_ENGINE: return parse_engine(&o->engine);
    case OPT_THREADS: return cofi_cli_int("--threads", optarg, 0, 256, &o->n_threads);
    case OPT_PIN: return parse_ways("--pin", "yes|no|both", &o->pin);
    case OPT_CACHE: return parse_ways("--cache", "warm|cold|both", &o->cache);
    case OPT_STAGED: return parse_ways("--staged", "no|yes|both", &o->staged);
    case OPT_PROCESSES:
        return cofi_cli_int("--processes", optarg, 1, COFI_BENCH_MAX_PROCESSES, &o->n_processes);
    case OPT_REPEAT: return cofi_cli_int("--repeat", optarg, 1, COFI_BENCH_MAX_CALLS, &o->repeat);
    case OPT_WARMUP: return cofi_cli_int("--warmup", optarg, 0, COFI_BENCH_MAX_CALLS, &o->warmup);
    case OPT_SECONDS: return cofi_cli_seconds("--seconds", optarg, &o->seconds);
    case OPT_SHAPES: o->shapes = optarg; return true;
    case OPT_TINY: o->tiny = true; return true;
    case OPT_JSON: o->json = optarg; return true;
    case OPT_BASELINE: o->baseline = optarg; return true;
    case OPT_BAND:
        if (!cofi_cli_double("--band", optarg, 0, 1e6, &o->band))
            return false;
        o->band /= 100;
        return true;
    case OPT_FROM: o->from = optarg; return true;
    case OPT_MARKDOWN: o->markdown = true; return true;
    case OPT_LIST: o->list = true; return true;
    }
    return false;
}

static int check_options(struct cofi_bench_options *o)
{
    if (o->from && (o->measures || o->list || o->n_patterns))
        return cofi_cli_error("option --from = \"%s\": wanted no PATTERN, --list or option of "
                              "measuring (--ranks to --json) with it", o->from);
    if (o->markdown && !o->from)
        return cofi_cli_error("option --markdown: wanted --from FILE with it");
    if (o->band >= 0 && !o->baseline)
        return cofi_cli_error("option --band: wanted --baseline FILE with it");
    if (o->list && (o->json || o->baseline))
        return cofi_cli_error("option --list: wanted no %s with it, for it runs no case",
                              o->json ? "--json" : "--baseline");
    if (cofi_config_check(true) != COF_OK)
        return cofi_cli_error("%s", cof_last_error());
    if (o->engine == COF_ENGINE_DEFAULT && !o->from && !cofi_ranks_engine(o->cuda, &o->engine))
        return COFI_EXIT_USAGE;
    if (!o->pin)
        o->pin = strcmp(cofi_config_text(COFI_VAR_PIN), "no") ? COFI_BENCH_FIRST
                                                              : COFI_BENCH_SECOND;
    if (!o->staged)
        o->staged = cofi_config_int(COFI_VAR_FORCE_STAGED) ? COFI_BENCH_SECOND : COFI_BENCH_FIRST;
    o->n_processes = o->n_processes ? o->n_processes : o->tiny ? 1 : 5;
    o->repeat = o->repeat ? o->repeat : o->tiny ? 3 : 50;
    o->seconds = o->seconds >= 0 ? o->seconds : o->tiny ? 0 : 2;
    o->rate_seconds = o->tiny ? 0.005 : 0.1;
    return COFI_EXIT_OK;
}

/* ---- Progress ---- */

struct progress {
    int n_done, n_jobs;
    int64_t begin;
};

static void clear_progress(void)
{
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* Of the jobs done so far, the mean is taken for those to come. */
static void show_progress(const struct progress *p, const struct cofi_bench_variant *v)
{
    if (!isatty(STDERR_FILENO))
        return;
    double passed = (double)(cofi_now() - p->begin) * 1e-9;
    fprintf(stderr, "\r%d/%d", p->n_done + 1, p->n_jobs);
    if (p->n_done > 0)
        fprintf(stderr, ", about %.0f s left", passed / p->n_done * (p->n_jobs - p->n_done));
    fprintf(stderr, ": %.50s ranks=%d\033[K", v->line, v->n_ranks);
}

/* ---- Jobs ---- */

/* 3 outweighs 2, which outweighs 4. */
static int worse(int a, int b)
{
    static const int weight[] = {[COFI_EXIT_OK] = 0, [COFI_EXIT_CHECK] = 1,
                                 [COFI_EXIT_USAGE] = 3, [COFI_EXIT_RANK] = 4,
                                 [COFI_EXIT_UNSUPPORTED] = 2};
    return weight[b] > weight[a] ? b : a;
}

/* The results of a variant, or why there are none. */
static bool keep(const struct cofi_bench_options *o, const struct cofi_bench_variant *v,
                 const struct cofi_bench_samples *s, struct cofi_bench_report *report)
{
    if (s->failed) {
        struct cofi_bench_failure *failure = cofi_bench_report_add_failure(report);
        if (!failure)
            return false;
        memcpy(failure->key, v->key, sizeof failure->key);
        memcpy(failure->text, s->failure, sizeof failure->text);
        printf("FAIL %s: %s\n", v->key, s->failure);
        return true;
    }
    for (int d = 0; d < v->size.n_directions; d++) {
        struct cofi_bench_result *result = cofi_bench_report_add(report);
        if (!result)
            return false;
        cofi_bench_result_make(v, o, d, s, result);
    }
    return true;
}

/* One case: each of its variants in turn, as often as asked; a variant that failed is left out
 * from then on. */
static int run_case(const struct cofi_bench_options *o, const struct cofi_bench_variant *variants,
                    int n, struct progress *progress, struct cofi_bench_report *report)
{
    int code = COFI_EXIT_OK, first = report->n_results;
    struct cofi_bench_samples *samples = calloc((size_t)n, sizeof *samples);
    if (!samples) {
        cofi_cli_error("out of memory");
        return COFI_EXIT_RANK;
    }
    for (int64_t round = 0; round < o->n_processes; round++)
        for (int i = 0; i < n; i++, progress->n_done++) {
            if (samples[i].failed)
                continue;
            show_progress(progress, &variants[i]);
            code = worse(code, cofi_bench_job_run(o, &variants[i], &samples[i]));
        }
    clear_progress();
    for (int i = 0; i < n; i++) {
        if (!keep(o, &variants[i], &samples[i], report))
            code = COFI_EXIT_RANK;
        cofi_bench_samples_free(&samples[i]);
    }
    free(samples);
    cofi_bench_table_print(report, first);
    if (o->json && !cofi_bench_json_write(report, o->json))
        code = worse(code, COFI_EXIT_USAGE);
    return code;
}

static int measure(const struct cofi_bench_options *o, const struct cofi_bench_list *list,
                   struct cofi_bench_report *report)
{
    struct progress progress = {.n_jobs = list->n * (int)o->n_processes, .begin = cofi_now()};
    int code = COFI_EXIT_OK;
    if (o->json && !cofi_bench_json_write(report, o->json)) /* now, not after an hour */
        return COFI_EXIT_USAGE;
    for (int at = 0; at < list->n;) {
        int n = cofi_bench_list_case(list, at);
        code = worse(code, run_case(o, &list->variants[at], n, &progress, report));
        at += n;
    }
    return code;
}

/* ---- The command ---- */

static void begin_report(const struct cofi_bench_options *o, int argc, char **argv,
                         struct cofi_bench_report *report)
{
    cofi_cli_run_read(argc, argv, &report->run);
    snprintf(report->device, sizeof report->device, "%s", o->cuda ? "cuda" : "cpu");
    report->n_processes = o->n_processes;
    report->repeat = o->repeat;
    report->warmup = o->warmup;
    report->n_threads = o->n_threads;
    report->seconds = o->seconds;
}

static int bench(const struct cofi_bench_options *o, int argc, char **argv,
                 struct cofi_bench_report *report)
{
    struct cofi_bench_list list;
    begin_report(o, argc, argv, report);
    cofi_bench_machine_read(o->cuda, &report->machine);
    int code = cofi_bench_list_make(o, (size_t)report->machine.cache_bytes, &list);
    if (code == COFI_EXIT_OK && list.n == 0)
        code = cofi_cli_error("no variant matches \"%s\" (--list prints them)",
                              o->n_patterns ? o->patterns[0] : "");
    for (int i = 0; i < list.n && o->list && code == COFI_EXIT_OK; i++)
        puts(list.variants[i].key);
    if (code == COFI_EXIT_OK && !o->list)
        code = measure(o, &list, report);
    free(list.variants);
    return code;
}

static int check_devices(void)
{
    struct cofi_devices devices;
    cofi_devices_read(false, &devices);
    if (devices.n > 0)
        return COFI_EXIT_OK;
    cofi_cli_error("option --device = \"cuda\": %s", devices.trouble);
    return COFI_EXIT_UNSUPPORTED;
}

static int run_command(const struct cofi_bench_options *o, int argc, char **argv)
{
    struct cofi_bench_report report = {0}, baseline = {0};
    int code = o->cuda && !o->list && !o->from ? check_devices() : COFI_EXIT_OK;
    if (code != COFI_EXIT_OK)
        return code;
    if (o->baseline && !cofi_bench_json_read(o->baseline, &baseline))
        return COFI_EXIT_USAGE;
    if (!o->from)
        code = bench(o, argc, argv, &report);
    else if (!cofi_bench_json_read(o->from, &report))
        code = COFI_EXIT_USAGE;
    else if (o->markdown)
        cofi_bench_table_markdown(&report);
    else
        cofi_bench_table_print(&report, 0);
    if (o->baseline && !o->list && report.n_results > 0) {
        printf("\n");
        code = worse(code, cofi_bench_compare(&report, &baseline, o->band));
    }
    cofi_bench_report_free(&report);
    cofi_bench_report_free(&baseline);
    return code;
}

int cofi_cmd_bench(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return cofi_bench_rank_main();
    struct cofi_bench_options o = {
        .ranks = {3, {1, 2, 4}}, .warmup = 1, .seconds = -1, .band = -1,
        .cache = COFI_BENCH_FIRST};
    for (int c; (c = cofi_cli_next(argc, argv, "h", long_options)) != -1;) {
        if (c == 'h') {
            fputs(usage, stdout);
            return COFI_EXIT_OK;
        }
        if (c == '?' || !parse_option(&o, c))
            return COFI_EXIT_USAGE;
        o.measures |= c <= OPT_JSON;
    }
    o.n_patterns = argc - optind;
    o.patterns = argv + optind;
    int code = check_options(&o);
    return code == COFI_EXIT_OK ? run_command(&o, argc, argv) : code;
}
