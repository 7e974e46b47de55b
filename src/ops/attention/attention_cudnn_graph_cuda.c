/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's operation graphs: descriptors, heuristics, execution plans, runs. Everything in cuDNN is
 * a descriptor that is created, given attributes and finalized, in this order. */
#include <stdio.h>
#include <string.h>

#include "ops/attention/attention_cudnn.h"

enum {
    MAX_CONFIGS = 16, /* engines that are tried */
};

/* ---- descriptors ---------------------------------------------------------------------------- */

/* An attribute of a descriptor: n elements of a type. */
struct attribute {
    int name, type;
    int64_t n;
    const void *elements;
};

/* An error with cuDNN's number for what it is about. */
static cof_status fail(const struct cofi_cudnn *lib, int error, const char *what, int number)
{
    char text[64];
    snprintf(text, sizeof text, "%s %d", what, number);
    return cofi_cudnn_error(__FILE_NAME__, __LINE__, lib, error, text);
}

static cof_status set(const struct cofi_cudnn *lib, void *descriptor, const struct attribute *a)
{
    int error = lib->BackendSetAttribute(descriptor, a->name, a->type, a->n, a->elements);
    return error ? fail(lib, error, "attribute", a->name) : COF_OK;
}

/* A finished descriptor, which is the caller's; *out is NULL on an error. */
static cof_status make(const struct cofi_cudnn *lib, int kind, int n,
                       const struct attribute *attributes, void **out)
{
    void *descriptor = NULL;
    *out = NULL;
    COF_CUDNN(lib, BackendCreateDescriptor(kind, &descriptor));
    cof_status status = COF_OK;
    for (int i = 0; i < n && status == COF_OK; i++)
        status = set(lib, descriptor, &attributes[i]);
    if (status == COF_OK) {
        int error = lib->BackendFinalize(descriptor);
        status = error ? fail(lib, error, "descriptor of type", kind) : COF_OK;
    }
    if (status != COF_OK)
        lib->BackendDestroyDescriptor(descriptor);
    else
        *out = descriptor;
    return status;
}

static void drop(const struct cofi_cudnn *lib, void *descriptor)
{
    if (descriptor)
        lib->BackendDestroyDescriptor(descriptor);
}

void cofi_cudnn_graph_begin(struct cofi_cudnn_graph *g, const struct cofi_cudnn *lib)
{
    memset(g, 0, sizeof *g);
    g->lib = lib;
}

void cofi_cudnn_graph_end(struct cofi_cudnn_graph *g)
{
    for (int i = g->n_operations - 1; i >= 0; i--)
        drop(g->lib, g->operations[i]);
    for (int i = g->n_descriptors - 1; i >= 0; i--)
        drop(g->lib, g->descriptors[i]);
    for (int i = g->n_tensors - 1; i >= 0; i--)
        drop(g->lib, g->tensors[i].descriptor);
    memset(g, 0, sizeof *g);
}

/* ---- tensors -------------------------------------------------------------------------------- */

static cofi_cudnn_tensor_ref make_tensor(struct cofi_cudnn_graph *g,
                                         const struct cofi_cudnn_tensor *wanted,
                                         const int64_t stride[4], bool is_virtual, bool by_value)
{
    const int64_t alignment = wanted->alignment;
    if (g->status != COF_OK)
        return NULL;
    if (g->n_tensors == COFI_CUDNN_MAX_TENSORS) {
        g->status = COF_FAIL(COF_ERR_SYSTEM, "cuDNN: a graph of over %d tensors",
                             COFI_CUDNN_MAX_TENSORS);
        return NULL;
    }
    const struct attribute attributes[] = {
        {COFI_CUDNN_TENSOR_TYPE, COFI_CUDNN_OF_DATA_TYPE, 1, &wanted->type},
        {COFI_CUDNN_TENSOR_DIMS, COFI_CUDNN_OF_INT64, 4, wanted->dim},
        {COFI_CUDNN_TENSOR_STRIDES, COFI_CUDNN_OF_INT64, 4, stride},
        {COFI_CUDNN_TENSOR_UID, COFI_CUDNN_OF_INT64, 1, &wanted->uid},
        {COFI_CUDNN_TENSOR_ALIGNMENT, COFI_CUDNN_OF_INT64, 1, &alignment},
        {COFI_CUDNN_TENSOR_VIRTUAL, COFI_CUDNN_OF_BOOL, 1, &is_virtual},
        {COFI_CUDNN_TENSOR_BY_VALUE, COFI_CUDNN_OF_BOOL, 1, &by_value},
    };
    struct cofi_cudnn_tensor *t = &g->tensors[g->n_tensors];
    *t = *wanted;
    g->status = make(g->lib, COFI_CUDNN_TENSOR, 7, attributes, &t->descriptor);
    if (g->status != COF_OK)
        return NULL;
    g->n_tensors++;
    return t;
}

/* Above the uids of callers, and different for every tensor of a graph. */
static int64_t next_uid(const struct cofi_cudnn_graph *g)
{
    return 1000 + g->n_tensors;
}

cofi_cudnn_tensor_ref cofi_cudnn_tensor(struct cofi_cudnn_graph *g, int64_t uid, int type,
                                        const int64_t dim[4], const int64_t stride[4])
{
    const struct cofi_cudnn_tensor t = {NULL, uid, {dim[0], dim[1], dim[2], dim[3]}, type,
                                        type == COFI_CUDNN_FLOAT ? 4 : COFI_CUDNN_ALIGNMENT};
    return make_tensor(g, &t, stride, false, false);
}

cofi_cudnn_tensor_ref cofi_cudnn_between(struct cofi_cudnn_graph *g, int type, const int64_t dim[4])
{
    const struct cofi_cudnn_tensor t = {NULL, next_uid(g), {dim[0], dim[1], dim[2], dim[3]}, type,
                                        COFI_CUDNN_ALIGNMENT};
    const int64_t stride[4] = {dim[1] * dim[2] * dim[3], dim[2] * dim[3], dim[3], 1};
    return make_tensor(g, &t, stride, true, false);
}

static cofi_cudnn_tensor_ref add_value(struct cofi_cudnn_graph *g, int type,
                                       const struct cofi_cudnn_value *value)
{
    const struct cofi_cudnn_tensor t = {NULL, value->uid, {1, 1, 1, 1}, type, COFI_CUDNN_ALIGNMENT};
    const int64_t stride[4] = {1, 1, 1, 1};
    if (g->status == COF_OK && g->n_values == COFI_CUDNN_MAX_VALUES)
        g->status = COF_FAIL(COF_ERR_SYSTEM, "cuDNN: a graph of over %d numbers",
                             COFI_CUDNN_MAX_VALUES);
    cofi_cudnn_tensor_ref tensor = make_tensor(g, &t, stride, false, true);
    if (tensor)
        g->values[g->n_values++] = *value;
    return tensor;
}

cofi_cudnn_tensor_ref cofi_cudnn_float(struct cofi_cudnn_graph *g, float value)
{
    const struct cofi_cudnn_value v = {.uid = next_uid(g), .as.f32 = value};
    return add_value(g, COFI_CUDNN_FLOAT, &v);
}

cofi_cudnn_tensor_ref cofi_cudnn_int(struct cofi_cudnn_graph *g, int32_t value)
{
    const struct cofi_cudnn_value v = {.uid = next_uid(g), .as.i32 = value};
    return add_value(g, COFI_CUDNN_INT32, &v);
}

/* ---- operations ----------------------------------------------------------------------------- */

/* What an operation is made of beside its tensors: a mode and types. NULL on an error. */
static void *add_descriptor(struct cofi_cudnn_graph *g, int kind, int n,
                            const struct attribute *attributes)
{
    void *made = NULL;
    if (g->status == COF_OK && g->n_descriptors == COFI_CUDNN_MAX_OPERATIONS)
        g->status = COF_FAIL(COF_ERR_SYSTEM, "cuDNN: a graph of over %d operations",
                             COFI_CUDNN_MAX_OPERATIONS);
    if (g->status == COF_OK)
        g->status = make(g->lib, kind, n, attributes, &made);
    if (made)
        g->descriptors[g->n_descriptors++] = made;
    return made;
}

/* One attribute is of an operation's descriptor, or one of its tensors. */
struct operand {
    int name;
    void *descriptor;
};

static void add_operation(struct cofi_cudnn_graph *g, int kind, int n,
                          const struct operand *operands)
{
    struct attribute attributes[8];
    int n_given = 0;
    for (int i = 0; i < n; i++)
        if (operands[i].descriptor)
            attributes[n_given++] = (struct attribute){operands[i].name, COFI_CUDNN_OF_DESCRIPTOR,
                                                       1, &operands[i].descriptor};
    if (g->status == COF_OK && g->n_operations == COFI_CUDNN_MAX_OPERATIONS)
        g->status = COF_FAIL(COF_ERR_SYSTEM, "cuDNN: a graph of over %d operations",
                             COFI_CUDNN_MAX_OPERATIONS);
    if (g->status != COF_OK)
        return;
    void *made = NULL;
    g->status = make(g->lib, kind, n_given, attributes, &made);
    if (made)
        g->operations[g->n_operations++] = made;
}

static void *of(cofi_cudnn_tensor_ref tensor)
{
    return tensor ? tensor->descriptor : NULL;
}

void cofi_cudnn_matmul(struct cofi_cudnn_graph *g, cofi_cudnn_tensor_ref a, cofi_cudnn_tensor_ref b,
                       cofi_cudnn_tensor_ref out)
{
    const int math = COFI_CUDNN_FLOAT;
    const struct attribute attributes[] = {
        {COFI_CUDNN_MATMUL_TYPE, COFI_CUDNN_OF_DATA_TYPE, 1, &math}};
    const struct operand operands[] = {
        {COFI_CUDNN_MM_A, of(a)},
        {COFI_CUDNN_MM_B, of(b)},
        {COFI_CUDNN_MM_C, of(out)},
        {COFI_CUDNN_MM_DESC, add_descriptor(g, COFI_CUDNN_MATMUL, 1, attributes)}};
    add_operation(g, COFI_CUDNN_OP_MATMUL, 4, operands);
}

void cofi_cudnn_pointwise(struct cofi_cudnn_graph *g, const struct cofi_cudnn_pointwise *op)
{
    const struct attribute attributes[] = {
        {COFI_CUDNN_POINTWISE_MODE, COFI_CUDNN_OF_POINTWISE_MODE, 1, &op->mode},
        {COFI_CUDNN_POINTWISE_MATH, COFI_CUDNN_OF_DATA_TYPE, 1, &op->math},
        {COFI_CUDNN_POINTWISE_AXIS, COFI_CUDNN_OF_INT64, 1, &op->axis},
    };
    int n = op->mode == COFI_CUDNN_INDEX ? 3 : 2;
    const struct operand operands[] = {
        {COFI_CUDNN_PW_DESC, add_descriptor(g, COFI_CUDNN_POINTWISE, n, attributes)},
        {COFI_CUDNN_PW_X, of(op->x)},
        {COFI_CUDNN_PW_B, of(op->b)},
        {COFI_CUDNN_PW_T, of(op->t)},
        {COFI_CUDNN_PW_Y, of(op->out)}};
    add_operation(g, COFI_CUDNN_OP_POINTWISE, 5, operands);
}

void cofi_cudnn_reduce(struct cofi_cudnn_graph *g, int mode, cofi_cudnn_tensor_ref x,
                       cofi_cudnn_tensor_ref out)
{
    const int math = COFI_CUDNN_FLOAT;
    const struct attribute attributes[] = {
        {COFI_CUDNN_REDUCTION_TYPE, COFI_CUDNN_OF_DATA_TYPE, 1, &math},
        {COFI_CUDNN_REDUCTION_OP, COFI_CUDNN_OF_REDUCTION, 1, &mode}};
    const struct operand operands[] = {
        {COFI_CUDNN_RED_DESC, add_descriptor(g, COFI_CUDNN_REDUCTION, 2, attributes)},
        {COFI_CUDNN_RED_X, of(x)},
        {COFI_CUDNN_RED_Y, of(out)}};
    add_operation(g, COFI_CUDNN_OP_REDUCTION, 3, operands);
}

void cofi_cudnn_attention(struct cofi_cudnn_graph *g, cofi_cudnn_tensor_ref q,
                          cofi_cudnn_tensor_ref k, cofi_cudnn_tensor_ref v,
                          cofi_cudnn_tensor_ref scale, cofi_cudnn_tensor_ref out,
                          cofi_cudnn_tensor_ref stats)
{
    const struct operand operands[] = {
        {COFI_CUDNN_SDPA_Q, of(q)},         {COFI_CUDNN_SDPA_K, of(k)},
        {COFI_CUDNN_SDPA_V, of(v)},         {COFI_CUDNN_SDPA_O, of(out)},
        {COFI_CUDNN_SDPA_STATS, of(stats)}, {COFI_CUDNN_SDPA_SCALE, of(scale)}};
    add_operation(g, COFI_CUDNN_OP_SDPA, 6, operands);
}

/* ---- plans ---------------------------------------------------------------------------------- */

/* The engines that cuDNN's heuristics propose, best first, in configs[0 .. *n - 1] of MAX_CONFIGS
 * descriptors, which are the caller's also on an error. */
static cof_status propose(const struct cofi_cudnn *lib, void *graph,
                          const struct cofi_cudnn_target *target, void **configs, int64_t *n)
{
    const int mode = COFI_CUDNN_HEUR_MODE_A;
    void *heuristics = NULL;
    const struct attribute attributes[] = {
        {COFI_CUDNN_HEUR_GRAPH, COFI_CUDNN_OF_DESCRIPTOR, 1, &graph},
        {COFI_CUDNN_HEUR_MODE, COFI_CUDNN_OF_HEUR_MODE, 1, &mode},
        {COFI_CUDNN_HEUR_DEVICE, COFI_CUDNN_OF_DESCRIPTOR, 1, &target->device}};
    for (int i = 0; i < MAX_CONFIGS; i++)
        COF_CUDNN(lib, BackendCreateDescriptor(COFI_CUDNN_ENGINE_CONFIG, &configs[i]));
    COF_TRY(make(lib, COFI_CUDNN_HEURISTICS, target->device ? 3 : 2, attributes, &heuristics));
    int error = lib->BackendGetAttribute(heuristics, COFI_CUDNN_HEUR_RESULTS,
                                         COFI_CUDNN_OF_DESCRIPTOR, MAX_CONFIGS, n, configs);
    cof_status status = COF_OK;
    if (error)
        status = cofi_cudnn_error(__FILE_NAME__, __LINE__, lib, error, "heuristics");
    drop(lib, heuristics);
    if (status == COF_OK && *n < 1) /* it has said why, but not as an error */
        status = cofi_cudnn_error(__FILE_NAME__, __LINE__, lib, COFI_CUDNN_NOT_SUPPORTED,
                                  "its heuristics propose no engine");
    return status;
}

/* The plan of one engine; COF_ERR_UNSUPPORTED where it wants too much workspace. */
static cof_status try_config(const struct cofi_cudnn *lib, void *config,
                             const struct cofi_cudnn_target *target, int64_t max_workspace,
                             struct cofi_cudnn_plan *plan)
{
    void *made = NULL;
    int64_t n = 0, bytes = 0;
    const struct attribute attributes[] = {
        {COFI_CUDNN_PLAN_CONFIG, COFI_CUDNN_OF_DESCRIPTOR, 1, &config},
        target->device ? (struct attribute){COFI_CUDNN_PLAN_DEVICE, COFI_CUDNN_OF_DESCRIPTOR, 1,
                                            &target->device}
                       : (struct attribute){COFI_CUDNN_PLAN_HANDLE, COFI_CUDNN_OF_HANDLE, 1,
                                            &target->handle}};
    COF_TRY(make(lib, COFI_CUDNN_PLAN, 2, attributes, &made));
    int error = lib->BackendGetAttribute(made, COFI_CUDNN_PLAN_WORKSPACE, COFI_CUDNN_OF_INT64, 1,
                                         &n, &bytes);
    cof_status status = COF_OK;
    if (error)
        status = cofi_cudnn_error(__FILE_NAME__, __LINE__, lib, error, "workspace of a plan");
    else if (bytes > max_workspace)
        status = COF_FAIL(COF_ERR_UNSUPPORTED, "cuDNN: its engine wants %lld bytes of workspace: "
                          "at most %lld", (long long)bytes, (long long)max_workspace);
    if (status != COF_OK) {
        drop(lib, made);
        return status;
    }
    plan->descriptor = made;
    plan->workspace_bytes = bytes;
    return COF_OK;
}

static cof_status choose(const struct cofi_cudnn *lib, void *graph,
                         const struct cofi_cudnn_target *target, int64_t max_workspace,
                         struct cofi_cudnn_plan *plan)
{
    void *configs[MAX_CONFIGS] = {NULL};
    int64_t n = 0;
    cof_status status = propose(lib, graph, target, configs, &n);
    if (status == COF_OK) {
        status = COF_ERR_UNSUPPORTED;
        for (int64_t i = 0; i < n && i < MAX_CONFIGS && status != COF_OK; i++)
            status = try_config(lib, configs[i], target, max_workspace, plan);
    }
    for (int i = 0; i < MAX_CONFIGS; i++)
        drop(lib, configs[i]);
    return status;
}

cof_status cofi_cudnn_graph_plan(struct cofi_cudnn_graph *g, const struct cofi_cudnn_target *target,
                                 int64_t max_workspace, struct cofi_cudnn_plan *plan)
{
    void *graph = NULL;
    const struct attribute attributes[] = {
        {COFI_CUDNN_GRAPH_OPS, COFI_CUDNN_OF_DESCRIPTOR, g->n_operations, g->operations},
        {COFI_CUDNN_GRAPH_HANDLE, COFI_CUDNN_OF_HANDLE, 1, &target->handle}};
    memset(plan, 0, sizeof *plan);
    if (g->status != COF_OK)
        return g->status;
    COF_TRY(make(g->lib, COFI_CUDNN_GRAPH, target->handle ? 2 : 1, attributes, &graph));
    cof_status status = choose(g->lib, graph, target, max_workspace, plan);
    drop(g->lib, graph);
    if (status != COF_OK)
        return status;
    plan->n_values = g->n_values;
    memcpy(plan->values, g->values, sizeof plan->values);
    return COF_OK;
}

void cofi_cudnn_plan_close(const struct cofi_cudnn *lib, struct cofi_cudnn_plan *plan)
{
    drop(lib, plan->descriptor);
    memset(plan, 0, sizeof *plan);
}

cof_status cofi_cudnn_plan_run(const struct cofi_cudnn *lib, const struct cofi_cudnn_plan *plan,
                               void *handle, int n, const int64_t *uids, void *const *pointers,
                               void *workspace)
{
    int64_t all_uids[16 + COFI_CUDNN_MAX_VALUES];
    void *all[16 + COFI_CUDNN_MAX_VALUES], *pack = NULL;
    struct cofi_cudnn_value values[COFI_CUDNN_MAX_VALUES]; /* cuDNN takes no const pointers */
    COF_FAIL_IF(n > 16, COF_ERR_SYSTEM, "cuDNN: a graph run with %d tensors", n);
    memcpy(all_uids, uids, (size_t)n * sizeof *uids);
    memcpy(all, pointers, (size_t)n * sizeof *all);
    memcpy(values, plan->values, sizeof values);
    for (int i = 0; i < plan->n_values; i++) {
        all_uids[n + i] = values[i].uid;
        all[n + i] = &values[i].as;
    }
    n += plan->n_values;
    const struct attribute attributes[] = {
        {COFI_CUDNN_PACK_UIDS, COFI_CUDNN_OF_INT64, n, all_uids},
        {COFI_CUDNN_PACK_POINTERS, COFI_CUDNN_OF_POINTER, n, all},
        {COFI_CUDNN_PACK_WORKSPACE, COFI_CUDNN_OF_POINTER, 1, &workspace}};
    COF_TRY(make(lib, COFI_CUDNN_VARIANT_PACK, 3, attributes, &pack));
    int error = lib->BackendExecute(handle, plan->descriptor, pack);
    drop(lib, pack);
    if (error)
        return cofi_cudnn_error(__FILE_NAME__, __LINE__, lib, error, "cudnnBackendExecute");
    return COF_OK;
}
