/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The Python extension: what its files share.
 *
 * Every object but an event is a struct cofi_py_object. References go up (plan -> arena -> team ->
 * world), so that whatever an object needs outlives it; the world has a list of all of them, not
 * counted, so that closing it can close them first. All fields are read and written with the GIL
 * held; n_users says that some thread is in a call on the object without it. */
#ifndef COFI_PY_H
#define COFI_PY_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x03090000
#include <Python.h>

#include <stdbool.h>
#include <structmember.h>

#include "cofuse/cofuse.h"

/* ---- errors --------------------------------------------------------------------------------- */

/* Adds the exception classes to the module. */
bool cofi_py_errors_add(PyObject *module);

/* Sets the exception of a status with the text of cof_last_error(), or with a text made here; both
 * return NULL. */
PyObject *cofi_py_fail(cof_status status);
PyObject *cofi_py_raise(cof_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- tensors -------------------------------------------------------------------------------- */

/* A tensor of any library that speaks DLPack, and what keeps its memory. */
struct cofi_py_tensor {
    cof_tensor view;
    void *managed;
    void (*release)(void *managed);
};

/* False with an exception that begins with `name`. Outputs have to be writable. may_be_cuda: for a
 * world of devices. */
bool cofi_py_tensor_get(PyObject *object, const char *name, bool is_output, bool may_be_cuda,
                        struct cofi_py_tensor *tensor);
void cofi_py_tensor_release(struct cofi_py_tensor *tensor);
bool cofi_py_tensors_init(void);

/* ---- objects -------------------------------------------------------------------------------- */

enum cofi_py_kind { /* in the order in which a world closes them */
    COFI_PY_STREAM,
    COFI_PY_PLAN,
    COFI_PY_ARENA,
    COFI_PY_TEAM,
    COFI_PY_WORLD
};

#define COFI_PY_MAX_TENSORS 18

/* What a queued call needs until it has run. */
struct cofi_py_held {
    uint64_t sequence; /* of the stream's queue, after the call */
    PyObject *object;  /* plan, or the stream of an event */
    int n_tensors;
    struct cofi_py_tensor tensors[COFI_PY_MAX_TENSORS];
};

struct cofi_py_object {
    PyObject_HEAD
    enum cofi_py_kind kind;
    bool is_open;
    int n_users;
    cof_world *world_handle;
    cof_team *team_handle;
    cof_arena *arena_handle;
    cof_plan *plan_handle;
    cof_stream stream_handle;
    struct cofi_py_object *world, *team, *arena; /* upwards, counted; NULL where there is none */
    struct cofi_py_object *next, *previous;      /* in the world's list, not counted */
    int device;                /* world: of CUDA; -1 on CPUs */
    int n_chunks;              /* plan of a grad_return */
    PyObject *below;           /* world: its team; team: plans of the functional forms; plan: the
                                  caller's CUDA streams that it ran on, by handle */
    bool is_in_collective;     /* world: one thread at a time */
    bool is_running;           /* plan, stream: a call is being queued; one thread at a time */
    bool is_borrowed;          /* team: the world's own */
    struct cofi_py_held *held; /* stream: oldest first */
    int first_held, n_held, n_reserved, held_room; /* reserved: for calls that are being made */
    uint64_t n_device_calls; /* stream of a device: calls that were held */
};

extern PyTypeObject *cofi_py_types[COFI_PY_WORLD + 1], *cofi_py_attention_type,
    *cofi_py_grad_return_type, *cofi_py_allreduce_rmsnorm_type, *cofi_py_trimul_type,
    *cofi_py_event_type;

/* A new object below the given ones, not open yet; NULL with an exception. */
struct cofi_py_object *cofi_py_new(PyTypeObject *type, enum cofi_py_kind kind,
                                   struct cofi_py_object *world, struct cofi_py_object *team,
                                   struct cofi_py_object *arena);

/* The object as one of this kind; NULL with a TypeError that names the argument. */
struct cofi_py_object *cofi_py_cast(PyObject *object, enum cofi_py_kind kind, const char *name);

/* Around a call without the GIL: enter fails with an exception when the object is closed. */
bool cofi_py_enter(struct cofi_py_object *object);
void cofi_py_leave(struct cofi_py_object *object);

/* Around the library's own call on a plan or a stream: one that came between the queued parts of
 * another thread's would be refused half-way. Begin fails with an exception. */
bool cofi_py_run_begin(struct cofi_py_object *object);
void cofi_py_run_end(struct cofi_py_object *object);

/* As enter, for a collective call on the object, of which a world takes one at a time. */
bool cofi_py_enter_collective(struct cofi_py_object *object);
void cofi_py_leave_collective(struct cofi_py_object *object);

/* Closes the object and what depends on it; queued calls that need any of them run first. */
PyObject *cofi_py_close(PyObject *self, PyObject *unused);

int cofi_py_traverse(PyObject *self, visitproc visit, void *arg);
int cofi_py_clear(PyObject *self);
void cofi_py_finalize(PyObject *self);
void cofi_py_dealloc(PyObject *self);
/* For the types whose objects other calls make. */
PyObject *cofi_py_no_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
PyObject *cofi_py_is_open(PyObject *self, void *unused);

#define COFI_PY_LIFE_SLOTS                                                                         \
    {Py_tp_traverse, cofi_py_traverse}, {Py_tp_clear, cofi_py_clear},                              \
        {Py_tp_finalize, cofi_py_finalize}, {Py_tp_dealloc, cofi_py_dealloc}
#define COFI_PY_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)

/* A method with keywords; through void, as PyMethodDef has one type for all. */
#define COFI_PY_KEYWORDS(function)                                                                 \
    (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

extern PyType_Spec cofi_py_world_spec, cofi_py_team_spec, cofi_py_stream_spec, cofi_py_arena_spec,
    cofi_py_attention_spec, cofi_py_grad_return_spec, cofi_py_allreduce_rmsnorm_spec,
    cofi_py_trimul_spec, cofi_py_event_spec;

/* ---- streams -------------------------------------------------------------------------------- */

/* A place for one more held call, which is this call's until it holds or cancels; to be called
 * before the call is made. */
bool cofi_py_hold_reserve(struct cofi_py_object *stream);
void cofi_py_hold_cancel(struct cofi_py_object *stream);
/* Takes over the tensors; lets go of what has passed. */
void cofi_py_hold(struct cofi_py_object *stream, PyObject *object, struct cofi_py_tensor *tensors,
                  int n_tensors);
void cofi_py_hold_release(struct cofi_py_object *stream); /* all: the queue is empty */
bool cofi_py_holds(const struct cofi_py_object *stream, const struct cofi_py_object *object);
/* Waits for an empty queue without the GIL, and lets go of what was in it. */
cof_status cofi_py_drain(struct cofi_py_object *stream);
/* The handle of a CUDA stream of another library; false with a TypeError. */
bool cofi_py_cuda_stream(PyObject *object, void **handle_out);

/* ---- parameters ----------------------------------------------------------------------------- */

enum cofi_py_field_kind {
    COFI_PY_FLAG, /* int from a truth value */
    COFI_PY_INT,
    COFI_PY_I64,
    COFI_PY_FLOAT,
    COFI_PY_DOUBLE,
    COFI_PY_DTYPE,
    COFI_PY_ENUM,
    COFI_PY_OFFSETS /* const int64_t *: a copy of a sequence, -1 behind it */
};

struct cofi_py_field {
    const char *name;
    enum cofi_py_field_kind kind;
    size_t offset;
    const char *const *names; /* ENUM: by value, NULL at the end */
};

/* Fills a struct from keywords; None is left at zero. After it, also where it failed, free has to
 * be called: it takes back the copies of OFFSETS. */
bool cofi_py_fields_read(PyObject *keywords, const struct cofi_py_field *fields, void *params);
void cofi_py_fields_free(const struct cofi_py_field *fields, void *params);
/* Whether a key of a dict, of any type, is this name. */
bool cofi_py_is_name(PyObject *key, const char *name);
/* An enumerator from its name or its number. */
bool cofi_py_enum_read(PyObject *object, const char *name, const char *const *names, int *out);

extern const char *const cofi_py_layout_names[], *const cofi_py_chunking_names[],
    *const cofi_py_mask_names[];

/* ---- functions of the module ---------------------------------------------------------------- */

PyObject *cofi_py_attention_workspace(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *cofi_py_grad_return_workspace(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *cofi_py_allreduce_rmsnorm_workspace(PyObject *module, PyObject *args,
                                              PyObject *keywords);
PyObject *cofi_py_trimul_workspace(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *cofi_py_trimul_block(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *cofi_py_trimul_import_rows(PyObject *module, PyObject *args, PyObject *keywords);

#endif
