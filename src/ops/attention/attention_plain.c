/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The plain same-type implementation: fp32, rounded wherever an unfused program would store a
 * tensor of the type (for fp32 tensors that does nothing). Its error is the yardstick. */
#include "ops/attention/attention_ref.h"
#include "ops/attention/attention_ref_lanes.h"

#define REAL float
#define MATH(name) name##f
#define ROUNDED(p, x) cofi_check_elem_round(x, (p)->elem)
#define RESULT cofi_attention_plain
#define NAME(part) cofi_attention_plain_##part
#include "ops/attention/attention_ref_tmpl.c"
