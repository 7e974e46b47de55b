/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* From files to the shared memory of a run, and back. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/check.h"
#include "ops/trimul/trimul_tool.h"
#include "tools/tensor_files.h"

const char *const cofi_tm_input_names[COFI_TM_INPUTS] = {"x", "mask", "residual", "dout"};

static const char *const directions = "outgoing|incoming";
static const char *const orders = "stacked|interleaved";
enum { MAX_OUTPUTS = 3 + COFI_TRI_WEIGHTS };

/* What the files hold; NULL: not there, or not wanted. */
struct found {
    struct cofi_st_file input, weights;
    const struct cofi_st_tensor *in[COFI_TM_INPUTS], *weight[COFI_TRI_WEIGHTS];
    int order;
};

void cofi_tm_run_data(const struct cofi_tm_run *run, struct cofi_tm_data *data)
{
    *data = (struct cofi_tm_data){.c = &run->c, .n_problems = 1};
    struct cofi_tm_problem *p = &data->problem[0];
    cofi_tm_data_lay_grads(data);
    p->n = run->c.n.at[0];
    p->x = cofi_tm_run_at(run, run->in[COFI_TM_IN_X]);
    p->mask = cofi_tm_run_at(run, run->in[COFI_TM_IN_MASK]);
    p->residual = cofi_tm_run_at(run, run->in[COFI_TM_IN_RESIDUAL]);
    p->dout = cofi_tm_run_at(run, run->in[COFI_TM_IN_DOUT]);
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        data->weight[w] = cofi_tm_run_at(run, run->weight[w]);
}

/* ---- parameters ----------------------------------------------------------------------------- */

static bool read_eps(const struct cofi_st_file *file, const char *key, double *eps)
{
    const char *text = cofi_st_metadata(file, key);
    char name[300];
    snprintf(name, sizeof name, "%s: metadata %s", file->path, key);
    return *eps > 0 || !text || cofi_cli_double(name, text, 1e-37, 1e37, eps);
}

static bool read_metadata(const struct cofi_tm_options *o, struct found *f, struct cofi_tm_run *run)
{
    return cofi_run_is_of(&f->input, "trimul") && cofi_run_is_of(&f->weights, "trimul") &&
           cofi_tensors_choice(&f->input, "direction", directions, o->c.direction,
                               &run->c.direction) &&
           cofi_tensors_choice(&f->weights, "order", orders, o->order, &f->order) &&
           read_eps(&f->input, "eps_in", &run->c.eps_in) &&
           read_eps(&f->input, "eps_out", &run->c.eps_out);
}

/* B, N, D and the type from x. */
static bool take_x(const struct cofi_st_tensor *x, struct cofi_tm_case *c)
{
    static const cof_dtype dtypes[] = {{COF_DTYPE_CODE_BFLOAT, 16, 1},
                                       {COF_DTYPE_CODE_FLOAT, 16, 1},
                                       {COF_DTYPE_CODE_FLOAT, 32, 1}};
    char has[200];
    cofi_run_shape(x->shape, x->ndim, has, sizeof has);
    if (x->ndim != 4 || x->shape[1] != x->shape[2] || x->shape[1] < 1 || x->shape[3] < 1) {
        cofi_cli_error("%s: tensor \"%s\" has shape %s, wanted [B, N, N, D], N and D not 0",
                       x->path, x->name, has);
        return false;
    }
    for (c->dtype = 0; c->dtype < 3; c->dtype++)
        if (cofi_dtype_equal(x->dtype, dtypes[c->dtype]))
            break;
    if (c->dtype == 3) {
        cofi_cli_error("%s: tensor \"%s\" has dtype %s, wanted BF16, F16 or F32", x->path, x->name,
                       cofi_st_dtype_name(x->dtype));
        return false;
    }
    c->b = x->shape[0];
    c->n = (struct cofi_ints){.n = 1, .at = {x->shape[1]}};
    c->d = x->shape[3];
    return true;
}

static bool find_inputs(const struct cofi_tm_options *o, struct found *f, struct cofi_tm_run *run)
{
    struct cofi_tm_case *c = &run->c;
    const struct cofi_st_tensor *x = cofi_run_find(&f->input, o->run.keys[COFI_TM_IN_X], "x");
    if (!x || !take_x(x, c))
        return false;
    f->in[COFI_TM_IN_X] = x;
    for (int i = COFI_TM_IN_MASK; i < COFI_TM_INPUTS; i++) {
        const struct cofi_st_tensor *t = cofi_st_find(&f->input, o->run.keys[i]);
        bool is_mask = i == COFI_TM_IN_MASK;
        if (!t || (i == COFI_TM_IN_DOUT && !o->backward))
            continue;
        if (!cofi_run_has_shape(t, x->shape, is_mask ? 3 : 4,
                                is_mask ? "[B, N, N]" : "[B, N, N, D]") ||
            !cofi_run_has_dtype(t, x, is_mask))
            return false;
        f->in[i] = t;
    }
    const struct cofi_st_tensor *mask = f->in[COFI_TM_IN_MASK];
    c->mask = mask ? COFI_TM_REAL : COFI_TM_NO_MASK;
    c->mask_dtype = mask && !cofi_dtype_equal(mask->dtype, x->dtype);
    c->residual = f->in[COFI_TM_IN_RESIDUAL] ? COFI_TM_OWN : COFI_TM_NO_RESIDUAL;
    run->new_dout = o->backward && !f->in[COFI_TM_IN_DOUT];
    return true;
}

/* One weight's shape, and its type: that of x; for norms also fp32, the same for all of them. */
static bool check_weight(const struct found *f, int which, const struct cofi_st_tensor **first_norm,
                         struct cofi_tm_case *c)
{
    static const char *const letters[][2] = {
        {"[D]", "[D, D]"}, {"[H]", "[D, H]"}, {"[2H]", "[2H, D]"}};
    const struct cofi_tm_weight_info *info = &cofi_tm_weights[which];
    const struct cofi_st_tensor *t = f->weight[which], *x = f->in[COFI_TM_IN_X];
    int64_t shape[2];
    int ndim = cofi_tm_weight_shape(which, c->d, c->h, shape);
    int row = info->n_out == '2' ? 2 : info->n_in == 'H' || info->n_out == 'H';
    if (!cofi_run_has_shape(t, shape, ndim, letters[row][ndim - 1]))
        return false;
    if (!cofi_tri_is_norm(which))
        return cofi_run_has_dtype(t, x, false);
    if (*first_norm)
        return cofi_run_has_dtype(t, *first_norm, false);
    *first_norm = t;
    c->norm = !cofi_dtype_equal(t->dtype, x->dtype);
    return cofi_run_has_dtype(t, x, true);
}

/* H from p_out. */
static bool find_weights(struct found *f, struct cofi_tm_run *run)
{
    struct cofi_tm_case *c = &run->c;
    const struct cofi_st_tensor *first_norm = NULL;
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++) {
        const char *name = cofi_tm_weights[w].name;
        f->weight[w] = cofi_tm_weights[w].is_required ? cofi_run_find(&f->weights, name, name)
                                                       : cofi_st_find(&f->weights, name);
        if (!f->weight[w] && cofi_tm_weights[w].is_required)
            return false;
    }
    const struct cofi_st_tensor *p_out = f->weight[COFI_TRI_P_OUT];
    c->h = p_out->ndim == 2 ? p_out->shape[1] : 0;
    if (c->h < 1 || c->h > 8192 || c->d > 8192) {
        cofi_cli_error("%s: tensor \"%s\": wanted [D, H], with D and H 1 to 8192", p_out->path,
                       p_out->name);
        return false;
    }
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        if (f->weight[w] && !check_weight(f, w, &first_norm, c))
            return false;
    return true;
}

/* ---- memory --------------------------------------------------------------------------------- */

static bool add_bytes(struct cofi_tm_run *run, size_t bytes, size_t *offset_out)
{
    *offset_out = run->head.bytes;
    return !__builtin_add_overflow(run->head.bytes, (bytes + 63) / 64 * 64, &run->head.bytes) &&
           run->head.bytes < SIZE_MAX / 4;
}

static bool lay_out(const struct cofi_tm_options *o, const struct found *f,
                    struct cofi_tm_run *run)
{
    struct cofi_tm_data data = {.c = &run->c};
    size_t x_bytes = f->in[COFI_TM_IN_X]->bytes;
    cofi_tm_data_lay_grads(&data);
    run->head.bytes = (sizeof *run + 63) / 64 * 64;
    bool ok = add_bytes(run, 2 * sizeof(double) * (size_t)run->head.n_ranks, &run->times);
    for (int i = 0; i < COFI_TM_INPUTS; i++)
        if (f->in[i] || (i == COFI_TM_IN_DOUT && run->new_dout))
            ok = ok && add_bytes(run, f->in[i] ? f->in[i]->bytes : x_bytes, &run->in[i]);
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        if (f->weight[w])
            ok = ok && add_bytes(run, f->weight[w]->bytes, &run->weight[w]);
    ok = ok && add_bytes(run, x_bytes, &run->out);
    if (o->backward)
        ok = ok && add_bytes(run, x_bytes, &run->dx) &&
             add_bytes(run, (size_t)data.grad_elements * sizeof(float), &run->grads);
    if (!ok)
        cofi_cli_error("%s: the tensors of this problem are too large", f->input.path);
    return ok;
}

/* The tensors that the run writes. */
static int describe_outputs(const struct cofi_tm_run *run, struct cofi_st_tensor t[MAX_OUTPUTS])
{
    const struct cofi_tm_case *c = &run->c;
    struct cofi_tm_data data = {.c = c};
    const size_t offsets[] = {run->out, run->new_dout ? run->in[COFI_TM_IN_DOUT] : 0, run->dx};
    static const char *const names[] = {"out", "dout", "dx"};
    cof_dtype dtype = cofi_tm_dtype(c);
    int64_t pairs = c->n.at[0] * c->n.at[0], elements = c->b * pairs * c->d;
    int n = 0;
    cofi_tm_data_lay_grads(&data);
    for (int i = 0; i < 3; i++)
        if (offsets[i])
            t[n++] = (struct cofi_st_tensor){
                .name = names[i], .dtype = dtype, .ndim = 4,
                .shape = {c->b, c->n.at[0], c->n.at[0], c->d},
                .bytes = (size_t)(elements * cofi_dtype_bytes(dtype)),
                .data = cofi_tm_run_at(run, offsets[i])};
    for (int w = 0; w < COFI_TRI_WEIGHTS && run->grads; w++) {
        if (!run->weight[w])
            continue;
        t[n] = (struct cofi_st_tensor){
            .name = cofi_tm_weights[w].name, .dtype = COF_F32,
            .bytes = (size_t)cofi_tm_weight_elements(w, c->d, c->h) * sizeof(float),
            .data = (float *)cofi_tm_run_at(run, run->grads) + data.grad_at[w]};
        t[n].ndim = cofi_tm_weight_shape(w, c->d, c->h, t[n].shape);
        n++;
    }
    return n;
}

/* ---- reading -------------------------------------------------------------------------------- */

/* Rows of p_in and g_in in the order of the operator. */
static bool read_rows(const struct cofi_tm_options *o, const struct found *f, int which, void *dst)
{
    const struct cofi_st_tensor *t = f->weight[which];
    cof_shape shape = {.dim = {t->shape[0], t->ndim == 2 ? t->shape[1] : 0}};
    const cof_device cpu = {COF_DEVICE_CPU, 0};
    void *copy = malloc(t->bytes + 1);
    bool ok = copy && cofi_run_load(t, copy);
    if (ok) {
        cof_tensor from = cof_tensor_make(copy, cpu, t->dtype, t->ndim, &shape);
        cof_tensor to = cof_tensor_make(dst, cpu, t->dtype, t->ndim, &shape);
        ok = cof_trimul_import_rows(&from, (cof_trimul_order)f->order, o->swap_ab, &to) == COF_OK;
        if (!ok)
            cofi_cli_error("%s: tensor \"%s\": %s", t->path, t->name, cof_last_error());
    } else if (!copy) {
        cofi_cli_error("out of memory");
    }
    free(copy);
    return ok;
}

static bool read_all(const struct cofi_tm_options *o, const struct found *f,
                     struct cofi_tm_run *run)
{
    cof_dtype dtype = cofi_tm_dtype(&run->c);
    size_t x_bytes = f->in[COFI_TM_IN_X]->bytes;
    for (int i = 0; i < COFI_TM_INPUTS; i++)
        if (f->in[i] && !cofi_run_load(f->in[i], cofi_tm_run_at(run, run->in[i])))
            return false;
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++) {
        void *dst = cofi_tm_run_at(run, run->weight[w]);
        if (dst && !(cofi_tm_weights[w].n_out == '2' ? read_rows(o, f, w, dst)
                                                      : cofi_run_load(f->weight[w], dst)))
            return false;
    }
    for (int64_t i = 0; run->new_dout && i < (int64_t)x_bytes / cofi_dtype_bytes(dtype); i++)
        cofi_check_store(cofi_tm_run_at(run, run->in[COFI_TM_IN_DOUT]), dtype, i,
                         cofi_check_normal((uint64_t)o->seed, COFI_TM_IN_DOUT, (uint64_t)i));
    memset(cofi_tm_run_at(run, run->out), 0xff, x_bytes); /* what no rank stores stays NaN */
    if (run->dx)
        memset(cofi_tm_run_at(run, run->dx), 0xff, x_bytes);
    return true;
}

/* EXPLICIT offsets are as many as there are parts; anything else the plan sees. */
static bool check_grid(const struct cofi_tm_options *o, struct cofi_tm_case *c)
{
    if (!c->grid.n)
        c->grid = (struct cofi_ints){2, {o->n_ranks, 1}};
    bool is_explicit = c->shard == COF_TRIMUL_EXPLICIT;
    if ((c->rows.n || c->cols.n) == is_explicit &&
        (!is_explicit || (c->rows.n == c->grid.at[0] + 1 && c->cols.n == c->grid.at[1] + 1)))
        return true;
    cofi_cli_error("options --row-offsets and --col-offsets: wanted with --shard explicit, %lld "
                   "and %lld of them", (long long)c->grid.at[0] + 1, (long long)c->grid.at[1] + 1);
    return false;
}

static bool load(const struct cofi_tm_options *o, struct found *f, struct cofi_tm_run **run_out,
                 int *fd_out)
{
    struct cofi_tm_run layout = {.c = o->c};
    struct cofi_st_tensor outputs[MAX_OUTPUTS];
    layout.head = cofi_run_head_make(&o->run, (int)o->n_ranks, 0);
    layout.c.forward_only = !o->backward;
    layout.c.reduce = o->backward;
    if (!check_grid(o, &layout.c) || !read_metadata(o, f, &layout) ||
        !find_inputs(o, f, &layout) || !find_weights(f, &layout) || !lay_out(o, f, &layout) ||
        !cofi_run_can_make(o->run.output, outputs, describe_outputs(&layout, outputs)))
        return false;
    /* A wait lasts at most as long as another rank computes, at 1e8 operations a second. */
    layout.head.seconds = 20 + cofi_tm_flops(&layout.c, layout.c.n.at[0], true) / 1e8;
    *run_out = cofi_run_block(&layout, sizeof layout, layout.head.bytes, fd_out);
    return *run_out && read_all(o, f, *run_out);
}

bool cofi_tm_tool_load(const struct cofi_tm_options *o, struct cofi_tm_run **run_out,
                        int *fd_out)
{
    struct found f = {0};
    const char *names[COFI_TRI_WEIGHTS];
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        names[w] = cofi_tm_weights[w].name;
    if (!cofi_run_open(o->run.input, o->run.keys, COFI_TM_INPUTS, &f.input))
        return false;
    bool ok = cofi_run_open(o->weights, names, COFI_TRI_WEIGHTS, &f.weights);
    if (ok) {
        ok = load(o, &f, run_out, fd_out);
        cofi_st_close(&f.weights);
    }
    cofi_st_close(&f.input);
    return ok;
}

/* ---- writing -------------------------------------------------------------------------------- */

bool cofi_tm_tool_save(const struct cofi_tm_options *o, struct cofi_tm_run *run)
{
    char direction[32], eps_in[32], eps_out[32], seed[32];
    const double default_eps = 1e-5;
    snprintf(eps_in, sizeof eps_in, "%.9g", run->c.eps_in > 0 ? run->c.eps_in : default_eps);
    snprintf(eps_out, sizeof eps_out, "%.9g", run->c.eps_out > 0 ? run->c.eps_out : default_eps);
    snprintf(seed, sizeof seed, "%lld", (long long)o->seed);
    struct cofi_st_metadata metadata[] = {
        {"op", "trimul"},
        {"direction", cofi_option_word(directions, run->c.direction, direction)},
        {"eps_in", eps_in},
        {"eps_out", eps_out},
        {"order", "stacked"}, /* of the gradients */
        {"seed", seed},       /* only with a dout made from it */
    };
    struct cofi_st_tensor tensors[MAX_OUTPUTS];
    int n = describe_outputs(run, tensors);
    return cofi_run_write(o->run.output, metadata, run->new_dout ? 6 : 5, tensors, n);
}
