/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef COFI_JOB_ENVIRONMENT_H
#define COFI_JOB_ENVIRONMENT_H

#include "job.h"

/* The environment of one rank: the parent's, with our variables replaced. `pairs`: [i] has the ends
 * of rank 0 and of rank i. One allocation; NULL when memory is short. */
char **cofi_job_environment(const struct cofi_job_spec *spec, const char *token, int rank,
                            int (*pairs)[2]);

#endif
