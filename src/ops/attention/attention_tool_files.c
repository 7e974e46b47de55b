/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* From files to the shared memory of a run, and back. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/attention/attention_tool.h"
#include "ops/attention/attention_tool_table.h"
#include "ops/check.h"
#include "tools/tensor_files.h"

static const double timeout_seconds = 20; /* and the time that a rank may compute while others */
static const double slow_rate = 1e9;      /* wait for it, at so many flops a second */

const char *const cofi_attention_tensor_names[COFI_AT_N] = {"q", "k",   "v",  "dout", "o",
                                                            "lse", "dq", "dk", "dv"};

struct cofi_attention_geometry cofi_attention_geometry(const cof_attention_params *params,
                                                       int which, int64_t n_rows)
{
    int64_t n_batch = params->n_batch;
    if (which == COFI_AT_LSE)
        return (struct cofi_attention_geometry){
            COF_F32, 3, {n_batch, params->n_heads, n_rows}, n_batch * params->n_heads, 4};
    bool is_kv = which == COFI_AT_K || which == COFI_AT_V || which == COFI_AT_DK ||
                 which == COFI_AT_DV;
    bool has_dim_v = which == COFI_AT_V || which == COFI_AT_DV || which == COFI_AT_O ||
                     which == COFI_AT_DOUT;
    int64_t n_heads = is_kv ? params->n_kv_heads : params->n_heads;
    int64_t dim = has_dim_v ? params->head_dim_v : params->head_dim_qk;
    int64_t head_bytes = n_heads * dim * cofi_dtype_bytes(params->dtype);
    if (params->format == COF_FORMAT_SBHD)
        return (struct cofi_attention_geometry){
            params->dtype, 4, {n_rows, n_batch, n_heads, dim}, 1, n_batch * head_bytes};
    return (struct cofi_attention_geometry){
        params->dtype, 4, {n_batch, n_rows, n_heads, dim}, n_batch, head_bytes};
}

/* ---- reading -------------------------------------------------------------------------------- */

static bool read_metadata(const struct cofi_attention_options *options,
                          const struct cofi_st_file *file, cof_attention_params *params)
{
    int mask, format, layout;
    const char *scale = cofi_st_metadata(file, "scale");
    if (!cofi_run_is_of(file, "attention") ||
        !cofi_tensors_choice(file, "mask", "none|causal", options->mask, &mask) ||
        !cofi_tensors_choice(file, "format", "bshd|sbhd", options->format, &format) ||
        !cofi_tensors_choice(file, "layout", "zigzag|contiguous", options->layout, &layout))
        return false;
    params->scale = isnan(options->scale) ? 0 : options->scale;
    if (isnan(options->scale) && scale &&
        !cofi_cli_double("metadata scale", scale, -1e30, 1e30, &params->scale))
        return false;
    params->mask = mask ? COF_MASK_CAUSAL : COF_MASK_NONE;
    params->format = format ? COF_FORMAT_SBHD : COF_FORMAT_BSHD;
    params->layout = layout ? COF_LAYOUT_CONTIGUOUS : COF_LAYOUT_ZIGZAG;
    return true;
}

/* A tensor must have the type and the dims that q, k and v give it. */
static bool check_tensor(const struct cofi_st_tensor *t, int which,
                         const cof_attention_params *params)
{
    struct cofi_attention_geometry wanted = cofi_attention_geometry(params, which, params->n_rows);
    const char *name = cofi_attention_tensor_names[which];
    char has[120], want[120];
    cofi_run_shape(t->shape, t->ndim, has, sizeof has);
    cofi_run_shape(wanted.shape, wanted.ndim, want, sizeof want);
    if (!cofi_dtype_equal(t->dtype, wanted.dtype)) {
        cofi_cli_error("%s: tensor \"%s\" (%s) has dtype %s, q has %s", t->path, t->name, name,
                       cofi_st_dtype_name(t->dtype), cofi_st_dtype_name(wanted.dtype));
        return false;
    }
    if (t->ndim != 4 || memcmp(t->shape, wanted.shape, sizeof wanted.shape)) {
        cofi_cli_error("%s: tensor \"%s\" (%s) has shape %s, wanted %s to fit the others",
                       t->path, t->name, name, has, want);
        return false;
    }
    return true;
}

/* No dim but the rows is 0, and the bytes of a row of every tensor fit 63 bits (a file without rows
 * may name any other dim). */
static bool check_dims(const char *path, const cof_attention_params *p)
{
    const int64_t dims[] = {p->n_batch, p->n_heads, p->n_kv_heads, p->head_dim_qk, p->head_dim_v};
    const char *const letters[] = {"B", "H", "Hkv", "Dqk", "Dv"};
    int64_t product = 8;
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        if (dims[i] < 1) {
            cofi_cli_error("%s: %s = 0: wanted no empty dim but the rows", path, letters[i]);
            return false;
        }
        if (__builtin_mul_overflow(product, dims[i], &product)) {
            cofi_cli_error("%s: the tensors of this problem are too large", path);
            return false;
        }
    }
    if (p->n_heads % p->n_kv_heads == 0)
        return true;
    cofi_cli_error("%s: H = %lld, Hkv = %lld: wanted a multiple", path, (long long)p->n_heads,
                   (long long)p->n_kv_heads);
    return false;
}

bool cofi_attention_open(const struct cofi_attention_options *options, struct cofi_st_file *file,
                         cof_attention_params *params_out)
{
    if (!cofi_run_open(options->run.input, options->run.keys, COFI_AT_N_INPUTS, file))
        return false;
    cof_attention_params params = COF_ATTENTION_PARAMS_INIT;
    const struct cofi_st_tensor *t[COFI_AT_N_INPUTS];
    for (int i = 0; i < COFI_AT_N_INPUTS; i++) {
        const char *name = cofi_attention_tensor_names[i];
        char has[120];
        t[i] = i == COFI_AT_DOUT ? cofi_st_find(file, options->run.keys[i])
                                 : cofi_run_find(file, options->run.keys[i], name);
        if (!t[i] && i != COFI_AT_DOUT)
            return false;
        if (t[i] && t[i]->ndim != 4) {
            cofi_run_shape(t[i]->shape, t[i]->ndim, has, sizeof has);
            cofi_cli_error("%s: tensor \"%s\" has shape %s, wanted 4 dims", t[i]->path, t[i]->name,
                           has);
            return false;
        }
    }
    if (!read_metadata(options, file, &params))
        return false;
    int at_row = params.format == COF_FORMAT_BSHD;
    params.dtype = t[COFI_AT_Q]->dtype;
    params.n_rows = t[COFI_AT_Q]->shape[at_row];
    params.n_batch = t[COFI_AT_Q]->shape[1 - at_row];
    params.n_heads = t[COFI_AT_Q]->shape[2];
    params.head_dim_qk = t[COFI_AT_Q]->shape[3];
    params.n_kv_heads = t[COFI_AT_K]->shape[2];
    params.head_dim_v = t[COFI_AT_V]->shape[3];
    if (!check_dims(file->path, &params))
        return false;
    params.forward_only = !options->backward;
    params.has_window = options->window.n != 0;
    params.window_left = options->window.at[0];
    params.window_right = options->window.at[1];
    params.wire_f32 = options->wire;
    params.schedule = (cof_attention_schedule)options->schedule;
    params.save_kv = options->save_kv;
    for (int i = 0; i < COFI_AT_N_INPUTS; i++) {
        bool is_used = t[i] && (i != COFI_AT_DOUT || options->backward);
        if (is_used && !check_tensor(t[i], i, &params))
            return false;
    }
    *params_out = params;
    return true;
}

/* ---- shared memory -------------------------------------------------------------------------- */

/* Standard normal values in the run's type; nothing for a type that the library will refuse. */
static void fill_normal(void *dst, cof_dtype dtype, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n && cofi_dtype_is_elem(dtype); i++)
        cofi_check_store(dst, dtype, i, cofi_check_normal(seed, COFI_AT_DOUT, (uint64_t)i));
}

static bool add_bytes(size_t *total, size_t bytes, size_t *offset_out)
{
    const size_t align = 64;
    *offset_out = *total;
    return !__builtin_add_overflow(*total, bytes, total) &&
           !__builtin_add_overflow(*total, -*total % align, total) && *total < SIZE_MAX / 4;
}

/* Tensors of the run, all sizes checked against overflow (the file bounds those it holds only). */
static bool lay_out(struct cofi_attention_run *run, int max_ranks)
{
    bool ok = add_bytes(&run->head.bytes, sizeof *run, &run->times);
    const size_t n_times = 2 * (size_t)(max_ranks * run->head.repeat);
    ok = ok && add_bytes(&run->head.bytes, n_times * sizeof(double), &run->times);
    for (int i = 0; i < COFI_AT_N; i++) {
        bool is_grad = i >= COFI_AT_DQ || i == COFI_AT_DOUT;
        struct cofi_attention_geometry g = cofi_attention_geometry(&run->params, i, 1);
        int64_t bytes;
        if (is_grad && !run->backward)
            continue;
        ok = ok && !__builtin_mul_overflow(g.n_outer * g.row_bytes, run->params.n_rows, &bytes) &&
             add_bytes(&run->head.bytes, (size_t)bytes, &run->offset[i]);
    }
    return ok;
}

/* The tensors that the run writes, in the order of `which_out`, without their data. */
static int describe_outputs(const struct cofi_attention_run *run,
                            struct cofi_st_tensor tensors_out[COFI_AT_N], int which_out[COFI_AT_N])
{
    const cof_attention_params *p = &run->params;
    int n = 0;
    for (int i = COFI_AT_DOUT; i < COFI_AT_N; i++) {
        if (run->offset[i] == 0 || (i == COFI_AT_DOUT && !run->new_dout))
            continue;
        struct cofi_attention_geometry g = cofi_attention_geometry(p, i, p->n_rows);
        tensors_out[n] = (struct cofi_st_tensor){
            .name = cofi_attention_tensor_names[i], .dtype = g.dtype, .ndim = g.ndim,
            .bytes = (size_t)(g.n_outer * g.row_bytes * p->n_rows)};
        memcpy(tensors_out[n].shape, g.shape, sizeof g.shape);
        which_out[n++] = i;
    }
    return n;
}

bool cofi_attention_load(const struct cofi_attention_options *options,
                         const struct cofi_st_file *file, const cof_attention_params *params,
                         struct cofi_attention_run **run_out, int *fd_out)
{
    struct cofi_attention_run layout = {.params = *params, .backward = options->backward,
                                        .measure_rate = options->time};
    struct cofi_st_tensor outputs[COFI_AT_N];
    int max_ranks = 1, which[COFI_AT_N];
    layout.head = cofi_run_head_make(&options->run, 0, timeout_seconds +
                                                           cofi_attention_flops(
                                                               params, options->backward) /
                                                               slow_rate);
    layout.new_dout = options->backward && !cofi_st_find(file, options->run.keys[COFI_AT_DOUT]);
    for (int i = 0; i < options->ranks.n; i++)
        if (options->ranks.at[i] > max_ranks)
            max_ranks = (int)options->ranks.at[i];
    if (!lay_out(&layout, max_ranks)) {
        cofi_cli_error("%s: the tensors of this problem are too large", file->path);
        return false;
    }
    if (!cofi_run_can_make(options->run.output, outputs,
                           describe_outputs(&layout, outputs, which)))
        return false;
    struct cofi_attention_run *run = cofi_run_block(&layout, sizeof layout, layout.head.bytes,
                                                    fd_out);
    *run_out = run;
    if (!run)
        return false;
    for (int i = 0; i < COFI_AT_N_INPUTS; i++) {
        const struct cofi_st_tensor *t = cofi_st_find(file, options->run.keys[i]);
        struct cofi_attention_geometry g = cofi_attention_geometry(params, i, params->n_rows);
        if (i == COFI_AT_DOUT && !run->backward)
            continue;
        if (!t)
            fill_normal(cofi_attention_run_tensor(run, i), params->dtype,
                        g.n_outer * g.row_bytes * params->n_rows / cofi_dtype_bytes(params->dtype),
                        (uint64_t)options->seed);
        else if (!cofi_run_load(t, cofi_attention_run_tensor(run, i)))
            return false;
    }
    return true;
}

/* ---- writing -------------------------------------------------------------------------------- */

bool cofi_attention_save(const struct cofi_attention_options *options,
                         struct cofi_attention_run *run)
{
    const cof_attention_params *p = &run->params;
    char scale[32], seed[32];
    snprintf(scale, sizeof scale, "%.17g", cofi_attention_scale(p));
    snprintf(seed, sizeof seed, "%lld", (long long)options->seed);
    struct cofi_st_metadata metadata[] = {
        {"op", "attention"},
        {"format", p->format == COF_FORMAT_BSHD ? "bshd" : "sbhd"},
        {"mask", p->mask == COF_MASK_NONE ? "none" : "causal"},
        {"scale", scale},
        {"layout", p->layout == COF_LAYOUT_ZIGZAG ? "zigzag" : "contiguous"},
        {"seed", seed}, /* only with a dout made from it */
    };
    struct cofi_st_tensor tensors[COFI_AT_N];
    int which[COFI_AT_N], n = describe_outputs(run, tensors, which);
    for (int i = 0; i < n; i++)
        tensors[i].data = cofi_attention_run_tensor(run, which[i]);
    return cofi_run_write(options->run.output, metadata, run->new_dout ? 6 : 5, tensors, n);
}
