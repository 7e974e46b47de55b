/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run attention`: parent and ranks share one block of memory. It begins with struct
 * cofi_attention_run, which tells the ranks everything; the global tensors follow. */
#ifndef COFI_ATTENTION_TOOL_H
#define COFI_ATTENTION_TOOL_H

#include <stdbool.h>
#include <stddef.h>

#include "cofuse/cofuse.h"
#include "tools/cli.h"
#include "tools/run_op.h"

/* The tensors, as they are numbered everywhere in the tool. */
enum { COFI_AT_Q, COFI_AT_K, COFI_AT_V, COFI_AT_DOUT, COFI_AT_O, COFI_AT_LSE, COFI_AT_DQ,
       COFI_AT_DK, COFI_AT_DV, COFI_AT_N };
enum { COFI_AT_N_INPUTS = COFI_AT_O };
extern const char *const cofi_attention_tensor_names[COFI_AT_N];

enum { COFI_AT_RATE_WINDOWS = 3 };

struct cofi_attention_options {
    struct cofi_run_options run;
    struct cofi_ints ranks, window; /* window: left, right; none: no window */
    int mask, layout, format; /* -1: from the file's metadata */
    double scale;             /* NaN: likewise */
    int64_t seed;
    int schedule; /* cof_attention_schedule */
    int wire;     /* 1: f32 */
    bool backward, time, save_kv;
};
COFI_RUN_FIRST(struct cofi_attention_options);

struct cofi_attention_run {
    struct cofi_run_head head;
    cof_attention_params params; /* complete: no value left to a default, but scale */
    bool backward, measure_rate;
    bool new_dout; /* made from the seed, not read */
    size_t times;            /* offset of double [n_ranks][repeat][2]: seconds, forward, backward */
    size_t offset[COFI_AT_N]; /* of the tensors, from the beginning of this struct */
    double rate[COFI_MAX_RANKS][COFI_AT_RATE_WINDOWS]; /* tile products, flop/s */
};

static inline void *cofi_attention_run_tensor(struct cofi_attention_run *run, int which)
{
    return (char *)run + run->offset[which];
}

static inline double *cofi_attention_run_times(struct cofi_attention_run *run, int rank)
{
    return (double *)((char *)run + run->times) + (int64_t)rank * run->head.repeat * 2;
}

static inline double cofi_attention_scale(const cof_attention_params *params)
{
    return params->scale != 0 ? params->scale : 1 / __builtin_sqrt((double)params->head_dim_qk);
}

/* A tensor of `n_rows` rows. Row r is, for every i < n_outer, the row_bytes at
 * (i * n_rows + r) * row_bytes. */
struct cofi_attention_geometry {
    cof_dtype dtype;
    int ndim;
    int64_t shape[4];
    int64_t n_outer, row_bytes;
};
struct cofi_attention_geometry cofi_attention_geometry(const cof_attention_params *params,
                                                       int which, int64_t n_rows);

/* attention_tool_files.c. Each false after a message.
 * open: checks that the file's tensors fit together and fills the parameters.
 * load: lays out and fills the shared memory; *fd_out is its descriptor. */
bool cofi_attention_open(const struct cofi_attention_options *options, struct cofi_st_file *file,
                         cof_attention_params *params_out);
bool cofi_attention_load(const struct cofi_attention_options *options,
                         const struct cofi_st_file *file, const cof_attention_params *params,
                         struct cofi_attention_run **run_out, int *fd_out);
bool cofi_attention_save(const struct cofi_attention_options *options,
                         struct cofi_attention_run *run);

/* attention_tool_rank.c: one rank of a struct cofi_attention_run, from joining its world to storing
 * its rows. */
int cofi_attention_rank(void *run, const cof_world_options *options, int rank);

/* attention_tool_rate.c: the products of attention's tiles on the world's threads, all ranks at a
 * time; flop/s of this rank. Collective. */
cof_status cofi_attention_tile_rate(cof_world *world, const cof_attention_params *params,
                                    double seconds, double *rate_out);
cof_status cofi_attention_measure_rate(struct cofi_attention_run *run, cof_world *world);

/* attention_tool_compare.c: the references of a run's inputs, made once, and the verdicts. */
struct cofi_attention_references;
struct cofi_attention_verdict {
    bool has, passed;
    double rel_rmse;
    char text[200]; /* errors and bounds */
};
struct cofi_attention_references *cofi_attention_references_make(struct cofi_attention_run *run);
void cofi_attention_references_free(struct cofi_attention_references *references);
bool cofi_attention_compare(const struct cofi_attention_references *references,
                            struct cofi_attention_run *run,
                            struct cofi_attention_verdict verdicts_out[COFI_AT_N]);

#endif
