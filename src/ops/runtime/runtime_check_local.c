/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the cases of `cofuse check runtime` share. */
#define _GNU_SOURCE /* usleep */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/hash.h"
#include "ops/runtime/runtime_check.h"

void cofi_runtime_wants(struct cofi_runtime *rt, const char *what, cof_status status,
                        cof_status wanted, const char *part)
{
    const char *text = status == COF_OK ? "" : cof_last_error();
    COFI_EXPECT(rt, status == wanted && (!part || strstr(text, part)),
                "%s: got %s \"%.220s\", wanted %s%s%s", what, cof_status_name(status), text,
                cof_status_name(wanted), part ? " with " : "", part ? part : "");
}

int cofi_runtime_rounds(const struct cofi_runtime *rt, int n)
{
    return rt->options->full ? 10 * n : n;
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

/* ---- messages ---- */

static uint64_t key_of(uint64_t from, uint64_t to, uint64_t idx)
{
    return cofi_check_random(from << 32 | to, 3, idx);
}

static unsigned char byte_of(uint64_t key, size_t i)
{
    return (unsigned char)((key >> (i % 8 * 8)) + i / 8 * 37);
}

void cofi_runtime_fill(void *data, size_t bytes, uint64_t from, uint64_t to, uint64_t idx)
{
    uint64_t key = key_of(from, to, idx);
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)data)[i] = byte_of(key, i);
}

long cofi_runtime_compare(const void *data, size_t bytes, uint64_t from, uint64_t to, uint64_t idx)
{
    uint64_t key = key_of(from, to, idx);
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)data)[i] != byte_of(key, i))
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

char *cofi_runtime_data(cof_arena *arena)
{
    cof_arena_pointers p = COF_ARENA_POINTERS_INIT;
    return cof_arena_view(arena, &p) == COF_OK ? p.base[p.rank] : NULL;
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

struct cofi_runtime_use cofi_runtime_use(void)
{
    struct cofi_runtime_use use = {.n_fds = count_fds()};
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
