/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run attention`: options, starting the ranks, and the table. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ops/attention/attention_tool.h"
#include "ops/attention/attention_tool_table.h"
#include "ops/check.h"
#include "tools/job.h"

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
    "\n";

#define AT(member) offsetof(struct cofi_attention_options, member)

static const struct cofi_option options[] = {
    COFI_RUN_INPUT("tensors q, k, v [B, S, H, D], BF16, F16 or F32; dout"),
    COFI_RUN_OUTPUT,
    {"ranks", COFI_OPTION_INTS, AT(ranks), ",", 1, COFI_MAX_RANKS, 0, "N[,N...]",
     "ranks to start; with several counts a row of the table each [4]"},
    COFI_RUN_DEVICE,
    COFI_RUN_ENGINE,
    {"mask", COFI_OPTION_CHOICE, AT(mask), "none|causal", 0, 0, 0, "M", "none or causal"},
    {"window", COFI_OPTION_INTS, AT(window), ":2", -1, 0x1p56, 0, "L:R",
     "of these keys L rows before a query and R behind it; -1: all"},
    {"layout", COFI_OPTION_CHOICE, AT(layout), "zigzag|contiguous", 0, 0, 0, "L",
     "zigzag or contiguous"},
    {"format", COFI_OPTION_CHOICE, AT(format), "bshd|sbhd", 0, 0, 0, "F",
     "order of the dims: bshd or sbhd"},
    {"scale", COFI_OPTION_NUMBER, AT(scale), NULL, -1e30, 1e30, 0, "X",
     "of the scores; 0: 1/sqrt(D)"},
    COFI_RUN_THREADS,
    {"backward", COFI_OPTION_FLAG, AT(backward), NULL, 0, 0, 0, NULL,
     "gradients too; dout from the file, else normal by --seed"},
    COFI_RUN_COMPARE("with the fp64 reference; exit 1 when an error is over its bound"),
    {"time", COFI_OPTION_FLAG, AT(time), NULL, 0, 0, 0, NULL,
     "rates, beside that of the bare tile products on the same threads"},
    COFI_RUN_REPEAT,
    COFI_RUN_NAMES("k=key,...", "keys of q, k, v, dout in the file"),
    {"seed", COFI_OPTION_INT, AT(seed), NULL, 0, 9e18, 0, "S", "of dout [1]"},
    {"wire", COFI_OPTION_CHOICE, AT(wire), "dtype|f32", 0, 0, 0, "W",
     "how partial dk, dv travel: dtype or f32 [dtype]"},
    {"schedule", COFI_OPTION_CHOICE, AT(schedule), "auto|ring|gather", 0, 0, 0, "S",
     "ring, gather, or auto: by the number of rows [auto]"},
    {"save_kv", COFI_OPTION_FLAG, AT(save_kv), NULL, 0, 0, 0, NULL,
     "forward keeps the others' keys for backward"},
    {0}};

/* What options mean together. COFI_EXIT_OK or the exit code after a message. */
static int check_options(struct cofi_attention_options *o)
{
    if (o->save_kv && !o->backward)
        return cofi_cli_error("option --save-kv: wanted with --backward, which reads what is kept");
    if (o->run.output && o->ranks.n > 1)
        return cofi_cli_error("option -o: wanted one rank count with it, --ranks has %d",
                              o->ranks.n);
    if (o->run.device && o->backward)
        return cofi_cli_error("option --backward: wanted --device cpu with it; there is no "
                              "backward on CUDA devices yet");
    if (o->run.device && o->time)
        return cofi_cli_error("option --time: wanted --device cpu with it; cofuse bench attention "
                              "--device cuda tells rates");
    return cofi_run_settle(&o->run, "q, k and v");
}

/* ---- the ranks of one count ----------------------------------------------------------------- */

static int run_ranks(struct cofi_attention_run *run, int n_ranks, int shared_fd, int argc,
                     char **argv)
{
    run->head.n_ranks = n_ranks;
    for (int i = COFI_AT_O; i < COFI_AT_N; i++) { /* a row that no rank stores stays NaN */
        struct cofi_attention_geometry g = cofi_attention_geometry(&run->params, i, 1);
        if (run->offset[i])
            memset(cofi_attention_run_tensor(run, i), 0xff,
                   (size_t)(g.n_outer * g.row_bytes * run->params.n_rows));
    }
    return cofi_run_ranks(&run->head, cofi_attention_rank, shared_fd, argc, argv);
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Runs every rank count and prints the table of those that succeeded. */
static int run_counts(const struct cofi_attention_options *o, struct cofi_attention_run *run,
                      int shared_fd, int argc, char **argv)
{
    struct cofi_attention_row rows[COFI_INTS_MAX];
    struct cofi_attention_references *references = NULL;
    int code = COFI_EXIT_OK, n_rows = 0;
    bool all_passed = true;
    for (int i = 0; i < o->ranks.n && code == COFI_EXIT_OK; i++) {
        code = run_ranks(run, (int)o->ranks.at[i], shared_fd, argc, argv);
        if (code != COFI_EXIT_OK)
            break;
        struct cofi_attention_row *row = &rows[n_rows++];
        cofi_attention_row_take(row, run);
        if (!o->run.compare)
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
    if (code == COFI_EXIT_OK && o->run.output && !cofi_attention_save(o, run))
        code = COFI_EXIT_RANK;
    return code == COFI_EXIT_OK && !all_passed ? COFI_EXIT_CHECK : code;
}

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return cofi_run_as_rank(sizeof(struct cofi_attention_run), cofi_attention_rank);
    struct cofi_attention_options o = {
        .run = cofi_run_options_make(cofi_attention_tensor_names, COFI_AT_N_INPUTS),
        .ranks = {1, {4}}, .mask = -1, .layout = -1, .format = -1, .scale = NAN, .seed = 1};
    int code;
    if (!cofi_run_read(argc, argv, usage, options, &o.run, &code))
        return code;
    code = check_options(&o);
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

const struct cofi_op cofi_op_attention = {
    .name = "attention",
    .summary = "context-parallel attention, forward and backward",
    .check = &cofi_attention_check,
    .run = command,
    .bench = &cofi_attention_bench,
};
