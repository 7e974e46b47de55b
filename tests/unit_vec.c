/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Every table of vector kernels this processor can run, and the 16-wide template split by the
 * compiler (-Wno-psabi), against libm in double: dense sweeps, special values, every tail length,
 * guard bytes. */
#define COFI_VEC_SUFFIX wide16
#define COFI_VEC_WIDTH 16
#include "backend/cpu/vec_tmpl.c"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "ops/check.h"
#include "ops/check_elem.h"

#define MAX_N 70
#define GUARD 8
#define N_ROOM (MAX_N + 2 * GUARD)

static int n_failed;
static char context[64];

#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            printf("not ok %s: ", context);                                                        \
            printf(__VA_ARGS__);                                                                   \
            printf(" (line %d)\n", __LINE__);                                                      \
            if (++n_failed > 20)                                                                   \
                exit(1);                                                                           \
        }                                                                                          \
    } while (0)

static float f32_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The 16-bit types: [0] bf16, [1] fp16. */
static const struct half {
    const char *name;
    enum cofi_elem elem;
    int n_fraction, bias; /* bits of the fraction; of the exponent */
} halves[2] = {{"bf16", COFI_ELEM_BF16, 7, 127}, {"f16", COFI_ELEM_F16, 10, 15}};

/* Sizes of all patterns without sign; infinity's is 2^128 or 2^16, so that distances to it are
 * numbers. */
static double half_sizes[2][0x8000];

static void make_sizes(void)
{
    for (int i = 0; i < 2; i++)
        for (int bits = 0; bits < 0x8000; bits++) {
            int n = halves[i].n_fraction, exponent = bits >> n, fraction = bits & ((1 << n) - 1);
            half_sizes[i][bits] = exponent > 0
                                      ? ldexp(fraction + (1 << n), exponent - halves[i].bias - n)
                                      : ldexp(fraction, 1 - halves[i].bias - n);
        }
}

static uint32_t infinity_of(const struct half *half)
{
    return (uint32_t)(0x8000 - (1 << half->n_fraction));
}

static double half_value(const struct half *half, uint32_t bits)
{
    double size = half_sizes[half - halves][bits & 0x7fff];
    return bits & 0x8000 ? -size : size;
}

/* The bits of x in the type: to nearest, ties to even; a NaN is quiet and keeps its upper bits. */
static uint16_t nearest_half(const struct half *half, float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000, down = 0, up = infinity_of(half);
    const double *sizes = half_sizes[half - halves], size = fabs((double)x);
    if (isnan(x)) {
        uint32_t quiet = 1u << (half->n_fraction - 1);
        uint32_t fraction = (bits_of(x) & 0x7fffff) >> (23 - half->n_fraction);
        return (uint16_t)(sign | up | quiet | fraction);
    }
    if (size >= sizes[up])
        return (uint16_t)(sign | up);
    while (up - down > 1) {
        uint32_t middle = (down + up) / 2;
        if (sizes[middle] <= size)
            down = middle;
        else
            up = middle;
    }
    double to_down = size - sizes[down], to_up = sizes[up] - size;
    return (uint16_t)(sign | (to_down < to_up || (to_down == to_up && !(down & 1)) ? down : up));
}

static bool is_bf16_of(uint16_t got, float x)
{
    return got == nearest_half(&halves[0], x);
}

/* What a pattern is in fp32: bf16 is its upper half, of fp16 a NaN becomes quiet. */
static uint32_t widened(const struct half *half, uint32_t bits)
{
    uint32_t fraction = bits & (uint32_t)((1 << half->n_fraction) - 1);
    if (half->elem == COFI_ELEM_BF16)
        return bits << 16;
    if ((bits & 0x7fff) < infinity_of(half))
        return bits_of((float)half_value(half, bits));
    return (bits & 0x8000) << 16 | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0);
}

static void check_rounding(const struct cofi_vec_ops *ops, const struct half *half,
                           const float *wide, int64_t n)
{
    static uint16_t narrow[2 * 65536]; /* fp32 fits too: the compiler does not rule it out */
    cofi_vec_store(ops, half->elem, narrow, wide, n);
    for (int64_t i = 0; i < n; i++) {
        uint16_t want = nearest_half(half, wide[i]), plain;
        cofi_check_store(&plain, half->elem == COFI_ELEM_F16 ? COF_F16 : COF_BF16, 0, wide[i]);
        CHECK(narrow[i] == want, "f32 %08x became %s %04x, not %04x", bits_of(wide[i]), half->name,
              narrow[i], want);
        CHECK(plain == want, "checks make f32 %08x %s %04x, not %04x", bits_of(wide[i]), half->name,
              plain, want);
        float rounded = cofi_check_elem_round(wide[i], half->elem);
        float loaded = cofi_check_elem_load(narrow, half->elem, i);
        CHECK(isnan(wide[i]) ? isnan(rounded) : bits_of(rounded) == bits_of(loaded),
              "checks round f32 %08x to %s %a", bits_of(wide[i]), half->name, (double)rounded);
    }
}

/* Every pattern; every upper half of fp32 with lower ones about the ties; the middle between any
 * two neighbours, and the fp32 numbers next to it. */
static void test_conversion(const struct cofi_vec_ops *ops, const struct half *half)
{
    static uint16_t narrow[2 * 65536];
    static float wide[65536];
    static const uint32_t lows[] = {0,      1,      0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001,
                                    0x1234, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff};
    for (uint32_t i = 0; i < 65536; i++)
        narrow[i] = (uint16_t)i;
    cofi_vec_load(ops, half->elem, wide, narrow, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        CHECK(bits_of(wide[i]) == widened(half, i), "%s %04x became %08x, not %08x", half->name, i,
              bits_of(wide[i]), widened(half, i));
        float plain = cofi_check_elem_load(narrow, half->elem, i);
        CHECK(plain == wide[i] || (isnan(plain) && isnan(wide[i])), "checks make %s %04x %g",
              half->name, i, (double)plain);
    }
    for (size_t j = 0; j < sizeof lows / sizeof lows[0]; j++) {
        for (uint32_t i = 0; i < 65536; i++)
            wide[i] = f32_of(i << 16 | lows[j]);
        check_rounding(ops, half, wide, 65536);
    }
    for (int side = -1; side <= 1; side++) {
        for (uint32_t i = 0; i < infinity_of(half); i++) {
            float middle = (float)(half_value(half, i) / 2 + half_value(half, i + 1) / 2);
            wide[i] = side ? nextafterf(middle, (float)side * INFINITY) : middle;
            wide[i] = i % 2 ? -wide[i] : wide[i];
        }
        check_rounding(ops, half, wide, infinity_of(half));
    }
}

/* The error of p as exp(x), in units of the last place of an fp32 result there. */
static double ulps_of_exp(float p, double x)
{
    double want = exp(x);
    if (isnan(x) || isnan(p))
        return isnan(x) && isnan(p) ? 0 : 1e9;
    if (isinf(p))
        return want > 0x1.fffffep127 ? 0 : 1e9;
    double ulp = fmax(0x1p-149, ldexp(1, ilogb(fmax(want, 0x1p-149)) - 23));
    return fabs(p - want) / ulp;
}

/* All of one exponent after another, with a stride prime to every block size. */
static void test_exp_sweep(const struct cofi_vec_ops *ops)
{
    enum { N = 4099 };
    static float s[N], p[N];
    static uint16_t p_bf16[N];
    double worst = 0;
    float worst_at = 0;
    uint32_t bits = bits_of(0x1p-30f), sign = 0;
    while (bits < bits_of(120.0f)) {
        for (int i = 0; i < N; i++, sign ^= 0x80000000u, bits += sign ? 0 : 101)
            s[i] = f32_of(bits | sign);
        float sum = ops->exp_f32(p, s, 1, 0, N), sum_bf16 = ops->exp_bf16(p_bf16, s, 1, 0, N);
        CHECK(bits_of(sum) == bits_of(sum_bf16), "sums %g and %g", (double)sum, (double)sum_bf16);
        double want_sum = 0;
        for (int i = 0; i < N; i++) {
            double ulps = ulps_of_exp(p[i], s[i]);
            worst_at = ulps > worst ? s[i] : worst_at;
            worst = fmax(worst, ulps);
            want_sum += p[i];
            CHECK(is_bf16_of(p_bf16[i], p[i]), "exp_bf16(%a) = %04x", (double)s[i], p_bf16[i]);
        }
        want_sum = want_sum > 0x1.ffffp127 ? INFINITY : want_sum;
        CHECK(sum == want_sum || fabs(sum - want_sum) <= 1e-5 * want_sum, "sum of exp %g, not %g",
              (double)sum, want_sum);
    }
    CHECK(worst <= 2, "exp(%a) is off by %.2f ulp", (double)worst_at, worst);
    printf("# %s: exp within %.2f ulp, worst at %a\n", ops->name, worst, (double)worst_at);
}

static void test_exp_special(const struct cofi_vec_ops *ops)
{
    static const float s[] = {0.0f,     -0.0f,      1.0f,       -1.0f,     -INFINITY,
                              INFINITY, NAN,        -NAN,       1e30f,     -1e30f,
                              88.7f,    88.72283f,  88.72284f,  89.0f,     -87.33654f,
                              -103.27f, -87.33655f, -103.97f,   -103.98f,  -104.0f,
                              -105.0f,  1e-45f,     -1e-45f,    3.4e38f,   -3.4e38f};
    enum { N = sizeof s / sizeof s[0] };
    float p[N];
    ops->exp_f32(p, s, 1, 0, N);
    for (int i = 0; i < N; i++)
        CHECK(ulps_of_exp(p[i], s[i]) <= 2, "exp(%a) = %a", (double)s[i], (double)p[i]);
    CHECK(p[0] == 1 && p[1] == 1 && p[4] == 0 && isinf(p[5]) && p[5] > 0 && p[19] == 0,
          "exp of 0, -0, -inf, inf, -104: %g %g %g %g %g", (double)p[0], (double)p[1],
          (double)p[4], (double)p[5], (double)p[19]);
    CHECK(!signbit(p[4]) && isnan(p[6]) && isnan(p[7]), "exp of -inf and NaN");
    ops->exp_f32(p, s, -0.5f, 1.5f, 4);
    for (int i = 0; i < 4; i++)
        CHECK(ulps_of_exp(p[i], -0.5 * s[i] - 1.5) <= 4, "exp, scaled and shifted, of %a",
              (double)s[i]);
}

/* Buffers of one tail length: inputs of exactly n elements on the heap, one element off alignment
 * (AddressSanitizer sees a read past the end), outputs between guards. */
struct tail {
    int64_t n;
    float *s, *d;
    uint16_t *h, *g; /* of a 16-bit type */
    float out[N_ROOM], out2[N_ROOM];
    uint16_t out_half[N_ROOM], out2_half[N_ROOM];
};

static const uint8_t guard_byte = 0xa5;

static void poison(struct tail *t)
{
    memset(t->out, guard_byte, sizeof t->out);
    memset(t->out2, guard_byte, sizeof t->out2);
    memset(t->out_half, guard_byte, sizeof t->out_half);
    memset(t->out2_half, guard_byte, sizeof t->out2_half);
}

static bool is_guarded(const void *room, size_t element, int64_t n)
{
    const uint8_t *bytes = room;
    size_t begin = GUARD * element, end = (GUARD + (size_t)n) * element;
    for (size_t i = 0; i < N_ROOM * element; i++)
        if ((i < begin || i >= end) && bytes[i] != guard_byte)
            return false;
    return true;
}

static void check_guards(const struct tail *t, const char *what)
{
    CHECK(is_guarded(t->out, 4, t->n) && is_guarded(t->out2, 4, t->n) &&
              is_guarded(t->out_half, 2, t->n) && is_guarded(t->out2_half, 2, t->n),
          "%s wrote outside its %d elements", what, (int)t->n);
}

static void test_tail_sums(const struct cofi_vec_ops *ops, struct tail *t)
{
    float *out = t->out + GUARD;
    poison(t);
    memcpy(out, t->d, sizeof(float) * (size_t)t->n);
    ops->add_f32(out, t->s, t->n);
    for (int64_t i = 0; i < t->n; i++)
        CHECK(out[i] == t->d[i] + t->s[i], "add_f32 n %d at %d", (int)t->n, (int)i);
    check_guards(t, "add_f32");
    memcpy(out, t->s, sizeof(float) * (size_t)t->n);
    ops->scale(out, 1.7f, t->n);
    for (int64_t i = 0; i < t->n; i++)
        CHECK(out[i] == t->s[i] * 1.7f, "scale n %d at %d", (int)t->n, (int)i);
    check_guards(t, "scale");

    double dot = 0, size = 0, top = -INFINITY;
    for (int64_t i = 0; i < t->n; i++) {
        double product = (double)t->s[i] * (double)t->d[i];
        dot += product, size += fabs(product);
        top = fmax(top, t->s[i]);
    }
    CHECK(fabs(ops->dot_f32(t->s, t->d, t->n) - dot) <= 1e-6 * size, "dot_f32 n %d", (int)t->n);
    CHECK(ops->max(t->s, t->n) == top, "max n %d", (int)t->n);
    for (int64_t i = 0; i < t->n; i++) {
        float kept = t->s[i];
        t->s[i] = 1e9f;
        CHECK(ops->max(t->s, t->n) == 1e9f, "max n %d misses element %d", (int)t->n, (int)i);
        t->s[i] = i % 2 ? NAN : -NAN;
        CHECK(isnan(ops->max(t->s, t->n)), "max n %d misses NaN at %d", (int)t->n, (int)i);
        t->s[i] = kept;
    }
}

static void test_tail_half(const struct cofi_vec_ops *ops, struct tail *t, const struct half *half)
{
    float *out = t->out + GUARD;
    double dot = 0, size = 0;
    poison(t);
    for (int64_t i = 0; i < t->n; i++) {
        t->h[i] = nearest_half(half, t->s[i]);
        t->g[i] = nearest_half(half, t->d[i]);
        double product = half_value(half, t->h[i]) * half_value(half, t->g[i]);
        dot += product, size += fabs(product);
    }
    memcpy(out, t->d, sizeof(float) * (size_t)t->n);
    cofi_vec_add(ops, half->elem, out, t->h, t->n);
    for (int64_t i = 0; i < t->n; i++)
        CHECK(out[i] == t->d[i] + (float)half_value(half, t->h[i]), "add_%s n %d at %d", half->name,
              (int)t->n, (int)i);
    check_guards(t, "add to fp32");
    cofi_vec_load(ops, half->elem, out, t->h, t->n);
    cofi_vec_store(ops, half->elem, t->out_half + GUARD, t->s, t->n);
    for (int64_t i = 0; i < t->n; i++)
        CHECK(out[i] == (float)half_value(half, t->h[i]) && t->out_half[GUARD + i] == t->h[i],
              "conversion of %s n %d at %d", half->name, (int)t->n, (int)i);
    check_guards(t, "conversion");
    CHECK(fabs(cofi_vec_dot(ops, half->elem, t->h, t->g, t->n) - dot) <= 1e-6 * size,
          "dot_%s n %d", half->name, (int)t->n);
}

static void test_tail_exp(const struct cofi_vec_ops *ops, struct tail *t)
{
    const float scale_ = 0.3f, shift = 2.5f, delta = 0.25f;
    float *p = t->out + GUARD, *ds = t->out2 + GUARD, in_place[MAX_N], in_place_ds[MAX_N];
    uint16_t *p_bf16 = t->out_half + GUARD, *ds_bf16 = t->out2_half + GUARD;
    size_t bytes = sizeof(float) * (size_t)t->n;
    poison(t);
    float sum = ops->exp_f32(p, t->s, scale_, shift, t->n);
    CHECK(sum == ops->exp_bf16(p_bf16, t->s, scale_, shift, t->n), "sums differ, n %d", (int)t->n);
    memcpy(in_place, t->s, bytes);
    float again = ops->exp_f32(in_place, in_place, scale_, shift, t->n);
    CHECK(sum == again, "exp in place, n %d", (int)t->n);
    double want_sum = 0;
    for (int64_t i = 0; i < t->n; i++) {
        double x = (double)scale_ * (double)t->s[i] - (double)shift;
        CHECK(ulps_of_exp(p[i], x) <= 3 + fabs(x) * 2, "exp_f32 n %d at %d", (int)t->n, (int)i);
        CHECK(p[i] == in_place[i] && is_bf16_of(p_bf16[i], p[i]), "exp n %d at %d", (int)t->n,
              (int)i);
        want_sum += p[i];
    }
    CHECK(fabs(sum - want_sum) <= 1e-6 * want_sum, "sum of exp n %d: %g, not %g", (int)t->n,
          (double)sum, want_sum);
    check_guards(t, "exp");

    poison(t);
    ops->softmax_grad_f32(p, ds, t->s, t->d, scale_, shift, delta, t->n);
    ops->softmax_grad_bf16(p_bf16, ds_bf16, t->s, t->d, scale_, shift, delta, t->n);
    for (int64_t i = 0; i < t->n; i++) {
        double want = (double)p[i] * ((double)t->d[i] - (double)delta) * (double)scale_;
        CHECK(p[i] == in_place[i], "softmax_grad n %d: p at %d", (int)t->n, (int)i);
        CHECK(fabs(ds[i] - want) <= 3e-7 * fabs(want), "softmax_grad n %d: ds at %d", (int)t->n,
              (int)i);
        CHECK(is_bf16_of(p_bf16[i], p[i]) && is_bf16_of(ds_bf16[i], ds[i]),
              "softmax_grad_bf16 n %d at %d", (int)t->n, (int)i);
    }
    memcpy(in_place, t->s, bytes);
    memcpy(in_place_ds, t->d, bytes);
    ops->softmax_grad_f32(in_place, in_place_ds, in_place, in_place_ds, scale_, shift, delta, t->n);
    CHECK(!memcmp(in_place, p, bytes) && !memcmp(in_place_ds, ds, bytes), "softmax_grad in place");
    check_guards(t, "softmax_grad");
}

static void test_tails(const struct cofi_vec_ops *ops)
{
    for (int n = 0; n <= MAX_N; n++) {
        struct tail t = {.n = n};
        size_t room = (size_t)(n + 1);
        float *s = malloc(sizeof *s * room), *d = malloc(sizeof *d * room);
        uint16_t *h = malloc(sizeof *h * room), *g = malloc(sizeof *g * room);
        t.s = s + 1, t.d = d + 1, t.h = h + 1, t.g = g + 1;
        for (int i = 0; i < n; i++) {
            t.s[i] = (float)(rand() % 20001 - 10000) / 1000;
            t.d[i] = (float)(rand() % 20001 - 10000) / 3000;
        }
        test_tail_sums(ops, &t);
        test_tail_half(ops, &t, &halves[0]);
        test_tail_half(ops, &t, &halves[1]);
        test_tail_exp(ops, &t);
        free(s), free(d), free(h), free(g);
    }
    CHECK(isinf(ops->max(NULL, 0)) && ops->max(NULL, 0) < 0, "max of nothing");
}

/* Scores of 1e10 and more: exp(scale*s - shift) is 1 where shift is the rounded product, whatever
 * an FMA would make of it, and 0 well below. */
static void test_exp_large(const struct cofi_vec_ops *ops)
{
    enum { N = 70 };
    float s[N], p[N], ds[N], dp[N] = {0};
    uint16_t h[N];
    for (int trial = 0; trial < 200; trial++) {
        const float scale = 1e6f + 997.3f * (float)trial, top = 12345.678f + (float)trial / 7;
        const float shift = (float)((double)scale * (double)top); /* rounded once */
        for (int i = 0; i < N; i++)
            s[i] = i % 3 ? top : -top;
        float sum = ops->exp_f32(p, s, scale, shift, N);
        CHECK(sum == 46, "sum of exp_f32 at %g: %g", (double)shift, (double)sum);
        sum = ops->exp_bf16(h, s, scale, shift, N);
        CHECK(sum == 46, "sum of exp_bf16 at %g: %g", (double)shift, (double)sum);
        ops->softmax_grad_f32(p, ds, s, dp, scale, shift, 0, N);
        ops->softmax_grad_bf16(h, h, s, dp, scale, shift, 0, N);
        for (int i = 0; i < N; i++)
            CHECK(p[i] == (i % 3 ? 1 : 0), "p of softmax_grad_f32 at %g: %g", (double)shift,
                  (double)p[i]);
    }
}

static void test_table(const struct cofi_vec_ops *ops)
{
    int before = n_failed;
    snprintf(context, sizeof context, "vec %s", ops->name);
    test_conversion(ops, &halves[0]);
    test_conversion(ops, &halves[1]);
    test_exp_sweep(ops);
    test_exp_special(ops);
    test_exp_large(ops);
    test_tails(ops);
    if (n_failed == before)
        printf("ok %s\n", context);
}

static void test_isa(void)
{
    int before = n_failed;
    enum cofi_isa isa = cofi_isa();
    snprintf(context, sizeof context, "vec isa");
    printf("# this process: %s\n", cofi_isa_name(isa));
    const char *table = cofi_vec()->name;
    CHECK(!strncmp(cofi_isa_name(isa), table, strlen(table)), "table %s for %s", table,
          cofi_isa_name(isa));
    cofi_isa_cap(COFI_ISA_AVX512_BF16);
    CHECK(cofi_isa() == isa, "a cap raised the set to %s", cofi_isa_name(cofi_isa()));
    cofi_isa_cap(COFI_ISA_SCALAR);
    CHECK(cofi_isa() == COFI_ISA_SCALAR && cofi_vec() == &cofi_vec_scalar, "a cap to scalar");
    if (n_failed == before)
        printf("ok %s\n", context);
}

int main(void)
{
    make_sizes();
    test_table(&cofi_vec_scalar);
    test_table(&cofi_vec_wide16);
#if defined(__x86_64__)
    if (cofi_isa() >= COFI_ISA_AVX2)
        test_table(&cofi_vec_avx2);
    if (cofi_isa() >= COFI_ISA_AVX512)
        test_table(&cofi_vec_avx512);
#endif
    test_isa();
    return n_failed != 0;
}
