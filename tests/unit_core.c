/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The bottom layer: statuses and texts, the log callback, the table of variables, versions, views,
 * the bounded wait. */
#include "core/config.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/sized.h"
#include "core/wait.h"
#include "test.h"

static void test_statuses(void)
{
#define CHECK_STATUS(name, value, text)                                                            \
    CHECK(!strcmp(cof_status_name(name), #name) && !strcmp(cof_status_text(name), text), #name);
    COF_STATUS_MAP(CHECK_STATUS)
    CHECK(!strcmp(cof_status_name((cof_status)77), "COF_ERR_?"), "a status that is none");
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", COF_VERSION_MAJOR, COF_VERSION_MINOR,
             COF_VERSION_PATCH);
    CHECK(!strcmp(cof_version(), version), "%s", cof_version());
}

static void *other_thread(void *arg)
{
    (void)arg;
    CHECK(cof_last_error()[0] == '\0', "another thread's text: %s", cof_last_error());
    return NULL;
}

static void test_error_text(void)
{
    char long_text[2000];
    memset(long_text, 'x', sizeof long_text);
    long_text[sizeof long_text - 1] = '\0';
    COF_FAIL(COF_ERR_INVALID, "argument %d", 7);
    CHECK(!strncmp(cof_last_error(), "argument 7 (unit_core.c:", 24), "%s", cof_last_error());
    pthread_t thread;
    pthread_create(&thread, NULL, other_thread, NULL);
    pthread_join(thread, NULL);
    COF_FAIL(COF_ERR_INVALID, "%s", long_text);
    CHECK(strlen(cof_last_error()) < COFI_ERROR_TEXT_BYTES &&
              strstr(cof_last_error(), "unit_core.c"),
          "%zu bytes", strlen(cof_last_error()));
    COF_FAIL(COF_ERR_INVALID, "first");
    COF_FAIL(COF_ERR_INVALID, "then %s", cof_last_error()); /* the text may hold itself */
    CHECK(!strncmp(cof_last_error(), "then first (", 12), "%s", cof_last_error());
}

static int n_lines;
static char last_line[200];

static void take_line(void *user, int level, const char *text)
{
    CHECK(user == last_line && level <= 2, "level %d", level);
    n_lines++;
    snprintf(last_line, sizeof last_line, "%s", text);
}

static void test_log(void)
{
    cof_log_set(take_line, last_line, 2);
    cofi_log(COFI_LOG_PROCESS, "rank %d", 5);
    CHECK(n_lines == 1 && !strcmp(last_line, "rank 5"), "%d lines, %s", n_lines, last_line);
    cofi_log(COFI_LOG_PLAN, "too fine");
    CHECK(n_lines == 1, "a line above the level came through");
    COF_FAIL(COF_ERR_TIMEOUT, "late");
    CHECK(n_lines == 2 && strstr(last_line, "COF_ERR_TIMEOUT: late"), "%s", last_line);
    cof_log_set(NULL, NULL, 0);
    cofi_log(COFI_LOG_ERROR, "to nobody");
    CHECK(n_lines == 2, "a line came after the callback was taken away");
}

static void test_variables(void)
{
    CHECK(cofi_config_seconds(COFI_VAR_TIMEOUT) == 600, "default of COFUSE_TIMEOUT");
    setenv("COFUSE_TIMEOUT", "2.5", 1);
    CHECK(cofi_config_seconds(COFI_VAR_TIMEOUT) == 2.5, "COFUSE_TIMEOUT=2.5");
    CHECK_OK(cofi_config_check(true));
    static const char *const bad[][2] = {
        {"COFUSE_TIMEOUT", "-1"},   {"COFUSE_TIMEOUT", "1e99"}, {"COFUSE_TIMEOUT", "nan"},
        {"COFUSE_THREADS", "two"},  {"COFUSE_THREADS", "-2"},   {"COFUSE_THREADS", "1x"},
        {"COFUSE_ENGINE", "tcp"},   {"COFUSE_ENGINE", "shm|"},  {"COFUSE_ENGINE", "sh"},
        {"COFUSE_CPU_ISA", "avx9"}, {"COFUSE_GEMM", "mkl"},     {"COFUSE_TIMEOUT", "1e10"},
        {"COFUSE_RANK", "abc"},     {"COFUSE_LOG", "4"},        {"COFUSE_FORCE_STAGED", "7"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char part[80];
        snprintf(part, sizeof part, "variable %s = \"%s\": wanted", bad[i][0], bad[i][1]);
        setenv(bad[i][0], bad[i][1], 1);
        CHECK_FAILS(cofi_config_check(true), COF_ERR_INVALID, part);
        unsetenv(bad[i][0]);
    }
    setenv("COFUSE_RANK", "abc", 1);
    CHECK_OK(cofi_config_check(false));
    unsetenv("COFUSE_RANK");
    setenv("COFUSE_ENGINE", "", 1); /* empty is unset */
    CHECK(!strcmp(cofi_config_text(COFI_VAR_ENGINE), "shm"), "%s",
          cofi_config_text(COFI_VAR_ENGINE));
    CHECK_OK(cofi_config_check(true));
}

static void test_views(void)
{
    cof_shape shape = {{2, 3}};
    cof_tensor t = cof_tensor_make(&shape, (cof_device){COF_DEVICE_CPU, 0}, COF_BF16, 2, &shape);
    CHECK(t.ndim == 2 && t.shape[1] == 3 && !t.strides && t.byte_offset == 0, "a compact view");
    CHECK(!strcmp(cof_dtype_name(COF_BF16), "bf16"), "%s", cof_dtype_name(COF_BF16));
    CHECK(!strcmp(cof_dtype_name((cof_dtype){9, 8, 2}), "dtype(9,8,2)"), "%s",
          cof_dtype_name((cof_dtype){9, 8, 2}));
    CHECK(cofi_hash(COFI_HASH_SEED, "ab", 2) != cofi_hash(COFI_HASH_SEED, "ba", 2),
          "order is lost");
}

/* Version 1 ended with b, ours has c, a later one d. */
struct grown {
    size_t size;
    int b, c;
};

static void test_sized(void)
{
    struct grown ours = {9, 9, 9};
    struct {
        size_t size;
        int b, c, d;
    } given = {COFI_SIZE_THROUGH(struct grown, b), 5, 6, 7};
    CHECK_OK(cofi_sized_read(&ours, sizeof ours, COFI_SIZE_THROUGH(struct grown, b), &given, "x"));
    CHECK(ours.b == 5 && ours.c == 0 && ours.size == sizeof ours, "an older caller's");
    given.size = COFI_SIZE_THROUGH(struct grown, c);
    CHECK_OK(cofi_sized_read(&ours, sizeof ours, COFI_SIZE_THROUGH(struct grown, b), &given, "x"));
    CHECK(ours.c == 6, "one of this version");
    given.size = sizeof given;
    CHECK_FAILS(
        cofi_sized_read(&ours, sizeof ours, COFI_SIZE_THROUGH(struct grown, b), &given, "x"),
        COF_ERR_INVALID, "in a field that version 0.1.0 does not know");
    memset((char *)&given + sizeof ours, 0, sizeof given - sizeof ours);
    CHECK_OK(cofi_sized_read(&ours, sizeof ours, COFI_SIZE_THROUGH(struct grown, b), &given, "x"));
    given.size = 8;
    CHECK_FAILS(
        cofi_sized_read(&ours, sizeof ours, COFI_SIZE_THROUGH(struct grown, b), &given, "x"),
        COF_ERR_INVALID, "x.size = 8");
    CHECK_FAILS(cofi_sized_read(&ours, sizeof ours, 8, NULL, "x"), COF_ERR_INVALID, "x: NULL");
}

struct gate {
    _Atomic uint32_t word, sleepers;
    int n_polls;
};

static bool is_open(void *ctx)
{
    return atomic_load(&((struct gate *)ctx)->word) != 0;
}

static cof_status poll_twice(void *ctx)
{
    return ++((struct gate *)ctx)->n_polls < 3 ? COF_OK : COF_ERR_PEER_DEAD;
}

static void *open_later(void *arg)
{
    struct gate *gate = arg;
    usleep(30000);
    atomic_store(&gate->word, 1);
    cofi_wake(&gate->word, &gate->sleepers, false);
    return NULL;
}

static void test_wait(void)
{
    struct gate gate = {0};
    struct cofi_wait wait = {.ready = is_open, .ctx = &gate, .word = &gate.word,
                             .sleepers = &gate.sleepers, .max_sleep = 10000000000};
    int64_t begin = cofi_now();
    wait.deadline = begin + 50000000;
    CHECK(cofi_wait(&wait) == COF_ERR_TIMEOUT, "a wait for nothing");
    CHECK(cofi_now() - begin >= 50000000, "it ended before its deadline");
    wait.deadline = COFI_NEVER;
    wait.poll = poll_twice;
    wait.max_sleep = 1000000;
    CHECK(cofi_wait(&wait) == COF_ERR_PEER_DEAD && gate.n_polls == 3, "%d polls", gate.n_polls);
    pthread_t thread;
    pthread_create(&thread, NULL, open_later, &gate);
    wait.poll = NULL;
    wait.max_sleep = 10000000000; /* only the wake-up can end it in time */
    begin = cofi_now();
    CHECK(cofi_wait(&wait) == COF_OK, "a wait for a later store");
    CHECK(cofi_now() - begin < 5000000000, "the wake-up was lost");
    pthread_join(thread, NULL);
    CHECK(gate.sleepers == 0, "%u sleepers left", gate.sleepers);
}

int main(void)
{
    test_statuses();
    test_error_text();
    test_log();
    test_variables();
    test_views();
    test_sized();
    test_wait();
    return test_done();
}
