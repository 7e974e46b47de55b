/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "core/sized.h"
#include "symm/symm.h"

const char *cof_plan_describe(const cof_plan *plan)
{
    return plan ? plan->describe : "";
}

void cof_plan_destroy(cof_plan *plan)
{
    if (plan)
        plan->destroy(plan);
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

struct ballot {
    uint64_t hash;
    int64_t status;
};

struct account {
    char text[COFI_DESCRIBE_BYTES]; /* the description, or the error */
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

static cof_status explain(cof_team *team, const char *op, cof_status own, const char *mine,
                          const struct ballot *ballots)
{
    struct account account = {""}, *all = calloc((size_t)team->n_ranks, sizeof *all);
    COF_FAIL_IF(!all, COF_ERR_NOMEM, "%s plan: no memory", op);
    snprintf(account.text, sizeof account.text, "%s", mine);
    cof_status status = cofi_team_exchange(team, "plan compare", &account, all, sizeof account);
    for (int i = 0; i < team->n_ranks && status == COF_OK; i++) {
        all[i].text[sizeof all[i].text - 1] = '\0';
        int r = team->world_rank[i];
        if (own != COF_OK)
            status = cofi_fail_text(own, mine);
        else if (ballots[i].status != COF_OK)
            status = COF_FAIL(COF_ERR_MISMATCH, "%s plan: rank %d could not make it: %s", op, r,
                              all[i].text);
        else if (ballots[i].hash != ballots[0].hash) {
            char difference[200];
            first_difference(all[0].text, all[i].text, difference, sizeof difference);
            status = COF_FAIL(COF_ERR_MISMATCH, "%s plan: ranks %d and %d differ: %s", op,
                              team->world_rank[0], r, difference);
        }
    }
    free(all);
    return status;
}

cof_status cofi_plan_agree(cof_team *team, const char *op, cof_status own, const char *describe)
{
    char mine[COFI_DESCRIBE_BYTES];
    snprintf(mine, sizeof mine, "%s", own == COF_OK ? describe : cof_last_error());
    struct ballot ballot = {cofi_hash(COFI_HASH_SEED, mine, strlen(mine)), own};
    struct ballot *all = calloc((size_t)team->n_ranks, sizeof *all);
    COF_FAIL_IF(!all, COF_ERR_NOMEM, "%s plan: no memory", op);
    cof_status status = cofi_team_exchange(team, "plan create", &ballot, all, sizeof ballot);
    bool differ = false;
    for (int i = 0; i < team->n_ranks; i++)
        differ |= all[i].status != COF_OK || all[i].hash != all[0].hash;
    if (status == COF_OK && differ)
        status = explain(team, op, own, mine, all);
    free(all);
    return status;
}
