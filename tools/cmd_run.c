/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse run <op> ...`: hands the words after `run` to the operator. */
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "commands.h"
#include "job.h"
#include "ops/ops.h"

static void print_usage(FILE *out)
{
    fprintf(out, "usage: cofuse run <operator> [options]\n\noperators:\n");
    for (int i = 0; cofi_ops[i]; i++)
        if (cofi_ops[i]->run)
            fprintf(out, "  %-17s %s\n", cofi_ops[i]->name, cofi_ops[i]->summary);
    fprintf(out, "\n`cofuse run <operator> --help` lists its options.\n");
}

int cofi_cmd_run(int argc, char **argv)
{
    if (argc < 2) {
        print_usage(stderr);
        return COFI_EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        print_usage(stdout);
        return COFI_EXIT_OK;
    }
    for (int i = 0; cofi_ops[i]; i++) {
        if (!cofi_ops[i]->run || strcmp(argv[1], cofi_ops[i]->name))
            continue;
        static char words[64];
        snprintf(words, sizeof words, "cofuse run %s", cofi_ops[i]->name);
        cofi_cli_begin(words);
        return cofi_ops[i]->run(argc - 1, argv + 1);
    }
    cofi_cli_error("unknown operator \"%s\"", argv[1]);
    print_usage(stderr);
    return COFI_EXIT_USAGE;
}
