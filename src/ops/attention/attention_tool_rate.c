/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The rate that attention on the CPU is measured against: the two products of its tiles, with
 * operands that lie between those of other heads, on the same threads, all ranks at a time.
 *
 *     S[128, 512] = Q[128, Dqk] K[512, Dqk]^T         O[128, Dv] = P[128, 512] V[512, Dv] */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu_stream.h"
#include "core/clock.h"
#include "core/error.h"
#include "ops/attention/attention_tool.h"
#include "symm/symm.h"

enum { TILE_M = 128, TILE_N = 512 };
static const double window_seconds = 0.1;

struct rate_work {
    const cof_attention_params *params;
    enum cofi_gemm_type type;
    int64_t elem_bytes;
    char *q, *k, *v; /* [rows, heads, dim] */
    int64_t until;
    _Atomic int64_t n_pairs; /* pairs of products done */
    _Atomic int status;
};

/* 1 + i % 8 eighths: no denormals, no zeros. */
static void fill(void *dst, enum cofi_gemm_type type, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = 1 + (float)(i % 8) / 8;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (type == COFI_GEMM_F32)
            ((float *)dst)[i] = x;
        else
            ((uint16_t *)dst)[i] = (uint16_t)(bits >> 16);
    }
}

static void run_products(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    struct rate_work *work = arg;
    const cof_attention_params *p = work->params;
    int64_t head = task % p->n_heads, kv_head = head / (p->n_heads / p->n_kv_heads);
    int64_t dqk = p->head_dim_qk, dv = p->head_dim_v;
    const char *q = work->q + head * dqk * work->elem_bytes;
    const char *k = work->k + kv_head * dqk * work->elem_bytes;
    const char *v = work->v + kv_head * dv * work->elem_bytes;
    float *scores = worker->scratch, *acc = scores + TILE_M * TILE_N;
    void *probabilities = acc + (int64_t)TILE_M * dv;
    fill(probabilities, work->type, TILE_M * TILE_N);
    cof_status status = COF_OK;
    int64_t n = 0;
    for (; status == COF_OK && cofi_now() < work->until; n++) {
        status = cofi_gemm_run(worker->gemm, COFI_GEMM_NT, work->type, TILE_M, TILE_N, dqk, q,
                               p->n_heads * dqk, k, p->n_kv_heads * dqk, false, scores, TILE_N);
        if (status == COF_OK)
            status = cofi_gemm_run(worker->gemm, COFI_GEMM_NN, work->type, TILE_M, dv, TILE_N,
                                   probabilities, TILE_N, v, p->n_kv_heads * dv, false, acc, dv);
    }
    atomic_fetch_add(&work->n_pairs, n);
    if (status != COF_OK)
        atomic_store(&work->status, status);
}

static cof_status run_window(struct cofi_cpu_stream *stream, const void *args)
{
    struct rate_work *work = *(struct rate_work *const *)args;
    cofi_cpu_parallel(stream, cofi_cpu_stream_threads(stream), run_products, work);
    return COF_OK;
}

/* One window; the ranks begin it together, or none does. */
static cof_status measure(cof_world *world, struct rate_work *work, cof_status own,
                          int64_t window_ns, double *rate_out)
{
    const cof_attention_params *p = work->params;
    double flops = 2.0 * TILE_M * TILE_N * (double)(p->head_dim_qk + p->head_dim_v);
    COF_TRY(cofi_team_agree(world->team, "tile products", own));
    int64_t begin = cofi_now();
    work->until = begin + window_ns;
    COF_TRY(cofi_cpu_enqueue(world->stream, run_window, &work, sizeof work, 0));
    COF_TRY(cofi_cpu_stream_sync_and_clear(world->stream));
    *rate_out = (double)atomic_load(&work->n_pairs) * flops /
                ((double)(cofi_now() - begin) * 1e-9);
    return (cof_status)atomic_load(&work->status);
}

cof_status cofi_attention_tile_rate(cof_world *world, const cof_attention_params *p,
                                    double seconds, double *rate_out)
{
    bool native = p->dtype.code == COF_DTYPE_CODE_BFLOAT && cofi_gemm_has(COFI_GEMM_BF16);
    struct rate_work work = {.params = p,
                             .type = native ? COFI_GEMM_BF16 : COFI_GEMM_F32,
                             .elem_bytes = native ? 2 : 4};
    int64_t n_q = TILE_M * p->n_heads * p->head_dim_qk;
    int64_t n_k = TILE_N * p->n_kv_heads * p->head_dim_qk;
    int64_t n_v = TILE_N * p->n_kv_heads * p->head_dim_v;
    char *memory = malloc((size_t)((n_q + n_k + n_v) * work.elem_bytes));
    cof_status status = memory ? COF_OK
                               : COF_FAIL(COF_ERR_NOMEM, "operands of the tile products");
    if (memory)
        fill(memory, work.type, n_q + n_k + n_v);
    work.q = memory;
    work.k = memory ? memory + n_q * work.elem_bytes : NULL;
    work.v = memory ? work.k + n_k * work.elem_bytes : NULL;
    status = measure(world, &work, status, (int64_t)(seconds * 1e9), rate_out);
    free(memory);
    return status;
}

cof_status cofi_attention_measure_rate(struct cofi_attention_run *run, cof_world *world)
{
    for (int i = 0; i < COFI_AT_RATE_WINDOWS; i++)
        COF_TRY(cofi_attention_tile_rate(world, &run->params, window_seconds,
                                         &run->rate[world->rank][i]));
    return COF_OK;
}
