/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/bench_gemm.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu_stream.h"
#include "core/clock.h"
#include "core/error.h"
#include "symm/symm.h"

struct work {
    const struct cofi_bench_product *product;
    enum cofi_gemm_type type;
    const char *a, *b;
    int64_t until;
    _Atomic int64_t n_done;
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
    struct work *w = arg;
    const struct cofi_bench_product *p = w->product;
    cof_status status = COF_OK;
    int64_t n = 0;
    (void)task;
    for (; status == COF_OK && cofi_now() < w->until; n++)
        status = cofi_gemm_run(worker->gemm, p->form, w->type, p->m, p->n, p->k, w->a,
                               p->form == COFI_GEMM_TN ? p->m : p->k, w->b,
                               p->form == COFI_GEMM_NT ? p->k : p->n, false, worker->scratch, p->n);
    atomic_fetch_add(&w->n_done, n);
    if (status != COF_OK)
        atomic_store(&w->status, status);
}

static cof_status run_window(struct cofi_cpu_stream *stream, const void *args)
{
    struct work *w = *(struct work *const *)args;
    cofi_cpu_parallel(stream, cofi_cpu_stream_threads(stream), run_products, w);
    return COF_OK;
}

/* One product for some time; the ranks begin it together, or none does. */
static cof_status measure(cof_world *world, struct work *w, int64_t window_ns, double *rate_out)
{
    const struct cofi_bench_product *p = w->product;
    int64_t element = w->type == COFI_GEMM_F32 ? 4 : 2, n_a = p->m * p->k, n_b = p->n * p->k;
    char *memory = malloc((size_t)((n_a + n_b) * element));
    cof_status status = memory ? COF_OK : COF_FAIL(COF_ERR_NOMEM, "operands of the products");
    if (memory)
        fill(memory, w->type, n_a + n_b);
    w->a = memory;
    w->b = memory ? memory + n_a * element : NULL;
    status = cofi_team_agree(world->team, "tile products", status);
    int64_t begin = cofi_now();
    w->until = begin + window_ns;
    if (status == COF_OK)
        status = cofi_cpu_enqueue(world->stream, run_window, &w, sizeof w, 0);
    if (status == COF_OK)
        status = cofi_cpu_stream_sync_and_clear(world->stream);
    free(memory);
    *rate_out = (double)atomic_load(&w->n_done) * 2 * (double)(p->m * p->n * p->k) /
                ((double)(cofi_now() - begin) * 1e-9);
    return status != COF_OK ? status : (cof_status)atomic_load(&w->status);
}

cof_status cofi_bench_gemm_rate(cof_world *world, cof_dtype dtype,
                                const struct cofi_bench_product *products, int n_products,
                                double seconds, double *rate_out)
{
    bool native = dtype.code == COF_DTYPE_CODE_BFLOAT && cofi_gemm_has(COFI_GEMM_BF16);
    double time = 0, all = 0; /* of so many operations; of all of them */
    for (int i = 0; i < n_products; i++)
        all += products[i].weight;
    for (int i = 0; i < n_products; i++) {
        struct work w = {.product = &products[i], .type = native ? COFI_GEMM_BF16 : COFI_GEMM_F32};
        double rate;
        COF_TRY(measure(world, &w, (int64_t)(seconds * 1e9 / n_products), &rate));
        time += products[i].weight / rate;
    }
    *rate_out = all / time;
    return COF_OK;
}
