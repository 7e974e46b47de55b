/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One rank's side of a case: its local tensors where the ranks work, in guarded memory with a copy
 * in the host's, filled from the global inputs. */
#ifndef COFI_ATTENTION_CHECK_LOCAL_H
#define COFI_ATTENTION_CHECK_LOCAL_H

#include "ops/attention/attention_check_data.h"
#include "ops/check_memory.h"

enum cofi_attention_tensor { COFI_CT_Q, COFI_CT_K, COFI_CT_V, COFI_CT_DOUT, /* inputs */
                             COFI_CT_O, COFI_CT_LSE, COFI_CT_DQ, COFI_CT_DK, COFI_CT_DV,
                             COFI_CT_N };
extern const char *const cofi_attention_check_names[COFI_CT_N];

struct cofi_attention_local_tensor {
    struct cofi_check_memory memory; /* base NULL: the case has no such tensor */
    cof_tensor view;
    int64_t shape[4], strides[4];
    int64_t n_heads, dim;                           /* lse: dim 1 */
    int64_t batch_stride, row_stride, head_stride; /* elements */
    uint64_t hash; /* of an input, or of an output's first result */
};

/* The element at which NAN and INF data break an input: all rows that see it must show it. */
struct cofi_attention_bad_element {
    enum cofi_attention_tensor tensor; /* COFI_CT_N: none */
    int64_t batch, row, head, dim;
    float value;
};

/* The tensors of one microbatch. */
struct cofi_attention_local {
    int64_t n_rows, rank; /* local rows, padding included */
    cof_layout layout;
    struct cofi_attention_local_tensor tensor[COFI_CT_N];
    struct cofi_attention_bad_element bad;
};

/* Allocates the tensors; all of them are poisoned. */
cof_status cofi_attention_local_open(const struct cofi_job *job,
                                     const struct cofi_attention_case *c,
                                     struct cofi_attention_local *local);
/* The same, with the inputs filled; outputs are poisoned, and so are the padding rows and gaps of
 * inputs. */
cof_status cofi_attention_local_make(const struct cofi_job *job,
                                     const struct cofi_attention_case *c, uint64_t seed,
                                     const struct cofi_attention_data *data,
                                     struct cofi_attention_local *local);
void cofi_attention_local_free(struct cofi_attention_local *local);

static inline int64_t cofi_attention_local_idx(const struct cofi_attention_local_tensor *t,
                                               int64_t batch, int64_t row, int64_t head, int64_t d)
{
    return batch * t->batch_stride + row * t->row_stride + head * t->head_stride + d;
}

/* First element of the host's copy, byte_offset applied. */
static inline void *cofi_attention_local_data(const struct cofi_attention_local_tensor *t)
{
    return t->memory.host + t->view.byte_offset;
}

/* The arguments of a call on these tensors: what check compares, and bench times. */
void cofi_attention_local_args(const struct cofi_attention_local *local, bool backward,
                               cof_attention_args *args_out);

/* Poisons the outputs. */
cof_status cofi_attention_local_poison(struct cofi_attention_local *local);
/* All tensors into the host's copies. */
cof_status cofi_attention_local_download(struct cofi_attention_local *local);

/* These look at what was downloaded last. */
/* Fails `result` where a red zone or a gap was written to, or an input changed. */
void cofi_attention_local_inspect(const struct cofi_attention_local *local,
                                  struct cofi_check_result *result);

/* Keeps the outputs' hashes; or fails `result` where one differs from the kept. */
void cofi_attention_local_keep(struct cofi_attention_local *local);
void cofi_attention_local_compare_kept(const struct cofi_attention_local *local, const char *what,
                                       struct cofi_check_result *result);

#endif
