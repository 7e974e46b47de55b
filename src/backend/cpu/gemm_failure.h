/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Products that fail in tasks of a stream's threads. Apart from gemm.h, which C++ reads too. */
#ifndef COFI_GEMM_FAILURE_H
#define COFI_GEMM_FAILURE_H

#include "core/error.h"

/* The first failure among products that run as tasks, with its text; zero: none. */
struct cofi_gemm_failure {
    _Atomic int status;
    char text[COFI_ERROR_TEXT_BYTES];
};

/* What cofi_gemm_run has returned, on the thread that called it. */
void cofi_gemm_note(struct cofi_gemm_failure *failure, cof_status status);

/* COF_OK, or that failure with a text, on the thread that has seen all tasks end; `what` begins the
 * text. */
cof_status cofi_gemm_failed(const struct cofi_gemm_failure *failure, const char *what);

#endif
