/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run grad_return`: options, starting the ranks, comparing, and the table. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "core/config.h"
#include "ops/check.h"
#include "ops/grad_return/grad_return_ref.h"
#include "ops/grad_return/grad_return_tool.h"
#include "tools/job.h"
#include "tools/ranks.h"
#include "tools/run_op.h"
#include "tools/tensor_files.h"

static const char usage[] =
    "usage: cofuse run grad_return -i in.safetensors [-o out.safetensors] [options]\n"
    "\n"
    "Reads dk, dv [P, S, B, Hkv, D], one partial for each of P writers, runs as many ranks,\n"
    "returns the partials to the owners of their rows, and writes dk, dv [S, B, Hkv, D]. layout,\n"
    "chunking, transfer and writers default to the file's metadata, then to the first choice.\n"
    "\n"
    "Either file may be .npy files instead, one a tensor, which have no metadata and no BF16:\n"
    "-i dk=a.npy,dv=b.npy  -o dk=c.npy,dv=d.npy; an output that -o does not name is not written.\n"
    "\n"
    "  -i, --input FILE       tensors dk and dv, BF16, F16 or F32\n"
    "  -o, --output FILE      written to a temporary name, then renamed\n"
    "      --ranks P          must be the file's P\n"
    "      --device D         cpu; cuda: ranks are processes on the CUDA devices, in turn [cpu]\n"
    "      --engine E         shm: processes; thread: threads of this process [COFUSE_ENGINE]\n"
    "      --layout L         zigzag or contiguous\n"
    "      --chunking C       balanced or padded\n"
    "      --transfer T       push or pull\n"
    "      --by B             whole: one call; section: one call for each owner [whole]\n"
    "      --writers W        all, or causal: who sees some of the chunk's keys\n"
    "      --wire W           how partials travel: dtype or f32 [dtype]\n"
    "      --threads N        per rank; 0: COFUSE_THREADS, else cores / ranks [0]\n"
    "      --compare          with the serial reference, bit for bit; exit 1 when a bit differs\n"
    "      --repeat N         timed calls after one to warm up; the best counts [3]\n"
    "      --names dk=key,... keys of dk and dv in the file\n";

enum { OPT_RANKS = 256, OPT_DEVICE, OPT_ENGINE, OPT_LAYOUT, OPT_CHUNKING, OPT_TRANSFER, OPT_BY,
       OPT_WRITERS, OPT_WIRE, OPT_THREADS, OPT_COMPARE, OPT_REPEAT, OPT_NAMES };

static const struct option long_options[] = {
    {"input", required_argument, NULL, 'i'},
    {"output", required_argument, NULL, 'o'},
    {"ranks", required_argument, NULL, OPT_RANKS},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"engine", required_argument, NULL, OPT_ENGINE},
    {"layout", required_argument, NULL, OPT_LAYOUT},
    {"chunking", required_argument, NULL, OPT_CHUNKING},
    {"transfer", required_argument, NULL, OPT_TRANSFER},
    {"by", required_argument, NULL, OPT_BY},
    {"writers", required_argument, NULL, OPT_WRITERS},
    {"wire", required_argument, NULL, OPT_WIRE},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"compare", no_argument, NULL, OPT_COMPARE},
    {"repeat", required_argument, NULL, OPT_REPEAT},
    {"names", required_argument, NULL, OPT_NAMES},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* ---- options -------------------------------------------------------------------------------- */

static bool parse_option(struct cofi_gr_options *o, int c)
{
    int choice = 0;
    int64_t n = 0;
    bool ok;
    switch (c) {
    case 'i': o->input = optarg; return true;
    case 'o': o->output = optarg; return true;
    case OPT_RANKS:
        ok = cofi_cli_int("--ranks", optarg, 1, COFI_MAX_RANKS, &n);
        o->n_ranks = (int)n;
        return ok;
    case OPT_DEVICE:
        ok = cofi_cli_choice("--device", optarg, "cpu|cuda", &choice);
        o->cuda = choice == 1;
        return ok;
    case OPT_ENGINE: return cofi_run_engine(optarg, &o->engine);
    case OPT_LAYOUT: return cofi_cli_choice("--layout", optarg, "zigzag|contiguous", &o->layout);
    case OPT_CHUNKING:
        return cofi_cli_choice("--chunking", optarg, "balanced|padded", &o->chunking);
    case OPT_TRANSFER: return cofi_cli_choice("--transfer", optarg, "push|pull", &o->transfer);
    case OPT_BY:
        ok = cofi_cli_choice("--by", optarg, "whole|section", &choice);
        o->by_section = choice == 1;
        return ok;
    case OPT_WRITERS: return cofi_cli_choice("--writers", optarg, "all|causal", &o->writers);
    case OPT_WIRE:
        ok = cofi_cli_choice("--wire", optarg, "dtype|f32", &choice);
        o->wire_f32 = choice == 1;
        return ok;
    case OPT_THREADS: return cofi_cli_int("--threads", optarg, 0, 256, &o->n_threads);
    case OPT_COMPARE: o->compare = true; return true;
    case OPT_REPEAT: return cofi_cli_int("--repeat", optarg, 1, 1000, &o->repeat);
    case OPT_NAMES:
        return cofi_run_names(optarg, cofi_gr_tensor_names, 2, o->names, o->names_text,
                              sizeof o->names_text);
    }
    return false;
}

static int check_options(struct cofi_gr_options *o, int argc, char **argv)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    if (optind < argc)
        return cofi_cli_error("surplus word \"%s\"", argv[optind]);
    if (!o->input)
        return cofi_cli_error("option -i is missing (the file with dk and dv)");
    if (o->output && !cofi_tensors_may_write(o->input, o->output, error))
        return cofi_cli_error("%s", error);
    if (cofi_config_check() != COF_OK)
        return cofi_cli_error("%s", cof_last_error());
    if (o->cuda && o->engine == COF_ENGINE_THREAD)
        return cofi_cli_error("option --engine = \"thread\": wanted shm with --device cuda");
    cofi_run_engine_default(&o->engine);
    if (!o->cuda)
        return COFI_EXIT_OK;
    o->engine = COF_ENGINE_CUDA;
    if (cofi_check_cuda())
        return COFI_EXIT_OK;
    cofi_cli_error("option --device = \"cuda\": this program was built without CUDA");
    return COFI_EXIT_UNSUPPORTED;
}

/* ---- comparing ------------------------------------------------------------------------------ */

struct source {
    struct cofi_gr_run *run;
    int is_v;
};

static double partial(const void *ctx, int writer, int64_t row, int64_t at)
{
    const struct source *s = ctx;
    size_t row_bytes = cofi_gr_row_bytes(s->run, s->is_v);
    const char *data = (const char *)s->run + s->run->in[s->is_v] +
                       ((size_t)writer * (size_t)s->run->params.n_rows + (size_t)row) * row_bytes;
    return cofi_check_load(data, s->run->params.dtype, at);
}

/* Elements whose bits are not the reference's. */
static int64_t count_different(struct cofi_gr_run *run, int is_v)
{
    const cof_grad_return_params *p = &run->params;
    struct source source = {run, is_v};
    struct cofi_gr_ref ref = {{p->layout, p->chunking, run->n_ranks, p->n_rows}, p->dtype,
                              p->wire_f32, run->writers, NULL, partial, &source};
    int64_t n = p->n_batch * p->n_heads * (is_v ? p->head_dim_v : p->head_dim_k), different = 0;
    for (int64_t row = 0; row < p->n_rows; row++) {
        int writers[COFI_MAX_RANKS];
        int n_writers = cofi_gr_ref_writers(&ref, row, writers);
        for (int64_t at = 0; at < n; at++) {
            double want = cofi_gr_ref_value(&ref, writers, n_writers, row, at).plain;
            double got = cofi_check_load((char *)run + run->out[is_v], p->dtype, row * n + at);
            different += got != want && !(got != got && want != want);
        }
    }
    return different;
}

/* ---- the command ---------------------------------------------------------------------------- */

static cof_world_options world_options(const struct cofi_gr_run *run)
{
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.engine = run->engine;
    options.n_threads = run->n_threads;
    cofi_ranks_timeouts(&options, 20);
    return options;
}

static int rank_body(void *run, const cof_world_options *options, int rank)
{
    return cofi_gr_rank(run, options, rank);
}

static int run_as_process(void)
{
    struct cofi_gr_run *run = cofi_run_memory(sizeof *run, offsetof(struct cofi_gr_run, bytes));
    if (!run)
        return COFI_EXIT_RANK;
    cof_world_options options = world_options(run);
    return cofi_gr_rank(run, &options, (int)cofi_config_int(COFI_VAR_RANK));
}

static void print_table(const struct cofi_gr_run *run)
{
    const double *times = (const double *)((const char *)run + run->times);
    double seconds = 0;
    for (int r = 0; r < run->n_ranks; r++)
        seconds = times[r] > seconds ? times[r] : seconds;
    printf("plan %s\n\nranks  call ms\n%5d  %7.3f\n", run->describe, run->n_ranks, seconds * 1e3);
}

static int run_and_report(const struct cofi_gr_options *o, struct cofi_gr_run *run, int shared_fd,
                          int argc, char **argv)
{
    int code = cofi_ranks_run(&(struct cofi_ranks_spec){
        .n_ranks = run->n_ranks, .options = world_options(run), .body = rank_body, .arg = run,
        .shared_fd = shared_fd, .argc = argc, .argv = argv});
    if (code != COFI_EXIT_OK)
        return code;
    print_table(run);
    int64_t different = 0;
    for (int is_v = 0; is_v < 2 && o->compare; is_v++) {
        int64_t n = count_different(run, is_v);
        printf("%s: %s\n", is_v ? "dv" : "dk", n ? "bits differ from the reference" : "ok");
        different += n;
    }
    if (o->output && !cofi_gr_save(o, run))
        return COFI_EXIT_RANK;
    return different ? COFI_EXIT_CHECK : COFI_EXIT_OK;
}

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return run_as_process();
    static char names[2][4] = {"dk", "dv"};
    struct cofi_gr_options o = {.layout = -1, .chunking = -1, .transfer = -1, .writers = -1,
                                .repeat = 3, .names = {names[0], names[1]}};
    for (int c; (c = cofi_cli_next(argc, argv, "i:o:h", long_options)) != -1;) {
        if (c == 'h') {
            fputs(usage, stdout);
            return COFI_EXIT_OK;
        }
        if (c == '?' || !parse_option(&o, c))
            return COFI_EXIT_USAGE;
    }
    int code = check_options(&o, argc, argv), shared_fd = -1;
    struct cofi_gr_run *run = NULL;
    if (code != COFI_EXIT_OK)
        return code;
    if (!cofi_gr_load(&o, &run, &shared_fd))
        return COFI_EXIT_USAGE;
    return run_and_report(&o, run, shared_fd, argc, argv);
}

extern const struct cofi_op_check cofi_grad_return_check;
extern const struct cofi_op_bench cofi_grad_return_bench;
extern const struct cofi_op cofi_op_grad_return;

static const struct cofi_op_run grad_return_run = {.usage = usage, .command = command};

const struct cofi_op cofi_op_grad_return = {
    .name = "grad_return",
    .summary = "return of dK and dV to the owners of their rows",
    .check = &cofi_grad_return_check,
    .run = &grad_return_run,
    .bench = &cofi_grad_return_bench,
};
