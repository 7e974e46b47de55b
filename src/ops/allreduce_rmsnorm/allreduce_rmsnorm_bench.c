/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench allreduce_rmsnorm`. */
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "ops/bench.h"
#include "ops/bench_calls.h"
#include "ops/check_memory.h"
#include "symm/memory.h"
#include "tools/option_table.h"

#define MAX_BENCH_TOKENS (INT64_C(1) << 24)
#define CACHED_BYTES (INT64_C(1) << 28) /* buffers rotate over so much: past the L2 of any device */
enum { COUNT = 100, MAX_COUNT = 10000, MIN_SLOTS = 2 };

enum { X, RESIDUAL, RESIDUAL_OUT, NORM_OUT, N_TENSORS };

struct bench_case {
    cof_allreduce_rmsnorm_params params;
    int64_t n_tokens, count, max_ctas;
    int in_arena, is_graph;
    double eps; /* negative: not told */
};

struct allreduce_bench {
    struct cofi_job job;
    struct bench_case c;
    struct cofi_bench_calls calls;
    char *data[N_TENSORS], *weight; /* of all slots; NULL: there is none */
    cof_arena *arena;
    size_t x_offset;
};

/* ---- the case ------------------------------------------------------------------------------- */

#define AT(member) offsetof(struct bench_case, member)
#define PARAM(member) offsetof(struct bench_case, params.member)

static const struct cofi_option words[] = {
    COFI_WORD_INT("T", AT(n_tokens), 1, MAX_BENCH_TOKENS),
    COFI_WORD_INT("H", PARAM(hidden), 1, MAX_BENCH_TOKENS),
    COFI_WORD_DTYPE("dtype", PARAM(dtype)),
    COFI_WORD_DTYPE("weight", PARAM(weight_dtype)),
    COFI_WORD_INT("max_tokens", PARAM(max_tokens), 1, 0x1p40),
    COFI_WORD_CHOICE("variant", PARAM(variant), "residual_norm|norm|only"),
    COFI_WORD_CHOICE("rounding", PARAM(rounding), "match_unfused|exact"),
    COFI_WORD_NUMBER("eps", AT(eps), 0, 1e30),
    COFI_WORD_CHOICE("weight_bias", PARAM(weight_bias), "0|1"),
    COFI_WORD_CHOICE("algorithm", PARAM(algorithm), "auto|one_shot|two_shot"),
    COFI_WORD_LEFT("one_shot_bytes", "all"),
    COFI_WORD_INT("one_shot_bytes", PARAM(one_shot_bytes), 1, 0x1p40),
    COFI_WORD_CHOICE("x", AT(in_arena), "memory|arena"),
    COFI_WORD_CHOICE("how", AT(is_graph), "eager|graph"),
    COFI_WORD_INT("count", AT(count), 1, MAX_COUNT),
    COFI_WORD_INT("max_ctas", AT(max_ctas), 0, INT32_MAX),
    COFI_WORD_LEFT("part", NULL), /* of a describe line: what the plan made of its params */
    COFI_WORD_LEFT("one_shot_rows", NULL), COFI_WORD_LEFT("units", NULL),
    {0}};

static cof_status read_case(const char *line, struct bench_case *c)
{
    *c = (struct bench_case){.params = COF_ALLREDUCE_RMSNORM_PARAMS_INIT, .count = COUNT,
                             .eps = -1};
    cof_allreduce_rmsnorm_params *p = &c->params;
    p->dtype = COF_BF16;
    COF_TRY(cofi_option_read_line(line, words, c));
    c->n_tokens = c->n_tokens ? c->n_tokens : p->max_tokens;
    p->max_tokens = p->max_tokens ? p->max_tokens : c->n_tokens;
    COF_FAIL_IF(!c->n_tokens || !p->hidden, COF_ERR_INVALID, "%s is missing: wanted T and H",
                c->n_tokens ? "H" : "T");
    COF_FAIL_IF(c->n_tokens > MAX_BENCH_TOKENS, COF_ERR_INVALID,
                "max_tokens = %lld: wanted T with it, or at most %lld", (long long)c->n_tokens,
                (long long)MAX_BENCH_TOKENS);
    p->max_ctas = (int)c->max_ctas;
    p->eps = c->eps >= 0 ? (float)c->eps : p->variant == COF_ALLREDUCE_ONLY ? 0 : 1e-5f;
    return COF_OK;
}

static bool has_tensor(const struct bench_case *c, int which)
{
    return which == RESIDUAL   ? c->params.variant == COF_ALLREDUCE_RESIDUAL_NORM
           : which == NORM_OUT ? c->params.variant != COF_ALLREDUCE_ONLY
                               : which != RESIDUAL_OUT || c->params.variant != COF_ALLREDUCE_NORM;
}

/* Of x, or any other tensor of a call on one rank. */
static size_t tensor_bytes(const struct bench_case *c)
{
    return (size_t)(c->n_tokens * c->params.hidden * cofi_dtype_bytes(c->params.dtype));
}

static size_t set_bytes(const struct bench_case *c)
{
    size_t n = 0;
    for (int which = 0; which < N_TENSORS; which++)
        n += has_tensor(c, which) ? tensor_bytes(c) : 0;
    return n;
}

/* x to all others in one hop; in two hops, to the owners of the rows and from them. AUTO: what is
 * fewer. */
static double wire_bytes(const struct bench_case *c, int n_ranks)
{
    double others = n_ranks - 1, x = (double)tensor_bytes(c);
    double one = others * n_ranks * x, two = 2 * others * x;
    switch (c->params.algorithm) {
    case COF_ALLREDUCE_AUTO: return one < two ? one : two;
    case COF_ALLREDUCE_TWO_SHOT: return two;
    default: return one;
    }
}

static cof_status size_case(const char *line, int n_ranks, struct cofi_bench_size *size_out)
{
    struct bench_case c;
    COF_TRY(read_case(line, &c));
    *size_out = (struct cofi_bench_size){
        .n_directions = 1,
        .set_bytes = (size_t)n_ranks * set_bytes(&c),
        .wire_bytes = {wire_bytes(&c, n_ranks)},
        .n_flows = n_ranks,
    };
    return COF_OK;
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* Slots from tensor number `tensor` on; the same numbers are the same data. */
static cof_status fill_all(struct allreduce_bench *b, cof_dtype dtype, uint64_t tensor, char *to,
                           size_t slot_bytes, int n_slots)
{
    struct cofi_bench_values values;
    COF_TRY(cofi_bench_values_make(dtype, &values));
    cof_status status = COF_OK;
    for (int s = 0; s < n_slots && status == COF_OK; s++)
        status = cofi_bench_values_fill(&values, b->job.world, 0, tensor + (uint64_t)s,
                                        to + (size_t)s * slot_bytes, slot_bytes);
    cofi_bench_values_free(&values);
    return status;
}

static cof_status open_arena(struct allreduce_bench *b)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_arena_pointers view = COF_ARENA_POINTERS_INIT;
    size_t bytes = (size_t)b->calls.n_sets * tensor_bytes(&b->c);
    COF_TRY(cof_allreduce_rmsnorm_workspace(b->job.team, &b->c.params, &sizes));
    COF_TRY(cof_arena_create(b->job.team, sizes.symmetric + sizes.words + bytes + 128, 0,
                             &b->arena));
    COF_TRY(cof_arena_alloc(b->arena, bytes, &b->x_offset));
    COF_TRY(cof_arena_view(b->arena, &view));
    b->data[X] = (char *)view.base[b->job.rank] + b->x_offset;
    return COF_OK;
}

static cof_status open_tensors(struct allreduce_bench *b)
{
    const cof_allreduce_rmsnorm_params *p = &b->c.params;
    cof_dtype weight = p->weight_dtype.bits ? p->weight_dtype : p->dtype;
    size_t weight_bytes = (size_t)(p->hidden * cofi_dtype_bytes(weight));
    size_t bytes = tensor_bytes(&b->c);
    if (b->c.in_arena)
        COF_TRY(open_arena(b));
    for (int which = 0; which < N_TENSORS; which++)
        if (has_tensor(&b->c, which) && !b->data[which])
            COF_TRY(cofi_bench_memory_open(b->job.world, (size_t)b->calls.n_sets * bytes,
                                           &b->data[which]));
    COF_TRY(cofi_bench_memory_open(b->job.world, weight_bytes, &b->weight));
    COF_TRY(fill_all(b, weight, 0, b->weight, weight_bytes, 1));
    COF_TRY(fill_all(b, p->dtype, (uint64_t)(2 + b->job.rank) * MAX_COUNT, b->data[X], bytes,
                     b->calls.n_sets));
    if (b->data[RESIDUAL])
        COF_TRY(fill_all(b, p->dtype, MAX_COUNT, b->data[RESIDUAL], bytes, b->calls.n_sets));
    return cofi_bench_calls_open(&b->calls);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static const cof_tensor *view(const struct allreduce_bench *b, int which, int slot,
                              cof_shape *shape, cof_tensor *tensor)
{
    if (!b->data[which])
        return NULL;
    *shape = (cof_shape){{b->c.n_tokens, b->c.params.hidden}};
    *tensor = cof_tensor_make(b->data[which] + (size_t)slot * tensor_bytes(&b->c),
                              cofi_check_memory_device(b->job.world), b->c.params.dtype, 2, shape);
    return tensor;
}

static cof_status run(void *bench, cof_plan *plan, int direction, int slot, cof_stream stream)
{
    (void)direction;
    struct allreduce_bench *b = bench;
    const cof_allreduce_rmsnorm_params *p = &b->c.params;
    cof_shape shape[N_TENSORS], hidden = {{p->hidden}};
    cof_tensor tensor[N_TENSORS];
    cof_tensor weight = cof_tensor_make(b->weight, cofi_check_memory_device(b->job.world),
                                        p->weight_dtype.bits ? p->weight_dtype : p->dtype, 1,
                                        &hidden);
    cof_allreduce_rmsnorm_args args = COF_ALLREDUCE_RMSNORM_ARGS_INIT;
    args.x = view(b, X, slot, &shape[X], &tensor[X]);
    args.residual = view(b, RESIDUAL, slot, &shape[RESIDUAL], &tensor[RESIDUAL]);
    args.weight = p->variant == COF_ALLREDUCE_ONLY ? NULL : &weight;
    args.residual_out = view(b, RESIDUAL_OUT, slot, &shape[RESIDUAL_OUT], &tensor[RESIDUAL_OUT]);
    args.norm_out = view(b, NORM_OUT, slot, &shape[NORM_OUT], &tensor[NORM_OUT]);
    if (b->c.in_arena)
        args.x_source = COF_IN_ARENA(b->x_offset + (size_t)slot * tensor_bytes(&b->c));
    return cof_allreduce_rmsnorm_run(plan, &args, stream);
}

static cof_status time_call(void *bench, int direction, int set, double *seconds)
{
    struct allreduce_bench *b = bench;
    return cofi_bench_calls_time(&b->calls, direction, set, seconds);
}

/* ---- a rank --------------------------------------------------------------------------------- */

static void destroy(void *bench)
{
    struct allreduce_bench *b = bench;
    if (!b)
        return;
    cofi_bench_calls_close(&b->calls);
    for (int which = 0; which < N_TENSORS; which++)
        if (which != X || !b->c.in_arena)
            cofi_bench_memory_close(b->job.world, b->data[which]);
    cofi_bench_memory_close(b->job.world, b->weight);
    cof_arena_destroy(b->arena);
    free(b);
}

/* What the plan will refuse is refused before memory is taken for its tensors. */
static cof_status check_case(const struct allreduce_bench *b)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    const bool is_cpu = !cofi_check_device(b->job.world);
    COF_FAIL_IF(b->c.is_graph && is_cpu, COF_ERR_UNSUPPORTED,
                "how = graph: wanted eager on the CPU");
    COF_TRY(cof_allreduce_rmsnorm_workspace(b->job.team, &b->c.params, &sizes));
    return is_cpu ? cofi_memory_check((size_t)b->calls.n_sets * set_bytes(&b->c) + sizes.local +
                                      sizes.symmetric)
                  : COF_OK;
}

static int count_slots(const struct allreduce_bench *b, int n_sets)
{
    if (!cofi_check_device(b->job.world))
        return n_sets;
    int64_t n = CACHED_BYTES / (int64_t)set_bytes(&b->c) + MIN_SLOTS;
    return (int)(n > b->c.count ? b->c.count : n);
}

static cof_status create(struct cofi_job *job, const char *line, int n_sets, void **bench_out)
{
    struct allreduce_bench *b = calloc(1, sizeof *b);
    COF_FAIL_IF(!b, COF_ERR_NOMEM, "bench: no memory");
    b->job = *job;
    cof_status status = read_case(line, &b->c);
    if (status == COF_OK) {
        b->calls = (struct cofi_bench_calls){.job = &b->job, .bench = b, .run = run,
                                             .n_sets = count_slots(b, n_sets),
                                             .count = b->c.count, .is_graph = b->c.is_graph};
        status = check_case(b);
    }
    if (status == COF_OK)
        status = open_tensors(b);
    if (status == COF_OK)
        *bench_out = b;
    else
        destroy(b);
    return status;
}

static cof_status make_plan(void *bench, cof_plan **plan_out)
{
    struct allreduce_bench *b = bench;
    cof_status status = cof_allreduce_rmsnorm_plan_create(b->job.team, &b->c.params, b->arena,
                                                          plan_out);
    cofi_bench_calls_take(&b->calls, status == COF_OK ? *plan_out : NULL);
    return status;
}

extern const struct cofi_op_bench cofi_allreduce_rmsnorm_bench;
const struct cofi_op_bench cofi_allreduce_rmsnorm_bench = {
    .shapes = cofi_bench_shapes_allreduce_rmsnorm,
    .cuda_shapes = cofi_bench_shapes_allreduce_rmsnorm_cuda,
    .directions = {"run"},
    .size = size_case,
    .create = create,
    .make_plan = make_plan,
    .run = run,
    .time = time_call,
    .destroy = destroy,
};
