/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What attention is compared with, on whole (global) tensors, serially:
 *
 *   reference   fp64 throughout: attention_ref.c is the contract in code, attention_ref_fast.c the
 *               same at speed
 *   plain       unblocked, of the tensors' own type: scores, probabilities, score gradients and
 *               results rounded to it, sums in fp32; its error is the yardstick (attention_plain.c)
 *
 * The fast ones come in pieces, a range of rows of one head each, so that ranks and threads share
 * the work and large problems are sampled: all of `forward`, then `dq` and `dkv` in any order.
 * Compiled into the program and the tests, never into the library. */
#ifndef COFI_ATTENTION_REF_H
#define COFI_ATTENTION_REF_H

#include "cofuse/layout.h"
#include "cofuse/status.h"
#include "ops/attention/attention_cpu.h"

/* Rows computed side by side: pieces of a multiple of it, from a multiple of it, waste nothing. */
enum { COFI_ATTENTION_REF_LANES = 16 };

struct cofi_attention_problem {
    int64_t n_batch, n_rows, n_heads, n_kv_heads, dim_qk, dim_v;
    cof_mask mask;
    bool has_window;
    cof_window window;
    double scale; /* the one in force: 0 is 0 here */
    enum cofi_elem elem;
    /* [B, S, H, D] views: q and dout of H heads, k and v of Hkv. dout.data NULL: forward only. */
    struct cofi_attention_view q, k, v, dout;
};

/* Keys that a query sees: [begin, end). window: NULL for none. */
struct cofi_attention_keys {
    int64_t begin, end;
};

static inline struct cofi_attention_keys cofi_attention_keys(cof_mask mask,
                                                             const cof_window *window,
                                                             int64_t n_rows, int64_t query)
{
    struct cofi_attention_keys keys = {0, mask == COF_MASK_CAUSAL ? query + 1 : n_rows};
    if (window && window->left >= 0 && window->left < query)
        keys.begin = query - window->left;
    if (window && window->right >= 0 && window->right < keys.end - 1 - query)
        keys.end = query + window->right + 1;
    return keys;
}

static inline struct cofi_attention_keys
cofi_attention_problem_keys(const struct cofi_attention_problem *p, int64_t query)
{
    return cofi_attention_keys(p->mask, p->has_window ? &p->window : NULL, p->n_rows, query);
}

/* Results, compact: o [B, H, S, Dv], lse and delta [B, H, S], dq [B, H, S, Dqk],
 * dk [B, Hkv, S, Dqk], dv [B, Hkv, S, Dv]. delta = rowsum(dout * o) leads from forward to backward;
 * it and the gradients are unused without dout. */
struct cofi_attention_ref {
    double *o, *lse, *delta, *dq, *dk, *dv;
};

/* The same; values are exact in the tensors' type (lse and delta: fp32). */
struct cofi_attention_plain {
    float *o, *lse, *delta, *dq, *dk, *dv;
};

/* The whole problem by the formulas; with dout the gradients too. */
void cofi_attention_ref(const struct cofi_attention_problem *problem,
                        const struct cofi_attention_ref *ref);

/* Rows row_begin .. row_end-1 of one batch entry and one query head (dkv: key rows of one kv head).
 * dq and dkv read lse and delta (dq: of its rows; dkv: of every query row that sees its keys).
 * COF_ERR_NOMEM. */
cof_status cofi_attention_ref_forward(const struct cofi_attention_problem *problem,
                                      const struct cofi_attention_ref *ref, int64_t batch,
                                      int64_t head, int64_t row_begin, int64_t row_end);
cof_status cofi_attention_ref_dq(const struct cofi_attention_problem *problem,
                                 const struct cofi_attention_ref *ref, int64_t batch, int64_t head,
                                 int64_t row_begin, int64_t row_end);
cof_status cofi_attention_ref_dkv(const struct cofi_attention_problem *problem,
                                  const struct cofi_attention_ref *ref, int64_t batch,
                                  int64_t kv_head, int64_t row_begin, int64_t row_end);

cof_status cofi_attention_plain_forward(const struct cofi_attention_problem *problem,
                                        const struct cofi_attention_plain *plain, int64_t batch,
                                        int64_t head, int64_t row_begin, int64_t row_end);
cof_status cofi_attention_plain_dq(const struct cofi_attention_problem *problem,
                                   const struct cofi_attention_plain *plain, int64_t batch,
                                   int64_t head, int64_t row_begin, int64_t row_end);
cof_status cofi_attention_plain_dkv(const struct cofi_attention_problem *problem,
                                    const struct cofi_attention_plain *plain, int64_t batch,
                                    int64_t kv_head, int64_t row_begin, int64_t row_end);

/* The whole problem on this thread; with dout the gradients too. */
cof_status cofi_attention_ref_all(const struct cofi_attention_problem *problem,
                                  const struct cofi_attention_ref *ref);
cof_status cofi_attention_plain_all(const struct cofi_attention_problem *problem,
                                    const struct cofi_attention_plain *plain);

#endif
