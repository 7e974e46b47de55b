/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The CUDA devices that this process sees, for `cofuse info` and the bench's account of the
 * machine. The one place of the program that asks CUDA; in a build without, it says so. */
#ifndef COFI_DEVICE_INFO_H
#define COFI_DEVICE_INFO_H

#include <stdbool.h>
#include <stddef.h>

#include "cofuse/world.h"

enum { COFI_MAX_DEVICES = 32, COFI_DEVICE_UUID_BYTES = 48 };

struct cofi_device {
    char name[128], uuid[COFI_DEVICE_UUID_BYTES];
    int n_sms, major, minor;
    size_t free_bytes, total_bytes;
    bool is_mig;         /* a part of a device: reaches no other */
    bool has_vmm;        /* memory as descriptors (cuMem*) */
    bool has_ipc;        /* the older handles (cudaIpc*) */
    bool has_stream_ops; /* 64-bit values written and waited for by a stream */
    char code[40];       /* of the kernels that it would run: "sm_90a"; or why none */
    bool reaches[COFI_MAX_DEVICES];
};

struct cofi_devices {
    int n;
    char driver[24], runtime[24]; /* versions of CUDA: "13.0"; "none" */
    char trouble[256]; /* with n = 0: why there is none */
    struct cofi_device device[COFI_MAX_DEVICES];
};

/* `looks_inside`: free memory and code too, which makes a context on each device and takes memory
 * there. */
void cofi_devices_read(bool looks_inside, struct cofi_devices *devices_out);

/* UUID of the device that this rank works on; "" on the CPU. */
void cofi_device_of_world(const cof_world *world, char uuid[COFI_DEVICE_UUID_BYTES]);

#endif
