/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Outputs of the query rows that see no key, which cuDNN is not asked for: o = 0, lse = -inf. */
#include "ops/attention/attention_unseen_cuda.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kMaxBlocks = 1024; /* a launch goes over the rest in turns */

} // namespace

/* A warp for each (batch, row, head), 16 bytes a lane. */
extern "C" __global__ void __launch_bounds__(kThreads)
    cofk_attention_unseen(const __grid_constant__ struct cofi_attention_unseen u)
{
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t n = u.n_batch * (u.rows_before + u.rows_behind) * u.n_heads;
    const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
    int64_t at = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
    for (; at < n; at += step) {
        const int64_t head = at % u.n_heads, unseen = at / u.n_heads;
        const int64_t nth = unseen % (u.rows_before + u.rows_behind);
        const int64_t batch = unseen / (u.rows_before + u.rows_behind);
        const int64_t row = nth < u.rows_before ? nth : nth - u.rows_before + u.behind_begin;
        uint4 *o = reinterpret_cast<uint4 *>(
            u.o + 2 * (batch * u.o_batch + row * u.o_row + head * u.o_head));
        for (int64_t i = lane; i < u.dim_v / 8; i += kWarp)
            o[i] = make_uint4(0, 0, 0, 0);
        if (lane == 0)
            u.lse[batch * u.lse_batch + head * u.lse_head + row] = __int_as_float(0xff800000);
    }
}

/* What this launch returns, not an earlier error of the caller's. */
cudaError_t cofi_launch_attention_unseen(const struct cofi_attention_unseen *u, cudaStream_t stream)
{
    struct cofi_attention_unseen copy = *u;
    void *list[] = {&copy};
    int64_t n = u->n_batch * (u->rows_before + u->rows_behind) * u->n_heads;
    int64_t blocks = (n + kThreads / kWarp - 1) / (kThreads / kWarp);
    if (n == 0)
        return cudaSuccess;
    const dim3 n_blocks(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks));
    return cudaLaunchKernel((const void *)cofk_attention_unseen, n_blocks, dim3(kThreads), list, 0,
                            stream);
}

cudaError_t cofi_load_attention_unseen(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, cofk_attention_unseen);
}
