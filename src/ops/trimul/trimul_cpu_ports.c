/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs: where exchanged values go. A store has a port: the peer's region where that is
 * mapped, else a part of the staging buffer with this rank's values for that peer, which deliver
 * puts piece by piece. The staging buffer is free again when deliver returns. */
#include <string.h>

#include "ops/trimul/trimul_cpu.h"

static bool has_planes(enum cofi_tri_exchange e)
{
    return e == COFI_TRI_AB || e == COFI_TRI_DTRI;
}

static int n_halves(enum cofi_tri_exchange e)
{
    return e == COFI_TRI_AB || e == COFI_TRI_DAB ? 2 : 1;
}

static int64_t item_bytes(const struct cofi_tri_plan *plan, enum cofi_tri_exchange e)
{
    return cofi_elem_bytes(cofi_tri_cpu_elem(plan, e));
}

static int64_t first_feature(const struct cofi_tri_plan *plan, int rank)
{
    return cofi_tri_first_feature(plan->params.hidden, rank, plan->n_ranks);
}

/* `rows` rows of `pitch` bytes for each batch entry, and so on outwards. */
static void set_strides(struct cofi_tri_port *p, int64_t n_batch, int64_t rows, int64_t pitch,
                        int64_t n_features)
{
    p->row = pitch;
    p->batch = rows * pitch;
    p->feature = n_batch * p->batch;
    p->half = n_features * p->feature;
}

/* A rank's own region. */
static struct cofi_tri_port region(const struct cofi_tri_plan *plan, enum cofi_tri_exchange e,
                                   int rank, char *base)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_shape *s = &st->shape;
    const int64_t item = item_bytes(plan, e);
    struct cofi_tri_port p = {.base = base, .item = item};
    if (has_planes(e)) {
        p.feature0 = first_feature(plan, rank);
        set_strides(&p, s->n_batch, s->plane_rows,
                    cofi_tri_cpu_plane_pitch(s->plane_rows, (int)item),
                    first_feature(plan, rank + 1) - p.feature0);
    } else {
        const cof_trimul_block block = cofi_tri_block(&plan->params, rank, s->n);
        p.row0 = block.row;
        p.col0 = block.col;
        set_strides(&p, s->n_batch, block.n_rows,
                    cofi_tri_cpu_block_pitch(block.n_cols, (int)item), plan->params.hidden);
    }
    return p;
}

/* What this rank has for a peer's region, by itself; *used grows by it. */
static struct cofi_tri_port staged(const struct cofi_tri_plan *plan, enum cofi_tri_exchange e,
                                   int peer, size_t *used)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_shape *s = &st->shape;
    const int64_t item = item_bytes(plan, e);
    const int features_of = has_planes(e) ? peer : plan->rank;
    const cof_trimul_block block =
        has_planes(e) ? s->own : cofi_tri_block(&plan->params, peer, s->n);
    struct cofi_tri_port p = {.base = st->staging + *used, .item = item,
                              .feature0 = first_feature(plan, features_of),
                              .row0 = block.row, .col0 = block.col};
    set_strides(&p, s->n_batch, block.n_rows, cofi_tri_cpu_block_pitch(block.n_cols, (int)item),
                first_feature(plan, features_of + 1) - p.feature0);
    *used += (size_t)(n_halves(e) * p.half);
    return p;
}

void cofi_tri_cpu_set_ports(struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    cof_arena *arena = plan->binding.arena;
    const int n_exchanges = plan->params.forward_only ? COFI_TRI_DTRI : COFI_TRI_EXCHANGES;
    for (int e = 0; e < n_exchanges; e++) {
        size_t used = 0;
        struct cofi_tri_port *ports = st->ports + e * plan->n_ranks;
        for (int r = 0; r < plan->n_ranks; r++) {
            const size_t offset = st->sizes.offset[e];
            if (r == plan->rank)
                ports[r] = region(plan, e, r, cofi_arena_data(arena) + offset);
            else if (st->is_staged)
                ports[r] = staged(plan, e, r, &used);
            else
                ports[r] = region(plan, e, r, cofi_arena_destination(arena, r, offset, NULL));
        }
        st->inbox[e] = ports[plan->rank];
    }
}

/* All rows of one feature and batch entry. */
static void deliver_rows(struct cofi_tri_plan *plan, enum cofi_tri_exchange e, int peer, int half,
                         int64_t h, int64_t b)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_port *from = st->ports + e * plan->n_ranks + peer;
    const struct cofi_tri_port to =
        region(plan, e, peer, cofi_arena_data(plan->binding.arena)); /* only for distances */
    const cof_trimul_block block =
        has_planes(e) ? st->shape.own : cofi_tri_block(&plan->params, peer, st->shape.n);
    const bool whole_rows = !has_planes(e) || block.n_cols == st->shape.n;
    const bool at_once = from->row == to.row && whole_rows;
    const int64_t n_puts = at_once ? block.n_rows > 0 : block.n_rows;
    const int64_t bytes = at_once ? block.n_rows * to.row : block.n_cols * to.item;
    for (int64_t i = 0; i < n_puts && bytes > 0; i++) {
        const char *at = cofi_tri_port_at(&to, half, h, b, block.row + i, block.col);
        cofi_arena_deliver(plan->binding.arena, peer, st->sizes.offset[e] + (size_t)(at - to.base),
                           cofi_tri_port_at(from, half, h, b, block.row + i, block.col),
                           (size_t)bytes);
    }
}

void cofi_tri_cpu_deliver(struct cofi_tri_plan *plan, enum cofi_tri_exchange e, int64_t begin,
                          int64_t end)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    for (int i = 1; i < plan->n_ranks && st->is_staged; i++) {
        const int peer = (plan->rank + i) % plan->n_ranks;
        const int features_of = has_planes(e) ? peer : plan->rank;
        int64_t first = first_feature(plan, features_of);
        int64_t last = first_feature(plan, features_of + 1);
        first = first < begin ? begin : first;
        last = last > end ? end : last;
        for (int half = 0; half < n_halves(e); half++)
            for (int64_t h = first; h < last; h++)
                for (int64_t b = 0; b < st->shape.n_batch; b++)
                    deliver_rows(plan, e, peer, half, h, b);
    }
}

void cofi_tri_cpu_send(struct cofi_tri_plan *plan, int peer, size_t offset, const void *src,
                       size_t bytes)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    cof_arena *arena = plan->binding.arena;
    if (bytes == 0)
        return;
    if (peer == plan->rank)
        memcpy(cofi_arena_data(arena) + offset, src, bytes);
    else if (st->is_staged)
        cofi_arena_deliver(arena, peer, offset, src, bytes);
    else
        memcpy(cofi_arena_destination(arena, peer, offset, NULL), src, bytes);
}
