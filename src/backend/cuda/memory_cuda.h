/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Blocks of device memory that other ranks can map, in two kinds:
 *
 *   vmm  cuMemCreate, handed over as a file descriptor. The memory lives as long as any mapping of
 *        it, and making and closing never wait for kernels: cudaFree does, also for kernels that
 *        wait for a rank in this very thread's process.
 *   ipc  cudaMalloc and cudaIpc handles, where the driver has no vmm. The owner must close last.
 *
 * All calls are made in the context of the device that uses the block (cofi_cuda_enter). */
#ifndef COFI_MEMORY_CUDA_H
#define COFI_MEMORY_CUDA_H

#include <stdbool.h>
#include <stddef.h>

#include "backend/cuda/device_cuda.h"

struct cofi_cuda_block {
    char *base; /* NULL: none */
    size_t bytes;
    bool is_vmm;
    /* Of vmm. */
    unsigned long long handle; /* the owner's, for exports; 0: none */
    bool is_mapped;
    /* Of ipc. */
    bool is_opened, is_borrowed; /* another process's, another rank's of this process; else owned */
};

/* Host memory of the driver's, handed over in the same way, which hosts and devices of all ranks
 * map at one address each. COF_ERR_UNSUPPORTED where the driver has none. */
cof_status cofi_cuda_host_make(int device, size_t bytes, struct cofi_cuda_block *block);
cof_status cofi_cuda_host_import(int device, size_t bytes, int fd, struct cofi_cuda_block *block);

/* What another rank needs beside a descriptor. */
struct cofi_cuda_handle {
    uint64_t process; /* random number of the owner's process */
    uint64_t bytes, pointer;
    int32_t device; /* the owner's, as it counts */
    cudaIpcMemHandle_t ipc;
};

/* A random number of this process. */
uint64_t cofi_cuda_process(void);

/* Of any address; cudaMemoryTypeUnregistered where the driver does not know it. *device is set
 * where it is a device's and the driver tells whose. */
enum cudaMemoryType cofi_cuda_memory_type(const void *at, int *device);

/* At least `bytes` bytes, not zeroed. COF_ERR_NOMEM says how many there were. */
cof_status cofi_cuda_block_make(int device, bool is_vmm, size_t bytes,
                                struct cofi_cuda_block *block);
/* *fd_out is the caller's to close; -1 for ipc. */
cof_status cofi_cuda_block_export(const struct cofi_cuda_block *block, int device,
                                  struct cofi_cuda_handle *handle_out, int *fd_out);
/* Another rank's block, mapped for this device alone. `fd` stays the caller's. */
cof_status cofi_cuda_block_import(int device, bool is_vmm, const struct cofi_cuda_handle *handle,
                                  int fd, struct cofi_cuda_block *block);
/* Of one that was made or imported; none is fine. */
void cofi_cuda_block_close(struct cofi_cuda_block *block);

#endif
