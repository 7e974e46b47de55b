/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Both GEMM providers, each in a process of its own because the choice is the process's: every
 * form, type and accumulate over odd sizes and leading dimensions, NaN and guard elements, empty
 * products, two threads at once, memory refused; and what COFUSE_GEMM and COFUSE_CPU_ISA choose. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/cpu/gemm.h"
#include "backend/cpu/vec.h"
#include "core/error.h"

static const char *context;
static _Atomic int n_failed;

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

#define GUARD 12345.5f

static const char *const form_names[] = {"NT", "NN", "TN"};

static const int sizes[][3] = {{1, 1, 1},     {1, 17, 5},    {5, 1, 7},     {7, 5, 1},
                               {3, 2, 9},     {6, 16, 256},  {64, 64, 64},  {37, 129, 65},
                               {97, 33, 300}, {130, 515, 3}, {33, 257, 96}, {64, 200, 128}};
#define N_SIZES ((int)(sizeof sizes / sizeof sizes[0]))

/* A matrix of `rows` x `cols` in exactly the elements it spans: the last row has no padding. */
struct matrix {
    int64_t rows, cols, ld;
    float *f32;
    uint16_t *bf16;
};

static size_t span(const struct matrix *matrix)
{
    return (size_t)((matrix->rows - 1) * matrix->ld + matrix->cols);
}

/* Values of bf16 precision, so that both types hold the same; padding is NaN, never to be read. */
static struct matrix matrix_make(int64_t rows, int64_t cols, int64_t pad, unsigned *seed)
{
    struct matrix matrix = {rows, cols, cols + pad, NULL, NULL};
    matrix.f32 = malloc(sizeof(float) * span(&matrix));
    matrix.bf16 = malloc(sizeof(uint16_t) * span(&matrix));
    for (size_t i = 0; i < span(&matrix); i++) {
        bool is_padding = (int64_t)i % matrix.ld >= cols;
        matrix.f32[i] = is_padding ? NAN : (float)(rand_r(seed) % 255 - 127) / 64;
    }
    cofi_vec()->f32_to_bf16(matrix.bf16, matrix.f32, (int64_t)span(&matrix));
    return matrix;
}

static void matrix_free(struct matrix *matrix)
{
    free(matrix->f32);
    free(matrix->bf16);
}

struct problem {
    enum cofi_gemm_form form;
    enum cofi_gemm_type type;
    int m, n, k, pad;
    bool accumulate;
};

/* C is NaN where it must be overwritten, and guarded between its rows and on both sides. */
static float *c_make(const struct problem *problem, int64_t ldc, size_t *n_out)
{
    *n_out = (size_t)((problem->m + 2) * ldc);
    float *c = malloc(sizeof(float) * *n_out);
    for (size_t i = 0; i < *n_out; i++)
        c[i] = GUARD;
    for (int i = 0; i < problem->m; i++)
        for (int j = 0; j < problem->n; j++)
            c[(i + 1) * ldc + j] = problem->accumulate ? (float)(i % 7 - j % 5) : NAN;
    return c;
}

static void check_product(const struct problem *problem, const struct matrix *a,
                          const struct matrix *b, const float *c, int64_t ldc, size_t n_elements)
{
    const bool a_is_mk = problem->form != COFI_GEMM_TN, b_is_nk = problem->form == COFI_GEMM_NT;
    for (size_t e = 0; e < n_elements; e++) {
        int64_t i = (int64_t)e / ldc - 1, j = (int64_t)e % ldc;
        if (i < 0 || i >= problem->m || j >= problem->n) {
            CHECK(c[e] == GUARD, "%s %dx%dx%d wrote outside C at %d,%d", form_names[problem->form],
                  problem->m, problem->n, problem->k, (int)i, (int)j);
            continue;
        }
        double want = problem->accumulate ? (double)(i % 7 - j % 5) : 0, size = fabs(want);
        for (int64_t k = 0; k < problem->k; k++) {
            double product = (double)a->f32[a_is_mk ? i * a->ld + k : k * a->ld + i] *
                             (double)b->f32[b_is_nk ? j * b->ld + k : k * b->ld + j];
            want += product;
            size += fabs(product);
        }
        double bound = (2 + sqrt(problem->k)) * 0x1p-24 * size;
        CHECK(fabs(c[e] - want) <= bound, "%s type %d %dx%dx%d pad %d acc %d: C[%d,%d] %g, not %g",
              form_names[problem->form], (int)problem->type, problem->m, problem->n, problem->k,
              problem->pad, problem->accumulate, (int)i, (int)j, (double)c[e], want);
    }
}

/* Runs and checks one product; returns C, which the caller frees. */
static float *run_problem(struct cofi_gemm *gemm, const struct problem *problem, size_t *n_out)
{
    unsigned seed = (unsigned)(problem->m * 31 + problem->n * 7 + problem->k);
    const bool a_is_mk = problem->form != COFI_GEMM_TN, b_is_nk = problem->form == COFI_GEMM_NT;
    const bool is_bf16 = problem->type == COFI_GEMM_BF16;
    int64_t ldc = problem->n + problem->pad + 1;
    struct matrix a = matrix_make(a_is_mk ? problem->m : problem->k,
                                  a_is_mk ? problem->k : problem->m, problem->pad, &seed);
    struct matrix b = matrix_make(b_is_nk ? problem->n : problem->k,
                                  b_is_nk ? problem->k : problem->n, problem->pad, &seed);
    float *c = c_make(problem, ldc, n_out);
    float *a_copy = memcpy(malloc(sizeof(float) * span(&a)), a.f32, sizeof(float) * span(&a));
    cof_status status = cofi_gemm_run(gemm, problem->form, problem->type, problem->m, problem->n,
                                      problem->k, is_bf16 ? (void *)a.bf16 : a.f32, a.ld,
                                      is_bf16 ? (void *)b.bf16 : b.f32, b.ld, problem->accumulate,
                                      c + ldc, ldc);
    CHECK(status == COF_OK, "%s", cof_last_error());
    CHECK(!memcmp(a_copy, a.f32, sizeof(float) * span(&a)), "A was modified");
    check_product(problem, &a, &b, c, ldc, *n_out);
    free(a_copy);
    matrix_free(&a);
    matrix_free(&b);
    return c;
}

static void test_products(struct cofi_gemm *gemm)
{
    static const int pads[] = {0, 3, 8 * 128};
    for (int i = 0; i < N_SIZES * 3 * 3 * 2 * 2; i++) {
        const int *size = sizes[i / 36];
        struct problem problem = {(enum cofi_gemm_form)(i % 3), (enum cofi_gemm_type)(i / 3 % 2),
                                  size[0], size[1], size[2], pads[i / 12 % 3], i / 6 % 2};
        size_t n;
        if (cofi_gemm_has(problem.type))
            free(run_problem(gemm, &problem, &n));
    }
}

static void test_empty(struct cofi_gemm *gemm)
{
    float a[16] = {0}, c[16];
    for (int form = 0; form < 3; form++)
        for (int which = 0; which < 8; which++) {
            int m = which & 1 ? 2 : 0, n = which & 2 ? 3 : 0, k = which & 4 ? 2 : 0;
            for (int i = 0; i < 16; i++)
                c[i] = GUARD;
            CHECK(cofi_gemm_run(gemm, (enum cofi_gemm_form)form, COFI_GEMM_F32, m, n, k, a, 4, a, 4,
                                true, c, 4) == COF_OK, "empty: %s", cof_last_error());
            for (int i = 0; i < 16; i++)
                CHECK(c[i] == GUARD, "%dx%dx%d accumulated something", m, n, k);
            CHECK(cofi_gemm_run(gemm, (enum cofi_gemm_form)form, COFI_GEMM_F32, m, n, k, a, 4, a, 4,
                                false, c, 4) == COF_OK, "empty: %s", cof_last_error());
            for (int i = 0; i < 16; i++)
                CHECK(c[i] == (i / 4 < m && i % 4 < n ? 0 : GUARD), "%dx%dx%d at %d", m, n, k, i);
        }
    if (!cofi_gemm_has(COFI_GEMM_BF16))
        CHECK(cofi_gemm_run(gemm, COFI_GEMM_NN, COFI_GEMM_BF16, 1, 1, 1, a, 1, a, 1, false, c, 1) ==
                  COF_ERR_UNSUPPORTED, "bf16 ran where it is not offered");
}

/* Both threads run all sizes, in opposite orders, and want the bits of the first pass. */
struct thread_args {
    float *want[N_SIZES];
    int step;
};

static void *thread_main(void *user)
{
    const struct thread_args *args = user;
    struct cofi_gemm *gemm = NULL;
    cof_status status = cofi_gemm_open(&gemm);
    CHECK(status == COF_OK, "open on a thread: %s", cof_last_error());
    for (int pass = 0; status == COF_OK && pass < 3; pass++)
        for (int i = 0; i < N_SIZES; i++) {
            int at = args->step > 0 ? i : N_SIZES - 1 - i;
            struct problem problem = {(enum cofi_gemm_form)(at % 3), COFI_GEMM_F32, sizes[at][0],
                                      sizes[at][1], sizes[at][2], 3, at % 2};
            size_t n;
            float *c = run_problem(gemm, &problem, &n);
            CHECK(!memcmp(c, args->want[at], sizeof(float) * n), "other bits beside a thread");
            free(c);
        }
    cofi_gemm_close(gemm);
    return NULL;
}

static void test_threads(struct cofi_gemm *gemm)
{
    struct thread_args forward = {.step = 1}, backward = {.step = -1};
    for (int i = 0; i < N_SIZES; i++) {
        struct problem problem = {(enum cofi_gemm_form)(i % 3), COFI_GEMM_F32, sizes[i][0],
                                  sizes[i][1], sizes[i][2], 3, i % 2};
        size_t n;
        forward.want[i] = backward.want[i] = run_problem(gemm, &problem, &n);
    }
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, thread_main, &forward);
    pthread_create(&threads[1], NULL, thread_main, &backward);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    for (int i = 0; i < N_SIZES; i++)
        free(forward.want[i]);
}

/* ---- memory --------------------------------------------------------------------------------- */

static _Thread_local bool refuses_memory;
static _Thread_local int n_refused;

/* oneDNN's scratch comes from here. */
__attribute__((visibility("default"))) int posix_memalign(void **p, size_t align, size_t bytes)
{
    if (refuses_memory && bytes >= 4096) {
        n_refused++;
        return ENOMEM;
    }
    *p = aligned_alloc(align, (bytes + align - 1) / align * align);
    return *p ? 0 : ENOMEM;
}

/* A product that is refused its scratch is out of memory, nothing else. */
static void test_memory(struct cofi_gemm *gemm)
{
    enum { N = 200 };
    float *a = calloc((size_t)N * N, sizeof *a), *c = calloc((size_t)N * N, sizeof *c);
    for (int form = 0; form < 3; form++) {
        n_refused = 0;
        refuses_memory = true;
        cof_status status = cofi_gemm_run(gemm, (enum cofi_gemm_form)form, COFI_GEMM_F32, N, N, N,
                                          a, N, a, N, false, c, N);
        refuses_memory = false;
        CHECK(status == COF_OK || (n_refused && status == COF_ERR_NOMEM), "without memory: %s: %s",
              cof_status_name(status), cof_last_error());
        status = cofi_gemm_run(gemm, (enum cofi_gemm_form)form, COFI_GEMM_F32, N, N, N, a, N, a, N,
                               false, c, N);
        CHECK(status == COF_OK, "with memory again: %s", cof_last_error());
    }
    free(a);
    free(c);
}

struct setting {
    const char *gemm, *isa;
    const char *want; /* prefix of the provider's name; NULL: refused */
};

static int child(const struct setting *setting)
{
    setenv("COFUSE_GEMM", setting->gemm, 1);
    setenv("COFUSE_CPU_ISA", setting->isa, 1);
    cof_status status = cofi_gemm_init();
    if (!setting->want) {
        CHECK(status == COF_ERR_UNSUPPORTED && cofi_gemm_init() == status, "init gave %s",
              cof_status_name(status));
        CHECK(strstr(cof_last_error(), "oneDNN"), "the text is: %s", cof_last_error());
        return n_failed != 0;
    }
    if (status == COF_ERR_UNSUPPORTED && strstr(cof_last_error(), "cannot be loaded")) {
        printf("ok %s # skip: %s\n", context, cof_last_error());
        return 2;
    }
    struct cofi_gemm *gemm = NULL;
    CHECK(status == COF_OK, "init: %s", cof_last_error());
    status = cofi_gemm_open(&gemm);
    CHECK(status == COF_OK, "open: %s", cof_last_error());
    if (status != COF_OK)
        return 1;
    printf("# %s: %s, %s, bf16 %s\n", context, cofi_gemm_name(), cofi_isa_name(cofi_isa()),
           cofi_gemm_has(COFI_GEMM_BF16) ? "native" : "not native");
    CHECK(!strncmp(cofi_gemm_name(), setting->want, strlen(setting->want)), "wanted %s, have %s",
          setting->want, cofi_gemm_name());
    test_products(gemm);
    test_empty(gemm);
    test_threads(gemm);
    test_memory(gemm);
    cofi_gemm_close(gemm);
    return n_failed != 0;
}

int main(void)
{
    static const struct setting settings[] = {
        {"plain", "auto", "plain"},      {"plain", "avx2", "plain"},  {"plain", "scalar", "plain"},
        {"onednn", "auto", "onednn-"},   {"onednn", "avx2", "onednn-"},
        {"onednn", "avx512", "onednn-"}, {"auto", "scalar", "plain"}, {"onednn", "scalar", NULL}};
    int n_bad = 0;
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "gemm %s isa %s", settings[i].gemm, settings[i].isa);
        context = name;
        fflush(stdout);
        pid_t pid = fork(); /* before this process has touched OpenMP */
        if (pid == 0) {
            int result = child(&settings[i]);
            fflush(stdout);
            _exit(result);
        }
        int result = 1;
        waitpid(pid, &result, 0);
        bool is_ok = WIFEXITED(result) && WEXITSTATUS(result) == 0;
        bool is_skipped = WIFEXITED(result) && WEXITSTATUS(result) == 2;
        if (!WIFEXITED(result))
            printf("not ok %s: signal %d\n", name, WTERMSIG(result));
        else if (is_ok)
            printf("ok %s\n", name);
        n_bad += !is_ok && !is_skipped;
    }
    return n_bad != 0;
}
