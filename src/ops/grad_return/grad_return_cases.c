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
    STRIDES, DATA, CALLS, DELAY, N_FACTORS
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
enum { N_LISTED = sizeof listed / sizeof listed[0], N_RANDOM = 60, N_FULL = 1000 };

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

/* The caller's memory holds rows of dtype, equally many of every rank. */
static void make_legal(struct tuple *t)
{
    if (t->value[TRANSFER] == 2) {
        t->value[WIRE] = 0;
        t->value[CHUNKING] = 1;
    }
    if (t->value[ROWS] >= 6) { /* many rows: not too much in each */
        t->value[HEADS] = t->value[HEADS] == 2 ? 1 : t->value[HEADS];
        t->value[DIMS] = t->value[DIMS] % 2 ? 0 : t->value[DIMS];
    }
}

static struct tuple tuple_of(int64_t idx)
{
    struct tuple t = {{0}};
    if (idx < N_LISTED) {
        t = parse(listed[idx]);
    } else {
        for (int f = 0; f < N_FACTORS; f++)
            t.value[f] = (int)(cofi_check_random(17, (uint64_t)f, (uint64_t)idx) %
                               (uint64_t)factors[f].n);
    }
    make_legal(&t);
    return t;
}

int64_t cofi_gr_n_cases(const struct cofi_check_options *options)
{
    return N_LISTED + (options->full ? N_FULL : N_RANDOM);
}

void cofi_gr_case(const struct cofi_check_options *options, int64_t idx, struct cofi_gr_case *c)
{
    struct tuple t = tuple_of(idx);
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
}

void cofi_gr_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                       size_t bytes)
{
    (void)options;
    struct tuple t = tuple_of(idx);
    snprintf(line, bytes, "grad_return");
    for (int f = 0; f < N_FACTORS; f++)
        cofi_check_append(line, bytes, " %s=%s", factors[f].key, factors[f].value[t.value[f]]);
    if (idx >= N_LISTED)
        cofi_check_append(line, bytes, " case=%lld", (long long)(idx - N_LISTED));
}
