/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Engines that compute one section of attention on a CUDA device: some query rows against some key
 * rows, both local memory. Schedules know sections only; an engine knows nothing of ranks. */
#ifndef COFI_ATTENTION_ENGINE_H
#define COFI_ATTENTION_ENGINE_H

#include "ops/attention/attention_cpu.h" /* cofi_band */

/* What a section's kernels are built for: fixed when a plan is made. Strides in elements; the head
 * dim is contiguous. Batch, rows and heads of a tensor are addressed b*batch + row*row + h*head. */
struct cofi_attention_strides {
    int64_t batch, row, head;
};

struct cofi_attention_shape {
    enum cofi_elem elem; /* of q, k, v */
    bool o_f32;          /* o in fp32 instead of elem */
    int64_t n_batch, n_heads, n_kv_heads, dim_qk, dim_v;
    int64_t q_rows, k_rows;
    struct cofi_band band; /* i, j counted from the section's first rows */
    float scale;
    struct cofi_attention_strides q, k, v, o;
    int64_t lse_batch, lse_head; /* strides of lse, rows contiguous, elements */
};

/* A shape that an engine has prepared; immutable. NULL data pointers are never passed; q_rows and
 * k_rows are > 0 (the schedule leaves empty sections out). */
struct cofi_attention_kernel;

struct cofi_attention_engine {
    const char *name; /* "cudnn", "exact" */
    /* Local. True where this engine computes the shape on this device; else false and why. */
    bool (*can)(int device, const struct cofi_attention_shape *shape, char *why, size_t bytes);
    /* Prepares it: may allocate, load, compile, take locks; not while capturing. */
    cof_status (*open)(int device, const struct cofi_attention_shape *shape,
                       struct cofi_attention_kernel **kernel_out, size_t *workspace_bytes_out);
    /* One launch (or a few) on `stream`; allocates nothing, may be captured. workspace: device
     * memory of workspace_bytes, 256-byte aligned, used until the launch has run.
     * o = softmax(scale q k^T + band) v, lse = log sum exp (natural); rows that see no key: o = 0,
     * lse = -inf or +inf (the merge takes both). */
    cof_status (*run)(const struct cofi_attention_kernel *kernel, const void *q, const void *k,
                      const void *v, void *o, float *lse, void *workspace, void *stream);
    void (*close)(struct cofi_attention_kernel *kernel);
};

extern const struct cofi_attention_engine cofi_attention_exact, cofi_attention_cudnn;

/* The engine for a shape: cudnn where it can and COFUSE_ATTENTION_ENGINE (auto | cudnn | exact)
 * allows, else exact. COF_ERR_UNSUPPORTED with the reason where "cudnn" is asked for and cannot. */
cof_status cofi_attention_engine_choose(int device, const struct cofi_attention_shape *shape,
                                        const struct cofi_attention_engine **engine_out);

/* ---- merge (attention_merge_kernels.cu) ---- */

/* Partial results of the same query rows, over disjoint keys. o views are [B, row, H, dim_v]. */
struct cofi_attention_partial {
    const void *o;
    bool o_f32; /* else the data type */
    struct cofi_attention_strides stride;
    const float *lse;
    int64_t lse_batch, lse_head;
};

struct cofi_attention_merge {
    enum cofi_elem elem;
    int64_t n_batch, n_rows, n_heads, dim_v;
    struct cofi_attention_partial a, b; /* merged: exact softmax combination in fp32 */
    void *o;                            /* destination; may be a.o or b.o */
    bool o_f32;
    struct cofi_attention_strides stride;
    float *lse; /* may be a.lse or b.lse */
    int64_t lse_batch, lse_head;
};

cof_status cofi_attention_merge(const struct cofi_attention_merge *merge, void *stream);

#endif
