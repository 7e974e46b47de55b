/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Triangle multiplicative update of a pair representation, forward and backward, on one rank or
 * sharded over many.
 *
 *     1 xn   = LayerNorm(x; norm_in_w, norm_in_b, eps_in)
 *     2 p    = xn p_in^T + p_in_b                            2H wide: H of a, then H of b
 *     3 g    = xn g_in^T + g_in_b                            2H wide, likewise
 *     4 ab   = p * sigmoid(g) * mask
 *     5 a, b = first H, last H of ab
 *     6 tri[i,j,h] = sum_k a[i,k,h] b[j,k,h]  (outgoing)   or   sum_k a[k,i,h] b[k,j,h]  (incoming)
 *     7 trin = LayerNorm(tri; norm_out_w, norm_out_b, eps_out)   over h
 *     8 out  = (trin p_out^T + p_out_b) * sigmoid(xn g_out^T + g_out_b) + residual
 *
 * Jumper et al., "Highly accurate protein structure prediction with AlphaFold", 2021 (algorithms 11
 * and 12); the gate follows the output projection, as there.
 *
 * Sums, norms and sigmoids are fp32. a, b, tri and its gradient are stored in the data type; with
 * fp16, tri and its gradient in fp32, for tri may pass 65504. The gradients of a and b travel in
 * fp32.
 * Rank r = (r / cp1, r % cp1) of a grid cp0 x cp1 holds a block of rows i and columns j of every
 * batch entry, of inputs and outputs alike. Inside, features travel to the rank that owns them and
 * back, twice in backward; only the exchanged values ever leave a rank.
 *
 * Bits: out and dx are the same for every number of ranks, grid, shard and batch, on one device
 * type and instruction set with one GEMM provider, and from run to run. Parameter gradients are the
 * same from run to run.
 *
 * Letters: P = cp0 * cp1 ranks, B batch entries, N rows and columns of the pairs, Ni x Nj the block
 * of this rank, D dim, H hidden.
 */
#ifndef COFUSE_TRIMUL_H
#define COFUSE_TRIMUL_H

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cof_trimul_direction {
    COF_TRIMUL_OUTGOING = 0, /* sum over the columns of both edges */
    COF_TRIMUL_INCOMING = 1  /* over the rows */
} cof_trimul_direction;

/**
 * How N rows (or columns) are cut into p parts.
 *
 * BALANCED  part r begins at floor(r * N / p)
 * CHUNK     ceil(N / p) each, the last ones fewer or none (torch.chunk, DTensor)
 * EXPLICIT  row_offsets, col_offsets of the parameters; N is then n_rows in every call
 */
typedef enum cof_trimul_shard {
    COF_TRIMUL_BALANCED = 0,
    COF_TRIMUL_CHUNK = 1,
    COF_TRIMUL_EXPLICIT = 2
} cof_trimul_shard;

/**
 * What forward leaves in args.saved for its backward.
 *
 * NONE  nothing: backward computes a, b and tri again
 * AB    a and b of this rank's features, tri of its block
 */
typedef enum cof_trimul_save { COF_TRIMUL_SAVE_NONE = 0, COF_TRIMUL_SAVE_AB = 1 } cof_trimul_save;

/** Parameters of a plan; the same on all ranks. Zero means default. */
typedef struct cof_trimul_params {
    size_t size;          /* sizeof(cof_trimul_params) */
    cof_dtype dtype;      /* COF_BF16, COF_F16 or COF_F32: x, residual, out, dout, dx, projections,
                             and their biases */
    cof_dtype norm_dtype; /* of norm_in_w, _b, norm_out_w, _b: dtype or COF_F32; all zero: dtype */
    cof_dtype mask_dtype; /* dtype or COF_F32; all zero: dtype */
    cof_trimul_direction direction;
    int64_t n_batch; /* B of a call is at most this, >= 1; 0: 1 */
    int64_t n_rows;  /* N of a call is at most this, >= 1 */
    int64_t dim;     /* D, 1 .. 8192 */
    int64_t hidden;  /* H, 1 .. 8192; 0: D */
    int grid_rows;   /* cp0: parts of the rows; 0: P / grid_cols */
    int grid_cols;   /* cp1: parts of the columns; 0: P / grid_rows, or 1 where both are 0 */
    cof_trimul_shard shard;
    const int64_t *row_offsets; /* EXPLICIT: [cp0 + 1], 0 = o[0] <= o[1] <= ... = n_rows */
    const int64_t *col_offsets; /* EXPLICIT: [cp1 + 1], likewise; neither is kept */
    double eps_in, eps_out;     /* > 0, finite in fp32; 0: 1e-5 */
    cof_trimul_save save;
    int forward_only;       /* 1: no memory for backward, which is then refused; save = NONE */
    int reduce_param_grads; /* 1: parameter gradients are summed over the ranks, in rank order, and
                               the same on all; 0: each rank has the sum over its own block */
    int chunk_features;     /* features of a rank in flight at a time, a multiple of 8; 0: chosen */
    int max_ctas;           /* CUDA: blocks a call may take; 0: as many as run at once */
} cof_trimul_params;
#ifdef __cplusplus
#define COF_TRIMUL_PARAMS_INIT {sizeof(cof_trimul_params)}
#else
#define COF_TRIMUL_PARAMS_INIT {.size = sizeof(cof_trimul_params)}
#endif

/** Rows and columns of one rank. */
typedef struct cof_trimul_block {
    int64_t row, n_rows; /* first, and how many: Ni */
    int64_t col, n_cols; /* Nj */
} cof_trimul_block;

/**
 * The block of `rank` of a team of n_ranks in a call with this N. Local. COF_ERR_INVALID: a
 * parameter, or an argument, breaks its rule.
 */
COF_API cof_status cof_trimul_block_of(const cof_trimul_params *params, int n_ranks, int rank,
                                       int64_t n, cof_trimul_block *block_out);

/**
 * Weights, as nn.Linear has them, (out, in); compact or with a row pitch. Rows of p_in and g_in,
 * and entries of their biases, are stacked: H of a, then H of b. NULL: a gain (norm_in_w,
 * norm_out_w) of ones, a bias (_b) of zeros; the four matrices are always there.
 */
typedef struct cof_trimul_weights {
    size_t size; /* sizeof(cof_trimul_weights) */
    const cof_tensor *norm_in_w, *norm_in_b;   /* [D], norm_dtype */
    const cof_tensor *p_in, *p_in_b;           /* [2H, D], [2H] */
    const cof_tensor *g_in, *g_in_b;           /* [2H, D], [2H] */
    const cof_tensor *norm_out_w, *norm_out_b; /* [H], norm_dtype */
    const cof_tensor *p_out, *p_out_b;         /* [D, H], [D] */
    const cof_tensor *g_out, *g_out_b;         /* [D, D], [D] */
} cof_trimul_weights;
#ifdef __cplusplus
#define COF_TRIMUL_WEIGHTS_INIT {sizeof(cof_trimul_weights)}
#else
#define COF_TRIMUL_WEIGHTS_INIT {.size = sizeof(cof_trimul_weights)}
#endif

/**
 * Their gradients, COF_F32, compact; written, not added to. NULL: not wanted (with
 * reduce_param_grads alike on all ranks). Of a gain or bias that is absent: at ones or zeros.
 */
typedef struct cof_trimul_grads {
    size_t size; /* sizeof(cof_trimul_grads) */
    const cof_tensor *norm_in_w, *norm_in_b;
    const cof_tensor *p_in, *p_in_b;
    const cof_tensor *g_in, *g_in_b;
    const cof_tensor *norm_out_w, *norm_out_b;
    const cof_tensor *p_out, *p_out_b;
    const cof_tensor *g_out, *g_out_b;
} cof_trimul_grads;
#ifdef __cplusplus
#define COF_TRIMUL_GRADS_INIT {sizeof(cof_trimul_grads)}
#else
#define COF_TRIMUL_GRADS_INIT {.size = sizeof(cof_trimul_grads)}
#endif

/**
 * Tensors of a call, local. Strides: any without overlap, with a contiguous last dim of those that
 * have D. forward leaves dout, dx and grads alone, backward out and in_place: both may be given the
 * same struct.
 *
 *   x         [B, Ni, Nj, D]
 *   mask      [B, Ni, Nj], mask_dtype; NULL: ones
 *   residual  forward: [B, Ni, Nj, D], added; may be x or out itself. backward: where it is x
 *             itself, dx holds dout too; else it is left alone (its gradient is dout)
 *   out       forward: [B, Ni, Nj, D]; x itself with in_place = 1, else apart from the inputs
 *   dout      backward: [B, Ni, Nj, D]
 *   dx        backward: [B, Ni, Nj, D]; may be dout itself
 *   saved     save = AB: COF_U8 [n], n >= `saved` of the workspace, aligned to 128 bytes; one for
 *             every forward whose backward is still to come. NULL where `saved` is 0
 *   grads     backward: gradients of the weights; NULL: none
 *
 * backward takes x and mask as forward had them, and the weights that were last set.
 */
typedef struct cof_trimul_args {
    size_t size; /* sizeof(cof_trimul_args) */
    int64_t n;   /* N of this call, the same on all ranks; 0: params.n_rows */
    const cof_tensor *x, *mask, *residual;
    const cof_tensor *out;
    const cof_tensor *dout, *dx;
    const cof_tensor *saved;
    const cof_trimul_grads *grads;
    int in_place; /* 1: out is x */
} cof_trimul_args;
#ifdef __cplusplus
#define COF_TRIMUL_ARGS_INIT {sizeof(cof_trimul_args)}
#else
#define COF_TRIMUL_ARGS_INIT {.size = sizeof(cof_trimul_args)}
#endif

/**
 * The memory a plan would hold; `saved`: bytes of an args.saved. Local, allocates nothing.
 * COF_ERR_INVALID or COF_ERR_UNSUPPORTED: a parameter breaks its rule (named in the text).
 */
COF_API cof_status cof_trimul_workspace(cof_team *team, const cof_trimul_params *params,
                                        cof_workspace_sizes *sizes_out);

/**
 * Makes a plan. Collective over the team. `arena` as in cof_attention_plan_create. One rank touches
 * no transport.
 *
 * COF_ERR_INVALID      a parameter breaks its rule on this rank; on the other ranks the same call
 *                      returns COF_ERR_MISMATCH and names this rank
 * COF_ERR_MISMATCH     the ranks disagree: the text has the first differing key and both values
 * COF_ERR_NOMEM        memory was refused on some rank, or the arena has no room: all ranks get it,
 *                      none keeps anything
 * COF_ERR_UNSUPPORTED, COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_SYSTEM
 */
COF_API cof_status cof_trimul_plan_create(cof_team *team, const cof_trimul_params *params,
                                          cof_arena *arena, cof_plan **plan_out);

/** Flags of cof_trimul_set_weights. */
#define COF_TRIMUL_CHECK 1u /* collective: the ranks compare a hash of their weights */

/**
 * Gives the plan its weights: those of all later calls, until the next set_weights. Enqueues on
 * `stream` a copy in the form that kernels want; the tensors are read when the stream gets there
 * and may be written after it in stream order. Needed before the first call; a training step calls
 * it once. Every rank has the same weights: CHECK, a call in the order of calls on the plan, makes
 * sure of it.
 *
 * COF_ERR_INVALID     an argument breaks its rule; nothing was enqueued
 * COF_ERR_UNSUPPORTED a stride that is negative, or not 1 in the last dim; nothing was enqueued
 * COF_ERR_MISMATCH    (when the work runs, CHECK) the weights differ: the text names the rank; the
 *                     plan can only be destroyed
 * COF_ERR_BUSY, COF_ERR_POISONED, COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD   as in cof_attention_forward
 */
COF_API cof_status cof_trimul_set_weights(cof_plan *plan, const cof_trimul_weights *weights,
                                          unsigned flags, cof_stream stream);

/**
 * out from x. Every rank of the team calls it, with the same N and B, in the same order of calls on
 * this plan; enqueues on `stream`. N = 0 cannot be said; B = 0 is for all ranks, and does nothing.
 * A rank whose block is empty takes part. NaN in x reaches what the formula says, and no more.
 *
 * COF_ERR_INVALID     an argument breaks its rule, or no weights were set; nothing was enqueued,
 *                     outputs are untouched
 * COF_ERR_UNSUPPORTED a stride that is negative, or not 1 in the last dim; else as INVALID
 * COF_ERR_MISMATCH    (when the work runs) the ranks passed another N or B; outputs are NaN
 * COF_ERR_NOMEM, COF_ERR_INTERNAL
 *                     (when the work runs) a matrix product of some rank was refused its memory, or
 *                     failed; outputs are NaN on every rank that needs it
 * COF_ERR_BUSY, COF_ERR_POISONED, COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD   as in cof_attention_forward
 */
COF_API cof_status cof_trimul_forward(cof_plan *plan, const cof_trimul_args *args,
                                      cof_stream stream);

/**
 * dx, and the gradients of the weights, of sum(dout * out); these are zeros with B = 0. Calls,
 * order and errors as in cof_trimul_forward. COF_ERR_INVALID on a plan made with forward_only.
 */
COF_API cof_status cof_trimul_backward(cof_plan *plan, const cof_trimul_args *args,
                                       cof_stream stream);

/** Orders of the 2H rows in checkpoints. */
typedef enum cof_trimul_order {
    COF_TRIMUL_STACKED = 0,    /* a0 .. a(H-1), b0 .. b(H-1): as cof_trimul_weights has them */
    COF_TRIMUL_INTERLEAVED = 1 /* a0, b0, a1, b1, ... */
} cof_trimul_order;

/**
 * Copies p_in, g_in ([2H, D]) or a bias of theirs ([2H]) from a checkpoint's order to that of
 * cof_trimul_weights. swap_ab = 1 exchanges a and b: for weights of AlphaFold 2's incoming edges,
 * whose equation sums a[k,j] b[k,i]. Local, at once, in host memory; same shape and type, apart
 * from each other, compact. COF_ERR_INVALID, COF_ERR_UNSUPPORTED
 */
COF_API cof_status cof_trimul_import_rows(const cof_tensor *src, cof_trimul_order order,
                                          int swap_ab, const cof_tensor *dst_out);

#ifdef __cplusplus
}
#endif
#endif
