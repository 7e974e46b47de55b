/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return on the CPU: local memory and streams; calls are in grad_return_run.c. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/cpu/vec.h"
#include "ops/grad_return/grad_return.h"
#include "symm/engine.h"
#include "symm/memory.h"
#include "symm/stream.h"

/* Bytes of local memory; sets the pointers when `base` is not NULL. */
static size_t lay_out_local(struct cofi_grad_return_plan *plan, char *base)
{
    size_t used = 0, n = (size_t)plan->n_ranks;
    if (plan->n_ranks == 1)
        return 0;
    for (int is_v = 0; is_v < 2; is_v++)
        plan->home.acc[is_v] = cofi_take(
            base, &used,
            (size_t)(plan->local_rows * plan->home.row_elements[is_v]) * sizeof(float));
    if (plan->transport == &cofi_gr_pull)
        plan->staging = cofi_gr_take_rows(plan, base, &used, plan->local_rows);
    for (int s = 0; s < cofi_grad_slots(plan->n_ranks) && plan->transport == &cofi_gr_push; s++)
        plan->home.outbox[s] = cofi_gr_take_rows(plan, base, &used, plan->max_rows);
    if (plan->transport == &cofi_gr_caller) {
        plan->peers.base[0] = cofi_take(base, &used, n * sizeof(char *));
        plan->peers.base[1] = cofi_take(base, &used, n * sizeof(char *));
        plan->peers.ready = cofi_take(base, &used, n * sizeof(char *));
    }
    return used;
}

static cof_status lay_out(struct cofi_grad_return_plan *plan)
{
    COF_FAIL_IF(plan->params.driver_wait, COF_ERR_UNSUPPORTED,
                "params.driver_wait = 1: wanted 0 on the CPU, where no driver waits");
    plan->has_arena = plan->transport != &cofi_gr_caller;
    plan->n_purposes = plan->has_arena ? COFI_GR_PURPOSES : 0;
    plan->acks = COFI_GR_ACKS;
    plan->tagged_bytes = 0;
    plan->local_bytes = lay_out_local(plan, NULL);
    return COF_OK;
}

static void describe(const struct cofi_grad_return_plan *plan, char *text, size_t bytes)
{
    (void)plan;
    snprintf(text, bytes, "isa=%s", cofi_isa_name(cofi_isa()));
}

static void keep_peers(struct cofi_grad_return_plan *plan)
{
    const cof_grad_return_peers *p = plan->params.peers;
    for (int r = 0; r < plan->n_ranks; r++) {
        plan->peers.base[0][r] = p->dk[r];
        plan->peers.base[1][r] = p->dv[r];
        plan->peers.ready[r] = (char *)p->ready[r];
    }
    plan->peers.ready_stride = cofi_gr_ready_stride(p);
}

static cof_status open_plan(struct cofi_grad_return_plan *plan)
{
    size_t bytes = plan->local_bytes;
    COF_TRY(cofi_memory_check(bytes));
    plan->memory = aligned_alloc(128, bytes ? bytes : 128);
    COF_FAIL_IF(!plan->memory, COF_ERR_NOMEM, "grad_return plan: no memory for %zu bytes", bytes);
    lay_out_local(plan, plan->memory);
    if (plan->transport == &cofi_gr_caller && plan->n_ranks > 1)
        keep_peers(plan);
    if (plan->n_ranks == 1)
        return COF_OK;
    return cofi_world_stream_open(plan->base.team->world, 1, false, "cofuse-comm", &plan->comm);
}

/* C has work where a whole was not made to its end. Its waits know by now. */
static bool close_plan(struct cofi_grad_return_plan *plan)
{
    atomic_store(&plan->is_closing, true);
    cofi_cpu_stream_close(plan->comm);
    return true;
}

static cof_status run(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                      cof_stream stream, bool *is_made)
{
    cof_world *world = plan->base.team->world;
    struct cofi_cpu_stream *s;
    COF_TRY(cofi_stream_begin(world, stream, &s));
    *is_made = true;
    return cofi_stream_end(world, stream, cofi_gr_enqueue(plan, call, s));
}

const struct cofi_gr_backend cofi_gr_cpu = {.name = "cpu", .lay_out = lay_out,
                                            .describe = describe, .open = open_plan,
                                            .close = close_plan, .run = run};
