/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Kernels of `cofuse bench runtime`.
 *
 *   word       writer: the peer's rounds kernel, store_release_sys   reader: this rank's
 *   stop       a copy of the host's into device memory               one thread of each block of
 *                                                                    busy, at its start
 *   started    any block of busy                                     the host
 *   late       the one thread of rounds                              the host, after the stream
 *
 * Rounds: the one that begins stores r into the peer's word and waits for r in its own; the other
 * waits, then stores. A word only grows, and r + 1 is stored after r was seen on both sides. */
#include "device/order.h"
#include "ops/runtime/runtime_bench_cuda.h"

#include <stdio.h>

static const int busy_threads = 256;
#define ROUND_LIMIT_NS UINT64_C(5000000000)
#define BUSY_NS UINT64_C(100000) /* of a block */
#define BUSY_WAVES 2000 /* 0.2 s, unless stopped */
#define BUSY_CHUNK 256 /* multiply-adds of a thread between looks at the clock */

/* ---- nothing -------------------------------------------------------------------------------- */

extern "C" __global__ void cofk_bench_empty(void)
{
}

cudaError_t cofi_rb_launch_empty(cudaStream_t stream)
{
    cofk_bench_empty<<<1, 32, 0, stream>>>();
    return cudaPeekAtLastError();
}

/* ---- rounds --------------------------------------------------------------------------------- */

/* False past the limit. */
static __device__ bool wait_round(const uint64_t *word, uint64_t round)
{
    const uint64_t begin = cofd_now_ns();
    for (uint32_t looks = 0; cofd_load_acquire_sys(word) < round; looks++)
        if (looks % 1024 == 1023 && cofd_now_ns() - begin > ROUND_LIMIT_NS)
            return false;
    return true;
}

extern "C" __global__ void cofk_bench_rounds(const __grid_constant__ struct cofi_rb_rounds rounds)
{
    for (uint64_t r = rounds.first; r < rounds.first + rounds.n; r++) {
        if (rounds.begins)
            cofd_store_release_sys(rounds.peers, r);
        if (!wait_round(rounds.own, r)) {
            cofd_store_release_sys(rounds.late, 1);
            return;
        }
        if (!rounds.begins)
            cofd_store_release_sys(rounds.peers, r);
    }
}

cudaError_t cofi_rb_launch_rounds(const struct cofi_rb_rounds *rounds, cudaStream_t stream)
{
    cofk_bench_rounds<<<1, 1, 0, stream>>>(*rounds);
    return cudaPeekAtLastError();
}

/* ---- a busy device -------------------------------------------------------------------------- */

/* `sink` is never written, but the compiler does not know: the products stay. */
extern "C" __global__ void __launch_bounds__(256)
cofk_bench_busy(const uint64_t *stop, uint64_t *started, float *sink)
{
    const bool stops = threadIdx.x == 0 && cofd_load_relaxed_sys(stop) != 0;
    float x = (float)threadIdx.x, y = x + 1, z = x + 2, w = x + 3;
    if (blockIdx.x == 0 && threadIdx.x == 0)
        cofd_store_release_sys(started, 1);
    if (!cofd_block_all(!stops))
        return;
    const uint64_t begin = cofd_now_ns();
    do {
#pragma unroll 16
        for (int i = 0; i < BUSY_CHUNK / 4; i++) {
            x = fmaf(x, 0.999f, 0.5f);
            y = fmaf(y, 0.998f, 0.5f);
            z = fmaf(z, 0.997f, 0.5f);
            w = fmaf(w, 0.996f, 0.5f);
        }
    } while (cofd_now_ns() - begin < BUSY_NS);
    if (x + y + z + w < 0)
        sink[0] = x;
}

cudaError_t cofi_rb_launch_busy(const uint64_t *stop, uint64_t *started, float *sink,
                                cudaStream_t stream)
{
    int device = 0, n_sms = 0, per_sm = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, cofk_bench_busy,
                                                              busy_threads, 0);
    if (error != cudaSuccess)
        return error;
    cofk_bench_busy<<<n_sms * per_sm * BUSY_WAVES, busy_threads, 0, stream>>>(stop, started, sink);
    return cudaPeekAtLastError();
}

/* ---- what is there -------------------------------------------------------------------------- */

void cofi_runtime_bench_code(char *text, size_t bytes)
{
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, cofk_bench_empty);
    if (error != cudaSuccess)
        snprintf(text, bytes, "none: %s", cudaGetErrorName(error));
    else if (attributes.binaryVersion == attributes.ptxVersion)
        snprintf(text, bytes, "sm_%d", attributes.binaryVersion);
    else
        snprintf(text, bytes, "sm_%d from PTX of %d", attributes.binaryVersion,
                 attributes.ptxVersion);
}
