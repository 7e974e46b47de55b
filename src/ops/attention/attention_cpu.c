/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The row-wise ends of the CPU engine: setting up the running state, and rounding results out of
 * it. The sections themselves are in attention_cpu_forward.c and attention_cpu_backward.c. */
#include "ops/attention/attention_cpu.h"

#include <math.h>
#include <string.h>

#include "backend/cpu/vec.h"
#include "ops/attention/attention_cpu_tiles.h"

#define BLOCK_ROWS 512 /* rows of one head a task handles */

/* fn for rows row0 .. row1-1 of every (batch, head), in parallel. */
struct row_job {
    void (*fn)(const struct row_job *job, int64_t b, int64_t h, int64_t row0, int64_t row1);
    int64_t n_heads, n_rows;
    const struct cofi_attention_dims *dims;
    const struct cofi_vec_ops *vec;
    const struct cofi_attention_state *state;
    const struct cofi_attention_grad_state *grad;
    const struct cofi_attention_view *in[2], *out[2];
    const float *acc[2];
    float *lse_out;
    const float *lse_in;
    int64_t lse_batch_stride, lse_head_stride, row_begin;
    bool out_f32; /* whatever the type of the plan */
    enum cofi_elem out_elem;
};

static void row_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    (void)worker;
    const struct row_job *job = arg;
    const int64_t n_blocks = (job->n_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t lane = task / n_blocks, row0 = task % n_blocks * BLOCK_ROWS;
    job->fn(job, lane / job->n_heads, lane % job->n_heads, row0,
            cofi_clamp(row0 + BLOCK_ROWS, 0, job->n_rows));
}

static void run_rows(struct cofi_cpu_stream *stream, struct row_job *job)
{
    const int64_t n_blocks = job->n_rows > 0 ? (job->n_rows + BLOCK_ROWS - 1) / BLOCK_ROWS : 0;
    const int64_t n_tasks = job->dims->n_batch * job->n_heads * n_blocks;
    job->vec = cofi_vec();
    job->out_elem = job->out_f32 ? COFI_ELEM_F32 : job->dims->elem;
    if (n_tasks > 0)
        cofi_cpu_parallel(stream, n_tasks, row_task, job);
}

/* One fp32 row to row (b, row, h) of an output. */
static void store_row(const struct row_job *job, const struct cofi_attention_view *out, int64_t b,
                      int64_t row, int64_t h, const float *src, int64_t dim)
{
    void *dst = cofi_view_at(out, cofi_elem_bytes(job->out_elem), b, row, h);
    cofi_vec_store(job->vec, job->out_elem, dst, src, dim);
}

static void zero_rows(float *data, int64_t row, int64_t n_rows, int64_t dim)
{
    memset(data + row * dim, 0, (size_t)(n_rows * dim) * sizeof *data);
}

static void begin_rows(const struct row_job *job, int64_t b, int64_t h, int64_t row0, int64_t row1)
{
    const struct cofi_attention_state *state = job->state;
    const int64_t lane_row = (b * job->n_heads + h) * state->n_rows;
    zero_rows(state->acc, lane_row + row0, row1 - row0, job->dims->dim_v);
    zero_rows(state->l, lane_row + row0, row1 - row0, 1);
    for (int64_t i = row0; i < row1; i++)
        state->m[lane_row + i] = -INFINITY;
}

void cofi_attention_cpu_begin(struct cofi_cpu_stream *stream,
                              const struct cofi_attention_dims *dims,
                              const struct cofi_attention_state *state)
{
    struct row_job job = {.fn = begin_rows, .dims = dims, .n_heads = dims->n_heads,
                          .n_rows = state->n_rows, .state = state};
    run_rows(stream, &job);
}

static void finish_rows(const struct row_job *job, int64_t b, int64_t h, int64_t row0, int64_t row1)
{
    const struct cofi_attention_state *state = job->state;
    const int64_t dim = job->dims->dim_v, lane_row = (b * job->n_heads + h) * state->n_rows;
    float *lse = job->lse_out + b * job->lse_batch_stride + h * job->lse_head_stride;
    float o[TILE_DIM];
    for (int64_t i = row0; i < row1; i++) {
        const float l = state->l[lane_row + i];
        lse[i] = l == 0 ? -INFINITY : state->m[lane_row + i] + logf(l);
        if (l == 0) {
            memset(o, 0, (size_t)dim * sizeof *o);
        } else {
            memcpy(o, state->acc + (lane_row + i) * dim, (size_t)dim * sizeof *o);
            job->vec->scale(o, 1 / l, dim);
        }
        store_row(job, job->out[0], b, i, h, o, dim);
    }
}

void cofi_attention_cpu_finish(struct cofi_cpu_stream *stream,
                               const struct cofi_attention_dims *dims,
                               const struct cofi_attention_state *state,
                               const struct cofi_attention_view *o, float *lse,
                               int64_t lse_batch_stride, int64_t lse_head_stride)
{
    struct row_job job = {.fn = finish_rows, .dims = dims, .n_heads = dims->n_heads,
                          .n_rows = state->n_rows, .state = state, .out = {o}, .lse_out = lse,
                          .lse_batch_stride = lse_batch_stride, .lse_head_stride = lse_head_stride};
    run_rows(stream, &job);
}

static void grad_begin_rows(const struct row_job *job, int64_t b, int64_t h, int64_t row0,
                            int64_t row1)
{
    const struct cofi_attention_grad_state *grad = job->grad;
    const int64_t dim = job->dims->dim_v, lane_row = (b * job->n_heads + h) * grad->n_q_rows;
    const float *lse = job->lse_in + b * job->lse_batch_stride + h * job->lse_head_stride;
    const int64_t elem_bytes = cofi_elem_bytes(job->dims->elem);
    zero_rows(grad->dq, lane_row + row0, row1 - row0, job->dims->dim_qk);
    memcpy(grad->lse + lane_row + row0, lse + row0, (size_t)(row1 - row0) * sizeof *lse);
    for (int64_t i = row0; i < row1; i++) {
        const void *o = cofi_view_at(job->in[0], elem_bytes, b, i, h);
        const void *dout = cofi_view_at(job->in[1], elem_bytes, b, i, h);
        grad->delta[lane_row + i] = cofi_vec_dot(job->vec, job->dims->elem, dout, o, dim);
    }
}

void cofi_attention_cpu_grad_begin(struct cofi_cpu_stream *stream,
                                   const struct cofi_attention_dims *dims,
                                   const struct cofi_attention_grad_state *state,
                                   const struct cofi_attention_view *o,
                                   const struct cofi_attention_view *dout, const float *lse,
                                   int64_t lse_batch_stride, int64_t lse_head_stride)
{
    struct row_job job = {.fn = grad_begin_rows, .dims = dims, .n_heads = dims->n_heads,
                          .n_rows = state->n_q_rows, .grad = state, .in = {o, dout}, .lse_in = lse,
                          .lse_batch_stride = lse_batch_stride, .lse_head_stride = lse_head_stride};
    run_rows(stream, &job);
}

static void partial_begin_rows(const struct row_job *job, int64_t b, int64_t h, int64_t row0,
                               int64_t row1)
{
    const int64_t row = (b * job->n_heads + h) * job->grad->n_k_rows + row0;
    zero_rows(job->grad->dk, row, row1 - row0, job->dims->dim_qk);
    zero_rows(job->grad->dv, row, row1 - row0, job->dims->dim_v);
}

void cofi_attention_cpu_partial_begin(struct cofi_cpu_stream *stream,
                                      const struct cofi_attention_dims *dims,
                                      const struct cofi_attention_grad_state *state, int64_t n_rows)
{
    struct row_job job = {.fn = partial_begin_rows, .dims = dims, .n_heads = dims->n_heads,
                          .n_rows = n_rows, .grad = state};
    run_rows(stream, &job);
}

/* One of dk (which = 0) and dv (1): acc first, then the group's query heads in order. */
static void partial_store_one(const struct row_job *job, int which, int64_t b, int64_t kv_head,
                              int64_t row)
{
    const struct cofi_attention_dims *dims = job->dims;
    const int64_t group = dims->n_heads / dims->n_kv_heads, src_row = job->row_begin + row;
    const int64_t dim = which == 0 ? dims->dim_qk : dims->dim_v;
    const float *src = which == 0 ? job->grad->dk : job->grad->dv, *acc = job->acc[which];
    const int64_t first_head = b * dims->n_heads + kv_head * group;
    float sum[TILE_DIM];
    if (acc)
        memcpy(sum, acc + ((row * dims->n_batch + b) * dims->n_kv_heads + kv_head) * dim,
               (size_t)dim * sizeof *sum);
    for (int64_t g = 0; g < group; g++) {
        const float *part = src + ((first_head + g) * job->grad->n_k_rows + src_row) * dim;
        if (g == 0 && !acc)
            memcpy(sum, part, (size_t)dim * sizeof *sum);
        else
            job->vec->add_f32(sum, part, dim);
    }
    store_row(job, job->out[which], b, row, kv_head, sum, dim);
}

static void partial_store_rows(const struct row_job *job, int64_t b, int64_t h, int64_t row0,
                               int64_t row1)
{
    for (int64_t row = row0; row < row1; row++) {
        partial_store_one(job, 0, b, h, row);
        partial_store_one(job, 1, b, h, row);
    }
}

void cofi_attention_cpu_partial_store(struct cofi_cpu_stream *stream,
                                      const struct cofi_attention_dims *dims,
                                      const struct cofi_attention_grad_state *state,
                                      int64_t row_begin, int64_t n_rows, const float *acc_k,
                                      const float *acc_v, bool wire_f32,
                                      const struct cofi_attention_view *dk,
                                      const struct cofi_attention_view *dv)
{
    struct row_job job = {.fn = partial_store_rows, .dims = dims, .n_heads = dims->n_kv_heads,
                          .n_rows = n_rows, .grad = state, .acc = {acc_k, acc_v}, .out = {dk, dv},
                          .row_begin = row_begin, .out_f32 = wire_f32};
    run_rows(stream, &job);
}

static void dq_store_rows(const struct row_job *job, int64_t b, int64_t h, int64_t row0,
                          int64_t row1)
{
    const int64_t dim = job->dims->dim_qk, lane_row = (b * job->n_heads + h) * job->grad->n_q_rows;
    for (int64_t i = row0; i < row1; i++)
        store_row(job, job->out[0], b, i, h, job->grad->dq + (lane_row + i) * dim, dim);
}

void cofi_attention_cpu_dq_store(struct cofi_cpu_stream *stream,
                                 const struct cofi_attention_dims *dims,
                                 const struct cofi_attention_grad_state *state,
                                 const struct cofi_attention_view *dq)
{
    struct row_job job = {.fn = dq_store_rows, .dims = dims, .n_heads = dims->n_heads,
                          .n_rows = state->n_q_rows, .grad = state, .out = {dq}};
    run_rows(stream, &job);
}
