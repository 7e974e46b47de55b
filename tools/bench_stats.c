/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_harness.h"

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double cofi_bench_quantile(const double *sorted, int64_t n, double q)
{
    if (n == 0)
        return 0;
    if (q == 0.5)
        return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
    int64_t rank = (int64_t)ceil(q * (double)n - 1e-9); /* 0.9 * 10 is 9, whatever it rounds to */
    return sorted[rank < 1 ? 0 : rank > n ? n - 1 : rank - 1];
}

/* Sorts. */
static double median(double *values, int64_t n)
{
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return cofi_bench_quantile(values, n, 0.5);
}

/* Medians of the jobs, and of the rates beside them: that of a job is the mean of the windows
 * before and after the direction. */
static void take_jobs(const struct cofi_bench_samples *s, int direction,
                      struct cofi_bench_result *r)
{
    double rates[COFI_BENCH_MAX_PROCESSES], parts[COFI_BENCH_MAX_PROCESSES];
    double *calls = s->calls[direction], least = INFINITY, most = 0;
    for (int p = 0; p < s->n_processes; p++) {
        double m = median(calls, s->n_calls[p][direction]);
        calls += s->n_calls[p][direction];
        r->job_median[p] = m;
        least = fmin(least, m);
        most = fmax(most, m);
        rates[p] = (s->rate[p][direction] + s->rate[p][direction + 1]) / 2;
        parts[p] = rates[p] > 0 && m > 0 ? r->flops / m / rates[p] : 0;
    }
    r->spread = most - least; /* relative once the median is known */
    r->rate = median(rates, s->n_processes);
    r->efficiency = median(parts, s->n_processes);
}

void cofi_bench_result_make(const struct cofi_bench_variant *v,
                            const struct cofi_bench_options *options, int direction,
                            const struct cofi_bench_samples *s,
                            struct cofi_bench_result *r)
{
    const char *name = v->op->bench->directions[direction];
    double first[COFI_BENCH_MAX_PROCESSES], later[COFI_BENCH_MAX_PROCESSES];
    *r = (struct cofi_bench_result){
        .ranks = v->n_ranks, .threads = s->threads, .n_sets = v->n_sets,
        .n_processes = s->n_processes, .n_calls = s->n[direction], .pinned = s->pinned,
        .staged = v->staged, .set_bytes = (double)v->size.set_bytes,
        .flops = v->size.flops[direction], .wire_bytes = v->size.wire_bytes[direction],
        .devices = s->devices, .flows = v->size.n_flows};
    snprintf(r->key, sizeof r->key, "%s call=%s", v->key, name);
    memcpy(r->line, v->line, sizeof r->line);
    memcpy(r->describe, s->describe, sizeof r->describe);
    snprintf(r->direction, sizeof r->direction, "%s", name);
    snprintf(r->engine, sizeof r->engine, "%s", cofi_bench_engine_name(options));
    snprintf(r->cache, sizeof r->cache, "%s", v->cold ? "cold" : "warm");
    take_jobs(s, direction, r);
    memcpy(first, s->plan_first, sizeof first);
    memcpy(later, s->plan_later, sizeof later);
    r->plan_first = median(first, s->n_processes);
    r->plan_later = median(later, s->n_processes);
    double *calls = s->calls[direction];
    r->median = median(calls, r->n_calls);
    r->p90 = cofi_bench_quantile(calls, r->n_calls, 0.9);
    r->p99 = cofi_bench_quantile(calls, r->n_calls, 0.99);
    r->min = calls[0];
    r->spread = r->median > 0 ? r->spread / r->median : 0;
}
