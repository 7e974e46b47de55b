/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The kernels of allreduce_rmsnorm, as the host sees them. */
#ifndef COFI_ALLREDUCE_RMSNORM_CUDA_H
#define COFI_ALLREDUCE_RMSNORM_CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device_arena.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_block.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COFI_ARN_CUDA_MAX_TOKENS (1 << 28) /* kernels count turns and steps in 32 bits */

/* What is the same for all rows of a call; by value. What every row needs comes first: a kernel
 * fetches its arguments line by line. */
struct cofi_arn_kernel {
    const char *x, *residual, *weight; /* residual, weight: NULL where there is none */
    char *residual_out, *norm_out;     /* likewise */
    int64_t x_pitch, residual_pitch, residual_out_pitch, norm_out_pitch; /* bytes */
    int32_t n_tokens, hidden;
    uint32_t turn_shift; /* of a block's row from turn to turn, beside the number of blocks */
    float eps;
    bool is_exact, weight_f32, weight_bias;
    bool x_aligned; /* rows at multiples of 8 bytes; what follows: of 16 */
    bool residual_aligned, weight_aligned, residual_out_aligned, norm_out_aligned;
    bool lets_next_begin; /* the next kernel's blocks, before this one has ended, if that one is
                             launched as dependent */
    bool only_one_half, no_beginning_wait; /* negative controls */
    /* In the slabs: rows of x by half, writer and row, then rows of sums by half and row. A row
     * takes x_slots or sum_slots slots of 16 bytes. */
    uint32_t x_slots, sum_slots;
    uint64_t tagged, x_half, x_writer, sums, sum_half; /* bytes */
    struct cofd_grid_call call;
};

enum cofi_arn_elem_cuda { COFI_ARN_BF16, COFI_ARN_F16, COFI_ARN_F32, COFI_ARN_ELEMS };

/* Which kernel: chosen once per plan. */
struct cofi_arn_choice {
    enum cofi_arn_elem_cuda elem;
    bool is_two_shot;
    bool has_lines; /* 128-byte lines carry the tag, else 16-byte words */
    bool has_pair;  /* one shot between two ranks */
};

/* Its entry, for attributes and occupancy. */
const void *cofi_arn_kernel_of(const struct cofi_arn_choice *choice);
/* Whether each slot of the kernel's tells of disagreement, so that nothing else must. */
bool cofi_arn_has_digest(const struct cofi_arn_choice *choice);
uint32_t cofi_arn_slots(bool has_lines, int64_t row_bytes);
struct cofi_arn_block cofi_arn_block_of(bool has_lines, int64_t hidden, int64_t elem_bytes);
/* The largest H that devices with `limit` bytes of shared memory for a block take. */
int64_t cofi_arn_most_hidden(bool has_lines, int64_t elem_bytes, size_t limit);

/* is_dependent: its blocks may take their places before the kernel in front of it has ended. */
cudaError_t cofi_arn_launch(const struct cofi_arn_choice *choice,
                            const struct cofi_arn_kernel *kernel, int n_blocks,
                            const struct cofi_arn_block *block, bool is_dependent,
                            cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
