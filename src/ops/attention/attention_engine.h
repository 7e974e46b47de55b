/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Engines that compute one section of attention on a CUDA device: some query rows against some key
 * rows, both in local memory. Schedules know sections only; an engine knows nothing of ranks.
 *
 * B batch, H query heads, Hkv key and value heads; query head h reads kv head h / (H / Hkv). */
#ifndef COFI_ATTENTION_ENGINE_H
#define COFI_ATTENTION_ENGINE_H

#include "ops/attention/attention_cpu.h" /* cofi_band */

/* Of a [B, rows, heads, dim] tensor, in elements; the head dim is contiguous: element
 * (b, row, h, d) is at b * batch + row * row + h * head + d. */
struct cofi_attention_strides {
    int64_t batch, row, head;
};

/* What is the same in all runs of a section: fixed when a plan is made. */
struct cofi_attention_shape {
    enum cofi_elem elem; /* of q, k, v */
    bool o_f32;          /* o in fp32 instead of elem */
    int64_t n_batch, n_heads, n_kv_heads, dim_qk, dim_v; /* dims: 1 .. 512 */
    int64_t q_rows, k_rows; /* > 0: the schedule leaves empty sections out */
    struct cofi_band band;  /* i, j counted from the section's first rows */
    float scale;
    struct cofi_attention_strides q, k, v, o;
    int64_t lse_batch, lse_head; /* strides of lse, elements; rows are contiguous */
};

/* A shape that an engine has prepared; immutable. */
struct cofi_attention_kernel;

struct cofi_attention_engine {
    const char *name; /* "cudnn", "exact" */
    /* True where this engine computes the shape on this device; else false, and why. */
    bool (*can)(int device, const struct cofi_attention_shape *shape, char *why, size_t bytes);
    /* Prepares it: may allocate, load, compile, take locks; never while a stream captures. */
    cof_status (*open)(int device, const struct cofi_attention_shape *shape,
                       struct cofi_attention_kernel **kernel_out, size_t *workspace_bytes_out);
    /* A launch, or a few, on `stream`, a stream of the device that is the thread's current one;
     * allocates nothing, may be captured. No pointer is NULL. workspace: device memory of
     * workspace_bytes, 256-byte aligned, in use until the launch has run.
     *     o = softmax(scale q k^T + band) v, lse = log sum exp (natural)
     * Rows that see no key: o = 0, lse = -inf, or +inf (the merge takes both). */
    cof_status (*run)(const struct cofi_attention_kernel *kernel, const void *q, const void *k,
                      const void *v, void *o, float *lse, void *workspace, void *stream);
    void (*close)(struct cofi_attention_kernel *kernel);
};

extern const struct cofi_attention_engine cofi_attention_exact, cofi_attention_cudnn;

/* Every engine, best first; the last one takes all shapes. NULL behind the end. */
const struct cofi_attention_engine *cofi_attention_engine_at(int idx);

/* The engine for a shape: the first that can, of those that COFUSE_ATTENTION_ENGINE (auto | cudnn |
 * exact) allows. COF_ERR_UNSUPPORTED with the reason where the one asked for cannot. */
cof_status cofi_attention_engine_choose(int device, const struct cofi_attention_shape *shape,
                                        const struct cofi_attention_engine **engine_out);

/* ---- the sections of a plan (attention_engine_cuda.c) --------------------------------------- */

/* Kernels of a plan, one for each shape, however many steps have it. {.device = d} is empty. */
struct cofi_attention_kernels {
    int device, n;
    size_t workspace_bytes; /* that the largest of them wants */
    struct cofi_attention_opened *opened;
};

/* Opens the shape, or finds it among those opened before; idx_out is good for run. On an error all
 * that was there stays. */
cof_status cofi_attention_kernels_open(struct cofi_attention_kernels *kernels,
                                       const struct cofi_attention_shape *shape, int *idx_out);
cof_status cofi_attention_kernels_run(const struct cofi_attention_kernels *kernels, int idx,
                                      const void *q, const void *k, const void *v, void *o,
                                      float *lse, void *workspace, void *stream);
/* The engine's name, for cof_plan_describe. */
const char *cofi_attention_kernels_engine(const struct cofi_attention_kernels *kernels, int idx);
void cofi_attention_kernels_close(struct cofi_attention_kernels *kernels);

/* ---- merge (attention_merge_cuda.c) --------------------------------------------------------- */

/* A result for some query rows, over some of the keys: o is a [B, rows, H, dim_v] view. */
struct cofi_attention_partial {
    const void *o;
    bool o_f32; /* else the data type */
    struct cofi_attention_strides stride;
    const float *lse;
    int64_t lse_batch, lse_head; /* as in the shape */
};

/* Two results of the same rows, over disjoint keys, become that over both, in fp32, rounded once:
 *     m = max(la, lb), wa = exp(la - m), wb = exp(lb - m), s = wa + wb
 *     o = (wa oa + wb ob) / s, l = m + log s; o = 0, l = -inf where both are of no key
 * +inf stands for -inf, and o of a part that weighs nothing is not used, whatever it is. */
struct cofi_attention_merge {
    enum cofi_elem elem;
    int64_t n_batch, n_rows, n_heads, dim_v; /* 0 rows: nothing is done */
    struct cofi_attention_partial a, b;
    void *o; /* may be a.o or b.o, with the same strides and type; else apart from both */
    bool o_f32;
    struct cofi_attention_strides stride;
    float *lse; /* may be a.lse or b.lse, likewise */
    int64_t lse_batch, lse_head;
    bool lets_next_begin; /* a kernel behind it that was launched to begin early */
};

/* One launch on `stream`, a stream of the thread's current device; may be captured. */
cof_status cofi_attention_merge(const struct cofi_attention_merge *merge, void *stream);

#endif
