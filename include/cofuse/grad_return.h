/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Return of gradients to their owners: a stream-ordered reduce-scatter by rows of a sequence.
 *
 *     out[owner o][i, b, h, d] = sum over writers w of partial[w][global row of (o, i), b, h, d]
 *
 * for dK and dV at once. Every rank is a writer, with a partial for the rows of all owners, and the
 * owner of some rows (layout.h). It is the way home of dK and dV in context-parallel attention.
 *
 * The owner adds in fp32, in the fixed order rank+1, rank+2, ..., rank-1, own last, and rounds
 * once: repeatable bit for bit, and the same bits by push and by pull, staged or not.
 *
 * Letters: P ranks, B batch, S global rows, S_local = cof_layout_local_rows() of an owner, Hkv
 * heads, Dk and Dv head dims.
 */
#ifndef COFUSE_GRAD_RETURN_H
#define COFUSE_GRAD_RETURN_H

#include "layout.h"
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How partials travel. */
typedef enum cof_grad_return_transfer {
    COF_TRANSFER_PUSH = 0, /* the writer stores into one of two receive slots of the owner */
    COF_TRANSFER_PULL = 1  /* the writer publishes its partial, the owner reads: O(S) memory */
} cof_grad_return_transfer;

/**
 * Which writers contribute to which chunk; the same on all ranks of a call.
 *
 * TABLE: n_chunks * ceil(P/64) words; bit w % 64 of word table[chunk * ceil(P/64) + w / 64] says
 * that writer w contributes to the chunk (cof_layout_chunks; the owner's own bit as any other).
 */
typedef enum cof_writers {
    COF_WRITERS_ALL = 0,    /* everyone to everything */
    COF_WRITERS_CAUSAL = 1, /* who sees some key of the chunk under a causal mask */
    COF_WRITERS_TABLE = 2   /* args.writer_table */
} cof_writers;

/**
 * Memory of the caller's, mapped between the ranks, for the form in which the caller orders reuse:
 * dk[o], dv[o] is rank o's receive buffer in this process, [P, S_local, B, Hkv, D] contiguous in
 * dtype, a slot per writer; ready[o] its epoch words, one of 32 bits per writer, ready_stride bytes
 * apart, zero at the beginning. Needs equal S_local on all ranks.
 */
typedef struct cof_grad_return_peers {
    size_t size; /* sizeof(cof_grad_return_peers) */
    int n_ranks;
    void *const *dk;
    void *const *dv;
    size_t dk_bytes, dv_bytes; /* of a rank's buffer, at least what the shape asks */
    uint32_t *const *ready;
    size_t ready_stride; /* a multiple of 4; 0: 4 */
} cof_grad_return_peers;
#ifdef __cplusplus
#define COF_GRAD_RETURN_PEERS_INIT {sizeof(cof_grad_return_peers)}
#else
#define COF_GRAD_RETURN_PEERS_INIT {.size = sizeof(cof_grad_return_peers)}
#endif

/** Parameters of a plan; the same on all ranks. Zero means default. */
typedef struct cof_grad_return_params {
    size_t size;                       /* sizeof(cof_grad_return_params) */
    cof_dtype dtype;                   /* COF_BF16, COF_F16 or COF_F32: outputs, wire */
    int partial_f32;                   /* 1: partials are fp32 instead of dtype */
    int wire_f32;                      /* 1: fp32 on the wire */
    int64_t n_batch;                   /* B >= 1 */
    int64_t n_rows;                    /* S >= 0, global */
    int64_t n_heads;                   /* Hkv >= 1 */
    int64_t head_dim_k;                /* Dk, 1 .. 65536 */
    int64_t head_dim_v;                /* Dv, 1 .. 65536; 0: Dk */
    cof_layout_kind layout;            /* ZIGZAG by default */
    cof_chunking chunking;             /* BALANCED by default */
    cof_grad_return_transfer transfer; /* PUSH by default */
    int by_section;                    /* 1: P calls, one per owner, make a whole; between them no
                                          other plan runs on the same arena (COF_ERR_INVALID) */
    int caller_orders_reuse;           /* 1 (COF_CALLER_ORDERS_REUSE): with `peers`, see below */
    const cof_grad_return_peers *peers; /* not kept; its pointers are */
    int driver_wait; /* CUDA, with `peers`: 1 (COF_DRIVER_WAIT): the driver waits for epoch words,
                        see below */
    int max_ctas;    /* CUDA: blocks a kernel of a call may take, of which it uses at most 128; 0:
                        as many, but for a few that another plan's on another stream find free */
} cof_grad_return_params;
#ifdef __cplusplus
#define COF_GRAD_RETURN_PARAMS_INIT {sizeof(cof_grad_return_params)}
#else
#define COF_GRAD_RETURN_PARAMS_INIT {.size = sizeof(cof_grad_return_params)}
#endif
#define COF_CALLER_ORDERS_REUSE 1
#define COF_DRIVER_WAIT 1

/**
 * Tensors of a call, all local. Strides: any, with a contiguous head dim and no overlap. Outputs
 * lie apart from each other and from the partials.
 *
 *   dk, dv          partials: [S, B, Hkv, D] in global row order; by_section: [S_local of the
 *                   owner, B, Hkv, D] of one owner, owners rank-1, rank-2, ..., rank in this order
 *   dk_out, dv_out  sums: [S_local, B, Hkv, D]; by_section: of the last call of a whole, NULL (or
 *                   left alone) before. Padding rows come out 0.
 */
typedef struct cof_grad_return_args {
    size_t size; /* sizeof(cof_grad_return_args) */
    const cof_tensor *dk, *dv;
    const cof_tensor *dk_out, *dv_out;
    cof_writers writers; /* by_section: the same in all calls of a whole */
    const uint64_t *writer_table;
    uint32_t epoch; /* caller_orders_reuse: 1 .. INT32_MAX, one more each call; else 0 */
} cof_grad_return_args;
#ifdef __cplusplus
#define COF_GRAD_RETURN_ARGS_INIT {sizeof(cof_grad_return_args)}
#else
#define COF_GRAD_RETURN_ARGS_INIT {.size = sizeof(cof_grad_return_args)}
#endif

/**
 * The memory a plan would hold. Local, allocates nothing.
 * COF_ERR_INVALID or COF_ERR_UNSUPPORTED: a parameter breaks its rule (named in the text).
 */
COF_API cof_status cof_grad_return_workspace(cof_team *team, const cof_grad_return_params *params,
                                             cof_workspace_sizes *sizes_out);

/**
 * Makes a plan. Collective over the team. `arena` as in cof_attention_plan_create; NULL with
 * `peers`.
 *
 * caller_orders_reuse: receive buffers and epoch words are the caller's, with one slot per writer.
 * There are no acknowledgements, digests or poison: the caller makes sure that no rank starts epoch
 * e+1 before every rank has finished e, and that all ranks pass the same writers. A wait has the
 * world's run_timeout all the same, and a failure ends the call on this rank alone; on CUDA devices
 * it ends the plan on all ranks. Memory lives until the plan is destroyed on every rank.
 *
 * driver_wait: epoch words are waited for by the driver (cuStreamWaitValue32), which occupies no
 * multiprocessor but has NO DEADLINE: where a writer is gone or never calls, the stream stands
 * still for good, and nothing tells. A call that fails, and a plan that is destroyed in the middle
 * of a whole, store the epoch into all words of this rank's own memory, which ends such waits of
 * its own; zero them before they are used again. CUDA alone: COF_ERR_UNSUPPORTED on the CPU.
 *
 * COF_ERR_INVALID      a parameter breaks its rule on this rank; on the other ranks the same call
 *                      returns COF_ERR_MISMATCH and names this rank
 * COF_ERR_MISMATCH     the ranks disagree: the text has the first differing key and both values
 * COF_ERR_NOMEM        memory was refused on some rank, or the arena has no room: all ranks get it,
 *                      none keeps anything
 * COF_ERR_UNSUPPORTED, COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_SYSTEM
 */
COF_API cof_status cof_grad_return_plan_create(cof_team *team, const cof_grad_return_params *params,
                                               cof_arena *arena, cof_plan **plan_out);

/**
 * One call. Every rank of the team calls it, in the same order of calls on this plan; enqueues on
 * `stream`. Several calls may be in flight, ordered by the caller as in cof_attention_forward. On
 * CUDA devices calls may be captured into graphs; by_section all P calls of a whole into one.
 *
 * A plan that is destroyed between the calls of a whole fails its arena, a shared one too: the
 * other ranks get COF_ERR_POISONED and are told. With `peers` on the CPU nobody is told.
 *
 * COF_ERR_INVALID     an argument breaks its rule, or another plan has begun a whole by section on
 *                     the arena and not ended it; nothing was enqueued, outputs are untouched
 * COF_ERR_MISMATCH    (when the work runs) the ranks passed different writers; outputs are NaN
 * COF_ERR_UNSUPPORTED a stride that is negative, or not 1 in the last dim; caller_orders_reuse on
 *                     a stream that is being captured: args.epoch would be the same in every
 *                     replay; nothing was enqueued
 * COF_ERR_BUSY, COF_ERR_POISONED, COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD   as in cof_attention_forward
 */
COF_API cof_status cof_grad_return_run(cof_plan *plan, const cof_grad_return_args *args,
                                       cof_stream stream);

#ifdef __cplusplus
}
#endif
#endif
