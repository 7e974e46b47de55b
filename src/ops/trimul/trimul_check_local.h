/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One rank's tensors of a call, or one rank alone's, where the rank works, between red zones. */
#ifndef COFI_TRIMUL_CHECK_LOCAL_H
#define COFI_TRIMUL_CHECK_LOCAL_H

#include "ops/check_memory.h"
#include "ops/trimul/trimul_check_data.h"

enum cofi_tm_tensor { COFI_TM_T_X, COFI_TM_T_MASK, COFI_TM_T_RESIDUAL, COFI_TM_T_DOUT,
                       COFI_TM_T_OUT, COFI_TM_T_DX, COFI_TM_TENSORS };
extern const char *const cofi_tm_tensor_names[COFI_TM_TENSORS];

struct cofi_tm_view {
    struct cofi_check_memory memory; /* unopened: the call has none */
    cof_tensor tensor;
    int64_t shape[4], strides[4]; /* [B, Ni, Nj, D]; of mask the first three */
    int64_t shift;                /* elements to the first one */
    void *from;                   /* of an input: the global tensor, [B, N, N, ...]; read only */
    uint64_t hash;                /* of an input as it was uploaded, an output as it was kept */
};

/* The tensors of a call. */
struct cofi_tm_local {
    const struct cofi_tm_case *c;
    const struct cofi_tm_problem *problem;
    cof_trimul_block block;
    int64_t first_batch, n_batch;
    struct cofi_tm_view view[COFI_TM_TENSORS];
    int which_out; /* OUT, or X where out is written over it */
    struct cofi_check_memory saved;
    cof_shape saved_shape;
    cof_tensor saved_tensor;
    struct cofi_check_memory grad[COFI_TRI_WEIGHTS];
    cof_shape grad_shape[COFI_TRI_WEIGHTS];
    cof_tensor grad_tensor[COFI_TRI_WEIGHTS];
    uint64_t grad_hash[COFI_TRI_WEIGHTS];
    cof_trimul_grads grads;
};

/* What a call is on: batch entries first .. first + n of a problem, a block of rows and columns. */
struct cofi_tm_span {
    const struct cofi_tm_case *c;
    const struct cofi_tm_problem *problem; /* NULL: inputs are not filled, all N are c's largest */
    cof_trimul_block block;
    int64_t first_batch, n_batch;
    size_t saved_bytes;
    bool backward, grads;
};

/* Local. What is opened so far is closed by the caller, also after a failure. */
cof_status cofi_tm_local_open(cof_world *world, const struct cofi_tm_span *span,
                               struct cofi_tm_local *local);
void cofi_tm_local_close(struct cofi_tm_local *local);

/* Inputs are themselves (again), outputs poison. */
cof_status cofi_tm_local_prepare(struct cofi_tm_local *local);
/* Brings back the outputs of forward, or all; fails `result` where something else has changed. */
cof_status cofi_tm_local_collect(struct cofi_tm_local *local, struct cofi_check_result *result);

/* What collect brought of out, and of dx where there is one, into compact [B, N, N, D]. */
void cofi_tm_local_take(const struct cofi_tm_local *local, void *out, void *dx);

void cofi_tm_local_args(const struct cofi_tm_local *local, bool backward,
                         cof_trimul_args *args_out);

/* Element (b, i, j, d) of the block, at the last collect. */
static inline int64_t cofi_tm_view_idx(const struct cofi_tm_view *v, int64_t b, int64_t i,
                                        int64_t j, int64_t d)
{
    return v->shift + b * v->strides[0] + i * v->strides[1] + j * v->strides[2] + d;
}

/* Keeps hashes of the outputs; or fails `result` where one differs from the kept. */
void cofi_tm_local_keep(struct cofi_tm_local *local);
void cofi_tm_local_compare_kept(const struct cofi_tm_local *local,
                                 struct cofi_check_result *result);

/* The weights of a case, on a rank. */
struct cofi_tm_local_weights {
    struct cofi_check_memory memory[COFI_TRI_WEIGHTS];
    int64_t shape[COFI_TRI_WEIGHTS][2], strides[COFI_TRI_WEIGHTS][2];
    cof_tensor tensor[COFI_TRI_WEIGHTS];
    cof_trimul_weights weights;
};
cof_status cofi_tm_weights_open(cof_world *world, const struct cofi_tm_data *data,
                                 struct cofi_tm_local_weights *w);
void cofi_tm_weights_close(struct cofi_tm_local_weights *w);

#endif
