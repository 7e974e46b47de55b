/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "job_output.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { READ_BYTES = 65536, LINE_BYTES_MAX = 1 << 20 };

bool cofi_job_output_open(struct cofi_job_output *output, int rank, int to, int *write_fd_out)
{
    int ends[2];
    *output = (struct cofi_job_output){.fd = -1, .to = to, .rank = rank};
    if (pipe2(ends, O_CLOEXEC))
        return false;
    fcntl(ends[0], F_SETFL, O_NONBLOCK); /* our end only: each end has flags of its own */
    output->fd = ends[0];
    *write_fd_out = ends[1];
    return true;
}

static void write_all(int fd, const char *text, size_t n)
{
    while (n) {
        ssize_t written = write(fd, text, n);
        if (written < 0 && errno == EAGAIN) {
            struct pollfd wait = {.fd = fd, .events = POLLOUT};
            poll(&wait, 1, -1);
        } else if (written < 0 && errno != EINTR) {
            return; /* nobody to tell */
        } else if (written > 0) {
            text += written;
            n -= (size_t)written;
        }
    }
}

/* One write per line, so that lines of several jobs on one terminal stay whole. */
static void put_line(struct cofi_job_output *output, const char *text, size_t n)
{
    char label[16];
    size_t n_label = (size_t)snprintf(label, sizeof label, "[%d] ", output->rank);
    char *line = malloc(n_label + n + 1);
    if (!line)
        return;
    memcpy(line, label, n_label);
    memcpy(line + n_label, text, n);
    line[n_label + n] = '\n';
    write_all(output->to, line, n_label + n + 1);
    free(line);
}

static void put_lines(struct cofi_job_output *output)
{
    size_t begin = 0;
    for (char *newline; (newline = memchr(output->text + begin, '\n', output->n - begin));) {
        size_t end = (size_t)(newline - output->text);
        put_line(output, output->text + begin, end - begin);
        begin = end + 1;
    }
    output->n -= begin;
    memmove(output->text, output->text + begin, output->n);
    if (output->n >= LINE_BYTES_MAX) { /* a line without end is cut */
        put_line(output, output->text, output->n);
        output->n = 0;
    }
}

void cofi_job_output_pump(struct cofi_job_output *output)
{
    while (output->fd >= 0) {
        if (output->room - output->n < READ_BYTES) {
            char *text = realloc(output->text, output->n + 2 * READ_BYTES);
            if (!text)
                return;
            output->text = text;
            output->room = output->n + 2 * READ_BYTES;
        }
        ssize_t n = read(output->fd, output->text + output->n, output->room - output->n);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            cofi_job_output_close(output);
            return;
        }
        output->n += (size_t)n;
        put_lines(output);
    }
}

void cofi_job_output_close(struct cofi_job_output *output)
{
    if (output->fd < 0)
        return;
    if (output->n)
        put_line(output, output->text, output->n);
    close(output->fd);
    free(output->text);
    *output = (struct cofi_job_output){.fd = -1};
}
