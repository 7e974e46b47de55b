/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef COFI_GRAD_RETURN_CASES_H
#define COFI_GRAD_RETURN_CASES_H

#include "cofuse/grad_return.h"
#include "ops/ops.h"

struct cofi_gr_case {
    cof_grad_return_params params; /* peers is set where the case runs */
    cof_writers writers;
    bool padded_strides, integers, random_delays;
    int n_calls; /* in flight at once, unless the caller orders reuse */
    int n_rounds;
    bool is_captured, is_shared; /* in a graph; two plans on one arena, by turns */
    uint32_t first_epoch;
};

int64_t cofi_gr_n_cases(const struct cofi_check_options *options);
void cofi_gr_case(const struct cofi_check_options *options, int64_t idx, struct cofi_gr_case *c);
void cofi_gr_case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                       size_t bytes);

#endif
