/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What a measurement depends on, in words that another machine would tell of itself alike. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "backend/cpu/gemm.h"
#include "backend/cpu/vec.h"
#include "bench_harness.h"

static const double unknown_cache_bytes = 32 << 20;

static void read_cpu_name(char *name, size_t bytes)
{
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(name, bytes, "unknown");
    while (file && fgets(line, sizeof line, file)) {
        char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !value)
            continue;
        snprintf(name, bytes, "%s", value + 1 + strspn(value + 1, " \t"));
        name[strcspn(name, "\n")] = 0;
        break;
    }
    if (file)
        fclose(file);
}

/* The largest that sysfs tells of core 0; sysconf knows it on some machines only. */
static double read_cache_bytes(void)
{
    double most = 0;
    for (int i = 0; i < 8; i++) {
        char path[80], unit = 0;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
        FILE *file = fopen(path, "r");
        double size = 0;
        if (file && fscanf(file, "%lf%c", &size, &unit) >= 1)
            size *= unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : 1;
        if (file)
            fclose(file);
        most = size > most ? size : most;
    }
    if (most == 0)
        most = (double)sysconf(_SC_LEVEL3_CACHE_SIZE);
    return most > 0 ? most : unknown_cache_bytes;
}

static void read_devices(struct cofi_bench_machine *m)
{
    struct cofi_devices devices;
    cofi_devices_read(false, &devices);
    m->gpus = devices.n;
    snprintf(m->gpu, sizeof m->gpu, "%s", devices.n ? devices.device[0].name : "none");
    snprintf(m->gpu_driver, sizeof m->gpu_driver, "%s", devices.driver);
    snprintf(m->gpu_runtime, sizeof m->gpu_runtime, "%s", devices.runtime);
}

void cofi_bench_machine_read(bool cuda, struct cofi_bench_machine *m)
{
    cpu_set_t allowed;
    struct utsname system;
    *m = (struct cofi_bench_machine){
        .cores = sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : CPU_COUNT(&allowed),
        .memory_bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE),
        .cache_bytes = read_cache_bytes()};
    read_cpu_name(m->cpu, sizeof m->cpu);
    snprintf(m->isa, sizeof m->isa, "%s", cofi_isa_name(cofi_isa()));
    snprintf(m->gemm, sizeof m->gemm, "%s", cofi_gemm_init() == COF_OK ? cofi_gemm_name() : "none");
    snprintf(m->kernel, sizeof m->kernel, "%s",
             uname(&system) ? "unknown" : system.release);
    if (cuda)
        read_devices(m);
}
