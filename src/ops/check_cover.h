/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which combinations of many factors a check runs: a list by hand, then random ones until every
 * pair of values has met that can meet. A combination is a line of key=value words. */
#ifndef COFI_CHECK_COVER_H
#define COFI_CHECK_COVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { COFI_COVER_FACTORS = 32, COFI_COVER_VALUES = 24 };

struct cofi_cover_factor {
    const char *key;
    int n, n_mixed; /* values in all; the first n_mixed are mixed at random */
    const char *value[COFI_COVER_VALUES];
};

/* A value's place for each factor. */
struct cofi_cover_tuple {
    uint8_t value[COFI_COVER_FACTORS];
};

struct cofi_cover {
    const struct cofi_cover_factor *factors;
    int n_factors;
    /* Whether a combination means anything, and is not too large. */
    bool (*legal)(const void *arg, const struct cofi_cover_tuple *tuple);
    const void *arg;
    struct cofi_cover_tuple *tuples; /* the list */
    int n, max;
};

/* Adds "key=value ..."; factors that it leaves out have their first value. false: a word is in no
 * factor. One that is there already is not added again. */
bool cofi_cover_add(struct cofi_cover *cover, const char *text);

/* Adds legal combinations for the pairs that those of the list leave, as many as it takes. The same
 * ones for the same seed. COF_ERR_NOMEM as false. */
bool cofi_cover_pairs(struct cofi_cover *cover, uint64_t seed);

/* Adds random legal ones until there are n, or none is found any more. */
void cofi_cover_random(struct cofi_cover *cover, uint64_t seed, int n);

/* Appends " key=value" of all factors. */
void cofi_cover_line(const struct cofi_cover *cover, const struct cofi_cover_tuple *tuple,
                     char *line, size_t bytes);

#endif
