/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The global side of a case: inputs, reference and plain results of whole tensors, in the memory
 * all ranks share, made by all of them together. */
#ifndef COFI_ATTENTION_CHECK_DATA_H
#define COFI_ATTENTION_CHECK_DATA_H

#include "ops/attention/attention_cases.h"
#include "ops/attention/attention_ref.h"

enum { COFI_ATTENTION_RANGES = 160 };

/* Ranges of rows to compute. */
struct cofi_attention_ranges {
    int n;
    int64_t begin[COFI_ATTENTION_RANGES], end[COFI_ATTENTION_RANGES];
};

/* Largest values of the inputs and of |lse|: what errors of sums that cancel are held against. */
enum { COFI_MAX_ROW_Q, COFI_MAX_ROW_K, COFI_MAX_ROW_V, COFI_MAX_ROW_DOUT, /* 2-norms of rows */
       COFI_MAX_ABS_Q, COFI_MAX_ABS_K, COFI_MAX_LSE, COFI_N_MAXIMA };

/* One microbatch. */
struct cofi_attention_data {
    struct cofi_attention_problem problem; /* views of compact [B, S, H, D] */
    struct cofi_attention_ref ref;
    struct cofi_attention_plain plain;
    double maxima[COFI_N_MAXIMA];
    struct cofi_attention_ranges all, compared; /* all rows; those whose results are compared */
};

/* Shared bytes of a case, all its microbatches. */
size_t cofi_attention_data_bytes(const struct cofi_attention_case *c);

/* Fills the inputs and computes the results; collective. `micro` is the microbatch. */
cof_status cofi_attention_data_make(const struct cofi_job *job,
                                    const struct cofi_attention_case *c, uint64_t seed, int micro,
                                    struct cofi_attention_data *data);

#endif
