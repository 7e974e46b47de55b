/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One kernel makes a call, by as many blocks as run at once: each row belongs to a block, and is
 * pushed, waited for, summed and normed by it. Which block that is on another rank does not matter.
 *
 *   one shot   every rank pushes its rows to all others, and sums all rows: so each sees of each
 *              other that it has begun
 *   two shot   row t goes to rank t mod P alone, which sums it and pushes the sum to all others: of
 *              ranks that have no row to sum only their announcement tells
 *
 * Nothing that an earlier kernel of the stream wrote is touched before cofd_wait_earlier_kernels.
 * Blocks of the next kernel may take their places at once where this one is small, else when all of
 * its blocks have ended; there they wait the same way. */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_exchange.cuh"

/* Of a block, in shared memory; the row's sums follow. */
struct cofk_memory {
    float segment[COFK_MAX_SEGMENTS]; /* sums of squares */
    struct cofk_missing missing;
};

/* What a dead arena leaves of a row. */
template <class Elem>
static __device__ __noinline__ void cofk_fill_rows(const struct cofi_arn_kernel &k, int64_t row,
                                                   int64_t step)
{
    for (; row < k.n_tokens; row += step)
        for (int h = (int)threadIdx.x; h < k.hidden; h += (int)blockDim.x) {
            if (k.residual_out)
                ((typename Elem::bits *)(k.residual_out + row * k.residual_out_pitch))[h] =
                    (typename Elem::bits)~0u;
            if (k.norm_out)
                ((typename Elem::bits *)(k.norm_out + row * k.norm_out_pitch))[h] =
                    (typename Elem::bits)~0u;
        }
}

/* Dynamic shared memory: the sums of a row, behind the weights of a vector for each thread. */
extern __shared__ __align__(16) float cofk_shared[];

COFK_INLINE float *cofk_weight(void)
{
    return cofk_shared + threadIdx.x * COFK_VECTOR;
}

COFK_INLINE float *cofk_sums(void)
{
    return cofk_shared + blockDim.x * COFK_VECTOR;
}

COFK_INLINE void cofk_open(const struct cofi_arn_kernel &k, struct cofd_grid *g,
                           struct cofk_memory *memory)
{
    for (uint32_t i = threadIdx.x; i < COFK_MAX_SEGMENTS; i += blockDim.x)
        memory->segment[i] = 0;
    if (threadIdx.x == 0)
        memory->missing.first = memory->missing.last = UINT32_MAX;
    cofd_wait_earlier_kernels();
    if (k.lets_next_begin)
        cofd_let_next_kernel_begin();
    *g = {&k.call, 0};
}

/* Once, while the first rows are on their way. */
template <class Elem> COFK_INLINE void cofk_keep_weight(const struct cofi_arn_kernel &k)
{
    __align__(16) float w[COFK_VECTOR];
    if (!k.weight || !cofk_is_in_row(k, (int)threadIdx.x))
        return;
    cofk_load_weight<Elem>(k, (int)threadIdx.x, w);
    cofk_copy_vector(cofk_weight(), w);
}

/* The first vector's, before the row is waited for. */
template <class Elem>
COFK_INLINE struct cofk_vector<Elem> cofk_prefetch(const struct cofi_arn_kernel &k, int64_t row)
{
    struct cofk_vector<Elem> residual;
    if (k.residual && cofk_is_in_row(k, (int)threadIdx.x))
        residual = cofk_load_residual<Elem>(k, row, (int)threadIdx.x);
    return residual;
}

/* The end of a block: rows from `row` on are not done where the arena is dead. */
template <class Elem>
COFK_INLINE void cofk_close(const struct cofi_arn_kernel &k, const struct cofd_grid &g,
                            bool is_alive, int row, int step)
{
    if (is_alive && blockIdx.x == 0 && k.call.announces && !k.no_beginning_wait &&
        !cofd_grid_wait_announced(g)) {
        is_alive = false; /* rows of another call, it may be: of all blocks */
        row = 0;
        step = 1;
    }
    if (is_alive)
        cofd_grid_end(&g);
    else
        cofk_fill_rows<Elem>(k, row, step);
}

/* Kernels leave their loop over rows while they wait long: so the call's registers cost the loop
 * nothing. */

template <class Code, class Elem, bool has_pair>
__global__ void __launch_bounds__(COFI_ARN_CUDA_THREADS,
                                  has_pair && Code::is_fast && Elem::per_word == 2 ? 2 : 1)
cofk_arn_one_shot(const __grid_constant__ struct cofi_arn_kernel k)
{
    __shared__ struct cofk_memory memory;
    struct cofd_grid g;
    const int step = (int)gridDim.x;
    const int to = has_pair ? 1 - k.call.rank : COFD_ALL_OTHERS;
    int row = (int)blockIdx.x; /* there are no more blocks than rows */
    cofk_open(k, &g, &memory);
    const struct cofd_slot first = cofk_first_slot<Code, Elem>(k, k.x + row * k.x_pitch);
    bool is_alive = cofd_grid_begin(&g);
    if (is_alive && blockIdx.x == 0 && k.call.announces)
        cofd_grid_announce(&g);
    if (is_alive)
        cofk_push_row<Code, Elem>(k, g.epoch, k.x + row * k.x_pitch, first, row, to);
    cofk_keep_weight<Elem>(k);
    is_alive = cofd_block_all(is_alive);
    if (is_alive && threadIdx.x == 0)
        cofd_grid_arrive(&g);
    while (is_alive && row < k.n_tokens) {
        for (; row < k.n_tokens; row += step) {
            const struct cofk_vector<Elem> residual = cofk_prefetch<Elem>(k, row);
            const char *next = k.x + (row + step) * k.x_pitch;
            if (row + step < k.n_tokens) /* after a long wait once more: the same bytes */
                cofk_push_row<Code, Elem>(k, g.epoch, next, cofk_first_slot<Code, Elem>(k, next),
                                          row + step, to);
            const struct cofk_sum_of_x<Code, Elem, has_pair> take = {k.x + row * k.x_pitch, row};
            if (!cofd_block_all(take(k, g.epoch, cofk_sums(), &memory.missing)))
                break;
            cofk_finish_row<Elem>(k, row, cofk_sums(), memory.segment, residual,
                                  cofk_weight());
        }
        if (row < k.n_tokens)
            is_alive = cofk_wait_on(g, &memory.missing, row);
    }
    cofk_close<Elem>(k, g, is_alive, row, step);
}

/* ---- two shot ------------------------------------------------------------------------------- */

/* A wave is a group of P rows for every block, one of them to be summed by each rank: the group's
 * number is wave * n_blocks + block. */
COFK_INLINE int64_t cofk_group_row(const struct cofi_arn_kernel &k, int64_t group, int owner)
{
    return group * k.call.n_ranks + owner;
}

template <class Code, class Elem>
COFK_INLINE void cofk_push_group(const struct cofi_arn_kernel &k, uint32_t epoch, int64_t group)
{
    for (int owner = 0; owner < k.call.n_ranks; owner++) {
        const int64_t row = cofk_group_row(k, group, owner);
        if (owner != k.call.rank && row < k.n_tokens)
            cofk_push_row<Code, Elem>(
                k, epoch, k.x + row * k.x_pitch,
                cofk_first_slot<Code, Elem>(k, k.x + row * k.x_pitch), group, owner);
    }
}

/* A row's sums, from all ranks' x or from the rank that made them. */
template <class Code, class Elem>
COFK_INLINE bool cofk_take_row(const struct cofi_arn_kernel &k, uint32_t epoch, int64_t row,
                               struct cofk_missing *missing)
{
    const int owner = (int)(row % k.call.n_ranks);
    if (owner == k.call.rank) {
        const struct cofk_sum_of_x<Code, Elem, false> take = {k.x + row * k.x_pitch,
                                                              row / k.call.n_ranks};
        return take(k, epoch, cofk_sums(), missing);
    }
    if (k.is_exact) {
        const struct cofk_sum_of_owner<Code, cofk_f32> take = {owner, row};
        return take(k, epoch, cofk_sums(), missing);
    }
    const struct cofk_sum_of_owner<Code, Elem> take = {owner, row};
    return take(k, epoch, cofk_sums(), missing);
}

/* Items of a block: its own row of wave 0, of wave 1, its others' rows of wave 0, its own row of
 * wave 2, .. Rows of a wave are pushed before the own row of the wave before is waited for. */
template <class Code, class Elem>
__global__ void __launch_bounds__(COFI_ARN_CUDA_THREADS, 1)
cofk_arn_two_shot(const __grid_constant__ struct cofi_arn_kernel k)
{
    __shared__ struct cofk_memory memory;
    struct cofd_grid g;
    const int n = k.call.n_ranks, per_wave = (int)gridDim.x * n;
    const int n_items = ((k.n_tokens + per_wave - 1) / per_wave + 1) * n;
    int item = 0, pushed = 0; /* pushed: waves */
    cofk_open(k, &g, &memory);
    bool is_alive = cofd_grid_begin(&g);
    if (is_alive && blockIdx.x == 0 && k.call.announces)
        cofd_grid_announce(&g);
    if (is_alive)
        cofk_push_group<Code, Elem>(k, g.epoch, blockIdx.x);
    cofk_keep_weight<Elem>(k);
    is_alive = cofd_block_all(is_alive);
    if (is_alive && threadIdx.x == 0)
        cofd_grid_arrive(&g);
    while (is_alive && item < n_items) {
        for (; item < n_items; item++) {
            const int wave = item / n, other = item % n;
            const int64_t group = (int64_t)(wave - (other > 0)) * gridDim.x + blockIdx.x;
            const int64_t row = cofk_group_row(k, group, (k.call.rank + other) % n);
            if (other == 0 && pushed == wave)
                cofk_push_group<Code, Elem>(k, g.epoch, (int64_t)++pushed * gridDim.x + blockIdx.x);
            if (group < 0 || row >= k.n_tokens)
                continue;
            const struct cofk_vector<Elem> residual = cofk_prefetch<Elem>(k, row);
            if (!cofd_block_all(cofk_take_row<Code, Elem>(k, g.epoch, row, &memory.missing)))
                break;
            if (other == 0) {
                if (k.is_exact)
                    cofk_push_sums<Code, cofk_f32>(k, g.epoch, cofk_sums(), row);
                else
                    cofk_push_sums<Code, Elem>(k, g.epoch, cofk_sums(), row);
                __syncthreads(); /* all have read the sums */
            }
            cofk_finish_row<Elem>(k, row, cofk_sums(), memory.segment, residual,
                                  cofk_weight());
        }
        if (item < n_items)
            is_alive = cofk_wait_on(g, &memory.missing, item);
    }
    cofk_close<Elem>(k, g, is_alive, blockIdx.x, (int)gridDim.x);
}

/* ---- which of them -------------------------------------------------------------------------- */

template <class Code, class Elem> static const void *kernel_for(const struct cofi_arn_choice *c)
{
    if (c->is_two_shot)
        return (const void *)cofk_arn_two_shot<Code, Elem>;
    return c->has_pair ? (const void *)cofk_arn_one_shot<Code, Elem, true>
                       : (const void *)cofk_arn_one_shot<Code, Elem, false>;
}

template <class Code> static const void *kernel_with(const struct cofi_arn_choice *c)
{
    switch (c->elem) {
    case COFI_ARN_BF16: return kernel_for<Code, cofk_bf16>(c);
    case COFI_ARN_F16: return kernel_for<Code, cofk_f16>(c);
    default: return kernel_for<Code, cofk_f32>(c);
    }
}

const void *cofi_arn_kernel_of(const struct cofi_arn_choice *choice)
{
    return choice->has_lines ? kernel_with<cofd_lines>(choice) : kernel_with<cofd_wides>(choice);
}

bool cofi_arn_has_digest(const struct cofi_arn_choice *choice)
{
    return choice->has_lines ? cofd_lines::has_digest : cofd_wides::has_digest;
}

uint32_t cofi_arn_slots(bool has_lines, int64_t row_bytes)
{
    return has_lines ? cofd_lines::n_slots((uint64_t)row_bytes)
                     : cofd_wides::n_slots((uint64_t)row_bytes);
}

cudaError_t cofi_arn_launch(const struct cofi_arn_choice *choice,
                            const struct cofi_arn_kernel *kernel, int n_blocks, int n_threads,
                            size_t shared_bytes, bool is_dependent, cudaStream_t stream)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)n_blocks);
    config.blockDim = dim3((unsigned)n_threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = is_dependent ? 1 : 0;
    void *arguments[] = {(void *)kernel};
    return cudaLaunchKernelExC(&config, cofi_arn_kernel_of(choice), arguments);
}
