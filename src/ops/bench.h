/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the benches of all operators share: the lines of their cases. Compiled into the program and
 * the tests, never into the library. */
#ifndef COFI_BENCH_H
#define COFI_BENCH_H

#include "ops/ops.h"

enum { COFI_BENCH_LINE_BYTES = 400 };

/* bench/shapes/<op>.txt, <op>_cuda.txt */
extern const char cofi_bench_shapes_attention[], cofi_bench_shapes_attention_cuda[],
    cofi_bench_shapes_grad_return[],
    cofi_bench_shapes_runtime[], cofi_bench_shapes_runtime_cuda[],
    cofi_bench_shapes_allreduce_rmsnorm[], cofi_bench_shapes_allreduce_rmsnorm_cuda[],
    cofi_bench_shapes_grad_return_cuda[], cofi_bench_shapes_trimul[];

/* Calls fn(arg, key, value) for the words of a case's line, the operator's name and words of the
 * harness (name, set) left out; so are those with which a describe line tells what a plan was given
 * by its team and machine (P, engine, arena, device, isa, gemm, kernels, sections), so that such a
 * line is a case too. The first failure ends it; COF_ERR_INVALID for a word without '='. */
typedef cof_status (*cofi_bench_word_fn)(void *arg, const char *key, const char *value);
cof_status cofi_bench_words(const char *line, cofi_bench_word_fn fn, void *arg);

/* "wire" or "partial", which name a type, or say dtype (the zero type): whether it is f32, with the
 * dtype of the case known. COF_ERR_INVALID naming key, value and rule. */
cof_status cofi_bench_is_f32(const char *key, cof_dtype named, cof_dtype dtype, int *is_f32_out);

#endif
