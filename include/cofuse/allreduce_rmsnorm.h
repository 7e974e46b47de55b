/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * All-reduce, residual and RMSNorm in one operator, for tensor-parallel serving.
 *
 *     reduced[t,h]      = sum over ranks r of x_r[t,h]     fp32, x_0 + x_1 + ... in rank order
 *     residual_out[t,h] = round(z[t,h])                    z by `rounding`, below
 *     norm_out[t,h]     = round((z[t,h] * inv[t]) * (weight[h] + weight_bias))
 *     inv[t]            = 1 / sqrt((sum over h of z[t,h]^2) / H + eps)
 *
 * RMSNorm is that of Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
 *
 * Every step is one fp32 operation, rounded to nearest even and not contracted. The squares of a
 * row are added as segments of 256 elements: within a segment a balanced binary tree over
 * neighbours (a row's end is filled up with 0), the segments in order. So the bits of a row are the
 * same on every rank, by every algorithm, in every batch, on CPUs and on CUDA devices. Any bit
 * pattern may be in x: nothing is clamped or flushed; a NaN comes out as the type's quiet NaN with
 * all other bits set (0x7fff, 0x7fffffff).
 *
 * Letters: P ranks (1 .. 16), T tokens, free per call, H hidden.
 */
#ifndef COFUSE_ALLREDUCE_RMSNORM_H
#define COFUSE_ALLREDUCE_RMSNORM_H

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What follows the sum. */
typedef enum cof_allreduce_variant {
    COF_ALLREDUCE_RESIDUAL_NORM = 0, /* z = reduced + residual; residual_out, norm_out */
    COF_ALLREDUCE_NORM = 1,          /* z = reduced; norm_out, and residual_out where wanted */
    COF_ALLREDUCE_ONLY = 2           /* residual_out = round(reduced) */
} cof_allreduce_variant;

/**
 * Where sums are rounded to the data type; in fp32 the two are the same.
 *
 * MATCH_UNFUSED  z = round(round(reduced) + residual): norm_out is RMSNorm(residual_out) for
 *                whoever computes it again, and equals an all-reduce, an addition and a norm that
 *                store their results
 * EXACT          z = reduced + residual in fp32, rounded nowhere but in the outputs
 */
typedef enum cof_allreduce_rounding {
    COF_ALLREDUCE_MATCH_UNFUSED = 0,
    COF_ALLREDUCE_EXACT = 1
} cof_allreduce_rounding;

/**
 * How rows travel. Both give the same bits; AUTO takes one by the bytes of x and by P. On CUDA
 * devices both send slots of data that carry their own signal, the tag of the call: no row waits
 * for a flag.
 *
 * ONE_SHOT   every rank gets all rows of all ranks, and reduces them all: one hop
 * TWO_SHOT   every rank reduces a share of the rows and sends the sums to all: fewer bytes, P > 2
 */
typedef enum cof_allreduce_algorithm {
    COF_ALLREDUCE_AUTO = 0,
    COF_ALLREDUCE_ONE_SHOT = 1,
    COF_ALLREDUCE_TWO_SHOT = 2
} cof_allreduce_algorithm;

/** Parameters of a plan; the same on all ranks. Zero means default. */
typedef struct cof_allreduce_rmsnorm_params {
    size_t size;            /* sizeof(cof_allreduce_rmsnorm_params) */
    cof_dtype dtype;        /* COF_BF16, COF_F16 or COF_F32: x, residual, outputs */
    cof_dtype weight_dtype; /* dtype or COF_F32; all zero: dtype */
    int64_t hidden;         /* H >= 1; on CUDA devices at most 32768, or what fits into a block's
                               shared memory: 20448 on those with 99 KiB */
    int64_t max_tokens;     /* rows the exchange buffers hold, >= 1; calls with more go in parts */
    cof_allreduce_variant variant;
    cof_allreduce_rounding rounding;
    float eps;        /* > 0, finite; ONLY: 0 */
    int weight_bias;  /* 0, or 1: weights are stored as their difference from 1 */
    cof_allreduce_algorithm algorithm;
    int64_t one_shot_bytes; /* AUTO: calls with at most so many bytes of x (T * H * item) go by
                               ONE_SHOT; 0: what was measured to be best */
    int max_ctas;           /* CUDA: blocks a call may take; 0: as many as run at once, but for
                               some room for a second plan on another stream (half, where more
                               than two ranks share a device) */
} cof_allreduce_rmsnorm_params;
#ifdef __cplusplus
#define COF_ALLREDUCE_RMSNORM_PARAMS_INIT {sizeof(cof_allreduce_rmsnorm_params)}
#else
#define COF_ALLREDUCE_RMSNORM_PARAMS_INIT {.size = sizeof(cof_allreduce_rmsnorm_params)}
#endif

/** x_source: where a tensor of a call lies. */
#define COF_IN_ARENA(offset) ((int64_t)(offset) + 1)

/**
 * Tensors of a call, local. [T, H], or more dims whose product of all but the last is T (such dims
 * must be evenly spaced: one row pitch); the last dim is contiguous, the pitch at least H.
 *
 *   x             this rank's addend. It may be written again as soon as the stream has got past
 *                 the call
 *   residual      RESIDUAL_NORM; bit-equal on all ranks, as is weight (not checked)
 *   weight        [H], contiguous; not with ONLY
 *   residual_out  may be `residual` itself; NULL allowed with NORM
 *   norm_out      may be `x` itself, unless x lies in the arena; NULL with ONLY
 *
 * Otherwise outputs lie apart from each other and from the inputs.
 *
 * x_source = COF_IN_ARENA(offset): x lies at this offset of the own data in the arena of the plan,
 * the same on all ranks. On CPUs the other ranks read it there, without a copy, and the call ends
 * when they have.
 */
typedef struct cof_allreduce_rmsnorm_args {
    size_t size; /* sizeof(cof_allreduce_rmsnorm_args) */
    const cof_tensor *x;
    const cof_tensor *residual;
    const cof_tensor *weight;
    const cof_tensor *residual_out;
    const cof_tensor *norm_out;
    int64_t x_source; /* 0: ordinary memory */
} cof_allreduce_rmsnorm_args;
#ifdef __cplusplus
#define COF_ALLREDUCE_RMSNORM_ARGS_INIT {sizeof(cof_allreduce_rmsnorm_args)}
#else
#define COF_ALLREDUCE_RMSNORM_ARGS_INIT {.size = sizeof(cof_allreduce_rmsnorm_args)}
#endif

/**
 * The memory a plan would hold. Local, allocates nothing.
 * COF_ERR_INVALID or COF_ERR_UNSUPPORTED: a parameter breaks its rule (named in the text).
 */
COF_API cof_status cof_allreduce_rmsnorm_workspace(cof_team *team,
                                                   const cof_allreduce_rmsnorm_params *params,
                                                   cof_workspace_sizes *sizes_out);

/**
 * Makes a plan. Collective over the team. `arena` as in cof_attention_plan_create.
 *
 * COF_ERR_INVALID      a parameter breaks its rule on this rank; on the other ranks the same call
 *                      returns COF_ERR_MISMATCH and names this rank
 * COF_ERR_MISMATCH     the ranks disagree: the text has the first differing key and both values
 * COF_ERR_NOMEM        memory was refused on some rank, or the arena has no room: all ranks get it,
 *                      none keeps anything
 * COF_ERR_UNSUPPORTED  more than 16 ranks; H or max_tokens over what a device takes
 * COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_SYSTEM
 */
COF_API cof_status cof_allreduce_rmsnorm_plan_create(cof_team *team,
                                                     const cof_allreduce_rmsnorm_params *params,
                                                     cof_arena *arena, cof_plan **plan_out);

/**
 * One call. Every rank of the team calls it, in the same order of calls on this plan and with the
 * same T; enqueues on `stream`. T = 0 on all ranks does nothing. On a CUDA stream the call may be
 * captured, and replayed any number of times.
 *
 * COF_ERR_INVALID     an argument breaks its rule; nothing was enqueued, outputs are untouched
 * COF_ERR_UNSUPPORTED rows of a tensor are not evenly spaced; likewise
 * COF_ERR_MISMATCH    (when the work runs) the ranks passed another T or x_source; outputs are NaN,
 *                     on devices those rows of them that were not finished
 * COF_ERR_BUSY, COF_ERR_POISONED, COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD   as in cof_attention_forward
 */
COF_API cof_status cof_allreduce_rmsnorm_run(cof_plan *plan, const cof_allreduce_rmsnorm_args *args,
                                             cof_stream stream);

#ifdef __cplusplus
}
#endif
#endif
