/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The reference of trimul, the triangle multiplicative update: whole (global) tensors, fp64,
 * serial, straight from the formulas. The letters are those of the loops in trimul_ref.c:
 *
 *   B   batch entries                        i, j   row and column of a pair, 0 .. N-1
 *   N   rows and columns of the pairs        k      the index that is summed over, 0 .. N-1
 *   D   width of a pair (dim)                d, e   0 .. D-1
 *   H   features of a and b (hidden)         h      0 .. H-1; c is 0 .. 2H-1
 *
 * Tensors are compact, in C order. Sizes are at least 1 and are not checked.
 * Compiled into the program and the tests, never into the library. */
#ifndef COFI_TRIMUL_REF_H
#define COFI_TRIMUL_REF_H

#include <stdbool.h>
#include <stdint.h>

#include "cofuse/status.h"

/* Weights follow nn.Linear, (out, in). Rows of p_in and g_in, and their biases, are stacked: H of
 * a, then H of b. A gain (norm_in_w, norm_out_w) may be NULL for ones, a bias (_b) for zeros. */
struct cofi_trimul_ref_weights {
    const double *norm_in_w, *norm_in_b;   /* [D] */
    const double *p_in, *p_in_b;           /* [2H, D], [2H] */
    const double *g_in, *g_in_b;           /* [2H, D], [2H] */
    const double *norm_out_w, *norm_out_b; /* [H] */
    const double *p_out, *p_out_b;         /* [D, H], [D] */
    const double *g_out, *g_out_b;         /* [D, D], [D] */
};

struct cofi_trimul_ref_problem {
    int64_t n_batch, n, dim, hidden; /* B, N, D, H */
    bool incoming;
    double eps_in, eps_out;
    const double *x;        /* [B, N, N, D] */
    const double *mask;     /* [B, N, N]; NULL: ones. 0 times NaN is NaN */
    const double *residual; /* [B, N, N, D], may be x; NULL: zeros */
    struct cofi_trimul_ref_weights weights;
};

/* Results; NULL: not wanted. */
struct cofi_trimul_ref_out {
    double *out;   /* [B, N, N, D] */
    double *a, *b; /* [B, N, N, H] */
    double *tri;   /* [B, N, N, H] */
};

/* Gradients, written, not added to; NULL: not wanted. That of a gain or bias which is absent is
 * taken at ones or zeros. Of the residual it is dout: where the residual is x, add it to x's. */
struct cofi_trimul_ref_grads {
    double *x;
    double *norm_in_w, *norm_in_b;
    double *p_in, *p_in_b;
    double *g_in, *g_in_b;
    double *norm_out_w, *norm_out_b;
    double *p_out, *p_out_b;
    double *g_out, *g_out_b;
    double *out; /* no gradient: that of forward, which backward passes by */
};

/* COF_ERR_NOMEM. */
cof_status cofi_trimul_ref_forward(const struct cofi_trimul_ref_problem *problem,
                                   const struct cofi_trimul_ref_out *results_out);

/* Of sum(dout * out), dout [B, N, N, D]. COF_ERR_NOMEM. */
cof_status cofi_trimul_ref_backward(const struct cofi_trimul_ref_problem *problem,
                                    const double *dout,
                                    const struct cofi_trimul_ref_grads *grads_out);

#endif
