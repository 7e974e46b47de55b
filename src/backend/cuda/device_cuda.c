/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/device_cuda.h"

#include <stdatomic.h>

#include "backend/cuda/driver_cuda.h"

cof_status cofi_cuda_error(const char *file, int line, cudaError_t error, const char *what)
{
    cudaGetLastError(); /* it is told here: the caller's own checks must not find it again */
    return cofi_fail(file, line,
                     error == cudaErrorMemoryAllocation ? COF_ERR_NOMEM : COF_ERR_SYSTEM,
                     "%s: %s (%d: %s)", what, cudaGetErrorName(error), (int)error,
                     cudaGetErrorString(error));
}

/* Retained once in a process and never released: the runtime has it too. */
static cof_status primary_context(int device, CUcontext *out)
{
    static _Atomic(CUcontext) contexts[COFI_CUDA_MAX_DEVICES];
    *out = atomic_load_explicit(&contexts[device], memory_order_acquire);
    if (*out)
        return COF_OK;
    COF_DRIVER(cofi_driver()->primary_retain(out, device));
    atomic_store_explicit(&contexts[device], *out, memory_order_release);
    return COF_OK;
}

static cof_status enter_context(CUcontext wanted, struct cofi_cuda_scope *scope)
{
    CUcontext current = NULL;
    COF_DRIVER(cofi_driver()->context_get(&current));
    *scope = (struct cofi_cuda_scope){current, current != wanted};
    if (scope->is_changed)
        COF_DRIVER(cofi_driver()->context_set(wanted));
    return COF_OK;
}

cof_status cofi_cuda_enter(int device, struct cofi_cuda_scope *scope)
{
    CUcontext wanted;
    COF_TRY(cofi_driver_load());
    COF_TRY(primary_context(device, &wanted));
    return enter_context(wanted, scope);
}

void cofi_cuda_leave(const struct cofi_cuda_scope *scope)
{
    if (scope->is_changed)
        cofi_driver()->context_set(scope->previous);
}

static cof_status current_device(int *device_out)
{
    COF_CUDA(cudaGetDevice(device_out));
    COF_FAIL_IF(*device_out < 0 || *device_out >= COFI_CUDA_MAX_DEVICES, COF_ERR_UNSUPPORTED,
                "device %d: wanted at most %d devices", *device_out, COFI_CUDA_MAX_DEVICES);
    return COF_OK;
}

cof_status cofi_cuda_enter_stream(cudaStream_t stream, struct cofi_cuda_scope *scope,
                                  int *device_out)
{
    CUcontext wanted = NULL;
    *scope = (struct cofi_cuda_scope){0};
    COF_TRY(cofi_driver_load());
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
        return current_device(device_out);
    COF_DRIVER(cofi_driver()->stream_context((CUstream)stream, &wanted));
    COF_TRY(enter_context(wanted, scope));
    cof_status status = current_device(device_out);
    if (status != COF_OK)
        cofi_cuda_leave(scope);
    return status;
}
