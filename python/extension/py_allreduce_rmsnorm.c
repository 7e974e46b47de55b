/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans for all-reduce, residual and RMSNorm. */
#include "py_plan.h"

#include <stddef.h>

static const char *const variant_names[] = {"residual_norm", "norm", "only", NULL};
static const char *const rounding_names[] = {"match_unfused", "exact", NULL};
static const char *const algorithm_names[] = {"auto", "one_shot", "two_shot", NULL};

#define AT(field) offsetof(cof_allreduce_rmsnorm_params, field)
static const struct cofi_py_field fields[] = {
    {"dtype", COFI_PY_DTYPE, AT(dtype), NULL},
    {"weight_dtype", COFI_PY_DTYPE, AT(weight_dtype), NULL},
    {"hidden", COFI_PY_I64, AT(hidden), NULL},
    {"max_tokens", COFI_PY_I64, AT(max_tokens), NULL},
    {"variant", COFI_PY_ENUM, AT(variant), variant_names},
    {"rounding", COFI_PY_ENUM, AT(rounding), rounding_names},
    {"eps", COFI_PY_FLOAT, AT(eps), NULL},
    {"weight_bias", COFI_PY_INT, AT(weight_bias), NULL},
    {"algorithm", COFI_PY_ENUM, AT(algorithm), algorithm_names},
    {"one_shot_bytes", COFI_PY_I64, AT(one_shot_bytes), NULL},
    {"max_ctas", COFI_PY_INT, AT(max_ctas), NULL},
    {NULL, COFI_PY_FLAG, 0, NULL},
};

static cof_status plan_create(cof_team *team, const void *params, cof_arena *arena,
                              cof_plan **plan_out)
{
    return cof_allreduce_rmsnorm_plan_create(team, params, arena, plan_out);
}

static cof_status workspace(cof_team *team, const void *params, cof_workspace_sizes *sizes_out)
{
    return cof_allreduce_rmsnorm_workspace(team, params, sizes_out);
}

_Static_assert(sizeof(cof_allreduce_rmsnorm_params) <= COFI_PY_PARAMS_BYTES,
               "room for the parameters");
static const struct cofi_py_operator operator_allreduce_rmsnorm = {
    fields, sizeof(cof_allreduce_rmsnorm_params), plan_create, workspace};

static PyObject *allreduce_rmsnorm_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    return cofi_py_plan_new(type, args, keywords, &operator_allreduce_rmsnorm);
}

PyObject *cofi_py_allreduce_rmsnorm_workspace(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    return cofi_py_plan_workspace(args, keywords, &operator_allreduce_rmsnorm);
}

static cof_status run(cof_plan *plan, const void *args, cof_stream stream)
{
    return cof_allreduce_rmsnorm_run(plan, args, stream);
}

/* None: ordinary memory. An offset: there in the plan's arena. */
static bool read_source(PyObject *object, int64_t *source)
{
    if (!object || object == Py_None)
        return true;
    long long offset = PyLong_AsLongLong(object);
    if (PyErr_Occurred())
        return false;
    if (offset < 0 || offset == INT64_MAX) {
        cofi_py_raise(COF_ERR_INVALID, "x_source = %lld: wanted an offset in the arena from 0 on",
                      offset);
        return false;
    }
    *source = COF_IN_ARENA(offset);
    return true;
}

static PyObject *allreduce_rmsnorm_run(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"x",        "residual", "weight", "residual_out",
                            "norm_out", "x_source", "stream", NULL};
    PyObject *x, *residual = NULL, *weight = NULL, *residual_out = NULL, *norm_out = NULL;
    PyObject *source = NULL, *stream = NULL;
    struct cofi_py_call call;
    cof_allreduce_rmsnorm_args a = COF_ALLREDUCE_RMSNORM_ARGS_INIT;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OOOOOO:run", names, &x, &residual,
                                     &weight, &residual_out, &norm_out, &source, &stream) ||
        !read_source(source, &a.x_source) || !cofi_py_call_begin(&call, self, stream))
        return NULL;
    bool ok = cofi_py_call_take(&call, x, "x", false, &a.x) &&
              cofi_py_call_take(&call, residual, "residual", false, &a.residual) &&
              cofi_py_call_take(&call, weight, "weight", false, &a.weight) &&
              cofi_py_call_take(&call, residual_out, "residual_out", true, &a.residual_out) &&
              cofi_py_call_take(&call, norm_out, "norm_out", true, &a.norm_out);
    return cofi_py_call_end(&call, ok, run, &a);
}

static PyMethodDef methods[] = {
    {"run", COFI_PY_KEYWORDS(allreduce_rmsnorm_run),
     "run(x, residual=None, weight=None, residual_out=None, norm_out=None, x_source=None,\n"
     "    stream=None)\n\n"
     "residual_out = x summed over the ranks + residual, norm_out = RMSNorm of it by weight;\n"
     "every rank of the team calls it with as many rows. All [T, H] (or more dims before H),\n"
     "weight [H]; residual_out may be residual and norm_out may be x. x_source: offset of x in\n"
     "the plan's arena, where x lies there. On CUDA devices a stream is named, as\n"
     "torch.cuda.current_stream(), and the call returns before its work is done."},
    COFI_PY_PLAN_DESTROY,
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getters[] = {COFI_PY_PLAN_GETTERS};
static PyType_Slot slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, allreduce_rmsnorm_new},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_doc,
     "AllreduceRmsnormPlan(team, *, dtype, hidden, max_tokens, variant=\"residual_norm\",\n"
     "                     eps=0.0, weight_dtype=None, weight_bias=0, rounding=\"match_unfused\",\n"
     "                     algorithm=\"auto\", one_shot_bytes=0, max_ctas=0, arena=None)\n\n"
     "All-reduce, residual and RMSNorm for rows of `hidden` elements; the number of rows is free\n"
     "per call. Collective."},
    {0, NULL},
};
PyType_Spec cofi_py_allreduce_rmsnorm_spec = {"cofuse.AllreduceRmsnormPlan",
                                              sizeof(struct cofi_py_object), 0, COFI_PY_FLAGS,
                                              slots};
