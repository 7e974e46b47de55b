/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One rank of `cofuse run allreduce_rmsnorm`. */
#include <stdio.h>

#include "core/clock.h"
#include "core/error.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_tool.h"
#include "tools/run_op.h"

static const cof_device cpu = {COF_DEVICE_CPU, 0};

static cof_status run_calls(struct cofi_arn_run *run, cof_team *team, cof_plan *plan, int rank)
{
    const cof_allreduce_rmsnorm_params *p = &run->params;
    bool has_residual = run->in[COFI_ARN_RESIDUAL], has_norm = run->out[COFI_ARN_NORM_OUT];
    char *base = (char *)run;
    cof_shape rows = {{run->n_tokens, p->hidden}}, row = {{p->hidden}};
    cof_tensor x = cof_tensor_make(
        base + run->in[COFI_ARN_X] + (size_t)rank * cofi_arn_run_bytes(run), cpu, p->dtype, 2,
        &rows);
    cof_tensor residual = x, residual_out = x, norm_out = x;
    cof_tensor weight = cof_tensor_make(base + run->in[COFI_ARN_WEIGHT], cpu, p->weight_dtype, 1,
                                        &row);
    residual.data = base + run->in[COFI_ARN_RESIDUAL];
    residual_out.data = cofi_arn_run_out(run, COFI_ARN_RESIDUAL_OUT, rank);
    norm_out.data = cofi_arn_run_out(run, COFI_ARN_NORM_OUT, rank);
    cof_allreduce_rmsnorm_args args = COF_ALLREDUCE_RMSNORM_ARGS_INIT;
    args.x = &x;
    args.residual = has_residual ? &residual : NULL;
    args.weight = has_norm ? &weight : NULL;
    args.residual_out = &residual_out;
    args.norm_out = has_norm ? &norm_out : NULL;
    double *best = (double *)(base + run->times) + rank;
    for (int i = -1; i < run->repeat; i++) {
        COF_TRY(cof_team_barrier(team));
        int64_t begin = cofi_now();
        COF_TRY(cof_allreduce_rmsnorm_run(plan, &args, COF_STREAM_NOW));
        double seconds = (double)(cofi_now() - begin) * 1e-9;
        *best = i <= 0 || seconds < *best ? seconds : *best;
    }
    return COF_OK;
}

static cof_status run_rank(struct cofi_arn_run *run, cof_world *world, cof_plan **plan, int rank)
{
    cof_team *team = cof_world_team(world);
    COF_TRY(cof_allreduce_rmsnorm_plan_create(team, &run->params, NULL, plan));
    if (rank == 0)
        snprintf(run->describe, sizeof run->describe, "%s", cof_plan_describe(*plan));
    return run_calls(run, team, *plan, rank);
}

int cofi_arn_tool_rank(struct cofi_arn_run *run, const cof_world_options *options, int rank)
{
    cof_world *world = NULL;
    cof_plan *plan = NULL;
    cof_status status = cof_world_create(options, &world);
    if (status == COF_OK)
        status = run_rank(run, world, &plan, rank);
    int code = cofi_run_exit(rank, status);
    cof_plan_destroy(plan);
    cof_world_destroy(world);
    return code;
}
