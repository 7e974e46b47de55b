/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Labelled output of ranks: whole lines from a pipe, each headed by "[rank] ". Nothing here waits:
 * a rank that writes without end, or a reader that has stopped, holds nobody up. */
#ifndef COFI_JOB_OUTPUT_H
#define COFI_JOB_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>

/* Standard output or error of this process. */
struct cofi_job_sink {
    int fd;
    bool is_own;    /* opened by us */
    bool may_block; /* a write may wait when it is not asked for first */
    char *text;     /* what it has not taken yet */
    size_t n, room;
    int error; /* of a write, after which the text was lost; 0: none */
};

void cofi_job_sink_open(struct cofi_job_sink *sink, int to);

/* Writes what is taken now of the text that waits; true when none is left. */
bool cofi_job_sink_flush(struct cofi_job_sink *sink);

/* Behind what waits, as far as memory goes. */
void cofi_job_sink_put(struct cofi_job_sink *sink, const char *text, size_t n);

void cofi_job_sink_close(struct cofi_job_sink *sink);

struct cofi_job_output {
    int fd; /* read end of the rank's pipe, non-blocking; -1: none or closed */
    struct cofi_job_sink *sink;
    int rank;
    char *text; /* lines that the sink did not take yet, and the line begun */
    size_t n, room;
};

/* Makes the pipe; the rank gets *write_fd_out, which is close-on-exec. false: errno tells. */
bool cofi_job_output_open(struct cofi_job_output *output, int rank, struct cofi_job_sink *sink,
                          int *write_fd_out);

/* Passes on some of what has arrived, as long as the sink takes it; at the end of the pipe also a
 * line without newline, and closes. */
void cofi_job_output_pump(struct cofi_job_output *output);

void cofi_job_output_close(struct cofi_job_output *output);

#endif
