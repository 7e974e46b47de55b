/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The one GEMM provider of the CPU back end: oneDNN loaded at run time, or plain C.
 *
 *     C[M,N] = op(A) op(B)  or  C[M,N] += op(A) op(B)      A, B row-major of one type, C fp32
 *
 * A provider object belongs to one thread: it is opened, used and closed there, and a product uses
 * that thread alone (parallelism over tiles is the caller's). */
#ifndef COFI_GEMM_H
#define COFI_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "cofuse/tensor.h"

enum cofi_gemm_form {
    COFI_GEMM_NT, /* A [M,K], B [N,K]: C = A B^T */
    COFI_GEMM_NN, /* A [M,K], B [K,N]: C = A B   */
    COFI_GEMM_TN  /* A [K,M], B [K,N]: C = A^T B */
};

enum cofi_gemm_type { COFI_GEMM_F32, COFI_GEMM_BF16 };

struct cofi_gemm;

/* Chooses the provider for this process (COFUSE_GEMM, COFUSE_CPU_ISA), loading oneDNN when it is
 * wanted and found. Called once by world creation; later calls return the first result.
 * COF_ERR_UNSUPPORTED when COFUSE_GEMM=onednn and it cannot be had. */
cof_status cofi_gemm_init(void);

/* "onednn-2.6.3" or "plain": goes into describe lines and the capabilities ranks compare. */
const char *cofi_gemm_name(void);

/* Replaces the provider by plain C for the whole process: ranks with different ones agree on it.
 * Before any cofi_gemm_open. */
void cofi_gemm_use_plain(void);

/* Whether products of this type run natively: fp32 always; bf16 with oneDNN on AVX-512-bf16.
 * Otherwise the caller converts its tiles to fp32 panels. */
bool cofi_gemm_has(enum cofi_gemm_type type);

/* Makes every primitive this provider may run (a few ms the first time in a process) and proves
 * each on a small product against plain C, so that a broken library is an error here and never a
 * wrong result later. On the thread that will use it. */
cof_status cofi_gemm_open(struct cofi_gemm **gemm_out);
void cofi_gemm_close(struct cofi_gemm *gemm);

/* One product; leading dimensions in elements. M, N or K of 0 is legal (K = 0: C is 0, or kept). */
cof_status cofi_gemm_run(struct cofi_gemm *gemm, enum cofi_gemm_form form, enum cofi_gemm_type type,
                         int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b,
                         int64_t ldb, bool accumulate, float *c, int64_t ldc);

#endif
