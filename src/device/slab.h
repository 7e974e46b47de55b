/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What a rank's slab holds beside data, read and written by hosts and devices alike: signal words,
 * and the control block with the record of the call in progress, poison, and the fault that a
 * device found. C11, C++ and CUDA; the members are atomic where C says so, and are touched through
 * order.h elsewhere. */
#ifndef COFI_SLAB_H
#define COFI_SLAB_H

#include <stdint.h>

#ifdef __cplusplus
#define COFD_ATOMIC(type) type
#define COFD_ALIGNAS(n) alignas(n)
#else
#include <stdatomic.h>
#define COFD_ATOMIC(type) _Atomic(type)
#define COFD_ALIGNAS(n) _Alignas(n)
#endif

#define COFI_LINE 128
#define COFI_NAME_WORDS 2  /* of an operator's name, 8 bytes each, zero-padded */
#define COFI_STEP_WORDS 5  /* of the text that names a wait, likewise */
#define COFI_CALL_SIZES 4  /* free per run */
#define COFI_CONTROL_TEXT_BYTES 512

/* A signal word on its own line. */
struct cofi_line {
    COFD_ALIGNAS(COFI_LINE) COFD_ATOMIC(uint64_t) value;
    COFD_ATOMIC(uint32_t) sleepers; /* of hosts, on a futex */
};

/* What a rank is doing, for checks and error texts of others: stored before a call's first signal.
 * The reader looks at `call` before and after the rest. */
struct cofi_call_record {
    COFD_ATOMIC(uint64_t) call;   /* epoch | plan ordinal << 32; 0: none, or being written */
    COFD_ATOMIC(uint64_t) detail; /* direction | digest << 32 */
    COFD_ATOMIC(uint64_t) name[COFI_NAME_WORDS]; /* of the operator */
    COFD_ATOMIC(uint64_t) sizes[COFI_CALL_SIZES];
};

/* The wait that ended an arena, as the rank's device saw it: the host makes the text. Written once,
 * before the poison that tells of it. */
struct cofi_fault {
    COFD_ATOMIC(uint64_t) status; /* low 16 bits: cof_status; 0: none */
    COFD_ATOMIC(uint64_t) kind;   /* enum cofi_wait_kind */
    COFD_ATOMIC(uint64_t) writer; /* rank of the team that was waited for */
    COFD_ATOMIC(uint64_t) want, seen;
    COFD_ATOMIC(uint64_t) timeout_ns; /* 0: none */
    COFD_ATOMIC(uint64_t) digest, direction; /* of the call; no call (name is zero): 0 */
    COFD_ATOMIC(uint64_t) name[COFI_NAME_WORDS];
    COFD_ATOMIC(uint64_t) step[COFI_STEP_WORDS];
};

/* Poison word: status (16) | COFI_POISON_FAULT | rank that wrote it + 1 (32, high). */
#define COFI_POISON_FAULT UINT64_C(0x10000) /* a device found it: `fault` is written, not `text` */

struct cofi_control {
    struct cofi_line poison;
    COFD_ALIGNAS(COFI_LINE) struct cofi_call_record record;
    COFD_ALIGNAS(COFI_LINE) struct cofi_fault fault;
    COFD_ALIGNAS(COFI_LINE) COFD_ATOMIC(uint64_t) cookie; /* of cof_arena_attach */
    COFD_ALIGNAS(COFI_LINE) char text[COFI_CONTROL_TEXT_BYTES]; /* of this rank's own failure */
};

/* Words of the arena itself, per writer. */
enum { COFI_MEET, COFI_RESET, COFI_END_ACK, COFI_ARENA_PURPOSES };

enum cofi_wait_kind {
    COFI_READY, /* the word's epoch equals the wanted one; then digest and poison are looked at */
    COFI_ACK,   /* its epoch is at least the wanted one, wrap-safe; the digest is not looked at */
    COFI_COUNT  /* the word is at least the wanted count */
};

/* Epochs and digests in a word. */
#define COFI_EPOCH_RESET_MASK UINT32_C(0x3fffffff)
#define COFI_DIGEST_MASK UINT32_C(0x7fffffff)
#define COFI_MARKS 4

#endif
