/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What all plans have in common. An operator's plan begins with a struct cof_plan. */
#ifndef COFI_PLAN_H
#define COFI_PLAN_H

#include "cofuse/layout.h"
#include "cofuse/plan.h"
#include "core/error.h"

#define COFI_DESCRIBE_BYTES 512

struct cof_plan {
    const char *op;                    /* "attention" */
    void (*destroy)(cof_plan *plan);   /* frees all of it */
    cof_team *team;
    char describe[COFI_DESCRIBE_BYTES]; /* words of key=value, the first word is the operator */
};

/* Fills in the caller's struct, as long as it is; `full` has all but the size. */
cof_status cofi_workspace_write(cof_workspace_sizes *sizes, const cof_workspace_sizes *full);

/* Rows of the rank that has most. */
int64_t cofi_plan_max_rows(const cof_layout *layout);

/* COF_ERR_INVALID unless 63 bits hold the bytes of tensors [rows, n_batch, n_heads, head_dim], and
 * sums of a few of them: with the global rows, and with those of the rank that has most for every
 * rank. `layout->n_rows` is not negative, the others are at least 1. */
cof_status cofi_plan_check_size(const cof_layout *layout, int64_t n_batch, int64_t n_heads,
                                int64_t head_dim);

/* Collective: compares the description over the ranks, by hash, and by words where that differs.
 * `own` is what this rank's validation found; a rank with an error takes part, so that the others
 * return COF_ERR_MISMATCH (COF_ERR_NOMEM where it has that) naming it instead of waiting. */
cof_status cofi_plan_agree(cof_team *team, const char *op, cof_status own, const char *describe);

/* Collective like that where memory is refused: the others learn of it, in their cofi_plan_agree.
 * `bytes` of the operator's struct, zero but for its begin. */
cof_status cofi_plan_open(cof_team *team, const char *op, size_t bytes,
                          void (*destroy)(cof_plan *plan), cof_plan **plan_out);

/* The plan, or with a status that is not COF_OK NULL: then it is destroyed. Returns the status. */
cof_status cofi_plan_finish(cof_plan *plan, cof_status status, cof_plan **plan_out);

#endif
