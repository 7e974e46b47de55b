/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The CUDA side of `cofuse check runtime`: memory, kernels that make and compare messages, and the
 * cases of its own. For C and CUDA. */
#ifndef COFI_RUNTIME_CHECK_CUDA_H
#define COFI_RUNTIME_CHECK_CUDA_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "device/device_arena.h"

/* In device memory: numbers the messages of a sequence, and notes what was wrong. */
struct cofi_cuda_tally {
    uint64_t n_calls;  /* begun, in stream order: replays of a graph count on */
    uint64_t n_wrong;  /* bytes */
    uint64_t is_noted; /* the rest is of one wrong byte */
    uint64_t at, bytes, from, idx, epoch;
};

#ifdef __cplusplus
extern "C" {
#endif

/* ---- launches: runtime_check_cuda_kernels.cu; with a dead arena they do nothing ---- */

/* Of the current device, so that no first launch waits behind a kernel that waits. */
cudaError_t cofi_check_cuda_load(void);

/* The next call of the tally's sequence. */
cudaError_t cofi_check_cuda_next(const struct cofd_arena *arena, struct cofi_cuda_tally *tally,
                                 cudaStream_t stream);
/* The message of the tally's call, byte for byte cofi_runtime_fill's. Any alignment. */
cudaError_t cofi_check_cuda_fill(const struct cofd_arena *arena,
                                 const struct cofi_cuda_tally *tally, void *dst, uint64_t bytes,
                                 uint64_t from, uint64_t to, cudaStream_t stream);
/* `binding`: whose epoch is noted; NULL: none. */
cudaError_t cofi_check_cuda_compare(const struct cofd_arena *arena,
                                    const struct cofd_binding *binding,
                                    struct cofi_cuda_tally *tally, const void *src, uint64_t bytes,
                                    uint64_t from, uint64_t to, cudaStream_t stream);
/* All threads of all SMs, for so long. */
cudaError_t cofi_check_cuda_busy(int n_sms, uint64_t ns, cudaStream_t stream);

/* Tagged words between all pairs, COFI_TAGGED_LANES of 16 bytes each, in rounds 1 .. n_rounds that
 * are their own tags. Within a call of the binding, whose epoch is not used. `offset`: in the
 * slabs, of cofi_tagged_bytes() bytes that are zero. */
#define COFI_TAGGED_LANES 64
static inline uint64_t cofi_tagged_bytes(int n_ranks)
{
    return (uint64_t)2 * COFI_TAGGED_LANES * 16 * (uint64_t)n_ranks;
}
cudaError_t cofi_check_cuda_tagged(const struct cofd_binding *binding,
                                   struct cofi_cuda_tally *tally, uint64_t offset,
                                   uint32_t n_rounds, uint64_t timeout_ns, cudaStream_t stream);

/* ---- units that arrive whole: runtime_check_litmus_kernels.cu ---- */

struct cofi_litmus_counts {
    uint64_t n_looks, n_changes, n_torn; /* looks: since the looking thread's first change */
    uint64_t is_noted;                   /* the rest is of one torn unit */
    uint64_t slot, tag, word;
};

/* `n_slots` of 16 bytes, a multiple of 32; zero at the beginning. */
struct cofi_litmus {
    uint64_t *out; /* of the rank that looks at it */
    const uint64_t *in;
    uint32_t n_slots;
    uint64_t ns, n_looks; /* of the kernel; of a thread, at most */
    struct cofi_litmus_counts *counts;
};

/* Of 128 bytes; of 16; of 16, stored half by half. */
enum cofi_litmus_unit { COFI_LITMUS_LINE, COFI_LITMUS_WORD, COFI_LITMUS_HALVES };

/* All blocks run at once. */
const void *cofi_check_cuda_litmus_kernel(enum cofi_litmus_unit unit, int *n_threads_out);
cudaError_t cofi_check_cuda_litmus(const struct cofi_litmus *litmus, enum cofi_litmus_unit unit,
                                   int n_blocks, cudaStream_t stream);

#ifdef __cplusplus
}
#else

#include "ops/runtime/runtime_check.h"

/* ---- runtime_check_cuda.c ---- */

/* Device memory of the world's device, zeroed. Neither waits for other streams. */
cof_status cofi_check_cuda_alloc(cof_world *world, size_t bytes, void **data_out);
void cofi_check_cuda_free(cof_world *world, void *data); /* NULL is fine */

/* The CUDA stream behind one of the library's. */
cudaStream_t cofi_check_cuda_stream(const cof_world *world, cof_stream stream);

/* ---- src/ops/check_graph_cuda.c: slots of struct cofi_check_device ---- */

cof_status cofi_check_cuda_capture(cof_world *world, const struct cofi_check_work *work,
                                   cof_stream stream, void **graph_out);
cof_status cofi_check_cuda_replay(cof_world *world, void *graph, cof_stream stream);
void cofi_check_cuda_release(cof_world *world, void *graph);
cof_status cofi_check_cuda_timer_open(cof_world *world, void **timer_out);
void cofi_check_cuda_timer_close(cof_world *world, void *timer);
cof_status cofi_check_cuda_time(cof_world *world, void *timer, const struct cofi_check_work *work,
                                cof_stream stream, double *seconds_out);

/* ---- runtime_check_blocks_cuda.c ---- */

cof_status cofi_check_cuda_blocks_open(cof_team *team, size_t bytes,
                                       struct cofi_check_blocks *blocks);
void cofi_check_cuda_blocks_close(struct cofi_check_blocks *blocks);

/* ---- runtime_check_op_cuda.c ---- */

cof_status cofi_runtime_cuda_op_open(struct cofi_runtime_op *op);
cof_status cofi_runtime_cuda_op_call(cof_world *world, struct cofi_runtime_op *op,
                                     const struct cofi_runtime_call *call, cof_stream stream);
void cofi_runtime_cuda_op_inspect(struct cofi_runtime_op *op);
void cofi_runtime_cuda_op_close(struct cofi_runtime_op *op);

/* ---- messages of put, get, signal and wait over device memory: runtime_check_mail_cuda.c ---- */

struct cofi_mail {
    struct cofi_runtime *rt;
    cof_world *world;
    struct cofi_check_arena a;
    size_t bytes, stride;
    char *src, *dst; /* device memory; COFI_MAIL_GUARD bytes longer than a message */
    struct cofi_cuda_tally *tally;
    cof_stream stream;
    uint64_t n_rounds; /* made, by whatever way */
};

enum { COFI_MAIL_GUARD = 64 };

/* Collective over the world's team. */
cof_status cofi_mail_open(struct cofi_runtime *rt, cof_world *world, size_t bytes,
                          struct cofi_mail *mail);
/* Local; mail that was not opened, or not wholly, is fine. */
void cofi_mail_close(struct cofi_mail *mail);

/* One message from every rank to every other one, by put and by get. Capturable: a replay is a
 * round like any other. */
cof_status cofi_mail_round(struct cofi_mail *mail, cof_stream stream);
/* Its parts. */
cof_status cofi_mail_await_free(struct cofi_mail *mail, cof_stream stream);
cof_status cofi_mail_put(struct cofi_mail *mail, cof_stream stream);
cof_status cofi_mail_announce(struct cofi_mail *mail, cof_stream stream);
cof_status cofi_mail_await(struct cofi_mail *mail, cof_stream stream);
cof_status cofi_mail_read(struct cofi_mail *mail, cof_stream stream);
cof_status cofi_mail_free(struct cofi_mail *mail, cof_stream stream);

/* Waits for the stream, and fails the case where a message was wrong or is missing. */
cof_status cofi_mail_inspect(struct cofi_mail *mail);

/* ---- cases ---- */

cof_status cofi_runtime_cuda_put_get(struct cofi_runtime *rt);         /* arg: bytes */
cof_status cofi_runtime_cuda_message_passing(struct cofi_runtime *rt); /* arg: bytes */
cof_status cofi_runtime_cuda_streams(struct cofi_runtime *rt);
cof_status cofi_runtime_cuda_busy(struct cofi_runtime *rt);
cof_status cofi_runtime_cuda_tagged(struct cofi_runtime *rt);
cof_status cofi_runtime_cuda_litmus(struct cofi_runtime *rt); /* arg: number << 2 | unit */
cof_status cofi_runtime_cuda_graph(struct cofi_runtime *rt);
cof_status cofi_runtime_cuda_graph_calls(struct cofi_runtime *rt);
cof_status cofi_runtime_cuda_graph_poison(struct cofi_runtime *rt);

#endif
#endif
