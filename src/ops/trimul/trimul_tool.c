/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run trimul`: options, starting the ranks, and the table. */
#include "ops/trimul/trimul_tool.h"

#include <stddef.h>
#include <stdio.h>

#include "ops/check.h"
#include "tools/job.h"
#include "tools/tensor_files.h"

static const char usage[] =
    "usage: cofuse run trimul -i in.safetensors --weights w.safetensors [-o out.safetensors]\n"
    "                         [options]\n"
    "\n"
    "Reads x [B, N, N, D], and mask [B, N, N] and residual [B, N, N, D] where the file has them;\n"
    "runs the triangle multiplicative update over P ranks, each with a block of rows and\n"
    "columns, and writes out. With --backward dout [B, N, N, D] too, and writes dx and the\n"
    "gradients of the weights. direction, eps_in and eps_out default to the file's metadata,\n"
    "then to outgoing and 1e-5.\n"
    "\n"
    "The weights file has p_in.weight and g_in.weight [2H, D], p_out.weight [D, H],\n"
    "g_out.weight [D, D], and .bias of each, norm_in.weight, norm_in.bias [D],\n"
    "norm_out.weight, norm_out.bias [H] where the model has them. Each file may be .npy files\n"
    "instead, one a tensor:\n"
    "-i x=x.npy,mask=m.npy  --weights p_in.weight=p.npy,...  -o out=a.npy,dx=b.npy\n"
    "\n";

#define AT(member) offsetof(struct cofi_tm_options, member)

static const struct cofi_option options[] = {
    COFI_RUN_INPUT("tensors x, mask, residual, dout; BF16, F16 or F32, mask F32 too"),
    {"weights", COFI_OPTION_TEXT, AT(weights), NULL, 0, 0, 0, "FILE",
     "the weights, in x's type; those of norms in F32 too"},
    COFI_RUN_OUTPUT,
    {"ranks", COFI_OPTION_INT, AT(n_ranks), NULL, 1, COFI_MAX_RANKS, 0, "P", "how many [4]"},
    COFI_RUN_DEVICE,
    COFI_RUN_ENGINE,
    {"grid", COFI_OPTION_INTS, AT(c.grid), "x2", 1, COFI_MAX_RANKS, 0, "RxC",
     "parts of the rows x parts of the columns [Px1]"},
    {"shard", COFI_OPTION_CHOICE, AT(c.shard), "balanced|chunk|explicit", 0, 0, 0, "S",
     "balanced; chunk: as torch.chunk; explicit [balanced]"},
    {"row_offsets", COFI_OPTION_INTS, AT(c.rows), ":", 0, 1e9, 0, "0:..:N",
     "of the parts, with --shard explicit"},
    {"col_offsets", COFI_OPTION_INTS, AT(c.cols), ":", 0, 1e9, 0, "0:..:N", "likewise"},
    {"direction", COFI_OPTION_CHOICE, AT(c.direction), "outgoing|incoming", 0, 0, 0, "D",
     "outgoing or incoming edges"},
    {"eps_in", COFI_OPTION_NUMBER, AT(c.eps_in), NULL, 1e-37, 1e37, 0, "X",
     "added to the variance of x"},
    {"eps_out", COFI_OPTION_NUMBER, AT(c.eps_out), NULL, 1e-37, 1e37, 0, "X",
     "added to the variance of the triangle's sums"},
    {"order", COFI_OPTION_CHOICE, AT(order), "stacked|interleaved", 0, 0, 0, "O",
     "of the rows of p_in and g_in: a then b, or in turn; the\n"
     "weights' metadata, then stacked"},
    {"swap_ab", COFI_OPTION_FLAG, AT(swap_ab), NULL, 0, 0, 0, NULL,
     "a and b change places: AlphaFold 2's incoming edges"},
    {"backward", COFI_OPTION_FLAG, AT(backward), NULL, 0, 0, 0, NULL, "backward too"},
    {"save", COFI_OPTION_CHOICE, AT(c.save), "none|ab", 0, 0, 0, "W",
     "what forward keeps for it: nothing, or a, b and the sums"},
    {"chunk_features", COFI_OPTION_INT, AT(c.chunk), NULL, 0, 8192, 0, "N",
     "features of a rank in flight at a time; 0: chosen [0]"},
    COFI_RUN_THREADS,
    COFI_RUN_COMPARE("with the reference in fp64; exit 1 when a value is too far off"),
    COFI_RUN_REPEAT,
    {"seed", COFI_OPTION_INT, AT(seed), NULL, 0, 9e15, 0, "S",
     "of a standard normal dout where the file has none; written\nout too [1]"},
    COFI_RUN_NAMES("x=key,...", "keys of x, mask, residual, dout in the file"),
    {0}};

/* What options mean together. COFI_EXIT_OK or the exit code after a message. */
static int check_options(struct cofi_tm_options *o)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    if (!o->weights)
        return cofi_cli_error("option --weights is missing");
    if (o->c.save && !o->backward)
        return cofi_cli_error("option --save = \"ab\": wanted with --backward, which reads it");
    if (o->c.grid.n && o->c.grid.at[0] * o->c.grid.at[1] != o->n_ranks)
        return cofi_cli_error("option --grid: wanted RxC with R * C = %lld ranks",
                              (long long)o->n_ranks);
    if (o->run.output && !cofi_tensors_may_write(o->weights, o->run.output, error))
        return cofi_cli_error("%s", error);
    return cofi_run_settle(&o->run, "x");
}

/* ---- the table ------------------------------------------------------------------------------ */

static double call_ms(const struct cofi_tm_run *run, int direction)
{
    const double *times = cofi_tm_run_at(run, run->times);
    return cofi_run_slowest(times + direction, run->head.n_ranks, 2) * 1e3;
}

/* out, dx, and the worst of the gradients. */
static bool print_table(const struct cofi_tm_options *o, const struct cofi_tm_run *run,
                        const struct cofi_tm_verdict verdicts[COFI_TM_E_N])
{
    struct cofi_tm_verdict grads = {0};
    for (int e = COFI_TM_E_GRADS; e < COFI_TM_E_N; e++) {
        grads.n_far += verdicts[e].n_far;
        if (verdicts[e].rel_rmse > grads.rel_rmse)
            grads.rel_rmse = verdicts[e].rel_rmse;
    }
    const struct cofi_tm_verdict shown[] = {verdicts[COFI_TM_E_OUT], verdicts[COFI_TM_E_DX],
                                             grads};
    static const char *const names[] = {"out", "dx", "gradients"};
    int n_shown = !o->run.compare ? 0 : o->backward ? 3 : 1;
    bool ok = true;
    printf("plan %s\n\nranks   grid  forward ms%s", run->head.describe,
           o->backward ? "  backward ms" : "");
    for (int i = 0; i < n_shown; i++)
        printf("  %9s  rel-RMSE", names[i]);
    printf("\n%5d  %2lldx%-2lld  %10.3f", run->head.n_ranks, (long long)run->c.grid.at[0],
           (long long)run->c.grid.at[1], call_ms(run, 0));
    if (o->backward)
        printf("  %11.3f", call_ms(run, 1));
    for (int i = 0; i < n_shown; i++) {
        printf("  %9s  %.2e", shown[i].n_far ? "FAIL" : "ok", shown[i].rel_rmse);
        ok &= shown[i].n_far == 0;
    }
    printf("\n");
    for (int e = 0; e < COFI_TM_E_N && !ok; e++)
        if (verdicts[e].n_far)
            printf("%s: %lld of %lld values are too far from fp64\n",
                   e == COFI_TM_E_OUT  ? "out"
                   : e == COFI_TM_E_DX ? "dx"
                                        : cofi_tm_weights[e - COFI_TM_E_GRADS].name,
                   (long long)verdicts[e].n_far, (long long)verdicts[e].n);
    return ok;
}

static int run_and_report(const struct cofi_tm_options *o, struct cofi_tm_run *run, int shared_fd,
                          int argc, char **argv)
{
    struct cofi_tm_verdict verdicts[COFI_TM_E_N] = {{0}};
    int code = cofi_run_ranks(&run->head, cofi_tm_tool_rank, shared_fd, argc, argv);
    if (code != COFI_EXIT_OK)
        return code;
    if (o->run.compare) {
        cofi_cli_busy("computing the reference");
        bool ok = cofi_tm_tool_compare(run, verdicts);
        cofi_cli_idle();
        if (!ok)
            return COFI_EXIT_RANK;
    }
    bool passed = print_table(o, run, verdicts);
    if (o->run.output && !cofi_tm_tool_save(o, run))
        return COFI_EXIT_RANK;
    return passed ? COFI_EXIT_OK : COFI_EXIT_CHECK;
}

/* ---- the command ---------------------------------------------------------------------------- */

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return cofi_run_as_rank(sizeof(struct cofi_tm_run), cofi_tm_tool_rank);
    struct cofi_tm_options o = {.run = cofi_run_options_make(cofi_tm_input_names, COFI_TM_INPUTS),
                                .c.direction = -1, .order = -1, .n_ranks = 4, .seed = 1};
    struct cofi_tm_run *run = NULL;
    int code, shared_fd = -1;
    if (!cofi_run_read(argc, argv, usage, options, &o.run, &code))
        return code;
    code = check_options(&o);
    if (code != COFI_EXIT_OK)
        return code;
    if (!cofi_tm_tool_load(&o, &run, &shared_fd))
        return COFI_EXIT_USAGE;
    return run_and_report(&o, run, shared_fd, argc, argv);
}

extern const struct cofi_op_check cofi_trimul_check;
extern const struct cofi_op_bench cofi_trimul_bench;
extern const struct cofi_op cofi_op_trimul;

const struct cofi_op cofi_op_trimul = {
    .name = "trimul",
    .summary = "triangle multiplicative update of pairs, forward and backward",
    .check = &cofi_trimul_check,
    .run = command,
    .bench = &cofi_trimul_bench,
};
