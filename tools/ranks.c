/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "core/config.h"
#include "job.h"

bool cofi_ranks_engine(bool cuda, cof_engine *engine_out)
{
    const char *name = cofi_config_text(COFI_VAR_ENGINE);
    if (!strcmp(name, "cuda") && !cuda) {
        cofi_cli_error("variable COFUSE_ENGINE = \"cuda\": wanted --device cuda with it");
        return false;
    }
    *engine_out = strcmp(name, "thread") ? COF_ENGINE_SHM : COF_ENGINE_THREAD;
    return true;
}

void cofi_ranks_timeouts(cof_world_options *options, double seconds)
{
    const char *init = getenv("COFUSE_INIT_TIMEOUT"), *wait = getenv("COFUSE_TIMEOUT");
    options->init_timeout = init && *init ? 0 : seconds;
    options->run_timeout = wait && *wait ? 0 : seconds;
}

static int run_processes(const struct cofi_ranks_spec *spec)
{
    char **words = calloc((size_t)spec->argc + 3, sizeof *words);
    if (!words) {
        cofi_cli_error("out of memory");
        return COFI_EXIT_RANK;
    }
    static char program[] = "cofuse", command[] = "run";
    words[0] = program;
    words[1] = command;
    memcpy(words + 2, spec->argv, (size_t)spec->argc * sizeof *words);
    int code = cofi_job_run(&(struct cofi_job_spec){.n_ranks = spec->n_ranks, .argv = words,
                                                    .self = true, .shared_fd = spec->shared_fd,
                                                    .name = "cofuse run"});
    free(words);
    return code;
}

struct thread_rank {
    const struct cofi_ranks_spec *spec;
    const char *job;
    int rank, code;
    pthread_t thread;
};

static void *run_thread(void *arg)
{
    struct thread_rank *own = arg;
    cof_world_options options = own->spec->options;
    options.n_ranks = own->spec->n_ranks;
    options.rank = own->rank;
    options.job = own->job;
    own->code = own->spec->body(own->spec->arg, &options, own->rank);
    return NULL;
}

int cofi_ranks_run_threads(const struct cofi_ranks_spec *spec)
{
    static int n_jobs;
    char job[64];
    struct thread_rank ranks[COFI_MAX_RANKS];
    snprintf(job, sizeof job, "cofuse-ranks-%d-%d", (int)getpid(), n_jobs++);
    sigset_t alarm, old_mask; /* the busy line's signal is for this thread */
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, &old_mask);
    int n = 0;
    for (; n < spec->n_ranks; n++) {
        ranks[n] = (struct thread_rank){.spec = spec, .job = job, .rank = n,
                                        .code = COFI_EXIT_RANK};
        if (pthread_create(&ranks[n].thread, NULL, run_thread, &ranks[n])) {
            cofi_cli_error("rank %d: no thread to be had", n);
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
    /* A rank's own complaint outweighs the errors that it causes on the others. */
    int code = n < spec->n_ranks ? COFI_EXIT_RANK : COFI_EXIT_OK;
    for (int i = 0; i < n; i++) {
        pthread_join(ranks[i].thread, NULL);
        if (code == COFI_EXIT_OK || (code == COFI_EXIT_RANK && ranks[i].code != COFI_EXIT_OK))
            code = ranks[i].code;
    }
    return code;
}

int cofi_ranks_run(const struct cofi_ranks_spec *spec)
{
    char text[64];
    snprintf(text, sizeof text, "running %d ranks", spec->n_ranks);
    cofi_cli_busy(text);
    int code = spec->options.engine == COF_ENGINE_THREAD ? cofi_ranks_run_threads(spec)
                                                           : run_processes(spec);
    cofi_cli_idle();
    return code;
}
