/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The twelve weights of trimul by number, for those who walk over them: checks, bench, tool. */
#ifndef COFI_TRIMUL_CHECK_WEIGHTS_H
#define COFI_TRIMUL_CHECK_WEIGHTS_H

#include <stdbool.h>

#include "cofuse/trimul.h"
#include "ops/trimul/trimul_ref.h"

enum cofi_tri_weight {
    COFI_TRI_NORM_IN_W, COFI_TRI_NORM_IN_B, COFI_TRI_P_IN, COFI_TRI_P_IN_B,
    COFI_TRI_G_IN, COFI_TRI_G_IN_B, COFI_TRI_NORM_OUT_W, COFI_TRI_NORM_OUT_B,
    COFI_TRI_P_OUT, COFI_TRI_P_OUT_B, COFI_TRI_G_OUT, COFI_TRI_G_OUT_B, COFI_TRI_WEIGHTS
};

struct cofi_tri_weight_info {
    const char *name; /* in a file: "p_in.weight" */
    bool is_norm, is_required;
    char n_out, n_in; /* 'D', 'H', '2' for 2H; n_in 0: a vector */
    size_t in_weights, in_grads, in_ref, in_ref_grads; /* offsetof the pointer in each struct */
};
extern const struct cofi_tri_weight_info cofi_tri_weights[COFI_TRI_WEIGHTS];

/* Its dims; returns how many. */
int cofi_tri_weight_shape(int which, int64_t dim, int64_t hidden, int64_t shape_out[2]);
int64_t cofi_tri_weight_elements(int which, int64_t dim, int64_t hidden);

void cofi_tri_weights_bind(cof_trimul_weights *weights, int which, const cof_tensor *tensor);
void cofi_tri_grads_bind(cof_trimul_grads *grads, int which, const cof_tensor *tensor);
void cofi_tri_ref_bind(struct cofi_trimul_ref_weights *weights, int which, const double *data);
void cofi_tri_ref_grads_bind(struct cofi_trimul_ref_grads *grads, int which, double *data);

#endif
