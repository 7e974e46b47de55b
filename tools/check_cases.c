/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "check_job.h"
#include "core/config.h"

static bool is_selected(const struct cofi_check_request *r, const char *line)
{
    bool selected = r->n_patterns == 0;
    for (int i = 0; i < r->n_patterns && !selected; i++)
        selected = cofi_cli_matches(r->patterns[i], line);
    return selected;
}

bool cofi_check_selects(const struct cofi_check_request *r, const struct cofi_op_check *check,
                        const struct cofi_check_options *options, int64_t idx, char *line)
{
    check->case_line(options, idx, line, COFI_CHECK_LINE_BYTES - 20);
    cofi_check_append(line, COFI_CHECK_LINE_BYTES, " ranks=%d", options->n_ranks);
    return is_selected(r, line);
}

struct cofi_check_options cofi_check_job_options(const struct cofi_check_request *r, int n_ranks)
{
    return (struct cofi_check_options){n_ranks, r->full, (uint64_t)r->seed, r->cuda};
}

const struct cofi_op_check *cofi_check_of(int i, bool cuda)
{
    const struct cofi_op_check *check = cofi_ops[i]->check;
    return check && (check->has_cuda || !cuda) ? check : NULL;
}

int64_t cofi_check_count(const struct cofi_check_request *r, int n_ranks, bool print)
{
    struct cofi_check_options options = cofi_check_job_options(r, n_ranks);
    int64_t n = 0;
    for (int i = 0; cofi_ops[i]; i++) {
        const struct cofi_op_check *check = cofi_check_of(i, options.cuda);
        for (int64_t c = 0; check && c < check->n_cases(&options); c++) {
            char line[COFI_CHECK_LINE_BYTES];
            if (!cofi_check_selects(r, check, &options, c, line))
                continue;
            n++;
            if (print)
                puts(line);
        }
    }
    return n;
}

void cofi_check_print_again(const struct cofi_check_options *options,
                            const struct cofi_check_request *request, const char *line)
{
    const char *end = strstr(line, " ranks=");
    printf("     again: %scofuse check '%.*s' --ranks %d --engine %s%s --seed %" PRIu64 "%s\n",
           cofi_config_int(COFI_VAR_FORCE_STAGED) ? "COFUSE_FORCE_STAGED=1 " : "",
           (int)(end ? end - line : COFI_CHECK_LINE_BYTES - 1), line, options->n_ranks,
           request->engine == COF_ENGINE_THREAD ? "thread" : request->attach ? "attach" : "shm",
           request->cuda ? " --device cuda" : "", options->seed, options->full ? " --full" : "");
}

