/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* put, get, signal and wait of devices. Short transfers go by a kernel, whose launch is all they
 * cost; long ones by the copy engine, which leaves the multiprocessors alone and is faster
 * (measured in docs/cuda.md). Both write the peer's memory before what follows in the stream
 * begins, so a signal after them releases them.
 *
 * A get by the copy engine needs a guard behind it, and the stream's change from the one to the
 * other costs 45 us: two H200, 64 MiB both ways at once, 184 us by the engine, 229 with the guard,
 * 207 by the kernel (2026-11-30). */
#include <string.h>

#include "symm/kernels_cuda.h"
#include "symm/options_cuda.h"

#define PUT_KERNEL_MAX_BYTES ((size_t)256 << 10)
#define GET_KERNEL_MAX_BYTES ((size_t)64 << 20)
#define BYTES_PER_BLOCK ((size_t)32 << 10) /* 512 threads x 4 loads of 16 bytes */
#define COPY_MAX_BLOCKS 32 /* puts 342 of 358 GB/s, gets 324 of 327 with 128 */

/* 0 is none, as on the CPU for more than 31 years too. */
static uint64_t nanoseconds(double seconds)
{
    if (!(seconds > 0 && seconds <= 1e9))
        return 0;
    return seconds < 1e-9 ? 1 : (uint64_t)(seconds * 1e9);
}

struct cofd_wait_options cofi_wait_options(const cof_arena *a, const char *step)
{
    struct cofd_wait_options o = {.timeout_ns = nanoseconds(a->run_timeout)};
    memcpy(o.step, step, strnlen(step, sizeof o.step));
    return o;
}

cof_status cofi_cuda_launched(const char *file, int line, const cof_arena *a, const void *stream,
                              cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return COF_OK;
    cof_status status = cofi_cuda_error(file, line, error, what);
    if (error != cudaErrorInvalidResourceHandle)
        return status;
    return cofi_fail(file, line, COF_ERR_INVALID,
                     "stream: handle = %p: wanted a stream of device %d, this rank's: %s", stream,
                     cofi_cuda_arena(a)->device, cudaGetErrorName(error));
}

int cofi_cuda_share(const struct cofi_cuda_world *w, int n_blocks, int max_ctas)
{
    int n = n_blocks / w->most_ranks; /* alike on all ranks, whose blocks may pair up */
    if (w->max_ctas > 0 && n > w->max_ctas)
        n = w->max_ctas;
    if (max_ctas > 0 && n > max_ctas)
        n = max_ctas;
    return n > 1 ? n : 1;
}

static int copy_blocks(const cof_arena *a, size_t bytes)
{
    const struct cofi_cuda_world *w = a->team->world->device;
    size_t wanted = (bytes + BYTES_PER_BLOCK - 1) / BYTES_PER_BLOCK;
    int most = cofi_cuda_share(w, w->n_sms, COPY_MAX_BLOCKS);
    return wanted < 1 ? 1 : wanted < (size_t)most ? (int)wanted : most;
}

/* An output that a dead arena leaves unwritten becomes NaN: the kernel sees to it; behind the copy
 * engine a guard does. */
static cof_status copy(const cof_arena *a, void *dst, const void *src, size_t bytes, bool is_output,
                       cudaStream_t stream)
{
    const int n_blocks = copy_blocks(a, bytes);
    if (bytes <= (is_output ? GET_KERNEL_MAX_BYTES : PUT_KERNEL_MAX_BYTES)) {
        COFI_LAUNCH(a, stream,
                    cofi_launch_copy(a->on_device, dst, src, bytes, is_output, n_blocks, stream));
        return COF_OK;
    }
    COFI_LAUNCH(a, stream, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
    if (is_output)
        COFI_LAUNCH(a, stream, cofi_launch_guard(a->on_device, dst, bytes, n_blocks, stream));
    return COF_OK;
}

cof_status cofi_cuda_put(cof_arena *a, int peer, size_t offset, const void *src, size_t bytes,
                         void *stream)
{
    return copy(a, a->base[peer] + a->data_offset + offset, src, bytes, false, stream);
}

cof_status cofi_cuda_get(cof_arena *a, void *dst, int peer, size_t offset, size_t bytes,
                         void *stream)
{
    return copy(a, dst, a->base[peer] + a->data_offset + offset, bytes, true, stream);
}

cof_status cofi_cuda_signal(cof_arena *a, int peer, int word, void *stream)
{
    COFI_LAUNCH(a, stream, cofi_launch_signal(a->on_device, peer, word, stream));
    return COF_OK;
}

cof_status cofi_cuda_wait(cof_arena *a, int peer, int word, void *stream)
{
    const struct cofd_wait_options o = cofi_wait_options(a, "cof_wait");
    COFI_LAUNCH(a, stream, cofi_launch_wait(a->on_device, peer, word, &o, stream));
    return COF_OK;
}

cof_status cofi_cuda_fill(cof_arena *a, void *dst, size_t bytes, void *stream)
{
    COFI_LAUNCH(a, stream, cudaMemsetAsync(dst, 0xff, bytes, stream));
    return COF_OK;
}

cof_status cofi_cuda_set_words(cof_arena *a, size_t words_offset, int purpose, uint64_t value)
{
    const struct cofi_cuda_arena *on = cofi_cuda_arena(a);
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(on->device, &scope));
    cudaError_t error = cofi_launch_set_words(on->on_device, words_offset, purpose, value,
                                              on->setup);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(on->setup);
    cofi_cuda_leave(&scope);
    COF_CUDA(error);
    return COF_OK;
}

cof_status cofi_cuda_load_kernels(void)
{
    COF_CUDA(cofi_load_kernels());
    return COF_OK;
}
