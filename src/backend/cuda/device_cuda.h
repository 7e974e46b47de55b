/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* CUDA devices: errors, and the calling thread's current context. The runtime is linked in and
 * hidden; it shares contexts, streams and pointers with any other in the process. */
#ifndef COFI_DEVICE_CUDA_H
#define COFI_DEVICE_CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

#define COFI_CUDA_MAX_DEVICES 64

/* COF_ERR_NOMEM or COF_ERR_SYSTEM with CUDA's name for the error. `what`: the call. */
cof_status cofi_cuda_error(const char *file, int line, cudaError_t error, const char *what);

#define COF_CUDA(expr)                                                                             \
    do {                                                                                           \
        cudaError_t cofi_cuda_error_ = (expr);                                                     \
        if (__builtin_expect(cofi_cuda_error_ != cudaSuccess, 0))                                  \
            return cofi_cuda_error(__FILE_NAME__, __LINE__, cofi_cuda_error_, #expr);              \
    } while (0)

/* Makes a device's primary context the thread's current one, and the earlier one again: a context
 * of the caller's own making too, or none. Nothing to undo where enter fails, as it does in a child
 * of fork (COF_ERR_INVALID). */
struct cofi_cuda_scope {
    void *previous; /* CUcontext */
    bool is_changed;
};
cof_status cofi_cuda_enter(int device, struct cofi_cuda_scope *scope);
void cofi_cuda_leave(const struct cofi_cuda_scope *scope);

/* The same for the context that a stream is of; that of a default stream is the thread's current
 * one. */
cof_status cofi_cuda_enter_stream(cudaStream_t stream, struct cofi_cuda_scope *scope,
                                  int *device_out);

/* events_cuda.c, a pool of the process: a ticket is good for 1024 more records of its device. */
cof_status cofi_cuda_event_record(void *stream, uint64_t *ticket_out);
cof_status cofi_cuda_event_wait(void *stream, uint64_t ticket);

#endif
