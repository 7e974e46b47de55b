/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* attention in a build without CUDA. */
#include "ops/attention/attention.h"

const struct cofi_attention_backend *cofi_attention_cuda(void)
{
    return NULL;
}
