/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The merge of two results of attention on a CUDA device, against fp64: all types, dims, strides,
 * in place, and every kind of lse. With `bench` as argument: its rate against a copy's. Skipped
 * where no device is. */
#include "test_cuda.h"

#ifdef COFI_CUDA
#include "test_attention_section.h"

struct merge_case {
    enum cofi_elem elem;
    bool a_f32, b_f32, o_f32;
    enum test_layout layout;
    int64_t rows, dim;
    char into; /* 'a', 'b', or 'o': apart */
};

struct merge_tensors {
    struct test_view a, b, o, a_lse, b_lse, lse;
};

enum { MERGE_B = 2, MERGE_H = 3 };

static struct test_view merge_view(const struct merge_case *c, bool is_f32)
{
    return test_view_make(is_f32 ? COFI_ELEM_F32 : c->elem, c->layout, MERGE_B, c->rows, MERGE_H,
                          c->dim);
}

static struct cofi_attention_partial part_of(const struct test_view *o, const struct test_view *lse)
{
    return (struct cofi_attention_partial){
        .o = test_data(o), .o_f32 = o->elem == COFI_ELEM_F32, .stride = o->stride,
        .lse = test_data(lse), .lse_batch = lse->stride.batch, .lse_head = lse->stride.head};
}

static struct cofi_attention_merge merge_of(enum cofi_elem elem, const struct test_view *a,
                                            const struct test_view *a_lse,
                                            const struct test_view *b,
                                            const struct test_view *b_lse,
                                            const struct test_view *o, const struct test_view *lse)
{
    return (struct cofi_attention_merge){
        .elem = elem, .n_batch = o->n_batch, .n_rows = o->n_rows, .n_heads = o->n_heads,
        .dim_v = o->dim, .a = part_of(a, a_lse), .b = part_of(b, b_lse), .o = test_data(o),
        .o_f32 = o->elem == COFI_ELEM_F32, .stride = o->stride, .lse = test_data(lse),
        .lse_batch = lse->stride.batch, .lse_head = lse->stride.head};
}

/* What lse may be, by kind. */
static void set_lse(struct test_view *lse, int64_t at, int kind, bool is_a, float x)
{
    bool nothing = kind == 0 || (kind == 1 && is_a) || (kind == 2 && !is_a);
    bool plus = kind == 3 || (kind == 4 && is_a) || (kind == 5 && !is_a);
    test_set(lse, at, nothing                ? -INFINITY
                      : plus                 ? INFINITY
                      : kind == 6 && is_a    ? NAN
                      : kind == 7            ? (is_a ? 300.0f : -300.0f)
                      : kind == 8            ? 100.0f
                                             : x);
}

static void fill_merge(const struct merge_case *c, struct merge_tensors *t)
{
    unsigned seed = 5;
    test_fill(&t->a, 1, 1);
    test_fill(&t->b, 2, 1);
    for (int64_t at = 0; at < MERGE_B * MERGE_H * c->rows; at++) {
        int64_t b = at / c->rows / MERGE_H, h = at / c->rows % MERGE_H, i = at % c->rows;
        int kind = (int)(at % 11);
        set_lse(&t->a_lse, test_at(&t->a_lse, b, 0, h, i), kind, true, 3 * test_random(&seed));
        set_lse(&t->b_lse, test_at(&t->b_lse, b, 0, h, i), kind, false, 3 * test_random(&seed));
        /* What weighs nothing may be anything. */
        if (kind == 0 || kind == 1 || kind == 4)
            for (int64_t d = 0; d < c->dim; d++)
                test_set(&t->a, test_at(&t->a, b, i, h, d), NAN);
    }
    test_upload(&t->a);
    test_upload(&t->a_lse);
    test_upload(&t->b_lse);
}

static bool is_close(double got, double want, double bound)
{
    return isnan(want) ? isnan(got) : got == want || fabs(got - want) <= bound;
}

/* t has the inputs, o and lse the outputs, on the host. */
static void check_merged(const struct merge_case *c, const struct merge_tensors *t,
                         struct test_view *o, struct test_view *lse)
{
    int64_t n_wrong = 0;
    char first[160] = "";
    double u = test_half_ulp(o->elem);
    for (int64_t at = 0; at < MERGE_B * MERGE_H * c->rows; at++) {
        int64_t b = at / c->rows / MERGE_H, h = at / c->rows % MERGE_H, i = at % c->rows;
        double la = test_get(&t->a_lse, test_at(&t->a_lse, b, 0, h, i));
        double lb = test_get(&t->b_lse, test_at(&t->b_lse, b, 0, h, i));
        la = la == INFINITY ? -INFINITY : la;
        lb = lb == INFINITY ? -INFINITY : lb;
        double m = la > lb ? la : lb, wa = exp(la - m), wb = exp(lb - m);
        if (la == -INFINITY && lb == -INFINITY)
            wa = wb = 0;
        double want = wa + wb == 0 ? -INFINITY : m + log(wa + wb);
        double got = test_get(lse, test_at(lse, b, 0, h, i));
        bool is_right = is_close(got, want, 1e-6 * (1 + fabs(want)));
        for (int64_t d = 0; d < c->dim && is_right; d++) {
            double xa = wa == 0 ? 0 : wa * test_get(&t->a, test_at(&t->a, b, i, h, d));
            double xb = wb == 0 ? 0 : wb * test_get(&t->b, test_at(&t->b, b, i, h, d));
            want = wa + wb == 0 ? 0 : (xa + xb) / (wa + wb);
            got = test_get(o, test_at(o, b, i, h, d));
            is_right = is_close(got, want, u * fabs(want) + 1e-6);
        }
        if (!is_right && n_wrong++ == 0)
            snprintf(first, sizeof first, "b=%lld h=%lld row=%lld la=%g lb=%g: got %g, want %g",
                     (long long)b, (long long)h, (long long)i, la, lb, got, want);
    }
    CHECK(n_wrong == 0,
          "merge elem=%s a_f32=%d b_f32=%d o_f32=%d layout=%s rows=%lld dim=%lld into=%c: "
          "%lld rows wrong, the first: %s", test_elem_names[c->elem], c->a_f32, c->b_f32, c->o_f32,
          test_layout_names[c->layout], (long long)c->rows, (long long)c->dim, c->into,
          (long long)n_wrong, first);
    CHECK(test_gaps_are_whole(o) && test_gaps_are_whole(lse), "wrote beside the output");
}

static void check_merge(const struct merge_case *c)
{
    struct merge_tensors t = {.a = merge_view(c, c->a_f32), .b = merge_view(c, c->b_f32),
                              .o = merge_view(c, c->o_f32)};
    struct test_view *lses[] = {&t.a_lse, &t.b_lse, &t.lse};
    struct test_view *all[] = {&t.a, &t.b, &t.o, &t.a_lse, &t.b_lse, &t.lse};
    for (int i = 0; i < 3; i++)
        *lses[i] = test_view_make(COFI_ELEM_F32, i == 0 ? PADDED : BSHD, MERGE_B, 1, MERGE_H,
                                  c->rows);
    fill_merge(c, &t);
    const struct test_view *o = c->into == 'a' ? &t.a : c->into == 'b' ? &t.b : &t.o;
    const struct test_view *lse = c->into == 'a' ? &t.a_lse : c->into == 'b' ? &t.b_lse : &t.lse;
    struct cofi_attention_merge m = merge_of(c->elem, &t.a, &t.a_lse, &t.b, &t.b_lse, o, lse);
    CHECK_OK(cofi_attention_merge(&m, NULL));
    CHECK_CUDA(cudaDeviceSynchronize());
    struct test_view got = *o, got_lse = *lse; /* apart from the inputs on the host */
    got.host = malloc(test_view_bytes(o));
    got_lse.host = malloc(test_view_bytes(lse));
    test_download(&got);
    test_download(&got_lse);
    check_merged(c, &t, &got, &got_lse);
    free(got.host);
    free(got_lse.host);
    for (int i = 0; i < 6; i++)
        test_view_free(all[i]);
}

static void test_merges(void)
{
    static const int64_t dims[] = {1, 7, 8, 64, 96, 100, 128, 256, 257, 512};
    static const int64_t rows[] = {1, 67, 16, 300};
    static const char into[] = "oab";
    int n = 0;
    for (int dim = 0; dim < 10; dim++)
        for (int elem = 0; elem < 3; elem++)
            for (int f32 = 0; f32 < (elem == COFI_ELEM_F32 ? 1 : 8); f32++, n++) {
                struct merge_case c = {.elem = (enum cofi_elem)elem, .a_f32 = f32 & 1,
                                       .b_f32 = f32 >> 1 & 1, .o_f32 = f32 >> 2 & 1,
                                       .layout = (enum test_layout)(n % N_LAYOUTS),
                                       .rows = rows[n % 4], .dim = dims[dim],
                                       .into = into[n % 3]};
                if ((c.into == 'a' && c.a_f32 != c.o_f32) || (c.into == 'b' && c.b_f32 != c.o_f32))
                    c.into = 'o'; /* in place: of the same type */
                check_merge(&c);
            }
    struct cofi_attention_merge none = {.n_batch = 1, .n_heads = 1, .dim_v = 8};
    CHECK_OK(cofi_attention_merge(&none, NULL));
}

/* ---- rates ---------------------------------------------------------------------------------- */

enum { BENCH_H = 20, BENCH_D = 128 };

static void bench_merge(int64_t rows, bool a_f32, bool o_f32)
{
    struct test_view a = test_view_make(a_f32 ? COFI_ELEM_F32 : COFI_ELEM_BF16, BSHD, 1, rows,
                                        BENCH_H, BENCH_D);
    struct test_view b = test_view_make(COFI_ELEM_BF16, BSHD, 1, rows, BENCH_H, BENCH_D);
    struct test_view o = test_view_make(o_f32 ? COFI_ELEM_F32 : COFI_ELEM_BF16, BSHD, 1, rows,
                                        BENCH_H, BENCH_D);
    struct test_view a_lse = test_view_make(COFI_ELEM_F32, BSHD, 1, 1, BENCH_H, rows);
    struct test_view b_lse = test_view_make(COFI_ELEM_F32, BSHD, 1, 1, BENCH_H, rows);
    struct test_view *all[] = {&a, &b, &o, &a_lse, &b_lse};
    const struct test_view *into = a.elem == o.elem ? &a : &o;
    for (int i = 0; i < 5; i++)
        CHECK_CUDA(cudaMemset(all[i]->device, 0, test_view_bytes(all[i])));
    struct cofi_attention_merge m =
        merge_of(COFI_ELEM_BF16, &a, &a_lse, &b, &b_lse, into, &a_lse);
    size_t bytes = test_view_bytes(&a) + test_view_bytes(&b) + test_view_bytes(into) +
                   3 * test_view_bytes(&a_lse);
    void *from = NULL, *to = NULL;
    double ms = 0, copy_ms = 0;
    CHECK_CUDA(cudaMalloc(&from, bytes / 2));
    CHECK_CUDA(cudaMalloc(&to, bytes / 2));
    TEST_MEDIAN_MS(ms, CHECK_OK(cofi_attention_merge(&m, NULL)));
    TEST_MEDIAN_MS(copy_ms, CHECK_CUDA(cudaMemcpyAsync(to, from, bytes / 2,
                                                       cudaMemcpyDeviceToDevice, NULL)));
    printf("# merge rows=%lld h=%d d=%d %s + bf16 -> %s: %.2f us, %.0f GB/s; a copy of as many "
           "bytes: %.2f us, %.0f GB/s; %.2f of it\n", (long long)rows, BENCH_H, BENCH_D,
           test_elem_names[a.elem], test_elem_names[into->elem], ms * 1e3,
           (double)bytes / ms * 1e-6, copy_ms * 1e3, (double)bytes / copy_ms * 1e-6, copy_ms / ms);
    cudaFree(from);
    cudaFree(to);
    for (int i = 0; i < 5; i++)
        test_view_free(all[i]);
}

int main(int argc, char **argv)
{
    if (!test_cuda_devices())
        return 77;
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        for (int64_t rows = 4096; rows <= 65536; rows *= 4) {
            bench_merge(rows, false, false);
            bench_merge(rows, true, true);
            bench_merge(rows, true, false);
        }
        return test_done();
    }
    test_merges();
    return test_done();
}
#endif
