/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
/* Starts the ranks of a job, watches them, and leaves no process behind.
 *
 * The ranks form one process group. No rank is reaped before the end, so that neither their process
 * numbers nor the group's can belong to somebody else when they are killed. */
#include "job.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/clock.h"
#include "job_environment.h"
#include "job_output.h"

static const int64_t grace_ns = 2000000000; /* from the first failure to SIGKILL */
static const int64_t drain_ns = 200000000;  /* for output that outlives the ranks */
static const int64_t look_ns = 50000000;    /* from one look at the ranks to the next */

struct job_rank {
    pid_t pid;
    bool has_ended, is_told;
    siginfo_t end;
    int write_fd[2];                  /* of the output pipes; -1 when inherited */
    struct cofi_job_output output[2]; /* stdout, stderr */
};

struct job {
    const struct cofi_job_spec *spec;
    int n;
    struct job_rank *ranks;
    int first_served;              /* the rank whose output comes first this time */
    struct cofi_job_sink sinks[2]; /* stdout, stderr */
    int (*pairs)[2]; /* [i]: end of rank 0, end of rank i; [0] unused */
    int signal_fd;
    int exec_fd[2]; /* a child that cannot exec writes errno */
    sigset_t old_mask;
    pid_t parent, group;
    char token[33];
    int first_failed;  /* -1: none */
    int exec_errno;    /* 0: none */
    int stop_signal;   /* 0: none */
    int64_t kill_time; /* COFI_NEVER until something failed */
};

/* A line on stderr, behind the ranks' own and as patient. */
static void say(struct job *job, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void say(struct job *job, const char *format, ...)
{
    char text[PATH_MAX + 200], line[PATH_MAX + 300];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int n = snprintf(line, sizeof line, "%.80s: %s\n", job->spec->name, text);
    cofi_job_sink_put(&job->sinks[1], line, (size_t)n);
    cofi_job_sink_flush(&job->sinks[1]);
}

static int fail(struct job *job, const char *what)
{
    say(job, "%s: %s", what, strerror(errno));
    return COFI_EXIT_RANK;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Two sockets per rank, and with labels four pipe ends. */
static void raise_file_limit(const struct cofi_job_spec *spec)
{
    rlim_t wanted = (rlim_t)(spec->n_ranks * (spec->label_output ? 6 : 2) + 64);
    struct rlimit limit;
    if (!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur < wanted) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int make_token(char token[33])
{
    unsigned char bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return -1;
    for (int i = 0; i < 16; i++)
        snprintf(token + 2 * i, 3, "%02x", bytes[i]);
    return 0;
}

/* Signals that end us are read instead. One that is ignored, as under nohup and in the background
 * of a script, stays so here and in the ranks: a signalfd would see it. */
static void hold_signals(struct job *job)
{
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
    sigset_t mask;
    struct sigaction action;
    signal(SIGCHLD, SIG_DFL); /* ignored, it would reap the ranks behind our back */
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        if (!sigaction(ends[i], NULL, &action) && action.sa_handler != SIG_IGN)
            sigaddset(&mask, ends[i]);
    pthread_sigmask(SIG_BLOCK, &mask, &job->old_mask);
    job->signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
}

static int open_job(struct job *job)
{
    const struct cofi_job_spec *spec = job->spec;
    raise_file_limit(spec);
    hold_signals(job);
    if (job->signal_fd < 0 || pipe2(job->exec_fd, O_CLOEXEC | O_NONBLOCK) || make_token(job->token))
        return -1;
    for (int i = 0; i < job->n; i++) {
        struct job_rank *rank = &job->ranks[i];
        if (i > 0 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, job->pairs[i]))
            return -1;
        for (int k = 0; spec->label_output && k < 2; k++) {
            if (!cofi_job_output_open(&rank->output[k], i, &job->sinks[k], &rank->write_fd[k]))
                return -1;
        }
    }
    return 0;
}

/* In the child, between fork and exec. */
static void keep_fd(int fd)
{
    if (fd >= 0)
        fcntl(fd, F_SETFD, 0);
}

static _Noreturn void run_rank(struct job *job, int rank, char **environment)
{
    const struct cofi_job_spec *spec = job->spec;
    struct job_rank *own = &job->ranks[rank];
    setpgid(0, job->group);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != job->parent) /* it died before prctl */
        _exit(COFI_EXIT_RANK);
    signal(SIGXFSZ, SIG_DFL);
    if (rank == 0) {
        for (int peer = 1; peer < job->n; peer++)
            keep_fd(job->pairs[peer][0]);
    } else {
        keep_fd(job->pairs[rank][1]);
    }
    keep_fd(spec->shared_fd);
    if (rank > 0 || isatty(STDIN_FILENO)) { /* a background group must not read a terminal */
        int fd = open("/dev/null", O_RDONLY);
        if (fd >= 0)
            dup2(fd, STDIN_FILENO), close(fd);
    }
    for (int k = 0; k < 2; k++)
        if (own->write_fd[k] >= 0)
            dup2(own->write_fd[k], k + 1);
    pthread_sigmask(SIG_SETMASK, &job->old_mask, NULL);
    if (spec->self)
        execve("/proc/self/exe", spec->argv, environment);
    else
        execvpe(spec->argv[0], spec->argv, environment);
    int error = errno;
    if (write(job->exec_fd[1], &error, sizeof error) < 0)
        _exit(COFI_EXIT_RANK);
    _exit(COFI_EXIT_USAGE);
}

static int start_ranks(struct job *job)
{
    job->parent = getpid();
    for (int i = 0; i < job->n; i++) {
        char **environment =
            cofi_job_environment(job->spec, job->token, i, job->pairs);
        pid_t pid = environment ? fork() : -1;
        if (pid == 0)
            run_rank(job, i, environment);
        free(environment);
        if (pid < 0)
            return -1;
        job->ranks[i].pid = pid;
        if (i == 0)
            job->group = pid;
        setpgid(pid, job->group); /* here and in the child: whoever comes first */
    }
    /* With our ends closed, a rank that dies hangs up on its peers. */
    for (int i = 0; i < job->n; i++) {
        for (int k = 0; k < 2; k++) {
            close_fd(&job->pairs[i][k]);
            close_fd(&job->ranks[i].write_fd[k]);
        }
    }
    close_fd(&job->exec_fd[1]);
    return 0;
}

static void start_grace(struct job *job, int64_t ns)
{
    int64_t time = cofi_now() + ns;
    if (time < job->kill_time)
        job->kill_time = time;
}

static bool has_failed(const struct job_rank *rank)
{
    return rank->has_ended && (rank->end.si_code != CLD_EXITED || rank->end.si_status != 0);
}

static void report_failure(struct job *job, int idx)
{
    struct job_rank *rank = &job->ranks[idx];
    rank->is_told = true;
    if (rank->end.si_code != CLD_EXITED)
        say(job, "rank %d was killed by signal %d (%s)", idx, rank->end.si_status,
            strsignal(rank->end.si_status));
    else if (!job->spec->self || rank->end.si_status != COFI_EXIT_CHECK)
        say(job, "rank %d ended with exit code %d", idx, rank->end.si_status);
}

/* Some of each rank's. */
static void pump_output(struct job *job)
{
    for (int i = 0; i < job->n; i++)
        for (int k = 0; k < 2; k++)
            cofi_job_output_pump(&job->ranks[(job->first_served + i) % job->n].output[k]);
    job->first_served = (job->first_served + 1) % job->n;
    for (int k = 0; k < 2; k++)
        cofi_job_sink_flush(&job->sinks[k]);
}

static bool was_killed(const struct job_rank *rank)
{
    return has_failed(rank) && rank->end.si_code != CLD_EXITED;
}

/* Of the ranks that have failed; -1: none. One that was killed comes first: others fail of it. */
static int find_failed(const struct job *job)
{
    int failed = -1;
    for (int i = 0; i < job->n; i++)
        if (has_failed(&job->ranks[i]) &&
            (failed < 0 || (was_killed(&job->ranks[i]) && !was_killed(&job->ranks[failed]))))
            failed = i;
    return failed;
}

/* Whether a rank could not run the program. It says so before it ends. */
static bool read_exec_error(struct job *job)
{
    int error;
    if (read(job->exec_fd[0], &error, sizeof error) != sizeof error)
        return false;
    job->exec_errno = error;
    say(job, "cannot run \"%.4000s\": %s", job->spec->argv[0], strerror(error));
    start_grace(job, 0);
    return true;
}

/* Looks which ranks have ended; true when all have. */
static bool collect_ends(struct job *job)
{
    bool all = true;
    for (int i = 0; i < job->n; i++) {
        struct job_rank *rank = &job->ranks[i];
        if (!rank->has_ended && rank->pid > 0) {
            rank->end.si_pid = 0;
            int rc = waitid(P_PID, (id_t)rank->pid, &rank->end, WEXITED | WNOHANG | WNOWAIT);
            rank->has_ended = rc == 0 && rank->end.si_pid == rank->pid;
        }
        all &= rank->has_ended || rank->pid <= 0;
    }
    int failed = find_failed(job);
    if (failed >= 0 && job->first_failed < 0 && !job->exec_errno && !job->stop_signal &&
        !read_exec_error(job)) {
        job->first_failed = failed;
        pump_output(job);
        report_failure(job, failed);
        start_grace(job, grace_ns);
    }
    /* A rank that was killed may be seen to end after those that failed of it. */
    for (int i = 0; i < job->n && job->first_failed >= 0 && !job->stop_signal; i++)
        if (was_killed(&job->ranks[i]) && !job->ranks[i].is_told)
            report_failure(job, i);
    return all;
}

static void read_signals(struct job *job)
{
    struct signalfd_siginfo info;
    while (read(job->signal_fd, &info, sizeof info) == sizeof info) {
        int number = (int)info.ssi_signo;
        if (number == SIGCHLD)
            continue;
        bool is_first = job->stop_signal == 0;
        job->stop_signal = number;
        bool may_clean_up = is_first && !job->spec->self; /* somebody else's program may want to */
        if (may_clean_up && job->group > 0)
            kill(-job->group, number);
        start_grace(job, may_clean_up ? grace_ns : 0);
    }
}

static bool are_sinks_free(const struct job *job)
{
    return job->sinks[0].n == 0 && job->sinks[1].n == 0;
}

/* Sleeps until a signal, output that may go on, or the time, and not for long: a thread that a
 * library of this process made before (CUDA's does) may take SIGCHLD away from the signalfd. */
static void wait_event(struct job *job, struct pollfd *fds, int64_t until)
{
    nfds_t n = 0;
    fds[n++] = (struct pollfd){.fd = job->signal_fd, .events = POLLIN};
    for (int k = 0; k < 2; k++)
        if (job->sinks[k].n)
            fds[n++] = (struct pollfd){.fd = job->sinks[k].fd, .events = POLLOUT};
    for (int i = 0; i < job->n; i++)
        for (int k = 0; k < 2; k++)
            if (job->ranks[i].output[k].fd >= 0 && !job->sinks[k].n)
                fds[n++] = (struct pollfd){.fd = job->ranks[i].output[k].fd, .events = POLLIN};
    int64_t now = cofi_now(), left = until - now < look_ns ? until - now : look_ns;
    poll(fds, n, left < 0 ? 0 : (int)((left + 999999) / 1000000));
}

static void watch_ranks(struct job *job, struct pollfd *fds)
{
    for (;;) {
        read_signals(job);
        pump_output(job);
        if (collect_ends(job) || cofi_now() >= job->kill_time)
            return;
        wait_event(job, fds, job->kill_time);
    }
}

static bool is_output_left(const struct job *job)
{
    bool is_left = !are_sinks_free(job);
    for (int i = 0; i < job->n; i++)
        is_left |= job->ranks[i].output[0].fd >= 0 || job->ranks[i].output[1].fd >= 0;
    return is_left;
}

/* What the ranks left. A reader has all the time that it wants, until a signal comes. */
static void drain_output(struct job *job, struct pollfd *fds)
{
    for (int64_t until = cofi_now() + drain_ns;;) {
        read_signals(job);
        pump_output(job);
        int64_t now = cofi_now();
        if (!are_sinks_free(job) && !job->stop_signal)
            until = now + drain_ns;
        if (!is_output_left(job) || now >= until)
            return;
        wait_event(job, fds, until);
    }
}

/* Kills what is left of the group, grandchildren included, and reaps the ranks. */
static void end_ranks(struct job *job, struct pollfd *fds)
{
    for (int i = 0; i < job->n; i++)
        if (job->ranks[i].pid > 0 && !job->ranks[i].has_ended && job->first_failed >= 0 &&
            !job->stop_signal)
            say(job, "rank %d did not end within 2 s of that and was killed", i);
    if (job->group > 0)
        kill(-job->group, SIGKILL);
    for (int i = 0; i < job->n; i++) {
        struct job_rank *rank = &job->ranks[i];
        if (rank->pid <= 0)
            continue;
        kill(rank->pid, SIGKILL); /* a rank that left the group; ended ones are unreaped still */
        while (waitpid(rank->pid, NULL, 0) < 0 && errno == EINTR)
            continue;
    }
    job->group = 0; /* its number may be somebody else's now */
    drain_output(job, fds);
}

static void close_job(struct job *job)
{
    for (int i = 0; i < job->n; i++) {
        for (int k = 0; k < 2; k++) {
            close_fd(&job->pairs[i][k]);
            close_fd(&job->ranks[i].write_fd[k]);
            cofi_job_output_close(&job->ranks[i].output[k]);
        }
    }
    close_fd(&job->signal_fd);
    close_fd(&job->exec_fd[0]);
    close_fd(&job->exec_fd[1]);
    pthread_sigmask(SIG_SETMASK, &job->old_mask, NULL);
    if (job->stop_signal) { /* ends as the signal would have ended us */
        signal(job->stop_signal, SIG_DFL);
        raise(job->stop_signal);
    }
}

/* What a rank ended with by itself, as a code of ours. */
static int own_code(const struct job_rank *rank)
{
    int code = rank->has_ended && rank->end.si_code == CLD_EXITED ? rank->end.si_status
                                                                  : COFI_EXIT_RANK;
    return code > COFI_EXIT_UNSUPPORTED ? COFI_EXIT_RANK : code;
}

/* That of the first rank that failed. Where it is 3, the complaint of another rank of ours (2, 4)
 * may be why, and has not been seen first. */
static int exit_code(const struct job *job)
{
    static const int complaints[] = {COFI_EXIT_USAGE, COFI_EXIT_UNSUPPORTED};
    if (job->exec_errno)
        return COFI_EXIT_USAGE;
    if (job->stop_signal)
        return COFI_EXIT_RANK;
    if (job->first_failed < 0)
        return COFI_EXIT_OK;
    const struct job_rank *first = &job->ranks[job->first_failed];
    int code = own_code(first);
    if (!job->spec->self || code != COFI_EXIT_RANK || was_killed(first))
        return code;
    for (size_t k = 0; k < sizeof complaints / sizeof complaints[0]; k++)
        for (int i = 0; i < job->n; i++)
            if (own_code(&job->ranks[i]) == complaints[k])
                return complaints[k];
    return code;
}

int cofi_job_run(const struct cofi_job_spec *spec)
{
    struct job job = {.spec = spec, .n = spec->n_ranks, .signal_fd = -1, .exec_fd = {-1, -1},
                      .first_failed = -1, .kill_time = COFI_NEVER};
    size_t n = (size_t)job.n;
    job.ranks = calloc(n, sizeof *job.ranks);
    job.pairs = calloc(n, sizeof *job.pairs);
    struct pollfd *fds = calloc(2 * n + 3, sizeof *fds);
    int code = COFI_EXIT_RANK;
    fflush(NULL); /* this may wait, so before signals do */
    for (int k = 0; k < 2; k++)
        cofi_job_sink_open(&job.sinks[k], k + 1);
    if (!job.ranks || !job.pairs || !fds) {
        fail(&job, "memory for the job");
        goto free_job;
    }
    for (size_t i = 0; i < n; i++) {
        job.pairs[i][0] = job.pairs[i][1] = -1;
        job.ranks[i].write_fd[0] = job.ranks[i].write_fd[1] = -1;
        job.ranks[i].output[0].fd = job.ranks[i].output[1].fd = -1;
    }
    if (open_job(&job)) {
        code = fail(&job, "sockets and pipes for the ranks");
        drain_output(&job, fds);
    } else if (start_ranks(&job)) {
        code = fail(&job, "starting the ranks");
        end_ranks(&job, fds);
    } else {
        watch_ranks(&job, fds);
        end_ranks(&job, fds);
        code = exit_code(&job);
    }
    for (int k = 0; k < 2; k++)
        if (job.sinks[k].error && code == COFI_EXIT_OK) {
            errno = job.sinks[k].error;
            code = fail(&job, k ? "standard error" : "standard output");
        }
    close_job(&job);
free_job:
    for (int k = 0; k < 2; k++)
        cofi_job_sink_close(&job.sinks[k]);
    free(job.ranks);
    free(job.pairs);
    free(fds);
    return code;
}
