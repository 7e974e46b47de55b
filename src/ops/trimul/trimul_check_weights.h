/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The twelve weights of trimul by number, for those who walk over them: checks, bench, tool. */
#ifndef COFI_TRIMUL_CHECK_WEIGHTS_H
#define COFI_TRIMUL_CHECK_WEIGHTS_H

#include <stdbool.h>

#include "ops/trimul/trimul.h"
#include "ops/trimul/trimul_ref.h"

struct cofi_tm_weight_info {
    const char *name; /* in a file: "p_in.weight" */
    bool is_required;
    char n_out, n_in; /* 'D', 'H', '2' for 2H; n_in 0: a vector */
    size_t in_weights, in_grads, in_ref, in_ref_grads; /* offsetof the pointer in each struct */
};
extern const struct cofi_tm_weight_info cofi_tm_weights[COFI_TRI_WEIGHTS];

/* Its dims; returns how many. */
int cofi_tm_weight_shape(int which, int64_t dim, int64_t hidden, int64_t shape_out[2]);
int64_t cofi_tm_weight_elements(int which, int64_t dim, int64_t hidden);

void cofi_tm_weights_bind(cof_trimul_weights *weights, int which, const cof_tensor *tensor);
void cofi_tm_grads_bind(cof_trimul_grads *grads, int which, const cof_tensor *tensor);
void cofi_tm_ref_bind(struct cofi_trimul_ref_weights *weights, int which, const double *data);
void cofi_tm_ref_grads_bind(struct cofi_trimul_ref_grads *grads, int which, double *data);

#endif
