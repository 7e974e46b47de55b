/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One rank of `cofuse run allreduce_rmsnorm`. */
#include <string.h>

#include "core/clock.h"
#include "core/error.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_tool.h"
#include "ops/check_memory.h"

struct rank_work {
    struct cofi_arn_run *run;
    int rank;
    cof_world *world;
    cof_plan *plan;
    cof_shape rows, weight;
    /* Where the rank works; unopened: the variant has none. */
    struct cofi_check_memory in[COFI_ARN_N_INPUTS], out[COFI_ARN_N_OUTPUTS];
};

/* ---- tensors -------------------------------------------------------------------------------- */

static cof_status make_tensors(struct rank_work *w)
{
    struct cofi_arn_run *run = w->run;
    size_t bytes = cofi_arn_run_bytes(run);
    for (int i = 0; i < COFI_ARN_N_INPUTS; i++) {
        const char *from = (const char *)run + run->in[i];
        if (!run->in[i])
            continue;
        if (i == COFI_ARN_X)
            from += (size_t)w->rank * bytes;
        size_t n = i == COFI_ARN_WEIGHT ? cofi_arn_run_weight_bytes(run) : bytes;
        COF_TRY(cofi_check_memory_open(w->world, n, &w->in[i]));
        memcpy(w->in[i].host, from, n);
        COF_TRY(cofi_check_memory_upload(&w->in[i]));
    }
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (run->out[i])
            COF_TRY(cofi_check_memory_open(w->world, bytes, &w->out[i]));
    return COF_OK;
}

static cof_status take_results(struct rank_work *w)
{
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++) {
        if (!w->run->out[i])
            continue;
        COF_TRY(cofi_check_memory_download(&w->out[i]));
        memcpy(cofi_arn_run_out(w->run, i, w->rank), w->out[i].host, w->out[i].bytes);
    }
    return COF_OK;
}

static cof_tensor tensor_of(struct rank_work *w, const struct cofi_check_memory *memory,
                            cof_dtype dtype, int ndim)
{
    return cof_tensor_make(memory->data, cofi_check_memory_device(w->world), dtype, ndim,
                           ndim == 1 ? &w->weight : &w->rows);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static cof_status run_calls(struct rank_work *w)
{
    const cof_allreduce_rmsnorm_params *p = &w->run->params;
    cof_tensor x = tensor_of(w, &w->in[COFI_ARN_X], p->dtype, 2);
    cof_tensor residual = tensor_of(w, &w->in[COFI_ARN_RESIDUAL], p->dtype, 2);
    cof_tensor weight = tensor_of(w, &w->in[COFI_ARN_WEIGHT], p->weight_dtype, 1);
    cof_tensor residual_out = tensor_of(w, &w->out[COFI_ARN_RESIDUAL_OUT], p->dtype, 2);
    cof_tensor norm_out = tensor_of(w, &w->out[COFI_ARN_NORM_OUT], p->dtype, 2);
    cof_allreduce_rmsnorm_args args = COF_ALLREDUCE_RMSNORM_ARGS_INIT;
    args.x = &x;
    args.residual = w->run->in[COFI_ARN_RESIDUAL] ? &residual : NULL;
    args.weight = w->run->in[COFI_ARN_WEIGHT] ? &weight : NULL;
    args.residual_out = &residual_out;
    args.norm_out = w->run->out[COFI_ARN_NORM_OUT] ? &norm_out : NULL;
    double *best = (double *)((char *)w->run + w->run->times) + w->rank;
    for (int i = -1; i < w->run->head.repeat; i++) {
        COF_TRY(cof_team_barrier(cof_world_team(w->world)));
        int64_t begin = cofi_now();
        COF_TRY(cof_allreduce_rmsnorm_run(w->plan, &args, COF_STREAM_NOW));
        double seconds = (double)(cofi_now() - begin) * 1e-9;
        *best = i <= 0 || seconds < *best ? seconds : *best;
    }
    return COF_OK;
}

static cof_status run_rank(void *arg, cof_world *world)
{
    struct rank_work *w = arg;
    struct cofi_arn_run *run = w->run;
    w->world = world;
    COF_TRY(make_tensors(w));
    COF_TRY(cof_allreduce_rmsnorm_plan_create(cof_world_team(world), &run->params, NULL,
                                              &w->plan));
    cofi_run_describe(&run->head, w->rank, w->plan);
    COF_TRY(run_calls(w));
    return take_results(w);
}

static void close_rank(void *arg)
{
    struct rank_work *w = arg;
    for (int i = 0; i < COFI_ARN_N_INPUTS; i++)
        cofi_check_memory_close(&w->in[i]);
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        cofi_check_memory_close(&w->out[i]);
    cof_plan_destroy(w->plan);
}

int cofi_arn_tool_rank(void *memory, const cof_world_options *options, int rank)
{
    struct cofi_arn_run *run = memory;
    struct rank_work w = {.run = run, .rank = rank,
                          .rows = {{run->n_tokens, run->params.hidden}},
                          .weight = {{run->params.hidden}}};
    return cofi_run_rank(options, rank, run_rank, close_rank, &w);
}
