/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One job of `cofuse bench`, from the parent's side. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench_harness.h"
#include "job.h"

static const double timeout_seconds = 20; /* and the time that a rank may compute while others wait
                                            * for it, at */
static const double slow_rate = 1e9;       /* flops a second */

/* ---- Start ---- */

const char *cofi_bench_engine_name(const struct cofi_bench_options *o)
{
    bool are_threads = o->engine == COF_ENGINE_THREAD;
    return o->cuda ? are_threads ? "cuda-thread" : "cuda" : are_threads ? "thread" : "shm";
}

static void fill_job(const struct cofi_bench_options *o, const struct cofi_bench_variant *v,
                     struct cofi_bench_job *job)
{
    job->magic = COFI_BENCH_MAGIC;
    snprintf(job->op, sizeof job->op, "%s", v->op->name);
    memcpy(job->line, v->line, sizeof job->line);
    job->n_ranks = v->n_ranks;
    job->n_threads = (int)o->n_threads;
    job->n_sets = v->n_sets;
    job->n_directions = v->size.n_directions;
    job->repeat = (int)o->repeat;
    job->warmup = (int)o->warmup;
    job->engine = o->engine;
    job->cuda = o->cuda;
    job->unpinned = v->unpinned;
    job->seconds = o->seconds;
    job->rate_seconds = o->rate_seconds;
    double most = 0;
    for (int d = 0; d < job->n_directions; d++)
        most = fmax(most, v->size.flops[d]);
    job->timeout = timeout_seconds + most / slow_rate;
}

/* A process for each rank, or one for all of them with engine thread: fresh in either case. */
static int start(const struct cofi_bench_job *job, int shared_fd)
{
    static char program[] = "cofuse", command[] = "bench";
    char *words[] = {program, command, NULL};
    struct cofi_job_spec spec = {
        .n_ranks = job->engine == COF_ENGINE_THREAD ? 1 : job->n_ranks,
        .argv = words, .self = true, .shared_fd = shared_fd, .name = "cofuse bench"};
    return cofi_job_run(&spec);
}

/* ---- What it left ---- */

static double slowest(const double *values, int n)
{
    double most = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, values[i]);
    return most;
}

/* Different ones that the ranks work on; 0: none, but the CPU. */
static int count_devices(const struct cofi_bench_job *job)
{
    int n = 0;
    for (int rank = 0; rank < job->n_ranks; rank++) {
        bool is_new = job->device[rank][0] != 0;
        for (int other = 0; other < rank && is_new; other++)
            is_new = strcmp(job->device[rank], job->device[other]) != 0;
        n += is_new;
    }
    return n;
}

static bool take(struct cofi_bench_job *job, struct cofi_bench_samples *s)
{
    int p = s->n_processes;
    memcpy(s->describe, job->describe, sizeof s->describe);
    s->threads = job->threads;
    s->pinned = job->pinned;
    s->devices = count_devices(job);
    s->plan_first[p] = slowest(job->plan_first, job->n_ranks);
    s->plan_later[p] = slowest(job->plan_later, job->n_ranks);
    for (int w = 0; w < COFI_BENCH_RATES; w++) {
        s->rate[p][w] = 0;
        for (int rank = 0; rank < job->n_ranks; rank++)
            s->rate[p][w] += job->rate[w][rank];
    }
    for (int d = 0; d < job->n_directions; d++) {
        int n = job->n_calls[d];
        double *grown = realloc(s->calls[d], ((size_t)(s->n[d] + n) + 1) * sizeof *grown);
        if (!grown)
            return false;
        s->calls[d] = grown;
        for (int i = 0; i < n; i++)
            grown[s->n[d]++] = slowest(cofi_bench_times(job, d, i), job->n_ranks);
        s->n_calls[p][d] = n;
    }
    s->n_processes++;
    return true;
}

int cofi_bench_job_run(const struct cofi_bench_options *options,
                       const struct cofi_bench_variant *variant,
                       struct cofi_bench_samples *samples)
{
    void *memory;
    size_t bytes = sizeof(struct cofi_bench_job) +
                   sizeof(double) * (size_t)options->repeat * (size_t)variant->n_ranks *
                       (size_t)variant->size.n_directions;
    int fd = cofi_job_shared_create(bytes, &memory);
    if (fd < 0) {
        samples->failed = true;
        snprintf(samples->failure, sizeof samples->failure, "no %zu bytes of shared memory", bytes);
        return COFI_EXIT_RANK;
    }
    struct cofi_bench_job *job = memory;
    fill_job(options, variant, job);
    setenv("COFUSE_FORCE_STAGED", variant->staged ? "1" : "0", 1); /* the ranks inherit both */
    setenv("COFUSE_PIN", variant->unpinned ? "no" : "auto", 1);
    if (options->cuda && options->engine == COF_ENGINE_THREAD) /* a queue for each rank's streams */
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    int code = start(job, fd);
    if (code == COFI_EXIT_OK && !job->finished)
        code = COFI_EXIT_RANK;
    if (code == COFI_EXIT_OK && !take(job, samples)) {
        cofi_cli_error("out of memory");
        code = COFI_EXIT_RANK;
    }
    if (code != COFI_EXIT_OK) {
        samples->failed = true;
        job->failure[COFI_BENCH_TEXT_BYTES - 1] = 0;
        snprintf(samples->failure, sizeof samples->failure, "%s",
                 job->failure[0] ? job->failure : "a rank was killed before it could say why");
    }
    munmap(memory, bytes);
    close(fd);
    return code;
}

void cofi_bench_samples_free(struct cofi_bench_samples *samples)
{
    for (int d = 0; d < COFI_BENCH_DIRECTIONS; d++)
        free(samples->calls[d]);
}
