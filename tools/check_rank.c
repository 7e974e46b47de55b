/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A rank walks the list of cases, as all of its job do. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check_job.h"
#include "core/clock.h"
#include "job.h"

enum { RUN_TIMEOUT_SECONDS = 20, RECORD_ALIGNMENT = 64 };

size_t cofi_check_job_bytes(size_t case_bytes, int64_t max_records)
{
    return COFI_CHECK_HEADER_BYTES + case_bytes + RECORD_ALIGNMENT +
           (size_t)max_records * sizeof(struct cofi_check_record);
}

struct cofi_check_record *cofi_check_records(struct cofi_check_job *job)
{
    uintptr_t at = (uintptr_t)job + COFI_CHECK_HEADER_BYTES + job->case_bytes;
    return (struct cofi_check_record *)((at + RECORD_ALIGNMENT - 1) / RECORD_ALIGNMENT *
                                        RECORD_ALIGNMENT);
}

void cofi_check_keep(struct cofi_check_job *job, const char *line,
                     const struct cofi_check_result *result, double seconds)
{
    static const char *const words[] = {"passed", "failed", "skipped"};
    const char *end = strstr(line, " ranks="), *text = result->text;
    if (job->n_records >= job->max_records)
        return;
    struct cofi_check_record *r = cofi_check_records(job) + job->n_records;
    snprintf(r->line, sizeof r->line, "%.*s", end ? (int)(end - line) : COFI_CHECK_LINE_BYTES,
             line);
    snprintf(r->verdict, sizeof r->verdict, "%s", words[result->verdict]);
    snprintf(r->text, sizeof r->text, "%s", text[0] == ' ' ? text + 1 : text);
    r->ranks = job->n_ranks;
    r->seconds = seconds;
    job->n_records++; /* now it is whole, should this process end */
}

struct rank_state {
    const struct cofi_check_request *request;
    struct cofi_check_options options;
    struct cofi_job job;
    struct cofi_check_job *shared;
    int64_t n_done, n_selected;
};

static bool shows_progress(const struct rank_state *s)
{
    return s->job.rank == 0 && !s->request->verbose && isatty(STDERR_FILENO);
}

static void clear_progress(const struct rank_state *s)
{
    if (shows_progress(s))
        fputs("\r\033[K", stderr);
}

/* Rank 0 counts and prints a case that came to a verdict. */
static void report(struct rank_state *s, const char *line, const struct cofi_check_result *result,
                   double seconds)
{
    static const char *const words[] = {"ok  ", "FAIL", "skip"};
    bool failed = result->verdict == COFI_FAILED;
    if (s->job.rank != 0)
        return;
    (*(failed ? &s->shared->n_failed
              : result->verdict == COFI_SKIPPED ? &s->shared->n_skipped : &s->shared->n_passed))++;
    cofi_check_keep(s->shared, line, result, seconds);
    if (failed || s->request->verbose) {
        clear_progress(s);
        printf("%s %s (%.2f s):%s%s\n", words[result->verdict], line, seconds,
               result->text[0] == ' ' ? "" : " ", result->text);
    }
    if (failed)
        cofi_check_print_again(&s->options, s->request, line);
    fflush(stdout);
}

static cof_status check_case(struct rank_state *s, const struct cofi_op_check *check, int64_t idx,
                             const char *line)
{
    struct cofi_check_result result = {COFI_PASSED, ""};
    if (s->job.rank == 0)
        snprintf(s->shared->line, sizeof s->shared->line, "%s", line);
    if (shows_progress(s))
        fprintf(stderr, "\rranks %d: %" PRId64 "/%" PRId64 "\033[K", s->options.n_ranks,
                s->n_done + 1, s->n_selected);
    cof_status status = cof_team_barrier(s->job.team);
    int64_t begin = cofi_now();
    if (status == COF_OK)
        status = check->run_case(&s->job, &s->options, idx, &result);
    if (status != COF_OK)
        return status;
    report(s, line, &result, (double)(cofi_now() - begin) * 1e-9);
    if (s->job.rank == 0)
        s->shared->line[0] = 0;
    s->n_done++;
    return COF_OK;
}

static cof_status check_all(struct rank_state *s)
{
    for (int i = 0; cofi_ops[i]; i++) {
        const struct cofi_op_check *check = cofi_check_of(i, s->options.cuda);
        for (int64_t c = 0; check && c < check->n_cases(&s->options); c++) {
            char line[COFI_CHECK_LINE_BYTES];
            if (!cofi_check_selects(s->request, check, &s->options, c, line))
                continue;
            cof_status status = check_case(s, check, c, line);
            if (status == COF_OK)
                continue;
            clear_progress(s);
            fprintf(stderr, "cofuse check: rank %d: %s: %s\n  in %s\n", s->job.rank,
                    cof_status_name(status), cof_last_error(), line);
            return status;
        }
    }
    clear_progress(s);
    return COF_OK;
}

static int complain(cof_status status)
{
    fprintf(stderr, "cofuse check: %s: %s\n", cof_status_name(status), cof_last_error());
    return COFI_EXIT_RANK;
}

int cofi_check_rank(const struct cofi_check_request *r, cof_world_options *options,
                    struct cofi_check_job *shared)
{
    const char *timeout = getenv("COFUSE_TIMEOUT");
    struct rank_state s = {.request = r, .shared = shared};
    options->engine = r->cuda ? COF_ENGINE_CUDA : r->engine;
    options->run_timeout = timeout && *timeout ? 0 : RUN_TIMEOUT_SECONDS;
    cof_status status = cof_world_create(options, &s.job.world);
    if (status != COF_OK)
        return complain(status);
    const struct cofi_check_device *device = cofi_check_device(s.job.world);
    status = device ? device->open(s.job.world) : COF_OK;
    if (status != COF_OK) { /* the others see this rank leave */
        complain(status);
        cof_world_destroy(s.job.world);
        return COFI_EXIT_RANK;
    }
    s.job.team = cof_world_team(s.job.world);
    s.job.rank = cof_world_rank(s.job.world);
    s.job.n_ranks = cof_world_size(s.job.world);
    s.job.attach = r->attach;
    s.job.shared = (char *)shared + COFI_CHECK_HEADER_BYTES;
    s.job.shared_bytes = shared->case_bytes;
    s.options = cofi_check_job_options(r, s.job.n_ranks);
    s.n_selected = cofi_check_count(r, s.job.n_ranks, false);
    status = check_all(&s);
    if (status == COF_OK && s.job.rank == 0)
        shared->finished = true;
    cof_world_destroy(s.job.world);
    if (device)
        device->close();
    return status == COF_OK ? COFI_EXIT_OK : COFI_EXIT_RANK;
}
