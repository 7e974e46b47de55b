/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/tensor.h"

#include <stdio.h>
#include <string.h>

#include "core/error.h"

cof_tensor cof_tensor_make(void *data, cof_device device, cof_dtype dtype, int32_t ndim,
                           cof_shape *shape)
{
    return (cof_tensor){.data = data, .device = device, .ndim = ndim, .dtype = dtype,
                        .shape = shape->dim};
}

const char *cof_dtype_name(cof_dtype dtype)
{
    static const struct {
        uint8_t code, bits;
        const char *name;
    } names[] = {
        {COF_DTYPE_CODE_FLOAT, 32, "f32"}, {COF_DTYPE_CODE_FLOAT, 16, "f16"},
        {COF_DTYPE_CODE_FLOAT, 64, "f64"}, {COF_DTYPE_CODE_BFLOAT, 16, "bf16"},
        {COF_DTYPE_CODE_INT, 32, "i32"},   {COF_DTYPE_CODE_INT, 64, "i64"},
        {COF_DTYPE_CODE_UINT, 8, "u8"},    {COF_DTYPE_CODE_FLOAT8_E4M3FN, 8, "f8_e4m3fn"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i].code == dtype.code && names[i].bits == dtype.bits && dtype.lanes == 1)
            return names[i].name;
    static _Thread_local char text[40];
    snprintf(text, sizeof text, "dtype(%d,%d,%d)", dtype.code, dtype.bits, dtype.lanes);
    return text;
}

void cofi_tensor_strides(const cof_tensor *t, int64_t *strides_out)
{
    int64_t compact = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        strides_out[i] = t->strides ? t->strides[i] : compact;
        compact *= t->shape[i];
    }
}

static cof_status check_shape(const cof_tensor *t, const struct cofi_tensor_rule *rule)
{
    COF_FAIL_IF(t->ndim != rule->ndim, COF_ERR_INVALID, "%s: ndim = %d, wanted %d", rule->name,
                t->ndim, rule->ndim);
    COF_FAIL_IF(!t->shape, COF_ERR_INVALID, "%s: shape is NULL", rule->name);
    for (int i = 0; i < t->ndim; i++)
        COF_FAIL_IF(t->shape[i] != rule->shape[i], COF_ERR_INVALID,
                    "%s: dim %d (%s) = %lld, wanted %lld", rule->name, i, rule->dims[i],
                    (long long)t->shape[i], (long long)rule->shape[i]);
    return COF_OK;
}

/* Distinct indices must have distinct addresses: sorted by stride, each dim must step over the
 * whole extent of the smaller ones. */
static cof_status check_strides(const cof_tensor *t, const struct cofi_tensor_rule *rule)
{
    int64_t stride[8], extent = 1;
    bool done[8] = {false};
    cofi_tensor_strides(t, stride);
    for (int i = 0; i < t->ndim; i++) {
        COF_FAIL_IF(stride[i] < 0, COF_ERR_UNSUPPORTED,
                    "%s: stride of dim %d (%s) = %lld, wanted >= 0", rule->name, i, rule->dims[i],
                    (long long)stride[i]);
        COF_FAIL_IF(i == t->ndim - 1 && stride[i] != 1 && t->shape[i] > 1, COF_ERR_UNSUPPORTED,
                    "%s: stride of the last dim (%s) = %lld, wanted 1", rule->name, rule->dims[i],
                    (long long)stride[i]);
    }
    for (int n = 0; n < t->ndim; n++) {
        int least = -1;
        for (int i = 0; i < t->ndim; i++)
            if (!done[i] && (least < 0 || stride[i] < stride[least] ||
                             (stride[i] == stride[least] && t->shape[i] < t->shape[least])))
                least = i;
        done[least] = true;
        if (t->shape[least] <= 1)
            continue;
        COF_FAIL_IF(stride[least] < extent, COF_ERR_INVALID,
                    "%s: stride of dim %d (%s) = %lld makes elements overlap, wanted >= %lld",
                    rule->name, least, rule->dims[least], (long long)stride[least],
                    (long long)extent);
        COF_FAIL_IF(stride[least] > INT64_MAX / 16 / t->shape[least], COF_ERR_INVALID,
                    "%s: stride of dim %d (%s) = %lld is past the address space", rule->name, least,
                    rule->dims[least], (long long)stride[least]);
        extent += stride[least] * (t->shape[least] - 1);
    }
    return COF_OK;
}

static cof_status check_device(const cof_tensor *t, const char *name, cof_device device)
{
    bool is_cuda = device.device_type == COF_DEVICE_CUDA;
    COF_FAIL_IF(t->device.device_type != device.device_type, COF_ERR_INVALID,
                "%s: device type %d, wanted %d (%s), the device of the team", name,
                t->device.device_type, device.device_type, is_cuda ? "CUDA" : "CPU");
    COF_FAIL_IF(is_cuda && t->device.device_id != device.device_id, COF_ERR_INVALID,
                "%s: device %d, wanted %d, the device of the team", name, t->device.device_id,
                device.device_id);
    return COF_OK;
}

cof_status cofi_tensor_check(const cof_tensor *t, const struct cofi_tensor_rule *rule)
{
    return cofi_tensor_check_on(t, rule, (cof_device){COF_DEVICE_CPU, 0});
}

cof_status cofi_tensor_check_on(const cof_tensor *t, const struct cofi_tensor_rule *rule,
                                cof_device device)
{
    COF_FAIL_IF(!t, COF_ERR_INVALID, "%s: NULL, wanted a tensor", rule->name);
    COF_FAIL_IF(t->ndim < 0 || t->ndim > 8, COF_ERR_INVALID, "%s: ndim = %d, wanted %d", rule->name,
                t->ndim, rule->ndim);
    COF_TRY(check_shape(t, rule));
    COF_FAIL_IF(!cofi_dtype_equal(t->dtype, rule->dtype), COF_ERR_INVALID,
                "%s: dtype %s, wanted %s", rule->name, cof_dtype_name(t->dtype),
                cof_dtype_name(rule->dtype));
    COF_TRY(check_device(t, rule->name, device));
    if (cofi_tensor_elements(t) == 0)
        return COF_OK;
    COF_TRY(check_strides(t, rule));
    COF_FAIL_IF(!t->data, COF_ERR_INVALID, "%s: data is NULL", rule->name);
    int64_t align = cofi_dtype_bytes(t->dtype);
    COF_FAIL_IF((uintptr_t)cofi_tensor_data(t) % (uintptr_t)align != 0, COF_ERR_INVALID,
                "%s: data at %p, wanted alignment to %lld bytes", rule->name, cofi_tensor_data(t),
                (long long)align);
    return COF_OK;
}

static uintptr_t span_bytes(const cof_tensor *t)
{
    int64_t stride[8], last = 0;
    cofi_tensor_strides(t, stride);
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0)
            return 0;
        last += stride[i] * (t->shape[i] - 1);
    }
    return (uintptr_t)((last + 1) * cofi_dtype_bytes(t->dtype));
}

cof_status cofi_tensor_check_apart(const cof_tensor *a, const char *a_name, const cof_tensor *b,
                                   const char *b_name)
{
    uintptr_t a0 = (uintptr_t)cofi_tensor_data(a), b0 = (uintptr_t)cofi_tensor_data(b);
    uintptr_t na = span_bytes(a), nb = span_bytes(b);
    COF_FAIL_IF(na && nb && a0 < b0 + nb && b0 < a0 + na, COF_ERR_INVALID,
                "%s: its memory overlaps that of %s; outputs must lie apart", a_name, b_name);
    return COF_OK;
}
