/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul from the inside: plan, calls, back ends. Letters as in cofuse/trimul.h. */
#ifndef COFI_TRIMUL_H
#define COFI_TRIMUL_H

#include <stdbool.h>

#include "cofuse/trimul.h"
#include "core/tensor.h"
#include "ops/plan.h"
#include "symm/arena.h"

#define COFI_TRI_MAX_WIDTH 8192 /* of D and H */
#define COFI_TRI_GROUP 8        /* features are owned in groups of so many */

enum cofi_tri_weight {
    COFI_TRI_NORM_IN_W, COFI_TRI_NORM_IN_B, COFI_TRI_P_IN, COFI_TRI_P_IN_B, COFI_TRI_G_IN,
    COFI_TRI_G_IN_B, COFI_TRI_NORM_OUT_W, COFI_TRI_NORM_OUT_B, COFI_TRI_P_OUT, COFI_TRI_P_OUT_B,
    COFI_TRI_G_OUT, COFI_TRI_G_OUT_B, COFI_TRI_WEIGHTS
};

/* Where element [b, i, j] or row [b, i, j, :] lies; data = NULL: there is none. */
struct cofi_tri_tensor {
    char *data;
    int64_t stride[3]; /* bytes */
};

static inline char *cofi_tri_at(const struct cofi_tri_tensor *t, int64_t b, int64_t i, int64_t j)
{
    return t->data + b * t->stride[0] + i * t->stride[1] + j * t->stride[2];
}

struct cofi_tri_call {
    int64_t n, n_batch; /* both > 0; n_batch = 0: backward that wants gradients, which are zeros */
    bool backward;
    bool add_dout; /* backward: the residual is x */
    struct cofi_tri_tensor x, mask, residual, out, dout, dx;
    char *saved;
    float *grads[COFI_TRI_WEIGHTS]; /* NULL: not wanted */
    uint64_t n_empty;               /* calls with B = 0 before this one */
};

static inline bool cofi_tri_wants_grads(const struct cofi_tri_call *call)
{
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++)
        if (call->grads[i])
            return true;
    return false;
}

/* Weights of a call of set_weights; data = NULL: absent. */
struct cofi_tri_weights {
    const char *data[COFI_TRI_WEIGHTS];
    int64_t pitch[COFI_TRI_WEIGHTS]; /* bytes from row to row */
    unsigned flags;
    uint64_t n_empty;
};

struct cofi_tri_plan;

/* What the devices do, each in its own way. */
struct cofi_tri_backend {
    const char *name; /* "cpu" */
    /* n_purposes, acks, payload_bytes, local_bytes, saved_bytes; allocates nothing. The only place
     * where capacities are computed. */
    cof_status (*lay_out)(struct cofi_tri_plan *plan);
    /* Words for the describe line. */
    void (*describe)(const struct cofi_tri_plan *plan, char *text, size_t bytes);
    cof_status (*open)(struct cofi_tri_plan *plan); /* local: memory, kernels */
    void (*close)(struct cofi_tri_plan *plan);      /* of a half-opened one too */
    cof_status (*set_weights)(struct cofi_tri_plan *plan, const struct cofi_tri_weights *weights,
                              cof_stream stream);
    cof_status (*run)(struct cofi_tri_plan *plan, const struct cofi_tri_call *call,
                      cof_stream stream);
};

extern const struct cofi_tri_backend cofi_tri_cpu;

struct cofi_tri_plan {
    struct cof_plan base;
    cof_trimul_params params; /* defaults filled in; the offsets are the plan's copies */
    const struct cofi_tri_backend *backend;
    int rank, n_ranks;
    /* Of x and what is exchanged as x is; of norms' weights; of the mask; of tri and of gradients
     * that are exchanged: the data type, fp32 for fp16. */
    enum cofi_elem elem, norm_elem, mask_elem, wide;
    int64_t *offsets;
    bool has_weights; /* set_weights was enqueued */
    uint64_t n_empty;
    /* lay_out's. */
    int n_purposes;
    uint32_t acks;
    size_t payload_bytes, local_bytes, saved_bytes;
    struct cofi_binding binding;
    void *state; /* the back end's */
};

/* First row (axis 0) or column (1) of a part; `part` = number of parts: N. */
int64_t cofi_tri_part_begin(const cof_trimul_params *p, int axis, int64_t n, int part);

/* The block of a rank, of parameters with their defaults. */
cof_trimul_block cofi_tri_block(const cof_trimul_params *p, int rank, int64_t n);

/* First feature of a rank; rank = n_ranks: H. */
int64_t cofi_tri_first_feature(int64_t hidden, int rank, int n_ranks);

/* [rows, cols] of a weight; a vector has one row. */
void cofi_tri_weight_shape(const cof_trimul_params *p, int idx, int64_t shape[2]);

/* Whether it is one of the norms' (norm_dtype), and its name. */
bool cofi_tri_is_norm(int idx);
extern const char *const cofi_tri_weight_names[COFI_TRI_WEIGHTS];

#endif
