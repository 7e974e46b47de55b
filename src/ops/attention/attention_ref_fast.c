/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The fp64 reference in pieces and at speed; attention_ref.c is the one to read. */
#include "ops/attention/attention_ref.h"

#define REAL double
#define MATH(name) name
#define ROUNDED(p, x) ((void)(p), (x))
#define RESULT cofi_attention_ref
#define NAME(part) cofi_attention_ref_##part
#include "ops/attention/attention_ref_tmpl.c"
