/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Kernels of `cofuse check runtime`: messages made and compared where they lie. */
#include "device/device_call.h"
#include "device/tagged.h"
#include "ops/runtime/runtime_check_cuda.h"
#include "ops/runtime/runtime_check_message.h"

enum { THREADS = 256, MAX_BLOCKS = 128, BYTES_PER_THREAD = 16 };

static __device__ bool is_over(const struct cofd_arena *a)
{
    return a && cofd_is_dead(a);
}

static __device__ void note(struct cofi_cuda_tally *tally, uint64_t at, uint64_t bytes,
                            uint64_t from, uint64_t idx, uint64_t epoch)
{
    atomicAdd((unsigned long long *)&tally->n_wrong, 1ull);
    if (!cofd_claim_gpu(&tally->is_noted, 1))
        return;
    tally->at = at;
    tally->bytes = bytes;
    tally->from = from;
    tally->idx = idx;
    tally->epoch = epoch;
}

/* ---- messages ------------------------------------------------------------------------------- */

static __global__ void cofk_check_next(const struct cofd_arena *arena,
                                       struct cofi_cuda_tally *tally)
{
    if (!is_over(arena))
        tally->n_calls++;
}

static __global__ void cofk_check_fill(const struct cofd_arena *arena,
                                       const struct cofi_cuda_tally *tally, unsigned char *dst,
                                       uint64_t bytes, uint64_t from, uint64_t to)
{
    if (is_over(arena))
        return;
    const uint64_t key = cofi_message_key(from, to, tally->n_calls - 1);
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += step)
        dst[i] = cofi_message_byte(key, i);
}

static __global__ void cofk_check_compare(const struct cofd_arena *arena,
                                          const struct cofd_binding *binding,
                                          struct cofi_cuda_tally *tally, const unsigned char *src,
                                          uint64_t bytes, uint64_t from, uint64_t to)
{
    if (is_over(arena))
        return;
    const uint64_t idx = tally->n_calls - 1, key = cofi_message_key(from, to, idx);
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += step)
        if (src[i] != cofi_message_byte(key, i))
            note(tally, i, bytes, from, idx, binding ? binding->epoch : 0);
}

static unsigned n_blocks(uint64_t bytes)
{
    const uint64_t n = (bytes + THREADS * BYTES_PER_THREAD - 1) / (THREADS * BYTES_PER_THREAD);
    return n < 1 ? 1 : n > MAX_BLOCKS ? (unsigned)MAX_BLOCKS : (unsigned)n;
}

extern "C" cudaError_t cofi_check_cuda_next(const struct cofd_arena *arena,
                                            struct cofi_cuda_tally *tally, cudaStream_t stream)
{
    cofk_check_next<<<1, 1, 0, stream>>>(arena, tally);
    return cudaGetLastError();
}

extern "C" cudaError_t cofi_check_cuda_fill(const struct cofd_arena *arena,
                                            const struct cofi_cuda_tally *tally, void *dst,
                                            uint64_t bytes, uint64_t from, uint64_t to,
                                            cudaStream_t stream)
{
    cofk_check_fill<<<n_blocks(bytes), THREADS, 0, stream>>>(arena, tally, (unsigned char *)dst,
                                                             bytes, from, to);
    return cudaGetLastError();
}

extern "C" cudaError_t cofi_check_cuda_compare(const struct cofd_arena *arena,
                                               const struct cofd_binding *binding,
                                               struct cofi_cuda_tally *tally, const void *src,
                                               uint64_t bytes, uint64_t from, uint64_t to,
                                               cudaStream_t stream)
{
    cofk_check_compare<<<n_blocks(bytes), THREADS, 0, stream>>>(
        arena, binding, tally, (const unsigned char *)src, bytes, from, to);
    return cudaGetLastError();
}

/* ---- a device that is busy ------------------------------------------------------------------ */

static __global__ void cofk_check_busy(uint64_t ns)
{
    const uint64_t begin = cofd_now_ns();
    while (cofd_now_ns() - begin < ns)
        cofd_pause();
}

/* Two blocks of 1024 threads fill an SM of every device that has kernels here. */
extern "C" cudaError_t cofi_check_cuda_busy(int n_sms, uint64_t ns, cudaStream_t stream)
{
    cofk_check_busy<<<2 * (unsigned)n_sms, 1024, 0, stream>>>(ns);
    return cudaGetLastError();
}

/* ---- tagged words --------------------------------------------------------------------------- */

static __device__ uint32_t payload_of(int from, int to, uint32_t lane, uint32_t round, int half)
{
    return (uint32_t)cofi_message_mix((uint64_t)from << 48 | (uint64_t)to << 32 |
                                      (uint64_t)half << 31 | lane << 20 | round);
}

static __device__ uint64_t *lane_at(const struct cofd_arena *a, int rank, uint64_t offset,
                                    uint32_t round, int writer)
{
    const uint64_t slot = (uint64_t)(round & 1) * (uint64_t)a->n_ranks + (uint64_t)writer;
    return (uint64_t *)(void *)(a->base[rank] + offset) +
           2 * (slot * COFI_TAGGED_LANES + threadIdx.x);
}

/* Lane by lane: a thread sends its word of round r + 1 after it has read those of round r, and
 * writes into a slot again two rounds later, when it has read all of the round between. So every
 * reader has left the slot, and no lane waits for another one. */
static __global__ void cofk_check_tagged(const struct cofd_binding *binding,
                                         struct cofi_cuda_tally *tally, uint64_t offset,
                                         uint32_t n_rounds,
                                         const __grid_constant__ struct cofd_wait_options options)
{
    struct cofd_binding b = *binding;
    const struct cofd_arena *a = b.arena;
    const uint32_t lane = threadIdx.x;
    if (cofd_is_dead(a))
        return;
    for (uint32_t round = 1; round <= n_rounds; round++) {
        b.epoch = round;
        for (int i = 1; i < a->n_ranks; i++) {
            const int to = (a->rank + i) % a->n_ranks;
            const uint32_t payload[2] = {payload_of(a->rank, to, lane, round, 0),
                                         payload_of(a->rank, to, lane, round, 1)};
            cofd_tagged_store2(lane_at(a, to, offset, round, a->rank), payload, round);
        }
        for (int i = 1; i < a->n_ranks; i++) {
            const int from = (a->rank + i) % a->n_ranks;
            uint32_t payload[2];
            if (!cofd_tagged_wait2(&b, from, lane_at(a, a->rank, offset, round, from), payload,
                                   &options))
                return;
            if (payload[0] != payload_of(from, a->rank, lane, round, 0) ||
                payload[1] != payload_of(from, a->rank, lane, round, 1))
                note(tally, lane, COFI_TAGGED_LANES, (uint64_t)from, round, 0);
        }
    }
    if (lane == 0)
        tally->n_calls++;
}

extern "C" cudaError_t cofi_check_cuda_tagged(const struct cofd_binding *binding,
                                              struct cofi_cuda_tally *tally, uint64_t offset,
                                              uint32_t n_rounds, uint64_t timeout_ns,
                                              cudaStream_t stream)
{
    struct cofd_wait_options options = {timeout_ns, {0x6465676761ull << 8 | 't'}}; /* "tagged" */
    cofk_check_tagged<<<1, COFI_TAGGED_LANES, 0, stream>>>(binding, tally, offset, n_rounds,
                                                           options);
    return cudaGetLastError();
}

/* ---- loading -------------------------------------------------------------------------------- */

extern "C" cudaError_t cofi_check_cuda_load(void)
{
    const void *const kernels[] = {(const void *)cofk_check_next, (const void *)cofk_check_fill,
                                   (const void *)cofk_check_compare, (const void *)cofk_check_busy,
                                   (const void *)cofk_check_tagged};
    for (const void *kernel : kernels) {
        cudaFuncAttributes attributes;
        const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}
