/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The tensors of one allreduce_rmsnorm call on a CUDA device. */
#ifndef COFUSE_TEST_CUDA_ALLREDUCE_H
#define COFUSE_TEST_CUDA_ALLREDUCE_H

#include "test_allreduce_rmsnorm.h"
#include "test_cuda.h"

#ifdef COFI_CUDA
/* The host's tensors and their copies, which calls get. */
struct test_cuda_arn {
    struct test_arn host;
    cof_tensor x, residual, weight, residual_out, norm_out;
    cof_allreduce_rmsnorm_args args;
};

static inline cof_tensor test_cuda_arn_tensor(const cof_tensor *host, size_t bytes, int device)
{
    cof_tensor t = *host;
    t.device = (cof_device){COF_DEVICE_CUDA, device};
    t.data = test_cuda_alloc(bytes);
    test_cuda_copy(t.data, host->data, bytes);
    return t;
}

/* Stays where it is: tensors point into it. */
static inline void test_cuda_arn_make(struct test_cuda_arn *t,
                                      const cof_allreduce_rmsnorm_params *params, int64_t n_tokens,
                                      const cof_world *world, int seed)
{
    int device = cof_world_device(world);
    test_arn_make(&t->host, params, n_tokens, cof_world_rank(world), cof_world_size(world), seed);
    const size_t bytes = test_arn_bytes(&t->host);
    cudaSetDevice(device);
    t->x = test_cuda_arn_tensor(&t->host.x, bytes, device);
    t->residual = test_cuda_arn_tensor(&t->host.residual, bytes, device);
    t->residual_out = test_cuda_arn_tensor(&t->host.residual_out, bytes, device);
    t->norm_out = test_cuda_arn_tensor(&t->host.norm_out, bytes, device);
    t->weight = test_cuda_arn_tensor(&t->host.weight, (size_t)params->hidden * sizeof(float),
                                     device);
    t->args = (cof_allreduce_rmsnorm_args){.size = sizeof t->args, .x = &t->x,
                                           .residual = &t->residual, .weight = &t->weight,
                                           .residual_out = &t->residual_out,
                                           .norm_out = &t->norm_out};
}

static inline void test_cuda_arn_free(struct test_cuda_arn *t)
{
    cof_tensor *all[] = {&t->x, &t->residual, &t->weight, &t->residual_out, &t->norm_out};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        cudaFree(all[i]->data);
    test_arn_free(&t->host);
}

static inline void test_cuda_arn_poison(struct test_cuda_arn *t)
{
    const size_t bytes = test_arn_bytes(&t->host);
    test_arn_poison(&t->host);
    test_cuda_copy(t->residual_out.data, t->host.residual_out.data, bytes);
    test_cuda_copy(t->norm_out.data, t->host.norm_out.data, bytes);
}

/* The outputs, to the host's tensors. */
static inline void test_cuda_arn_fetch(struct test_cuda_arn *t)
{
    const size_t bytes = test_arn_bytes(&t->host);
    test_cuda_copy(t->host.residual_out.data, t->residual_out.data, bytes);
    test_cuda_copy(t->host.norm_out.data, t->norm_out.data, bytes);
}
#endif

#endif
