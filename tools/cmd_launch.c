/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse launch -n 4 [--] program args`: starts the ranks of a program on this host. */
#include <stdio.h>

#include "cli.h"
#include "commands.h"
#include "job.h"

static const char usage[] =
    "usage: cofuse launch -n RANKS [--] program [arguments]\n"
    "\n"
    "Starts RANKS processes of the program on this host, each with COFUSE_RANK, COFUSE_SIZE,\n"
    "COFUSE_JOB and COFUSE_FDS in its environment, from which cof_world_create(NULL, ...) joins.\n"
    "Lines of output are headed by the rank. When a rank fails, the others get 2 seconds to end\n"
    "and are then killed. Rank 0 reads standard input unless that is a terminal.\n"
    "\n"
    "  -n, --ranks N    number of ranks, 1 to 256\n"
    "      --no-label   leave the output as it is\n";

int cofi_cmd_launch(int argc, char **argv)
{
    static const struct option options[] = {
        {"ranks", required_argument, NULL, 'n'},
        {"no-label", no_argument, NULL, 'l'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int64_t n_ranks = 0;
    bool label = true;
    for (int c; (c = cofi_cli_next(argc, argv, "+n:h", options)) != -1;) {
        switch (c) {
        case 'n':
            if (!cofi_cli_int("-n", optarg, 1, COFI_MAX_RANKS, &n_ranks))
                return COFI_EXIT_USAGE;
            break;
        case 'l': label = false; break;
        case 'h': fputs(usage, stdout); return COFI_EXIT_OK;
        default: return COFI_EXIT_USAGE;
        }
    }
    if (n_ranks == 0)
        return cofi_cli_error("option -n is missing (the number of ranks)");
    if (optind == argc)
        return cofi_cli_error("no program given");
    struct cofi_job_spec spec = {
        .n_ranks = (int)n_ranks,
        .argv = argv + optind,
        .shared_fd = -1,
        .label_output = label,
        .name = cofi_cli_command(),
    };
    return cofi_job_run(&spec);
}
