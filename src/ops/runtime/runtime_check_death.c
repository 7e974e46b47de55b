/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Cases about ranks that die or stop, seen from the ranks of the check: each starts one process
 * (runtime_check_child.c), and reads what that found from its standard output. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/clock.h"
#include "ops/runtime/runtime_check.h"

#define PATIENCE_NS INT64_C(60000000000) /* a child is killed then */

struct child {
    pid_t pid;
    int out_fd; /* read end of its standard output */
    int wait_status;
    bool has_ended;
};

/* ---- start ---------------------------------------------------------------------------------- */

static bool is_own_variable(const char *entry)
{
    static const char *const names[] = {"COFUSE_RANK=", "COFUSE_SIZE=", "COFUSE_JOB=",
                                        "COFUSE_FDS=", "COFUSE_SHARED_FD=", "COFUSE_ENGINE=",
                                        "COFUSE_GEMM="};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strncmp(entry, names[i], strlen(names[i])))
            return true;
    return false;
}

/* This process's environment with the child's place in its job. */
static char **child_environment(const struct cofi_runtime *rt, const char *job, char own[5][100])
{
    size_t n = 0, at = 0;
    while (environ[n])
        n++;
    char **list = malloc((n + 6) * sizeof *list);
    for (size_t i = 0; list && i < n; i++)
        if (!is_own_variable(environ[i]))
            list[at++] = environ[i];
    snprintf(own[0], sizeof own[0], "COFUSE_RANK=%d", rt->rank);
    snprintf(own[1], sizeof own[1], "COFUSE_SIZE=%d", rt->n_ranks);
    snprintf(own[2], sizeof own[2], "COFUSE_JOB=%s", job);
    snprintf(own[3], sizeof own[3], "COFUSE_ENGINE=%s", rt->job->world->ops->name);
    snprintf(own[4], sizeof own[4], "COFUSE_GEMM=plain"); /* the other one takes long to load */
    for (int i = 0; list && i < 5; i++)
        list[at++] = own[i];
    if (list)
        list[at] = NULL;
    return list;
}

static cof_status spawn(const struct cofi_runtime *rt, const char *job, int out_fd, pid_t *pid_out)
{
    static char program[] = "cofuse", command[] = "check", option[] = "--child";
    char words[64], own[5][100];
    snprintf(words, sizeof words, "%llu:%d:%d", (unsigned long long)rt->arg, rt->job->attach,
             (int)getpid());
    char *argv[] = {program, command, option, words, NULL};
    char **environment = child_environment(rt, job, own);
    COF_FAIL_IF(!environment, COF_ERR_NOMEM, "check: no memory for an environment");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out_fd, STDOUT_FILENO);
    int error = posix_spawn(pid_out, "/proc/self/exe", &actions, NULL, argv, environment);
    posix_spawn_file_actions_destroy(&actions);
    free(environment);
    COF_FAIL_IF(error, COF_ERR_SYSTEM, "check: posix_spawn: %s", strerror(error));
    return COF_OK;
}

static cof_status start_child(struct cofi_runtime *rt, struct child *child)
{
    int64_t own = cofi_now() ^ (int64_t)getpid() << 40, all[COFI_RUNTIME_MAX_RANKS];
    char job[64];
    int fd[2];
    *child = (struct child){.out_fd = -1};
    COF_TRY(cof_team_allgather(rt->job->team, &own, all, sizeof own));
    snprintf(job, sizeof job, "cofuse-check-child-%llx", (unsigned long long)all[0]);
    COF_FAIL_IF(pipe2(fd, O_CLOEXEC) != 0, COF_ERR_SYSTEM, "check: pipe: %s", strerror(errno));
    child->out_fd = fd[0];
    cof_status status = spawn(rt, job, fd[1], &child->pid);
    close(fd[1]);
    return status;
}

/* ---- end ------------------------------------------------------------------------------------ */

static void look_at(struct child *child)
{
    if (!child->has_ended && child->pid > 0)
        child->has_ended = waitpid(child->pid, &child->wait_status, WNOHANG) == child->pid;
}

/* False when it had to be killed. */
static bool await_child(struct child *child)
{
    for (int64_t end = cofi_now() + PATIENCE_NS; cofi_now() < end && !child->has_ended;) {
        look_at(child);
        if (!child->has_ended)
            cofi_runtime_sleep_us(5000);
    }
    return child->has_ended;
}

static void kill_child(struct child *child)
{
    if (child->pid > 0 && !child->has_ended) {
        kill(child->pid, SIGKILL);
        while (waitpid(child->pid, &child->wait_status, 0) < 0 && errno == EINTR)
            continue;
        child->has_ended = true;
    }
    if (child->out_fd >= 0)
        close(child->out_fd);
    child->out_fd = -1;
}

/* Exit code 0, or the line it wrote. */
static void inspect_survivor(struct cofi_runtime *rt, struct child *child)
{
    char text[400] = "";
    if (!await_child(child)) {
        cofi_check_fail(rt->result, "the process of a surviving rank hangs");
        return;
    }
    ssize_t n = read(child->out_fd, text, sizeof text - 1); /* it has ended: no wait */
    text[n > 0 ? n : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    if (WIFSIGNALED(child->wait_status))
        cofi_check_fail(rt->result, "the process of a surviving rank died of signal %d",
                        WTERMSIG(child->wait_status));
    COFI_EXPECT(rt, WIFEXITED(child->wait_status) && WEXITSTATUS(child->wait_status) == 0, "%s",
                *text ? text : "the process of a surviving rank failed without a word");
}

static void inspect_victim(struct cofi_runtime *rt, struct child *child)
{
    COFI_EXPECT(rt, await_child(child) && WIFSIGNALED(child->wait_status) &&
                        WTERMSIG(child->wait_status) == SIGKILL,
                "the process that was to kill itself did not (wait status %#x)",
                (unsigned)child->wait_status);
}

cof_status cofi_runtime_death(struct cofi_runtime *rt)
{
    struct child child;
    bool stops = rt->arg & COFI_RUNTIME_STOPS;
    int victim = rt->arg & COFI_RUNTIME_RANK0 ? 0 : rt->n_ranks - 1;
    cof_status status = start_child(rt, &child);
    if (status == COF_OK && rt->rank != victim)
        inspect_survivor(rt, &child);
    else if (status == COF_OK && !stops)
        inspect_victim(rt, &child);
    if (status == COF_OK)
        status = cof_team_barrier(rt->job->team);
    look_at(&child);
    COFI_EXPECT(rt, !stops || rt->rank != victim || !child.has_ended,
                "the process that was to stop itself ended (wait status %#x)",
                (unsigned)child.wait_status);
    kill_child(&child);
    return status;
}
