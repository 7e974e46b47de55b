/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The runtime's kernels: public signals and waits, copies by multiprocessors, plans' calls. Small
 * and few blocks: a wait occupies one block of one warp, so that waits of several ranks fit beside
 * each other on one device. Kernels that copy never wait. */
#include "symm/kernels_cuda.h"

#include <type_traits>

#include "device/device_call.h"

namespace {

constexpr int kWarp = 32;
constexpr int kCallThreads = 128; /* a thread for each rank, up to so many at a time */
constexpr int kCopyThreads = 512;
constexpr int kUnroll = 4; /* loads in flight of each thread */

} // namespace

/* ---- signals and waits of users ------------------------------------------------------------- */

/* Counts in device memory: by word and peer. What the stream did before is released with the word,
 * for a kernel starts when it is complete. */
extern "C" __global__ void cofk_runtime_signal(struct cofd_arena *a, int peer, int word)
{
    if (cofd_is_dead(a))
        return;
    uint64_t count = ++a->sent[(uint64_t)word * (uint64_t)a->n_ranks + (uint64_t)peer];
    struct cofi_line *line = cofd_line(a, peer, a->user_words_offset, (uint32_t)word, a->rank);
    cofd_store_release_sys(&line->value, count);
}

extern "C" __global__ void cofk_runtime_wait(struct cofd_arena *a, int peer, int word,
                                             const __grid_constant__ struct cofd_wait_options o)
{
    if (cofd_is_dead(a))
        return cofd_pass_on(a);
    uint64_t count = ++a->awaited[(uint64_t)word * (uint64_t)a->n_ranks + (uint64_t)peer];
    const struct cofi_line *line =
        cofd_line(a, a->rank, a->user_words_offset, (uint32_t)word, peer);
    const struct cofd_wait wait = {a, nullptr, peer, COFI_COUNT, &line->value, count, &o};
    if (!cofd_wait(&wait))
        cofd_pass_on(a);
}

/* ---- copies --------------------------------------------------------------------------------- */

struct copy {
    struct cofd_arena *arena;
    unsigned char *dst;
    const unsigned char *src; /* NULL: a guard, which only fills */
    size_t bytes;
    bool is_output;
};

/* T is as wide as both addresses allow in step: `head` bytes before its first boundary. */
template <typename T>
static __device__ __forceinline__ void copy_wide(const struct copy &c, size_t head, size_t thread,
                                                 size_t n_threads)
{
    const size_t n = (c.bytes - head) / sizeof(T);
    const T *src = reinterpret_cast<const T *>(c.src + head);
    T *dst = reinterpret_cast<T *>(c.dst + head);
    for (size_t i = thread; i < n; i += kUnroll * n_threads) {
        T part[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; k++)
            if (i + k * n_threads < n)
                part[k] = src[i + k * n_threads];
#pragma unroll
        for (int k = 0; k < kUnroll; k++)
            if (i + k * n_threads < n)
                dst[i + k * n_threads] = part[k];
    }
    if (thread < head)
        c.dst[thread] = c.src[thread];
    const size_t tail = head + n * sizeof(T) + thread;
    if (tail < c.bytes)
        c.dst[tail] = c.src[tail];
}

/* Bytes before the next multiple of `width`, as far as there are any. */
static __device__ __forceinline__ size_t head_of(const void *at, size_t width, size_t bytes)
{
    size_t head = (width - reinterpret_cast<uintptr_t>(at) % width) % width;
    return head < bytes ? head : bytes;
}

static __device__ __forceinline__ void fill(unsigned char *dst, size_t bytes, size_t thread,
                                            size_t n_threads)
{
    const size_t head = head_of(dst, 16, bytes), n = (bytes - head) / 16;
    uint4 *wide = reinterpret_cast<uint4 *>(dst + head);
    for (size_t i = thread; i < n; i += n_threads)
        wide[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (thread < head)
        dst[thread] = 0xff;
    if (head + n * 16 + thread < bytes)
        dst[head + n * 16 + thread] = 0xff;
}

extern "C" __global__ void __launch_bounds__(kCopyThreads)
    cofk_runtime_copy(const __grid_constant__ struct copy c)
{
    const size_t thread = static_cast<size_t>(blockIdx.x) * kCopyThreads + threadIdx.x;
    const size_t n_threads = static_cast<size_t>(gridDim.x) * kCopyThreads;
    /* A guard ends a call, so it looks at poison too, a read of host memory: one thread does. */
    const bool is_dead = c.src ? cofd_is_dead(c.arena)
                               : !cofd_block_all(threadIdx.x != 0 || !cofd_is_told(c.arena));
    if (is_dead) {
        if (c.is_output)
            fill(c.dst, c.bytes, thread, n_threads);
        return;
    }
    if (!c.src)
        return;
    const unsigned apart = static_cast<unsigned>(reinterpret_cast<uintptr_t>(c.dst) ^
                                                 reinterpret_cast<uintptr_t>(c.src));
    if (apart % 16 == 0)
        copy_wide<uint4>(c, head_of(c.dst, 16, c.bytes), thread, n_threads);
    else if (apart % 8 == 0)
        copy_wide<uint2>(c, head_of(c.dst, 8, c.bytes), thread, n_threads);
    else if (apart % 4 == 0)
        copy_wide<uint32_t>(c, head_of(c.dst, 4, c.bytes), thread, n_threads);
    else if (apart % 2 == 0)
        copy_wide<uint16_t>(c, head_of(c.dst, 2, c.bytes), thread, n_threads);
    else
        copy_wide<unsigned char>(c, 0, thread, n_threads);
}

/* ---- words and calls ------------------------------------------------------------------------ */

/* All threads of a block: what it has come to, before copies follow. */
static __device__ __forceinline__ void end_with(const struct cofd_arena *a, bool is_alive)
{
    if (!is_alive && threadIdx.x == 0)
        cofd_pass_on(a);
}

extern "C" __global__ void cofk_runtime_set_words(struct cofd_arena *a, uint64_t words_offset,
                                                  uint32_t purpose, uint64_t value)
{
    cofd_set_words(a, words_offset, purpose, value);
}

extern "C" __global__ void __launch_bounds__(kCallThreads, 1)
    cofk_runtime_call_begin(struct cofd_binding *b, const __grid_constant__ struct cofd_call call)
{
    end_with(b->arena, cofd_call_begin(b, &call));
}

extern "C" __global__ void __launch_bounds__(kCallThreads, 1)
    cofk_runtime_call_end(const struct cofd_binding *b)
{
    if (cofd_block_all(!cofd_is_dead(b->arena)))
        cofd_call_end(b);
}

extern "C" __global__ void __launch_bounds__(kCallThreads, 1)
    cofk_runtime_call_signal(const struct cofd_binding *b, int peer, uint32_t purpose)
{
    if (cofd_block_all(!cofd_is_dead(b->arena)))
        cofd_call_signal(b, peer, purpose);
}

extern "C" __global__ void __launch_bounds__(kCallThreads, 1)
    cofk_runtime_call_wait_ready(const struct cofd_binding *b, int writer, uint32_t purpose,
                                 const __grid_constant__ struct cofd_wait_options o)
{
    end_with(b->arena, cofd_block_all(!cofd_is_dead(b->arena)) &&
                           cofd_call_wait_ready(b, writer, purpose, &o));
}

extern "C" __global__ void __launch_bounds__(kCallThreads, 1)
    cofk_runtime_call_wait_ack(const struct cofd_binding *b, int writer, uint32_t purpose, int mark,
                               const __grid_constant__ struct cofd_wait_options o)
{
    end_with(b->arena, cofd_block_all(!cofd_is_dead(b->arena)) &&
                           cofd_call_wait_ack(b, writer, purpose, b->mark[mark], &o));
}

extern "C" __global__ void cofk_runtime_call_mark(struct cofd_binding *b, int mark)
{
    if (!cofd_is_dead(b->arena))
        b->mark[mark] = b->epoch;
}

/* ---- launchers ------------------------------------------------------------------------------ */

/* What this launch returns: cudaGetLastError would also give an error of an earlier call of the
 * caller's, who has the same runtime where the library is linked statically. */
template <typename... Parameters>
static cudaError_t launch(void (*kernel)(Parameters...), int n_blocks, int n_threads,
                          cudaStream_t stream, std::remove_const_t<Parameters>... arguments)
{
    void *list[] = {&arguments...};
    return cudaLaunchKernel((const void *)kernel, dim3((unsigned)n_blocks),
                            dim3((unsigned)n_threads), list, 0, stream);
}

cudaError_t cofi_load_kernels(void)
{
    static const void *const kernels[] = {
        (const void *)cofk_runtime_signal,        (const void *)cofk_runtime_wait,
        (const void *)cofk_runtime_copy,          (const void *)cofk_runtime_set_words,
        (const void *)cofk_runtime_call_begin,    (const void *)cofk_runtime_call_end,
        (const void *)cofk_runtime_call_signal,   (const void *)cofk_runtime_call_wait_ready,
        (const void *)cofk_runtime_call_wait_ack, (const void *)cofk_runtime_call_mark,
    };
    cudaError_t error = cudaSuccess;
    for (const void *kernel : kernels) {
        cudaFuncAttributes attributes;
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, kernel);
    }
    return error;
}

cudaError_t cofi_launch_signal(struct cofd_arena *a, int peer, int word, cudaStream_t stream)
{
    return launch(cofk_runtime_signal, 1, 1, stream, a, peer, word);
}

cudaError_t cofi_launch_wait(struct cofd_arena *a, int peer, int word,
                             const struct cofd_wait_options *options, cudaStream_t stream)
{
    return launch(cofk_runtime_wait, 1, 1, stream, a, peer, word, *options);
}

cudaError_t cofi_launch_copy(struct cofd_arena *a, void *dst, const void *src, size_t bytes,
                             int dst_is_output, int n_blocks, cudaStream_t stream)
{
    const struct copy c = {a, static_cast<unsigned char *>(dst),
                           static_cast<const unsigned char *>(src), bytes, dst_is_output != 0};
    return launch(cofk_runtime_copy, n_blocks, kCopyThreads, stream, c);
}

cudaError_t cofi_launch_guard(struct cofd_arena *a, void *output, size_t bytes, int n_blocks,
                              cudaStream_t stream)
{
    return cofi_launch_copy(a, output, nullptr, bytes, 1, n_blocks, stream);
}

cudaError_t cofi_launch_set_words(struct cofd_arena *a, uint64_t words_offset, int purpose,
                                  uint64_t value, cudaStream_t stream)
{
    return launch(cofk_runtime_set_words, 1, kWarp, stream, a, words_offset, (uint32_t)purpose,
                  value);
}

cudaError_t cofi_launch_call_begin(struct cofd_binding *b, const struct cofd_call *call,
                                   cudaStream_t stream)
{
    return launch(cofk_runtime_call_begin, 1, kCallThreads, stream, b, *call);
}

cudaError_t cofi_launch_call_end(struct cofd_binding *b, cudaStream_t stream)
{
    return launch(cofk_runtime_call_end, 1, kCallThreads, stream, b);
}

/* One warp, where there is one word. */
static int threads_for(int peer)
{
    return peer == COFD_ALL_OTHERS ? kCallThreads : kWarp;
}

cudaError_t cofi_launch_call_signal(struct cofd_binding *b, int peer, int purpose,
                                    cudaStream_t stream)
{
    return launch(cofk_runtime_call_signal, 1, threads_for(peer), stream, b, peer,
                  (uint32_t)purpose);
}

cudaError_t cofi_launch_call_wait_ready(struct cofd_binding *b, int writer, int purpose,
                                        const struct cofd_wait_options *options,
                                        cudaStream_t stream)
{
    return launch(cofk_runtime_call_wait_ready, 1, threads_for(writer), stream, b, writer,
                  (uint32_t)purpose, *options);
}

cudaError_t cofi_launch_call_wait_ack(struct cofd_binding *b, int writer, int purpose, int mark,
                                      const struct cofd_wait_options *options, cudaStream_t stream)
{
    return launch(cofk_runtime_call_wait_ack, 1, threads_for(writer), stream, b, writer,
                  (uint32_t)purpose, mark, *options);
}

cudaError_t cofi_launch_call_mark(struct cofd_binding *b, int mark, cudaStream_t stream)
{
    return launch(cofk_runtime_call_mark, 1, 1, stream, b, mark);
}
