/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The bytes of the messages that checks send, the same on hosts and devices. */
#ifndef COFI_RUNTIME_CHECK_MESSAGE_H
#define COFI_RUNTIME_CHECK_MESSAGE_H

#include <stdint.h>

#ifdef __CUDACC__
#define COFI_MESSAGE_FN static __host__ __device__ inline
#else
#define COFI_MESSAGE_FN static inline
#endif

/* The finaliser of splitmix64. */
COFI_MESSAGE_FN uint64_t cofi_message_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Of message `idx` of rank `from` to rank `to`. */
COFI_MESSAGE_FN uint64_t cofi_message_key(uint64_t from, uint64_t to, uint64_t idx)
{
    return cofi_message_mix(cofi_message_mix(from << 32 | to) +
                            UINT64_C(0x9e3779b97f4a7c15) * (idx + 1));
}

COFI_MESSAGE_FN unsigned char cofi_message_byte(uint64_t key, uint64_t i)
{
    return (unsigned char)((key >> (i % 8 * 8)) + i / 8 * 37);
}

#endif
