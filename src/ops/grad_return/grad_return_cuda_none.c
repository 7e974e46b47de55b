/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return in a build without CUDA. */
#include "ops/grad_return/grad_return.h"

const struct cofi_gr_backend *cofi_gr_cuda(void)
{
    return NULL;
}
