/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans of attention on CUDA devices: sizes, memory, kernels of all sections, streams and events.
 * All of it is made with the plan; calls only launch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/config.h"
#include "core/log.h"
#include "ops/attention/attention_device.h"
#include "ops/attention/attention_move_cuda.h"
#include "symm/engine_cuda.h"
#include "symm/options_cuda.h"
#include "symm/stream.h"

/* Of the kernel that ends a call, where it has padding to fill: each reads the poison in the host's
 * memory, one after the other. 66 took 73 us (two H200), one about 4. */
#define FINISH_BLOCKS 4

/* What the last job's merges read and write, from which on its heads are two sections: about 6 us
 * of a merge, for an event and a launch more. */
#define SPLIT_MIN_BYTES ((double)(24 << 20))

/* ---- sizes ---------------------------------------------------------------------------------- */

struct cofi_attention_strides cofi_attention_by_rows(const struct cofi_attention_plan *plan,
                                                     int64_t n_heads, int64_t dim)
{
    return (struct cofi_attention_strides){n_heads * dim, plan->dims.n_batch * n_heads * dim, dim};
}

static struct cofi_attention_strides strides_of(const struct cofi_attention_plan *plan,
                                                int64_t rows, int64_t n_heads, int64_t dim)
{
    if (plan->params.format == COF_FORMAT_SBHD)
        return cofi_attention_by_rows(plan, n_heads, dim);
    return (struct cofi_attention_strides){rows * n_heads * dim, n_heads * dim, dim};
}

struct cofi_attention_strides cofi_attention_compact(const struct cofi_attention_plan *plan,
                                                     int64_t n_heads, int64_t dim)
{
    return strides_of(plan, plan->local_rows, n_heads, dim);
}

struct cofi_attention_strides cofi_attention_slot_strides(const struct cofi_attention_plan *plan,
                                                          int64_t n_heads, int64_t dim)
{
    return strides_of(plan, plan->max_rows, n_heads, dim);
}

static cof_status make_steps(const struct cofi_attention_plan *plan,
                             struct cofi_attention_steps *steps)
{
    const struct cofi_attention_steps_spec spec = {
        .layout = plan->layout, .sight = plan->sight, .rank = plan->rank,
        .gathers = cofi_attention_gathers(plan), .is_exact = plan->dims.elem == COFI_ELEM_F32};
    return cofi_attention_steps_make(&spec, steps);
}

/* Bytes of the plan's memory; sets the pointers when `base` is not NULL. */
static size_t place(const struct cofi_attention_plan *plan,
                    const struct cofi_attention_steps *steps, char *base,
                    struct cofi_attention_places *at)
{
    const struct cofi_attention_dims *d = &plan->dims;
    const size_t e = (size_t)cofi_elem_bytes(d->elem), f = sizeof(float);
    const size_t heads = (size_t)(d->n_batch * d->n_heads), rows = (size_t)plan->local_rows;
    const size_t kv_heads = (size_t)(d->n_batch * d->n_kv_heads);
    const size_t dim_qk = (size_t)d->dim_qk, dim_v = (size_t)d->dim_v;
    const size_t partial_rows = (size_t)steps->partial_rows;
    size_t used = 0;
    *at = (struct cofi_attention_places){.partial = NULL};
    if (cofi_attention_gathers(plan))
        at->gathered = cofi_attention_take_kv(plan, base, &used, steps->buffer_rows, d->elem);
    at->partial = cofi_take(base, &used, partial_rows * heads * dim_v * e);
    at->partial_lse = cofi_take(base, &used, partial_rows * heads * f);
    if (steps->has_acc)
        at->acc = cofi_take(base, &used, rows * heads * dim_v * f);
    if (plan->params.only_compact)
        return used;
    at->q = cofi_take(base, &used, rows * heads * dim_qk * e);
    at->k = cofi_take(base, &used, rows * kv_heads * dim_qk * e);
    at->v = cofi_take(base, &used, rows * kv_heads * dim_v * e);
    at->o = cofi_take(base, &used, rows * heads * dim_v * e);
    at->lse = cofi_take(base, &used, rows * heads * f);
    return used;
}

/* Bytes of the ring's receive slots in the arena's data: none for one rank. */
static size_t place_slots(const struct cofi_attention_plan *plan, struct cofi_kv_buffer slot[2])
{
    size_t used = 0;
    for (int i = 0; i < cofi_grad_slots(plan->n_ranks); i++)
        slot[i] = cofi_attention_take_kv(plan, NULL, &used, plan->max_rows, plan->dims.elem);
    return used;
}

static cof_status lay_out(struct cofi_attention_plan *plan)
{
    struct cofi_attention_steps steps;
    struct cofi_attention_places at;
    struct cofi_kv_buffer slot[2];
    size_t used = 0;
    COF_TRY(make_steps(plan, &steps));
    plan->local_bytes = place(plan, &steps, NULL, &at);
    cofi_attention_steps_free(&steps);
    if (cofi_attention_gathers(plan))
        plan->published =
            cofi_attention_take_kv(plan, NULL, &used, plan->max_rows, plan->dims.elem);
    else
        used = place_slots(plan, slot);
    plan->symmetric_bytes = used;
    return COF_OK;
}

static cof_status check(const struct cofi_attention_plan *plan)
{
    COF_FAIL_IF(!plan->params.forward_only, COF_ERR_UNSUPPORTED,
                "attention: backward on CUDA devices is not there yet: set params.forward_only");
    return COF_OK;
}

static void describe(const struct cofi_attention_plan *plan, char *text, size_t bytes)
{
    snprintf(text, bytes, "only_compact=%d kernels=%s", plan->params.only_compact,
             cofi_config_text(COFI_VAR_ATTENTION_ENGINE));
}

/* ---- kernels -------------------------------------------------------------------------------- */

/* Of so many kv heads. */
static struct cofi_attention_shape shape_of(const struct cofi_attention_plan *plan,
                                            const struct cofi_attention_device *d,
                                            const struct cofi_attention_job *job,
                                            int64_t n_kv_heads)
{
    const struct cofi_attention_dims *n = &plan->dims;
    struct cofi_attention_shape shape = {
        .elem = n->elem, .n_batch = n->n_batch,
        .n_heads = n_kv_heads * (n->n_heads / n->n_kv_heads), .n_kv_heads = n_kv_heads,
        .dim_qk = n->dim_qk, .dim_v = n->dim_v, .q_rows = job->pair.q_rows,
        .k_rows = job->pair.k_rows, .band = job->pair.band, .scale = n->scale,
        .q = cofi_attention_compact(plan, n->n_heads, n->dim_qk),
        .k = cofi_attention_slot_strides(plan, n->n_kv_heads, n->dim_qk),
        .v = cofi_attention_slot_strides(plan, n->n_kv_heads, n->dim_v),
        .o = cofi_attention_by_rows(plan, n->n_heads, n->dim_v),
        .lse_batch = n->n_heads * d->steps.partial_rows, .lse_head = d->steps.partial_rows};
    if (job->step == 0) {
        shape.k = cofi_attention_compact(plan, n->n_kv_heads, n->dim_qk);
        shape.v = cofi_attention_compact(plan, n->n_kv_heads, n->dim_v);
    } else if (cofi_attention_gathers(plan)) {
        shape.k = cofi_attention_by_rows(plan, n->n_kv_heads, n->dim_qk);
        shape.v = cofi_attention_by_rows(plan, n->n_kv_heads, n->dim_v);
    }
    if (job->is_first) {
        shape.o = cofi_attention_compact(plan, n->n_heads, n->dim_v);
        shape.lse_batch = n->n_heads * plan->local_rows;
        shape.lse_head = plan->local_rows;
    }
    return shape;
}

/* This rank's own words, behind those that the ranks compared. */
static void describe_engines(struct cofi_attention_plan *plan,
                             const struct cofi_attention_device *d)
{
    char *text = plan->base.describe;
    const size_t bytes = sizeof plan->base.describe;
    snprintf(text + strlen(text), bytes - strlen(text), " sections=%s",
             d->steps.n_jobs == 0 ? "none" : "");
    for (int i = 0; i < d->steps.n_jobs; i++) {
        const char *name = cofi_attention_kernels_engine(&d->kernels, d->kernel[i]);
        bool is_new = true;
        for (int j = 0; j < i; j++)
            is_new &= strcmp(name, cofi_attention_kernels_engine(&d->kernels, d->kernel[j])) != 0;
        if (is_new)
            snprintf(text + strlen(text), bytes - strlen(text), "%s%s", i > 0 ? "+" : "", name);
    }
}

/* Whether the own section has a stream to itself: where another one follows in step 1, and no part
 * of it is merged, which would want the same buffer as those of the other. */
static bool owns_beside(const struct cofi_attention_plan *plan,
                        const struct cofi_attention_steps *steps)
{
    if (cofi_attention_gathers(plan) || steps->n_fetches == 0 ||
        steps->fetches[0].owner != (plan->rank + plan->n_ranks - 1) % plan->n_ranks)
        return false;
    for (int i = 0; i < steps->n_jobs; i++)
        if (steps->jobs[i].step == 0 && !steps->jobs[i].is_first)
            return false;
    return true;
}

/* Whether the job with so many kv heads is for the same engine as whole. */
static bool has_same_engine(const struct cofi_attention_plan *plan,
                            const struct cofi_attention_device *d,
                            const struct cofi_attention_job *job, int64_t n_kv_heads)
{
    const struct cofi_attention_engine *whole, *part;
    struct cofi_attention_shape shape = shape_of(plan, d, job, plan->dims.n_kv_heads);
    struct cofi_attention_shape some = shape_of(plan, d, job, n_kv_heads);
    return cofi_attention_engine_choose(d->device, &shape, &whole) == COF_OK &&
           cofi_attention_engine_choose(d->device, &some, &part) == COF_OK && whole == part;
}

/* The last job is split where its merge takes longer than what a split costs, and where rows of
 * every head begin at multiples of 16 bytes. */
static cof_status open_split(struct cofi_attention_plan *plan, struct cofi_attention_device *d)
{
    const struct cofi_attention_dims *n = &plan->dims;
    const int64_t element = cofi_elem_bytes(n->elem), n_rest = (n->n_kv_heads + 3) / 4;
    const int last = d->steps.n_jobs - 1;
    d->split_job = -1;
    if (!owns_beside(plan, &d->steps) || last < 1 || n->n_kv_heads < 2 ||
        n->dim_qk * element % 16 || n->dim_v * element % 16)
        return COF_OK;
    const struct cofi_attention_job *job = &d->steps.jobs[last];
    const double row_bytes = (double)(n->n_batch * n->n_heads * n->dim_v * element);
    if (job->n_merges == 0 || 3 * row_bytes * (double)job->pair.q_rows < SPLIT_MIN_BYTES ||
        !has_same_engine(plan, d, job, n->n_kv_heads - n_rest) ||
        !has_same_engine(plan, d, job, n_rest))
        return COF_OK;
    d->split_job = last;
    d->split_kv_heads = n->n_kv_heads - n_rest;
    for (int i = 0; i < 2; i++) {
        struct cofi_attention_shape shape =
            shape_of(plan, d, job, i == 0 ? d->split_kv_heads : n_rest);
        COF_TRY(cofi_attention_kernels_open(&d->kernels, &shape, &d->split_kernel[i]));
    }
    return COF_OK;
}

static cof_status open_kernels(struct cofi_attention_plan *plan, struct cofi_attention_device *d)
{
    d->kernel = calloc((size_t)d->steps.n_jobs + 1, sizeof *d->kernel);
    COF_FAIL_IF(!d->kernel, COF_ERR_NOMEM, "attention plan: no memory");
    for (int i = 0; i < d->steps.n_jobs; i++) {
        struct cofi_attention_shape shape =
            shape_of(plan, d, &d->steps.jobs[i], plan->dims.n_kv_heads);
        COF_TRY(cofi_attention_kernels_open(&d->kernels, &shape, &d->kernel[i]));
    }
    COF_TRY(open_split(plan, d));
    COF_CUDA(cofi_load_attention_move(&d->is_dependent));
    describe_engines(plan, d);
    return COF_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

static cof_status open_memory(struct cofi_attention_plan *plan, struct cofi_attention_device *d)
{
    bool is_vmm = plan->base.team->world->device->memory == COFI_MEMORY_VMM;
    if (plan->local_bytes)
        COF_TRY(cofi_cuda_block_make(d->device, is_vmm, plan->local_bytes, &d->memory));
    place(plan, &d->steps, d->memory.base, &d->at);
    if (!cofi_attention_gathers(plan))
        place_slots(plan, d->slot);
    if (owns_beside(plan, &d->steps))
        d->beside_workspace = (d->kernels.workspace_bytes + 255) / 256 * 256;
    if (d->kernels.workspace_bytes)
        COF_TRY(cofi_cuda_block_make(d->device, is_vmm,
                                     d->beside_workspace + d->kernels.workspace_bytes,
                                     &d->workspace));
    return COF_OK;
}

/* C goes before the sections where both have blocks to place: in gather it launches small kernels,
 * and others wait for it. */
static cof_status open_streams(struct cofi_attention_plan *plan, struct cofi_attention_device *d)
{
    cudaEvent_t *events[] = {&d->called,      &d->begun,   &d->turned, &d->split, &d->joined,
                             &d->beside_done, &d->sent[0], &d->sent[1]};
    int least, greatest;
    if (plan->n_ranks == 1)
        return COF_OK;
    COF_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    COF_CUDA(cudaStreamCreateWithPriority(&d->comm, cudaStreamNonBlocking, greatest));
    if (owns_beside(plan, &d->steps))
        COF_CUDA(cudaStreamCreateWithPriority(&d->beside, cudaStreamNonBlocking, least));
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        COF_CUDA(cudaEventCreateWithFlags(events[i], cudaEventDisableTiming));
    return COF_OK;
}

static cof_status open_all(struct cofi_attention_plan *plan, struct cofi_attention_device *d)
{
    COF_TRY(make_steps(plan, &d->steps));
    COF_TRY(open_kernels(plan, d));
    COF_TRY(open_memory(plan, d));
    return open_streams(plan, d);
}

static bool has_padding(const struct cofi_attention_plan *plan)
{
    return cof_layout_valid_rows(&plan->layout, plan->rank) < plan->local_rows;
}

static cof_status open_plan(struct cofi_attention_plan *plan)
{
    const struct cofi_cuda_world *w = plan->base.team->world->device;
    struct cofi_attention_device *d = calloc(1, sizeof *d);
    struct cofi_cuda_scope scope;
    COF_FAIL_IF(!d, COF_ERR_NOMEM, "attention plan: no memory");
    plan->device = d;
    d->device = w->device;
    d->kernels.device = w->device;
    d->n_move_blocks = cofi_cuda_share(w, 2 * w->n_sms, 0);
    d->n_finish_blocks = has_padding(plan) ? FINISH_BLOCKS : 1;
    COF_TRY(cofi_cuda_enter(d->device, &scope));
    cof_status status = open_all(plan, d);
    cofi_cuda_leave(&scope);
    return status;
}

static void close_all(struct cofi_attention_device *d)
{
    cudaEvent_t events[] = {d->called,      d->begun,   d->turned, d->split, d->joined,
                            d->beside_done, d->sent[0], d->sent[1]};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++)
        if (events[i])
            cudaEventDestroy(events[i]);
    cofi_attention_kernels_close(&d->kernels);
    if (d->comm)
        cudaStreamDestroy(d->comm);
    if (d->beside)
        cudaStreamDestroy(d->beside);
    cofi_cuda_block_close(&d->memory);
    cofi_cuda_block_close(&d->workspace);
}

static void close_plan(struct cofi_attention_plan *plan)
{
    struct cofi_attention_device *d = plan->device;
    struct cofi_cuda_scope scope;
    if (!d)
        return;
    if (cofi_cuda_enter(d->device, &scope) == COF_OK) {
        close_all(d);
        cofi_cuda_leave(&scope);
    }
    cofi_attention_steps_free(&d->steps);
    free(d->kernel);
    free(d);
}

static cof_status run_parts(struct cofi_attention_plan *plan,
                            const struct cofi_attention_call *call, int parts, cof_stream stream)
{
    struct cofi_attention_device *d = plan->device;
    struct cofi_cuda_scope scope;
    void *handle;
    COF_TRY(cofi_stream_begin_device(plan->base.team->world, stream, &handle));
    cof_status status = cofi_arena_look(plan->binding.arena);
    if (status == COF_OK)
        status = cofi_cuda_enter(d->device, &scope);
    if (status == COF_OK) {
        status = cofi_attention_device_forward(plan, call, parts, handle);
        cofi_cuda_leave(&scope);
    }
    return cofi_stream_end_device(plan->binding.arena, stream, status);
}

static cof_status run(struct cofi_attention_plan *plan, const struct cofi_attention_call *call,
                      bool backward, cof_stream stream)
{
    (void)backward; /* refused: plans are forward_only */
    return run_parts(plan, call, COFI_PART_ALL, stream);
}

/* The default is the ring at every size: it was the faster one from 2048 rows on, where its own
 * section hides the transfer. */
static const struct cofi_attention_backend backend = {
    .name = "cuda", .check = check, .gather_max_rows = 0, .lay_out = lay_out,
    .describe = describe, .open = open_plan, .close = close_plan, .run = run,
    .run_parts = run_parts};

const struct cofi_attention_backend *cofi_attention_cuda(void)
{
    return &backend;
}
