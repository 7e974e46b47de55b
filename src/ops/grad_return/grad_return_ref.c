/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/grad_return/grad_return_ref.h"

#include <math.h>

#include "ops/check.h"

static bool contributes(const struct cofi_gr_ref *ref, int writer, int64_t row)
{
    const cof_layout *l = &ref->layout;
    int owner = cof_layout_owner(l, row), half = 0;
    int64_t local = cof_layout_local_row(l, row);
    if (cof_layout_halves(l) == 2 && local >= cof_layout_half_start(l, owner, 1))
        half = 1;
    int64_t chunk = cof_layout_chunk(l, owner, half);
    switch (ref->writers) {
    case COF_WRITERS_ALL: return true;
    case COF_WRITERS_CAUSAL: /* some query row of the writer is at or past the chunk's first row */
        for (int64_t i = cof_layout_local_rows(l, writer) - 1; i >= 0; i--)
            if (cof_layout_global_row(l, writer, i) >= cof_layout_chunk_start(l, chunk))
                return true;
        return false;
    default:
        return ref->writer_table[chunk * ((l->n_ranks + 63) / 64) + writer / 64] >> (writer % 64) &
               1;
    }
}

int cofi_gr_ref_writers(const struct cofi_gr_ref *ref, int64_t row, int *writers)
{
    int owner = cof_layout_owner(&ref->layout, row), n = 0;
    for (int i = 1; i <= ref->layout.n_ranks; i++) {
        int writer = (owner + i) % ref->layout.n_ranks;
        if (contributes(ref, writer, row))
            writers[n++] = writer;
    }
    return n;
}

/* out[row] = round(sum over writers owner+1, ..., owner-1, owner of wire(partial[writer][row])),
 * the own partial without the wire's rounding */
struct cofi_gr_value cofi_gr_ref_value(const struct cofi_gr_ref *ref, const int *writers,
                                       int n_writers, int64_t row, int64_t at)
{
    struct cofi_gr_value v = {0, 0, 0};
    int owner = cof_layout_owner(&ref->layout, row);
    float sum = 0;
    for (int i = 0; i < n_writers; i++) {
        double x = ref->partial(ref->ctx, writers[i], row, at);
        bool is_exact = writers[i] == owner || ref->wire_f32;
        v.exact += x;
        v.size += fabs(x);
        sum += (float)(is_exact ? x : cofi_check_rounded(x, ref->dtype));
    }
    v.plain = cofi_check_rounded(sum, ref->dtype);
    return v;
}
