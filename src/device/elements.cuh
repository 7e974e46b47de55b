/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Element types of kernels: 32-bit words of one or two elements, to fp32 and back, to nearest
 * even. */
#ifndef COFI_ELEMENTS_CUH
#define COFI_ELEMENTS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

struct cofk_bf16 {
    typedef uint16_t bits;
    static const int per_word = 2;

    static __device__ __forceinline__ void unpack(uint32_t word, float *to)
    {
        to[0] = __uint_as_float(word << 16);
        to[1] = __uint_as_float(word & 0xffff0000u);
    }

    static __device__ __forceinline__ uint32_t pack(const float *from)
    {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(from[0], from[1]);
        return (uint32_t)__bfloat16_as_ushort(pair.x) |
               (uint32_t)__bfloat16_as_ushort(pair.y) << 16;
    }
};

struct cofk_f16 {
    typedef uint16_t bits;
    static const int per_word = 2;

    static __device__ __forceinline__ void unpack(uint32_t word, float *to)
    {
        to[0] = __half2float(__ushort_as_half((unsigned short)word));
        to[1] = __half2float(__ushort_as_half((unsigned short)(word >> 16)));
    }

    static __device__ __forceinline__ uint32_t pack(const float *from)
    {
        const __half2 pair = __floats2half2_rn(from[0], from[1]);
        return (uint32_t)__half_as_ushort(pair.x) | (uint32_t)__half_as_ushort(pair.y) << 16;
    }
};

struct cofk_f32 {
    typedef uint32_t bits;
    static const int per_word = 1;

    static __device__ __forceinline__ void unpack(uint32_t word, float *to)
    {
        to[0] = __uint_as_float(word);
    }

    /* A sum's NaN is the quiet one already; one rank's x is any. */
    static __device__ __forceinline__ uint32_t pack(const float *from)
    {
        return from[0] == from[0] ? __float_as_uint(from[0]) : 0x7fffffffu;
    }
};

#endif
