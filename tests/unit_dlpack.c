/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* cof_tensor, cof_device and cof_dtype are DLPack's structs, field by field and code by code. */
#include <stdio.h>

#include "cofuse/tensor.h"

#if __has_include(<dlpack/dlpack.h>)
#include <assert.h>
#include <dlpack/dlpack.h>

#define SAME_SIZE(ours, theirs)                                                                    \
    static_assert(sizeof(ours) == sizeof(theirs) && _Alignof(ours) == _Alignof(theirs),            \
                  "size of " #ours)
#define SAME_FIELD(ours, theirs, field)                                                            \
    static_assert(offsetof(ours, field) == offsetof(theirs, field) &&                              \
                      sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->field),                  \
                  #ours "." #field)

SAME_SIZE(cof_tensor, DLTensor);
SAME_FIELD(cof_tensor, DLTensor, data);
SAME_FIELD(cof_tensor, DLTensor, device);
SAME_FIELD(cof_tensor, DLTensor, ndim);
SAME_FIELD(cof_tensor, DLTensor, dtype);
SAME_FIELD(cof_tensor, DLTensor, shape);
SAME_FIELD(cof_tensor, DLTensor, strides);
SAME_FIELD(cof_tensor, DLTensor, byte_offset);

SAME_SIZE(cof_device, DLDevice);
SAME_FIELD(cof_device, DLDevice, device_type);
SAME_FIELD(cof_device, DLDevice, device_id);

SAME_SIZE(cof_dtype, DLDataType);
SAME_FIELD(cof_dtype, DLDataType, code);
SAME_FIELD(cof_dtype, DLDataType, bits);
SAME_FIELD(cof_dtype, DLDataType, lanes);

static_assert((int)COF_DEVICE_CPU == (int)kDLCPU, "CPU");
static_assert(COF_DTYPE_CODE_INT == kDLInt, "int");
static_assert(COF_DTYPE_CODE_UINT == kDLUInt, "uint");
static_assert(COF_DTYPE_CODE_FLOAT == kDLFloat, "float");
static_assert(COF_DTYPE_CODE_BFLOAT == kDLBfloat, "bfloat");
#if defined(DLPACK_MAJOR_VERSION) &&                                                               \
    (DLPACK_MAJOR_VERSION > 1 || (DLPACK_MAJOR_VERSION == 1 && DLPACK_MINOR_VERSION >= 1))
static_assert(COF_DTYPE_CODE_FLOAT8_E4M3FN == kDLFloat8_e4m3fn, "float8");
#endif

/* A view made by us, read as theirs. */
int main(void)
{
    float data[6] = {0};
    cof_shape shape = {{2, 3}};
    union {
        cof_tensor ours;
        DLTensor theirs;
    } view = {cof_tensor_make(data, (cof_device){COF_DEVICE_CPU, 0}, COF_BF16, 2, &shape)};

    assert(view.theirs.data == data && view.theirs.byte_offset == 0);
    assert(view.theirs.device.device_type == kDLCPU && view.theirs.device.device_id == 0);
    assert(view.theirs.dtype.code == kDLBfloat && view.theirs.dtype.bits == 16);
    assert(view.theirs.dtype.lanes == 1);
    assert(view.theirs.ndim == 2 && view.theirs.shape[0] == 2 && view.theirs.shape[1] == 3);
    return 0;
}

#else

int main(void)
{
    printf("dlpack/dlpack.h is not installed\n");
    return 77;
}

#endif
