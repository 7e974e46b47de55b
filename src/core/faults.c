/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/faults.h"

#ifdef COFI_FAULTS
#include <stdlib.h>
#include <string.h>

bool cofi_fault_is_on(const char *step, int rank)
{
    const char *text = getenv("COFUSE_FAULT");
    size_t n = strlen(step);
    if (!text || strncmp(text, step, n))
        return false;
    return text[n] == '\0' || (text[n] == ':' && atoi(text + n + 1) == rank);
}
#else
typedef int cofi_faults_are_off; /* ISO C wants one declaration */
#endif
