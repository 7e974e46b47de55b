/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/config.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"

static const struct cofi_var_info variables[COFI_N_VARS] = {
#define VAR_ROW(symbol, name, type, default_text, rule, help) \
    {name, type, default_text, rule, help},
    COFI_VARIABLES(VAR_ROW)
#undef VAR_ROW
};

const struct cofi_var_info *cofi_var_info(enum cofi_var var)
{
    return &variables[var];
}

static bool parse_int(const char *text, int64_t *value)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    *value = v;
    return end != text && *end == '\0' && errno == 0 && v >= 0;
}

static bool parse_seconds(const char *text, double *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*value) && *value >= 0 && *value <= 1e9;
}

static bool is_choice(const char *text, const char *choices)
{
    size_t n = strlen(text);
    for (const char *at = choices; n && at; at = strchr(at, '|')) {
        at += *at == '|';
        if (!strncmp(at, text, n) && (at[n] == '|' || at[n] == '\0'))
            return true;
    }
    return false;
}

static bool is_legal(const struct cofi_var_info *info, const char *text)
{
    int64_t i;
    double s;
    switch (info->type) {
    case COFI_INT: return parse_int(text, &i);
    case COFI_SECONDS: return parse_seconds(text, &s);
    case COFI_CHOICE: return is_choice(text, info->rule);
    case COFI_TEXT: return true;
    }
    return false;
}

static const char *environment_text(const struct cofi_var_info *info)
{
    const char *text = getenv(info->name);
    return text && *text ? text : NULL;
}

const char *cofi_config_text(enum cofi_var var)
{
    const struct cofi_var_info *info = &variables[var];
    const char *text = environment_text(info);
    return text && is_legal(info, text) ? text : info->default_text;
}

int64_t cofi_config_int(enum cofi_var var)
{
    int64_t value = 0;
    parse_int(cofi_config_text(var), &value);
    return value;
}

double cofi_config_seconds(enum cofi_var var)
{
    double value = 0;
    parse_seconds(cofi_config_text(var), &value);
    return value;
}

cof_status cofi_config_check(bool with_launcher)
{
    for (int i = with_launcher ? 0 : COFI_VAR_FDS + 1; i < COFI_N_VARS; i++) {
        const char *text = environment_text(&variables[i]);
        COF_FAIL_IF(text && !is_legal(&variables[i], text), COF_ERR_INVALID,
                    "variable %s = \"%s\": wanted %s%s", variables[i].name, text,
                    variables[i].type == COFI_CHOICE ? "one of "
                    : variables[i].type == COFI_INT  ? "an integer >= 0 "
                                                     : "0 .. 1e9 ",
                    variables[i].rule);
    }
    return COF_OK;
}
