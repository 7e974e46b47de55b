/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Whether units of memory arrive whole (case=litmus): of every two warps one stores into the next
 * rank's slab, pass after pass, all words of a unit equal to the number of the pass; the other one
 * looks at what the rank before stores here. Nobody waits for anybody: kernels end by the clock.
 *
 *   unit    one warp of the rank before, always the same; grows     any warp of this rank
 *   counts  any thread, atomically, at its end                      the host, after the stream */
#include "device/order.h"
#include "ops/runtime/runtime_check_cuda.h"

enum { THREADS = 512, WARP = 32, CLOCK_PASSES = 16 /* passes between looks at the clock */ };
#define WHOLE_WARP 0xffffffffu

/* Stored and loaded as in device/lines.h; a slot is a thread's 16 bytes. `load` returns the tag. */
struct litmus_line {
    static const uint32_t n_slots = 8;

    static __device__ __forceinline__ void store(uint64_t *at, const uint64_t value[2])
    {
        cofd_store2_relaxed_sys(at, value);
    }

    static __device__ __forceinline__ uint64_t load(const uint64_t *at, uint64_t value[2])
    {
        cofd_load2_relaxed_sys(at, value);
        return __shfl_sync(0xffu << (threadIdx.x & 24), value[1], 7, 8);
    }

    static __device__ __forceinline__ bool all(bool is_true)
    {
        return cofd_eight_all(is_true);
    }
};

struct litmus_word {
    static const uint32_t n_slots = 1;

    static __device__ __forceinline__ void store(uint64_t *at, const uint64_t value[2])
    {
        cofd_store16_relaxed_sys(at, value);
    }

    static __device__ __forceinline__ uint64_t load(const uint64_t *at, uint64_t value[2])
    {
        cofd_load16_relaxed_sys(at, value);
        return value[1];
    }

    static __device__ __forceinline__ bool all(bool is_true)
    {
        return is_true;
    }
};

/* A word in two stores: torn ones must be seen. */
struct litmus_halves : litmus_word {
    static __device__ __forceinline__ void store(uint64_t *at, const uint64_t value[2])
    {
        cofd_store_relaxed_sys(at, value[0]);
        cofd_store_relaxed_sys(at + 1, value[1]);
    }
};

/* Of all threads of the warp. */
static __device__ bool has_time(const struct cofi_litmus &k, uint64_t begin)
{
    return __all_sync(WHOLE_WARP, cofd_now_ns() - begin < k.ns) != 0;
}

template <class Unit>
static __device__ void store(const struct cofi_litmus &k, uint32_t thread, uint32_t n_threads)
{
    const uint64_t begin = cofd_now_ns();
    if (thread >= k.n_slots)
        return;
    for (uint64_t pass = 1; pass % CLOCK_PASSES != 0 || has_time(k, begin); pass++) {
        const uint64_t value[2] = {pass, pass};
        for (uint32_t slot = thread; slot < k.n_slots; slot += n_threads)
            Unit::store(k.out + 2 * (uint64_t)slot, value);
    }
}

/* Where there are fewer slots than threads, many look at the same. */
template <class Unit>
static __device__ void look(const struct cofi_litmus &k, uint32_t thread, uint32_t n_threads)
{
    const uint64_t begin = cofd_now_ns();
    uint64_t newest = 0, n_looks = 0, n_changes = 0, n_torn = 0;
    uint64_t torn_tag = 0, torn_word = 0;
    uint32_t torn_slot = UINT32_MAX;
    bool goes_on = true;
    for (uint32_t pass = 0; goes_on; pass++) {
        for (uint32_t slot = thread % k.n_slots; slot < k.n_slots; slot += n_threads) {
            uint64_t value[2];
            const uint64_t tag = Unit::load(k.in + 2 * (uint64_t)slot, value);
            const bool is_whole = value[0] == tag && value[1] == tag;
            n_torn += !Unit::all(is_whole);
            if (!is_whole) {
                torn_slot = slot;
                torn_tag = tag;
                torn_word = value[0] != tag ? value[0] : value[1];
            }
            n_changes += pass > 0 && tag > newest;
            newest = tag > newest ? tag : newest;
            n_looks += n_changes > 0;
        }
        if (pass % CLOCK_PASSES == CLOCK_PASSES - 1)
            goes_on = has_time(k, begin) && __all_sync(WHOLE_WARP, n_looks < k.n_looks);
    }
    struct cofi_litmus_counts *counts = k.counts;
    if (threadIdx.x % Unit::n_slots == 0) {
        atomicAdd((unsigned long long *)&counts->n_looks, (unsigned long long)n_looks);
        atomicAdd((unsigned long long *)&counts->n_changes, (unsigned long long)n_changes);
        atomicAdd((unsigned long long *)&counts->n_torn, (unsigned long long)n_torn);
    }
    if (torn_slot == UINT32_MAX || !cofd_claim_gpu(&counts->is_noted, 1))
        return;
    counts->slot = torn_slot;
    counts->tag = torn_tag;
    counts->word = torn_word;
}

template <class Unit>
static __global__ void __launch_bounds__(THREADS)
cofk_check_litmus(const __grid_constant__ struct cofi_litmus k)
{
    const uint32_t warp = (blockIdx.x * THREADS + threadIdx.x) / WARP;
    const uint32_t thread = warp / 2 * WARP + threadIdx.x % WARP;
    const uint32_t n_threads = gridDim.x * THREADS / 2;
    if (warp % 2 == 0)
        store<Unit>(k, thread, n_threads);
    else
        look<Unit>(k, thread, n_threads);
}

static const void *kernel_of(enum cofi_litmus_unit unit)
{
    switch (unit) {
    case COFI_LITMUS_LINE: return (const void *)cofk_check_litmus<litmus_line>;
    case COFI_LITMUS_WORD: return (const void *)cofk_check_litmus<litmus_word>;
    default: return (const void *)cofk_check_litmus<litmus_halves>;
    }
}

extern "C" const void *cofi_check_cuda_litmus_kernel(enum cofi_litmus_unit unit, int *n_threads_out)
{
    *n_threads_out = THREADS;
    return kernel_of(unit);
}

extern "C" cudaError_t cofi_check_cuda_litmus(const struct cofi_litmus *litmus,
                                              enum cofi_litmus_unit unit, int n_blocks,
                                              cudaStream_t stream)
{
    void *arguments[] = {(void *)litmus};
    return cudaLaunchKernel(kernel_of(unit), dim3((unsigned)n_blocks), dim3(THREADS), arguments, 0,
                            stream);
}
