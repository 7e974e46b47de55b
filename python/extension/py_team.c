/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Teams and arenas. */
#include "py_common.h"

/* ---- teams ---------------------------------------------------------------------------------- */

static struct cofi_py_object *new_team(struct cofi_py_object *world)
{
    return cofi_py_new(cofi_py_types[COFI_PY_TEAM], COFI_PY_TEAM, world, NULL, NULL);
}

static PyObject *team_split(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"inner", NULL};
    struct cofi_py_object *t = (struct cofi_py_object *)self;
    int n_inner;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i:split", names, &n_inner) ||
        !cofi_py_enter_collective(t))
        return NULL;
    struct cofi_py_object *inner = new_team(t->world), *outer = new_team(t->world);
    PyObject *both = NULL;
    if (inner && outer) {
        cof_status status;
        Py_BEGIN_ALLOW_THREADS
        status = cof_team_split(t->team_handle, n_inner, &inner->team_handle, &outer->team_handle);
        Py_END_ALLOW_THREADS
        inner->is_open = outer->is_open = status == COF_OK;
        both = status == COF_OK ? PyTuple_Pack(2, (PyObject *)inner, (PyObject *)outer)
                                : cofi_py_fail(status);
    }
    Py_XDECREF((PyObject *)inner);
    Py_XDECREF((PyObject *)outer);
    cofi_py_leave_collective(t);
    return both;
}

static PyObject *team_barrier(PyObject *self, PyObject *unused)
{
    struct cofi_py_object *t = (struct cofi_py_object *)self;
    cof_status status;
    (void)unused;
    if (!cofi_py_enter_collective(t))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cof_team_barrier(t->team_handle);
    Py_END_ALLOW_THREADS
    if (status != COF_OK)
        cofi_py_fail(status);
    cofi_py_leave_collective(t);
    if (status != COF_OK)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *cut_parts(const char *bytes, int n, Py_ssize_t part_bytes)
{
    PyObject *list = PyList_New(n);
    for (int r = 0; list && r < n; r++) {
        PyObject *part = PyBytes_FromStringAndSize(bytes + r * part_bytes, part_bytes);
        if (!part || PyList_SetItem(list, r, part) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *team_allgather(PyObject *self, PyObject *arg)
{
    struct cofi_py_object *t = (struct cofi_py_object *)self;
    char *own;
    Py_ssize_t n;
    if (PyBytes_AsStringAndSize(arg, &own, &n) < 0 || !cofi_py_enter_collective(t))
        return NULL;
    int n_ranks = cof_team_size(t->team_handle);
    PyObject *list = NULL;
    /* More than the limit is refused below, before anything is written. */
    char *all = PyMem_Malloc(n > 1 << 20 ? 1 : (size_t)n_ranks * (size_t)n + 1);
    if (all) {
        cof_status status;
        Py_BEGIN_ALLOW_THREADS
        status = cof_team_allgather(t->team_handle, own, all, (size_t)n);
        Py_END_ALLOW_THREADS
        list = status == COF_OK ? cut_parts(all, n_ranks, n) : cofi_py_fail(status);
    } else {
        PyErr_NoMemory();
    }
    PyMem_Free(all);
    cofi_py_leave_collective(t);
    return list;
}

static PyObject *team_query(PyObject *self, PyObject *unused)
{
    struct cofi_py_object *t = (struct cofi_py_object *)self;
    (void)unused;
    if (!cofi_py_enter(t))
        return NULL;
    cof_status status = cof_team_query(t->team_handle);
    cofi_py_leave(t);
    if (status != COF_OK)
        return cofi_py_fail(status);
    Py_RETURN_NONE;
}

static PyObject *team_number(PyObject *self, int (*get)(const cof_team *))
{
    struct cofi_py_object *t = (struct cofi_py_object *)self;
    if (!t->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "team: destroyed");
    return PyLong_FromLong(get(t->team_handle));
}

static PyObject *team_rank(PyObject *self, void *unused)
{
    (void)unused;
    return team_number(self, cof_team_rank);
}

static PyObject *team_size(PyObject *self, void *unused)
{
    (void)unused;
    return team_number(self, cof_team_size);
}

static PyObject *team_plans(PyObject *self, void *unused)
{
    struct cofi_py_object *t = (struct cofi_py_object *)self;
    (void)unused;
    if (!t->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "team: destroyed");
    if (!t->below && !(t->below = PyDict_New()))
        return NULL;
    Py_INCREF(t->below);
    return t->below;
}

static PyMethodDef team_methods[] = {
    {"split", COFI_PY_KEYWORDS(team_split),
     "split(inner) -> (Team, Team)\n\nThe team of this rank's group of `inner` consecutive ranks, "
     "and that of the ranks with the same place in their groups. Collective."},
    {"barrier", team_barrier, METH_NOARGS,
     "barrier()\n\nWaits until all ranks of the team have called it."},
    {"allgather", team_allgather, METH_O,
     "allgather(data) -> list of bytes\n\nThe bytes (at most 1 MiB, as many on all ranks) of every "
     "rank, in rank order. Collective."},
    {"query", team_query, METH_NOARGS,
     "query()\n\nRaises the first error found of the team, of a rank that has left, or of an "
     "arena. Waits for nothing."},
    {"destroy", cofi_py_close, METH_NOARGS,
     "destroy()\n\nLets go of the team, after its plans and arenas."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef team_getters[] = {
    {"rank", team_rank, NULL, "This rank within the team.", NULL},
    {"size", team_size, NULL, "Number of ranks of the team.", NULL},
    {"is_open", cofi_py_is_open, NULL, "False once destroyed.", NULL},
    {"_plans", team_plans, NULL, "Plans of the functional forms, by parameters.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot team_slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, cofi_py_no_new},
    {Py_tp_methods, team_methods},
    {Py_tp_getset, team_getters},
    {Py_tp_doc, "An ordered subset of a world's ranks: World.team, World.team_from_ranks(), "
                "Team.split()."},
    {0, NULL},
};
PyType_Spec cofi_py_team_spec = {"cofuse.Team", sizeof(struct cofi_py_object), 0, COFI_PY_FLAGS,
                                 team_slots};

/* ---- arenas --------------------------------------------------------------------------------- */

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"team", "n_bytes", "n_words", NULL};
    PyObject *team_arg;
    Py_ssize_t n_bytes;
    int n_words = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "On|i:Arena", names, &team_arg, &n_bytes,
                                     &n_words))
        return NULL;
    struct cofi_py_object *t = cofi_py_cast(team_arg, COFI_PY_TEAM, "team");
    if (!t)
        return NULL;
    if (n_bytes < 0)
        return cofi_py_raise(COF_ERR_INVALID, "n_bytes = %zd: wanted 0 or more", n_bytes);
    if (!cofi_py_enter_collective(t))
        return NULL;
    struct cofi_py_object *a = cofi_py_new(type, COFI_PY_ARENA, t->world, t, NULL);
    cof_status status = COF_OK;
    if (a) {
        Py_BEGIN_ALLOW_THREADS
        status = cof_arena_create(t->team_handle, (size_t)n_bytes, n_words, &a->arena_handle);
        Py_END_ALLOW_THREADS
        a->is_open = status == COF_OK;
    }
    if (status != COF_OK) {
        cofi_py_fail(status);
        Py_CLEAR(a);
    }
    cofi_py_leave_collective(t);
    return (PyObject *)a;
}

static PyObject *arena_alloc(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"n_bytes", NULL};
    struct cofi_py_object *a = (struct cofi_py_object *)self;
    Py_ssize_t n_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "n:alloc", names, &n_bytes))
        return NULL;
    if (n_bytes < 0)
        return cofi_py_raise(COF_ERR_INVALID, "n_bytes = %zd: wanted 1 or more", n_bytes);
    if (!cofi_py_enter_collective(a))
        return NULL;
    size_t offset;
    cof_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cof_arena_alloc(a->arena_handle, (size_t)n_bytes, &offset);
    Py_END_ALLOW_THREADS
    PyObject *result = status == COF_OK ? PyLong_FromSize_t(offset) : cofi_py_fail(status);
    cofi_py_leave_collective(a);
    return result;
}

static PyObject *addresses(void *const *pointers, int n)
{
    PyObject *list = PyList_New(n);
    for (int r = 0; list && r < n; r++) {
        PyObject *address = PyLong_FromVoidPtr(pointers[r]);
        if (!address || PyList_SetItem(list, r, address) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *arena_view(PyObject *self, PyObject *unused)
{
    struct cofi_py_object *a = (struct cofi_py_object *)self;
    cof_arena_pointers p = COF_ARENA_POINTERS_INIT;
    (void)unused;
    if (!cofi_py_enter(a))
        return NULL;
    cof_status status = cof_arena_view(a->arena_handle, &p);
    PyObject *result =
        status == COF_OK
            ? Py_BuildValue("{s:i,s:i,s:n,s:N,s:N,s:i,s:n}", "rank", p.rank, "n_ranks", p.n_ranks,
                            "n_bytes", (Py_ssize_t)p.bytes, "base", addresses(p.base, p.n_ranks),
                            "words", addresses(p.words, p.n_ranks), "n_words", p.n_words,
                            "word_stride", (Py_ssize_t)p.word_stride)
            : cofi_py_fail(status);
    cofi_py_leave(a);
    return result;
}

static PyObject *arena_n_bytes(PyObject *self, void *unused)
{
    struct cofi_py_object *a = (struct cofi_py_object *)self;
    (void)unused;
    if (!a->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "arena: destroyed");
    return PyLong_FromSize_t(cof_arena_bytes(a->arena_handle));
}

static PyMethodDef arena_methods[] = {
    {"alloc", COFI_PY_KEYWORDS(arena_alloc),
     "alloc(n_bytes) -> int\n\nSets bytes of every rank's data aside and returns their offset. "
     "Collective, while no call on the arena runs."},
    {"view", arena_view, METH_NOARGS,
     "view() -> dict\n\nAddresses as ints, by rank (0 where a peer is not mapped), valid until the "
     "arena is destroyed: base, words; and rank, n_ranks, n_bytes, n_words, word_stride."},
    {"destroy", cofi_py_close, METH_NOARGS,
     "destroy()\n\nLets go of the arena, after the plans on it."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef arena_getters[] = {
    {"n_bytes", arena_n_bytes, NULL, "Bytes of data per rank.", NULL},
    {"is_open", cofi_py_is_open, NULL, "False once destroyed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot arena_slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, arena_new},
    {Py_tp_methods, arena_methods},
    {Py_tp_getset, arena_getters},
    {Py_tp_doc, "Arena(team, n_bytes, n_words=0)\n\nSymmetric memory for several plans: n_bytes "
                "bytes per rank, zeroed. Collective."},
    {0, NULL},
};
PyType_Spec cofi_py_arena_spec = {"cofuse.Arena", sizeof(struct cofi_py_object), 0, COFI_PY_FLAGS,
                                  arena_slots};
