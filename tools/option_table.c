/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "option_table.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/error.h"
#include "job.h"
#include "ops/bench.h"

enum { MAX_OPTIONS = 48, HELP_COLUMN = 25 };

/* ---- values --------------------------------------------------------------------------------- */

static bool read_int(const char **at, const struct cofi_option *o, int64_t *out)
{
    char *end;
    errno = 0;
    long long x = strtoll(*at, &end, 10);
    bool ok = end != *at && !errno && (double)x >= o->min && (double)x <= o->max;
    *at = end;
    *out = x;
    return ok;
}

static bool set_int(const struct cofi_option *o, const char *text, int64_t *out)
{
    const char *at = text;
    int64_t x;
    bool ok = read_int(&at, o, &x) && !*at;
    *out = ok ? x : *out;
    return ok;
}

static bool set_number(const struct cofi_option *o, const char *text, double *out)
{
    char *end;
    double x = strtod(text, &end);
    bool ok = end != text && !*end && x >= o->min && x <= o->max;
    *out = ok ? x : *out;
    return ok;
}

static bool set_choice(const char *choices, const char *text, int *out)
{
    int idx = cofi_cli_place(choices, text);
    *out = idx >= 0 ? idx : *out;
    return idx >= 0;
}

static bool set_ints(const struct cofi_option *o, const char *text, struct cofi_ints *out)
{
    const int wanted = atoi(o->allowed + 1);
    struct cofi_ints ints = {0};
    for (const char *at = text;; at++) {
        if (ints.n == COFI_INTS_MAX || !read_int(&at, o, &ints.at[ints.n++]))
            return false;
        if (*at != o->allowed[0]) {
            bool ok = !*at && (!wanted || ints.n == wanted);
            *out = ok ? ints : *out;
            return ok;
        }
    }
}

static bool set_dtype(const char *choices, const char *text, cof_dtype *out)
{
    int unused;
    if (!set_choice(choices, text, &unused))
        return false;
    *out = !strcmp(text, "bf16")  ? COF_BF16
           : !strcmp(text, "f16") ? COF_F16
           : !strcmp(text, "f32") ? COF_F32
                                  : (cof_dtype){0};
    return true;
}

bool cofi_option_set(const struct cofi_option *o, const char *text, void *target, char *wanted)
{
    void *place = (char *)target + o->place;
    const size_t bytes = COFI_OPTION_WANTED_BYTES;
    char count[16];
    int choice = 0;
    switch (o->kind) {
    case COFI_OPTION_INT:
        snprintf(wanted, bytes, "an integer from %.0f to %.0f", o->min, o->max);
        return set_int(o, text, place);
    case COFI_OPTION_NUMBER:
        snprintf(wanted, bytes, "a number from %g to %g", o->min, o->max);
        return set_number(o, text, place);
    case COFI_OPTION_INTS:
        if (o->allowed[1])
            snprintf(count, sizeof count, "%s", o->allowed + 1);
        else
            snprintf(count, sizeof count, "1 to %d", COFI_INTS_MAX);
        snprintf(wanted, bytes, "%s integers from %.0f to %.0f with '%.1s' between them", count,
                 o->min, o->max, o->allowed);
        return set_ints(o, text, place);
    case COFI_OPTION_CHOICE:
        snprintf(wanted, bytes, "one of %s", o->allowed);
        return set_choice(o->allowed, text, place);
    case COFI_OPTION_DTYPE:
        snprintf(wanted, bytes, "one of %s", o->allowed);
        return set_dtype(o->allowed, text, place);
    case COFI_OPTION_LEFT: return true;
    case COFI_OPTION_FLAG:
        snprintf(wanted, bytes, "0 or 1");
        if (!set_choice("0|1", text, &choice))
            return false;
        *(bool *)place = choice;
        return true;
    case COFI_OPTION_TEXT: *(const char **)place = text; return true;
    case COFI_OPTION_CALL: break;
    }
    snprintf(wanted, bytes, "no value here");
    return false;
}

const char *cofi_option_word(const char *choices, int place, char word[32])
{
    for (; place > 0; place--)
        choices += strcspn(choices, "|") + 1;
    snprintf(word, 32, "%.*s", (int)strcspn(choices, "|"), choices);
    return word;
}

/* ---- a line --------------------------------------------------------------------------------- */

struct reading {
    const struct cofi_option *options;
    void *target;
};

static cof_status unknown_word(const struct reading *r, const char *key, const char *value)
{
    char names[400] = "";
    for (const struct cofi_option *o = r->options; o->name; o++) {
        size_t used = strlen(names);
        if (o->kind == COFI_OPTION_LEFT)
            continue;
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", o->name);
    }
    return COF_FAIL(COF_ERR_INVALID, "word \"%s=%s\": wanted one of %s", key, value, names);
}

static cof_status read_word(void *arg, const char *key, const char *value)
{
    struct reading *r = arg;
    const struct cofi_option *o = r->options;
    while (o->name && (strcmp(o->name, key) || (o->kind == COFI_OPTION_LEFT && o->allowed &&
                                                strcmp(o->allowed, value))))
        o++;
    if (!o->name)
        return unknown_word(r, key, value);
    char wanted[COFI_OPTION_WANTED_BYTES];
    COF_FAIL_IF(!cofi_option_set(o, value, r->target, wanted), COF_ERR_INVALID,
                "%s = \"%s\": wanted %s", key, value, wanted);
    return COF_OK;
}

cof_status cofi_option_read_line(const char *line, const struct cofi_option *options, void *target)
{
    struct reading r = {options, target};
    return cofi_bench_words(line, read_word, &r);
}

static void append(char *line, size_t bytes, const char *text)
{
    size_t used = strlen(line);
    snprintf(line + used, bytes - used, "%s", text);
}

static void write_ints(const struct cofi_option *o, const struct cofi_ints *ints, char *line,
                       size_t bytes)
{
    for (int i = 0; i < ints->n; i++) {
        char number[32];
        snprintf(number, sizeof number, "%.*s%lld", i > 0, o->allowed, (long long)ints->at[i]);
        append(line, bytes, number);
    }
}

void cofi_option_write_line(const struct cofi_option *options, const void *target, char *line,
                            size_t bytes)
{
    for (const struct cofi_option *o = options; o->name; o++) {
        const void *place = (const char *)target + o->place;
        char word[32] = "";
        append(line, bytes, " ");
        append(line, bytes, o->name);
        append(line, bytes, "=");
        if (o->kind == COFI_OPTION_INT)
            snprintf(word, sizeof word, "%lld", (long long)*(const int64_t *)place);
        else if (o->kind == COFI_OPTION_NUMBER)
            snprintf(word, sizeof word, "%.9g", *(const double *)place);
        else if (o->kind == COFI_OPTION_CHOICE)
            cofi_option_word(o->allowed, *(const int *)place, word);
        else if (o->kind == COFI_OPTION_INTS)
            write_ints(o, place, line, bytes);
        append(line, bytes, word);
    }
}

/* ---- a command ------------------------------------------------------------------------------ */

/* "--save-ab" of save_ab */
static const char *dashed(const struct cofi_option *o, char name[64])
{
    snprintf(name, 64, "--%s", o->name);
    for (char *at = name; *at; at++)
        *at = *at == '_' ? '-' : *at;
    return name;
}

void cofi_option_print_help(const struct cofi_option *options)
{
    for (const struct cofi_option *o = options; o->name; o++) {
        char name[64], head[160], letter[8] = "    ";
        if (!o->help)
            continue;
        if (o->letter)
            snprintf(letter, sizeof letter, "-%c, ", o->letter);
        snprintf(head, sizeof head, "  %s%s%s%s", letter, dashed(o, name), o->value ? " " : "",
                 o->value ? o->value : "");
        int column = HELP_COLUMN;
        printf("%-*s", column, head);
        if (strlen(head) + 1 > HELP_COLUMN) /* text on a line of its own */
            printf("\n%*s", column, "");
        for (const char *at = o->help;; printf("\n%*s", column, "")) {
            size_t n = strcspn(at, "\n");
            printf("%.*s", (int)n, at);
            if (!at[n])
                break;
            at += n + 1;
        }
        printf("\n");
    }
}

struct getopt_table {
    struct option longs[MAX_OPTIONS + 2];
    char names[MAX_OPTIONS][64], shorts[2 * MAX_OPTIONS + 2];
};

/* An option's number is 256 and its place, a letter's is the letter. */
static void make_table(const struct cofi_option *options, struct getopt_table *t)
{
    int n = 0;
    char *at = t->shorts;
    for (const struct cofi_option *o = options; o->name; o++, n++) {
        t->longs[n] = (struct option){dashed(o, t->names[n]) + 2,
                                      o->value ? required_argument : no_argument, NULL, 256 + n};
        if (o->letter) {
            *at++ = o->letter;
            if (o->value)
                *at++ = ':';
        }
    }
    t->longs[n] = (struct option){"help", no_argument, NULL, 'h'};
    *at++ = 'h';
    *at = 0;
}

static bool take(const struct cofi_option *o, cofi_option_fn call, void *target)
{
    char name[64], wanted[COFI_OPTION_WANTED_BYTES];
    if (o->kind == COFI_OPTION_CALL)
        return call(target, o, optarg);
    const char *text = o->kind == COFI_OPTION_FLAG ? "1" : optarg;
    bool ok = cofi_option_set(o, text, target, wanted);
    if (!ok)
        cofi_cli_error("option %s = \"%s\": wanted %s", dashed(o, name), text, wanted);
    return ok;
}

bool cofi_option_read_command(int argc, char **argv, const char *usage,
                              const struct cofi_option *options, cofi_option_fn call, void *target,
                              int *code_out)
{
    struct getopt_table table = {0};
    make_table(options, &table);
    *code_out = COFI_EXIT_USAGE;
    for (int c; (c = cofi_cli_next(argc, argv, table.shorts, table.longs)) != -1;) {
        if (c == 'h') {
            fputs(usage, stdout);
            cofi_option_print_help(options);
            *code_out = COFI_EXIT_OK;
            return false;
        }
        const struct cofi_option *o = options;
        if (c >= 256)
            o += c - 256;
        else
            while (o->name && o->letter != c)
                o++;
        if (c == '?' || !take(o, call, target))
            return false;
    }
    *code_out = COFI_EXIT_OK;
    if (optind < argc)
        *code_out = cofi_cli_error("surplus word \"%s\"", argv[optind]);
    return optind == argc;
}
