/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the cases of `cofuse check runtime` share. */
#define _GNU_SOURCE /* usleep */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/hash.h"
#include "ops/runtime/runtime_check.h"
#include "ops/runtime/runtime_check_message.h"

void cofi_runtime_wants(struct cofi_runtime *rt, const char *what, cof_status status,
                        cof_status wanted, const char *part)
{
    const char *text = status == COF_OK ? "" : cof_last_error();
    COFI_EXPECT(rt, status == wanted && (!part || strstr(text, part)),
                "%s: got %s \"%.220s\", wanted %s%s%s", what, cof_status_name(status), text,
                cof_status_name(wanted), part ? " with " : "", part ? part : "");
}

int cofi_runtime_turns(const struct cofi_runtime *rt, int n)
{
    const struct cofi_runtime_device *device = cofi_runtime_device(rt->job->world);
    const int n_turns = device ? device->n_turns(rt->job->world) : 1;
    const int fewer = n / (n_turns * n_turns), least = n_turns > 2 ? 4 : 8;
    if (n <= least)
        return n;
    return fewer > least ? fewer : least;
}

int cofi_runtime_rounds(const struct cofi_runtime *rt, int n)
{
    return cofi_runtime_turns(rt, n) * (rt->options->full ? 10 : 1);
}

cof_status cofi_runtime_pace(const struct cofi_runtime *rt, int i, cof_stream stream)
{
    enum { QUEUE = 512 }; /* half of what a stream takes */
    int n_calls = QUEUE / (6 * rt->n_ranks + 8); /* launches of a call */
    if (!cofi_check_device(rt->job->world) || i % (n_calls + 1) != n_calls)
        return COF_OK;
    return cof_stream_sync(stream);
}

bool cofi_runtime_are_threads(const cof_world *world)
{
    return world->ops->device && world->n_ranks > 1 && world->hello[0].pid == world->hello[1].pid;
}

cof_status cofi_runtime_settle(struct cofi_runtime *rt)
{
    return cofi_runtime_are_threads(rt->job->world) ? cof_team_barrier(rt->job->team) : COF_OK;
}

unsigned cofi_runtime_random(struct cofi_runtime *rt, unsigned n)
{
    uint64_t x = cofi_check_random(rt->options->seed, 900 + (uint64_t)rt->rank, rt->n_random++);
    return (unsigned)(x % n);
}

void cofi_runtime_sleep_us(unsigned us)
{
    if (us)
        usleep(us);
}

/* ---- the device ---- */

const struct cofi_runtime_device *cofi_runtime_device(const cof_world *world)
{
    const struct cofi_check_device *device = cofi_check_device(world);
    return device ? device->runtime : NULL;
}

void *cofi_runtime_alloc(const cof_world *world, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(world);
    void *data = device ? device->alloc(bytes) : malloc(bytes ? bytes : 1);
    if (data)
        memset(data, 0, bytes);
    return data;
}

void cofi_runtime_free(const cof_world *world, void *data)
{
    const struct cofi_check_device *device = cofi_check_device(world);
    if (device)
        device->free(data);
    else
        free(data);
}

/* ---- messages ---- */

void cofi_runtime_fill(void *data, size_t bytes, uint64_t from, uint64_t to, uint64_t idx)
{
    uint64_t key = cofi_message_key(from, to, idx);
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)data)[i] = cofi_message_byte(key, i);
}

long cofi_runtime_compare(const void *data, size_t bytes, uint64_t from, uint64_t to, uint64_t idx)
{
    uint64_t key = cofi_message_key(from, to, idx);
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)data)[i] != cofi_message_byte(key, i))
            return (long)i;
    return -1;
}

/* ---- worlds and arenas ---- */

cof_status cofi_runtime_world(struct cofi_runtime *rt, cof_world **world_out)
{
    int64_t own = cofi_now() ^ (int64_t)getpid() << 40, all[COFI_RUNTIME_MAX_RANKS];
    char job[64];
    COF_TRY(cof_team_allgather(rt->job->team, &own, all, sizeof own));
    snprintf(job, sizeof job, "cofuse-check-runtime-%llx", (unsigned long long)all[0]);
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.n_ranks = rt->n_ranks;
    o.rank = rt->rank;
    o.job = job;
    const struct cofi_runtime_device *on = cofi_runtime_device(rt->job->world);
    char device[32];
    if (on) {
        on->name(rt->job->world, device, sizeof device);
        o.device = device;
    }
    o.engine = rt->job->world->engine;
    o.n_threads = 1;
    o.run_timeout = 20;
    return cof_world_create(&o, world_out);
}

cof_status cofi_runtime_arena(struct cofi_runtime *rt, cof_team *team, size_t bytes,
                              uint32_t first_epoch, struct cofi_check_arena *arena_out)
{
    return cofi_check_arena_open(rt->job, team, bytes, 4, first_epoch, arena_out);
}

/* ---- own data ---- */

cof_status cofi_runtime_copy(cof_arena *arena, void *dst, const void *src, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(arena->team->world);
    if (device)
        return device->copy(arena->team->world, dst, src, bytes);
    memcpy(dst, src, bytes);
    return COF_OK;
}

cof_status cofi_runtime_read(cof_arena *arena, size_t offset, void *dst, size_t bytes)
{
    return cofi_runtime_copy(arena, dst, cofi_arena_data(arena) + offset, bytes);
}

cof_status cofi_runtime_write(cof_arena *arena, size_t offset, const void *src, size_t bytes)
{
    return cofi_runtime_copy(arena, cofi_arena_data(arena) + offset, src, bytes);
}

cof_status cofi_runtime_set(cof_arena *arena, size_t offset, int byte, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(arena->team->world);
    if (device)
        return device->fill(arena->team->world, cofi_arena_data(arena) + offset, byte, bytes);
    memset(cofi_arena_data(arena) + offset, byte, bytes);
    return COF_OK;
}

const unsigned char *cofi_runtime_look(struct cofi_runtime *rt, cof_arena *arena)
{
    size_t bytes = cof_arena_bytes(arena);
    if (!cofi_check_device(arena->team->world))
        return (unsigned char *)cofi_arena_data(arena);
    unsigned char *data = malloc(bytes + 1);
    cof_status status = data ? cofi_runtime_read(arena, 0, data, bytes)
                             : COF_FAIL(COF_ERR_NOMEM, "check: no memory for %zu bytes", bytes);
    if (status == COF_OK)
        return data;
    cofi_check_fail(rt->result, "the arena's data: %.300s", cof_last_error());
    free(data);
    return NULL;
}

void cofi_runtime_look_end(cof_arena *arena, const unsigned char *data)
{
    if (cofi_check_device(arena->team->world))
        free((void *)(uintptr_t)data);
}

uint32_t cofi_runtime_epoch(cof_arena *arena)
{
    const struct cofi_runtime_device *device = cofi_runtime_device(arena->team->world);
    uint32_t epoch = 0;
    if (!device)
        return atomic_load(&arena->epoch);
    return device->epoch(arena, &epoch) == COF_OK ? epoch : 0;
}

cof_status cofi_runtime_set_epoch(cof_arena *arena, uint32_t epoch)
{
    const struct cofi_runtime_device *device = cofi_runtime_device(arena->team->world);
    if (device)
        return device->set_epoch(arena, epoch);
    atomic_store(&arena->epoch, epoch);
    return COF_OK;
}

/* ---- what this process holds ---- */

static long count_fds(void)
{
    long n = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n;
}

struct cofi_runtime_use cofi_runtime_use(const cof_world *world)
{
    const struct cofi_runtime_device *device = cofi_runtime_device(world);
    struct cofi_runtime_use use = {.n_fds = count_fds(),
                                   .device_bytes = device ? device->used_bytes(world) : 0};
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512];
    while (file && fgets(line, sizeof line, file)) {
        unsigned long long begin, end;
        bool complete = strchr(line, '\n') != NULL;
        if (sscanf(line, "%llx-%llx %*[r]", &begin, &end) == 2) {
            use.n_maps += complete;
            use.bytes += end - begin;
        }
    }
    if (file)
        fclose(file);
    return use;
}
