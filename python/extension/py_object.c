/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Life of the objects: references upwards, closing, the garbage collector.
 *
 * Closing works in three steps. First nothing may be in use by a call of another thread, one that
 * closes among them. Then all that is to be closed is marked, so that no call begins on it while
 * the GIL is away, and the streams that have queued calls for any of it run empty. Then the handles
 * go: streams, plans, arenas, teams, the world. An object that nobody refers to any more has
 * nothing below it and is in no queue, as both would refer to it: it goes at once. Streams that
 * wait for each other do refer to each other: the garbage collector runs them empty first. */
#include "py_common.h"

#include <stdlib.h>

PyTypeObject *cofi_py_types[COFI_PY_WORLD + 1]; /* that of a plan depends on its operator */
static const char *const kind_names[] = {"stream", "plan", "arena", "team", "world"};

/* ---- making --------------------------------------------------------------------------------- */

static void link_to_world(struct cofi_py_object *o)
{
    struct cofi_py_object *w = o->world;
    o->next = w->next;
    o->previous = w;
    if (w->next)
        w->next->previous = o;
    w->next = o;
}

static void unlink_from_world(struct cofi_py_object *o)
{
    if (o->previous)
        o->previous->next = o->next;
    if (o->next)
        o->next->previous = o->previous;
    o->next = o->previous = NULL;
}

struct cofi_py_object *cofi_py_new(PyTypeObject *type, enum cofi_py_kind kind,
                                   struct cofi_py_object *world, struct cofi_py_object *team,
                                   struct cofi_py_object *arena)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct cofi_py_object *o = (struct cofi_py_object *)alloc(type, 0);
    if (!o)
        return NULL;
    Py_XINCREF((PyObject *)world);
    Py_XINCREF((PyObject *)team);
    Py_XINCREF((PyObject *)arena);
    o->kind = kind;
    o->world = world;
    o->team = team;
    o->arena = arena;
    if (world)
        link_to_world(o);
    return o;
}

PyObject *cofi_py_no_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    return PyErr_Format(PyExc_TypeError, "%R is made by a method, not by its class", type);
}

struct cofi_py_object *cofi_py_cast(PyObject *object, enum cofi_py_kind kind, const char *name)
{
    if (Py_TYPE(object) == cofi_py_types[kind])
        return (struct cofi_py_object *)object;
    PyErr_Format(PyExc_TypeError, "%s: %R, wanted a %s", name, Py_TYPE(object), kind_names[kind]);
    return NULL;
}

/* ---- use ------------------------------------------------------------------------------------ */

bool cofi_py_enter(struct cofi_py_object *o)
{
    if (!o->is_open) {
        cofi_py_raise(COF_ERR_INVALID, "%s: destroyed", kind_names[o->kind]);
        return false;
    }
    o->n_users++;
    Py_INCREF((PyObject *)o);
    return true;
}

void cofi_py_leave(struct cofi_py_object *o)
{
    o->n_users--;
    Py_DECREF((PyObject *)o);
}

bool cofi_py_run_begin(struct cofi_py_object *o)
{
    if (o->is_running) {
        cofi_py_raise(COF_ERR_INVALID, "%s: two threads use it at once, one at a time may",
                      kind_names[o->kind]);
        return false;
    }
    o->is_running = true;
    return true;
}

void cofi_py_run_end(struct cofi_py_object *o)
{
    o->is_running = false;
}

static struct cofi_py_object *world_of(struct cofi_py_object *o)
{
    return o->kind == COFI_PY_WORLD ? o : o->world;
}

bool cofi_py_enter_collective(struct cofi_py_object *o)
{
    struct cofi_py_object *world = world_of(o);
    if (!cofi_py_enter(o))
        return false;
    if (world->is_in_collective) {
        cofi_py_leave(o);
        cofi_py_raise(COF_ERR_INVALID, "another thread is in a collective call of this world");
        return false;
    }
    world->is_in_collective = true;
    return true;
}

void cofi_py_leave_collective(struct cofi_py_object *o)
{
    world_of(o)->is_in_collective = false;
    cofi_py_leave(o);
}

PyObject *cofi_py_is_open(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((struct cofi_py_object *)self)->is_open);
}

/* ---- closing -------------------------------------------------------------------------------- */

/* Not in a child of fork: calls on what it inherited are refused, and CUDA is not to be touched. */
static bool may_call(const struct cofi_py_object *world)
{
    return cof_team_query(cof_world_team(world->world_handle)) != COF_ERR_INVALID;
}

/* Until the calls on the caller's CUDA streams have run, which no queue of ours knows of. */
static void wait_for_callers_streams(struct cofi_py_object *plan)
{
    PyObject *handles = plan->below ? PyDict_Keys(plan->below) : NULL;
    if (handles && may_call(plan->world)) {
        for (Py_ssize_t i = 0; i < PyList_Size(handles); i++) {
            PyObject *handle = PyList_GetItem(handles, i);
            cof_stream stream = {COF_STREAM_KIND_CUDA, PyLong_AsVoidPtr(handle)};
            if (PyDict_Contains(plan->below, handle) != 1)
                continue; /* gone meanwhile: forget_stream */
            Py_BEGIN_ALLOW_THREADS
            cof_stream_sync(stream);
            Py_END_ALLOW_THREADS
        }
    }
    Py_XDECREF(handles);
    PyErr_Clear();
}

/* The number of a stream that is gone may be that of a new one, or of none. */
static void forget_stream(const struct cofi_py_object *stream)
{
    PyObject *key = PyLong_FromVoidPtr(stream->stream_handle.handle);
    for (struct cofi_py_object *o = stream->world; key && o; o = o->next)
        if (o->kind == COFI_PY_PLAN && o->below && PyDict_Contains(o->below, key) == 1) {
            PyDict_DelItem(o->below, key);
            o->stream_handle = COF_STREAM_NOW; /* so that the next one is looked at */
        }
    Py_XDECREF(key);
    PyErr_Clear();
}

static void close_device_stream(struct cofi_py_object *stream)
{
    if (may_call(stream->world)) /* it would leave its work to run on without its tensors */
        cofi_py_drain(stream);
    forget_stream(stream);
}

/* Lets go of the handle. The stream's threads end after the queued calls have run. */
static void destroy_handle(struct cofi_py_object *o)
{
    switch (o->kind) {
    case COFI_PY_STREAM:
        if (o->stream_handle.kind == COF_STREAM_KIND_CUDA)
            close_device_stream(o);
        Py_BEGIN_ALLOW_THREADS
        cof_stream_destroy(o->stream_handle);
        Py_END_ALLOW_THREADS
        cofi_py_hold_release(o);
        break;
    case COFI_PY_PLAN:
        wait_for_callers_streams(o);
        cof_plan_destroy(o->plan_handle);
        break;
    case COFI_PY_ARENA:
        cof_arena_destroy(o->arena_handle);
        break;
    case COFI_PY_TEAM:
        if (!o->is_borrowed)
            cof_team_destroy(o->team_handle);
        break;
    case COFI_PY_WORLD:
        Py_BEGIN_ALLOW_THREADS
        cof_world_destroy(o->world_handle);
        Py_END_ALLOW_THREADS
        break;
    }
}

static bool depends(const struct cofi_py_object *o, const struct cofi_py_object *on)
{
    return o == on || o->world == on || o->team == on || o->arena == on;
}

/* Some of a world's objects, counted. */
struct set {
    struct cofi_py_object **items;
    int n;
};

typedef bool wanted_fn(const struct cofi_py_object *, const void *);

/* One that is not open any more is in use until its handle is gone. It may have no references left,
 * so that it is only looked at. */
static bool is_unused(struct cofi_py_object *world, wanted_fn *wanted, const void *arg)
{
    for (struct cofi_py_object *o = world; o; o = o->next)
        if (o->n_users && wanted(o, arg)) {
            cofi_py_raise(COF_ERR_INVALID, "%s: a call of another thread is in it",
                          kind_names[o->kind]);
            return false;
        }
    return true;
}

/* The open ones that are wanted; false with an exception where one is in use. */
static bool set_of(struct set *set, struct cofi_py_object *world, wanted_fn *wanted,
                   const void *arg)
{
    int n = 0;
    if (!is_unused(world, wanted, arg))
        return false;
    for (struct cofi_py_object *o = world; o; o = o->next)
        n++;
    *set = (struct set){malloc((size_t)n * sizeof *set->items), 0};
    if (!set->items) {
        PyErr_NoMemory();
        return false;
    }
    for (struct cofi_py_object *o = world; o; o = o->next)
        if (o->is_open && wanted(o, arg)) {
            Py_INCREF((PyObject *)o);
            set->items[set->n++] = o;
        }
    return true;
}

static void set_free(struct set *set)
{
    for (int i = 0; i < set->n; i++)
        Py_DECREF((PyObject *)set->items[i]);
    free(set->items);
}

static bool is_below(const struct cofi_py_object *o, const void *top)
{
    return depends(o, top);
}

/* A stream with a queued call that needs something of the set, itself apart. */
static bool is_queue_of(const struct cofi_py_object *o, const void *set_arg)
{
    const struct set *set = set_arg;
    for (int i = 0; o->kind == COFI_PY_STREAM && i < set->n; i++)
        if (cofi_py_holds(o, set->items[i]))
            return true;
    return false;
}

static void close_all(const struct set *closing, const struct set *queues)
{
    for (int i = 0; i < closing->n; i++) {
        closing->items[i]->is_open = false;
        closing->items[i]->n_users++;
    }
    for (int i = 0; i < queues->n; i++) {
        queues->items[i]->n_users++;
        cofi_py_drain(queues->items[i]); /* its error is for who syncs it */
        queues->items[i]->n_users--;
    }
    for (int kind = COFI_PY_STREAM; kind <= COFI_PY_WORLD; kind++)
        for (int i = 0; i < closing->n; i++)
            if ((int)closing->items[i]->kind == kind)
                destroy_handle(closing->items[i]);
    for (int i = 0; i < closing->n; i++)
        closing->items[i]->n_users--;
    for (int i = 0; i < closing->n; i++)
        Py_CLEAR(closing->items[i]->below);
}

PyObject *cofi_py_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct cofi_py_object *o = (struct cofi_py_object *)self, *world = world_of(o);
    struct set closing, queues;
    if (!o->is_open)
        Py_RETURN_NONE;
    if (o->is_borrowed)
        return cofi_py_raise(COF_ERR_INVALID, "team: the world's own, which goes with the world");
    if (!set_of(&closing, world, is_below, o))
        return NULL;
    bool ok = set_of(&queues, world, is_queue_of, &closing);
    if (ok) {
        close_all(&closing, &queues);
        set_free(&queues);
    }
    set_free(&closing);
    if (!ok)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- the garbage collector ------------------------------------------------------------------ */

int cofi_py_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct cofi_py_object *o = (struct cofi_py_object *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)o->world);
    Py_VISIT((PyObject *)o->team);
    Py_VISIT((PyObject *)o->arena);
    Py_VISIT(o->below);
    for (int i = 0; i < o->n_held; i++)
        Py_VISIT(o->held[o->first_held + i].object);
    return 0;
}

/* Before the collector clears anything: a plan's record of the caller's streams is a dict like any
 * other, and may be empty when the plan's own end comes to wait for them. */
void cofi_py_finalize(PyObject *self)
{
    struct cofi_py_object *o = (struct cofi_py_object *)self;
    PyObject *error_type, *error, *trace;
    if (o->kind != COFI_PY_PLAN || !o->is_open)
        return;
    PyErr_Fetch(&error_type, &error, &trace);
    o->n_users++;
    wait_for_callers_streams(o);
    o->n_users--;
    PyErr_Restore(error_type, error, trace);
}

/* The stream is out of everybody's reach, so that nothing more is queued. What it holds is let go
 * of when its queue has passed it. */
static void run_empty(struct cofi_py_object *stream)
{
    stream->n_users++;
    if (may_call(stream->world))
        cofi_py_drain(stream);
    else
        cofi_py_hold_release(stream); /* a child of fork, where nothing of it runs */
    stream->n_users--;
}

/* Every cycle has a reference downwards or a stream's in it; those upwards stay until the object
 * itself goes, so that what is below goes first. */
int cofi_py_clear(PyObject *self)
{
    struct cofi_py_object *o = (struct cofi_py_object *)self;
    if (o->kind == COFI_PY_STREAM && o->is_open)
        run_empty(o);
    if (o->kind != COFI_PY_PLAN) /* its end waits for these streams */
        Py_CLEAR(o->below);
    return 0;
}

void cofi_py_dealloc(PyObject *self)
{
    struct cofi_py_object *o = (struct cofi_py_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject *error_type, *error, *trace;
    PyObject_GC_UnTrack(self);
    PyErr_Fetch(&error_type, &error, &trace);
    bool was_open = o->is_open;
    o->is_open = false; /* nobody refers to it, but the world's list has it */
    o->n_users = was_open;
    if (o->kind != COFI_PY_PLAN)
        Py_CLEAR(o->below);
    if (was_open)
        destroy_handle(o);
    if (o->kind != COFI_PY_WORLD)
        unlink_from_world(o);
    Py_CLEAR(o->below);
    free(o->held);
    Py_CLEAR(o->arena);
    Py_CLEAR(o->team);
    Py_CLEAR(o->world);
    PyErr_Restore(error_type, error, trace);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF((PyObject *)type);
}
