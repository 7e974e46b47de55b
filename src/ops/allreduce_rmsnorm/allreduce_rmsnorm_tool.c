/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run allreduce_rmsnorm`: options, starting the ranks, and the table. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "core/config.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_tool.h"
#include "ops/check.h"
#include "tools/job.h"
#include "tools/ranks.h"
#include "tools/run_op.h"
#include "tools/tensor_files.h"

static const char usage[] =
    "usage: cofuse run allreduce_rmsnorm -i in.safetensors [-o out.safetensors] [options]\n"
    "\n"
    "Reads x [P, T, H], an addend for each of P ranks, residual [T, H] and weight [H], runs P\n"
    "ranks, and writes residual_out and norm_out [T, H]. variant, rounding, eps and weight-bias\n"
    "default to the file's metadata, then to the first choice and eps 1e-6.\n"
    "\n"
    "Either file may be .npy files instead, one a tensor, which have no metadata and no BF16:\n"
    "-i x=x.npy,residual=r.npy,weight=w.npy  -o residual_out=a.npy,norm_out=b.npy; an output that\n"
    "-o does not name is not written.\n"
    "\n"
    "  -i, --input FILE       tensors x, residual, weight; BF16, F16 or F32, weight F32 too\n"
    "  -o, --output FILE      written to a temporary name, then renamed\n"
    "      --ranks P          must be the file's P; with an x made by --seed, how many\n"
    "      --device D         cpu; cuda: ranks are processes on the CUDA devices, in turn [cpu]\n"
    "      --engine E         shm: processes; thread: threads of this process [COFUSE_ENGINE]\n"
    "      --variant V        residual_norm, norm: without residual, or only: the sum alone\n"
    "      --rounding R       match_unfused: of the sum too; exact: of the outputs alone\n"
    "      --eps X            added to the mean of the squares\n"
    "      --weight-bias B    0, or 1: added to the weights\n"
    "      --algorithm A      auto, one_shot or two_shot, both with the same bits [auto]\n"
    "      --max-tokens N     rows that the plan's buffers hold [T]\n"
    "      --threads N        per rank; 0: COFUSE_THREADS, else cores / ranks [0]\n"
    "      --compare          with the reference, all ranks bit for bit, and rank 0's values\n"
    "                         with fp64; exit 1 when a bit differs or a value is too far off\n"
    "      --repeat N         timed calls after one to warm up; the best counts [3]\n"
    "      --seed S           of a standard normal x where the file has none; written out too\n"
    "      --names x=key,...  keys of x, residual, weight in the file\n";

enum { OPT_RANKS = 256, OPT_DEVICE, OPT_ENGINE, OPT_VARIANT, OPT_ROUNDING, OPT_EPS, OPT_WEIGHT_BIAS,
       OPT_ALGORITHM, OPT_MAX_TOKENS, OPT_THREADS, OPT_COMPARE, OPT_REPEAT, OPT_SEED, OPT_NAMES };

static const struct option long_options[] = {
    {"input", required_argument, NULL, 'i'},
    {"output", required_argument, NULL, 'o'},
    {"ranks", required_argument, NULL, OPT_RANKS},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"engine", required_argument, NULL, OPT_ENGINE},
    {"variant", required_argument, NULL, OPT_VARIANT},
    {"rounding", required_argument, NULL, OPT_ROUNDING},
    {"eps", required_argument, NULL, OPT_EPS},
    {"weight-bias", required_argument, NULL, OPT_WEIGHT_BIAS},
    {"algorithm", required_argument, NULL, OPT_ALGORITHM},
    {"max-tokens", required_argument, NULL, OPT_MAX_TOKENS},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"compare", no_argument, NULL, OPT_COMPARE},
    {"repeat", required_argument, NULL, OPT_REPEAT},
    {"seed", required_argument, NULL, OPT_SEED},
    {"names", required_argument, NULL, OPT_NAMES},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* ---- options -------------------------------------------------------------------------------- */

static bool parse_option(struct cofi_arn_options *o, int c)
{
    int64_t n = 0;
    int choice = 0;
    bool ok;
    switch (c) {
    case 'i': o->input = optarg; return true;
    case 'o': o->output = optarg; return true;
    case OPT_RANKS:
        ok = cofi_cli_int("--ranks", optarg, 1, COFI_ARN_MAX_RANKS, &n);
        o->n_ranks = (int)n;
        return ok;
    case OPT_DEVICE:
        ok = cofi_cli_choice("--device", optarg, "cpu|cuda", &choice);
        o->cuda = choice == 1;
        return ok;
    case OPT_ENGINE: return cofi_run_engine(optarg, &o->engine);
    case OPT_VARIANT:
        return cofi_cli_choice("--variant", optarg, "residual_norm|norm|only", &o->variant);
    case OPT_ROUNDING:
        return cofi_cli_choice("--rounding", optarg, "match_unfused|exact", &o->rounding);
    case OPT_EPS: return cofi_cli_double("--eps", optarg, 1e-30, 1e30, &o->eps);
    case OPT_WEIGHT_BIAS: return cofi_cli_choice("--weight-bias", optarg, "0|1", &o->weight_bias);
    case OPT_ALGORITHM:
        return cofi_cli_choice("--algorithm", optarg, "auto|one_shot|two_shot", &o->algorithm);
    case OPT_MAX_TOKENS:
        return cofi_cli_int("--max-tokens", optarg, 1, INT64_C(1) << 40, &o->max_tokens);
    case OPT_THREADS: return cofi_cli_int("--threads", optarg, 0, 256, &o->n_threads);
    case OPT_COMPARE: o->compare = true; return true;
    case OPT_REPEAT: return cofi_cli_int("--repeat", optarg, 1, 1000, &o->repeat);
    case OPT_SEED: return cofi_cli_int("--seed", optarg, 0, INT64_MAX, &o->seed);
    case OPT_NAMES:
        return cofi_run_names(optarg, cofi_arn_input_names, COFI_ARN_N_INPUTS, o->names,
                              o->names_text, sizeof o->names_text);
    }
    return false;
}

static int check_options(struct cofi_arn_options *o, int argc, char **argv)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    if (optind < argc)
        return cofi_cli_error("surplus word \"%s\"", argv[optind]);
    if (!o->input)
        return cofi_cli_error("option -i is missing (the file with x, residual and weight)");
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

/* ---- the ranks ------------------------------------------------------------------------------ */

static cof_world_options world_options(const struct cofi_arn_run *run)
{
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.engine = run->engine;
    options.n_threads = run->n_threads;
    cofi_ranks_timeouts(&options, 20);
    return options;
}

static int rank_body(void *run, const cof_world_options *options, int rank)
{
    return cofi_arn_tool_rank(run, options, rank);
}

static int run_as_process(void)
{
    struct cofi_arn_run *run = cofi_run_memory(sizeof *run, offsetof(struct cofi_arn_run, bytes));
    if (!run)
        return COFI_EXIT_RANK;
    cof_world_options options = world_options(run);
    return cofi_arn_tool_rank(run, &options, (int)cofi_config_int(COFI_VAR_RANK));
}

/* ---- the table ------------------------------------------------------------------------------ */

static double call_seconds(const struct cofi_arn_run *run)
{
    const double *times = (const double *)((const char *)run + run->times);
    double seconds = 0;
    for (int r = 0; r < run->n_ranks; r++)
        seconds = times[r] > seconds ? times[r] : seconds;
    return seconds;
}

static bool has_passed(const struct cofi_arn_verdict *verdict)
{
    return verdict->n_different == 0 && verdict->n_far == 0;
}

static void print_table(const struct cofi_arn_run *run, const struct cofi_arn_verdict *verdicts)
{
    printf("plan %s\n\nranks  call ms", run->describe);
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (verdicts[i].has)
            printf("  %s  rel-RMSE", cofi_arn_output_names[i]);
    printf("\n%5d  %7.3f", run->n_ranks, call_seconds(run) * 1e3);
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (verdicts[i].has)
            printf("  %*s  %.2e", (int)strlen(cofi_arn_output_names[i]),
                   has_passed(&verdicts[i]) ? "ok" : "FAIL", verdicts[i].rel_rmse);
    printf("\n");
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (!has_passed(&verdicts[i]))
            printf("%s: %lld elements of all ranks have other bits than the reference, %lld are "
                   "too far from fp64\n", cofi_arn_output_names[i],
                   (long long)verdicts[i].n_different, (long long)verdicts[i].n_far);
}

static int run_and_report(const struct cofi_arn_options *o, struct cofi_arn_run *run, int shared_fd,
                          int argc, char **argv)
{
    struct cofi_arn_verdict verdicts[COFI_ARN_N_OUTPUTS] = {{0}};
    int code = cofi_ranks_run(&(struct cofi_ranks_spec){
        .n_ranks = run->n_ranks, .options = world_options(run), .body = rank_body, .arg = run,
        .shared_fd = shared_fd, .argc = argc, .argv = argv});
    if (code != COFI_EXIT_OK)
        return code;
    if (o->compare) {
        cofi_cli_busy("computing the references");
        bool ok = cofi_arn_tool_compare(run, verdicts);
        cofi_cli_idle();
        if (!ok)
            return COFI_EXIT_RANK;
    }
    print_table(run, verdicts);
    if (o->output && !cofi_arn_tool_save(o, run))
        return COFI_EXIT_RANK;
    return has_passed(&verdicts[0]) && has_passed(&verdicts[1]) ? COFI_EXIT_OK : COFI_EXIT_CHECK;
}

/* ---- the command ---------------------------------------------------------------------------- */

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return run_as_process();
    static char names[COFI_ARN_N_INPUTS][16] = {"x", "residual", "weight"};
    struct cofi_arn_options o = {.variant = -1, .rounding = -1, .weight_bias = -1, .repeat = 3,
                                 .seed = -1, .names = {names[0], names[1], names[2]}};
    for (int c; (c = cofi_cli_next(argc, argv, "i:o:h", long_options)) != -1;) {
        if (c == 'h') {
            fputs(usage, stdout);
            return COFI_EXIT_OK;
        }
        if (c == '?' || !parse_option(&o, c))
            return COFI_EXIT_USAGE;
    }
    int code = check_options(&o, argc, argv), shared_fd = -1;
    struct cofi_arn_run *run = NULL;
    if (code != COFI_EXIT_OK)
        return code;
    if (!cofi_arn_tool_load(&o, &run, &shared_fd))
        return COFI_EXIT_USAGE;
    return run_and_report(&o, run, shared_fd, argc, argv);
}

extern const struct cofi_op_check cofi_allreduce_rmsnorm_check;
extern const struct cofi_op_bench cofi_allreduce_rmsnorm_bench;
extern const struct cofi_op cofi_op_allreduce_rmsnorm;

static const struct cofi_op_run allreduce_rmsnorm_run = {.usage = usage, .command = command};

const struct cofi_op cofi_op_allreduce_rmsnorm = {
    .name = "allreduce_rmsnorm",
    .summary = "all-reduce, residual and RMSNorm in one",
    .check = &cofi_allreduce_rmsnorm_check,
    .run = &allreduce_rmsnorm_run,
    .bench = &cofi_allreduce_rmsnorm_bench,
};
