/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What a block of the devices' kernels takes; without CUDA's headers. */
#ifndef COFI_ALLREDUCE_RMSNORM_BLOCK_H
#define COFI_ALLREDUCE_RMSNORM_BLOCK_H

#include <stddef.h>

#define COFI_ARN_CUDA_MAX_HIDDEN 32768
#define COFI_ARN_CUDA_THREADS 576 /* at most: the lines of a row of 4096 in bf16 at once */
#define COFI_ARN_CUDA_STATIC_BYTES 1024 /* at most: of shared memory, beside what follows from H */

struct cofi_arn_block {
    int n_threads;
    size_t shared_bytes; /* dynamic */
};

#endif
