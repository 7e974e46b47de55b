/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench trimul`: forward, and backward with all gradients. */
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/bench.h"
#include "ops/bench_gemm.h"
#include "ops/check.h"
#include "ops/trimul/trimul_check_local.h"

enum { FORWARD, BACKWARD, N_VALUES = 1 << 16 };

struct trimul_bench {
    struct cofi_job job;
    struct cofi_tm_case c;
    cof_trimul_params params; /* points into c */
    struct cofi_tm_data data; /* of the weights alone */
    struct cofi_tm_local_weights weights;
    struct cofi_tm_local *sets;
    int n_sets;
    char *memory; /* of the weights */
};

/* "dtype", "f32", or the dtype of the case by its name. */
static cof_status read_mix(const char *key, int dtype, int *mix)
{
    COF_FAIL_IF(*mix > 1 && *mix - 2 != dtype, COF_ERR_INVALID,
                "%s: wanted dtype, f32 or the dtype of the case", key);
    *mix = *mix == 1 && dtype != 2;
    return COF_OK;
}

static cof_status read_case(const char *line, struct cofi_tm_case *c)
{
    *c = (struct cofi_tm_case){.b = 1, .bias = COFI_TM_BIAS_ALL, .mask = COFI_TM_BINARY};
    COF_TRY(cofi_option_read_line(line, cofi_tm_bench_words, c));
    COF_TRY(read_mix("norm", c->dtype, &c->norm));
    COF_TRY(read_mix("mask", c->dtype, &c->mask_dtype));
    COF_FAIL_IF(c->n.n != 1, COF_ERR_INVALID, "N: wanted one, N=256");
    COF_FAIL_IF(!c->d, COF_ERR_INVALID, "D is missing");
    COF_FAIL_IF(c->b < 1, COF_ERR_INVALID, "B = 0: wanted at least 1");
    c->h = c->h ? c->h : c->d;
    c->calls = c->forward_only ? COFI_TM_FORWARD : COFI_TM_BACKWARD;
    double elements = (double)c->b * (double)c->n.at[0] * (double)c->n.at[0] * (double)c->d;
    COF_FAIL_IF(elements > 0x1p56, COF_ERR_INVALID, "B * N * N * D is past the address space");
    return COF_OK;
}

/* What goes from all ranks to others, for each pair and feature: a, b and tri; back dtri, da and
 * db, and with save = none those of forward once more. tri and dtri of fp16 are fp32, da and db
 * always. */
static cof_status size_case(const char *line, int n_ranks, struct cofi_bench_size *size_out)
{
    struct cofi_tm_case c;
    COF_TRY(read_case(line, &c));
    int64_t pairs = c.b * c.n.at[0] * c.n.at[0], element = cofi_dtype_bytes(cofi_tm_dtype(&c));
    int64_t wide = c.dtype == 1 ? 4 : element, forward = 2 * element + wide, backward = wide + 8;
    double moved = (double)(pairs * c.h) * (n_ranks - 1) / n_ranks;
    int n_tensors = c.forward_only ? 2 : 4; /* x, out; dout, dx */
    *size_out = (struct cofi_bench_size){
        .n_directions = c.forward_only ? 1 : 2,
        .set_bytes = (size_t)(pairs * (n_tensors * c.d + 1) * element),
        .flops = {cofi_tm_flops(&c, c.n.at[0], false), cofi_tm_flops(&c, c.n.at[0], true)},
        .wire_bytes = {(double)forward * moved,
                       (double)(backward + (c.save ? 0 : forward)) * moved},
        .n_flows = n_ranks,
    };
    return COF_OK;
}

/* ---- a rank --------------------------------------------------------------------------------- */

/* Weights as check has them, without the inputs of a problem. */
static cof_status make_weights(struct trimul_bench *b)
{
    struct cofi_tm_data *data = &b->data;
    data->c = &b->c;
    cofi_tm_data_lay_grads(data);
    b->memory = malloc((size_t)data->grad_elements * sizeof(float));
    COF_FAIL_IF(!b->memory, COF_ERR_NOMEM, "bench: no memory for the weights");
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++) {
        data->weight[w] = b->memory + (size_t)data->grad_at[w] * sizeof(float);
        cofi_tm_data_fill_weight(data, w);
    }
    return cofi_tm_weights_open(b->job.world, data, &b->weights);
}

/* Standard normal values; the time of a call depends on them only where they would be denormal,
 * infinite or NaN. Masks: 0 for one in eight. */
static cof_status fill_inputs(const struct trimul_bench *b, struct cofi_tm_local *set)
{
    static const int inputs[] = {COFI_TM_T_X, COFI_TM_T_MASK, COFI_TM_T_DOUT};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) {
        struct cofi_check_memory *m = &set->view[inputs[i]].memory;
        cof_dtype dtype = set->view[inputs[i]].tensor.dtype;
        size_t element = m->base ? (size_t)cofi_dtype_bytes(dtype) : 1, n = m->bytes / element;
        for (size_t e = 0; e < n && e < N_VALUES; e++)
            cofi_check_store(m->host, dtype, (int64_t)e,
                             inputs[i] == COFI_TM_T_MASK
                                 ? e % 8 > 0
                                 : cofi_check_normal((uint64_t)b->job.rank, i, e));
        for (size_t done = N_VALUES * element; done < m->bytes; done *= 2)
            memcpy(m->host + done, m->host, m->bytes - done < done ? m->bytes - done : done);
        if (m->base)
            COF_TRY(cofi_check_memory_upload(m));
    }
    return COF_OK;
}

static void destroy(void *bench)
{
    struct trimul_bench *b = bench;
    if (!b)
        return;
    for (int s = 0; s < b->n_sets; s++)
        cofi_tm_local_close(&b->sets[s]);
    cofi_tm_weights_close(&b->weights);
    free(b->sets);
    free(b->memory);
    free(b);
}

static cof_status make_sets(struct trimul_bench *b, int n_sets)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    COF_TRY(cof_trimul_workspace(b->job.team, &b->params, &sizes));
    struct cofi_tm_span span = {.c = &b->c, .n_batch = b->c.b, .saved_bytes = sizes.saved,
                                 .backward = !b->c.forward_only, .grads = true};
    COF_TRY(cof_trimul_block_of(&b->params, b->job.n_ranks, b->job.rank, b->c.n.at[0],
                                &span.block));
    b->sets = calloc((size_t)n_sets, sizeof *b->sets);
    COF_FAIL_IF(!b->sets, COF_ERR_NOMEM, "%d buffer sets: no memory", n_sets);
    for (; b->n_sets < n_sets; b->n_sets++) {
        cof_status status = cofi_tm_local_open(b->job.world, &span, &b->sets[b->n_sets]);
        if (status == COF_OK)
            status = fill_inputs(b, &b->sets[b->n_sets]);
        if (status != COF_OK)
            cofi_tm_local_close(&b->sets[b->n_sets]);
        COF_TRY(status);
    }
    return make_weights(b);
}

static cof_status create(struct cofi_job *job, const char *line, int n_sets, void **bench_out)
{
    struct trimul_bench *b = calloc(1, sizeof *b);
    COF_FAIL_IF(!b, COF_ERR_NOMEM, "bench: no memory");
    b->job = *job;
    cof_status status = read_case(line, &b->c);
    if (status == COF_OK) {
        cofi_tm_params(&b->c, &b->params);
        status = make_sets(b, n_sets);
    }
    if (status == COF_OK)
        *bench_out = b;
    else
        destroy(b);
    return status;
}

static cof_status make_plan(void *bench, cof_plan **plan_out)
{
    struct trimul_bench *b = bench;
    COF_TRY(cof_trimul_plan_create(b->job.team, &b->params, NULL, plan_out));
    return cof_trimul_set_weights(*plan_out, &b->weights.weights, 0, COF_STREAM_NOW);
}

static cof_status run(void *bench, cof_plan *plan, int direction, int set, cof_stream stream)
{
    struct trimul_bench *b = bench;
    cof_trimul_args args;
    cofi_tm_local_args(&b->sets[set], direction == BACKWARD, &args);
    return direction == BACKWARD ? cof_trimul_backward(plan, &args, stream)
                                 : cof_trimul_forward(plan, &args, stream);
}

/* A tile of the triangle, and one of the linear layers. */
static cof_status rate(void *bench, double seconds, double *rate_out)
{
    struct trimul_bench *b = bench;
    double n = (double)b->c.n.at[0], d = (double)b->c.d, h = (double)b->c.h;
    const struct cofi_bench_product products[] = {
        {COFI_GEMM_NT, 128, 128, b->c.n.at[0], 2 * n * h},
        {COFI_GEMM_NT, 128, b->c.h < 256 ? 2 * b->c.h : 512, b->c.d, 10 * d * h + 2 * d * d}};
    return cofi_bench_gemm_rate(b->job.world, cofi_tm_dtype(&b->c), products, 2, seconds,
                                rate_out);
}

extern const struct cofi_op_bench cofi_trimul_bench;
const struct cofi_op_bench cofi_trimul_bench = {
    .shapes = cofi_bench_shapes_trimul,
    .directions = {[FORWARD] = "forward", [BACKWARD] = "backward"},
    .size = size_case,
    .create = create,
    .make_plan = make_plan,
    .run = run,
    .rate = rate,
    .destroy = destroy,
};
