/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run grad_return`: options, starting the ranks, comparing, and the table. */
#include <stddef.h>
#include <stdio.h>

#include "ops/check.h"
#include "ops/grad_return/grad_return_ref.h"
#include "ops/grad_return/grad_return_tool.h"
#include "tools/job.h"

static const char usage[] =
    "usage: cofuse run grad_return -i in.safetensors [-o out.safetensors] [options]\n"
    "\n"
    "Reads dk, dv [P, S, B, Hkv, D], one partial for each of P writers, runs as many ranks,\n"
    "returns the partials to the owners of their rows, and writes dk, dv [S, B, Hkv, D]. layout,\n"
    "chunking, transfer and writers default to the file's metadata, then to the first choice.\n"
    "\n"
    "Either file may be .npy files instead, one a tensor, which have no metadata and no BF16:\n"
    "-i dk=a.npy,dv=b.npy  -o dk=c.npy,dv=d.npy; an output that -o does not name is not written.\n"
    "\n";

#define AT(member) offsetof(struct cofi_gr_options, member)

static const struct cofi_option options[] = {
    COFI_RUN_INPUT("tensors dk and dv, BF16, F16 or F32"),
    COFI_RUN_OUTPUT,
    {"ranks", COFI_OPTION_INT, AT(n_ranks), NULL, 1, COFI_MAX_RANKS, 0, "P",
     "must be the file's P"},
    COFI_RUN_DEVICE,
    COFI_RUN_ENGINE,
    {"layout", COFI_OPTION_CHOICE, AT(layout), "zigzag|contiguous", 0, 0, 0, "L",
     "zigzag or contiguous"},
    {"chunking", COFI_OPTION_CHOICE, AT(chunking), "balanced|padded", 0, 0, 0, "C",
     "balanced or padded"},
    {"transfer", COFI_OPTION_CHOICE, AT(transfer), "push|pull", 0, 0, 0, "T", "push or pull"},
    {"by", COFI_OPTION_CHOICE, AT(by), "whole|section", 0, 0, 0, "B",
     "whole: one call; section: one call for each owner [whole]"},
    {"writers", COFI_OPTION_CHOICE, AT(writers), "all|causal", 0, 0, 0, "W",
     "all, or causal: who sees some of the chunk's keys"},
    {"wire", COFI_OPTION_CHOICE, AT(wire), "dtype|f32", 0, 0, 0, "W",
     "how partials travel: dtype or f32 [dtype]"},
    COFI_RUN_THREADS,
    COFI_RUN_COMPARE("with the serial reference, bit for bit; exit 1 when a bit differs"),
    COFI_RUN_REPEAT,
    COFI_RUN_NAMES("dk=key,...", "keys of dk and dv in the file"),
    {0}};

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
    struct cofi_gr_ref ref = {{p->layout, p->chunking, run->head.n_ranks, p->n_rows}, p->dtype,
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

static void print_table(const struct cofi_gr_run *run)
{
    const double *times = (const double *)((const char *)run + run->times);
    printf("plan %s\n\nranks  call ms\n%5d  %7.3f\n", run->head.describe, run->head.n_ranks,
           cofi_run_slowest(times, run->head.n_ranks, 1) * 1e3);
}

static int run_and_report(const struct cofi_gr_options *o, struct cofi_gr_run *run, int shared_fd,
                          int argc, char **argv)
{
    int code = cofi_run_ranks(&run->head, cofi_gr_rank, shared_fd, argc, argv);
    if (code != COFI_EXIT_OK)
        return code;
    print_table(run);
    int64_t different = 0;
    for (int is_v = 0; is_v < 2 && o->run.compare; is_v++) {
        int64_t n = count_different(run, is_v);
        printf("%s: %s\n", is_v ? "dv" : "dk", n ? "bits differ from the reference" : "ok");
        different += n;
    }
    if (o->run.output && !cofi_gr_save(o, run))
        return COFI_EXIT_RANK;
    return different ? COFI_EXIT_CHECK : COFI_EXIT_OK;
}

static int command(int argc, char **argv)
{
    if (cofi_job_is_rank())
        return cofi_run_as_rank(sizeof(struct cofi_gr_run), cofi_gr_rank);
    struct cofi_gr_options o = {.run = cofi_run_options_make(cofi_gr_tensor_names, 2),
                                .layout = -1, .chunking = -1, .transfer = -1, .writers = -1};
    struct cofi_gr_run *run = NULL;
    int code, shared_fd = -1;
    if (!cofi_run_read(argc, argv, usage, options, &o.run, &code))
        return code;
    code = cofi_run_settle(&o.run, "dk and dv");
    if (code != COFI_EXIT_OK)
        return code;
    if (!cofi_gr_load(&o, &run, &shared_fd))
        return COFI_EXIT_USAGE;
    return run_and_report(&o, run, shared_fd, argc, argv);
}

extern const struct cofi_op_check cofi_grad_return_check;
extern const struct cofi_op_bench cofi_grad_return_bench;
extern const struct cofi_op cofi_op_grad_return;

const struct cofi_op cofi_op_grad_return = {
    .name = "grad_return",
    .summary = "return of dK and dV to the owners of their rows",
    .check = &cofi_grad_return_check,
    .run = command,
    .bench = &cofi_grad_return_bench,
};
