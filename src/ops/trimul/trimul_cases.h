/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The cases of `cofuse check trimul`, and the words with which check, bench and tool tell what is
 * to be run. */
#ifndef COFI_TRIMUL_CASES_H
#define COFI_TRIMUL_CASES_H

#include "cofuse/trimul.h"
#include "ops/ops.h"
#include "tools/option_table.h"

enum cofi_tri_inputs {
    COFI_TRI_NORMAL,
    COFI_TRI_INTEGER, /* norms that change nothing and open gates: integers all the way, exact */
    COFI_TRI_CAUCHY,
    COFI_TRI_LARGE, /* a and b of 16, of one sign for each feature: tri of fp16 would overflow */
    COFI_TRI_NAN,   /* in one element of x */
    COFI_TRI_INF
};
enum cofi_tri_masks { COFI_TRI_NO_MASK, COFI_TRI_BINARY, COFI_TRI_REAL, COFI_TRI_ZERO };
enum cofi_tri_biases { COFI_TRI_NO_BIAS, COFI_TRI_BIAS_OUT, COFI_TRI_BIAS_ALL };
enum cofi_tri_residuals {
    COFI_TRI_NO_RESIDUAL,
    COFI_TRI_OWN,      /* a tensor of its own */
    COFI_TRI_IS_X,     /* x */
    COFI_TRI_IS_OUT,   /* written over by out */
    COFI_TRI_IN_PLACE, /* x, which is written over by out */
};
enum cofi_tri_layouts {
    COFI_TRI_COMPACT,
    COFI_TRI_PITCHED,   /* gaps of odd sizes everywhere, odd offset */
    COFI_TRI_TRANSPOSED /* views of tensors with rows and columns exchanged */
};
enum cofi_tri_calls {
    COFI_TRI_FORWARD, /* a forward_only plan; each call, then each once more */
    COFI_TRI_BACKWARD,
    COFI_TRI_FLIGHT /* all forwards on a stream, then all backwards */
};

struct cofi_tri_case {
    struct cofi_ints n; /* N of the calls, one after the other */
    int64_t b, d, h;
    struct cofi_ints grid, rows, cols; /* grid {0, 0}: the plan's choice; offsets of EXPLICIT */
    int64_t chunk;
    int dtype, norm, mask_dtype; /* bf16, f16, f32; 1: fp32 */
    int direction, shard, save, reduce, forward_only; /* as in cof_trimul_params */
    double eps_in, eps_out;                           /* 0: the default */
    /* of check alone */
    int bias, mask, residual, calls, grads, two_plans, data, layout, delays, epoch;
    int64_t mean; /* of a row of x */
};

/* Tables for cofi_option_read_line. */
extern const struct cofi_option cofi_tri_check_words[], cofi_tri_bench_words[];

/* The parameters of a plan for N of up to the largest. They point into the case. */
void cofi_tri_params(const struct cofi_tri_case *c, cof_trimul_params *params_out);
cof_dtype cofi_tri_dtype(const struct cofi_tri_case *c);
int64_t cofi_tri_max_n(const struct cofi_tri_case *c);
/* Operations of a call over all ranks, as they are counted in docs/trimul.md. */
double cofi_tri_flops(const struct cofi_tri_case *c, int64_t n, bool backward);

/* The same list on every rank and at every call; made once per rank count and kept. */
int64_t cofi_tri_n_cases(const struct cofi_check_options *options);
void cofi_tri_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                        size_t bytes);
void cofi_tri_case(const struct cofi_check_options *options, int64_t idx,
                   struct cofi_tri_case *case_out);

#endif
