/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The attention engine of the CPU: one call computes one section, that is, some of this rank's
 * query rows against some rows of one owner's keys, and adds to running fp32 state.
 *
 * Forward, per query row (online softmax, unnormalised):
 *     m' = max(m, max_j scale*s_j);  l' = l*exp(m-m') + sum_j exp(scale*s_j - m');
 *     acc' = acc*exp(m-m') + sum_j exp(scale*s_j - m') v_j
 * and at the end o = acc / l, lse = m + log l (o = 0, lse = -inf when no key was visible).
 * A row with l = 0 has m = -inf, and keeps it through a section that shows it no key.
 *
 * Backward, with the merged lse and delta = rowsum(dout * o):
 *     p_ij  = exp(scale*s_ij - lse_i)   (0 where lse_i = -inf)
 *     ds_ij = p_ij * (dout_i . v_j - delta_i) * scale
 *     dq_i += ds_ij k_j;   dk_j += ds_ij q_i;   dv_j += p_ij dout_i */
#ifndef COFI_ATTENTION_CPU_H
#define COFI_ATTENTION_CPU_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/cpu/cpu_stream.h"
#include "core/tensor.h"

/* A [batch, row, head, dim] view of any strides but a contiguous dim; strides in elements. */
struct cofi_attention_view {
    void *data; /* row 0 of the view */
    int64_t batch_stride, row_stride, head_stride;
};

/* Sizes that a plan fixes. */
struct cofi_attention_dims {
    int64_t n_batch, n_heads, n_kv_heads; /* n_heads is a multiple of n_kv_heads */
    int64_t dim_qk, dim_v;                /* 1 .. 512 */
    enum cofi_elem elem;                  /* of q, k, v, o and the gradients */
    float scale;
};

/* Key j is visible to query i  <=>  i + diag - left <= j <= i + diag + right, i and j counted from
 * the first row of the section. INT64_MAX for left or right means no limit on that side. */
struct cofi_band {
    int64_t diag, left, right;
};

/* Running state of all local query rows: acc [B, H, rows, dim_v], m and l [B, H, rows]. */
struct cofi_attention_state {
    float *acc, *m, *l;
    int64_t n_rows; /* rows of the whole state (the stride between heads) */
};

struct cofi_attention_section {
    const struct cofi_attention_dims *dims;
    int64_t q_begin, q_rows;   /* local query rows q_begin .. q_begin + q_rows - 1 */
    int64_t k_begin, k_rows;   /* rows of the k and v views */
    struct cofi_band band;     /* i = row - q_begin, j = row - k_begin */
    struct cofi_attention_view q, k, v;
};

/* All functions run on a stream's dispatcher and return when the work is done. */

/* acc = 0, l = 0, m = -inf for all rows. */
void cofi_attention_cpu_begin(struct cofi_cpu_stream *stream,
                              const struct cofi_attention_dims *dims,
                              const struct cofi_attention_state *state);
cof_status cofi_attention_cpu_forward(struct cofi_cpu_stream *stream,
                                      const struct cofi_attention_section *section,
                                      const struct cofi_attention_state *state);
/* o (type of the plan) and lse [B, H, rows] fp32 with the given strides from the state. */
void cofi_attention_cpu_finish(struct cofi_cpu_stream *stream,
                               const struct cofi_attention_dims *dims,
                               const struct cofi_attention_state *state,
                               const struct cofi_attention_view *o, float *lse,
                               int64_t lse_batch_stride, int64_t lse_head_stride);

/* Gradient state: delta and lse [B, H, n_q_rows], dq [B, H, n_q_rows, dim_qk], and the partial of
 * the owner in hand, per query head: dk [B, H, n_k_rows, dim_qk], dv [B, H, n_k_rows, dim_v]. */
struct cofi_attention_grad_state {
    float *delta, *lse, *dq, *dk, *dv;
    int64_t n_q_rows, n_k_rows;
};

/* delta = rowsum(dout * o), lse copied in, dq = 0. */
void cofi_attention_cpu_grad_begin(struct cofi_cpu_stream *stream,
                                   const struct cofi_attention_dims *dims,
                                   const struct cofi_attention_grad_state *state,
                                   const struct cofi_attention_view *o,
                                   const struct cofi_attention_view *dout, const float *lse,
                                   int64_t lse_batch_stride, int64_t lse_head_stride);
/* dk = 0 and dv = 0 for rows 0 .. n_rows-1 of the partial. */
void cofi_attention_cpu_partial_begin(struct cofi_cpu_stream *stream,
                                      const struct cofi_attention_dims *dims,
                                      const struct cofi_attention_grad_state *state,
                                      int64_t n_rows);
cof_status cofi_attention_cpu_backward(struct cofi_cpu_stream *stream,
                                       const struct cofi_attention_section *section,
                                       const struct cofi_attention_view *dout,
                                       const struct cofi_attention_grad_state *state);
/* The partial's rows row_begin .. row_begin+n_rows-1, summed over the query heads of each kv head
 * in head order, plus (when not NULL) acc_k and acc_v [n_rows, B, Hkv, dim] fp32, whose row 0
 * is row_begin too, rounded once to the plan's type (or kept fp32 when `wire_f32`) and stored into
 * the views, whose row 0 is row_begin. acc comes first in the sum. */
void cofi_attention_cpu_partial_store(struct cofi_cpu_stream *stream,
                                      const struct cofi_attention_dims *dims,
                                      const struct cofi_attention_grad_state *state,
                                      int64_t row_begin, int64_t n_rows, const float *acc_k,
                                      const float *acc_v, bool wire_f32,
                                      const struct cofi_attention_view *dk,
                                      const struct cofi_attention_view *dv);
/* dq of all rows, rounded once to the plan's type. */
void cofi_attention_cpu_dq_store(struct cofi_cpu_stream *stream,
                                 const struct cofi_attention_dims *dims,
                                 const struct cofi_attention_grad_state *state,
                                 const struct cofi_attention_view *dq);

#endif
