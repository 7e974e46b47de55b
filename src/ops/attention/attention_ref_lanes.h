/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the reference and the plain implementation share: access to elements. */
#ifndef COFI_ATTENTION_REF_LANES_H
#define COFI_ATTENTION_REF_LANES_H

#include "ops/attention/attention_ref.h"
#include "ops/check_elem.h"

/* Plain C compiled for wider vectors too, chosen at load time; not under sanitizers, whose run time
 * is not there yet when the choice is made. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__) &&              \
    !defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
#define COFI_REF_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define COFI_REF_CLONES
#endif

/* Element (batch, row, head, d) of a view. */
static inline float cofi_ref_value(const struct cofi_attention_problem *p,
                                   const struct cofi_attention_view *view, int64_t batch,
                                   int64_t row, int64_t head, int64_t d)
{
    int64_t at = batch * view->batch_stride + row * view->row_stride + head * view->head_stride + d;
    return cofi_check_elem_load(view->data, p->elem, at);
}

#endif
