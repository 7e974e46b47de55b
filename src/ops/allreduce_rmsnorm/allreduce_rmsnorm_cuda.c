/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CUDA devices: sizes, and the launches of a call. A call that the exchange
 * memory does not hold goes in parts, each a call of its own to the arena. */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_cuda.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/config.h"
#include "core/faults.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "symm/call_cuda.h"
#include "symm/options_cuda.h"
#include "symm/stream.h"

_Static_assert(COFD_GRID_MAX_RANKS >= COFI_ARN_MAX_RANKS, "ranks");

/* Calls with more bytes take two shots. Between two ranks both send the same bytes, and one shot
 * has one hop; beyond, the bytes of one shot grow with P and those of two do not. Reckoned from two
 * H200: there the second hop costs 1.6 us, four ranks that share them cross at 189 KB with 4/3 of
 * the bytes of four devices, eight below 128 KB (docs/cuda.md). */
static int64_t default_one_shot_bytes(int n_ranks)
{
    return n_ranks <= 2   ? INT64_MAX
           : n_ranks <= 4 ? INT64_C(320) << 10
           : n_ranks <= 8 ? INT64_C(128) << 10
                          : INT64_C(64) << 10;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

struct sizes {
    bool has_lines;
    int64_t one_shot_rows, two_shot_rows; /* that a part holds; 0: never taken */
    uint32_t x_slots, sum_slots;
    size_t x_writer, x_half, sum_half, sums; /* bytes; sums: where those of rows begin */
};

static bool has_lines(const struct cofi_arn_plan *plan)
{
    const char *units = cofi_config_text(COFI_VAR_TAGGED_UNITS);
    const struct cofi_cuda_world *w = plan->base.team->world->device;
    return units[0] == 'l' || (units[0] == 'a' && w->has_lines);
}

/* Sums that are rounded once, where they are stored, go out in the data type. */
static bool sums_are_f32(const struct cofi_arn_plan *plan)
{
    return plan->elem == COFI_ELEM_F32 || (plan->params.rounding == COF_ALLREDUCE_EXACT &&
                                           plan->params.variant != COF_ALLREDUCE_ONLY);
}

static int64_t one_shot_rows(const struct cofi_arn_plan *plan)
{
    const cof_allreduce_rmsnorm_params *p = &plan->params;
    if (p->algorithm != COF_ALLREDUCE_AUTO)
        return p->algorithm == COF_ALLREDUCE_ONE_SHOT ? p->max_tokens : 0;
    int64_t bytes =
        p->one_shot_bytes ? p->one_shot_bytes : default_one_shot_bytes(plan->n_ranks);
    int64_t rows = plan->n_ranks == 1 ? p->max_tokens : bytes / plan->row_bytes;
    return rows < p->max_tokens ? rows : p->max_tokens;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static struct sizes sizes_of(const struct cofi_arn_plan *plan)
{
    const cof_allreduce_rmsnorm_params *p = &plan->params;
    int64_t n = plan->n_ranks;
    struct sizes s = {.has_lines = has_lines(plan), .one_shot_rows = one_shot_rows(plan)};
    s.two_shot_rows = s.one_shot_rows < p->max_tokens ? p->max_tokens : 0;
    s.x_slots = cofi_arn_slots(s.has_lines, plan->row_bytes);
    s.sum_slots =
        cofi_arn_slots(s.has_lines, sums_are_f32(plan) ? p->hidden * 4 : plan->row_bytes);
    if (n == 1)
        return s;
    s.x_writer = (size_t)most(s.one_shot_rows, (s.two_shot_rows + n - 1) / n) * s.x_slots * 16;
    s.x_half = s.x_writer * (size_t)n;
    s.sum_half = (size_t)s.two_shot_rows * s.sum_slots * 16;
    s.sums = 2 * s.x_half;
    return s;
}

static void lay_out(struct cofi_arn_plan *plan)
{
    struct sizes s = sizes_of(plan);
    plan->n_purposes = COFD_GRID_PURPOSES;
    plan->acks = 0;
    plan->payload_bytes = 0;
    plan->tagged_bytes = s.sums + 2 * s.sum_half;
    plan->local_bytes = 0;
}

static int64_t elem_bytes(const struct cofi_arn_plan *plan)
{
    return plan->row_bytes / plan->params.hidden;
}

/* Blocks of some devices have less shared memory than those of others. */
static cof_status check_shared(const struct cofi_arn_plan *plan)
{
    const int device = plan->base.team->world->device->device;
    const int64_t hidden = plan->params.hidden;
    const struct cofi_arn_block block =
        cofi_arn_block_of(has_lines(plan), hidden, elem_bytes(plan));
    int limit = 0;
    COF_CUDA(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    COF_FAIL_IF(block.shared_bytes + COFI_ARN_CUDA_STATIC_BYTES > (size_t)limit,
                COF_ERR_UNSUPPORTED,
                "params.hidden = %lld: wanted at most %lld on device %d, where a block has %d "
                "bytes of shared memory", (long long)hidden,
                (long long)cofi_arn_most_hidden(has_lines(plan), elem_bytes(plan), (size_t)limit),
                device, limit);
    return COF_OK;
}

static cof_status check(const struct cofi_arn_plan *plan)
{
    COF_FAIL_IF(plan->params.hidden > COFI_ARN_CUDA_MAX_HIDDEN, COF_ERR_UNSUPPORTED,
                "params.hidden = %lld: wanted at most %d on a CUDA device",
                (long long)plan->params.hidden, COFI_ARN_CUDA_MAX_HIDDEN);
    COF_FAIL_IF(plan->params.max_tokens > COFI_ARN_CUDA_MAX_TOKENS, COF_ERR_UNSUPPORTED,
                "params.max_tokens = %lld: wanted at most %d on a CUDA device",
                (long long)plan->params.max_tokens, COFI_ARN_CUDA_MAX_TOKENS);
    return check_shared(plan);
}

static void describe(const struct cofi_arn_plan *plan, char *text, size_t bytes)
{
    static const char *const names[] = {"auto", "one_shot", "two_shot"};
    struct sizes s = sizes_of(plan);
    char limit[48] = "";
    if (plan->params.algorithm == COF_ALLREDUCE_AUTO && s.two_shot_rows == 0)
        snprintf(limit, sizeof limit, " one_shot_rows=all");
    else if (plan->params.algorithm == COF_ALLREDUCE_AUTO)
        snprintf(limit, sizeof limit, " one_shot_rows=%lld", (long long)s.one_shot_rows);
    snprintf(text, bytes, "algorithm=%s%s units=%s max_ctas=%d", names[plan->params.algorithm],
             limit, s.has_lines ? "lines" : "words", plan->params.max_ctas);
}

/* ---- plan ----------------------------------------------------------------------------------- */

struct kernel {
    struct cofi_arn_choice choice;
    int most_blocks;
    bool waits; /* for the kernel in front, where it begins before that one has ended */
};

struct state {
    struct sizes sizes;
    struct kernel one_shot, two_shot;
    struct cofi_arn_block block;
    struct cofi_arn_kernel arguments; /* what is the same in all calls */
};

/* A small call may take its places on the device before the kernel in front of it has ended, and
 * lets the one behind it do the same once it has waited for that: so there are two of a stream at
 * most, and those of two plans on two streams fit. A larger one begins when the kernel in front has
 * ended: beside a small one it would hold more than a plan may, while it only waits, and where two
 * ranks come to two plans in another order, the small one's blocks that it waits for found no place
 * on the other rank. */
#define ROOM_FOR_CALLS 4

static bool is_small(int n_blocks, int most_blocks)
{
    return n_blocks * ROOM_FOR_CALLS <= most_blocks;
}

/* Blocks of a call do not wait for each other, but each for its peers': some room stays free for
 * those of another plan, which may have come first on another rank and fill the device there. */
static int leave_room(int n_blocks)
{
    int left = n_blocks - (n_blocks < 32 ? 1 : n_blocks / 32);
    return left > 1 ? left : 1;
}

/* The attributes that are set are the kernel's in the device's context, whose other plans launch it
 * too: no plan may take from another what it needs, so all ask for the most that there is. Beside
 * kernels that want little shared memory a multiprocessor may else divide its own so that it holds
 * fewer blocks than it could: then no room is left for another plan's. */
static cudaError_t prepare(const void *entry, int device, bool *waits)
{
    struct cudaFuncAttributes attributes;
    int most = 0;
    cudaError_t error = cudaFuncGetAttributes(&attributes, entry);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     most - (int)attributes.sharedSizeBytes);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
    *waits = error == cudaSuccess && attributes.ptxVersion >= 90; /* what was compiled, order.h */
    return error;
}

static cof_status open_kernel(const struct cofi_arn_plan *plan, const struct state *st,
                              struct kernel *k)
{
    const void *entry = cofi_arn_kernel_of(&k->choice);
    const int device = plan->base.team->world->device->device;
    struct cofi_cuda_scope scope;
    COF_TRY(cofi_cuda_enter(device, &scope));
    cudaError_t error = prepare(entry, device, &k->waits);
    cofi_cuda_leave(&scope);
    COF_CUDA(error);
    COF_TRY(cofi_cuda_max_blocks(plan->base.team, entry, st->block.n_threads,
                                 st->block.shared_bytes, plan->params.max_ctas, &k->most_blocks));
    if (plan->params.max_ctas == 0)
        k->most_blocks = leave_room(k->most_blocks);
    return COF_OK;
}

static void set_arguments(const struct cofi_arn_plan *plan, struct state *st)
{
    const cof_arena *a = plan->binding.arena;
    const cof_allreduce_rmsnorm_params *p = &plan->params;
    const struct sizes *s = &st->sizes;
    st->arguments = (struct cofi_arn_kernel){
        .call = {.arena = a->on_device, .binding = plan->binding.on_device,
                 .words_offset = plan->binding.words_offset, .ordinal = plan->binding.ordinal,
                 .rank = plan->rank, .n_ranks = plan->n_ranks, .is_private = a->is_private},
        .tagged = plan->binding.tagged_offset,
        .x_half = s->x_half, .x_writer = s->x_writer, .sums = s->sums, .sum_half = s->sum_half,
        .x_slots = s->x_slots, .sum_slots = s->sum_slots, .hidden = (int32_t)p->hidden,
        .eps = p->eps,
        .is_exact = p->rounding == COF_ALLREDUCE_EXACT && p->variant != COF_ALLREDUCE_ONLY,
        .weight_f32 = plan->weight_elem == COFI_ELEM_F32, .weight_bias = p->weight_bias,
        .only_one_half = COFI_FAULT(ARN_HALF, plan->rank),
        .no_beginning_wait = COFI_FAULT(ARN_READY_WAIT, plan->rank)};
    for (int r = 0; r < plan->n_ranks; r++)
        st->arguments.call.slab[r] = a->base[r];
}

static cof_status check_staged(const struct cofi_arn_plan *plan)
{
    COF_FAIL_IF(plan->n_ranks > 1 && cofi_config_int(COFI_VAR_FORCE_STAGED) != 0,
                COF_ERR_UNSUPPORTED,
                "variable COFUSE_FORCE_STAGED = 1: allreduce_rmsnorm on devices stores into the "
                "memory of its peers");
    return COF_OK;
}

static cof_status open_plan(struct cofi_arn_plan *plan)
{
    static const enum cofi_arn_elem_cuda elems[] = {[COFI_ELEM_BF16] = COFI_ARN_BF16,
                                                    [COFI_ELEM_F16] = COFI_ARN_F16,
                                                    [COFI_ELEM_F32] = COFI_ARN_F32};
    struct state *st = calloc(1, sizeof *st);
    COF_FAIL_IF(!st, COF_ERR_NOMEM, "allreduce_rmsnorm plan: no memory");
    plan->state = st;
    st->sizes = sizes_of(plan);
    COF_TRY(check_staged(plan));
    st->block = cofi_arn_block_of(st->sizes.has_lines, plan->params.hidden, elem_bytes(plan));
    st->one_shot.choice = (struct cofi_arn_choice){
        .elem = elems[plan->elem],
        .has_lines = st->sizes.has_lines,
        .has_pair = plan->n_ranks == 2};
    st->two_shot.choice = st->one_shot.choice;
    st->two_shot.choice.is_two_shot = true;
    if (st->sizes.one_shot_rows)
        COF_TRY(open_kernel(plan, st, &st->one_shot));
    if (st->sizes.two_shot_rows)
        COF_TRY(open_kernel(plan, st, &st->two_shot));
    set_arguments(plan, st);
    return COF_OK;
}

static void close_plan(struct cofi_arn_plan *plan)
{
    free(plan->state);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static bool is_aligned(const struct cofi_arn_rows *rows, int64_t n_tokens, uintptr_t to)
{
    return (uintptr_t)rows->data % to == 0 && (n_tokens == 1 || rows->pitch % (int64_t)to == 0);
}

static char *row_of(const struct cofi_arn_rows *rows, int64_t row)
{
    return rows->data ? rows->data + row * rows->pitch : NULL;
}

/* Rows first .. first + n - 1 of the call. */
static struct cofi_arn_kernel part_of(const struct cofi_arn_plan *plan,
                                      const struct cofi_arn_call *call, int64_t first, int64_t n)
{
    const struct state *st = plan->state;
    struct cofi_arn_kernel k = st->arguments;
    k.x = row_of(&call->x, first);
    k.residual = row_of(&call->residual, first);
    k.residual_out = row_of(&call->residual_out, first);
    k.norm_out = row_of(&call->norm_out, first);
    k.weight = call->weight;
    k.x_pitch = call->x.pitch;
    k.residual_pitch = call->residual.pitch;
    k.residual_out_pitch = call->residual_out.pitch;
    k.norm_out_pitch = call->norm_out.pitch;
    k.n_tokens = (int32_t)n;
    k.x_aligned = is_aligned(&call->x, call->n_tokens, 8);
    k.residual_aligned = is_aligned(&call->residual, call->n_tokens, 16);
    k.residual_out_aligned = is_aligned(&call->residual_out, call->n_tokens, 16);
    k.norm_out_aligned = is_aligned(&call->norm_out, call->n_tokens, 16);
    k.weight_aligned = (uintptr_t)call->weight % 16 == 0;
    return k;
}

/* Blocks for rows; every block the same number, as near as can be. */
static int choose_blocks(int64_t n, int most_blocks)
{
    int64_t turns = (n + most_blocks - 1) / most_blocks;
    return (int)((n + turns - 1) / turns);
}

static int common_divisor(int a, int b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

/* So that the rows of a block are those of all ranks by turns: who sums a row has more to do. */
static uint32_t choose_shift(int n_blocks, int n_ranks)
{
    int shift = 0;
    while (common_divisor(n_blocks + shift, n_ranks) != 1)
        shift++;
    return (uint32_t)shift;
}

static cof_status enqueue(struct cofi_arn_plan *plan, const struct cofi_arn_call *call,
                          void *stream)
{
    const struct state *st = plan->state;
    cof_arena *a = plan->binding.arena;
    bool is_two_shot = call->n_tokens > st->sizes.one_shot_rows && st->sizes.two_shot_rows > 0;
    const struct kernel *kernel = is_two_shot ? &st->two_shot : &st->one_shot;
    int64_t most_rows = is_two_shot ? st->sizes.two_shot_rows : st->sizes.one_shot_rows;
    for (int64_t first = 0; first < call->n_tokens; first += most_rows) {
        int64_t n = call->n_tokens - first < most_rows ? call->n_tokens - first : most_rows;
        const struct cofi_call c = {
            .n_empty = plan->n_empty,
            .sizes = {(uint64_t)call->n_tokens, (uint64_t)first, (uint64_t)call->x_source}};
        struct cofi_arn_kernel k = part_of(plan, call, first, n);
        cofi_cuda_call_make(&plan->binding, &c, &k.call.call);
        k.call.announces = (is_two_shot && n < plan->n_ranks) ||
                           !cofi_arn_has_digest(&kernel->choice);
        const int n_blocks = choose_blocks(n, kernel->most_blocks);
        k.turn_shift = is_two_shot ? choose_shift(n_blocks, plan->n_ranks) : 0;
        k.lets_next_begin = is_small(n_blocks, kernel->most_blocks);
        COFI_LAUNCH(a, stream, cofi_arn_launch(&kernel->choice, &k, n_blocks, &st->block,
                                               kernel->waits && k.lets_next_begin, stream));
    }
    return COF_OK;
}

static cof_status run(struct cofi_arn_plan *plan, const struct cofi_arn_call *call,
                      cof_stream stream)
{
    void *handle;
    COF_TRY(cofi_stream_begin_device(plan->base.team->world, stream, &handle));
    cof_status status = cofi_arena_look(plan->binding.arena);
    if (status == COF_OK)
        status = enqueue(plan, call, handle);
    return cofi_stream_end_device(plan->binding.arena, stream, status);
}

static const struct cofi_arn_backend backend = {.name = "cuda", .check = check,
                                                .lay_out = lay_out, .describe = describe,
                                                .open = open_plan, .close = close_plan,
                                                .run = run};

const struct cofi_arn_backend *cofi_arn_cuda(void)
{
    return &backend;
}
