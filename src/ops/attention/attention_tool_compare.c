/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `--compare`: the fp64 reference and the plain same-type version of a run's inputs, made once by
 * the parent, and the error rule for every output. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/attention/attention_ref.h"
#include "ops/attention/attention_tool.h"
#include "ops/check.h"

enum { PIECE_ROWS = 4 * COFI_ATTENTION_REF_LANES };

struct cofi_attention_references {
    struct cofi_attention_problem problem;
    struct cofi_attention_ref ref;
    struct cofi_attention_plain plain;
    double scale[COFI_AT_N]; /* size of a sum's terms where it may cancel to 0; lse: of scores */
    double max_lse;
    void *memory;
};

/* Outputs are compared head by head: [batch, head, row, dim] in any strides. */
struct view {
    const char *data;
    cof_dtype dtype;
    int64_t n_batch, n_heads, n_rows, dim, batch_stride, head_stride, row_stride;
};

static struct view make_view(struct cofi_attention_run *run, int which)
{
    const cof_attention_params *p = &run->params;
    struct cofi_attention_geometry g = cofi_attention_geometry(p, which, p->n_rows);
    struct view v = {cofi_attention_run_tensor(run, which), g.dtype, p->n_batch, p->n_heads,
                     p->n_rows, 1, p->n_heads * p->n_rows, p->n_rows, 1};
    if (which == COFI_AT_LSE)
        return v;
    v.n_heads = g.shape[2];
    v.dim = g.shape[3];
    v.head_stride = v.dim;
    int64_t row = v.n_heads * v.dim;
    v.row_stride = p->format == COF_FORMAT_BSHD ? row : p->n_batch * row;
    v.batch_stride = p->format == COF_FORMAT_BSHD ? p->n_rows * row : row;
    return v;
}

static struct cofi_attention_view engine_view(struct cofi_attention_run *run, int which)
{
    struct view v = make_view(run, which);
    return (struct cofi_attention_view){cofi_attention_run_tensor(run, which), v.batch_stride,
                                        v.row_stride, v.head_stride};
}

/* Largest of |element|, or of a row's norm over the head dim. */
static double largest(struct cofi_attention_run *run, int which, bool norms)
{
    struct view v = make_view(run, which);
    int64_t n = v.n_batch * v.n_heads * v.n_rows * v.dim; /* inputs are compact */
    double most = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = cofi_check_load(v.data, v.dtype, i);
        sum = i % v.dim ? sum + x * x : x * x;
        most = fmax(most, norms ? sqrt(sum) : fabs(x));
    }
    return most;
}

/* ---- making them ---------------------------------------------------------------------------- */

struct phase {
    struct cofi_attention_references *r;
    bool is_backward;
    int64_t n_pieces; /* of one head */
};

/* An item: some rows of one head. Backward: dq, and dk, dv where the head is a kv head's first. */
static cof_status make_piece(void *arg, int64_t item)
{
    const struct phase *phase = arg;
    struct cofi_attention_references *r = phase->r;
    const struct cofi_attention_problem *p = &r->problem;
    int64_t begin = item % phase->n_pieces * PIECE_ROWS;
    int64_t end = begin + PIECE_ROWS < p->n_rows ? begin + PIECE_ROWS : p->n_rows;
    int64_t head = item / phase->n_pieces % p->n_heads, batch = item / phase->n_pieces / p->n_heads;
    int64_t group = p->n_heads / p->n_kv_heads;
    if (!phase->is_backward) {
        COF_TRY(cofi_attention_ref_forward(p, &r->ref, batch, head, begin, end));
        return cofi_attention_plain_forward(p, &r->plain, batch, head, begin, end);
    }
    COF_TRY(cofi_attention_ref_dq(p, &r->ref, batch, head, begin, end));
    COF_TRY(cofi_attention_plain_dq(p, &r->plain, batch, head, begin, end));
    if (head % group)
        return COF_OK;
    COF_TRY(cofi_attention_ref_dkv(p, &r->ref, batch, head / group, begin, end));
    return cofi_attention_plain_dkv(p, &r->plain, batch, head / group, begin, end);
}

/* One block for all results, doubles first. */
static cof_status allocate(struct cofi_attention_references *r)
{
    const struct cofi_attention_problem *p = &r->problem;
    int64_t q = p->n_batch * p->n_heads * p->n_rows, k = p->n_batch * p->n_kv_heads * p->n_rows;
    int64_t sizes[] = {q * p->dim_v, q, q, q * p->dim_qk, k * p->dim_qk, k * p->dim_v}, n = 0;
    int n_sizes = p->dout.data ? 6 : 3;
    for (int i = 0; i < n_sizes; i++)
        n += sizes[i];
    size_t bytes = (size_t)n * (sizeof(double) + sizeof(float)) + 1;
    r->memory = malloc(bytes);
    COF_FAIL_IF(!r->memory, COF_ERR_NOMEM, "%zu bytes for the references", bytes);
    double *ref = r->memory;
    float *plain = (float *)(ref + n);
    double **ref_slots[] = {&r->ref.o, &r->ref.lse, &r->ref.delta, &r->ref.dq, &r->ref.dk,
                            &r->ref.dv};
    float **plain_slots[] = {&r->plain.o, &r->plain.lse, &r->plain.delta, &r->plain.dq,
                             &r->plain.dk, &r->plain.dv};
    for (int i = 0; i < n_sizes; i++) {
        *ref_slots[i] = ref;
        *plain_slots[i] = plain;
        ref += sizes[i];
        plain += sizes[i];
    }
    return COF_OK;
}

/* The pieces are shared over threads by a world of one. */
static cof_status compute(struct cofi_attention_references *r)
{
    COF_TRY(allocate(r));
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.n_ranks = 1;
    options.n_threads = 1;
    cof_world *world;
    COF_TRY(cof_world_create(&options, &world));
    struct cofi_job job = {.world = world, .team = cof_world_team(world), .n_ranks = 1};
    const struct cofi_attention_problem *p = &r->problem;
    struct phase phase = {.r = r, .n_pieces = (p->n_rows + PIECE_ROWS - 1) / PIECE_ROWS};
    int64_t n_items = p->n_batch * p->n_heads * phase.n_pieces;
    cof_status status = cofi_check_share(&job, n_items, make_piece, &phase);
    phase.is_backward = true;
    if (status == COF_OK && p->dout.data)
        status = cofi_check_share(&job, n_items, make_piece, &phase);
    cof_world_destroy(world);
    return status;
}

struct cofi_attention_references *cofi_attention_references_make(struct cofi_attention_run *run)
{
    const cof_attention_params *p = &run->params;
    struct cofi_attention_references *r = calloc(1, sizeof *r);
    if (!r) {
        cofi_cli_error("out of memory");
        return NULL;
    }
    r->problem = (struct cofi_attention_problem){
        .n_batch = p->n_batch, .n_rows = p->n_rows, .n_heads = p->n_heads,
        .n_kv_heads = p->n_kv_heads, .dim_qk = p->head_dim_qk, .dim_v = p->head_dim_v,
        .mask = p->mask, .has_window = p->has_window,
        .window = {p->window_left, p->window_right}, .scale = cofi_attention_scale(p),
        .elem = cofi_elem_of(p->dtype),
        .q = engine_view(run, COFI_AT_Q), .k = engine_view(run, COFI_AT_K),
        .v = engine_view(run, COFI_AT_V)};
    r->scale[COFI_AT_LSE] = fabs(r->problem.scale) * largest(run, COFI_AT_Q, true) *
                            largest(run, COFI_AT_K, true);
    if (run->backward) {
        r->problem.dout = engine_view(run, COFI_AT_DOUT);
        double size = fabs(r->problem.scale) * largest(run, COFI_AT_DOUT, true) *
                      largest(run, COFI_AT_V, true);
        r->scale[COFI_AT_DQ] = size * largest(run, COFI_AT_K, false);
        r->scale[COFI_AT_DK] = size * largest(run, COFI_AT_Q, false);
    }
    cof_status status = compute(r);
    if (status != COF_OK) {
        cofi_cli_error("references: %s: %s", cof_status_name(status), cof_last_error());
        cofi_attention_references_free(r);
        return NULL;
    }
    for (int64_t i = 0; i < p->n_batch * p->n_heads * p->n_rows; i++)
        if (isfinite(r->ref.lse[i]))
            r->max_lse = fmax(r->max_lse, fabs(r->ref.lse[i]));
    return r;
}

void cofi_attention_references_free(struct cofi_attention_references *references)
{
    if (references)
        free(references->memory);
    free(references);
}

/* ---- comparing ------------------------------------------------------------------------------ */

/* lse is fp32 in either type, computed from the inputs as they are: its error is that of a score, a
 * sum of products of up to |q| |k|, and of the last roundings. The rule of attention_check.c. */
static bool is_lse_bad(double ours, double ref, double score)
{
    return ours != ref && !(fabs(ours - ref) <= 1e-5 * fmax(1, fabs(ref)) + 2.5e-7 * score) &&
           !(isnan(ref) && isnan(ours));
}

static void judge(const struct cofi_attention_references *r, struct cofi_attention_run *run,
                  int which, const double *ref, const float *plain,
                  struct cofi_attention_verdict *verdict)
{
    struct view v = make_view(run, which);
    /* backward starts from an fp32 lse, which makes exp(s - lse) wrong by up to 2^-24 |lse| */
    double lse_error = fmin(0x1p-24 * r->max_lse, COFI_CHECK_MAX_INPUT_ERROR);
    struct cofi_check_error error = {.input_error = which > COFI_AT_LSE ? lse_error : 0};
    if (v.n_rows == 0) /* however many batch entries and heads that is none of */
        v.n_batch = 0;
    int64_t n_bad = 0;
    int64_t idx = 0; /* references are [batch, head, row, dim], compact */
    for (int64_t b = 0; b < v.n_batch; b++)
        for (int64_t h = 0; h < v.n_heads; h++)
            for (int64_t s = 0; s < v.n_rows; s++)
                for (int64_t d = 0; d < v.dim; d++, idx++) {
                    int64_t at = b * v.batch_stride + h * v.head_stride + s * v.row_stride + d;
                    double ours = cofi_check_load(v.data, v.dtype, at);
                    cofi_check_error_add(&error, ours, plain[idx], ref[idx]);
                    n_bad += which == COFI_AT_LSE &&
                             is_lse_bad(ours, ref[idx], r->scale[COFI_AT_LSE]);
                }
    verdict->has = true;
    verdict->text[0] = '\0';
    verdict->rel_rmse = error.ref2 > 0 ? sqrt(error.err2 / error.ref2) : sqrt(error.err2);
    if (which == COFI_AT_LSE) {
        verdict->passed = n_bad == 0;
        snprintf(verdict->text, sizeof verdict->text, " lse has %lld values off by up to %.2g",
                 (long long)n_bad, error.max_err);
        return;
    }
    verdict->passed = cofi_check_error_judge(&error, v.dtype, r->scale[which],
                                             cofi_attention_tensor_names[which], verdict->text,
                                             sizeof verdict->text);
}

bool cofi_attention_compare(const struct cofi_attention_references *references,
                            struct cofi_attention_run *run,
                            struct cofi_attention_verdict verdicts_out[COFI_AT_N])
{
    const struct cofi_attention_ref *ref = &references->ref;
    const struct cofi_attention_plain *plain = &references->plain;
    const double *refs[COFI_AT_N] = {
        [COFI_AT_O] = ref->o, [COFI_AT_LSE] = ref->lse, [COFI_AT_DQ] = ref->dq,
        [COFI_AT_DK] = ref->dk, [COFI_AT_DV] = ref->dv};
    const float *plains[COFI_AT_N] = {
        [COFI_AT_O] = plain->o, [COFI_AT_LSE] = plain->lse, [COFI_AT_DQ] = plain->dq,
        [COFI_AT_DK] = plain->dk, [COFI_AT_DV] = plain->dv};
    bool all_passed = true;
    for (int i = COFI_AT_O; i < COFI_AT_N; i++) {
        if (run->offset[i] == 0)
            continue;
        judge(references, run, i, refs[i], plains[i], &verdicts_out[i]);
        all_passed &= verdicts_out[i].passed;
    }
    return all_passed;
}
