/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One table of what an operator can be told, for all who tell it: the options of a command
 * (--save-ab 1), the words of a case's line (save_ab=1) and the lines of a help text. A command
 * and a line may have a table of their own for the same struct. */
#ifndef COFI_OPTION_TABLE_H
#define COFI_OPTION_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cofuse/status.h"

enum cofi_option_kind {
    COFI_OPTION_INT,    /* int64_t */
    COFI_OPTION_NUMBER, /* double */
    COFI_OPTION_CHOICE, /* int: the place in `allowed` */
    COFI_OPTION_INTS,   /* struct cofi_ints */
    COFI_OPTION_FLAG,   /* bool: set by an option without a value; in a line 0 or 1 */
    COFI_OPTION_DTYPE,  /* cof_dtype: of bf16, f16, f32 those allowed; "dtype": the zero type */
    COFI_OPTION_LEFT,   /* left out, of a line only: any value, or the one that is allowed */
    COFI_OPTION_TEXT,   /* const char *: of a command only */
    COFI_OPTION_CALL    /* handed to the caller: of a command only */
};

enum { COFI_INTS_MAX = 32 };

struct cofi_ints {
    int n;
    int64_t at[COFI_INTS_MAX];
};

struct cofi_option {
    const char *name; /* of letters, digits and '_', which is '-' in an option; NULL: the end */
    enum cofi_option_kind kind;
    size_t place;        /* offsetof the target */
    const char *allowed; /* CHOICE: "a|b|c"; INTS: the sign between two, "x2" where there are 2 */
    double min, max;     /* INT, NUMBER, each of INTS */
    char letter;         /* of a short option too; 0: none */
    const char *value;   /* how the help calls it: "FILE"; NULL: a flag */
    const char *help;    /* lines with \n between; NULL: not in the help */
};

/* Words of lines; enums are ints. */
#define COFI_WORD_INT(name, place, min, max)                                                       \
    {name, COFI_OPTION_INT, place, NULL, min, max, 0, NULL, NULL}
#define COFI_WORD_NUMBER(name, place, min, max)                                                    \
    {name, COFI_OPTION_NUMBER, place, NULL, min, max, 0, NULL, NULL}
#define COFI_WORD_CHOICE(name, place, words)                                                       \
    {name, COFI_OPTION_CHOICE, place, words, 0, 0, 0, NULL, NULL}
#define COFI_WORD_INTS(name, place, sign, min, max)                                                \
    {name, COFI_OPTION_INTS, place, sign, min, max, 0, NULL, NULL}
#define COFI_WORD_DTYPE(name, place)                                                               \
    {name, COFI_OPTION_DTYPE, place, "bf16|f16|f32", 0, 0, 0, NULL, NULL}
#define COFI_WORD_DTYPE_OR(name, place) /* "dtype": what another word says */                      \
    {name, COFI_OPTION_DTYPE, place, "dtype|bf16|f16|f32", 0, 0, 0, NULL, NULL}
#define COFI_WORD_LEFT(name, value) {name, COFI_OPTION_LEFT, 0, value, 0, 0, 0, NULL, NULL}

/* Sets what `option` points to from `text`. false: `wanted` tells the rule that it breaks. */
enum { COFI_OPTION_WANTED_BYTES = 256 };
bool cofi_option_set(const struct cofi_option *option, const char *text, void *target,
                     char *wanted);

/* The words of a case's line, those of the harness left out (ops/bench.h). COF_ERR_INVALID too for
 * a word that the table does not have, naming those it has. */
cof_status cofi_option_read_line(const char *line, const struct cofi_option *options, void *target);

/* Appends the word of each option as read_line takes it. Of INT, NUMBER, CHOICE and INTS. */
void cofi_option_write_line(const struct cofi_option *options, const void *target, char *line,
                            size_t bytes);

/* The place'th word of "a|b|c". */
const char *cofi_option_word(const char *choices, int place, char word[32]);

/* All words of a command line. `call` gets those of kind CALL and returns false after a message.
 * -h and --help print `usage` and the table. Returns false when the command is to end now, with
 * its exit code. */
typedef bool (*cofi_option_fn)(void *target, const struct cofi_option *option, const char *text);
bool cofi_option_read_command(int argc, char **argv, const char *usage,
                              const struct cofi_option *options, cofi_option_fn call, void *target,
                              int *code_out);

/* The lines of a help text. */
void cofi_option_print_help(const struct cofi_option *options);

#endif
