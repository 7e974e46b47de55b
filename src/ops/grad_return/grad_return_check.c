/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check grad_return`: every element of the owner's rows has the bits of the reference, and
 * the reference is near the sum in fp64. */
#define _GNU_SOURCE /* usleep */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/check.h"
#include "ops/grad_return/grad_return_cases.h"
#include "ops/grad_return/grad_return_ref.h"
#include "tools/cli.h"

enum { MAX_CALLS = 3, N_ROUNDS = 2 };

/* A tensor of a call: [rows, B, H, D], with gaps when padded. */
struct tensor {
    struct cofi_guard guard;
    cof_tensor view;
    int64_t shape[4], strides[4];
    uint64_t hash;
};

struct section {
    struct tensor in[2]; /* dk, dv */
};

struct call {
    struct section *section; /* by_section: P of them; else one */
    struct tensor out[2];
    uint64_t *table;
    uint64_t kept[2]; /* hashes of the outputs of the first round */
};

struct run {
    struct cofi_job *job;
    struct cofi_gr_case c;
    uint64_t seed, n_delays;
    cof_layout layout;
    int64_t dim[2], local_rows;
    int n_sections;
    cof_dtype partial;
    struct cofi_check_arena arena; /* with --engine attach */
    cof_plan *plan;
    cof_stream stream;
    uint32_t epoch;
    struct call call[MAX_CALLS];
    void **peers; /* dk, dv, ready, by rank */
    cof_grad_return_peers peers_struct;
};

/* ---- values --------------------------------------------------------------------------------- */

struct source {
    const struct run *run;
    int call, is_v;
};

/* By index alone, so that any rank can tell what another has. */
static double value(const void *ctx, int writer, int64_t row, int64_t at)
{
    const struct source *s = ctx;
    const struct run *run = s->run;
    int64_t n = run->c.params.n_batch * run->c.params.n_heads * run->dim[s->is_v];
    uint64_t tensor = (uint64_t)(100 + 1000 * writer + 10 * s->call + s->is_v);
    uint64_t idx = (uint64_t)(row * n + at);
    uint64_t bits = cofi_check_random(run->seed, tensor, idx);
    float x = run->c.integers ? (float)(int)(bits % 9) - 4 : (float)(int64_t)bits * 0x1p-63f;
    return cofi_check_rounded(x, run->partial);
}

/* ---- tensors -------------------------------------------------------------------------------- */

static cof_status make_tensor(const struct run *run, int is_v, int64_t rows, cof_dtype dtype,
                              struct tensor *t)
{
    const cof_grad_return_params *p = &run->c.params;
    int64_t gap = run->c.padded_strides ? 1 : 0;
    int64_t shape[4] = {rows, p->n_batch, p->n_heads, run->dim[is_v]};
    int64_t strides[4] = {0, 0, shape[3] + 3 * gap, 1};
    strides[1] = shape[2] * strides[2] + 5 * gap;
    strides[0] = shape[1] * strides[1] + 7 * gap;
    memcpy(t->shape, shape, sizeof shape);
    memcpy(t->strides, strides, sizeof strides);
    t->view = (cof_tensor){.device = {COF_DEVICE_CPU, 0}, .ndim = 4, .dtype = dtype,
                           .shape = t->shape, .strides = gap ? t->strides : NULL};
    COF_TRY(cofi_guard_alloc(&t->guard,
                             (size_t)(rows * strides[0]) * (size_t)cofi_dtype_bytes(dtype)));
    t->view.data = t->guard.data;
    return COF_OK;
}

static int64_t place(const struct run *run, const struct tensor *t, int is_v, int64_t row,
                     int64_t at)
{
    int64_t d = run->dim[is_v], h = run->c.params.n_heads;
    return row * t->strides[0] + at / (h * d) * t->strides[1] + at / d % h * t->strides[2] + at % d;
}

/* The row of a partial's tensor holds which global row; -1: padding, which stays poison. */
static int64_t global_row(const struct run *run, int section, int64_t row)
{
    int owner = (run->job->rank - section - 1 + 2 * run->job->n_ranks) % run->job->n_ranks;
    return run->c.params.by_section ? cof_layout_global_row(&run->layout, owner, row) : row;
}

static cof_status make_partial(struct run *run, int call, int section, int is_v)
{
    struct tensor *t = &run->call[call].section[section].in[is_v];
    struct source source = {run, call, is_v};
    int owner = (run->job->rank - section - 1 + 2 * run->job->n_ranks) % run->job->n_ranks;
    int64_t rows = run->c.params.by_section ? cof_layout_local_rows(&run->layout, owner)
                                            : run->c.params.n_rows;
    COF_TRY(make_tensor(run, is_v, rows, run->partial, t));
    int64_t n = run->c.params.n_batch * run->c.params.n_heads * run->dim[is_v];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0, global = global_row(run, section, row); at < n && global >= 0; at++)
            cofi_check_store(t->guard.data, run->partial, place(run, t, is_v, row, at),
                             (float)value(&source, run->job->rank, global, at));
    t->hash = cofi_guard_hash(&t->guard);
    return COF_OK;
}

static cof_status make_call(struct run *run, int call)
{
    struct call *k = &run->call[call];
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

static void free_calls(struct run *run)
{
    for (int i = 0; i < run->c.n_calls; i++) {
        struct call *k = &run->call[i];
        for (int is_v = 0; is_v < 2; is_v++) {
            for (int s = 0; k->section && s < run->n_sections; s++)
                cofi_guard_free(&k->section[s].in[is_v].guard);
            cofi_guard_free(&k->out[is_v].guard);
        }
        free(k->section);
        free(k->table);
    }
    free(run->peers);
}

/* ---- the caller's memory: the job's shared bytes -------------------------------------------- */

static size_t peer_bytes(const struct run *run, int is_v)
{
    const cof_grad_return_params *p = &run->c.params;
    int64_t rows = cof_layout_local_rows(&run->layout, 0);
    size_t bytes = (size_t)(run->job->n_ranks * rows * p->n_batch * p->n_heads * run->dim[is_v]) *
                   (size_t)cofi_dtype_bytes(p->dtype);
    return (bytes + 127) / 128 * 128 + 128;
}

static size_t block_bytes(const struct run *run)
{
    return peer_bytes(run, 0) + peer_bytes(run, 1) +
           (size_t)(run->job->n_ranks + 3) / 4 * 4 * sizeof(uint32_t) * 4;
}

static cof_status make_peers(struct run *run)
{
    size_t n = (size_t)run->job->n_ranks, block = block_bytes(run);
    COF_FAIL_IF(n * block > run->job->shared_bytes, COF_ERR_INTERNAL,
                "check: a case needs %zu shared bytes of %zu", n * block, run->job->shared_bytes);
    run->peers = calloc(3 * n, sizeof *run->peers);
    COF_FAIL_IF(!run->peers, COF_ERR_NOMEM, "check: no memory");
    for (size_t r = 0; r < n; r++) {
        char *at = (char *)run->job->shared + r * block;
        run->peers[r] = at;
        run->peers[n + r] = at + peer_bytes(run, 0);
        run->peers[2 * n + r] = at + peer_bytes(run, 0) + peer_bytes(run, 1);
    }
    memset(run->peers[run->job->rank], 0xff, block); /* NaN, but for the epochs */
    memset(run->peers[2 * n + (size_t)run->job->rank], 0, n * 16);
    run->peers_struct = (cof_grad_return_peers){
        .size = sizeof run->peers_struct, .n_ranks = (int)n, .dk = run->peers,
        .dv = run->peers + n, .dk_bytes = peer_bytes(run, 0), .dv_bytes = peer_bytes(run, 1),
        .ready = (uint32_t *const *)(run->peers + 2 * n), .ready_stride = 16};
    run->c.params.peers = &run->peers_struct;
    return cof_team_barrier(run->job->team);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static void delay(struct run *run)
{
    uint64_t x = cofi_check_random(run->seed, 70 + (uint64_t)run->job->rank, run->n_delays++);
    if (run->c.random_delays)
        usleep((useconds_t)(x % 2000));
}

static cof_status enqueue(struct run *run, int call)
{
    struct call *k = &run->call[call];
    bool caller = run->c.params.caller_orders_reuse;
    run->epoch++;
    for (int s = 0; s < run->n_sections; s++) {
        cof_grad_return_args args = COF_GRAD_RETURN_ARGS_INIT;
        args.dk = &k->section[s].in[0].view;
        args.dv = &k->section[s].in[1].view;
        args.dk_out = s == run->n_sections - 1 ? &k->out[0].view : NULL;
        args.dv_out = s == run->n_sections - 1 ? &k->out[1].view : NULL;
        args.writers = run->c.writers;
        args.writer_table = run->c.writers == COF_WRITERS_TABLE ? k->table : NULL;
        args.epoch = caller ? run->epoch : 0;
        delay(run);
        COF_TRY(cof_grad_return_run(run->plan, &args, run->stream));
    }
    if (!caller)
        return COF_OK;
    COF_TRY(cof_stream_sync(run->stream)); /* the caller orders reuse */
    return cof_team_barrier(run->job->team);
}

static cof_status run_calls(struct run *run)
{
    for (int i = 0; i < run->c.n_calls; i++)
        for (int is_v = 0; is_v < 2; is_v++)
            cofi_guard_poison(&run->call[i].out[is_v].guard);
    for (int i = 0; i < run->c.n_calls; i++)
        COF_TRY(enqueue(run, i));
    return cof_stream_sync(run->stream);
}

/* ---- comparison ----------------------------------------------------------------------------- */

/* n terms, each rounded to the wire and added in fp32, and the sum rounded to dtype. */
static double bound(const struct run *run, const struct cofi_gr_value *v)
{
    double out = run->c.params.dtype.bits == 32 ? 0x1p-24 : 0x1p-8; /* f16: finer, but to 2^-24 */
    double wire = run->c.params.wire_f32 ? 0x1p-24 : out;
    return v->size * (wire + out + run->job->n_ranks * 0x1p-24) * 1.01;
}

static void compare_row(struct run *run, int call, int is_v, int64_t row,
                        struct cofi_check_result *result)
{
    static const char *const names[] = {"dk_out", "dv_out"};
    struct call *k = &run->call[call];
    struct tensor *t = &k->out[is_v];
    struct source source = {run, call, is_v};
    struct cofi_gr_ref ref = {run->layout, run->c.params.dtype, run->c.params.wire_f32,
                              run->c.writers, k->table, value, &source};
    int64_t n = run->c.params.n_batch * run->c.params.n_heads * run->dim[is_v];
    int64_t global = cof_layout_global_row(&run->layout, run->job->rank, row);
    int writers[COFI_MAX_RANKS];
    int n_writers = global >= 0 ? cofi_gr_ref_writers(&ref, global, writers) : 0;
    for (int64_t at = 0; at < n; at++) {
        double ours = cofi_check_load(t->guard.data, run->c.params.dtype,
                                      place(run, t, is_v, row, at));
        struct cofi_gr_value v = {0, 0, 0};
        if (global >= 0)
            v = cofi_gr_ref_value(&ref, writers, n_writers, global, at);
        if (ours != v.plain || !(fabs(ours - v.exact) <= bound(run, &v)) ||
            (run->c.integers && ours != v.exact))
            cofi_check_fail(result, "%s[row %lld (global %lld), element %lld] of call %d = %.9g, "
                            "wanted %.9g (exact %.9g)",
                            names[is_v], (long long)row, (long long)global, (long long)at, call,
                            ours, v.plain, v.exact);
    }
}

static void inspect(struct run *run, int call, int round, struct cofi_check_result *result)
{
    struct call *k = &run->call[call];
    for (int is_v = 0; is_v < 2; is_v++) {
        uint64_t hash = cofi_guard_hash(&k->out[is_v].guard);
        if (!cofi_guard_intact(&k->out[is_v].guard))
            cofi_check_fail(result, "an output's red zone was written to");
        for (int s = 0; s < run->n_sections; s++) {
            struct tensor *in = &k->section[s].in[is_v];
            if (!cofi_guard_intact(&in->guard) || cofi_guard_hash(&in->guard) != in->hash)
                cofi_check_fail(result, "a partial was written to");
        }
        if (round == 0) {
            k->kept[is_v] = hash;
            for (int64_t row = 0; row < run->local_rows; row++)
                compare_row(run, call, is_v, row, result);
        } else if (hash != k->kept[is_v]) {
            cofi_check_fail(result, "a repeated call has other bits");
        }
    }
}

/* ---- one case ------------------------------------------------------------------------------- */

/* On an arena of its own; with --engine attach on one as large as the workspace call says. The
 * caller's memory has none. */
static cof_status make_plan(struct run *run)
{
    cof_team *team = run->job->team;
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    if (run->job->attach && !run->c.params.peers) {
        COF_TRY(cof_grad_return_workspace(team, &run->c.params, &sizes));
        COF_TRY(cofi_check_arena_open(run->job, team, sizes.symmetric + sizes.words, 0, 0,
                                      &run->arena));
    }
    cof_status status = cof_grad_return_plan_create(team, &run->c.params, run->arena.arena,
                                                    &run->plan);
    if (status != COF_OK)
        cofi_check_arena_close(&run->arena);
    return status;
}

static cof_status with_plan(struct run *run, struct cofi_check_result *result)
{
    COF_TRY(make_plan(run));
    cof_status status = cof_stream_create(run->job->world, 0, &run->stream);
    for (int round = 0; round < N_ROUNDS && status == COF_OK; round++) {
        status = run_calls(run);
        for (int i = 0; i < run->c.n_calls && status == COF_OK; i++)
            inspect(run, i, round, result);
        if (status == COF_OK)
            status = cof_team_barrier(run->job->team); /* with the deadline of long work */
    }
    if (status == COF_OK)
        status = cofi_check_agree(run->job->team, result);
    cof_stream_destroy(run->stream);
    cof_plan_destroy(run->plan);
    cofi_check_arena_close(&run->arena);
    return status;
}

static void set_up(struct run *run, struct cofi_job *job, const struct cofi_check_options *options,
                   int64_t idx)
{
    *run = (struct run){.job = job, .seed = options->seed};
    cofi_gr_case(options, idx, &run->c);
    const cof_grad_return_params *p = &run->c.params;
    run->layout = (cof_layout){p->layout, p->chunking, job->n_ranks, p->n_rows};
    run->local_rows = cof_layout_local_rows(&run->layout, job->rank);
    run->dim[0] = p->head_dim_k;
    run->dim[1] = p->head_dim_v;
    run->partial = p->partial_f32 ? COF_F32 : p->dtype;
    run->n_sections = p->by_section ? job->n_ranks : 1;
}

static cof_status run_case(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result)
{
    struct run run;
    *result = (struct cofi_check_result){COFI_PASSED, ""};
    set_up(&run, job, options, idx);
    cof_status status = run.c.params.caller_orders_reuse ? make_peers(&run) : COF_OK;
    for (int i = 0; i < run.c.n_calls && status == COF_OK; i++)
        status = make_call(&run, i);
    if (status == COF_OK)
        status = cof_team_barrier(job->team);
    if (status == COF_OK)
        status = with_plan(&run, result);
    free_calls(&run);
    return status;
}

static size_t shared_bytes(const struct cofi_check_options *options)
{
    size_t most = 0;
    for (int64_t i = 0; i < cofi_gr_n_cases(options); i++) {
        struct cofi_job job = {.n_ranks = options->n_ranks};
        struct run run;
        set_up(&run, &job, options, i);
        size_t bytes = run.c.params.caller_orders_reuse
                           ? (size_t)options->n_ranks * block_bytes(&run)
                           : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

const struct cofi_op_check cofi_grad_return_check = {
    .n_cases = cofi_gr_n_cases,
    .case_line = cofi_gr_case_line,
    .shared_bytes = shared_bytes,
    .run_case = run_case,
};
