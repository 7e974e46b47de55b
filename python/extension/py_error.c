/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One exception class per status. */
#include "py_common.h"

#include <stdarg.h>
#include <stdio.h>

static PyObject *base_error;

static struct {
    cof_status status;
    const char *name, *doc;
    PyObject **builtin; /* the class of Python's own that it also is */
    PyObject *type;
} classes[] = {
    {COF_ERR_INVALID, "InvalidArgument", "An argument breaks its rule; nothing was changed.",
     &PyExc_ValueError, NULL},
    {COF_ERR_UNSUPPORTED, "Unsupported", "A legal request that this version refuses.",
     &PyExc_NotImplementedError, NULL},
    {COF_ERR_NOMEM, "OutOfMemory", "Some rank has no memory for it; none keeps anything.",
     &PyExc_MemoryError, NULL},
    {COF_ERR_MISMATCH, "Mismatch", "The ranks disagree; the text has both values.", NULL, NULL},
    {COF_ERR_TIMEOUT, "Timeout", "A deadline has passed; the text names whom it waited for.",
     &PyExc_TimeoutError, NULL},
    {COF_ERR_POISONED, "Poisoned", "An earlier failure has ended the arena on all ranks.", NULL,
     NULL},
    {COF_ERR_BUSY, "Busy", "A stream's queue stayed full until the deadline.", NULL, NULL},
    {COF_ERR_PEER_DEAD, "PeerDead", "A rank of the team is gone.", NULL, NULL},
    {COF_ERR_SYSTEM, "SystemFailure", "The operating system refused something.", NULL, NULL},
    {COF_ERR_INTERNAL, "InternalError", "An error of Cofuse itself.", NULL, NULL},
};
enum { N_CLASSES = sizeof classes / sizeof classes[0] };

static PyObject *make_class(const char *name, const char *doc, PyObject *bases, cof_status status)
{
    char full_name[64];
    snprintf(full_name, sizeof full_name, "cofuse.%s", name);
    PyObject *dict = Py_BuildValue("{s:i,s:s}", "status", (int)status, "name",
                                   cof_status_name(status));
    if (!dict)
        return NULL;
    PyObject *type = PyErr_NewExceptionWithDoc(full_name, doc, bases, dict);
    Py_DECREF(dict);
    return type;
}

static bool add_class(PyObject *module, int i)
{
    PyObject *bases = classes[i].builtin
                          ? PyTuple_Pack(2, base_error, *classes[i].builtin)
                          : PyTuple_Pack(1, base_error);
    if (!bases)
        return false;
    classes[i].type = make_class(classes[i].name, classes[i].doc, bases, classes[i].status);
    Py_DECREF(bases);
    if (!classes[i].type)
        return false;
    Py_INCREF(classes[i].type);
    return PyModule_AddObject(module, classes[i].name, classes[i].type) == 0;
}

bool cofi_py_errors_add(PyObject *module)
{
    base_error = make_class("Error",
                            "What Cofuse raises: `status` is the number, `name` the C name of the "
                            "status, and the text says what was found.",
                            NULL, COF_ERR_INTERNAL);
    if (!base_error)
        return false;
    Py_INCREF(base_error);
    if (PyModule_AddObject(module, "Error", base_error) < 0)
        return false;
    for (int i = 0; i < N_CLASSES; i++)
        if (!add_class(module, i))
            return false;
    return true;
}

static PyObject *set(cof_status status, const char *text)
{
    PyObject *type = base_error;
    for (int i = 0; i < N_CLASSES; i++)
        if (classes[i].status == status)
            type = classes[i].type;
    /* A text may hold a path of any bytes. */
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message) {
        PyErr_SetObject(type, message);
        Py_DECREF(message);
    }
    return NULL;
}

PyObject *cofi_py_fail(cof_status status)
{
    return set(status, cof_last_error());
}

PyObject *cofi_py_raise(cof_status status, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return set(status, text);
}
