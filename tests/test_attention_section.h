/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Sections of attention on a CUDA device for tests: tensors in several layouts, with guards around
 * and gaps within that are NaN, and the comparison with fp64. */
#ifndef COFUSE_TEST_ATTENTION_SECTION_H
#define COFUSE_TEST_ATTENTION_SECTION_H

#include <cuda_runtime_api.h>
#include <math.h>

#include "ops/attention/attention_engine.h"
#include "ops/check_elem.h"
#include "test.h"

#define CHECK_CUDA(expr)                                                                           \
    do {                                                                                           \
        cudaError_t check_error = (expr);                                                          \
        CHECK(check_error == cudaSuccess, "%s", cudaGetErrorString(check_error));                  \
    } while (0)

/* ---- tensors -------------------------------------------------------------------------------- */

enum test_layout { BSHD, SBHD, BHSD, PADDED, ODD, N_LAYOUTS };

static const char *const test_layout_names[] = {"bshd", "sbhd", "bhsd", "padded", "odd"};
static const char *const test_elem_names[] = {[COFI_ELEM_F32] = "f32", [COFI_ELEM_BF16] = "bf16",
                                              [COFI_ELEM_F16] = "f16"};

/* A [B, rows, heads, dim] view in a buffer of n elements, which all else fills with 0xff. */
struct test_view {
    enum cofi_elem elem;
    int64_t n_batch, n_rows, n_heads, dim;
    struct cofi_attention_strides stride;
    int64_t first; /* element of the buffer */
    size_t n;
    void *host, *device;
};

enum { TEST_GUARD = 64 };

static inline struct cofi_attention_strides test_strides(enum test_layout layout, int64_t b,
                                                         int64_t s, int64_t h, int64_t d)
{
    int64_t head = layout == PADDED ? (d + 7) / 8 * 8 + 8 : d + 1;
    int64_t row = layout == PADDED ? h * head + 16 : h * head + 3;
    switch (layout) {
    case BSHD: return (struct cofi_attention_strides){s * h * d, h * d, d};
    case SBHD: return (struct cofi_attention_strides){h * d, b * h * d, d};
    case BHSD: return (struct cofi_attention_strides){h * s * d, d, s * d};
    case PADDED: return (struct cofi_attention_strides){s * row + 8, row, head};
    default: return (struct cofi_attention_strides){s * row + 5, row, head};
    }
}

static inline int64_t test_at(const struct test_view *v, int64_t b, int64_t s, int64_t h, int64_t d)
{
    return v->first + b * v->stride.batch + s * v->stride.row + h * v->stride.head + d;
}

static inline size_t test_view_bytes(const struct test_view *v)
{
    return v->n * (size_t)cofi_elem_bytes(v->elem);
}

static inline void test_upload(const struct test_view *v)
{
    CHECK_CUDA(cudaMemcpy(v->device, v->host, test_view_bytes(v), cudaMemcpyHostToDevice));
}

static inline void test_download(const struct test_view *v)
{
    CHECK_CUDA(cudaMemcpy(v->host, v->device, test_view_bytes(v), cudaMemcpyDeviceToHost));
}

static inline struct test_view test_view_make(enum cofi_elem elem, enum test_layout layout,
                                              int64_t b, int64_t s, int64_t h, int64_t d)
{
    struct test_view v = {.elem = elem, .n_batch = b, .n_rows = s, .n_heads = h, .dim = d,
                          .stride = test_strides(layout, b, s, h, d),
                          .first = TEST_GUARD + (layout == ODD)};
    v.n = (size_t)test_at(&v, b - 1, s - 1, h - 1, d - 1) + 1 + TEST_GUARD;
    v.host = malloc(test_view_bytes(&v));
    CHECK(v.host, "no memory");
    memset(v.host, 0xff, test_view_bytes(&v));
    CHECK_CUDA(cudaMalloc(&v.device, test_view_bytes(&v)));
    test_upload(&v);
    return v;
}

static inline void test_view_free(struct test_view *v)
{
    free(v->host);
    cudaFree(v->device);
}

/* Where the view begins, on the device. */
static inline void *test_data(const struct test_view *v)
{
    return (char *)v->device + v->first * cofi_elem_bytes(v->elem);
}

static inline void test_set(const struct test_view *v, int64_t at, float x)
{
    if (v->elem == COFI_ELEM_F32)
        ((float *)v->host)[at] = x;
    else
        ((uint16_t *)v->host)[at] =
            v->elem == COFI_ELEM_BF16 ? cofi_check_to_bf16(x) : cofi_check_to_f16(x);
}

static inline double test_get(const struct test_view *v, int64_t at)
{
    return cofi_check_elem_load(v->host, v->elem, at);
}

/* Multiples of 2^-10 in -1 .. 1. */
static inline float test_random(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (float)((int)(*seed >> 8) % 2049 - 1024) / 1024;
}

static inline void test_fill(struct test_view *v, unsigned seed, float size)
{
    for (int64_t b = 0; b < v->n_batch; b++)
        for (int64_t s = 0; s < v->n_rows; s++)
            for (int64_t h = 0; h < v->n_heads; h++)
                for (int64_t d = 0; d < v->dim; d++)
                    test_set(v, test_at(v, b, s, h, d), size * test_random(&seed));
    test_upload(v);
}

/* Nothing but the view was written. Leaves 0xff in all of it. */
static inline bool test_gaps_are_whole(const struct test_view *v)
{
    const unsigned char *bytes = v->host;
    size_t elem_bytes = (size_t)cofi_elem_bytes(v->elem);
    for (int64_t b = 0; b < v->n_batch; b++)
        for (int64_t s = 0; s < v->n_rows; s++)
            for (int64_t h = 0; h < v->n_heads; h++)
                memset((char *)v->host + (size_t)test_at(v, b, s, h, 0) * elem_bytes, 0xff,
                       (size_t)v->dim * elem_bytes);
    for (size_t i = 0; i < test_view_bytes(v); i++)
        if (bytes[i] != 0xff)
            return false;
    return true;
}

/* ---- rates ---------------------------------------------------------------------------------- */

enum { TEST_RUNS = 15 };

static inline int test_compare(const void *a, const void *b)
{
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

/* Median time of `call` on the default stream, each run by itself, the first three not counted. */
#define TEST_MEDIAN_MS(ms, call)                                                                   \
    do {                                                                                           \
        float times[TEST_RUNS];                                                                    \
        cudaEvent_t begin, end;                                                                    \
        CHECK_CUDA(cudaEventCreate(&begin));                                                       \
        CHECK_CUDA(cudaEventCreate(&end));                                                         \
        for (int run = -3; run < TEST_RUNS; run++) {                                               \
            CHECK_CUDA(cudaEventRecord(begin, NULL));                                              \
            call;                                                                                  \
            CHECK_CUDA(cudaEventRecord(end, NULL));                                                \
            CHECK_CUDA(cudaEventSynchronize(end));                                                 \
            CHECK_CUDA(cudaEventElapsedTime(&times[run < 0 ? 0 : run], begin, end));               \
        }                                                                                          \
        qsort(times, TEST_RUNS, sizeof times[0], test_compare);                                    \
        (ms) = (double)times[TEST_RUNS / 2];                                                       \
        cudaEventDestroy(begin);                                                                   \
        cudaEventDestroy(end);                                                                     \
    } while (0)

/* ---- sections ------------------------------------------------------------------------------- */

/* Element (batch 0, row, head 0, the last dim) of an input is `value`: NaN or infinite. */
struct test_poison {
    char tensor; /* 'q', 'k' or 'v'; 0: none */
    int64_t row;
    float value;
};

struct test_section {
    enum cofi_elem elem;
    bool o_f32;
    enum test_layout layout;
    int64_t b, h, kv, dqk, dv, n_q, n_k;
    struct cofi_band band;
    float scale;
    unsigned seed;
    struct test_poison poison;
};

/* lse is [B, 1, H, rows] here, so that its rows are contiguous. */
struct test_tensors {
    struct test_view q, k, v, o, lse;
};

static inline struct test_tensors test_tensors_make(const struct test_section *s)
{
    struct test_tensors t = {
        .q = test_view_make(s->elem, s->layout, s->b, s->n_q, s->h, s->dqk),
        .k = test_view_make(s->elem, s->layout, s->b, s->n_k, s->kv, s->dqk),
        .v = test_view_make(s->elem, s->layout, s->b, s->n_k, s->kv, s->dv),
        .o = test_view_make(s->o_f32 ? COFI_ELEM_F32 : s->elem, s->layout, s->b, s->n_q, s->h,
                            s->dv),
        .lse = test_view_make(COFI_ELEM_F32, s->layout == ODD ? PADDED : BSHD, s->b, 1, s->h,
                              s->n_q)};
    test_fill(&t.q, s->seed + 1, 2);
    test_fill(&t.k, s->seed + 2, 2);
    test_fill(&t.v, s->seed + 3, 1);
    const struct test_view *poisoned = s->poison.tensor == 'q'   ? &t.q
                                       : s->poison.tensor == 'k' ? &t.k
                                                                 : &t.v;
    if (s->poison.tensor) {
        test_set(poisoned, test_at(poisoned, 0, s->poison.row, 0, poisoned->dim - 1),
                 s->poison.value);
        test_upload(poisoned);
    }
    return t;
}

static inline void test_tensors_free(struct test_tensors *t)
{
    struct test_view *all[] = {&t->q, &t->k, &t->v, &t->o, &t->lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        test_view_free(all[i]);
}

static inline struct cofi_attention_shape test_shape(const struct test_section *s,
                                                     const struct test_tensors *t)
{
    return (struct cofi_attention_shape){
        .elem = s->elem, .o_f32 = s->o_f32, .n_batch = s->b, .n_heads = s->h,
        .n_kv_heads = s->kv, .dim_qk = s->dqk, .dim_v = s->dv, .q_rows = s->n_q, .k_rows = s->n_k,
        .band = s->band, .scale = s->scale, .q = t->q.stride, .k = t->k.stride, .v = t->v.stride,
        .o = t->o.stride, .lse_batch = t->lse.stride.batch, .lse_head = t->lse.stride.head};
}

static inline const char *test_limit(int64_t limit, char *text)
{
    if (limit == INT64_MAX)
        return "all";
    snprintf(text, 24, "%lld", (long long)limit);
    return text;
}

static inline const char *test_section_name(const struct test_section *s, const char *engine)
{
    static char text[320];
    char left[24], right[24], poison[64] = "";
    if (s->poison.tensor)
        snprintf(poison, sizeof poison, " %c row %lld has %g", s->poison.tensor,
                 (long long)s->poison.row, (double)s->poison.value);
    snprintf(text, sizeof text,
             "engine=%s elem=%s%s layout=%s b=%lld h=%lld:%lld d=%lld:%lld rows=%lldx%lld "
             "band=%lld,%s,%s scale=%g%s", engine, test_elem_names[s->elem],
             s->o_f32 ? "->f32" : "", test_layout_names[s->layout], (long long)s->b,
             (long long)s->h, (long long)s->kv, (long long)s->dqk, (long long)s->dv,
             (long long)s->n_q, (long long)s->n_k, (long long)s->band.diag,
             test_limit(s->band.left, left), test_limit(s->band.right, right), (double)s->scale,
             poison);
    return text;
}

static inline bool test_sees(const struct cofi_band *band, int64_t i, int64_t j)
{
    __int128 d = (__int128)j - i - band->diag;
    return (band->left == INT64_MAX || d >= -(__int128)band->left) &&
           (band->right == INT64_MAX || d <= (__int128)band->right);
}

/* Half a unit of the last place, relative. */
static inline double test_half_ulp(enum cofi_elem elem)
{
    return elem == COFI_ELEM_BF16 ? 0x1p-8 : elem == COFI_ELEM_F16 ? 0x1p-11 : 0x1p-24;
}

/* One row by the formula, over the keys that it sees. Returns lse; o[d], and size[d] = sum p |v|.
 * NaN where NaN or infinities make it so; 0 and -inf where no score is above -inf. */
static inline double test_row(const struct test_section *s, const struct test_tensors *t, int64_t b,
                              int64_t h, int64_t i, double *p, double *o, double *size)
{
    int64_t kv = h / (s->h / s->kv);
    double m = -INFINITY, sum = 0;
    for (int64_t j = 0; j < s->n_k; j++) {
        p[j] = -INFINITY;
        if (!test_sees(&s->band, i, j))
            continue;
        double x = 0;
        for (int64_t d = 0; d < s->dqk; d++)
            x += test_get(&t->q, test_at(&t->q, b, i, h, d)) *
                 test_get(&t->k, test_at(&t->k, b, j, kv, d));
        p[j] = x * (double)s->scale;
        m = p[j] > m || isnan(p[j]) ? p[j] : m;
    }
    for (int64_t d = 0; d < s->dv; d++)
        o[d] = size[d] = 0;
    if (m == -INFINITY)
        return m;
    for (int64_t j = 0; j < s->n_k; j++)
        sum += exp(p[j] - m);
    for (int64_t j = 0; j < s->n_k; j++) {
        double x = exp(p[j] - m) / sum;
        for (int64_t d = 0; d < s->dv && test_sees(&s->band, i, j); d++) {
            double v = test_get(&t->v, test_at(&t->v, b, j, kv, d));
            o[d] += x * v;
            size[d] += x * fabs(v);
        }
    }
    return m + log(sum);
}

/* Tensor cores take probabilities of the data type; the exact engine rounds o alone. */
static inline double test_bound(const struct test_section *s, bool is_exact, double o, double size)
{
    double u = test_half_ulp(s->elem);
    return is_exact ? (s->o_f32 ? 0 : u * fabs(o)) + 1e-5 * size + 1e-7
                    : 4 * u * size + 1e-5;
}

/* Both NaN or infinite, or both not and near. */
static inline bool test_is_near(double got, double want, double bound)
{
    return isfinite(want) ? fabs(got - want) <= bound : !isfinite(got);
}

/* Checks o and lse on the host against fp64, then that all else is as it was. */
static inline void test_section_check(const struct test_section *s, struct test_tensors *t,
                                      const char *engine)
{
    const bool is_exact = !strcmp(engine, "exact");
    double *p = calloc((size_t)(s->n_k + 2 * s->dv), sizeof *p), *o = p + s->n_k, *size = o + s->dv;
    int64_t n_wrong = 0;
    char first[160] = "";
    for (int64_t b = 0; b < s->b; b++)
        for (int64_t h = 0; h < s->h; h++)
            for (int64_t i = 0; i < s->n_q; i++) {
                double want = test_row(s, t, b, h, i, p, o, size);
                double got = test_get(&t->lse, test_at(&t->lse, b, 0, h, i));
                bool is_right = want == -INFINITY
                                    ? got == want || (!is_exact && got == INFINITY)
                                    : test_is_near(got, want, (is_exact ? 1e-5 : 2e-4) *
                                                                  (1 + fabs(want)));
                if (!is_right && n_wrong++ == 0)
                    snprintf(first, sizeof first, "b=%lld h=%lld row=%lld lse: got %g, want %g",
                             (long long)b, (long long)h, (long long)i, got, want);
                for (int64_t d = 0; d < s->dv; d++) {
                    got = test_get(&t->o, test_at(&t->o, b, i, h, d));
                    if (test_is_near(got, o[d], test_bound(s, is_exact, o[d], size[d])))
                        continue;
                    if (n_wrong++ == 0)
                        snprintf(first, sizeof first,
                                 "b=%lld h=%lld row=%lld dim=%lld o: got %g, want %g",
                                 (long long)b, (long long)h, (long long)i, (long long)d, got, o[d]);
                }
            }
    CHECK(n_wrong == 0, "%s: %lld wrong, the first: %s", test_section_name(s, engine),
          (long long)n_wrong, first);
    CHECK(test_gaps_are_whole(&t->o), "%s: wrote beside o", test_section_name(s, engine));
    CHECK(test_gaps_are_whole(&t->lse), "%s: wrote beside lse", test_section_name(s, engine));
    free(p);
}

#endif
