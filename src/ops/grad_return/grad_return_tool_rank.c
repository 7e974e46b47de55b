/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One rank of `cofuse run grad_return`. */
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/error.h"
#include "ops/check_memory.h"
#include "ops/grad_return/grad_return_tool.h"

struct rank_work {
    struct cofi_gr_run *run;
    int rank;
    cof_world *world;
    cof_plan *plan;
    cof_stream stream;
    cof_layout layout;
    int n_sections;
    /* dk, dv, where the rank works: partials by section (one: all rows in global order), sums */
    struct cofi_check_memory *in[2], out[2];
};

static int owner_of(const struct rank_work *w, int section)
{
    return (w->rank - section - 1 + 2 * w->run->head.n_ranks) % w->run->head.n_ranks;
}

/* Copies between global rows and an owner's local ones. */
static void copy_rows(const struct rank_work *w, int owner, int is_v, char *local, char *global,
                      bool to_local)
{
    size_t bytes = cofi_gr_row_bytes(w->run, is_v);
    for (int64_t row = 0; row < cof_layout_local_rows(&w->layout, owner); row++) {
        int64_t at = cof_layout_global_row(&w->layout, owner, row);
        char *here = local + (size_t)row * bytes, *there = global + (size_t)at * bytes;
        if (at >= 0)
            memcpy(to_local ? here : there, to_local ? there : here, bytes);
    }
}

static int64_t rows_of(const struct rank_work *w, int section)
{
    return w->run->params.by_section ? cof_layout_local_rows(&w->layout, owner_of(w, section))
                                     : w->run->params.n_rows;
}

static cof_status make_partial(struct rank_work *w, int section, int is_v)
{
    struct cofi_gr_run *run = w->run;
    struct cofi_check_memory *m = &w->in[is_v][section];
    size_t row = cofi_gr_row_bytes(run, is_v), rows = (size_t)run->params.n_rows;
    char *own = (char *)run + run->in[is_v] + (size_t)w->rank * rows * row;
    COF_TRY(cofi_check_memory_open(w->world, (size_t)rows_of(w, section) * row, m));
    if (run->params.by_section)
        copy_rows(w, owner_of(w, section), is_v, m->host, own, true);
    else
        memcpy(m->host, own, m->bytes);
    return cofi_check_memory_upload(m);
}

static cof_status make_tensors(struct rank_work *w)
{
    for (int is_v = 0; is_v < 2; is_v++) {
        size_t row = cofi_gr_row_bytes(w->run, is_v);
        w->in[is_v] = calloc((size_t)w->n_sections, sizeof *w->in[is_v]);
        COF_FAIL_IF(!w->in[is_v], COF_ERR_NOMEM, "no memory");
        for (int s = 0; s < w->n_sections; s++)
            COF_TRY(make_partial(w, s, is_v));
        COF_TRY(cofi_check_memory_open(
            w->world, (size_t)cof_layout_local_rows(&w->layout, w->rank) * row, &w->out[is_v]));
    }
    return COF_OK;
}

static cof_status one_call(struct rank_work *w)
{
    const cof_grad_return_params *p = &w->run->params;
    cof_device device = cofi_check_memory_device(w->world);
    for (int s = 0; s < w->n_sections; s++) {
        int64_t local = cof_layout_local_rows(&w->layout, w->rank);
        cof_shape in[2], out[2];
        cof_tensor t[4];
        for (int is_v = 0; is_v < 2; is_v++) {
            int64_t dim = is_v ? p->head_dim_v : p->head_dim_k;
            in[is_v] = (cof_shape){{rows_of(w, s), p->n_batch, p->n_heads, dim}};
            out[is_v] = (cof_shape){{local, p->n_batch, p->n_heads, dim}};
            t[is_v] = cof_tensor_make(w->in[is_v][s].data, device, p->dtype, 4, &in[is_v]);
            t[2 + is_v] = cof_tensor_make(w->out[is_v].data, device, p->dtype, 4, &out[is_v]);
        }
        cof_grad_return_args args = COF_GRAD_RETURN_ARGS_INIT;
        args.dk = &t[0];
        args.dv = &t[1];
        args.dk_out = &t[2];
        args.dv_out = &t[3];
        args.writers = w->run->writers;
        COF_TRY(cof_grad_return_run(w->plan, &args, w->stream));
    }
    COF_TRY(cof_stream_sync(w->stream));
    return cof_team_query(cof_world_team(w->world)); /* on devices streams do not tell */
}

static cof_status run_rank(void *arg, cof_world *world)
{
    struct rank_work *w = arg;
    struct cofi_gr_run *run = w->run;
    w->world = world;
    double *best = (double *)((char *)run + run->times) + w->rank;
    w->layout = (cof_layout){run->params.layout, run->params.chunking, run->head.n_ranks,
                             run->params.n_rows};
    w->n_sections = run->params.by_section ? run->head.n_ranks : 1;
    COF_TRY(make_tensors(w));
    cof_team *team = cof_world_team(w->world);
    COF_TRY(cof_grad_return_plan_create(team, &run->params, NULL, &w->plan));
    COF_TRY(cof_stream_create(w->world, 0, &w->stream));
    cofi_run_describe(&run->head, w->rank, w->plan);
    for (int i = -1; i < run->head.repeat; i++) {
        COF_TRY(cof_team_barrier(team));
        int64_t begin = cofi_now();
        COF_TRY(one_call(w));
        double seconds = (double)(cofi_now() - begin) * 1e-9;
        *best = i <= 0 || seconds < *best ? seconds : *best;
    }
    COF_TRY(cof_team_barrier(team)); /* nobody leaves while another one asks the team */
    for (int is_v = 0; is_v < 2; is_v++) {
        COF_TRY(cofi_check_memory_download(&w->out[is_v]));
        copy_rows(w, w->rank, is_v, w->out[is_v].host, (char *)run + run->out[is_v], false);
    }
    return COF_OK;
}

static void close_rank(void *arg)
{
    struct rank_work *w = arg;
    cof_stream_destroy(w->stream);
    cof_plan_destroy(w->plan);
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int s = 0; w->in[is_v] && s < w->n_sections; s++)
            cofi_check_memory_close(&w->in[is_v][s]);
        free(w->in[is_v]);
        cofi_check_memory_close(&w->out[is_v]);
    }
}

int cofi_gr_rank(void *run, const cof_world_options *options, int rank)
{
    struct rank_work w = {.run = run, .rank = rank};
    return cofi_run_rank(options, rank, run_rank, close_rank, &w);
}
