/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The engine cudnn on a device, beyond what unit_cuda_attention_engine.c asks of every engine:
 * bands over many tiles, a first run that is captured, threads with kernels of one plan, plans that
 * are kept, refusals. With `bench` as argument: rates, and what making a plan takes. Skipped where
 * there is no device or no cuDNN. */
#include "test_cuda.h"

#ifdef COFI_CUDA
#include <time.h>

#include "ops/attention/attention_cudnn.h"
#include "test_attention_section.h"

static const int64_t ALL = INT64_MAX; /* of a side of a band */

static const struct cofi_attention_engine *const engine = &cofi_attention_cudnn;

static struct test_section make_section(int64_t n_q, int64_t n_k, int64_t d,
                                        struct cofi_band band)
{
    return (struct test_section){.elem = COFI_ELEM_BF16, .layout = BSHD, .b = 1, .h = 2, .kv = 1,
                                 .dqk = d, .dv = d, .n_q = n_q, .n_k = n_k, .band = band,
                                 .scale = 1 / sqrtf((float)d), .seed = (unsigned)(n_q + n_k)};
}

/* A section with its tensors and its kernel. */
struct opened {
    struct test_section section;
    struct test_tensors tensors;
    struct cofi_attention_kernel *kernel; /* NULL: refused, which has been said */
    void *workspace;
};

static struct opened open_section(const struct test_section *s)
{
    struct opened o = {.section = *s, .tensors = test_tensors_make(s)};
    struct cofi_attention_shape shape = test_shape(s, &o.tensors);
    size_t bytes = 0;
    char why[400] = "";
    bool can = engine->can(0, &shape, why, sizeof why);
    CHECK(can, "%s: %s", test_section_name(s, "cudnn"), why);
    if (can)
        CHECK_OK(engine->open(0, &shape, &o.kernel, &bytes));
    CHECK_CUDA(cudaMalloc(&o.workspace, bytes + 256));
    return o;
}

static void close_section(struct opened *o)
{
    engine->close(o->kernel);
    cudaFree(o->workspace);
    test_tensors_free(&o->tensors);
}

static cof_status run_section(const struct opened *o, void *stream)
{
    const struct test_tensors *t = &o->tensors;
    return engine->run(o->kernel, test_data(&t->q), test_data(&t->k), test_data(&t->v),
                       test_data(&t->o), test_data(&t->lse), o->workspace, stream);
}

static void check_result(struct opened *o)
{
    test_download(&o->tensors.o);
    test_download(&o->tensors.lse);
    test_section_check(&o->section, &o->tensors, "cudnn");
}

/* ---- bands over many tiles ------------------------------------------------------------------ */

static void test_bands(void)
{
    const struct {
        int64_t n_q, n_k;
        struct cofi_band band;
    } cases[] = {
        {400, 400, {0, ALL, ALL}},    {400, 400, {0, ALL, 0}},      {400, 400, {0, 100, 0}},
        {400, 400, {0, 0, 0}},        {400, 400, {0, 1, 0}},        {400, 400, {0, ALL, 63}},
        {400, 400, {0, 70, 70}},      {400, 400, {0, 130, ALL}},    {300, 500, {200, ALL, 0}},
        {300, 500, {200, 150, 0}},    {500, 300, {0, ALL, 0}},      {500, 300, {-200, ALL, 0}},
        {290, 300, {0, 60, 0}},       {300, 300, {300, 299, 0}},    {300, 300, {-100, ALL, 0}},
        {300, 700, {350, 200, 31}},   {257, 129, {0, ALL, ALL}},    {1, 400, {399, ALL, 0}},
        {1, 400, {399, 100, 0}},      {400, 1, {0, ALL, ALL}},
    };
    const int64_t dims[] = {128, 64, 256};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct test_section s =
            make_section(cases[i].n_q, cases[i].n_k, dims[i % 3], cases[i].band);
        s.layout = (enum test_layout)(i % 4); /* not ODD */
        s.elem = i % 2 ? COFI_ELEM_F16 : COFI_ELEM_BF16;
        struct opened o = open_section(&s);
        if (o.kernel) {
            CHECK_OK(run_section(&o, NULL));
            CHECK_CUDA(cudaDeviceSynchronize());
            check_result(&o);
        }
        close_section(&o);
    }
}

/* ---- capture -------------------------------------------------------------------------------- */

/* What a graph may consist of: a replay allocates nothing. */
static void check_nodes(cudaGraph_t graph)
{
    cudaGraphNode_t nodes[32];
    size_t n = 32;
    CHECK_CUDA(cudaGraphGetNodes(graph, nodes, &n));
    CHECK(n >= 1 && n <= 32, "%zu nodes", n);
    for (size_t i = 0; i < n && i < 32; i++) {
        enum cudaGraphNodeType type;
        CHECK_CUDA(cudaGraphNodeGetType(nodes[i], &type));
        CHECK(type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset,
              "node %zu of %zu is of type %d", i, n, (int)type);
    }
}

static void test_capture(struct cofi_band band)
{
    struct test_section s = make_section(384, 384, 128, band);
    struct opened o = open_section(&s);
    cudaStream_t stream;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    if (!o.kernel) {
        close_section(&o);
        return;
    }
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK_OK(run_section(&o, stream));
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    if (graph) {
        check_nodes(graph);
        CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
        for (int i = 0; i < 3; i++)
            CHECK_CUDA(cudaGraphLaunch(exec, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        check_result(&o);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
    cudaStreamDestroy(stream);
    close_section(&o);
}

/* ---- threads -------------------------------------------------------------------------------- */

/* Kernels of one plan, opened, run and closed at once, on inputs of their own. */
static void thread_main(int rank, int n_ranks, const char *job, void *arg)
{
    (void)n_ranks;
    (void)job;
    (void)arg;
    struct test_section s = make_section(200, 300, 64, (struct cofi_band){100, ALL, 0});
    s.seed = 100 * (unsigned)rank;
    cudaSetDevice(0);
    struct opened o = open_section(&s);
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < 50 && o.kernel; i++)
        CHECK_OK(run_section(&o, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    if (o.kernel)
        check_result(&o);
    cudaStreamDestroy(stream);
    close_section(&o);
}

/* ---- plans that are kept -------------------------------------------------------------------- */

static size_t free_memory(void)
{
    size_t is_free = 0, total = 0;
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemGetInfo(&is_free, &total));
    return is_free;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void test_again(void)
{
    struct test_section s = make_section(128, 128, 64, (struct cofi_band){0, ALL, 0});
    struct opened o = open_section(&s);
    struct cofi_attention_shape shape = test_shape(&s, &o.tensors);
    char why[400];
    size_t before = free_memory(), bytes;
    double begin = seconds();
    for (int i = 0; i < 1000; i++) {
        struct cofi_attention_kernel *kernel = NULL;
        CHECK(engine->can(0, &shape, why, sizeof why), "%s", why);
        CHECK_OK(engine->open(0, &shape, &kernel, &bytes));
        engine->close(kernel);
    }
    double each = 1e3 * (seconds() - begin) / 1000;
    size_t after = free_memory();
    CHECK(each < 5, "opening again took %g ms each time", each);
    CHECK(before <= after + (8 << 20), "1000 kernels took %lld bytes",
          (long long)before - (long long)after);
    close_section(&o);
}

static void test_refusals(void)
{
    struct test_section s = make_section(64, 64, 64, (struct cofi_band){0, ALL, 0});
    struct opened o = open_section(&s);
    struct cofi_attention_shape shape = test_shape(&s, &o.tensors);
    const struct test_tensors *t = &o.tensors;
    char why[400] = "";
    if (o.kernel)
        CHECK_FAILS(engine->run(o.kernel, (char *)test_data(&t->q) + 2, test_data(&t->k),
                                test_data(&t->v), test_data(&t->o), test_data(&t->lse),
                                o.workspace, NULL), COF_ERR_INVALID, "wanted 16-byte aligned");
    shape.elem = COFI_ELEM_F32;
    for (int i = 0; i < 2; i++) /* the second time from what is kept */
        CHECK(!engine->can(0, &shape, why, sizeof why) && strstr(why, "float32"), "got \"%s\"",
              why);
    close_section(&o);
}

/* ---- rates ---------------------------------------------------------------------------------- */

/* Random in the first rows, then these again and again: made on the device, for large tensors. */
static void fill_fast(const struct test_view *v, unsigned seed)
{
    enum { ELEMENTS = 1 << 20 };
    static uint16_t block[ELEMENTS];
    size_t bytes = test_view_bytes(v), done = sizeof block < bytes ? sizeof block : bytes;
    for (int i = 0; i < ELEMENTS; i++) /* a sum of four: close to a normal one of size 1 */
        block[i] = cofi_check_to_bf16(0.87f * (test_random(&seed) + test_random(&seed) +
                                               test_random(&seed) + test_random(&seed)));
    CHECK_CUDA(cudaMemcpy(v->device, block, done, cudaMemcpyHostToDevice));
    for (size_t n; done < bytes; done += n) {
        n = done < bytes - done ? done : bytes - done;
        CHECK_CUDA(cudaMemcpy((char *)v->device + done, v->device, n, cudaMemcpyDeviceToDevice));
    }
}

static double pairs(const struct test_section *s)
{
    double n = 0;
    for (int64_t i = 0; i < s->n_q; i++) {
        const struct cofi_band *b = &s->band;
        int64_t first = b->left == ALL ? 0 : i + b->diag - b->left;
        int64_t last = b->right == ALL ? s->n_k - 1 : i + b->diag + b->right;
        first = first < 0 ? 0 : first;
        last = last >= s->n_k ? s->n_k - 1 : last;
        n += first <= last ? (double)(last - first + 1) : 0;
    }
    return n;
}

static int by_size(const void *a, const void *b)
{
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

/* The median of 11 after 3. */
static float median_ms(const struct opened *o)
{
    float ms[11] = {0};
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    for (int i = -3; i < 11; i++) {
        CHECK_CUDA(cudaEventRecord(begin, NULL));
        CHECK_OK(run_section(o, NULL));
        CHECK_CUDA(cudaEventRecord(end, NULL));
        CHECK_CUDA(cudaEventSynchronize(end));
        if (i >= 0)
            CHECK_CUDA(cudaEventElapsedTime(&ms[i], begin, end));
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    qsort(ms, 11, sizeof ms[0], by_size);
    return ms[5];
}

static void bench_section(const struct test_section *s)
{
    const struct test_view make[] = {
        test_view_make(s->elem, BSHD, s->b, s->n_q, s->h, s->dqk),
        test_view_make(s->elem, BSHD, s->b, s->n_k, s->kv, s->dqk),
        test_view_make(s->elem, BSHD, s->b, s->n_k, s->kv, s->dv),
        test_view_make(s->elem, BSHD, s->b, s->n_q, s->h, s->dv),
        test_view_make(COFI_ELEM_F32, BSHD, s->b, 1, s->h, s->n_q)};
    struct opened o = {.section = *s, .tensors = {make[0], make[1], make[2], make[3], make[4]}};
    struct cofi_attention_shape shape = test_shape(s, &o.tensors);
    char why[400] = "";
    size_t bytes = 0;
    for (int i = 0; i < 3; i++)
        fill_fast(&make[i], (unsigned)i);
    double begin = seconds();
    bool can = engine->can(0, &shape, why, sizeof why);
    double plan_ms = 1e3 * (seconds() - begin);
    CHECK(can, "%s: %s", test_section_name(s, "cudnn"), why);
    if (can)
        CHECK_OK(engine->open(0, &shape, &o.kernel, &bytes));
    CHECK_CUDA(cudaMalloc(&o.workspace, bytes + 256));
    if (o.kernel) {
        float ms = median_ms(&o);
        double flops = 2.0 * (double)(s->dqk + s->dv) * pairs(s) * (double)(s->b * s->h);
        printf("%s: %.3f ms, %.0f TFLOP/s, plan %.0f ms, workspace %zu\n",
               test_section_name(s, "cudnn"), (double)ms, 1e-9 * flops / (double)ms, plan_ms,
               bytes);
        fflush(stdout);
    }
    close_section(&o);
}

static void bench(void)
{
    const struct {
        int64_t h, kv, dqk, dv, n_q, n_k;
        struct cofi_band band;
    } cases[] = {
        {20, 20, 128, 128, 4096, 4096, {0, ALL, ALL}},
        {20, 20, 128, 128, 8192, 8192, {0, ALL, ALL}},
        {20, 20, 128, 128, 8192, 8192, {0, ALL, 0}},
        {20, 20, 128, 128, 32768, 32768, {0, ALL, 0}},
        {20, 20, 128, 128, 4096, 16384, {0, ALL, ALL}},
        {20, 20, 128, 128, 16384, 4096, {0, ALL, ALL}},
        {20, 20, 128, 128, 4096, 8192, {4096, ALL, 0}},
        {32, 8, 128, 128, 8192, 8192, {0, ALL, 0}},
        {32, 8, 128, 128, 8192, 8192, {0, ALL, ALL}},
        {20, 20, 64, 64, 8192, 8192, {0, ALL, 0}},
        {20, 20, 96, 96, 8192, 8192, {0, ALL, 0}},
        {20, 20, 256, 256, 8192, 8192, {0, ALL, 0}},
        {20, 20, 192, 128, 8192, 8192, {0, ALL, 0}},
        {20, 20, 128, 128, 8192, 8192, {0, 1023, 0}},
        {20, 20, 128, 128, 32768, 32768, {0, 1023, 0}},
        {20, 20, 128, 128, 32768, 32768, {0, 4095, 0}},
        {20, 20, 128, 128, 32768, 32768, {0, 511, 511}},
        {20, 20, 128, 128, 1024, 1024, {1024, 1023, 0}},
        {20, 20, 128, 128, 8192, 12288, {4096, 4095, 0}},
        {20, 20, 128, 128, 1024, 1024, {0, ALL, 0}},
        {20, 20, 128, 128, 1024, 1024, {0, ALL, ALL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct test_section s = make_section(cases[i].n_q, cases[i].n_k, 128, cases[i].band);
        s.h = cases[i].h;
        s.kv = cases[i].kv;
        s.dqk = cases[i].dqk;
        s.dv = cases[i].dv;
        s.scale = 1 / sqrtf((float)s.dqk);
        bench_section(&s);
    }
}

int main(int argc, char **argv)
{
    const struct cofi_cudnn *lib;
    char version[24];
    if (!test_cuda_devices())
        return 77;
    if (cofi_cudnn_load(&lib) != COF_OK) {
        printf("%s\n", cof_last_error());
        return 77;
    }
    printf("cuDNN %s from %s\n", cofi_cudnn_version_text(lib->version, version), lib->path);
    CHECK_CUDA(cudaSetDevice(0));
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench();
        return test_done();
    }
    test_capture((struct cofi_band){0, ALL, 0});
    test_capture((struct cofi_band){0, ALL, ALL});
    test_capture((struct cofi_band){-100, 50, 0}); /* rows that see nothing on both sides */
    test_bands();
    test_ranks(4, thread_main, NULL);
    test_again();
    test_refusals();
    return test_done();
}
#endif
