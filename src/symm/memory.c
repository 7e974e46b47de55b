/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "symm/memory.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "core/error.h"

/* The number in a one-line file; false for "max" or no file. */
static bool read_number(const char *path, uint64_t *value)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    bool found = fscanf(file, "%" SCNu64, value) == 1;
    fclose(file);
    return found;
}

static bool memory_available(uint64_t *bytes)
{
    FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file))
        found = sscanf(line, "MemAvailable: %" SCNu64 " kB", bytes) == 1;
    if (file)
        fclose(file);
    *bytes *= found ? 1024 : 1;
    return found;
}

/* This process's cgroup below `mount`: the line of /proc/self/cgroup with this controller list. */
static bool cgroup_file(const char *controller, const char *mount, const char *name, char *path,
                        size_t bytes)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[512];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        char *list = strchr(line, ':'), *dir = list ? strchr(list + 1, ':') : NULL;
        if (!dir)
            continue;
        *dir++ = '\0';
        dir[strcspn(dir, "\n")] = '\0';
        found = *controller ? strstr(list + 1, controller) != NULL : list[1] == '\0';
        if (found)
            snprintf(path, bytes, "%s%s/%s", mount, strcmp(dir, "/") ? dir : "", name);
    }
    if (file)
        fclose(file);
    return found;
}

/* Where one version of cgroups keeps a limit and its use, and how memory.stat begins its names. */
static const struct cgroup {
    const char *controller, *mount, *limit, *usage, *prefix;
} cgroups[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current", ""},
    {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"},
};

/* Page cache (but not shared memory) counts as used, and is given back when memory is wanted. */
static uint64_t cgroup_cache(const struct cgroup *g)
{
    char path[700], line[128], key[64];
    uint64_t sum = 0, bytes;
    size_t skip = strlen(g->prefix);
    if (!cgroup_file(g->controller, g->mount, "memory.stat", path, sizeof path))
        return 0;
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %" SCNu64, key, &bytes) == 2 && !strncmp(key, g->prefix, skip) &&
            (!strcmp(key + skip, "inactive_file") || !strcmp(key + skip, "active_file")))
            sum += bytes;
    if (file)
        fclose(file);
    return sum;
}

static bool cgroup_room(const struct cgroup *g, uint64_t *room)
{
    char path[700];
    uint64_t limit, usage;
    if (!cgroup_file(g->controller, g->mount, g->limit, path, sizeof path) ||
        !read_number(path, &limit))
        return false;
    if (!cgroup_file(g->controller, g->mount, g->usage, path, sizeof path) ||
        !read_number(path, &usage))
        return false;
    uint64_t cache = cgroup_cache(g);
    usage = usage > cache ? usage - cache : 0;
    *room = limit > usage ? limit - usage : 0;
    return true;
}

cof_status cofi_memory_check(size_t bytes)
{
    uint64_t room;
    COF_FAIL_IF(memory_available(&room) && bytes > room, COF_ERR_NOMEM,
                "%zu bytes wanted, %" PRIu64 " are available on this host", bytes, room);
    for (int i = 0; i < 2; i++)
        COF_FAIL_IF(cgroup_room(&cgroups[i], &room) && bytes > room, COF_ERR_NOMEM,
                    "%zu bytes wanted, %" PRIu64 " are left in the cgroup", bytes, room);
    return COF_OK;
}

cof_status cofi_memory_check_file(size_t bytes, size_t file_bytes)
{
    struct rlimit limit;
    COF_FAIL_IF(getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
                    file_bytes > limit.rlim_cur,
                COF_ERR_NOMEM, "%zu bytes wanted, files are limited to %llu (ulimit -f)",
                file_bytes, (unsigned long long)limit.rlim_cur);
    return cofi_memory_check(bytes);
}
