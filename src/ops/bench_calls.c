/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/bench_calls.h"

#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/error.h"
#include "core/tensor.h"

enum { N_VALUES = 65521 }; /* prime, so that rows do not repeat each other */

/* ---- memory --------------------------------------------------------------------------------- */

cof_status cofi_bench_memory_open(cof_world *world, size_t bytes, char **data_out)
{
    const struct cofi_check_device *device = cofi_check_device(world);
    void *data = NULL;
    if (device)
        COF_TRY(device->memory_open(world, bytes + 1, &data));
    else
        data = aligned_alloc(128, bytes / 128 * 128 + 128);
    COF_FAIL_IF(!data, COF_ERR_NOMEM, "bench: no memory for %zu bytes", bytes);
    *data_out = data;
    return COF_OK;
}

void cofi_bench_memory_close(cof_world *world, char *data)
{
    const struct cofi_check_device *device = cofi_check_device(world);
    if (device)
        device->memory_close(world, data);
    else
        free(data);
}

cof_status cofi_bench_values_make(cof_dtype dtype, struct cofi_bench_values *values)
{
    values->element = (size_t)cofi_dtype_bytes(dtype);
    values->data = malloc(N_VALUES * values->element);
    COF_FAIL_IF(!values->data, COF_ERR_NOMEM, "bench: no memory for values of tensors");
    for (int64_t i = 0; i < N_VALUES; i++)
        cofi_check_store(values->data, dtype, i, cofi_check_normal(1, 0, (uint64_t)i));
    return COF_OK;
}

void cofi_bench_values_free(struct cofi_bench_values *values)
{
    free(values->data);
}

void cofi_bench_values_copy(const struct cofi_bench_values *values, uint64_t rank, uint64_t tensor,
                            char *to, size_t bytes)
{
    size_t table = N_VALUES * values->element;
    size_t at = cofi_check_random(2, rank, tensor) % N_VALUES * values->element;
    for (size_t done = 0; done < bytes; at = 0) {
        size_t left = bytes - done, n = table - at < left ? table - at : left;
        memcpy(to + done, values->data + at, n);
        done += n;
    }
}

cof_status cofi_bench_values_fill(const struct cofi_bench_values *values, cof_world *world,
                                  uint64_t rank, uint64_t tensor, char *to, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(world);
    char *host = device ? malloc(bytes + 1) : to;
    cof_status status = COF_OK;
    COF_FAIL_IF(!host, COF_ERR_NOMEM, "bench: no memory for %zu bytes", bytes);
    cofi_bench_values_copy(values, rank, tensor, host, bytes);
    if (device) {
        status = device->copy(world, to, host, bytes);
        free(host);
    }
    return status;
}

/* ---- calls ---------------------------------------------------------------------------------- */

cof_status cofi_bench_calls_open(struct cofi_bench_calls *c)
{
    c->device = cofi_check_device(c->job->world);
    if (!c->device)
        return COF_OK;
    COF_TRY(c->device->timer_open(c->job->world, &c->timer));
    return cof_stream_create(c->job->world, 0, &c->stream);
}

void cofi_bench_calls_close(struct cofi_bench_calls *c)
{
    if (!c->device)
        return;
    c->device->release(c->job->world, c->graph);
    c->device->timer_close(c->job->world, c->timer);
    cof_stream_destroy(c->stream);
}

void cofi_bench_calls_take(struct cofi_bench_calls *c, cof_plan *plan)
{
    c->plan = plan;
    c->graph_plan = NULL;
}

struct eager {
    struct cofi_bench_calls *calls;
    cofi_bench_run_fn run;
};

static cof_status enqueue(void *arg, cof_stream stream)
{
    const struct eager *e = arg;
    struct cofi_bench_calls *c = e->calls;
    for (int64_t i = 0; i < c->count; i++)
        COF_TRY(e->run(c->bench, c->plan, 0, (int)(i % c->n_sets), stream));
    return COF_OK;
}

static cof_status replay(void *arg, cof_stream stream)
{
    struct cofi_bench_calls *c = arg;
    return c->device->replay(c->job->world, c->graph, stream);
}

static cof_status capture(struct cofi_bench_calls *c)
{
    struct eager eager = {c, c->run};
    const struct cofi_check_work work = {enqueue, &eager};
    c->device->release(c->job->world, c->graph);
    c->graph = NULL;
    COF_TRY(c->device->capture(c->job->world, &work, c->stream, &c->graph));
    c->graph_plan = c->plan;
    return cof_team_barrier(c->job->team);
}

/* The ranks meet in calls before, which keep the device busy until the timed ones are enqueued. */
static cof_status time_work(struct cofi_bench_calls *c, const struct cofi_check_work *work,
                            double *seconds)
{
    COF_TRY(work->fn(work->arg, c->stream));
    COF_TRY(c->device->time(c->job->world, c->timer, work, c->stream, seconds));
    *seconds /= (double)c->count;
    return cof_team_query(c->job->team);
}

cof_status cofi_bench_calls_time_other(struct cofi_bench_calls *c, cofi_bench_run_fn run,
                                       double *seconds)
{
    struct eager eager = {c, run};
    return time_work(c, &(struct cofi_check_work){enqueue, &eager}, seconds);
}

cof_status cofi_bench_calls_time(struct cofi_bench_calls *c, int direction, int set,
                                 double *seconds)
{
    if (c->device && !c->is_graph)
        return cofi_bench_calls_time_other(c, c->run, seconds);
    if (c->device) {
        if (c->graph_plan != c->plan)
            COF_TRY(capture(c));
        return time_work(c, &(struct cofi_check_work){replay, c}, seconds);
    }
    int64_t begin = cofi_now();
    COF_TRY(c->run(c->bench, c->plan, direction, set, COF_STREAM_NOW));
    *seconds = (double)(cofi_now() - begin) * 1e-9;
    return COF_OK;
}
