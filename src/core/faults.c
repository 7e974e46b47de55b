/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/faults.h"

#ifdef COFI_FAULTS
#include <stdlib.h>
#include <string.h>

bool cofi_fault_is_on(const char *step, int rank)
{
    const size_t n = strlen(step);
    for (const char *text = getenv("COFUSE_FAULT"); text; text = strchr(text, ',')) {
        text += *text == ',';
        if (strncmp(text, step, n) == 0 &&
            (text[n] == '\0' || text[n] == ',' ||
             (text[n] == ':' && atoi(text + n + 1) == rank)))
            return true;
    }
    return false;
}
#else
typedef int cofi_faults_are_off; /* ISO C wants one declaration */
#endif
