/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One kernel makes a call, by as many blocks as run at once: each row belongs to a block, and is
 * pushed, waited for, summed and normed by it. Which block that is on another rank does not matter.
 *
 *   one shot   every rank pushes its rows to all others, and sums all rows: so each sees of each
 *              other that it has begun
 *   two shot   row t goes to rank t mod P alone, which sums it and pushes the sum to all others. In
 *              calls with less than P rows some ranks sum none: only announcements tell of others
 *
 * Nothing that an earlier kernel of the stream wrote is touched before cofd_wait_earlier_kernels:
 * the kernel in front may be running where this one was launched so (small calls are), else it has
 * ended. It has waited in its turn, so with it all before it have ended. Where this one is small,
 * it lets one that was launched so take its places behind that wait, else when all of its blocks
 * have ended. */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_block.cuh"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_exchange.cuh"

/* Of a block, in shared memory; the row's sums follow. */
struct cofk_memory {
    float segment[COFK_MAX_SEGMENTS]; /* sums of squares */
    struct cofk_missing missing;
};
static_assert(sizeof(struct cofk_memory) <= COFI_ARN_CUDA_STATIC_BYTES, "static shared memory");

/* The row that this block has in a turn, n_tokens and more where it has none. From turn to turn it
 * is another rank's to sum. */
COFK_INLINE int cofk_row_of(const struct cofi_arn_kernel &k, int turn)
{
    const uint32_t at = blockIdx.x + (uint32_t)turn * k.turn_shift;
    return turn * (int)gridDim.x + (int)(at % gridDim.x);
}

COFK_INLINE int cofk_n_turns(const struct cofi_arn_kernel &k)
{
    return (k.n_tokens + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* What a dead arena leaves of a row. */
template <class Elem>
COFK_INLINE void cofk_fill_row(const struct cofi_arn_kernel &k, int64_t row)
{
    for (int h = (int)threadIdx.x; h < k.hidden; h += (int)blockDim.x) {
        if (k.residual_out)
            ((typename Elem::bits *)(k.residual_out + row * k.residual_out_pitch))[h] =
                (typename Elem::bits)~0u;
        if (k.norm_out)
            ((typename Elem::bits *)(k.norm_out + row * k.norm_out_pitch))[h] =
                (typename Elem::bits)~0u;
    }
}

/* Of the block's rows from `turn` on. */
template <class Elem>
static __device__ __noinline__ void cofk_fill_rows(const struct cofi_arn_kernel &k, int turn)
{
    for (; turn < cofk_n_turns(k); turn++)
        if (cofk_row_of(k, turn) < k.n_tokens)
            cofk_fill_row<Elem>(k, cofk_row_of(k, turn));
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

/* The end of a block: its rows from `turn` on are not done where the arena is dead. Where calls are
 * announced, rows that are done may be of another call, as long as a rank's word is not there. */
template <class Elem>
COFK_INLINE void cofk_close(const struct cofi_arn_kernel &k, const struct cofd_grid &g,
                            bool is_alive, int turn)
{
    if (is_alive && (!k.call.announces || k.no_beginning_wait || cofd_grid_wait_announced(g)))
        cofd_grid_end(&g);
    else
        cofk_fill_rows<Elem>(k, k.call.announces ? 0 : turn);
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
    cofk_close<Elem>(k, g, is_alive, row / step);
}

/* ---- two shot ------------------------------------------------------------------------------- */

/* A row of x to the rank that owns it. */
template <class Code, class Elem>
COFK_INLINE void cofk_push_to_owner(const struct cofi_arn_kernel &k, uint32_t epoch, int row,
                                    const struct cofd_slot &first)
{
    const int owner = row % k.call.n_ranks;
    if (row < k.n_tokens && owner != k.call.rank)
        cofk_push_row<Code, Elem>(k, epoch, k.x + row * k.x_pitch, first, row / k.call.n_ranks,
                                  owner);
}

/* Sums of a row, from all ranks' x or from the rank that made them. */
template <class Code, class Elem>
COFK_INLINE bool cofk_take_row(const struct cofi_arn_kernel &k, uint32_t epoch, int row,
                               struct cofk_missing *missing)
{
    const int owner = row % k.call.n_ranks;
    if (owner == k.call.rank) {
        const struct cofk_sum_of_own<Code, Elem> take = {row};
        return take(k, epoch, cofk_sums(), missing);
    }
    if (k.is_exact) {
        const struct cofk_sum_of_owner<Code, cofk_f32> take = {owner, row};
        return take(k, epoch, cofk_sums(), missing);
    }
    const struct cofk_sum_of_owner<Code, Elem> take = {owner, row};
    return take(k, epoch, cofk_sums(), missing);
}

/* A turn's row is pushed before that of the turn before is waited for. Own rows go a turn ahead of
 * others' rows, so that their sums are on their way meanwhile: item 2 i is the row of turn i where
 * this rank owns it, item 2 i + 1 that of turn i - 1 where another does. */
template <class Code, class Elem>
__global__ void __launch_bounds__(COFI_ARN_CUDA_THREADS, 1)
cofk_arn_two_shot(const __grid_constant__ struct cofi_arn_kernel k)
{
    __shared__ struct cofk_memory memory;
    struct cofd_grid g;
    const int n_items = 2 * (cofk_n_turns(k) + 1);
    int item = 0, pushed = 0; /* pushed: the last turn that is */
    cofk_open(k, &g, &memory);
    const int first_row = (int)blockIdx.x; /* there are no more blocks than rows */
    const struct cofd_slot first = cofk_first_slot<Code, Elem>(k, k.x + first_row * k.x_pitch);
    bool is_alive = cofd_grid_begin(&g);
    if (is_alive && blockIdx.x == 0 && k.call.announces)
        cofd_grid_announce(&g);
    if (is_alive)
        cofk_push_to_owner<Code, Elem>(k, g.epoch, first_row, first);
    cofk_keep_weight<Elem>(k);
    is_alive = cofd_block_all(is_alive);
    if (is_alive && threadIdx.x == 0)
        cofd_grid_arrive(&g);
    while (is_alive && item < n_items) {
        for (; item < n_items; item++) {
            const bool is_own = item % 2 == 0;
            const int turn = item / 2 - !is_own, row = cofk_row_of(k, turn);
            if (is_own && pushed == turn) {
                const int next = cofk_row_of(k, ++pushed);
                if (next < k.n_tokens)
                    cofk_push_to_owner<Code, Elem>(
                        k, g.epoch, next, cofk_first_slot<Code, Elem>(k, k.x + next * k.x_pitch));
            }
            if (turn < 0 || row >= k.n_tokens || (row % k.call.n_ranks == k.call.rank) != is_own)
                continue;
            const struct cofk_vector<Elem> residual = cofk_prefetch<Elem>(k, row);
            if (!cofd_block_all(cofk_take_row<Code, Elem>(k, g.epoch, row, &memory.missing)))
                break;
            if (is_own && k.is_exact) {
                cofk_push_exact_sums<Code>(k, g.epoch, cofk_sums(), row);
                __syncthreads(); /* all have read the sums */
            }
            cofk_finish_row<Elem>(k, row, cofk_sums(), memory.segment, residual,
                                  cofk_weight());
        }
        if (item < n_items)
            is_alive = cofk_wait_on(g, &memory.missing, item);
    }
    cofk_close<Elem>(k, g, is_alive, item / 2 > 0 ? item / 2 - 1 : 0);
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

struct cofi_arn_block cofi_arn_block_of(bool has_lines, int64_t hidden, int64_t elem_bytes)
{
    return has_lines ? cofk_block_of<cofd_lines>(hidden, elem_bytes)
                     : cofk_block_of<cofd_wides>(hidden, elem_bytes);
}

int64_t cofi_arn_most_hidden(bool has_lines, int64_t elem_bytes, size_t limit)
{
    return has_lines ? cofk_most_hidden<cofd_lines>(elem_bytes, limit)
                     : cofk_most_hidden<cofd_wides>(elem_bytes, limit);
}

cudaError_t cofi_arn_launch(const struct cofi_arn_choice *choice,
                            const struct cofi_arn_kernel *kernel, int n_blocks,
                            const struct cofi_arn_block *block, bool is_dependent,
                            cudaStream_t stream)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)n_blocks);
    config.blockDim = dim3((unsigned)block->n_threads);
    config.dynamicSmemBytes = block->shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = is_dependent ? 1 : 0;
    void *arguments[] = {(void *)kernel};
    return cudaLaunchKernelExC(&config, cofi_arn_kernel_of(choice), arguments);
}
