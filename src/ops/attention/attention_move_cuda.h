/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Launchers of the kernels that begin a call of attention, hand over keys between its sections,
 * move rows of its tensors and end it, on the current device. */
#ifndef COFI_ATTENTION_MOVE_CUDA_H
#define COFI_ATTENTION_MOVE_CUDA_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "device/device_arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A [batch, row, head, dim] tensor; strides in bytes, the dim contiguous. */
struct cofi_attention_block {
    char *data;
    int64_t batch, row, head;
};

struct cofi_attention_extent {
    int64_t n_batch, n_rows, n_heads, dim_bytes;
};

/* dst = src, element by element. */
struct cofi_attention_move {
    struct cofi_attention_extent n;
    struct cofi_attention_block dst, src;
};

/* Between two sections of a ring: signals to one rank each, then waits for one each; -1: none. All
 * waits are for words of this call, the waits' options for their texts. */
struct cofi_attention_turn {
    struct cofd_binding *binding;
    int ready, ack; /* purposes */
    int ready_to, ack_to, ready_from, ack_from;
    struct cofd_wait_options ready_wait, ack_wait;
};

/* The end of a forward call: rows from pad_begin on are padding, o = 0 and lse = -inf. Where the
 * arena is dead, all rows are NaN. */
struct cofi_attention_finish {
    struct cofd_arena *arena;
    struct cofi_attention_extent n;
    struct cofi_attention_block o;
    float *lse; /* [batch, head, row]; strides in elements, rows contiguous */
    int64_t lse_batch, lse_head;
    int64_t pad_begin;
    struct cofd_binding *binding; /* where the end also acks to all other ranks; NULL: does not */
    int ack;                      /* purpose */
};

/* Begins the plan's call on its arena, waits for the last one's acks of all other ranks (`acks`, a
 * purpose; negative: does not), and marks the call: cofi_cuda_call_begin, _wait_ack and _mark in
 * one kernel. */
cudaError_t cofi_launch_attention_begin(struct cofd_binding *binding, const struct cofd_call *call,
                                        const struct cofd_wait_options *options, int acks, int mark,
                                        cudaStream_t stream);
cudaError_t cofi_launch_attention_turn(const struct cofi_attention_turn *turn, cudaStream_t stream);
cudaError_t cofi_launch_attention_move(const struct cofi_attention_move *move, int n_blocks,
                                       cudaStream_t stream);
/* is_dependent: its blocks may take their places before the kernel in front of it has ended. */
cudaError_t cofi_launch_attention_finish(const struct cofi_attention_finish *finish, int n_blocks,
                                         bool is_dependent, cudaStream_t stream);
/* Loads all on the current device. finish_waits: the code of `finish` that was loaded waits for the
 * kernel in front, as it must where it is dependent. */
cudaError_t cofi_load_attention_move(bool *finish_waits_out);

#ifdef __cplusplus
}
#endif
#endif
