/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What ranks on devices decide from what all of them told: the same on every rank, without a call
 * to a device. */
#ifndef COFI_DEVICE_PEERS_H
#define COFI_DEVICE_PEERS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

enum cofi_device_memory { COFI_MEMORY_ANY, COFI_MEMORY_VMM, COFI_MEMORY_IPC };

struct cofi_device_id {
    char name[64];
    unsigned char uuid[16]; /* of a MIG instance: its own */
};

struct cofi_device_info {
    struct cofi_device_id id;
    int32_t n_sms;
    int32_t has_vmm, has_ipc; /* can be had of that device and its driver */
    int32_t has_lines;        /* arrive whole, from here at all ranks' devices */
    int32_t wanted;           /* enum cofi_device_memory: COFUSE_CUDA_MEMORY */
};

/* The device that a text means: a number, or a UUID ("GPU-..", "MIG-..", or its digits alone) of
 * which the first eight digits do where they are enough. `what` names the text in errors. */
cof_status cofi_device_match(const char *what, const char *text, const struct cofi_device_id *ids,
                             int n, int *device_out);

/* "GPU-1f2e3d4c": enough to tell devices apart in a text. */
void cofi_device_name(const struct cofi_device_id *id, char *text, size_t bytes);

bool cofi_device_is_mig(const struct cofi_device_id *id);
bool cofi_device_is_same(const struct cofi_device_id *a, const struct cofi_device_id *b);

/* Ranks on the device of `rank`. */
int cofi_device_n_ranks(const struct cofi_device_info *ranks, int n, int rank);
/* On the device that has the most: the same on all ranks. */
int cofi_device_most_ranks(const struct cofi_device_info *ranks, int n);
/* The fewest that a rank's device has. */
int cofi_device_n_sms(const struct cofi_device_info *ranks, int n);

/* COF_ERR_UNSUPPORTED where ranks are on devices that cannot reach each other by their kind. */
cof_status cofi_device_check_kinds(const struct cofi_device_info *ranks, int n);
/* The same for this rank's device: can[r] is 1 where it can reach that of rank r, 0 where it
 * cannot, -1 where this process does not see that one. */
cof_status cofi_device_check_access(const struct cofi_device_info *ranks, int n, int rank,
                                    const signed char *can);

/* COF_ERR_MISMATCH where ranks want different kinds, COF_ERR_UNSUPPORTED where one lacks it. */
cof_status cofi_device_choose_memory(const struct cofi_device_info *ranks, int n,
                                     enum cofi_device_memory *memory_out);

#endif
