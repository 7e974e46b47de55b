/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run allreduce_rmsnorm`: options, starting the ranks, and the table. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_tool.h"
#include "ops/check.h"
#include "tools/job.h"

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
    "\n";

#define AT(member) offsetof(struct cofi_arn_options, member)

static const struct cofi_option options[] = {
    COFI_RUN_INPUT("tensors x, residual, weight; BF16, F16 or F32, weight F32 too"),
    COFI_RUN_OUTPUT,
    {"ranks", COFI_OPTION_INT, AT(n_ranks), NULL, 1, COFI_ARN_MAX_RANKS, 0, "P",
     "must be the file's P; with an x made by --seed, how many"},
    COFI_RUN_DEVICE,
    COFI_RUN_ENGINE,
    {"variant", COFI_OPTION_CHOICE, AT(variant), COFI_ARN_VARIANTS, 0, 0, 0, "V",
     "residual_norm, norm: without residual, or only: the sum alone"},
    {"rounding", COFI_OPTION_CHOICE, AT(rounding), COFI_ARN_ROUNDINGS, 0, 0, 0, "R",
     "match_unfused: of the sum too; exact: of the outputs alone"},
    {"eps", COFI_OPTION_NUMBER, AT(eps), NULL, 1e-30, 1e30, 0, "X",
     "added to the mean of the squares"},
    {"weight_bias", COFI_OPTION_CHOICE, AT(weight_bias), "0|1", 0, 0, 0, "B",
     "0, or 1: added to the weights"},
    {"algorithm", COFI_OPTION_CHOICE, AT(algorithm), "auto|one_shot|two_shot", 0, 0, 0, "A",
     "auto, one_shot or two_shot, both with the same bits [auto]"},
    {"max_tokens", COFI_OPTION_INT, AT(max_tokens), NULL, 1, 0x1p40, 0, "N",
     "rows that the plan's buffers hold [T]"},
    COFI_RUN_THREADS,
    COFI_RUN_COMPARE("with the reference, all ranks bit for bit, and rank 0's values\n"
                     "with fp64; exit 1 when a bit differs or a value is too far off"),
    COFI_RUN_REPEAT,
    {"seed", COFI_OPTION_INT, AT(seed), NULL, 0, 9e18, 0, "S",
     "of a standard normal x where the file has none; written out too"},
    COFI_RUN_NAMES("x=key,...", "keys of x, residual, weight in the file"),
    {0}};

/* ---- the table ------------------------------------------------------------------------------ */

static bool has_passed(const struct cofi_arn_verdict *verdict)
{
    return verdict->n_different == 0 && verdict->n_far == 0;
}

static void print_table(const struct cofi_arn_run *run, const struct cofi_arn_verdict *verdicts)
{
    const double *times = (const double *)((const char *)run + run->times);
    printf("plan %s\n\nranks  call ms", run->head.describe);
    for (int i = 0; i < COFI_ARN_N_OUTPUTS; i++)
        if (verdicts[i].has)
            printf("  %s  rel-RMSE", cofi_arn_output_names[i]);
    printf("\n%5d  %7.3f", run->head.n_ranks,
           cofi_run_slowest(times, run->head.n_ranks, 1) * 1e3);
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
    int code = cofi_run_ranks(&run->head, cofi_arn_tool_rank, shared_fd, argc, argv);
    if (code != COFI_EXIT_OK)
        return code;
    if (o->run.compare) {
        cofi_cli_busy("computing the references");
        bool ok = cofi_arn_tool_compare(run, verdicts);
        cofi_cli_idle();
        if (!ok)
            return COFI_EXIT_RANK;
    }
    print_table(run, verdicts);
    if (o->run.output && !cofi_arn_tool_save(o, run))
        return COFI_EXIT_RANK;
    return has_passed(&verdicts[0]) && has_passed(&verdicts[1]) ? COFI_EXIT_OK : COFI_EXIT_CHECK;
}

/* ---- the command ---------------------------------------------------------------------------- */

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return cofi_run_as_rank(sizeof(struct cofi_arn_run), cofi_arn_tool_rank);
    struct cofi_arn_options o = {
        .run = cofi_run_options_make(cofi_arn_input_names, COFI_ARN_N_INPUTS),
        .variant = -1, .rounding = -1, .weight_bias = -1, .seed = -1};
    struct cofi_arn_run *run = NULL;
    int code, shared_fd = -1;
    if (!cofi_run_read(argc, argv, usage, options, &o.run, &code))
        return code;
    code = cofi_run_settle(&o.run, "x, residual and weight");
    if (code != COFI_EXIT_OK)
        return code;
    if (!cofi_arn_tool_load(&o, &run, &shared_fd))
        return COFI_EXIT_USAGE;
    return run_and_report(&o, run, shared_fd, argc, argv);
}

extern const struct cofi_op_check cofi_allreduce_rmsnorm_check;
extern const struct cofi_op_bench cofi_allreduce_rmsnorm_bench;
extern const struct cofi_op cofi_op_allreduce_rmsnorm;

const struct cofi_op cofi_op_allreduce_rmsnorm = {
    .name = "allreduce_rmsnorm",
    .summary = "all-reduce, residual and RMSNorm in one",
    .check = &cofi_allreduce_rmsnorm_check,
    .run = command,
    .bench = &cofi_allreduce_rmsnorm_bench,
};
