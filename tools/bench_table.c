/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Results as a table: on a terminal, and in Markdown for docs/performance.md. */
#include <stdio.h>
#include <string.h>

#include "bench_harness.h"

/* "123.4", or "-" where there is nothing to tell. */
static const char *number(char text[24], const char *format, double value, bool has)
{
    if (!has)
        return "-";
    switch (format[0]) {
    case '%': snprintf(text, 24, "%.0f%%", value); break;
    case '2': snprintf(text, 24, "%.2f", value); break;
    default: snprintf(text, 24, "%.1f", value);
    }
    return text;
}

/* Calls of microseconds, with a table of their own: of the runtime, and those on devices that
 * mostly move data. */
static bool is_short(const struct cofi_bench_result *r)
{
    return !strncmp(r->line, "runtime ", 8) || (r->devices > 0 && r->flops == 0);
}

struct row {
    char median[24], rate[24], efficiency[24], of_one[24];
    const char *shown_rate, *shown_efficiency, *shown_of_one;
};

static void make_row(const struct cofi_bench_report *report, const struct cofi_bench_result *r,
                     struct row *row)
{
    const struct cofi_bench_result *one = cofi_bench_one_rank(report, r);
    row->shown_rate = number(row->rate, "1", r->flops / r->median * 1e-9, r->flops > 0);
    if (r->flops == 0 && r->wire_bytes > 0) { /* a call that only moves data */
        snprintf(row->rate, sizeof row->rate, "%.2f GB/s", r->wire_bytes / r->median * 1e-9);
        row->shown_rate = row->rate;
    }
    row->shown_efficiency =
        number(row->efficiency, "%", 100 * r->efficiency, r->efficiency > 0);
    row->shown_of_one = number(row->of_one, "2", one ? one->median / r->median : 0,
                               one && r->ranks > 1);
}

static bool begins_case(const struct cofi_bench_report *report, int idx)
{
    return idx == 0 || strcmp(report->results[idx].line, report->results[idx - 1].line);
}

/* What one sender has of the link; "-" where nothing moves. */
static const char *flow_rate(char text[24], const struct cofi_bench_result *r)
{
    return number(text, "1", r->wire_bytes / r->median * 1e-9 / (r->flows ? r->flows : 1),
                  r->wire_bytes > 0);
}

static const char *device_count(char text[24], const struct cofi_bench_result *r)
{
    snprintf(text, 24, "%d", r->devices);
    return r->devices ? text : "-";
}

static void print_short(const struct cofi_bench_report *report, int idx)
{
    const struct cofi_bench_result *r = &report->results[idx];
    char rate[24], devices[24];
    if (begins_case(report, idx))
        printf("%s%s\n"
               "ranks devices  staged  call      median us     p90 us     p99 us     min us  spread"
               "  GB/s each\n", idx ? "\n" : "", r->line);
    printf("%5d %7s  %-6s  %-7s  %10.2f %10.2f %10.2f %10.2f  %5.1f%% %10s\n", r->ranks,
           device_count(devices, r), r->staged ? "yes" : "no", r->direction, r->median * 1e6,
           r->p90 * 1e6, r->p99 * 1e6, r->min * 1e6, 100 * r->spread, flow_rate(rate, r));
}

static void print_row(const struct cofi_bench_report *report, const struct cofi_bench_result *r)
{
    struct row row;
    make_row(report, r, &row);
    printf("%5d %7d  %-4s %-5s %-6s  %-9s %10.3f %10.3f %10.3f %10.3f %6.1f%% %9s %6s %9s "
           "%7.2f %7.2f\n",
           r->ranks, r->threads, r->pinned ? "yes" : "no", r->cache, r->staged ? "yes" : "no",
           r->direction, r->median * 1e3, r->p90 * 1e3, r->p99 * 1e3, r->min * 1e3,
           100 * r->spread, row.shown_rate, row.shown_efficiency, row.shown_of_one,
           r->plan_first * 1e3, r->plan_later * 1e3);
}

void cofi_bench_table_print(const struct cofi_bench_report *report, int first)
{
    for (int i = first; i < report->n_results; i++) {
        if (is_short(&report->results[i])) {
            print_short(report, i);
            continue;
        }
        if (begins_case(report, i))
            printf("%s%s\n"
                   "ranks threads  pin  cache staged  call       median ms     p90 ms     p99 ms"
                   "     min ms  spread   GFLOP/s  yard. of 1 rank  plan ms   later\n",
                   i ? "\n" : "", report->results[i].line);
        print_row(report, &report->results[i]);
    }
    fflush(stdout);
}

/* A text in a cell: '|' would end it. */
static void print_cell(const char *text)
{
    for (; *text; text++)
        printf("%s%c", *text == '|' ? "\\" : "", *text);
}

static void print_markdown_row(const struct cofi_bench_report *report, int idx)
{
    const struct cofi_bench_result *r = &report->results[idx];
    struct row row;
    make_row(report, r, &row);
    printf("| ");
    print_cell(begins_case(report, idx) ? r->line : "");
    printf(" | %s | %d x %d | %s | %s | %s | %.3f | %.3f | %.1f%% | %s | %s | %s | %.2f, %.2f |\n",
           r->direction, r->ranks, r->threads, r->pinned ? "yes" : "no", r->cache,
           r->staged ? "yes" : "no", r->median * 1e3, r->p90 * 1e3, 100 * r->spread,
           row.shown_rate, row.shown_efficiency, row.shown_of_one, r->plan_first * 1e3,
           r->plan_later * 1e3);
}

static void print_markdown_machine(const struct cofi_bench_report *report)
{
    const struct cofi_bench_machine *m = &report->machine;
    if (m->gpus)
        printf("%d x %s, driver of CUDA %s, runtime %s;\n", m->gpus, m->gpu, m->gpu_driver,
               m->gpu_runtime);
    printf("%s, %d cores, %s;\nproducts by %s; cofuse %s, %.10s; starts of each variant: %lld.\n",
           m->cpu, m->cores, m->isa, m->gemm, report->run.version, report->run.date,
           (long long)report->n_processes);
}

static void print_markdown_operators(const struct cofi_bench_report *report)
{
    printf("\n| case | call | ranks x threads | pinned | cache | staged | median ms | p90 ms "
           "| spread | GFLOP/s | of yardstick | of 1 rank | plan ms |\n"
           "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; i < report->n_results; i++)
        if (!is_short(&report->results[i]))
            print_markdown_row(report, i);
}

static void print_markdown_short(const struct cofi_bench_report *report)
{
    printf("\n| case | call | engine | ranks | devices | staged | median us | p90 us | min us "
           "| spread | GB/s each |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; i < report->n_results; i++) {
        const struct cofi_bench_result *r = &report->results[i];
        char rate[24], devices[24];
        if (!is_short(r))
            continue;
        printf("| %s | %s | %s | %d | %s | %s | %.2f | %.2f | %.2f | %.1f%% | %s |\n",
               begins_case(report, i) ? r->line : "", r->direction, r->engine, r->ranks,
               device_count(devices, r), r->staged ? "yes" : "no", r->median * 1e6, r->p90 * 1e6,
               r->min * 1e6, 100 * r->spread, flow_rate(rate, r));
    }
}

void cofi_bench_table_markdown(const struct cofi_bench_report *report)
{
    int n_short = 0;
    for (int i = 0; i < report->n_results; i++)
        n_short += is_short(&report->results[i]);
    print_markdown_machine(report);
    if (n_short < report->n_results)
        print_markdown_operators(report);
    if (n_short > 0)
        print_markdown_short(report);
    for (int i = 0; i < report->n_failures; i++) {
        printf("| ");
        print_cell(report->failures[i].key);
        printf(" | not measured: ");
        print_cell(report->failures[i].text);
        printf(" |\n");
    }
}
