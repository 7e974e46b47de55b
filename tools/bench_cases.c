/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which cases `cofuse bench` runs, and in which ways. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_harness.h"
#include "job.h"

enum { MAX_SETS = 1024, MAX_FILE_BYTES = 1 << 20 };

struct maker {
    const struct cofi_bench_options *options;
    size_t cache_bytes;
    const char *source; /* for messages */
    int line_number;
    struct cofi_bench_list *list;
};

/* Buffer sets to rotate over: more than twice the last level of cache, all ranks together. */
static int count_sets(const struct maker *m, const struct cofi_bench_size *size, bool cold)
{
    size_t n = size->set_bytes ? 2 * m->cache_bytes / size->set_bytes + 2 : 2;
    return !cold ? 1 : n < MAX_SETS ? (int)n : MAX_SETS;
}

static bool is_selected(const struct cofi_bench_options *o, const char *key)
{
    bool selected = o->n_patterns == 0;
    for (int i = 0; i < o->n_patterns && !selected; i++)
        selected = cofi_cli_matches(o->patterns[i], key);
    return selected;
}

static void make_key(const struct cofi_bench_options *o, struct cofi_bench_variant *v)
{
    char threads[24] = "auto";
    if (o->n_threads)
        snprintf(threads, sizeof threads, "%lld", (long long)o->n_threads);
    snprintf(v->key, sizeof v->key, "%s ranks=%d engine=%s threads=%s pin=%s cache=%s staged=%s",
             v->line, v->n_ranks, cofi_bench_engine_name(o), threads, v->unpinned ? "no" : "auto",
             v->cold ? "cold" : "warm", v->staged ? "yes" : "no");
}

static int add_variant(const struct maker *m, const struct cofi_bench_variant *v)
{
    struct cofi_bench_list *list = m->list;
    for (int i = 0; i < list->n; i++)
        if (!strcmp(list->variants[i].key, v->key))
            return COFI_EXIT_OK;
    struct cofi_bench_variant *grown =
        realloc(list->variants, ((size_t)list->n + 1) * sizeof *grown);
    if (!grown) {
        cofi_cli_error("out of memory");
        return COFI_EXIT_RANK;
    }
    list->variants = grown;
    grown[list->n++] = *v;
    return COFI_EXIT_OK;
}

/* Rank counts are innermost, so that one is measured beside the other. One rank moves nothing, so
 * there is no staged form of it. */
static int add_case(const struct maker *m, const struct cofi_op *op, const char *line)
{
    const struct cofi_bench_options *o = m->options;
    for (int way = 0; way < 8 * o->ranks.n; way++) {
        int ways = way / o->ranks.n;
        struct cofi_bench_variant v = {.op = op, .n_ranks = o->ranks.ranks[way % o->ranks.n],
                                       .unpinned = ways & 1, .cold = ways & 2};
        v.staged = (ways & 4) != 0 && v.n_ranks > 1;
        if (!(o->pin >> v.unpinned & 1) || !(o->cache >> v.cold & 1) ||
            !(o->staged >> ((ways & 4) != 0) & 1))
            continue;
        snprintf(v.line, sizeof v.line, "%s", line);
        if (op->bench->size(line, v.n_ranks, &v.size) != COF_OK)
            return cofi_cli_error("%s, line %d: %s", m->source, m->line_number, cof_last_error());
        v.n_sets = count_sets(m, &v.size, v.cold);
        make_key(o, &v);
        int code = is_selected(o, v.key) ? add_variant(m, &v) : COFI_EXIT_OK;
        if (code != COFI_EXIT_OK)
            return code;
    }
    return COFI_EXIT_OK;
}

/* An operator's own cases on the device in hand; NULL: it has none there. */
static const char *shapes_of(const struct cofi_op *op, const struct cofi_bench_options *o)
{
    return !op->bench ? NULL : o->cuda ? op->bench->cuda_shapes : op->bench->shapes;
}

static const struct cofi_op *find_op(const struct cofi_bench_options *o, const char *line)
{
    size_t n = strcspn(line, " ");
    for (int i = 0; cofi_ops[i]; i++)
        if (shapes_of(cofi_ops[i], o) && strlen(cofi_ops[i]->name) == n &&
            !strncmp(cofi_ops[i]->name, line, n))
            return cofi_ops[i];
    return NULL;
}

/* Words by single spaces, comment cut off. Returns the bytes of them all, of which `line` has what
 * there is room for. */
static size_t normalise(const char *begin, size_t n, char line[COFI_BENCH_LINE_BYTES])
{
    size_t n_all = 0;
    bool was_blank = true;
    for (size_t i = 0; i < n && begin[i] != '#'; i++) {
        bool blank = begin[i] == ' ' || begin[i] == '\t' || begin[i] == '\r';
        if (!blank || !was_blank) {
            if (n_all < COFI_BENCH_LINE_BYTES - 1)
                line[n_all] = blank ? ' ' : begin[i];
            n_all++;
        }
        was_blank = blank;
    }
    if (n_all > 0 && was_blank)
        n_all--;
    line[n_all < COFI_BENCH_LINE_BYTES - 1 ? n_all : COFI_BENCH_LINE_BYTES - 1] = 0;
    return n_all;
}

/* Keys stand in tables and in JSON: -1, or the first byte that is no printable ASCII. */
static int odd_byte(const char *line, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (line[i] < ' ' || line[i] > '~')
            return (unsigned char)line[i];
    return -1;
}

/* `only`: the operator whose cases may be there; NULL: any. */
static int add_text(struct maker *m, const struct cofi_op *only, const char *text, size_t bytes)
{
    const char *end = text + bytes;
    m->line_number = 0;
    for (const char *at = text; at < end;) {
        char line[COFI_BENCH_LINE_BYTES];
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        size_t n = (size_t)((newline ? newline : end) - at), n_line = normalise(at, n, line);
        m->line_number++;
        if (n_line > 0) {
            const struct cofi_op *op = find_op(m->options, line);
            if (n_line > sizeof line - 2)
                return cofi_cli_error("%s, line %d: wanted at most %zu bytes", m->source,
                                      m->line_number, sizeof line - 2);
            if (odd_byte(line, n_line) >= 0)
                return cofi_cli_error("%s, line %d: wanted ASCII, found a byte 0x%02x", m->source,
                                      m->line_number, (unsigned)odd_byte(line, n_line));
            if (!op)
                return cofi_cli_error("%s, line %d: \"%.*s\": wanted an operator with a bench%s",
                                      m->source, m->line_number, (int)strcspn(line, " "), line,
                                      m->options->cuda ? " on CUDA devices" : "");
            bool is_tiny = strstr(line, " set=tiny") != NULL;
            int code = only && is_tiny != m->options->tiny ? COFI_EXIT_OK : add_case(m, op, line);
            if (code != COFI_EXIT_OK)
                return code;
        }
        at += n + (newline != NULL);
    }
    return COFI_EXIT_OK;
}

static int add_file(struct maker *m, const char *path)
{
    char *text = malloc(MAX_FILE_BYTES + 1);
    FILE *file = text ? fopen(path, "r") : NULL;
    int code = COFI_EXIT_OK;
    size_t n = file ? fread(text, 1, MAX_FILE_BYTES + 1, file) : 0;
    if (!file || ferror(file))
        code = cofi_cli_error("option --shapes = \"%s\": %s", path, strerror(errno));
    else if (n > MAX_FILE_BYTES)
        code = cofi_cli_error("option --shapes = \"%s\": wanted at most %d bytes", path,
                              MAX_FILE_BYTES);
    else
        code = add_text(m, NULL, text, n);
    if (file)
        fclose(file);
    free(text);
    return code;
}

int cofi_bench_list_make(const struct cofi_bench_options *options, size_t cache_bytes,
                         struct cofi_bench_list *list_out)
{
    struct maker m = {.options = options, .cache_bytes = cache_bytes, .list = list_out};
    *list_out = (struct cofi_bench_list){0};
    if (options->shapes) {
        m.source = options->shapes;
        return add_file(&m, options->shapes);
    }
    int code = COFI_EXIT_OK;
    for (int i = 0; cofi_ops[i] && code == COFI_EXIT_OK; i++) {
        char source[64];
        const char *shapes = shapes_of(cofi_ops[i], options);
        snprintf(source, sizeof source, "bench/shapes/%s%s.txt", cofi_ops[i]->name,
                 options->cuda ? "_cuda" : "");
        m.source = source;
        if (shapes)
            code = add_text(&m, cofi_ops[i], shapes, strlen(shapes));
    }
    return code;
}

int cofi_bench_list_case(const struct cofi_bench_list *list, int first)
{
    int n = 1;
    while (first + n < list->n &&
           !strcmp(list->variants[first].line, list->variants[first + n].line))
        n++;
    return n;
}
