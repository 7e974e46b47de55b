/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One rank of `cofuse run attention`. */
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/error.h"
#include "ops/attention/attention_tool.h"
#include "ops/check_memory.h"

struct rank_work {
    struct cofi_attention_run *run;
    int rank;
    cof_world *world;
    cof_plan *plan;
    cof_layout layout;
    int64_t n_rows; /* local */
    struct cofi_check_memory memory[COFI_AT_N]; /* where the rank works */
    cof_shape shape[COFI_AT_N];
    cof_tensor tensor[COFI_AT_N];
    void *saved; /* saved_kv */
    cof_shape saved_shape;
    cof_tensor saved_kv;
};

/* Rows between a global tensor and the host's copy of this rank's. */
static void copy_rows(struct rank_work *work, int which, bool to_local)
{
    struct cofi_attention_run *run = work->run;
    int64_t n_global = run->params.n_rows;
    struct cofi_attention_geometry g = cofi_attention_geometry(&run->params, which, 1);
    char *global = cofi_attention_run_tensor(run, which), *local = work->memory[which].host;
    for (int64_t row = 0; row < work->n_rows; row++) {
        int64_t global_row = cof_layout_global_row(&work->layout, work->rank, row);
        for (int64_t i = 0; i < g.n_outer && global_row >= 0; i++) {
            char *there = global + (i * n_global + global_row) * g.row_bytes;
            char *here = local + (i * work->n_rows + row) * g.row_bytes;
            memcpy(to_local ? here : there, to_local ? there : here, (size_t)g.row_bytes);
        }
    }
}

/* Local tensors: inputs filled, outputs all NaN, so that a row left out is seen. */
static cof_status make_tensors(struct rank_work *work)
{
    const cof_attention_params *p = &work->run->params;
    work->layout = (cof_layout){p->layout, p->chunking, work->run->head.n_ranks, p->n_rows};
    work->n_rows = cof_layout_local_rows(&work->layout, work->rank);
    for (int i = 0; i < COFI_AT_N; i++) {
        if (work->run->offset[i] == 0)
            continue;
        struct cofi_attention_geometry g = cofi_attention_geometry(p, i, work->n_rows);
        size_t bytes = (size_t)(g.n_outer * g.row_bytes * work->n_rows);
        struct cofi_check_memory *m = &work->memory[i];
        COF_TRY(cofi_check_memory_open(work->world, bytes, m));
        memcpy(work->shape[i].dim, g.shape, sizeof g.shape);
        work->tensor[i] = cof_tensor_make(m->data, cofi_check_memory_device(work->world), g.dtype,
                                          g.ndim, &work->shape[i]);
        if (i >= COFI_AT_N_INPUTS)
            continue;
        copy_rows(work, i, true);
        COF_TRY(cofi_check_memory_upload(m));
    }
    return COF_OK;
}

static cof_status make_saved(struct rank_work *work)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    COF_TRY(cof_attention_workspace(cof_world_team(work->world), &work->run->params, &sizes));
    if (sizes.saved == 0)
        return COF_OK;
    work->saved = aligned_alloc(128, (sizes.saved + 127) / 128 * 128);
    COF_FAIL_IF(!work->saved, COF_ERR_NOMEM, "%zu bytes for saved_kv", sizes.saved);
    work->saved_shape.dim[0] = (int64_t)sizes.saved;
    work->saved_kv = cof_tensor_make(work->saved, (cof_device){COF_DEVICE_CPU, 0}, COF_U8, 1,
                                     &work->saved_shape);
    return COF_OK;
}

static cof_status timed_call(struct rank_work *work, cof_attention_args *args, bool backward,
                             double *seconds)
{
    COF_TRY(cof_team_barrier(cof_world_team(work->world)));
    int64_t begin = cofi_now();
    COF_TRY(backward ? cof_attention_backward(work->plan, args, COF_STREAM_NOW)
                     : cof_attention_forward(work->plan, args, COF_STREAM_NOW));
    *seconds = (double)(cofi_now() - begin) * 1e-9;
    return COF_OK;
}

static cof_status run_calls(struct rank_work *work)
{
    cof_tensor *t = work->tensor;
    cof_attention_args args = COF_ATTENTION_ARGS_INIT;
    args.q = &t[COFI_AT_Q];
    args.k = &t[COFI_AT_K];
    args.v = &t[COFI_AT_V];
    args.o = &t[COFI_AT_O];
    args.lse = &t[COFI_AT_LSE];
    args.saved_kv = work->saved ? &work->saved_kv : NULL;
    cof_attention_args backward_args = args;
    backward_args.dout = &t[COFI_AT_DOUT];
    backward_args.dq = &t[COFI_AT_DQ];
    backward_args.dk = &t[COFI_AT_DK];
    backward_args.dv = &t[COFI_AT_DV];
    double *times = cofi_attention_run_times(work->run, work->rank), warm_up[2];
    for (int i = -1; i < work->run->head.repeat; i++) {
        double *seconds = i < 0 ? warm_up : times + 2 * i;
        COF_TRY(timed_call(work, &args, false, &seconds[0]));
        if (work->run->backward)
            COF_TRY(timed_call(work, &backward_args, true, &seconds[1]));
    }
    return COF_OK;
}

static cof_status take_results(struct rank_work *work)
{
    for (int i = COFI_AT_O; i < COFI_AT_N; i++) {
        if (!work->run->offset[i])
            continue;
        COF_TRY(cofi_check_memory_download(&work->memory[i]));
        copy_rows(work, i, false);
    }
    return COF_OK;
}

static cof_status run_rank(void *arg, cof_world *world)
{
    struct rank_work *work = arg;
    struct cofi_attention_run *run = work->run;
    work->world = world;
    COF_TRY(make_tensors(work));
    COF_TRY(make_saved(work));
    COF_TRY(cof_attention_plan_create(cof_world_team(world), &run->params, NULL, &work->plan));
    cofi_run_describe(&run->head, work->rank, work->plan);
    COF_TRY(run_calls(work));
    COF_TRY(take_results(work));
    return run->measure_rate ? cofi_attention_measure_rate(run, world) : COF_OK;
}

static void close_rank(void *arg)
{
    struct rank_work *work = arg;
    cof_plan_destroy(work->plan);
    for (int i = 0; i < COFI_AT_N; i++)
        cofi_check_memory_close(&work->memory[i]);
    free(work->saved);
}

int cofi_attention_rank(void *run, const cof_world_options *options, int rank)
{
    struct rank_work work = {.run = run, .rank = rank};
    return cofi_run_rank(options, rank, run_rank, close_rank, &work);
}
