/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/check_cover.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/check.h"

enum { N_CANDIDATES = 30, N_ATTEMPTS = 400 };

/* factor f < g: the pairs to cover */
typedef bool pair_table[COFI_COVER_FACTORS][COFI_COVER_FACTORS][COFI_COVER_VALUES]
                       [COFI_COVER_VALUES];

struct search {
    struct cofi_cover *cover;
    pair_table *left;
    uint64_t seed, n_drawn;
};

static bool add_tuple(struct cofi_cover *c, const struct cofi_cover_tuple *t)
{
    for (int i = 0; i < c->n; i++)
        if (!memcmp(c->tuples[i].value, t->value, (size_t)c->n_factors))
            return true;
    if (c->n == c->max)
        return false;
    c->tuples[c->n++] = *t;
    return true;
}

static bool set_word(const struct cofi_cover *c, const char *word, struct cofi_cover_tuple *t)
{
    for (int f = 0; f < c->n_factors; f++) {
        size_t n = strlen(c->factors[f].key);
        for (int v = 0; v < c->factors[f].n && !strncmp(word, c->factors[f].key, n); v++)
            if (word[n] == '=' && !strcmp(word + n + 1, c->factors[f].value[v])) {
                t->value[f] = (uint8_t)v;
                return true;
            }
    }
    return false;
}

bool cofi_cover_add(struct cofi_cover *c, const char *text)
{
    struct cofi_cover_tuple t = {{0}};
    char copy[300], *state = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, " ", &state); word; word = strtok_r(NULL, " ", &state))
        if (!set_word(c, word, &t))
            return false;
    return add_tuple(c, &t);
}

static uint64_t draw(struct search *s)
{
    return cofi_check_random(s->seed, 0, s->n_drawn++);
}

/* A random legal tuple; with `fixed`, of which the factors f and g are. */
static bool random_tuple(struct search *s, const struct cofi_cover_tuple *fixed, int f, int g,
                         struct cofi_cover_tuple *out)
{
    const struct cofi_cover *c = s->cover;
    for (int attempt = 0; attempt < N_ATTEMPTS; attempt++) {
        for (int i = 0; i < c->n_factors; i++)
            out->value[i] = (uint8_t)(draw(s) % (uint64_t)c->factors[i].n_mixed);
        if (fixed) {
            out->value[f] = fixed->value[f];
            out->value[g] = fixed->value[g];
        }
        if (c->legal(c->arg, out))
            return true;
    }
    return false;
}

static int count_pairs(const struct search *s, const struct cofi_cover_tuple *t)
{
    int n = 0;
    for (int f = 0; f < s->cover->n_factors; f++)
        for (int g = f + 1; g < s->cover->n_factors; g++)
            n += (*s->left)[f][g][t->value[f]][t->value[g]];
    return n;
}

static void cover_pairs(struct search *s, const struct cofi_cover_tuple *t)
{
    for (int f = 0; f < s->cover->n_factors; f++)
        for (int g = f + 1; g < s->cover->n_factors; g++)
            (*s->left)[f][g][t->value[f]][t->value[g]] = false;
}

/* Of some candidates that hold the pair, the one that covers most. */
static void cover_one(struct search *s, int f, int v, int g, int w)
{
    struct cofi_cover_tuple pair = {{0}}, best = {{0}}, t = {{0}};
    int most = -1;
    pair.value[f] = (uint8_t)v;
    pair.value[g] = (uint8_t)w;
    for (int i = 0; i < N_CANDIDATES && random_tuple(s, &pair, f, g, &t); i++) {
        int n = count_pairs(s, &t);
        if (n > most) {
            most = n;
            best = t;
        }
    }
    (*s->left)[f][g][v][w] = false;
    if (most < 0)
        return; /* no legal combination holds the pair */
    add_tuple(s->cover, &best);
    cover_pairs(s, &best);
}

bool cofi_cover_pairs(struct cofi_cover *c, uint64_t seed)
{
    struct search s = {c, calloc(1, sizeof *s.left), seed, 0};
    if (!s.left)
        return false;
    for (int f = 0; f < c->n_factors; f++)
        for (int g = f + 1; g < c->n_factors; g++)
            for (int v = 0; v < c->factors[f].n_mixed; v++)
                for (int w = 0; w < c->factors[g].n_mixed; w++)
                    (*s.left)[f][g][v][w] = true;
    for (int i = 0; i < c->n; i++)
        cover_pairs(&s, &c->tuples[i]);
    for (int v = 0; v < COFI_COVER_VALUES; v++) /* outermost, so that rare ones come spread */
        for (int w = 0; w < COFI_COVER_VALUES; w++)
            for (int f = 0; f < c->n_factors; f++)
                for (int g = f + 1; g < c->n_factors; g++)
                    if ((*s.left)[f][g][v][w])
                        cover_one(&s, f, v, g, w);
    free(s.left);
    return true;
}

void cofi_cover_random(struct cofi_cover *c, uint64_t seed, int n)
{
    struct search s = {c, NULL, seed, 0};
    struct cofi_cover_tuple t = {{0}};
    for (int i = 0; i < 4 * n && c->n < n; i++)
        if (random_tuple(&s, NULL, 0, 0, &t))
            add_tuple(c, &t);
}

void cofi_cover_line(const struct cofi_cover *c, const struct cofi_cover_tuple *t, char *line,
                     size_t bytes)
{
    for (int f = 0; f < c->n_factors; f++)
        cofi_check_append(line, bytes, " %s=%s", c->factors[f].key,
                          c->factors[f].value[t->value[f]]);
}
