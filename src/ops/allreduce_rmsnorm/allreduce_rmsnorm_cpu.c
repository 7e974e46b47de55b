/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CPUs. A call is cut into parts of at most `capacity` rows, small enough that
 * all ranks' rows of a part stay in the last cache; every part takes an epoch of its own. Of a part
 * each rank does, on the thread that dispatches its stream and its helpers:
 *
 *   one shot  publish x | READY to all, wait for all | reduce and norm all rows
 *   two shot  publish x | READY to all, wait for all | reduce the own share | SUMS to all, wait for
 *             all | norm all rows
 *
 * and, where x lies in the arena, at the end of the call: ACK to all, wait for all.
 *
 * Words and buffers (w -> r: stored by rank w in r's slab, or read by r in w's; `a` is an epoch)
 *   READY   w -> r  w's rows of part a are there. A word for each parity: w is at a + 1 as soon as
 *                   it has r's READY of a, and r may not have looked at w's by then.
 *   halves  w -> r  x, in the half of a's parity. w writes it again at a + 2: then it has ended
 *                   a + 1, so has seen r's READY of a + 1, which r sends after it has ended a.
 *   SUMS    w -> r  w's share of part a is reduced. One word, and one buffer: w stores them again
 *                   at a + 1 after r's READY of a + 1, so after r has ended a.
 *   ACK     r -> w  r is done with w's x: w's call ends, and x may be overwritten.
 * Each is a release of its writer's stores, and the wait for it an acquire. Parity fails where
 * epoch 0xffffffff is followed by 1; there the ranks meet in between (call.h). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu_stream.h"
#include "backend/cpu/vec_exact.h"
#include "core/config.h"
#include "core/faults.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "symm/call.h"
#include "symm/engine.h"
#include "symm/memory.h"
#include "symm/stream.h"

enum { READY_EVEN, READY_ODD, SUMS, ACK, PURPOSES };

/* Bytes of a rank's rows in a part. */
#define PART_BYTES (INT64_C(1) << 20)
/* Above so many bytes of x, and with more than two ranks, two shots. Of 512 KiB they take 0.67 ms
 * against 0.74 with 4 ranks, 1.9 against 2.4 with 8, of 8 MiB 13.6 against 15.5, 29.7 against 41
 * (two cores of an EPYC, AVX2). */
#define ONE_SHOT_BYTES (INT64_C(1) << 17)
/* Bytes of rows that a task takes. */
#define TASK_BYTES (INT64_C(1) << 15)

_Static_assert(COFI_ARN_SEGMENT == COFI_EXACT_SEGMENT, "one definition of the sum of squares");

/* ---- sizes ---------------------------------------------------------------------------------- */

/* Everything that is laid out, here and nowhere else. */
struct sizes {
    int64_t capacity;      /* rows of a part */
    enum cofi_elem sums;   /* type of what two shots exchange */
    int64_t sums_row_bytes;
    size_t half_bytes;     /* of the published rows */
    size_t sums_bytes;     /* of the rank that has the largest share */
    /* Local; 0: not needed. */
    size_t stage_x, stage_sums, wide_row;
};

static bool is_exact(const struct cofi_arn_plan *plan)
{
    return plan->params.rounding == COF_ALLREDUCE_EXACT ||
           plan->params.variant == COF_ALLREDUCE_ONLY; /* rounded once, where it is stored */
}

/* The norm is taken of what is stored, in one of the outputs; else of fp32 that no output has. */
static bool z_is_wide(const struct cofi_arn_plan *plan)
{
    return plan->elem != COFI_ELEM_F32 && plan->params.rounding == COF_ALLREDUCE_EXACT &&
           plan->params.variant != COF_ALLREDUCE_ONLY;
}

static int64_t share_begin(int64_t n, int rank, int n_ranks)
{
    return n * rank / n_ranks;
}

static bool may_take_two_shots(const struct cofi_arn_plan *plan)
{
    return plan->n_ranks > 1 && plan->params.algorithm != COF_ALLREDUCE_ONE_SHOT;
}

static bool is_staged(const struct cofi_arn_plan *plan)
{
    return plan->n_ranks > 1 && (!(plan->base.team->world->ops->caps & COFI_CAP_MAPPED) ||
                                 cofi_config_int(COFI_VAR_FORCE_STAGED) != 0);
}

static struct sizes sizes_of(const struct cofi_arn_plan *plan)
{
    int64_t rows = PART_BYTES / plan->row_bytes;
    struct sizes s = {.capacity = plan->params.max_tokens};
    s.capacity = rows < s.capacity ? rows : s.capacity;
    s.capacity = s.capacity < 1 ? 1 : s.capacity;
    s.sums = z_is_wide(plan) ? COFI_ELEM_F32 : plan->elem;
    s.sums_row_bytes = plan->params.hidden * cofi_elem_bytes(s.sums);
    if (plan->n_ranks > 1)
        s.half_bytes = cofi_round_up((size_t)(s.capacity * plan->row_bytes), COFI_LINE);
    if (may_take_two_shots(plan)) {
        int64_t share = (s.capacity + plan->n_ranks - 1) / plan->n_ranks;
        s.sums_bytes = (size_t)(share * s.sums_row_bytes);
    }
    if (is_staged(plan)) {
        s.stage_x = (size_t)plan->n_ranks * s.half_bytes;
        s.stage_sums = s.sums_bytes ? (size_t)(s.capacity * s.sums_row_bytes) : 0;
    }
    size_t row = (size_t)plan->params.hidden * sizeof(float);
    s.wide_row = z_is_wide(plan) && row > COFI_WORKER_SCRATCH_BYTES ? row : 0;
    return s;
}

static void lay_out(struct cofi_arn_plan *plan)
{
    struct sizes s = sizes_of(plan);
    plan->n_purposes = PURPOSES;
    plan->acks = 1u << ACK;
    plan->payload_bytes = 2 * s.half_bytes + s.sums_bytes;
    plan->tagged_bytes = 0;
    plan->local_bytes = cofi_round_up(s.stage_x, COFI_LINE) +
                        cofi_round_up(s.stage_sums, COFI_LINE) +
                        cofi_round_up(s.wide_row, COFI_LINE);
}

/* ---- plan ----------------------------------------------------------------------------------- */

struct state {
    struct sizes sizes;
    int64_t one_shot_bytes; /* calls with more take two shots */
    char *stage_x;          /* by peer, one half's bytes each */
    char *stage_sums;       /* of all shares, by row of the part */
    float *wide_row;        /* for rows that a worker's scratch does not hold: one at a time */
    _Alignas(COFI_LINE) char memory[];
};

static int64_t one_shot_bytes(const struct cofi_arn_plan *plan)
{
    const cof_allreduce_rmsnorm_params *p = &plan->params;
    if (p->algorithm != COF_ALLREDUCE_AUTO)
        return p->algorithm == COF_ALLREDUCE_ONE_SHOT ? INT64_MAX : 0;
    return p->one_shot_bytes ? p->one_shot_bytes : plan->n_ranks <= 2 ? INT64_MAX : ONE_SHOT_BYTES;
}

static void describe(const struct cofi_arn_plan *plan, char *text, size_t bytes)
{
    static const char *const names[] = {"auto", "one_shot", "two_shot"};
    char limit[48] = "";
    if (plan->params.algorithm == COF_ALLREDUCE_AUTO && one_shot_bytes(plan) == INT64_MAX)
        snprintf(limit, sizeof limit, " one_shot_bytes=all");
    else if (plan->params.algorithm == COF_ALLREDUCE_AUTO)
        snprintf(limit, sizeof limit, " one_shot_bytes=%lld", (long long)one_shot_bytes(plan));
    snprintf(text, bytes, "algorithm=%s%s part=%lld", names[plan->params.algorithm], limit,
             (long long)sizes_of(plan).capacity);
}

static char *take(struct state *st, size_t *used, size_t bytes)
{
    char *at = bytes ? st->memory + *used : NULL;
    *used += cofi_round_up(bytes, COFI_LINE);
    return at;
}

static cof_status open_plan(struct cofi_arn_plan *plan)
{
    size_t used = 0, bytes = cofi_round_up(sizeof(struct state), COFI_LINE) + plan->local_bytes;
    COF_TRY(cofi_memory_check(bytes));
    struct state *st = aligned_alloc(COFI_LINE, bytes);
    COF_FAIL_IF(!st, COF_ERR_NOMEM, "allreduce_rmsnorm plan: no memory for %zu bytes", bytes);
    st->sizes = sizes_of(plan);
    st->one_shot_bytes = one_shot_bytes(plan);
    st->stage_x = take(st, &used, st->sizes.stage_x);
    st->stage_sums = take(st, &used, st->sizes.stage_sums);
    st->wide_row = (float *)(void *)take(st, &used, st->sizes.wide_row);
    plan->state = st;
    return COF_OK;
}

static void close_plan(struct cofi_arn_plan *plan)
{
    free(plan->state);
}

/* ---- a part --------------------------------------------------------------------------------- */

struct part {
    struct cofi_arn_plan *plan;
    struct state *state;
    const struct cofi_arn_call *call;
    int64_t first, n; /* rows of the call */
    bool two_shots;
    int ready;     /* purpose */
    size_t half;   /* offsets in the arena's data */
    size_t sums;
    int64_t share; /* the own one's first row in the part */
    /* By rank: where its first row is read, its pitch; its share's first row of sums. */
    const char *x[COFI_ARN_MAX_RANKS], *sums_of[COFI_ARN_MAX_RANKS];
    int64_t x_pitch[COFI_ARN_MAX_RANKS];
    int64_t begin, end, per_task; /* rows of the section at work, and of one of its tasks */
};

/* fn for the rows [begin, end) of the part, a few at a time. */
static void each_rows(struct cofi_cpu_stream *s, struct part *p, int64_t begin, int64_t end,
                      cofi_task_fn fn)
{
    int64_t rows = TASK_BYTES / p->plan->row_bytes;
    p->begin = begin;
    p->end = end;
    p->per_task = p->state->wide_row ? end - begin + !(end - begin) : rows < 1 ? 1 : rows;
    cofi_cpu_parallel(s, (end - begin + p->per_task - 1) / p->per_task, fn, p);
}

static int64_t task_end(const struct part *p, int64_t begin)
{
    return p->end - begin < p->per_task ? p->end : begin + p->per_task;
}

static void publish_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct part *p = arg;
    int64_t row = p->begin + task * p->per_task, end = task_end(p, row);
    size_t row_bytes = (size_t)p->plan->row_bytes;
    char *to = cofi_arena_data(p->plan->binding.arena) + p->half + (size_t)row * row_bytes;
    const char *from = p->call->x.data + (p->first + row) * p->call->x.pitch;
    if (p->call->x.pitch == p->plan->row_bytes) {
        memcpy(to, from, (size_t)(end - row) * row_bytes);
        return;
    }
    for (; row < end; row++, to += row_bytes, from += p->call->x.pitch)
        memcpy(to, from, row_bytes);
}

/* The own share, as the second hop sends it. */
static void share_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct part *p = arg;
    const struct cofi_arn_plan *plan = p->plan;
    bool is_wide = p->state->sizes.sums != plan->elem;
    int64_t row = p->begin + task * p->per_task, end = task_end(p, row);
    char *to = cofi_arena_data(plan->binding.arena) + p->sums;
    for (; row < end; row++) {
        const void *src[COFI_ARN_MAX_RANKS];
        char *sum = to + (row - p->share) * p->state->sizes.sums_row_bytes;
        for (int r = 0; r < plan->n_ranks; r++)
            src[r] = p->x[r] + row * p->x_pitch[r];
        cofi_exact_row(cofi_exact(), plan->elem, plan->elem,
                       &(struct cofi_exact_row){.src = src, .n_src = plan->n_ranks,
                                                .n = plan->params.hidden, .exact = is_exact(plan),
                                                .out = is_wide ? NULL : sum,
                                                .z = is_wide ? (float *)(void *)sum : NULL});
    }
}

/* A row's sources: all ranks' x, or the sums of the rank whose share it is in. */
static int sources_of(const struct part *p, int64_t row, const void *src[COFI_ARN_MAX_RANKS])
{
    int n_ranks = p->plan->n_ranks, owner = 0;
    for (int r = 0; r < n_ranks && !p->two_shots; r++)
        src[r] = p->x[r] + row * p->x_pitch[r];
    if (!p->two_shots)
        return n_ranks;
    while (share_begin(p->n, owner + 1, n_ranks) <= row)
        owner++;
    src[0] = p->sums_of[owner] +
             (row - share_begin(p->n, owner, n_ranks)) * p->state->sizes.sums_row_bytes;
    return 1;
}

static void *at_row(const struct cofi_arn_rows *rows, int64_t row)
{
    return rows->data ? rows->data + row * rows->pitch : NULL;
}

static void finish_row(const struct part *p, int64_t row, float *z)
{
    const struct cofi_arn_plan *plan = p->plan;
    const cof_allreduce_rmsnorm_params *params = &plan->params;
    const void *src[COFI_ARN_MAX_RANKS];
    char *sum_out = at_row(&p->call->residual_out, p->first + row);
    char *norm_out = at_row(&p->call->norm_out, p->first + row);
    bool normed = params->variant != COF_ALLREDUCE_ONLY, keeps_z = z_is_wide(plan);
    float squares;
    struct cofi_exact_row r = {.src = src, .n_src = sources_of(p, row, src), .n = params->hidden,
                               .exact = is_exact(plan),
                               .residual = at_row(&p->call->residual, p->first + row),
                               .out = sum_out || keeps_z ? sum_out : norm_out,
                               .z = keeps_z ? z : NULL, .squares = normed ? &squares : NULL};
    cofi_exact_row(cofi_exact(), p->two_shots ? p->state->sizes.sums : plan->elem, plan->elem, &r);
    if (!normed)
        return;
    float mean = squares / (float)params->hidden, inv = 1.0f / sqrtf(mean + params->eps);
    cofi_exact_norm(cofi_exact(), plan->elem,
                    &(struct cofi_exact_norm){.dst = norm_out, .z = keeps_z ? z : r.out,
                                              .z_elem = keeps_z ? COFI_ELEM_F32 : plan->elem,
                                              .weight = p->call->weight,
                                              .weight_elem = plan->weight_elem, .inv = inv,
                                              .bias = params->weight_bias != 0,
                                              .n = params->hidden});
}

static void finish_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    const struct part *p = arg;
    float *z = p->state->wide_row ? p->state->wide_row : worker->scratch;
    int64_t row = p->begin + task * p->per_task, end = task_end(p, row);
    for (; row < end; row++)
        finish_row(p, row, z);
}

/* ---- what peers have ------------------------------------------------------------------------ */

/* Where rows [begin, end) of a peer's x are read from now on. */
static void find_x(struct part *p, int peer, int64_t begin, int64_t end)
{
    struct cofi_arn_plan *plan = p->plan;
    const struct cofi_arn_rows *x = &p->call->x;
    bool in_arena = p->call->x_source != 0;
    size_t offset = in_arena ? (size_t)(p->call->x_source - 1 + p->first * x->pitch) : p->half;
    p->x_pitch[peer] = peer == plan->rank || in_arena ? x->pitch : plan->row_bytes;
    p->x[peer] = peer == plan->rank ? x->data + p->first * x->pitch
                                    : cofi_arena_source(plan->binding.arena, peer, offset);
    if (p->x[peer])
        return;
    char *staging = p->state->stage_x + (size_t)peer * p->state->sizes.half_bytes;
    for (int64_t row = begin; row < end; row++)
        cofi_arena_get(plan->binding.arena, staging + row * plan->row_bytes, peer,
                       offset + (size_t)(row * p->x_pitch[peer]), (size_t)plan->row_bytes);
    p->x_pitch[peer] = plan->row_bytes;
    p->x[peer] = staging;
}

static void find_sums(struct part *p, int owner)
{
    struct cofi_arn_plan *plan = p->plan;
    cof_arena *arena = plan->binding.arena;
    int64_t begin = share_begin(p->n, owner, plan->n_ranks);
    int64_t rows = share_begin(p->n, owner + 1, plan->n_ranks) - begin;
    p->sums_of[owner] = owner == plan->rank ? cofi_arena_data(arena) + p->sums
                                            : cofi_arena_source(arena, owner, p->sums);
    if (p->sums_of[owner])
        return;
    char *staging = p->state->stage_sums + begin * p->state->sizes.sums_row_bytes;
    cofi_arena_get(arena, staging, owner, p->sums,
                   (size_t)(rows * p->state->sizes.sums_row_bytes));
    p->sums_of[owner] = staging;
}

/* ---- the protocol --------------------------------------------------------------------------- */

static int peer_of(const struct cofi_arn_plan *plan, int i)
{
    return (plan->rank + i) % plan->n_ranks;
}

static void signal_all(struct cofi_arn_plan *plan, int purpose)
{
    for (int i = 1; i < plan->n_ranks; i++)
        cofi_call_signal(&plan->binding, peer_of(plan, i), purpose);
}

static cof_status publish(struct cofi_cpu_stream *s, struct part *p)
{
    struct cofi_arn_plan *plan = p->plan;
    if (plan->n_ranks > 1 && !p->call->x_source)
        each_rows(s, p, 0, p->n, publish_task);
    signal_all(plan, p->ready);
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(ARN_READY_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ready(&plan->binding, peer_of(plan, i), p->ready,
                                     "rows published"));
    return COF_OK;
}

static cof_status exchange_sums(struct cofi_cpu_stream *s, struct part *p)
{
    struct cofi_arn_plan *plan = p->plan;
    int64_t end = share_begin(p->n, plan->rank + 1, plan->n_ranks);
    p->share = share_begin(p->n, plan->rank, plan->n_ranks);
    for (int r = 0; r < plan->n_ranks; r++)
        find_x(p, r, p->share, end);
    each_rows(s, p, p->share, end, share_task);
    signal_all(plan, SUMS);
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(ARN_SUM_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ready(&plan->binding, peer_of(plan, i), SUMS, "share summed"));
    for (int r = 0; r < plan->n_ranks; r++)
        find_sums(p, r);
    return COF_OK;
}

static cof_status run_part(struct cofi_cpu_stream *s, struct part *p)
{
    COF_TRY(publish(s, p));
    if (p->two_shots)
        COF_TRY(exchange_sums(s, p));
    else
        for (int r = 0; r < p->plan->n_ranks; r++)
            find_x(p, r, 0, p->n);
    each_rows(s, p, 0, p->n, finish_task);
    return COF_OK;
}

/* The peers have read x where it lies. */
static cof_status wait_for_readers(struct cofi_arn_plan *plan)
{
    signal_all(plan, ACK);
    for (int i = 1; i < plan->n_ranks && !COFI_FAULT(ARN_ACK_WAIT, plan->rank); i++)
        COF_TRY(cofi_call_wait_ack(&plan->binding, peer_of(plan, i), ACK,
                                   cofi_call_epoch(&plan->binding), "rows read"));
    return COF_OK;
}

struct run_args {
    struct cofi_arn_plan *plan;
    struct cofi_arn_call call;
    uint64_t n_empty;
};

static cof_status begin_part(const struct run_args *a, struct part *p)
{
    struct cofi_arn_plan *plan = a->plan;
    const struct cofi_call call = {
        .n_empty = a->n_empty,
        .sizes = {(uint64_t)a->call.n_tokens, (uint64_t)p->first, (uint64_t)a->call.x_source,
                  a->call.x_source ? (uint64_t)a->call.x.pitch : 0}};
    COF_TRY(cofi_call_begin(&plan->binding, &call));
    int parity = cofi_call_epoch(&plan->binding) & 1;
    p->ready = parity ? READY_ODD : READY_EVEN;
    p->half = parity && !COFI_FAULT(ARN_HALF, plan->rank) ? p->state->sizes.half_bytes : 0;
    p->sums = 2 * p->state->sizes.half_bytes;
    return COF_OK;
}

static cof_status run_parts(struct cofi_cpu_stream *s, const struct run_args *a)
{
    struct cofi_arn_plan *plan = a->plan;
    struct state *st = plan->state;
    struct part p = {.plan = plan, .state = st, .call = &a->call,
                     .two_shots = plan->n_ranks > 1 &&
                                  a->call.n_tokens > st->one_shot_bytes / plan->row_bytes};
    for (; p.first < a->call.n_tokens; p.first += p.n) {
        int64_t left = a->call.n_tokens - p.first;
        p.n = left < st->sizes.capacity ? left : st->sizes.capacity;
        COF_TRY(begin_part(a, &p));
        COF_TRY(run_part(s, &p));
    }
    if (a->call.x_source)
        COF_TRY(wait_for_readers(plan));
    cofi_call_end(&plan->binding);
    return COF_OK;
}

static void fill_nan(const struct cofi_arn_plan *plan, const struct cofi_arn_rows *rows, int64_t n)
{
    for (int64_t row = 0; row < n && rows->data; row++) {
        uint16_t *half = at_row(rows, row);
        uint32_t *word = at_row(rows, row);
        for (int64_t i = 0; i < plan->params.hidden; i++)
            if (plan->elem == COFI_ELEM_F32)
                word[i] = 0x7fffffff;
            else
                half[i] = 0x7fff;
    }
}

static cof_status run_call(struct cofi_cpu_stream *s, const void *args)
{
    struct run_args a = *(const struct run_args *)args;
    cof_status status = cofi_call_failure(&a.plan->binding, s);
    if (status == COF_OK)
        status = run_parts(s, &a);
    if (status != COF_OK) {
        fill_nan(a.plan, &a.call.residual_out, a.call.n_tokens);
        fill_nan(a.plan, &a.call.norm_out, a.call.n_tokens);
    }
    return status;
}

static cof_status enqueue(struct cofi_arn_plan *plan, const struct run_args *a,
                          struct cofi_cpu_stream *s)
{
    cof_status status = cofi_cpu_stream_sticky(s);
    if (status != COF_OK) /* its outputs are NaN all the same */
        cofi_arena_fail(plan->binding.arena, status);
    cof_status enqueued = cofi_cpu_enqueue(s, run_call, a, sizeof *a, COFI_CALL_ALWAYS);
    if (enqueued != COF_OK)
        cofi_arena_fail(plan->binding.arena, enqueued);
    return status != COF_OK ? status : enqueued;
}

static cof_status run(struct cofi_arn_plan *plan, const struct cofi_arn_call *call,
                      cof_stream stream)
{
    const struct run_args a = {plan, *call, plan->n_empty};
    cof_world *world = plan->base.team->world;
    struct cofi_cpu_stream *s;
    COF_TRY(cofi_stream_begin(world, stream, &s));
    return cofi_stream_end(world, stream, enqueue(plan, &a, s));
}

const struct cofi_arn_backend cofi_arn_cpu = {
    .name = "cpu", .lay_out = lay_out, .describe = describe, .open = open_plan,
    .close = close_plan, .run = run};
