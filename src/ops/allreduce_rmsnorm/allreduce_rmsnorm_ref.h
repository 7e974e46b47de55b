/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The references of allreduce_rmsnorm: a row at a time, serial, obviously right. One has the very
 * bits that the contract promises, the other the values in fp64. */
#ifndef COFI_ALLREDUCE_RMSNORM_REF_H
#define COFI_ALLREDUCE_RMSNORM_REF_H

#include <stdbool.h>

#include "cofuse/allreduce_rmsnorm.h"

/* Rows of `hidden` elements: x, residual and the results in dtype, weight in weight_dtype. Of the
 * params the plan's own rules are not checked. */
struct cofi_arn_ref {
    const cof_allreduce_rmsnorm_params *params;
    int n_ranks;
    const void *const *x; /* by rank */
    const void *residual; /* RESIDUAL_NORM */
    const void *weight;   /* not with ONLY */
};

/* The bits of both results; norm_out is left alone with ONLY. Each may be NULL. */
void cofi_arn_ref_bits(const struct cofi_arn_ref *ref, void *residual_out, void *norm_out);

/* Values before they are rounded as outputs. Sums that the policy rounds are rounded here too, so
 * `slack` says how far off a value may be because an fp32 sum near the middle between two numbers
 * was rounded to the other one, or because its terms cancel. */
struct cofi_arn_exact {
    double residual_out, residual_slack;
    double norm_out, norm_slack; /* NaN where squares leave the range of fp32, and with ONLY */
};

/* exact_out: `hidden` of them. */
void cofi_arn_ref_exact(const struct cofi_arn_ref *ref, struct cofi_arn_exact *exact_out);

/* Is `ours` as near as promised: 1 ulp of a 16-bit type, 2e-6 of an fp32 value, and the slack.
 * A value that is not finite, or that the type cannot hold, is left to the comparison of bits. */
bool cofi_arn_ref_is_near(double ours, double exact, double slack, cof_dtype dtype);

#endif
