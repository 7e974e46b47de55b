/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "run_op.h"

#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "core/config.h"
#include "job.h"

bool cofi_run_engine(const char *text, cof_engine *engine_out)
{
    int choice;
    if (!cofi_cli_choice("--engine", text, "thread|shm", &choice))
        return false;
    *engine_out = choice ? COF_ENGINE_SHM : COF_ENGINE_THREAD;
    return true;
}

void cofi_run_engine_default(cof_engine *engine)
{
    if (*engine == COF_ENGINE_DEFAULT)
        *engine = strcmp(cofi_config_text(COFI_VAR_ENGINE), "thread") ? COF_ENGINE_SHM
                                                                      : COF_ENGINE_THREAD;
}

/* The place of "name=key" in names[]; -1: there is no such name, or no key. */
static int find_name(const char *word, const char *const names[], int n_names)
{
    const char *equals = strchr(word, '=');
    for (int i = 0; equals && equals[1] && i < n_names; i++)
        if (strlen(names[i]) == (size_t)(equals - word) &&
            !strncmp(word, names[i], strlen(names[i])))
            return i;
    return -1;
}

bool cofi_run_names(const char *text, const char *const names[], int n_names, char *keys[],
                    char *buffer, size_t bytes)
{
    snprintf(buffer, bytes, "%s", text);
    bool ok = strlen(text) < bytes;
    char *saved = NULL;
    for (char *word = strtok_r(buffer, ",", &saved); word && ok;
         word = strtok_r(NULL, ",", &saved)) {
        int at = find_name(word, names, n_names);
        ok = at >= 0;
        if (ok)
            keys[at] = strchr(word, '=') + 1;
    }
    char wanted[200] = "";
    for (int i = 0, n = 0; i < n_names && n < (int)sizeof wanted; i++)
        n += snprintf(wanted + n, sizeof wanted - (size_t)n, "%s%s=key", i ? "," : "", names[i]);
    if (!ok)
        cofi_cli_error("option --names = \"%s\": wanted some of %s", text, wanted);
    return ok;
}

bool cofi_run_is_of(const struct cofi_st_file *file, const char *op)
{
    const char *text = cofi_st_metadata(file, "op");
    if (!text || !strcmp(text, op))
        return true;
    cofi_cli_error("%s: its metadata says op = \"%s\", wanted %s", file->path, text, op);
    return false;
}

const struct cofi_st_tensor *cofi_run_find(const struct cofi_st_file *file, const char *key,
                                           const char *name)
{
    const struct cofi_st_tensor *tensor = cofi_st_find(file, key);
    if (!tensor)
        cofi_cli_error("%s: there is no tensor \"%s\" (%s); --names tells other keys", file->path,
                       key, name);
    return tensor;
}

void cofi_run_shape(const int64_t *shape, int ndim, char *text, size_t bytes)
{
    size_t n = (size_t)snprintf(text, bytes, "[");
    for (int i = 0; i < ndim && n < bytes; i++)
        n += (size_t)snprintf(text + n, bytes - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (n < bytes)
        snprintf(text + n, bytes - n, "]");
}

void *cofi_run_memory(size_t head_bytes, size_t bytes_at)
{
    size_t bytes, wanted;
    char *memory = cofi_job_shared(&bytes);
    if (memory && bytes >= head_bytes) {
        memcpy(&wanted, memory + bytes_at, sizeof wanted);
        if (wanted <= bytes)
            return memory;
    }
    cofi_cli_error("COFUSE_SHARED_FD is set, but is no memory of a parent `cofuse run`");
    return NULL;
}

int cofi_run_exit(int rank, cof_status status)
{
    if (status == COF_OK)
        return COFI_EXIT_OK;
    cofi_cli_error("rank %d: %s: %s", rank, cof_status_name(status), cof_last_error());
    return status == COF_ERR_UNSUPPORTED ? COFI_EXIT_UNSUPPORTED
           : status == COF_ERR_INVALID   ? COFI_EXIT_USAGE
                                         : COFI_EXIT_RANK;
}
