/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What a block takes, reckoned on the host from where slots lie. */
#ifndef COFI_ALLREDUCE_RMSNORM_BLOCK_CUH
#define COFI_ALLREDUCE_RMSNORM_BLOCK_CUH

#include "device/lines.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_block.h"

inline int64_t cofk_round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* Threads: as many as slots or vectors, whichever are more, in so few turns that none has much more
 * to do than another. Shared memory: the weights of a vector for each of them, then the sums of a
 * row, filled up to whole slots of x and to whole segments. Slots of sums, of the same elements in
 * fp32 or in the data type, fill up no more. */
template <class Code> inline struct cofi_arn_block cofk_block_of(int64_t hidden, int64_t elem_bytes)
{
    const uint32_t n_slots = Code::n_slots((uint64_t)(hidden * elem_bytes)), last = n_slots - 1;
    const int64_t in_slots = (Code::offset(last) / 4 + Code::n_words(last)) * (4 / elem_bytes);
    const int64_t in_segments = cofk_round_up(hidden, 256), n_vectors = in_segments / 8;
    const int64_t n = n_slots > n_vectors ? n_slots : n_vectors;
    const int64_t n_turns = (n + COFI_ARN_CUDA_THREADS - 1) / COFI_ARN_CUDA_THREADS;
    const int64_t n_threads = cofk_round_up((n + n_turns - 1) / n_turns, 32);
    const int64_t row = in_slots > in_segments ? in_slots : in_segments;
    return {(int)n_threads, (size_t)(n_threads * 8 + row) * sizeof(float)};
}

/* The largest H up to which every block has room in a device's `limit` bytes of shared memory. */
template <class Code> inline int64_t cofk_most_hidden(int64_t elem_bytes, size_t limit)
{
    int64_t hidden = 0;
    while (hidden < COFI_ARN_CUDA_MAX_HIDDEN &&
           cofk_block_of<Code>(hidden + 1, elem_bytes).shared_bytes + COFI_ARN_CUDA_STATIC_BYTES <=
               limit)
        hidden++;
    return hidden;
}

#endif
