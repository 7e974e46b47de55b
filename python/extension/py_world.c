/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Worlds and the caller's all-gather. */
#include "py_common.h"

static const char *const engine_names[] = {"default", "thread", "shm", "cuda", NULL};

/* ---- the caller's all-gather ---------------------------------------------------------------- */

struct gather {
    PyObject *callable;
    int n_ranks;
    PyObject *error[3]; /* what it raised: that is the exception to be seen */
};

static bool copy_parts(PyObject *parts, int n_ranks, char *dst, size_t bytes)
{
    PyObject *list = PySequence_List(parts);
    if (!list)
        return false;
    bool ok = PyList_Size(list) == n_ranks;
    if (!ok)
        PyErr_Format(PyExc_ValueError, "allgather: returned %zd parts, wanted %d",
                     PyList_Size(list), n_ranks);
    for (int r = 0; ok && r < n_ranks; r++) {
        char *part;
        Py_ssize_t n;
        ok = PyBytes_AsStringAndSize(PyList_GetItem(list, r), &part, &n) == 0;
        if (ok && (size_t)n != bytes) {
            PyErr_Format(PyExc_ValueError, "allgather: part %d has %zd bytes, wanted %zu", r, n,
                         bytes);
            ok = false;
        }
        if (ok)
            memcpy(dst + (size_t)r * bytes, part, bytes);
    }
    Py_DECREF(list);
    return ok;
}

static int call_gather(void *ctx, const void *src, void *dst, size_t bytes)
{
    struct gather *gather = ctx;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *own = PyBytes_FromStringAndSize(src, (Py_ssize_t)bytes);
    PyObject *parts = own ? PyObject_CallFunctionObjArgs(gather->callable, own, NULL) : NULL;
    bool ok = parts && copy_parts(parts, gather->n_ranks, dst, bytes);
    if (!ok)
        PyErr_Fetch(&gather->error[0], &gather->error[1], &gather->error[2]);
    Py_XDECREF(own);
    Py_XDECREF(parts);
    PyGILState_Release(state);
    return ok ? 0 : 1;
}

/* ---- worlds --------------------------------------------------------------------------------- */

static bool create(struct cofi_py_object *w, const cof_world_options *options,
                   struct gather *gather)
{
    cof_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cof_world_create(options, &w->world_handle);
    Py_END_ALLOW_THREADS
    w->is_open = status == COF_OK;
    if (gather->error[0])
        PyErr_Restore(gather->error[0], gather->error[1], gather->error[2]);
    else if (status != COF_OK)
        cofi_py_fail(status);
    return !PyErr_Occurred();
}

static PyObject *make_team(struct cofi_py_object *w)
{
    struct cofi_py_object *t =
        cofi_py_new(cofi_py_types[COFI_PY_TEAM], COFI_PY_TEAM, w, NULL, NULL);
    if (!t)
        return NULL;
    t->team_handle = cof_world_team(w->world_handle);
    t->is_borrowed = t->is_open = true;
    return (PyObject *)t;
}

/* A device as the text that the library takes, a new reference: its number, or its UUID. */
static PyObject *device_text(PyObject *device)
{
    bool is_number = PyLong_Check(device) && !PyBool_Check(device);
    if (!is_number && !PyUnicode_Check(device))
        return PyErr_Format(PyExc_TypeError, "device: %R, wanted a number, a UUID or None", device);
    PyObject *text = PyObject_Str(device);
    PyObject *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    Py_XDECREF(text);
    return bytes;
}

static struct cofi_py_object *open_world(PyTypeObject *type, const cof_world_options *options,
                                         struct gather *gather)
{
    struct cofi_py_object *w = cofi_py_new(type, COFI_PY_WORLD, NULL, NULL, NULL);
    if (w && (!create(w, options, gather) || !(w->below = make_team(w))))
        Py_CLEAR(w);
    else if (w)
        w->device = cof_world_device(w->world_handle);
    return w;
}

static PyObject *world_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"rank",         "size",        "job",       "engine", "n_threads",
                            "init_timeout", "run_timeout", "allgather", "device", "max_ctas",
                            NULL};
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    PyObject *engine = Py_None, *device = Py_None, *text = NULL;
    struct gather gather = {.callable = Py_None};
    int number = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$iizOiddOOi:World", names, &options.rank,
                                     &options.n_ranks, &options.job, &engine, &options.n_threads,
                                     &options.init_timeout, &options.run_timeout,
                                     &gather.callable, &device, &options.max_ctas) ||
        !cofi_py_enum_read(engine, "engine", engine_names, &number) ||
        (device != Py_None && !(text = device_text(device))))
        return NULL;
    options.engine = (cof_engine)number;
    options.device = text ? PyBytes_AsString(text) : NULL;
    gather.n_ranks = options.n_ranks;
    if (gather.callable != Py_None && options.n_ranks > 1) {
        options.allgather = call_gather;
        options.allgather_ctx = &gather;
    }
    struct cofi_py_object *w = open_world(type, &options, &gather);
    Py_XDECREF(text);
    return (PyObject *)w;
}

/* ---- methods -------------------------------------------------------------------------------- */

static PyObject *world_team(PyObject *self, void *unused)
{
    struct cofi_py_object *w = (struct cofi_py_object *)self;
    (void)unused;
    if (!w->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "world: destroyed");
    Py_INCREF(w->below);
    return w->below;
}

static PyObject *world_rank(PyObject *self, void *unused)
{
    struct cofi_py_object *w = (struct cofi_py_object *)self;
    (void)unused;
    if (!w->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "world: destroyed");
    return PyLong_FromLong(cof_world_rank(w->world_handle));
}

static PyObject *world_size(PyObject *self, void *unused)
{
    struct cofi_py_object *w = (struct cofi_py_object *)self;
    (void)unused;
    if (!w->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "world: destroyed");
    return PyLong_FromLong(cof_world_size(w->world_handle));
}

static PyObject *world_engine(PyObject *self, void *unused)
{
    struct cofi_py_object *w = (struct cofi_py_object *)self;
    (void)unused;
    if (!w->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "world: destroyed");
    return PyUnicode_FromString(cof_world_engine(w->world_handle));
}

static PyObject *world_device(PyObject *self, void *unused)
{
    struct cofi_py_object *w = (struct cofi_py_object *)self;
    (void)unused;
    if (!w->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "world: destroyed");
    if (w->device < 0)
        Py_RETURN_NONE;
    return PyLong_FromLong(w->device);
}

/* A list of world ranks as ints, with malloc; NULL with an exception. */
static int *read_ranks(PyObject *object, int *n_out)
{
    PyObject *list = PySequence_List(object);
    if (!list)
        return NULL;
    Py_ssize_t n = PyList_Size(list);
    int *ranks = PyMem_Malloc((size_t)(n ? n : 1) * sizeof *ranks);
    for (Py_ssize_t i = 0; ranks && i < n; i++) {
        long rank = PyLong_AsLong(PyList_GetItem(list, i));
        if (rank == -1 && PyErr_Occurred()) {
            PyMem_Free(ranks);
            ranks = NULL;
        } else {
            ranks[i] = rank < -1 || rank > INT32_MAX ? -1 : (int)rank; /* -1 is refused later */
        }
    }
    Py_DECREF(list);
    if (!ranks && !PyErr_Occurred())
        PyErr_NoMemory();
    *n_out = (int)n;
    return ranks;
}

static PyObject *world_team_from_ranks(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"ranks", "tag", NULL};
    struct cofi_py_object *w = (struct cofi_py_object *)self;
    PyObject *list;
    unsigned long long tag = 0;
    int n;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|K:team_from_ranks", names, &list, &tag))
        return NULL;
    int *ranks = read_ranks(list, &n);
    if (!ranks)
        return NULL;
    struct cofi_py_object *t = NULL;
    if (cofi_py_enter_collective(w)) {
        cof_status status = COF_OK;
        t = cofi_py_new(cofi_py_types[COFI_PY_TEAM], COFI_PY_TEAM, w, NULL, NULL);
        if (t) {
            Py_BEGIN_ALLOW_THREADS
            status = cof_team_create(w->world_handle, ranks, n, tag, &t->team_handle);
            Py_END_ALLOW_THREADS
            t->is_open = status == COF_OK;
        }
        if (status != COF_OK) {
            cofi_py_fail(status);
            Py_CLEAR(t);
        }
        cofi_py_leave_collective(w);
    }
    PyMem_Free(ranks);
    return (PyObject *)t;
}

static PyObject *world_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_INCREF(self);
    return self;
}

static PyMethodDef world_methods[] = {
    {"team_from_ranks", COFI_PY_KEYWORDS(world_team_from_ranks),
     "team_from_ranks(ranks, tag=0) -> Team\n\nThe team of these world ranks, in this order. Its "
     "members call it, the other ranks do not."},
    {"close", cofi_py_close, METH_NOARGS,
     "close()\n\nRuns queued calls to their end, then destroys all objects of the world and "
     "leaves it. Local: ranks that still need this one meet it in Team.barrier() before."},
    {"__enter__", world_enter, METH_NOARGS, NULL},
    {"__exit__", cofi_py_close, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef world_getters[] = {
    {"rank", world_rank, NULL, "This rank, 0 .. size-1.", NULL},
    {"size", world_size, NULL, "Number of ranks.", NULL},
    {"engine", world_engine, NULL, "How ranks share memory: \"thread\", \"shm\", \"cuda\".",
     NULL},
    {"device", world_device, NULL, "The CUDA device, as this process numbers it; None on CPUs.",
     NULL},
    {"team", world_team, NULL, "The team of all ranks, in order.", NULL},
    {"is_open", cofi_py_is_open, NULL, "False once closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot world_slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, world_new},
    {Py_tp_methods, world_methods},
    {Py_tp_getset, world_getters},
    {Py_tp_doc, "World(*, rank=0, size=0, job=None, engine=None, n_threads=0, init_timeout=0, "
                "run_timeout=0, allgather=None, device=None, max_ctas=0)\n\nMembership of a "
                "job; cofuse.init() makes it. With size = 0 the environment says which rank of "
                "which job this is."},
    {0, NULL},
};
PyType_Spec cofi_py_world_spec = {"cofuse.World", sizeof(struct cofi_py_object), 0, COFI_PY_FLAGS,
                                  world_slots};
