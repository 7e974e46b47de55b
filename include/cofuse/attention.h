/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Context-parallel attention, forward and backward.
 *
 *     O = softmax(scale * Q K^T + mask) V         LSE = log sum exp(scale * Q K^T + mask)
 *
 * per batch entry and head, over the whole sequence; every rank holds some rows of the sequence
 * (layout.h) of q, k, v, o and their gradients. Keys and values travel one-sided, while the ranks
 * compute; dK and dV go home to their owners.
 *
 * Letters: B batch, S global rows, S_local = cof_layout_local_rows() of this rank, H query heads,
 * Hkv key/value heads (query head h uses kv head h / (H/Hkv)), Dqk and Dv head dims.
 *
 * On CUDA devices (worlds of COF_ENGINE_CUDA) there is the forward: plans need forward_only.
 * Sections are computed by cuDNN 9 where it is found and can (bf16 and fp16, head dims that are
 * multiples of 8), else by kernels in fp32 (COFUSE_ATTENTION_ENGINE; the end of the describe line
 * tells this rank's). A plan is made for compact tensors, aligned to 16 bytes. Others are copied,
 * in and out, within the call; `only_compact` refuses them and saves the memory for that.
 *
 * Mathematics: Vaswani et al. 2017 (attention); Dao et al. 2022 (blocked online softmax and its
 * gradient); Liu et al. 2023 (ring of key/value blocks); sums of scores and softmax in fp32.
 */
#ifndef COFUSE_ATTENTION_H
#define COFUSE_ATTENTION_H

#include "layout.h"
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Order of the dims of q, k, v, o and their gradients. */
typedef enum cof_attention_format {
    COF_FORMAT_BSHD = 0, /* [B, S_local, H, D] */
    COF_FORMAT_SBHD = 1  /* [S_local, B, H, D] */
} cof_attention_format;

/** How keys and values travel. */
typedef enum cof_attention_schedule {
    COF_SCHEDULE_DEFAULT = 0, /* gather up to 512 rows on CPUs, else ring */
    COF_SCHEDULE_RING = 1,    /* step i has the keys of rank - i, in one of two buffers: the rank
                                 reads them; on CUDA devices their owner puts them there */
    COF_SCHEDULE_GATHER = 2   /* all keys are staged, then each chunk meets a prefix: O(S) memory */
} cof_attention_schedule;

/** Parameters of a plan; the same on all ranks. Zero means default. */
typedef struct cof_attention_params {
    size_t size;                     /* sizeof(cof_attention_params) */
    cof_dtype dtype;                 /* COF_BF16, COF_F16 or COF_F32: of q, k, v, o and gradients */
    cof_attention_format format;     /* */
    int64_t n_batch;                 /* B >= 1 */
    int64_t n_rows;                  /* S >= 0, global */
    int64_t n_heads;                 /* H >= 1 */
    int64_t n_kv_heads;              /* Hkv >= 1, divides H; 0: H */
    int64_t head_dim_qk;             /* Dqk, 1 .. 512 */
    int64_t head_dim_v;              /* Dv, 1 .. 512; 0: Dqk */
    cof_mask mask;                   /* COF_MASK_NONE, or COF_MASK_CAUSAL: key row <= query row;
                                        both with a window below, or without */
    cof_layout_kind layout;          /* ZIGZAG by default */
    cof_chunking chunking;           /* BALANCED by default */
    cof_attention_schedule schedule; /* */
    double scale;                    /* finite in fp32; 0: 1/sqrt(Dqk) */
    int forward_only;                /* 1: no memory for backward, which is then refused */
    int wire_f32;                    /* 1: dK, dV travel in fp32 instead of dtype */
    int save_kv;                     /* 1: forward keeps K, V of the others in args.saved_kv, and
                                        backward reads them there instead of fetching them again */
    int has_window;                  /* 1: of the keys that the mask leaves, query row i sees rows
                                        i - window_left .. i + window_right */
    int64_t window_left;             /* >= 0, or -1: no limit on that side; 0 without has_window */
    int64_t window_right;            /* the same; with a causal mask 0 is the most that counts */
    int only_compact;                /* CUDA: 1: tensors of calls have the strides of compact ones,
                                        and the plan no memory for copies of others */
} cof_attention_params;
#ifdef __cplusplus
#define COF_ATTENTION_PARAMS_INIT {sizeof(cof_attention_params)}
#else
#define COF_ATTENTION_PARAMS_INIT {.size = sizeof(cof_attention_params)}
#endif

/**
 * Tensors of a call, all local to this rank. In dtype and format of the plan:
 *     q, o, dout (with Dv), dq   H heads;     k, v, dk, dv   Hkv heads;
 * o, dout, v, dv have head dim Dv, the others Dqk. lse is fp32 [B, H, S_local].
 * Strides: any, with a contiguous head dim and no overlap. Outputs must lie apart from each other
 * and from the inputs; saved_kv is an output of forward and an input of backward.
 */
typedef struct cof_attention_args {
    size_t size; /* sizeof(cof_attention_args) */
    const cof_tensor *q, *k, *v;
    const cof_tensor *o;              /* forward: output; backward: input */
    const cof_tensor *lse;            /* forward: output; backward: input */
    const cof_tensor *dout;           /* backward only: input */
    const cof_tensor *dq, *dk, *dv;   /* backward only: outputs */
    const cof_tensor *saved_kv;       /* save_kv, else NULL: COF_U8 [n], n >= `saved` of the
                                         workspace, aligned to 128 bytes; one for every forward
                                         whose backward is still to come. NULL where `saved` is 0 */
} cof_attention_args;
#ifdef __cplusplus
#define COF_ATTENTION_ARGS_INIT {sizeof(cof_attention_args)}
#else
#define COF_ATTENTION_ARGS_INIT {.size = sizeof(cof_attention_args)}
#endif

/**
 * The memory a plan would hold, but for what cuDNN wants for itself; `saved`: bytes of a saved_kv.
 * Local, allocates nothing.
 * COF_ERR_INVALID or COF_ERR_UNSUPPORTED: a parameter breaks its rule (named in the text).
 */
COF_API cof_status cof_attention_workspace(cof_team *team, const cof_attention_params *params,
                                           cof_workspace_sizes *sizes_out);

/**
 * Makes a plan. Collective over the team. `arena`: one of this team (cof_arena_create,
 * cof_arena_attach) that other plans may use too, or NULL: the plan makes its own. While the plan
 * is made no call on the arena runs; the arena outlives the plan.
 *
 * COF_ERR_INVALID      `arena` belongs to another team, or a parameter breaks its rule on this
 *                      rank; on the other ranks the same call returns COF_ERR_MISMATCH and names
 *                      this rank
 * COF_ERR_UNSUPPORTED  a legal request that this version refuses (named in the text)
 * COF_ERR_MISMATCH     the ranks disagree: the text has the first differing key and both values
 * COF_ERR_NOMEM        memory was refused on some rank, or the arena has no room: all ranks get it,
 *                      none keeps anything
 * COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_SYSTEM
 */
COF_API cof_status cof_attention_plan_create(cof_team *team, const cof_attention_params *params,
                                             cof_arena *arena, cof_plan **plan_out);

/**
 * o, lse from q, k, v. Every rank of the team calls it, in the same order of calls on this plan;
 * enqueues on `stream`. Several calls may be in flight; the caller orders them: all on one stream,
 * or with events between streams (COF_STREAM_NOW is a stream of its own).
 *
 * The run deadline bounds each wait, and a wait for another rank lasts as long as that rank
 * computes a section: choose it (cof_world_options.run_timeout) well above the time of a call.
 *
 * Rows: lse is -inf and o is 0 for a row that sees no key; padding rows (PADDED) get the same.
 * NaN or infinite inputs spread to the rows that see them, and to no other; by cuDNN a v that is
 * not finite may also spread to rows that do not see it. A row all of whose visible scores are
 * -inf is NaN on the CPU; on CUDA devices it is as one that sees no key.
 *
 * COF_ERR_INVALID     an argument breaks its rule, or a grad_return by section is unfinished on the
 *                     arena; nothing was enqueued, outputs are untouched (the other ranks wait for
 *                     this one until their deadline)
 * COF_ERR_UNSUPPORTED a stride that is negative, or not 1 in the last dim; else as INVALID
 * COF_ERR_BUSY        a queue stayed full until the deadline in the middle of the call: the plan
 *                     can only be destroyed, on all ranks
 * COF_ERR_TIMEOUT, COF_ERR_MISMATCH, COF_ERR_PEER_DEAD, COF_ERR_NOMEM, COF_ERR_INTERNAL
 *                     (the last two: a matrix product was refused its memory, or failed)
 *                     by this call with COF_STREAM_NOW, else by cof_stream_sync: outputs of this
 *                     call, and of those enqueued before its failure was known, are NaN; the plan
 *                     can only be destroyed
 * COF_ERR_POISONED, or what ended the team
 *                     the failure of an earlier call, or of the team, was known: nothing was
 *                     enqueued, outputs are untouched; the plan can only be destroyed
 */
COF_API cof_status cof_attention_forward(cof_plan *plan, const cof_attention_args *args,
                                         cof_stream stream);

/**
 * dq, dk, dv from q, k, v, o, lse (as forward left them) and dout. Calls, order and errors as in
 * cof_attention_forward. COF_ERR_INVALID on a plan made with forward_only.
 *
 * With a window a rank's contribution to an owner covers the rows from the first to the last one
 * that it sees there.
 *
 * dK and dV of other owners travel in dtype (or fp32, wire_f32), are summed in fp32 by the owner in
 * the fixed order rank+1, rank+2, ..., rank and rounded once: repeatable bit for bit. Rounding is
 * to nearest even; beyond the largest number of dtype (65504 for fp16) it gives infinity.
 */
COF_API cof_status cof_attention_backward(cof_plan *plan, const cof_attention_args *args,
                                          cof_stream stream);

#ifdef __cplusplus
}
#endif
#endif
