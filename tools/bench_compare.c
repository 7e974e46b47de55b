/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A report, and one held against an earlier one. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_harness.h"
#include "job.h"

static const double least_band = 0.05;

/* ---- The report's lists ---- */

static void *grow(void *list, int n, size_t bytes)
{
    void *grown = realloc(list, ((size_t)n + 1) * bytes);
    if (!grown)
        cofi_cli_error("out of memory");
    return grown;
}

struct cofi_bench_result *cofi_bench_report_add(struct cofi_bench_report *report)
{
    struct cofi_bench_result *grown =
        grow(report->results, report->n_results, sizeof *report->results);
    if (!grown)
        return NULL;
    report->results = grown;
    return memset(&grown[report->n_results++], 0, sizeof *grown);
}

struct cofi_bench_failure *cofi_bench_report_add_failure(struct cofi_bench_report *report)
{
    struct cofi_bench_failure *grown =
        grow(report->failures, report->n_failures, sizeof *report->failures);
    if (!grown)
        return NULL;
    report->failures = grown;
    return memset(&grown[report->n_failures++], 0, sizeof *grown);
}

void cofi_bench_report_free(struct cofi_bench_report *report)
{
    free(report->results);
    free(report->failures);
    *report = (struct cofi_bench_report){0};
}

const struct cofi_bench_result *cofi_bench_one_rank(const struct cofi_bench_report *report,
                                                    const struct cofi_bench_result *result)
{
    for (int i = 0; i < report->n_results; i++) {
        const struct cofi_bench_result *r = &report->results[i];
        if (r->ranks == 1 && !strcmp(r->line, result->line) && !strcmp(r->cache, result->cache) &&
            !strcmp(r->direction, result->direction) && !strcmp(r->engine, result->engine) &&
            !strstr(r->key, " pin=no") == !strstr(result->key, " pin=no"))
            return r;
    }
    return NULL;
}

/* ---- Against a baseline ---- */

static const struct cofi_bench_result *find(const struct cofi_bench_report *report, const char *key)
{
    for (int i = 0; i < report->n_results; i++)
        if (!strcmp(report->results[i].key, key))
            return &report->results[i];
    return NULL;
}

static void say_differs(const char *what, const char *ours, const char *baseline)
{
    if (strcmp(ours, baseline))
        printf("another machine: %s is \"%s\", in the baseline \"%s\"\n", what, ours, baseline);
}

static void compare_machines(const struct cofi_bench_machine *ours,
                             const struct cofi_bench_machine *baseline)
{
    char a[24], b[24];
    say_differs("cpu", ours->cpu, baseline->cpu);
    snprintf(a, sizeof a, "%d", ours->cores);
    snprintf(b, sizeof b, "%d", baseline->cores);
    say_differs("cores", a, b);
    say_differs("isa", ours->isa, baseline->isa);
    say_differs("gemm", ours->gemm, baseline->gemm);
    say_differs("kernel", ours->kernel, baseline->kernel);
    say_differs("gpu", ours->gpu, baseline->gpu);
    say_differs("gpu_driver", ours->gpu_driver, baseline->gpu_driver);
}

/* A single job tells nothing of the spread between jobs; how far its median lies above its fastest
 * call has to do. */
static double spread(const struct cofi_bench_result *r)
{
    return r->n_processes > 1 ? r->spread : (r->median - r->min) / r->median;
}

/* Whether it is slower beyond the band; prints it then, and what is faster by as much. */
static bool is_slower(const struct cofi_bench_result *ours, const struct cofi_bench_result *old,
                      double band)
{
    double allowed = band >= 0 ? band : fmax(least_band, 3 * fmax(spread(ours), spread(old)));
    double ratio = ours->median / old->median;
    bool slower = ratio > 1 + allowed, faster = ratio * (1 + allowed) < 1;
    if (slower || faster)
        printf("%s %s: median %.4g ms, in the baseline %.4g ms: %+.1f %%, band %.1f %%\n",
               slower ? "SLOWER" : "faster", ours->key, ours->median * 1e3, old->median * 1e3,
               100 * (ratio - 1), 100 * allowed);
    return slower;
}

int cofi_bench_compare(const struct cofi_bench_report *report,
                       const struct cofi_bench_report *baseline, double band)
{
    int n_shared = 0, n_slower = 0;
    compare_machines(&report->machine, &baseline->machine);
    for (int i = 0; i < report->n_results; i++) {
        const struct cofi_bench_result *ours = &report->results[i];
        const struct cofi_bench_result *old = find(baseline, ours->key);
        n_shared += old != NULL;
        if (!old)
            printf("new, not in the baseline: %s\n", ours->key);
        else
            n_slower += is_slower(ours, old, band);
    }
    for (int i = 0; i < baseline->n_results; i++)
        if (!find(report, baseline->results[i].key))
            printf("missing, in the baseline only: %s\n", baseline->results[i].key);
    if (n_shared == 0)
        return cofi_cli_error("the baseline has none of the results");
    printf("%d compared, %d slower\n", n_shared, n_slower);
    return n_slower ? COFI_EXIT_CHECK : COFI_EXIT_OK;
}
