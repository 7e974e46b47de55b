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

static bool memory_available(const char *root, uint64_t *bytes)
{
    char path[600], line[128];
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file))
        found = sscanf(line, "MemAvailable: %" SCNu64 " kB", bytes) == 1;
    if (file)
        fclose(file);
    if (found)
        *bytes *= 1024;
    return found;
}

/* Where one version of cgroups keeps a limit and its use, and how memory.stat begins its names. */
static const struct cgroup {
    const char *controller, *mount, *limit, *usage, *prefix;
} cgroups[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current", ""},
    {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"},
};

/* This process's directory below the mount: the line of /proc/self/cgroup with the controller. */
static bool cgroup_directory(const char *root, const struct cgroup *g, char *path, size_t bytes)
{
    char line[512];
    bool found = false;
    snprintf(path, bytes, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        char *list = strchr(line, ':'), *dir = list ? strchr(list + 1, ':') : NULL;
        if (!dir)
            continue;
        *dir++ = '\0';
        dir[strcspn(dir, "\n")] = '\0';
        found = *g->controller ? strstr(list + 1, g->controller) != NULL : list[1] == '\0';
        if (found)
            snprintf(path, bytes, "%s%s%s", root, g->mount, strcmp(dir, "/") ? dir : "");
    }
    if (file)
        fclose(file);
    return found;
}

/* Page cache (but not shared memory) counts as used, and is given back when memory is wanted. */
static uint64_t cgroup_cache(const char *directory, const struct cgroup *g)
{
    char path[700], line[128], key[64];
    uint64_t sum = 0, bytes;
    size_t skip = strlen(g->prefix);
    snprintf(path, sizeof path, "%s/memory.stat", directory);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %" SCNu64, key, &bytes) == 2 && !strncmp(key, g->prefix, skip) &&
            (!strcmp(key + skip, "inactive_file") || !strcmp(key + skip, "active_file")))
            sum += bytes;
    if (file)
        fclose(file);
    return sum;
}

static bool directory_room(const char *directory, const struct cgroup *g, uint64_t *room)
{
    char path[700];
    uint64_t limit, usage;
    snprintf(path, sizeof path, "%s/%s", directory, g->limit);
    if (!read_number(path, &limit))
        return false;
    snprintf(path, sizeof path, "%s/%s", directory, g->usage);
    if (!read_number(path, &usage))
        return false;
    uint64_t cache = cgroup_cache(directory, g);
    usage = usage > cache ? usage - cache : 0;
    *room = limit > usage ? limit - usage : 0;
    return true;
}

/* The least of this process's cgroup and those above it, up to the mount. In a container the path
 * may lie outside of what is mounted: the mount itself is then the container's group. */
static bool cgroup_room(const char *root, const struct cgroup *g, uint64_t *least)
{
    char path[600];
    uint64_t room;
    bool found = false;
    if (!cgroup_directory(root, g, path, sizeof path))
        return false;
    for (size_t end = strlen(root) + strlen(g->mount); strlen(path) >= end;) {
        if (directory_room(path, g, &room)) {
            *least = found && *least < room ? *least : room;
            found = true;
        }
        *strrchr(path, '/') = '\0';
    }
    return found;
}

cof_status cofi_memory_check_below(const char *root, size_t bytes)
{
    uint64_t room;
    COF_FAIL_IF(memory_available(root, &room) && bytes > room, COF_ERR_NOMEM,
                "%zu bytes wanted, %" PRIu64 " are available on this host", bytes, room);
    for (int i = 0; i < 2; i++)
        COF_FAIL_IF(cgroup_room(root, &cgroups[i], &room) && bytes > room, COF_ERR_NOMEM,
                    "%zu bytes wanted, %" PRIu64 " are left in the cgroup", bytes, room);
    return COF_OK;
}

cof_status cofi_memory_check(size_t bytes)
{
    return cofi_memory_check_below("", bytes);
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
