/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The file format .npy of NumPy, one array a file: 6 bytes of magic, 2 of version, the header's
 * length (2 bytes little-endian in version 1, 4 in 2 and 3), a header, the data. The header is
 * a Python dict such as
 *
 *     {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
 *
 * The reader believes nothing, as that of safetensors. */
#ifndef COFI_NPY_H
#define COFI_NPY_H

#include "safetensors.h"

#define COFI_NPY_HEADER_BYTES_MAX 65536 /* that are read */
#define COFI_NPY_NEW_HEADER_BYTES 384   /* that are written, at most */

/* Opens a file and checks all of its header. Fills everything of *tensor but its name and data;
 * the caller closes tensor->fd. false: *tensor owns nothing, error has the text. */
bool cofi_npy_open(const char *path, struct cofi_st_tensor *tensor, char *error);

/* Whether the format has this dtype: it has no bf16 and no fp8. */
bool cofi_npy_has_dtype(cof_dtype dtype);

/* What precedes a tensor's data in a file, version 1.0; returns its bytes, a multiple of 64. The
 * dtype must be one that the format has. */
size_t cofi_npy_header(const struct cofi_st_tensor *tensor, char header[COFI_NPY_NEW_HEADER_BYTES]);

#endif
