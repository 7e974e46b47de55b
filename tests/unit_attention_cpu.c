/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The CPU attention engine against a naive double implementation: bands, odd sizes, grouped heads,
 * strided views, several sections, NaN and infinity kept from queries that cannot see them, nothing
 * written outside the outputs, and the same bits from 1 and 3 threads. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "ops/attention/attention_cpu.h"

#define NO_LIMIT INT64_MAX
#define GUARD 64           /* elements on both sides of a tensor */
#define PATTERN 0xffffffff /* what is never written keeps it; no output has this value */

/* bshd, with gaps between rows and heads when strided. */
struct tensor {
    char *memory;
    int64_t n_batch, n_rows, n_heads, dim, n_elems, elem_bytes; /* n_elems: with gaps and guards */
    struct cofi_attention_view view;
    enum cofi_elem elem;
};

struct shape {
    const char *name;
    int64_t n_batch, n_heads, n_kv_heads, dim_qk, dim_v, nq, nk;
    struct cofi_band band;
    enum cofi_elem elem;
    bool wire_f32, with_acc;
    int q_pieces, k_pieces, gap, poison; /* poison: 1 + the input that gets a NaN and an inf */
    float scale;
};

enum { Q, K, V, DOUT, O, DQ, DK, DV, N_TENSORS, N_IN = O };
static const char *const names[N_TENSORS] = {"q", "k", "v", "dout", "o", "dq", "dk", "dv"};
static const char *const elem_names[] = {"f32", "bf16", "f16"};

struct run {
    const struct shape *x;
    struct tensor t[N_TENSORS];
    float *lse, *acc[2], *floats; /* acc [nk, B, Hkv, dim]; floats: all of the state */
    struct cofi_attention_state state;
    struct cofi_attention_grad_state grad;
};

static int n_failed;
static uint32_t seed;

static float random_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        seed = seed * 1664525u + 1013904223u;
        sum += (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
    }
    return sum * 1.7f;
}

static void *allocate(int64_t bytes)
{
    void *p = malloc((size_t)bytes + 1);
    if (!p)
        exit(2);
    return memset(p, 0xff, (size_t)bytes + 1);
}

static struct tensor tensor_make(int64_t b, int64_t s, int64_t h, int64_t d, enum cofi_elem elem,
                                 int gap)
{
    struct tensor t = {.n_batch = b, .n_rows = s, .n_heads = h, .dim = d, .elem = elem,
                       .elem_bytes = cofi_elem_bytes(elem)};
    t.view.head_stride = d + gap;
    t.view.row_stride = h * t.view.head_stride + 2 * gap;
    t.view.batch_stride = s * t.view.row_stride + 3 * gap;
    t.n_elems = b * t.view.batch_stride + 2 * GUARD;
    t.memory = allocate(t.n_elems * t.elem_bytes);
    t.view.data = t.memory + GUARD * t.elem_bytes;
    return t;
}

static char *element(const struct tensor *t, int64_t b, int64_t s, int64_t h, int64_t d)
{
    return (char *)t->view.data + (b * t->view.batch_stride + s * t->view.row_stride +
                                   h * t->view.head_stride + d) * t->elem_bytes;
}

static void set(struct tensor *t, int64_t b, int64_t s, int64_t h, int64_t d, float value)
{
    cofi_vec_store(cofi_vec(), t->elem, element(t, b, s, h, d), &value, 1);
}

/* [B, H, S, D] doubles. */
static double *flatten(const struct tensor *t)
{
    const int64_t n = t->n_batch * t->n_heads * t->n_rows * t->dim;
    double *flat = allocate(n * 8);
    for (int64_t i = 0; i < n; i++) {
        int64_t lane = i / t->dim / t->n_rows;
        const void *src = element(t, lane / t->n_heads, i / t->dim % t->n_rows, lane % t->n_heads,
                                  i % t->dim);
        float value;
        cofi_vec_load(cofi_vec(), t->elem, &value, src, 1);
        flat[i] = value;
    }
    return flat;
}

static struct cofi_attention_dims dims_of(const struct shape *x)
{
    return (struct cofi_attention_dims){x->n_batch, x->n_heads, x->n_kv_heads, x->dim_qk,
                                        x->dim_v, x->elem, x->scale};
}

/* The whole life of a call, section by section. */
static cof_status run_on_stream(struct cofi_cpu_stream *stream, const void *args)
{
    struct run *r = *(struct run *const *)args;
    const struct shape *x = r->x;
    const struct cofi_attention_dims dims = dims_of(x);
    cof_status status = COF_OK;
    cofi_attention_cpu_begin(stream, &dims, &r->state);
    for (int backward = 0; backward < 2; backward++) {
        for (int qi = 0; qi < x->q_pieces; qi++)
            for (int ki = 0; ki < x->k_pieces; ki++) {
                int64_t q0 = x->nq * qi / x->q_pieces, k0 = x->nk * ki / x->k_pieces;
                struct cofi_attention_section s = {
                    &dims, q0, x->nq * (qi + 1) / x->q_pieces - q0, k0,
                    x->nk * (ki + 1) / x->k_pieces - k0, x->band, r->t[Q].view, r->t[K].view,
                    r->t[V].view};
                s.band.diag += q0 - k0;
                cof_status e = backward ? cofi_attention_cpu_backward(stream, &s, &r->t[DOUT].view,
                                                                      &r->grad)
                                        : cofi_attention_cpu_forward(stream, &s, &r->state);
                status = status == COF_OK ? e : status;
            }
        if (backward)
            break;
        cofi_attention_cpu_finish(stream, &dims, &r->state, &r->t[O].view, r->lse,
                                  x->n_heads * x->nq, x->nq);
        cofi_attention_cpu_grad_begin(stream, &dims, &r->grad, &r->t[O].view, &r->t[DOUT].view,
                                      r->lse, x->n_heads * x->nq, x->nq);
        cofi_attention_cpu_partial_begin(stream, &dims, &r->grad, x->nk);
    }
    for (int piece = 0; piece < 2; piece++) {
        int64_t row = x->nk / 2 * piece, n_rows = piece ? x->nk - row : x->nk / 2;
        struct cofi_attention_view dk = r->t[DK].view, dv = r->t[DV].view;
        dk.data = element(&r->t[DK], 0, row, 0, 0);
        dv.data = element(&r->t[DV], 0, row, 0, 0);
        int64_t before = row * x->n_batch * x->n_kv_heads;
        cofi_attention_cpu_partial_store(stream, &dims, &r->grad, row, n_rows,
                                         r->acc[0] ? r->acc[0] + before * x->dim_qk : NULL,
                                         r->acc[1] ? r->acc[1] + before * x->dim_v : NULL,
                                         x->wire_f32, &dk, &dv);
    }
    cofi_attention_cpu_dq_store(stream, &dims, &r->grad, &r->t[DQ].view);
    return status;
}

static float *take(float **next, int64_t n)
{
    return (*next += n) - n;
}

static void run_make(struct run *r, const struct shape *x)
{
    const int64_t rows = x->n_batch * x->n_heads * x->nq, dims = x->dim_qk + x->dim_v;
    const int64_t keys = x->n_batch * x->n_heads * x->nk;
    float *next = allocate((rows * (dims + 5) + 2 * keys * dims) * 4); /* the second: acc */
    *r = (struct run){.x = x, .floats = next};
    r->state.acc = take(&next, rows * x->dim_v);
    r->state.m = take(&next, rows), r->state.l = take(&next, rows), r->state.n_rows = x->nq;
    r->lse = take(&next, rows);
    r->grad.delta = take(&next, rows), r->grad.lse = take(&next, rows);
    r->grad.dq = take(&next, rows * x->dim_qk);
    r->grad.dk = take(&next, keys * x->dim_qk), r->grad.dv = take(&next, keys * x->dim_v);
    r->grad.n_q_rows = x->nq, r->grad.n_k_rows = x->nk;
    seed = 7;
    for (int i = 0; i < 2 && x->with_acc; i++) {
        int64_t n = x->nk * x->n_batch * x->n_kv_heads * (i ? x->dim_v : x->dim_qk);
        r->acc[i] = take(&next, n);
        for (int64_t j = 0; j < n; j++)
            r->acc[i][j] = random_normal();
    }
    for (int i = 0; i < N_TENSORS; i++) {
        bool of_keys = i == K || i == V || i == DK || i == DV;
        bool of_v = i == V || i == DOUT || i == O || i == DV;
        struct tensor *t = &r->t[i];
        *t = tensor_make(x->n_batch, of_keys ? x->nk : x->nq, of_keys ? x->n_kv_heads : x->n_heads,
                         of_v ? x->dim_v : x->dim_qk,
                         x->wire_f32 && (i == DK || i == DV) ? COFI_ELEM_F32 : x->elem, x->gap);
        for (int64_t n = 0; i < N_IN && n < t->n_batch * t->n_rows * t->n_heads * t->dim; n++)
            set(t, n / t->dim / t->n_heads / t->n_rows, n / t->dim / t->n_heads % t->n_rows,
                n / t->dim % t->n_heads, n % t->dim, random_normal());
        if (x->poison == i + 1) {
            set(t, 0, t->n_rows * 3 / 8, 0, 3, NAN);
            set(t, 0, t->n_rows * 5 / 8, t->n_heads - 1, 1, INFINITY);
        }
    }
}

static void run_free(struct run *r)
{
    for (int i = 0; i < N_TENSORS; i++)
        free(r->t[i].memory);
    free(r->floats);
}

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static void axpy(double *y, double a, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += a * x[i];
}

/* One (batch, head): visible keys only. dk and dv are added to. */
static void reference_head(const struct shape *x, const double *q, const double *k, const double *v,
                           const double *dout, double *o, double *lse, double *dq, double *dk,
                           double *dv)
{
    const int64_t n_qk = x->dim_qk, n_v = x->dim_v;
    double *p = allocate(x->nk * 8);
    for (int64_t i = 0; i < x->nq; i++) {
        int64_t lo = 0, hi = x->nk; /* diag, left and right are small here */
        if (x->band.left != NO_LIMIT && i + x->band.diag - x->band.left > lo)
            lo = i + x->band.diag - x->band.left;
        if (x->band.right != NO_LIMIT && i + x->band.diag + x->band.right + 1 < hi)
            hi = i + x->band.diag + x->band.right + 1;
        double max = -INFINITY, sum = 0;
        lse[i] = -INFINITY;
        memset(o + i * n_v, 0, (size_t)n_v * 8);
        memset(dq + i * n_qk, 0, (size_t)n_qk * 8);
        if (lo >= hi)
            continue;
        for (int64_t j = lo; j < hi; j++) {
            p[j] = x->scale * dot(q + i * n_qk, k + j * n_qk, n_qk);
            max = p[j] > max || isnan(p[j]) ? p[j] : max;
        }
        for (int64_t j = lo; j < hi; j++)
            sum += exp(p[j] - max);
        lse[i] = max + log(sum);
        for (int64_t j = lo; j < hi; j++)
            axpy(o + i * n_v, p[j] = exp(p[j] - lse[i]), v + j * n_v, n_v);
        double delta = dot(dout + i * n_v, o + i * n_v, n_v);
        for (int64_t j = lo; j < hi; j++) {
            double ds = p[j] * (dot(dout + i * n_v, v + j * n_v, n_v) - delta) * x->scale;
            axpy(dq + i * n_qk, ds, k + j * n_qk, n_qk);
            axpy(dk + j * n_qk, ds, q + i * n_qk, n_qk);
            axpy(dv + j * n_v, p[j], dout + i * n_v, n_v);
        }
    }
    free(p);
}

static void compare(const struct shape *x, const char *what, const double *got, const double *want,
                    int64_t n, double tol, double floor)
{
    double err2 = 0, want2 = 0, max_err = 0, max_want = floor;
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(got[i]) != isfinite(want[i]) || (want[i] == -INFINITY && got[i] != want[i])) {
            printf("not ok %s: %s[%lld] is %g, should be %g\n", x->name, what, (long long)i, got[i],
                   want[i]);
            n_failed++;
            return;
        }
        if (!isfinite(want[i]))
            continue;
        double err = fabs(got[i] - want[i]);
        err2 += err * err;
        want2 += want[i] * want[i];
        max_err = err > max_err ? err : max_err;
        max_want = fabs(want[i]) > max_want ? fabs(want[i]) : max_want;
    }
    double scale2 = want2 > floor * floor * (double)n ? want2 : floor * floor * (double)n;
    if (sqrt(err2) <= tol * sqrt(scale2) && max_err <= 2 * tol * max_want)
        return;
    printf("not ok %s: %s rel-rmse %.2e (at most %.2e), max error %.2e of %.2e\n", x->name, what,
           sqrt(err2 / scale2), tol, max_err, max_want);
    n_failed++;
}

static void check_values(const struct run *r)
{
    const struct shape *x = r->x;
    const int64_t lanes = x->n_batch * x->n_heads, n_qk = x->dim_qk, n_v = x->dim_v;
    double *lse = allocate(lanes * x->nq * 16), *flat[N_TENSORS], *want[N_TENSORS] = {NULL};
    for (int i = 0; i < N_TENSORS; i++) {
        const struct tensor *t = &r->t[i];
        const float *acc = i == DK ? r->acc[0] : i == DV ? r->acc[1] : NULL;
        flat[i] = flatten(t);
        if (i < N_IN)
            continue;
        want[i] = allocate(t->n_batch * t->n_heads * t->n_rows * t->dim * 8);
        for (int64_t n = 0; n < t->n_batch * t->n_heads * t->n_rows * t->dim; n++) {
            int64_t row = n / t->dim % t->n_rows, lane = n / t->dim / t->n_rows;
            int64_t from = (row * t->n_batch * t->n_heads + lane) * t->dim + n % t->dim;
            want[i][n] = acc ? acc[from] : 0;
        }
    }
    for (int64_t lane = 0; lane < lanes; lane++) {
        int64_t q = lane * x->nq, k = lane / (x->n_heads / x->n_kv_heads) * x->nk;
        reference_head(x, flat[Q] + q * n_qk, flat[K] + k * n_qk, flat[V] + k * n_v,
                       flat[DOUT] + q * n_v, want[O] + q * n_v, lse + q, want[DQ] + q * n_qk,
                       want[DK] + k * n_qk, want[DV] + k * n_v);
        for (int64_t i = q; i < q + x->nq; i++)
            lse[lanes * x->nq + i] = r->lse[i];
    }
    const double tol = x->elem == COFI_ELEM_BF16  ? 1e-2
                       : x->elem == COFI_ELEM_F16 ? 1e-2 / 8
                                                  : 3e-6;
    const double ds = fabs((double)x->scale) * sqrt((double)n_v);
    compare(x, "lse", lse + lanes * x->nq, lse, lanes * x->nq, 1e-5, 1);
    for (int i = 0; i < N_TENSORS; i++) {
        const struct tensor *t = &r->t[i];
        if (i >= N_IN)
            compare(x, names[i], flat[i], want[i], t->n_batch * t->n_heads * t->n_rows * t->dim,
                    tol, i == O || i == DV ? 0.01 : 0.1 * ds);
        free(flat[i]);
        free(want[i]);
    }
    free(lse);
}

/* Every element of the output was written, and nothing between and around them. */
static void check_guards(const struct shape *x, const struct tensor *t, const char *what)
{
    int64_t kept = 0, bytes = t->elem_bytes;
    const uint32_t pattern = PATTERN;
    for (int64_t i = 0; i < t->n_elems; i++)
        kept += !memcmp(t->memory + i * bytes, &pattern, (size_t)bytes);
    int64_t wanted = t->n_elems - t->n_batch * t->n_rows * t->n_heads * t->dim;
    if (kept != wanted) {
        printf("not ok %s: %lld elements around %s untouched, should be %lld\n", x->name,
               (long long)kept, what, (long long)wanted);
        n_failed++;
    }
}

static void check_shape(struct shape x, struct cofi_cpu_stream *const streams[2])
{
    char name[160];
    snprintf(name, sizeof name, "%s nq=%lld nk=%lld diag=%lld %s", x.name, (long long)x.nq,
             (long long)x.nk, (long long)x.band.diag, elem_names[x.elem]);
    x.name = name;
    const int failed_before = n_failed;
    struct run runs[2];
    for (int i = 0; i < 2; i++) {
        run_make(&runs[i], &x);
        struct run *arg = &runs[i];
        cof_status status = cofi_cpu_enqueue(streams[i], run_on_stream, &arg, sizeof arg, 0);
        status = status == COF_OK ? cofi_cpu_stream_sync(streams[i]) : status;
        if (status != COF_OK) {
            printf("not ok %s: %s\n", name, cof_last_error());
            exit(1);
        }
    }
    for (int i = N_IN; i < N_TENSORS; i++) {
        const struct tensor *t = &runs[0].t[i];
        check_guards(&x, t, names[i]);
        if (memcmp(t->memory, runs[1].t[i].memory, (size_t)(t->n_elems * t->elem_bytes))) {
            printf("not ok %s: %s differs between 1 and 3 threads\n", name, names[i]);
            n_failed++;
        }
    }
    check_values(&runs[0]);
    run_free(&runs[0]);
    run_free(&runs[1]);
    if (n_failed == failed_before)
        printf("ok %s\n", name);
}

static void check_all(enum cofi_elem elem, struct cofi_cpu_stream *const streams[2])
{
    const struct shape base = {"", 1, 4, 2, 24, 16, 0, 0, {0, NO_LIMIT, NO_LIMIT}, elem, false,
                               false, 1, 1, 0, 0, 0.2f};
    const int64_t sizes[][2] = {{1, 1}, {1, 700}, {7, 129}, {127, 513}, {128, 128}, {129, 700},
                                {513, 127}, {700, 513}};
    const size_t step = elem == COFI_ELEM_F16 ? 2 : 1; /* mostly the way of bf16 */
    for (size_t i = step - 1; i < sizeof sizes / sizeof sizes[0]; i += step) {
        const int64_t nq = sizes[i][0], nk = sizes[i][1], diags[] = {0, nk - nq, -50, nk + 1000};
        struct shape x = base;
        x.nq = nq, x.nk = nk, x.name = "full";
        check_shape(x, streams);
        for (int d = 0; d < 4; d++) {
            x.name = "causal", x.band = (struct cofi_band){diags[d], NO_LIMIT, 0};
            check_shape(x, streams);
        }
        x.q_pieces = 2, x.k_pieces = 3, x.gap = 5, x.with_acc = true;
        x.name = "causal-pieces", x.band.diag = 3;
        check_shape(x, streams);
        x.wire_f32 = true;
        x.name = "window-pieces", x.band = (struct cofi_band){nk / 4, 100, 30};
        check_shape(x, streams);
        x.name = "full-pieces", x.band = base.band, x.n_batch = 2;
        check_shape(x, streams);
    }
    struct shape x = base;
    x.nq = 300, x.nk = 600, x.dim_qk = 80, x.dim_v = 72;
    x.name = "sees-nothing", x.band = (struct cofi_band){-400, NO_LIMIT, 0};
    check_shape(x, streams);
    x.name = "no-width", x.band = (struct cofi_band){200, -5, 3};
    check_shape(x, streams);
    x.name = "negative-scale", x.band = base.band, x.scale = -0.2f;
    check_shape(x, streams);
    x.name = "one-kv-head", x.scale = 0.1f, x.n_kv_heads = 1, x.dim_qk = 192, x.dim_v = 128;
    check_shape(x, streams);
    x.name = "largest-dims", x.n_heads = 1, x.dim_qk = x.dim_v = 512;
    check_shape(x, streams);
    for (int poison = 1; poison <= N_IN; poison++) {
        char name[32];
        snprintf(name, sizeof name, "poison-%s", names[poison - 1]);
        x = base;
        x.nq = 300, x.nk = 700, x.poison = poison, x.name = name, x.gap = 3;
        x.band = (struct cofi_band){333, 100, 30};
        check_shape(x, streams);
        x.band = (struct cofi_band){64, NO_LIMIT, 0}, x.q_pieces = 2;
        check_shape(x, streams);
    }
}

int main(void)
{
    struct cofi_cpu_stream *streams[2];
    if (cofi_gemm_init() != COF_OK)
        return 2;
    for (int i = 0; i < 2; i++) {
        struct cofi_cpu_stream_options options = {.n_threads = i ? 3 : 1, .with_gemm = true,
                                                  .name = "unit"};
        if (cofi_cpu_stream_open(&options, &streams[i]) != COF_OK) {
            printf("not ok open: %s\n", cof_last_error());
            return 1;
        }
    }
    for (int elem = COFI_ELEM_F32; elem <= COFI_ELEM_F16; elem++)
        check_all((enum cofi_elem)elem, streams);
    cofi_cpu_stream_close(streams[0]);
    cofi_cpu_stream_close(streams[1]);
    return n_failed ? 1 : 0;
}
