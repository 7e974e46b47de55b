/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The safetensors reader and writer: a round trip, hostile files each refused with the rule in the
 * text, and a failed write that leaves the old file. Without jansson (COFUSE_PROGRAM=OFF) there is
 * nothing to test. */
#ifndef COFI_HAVE_JANSSON
#include <stdio.h>

int main(void)
{
    printf("skipped: built without jansson\n");
    return 77;
}
#else
#include <assert.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/safetensors.h"

static char directory[] = "/tmp/cof-unit-XXXXXX";
static char path[64];
static int n_failed;

static void report(const char *name, bool ok, const char *detail)
{
    if (ok)
        printf("ok %s\n", name);
    else
        printf("not ok %s: %s\n", name, detail);
    n_failed += !ok;
}

/* A file of a header (its length in front) and n_data bytes of data. */
static void put_file(const char *header, size_t n_header, uint64_t length, size_t n_data)
{
    FILE *file = fopen(path, "wb");
    assert(file);
    for (int i = 0; i < 8; i++)
        fputc((int)(length >> 8 * i & 255), file);
    fwrite(header, 1, n_header, file);
    for (size_t i = 0; i < n_data; i++)
        fputc((int)(i & 255), file);
    fclose(file);
}

#define T(name, dtype, shape, begin, end)                                                         \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ","                                  \
    "\"data_offsets\":[" begin "," end "]}"

static const struct hostile {
    const char *name, *header, *rule;
    size_t n_data;
} hostile_files[] = {
    {"no brace", "[]", "begin with '{'", 0},
    {"leading space", " {}", "begin with '{'", 0},
    {"not JSON", "{\"a\":", "no valid JSON", 0},
    {"text after the object", "{}x", "no valid JSON", 0},
    {"zero byte in a name", "{\"a\\u0000b\":{}}", "no valid JSON", 0},
    {"broken UTF-8", "{\"\xff\xfe\":{}}", "no valid JSON", 0},
    {"duplicate tensor", "{" T("a", "U8", "[1]", "0", "1") "," T("a", "U8", "[1]", "1", "2") "}",
     "duplicate", 2},
    {"duplicate key", "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", "duplicate", 0},
    {"integer too large", "{" T("a", "U8", "[99999999999999999999]", "0", "1") "}", "too big", 1},
    {"tensor no object", "{\"a\":[1,2]}", "must be an object", 0},
    {"dtype missing", "{\"a\":{\"shape\":[],\"data_offsets\":[0,1]}}", "dtype is missing", 1},
    {"shape missing", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", "shape is missing", 1},
    {"offsets missing", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", "data_offsets is missing", 1},
    {"surplus key", "{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1],\"x\":1}}",
     "unknown key \"x\"", 1},
    {"unknown dtype", "{" T("a", "F4", "[2]", "0", "1") "}", "unknown dtype \"F4\"", 1},
    {"dtype a number", "{\"a\":{\"dtype\":5,\"shape\":[],\"data_offsets\":[0,1]}}",
     "dtype must be a string", 1},
    {"negative dim", "{" T("a", "U8", "[-1]", "0", "1") "}", "shape[0] must be an integer >= 0", 1},
    {"fractional dim", "{" T("a", "U8", "[1.5]", "0", "1") "}", "shape[0] must be an integer", 1},
    {"shape a string", "{" T("a", "U8", "\"1\"", "0", "1") "}", "shape must be a list", 1},
    {"nine dims", "{" T("a", "U8", "[1,1,1,1,1,1,1,1,1]", "0", "1") "}", "9 dims", 1},
    {"product overflows", "{" T("a", "U8", "[4294967296,4294967296]", "0", "0") "}",
     "product of its shape overflows", 0},
    {"bytes overflow", "{" T("a", "F64", "[4611686018427387904]", "0", "0") "}",
     "size in bytes overflows", 0},
    {"one offset", "{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0]}}",
     "two integers >= 0", 1},
    {"negative offset", "{" T("a", "U8", "[1]", "-1", "0") "}", "two integers >= 0", 1},
    {"offsets swapped", "{" T("a", "U8", "[1]", "1", "0") "}", "after their end", 1},
    {"offset past the end", "{" T("a", "U8", "[4]", "0", "4") "}", "the file has 3 data bytes", 3},
    {"size wrong", "{" T("a", "F32", "[2]", "0", "4") "}", "dtype and shape need 8", 4},
    {"overlap", "{" T("a", "U8", "[4]", "0", "4") "," T("b", "U8", "[4]", "2", "6") "}", "overlaps",
     6},
    {"same place", "{" T("a", "U8", "[4]", "0", "4") "," T("b", "U8", "[4]", "0", "4") "}",
     "overlaps", 4},
    {"hole", "{" T("a", "U8", "[1]", "0", "1") "," T("b", "U8", "[1]", "2", "3") "}", "hole of 1",
     3},
    {"hole in front", "{" T("a", "U8", "[1]", "1", "2") "}", "hole of 1", 2},
    {"bytes at the end", "{" T("a", "U8", "[1]", "0", "1") "}", "2 bytes after the last tensor", 3},
    {"data without tensors", "{}", "1 bytes after the last tensor", 1},
    {"metadata a list", "{\"__metadata__\":[]}", "object of strings", 0},
    {"metadata a number", "{\"__metadata__\":{\"a\":1}}", "\"a\" must be a string", 0},
};

static void expect_refused(const char *name, const char *file_name, const char *rule)
{
    struct cofi_st_file file;
    char error[COFI_SAFETENSORS_ERROR_BYTES] = "";
    bool opened = cofi_st_open(file_name, &file, error);
    if (opened)
        cofi_st_close(&file);
    report(name, !opened && strstr(error, rule) && strstr(error, file_name),
           opened ? "it was accepted" : error);
}

static void check_hostile(void)
{
    for (size_t i = 0; i < sizeof hostile_files / sizeof hostile_files[0]; i++) {
        const struct hostile *h = &hostile_files[i];
        put_file(h->header, strlen(h->header), strlen(h->header), h->n_data);
        expect_refused(h->name, path, h->rule);
    }
    put_file("{}", 2, UINT64_MAX, 0);
    expect_refused("header length of 2^64 - 1", path, "header length 18446744073709551615");
    put_file("{}", 2, 100000001, 0);
    expect_refused("header over 100 MB", path, "wanted 2 to 100000000");
    put_file("{}", 2, 3, 0);
    expect_refused("header longer than the file", path, "the file ends after 10 bytes");
    put_file("", 0, 0, 0);
    expect_refused("header of no bytes", path, "header length 0");
    assert(truncate(path, 5) == 0);
    expect_refused("file of 5 bytes", path, "begins with 8");
    assert(truncate(path, 0) == 0);
    expect_refused("empty file", path, "begins with 8");
    expect_refused("directory", directory, "not a regular file");
    expect_refused("no file", "/nonexistent/x", "No such file");
    size_t depth = 100000;
    char *deep = malloc(depth + 1);
    assert(deep);
    memset(deep, '[', depth);
    memcpy(deep, "{\"a\":", 5);
    put_file(deep, depth, depth, 0);
    free(deep);
    expect_refused("100000 brackets", path, "no valid JSON");
}

/* Every prefix of a good file, and every byte of its header changed, opens or is refused. */
static void check_mutations(void)
{
    const char *good = "{\"__metadata__\":{\"k\":\"v\"}," T("a", "U8", "[4]", "0", "4") "}";
    size_t n = strlen(good);
    char error[COFI_SAFETENSORS_ERROR_BYTES], copy[256];
    struct cofi_st_file file;
    int n_opened = 0;
    for (size_t i = 0; i < n; i++) {
        for (int value = 1; value < 256; value += 7) {
            memcpy(copy, good, n);
            copy[i] = (char)(copy[i] ^ value);
            put_file(copy, n, n, 4);
            if (cofi_st_open(path, &file, error)) {
                n_opened++;
                cofi_st_close(&file);
            }
        }
    }
    bool ok = n_opened > 0;
    put_file(good, n, n, 4);
    for (off_t length = (off_t)n + 8 + 3; length >= 0; length--) {
        assert(truncate(path, length) == 0);
        ok &= !cofi_st_open(path, &file, error);
    }
    report("mutated and cut files", ok, "a cut file was accepted");
}

static void check_round_trip(void)
{
    float lse[3] = {1, -2, 3};
    uint16_t o[6] = {1, 2, 3, 4, 5, 65535};
    uint8_t bytes[3] = {7, 8, 9};
    struct cofi_st_tensor tensors[] = {
        {.name = "o \"quoted\" \xc3\xa9", .dtype = COF_BF16, .ndim = 4, .shape = {1, 2, 3, 1},
         .data = o, .bytes = sizeof o},
        {.name = "byte", .dtype = {COF_DTYPE_CODE_UINT, 8, 1}, .ndim = 1, .shape = {3},
         .data = bytes, .bytes = 3},
        {.name = "empty", .dtype = COF_F32, .ndim = 2, .shape = {0, 5}},
        {.name = "lse", .dtype = COF_F32, .ndim = 1, .shape = {3}, .data = lse,
         .bytes = sizeof lse},
    };
    struct cofi_st_metadata metadata[] = {{"op", "attention"}, {"scale", "0.125"}};
    char error[COFI_SAFETENSORS_ERROR_BYTES] = "";
    struct cofi_st_file file;
    bool ok = cofi_st_write(path, metadata, 2, tensors, 4, error);
    report("write", ok, error);
    ok = ok && cofi_st_open(path, &file, error);
    report("read back", ok, error);
    if (!ok)
        return;
    bool same = file.n_tensors == 4 && file.n_metadata == 2 &&
                !strcmp(cofi_st_metadata(&file, "scale"), "0.125") &&
                !cofi_st_metadata(&file, "none") && !cofi_st_find(&file, "none");
    for (int i = 0; i < 4 && same; i++) {
        const struct cofi_st_tensor *t = cofi_st_find(&file, tensors[i].name);
        char data[64];
        same = t && t->ndim == tensors[i].ndim && t->bytes == tensors[i].bytes &&
               t->dtype.code == tensors[i].dtype.code && t->dtype.bits == tensors[i].dtype.bits &&
               !memcmp(t->shape, tensors[i].shape, sizeof t->shape) &&
               t->offset % (t->dtype.bits / 8u) == 0 && cofi_st_load(t, data, error) &&
               (t->bytes == 0 || !memcmp(data, tensors[i].data, t->bytes));
    }
    cofi_st_close(&file);
    report("same tensors and metadata", same, "they differ");
}

static void check_failed_write(void)
{
    static char data[100000];
    struct cofi_st_tensor tensor = {.name = "a", .dtype = COF_F32, .ndim = 1, .shape = {25000},
                                    .data = data, .bytes = sizeof data};
    char error[COFI_SAFETENSORS_ERROR_BYTES] = "";
    assert(cofi_st_write(path, NULL, 0, &tensor, 0, error)); /* an old file without tensors */
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGXFSZ, SIG_IGN);
        struct rlimit limit = {50000, 50000};
        setrlimit(RLIMIT_FSIZE, &limit);
        bool ok = cofi_st_write(path, NULL, 0, &tensor, 1, error);
        _exit(ok || !strstr(error, "File too large"));
    }
    int status = 1;
    waitpid(pid, &status, 0);
    report("write over the size limit fails", status == 0, "it did not");
    struct cofi_st_file file;
    bool kept = cofi_st_open(path, &file, error) && file.n_tensors == 0;
    cofi_st_close(&file);
    report("the old file is kept", kept, error);
    report("device refused", !cofi_file_may_write("/dev/null", error) &&
           !cofi_st_write("/dev/null", NULL, 0, &tensor, 1, error) &&
           strstr(error, "regular file"), error);
    report("no directory", !cofi_file_may_write("/nonexistent/x", error) &&
           !cofi_st_write("/nonexistent/x", NULL, 0, &tensor, 1, error), error);
    char link_path[80];
    snprintf(link_path, sizeof link_path, "%s/link", directory);
    assert(symlink(path, link_path) == 0);
    struct stat info;
    report("a link is followed", cofi_st_write(link_path, NULL, 0, &tensor, 1, error) &&
           lstat(link_path, &info) == 0 && S_ISLNK(info.st_mode) && stat(path, &info) == 0 &&
           info.st_size > 100000, error);
    unlink(link_path);
}

int main(void)
{
    assert(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/t.safetensors", directory);
    check_round_trip();
    check_hostile();
    check_mutations();
    check_failed_write();
    unlink(path);
    report("no temporary is left", rmdir(directory) == 0, directory);
    return n_failed ? 1 : 0;
}
#endif
