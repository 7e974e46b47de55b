/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The cases of `cofuse check trimul`, and the words with which check, bench and tool tell what is
 * to be run. */
#ifndef COFI_TRIMUL_CASES_H
#define COFI_TRIMUL_CASES_H

#include "cofuse/trimul.h"
#include "ops/ops.h"
#include "tools/option_table.h"

enum cofi_tm_inputs {
    COFI_TM_NORMAL,
    COFI_TM_INTEGER, /* norms that change nothing and open gates: integers all the way, exact */
    COFI_TM_CAUCHY,
    COFI_TM_LARGE, /* a and b of 16, of one sign for each feature: tri of fp16 would overflow */
    COFI_TM_NAN,   /* in one element of x */
    COFI_TM_INF
};
enum cofi_tm_masks { COFI_TM_NO_MASK, COFI_TM_BINARY, COFI_TM_REAL, COFI_TM_ZERO };
enum cofi_tm_biases { COFI_TM_NO_BIAS, COFI_TM_BIAS_OUT, COFI_TM_BIAS_ALL };
enum cofi_tm_residuals {
    COFI_TM_NO_RESIDUAL,
    COFI_TM_OWN,      /* a tensor of its own */
    COFI_TM_IS_X,     /* x */
    COFI_TM_IS_OUT,   /* written over by out */
    COFI_TM_IN_PLACE, /* x, which is written over by out */
};
enum cofi_tm_layouts {
    COFI_TM_COMPACT,
    COFI_TM_PITCHED,   /* gaps of odd sizes everywhere, odd offset */
    COFI_TM_TRANSPOSED /* views of tensors with rows and columns exchanged */
};
enum cofi_tm_calls {
    COFI_TM_FORWARD, /* a forward_only plan; each call, then each once more */
    COFI_TM_BACKWARD,
    COFI_TM_FLIGHT /* all forwards on a stream, then all backwards */
};

struct cofi_tm_case {
    struct cofi_ints n; /* N of the calls, one after the other */
    int64_t b, d, h;
    struct cofi_ints grid, rows, cols; /* grid {0, 0}: the plan's choice; offsets of EXPLICIT */
    int64_t chunk;
    int dtype, norm, mask_dtype; /* bf16, f16, f32; 1: fp32, of bench also 2: bf16, 3: f16 */
    int direction, shard, save, reduce, forward_only; /* as in cof_trimul_params */
    double eps_in, eps_out;                           /* 0: the default */
    int64_t told; /* of bench: words of a describe line that tell what the plan chose */
    /* of check alone */
    int bias, mask, residual, calls, grads, two_plans, data, layout, delays, epoch;
    int64_t mean; /* of a row of x */
};

/* Tables for cofi_option_read_line. */
extern const struct cofi_option cofi_tm_check_words[], cofi_tm_bench_words[];

/* The parameters of a plan for N of up to the largest. They point into the case. */
void cofi_tm_params(const struct cofi_tm_case *c, cof_trimul_params *params_out);
cof_dtype cofi_tm_dtype(const struct cofi_tm_case *c);
int64_t cofi_tm_max_n(const struct cofi_tm_case *c);
/* Operations of a call over all ranks, as they are counted in docs/trimul.md. */
double cofi_tm_flops(const struct cofi_tm_case *c, int64_t n, bool backward);

/* The same list on every rank and at every call; made once per rank count and kept. */
int64_t cofi_tm_n_cases(const struct cofi_check_options *options);
void cofi_tm_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                        size_t bytes);
void cofi_tm_case(const struct cofi_check_options *options, int64_t idx,
                   struct cofi_tm_case *case_out);

#endif
