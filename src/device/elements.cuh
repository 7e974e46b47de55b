/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Element types on a device, and vectors of eight elements of a row: loads, stores, fp32 values. */
#ifndef COFI_ELEMENTS_CUH
#define COFI_ELEMENTS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define COFK_INLINE static __device__ __forceinline__
#define COFK_METHOD __device__ __forceinline__

enum { COFK_VECTOR = 8 };

/* ---- element types: 32-bit words of one or two ---------------------------------------------- */

struct cofk_bf16 {
    typedef uint16_t bits;
    static const int per_word = 2;

    static COFK_METHOD void unpack(uint32_t word, float *to)
    {
        to[0] = __uint_as_float(word << 16);
        to[1] = __uint_as_float(word & 0xffff0000u);
    }

    static COFK_METHOD uint32_t pack(const float *from)
    {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(from[0], from[1]);
        return (uint32_t)__bfloat16_as_ushort(pair.x) |
               (uint32_t)__bfloat16_as_ushort(pair.y) << 16;
    }
};

struct cofk_f16 {
    typedef uint16_t bits;
    static const int per_word = 2;

    static COFK_METHOD void unpack(uint32_t word, float *to)
    {
        to[0] = __half2float(__ushort_as_half((unsigned short)word));
        to[1] = __half2float(__ushort_as_half((unsigned short)(word >> 16)));
    }

    static COFK_METHOD uint32_t pack(const float *from)
    {
        const __half2 pair = __floats2half2_rn(from[0], from[1]);
        return (uint32_t)__half_as_ushort(pair.x) | (uint32_t)__half_as_ushort(pair.y) << 16;
    }
};

struct cofk_f32 {
    typedef uint32_t bits;
    static const int per_word = 1;

    static COFK_METHOD void unpack(uint32_t word, float *to)
    {
        to[0] = __uint_as_float(word);
    }

    /* A sum's NaN is the quiet one already; one rank's x is any. */
    static COFK_METHOD uint32_t pack(const float *from)
    {
        return from[0] == from[0] ? __float_as_uint(from[0]) : 0x7fffffffu;
    }
};

/* ---- vectors of eight elements -------------------------------------------------------------- */

template <class Elem> struct cofk_vector {
    static const int n_words = COFK_VECTOR / Elem::per_word;
    uint32_t word[n_words];
};

/* A word from single elements, 0 behind the row's end. */
template <class Elem>
COFK_INLINE uint32_t cofk_gather_word(const char *row, int element, int hidden)
{
    const typename Elem::bits *from = (const typename Elem::bits *)row;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < Elem::per_word; i++)
        if (element + i < hidden)
            word |= (uint32_t)from[element + i] << (16 * i);
    return word;
}

template <class Elem>
COFK_INLINE struct cofk_vector<Elem> cofk_load_vector(const char *row, int v, int hidden,
                                                      bool is_aligned)
{
    struct cofk_vector<Elem> vector;
    if (is_aligned && (v + 1) * COFK_VECTOR <= hidden) {
        const uint4 *from = (const uint4 *)row + v * (cofk_vector<Elem>::n_words / 4);
#pragma unroll
        for (int i = 0; i < cofk_vector<Elem>::n_words / 4; i++)
            *(uint4 *)&vector.word[4 * i] = from[i];
    } else {
#pragma unroll
        for (int i = 0; i < cofk_vector<Elem>::n_words; i++)
            vector.word[i] =
                cofk_gather_word<Elem>(row, v * COFK_VECTOR + i * Elem::per_word, hidden);
    }
    return vector;
}

template <class Elem>
COFK_INLINE void cofk_store_vector(char *row, int v, int hidden, bool is_aligned,
                                   const struct cofk_vector<Elem> &vector)
{
    if (is_aligned && (v + 1) * COFK_VECTOR <= hidden) {
        uint4 *to = (uint4 *)row + v * (cofk_vector<Elem>::n_words / 4);
#pragma unroll
        for (int i = 0; i < cofk_vector<Elem>::n_words / 4; i++)
            to[i] = *(const uint4 *)&vector.word[4 * i];
        return;
    }
    typename Elem::bits *to = (typename Elem::bits *)row;
#pragma unroll
    for (int i = 0; i < COFK_VECTOR; i++)
        if (v * COFK_VECTOR + i < hidden)
            to[v * COFK_VECTOR + i] = (typename Elem::bits)(
                vector.word[i / Elem::per_word] >> (16 * (i % Elem::per_word)));
}

template <class Elem>
COFK_INLINE void cofk_unpack(const struct cofk_vector<Elem> &vector, float to[COFK_VECTOR])
{
#pragma unroll
    for (int i = 0; i < cofk_vector<Elem>::n_words; i++)
        Elem::unpack(vector.word[i], to + i * Elem::per_word);
}

template <class Elem>
COFK_INLINE struct cofk_vector<Elem> cofk_pack(const float from[COFK_VECTOR])
{
    struct cofk_vector<Elem> vector;
#pragma unroll
    for (int i = 0; i < cofk_vector<Elem>::n_words; i++)
        vector.word[i] = Elem::pack(from + i * Elem::per_word);
    return vector;
}

#endif
