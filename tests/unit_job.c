/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The parent of a job sees its ranks end, whatever other threads its process has. */
#define _GNU_SOURCE
#include <poll.h>
#include <time.h>

#include "job.h"
#include "test.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *sleep_there(void *arg)
{
    for (;;)
        poll(NULL, 0, -1);
    return arg;
}

/* A thread that does not block SIGCHLD, as libraries make, often takes it from the signalfd. */
static void test_ends_beside_a_thread(void)
{
    char program[] = "true", *argv[] = {program, NULL};
    struct cofi_job_spec spec = {.n_ranks = 1, .argv = argv, .shared_fd = -1, .name = "test"};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleep_there, NULL) == 0, "no thread");
    for (int i = 0; i < 20; i++) {
        double begin = now();
        int code = cofi_job_run(&spec);
        CHECK(code == COFI_EXIT_OK, "job %d: exit code %d", i, code);
        CHECK(now() - begin < 5, "job %d: took %.1f s", i, now() - begin);
    }
}

int main(void)
{
    alarm(60); /* the error was to sleep for ever */
    test_ends_beside_a_thread();
    return test_done();
}
