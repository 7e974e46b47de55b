/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "core/sized.h"
#include "symm/engine.h"

const char *cof_plan_describe(const cof_plan *plan)
{
    return plan ? plan->describe : "";
}

/* No failing call: the caller's last error stays, whatever is met on the way. */
void cof_plan_destroy(cof_plan *plan)
{
    char text[COFI_ERROR_TEXT_BYTES];
    if (!plan)
        return;
    memcpy(text, cof_last_error(), sizeof text);
    plan->destroy(plan);
    cofi_fail_text(COF_OK, text);
}

cof_status cofi_workspace_write(cof_workspace_sizes *sizes, const cof_workspace_sizes *full)
{
    COF_FAIL_IF(!sizes, COF_ERR_INVALID, "sizes_out: NULL");
    COF_FAIL_IF(sizes->size < COFI_SIZE_THROUGH(cof_workspace_sizes, saved), COF_ERR_INVALID,
                "sizes_out->size = %zu: wanted %zu", sizes->size, sizeof *sizes);
    size_t size = sizes->size;
    memcpy(sizes, full, size < sizeof *full ? size : sizeof *full);
    sizes->size = size;
    return COF_OK;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

#define MAX_ELEMENTS (INT64_C(1) << 56)

int64_t cofi_plan_max_rows(const cof_layout *layout)
{
    int64_t rows = 0;
    for (int r = 0; r < layout->n_ranks; r++) {
        int64_t n = cof_layout_local_rows(layout, r);
        rows = n > rows ? n : rows;
    }
    return rows;
}

/* `*product` stays the smaller of it and of more than there may be. */
static void multiply(int64_t *product, int64_t factor)
{
    __int128 x = (__int128)*product * factor;
    *product = x > MAX_ELEMENTS ? MAX_ELEMENTS + 1 : (int64_t)x;
}

cof_status cofi_plan_check_size(const cof_layout *layout, int64_t n_batch, int64_t n_heads,
                                int64_t head_dim)
{
    int64_t global = layout->n_rows, padded, row = n_batch;
    multiply(&row, n_heads);
    multiply(&row, head_dim);
    multiply(&global, row);
    COF_FAIL_IF(row > MAX_ELEMENTS || global > MAX_ELEMENTS, COF_ERR_INVALID,
                "params: n_batch * n_rows * n_heads is past the address space");
    padded = cofi_plan_max_rows(layout);
    multiply(&padded, layout->n_ranks);
    multiply(&padded, row);
    COF_FAIL_IF(padded > MAX_ELEMENTS, COF_ERR_INVALID,
                "params: n_batch * n_rows * n_heads, with the rows of %d ranks filled up to %lld "
                "each, is past the address space",
                layout->n_ranks, (long long)cofi_plan_max_rows(layout));
    return COF_OK;
}

/* ---- agreement ------------------------------------------------------------------------------ */

/* A rank that finds no memory must not leave the others waiting for it: up to so many ranks agree
 * within memory that is there. */
enum { FIXED_RANKS = 1024 };

struct ballot {
    uint64_t hash;
    int64_t status;
};

/* The first word that differs, of each: "mask=none | mask=causal". */
static void first_difference(const char *a, const char *b, char *text, size_t bytes)
{
    size_t na = strcspn(a, " "), nb = strcspn(b, " ");
    while (na && na == nb && !strncmp(a, b, na)) {
        a += na + (a[na] == ' ');
        b += nb + (b[nb] == ' ');
        na = strcspn(a, " ");
        nb = strcspn(b, " ");
    }
    snprintf(text, bytes, "%.*s | %.*s", (int)na, a, (int)nb, b);
}

static bool is_odd(const struct ballot *ballots, int i)
{
    return ballots[i].status != COF_OK || ballots[i].hash != ballots[0].hash;
}

/* The first text that is odd, and rank 0's: a piece of everyone's at a time, in the memory of the
 * ballots. */
static cof_status fetch_texts(cof_team *team, const char *mine, int odd, struct ballot *memory,
                              char first[COFI_DESCRIBE_BYTES], char theirs[COFI_DESCRIBE_BYTES])
{
    size_t piece = sizeof *memory;
    for (size_t at = 0; at < COFI_DESCRIBE_BYTES; at += piece) {
        COF_TRY(cofi_team_exchange(team, "plan compare", mine + at, memory, piece));
        memcpy(first + at, &memory[0], piece);
        memcpy(theirs + at, &memory[odd], piece);
    }
    first[COFI_DESCRIBE_BYTES - 1] = theirs[COFI_DESCRIBE_BYTES - 1] = '\0';
    return COF_OK;
}

/* `mine`: the description, or the error. */
static cof_status explain(cof_team *team, const char *op, cof_status own, const char *mine,
                          struct ballot *ballots)
{
    char first[COFI_DESCRIBE_BYTES], theirs[COFI_DESCRIBE_BYTES], difference[200];
    int odd = 0;
    while (!is_odd(ballots, odd))
        odd++;
    int r = team->world_rank[odd];
    cof_status status = (cof_status)ballots[odd].status;
    COF_TRY(fetch_texts(team, mine, odd, ballots, first, theirs));
    if (own != COF_OK)
        return cofi_fail_text(own, mine);
    if (status != COF_OK)
        return COF_FAIL(status == COF_ERR_NOMEM ? status : COF_ERR_MISMATCH,
                        "%s plan: rank %d could not make it: %s", op, r, theirs);
    first_difference(first, theirs, difference, sizeof difference);
    return COF_FAIL(COF_ERR_MISMATCH, "%s plan: ranks %d and %d differ: %s", op,
                    team->world_rank[0], r, difference);
}

static cof_status agree(cof_team *team, const char *op, cof_status own, const char *mine,
                        struct ballot *ballots)
{
    struct ballot ballot = {cofi_hash(COFI_HASH_SEED, mine, strlen(mine)), own};
    COF_TRY(cofi_team_exchange(team, "plan create", &ballot, ballots, sizeof ballot));
    for (int i = 0; i < team->n_ranks; i++)
        if (is_odd(ballots, i))
            return explain(team, op, own, mine, ballots);
    return COF_OK;
}

cof_status cofi_plan_agree(cof_team *team, const char *op, cof_status own, const char *describe)
{
    struct ballot fixed[FIXED_RANKS], *ballots = fixed;
    char mine[COFI_DESCRIBE_BYTES] = "";
    snprintf(mine, sizeof mine, "%s", own == COF_OK ? describe : cof_last_error());
    if (team->n_ranks > FIXED_RANKS)
        ballots = calloc((size_t)team->n_ranks, sizeof *ballots);
    COF_FAIL_IF(!ballots, COF_ERR_NOMEM, "%s plan: no memory", op);
    cof_status status = agree(team, op, own, mine, ballots);
    if (ballots != fixed)
        free(ballots);
    return status;
}

/* Operators with kernels for devices. */
static const char *const on_devices[] = {"allreduce_rmsnorm", "attention", "grad_return", NULL};

/* All ranks come to the same answer by themselves. */
static cof_status check_engine(const cof_team *team, const char *op)
{
    const struct cofi_engine_ops *engine = team->world->ops;
    for (int i = 0; engine->device && on_devices[i]; i++)
        if (!strcmp(on_devices[i], op))
            return COF_OK;
    COF_FAIL_IF(engine->device, COF_ERR_UNSUPPORTED,
                "%s plan: not on engine %s: wanted a team of a world of engine thread or shm", op,
                engine->name);
    return COF_OK;
}

cof_status cofi_plan_open(cof_team *team, const char *op, size_t bytes,
                          void (*destroy)(cof_plan *plan), cof_plan **plan_out)
{
    COF_TRY(cofi_world_usable(team->world));
    COF_TRY(check_engine(team, op));
    *plan_out = calloc(1, bytes);
    if (!*plan_out)
        return cofi_plan_agree(team, op, COF_FAIL(COF_ERR_NOMEM, "%s plan: no memory", op), "");
    **plan_out = (struct cof_plan){.op = op, .destroy = destroy, .team = team};
    return COF_OK;
}

cof_status cofi_plan_finish(cof_plan *plan, cof_status status, cof_plan **plan_out)
{
    char text[COFI_ERROR_TEXT_BYTES];
    *plan_out = status == COF_OK ? plan : NULL;
    if (status == COF_OK)
        return COF_OK;
    memcpy(text, cof_last_error(), sizeof text);
    plan->destroy(plan);
    return cofi_fail_text(status, text);
}
