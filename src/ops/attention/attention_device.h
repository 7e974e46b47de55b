/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Attention on CUDA devices: what a plan holds (attention_cuda.c), and its calls
 * (attention_schedule_cuda.c). */
#ifndef COFI_ATTENTION_DEVICE_H
#define COFI_ATTENTION_DEVICE_H

#include "backend/cuda/device_cuda.h"
#include "backend/cuda/memory_cuda.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_engine.h"
#include "ops/attention/attention_steps.h"

/* Device memory of a plan, beside what its engines want. */
struct cofi_attention_places {
    struct cofi_kv_buffer gathered; /* gather: keys of all rows of the sequence */
    char *partial;                  /* [partial rows, B, H, Dv] of the data type */
    float *partial_lse;             /* [B, H, partial rows] */
    float *acc;                     /* [local rows, B, H, Dv]; NULL: none */
    /* Tensors of other strides than the compact ones, copied; NULL with only_compact. */
    char *q, *k, *v, *o;
    float *lse;
};

struct cofi_attention_device {
    int device;
    struct cofi_attention_steps steps;
    struct cofi_attention_kernels kernels;
    int *kernel; /* by job */
    /* The last job's heads as two sections, on S and on B, but where sections run alone. */
    int split_job;          /* -1: none */
    int64_t split_kv_heads; /* of the one on S */
    int split_kernel[2];
    struct cofi_attention_places at;
    struct cofi_kv_buffer slot[2]; /* ring: receive slots, in the arena */
    struct cofi_cuda_block memory, workspace;
    size_t beside_workspace; /* where that of sections on B begins */
    cudaStream_t comm;       /* C: transfers; NULL for one rank */
    cudaStream_t beside;     /* B: the own section; NULL where it is on S */
    cudaEvent_t called, begun, turned, split; /* recorded on S */
    cudaEvent_t joined, sent[2];              /* on C */
    cudaEvent_t beside_done;                  /* on B */
    int n_move_blocks, n_finish_blocks;
    bool is_dependent; /* the last kernel may begin before the one in front of it has ended */
};

/* Strides of a compact tensor of the plan's format. */
struct cofi_attention_strides cofi_attention_compact(const struct cofi_attention_plan *plan,
                                                     int64_t n_heads, int64_t dim);
/* Of [rows, B, heads, dim], as partial results lie, and keys in gather. */
struct cofi_attention_strides cofi_attention_by_rows(const struct cofi_attention_plan *plan,
                                                     int64_t n_heads, int64_t dim);

/* Of keys in a receive slot: those of a compact tensor of max_rows rows. */
struct cofi_attention_strides cofi_attention_slot_strides(const struct cofi_attention_plan *plan,
                                                          int64_t n_heads, int64_t dim);

/* Enqueues a forward call, or parts of it, on a stream of the device, the thread's current one. */
cof_status cofi_attention_device_forward(struct cofi_attention_plan *plan,
                                         const struct cofi_attention_call *call, int parts,
                                         cudaStream_t stream);

#endif
