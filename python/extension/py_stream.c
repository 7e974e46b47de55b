/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Streams, events, and the tensors that queued calls need. */
#include "py_common.h"

#include <stdlib.h>

/* A stream's queue holds 256 calls (cofuse/stream.h): once 257 came after one, it has run. */
#define QUEUE_CALLS 256

/* ---- held tensors --------------------------------------------------------------------------- */

static struct cofi_py_held *oldest(const struct cofi_py_object *s)
{
    return &s->held[s->first_held];
}

/* For one call more than are held or reserved. */
static bool make_room(struct cofi_py_object *s)
{
    if (s->first_held + s->n_held + s->n_reserved < s->held_room)
        return true;
    if (s->first_held <= s->held_room / 2) {
        int room = s->held_room ? 2 * s->held_room : 16;
        struct cofi_py_held *grown = realloc(s->held, (size_t)room * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return false;
        }
        s->held = grown;
        s->held_room = room;
    } else {
        memmove(s->held, oldest(s), (size_t)s->n_held * sizeof *s->held);
        s->first_held = 0;
    }
    return true;
}

bool cofi_py_hold_reserve(struct cofi_py_object *s)
{
    if (!make_room(s))
        return false;
    s->n_reserved++;
    return true;
}

void cofi_py_hold_cancel(struct cofi_py_object *s)
{
    s->n_reserved--;
}

/* Lets go of the calls up to this one of the queue. Each is off the list before anything of
 * Python's runs, which may come back here. */
static void release_up_to(struct cofi_py_object *s, uint64_t sequence)
{
    while (s->n_held && oldest(s)->sequence <= sequence) {
        struct cofi_py_held held = *oldest(s);
        s->first_held++;
        s->n_held--;
        for (int i = 0; i < held.n_tensors; i++)
            cofi_py_tensor_release(&held.tensors[i]);
        Py_DECREF(held.object);
    }
}

void cofi_py_hold_release(struct cofi_py_object *s)
{
    release_up_to(s, UINT64_MAX);
}

static bool is_of_device(const struct cofi_py_object *s)
{
    return s->stream_handle.kind == COF_STREAM_KIND_CUDA;
}

/* The end of what has been queued. A CUDA stream does not tell how far it is: there calls are just
 * counted, and what they need is kept until somebody waits for the stream. */
static cof_status sequence_of(const struct cofi_py_object *s, uint64_t *sequence_out)
{
    cof_event event;
    *sequence_out = s->n_device_calls;
    if (is_of_device(s))
        return COF_OK;
    cof_status status = cof_event_record(s->stream_handle, &event);
    if (status == COF_OK)
        *sequence_out = event.sequence;
    return status;
}

void cofi_py_hold(struct cofi_py_object *s, PyObject *object, struct cofi_py_tensor *tensors,
                  int n_tensors)
{
    uint64_t sequence;
    s->n_device_calls += is_of_device(s);
    if (sequence_of(s, &sequence) != COF_OK)
        sequence = s->n_held ? oldest(s)[s->n_held - 1].sequence : 0;
    struct cofi_py_held *held = &oldest(s)[s->n_held++];
    s->n_reserved--;
    held->sequence = sequence;
    held->object = object;
    held->n_tensors = n_tensors;
    Py_INCREF(object);
    for (int i = 0; i < n_tensors; i++)
        held->tensors[i] = tensors[i];
    if (!is_of_device(s) && sequence > QUEUE_CALLS)
        release_up_to(s, sequence - QUEUE_CALLS - 1);
}

bool cofi_py_holds(const struct cofi_py_object *s, const struct cofi_py_object *object)
{
    for (int i = 0; i < s->n_held; i++)
        if (oldest(s)[i].object == (const PyObject *)object)
            return true;
    return false;
}

cof_status cofi_py_drain(struct cofi_py_object *s)
{
    uint64_t end;
    cof_status status = sequence_of(s, &end);
    if (status != COF_OK)
        return status;
    Py_BEGIN_ALLOW_THREADS
    status = cof_stream_sync(s->stream_handle);
    Py_END_ALLOW_THREADS
    if (status != COF_ERR_INVALID) /* refused: nothing was waited for */
        release_up_to(s, end);
    return status;
}

/* ---- streams of other libraries ------------------------------------------------------------- */

/* __cuda_stream__() -> (version, handle) of the CUDA libraries; NULL without an exception where
 * there is none. */
static PyObject *protocol_handle(PyObject *object)
{
    PyObject *method = PyObject_GetAttrString(object, "__cuda_stream__");
    if (!method) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *pair = PyObject_CallObject(method, NULL);
    PyObject *handle = pair ? PySequence_GetItem(pair, 1) : NULL;
    Py_XDECREF(pair);
    Py_DECREF(method);
    return handle;
}

bool cofi_py_cuda_stream(PyObject *object, void **handle_out)
{
    PyObject *handle = PyObject_GetAttrString(object, "cuda_stream"); /* of torch */
    if (!handle) {
        PyErr_Clear();
        handle = protocol_handle(object);
    }
    bool found = handle && PyLong_Check(handle);
    if (found)
        *handle_out = PyLong_AsVoidPtr(handle);
    else if (!PyErr_Occurred())
        PyErr_Format(PyExc_TypeError,
                     "stream: %R, wanted a cofuse.Stream, a CUDA stream (with an int "
                     "`cuda_stream`, as torch.cuda.current_stream(), or `__cuda_stream__`), None "
                     "or \"now\"",
                     object);
    Py_XDECREF(handle);
    return found && !PyErr_Occurred();
}

/* ---- streams -------------------------------------------------------------------------------- */

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"world", "n_threads", NULL};
    PyObject *world_arg;
    int n_threads = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|i:Stream", names, &world_arg, &n_threads))
        return NULL;
    struct cofi_py_object *world = cofi_py_cast(world_arg, COFI_PY_WORLD, "world");
    if (!world || !cofi_py_enter(world))
        return NULL;
    struct cofi_py_object *s = cofi_py_new(type, COFI_PY_STREAM, world, NULL, NULL);
    cof_status status = COF_OK;
    if (s) {
        Py_BEGIN_ALLOW_THREADS
        status = cof_stream_create(world->world_handle, n_threads, &s->stream_handle);
        Py_END_ALLOW_THREADS
        s->is_open = status == COF_OK;
    }
    if (status != COF_OK) {
        cofi_py_fail(status);
        Py_CLEAR(s);
    }
    cofi_py_leave(world);
    return (PyObject *)s;
}

static PyObject *stream_sync(PyObject *self, PyObject *unused)
{
    struct cofi_py_object *s = (struct cofi_py_object *)self;
    (void)unused;
    if (!cofi_py_enter(s))
        return NULL;
    cof_status status = cofi_py_drain(s);
    if (status != COF_OK)
        cofi_py_fail(status);
    cofi_py_leave(s);
    if (status != COF_OK)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- events --------------------------------------------------------------------------------- */

struct event {
    PyObject_HEAD
    struct cofi_py_object *stream;
    cof_event event;
};
PyTypeObject *cofi_py_event_type;

static int event_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)((struct event *)self)->stream);
    return 0;
}

static void event_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    Py_XDECREF((PyObject *)((struct event *)self)->stream);
    release(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *stream_record(PyObject *self, PyObject *unused)
{
    struct cofi_py_object *s = (struct cofi_py_object *)self;
    (void)unused;
    if (!cofi_py_enter(s))
        return NULL;
    cof_event recorded;
    cof_status status = cof_event_record(s->stream_handle, &recorded);
    cofi_py_leave(s);
    if (status != COF_OK)
        return cofi_py_fail(status);
    allocfunc alloc = (allocfunc)PyType_GetSlot(cofi_py_event_type, Py_tp_alloc);
    struct event *e = (struct event *)alloc(cofi_py_event_type, 0);
    if (!e)
        return NULL;
    Py_INCREF(self);
    e->stream = s;
    e->event = recorded;
    return (PyObject *)e;
}

/* On a stream that failed the wait is queued nonetheless. */
static bool wait_for(struct cofi_py_object *s, const struct event *e)
{
    cof_status status;
    if (!cofi_py_run_begin(s))
        return false;
    if (!cofi_py_hold_reserve(s)) {
        cofi_py_run_end(s);
        return false;
    }
    Py_BEGIN_ALLOW_THREADS
    status = cof_stream_wait_event(s->stream_handle, e->event);
    Py_END_ALLOW_THREADS
    cofi_py_run_end(s);
    if (status != COF_OK)
        cofi_py_fail(status);
    if (status != COF_ERR_INVALID)
        cofi_py_hold(s, (PyObject *)e->stream, NULL, 0);
    else
        cofi_py_hold_cancel(s);
    return status == COF_OK;
}

static PyObject *stream_wait(PyObject *self, PyObject *arg)
{
    struct cofi_py_object *s = (struct cofi_py_object *)self;
    if (Py_TYPE(arg) != cofi_py_event_type)
        return PyErr_Format(PyExc_TypeError, "event: %R, wanted an Event", Py_TYPE(arg));
    struct event *e = (struct event *)arg;
    if (e->stream == s)
        Py_RETURN_NONE; /* in order anyway */
    if (e->stream->world != s->world) /* whose end would not wait for this queue */
        return cofi_py_raise(COF_ERR_INVALID, "event: of another world than the stream");
    if (!e->stream->is_open && !e->stream->n_users)
        Py_RETURN_NONE; /* its queue has run empty before it was destroyed */
    if (!cofi_py_enter(s))
        return NULL;
    if (!cofi_py_enter(e->stream)) {
        cofi_py_leave(s);
        return NULL;
    }
    bool ok = wait_for(s, e);
    cofi_py_leave(e->stream);
    cofi_py_leave(s);
    if (!ok)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- types ---------------------------------------------------------------------------------- */

static PyMethodDef stream_methods[] = {
    {"sync", stream_sync, METH_NOARGS,
     "sync()\n\nWaits until all queued work has run, and raises its error if it failed. A stream "
     "that failed stays so: destroy it."},
    {"record", stream_record, METH_NOARGS,
     "record() -> Event\n\nThe end of the work queued so far."},
    {"wait", stream_wait, METH_O,
     "wait(event)\n\nWork queued from now on runs after the event's point in its stream, which is "
     "one of the same world."},
    {"destroy", cofi_py_close, METH_NOARGS,
     "destroy()\n\nRuns what is queued and ends the threads."},
    {NULL, NULL, 0, NULL},
};
static PyObject *stream_cuda(PyObject *self, void *unused)
{
    struct cofi_py_object *s = (struct cofi_py_object *)self;
    (void)unused;
    if (!s->is_open)
        return cofi_py_raise(COF_ERR_INVALID, "stream: destroyed");
    if (!is_of_device(s))
        return PyErr_Format(PyExc_AttributeError, "cuda_stream: this is a stream of the CPU");
    return PyLong_FromVoidPtr(s->stream_handle.handle);
}

static PyGetSetDef stream_getters[] = {
    {"cuda_stream", stream_cuda, NULL, "The cudaStream_t, on a world of CUDA devices.", NULL},
    {"is_open", cofi_py_is_open, NULL, "False once destroyed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot stream_slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, stream_new},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getters},
    {Py_tp_doc, "Stream(world, n_threads=0)\n\nAn in-order queue of calls with threads of its own "
                "(0: the world's number); on a world of CUDA devices a CUDA stream, which keeps "
                "the tensors of its calls until sync()."},
    {0, NULL},
};
PyType_Spec cofi_py_stream_spec = {"cofuse.Stream", sizeof(struct cofi_py_object), 0,
                                   COFI_PY_FLAGS, stream_slots};

static PyType_Slot event_slots[] = {
    {Py_tp_traverse, event_traverse},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_new, cofi_py_no_new},
    {Py_tp_doc, "A point in a stream's queue: Stream.record() makes it, Stream.wait() takes it."},
    {0, NULL},
};
PyType_Spec cofi_py_event_spec = {"cofuse.Event", sizeof(struct event), 0, COFI_PY_FLAGS,
                                  event_slots};
