/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The parent of a job sees its ranks end, whatever other threads its process has, and tells how. */
#define _GNU_SOURCE
#include <fcntl.h>
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

/* Runs the job with stderr in a file, and returns what was said. */
static const char *run_job(const struct cofi_job_spec *spec, int *code_out)
{
    static char text[4096];
    int kept = dup(STDERR_FILENO), fd = memfd_create("stderr", MFD_CLOEXEC);
    dup2(fd, STDERR_FILENO);
    *code_out = cofi_job_run(spec);
    dup2(kept, STDERR_FILENO);
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    close(fd);
    close(kept);
    return text;
}

/* The rank's end may be seen before its complaint is looked for. */
static void test_cannot_run(void)
{
    char program[] = "/nonexistent/prog", *argv[] = {program, NULL};
    struct cofi_job_spec spec = {
        .n_ranks = 1, .argv = argv, .shared_fd = -1, .name = "test", .label_output = true};
    const char *wanted = "test: cannot run \"/nonexistent/prog\": No such file or directory\n";
    for (int i = 0; i < 1000; i++) {
        int code;
        const char *text = run_job(&spec, &code);
        bool is_told = code == COFI_EXIT_USAGE && !strcmp(text, wanted);
        CHECK(is_told, "job %d: exit code %d, \"%s\"", i, code, text);
        if (!is_told)
            break;
    }
}

/* Ranks of this program, which end with the codes given. */
static void test_exit_codes(void)
{
    static const struct {
        const char *codes[2];
        int wanted;
    } cases[] = {
        {{"0", "0"}, COFI_EXIT_OK},    {{"0", "1"}, COFI_EXIT_CHECK}, {{"2", "0"}, COFI_EXIT_USAGE},
        {{"0", "3"}, COFI_EXIT_RANK},  {{"0", "9"}, COFI_EXIT_RANK},  {{"3", "2"}, COFI_EXIT_USAGE},
        {{"2", "3"}, COFI_EXIT_USAGE}, {{"3", "4"}, COFI_EXIT_UNSUPPORTED},
        {{"3", "9"}, COFI_EXIT_RANK},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char program[] = "unit_job", codes[2][4], *argv[] = {program, codes[0], codes[1], NULL};
        int code;
        for (int rank = 0; rank < 2; rank++)
            snprintf(codes[rank], sizeof codes[rank], "%s", cases[i].codes[rank]);
        struct cofi_job_spec spec = {
            .n_ranks = 2, .argv = argv, .self = true, .shared_fd = -1, .name = "test"};
        run_job(&spec, &code);
        CHECK(code == cases[i].wanted, "%s, %s: exit code %d", codes[0], codes[1], code);
    }
}

int main(int argc, char **argv)
{
    if (argc == 3) /* a rank of test_exit_codes */
        return atoi(argv[1 + atoi(getenv("COFUSE_RANK"))]);
    alarm(60); /* the error was to sleep for ever */
    test_ends_beside_a_thread();
    test_cannot_run();
    test_exit_codes();
    return test_done();
}
