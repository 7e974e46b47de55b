/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* From files to the shared memory of a run, and back. */
#include <string.h>

#include "core/tensor.h"
#include "ops/grad_return/grad_return_tool.h"
#include "tools/tensor_files.h"

const char *const cofi_gr_tensor_names[2] = {"dk", "dv"};

/* ---- reading -------------------------------------------------------------------------------- */

static bool read_metadata(const struct cofi_gr_options *o, const struct cofi_st_file *file,
                          struct cofi_gr_run *run)
{
    int layout, chunking, transfer, writers;
    if (!cofi_run_is_of(file, "grad_return") ||
        !cofi_tensors_choice(file, "layout", "zigzag|contiguous", o->layout, &layout) ||
        !cofi_tensors_choice(file, "chunking", "balanced|padded", o->chunking, &chunking) ||
        !cofi_tensors_choice(file, "transfer", "push|pull", o->transfer, &transfer) ||
        !cofi_tensors_choice(file, "writers", "all|causal", o->writers, &writers))
        return false;
    run->params.layout = (cof_layout_kind)layout;
    run->params.chunking = (cof_chunking)chunking;
    run->params.transfer = (cof_grad_return_transfer)transfer;
    run->writers = (cof_writers)writers;
    return true;
}

/* The bytes of a row fit 63 bits: a file without rows may name any other dim. */
static bool check_row(const struct cofi_st_tensor *t)
{
    int64_t product = 8;
    for (int i = 0; i < 5; i++)
        if (i != 1 && __builtin_mul_overflow(product, t->shape[i], &product)) {
            cofi_cli_error("%s: tensor \"%s\": its rows are too large", t->path, t->name);
            return false;
        }
    return true;
}

static bool check_pair(const struct cofi_st_tensor *const t[2])
{
    for (int i = 0; i < 2; i++) {
        if (t[i]->ndim != 5 || t[i]->shape[0] < 1 || t[i]->shape[2] < 1 || t[i]->shape[3] < 1 ||
            t[i]->shape[4] < 1) {
            cofi_cli_error("%s: tensor \"%s\": wanted 5 dims [P, S, B, Hkv, D], none but S empty",
                           t[i]->path, t[i]->name);
            return false;
        }
        if (!check_row(t[i]))
            return false;
    }
    if (memcmp(t[0]->shape, t[1]->shape, 4 * sizeof t[0]->shape[0]) ||
        !cofi_dtype_equal(t[0]->dtype, t[1]->dtype)) {
        cofi_cli_error("%s: tensors \"%s\" and \"%s\" differ in dtype or in a dim that is not D",
                       t[0]->path, t[0]->name, t[1]->name);
        return false;
    }
    if (t[0]->shape[0] > COFI_MAX_RANKS) {
        cofi_cli_error("%s: tensor \"%s\" has partials of %lld writers, wanted at most %d",
                       t[0]->path, t[0]->name, (long long)t[0]->shape[0], COFI_MAX_RANKS);
        return false;
    }
    return true;
}

static bool find_pair(const struct cofi_gr_options *o, const struct cofi_st_file *file,
                      const struct cofi_st_tensor *t[2])
{
    for (int i = 0; i < 2; i++)
        if (!(t[i] = cofi_run_find(file, o->run.keys[i], cofi_gr_tensor_names[i])))
            return false;
    return check_pair(t);
}

/* The file bounds the bytes of the partials, so no sum here overflows. */
static void lay_out(struct cofi_gr_run *run)
{
    size_t at = sizeof *run;
    run->times = at;
    at += sizeof(double) * (size_t)run->head.n_ranks;
    for (int is_v = 0; is_v < 2; is_v++) {
        size_t bytes = cofi_gr_row_bytes(run, is_v) * (size_t)run->params.n_rows;
        run->in[is_v] = at = (at + 63) / 64 * 64;
        at += bytes * (size_t)run->head.n_ranks;
        run->out[is_v] = at = (at + 63) / 64 * 64;
        at += bytes;
    }
    run->head.bytes = at;
}

static void set_params(const struct cofi_gr_options *o, const struct cofi_st_tensor *const t[2],
                       struct cofi_gr_run *run)
{
    cof_grad_return_params *p = &run->params;
    run->head = cofi_run_head_make(&o->run, (int)t[0]->shape[0], 20);
    p->dtype = t[0]->dtype;
    p->n_rows = t[0]->shape[1];
    p->n_batch = t[0]->shape[2];
    p->n_heads = t[0]->shape[3];
    p->head_dim_k = t[0]->shape[4];
    p->head_dim_v = t[1]->shape[4];
    p->wire_f32 = o->wire;
    p->by_section = o->by;
    lay_out(run);
}

/* The tensors that the run writes, without their data. */
static void describe_outputs(const struct cofi_gr_run *run, struct cofi_st_tensor tensors_out[2])
{
    const cof_grad_return_params *p = &run->params;
    for (int is_v = 0; is_v < 2; is_v++)
        tensors_out[is_v] = (struct cofi_st_tensor){
            .name = cofi_gr_tensor_names[is_v], .dtype = p->dtype, .ndim = 4,
            .shape = {p->n_rows, p->n_batch, p->n_heads, is_v ? p->head_dim_v : p->head_dim_k},
            .bytes = cofi_gr_row_bytes(run, is_v) * (size_t)p->n_rows};
}

static bool load_pair(const struct cofi_gr_options *o, const struct cofi_st_file *file,
                      struct cofi_gr_run **run_out, int *fd_out)
{
    struct cofi_gr_run layout = {.params = COF_GRAD_RETURN_PARAMS_INIT};
    const struct cofi_st_tensor *t[2];
    struct cofi_st_tensor outputs[2];
    if (!find_pair(o, file, t) || !read_metadata(o, file, &layout))
        return false;
    set_params(o, t, &layout);
    if (o->n_ranks && o->n_ranks != layout.head.n_ranks) {
        cofi_cli_error("option --ranks = %lld: \"%s\" has partials of %d writers",
                       (long long)o->n_ranks, t[0]->name, layout.head.n_ranks);
        return false;
    }
    describe_outputs(&layout, outputs);
    if (!cofi_run_can_make(o->run.output, outputs, 2))
        return false;
    struct cofi_gr_run *run = cofi_run_block(&layout, sizeof layout, layout.head.bytes, fd_out);
    *run_out = run;
    if (!run)
        return false;
    for (int is_v = 0; is_v < 2; is_v++) {
        if (!cofi_run_load(t[is_v], (char *)run + run->in[is_v]))
            return false;
        memset((char *)run + run->out[is_v], 0xff, /* a row that no rank stores stays NaN */
               cofi_gr_row_bytes(run, is_v) * (size_t)run->params.n_rows);
    }
    return true;
}

bool cofi_gr_load(const struct cofi_gr_options *o, struct cofi_gr_run **run_out, int *fd_out)
{
    struct cofi_st_file file;
    if (!cofi_run_open(o->run.input, o->run.keys, 2, &file))
        return false;
    bool ok = load_pair(o, &file, run_out, fd_out);
    cofi_st_close(&file);
    return ok;
}

/* ---- writing -------------------------------------------------------------------------------- */

bool cofi_gr_save(const struct cofi_gr_options *o, struct cofi_gr_run *run)
{
    const cof_grad_return_params *p = &run->params;
    struct cofi_st_metadata metadata[] = {
        {"op", "grad_return"},
        {"layout", p->layout == COF_LAYOUT_ZIGZAG ? "zigzag" : "contiguous"},
        {"chunking", p->chunking == COF_CHUNKING_BALANCED ? "balanced" : "padded"},
        {"writers", run->writers == COF_WRITERS_ALL ? "all" : "causal"},
    };
    struct cofi_st_tensor tensors[2];
    describe_outputs(run, tensors);
    for (int is_v = 0; is_v < 2; is_v++)
        tensors[is_v].data = (char *)run + run->out[is_v];
    return cofi_run_write(o->run.output, metadata, 4, tensors, 2);
}
