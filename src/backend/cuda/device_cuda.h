/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* CUDA devices: which there are, errors, and the calling thread's current device. The runtime is
 * linked in and hidden; it shares contexts, streams and pointers with any other in the process. */
#ifndef COFI_DEVICE_CUDA_H
#define COFI_DEVICE_CUDA_H

#include <cuda_runtime_api.h>

#include "core/error.h"

/* COF_ERR_NOMEM or COF_ERR_SYSTEM with CUDA's name for the error. `what`: the call. */
cof_status cofi_cuda_error(const char *file, int line, cudaError_t error, const char *what);

#define COF_CUDA(expr)                                                                             \
    do {                                                                                           \
        cudaError_t cofi_cuda_error_ = (expr);                                                     \
        if (__builtin_expect(cofi_cuda_error_ != cudaSuccess, 0))                                  \
            return cofi_cuda_error(__FILE_NAME__, __LINE__, cofi_cuda_error_, #expr);              \
    } while (0)

/* Makes a device the thread's current one, and the earlier one again. Nothing to undo where enter
 * fails. */
struct cofi_cuda_scope {
    int previous;
};
cof_status cofi_cuda_enter(int device, struct cofi_cuda_scope *scope);
void cofi_cuda_leave(const struct cofi_cuda_scope *scope);

#endif
