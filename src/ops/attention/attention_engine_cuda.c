/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which engine computes a section, and the sections of a plan. */
#include "ops/attention/attention_engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/device_cuda.h"
#include "core/config.h"
#include "ops/attention/attention_kernels_cuda.h"

/* Best first; the last one takes every shape. */
static const struct cofi_attention_engine *const engines[] = {
    &cofi_attention_cudnn,
    &cofi_attention_exact,
};
enum { N_ENGINES = sizeof engines / sizeof engines[0] };

const struct cofi_attention_engine *cofi_attention_engine_at(int idx)
{
    return idx >= 0 && idx < N_ENGINES ? engines[idx] : NULL;
}

cof_status cofi_attention_engine_choose(int device, const struct cofi_attention_shape *shape,
                                        const struct cofi_attention_engine **engine_out)
{
    const char *wanted = cofi_config_text(COFI_VAR_ATTENTION_ENGINE);
    char why[400] = "it is not in this build";
    for (int i = 0; i < N_ENGINES; i++) {
        if (strcmp(wanted, "auto") && strcmp(wanted, engines[i]->name))
            continue;
        if (engines[i]->can(device, shape, why, sizeof why)) {
            *engine_out = engines[i];
            return COF_OK;
        }
    }
    return COF_FAIL(COF_ERR_UNSUPPORTED, "variable COFUSE_ATTENTION_ENGINE = %s: %s", wanted, why);
}

/* ---- the sections of a plan ----------------------------------------------------------------- */

struct cofi_attention_opened {
    struct cofi_attention_shape shape;
    const struct cofi_attention_engine *engine;
    struct cofi_attention_kernel *kernel;
};

static bool same_strides(const struct cofi_attention_strides *a,
                         const struct cofi_attention_strides *b)
{
    return a->batch == b->batch && a->row == b->row && a->head == b->head;
}

/* Member by member: there may be anything between them. */
static bool same_shape(const struct cofi_attention_shape *a, const struct cofi_attention_shape *b)
{
    return a->elem == b->elem && a->o_f32 == b->o_f32 && a->n_batch == b->n_batch &&
           a->n_heads == b->n_heads && a->n_kv_heads == b->n_kv_heads &&
           a->dim_qk == b->dim_qk && a->dim_v == b->dim_v && a->q_rows == b->q_rows &&
           a->k_rows == b->k_rows && a->band.diag == b->band.diag &&
           a->band.left == b->band.left && a->band.right == b->band.right &&
           a->scale == b->scale && same_strides(&a->q, &b->q) && same_strides(&a->k, &b->k) &&
           same_strides(&a->v, &b->v) && same_strides(&a->o, &b->o) &&
           a->lse_batch == b->lse_batch && a->lse_head == b->lse_head;
}

/* So that no launch of a captured call is the first of its kernel, which loads it: all merges of
 * the data type. */
static cof_status load_merges(int device, enum cofi_elem elem)
{
    struct cofi_cuda_scope scope;
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    COF_TRY(cofi_cuda_enter(device, &scope));
    for (int f32 = 0; f32 < 8 && error == cudaSuccess; f32++) {
        const struct cofi_attention_merge merge = {.elem = elem, .a.o_f32 = f32 & 1,
                                                   .b.o_f32 = f32 >> 1 & 1, .o_f32 = f32 >> 2};
        error = cudaFuncGetAttributes(&attributes, cofi_merge_kernel(&merge));
    }
    cofi_cuda_leave(&scope);
    COF_CUDA(error);
    return COF_OK;
}

cof_status cofi_attention_kernels_open(struct cofi_attention_kernels *kernels,
                                       const struct cofi_attention_shape *shape, int *idx_out)
{
    for (int i = 0; i < kernels->n; i++)
        if (same_shape(&kernels->opened[i].shape, shape)) {
            *idx_out = i;
            return COF_OK;
        }
    struct cofi_attention_opened *more =
        realloc(kernels->opened, (size_t)(kernels->n + 1) * sizeof *more);
    COF_FAIL_IF(!more, COF_ERR_NOMEM, "attention plan: no memory for its sections");
    kernels->opened = more;
    struct cofi_attention_opened opened = {.shape = *shape};
    size_t bytes = 0;
    COF_TRY(load_merges(kernels->device, shape->elem));
    COF_TRY(cofi_attention_engine_choose(kernels->device, shape, &opened.engine));
    COF_TRY(opened.engine->open(kernels->device, shape, &opened.kernel, &bytes));
    if (bytes > kernels->workspace_bytes)
        kernels->workspace_bytes = bytes;
    more[kernels->n] = opened;
    *idx_out = kernels->n++;
    return COF_OK;
}

cof_status cofi_attention_kernels_run(const struct cofi_attention_kernels *kernels, int idx,
                                      const void *q, const void *k, const void *v, void *o,
                                      float *lse, void *workspace, void *stream)
{
    const struct cofi_attention_opened *opened = &kernels->opened[idx];
    return opened->engine->run(opened->kernel, q, k, v, o, lse, workspace, stream);
}

const char *cofi_attention_kernels_engine(const struct cofi_attention_kernels *kernels, int idx)
{
    return kernels->opened[idx].engine->name;
}

void cofi_attention_kernels_close(struct cofi_attention_kernels *kernels)
{
    for (int i = 0; i < kernels->n; i++)
        kernels->opened[i].engine->close(kernels->opened[i].kernel);
    free(kernels->opened);
    *kernels = (struct cofi_attention_kernels){.device = kernels->device};
}
