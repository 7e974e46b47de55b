/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The .npy reader and writer, and lists of such files: what NumPy writes is read, hostile files and
 * lists are each refused with the rule in the text, and every cut or changed header is survived. */
#include <assert.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "test.h"
#include "tools/npy.h"
#include "tools/tensor_files.h"

static char directory[] = "/tmp/cofuse-unit-XXXXXX";
static char path[64];

static void put_bytes(const char *file_path, const void *bytes, size_t n, size_t n_data)
{
    FILE *file = fopen(file_path, "wb");
    assert(file);
    fwrite(bytes, 1, n, file);
    for (size_t i = 0; i < n_data; i++)
        fputc((int)(i & 255), file);
    fclose(file);
}

/* Magic, version, `length` in the bytes that the version has, header, data. */
static void put_npy(int major, int minor, const char *header, size_t n_header, uint64_t length,
                    size_t n_data)
{
    char *bytes = calloc(1, n_header + 12);
    assert(bytes);
    size_t n = 8, n_length = major == 1 ? 2 : 4;
    memcpy(bytes, "\x93NUMPY", 6);
    bytes[6] = (char)major;
    bytes[7] = (char)minor;
    for (size_t i = 0; i < n_length; i++)
        bytes[n++] = (char)(length >> 8 * i & 255);
    memcpy(bytes + n, header, n_header);
    put_bytes(path, bytes, n + n_header, n_data);
    free(bytes);
}

static void put_header(const char *header, size_t n_data)
{
    put_npy(1, 0, header, strlen(header), strlen(header), n_data);
}

static void expect_refused(const char *name, const char *file_path, const char *rule)
{
    struct cofi_st_tensor t;
    char error[COFI_FILE_ERROR_BYTES] = "";
    bool opened = cofi_npy_open(file_path, &t, error);
    CHECK(!opened && strstr(error, rule) && strstr(error, file_path), "%s: %s", name,
          opened ? "it was accepted" : error);
    if (opened)
        close(t.fd);
}

#define H(descr, order, shape)                                                                     \
    "{'descr': " descr ", 'fortran_order': " order ", 'shape': " shape ", }\n"
#define SHAPE(shape) H("'|u1'", "False", shape)
#define DESCR(descr) H(descr, "False", "(1,)")

static const struct hostile {
    const char *header, *rule;
    size_t n_data;
} hostile_headers[] = {
    {"", "ends after 0 bytes: wanted '{'", 0},
    {"[]", "byte 0: wanted '{'", 0},
    {"{}", "key 'descr' is missing", 0},
    {"{'descr': '<f4', 'shape': ()}", "key 'fortran_order' is missing", 4},
    {"{'descr': '<f4', 'fortran_order': False}", "key 'shape' is missing", 4},
    {"{'descr': '<f4', 'descr': '<f4'}", "duplicate key 'descr'", 4},
    {"{'a': 1}", "unknown key 'a'", 4},
    {"{, }", "wanted a string", 4},
    {"{'descr' '<f4'}", "wanted ':'", 4},
    {"{'descr': '<f4' 'shape': ()}", "wanted a comma or '}'", 4},
    {"{'descr': '<f4", "the header ends after 14 bytes", 4},
    {"{descr: '<f4'}", "wanted a string", 4},
    {"{'de\\x73cr': '<f4'}", "without escapes", 4},
    {"{'descr': '\x1b[31m'}", "printable ASCII", 4},
    {"{'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa': 1}", "63 bytes", 4},
    {DESCR("'<f4'") "x", "nothing after '}'", 4},
    {DESCR("'>f4'"), "big-endian", 4},
    {DESCR("'>u1'"), "big-endian", 1},
    {DESCR("'|O'"), "Python objects", 8},
    {DESCR("'<V2'"), "bf16", 2},
    {DESCR("'|S4'"), "byte strings", 4},
    {DESCR("'<U1'"), "strings", 4},
    {DESCR("'<c8'"), "complex numbers", 8},
    {DESCR("'<M8[ns]'"), "times", 8},
    {DESCR("[('a', '<f4')]"), "structures", 4},
    {DESCR("('<f4', (2,))"), "wanted a string", 4},
    {DESCR("'<f16'"), "unknown type", 16},
    {DESCR("'<f4,<f4'"), "unknown type", 8},
    {DESCR("'|f4'"), "the byte order is missing", 4},
    {DESCR("'f4'"), "wanted a byte order and a type", 4},
    {DESCR("''"), "wanted a byte order and a type", 4},
    {DESCR("'<'"), "unknown type", 4},
    {DESCR("5"), "wanted a string", 4},
    {H("'<f4'", "0", "(1,)"), "wanted True or False", 4},
    {H("'<f4'", "'False'", "(1,)"), "wanted True or False", 4},
    {H("'<f4'", "True", "(2, 2)"), "fortran_order is True", 16},
    {SHAPE("[1]"), "as a tuple", 1},
    {SHAPE("1"), "as a tuple", 1},
    {SHAPE("(1)"), "is a number", 1},
    {SHAPE("(,)"), "an integer >= 0", 1},
    {SHAPE("(1,,)"), "an integer >= 0", 1},
    {SHAPE("(1 1)"), "a comma or the end", 1},
    {SHAPE("(-1,)"), "an integer >= 0", 1},
    {SHAPE("(1.5,)"), "a comma or the end", 1},
    {SHAPE("(1L,)"), "a comma or the end", 1},
    {SHAPE("(01,)"), "begins with 0", 1},
    {SHAPE("(9223372036854775808,)"), "over 2^63 - 1", 1},
    {SHAPE("(99999999999999999999999999,)"), "over 2^63 - 1", 1},
    {SHAPE("(1,1,1,1,1,1,1,1,1)"), "over 8 dims", 1},
    {SHAPE("(4294967296, 4294967296)"), "product of its shape overflows", 0},
    {H("'<f8'", "False", "(4611686018427387904,)"), "size in bytes overflows", 0},
    {SHAPE("(4,)"), "the file has 3 data bytes, descr and shape need 4", 3},
    {SHAPE("(4,)"), "the file has 5 data bytes, descr and shape need 4", 5},
    {SHAPE("(0,)"), "the file has 1 data bytes", 1},
    {SHAPE("(9223372036854775807,)"), "need 9223372036854775807", 1},
};

static void check_hostile(void)
{
    for (size_t i = 0; i < sizeof hostile_headers / sizeof hostile_headers[0]; i++) {
        const struct hostile *h = &hostile_headers[i];
        put_header(h->header, h->n_data);
        expect_refused(h->header, path, h->rule);
    }
    const char *good = DESCR("'<f4'");
    size_t n = strlen(good);
    put_npy(1, 0, good, n, n + 2, 4);
    expect_refused("length into the data", path, "wanted nothing after '}'");
    put_npy(1, 0, good, n, 65535, 4);
    expect_refused("header longer than the file", path, "header length 65535: the file ends");
    put_npy(2, 0, good, n, UINT32_MAX, 4);
    expect_refused("header length of 2^32 - 1", path, "wanted at most 65536");
    put_npy(1, 1, good, n, n, 4);
    expect_refused("version 1.1", path, "format version 1.1");
    put_npy(4, 0, good, n, n, 4);
    expect_refused("version 4", path, "format version 4.0");
    put_npy(0, 0, good, n, n, 4);
    expect_refused("version 0", path, "format version 0.0");
    put_bytes(path, "PK\3\4 an npz is a zip file", 25, 0);
    expect_refused("no magic", path, "does not begin with");
    expect_refused("directory", directory, "not a regular file");
    expect_refused("no file", "/nonexistent/x.npy", "No such file");
    char pipe_path[80];
    snprintf(pipe_path, sizeof pipe_path, "%s/pipe", directory);
    assert(mkfifo(pipe_path, 0600) == 0);
    expect_refused("pipe", pipe_path, "not a regular file");
    unlink(pipe_path);
}

/* What NumPy writes, and what it would read too. */
static void check_accepted(void)
{
    static const struct {
        const char *header;
        int bits, ndim;
        size_t n_data;
    } good[] = {
        {H("'<f4'", "False", "(2, 3)"), 32, 2, 24},
        {H("'=f4'", "False", "(2, 3)"), 32, 2, 24},
        {H("'<f2'", "False", "(3,)"), 16, 1, 6},
        {H("'<f8'", "False", "()"), 64, 0, 8},
        {H("'|b1'", "False", "(0, 9)"), 8, 2, 0},
        {H("'|u1'", "True", "(7,)"), 8, 1, 7},
        {H("'<i2'", "True", "(1, 7, 1)"), 16, 3, 14},
        {H("'<i8'", "False", "(1, 1, 1, 1, 1, 1, 1, 2)"), 64, 8, 16},
        {"{\"shape\":(2,),\"fortran_order\":False,\"descr\":\"<i4\"}", 32, 1, 8},
        {" {\n'shape' :\t( 2 , 1 , ) , 'descr': '<u4', 'fortran_order' : True\r\n}  \n", 32, 2, 8},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        for (int major = 1; major <= 3; major++) {
            struct cofi_st_tensor t;
            char error[COFI_FILE_ERROR_BYTES] = "";
            unsigned char data[64];
            size_t n = strlen(good[i].header);
            put_npy(major, 0, good[i].header, n, n, good[i].n_data);
            bool ok = cofi_npy_open(path, &t, error);
            CHECK(ok, "%s: %s", good[i].header, error);
            if (!ok)
                continue;
            ok = cofi_st_load(&t, data, error);
            for (size_t j = 0; j < good[i].n_data; j++)
                ok &= data[j] == j;
            CHECK(ok && t.dtype.bits == good[i].bits && t.ndim == good[i].ndim &&
                  t.bytes == good[i].n_data, "%s", good[i].header);
            close(t.fd);
        }
    }
    char *longest = malloc(COFI_NPY_HEADER_BYTES_MAX + 1);
    assert(longest);
    memset(longest, ' ', COFI_NPY_HEADER_BYTES_MAX + 1);
    memcpy(longest, "{'descr': '<f4', 'fortran_order': False, 'shape': ()}", 53);
    put_npy(3, 0, longest, COFI_NPY_HEADER_BYTES_MAX, COFI_NPY_HEADER_BYTES_MAX, 4);
    struct cofi_st_tensor t;
    char error[COFI_FILE_ERROR_BYTES] = "";
    bool ok = cofi_npy_open(path, &t, error);
    CHECK(ok, "%s", error);
    if (ok)
        close(t.fd);
    put_npy(3, 0, longest, COFI_NPY_HEADER_BYTES_MAX + 1, COFI_NPY_HEADER_BYTES_MAX + 1, 4);
    expect_refused("header of 64 KiB + 1", path, "header length 65537");
    free(longest);
}

/* Every prefix of a good file, every header cut short, and every byte of it changed. */
static void check_mutations(void)
{
    static const char good[] = H("'<f4'", "False", "(1, 2)");
    const size_t n = sizeof good - 1;
    char error[COFI_FILE_ERROR_BYTES], copy[sizeof good];
    struct cofi_st_tensor t;
    int n_opened = 0, n_cut = 0;
    for (int major = 1; major <= 2; major++) {
        put_npy(major, 0, good, n, n, 8);
        for (off_t length = (off_t)n + (major == 1 ? 10 : 12) + 7; length >= 0; length--) {
            assert(truncate(path, length) == 0);
            n_cut += cofi_npy_open(path, &t, error);
        }
        for (size_t length = 0; length < n - 1; length++) {
            put_npy(major, 0, good, length, length, 8);
            n_cut += cofi_npy_open(path, &t, error);
        }
    }
    CHECK(n_cut == 0, "%d cut files were accepted", n_cut);
    for (size_t i = 0; i < n; i++) {
        for (int value = 1; value < 256; value += 3) {
            memcpy(copy, good, sizeof good);
            copy[i] = (char)(copy[i] ^ value);
            put_npy(1, 0, copy, n, n, 8);
            if (cofi_npy_open(path, &t, error)) {
                n_opened++;
                close(t.fd);
            }
        }
    }
    CHECK(n_opened > 0 && n_opened < 100, "%d changed files were accepted", n_opened);
}

static void check_round_trip(void)
{
    static const cof_dtype dtypes[] = {{2, 64, 1}, {2, 32, 1}, {2, 16, 1}, {0, 64, 1}, {0, 32, 1},
                                       {0, 16, 1}, {0, 8, 1},  {1, 64, 1}, {1, 32, 1}, {1, 16, 1},
                                       {1, 8, 1},  {6, 8, 1}};
    char header[COFI_NPY_NEW_HEADER_BYTES], error[COFI_FILE_ERROR_BYTES] = "";
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        for (int ndim = 0; ndim <= COFI_SAFETENSORS_NDIM_MAX; ndim++) {
            struct cofi_st_tensor t = {.dtype = dtypes[i], .ndim = ndim}, back;
            size_t bytes = dtypes[i].bits / 8;
            for (int d = 0; d < ndim; d++)
                bytes *= (size_t)(t.shape[d] = 1 + d % 3);
            size_t n = cofi_npy_header(&t, header);
            put_bytes(path, header, n, bytes);
            bool ok = n % 64 == 0 && cofi_npy_has_dtype(dtypes[i]) &&
                      cofi_npy_open(path, &back, error);
            CHECK(ok, "%s", error);
            if (!ok)
                continue;
            CHECK(back.dtype.code == t.dtype.code && back.dtype.bits == t.dtype.bits &&
                  back.ndim == ndim && !memcmp(back.shape, t.shape, sizeof t.shape) &&
                  back.offset == n && back.bytes == bytes, "dtype %zu, %d dims", i, ndim);
            close(back.fd);
        }
    }
    CHECK(!cofi_npy_has_dtype(COF_BF16), "bf16 has no name");
    /* To the byte what NumPy writes. */
    struct cofi_st_tensor t = {.dtype = COF_F32, .ndim = 1, .shape = {3}};
    const char *wanted = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
    size_t n = cofi_npy_header(&t, header);
    CHECK(n == 128 && !memcmp(header, "\x93NUMPY\1\0\x76\0", 10) &&
          !memcmp(header + 10, wanted, strlen(wanted)) && header[126] == ' ' &&
          header[127] == '\n', "%zu bytes: %.100s", n, header + 10);
    t.ndim = 8;
    for (int i = 0; i < 8; i++)
        t.shape[i] = INT64_MAX;
    CHECK(cofi_npy_header(&t, header) == 256, "the longest header");
}

/* ---- lists ---------------------------------------------------------------------------------- */

static const char *const names[] = {"q", "k"};

static void expect_open_fails(const char *input, const char *rule)
{
    struct cofi_st_file file;
    char error[COFI_FILE_ERROR_BYTES] = "";
    memset(&file, 0xff, sizeof file); /* what a caller that closes it must not find */
    bool opened = cofi_tensors_open(input, names, 2, &file, error);
    CHECK(!opened && strstr(error, rule), "%s: %s", input, opened ? "it was accepted" : error);
    cofi_st_close(&file);
}

static void check_lists(void)
{
    char list[256], error[COFI_FILE_ERROR_BYTES] = "";
    struct cofi_st_file file;
    put_header(DESCR("'<f4'"), 4);
    snprintf(list, sizeof list, "q=%s,k=%s", path, path);
    bool ok = cofi_tensors_open(list, names, 2, &file, error);
    CHECK(ok && file.n_tensors == 2 && cofi_st_find(&file, "k") && !cofi_st_find(&file, "v") &&
          !cofi_st_metadata(&file, "op"), "%s", error);
    float value;
    CHECK(ok && cofi_st_load(cofi_st_find(&file, "k"), &value, error), "%s", error);
    if (ok)
        cofi_st_close(&file);
    snprintf(list, sizeof list, "q=%s,v=%s", path, path);
    expect_open_fails(list, "\"v\" is no tensor that is read");
    snprintf(list, sizeof list, "q=%s,q=%s", path, path);
    expect_open_fails(list, "\"q\" is there twice");
    snprintf(list, sizeof list, "q=%s,k=/nonexistent/k.npy", path);
    expect_open_fails(list, "/nonexistent/k.npy: No such file");
    expect_open_fails("q=a.npy,k.npy", "\"k.npy\": wanted key=FILE.npy");
    expect_open_fails("q=a.npy,", "\"\": wanted key=FILE.npy");
    expect_open_fails("q=a.npy,=b.npy", "\"=b.npy\": wanted key=FILE.npy");
    expect_open_fails("q=a.npy,k=.npy", "\"k=.npy\": wanted key=FILE.npy");
    expect_open_fails("q=a.npy,k=b.safetensors", "\"k=b.safetensors\": wanted key=FILE.npy");
    expect_open_fails("a.npy", "is given as key=FILE.npy");
    expect_open_fails("./n=1/a.npyz", "./n=1/a.npyz: No such file"); /* no list */
    expect_open_fails("n=1/a.safetensors", "n=1/a.safetensors: No such file");
}

static void check_outputs(void)
{
    static float data[25000];
    struct cofi_st_tensor tensors[] = {
        {.name = "o", .dtype = COF_BF16, .ndim = 1, .shape = {1}, .data = data, .bytes = 2},
        {.name = "lse", .dtype = COF_F32, .ndim = 1, .shape = {1}, .data = data, .bytes = 4},
        {.name = "dq", .dtype = COF_F32, .ndim = 1, .shape = {25000}, .data = data,
         .bytes = sizeof data},
    };
    char error[COFI_FILE_ERROR_BYTES] = "", list[256], other[80];
    snprintf(other, sizeof other, "%s/other.npy", directory);
    CHECK(cofi_tensors_check("lse=a.npy,dq=b.npy", tensors, 3, error), "%s", error);
    CHECK(cofi_tensors_check("out.safetensors", tensors, 3, error), "%s", error);
    CHECK(!cofi_tensors_check("lse=a.npy,o=b.npy", tensors, 3, error) &&
          strstr(error, "\"o\" has dtype BF16"), "%s", error);
    CHECK(!cofi_tensors_check("dk=a.npy", tensors, 3, error) &&
          strstr(error, "\"dk\": this run makes o, lse, dq"), "%s", error);

    put_bytes(path, "old", 3, 0);
    snprintf(list, sizeof list, "lse=%s", path);
    CHECK(cofi_tensors_may_write("in.safetensors", list, error), "%s", error);
    CHECK(!cofi_tensors_may_write(list, list, error) && strstr(error, "it is the input"), "%s",
          error);
    snprintf(list, sizeof list, "lse=%s,dq=%s/./t.npy", path, directory);
    CHECK(!cofi_tensors_may_write("in", list, error) && strstr(error, "one file for lse and dq"),
          "%s", error);
    unlink(path);
    CHECK(!cofi_tensors_may_write("in", list, error) && strstr(error, "one file for lse and dq"),
          "%s", error);
    CHECK(!cofi_tensors_may_write("in", "lse=/nonexistent/a.npy", error) &&
          strstr(error, "/nonexistent"), "%s", error);

    /* The second file does not fit: the first one stays as it was. */
    put_bytes(path, "old", 3, 0);
    snprintf(list, sizeof list, "lse=%s,dq=%s", path, other);
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGXFSZ, SIG_IGN);
        struct rlimit limit = {50000, 50000};
        setrlimit(RLIMIT_FSIZE, &limit);
        bool ok = cofi_tensors_write(list, NULL, 0, tensors, 3, error);
        _exit(ok || !strstr(error, "File too large"));
    }
    int status = 1;
    struct stat info;
    waitpid(pid, &status, 0);
    CHECK(status == 0, "a write over the size limit succeeded");
    CHECK(stat(path, &info) == 0 && info.st_size == 3 && stat(other, &info) != 0,
          "a failed write left something");
    struct cofi_st_tensor back;
    bool ok = cofi_tensors_write(list, NULL, 0, tensors, 3, error);
    CHECK(ok && cofi_npy_open(other, &back, error) && back.bytes == sizeof data &&
          close(back.fd) == 0, "%s", error);
    unlink(other);
}

int main(void)
{
    assert(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/t.npy", directory);
    check_accepted();
    check_hostile();
    check_mutations();
    check_round_trip();
    check_lists();
    check_outputs();
    unlink(path);
    CHECK(rmdir(directory) == 0, "a temporary is left in %s", directory);
    return test_done();
}
