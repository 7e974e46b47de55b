/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm in a build without CUDA. */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"

const struct cofi_arn_backend *cofi_arn_cuda(void)
{
    return NULL;
}
