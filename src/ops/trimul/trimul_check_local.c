/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/trimul/trimul_check_local.h"

#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"

const char *const cofi_tm_tensor_names[COFI_TM_TENSORS] = {"x",    "mask", "residual",
                                                             "dout", "out",  "dx"};

/* ---- views ---------------------------------------------------------------------------------- */

static bool is_output(int which)
{
    return which == COFI_TM_T_OUT || which == COFI_TM_T_DX;
}

static cof_dtype dtype_of(const struct cofi_tm_case *c, int which)
{
    return which == COFI_TM_T_MASK && c->mask_dtype ? COF_F32 : cofi_tm_dtype(c);
}

static void choose_strides(int layout, struct cofi_tm_view *v)
{
    const int64_t gap = layout == COFI_TM_PITCHED, *shape = v->shape;
    int64_t *s = v->strides;
    s[3] = 1;
    if (layout == COFI_TM_TRANSPOSED) {
        s[1] = shape[3];
        s[2] = shape[1] * s[1];
        s[0] = shape[2] * s[2];
    } else {
        s[2] = shape[3] + 3 * gap;
        s[1] = shape[2] * s[2] + 5 * gap;
        s[0] = shape[1] * s[1] + 7 * gap;
    }
}

static cof_status open_view(cof_world *world, const struct cofi_tm_local *local, int which,
                            struct cofi_tm_view *v)
{
    const struct cofi_tm_case *c = local->c;
    bool is_mask = which == COFI_TM_T_MASK;
    int64_t shape[] = {local->n_batch, local->block.n_rows, local->block.n_cols,
                       is_mask ? 1 : c->d};
    memcpy(v->shape, shape, sizeof shape);
    choose_strides(c->layout, v);
    v->shift = c->layout == COFI_TM_PITCHED ? 3 : 0;
    int64_t n = v->shift; /* up to the last element, no gap behind it */
    if (shape[0] && shape[1] && shape[2])
        n = 1 + cofi_tm_view_idx(v, shape[0] - 1, shape[1] - 1, shape[2] - 1, shape[3] - 1);
    int64_t element = cofi_dtype_bytes(dtype_of(c, which));
    COF_TRY(cofi_check_memory_open(world, (size_t)(n * element), &v->memory));
    v->tensor = (cof_tensor){.data = v->memory.data, .device = cofi_check_memory_device(world),
                             .ndim = is_mask ? 3 : 4, .dtype = dtype_of(c, which),
                             .shape = v->shape,
                             .strides = c->layout == COFI_TM_COMPACT ? NULL : v->strides,
                             .byte_offset = (uint64_t)(v->shift * element)};
    return COF_OK;
}

/* Every row of d's. */
#define FOR_ROWS(v, b, i, j)                                                                       \
    for (int64_t b = 0; b < (v)->shape[0]; b++)                                                    \
        for (int64_t i = 0; i < (v)->shape[1]; i++)                                                \
            for (int64_t j = 0; j < (v)->shape[2]; j++)

/* Elements between a view in host memory and the compact global tensor. */
static void copy_rows(const struct cofi_tm_local *local, const struct cofi_tm_view *v,
                      void *global, bool to_view)
{
    size_t element = (size_t)cofi_dtype_bytes(v->tensor.dtype), row = (size_t)v->shape[3] * element;
    int64_t n = local->problem->n;
    FOR_ROWS(v, b, i, j) {
        int64_t pair = ((local->first_batch + b) * n + local->block.row + i) * n +
                       local->block.col + j;
        char *here = v->memory.host + (size_t)cofi_tm_view_idx(v, b, i, j, 0) * element;
        char *there = (char *)global + (size_t)pair * row;
        memcpy(to_view ? here : there, to_view ? there : here, row);
    }
}

static void fill(const struct cofi_tm_local *local, struct cofi_tm_view *v)
{
    memset(v->memory.host, 0xff, v->memory.bytes);
    if (v->from)
        copy_rows(local, v, v->from, true);
}

void cofi_tm_local_take(const struct cofi_tm_local *local, void *out, void *dx)
{
    copy_rows(local, &local->view[local->which_out], out, false);
    if (dx && local->view[COFI_TM_T_DX].memory.base)
        copy_rows(local, &local->view[COFI_TM_T_DX], dx, false);
}

/* Without the elements, poison alone must be left. */
static bool gaps_ok(const struct cofi_tm_view *v)
{
    size_t element = (size_t)cofi_dtype_bytes(v->tensor.dtype);
    unsigned char *copy = malloc(v->memory.bytes + 1);
    if (!copy)
        return false;
    memcpy(copy, v->memory.host, v->memory.bytes);
    FOR_ROWS(v, b, i, j)
        memset(copy + (size_t)cofi_tm_view_idx(v, b, i, j, 0) * element, 0xff,
               (size_t)v->shape[3] * element);
    bool ok = true;
    for (size_t i = 0; i < v->memory.bytes; i++)
        ok &= copy[i] == 0xff;
    free(copy);
    return ok;
}

static uint64_t hash_memory(const struct cofi_check_memory *m)
{
    uint64_t hash = m->bytes;
    for (size_t i = 0; i < m->bytes; i += 8) {
        uint64_t part = 0;
        memcpy(&part, m->host + i, m->bytes - i < 8 ? m->bytes - i : 8);
        hash = cofi_check_random(hash, 0, part);
    }
    return hash;
}

/* ---- a call's tensors ----------------------------------------------------------------------- */

static cof_status open_grads(cof_world *world, struct cofi_tm_local *local)
{
    const struct cofi_tm_case *c = local->c;
    local->grads = (cof_trimul_grads)COF_TRIMUL_GRADS_INIT;
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++) {
        if (c->grads == 2 && w % 3) /* some */
            continue;
        size_t bytes = (size_t)cofi_tm_weight_elements(w, c->d, c->h) * sizeof(float);
        COF_TRY(cofi_check_memory_open(world, bytes, &local->grad[w]));
        int ndim = cofi_tm_weight_shape(w, c->d, c->h, local->grad_shape[w].dim);
        local->grad_tensor[w] = cof_tensor_make(local->grad[w].data,
                                                cofi_check_memory_device(world), COF_F32, ndim,
                                                &local->grad_shape[w]);
        cofi_tm_grads_bind(&local->grads, w, &local->grad_tensor[w]);
    }
    return COF_OK;
}

static cof_status open_saved(cof_world *world, size_t bytes, struct cofi_tm_local *local)
{
    COF_TRY(cofi_check_memory_open(world, bytes, &local->saved));
    local->saved_shape.dim[0] = (int64_t)bytes;
    local->saved_tensor = cof_tensor_make(local->saved.data, cofi_check_memory_device(world),
                                          COF_U8, 1, &local->saved_shape);
    return COF_OK;
}

cof_status cofi_tm_local_open(cof_world *world, const struct cofi_tm_span *span,
                               struct cofi_tm_local *local)
{
    const struct cofi_tm_case *c = span->c;
    const struct cofi_tm_problem *p = span->problem;
    bool in_place = c->residual == COFI_TM_IN_PLACE;
    *local = (struct cofi_tm_local){.c = c, .problem = p, .block = span->block,
                                     .first_batch = span->first_batch, .n_batch = span->n_batch};
    local->which_out = in_place ? COFI_TM_T_X : COFI_TM_T_OUT;
    bool wanted[COFI_TM_TENSORS] = {
        [COFI_TM_T_X] = true, [COFI_TM_T_MASK] = c->mask != COFI_TM_NO_MASK,
        [COFI_TM_T_RESIDUAL] = c->residual == COFI_TM_OWN,
        [COFI_TM_T_OUT] = !in_place, [COFI_TM_T_DOUT] = span->backward,
        [COFI_TM_T_DX] = span->backward};
    for (int t = 0; t < COFI_TM_TENSORS; t++)
        if (wanted[t])
            COF_TRY(open_view(world, local, t, &local->view[t]));
    if (p) {
        local->view[COFI_TM_T_X].from = p->x;
        local->view[COFI_TM_T_MASK].from = p->mask;
        local->view[COFI_TM_T_RESIDUAL].from = p->residual;
        local->view[COFI_TM_T_DOUT].from = p->dout;
        local->view[COFI_TM_T_OUT].from = c->residual == COFI_TM_IS_OUT ? p->residual : NULL;
    }
    if (span->saved_bytes)
        COF_TRY(open_saved(world, span->saved_bytes, local));
    return span->backward && span->grads ? open_grads(world, local) : COF_OK;
}

void cofi_tm_local_close(struct cofi_tm_local *local)
{
    for (int t = 0; t < COFI_TM_TENSORS; t++)
        cofi_check_memory_close(&local->view[t].memory);
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        cofi_check_memory_close(&local->grad[w]);
    cofi_check_memory_close(&local->saved);
}

cof_status cofi_tm_local_prepare(struct cofi_tm_local *local)
{
    for (int t = 0; t < COFI_TM_TENSORS; t++) {
        struct cofi_tm_view *v = &local->view[t];
        if (!v->memory.base)
            continue;
        fill(local, v);
        if (!is_output(t))
            v->hash = hash_memory(&v->memory);
        COF_TRY(cofi_check_memory_upload(&v->memory));
    }
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        if (local->grad[w].base)
            COF_TRY(cofi_check_memory_poison(&local->grad[w]));
    return local->saved.base ? cofi_check_memory_poison(&local->saved) : COF_OK;
}

cof_status cofi_tm_local_collect(struct cofi_tm_local *local, struct cofi_check_result *result)
{
    for (int t = 0; t < COFI_TM_TENSORS; t++) {
        struct cofi_tm_view *v = &local->view[t];
        if (!v->memory.base)
            continue;
        COF_TRY(cofi_check_memory_download(&v->memory));
        if (!cofi_check_memory_intact(&v->memory))
            cofi_check_fail(result, "%s: written outside of the tensor", cofi_tm_tensor_names[t]);
        bool is_written = is_output(t) || t == local->which_out;
        if (!is_written && hash_memory(&v->memory) != v->hash)
            cofi_check_fail(result, "%s: the input was modified", cofi_tm_tensor_names[t]);
        if (is_written && v->tensor.strides && !gaps_ok(v))
            cofi_check_fail(result, "%s: written between the rows", cofi_tm_tensor_names[t]);
    }
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        if (local->grad[w].base) {
            COF_TRY(cofi_check_memory_download(&local->grad[w]));
            if (!cofi_check_memory_intact(&local->grad[w]))
                cofi_check_fail(result, "gradient of %s: written outside of the tensor",
                                cofi_tm_weights[w].name);
        }
    if (local->saved.base)
        COF_TRY(cofi_check_memory_download(&local->saved));
    if (local->saved.base && !cofi_check_memory_intact(&local->saved))
        cofi_check_fail(result, "saved: written outside of the tensor");
    return COF_OK;
}

void cofi_tm_local_args(const struct cofi_tm_local *local, bool backward, cof_trimul_args *args)
{
    const struct cofi_tm_view *v = local->view;
    const int residual = local->c->residual;
    bool is_x = residual == COFI_TM_IS_X || residual == COFI_TM_IN_PLACE;
    *args = (cof_trimul_args)COF_TRIMUL_ARGS_INIT;
    args->n = local->problem ? local->problem->n : 0;
    args->x = &v[COFI_TM_T_X].tensor;
    args->mask = v[COFI_TM_T_MASK].memory.base ? &v[COFI_TM_T_MASK].tensor : NULL;
    args->residual = is_x                                 ? args->x
                     : residual == COFI_TM_OWN           ? &v[COFI_TM_T_RESIDUAL].tensor
                     : residual == COFI_TM_IS_OUT && !backward ? &v[COFI_TM_T_OUT].tensor
                                                                : NULL;
    args->saved = local->saved.base ? &local->saved_tensor : NULL;
    args->in_place = residual == COFI_TM_IN_PLACE;
    if (!backward) {
        args->out = &v[local->which_out].tensor;
        return;
    }
    args->dout = &v[COFI_TM_T_DOUT].tensor;
    args->dx = &v[COFI_TM_T_DX].tensor;
    args->grads = local->grads.size ? &local->grads : NULL;
}

void cofi_tm_local_keep(struct cofi_tm_local *local)
{
    local->view[COFI_TM_T_DX].hash = hash_memory(&local->view[COFI_TM_T_DX].memory);
    local->view[COFI_TM_T_OUT].hash = hash_memory(&local->view[local->which_out].memory);
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        local->grad_hash[w] = hash_memory(&local->grad[w]);
}

void cofi_tm_local_compare_kept(const struct cofi_tm_local *local,
                                 struct cofi_check_result *result)
{
    static const char *const text = "%s: a repeated call differs in bits from the first";
    const struct cofi_tm_view *v = local->view;
    if (hash_memory(&v[local->which_out].memory) != v[COFI_TM_T_OUT].hash)
        cofi_check_fail(result, text, "out");
    if (hash_memory(&v[COFI_TM_T_DX].memory) != v[COFI_TM_T_DX].hash)
        cofi_check_fail(result, text, "dx");
    for (int w = 0; w < COFI_TRI_WEIGHTS; w++)
        if (hash_memory(&local->grad[w]) != local->grad_hash[w])
            cofi_check_fail(result, text, cofi_tm_weights[w].name);
}

/* ---- weights -------------------------------------------------------------------------------- */

static cof_status open_weight(cof_world *world, const struct cofi_tm_data *data, int which,
                              struct cofi_tm_local_weights *w)
{
    const struct cofi_tm_case *c = data->c;
    int64_t *shape = w->shape[which], *strides = w->strides[which];
    int ndim = cofi_tm_weight_shape(which, c->d, c->h, shape);
    cof_dtype dtype = cofi_tm_weight_dtype(c, which);
    size_t element = (size_t)cofi_dtype_bytes(dtype), row = (size_t)shape[ndim - 1] * element;
    bool is_pitched = c->layout == COFI_TM_PITCHED && ndim == 2;
    strides[ndim - 1] = 1;
    if (ndim == 2)
        strides[0] = shape[1] + (is_pitched ? 3 : 0);
    int64_t n_rows = ndim == 2 ? shape[0] : 1;
    size_t pitch = ndim == 2 ? (size_t)strides[0] * element : row;
    COF_TRY(cofi_check_memory_open(world, (size_t)(n_rows - 1) * pitch + row, &w->memory[which]));
    for (int64_t r = 0; r < n_rows; r++)
        memcpy(w->memory[which].host + (size_t)r * pitch,
               (const char *)data->weight[which] + (size_t)r * row, row);
    w->tensor[which] = (cof_tensor){.data = w->memory[which].data,
                                    .device = cofi_check_memory_device(world), .ndim = ndim,
                                    .dtype = dtype, .shape = shape,
                                    .strides = is_pitched ? strides : NULL};
    cofi_tm_weights_bind(&w->weights, which, &w->tensor[which]);
    return cofi_check_memory_upload(&w->memory[which]);
}

cof_status cofi_tm_weights_open(cof_world *world, const struct cofi_tm_data *data,
                                 struct cofi_tm_local_weights *w)
{
    *w = (struct cofi_tm_local_weights){.weights = COF_TRIMUL_WEIGHTS_INIT};
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++)
        if (data->weight[i])
            COF_TRY(open_weight(world, data, i, w));
    return COF_OK;
}

void cofi_tm_weights_close(struct cofi_tm_local_weights *w)
{
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++)
        cofi_check_memory_close(&w->memory[i]);
}
