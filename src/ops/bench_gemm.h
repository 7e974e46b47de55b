/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The yardstick of operators that are made of matrix products: the rate of such products alone, on
 * the same threads, all ranks at a time. */
#ifndef COFI_BENCH_GEMM_H
#define COFI_BENCH_GEMM_H

#include "backend/cpu/gemm.h"
#include "ops/ops.h"

struct cofi_bench_product {
    enum cofi_gemm_form form;
    int64_t m, n, k; /* m n of at most 64 k elements */
    double weight;   /* the part of all operations that such products have */
};

/* flop/s of this rank: each product in its part of `seconds`, combined by weight. In the types of
 * which the provider has products, else fp32. Collective. */
cof_status cofi_bench_gemm_rate(cof_world *world, cof_dtype dtype,
                                const struct cofi_bench_product *products, int n_products,
                                double seconds, double *rate_out);

#endif
