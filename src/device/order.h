/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Loads, stores and fences with their order and scope in the name: the only place with PTX for
 * memory. On the host the same functions are the compiler's atomics, so that the protocols built on
 * them run in threads under ThreadSanitizer.
 *
 * Pairing everywhere: data is stored plainly by the threads of a block, cofd_block_sync, then one
 * thread does store_release_sys on the word; the reader does load_acquire_sys on it,
 * cofd_block_sync, then plain loads. PTX memory model 8.8: release and acquire patterns are
 * cumulative over bar.sync, so no fence is needed beside them. */
#ifndef COFI_ORDER_H
#define COFI_ORDER_H

#include <stdint.h>

#ifdef __CUDACC__
#define COFD_FN static __device__ __forceinline__
#define COFD_RARE static __device__ __noinline__ /* keeps its registers out of fast paths */
#define COFD_ONE_BY_ONE _Pragma("unroll 1")
#else
#define COFD_FN static inline
#define COFD_RARE static inline
#define COFD_ONE_BY_ONE
#include <time.h>
#endif

#ifdef __CUDACC__

COFD_FN uint64_t cofd_load_relaxed_sys(const uint64_t *at)
{
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

COFD_FN uint64_t cofd_load_acquire_sys(const uint64_t *at)
{
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

COFD_FN uint32_t cofd_load_acquire_sys_u32(const uint32_t *at)
{
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

COFD_FN void cofd_store_relaxed_sys(uint64_t *at, uint64_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

COFD_FN void cofd_store_release_sys(uint64_t *at, uint64_t value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

/* Of this device's own memory, among its blocks. */
COFD_FN uint64_t cofd_load_acquire_gpu(const uint64_t *at)
{
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

COFD_FN void cofd_store_release_gpu(uint64_t *at, uint64_t value)
{
    asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

COFD_FN uint32_t cofd_load_relaxed_gpu_u32(const uint32_t *at)
{
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

COFD_FN uint64_t cofd_load_relaxed_gpu(const uint64_t *at)
{
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

/* Returns what was there. */
COFD_FN uint32_t cofd_add_gpu_u32(uint32_t *at, uint32_t n)
{
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(at), "r"(n) : "memory");
    return old;
}

/* Orders nothing. Returns what was there, before one more. */
COFD_FN uint32_t cofd_count_gpu_u32(uint32_t *at)
{
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(at) : "memory");
    return old;
}

COFD_FN uint32_t cofd_exchange_gpu_u32(uint32_t *at, uint32_t value)
{
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], %2;"
                 : "=r"(old) : "l"(at), "r"(value) : "memory");
    return old;
}

/* True for the one that changes 0 to `value`. */
COFD_FN bool cofd_claim_gpu(uint64_t *at, uint64_t value)
{
    uint64_t old;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], 0, %2;"
                 : "=l"(old) : "l"(at), "l"(value) : "memory");
    return old == 0;
}

/* Orders all this thread's memory accesses before it with those after it, for every observer of
 * the system. For pieces of data that other threads wrote, after cofd_block_sync. */
COFD_FN void cofd_fence_acq_rel_sys(void)
{
    asm volatile("fence.acq_rel.sys;" : : : "memory");
}

/* 8-byte pairs: each 8 bytes are single-copy atomic, the 16 are not. */
COFD_FN void cofd_load2_relaxed_sys(const uint64_t *at, uint64_t value[2])
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(value[0]), "=l"(value[1]) : "l"(at) : "memory");
}

COFD_FN void cofd_store2_relaxed_sys(uint64_t *at, const uint64_t value[2])
{
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                 : : "l"(at), "l"(value[0]), "l"(value[1]) : "memory");
}

/* 16 bytes that are single-copy atomic as one. */
COFD_FN void cofd_load16_relaxed_sys(const uint64_t *at, uint64_t value[2])
{
    asm volatile("{\n\t.reg .b128 whole;\n\tld.relaxed.sys.global.b128 whole, [%2];\n\t"
                 "mov.b128 {%0, %1}, whole;\n\t}"
                 : "=l"(value[0]), "=l"(value[1]) : "l"(at) : "memory");
}

COFD_FN void cofd_store16_relaxed_sys(uint64_t *at, const uint64_t value[2])
{
    asm volatile("{\n\t.reg .b128 whole;\n\tmov.b128 whole, {%1, %2};\n\t"
                 "st.relaxed.sys.global.b128 [%0], whole;\n\t}"
                 : : "l"(at), "l"(value[0]), "l"(value[1]) : "memory");
}

/* Until the kernels before this one in the stream have ended and what they stored is there, where
 * the device may start a kernel before that. */
COFD_FN void cofd_wait_earlier_kernels(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

/* Kernels behind this one in the stream, launched so, may begin when all its blocks have said this
 * or ended; then they wait as above. */
COFD_FN void cofd_let_next_kernel_begin(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

/* Nanoseconds of the device's clock. */
COFD_FN uint64_t cofd_now_ns(void)
{
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) : : "memory");
    return now;
}

COFD_FN void cofd_pause(void)
{
    __nanosleep(40);
}

COFD_FN uint32_t cofd_thread(void)
{
    return threadIdx.x;
}

COFD_FN uint32_t cofd_n_threads(void)
{
    return blockDim.x;
}

COFD_FN void cofd_block_sync(void)
{
    __syncthreads();
}

/* Whether it is true of all threads of the block. */
COFD_FN bool cofd_block_all(bool is_true)
{
    return __syncthreads_and(is_true) != 0;
}

COFD_FN uint32_t cofd_block(void)
{
    return blockIdx.x;
}

COFD_FN uint32_t cofd_n_blocks(void)
{
    return gridDim.x;
}

/* Whether it is true of the eight threads, neighbours in a warp, that handle one line together. */
COFD_FN bool cofd_eight_all(bool is_true)
{
    return __all_sync(0xffu << (threadIdx.x & 24), is_true) != 0;
}

#else /* the host: a block is one thread */

COFD_FN uint64_t cofd_load_relaxed_sys(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}

COFD_FN uint64_t cofd_load_acquire_sys(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

COFD_FN uint32_t cofd_load_acquire_sys_u32(const uint32_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

COFD_FN void cofd_store_relaxed_sys(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}

COFD_FN void cofd_store_release_sys(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

COFD_FN uint64_t cofd_load_acquire_gpu(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

COFD_FN void cofd_store_release_gpu(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

COFD_FN uint32_t cofd_load_relaxed_gpu_u32(const uint32_t *at)
{
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}

COFD_FN uint64_t cofd_load_relaxed_gpu(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}

COFD_FN uint32_t cofd_add_gpu_u32(uint32_t *at, uint32_t n)
{
    return __atomic_fetch_add(at, n, __ATOMIC_ACQ_REL);
}

/* In order here: for ThreadSanitizer the barrier before it is none. */
COFD_FN uint32_t cofd_count_gpu_u32(uint32_t *at)
{
    return __atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL);
}

COFD_FN uint32_t cofd_exchange_gpu_u32(uint32_t *at, uint32_t value)
{
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}

COFD_FN bool cofd_claim_gpu(uint64_t *at, uint64_t value)
{
    uint64_t expected = 0;
    return __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/* ThreadSanitizer knows no fences; this builtin is none to it. */
COFD_FN void cofd_fence_acq_rel_sys(void)
{
    __sync_synchronize();
}

COFD_FN void cofd_load2_relaxed_sys(const uint64_t *at, uint64_t value[2])
{
    value[0] = cofd_load_relaxed_sys(at);
    value[1] = cofd_load_relaxed_sys(at + 1);
}

COFD_FN void cofd_store2_relaxed_sys(uint64_t *at, const uint64_t value[2])
{
    cofd_store_relaxed_sys(at, value[0]);
    cofd_store_relaxed_sys(at + 1, value[1]);
}

/* Without an access of 16 bytes the second word stands for both: stored last, looked at first. */
COFD_FN void cofd_load16_relaxed_sys(const uint64_t *at, uint64_t value[2])
{
    value[1] = cofd_load_acquire_sys(at + 1);
    value[0] = cofd_load_relaxed_sys(at);
}

COFD_FN void cofd_store16_relaxed_sys(uint64_t *at, const uint64_t value[2])
{
    cofd_store_relaxed_sys(at, value[0]);
    cofd_store_release_sys(at + 1, value[1]);
}

COFD_FN void cofd_wait_earlier_kernels(void)
{
}

COFD_FN uint64_t cofd_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

COFD_FN void cofd_pause(void)
{
    const struct timespec moment = {0, 20000}; /* threads outnumber cores where this runs */
    nanosleep(&moment, nullptr);
}

COFD_FN uint32_t cofd_thread(void)
{
    return 0;
}

COFD_FN uint32_t cofd_n_threads(void)
{
    return 1;
}

COFD_FN void cofd_block_sync(void)
{
}

COFD_FN bool cofd_block_all(bool is_true)
{
    return is_true;
}

COFD_FN uint32_t cofd_block(void)
{
    return 0;
}

COFD_FN uint32_t cofd_n_blocks(void)
{
    return 1;
}

COFD_FN bool cofd_eight_all(bool is_true)
{
    return is_true;
}

#endif
#endif
