/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "backend/cuda/memory_cuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "backend/cuda/driver_cuda.h"

/* cudaMalloc packs smaller blocks together, and a handle of one gives others away. */
#define IPC_ALIGN ((size_t)2 << 20)

/* ---- the process ---------------------------------------------------------------------------- */

static uint64_t process_number;

static void choose_number(void)
{
    if (getrandom(&process_number, sizeof process_number, 0) != (ssize_t)sizeof process_number)
        process_number = (uint64_t)getpid();
    process_number |= 1;
}

uint64_t cofi_cuda_process(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose_number);
    return process_number;
}

/* ---- any memory ----------------------------------------------------------------------------- */

/* Some of what is mapped by descriptors has no attributes. */
static bool is_mapped_vmm(const void *at)
{
    CUmemGenericAllocationHandle handle;
    if (cofi_driver()->retain(&handle, (void *)(uintptr_t)at) != CUDA_SUCCESS)
        return false;
    cofi_driver()->release(handle);
    return true;
}

enum cudaMemoryType cofi_cuda_memory_type(const void *at, int *device)
{
    struct cudaPointerAttributes attr = {.type = cudaMemoryTypeUnregistered};
    if (cudaPointerGetAttributes(&attr, at) != cudaSuccess)
        cudaGetLastError();
    if (attr.type == cudaMemoryTypeDevice)
        *device = attr.device;
    return attr.type == cudaMemoryTypeUnregistered && is_mapped_vmm(at) ? cudaMemoryTypeDevice
                                                                         : attr.type;
}

/* ---- making --------------------------------------------------------------------------------- */

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static cof_status check_room(size_t bytes)
{
    size_t room = 0, total = 0;
    COF_CUDA(cudaMemGetInfo(&room, &total));
    COF_FAIL_IF(bytes > room, COF_ERR_NOMEM,
                "%zu bytes of device memory wanted, %zu of %zu are free", bytes, room, total);
    return COF_OK;
}

/* Of memory that another device holds, too: only this one's kernels get at it here, and this host,
 * where it is the host's. */
static cof_status map_handle(int device, CUmemGenericAllocationHandle handle, bool is_hosts,
                             struct cofi_cuda_block *b)
{
    const struct cofi_driver *d = cofi_driver();
    CUdeviceptr at = 0;
    COF_DRIVER(d->reserve(&at, b->bytes, 0, 0, 0));
    b->base = (char *)(uintptr_t)at;
    COF_DRIVER(d->map(at, b->bytes, 0, handle, 0));
    b->is_mapped = true;
    CUmemAccessDesc access[2] = {{.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
                                 {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[0].location.id = device;
    access[1].location.type = CU_MEM_LOCATION_TYPE_HOST;
    COF_DRIVER(d->set_access(at, b->bytes, access, is_hosts ? 2 : 1));
    return COF_OK;
}

static cof_status import_handle(int device, int fd, bool is_hosts, struct cofi_cuda_block *b)
{
    const struct cofi_driver *d = cofi_driver();
    CUmemGenericAllocationHandle handle = 0;
    COF_DRIVER(d->import_handle(&handle, (void *)(intptr_t)fd,
                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    cof_status status = map_handle(device, handle, is_hosts, b);
    d->release(handle); /* the mapping holds the memory */
    return status;
}

static cof_status make_vmm(int device, size_t bytes, struct cofi_cuda_block *b)
{
    const struct cofi_driver *d = cofi_driver();
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    size_t granularity = 0;
    COF_DRIVER(d->granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    b->bytes = round_up(bytes, granularity);
    COF_TRY(check_room(b->bytes));
    CUmemGenericAllocationHandle handle = 0;
    CUresult error = d->create(&handle, b->bytes, &prop, 0);
    COF_FAIL_IF(error == CUDA_ERROR_OUT_OF_MEMORY, COF_ERR_NOMEM,
                "%zu bytes of device memory wanted: the driver refused them", b->bytes);
    COF_DRIVER(error);
    b->handle = handle;
    return map_handle(device, handle, false, b);
}

static cof_status make_ipc(size_t bytes, struct cofi_cuda_block *b)
{
    void *at = NULL;
    b->bytes = round_up(bytes, IPC_ALIGN);
    COF_TRY(check_room(b->bytes));
    COF_CUDA(cudaMalloc(&at, b->bytes));
    b->base = at;
    return COF_OK;
}

cof_status cofi_cuda_block_make(int device, bool is_vmm, size_t bytes, struct cofi_cuda_block *b)
{
    *b = (struct cofi_cuda_block){.is_vmm = is_vmm};
    bytes = bytes ? bytes : 1;
    cof_status status = is_vmm ? make_vmm(device, bytes, b) : make_ipc(bytes, b);
    if (status != COF_OK)
        cofi_cuda_block_close(b);
    return status;
}

void cofi_cuda_block_close(struct cofi_cuda_block *b)
{
    const struct cofi_driver *d = cofi_driver();
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)b->base;
    if (b->is_vmm) {
        if (b->is_mapped)
            d->unmap(at, b->bytes);
        if (b->base)
            d->unreserve(at, b->bytes);
        if (b->handle)
            d->release(b->handle);
    } else if (b->base && !b->is_borrowed) {
        if ((b->is_opened ? cudaIpcCloseMemHandle(b->base) : cudaFree(b->base)) != cudaSuccess)
            cudaGetLastError(); /* of an earlier kernel: nothing more can be done here */
    }
    *b = (struct cofi_cuda_block){0};
}

/* ---- the host's ----------------------------------------------------------------------------- */

static cof_status make_host(int device, size_t bytes, struct cofi_cuda_block *b)
{
    const struct cofi_driver *d = cofi_driver();
    int node = -1;
    COF_DRIVER(d->device_attribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device));
    COF_FAIL_IF(node < 0, COF_ERR_UNSUPPORTED, "device %d knows no node of the host", device);
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    prop.location.id = node;
    size_t granularity = 0;
    COF_DRIVER(d->granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    b->bytes = round_up(bytes, granularity);
    CUmemGenericAllocationHandle handle = 0;
    COF_DRIVER(d->create(&handle, b->bytes, &prop, 0));
    b->handle = handle;
    COF_TRY(map_handle(device, handle, true, b));
    memset(b->base, 0, b->bytes);
    return COF_OK;
}

cof_status cofi_cuda_host_make(int device, size_t bytes, struct cofi_cuda_block *b)
{
    *b = (struct cofi_cuda_block){.is_vmm = true};
    cof_status status = make_host(device, bytes, b);
    if (status != COF_OK)
        cofi_cuda_block_close(b);
    return status;
}

cof_status cofi_cuda_host_import(int device, size_t bytes, int fd, struct cofi_cuda_block *b)
{
    *b = (struct cofi_cuda_block){.is_vmm = true, .bytes = bytes};
    cof_status status = import_handle(device, fd, true, b);
    if (status != COF_OK)
        cofi_cuda_block_close(b);
    return status;
}

/* ---- handing over --------------------------------------------------------------------------- */

cof_status cofi_cuda_block_export(const struct cofi_cuda_block *b, int device,
                                  struct cofi_cuda_handle *h, int *fd_out)
{
    *fd_out = -1;
    *h = (struct cofi_cuda_handle){.process = cofi_cuda_process(), .bytes = b->bytes,
                                   .pointer = (uintptr_t)b->base, .device = device};
    if (!b->is_vmm) {
        COF_CUDA(cudaIpcGetMemHandle(&h->ipc, b->base));
        return COF_OK;
    }
    COF_DRIVER(cofi_driver()->export_handle(fd_out, b->handle,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    fcntl(*fd_out, F_SETFD, FD_CLOEXEC);
    return COF_OK;
}

/* A process cannot open a handle of its own, and need not: addresses are the same on all its
 * devices. */
static cof_status borrow(int device, const struct cofi_cuda_handle *h, struct cofi_cuda_block *b)
{
    if (h->device != device) {
        cudaError_t error = cudaDeviceEnablePeerAccess(h->device, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled)
            cudaGetLastError();
        else
            COF_CUDA(error);
    }
    b->is_borrowed = true;
    b->base = (char *)(uintptr_t)h->pointer;
    return COF_OK;
}

static cof_status import_ipc(const struct cofi_cuda_handle *h, struct cofi_cuda_block *b)
{
    void *at = NULL;
    COF_CUDA(cudaIpcOpenMemHandle(&at, h->ipc, cudaIpcMemLazyEnablePeerAccess));
    b->is_opened = true;
    b->base = at;
    return COF_OK;
}

cof_status cofi_cuda_block_import(int device, bool is_vmm, const struct cofi_cuda_handle *h, int fd,
                                  struct cofi_cuda_block *b)
{
    *b = (struct cofi_cuda_block){.is_vmm = is_vmm, .bytes = h->bytes};
    cof_status status = is_vmm                                ? import_handle(device, fd, false, b)
                        : h->process == cofi_cuda_process() ? borrow(device, h, b)
                                                              : import_ipc(h, b);
    if (status != COF_OK)
        cofi_cuda_block_close(b);
    return status;
}
