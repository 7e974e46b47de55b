/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Context-parallel attention from the inside: plan, sections, schedule. */
#ifndef COFI_ATTENTION_H
#define COFI_ATTENTION_H

#include "cofuse/attention.h"
#include "ops/attention/attention_cpu.h"
#include "ops/grad_return/grad_return_exchange.h"
#include "ops/plan.h"

/* Signal words, per writer. */
enum { COFI_KV_READY, COFI_KV_ACK, COFI_GRAD_READY, COFI_GRAD_ACK, COFI_ATTENTION_PURPOSES };
#define COFI_ATTENTION_ACKS (1u << COFI_KV_ACK | 1u << COFI_GRAD_ACK)

/* Last-use epochs: the last call that published, this and the last backward call. */
enum { COFI_KV_MARK, COFI_GRAD_MARK, COFI_PREV_GRAD_MARK };

/* A part of one rank's query rows against a part of one owner's key rows, all local row numbers. */
struct cofi_pair {
    int64_t q_begin, q_rows, k_begin, k_rows;
    struct cofi_band band;
};

#define COFI_MAX_PAIRS 4

/* The pairs of `rank`'s queries and `owner`'s keys that the mask leaves, neighbours merged. */
int cofi_attention_pairs(const cof_layout *layout, cof_mask mask, int rank, int owner,
                         struct cofi_pair *pairs_out);

/* The owner's local rows that `rank` needs, [*begin, *end): what it fetches, and what it
 * contributes a gradient to. Empty (0, 0) when it needs none. */
void cofi_attention_needed_rows(const cof_layout *layout, cof_mask mask, int rank, int owner,
                                int64_t *begin, int64_t *end);

struct cofi_attention_plan {
    struct cof_plan base;
    cof_attention_params params; /* defaults filled in */
    cof_layout layout;
    int rank, n_ranks;
    struct cofi_attention_dims dims;
    int64_t local_rows; /* of this rank */
    int64_t max_rows;   /* over the ranks */
    struct cofi_binding binding;
    uint64_t n_empty;             /* calls without a row on any rank */
    struct cofi_cpu_stream *comm; /* fetches, and sums of returned gradients */

    struct cofi_kv_buffer published;   /* this rank's K, V, in the arena */
    struct cofi_kv_buffer staging[2];  /* fetched K, V; save_kv: how they lie in saved_kv */
    size_t kept_bytes, saved_bytes;    /* of one such buffer; of a saved_kv */
    struct cofi_grad_exchange home;    /* of returned gradients */
    struct cofi_attention_state state; /* forward */
    struct cofi_attention_grad_state grad;
    void *memory;                      /* one block behind all local pointers */
};

/* One call's tensors, by value. */
struct cofi_attention_call {
    struct cofi_attention_view q, k, v, o, dout, dq, dk, dv;
    float *lse;
    int64_t lse_batch_stride, lse_head_stride;
    void *saved_kv;
};

/* One rank has nothing to gather. */
static inline bool cofi_attention_gathers(const struct cofi_attention_plan *plan)
{
    return plan->params.schedule == COF_SCHEDULE_GATHER && plan->n_ranks > 1;
}

/* attention_calls.c: enqueues one call. */
cof_status cofi_attention_enqueue(struct cofi_attention_plan *plan,
                                  const struct cofi_attention_call *call, bool backward,
                                  struct cofi_cpu_stream *stream);

#endif
