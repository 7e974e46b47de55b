/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Attention plans. */
#include "py_plan.h"

#include <stddef.h>

static const char *const format_names[] = {"bshd", "sbhd", NULL};
static const char *const schedule_names[] = {"default", "ring", "gather", NULL};

#define AT(field) offsetof(cof_attention_params, field)
static const struct cofi_py_field fields[] = {
    {"dtype", COFI_PY_DTYPE, AT(dtype), NULL},
    {"format", COFI_PY_ENUM, AT(format), format_names},
    {"n_batch", COFI_PY_I64, AT(n_batch), NULL},
    {"n_rows", COFI_PY_I64, AT(n_rows), NULL},
    {"n_heads", COFI_PY_I64, AT(n_heads), NULL},
    {"n_kv_heads", COFI_PY_I64, AT(n_kv_heads), NULL},
    {"head_dim_qk", COFI_PY_I64, AT(head_dim_qk), NULL},
    {"head_dim_v", COFI_PY_I64, AT(head_dim_v), NULL},
    {"mask", COFI_PY_ENUM, AT(mask), cofi_py_mask_names},
    {"layout", COFI_PY_ENUM, AT(layout), cofi_py_layout_names},
    {"chunking", COFI_PY_ENUM, AT(chunking), cofi_py_chunking_names},
    {"schedule", COFI_PY_ENUM, AT(schedule), schedule_names},
    {"scale", COFI_PY_DOUBLE, AT(scale), NULL},
    {"forward_only", COFI_PY_FLAG, AT(forward_only), NULL},
    {"wire_f32", COFI_PY_FLAG, AT(wire_f32), NULL},
    {"save_kv", COFI_PY_FLAG, AT(save_kv), NULL},
    {"has_window", COFI_PY_FLAG, AT(has_window), NULL},
    {"window_left", COFI_PY_I64, AT(window_left), NULL},
    {"window_right", COFI_PY_I64, AT(window_right), NULL},
    {"only_compact", COFI_PY_FLAG, AT(only_compact), NULL},
    {NULL, COFI_PY_FLAG, 0, NULL},
};

static cof_status plan_create(cof_team *team, const void *params, cof_arena *arena,
                              cof_plan **plan_out)
{
    return cof_attention_plan_create(team, params, arena, plan_out);
}

static cof_status workspace(cof_team *team, const void *params, cof_workspace_sizes *sizes_out)
{
    return cof_attention_workspace(team, params, sizes_out);
}

_Static_assert(sizeof(cof_attention_params) <= COFI_PY_PARAMS_BYTES, "room for the parameters");
static const struct cofi_py_operator operator_attention = {fields, sizeof(cof_attention_params),
                                                           plan_create, workspace};

static PyObject *attention_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    return cofi_py_plan_new(type, args, keywords, &operator_attention);
}

PyObject *cofi_py_attention_workspace(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    return cofi_py_plan_workspace(args, keywords, &operator_attention);
}

static cof_status run_forward(cof_plan *plan, const void *args, cof_stream stream)
{
    return cof_attention_forward(plan, args, stream);
}

static cof_status run_backward(cof_plan *plan, const void *args, cof_stream stream)
{
    return cof_attention_backward(plan, args, stream);
}

static PyObject *attention_forward(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"q", "k", "v", "o", "lse", "saved_kv", "stream", NULL};
    PyObject *q, *k, *v, *o, *lse, *saved_kv = NULL, *stream = NULL;
    struct cofi_py_call call;
    cof_attention_args a = COF_ATTENTION_ARGS_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOO|OO:forward", names, &q, &k, &v, &o,
                                     &lse, &saved_kv, &stream) ||
        !cofi_py_call_begin(&call, self, stream))
        return NULL;
    bool ok = cofi_py_call_take(&call, q, "q", false, &a.q) &&
              cofi_py_call_take(&call, k, "k", false, &a.k) &&
              cofi_py_call_take(&call, v, "v", false, &a.v) &&
              cofi_py_call_take(&call, o, "o", true, &a.o) &&
              cofi_py_call_take(&call, lse, "lse", true, &a.lse) &&
              cofi_py_call_take(&call, saved_kv, "saved_kv", true, &a.saved_kv);
    return cofi_py_call_end(&call, ok, run_forward, &a);
}

static PyObject *attention_backward(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"q",  "k",  "v",        "o",      "lse", "dout", "dq",
                            "dk", "dv", "saved_kv", "stream", NULL};
    PyObject *q, *k, *v, *o, *lse, *dout, *dq, *dk, *dv, *saved_kv = NULL, *stream = NULL;
    struct cofi_py_call call;
    cof_attention_args a = COF_ATTENTION_ARGS_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOOOOO|OO:backward", names, &q, &k, &v,
                                     &o, &lse, &dout, &dq, &dk, &dv, &saved_kv, &stream) ||
        !cofi_py_call_begin(&call, self, stream))
        return NULL;
    bool ok = cofi_py_call_take(&call, q, "q", false, &a.q) &&
              cofi_py_call_take(&call, k, "k", false, &a.k) &&
              cofi_py_call_take(&call, v, "v", false, &a.v) &&
              cofi_py_call_take(&call, o, "o", false, &a.o) &&
              cofi_py_call_take(&call, lse, "lse", false, &a.lse) &&
              cofi_py_call_take(&call, dout, "dout", false, &a.dout) &&
              cofi_py_call_take(&call, dq, "dq", true, &a.dq) &&
              cofi_py_call_take(&call, dk, "dk", true, &a.dk) &&
              cofi_py_call_take(&call, dv, "dv", true, &a.dv) &&
              cofi_py_call_take(&call, saved_kv, "saved_kv", false, &a.saved_kv);
    return cofi_py_call_end(&call, ok, run_backward, &a);
}

static PyMethodDef methods[] = {
    {"forward", COFI_PY_KEYWORDS(attention_forward),
     "forward(q, k, v, o, lse, saved_kv=None, stream=None)\n\n"
     "o and lse from q, k, v; every rank of the team calls it. In dtype and format of the plan:\n"
     "q [B, S_local, H, Dqk], k [B, S_local, Hkv, Dqk], v [B, S_local, Hkv, Dv],\n"
     "o [B, S_local, H, Dv] (\"sbhd\": the first two dims exchanged); lse float32\n"
     "[B, H, S_local]. saved_kv: uint8 [n], with save_kv. stream: None returns when it is done;\n"
     "on CUDA devices one is named, as torch.cuda.current_stream()."},
    {"backward", COFI_PY_KEYWORDS(attention_backward),
     "backward(q, k, v, o, lse, dout, dq, dk, dv, saved_kv=None, stream=None)\n\n"
     "dq, dk, dv from q, k, v, o, lse as forward left them, and dout; shapes as q, k, v and o."},
    COFI_PY_PLAN_DESTROY,
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getters[] = {COFI_PY_PLAN_GETTERS};
static PyType_Slot slots[] = {
    COFI_PY_LIFE_SLOTS,
    {Py_tp_new, attention_new},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_doc,
     "AttentionPlan(team, *, dtype, n_batch, n_rows, n_heads, head_dim_qk, n_kv_heads=0,\n"
     "              head_dim_v=0, format=\"bshd\", mask=\"none\", layout=\"zigzag\",\n"
     "              chunking=\"balanced\", schedule=\"default\", scale=0.0, forward_only=False,\n"
     "              wire_f32=False, save_kv=False, has_window=False, window_left=0,\n"
     "              window_right=0, only_compact=False, arena=None)\n\n"
     "Context-parallel attention for fixed shapes; n_rows is the whole sequence. has_window: row\n"
     "i sees key rows from i - window_left to i + window_right (-1: no limit). Collective."},
    {0, NULL},
};
PyType_Spec cofi_py_attention_spec = {"cofuse.AttentionPlan", sizeof(struct cofi_py_object), 0,
                                      COFI_PY_FLAGS, slots};
