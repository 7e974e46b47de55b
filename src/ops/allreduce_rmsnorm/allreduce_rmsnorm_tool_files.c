/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* From files to the shared memory of a run, and back. */
#include <stdio.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_tool.h"
#include "ops/check.h"
#include "tools/tensor_files.h"

const char *const cofi_arn_input_names[COFI_ARN_N_INPUTS] = {"x", "residual", "weight"};
const char *const cofi_arn_output_names[COFI_ARN_N_OUTPUTS] = {"residual_out", "norm_out"};

static const double default_eps = 1e-6;

/* ---- parameters ----------------------------------------------------------------------------- */

static bool read_eps(const struct cofi_arn_options *o, const struct cofi_st_file *file,
                     double *eps_out)
{
    const char *text = cofi_st_metadata(file, "eps");
    char name[300];
    *eps_out = o->eps > 0 ? o->eps : default_eps;
    snprintf(name, sizeof name, "%s: metadata eps", file->path);
    return o->eps > 0 || !text || cofi_cli_double(name, text, 1e-30, 1e30, eps_out);
}

static bool read_metadata(const struct cofi_arn_options *o, const struct cofi_st_file *file,
                          cof_allreduce_rmsnorm_params *params)
{
    int variant, rounding, weight_bias;
    double eps;
    if (!cofi_run_is_of(file, "allreduce_rmsnorm") ||
        !cofi_tensors_choice(file, "variant", COFI_ARN_VARIANTS, o->variant, &variant) ||
        !cofi_tensors_choice(file, "rounding", COFI_ARN_ROUNDINGS, o->rounding, &rounding) ||
        !cofi_tensors_choice(file, "weight_bias", "0|1", o->weight_bias, &weight_bias) ||
        !read_eps(o, file, &eps))
        return false;
    params->variant = (cof_allreduce_variant)variant;
    params->rounding = (cof_allreduce_rounding)rounding;
    params->algorithm = (cof_allreduce_algorithm)o->algorithm;
    if (params->variant == COF_ALLREDUCE_ONLY)
        return true; /* a file's eps and bias of weights are for those who take a norm */
    params->eps = (float)eps;
    params->weight_bias = weight_bias;
    return true;
}

/* ---- dims ----------------------------------------------------------------------------------- */

/* P, T and H from x [P, T, H]; from residual [T, H] and --ranks where x is to be made. */
static bool take_dims(const struct cofi_arn_options *o, const struct cofi_st_tensor *t,
                      struct cofi_arn_run *run)
{
    int at = run->new_x ? 0 : 1; /* of T */
    char has[200];
    int64_t bytes = 8;
    if (t->ndim != at + 2 || t->shape[at + 1] < 1 || (at && t->shape[0] < 1) ||
        __builtin_mul_overflow(bytes, t->shape[at + 1], &bytes)) {
        cofi_run_shape(t->shape, t->ndim, has, sizeof has);
        cofi_cli_error("%s: tensor \"%s\" has shape %s, wanted %s, none but T empty", t->path,
                       t->name, has, at ? "[P, T, H]" : "[T, H]");
        return false;
    }
    int64_t n_ranks = at ? t->shape[0] : o->n_ranks;
    if (n_ranks > COFI_ARN_MAX_RANKS) {
        cofi_cli_error("%s: tensor \"%s\" has the addends of %lld ranks, wanted at most %d",
                       t->path, t->name, (long long)n_ranks, COFI_ARN_MAX_RANKS);
        return false;
    }
    if (o->n_ranks && o->n_ranks != n_ranks) {
        cofi_cli_error("option --ranks = %lld: \"%s\" has the addends of %lld ranks",
                       (long long)o->n_ranks, t->name, (long long)n_ranks);
        return false;
    }
    run->head = cofi_run_head_make(&o->run, (int)n_ranks, 20);
    run->n_tokens = t->shape[at];
    run->params.hidden = t->shape[at + 1];
    run->params.dtype = t->dtype;
    return true;
}

/* The tensors that the variant reads; NULL in t[] are those it does not, and x that is made. */
static bool find_inputs(const struct cofi_arn_options *o, const struct cofi_st_file *file,
                        struct cofi_arn_run *run,
                        const struct cofi_st_tensor *t[COFI_ARN_N_INPUTS])
{
    cof_allreduce_rmsnorm_params *p = &run->params;
    bool wanted[] = {true, p->variant == COF_ALLREDUCE_RESIDUAL_NORM,
                     p->variant != COF_ALLREDUCE_ONLY};
    run->new_x = o->seed >= 0 && !cofi_st_find(file, o->run.keys[COFI_ARN_X]);
    wanted[COFI_ARN_X] = !run->new_x;
    if (run->new_x && o->n_ranks == 0) {
        cofi_cli_error("option --seed: there is no tensor \"%s\" that tells the number of ranks, "
                       "wanted --ranks", o->run.keys[COFI_ARN_X]);
        return false;
    }
    for (int i = 0; i < COFI_ARN_N_INPUTS; i++) {
        bool is_read = wanted[i] || (run->new_x && i == COFI_ARN_RESIDUAL);
        t[i] = is_read ? cofi_run_find(file, o->run.keys[i], cofi_arn_input_names[i]) : NULL;
        if (is_read && !t[i])
            return false;
    }
    const struct cofi_st_tensor *first = t[run->new_x ? COFI_ARN_RESIDUAL : COFI_ARN_X];
    if (!take_dims(o, first, run))
        return false;
    const int64_t shape[] = {run->n_tokens, p->hidden};
    for (int i = COFI_ARN_RESIDUAL; i < COFI_ARN_N_INPUTS; i++) {
        bool is_weight = i == COFI_ARN_WEIGHT;
        if (t[i] && (!cofi_run_has_shape(t[i], shape + is_weight, 2 - is_weight,
                                is_weight ? "[H]" : "[T, H]") ||
                     !cofi_run_has_dtype(t[i], first, is_weight)))
            return false;
        t[i] = wanted[i] ? t[i] : NULL;
    }
    if (t[COFI_ARN_WEIGHT])
        p->weight_dtype = t[COFI_ARN_WEIGHT]->dtype;
    return true;
}

/* ---- memory --------------------------------------------------------------------------------- */

static void add_bytes(struct cofi_arn_run *run, size_t bytes, size_t *offset_out)
{
    *offset_out = (run->head.bytes + 63) / 64 * 64;
    run->head.bytes = *offset_out + bytes;
}

/* The file bounds the bytes of T rows, of which there are few, so no sum here overflows. */
static void lay_out(const struct cofi_arn_options *o, const struct cofi_st_tensor *const t[],
                    struct cofi_arn_run *run)
{
    size_t all_bytes = cofi_arn_run_bytes(run) * (size_t)run->head.n_ranks;
    run->params.max_tokens = o->max_tokens ? o->max_tokens : run->n_tokens;
    if (run->params.max_tokens == 0)
        run->params.max_tokens = 1;
    run->head.bytes = sizeof *run;
    add_bytes(run, sizeof(double) * (size_t)run->head.n_ranks, &run->times);
    add_bytes(run, all_bytes, &run->in[COFI_ARN_X]);
    for (int i = COFI_ARN_RESIDUAL; i < COFI_ARN_N_INPUTS; i++)
        if (t[i])
            add_bytes(run, t[i]->bytes, &run->in[i]);
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (i == COFI_ARN_RESIDUAL_OUT || run->params.variant != COF_ALLREDUCE_ONLY)
            add_bytes(run, all_bytes, &run->out[i]);
}

/* The tensors that the run writes, the first rank's. */
static int describe_outputs(struct cofi_arn_run *run,
                            struct cofi_st_tensor tensors_out[COFI_ARN_N_OUTPUTS + 1])
{
    const cof_allreduce_rmsnorm_params *p = &run->params;
    int n = 0;
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (run->out[i])
            tensors_out[n++] = (struct cofi_st_tensor){
                .name = cofi_arn_output_names[i], .dtype = p->dtype, .ndim = 2,
                .shape = {run->n_tokens, p->hidden}, .bytes = cofi_arn_run_bytes(run),
                .data = cofi_arn_run_out(run, i, 0)};
    if (run->new_x)
        tensors_out[n++] = (struct cofi_st_tensor){
            .name = cofi_arn_input_names[COFI_ARN_X], .dtype = p->dtype, .ndim = 3,
            .shape = {run->head.n_ranks, run->n_tokens, p->hidden},
            .bytes = cofi_arn_run_bytes(run) * (size_t)run->head.n_ranks,
            .data = (char *)run + run->in[COFI_ARN_X]};
    return n;
}

/* ---- reading -------------------------------------------------------------------------------- */

/* Standard normal values in the run's type; nothing for a type that the library will refuse. */
static void make_x(const struct cofi_arn_options *o, struct cofi_arn_run *run)
{
    int64_t n = run->head.n_ranks * run->n_tokens * run->params.hidden;
    for (int64_t i = 0; i < n && cofi_dtype_is_elem(run->params.dtype); i++)
        cofi_check_store((char *)run + run->in[COFI_ARN_X], run->params.dtype, i,
                         cofi_check_normal((uint64_t)o->seed, COFI_ARN_X, (uint64_t)i));
}

static bool load(const struct cofi_arn_options *o, const struct cofi_st_file *file,
                 struct cofi_arn_run **run_out, int *fd_out)
{
    struct cofi_arn_run layout = {.params = COF_ALLREDUCE_RMSNORM_PARAMS_INIT};
    const struct cofi_st_tensor *t[COFI_ARN_N_INPUTS];
    struct cofi_st_tensor outputs[COFI_ARN_N_OUTPUTS + 1];
    if (!read_metadata(o, file, &layout.params) || !find_inputs(o, file, &layout, t))
        return false;
    lay_out(o, t, &layout);
    if (!cofi_run_can_make(o->run.output, outputs, describe_outputs(&layout, outputs)))
        return false;
    struct cofi_arn_run *run = cofi_run_block(&layout, sizeof layout, layout.head.bytes, fd_out);
    *run_out = run;
    if (!run)
        return false;
    if (run->new_x)
        make_x(o, run);
    for (int i = 0; i < COFI_ARN_N_INPUTS; i++)
        if (t[i] && !cofi_run_load(t[i], (char *)run + run->in[i]))
            return false;
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++) /* a row that no rank stores stays NaN */
        if (run->out[i])
            memset((char *)run + run->out[i], 0xff,
                   cofi_arn_run_bytes(run) * (size_t)run->head.n_ranks);
    return true;
}

bool cofi_arn_tool_load(const struct cofi_arn_options *o, struct cofi_arn_run **run_out,
                        int *fd_out)
{
    struct cofi_st_file file;
    if (!cofi_run_open(o->run.input, o->run.keys, COFI_ARN_N_INPUTS, &file))
        return false;
    bool ok = load(o, &file, run_out, fd_out);
    cofi_st_close(&file);
    return ok;
}

/* ---- writing -------------------------------------------------------------------------------- */

bool cofi_arn_tool_save(const struct cofi_arn_options *o, struct cofi_arn_run *run)
{
    const cof_allreduce_rmsnorm_params *p = &run->params;
    char variant[32], rounding[32], eps[32], seed[32];
    snprintf(eps, sizeof eps, "%.9g", (double)p->eps);
    snprintf(seed, sizeof seed, "%lld", (long long)o->seed);
    struct cofi_st_metadata metadata[6] = {
        {"op", "allreduce_rmsnorm"},
        {"variant", cofi_option_word(COFI_ARN_VARIANTS, p->variant, variant)},
        {"rounding", cofi_option_word(COFI_ARN_ROUNDINGS, p->rounding, rounding)},
    };
    int n_metadata = 3;
    if (p->variant != COF_ALLREDUCE_ONLY) {
        metadata[n_metadata++] = (struct cofi_st_metadata){"eps", eps};
        metadata[n_metadata++] = (struct cofi_st_metadata){"weight_bias",
                                                           p->weight_bias ? "1" : "0"};
    }
    if (run->new_x)
        metadata[n_metadata++] = (struct cofi_st_metadata){"seed", seed};
    struct cofi_st_tensor tensors[COFI_ARN_N_OUTPUTS + 1];
    int n = describe_outputs(run, tensors);
    return cofi_run_write(o->run.output, metadata, n_metadata, tensors, n);
}
