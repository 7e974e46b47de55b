/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A covering set: every value of every factor meets every value of every other one in some case
 * (where the pair is legal and affordable), found greedily by random candidates, beside a list of
 * cases that must not be left to chance. With --full, and on devices, random ones fill it up. */
#include "ops/attention/attention_cases.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/check.h"

enum {
    DTYPE, FORMAT, MASK, WINDOW, LAYOUT, CHUNKING, ROWS, BATCH, HEADS, DIMS, STRIDES, WIRE, DATA,
    CALLS, DELAY, SCHEDULE, SAVE, COMPACT, N_FACTORS
};
enum { MAX_VALUES = 13 };

/* Values up to n_mixed take part in the covering set, the others only in the explicit list. */
static const struct factor {
    const char *key;
    int n, n_mixed;
    const char *value[MAX_VALUES];
} factors[N_FACTORS] = {
    [DTYPE] = {"dtype", 3, 3, {"bf16", "f32", "f16"}},
    [FORMAT] = {"format", 2, 2, {"bshd", "sbhd"}},
    [MASK] = {"mask", 2, 2, {"none", "causal"}},
    /* Of chunks of c rows; -1: no limit. */
    [WINDOW] = {"window", 9, 9, {"none", "0:0", "1:0", "c-1:1", "c:0", "c+1:c", "3c:3c", "-1:1",
                                 "3c:-1"}},
    [LAYOUT] = {"layout", 2, 2, {"zigzag", "contiguous"}},
    [CHUNKING] = {"chunking", 2, 2, {"balanced", "padded"}},
    [ROWS] = {"s", 13, 8, {"0", "1", "2P-1", "2P", "2P+1", "7", "129", "698", "2999", "32769",
                           "512", "4096", "262144"}},
    [BATCH] = {"b", 2, 2, {"1", "2"}},
    [HEADS] = {"heads", 6, 5, {"1:1", "5:5", "8:8", "32:8", "8:1", "20:20"}},
    [DIMS] = {"dims", 7, 7, {"64/64", "96/96", "128/128", "192/128", "256/256", "32/32", "5/3"}},
    [STRIDES] = {"strides", 2, 2, {"compact", "padded"}},
    [WIRE] = {"wire_f32", 2, 2, {"0", "1"}},
    [DATA] = {"data", 7, 3, {"normal", "integer", "logits", "nan_k", "nan_v", "inf_v", "nan_q"}},
    [CALLS] = {"calls", 6, 6, {"fwd", "fwd+bwd", "two", "fwd_x20", "fwd_x1000", "graph"}},
    [DELAY] = {"delay", 2, 2, {"none", "random"}},
    [SCHEDULE] = {"schedule", 2, 2, {"ring", "gather"}},
    [SAVE] = {"save_kv", 2, 2, {"0", "1"}},
    [COMPACT] = {"only_compact", 2, 2, {"0", "1"}},
};

/* Rank counts: bit P-1, 0 for any; every bit of P > 4 is that of 4. */
enum { P2 = 2, P3 = 4, P4 = 8, ODD = 1 | P3, EVEN = P2 | P4 };

/* The explicit list: as on the line of a case; what is not named has its first value. A case of
 * many rows takes as long as dozens of others: on the CPU, without --full, only some rank counts
 * have it. */
static const struct listed {
    unsigned ranks, quick_ranks;
    bool full; /* with --full only */
    const char *text;
} listed[] = {
    {0, EVEN, false, "mask=causal s=698 dims=64/64 calls=fwd+bwd"},
    {0, ODD, false, "mask=causal s=698 heads=8:1 dims=32/32 chunking=padded calls=two"},
    {0, EVEN, false, "dtype=f32 mask=causal s=698 dims=128/128 calls=two delay=random"},
    {0, 0, false, "mask=causal s=129 data=integer calls=two heads=32:8 dims=32/32"},
    {0, ODD, false, "dtype=f32 s=698 data=integer calls=fwd+bwd layout=contiguous"},
    {0, P2, false, "mask=causal s=2999 dims=64/64 calls=fwd+bwd"},
    {0, ODD, false, "mask=causal s=698 dims=64/64 calls=two schedule=gather save_kv=1"},
    {0, EVEN, false, "s=698 dims=64/64 calls=two save_kv=1 delay=random"},
    {0, EVEN, false,
     "mask=causal s=698 dims=64/64 calls=two schedule=gather chunking=padded heads=8:1"},
    {0, P3, false, "dtype=f32 s=2999 dims=32/32 layout=contiguous chunking=padded calls=fwd+bwd"},
    {0, 0, false, "mask=causal s=698 data=nan_k heads=5:5 dims=32/32"},
    {0, 0, false, "mask=causal s=698 data=nan_v chunking=padded b=2 dims=64/64"},
    {0, 0, false, "mask=causal s=698 data=inf_v layout=contiguous dtype=f32 dims=32/32"},
    {0, 0, false, "mask=causal s=129 data=nan_q heads=8:1 dims=128/128 format=sbhd"},
    {0, 0, false, "mask=none s=129 data=nan_v dtype=f32 heads=8:8 dims=5/3"},
    {0, 0, false, "mask=none s=129 data=nan_k strides=padded heads=32:8 dims=32/32"},
    {0, 0, false, "dtype=f32 mask=causal s=129 data=nan_k dims=64/64 calls=fwd_x20"},
    {0, ODD, false, "dtype=f16 mask=causal s=698 heads=8:1 dims=96/96 calls=two"},
    {0, 0, false, "dtype=f16 mask=causal s=129 data=inf_v dims=64/64"},
    {P2 | P4, P4, false, "mask=causal s=32769 dims=64/64 calls=fwd+bwd"},
    {0, EVEN, false, "mask=causal window=c-1:1 s=698 dims=64/64 calls=two"},
    {0, ODD, false,
     "mask=causal window=c:0 s=698 dims=64/64 calls=fwd+bwd heads=8:1 chunking=padded"},
    {0, EVEN, false, "window=3c:3c s=698 dims=64/64 calls=two schedule=gather"},
    {0, P4, false, "window=c+1:c s=2999 dims=32/32 calls=fwd+bwd layout=contiguous"},
    {0, 0, false, "mask=causal window=1:0 s=129 data=integer calls=two dims=32/32 save_kv=1"},
    {0, ODD, false, "mask=causal window=c+1:c s=698 data=nan_k dims=32/32"},
    {0, 0, true, "mask=causal s=32769 dims=64/64 calls=fwd+bwd chunking=padded wire_f32=1"},
    {0, 0, true, "dtype=f32 s=32769 dims=64/64 calls=fwd+bwd layout=contiguous"},
    {0, 0, true, "dtype=f16 mask=causal s=32769 dims=64/64 calls=fwd+bwd"},
    {0, 0, true, "mask=causal s=4096 heads=8:1 dims=128/128 calls=fwd+bwd"},
    {0, 0, true, "mask=causal s=512 heads=32:8 dims=128/128 calls=two strides=padded"},
    {0, 0, true, "dtype=f32 mask=causal s=2999 heads=5:5 dims=192/128 calls=fwd+bwd"},
};

/* The same for CUDA devices, beside those. */
static const struct listed listed_cuda[] = {
    {0, 0, false, "mask=causal s=698 dims=128/128 calls=graph"},
    {0, 0, false, "mask=causal s=698 dims=128/128 calls=graph schedule=gather heads=32:8"},
    {0, 0, false, "mask=causal s=129 dims=64/64 calls=fwd_x1000 delay=random"},
    {0, 0, false, "mask=causal s=4096 dims=128/128 heads=5:5 only_compact=1"},
    {0, 0, false, "s=4096 dims=128/128 heads=8:1 format=sbhd b=2"},
    /* Long enough for the last section to go in two parts. */
    {0, 0, false, "mask=causal s=4096 dims=128/128 heads=32:8 b=2"},
    {0, 0, false, "mask=causal s=4096 dims=128/128 heads=20:20 b=2 calls=graph delay=random"},
    {0, 0, false, "mask=causal window=c:0 s=4096 dims=128/128 calls=graph"},
    {0, 0, false, "mask=causal s=2999 dims=192/128 heads=5:5 strides=padded calls=two"},
    {P4, 0, true, "mask=causal s=262144 dims=128/128 heads=20:20 only_compact=1"},
};

enum { N_CUDA = 100, N_FULL = 2000, MAX_CASES = N_FULL + 100 };
#define MAX_WORK 2.5e9 /* flops of the reference in a case of the set: about 0.4 s on one core */
#define SCORE_WORK 150 /* a score's exp, mask and the like, in flops */

struct tuple {
    uint8_t value[N_FACTORS];
};

struct case_list {
    int n_ranks;
    bool full, cuda;
    int64_t n;
    struct tuple tuple[MAX_CASES];
    struct case_list *next;
};

/* ---- What a tuple means ---- */

static int64_t rows_of(int n_ranks, int value)
{
    const char *text = factors[ROWS].value[value];
    return strncmp(text, "2P", 2) == 0 ? 2 * n_ranks + atoi(text + 2) : atoi(text);
}

/* "-1", "3", "c", "c-1", "c+1", "3c". */
static int64_t side_of(const char *text, int64_t chunk)
{
    const char *c = strchr(text, 'c');
    const char *end = strchr(text, ':');
    if (!c || (end && c > end))
        return atoi(text);
    int64_t rows = (c == text ? 1 : atoi(text)) * chunk + atoi(c + 1);
    return rows > 0 ? rows : 0;
}

static void set_window(int n_ranks, const char *text, cof_attention_params *p)
{
    cof_layout layout = {p->layout, p->chunking, n_ranks, p->n_rows};
    int64_t chunk = p->n_rows / cof_layout_chunks(&layout);
    p->has_window = strcmp(text, "none") != 0;
    if (!p->has_window)
        return;
    p->window_left = side_of(text, chunk);
    p->window_right = side_of(strchr(text, ':') + 1, chunk);
}

static void to_case(int n_ranks, bool cuda, const struct tuple *t, struct cofi_attention_case *c)
{
    *c = (struct cofi_attention_case){.params = COF_ATTENTION_PARAMS_INIT};
    cof_attention_params *p = &c->params;
    c->data = (enum cofi_attention_inputs)t->value[DATA];
    c->calls = (enum cofi_attention_calls)t->value[CALLS];
    c->padded_strides = t->value[STRIDES];
    c->random_delays = t->value[DELAY];
    p->dtype = (const cof_dtype[]){COF_BF16, COF_F32, COF_F16}[t->value[DTYPE]];
    p->format = (cof_attention_format)t->value[FORMAT];
    p->n_batch = 1 + t->value[BATCH];
    p->n_rows = rows_of(n_ranks, t->value[ROWS]);
    const char *heads = factors[HEADS].value[t->value[HEADS]];
    p->n_heads = atoi(heads);
    p->n_kv_heads = atoi(strchr(heads, ':') + 1);
    const char *dims = factors[DIMS].value[t->value[DIMS]];
    p->head_dim_qk = atoi(dims);
    p->head_dim_v = atoi(strchr(dims, '/') + 1);
    p->mask = (cof_mask)t->value[MASK];
    p->layout = (cof_layout_kind)t->value[LAYOUT];
    p->chunking = (cof_chunking)t->value[CHUNKING];
    set_window(n_ranks, factors[WINDOW].value[t->value[WINDOW]], p);
    p->forward_only = cuda || c->calls == COFI_CALLS_FORWARD;
    p->only_compact = t->value[COMPACT];
    p->wire_f32 = t->value[WIRE];
    p->schedule = t->value[SCHEDULE] ? COF_SCHEDULE_GATHER : COF_SCHEDULE_RING;
    p->save_kv = t->value[SAVE];
    p->scale = c->data == COFI_DATA_INTEGER ? 1 : c->data == COFI_DATA_LOGITS ? 0.75 : 0;
}

static double work(const struct cofi_attention_case *c)
{
    const cof_attention_params *p = &c->params;
    double scores = (double)p->n_rows * (double)p->n_rows * (double)(p->n_batch * p->n_heads);
    double passes = cofi_attention_case_has_backward(c) ? 4.5 : 1;
    if (c->calls == COFI_CALLS_TWO)
        passes *= 2;
    else if (c->calls >= COFI_CALLS_REPEAT)
        passes = 3; /* the operator alone repeats */
    return scores * passes * (double)(2 * (p->head_dim_qk + p->head_dim_v) + SCORE_WORK) /
           (p->mask == COF_MASK_CAUSAL ? 2 : 1);
}

/* What one kind of device alone has. A thousand calls are listed, not met by chance. */
static bool has_form(bool cuda, const struct tuple *t)
{
    if (t->value[CALLS] == COFI_CALLS_MANY)
        return false;
    if (!cuda)
        return t->value[CALLS] != COFI_CALLS_GRAPH && !t->value[COMPACT];
    return t->value[CALLS] != COFI_CALLS_BACKWARD && !t->value[SAVE] && !t->value[WIRE] &&
           !(t->value[COMPACT] && t->value[STRIDES]);
}

/* A listed case for the CPU as devices have it. Head dims that only the exact engine takes where a
 * value that is hidden must not show: others multiply it by 0. */
static void adapt_to_cuda(struct tuple *t)
{
    t->value[WIRE] = t->value[SAVE] = 0;
    if (t->value[CALLS] == COFI_CALLS_BACKWARD)
        t->value[CALLS] = COFI_CALLS_FORWARD;
    if (t->value[DATA] == COFI_DATA_NAN_V || t->value[DATA] == COFI_DATA_INF_V)
        t->value[DIMS] = factors[DIMS].n - 1; /* 5/3 */
}

/* Integer data tells keys apart by the bits of their row number, one dim each. fp32 and fp16 with
 * large logits and a handful of rows have too few numbers that count for a rule about their
 * spread. */
static bool legal(int n_ranks, bool cuda, const struct tuple *t)
{
    struct cofi_attention_case c;
    if (!has_form(cuda, t))
        return false;
    to_case(n_ranks, cuda, t, &c);
    if (c.params.save_kv && c.params.forward_only)
        return false;
    if (c.data == COFI_DATA_INTEGER && c.params.n_rows > (int64_t)1 << (c.params.head_dim_qk < 20
                                                                             ? c.params.head_dim_qk
                                                                             : 20))
        return false;
    if (c.data == COFI_DATA_LOGITS && t->value[DTYPE] != 0 && c.params.n_rows < 129)
        return false;
    return work(&c) <= MAX_WORK;
}

static void to_line(int n_ranks, const struct tuple *t, char *line, size_t bytes)
{
    line[0] = 0;
    cofi_check_append(line, bytes, "attention");
    for (int f = 0; f < N_FACTORS; f++)
        if (f == ROWS)
            cofi_check_append(line, bytes, " s=%lld", (long long)rows_of(n_ranks, t->value[f]));
        else
            cofi_check_append(line, bytes, " %s=%s", factors[f].key, factors[f].value[t->value[f]]);
}

/* ---- The list ---- */

/* Tuples may differ and mean the same: with P = 4, 7 rows are 2P-1. */
static bool same(int n_ranks, const struct tuple *a, const struct tuple *b)
{
    for (int f = 0; f < N_FACTORS; f++)
        if (f == ROWS ? rows_of(n_ranks, a->value[f]) != rows_of(n_ranks, b->value[f])
                      : a->value[f] != b->value[f])
            return false;
    return true;
}

static void add(struct case_list *list, const struct tuple *t)
{
    for (int64_t i = 0; i < list->n; i++)
        if (same(list->n_ranks, &list->tuple[i], t))
            return;
    if (list->n < MAX_CASES)
        list->tuple[list->n++] = *t;
}

static struct tuple parse_listed(const char *text)
{
    struct tuple t = {{0}};
    char copy[200], *state = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
        char *value = strchr(word, '=');
        *value++ = 0;
        for (int f = 0; f < N_FACTORS; f++)
            for (int v = 0; v < factors[f].n; v++)
                if (strcmp(factors[f].key, word) == 0 && strcmp(factors[f].value[v], value) == 0)
                    t.value[f] = (uint8_t)v;
    }
    return t;
}

typedef bool pair_table[N_FACTORS][N_FACTORS][MAX_VALUES][MAX_VALUES]; /* factor f < g: to cover */

static int count_pairs(const pair_table left, const struct tuple *t)
{
    int n = 0;
    for (int f = 0; f < N_FACTORS; f++)
        for (int g = f + 1; g < N_FACTORS; g++)
            n += left[f][g][t->value[f]][t->value[g]];
    return n;
}

static void cover_pairs(pair_table left, const struct tuple *t)
{
    for (int f = 0; f < N_FACTORS; f++)
        for (int g = f + 1; g < N_FACTORS; g++)
            left[f][g][t->value[f]][t->value[g]] = false;
}

static uint64_t next_random(uint64_t *state)
{
    return cofi_check_random(0x636f667573650001, 0, (*state)++);
}

/* A random legal tuple with value v of factor f and w of g; false when none is found. */
static bool random_tuple(const struct case_list *list, uint64_t *state, int f, int v, int g, int w,
                         struct tuple *out)
{
    for (int attempt = 0; attempt < 400; attempt++) {
        for (int i = 0; i < N_FACTORS; i++)
            out->value[i] = (uint8_t)(next_random(state) % (uint64_t)factors[i].n_mixed);
        out->value[f] = (uint8_t)v;
        out->value[g] = (uint8_t)w;
        if (legal(list->n_ranks, list->cuda, out))
            return true;
    }
    return false;
}

/* Of 30 candidates that hold the pair, the one that covers most. */
static void cover_one(struct case_list *list, uint64_t *state, pair_table left, int f, int v, int g,
                      int w)
{
    struct tuple best = {{0}}, t;
    int most = -1;
    for (int i = 0; i < 30 && random_tuple(list, state, f, v, g, w, &t); i++) {
        int n = count_pairs(left, &t);
        if (n > most) {
            most = n;
            best = t;
        }
    }
    left[f][g][v][w] = false;
    if (most < 0)
        return; /* no legal case holds the pair */
    add(list, &best);
    cover_pairs(left, &best);
}

static void add_listed(struct case_list *list, pair_table left, const struct listed *from, size_t n)
{
    int bit = list->n_ranks < 4 ? list->n_ranks - 1 : 3;
    for (size_t i = 0; i < n; i++)
        if ((list->full || !from[i].full) &&
            (!from[i].ranks || from[i].ranks >> bit & 1) &&
            (!from[i].quick_ranks || list->full || list->cuda ||
             from[i].quick_ranks >> bit & 1)) {
            struct tuple t = parse_listed(from[i].text);
            if (list->cuda)
                adapt_to_cuda(&t);
            add(list, &t);
            cover_pairs(left, &t);
        }
}

static void build(struct case_list *list)
{
    static pair_table left; /* under the lock */
    uint64_t state = (uint64_t)list->n_ranks << 32;
    memset(left, 0, sizeof left);
    for (int f = 0; f < N_FACTORS; f++)
        for (int g = f + 1; g < N_FACTORS; g++)
            for (int v = 0; v < factors[f].n_mixed; v++)
                for (int w = 0; w < factors[g].n_mixed; w++)
                    left[f][g][v][w] = true;
    add_listed(list, left, listed, sizeof listed / sizeof listed[0]);
    if (list->cuda)
        add_listed(list, left, listed_cuda, sizeof listed_cuda / sizeof listed_cuda[0]);
    for (int v = 0; v < MAX_VALUES; v++) /* values outermost, so that rare ones come spread */
        for (int w = 0; w < MAX_VALUES; w++)
            for (int f = 0; f < N_FACTORS; f++)
                for (int g = f + 1; g < N_FACTORS; g++)
                    if (left[f][g][v][w])
                        cover_one(list, &state, left, f, v, g, w);
    struct tuple t;
    int64_t wanted = list->full ? N_FULL : list->cuda ? N_CUDA : 0;
    for (int i = 0; i < 4 * N_FULL && list->n < wanted; i++) /* s=129 and s=698, masks in turn */
        if (random_tuple(list, &state, ROWS, 6 + i % 2, MASK, i / 2 % 2, &t))
            add(list, &t);
}

static const struct case_list *list_for(const struct cofi_check_options *options)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct case_list *lists;
    static const struct case_list none;
    pthread_mutex_lock(&lock);
    struct case_list *list = lists;
    while (list && (list->n_ranks != options->n_ranks || list->full != options->full ||
                    list->cuda != options->cuda))
        list = list->next;
    if (!list && (list = calloc(1, sizeof *list))) {
        list->n_ranks = options->n_ranks;
        list->full = options->full;
        list->cuda = options->cuda;
        build(list);
        list->next = lists;
        lists = list;
    }
    pthread_mutex_unlock(&lock);
    return list ? list : &none;
}

int64_t cofi_attention_n_cases(const struct cofi_check_options *options)
{
    return list_for(options)->n;
}

void cofi_attention_case(const struct cofi_check_options *options, int64_t idx,
                         struct cofi_attention_case *case_out)
{
    to_case(options->n_ranks, options->cuda, &list_for(options)->tuple[idx], case_out);
}

void cofi_attention_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                              size_t bytes)
{
    to_line(options->n_ranks, &list_for(options)->tuple[idx], line, bytes);
}
