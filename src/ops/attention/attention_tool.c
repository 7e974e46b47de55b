/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run attention`: options, starting the ranks, and the table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/config.h"
#include "ops/attention/attention_tool.h"
#include "ops/attention/attention_tool_table.h"
#include "ops/check.h"
#include "tools/job.h"
#include "tools/ranks.h"
#include "tools/run_op.h"
#include "tools/tensor_files.h"

static const double timeout_seconds = 20; /* unless the environment sets another; and the time that
                                            * a rank may compute while others wait for it, at */
static const double slow_rate = 1e9;       /* flops a second */

static const char usage[] =
    "usage: cofuse run attention -i in.safetensors [-o out.safetensors] [options]\n"
    "\n"
    "Reads q, k, v (and dout), shards their rows over the ranks, runs context-parallel attention\n"
    "and writes o, lse (and dq, dk, dv). mask, format, scale and layout default to the metadata\n"
    "of the file, then to none, bshd, 1/sqrt(D), zigzag.\n"
    "\n"
    "Either file may be .npy files instead, one a tensor, which have no metadata and no BF16:\n"
    "-i q=q.npy,k=k.npy,v=v.npy[,dout=dout.npy]  -o o=o.npy[,lse=lse.npy,dq=dq.npy,...]; outputs\n"
    "that -o does not name are not written.\n"
    "\n"
    "  -i, --input FILE       tensors q, k, v [B, S, H, D], BF16, F16 or F32; dout\n"
    "  -o, --output FILE      written to a temporary name, then renamed\n"
    "      --ranks N[,N...]   ranks to start; with several counts a row of the table each [4]\n"
    "      --engine E         shm: processes; thread: threads of this process [COFUSE_ENGINE]\n"
    "      --device D         cpu; cuda: ranks are processes on the CUDA devices, in turn [cpu]\n"
    "      --mask M           none or causal\n"
    "      --window L:R       of these keys L rows before a query and R behind it; -1: all\n"
    "      --layout L         zigzag or contiguous\n"
    "      --format F         order of the dims: bshd or sbhd\n"
    "      --scale X          of the scores; 0: 1/sqrt(D)\n"
    "      --threads N        per rank; 0: COFUSE_THREADS, else cores / ranks [0]\n"
    "      --backward         gradients too; dout from the file, else normal by --seed\n"
    "      --compare          with the fp64 reference; exit 1 when an error is over its bound\n"
    "      --time             rates, beside that of the bare tile products on the same threads\n"
    "      --repeat N         timed calls after one to warm up; the best counts [3]\n"
    "      --names k=key,...  keys of q, k, v, dout in the file\n"
    "      --seed S           of dout [1]\n"
    "      --wire W           how partial dk, dv travel: dtype or f32 [dtype]\n"
    "      --schedule S       ring, gather, or auto: by the number of rows [auto]\n"
    "      --save-kv          forward keeps the others' keys for backward\n";

enum { OPT_RANKS = 256, OPT_ENGINE, OPT_MASK, OPT_LAYOUT, OPT_FORMAT, OPT_SCALE, OPT_THREADS,
       OPT_BACKWARD, OPT_COMPARE, OPT_TIME, OPT_REPEAT, OPT_NAMES, OPT_SEED, OPT_WIRE, OPT_SCHEDULE,
       OPT_SAVE_KV, OPT_DEVICE, OPT_WINDOW };

static const struct option long_options[] = {
    {"input", required_argument, NULL, 'i'},
    {"output", required_argument, NULL, 'o'},
    {"ranks", required_argument, NULL, OPT_RANKS},
    {"engine", required_argument, NULL, OPT_ENGINE},
    {"mask", required_argument, NULL, OPT_MASK},
    {"layout", required_argument, NULL, OPT_LAYOUT},
    {"format", required_argument, NULL, OPT_FORMAT},
    {"scale", required_argument, NULL, OPT_SCALE},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"backward", no_argument, NULL, OPT_BACKWARD},
    {"compare", no_argument, NULL, OPT_COMPARE},
    {"time", no_argument, NULL, OPT_TIME},
    {"repeat", required_argument, NULL, OPT_REPEAT},
    {"names", required_argument, NULL, OPT_NAMES},
    {"seed", required_argument, NULL, OPT_SEED},
    {"wire", required_argument, NULL, OPT_WIRE},
    {"schedule", required_argument, NULL, OPT_SCHEDULE},
    {"save-kv", no_argument, NULL, OPT_SAVE_KV},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"window", required_argument, NULL, OPT_WINDOW},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* ---- options -------------------------------------------------------------------------------- */

static bool parse_window(struct cofi_attention_options *o, const char *value)
{
    const char *colon = strchr(value, ':');
    char left[24];
    if (!colon || (size_t)(colon - value) >= sizeof left) {
        cofi_cli_error("option --window = \"%s\": wanted left:right", value);
        return false;
    }
    snprintf(left, sizeof left, "%.*s", (int)(colon - value), value);
    o->has_window = true;
    return cofi_cli_int("--window", left, -1, INT64_C(1) << 56, &o->window.left) &&
           cofi_cli_int("--window", colon + 1, -1, INT64_C(1) << 56, &o->window.right);
}

static bool parse_option(struct cofi_attention_options *o, int c)
{
    int choice = 0;
    switch (c) {
    case 'i': o->input = optarg; return true;
    case 'o': o->output = optarg; return true;
    case OPT_RANKS: return cofi_cli_ranks("--ranks", optarg, &o->ranks);
    case OPT_ENGINE: return cofi_run_engine(optarg, &o->engine);
    case OPT_MASK: return cofi_cli_choice("--mask", optarg, "none|causal", &o->mask);
    case OPT_LAYOUT: return cofi_cli_choice("--layout", optarg, "zigzag|contiguous", &o->layout);
    case OPT_FORMAT: return cofi_cli_choice("--format", optarg, "bshd|sbhd", &o->format);
    case OPT_SCALE:
        o->has_scale = true;
        return cofi_cli_double("--scale", optarg, -1e30, 1e30, &o->scale);
    case OPT_THREADS: return cofi_cli_int("--threads", optarg, 0, 256, &o->n_threads);
    case OPT_BACKWARD: o->backward = true; return true;
    case OPT_COMPARE: o->compare = true; return true;
    case OPT_TIME: o->time = true; return true;
    case OPT_REPEAT: return cofi_cli_int("--repeat", optarg, 1, COFI_AT_REPEAT_MAX, &o->repeat);
    case OPT_NAMES:
        return cofi_run_names(optarg, cofi_attention_tensor_names, COFI_AT_N_INPUTS, o->names,
                              o->names_text, sizeof o->names_text);
    case OPT_SEED: return cofi_cli_int("--seed", optarg, 0, INT64_MAX, &o->seed);
    case OPT_WIRE:
        if (!cofi_cli_choice("--wire", optarg, "dtype|f32", &choice))
            return false;
        o->wire_f32 = choice == 1;
        return true;
    case OPT_SCHEDULE:
        return cofi_cli_choice("--schedule", optarg, "auto|ring|gather", &o->schedule);
    case OPT_SAVE_KV: o->save_kv = true; return true;
    case OPT_WINDOW: return parse_window(o, optarg);
    case OPT_DEVICE:
        if (!cofi_cli_choice("--device", optarg, "cpu|cuda", &choice))
            return false;
        o->cuda = choice == 1;
        return true;
    }
    return false;
}

static int check_cuda(struct cofi_attention_options *o)
{
    if (o->engine == COF_ENGINE_THREAD)
        return cofi_cli_error("option --engine = \"thread\": wanted shm with --device cuda");
    if (o->backward)
        return cofi_cli_error("option --backward: wanted --device cpu with it; there is no "
                              "backward on CUDA devices yet");
    if (o->time)
        return cofi_cli_error("option --time: wanted --device cpu with it; cofuse bench attention "
                              "--device cuda tells rates");
    o->engine = COF_ENGINE_CUDA;
    if (cofi_check_cuda())
        return COFI_EXIT_OK;
    cofi_cli_error("option --device = \"cuda\": this program was built without CUDA");
    return COFI_EXIT_UNSUPPORTED;
}

/* What options mean together. COFI_EXIT_OK or the exit code after a message. */
static int check_options(struct cofi_attention_options *o, int argc, char **argv)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    if (optind < argc)
        return cofi_cli_error("surplus word \"%s\"", argv[optind]);
    if (o->save_kv && !o->backward)
        return cofi_cli_error("option --save-kv: wanted with --backward, which reads what is kept");
    if (!o->input)
        return cofi_cli_error("option -i is missing (the file with q, k and v)");
    if (o->output && o->ranks.n > 1)
        return cofi_cli_error("option -o: wanted one rank count with it, --ranks has %d",
                              o->ranks.n);
    if (o->output && !cofi_tensors_may_write(o->input, o->output, error))
        return cofi_cli_error("%s", error);
    if (cofi_config_check() != COF_OK)
        return cofi_cli_error("%s", cof_last_error());
    if (o->cuda)
        return check_cuda(o);
    cofi_run_engine_default(&o->engine);
    return COFI_EXIT_OK;
}

/* ---- the ranks of one count ----------------------------------------------------------------- */

static cof_world_options world_options(const struct cofi_attention_run *run)
{
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.engine = run->engine;
    options.n_threads = run->n_threads;
    cofi_ranks_timeouts(&options, timeout_seconds +
                                      cofi_attention_flops(&run->params, run->backward) /
                                          slow_rate);
    return options;
}

static int rank_body(void *run, const cof_world_options *options, int rank)
{
    return cofi_attention_rank(run, options, rank);
}

/* A rank that is a process: started by cofi_ranks_run in its parent. */
static int run_as_process(void)
{
    struct cofi_attention_run *run =
        cofi_run_memory(sizeof *run, offsetof(struct cofi_attention_run, bytes));
    if (!run)
        return COFI_EXIT_RANK;
    cof_world_options options = world_options(run);
    return cofi_attention_rank(run, &options, (int)cofi_config_int(COFI_VAR_RANK));
}

static int run_ranks(struct cofi_attention_run *run, int n_ranks, int shared_fd, int argc,
                     char **argv)
{
    run->n_ranks = n_ranks;
    for (int i = COFI_AT_O; i < COFI_AT_N; i++) { /* a row that no rank stores stays NaN */
        struct cofi_attention_geometry g = cofi_attention_geometry(&run->params, i, 1);
        if (run->offset[i])
            memset(cofi_attention_run_tensor(run, i), 0xff,
                   (size_t)(g.n_outer * g.row_bytes * run->params.n_rows));
    }
    return cofi_ranks_run(&(struct cofi_ranks_spec){
        .n_ranks = n_ranks, .options = world_options(run), .body = rank_body, .arg = run,
        .shared_fd = shared_fd, .argc = argc, .argv = argv});
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Runs every rank count and prints the table of those that succeeded. */
static int run_counts(const struct cofi_attention_options *o, struct cofi_attention_run *run,
                      int shared_fd, int argc, char **argv)
{
    struct cofi_attention_row rows[COFI_MAX_RANK_COUNTS];
    struct cofi_attention_references *references = NULL;
    int code = COFI_EXIT_OK, n_rows = 0;
    bool all_passed = true;
    for (int i = 0; i < o->ranks.n && code == COFI_EXIT_OK; i++) {
        code = run_ranks(run, o->ranks.ranks[i], shared_fd, argc, argv);
        if (code != COFI_EXIT_OK)
            break;
        struct cofi_attention_row *row = &rows[n_rows++];
        cofi_attention_row_take(row, run);
        if (!o->compare)
            continue;
        if (!references) {
            cofi_cli_busy("computing the references");
            references = cofi_attention_references_make(run);
            cofi_cli_idle();
        }
        if (!references)
            code = COFI_EXIT_RANK;
        else
            all_passed &= cofi_attention_compare(references, run, row->verdicts);
    }
    cofi_attention_references_free(references);
    if (n_rows)
        cofi_attention_table_print(o, run, rows, n_rows);
    if (code == COFI_EXIT_OK && o->output && !cofi_attention_save(o, run))
        code = COFI_EXIT_RANK;
    return code == COFI_EXIT_OK && !all_passed ? COFI_EXIT_CHECK : code;
}

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return run_as_process();
    static char names[COFI_AT_N_INPUTS][8] = {"q", "k", "v", "dout"};
    struct cofi_attention_options o = {.ranks = {1, {4}}, .mask = -1, .layout = -1, .format = -1,
                                       .repeat = 3, .seed = 1};
    for (int i = 0; i < COFI_AT_N_INPUTS; i++)
        o.names[i] = names[i];
    for (int c; (c = cofi_cli_next(argc, argv, "i:o:h", long_options)) != -1;) {
        if (c == 'h') {
            fputs(usage, stdout);
            return COFI_EXIT_OK;
        }
        if (c == '?' || !parse_option(&o, c))
            return COFI_EXIT_USAGE;
    }
    int code = check_options(&o, argc, argv);
    if (code != COFI_EXIT_OK)
        return code;
    struct cofi_st_file file;
    struct cofi_attention_run *run = NULL;
    cof_attention_params params;
    int shared_fd = -1;
    if (!cofi_attention_open(&o, &file, &params) ||
        !cofi_attention_load(&o, &file, &params, &run, &shared_fd))
        code = COFI_EXIT_USAGE;
    cofi_st_close(&file);
    if (code == COFI_EXIT_OK)
        code = run_counts(&o, run, shared_fd, argc, argv);
    return code;
}

extern const struct cofi_op_check cofi_attention_check;
extern const struct cofi_op_bench cofi_attention_bench;
extern const struct cofi_op cofi_op_attention;

static const struct cofi_op_run attention_run = {.usage = usage, .command = command};

const struct cofi_op cofi_op_attention = {
    .name = "attention",
    .summary = "context-parallel attention, forward and backward",
    .check = &cofi_attention_check,
    .run = &attention_run,
    .bench = &cofi_attention_bench,
};
