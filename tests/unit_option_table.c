/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Tables of options: values in and out of range, lines there and back; and covering sets: every
 * pair of values that may meet does. */
#include "tools/option_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/check_cover.h"

#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE_NAME__, __LINE__, #cond, cof_last_error());  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

struct target {
    int64_t number;
    double real;
    int choice;
    struct cofi_ints list, grid;
    bool flag;
    cof_dtype dtype, wire;
};

#define AT(member) offsetof(struct target, member)
static const struct cofi_option words[] = {
    {"number", COFI_OPTION_INT, AT(number), NULL, -3, 1e15, 0, NULL, NULL},
    {"real", COFI_OPTION_NUMBER, AT(real), NULL, 0, 1, 0, NULL, NULL},
    {"choice", COFI_OPTION_CHOICE, AT(choice), "one|two|three", 0, 0, 0, NULL, NULL},
    {"list", COFI_OPTION_INTS, AT(list), ":", 0, 9, 0, NULL, NULL},
    {"grid", COFI_OPTION_INTS, AT(grid), "x2", 1, 99, 0, NULL, NULL},
    {0}};

static void test_lines(void)
{
    struct target t = {0}, again = {0};
    char line[200] = "op";
    REQUIRE(cofi_option_read_line(
                "op name=x number=-3 real=0.25 choice=three list=1:0:9 grid=4x25 P=7", words,
                &t) == COF_OK);
    REQUIRE(t.number == -3 && t.real == 0.25 && t.choice == 2);
    REQUIRE(t.list.n == 3 && t.list.at[0] == 1 && t.list.at[2] == 9);
    REQUIRE(t.grid.n == 2 && t.grid.at[0] == 4 && t.grid.at[1] == 25);
    cofi_option_write_line(words, &t, line, sizeof line);
    REQUIRE(!strcmp(line, "op number=-3 real=0.25 choice=three list=1:0:9 grid=4x25"));
    REQUIRE(cofi_option_read_line(line, words, &again) == COF_OK);
    REQUIRE(!memcmp(&t, &again, sizeof t));
}

static const struct cofi_option typed[] = {
    COFI_WORD_DTYPE("dtype", AT(dtype)),
    COFI_WORD_DTYPE_OR("wire", AT(wire)),
    COFI_WORD_LEFT("number", "all"),
    COFI_WORD_INT("number", AT(number), 1, 9),
    COFI_WORD_LEFT("told", NULL),
    {0}};

/* Types, and words that are left out: one value of a word, or all. */
static void test_typed(void)
{
    struct target t = {.wire = COF_F16};
    REQUIRE(cofi_option_read_line("op dtype=f16 wire=dtype number=all told=x:y", typed, &t) ==
            COF_OK);
    REQUIRE(cofi_dtype_equal(t.dtype, COF_F16) && !t.wire.bits && !t.number);
    REQUIRE(cofi_option_read_line("op dtype=bf16 wire=f32 number=3", typed, &t) == COF_OK);
    REQUIRE(cofi_dtype_equal(t.dtype, COF_BF16) && cofi_dtype_equal(t.wire, COF_F32));
    REQUIRE(t.number == 3);
    REQUIRE(cofi_option_read_line("op dtype=dtype", typed, &t) == COF_ERR_INVALID);
    REQUIRE(strstr(cof_last_error(), "dtype = \"dtype\": wanted one of bf16|f16|f32"));
    REQUIRE(cofi_option_read_line("op number=some", typed, &t) == COF_ERR_INVALID);
    REQUIRE(strstr(cof_last_error(), "number = \"some\": wanted an integer from 1 to 9"));
    REQUIRE(cofi_option_read_line("op speed=9", typed, &t) == COF_ERR_INVALID);
    REQUIRE(strstr(cof_last_error(), "wanted one of dtype, wire, number"));
    REQUIRE(!strstr(cof_last_error(), "told"));
}

/* Nothing is set by what is refused, and the text names word, value and rule. */
static void test_refused(void)
{
    static const char *const lines[][2] = {
        {"op number=-4", "number = \"-4\": wanted an integer from -3 to 1000000000000000"},
        {"op number=4x", "number = \"4x\": wanted an integer"},
        {"op number=", "number = \"\": wanted an integer"},
        {"op number=99999999999999999999", "wanted an integer"},
        {"op real=1.5", "real = \"1.5\": wanted a number from 0 to 1"},
        {"op real=nan", "real = \"nan\": wanted a number"},
        {"op choice=on", "choice = \"on\": wanted one of one|two|three"},
        {"op choice=one|two", "wanted one of one|two|three"},
        {"op list=1:", "list = \"1:\": wanted 1 to 32 integers from 0 to 9 with ':' between them"},
        {"op list=:1", "wanted 1 to 32 integers"},
        {"op list=1x2", "wanted 1 to 32 integers"},
        {"op grid=4", "grid = \"4\": wanted 2 integers from 1 to 99 with 'x' between them"},
        {"op grid=4x5x6", "wanted 2 integers"},
        {"op list=1:10", "wanted 1 to 32 integers"},
        {"op list=0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0",
         "wanted 1 to 32 integers"},
        {"op speed=9", "word \"speed=9\": wanted one of number, real, choice, list, grid"},
        {"op flag", "word \"flag\": wanted key=value"}};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        struct target t = {0}, none = {0};
        REQUIRE(cofi_option_read_line(lines[i][0], words, &t) == COF_ERR_INVALID);
        if (!strstr(cof_last_error(), lines[i][1])) {
            fprintf(stderr, "%s: %s\n", lines[i][0], cof_last_error());
            exit(1);
        }
        REQUIRE(!memcmp(&t, &none, sizeof t));
    }
}

/* ---- covering sets -------------------------------------------------------------------------- */

static const struct cofi_cover_factor factors[] = {
    {"a", 4, 3, {"0", "1", "2", "rare"}},
    {"b", 2, 2, {"0", "1"}},
    {"c", 5, 5, {"0", "1", "2", "3", "4"}},
    {"d", 3, 3, {"0", "1", "2"}},
};
enum { N_FACTORS = sizeof factors / sizeof factors[0], MAX = 100 };

/* b = 1 never with c = 4. */
static bool legal(const void *arg, const struct cofi_cover_tuple *t)
{
    (void)arg;
    return t->value[1] != 1 || t->value[2] != 4;
}

static bool has_pair(const struct cofi_cover *c, int f, int v, int g, int w)
{
    for (int i = 0; i < c->n; i++)
        if (c->tuples[i].value[f] == v && c->tuples[i].value[g] == w)
            return true;
    return false;
}

static void test_cover(void)
{
    struct cofi_cover_tuple tuples[MAX], other_tuples[MAX];
    struct cofi_cover c = {factors, N_FACTORS, legal, NULL, tuples, 0, MAX}, other = c;
    char line[100] = "op";
    other.tuples = other_tuples;
    REQUIRE(cofi_cover_add(&c, "c=3 a=rare"));
    REQUIRE(cofi_cover_add(&c, "a=rare c=3") && c.n == 1); /* there already */
    REQUIRE(!cofi_cover_add(&c, "a=5") && !cofi_cover_add(&c, "e=1") && c.n == 1);
    cofi_cover_line(&c, &c.tuples[0], line, sizeof line);
    REQUIRE(!strcmp(line, "op a=rare b=0 c=3 d=0"));
    REQUIRE(cofi_cover_pairs(&c, 1));
    for (int f = 0; f < N_FACTORS; f++)
        for (int g = f + 1; g < N_FACTORS; g++)
            for (int v = 0; v < factors[f].n_mixed; v++)
                for (int w = 0; w < factors[g].n_mixed; w++)
                    REQUIRE(has_pair(&c, f, v, g, w) != (f == 1 && v == 1 && g == 2 && w == 4));
    REQUIRE(c.n < 3 * 2 * 5 * 3 / 3); /* not nearly all combinations */
    REQUIRE(cofi_cover_add(&other, "c=3 a=rare") && cofi_cover_pairs(&other, 1));
    REQUIRE(other.n == c.n && !memcmp(tuples, other_tuples, (size_t)c.n * sizeof *tuples));
    cofi_cover_random(&c, 2, 40);
    REQUIRE(c.n == 40);
    for (int i = 1; i < c.n; i++)
        REQUIRE(legal(NULL, &c.tuples[i]) && c.tuples[i].value[0] < 3);
}

int main(void)
{
    test_lines();
    test_refused();
    test_typed();
    test_cover();
    puts("ok");
    return 0;
}
