/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One rank of `cofuse run trimul`. */
#include <string.h>

#include "core/clock.h"
#include "core/error.h"
#include "ops/trimul/trimul_check_local.h"
#include "ops/trimul/trimul_tool.h"

struct rank_work {
    struct cofi_tm_run *run;
    int rank;
    cof_world *world;
    cof_plan *plan;
    struct cofi_tm_data data;
    struct cofi_tm_local_weights weights;
    struct cofi_tm_local local;
};

static cof_status timed_call(struct rank_work *w, const cof_trimul_args *args, bool backward,
                             double *seconds)
{
    COF_TRY(cof_team_barrier(cof_world_team(w->world)));
    int64_t begin = cofi_now();
    COF_TRY(backward ? cof_trimul_backward(w->plan, args, COF_STREAM_NOW)
                     : cof_trimul_forward(w->plan, args, COF_STREAM_NOW));
    *seconds = (double)(cofi_now() - begin) * 1e-9;
    return COF_OK;
}

static cof_status run_calls(struct rank_work *w)
{
    double *best = (double *)cofi_tm_run_at(w->run, w->run->times) + 2 * w->rank;
    for (int i = -1; i < w->run->head.repeat; i++)
        for (int direction = 0; direction < (w->run->c.forward_only ? 1 : 2); direction++) {
            cof_trimul_args args;
            double seconds;
            cofi_tm_local_args(&w->local, direction, &args);
            COF_TRY(timed_call(w, &args, direction, &seconds));
            if (i <= 0 || seconds < best[direction])
                best[direction] = seconds;
        }
    return COF_OK;
}

/* out and dx of every rank; the gradients, the same on all, of rank 0. */
static cof_status take_results(struct rank_work *w)
{
    struct cofi_tm_run *run = w->run;
    struct cofi_check_result result = {COFI_PASSED, ""};
    COF_TRY(cofi_tm_local_collect(&w->local, &result));
    COF_FAIL_IF(result.verdict != COFI_PASSED, COF_ERR_INTERNAL, "%s", result.text);
    cofi_tm_local_take(&w->local, cofi_tm_run_at(run, run->out), cofi_tm_run_at(run, run->dx));
    for (int i = 0; i < COFI_TRI_WEIGHTS && run->grads && w->rank == 0; i++)
        memcpy((float *)cofi_tm_run_at(run, run->grads) + w->data.grad_at[i],
               w->local.grad[i].host, w->local.grad[i].bytes);
    return COF_OK;
}

static cof_status run_rank(void *arg, cof_world *world)
{
    struct rank_work *w = arg;
    struct cofi_tm_run *run = w->run;
    cof_team *team = cof_world_team(world);
    cof_trimul_params params;
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    w->world = world;
    cofi_tm_params(&run->c, &params);
    cofi_tm_run_data(run, &w->data);
    COF_TRY(cof_trimul_workspace(team, &params, &sizes));
    struct cofi_tm_span span = {.c = &run->c, .problem = &w->data.problem[0],
                                 .n_batch = run->c.b, .saved_bytes = sizes.saved,
                                 .backward = !run->c.forward_only, .grads = true};
    COF_TRY(cof_trimul_block_of(&params, run->head.n_ranks, w->rank, run->c.n.at[0], &span.block));
    COF_TRY(cofi_tm_local_open(w->world, &span, &w->local));
    COF_TRY(cofi_tm_local_prepare(&w->local));
    COF_TRY(cofi_tm_weights_open(w->world, &w->data, &w->weights));
    COF_TRY(cof_trimul_plan_create(team, &params, NULL, &w->plan));
    cofi_run_describe(&run->head, w->rank, w->plan);
    COF_TRY(cof_trimul_set_weights(w->plan, &w->weights.weights, COF_TRIMUL_CHECK,
                                   COF_STREAM_NOW));
    COF_TRY(run_calls(w));
    return take_results(w);
}

static void close_rank(void *arg)
{
    struct rank_work *w = arg;
    cof_plan_destroy(w->plan);
    cofi_tm_local_close(&w->local);
    cofi_tm_weights_close(&w->weights);
}

int cofi_tm_tool_rank(void *run, const cof_world_options *options, int rank)
{
    struct rank_work w = {.run = run, .rank = rank};
    return cofi_run_rank(options, rank, run_rank, close_rank, &w);
}
