/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Backward sections on the CPU. A task is one query head: key tiles outside, query tiles inside,
 * five products per pair of tiles, in an order that no thread count changes. dk and dv are kept per
 * query head, so no two tasks write the same memory. */
#include "backend/cpu/gemm_failure.h"
#include "ops/attention/attention_cpu_tiles.h"

struct backward_scratch {
    float s[TILE_Q * TILE_LD];
    float dp[TILE_Q * TILE_LD];
    uint16_t p[TILE_Q * TILE_LD];
    uint16_t ds[TILE_Q * TILE_LD];
    float q[TILE_Q * TILE_DIM];
    float dout[TILE_Q * TILE_DIM];
    float k[TILE_K * TILE_DIM];
    float v[TILE_K * TILE_DIM];
};
_Static_assert(sizeof(struct backward_scratch) <= COFI_WORKER_SCRATCH_BYTES,
               "tiles fit the scratch");

struct backward_job {
    const struct cofi_attention_section *section;
    const struct cofi_attention_view *dout;
    const struct cofi_attention_grad_state *state;
    const struct cofi_vec_ops *vec;
    enum cofi_gemm_type type;
    struct cofi_gemm_failure failure;
};

/* One head's pair of tiles. */
struct backward_tile {
    const struct backward_job *job;
    struct cofi_gemm *gemm;
    struct backward_scratch *scratch;
    struct cofi_rows q, dout, k, v; /* row 0: query q_origin, key keys.lo */
    int64_t q_origin;
    struct cofi_range keys;
    const float *delta, *lse; /* of query 0 of the section, key 0 of the section */
    float *dq, *dk, *dv;
};

/* Turns the scores s and dp of query i, keys any.lo .. any.hi-1, into p and ds (in place, or bf16
 * in p and ds). */
static void grad_row(const struct backward_tile *t, int64_t i, struct cofi_range any, float *s,
                     float *dp, uint16_t *p, uint16_t *ds)
{
    const struct backward_job *job = t->job;
    const bool to_bf16 = job->type == COFI_GEMM_BF16;
    const float scale = job->section->dims->scale;
    const int64_t width = any.hi - any.lo;
    const size_t elem_bytes = to_bf16 ? sizeof *p : sizeof *s;

    struct cofi_range visible = cofi_visible(&job->section->band, i, any);
    int64_t lo = visible.lo - any.lo, n = visible.hi - visible.lo;
    if (t->lse[i] == -INFINITY)
        n = 0;
    else if (to_bf16)
        job->vec->softmax_grad_bf16(p + lo, ds + lo, s + lo, dp + lo, scale, t->lse[i], t->delta[i],
                                    n);
    else
        job->vec->softmax_grad_f32(s + lo, dp + lo, s + lo, dp + lo, scale, t->lse[i], t->delta[i],
                                   n);
    char *rows[2] = {to_bf16 ? (char *)p : (char *)s, to_bf16 ? (char *)ds : (char *)dp};
    for (int r = 0; r < 2; r++) {
        memset(rows[r], 0, (size_t)lo * elem_bytes);
        memset(rows[r] + (size_t)(lo + n) * elem_bytes, 0, (size_t)(width - lo - n) * elem_bytes);
    }
}

/* Whether the hidden entries of the pair meet finite values only: k through dq, dout and q through
 * dv and dk. */
static bool hidden_meet_finite(const struct backward_tile *t, const struct cofi_cut *cut,
                               int64_t q0, int64_t n_q)
{
    const struct cofi_attention_dims *dims = t->job->section->dims;
    if (cut->any.lo == cut->all.lo && cut->any.hi == cut->all.hi)
        return true;
    struct cofi_range queries = {q0 - t->q_origin, q0 - t->q_origin + n_q};
    return cofi_rows_finite_outside(&t->k, cut, t->keys.lo, dims->dim_qk) &&
           cofi_rows_finite(&t->q, queries, dims->dim_qk) &&
           cofi_rows_finite(&t->dout, queries, dims->dim_v);
}

/* Queries q0 .. q0+n_q-1 (n_q <= TILE_Q) against t's keys. */
static cof_status backward_tile(const struct backward_tile *t, int64_t q0, int64_t n_q)
{
    const struct backward_job *job = t->job;
    const int64_t dim_qk = job->section->dims->dim_qk, dim_v = job->section->dims->dim_v;
    struct cofi_cut cut = cofi_cut_tile(&job->section->band, q0, n_q, t->keys);
    const int64_t width = cut.any.hi - cut.any.lo;
    if (width == 0)
        return COF_OK;
    if (n_q > 1 && !hidden_meet_finite(t, &cut, q0, n_q)) {
        for (int64_t i = q0; i < q0 + n_q; i++)
            COF_TRY(backward_tile(t, i, 1));
        return COF_OK;
    }

    struct backward_scratch *x = t->scratch;
    const void *q = cofi_rows_at(&t->q, q0 - t->q_origin);
    const void *dout = cofi_rows_at(&t->dout, q0 - t->q_origin);
    const void *k = cofi_rows_at(&t->k, cut.any.lo - t->keys.lo);
    const void *v = cofi_rows_at(&t->v, cut.any.lo - t->keys.lo);
    COF_TRY(cofi_gemm_run(t->gemm, COFI_GEMM_NT, job->type, n_q, width, dim_qk, q, t->q.ld, k,
                          t->k.ld, false, x->s, TILE_LD));
    COF_TRY(cofi_gemm_run(t->gemm, COFI_GEMM_NT, job->type, n_q, width, dim_v, dout, t->dout.ld, v,
                          t->v.ld, false, x->dp, TILE_LD));
    for (int64_t i = 0; i < n_q; i++)
        grad_row(t, q0 + i, cut.any, x->s + i * TILE_LD, x->dp + i * TILE_LD, x->p + i * TILE_LD,
                 x->ds + i * TILE_LD);
    const void *p = job->type == COFI_GEMM_BF16 ? (void *)x->p : (void *)x->s;
    const void *ds = job->type == COFI_GEMM_BF16 ? (void *)x->ds : (void *)x->dp;
    COF_TRY(cofi_gemm_run(t->gemm, COFI_GEMM_TN, job->type, width, dim_v, n_q, p, TILE_LD, dout,
                          t->dout.ld, true, t->dv + cut.any.lo * dim_v, dim_v));
    COF_TRY(cofi_gemm_run(t->gemm, COFI_GEMM_TN, job->type, width, dim_qk, n_q, ds, TILE_LD, q,
                          t->q.ld, true, t->dk + cut.any.lo * dim_qk, dim_qk));
    return cofi_gemm_run(t->gemm, COFI_GEMM_NN, job->type, n_q, dim_qk, width, ds, TILE_LD, k,
                         t->k.ld, true, t->dq + q0 * dim_qk, dim_qk);
}

static cof_status backward_head(const struct backward_job *job, int64_t b, int64_t h,
                                struct cofi_cpu_worker *worker)
{
    const struct cofi_attention_section *x = job->section;
    const struct cofi_attention_dims *dims = x->dims;
    const struct cofi_attention_grad_state *state = job->state;
    const int64_t kv_head = h / (dims->n_heads / dims->n_kv_heads), lane = b * dims->n_heads + h;
    const int64_t q_row = lane * state->n_q_rows + x->q_begin;
    const int64_t k_row = lane * state->n_k_rows + x->k_begin;
    const enum cofi_elem elem = dims->elem;

    struct backward_tile t = {.job = job, .gemm = worker->gemm, .scratch = worker->scratch,
                              .delta = state->delta + q_row, .lse = state->lse + q_row,
                              .dq = state->dq + q_row * dims->dim_qk,
                              .dk = state->dk + k_row * dims->dim_qk,
                              .dv = state->dv + k_row * dims->dim_v};
    for (int64_t k0 = 0; k0 < x->k_rows; k0 += TILE_K) {
        t.keys = (struct cofi_range){k0, cofi_clamp(k0 + TILE_K, 0, x->k_rows)};
        bool loaded = false;
        for (int64_t q0 = 0; q0 < x->q_rows; q0 += TILE_Q) {
            int64_t n_q = x->q_rows - q0 < TILE_Q ? x->q_rows - q0 : TILE_Q;
            struct cofi_cut cut = cofi_cut_tile(&x->band, q0, n_q, t.keys);
            if (cut.any.lo == cut.any.hi)
                continue;
            if (!loaded) {
                t.k = cofi_rows_load(&x->k, elem, job->type, b, x->k_begin + k0, kv_head,
                                     t.keys.hi - k0, dims->dim_qk, t.scratch->k);
                t.v = cofi_rows_load(&x->v, elem, job->type, b, x->k_begin + k0, kv_head,
                                     t.keys.hi - k0, dims->dim_v, t.scratch->v);
                loaded = true;
            }
            t.q_origin = q0;
            t.q = cofi_rows_load(&x->q, elem, job->type, b, x->q_begin + q0, h, n_q,
                                 dims->dim_qk, t.scratch->q);
            t.dout = cofi_rows_load(job->dout, elem, job->type, b, x->q_begin + q0, h, n_q,
                                    dims->dim_v, t.scratch->dout);
            COF_TRY(backward_tile(&t, q0, n_q));
        }
    }
    return COF_OK;
}

static void backward_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    struct backward_job *job = arg;
    const int64_t n_heads = job->section->dims->n_heads;
    if (atomic_load(&job->failure.status) == COF_OK)
        cofi_gemm_note(&job->failure, backward_head(job, task / n_heads, task % n_heads, worker));
}

cof_status cofi_attention_cpu_backward(struct cofi_cpu_stream *stream,
                                       const struct cofi_attention_section *section,
                                       const struct cofi_attention_view *dout,
                                       const struct cofi_attention_grad_state *state)
{
    const struct cofi_attention_dims *dims = section->dims;
    const int64_t n_lanes = dims->n_batch * dims->n_heads;
    if (n_lanes == 0 || section->q_rows <= 0 || section->k_rows <= 0)
        return COF_OK;
    struct backward_job job = {.section = section, .dout = dout, .state = state, .vec = cofi_vec(),
                               .type = cofi_tile_type(dims)};
    cofi_cpu_parallel(stream, n_lanes, backward_task, &job);
    return cofi_gemm_failed(&job.failure, "attention backward");
}
