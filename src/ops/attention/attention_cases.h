/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The cases of `cofuse check attention`: factors, their values, and which combinations are run. */
#ifndef COFI_ATTENTION_CASES_H
#define COFI_ATTENTION_CASES_H

#include "ops/ops.h"

enum cofi_attention_inputs {
    COFI_DATA_NORMAL,
    COFI_DATA_INTEGER, /* every query sees one key with probability 1: results are exact */
    COFI_DATA_LOGITS,  /* scores of tens */
    COFI_DATA_NAN_K,   /* one NaN in one key row; forward only, as those below */
    COFI_DATA_NAN_V,
    COFI_DATA_INF_V,
    COFI_DATA_NAN_Q
};

/* On CUDA devices, where plans are forward_only, without the backwards. */
enum cofi_attention_calls {
    COFI_CALLS_FORWARD,  /* a forward_only plan */
    COFI_CALLS_BACKWARD, /* forward, backward; and both once more */
    COFI_CALLS_TWO,      /* two forwards in flight on one stream, then both backwards */
    COFI_CALLS_REPEAT,   /* forward 20 times */
    COFI_CALLS_MANY,     /* forward 1000 times */
    COFI_CALLS_GRAPH     /* forward, then 20 times as a graph or eager, by turns; CUDA */
};

struct cofi_attention_case {
    cof_attention_params params;
    enum cofi_attention_inputs data;
    enum cofi_attention_calls calls;
    bool padded_strides; /* gaps between rows, heads and batch entries; odd byte offset */
    bool random_delays;  /* each rank sleeps before its calls */
};

/* Rows above it are sampled, not all compared. */
#define COFI_ATTENTION_SAMPLE_ROWS 8192

static inline bool cofi_attention_case_has_backward(const struct cofi_attention_case *c)
{
    return !c->params.forward_only &&
           (c->calls == COFI_CALLS_BACKWARD || c->calls == COFI_CALLS_TWO);
}

/* The same list on every rank and at every call; made once per rank count and kept. */
int64_t cofi_attention_n_cases(const struct cofi_check_options *options);
void cofi_attention_case(const struct cofi_check_options *options, int64_t idx,
                         struct cofi_attention_case *case_out);
void cofi_attention_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                              size_t bytes);

#endif
