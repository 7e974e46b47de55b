/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Engines of attention on a CUDA device: every section that an engine takes is right, whatever its
 * type, sizes, band and strides, NaN spread no further than they may, and parts merge to the whole,
 * also in a graph. With `all` as argument every section by every engine, with `bench` rates of
 * large ones. Limits of bands and the choice need no device; without one, skipped after them. */
#include "test_cuda.h"

#ifdef COFI_CUDA
#include "core/error.h"
#include "ops/attention/attention_kernels_cuda.h"
#include "test_attention_section.h"

static const struct cofi_band all_keys = {0, INT64_MAX, INT64_MAX};

/* ---- without a device ----------------------------------------------------------------------- */

/* The limits say of every row and key what the band says, and tiles leave no key out. */
static void check_limits(const struct cofi_band *band, int64_t n_q, int64_t n_k)
{
    struct cofi_exact_limits limits = cofi_exact_limits_of(band, n_q, n_k);
    int64_t n_wrong = 0;
    for (int64_t i = 0; i < n_q; i++) {
        struct cofi_exact_keys keys = cofi_exact_keys_of(limits, i, n_q - i, n_k);
        for (int64_t j = 0; j < n_k; j++) {
            bool want = test_sees(band, i, j);
            n_wrong += want != (j >= i + limits.low && j <= i + limits.high);
            n_wrong += want && (j < keys.begin || j >= keys.end);
        }
        n_wrong += keys.begin < 0 || keys.end > n_k;
    }
    CHECK(n_wrong == 0, "band=%lld,%lld,%lld rows=%lldx%lld: %lld wrong", (long long)band->diag,
          (long long)band->left, (long long)band->right, (long long)n_q, (long long)n_k,
          (long long)n_wrong);
}

static void test_limits(void)
{
    static const int64_t rows[] = {1, 2, 5, 9};
    static const int64_t values[] = {INT64_MIN, INT64_MIN + 1, -10, -9, -3, -1, 0, 1, 2,
                                     8, 9, 10, INT64_MAX - 1, INT64_MAX};
    enum { N = sizeof values / sizeof values[0] };
    for (int at = 0; at < 16 * N * N * N; at++) {
        int64_t n_q = rows[at % 4], n_k = rows[at / 4 % 4];
        struct cofi_band band = {values[at / 16 % N], values[at / 16 / N % N],
                                 values[at / 16 / N / N]};
        check_limits(&band, n_q, n_k);
    }
}

static struct cofi_attention_shape plain_shape(enum cofi_elem elem)
{
    return (struct cofi_attention_shape){
        .elem = elem, .n_batch = 1, .n_heads = 2, .n_kv_heads = 1, .dim_qk = 64, .dim_v = 64,
        .q_rows = 8, .k_rows = 8, .band = all_keys, .scale = 1,
        .q = {1024, 128, 64}, .k = {512, 64, 64}, .v = {512, 64, 64}, .o = {1024, 128, 64},
        .lse_batch = 16, .lse_head = 8};
}

static void test_choice(void)
{
    struct cofi_attention_shape shape = plain_shape(COFI_ELEM_F32);
    const struct cofi_attention_engine *engine = NULL;
    setenv("COFUSE_ATTENTION_ENGINE", "exact", 1);
    CHECK_OK(cofi_attention_engine_choose(0, &shape, &engine));
    CHECK(engine == &cofi_attention_exact, "another engine");
    setenv("COFUSE_ATTENTION_ENGINE", "cudnn", 1); /* has no fp32 */
    CHECK_FAILS(cofi_attention_engine_choose(0, &shape, &engine), COF_ERR_UNSUPPORTED,
                "variable COFUSE_ATTENTION_ENGINE = cudnn: ");
    setenv("COFUSE_ATTENTION_ENGINE", "auto", 1);
    CHECK_OK(cofi_attention_engine_choose(0, &shape, &engine));
    CHECK(engine == &cofi_attention_exact, "another engine");
    shape.dim_v = COFI_EXACT_MAX_DIM + 1;
    CHECK_FAILS(cofi_attention_engine_choose(0, &shape, &engine), COF_ERR_UNSUPPORTED,
                "wanted at most 512");
    shape = plain_shape(COFI_ELEM_F32);
    shape.q_rows = INT64_C(64) * INT32_MAX;
    CHECK_FAILS(cofi_attention_engine_choose(0, &shape, &engine), COF_ERR_UNSUPPORTED,
                "rows in all");
}

/* ---- sections ------------------------------------------------------------------------------- */

static void *workspace_of(size_t bytes)
{
    void *workspace = NULL;
    CHECK_CUDA(cudaMalloc(&workspace, bytes + 256));
    return workspace;
}

/* False where the engine does not take it. */
static bool check_section(const struct cofi_attention_engine *engine, const struct test_section *s)
{
    struct test_tensors t = test_tensors_make(s);
    struct cofi_attention_shape shape = test_shape(s, &t);
    struct cofi_attention_kernel *kernel = NULL;
    char why[160] = "";
    size_t bytes = 0;
    bool can = engine->can(0, &shape, why, sizeof why);
    if (can) {
        CHECK_OK(engine->open(0, &shape, &kernel, &bytes));
    } else {
        CHECK(why[0], "%s: no reason", test_section_name(s, engine->name));
    }
    if (kernel) {
        void *workspace = workspace_of(bytes);
        CHECK_OK(engine->run(kernel, test_data(&t.q), test_data(&t.k), test_data(&t.v),
                             test_data(&t.o), test_data(&t.lse), workspace, NULL));
        CHECK_CUDA(cudaDeviceSynchronize());
        test_download(&t.o);
        test_download(&t.lse);
        test_section_check(s, &t, engine->name);
        cudaFree(workspace);
        engine->close(kernel);
    }
    test_tensors_free(&t);
    return can;
}

static const struct {
    int64_t b, h, kv, dqk, dv, n_q, n_k;
} sizes[] = {
    {1, 1, 1, 1, 1, 1, 1},       {2, 2, 2, 64, 64, 64, 64},      {1, 4, 2, 128, 128, 65, 130},
    {1, 2, 1, 128, 128, 128, 63}, {2, 5, 5, 32, 40, 37, 61},     {1, 3, 1, 33, 7, 70, 129},
    {1, 2, 2, 96, 96, 64, 192},  {1, 2, 1, 192, 128, 66, 100},   {1, 1, 1, 256, 256, 63, 65},
    {1, 2, 2, 80, 130, 40, 64},  {1, 1, 1, 512, 512, 17, 70},    {1, 2, 1, 31, 257, 33, 33},
    {1, 8, 1, 64, 64, 129, 1},   {3, 1, 1, 16, 512, 1, 257},     {1, 1, 1, 128, 64, 200, 250},
};

static struct cofi_band band_of(int idx, int64_t n_q, int64_t n_k)
{
    const struct cofi_band bands[] = {
        all_keys,
        {0, INT64_MAX, 0},         /* causal */
        {n_k - n_q, INT64_MAX, 0}, /* causal, the last row sees all */
        {-(n_q / 2 + 1), INT64_MAX, 0}, /* rows that see nothing come first */
        {n_q, INT64_MAX, 0},
        {0, 0, 0},
        {n_k / 2, 9, 0},
        {-3, 20, 70},
        {n_k - n_q / 2, 5, INT64_MAX}, /* the last rows see nothing */
        {-n_q, INT64_MAX, 0},          /* no row sees anything */
        {0, INT64_MAX, n_k},
    };
    return bands[idx];
}
enum { N_BANDS = 11 };

/* Every one, or one of four, where the engine takes long to prepare a shape. */
static void test_sections(const struct cofi_attention_engine *engine, int step)
{
    enum { N_SIZES = sizeof sizes / sizeof sizes[0], N_ELEMS = 3 };
    static const float scales[] = {0, 1, -0.25f}; /* 0: the usual one */
    int n_taken = 0, n_asked = 0, n = 0;
    for (int i = 0; i < N_SIZES; i++)
        for (int band = 0; band < N_BANDS; band++)
            for (int elem = 0; elem < N_ELEMS; elem++, n++) {
                if (n % step)
                    continue;
                struct test_section s = {
                    .elem = (enum cofi_elem)elem, .o_f32 = n % 4 == 3,
                    .layout = (enum test_layout)((i + band + elem) % N_LAYOUTS), .b = sizes[i].b,
                    .h = sizes[i].h, .kv = sizes[i].kv, .dqk = sizes[i].dqk, .dv = sizes[i].dv,
                    .n_q = sizes[i].n_q, .n_k = sizes[i].n_k,
                    .band = band_of(band, sizes[i].n_q, sizes[i].n_k),
                    .scale = sizes[i].dqk <= 64 ? scales[band % 3] : 0, .seed = (unsigned)n};
                if (s.scale == 0)
                    s.scale = 1 / sqrtf((float)s.dqk);
                n_taken += check_section(engine, &s);
                n_asked++;
            }
    printf("# engine=%s: takes %d of %d sections\n", engine->name, n_taken, n_asked);
    CHECK(engine != &cofi_attention_exact || n_taken == n, "exact takes all");
}

/* NaN and infinities reach the rows that see them, and no other: an element of q, k or v in the
 * first, a middle and the last row, so in tiles that the band cuts, leaves whole or ends. `exact`
 * alone keeps this promise. */
static void test_poison(void)
{
    static const struct test_poison poisons[] = {
        {'q', 0, NAN},      {'q', 0, INFINITY}, {'k', 0, NAN},      {'k', 0, INFINITY},
        {'k', 0, -INFINITY}, {'v', 0, NAN},     {'v', 0, INFINITY}, {'v', 0, -INFINITY}};
    static const int some_sizes[] = {2, 5, 8, 11};
    enum { N_POISONS = sizeof poisons / sizeof poisons[0], N_PLACES = 3 };
    enum { N_SOME = sizeof some_sizes / sizeof some_sizes[0] };
    for (int n = 0; n < N_SOME * N_BANDS * N_POISONS * N_PLACES; n++) {
        int i = some_sizes[n / N_PLACES / N_POISONS / N_BANDS];
        struct test_section s = {
            .elem = (enum cofi_elem)(n / N_PLACES % 3), .o_f32 = n % 4 == 3,
            .layout = (enum test_layout)(n % N_LAYOUTS), .b = sizes[i].b, .h = sizes[i].h,
            .kv = sizes[i].kv, .dqk = sizes[i].dqk, .dv = sizes[i].dv, .n_q = sizes[i].n_q,
            .n_k = sizes[i].n_k, .scale = 1 / sqrtf((float)sizes[i].dqk), .seed = (unsigned)n,
            .band = band_of(n / N_PLACES / N_POISONS % N_BANDS, sizes[i].n_q, sizes[i].n_k),
            .poison = poisons[n / N_PLACES % N_POISONS]};
        int64_t last = (s.poison.tensor == 'q' ? s.n_q : s.n_k) - 1;
        s.poison.row = last * (n % N_PLACES) / (N_PLACES - 1);
        check_section(&cofi_attention_exact, &s);
    }
}

/* Row 2 lies 2^31 elements behind row 0, in every tensor. */
static void test_far_rows(const struct cofi_attention_engine *engine)
{
    enum { ROWS = 3, D = 64 };
    const int64_t stride = INT64_C(1) << 30;
    struct test_section s = {.elem = COFI_ELEM_BF16, .layout = BSHD, .b = 1, .h = 1, .kv = 1,
                             .dqk = D, .dv = D, .n_q = ROWS, .n_k = ROWS,
                             .band = {0, INT64_MAX, 0}, .scale = 0.125f, .seed = 7};
    struct test_tensors t = test_tensors_make(&s);
    struct test_view *views[] = {&t.q, &t.k, &t.v, &t.o};
    struct cofi_attention_shape shape = test_shape(&s, &t);
    struct cofi_attention_kernel *kernel = NULL;
    char why[160], *far = NULL;
    size_t bytes = 0;
    shape.q.row = shape.k.row = shape.v.row = shape.o.row = stride;
    if (engine->can(0, &shape, why, sizeof why) &&
        cudaMalloc((void **)&far, ((size_t)(ROWS - 1) * stride + 4 * D) * 2) == cudaSuccess) {
        for (int i = 0; i < 4 * ROWS; i++)
            CHECK_CUDA(cudaMemcpy(far + (i / 4 * stride + i % 4 * D) * 2,
                                  (char *)views[i % 4]->host + (TEST_GUARD + i / 4 * D) * 2, D * 2,
                                  cudaMemcpyHostToDevice));
        CHECK_OK(engine->open(0, &shape, &kernel, &bytes));
        void *workspace = workspace_of(bytes);
        CHECK_OK(engine->run(kernel, far, far + D * 2, far + 2 * D * 2, far + 3 * D * 2,
                             test_data(&t.lse), workspace, NULL));
        CHECK_CUDA(cudaDeviceSynchronize());
        for (int row = 0; row < ROWS; row++)
            CHECK_CUDA(cudaMemcpy((char *)t.o.host + (TEST_GUARD + row * D) * 2,
                                  far + (row * stride + 3 * D) * 2, D * 2,
                                  cudaMemcpyDeviceToHost));
        test_download(&t.lse);
        test_section_check(&s, &t, engine->name);
        cudaFree(workspace);
        engine->close(kernel);
    } else {
        printf("# engine=%s: no rows 2^30 elements apart\n", engine->name);
    }
    cudaFree(far);
    cudaGetLastError();
    test_tensors_free(&t);
}

/* ---- parts, as a plan has them -------------------------------------------------------------- */

/* Causal, keys 0 .. SPLIT - 1 and the others: the first rows see none of the second part. */
struct parts {
    struct test_section s;
    struct test_tensors t, second; /* of `second` o and lse alone */
    struct cofi_attention_kernels kernels;
    int idx[2];
    void *workspace;
};
enum { SPLIT = 40, PARTS_ROWS = 96 };

static cof_status open_parts(struct parts *p)
{
    struct cofi_attention_shape shape = test_shape(&p->s, &p->t);
    int again;
    shape.k_rows = SPLIT;
    COF_TRY(cofi_attention_kernels_open(&p->kernels, &shape, &p->idx[0]));
    COF_TRY(cofi_attention_kernels_open(&p->kernels, &shape, &again));
    CHECK(again == p->idx[0], "one shape has two kernels");
    shape.k_rows = p->s.n_k - SPLIT;
    shape.band.diag = -SPLIT;
    COF_TRY(cofi_attention_kernels_open(&p->kernels, &shape, &p->idx[1]));
    CHECK(p->idx[1] != p->idx[0] && p->kernels.n == 2, "%d kernels", p->kernels.n);
    return COF_OK;
}

static void run_parts(const struct parts *p, cudaStream_t stream)
{
    const struct test_tensors *t = &p->t, *second = &p->second;
    const int64_t bytes = cofi_elem_bytes(p->s.elem);
    const struct cofi_attention_merge m = {
        .elem = p->s.elem, .n_batch = p->s.b, .n_rows = p->s.n_q, .n_heads = p->s.h,
        .dim_v = p->s.dv, .o = test_data(&t->o), .o_f32 = p->s.o_f32, .stride = t->o.stride,
        .lse = test_data(&t->lse), .lse_batch = t->lse.stride.batch,
        .lse_head = t->lse.stride.head,
        .a = {test_data(&t->o), p->s.o_f32, t->o.stride, test_data(&t->lse), t->lse.stride.batch,
              t->lse.stride.head},
        .b = {test_data(&second->o), p->s.o_f32, second->o.stride, test_data(&second->lse),
              second->lse.stride.batch, second->lse.stride.head}};
    CHECK_OK(cofi_attention_kernels_run(&p->kernels, p->idx[0], test_data(&t->q), test_data(&t->k),
                                        test_data(&t->v), test_data(&t->o), test_data(&t->lse),
                                        p->workspace, stream));
    CHECK_OK(cofi_attention_kernels_run(
        &p->kernels, p->idx[1], test_data(&t->q),
        (char *)test_data(&t->k) + SPLIT * t->k.stride.row * bytes,
        (char *)test_data(&t->v) + SPLIT * t->v.stride.row * bytes, test_data(&second->o),
        test_data(&second->lse), p->workspace, stream));
    CHECK_OK(cofi_attention_merge(&m, stream));
}

static void replay_parts(struct parts *p)
{
    cudaStream_t stream;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    run_parts(p, stream);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 2; i++) {
        CHECK_CUDA(cudaGraphLaunch(exec, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        test_download(&p->t.o);
        test_download(&p->t.lse);
        test_section_check(&p->s, &p->t, p->s.o_f32 ? "exact" : "merged"); /* leaves 0xff */
        test_upload(&p->t.o);
        test_upload(&p->t.lse);
    }
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
}

static void test_parts(const struct cofi_attention_engine *engine, bool o_f32)
{
    struct parts p = {.s = {.elem = COFI_ELEM_BF16, .o_f32 = o_f32, .layout = SBHD, .b = 2, .h = 4,
                            .kv = 2, .dqk = 128, .dv = 128, .n_q = PARTS_ROWS, .n_k = PARTS_ROWS,
                            .band = {0, INT64_MAX, 0}, .scale = 0.1f, .seed = 3}};
    p.t = test_tensors_make(&p.s);
    p.second = test_tensors_make(&p.s);
    setenv("COFUSE_ATTENTION_ENGINE", engine->name, 1);
    cof_status status = open_parts(&p);
    CHECK(status == COF_OK || (status == COF_ERR_UNSUPPORTED && strcmp(engine->name, "exact")),
          "%s: %s", engine->name, cof_last_error());
    if (status == COF_OK) {
        p.workspace = workspace_of(p.kernels.workspace_bytes);
        replay_parts(&p);
        cudaFree(p.workspace);
    } else {
        printf("# engine=%s%s: no parts: %s\n", engine->name, o_f32 ? " o_f32" : "",
               cof_last_error());
    }
    cofi_attention_kernels_close(&p.kernels);
    setenv("COFUSE_ATTENTION_ENGINE", "auto", 1);
    test_tensors_free(&p.t);
    test_tensors_free(&p.second);
}

/* ---- rates ---------------------------------------------------------------------------------- */

static int64_t count_seen(const struct test_section *s)
{
    struct cofi_exact_limits limits = cofi_exact_limits_of(&s->band, s->n_q, s->n_k);
    int64_t n = 0;
    for (int64_t i = 0; i < s->n_q; i++) {
        struct cofi_exact_keys keys = cofi_exact_keys_of(limits, i, 1, s->n_k);
        n += keys.end > keys.begin ? keys.end - keys.begin : 0;
    }
    return n;
}

static void bench_section(const struct cofi_attention_engine *engine, const struct test_section *s)
{
    struct test_tensors t = test_tensors_make(s);
    struct cofi_attention_shape shape = test_shape(s, &t);
    struct cofi_attention_kernel *kernel = NULL;
    char why[160] = "";
    size_t bytes = 0;
    if (engine->can(0, &shape, why, sizeof why)) {
        CHECK_OK(engine->open(0, &shape, &kernel, &bytes));
        void *workspace = workspace_of(bytes);
        double ms = 0;
        TEST_MEDIAN_MS(ms, CHECK_OK(engine->run(kernel, test_data(&t.q), test_data(&t.k),
                                                test_data(&t.v), test_data(&t.o),
                                                test_data(&t.lse), workspace, NULL)));
        double flop = 2.0 * (double)count_seen(s) * (double)((s->dqk + s->dv) * s->h * s->b);
        printf("# %s: %.3f ms, %.1f TFLOP/s, workspace %zu\n", test_section_name(s, engine->name),
               ms, flop / ms * 1e-9, bytes);
        cudaFree(workspace);
        engine->close(kernel);
    } else {
        printf("# %s: %s\n", test_section_name(s, engine->name), why);
    }
    test_tensors_free(&t);
}

static void bench(void)
{
    static const struct test_section sections[] = {
        {.h = 20, .kv = 20, .dqk = 128, .dv = 128, .n_q = 4096, .n_k = 4096},
        {.h = 20, .kv = 20, .dqk = 128, .dv = 128, .n_q = 4096, .n_k = 4096,
         .band = {0, INT64_MAX, 0}},
        {.h = 32, .kv = 8, .dqk = 128, .dv = 128, .n_q = 4096, .n_k = 4096},
        {.h = 20, .kv = 20, .dqk = 64, .dv = 64, .n_q = 4096, .n_k = 4096},
        {.h = 20, .kv = 20, .dqk = 192, .dv = 128, .n_q = 2048, .n_k = 4096},
        {.h = 20, .kv = 20, .dqk = 256, .dv = 256, .n_q = 2048, .n_k = 4096},
        {.h = 20, .kv = 20, .dqk = 128, .dv = 128, .n_q = 8192, .n_k = 8192,
         .band = {0, 1024, 0}},
    };
    const struct cofi_attention_engine *engine;
    for (int e = 0; (engine = cofi_attention_engine_at(e)); e++)
        for (size_t i = 0; i < sizeof sections / sizeof sections[0]; i++)
            for (int elem = 0; elem < 2; elem++) {
                struct test_section s = sections[i];
                s.elem = elem ? COFI_ELEM_F32 : COFI_ELEM_BF16;
                s.b = 1;
                if (s.band.left == 0)
                    s.band = all_keys;
                s.scale = 1 / sqrtf((float)s.dqk);
                bench_section(engine, &s);
            }
}

int main(int argc, char **argv)
{
    const struct cofi_attention_engine *engine;
    const bool is_whole = argc > 1 && !strcmp(argv[1], "all");
    test_limits();
    test_choice();
    if (!test_cuda_devices())
        return test_n_failed ? test_done() : 77;
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench();
        return test_done();
    }
    test_poison();
    for (int i = 0; (engine = cofi_attention_engine_at(i)); i++) {
        test_sections(engine, engine == &cofi_attention_exact || is_whole ? 1 : 4);
        test_far_rows(engine);
        test_parts(engine, false);
        test_parts(engine, true);
    }
    return test_done();
}
#endif
