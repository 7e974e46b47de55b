/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Weights from the orders that checkpoints have them in. */
#include <string.h>

#include "ops/trimul/trimul.h"

static bool is_compact(const cof_tensor *t)
{
    int64_t stride[8], n = 1;
    cofi_tensor_strides(t, stride);
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && stride[i] != n)
            return false;
        n *= t->shape[i];
    }
    return true;
}

static cof_status check(const cof_tensor *src, const cof_tensor *dst)
{
    static const char *const dims[] = {"2H", "D"};
    COF_FAIL_IF(!src, COF_ERR_INVALID, "src: NULL, wanted a tensor");
    COF_FAIL_IF(src->ndim < 1 || src->ndim > 2 || !src->shape, COF_ERR_INVALID,
                "src: ndim = %d, wanted 1 or 2", src->ndim);
    COF_FAIL_IF(src->shape[0] < 2 || src->shape[0] % 2, COF_ERR_INVALID,
                "src: dim 0 (2H) = %lld, wanted an even number", (long long)src->shape[0]);
    COF_FAIL_IF(!cofi_dtype_is_elem(src->dtype), COF_ERR_INVALID,
                "src: dtype %s, wanted bf16, f16 or f32", cof_dtype_name(src->dtype));
    struct cofi_tensor_rule rule = {"src", src->dtype, src->ndim, src->shape, dims};
    COF_TRY(cofi_tensor_check(src, &rule));
    rule.name = "dst_out";
    COF_TRY(cofi_tensor_check(dst, &rule));
    COF_FAIL_IF(!is_compact(src) || !is_compact(dst), COF_ERR_UNSUPPORTED,
                "%s: has strides, wanted a compact tensor", is_compact(src) ? "dst_out" : "src");
    return cofi_tensor_check_apart(dst, "dst_out", src, "src");
}

cof_status cof_trimul_import_rows(const cof_tensor *src, cof_trimul_order order, int swap_ab,
                                  const cof_tensor *dst)
{
    COF_FAIL_IF((unsigned)order > COF_TRIMUL_INTERLEAVED, COF_ERR_INVALID,
                "order = %d: wanted 0 (stacked) or 1 (interleaved)", (int)order);
    COF_FAIL_IF(swap_ab != 0 && swap_ab != 1, COF_ERR_INVALID, "swap_ab = %d: wanted 0 or 1",
                swap_ab);
    COF_TRY(check(src, dst));
    const int64_t hidden = src->shape[0] / 2, n_cols = src->ndim == 2 ? src->shape[1] : 1;
    const size_t row = (size_t)(n_cols * cofi_dtype_bytes(src->dtype));
    for (int64_t c = 0; c < 2 * hidden; c++) {
        const int64_t half = (c >= hidden) ^ swap_ab, h = c % hidden;
        const int64_t from = order == COF_TRIMUL_STACKED ? half * hidden + h : 2 * h + half;
        memcpy((char *)cofi_tensor_data(dst) + (size_t)c * row,
               (const char *)cofi_tensor_data(src) + (size_t)from * row, row);
    }
    return COF_OK;
}
