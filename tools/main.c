/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The program `cofuse`: dispatch to the subcommands. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "cofuse/cofuse.h"
#include "commands.h"
#include "job.h"

static const struct {
    const char *name;
    int (*command)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"info", cofi_cmd_info, "what this machine has and which variables are in force"},
    {"launch", cofi_cmd_launch, "start the ranks of a program on this host"},
    {"run", cofi_cmd_run, "run an operator on tensors from a file"},
    {"check", cofi_cmd_check, "compare every kernel with its reference"},
    {"bench", cofi_cmd_bench, "time the calls that check compares"},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_usage(FILE *out)
{
    fprintf(out, "usage: cofuse <command> [options]\n\n");
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  %-8s %s\n", commands[i].name, commands[i].summary);
    fprintf(out, "\n`cofuse <command> --help` tells more; `cofuse --version` prints the version.\n"
                 "Exit codes: 0 ok, 1 check failed, 2 usage or bad input, 3 a rank failed or timed "
                 "out,\n4 not supported here.\n");
}

/* Descriptors 0 to 2 must exist, or a socket of ours could become one of them. */
static void open_standard_files(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
}

static int run_command(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        print_usage(stdout);
        return COFI_EXIT_OK;
    }
    if (!strcmp(name, "--version")) {
        printf("cofuse %s\n", cof_version());
        return COFI_EXIT_OK;
    }
    for (int i = 0; i < N_COMMANDS; i++) {
        if (strcmp(name, commands[i].name))
            continue;
        char words[64];
        snprintf(words, sizeof words, "cofuse %s", name);
        cofi_cli_begin(words);
        return commands[i].command(argc - 1, argv + 1);
    }
    if (*name)
        fprintf(stderr, "cofuse: unknown command \"%s\"\n", name);
    print_usage(stderr);
    return COFI_EXIT_USAGE;
}

int main(int argc, char **argv)
{
    open_standard_files();
    signal(SIGXFSZ, SIG_IGN); /* a file size limit is then an error of write() */
    int code = run_command(argc, argv);
    errno = 0;
    if ((fflush(stdout) || ferror(stdout)) && code == COFI_EXIT_OK) {
        fprintf(stderr, "cofuse: standard output: %s\n",
                errno ? strerror(errno) : "some of it was not written");
        code = COFI_EXIT_RANK;
    }
    return code;
}
