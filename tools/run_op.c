/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "run_op.h"

#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "core/config.h"
#include "core/tensor.h"
#include "job.h"
#include "ops/check.h"
#include "tensor_files.h"

/* ---- options -------------------------------------------------------------------------------- */

struct cofi_run_options cofi_run_options_make(const char *const names[], int n_names)
{
    struct cofi_run_options o = {.repeat = 3, .engine_word = -1, .names = names,
                                 .n_names = n_names};
    for (int i = 0; i < n_names; i++)
        o.keys[i] = names[i];
    return o;
}

/* The place of "name=key" in names[]; -1: there is no such name, or no key. */
static int find_name(const char *word, const char *const names[], int n_names)
{
    const char *equals = strchr(word, '=');
    for (int i = 0; equals && equals[1] && i < n_names; i++)
        if (strlen(names[i]) == (size_t)(equals - word) &&
            !strncmp(word, names[i], strlen(names[i])))
            return i;
    return -1;
}

/* "q=a,k=b" of --names. */
static bool take_names(void *target, const struct cofi_option *option, const char *text)
{
    struct cofi_run_options *o = target;
    (void)option;
    snprintf(o->keys_text, sizeof o->keys_text, "%s", text);
    bool ok = strlen(text) < sizeof o->keys_text;
    char *saved = NULL;
    for (char *word = strtok_r(o->keys_text, ",", &saved); word && ok;
         word = strtok_r(NULL, ",", &saved)) {
        int at = find_name(word, o->names, o->n_names);
        ok = at >= 0;
        if (ok)
            o->keys[at] = strchr(word, '=') + 1;
    }
    char wanted[200] = "";
    for (int i = 0, n = 0; i < o->n_names && n < (int)sizeof wanted; i++)
        n += snprintf(wanted + n, sizeof wanted - (size_t)n, "%s%s=key", i ? "," : "",
                      o->names[i]);
    if (!ok)
        cofi_cli_error("option --names = \"%s\": wanted some of %s", text, wanted);
    return ok;
}

bool cofi_run_read(int argc, char **argv, const char *usage, const struct cofi_option *table,
                   struct cofi_run_options *options, int *code_out)
{
    return cofi_option_read_command(argc, argv, usage, table, take_names, options, code_out);
}

/* The engine of --engine, else COFUSE_ENGINE's, else shm; that of devices with --device cuda. */
static int settle_engine(struct cofi_run_options *o)
{
    o->engine = o->engine_word == 0 ? COF_ENGINE_THREAD : COF_ENGINE_SHM;
    if (o->engine_word < 0 && !cofi_ranks_engine(o->device, &o->engine))
        return COFI_EXIT_USAGE;
    if (!o->device)
        return COFI_EXIT_OK;
    if (o->engine == COF_ENGINE_THREAD)
        return cofi_cli_error("%s = \"thread\": wanted shm with --device cuda",
                              o->engine_word < 0 ? "variable COFUSE_ENGINE" : "option --engine");
    o->engine = COF_ENGINE_CUDA;
    if (cofi_check_cuda())
        return COFI_EXIT_OK;
    cofi_cli_error("option --device = \"cuda\": this program was built without CUDA");
    return COFI_EXIT_UNSUPPORTED;
}

int cofi_run_settle(struct cofi_run_options *o, const char *tensors)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    if (!o->input)
        return cofi_cli_error("option -i is missing (the file with %s)", tensors);
    if (o->output && !cofi_tensors_may_write(o->input, o->output, error))
        return cofi_cli_error("%s", error);
    if (cofi_config_check(true) != COF_OK)
        return cofi_cli_error("%s", cof_last_error());
    return settle_engine(o);
}

/* ---- ranks ---------------------------------------------------------------------------------- */

struct cofi_run_head cofi_run_head_make(const struct cofi_run_options *o, int n_ranks,
                                        double seconds)
{
    return (struct cofi_run_head){.engine = o->engine, .n_threads = (int)o->n_threads,
                                  .n_ranks = n_ranks, .repeat = (int)o->repeat,
                                  .seconds = seconds};
}

static cof_world_options world_options(const struct cofi_run_head *head)
{
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.engine = head->engine;
    options.n_threads = head->n_threads;
    cofi_ranks_timeouts(&options, head->seconds);
    return options;
}

int cofi_run_ranks(struct cofi_run_head *head, cofi_rank_fn body, int shared_fd, int argc,
                   char **argv)
{
    return cofi_ranks_run(&(struct cofi_ranks_spec){
        .n_ranks = head->n_ranks, .options = world_options(head), .body = body, .arg = head,
        .shared_fd = shared_fd, .argc = argc, .argv = argv});
}

int cofi_run_as_rank(size_t head_bytes, cofi_rank_fn body)
{
    size_t bytes;
    struct cofi_run_head *head = cofi_job_shared(&bytes);
    if (!head || bytes < head_bytes || bytes < head->bytes) {
        cofi_cli_error("COFUSE_SHARED_FD is set, but is no memory of a parent `cofuse run`");
        return COFI_EXIT_RANK;
    }
    cof_world_options options = world_options(head);
    return body(head, &options, (int)cofi_config_int(COFI_VAR_RANK));
}

static int exit_code(int rank, cof_status status)
{
    if (status == COF_OK)
        return COFI_EXIT_OK;
    cofi_cli_error("rank %d: %s: %s", rank, cof_status_name(status), cof_last_error());
    return status == COF_ERR_UNSUPPORTED ? COFI_EXIT_UNSUPPORTED
           : status == COF_ERR_INVALID   ? COFI_EXIT_USAGE
                                         : COFI_EXIT_RANK;
}

int cofi_run_rank(const cof_world_options *options, int rank,
                  cof_status (*work)(void *arg, cof_world *world), void (*close)(void *arg),
                  void *arg)
{
    cof_world *world = NULL;
    const struct cofi_check_device *device = NULL;
    cof_status status = cof_world_create(options, &world);
    if (status == COF_OK && (device = cofi_check_device(world)))
        status = device->open(world);
    if (status == COF_OK)
        status = work(arg, world);
    int code = exit_code(rank, status);
    close(arg);
    cof_world_destroy(world);
    if (device)
        device->close();
    return code;
}

void cofi_run_describe(struct cofi_run_head *head, int rank, const cof_plan *plan)
{
    if (rank == 0)
        snprintf(head->describe, sizeof head->describe, "%s", cof_plan_describe(plan));
}

double cofi_run_slowest(const double *times, int n_ranks, int stride)
{
    double seconds = 0;
    for (int r = 0; r < n_ranks; r++)
        seconds = times[r * stride] > seconds ? times[r * stride] : seconds;
    return seconds;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static bool say(bool ok, const char *error)
{
    if (!ok)
        cofi_cli_error("%s", error);
    return ok;
}

bool cofi_run_open(const char *input, const char *const keys[], int n_keys,
                   struct cofi_st_file *file)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    return say(cofi_tensors_open(input, keys, n_keys, file, error), error);
}

bool cofi_run_can_make(const char *output, const struct cofi_st_tensor *tensors, int n_tensors)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    return !output || say(cofi_tensors_check(output, tensors, n_tensors, error), error);
}

bool cofi_run_load(const struct cofi_st_tensor *tensor, void *dst)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    return say(cofi_st_load(tensor, dst, error), error);
}

bool cofi_run_write(const char *output, const struct cofi_st_metadata *metadata, int n_metadata,
                    const struct cofi_st_tensor *tensors, int n_tensors)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    return say(cofi_tensors_write(output, metadata, n_metadata, tensors, n_tensors, error), error);
}

void *cofi_run_block(const void *layout, size_t layout_bytes, size_t bytes, int *fd_out)
{
    void *memory;
    *fd_out = cofi_job_shared_create(bytes, &memory);
    return *fd_out < 0 ? NULL : memcpy(memory, layout, layout_bytes);
}

bool cofi_run_is_of(const struct cofi_st_file *file, const char *op)
{
    const char *text = cofi_st_metadata(file, "op");
    if (!text || !strcmp(text, op))
        return true;
    cofi_cli_error("%s: its metadata says op = \"%s\", wanted %s", file->path, text, op);
    return false;
}

const struct cofi_st_tensor *cofi_run_find(const struct cofi_st_file *file, const char *key,
                                           const char *name)
{
    const struct cofi_st_tensor *tensor = cofi_st_find(file, key);
    if (!tensor)
        cofi_cli_error("%s: there is no tensor \"%s\" (%s); --names tells other keys", file->path,
                       key, name);
    return tensor;
}

void cofi_run_shape(const int64_t *shape, int ndim, char *text, size_t bytes)
{
    size_t n = (size_t)snprintf(text, bytes, "[");
    for (int i = 0; i < ndim && n < bytes; i++)
        n += (size_t)snprintf(text + n, bytes - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (n < bytes)
        snprintf(text + n, bytes - n, "]");
}

bool cofi_run_has_shape(const struct cofi_st_tensor *t, const int64_t *wanted, int ndim,
                        const char *letters)
{
    char has[200], want[100];
    if (t->ndim == ndim && !memcmp(t->shape, wanted, (size_t)ndim * sizeof *wanted))
        return true;
    cofi_run_shape(t->shape, t->ndim, has, sizeof has);
    cofi_run_shape(wanted, ndim, want, sizeof want);
    cofi_cli_error("%s: tensor \"%s\" has shape %s, wanted %s = %s", t->path, t->name, has, letters,
                   want);
    return false;
}

bool cofi_run_has_dtype(const struct cofi_st_tensor *t, const struct cofi_st_tensor *x,
                        bool or_f32)
{
    if (cofi_dtype_equal(t->dtype, x->dtype) || (or_f32 && cofi_dtype_equal(t->dtype, COF_F32)))
        return true;
    cofi_cli_error("%s: tensor \"%s\" has dtype %s, \"%s\" has %s: wanted the same%s", t->path,
                   t->name, cofi_st_dtype_name(t->dtype), x->name, cofi_st_dtype_name(x->dtype),
                   or_f32 ? ", or F32" : "");
    return false;
}
