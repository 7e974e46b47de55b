/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The transfers of all schedules: keys and values out of their owners, gradients home to them. The
 * protocol is told at the head of attention_ring.c. */
#include <string.h>

#include "core/faults.h"
#include "ops/attention/attention_schedule.h"
#include "symm/symm.h"

struct cofi_attention_view cofi_attention_rows(const struct cofi_attention_plan *plan, void *data,
                                               int is_v)
{
    int64_t dim = is_v ? plan->dims.dim_v : plan->dims.dim_qk;
    return (struct cofi_attention_view){data, plan->dims.n_kv_heads * dim,
                                        plan->published.row_elements[is_v], dim};
}

struct cofi_kv_buffer cofi_attention_kept(const struct cofi_attention_plan *plan, void *saved,
                                          int step)
{
    int place = plan->params.schedule == COF_SCHEDULE_GATHER ? 0
                : saved                                      ? step - 1
                                                             : (step - 1) & 1;
    struct cofi_kv_buffer b = plan->staging[saved ? 0 : place];
    if (saved) { /* one behind the other */
        b.local = (char *)saved + (size_t)place * plan->kept_bytes;
        b.offset[1] -= b.offset[0];
        b.offset[0] = 0;
    }
    return b;
}

/* ---- fetch ---------------------------------------------------------------------------------- */

static void get_rows(struct cofi_attention_plan *plan, int owner, int64_t from_row, int64_t n,
                     const struct cofi_kv_buffer *to, int64_t to_row)
{
    const struct cofi_kv_buffer *from = &plan->published;
    for (int is_v = 0; is_v < 2; is_v++)
        cofi_arena_get(plan->binding.arena, to->local + cofi_kv_at(to, is_v, to_row), owner,
                       cofi_kv_at(from, is_v, from_row), cofi_kv_bytes(from, is_v, n));
}

/* The owner's local row as the whole sequence counts, for a buffer that holds all of it. */
static int64_t global_of(const struct cofi_attention_plan *plan, int owner, int64_t row)
{
    return cof_layout_global_row(&plan->layout, owner, row);
}

/* In gather each half to its global rows: what is one range here are two there. */
static void get_global(struct cofi_attention_plan *plan, int owner,
                       const struct cofi_rows_range *rows, const struct cofi_kv_buffer *to)
{
    const cof_layout *l = &plan->layout;
    int64_t second = cof_layout_halves(l) > 1 ? cof_layout_half_start(l, owner, 1) : rows->end;
    int64_t middle = second < rows->begin ? rows->begin : second > rows->end ? rows->end : second;
    if (rows->begin < middle)
        get_rows(plan, owner, rows->begin, middle - rows->begin, to,
                 global_of(plan, owner, rows->begin));
    if (middle < rows->end)
        get_rows(plan, owner, middle, rows->end - middle, to, global_of(plan, owner, middle));
}

cof_status cofi_attention_fetch(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    struct cofi_fetch_args a = *(const struct cofi_fetch_args *)args;
    struct cofi_attention_plan *plan = a.plan;
    int owner = cofi_grad_owner(&plan->home, a.step);
    struct cofi_rows_range rows[2];
    int n = cofi_attention_needed(&plan->layout, &plan->sight, plan->rank, owner, rows);
    if (n > 0 && !COFI_FAULT(KV_READY_WAIT, plan->rank))
        COF_TRY(cofi_call_wait_ready(&plan->binding, owner, COFI_KV_READY, "keys published"));
    for (int i = 0; i < n; i++) {
        if (plan->params.schedule == COF_SCHEDULE_GATHER)
            get_global(plan, owner, &rows[i], &a.to);
        else
            get_rows(plan, owner, rows[i].begin, rows[i].end - rows[i].begin, &a.to,
                     rows[i].begin);
    }
    if (!COFI_FAULT(KV_ACK, plan->rank))
        cofi_call_signal(&plan->binding, owner, COFI_KV_ACK);
    return COF_OK;
}

/* ---- gradients home ------------------------------------------------------------------------- */

/* Rows [begin, end) of the owner's, of which the partial holds the first at `from`. */
static void store_rows(struct cofi_cpu_stream *s, const struct cofi_attention_plan *plan,
                       void *const to[2], int64_t first, int64_t begin, int64_t end, int64_t from)
{
    struct cofi_attention_view view[2];
    const struct cofi_kv_buffer *slot = &plan->home.slot[0];
    for (int is_v = 0; is_v < 2; is_v++)
        view[is_v] = cofi_attention_rows(
            plan, (char *)to[is_v] + cofi_kv_bytes(slot, is_v, begin - first), is_v);
    cofi_attention_cpu_partial_store(s, &plan->dims, &plan->grad, from, end - begin, NULL, NULL,
                                     plan->params.wire_f32, &view[0], &view[1]);
}

/* In gather the partial has global rows; padding between the halves has none, and is not read. */
static void store_chunks(struct cofi_cpu_stream *s, const struct cofi_attention_plan *plan,
                         int owner, void *const to[2], int64_t first, int64_t last)
{
    const cof_layout *l = &plan->layout;
    for (int half = 0; half < cof_layout_halves(l); half++) {
        int64_t chunk = cof_layout_chunk(l, owner, half);
        int64_t start = cof_layout_half_start(l, owner, half);
        int64_t begin = start > first ? start : first;
        int64_t end = start + cof_layout_chunk_rows(l, chunk);
        end = end < last ? end : last;
        if (begin < end)
            store_rows(s, plan, to, first, begin, end,
                       cof_layout_chunk_start(l, chunk) + begin - start);
    }
}

cof_status cofi_attention_return(struct cofi_cpu_stream *s, struct cofi_attention_plan *plan,
                                 int step)
{
    int owner = cofi_grad_owner(&plan->home, step);
    int64_t begin, end;
    void *to[2];
    cofi_attention_needed_rows(&plan->layout, &plan->sight, plan->rank, owner, &begin, &end);
    if (begin == end)
        return COF_OK;
    COF_TRY(cofi_grad_open(&plan->home, step, begin, to));
    if (plan->params.schedule == COF_SCHEDULE_GATHER)
        store_chunks(s, plan, owner, to, begin, end);
    else
        store_rows(s, plan, to, begin, begin, end, begin);
    cofi_grad_close(&plan->home, step, begin, end, to);
    return COF_OK;
}

cof_status cofi_attention_sum(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    struct cofi_step_args a = *(const struct cofi_step_args *)args;
    struct cofi_attention_plan *plan = a.plan;
    int64_t begin, end;
    cofi_attention_needed_rows(&plan->layout, &plan->sight, cofi_grad_writer(&plan->home, a.step),
                               plan->rank, &begin, &end);
    return cofi_grad_sum(&plan->home, a.step, begin, end, begin < end);
}
