/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs: weights, in the form that products take. */
#include <string.h>

#include "core/hash.h"
#include "ops/trimul/trimul_cpu.h"

static enum cofi_elem elem_of(const struct cofi_tri_plan *plan, int idx)
{
    return cofi_tri_is_norm(idx) ? plan->norm_elem : plan->elem;
}

/* n elements of a row, from `col` on, in fp32; an absent vector is `absent`. */
static void load_row(const struct cofi_tri_plan *plan, int idx, int64_t row, int64_t col, int64_t n,
                     float absent, float *dst)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_weights *w = &st->given;
    const enum cofi_elem elem = elem_of(plan, idx);
    if (w->data[idx])
        cofi_vec_load(cofi_vec(), elem, dst,
                      w->data[idx] + row * w->pitch[idx] + col * cofi_elem_bytes(elem), n);
    for (int64_t i = 0; i < n && !w->data[idx]; i++)
        dst[i] = absent;
}

/* In the type of products, as item `at` of a matrix. */
static void store_typed(const struct cofi_tri_cpu_state *st, char *matrix, int64_t at,
                        const float *src, int64_t n)
{
    cofi_vec_store(cofi_vec(), st->type == COFI_GEMM_BF16 ? COFI_ELEM_BF16 : COFI_ELEM_F32,
                   matrix + at * st->type_bytes, src, n);
}

/* Rows of p_in or g_in, half 0 (a) or 1 (b), at their places in the blocks. */
static void take_in(struct cofi_tri_plan *plan, int idx, int half, float *row)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const int64_t d = plan->params.dim, hidden = plan->params.hidden, block = st->sizes.block;
    const int64_t part = (idx == COFI_TRI_G_IN ? 2 : 0) + half;
    for (int64_t h = 0; h < st->sizes.n_blocks * block; h++) {
        const int64_t at = (h / block * 4 + part) * block + h % block;
        memset(row, 0, (size_t)d * sizeof *row);
        st->weights.in_bias[at] = 0;
        if (h < hidden) {
            load_row(plan, idx, half * hidden + h, 0, d, 0, row);
            load_row(plan, idx + 1, 0, half * hidden + h, 1, 0, &st->weights.in_bias[at]);
        }
        store_typed(st, st->weights.in, at * d, row, d);
    }
}

static void take_out(struct cofi_tri_plan *plan, float *row)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const int64_t d = plan->params.dim, hidden = plan->params.hidden;
    for (int64_t i = 0; i < d; i++) {
        load_row(plan, COFI_TRI_P_OUT, i, 0, hidden, 0, row);
        for (int64_t h = 0; h < hidden; h++)
            store_typed(st, st->weights.out_t, h * d + i, row + h, 1);
        load_row(plan, COFI_TRI_G_OUT, i, 0, d, 0, row);
        store_typed(st, st->weights.gate, i * d, row, d);
    }
}

void cofi_tri_cpu_take_weights(struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    struct cofi_tri_cpu_weights *w = &st->weights;
    const int64_t d = plan->params.dim, hidden = plan->params.hidden;
    float row[COFI_TRI_MAX_WIDTH];
    for (int half = 0; half < 2; half++) {
        take_in(plan, COFI_TRI_P_IN, half, row);
        take_in(plan, COFI_TRI_G_IN, half, row);
    }
    take_out(plan, row);
    load_row(plan, COFI_TRI_P_OUT_B, 0, 0, d, 0, w->out_bias);
    load_row(plan, COFI_TRI_G_OUT_B, 0, 0, d, 0, w->gate_bias);
    for (int is_bias = 0; is_bias < 2; is_bias++) {
        load_row(plan, COFI_TRI_NORM_IN_W + is_bias, 0, 0, d, !is_bias, w->norm_in[is_bias]);
        load_row(plan, COFI_TRI_NORM_OUT_W + is_bias, 0, 0, hidden, !is_bias,
                 w->norm_out[is_bias]);
    }
}

uint64_t cofi_tri_cpu_hash_weights(const struct cofi_tri_plan *plan)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    uint64_t hash = COFI_HASH_SEED;
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++) {
        int64_t shape[2];
        cofi_tri_weight_shape(&plan->params, i, shape);
        hash = cofi_hash_u64(hash, st->given.data[i] != NULL);
        for (int64_t row = 0; row < shape[0] && st->given.data[i]; row++)
            hash = cofi_hash(hash, st->given.data[i] + row * st->given.pitch[i],
                             (size_t)(shape[1] * cofi_elem_bytes(elem_of(plan, i))));
    }
    return hash;
}
