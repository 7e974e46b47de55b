/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Parameters from keywords, plans, and their calls. */
#include "py_plan.h"

/* ---- parameters ----------------------------------------------------------------------------- */

bool cofi_py_is_name(PyObject *key, const char *name)
{
    return PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, name) == 0;
}

static bool append_name(PyObject **text, const char *name)
{
    PyObject *longer = PyUnicode_FromFormat(PyUnicode_GetLength(*text) ? "%U, %s" : "%U%s", *text,
                                            name);
    Py_DECREF(*text);
    *text = longer;
    return longer;
}

static PyObject *list_names(const char *const *names)
{
    PyObject *text = PyUnicode_FromString("");
    for (int i = 0; text && names[i]; i++)
        append_name(&text, names[i]);
    return text;
}

bool cofi_py_enum_read(PyObject *object, const char *name, const char *const *names, int *out)
{
    if (object == Py_None)
        return true;
    if (PyLong_Check(object)) { /* the library refuses what is out of range */
        long number = PyLong_AsLong(object);
        *out = number < INT32_MIN || number > INT32_MAX ? -1 : (int)number;
        return !(number == -1 && PyErr_Occurred());
    }
    for (int i = 0; names[i]; i++)
        if (cofi_py_is_name(object, names[i])) {
            *out = i;
            return true;
        }
    PyObject *wanted = list_names(names);
    PyObject *text = NULL;
    if (wanted)
        text = PyUnicode_FromFormat("%s = %R: wanted one of %U", name, object, wanted);
    PyObject *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    if (bytes)
        cofi_py_raise(COF_ERR_INVALID, "%s", PyBytes_AsString(bytes));
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    Py_XDECREF(wanted);
    return false;
}

/* "bf16", "bfloat16", torch.bfloat16, numpy.float32, numpy.dtype("f4"): by what it is called. */
static bool read_dtype(PyObject *object, cof_dtype *out)
{
    PyObject *text = PyObject_Str(object), *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    const char *name = bytes ? PyBytes_AsString(bytes) : NULL;
    bool found = true;
    if (!name)
        found = false;
    else if (strstr(name, "bfloat16") || strcmp(name, "bf16") == 0)
        *out = COF_BF16;
    else if (strstr(name, "float16") || strcmp(name, "f16") == 0)
        *out = COF_F16;
    else if (strstr(name, "float32") || strcmp(name, "f32") == 0)
        *out = COF_F32;
    else
        found = false;
    if (name && !found)
        cofi_py_raise(COF_ERR_INVALID, "dtype = %s: wanted bf16, f16 or f32", name);
    Py_XDECREF(text);
    Py_XDECREF(bytes);
    return found;
}

/* More than a grid has parts. What the sequence lacks is -1, which no offset is. */
enum { MAX_OFFSETS = 512 };

static bool read_offsets(PyObject *value, const char *name, const int64_t **out)
{
    Py_ssize_t n = PySequence_Size(value);
    if (n < 0)
        return false;
    if (n > MAX_OFFSETS || *out) {
        cofi_py_raise(COF_ERR_INVALID, "%s: %lld of them, wanted at most %d", name, (long long)n,
                      MAX_OFFSETS);
        return false;
    }
    int64_t *offsets = PyMem_Malloc((MAX_OFFSETS + 1) * sizeof *offsets);
    if (!offsets) {
        PyErr_NoMemory();
        return false;
    }
    *out = offsets;
    for (Py_ssize_t i = 0; i <= MAX_OFFSETS; i++) {
        PyObject *item = i < n ? PySequence_GetItem(value, i) : NULL;
        offsets[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            return false;
    }
    return true;
}

static bool read_field(PyObject *value, const struct cofi_py_field *field, char *params)
{
    void *at = params + field->offset;
    int number = 0;
    switch (field->kind) {
    case COFI_PY_FLAG:
        number = PyObject_IsTrue(value);
        *(int *)at = number;
        return number >= 0;
    case COFI_PY_INT: {
        long long wide = PyLong_AsLongLong(value);
        if (wide < INT32_MIN || wide > INT32_MAX) {
            PyErr_Format(PyExc_OverflowError, "%s = %R: wanted 32 bits", field->name, value);
            return false;
        }
        *(int *)at = (int)wide;
        return !PyErr_Occurred();
    }
    case COFI_PY_I64:
        *(int64_t *)at = PyLong_AsLongLong(value);
        return !PyErr_Occurred();
    case COFI_PY_FLOAT:
        *(float *)at = (float)PyFloat_AsDouble(value);
        return !PyErr_Occurred();
    case COFI_PY_DOUBLE:
        *(double *)at = PyFloat_AsDouble(value);
        return !PyErr_Occurred();
    case COFI_PY_DTYPE:
        return read_dtype(value, at);
    case COFI_PY_ENUM:
        if (!cofi_py_enum_read(value, field->name, field->names, &number))
            return false;
        *(int *)at = number; /* enums have the size of int */
        return true;
    case COFI_PY_OFFSETS: return read_offsets(value, field->name, at);
    }
    return false;
}

static const struct cofi_py_field *find_field(PyObject *key, const struct cofi_py_field *fields)
{
    for (const struct cofi_py_field *field = fields; field->name; field++)
        if (cofi_py_is_name(key, field->name))
            return field;
    PyObject *names = PyUnicode_FromString("");
    for (const struct cofi_py_field *field = fields; names && field->name; field++)
        append_name(&names, field->name);
    if (names)
        PyErr_Format(PyExc_TypeError, "no parameter %R; there are %U", key, names);
    Py_XDECREF(names);
    return NULL;
}

bool cofi_py_fields_read(PyObject *keywords, const struct cofi_py_field *fields, void *params)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (keywords && PyDict_Next(keywords, &at, &key, &value)) {
        if (cofi_py_is_name(key, "arena"))
            continue;
        const struct cofi_py_field *field = find_field(key, fields);
        if (!field || (value != Py_None && !read_field(value, field, params)))
            return false;
    }
    return true;
}

void cofi_py_fields_free(const struct cofi_py_field *fields, void *params)
{
    for (const struct cofi_py_field *field = fields; field->name; field++)
        if (field->kind == COFI_PY_OFFSETS) {
            int64_t **at = (int64_t **)((char *)params + field->offset);
            PyMem_Free(*at);
            *at = NULL;
        }
}

/* ---- plans ---------------------------------------------------------------------------------- */

/* A params struct, aligned for any. */
union params {
    size_t size;
    int64_t alignment;
    char bytes[COFI_PY_PARAMS_BYTES];
};

static struct cofi_py_object *read_arguments(PyObject *args, PyObject *keywords,
                                             const struct cofi_py_operator *op,
                                             union params *params, struct cofi_py_object **arena)
{
    PyObject *team = NULL;
    memset(params, 0, sizeof *params);
    params->size = op->params_size;
    if (!PyArg_ParseTuple(args, "O", &team) ||
        !cofi_py_fields_read(keywords, op->fields, params->bytes))
        return NULL;
    PyObject *named = keywords ? PyDict_GetItemString(keywords, "arena") : NULL;
    *arena = NULL;
    if (named && named != Py_None && !(*arena = cofi_py_cast(named, COFI_PY_ARENA, "arena")))
        return NULL;
    return cofi_py_cast(team, COFI_PY_TEAM, "team");
}

static PyObject *make_plan(PyTypeObject *type, struct cofi_py_object *team,
                           struct cofi_py_object *arena, const union params *params,
                           const struct cofi_py_operator *op)
{
    struct cofi_py_object *plan = NULL;
    if (!team || (arena && !cofi_py_enter(arena)))
        return NULL;
    if (cofi_py_enter_collective(team)) {
        cof_status status = COF_OK;
        plan = cofi_py_new(type, COFI_PY_PLAN, team->world, team, arena);
        if (plan) {
            cof_arena *handle = arena ? arena->arena_handle : NULL;
            Py_BEGIN_ALLOW_THREADS
            status = op->plan_create(team->team_handle, params, handle, &plan->plan_handle);
            Py_END_ALLOW_THREADS
            plan->is_open = status == COF_OK;
        }
        if (status != COF_OK) {
            cofi_py_fail(status);
            Py_CLEAR(plan);
        }
        cofi_py_leave_collective(team);
    }
    if (arena)
        cofi_py_leave(arena);
    return (PyObject *)plan;
}

PyObject *cofi_py_plan_new(PyTypeObject *type, PyObject *args, PyObject *keywords,
                           const struct cofi_py_operator *op)
{
    union params params;
    struct cofi_py_object *arena = NULL;
    struct cofi_py_object *team = read_arguments(args, keywords, op, &params, &arena);
    PyObject *plan = make_plan(type, team, arena, &params, op);
    cofi_py_fields_free(op->fields, &params);
    return plan;
}

PyObject *cofi_py_plan_workspace(PyObject *args, PyObject *keywords,
                                 const struct cofi_py_operator *op)
{
    union params params;
    struct cofi_py_object *arena, *team = read_arguments(args, keywords, op, &params, &arena);
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_status status = COF_OK;
    bool entered = team && cofi_py_enter(team);
    if (entered) {
        status = op->workspace(team->team_handle, &params, &sizes);
        cofi_py_leave(team);
    }
    cofi_py_fields_free(op->fields, &params);
    if (!entered)
        return NULL;
    if (status != COF_OK)
        return cofi_py_fail(status);
    return Py_BuildValue("{s:n,s:n,s:n,s:n}", "local", (Py_ssize_t)sizes.local, "symmetric",
                         (Py_ssize_t)sizes.symmetric, "saved", (Py_ssize_t)sizes.saved, "words",
                         (Py_ssize_t)sizes.words);
}

PyObject *cofi_py_plan_describe(PyObject *self, void *unused)
{
    struct cofi_py_object *plan = (struct cofi_py_object *)self;
    (void)unused;
    if (!plan->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "plan: destroyed");
    return PyUnicode_FromString(cof_plan_describe(plan->plan_handle));
}

/* ---- calls ---------------------------------------------------------------------------------- */

/* Makes the plan's end wait for the caller's stream, which is kept until then. */
static bool remember(struct cofi_py_object *plan, PyObject *stream, void *handle)
{
    if (plan->stream_handle.kind == COF_STREAM_KIND_CUDA && plan->stream_handle.handle == handle)
        return true;
    PyObject *key = PyLong_FromVoidPtr(handle);
    if (key && !plan->below)
        plan->below = PyDict_New();
    bool ok = key && plan->below && PyDict_SetItem(plan->below, key, stream) == 0;
    Py_XDECREF(key);
    if (ok)
        plan->stream_handle = (cof_stream){COF_STREAM_KIND_CUDA, handle};
    return ok;
}

/* On devices None would be a trap: the call would not wait for what the caller's streams still
 * have to write. */
static bool take_no_stream(struct cofi_py_call *call, PyObject *stream)
{
    bool is_named = stream && stream != Py_None;
    if (!is_named && call->plan->world->device >= 0) {
        cofi_py_raise(COF_ERR_INVALID,
                      "stream: None on a world of CUDA devices: wanted torch.cuda.current_stream() "
                      "or the like, a cofuse.Stream, or \"now\" (for tensors that are ready)");
        return false;
    }
    call->handle = COF_STREAM_NOW;
    return true;
}

static bool take_stream(struct cofi_py_call *call, PyObject *stream)
{
    void *handle = NULL;
    if (!stream || stream == Py_None || cofi_py_is_name(stream, "now"))
        return take_no_stream(call, stream);
    if (Py_TYPE(stream) != cofi_py_types[COFI_PY_STREAM]) {
        if (!cofi_py_cuda_stream(stream, &handle))
            return false;
        call->handle = (cof_stream){COF_STREAM_KIND_CUDA, handle};
        return call->plan->world->device < 0 || remember(call->plan, stream, handle);
    }
    call->stream = (struct cofi_py_object *)stream;
    if (call->stream->world != call->plan->world) {
        cofi_py_raise(COF_ERR_INVALID, "stream: of another world than the plan");
        return false;
    }
    call->handle = call->stream->stream_handle;
    return true;
}

bool cofi_py_call_begin(struct cofi_py_call *call, PyObject *plan, PyObject *stream)
{
    call->plan = (struct cofi_py_object *)plan;
    call->stream = NULL;
    call->n_tensors = 0;
    if (!take_stream(call, stream))
        return false;
    if (!cofi_py_enter(call->plan))
        return false;
    if (!call->stream)
        return true;
    if (cofi_py_enter(call->stream)) {
        if (cofi_py_hold_reserve(call->stream))
            return true;
        cofi_py_leave(call->stream);
    }
    cofi_py_leave(call->plan);
    return false;
}

bool cofi_py_call_take(struct cofi_py_call *call, PyObject *object, const char *name,
                       bool is_output, const cof_tensor **out)
{
    struct cofi_py_tensor *tensor = &call->tensors[call->n_tensors];
    *out = NULL;
    if (!object || object == Py_None)
        return true; /* the library knows what may be left out */
    bool may_be_cuda = call->plan->world->device >= 0;
    if (call->n_tensors == COFI_PY_MAX_TENSORS) { /* keys that are no plain str may be equal */
        cofi_py_raise(COF_ERR_INVALID, "%s: given more than once", name);
        return false;
    }
    if (!cofi_py_tensor_get(object, name, is_output, may_be_cuda, tensor))
        return false;
    call->n_tensors++;
    *out = &tensor->view;
    return true;
}

static bool run_begin(const struct cofi_py_call *call)
{
    if (!cofi_py_run_begin(call->plan))
        return false;
    if (!call->stream || cofi_py_run_begin(call->stream))
        return true;
    cofi_py_run_end(call->plan);
    return false;
}

PyObject *cofi_py_call_end(struct cofi_py_call *call, bool ok, cofi_py_run_fn run, const void *args)
{
    cof_status status = COF_OK;
    ok = ok && run_begin(call);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        status = run(call->plan->plan_handle, args, call->handle);
        Py_END_ALLOW_THREADS
        cofi_py_run_end(call->plan);
        if (call->stream)
            cofi_py_run_end(call->stream);
        if (status != COF_OK)
            cofi_py_fail(status);
    }
    /* A call that failed half-way has part of its work in the queue. On the caller's own CUDA
     * stream tensors are free at once, as after any other work there: their library orders that. */
    bool is_held = ok && call->stream && status != COF_ERR_INVALID;
    if (is_held)
        cofi_py_hold(call->stream, (PyObject *)call->plan, call->tensors, call->n_tensors);
    else if (call->stream)
        cofi_py_hold_cancel(call->stream);
    for (int i = 0; !is_held && i < call->n_tensors; i++)
        cofi_py_tensor_release(&call->tensors[i]);
    if (call->stream)
        cofi_py_leave(call->stream);
    cofi_py_leave(call->plan);
    if (!ok || status != COF_OK)
        return NULL;
    Py_RETURN_NONE;
}
