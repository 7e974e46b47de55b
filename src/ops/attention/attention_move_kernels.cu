/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The begin of a call and its turns, which alone wait; rows of attention's tensors on their way
 * between tensors of any strides; and the end of a call. */
#include "device/device_call.h"
#include "ops/attention/attention_move_cuda.h"

namespace {

constexpr int kThreads = 256;
constexpr int kCallThreads = 128; /* a thread for each rank, up to so many at a time */

/* Head rows (batch, row, head) in this order, some threads to each. */
struct head_row {
    int64_t batch, row, head;
};

} // namespace

static __device__ __forceinline__ struct head_row head_row_of(const struct cofi_attention_extent &n,
                                                              int64_t idx)
{
    return {idx / n.n_heads / n.n_rows, idx / n.n_heads % n.n_rows, idx % n.n_heads};
}

static __device__ __forceinline__ char *at(const struct cofi_attention_block &b,
                                           const struct head_row &r)
{
    return b.data + r.batch * b.batch + r.row * b.row + r.head * b.head;
}

/* ---- begin ---------------------------------------------------------------------------------- */

struct begin {
    struct cofd_binding *binding;
    struct cofd_call call;
    struct cofd_wait_options options;
    int acks, mark;
};

extern "C" __global__ void __launch_bounds__(kCallThreads, 1)
    cofk_attention_begin(const __grid_constant__ struct begin x)
{
    struct cofd_binding *b = x.binding;
    const bool is_alive =
        cofd_call_begin(b, &x.call) &&
        (x.acks < 0 || cofd_call_wait_ack(b, COFD_ALL_OTHERS, static_cast<uint32_t>(x.acks),
                                          b->mark[x.mark], &x.options));
    cofd_block_sync(); /* all have read the mark */
    if (threadIdx.x != 0)
        return;
    if (is_alive)
        b->mark[x.mark] = b->epoch;
    else
        cofd_pass_on(b->arena);
}

/* ---- turn ----------------------------------------------------------------------------------- */

/* All signals before any wait: whoever waits for this rank's needs nothing of its waits. */
extern "C" __global__ void __launch_bounds__(kCallThreads, 1)
    cofk_attention_turn(const __grid_constant__ struct cofi_attention_turn x)
{
    struct cofd_binding *b = x.binding;
    bool is_alive = cofd_block_all(!cofd_is_dead(b->arena));
    if (is_alive && x.ready_to >= 0)
        cofd_call_signal(b, x.ready_to, static_cast<uint32_t>(x.ready));
    if (is_alive && x.ack_to >= 0)
        cofd_call_signal(b, x.ack_to, static_cast<uint32_t>(x.ack));
    if (is_alive && x.ready_from >= 0)
        is_alive = cofd_call_wait_ready(b, x.ready_from, static_cast<uint32_t>(x.ready),
                                        &x.ready_wait);
    if (is_alive && x.ack_from >= 0)
        is_alive = cofd_call_wait_ack(b, x.ack_from, static_cast<uint32_t>(x.ack), b->epoch,
                                      &x.ack_wait);
    if (!is_alive && threadIdx.x == 0)
        cofd_pass_on(b->arena);
}

/* ---- move ----------------------------------------------------------------------------------- */

template <typename T>
static __device__ __forceinline__ void move_rows(const struct cofi_attention_move &m)
{
    const int64_t per_row = m.n.dim_bytes / static_cast<int64_t>(sizeof(T));
    const int64_t n = m.n.n_batch * m.n.n_rows * m.n.n_heads * per_row;
    const int64_t n_threads = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
         i += n_threads) {
        const struct head_row r = head_row_of(m.n, i / per_row);
        reinterpret_cast<T *>(at(m.dst, r))[i % per_row] =
            reinterpret_cast<const T *>(at(m.src, r))[i % per_row];
    }
}

static __device__ __forceinline__ unsigned block_bits(const struct cofi_attention_block &b)
{
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(b.data)) |
           static_cast<unsigned>(b.batch) | static_cast<unsigned>(b.row) |
           static_cast<unsigned>(b.head);
}

/* As wide as all addresses allow. */
extern "C" __global__ void __launch_bounds__(kThreads)
    cofk_attention_move(const __grid_constant__ struct cofi_attention_move m)
{
    const unsigned bits =
        block_bits(m.dst) | block_bits(m.src) | static_cast<unsigned>(m.n.dim_bytes);
    if (bits % 16 == 0)
        move_rows<uint4>(m);
    else if (bits % 4 == 0)
        move_rows<uint32_t>(m);
    else
        move_rows<uint16_t>(m);
}

/* ---- finish --------------------------------------------------------------------------------- */

/* Elements are of 2 bytes at least; 0xff in all of them is NaN in every type. */
static __device__ __forceinline__ void fill_rows(const struct cofi_attention_finish &f,
                                                 int64_t begin, uint16_t value, float lse)
{
    const struct cofi_attention_extent n = {f.n.n_batch, f.n.n_rows - begin, f.n.n_heads,
                                            f.n.dim_bytes};
    const int64_t n_rows = n.n_batch * n.n_rows * n.n_heads;
    for (int64_t i = blockIdx.x; i < n_rows; i += gridDim.x) {
        struct head_row r = head_row_of(n, i);
        r.row += begin;
        uint16_t *o = reinterpret_cast<uint16_t *>(at(f.o, r));
        for (int64_t k = threadIdx.x; k < n.dim_bytes / 2; k += kThreads)
            o[k] = value;
        if (threadIdx.x == 0)
            f.lse[r.batch * f.lse_batch + r.head * f.lse_head + r.row] = lse;
    }
}

/* One thread of a block looks at poison, a read of host memory. A merge lets this begin when the
 * sections have ended: until it ends itself, only what they read may be looked at and acked. */
extern "C" __global__ void __launch_bounds__(kThreads)
    cofk_attention_finish(const __grid_constant__ struct cofi_attention_finish f)
{
    const bool is_alive = cofd_block_all(threadIdx.x != 0 || !cofd_is_told(f.arena));
    if (is_alive && f.binding && blockIdx.x == 0)
        cofd_call_signal(f.binding, COFD_ALL_OTHERS, static_cast<uint32_t>(f.ack));
    cofd_wait_earlier_kernels();
    if (is_alive)
        fill_rows(f, f.pad_begin, 0, -INFINITY);
    else
        fill_rows(f, 0, 0xffff, __int_as_float(-1));
}

/* ---- launchers ------------------------------------------------------------------------------ */

/* What this launch returns, not an earlier error of the caller's. */
template <typename Argument>
static cudaError_t launch(void (*kernel)(Argument), int n_blocks, const Argument *argument,
                          cudaStream_t stream)
{
    Argument copy = *argument;
    void *list[] = {&copy};
    return cudaLaunchKernel((const void *)kernel, dim3((unsigned)n_blocks), dim3(kThreads), list, 0,
                            stream);
}

cudaError_t cofi_launch_attention_begin(struct cofd_binding *binding, const struct cofd_call *call,
                                        const struct cofd_wait_options *options, int acks, int mark,
                                        cudaStream_t stream)
{
    struct begin x = {binding, *call, *options, acks, mark};
    void *list[] = {&x};
    return cudaLaunchKernel((const void *)cofk_attention_begin, dim3(1), dim3(kCallThreads), list,
                            0, stream);
}

cudaError_t cofi_launch_attention_turn(const struct cofi_attention_turn *turn, cudaStream_t stream)
{
    struct cofi_attention_turn x = *turn;
    void *list[] = {&x};
    return cudaLaunchKernel((const void *)cofk_attention_turn, dim3(1), dim3(kCallThreads), list, 0,
                            stream);
}

cudaError_t cofi_launch_attention_move(const struct cofi_attention_move *move, int n_blocks,
                                       cudaStream_t stream)
{
    return launch<struct cofi_attention_move>(cofk_attention_move, n_blocks, move, stream);
}

cudaError_t cofi_launch_attention_finish(const struct cofi_attention_finish *finish, int n_blocks,
                                         bool is_dependent, cudaStream_t stream)
{
    struct cofi_attention_finish x = *finish;
    void *list[] = {&x};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)n_blocks);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = is_dependent ? 1 : 0;
    return cudaLaunchKernelExC(&config, (const void *)cofk_attention_finish, list);
}

cudaError_t cofi_load_attention_move(bool *finish_waits_out)
{
    static const void *const kernels[] = {(const void *)cofk_attention_begin,
                                          (const void *)cofk_attention_turn,
                                          (const void *)cofk_attention_move,
                                          (const void *)cofk_attention_finish};
    cudaFuncAttributes attributes = {}; /* in the end those of the last one */
    cudaError_t error = cudaSuccess;
    for (const void *kernel : kernels)
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, kernel);
    *finish_waits_out = error == cudaSuccess && attributes.ptxVersion >= 90; /* order.h */
    return error;
}
