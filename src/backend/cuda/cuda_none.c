/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* In the place of all that is CUDA's, where the build machine had no nvcc. */
#include "symm/engine.h"

const struct cofi_engine_ops *cofi_engine_cuda(void)
{
    return NULL;
}

const struct cofi_engine_ops *cofi_engine_cuda_attach(void)
{
    return NULL;
}

const struct cofi_device_ops *cofi_cuda_device(void)
{
    return NULL;
}
