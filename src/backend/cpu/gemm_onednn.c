/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* oneDNN, loaded at run time: versions 2 and 3 behind one table of function pointers.
 *
 * One primitive per type, form and accumulate, all of run-time dimensions (M, N, K and the leading
 * dimensions are given with the memories), which costs nothing measurable and leaves nothing to
 * create while a plan runs. They are made and run on one thread with one OpenMP thread: the team
 * size is fixed when a primitive is made. Where the two versions differ:
 *
 *   memory descriptor   2: a struct of the caller's           3: an opaque handle
 *   matmul              2: an operation descriptor between    3: the primitive descriptor at once
 *   sum post-op         2: (ops, scale)                       3: (ops, scale, zero point, type)
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/gemm_provider.h"
#include "backend/cpu/vec.h"
#include "core/error.h"

#ifndef COFI_NO_DLOPEN_GEMM
#define COFI_NO_DLOPEN_GEMM 0 /* 1 under ThreadSanitizer, which cannot see into OpenMP */
#endif

/* Facts of dnnl_types.h, alike in 2.x and 3.x. */
enum {
    DNNL_OUT_OF_MEMORY = 1,   /* dnnl_status_t */
    DNNL_CPU = 1,             /* dnnl_engine_kind_t */
    DNNL_IN_ORDER = 1,        /* dnnl_stream_flags_t */
    DNNL_BF16 = 2,            /* dnnl_data_type_t */
    DNNL_F32 = 3,
    DNNL_ARG_SRC = 1,
    DNNL_ARG_DST = 17,
    DNNL_ARG_WEIGHTS = 33,
    DNNL_RUNTIME_SEQ = 1,     /* dnnl_version_t.cpu_runtime */
    DNNL_RUNTIME_OMP = 2,
    DNNL_ISA_AVX2 = 0x7,      /* dnnl_cpu_isa_t; each ISA has a bit that those below lack */
    DNNL_ISA_AVX512 = 0x27,
    DNNL_ISA_BIT_AVX512 = 0x20,
    DNNL_ISA_BIT_BF16 = 0x80,
    DNNL_MAX_NDIMS = 12,
};
#define DNNL_RUNTIME_DIM INT64_MIN

typedef int64_t dnnl_dims[DNNL_MAX_NDIMS];

struct dnnl_version {
    int major, minor, patch;
    const char *hash;
    unsigned cpu_runtime, gpu_runtime;
};

struct dnnl_arg {
    int arg;
    void *memory;
};

/* Room for version 2's structs: 696 and 2800 bytes in 2.6.3, and frozen by its soname. */
typedef union dnnl_desc_room {
    char bytes[1024];
    void *align;
} dnnl_desc_room;
typedef union dnnl_matmul_room {
    char bytes[8192];
    void *align;
} dnnl_matmul_room;

/* X(versions, name, parameters): every function used; all but version and isa return a status. */
#define DNNL_FUNCTIONS(X)                                                                          \
    X(23, engine_create, (void **engine, int kind, size_t index))                                  \
    X(23, engine_destroy, (void *engine))                                                          \
    X(23, stream_create, (void **stream, void *engine, unsigned flags))                            \
    X(23, stream_destroy, (void *stream))                                                          \
    X(23, stream_wait, (void *stream))                                                             \
    X(23, set_max_cpu_isa, (int isa))                                                              \
    X(23, get_effective_cpu_isa, (void))                                                           \
    X(23, memory_create, (void **memory, const void *desc, void *engine, void *data))              \
    X(23, memory_set_data_handle, (void *memory, void *data))                                      \
    X(23, memory_destroy, (void *memory))                                                          \
    X(23, post_ops_create, (void **ops))                                                           \
    X(23, post_ops_destroy, (void *ops))                                                           \
    X(23, primitive_attr_create, (void **attr))                                                    \
    X(23, primitive_attr_set_post_ops, (void *attr, const void *ops))                              \
    X(23, primitive_attr_destroy, (void *attr))                                                    \
    X(23, primitive_create, (void **primitive, const void *desc))                                  \
    X(23, primitive_execute,                                                                       \
      (const void *primitive, void *stream, int n_args, const struct dnnl_arg *args))              \
    X(23, primitive_destroy, (void *primitive))                                                    \
    X(23, primitive_desc_destroy, (void *desc))                                                    \
    X(2, memory_desc_init_by_strides,                                                              \
      (void *desc, int ndims, const int64_t *dims, int type, const int64_t *strides))              \
    X(2, matmul_desc_init,                                                                         \
      (void *op, const void *src, const void *weights, const void *bias, const void *dst))         \
    X(2, primitive_desc_create,                                                                    \
      (void **desc, const void *op, const void *attr, void *engine, const void *hint))             \
    X(3, memory_desc_create_with_strides,                                                          \
      (void **desc, int ndims, const int64_t *dims, int type, const int64_t *strides))             \
    X(3, memory_desc_destroy, (void *desc))                                                        \
    X(3, matmul_primitive_desc_create,                                                             \
      (void **desc, void *engine, const void *src, const void *weights, const void *bias,          \
       const void *dst, const void *attr))

static struct {
    int major; /* 0: not loaded */
    char name[32];
    const struct dnnl_version *(*version)(void);
#define DNNL_MEMBER(versions, name, parameters) int(*name) parameters;
    DNNL_FUNCTIONS(DNNL_MEMBER)
#undef DNNL_MEMBER
    union {
        int (*v2)(void *ops, float scale);
        int (*v3)(void *ops, float scale, int32_t zero_point, int type);
    } post_ops_append_sum;
    void (*omp_set_num_threads)(int n); /* NULL in a sequential build */
    int (*omp_get_max_threads)(void);
    bool is_capped;
} dnnl;

/* dlsym gives void *, which ISO C does not convert to a function pointer. */
static bool find(void *library, const char *name, void *function_out)
{
    void *symbol = dlsym(library, name);
    memcpy(function_out, &symbol, sizeof symbol);
    return symbol != NULL;
}

static const char *missing_function(void *library, int major)
{
#define DNNL_FIND(versions, name, parameters)                                                      \
    if ((versions == 23 || versions == major) && !find(library, "dnnl_" #name, &dnnl.name))        \
        return "dnnl_" #name;
    DNNL_FUNCTIONS(DNNL_FIND)
#undef DNNL_FIND
    if (!find(library, "dnnl_post_ops_append_sum", &dnnl.post_ops_append_sum))
        return "dnnl_post_ops_append_sum";
    return NULL;
}

static bool load(const char *file, int major, char *why, size_t why_bytes)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, why_bytes, "%s cannot be loaded (%s)", file, dlerror());
        return false;
    }
    const char *missing = find(library, "dnnl_version", &dnnl.version)
                              ? missing_function(library, major)
                              : "dnnl_version";
    const struct dnnl_version *version = missing ? NULL : dnnl.version();
    if (missing) {
        snprintf(why, why_bytes, "%s has no function %s", file, missing);
    } else if (version->major != major) {
        snprintf(why, why_bytes, "%s says it is version %d", file, version->major);
    } else if (version->cpu_runtime != DNNL_RUNTIME_SEQ &&
               (version->cpu_runtime != DNNL_RUNTIME_OMP ||
                !find(library, "omp_set_num_threads", &dnnl.omp_set_num_threads) ||
                !find(library, "omp_get_max_threads", &dnnl.omp_get_max_threads))) {
        snprintf(why, why_bytes, "%s (CPU runtime %u) cannot be held to one thread", file,
                 version->cpu_runtime);
    } else {
        snprintf(dnnl.name, sizeof dnnl.name, "onednn-%d.%d.%d", version->major, version->minor,
                 version->patch);
        dnnl.major = major;
        return true; /* the library stays: its threads may outlive us */
    }
    dlclose(library);
    return false;
}

bool cofi_onednn_load(char *why, size_t why_bytes)
{
    char why_2[200], why_3[200];
    if (COFI_NO_DLOPEN_GEMM) {
        snprintf(why, why_bytes, "it cannot be loaded in this build (COFUSE_NO_DLOPEN_GEMM)");
        return false;
    }
    if (load("libdnnl.so.2", 2, why_2, sizeof why_2) ||
        load("libdnnl.so.3", 3, why_3, sizeof why_3))
        return true;
    snprintf(why, why_bytes, "%s; %s; on Debian: apt-get install libdnnl2", why_2, why_3);
    return false;
}

const char *cofi_onednn_name(void)
{
    return dnnl.major ? dnnl.name : NULL;
}

struct memory {
    void *handle;
    int64_t rows, cols, ld;
};

struct product {
    void *primitive;
    struct memory src, weights, dst; /* of the last call: a call of the same sizes reuses them */
};

struct cofi_onednn {
    void *engine, *stream;
    bool has_bf16;
    int omp_threads; /* of this thread, before we set 1 */
    struct product products[COFI_GEMM_N_TYPES][COFI_GEMM_N_FORMS][2]; /* [2]: accumulate */
};

/* A call of oneDNN's that failed: for lack of memory, or `otherwise`. */
static cof_status refused(int dnnl_status, cof_status otherwise, const char *function)
{
    return COF_FAIL(dnnl_status == DNNL_OUT_OF_MEMORY ? COF_ERR_NOMEM : otherwise,
                    "%s: %s returned status %d", dnnl.name, function, dnnl_status);
}

#define DNNL_TRY_OR(otherwise, function, ...)                                                      \
    do {                                                                                           \
        int dnnl_status = dnnl.function(__VA_ARGS__);                                              \
        if (dnnl_status)                                                                           \
            return refused(dnnl_status, otherwise, "dnnl_" #function);                             \
    } while (0)

/* Where primitives are made, of which a library may lack some. */
#define DNNL_TRY(function, ...) DNNL_TRY_OR(COF_ERR_UNSUPPORTED, function, __VA_ARGS__)

/* Where they run, after they have been proven. */
#define DNNL_RUN(function, ...) DNNL_TRY_OR(COF_ERR_INTERNAL, function, __VA_ARGS__)

/* A descriptor of either version: `handle` is what functions take. */
struct desc {
    dnnl_desc_room room;
    void *handle;
};

static cof_status desc_init(struct desc *desc, int64_t rows, int64_t cols, int type,
                            int64_t row_stride, int64_t col_stride)
{
    dnnl_dims dims = {rows, cols}, strides = {row_stride, col_stride};
    desc->handle = &desc->room;
    if (dnnl.major == 2)
        DNNL_TRY(memory_desc_init_by_strides, desc->handle, 2, dims, type, strides);
    else
        DNNL_TRY(memory_desc_create_with_strides, &desc->handle, 2, dims, type, strides);
    return COF_OK;
}

static void desc_close(struct desc *desc)
{
    if (dnnl.major != 2 && desc->handle != &desc->room)
        dnnl.memory_desc_destroy(desc->handle);
}

/* Whether the matrix op() of a form is stored transposed: A in TN, B in NT. */
static bool a_transposed(enum cofi_gemm_form form)
{
    return form == COFI_GEMM_TN;
}

static bool b_transposed(enum cofi_gemm_form form)
{
    return form == COFI_GEMM_NT;
}

static int type_code(enum cofi_gemm_type type)
{
    return type == COFI_GEMM_BF16 ? DNNL_BF16 : DNNL_F32;
}

static cof_status matrix_desc(struct desc *desc, int64_t rows, int64_t cols, int type, int64_t ld,
                              bool transposed)
{
    return transposed ? desc_init(desc, rows, cols, type, 1, ld)
                      : desc_init(desc, rows, cols, type, ld, 1);
}

static cof_status product_desc(struct cofi_onednn *onednn, const struct desc descs[3],
                               const void *attr, void **desc_out)
{
    const void *src = descs[0].handle, *weights = descs[1].handle, *dst = descs[2].handle;
    dnnl_matmul_room operation;
    if (dnnl.major == 2) {
        DNNL_TRY(matmul_desc_init, &operation, src, weights, NULL, dst);
        DNNL_TRY(primitive_desc_create, desc_out, &operation, attr, onednn->engine, NULL);
    } else {
        DNNL_TRY(matmul_primitive_desc_create, desc_out, onednn->engine, src, weights, NULL, dst,
                 attr);
    }
    return COF_OK;
}

static cof_status attr_add_sum(void *attr)
{
    void *ops;
    DNNL_TRY(post_ops_create, &ops);
    int status = dnnl.major == 2 ? dnnl.post_ops_append_sum.v2(ops, 1)
                                 : dnnl.post_ops_append_sum.v3(ops, 1, 0, DNNL_F32);
    if (!status)
        status = dnnl.primitive_attr_set_post_ops(attr, ops);
    dnnl.post_ops_destroy(ops);
    return status ? refused(status, COF_ERR_UNSUPPORTED, "the sum post-op") : COF_OK;
}

static cof_status product_create(struct cofi_onednn *onednn, enum cofi_gemm_form form, int type,
                                 bool accumulate, struct product *product)
{
    const int64_t any = DNNL_RUNTIME_DIM;
    struct desc descs[3] = {{.handle = NULL}};
    void *attr, *desc;
    DNNL_TRY(primitive_attr_create, &attr);
    cof_status status = accumulate ? attr_add_sum(attr) : COF_OK;
    if (status == COF_OK)
        status = matrix_desc(&descs[0], any, any, type, any, a_transposed(form));
    if (status == COF_OK)
        status = matrix_desc(&descs[1], any, any, type, any, b_transposed(form));
    if (status == COF_OK)
        status = matrix_desc(&descs[2], any, any, DNNL_F32, any, false);
    if (status == COF_OK)
        status = product_desc(onednn, descs, attr, &desc);
    if (status == COF_OK) {
        int made = dnnl.primitive_create(&product->primitive, desc);
        if (made)
            status = refused(made, COF_ERR_UNSUPPORTED, "dnnl_primitive_create");
        dnnl.primitive_desc_destroy(desc);
    }
    for (int i = 0; i < 3; i++)
        if (descs[i].handle)
            desc_close(&descs[i]);
    dnnl.primitive_attr_destroy(attr);
    return status;
}

/* Before the first primitive of the process. oneDNN refuses once anybody in the process has used
 * it, hence the look at what is in force. */
static cof_status cap_isa(void)
{
    enum cofi_isa isa = cofi_isa();
    if (dnnl.is_capped || isa >= COFI_ISA_AVX512_BF16)
        return COF_OK;
    dnnl.set_max_cpu_isa(isa >= COFI_ISA_AVX512 ? DNNL_ISA_AVX512 : DNNL_ISA_AVX2);
    int above = DNNL_ISA_BIT_BF16 | (isa >= COFI_ISA_AVX512 ? 0 : DNNL_ISA_BIT_AVX512);
    int effective = dnnl.get_effective_cpu_isa();
    COF_FAIL_IF(effective & above, COF_ERR_UNSUPPORTED,
                "%s runs instruction set 0x%x, too late to cap it to %s: set COFUSE_GEMM=plain",
                dnnl.name, (unsigned)effective, cofi_isa_name(isa));
    dnnl.is_capped = true;
    return COF_OK;
}

static cof_status create_products(struct cofi_onednn *onednn, enum cofi_gemm_type type)
{
    for (int form = 0; form < COFI_GEMM_N_FORMS; form++)
        for (int accumulate = 0; accumulate < 2; accumulate++)
            COF_TRY(product_create(onednn, (enum cofi_gemm_form)form, type_code(type), accumulate,
                                   &onednn->products[type][form][accumulate]));
    return COF_OK;
}

static cof_status create_all(struct cofi_onednn *onednn, bool want_bf16)
{
    COF_TRY(cap_isa());
    DNNL_TRY(engine_create, &onednn->engine, DNNL_CPU, 0);
    DNNL_TRY(stream_create, &onednn->stream, onednn->engine, DNNL_IN_ORDER);
    COF_TRY(create_products(onednn, COFI_GEMM_F32));
    onednn->has_bf16 = want_bf16 && create_products(onednn, COFI_GEMM_BF16) == COF_OK;
    return COF_OK;
}

cof_status cofi_onednn_open(bool want_bf16, struct cofi_onednn **onednn_out)
{
    struct cofi_onednn *onednn = calloc(1, sizeof *onednn);
    COF_FAIL_IF(!onednn, COF_ERR_NOMEM, "no memory for a GEMM provider");
    if (dnnl.omp_set_num_threads) {
        onednn->omp_threads = dnnl.omp_get_max_threads();
        dnnl.omp_set_num_threads(1);
    }
    cof_status status = create_all(onednn, want_bf16);
    if (status == COF_OK)
        *onednn_out = onednn;
    else
        cofi_onednn_close(onednn);
    return status;
}

static void product_close(struct product *product)
{
    struct memory *memories[] = {&product->src, &product->weights, &product->dst};
    for (int i = 0; i < 3; i++)
        if (memories[i]->handle)
            dnnl.memory_destroy(memories[i]->handle);
    if (product->primitive)
        dnnl.primitive_destroy(product->primitive);
}

void cofi_onednn_close(struct cofi_onednn *onednn)
{
    for (int type = 0; type < COFI_GEMM_N_TYPES; type++)
        for (int form = 0; form < COFI_GEMM_N_FORMS; form++)
            for (int accumulate = 0; accumulate < 2; accumulate++)
                product_close(&onednn->products[type][form][accumulate]);
    if (onednn->stream)
        dnnl.stream_destroy(onednn->stream);
    if (onednn->engine)
        dnnl.engine_destroy(onednn->engine);
    if (dnnl.omp_set_num_threads)
        dnnl.omp_set_num_threads(onednn->omp_threads);
    free(onednn);
}

bool cofi_onednn_has(const struct cofi_onednn *onednn, enum cofi_gemm_type type)
{
    return type == COFI_GEMM_F32 || onednn->has_bf16;
}

/* Points `memory` at the matrix, making it anew when its sizes differ from the last call's. */
static cof_status memory_set(struct cofi_onednn *onednn, struct memory *memory, int64_t rows,
                             int64_t cols, int type, int64_t ld, bool transposed, void *data)
{
    if (memory->handle && memory->rows == rows && memory->cols == cols && memory->ld == ld) {
        DNNL_RUN(memory_set_data_handle, memory->handle, data);
        return COF_OK;
    }
    if (memory->handle)
        dnnl.memory_destroy(memory->handle);
    *memory = (struct memory){NULL, rows, cols, ld};
    struct desc desc;
    COF_TRY(matrix_desc(&desc, rows, cols, type, ld, transposed));
    int made = dnnl.memory_create(&memory->handle, desc.handle, onednn->engine, data);
    desc_close(&desc);
    if (made)
        memory->handle = NULL;
    return made ? refused(made, COF_ERR_INTERNAL, "dnnl_memory_create") : COF_OK;
}

cof_status cofi_onednn_run(struct cofi_onednn *onednn, const struct cofi_gemm_call *call)
{
    struct product *product = &onednn->products[call->type][call->form][call->accumulate];
    int type = type_code(call->type);
    COF_TRY(memory_set(onednn, &product->src, call->m, call->k, type, call->lda,
                       a_transposed(call->form), (void *)(uintptr_t)call->a));
    COF_TRY(memory_set(onednn, &product->weights, call->k, call->n, type, call->ldb,
                       b_transposed(call->form), (void *)(uintptr_t)call->b));
    COF_TRY(memory_set(onednn, &product->dst, call->m, call->n, DNNL_F32, call->ldc, false,
                       call->c));
    const struct dnnl_arg args[] = {{DNNL_ARG_SRC, product->src.handle},
                                    {DNNL_ARG_WEIGHTS, product->weights.handle},
                                    {DNNL_ARG_DST, product->dst.handle}};
    DNNL_RUN(primitive_execute, product->primitive, onednn->stream, 3, args);
    DNNL_RUN(stream_wait, onednn->stream);
    return COF_OK;
}
