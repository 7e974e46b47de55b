/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What tests on CUDA devices share. In a build without CUDA it has a main, which skips the test. */
#ifndef COFUSE_TEST_CUDA_H
#define COFUSE_TEST_CUDA_H

#include "test.h"

#ifdef COFI_CUDA
#include <cuda_runtime_api.h>

/* Says so where there is none. */
static inline int test_cuda_devices(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 1) {
        printf("# no CUDA device\n");
        return 0;
    }
    return n;
}

static inline void test_cuda_copy(void *dst, const void *src, size_t bytes)
{
    cudaError_t error = cudaMemcpy(dst, src, bytes, cudaMemcpyDefault);
    CHECK(error == cudaSuccess, "cudaMemcpy: %s", cudaGetErrorString(error));
}

/* On the current device. */
static inline void *test_cuda_alloc(size_t bytes)
{
    void *data = NULL;
    cudaError_t error = cudaMalloc(&data, bytes);
    CHECK(error == cudaSuccess, "cudaMalloc: %s", cudaGetErrorString(error));
    return data;
}
#else
int main(void)
{
    printf("# built without CUDA\n");
    return 77;
}
#endif

#endif
