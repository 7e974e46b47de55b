/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli.h"

#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cofuse/version.h"
#include "job.h"

static const char *command_words = "cofuse";

void cofi_cli_begin(const char *command)
{
    command_words = command;
    optind = 0;
    opterr = 0;
}

const char *cofi_cli_command(void)
{
    return command_words;
}

int cofi_cli_error(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char text[1024];
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* one call, so that the lines of several ranks stay whole */
    fprintf(stderr, "%s: %s\n", command_words, text);
    return COFI_EXIT_USAGE;
}

/* Whether the word is the long option of this value, which may be shortened. */
static bool is_option(const char *word, const struct option *longs, int value)
{
    size_t n = strcspn(word, "=");
    for (const struct option *o = longs; o->name; o++)
        if (o->val == value && n > 2 && !strncmp(word, "--", 2) &&
            !strncmp(word + 2, o->name, n - 2))
            return true;
    return false;
}

int cofi_cli_next(int argc, char **argv, const char *shorts, const struct option *longs)
{
    char colon_shorts[64];
    /* '+': parsing ends at the first word that is no option; ':': a missing value returns ':' */
    bool stop_early = shorts[0] == '+';
    snprintf(colon_shorts, sizeof colon_shorts, "%s:%s", stop_early ? "+" : "",
             shorts + stop_early);
    int c = getopt_long(argc, argv, colon_shorts, longs, NULL);
    if (c != ':' && c != '?')
        return c;
    /* After a long option, getopt has just passed it; within a word of letters it still may be. */
    const char *word = argv[optind - 1];
    bool is_long = optopt == 0 || is_option(word, longs, optopt);
    char letter[3] = {'-', (char)optopt, '\0'};
    if (c == ':')
        cofi_cli_error("option %s: a value is missing", is_long ? word : letter);
    else if (is_long && optopt)
        cofi_cli_error("option %.*s takes no value", (int)strcspn(word, "="), word);
    else
        cofi_cli_error("unknown option %s", is_long ? word : letter);
    return '?';
}

/* "option --x = "text": wanted ..." */
static bool bad_value(const char *option, const char *text, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static bool bad_value(const char *option, const char *text, const char *format, ...)
{
    char wanted[256];
    va_list args;
    va_start(args, format);
    vsnprintf(wanted, sizeof wanted, format, args);
    va_end(args);
    cofi_cli_error("%s%s = \"%s\": wanted %s", option[0] == '-' ? "option " : "", option, text,
                   wanted);
    return false;
}

bool cofi_cli_int(const char *option, const char *text, int64_t min, int64_t max, int64_t *out)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || value < min || value > max)
        return bad_value(option, text, "an integer from %lld to %lld", (long long)min,
                         (long long)max);
    *out = value;
    return true;
}

bool cofi_cli_double(const char *option, const char *text, double min, double max, double *out)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value) || value < min || value > max)
        return bad_value(option, text, "a number from %g to %g", min, max);
    *out = value;
    return true;
}

bool cofi_cli_seconds(const char *option, const char *text, double *out)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= 0 && value <= 1e9))
        return bad_value(option, text, "seconds, 0 to 1e9");
    *out = value;
    return true;
}

int cofi_cli_place(const char *choices, const char *text)
{
    size_t length = strlen(text);
    int idx = 0;
    for (const char *at = choices; at; idx++) {
        size_t n = strcspn(at, "|");
        if (n == length && !strncmp(at, text, n))
            return idx;
        at = at[n] ? at + n + 1 : NULL;
    }
    return -1;
}

bool cofi_cli_choice(const char *option, const char *text, const char *choices, int *idx_out)
{
    int idx = cofi_cli_place(choices, text);
    if (idx < 0)
        return bad_value(option, text, "one of %s", choices);
    *idx_out = idx;
    return true;
}

bool cofi_cli_same_file(const char *a, const char *b)
{
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

bool cofi_cli_ranks(const char *option, const char *text, struct cofi_rank_counts *out)
{
    struct cofi_rank_counts counts = {0};
    for (const char *at = text;;) {
        char *end;
        errno = 0;
        long value = strtol(at, &end, 10);
        if (end == at || errno != 0 || value < 1 || value > COFI_MAX_RANKS ||
            (*end != '\0' && *end != ',') || counts.n == COFI_MAX_RANK_COUNTS)
            return bad_value(option, text, "rank counts from 1 to %d, by commas, at most %d",
                             COFI_MAX_RANKS, COFI_MAX_RANK_COUNTS);
        counts.ranks[counts.n++] = (int)value;
        if (*end == '\0')
            break;
        at = end + 1;
    }
    *out = counts;
    return true;
}

bool cofi_cli_matches(const char *pattern, const char *line)
{
    char wide[1024];
    if (strstr(line, pattern))
        return true;
    snprintf(wide, sizeof wide, "*%s*", pattern);
    return strpbrk(pattern, "*?") && fnmatch(wide, line, 0) == 0;
}

void cofi_cli_run_read(int argc, char **argv, struct cofi_cli_run *run)
{
    time_t now = time(NULL);
    strftime(run->date, sizeof run->date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    snprintf(run->version, sizeof run->version, "%s", cof_version());
    size_t at = (size_t)snprintf(run->command, sizeof run->command, "%s", command_words);
    for (int i = 1; i < argc && at < sizeof run->command; i++)
        at += (size_t)snprintf(run->command + at, sizeof run->command - at, " %s", argv[i]);
}

static char busy_text[128];
static volatile sig_atomic_t busy_seconds, busy_shown;

/* Only poll() and write(): runs as a signal handler. */
static void show_busy(int signal_number)
{
    (void)signal_number;
    int saved_errno = errno;
    char line[192] = "\r", digits[12];
    size_t n = 1, n_digits = 0, length = strlen(busy_text);
    memcpy(line + n, busy_text, length);
    n += length;
    line[n++] = ' ';
    unsigned seconds = (unsigned)++busy_seconds;
    do
        digits[n_digits++] = (char)('0' + seconds % 10);
    while (seconds /= 10);
    while (n_digits)
        line[n++] = digits[--n_digits];
    memcpy(line + n, " s\033[K", 5);
    n += 5;
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT}; /* a terminal may be stopped */
    busy_shown = poll(&ready, 1, 0) > 0 && write(STDERR_FILENO, line, n) > 0;
    errno = saved_errno;
}

void cofi_cli_busy(const char *text)
{
    cofi_cli_idle();
    if (!isatty(STDERR_FILENO))
        return;
    snprintf(busy_text, sizeof busy_text, "%s: %s", command_words, text);
    busy_seconds = 0;
    struct sigaction action = {.sa_handler = show_busy, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval every_second = {{1, 0}, {1, 0}};
    setitimer(ITIMER_REAL, &every_second, NULL);
}

void cofi_cli_idle(void)
{
    struct itimerval off = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &off, NULL);
    if (busy_shown && write(STDERR_FILENO, "\r\033[K", 4) > 0)
        busy_shown = 0;
}
