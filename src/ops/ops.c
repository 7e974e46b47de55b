/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The table of operators of the program: one line each. */
#include "ops/ops.h"

extern const struct cofi_op cofi_op_runtime, cofi_op_attention, cofi_op_grad_return,
    cofi_op_allreduce_rmsnorm, cofi_op_trimul;

const struct cofi_op *const cofi_ops[] = {
    &cofi_op_runtime,
    &cofi_op_attention,
    &cofi_op_grad_return,
    &cofi_op_allreduce_rmsnorm,
    &cofi_op_trimul,
    NULL,
};
