/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans for the triangle multiplicative update. */
#include "py_plan.h"

#include <stddef.h>

static const char *const direction_names[] = {"outgoing", "incoming", NULL};
static const char *const shard_names[] = {"balanced", "chunk", "explicit", NULL};
static const char *const save_names[] = {"none", "ab", NULL};
static const char *const order_names[] = {"stacked", "interleaved", NULL};

#define AT(field) offsetof(cof_trimul_params, field)
static const struct cofi_py_field fields[] = {
    {"dtype", COFI_PY_DTYPE, AT(dtype), NULL},
    {"norm_dtype", COFI_PY_DTYPE, AT(norm_dtype), NULL},
    {"mask_dtype", COFI_PY_DTYPE, AT(mask_dtype), NULL},
    {"direction", COFI_PY_ENUM, AT(direction), direction_names},
    {"n_batch", COFI_PY_I64, AT(n_batch), NULL},
    {"n_rows", COFI_PY_I64, AT(n_rows), NULL},
    {"dim", COFI_PY_I64, AT(dim), NULL},
    {"hidden", COFI_PY_I64, AT(hidden), NULL},
    {"grid_rows", COFI_PY_INT, AT(grid_rows), NULL},
    {"grid_cols", COFI_PY_INT, AT(grid_cols), NULL},
    {"shard", COFI_PY_ENUM, AT(shard), shard_names},
    {"row_offsets", COFI_PY_OFFSETS, AT(row_offsets), NULL},
    {"col_offsets", COFI_PY_OFFSETS, AT(col_offsets), NULL},
    {"eps_in", COFI_PY_DOUBLE, AT(eps_in), NULL},
    {"eps_out", COFI_PY_DOUBLE, AT(eps_out), NULL},
    {"save", COFI_PY_ENUM, AT(save), save_names},
    {"forward_only", COFI_PY_FLAG, AT(forward_only), NULL},
    {"reduce_param_grads", COFI_PY_FLAG, AT(reduce_param_grads), NULL},
    {"chunk_features", COFI_PY_INT, AT(chunk_features), NULL},
    {"max_ctas", COFI_PY_INT, AT(max_ctas), NULL},
    {NULL, COFI_PY_FLAG, 0, NULL},
};

static cof_status plan_create(cof_team *team, const void *params, cof_arena *arena,
                              cof_plan **plan_out)
{
    return cof_trimul_plan_create(team, params, arena, plan_out);
}

static cof_status workspace(cof_team *team, const void *params, cof_workspace_sizes *sizes_out)
{
    return cof_trimul_workspace(team, params, sizes_out);
}

_Static_assert(sizeof(cof_trimul_params) <= COFI_PY_PARAMS_BYTES, "room for the parameters");
static const struct cofi_py_operator operator_trimul = {fields, sizeof(cof_trimul_params),
                                                        plan_create, workspace};

static PyObject *trimul_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    return cofi_py_plan_new(type, args, keywords, &operator_trimul);
}

/* ---- functions of the module ---------------------------------------------------------------- */

PyObject *cofi_py_trimul_workspace(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    return cofi_py_plan_workspace(args, keywords, &operator_trimul);
}

PyObject *cofi_py_trimul_block(PyObject *module, PyObject *args, PyObject *keywords)
{
    cof_trimul_params params = COF_TRIMUL_PARAMS_INIT;
    cof_trimul_block block;
    int n_ranks, rank;
    long long n;
    (void)module;
    if (!PyArg_ParseTuple(args, "iiL:trimul_block", &n_ranks, &rank, &n))
        return NULL;
    PyObject *result = NULL;
    if (cofi_py_fields_read(keywords, fields, &params)) {
        cof_status status = cof_trimul_block_of(&params, n_ranks, rank, n, &block);
        result = status == COF_OK
                     ? Py_BuildValue("LLLL", (long long)block.row, (long long)block.n_rows,
                                     (long long)block.col, (long long)block.n_cols)
                     : cofi_py_fail(status);
    }
    cofi_py_fields_free(fields, &params);
    return result;
}

PyObject *cofi_py_trimul_import_rows(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"src", "dst", "order", "swap_ab", NULL};
    PyObject *src, *dst, *order = Py_None;
    struct cofi_py_tensor from, to;
    int number = 0, swap_ab = 0;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|Op:trimul_import_rows", names, &src, &dst,
                                     &order, &swap_ab) ||
        !cofi_py_enum_read(order, "order", order_names, &number) ||
        !cofi_py_tensor_get(src, "src", false, false, &from))
        return NULL;
    PyObject *result = NULL;
    if (cofi_py_tensor_get(dst, "dst", true, false, &to)) {
        cof_status status = cof_trimul_import_rows(&from.view, (cof_trimul_order)number, swap_ab,
                                                   &to.view);
        if (status == COF_OK) {
            Py_INCREF(Py_None);
            result = Py_None;
        } else {
            cofi_py_fail(status);
        }
        cofi_py_tensor_release(&to);
    }
    cofi_py_tensor_release(&from);
    return result;
}

/* ---- weights and their gradients ------------------------------------------------------------ */

/* Members of cof_trimul_weights and cof_trimul_grads, which are in the same places of both. */
#define MEMBER(name) {#name, offsetof(cof_trimul_weights, name)}
#define SAME_PLACE(name)                                                                           \
    _Static_assert(offsetof(cof_trimul_weights, name) == offsetof(cof_trimul_grads, name), #name)
static const struct member {
    const char *name;
    size_t offset;
} members[] = {MEMBER(norm_in_w), MEMBER(norm_in_b), MEMBER(p_in),       MEMBER(p_in_b),
               MEMBER(g_in),      MEMBER(g_in_b),    MEMBER(norm_out_w), MEMBER(norm_out_b),
               MEMBER(p_out),     MEMBER(p_out_b),   MEMBER(g_out),      MEMBER(g_out_b)};
SAME_PLACE(norm_in_w);
SAME_PLACE(g_out_b);

/* A dict from names to tensors into a struct that has its size already. The dict is ours alone:
 * what hands out a tensor may run any code, in other threads too. */
static bool take_all(struct cofi_py_call *call, PyObject *dict, const char *what, bool is_output,
                     void *into)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
        const size_t n = sizeof members / sizeof members[0];
        size_t i = 0;
        while (i < n && !cofi_py_is_name(key, members[i].name))
            i++;
        if (i == n) {
            PyErr_Format(PyExc_TypeError, "%s: no %R; there are norm_in_w, norm_in_b, p_in, "
                         "p_in_b, g_in, g_in_b, norm_out_w, norm_out_b, p_out, p_out_b, g_out, "
                         "g_out_b", what, key);
            return false;
        }
        const cof_tensor *tensor;
        if (!cofi_py_call_take(call, value, members[i].name, is_output, &tensor))
            return false;
        memcpy((char *)into + members[i].offset, &tensor, sizeof tensor);
    }
    return true;
}

static bool take_members(struct cofi_py_call *call, PyObject *dict, const char *what,
                         bool is_output, void *into)
{
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "%s: wanted a dict of tensors", what);
        return false;
    }
    PyObject *own = PyDict_Copy(dict);
    bool ok = own && take_all(call, own, what, is_output, into);
    Py_XDECREF(own);
    return ok;
}

struct set_weights {
    cof_trimul_weights weights;
    unsigned flags;
};

static cof_status run_set_weights(cof_plan *plan, const void *args, cof_stream stream)
{
    const struct set_weights *a = args;
    return cof_trimul_set_weights(plan, &a->weights, a->flags, stream);
}

static PyObject *trimul_set_weights(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"weights", "check", "stream", NULL};
    PyObject *weights, *stream = NULL;
    struct set_weights a = {.weights = COF_TRIMUL_WEIGHTS_INIT};
    struct cofi_py_call call;
    int check = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|pO:set_weights", names, &weights, &check,
                                     &stream) ||
        !cofi_py_call_begin(&call, self, stream))
        return NULL;
    a.flags = check ? COF_TRIMUL_CHECK : 0;
    bool ok = take_members(&call, weights, "weights", false, &a.weights);
    return cofi_py_call_end(&call, ok, run_set_weights, &a);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static cof_status run_forward(cof_plan *plan, const void *args, cof_stream stream)
{
    return cof_trimul_forward(plan, args, stream);
}

static cof_status run_backward(cof_plan *plan, const void *args, cof_stream stream)
{
    return cof_trimul_backward(plan, args, stream);
}

static PyObject *trimul_forward(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"x", "out", "mask", "residual", "n", "saved", "stream", NULL};
    PyObject *x, *out, *mask = NULL, *residual = NULL, *saved = NULL, *stream = NULL;
    cof_trimul_args a = COF_TRIMUL_ARGS_INIT;
    struct cofi_py_call call;
    long long n = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|OOLOO:forward", names, &x, &out, &mask,
                                     &residual, &n, &saved, &stream) ||
        !cofi_py_call_begin(&call, self, stream))
        return NULL;
    a.n = n;
    a.in_place = out == x;
    bool ok = cofi_py_call_take(&call, x, "x", false, &a.x) &&
              cofi_py_call_take(&call, out, "out", true, &a.out) &&
              cofi_py_call_take(&call, mask, "mask", false, &a.mask) &&
              cofi_py_call_take(&call, residual, "residual", false, &a.residual) &&
              cofi_py_call_take(&call, saved, "saved", true, &a.saved);
    return cofi_py_call_end(&call, ok, run_forward, &a);
}

static PyObject *trimul_backward(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"x", "dout", "dx", "grads", "mask", "residual", "n", "saved", "stream",
                            NULL};
    PyObject *x, *dout, *dx, *grads = Py_None, *mask = NULL, *residual = NULL, *saved = NULL;
    PyObject *stream = NULL;
    cof_trimul_args a = COF_TRIMUL_ARGS_INIT;
    cof_trimul_grads g = COF_TRIMUL_GRADS_INIT;
    struct cofi_py_call call;
    long long n = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO|OOOLOO:backward", names, &x, &dout, &dx,
                                     &grads, &mask, &residual, &n, &saved, &stream) ||
        !cofi_py_call_begin(&call, self, stream))
        return NULL;
    a.n = n;
    a.grads = grads == Py_None ? NULL : &g;
    bool ok = cofi_py_call_take(&call, x, "x", false, &a.x) &&
              cofi_py_call_take(&call, dout, "dout", false, &a.dout) &&
              cofi_py_call_take(&call, dx, "dx", true, &a.dx) &&
              (!a.grads || take_members(&call, grads, "grads", true, &g)) &&
              cofi_py_call_take(&call, mask, "mask", false, &a.mask) &&
              cofi_py_call_take(&call, residual, "residual", false, &a.residual) &&
              cofi_py_call_take(&call, saved, "saved", false, &a.saved);
    return cofi_py_call_end(&call, ok, run_backward, &a);
}

static PyMethodDef methods[] = {
    {"set_weights", COFI_PY_KEYWORDS(trimul_set_weights),
     "set_weights(weights, check=False, stream=None)\n\n"
     "Weights of the calls that follow: a dict with p_in, g_in [2H, D], p_out [D, H],\n"
     "g_out [D, D], and p_in_b, g_in_b, p_out_b, g_out_b, norm_in_w, norm_in_b, norm_out_w,\n"
     "norm_out_b where the model has them. check: collective; the ranks compare them."},
    {"forward", COFI_PY_KEYWORDS(trimul_forward),
     "forward(x, out, mask=None, residual=None, n=0, saved=None, stream=None)\n\n"
     "out from x, both [B, Ni, Nj, D]: this rank's block of rows and columns. mask [B, Ni, Nj];\n"
     "residual as x, added; it may be x or out itself, and out may be x. n: rows of the whole,\n"
     "0: n_rows of the plan. saved: uint8 [n], with save=\"ab\". Every rank calls it."},
    {"backward", COFI_PY_KEYWORDS(trimul_backward),
     "backward(x, dout, dx, grads=None, mask=None, residual=None, n=0, saved=None, stream=None)\n\n"
     "dx from dout, and the gradients of weights into a dict of float32 tensors as set_weights\n"
     "takes them. Where residual is x, dx holds dout too."},
    COFI_PY_PLAN_DESTROY,
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getters[] = {COFI_PY_PLAN_GETTERS};
static PyType_Slot slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, trimul_new},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_doc,
     "TrimulPlan(team, *, dtype, n_rows, dim, hidden=0, n_batch=1, direction=\"outgoing\",\n"
     "           grid_rows=0, grid_cols=0, shard=\"balanced\", row_offsets=None,\n"
     "           col_offsets=None, eps_in=0.0, eps_out=0.0, norm_dtype=None, mask_dtype=None,\n"
     "           save=\"none\", forward_only=False, reduce_param_grads=False, chunk_features=0,\n"
     "           max_ctas=0, arena=None)\n\n"
     "Triangle multiplicative update of pairs over a grid of ranks; N and B of a call are free up\n"
     "to n_rows and n_batch. Collective."},
    {0, NULL},
};
PyType_Spec cofi_py_trimul_spec = {"cofuse.TrimulPlan", sizeof(struct cofi_py_object), 0,
                                   COFI_PY_FLAGS, slots};
