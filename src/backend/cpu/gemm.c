/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/cpu/gemm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/gemm_failure.h"
#include "backend/cpu/gemm_provider.h"
#include "backend/cpu/vec.h"
#include "core/config.h"
#include "core/log.h"

struct cofi_gemm {
    struct cofi_onednn *onednn; /* one of the two is NULL */
    struct cofi_gemm_plain *plain;
};

/* The choice, for the process. `mutex` guards changes to it, and serialises opening: the first open
 * caps oneDNN's instruction set and may still fall back to plain C. Running plans read the two
 * atomics without it. */
static struct {
    pthread_mutex_t mutex;
    bool is_made, is_proven; /* proven: an open succeeded */
    _Atomic bool has_onednn, has_bf16;
    cof_status status;
    char text[COFI_ERROR_TEXT_BYTES];
} choice = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static bool is_demanded(void)
{
    return !strcmp(cofi_config_text(COFI_VAR_GEMM), "onednn");
}

static cof_status choose(void)
{
    char why[440] = "COFUSE_CPU_ISA or the processor allows no AVX2";
    if (!strcmp(cofi_config_text(COFI_VAR_GEMM), "plain")) {
        cofi_log(COFI_LOG_PROCESS, "gemm: plain C, by COFUSE_GEMM");
        return COF_OK;
    }
    choice.has_onednn = cofi_isa() > COFI_ISA_SCALAR && cofi_onednn_load(why, sizeof why);
    COF_FAIL_IF(!choice.has_onednn && is_demanded(), COF_ERR_UNSUPPORTED,
                "COFUSE_GEMM=onednn, but oneDNN is not to be had: %s", why);
    choice.has_bf16 = choice.has_onednn;
    if (choice.has_onednn)
        cofi_log(COFI_LOG_PROCESS, "gemm: %s", cofi_onednn_name());
    else
        cofi_log(COFI_LOG_PROCESS, "gemm: plain C: %s", why);
    return COF_OK;
}

static void lock_choice(void)
{
    pthread_mutex_lock(&choice.mutex);
}

static void unlock_choice(void)
{
    pthread_mutex_unlock(&choice.mutex);
}

/* A child of fork finds the mutex free, and oneDNN not half loaded. */
static void register_fork_handlers(void)
{
    if (pthread_atfork(lock_choice, unlock_choice, unlock_choice) != 0)
        cofi_log(COFI_LOG_PROCESS, "gemm: no memory for fork handlers");
}

cof_status cofi_gemm_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork_handlers);
    pthread_mutex_lock(&choice.mutex);
    if (!choice.is_made) {
        choice.status = choose();
        if (choice.status != COF_OK)
            strncpy(choice.text, cof_last_error(), sizeof choice.text - 1);
        choice.is_made = true;
    } else if (choice.status != COF_OK) {
        cofi_fail_text(choice.status, choice.text);
    }
    cof_status status = choice.status;
    pthread_mutex_unlock(&choice.mutex);
    return status;
}

/* A cap to scalar after the choice turns to plain C too. */
static bool uses_onednn(void)
{
    return choice.has_onednn && cofi_isa() > COFI_ISA_SCALAR;
}

const char *cofi_gemm_name(void)
{
    return uses_onednn() ? cofi_onednn_name() : "plain";
}

void cofi_gemm_use_plain(void)
{
    pthread_mutex_lock(&choice.mutex);
    choice.is_made = true;
    choice.status = COF_OK;
    choice.has_onednn = false;
    pthread_mutex_unlock(&choice.mutex);
}

bool cofi_gemm_has(enum cofi_gemm_type type)
{
    return type == COFI_GEMM_F32 ||
           (uses_onednn() && choice.has_bf16 && cofi_isa() >= COFI_ISA_AVX512_BF16);
}

/* The self-test: integers small enough that fp32 and bf16 products are exact in any order, sizes
 * off every block size, and leading dimensions beyond the rows. */
enum { TEST_M = 37, TEST_N = 29, TEST_K = 41, TEST_LD = 43 };

struct self_test {
    float a[TEST_LD * TEST_LD], b[TEST_LD * TEST_LD], c[TEST_LD * TEST_LD];
    uint16_t a_bf16[TEST_LD * TEST_LD], b_bf16[TEST_LD * TEST_LD];
};

static int test_value(int i)
{
    return (i * 37 + i / 11) % 9 - 4;
}

static cof_status test_product(struct cofi_gemm *gemm, struct self_test *test,
                               enum cofi_gemm_form form, enum cofi_gemm_type type, bool accumulate)
{
    const bool is_bf16 = type == COFI_GEMM_BF16;
    const int a_m = form == COFI_GEMM_TN ? 1 : TEST_LD, a_k = form == COFI_GEMM_TN ? TEST_LD : 1;
    const int b_n = form == COFI_GEMM_NT ? TEST_LD : 1, b_k = form == COFI_GEMM_NT ? 1 : TEST_LD;
    for (int i = 0; i < TEST_LD * TEST_LD; i++)
        test->c[i] = (float)test_value(i + 5);
    COF_TRY(cofi_gemm_run(gemm, form, type, TEST_M, TEST_N, TEST_K,
                          is_bf16 ? (void *)test->a_bf16 : test->a, TEST_LD,
                          is_bf16 ? (void *)test->b_bf16 : test->b, TEST_LD, accumulate, test->c,
                          TEST_LD));
    for (int m = 0; m < TEST_LD; m++)
        for (int n = 0; n < TEST_LD; n++) {
            bool is_inside = m < TEST_M && n < TEST_N;
            float want = accumulate || !is_inside ? (float)test_value(m * TEST_LD + n + 5) : 0;
            for (int k = 0; is_inside && k < TEST_K; k++)
                want += test->a[m * a_m + k * a_k] * test->b[n * b_n + k * b_k];
            COF_FAIL_IF(test->c[m * TEST_LD + n] != want, COF_ERR_INTERNAL,
                        "%s: wrong product, form %d type %d accumulate %d: C[%d,%d] = %g, not %g",
                        gemm->onednn ? cofi_onednn_name() : "plain", form, type, accumulate, m, n,
                        (double)test->c[m * TEST_LD + n], (double)want);
        }
    return COF_OK;
}

static cof_status test_all(struct cofi_gemm *gemm, struct self_test *test)
{
    for (int i = 0; i < TEST_LD * TEST_LD; i++) {
        test->a[i] = (float)test_value(i);
        test->b[i] = (float)test_value(i + 3);
    }
    cofi_vec()->f32_to_bf16(test->a_bf16, test->a, TEST_LD * TEST_LD);
    cofi_vec()->f32_to_bf16(test->b_bf16, test->b, TEST_LD * TEST_LD);
    for (int type = 0; type < COFI_GEMM_N_TYPES; type++)
        for (int form = 0; form < COFI_GEMM_N_FORMS; form++)
            for (int accumulate = 0; accumulate < 2; accumulate++)
                if (type == COFI_GEMM_F32 ||
                    (gemm->onednn && cofi_onednn_has(gemm->onednn, COFI_GEMM_BF16)))
                    COF_TRY(test_product(gemm, test, (enum cofi_gemm_form)form,
                                         (enum cofi_gemm_type)type, accumulate));
    return COF_OK;
}

static cof_status self_test(struct cofi_gemm *gemm)
{
    struct self_test *test = malloc(sizeof *test);
    COF_FAIL_IF(!test, COF_ERR_NOMEM, "no memory for the GEMM self-test");
    cof_status status = test_all(gemm, test);
    free(test);
    return status;
}

static cof_status open_provider(struct cofi_gemm *gemm)
{
    if (uses_onednn()) {
        bool want_bf16 = choice.has_bf16 && cofi_isa() >= COFI_ISA_AVX512_BF16;
        COF_TRY(cofi_onednn_open(want_bf16, &gemm->onednn));
        if (!cofi_onednn_has(gemm->onednn, COFI_GEMM_BF16))
            choice.has_bf16 = false;
    } else {
        gemm->plain = cofi_gemm_plain_open();
        COF_FAIL_IF(!gemm->plain, COF_ERR_NOMEM, "no memory for the panels of plain C products");
    }
    return self_test(gemm);
}

static void close_provider(struct cofi_gemm *gemm)
{
    if (gemm->onednn)
        cofi_onednn_close(gemm->onednn);
    cofi_gemm_plain_close(gemm->plain);
    *gemm = (struct cofi_gemm){0};
}

cof_status cofi_gemm_open(struct cofi_gemm **gemm_out)
{
    COF_TRY(cofi_gemm_init());
    struct cofi_gemm *gemm = calloc(1, sizeof *gemm);
    COF_FAIL_IF(!gemm, COF_ERR_NOMEM, "no memory for a GEMM provider");
    pthread_mutex_lock(&choice.mutex);
    cof_status status = open_provider(gemm);
    if (status != COF_OK && status != COF_ERR_NOMEM && uses_onednn() && !choice.is_proven &&
        !is_demanded()) {
        cofi_log(COFI_LOG_PROCESS, "gemm: plain C: %s",
                 cof_last_error());
        choice.has_onednn = false;
        close_provider(gemm);
        status = open_provider(gemm);
    }
    choice.is_proven |= status == COF_OK;
    pthread_mutex_unlock(&choice.mutex);
    if (status == COF_OK) {
        *gemm_out = gemm;
    } else {
        close_provider(gemm);
        free(gemm);
    }
    return status;
}

void cofi_gemm_close(struct cofi_gemm *gemm)
{
    if (!gemm)
        return;
    close_provider(gemm);
    free(gemm);
}

cof_status cofi_gemm_run(struct cofi_gemm *gemm, enum cofi_gemm_form form, enum cofi_gemm_type type,
                         int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b,
                         int64_t ldb, bool accumulate, float *c, int64_t ldc)
{
    if (m == 0 || n == 0)
        return COF_OK;
    if (k == 0) { /* an empty sum */
        for (int64_t i = 0; i < m && !accumulate; i++)
            memset(c + i * ldc, 0, sizeof *c * (size_t)n);
        return COF_OK;
    }
    struct cofi_gemm_call call = {form, type, m, n, k, a, b, c, lda, ldb, ldc, accumulate};
    if (gemm->onednn && cofi_onednn_has(gemm->onednn, type))
        return cofi_onednn_run(gemm->onednn, &call);
    COF_FAIL_IF(type != COFI_GEMM_F32, COF_ERR_UNSUPPORTED,
                "bf16 products do not run natively here: convert to fp32");
    cofi_gemm_plain_run(gemm->plain, &call);
    return COF_OK;
}

void cofi_gemm_note(struct cofi_gemm_failure *failure, cof_status status)
{
    int none = COF_OK;
    if (status != COF_OK && atomic_compare_exchange_strong(&failure->status, &none, (int)status))
        memcpy(failure->text, cof_last_error(), sizeof failure->text);
}

cof_status cofi_gemm_failed(const struct cofi_gemm_failure *failure, const char *what)
{
    const cof_status status = (cof_status)atomic_load(&failure->status);
    COF_FAIL_IF(status != COF_OK, status, "%s: a tile product failed: %s", what, failure->text);
    return COF_OK;
}
