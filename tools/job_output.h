/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Labelled output of ranks: whole lines from a pipe, each headed by "[rank] ". */
#ifndef COFI_JOB_OUTPUT_H
#define COFI_JOB_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>

struct cofi_job_output {
    int fd; /* read end of the rank's pipe, non-blocking; -1: none or closed */
    int to; /* STDOUT_FILENO or STDERR_FILENO */
    int rank;
    char *text; /* the line begun */
    size_t n, room;
};

/* Makes the pipe; the rank gets *write_fd_out, which is close-on-exec. false: errno tells. */
bool cofi_job_output_open(struct cofi_job_output *output, int rank, int to, int *write_fd_out);

/* Passes on what has arrived; at the end of the pipe also a line without newline, and closes. */
void cofi_job_output_pump(struct cofi_job_output *output);

void cofi_job_output_close(struct cofi_job_output *output);

#endif
