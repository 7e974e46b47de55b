/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return on devices: what moves. The protocol is in grad_return_lane.cuh.
 *
 * One kernel makes a whole call, for all sizes. Stores of multiprocessors reach 366 of the copy
 * engine's 388 GB/s between two H200, and need for it neither contiguous rows nor partials in the
 * wire's type; a call of pieces by copy engine would have a signal, a wait and a sum to launch for
 * each, 2 us apiece, where 64 KB have 10 us in all. The link is the narrow place (366 GB/s, against
 * 1.8 TB/s of its own memory that a sum beside it takes): while one piece is stored to the peer,
 * one that came is added, by a block beside the one that stores or in the same loop, and hides
 * behind it. (H200, 2026-11-29.)
 *
 * Calls by section, the staged form and the caller's memory take several launches of the same
 * kernel, each with some of the parts. */
#include "device/elements.cuh"
#include "ops/grad_return/grad_return_cuda.h"
#include "ops/grad_return/grad_return_lane.cuh"

/* ---- places --------------------------------------------------------------------------------- */

COFK_INLINE int64_t cofk_element(const struct cofi_gr_tensor &t, const struct cofi_gr_at &at,
                                 int64_t row, int grain)
{
    const int v = at.is_v;
    return row * t.row[v] + at.batch * t.batch[v] + at.head * t.head[v] +
           (int64_t)at.in_head * grain;
}

/* Tensors that are compact, as usual, take no division but that by a row. */
COFK_INLINE struct cofi_gr_at cofk_find(const struct cofi_gr_kernel &k, int32_t n_rows, uint32_t g)
{
    return k.is_compact ? cofi_gr_find_row(k.shape, n_rows, g) : cofi_gr_find(k.shape, n_rows, g);
}

/* Elements before a grain of eight of a tensor that has its row as number `row`. */
COFK_INLINE int64_t cofk_eight(const struct cofi_gr_kernel &k, const struct cofi_gr_tensor &t,
                               const struct cofi_gr_at &at, int64_t row)
{
    return k.is_compact ? 8 * cofi_gr_compact(k.shape, &at, row) : cofk_element(t, at, row, 8);
}

/* Of an output's grain: how it comes about. */
enum { COFK_SLOT = 1, COFK_OWN = 2, COFK_PADDING = 4, COFK_CHANGES = 8 };

struct cofk_sum {
    struct cofi_gr_at at;
    int64_t own_row;
    uint32_t flags;
};

COFK_INLINE bool cofk_is_last(const struct cofi_gr_kernel &k, struct cofd_gr_item item)
{
    return (k.call.parts & COFD_GR_FINISH) && item.step == k.call.last_sum;
}

COFK_INLINE struct cofk_sum cofk_plan_sum(const struct cofi_gr_kernel &k, struct cofd_gr_item item,
                                          const struct cofi_gr_at &at)
{
    const struct cofi_gr_step &step = k.step[item.step <= COFI_GR_CUDA_STEPS ? item.step - 1 : 0];
    const bool adds = (k.call.parts & COFD_GR_ADD) && item.step < k.call.grid.n_ranks &&
                      !((k.call.parts & COFD_GR_LEAVE_LAST) &&
                        item.step == k.call.grid.n_ranks - 1);
    struct cofk_sum sum;
    sum.at = at;
    sum.own_row = cofi_gr_source(&k.own, sum.at.row);
    sum.flags = adds && sum.at.row >= step.sum_begin && sum.at.row < step.sum_end ? COFK_SLOT : 0;
    if (sum.own_row < 0)
        sum.flags |= COFK_PADDING;
    else if (cofk_is_last(k, item) &&
             (k.own_halves >> cofi_gr_half(&k.own, sum.at.row) & 1))
        sum.flags |= COFK_OWN;
    if (cofk_is_last(k, item) || (sum.flags & COFK_SLOT) || item.step == 1)
        sum.flags |= COFK_CHANGES;
    return sum;
}

COFK_INLINE float *cofk_acc(const struct cofi_gr_kernel &k, const struct cofi_gr_at &at)
{
    return k.acc + (at.is_v ? k.acc_v : 0) + (uint64_t)at.in_slot * (uint32_t)k.grain;
}

/* ---- grains of eight ------------------------------------------------------------------------ */

template <class Elem> COFK_INLINE struct cofk_vector<Elem> cofk_load_eight(const char *from)
{
    return cofk_load_vector<Elem>(from, 0, COFK_VECTOR, true);
}

template <class Elem>
COFK_INLINE void cofk_store_eight(char *to, const struct cofk_vector<Elem> &grain)
{
    cofk_store_vector(to, 0, COFK_VECTOR, true, grain);
}

template <class Elem>
COFK_INLINE void cofk_add(float sum[8], const struct cofk_vector<Elem> &grain)
{
    float x[8];
    cofk_unpack(grain, x);
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = __fadd_rn(sum[i], x[i]);
}

template <class Elem>
COFK_INLINE void cofk_send(char *to, const struct cofk_vector<Elem> &grain, const Elem &)
{
    cofk_store_eight(to, grain);
}

template <class Wire, class Elem>
COFK_INLINE void cofk_send(char *to, const struct cofk_vector<Elem> &grain, const Wire &)
{
    float x[8];
    cofk_unpack(grain, x);
    cofk_store_eight(to, cofk_pack<Wire>(x));
}

/* ---- both halves of a turn ------------------------------------------------------------------ */

template <class Partial, class Wire, class Out> struct cofk_fast {
    static const int unroll = Partial::per_word == 2 && Wire::per_word == 2 ? 4 : 2;
    const struct cofi_gr_kernel &k;

    COFK_METHOD const char *partial_at(const struct cofi_gr_at &at, int64_t row) const
    {
        return k.partial.data[at.is_v] +
               cofk_eight(k, k.partial, at, row) * (4 / Partial::per_word);
    }

    /* Padding between two halves travels as zeros. */
    COFK_METHOD char *load_push(const struct cofi_gr_step &step, uint32_t g,
                                struct cofk_vector<Partial> *x) const
    {
        const struct cofi_gr_at at = cofk_find(k, step.rows.n_rows, g);
        if (at.row < step.push_begin || at.row >= step.push_end)
            return nullptr;
        const int64_t row = cofi_gr_source(&step.rows, at.row);
        if (row < 0)
            *x = cofk_vector<Partial>();
        else
            *x = cofk_load_eight<Partial>(partial_at(at, row));
        return step.to[at.is_v] + (uint64_t)at.in_slot * sizeof(cofk_vector<Wire>);
    }

    /* `to`: of the output, or of the sums that later steps go on with. */
    COFK_METHOD void finish_sum(bool has_acc, bool is_last, uint32_t flags, char *to,
                                const struct cofk_vector<Wire> &slot,
                                const struct cofk_vector<Partial> &own, const char *acc) const
    {
        float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (has_acc)
            cofk_unpack(cofk_load_eight<cofk_f32>(acc), x);
        if (flags & COFK_SLOT)
            cofk_add(x, slot);
        if (flags & COFK_OWN)
            cofk_add(x, own);
        if (!is_last) {
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                *(float4 *)(to + 4 * i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
            return;
        }
        cofk_store_eight(to, flags & COFK_PADDING ? cofk_vector<Out>() : cofk_pack<Out>(x));
    }

    COFK_METHOD char *target(const struct cofi_gr_at &at, bool is_last) const
    {
        return is_last ? k.out.data[at.is_v] +
                             cofk_eight(k, k.out, at, at.row) * (4 / Out::per_word)
                       : (char *)cofk_acc(k, at);
    }

    COFK_METHOD void turn(struct cofd_gr_item push_item, uint32_t push, uint32_t push_end,
                          struct cofd_gr_item sum_item, uint32_t sum_at, uint32_t sum_end) const
    {
        const struct cofi_gr_step &out_step = k.step[push_item.step > 0 ? push_item.step - 1 : 0];
        const int in = sum_item.step;
        const struct cofi_gr_step &in_step =
            k.step[in > 0 && in <= COFI_GR_CUDA_STEPS ? in - 1 : 0];
        const bool is_last = cofk_is_last(k, sum_item), has_acc = in > 1;
        struct cofk_vector<Partial> x[unroll], own[unroll];
        struct cofk_vector<Wire> slot[unroll];
        char *to[unroll], *sum_to[unroll];
        uint32_t flags[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const uint32_t g = push + u * COFI_GR_THREADS;
            to[u] = g < push_end ? load_push(out_step, g, &x[u]) : nullptr;
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const uint32_t g = sum_at + u * COFI_GR_THREADS;
            flags[u] = 0;
            if (g >= sum_end)
                continue;
            const struct cofk_sum sum =
                cofk_plan_sum(k, sum_item, cofk_find(k, k.own.n_rows, g));
            flags[u] = sum.flags;
            sum_to[u] = target(sum.at, is_last);
            if (sum.flags & COFK_SLOT)
                slot[u] = cofk_load_eight<Wire>(in_step.from[sum.at.is_v] +
                                                (uint64_t)sum.at.in_slot *
                                                    sizeof(cofk_vector<Wire>));
            if (sum.flags & COFK_OWN)
                own[u] = cofk_load_eight<Partial>(partial_at(sum.at, sum.own_row));
        }
#pragma unroll
        for (int u = 0; u < unroll; u++)
            if (to[u])
                cofk_send(to[u], x[u], Wire());
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const uint32_t g = sum_at + u * COFI_GR_THREADS;
            if (flags[u] & COFK_CHANGES)
                finish_sum(has_acc, is_last, flags[u], sum_to[u], slot[u], own[u],
                           has_acc && is_last
                               ? (char *)cofk_acc(k, cofi_gr_find(k.shape, k.own.n_rows, g))
                               : sum_to[u]);
        }
    }
};

/* ---- any types, dims and addresses ---------------------------------------------------------- */

COFK_INLINE float cofk_load_any(const char *data, enum cofi_gr_elem elem, int64_t i)
{
    float x[2];
    if (elem == COFI_GR_F32)
        return ((const float *)data)[i];
    const uint32_t word = ((const uint16_t *)data)[i];
    if (elem == COFI_GR_BF16)
        cofk_bf16::unpack(word, x);
    else
        cofk_f16::unpack(word, x);
    return x[0];
}

COFK_INLINE void cofk_store_any(char *data, enum cofi_gr_elem elem, int64_t i, float value)
{
    const float pair[2] = {value, 0};
    if (elem == COFI_GR_F32)
        ((uint32_t *)data)[i] = cofk_f32::pack(pair);
    else if (elem == COFI_GR_BF16)
        ((uint16_t *)data)[i] = (uint16_t)cofk_bf16::pack(pair);
    else
        ((uint16_t *)data)[i] = (uint16_t)cofk_f16::pack(pair);
}

struct cofk_any {
    static const int unroll = 1;
    const struct cofi_gr_kernel &k;

    COFK_METHOD void push_grain(const struct cofi_gr_step &step, uint32_t g) const
    {
        const struct cofi_gr_at at = cofi_gr_find(k.shape, step.rows.n_rows, g);
        if (at.row < step.push_begin || at.row >= step.push_end)
            return;
        const int64_t row = cofi_gr_source(&step.rows, at.row);
        const int64_t from = cofk_element(k.partial, at, row < 0 ? 0 : row, k.grain);
        for (int i = 0; i < k.grain; i++) {
            const float x = row < 0 ? 0 : cofk_load_any(k.partial.data[at.is_v], k.partial_elem,
                                                        from + i);
            cofk_store_any(step.to[at.is_v], k.wire_elem, (int64_t)at.in_slot * k.grain + i, x);
        }
    }

    COFK_METHOD void sum_grain(const struct cofi_gr_step &step, bool has_acc, bool is_last,
                               const struct cofk_sum &sum) const
    {
        const int v = sum.at.is_v;
        const bool has_own = sum.flags & COFK_OWN;
        const int64_t own = cofk_element(k.partial, sum.at, has_own ? sum.own_row : 0, k.grain);
        const int64_t out = cofk_element(k.out, sum.at, sum.at.row, k.grain);
        for (int i = 0; i < k.grain; i++) {
            float x = has_acc ? cofk_acc(k, sum.at)[i] : 0;
            if (sum.flags & COFK_SLOT)
                x = __fadd_rn(x, cofk_load_any(step.from[v], k.wire_elem,
                                               (int64_t)sum.at.in_slot * k.grain + i));
            if (has_own)
                x = __fadd_rn(x, cofk_load_any(k.partial.data[v], k.partial_elem, own + i));
            if (is_last)
                cofk_store_any(k.out.data[v], k.out_elem, out + i,
                               sum.flags & COFK_PADDING ? 0 : x);
            else
                cofk_acc(k, sum.at)[i] = x;
        }
    }

    COFK_METHOD void turn(struct cofd_gr_item push_item, uint32_t push, uint32_t push_end,
                          struct cofd_gr_item sum_item, uint32_t sum_at, uint32_t sum_end) const
    {
        const int in = sum_item.step;
        if (push < push_end)
            push_grain(k.step[push_item.step - 1], push);
        if (sum_at >= sum_end)
            return;
        const struct cofk_sum sum =
            cofk_plan_sum(k, sum_item, cofi_gr_find(k.shape, k.own.n_rows, sum_at));
        if (sum.flags & COFK_CHANGES)
            sum_grain(k.step[in <= COFI_GR_CUDA_STEPS ? in - 1 : 0], in > 1,
                      cofk_is_last(k, sum_item), sum);
    }
};

/* ---- a lane's items ------------------------------------------------------------------------- */

COFK_INLINE uint32_t cofk_grains(const struct cofi_gr_kernel &k, int32_t n_rows)
{
    return (uint32_t)n_rows * (k.shape[0].row.by + k.shape[1].row.by);
}

/* What cofd_gr_run_lane calls. */
template <class Turns> struct cofk_mover {
    const struct cofi_gr_kernel &k;

    COFK_METHOD void move(struct cofd_gr_item push, struct cofd_gr_item sum) const
    {
        const Turns turns = {k};
        const uint32_t step = COFI_GR_THREADS * Turns::unroll;
        uint32_t p = 0, p_end = 0, s = 0, s_end = 0;
        const uint32_t lane = cofd_gr_lane(&k.call), parts = cofd_gr_parts(&k.call);
        if (push.step != 0 && (parts & COFD_GR_STORE))
            cofi_gr_piece(&k.call.cut, lane, push.piece,
                          cofk_grains(k, k.step[push.step - 1].rows.n_rows), &p, &p_end);
        if (sum.step != 0 && (parts & (COFD_GR_ADD | COFD_GR_FINISH)))
            cofi_gr_piece(&k.call.cut, lane, sum.piece, cofk_grains(k, k.own.n_rows), &s, &s_end);
#pragma unroll 1
        for (; p < p_end || s < s_end; p += step, s += step)
            turns.turn(push, p + threadIdx.x, p_end, sum, s + threadIdx.x, s_end);
    }
};

/* What a dead arena leaves of the outputs. In staged form copies may follow. */
static __device__ __noinline__ void cofk_fill_lane(const struct cofi_gr_kernel &k)
{
    if (threadIdx.x == 0)
        cofd_pass_on(k.call.grid.arena);
    if (!(cofd_gr_parts(&k.call) & COFD_GR_FINISH))
        return;
    const int bytes = k.out_elem == COFI_GR_F32 ? 4 : 2;
    for (uint32_t piece = 0; piece < k.call.cut.n_pieces; piece++) {
        uint32_t g, end;
        cofi_gr_piece(&k.call.cut, cofd_gr_lane(&k.call), piece, cofk_grains(k, k.own.n_rows), &g,
                      &end);
        for (g += threadIdx.x; g < end; g += COFI_GR_THREADS) {
            const struct cofi_gr_at at = cofi_gr_find(k.shape, k.own.n_rows, g);
            char *to = k.out.data[at.is_v] + cofk_element(k.out, at, at.row, k.grain) * bytes;
            for (int i = 0; i < k.grain * bytes / 2; i++)
                ((uint16_t *)to)[i] = 0xffff;
        }
    }
}

/* A launch that finishes a call of several looks at what other ranks said too: copy engines do not
 * look, and may have overwritten what was summed before. */
template <class Turns> COFK_INLINE void cofk_run(const struct cofi_gr_kernel &k)
{
    struct cofd_grid g = {&k.call.grid, 0};
    uint32_t last = 0;
    const struct cofk_mover<Turns> mover = {k};
    const uint32_t parts = cofd_gr_parts(&k.call);
    bool is_alive = cofd_gr_begin(&k.call, &g, &last);
    if (is_alive && (parts & (COFD_GR_FINISH | COFD_GR_BEGIN)) == COFD_GR_FINISH)
        is_alive = cofd_block_all(threadIdx.x != 0 || !cofd_is_told(k.call.grid.arena));
    if (is_alive)
        is_alive = cofd_gr_run_lane(&k.call, &g, last, mover);
    if (!is_alive) {
        cofk_fill_lane(k);
    } else if (parts & COFD_GR_BEGIN) {
        cofd_grid_end(&g);
    }
}

template <class Partial, class Wire, class Out>
__global__ void __launch_bounds__(COFI_GR_THREADS, 1)
cofk_grad_return(const __grid_constant__ struct cofi_gr_kernel k)
{
    cofk_run<cofk_fast<Partial, Wire, Out>>(k);
}

extern "C" __global__ void __launch_bounds__(COFI_GR_THREADS, 1)
    cofk_grad_return_any(const __grid_constant__ struct cofi_gr_kernel k)
{
    cofk_run<cofk_any>(k);
}

/* ---- the caller's epoch words --------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(32, 1)
    cofk_grad_return_wait(struct cofd_arena *a, const struct cofd_binding *binding,
                          const uint32_t *word, uint32_t want, int writer,
                          const __grid_constant__ struct cofd_wait_options o)
{
    struct cofd_binding b = *binding;
    struct cofd_patience patience = {0, 0, 0};
    if (cofd_is_dead(a))
        return;
    b.epoch = want; /* the caller's, for the text */
    b.digest = 0;
    const struct cofd_wait w = {a, &b, writer, COFI_ACK, nullptr, want, &o};
    uint32_t seen = cofd_load_acquire_sys_u32(word);
    while ((int32_t)(seen - want) < 0) {
        if (!cofd_wait_goes_on(&w, &patience, seen))
            return;
        seen = cofd_load_acquire_sys_u32(word);
    }
}

/* ---- which of them -------------------------------------------------------------------------- */

template <class Out> static const void *kernel_for(bool partial_f32, bool wire_f32)
{
    if (partial_f32)
        return wire_f32 ? (const void *)cofk_grad_return<cofk_f32, cofk_f32, Out>
                        : (const void *)cofk_grad_return<cofk_f32, Out, Out>;
    return wire_f32 ? (const void *)cofk_grad_return<Out, cofk_f32, Out>
                    : (const void *)cofk_grad_return<Out, Out, Out>;
}

const void *cofi_gr_kernel_fast(enum cofi_gr_elem out, bool partial_f32, bool wire_f32)
{
    switch (out) {
    case COFI_GR_BF16: return kernel_for<cofk_bf16>(partial_f32, wire_f32);
    case COFI_GR_F16: return kernel_for<cofk_f16>(partial_f32, wire_f32);
    default: return (const void *)cofk_grad_return<cofk_f32, cofk_f32, cofk_f32>;
    }
}

const void *cofi_gr_kernel_any(void)
{
    return (const void *)cofk_grad_return_any;
}

const void *cofi_gr_kernel_wait(void)
{
    return (const void *)cofk_grad_return_wait;
}

cudaError_t cofi_gr_launch(const void *entry, const struct cofi_gr_kernel *kernel,
                           cudaStream_t stream)
{
    void *arguments[] = {(void *)kernel};
    const bool is_apart = kernel->call.parts & COFD_GR_APART;
    const uint32_t n_blocks = kernel->call.cut.n_lanes * (is_apart ? 2 : 1);
    return cudaLaunchKernel(entry, dim3(n_blocks), dim3(COFI_GR_THREADS), arguments, 0, stream);
}

cudaError_t cofi_gr_launch_wait(struct cofd_arena *arena, const struct cofd_binding *binding,
                                const uint32_t *word, uint32_t want, int writer,
                                const struct cofd_wait_options *options, cudaStream_t stream)
{
    void *arguments[] = {&arena, &binding, &word, &want, &writer, (void *)options};
    return cudaLaunchKernel((const void *)cofk_grad_return_wait, dim3(1), dim3(1), arguments, 0,
                            stream);
}
