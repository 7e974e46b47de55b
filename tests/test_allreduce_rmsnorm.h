/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The tensors of one allreduce_rmsnorm call in fp32. Values follow from their place, so that any
 * rank knows every bit of the outputs. */
#ifndef COFUSE_TEST_ALLREDUCE_RMSNORM_H
#define COFUSE_TEST_ALLREDUCE_RMSNORM_H

#include <math.h>
#include <stdbool.h>

#include "test.h"

enum { TEST_ARN_SEGMENT = 256, TEST_ARN_MAX_HIDDEN = 32768, TEST_ARN_TENSORS = 5 };

struct test_arn {
    cof_allreduce_rmsnorm_params params;
    int rank, n_ranks, seed;
    int64_t n_tokens, pitch; /* pitch of x, residual and outputs, elements */
    void *owned[TEST_ARN_TENSORS]; /* memory of the tensors, whatever a test makes of them */
    cof_shape shape, weight_shape;
    int64_t strides[2];
    cof_tensor x, residual, weight, residual_out, norm_out;
    cof_allreduce_rmsnorm_args args;
};

static inline cof_allreduce_rmsnorm_params test_arn_params(int64_t hidden, int64_t max_tokens)
{
    cof_allreduce_rmsnorm_params p = COF_ALLREDUCE_RMSNORM_PARAMS_INIT;
    p.dtype = COF_F32;
    p.hidden = hidden;
    p.max_tokens = max_tokens;
    p.eps = 1e-5f;
    return p;
}

static inline float test_arn_value(int seed, int who, int64_t row, int64_t h)
{
    uint32_t x = (uint32_t)(seed * 31 + who) * 2654435761u + (uint32_t)row * 40503u + (uint32_t)h;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    return (float)(int32_t)x * 0x1p-31f;
}

enum { TEST_ARN_RESIDUAL = 100, TEST_ARN_WEIGHT };

static inline void test_arn_fill(struct test_arn *t)
{
    float *x = t->x.data, *residual = t->residual.data;
    for (int64_t row = 0; row < t->n_tokens; row++)
        for (int64_t h = 0; h < t->params.hidden; h++) {
            x[row * t->pitch + h] = test_arn_value(t->seed, t->rank, row, h);
            residual[row * t->pitch + h] = test_arn_value(t->seed, TEST_ARN_RESIDUAL, row, h);
        }
    for (int64_t h = 0; h < t->params.hidden; h++)
        ((float *)t->weight.data)[h] = test_arn_value(t->seed, TEST_ARN_WEIGHT, 0, h);
}

/* Bytes of one of the tensors of rows. */
static inline size_t test_arn_bytes(const struct test_arn *t)
{
    return (size_t)(t->n_tokens * t->pitch) * sizeof(float);
}

static inline void test_arn_poison(struct test_arn *t)
{
    memset(t->residual_out.data, 0x5a, test_arn_bytes(t));
    memset(t->norm_out.data, 0x5a, test_arn_bytes(t));
}

static inline cof_tensor test_arn_rows(struct test_arn *t)
{
    cof_device cpu = {COF_DEVICE_CPU, 0};
    cof_tensor rows = cof_tensor_make(malloc(test_arn_bytes(t) + 64), cpu, COF_F32, 2, &t->shape);
    rows.strides = t->strides;
    return rows;
}

static inline void test_arn_make(struct test_arn *t, const cof_allreduce_rmsnorm_params *p,
                                 int64_t n_tokens, int rank, int n_ranks, int seed)
{
    *t = (struct test_arn){.params = *p, .rank = rank, .n_ranks = n_ranks, .seed = seed,
                           .n_tokens = n_tokens, .pitch = p->hidden + 3,
                           .shape = {{n_tokens, p->hidden}}, .weight_shape = {{p->hidden}}};
    t->strides[0] = t->pitch;
    t->strides[1] = 1;
    t->x = test_arn_rows(t);
    t->residual = test_arn_rows(t);
    t->residual_out = test_arn_rows(t);
    t->norm_out = test_arn_rows(t);
    t->weight = cof_tensor_make(malloc((size_t)p->hidden * sizeof(float)),
                                (cof_device){COF_DEVICE_CPU, 0}, COF_F32, 1, &t->weight_shape);
    const cof_tensor *tensors[] = {&t->x, &t->residual, &t->residual_out, &t->norm_out, &t->weight};
    for (int i = 0; i < TEST_ARN_TENSORS; i++)
        t->owned[i] = tensors[i]->data;
    test_arn_fill(t);
    test_arn_poison(t);
    t->args = (cof_allreduce_rmsnorm_args){.size = sizeof t->args, .x = &t->x};
    t->args.residual = p->variant == COF_ALLREDUCE_RESIDUAL_NORM ? &t->residual : NULL;
    t->args.weight = p->variant != COF_ALLREDUCE_ONLY ? &t->weight : NULL;
    t->args.norm_out = p->variant != COF_ALLREDUCE_ONLY ? &t->norm_out : NULL;
    t->args.residual_out = &t->residual_out;
}

static inline void test_arn_free(struct test_arn *t)
{
    for (int i = 0; i < TEST_ARN_TENSORS; i++)
        free(t->owned[i]);
}

static inline float test_arn_tree(const float *x, int n)
{
    return n == 1 ? x[0] : test_arn_tree(x, n / 2) + test_arn_tree(x + n / 2, n / 2);
}

/* One row as it shall be; one operation a statement, so that nothing is contracted. */
static inline void test_arn_row(const struct test_arn *t, int64_t row, float *z, float *norm)
{
    float total = 0;
    for (int64_t i = 0; i < t->params.hidden; i += TEST_ARN_SEGMENT) {
        float squares[TEST_ARN_SEGMENT] = {0};
        for (int64_t h = i; h < t->params.hidden && h < i + TEST_ARN_SEGMENT; h++) {
            z[h] = test_arn_value(t->seed, 0, row, h);
            for (int r = 1; r < t->n_ranks; r++)
                z[h] += test_arn_value(t->seed, r, row, h);
            if (t->params.variant == COF_ALLREDUCE_RESIDUAL_NORM)
                z[h] += test_arn_value(t->seed, TEST_ARN_RESIDUAL, row, h);
            squares[h - i] = z[h] * z[h];
        }
        total += test_arn_tree(squares, TEST_ARN_SEGMENT);
    }
    float mean = total / (float)t->params.hidden, inv = 1.0f / sqrtf(mean + t->params.eps);
    for (int64_t h = 0; h < t->params.hidden; h++) {
        float scaled = z[h] * inv;
        norm[h] = scaled * test_arn_value(t->seed, TEST_ARN_WEIGHT, 0, h);
    }
}

/* How many elements of the outputs, or of what lies between rows, have other bits than they
 * should. Rows of an output that is an input too have that input's elements between them. */
static inline int64_t test_arn_wrong(const struct test_arn *t)
{
    float z[TEST_ARN_MAX_HIDDEN], norm[TEST_ARN_MAX_HIDDEN];
    const cof_tensor *out[2] = {t->args.residual_out, t->args.norm_out};
    int64_t n_wrong = 0;
    for (int64_t row = 0; row < t->n_tokens; row++) {
        test_arn_row(t, row, z, norm);
        for (int i = 0; i < 2; i++) {
            const float *got = out[i] ? (float *)out[i]->data + row * t->pitch : NULL;
            for (int64_t h = 0; h < t->params.hidden && got; h++)
                n_wrong += memcmp(&got[h], i ? &norm[h] : &z[h], sizeof *got) != 0;
            for (int64_t h = t->params.hidden; h < t->pitch && got; h++)
                n_wrong += (out[i] == &t->residual_out || out[i] == &t->norm_out) &&
                           memcmp(&got[h], "ZZZZ", 4) != 0;
        }
    }
    return n_wrong;
}

static inline bool test_arn_all_nan(const struct test_arn *t)
{
    const cof_tensor *out[2] = {t->args.residual_out, t->args.norm_out};
    for (int i = 0; i < 2; i++)
        for (int64_t row = 0; row < t->n_tokens && out[i]; row++)
            for (int64_t h = 0; h < t->params.hidden; h++)
                if (!isnan(((float *)out[i]->data)[row * t->pitch + h]))
                    return false;
    return true;
}

/* Nothing was stored since test_arn_poison. */
static inline bool test_arn_untouched(const struct test_arn *t)
{
    const unsigned char *out[2] = {t->residual_out.data, t->norm_out.data};
    for (int i = 0; i < 2; i++)
        for (size_t at = 0; at < test_arn_bytes(t); at++)
            if (out[i][at] != 0x5a)
                return false;
    return true;
}

#endif
