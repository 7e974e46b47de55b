/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the plans of all operators share. */
#ifndef COFI_PY_PLAN_H
#define COFI_PY_PLAN_H

#include "py_common.h"

/* An operator, as far as making a plan goes. `params` begins with its size, set by the caller. */
struct cofi_py_operator {
    const struct cofi_py_field *fields;
    size_t params_size;
    cof_status (*plan_create)(cof_team *team, const void *params, cof_arena *arena,
                              cof_plan **plan_out);
    cof_status (*workspace)(cof_team *team, const void *params, cof_workspace_sizes *sizes_out);
};
#define COFI_PY_PARAMS_BYTES 256

/* Class(team, arena=None, **params) and workspace(team, **params). */
PyObject *cofi_py_plan_new(PyTypeObject *type, PyObject *args, PyObject *keywords,
                           const struct cofi_py_operator *op);
PyObject *cofi_py_plan_workspace(PyObject *args, PyObject *keywords,
                                 const struct cofi_py_operator *op);

PyObject *cofi_py_plan_describe(PyObject *self, void *unused);
#define COFI_PY_PLAN_DESTROY                                                                       \
    {"destroy", cofi_py_close, METH_NOARGS,                                                        \
     "destroy()\n\nFrees the plan, after queued calls of it have run."}
#define COFI_PY_PLAN_GETTERS                                                                       \
    {"describe", cofi_py_plan_describe, NULL, "One line: operator, shapes, kernels.", NULL},       \
        {"is_open", cofi_py_is_open, NULL, "False once destroyed.", NULL},                         \
    {                                                                                              \
        NULL, NULL, NULL, NULL, NULL                                                               \
    }

/* A call of a plan: its tensors and its stream. */
struct cofi_py_call {
    struct cofi_py_object *plan, *stream; /* stream: NULL unless it is one of ours */
    cof_stream handle;
    int n_tensors;
    struct cofi_py_tensor tensors[COFI_PY_MAX_TENSORS];
};

/* Begin checks plan and stream; after it, end has to be called. Both, and take, leave an exception
 * when they fail. */
bool cofi_py_call_begin(struct cofi_py_call *call, PyObject *plan, PyObject *stream);
bool cofi_py_call_take(struct cofi_py_call *call, PyObject *object, const char *name,
                       bool is_output, const cof_tensor **out);
/* Runs `run` without the GIL, unless `ok` is false; the tensors live as long as the work. */
typedef cof_status (*cofi_py_run_fn)(cof_plan *plan, const void *args, cof_stream stream);
PyObject *cofi_py_call_end(struct cofi_py_call *call, bool ok, cofi_py_run_fn run,
                           const void *args);

#endif
