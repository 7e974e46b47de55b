/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/bench.h"

#include <stdio.h>
#include <string.h>

#include "core/error.h"
#include "core/tensor.h"

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

cof_status cofi_bench_is_f32(const char *key, cof_dtype named, cof_dtype dtype, int *is_f32_out)
{
    *is_f32_out = cofi_dtype_equal(named, COF_F32);
    COF_FAIL_IF(named.bits && !*is_f32_out && !cofi_dtype_equal(named, dtype), COF_ERR_INVALID,
                "%s = \"%s\": wanted dtype, f32 or the dtype of the case, %s", key,
                cof_dtype_name(named), cof_dtype_name(dtype));
    return COF_OK;
}
