/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The reference of grad_return: an element at a time, obviously right, from any source of values.
 */
#ifndef COFI_GRAD_RETURN_REF_H
#define COFI_GRAD_RETURN_REF_H

#include <stdbool.h>

#include "cofuse/grad_return.h"

struct cofi_gr_ref {
    cof_layout layout;
    cof_dtype dtype;  /* of outputs, and of the wire unless wire_f32 */
    bool wire_f32;
    cof_writers writers;
    const uint64_t *writer_table;
    /* The partial of a writer at (global row, place in the row), as its tensor holds it. */
    double (*partial)(const void *ctx, int writer, int64_t row, int64_t at);
    const void *ctx;
};

struct cofi_gr_value {
    double exact; /* the sum in fp64 */
    double size;  /* sum of magnitudes */
    double plain; /* as the contract orders it: fp32 sum, own last, one rounding */
};

/* Who contributes to a global row, in the order of the sum; returns how many. */
int cofi_gr_ref_writers(const struct cofi_gr_ref *ref, int64_t row, int *writers_out);

/* The owner's value at one of its global rows. */
struct cofi_gr_value cofi_gr_ref_value(const struct cofi_gr_ref *ref, const int *writers,
                                       int n_writers, int64_t row, int64_t at);

#endif
