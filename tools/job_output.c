/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "job_output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { READ_BYTES = 65536, LINE_BYTES_MAX = 1 << 20 };

/* ---- where lines go ------------------------------------------------------------------------- */

/* O_NONBLOCK belongs to the open file, which others share: pipes and terminals are opened anew.
 * Where that is refused, and for what is neither, poll and short writes have to do. */
void cofi_job_sink_open(struct cofi_job_sink *sink, int to)
{
    char path[32];
    struct stat info;
    *sink = (struct cofi_job_sink){.fd = to, .may_block = true};
    if (fstat(to, &info))
        return;
    snprintf(path, sizeof path, "/proc/self/fd/%d", to);
    int own = S_ISFIFO(info.st_mode) || isatty(to)
                  ? open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)
                  : -1;
    sink->is_own = own >= 0;
    sink->fd = own >= 0 ? own : to;
    sink->may_block = own < 0 && !S_ISREG(info.st_mode);
}

bool cofi_job_sink_flush(struct cofi_job_sink *sink)
{
    size_t done = 0;
    while (done < sink->n) {
        struct pollfd ready = {.fd = sink->fd, .events = POLLOUT};
        size_t bytes = sink->n - done;
        if (sink->may_block && poll(&ready, 1, 0) <= 0)
            break;
        if (sink->may_block && bytes > PIPE_BUF)
            bytes = PIPE_BUF;
        ssize_t written = write(sink->fd, sink->text + done, bytes);
        if (written == 0 || (written < 0 && (errno == EAGAIN || errno == EINTR)))
            break;
        if (written < 0) { /* nobody to tell now */
            sink->error = errno;
            done = sink->n;
        } else {
            done += (size_t)written;
        }
    }
    sink->n -= done;
    if (done && sink->n)
        memmove(sink->text, sink->text + done, sink->n);
    return sink->n == 0;
}

/* One write per line, so that lines of several jobs on one terminal stay whole. */
void cofi_job_sink_put(struct cofi_job_sink *sink, const char *text, size_t n)
{
    if (sink->room - sink->n < n) {
        char *grown = realloc(sink->text, sink->n + n);
        if (!grown) {
            sink->error = ENOMEM;
            return;
        }
        sink->text = grown;
        sink->room = sink->n + n;
    }
    memcpy(sink->text + sink->n, text, n);
    sink->n += n;
}

void cofi_job_sink_close(struct cofi_job_sink *sink)
{
    if (sink->is_own)
        close(sink->fd);
    free(sink->text);
    *sink = (struct cofi_job_sink){.fd = -1};
}

/* ---- where they come from ------------------------------------------------------------------- */

bool cofi_job_output_open(struct cofi_job_output *output, int rank, struct cofi_job_sink *sink,
                          int *write_fd_out)
{
    int ends[2];
    *output = (struct cofi_job_output){.fd = -1, .sink = sink, .rank = rank};
    if (pipe2(ends, O_CLOEXEC))
        return false;
    fcntl(ends[0], F_SETFL, O_NONBLOCK); /* our end only: each end has flags of its own */
    output->fd = ends[0];
    *write_fd_out = ends[1];
    return true;
}

static void put_line(struct cofi_job_output *output, const char *text, size_t n)
{
    char label[16];
    size_t n_label = (size_t)snprintf(label, sizeof label, "[%d] ", output->rank);
    cofi_job_sink_put(output->sink, label, n_label);
    cofi_job_sink_put(output->sink, text, n);
    cofi_job_sink_put(output->sink, "\n", 1);
    cofi_job_sink_flush(output->sink);
}

/* false: the sink does not take more now. */
static bool put_lines(struct cofi_job_output *output)
{
    size_t begin = 0;
    bool is_free;
    for (char *newline; (is_free = cofi_job_sink_flush(output->sink)) &&
                        (newline = memchr(output->text + begin, '\n', output->n - begin));) {
        size_t end = (size_t)(newline - output->text);
        put_line(output, output->text + begin, end - begin);
        begin = end + 1;
    }
    output->n -= begin;
    memmove(output->text, output->text + begin, output->n);
    if (is_free && output->n >= LINE_BYTES_MAX) { /* a line without end is cut */
        put_line(output, output->text, output->n);
        output->n = 0;
    }
    return is_free;
}

/* One read, which empties a full pipe: others want their turn. */
void cofi_job_output_pump(struct cofi_job_output *output)
{
    if (output->fd < 0 || (output->n ? !put_lines(output) : !cofi_job_sink_flush(output->sink)))
        return;
    if (output->room - output->n < READ_BYTES) {
        char *text = realloc(output->text, output->n + 2 * READ_BYTES);
        if (!text)
            return;
        output->text = text;
        output->room = output->n + 2 * READ_BYTES;
    }
    ssize_t n = read(output->fd, output->text + output->n, READ_BYTES);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n <= 0) {
        cofi_job_output_close(output);
        return;
    }
    output->n += (size_t)n;
    put_lines(output);
}

void cofi_job_output_close(struct cofi_job_output *output)
{
    if (output->fd < 0)
        return;
    if (output->n && cofi_job_sink_flush(output->sink))
        put_line(output, output->text, output->n);
    close(output->fd);
    free(output->text);
    *output = (struct cofi_job_output){.fd = -1};
}
