/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the reference and the plain implementation share: access to elements, conversion of bf16. */
#ifndef COFI_ATTENTION_REF_LANES_H
#define COFI_ATTENTION_REF_LANES_H

#include <string.h>

#include "ops/attention/attention_ref.h"

/* Plain C compiled for wider vectors too, chosen at load time; not under sanitizers, whose run time
 * is not there yet when the choice is made. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__) &&              \
    !defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
#define COFI_REF_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define COFI_REF_CLONES
#endif

static inline float cofi_ref_from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Nearest bf16 value, ties to even; NaN stays NaN. */
static inline float cofi_ref_round_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = x != x ? bits | UINT32_C(0x400000) : bits + 0x7fff + ((bits >> 16) & 1);
    return cofi_ref_from_bf16((uint16_t)(bits >> 16));
}

/* Element (batch, row, head, d) of a view. */
static inline float cofi_ref_value(const struct cofi_attention_problem *p,
                                   const struct cofi_attention_view *view, int64_t batch,
                                   int64_t row, int64_t head, int64_t d)
{
    int64_t at = batch * view->batch_stride + row * view->row_stride + head * view->head_stride + d;
    return p->is_bf16 ? cofi_ref_from_bf16(((const uint16_t *)view->data)[at])
                      : ((const float *)view->data)[at];
}

#endif
