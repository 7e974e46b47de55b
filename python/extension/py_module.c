/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The module, and the index functions of a layout. */
#include "py_common.h"

const char *const cofi_py_layout_names[] = {"zigzag", "contiguous", NULL};
const char *const cofi_py_chunking_names[] = {"balanced", "padded", NULL};
const char *const cofi_py_mask_names[] = {"none", "causal", NULL};

PyTypeObject *cofi_py_attention_type, *cofi_py_grad_return_type, *cofi_py_allreduce_rmsnorm_type,
    *cofi_py_trimul_type;

/* ---- layouts -------------------------------------------------------------------------------- */

static int64_t layout_number(const cof_layout *l, const char *what, int64_t a, int64_t b)
{
    int rank = a >= 0 && a <= INT32_MAX ? (int)a : -1;
    static const char *const names[] = {"chunks",      "halves",      "chunk",      "chunk_owner",
                                        "chunk_half",  "chunk_start", "chunk_rows", "local_rows",
                                        "valid_rows",  "half_start",  "global_row", "owner",
                                        "local_row",   NULL};
    int i = 0;
    int half = b == 0 || b == 1 ? (int)b : -1;
    while (names[i] && strcmp(names[i], what) != 0)
        i++;
    switch (i) {
    case 0: return cof_layout_chunks(l);
    case 1: return cof_layout_halves(l);
    case 2: return cof_layout_chunk(l, rank, half);
    case 3: return cof_layout_chunk_owner(l, a);
    case 4: return cof_layout_chunk_half(l, a);
    case 5: return cof_layout_chunk_start(l, a);
    case 6: return cof_layout_chunk_rows(l, a);
    case 7: return cof_layout_local_rows(l, rank);
    case 8: return cof_layout_valid_rows(l, rank);
    case 9: return cof_layout_half_start(l, rank, half);
    case 10: return cof_layout_global_row(l, rank, b);
    case 11: return cof_layout_owner(l, a);
    case 12: return cof_layout_local_row(l, a);
    default: return -1;
    }
}

/* layout(what, kind, chunking, n_ranks, n_rows, a, b), for cofuse.Layout. */
static PyObject *layout_call(PyObject *module, PyObject *args)
{
    const char *what;
    PyObject *kind, *chunking;
    int kind_number = 0, chunking_number = 0;
    cof_layout layout = {.n_ranks = 0};
    long long n_rows, a = 0, b = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "sOOiL|LL:layout", &what, &kind, &chunking, &layout.n_ranks,
                          &n_rows, &a, &b) ||
        !cofi_py_enum_read(kind, "layout", cofi_py_layout_names, &kind_number) ||
        !cofi_py_enum_read(chunking, "chunking", cofi_py_chunking_names, &chunking_number))
        return NULL;
    layout.kind = (cof_layout_kind)kind_number;
    layout.chunking = (cof_chunking)chunking_number;
    layout.n_rows = n_rows;
    return PyLong_FromLongLong(layout_number(&layout, what, a, b));
}

/* ---- the module ----------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"attention_workspace", COFI_PY_KEYWORDS(cofi_py_attention_workspace),
     "attention_workspace(team, **params) -> dict\n\nBytes that an AttentionPlan with these "
     "parameters would hold: local, symmetric, saved, words."},
    {"grad_return_workspace", COFI_PY_KEYWORDS(cofi_py_grad_return_workspace),
     "grad_return_workspace(team, **params) -> dict\n\nThe same of a GradReturnPlan."},
    {"allreduce_rmsnorm_workspace", COFI_PY_KEYWORDS(cofi_py_allreduce_rmsnorm_workspace),
     "allreduce_rmsnorm_workspace(team, **params) -> dict\n\nThe same of an "
     "AllreduceRmsnormPlan."},
    {"trimul_workspace", COFI_PY_KEYWORDS(cofi_py_trimul_workspace),
     "trimul_workspace(team, **params) -> dict\n\nThe same of a TrimulPlan."},
    {"trimul_block", COFI_PY_KEYWORDS(cofi_py_trimul_block),
     "trimul_block(n_ranks, rank, n, /, **params) -> (row, n_rows, col, n_cols)\n\n"
     "The block of a rank in a call with n rows, of a TrimulPlan with these parameters."},
    {"trimul_import_rows", COFI_PY_KEYWORDS(cofi_py_trimul_import_rows),
     "trimul_import_rows(src, dst, order=\"stacked\", swap_ab=False)\n\n"
     "Copies p_in, g_in or a bias of theirs from a checkpoint's order of rows (\"interleaved\": a\n"
     "and b in turn) to that of set_weights. swap_ab: they change places."},
    {"_layout", layout_call, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "cofuse._cofuse",
    .m_doc = "The C part of cofuse.",
    .m_size = -1,
    .m_methods = functions,
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (!type)
        return NULL;
    Py_INCREF(type); /* one reference for the module, one for the pointers here */
    if (PyModule_AddObject(module, strchr(spec->name, '.') + 1, type) < 0)
        return NULL;
    return (PyTypeObject *)type;
}

static bool add_types(PyObject *module)
{
    cofi_py_types[COFI_PY_WORLD] = add_type(module, &cofi_py_world_spec);
    cofi_py_types[COFI_PY_TEAM] = add_type(module, &cofi_py_team_spec);
    cofi_py_types[COFI_PY_ARENA] = add_type(module, &cofi_py_arena_spec);
    cofi_py_types[COFI_PY_STREAM] = add_type(module, &cofi_py_stream_spec);
    cofi_py_event_type = add_type(module, &cofi_py_event_spec);
    cofi_py_attention_type = add_type(module, &cofi_py_attention_spec);
    cofi_py_grad_return_type = add_type(module, &cofi_py_grad_return_spec);
    cofi_py_allreduce_rmsnorm_type = add_type(module, &cofi_py_allreduce_rmsnorm_spec);
    cofi_py_trimul_type = add_type(module, &cofi_py_trimul_spec);
    return !PyErr_Occurred();
}

__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit__cofuse(void);

PyMODINIT_FUNC PyInit__cofuse(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (!cofi_py_tensors_init() || !cofi_py_errors_add(module) || !add_types(module) ||
        PyModule_AddStringConstant(module, "__version__", cof_version()) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
