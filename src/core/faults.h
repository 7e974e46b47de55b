/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Negative controls. A build with COFI_FAULTS=1 can leave out one protocol step, named with a rank
 * in the variable COFUSE_FAULT ("KV_ACK" on all ranks, "KV_ACK:1" on rank 1, several with commas),
 * and a test must then fail. A step that delays is no fault alone: it lets another one be seen. In
 * every other build COFI_FAULT is the constant false and leaves nothing behind. */
#ifndef COFI_FAULTS_H
#define COFI_FAULTS_H

#include <stdbool.h>

/* X(step, what is left out) */
#define COFI_FAULT_STEPS(X)                                                                        \
    X(KV_ACK_WAIT, "owner overwrites published keys without waiting for their readers")            \
    X(KV_READY_WAIT, "reader fetches keys without waiting until they are published")               \
    X(KV_ACK, "reader never tells the owner that it is done")                                      \
    X(STAGING_WAIT, "a staging buffer is refilled without waiting for the section that reads it")  \
    X(ARRIVAL_WAIT, "a section starts without waiting for the fetch of its keys")                  \
    X(COMM_LATE, "none: what the second stream of a call on a device transfers begins late")       \
    X(GRAD_ACK_WAIT, "writer stores into a receive slot without waiting until it is free")         \
    X(GRAD_READY_WAIT, "owner sums a receive slot without waiting for its writer")                 \
    X(GRAD_SKIP_LAST, "owner leaves the last writer out of the sum")                               \
    X(PULL_ACK_WAIT, "writer overwrites its published partial without waiting for its reader")     \
    X(PULL_READY_WAIT, "owner reads a partial without waiting until it is published")              \
    X(ARN_READY_WAIT, "a rank reduces rows without waiting until they are published")              \
    X(ARN_SUM_WAIT, "a rank takes sums of a share without waiting for the rank that makes them")   \
    X(ARN_ACK_WAIT, "a call on rows in the arena ends without waiting for their readers")          \
    X(ARN_HALF, "rows are always published in the same half of the buffer")                        \
    X(TRI_AB_WAIT, "a chunk is contracted without waiting until its features are projected")       \
    X(TRI_TRI_WAIT, "a rank reads triangles without waiting until they are summed")                \
    X(TRI_DTRI_WAIT, "gradients of triangles are read without waiting for the ranks that send")    \
    X(TRI_DAB_WAIT, "gradients of features are read without waiting for their owners")             \
    X(TRI_PARTS_WAIT, "gradients of weights are summed without waiting for the other ranks")       \
    X(TRI_SUMS_WAIT, "sums of weights' gradients are read without waiting for them")               \
    X(TRI_HASH_WAIT, "hashes of weights are compared without waiting for them")                    \
    X(DIGEST, "a word of another call is taken for one of this call")                             \
    X(COOKIE, "attached blocks are not looked at")                                                 \
    X(EPOCH_RESET, "words are not reset where the epoch comes round")                              \
    X(END_ACK_WAIT, "a plan starts without waiting for the end of another plan's call")            \
    X(ARENA_NOMEM, "symmetric memory is refused on this rank")                                     \
    X(POISON, "a failing rank does not tell the others")

#ifdef COFI_FAULTS
bool cofi_fault_is_on(const char *step, int rank);
#define COFI_FAULT(step, rank) cofi_fault_is_on(#step, rank)
#else
#define COFI_FAULT(step, rank) ((void)(rank), false)
#endif

#endif
