/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Tensors of a case: every element of the owner's rows has the bits of the reference, and the
 * reference is near the sum in fp64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/hash.h"
#include "core/tensor.h"
#include "ops/grad_return/grad_return_check_run.h"
#include "ops/grad_return/grad_return_ref.h"
#include "tools/cli.h"

/* ---- values --------------------------------------------------------------------------------- */

struct source {
    const struct cofi_gr_check *run;
    int call, is_v;
};

/* By index alone, so that any rank can tell what another has. */
static double value(const void *ctx, int writer, int64_t row, int64_t at)
{
    const struct source *s = ctx;
    const struct cofi_gr_check *run = s->run;
    int64_t n = run->c.params.n_batch * run->c.params.n_heads * run->dim[s->is_v];
    uint64_t tensor = (uint64_t)(100 + 1000 * writer + 10 * s->call + s->is_v);
    uint64_t idx = (uint64_t)(row * n + at);
    uint64_t bits = cofi_check_random(run->seed, tensor, idx);
    float x = run->c.integers ? (float)(int)(bits % 9) - 4 : (float)(int64_t)bits * 0x1p-63f;
    return cofi_check_rounded(x, run->partial);
}

/* ---- tensors -------------------------------------------------------------------------------- */

static uint64_t hash_of(const struct cofi_check_memory *memory)
{
    return cofi_hash(COFI_HASH_SEED, memory->host, memory->bytes);
}

static cof_status make_tensor(const struct cofi_gr_check *run, int is_v, int64_t rows,
                              cof_dtype dtype, struct cofi_gr_check_tensor *t)
{
    const cof_grad_return_params *p = &run->c.params;
    int64_t gap = run->c.padded_strides ? 1 : 0;
    int64_t shape[4] = {rows, p->n_batch, p->n_heads, run->dim[is_v]};
    int64_t strides[4] = {0, 0, shape[3] + 3 * gap, 1};
    strides[1] = shape[2] * strides[2] + 5 * gap;
    strides[0] = shape[1] * strides[1] + 7 * gap;
    memcpy(t->shape, shape, sizeof shape);
    memcpy(t->strides, strides, sizeof strides);
    t->view = (cof_tensor){.device = cofi_check_memory_device(run->job->world), .ndim = 4,
                           .dtype = dtype, .shape = t->shape, .strides = gap ? t->strides : NULL};
    COF_TRY(cofi_check_memory_open(run->job->world, (size_t)(rows * strides[0]) *
                                                        (size_t)cofi_dtype_bytes(dtype),
                                   &t->memory));
    t->view.data = t->memory.data;
    return COF_OK;
}

static int64_t place(const struct cofi_gr_check *run, const struct cofi_gr_check_tensor *t,
                     int is_v, int64_t row, int64_t at)
{
    int64_t d = run->dim[is_v], h = run->c.params.n_heads;
    return row * t->strides[0] + at / (h * d) * t->strides[1] + at / d % h * t->strides[2] + at % d;
}

/* The row of a partial's tensor holds which global row; -1: padding, which stays poison. */
static int64_t global_row(const struct cofi_gr_check *run, int section, int64_t row)
{
    int owner = (run->job->rank - section - 1 + 2 * run->job->n_ranks) % run->job->n_ranks;
    return run->c.params.by_section ? cof_layout_global_row(&run->layout, owner, row) : row;
}

static cof_status make_partial(struct cofi_gr_check *run, int call, int section, int is_v)
{
    struct cofi_gr_check_tensor *t = &run->call[call].section[section].in[is_v];
    struct source source = {run, call, is_v};
    int owner = (run->job->rank - section - 1 + 2 * run->job->n_ranks) % run->job->n_ranks;
    int64_t rows = run->c.params.by_section ? cof_layout_local_rows(&run->layout, owner)
                                            : run->c.params.n_rows;
    COF_TRY(make_tensor(run, is_v, rows, run->partial, t));
    int64_t n = run->c.params.n_batch * run->c.params.n_heads * run->dim[is_v];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0, global = global_row(run, section, row); at < n && global >= 0; at++)
            cofi_check_store(t->memory.host, run->partial, place(run, t, is_v, row, at),
                             (float)value(&source, run->job->rank, global, at));
    t->hash = hash_of(&t->memory);
    return cofi_check_memory_upload(&t->memory);
}

cof_status cofi_gr_check_make_call(struct cofi_gr_check *run, int call)
{
    struct cofi_gr_check_call *k = &run->call[call];
    size_t words = (size_t)cof_layout_chunks(&run->layout) *
                   (size_t)((run->job->n_ranks + 63) / 64);
    k->section = calloc((size_t)run->n_sections, sizeof *k->section);
    k->table = calloc(words, sizeof *k->table);
    COF_FAIL_IF(!k->section || !k->table, COF_ERR_NOMEM, "check: no memory");
    for (size_t i = 0; i < words; i++)
        k->table[i] = cofi_check_random(run->seed, (uint64_t)(50 + call), i);
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int s = 0; s < run->n_sections; s++)
            COF_TRY(make_partial(run, call, s, is_v));
        COF_TRY(make_tensor(run, is_v, run->local_rows, run->c.params.dtype, &k->out[is_v]));
    }
    return COF_OK;
}

void cofi_gr_check_free_calls(struct cofi_gr_check *run)
{
    for (int i = 0; i < run->c.n_calls; i++) {
        struct cofi_gr_check_call *k = &run->call[i];
        for (int is_v = 0; is_v < 2; is_v++) {
            for (int s = 0; k->section && s < run->n_sections; s++)
                cofi_check_memory_close(&k->section[s].in[is_v].memory);
            cofi_check_memory_close(&k->out[is_v].memory);
        }
        free(k->section);
        free(k->table);
    }
}

cof_status cofi_gr_check_poison(struct cofi_gr_check *run)
{
    for (int i = 0; i < run->c.n_calls; i++)
        for (int is_v = 0; is_v < 2; is_v++)
            COF_TRY(cofi_check_memory_poison(&run->call[i].out[is_v].memory));
    return COF_OK;
}

/* ---- comparison ----------------------------------------------------------------------------- */

/* n terms, each rounded to the wire and added in fp32, and the sum rounded to dtype. */
static double bound(const struct cofi_gr_check *run, const struct cofi_gr_value *v)
{
    double out = run->c.params.dtype.bits == 32 ? 0x1p-24 : 0x1p-8; /* f16: finer, but to 2^-24 */
    double wire = run->c.params.wire_f32 ? 0x1p-24 : out;
    return v->size * (wire + out + run->job->n_ranks * 0x1p-24) * 1.01;
}

/* Those of a chunk, whose rows all have the same: finding them takes a look at every row. */
struct chunk_writers {
    int64_t chunk; /* -1: none yet */
    int n, rank[COFI_MAX_RANKS];
};

static void find_writers(const struct cofi_gr_ref *ref, int rank, int64_t row, int64_t global,
                         struct chunk_writers *w)
{
    const cof_layout *l = &ref->layout;
    int half = cof_layout_halves(l) == 2 && row >= cof_layout_half_start(l, rank, 1);
    int64_t chunk = cof_layout_chunk(l, rank, half);
    if (w->chunk == chunk)
        return;
    w->chunk = chunk;
    w->n = cofi_gr_ref_writers(ref, global, w->rank);
}

static void compare_row(struct cofi_gr_check *run, int call, int is_v, int64_t row,
                        struct chunk_writers *writers, struct cofi_check_result *result)
{
    static const char *const names[] = {"dk_out", "dv_out"};
    struct cofi_gr_check_call *k = &run->call[call];
    struct cofi_gr_check_tensor *t = &k->out[is_v];
    struct source source = {run, call, is_v};
    struct cofi_gr_ref ref = {run->layout, run->c.params.dtype, run->c.params.wire_f32,
                              run->c.writers, k->table, value, &source};
    int64_t n = run->c.params.n_batch * run->c.params.n_heads * run->dim[is_v];
    int64_t global = cof_layout_global_row(&run->layout, run->job->rank, row);
    if (global >= 0)
        find_writers(&ref, run->job->rank, row, global, writers);
    for (int64_t at = 0; at < n; at++) {
        double ours = cofi_check_load(t->memory.host, run->c.params.dtype,
                                      place(run, t, is_v, row, at));
        struct cofi_gr_value v = {0, 0, 0};
        if (global >= 0)
            v = cofi_gr_ref_value(&ref, writers->rank, writers->n, global, at);
        if (ours != v.plain || !(fabs(ours - v.exact) <= bound(run, &v)) ||
            (run->c.integers && ours != v.exact))
            cofi_check_fail(result, "%s[row %lld (global %lld), element %lld] of call %d = %.9g, "
                            "wanted %.9g (exact %.9g)",
                            names[is_v], (long long)row, (long long)global, (long long)at, call,
                            ours, v.plain, v.exact);
    }
}

static cof_status inspect_partials(struct cofi_gr_check *run, int call, int is_v,
                                   struct cofi_check_result *result)
{
    for (int s = 0; s < run->n_sections; s++) {
        struct cofi_gr_check_tensor *in = &run->call[call].section[s].in[is_v];
        COF_TRY(cofi_check_memory_download(&in->memory));
        if (!cofi_check_memory_intact(&in->memory) || hash_of(&in->memory) != in->hash)
            cofi_check_fail(result, "a partial was written to");
    }
    return COF_OK;
}

cof_status cofi_gr_check_inspect(struct cofi_gr_check *run, int call, int round,
                                 struct cofi_check_result *result)
{
    struct cofi_gr_check_call *k = &run->call[call];
    for (int is_v = 0; is_v < 2; is_v++) {
        COF_TRY(cofi_check_memory_download(&k->out[is_v].memory));
        uint64_t hash = hash_of(&k->out[is_v].memory);
        if (!cofi_check_memory_intact(&k->out[is_v].memory))
            cofi_check_fail(result, "an output's red zone was written to");
        if (round < 2)
            COF_TRY(inspect_partials(run, call, is_v, result));
        if (round == 0) {
            struct chunk_writers writers = {.chunk = -1};
            k->kept[is_v] = hash;
            for (int64_t row = 0; row < run->local_rows; row++)
                compare_row(run, call, is_v, row, &writers, result);
        } else if (hash != k->kept[is_v]) {
            cofi_check_fail(result, "round %d of call %d has other bits than the first", round,
                            call);
        }
    }
    return COF_OK;
}
