/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What one rank does in a forward call that computes section by section and merges the results: the
 * fetches, the sections (jobs), and which rows of the results lie where in between. Made once, when
 * a plan is; no device is needed for it. */
#ifndef COFI_ATTENTION_STEPS_H
#define COFI_ATTENTION_STEPS_H

#include "ops/attention/attention.h"

/* Rows of an owner's keys that come: one range behind the other in a receive slot, where the owner
 * puts them. In gather this rank fetches them, a range to row `to` of a buffer that has all rows of
 * the sequence. */
struct cofi_attention_fetch {
    int owner, n_ranges;
    struct cofi_rows_range rows[2]; /* local rows of the owner */
    int64_t to[2];                  /* row of the buffer */
};

/* Query rows against key rows: local rows of both where step = 0, in which the keys are the rank's
 * own; in step i the key rows are those of the slot that has fetch i-1. In gather there is one
 * step, 1, when all fetches have arrived. */
struct cofi_attention_job {
    int step;
    bool is_first; /* its result is stored as that of its rows; else merged with what there is */
    struct cofi_pair pair;
    int first_merge, n_merges; /* together all its query rows */
};

/* Rows with the same past and future: what was merged so far lies in o at first, then in the fp32
 * accumulator, and at last in o. */
struct cofi_attention_merged {
    int64_t begin, rows; /* local query rows */
    bool from_acc, to_acc;
};

struct cofi_attention_steps {
    int n_fetches, n_jobs, n_merged;
    struct cofi_attention_fetch *fetches;
    struct cofi_attention_job *jobs; /* in order of their steps */
    struct cofi_attention_merged *merged;
    int64_t buffer_rows;  /* of one fetch at most; in gather: of the sequence */
    int64_t partial_rows; /* query rows of a job that is merged, at most; 0: nothing is merged */
    bool has_acc;
};

struct cofi_attention_steps_spec {
    cof_layout layout;
    struct cofi_sight sight;
    int rank;
    bool gathers;
    bool is_exact; /* results lie in fp32 anyway: no accumulator */
};

/* COF_ERR_NOMEM: nothing is kept. */
cof_status cofi_attention_steps_make(const struct cofi_attention_steps_spec *spec,
                                     struct cofi_attention_steps *steps_out);
void cofi_attention_steps_free(struct cofi_attention_steps *steps); /* of none too */

#endif
