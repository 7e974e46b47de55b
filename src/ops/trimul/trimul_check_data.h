/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The global side of a case, in the memory all ranks share: inputs and weights, results of the
 * reference, and of one rank alone. */
#ifndef COFI_TRIMUL_CHECK_DATA_H
#define COFI_TRIMUL_CHECK_DATA_H

#include "ops/trimul/trimul_cases.h"
#include "ops/trimul/trimul_check_weights.h"

enum { COFI_TM_CALLS = 4 };

/* What is compared. */
enum { COFI_TM_E_OUT, COFI_TM_E_DX, COFI_TM_E_GRADS, COFI_TM_E_N = COFI_TM_E_GRADS +
       COFI_TRI_WEIGHTS };

/* All calls with one N have the same tensors. Compact, [B, N, N, D] and [B, N, N]. */
struct cofi_tm_problem {
    int64_t n;
    void *x, *residual, *dout; /* dtype */
    void *mask;                /* mask dtype; NULL: none */
    double *out, *dx;          /* the reference's */
    double *grads;             /* [B][grad_elements]: of each batch entry alone */
    double *maxima;            /* [B][COFI_TM_E_N]: of what is finite in out and dx */
    void *alone_out, *alone_dx; /* of a plan of one rank, a call for each batch entry */
};

struct cofi_tm_data {
    const struct cofi_tm_case *c;
    uint64_t seed;
    int n_problems, problem_of[COFI_TM_CALLS];
    struct cofi_tm_problem problem[COFI_TM_CALLS];
    void *weight[COFI_TRI_WEIGHTS]; /* NULL: absent */
    int64_t grad_at[COFI_TRI_WEIGHTS], grad_elements; /* of the 12 gradients one after the other */
    float *partial; /* [calls][ranks][grad_elements]: what the ranks got */
};

static inline bool cofi_tm_has_backward(const struct cofi_tm_case *c)
{
    return c->calls != COFI_TM_FORWARD;
}

/* An error may be so much of the largest value of the tensor, and as much again of the value. The
 * gradients of weights are sums over all pairs, whose terms cancel and whose errors do not. */
static inline double cofi_tm_tolerance(const struct cofi_tm_case *c, int which)
{
    double tolerance = c->dtype == 2 ? 1e-5 : 1e-2;
    return which < COFI_TM_E_GRADS ? tolerance : 5 * tolerance;
}

cof_dtype cofi_tm_weight_dtype(const struct cofi_tm_case *c, int which);

/* Sets grad_at and grad_elements for the sizes of data->c. */
void cofi_tm_data_lay_grads(struct cofi_tm_data *data);

/* Values for data->weight[which], where there is one. */
void cofi_tm_data_fill_weight(const struct cofi_tm_data *data, int which);

/* The reference of a problem's batch entry b, from inputs and weights as they are. */
cof_status cofi_tm_data_reference(const struct cofi_tm_data *data,
                                   const struct cofi_tm_problem *problem, int64_t b);

size_t cofi_tm_data_bytes(const struct cofi_tm_case *c, int n_ranks);

/* Lays it out in job->shared, and fills the inputs and the reference; collective. */
cof_status cofi_tm_data_make(const struct cofi_job *job, const struct cofi_tm_case *c,
                              uint64_t seed, struct cofi_tm_data *data);

#endif
