/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/attention/attention_check_local.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"

const char *const cofi_attention_check_names[COFI_CT_N] = {"q",   "k",  "v",  "dout", "o",
                                                           "lse", "dq", "dk", "dv"};

static bool is_kv(int t)
{
    return t == COFI_CT_K || t == COFI_CT_V || t == COFI_CT_DK || t == COFI_CT_DV;
}

static bool is_backward(int t)
{
    return t == COFI_CT_DOUT || t >= COFI_CT_DQ;
}

/* Of the host's copy. */
static uint64_t hash_of(const struct cofi_attention_local_tensor *t)
{
    const struct cofi_guard g = {.data = (unsigned char *)t->memory.host, .bytes = t->memory.bytes};
    return cofi_guard_hash(&g);
}

/* Strides in elements from the innermost out, with gaps of odd sizes when padded. */
static void choose_strides(const struct cofi_attention_case *c, int which, int64_t rows,
                           struct cofi_attention_local_tensor *t)
{
    int64_t gap = c->padded_strides ? 1 : 0;
    bool is_lse = which == COFI_CT_LSE, is_sbhd = c->params.format == COF_FORMAT_SBHD;
    if (is_lse) {
        t->row_stride = 1;
        t->head_stride = rows + 3 * gap;
        t->batch_stride = t->n_heads * t->head_stride + 5 * gap;
        return;
    }
    t->head_stride = t->dim + 3 * gap;
    int64_t inner = t->n_heads * t->head_stride + 5 * gap;
    t->row_stride = is_sbhd ? c->params.n_batch * inner + 7 * gap : inner;
    t->batch_stride = is_sbhd ? inner : rows * inner + 7 * gap;
}

static void set4(int64_t *to, int64_t a, int64_t b, int64_t c, int64_t d)
{
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}

static cof_status make_tensor(cof_world *world, const struct cofi_attention_case *c, int which,
                              int64_t rows, struct cofi_attention_local_tensor *t)
{
    const cof_attention_params *p = &c->params;
    bool is_lse = which == COFI_CT_LSE, is_sbhd = p->format == COF_FORMAT_SBHD;
    bool has_dim_v = which == COFI_CT_V || which == COFI_CT_DOUT || which == COFI_CT_O ||
                     which == COFI_CT_DV;
    int64_t batch = p->n_batch;
    t->n_heads = is_kv(which) ? p->n_kv_heads : p->n_heads;
    t->dim = is_lse ? 1 : has_dim_v ? p->head_dim_v : p->head_dim_qk;
    choose_strides(c, which, rows, t);
    if (is_lse) {
        set4(t->shape, batch, t->n_heads, rows, 0);
        set4(t->strides, t->batch_stride, t->head_stride, 1, 0);
    } else if (is_sbhd) {
        set4(t->shape, rows, batch, t->n_heads, t->dim);
        set4(t->strides, t->row_stride, t->batch_stride, t->head_stride, 1);
    } else {
        set4(t->shape, batch, rows, t->n_heads, t->dim);
        set4(t->strides, t->batch_stride, t->row_stride, t->head_stride, 1);
    }
    t->view = (cof_tensor){.device = cofi_check_memory_device(world), .ndim = is_lse ? 3 : 4,
                           .dtype = is_lse ? COF_F32 : p->dtype, .shape = t->shape,
                           .strides = c->padded_strides ? t->strides : NULL};
    size_t element = (size_t)cofi_dtype_bytes(t->view.dtype);
    int64_t n = 0; /* up to the last element, no gap behind it */
    if (rows > 0)
        n = 1 + cofi_attention_local_idx(t, batch - 1, rows - 1, t->n_heads - 1, t->dim - 1);
    t->view.byte_offset = c->padded_strides ? 3 * element : 0;
    COF_TRY(cofi_check_memory_open(world, (size_t)n * element + t->view.byte_offset, &t->memory));
    t->view.data = t->memory.data;
    return COF_OK;
}

static struct cofi_attention_bad_element choose_bad(const struct cofi_attention_case *c,
                                                    uint64_t seed)
{
    const cof_attention_params *p = &c->params;
    struct cofi_attention_bad_element bad = {.tensor = COFI_CT_N};
    if (c->data < COFI_DATA_NAN_K)
        return bad;
    bad.tensor = c->data == COFI_DATA_NAN_K ? COFI_CT_K
                 : c->data == COFI_DATA_NAN_Q ? COFI_CT_Q : COFI_CT_V;
    bad.batch = p->n_batch - 1;
    bad.row = (int64_t)(cofi_check_random(seed, 60, 0) % (uint64_t)p->n_rows);
    bad.head = (bad.tensor == COFI_CT_Q ? p->n_heads : p->n_kv_heads) - 1;
    bad.dim = (bad.tensor == COFI_CT_V ? p->head_dim_v : p->head_dim_qk) / 2;
    bad.value = c->data == COFI_DATA_INF_V ? INFINITY : NAN;
    return bad;
}

static void fill_input(const struct cofi_attention_local *local, int which,
                       const struct cofi_attention_view *from, int64_t n_batch,
                       const struct cofi_attention_local_tensor *t)
{
    size_t element = (size_t)cofi_dtype_bytes(t->view.dtype);
    for (int64_t row = 0; row < local->n_rows; row++) {
        int64_t global = cof_layout_global_row(&local->layout, (int)local->rank, row);
        for (int64_t b = 0; b < n_batch && global >= 0; b++)
            for (int64_t h = 0; h < t->n_heads; h++)
                memcpy((char *)cofi_attention_local_data(t) +
                           (size_t)cofi_attention_local_idx(t, b, row, h, 0) * element,
                       (const char *)from->data +
                           (size_t)(b * from->batch_stride + global * from->row_stride +
                                    h * from->head_stride) * element,
                       (size_t)t->dim * element);
        const struct cofi_attention_bad_element *bad = &local->bad;
        if ((int)bad->tensor == which && global == bad->row)
            cofi_check_store(cofi_attention_local_data(t), t->view.dtype,
                             cofi_attention_local_idx(t, bad->batch, row, bad->head, bad->dim),
                             bad->value);
    }
}

cof_status cofi_attention_local_open(const struct cofi_job *job,
                                     const struct cofi_attention_case *c,
                                     struct cofi_attention_local *local)
{
    const cof_attention_params *p = &c->params;
    memset(local, 0, sizeof *local);
    local->layout = (cof_layout){p->layout, p->chunking, job->n_ranks, p->n_rows};
    local->rank = job->rank;
    local->n_rows = cof_layout_local_rows(&local->layout, job->rank);
    local->bad.tensor = COFI_CT_N;
    for (int t = 0; t < COFI_CT_N; t++) {
        if (is_backward(t) && !cofi_attention_case_has_backward(c))
            continue;
        cof_status status = make_tensor(job->world, c, t, local->n_rows, &local->tensor[t]);
        if (status != COF_OK) {
            cofi_attention_local_free(local);
            return status;
        }
    }
    return COF_OK;
}

cof_status cofi_attention_local_make(const struct cofi_job *job,
                                     const struct cofi_attention_case *c, uint64_t seed,
                                     const struct cofi_attention_data *data,
                                     struct cofi_attention_local *local)
{
    const struct cofi_attention_problem *p = &data->problem;
    const struct cofi_attention_view *from[] = {&p->q, &p->k, &p->v, &p->dout};
    COF_TRY(cofi_attention_local_open(job, c, local));
    local->bad = choose_bad(c, seed);
    for (int t = 0; t < COFI_CT_O; t++) {
        if (!local->tensor[t].memory.base)
            continue;
        fill_input(local, t, from[t], p->n_batch, &local->tensor[t]);
        local->tensor[t].hash = hash_of(&local->tensor[t]);
        COF_TRY(cofi_check_memory_upload(&local->tensor[t].memory));
    }
    return COF_OK;
}

void cofi_attention_local_args(const struct cofi_attention_local *local, bool backward,
                               cof_attention_args *args_out)
{
    const struct cofi_attention_local_tensor *t = local->tensor;
    *args_out = (cof_attention_args){.size = sizeof *args_out,
                                     .q = &t[COFI_CT_Q].view,
                                     .k = &t[COFI_CT_K].view,
                                     .v = &t[COFI_CT_V].view,
                                     .o = &t[COFI_CT_O].view,
                                     .lse = &t[COFI_CT_LSE].view};
    if (!backward)
        return;
    args_out->dout = &t[COFI_CT_DOUT].view;
    args_out->dq = &t[COFI_CT_DQ].view;
    args_out->dk = &t[COFI_CT_DK].view;
    args_out->dv = &t[COFI_CT_DV].view;
}

void cofi_attention_local_free(struct cofi_attention_local *local)
{
    for (int t = 0; t < COFI_CT_N; t++)
        cofi_check_memory_close(&local->tensor[t].memory);
}

cof_status cofi_attention_local_poison(struct cofi_attention_local *local)
{
    for (int t = COFI_CT_O; t < COFI_CT_N; t++)
        if (local->tensor[t].memory.base)
            COF_TRY(cofi_check_memory_poison(&local->tensor[t].memory));
    return COF_OK;
}

cof_status cofi_attention_local_download(struct cofi_attention_local *local)
{
    for (int t = 0; t < COFI_CT_N; t++)
        if (local->tensor[t].memory.base)
            COF_TRY(cofi_check_memory_download(&local->tensor[t].memory));
    return COF_OK;
}

/* Poison with the elements laid over it must give what is there. */
static bool gaps_ok(const struct cofi_attention_local *local,
                    const struct cofi_attention_local_tensor *t)
{
    int64_t n_batch = local->tensor[COFI_CT_LSE].shape[0];
    size_t element = (size_t)cofi_dtype_bytes(t->view.dtype);
    unsigned char *wanted = malloc(t->memory.bytes + 1);
    if (!wanted)
        return true;
    memset(wanted, 0xff, t->memory.bytes);
    for (int64_t b = 0; b < n_batch; b++)
        for (int64_t row = 0; row < local->n_rows; row++)
            for (int64_t h = 0; h < t->n_heads; h++) {
                size_t at = t->view.byte_offset +
                            (size_t)cofi_attention_local_idx(t, b, row, h, 0) * element;
                memcpy(wanted + at, t->memory.host + at, (size_t)t->dim * element);
            }
    bool ok = memcmp(wanted, t->memory.host, t->memory.bytes) == 0;
    free(wanted);
    return ok;
}

void cofi_attention_local_inspect(const struct cofi_attention_local *local,
                                  struct cofi_check_result *result)
{
    for (int i = 0; i < COFI_CT_N; i++) {
        const struct cofi_attention_local_tensor *t = &local->tensor[i];
        const char *name = cofi_attention_check_names[i];
        if (!t->memory.base)
            continue;
        if (!cofi_check_memory_intact(&t->memory))
            cofi_check_fail(result, "%s: written outside of the tensor", name);
        if (i < COFI_CT_O && hash_of(t) != t->hash)
            cofi_check_fail(result, "%s: the input was modified", name);
        if (i >= COFI_CT_O && t->view.strides && !gaps_ok(local, t))
            cofi_check_fail(result, "%s: written between the rows", name);
    }
}

void cofi_attention_local_keep(struct cofi_attention_local *local)
{
    for (int t = COFI_CT_O; t < COFI_CT_N; t++)
        if (local->tensor[t].memory.base)
            local->tensor[t].hash = hash_of(&local->tensor[t]);
}

void cofi_attention_local_compare_kept(const struct cofi_attention_local *local, const char *what,
                                       struct cofi_check_result *result)
{
    for (int t = COFI_CT_O; t < COFI_CT_N; t++)
        if (local->tensor[t].memory.base && hash_of(&local->tensor[t]) != local->tensor[t].hash)
            cofi_check_fail(result, "%s: %s differs in bits from the first",
                            cofi_attention_check_names[t], what);
}
