/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Random combinations of all factors, enough of them that every pair of values meets, and a list of
 * those that must not be left to chance. */
#include "ops/grad_return/grad_return_cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/check.h"

enum {
    DTYPE, PARTIAL, WIRE, ROWS, BATCH, HEADS, DIMS, LAYOUT, CHUNKING, TRANSFER, BY, WRITERS,
    STRIDES, DATA, CALLS, DELAY, N_CPU_FACTORS,
    /* Of cases on CUDA devices. */
    GRAPH = N_CPU_FACTORS, PLANS, EPOCH, CTAS, WAIT, ROUNDS, N_FACTORS
};

static const struct factor {
    const char *key;
    int n;
    const char *value[8];
} factors[N_FACTORS] = {
    [DTYPE] = {"dtype", 3, {"bf16", "f32", "f16"}},
    [PARTIAL] = {"partial_f32", 2, {"0", "1"}},
    [WIRE] = {"wire_f32", 2, {"0", "1"}},
    [ROWS] = {"s", 8, {"129", "0", "1", "2P-1", "2P", "2P+1", "698", "2999"}},
    [BATCH] = {"b", 2, {"1", "2"}},
    [HEADS] = {"heads", 3, {"1", "3", "8"}},
    [DIMS] = {"dims", 4, {"8/8", "64/64", "5/3", "192/128"}},
    [LAYOUT] = {"layout", 2, {"zigzag", "contiguous"}},
    [CHUNKING] = {"chunking", 2, {"balanced", "padded"}},
    [TRANSFER] = {"transfer", 3, {"push", "pull", "caller"}},
    [BY] = {"by", 2, {"whole", "section"}},
    [WRITERS] = {"writers", 3, {"all", "causal", "table"}},
    [STRIDES] = {"strides", 2, {"compact", "padded"}},
    [DATA] = {"data", 2, {"uniform", "integer"}},
    [CALLS] = {"calls", 2, {"one", "three"}},
    [DELAY] = {"delay", 2, {"none", "random"}},
    [GRAPH] = {"graph", 2, {"eager", "replayed"}},
    [PLANS] = {"plans", 2, {"one", "shared"}},
    [EPOCH] = {"epoch", 2, {"first", "before_turn"}},
    [CTAS] = {"max_ctas", 3, {"0", "1", "5"}},
    [WAIT] = {"wait", 2, {"kernel", "driver"}},
    [ROUNDS] = {"rounds", 2, {"2", "340"}},
};

static const char *const listed[] = {
    "s=698 calls=three",
    "s=698 calls=three delay=random writers=causal",
    "s=698 transfer=pull calls=three delay=random writers=table",
    "s=698 transfer=caller chunking=padded writers=causal",
    "s=2999 by=section calls=three writers=causal dtype=f32",
    "s=698 by=section transfer=pull partial_f32=1 writers=table",
    "s=2P-1 writers=causal calls=three",
    "s=1 by=section calls=three",
    "s=0 calls=three",
};
static const char *const cuda_listed[] = {
    "s=2999 heads=8 dims=64/64 calls=three",
    "s=2999 heads=8 dims=64/64 calls=three transfer=pull writers=causal",
    "s=2999 heads=8 dims=192/128 calls=three graph=replayed",
    "s=698 calls=three delay=random writers=causal rounds=340",
    "s=698 transfer=pull calls=three delay=random rounds=340",
    "s=698 calls=three delay=random graph=replayed rounds=340",
    "s=698 by=section calls=three delay=random graph=replayed",
    "s=698 calls=three plans=shared epoch=before_turn graph=replayed",
    "s=698 by=section transfer=pull calls=three plans=shared delay=random",
    "s=698 calls=three epoch=before_turn max_ctas=5",
    "s=698 transfer=caller chunking=padded writers=causal calls=three",
    "s=698 transfer=caller chunking=padded by=section calls=three wait=driver",
    "s=2P-1 writers=causal calls=three graph=replayed",
    "s=1 by=section calls=three graph=replayed",
    "s=0 calls=three",
};
enum { N_LISTED = sizeof listed / sizeof listed[0], N_RANDOM = 60, N_FULL = 1000,
       N_CUDA_LISTED = sizeof cuda_listed / sizeof cuda_listed[0] };
/* So that calls of two rounds come round, where words are reset. */
#define BEFORE_TURN (UINT32_MAX - 2)

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

/* The caller's memory holds rows of dtype, equally many of every rank; its epochs are the
 * caller's. */
static void make_legal(struct tuple *t, bool is_listed)
{
    if (t->value[TRANSFER] == 2) {
        t->value[WIRE] = 0;
        t->value[CHUNKING] = 1;
        t->value[GRAPH] = t->value[PLANS] = t->value[EPOCH] = 0;
    } else {
        t->value[WAIT] = 0;
    }
    if (t->value[ROWS] >= 6 && !is_listed) { /* many rows: not too much in each */
        t->value[HEADS] = t->value[HEADS] == 2 ? 1 : t->value[HEADS];
        t->value[DIMS] = t->value[DIMS] % 2 ? 0 : t->value[DIMS];
    }
}

static int64_t n_listed(const struct cofi_check_options *options)
{
    return options->cuda ? N_CUDA_LISTED : N_LISTED;
}

static struct tuple tuple_of(const struct cofi_check_options *options, int64_t idx)
{
    struct tuple t = {{0}};
    bool is_listed = idx < n_listed(options);
    if (is_listed) {
        t = parse(options->cuda ? cuda_listed[idx] : listed[idx]);
    } else {
        for (int f = 0; f < (options->cuda ? ROUNDS : N_CPU_FACTORS); f++)
            t.value[f] = (int)(cofi_check_random(17, (uint64_t)f, (uint64_t)idx) %
                               (uint64_t)factors[f].n);
    }
    make_legal(&t, is_listed);
    return t;
}

int64_t cofi_gr_n_cases(const struct cofi_check_options *options)
{
    return n_listed(options) + (options->full ? N_FULL : N_RANDOM);
}

void cofi_gr_case(const struct cofi_check_options *options, int64_t idx, struct cofi_gr_case *c)
{
    struct tuple t = tuple_of(options, idx);
    const int *v = t.value;
    const char *rows = factors[ROWS].value[v[ROWS]], *dims = factors[DIMS].value[v[DIMS]];
    *c = (struct cofi_gr_case){.params = COF_GRAD_RETURN_PARAMS_INIT};
    cof_grad_return_params *p = &c->params;
    p->dtype = v[DTYPE] == 2 ? COF_F16 : v[DTYPE] ? COF_F32 : COF_BF16;
    p->partial_f32 = v[PARTIAL];
    p->wire_f32 = v[WIRE];
    p->n_rows = rows[1] == 'P' ? 2 * options->n_ranks + atoi(rows + 2) : atoi(rows);
    p->n_batch = 1 + v[BATCH];
    p->n_heads = atoi(factors[HEADS].value[v[HEADS]]);
    p->head_dim_k = atoi(dims);
    p->head_dim_v = atoi(strchr(dims, '/') + 1);
    p->layout = (cof_layout_kind)v[LAYOUT];
    p->chunking = (cof_chunking)v[CHUNKING];
    p->transfer = v[TRANSFER] == 1 ? COF_TRANSFER_PULL : COF_TRANSFER_PUSH;
    p->by_section = v[BY];
    p->caller_orders_reuse = v[TRANSFER] == 2;
    c->writers = (cof_writers)v[WRITERS];
    c->padded_strides = v[STRIDES];
    c->integers = v[DATA];
    c->n_calls = v[CALLS] ? 3 : 1;
    c->random_delays = v[DELAY];
    c->n_rounds = v[ROUNDS] ? 340 : v[GRAPH] ? 6 : 2;
    c->is_captured = v[GRAPH];
    c->is_shared = v[PLANS];
    c->first_epoch = v[EPOCH] ? BEFORE_TURN : 1;
    p->driver_wait = v[WAIT];
    p->max_ctas = atoi(factors[CTAS].value[v[CTAS]]);
}

void cofi_gr_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                       size_t bytes)
{
    struct tuple t = tuple_of(options, idx);
    snprintf(line, bytes, "grad_return");
    for (int f = 0; f < (options->cuda ? N_FACTORS : N_CPU_FACTORS); f++)
        cofi_check_append(line, bytes, " %s=%s", factors[f].key, factors[f].value[t.value[f]]);
    if (idx >= n_listed(options))
        cofi_check_append(line, bytes, " case=%lld", (long long)(idx - n_listed(options)));
}
