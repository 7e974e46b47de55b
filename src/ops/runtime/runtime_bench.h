/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench runtime`: transfers, signals and launches. A case is one operation, made `count`
 * times in a call; the time that is told is that of one. */
#ifndef COFI_RUNTIME_BENCH_H
#define COFI_RUNTIME_BENCH_H

#include "ops/bench.h"

enum cofi_rb_form {
    COFI_RB_PUT,    /* bytes to the next rank */
    COFI_RB_GET,    /* bytes from the next rank */
    COFI_RB_ROUND,  /* a signal there and one back, by pairs of ranks: 0 and 1, 2 and 3, .. */
    COFI_RB_SIGNAL, /* a signal that nobody waits for */
    COFI_RB_EMPTY   /* a kernel that does nothing */
};
enum cofi_rb_by {
    COFI_RB_CALL,   /* cof_put, cof_get, cof_signal, cof_wait */
    COFI_RB_ENGINE, /* a copy engine: cudaMemcpyAsync on the peer's memory */
    COFI_RB_KERNEL, /* the SMs: cof_put's kernel, of `blocks` blocks; of rounds, one for all */
    COFI_RB_STREAM  /* cuStreamWriteValue64, cuStreamWaitValue64 */
};
enum cofi_rb_ways { COFI_RB_BOTH, COFI_RB_ONE }; /* all ranks send at once; rank 0 alone */
enum cofi_rb_how { COFI_RB_EAGER, COFI_RB_GRAPH };

struct cofi_rb_case {
    int form, by, ways, how;
    int64_t bytes, blocks, count, busy;
};

struct cofi_rb {
    struct cofi_job job;
    struct cofi_rb_case c;
    int peer;        /* the rank that this one sends to, or is paired with; -1: it has no part */
    int n_slots;     /* places in buffers that transfers take in turn */
    cof_arena *arena;
    char *local;     /* n_slots * bytes, this rank's */
    cof_stream stream;
    void *cuda;      /* of runtime_bench_cuda.c */
};

/* Directions. */
enum { COFI_RB_RUN, COFI_RB_ENQUEUE };

/* One of the case's operations with the public calls; `idx` chooses the slot. */
cof_status cofi_rb_call(struct cofi_rb *b, int64_t idx);

#endif
