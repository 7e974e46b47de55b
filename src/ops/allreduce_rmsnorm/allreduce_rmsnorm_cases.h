/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef COFI_ALLREDUCE_RMSNORM_CASES_H
#define COFI_ALLREDUCE_RMSNORM_CASES_H

#include "cofuse/allreduce_rmsnorm.h"
#include "ops/ops.h"

enum cofi_arn_data {
    COFI_ARN_NORMAL,
    COFI_ARN_INTEGER,
    COFI_ARN_OUTLIER,  /* one in each row: 75000; 300 in fp16 */
    COFI_ARN_SPECIAL,  /* rows with a NaN, of any bits, of subnormals, ordinary ones */
    COFI_ARN_ZERO,     /* of both signs */
    COFI_ARN_PATTERNS, /* every pattern of 16 bits from rank `set % P`, in a whole set of rows; the
                          other ranks have -0, in the second half of the sets normal numbers */
    COFI_ARN_EPOCHS    /* x: words that look like the epoch of a later call in the same buffers */
};

enum cofi_arn_layout {
    COFI_ARN_COMPACT,
    COFI_ARN_PITCHED, /* rows 16-byte aligned where H allows it, another pitch for each tensor */
    COFI_ARN_ODD,     /* odd pitches, and data aligned to one element only */
    COFI_ARN_3D,
    COFI_ARN_3D_PITCHED
};

enum cofi_arn_plans {
    COFI_ARN_ONE,
    COFI_ARN_SHARED, /* two by turns, in one arena */
    COFI_ARN_STREAMS /* two by turns, each with its own arena and stream */
};

enum { COFI_ARN_MAX_LIST = 12, COFI_ARN_MAX_SETS = 40 };

struct cofi_arn_case {
    cof_allreduce_rmsnorm_params params;
    bool wants_residual_out; /* with NORM too */
    enum cofi_arn_data data;
    enum cofi_arn_layout layout;
    enum cofi_arn_plans plans;
    bool alias_residual, alias_x, in_arena;
    bool now;           /* COF_STREAM_NOW */
    bool delays;        /* of a rank at random */
    bool is_captured;   /* a round of calls is a graph, replayed among eager rounds */
    bool is_random;     /* T is any number up to max_rows */
    uint32_t first_epoch; /* of the arena */
    int n_list;
    int64_t list[COFI_ARN_MAX_LIST]; /* T of call i: list[i % n_list] */
    int64_t max_rows;
    int64_t n_calls;    /* n_sets of them in flight */
    int n_sets;
    double max_error;   /* of norm_out against fp64 without roundings, with weights about 1; 0: not
                           asked */
};

int64_t cofi_arn_n_cases(const struct cofi_check_options *options);
void cofi_arn_case(const struct cofi_check_options *options, int64_t idx, struct cofi_arn_case *c);
void cofi_arn_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                        size_t bytes);

/* T of a call, the same on all ranks. */
int64_t cofi_arn_case_tokens(const struct cofi_arn_case *c, uint64_t seed, int64_t call);

#endif
