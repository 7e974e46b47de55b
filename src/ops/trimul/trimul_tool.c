/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run trimul`: options, starting the ranks, and the table. */
#include "ops/trimul/trimul_tool.h"

#include <stddef.h>
#include <stdio.h>

#include "core/config.h"
#include "ops/check.h"
#include "tools/job.h"
#include "tools/ranks.h"
#include "tools/run_op.h"
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
enum { CALL_ENGINE, CALL_NAMES };

static const struct cofi_option options[] = {
    {"input", COFI_OPTION_TEXT, AT(input), NULL, 0, 0, 'i', "FILE",
     "tensors x, mask, residual, dout; BF16, F16 or F32, mask F32 too"},
    {"weights", COFI_OPTION_TEXT, AT(weights), NULL, 0, 0, 0, "FILE",
     "the weights, in x's type; those of norms in F32 too"},
    {"output", COFI_OPTION_TEXT, AT(output), NULL, 0, 0, 'o', "FILE",
     "written to a temporary name, then renamed"},
    {"ranks", COFI_OPTION_INT, AT(n_ranks), NULL, 1, COFI_MAX_RANKS, 0, "P", "how many [4]"},
    {"device", COFI_OPTION_CHOICE, AT(device), "cpu|cuda", 0, 0, 0, "D",
     "cpu; cuda: ranks are processes on the CUDA devices, in turn [cpu]"},
    {"engine", COFI_OPTION_CALL, CALL_ENGINE, NULL, 0, 0, 0, "E",
     "shm: processes; thread: threads of this process [COFUSE_ENGINE]"},
    {"grid", COFI_OPTION_INTS, AT(c.grid), "x", 0, COFI_MAX_RANKS, 0, "RxC",
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
    {"threads", COFI_OPTION_INT, AT(n_threads), NULL, 0, 256, 0, "N",
     "per rank; 0: COFUSE_THREADS, else cores / ranks [0]"},
    {"compare", COFI_OPTION_FLAG, AT(compare), NULL, 0, 0, 0, NULL,
     "with the reference in fp64; exit 1 when a value is too far off"},
    {"repeat", COFI_OPTION_INT, AT(repeat), NULL, 1, 1000, 0, "N",
     "timed calls after one to warm up; the best counts [3]"},
    {"seed", COFI_OPTION_INT, AT(seed), NULL, 0, 9e15, 0, "S",
     "of a standard normal dout where the file has none; written\nout too [1]"},
    {"names", COFI_OPTION_CALL, CALL_NAMES, NULL, 0, 0, 0, "x=key,...",
     "keys of x, mask, residual, dout in the file"},
    {0}};

static bool take_call(void *target, const struct cofi_option *option, const char *text)
{
    struct cofi_tm_options *o = target;
    if (option->place == CALL_ENGINE)
        return cofi_run_engine(text, &o->engine);
    return cofi_run_names(text, cofi_tm_input_names, COFI_TM_INPUTS, o->names, o->names_text,
                          sizeof o->names_text);
}

/* What options mean together. COFI_EXIT_OK or the exit code after a message. */
static int check_options(struct cofi_tm_options *o)
{
    char error[COFI_SAFETENSORS_ERROR_BYTES];
    if (!o->input)
        return cofi_cli_error("option -i is missing (the file with x)");
    if (!o->weights)
        return cofi_cli_error("option --weights is missing");
    if (o->c.save && !o->backward)
        return cofi_cli_error("option --save = \"ab\": wanted with --backward, which reads it");
    if (o->c.grid.n && (o->c.grid.n != 2 || !o->c.grid.at[0] || !o->c.grid.at[1] ||
                        o->c.grid.at[0] * o->c.grid.at[1] != o->n_ranks))
        return cofi_cli_error("option --grid: wanted RxC with R * C = %lld ranks",
                              (long long)o->n_ranks);
    if (o->output && (!cofi_tensors_may_write(o->input, o->output, error) ||
                      !cofi_tensors_may_write(o->weights, o->output, error)))
        return cofi_cli_error("%s", error);
    if (cofi_config_check() != COF_OK)
        return cofi_cli_error("%s", cof_last_error());
    if (o->device && o->engine == COF_ENGINE_THREAD)
        return cofi_cli_error("option --engine = \"thread\": wanted shm with --device cuda");
    cofi_run_engine_default(&o->engine);
    if (!o->device)
        return COFI_EXIT_OK;
    o->engine = COF_ENGINE_CUDA;
    if (cofi_check_cuda())
        return COFI_EXIT_OK;
    cofi_cli_error("option --device = \"cuda\": this program was built without CUDA");
    return COFI_EXIT_UNSUPPORTED;
}

/* ---- the ranks ------------------------------------------------------------------------------ */

/* A wait lasts at most as long as another rank computes, at 1e8 operations a second. */
static cof_world_options world_options(const struct cofi_tm_run *run)
{
    cof_world_options world = COF_WORLD_OPTIONS_INIT;
    world.engine = run->engine;
    world.n_threads = run->n_threads;
    cofi_ranks_timeouts(&world, 20 + cofi_tm_flops(&run->c, run->c.n.at[0], true) / 1e8);
    return world;
}

static int rank_body(void *run, const cof_world_options *world, int rank)
{
    return cofi_tm_tool_rank(run, world, rank);
}

static int run_as_process(void)
{
    struct cofi_tm_run *run = cofi_run_memory(sizeof *run, offsetof(struct cofi_tm_run, bytes));
    if (!run)
        return COFI_EXIT_RANK;
    cof_world_options world = world_options(run);
    return cofi_tm_tool_rank(run, &world, (int)cofi_config_int(COFI_VAR_RANK));
}

/* ---- the table ------------------------------------------------------------------------------ */

static double call_ms(const struct cofi_tm_run *run, int direction)
{
    const double *times = cofi_tm_run_at(run, run->times);
    double seconds = 0;
    for (int r = 0; r < run->n_ranks; r++)
        seconds = times[2 * r + direction] > seconds ? times[2 * r + direction] : seconds;
    return seconds * 1e3;
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
    int n_shown = !o->compare ? 0 : o->backward ? 3 : 1;
    bool ok = true;
    printf("plan %s\n\nranks   grid  forward ms%s", run->describe,
           o->backward ? "  backward ms" : "");
    for (int i = 0; i < n_shown; i++)
        printf("  %9s  rel-RMSE", names[i]);
    printf("\n%5d  %2lldx%-2lld  %10.3f", run->n_ranks, (long long)run->c.grid.at[0],
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
    int code = cofi_ranks_run(&(struct cofi_ranks_spec){
        .n_ranks = run->n_ranks, .options = world_options(run), .body = rank_body, .arg = run,
        .shared_fd = shared_fd, .argc = argc, .argv = argv});
    if (code != COFI_EXIT_OK)
        return code;
    if (o->compare) {
        cofi_cli_busy("computing the reference");
        bool ok = cofi_tm_tool_compare(run, verdicts);
        cofi_cli_idle();
        if (!ok)
            return COFI_EXIT_RANK;
    }
    bool passed = print_table(o, run, verdicts);
    if (o->output && !cofi_tm_tool_save(o, run))
        return COFI_EXIT_RANK;
    return passed ? COFI_EXIT_OK : COFI_EXIT_CHECK;
}

/* ---- the command ---------------------------------------------------------------------------- */

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return run_as_process();
    static char names[COFI_TM_INPUTS][16] = {"x", "mask", "residual", "dout"};
    struct cofi_tm_options o = {.c.direction = -1, .order = -1, .n_ranks = 4, .repeat = 3,
                                 .seed = 1};
    struct cofi_tm_run *run = NULL;
    int code, shared_fd = -1;
    for (int i = 0; i < COFI_TM_INPUTS; i++)
        o.names[i] = names[i];
    if (!cofi_option_read_command(argc, argv, usage, options, take_call, &o, &code))
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

static const struct cofi_op_run trimul_run = {.usage = usage, .command = command};

const struct cofi_op cofi_op_trimul = {
    .name = "trimul",
    .summary = "triangle multiplicative update of pairs, forward and backward",
    .check = &cofi_trimul_check,
    .run = &trimul_run,
    .bench = &cofi_trimul_bench,
};
