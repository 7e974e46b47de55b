/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Errors: the text is written once, where the fault is found; callers pass the status on. */
#ifndef COFI_ERROR_H
#define COFI_ERROR_H

#include "cofuse/status.h"

#define COFI_ERROR_TEXT_BYTES 512

/* Records the thread's error text ("file:line: message") and returns `status`. */
cof_status cofi_fail(const char *file, int line, cof_status status, const char *format, ...)
    __attribute__((format(printf, 4, 5), cold));

/* Takes over a text written on another thread or rank. */
cof_status cofi_fail_text(cof_status status, const char *text);

#define COF_FAIL(status, ...) cofi_fail(__FILE_NAME__, __LINE__, status, __VA_ARGS__)

#define COF_FAIL_IF(cond, status, ...)                                                             \
    do {                                                                                           \
        if (__builtin_expect(!!(cond), 0))                                                         \
            return COF_FAIL(status, __VA_ARGS__);                                                  \
    } while (0)

#define COF_TRY(expr)                                                                              \
    do {                                                                                           \
        cof_status cofi_try_status = (expr);                                                       \
        if (__builtin_expect(cofi_try_status != COF_OK, 0))                                        \
            return cofi_try_status;                                                                \
    } while (0)

#endif
