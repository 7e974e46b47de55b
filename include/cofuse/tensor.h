/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Tensor views.
 *
 * cof_tensor has the memory layout of DLPack's DLTensor, so a `DLTensor *` from any framework may
 * be passed as a `const cof_tensor *`. A view owns nothing: shape and strides are read before the
 * call returns, the data must stay valid until the call's work on its stream is done.
 */
#ifndef COFUSE_TENSOR_H
#define COFUSE_TENSOR_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Device types, with DLPack's codes. */
typedef enum cof_device_type { COF_DEVICE_CPU = 1, COF_DEVICE_CUDA = 2 } cof_device_type;

typedef struct cof_device {
    int32_t device_type; /* cof_device_type */
    int32_t device_id;   /* 0 on the CPU */
} cof_device;

/** Element type, with DLPack's codes: kind, bits of one element, lanes (always 1 here). */
typedef struct cof_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} cof_dtype;

#define COF_DTYPE_CODE_INT 0
#define COF_DTYPE_CODE_UINT 1
#define COF_DTYPE_CODE_FLOAT 2
#define COF_DTYPE_CODE_BFLOAT 4
#define COF_DTYPE_CODE_FLOAT8_E4M3FN 10

#ifdef __cplusplus
#define COF_DTYPE_LITERAL(code, bits) (cof_dtype{(code), (bits), 1})
#else
#define COF_DTYPE_LITERAL(code, bits) ((cof_dtype){(code), (bits), 1})
#endif
#define COF_F32 COF_DTYPE_LITERAL(COF_DTYPE_CODE_FLOAT, 32)
#define COF_F16 COF_DTYPE_LITERAL(COF_DTYPE_CODE_FLOAT, 16)
#define COF_BF16 COF_DTYPE_LITERAL(COF_DTYPE_CODE_BFLOAT, 16)
#define COF_U8 COF_DTYPE_LITERAL(COF_DTYPE_CODE_UINT, 8)
#define COF_I32 COF_DTYPE_LITERAL(COF_DTYPE_CODE_INT, 32)

/**
 * A view: element (i0, i1, ...) lies at
 *     (char *)data + byte_offset + (i0 * strides[0] + i1 * strides[1] + ...) * bits / 8.
 * strides are in elements; NULL means row-major and compact.
 */
typedef struct cof_tensor {
    void *data;
    cof_device device;
    int32_t ndim;
    cof_dtype dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} cof_tensor;

/** Room for a compact view's shape, so that a view can be made in one expression. */
typedef struct cof_shape {
    int64_t dim[6];
} cof_shape;

/**
 * A compact row-major view on `data` with the dims of `shape` (which must outlive the view).
 * ndim <= 6. No check is made here: the call that receives the view checks it.
 */
COF_API cof_tensor cof_tensor_make(void *data, cof_device device, cof_dtype dtype, int32_t ndim,
                                   cof_shape *shape);

/** "bf16", "f32", "f16", "i32", ...; "dtype(code,bits,lanes)" in a thread-local text otherwise. */
COF_API const char *cof_dtype_name(cof_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
