/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Forward sections on the CPU: online softmax over key tiles.
 *
 * A task is a block of up to BLOCK_TILES query tiles of one head: a key tile is converted once
 * (where products of its type are not native) and used by all of them. How many a block has depends
 * on the number of threads; what is computed for a query tile, and in which order, does not. */
#include "backend/cpu/gemm_failure.h"
#include "ops/attention/attention_cpu_tiles.h"

#define BLOCK_TILES 4

struct forward_scratch {
    float s[TILE_Q * TILE_LD];
    uint16_t p[TILE_Q * TILE_LD];
    float q[BLOCK_TILES * TILE_Q * TILE_DIM];
    float k[TILE_K * TILE_DIM];
    float v[TILE_K * TILE_DIM];
};
_Static_assert(sizeof(struct forward_scratch) <= COFI_WORKER_SCRATCH_BYTES,
               "tiles fit the scratch");

struct forward_job {
    const struct cofi_attention_section *section;
    const struct cofi_attention_state *state;
    const struct cofi_vec_ops *vec;
    enum cofi_gemm_type type;
    int64_t block_rows, n_blocks;
    struct cofi_gemm_failure failure;
};

/* One head's block of queries against one key tile. */
struct forward_tile {
    const struct forward_job *job;
    struct cofi_gemm *gemm;
    struct forward_scratch *scratch;
    struct cofi_rows q, k, v; /* row 0: query q_origin, key keys.lo */
    int64_t q_origin;
    struct cofi_range keys;
    float *acc, *m, *l; /* of query 0 of the section */
};

static float row_max(const struct cofi_vec_ops *vec, const float *s, float scale, int64_t n)
{
    if (scale >= 0)
        return scale * vec->max(s, n);
    float max = -INFINITY;
    for (int64_t j = 0; j < n; j++)
        if (scale * s[j] > max || isnan(s[j]))
            max = isnan(max) ? max : scale * s[j];
    return max;
}

/* Turns the scores s of query i, keys any.lo .. any.hi-1, into probabilities (in place, or bf16 in
 * p), and brings m, l and acc of the row to the new maximum. */
static void softmax_row(const struct forward_tile *t, int64_t i, struct cofi_range any, float *s,
                        uint16_t *p)
{
    const struct cofi_attention_section *section = t->job->section;
    const struct cofi_vec_ops *vec = t->job->vec;
    const bool to_bf16 = t->job->type == COFI_GEMM_BF16;
    const float scale = section->dims->scale;
    const int64_t width = any.hi - any.lo;
    const size_t elem_bytes = to_bf16 ? sizeof *p : sizeof *s;

    struct cofi_range visible = cofi_visible(&section->band, i, any);
    int64_t lo = visible.lo - any.lo, n = visible.hi - visible.lo;
    if (n > 0) {
        float max = row_max(vec, s + lo, scale, n);
        float m = max > t->m[i] || isnan(max) ? max : t->m[i];
        if (m == -INFINITY) { /* all scores are -inf: 0/0 unless a later key is better */
            t->l[i] = NAN;
            n = 0;
        } else {
            if (t->m[i] == -INFINITY) {
                t->l[i] = 0;
            } else if (m != t->m[i]) {
                float factor = expf(t->m[i] - m);
                t->l[i] *= factor;
                vec->scale(t->acc + i * section->dims->dim_v, factor, section->dims->dim_v);
            }
            t->m[i] = m;
            t->l[i] += to_bf16 ? vec->exp_bf16(p + lo, s + lo, scale, m, n)
                               : vec->exp_f32(s + lo, s + lo, scale, m, n);
        }
    }
    char *row = to_bf16 ? (char *)p : (char *)s;
    memset(row, 0, (size_t)lo * elem_bytes);
    memset(row + (size_t)(lo + n) * elem_bytes, 0, (size_t)(width - lo - n) * elem_bytes);
}

/* Queries q0 .. q0+n_q-1 (n_q <= TILE_Q) against t's keys. */
static cof_status forward_tile(const struct forward_tile *t, int64_t q0, int64_t n_q)
{
    const struct forward_job *job = t->job;
    const struct cofi_attention_dims *dims = job->section->dims;
    struct cofi_cut cut = cofi_cut_tile(&job->section->band, q0, n_q, t->keys);
    const int64_t width = cut.any.hi - cut.any.lo;
    if (width == 0)
        return COF_OK;
    if (n_q > 1 && !cofi_rows_finite_outside(&t->v, &cut, t->keys.lo, dims->dim_v)) {
        for (int64_t i = q0; i < q0 + n_q; i++)
            COF_TRY(forward_tile(t, i, 1));
        return COF_OK;
    }

    float *s = t->scratch->s;
    uint16_t *p = t->scratch->p;
    COF_TRY(cofi_gemm_run(t->gemm, COFI_GEMM_NT, job->type, n_q, width, dims->dim_qk,
                          cofi_rows_at(&t->q, q0 - t->q_origin), t->q.ld,
                          cofi_rows_at(&t->k, cut.any.lo - t->keys.lo), t->k.ld, false, s,
                          TILE_LD));
    for (int64_t i = 0; i < n_q; i++)
        softmax_row(t, q0 + i, cut.any, s + i * TILE_LD, p + i * TILE_LD);
    return cofi_gemm_run(t->gemm, COFI_GEMM_NN, job->type, n_q, dims->dim_v, width,
                         job->type == COFI_GEMM_BF16 ? (void *)p : (void *)s, TILE_LD,
                         cofi_rows_at(&t->v, cut.any.lo - t->keys.lo), t->v.ld, true,
                         t->acc + q0 * dims->dim_v, dims->dim_v);
}

/* Queries q0 .. q1-1 of one head against all keys, key tile by key tile. */
static cof_status forward_block(const struct forward_job *job, int64_t b, int64_t h, int64_t q0,
                                int64_t q1, struct cofi_cpu_worker *worker)
{
    const struct cofi_attention_section *x = job->section;
    const struct cofi_attention_dims *dims = x->dims;
    const int64_t kv_head = h / (dims->n_heads / dims->n_kv_heads);
    const int64_t row = (b * dims->n_heads + h) * job->state->n_rows + x->q_begin;
    struct cofi_cut cut = cofi_cut_tile(&x->band, q0, q1 - q0, (struct cofi_range){0, x->k_rows});
    if (cut.any.lo == cut.any.hi)
        return COF_OK;

    struct forward_tile t = {.job = job, .gemm = worker->gemm, .scratch = worker->scratch,
                             .q_origin = q0, .acc = job->state->acc + row * dims->dim_v,
                             .m = job->state->m + row, .l = job->state->l + row};
    t.q = cofi_rows_load(&x->q, dims->elem, job->type, b, x->q_begin + q0, h, q1 - q0,
                         dims->dim_qk, t.scratch->q);
    for (int64_t k0 = cut.any.lo / TILE_K * TILE_K; k0 < cut.any.hi; k0 += TILE_K) {
        t.keys = (struct cofi_range){k0, cofi_clamp(k0 + TILE_K, 0, x->k_rows)};
        t.k = cofi_rows_load(&x->k, dims->elem, job->type, b, x->k_begin + k0, kv_head,
                             t.keys.hi - k0, dims->dim_qk, t.scratch->k);
        t.v = cofi_rows_load(&x->v, dims->elem, job->type, b, x->k_begin + k0, kv_head,
                             t.keys.hi - k0, dims->dim_v, t.scratch->v);
        for (int64_t i = q0; i < q1; i += TILE_Q)
            COF_TRY(forward_tile(&t, i, q1 - i < TILE_Q ? q1 - i : TILE_Q));
    }
    return COF_OK;
}

/* Blocks outermost, the last ones (which see the most keys under a causal band) first. */
static void forward_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    struct forward_job *job = arg;
    const struct cofi_attention_section *x = job->section;
    const int64_t n_lanes = x->dims->n_batch * x->dims->n_heads;
    int64_t block = task / n_lanes, lane = task % n_lanes;
    if (x->band.right != INT64_MAX)
        block = job->n_blocks - 1 - block;
    int64_t q0 = block * job->block_rows, q1 = cofi_clamp(q0 + job->block_rows, 0, x->q_rows);
    if (atomic_load(&job->failure.status) == COF_OK)
        cofi_gemm_note(&job->failure, forward_block(job, lane / x->dims->n_heads,
                                                    lane % x->dims->n_heads, q0, q1, worker));
}

cof_status cofi_attention_cpu_forward(struct cofi_cpu_stream *stream,
                                      const struct cofi_attention_section *section,
                                      const struct cofi_attention_state *state)
{
    const struct cofi_attention_dims *dims = section->dims;
    const int64_t n_lanes = dims->n_batch * dims->n_heads;
    if (n_lanes == 0 || section->q_rows <= 0 || section->k_rows <= 0)
        return COF_OK;
    struct forward_job job = {.section = section, .state = state, .vec = cofi_vec(),
                              .type = cofi_tile_type(dims)};
    for (int64_t n_tiles = BLOCK_TILES; n_tiles >= 1; n_tiles /= 2) {
        job.block_rows = n_tiles * TILE_Q;
        job.n_blocks = (section->q_rows + job.block_rows - 1) / job.block_rows;
        if (job.n_blocks * n_lanes >= 8 * (int64_t)cofi_cpu_stream_threads(stream))
            break;
    }
    cofi_cpu_parallel(stream, job.n_blocks * n_lanes, forward_task, &job);
    return cofi_gemm_failed(&job.failure, "attention forward");
}
