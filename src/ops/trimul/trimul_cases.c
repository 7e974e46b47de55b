/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/trimul/trimul_cases.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/check.h"
#include "ops/check_cover.h"

/* ---- words ---------------------------------------------------------------------------------- */

#define AT(member) offsetof(struct cofi_tm_case, member)
#define INT(name, member, min, max)                                                                \
    {name, COFI_OPTION_INT, AT(member), NULL, min, max, 0, NULL, NULL}
#define CHOICE(name, member, words)                                                                \
    {name, COFI_OPTION_CHOICE, AT(member), words, 0, 0, 0, NULL, NULL}
#define INTS(name, member, sign, min, max)                                                         \
    {name, COFI_OPTION_INTS, AT(member), sign, min, max, 0, NULL, NULL}
#define NUMBER(name, member, min, max)                                                             \
    {name, COFI_OPTION_NUMBER, AT(member), NULL, min, max, 0, NULL, NULL}

#define PLAN_WORDS                                                                                 \
    CHOICE("dtype", dtype, "bf16|f16|f32"), CHOICE("norm", norm, "dtype|f32|bf16|f16"),            \
        CHOICE("mask", mask_dtype, "dtype|f32|bf16|f16"),                                          \
        CHOICE("direction", direction, "outgoing|incoming"), INTS("N", n, ":", 1, 1e9),            \
        INT("B", b, 0, 1e6), INT("D", d, 1, 8192), INT("H", h, 0, 8192),                           \
        INTS("grid", grid, "x", 0, 1e6), CHOICE("shard", shard, "balanced|chunk|explicit"),        \
        INTS("rows", rows, ":", 0, 1e9), INTS("cols", cols, ":", 0, 1e9),                          \
        CHOICE("save", save, "none|ab"), CHOICE("reduce", reduce, "0|1"),                          \
        INT("chunk", chunk, 0, 8192), NUMBER("eps_in", eps_in, 0, 1e38),                           \
        NUMBER("eps_out", eps_out, 0, 1e38)

const struct cofi_option cofi_tm_bench_words[] = {
    PLAN_WORDS,
    CHOICE("forward_only", forward_only, "0|1"),
    CHOICE("mask_data", mask, "none|binary|real|zero"),
    INT("chunks", told, 0, 1e9),
    INT("slices", told, 0, 1e9),
    {0}};

const struct cofi_option cofi_tm_check_words[] = {
    PLAN_WORDS,
    CHOICE("bias", bias, "none|out|all"),
    CHOICE("mask_data", mask, "none|binary|real|zero"),
    CHOICE("residual", residual, "none|own|x|out|in_place"),
    CHOICE("calls", calls, "forward|backward|flight"),
    CHOICE("grads", grads, "all|none|some"),
    CHOICE("plans", two_plans, "one|two"),
    CHOICE("data", data, "normal|integer|cauchy|large|nan|inf"),
    CHOICE("layout", layout, "compact|pitched|transposed"),
    CHOICE("delay", delays, "none|random"),
    CHOICE("epoch", epoch, "first|before_quarter|before_turn"),
    INT("mean", mean, 0, 1000),
    {0}};

/* ---- factors -------------------------------------------------------------------------------- */

enum {
    DTYPE, NORM, MASK_DTYPE, DIRECTION, ROWS, BATCH, DIM, HIDDEN, GRID, SHARD, OFFSETS, SAVE,
    REDUCE, CHUNK, BIAS, MASK, RESIDUAL, CALLS, GRADS, PLANS, DATA, LAYOUT, DELAY, EPOCH, MEAN,
    N_FACTORS
};

/* GRID is filled in for the rank count. OFFSETS of EXPLICIT: parts that grow by squares, and all in
 * the last part. */
static const struct cofi_cover_factor all_factors[N_FACTORS] = {
    [DTYPE] = {"dtype", 3, 3, {"bf16", "f32", "f16"}},
    [NORM] = {"norm", 2, 2, {"dtype", "f32"}},
    [MASK_DTYPE] = {"mask", 2, 2, {"dtype", "f32"}},
    [DIRECTION] = {"direction", 2, 2, {"outgoing", "incoming"}},
    [ROWS] = {"N", 19, 8, {"17", "7", "1", "2", "8", "33:5", "17:64:7:17", "64", "100", "127",
                           "128", "129", "255", "256", "257", "1000", "1001", "1024", "1:2:1"}},
    [BATCH] = {"B", 3, 3, {"1", "2", "3"}},
    [DIM] = {"D", 13, 6, {"32", "8", "16", "5", "64", "12", "96", "128", "192", "256", "384", "512",
                          "1"}},
    [HIDDEN] = {"H", 14, 7, {"32", "8", "24", "64", "16", "20", "96", "128", "192", "256", "384",
                             "512", "1", "3"}},
    [GRID] = {"grid", 0, 0, {NULL}},
    [SHARD] = {"shard", 3, 3, {"balanced", "chunk", "explicit"}},
    [OFFSETS] = {"offsets", 2, 2, {"squares", "last"}},
    [SAVE] = {"save", 2, 2, {"none", "ab"}},
    [REDUCE] = {"reduce", 2, 2, {"0", "1"}},
    [CHUNK] = {"chunk", 3, 3, {"0", "8", "16"}},
    [BIAS] = {"bias", 3, 3, {"all", "none", "out"}},
    [MASK] = {"mask_data", 4, 4, {"none", "binary", "real", "zero"}},
    [RESIDUAL] = {"residual", 5, 5, {"none", "own", "x", "out", "in_place"}},
    [CALLS] = {"calls", 3, 3, {"forward", "backward", "flight"}},
    [GRADS] = {"grads", 3, 3, {"all", "none", "some"}},
    [PLANS] = {"plans", 2, 2, {"one", "two"}},
    [DATA] = {"data", 6, 3, {"normal", "integer", "cauchy", "large", "nan", "inf"}},
    [LAYOUT] = {"layout", 3, 3, {"compact", "pitched", "transposed"}},
    [DELAY] = {"delay", 2, 2, {"none", "random"}},
    [EPOCH] = {"epoch", 3, 1, {"first", "before_quarter", "before_turn"}},
    [MEAN] = {"mean", 3, 3, {"0", "10", "100"}},
};

/* The explicit list; what is not named has its first value. The grids of a rank count go round. */
static const struct {
    bool full; /* with --full only */
    const char *text;
} listed[] = {
    /* every N, forward on every grid in turn, and backward */
    {false, "N=1 calls=backward"},
    {false, "N=2 D=16 calls=backward direction=incoming"},
    {false, "N=7 calls=backward dtype=f32"},
    {false, "N=8 calls=backward dtype=f16 direction=incoming"},
    {false, "N=17 calls=flight save=ab"},
    {false, "N=64 D=64 H=64 calls=backward mask_data=binary"},
    {false, "N=64 D=64 H=64 calls=backward mask_data=real direction=incoming dtype=f32"},
    {false, "N=100 D=16 H=24 calls=backward save=ab"},
    {false, "N=127 D=8 H=16 direction=incoming mask_data=binary"},
    {false, "N=128 D=16 H=8 dtype=f16"},
    {false, "N=129 D=8 H=16 dtype=f32"},
    {false, "N=129 D=8 H=8 calls=backward direction=incoming"},
    {false, "N=255 D=8 H=8 mask_data=binary"},
    {false, "N=256 D=8 H=8 direction=incoming"},
    {false, "N=257 D=8 H=8 dtype=f16 mask_data=real"},
    {false, "N=257 D=8 H=8 dtype=f32 direction=incoming"},
    /* every D and H */
    {false, "N=17 D=8 H=96 calls=backward"},
    {false, "N=17 D=96 H=8 calls=backward direction=incoming"},
    {false, "N=17 D=128 H=128 calls=backward save=ab mask_data=binary"},
    {false, "N=17 D=128 H=192 direction=incoming dtype=f32"},
    {false, "N=17 D=192 H=256 mask_data=real"},
    {false, "N=7 D=256 H=384 calls=backward dtype=f16"},
    {false, "N=7 D=384 H=512 direction=incoming"},
    {false, "N=8 D=512 H=128 calls=backward dtype=f32"},
    {false, "N=17 D=1 H=3"},
    {false, "N=17 D=5 H=1 direction=incoming"},
    {false, "N=17 D=12 H=20 calls=backward dtype=f32"},
    /* einsum exact */
    {false, "N=64 D=8 H=16 data=integer"},
    {false, "N=64 D=8 H=16 data=integer direction=incoming dtype=f16 mask_data=binary"},
    {false, "N=129 D=8 H=8 data=integer dtype=f32"},
    {false, "N=100 D=12 H=20 data=integer direction=incoming dtype=f32 mask_data=binary"},
    {false, "N=257 D=8 H=8 data=integer mask_data=binary norm=f32"},
    /* what does not overflow, what is not a number, what is far off */
    {false, "N=257 D=8 H=8 data=large dtype=f16"},
    {false, "N=257 D=8 H=8 data=large dtype=f16 direction=incoming"},
    {false, "N=64 D=16 H=16 data=large dtype=f16 norm=f32"},
    {false, "N=33:5 data=nan"},
    {false, "N=33:5 data=nan direction=incoming mask_data=binary dtype=f32 B=2"},
    {false, "N=33:5 data=inf dtype=f16 B=2"},
    {false, "N=33:5 data=inf direction=incoming mask_data=zero"},
    {false, "N=64 data=cauchy calls=backward mean=100 dtype=f32"},
    {false, "N=64 data=cauchy dtype=f16"},
    {false, "N=64 mean=100 calls=backward"},
    {false, "N=64 mean=10 calls=backward dtype=f32"},
    {false, "N=17 mask_data=zero calls=backward save=ab"},
    {false, "N=17 mask_data=zero calls=backward dtype=f16 bias=none"},
    /* call after call */
    {false, "N=17:64:7:17 calls=flight plans=two delay=random"},
    {false, "N=17:64:7:17 calls=flight plans=two delay=random save=ab dtype=f32 H=64"},
    {false, "N=17:64:7:17 calls=flight delay=random chunk=8 H=64 direction=incoming"},
    {false, "N=17:64:7:17 delay=random chunk=16 H=64 B=2 layout=pitched mask_data=real"},
    {false, "N=1:2:1 calls=flight delay=random plans=two"},
    {false, "N=17:64:7:17 calls=flight delay=random epoch=before_turn"},
    {false, "N=17:64:7:17 calls=flight delay=random epoch=before_quarter plans=two chunk=8"},
    /* who has rows */
    {false, "N=17 shard=explicit offsets=last calls=backward"},
    {false, "N=17 shard=explicit offsets=squares calls=flight direction=incoming B=2"},
    {false, "N=2 shard=chunk calls=backward B=3"},
    {false, "N=17 shard=chunk calls=backward reduce=1 layout=transposed mask_data=real B=2"},
    {true, "N=1000 D=8 H=8"},
    {true, "N=1001 D=8 H=8 direction=incoming calls=backward"},
    {true, "N=1024 D=8 H=8 data=large dtype=f16"},
    {true, "N=257 D=64 H=64 calls=backward"},
    {true, "N=128 D=128 H=128 calls=backward dtype=f32 direction=incoming"},
    {true, "N=256 D=32 H=32 calls=flight save=ab dtype=f16"},
};

enum { N_LISTED = sizeof listed / sizeof listed[0], N_FULL = 1200, MAX_CASES = N_FULL + 100 };
#define MAX_WORK 1.2e8 /* of the reference in a mixed case: about 0.1 s on one core */

/* ---- a rank count's list -------------------------------------------------------------------- */

/* What a word sets: the bytes of its option's target. */
struct setting {
    unsigned char bytes[sizeof(struct cofi_ints)];
};

struct case_list {
    int n_ranks;
    bool full;
    const struct cofi_option *option[N_FACTORS];
    /* Read once: the search for pairs looks at ten thousands of tuples. */
    struct setting setting[N_FACTORS][COFI_COVER_VALUES];
    char grid[COFI_COVER_VALUES][24];
    struct cofi_cover_factor factors[N_FACTORS];
    struct cofi_cover cover;
    struct cofi_cover_tuple tuples[MAX_CASES];
    struct case_list *next;
};

static const char *word(const struct case_list *list, const struct cofi_cover_tuple *t, int factor)
{
    return list->factors[factor].value[t->value[factor]];
}

/* Offsets of p parts. */
static void choose_offsets(bool all_in_last, int64_t n, int64_t p, struct cofi_ints *offsets)
{
    offsets->n = (int)p + 1;
    for (int64_t i = 0; i <= p; i++)
        offsets->at[i] = i == p ? n : all_in_last ? 0 : n * i * i / (p * p);
}

static void write_ints(const char *key, const struct cofi_ints *ints, char *line, size_t bytes)
{
    cofi_check_append(line, bytes, " %s=", key);
    for (int i = 0; i < ints->n; i++)
        cofi_check_append(line, bytes, "%s%lld", i ? ":" : "", (long long)ints->at[i]);
}

static void to_line(const struct case_list *list, const struct cofi_cover_tuple *t, char *line,
                    size_t bytes)
{
    line[0] = 0;
    cofi_check_append(line, bytes, "trimul");
    for (int f = 0; f < N_FACTORS; f++)
        if (f != OFFSETS)
            cofi_check_append(line, bytes, " %s=%s", list->factors[f].key, word(list, t, f));
    if (strcmp(word(list, t, SHARD), "explicit"))
        return;
    struct cofi_ints offsets;
    int64_t n = atoi(word(list, t, ROWS));
    const char *grid = word(list, t, GRID);
    bool last = t->value[OFFSETS] == 1;
    choose_offsets(last, n, atoi(grid), &offsets);
    write_ints("rows", &offsets, line, bytes);
    choose_offsets(last, n, atoi(strchr(grid, 'x') + 1), &offsets);
    write_ints("cols", &offsets, line, bytes);
}

/* 0: of no kind that check words have. */
static size_t bytes_of(const struct cofi_option *o)
{
    return o->kind == COFI_OPTION_INTS     ? sizeof(struct cofi_ints)
           : o->kind == COFI_OPTION_INT    ? sizeof(int64_t)
           : o->kind == COFI_OPTION_CHOICE ? sizeof(int)
                                           : 0;
}

/* What the line of a tuple says. */
static void to_case(const struct case_list *list, const struct cofi_cover_tuple *t,
                    struct cofi_tm_case *c)
{
    *c = (struct cofi_tm_case){.b = 1};
    for (int f = 0; f < N_FACTORS; f++)
        if (f != OFFSETS)
            memcpy((char *)c + list->option[f]->place, &list->setting[f][t->value[f]],
                   bytes_of(list->option[f]));
    if (c->shard != COF_TRIMUL_EXPLICIT)
        return;
    bool last = t->value[OFFSETS] == 1;
    choose_offsets(last, c->n.at[0], c->grid.at[0], &c->rows);
    choose_offsets(last, c->n.at[0], c->grid.at[1], &c->cols);
}

/* What goes together. Integer data needs pairs of elements that cancel in a norm, and gates that
 * are open in both; large data the biases that make it so. */
static bool means_something(const struct cofi_tm_case *c)
{
    bool backward = c->calls != COFI_TM_FORWARD;
    if (c->shard == COF_TRIMUL_EXPLICIT && (c->n.n > 1 || c->grid.at[0] == 0))
        return false;
    if (!backward && (c->save || c->reduce || c->grads))
        return false;
    if (backward && (c->data == COFI_TM_INTEGER || c->data >= COFI_TM_LARGE ||
                     c->residual == COFI_TM_IN_PLACE))
        return false;
    if (c->data == COFI_TM_INTEGER && (c->d % 2 || c->d < 4 || c->h < 2 || c->mean ||
                                        c->mask == COFI_TM_REAL || c->residual))
        return false;
    if (c->data == COFI_TM_LARGE && (c->bias != COFI_TM_BIAS_ALL || c->mask))
        return false;
    if (c->dtype == 2 && (c->norm || c->mask_dtype)) /* fp32 is its own */
        return false;
    /* Far from 0 most elements of such rows are equal in 16 bits: gradients cancel altogether. */
    if (c->data == COFI_TM_CAUCHY && c->mean && c->dtype != 2)
        return false;
    return c->mask || !c->mask_dtype;
}

static double work(const struct cofi_tm_case *c)
{
    double flops = 0;
    for (int i = 0; i < c->n.n; i++)
        flops += cofi_tm_flops(c, c->n.at[i], c->calls != COFI_TM_FORWARD) +
                 cofi_tm_flops(c, c->n.at[i], false);
    return flops;
}

static bool legal(const void *arg, const struct cofi_cover_tuple *t)
{
    const struct case_list *list = arg;
    struct cofi_tm_case c;
    to_case(list, t, &c);
    if (c.shard != COF_TRIMUL_EXPLICIT && t->value[OFFSETS])
        return false;
    return means_something(&c) && work(&c) <= MAX_WORK;
}

/* Every grid of the rank count, then 0x0, the plan's choice. */
static void make_grids(struct case_list *list)
{
    int n = 0;
    for (int rows = list->n_ranks; rows >= 1; rows--)
        if (list->n_ranks % rows == 0 && n < COFI_COVER_VALUES - 1)
            snprintf(list->grid[n++], sizeof list->grid[0], "%dx%d", rows, list->n_ranks / rows);
    snprintf(list->grid[n++], sizeof list->grid[0], "0x0");
    list->factors[GRID].n = list->factors[GRID].n_mixed = n;
    for (int i = 0; i < n; i++)
        list->factors[GRID].value[i] = list->grid[i];
}

/* The options that the factors set, and what each of their words is. */
static bool read_words(struct case_list *list)
{
    for (int f = 0; f < N_FACTORS; f++) {
        const struct cofi_option *o = cofi_tm_check_words;
        while (f != OFFSETS && o->name && strcmp(o->name, list->factors[f].key))
            o++;
        list->option[f] = o;
        for (int v = 0; f != OFFSETS && v < list->factors[f].n; v++) {
            struct cofi_tm_case c;
            char wanted[COFI_OPTION_WANTED_BYTES];
            if (!o->name || bytes_of(o) == 0 ||
                !cofi_option_set(o, list->factors[f].value[v], &c, wanted))
                return false;
            memcpy(&list->setting[f][v], (char *)&c + o->place, bytes_of(o));
        }
    }
    return true;
}

static void build(struct case_list *list)
{
    memcpy(list->factors, all_factors, sizeof all_factors);
    make_grids(list);
    if (!read_words(list))
        return; /* no case: a word that its option does not take */
    list->cover = (struct cofi_cover){.factors = list->factors, .n_factors = N_FACTORS,
                                      .legal = legal, .arg = list, .tuples = list->tuples,
                                      .max = MAX_CASES};
    int n_grids = list->factors[GRID].n - 1;
    for (int i = 0; i < N_LISTED; i++) {
        char text[300];
        snprintf(text, sizeof text, "%s grid=%s", listed[i].text, list->grid[i % n_grids]);
        if (list->full || !listed[i].full)
            cofi_cover_add(&list->cover, text);
    }
    cofi_cover_pairs(&list->cover, (uint64_t)list->n_ranks);
    if (list->full)
        cofi_cover_random(&list->cover, (uint64_t)list->n_ranks << 16, N_FULL);
}

static const struct case_list *list_for(const struct cofi_check_options *options)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct case_list *lists;
    static const struct case_list none;
    pthread_mutex_lock(&lock);
    struct case_list *list = lists;
    while (list && (list->n_ranks != options->n_ranks || list->full != options->full))
        list = list->next;
    if (!list && (list = calloc(1, sizeof *list))) {
        list->n_ranks = options->n_ranks;
        list->full = options->full;
        build(list);
        list->next = lists;
        lists = list;
    }
    pthread_mutex_unlock(&lock);
    return list ? list : &none;
}

int64_t cofi_tm_n_cases(const struct cofi_check_options *options)
{
    return options->n_ranks < COFI_INTS_MAX ? list_for(options)->cover.n : 0;
}

void cofi_tm_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                        size_t bytes)
{
    const struct case_list *list = list_for(options);
    to_line(list, &list->tuples[idx], line, bytes);
}

void cofi_tm_case(const struct cofi_check_options *options, int64_t idx, struct cofi_tm_case *c)
{
    const struct case_list *list = list_for(options);
    to_case(list, &list->tuples[idx], c);
    c->forward_only = c->calls == COFI_TM_FORWARD;
    if (c->data == COFI_TM_INTEGER) { /* norms by 1 and by powers of 2: trimul_check_data.c */
        c->eps_in = 1e-30;
        c->eps_out = c->dtype == 2 ? 0x1p60 : 0x1p30;
    }
}

/* ---- what a case means ---------------------------------------------------------------------- */

cof_dtype cofi_tm_dtype(const struct cofi_tm_case *c)
{
    return (const cof_dtype[]){COF_BF16, COF_F16, COF_F32}[c->dtype];
}

int64_t cofi_tm_max_n(const struct cofi_tm_case *c)
{
    int64_t most = 0;
    for (int i = 0; i < c->n.n; i++)
        most = c->n.at[i] > most ? c->n.at[i] : most;
    return most;
}

void cofi_tm_params(const struct cofi_tm_case *c, cof_trimul_params *p)
{
    *p = (cof_trimul_params)COF_TRIMUL_PARAMS_INIT;
    p->dtype = cofi_tm_dtype(c);
    p->norm_dtype = c->norm ? COF_F32 : p->dtype;
    p->mask_dtype = c->mask_dtype ? COF_F32 : p->dtype;
    p->direction = (cof_trimul_direction)c->direction;
    p->n_batch = c->b;
    p->n_rows = cofi_tm_max_n(c);
    p->dim = c->d;
    p->hidden = c->h;
    p->grid_rows = c->grid.n ? (int)c->grid.at[0] : 0;
    p->grid_cols = c->grid.n > 1 ? (int)c->grid.at[1] : 0;
    p->shard = (cof_trimul_shard)c->shard;
    p->row_offsets = c->rows.n ? c->rows.at : NULL;
    p->col_offsets = c->cols.n ? c->cols.at : NULL;
    p->eps_in = c->eps_in;
    p->eps_out = c->eps_out;
    p->save = (cof_trimul_save)c->save;
    p->forward_only = c->forward_only;
    p->reduce_param_grads = c->reduce;
    p->chunk_features = (int)c->chunk;
}

double cofi_tm_flops(const struct cofi_tm_case *c, int64_t n, bool backward)
{
    double d = (double)c->d, h = (double)(c->h ? c->h : c->d), pairs = (double)n * (double)n;
    double tri = 2 * pairs * (double)n * h, linear = 10 * pairs * d * h + 2 * pairs * d * d;
    return (double)c->b * (tri + linear) * (backward ? 2 : 1);
}
