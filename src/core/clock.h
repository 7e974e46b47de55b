/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time in nanoseconds, and deadlines: a deadline is a time, COFI_NEVER is none. */
#ifndef COFI_CLOCK_H
#define COFI_CLOCK_H

#include <stdint.h>
#include <time.h>

#define COFI_NEVER INT64_MAX

static inline int64_t cofi_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* No deadline for seconds <= 0, and for more than 31 years. */
static inline int64_t cofi_deadline(double seconds)
{
    return seconds > 0 && seconds <= 1e9 ? cofi_now() + (int64_t)(seconds * 1e9) : COFI_NEVER;
}

#endif
