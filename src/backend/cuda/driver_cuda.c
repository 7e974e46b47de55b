/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/driver_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "core/process.h"

static struct cofi_driver driver;
static struct cofi_process loaded_by;
static char failure[200]; /* why there is none; "" when there is */

static void load(void)
{
    static const struct {
        const char *symbol;
        void *at;
    } calls[] = {
#define CALL(member, type, name) {name, &driver.member},
        COFI_DRIVER_CALLS(CALL)
#undef CALL
    };
    if (cofi_process_this(&loaded_by) != COF_OK) {
        snprintf(failure, sizeof failure, "%s", cof_last_error());
        return;
    }
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* kept */
    if (!library) {
        snprintf(failure, sizeof failure, "%s", dlerror());
        return;
    }
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        void *found = dlsym(library, calls[i].symbol);
        if (!found) {
            snprintf(failure, sizeof failure, "libcuda.so.1 has no %s: it is too old",
                     calls[i].symbol);
            return;
        }
        memcpy(calls[i].at, &found, sizeof found);
    }
    CUresult error = driver.init(0);
    const char *name = "an unknown error";
    if (error != CUDA_SUCCESS) {
        driver.error_name(error, &name);
        snprintf(failure, sizeof failure, "cuInit: %s (%d)", name, (int)error);
    }
}

cof_status cofi_driver_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    COF_TRY(cofi_process_check(&loaded_by, "CUDA context"));
    COF_FAIL_IF(*failure, COF_ERR_UNSUPPORTED, "engine cuda: no driver: %s", failure);
    return COF_OK;
}

const struct cofi_driver *cofi_driver(void)
{
    return &driver;
}

cof_status cofi_driver_error(const char *file, int line, CUresult error, const char *what)
{
    const char *name = "an unknown error", *text = "";
    driver.error_name(error, &name);
    driver.error_string(error, &text);
    return cofi_fail(file, line, error == CUDA_ERROR_OUT_OF_MEMORY ? COF_ERR_NOMEM : COF_ERR_SYSTEM,
                     "%s: %s (%d: %s)", what, name, (int)error, text);
}
