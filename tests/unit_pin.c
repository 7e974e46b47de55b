/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* COFUSE_PIN: threads of a world that fits the cores have one each, or all of them with "no". */
#define _GNU_SOURCE
#include <dirent.h>
#include <sched.h>

#include "test.h"

static int n_cores(pid_t thread)
{
    cpu_set_t set;
    return sched_getaffinity(thread, sizeof set, &set) ? 0 : CPU_COUNT(&set);
}

/* Threads of this process that may run on one core only. */
static int n_pinned(void)
{
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; tasks && (entry = readdir(tasks));)
        n += atoi(entry->d_name) > 0 && n_cores(atoi(entry->d_name)) == 1;
    if (tasks)
        closedir(tasks);
    return n;
}

static int pinned_with(const char *value, int n_threads)
{
    cof_world *world = NULL;
    cof_world_options options = COF_WORLD_OPTIONS_INIT;
    options.n_ranks = 1;
    options.n_threads = n_threads;
    setenv("COFUSE_PIN", value, 1);
    CHECK_OK(cof_world_create(&options, &world));
    int n = n_pinned(); /* threads set their cores before they report to the opener */
    cof_world_destroy(world);
    return n;
}

int main(void)
{
    cpu_set_t own;
    if (n_cores(0) < 2 || sched_getaffinity(0, sizeof own, &own) ||
        sched_setaffinity(0, sizeof own, &own)) {
        printf("one core, or threads may not choose theirs\n");
        return 77;
    }
    int n = pinned_with("auto", 2);
    CHECK(n == 2, "%d threads pinned, wanted 2", n);
    n = pinned_with("no", 2);
    CHECK(n == 0, "%d threads pinned with COFUSE_PIN=no", n);
    n = pinned_with("auto", n_cores(0) + 1);
    CHECK(n == 0, "%d threads pinned though they are more than the cores", n);
    setenv("COFUSE_PIN", "yes", 1);
    cof_world *world;
    CHECK_FAILS(cof_world_create(NULL, &world), COF_ERR_INVALID, "COFUSE_PIN");
    return test_done();
}
