/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/attention/attention_tool_table.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void cofi_attention_row_take(struct cofi_attention_row *row, struct cofi_attention_run *run)
{
    *row = (struct cofi_attention_row){.n_ranks = run->head.n_ranks,
                                       .seconds = {INFINITY, INFINITY}};
    for (int i = 0; i < run->head.repeat; i++) {
        for (int way = 0; way < 1 + run->backward; way++) {
            double slowest = 0;
            for (int rank = 0; rank < run->head.n_ranks; rank++)
                slowest = fmax(slowest, cofi_attention_run_times(run, rank)[2 * i + way]);
            row->seconds[way] = fmin(row->seconds[way], slowest);
        }
    }
    for (int i = 0; i < COFI_AT_RATE_WINDOWS; i++) {
        double sum = 0;
        for (int rank = 0; rank < run->head.n_ranks; rank++)
            sum += run->rate[rank][i];
        row->tile_rate = fmax(row->tile_rate, sum);
    }
    snprintf(row->describe, sizeof row->describe, "%s", run->head.describe);
}

/* Keys to one side of their queries, at most so many each; -1: no limit. */
static double pairs_beside(double rows, int64_t limit)
{
    double most = limit < 0 || (double)limit > rows - 1 ? rows - 1 : (double)limit;
    return most * (most + 1) / 2 + (rows - 1 - most) * most;
}

/* Flops of forward (1) or backward (2.5) by the area of the mask. */
double cofi_attention_flops(const cof_attention_params *p, bool backward)
{
    double rows = (double)p->n_rows, dim = (double)(p->head_dim_qk + p->head_dim_v) / 2;
    int64_t left = p->has_window ? p->window_left : -1;
    int64_t right = p->mask == COF_MASK_CAUSAL ? 0 : p->has_window ? p->window_right : -1;
    double pairs = rows > 0 ? rows + pairs_beside(rows, left) + pairs_beside(rows, right) : 0;
    return (backward ? 10 : 4) * (double)p->n_batch * (double)p->n_heads * dim * pairs;
}

static void print_heading(const struct cofi_attention_run *run,
                          const struct cofi_attention_row *rows, int n_rows)
{
    const cof_attention_params *p = &run->params;
    const char *format = p->format == COF_FORMAT_BSHD ? "bshd" : "sbhd";
    printf("attention %s B=%lld S=%lld H=%lld Hkv=%lld Dqk=%lld Dv=%lld %s mask=%s",
           cof_dtype_name(p->dtype), (long long)p->n_batch, (long long)p->n_rows,
           (long long)p->n_heads, (long long)p->n_kv_heads, (long long)p->head_dim_qk,
           (long long)p->head_dim_v, format, p->mask == COF_MASK_CAUSAL ? "causal" : "none");
    if (p->has_window)
        printf(" window=%lld:%lld", (long long)p->window_left, (long long)p->window_right);
    printf(" scale=%.6g layout=%s engine=%s\n", cofi_attention_scale(p),
           p->layout == COF_LAYOUT_ZIGZAG ? "zigzag" : "contiguous",
           run->head.engine == COF_ENGINE_CUDA     ? "cuda"
           : run->head.engine == COF_ENGINE_THREAD ? "thread"
                                              : "shm");
    if (n_rows == 1) /* several differ in the rank count alone */
        printf("plan %s\n", rows[0].describe);
    printf("\n");
}

/* "123.4 (56%)": GFLOP/s, and the fraction of the tile products' rate. */
static void print_rate(double flops, double seconds, double tile_rate)
{
    char text[40];
    snprintf(text, sizeof text, "%.1f (%.0f%%)", flops / seconds * 1e-9,
             tile_rate > 0 ? 100 * flops / seconds / tile_rate : 0);
    printf("  %16s", text);
}

static void print_row(const struct cofi_attention_options *options,
                      const struct cofi_attention_run *run, const struct cofi_attention_row *row)
{
    printf("%5d  %10.3f", row->n_ranks, row->seconds[0] * 1e3);
    if (run->backward)
        printf("  %11.3f", row->seconds[1] * 1e3);
    if (options->time) {
        printf("  %13.1f", row->tile_rate * 1e-9);
        for (int way = 0; way < 1 + run->backward; way++)
            print_rate(cofi_attention_flops(&run->params, way), row->seconds[way], row->tile_rate);
    }
    for (int i = COFI_AT_O; i < COFI_AT_N && options->run.compare; i++)
        if (row->verdicts[i].has)
            printf("  %8.2e %4s", row->verdicts[i].rel_rmse,
                   row->verdicts[i].passed ? "ok" : "FAIL");
    printf("\n");
}

void cofi_attention_table_print(const struct cofi_attention_options *options,
                                const struct cofi_attention_run *run,
                                const struct cofi_attention_row *rows, int n_rows)
{
    print_heading(run, rows, n_rows);
    printf("ranks  forward ms");
    if (run->backward)
        printf("  backward ms");
    if (options->time)
        printf("  tiles GFLOP/s   forward GFLOP/s%s", run->backward ? "  backward GFLOP/s" : "");
    for (int i = COFI_AT_O; i < COFI_AT_N && options->run.compare; i++)
        if (rows[0].verdicts[i].has)
            printf("  %-4s rel-RMSE", cofi_attention_tensor_names[i]);
    printf("\n");
    for (int i = 0; i < n_rows; i++)
        print_row(options, run, &rows[i]);
    fflush(stdout);
    for (int i = 0; i < n_rows; i++)
        for (int k = COFI_AT_O; k < COFI_AT_N; k++)
            if (rows[i].verdicts[k].has && !rows[i].verdicts[k].passed)
                cofi_cli_error("%d ranks, error over its bound:%s", rows[i].n_ranks,
                               rows[i].verdicts[k].text);
}
