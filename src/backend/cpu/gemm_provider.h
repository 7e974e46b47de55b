/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The two providers behind gemm.h, as gemm.c sees them. M, N and K are at least 1 here. */
#ifndef COFI_GEMM_PROVIDER_H
#define COFI_GEMM_PROVIDER_H

#include <stddef.h>

#include "backend/cpu/gemm.h"

enum { COFI_GEMM_N_FORMS = COFI_GEMM_TN + 1, COFI_GEMM_N_TYPES = COFI_GEMM_BF16 + 1 };

/* The arguments of cofi_gemm_run. */
struct cofi_gemm_call {
    enum cofi_gemm_form form;
    enum cofi_gemm_type type;
    int64_t m, n, k;
    const void *a, *b;
    float *c;
    int64_t lda, ldb, ldc;
    bool accumulate;
};

/* Plain C: fp32 only. NULL when out of memory. */
struct cofi_gemm_plain;
struct cofi_gemm_plain *cofi_gemm_plain_open(void);
void cofi_gemm_plain_close(struct cofi_gemm_plain *plain);
void cofi_gemm_plain_run(struct cofi_gemm_plain *plain, const struct cofi_gemm_call *call);

/* oneDNN. Load once per process: false with the reason in `why`. */
struct cofi_onednn;
bool cofi_onednn_load(char *why, size_t why_bytes);
const char *cofi_onednn_name(void); /* "onednn-2.6.3"; NULL before a load that succeeded */

/* One thread's primitives. bf16 ones are made when `want_bf16`; where the library has not all of
 * them, cofi_onednn_has says so. */
cof_status cofi_onednn_open(bool want_bf16, struct cofi_onednn **onednn_out);
void cofi_onednn_close(struct cofi_onednn *onednn);
bool cofi_onednn_has(const struct cofi_onednn *onednn, enum cofi_gemm_type type);
cof_status cofi_onednn_run(struct cofi_onednn *onednn, const struct cofi_gemm_call *call);

#endif
