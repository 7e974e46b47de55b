/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Tensors by DLPack, without a header of anybody: the C exchange table of the type where it has
 * one (DLPack 1.3), else a call of __dlpack__. Either way the exporter hands out a managed tensor,
 * which keeps memory, shape and strides until it is released, whatever becomes of the object. */
#include "py_common.h"

#define FLAG_READ_ONLY 1u /* of struct versioned */

struct version {
    uint32_t major, minor;
};

struct versioned {
    struct version version;
    void *manager_ctx;
    void (*deleter)(struct versioned *self);
    uint64_t flags;
    cof_tensor tensor;
};

struct legacy {
    cof_tensor tensor;
    void *manager_ctx;
    void (*deleter)(struct legacy *self);
};

struct exchange {
    struct version version;
    struct exchange *previous;
    void *allocate;
    int (*from_object)(void *object, struct versioned **out);
    /* more follows, of no use here */
};

/* What is known of the types seen last: a look-up by name costs more than the export itself. */
#define N_KNOWN 16
struct known {
    PyTypeObject *type; /* counted */
    const struct exchange *exchange;
    PyObject *to_dlpack; /* torch without a table: its function, which costs less than the method */
    bool is_unversioned; /* its __dlpack__ does not know max_version */
};
static struct known known_types[N_KNOWN];
static int next_known;

static PyObject *dlpack_text, *device_text, *exchange_text, *requires_grad_text, *no_args;
/* The first has no stream, as NumPy wants it. The second is for devices: a stream of -1 makes no
 * order between streams, of which the call names its own. */
static PyObject *versioned_keywords, *unordered_keywords;

bool cofi_py_tensors_init(void)
{
    dlpack_text = PyUnicode_InternFromString("__dlpack__");
    device_text = PyUnicode_InternFromString("__dlpack_device__");
    exchange_text = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    requires_grad_text = PyUnicode_InternFromString("requires_grad");
    no_args = PyTuple_New(0);
    versioned_keywords = Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
    unordered_keywords = Py_BuildValue("{s:(ii),s:i}", "max_version", 1, 0, "stream", -1);
    return dlpack_text && device_text && exchange_text && requires_grad_text && no_args &&
           versioned_keywords && unordered_keywords;
}

static const struct exchange *find_exchange(PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, exchange_text);
    const struct exchange *exchange = NULL;
    if (capsule && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* the table lives as long as the process */
    PyErr_Clear();
    while (exchange && exchange->version.major > 1)
        exchange = exchange->previous;
    return exchange && exchange->version.major == 1 && exchange->from_object ? exchange : NULL;
}

/* torch.utils.dlpack.to_dlpack for its tensors; the reference is never given back. */
static PyObject *find_to_dlpack(PyTypeObject *type)
{
    PyObject *modules = PyImport_GetModuleDict();
    PyObject *torch = PyDict_GetItemString(modules, "torch");
    PyObject *dlpack = PyDict_GetItemString(modules, "torch.utils.dlpack");
    PyObject *tensor = torch && dlpack ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    PyObject *function = NULL;
    if (tensor && PyObject_IsSubclass((PyObject *)type, tensor) == 1)
        function = PyObject_GetAttrString(dlpack, "to_dlpack");
    Py_XDECREF(tensor);
    PyErr_Clear();
    return function;
}

static struct known *know(PyTypeObject *type)
{
    for (int i = 0; i < N_KNOWN; i++)
        if (known_types[i].type == type)
            return &known_types[i];
    const struct exchange *exchange = find_exchange(type); /* may run code of the type's */
    PyObject *to_dlpack = exchange ? NULL : find_to_dlpack(type);
    struct known *known = &known_types[next_known];
    next_known = (next_known + 1) % N_KNOWN;
    PyTypeObject *before = known->type;
    Py_INCREF((PyObject *)type);
    *known = (struct known){type, exchange, to_dlpack, false};
    Py_XDECREF((PyObject *)before);
    return known;
}

static void release_versioned(void *managed)
{
    struct versioned *m = managed;
    if (m->deleter)
        m->deleter(m);
}

static void release_legacy(void *managed)
{
    struct legacy *m = managed;
    if (m->deleter)
        m->deleter(m);
}

static bool take_versioned(struct versioned *managed, const char *name, bool is_output,
                           struct cofi_py_tensor *tensor)
{
    *tensor = (struct cofi_py_tensor){managed->tensor, managed, release_versioned};
    if (managed->version.major == 1 && !(is_output && managed->flags & FLAG_READ_ONLY))
        return true;
    if (managed->version.major != 1)
        cofi_py_raise(COF_ERR_INVALID, "%s: DLPack %u.%u, wanted 1.x", name,
                      managed->version.major, managed->version.minor);
    else
        cofi_py_raise(COF_ERR_INVALID, "%s: read-only, and an output", name);
    cofi_py_tensor_release(tensor);
    return false;
}

static bool take_capsule(PyObject *capsule, const char *name, bool is_output,
                         struct cofi_py_tensor *tensor)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        struct versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        PyCapsule_SetName(capsule, "used_dltensor_versioned");
        return take_versioned(managed, name, is_output, tensor);
    }
    struct legacy *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (!managed)
        return false;
    PyCapsule_SetName(capsule, "used_dltensor");
    *tensor = (struct cofi_py_tensor){managed->tensor, managed, release_legacy};
    return true;
}

/* An exporter's own exception, with the argument's name in front. */
static bool explain(const char *name)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    if (text)
        PyErr_Format(type, "%s: %U", name, text);
    else
        PyErr_Restore(type, value, trace);
    if (text) {
        Py_DECREF(text);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
    return false;
}

static bool is_on_device(PyObject *object)
{
    PyObject *method = PyObject_GetAttr(object, device_text);
    PyObject *pair = method ? PyObject_CallObject(method, NULL) : NULL;
    PyObject *type = pair ? PySequence_GetItem(pair, 0) : NULL;
    bool is = type && PyLong_AsLong(type) == COF_DEVICE_CUDA;
    Py_XDECREF(type);
    Py_XDECREF(pair);
    Py_XDECREF(method);
    PyErr_Clear();
    return is;
}

static PyObject *call_dlpack(PyObject *object, PyTypeObject *type, const char *name,
                             bool may_be_cuda)
{
    PyObject *method = PyObject_GetAttr(object, dlpack_text);
    if (!method) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: %R is no tensor (it has no __dlpack__)", name, type);
        return NULL;
    }
    bool is_cuda = may_be_cuda && is_on_device(object);
    PyObject *keywords = is_cuda ? unordered_keywords : versioned_keywords;
    struct known *known = know(type);
    PyObject *capsule = NULL;
    if (!known->is_unversioned) {
        capsule = PyObject_Call(method, no_args, keywords);
        if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* older than DLPack 1.0, most likely: without, it says what is wrong */
            know(type)->is_unversioned = true;
        }
    }
    if (!capsule && !PyErr_Occurred())
        capsule = PyObject_CallObject(method, NULL);
    Py_DECREF(method);
    if (!capsule)
        explain(name);
    return capsule;
}

/* Where a shorter way leaves out a rule of __dlpack__: no gradient is lost unnoticed. */
static bool check_gradient(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttr(object, requires_grad_text);
    if (!value)
        PyErr_Clear();
    bool wanted = value == Py_True;
    Py_XDECREF(value);
    if (wanted)
        cofi_py_raise(COF_ERR_INVALID, "%s: requires a gradient, which is not computed here; pass "
                                       "detach() of it", name);
    return !wanted;
}

bool cofi_py_tensor_get(PyObject *object, const char *name, bool is_output, bool may_be_cuda,
                        struct cofi_py_tensor *tensor)
{
    PyTypeObject *type = Py_TYPE(object);
    struct known known = *know(type);
    if ((known.exchange || known.to_dlpack) && !check_gradient(object, name))
        return false;
    if (known.exchange) {
        struct versioned *managed = NULL;
        if (known.exchange->from_object(object, &managed) != 0)
            return explain(name);
        return take_versioned(managed, name, is_output, tensor);
    }
    PyObject *capsule = known.to_dlpack
                            ? PyObject_CallFunctionObjArgs(known.to_dlpack, object, NULL)
                            : call_dlpack(object, type, name, may_be_cuda);
    if (!capsule)
        return known.to_dlpack ? explain(name) : false;
    bool taken = take_capsule(capsule, name, is_output, tensor);
    Py_DECREF(capsule);
    return taken;
}

void cofi_py_tensor_release(struct cofi_py_tensor *tensor)
{
    if (tensor->managed)
        tensor->release(tensor->managed);
    tensor->managed = NULL;
}
