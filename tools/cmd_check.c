/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check`: for each rank count starts one job with all its cases inside. The ranks walk the
 * same list; rank 0 prints, and keeps the counts in the shared memory, where the parent finds them
 * however the job ended. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli.h"
#include "commands.h"
#include "core/clock.h"
#include "core/config.h"
#include "job.h"
#include "ops/check.h"
#include "ops/runtime/runtime_check.h"

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
    "      --list         print the cases and run none\n"
    "  -v, --verbose      print every case, with its errors beside their bounds\n";

enum { HEADER_BYTES = 8192, LINE_BYTES = 512, RUN_TIMEOUT_SECONDS = 20 };

struct request {
    struct cofi_rank_counts ranks;
    cof_engine engine;
    bool attach; /* over worlds of COF_ENGINE_SHM, or of devices */
    bool cuda;   /* worlds of COF_ENGINE_CUDA; `engine` says what the ranks are */
    int64_t seed;
    bool full, list, verbose;
    int n_patterns;
    char **patterns;
};

/* At the beginning of the shared memory; the cases' part follows at HEADER_BYTES. */
struct shared {
    uint64_t magic;
    int n_ranks;
    _Atomic int64_t n_passed, n_failed, n_skipped;
    _Atomic bool finished;
    char line[LINE_BYTES]; /* of the case in hand, "" between cases */
};
static const uint64_t shared_magic = UINT64_C(0x6b63656863666f63);
_Static_assert(sizeof(struct shared) <= HEADER_BYTES, "the header has room");

/* ---- Selection ---- */

static bool is_selected(const struct request *r, const char *line)
{
    bool selected = r->n_patterns == 0;
    for (int i = 0; i < r->n_patterns && !selected; i++)
        selected = cofi_cli_matches(r->patterns[i], line);
    return selected;
}

/* The case's line with the rank count behind it. */
static void full_line(const struct cofi_op_check *check, const struct cofi_check_options *options,
                      int64_t idx, char *line)
{
    check->case_line(options, idx, line, LINE_BYTES - 20);
    cofi_check_append(line, LINE_BYTES, " ranks=%d", options->n_ranks);
}

static struct cofi_check_options options_for(const struct request *r, int n_ranks)
{
    return (struct cofi_check_options){n_ranks, r->full, (uint64_t)r->seed, r->cuda};
}

/* The check of the i-th operator; NULL: it has none for these devices. */
static const struct cofi_op_check *check_of(int i, bool cuda)
{
    const struct cofi_op_check *check = cofi_ops[i]->check;
    return check && (check->has_cuda || !cuda) ? check : NULL;
}

static int64_t count_selected(const struct request *r, int n_ranks, bool print)
{
    struct cofi_check_options options = options_for(r, n_ranks);
    int64_t n = 0;
    for (int i = 0; cofi_ops[i]; i++) {
        const struct cofi_op_check *check = check_of(i, options.cuda);
        for (int64_t c = 0; check && c < check->n_cases(&options); c++) {
            char line[LINE_BYTES];
            full_line(check, &options, c, line);
            if (!is_selected(r, line))
                continue;
            n++;
            if (print)
                puts(line);
        }
    }
    return n;
}

/* ---- A rank ---- */

struct rank_state {
    const struct request *request;
    struct cofi_check_options options;
    struct cofi_job job;
    struct shared *shared;
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

/* The command that runs a failed case again. */
static void print_again(const struct cofi_check_options *options, const struct request *request,
                        const char *line)
{
    const char *end = strstr(line, " ranks=");
    printf("     again: %scofuse check '%.*s' --ranks %d --engine %s%s --seed %" PRIu64 "%s\n",
           cofi_config_int(COFI_VAR_FORCE_STAGED) ? "COFUSE_FORCE_STAGED=1 " : "",
           (int)(end ? end - line : LINE_BYTES - 1), line, options->n_ranks,
           request->engine == COF_ENGINE_THREAD ? "thread" : request->attach ? "attach" : "shm",
           request->cuda ? " --device cuda" : "", options->seed, options->full ? " --full" : "");
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
    if (failed || s->request->verbose) {
        clear_progress(s);
        printf("%s %s (%.2f s):%s%s\n", words[result->verdict], line, seconds,
               result->text[0] == ' ' ? "" : " ", result->text);
    }
    if (failed)
        print_again(&s->options, s->request, line);
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
        const struct cofi_op_check *check = check_of(i, s->options.cuda);
        for (int64_t c = 0; check && c < check->n_cases(&s->options); c++) {
            char line[LINE_BYTES];
            full_line(check, &s->options, c, line);
            if (!is_selected(s->request, line))
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

/* The body of a rank, process or thread; returns its exit code. */
static int run_rank(const struct request *r, cof_world_options *options, struct shared *shared,
                    size_t bytes)
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
    s.job.shared = (char *)shared + HEADER_BYTES;
    s.job.shared_bytes = bytes - HEADER_BYTES;
    s.options = options_for(r, s.job.n_ranks);
    s.n_selected = count_selected(r, s.job.n_ranks, false);
    status = check_all(&s);
    if (status == COF_OK && s.job.rank == 0)
        shared->finished = true;
    cof_world_destroy(s.job.world);
    if (device)
        device->close();
    return status == COF_OK ? COFI_EXIT_OK : COFI_EXIT_RANK;
}

static int run_as_process(const struct request *r)
{
    size_t bytes;
    struct shared *shared = cofi_job_shared(&bytes);
    if (!shared || bytes < HEADER_BYTES || shared->magic != shared_magic) {
        cofi_cli_error("COFUSE_SHARED_FD is set, but is no memory of a parent `cofuse check`");
        return COFI_EXIT_RANK;
    }
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    return run_rank(r, &options, shared, bytes);
}

struct thread_rank {
    const struct request *request;
    struct shared *shared;
    size_t bytes;
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
    own->code = run_rank(own->request, &options, own->shared, own->bytes);
    return NULL;
}

/* ---- The parent ---- */

static int run_threads(const struct request *r, struct shared *shared, size_t bytes)
{
    static struct thread_rank ranks[COFI_MAX_RANKS];
    static int n_jobs;
    char job[64];
    int n = 0, code = COFI_EXIT_OK;
    snprintf(job, sizeof job, "cofuse-check-%d-%d", (int)getpid(), n_jobs++);
    for (; n < shared->n_ranks; n++) {
        ranks[n] = (struct thread_rank){.request = r, .shared = shared, .bytes = bytes, .job = job,
                                        .rank = n};
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

/* One rank count; adds its counts to `total`. */
static int run_job(const struct request *r, int n_ranks, int argc, char **argv,
                   struct shared *total)
{
    struct cofi_check_options options = options_for(r, n_ranks);
    size_t bytes = 0;
    if (count_selected(r, n_ranks, false) == 0)
        return COFI_EXIT_OK;
    for (int i = 0; cofi_ops[i]; i++) {
        const struct cofi_op_check *check = check_of(i, r->cuda);
        size_t wanted = check ? check->shared_bytes(&options) : 0;
        bytes = wanted > bytes ? wanted : bytes;
    }
    bytes += HEADER_BYTES;
    void *memory;
    int fd = cofi_job_shared_create(bytes, &memory);
    if (fd < 0)
        return COFI_EXIT_RANK;
    struct shared *shared = memory;
    shared->magic = shared_magic;
    shared->n_ranks = n_ranks;
    fflush(stdout);
    int code = r->engine == COF_ENGINE_THREAD ? run_threads(r, shared, bytes)
                                              : run_processes(n_ranks, fd, argc, argv);
    if (code == COFI_EXIT_OK && !shared->finished)
        code = COFI_EXIT_RANK;
    if (code != COFI_EXIT_OK && shared->line[0]) {
        shared->line[LINE_BYTES - 1] = 0;
        printf("FAIL %s: the run itself failed\n", shared->line);
        print_again(&options, r, shared->line);
        shared->n_failed++;
    }
    if (code != COFI_EXIT_OK)
        cofi_cli_error("%d ranks: stopped before the last case", n_ranks);
    total->n_passed += shared->n_passed;
    total->n_failed += shared->n_failed;
    total->n_skipped += shared->n_skipped;
    munmap(memory, bytes);
    close(fd);
    return code;
}

static int run_jobs(const struct request *r, int argc, char **argv)
{
    struct shared total = {0};
    int64_t n_selected = 0;
    int code = COFI_EXIT_OK;
    for (int i = 0; i < r->ranks.n; i++)
        n_selected += count_selected(r, r->ranks.ranks[i], r->list);
    if (n_selected == 0)
        return cofi_cli_error("no case matches \"%s\" (--list prints them)",
                              r->n_patterns ? r->patterns[0] : "");
    if (r->list)
        return COFI_EXIT_OK;
    for (int i = 0; i < r->ranks.n; i++) {
        int job_code = run_job(r, r->ranks.ranks[i], argc, argv, &total);
        code = job_code != COFI_EXIT_OK ? COFI_EXIT_RANK : code;
    }
    printf("%" PRId64 " passed, %" PRId64 " failed", (int64_t)total.n_passed,
           (int64_t)total.n_failed);
    if (total.n_skipped)
        printf(", %" PRId64 " skipped", (int64_t)total.n_skipped);
    printf("\n");
    return code != COFI_EXIT_OK ? code : total.n_failed ? COFI_EXIT_CHECK : COFI_EXIT_OK;
}

enum { OPT_RANKS = 256, OPT_ENGINE, OPT_DEVICE, OPT_SEED, OPT_FULL, OPT_LIST, OPT_CHILD };

/* COFI_EXIT_OK, or the exit code after a message. */
static int parse_option(struct request *r, int option)
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
    case 'v': r->verbose = true; break;
    default: ok = false;
    }
    return ok ? COFI_EXIT_OK : COFI_EXIT_USAGE;
}

/* CUDA makes threads. They are to leave the signals to this one, which waits for them in a job. */
static cof_status ask_device(const struct cofi_check_device *device)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    cof_status status = device->available();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

/* COFI_EXIT_OK, or the exit code after a message. Ranks ask when they make their worlds. */
static int require_cuda(const struct request *r)
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
        {"child", required_argument, NULL, OPT_CHILD}, /* of a case that needs processes */
        {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct request r = {.ranks = {4, {1, 2, 3, 4}}, .seed = 1};
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
    if (cofi_config_check() != COF_OK)
        return cofi_cli_error("%s", cof_last_error());
    if (r.engine == COF_ENGINE_DEFAULT)
        r.engine = strcmp(cofi_config_text(COFI_VAR_ENGINE), "thread") ? COF_ENGINE_SHM
                                                                       : COF_ENGINE_THREAD;
    int code = r.cuda ? require_cuda(&r) : COFI_EXIT_OK;
    if (code != COFI_EXIT_OK)
        return code;
    return cofi_job_is_rank() ? run_as_process(&r) : run_jobs(&r, argc, argv);
}
