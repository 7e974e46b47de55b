/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Rows that carry their own signal: in every unit that arrives as a whole lies the tag of the call,
 * its epoch, and in lines the digest of its sizes. A reader that sees the tag has the unit's data,
 * no order between units is needed, and there is neither fence nor flag. A unit is written again
 * only when its reader is known to have left it; tag 0 is none (epoch 0 is never used).
 *
 *   cofd_lines   128-byte lines, 120 bytes of data: stored by one instruction of eight neighbouring
 *                threads, 16 bytes each, and loaded so. No memory model says that such a line
 *                arrives whole; NVLink and the L2 cache of the devices that are asked for it do
 *                (cofuse check runtime, case=litmus)
 *   cofd_wides   16-byte words, 12 bytes of data, single-copy atomic by PTX: everywhere
 *
 * A slot is a thread's 16 bytes of either; a row takes n_slots(bytes), a multiple of 8. */
#ifndef COFI_LINES_H
#define COFI_LINES_H

#include "device/order.h"

#ifdef __CUDACC__
#define COFD_METHOD static __device__ __forceinline__
#define COFD_BOTH static __host__ __device__ __forceinline__
#else
#define COFD_METHOD static inline
#define COFD_BOTH static inline
#endif

/* Data of a slot, as 32-bit words, behind the row's end 0. */
struct cofd_slot {
    uint32_t word[4];
};

/* A slot as it lies in memory; on the host with the last 8 bytes of its line. */
struct cofd_raw_slot {
    uint64_t value[2];
#ifndef __CUDACC__
    uint64_t tag;
#endif
};

struct cofd_lines {
    static const bool is_fast = true; /* worth registers for more blocks */
    static const bool has_digest = true;
    static const uint32_t line_data = 120;
    static const uint32_t offset_unit = 8; /* offsets are multiples of it */

    COFD_BOTH uint32_t n_slots(uint64_t row_bytes)
    {
        return (uint32_t)((row_bytes + line_data - 1) / line_data) * 8;
    }

    /* First byte of the row, and 32-bit words of it. */
    COFD_BOTH uint32_t offset(uint32_t slot)
    {
        return slot / 8 * line_data + slot % 8 * 16;
    }

    COFD_BOTH uint32_t n_words(uint32_t slot)
    {
        return slot % 8 == 7 ? 2 : 4;
    }

    COFD_BOTH bool carries_tag(uint32_t slot)
    {
        return slot % 8 == 7;
    }

    /* All eight threads of a line come here together, and to `has_arrived`. */
    COFD_METHOD void store(char *row, uint32_t slot, const struct cofd_slot *s, uint64_t tag)
    {
        const uint64_t tagged = slot % 8 == 7 ? tag : s->word[2] | (uint64_t)s->word[3] << 32;
        const uint64_t value[2] = {s->word[0] | (uint64_t)s->word[1] << 32, tagged};
        uint64_t *at = (uint64_t *)(void *)(row + (uint64_t)slot * 16);
#ifdef __CUDACC__
        cofd_store2_relaxed_sys(at, value);
#else /* slots are stored in order: the tag comes last */
        cofd_store16_relaxed_sys(at, value);
#endif
    }

    COFD_METHOD struct cofd_raw_slot look(const char *row, uint32_t slot)
    {
        const uint64_t *at = (const uint64_t *)(const void *)(row + (uint64_t)slot * 16);
        struct cofd_raw_slot raw;
#ifndef __CUDACC__
        raw.tag = cofd_load_acquire_sys(at + 2 * (7 - slot % 8) + 1);
#endif
        cofd_load2_relaxed_sys(at, raw.value);
        return raw;
    }

    /* The line's tag on who carries it; else 0, which is none: data may look like a tag. */
    COFD_METHOD uint64_t tag_in(const struct cofd_raw_slot &raw, uint32_t slot, uint64_t)
    {
#ifdef __CUDACC__
        return carries_tag(slot) ? raw.value[1] : 0;
#else
        (void)slot;
        return raw.tag;
#endif
    }

    COFD_METHOD bool has_arrived(const struct cofd_raw_slot &raw, uint32_t slot, uint64_t tag)
    {
#ifdef __CUDACC__
        return cofd_eight_all(!carries_tag(slot) || raw.value[1] == tag);
#else
        return tag_in(raw, slot, tag) == tag;
#endif
    }

    COFD_METHOD struct cofd_slot data(const struct cofd_raw_slot &raw, uint32_t slot)
    {
        struct cofd_slot s = {{(uint32_t)raw.value[0], (uint32_t)(raw.value[0] >> 32), 0, 0}};
        if (!carries_tag(slot)) {
            s.word[2] = (uint32_t)raw.value[1];
            s.word[3] = (uint32_t)(raw.value[1] >> 32);
        }
        return s;
    }
};

struct cofd_wides {
    static const bool is_fast = false;
    static const bool has_digest = false;
    static const uint32_t word_data = 12;
    static const uint32_t offset_unit = 4;

    COFD_BOTH uint32_t n_slots(uint64_t row_bytes)
    {
        return (uint32_t)((row_bytes + word_data - 1) / word_data + 7) / 8 * 8;
    }

    COFD_BOTH uint32_t offset(uint32_t slot)
    {
        return slot * word_data;
    }

    COFD_BOTH uint32_t n_words(uint32_t)
    {
        return 3;
    }

    COFD_BOTH bool carries_tag(uint32_t)
    {
        return true;
    }

    COFD_METHOD void store(char *row, uint32_t slot, const struct cofd_slot *s, uint64_t tag)
    {
        const uint64_t value[2] = {s->word[0] | (uint64_t)s->word[1] << 32,
                                   s->word[2] | tag << 32};
        cofd_store16_relaxed_sys((uint64_t *)(void *)(row + (uint64_t)slot * 16), value);
    }

    COFD_METHOD struct cofd_raw_slot look(const char *row, uint32_t slot)
    {
        struct cofd_raw_slot raw;
        cofd_load16_relaxed_sys((const uint64_t *)(const void *)(row + (uint64_t)slot * 16),
                                raw.value);
        return raw;
    }

    /* It has no digest that could differ. */
    COFD_METHOD uint64_t tag_in(const struct cofd_raw_slot &raw, uint32_t, uint64_t tag)
    {
        return raw.value[1] >> 32 | tag >> 32 << 32;
    }

    COFD_METHOD bool has_arrived(const struct cofd_raw_slot &raw, uint32_t slot, uint64_t tag)
    {
        return tag_in(raw, slot, tag) == tag;
    }

    COFD_METHOD struct cofd_slot data(const struct cofd_raw_slot &raw, uint32_t)
    {
        return {{(uint32_t)raw.value[0], (uint32_t)(raw.value[0] >> 32), (uint32_t)raw.value[1],
                 0}};
    }
};

#endif
