/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The tensors of one grad_return call in fp32, compact. Values are small integers that follow from
 * their place, so that any rank knows the sums, exactly and in any order. */
#ifndef COFUSE_TEST_GRAD_RETURN_H
#define COFUSE_TEST_GRAD_RETURN_H

#include <math.h>
#include <stdbool.h>

#include "test.h"

enum { TEST_GR_RANKS = 8 };

struct test_gr {
    cof_grad_return_params params;
    cof_layout layout;
    int rank, n_ranks, n_sections, seed;
    int64_t rows; /* local */
    cof_shape in_shape[TEST_GR_RANKS][2], out_shape[2];
    cof_tensor in[TEST_GR_RANKS][2], out[2]; /* dk, dv; of `in` by section */
    cof_grad_return_args args;               /* of the last section */
};

static inline cof_grad_return_params test_gr_params(int64_t n_rows)
{
    cof_grad_return_params p = COF_GRAD_RETURN_PARAMS_INIT;
    p.dtype = COF_F32;
    p.n_batch = 2;
    p.n_rows = n_rows;
    p.n_heads = 2;
    p.head_dim_k = 8;
    p.head_dim_v = 5;
    return p;
}

static inline int test_gr_owner(const struct test_gr *t, int section)
{
    return (t->rank - section - 1 + 2 * t->n_ranks) % t->n_ranks;
}

static inline int64_t test_gr_row_elements(const struct test_gr *t, int is_v)
{
    const cof_grad_return_params *p = &t->params;
    return p->n_batch * p->n_heads * (is_v ? p->head_dim_v : p->head_dim_k);
}

static inline float test_gr_value(int seed, int writer, int is_v, int64_t global, int64_t at)
{
    return (float)((31 * writer + 17 * seed + 7 * is_v + 5 * global + at) % 23 - 11);
}

static inline void test_gr_fill(struct test_gr *t, int section, int is_v)
{
    int64_t n = test_gr_row_elements(t, is_v);
    float *to = t->in[section][is_v].data;
    for (int64_t row = 0; row < t->in_shape[section][is_v].dim[0]; row++) {
        int64_t global = row;
        if (t->params.by_section)
            global = cof_layout_global_row(&t->layout, test_gr_owner(t, section), row);
        for (int64_t at = 0; at < n; at++) /* padding is not looked at */
            to[row * n + at] = global < 0 ? NAN
                                          : test_gr_value(t->seed, t->rank, is_v, global, at);
    }
}

static inline void test_gr_poison(struct test_gr *t)
{
    for (int is_v = 0; is_v < 2; is_v++)
        memset(t->out[is_v].data, 0x5a,
               (size_t)(t->rows * test_gr_row_elements(t, is_v)) * sizeof(float));
}

static inline void test_gr_make(struct test_gr *t, const cof_grad_return_params *p, int rank,
                                int n_ranks, int seed)
{
    *t = (struct test_gr){.params = *p, .rank = rank, .n_ranks = n_ranks, .seed = seed,
                          .layout = {p->layout, p->chunking, n_ranks, p->n_rows},
                          .n_sections = p->by_section ? n_ranks : 1};
    t->rows = cof_layout_local_rows(&t->layout, rank);
    for (int is_v = 0; is_v < 2; is_v++) {
        int64_t dim = is_v ? p->head_dim_v : p->head_dim_k;
        for (int s = 0; s < t->n_sections; s++) {
            int64_t rows = p->by_section
                               ? cof_layout_local_rows(&t->layout, test_gr_owner(t, s))
                               : p->n_rows;
            t->in_shape[s][is_v] = (cof_shape){{rows, p->n_batch, p->n_heads, dim}};
            t->in[s][is_v] = test_tensor(COF_F32, 4, &t->in_shape[s][is_v], 1);
            test_gr_fill(t, s, is_v);
        }
        t->out_shape[is_v] = (cof_shape){{t->rows, p->n_batch, p->n_heads, dim}};
        t->out[is_v] = test_tensor(COF_F32, 4, &t->out_shape[is_v], 1);
    }
    test_gr_poison(t);
    t->args = (cof_grad_return_args){.size = sizeof t->args, .dk = &t->in[t->n_sections - 1][0],
                                     .dv = &t->in[t->n_sections - 1][1], .dk_out = &t->out[0],
                                     .dv_out = &t->out[1]};
}

static inline void test_gr_free(struct test_gr *t)
{
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int s = 0; s < t->n_sections; s++)
            free(t->in[s][is_v].data);
        free(t->out[is_v].data);
    }
}

/* A whole: one run, or one for every section; the first error ends it. */
static inline cof_status test_gr_run(cof_plan *plan, const struct test_gr *t, cof_stream stream)
{
    cof_status status = COF_OK;
    for (int s = 0; s < t->n_sections && status == COF_OK; s++) {
        cof_grad_return_args args = t->args;
        args.dk = &t->in[s][0];
        args.dv = &t->in[s][1];
        args.dk_out = s == t->n_sections - 1 ? t->args.dk_out : NULL;
        args.dv_out = s == t->n_sections - 1 ? t->args.dv_out : NULL;
        status = cof_grad_return_run(plan, &args, stream);
    }
    return status;
}

static inline bool test_gr_contributes(const struct test_gr *t, int writer, int64_t global)
{
    int64_t local = cof_layout_local_row(&t->layout, global);
    int owner = cof_layout_owner(&t->layout, global);
    int half = cof_layout_halves(&t->layout) == 2 &&
               local >= cof_layout_half_start(&t->layout, owner, 1);
    int64_t chunk = cof_layout_chunk(&t->layout, owner, half);
    if (t->args.writers == COF_WRITERS_CAUSAL)
        return cof_layout_needs(&t->layout, COF_MASK_CAUSAL, writer, chunk);
    return t->args.writers == COF_WRITERS_ALL || (t->args.writer_table[chunk] >> writer & 1) != 0;
}

/* How many elements of the outputs are not the sums. */
static inline int64_t test_gr_wrong(const struct test_gr *t)
{
    int64_t n_wrong = 0;
    for (int is_v = 0; is_v < 2; is_v++)
        for (int64_t row = 0, n = test_gr_row_elements(t, is_v); row < t->rows; row++)
            for (int64_t at = 0; at < n; at++) {
                int64_t global = cof_layout_global_row(&t->layout, t->rank, row);
                float want = 0;
                for (int w = 0; w < t->n_ranks && global >= 0; w++)
                    if (test_gr_contributes(t, w, global))
                        want += test_gr_value(t->seed, w, is_v, global, at);
                n_wrong += ((float *)t->out[is_v].data)[row * n + at] != want;
            }
    return n_wrong;
}

static inline bool test_gr_all_nan(const struct test_gr *t)
{
    for (int is_v = 0; is_v < 2; is_v++)
        for (int64_t i = 0; i < t->rows * test_gr_row_elements(t, is_v); i++)
            if (!isnan(((float *)t->out[is_v].data)[i]))
                return false;
    return true;
}

/* Nothing was stored since test_gr_poison. */
static inline bool test_gr_untouched(const struct test_gr *t)
{
    for (int is_v = 0; is_v < 2; is_v++)
        for (int64_t i = 0; i < 4 * t->rows * test_gr_row_elements(t, is_v); i++)
            if (((unsigned char *)t->out[is_v].data)[i] != 0x5a)
                return false;
    return true;
}

/* ---- the caller's memory of all ranks, for plans with peers ---- */

struct test_gr_memory {
    void *dk[TEST_GR_RANKS], *dv[TEST_GR_RANKS];
    uint32_t *ready[TEST_GR_RANKS];
    cof_grad_return_peers peers;
};

static inline void test_gr_memory_make(struct test_gr_memory *m, int n_ranks, size_t bytes)
{
    for (int r = 0; r < n_ranks; r++) {
        m->dk[r] = malloc(bytes);
        m->dv[r] = malloc(bytes);
        m->ready[r] = calloc((size_t)n_ranks, sizeof **m->ready);
    }
    m->peers = (cof_grad_return_peers){.size = sizeof m->peers, .n_ranks = n_ranks, .dk = m->dk,
                                       .dv = m->dv, .dk_bytes = bytes, .dv_bytes = bytes,
                                       .ready = m->ready};
}

static inline void test_gr_memory_free(struct test_gr_memory *m, int n_ranks)
{
    for (int r = 0; r < n_ranks; r++) {
        free(m->dk[r]);
        free(m->dv[r]);
        free(m->ready[r]);
    }
}

/* Params with this memory: rows of equal number on all ranks. */
static inline cof_grad_return_params test_gr_peer_params(int64_t n_rows,
                                                         const struct test_gr_memory *m)
{
    cof_grad_return_params p = test_gr_params(n_rows);
    p.chunking = COF_CHUNKING_PADDED;
    p.caller_orders_reuse = COF_CALLER_ORDERS_REUSE;
    p.peers = &m->peers;
    return p;
}

#endif
