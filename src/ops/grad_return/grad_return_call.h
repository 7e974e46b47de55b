/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A launch of grad_return, as host and kernels see it. grad_return_lane.cuh has the protocol. C,
 * C++ and CUDA. */
#ifndef COFI_GRAD_RETURN_CALL_H
#define COFI_GRAD_RETURN_CALL_H

#include "device/device_arena.h"
#include "ops/grad_return/grad_return_grains.h"

#define COFD_GR_WORD 32 /* bytes: a sector of the L2 cache */
#define COFD_GR_MARK 0  /* epoch of the plan's last call, for its next one */

/* What a launch does of a call; a kernel that makes the whole call has all of it. */
enum {
    COFD_GR_BEGIN = 1,        /* takes the epoch, and ends the call */
    COFD_GR_WAIT_FREE = 2,    /* acks, before the first piece of a step is stored */
    COFD_GR_STORE = 4,
    COFD_GR_READY = 8,        /* signals of pieces */
    COFD_GR_WAIT_READY = 16,
    COFD_GR_ADD = 32,
    COFD_GR_ACK = 64,
    COFD_GR_FINISH = 128,     /* own rows, rounding, outputs: with the last sum */
    COFD_GR_PULL = 256,
    COFD_GR_LEAVE_LAST = 512, /* negative control: the last writer is left out */
    COFD_GR_APART = 1024,     /* a lane is two blocks: one stores, n_lanes further one sums */
    COFD_GR_OF_STORING = COFD_GR_BEGIN | COFD_GR_WAIT_FREE | COFD_GR_STORE | COFD_GR_READY |
                         COFD_GR_PULL,
    COFD_GR_OF_SUMMING = COFD_GR_BEGIN | COFD_GR_WAIT_READY | COFD_GR_ADD | COFD_GR_ACK |
                         COFD_GR_FINISH | COFD_GR_PULL | COFD_GR_LEAVE_LAST,
    COFD_GR_WHOLE = COFD_GR_BEGIN | COFD_GR_WAIT_FREE | COFD_GR_STORE | COFD_GR_READY |
                    COFD_GR_WAIT_READY | COFD_GR_ADD | COFD_GR_ACK | COFD_GR_FINISH
};

struct cofd_gr_call {
    struct cofd_grid_call grid; /* announces nothing: ready words tell of every rank */
    struct cofi_gr_cut cut;
    uint64_t ready, ack; /* of the words, in the slabs */
    uint32_t parts;
    int32_t first_push, last_push, first_sum, last_sum; /* steps; none: last < first */
    struct cofd_wait_options is_free, is_ready; /* of waits for acks and ready words */
};

/* Bytes of the words. */
COFI_GR_FN uint64_t cofd_gr_ready_bytes(const struct cofi_gr_cut *cut, int n_ranks)
{
    return (uint64_t)cut->n_lanes * cut->n_pieces * (uint64_t)n_ranks * COFD_GR_WORD;
}

COFI_GR_FN uint64_t cofd_gr_ack_bytes(const struct cofi_gr_cut *cut, int n_ranks)
{
    return (uint64_t)cut->n_lanes * (uint64_t)n_ranks * COFD_GR_WORD;
}

#endif
