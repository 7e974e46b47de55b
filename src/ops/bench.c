/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"

static const int64_t max_value = INT64_C(1) << 40;

static bool is_left_out(const char *key)
{
    static const char *const keys[] = {"name",   "set", "P",    "engine",  "arena",
                                       "device", "isa", "gemm", "kernels", "sections"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (!strcmp(key, keys[i]))
            return true;
    return false;
}

cof_status cofi_bench_words(const char *line, cofi_bench_word_fn fn, void *arg)
{
    char copy[COFI_BENCH_LINE_BYTES], *state = NULL;
    COF_FAIL_IF(strlen(line) >= sizeof copy, COF_ERR_INVALID,
                "case of %zu bytes: wanted at most %zu", strlen(line), sizeof copy - 1);
    snprintf(copy, sizeof copy, "%s", line);
    strtok_r(copy, " ", &state); /* the operator */
    for (char *word; (word = strtok_r(NULL, " ", &state));) {
        char *value = strchr(word, '=');
        COF_FAIL_IF(!value || value == word, COF_ERR_INVALID, "word \"%s\": wanted key=value",
                    word);
        *value++ = 0;
        if (!is_left_out(word))
            COF_TRY(fn(arg, word, value));
    }
    return COF_OK;
}

cof_status cofi_bench_int(const char *key, const char *value, int64_t min, int64_t *out)
{
    char *end;
    errno = 0;
    long long x = strtoll(value, &end, 10);
    COF_FAIL_IF(end == value || *end || errno || x < min || x > max_value, COF_ERR_INVALID,
                "%s = \"%s\": wanted an integer from %lld to %lld", key, value, (long long)min,
                (long long)max_value);
    *out = x;
    return COF_OK;
}

cof_status cofi_bench_choice(const char *key, const char *value, const char *choices, int *idx_out)
{
    size_t length = strlen(value);
    int idx = 0;
    for (const char *at = choices; at; idx++) {
        size_t n = strcspn(at, "|");
        if (n == length && !strncmp(at, value, n)) {
            *idx_out = idx;
            return COF_OK;
        }
        at = at[n] ? at + n + 1 : NULL;
    }
    return COF_FAIL(COF_ERR_INVALID, "%s = \"%s\": wanted one of %s", key, value, choices);
}

cof_status cofi_bench_dtype(const char *key, const char *value, cof_dtype *dtype_out)
{
    static const cof_dtype dtypes[] = {{COF_DTYPE_CODE_BFLOAT, 16, 1},
                                       {COF_DTYPE_CODE_FLOAT, 16, 1},
                                       {COF_DTYPE_CODE_FLOAT, 32, 1}};
    int idx = 0;
    COF_TRY(cofi_bench_choice(key, value, "bf16|f16|f32", &idx));
    *dtype_out = dtypes[idx];
    return COF_OK;
}

cof_status cofi_bench_dtype_or_f32(const char *key, const char *value, cof_dtype *named_out)
{
    *named_out = (cof_dtype){0};
    return strcmp(value, "dtype") ? cofi_bench_dtype(key, value, named_out) : COF_OK;
}

cof_status cofi_bench_is_f32(const char *key, cof_dtype named, cof_dtype dtype, int *is_f32_out)
{
    *is_f32_out = cofi_dtype_equal(named, COF_F32);
    COF_FAIL_IF(named.bits && !*is_f32_out && !cofi_dtype_equal(named, dtype), COF_ERR_INVALID,
                "%s = \"%s\": wanted dtype, f32 or the dtype of the case, %s", key,
                cof_dtype_name(named), cof_dtype_name(dtype));
    return COF_OK;
}
