/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_info.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef COFI_CUDA

#include "backend/cuda/driver_cuda.h"
#include "ops/runtime/runtime_bench_cuda.h"
#include "symm/engine_cuda.h"

static void version_text(int version, char *text, size_t bytes)
{
    snprintf(text, bytes, version ? "%d.%d" : "none", version / 1000, version % 1000 / 10);
}

static void uuid_text(const cudaUUID_t *uuid, bool is_mig, char text[COFI_DEVICE_UUID_BYTES])
{
    char *at = text + sprintf(text, is_mig ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                      (unsigned char)uuid->bytes[i]);
}

/* CUDA's numbers of devices are the driver's: the same list, in the same order. */
static bool has_attribute(int device, CUdevice_attribute attribute)
{
    int value = 0;
    return cofi_driver_load() == COF_OK &&
           cofi_driver()->device_attribute(&value, attribute, device) == CUDA_SUCCESS && value;
}

/* Of a MIG instance its own, which the device's properties do not have. */
static void read_uuid(int device, const struct cudaDeviceProp *prop,
                      char text[COFI_DEVICE_UUID_BYTES])
{
    CUuuid uuid;
    if (cofi_driver_load() != COF_OK ||
        cofi_driver()->device_uuid(&uuid, device) != CUDA_SUCCESS)
        uuid = prop->uuid;
    uuid_text(&uuid, strstr(prop->name, " MIG ") != NULL, text);
}

static void look_inside(int idx, struct cofi_device *d)
{
    struct cofi_cuda_scope scope;
    size_t total;
    if (cofi_cuda_enter(idx, &scope) != COF_OK)
        return;
    if (cudaMemGetInfo(&d->free_bytes, &total) != cudaSuccess)
        d->free_bytes = 0;
    cofi_runtime_bench_code(d->code, sizeof d->code);
    cofi_cuda_leave(&scope);
}

static void read_device(int idx, int n, struct cofi_device *d)
{
    struct cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, idx) != cudaSuccess) {
        snprintf(d->name, sizeof d->name, "device %d: no properties to be had", idx);
        return;
    }
    snprintf(d->name, sizeof d->name, "%s", prop.name);
    d->is_mig = strstr(prop.name, " MIG ") != NULL;
    read_uuid(idx, &prop, d->uuid);
    d->n_sms = prop.multiProcessorCount;
    d->major = prop.major;
    d->minor = prop.minor;
    d->total_bytes = prop.totalGlobalMem;
    d->has_vmm =
        has_attribute(idx, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
        has_attribute(idx, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    d->has_ipc = has_attribute(idx, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
    d->has_stream_ops = has_attribute(idx, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
    for (int peer = 0; peer < n; peer++) {
        int reaches = peer == idx;
        if (peer != idx && cudaDeviceCanAccessPeer(&reaches, idx, peer) != cudaSuccess)
            reaches = 0;
        d->reaches[peer] = reaches;
    }
}

void cofi_devices_read(bool looks_inside, struct cofi_devices *devices)
{
    int driver = 0, runtime = 0, n = 0;
    *devices = (struct cofi_devices){0};
    cudaDriverGetVersion(&driver); /* 0 where there is no driver */
    cudaRuntimeGetVersion(&runtime);
    version_text(driver, devices->driver, sizeof devices->driver);
    version_text(runtime, devices->runtime, sizeof devices->runtime);
    cudaError_t error = driver ? cudaGetDeviceCount(&n) : cudaErrorInsufficientDriver;
    if (!driver)
        snprintf(devices->trouble, sizeof devices->trouble, "no driver (libcuda.so.1)");
    else if (error != cudaSuccess || n == 0)
        snprintf(devices->trouble, sizeof devices->trouble, "no device: %s",
                 error == cudaSuccess ? "CUDA_VISIBLE_DEVICES hides all, or there is none"
                                      : cudaGetErrorString(error));
    if (error != cudaSuccess) {
        cudaGetLastError(); /* or the next call that asks would be told of it */
        return;
    }
    devices->n = n < COFI_MAX_DEVICES ? n : COFI_MAX_DEVICES;
    for (int i = 0; i < devices->n; i++) {
        read_device(i, devices->n, &devices->device[i]);
        if (looks_inside)
            look_inside(i, &devices->device[i]);
    }
}

void cofi_device_of_world(const cof_world *world, char uuid[COFI_DEVICE_UUID_BYTES])
{
    struct cudaDeviceProp prop;
    uuid[0] = 0;
    if (!world->device)
        return;
    if (cudaGetDeviceProperties(&prop, world->device->device) != cudaSuccess)
        cudaGetLastError();
    else
        read_uuid(world->device->device, &prop, uuid);
}

#else

void cofi_devices_read(bool looks_inside, struct cofi_devices *devices)
{
    (void)looks_inside;
    *devices = (struct cofi_devices){.driver = "none", .runtime = "none",
                                     .trouble = "this build was made without CUDA"};
}

void cofi_device_of_world(const cof_world *world, char uuid[COFI_DEVICE_UUID_BYTES])
{
    (void)world;
    uuid[0] = 0;
}

#endif
