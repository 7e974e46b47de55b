/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What benches of operators share that run on CPUs and on CUDA devices: memory with data in it, and
 * the timing of calls. On CPUs that is one call, by the host's clock; on devices `count` of them
 * over the buffer sets by turns, eager or as one graph, by the device's events. */
#ifndef COFI_BENCH_CALLS_H
#define COFI_BENCH_CALLS_H

#include "ops/check.h"
#include "ops/ops.h"

/* ---- memory --------------------------------------------------------------------------------- */

/* Where the world's ranks work. */
cof_status cofi_bench_memory_open(cof_world *world, size_t bytes, char **data_out);
void cofi_bench_memory_close(cof_world *world, char *data); /* NULL is fine */

/* A table of standard normal values to fill tensors from: on a CPU the time of a call depends on
 * them only where they would be denormal, infinite or NaN. */
struct cofi_bench_values {
    char *data;
    size_t element; /* bytes */
};

cof_status cofi_bench_values_make(cof_dtype dtype, struct cofi_bench_values *values_out);
void cofi_bench_values_free(struct cofi_bench_values *values);
/* Fills host memory, from a place that two numbers choose. */
void cofi_bench_values_copy(const struct cofi_bench_values *values, uint64_t rank, uint64_t tensor,
                            char *to, size_t bytes);
/* The same for memory of cofi_bench_memory_open. */
cof_status cofi_bench_values_fill(const struct cofi_bench_values *values, cof_world *world,
                                  uint64_t rank, uint64_t tensor, char *to, size_t bytes);

/* ---- calls ---------------------------------------------------------------------------------- */

/* As cofi_op_bench has it. */
typedef cof_status (*cofi_bench_run_fn)(void *bench, cof_plan *plan, int direction, int set,
                                        cof_stream stream);

struct cofi_bench_calls {
    struct cofi_job *job;
    void *bench; /* for run */
    cofi_bench_run_fn run;
    int n_sets;
    int64_t count;
    bool is_graph;
    /* From open on; all but device and plan are for devices alone. */
    const struct cofi_check_device *device; /* NULL: the CPU */
    cof_plan *plan;                         /* the last one made */
    cof_stream stream;
    void *timer, *graph;
    const cof_plan *graph_plan; /* whose calls the graph has */
};

/* The upper members are set, and stay where they point. Close after a failure too. */
cof_status cofi_bench_calls_open(struct cofi_bench_calls *calls);
void cofi_bench_calls_close(struct cofi_bench_calls *calls);

/* The plan of the calls to come; NULL: its making failed. */
void cofi_bench_calls_take(struct cofi_bench_calls *calls, cof_plan *plan);

/* Seconds of one call; on a device of direction 0, whatever the set. Collective. */
cof_status cofi_bench_calls_time(struct cofi_bench_calls *calls, int direction, int set,
                                 double *seconds_out);
/* On a device, of eager calls of another function. */
cof_status cofi_bench_calls_time_other(struct cofi_bench_calls *calls, cofi_bench_run_fn run,
                                       double *seconds_out);

#endif
