/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Starting the ranks of a job on this host and seeing all of them end. */
#ifndef COFI_JOB_H
#define COFI_JOB_H

#include <stdbool.h>
#include <stddef.h>

/* Exit codes of the program. */
enum { COFI_EXIT_OK = 0, COFI_EXIT_CHECK = 1, COFI_EXIT_USAGE = 2, COFI_EXIT_RANK = 3,
       COFI_EXIT_UNSUPPORTED = 4 };

struct cofi_job_spec {
    int n_ranks;
    char *const *argv;    /* program and arguments of every rank, NULL at the end */
    bool self;            /* run this program (/proc/self/exe) instead of argv[0] by PATH */
    int shared_fd;        /* memfd the ranks inherit and map (cofi_job_shared); -1: none */
    bool label_output;    /* prefix each line of the ranks' output with "[rank] " */
    const char *name;     /* for messages: "cofuse run" */
};

/* Starts the ranks (fork, exec, PR_SET_PDEATHSIG), each with COFUSE_RANK, COFUSE_SIZE, COFUSE_JOB
 * and COFUSE_FDS in its environment and one end of a socketpair to rank 0 (rank 0: to every other
 * rank). Waits for all, and for the reader of their output; when one fails, gives the others
 * 2 s to end by themselves and then kills them. Returns COFI_EXIT_OK, or the exit code for the job:
 * the code of the first rank that failed if it ended by itself with 1, 2 or 4, else 3; with `self`,
 * where that rank's code is 3, another's 2 or 4. COFI_EXIT_USAGE when the program cannot be run.
 * Messages on stderr name the first rank that failed and how. SIGINT, SIGTERM and SIGHUP, unless
 * ignored, end the job and then the caller. */
int cofi_job_run(const struct cofi_job_spec *spec);

/* memfd of `bytes` bytes, checked against free memory before it is filled; -1 with a message. */
int cofi_job_shared_create(size_t bytes, void **memory_out);

/* In a rank: true and the mapping when the parent passed one (variable COFUSE_SHARED_FD). */
bool cofi_job_is_rank(void);
void *cofi_job_shared(size_t *bytes_out);

#endif
