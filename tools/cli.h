/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Options and messages of the program. Every bad value gives one line on stderr that names the
 * option, the value and the rule; the caller then returns COFI_EXIT_USAGE. */
#ifndef COFI_CLI_H
#define COFI_CLI_H

#include <getopt.h>
#include <stdbool.h>
#include <stdint.h>

#define COFI_MAX_RANKS 256
#define COFI_MAX_RANK_COUNTS 16

/* Sets the words that head every message ("cofuse run attention") and starts getopt afresh. */
void cofi_cli_begin(const char *command);
const char *cofi_cli_command(void);

/* "cofuse run attention: text\n" on stderr. Returns COFI_EXIT_USAGE. */
int cofi_cli_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* getopt_long with our messages: '?' after an unknown option or a missing or surplus value. The
 * options' letters come from the table's `val`; `shorts` is as for getopt, without ':' in front. */
int cofi_cli_next(int argc, char **argv, const char *shorts, const struct option *longs);

/* Each parses `text` given for `option` ("--repeat", or what else the message names); false after a
 * message. */
bool cofi_cli_int(const char *option, const char *text, int64_t min, int64_t max, int64_t *out);
bool cofi_cli_double(const char *option, const char *text, double min, double max, double *out);
bool cofi_cli_seconds(const char *option, const char *text, double *out); /* 0 .. 1e9 */

/* One of "a|b|c": its place from 0, without a message -1 for none. */
int cofi_cli_place(const char *choices, const char *text);
bool cofi_cli_choice(const char *option, const char *text, const char *choices, int *idx_out);

/* Whether both exist and are one file, whatever their names. */
bool cofi_cli_same_file(const char *a, const char *b);

/* "1,2,4": rank counts of 1 .. COFI_MAX_RANKS, at most COFI_MAX_RANK_COUNTS of them. */
struct cofi_rank_counts {
    int n;
    int ranks[COFI_MAX_RANK_COUNTS];
};
bool cofi_cli_ranks(const char *option, const char *text, struct cofi_rank_counts *out);

/* Whether PATTERN selects a case's line: it is part of it, or matches a part with * and ?. */
bool cofi_cli_matches(const char *pattern, const char *line);

/* What documents tell of the run that made them: when it began, UTC; of Cofuse; the words. */
struct cofi_cli_run {
    char date[32], version[32], command[1024];
};
void cofi_cli_run_read(int argc, char **argv, struct cofi_cli_run *run_out);

/* When stderr is a terminal: shows `text` and the seconds passed once it has taken more than a
 * second, until cofi_cli_idle. By SIGALRM, so it works while the caller is blocked. */
void cofi_cli_busy(const char *text);
void cofi_cli_idle(void);

#endif
