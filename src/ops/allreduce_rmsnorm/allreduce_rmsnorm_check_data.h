/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What goes into the calls of a case and must come out of them. A set is one call's tensors; a row
 * is made by index alone, so any rank can tell what another has. */
#ifndef COFI_ALLREDUCE_RMSNORM_CHECK_DATA_H
#define COFI_ALLREDUCE_RMSNORM_CHECK_DATA_H

#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_cases.h"

struct cofi_arn_source {
    const struct cofi_arn_case *c;
    uint64_t seed;
    int n_ranks;
};

/* Rows of H elements, compact, in dtype (weight: in its own). */
void cofi_arn_make_x(const struct cofi_arn_source *source, int set, int rank, int64_t row,
                     void *dst);
void cofi_arn_make_residual(const struct cofi_arn_source *source, int set, int64_t row, void *dst);
void cofi_arn_make_weight(const struct cofi_arn_source *source, void *dst);

/* The results that all ranks must have, set by set: max_rows compact rows of residual_out, then as
 * many of norm_out. */
size_t cofi_arn_expected_bytes(const struct cofi_arn_case *c);
const char *cofi_arn_expected(const struct cofi_arn_case *c, const void *shared, int set,
                              bool is_norm);

/* Fills the job's shared memory with them, by the reference of the bits, and holds them against the
 * reference in fp64. Collective. */
cof_status cofi_arn_expect(const struct cofi_job *job, const struct cofi_arn_source *source,
                           struct cofi_check_result *result);

#endif
