/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Random combinations of all factors, enough of them that every pair of values meets, and a list of
 * those that must not be left to chance. */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"
#include "ops/check.h"

enum {
    DTYPE, WEIGHT, HIDDEN, TOKENS, CAPACITY, VARIANT, ROUNDING, ALGORITHM, THRESHOLD, BIAS, EPS,
    LAYOUT, ALIAS, PLACE, PLANS, STREAM, DATA, CALLS, DELAY, CTAS, GRAPH, EPOCH,
    N_FACTORS
};
enum { MAX_VALUES = 24 };

/* Of TOKENS: the T of calls one after the other, in units of P (ranks) and C (the plan's rows);
 * `random`: up to 2C+2. Of CALLS: 2P; `many`: back to back until tired. */
static const struct factor {
    const char *key;
    int n, n_random; /* values in all; random cases take the first ones */
    const char *value[MAX_VALUES];
} factors[N_FACTORS] = {
    [DTYPE] = {"dtype", 3, 3, {"bf16", "f16", "f32"}},
    [WEIGHT] = {"weight", 2, 2, {"same", "f32"}},
    [HIDDEN] = {"h", 16, 16,
                {"64", "1", "8", "255", "256", "257", "1000", "2048", "2880", "4096", "4099",
                 "5120", "6144", "7168", "8192", "16384"}},
    [TOKENS] = {"t", 21, 10,
                {"3", "1", "random", "P-1:P:P+1", "C:C+1:1", "0:2:0:5", "1:2:3:0", "3C+2:C-1",
                 "16", "6:12:4", "132:133", "0", "1:16:64:128:256:1024", "130:1:131", "4:2",
                 "1:16:64:128:256:1024:4096", "64", "128", "256", "1024", "4096"}},
    [CAPACITY] = {"capacity", 5, 4, {"16", "1", "5", "140", "4096"}},
    [VARIANT] = {"variant", 4, 4, {"residual_norm", "norm", "norm_residual_out", "only"}},
    [ROUNDING] = {"rounding", 2, 2, {"match_unfused", "exact"}},
    [ALGORITHM] = {"algorithm", 3, 3, {"auto", "one_shot", "two_shot"}},
    [THRESHOLD] = {"one_shot_rows", 4, 4, {"default", "2", "4", "100"}},
    [BIAS] = {"bias", 2, 2, {"0", "1"}},
    [EPS] = {"eps", 3, 3, {"1e-5", "1e-6", "1"}},
    [LAYOUT] = {"layout", 5, 5, {"compact", "pitched", "odd", "3d", "3d_pitched"}},
    [ALIAS] = {"alias", 4, 4, {"none", "residual", "x", "both"}},
    [PLACE] = {"x", 2, 2, {"memory", "arena"}},
    [PLANS] = {"plans", 3, 3, {"one", "shared", "streams"}},
    [STREAM] = {"stream", 2, 2, {"own", "now"}},
    [DATA] = {"data", 7, 5,
              {"normal", "integer", "outlier", "special", "zero", "patterns", "epochs"}},
    [CALLS] = {"calls", 8, 3, {"4", "1", "12", "2P", "many", "100", "6", "7"}},
    [DELAY] = {"delay", 2, 2, {"none", "random"}},
    [CTAS] = {"max_ctas", 3, 3, {"0", "1", "5"}},
    [GRAPH] = {"graph", 2, 1, {"no", "replayed"}},
    [EPOCH] = {"epoch", 3, 1, {"first", "before_quarter", "before_turn"}},
};

static const char *const listed[] = {
    /* every H */
    "h=1 t=P-1:P:P+1", "h=8 t=P-1:P:P+1", "h=64 t=P-1:P:P+1", "h=1000 t=P-1:P:P+1",
    "h=2048 t=P-1:P:P+1", "h=2880 t=P-1:P:P+1", "h=4096 t=P-1:P:P+1", "h=4099 t=P-1:P:P+1",
    "h=5120 t=P-1:P:P+1", "h=6144 t=P-1:P:P+1", "h=7168 t=P-1:P:P+1", "h=8192 t=P-1:P:P+1",
    "h=16384 t=P-1:P:P+1",
    /* every T */
    "h=1000 t=0", "h=1000 t=1:2:3:0", "h=4096 t=132:133 capacity=140",
    "h=1000 t=132:133 capacity=140 algorithm=two_shot", "h=2880 t=C:C+1:1",
    "h=2880 t=C:C+1:1 algorithm=two_shot dtype=f32", "h=257 t=3C+2:C-1 capacity=5 calls=12",
    "h=257 t=3C+2:C-1 capacity=5 algorithm=two_shot rounding=exact x=arena",
    /* every pattern in every slot */
    "h=4096 t=16 data=patterns calls=2P variant=only",
    "h=4096 t=16 data=patterns calls=2P variant=only dtype=f16",
    "h=4096 t=16 data=patterns calls=2P algorithm=one_shot",
    "h=4096 t=16 data=patterns calls=2P algorithm=two_shot",
    "h=4096 t=16 data=patterns calls=2P algorithm=one_shot rounding=exact dtype=f16",
    "h=4096 t=16 data=patterns calls=2P algorithm=two_shot rounding=exact dtype=f16",
    /* zeros of both signs, outliers, what is not a number */
    "h=64 data=zero", "h=64 data=zero dtype=f16 algorithm=two_shot", "h=64 data=zero dtype=f32",
    "h=64 data=zero variant=only algorithm=two_shot rounding=exact",
    "h=4096 data=outlier", "h=4096 data=outlier dtype=f16", "h=4096 data=outlier rounding=exact",
    "h=4096 t=16 data=special", "h=4096 t=16 data=special dtype=f16 algorithm=two_shot",
    "h=4096 t=16 data=special dtype=f32", "h=4096 t=16 data=special rounding=exact variant=norm",
    /* in the arena, in the place of inputs, beside another plan */
    "h=1000 t=1:2:3:0 x=arena calls=12 delay=random",
    "h=1000 t=6:12:4 x=arena calls=12 delay=random algorithm=two_shot layout=odd",
    "h=16384 t=16 x=arena algorithm=one_shot calls=100 dtype=f32",
    "h=1000 t=6:12:4 alias=both calls=12 delay=random",
    "h=1000 t=6:12:4 alias=both calls=12 delay=random algorithm=two_shot",
    "h=1000 t=6:12:4 plans=shared calls=12 delay=random",
    "h=1000 t=6:12:4 plans=shared calls=12 delay=random algorithm=two_shot x=arena",
    "h=1000 t=6:12:4 plans=streams calls=12 delay=random",
    "h=1000 t=3C+2:C-1 plans=streams calls=12 delay=random algorithm=two_shot",
    /* while epochs come round, where two calls in a row have the same half */
    "h=1000 t=1:2:3:0 calls=12 delay=random epoch=before_turn",
    "h=1000 t=6:12:4 calls=12 delay=random epoch=before_turn algorithm=one_shot x=arena",
    "h=1000 t=6:12:4 calls=12 delay=random epoch=before_turn algorithm=two_shot plans=shared",
    "h=257 t=3C+2:C-1 capacity=5 calls=12 delay=random epoch=before_turn one_shot_rows=4",
    "h=1000 t=6:12:4 calls=12 delay=random epoch=before_quarter plans=shared",
    /* from call to call */
    "h=1000 t=random one_shot_rows=4 calls=100 delay=random",
    "h=1000 t=random one_shot_rows=4 calls=100 delay=random dtype=f32 capacity=5 plans=shared",
    "h=2048 t=random one_shot_rows=4 calls=100 delay=random layout=odd dtype=f16",
    "h=256 t=random one_shot_rows=4 capacity=5 calls=many delay=random",
    "h=256 t=random algorithm=two_shot capacity=5 calls=many delay=random",
    "h=64 t=random algorithm=one_shot capacity=5 calls=many delay=random x=arena",
    "h=64 dtype=f32 data=epochs calls=12 delay=random",
    "h=257 dtype=f32 data=epochs calls=12 delay=random algorithm=two_shot capacity=5",
};
static const char *const listed_cuda[] = {
    "h=4096 t=132:133 capacity=140 algorithm=one_shot",
    "h=2880 t=C:C+1:1 algorithm=one_shot", "h=257 t=3C+2:C-1 capacity=5 algorithm=one_shot",
    "h=1000 t=130:1:131 capacity=140 algorithm=one_shot max_ctas=5 calls=12 delay=random",
    "h=1000 t=130:1:131 capacity=140 algorithm=two_shot max_ctas=5 calls=12 delay=random",
    "h=256 t=random algorithm=one_shot capacity=5 calls=many delay=random",
    "h=4096 t=3 algorithm=one_shot calls=12 graph=replayed delay=random",
    "h=4096 t=130:1:131 capacity=140 algorithm=one_shot calls=12 graph=replayed delay=random",
    "h=4096 t=130:1:131 capacity=140 algorithm=two_shot calls=12 graph=replayed delay=random",
    "h=1000 t=4:2 one_shot_rows=2 calls=12 graph=replayed delay=random",
    "h=1000 t=3C+2:C-1 capacity=5 one_shot_rows=4 calls=12 graph=replayed delay=random",
    "h=1000 t=4:2 one_shot_rows=2 calls=12 graph=replayed delay=random x=arena plans=shared",
    "h=1000 t=130:1:131 capacity=140 algorithm=one_shot calls=12 delay=random epoch=before_turn",
    "h=1000 t=130:1:131 capacity=140 algorithm=two_shot calls=12 delay=random epoch=before_turn",
    "h=1000 t=4:2 one_shot_rows=2 calls=12 graph=replayed delay=random epoch=before_turn",
};
/* The table that others have published for this operator, over 4 ranks: the largest error at each
 * T. And one plan whose calls alternate between them. Calls of 4096 rows take their time. */
static const struct published {
    const char *line;
    double max_error;
    bool is_long;
} published[] = {
    {"h=2048 t=1 capacity=4096", 0.03125, false},
    {"h=2048 t=16 capacity=4096", 0.03125, false},
    {"h=2048 t=64 capacity=4096", 0.0625, false},
    {"h=2048 t=128 capacity=4096", 0.0625, false},
    {"h=2048 t=256 capacity=4096", 0.0625, false},
    {"h=2048 t=1024 capacity=4096", 0.0625, false},
    {"h=2048 t=1:16:64:128:256:1024 capacity=4096 calls=12", 0.0625, false},
    {"h=2048 t=4096 capacity=4096", 0.0625, true},
    {"h=2048 t=1:16:64:128:256:1024:4096 capacity=4096 calls=7", 0.0625, true},
};

enum {
    N_LISTED = sizeof listed / sizeof listed[0],
    N_CUDA = sizeof listed_cuda / sizeof listed_cuda[0],
    N_PUBLISHED = sizeof published / sizeof published[0],
    N_RANDOM = 70,
    N_FULL = 1000,
    MANY = 100000,
    MANY_SHORT = 1500
};

struct tuple {
    int value[N_FACTORS];
};

static bool sets(const char *text, const char *key, const char **value)
{
    size_t n = strlen(key);
    for (const char *at = text; (at = strstr(at, key)); at += n)
        if ((at == text || at[-1] == ' ') && at[n] == '=') {
            *value = at + n + 1;
            return true;
        }
    return false;
}

static struct tuple parse(const char *text)
{
    struct tuple t = {{0}};
    for (int f = 0; f < N_FACTORS; f++) {
        const char *value;
        for (int v = 0; sets(text, factors[f].key, &value) && v < factors[f].n; v++) {
            size_t n = strlen(factors[f].value[v]);
            if (!strncmp(value, factors[f].value[v], n) && (!value[n] || value[n] == ' '))
                t.value[f] = v;
        }
    }
    return t;
}

static const char *word(const struct tuple *t, int factor)
{
    return factors[factor].value[t->value[factor]];
}

static bool is(const struct tuple *t, int factor, const char *value)
{
    return !strcmp(word(t, factor), value);
}

/* What goes together, and not too many elements by chance. */
static void make_legal(struct tuple *t, bool cuda)
{
    bool normed = !is(t, VARIANT, "only"), added = is(t, VARIANT, "residual_norm");
    bool in_arena = is(t, PLACE, "arena");
    if (!is(t, ALGORITHM, "auto"))
        t->value[THRESHOLD] = 0;
    if (is(t, DTYPE, "f32") || !normed)
        t->value[WEIGHT] = 0;
    if (!normed)
        t->value[BIAS] = t->value[EPS] = 0;
    bool x = t->value[ALIAS] & 2 && normed && !in_arena, residual = t->value[ALIAS] & 1 && added;
    t->value[ALIAS] = 2 * x + residual;
    if (in_arena && is(t, PLANS, "streams"))
        t->value[PLANS] = COFI_ARN_SHARED;
    if (is(t, PLANS, "streams"))
        t->value[STREAM] = 0;
    /* Kernels that wait leave each other room. */
    if (cuda && is(t, PLANS, "streams") && is(t, CTAS, "0"))
        t->value[CTAS] = 2;
}

static void make_small(struct tuple *t)
{
    int64_t hidden = atoi(word(t, HIDDEN));
    if (hidden > 1000 && is(t, CAPACITY, "140"))
        t->value[CAPACITY] = 0;
    if (hidden > 5000)
        t->value[CALLS] = 0;
}

/* The first cases. Fewer devices than 4 have them too, so that they can be tried there. */
static int n_published(const struct cofi_check_options *options)
{
    int n = 0;
    if (options->n_ranks > 4 || options->n_ranks < (options->cuda ? 2 : 4))
        return 0;
    for (int i = 0; i < N_PUBLISHED; i++)
        n += options->full || options->cuda || !published[i].is_long; /* those are the last */
    return n;
}

static int n_listed(const struct cofi_check_options *options)
{
    return n_published(options) + N_LISTED + (options->cuda ? N_CUDA : 0);
}

static const char *listed_line(const struct cofi_check_options *options, int64_t idx)
{
    int n = n_published(options);
    if (idx < n)
        return published[idx].line;
    idx -= n;
    return idx < N_LISTED ? listed[idx] : listed_cuda[idx - N_LISTED];
}

static struct tuple tuple_of(const struct cofi_check_options *options, int64_t idx)
{
    struct tuple t = {{0}};
    if (idx < n_listed(options)) {
        t = parse(listed_line(options, idx));
    } else {
        uint64_t number = (uint64_t)(idx - n_listed(options));
        for (int f = 0; f < N_FACTORS; f++)
            t.value[f] = (int)(cofi_check_random(23, (uint64_t)f, number) %
                               (uint64_t)factors[f].n_random);
        make_small(&t);
    }
    make_legal(&t, options->cuda);
    return t;
}

int64_t cofi_arn_n_cases(const struct cofi_check_options *options)
{
    if (options->n_ranks > COFI_ARN_MAX_RANKS)
        return 0;
    return n_listed(options) + (options->full ? N_FULL : N_RANDOM);
}

/* "3C+2" */
static int64_t read_tokens(const char *text, int64_t n_ranks, int64_t capacity, const char **end)
{
    char *at;
    int64_t n = strtol(text, &at, 10);
    if (*at == 'P' || *at == 'C') {
        n = (at == text ? 1 : n) * (*at == 'P' ? n_ranks : capacity);
        at++;
        n += *at == '+' || *at == '-' ? strtol(at, &at, 10) : 0;
    }
    *end = at;
    return n;
}

static void read_list(const struct tuple *t, int n_ranks, struct cofi_arn_case *c)
{
    const char *at = word(t, TOKENS);
    c->is_random = is(t, TOKENS, "random");
    c->max_rows = c->is_random ? 2 * c->params.max_tokens + 2 : 0;
    while (!c->is_random) {
        int64_t n = read_tokens(at, n_ranks, c->params.max_tokens, &at);
        c->list[c->n_list++] = n;
        c->max_rows = n > c->max_rows ? n : c->max_rows;
        if (*at != ':')
            break;
        at++;
    }
}

int64_t cofi_arn_case_tokens(const struct cofi_arn_case *c, uint64_t seed, int64_t call)
{
    if (!c->is_random)
        return c->list[call % c->n_list];
    /* Small ones more often. */
    uint64_t x = cofi_check_random(seed, 40, (uint64_t)call), n = (uint64_t)c->max_rows + 1;
    return (int64_t)(x & 1 ? x / 2 % n : x / 2 % n % 4);
}

static void read_params(const struct tuple *t, cof_allreduce_rmsnorm_params *p)
{
    static const cof_dtype dtypes[] = {{COF_DTYPE_CODE_BFLOAT, 16, 1},
                                       {COF_DTYPE_CODE_FLOAT, 16, 1},
                                       {COF_DTYPE_CODE_FLOAT, 32, 1}};
    static const cof_allreduce_variant variants[] = {
        COF_ALLREDUCE_RESIDUAL_NORM, COF_ALLREDUCE_NORM, COF_ALLREDUCE_NORM, COF_ALLREDUCE_ONLY};
    *p = (cof_allreduce_rmsnorm_params)COF_ALLREDUCE_RMSNORM_PARAMS_INIT;
    p->dtype = dtypes[t->value[DTYPE]];
    if (is(t, WEIGHT, "f32"))
        p->weight_dtype = COF_F32;
    p->hidden = atoi(word(t, HIDDEN));
    p->max_tokens = atoi(word(t, CAPACITY));
    p->variant = variants[t->value[VARIANT]];
    p->rounding = (cof_allreduce_rounding)t->value[ROUNDING];
    p->algorithm = (cof_allreduce_algorithm)t->value[ALGORITHM];
    p->one_shot_bytes = atoi(word(t, THRESHOLD)) * p->hidden * cofi_dtype_bytes(p->dtype);
    p->weight_bias = t->value[BIAS];
    p->eps = p->variant == COF_ALLREDUCE_ONLY ? 0 : strtof(word(t, EPS), NULL);
    p->max_ctas = atoi(word(t, CTAS));
}

static const uint32_t first_epochs[] = {1, 0x40000000 - 2, UINT32_MAX - 2};

void cofi_arn_case(const struct cofi_check_options *options, int64_t idx, struct cofi_arn_case *c)
{
    struct tuple t = tuple_of(options, idx);
    *c = (struct cofi_arn_case){0};
    read_params(&t, &c->params);
    read_list(&t, options->n_ranks, c);
    c->wants_residual_out = !is(&t, VARIANT, "norm");
    c->data = (enum cofi_arn_data)t.value[DATA];
    c->layout = (enum cofi_arn_layout)t.value[LAYOUT];
    c->plans = (enum cofi_arn_plans)t.value[PLANS];
    c->alias_residual = t.value[ALIAS] & 1;
    c->alias_x = t.value[ALIAS] & 2;
    c->in_arena = t.value[PLACE];
    c->now = t.value[STREAM];
    c->delays = t.value[DELAY];
    c->is_captured = t.value[GRAPH];
    c->first_epoch = first_epochs[t.value[EPOCH]];
    c->n_calls = is(&t, CALLS, "2P") ? 2 * options->n_ranks : atoi(word(&t, CALLS));
    if (is(&t, CALLS, "many"))
        c->n_calls = options->full || options->cuda ? MANY : MANY_SHORT;
    if (c->is_captured)
        c->n_calls *= 10;
    /* Not 2: a buffer's half would hold the rows of the same set before. */
    int n_sets = c->n_calls < 3 ? (int)c->n_calls : c->n_calls < 6 ? 3 : 6;
    c->n_sets = c->data == COFI_ARN_PATTERNS ? (int)c->n_calls : n_sets;
    if (idx < n_published(options)) {
        c->max_error = published[idx].max_error;
        c->n_sets = 1;
    }
}

void cofi_arn_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                        size_t bytes)
{
    struct tuple t = tuple_of(options, idx);
    snprintf(line, bytes, "allreduce_rmsnorm");
    for (int f = 0; f < N_FACTORS; f++)
        cofi_check_append(line, bytes, " %s=%s", factors[f].key, word(&t, f));
    if (idx >= n_listed(options))
        cofi_check_append(line, bytes, " case=%lld", (long long)(idx - n_listed(options)));
    else if (idx < n_published(options))
        cofi_check_append(line, bytes, " published_error=%g", published[idx].max_error);
}
