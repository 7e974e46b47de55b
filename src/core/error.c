/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/log.h"

static _Thread_local char error_text[COFI_ERROR_TEXT_BYTES];

static const struct {
    cof_status status;
    const char *name;
    const char *text;
} statuses[] = {
#define STATUS_ROW(name, value, text) {name, #name, text},
    COF_STATUS_MAP(STATUS_ROW)
#undef STATUS_ROW
};

const char *cof_status_name(cof_status status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++)
        if (statuses[i].status == status)
            return statuses[i].name;
    return "COF_ERR_?";
}

const char *cof_status_text(cof_status status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++)
        if (statuses[i].status == status)
            return statuses[i].text;
    return "unknown status";
}

const char *cof_last_error(void)
{
    return error_text;
}

const char *cof_version(void)
{
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
    return TEXT(COF_VERSION_MAJOR) "." TEXT(COF_VERSION_MINOR) "." TEXT(COF_VERSION_PATCH);
}

cof_status cofi_fail(const char *file, int line, cof_status status, const char *format, ...)
{
    char text[COFI_ERROR_TEXT_BYTES]; /* apart: an argument may be cof_last_error() itself */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(error_text, sizeof error_text, "%.440s (%.50s:%d)", text, file, line);
    cofi_log(COFI_LOG_ERROR, "%s: %s", cof_status_name(status), error_text);
    return status;
}

cof_status cofi_fail_text(cof_status status, const char *text)
{
    if (text != error_text)
        snprintf(error_text, sizeof error_text, "%s", text);
    return status;
}
