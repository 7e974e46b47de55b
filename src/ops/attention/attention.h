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

/* Which keys a query sees. */
struct cofi_sight {
    cof_mask mask;
    bool has_window;
    cof_window window;
};

/* A part of one rank's query rows against a part of one owner's key rows, all local row numbers. */
struct cofi_pair {
    int64_t q_begin, q_rows, k_begin, k_rows;
    struct cofi_band band;
};

#define COFI_MAX_PAIRS 4

/* The pairs of `rank`'s queries and `owner`'s keys that can be seen, neighbours merged. */
int cofi_attention_pairs(const cof_layout *layout, const struct cofi_sight *sight, int rank,
                         int owner, struct cofi_pair *pairs_out);

/* The same of own keys, for results that are merged: the first *n_first have every row in one of
 * them, with itself; the others are added. */
int cofi_attention_own_pairs(const cof_layout *layout, const struct cofi_sight *sight, int rank,
                             struct cofi_pair *pairs_out, int *n_first);

/* The band of rows that begin at these global ones; without limits where every query sees every
 * key. */
struct cofi_band cofi_attention_band(const cof_layout *layout, const struct cofi_sight *sight,
                                     int64_t q_start, int64_t q_rows, int64_t k_start,
                                     int64_t k_rows);
/* Global keys [*begin, *end) that some of these global query rows see. */
void cofi_attention_keys_of(const cof_layout *layout, const struct cofi_sight *sight,
                            int64_t q_start, int64_t q_rows, int64_t *begin, int64_t *end);

struct cofi_rows_range {
    int64_t begin, end;
};

/* The owner's local rows that `rank` needs, in up to two ranges, in order: those that travel. */
int cofi_attention_needed(const cof_layout *layout, const struct cofi_sight *sight, int rank,
                          int owner, struct cofi_rows_range rows_out[2]);
/* From the first to the last of them: what it contributes a gradient to, zero where it has none.
 * Empty (0, 0) when it needs none. */
void cofi_attention_needed_rows(const cof_layout *layout, const struct cofi_sight *sight, int rank,
                                int owner, int64_t *begin, int64_t *end);

struct cofi_attention_plan;
struct cofi_attention_call;

/* Parts of a forward call on a device, for benches; a call has all. */
enum {
    COFI_PART_TRANSFER = 1, /* what moves keys between ranks, with its waits and signals */
    COFI_PART_SECTIONS = 2,
    COFI_PART_MERGES = 4,
    COFI_PART_ALL = 7
};

/* What the devices do, each in its own way. */
struct cofi_attention_backend {
    const char *name; /* "cpu", "cuda" */
    /* COF_ERR_UNSUPPORTED for what only the other one can; NULL: takes all. */
    cof_status (*check)(const struct cofi_attention_plan *plan);
    int64_t gather_max_rows; /* sequences that the default schedule gathers */
    /* symmetric_bytes, local_bytes, saved_bytes; nothing is allocated. COF_ERR_NOMEM. */
    cof_status (*lay_out)(struct cofi_attention_plan *plan);
    /* Words for the describe line. */
    void (*describe)(const struct cofi_attention_plan *plan, char *text, size_t bytes);
    /* Local: memory, streams, kernels; the plan is bound to its arena. */
    cof_status (*open)(struct cofi_attention_plan *plan);
    void (*close)(struct cofi_attention_plan *plan); /* of a half-opened one too */
    cof_status (*run)(struct cofi_attention_plan *plan, const struct cofi_attention_call *call,
                      bool backward, cof_stream stream);
    /* COFI_PART_.. bits of a forward call; NULL: it has no parts. */
    cof_status (*run_parts)(struct cofi_attention_plan *plan,
                            const struct cofi_attention_call *call, int parts, cof_stream stream);
};

extern const struct cofi_attention_backend cofi_attention_cpu;
/* NULL in a build without CUDA. */
const struct cofi_attention_backend *cofi_attention_cuda(void);

struct cofi_attention_plan {
    struct cof_plan base;
    cof_attention_params params; /* defaults filled in */
    const struct cofi_attention_backend *backend;
    cof_layout layout;
    struct cofi_sight sight;
    int rank, n_ranks;
    struct cofi_attention_dims dims;
    int64_t local_rows; /* of this rank */
    int64_t max_rows;   /* over the ranks */
    size_t symmetric_bytes, local_bytes, saved_bytes; /* lay_out's */
    struct cofi_binding binding;
    uint64_t n_empty; /* calls without a row on any rank */
    struct cofi_kv_buffer published; /* this rank's K, V, in the arena; not in CUDA's ring */

    /* The CPU's. */
    struct cofi_cpu_stream *comm;      /* fetches, and sums of returned gradients */
    struct cofi_kv_buffer staging[2];  /* fetched K, V; save_kv: how they lie in saved_kv */
    size_t kept_bytes;                 /* of one such buffer */
    struct cofi_grad_exchange home;    /* of returned gradients */
    struct cofi_attention_state state; /* forward */
    struct cofi_attention_grad_state grad;
    void *memory;                      /* one block behind all local pointers */

    void *device; /* CUDA's: struct cofi_attention_device */
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

/* K and V of `rows` rows, of the plan's dims. */
static inline struct cofi_kv_buffer cofi_attention_take_kv(const struct cofi_attention_plan *plan,
                                                           char *base, size_t *used, int64_t rows,
                                                           enum cofi_elem elem)
{
    const struct cofi_attention_dims *d = &plan->dims;
    int64_t heads = d->n_batch * d->n_kv_heads;
    int64_t row_elements[2] = {heads * d->dim_qk, heads * d->dim_v};
    return cofi_kv_take(base, used, rows, row_elements, elem);
}

/* attention.c: checks the arguments of a call. */
cof_status cofi_attention_read_call(const struct cofi_attention_plan *plan,
                                    const cof_attention_args *args, bool backward,
                                    struct cofi_attention_call *call_out);

/* attention_calls.c: enqueues one call on the CPU. */
cof_status cofi_attention_enqueue(struct cofi_attention_plan *plan,
                                  const struct cofi_attention_call *call, bool backward,
                                  struct cofi_cpu_stream *stream);

#endif
