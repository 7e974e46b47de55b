/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench grad_return`: whole calls; by section, the P runs of one. */
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/bench.h"
#include "ops/bench_calls.h"
#include "ops/check_memory.h"
#include "ops/grad_return/grad_return.h"
#include "ops/grad_return/grad_return_cases.h"
#include "symm/memory.h"
#include "tools/option_table.h"

enum { MAX_BENCH_DIM = 4096, MAX_COUNT = 1000, MIN_SLOTS = 2 };
#define CACHED_BYTES ((size_t)1 << 28) /* buffers rotate over so much: past the L2 of any device */
#define MAX_ELEMENTS (INT64_C(1) << 40) /* before head dims */

/* Of one buffer set: dk, dv. Partials by section lie one behind the other. */
struct buffers {
    char *in[2], *out[2];
};

struct bench_case {
    struct cofi_gr_case gr;
    cof_dtype partial, wire; /* as named */
    int64_t max_ctas;
    int64_t count; /* on devices: calls that are timed as one */
    int how;       /* 1: a graph; -1: not told, as in cases for the CPU */
};

struct grad_return_bench {
    struct cofi_job job;
    struct cofi_gr_case c;
    struct cofi_bench_calls calls;
    cof_layout layout;
    int n_sections;
    struct buffers *sets;
};

/* ---- The case ---- */

#define AT(member) offsetof(struct bench_case, member)
#define PARAM(member) offsetof(struct bench_case, gr.params.member)

static const struct cofi_option words[] = {
    COFI_WORD_INT("B", PARAM(n_batch), 1, 0x1p40),
    COFI_WORD_INT("S", PARAM(n_rows), 1, 0x1p40),
    COFI_WORD_INT("Hkv", PARAM(n_heads), 1, 0x1p40),
    COFI_WORD_INT("Dk", PARAM(head_dim_k), 1, MAX_BENCH_DIM),
    COFI_WORD_INT("Dv", PARAM(head_dim_v), 1, MAX_BENCH_DIM),
    COFI_WORD_DTYPE("dtype", PARAM(dtype)),
    COFI_WORD_DTYPE_OR("partial", AT(partial)),
    COFI_WORD_DTYPE_OR("wire", AT(wire)),
    COFI_WORD_CHOICE("layout", PARAM(layout), "zigzag|contiguous"),
    COFI_WORD_CHOICE("chunking", PARAM(chunking), "balanced|padded"),
    COFI_WORD_CHOICE("transfer", PARAM(transfer), "push|pull"),
    COFI_WORD_CHOICE("by", PARAM(by_section), "whole|section"),
    COFI_WORD_CHOICE("writers", AT(gr.writers), "all|causal"),
    COFI_WORD_INT("max_ctas", AT(max_ctas), 0, INT32_MAX),
    COFI_WORD_CHOICE("how", AT(how), "eager|graph"),
    COFI_WORD_INT("count", AT(count), 1, MAX_COUNT),
    /* A describe line says what the plan made of its params. */
    COFI_WORD_LEFT("lanes", NULL),
    COFI_WORD_LEFT("pieces", NULL),
    {0}};

static cof_status read_case(const char *line, struct bench_case *b)
{
    *b = (struct bench_case){.gr.params = COF_GRAD_RETURN_PARAMS_INIT, .count = 20, .how = -1};
    cof_grad_return_params *p = &b->gr.params;
    p->dtype = COF_BF16;
    p->n_batch = 1;
    COF_TRY(cofi_option_read_line(line, words, b));
    p->max_ctas = (int)b->max_ctas;
    COF_FAIL_IF(!p->n_rows || !p->n_heads || !p->head_dim_k, COF_ERR_INVALID,
                "%s is missing: wanted S, Hkv and Dk",
                !p->n_rows ? "S" : !p->n_heads ? "Hkv" : "Dk");
    COF_TRY(cofi_bench_is_f32("partial", b->partial, p->dtype, &p->partial_f32));
    COF_TRY(cofi_bench_is_f32("wire", b->wire, p->dtype, &p->wire_f32));
    p->head_dim_v = p->head_dim_v ? p->head_dim_v : p->head_dim_k;
    __int128 elements = (__int128)p->n_batch * p->n_rows * p->n_heads;
    COF_FAIL_IF(elements > MAX_ELEMENTS, COF_ERR_INVALID,
                "B * S * Hkv is past the address space");
    return COF_OK;
}

static size_t row_elements(const struct cofi_gr_case *c, int is_v)
{
    const cof_grad_return_params *p = &c->params;
    return (size_t)(p->n_batch * p->n_heads * (is_v ? p->head_dim_v : p->head_dim_k));
}

static size_t partial_bytes(const struct cofi_gr_case *c)
{
    return c->params.partial_f32 ? sizeof(float) : (size_t)cofi_dtype_bytes(c->params.dtype);
}

/* Rows of a rank's partials: of all sections together, padding included. */
static int64_t partial_rows(const struct cofi_gr_case *c, const cof_layout *layout)
{
    int64_t rows = 0;
    for (int r = 0; r < layout->n_ranks; r++)
        rows += cof_layout_local_rows(layout, r);
    return c->params.by_section ? rows : c->params.n_rows;
}

/* Rows that ranks send to others, summed over the ranks. */
static int64_t sent_rows(const struct cofi_gr_case *c, const cof_layout *layout)
{
    cof_grad_return_args args = COF_GRAD_RETURN_ARGS_INIT;
    int64_t rows = 0;
    args.writers = c->writers;
    for (int writer = 0; writer < layout->n_ranks; writer++)
        for (int owner = 0; owner < layout->n_ranks; owner++) {
            int64_t begin, end;
            cofi_gr_rows(layout, owner, cofi_gr_halves(layout, &args, writer, owner), &begin, &end);
            rows += owner == writer ? 0 : end - begin;
        }
    return rows;
}

static cof_layout layout_of(const struct cofi_gr_case *c, int n_ranks)
{
    return (cof_layout){c->params.layout, c->params.chunking, n_ranks, c->params.n_rows};
}

static cof_status size_case(const char *line, int n_ranks, struct cofi_bench_size *size_out)
{
    struct bench_case b;
    COF_TRY(read_case(line, &b));
    const struct cofi_gr_case *c = &b.gr;
    cof_layout layout = layout_of(c, n_ranks);
    size_t element = (size_t)cofi_dtype_bytes(c->params.dtype), n = (size_t)n_ranks;
    size_t both = row_elements(c, 0) + row_elements(c, 1);
    size_t in = n * (size_t)partial_rows(c, &layout) * partial_bytes(c), out = 0;
    for (int r = 0; r < n_ranks; r++)
        out += (size_t)cof_layout_local_rows(&layout, r) * element;
    *size_out = (struct cofi_bench_size){
        .n_directions = 1,
        .set_bytes = (in + out) * both,
        .wire_bytes = {(double)sent_rows(c, &layout) * (double)both *
                       (double)(c->params.wire_f32 ? sizeof(float) : element)},
        .n_flows = b.how >= 0 ? n_ranks : 0, /* on the CPU all of them share the memory */
    };
    return COF_OK;
}

/* ---- A rank ---- */

static cof_status make_set(struct grad_return_bench *b, const struct cofi_bench_values *values,
                           int set)
{
    cof_world *world = b->job.world;
    struct buffers *s = &b->sets[set];
    int64_t local = cof_layout_local_rows(&b->layout, b->job.rank);
    for (int is_v = 0; is_v < 2; is_v++) {
        size_t row = row_elements(&b->c, is_v);
        size_t in = (size_t)partial_rows(&b->c, &b->layout) * row * partial_bytes(&b->c);
        size_t out = (size_t)local * row * (size_t)cofi_dtype_bytes(b->c.params.dtype);
        COF_TRY(cofi_bench_memory_open(world, in, &s->in[is_v]));
        COF_TRY(cofi_bench_memory_open(world, out, &s->out[is_v]));
        COF_TRY(cofi_bench_values_fill(values, world, (uint64_t)b->job.rank,
                                       (uint64_t)(2 * set + is_v), s->in[is_v], in));
    }
    return COF_OK;
}

static cof_status make_sets(struct grad_return_bench *b)
{
    struct cofi_bench_values values;
    COF_TRY(cofi_bench_values_make(b->c.params.partial_f32 ? COF_F32 : b->c.params.dtype, &values));
    cof_status status = COF_OK;
    for (int s = 0; s < b->calls.n_sets && status == COF_OK; s++)
        status = make_set(b, &values, s);
    cofi_bench_values_free(&values);
    return status;
}

static void destroy(void *bench)
{
    struct grad_return_bench *b = bench;
    if (!b)
        return;
    cofi_bench_calls_close(&b->calls);
    for (int s = 0; b->sets && s < b->calls.n_sets; s++)
        for (int is_v = 0; is_v < 2; is_v++) {
            cofi_bench_memory_close(b->job.world, b->sets[s].in[is_v]);
            cofi_bench_memory_close(b->job.world, b->sets[s].out[is_v]);
        }
    free(b->sets);
    free(b);
}

/* What the plan will refuse is refused before memory is taken for its tensors. */
static cof_status check_case(const struct grad_return_bench *b, size_t tensor_bytes)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    const bool is_cpu = !cofi_check_device(b->job.world);
    COF_FAIL_IF(b->calls.is_graph && is_cpu, COF_ERR_UNSUPPORTED,
                "how = graph: wanted eager on the CPU");
    COF_TRY(cof_grad_return_workspace(b->job.team, &b->c.params, &sizes));
    return is_cpu ? cofi_memory_check(tensor_bytes + sizes.local + sizes.symmetric) : COF_OK;
}

static int count_sets(const struct grad_return_bench *b, size_t set_bytes, int n_sets)
{
    if (!cofi_check_device(b->job.world))
        return n_sets;
    int64_t n = (int64_t)(CACHED_BYTES / (set_bytes + 1)) + MIN_SLOTS;
    return (int)(n > b->calls.count ? b->calls.count : n);
}

static cof_status open_bench(struct grad_return_bench *b, size_t rank_bytes, int n_sets)
{
    b->calls.n_sets = count_sets(b, rank_bytes, n_sets);
    COF_TRY(check_case(b, rank_bytes * (size_t)b->calls.n_sets));
    b->sets = calloc((size_t)b->calls.n_sets, sizeof *b->sets);
    COF_FAIL_IF(!b->sets, COF_ERR_NOMEM, "bench: no memory");
    COF_TRY(make_sets(b));
    return cofi_bench_calls_open(&b->calls);
}

static cof_status make_plan(void *bench, cof_plan **plan_out)
{
    struct grad_return_bench *b = bench;
    cof_status status = cof_grad_return_plan_create(b->job.team, &b->c.params, NULL, plan_out);
    cofi_bench_calls_take(&b->calls, status == COF_OK ? *plan_out : NULL);
    return status;
}

/* One run, on the partials that begin at this row of their buffers. */
static cof_status run_part(struct grad_return_bench *b, cof_plan *plan, const struct buffers *s,
                           int64_t first, int64_t rows, cof_stream stream)
{
    const cof_grad_return_params *p = &b->c.params;
    cof_device device = cofi_check_memory_device(b->job.world);
    cof_dtype type = p->partial_f32 ? COF_F32 : p->dtype;
    int64_t local = cof_layout_local_rows(&b->layout, b->job.rank);
    cof_shape in[2], out[2];
    cof_tensor t[2], sums[2];
    for (int is_v = 0; is_v < 2; is_v++) {
        int64_t dim = is_v ? p->head_dim_v : p->head_dim_k;
        size_t at = (size_t)first * row_elements(&b->c, is_v) * partial_bytes(&b->c);
        in[is_v] = (cof_shape){{rows, p->n_batch, p->n_heads, dim}};
        out[is_v] = (cof_shape){{local, p->n_batch, p->n_heads, dim}};
        t[is_v] = cof_tensor_make(s->in[is_v] + at, device, type, 4, &in[is_v]);
        sums[is_v] = cof_tensor_make(s->out[is_v], device, p->dtype, 4, &out[is_v]);
    }
    cof_grad_return_args args = COF_GRAD_RETURN_ARGS_INIT;
    args.dk = &t[0];
    args.dv = &t[1];
    args.dk_out = &sums[0];
    args.dv_out = &sums[1];
    args.writers = b->c.writers;
    return cof_grad_return_run(plan, &args, stream);
}

static cof_status run(void *bench, cof_plan *plan, int direction, int set, cof_stream stream)
{
    (void)direction;
    struct grad_return_bench *b = bench;
    int n = b->job.n_ranks;
    int64_t first = 0;
    for (int i = 1; i <= b->n_sections; i++) {
        int owner = (b->job.rank - i + n) % n;
        int64_t rows = b->n_sections == 1 ? partial_rows(&b->c, &b->layout)
                                          : cof_layout_local_rows(&b->layout, owner);
        COF_TRY(run_part(b, plan, &b->sets[set], first, rows, stream));
        first += rows;
    }
    return COF_OK;
}

static cof_status create(struct cofi_job *job, const char *line, int n_sets, void **bench_out)
{
    struct cofi_bench_size size;
    struct bench_case c;
    COF_TRY(read_case(line, &c));
    COF_TRY(size_case(line, job->n_ranks, &size));
    struct grad_return_bench *b = calloc(1, sizeof *b);
    COF_FAIL_IF(!b, COF_ERR_NOMEM, "bench: no memory");
    *b = (struct grad_return_bench){
        .job = *job, .c = c.gr, .layout = layout_of(&c.gr, job->n_ranks),
        .calls = {.job = &b->job, .bench = b, .run = run, .count = c.count,
                  .is_graph = c.how == 1},
        .n_sections = c.gr.params.by_section ? job->n_ranks : 1};
    cof_status status = open_bench(b, size.set_bytes / (size_t)job->n_ranks, n_sets);
    if (status == COF_OK)
        *bench_out = b;
    else
        destroy(b);
    return status;
}

static cof_status time_call(void *bench, int direction, int set, double *seconds)
{
    struct grad_return_bench *b = bench;
    return cofi_bench_calls_time(&b->calls, direction, set, seconds);
}

const struct cofi_op_bench cofi_grad_return_bench = {
    .shapes = cofi_bench_shapes_grad_return,
    .cuda_shapes = cofi_bench_shapes_grad_return_cuda,
    .directions = {"run"},
    .size = size_case,
    .create = create,
    .make_plan = make_plan,
    .run = run,
    .time = time_call,
    .destroy = destroy,
};
