/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* How rows get to other ranks and from them, as slots that carry their own signal (lines.h):
 *
 *   x rows     [half][writer][row]   writer: that rank
 *   sum rows   [half][row]           writer: the rank that summed the row
 *
 * The reader is the owner of the memory. A line is stored by eight threads, a word by one.
 *
 * Halves by the parity of the epoch: a writer is past call n - 1 of all ranks when it begins to
 * store for call n + 1, for it has seen that all of them have begun call n. */
#ifndef COFI_ALLREDUCE_RMSNORM_EXCHANGE_CUH
#define COFI_ALLREDUCE_RMSNORM_EXCHANGE_CUH

#include "device/lines.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_row.cuh"

enum { COFK_RANKS_AT_ONCE = 4 };

COFK_INLINE uint64_t cofk_half(const struct cofi_arn_kernel &k, uint32_t epoch)
{
    return k.only_one_half ? 0 : epoch & 1;
}

COFK_INLINE uint64_t cofk_tag(const struct cofi_arn_kernel &k, uint32_t epoch)
{
    const struct cofd_grid g = {&k.call, epoch};
    return cofd_grid_tag(&g);
}

/* Where rank `to` has the row of x that `writer` sends it; and the row's sums. */
COFK_INLINE char *cofk_x_row(const struct cofi_arn_kernel &k, int to, uint32_t epoch, int writer,
                             int64_t row)
{
    return k.call.slab[to] + k.tagged + cofk_half(k, epoch) * k.x_half +
           (uint64_t)writer * k.x_writer + (uint64_t)row * k.x_slots * 16;
}

COFK_INLINE char *cofk_sum_row(const struct cofi_arn_kernel &k, int to, uint32_t epoch, int64_t row)
{
    return k.call.slab[to] + k.tagged + k.sums + cofk_half(k, epoch) * k.sum_half +
           (uint64_t)row * k.sum_slots * 16;
}

/* ---- slots of this rank's x ----------------------------------------------------------------- */

template <class Code, class Elem>
COFK_INLINE struct cofd_slot cofk_load_slot(const struct cofi_arn_kernel &k, const char *row,
                                            uint32_t slot)
{
    const uint32_t offset = Code::offset(slot), n = Code::n_words(slot);
    const uint32_t bytes = (uint32_t)k.hidden * (4 / Elem::per_word);
    struct cofd_slot s = {{0, 0, 0, 0}};
    if (k.x_aligned && offset + 4 * n <= bytes) {
        if (offset % 8 == 0 && n != 3) {
            const uint2 low = *(const uint2 *)(row + offset);
            s.word[0] = low.x;
            s.word[1] = low.y;
            if (n == 4) {
                const uint2 high = *(const uint2 *)(row + offset + 8);
                s.word[2] = high.x;
                s.word[3] = high.y;
            }
            return s;
        }
#pragma unroll
        for (uint32_t i = 0; i < 3; i++)
            s.word[i] = *(const uint32_t *)(row + offset + 4 * i);
        return s;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (i < n)
            s.word[i] = cofk_gather_word<Elem>(row, (int)(offset / 4 + i) * Elem::per_word,
                                               k.hidden);
    return s;
}

/* This thread's first slot, of a row that is pushed next: to be loaded before something else is
 * waited for. */
template <class Code, class Elem>
COFK_INLINE struct cofd_slot cofk_first_slot(const struct cofi_arn_kernel &k, const char *row)
{
    struct cofd_slot s = {{0, 0, 0, 0}};
    return threadIdx.x < k.x_slots ? cofk_load_slot<Code, Elem>(k, row, threadIdx.x) : s;
}

COFK_INLINE int cofk_peer(const struct cofi_arn_kernel &k, int i)
{
    const int peer = k.call.rank + i;
    return peer < k.call.n_ranks ? peer : peer - k.call.n_ranks;
}

/* A row of x, by all threads, to one rank or to all others. */
template <class Code, class Elem>
COFK_INLINE void cofk_push_row(const struct cofi_arn_kernel &k, uint32_t epoch, const char *row,
                               struct cofd_slot first, int64_t to_row, int to)
{
    const uint64_t tag = cofk_tag(k, epoch);
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < k.x_slots; slot += blockDim.x) {
        const struct cofd_slot s =
            slot == threadIdx.x ? first : cofk_load_slot<Code, Elem>(k, row, slot);
        if (to >= 0) {
            Code::store(cofk_x_row(k, to, epoch, k.call.rank, to_row), slot, &s, tag);
            continue;
        }
        for (int i = 1; i < k.call.n_ranks; i++)
            Code::store(cofk_x_row(k, cofk_peer(k, i), epoch, k.call.rank, to_row), slot, &s, tag);
    }
}

/* ---- slots of others ------------------------------------------------------------------------ */

/* The first slot that threads of the block still waited for when they had looked long enough. In
 * shared memory: the block waits on as a whole, and looks at all of the row again. What is there
 * stays there, so the first of what is not changes only when something has come. */
struct cofk_missing {
    uint32_t first, last; /* slot * COFD_GRID_MAX_RANKS + writer; last: of the wait before */
    int64_t last_row;
    bool is_alive;
    struct cofd_grid_wait wait;
};

/* Tells of a slot that is given up for now, as it was seen last: who carries its tag does. */
template <class Code>
COFK_INLINE void cofk_miss(const struct cofi_arn_kernel &k, uint32_t epoch, int writer,
                           uint32_t slot, const struct cofd_raw_slot &raw,
                           struct cofk_missing *missing)
{
    const uint32_t key = slot * COFD_GRID_MAX_RANKS + (uint32_t)writer;
    if (Code::carries_tag(slot) && key < atomicMin(&missing->first, key))
        missing->wait.seen = Code::tag_in(raw, slot, cofk_tag(k, epoch));
}

/* Looks at a slot for a while. */
template <class Code>
COFK_INLINE bool cofk_take(const struct cofi_arn_kernel &k, uint32_t epoch, int writer,
                           const char *row, uint32_t slot, struct cofd_slot *s,
                           struct cofk_missing *missing)
{
    struct cofd_raw_slot raw;
    bool is_there = false;
#pragma unroll 1
    for (uint32_t looks = 0; !is_there && looks < COFD_LOOKS; looks++) {
        raw = Code::look(row, slot);
        is_there = Code::has_arrived(raw, slot, cofk_tag(k, epoch));
    }
    *s = Code::data(raw, slot);
    if (!is_there)
        cofk_miss<Code>(k, epoch, writer, slot, raw, missing);
    return is_there;
}

/* ---- sums ----------------------------------------------------------------------------------- */

template <class Elem>
COFK_INLINE void cofk_unpack_slot(const struct cofd_slot &s, float to[4 * Elem::per_word])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        Elem::unpack(s.word[i], to + i * Elem::per_word);
}

template <class Elem, class Code>
COFK_INLINE void cofk_keep_slot(float *sums, uint32_t slot, const float from[4 * Elem::per_word])
{
    float *to = sums + Code::offset(slot) / 4 * Elem::per_word;
    const uint32_t n = Code::n_words(slot) * Elem::per_word;
    const bool has_fours = Elem::per_word == 2 && Code::offset_unit == 8; /* so aligned is `to` */
    const bool has_pairs = Elem::per_word == 2 || Code::offset_unit == 8;
#pragma unroll
    for (uint32_t i = 0; i < 4 * Elem::per_word; i += 4)
        if (has_fours && i < n) {
            *(float4 *)(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
        } else {
#pragma unroll
            for (uint32_t j = i; j < i + 4; j += 2)
                if (has_pairs && j + 1 < n) {
                    *(float2 *)(to + j) = make_float2(from[j], from[j + 1]);
                } else {
                    if (j < n)
                        to[j] = from[j];
                    if (j + 1 < n)
                        to[j + 1] = from[j + 1];
                }
        }
}

/* Looks for a while at slots of rank `first` and of those behind it, but its own: at all that lack
 * together, which is one way to memory and back. */
template <class Code>
COFK_INLINE bool cofk_take_ranks(const struct cofi_arn_kernel &k, uint32_t epoch, int first,
                                 int64_t row, uint32_t slot,
                                 struct cofd_raw_slot raw[COFK_RANKS_AT_ONCE],
                                 struct cofk_missing *missing)
{
    uint32_t lacks = 0;
#pragma unroll
    for (int i = 0; i < COFK_RANKS_AT_ONCE; i++)
        if (first + i < k.call.n_ranks && first + i != k.call.rank)
            lacks |= 1u << i;
#pragma unroll 1
    for (uint32_t looks = 0; lacks != 0 && looks < COFD_LOOKS; looks++) {
#pragma unroll
        for (int i = 0; i < COFK_RANKS_AT_ONCE; i++)
            if (lacks >> i & 1)
                raw[i] = Code::look(cofk_x_row(k, k.call.rank, epoch, first + i, row), slot);
#pragma unroll
        for (int i = 0; i < COFK_RANKS_AT_ONCE; i++)
            if ((lacks >> i & 1) && Code::has_arrived(raw[i], slot, cofk_tag(k, epoch)))
                lacks &= ~(1u << i);
    }
#pragma unroll
    for (int i = 0; i < COFK_RANKS_AT_ONCE; i++)
        if (lacks >> i & 1)
            cofk_miss<Code>(k, epoch, first + i, slot, raw[i], missing);
    return lacks == 0;
}

/* x_0 + x_1 + ... of a slot. This rank's addend comes from its x. */
template <class Code, class Elem>
COFK_INLINE bool cofk_sum_slot(const struct cofi_arn_kernel &k, uint32_t epoch,
                               const struct cofd_slot &own, int64_t row, uint32_t slot,
                               float sum[4 * Elem::per_word], struct cofk_missing *missing)
{
#pragma unroll 1
    for (int first = 0; first < k.call.n_ranks; first += COFK_RANKS_AT_ONCE) {
        struct cofd_raw_slot raw[COFK_RANKS_AT_ONCE];
        if (!cofk_take_ranks<Code>(k, epoch, first, row, slot, raw, missing))
            return false;
#pragma unroll
        for (int i = 0; i < COFK_RANKS_AT_ONCE; i++) {
            const int r = first + i;
            struct cofd_slot s = Code::data(raw[i], slot);
            float x[4 * Elem::per_word];
            if (r >= k.call.n_ranks)
                continue;
            if (r == k.call.rank)
                s = own;
            cofk_unpack_slot<Elem>(s, x);
#pragma unroll
            for (int j = 0; j < 4 * Elem::per_word; j++)
                sum[j] = r == 0 ? x[j] : __fadd_rn(sum[j], x[j]);
        }
    }
    return true;
}

template <class Code, class Elem>
COFK_INLINE bool cofk_sum_pair(const struct cofi_arn_kernel &k, uint32_t epoch,
                               const struct cofd_slot &own, int64_t row, uint32_t slot,
                               float sum[4 * Elem::per_word], struct cofk_missing *missing)
{
    struct cofd_slot s;
    float x[4 * Elem::per_word];
    const int peer = 1 - k.call.rank;
    if (!cofk_take<Code>(k, epoch, peer, cofk_x_row(k, k.call.rank, epoch, peer, row), slot, &s,
                         missing))
        return false;
    cofk_unpack_slot<Elem>(own, sum);
    cofk_unpack_slot<Elem>(s, x);
#pragma unroll
    for (int j = 0; j < 4 * Elem::per_word; j++)
        sum[j] = __fadd_rn(sum[j], x[j]); /* of two the order does not matter */
    return true;
}

/* ---- the second hop ------------------------------------------------------------------------- */

template <class Code>
COFK_INLINE void cofk_store_sum(const struct cofi_arn_kernel &k, uint32_t epoch, int64_t row,
                                uint32_t slot, const struct cofd_slot &s)
{
    for (int i = 1; i < k.call.n_ranks; i++)
        Code::store(cofk_sum_row(k, cofk_peer(k, i), epoch, row), slot, &s, cofk_tag(k, epoch));
}

/* A slot's sums, rounded to the data type, to all other ranks: what stands behind a row's end is 0,
 * as in x. */
template <class Code, class Elem>
COFK_INLINE void cofk_push_sum(const struct cofi_arn_kernel &k, uint32_t epoch, int64_t row,
                               uint32_t slot, const float sum[4 * Elem::per_word])
{
    struct cofd_slot s;
#pragma unroll
    for (int i = 0; i < 4; i++)
        s.word[i] = Elem::pack(sum + i * Elem::per_word);
    cofk_store_sum<Code>(k, epoch, row, slot, s);
}

/* Sums of a row in shared memory, in fp32. */
template <class Code>
COFK_INLINE void cofk_push_exact_sums(const struct cofi_arn_kernel &k, uint32_t epoch,
                                      const float *sums, int64_t row)
{
#pragma unroll 1
    for (uint32_t slot = threadIdx.x; slot < k.sum_slots; slot += blockDim.x) {
        const uint32_t element = Code::offset(slot) / 4, n = Code::n_words(slot);
        struct cofd_slot s = {{0, 0, 0, 0}};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (i < n && element + i < (uint32_t)k.hidden)
                s.word[i] = __float_as_uint(sums[element + i]);
        cofk_store_sum<Code>(k, epoch, row, slot, s);
    }
}

/* ---- whole rows, by all threads, into shared memory: what a thread found of its slots ---- */

/* Sums of a row of which this rank has `x`. */
template <class Code, class Elem, bool has_pair> struct cofk_sum_of_x {
    const char *x;
    int64_t row; /* in the memory of slots */

    COFK_METHOD bool operator()(const struct cofi_arn_kernel &k, uint32_t epoch, float *sums,
                                struct cofk_missing *missing) const
    {
#pragma unroll 1
        for (uint32_t slot = threadIdx.x; slot < k.x_slots; slot += blockDim.x) {
            const struct cofd_slot own = cofk_load_slot<Code, Elem>(k, x, slot);
            float sum[4 * Elem::per_word];
            if (!(has_pair ? cofk_sum_pair<Code, Elem>(k, epoch, own, row, slot, sum, missing)
                           : cofk_sum_slot<Code, Elem>(k, epoch, own, row, slot, sum, missing)))
                return false;
            cofk_keep_slot<Elem, Code>(sums, slot, sum);
        }
        return true;
    }
};

/* The same for the rank that owns the row: the sum of a slot is on its way to all others as soon as
 * it is there, where it takes a slot as x does. After a long wait once more: the same bytes. */
template <class Code, class Elem> struct cofk_sum_of_own {
    int64_t row;

    COFK_METHOD bool operator()(const struct cofi_arn_kernel &k, uint32_t epoch, float *sums,
                                struct cofk_missing *missing) const
    {
        const char *x = k.x + row * k.x_pitch;
#pragma unroll 1
        for (uint32_t slot = threadIdx.x; slot < k.x_slots; slot += blockDim.x) {
            const struct cofd_slot own = cofk_load_slot<Code, Elem>(k, x, slot);
            float sum[4 * Elem::per_word];
            if (!cofk_sum_slot<Code, Elem>(k, epoch, own, row / k.call.n_ranks, slot, sum, missing))
                return false;
            if (!k.is_exact)
                cofk_push_sum<Code, Elem>(k, epoch, row, slot, sum);
            cofk_keep_slot<Elem, Code>(sums, slot, sum);
        }
        return true;
    }
};

/* Sums of a row that its owner made. */
template <class Code, class Elem> struct cofk_sum_of_owner {
    int owner;
    int64_t row;

    COFK_METHOD bool operator()(const struct cofi_arn_kernel &k, uint32_t epoch, float *sums,
                                struct cofk_missing *missing) const
    {
#pragma unroll 1
        for (uint32_t slot = threadIdx.x; slot < k.sum_slots; slot += blockDim.x) {
            struct cofd_slot s;
            float x[4 * Elem::per_word];
            if (!cofk_take<Code>(k, epoch, owner, cofk_sum_row(k, k.call.rank, epoch, row), slot,
                                 &s, missing))
                return false;
            cofk_unpack_slot<Elem>(s, x);
            cofk_keep_slot<Elem, Code>(sums, slot, x);
        }
        return true;
    }
};

/* Between two looks of the block at a row; false on all threads when the arena is dead. */
static __device__ __noinline__ bool cofk_wait_on(struct cofd_grid g, struct cofk_missing *missing,
                                                 int64_t row)
{
    if (threadIdx.x == 0) {
        if (missing->first != missing->last || row != missing->last_row) /* something has come */
            missing->wait.patience = {0, 0, 0};
        missing->last = missing->first;
        missing->last_row = row;
        missing->first = UINT32_MAX;
        missing->wait.writer = (int)(missing->last % COFD_GRID_MAX_RANKS);
        missing->is_alive = cofd_grid_goes_on(&g, &missing->wait);
    }
    __syncthreads();
    const bool is_alive = missing->is_alive;
    __syncthreads();
    return is_alive;
}

#endif
