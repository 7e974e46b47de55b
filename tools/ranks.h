/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a command of the program: processes that run it again, or threads of this one. */
#ifndef COFI_RANKS_H
#define COFI_RANKS_H

#include <stdbool.h>

#include "cofuse/cofuse.h"

/* One rank, from joining its world to its last row; returns the exit code, after a message where it
 * is not 0. `options` is ready for cof_world_create. */
typedef int (*cofi_rank_fn)(void *arg, const cof_world_options *options, int rank);

struct cofi_ranks_spec {
    int n_ranks;
    cof_world_options options; /* engine, threads and timeouts; rank, size and job are filled in */
    cofi_rank_fn body;         /* for threads */
    void *arg;
    int shared_fd, argc; /* for processes: they get the memory and the words again, and call */
    char **argv;         /* body themselves (cofi_job_is_rank) */
};

/* Runs them all; the exit code for all of them. */
int cofi_ranks_run(const struct cofi_ranks_spec *spec);

/* On threads of this process, whatever the engine; without the line that tells of it. */
int cofi_ranks_run_threads(const struct cofi_ranks_spec *spec);

/* The engine where no option names one: COFUSE_ENGINE's, else processes (COF_ENGINE_SHM), which
 * ranks on CUDA devices are too. false after a message where the variable asks for devices and
 * `cuda`, the option --device, does not. */
bool cofi_ranks_engine(bool cuda, cof_engine *engine_out);

/* Deadlines: the environment's, else `seconds`. */
void cofi_ranks_timeouts(cof_world_options *options, double seconds);

#endif
