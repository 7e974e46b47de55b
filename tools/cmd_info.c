/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse info`: what this machine has, and the table of variables with the values in force. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/cpu/gemm.h"
#include "backend/cpu/vec.h"
#include "cli.h"
#include "commands.h"
#include "core/config.h"
#include "device_info.h"
#include "job.h"
#include "ops/ops.h"
#include "symm/engine.h"
#include "symm/launcher.h"

static const char usage[] =
    "usage: cofuse info [--env-markdown]\n"
    "\n"
    "Prints versions, the processor, CUDA devices, engines, operators and the table of\n"
    "environment variables.\n"
    "\n"
    "  --env-markdown   print docs/environment.md\n";

static const char *type_name(enum cofi_var_type type)
{
    switch (type) {
    case COFI_INT: return "integer";
    case COFI_SECONDS: return "seconds";
    case COFI_CHOICE: return "choice";
    case COFI_TEXT: return "text";
    }
    return "?";
}

/* A Markdown cell: '|' would end it. */
static void print_cell(const char *text, const char *quote)
{
    printf(" %s", *text ? quote : "");
    for (; *text; text++)
        printf("%s%c", *text == '|' ? "\\" : "", *text);
}

static void print_markdown(void)
{
    printf("<!-- SPDX-FileCopyrightText: The Cofuse authors -->\n"
           "<!-- SPDX-License-Identifier: Apache-2.0 -->\n\n"
           "# Environment variables\n\n"
           "Generated from `src/core/config.h` by `cofuse info --env-markdown`; do not edit.\n\n"
           "Variables are read when a world, stream or plan is created, never while a plan runs;\n"
           "`COFUSE_GEMM` and `COFUSE_CPU_ISA` once in a process, with its first world. An empty\n"
           "variable counts as unset.\n\n"
           "| variable | type | default | values | meaning |\n"
           "|---|---|---|---|---|\n");
    for (int i = 0; i < COFI_N_VARS; i++) {
        const struct cofi_var_info *info = cofi_var_info((enum cofi_var)i);
        printf("| `%s` | %s |", info->name, type_name(info->type));
        print_cell(info->default_text, "`");
        printf("%s |", *info->default_text ? "`" : "");
        print_cell(info->rule, "");
        printf("%s|", *info->rule ? " " : "");
        print_cell(info->help, "");
        printf(" |\n");
    }
}

static void print_engines(void)
{
    static const struct {
        unsigned bit;
        const char *name;
    } caps[] = {
#define CAP(symbol, value, name, text) {value, name},
        COFI_CAPS(CAP)
#undef CAP
    };
    const struct cofi_engine_ops *const engines[] = {
        &cofi_engine_thread, &cofi_engine_shm, &cofi_engine_attach, cofi_engine_cuda(),
        cofi_engine_cuda_attach()};
    for (size_t i = 0; i < sizeof engines / sizeof engines[0]; i++) {
        if (!engines[i])
            continue; /* built without CUDA */
        printf("%-12s %-11s", i ? "" : "engines", engines[i]->name);
        for (size_t k = 0; k < sizeof caps / sizeof caps[0]; k++)
            if (engines[i]->caps & caps[k].bit)
                printf(" %s", caps[k].name);
        printf("\n");
    }
}

/* ---- CUDA ---- */

static void print_reach(const struct cofi_devices *devices, int idx)
{
    int n = 0;
    printf("%12s    reaches", "");
    for (int peer = 0; peer < devices->n; peer++)
        if (peer != idx && devices->device[idx].reaches[peer])
            printf("%s %d", n++ ? "," : "", peer);
    printf("%s\n", n ? "" : " no other device");
}

static void print_device(const struct cofi_devices *devices, int idx)
{
    const struct cofi_device *d = &devices->device[idx];
    const double gib = 1 << 30;
    printf("%12s %d  %s, %s%s\n", "", idx, d->name, d->uuid,
           d->is_mig ? ", a MIG instance" : "");
    printf("%12s    %d.%d, %d SMs, %.1f GiB, %.1f GiB unused\n", "", d->major, d->minor, d->n_sms,
           (double)d->total_bytes / gib, (double)d->free_bytes / gib);
    printf("%12s    memory between processes: %s%s%s; values by streams: %s; kernels: %s\n", "",
           d->has_vmm ? "vmm" : "", d->has_vmm && d->has_ipc ? ", " : "",
           d->has_ipc ? "ipc" : d->has_vmm ? "" : "none", d->has_stream_ops ? "yes" : "no",
           d->code);
    print_reach(devices, idx);
}

static void print_cuda(void)
{
    static struct cofi_devices devices; /* some kilobytes */
    cofi_devices_read(true, &devices);
    if (devices.n == 0) {
        printf("cuda         %s\n", devices.trouble);
        return;
    }
    printf("cuda         driver of CUDA %s, runtime %s, %d device%s\n", devices.driver,
           devices.runtime, devices.n, devices.n == 1 ? "" : "s");
    for (int i = 0; i < devices.n; i++)
        print_device(&devices, i);
    printf("%12s kernels of", "");
    const char *comma = "";
    for (int i = 0; cofi_ops[i]; i++)
        if (cofi_ops[i]->bench && cofi_ops[i]->bench->cuda_shapes) {
            printf("%s %s", comma, cofi_ops[i]->name);
            comma = ",";
        }
    printf(", for sm_90a and as PTX of compute_80\n");
}

static void print_machine(void)
{
    cpu_set_t allowed;
    int cores = sched_getaffinity(0, sizeof allowed, &allowed) ? 0 : CPU_COUNT(&allowed);
    long page = sysconf(_SC_PAGESIZE);
    double total = (double)sysconf(_SC_PHYS_PAGES) * (double)page / (1 << 30);
    double available = (double)sysconf(_SC_AVPHYS_PAGES) * (double)page / (1 << 30);
    cof_status gemm = cofi_gemm_init();

    printf("version      %s\n", cof_version());
    printf("processor    %s, %d cores allowed, %ld online\n", cofi_isa_name(cofi_isa()), cores,
           sysconf(_SC_NPROCESSORS_ONLN));
    printf("memory       %.1f GiB, %.1f GiB unused\n", total, available);
    if (gemm == COF_OK)
        printf("products     %s, bf16 %s\n", cofi_gemm_name(),
               cofi_gemm_has(COFI_GEMM_BF16) ? "native" : "through fp32");
    else
        printf("products     none: %s\n", cof_last_error());
    print_cuda();
    print_engines();
    printf("operators   ");
    const char *comma = "";
    for (int i = 0; cofi_ops[i]; i++)
        if (cofi_ops[i]->run) {
            printf("%s %s", comma, cofi_ops[i]->name);
            comma = ",";
        }
    printf("\n");
    struct cofi_identity id;
    if (cofi_launcher_identity(&id) != COF_OK)
        printf("launcher     %s\n", cof_last_error());
    else if (!id.launcher)
        printf("launcher     none (a world of one)\n");
    else
        printf("launcher     %s, rank %d of %d\n", id.launcher, id.rank, id.n_ranks);
}

static void print_variables(void)
{
    printf("\n%-21s %-10s %-8s %s\n", "variable", "in force", "default", "meaning");
    for (int i = 0; i < COFI_N_VARS; i++) {
        const struct cofi_var_info *info = cofi_var_info((enum cofi_var)i);
        const char *value = cofi_config_text((enum cofi_var)i);
        printf("%-21s %-10s %-8s %s%s%s%s\n", info->name, *value ? value : "-",
               *info->default_text ? info->default_text : "-", info->help, *info->rule ? " (" : "",
               info->rule, *info->rule ? ")" : "");
    }
    if (cofi_config_check(true) != COF_OK)
        printf("\nignored: %s\n", cof_last_error());
}

int cofi_cmd_info(int argc, char **argv)
{
    static const struct option options[] = {
        {"env-markdown", no_argument, NULL, 'm'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    bool markdown = false;
    for (int c; (c = cofi_cli_next(argc, argv, "h", options)) != -1;) {
        switch (c) {
        case 'm': markdown = true; break;
        case 'h': fputs(usage, stdout); return COFI_EXIT_OK;
        default: return COFI_EXIT_USAGE;
        }
    }
    if (optind < argc)
        return cofi_cli_error("surplus word \"%s\"", argv[optind]);
    if (markdown) {
        print_markdown();
        return COFI_EXIT_OK;
    }
    print_machine();
    print_variables();
    return COFI_EXIT_OK;
}
