/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Finds libcudnn.so.9 and loads it, once in a process. It is never unloaded: its parts stay mapped
 * anyway, and a second copy beside the first one would mix with it. So the first library that has
 * what is wanted is the one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/config.h"
#include "core/log.h"
#include "ops/attention/attention_cudnn.h"

#define SONAME "libcudnn.so.9"

/* ---- errors --------------------------------------------------------------------------------- */

enum { OUT_OF_HOST_MEMORY = 4003, OUT_OF_DEVICE_MEMORY = 4004 };

cof_status cofi_cudnn_error(const char *file, int line, const struct cofi_cudnn *lib, int error,
                            const char *what)
{
    char text[400] = "";
    lib->GetLastErrorString(text, sizeof text);
    text[sizeof text - 1] = '\0';
    for (char *c = text; *c; c++) /* cuDNN's texts have several lines */
        if (*c == '\n')
            *c = ' ';
    cof_status status = error / 1000 * 1000 == COFI_CUDNN_NOT_SUPPORTED ? COF_ERR_UNSUPPORTED
                        : error == OUT_OF_HOST_MEMORY || error == OUT_OF_DEVICE_MEMORY
                            ? COF_ERR_NOMEM
                            : COF_ERR_SYSTEM;
    return cofi_fail(file, line, status, "cuDNN: %.60s: %s (%d)%s%s", what,
                     lib->GetErrorString(error), error, *text ? ": " : "", text);
}

const char *cofi_cudnn_version_text(int version, char text[24])
{
    const int major = version < 10000 ? 1000 : 10000; /* 8907 is 8.9.7, 91400 is 9.14.0 */
    snprintf(text, 24, "%d.%d.%d", version / major, version % major / 100, version % 100);
    return text;
}

cof_status cofi_cudnn_check_version(const struct cofi_cudnn *lib, int wanted, const char *what)
{
    char is[24], least[24];
    COF_FAIL_IF(lib->version < wanted, COF_ERR_UNSUPPORTED, "cuDNN: %s is version %s: %s wants %s "
                "or later", lib->path, cofi_cudnn_version_text(lib->version, is), what,
                cofi_cudnn_version_text(wanted, least));
    return COF_OK;
}

/* ---- one file ------------------------------------------------------------------------------- */

static bool find(void *library, const char *name, void *function_out)
{
    void *symbol = dlsym(library, name);
    memcpy(function_out, &symbol, sizeof symbol);
    return symbol != NULL;
}

static const char *missing_function(void *library, struct cofi_cudnn *lib)
{
    if (!find(library, "cudnnGetVersion", &lib->GetVersion))
        return "cudnnGetVersion";
    if (!find(library, "cudnnGetErrorString", &lib->GetErrorString))
        return "cudnnGetErrorString";
    if (!find(library, "cudnnGetLastErrorString", &lib->GetLastErrorString))
        return "cudnnGetLastErrorString";
#define FIND(name, parameters)                                                                     \
    if (!find(library, "cudnn" #name, &lib->name))                                                 \
        return "cudnn" #name;
    COFI_CUDNN_FUNCTIONS(FIND)
#undef FIND
    return NULL;
}

/* The file that a library was loaded from. */
static void remember_path(void *library, const char *asked, struct cofi_cudnn *lib)
{
    struct link_map *map = NULL;
    bool is_known = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name &&
                    *map->l_name;
    snprintf(lib->path, sizeof lib->path, "%s", is_known ? map->l_name : asked);
}

/* What was tried so far, for the text of the error. */
struct search {
    struct cofi_cudnn *lib;
    char tried[320];
};

static void note(struct search *search, const char *text)
{
    size_t n = strlen(search->tried);
    snprintf(search->tried + n, sizeof search->tried - n, "%s%s", n ? "; " : "", text);
}

/* Looks at the version before the functions: an old library lacks some. */
static bool load(struct search *search, const char *file, int flags)
{
    char text[200], is[24];
    struct cofi_cudnn *lib = search->lib;
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL | flags);
    if (!library) {
        const char *why = dlerror();
        if (!(flags & RTLD_NOLOAD))
            note(search, why ? why : file);
        return false;
    }
    remember_path(library, file, lib);
    const char *missing = missing_function(library, lib);
    lib->version = lib->GetVersion ? (int)lib->GetVersion() : 0;
    if (lib->version && lib->version < COFI_CUDNN_OLDEST)
        snprintf(text, sizeof text, "%s is version %s: wanted 9.0 or later", lib->path,
                 cofi_cudnn_version_text(lib->version, is));
    else if (missing)
        snprintf(text, sizeof text, "%s has no %s", lib->path, missing);
    else
        return true;
    dlclose(library);
    note(search, text);
    return false;
}

/* ---- the places ----------------------------------------------------------------------------- */

static bool load_named(struct search *search, const char *named)
{
    char file[512];
    struct stat info;
    bool is_folder = stat(named, &info) == 0 && S_ISDIR(info.st_mode);
    snprintf(file, sizeof file, is_folder ? "%s/" SONAME : "%s", named);
    return load(search, file, 0);
}

static bool load_of_python(struct search *search, const char *const *patterns)
{
    bool is_loaded = false;
    int n = 0;
    for (int i = 0; patterns[i] && !is_loaded; i++) {
        char pattern[512];
        glob_t found;
        snprintf(pattern, sizeof pattern, "%s/nvidia/cudnn/lib/" SONAME, patterns[i]);
        if (glob(pattern, 0, NULL, &found) != 0)
            continue;
        for (size_t j = 0; j < found.gl_pathc && !is_loaded; j++, n++)
            is_loaded = load(search, found.gl_pathv[j], 0);
        globfree(&found);
    }
    if (!n)
        note(search, "no Python package nvidia-cudnn");
    return is_loaded;
}

cof_status cofi_cudnn_find(const struct cofi_cudnn_places *p, struct cofi_cudnn *lib)
{
    struct search search = {.lib = lib};
    memset(lib, 0, sizeof *lib);
    bool is_loaded =
        p->named ? load_named(&search, p->named)
                 : (p->loaded && load(&search, p->loaded, RTLD_NOLOAD)) ||
                       (p->python && load_of_python(&search, p->python)) ||
                       (p->system && load(&search, p->system, 0));
    COF_FAIL_IF(!is_loaded, COF_ERR_UNSUPPORTED, "cuDNN not found: looked in %s: %s",
                p->named ? "COFUSE_CUDNN_PATH" : "the process, Python's packages and the system",
                search.tried);
    return COF_OK;
}

/* ---- Python's packages ---------------------------------------------------------------------- */

static void add_folder(struct cofi_cudnn_folders *f, int n, const char *begin, const char *end)
{
    char *text = f->text[f->n];
    if (f->n == COFI_CUDNN_MAX_FOLDERS)
        return;
    snprintf(text, sizeof f->text[0], "%.*s%s", n, begin, end);
    for (int i = 0; i < f->n; i++)
        if (!strcmp(f->text[i], text))
            return;
    f->at[f->n++] = text;
    f->at[f->n] = NULL;
}

/* Where a library that is loaded is one of a package: that of a running Python. */
static int add_of_library(struct dl_phdr_info *info, size_t bytes, void *folders)
{
    static const char *const names[] = {"/site-packages/", "/dist-packages/"};
    (void)bytes;
    for (int i = 0; i < 2; i++) {
        const char *at = info->dlpi_name ? strstr(info->dlpi_name, names[i]) : NULL;
        if (at)
            add_folder(folders, (int)(at - info->dlpi_name + (long)strlen(names[i]) - 1),
                       info->dlpi_name, "");
    }
    return 0;
}

/* What belongs to each python3 of PATH, as an environment that is active has it. */
static void add_of_path(struct cofi_cudnn_folders *folders)
{
    char python[512];
    const char *path = getenv("PATH");
    for (const char *at = path ? path : "", *end; *at; at = *end ? end + 1 : end) {
        end = strchrnul(at, ':');
        const int n = (int)(end - at);
        snprintf(python, sizeof python, "%.*s/python3", n, at);
        if (n == 0 || access(python, X_OK) != 0)
            continue;
        add_folder(folders, n, at, "/../lib/python3*/site-packages");
        add_folder(folders, n, at, "/../local/lib/python3*/dist-packages");
        add_folder(folders, n, at, "/../lib/python3*/dist-packages");
    }
}

void cofi_cudnn_python_folders(struct cofi_cudnn_folders *folders)
{
    const char *home = getenv("HOME");
    folders->n = 0;
    folders->at[0] = NULL;
    dl_iterate_phdr(add_of_library, folders);
    add_of_path(folders);
    if (home && *home)
        add_folder(folders, (int)strlen(home), home, "/.local/lib/python3*/site-packages");
    add_folder(folders, 0, "", "/usr/local/lib/python3*/site-packages");
    add_folder(folders, 0, "", "/usr/local/lib/python3*/dist-packages");
}

/* ---- the process's -------------------------------------------------------------------------- */

static struct {
    struct cofi_cudnn lib;
    cof_status status;
    char text[COFI_ERROR_TEXT_BYTES];
} process;

static void load_once(void)
{
    struct cofi_cudnn_folders folders;
    char version[24];
    const char *named = cofi_config_text(COFI_VAR_CUDNN_PATH);
    cofi_cudnn_python_folders(&folders);
    const struct cofi_cudnn_places places = {*named ? named : NULL, SONAME, SONAME, folders.at};
    process.status = cofi_cudnn_find(&places, &process.lib);
    if (process.status != COF_OK)
        snprintf(process.text, sizeof process.text, "%s", cof_last_error());
    else
        cofi_log(COFI_LOG_PROCESS, "cuDNN %s from %s",
                 cofi_cudnn_version_text(process.lib.version, version), process.lib.path);
}

cof_status cofi_cudnn_load(const struct cofi_cudnn **lib)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load_once);
    if (process.status != COF_OK)
        return cofi_fail_text(process.status, process.text);
    *lib = &process.lib;
    return COF_OK;
}
