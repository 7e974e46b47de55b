/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check grad_return`: rounds of calls, all of a round in flight at once. */
#define _GNU_SOURCE /* usleep */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/grad_return/grad_return_check_run.h"
#include "ops/runtime/runtime_check.h"

/* ---- the caller's memory: the job's shared bytes, or blocks of the devices' ----------------- */

static size_t peer_bytes(const struct cofi_gr_check *run, int is_v)
{
    const cof_grad_return_params *p = &run->c.params;
    int64_t rows = cof_layout_local_rows(&run->layout, 0);
    size_t bytes = (size_t)(run->job->n_ranks * rows * p->n_batch * p->n_heads * run->dim[is_v]) *
                   (size_t)cofi_dtype_bytes(p->dtype);
    return (bytes + 127) / 128 * 128 + 128;
}

static size_t block_bytes(const struct cofi_gr_check *run)
{
    return peer_bytes(run, 0) + peer_bytes(run, 1) +
           (size_t)(run->job->n_ranks + 3) / 4 * 4 * sizeof(uint32_t) * 4;
}

static void set_peers(struct cofi_gr_check *run, size_t r, char *at)
{
    size_t n = (size_t)run->job->n_ranks;
    run->peers[r] = at;
    run->peers[n + r] = at + peer_bytes(run, 0);
    run->peers[2 * n + r] = at + peer_bytes(run, 0) + peer_bytes(run, 1);
}

static cof_status open_blocks(struct cofi_gr_check *run)
{
    size_t n = (size_t)run->job->n_ranks, own = (size_t)run->job->rank, block = block_bytes(run);
    if (run->device) {
        COF_TRY(cofi_check_blocks_open(run->job->team, block, &run->blocks));
        for (size_t r = 0; r < n; r++)
            set_peers(run, r, run->blocks.base[r]);
        COF_TRY(run->device->fill(run->job->world, run->peers[own], 0xff, block));
        return run->device->fill(run->job->world, run->peers[2 * n + own], 0, n * 16);
    }
    COF_FAIL_IF(n * block > run->job->shared_bytes, COF_ERR_INTERNAL,
                "check: a case needs %zu shared bytes of %zu", n * block, run->job->shared_bytes);
    for (size_t r = 0; r < n; r++)
        set_peers(run, r, (char *)run->job->shared + r * block);
    memset(run->peers[own], 0xff, block); /* NaN, but for the epochs */
    memset(run->peers[2 * n + own], 0, n * 16);
    return COF_OK;
}

static cof_status make_peers(struct cofi_gr_check *run)
{
    size_t n = (size_t)run->job->n_ranks;
    if (!run->c.params.caller_orders_reuse)
        return COF_OK;
    run->peers = calloc(3 * n, sizeof *run->peers);
    COF_FAIL_IF(!run->peers, COF_ERR_NOMEM, "check: no memory");
    COF_TRY(open_blocks(run));
    run->peers_struct = (cof_grad_return_peers){
        .size = sizeof run->peers_struct, .n_ranks = (int)n, .dk = run->peers,
        .dv = run->peers + n, .dk_bytes = peer_bytes(run, 0), .dv_bytes = peer_bytes(run, 1),
        .ready = (uint32_t *const *)(run->peers + 2 * n), .ready_stride = 16};
    run->c.params.peers = &run->peers_struct;
    return cof_team_barrier(run->job->team);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static void delay(struct cofi_gr_check *run)
{
    uint64_t x = cofi_check_random(run->seed, 70 + (uint64_t)run->job->rank, run->n_delays++);
    if (run->c.random_delays && (run->c.n_rounds < 10 || x % 8 == 0))
        usleep((useconds_t)(x / 64 % 2000));
}

static cof_status enqueue(struct cofi_gr_check *run, int call, bool delays)
{
    struct cofi_gr_check_call *k = &run->call[call];
    bool caller = run->c.params.caller_orders_reuse;
    run->epoch++;
    for (int s = 0; s < run->n_sections; s++) {
        cof_grad_return_args args = COF_GRAD_RETURN_ARGS_INIT;
        args.dk = &k->section[s].in[0].view;
        args.dv = &k->section[s].in[1].view;
        args.dk_out = s == run->n_sections - 1 ? &k->out[0].view : NULL;
        args.dv_out = s == run->n_sections - 1 ? &k->out[1].view : NULL;
        args.writers = run->c.writers;
        args.writer_table = run->c.writers == COF_WRITERS_TABLE ? k->table : NULL;
        args.epoch = caller ? run->epoch : 0;
        if (delays)
            delay(run);
        COF_TRY(cof_grad_return_run(run->plan[call % run->n_plans], &args, run->stream));
    }
    if (!caller)
        return COF_OK;
    COF_TRY(cof_stream_sync(run->stream)); /* the caller orders reuse */
    return cof_team_barrier(run->job->team);
}

static cof_status captured_calls(void *arg, cof_stream stream)
{
    struct cofi_gr_check *run = arg;
    (void)stream; /* the run's */
    for (int i = 0; i < run->c.n_calls; i++)
        COF_TRY(enqueue(run, i, false));
    return COF_OK;
}

static cof_status capture(struct cofi_gr_check *run)
{
    const struct cofi_check_work work = {captured_calls, run};
    COF_TRY(run->device->capture(run->job->world, &work, run->stream, &run->graph));
    return cof_team_barrier(run->job->team);
}

/* With a graph every third round is eager, another one on each rank. */
static cof_status run_calls(struct cofi_gr_check *run, int round)
{
    COF_TRY(cofi_gr_check_poison(run));
    if (run->graph && (round + run->job->rank) % 3 != 2) {
        delay(run);
        COF_TRY(run->device->replay(run->job->world, run->graph, run->stream));
    } else {
        for (int i = 0; i < run->c.n_calls; i++)
            COF_TRY(enqueue(run, i, true));
    }
    COF_TRY(cof_stream_sync(run->stream));
    return cof_team_query(run->job->team); /* on devices streams do not tell */
}

/* ---- one case ------------------------------------------------------------------------------- */

/* The second plan goes the other way. */
static void choose_params(struct cofi_gr_check *run)
{
    run->n_plans = run->c.is_shared ? 2 : 1;
    run->params[0] = run->params[1] = run->c.params;
    run->params[1].transfer = run->c.params.transfer == COF_TRANSFER_PUSH ? COF_TRANSFER_PULL
                                                                          : COF_TRANSFER_PUSH;
}

/* As large as the workspace call says, where the plans share one, or epochs begin elsewhere. The
 * caller's memory has none. */
static cof_status open_arena(struct cofi_gr_check *run)
{
    size_t most = 0, sum = 0;
    bool is_own = run->job->attach || run->c.is_shared || run->c.first_epoch != 1;
    for (int i = 0; i < run->n_plans; i++) {
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
        COF_TRY(cof_grad_return_workspace(run->job->team, &run->params[i], &sizes));
        most = sizes.symmetric > most ? sizes.symmetric : most;
        sum += sizes.words;
    }
    return is_own && !run->c.params.peers
               ? cofi_check_arena_open(run->job, run->job->team, most + sum, 0,
                                       run->c.first_epoch, &run->arena)
               : COF_OK;
}

static cof_status open_plans(struct cofi_gr_check *run)
{
    choose_params(run);
    COF_TRY(open_arena(run));
    for (int i = 0; i < run->n_plans; i++)
        COF_TRY(cof_grad_return_plan_create(run->job->team, &run->params[i], run->arena.arena,
                                            &run->plan[i]));
    COF_TRY(cof_stream_create(run->job->world, 0, &run->stream));
    COF_TRY(cof_team_barrier(run->job->team));
    return run->c.is_captured ? capture(run) : COF_OK;
}

/* Processes that take turns on a device wait for whole turns, of milliseconds. */
static int count_rounds(const struct cofi_gr_check *run)
{
    const struct cofi_runtime_device *device = cofi_runtime_device(run->job->world);
    int n_turns = device ? device->n_turns(run->job->world) : 1;
    int most = n_turns > 1 ? 8 : run->c.n_rounds;
    return run->c.n_rounds < most ? run->c.n_rounds : most;
}

static cof_status run_rounds(struct cofi_gr_check *run, struct cofi_check_result *result)
{
    int n_rounds = count_rounds(run);
    COF_TRY(open_plans(run));
    for (int round = 0; round < n_rounds; round++) {
        COF_TRY(run_calls(run, round));
        for (int i = 0; i < run->c.n_calls; i++)
            COF_TRY(cofi_gr_check_inspect(run, i, round, result));
        COF_TRY(cof_team_barrier(run->job->team)); /* with the deadline of long work */
    }
    return cofi_check_agree(run->job->team, result);
}

static void close_plans(struct cofi_gr_check *run)
{
    if (run->device)
        run->device->release(run->job->world, run->graph);
    cof_stream_destroy(run->stream);
    for (int i = 0; i < COFI_GR_MAX_PLANS; i++)
        cof_plan_destroy(run->plan[i]);
    cofi_check_arena_close(&run->arena);
}

static void set_up(struct cofi_gr_check *run, struct cofi_job *job,
                   const struct cofi_check_options *options, int64_t idx)
{
    *run = (struct cofi_gr_check){.job = job, .seed = options->seed};
    run->blocks.fd = run->arena.blocks.fd = -1;
    cofi_gr_case(options, idx, &run->c);
    const cof_grad_return_params *p = &run->c.params;
    run->layout = (cof_layout){p->layout, p->chunking, job->n_ranks, p->n_rows};
    run->local_rows = cof_layout_local_rows(&run->layout, job->rank);
    run->dim[0] = p->head_dim_k;
    run->dim[1] = p->head_dim_v;
    run->partial = p->partial_f32 ? COF_F32 : p->dtype;
    run->n_sections = p->by_section ? job->n_ranks : 1;
}

static cof_status run_case(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result)
{
    struct cofi_gr_check run;
    *result = (struct cofi_check_result){COFI_PASSED, ""};
    set_up(&run, job, options, idx);
    run.device = cofi_check_device(job->world);
    if (run.device && run.c.params.caller_orders_reuse && cofi_runtime_are_threads(job->world)) {
        *result = (struct cofi_check_result){COFI_SKIPPED, "blocks of processes"};
        return COF_OK;
    }
    cof_status status = make_peers(&run);
    for (int i = 0; i < run.c.n_calls && status == COF_OK; i++)
        status = cofi_gr_check_make_call(&run, i);
    if (status == COF_OK)
        status = cof_team_barrier(job->team);
    if (status == COF_OK)
        status = run_rounds(&run, result);
    close_plans(&run);
    cofi_gr_check_free_calls(&run);
    if (run.device)
        cofi_check_blocks_close(&run.blocks);
    free(run.peers);
    return status;
}

static size_t shared_bytes(const struct cofi_check_options *options)
{
    size_t most = 0;
    for (int64_t i = 0; i < cofi_gr_n_cases(options) && !options->cuda; i++) {
        struct cofi_job job = {.n_ranks = options->n_ranks};
        struct cofi_gr_check run;
        set_up(&run, &job, options, i);
        size_t bytes = run.c.params.caller_orders_reuse
                           ? (size_t)options->n_ranks * block_bytes(&run)
                           : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

const struct cofi_op_check cofi_grad_return_check = {
    .has_cuda = true,
    .n_cases = cofi_gr_n_cases,
    .case_line = cofi_gr_case_line,
    .shared_bytes = shared_bytes,
    .run_case = run_case,
};
