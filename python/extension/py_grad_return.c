/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans for the return of gradients. */
#include "py_plan.h"

#include <stddef.h>

static const char *const transfer_names[] = {"push", "pull", NULL};
static const char *const writers_names[] = {"all", "causal", "table", NULL};

/* Without `peers`, and what goes with them: their memory is not Python's to map. */
#define AT(field) offsetof(cof_grad_return_params, field)
static const struct cofi_py_field fields[] = {
    {"dtype", COFI_PY_DTYPE, AT(dtype), NULL},
    {"partial_f32", COFI_PY_FLAG, AT(partial_f32), NULL},
    {"wire_f32", COFI_PY_FLAG, AT(wire_f32), NULL},
    {"n_batch", COFI_PY_I64, AT(n_batch), NULL},
    {"n_rows", COFI_PY_I64, AT(n_rows), NULL},
    {"n_heads", COFI_PY_I64, AT(n_heads), NULL},
    {"head_dim_k", COFI_PY_I64, AT(head_dim_k), NULL},
    {"head_dim_v", COFI_PY_I64, AT(head_dim_v), NULL},
    {"layout", COFI_PY_ENUM, AT(layout), cofi_py_layout_names},
    {"chunking", COFI_PY_ENUM, AT(chunking), cofi_py_chunking_names},
    {"transfer", COFI_PY_ENUM, AT(transfer), transfer_names},
    {"by_section", COFI_PY_FLAG, AT(by_section), NULL},
    {"max_ctas", COFI_PY_INT, AT(max_ctas), NULL},
    {NULL, COFI_PY_FLAG, 0, NULL},
};

static cof_status plan_create(cof_team *team, const void *params, cof_arena *arena,
                              cof_plan **plan_out)
{
    return cof_grad_return_plan_create(team, params, arena, plan_out);
}

static cof_status workspace(cof_team *team, const void *params, cof_workspace_sizes *sizes_out)
{
    return cof_grad_return_workspace(team, params, sizes_out);
}

_Static_assert(sizeof(cof_grad_return_params) <= COFI_PY_PARAMS_BYTES, "room for the parameters");
static const struct cofi_py_operator operator_grad_return = {
    fields, sizeof(cof_grad_return_params), plan_create, workspace};

static PyObject *grad_return_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *made = cofi_py_plan_new(type, args, keywords, &operator_grad_return);
    struct cofi_py_object *plan = (struct cofi_py_object *)made;
    PyObject *layout = made && keywords ? PyDict_GetItemString(keywords, "layout") : NULL;
    int kind = COF_LAYOUT_ZIGZAG;
    if (layout)
        cofi_py_enum_read(layout, "layout", cofi_py_layout_names, &kind); /* has passed before */
    if (plan) {
        cof_layout l = {(cof_layout_kind)kind, COF_CHUNKING_BALANCED,
                        cof_team_size(plan->team->team_handle), 0};
        plan->n_chunks = (int)cof_layout_chunks(&l);
    }
    return made;
}

PyObject *cofi_py_grad_return_workspace(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    return cofi_py_plan_workspace(args, keywords, &operator_grad_return);
}

static cof_status run(cof_plan *plan, const void *args, cof_stream stream)
{
    return cof_grad_return_run(plan, args, stream);
}

/* A table as 64-bit numbers, with PyMem_Malloc; NULL with an exception. */
static uint64_t *read_table(PyObject *object, Py_ssize_t n_wanted)
{
    PyObject *list = PySequence_List(object);
    if (!list)
        return NULL;
    uint64_t *table = NULL;
    if (PyList_Size(list) != n_wanted)
        cofi_py_raise(COF_ERR_INVALID, "writer_table: %zd words, wanted %zd", PyList_Size(list),
                      n_wanted);
    else if (!(table = PyMem_Malloc((size_t)n_wanted * sizeof *table + 1)))
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; table && i < n_wanted; i++) {
        table[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(list, i));
        if (PyErr_Occurred()) {
            PyMem_Free(table);
            table = NULL;
        }
    }
    Py_DECREF(list);
    return table;
}

/* Words of the plan's table: chunks times words of a chunk. */
static Py_ssize_t table_words(const struct cofi_py_object *plan)
{
    return (Py_ssize_t)plan->n_chunks * ((cof_team_size(plan->team->team_handle) + 63) / 64);
}

static bool read_writers(const struct cofi_py_object *plan, PyObject *writers, PyObject *table,
                         cof_grad_return_args *args, uint64_t **words)
{
    int number = table && table != Py_None ? COF_WRITERS_TABLE : COF_WRITERS_ALL;
    if (writers && !cofi_py_enum_read(writers, "writers", writers_names, &number))
        return false;
    args->writers = (cof_writers)number;
    if (!table || table == Py_None)
        return true;
    args->writer_table = *words = read_table(table, table_words(plan));
    return *words;
}

static PyObject *grad_return_run(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"dk",      "dv",           "dk_out", "dv_out",
                            "writers", "writer_table", "stream", NULL};
    PyObject *dk, *dv, *dk_out = NULL, *dv_out = NULL, *writers = NULL, *table = NULL;
    PyObject *stream = NULL;
    struct cofi_py_call call;
    cof_grad_return_args a = COF_GRAD_RETURN_ARGS_INIT;
    uint64_t *words = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|OOOOO:run", names, &dk, &dv, &dk_out,
                                     &dv_out, &writers, &table, &stream) ||
        !cofi_py_call_begin(&call, self, stream))
        return NULL;
    bool ok = read_writers(call.plan, writers, table, &a, &words) &&
              cofi_py_call_take(&call, dk, "dk", false, &a.dk) &&
              cofi_py_call_take(&call, dv, "dv", false, &a.dv) &&
              cofi_py_call_take(&call, dk_out, "dk_out", true, &a.dk_out) &&
              cofi_py_call_take(&call, dv_out, "dv_out", true, &a.dv_out);
    PyObject *result = cofi_py_call_end(&call, ok, run, &a);
    PyMem_Free(words); /* read when the call was queued */
    return result;
}

static PyMethodDef methods[] = {
    {"run", COFI_PY_KEYWORDS(grad_return_run),
     "run(dk, dv, dk_out=None, dv_out=None, writers=\"all\", writer_table=None, stream=None)\n\n"
     "dk_out, dv_out [S_local, B, Hkv, D]: sums over the ranks' partials dk, dv [S, B, Hkv, D], "
     "in the order of global rows; by_section: [S_local of the owner, B, Hkv, D], owners rank-1, "
     "rank-2, ..., rank, and outputs in the last call of a whole only. writers: \"all\", "
     "\"causal\", or a table of 64-bit words, the same on all ranks. On CUDA devices a stream is "
     "named, as torch.cuda.current_stream()."},
    COFI_PY_PLAN_DESTROY,
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getters[] = {COFI_PY_PLAN_GETTERS};
static PyType_Slot slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, grad_return_new},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_doc,
     "GradReturnPlan(team, *, dtype, n_batch, n_rows, n_heads, head_dim_k, head_dim_v=0,\n"
     "               layout=\"zigzag\", chunking=\"balanced\", transfer=\"push\",\n"
     "               partial_f32=False, wire_f32=False, by_section=False, max_ctas=0,\n"
     "               arena=None)\n\n"
     "Return of dK and dV to the owners of their rows, for fixed shapes. Collective."},
    {0, NULL},
};
PyType_Spec cofi_py_grad_return_spec = {"cofuse.GradReturnPlan", sizeof(struct cofi_py_object), 0,
                                        COFI_PY_FLAGS, slots};
