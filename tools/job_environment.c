/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "job_environment.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_own_variable(const char *entry)
{
    static const char *const names[] = {"COFUSE_RANK=", "COFUSE_SIZE=", "COFUSE_JOB=",
                                        "COFUSE_FDS=", "COFUSE_SHARED_FD="};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strncmp(entry, names[i], strlen(names[i])))
            return true;
    return false;
}

char **cofi_job_environment(const struct cofi_job_spec *spec, const char *token, int rank,
                            int (*pairs)[2])
{
    enum { N_OWN = 5, TEXT_BYTES = 128, FD_BYTES = 12 };
    size_t n = 0, text_bytes = N_OWN * TEXT_BYTES + (size_t)spec->n_ranks * FD_BYTES;
    while (environ[n])
        n++;
    char **list = malloc((n + N_OWN + 1) * sizeof *list + text_bytes);
    if (!list)
        return NULL;
    char *text = (char *)(list + n + N_OWN + 1), *end = text + text_bytes;
    size_t at = 0;
    for (size_t i = 0; i < n; i++)
        if (!is_own_variable(environ[i]))
            list[at++] = environ[i];
#define ADD(...)                                                                                   \
    do {                                                                                           \
        list[at++] = text;                                                                         \
        text += snprintf(text, (size_t)(end - text), __VA_ARGS__) + 1;                             \
    } while (0)
    ADD("COFUSE_RANK=%d", rank);
    ADD("COFUSE_SIZE=%d", spec->n_ranks);
    ADD("COFUSE_JOB=%s", token);
    if (spec->self)
        ADD("COFUSE_SHARED_FD=%d", spec->shared_fd);
    ADD("COFUSE_FDS=");
#undef ADD
    text--;
    for (int peer = 0; peer < spec->n_ranks; peer++) {
        int fd = rank == 0 && peer > 0 ? pairs[peer][0]
                 : rank > 0 && peer == 0 ? pairs[rank][1] : -1;
        text += snprintf(text, (size_t)(end - text), "%s%d", peer ? "," : "", fd);
    }
    list[at] = NULL;
    return list;
}
