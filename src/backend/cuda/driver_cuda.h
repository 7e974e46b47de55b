/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The driver's entry points that the runtime has no calls for, found at run time: the library loads
 * where no driver is. */
#ifndef COFI_DRIVER_CUDA_H
#define COFI_DRIVER_CUDA_H

#include <cuda.h>
#include <cudaTypedefs.h>

#include "core/error.h"

/* X(member, type, symbol): symbols are the driver's ABI, with the version that the type has. */
#define COFI_DRIVER_CALLS(X)                                                                       \
    X(init, PFN_cuInit_v2000, "cuInit")                                                            \
    X(error_name, PFN_cuGetErrorName_v6000, "cuGetErrorName")                                      \
    X(error_string, PFN_cuGetErrorString_v6000, "cuGetErrorString")                                \
    X(device_name, PFN_cuDeviceGetName_v2000, "cuDeviceGetName")                                   \
    X(device_uuid, PFN_cuDeviceGetUuid_v11040, "cuDeviceGetUuid_v2")                               \
    X(device_attribute, PFN_cuDeviceGetAttribute_v2000, "cuDeviceGetAttribute")                    \
    X(primary_retain, PFN_cuDevicePrimaryCtxRetain_v7000, "cuDevicePrimaryCtxRetain")              \
    X(context_get, PFN_cuCtxGetCurrent_v4000, "cuCtxGetCurrent")                                   \
    X(context_set, PFN_cuCtxSetCurrent_v4000, "cuCtxSetCurrent")                                   \
    X(context_device, PFN_cuCtxGetDevice_v2000, "cuCtxGetDevice")                                  \
    X(stream_context, PFN_cuStreamGetCtx_v9020, "cuStreamGetCtx")                                  \
    X(address_range, PFN_cuMemGetAddressRange_v3020, "cuMemGetAddressRange_v2")                    \
    X(granularity, PFN_cuMemGetAllocationGranularity_v10020, "cuMemGetAllocationGranularity")      \
    X(create, PFN_cuMemCreate_v10020, "cuMemCreate")                                               \
    X(retain, PFN_cuMemRetainAllocationHandle_v11000, "cuMemRetainAllocationHandle")               \
    X(release, PFN_cuMemRelease_v10020, "cuMemRelease")                                            \
    X(export_handle, PFN_cuMemExportToShareableHandle_v10020, "cuMemExportToShareableHandle")      \
    X(import_handle, PFN_cuMemImportFromShareableHandle_v10020,                                    \
      "cuMemImportFromShareableHandle")                                                            \
    X(reserve, PFN_cuMemAddressReserve_v10020, "cuMemAddressReserve")                              \
    X(unreserve, PFN_cuMemAddressFree_v10020, "cuMemAddressFree")                                  \
    X(map, PFN_cuMemMap_v10020, "cuMemMap")                                                        \
    X(unmap, PFN_cuMemUnmap_v10020, "cuMemUnmap")                                                  \
    X(set_access, PFN_cuMemSetAccess_v10020, "cuMemSetAccess")                                     \
    X(write_value, PFN_cuStreamWriteValue32_v11070, "cuStreamWriteValue32_v2")                     \
    X(wait_value, PFN_cuStreamWaitValue32_v11070, "cuStreamWaitValue32_v2")

struct cofi_driver {
#define COFI_DRIVER_MEMBER(member, type, symbol) type member;
    COFI_DRIVER_CALLS(COFI_DRIVER_MEMBER)
#undef COFI_DRIVER_MEMBER
};

/* Loads it, once in a process. COF_ERR_UNSUPPORTED where there is none, or one that is too old;
 * COF_ERR_INVALID in a child of fork, which cannot use what its parent has loaded. */
cof_status cofi_driver_load(void);
/* After that. */
const struct cofi_driver *cofi_driver(void);

cof_status cofi_driver_error(const char *file, int line, CUresult error, const char *what);

#define COF_DRIVER(expr)                                                                           \
    do {                                                                                           \
        CUresult cofi_driver_error_ = (expr);                                                      \
        if (__builtin_expect(cofi_driver_error_ != CUDA_SUCCESS, 0))                               \
            return cofi_driver_error(__FILE_NAME__, __LINE__, cofi_driver_error_, #expr);          \
    } while (0)

#endif
