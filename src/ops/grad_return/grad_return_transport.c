/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The three ways of a partial to its owner.
 *
 * Push: grad_return_exchange.h has the protocol.
 *
 * Pull (w -> o: stored by w in o's slab)
 *   ready  writer -> owner   the writer's rows for this owner, if any, lie in its own `published`
 *   ack    owner -> writer   they have been read: the writer overwrites them in its next call only
 *                            after that. Every owner acks in every call, contributor or not.
 *
 * Caller's memory: a slot per writer and one 32-bit epoch word per writer in every owner's memory,
 * nothing else. The writer stores its rows and then the epoch (release); the owner waits until the
 * word is at least the epoch (acquire), by signed difference. Nobody says when a slot is free: the
 * caller orders that. */
#include <string.h>

#include "backend/cpu/vec.h"
#include "core/faults.h"
#include "core/wait.h"
#include "ops/grad_return/grad_return.h"
#include "symm/symm.h"

/* ---- push ----------------------------------------------------------------------------------- */

static cof_status push_open(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                            int64_t begin, void *to[2])
{
    (void)epoch;
    return cofi_grad_open(&plan->home, step, begin, to);
}

static cof_status push_close(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                             int64_t begin, int64_t end, void *const to[2])
{
    (void)epoch;
    cofi_grad_close(&plan->home, step, begin, end, to);
    return COF_OK;
}

static cof_status push_sum(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                           int64_t begin, int64_t end)
{
    (void)epoch;
    return cofi_grad_sum(&plan->home, step, begin, end, true);
}

const struct cofi_gr_transport cofi_gr_push = {"push", push_open, push_close, push_sum};

/* ---- pull ----------------------------------------------------------------------------------- */

static size_t published_at(const struct cofi_grad_return_plan *plan, int is_v, int owner,
                           int64_t row)
{
    return cofi_kv_at(&plan->published, is_v, owner * plan->max_rows + row);
}

static cof_status pull_open(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                            int64_t begin, void *to[2])
{
    (void)epoch;
    int owner = cofi_grad_owner(&plan->home, step);
    if (!COFI_FAULT(PULL_ACK_WAIT, plan->rank))
        COF_TRY(cofi_call_wait_ack(&plan->binding, owner, COFI_GR_ACK,
                                   plan->binding.mark[COFI_GR_PREV_MARK], "last partial read"));
    for (int is_v = 0; is_v < 2; is_v++)
        to[is_v] =
            cofi_arena_data(plan->binding.arena) + published_at(plan, is_v, owner, begin);
    return COF_OK;
}

static cof_status pull_close(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                             int64_t begin, int64_t end, void *const to[2])
{
    (void)epoch, (void)begin, (void)end, (void)to;
    cofi_call_signal(&plan->binding, cofi_grad_owner(&plan->home, step), COFI_GR_READY);
    return COF_OK;
}

static cof_status pull_sum(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                           int64_t begin, int64_t end)
{
    (void)epoch;
    int writer = cofi_grad_writer(&plan->home, step);
    const struct cofi_kv_buffer *to = &plan->staging;
    if (step == 1)
        cofi_grad_clear(&plan->home);
    if (!COFI_FAULT(PULL_READY_WAIT, plan->rank))
        COF_TRY(
            cofi_call_wait_ready(&plan->binding, writer, COFI_GR_READY, "partial published"));
    if (begin < end) {
        for (int is_v = 0; is_v < 2; is_v++) {
            int64_t n = (end - begin) * to->row_elements[is_v];
            cofi_arena_get(plan->binding.arena, to->local + to->offset[is_v], writer,
                           published_at(plan, is_v, plan->rank, begin),
                           cofi_kv_bytes(to, is_v, end - begin));
            cofi_vec_add(cofi_vec(), to->elem,
                         plan->home.acc[is_v] + begin * to->row_elements[is_v],
                         to->local + to->offset[is_v], n);
        }
    }
    cofi_call_signal(&plan->binding, writer, COFI_GR_ACK);
    return COF_OK;
}

const struct cofi_gr_transport cofi_gr_pull = {"pull", pull_open, pull_close, pull_sum};

/* ---- the caller's memory -------------------------------------------------------------------- */

static char *slot_of(const struct cofi_grad_return_plan *plan, int owner, int writer, int is_v,
                     int64_t row)
{
    int64_t row_elements = plan->params.n_batch * plan->params.n_heads * plan->dim[is_v];
    return plan->peers.base[is_v][owner] +
           (size_t)((writer * plan->local_rows + row) * row_elements) *
               (size_t)cofi_elem_bytes(plan->wire);
}

static _Atomic uint32_t *epoch_word(const struct cofi_grad_return_plan *plan, int owner, int writer)
{
    return (_Atomic uint32_t *)(void *)(plan->peers.ready[owner] +
                                        (size_t)writer * plan->peers.ready_stride);
}

static cof_status caller_open(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                              int64_t begin, void *to[2])
{
    (void)epoch;
    for (int is_v = 0; is_v < 2; is_v++)
        to[is_v] = slot_of(plan, cofi_grad_owner(&plan->home, step), plan->rank, is_v, begin);
    return COF_OK;
}

static cof_status caller_close(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                               int64_t begin, int64_t end, void *const to[2])
{
    (void)to;
    if (begin == end) /* its owner does not wait */
        return COF_OK;
    _Atomic uint32_t *word = epoch_word(plan, cofi_grad_owner(&plan->home, step), plan->rank);
    static _Atomic uint32_t unknown = 1; /* whether its owner sleeps is not told */
    atomic_store_explicit(word, epoch, memory_order_seq_cst);
    cofi_wake(word, &unknown, true);
    return COF_OK;
}

struct epoch_wait {
    struct cofi_grad_return_plan *plan;
    _Atomic uint32_t *word;
    uint32_t want;
    int writer; /* rank of the world */
};

static bool epoch_there(void *ctx)
{
    const struct epoch_wait *w = ctx;
    return (int32_t)(atomic_load_explicit(w->word, memory_order_seq_cst) - w->want) >= 0;
}

static cof_status epoch_poll(void *ctx)
{
    const struct epoch_wait *w = ctx;
    cof_world *world = w->plan->base.team->world;
    COF_FAIL_IF(atomic_load(&w->plan->is_closing), COF_ERR_POISONED,
                "grad_return: plan destroyed in the middle of a whole");
    cofi_world_poll(world);
    COF_FAIL_IF(atomic_load(&world->state[w->writer]) == COFI_PEER_LEFT, COF_ERR_PEER_DEAD,
                "grad_return: rank %d waited for rank %d at \"gradient returned\": that rank is "
                "gone; wanted epoch %u, saw %u",
                world->rank, w->writer, w->want, atomic_load(w->word));
    return cofi_team_status(w->plan->base.team);
}

static cof_status caller_sum(struct cofi_grad_return_plan *plan, uint32_t epoch, int step,
                             int64_t begin, int64_t end)
{
    int writer = cofi_grad_writer(&plan->home, step);
    cof_world *world = plan->base.team->world;
    struct epoch_wait w = {plan, epoch_word(plan, plan->rank, writer), epoch,
                           plan->base.team->world_rank[writer]};
    _Atomic uint32_t sleepers = 0;
    if (step == 1)
        cofi_grad_clear(&plan->home);
    if (begin == end)
        return COF_OK;
    cof_status status = cofi_wait(&(struct cofi_wait){
        .ready = epoch_there, .poll = epoch_poll, .ctx = &w, .word = w.word, .sleepers = &sleepers,
        .deadline = cofi_deadline(world->run_timeout), .max_sleep = COFI_SLEEP_NS,
        .spin = world->own_cores, .shared = true});
    COF_FAIL_IF(status == COF_ERR_TIMEOUT, status,
                "grad_return: rank %d waited for rank %d at \"gradient returned\": deadline passed "
                "(waited %g s at most); wanted epoch %u, saw %u",
                world->rank, w.writer, world->run_timeout, epoch, atomic_load(w.word));
    COF_TRY(status);
    for (int is_v = 0; is_v < 2; is_v++) {
        int64_t row_elements = plan->params.n_batch * plan->params.n_heads * plan->dim[is_v];
        cofi_vec_add(cofi_vec(), plan->wire, plan->home.acc[is_v] + begin * row_elements,
                     slot_of(plan, plan->rank, writer, is_v, begin), (end - begin) * row_elements);
    }
    return COF_OK;
}

const struct cofi_gr_transport cofi_gr_caller = {"caller", caller_open, caller_close, caller_sum};
