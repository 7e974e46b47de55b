/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/process.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

/* Process numbers come again, a count of forks does not. */
static _Atomic uint32_t generation;
static int register_error;

static void in_child(void)
{
    atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
}

static void register_handler(void)
{
    register_error = pthread_atfork(NULL, NULL, in_child);
}

cof_status cofi_process_this(struct cofi_process *out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handler);
    COF_FAIL_IF(register_error, COF_ERR_NOMEM, "fork handler: %s", strerror(register_error));
    out->generation = atomic_load_explicit(&generation, memory_order_relaxed);
    out->pid = (int)getpid();
    return COF_OK;
}

bool cofi_process_is_this(const struct cofi_process *maker)
{
    return maker->generation == atomic_load_explicit(&generation, memory_order_relaxed);
}

cof_status cofi_process_check(const struct cofi_process *maker, const char *what)
{
    COF_FAIL_IF(!cofi_process_is_this(maker), COF_ERR_INVALID,
                "%s: made by process %d before fork, used in its child %d; call exec after fork, "
                "or make a world of the child's own",
                what, maker->pid, (int)getpid());
    return COF_OK;
}
