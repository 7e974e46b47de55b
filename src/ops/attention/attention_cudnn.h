/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* cuDNN 9, loaded at run time, as far as attention needs it: the library, a builder of operation
 * graphs, and the graph of a section.
 *
 *   attention_cudnn_load_cuda.c     finds and loads the library
 *   attention_cudnn_graph_cuda.c    operations, heuristics, execution plans
 *   attention_cudnn_forward_cuda.c  a section's forward graph
 *   attention_cudnn_cuda.c          the engine: plans of shapes, handles, runs
 *
 * cuDNN calls the finished graph an execution plan; it has nothing to do with a cof_plan. */
#ifndef COFI_ATTENTION_CUDNN_H
#define COFI_ATTENTION_CUDNN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/error.h"

struct cofi_attention_shape;

/* ---- the library (attention_cudnn_load_cuda.c) ---------------------------------------------- */

enum {
    COFI_CUDNN_OLDEST = 90000,  /* cudnnGetVersion: major * 10000 + minor * 100 + patch */
    COFI_CUDNN_UNIFIED = 91301, /* one operation for attention, with the sums that a merge needs */
    COFI_CUDNN_DEVICELESS = 90800, /* plans for a described device */
    COFI_CUDNN_NOT_SUPPORTED = 3000, /* cudnnStatus_t */
};

/* Facts of cudnn_graph.h, version 9: compared with the header by tests/unit_attention_cudnn.c.
 * X(our name, cuDNN's name, number) */
#define COFI_CUDNN_CONSTANTS(X)                                                                    \
    X(CUDNN_FLOAT, CUDNN_DATA_FLOAT, 0)                                                            \
    X(CUDNN_HALF, CUDNN_DATA_HALF, 2)                                                              \
    X(CUDNN_INT32, CUDNN_DATA_INT32, 4)                                                            \
    X(CUDNN_BFLOAT16, CUDNN_DATA_BFLOAT16, 9)                                                      \
    X(CUDNN_BOOL, CUDNN_DATA_BOOLEAN, 11)                                                          \
    X(CUDNN_OF_HANDLE, CUDNN_TYPE_HANDLE, 0)                                                       \
    X(CUDNN_OF_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1)                                                 \
    X(CUDNN_OF_BOOL, CUDNN_TYPE_BOOLEAN, 2)                                                        \
    X(CUDNN_OF_INT64, CUDNN_TYPE_INT64, 3)                                                         \
    X(CUDNN_OF_POINTER, CUDNN_TYPE_VOID_PTR, 6)                                                    \
    X(CUDNN_OF_HEUR_MODE, CUDNN_TYPE_HEUR_MODE, 8)                                                 \
    X(CUDNN_OF_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 14)                                      \
    X(CUDNN_OF_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR, 15)                                      \
    X(CUDNN_OF_REDUCTION, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 18)                                  \
    X(CUDNN_OF_CHAR, CUDNN_TYPE_CHAR, 24)                                                          \
    X(CUDNN_REDUCE_ADD, CUDNN_REDUCE_TENSOR_ADD, 0)                                                \
    X(CUDNN_REDUCE_MAX, CUDNN_REDUCE_TENSOR_MAX, 3)                                                \
    X(CUDNN_ADD, CUDNN_POINTWISE_ADD, 0)                                                           \
    X(CUDNN_MUL, CUDNN_POINTWISE_MUL, 1)                                                           \
    X(CUDNN_DIV, CUDNN_POINTWISE_DIV, 6)                                                           \
    X(CUDNN_SUB, CUDNN_POINTWISE_SUB, 9)                                                           \
    X(CUDNN_EXP, CUDNN_POINTWISE_EXP, 13)                                                          \
    X(CUDNN_LOG, CUDNN_POINTWISE_LOG, 15)                                                          \
    X(CUDNN_GREATER, CUDNN_POINTWISE_CMP_GT, 302)                                                  \
    X(CUDNN_GREATER_EQUAL, CUDNN_POINTWISE_CMP_GE, 303)                                            \
    X(CUDNN_INDEX, CUDNN_POINTWISE_GEN_INDEX, 501)                                                 \
    X(CUDNN_SELECT, CUDNN_POINTWISE_BINARY_SELECT, 601)                                            \
    X(CUDNN_POINTWISE, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, 0)                                      \
    X(CUDNN_ENGINE_CONFIG, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, 3)                                  \
    X(CUDNN_HEURISTICS, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, 4)                                    \
    X(CUDNN_PLAN, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, 5)                                      \
    X(CUDNN_OP_POINTWISE, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, 13)                        \
    X(CUDNN_GRAPH, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, 15)                                    \
    X(CUDNN_VARIANT_PACK, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, 16)                               \
    X(CUDNN_TENSOR, CUDNN_BACKEND_TENSOR_DESCRIPTOR, 17)                                           \
    X(CUDNN_MATMUL, CUDNN_BACKEND_MATMUL_DESCRIPTOR, 18)                                           \
    X(CUDNN_OP_MATMUL, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, 19)                              \
    X(CUDNN_REDUCTION, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, 21)                                     \
    X(CUDNN_OP_REDUCTION, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, 22)                        \
    X(CUDNN_DEVICE, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, 38)                                       \
    X(CUDNN_OP_SDPA, CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR, 41)                              \
    X(CUDNN_POINTWISE_MODE, CUDNN_ATTR_POINTWISE_MODE, 0)                                          \
    X(CUDNN_POINTWISE_MATH, CUDNN_ATTR_POINTWISE_MATH_PREC, 1)                                     \
    X(CUDNN_POINTWISE_AXIS, CUDNN_ATTR_POINTWISE_AXIS, 9)                                          \
    X(CUDNN_HEUR_MODE, CUDNN_ATTR_ENGINEHEUR_MODE, 200)                                            \
    X(CUDNN_HEUR_GRAPH, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, 201)                                \
    X(CUDNN_HEUR_RESULTS, CUDNN_ATTR_ENGINEHEUR_RESULTS, 202)                                      \
    X(CUDNN_HEUR_DEVICE, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, 204)                                    \
    X(CUDNN_PLAN_HANDLE, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, 400)                                    \
    X(CUDNN_PLAN_CONFIG, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, 401)                             \
    X(CUDNN_PLAN_WORKSPACE, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 402)                         \
    X(CUDNN_PLAN_DEVICE, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, 407)                                \
    X(CUDNN_PW_DESC, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 750)                            \
    X(CUDNN_PW_X, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, 751)                                       \
    X(CUDNN_PW_B, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, 752)                                       \
    X(CUDNN_PW_Y, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, 753)                                       \
    X(CUDNN_PW_T, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, 758)                                       \
    X(CUDNN_GRAPH_HANDLE, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, 800)                                   \
    X(CUDNN_GRAPH_OPS, CUDNN_ATTR_OPERATIONGRAPH_OPS, 801)                                         \
    X(CUDNN_TENSOR_ALIGNMENT, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 900)                               \
    X(CUDNN_TENSOR_TYPE, CUDNN_ATTR_TENSOR_DATA_TYPE, 901)                                         \
    X(CUDNN_TENSOR_DIMS, CUDNN_ATTR_TENSOR_DIMENSIONS, 902)                                        \
    X(CUDNN_TENSOR_STRIDES, CUDNN_ATTR_TENSOR_STRIDES, 903)                                        \
    X(CUDNN_TENSOR_UID, CUDNN_ATTR_TENSOR_UNIQUE_ID, 906)                                          \
    X(CUDNN_TENSOR_VIRTUAL, CUDNN_ATTR_TENSOR_IS_VIRTUAL, 907)                                     \
    X(CUDNN_TENSOR_BY_VALUE, CUDNN_ATTR_TENSOR_IS_BY_VALUE, 908)                                   \
    X(CUDNN_PACK_UIDS, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, 1000)                                   \
    X(CUDNN_PACK_POINTERS, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, 1001)                            \
    X(CUDNN_PACK_WORKSPACE, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, 1003)                               \
    X(CUDNN_MATMUL_TYPE, CUDNN_ATTR_MATMUL_COMP_TYPE, 1500)                                        \
    X(CUDNN_MM_A, CUDNN_ATTR_OPERATION_MATMUL_ADESC, 1520)                                         \
    X(CUDNN_MM_B, CUDNN_ATTR_OPERATION_MATMUL_BDESC, 1521)                                         \
    X(CUDNN_MM_C, CUDNN_ATTR_OPERATION_MATMUL_CDESC, 1522)                                         \
    X(CUDNN_MM_DESC, CUDNN_ATTR_OPERATION_MATMUL_DESC, 1523)                                       \
    X(CUDNN_REDUCTION_OP, CUDNN_ATTR_REDUCTION_OPERATOR, 1600)                                     \
    X(CUDNN_REDUCTION_TYPE, CUDNN_ATTR_REDUCTION_COMP_TYPE, 1601)                                  \
    X(CUDNN_RED_X, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, 1610)                                     \
    X(CUDNN_RED_Y, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, 1611)                                     \
    X(CUDNN_RED_DESC, CUDNN_ATTR_OPERATION_REDUCTION_DESC, 1612)                                   \
    X(CUDNN_DEVICE_JSON, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, 2702)                          \
    X(CUDNN_SDPA_Q, CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, 2800)                                     \
    X(CUDNN_SDPA_K, CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, 2801)                                     \
    X(CUDNN_SDPA_V, CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, 2802)                                     \
    X(CUDNN_SDPA_O, CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, 2803)                                     \
    X(CUDNN_SDPA_STATS, CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, 2804)                             \
    X(CUDNN_SDPA_SCALE, CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, 2805)                             \
    X(CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_A, 3)

enum cofi_cudnn_constant {
#define COFI_CUDNN_ENUM(ours, theirs, number) COFI_##ours = number,
    COFI_CUDNN_CONSTANTS(COFI_CUDNN_ENUM)
#undef COFI_CUDNN_ENUM
};

/* X(name, parameters): what is called, all of them giving a cudnnStatus_t (0: success). Enums are
 * ints in cuDNN's ABI; handles and descriptors are pointers. */
#define COFI_CUDNN_FUNCTIONS(X)                                                                    \
    X(Create, (void **handle))                                                                     \
    X(Destroy, (void *handle))                                                                     \
    X(SetStream, (void *handle, void *stream))                                                     \
    X(BackendCreateDescriptor, (int type, void **descriptor))                                      \
    X(BackendDestroyDescriptor, (void *descriptor))                                                \
    X(BackendFinalize, (void *descriptor))                                                         \
    X(BackendSetAttribute,                                                                         \
      (void *descriptor, int name, int type, int64_t n, const void *elements))                     \
    X(BackendGetAttribute,                                                                         \
      (void *descriptor, int name, int type, int64_t n, int64_t *n_out, void *elements))           \
    X(BackendExecute, (void *handle, void *plan, void *variant_pack))

struct cofi_cudnn {
    int version;
    char path[512]; /* of the file, or the name it was asked for by */
    size_t (*GetVersion)(void);
    const char *(*GetErrorString)(int status);
    void (*GetLastErrorString)(char *text, size_t bytes); /* of this thread */
#define COFI_CUDNN_MEMBER(name, parameters) int(*name) parameters;
    COFI_CUDNN_FUNCTIONS(COFI_CUDNN_MEMBER)
#undef COFI_CUDNN_MEMBER
};

/* Where to look, in this order; each may be NULL. */
struct cofi_cudnn_places {
    const char *named;          /* COFUSE_CUDNN_PATH: a file, or the folder it is in; the only
                                   place when it is given */
    const char *loaded, *system; /* what dlopen is asked for: a library loaded already, and one
                                    that the loader finds */
    const char *const *python;  /* folders of packages, as below */
};

/* Folders of Python packages, as patterns of glob: of a Python that runs in this process, of those
 * in PATH, of the user, of the system. */
enum { COFI_CUDNN_MAX_FOLDERS = 24 };
struct cofi_cudnn_folders {
    char text[COFI_CUDNN_MAX_FOLDERS][300];
    const char *at[COFI_CUDNN_MAX_FOLDERS + 1]; /* ends with NULL */
    int n;
};
void cofi_cudnn_python_folders(struct cofi_cudnn_folders *folders);

/* COF_ERR_UNSUPPORTED: none there, with all that was tried; or too old. */
cof_status cofi_cudnn_find(const struct cofi_cudnn_places *places, struct cofi_cudnn *lib_out);
/* The process's, found at the first call. */
cof_status cofi_cudnn_load(const struct cofi_cudnn **lib_out);
/* COF_ERR_UNSUPPORTED unless `version` is at least `wanted`; `what` it is wanted for. */
cof_status cofi_cudnn_check_version(const struct cofi_cudnn *lib, int wanted, const char *what);
/* "9.19.0" */
const char *cofi_cudnn_version_text(int version, char text[24]);

/* COF_ERR_UNSUPPORTED where cuDNN says so, else COF_ERR_SYSTEM or COF_ERR_NOMEM, with its text. */
cof_status cofi_cudnn_error(const char *file, int line, const struct cofi_cudnn *lib, int error,
                            const char *what);

#define COF_CUDNN(lib, call)                                                                       \
    do {                                                                                           \
        int cofi_cudnn_error_ = (lib)->call;                                                       \
        if (__builtin_expect(cofi_cudnn_error_ != 0, 0))                                           \
            return cofi_cudnn_error(__FILE_NAME__, __LINE__, lib, cofi_cudnn_error_, #call);       \
    } while (0)

/* ---- graphs (attention_cudnn_graph_cuda.c) -------------------------------------------------- */

enum {
    COFI_CUDNN_MAX_TENSORS = 64,
    COFI_CUDNN_MAX_OPERATIONS = 48,
    COFI_CUDNN_MAX_VALUES = 8,
    COFI_CUDNN_ALIGNMENT = 16,
};

struct cofi_cudnn_tensor {
    void *descriptor;
    int64_t uid, dim[4];
    int type, alignment;
};

/* A number that a graph takes from host memory. */
struct cofi_cudnn_value {
    int64_t uid;
    union {
        float f32;
        int32_t i32;
    } as;
};

/* What becomes a plan. The first call that fails is kept in `status`; the others then do nothing
 * and give NULL, so that a graph is written down without looking at each. */
struct cofi_cudnn_graph {
    const struct cofi_cudnn *lib;
    cof_status status;
    int n_tensors, n_descriptors, n_operations, n_values;
    struct cofi_cudnn_tensor tensors[COFI_CUDNN_MAX_TENSORS];
    void *descriptors[COFI_CUDNN_MAX_OPERATIONS]; /* of modes and types, beside the operations */
    void *operations[COFI_CUDNN_MAX_OPERATIONS];
    struct cofi_cudnn_value values[COFI_CUDNN_MAX_VALUES];
};

/* A finished graph: immutable, for any handle of the device it was made for. */
struct cofi_cudnn_plan {
    void *descriptor;
    int64_t workspace_bytes;
    int n_values;
    struct cofi_cudnn_value values[COFI_CUDNN_MAX_VALUES];
};

void cofi_cudnn_graph_begin(struct cofi_cudnn_graph *graph, const struct cofi_cudnn *lib);
void cofi_cudnn_graph_end(struct cofi_cudnn_graph *graph); /* a plan made of it stays */

typedef struct cofi_cudnn_tensor *cofi_cudnn_tensor_ref;

/* uid > 0: the caller's number for it, given with its pointer when the plan runs, which is aligned
 * to COFI_CUDNN_ALIGNMENT bytes, or to 4 where the type is fp32. */
cofi_cudnn_tensor_ref cofi_cudnn_tensor(struct cofi_cudnn_graph *graph, int64_t uid, int type,
                                        const int64_t dim[4], const int64_t stride[4]);
/* Between operations; it has no memory. */
cofi_cudnn_tensor_ref cofi_cudnn_between(struct cofi_cudnn_graph *graph, int type,
                                         const int64_t dim[4]);
cofi_cudnn_tensor_ref cofi_cudnn_float(struct cofi_cudnn_graph *graph, float value);
cofi_cudnn_tensor_ref cofi_cudnn_int(struct cofi_cudnn_graph *graph, int32_t value);

/* out = a b, over the last two dims, sums in fp32; heads of b may divide those of a. */
void cofi_cudnn_matmul(struct cofi_cudnn_graph *graph, cofi_cudnn_tensor_ref a,
                       cofi_cudnn_tensor_ref b, cofi_cudnn_tensor_ref out);
/* out = mode(x), mode(x, b) or mode(x, b, t): b and t may be NULL. math: the type it computes in;
 * axis: of CUDNN_INDEX. */
struct cofi_cudnn_pointwise {
    int mode, math;
    int64_t axis;
    cofi_cudnn_tensor_ref x, b, t, out;
};
void cofi_cudnn_pointwise(struct cofi_cudnn_graph *graph, const struct cofi_cudnn_pointwise *op);
/* Over the dims that are 1 in out, in fp32. */
void cofi_cudnn_reduce(struct cofi_cudnn_graph *graph, int mode, cofi_cudnn_tensor_ref x,
                       cofi_cudnn_tensor_ref out);
/* out = softmax(scale q k^T) v, stats = log sum exp: one operation. */
void cofi_cudnn_attention(struct cofi_cudnn_graph *graph, cofi_cudnn_tensor_ref q,
                          cofi_cudnn_tensor_ref k, cofi_cudnn_tensor_ref v,
                          cofi_cudnn_tensor_ref scale, cofi_cudnn_tensor_ref out,
                          cofi_cudnn_tensor_ref stats);

/* What a plan is made for: a handle, or the description of a device that is not here. */
struct cofi_cudnn_target {
    void *handle, *device; /* one of them */
};

/* The first of the engines that cuDNN's heuristics propose which can be made and wants at most
 * max_workspace bytes. */
cof_status cofi_cudnn_graph_plan(struct cofi_cudnn_graph *graph,
                                 const struct cofi_cudnn_target *target, int64_t max_workspace,
                                 struct cofi_cudnn_plan *plan_out);
void cofi_cudnn_plan_close(const struct cofi_cudnn *lib, struct cofi_cudnn_plan *plan);
/* uids and pointers of all tensors with memory; those of values are added. */
cof_status cofi_cudnn_plan_run(const struct cofi_cudnn *lib, const struct cofi_cudnn_plan *plan,
                               void *handle, int n, const int64_t *uids, void *const *pointers,
                               void *workspace);

/* ---- a section, forward (attention_cudnn_forward_cuda.c) ------------------------------------ */

enum { COFI_CUDNN_Q = 1, COFI_CUDNN_K, COFI_CUDNN_V, COFI_CUDNN_O, COFI_CUDNN_LSE };

/* Rows of a section that see a key, and the keys that any row sees: a range each. */
struct cofi_cudnn_part {
    int64_t q_begin, q_rows, k_begin, k_rows; /* 0 rows: no row sees a key */
    bool has_left, has_right;                 /* whether that side of the band hides any pair */
    int64_t left, right; /* j is visible to i, from the part's first rows: i - left < j <= i + right
                            */
};
void cofi_cudnn_part(const struct cofi_attention_shape *shape, struct cofi_cudnn_part *part);

/* COF_ERR_UNSUPPORTED: why cuDNN has nothing for such a shape, as far as that is known without
 * asking it. */
cof_status cofi_cudnn_forward_check(const struct cofi_cudnn *lib,
                                    const struct cofi_attention_shape *shape,
                                    const struct cofi_cudnn_part *part);
/* Whether all of it can be asked for as one operation. */
bool cofi_cudnn_forward_is_unified(const struct cofi_cudnn *lib,
                                   const struct cofi_cudnn_part *part);
void cofi_cudnn_forward_graph(struct cofi_cudnn_graph *graph,
                              const struct cofi_attention_shape *shape,
                              const struct cofi_cudnn_part *part, bool is_unified);

#endif
