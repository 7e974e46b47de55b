/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check`: for each rank count starts one job with all its cases inside. The ranks walk the
 * same list; rank 0 prints, and keeps what came of them in the shared memory, where the parent
 * finds it however the job ended. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check_job.h"
#include "commands.h"
#include "core/config.h"
#include "job.h"
#include "ops/runtime/runtime_check.h"
#include "ranks.h"

static const char usage[] =
    "usage: cofuse check [PATTERN...] [options]\n"
    "\n"
    "Runs every kernel on many small problems and compares the results with a reference in fp64.\n"
    "A case is a line of key=value words (--list). PATTERN selects the lines that hold it, or\n"
    "that it matches with * and ?. The last line of output is `N passed, N failed`.\n"
    "\n"
    "      --ranks LIST   rank counts [1,2,3,4]\n"
    "      --engine E     shm: processes; thread: threads of this process; attach: shm, with\n"
    "                     arenas of memory that the check maps [COFUSE_ENGINE]\n"
    "      --device D     cpu; cuda: ranks work on the CUDA devices, in turn, and the memory is\n"
    "                     theirs; only what has kernels for them is checked [cpu]\n"
    "      --seed N       of the data [1]\n"
    "      --full         all combinations that the makers thought of, not only a covering set\n"
    "      --json FILE    write what came of each case, after each rank count\n"
    "      --list         print the cases and run none\n"
    "  -v, --verbose      print every case, with its errors beside their bounds\n";

/* ---- Ranks ---- */

static int run_as_process(const struct cofi_check_request *r)
{
    size_t bytes;
    struct cofi_check_job *shared = cofi_job_shared(&bytes);
    if (!shared || bytes < COFI_CHECK_HEADER_BYTES || shared->magic != COFI_CHECK_MAGIC) {
        cofi_cli_error("COFUSE_SHARED_FD is set, but is no memory of a parent `cofuse check`");
        return COFI_EXIT_RANK;
    }
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    return cofi_check_rank(r, &options, shared);
}

struct thread_rank {
    const struct cofi_check_request *request;
    struct cofi_check_job *shared;
    const char *job;
    int rank, code;
    pthread_t thread;
};

static void *run_as_thread(void *arg)
{
    struct thread_rank *own = arg;
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.n_ranks = own->shared->n_ranks;
    options.rank = own->rank;
    options.job = own->job;
    own->code = cofi_check_rank(own->request, &options, own->shared);
    return NULL;
}

/* ---- The parent ---- */

static int run_threads(const struct cofi_check_request *r, struct cofi_check_job *shared)
{
    static struct thread_rank ranks[COFI_MAX_RANKS];
    static int n_jobs;
    char job[64];
    int n = 0, code = COFI_EXIT_OK;
    snprintf(job, sizeof job, "cofuse-check-%d-%d", (int)getpid(), n_jobs++);
    for (; n < shared->n_ranks; n++) {
        ranks[n] = (struct thread_rank){.request = r, .shared = shared, .job = job, .rank = n};
        if (pthread_create(&ranks[n].thread, NULL, run_as_thread, &ranks[n]) != 0) {
            cofi_cli_error("rank %d: no thread to be had", n);
            code = COFI_EXIT_RANK;
            break;
        }
    }
    for (int i = 0; i < n; i++) {
        pthread_join(ranks[i].thread, NULL);
        code = ranks[i].code > code ? ranks[i].code : code;
    }
    return code;
}

static int run_processes(int n_ranks, int shared_fd, int argc, char **argv)
{
    static char program[] = "cofuse";
    char **words = calloc((size_t)argc + 2, sizeof *words);
    if (!words) {
        cofi_cli_error("out of memory");
        return COFI_EXIT_RANK;
    }
    words[0] = program;
    memcpy(words + 1, argv, (size_t)argc * sizeof *words);
    struct cofi_job_spec spec = {.n_ranks = n_ranks, .argv = words, .self = true,
                                 .shared_fd = shared_fd, .name = "cofuse check"};
    int code = cofi_job_run(&spec);
    free(words);
    return code;
}

/* The memory of a job of this rank count; its descriptor, or -1 after a message. */
static int make_job(const struct cofi_check_request *r, int n_ranks, int64_t n_selected,
                    struct cofi_check_job **job_out)
{
    struct cofi_check_options options = cofi_check_job_options(r, n_ranks);
    int64_t max_records = r->json ? n_selected : 0;
    size_t case_bytes = 0;
    for (int i = 0; cofi_ops[i]; i++) {
        const struct cofi_op_check *check = cofi_check_of(i, r->cuda);
        size_t wanted = check ? check->shared_bytes(&options) : 0;
        case_bytes = wanted > case_bytes ? wanted : case_bytes;
    }
    void *memory;
    int fd = cofi_job_shared_create(cofi_check_job_bytes(case_bytes, max_records), &memory);
    if (fd < 0)
        return -1;
    *job_out = memory;
    (*job_out)->magic = COFI_CHECK_MAGIC;
    (*job_out)->n_ranks = n_ranks;
    (*job_out)->case_bytes = case_bytes;
    (*job_out)->max_records = max_records;
    return fd;
}

/* The case that was in hand when the ranks ended before the last one. */
static void blame_case(const struct cofi_check_request *r, struct cofi_check_job *job)
{
    static const struct cofi_check_result result = {COFI_FAILED, "the run itself failed"};
    struct cofi_check_options options = cofi_check_job_options(r, job->n_ranks);
    job->line[COFI_CHECK_LINE_BYTES - 1] = 0;
    printf("FAIL %s: %s\n", job->line, result.text);
    cofi_check_print_again(&options, r, job->line);
    cofi_check_keep(job, job->line, &result, 0);
    job->n_failed++;
}

/* One rank count; its counts and records go to the report. */
static int run_job(const struct cofi_check_request *r, int n_ranks, int argc, char **argv,
                   struct cofi_check_report *report)
{
    int64_t n_selected = cofi_check_count(r, n_ranks, false);
    struct cofi_check_job *job;
    if (n_selected == 0)
        return COFI_EXIT_OK;
    int fd = make_job(r, n_ranks, n_selected, &job);
    if (fd < 0)
        return COFI_EXIT_RANK;
    fflush(stdout);
    int code = r->engine == COF_ENGINE_THREAD ? run_threads(r, job)
                                              : run_processes(n_ranks, fd, argc, argv);
    if (code == COFI_EXIT_OK && !job->finished)
        code = COFI_EXIT_RANK;
    if (code != COFI_EXIT_OK && job->line[0])
        blame_case(r, job);
    if (code != COFI_EXIT_OK)
        cofi_cli_error("%d ranks: stopped before the last case", n_ranks);
    if (!cofi_check_report_add(report, job) ||
        (r->json && !cofi_check_json_write(report, r->json)))
        code = COFI_EXIT_RANK;
    munmap(job, cofi_check_job_bytes(job->case_bytes, job->max_records));
    close(fd);
    return code;
}

/* CUDA makes threads. They are to leave the signals to this one, which waits for them in a job. */
static void hold_signals(sigset_t *before)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

static void begin_report(const struct cofi_check_request *r, int argc, char **argv,
                         struct cofi_check_report *report)
{
    sigset_t before;
    *report = (struct cofi_check_report){.seed = r->seed, .full = r->full};
    if (!r->json)
        return;
    cofi_cli_run_read(argc, argv, &report->run);
    hold_signals(&before);
    cofi_bench_machine_read(r->cuda, &report->machine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    snprintf(report->device, sizeof report->device, "%s", r->cuda ? "cuda" : "cpu");
    snprintf(report->engine, sizeof report->engine, "%s",
             r->engine == COF_ENGINE_THREAD ? "thread" : r->attach ? "attach" : "shm");
}

static int run_jobs(const struct cofi_check_request *r, int argc, char **argv)
{
    struct cofi_check_report report;
    int64_t n_selected = 0;
    int code = COFI_EXIT_OK;
    for (int i = 0; i < r->ranks.n; i++)
        n_selected += cofi_check_count(r, r->ranks.ranks[i], r->list);
    if (n_selected == 0)
        return cofi_cli_error("no case matches \"%s\" (--list prints them)",
                              r->n_patterns ? r->patterns[0] : "");
    if (r->list)
        return COFI_EXIT_OK;
    begin_report(r, argc, argv, &report);
    if (r->json && !cofi_check_json_write(&report, r->json)) /* now, not after an hour */
        return COFI_EXIT_USAGE;
    for (int i = 0; i < r->ranks.n; i++) {
        int job_code = run_job(r, r->ranks.ranks[i], argc, argv, &report);
        code = job_code != COFI_EXIT_OK ? COFI_EXIT_RANK : code;
    }
    printf("%" PRId64 " passed, %" PRId64 " failed", report.n_passed, report.n_failed);
    if (report.n_skipped)
        printf(", %" PRId64 " skipped", report.n_skipped);
    printf("\n");
    free(report.records);
    return code != COFI_EXIT_OK ? code : report.n_failed ? COFI_EXIT_CHECK : COFI_EXIT_OK;
}

enum { OPT_RANKS = 256, OPT_ENGINE, OPT_DEVICE, OPT_SEED, OPT_FULL, OPT_LIST, OPT_JSON,
       OPT_CHILD };

/* COFI_EXIT_OK, or the exit code after a message. */
static int parse_option(struct cofi_check_request *r, int option)
{
    int choice;
    bool ok = true;
    switch (option) {
    case OPT_RANKS: ok = cofi_cli_ranks("--ranks", optarg, &r->ranks); break;
    case OPT_ENGINE:
        ok = cofi_cli_choice("--engine", optarg, "thread|shm|attach", &choice);
        if (ok)
            r->engine = choice == 0 ? COF_ENGINE_THREAD : COF_ENGINE_SHM;
        r->attach = ok && choice == 2;
        break;
    case OPT_DEVICE:
        ok = cofi_cli_choice("--device", optarg, "cpu|cuda", &choice);
        r->cuda = ok && choice == 1;
        break;
    case OPT_SEED: ok = cofi_cli_int("--seed", optarg, 0, INT64_MAX, &r->seed); break;
    case OPT_FULL: r->full = true; break;
    case OPT_LIST: r->list = true; break;
    case OPT_JSON: r->json = optarg; break;
    case 'v': r->verbose = true; break;
    default: ok = false;
    }
    return ok ? COFI_EXIT_OK : COFI_EXIT_USAGE;
}

static cof_status ask_device(const struct cofi_check_device *device)
{
    sigset_t before;
    hold_signals(&before);
    cof_status status = device->available();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

/* COFI_EXIT_OK, or the exit code after a message. Ranks ask when they make their worlds. */
static int require_cuda(const struct cofi_check_request *r)
{
    const struct cofi_check_device *device = cofi_check_cuda();
    if (!device) {
        cofi_cli_error("option --device = \"cuda\": this program was built without CUDA");
        return COFI_EXIT_UNSUPPORTED;
    }
    /* Ranks that are threads share what CUDA takes for 8 queues: with fewer than ranks and their
     * streams, one rank's work would wait behind another's waiting kernel. */
    if (r->engine == COF_ENGINE_THREAD)
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    if (r->list || cofi_job_is_rank() || ask_device(device) == COF_OK)
        return COFI_EXIT_OK;
    cofi_cli_error("option --device = \"cuda\": %s", cof_last_error());
    return COFI_EXIT_UNSUPPORTED;
}

int cofi_cmd_check(int argc, char **argv)
{
    static const struct option options[] = {
        {"ranks", required_argument, NULL, OPT_RANKS},
        {"engine", required_argument, NULL, OPT_ENGINE},
        {"device", required_argument, NULL, OPT_DEVICE},
        {"seed", required_argument, NULL, OPT_SEED},
        {"full", no_argument, NULL, OPT_FULL},
        {"list", no_argument, NULL, OPT_LIST},
        {"json", required_argument, NULL, OPT_JSON},
        {"child", required_argument, NULL, OPT_CHILD}, /* of a case that needs processes */
        {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct cofi_check_request r = {.ranks = {4, {1, 2, 3, 4}}, .seed = 1};
    for (int c; (c = cofi_cli_next(argc, argv, "vh", options)) != -1;) {
        if (c == 'h') {
            fputs(usage, stdout);
            return COFI_EXIT_OK;
        }
        if (c == OPT_CHILD)
            return cofi_runtime_child(optarg);
        int code = parse_option(&r, c);
        if (code != COFI_EXIT_OK)
            return code;
    }
    r.n_patterns = argc - optind;
    r.patterns = argv + optind;
    if (r.list && r.json)
        return cofi_cli_error("option --json %s: wanted without --list, which runs no case",
                              r.json);
    if (cofi_config_check(true) != COF_OK)
        return cofi_cli_error("%s", cof_last_error());
    if (r.engine == COF_ENGINE_DEFAULT && !cofi_ranks_engine(r.cuda, &r.engine))
        return COFI_EXIT_USAGE;
    int code = r.cuda ? require_cuda(&r) : COFI_EXIT_OK;
    if (code != COFI_EXIT_OK)
        return code;
    return cofi_job_is_rank() ? run_as_process(&r) : run_jobs(&r, argc, argv);
}
