/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The exact engine: kernels of our own, fp32 throughout. Takes every dense section of every type;
 * no workspace. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/cuda/device_cuda.h"
#include "ops/attention/attention_kernels_cuda.h"

struct cofi_attention_kernel {
    enum cofi_elem elem;
    unsigned n_blocks;
    struct cofi_exact_arguments arguments; /* all but the pointers */
};

/* INT64_MAX where there are more than that. */
static int64_t count_blocks(const struct cofi_attention_shape *s)
{
    int64_t n = (s->q_rows - 1) / COFI_EXACT_QUERIES + 1;
    if (__builtin_mul_overflow(n, s->n_heads, &n) || __builtin_mul_overflow(n, s->n_batch, &n))
        return INT64_MAX;
    return n;
}

static bool can(int device, const struct cofi_attention_shape *shape, char *why, size_t bytes)
{
    (void)device;
    if (shape->dim_qk > COFI_EXACT_MAX_DIM || shape->dim_v > COFI_EXACT_MAX_DIM)
        snprintf(why, bytes, "head dims %lld and %lld: wanted at most %d",
                 (long long)shape->dim_qk, (long long)shape->dim_v, COFI_EXACT_MAX_DIM);
    else if (count_blocks(shape) > INT32_MAX)
        snprintf(why, bytes,
                 "%lld query rows, %lld heads, batch %lld: wanted at most %lld rows in all",
                 (long long)shape->q_rows, (long long)shape->n_heads, (long long)shape->n_batch,
                 (long long)INT32_MAX * COFI_EXACT_QUERIES);
    else
        return true;
    return false;
}

static cof_status load(int device, const struct cofi_attention_shape *shape)
{
    struct cofi_cuda_scope scope;
    struct cudaFuncAttributes attributes;
    COF_TRY(cofi_cuda_enter(device, &scope));
    cudaError_t error =
        cudaFuncGetAttributes(&attributes, cofi_exact_kernel(shape->elem, shape->dim_v));
    cofi_cuda_leave(&scope);
    COF_CUDA(error);
    return COF_OK;
}

static cof_status open_kernel(int device, const struct cofi_attention_shape *shape,
                              struct cofi_attention_kernel **kernel_out,
                              size_t *workspace_bytes_out)
{
    char why[160];
    COF_FAIL_IF(!can(device, shape, why, sizeof why), COF_ERR_UNSUPPORTED, "engine exact: %s",
                why);
    COF_TRY(load(device, shape));
    struct cofi_attention_kernel *kernel = malloc(sizeof *kernel);
    COF_FAIL_IF(!kernel, COF_ERR_NOMEM, "engine exact: no memory");
    *kernel = (struct cofi_attention_kernel){
        .elem = shape->elem,
        .n_blocks = (unsigned)count_blocks(shape),
        .arguments = {
            .q_stride = shape->q, .k_stride = shape->k, .v_stride = shape->v, .o_stride = shape->o,
            .lse_batch = shape->lse_batch, .lse_head = shape->lse_head,
            .q_rows = shape->q_rows, .k_rows = shape->k_rows,
            .limits = cofi_exact_limits_of(&shape->band, shape->q_rows, shape->k_rows),
            .n_tiles = (int32_t)((shape->q_rows - 1) / COFI_EXACT_QUERIES + 1),
            .n_heads = (int32_t)shape->n_heads,
            .group = (int32_t)(shape->n_heads / shape->n_kv_heads),
            .dim_qk = (int32_t)shape->dim_qk, .dim_v = (int32_t)shape->dim_v,
            .scale = shape->scale, .o_f32 = shape->o_f32}};
    *kernel_out = kernel;
    *workspace_bytes_out = 0;
    return COF_OK;
}

static cof_status run(const struct cofi_attention_kernel *kernel, const void *q, const void *k,
                      const void *v, void *o, float *lse, void *workspace, void *stream)
{
    (void)workspace;
    struct cofi_exact_arguments arguments = kernel->arguments;
    arguments.q = q;
    arguments.k = k;
    arguments.v = v;
    arguments.o = o;
    arguments.lse = lse;
    COF_CUDA(cofi_exact_launch(kernel->elem, &arguments, kernel->n_blocks, stream));
    return COF_OK;
}

static void close_kernel(struct cofi_attention_kernel *kernel)
{
    free(kernel);
}

const struct cofi_attention_engine cofi_attention_exact = {
    .name = "exact", .can = can, .open = open_kernel, .run = run, .close = close_kernel};
