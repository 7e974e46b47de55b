/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Element types, and checks of caller's tensor views: each names the argument, the value seen and
 * the rule. */
#ifndef COFI_TENSOR_H
#define COFI_TENSOR_H

#include <stdbool.h>

#include "cofuse/tensor.h"

static inline bool cofi_dtype_equal(cof_dtype a, cof_dtype b)
{
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

static inline int64_t cofi_dtype_bytes(cof_dtype t)
{
    return (t.bits * t.lanes + 7) / 8;
}

/* The types that kernels read and write; their arithmetic is fp32. */
enum cofi_elem { COFI_ELEM_F32, COFI_ELEM_BF16, COFI_ELEM_F16 };

static inline bool cofi_dtype_is_elem(cof_dtype t)
{
    return cofi_dtype_equal(t, COF_F32) || cofi_dtype_equal(t, COF_BF16) ||
           cofi_dtype_equal(t, COF_F16);
}

/* Of a dtype that is one. */
static inline enum cofi_elem cofi_elem_of(cof_dtype t)
{
    return cofi_dtype_equal(t, COF_BF16) ? COFI_ELEM_BF16
           : cofi_dtype_equal(t, COF_F16) ? COFI_ELEM_F16 : COFI_ELEM_F32;
}

static inline int cofi_elem_bytes(enum cofi_elem elem)
{
    return elem == COFI_ELEM_F32 ? 4 : 2;
}

/* First element, byte_offset applied. */
static inline void *cofi_tensor_data(const cof_tensor *t)
{
    return (char *)t->data + t->byte_offset;
}

static inline int64_t cofi_tensor_elements(const cof_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

/* The strides in force (elements), whether given or implied. */
void cofi_tensor_strides(const cof_tensor *t, int64_t *strides_out);

/* What an argument must be. dims: names of the dimensions for the text, one letter or word each. */
struct cofi_tensor_rule {
    const char *name;        /* argument name */
    cof_dtype dtype;
    int ndim;
    const int64_t *shape;
    const char *const *dims;
};

/* COF_ERR_INVALID or COF_ERR_UNSUPPORTED (device, dtype, innermost stride), else COF_OK.
 * Strides: the last dim must be contiguous, no stride negative, rows must not overlap. A view
 * without elements needs no data. */
cof_status cofi_tensor_check(const cof_tensor *t, const struct cofi_tensor_rule *rule);
/* The same on a device. Its id is looked at for CUDA devices only. */
cof_status cofi_tensor_check_on(const cof_tensor *t, const struct cofi_tensor_rule *rule,
                                cof_device device);

/* COF_ERR_INVALID when the memory spans of a and b meet; the names are for the text. */
cof_status cofi_tensor_check_apart(const cof_tensor *a, const char *a_name, const cof_tensor *b,
                                   const char *b_name);

#endif
