/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "cofuse/status.h"
#include "core/config.h"

static cof_log_fn log_fn;
static void *log_user;
static atomic_int log_level = -1; /* -1: not read from the environment yet */

void cof_log_set(cof_log_fn fn, void *user, int level)
{
    log_fn = fn;
    log_user = user;
    atomic_store_explicit(&log_level, fn ? level : -1, memory_order_release);
}

static int current_level(void)
{
    int level = atomic_load_explicit(&log_level, memory_order_acquire);
    if (level >= 0)
        return level;
    level = (int)cofi_config_int(COFI_VAR_LOG);
    atomic_store_explicit(&log_level, level, memory_order_release);
    return level;
}

void cofi_log(int level, const char *format, ...)
{
    if (level > current_level())
        return;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (log_fn)
        log_fn(log_user, level, text);
    else
        fprintf(stderr, "cofuse: %s\n", text);
}
