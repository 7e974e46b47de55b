/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of a row on a device: element types, and what follows the sum. Every step is one fp32
 * operation, rounded to nearest even and not contracted (the header of the operator says which). */
#ifndef COFI_ALLREDUCE_RMSNORM_ROW_CUH
#define COFI_ALLREDUCE_RMSNORM_ROW_CUH

#include "device/elements.cuh"
#include "device/grid_call.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_cuda.h"

#define COFK_INLINE static __device__ __forceinline__
#define COFK_METHOD __device__ __forceinline__

enum { COFK_VECTOR = 8, COFK_SEGMENT = 256, COFK_MAX_SEGMENTS = COFI_ARN_CUDA_MAX_HIDDEN / 256 };

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

/* ---- what follows the sum ------------------------------------------------------------------- */

/* z of one vector, and residual_out. */
template <class Elem>
COFK_INLINE void cofk_add_residual(const struct cofi_arn_kernel &k, int64_t row, int v,
                                   const struct cofk_vector<Elem> &residual, float z[COFK_VECTOR])
{
    float r[COFK_VECTOR];
    if (!k.is_exact)
        cofk_unpack<Elem>(cofk_pack<Elem>(z), z);
    cofk_unpack<Elem>(residual, r);
#pragma unroll
    for (int i = 0; i < COFK_VECTOR && k.residual; i++)
        z[i] = __fadd_rn(z[i], r[i]);
    const struct cofk_vector<Elem> rounded = cofk_pack<Elem>(z);
    if (!k.is_exact)
        cofk_unpack<Elem>(rounded, z);
    if (k.residual_out)
        cofk_store_vector<Elem>(k.residual_out + row * k.residual_out_pitch, v, k.hidden,
                                k.residual_out_aligned, rounded);
}

/* The tree over a vector's squares, then over those of a warp: a segment. */
COFK_INLINE float cofk_sum_squares(const float z[COFK_VECTOR])
{
    float s[COFK_VECTOR];
#pragma unroll
    for (int i = 0; i < COFK_VECTOR; i++)
        s[i] = __fmul_rn(z[i], z[i]);
#pragma unroll
    for (int step = 1; step < COFK_VECTOR; step *= 2)
#pragma unroll
        for (int i = 0; i < COFK_VECTOR; i += 2 * step)
            s[i] = __fadd_rn(s[i], s[i + step]);
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
        s[0] = __fadd_rn(s[0], __shfl_xor_sync(0xffffffffu, s[0], step));
    return s[0];
}

/* 1 / sqrt(mean + eps). Segments behind the last are 0, which adds nothing. */
COFK_INLINE float cofk_inverse_rms(const struct cofi_arn_kernel &k, const float *segment)
{
    const int n = (k.hidden + COFK_SEGMENT - 1) / COFK_SEGMENT;
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < n; i += 4) {
        const float4 s = *(const float4 *)(segment + i);
        sum = i == 0 ? s.x : __fadd_rn(sum, s.x);
        sum = __fadd_rn(__fadd_rn(__fadd_rn(sum, s.y), s.z), s.w);
    }
    const float mean = __fdiv_rn(sum, (float)k.hidden);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, k.eps)));
}

template <class Elem>
COFK_INLINE void cofk_load_weight(const struct cofi_arn_kernel &k, int v, float w[COFK_VECTOR])
{
    if (k.weight_f32)
        cofk_unpack<cofk_f32>(
            cofk_load_vector<cofk_f32>(k.weight, v, k.hidden, k.weight_aligned), w);
    else
        cofk_unpack<Elem>(cofk_load_vector<Elem>(k.weight, v, k.hidden, k.weight_aligned), w);
#pragma unroll
    for (int i = 0; i < COFK_VECTOR && k.weight_bias; i++)
        w[i] = __fadd_rn(w[i], 1.0f);
}

/* A thread's vectors of a row are v = thread, thread + n_threads, ...: a warp's are a segment. Of
 * the first, z stays in registers, and its weights in shared memory from row to row. */
template <class Elem>
COFK_INLINE struct cofk_vector<Elem> cofk_load_residual(const struct cofi_arn_kernel &k,
                                                        int64_t row, int v)
{
    return cofk_load_vector<Elem>(k.residual + row * k.residual_pitch, v, k.hidden,
                                  k.residual_aligned);
}

COFK_INLINE bool cofk_is_in_row(const struct cofi_arn_kernel &k, int v)
{
    return v * COFK_VECTOR < k.hidden;
}

/* To or from shared memory: in two accesses. */
COFK_INLINE void cofk_copy_vector(float *to, const float *from)
{
#pragma unroll
    for (int j = 0; j < COFK_VECTOR; j += 4)
        *(float4 *)(to + j) = *(const float4 *)(from + j);
}

/* z of a vector from its sums; its part of the segment's squares. */
template <class Elem>
COFK_INLINE void cofk_make_z(const struct cofi_arn_kernel &k, int64_t row, int v,
                             const float *sums, const struct cofk_vector<Elem> &residual,
                             float *segment, float z[COFK_VECTOR])
{
    if ((v + 1) * COFK_VECTOR <= k.hidden) {
        cofk_copy_vector(z, sums + v * COFK_VECTOR);
    } else {
#pragma unroll
        for (int j = 0; j < COFK_VECTOR; j++)
            z[j] = v * COFK_VECTOR + j < k.hidden ? sums[v * COFK_VECTOR + j] : 0.0f;
    }
    if (cofk_is_in_row(k, v))
        cofk_add_residual<Elem>(k, row, v, residual, z);
    const float sum = cofk_sum_squares(z);
    if (v % 32 == 0)
        segment[v / 32] = sum;
}

template <class Elem>
COFK_INLINE void cofk_store_norm(const struct cofi_arn_kernel &k, int64_t row, int v, float inverse,
                                 float z[COFK_VECTOR], const float w[COFK_VECTOR])
{
#pragma unroll
    for (int j = 0; j < COFK_VECTOR; j++)
        z[j] = __fmul_rn(__fmul_rn(z[j], inverse), w[j]);
    cofk_store_vector<Elem>(k.norm_out + row * k.norm_out_pitch, v, k.hidden, k.norm_out_aligned,
                            cofk_pack<Elem>(z));
}

/* From the sums of a row in shared memory, which all threads have stored, to its outputs. No thread
 * needs the sums any more when it returns on any. `residual` and `weight`: of the first vector. */
template <class Elem>
COFK_INLINE void cofk_finish_row(const struct cofi_arn_kernel &k, int64_t row, float *sums,
                                 float *segment, const struct cofk_vector<Elem> &residual,
                                 const float *weight)
{
    const int v = (int)threadIdx.x, step = (int)blockDim.x;
    const int end = (k.hidden + COFK_SEGMENT - 1) / COFK_SEGMENT * (COFK_SEGMENT / COFK_VECTOR);
    __align__(16) float z[COFK_VECTOR];
    cofk_make_z<Elem>(k, row, v, sums, residual, segment, z);
#pragma unroll 1
    for (int u = v + step; u < end; u += step) {
        struct cofk_vector<Elem> next;
        __align__(16) float more[COFK_VECTOR];
        if (k.residual && cofk_is_in_row(k, u))
            next = cofk_load_residual<Elem>(k, row, u);
        cofk_make_z<Elem>(k, row, u, sums, next, segment, more);
        cofk_copy_vector(sums + u * COFK_VECTOR, more);
    }
    __syncthreads();
    if (!k.norm_out)
        return;
    const float inverse = cofk_inverse_rms(k, segment);
    if (cofk_is_in_row(k, v)) {
        __align__(16) float w[COFK_VECTOR];
        cofk_copy_vector(w, weight);
        cofk_store_norm<Elem>(k, row, v, inverse, z, w);
    }
#pragma unroll 1
    for (int u = v + step; cofk_is_in_row(k, u); u += step) {
        __align__(16) float more[COFK_VECTOR], w[COFK_VECTOR];
        cofk_copy_vector(more, sums + u * COFK_VECTOR);
        cofk_load_weight<Elem>(k, u, w);
        cofk_store_norm<Elem>(k, row, u, inverse, more, w);
    }
    if (end > step)
        __syncthreads();
}

#endif
