/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The way home of gradients on devices: the protocol of grad_return_exchange.h, in every lane by
 * itself. A lane is a block or two on each rank, and its pieces of all rows (grad_return_grains.h);
 * lanes share nothing but the beginning and the end of a call. C++ and CUDA.
 *
 * Words (w -> o: stored by w in o's slab, in the plan's tagged data: zero at first and after a
 * reset; a 32-byte sector each)
 *   ready [lane][piece][writer]   writer -> owner   the piece lies in the owner's slot
 *                                 (step-1) mod 2; by pull in the writer's own memory. Equal to the
 *                                 call's epoch, and with its digest. Every writer sends all of them
 *                                 in every call, with rows or without
 *   ack [lane][owner]             owner -> writer   the lane's part of the slot (pull: of the
 *                                 partial) is free. Each call sends it once to every rank: by push
 *                                 to the writer of step i+2 when step i is summed, and at a slot's
 *                                 last use to the writer of its first use; by pull to the writer
 *                                 that was read
 *
 *   rank w, step i                               rank o = w - i
 *   steps 1, 2 (pull: all): ack of the last call
 *   later steps: ack of this call <-----------   step i-2 summed: ack
 *   stores a piece; ready          ----------->  waits for ready; adds the piece
 *
 * Item n of a call is piece n mod n_pieces of step 1 + n / n_pieces. In a whole call a lane is two
 * blocks on each rank: one stores items, the other sums them (COFD_GR_APART); they share nothing,
 * and the one's release of what it stored, some microseconds on a busy link, holds up no sum. A
 * block that has both parts stores item n+1 and sums item n in one loop. The sum of an item waits
 * for its store, and a store for sums with lower numbers; every block goes through the items in the
 * same order: no cycle where all blocks run at once. */
#ifndef COFI_GRAD_RETURN_LANE_CUH
#define COFI_GRAD_RETURN_LANE_CUH

#include "device/grid_call.h"
#include "ops/grad_return/grad_return_call.h"

/* ---- words ---------------------------------------------------------------------------------- */

COFD_FN uint64_t *cofd_gr_ready(const struct cofd_gr_call *c, int rank, uint32_t lane,
                                uint32_t piece, int writer)
{
    const uint64_t i =
        ((uint64_t)lane * c->cut.n_pieces + piece) * (uint64_t)c->grid.n_ranks + (uint64_t)writer;
    return (uint64_t *)(void *)(c->grid.slab[rank] + c->ready + i * COFD_GR_WORD);
}

COFD_FN uint64_t *cofd_gr_ack(const struct cofd_gr_call *c, int rank, uint32_t lane, int owner)
{
    const uint64_t i = (uint64_t)lane * (uint64_t)c->grid.n_ranks + (uint64_t)owner;
    return (uint64_t *)(void *)(c->grid.slab[rank] + c->ack + i * COFD_GR_WORD);
}

COFD_FN int cofd_gr_owner(const struct cofd_gr_call *c, int step)
{
    return (c->grid.rank - step + c->grid.n_ranks) % c->grid.n_ranks;
}

COFD_FN int cofd_gr_writer(const struct cofd_gr_call *c, int step)
{
    return (c->grid.rank + step) % c->grid.n_ranks;
}

/* A word that is 0 was never stored since the last reset: no ack, wherever epochs are. */
COFD_FN bool cofd_gr_is_there(enum cofi_wait_kind kind, uint64_t value, uint32_t want)
{
    return cofd_is_there(kind, value, want) && (kind == COFI_READY || value != 0);
}

/* One thread. As cofd_wait; the record of the call is written once a wait lasts. */
COFD_FN bool cofd_gr_wait(const struct cofd_grid *g, int writer, enum cofi_wait_kind kind,
                          const uint64_t *word, uint32_t want,
                          const struct cofd_wait_options *options)
{
    uint64_t value = cofd_load_acquire_sys(word);
    if (!cofd_gr_is_there(kind, value, want)) {
        const struct cofd_binding b = cofd_grid_binding(g);
        const struct cofd_wait w = {g->c->arena, &b, writer, kind, word, want, options};
        struct cofd_patience patience = {0, 0, 0};
        do {
            if (patience.looks == COFD_LOOKS)
                cofd_grid_record(*g);
            if (!cofd_wait_goes_on(&w, &patience, value))
                return false;
            value = cofd_load_acquire_sys(word);
        } while (!cofd_gr_is_there(kind, value, want));
    }
    if (kind != COFI_READY || (value >> 32 & COFI_DIGEST_MASK) == g->c->call.digest)
        return true;
    const struct cofd_binding b = cofd_grid_binding(g);
    const struct cofd_wait w = {g->c->arena, &b, writer, kind, word, want, options};
    cofd_fail(&w, COFD_ERR_MISMATCH, value);
    return false;
}

/* ---- a lane --------------------------------------------------------------------------------- */

struct cofd_gr_item {
    int32_t step; /* 0: none */
    uint32_t piece;
};

COFD_FN struct cofd_gr_item cofd_gr_item(const struct cofd_gr_call *c, int32_t first, int64_t n,
                                         int64_t n_items)
{
    struct cofd_gr_item item = {0, 0};
    if (n >= 0 && n < n_items) {
        item.step = first + (int32_t)((uint32_t)n / c->cut.n_pieces);
        item.piece = (uint32_t)n % c->cut.n_pieces;
    }
    return item;
}

/* The block's. */
COFD_FN uint32_t cofd_gr_lane(const struct cofd_gr_call *c)
{
    return cofd_block() < c->cut.n_lanes ? cofd_block() : cofd_block() - c->cut.n_lanes;
}

COFD_FN uint32_t cofd_gr_parts(const struct cofd_gr_call *c)
{
    if (!(c->parts & COFD_GR_APART))
        return c->parts;
    return c->parts & (cofd_block() < c->cut.n_lanes ? COFD_GR_OF_STORING : COFD_GR_OF_SUMMING);
}

/* Epoch of the ack that a store has to wait for, 0: none. `last`: of the plan's call before, 0:
 * none. */
COFD_FN uint32_t cofd_gr_wanted_ack(const struct cofd_gr_call *c, const struct cofd_grid *g,
                                    struct cofd_gr_item push, uint32_t last)
{
    const bool is_early = (cofd_gr_parts(c) & COFD_GR_PULL) || push.step <= 2;
    if (!(cofd_gr_parts(c) & COFD_GR_WAIT_FREE) || push.step == 0 || push.piece != 0)
        return 0;
    return is_early ? last : g->epoch;
}

/* Whether a sum has to wait for its piece: the last step has no writer. */
COFD_FN bool cofd_gr_wants_piece(const struct cofd_gr_call *c, struct cofd_gr_item sum)
{
    return (cofd_gr_parts(c) & COFD_GR_WAIT_READY) && sum.step != 0 && sum.step < c->grid.n_ranks;
}

/* One thread. */
COFD_FN bool cofd_gr_wait_free(const struct cofd_gr_call *c, const struct cofd_grid *g,
                               uint32_t lane, struct cofd_gr_item push, uint32_t want)
{
    const int owner = cofd_gr_owner(c, push.step);
    return cofd_gr_wait(g, owner, COFI_ACK, cofd_gr_ack(c, c->grid.rank, lane, owner), want,
                        &c->is_free);
}

COFD_FN bool cofd_gr_wait_ready(const struct cofd_gr_call *c, const struct cofd_grid *g,
                                uint32_t lane, struct cofd_gr_item sum)
{
    const int writer = cofd_gr_writer(c, sum.step);
    return cofd_gr_wait(g, writer, COFI_READY,
                        cofd_gr_ready(c, c->grid.rank, lane, sum.piece, writer), g->epoch,
                        &c->is_ready);
}

/* The next user of the step's slot: two steps on, or the first user in the next call. */
COFD_FN int32_t cofd_gr_freed_for(const struct cofd_gr_call *c, int32_t step)
{
    if (cofd_gr_parts(c) & COFD_GR_PULL)
        return step;
    return step + 2 <= c->grid.n_ranks - 1 ? step + 2 : (step - 1) % 2 + 1;
}

/* One thread, after a barrier of the block. */
COFD_FN void cofd_gr_signal(const struct cofd_gr_call *c, const struct cofd_grid *g, uint32_t lane,
                            struct cofd_gr_item push, struct cofd_gr_item sum)
{
    if ((cofd_gr_parts(c) & COFD_GR_READY) && push.step != 0)
        cofd_store_release_sys(cofd_gr_ready(c, cofd_gr_owner(c, push.step), lane, push.piece,
                                             c->grid.rank), cofd_grid_tag(g));
    if (!(cofd_gr_parts(c) & COFD_GR_ACK) || sum.step == 0 || sum.step >= c->grid.n_ranks ||
        sum.piece != c->cut.n_pieces - 1)
        return;
    const int writer = cofd_gr_writer(c, cofd_gr_freed_for(c, sum.step));
    cofd_store_release_sys(cofd_gr_ack(c, writer, lane, c->grid.rank), cofd_grid_tag(g));
}

/* All threads of a block. Io::move(push, sum) stores the one item and adds the other. False when
 * the arena is dead. */
template <class Io>
COFD_FN bool cofd_gr_run_lane(const struct cofd_gr_call *c, const struct cofd_grid *g,
                              uint32_t last, const Io &io)
{
    const uint32_t lane = cofd_gr_lane(c);
    const int64_t n_pushes = (int64_t)(c->last_push - c->first_push + 1) * c->cut.n_pieces;
    const int64_t n_sums = (int64_t)(c->last_sum - c->first_sum + 1) * c->cut.n_pieces;
    const int64_t end = n_sums > n_pushes - 1 ? n_sums : n_pushes - 1;
    for (int64_t n = n_pushes > 0 ? -1 : 0; n < end; n++) {
        const struct cofd_gr_item push = cofd_gr_item(c, c->first_push, n + 1, n_pushes);
        const struct cofd_gr_item sum = cofd_gr_item(c, c->first_sum, n, n_sums);
        const uint32_t ack = cofd_gr_wanted_ack(c, g, push, last);
        const bool wants_piece = cofd_gr_wants_piece(c, sum);
        if (ack || wants_piece) { /* else the others go on beside the thread that signals */
            bool ok = true;
            if (cofd_thread() == 0)
                ok = (!ack || cofd_gr_wait_free(c, g, lane, push, ack)) &&
                     (!wants_piece || cofd_gr_wait_ready(c, g, lane, sum));
            if (!cofd_block_all(ok))
                return false;
        }
        io.move(push, sum);
        cofd_block_sync();
        if (cofd_thread() == 0)
            cofd_gr_signal(c, g, lane, push, sum);
    }
    return true;
}

/* ---- the call ------------------------------------------------------------------------------- */

/* All threads of a block: the epoch, and that of the plan's call before. False when the arena is
 * dead. */
COFD_FN bool cofd_gr_begin(const struct cofd_gr_call *c, struct cofd_grid *g, uint32_t *last)
{
    struct cofd_binding *b = c->grid.binding;
    if (!(cofd_gr_parts(c) & COFD_GR_BEGIN)) {
        g->epoch = b->epoch;
        *last = b->mark[COFD_GR_MARK];
        return cofd_block_all(!cofd_is_dead(c->grid.arena));
    }
    bool is_alive = cofd_grid_begin(g);
    *last = cofd_load_relaxed_gpu_u32(&b->mark[COFD_GR_MARK]); /* a reset may have been before */
    /* No call before has this epoch. That the vote needs the mark makes it read before the last
     * block stores the next one. */
    is_alive = cofd_block_all(is_alive && (!is_alive || *last != g->epoch));
    /* Not the thread that waits for acks: the one beside the other. */
    if (is_alive && cofd_thread() == cofd_n_threads() - 1 && cofd_grid_arrive(g))
        b->mark[COFD_GR_MARK] = g->epoch;
    return is_alive;
}

#endif
