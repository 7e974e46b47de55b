/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Parameters and plan of trimul; arguments of calls are in trimul_args.c. */
#include "ops/trimul/trimul.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "core/log.h"
#include "core/sized.h"
#include "symm/engine.h"

#define MAX_SIZE (INT64_C(1) << 56)

/* ---- blocks and features -------------------------------------------------------------------- */

static int n_parts(const cof_trimul_params *p, int axis)
{
    return axis ? p->grid_cols : p->grid_rows;
}

int64_t cofi_tri_part_begin(const cof_trimul_params *p, int axis, int64_t n, int part)
{
    const int64_t parts = n_parts(p, axis), each = (n + parts - 1) / parts;
    switch (p->shard) {
    case COF_TRIMUL_EXPLICIT: return (axis ? p->col_offsets : p->row_offsets)[part];
    case COF_TRIMUL_CHUNK: return part * each < n ? part * each : n;
    default: return (int64_t)((__int128)part * n / parts);
    }
}

cof_trimul_block cofi_tri_block(const cof_trimul_params *p, int rank, int64_t n)
{
    const int row = rank / p->grid_cols, col = rank % p->grid_cols;
    cof_trimul_block block = {.row = cofi_tri_part_begin(p, 0, n, row),
                              .col = cofi_tri_part_begin(p, 1, n, col)};
    block.n_rows = cofi_tri_part_begin(p, 0, n, row + 1) - block.row;
    block.n_cols = cofi_tri_part_begin(p, 1, n, col + 1) - block.col;
    return block;
}

int64_t cofi_tri_first_feature(int64_t hidden, int rank, int n_ranks)
{
    const int64_t n_groups = (hidden + COFI_TRI_GROUP - 1) / COFI_TRI_GROUP;
    const int64_t first = n_groups * rank / n_ranks * COFI_TRI_GROUP;
    return first < hidden ? first : hidden;
}

/* ---- weights -------------------------------------------------------------------------------- */

const char *const cofi_tri_weight_names[COFI_TRI_WEIGHTS] = {
    "norm_in_w", "norm_in_b", "p_in", "p_in_b", "g_in", "g_in_b",
    "norm_out_w", "norm_out_b", "p_out", "p_out_b", "g_out", "g_out_b"};

bool cofi_tri_is_norm(int idx)
{
    return idx == COFI_TRI_NORM_IN_W || idx == COFI_TRI_NORM_IN_B || idx == COFI_TRI_NORM_OUT_W ||
           idx == COFI_TRI_NORM_OUT_B;
}

void cofi_tri_weight_shape(const cof_trimul_params *p, int idx, int64_t shape[2])
{
    const int64_t d = p->dim, h = p->hidden;
    const int64_t shapes[COFI_TRI_WEIGHTS][2] = {{1, d}, {1, d}, {2 * h, d}, {1, 2 * h},
                                                 {2 * h, d}, {1, 2 * h}, {1, h}, {1, h},
                                                 {d, h}, {1, d}, {d, d}, {1, d}};
    memcpy(shape, shapes[idx], sizeof shapes[idx]);
}

/* ---- parameters ----------------------------------------------------------------------------- */

static cof_status check_mix(cof_dtype dtype, cof_dtype given, const char *name)
{
    char text[40];
    snprintf(text, sizeof text, "%s", cof_dtype_name(given));
    COF_FAIL_IF(!cofi_dtype_equal(given, dtype) && !cofi_dtype_equal(given, COF_F32),
                COF_ERR_INVALID, "params.%s = %s: wanted %s, as dtype, or f32", name, text,
                cof_dtype_name(dtype));
    return COF_OK;
}

static cof_status check_choices(const cof_trimul_params *p)
{
    COF_FAIL_IF(!cofi_dtype_is_elem(p->dtype), COF_ERR_INVALID,
                "params.dtype = %s: wanted bf16, f16 or f32", cof_dtype_name(p->dtype));
    COF_TRY(check_mix(p->dtype, p->norm_dtype, "norm_dtype"));
    COF_TRY(check_mix(p->dtype, p->mask_dtype, "mask_dtype"));
    COF_FAIL_IF((unsigned)p->direction > COF_TRIMUL_INCOMING, COF_ERR_INVALID,
                "params.direction = %d: wanted 0 (outgoing) or 1 (incoming)", (int)p->direction);
    COF_FAIL_IF((unsigned)p->shard > COF_TRIMUL_EXPLICIT, COF_ERR_INVALID,
                "params.shard = %d: wanted 0 (balanced), 1 (chunk) or 2 (explicit)",
                (int)p->shard);
    COF_FAIL_IF((unsigned)p->save > COF_TRIMUL_SAVE_AB, COF_ERR_INVALID,
                "params.save = %d: wanted 0 (none) or 1 (a, b)", (int)p->save);
    COF_FAIL_IF(p->save && p->forward_only, COF_ERR_INVALID,
                "params.save = %d: wanted 0 with forward_only", (int)p->save);
    const struct {
        const char *name;
        int value;
    } flags[] = {{"forward_only", p->forward_only}, {"reduce_param_grads", p->reduce_param_grads}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        COF_FAIL_IF(flags[i].value != 0 && flags[i].value != 1, COF_ERR_INVALID,
                    "params.%s = %d: wanted 0 or 1", flags[i].name, flags[i].value);
    const struct {
        const char *name;
        double value;
    } eps[] = {{"eps_in", p->eps_in}, {"eps_out", p->eps_out}};
    for (int i = 0; i < 2; i++)
        COF_FAIL_IF(!((float)eps[i].value > 0) || !isfinite((float)eps[i].value), COF_ERR_INVALID,
                    "params.%s = %g: wanted a number > 0, finite in fp32", eps[i].name,
                    eps[i].value);
    COF_FAIL_IF(p->chunk_features % COFI_TRI_GROUP, COF_ERR_INVALID,
                "params.chunk_features = %d: wanted a multiple of %d", p->chunk_features,
                COFI_TRI_GROUP);
    return COF_OK;
}

static cof_status check_sizes(const cof_trimul_params *p)
{
    const struct {
        const char *name;
        int64_t value, least, most;
    } rules[] = {{"n_batch", p->n_batch, 1, MAX_SIZE},
                 {"n_rows", p->n_rows, 1, MAX_SIZE},
                 {"dim", p->dim, 1, COFI_TRI_MAX_WIDTH},
                 {"hidden", p->hidden, 1, COFI_TRI_MAX_WIDTH},
                 {"chunk_features", p->chunk_features, 0, COFI_TRI_MAX_WIDTH},
                 {"max_ctas", p->max_ctas, 0, INT32_MAX}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        COF_FAIL_IF(rules[i].value < rules[i].least || rules[i].value > rules[i].most,
                    COF_ERR_INVALID, "params.%s = %lld: wanted %lld .. %lld", rules[i].name,
                    (long long)rules[i].value, (long long)rules[i].least, (long long)rules[i].most);
    const int64_t widest = p->dim > 2 * p->hidden ? p->dim : 2 * p->hidden;
    COF_FAIL_IF(p->n_batch > MAX_SIZE / 64 / widest / p->n_rows / p->n_rows, COF_ERR_INVALID,
                "params: n_batch * n_rows * n_rows * %lld is past the address space",
                (long long)widest);
    return COF_OK;
}

static cof_status set_grid(cof_trimul_params *p, int n_ranks)
{
    COF_FAIL_IF(p->grid_rows < 0 || p->grid_cols < 0, COF_ERR_INVALID,
                "params.%s = %d: wanted at least 0", p->grid_rows < 0 ? "grid_rows" : "grid_cols",
                p->grid_rows < 0 ? p->grid_rows : p->grid_cols);
    if (!p->grid_cols)
        p->grid_cols = p->grid_rows && n_ranks % p->grid_rows == 0 ? n_ranks / p->grid_rows : 1;
    if (!p->grid_rows && n_ranks % p->grid_cols == 0)
        p->grid_rows = n_ranks / p->grid_cols;
    COF_FAIL_IF((int64_t)p->grid_rows * p->grid_cols != n_ranks, COF_ERR_INVALID,
                "params: a grid of %d x %d ranks, wanted %d ranks, as the team has", p->grid_rows,
                p->grid_cols, n_ranks);
    return COF_OK;
}

static cof_status check_offsets(const cof_trimul_params *p)
{
    for (int axis = 0; axis < 2; axis++) {
        const char *name = axis ? "col_offsets" : "row_offsets";
        const int64_t *o = axis ? p->col_offsets : p->row_offsets;
        const bool wanted = p->shard == COF_TRIMUL_EXPLICIT;
        COF_FAIL_IF(!o != !wanted, COF_ERR_INVALID, "params.%s: %s, wanted %s", name,
                    o ? "given" : "NULL", wanted ? "offsets with shard = 2" : "NULL");
        for (int i = 0; o && i <= n_parts(p, axis); i++) {
            const int64_t least = i ? o[i - 1] : 0;
            const int64_t most = i ? p->n_rows : 0;
            const bool is_last = i == n_parts(p, axis);
            COF_FAIL_IF(o[i] < (is_last ? most : least) || o[i] > most, COF_ERR_INVALID,
                        "params.%s[%d] = %lld: wanted %lld .. %lld", name, i, (long long)o[i],
                        (long long)(is_last ? most : least), (long long)most);
        }
    }
    return COF_OK;
}

/* Validates, and fills defaults in. */
static cof_status read_params(const cof_trimul_params *given, int n_ranks, cof_trimul_params *p)
{
    const cof_dtype none = {0, 0, 0};
    COF_TRY(cofi_sized_read(p, sizeof *p, COFI_SIZE_THROUGH(cof_trimul_params, max_ctas), given,
                            "params"));
    p->norm_dtype = cofi_dtype_equal(p->norm_dtype, none) ? p->dtype : p->norm_dtype;
    p->mask_dtype = cofi_dtype_equal(p->mask_dtype, none) ? p->dtype : p->mask_dtype;
    p->n_batch = p->n_batch ? p->n_batch : 1;
    p->hidden = p->hidden ? p->hidden : p->dim;
    p->eps_in = p->eps_in != 0 ? p->eps_in : 1e-5;
    p->eps_out = p->eps_out != 0 ? p->eps_out : 1e-5;
    COF_TRY(check_choices(p));
    COF_TRY(check_sizes(p));
    COF_TRY(set_grid(p, n_ranks));
    return check_offsets(p);
}

cof_status cof_trimul_block_of(const cof_trimul_params *params, int n_ranks, int rank, int64_t n,
                               cof_trimul_block *block)
{
    cof_trimul_params p;
    COF_FAIL_IF(!block, COF_ERR_INVALID, "block_out: NULL");
    COF_FAIL_IF(n_ranks < 1, COF_ERR_INVALID, "n_ranks = %d: wanted at least 1", n_ranks);
    COF_FAIL_IF(rank < 0 || rank >= n_ranks, COF_ERR_INVALID, "rank = %d: wanted 0 .. %d", rank,
                n_ranks - 1);
    COF_TRY(read_params(params, n_ranks, &p));
    const int64_t least = p.shard == COF_TRIMUL_EXPLICIT ? p.n_rows : 1;
    COF_FAIL_IF(n < least || n > p.n_rows, COF_ERR_INVALID, "n = %lld: wanted %lld .. %lld",
                (long long)n, (long long)least, (long long)p.n_rows);
    *block = cofi_tri_block(&p, rank, n);
    return COF_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* The caller's offsets are not kept. */
static cof_status copy_offsets(struct cofi_tri_plan *plan)
{
    cof_trimul_params *p = &plan->params;
    if (p->shard != COF_TRIMUL_EXPLICIT)
        return COF_OK;
    const size_t n_rows = (size_t)p->grid_rows + 1, n_cols = (size_t)p->grid_cols + 1;
    plan->offsets = malloc((n_rows + n_cols) * sizeof *plan->offsets);
    COF_FAIL_IF(!plan->offsets, COF_ERR_NOMEM, "trimul plan: no memory");
    memcpy(plan->offsets, p->row_offsets, n_rows * sizeof *plan->offsets);
    memcpy(plan->offsets + n_rows, p->col_offsets, n_cols * sizeof *plan->offsets);
    p->row_offsets = plan->offsets;
    p->col_offsets = plan->offsets + n_rows;
    return COF_OK;
}

/* From params to sizes; local. */
static cof_status set_up(struct cofi_tri_plan *plan, cof_team *team,
                         const cof_trimul_params *params)
{
    plan->base.team = team;
    plan->rank = cof_team_rank(team);
    plan->n_ranks = cof_team_size(team);
    COF_FAIL_IF(team->world->ops->device, COF_ERR_UNSUPPORTED,
                "trimul: not on engine %s: wanted a team of a world of engine thread or shm",
                team->world->ops->name);
    plan->backend = &cofi_tri_cpu;
    COF_TRY(read_params(params, plan->n_ranks, &plan->params));
    COF_TRY(copy_offsets(plan));
    plan->elem = cofi_elem_of(plan->params.dtype);
    plan->norm_elem = cofi_elem_of(plan->params.norm_dtype);
    plan->mask_elem = cofi_elem_of(plan->params.mask_dtype);
    plan->wide = plan->elem == COFI_ELEM_F16 ? COFI_ELEM_F32 : plan->elem;
    return plan->backend->lay_out(plan);
}

cof_status cof_trimul_workspace(cof_team *team, const cof_trimul_params *params,
                                cof_workspace_sizes *sizes)
{
    struct cofi_tri_plan plan = {0};
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_TRY(cofi_world_usable(team->world));
    cof_status status = set_up(&plan, team, params);
    free(plan.offsets);
    COF_TRY(status);
    return cofi_workspace_write(
        sizes, &(cof_workspace_sizes){
                   .local = plan.local_bytes + sizeof plan,
                   .symmetric = cofi_arena_slab_bytes(plan.n_ranks, plan.payload_bytes,
                                                      plan.n_purposes),
                   .saved = plan.saved_bytes,
                   .words = cofi_arena_words_bytes(plan.n_ranks, plan.n_purposes)});
}

/* "balanced", "chunk", or a hash of the offsets. */
static void shard_text(const cof_trimul_params *p, char *text, size_t bytes)
{
    if (p->shard != COF_TRIMUL_EXPLICIT) {
        snprintf(text, bytes, "%s", p->shard == COF_TRIMUL_CHUNK ? "chunk" : "balanced");
        return;
    }
    uint64_t hash = COFI_HASH_SEED;
    for (int axis = 0; axis < 2; axis++)
        for (int i = 0; i <= n_parts(p, axis); i++)
            hash = cofi_hash_u64(hash, (uint64_t)cofi_tri_part_begin(p, axis, p->n_rows, i));
    snprintf(text, bytes, "explicit:%016llx", (unsigned long long)hash);
}

static void describe(struct cofi_tri_plan *plan, const cof_arena *arena)
{
    const cof_trimul_params *p = &plan->params;
    char engine[40], words[160] = "", shard[40], norm[20], mask[20];
    cofi_arena_name(plan->base.team, arena, engine, sizeof engine);
    plan->backend->describe(plan, words, sizeof words);
    shard_text(p, shard, sizeof shard);
    snprintf(norm, sizeof norm, "%s", cof_dtype_name(p->norm_dtype));
    snprintf(mask, sizeof mask, "%s", cof_dtype_name(p->mask_dtype));
    snprintf(plan->base.describe, sizeof plan->base.describe,
             "trimul dtype=%s norm=%s mask=%s direction=%s B=%lld N=%lld D=%lld H=%lld grid=%dx%d "
             "shard=%s eps_in=%.9g eps_out=%.9g save=%s forward_only=%d reduce=%d %s P=%d "
             "engine=%s device=%s",
             cof_dtype_name(p->dtype), norm, mask, p->direction ? "incoming" : "outgoing",
             (long long)p->n_batch, (long long)p->n_rows, (long long)p->dim, (long long)p->hidden,
             p->grid_rows, p->grid_cols, shard, p->eps_in, p->eps_out, p->save ? "ab" : "none",
             p->forward_only, p->reduce_param_grads, words, plan->n_ranks, engine,
             plan->backend->name);
}

static void destroy(cof_plan *base)
{
    struct cofi_tri_plan *plan = (struct cofi_tri_plan *)base;
    if (plan->backend)
        plan->backend->close(plan);
    cofi_arena_unbind(&plan->binding);
    free(plan->offsets);
    free(plan);
}

/* On every rank alike, whatever its own status: the exchanges must match. */
static cof_status build(struct cofi_tri_plan *plan, cof_team *team,
                        const cof_trimul_params *params, cof_arena *arena)
{
    cof_status status = set_up(plan, team, params);
    if (status == COF_OK)
        status = cofi_arena_check(team, arena);
    if (status == COF_OK)
        describe(plan, arena);
    COF_TRY(cofi_plan_agree(team, "trimul", status, plan->base.describe));
    const struct cofi_binding_spec spec = {.op = "trimul",
                                           .payload_bytes = plan->payload_bytes,
                                           .n_purposes = plan->n_purposes,
                                           .acks = plan->acks};
    COF_TRY(cofi_arena_bind(team, arena, &spec, &plan->binding));
    COF_TRY(cofi_team_agree(team, "plan open", plan->backend->open(plan)));
    cofi_log(COFI_LOG_PLAN, "plan: %s", plan->base.describe);
    return COF_OK;
}

cof_status cof_trimul_plan_create(cof_team *team, const cof_trimul_params *params, cof_arena *arena,
                                  cof_plan **plan_out)
{
    COF_FAIL_IF(!team, COF_ERR_INVALID, "team: NULL");
    COF_FAIL_IF(!plan_out, COF_ERR_INVALID, "plan_out: NULL");
    *plan_out = NULL;
    cof_plan *plan;
    COF_TRY(cofi_plan_open(team, "trimul", sizeof(struct cofi_tri_plan), destroy, &plan));
    cof_status status = build((struct cofi_tri_plan *)plan, team, params, arena);
    return cofi_plan_finish(plan, status, plan_out);
}
