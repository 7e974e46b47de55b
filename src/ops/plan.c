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
