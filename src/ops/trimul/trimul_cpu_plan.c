/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs: sizes, and a plan's own memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/config.h"
#include "ops/trimul/trimul_cpu.h"
#include "symm/engine.h"
#include "symm/memory.h"

#define BLOCK_FEATURES 32 /* 4 of them, of p and g of a and b, are the rows of one product */
/* Features of a rank in a chunk. Every chunk norms x once more, which takes more time than what
 * smaller chunks save in caches: N = 256, D = 128, bf16, one core: 268 ms with 8, 189 with 32, 181
 * with 128. */
#define CHUNK_FEATURES 128
#define MAX_TOKENS 128
#define MAX_TILE 256
/* Of a worker's scratch, for what is as long as a tile has tokens; the rest has single rows. */
#define TILE_BYTES ((int64_t)COFI_WORKER_SCRATCH_BYTES * 7 / 8)
/* Slices of tokens for the gradients of weights: enough for as many threads, while they are small.
 */
#define MAX_SLICES 32
#define MIN_SLICES 8
#define SLICES_BYTES (INT64_C(64) << 20)
#define HASH_BYTES COFI_LINE

static int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t clamp(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

static int64_t round_up(int64_t x, int64_t to)
{
    return divide_up(x, to) * to;
}

/* n in equal parts of at most `most`, each a multiple of 8. */
static int64_t even_part(int64_t n, int64_t most)
{
    return round_up(divide_up(n, divide_up(n, most)), 8);
}

struct cofi_tri_shape cofi_tri_cpu_shape(const struct cofi_tri_plan *plan, int64_t n,
                                         int64_t n_batch)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const int64_t tile = even_part(n, MAX_TILE);
    return (struct cofi_tri_shape){.n = n,
                                   .n_batch = n_batch,
                                   .tokens = even_part(n, st->sizes.max_tokens),
                                   .tile = tile,
                                   .plane_rows = round_up(n, tile),
                                   .own = cofi_tri_block(&plan->params, plan->rank, n)};
}

int64_t cofi_tri_cpu_plane_pitch(int64_t plane_rows, int item)
{
    return round_up(plane_rows * item, COFI_LINE);
}

int64_t cofi_tri_cpu_block_pitch(int64_t n_cols, int item)
{
    return round_up(n_cols * item, COFI_LINE);
}

/* ---- sizes ---------------------------------------------------------------------------------- */

static bool is_staged(const struct cofi_tri_plan *plan)
{
    return plan->n_ranks > 1 && (!(plan->base.team->world->ops->caps & COFI_CAP_MAPPED) ||
                                 cofi_config_int(COFI_VAR_FORCE_STAGED) != 0);
}

static int64_t max_features(const struct cofi_tri_plan *plan)
{
    int64_t most = 0;
    for (int r = 0; r < plan->n_ranks; r++) {
        int64_t n = cofi_tri_first_feature(plan->params.hidden, r + 1, plan->n_ranks) -
                    cofi_tri_first_feature(plan->params.hidden, r, plan->n_ranks);
        most = n > most ? n : most;
    }
    return most;
}

/* Of any plane of N rows or fewer: parts of at most MAX_TILE are rounded up by less than 8. */
static int64_t plane_bytes(const struct cofi_tri_plan *plan, int item)
{
    const int64_t n = plan->params.n_rows, rows = n + 8 * divide_up(n, MAX_TILE);
    return rows * cofi_tri_cpu_plane_pitch(rows, item);
}

/* Rows or columns of the rank that has most, in a call of any N. */
static int64_t max_part(const struct cofi_tri_plan *plan, int axis)
{
    const cof_trimul_params *p = &plan->params;
    const int parts = axis ? p->grid_cols : p->grid_rows;
    int64_t most = p->shard == COF_TRIMUL_EXPLICIT ? 0 : divide_up(p->n_rows, parts);
    for (int i = 0; i < parts && p->shard == COF_TRIMUL_EXPLICIT; i++) {
        int64_t n = cofi_tri_part_begin(p, axis, p->n_rows, i + 1) -
                    cofi_tri_part_begin(p, axis, p->n_rows, i);
        most = n > most ? n : most;
    }
    return most;
}

static int64_t block_bytes(const struct cofi_tri_plan *plan, int item)
{
    return max_part(plan, 0) * cofi_tri_cpu_block_pitch(max_part(plan, 1), item);
}

static void set_chunks(const struct cofi_tri_plan *plan, struct cofi_tri_cpu_sizes *s)
{
    const int64_t most = max_features(plan);
    int64_t chunk = plan->params.chunk_features ? plan->params.chunk_features : CHUNK_FEATURES;
    chunk = clamp(chunk, round_up(divide_up(most, COFI_TRI_MAX_CHUNKS), COFI_TRI_GROUP),
                  round_up(most, COFI_TRI_GROUP));
    s->chunk = chunk;
    s->n_chunks = (int)divide_up(most, chunk);
}

static void set_regions(const struct cofi_tri_plan *plan, struct cofi_tri_cpu_sizes *s,
                        size_t *payload)
{
    const bool has_backward = !plan->params.forward_only;
    const int item = cofi_elem_bytes(plan->elem), wide = cofi_elem_bytes(plan->wide);
    const int64_t b = plan->params.n_batch, own = max_features(plan), h = plan->params.hidden;
    size_t at = 0;
    s->bytes[COFI_TRI_AB] = (size_t)(2 * own * b * plane_bytes(plan, item));
    s->bytes[COFI_TRI_TRI] = (size_t)(h * b * block_bytes(plan, wide));
    if (has_backward) {
        s->bytes[COFI_TRI_DTRI] = (size_t)(own * b * plane_bytes(plan, wide));
        s->bytes[COFI_TRI_DAB] = (size_t)(2 * h * b * block_bytes(plan, (int)sizeof(float)));
    }
    for (int e = 0; e < COFI_TRI_EXCHANGES; e++) {
        s->offset[e] = at;
        at += cofi_round_up(s->bytes[e], COFI_LINE);
    }
    s->hash_offset = at;
    at += (size_t)plan->n_ranks * HASH_BYTES;
    if (has_backward && plan->params.reduce_param_grads) {
        s->max_share = divide_up(s->n_grads, plan->n_ranks);
        s->parts_offset = at;
        at += cofi_round_up((size_t)(s->max_share * plan->n_ranks) * sizeof(float), COFI_LINE);
        s->sums_offset = at;
        at += cofi_round_up((size_t)s->n_grads * sizeof(float), COFI_LINE);
    }
    *payload = at;
}

static float *take_floats(float *base, int64_t *used, int64_t n)
{
    float *at = base ? base + *used : NULL;
    *used += round_up(n, COFI_LINE / (int64_t)sizeof(float));
    return at;
}

int64_t cofi_tri_cpu_grads_at(const struct cofi_tri_plan *plan,
                              const struct cofi_tri_cpu_sizes *s, float *base,
                              struct cofi_tri_cpu_grads *g)
{
    const int64_t d = plan->params.dim, h = plan->params.hidden, rows = s->n_blocks * 4 * s->block;
    int64_t used = 0;
    g->in = take_floats(base, &used, rows * d);
    g->in_bias = take_floats(base, &used, rows);
    g->out_t = take_floats(base, &used, h * d);
    g->gate = take_floats(base, &used, d * d);
    g->out_bias = take_floats(base, &used, d);
    g->gate_bias = take_floats(base, &used, d);
    for (int i = 0; i < 2; i++) {
        g->norm_in[i] = take_floats(base, &used, d);
        g->norm_out[i] = take_floats(base, &used, h);
    }
    return used;
}

static char *take(char *base, size_t *used, size_t bytes)
{
    char *at = base && bytes ? base + *used : NULL;
    *used += cofi_round_up(bytes, COFI_LINE);
    return at;
}

static float *take_vector(char *base, size_t *used, int64_t n)
{
    return (float *)(void *)take(base, used, (size_t)n * sizeof(float));
}

/* Bytes; base = NULL: only counts them. */
static size_t weights_at(const struct cofi_tri_plan *plan, const struct cofi_tri_cpu_sizes *s,
                         char *base, struct cofi_tri_cpu_weights *w)
{
    const int64_t d = plan->params.dim, h = plan->params.hidden, rows = s->n_blocks * 4 * s->block;
    size_t used = 0;
    w->in = take(base, &used, (size_t)(rows * d) * sizeof(float));
    w->in_bias = take_vector(base, &used, rows);
    w->out_t = take(base, &used, (size_t)(h * d) * sizeof(float));
    w->gate = take(base, &used, (size_t)(d * d) * sizeof(float));
    w->out_bias = take_vector(base, &used, d);
    w->gate_bias = take_vector(base, &used, d);
    for (int i = 0; i < 2; i++) {
        w->norm_in[i] = take_vector(base, &used, d);
        w->norm_out[i] = take_vector(base, &used, h);
    }
    return used;
}

static void set_local(const struct cofi_tri_plan *plan, struct cofi_tri_cpu_sizes *s)
{
    const cof_trimul_params *p = &plan->params;
    const bool has_backward = !p->forward_only;
    const int item = cofi_elem_bytes(plan->elem), wide = cofi_elem_bytes(plan->wide);
    struct cofi_tri_cpu_weights w;
    s->weights = weights_at(plan, s, NULL, &w);
    if (is_staged(plan)) {
        const int64_t own = max_features(plan) * plan->n_ranks * p->n_batch;
        const int64_t ab = 2 * block_bytes(plan, item), tri = block_bytes(plan, wide);
        const int64_t dab = 2 * block_bytes(plan, (int)sizeof(float)); /* more than either */
        s->staging = (size_t)(own * (has_backward ? dab : ab > tri ? ab : tri));
    }
    if (has_backward) {
        s->stash = (size_t)(p->n_batch * max_part(plan, 0) * max_part(plan, 1) * p->dim * wide);
        s->slices = (size_t)(s->n_slices * s->slice_floats) * sizeof(float);
        s->grads = (size_t)s->n_grads * sizeof(float);
    }
}

static int64_t count_grads(const cof_trimul_params *p)
{
    int64_t n = 0, shape[2];
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++) {
        cofi_tri_weight_shape(p, i, shape);
        n += shape[0] * shape[1];
    }
    return n;
}

static struct cofi_tri_cpu_sizes sizes_of(const struct cofi_tri_plan *plan, size_t *payload)
{
    const cof_trimul_params *p = &plan->params;
    struct cofi_tri_cpu_sizes s = {0};
    struct cofi_tri_cpu_grads g;
    s.block = clamp(round_up(p->hidden, COFI_TRI_GROUP), COFI_TRI_GROUP, BLOCK_FEATURES);
    s.n_blocks = divide_up(p->hidden, s.block);
    const int64_t token_floats = 6 * p->dim + 3 * p->hidden + 6 * s.block;
    s.max_tokens = clamp(TILE_BYTES / (int64_t)sizeof(float) / token_floats / 8 * 8, 8, MAX_TOKENS);
    s.n_grads = count_grads(p);
    s.slice_floats = cofi_tri_cpu_grads_at(plan, &s, NULL, &g);
    s.n_slices = (int)clamp(SLICES_BYTES / (int64_t)sizeof(float) / s.slice_floats, MIN_SLICES,
                            MAX_SLICES);
    set_chunks(plan, &s);
    set_regions(plan, &s, payload);
    set_local(plan, &s);
    return s;
}

cof_status cofi_tri_cpu_lay_out(struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_sizes s = sizes_of(plan, &plan->payload_bytes);
    plan->n_purposes = s.n_chunks + COFI_TRI_WORDS;
    plan->acks = 0;
    plan->saved_bytes = plan->params.save == COF_TRIMUL_SAVE_NONE
                            ? 0
                            : cofi_round_up(s.bytes[COFI_TRI_AB], COFI_LINE) +
                                  cofi_round_up(s.bytes[COFI_TRI_TRI], COFI_LINE);
    plan->local_bytes = sizeof(struct cofi_tri_cpu_state) + s.weights +
                        cofi_round_up(s.staging, COFI_LINE) + cofi_round_up(s.stash, COFI_LINE) +
                        cofi_round_up(s.slices, COFI_LINE) + cofi_round_up(s.grads, COFI_LINE) +
                        cofi_round_up((size_t)(COFI_TRI_EXCHANGES * plan->n_ranks) *
                                          sizeof(struct cofi_tri_port), COFI_LINE);
    return COF_OK;
}

void cofi_tri_cpu_describe(const struct cofi_tri_plan *plan, char *text, size_t bytes)
{
    size_t payload;
    struct cofi_tri_cpu_sizes s = sizes_of(plan, &payload);
    snprintf(text, bytes, "chunk=%lld chunks=%d slices=%d isa=%s gemm=%s", (long long)s.chunk,
             s.n_chunks, s.n_slices, cofi_isa_name(cofi_isa()), cofi_gemm_name());
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* A block is computed before the first chunk that has a feature of it. */
static void set_rounds(const struct cofi_tri_plan *plan, struct cofi_tri_cpu_state *st)
{
    const struct cofi_tri_cpu_sizes *s = &st->sizes;
    const int64_t h = plan->params.hidden;
    for (int64_t k = 0; k < s->n_blocks; k++)
        st->round[k] = COFI_TRI_MAX_CHUNKS;
    for (int r = 0; r < plan->n_ranks; r++) {
        const int64_t begin = cofi_tri_first_feature(h, r, plan->n_ranks);
        const int64_t end = cofi_tri_first_feature(h, r + 1, plan->n_ranks);
        for (int64_t f = begin; f < end; f += COFI_TRI_GROUP) {
            const int64_t k = f / s->block;
            const uint16_t chunk = (uint16_t)((f - begin) / s->chunk);
            st->owner[f / COFI_TRI_GROUP] = (uint16_t)r;
            st->round[k] = chunk < st->round[k] ? chunk : st->round[k];
        }
    }
}

cof_status cofi_tri_cpu_open(struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st;
    size_t used = 0, payload, bytes = cofi_round_up(plan->local_bytes, COFI_LINE);
    COF_FAIL_IF(plan->n_ranks > UINT16_MAX, COF_ERR_UNSUPPORTED, "team: %d ranks, wanted %d",
                plan->n_ranks, UINT16_MAX);
    COF_TRY(cofi_memory_check(bytes));
    st = aligned_alloc(COFI_LINE, bytes);
    COF_FAIL_IF(!st, COF_ERR_NOMEM, "trimul plan: no memory for %zu bytes", bytes);
    memset(st, 0, sizeof *st);
    st->sizes = sizes_of(plan, &payload);
    st->type = plan->elem == COFI_ELEM_BF16 && cofi_gemm_has(COFI_GEMM_BF16) ? COFI_GEMM_BF16
                                                                             : COFI_GEMM_F32;
    st->type_bytes = st->type == COFI_GEMM_BF16 ? 2 : 4;
    st->is_staged = is_staged(plan);
    used = weights_at(plan, &st->sizes, st->memory, &st->weights);
    st->staging = take(st->memory, &used, st->sizes.staging);
    st->stash = take(st->memory, &used, st->sizes.stash);
    st->slices = (float *)(void *)take(st->memory, &used, st->sizes.slices);
    st->grads = (float *)(void *)take(st->memory, &used, st->sizes.grads);
    st->ports = (struct cofi_tri_port *)(void *)take(
        st->memory, &used,
        (size_t)(COFI_TRI_EXCHANGES * plan->n_ranks) * sizeof(struct cofi_tri_port));
    set_rounds(plan, st);
    plan->state = st;
    return COF_OK;
}

void cofi_tri_cpu_close(struct cofi_tri_plan *plan)
{
    free(plan->state);
}
