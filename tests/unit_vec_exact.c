/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Every table of exact kernels this processor can run, and the 16-wide template split by the
 * compiler (-Wno-psabi), bit for bit against plain loops of one fp32 operation a statement: all
 * types and forms, every tail, special values, all patterns of 16 bits; guard bytes. */
#define COFI_VEC_SUFFIX wide16
#define COFI_VEC_WIDTH 16
#include "backend/cpu/vec_exact_tmpl.c"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/vec.h"

#define MAX_N 1100
#define MAX_SRC 5
#define GUARD 16 /* bytes on both sides */

static int n_failed, n_compared;
static char context[120];

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float f32_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- the reference: one element at a time --------------------------------------------------- */

static float load_one(enum cofi_elem elem, const void *src, int64_t i)
{
    const uint16_t *half = src;
    if (elem == COFI_ELEM_F32)
        return f32_of(((const uint32_t *)src)[i]);
    if (elem == COFI_ELEM_BF16)
        return f32_of((uint32_t)half[i] << 16);
    int exponent = half[i] >> 10 & 31, fraction = half[i] & 1023;
    float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? ldexpf((float)fraction, -24)
                                 : ldexpf((float)(fraction + 1024), exponent - 25);
    return half[i] >> 15 ? -size : size;
}

static uint32_t round_to_f16(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000;
    double size = fabs((double)x);
    if (isnan(x))
        return 0x7fff;
    int exponent = size < 0x1p-14 ? -14 : isinf(size) ? 16 : ilogb(size);
    double units = isinf(size) ? 0 : nearbyint(ldexp(size, 10 - exponent)); /* 0 .. 2048 */
    if (exponent > 15 || (exponent == 15 && units == 2048))
        return sign | 0x7c00;
    return sign | (uint32_t)((exponent + 14) * 1024 + (int)units); /* a carry moves the exponent */
}

static uint32_t round_to_bf16(float x)
{
    uint32_t bits = bits_of(x), rest = bits & 0xffff;
    if (isnan(x))
        return 0x7fff;
    bits >>= 16;
    return bits + (rest > 0x8000 || (rest == 0x8000 && (bits & 1)));
}

static uint32_t round_one(enum cofi_elem elem, float x)
{
    return elem == COFI_ELEM_BF16  ? round_to_bf16(x)
           : elem == COFI_ELEM_F16 ? round_to_f16(x)
                                   : isnan(x) ? 0x7fffffff : bits_of(x);
}

static void store_one(enum cofi_elem elem, void *dst, int64_t i, float x)
{
    if (elem == COFI_ELEM_F32)
        ((uint32_t *)dst)[i] = round_one(elem, x);
    else
        ((uint16_t *)dst)[i] = (uint16_t)round_one(elem, x);
}

static float through(enum cofi_elem elem, float x)
{
    uint32_t bits = round_one(elem, x);
    uint16_t half = (uint16_t)bits;
    return elem == COFI_ELEM_F32 ? x : load_one(elem, &half, 0);
}

static float tree_of(const float *x, int n)
{
    return n == 1 ? x[0] : tree_of(x, n / 2) + tree_of(x + n / 2, n / 2);
}

static void reference_row(enum cofi_elem src, enum cofi_elem elem, const struct cofi_exact_row *row)
{
    float total = 0;
    for (int64_t i0 = 0; i0 < row->n; i0 += COFI_EXACT_SEGMENT) {
        float squares[COFI_EXACT_SEGMENT] = {0};
        for (int64_t i = i0; i < row->n && i < i0 + COFI_EXACT_SEGMENT; i++) {
            float z = load_one(src, row->src[0], i);
            for (int r = 1; r < row->n_src; r++)
                z = z + load_one(src, row->src[r], i);
            z = row->exact ? z : through(elem, z);
            if (row->residual)
                z = z + load_one(elem, row->residual, i);
            z = row->exact ? z : through(elem, z);
            if (row->out)
                store_one(elem, row->out, i, z);
            if (row->z)
                row->z[i] = z;
            squares[i - i0] = z * z;
        }
        total = total + tree_of(squares, COFI_EXACT_SEGMENT);
    }
    if (row->squares)
        *row->squares = total;
}

static void reference_norm(enum cofi_elem elem, enum cofi_elem z_elem, enum cofi_elem weight_elem,
                           void *dst, const void *z, const void *weight, bool bias, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float w = load_one(weight_elem, weight, i), scaled = load_one(z_elem, z, i) * 0.37f;
        w = bias ? w + 1.0f : w;
        store_one(elem, dst, i, scaled * w);
    }
}

/* ---- comparisons ---------------------------------------------------------------------------- */

static void compare(const char *what, const void *got, const void *want, size_t bytes)
{
    n_compared++;
    if (!memcmp(got, want, bytes))
        return;
    size_t at = 0;
    while (((const char *)got)[at] == ((const char *)want)[at])
        at++;
    printf("not ok %s: %s differs at byte %zu of %zu\n", context, what, at, bytes);
    if (++n_failed > 20)
        exit(1);
}

/* z and squares are fp32 between kernels: any NaN will do there. */
static void one_nan_each(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (isnan(x[i]))
            x[i] = f32_of(0x7fffffff);
}

/* Buffers a byte off any alignment but the type's, with guards. */
struct buffers {
    char src[MAX_SRC][MAX_N * 4 + 64], residual[MAX_N * 4 + 64], weight[MAX_N * 4 + 64];
    char out[2][MAX_N * 4 + 64]; /* got, wanted */
    float z[2][MAX_N + 2 * GUARD];
};

static uint32_t random_bits(void)
{
    static uint64_t state = 12345;
    state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* kind 0: numbers near 1; 1: any pattern; 2: large, so that squares and sums overflow; 3: tiny */
static void fill(enum cofi_elem elem, void *dst, int64_t n, int kind)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = random_bits();
        float x = ((float)(bits & 0xffffff) / 0x800000 - 1) *
                  (kind == 2 ? (elem == COFI_ELEM_F16 ? 6e4f : 3e38f) : kind == 3 ? 1e-38f : 1);
        if (kind != 1)
            store_one(elem, dst, i, x);
        else if (elem == COFI_ELEM_F32)
            ((uint32_t *)dst)[i] = bits;
        else
            ((uint16_t *)dst)[i] = (uint16_t)bits;
    }
}

static void try_row(const struct cofi_exact_ops *ops, struct buffers *b, enum cofi_elem src,
                    enum cofi_elem elem, struct cofi_exact_row row, bool with_out)
{
    float squares[2] = {0, 0};
    const void *rows[MAX_SRC];
    for (int r = 0; r < row.n_src; r++)
        rows[r] = b->src[r] + (src == COFI_ELEM_F32 ? 4 : 2) * (r + 1);
    row.src = rows;
    for (int i = 0; i < 2; i++) { /* kernel, reference */
        memset(b->out[i], 0x5a, sizeof b->out[i]);
        memset(b->z[i], 0x5a, sizeof b->z[i]);
        row.out = with_out ? b->out[i] + GUARD : NULL;
        row.z = b->z[i] + GUARD;
        row.squares = &squares[i];
        if (i == 0)
            cofi_exact_row(ops, src, elem, &row);
        else
            reference_row(src, elem, &row);
        one_nan_each(row.z, row.n);
        one_nan_each(&squares[i], 1);
    }
    compare("out", b->out[0], b->out[1], sizeof b->out[0]);
    compare("z", b->z[0], b->z[1], sizeof b->z[0]);
    compare("squares", &squares[0], &squares[1], sizeof squares[0]);
}

static void try_norm(const struct cofi_exact_ops *ops, struct buffers *b, enum cofi_elem elem,
                     enum cofi_elem weight_elem, bool bias, int64_t n)
{
    const void *weight = b->weight + cofi_elem_bytes(weight_elem);
    for (int i = 0; i < 2; i++)
        memset(b->out[i], 0x5a, sizeof b->out[i]);
    cofi_exact_norm(ops, elem,
                    &(struct cofi_exact_norm){b->out[0] + GUARD, b->z[1] + GUARD, weight,
                                              COFI_ELEM_F32, weight_elem, 0.37f, bias, n});
    reference_norm(elem, COFI_ELEM_F32, weight_elem, b->out[1] + GUARD, b->z[1] + GUARD, weight,
                   bias, n);
    compare("norm", b->out[0], b->out[1], sizeof b->out[0]);
    /* z in the type, where the result goes */
    for (int i = 0; i < 2; i++)
        memcpy(b->out[i], b->residual, sizeof b->out[i]);
    cofi_exact_norm(ops, elem,
                    &(struct cofi_exact_norm){b->out[0] + GUARD, b->out[0] + GUARD, weight, elem,
                                              weight_elem, 0.37f, bias, n});
    reference_norm(elem, elem, weight_elem, b->out[1] + GUARD, b->out[1] + GUARD, weight, bias, n);
    compare("norm in place", b->out[0], b->out[1], sizeof b->out[0]);
}

static void try_forms(const struct cofi_exact_ops *ops, struct buffers *b, enum cofi_elem src,
                      enum cofi_elem elem, int64_t n, int kind)
{
    static const char *const names[] = {"f32", "bf16", "f16"};
    for (int form = 0; form < 8; form++) {
        bool exact = form & 1, with_residual = form & 2, with_out = form & 4;
        int n_src = 1 + (int)(n + form) % MAX_SRC;
        struct cofi_exact_row row = {.n_src = n_src, .n = n, .exact = exact};
        snprintf(context, sizeof context, "%s %s to %s n=%lld kind=%d form=%d n_src=%d", ops->name,
                 names[src], names[elem], (long long)n, kind, form, n_src);
        for (int r = 0; r < MAX_SRC; r++)
            fill(src, b->src[r] + cofi_elem_bytes(src) * (r + 1), n, kind);
        fill(elem, b->residual, n, kind);
        row.residual = with_residual ? b->residual : NULL;
        try_row(ops, b, src, elem, row, with_out);
        enum cofi_elem weight_elem = form & 1 ? COFI_ELEM_F32 : elem;
        fill(weight_elem, b->weight + cofi_elem_bytes(weight_elem), n, kind == 1);
        try_norm(ops, b, elem, weight_elem, form & 2, n);
    }
}

/* Each pattern of 16 bits as source and as residual of a zero. */
static void try_all_patterns(const struct cofi_exact_ops *ops, struct buffers *b,
                             enum cofi_elem elem)
{
    for (int first = 0; first < 0x10000; first += 1024)
        for (int form = 0; form < 4; form++) {
            struct cofi_exact_row row = {.n_src = 1, .n = 1024, .exact = form & 1};
            uint16_t *x = (void *)(b->src[0] + 2), *residual = (void *)b->residual;
            snprintf(context, sizeof context, "%s elem %d patterns from %x form %d", ops->name,
                     (int)elem, (unsigned)first, form);
            for (int i = 0; i < 1024; i++) {
                x[i] = (uint16_t)(form & 2 ? 0x8000 : first + i);
                residual[i] = (uint16_t)(first + i);
            }
            row.residual = form & 2 ? residual : NULL;
            try_row(ops, b, elem, elem, row, true);
        }
}

static void try_table(const struct cofi_exact_ops *ops)
{
    static struct buffers b;
    static const struct {
        enum cofi_elem src, elem;
    } pairs[] = {{COFI_ELEM_F32, COFI_ELEM_F32},
                 {COFI_ELEM_BF16, COFI_ELEM_BF16},
                 {COFI_ELEM_F16, COFI_ELEM_F16},
                 {COFI_ELEM_F32, COFI_ELEM_BF16},
                 {COFI_ELEM_F32, COFI_ELEM_F16}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        for (int kind = 0; kind < 4; kind++) {
            for (int64_t n = 1; n <= 70; n++)
                try_forms(ops, &b, pairs[i].src, pairs[i].elem, n, kind);
            for (int64_t n = 255; n <= 257; n++)
                try_forms(ops, &b, pairs[i].src, pairs[i].elem, n, kind);
            try_forms(ops, &b, pairs[i].src, pairs[i].elem, 1000, kind);
            try_forms(ops, &b, pairs[i].src, pairs[i].elem, 1024, kind);
        }
    try_all_patterns(ops, &b, COFI_ELEM_BF16);
    try_all_patterns(ops, &b, COFI_ELEM_F16);
}

int main(void)
{
    try_table(&cofi_exact_wide16);
    try_table(&cofi_exact_scalar);
#if defined(__x86_64__)
    if (cofi_isa() >= COFI_ISA_AVX2)
        try_table(&cofi_exact_avx2);
    if (cofi_isa() >= COFI_ISA_AVX512)
        try_table(&cofi_exact_avx512);
#endif
    printf("%d comparisons passed, %d failed\n", n_compared - n_failed, n_failed);
    return n_failed != 0;
}
