/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "symm/call_cuda.h"

#include <string.h>

#include "core/faults.h"
#include "device/device_arena.h"
#include "symm/engine_cuda.h"
#include "symm/kernels_cuda.h"
#include "symm/options_cuda.h"

_Static_assert(COFI_ALL_OTHERS == COFD_ALL_OTHERS, "one number for all others");

static unsigned left_out(const cof_arena *a)
{
    return (COFI_FAULT(EPOCH_RESET, a->rank) ? COFD_LEAVE_RESET : 0u) |
           (COFI_FAULT(END_ACK_WAIT, a->rank) ? COFD_LEAVE_END_ACK_WAIT : 0u);
}

void cofi_cuda_call_make(struct cofi_binding *b, const struct cofi_call *call,
                         struct cofd_call *out)
{
    const cof_arena *a = b->arena;
    b->direction = call->direction;
    b->digest = cofi_call_digest(b, call);
    *out = (struct cofd_call){
        .direction = call->direction, .left_out = left_out(a), .digest = b->digest,
        .timeout_ns = cofi_wait_options(a, "").timeout_ns};
    memcpy(out->sizes, call->sizes, sizeof out->sizes);
}

cof_status cofi_cuda_call_begin(struct cofi_binding *b, const struct cofi_call *call, void *stream)
{
    struct cofd_call c;
    COF_TRY(cofi_arena_look(b->arena));
    cofi_cuda_call_make(b, call, &c);
    COFI_LAUNCH(b->arena, stream, cofi_launch_call_begin(b->on_device, &c, stream));
    return COF_OK;
}

cof_status cofi_cuda_call_end(struct cofi_binding *b, void *stream)
{
    if (!b->arena->is_private)
        COFI_LAUNCH(b->arena, stream, cofi_launch_call_end(b->on_device, stream));
    return COF_OK;
}

cof_status cofi_cuda_call_signal(struct cofi_binding *b, int peer, int purpose, void *stream)
{
    COFI_LAUNCH(b->arena, stream, cofi_launch_call_signal(b->on_device, peer, purpose, stream));
    return COF_OK;
}

cof_status cofi_cuda_call_wait_ready(struct cofi_binding *b, int writer, int purpose,
                                     const char *step, void *stream)
{
    const struct cofd_wait_options o = cofi_wait_options(b->arena, step);
    COFI_LAUNCH(b->arena, stream,
                cofi_launch_call_wait_ready(b->on_device, writer, purpose, &o, stream));
    return COF_OK;
}

cof_status cofi_cuda_call_wait_ack(struct cofi_binding *b, int writer, int purpose, int mark,
                                   const char *step, void *stream)
{
    const struct cofd_wait_options o = cofi_wait_options(b->arena, step);
    COFI_LAUNCH(b->arena, stream,
                cofi_launch_call_wait_ack(b->on_device, writer, purpose, mark, &o, stream));
    return COF_OK;
}

cof_status cofi_cuda_call_mark(struct cofi_binding *b, int mark, void *stream)
{
    COFI_LAUNCH(b->arena, stream, cofi_launch_call_mark(b->on_device, mark, stream));
    return COF_OK;
}

cof_status cofi_cuda_max_blocks(const cof_team *team, const void *kernel, int threads,
                                size_t shared_bytes, int max_ctas, int *n_blocks_out)
{
    const struct cofi_cuda_world *w = team->world->device;
    struct cofi_cuda_scope scope;
    int per_sm = 0;
    COF_TRY(cofi_cuda_enter(w->device, &scope));
    cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared_bytes);
    cofi_cuda_leave(&scope);
    COF_CUDA(error);
    COF_FAIL_IF(per_sm < 1, COF_ERR_UNSUPPORTED,
                "device %d cannot hold a block of %d threads and %zu bytes of shared memory",
                w->device, threads, shared_bytes);
    /* Whether a multiprocessor takes a second block depends on what it runs and has run: it divides
     * its memory anew only when it is empty. Of three ranks that fill a device the last ones to
     * begin would then get places one by one, behind those who wait for them. */
    if (w->most_ranks > 1)
        per_sm = 1;
    int n_blocks = per_sm * w->n_sms;
    /* Two plans on two streams, to which ranks come in another order: of two ranks each has some
     * room for what the other one waits for. Of more, one may get what is left, and another one
     * nothing. */
    if (w->most_ranks > 2 && max_ctas == 0)
        n_blocks /= 2;
    *n_blocks_out = cofi_cuda_share(w, n_blocks, max_ctas);
    return COF_OK;
}
