/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench attention`: tensors and arguments are made by the code that check uses. On CUDA
 * devices all of a call is timed, or a part of it (part=), and the rate that is the yardstick is
 * that of this rank's sections alone, in the same process. */
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_check_local.h"
#include "ops/attention/attention_tool.h"
#include "ops/attention/attention_tool_table.h"
#include "ops/bench.h"
#include "ops/bench_calls.h"
#include "symm/memory.h"
#include "tools/option_table.h"

enum { FORWARD, BACKWARD };
enum { COUNT = 10 }; /* calls on a device that are timed as one */

struct bench_case {
    struct cofi_attention_case c;
    int is_graph, part;
    int parts; /* COFI_PART_.. bits */
    int64_t count;
    cof_dtype wire; /* as named */
    struct cofi_ints window;
};

struct attention_bench {
    struct cofi_job job;
    struct cofi_attention_case c;
    int parts;
    struct cofi_bench_calls calls;
    const cof_plan *whole; /* the plan that has run a whole call, on a device */
    struct cofi_attention_local *sets;
    void **saved; /* save_kv: a buffer a set */
    cof_shape saved_shape;
};

/* ---- The case ---- */

#define AT(member) offsetof(struct bench_case, member)
#define PARAM(member) offsetof(struct bench_case, c.params.member)

static const struct cofi_option words[] = {
    COFI_WORD_INT("B", PARAM(n_batch), 1, 0x1p40),
    COFI_WORD_INT("S", PARAM(n_rows), 1, 0x1p40),
    COFI_WORD_INT("H", PARAM(n_heads), 1, 0x1p40),
    COFI_WORD_INT("Hkv", PARAM(n_kv_heads), 1, 0x1p40),
    COFI_WORD_INT("Dqk", PARAM(head_dim_qk), 1, 4096),
    COFI_WORD_INT("Dv", PARAM(head_dim_v), 1, 4096),
    COFI_WORD_DTYPE("dtype", PARAM(dtype)),
    COFI_WORD_CHOICE("format", PARAM(format), "bshd|sbhd"),
    COFI_WORD_CHOICE("mask", PARAM(mask), "none|causal"),
    COFI_WORD_CHOICE("layout", PARAM(layout), "zigzag|contiguous"),
    COFI_WORD_CHOICE("chunking", PARAM(chunking), "balanced|padded"),
    COFI_WORD_NUMBER("scale", PARAM(scale), -1e30, 1e30),
    COFI_WORD_DTYPE_OR("wire", AT(wire)),
    COFI_WORD_CHOICE("direction", PARAM(forward_only), "both|forward"),
    COFI_WORD_CHOICE("schedule", PARAM(schedule), "default|ring|gather"),
    COFI_WORD_CHOICE("save_kv", PARAM(save_kv), "0|1"),
    COFI_WORD_CHOICE("only_compact", PARAM(only_compact), "0|1"),
    COFI_WORD_LEFT("window", "none"),
    COFI_WORD_INTS("window", AT(window), ":2", -1, 0x1p56),
    COFI_WORD_CHOICE("how", AT(is_graph), "eager|graph"),
    COFI_WORD_CHOICE("part", AT(part), "all|sections|merges|transfer"),
    COFI_WORD_INT("count", AT(count), 1, 0x1p20),
    {0}};

static cof_status read_case(const char *line, struct bench_case *bench)
{
    static const int parts[] = {COFI_PART_ALL, COFI_PART_SECTIONS, COFI_PART_MERGES,
                                COFI_PART_TRANSFER};
    *bench = (struct bench_case){.c.params = COF_ATTENTION_PARAMS_INIT};
    struct cofi_attention_case *c = &bench->c;
    cof_attention_params *p = &c->params;
    p->dtype = COF_BF16;
    p->n_batch = 1;
    COF_TRY(cofi_option_read_line(line, words, bench));
    bench->parts = parts[bench->part];
    p->has_window = bench->window.n > 0;
    p->window_left = bench->window.at[0];
    p->window_right = bench->window.at[1];
    COF_TRY(cofi_bench_is_f32("wire", bench->wire, p->dtype, &p->wire_f32));
    COF_FAIL_IF(!p->n_rows || !p->n_heads || !p->head_dim_qk, COF_ERR_INVALID,
                "%s is missing: wanted S, H and Dqk",
                !p->n_rows ? "S" : !p->n_heads ? "H" : "Dqk");
    p->n_kv_heads = p->n_kv_heads ? p->n_kv_heads : p->n_heads;
    p->head_dim_v = p->head_dim_v ? p->head_dim_v : p->head_dim_qk;
    COF_FAIL_IF(p->n_heads % p->n_kv_heads, COF_ERR_INVALID,
                "Hkv = %lld: wanted a divisor of H = %lld", (long long)p->n_kv_heads,
                (long long)p->n_heads);
    __int128 elements = (__int128)p->n_batch * p->n_rows * p->n_heads;
    COF_FAIL_IF(elements > INT64_MAX / 65536, COF_ERR_INVALID,
                "B * S * H is past the address space");
    c->calls = p->forward_only ? COFI_CALLS_FORWARD : COFI_CALLS_BACKWARD;
    return COF_OK;
}

/* Rows that pass between ranks, summed over the ranks: keys that are fetched, and gradients that go
 * home. */
struct moved_rows {
    int64_t keys, gradients;
};

static struct moved_rows moved_rows(const cof_attention_params *p, int n_ranks)
{
    cof_layout layout = {p->layout, p->chunking, n_ranks, p->n_rows};
    struct cofi_sight sight = {p->mask, p->has_window, {p->window_left, p->window_right}};
    struct moved_rows moved = {0, 0};
    for (int rank = 0; rank < n_ranks; rank++)
        for (int owner = 0; owner < n_ranks; owner++) {
            struct cofi_rows_range rows[2];
            int n = cofi_attention_needed(&layout, &sight, rank, owner, rows);
            for (int i = 0; i < n && owner != rank; i++)
                moved.keys += rows[i].end - rows[i].begin;
            if (n > 0 && owner != rank)
                moved.gradients += rows[n - 1].end - rows[0].begin;
        }
    return moved;
}

static cof_status size_case(const char *line, int n_ranks, struct cofi_bench_size *size_out)
{
    struct bench_case bench;
    COF_TRY(read_case(line, &bench));
    const cof_attention_params *p = &bench.c.params;
    const bool computes = bench.parts & COFI_PART_SECTIONS;
    const bool moves = bench.parts & COFI_PART_TRANSFER;
    size_t element = (size_t)cofi_dtype_bytes(p->dtype);
    size_t rows = (size_t)(p->n_batch * p->n_rows), heads = (size_t)p->n_heads;
    size_t both_dims = (size_t)(p->head_dim_qk + p->head_dim_v);
    size_t all_heads = heads + (size_t)p->n_kv_heads; /* q with o, and k with v */
    size_t tensors = rows * all_heads * both_dims * element, lse = rows * heads * sizeof(float);
    struct moved_rows moved = moved_rows(p, n_ranks);
    double row = (double)(p->n_batch * p->n_kv_heads) * (double)both_dims;
    /* Saved by forward, backward does not move keys again. */
    double keys = (double)moved.keys * row * (double)element;
    double gradients = (double)moved.gradients * row * (double)(p->wire_f32 ? 4 : element);
    *size_out = (struct cofi_bench_size){
        .n_directions = p->forward_only ? 1 : 2,
        .set_bytes = tensors * (p->forward_only ? 1 : 2) + lse + (p->save_kv ? (size_t)keys : 0),
        .flops = {computes ? cofi_attention_flops(p, false) : 0,
                  computes ? cofi_attention_flops(p, true) : 0},
        .wire_bytes = {moves ? keys : 0, gradients + (p->save_kv ? 0 : keys)},
    };
    return COF_OK;
}

/* ---- A rank ---- */

static cof_status fill_inputs(struct attention_bench *b)
{
    const int n_sets = b->calls.n_sets;
    struct cofi_bench_values values;
    COF_TRY(cofi_bench_values_make(b->c.params.dtype, &values));
    cof_status status = COF_OK;
    for (int s = 0; s < n_sets; s++)
        for (int t = 0; t < COFI_CT_O; t++) {
            struct cofi_check_memory *m = &b->sets[s].tensor[t].memory;
            if (!m->base || status != COF_OK)
                continue;
            cofi_bench_values_copy(&values, (uint64_t)(b->job.rank * n_sets + s), (uint64_t)t,
                                   m->host, m->bytes);
            status = cofi_check_memory_upload(m);
        }
    cofi_bench_values_free(&values);
    return status;
}

static void destroy(void *bench)
{
    struct attention_bench *b = bench;
    if (!b)
        return;
    cofi_bench_calls_close(&b->calls);
    for (int s = 0; s < b->calls.n_sets; s++) {
        cofi_attention_local_free(&b->sets[s]);
        free(b->saved[s]);
    }
    free(b->sets);
    free(b->saved);
    free(b);
}

/* What the plan will refuse is refused before memory is taken for its tensors. */
static cof_status check_case(struct cofi_job *job, const struct bench_case *bench,
                             size_t tensor_bytes)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    const bool is_device = cofi_check_device(job->world) != NULL;
    const bool is_plain =
        !bench->is_graph && bench->parts == COFI_PART_ALL && bench->count <= 1;
    COF_FAIL_IF(!is_device && !is_plain,
                COF_ERR_UNSUPPORTED, "how, part, count: wanted eager, all, 1 on the CPU");
    COF_TRY(cof_attention_workspace(job->team, &bench->c.params, &sizes));
    return cofi_memory_check(2 * tensor_bytes + (is_device ? 0 : sizes.local + sizes.symmetric));
}

static cof_status make_saved(struct attention_bench *b)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    COF_TRY(cof_attention_workspace(b->job.team, &b->c.params, &sizes));
    b->saved_shape.dim[0] = (int64_t)sizes.saved;
    for (int s = 0; s < b->calls.n_sets && sizes.saved > 0; s++) {
        b->saved[s] = aligned_alloc(128, (sizes.saved + 127) / 128 * 128);
        COF_FAIL_IF(!b->saved[s], COF_ERR_NOMEM, "saved_kv: no memory for %zu bytes", sizes.saved);
    }
    return COF_OK;
}

static cof_status make_sets(struct attention_bench *b, int n_sets)
{
    b->sets = calloc((size_t)n_sets, sizeof *b->sets);
    b->saved = calloc((size_t)n_sets, sizeof *b->saved);
    COF_FAIL_IF(!b->sets || !b->saved, COF_ERR_NOMEM, "%d buffer sets: no memory", n_sets);
    for (; b->calls.n_sets < n_sets; b->calls.n_sets++)
        COF_TRY(cofi_attention_local_open(&b->job, &b->c, &b->sets[b->calls.n_sets]));
    COF_TRY(make_saved(b));
    return fill_inputs(b);
}

static cof_status make_plan(void *bench, cof_plan **plan_out)
{
    struct attention_bench *b = bench;
    cof_status status = cof_attention_plan_create(b->job.team, &b->c.params, NULL, plan_out);
    cofi_bench_calls_take(&b->calls, status == COF_OK ? *plan_out : NULL);
    b->whole = NULL;
    return status;
}

static cof_status run(void *bench, cof_plan *plan, int direction, int set, cof_stream stream)
{
    struct attention_bench *b = bench;
    cof_attention_args args;
    cofi_attention_local_args(&b->sets[set], direction == BACKWARD, &args);
    cof_tensor saved = cof_tensor_make(b->saved[set], (cof_device){COF_DEVICE_CPU, 0}, COF_U8, 1,
                                       &b->saved_shape);
    args.saved_kv = b->saved[set] ? &saved : NULL;
    return direction == BACKWARD ? cof_attention_backward(plan, &args, stream)
                                 : cof_attention_forward(plan, &args, stream);
}

/* What is left out has run before: the buffers are filled. */
static cof_status run_parts(struct attention_bench *b, cof_plan *made, int parts, int set,
                            cof_stream stream)
{
    struct cofi_attention_plan *plan = (struct cofi_attention_plan *)made;
    struct cofi_attention_call call;
    cof_attention_args args;
    cofi_attention_local_args(&b->sets[set], false, &args);
    COF_TRY(cofi_attention_read_call(plan, &args, false, &call));
    return plan->backend->run_parts(plan, &call, parts, stream);
}

static cof_status run_case(void *bench, cof_plan *plan, int direction, int set, cof_stream stream)
{
    struct attention_bench *b = bench;
    return b->parts == COFI_PART_ALL ? run(b, plan, direction, set, stream)
                                     : run_parts(b, plan, b->parts, set, stream);
}

static cof_status run_sections(void *bench, cof_plan *plan, int direction, int set,
                               cof_stream stream)
{
    (void)direction;
    return run_parts(bench, plan, COFI_PART_SECTIONS, set, stream);
}

static cof_status create(struct cofi_job *job, const char *line, int n_sets, void **bench_out)
{
    struct cofi_bench_size size;
    struct bench_case c;
    COF_TRY(read_case(line, &c));
    COF_TRY(size_case(line, job->n_ranks, &size));
    COF_TRY(check_case(job, &c, size.set_bytes * (size_t)n_sets / (size_t)job->n_ranks));
    struct attention_bench *b = calloc(1, sizeof *b);
    COF_FAIL_IF(!b, COF_ERR_NOMEM, "bench: no memory");
    *b = (struct attention_bench){
        .job = *job, .c = c.c, .parts = c.parts,
        .calls = {.job = &b->job, .bench = b, .run = run_case, .is_graph = c.is_graph,
                  .count = c.count ? c.count : COUNT}};
    cof_status status = make_sets(b, n_sets);
    if (status == COF_OK)
        status = cofi_bench_calls_open(&b->calls);
    if (status == COF_OK)
        *bench_out = b;
    else
        destroy(b);
    return status;
}

/* On a device a whole call first, for what the parts find. */
static cof_status run_whole(struct attention_bench *b)
{
    if (!b->calls.device || b->whole == b->calls.plan)
        return COF_OK;
    b->whole = b->calls.plan;
    COF_TRY(run(b, b->calls.plan, FORWARD, 0, COF_STREAM_NOW));
    return cof_team_barrier(b->job.team); /* a graph may be made next */
}

static cof_status time_call(void *bench, int direction, int set, double *seconds)
{
    struct attention_bench *b = bench;
    COF_TRY(run_whole(b));
    return cofi_bench_calls_time(&b->calls, direction, set, seconds);
}

/* flop/s of the sections alone, for this rank's share of the flops. */
static cof_status rate_of_sections(struct attention_bench *b, double limit, double *rate_out)
{
    double least = 0, seconds = 0, total = 0;
    COF_TRY(run_whole(b));
    for (int i = 0; i < 3 || (i < 50 && total < limit); i++) {
        COF_TRY(cofi_bench_calls_time_other(&b->calls, run_sections, &seconds));
        least = i == 0 || seconds < least ? seconds : least;
        total += seconds * (double)b->calls.count;
    }
    *rate_out = cofi_attention_flops(&b->c.params, false) / b->job.n_ranks / least;
    return cof_team_barrier(b->job.team);
}

static cof_status rate(void *bench, double seconds, double *rate_out)
{
    struct attention_bench *b = bench;
    return b->calls.device
               ? rate_of_sections(b, seconds, rate_out)
               : cofi_attention_tile_rate(b->job.world, &b->c.params, seconds, rate_out);
}

const struct cofi_op_bench cofi_attention_bench = {
    .shapes = cofi_bench_shapes_attention,
    .cuda_shapes = cofi_bench_shapes_attention_cuda,
    .directions = {[FORWARD] = "forward", [BACKWARD] = "backward"},
    .size = size_case,
    .create = create,
    .make_plan = make_plan,
    .run = run,
    .time = time_call,
    .rate = rate,
    .destroy = destroy,
};
