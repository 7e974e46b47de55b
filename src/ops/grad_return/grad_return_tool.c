/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/ops.h"

extern const struct cofi_op_check cofi_grad_return_check;

const struct cofi_op cofi_op_grad_return = {
    .name = "grad_return",
    .summary = "return of gradients to the owners of their rows",
    .check = &cofi_grad_return_check,
};
