/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* cuDNN for attention, without a device: our constants are its header's, the search for the library
 * tells where it looked, a band is cut down to what is seen, graphs are made of the operations that
 * cuDNN knows as attention and leave nothing behind where a call fails. Where cuDNN 9.8 or later is
 * installed, it plans them for a described H200. */
#include "test.h"

#if __has_include(<cudnn_graph.h>) && defined(COFI_CUDA)
#include <cudnn_graph.h>
#if defined(CUDNN_MAJOR) && CUDNN_MAJOR == 9
#define HAVE_HEADER 1
#endif
#endif

#ifdef COFI_CUDA
#include <assert.h>
#include <sys/stat.h>

#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_engine.h"

#ifdef HAVE_HEADER
#define SAME(ours, theirs, number) static_assert((int)COFI_##ours == (int)theirs, #theirs);
COFI_CUDNN_CONSTANTS(SAME)
#undef SAME
static_assert((int)COFI_CUDNN_NOT_SUPPORTED == (int)CUDNN_STATUS_NOT_SUPPORTED, "status");
/* Functions are called through pointers of our types: enums as ints, handles as void *. */
static_assert(sizeof(cudnnStatus_t) == sizeof(int) && sizeof(cudnnHandle_t) == sizeof(void *) &&
                  sizeof(cudnnBackendAttributeName_t) == sizeof(int) &&
                  sizeof(cudnnBackendAttributeType_t) == sizeof(int) &&
                  sizeof(cudnnBackendDescriptorType_t) == sizeof(int),
              "types of parameters");
#endif

static const int64_t NONE = INT64_MAX; /* of a side of a band */

/* ---- the search ----------------------------------------------------------------------------- */

static void test_search(void)
{
    static const char *const nowhere[] = {"/nonexistent/python3*/site-packages", NULL};
    char folder[] = "/tmp/cofuse-cudnn-XXXXXX", file[64];
    struct cofi_cudnn lib;
    struct cofi_cudnn_places places = {.named = "/nonexistent/libcudnn.so.9"};
    CHECK_FAILS(cofi_cudnn_find(&places, &lib), COF_ERR_UNSUPPORTED,
                "cuDNN not found: looked in COFUSE_CUDNN_PATH: /nonexistent/libcudnn.so.9");
    CHECK(mkdtemp(folder) != NULL, "no folder %s", folder);
    places.named = folder;
    CHECK_FAILS(cofi_cudnn_find(&places, &lib), COF_ERR_UNSUPPORTED, "/libcudnn.so.9: cannot open");
    snprintf(file, sizeof file, "%s/libcudnn.so.9", folder);
    FILE *text = fopen(file, "w");
    CHECK(text && fputs("no library", text) >= 0 && fclose(text) == 0, "cannot write %s", file);
    CHECK_FAILS(cofi_cudnn_find(&places, &lib), COF_ERR_UNSUPPORTED, file);
    unlink(file);
    rmdir(folder);
    places.named = "libm.so.6";
    CHECK_FAILS(cofi_cudnn_find(&places, &lib), COF_ERR_UNSUPPORTED, "has no cudnnGetVersion");
    /* A library that is loaded, but is another one; then nothing anywhere. */
    places = (struct cofi_cudnn_places){NULL, "libm.so.6", "libcofuse-none.so.9", nowhere};
    CHECK_FAILS(cofi_cudnn_find(&places, &lib), COF_ERR_UNSUPPORTED,
                "looked in the process, Python's packages and the system");
    CHECK(strstr(cof_last_error(), "no Python package nvidia-cudnn; libcofuse-none.so.9: cannot"),
          "got \"%s\"", cof_last_error());
}

/* A tree as an active environment has it: PATH leads to its packages. */
static void test_python(void)
{
    static const char *const below[] = {"/bin", "/lib", "/lib/python3.99",
                                        "/lib/python3.99/site-packages",
                                        "/lib/python3.99/site-packages/nvidia",
                                        "/lib/python3.99/site-packages/nvidia/cudnn",
                                        "/lib/python3.99/site-packages/nvidia/cudnn/lib"};
    enum { N = sizeof below / sizeof below[0] };
    char root[] = "/tmp/cofuse-python-XXXXXX", path[256], python[64], file[256];
    struct cofi_cudnn_folders folders;
    struct cofi_cudnn lib;
    CHECK(mkdtemp(root) != NULL, "no folder %s", root);
    for (int i = 0; i < N; i++) {
        snprintf(path, sizeof path, "%s%s", root, below[i]);
        CHECK(mkdir(path, 0700) == 0, "no folder %s", path);
    }
    snprintf(python, sizeof python, "%s/bin/python3", root);
    snprintf(file, sizeof file, "%s%s/libcudnn.so.9", root, below[N - 1]);
    CHECK(symlink("/bin/sh", python) == 0 && symlink("/dev/null", file) == 0, "no links");
    char *before = strdup(getenv("PATH") ? getenv("PATH") : "");
    snprintf(path, sizeof path, "/nonexistent::%s/bin", root);
    setenv("PATH", path, 1);
    cofi_cudnn_python_folders(&folders);
    setenv("PATH", before, 1);
    free(before);
    snprintf(path, sizeof path, "%s/bin/../lib/python3*/site-packages", root);
    bool is_there = false;
    for (int i = 0; i < folders.n; i++)
        is_there |= !strcmp(folders.at[i], path);
    CHECK(is_there && folders.at[folders.n] == NULL, "no %s", path);
    const char *const only[] = {path, NULL};
    const struct cofi_cudnn_places places = {.python = only};
    snprintf(file, sizeof file, "%s/bin/..%s/libcudnn.so.9: ", root, below[N - 1]);
    CHECK_FAILS(cofi_cudnn_find(&places, &lib), COF_ERR_UNSUPPORTED, file);
    snprintf(file, sizeof file, "%s%s/libcudnn.so.9", root, below[N - 1]);
    unlink(file);
    unlink(python);
    for (int i = N - 1; i >= 0; i--) {
        snprintf(path, sizeof path, "%s%s", root, below[i]);
        rmdir(path);
    }
    CHECK(rmdir(root) == 0, "%s stays", root);
}

static void test_versions(void)
{
    char text[24];
    struct cofi_cudnn lib = {.version = 90700, .path = "/x/libcudnn.so.9"};
    CHECK(!strcmp(cofi_cudnn_version_text(91301, text), "9.13.1"), "got %s", text);
    CHECK_OK(cofi_cudnn_check_version(&lib, COFI_CUDNN_OLDEST, "attention"));
    CHECK_FAILS(cofi_cudnn_check_version(&lib, COFI_CUDNN_DEVICELESS, "a described device"),
                COF_ERR_UNSUPPORTED, "/x/libcudnn.so.9 is version 9.7.0: a described device wants "
                "9.8.0 or later");
}

/* ---- bands ---------------------------------------------------------------------------------- */

static bool sees(const struct cofi_band *b, int64_t i, int64_t j)
{
    return (b->left == NONE || j >= i + b->diag - b->left) &&
           (b->right == NONE || j <= i + b->diag + b->right);
}

static void check_part(int64_t q_rows, int64_t k_rows, struct cofi_band band)
{
    struct cofi_attention_shape s = {.q_rows = q_rows, .k_rows = k_rows, .band = band};
    struct cofi_cudnn_part p;
    int64_t n_wrong = 0, n_left = 0, n_right = 0;
    cofi_cudnn_part(&s, &p);
    for (int64_t i = 0; i < q_rows; i++) {
        bool in_part = i >= p.q_begin && i < p.q_begin + p.q_rows, any = false;
        for (int64_t j = 0; j < k_rows; j++) {
            bool is_seen = sees(&band, i, j);
            bool is_key = j >= p.k_begin && j < p.k_begin + p.k_rows;
            int64_t row = i - p.q_begin, column = j - p.k_begin;
            bool left = in_part && is_key && p.has_left && !(column + p.left > row);
            bool right = in_part && is_key && p.has_right && !(row + p.right >= column);
            any |= is_seen;
            n_left += left;
            n_right += right;
            n_wrong += is_seen != (in_part && is_key && !left && !right);
        }
        n_wrong += any != in_part;
    }
    CHECK(n_wrong == 0 && (n_left > 0) == p.has_left && (n_right > 0) == p.has_right,
          "%lld x %lld, diag %lld, left %lld, right %lld: %lld wrong; rows %lld + %lld, keys %lld "
          "+ %lld, left %d %lld, right %d %lld", (long long)q_rows, (long long)k_rows,
          (long long)band.diag, (long long)band.left, (long long)band.right, (long long)n_wrong,
          (long long)p.q_begin, (long long)p.q_rows, (long long)p.k_begin, (long long)p.k_rows,
          p.has_left, (long long)p.left, p.has_right, (long long)p.right);
}

static void test_parts(void)
{
    for (int64_t q = 1; q <= 6; q++)
        for (int64_t k = 1; k <= 6; k++)
            for (int64_t diag = -8; diag <= 8; diag++)
                for (int64_t left = -1; left <= 9; left++)
                    for (int64_t right = -1; right <= 9; right++)
                        check_part(q, k, (struct cofi_band){diag, left == 9 ? NONE : left,
                                                            right == 9 ? NONE : right});
    check_part(5, 7, (struct cofi_band){INT64_C(1) << 40, NONE, 0});
    check_part(5, 7, (struct cofi_band){-(INT64_C(1) << 40), NONE, 0});
    check_part(5, 7, (struct cofi_band){INT64_C(1) << 40, 3, NONE});
    check_part(5, 7, (struct cofi_band){-(INT64_C(1) << 40), 3, NONE});
}

/* ---- a cuDNN that counts -------------------------------------------------------------------- */

enum { MAX_KINDS = 64 };
static struct {
    int n_alive, n_calls, fails_at; /* the call that fails; 0: none */
    int kinds[MAX_KINDS], n_kinds;  /* of operations, in the order they were made */
    int modes[MAX_KINDS], n_modes;  /* of pointwise operations */
    int n_plans;
    int64_t n_uids;
    float numbers[16]; /* that a run was given by value */
} fake;

static int fake_fails(void)
{
    return ++fake.n_calls == fake.fails_at ? 3001 : 0;
}

static const char *fake_error(int status)
{
    return status == 3001 ? "CUDNN_STATUS_FAKE" : "?";
}

static void fake_last(char *text, size_t bytes)
{
    snprintf(text, bytes, "the fake\nsays no");
}

static int fake_create(int type, void **descriptor)
{
    fake.n_plans += type == COFI_CUDNN_PLAN;
    if (fake_fails())
        return 3001;
    *descriptor = malloc(1);
    fake.n_alive++;
    if ((type == COFI_CUDNN_OP_POINTWISE || type == COFI_CUDNN_OP_MATMUL ||
         type == COFI_CUDNN_OP_REDUCTION || type == COFI_CUDNN_OP_SDPA) &&
        fake.n_kinds < MAX_KINDS)
        fake.kinds[fake.n_kinds++] = type;
    return 0;
}

static int fake_destroy(void *descriptor)
{
    free(descriptor);
    fake.n_alive--;
    return 0;
}

static int fake_finalize(void *descriptor)
{
    (void)descriptor;
    return fake_fails() ? 3001 : 0;
}

static int fake_set(void *descriptor, int name, int type, int64_t n, const void *elements)
{
    (void)descriptor;
    (void)type;
    if (fake_fails())
        return 3001;
    if (name == COFI_CUDNN_POINTWISE_MODE && type == COFI_CUDNN_OF_POINTWISE_MODE &&
        fake.n_modes < MAX_KINDS)
        fake.modes[fake.n_modes++] = *(const int *)elements;
    if (name == COFI_CUDNN_PACK_UIDS)
        fake.n_uids = n;
    if (name == COFI_CUDNN_PACK_POINTERS)
        for (int64_t i = 5; i < n && i < 16; i++)
            memcpy(&fake.numbers[i - 5], ((void *const *)elements)[i], sizeof(float));
    return 0;
}

/* Two engines, of which the first wants too much. */
static int fake_get(void *descriptor, int name, int type, int64_t n, int64_t *n_out, void *elements)
{
    (void)descriptor;
    (void)type;
    (void)n;
    if (fake_fails())
        return 3001;
    *n_out = name == COFI_CUDNN_HEUR_RESULTS ? 2 : 1;
    if (name == COFI_CUDNN_PLAN_WORKSPACE)
        *(int64_t *)elements = fake.n_plans == 1 ? 1001 : 100;
    return 0;
}

static int fake_execute(void *handle, void *plan, void *pack)
{
    (void)handle;
    (void)plan;
    (void)pack;
    return fake_fails() ? 3001 : 0;
}

static const struct cofi_cudnn fake_lib = {
    .version = 91900, .path = "fake", .GetErrorString = fake_error,
    .GetLastErrorString = fake_last, .BackendCreateDescriptor = fake_create,
    .BackendDestroyDescriptor = fake_destroy, .BackendFinalize = fake_finalize,
    .BackendSetAttribute = fake_set, .BackendGetAttribute = fake_get,
    .BackendExecute = fake_execute};

static struct cofi_attention_shape make_shape(int64_t rows, int64_t keys, struct cofi_band band)
{
    const int64_t heads = 4, kv = 2, dim = 64;
    return (struct cofi_attention_shape){
        .elem = COFI_ELEM_BF16, .n_batch = 2, .n_heads = heads, .n_kv_heads = kv, .dim_qk = dim,
        .dim_v = dim, .q_rows = rows, .k_rows = keys, .band = band, .scale = 0.125f,
        .q = {rows * heads * dim, heads * dim, dim}, .k = {keys * kv * dim, kv * dim, dim},
        .v = {keys * kv * dim, kv * dim, dim}, .o = {rows * heads * dim, heads * dim, dim},
        .lse_batch = heads * rows, .lse_head = rows};
}

static cof_status plan_shape(const struct cofi_cudnn *lib, const struct cofi_attention_shape *s,
                             const struct cofi_cudnn_target *target, struct cofi_cudnn_plan *plan)
{
    struct cofi_cudnn_graph graph;
    struct cofi_cudnn_part part;
    cofi_cudnn_part(s, &part);
    cof_status status = cofi_cudnn_forward_check(lib, s, &part);
    if (status != COF_OK)
        return status;
    cofi_cudnn_graph_begin(&graph, lib);
    cofi_cudnn_forward_graph(&graph, s, &part, cofi_cudnn_forward_is_unified(lib, &part));
    status = cofi_cudnn_graph_plan(&graph, target, 1000, plan);
    cofi_cudnn_graph_end(&graph);
    return status;
}

/* Plans and runs it, with the n-th call of cuDNN failing. */
static cof_status plan_and_run(const struct cofi_cudnn *lib, const struct cofi_attention_shape *s,
                               int fails_at)
{
    static const int64_t uids[5] = {1, 2, 3, 4, 5};
    void *const pointers[5] = {NULL};
    const struct cofi_cudnn_target target = {(void *)&fake, NULL};
    struct cofi_cudnn_plan plan;
    memset(&fake, 0, sizeof fake);
    fake.fails_at = fails_at;
    cof_status status = plan_shape(lib, s, &target, &plan);
    if (status != COF_OK)
        return status;
    CHECK(plan.workspace_bytes == 100, "chose %lld bytes", (long long)plan.workspace_bytes);
    status = cofi_cudnn_plan_run(lib, &plan, (void *)&fake, 5, uids, pointers, NULL);
    cofi_cudnn_plan_close(lib, &plan);
    return status;
}

/* One operation where all is seen; else the known order of the composite. */
static void test_graphs(void)
{
    static const int masks[] = {COFI_CUDNN_MUL, COFI_CUDNN_INDEX, COFI_CUDNN_INDEX, COFI_CUDNN_ADD,
                                COFI_CUDNN_GREATER_EQUAL, COFI_CUDNN_SELECT, COFI_CUDNN_INDEX,
                                COFI_CUDNN_INDEX, COFI_CUDNN_ADD, COFI_CUDNN_GREATER,
                                COFI_CUDNN_SELECT, COFI_CUDNN_SUB, COFI_CUDNN_EXP, COFI_CUDNN_LOG,
                                COFI_CUDNN_ADD, COFI_CUDNN_DIV};
    struct cofi_cudnn old = fake_lib;
    struct cofi_attention_shape s = make_shape(50, 60, (struct cofi_band){0, NONE, NONE});
    CHECK_OK(plan_and_run(&fake_lib, &s, 0));
    CHECK(fake.n_kinds == 1 && fake.kinds[0] == COFI_CUDNN_OP_SDPA && fake.numbers[0] == 0.125f,
          "%d operations, the first %d, scale %g", fake.n_kinds, fake.kinds[0],
          (double)fake.numbers[0]);
    old.version = 91300;
    CHECK_OK(plan_and_run(&old, &s, 0));
    CHECK(fake.n_kinds == 10 && fake.kinds[0] == COFI_CUDNN_OP_MATMUL, "%d operations",
          fake.n_kinds);
    s.band = (struct cofi_band){5, 20, 3}; /* row + 8 >= col, col + 16 > row */
    CHECK_OK(plan_and_run(&fake_lib, &s, 0));
    CHECK(fake.n_modes == 16 && !memcmp(fake.modes, masks, sizeof masks), "%d pointwise operations",
          fake.n_modes);
    CHECK(fake.kinds[0] == COFI_CUDNN_OP_MATMUL && fake.n_kinds == 20 &&
              fake.kinds[19] == COFI_CUDNN_OP_MATMUL && fake.kinds[12] == COFI_CUDNN_OP_REDUCTION &&
              fake.kinds[15] == COFI_CUDNN_OP_REDUCTION, "%d operations", fake.n_kinds);
    int32_t right;
    memcpy(&right, &fake.numbers[2], sizeof right);
    CHECK(fake.n_uids == 10 && fake.numbers[0] == 0.125f && fake.numbers[1] < -1e38f &&
              right == 8 && fake.numbers[3] < -1e38f && fake.numbers[4] == 16.0f,
          "%lld tensors, right %d, left %g", (long long)fake.n_uids, (int)right,
          (double)fake.numbers[4]);
    CHECK(fake.n_alive == 0, "%d descriptors left", fake.n_alive);
}

/* Whichever call fails, the error is cuDNN's, and nothing stays. */
static void test_failures(void)
{
    struct cofi_attention_shape s = make_shape(50, 60, (struct cofi_band){5, 20, 3});
    int n = 1, n_ok = 0;
    for (; n == 1 || fake.n_calls >= n - 1; n++) {
        cof_status status = plan_and_run(&fake_lib, &s, n);
        n_ok += status == COF_OK; /* where the first engine's plan fails, which is not taken */
        CHECK(status == COF_OK || (status == COF_ERR_UNSUPPORTED &&
                                   strstr(cof_last_error(), "CUDNN_STATUS_FAKE (3001): the fake "
                                                            "says no")),
              "call %d: %s \"%s\"", n, cof_status_name(status), cof_last_error());
        CHECK(fake.n_alive == 0, "call %d: %d descriptors left", n, fake.n_alive);
    }
    CHECK(n > 300 && n_ok > 1 && n_ok < 10, "%d calls, %d of them may fail", n, n_ok);
}

static void test_refusals(void)
{
    struct cofi_cudnn lib = fake_lib;
    struct cofi_attention_shape good = make_shape(50, 60, (struct cofi_band){0, NONE, 0}), s = good;
    struct cofi_cudnn_part part;
    cofi_cudnn_part(&good, &part);
    CHECK_OK(cofi_cudnn_forward_check(&lib, &good, &part));
#define REFUSED(change, text)                                                                      \
    do {                                                                                           \
        s = good;                                                                                  \
        change;                                                                                    \
        cofi_cudnn_part(&s, &part);                                                                \
        CHECK_FAILS(cofi_cudnn_forward_check(&lib, &s, &part), COF_ERR_UNSUPPORTED, text);         \
    } while (0)
    REFUSED(s.elem = COFI_ELEM_F32, "the dtype is float32");
    REFUSED(s.o_f32 = true, "o is float32");
    REFUSED(s.dim_qk = 60, "head dims 60 and 64: wanted multiples of 8");
    REFUSED(s.dim_v = 264, "head dims 64 and 264: wanted at most 256");
    REFUSED(s.n_kv_heads = 3, "4 heads over 3");
    REFUSED(s.k.row += 4, "strides");
    REFUSED(s.q_rows = s.k_rows = 1 << 25; s.band.diag = 1 << 24,
            "a band 16777216 rows off the diagonal");
    REFUSED(s.scale = -1, "scale -1: wanted above 0");
    lib.version = 91001;
    REFUSED(s.scale = 1, "cuDNN 9.10.1: attention is wrong in it");
    lib.version = 91400;
    REFUSED(s.k_rows = 4000; s.q_rows = 4000; s.band = ((struct cofi_band){0, 100, NONE}),
            "cuDNN 9.14.0: windows without a right side");
    REFUSED(s.q_rows = 100; s.band.left = 10, "a window of 70 rows on 60 keys");
    lib.version = 90902;
    REFUSED(s.band = ((struct cofi_band){0, 10, NONE}), "a window without a right side wants 9.10");
    lib.version = 90500;
    REFUSED(s.band.diag = 3, "a band off the diagonal wants 9.6.0 or later");
    lib.version = 8907;
    REFUSED(s.scale = 1, "fake is version 8.9.7: attention wants 9.0.0 or later");
}

/* ---- a described device --------------------------------------------------------------------- */

/* What cuDNN 9.19 reads of a device: an H200. */
static const char h200[] =
    "{\"deviceName\":\"NVIDIA H200\",\"cudaDeviceId\":0,\"deviceVer\":900,\"driverVer\":13000,"
    "\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
    "\"regsPerBlock\":65536,\"multiProcessorCount\":132,\"warpSize\":32,"
    "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":232448,"
    "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,"
    "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,\"isTccDriver\":0,"
    "\"supportCoopLaunch\":1,\"totalGlobalMem\":150000000000,\"smClockRateKHz\":1980000,"
    "\"memClockRateKHz\":3201000,\"l2CacheSize\":62914560}";

static bool describe(const struct cofi_cudnn *lib, void **device)
{
    if (lib->BackendCreateDescriptor(COFI_CUDNN_DEVICE, device))
        return false;
    if (!lib->BackendSetAttribute(*device, COFI_CUDNN_DEVICE_JSON, COFI_CUDNN_OF_CHAR,
                                  sizeof h200 - 1, h200) &&
        !lib->BackendFinalize(*device))
        return true;
    lib->BackendDestroyDescriptor(*device);
    return false;
}

/* Not a failure where cuDNN is not, or lacks what it makes kernels with: the driver's library. */
static void test_described_device(void)
{
    static const struct cofi_band bands[] = {{0, INT64_MAX, INT64_MAX}, {0, INT64_MAX, 0},
                                             {100, 50, 20}};
    const struct cofi_cudnn *lib;
    struct cofi_cudnn_target target = {NULL, NULL};
    if (cofi_cudnn_load(&lib) != COF_OK ||
        cofi_cudnn_check_version(lib, COFI_CUDNN_DEVICELESS, "a described device") != COF_OK ||
        !describe(lib, &target.device)) {
        printf("no plans for a described device: %s\n", cof_last_error());
        return;
    }
    for (int i = 0; i < 3; i++) {
        struct cofi_attention_shape s = make_shape(200, 300, bands[i]);
        struct cofi_cudnn_plan plan;
        cof_status status = plan_shape(lib, &s, &target, &plan);
        if (status != COF_OK && strstr(cof_last_error(), "PREREQUISITE_MISSING")) {
            printf("no plans for a described device: %s\n", cof_last_error());
            break;
        }
        CHECK(status == COF_OK, "band %d: %s", i, cof_last_error());
        if (status == COF_OK)
            cofi_cudnn_plan_close(lib, &plan);
    }
    lib->BackendDestroyDescriptor(target.device);
}

int main(void)
{
    test_search();
    test_python();
    test_versions();
    test_parts();
    test_graphs();
    test_failures();
    test_refusals();
    test_described_device();
#ifndef HAVE_HEADER
    printf("cudnn_graph.h is not installed: constants are not compared\n");
#endif
    return test_done();
}
#else
int main(void)
{
    printf("a build without CUDA\n");
    return 77;
}
#endif
