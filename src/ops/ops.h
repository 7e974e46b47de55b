/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the program `cofuse` knows of an operator: its check cases, its `run` command and what
 * `cofuse bench` times. Compiled into the program and the tests, never into the library. A new
 * operator adds its folder and one line to the table in ops.c. */
#ifndef COFI_OPS_H
#define COFI_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cofuse/cofuse.h"

/* One rank's place in a job of the program. All ranks and the parent map the same `shared` bytes.
 */
struct cofi_job {
    cof_world *world;
    cof_team *team; /* the world's team */
    int rank, n_ranks;
    bool attach; /* --engine attach: arenas over memory that the ranks map for it */
    void *shared;
    size_t shared_bytes;
};

struct cofi_check_options {
    int n_ranks;
    bool full; /* every case instead of the covering set */
    uint64_t seed;
    bool cuda; /* the ranks work on CUDA devices */
};

enum cofi_verdict { COFI_PASSED, COFI_FAILED, COFI_SKIPPED };

struct cofi_check_result {
    enum cofi_verdict verdict; /* the same on all ranks */
    char text[400];            /* what was wrong, or the errors beside their bounds */
};

struct cofi_op_check {
    bool has_cuda; /* cases for ranks on CUDA devices too */
    int64_t (*n_cases)(const struct cofi_check_options *options);
    /* One line, unique, made of key=value words; `cofuse check PATTERN` selects by it. */
    void (*case_line)(const struct cofi_check_options *options, int64_t idx, char *line,
                      size_t bytes);
    /* Shared bytes that the largest case needs. */
    size_t (*shared_bytes)(const struct cofi_check_options *options);
    /* Runs one case; collective over the job's ranks. A status is an error of the run itself. */
    cof_status (*run_case)(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result);
};

/* ---- `cofuse bench`: times the very call that check compares ---- */

enum { COFI_BENCH_DIRECTIONS = 4 };

/* What a case is, known without running it; over all ranks together. */
struct cofi_bench_size {
    int n_directions;                         /* of the operator's, those that this case has */
    size_t set_bytes;                         /* tensors of one buffer set */
    double flops[COFI_BENCH_DIRECTIONS];      /* of a call; 0: not told */
    double wire_bytes[COFI_BENCH_DIRECTIONS]; /* that a call moves between ranks */
    int n_flows; /* ranks that send at once: wire_bytes / n_flows is one's; 0: not told */
};

/* A case is a line of key=value words, the operator's name first (ops/bench.h reads it). `bench` is
 * the operator's own state of one rank. create, make_plan, run, time and rate are collective over
 * the job's ranks; the caller times them and sees to it that
 *   - run is called with a direction only after those before it have run on that buffer set,
 *   - all streams are idle when a plan is destroyed (cof_plan_destroy) or the state is. */
struct cofi_op_bench {
    const char *shapes; /* the cases on the CPU: text of bench/shapes/<op>.txt; NULL: none */
    const char *cuda_shapes; /* on CUDA devices: of bench/shapes/<op>_cuda.txt; likewise */
    const char *directions[COFI_BENCH_DIRECTIONS]; /* "forward", "backward" */
    /* COF_ERR_INVALID naming the word, its value and the rule. */
    cof_status (*size)(const char *line, int n_ranks, struct cofi_bench_size *size_out);
    /* Tensors of n_sets buffer sets, inputs filled. */
    cof_status (*create)(struct cofi_job *job, const char *line, int n_sets, void **bench_out);
    cof_status (*make_plan)(void *bench, cof_plan **plan_out); /* NULL: there are no plans */
    /* Enqueues one call on buffers of set 0 .. n_sets-1. */
    cof_status (*run)(void *bench, cof_plan *plan, int direction, int set, cof_stream stream);
    /* In the place of run, where the host's clock around one call tells too little: a call, to its
     * end, and its seconds as the operator takes them (by a device's events; one of many). NULL:
     * the caller times run. */
    cof_status (*time)(void *bench, int direction, int set, double *seconds_out);
    /* flop/s of this rank with all ranks at it: what the rate of the calls is held against.
     * NULL: there is no such yardstick. */
    cof_status (*rate)(void *bench, double seconds, double *rate_out);
    void (*destroy)(void *bench); /* NULL is allowed */
};

/* `cofuse run <op>`: returns the exit code; argv[0] is the operator. Parent and ranks get the same
 * command line; the parent reads it and the files, lays out the shared bytes, starts the ranks, and
 * alone writes and renames outputs. */
typedef int (*cofi_op_run_fn)(int argc, char **argv);

struct cofi_op {
    const char *name;
    const char *summary;
    const struct cofi_op_check *check;
    cofi_op_run_fn run; /* NULL: it only has checks */
    const struct cofi_op_bench *bench;
};

extern const struct cofi_op *const cofi_ops[]; /* NULL at the end */

#endif
