/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The caller's tensors in a forward call on a CUDA device: engines take compact ones. */
#include "ops/attention/attention_forward_cuda.h"
#include "symm/options_cuda.h"

cof_status cofi_forward_launched(const struct cofi_forward *x, const char *file, int line,
                                 const void *stream, cudaError_t error, const char *what)
{
    return cofi_cuda_launched(file, line, x->plan->binding.arena, stream, error, what);
}

/* ---- inputs --------------------------------------------------------------------------------- */

static struct cofi_attention_block block_of(const struct cofi_attention_view *v, int64_t element)
{
    return (struct cofi_attention_block){v->data, v->batch_stride * element,
                                         v->row_stride * element, v->head_stride * element};
}

static struct cofi_attention_block compact_block(const struct cofi_forward *x, char *data,
                                                 int64_t heads, int64_t dim)
{
    struct cofi_attention_strides s = cofi_attention_compact(x->plan, heads, dim);
    int64_t element = cofi_forward_elem_bytes(x);
    return (struct cofi_attention_block){data, s.batch * element, s.row * element,
                                         s.head * element};
}

static struct cofi_attention_extent extent_of(const struct cofi_forward *x, int64_t heads,
                                              int64_t dim_bytes)
{
    return (struct cofi_attention_extent){x->plan->dims.n_batch, x->plan->local_rows, heads,
                                          dim_bytes};
}

/* Strides of dims of one entry do not count. Engines load 16 bytes at a time. */
static bool is_compact(const struct cofi_forward *x, const struct cofi_attention_view *v,
                       int64_t heads, int64_t dim)
{
    struct cofi_attention_strides s = cofi_attention_compact(x->plan, heads, dim);
    return (x->plan->dims.n_batch == 1 || v->batch_stride == s.batch) &&
           (x->plan->local_rows <= 1 || v->row_stride == s.row) &&
           (heads == 1 || v->head_stride == s.head) && (uintptr_t)v->data % 16 == 0;
}

static bool lse_is_compact(const struct cofi_forward *x)
{
    const struct cofi_attention_call *call = x->call;
    int64_t rows = x->plan->local_rows, heads = x->plan->dims.n_heads;
    return (x->plan->dims.n_batch == 1 || call->lse_batch_stride == heads * rows) &&
           (heads == 1 || call->lse_head_stride == rows);
}

static cof_status move(const struct cofi_forward *x, const struct cofi_attention_move *m,
                       void *stream)
{
    return cofi_forward_launched(x, __FILE_NAME__, __LINE__, stream,
                                 cofi_launch_attention_move(m, x->d->n_move_blocks, stream),
                                 "move rows");
}

/* An input as sections take it: itself, or copied. */
static cof_status take_input(const struct cofi_forward *x, const struct cofi_attention_view *v,
                             int64_t heads, int64_t dim, char *room, char **out)
{
    *out = v->data;
    if (is_compact(x, v, heads, dim))
        return COF_OK;
    *out = room;
    return move(x,
                &(struct cofi_attention_move){extent_of(x, heads, dim * cofi_forward_elem_bytes(x)),
                                              compact_block(x, room, heads, dim),
                                              block_of(v, cofi_forward_elem_bytes(x))},
                x->s);
}

cof_status cofi_forward_take(struct cofi_forward *x)
{
    const struct cofi_attention_dims *n = &x->plan->dims;
    const struct cofi_attention_call *call = x->call;
    const struct cofi_attention_places *at = &x->d->at;
    COF_TRY(take_input(x, &call->q, n->n_heads, n->dim_qk, at->q, &x->q));
    COF_TRY(take_input(x, &call->k, n->n_kv_heads, n->dim_qk, at->k, &x->k));
    COF_TRY(take_input(x, &call->v, n->n_kv_heads, n->dim_v, at->v, &x->v));
    x->o = is_compact(x, &call->o, n->n_heads, n->dim_v) ? call->o.data : at->o;
    x->lse = lse_is_compact(x) ? call->lse : at->lse;
    return COF_OK;
}

cof_status cofi_forward_check(const struct cofi_forward *x)
{
    const struct cofi_attention_dims *n = &x->plan->dims;
    const struct cofi_attention_call *call = x->call;
    const struct {
        const char *name;
        const struct cofi_attention_view *view;
        int64_t heads, dim;
    } tensors[] = {{"q", &call->q, n->n_heads, n->dim_qk},
                   {"k", &call->k, n->n_kv_heads, n->dim_qk},
                   {"v", &call->v, n->n_kv_heads, n->dim_v},
                   {"o", &call->o, n->n_heads, n->dim_v}};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        COF_FAIL_IF(!is_compact(x, tensors[i].view, tensors[i].heads, tensors[i].dim),
                    COF_ERR_INVALID,
                    "%s: data at %p, strides of batch, row and head %lld, %lld, %lld: wanted a "
                    "compact tensor, aligned to 16 bytes, on a plan made with only_compact",
                    tensors[i].name, tensors[i].view->data,
                    (long long)tensors[i].view->batch_stride,
                    (long long)tensors[i].view->row_stride,
                    (long long)tensors[i].view->head_stride);
    COF_FAIL_IF(!lse_is_compact(x), COF_ERR_INVALID,
                "lse: strides of batch and head %lld, %lld: wanted a compact tensor on a plan made "
                "with only_compact",
                (long long)call->lse_batch_stride, (long long)call->lse_head_stride);
    return COF_OK;
}

cof_status cofi_forward_by_rows(const struct cofi_forward *x, char *to, char *from, int64_t heads,
                                int64_t dim, cudaStream_t stream)
{
    const struct cofi_attention_strides s = cofi_attention_by_rows(x->plan, heads, dim);
    const int64_t element = cofi_forward_elem_bytes(x);
    return move(x,
                &(struct cofi_attention_move){
                    extent_of(x, heads, dim * element),
                    {to, s.batch * element, s.row * element, s.head * element},
                    compact_block(x, from, heads, dim)},
                stream);
}

/* ---- outputs -------------------------------------------------------------------------------- */

cof_status cofi_forward_finish(const struct cofi_forward *x)
{
    const struct cofi_attention_plan *plan = x->plan;
    const struct cofi_attention_dims *n = &plan->dims;
    const struct cofi_attention_call *call = x->call;
    const int64_t f = sizeof(float), rows = plan->local_rows, element = cofi_forward_elem_bytes(x);
    const bool is_dependent = x->d->is_dependent && x->is_merged && x->o == call->o.data &&
                              x->lse == call->lse; /* behind a merge, nothing between */
    if (rows == 0 || x->parts != COFI_PART_ALL)
        return cofi_forward_ack_all(x);
    if (x->o != call->o.data)
        COF_TRY(move(x,
                     &(struct cofi_attention_move){extent_of(x, n->n_heads, n->dim_v * element),
                                                   block_of(&call->o, element),
                                                   compact_block(x, x->o, n->n_heads, n->dim_v)},
                     x->s));
    if (x->lse != call->lse)
        COF_TRY(move(x,
                     &(struct cofi_attention_move){
                         extent_of(x, n->n_heads, f),
                         {(char *)call->lse, call->lse_batch_stride * f, f,
                          call->lse_head_stride * f},
                         {(char *)x->lse, n->n_heads * rows * f, f, rows * f}},
                     x->s));
    const struct cofi_attention_finish end = {
        .arena = plan->binding.arena->on_device, .n = extent_of(x, n->n_heads, n->dim_v * element),
        .o = block_of(&call->o, element), .lse = call->lse, .lse_batch = call->lse_batch_stride,
        .lse_head = call->lse_head_stride,
        .pad_begin = cof_layout_valid_rows(&plan->layout, plan->rank),
        .binding = cofi_forward_acks_all(x) ? plan->binding.on_device : NULL,
        .ack = COFI_KV_ACK};
    return cofi_forward_launched(
        x, __FILE_NAME__, __LINE__, x->s,
        cofi_launch_attention_finish(&end, x->d->n_finish_blocks, is_dependent, x->s), "finish");
}
