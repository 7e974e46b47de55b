/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arguments of trimul's calls, on any device; a back end does the rest. */
#include <stdio.h>
#include <string.h>

#include "core/sized.h"
#include "ops/trimul/trimul.h"
#include "symm/call.h"
#include "symm/symm.h"

struct named {
    const char *name;
    const cof_tensor *tensor;
};

/* ---- tensors -------------------------------------------------------------------------------- */

/* [B, Ni, Nj, D]. Dims of one entry have no stride that counts: they get 0. */
static cof_status read_tensor(const struct named *named, cof_dtype dtype, const int64_t shape[4],
                              struct cofi_tri_tensor *out)
{
    static const char *const dims[] = {"B", "Ni", "Nj", "D"};
    const cof_tensor *t = named->tensor;
    int64_t stride[8];
    struct cofi_tensor_rule rule = {named->name, dtype, 4, shape, dims};
    COF_TRY(cofi_tensor_check(t, &rule));
    cofi_tensor_strides(t, stride);
    out->data = cofi_tensor_data(t);
    for (int i = 0; i < 3; i++)
        out->stride[i] = shape[i] > 1 ? stride[i] * cofi_dtype_bytes(dtype) : 0;
    return COF_OK;
}

/* [B, Ni, Nj]: checked as [B, Ni, Nj, 1], so that Nj may have any stride. */
static cof_status read_mask(const cof_tensor *mask, cof_dtype dtype, const int64_t x_shape[4],
                            struct cofi_tri_tensor *out)
{
    const int64_t wanted[] = {x_shape[0], x_shape[1], x_shape[2], 1};
    int64_t shape[4] = {[3] = 1}, stride[4] = {[3] = 1};
    cof_tensor wide = *mask;
    COF_FAIL_IF(mask->ndim != 3, COF_ERR_INVALID, "mask: ndim = %d, wanted 3", mask->ndim);
    COF_FAIL_IF(!mask->shape, COF_ERR_INVALID, "mask: shape is NULL");
    memcpy(shape, mask->shape, 3 * sizeof *shape);
    if (mask->strides)
        memcpy(stride, mask->strides, 3 * sizeof *stride);
    wide.ndim = 4;
    wide.shape = shape;
    wide.strides = mask->strides ? stride : NULL;
    return read_tensor(&(struct named){"mask", &wide}, dtype, wanted, out);
}

static bool is_same(const struct cofi_tri_tensor *a, const struct cofi_tri_tensor *b)
{
    return a->data && a->data == b->data && !memcmp(a->stride, b->stride, sizeof a->stride);
}

static cof_status check_apart(const struct named *a, const struct named *b)
{
    return a->tensor && b->tensor ? cofi_tensor_check_apart(a->tensor, a->name, b->tensor, b->name)
                                  : COF_OK;
}

static cof_status read_saved(const struct cofi_tri_plan *plan, const cof_tensor *t,
                             struct cofi_tri_call *call)
{
    static const char *const dims[] = {"n"};
    COF_FAIL_IF(t && plan->params.save == COF_TRIMUL_SAVE_NONE, COF_ERR_INVALID,
                "saved: given, wanted NULL with save = 0");
    if (!t && plan->saved_bytes == 0)
        return COF_OK;
    int64_t n = t && t->ndim == 1 && t->shape ? t->shape[0] : (int64_t)plan->saved_bytes;
    COF_TRY(cofi_tensor_check(t, &(struct cofi_tensor_rule){"saved", COF_U8, 1, &n, dims}));
    COF_FAIL_IF(n < (int64_t)plan->saved_bytes, COF_ERR_INVALID,
                "saved: %lld bytes, wanted at least %zu (cof_trimul_workspace)", (long long)n,
                plan->saved_bytes);
    call->saved = cofi_tensor_data(t);
    COF_FAIL_IF((uintptr_t)call->saved % 128, COF_ERR_INVALID,
                "saved: data at %p, wanted alignment to 128 bytes", (void *)call->saved);
    return COF_OK;
}

/* ---- gradients of weights ------------------------------------------------------------------- */

static void list_grads(const cof_trimul_grads *g, struct named named[COFI_TRI_WEIGHTS])
{
    const cof_tensor *const tensors[COFI_TRI_WEIGHTS] = {
        g->norm_in_w, g->norm_in_b, g->p_in, g->p_in_b, g->g_in, g->g_in_b,
        g->norm_out_w, g->norm_out_b, g->p_out, g->p_out_b, g->g_out, g->g_out_b};
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++)
        named[i] = (struct named){cofi_tri_weight_names[i], tensors[i]};
}

static cof_status check_weight(const struct cofi_tri_plan *plan, const struct named *named, int idx,
                               cof_dtype dtype, char *name, size_t name_bytes, const char *prefix)
{
    static const char *const dims[] = {"rows", "columns"};
    static const char *const entries[] = {"entries"};
    int64_t shape[2];
    cofi_tri_weight_shape(&plan->params, idx, shape);
    const bool is_vector = shape[0] == 1 && !(idx == COFI_TRI_P_OUT || idx == COFI_TRI_G_OUT);
    snprintf(name, name_bytes, "%s.%s", prefix, named->name);
    struct cofi_tensor_rule rule = {name, dtype, is_vector ? 1 : 2, is_vector ? shape + 1 : shape,
                                    is_vector ? entries : dims};
    return cofi_tensor_check(named->tensor, &rule);
}

/* Compact, apart from each other and from the other tensors. */
static cof_status read_grads(const struct cofi_tri_plan *plan, const cof_trimul_grads *given,
                             const struct named *others, int n_others, struct cofi_tri_call *call)
{
    cof_trimul_grads g;
    struct named named[COFI_TRI_WEIGHTS];
    char name[COFI_TRI_WEIGHTS][32];
    if (!given)
        return COF_OK;
    COF_TRY(cofi_sized_read(&g, sizeof g, COFI_SIZE_THROUGH(cof_trimul_grads, g_out_b), given,
                            "args.grads"));
    list_grads(&g, named);
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++) {
        const cof_tensor *t = named[i].tensor;
        int64_t stride[8];
        if (!t)
            continue;
        COF_TRY(check_weight(plan, &named[i], i, COF_F32, name[i], sizeof name[i], "grads"));
        named[i].name = name[i];
        cofi_tensor_strides(t, stride);
        COF_FAIL_IF(t->ndim == 2 && t->shape[0] > 1 && stride[0] != t->shape[1],
                    COF_ERR_UNSUPPORTED, "%s: stride of dim 0 = %lld, wanted %lld: compact",
                    name[i], (long long)stride[0], (long long)t->shape[1]);
        for (int j = 0; j < i; j++)
            COF_TRY(check_apart(&named[i], &named[j]));
        for (int j = 0; j < n_others; j++)
            COF_TRY(check_apart(&named[i], &others[j]));
        call->grads[i] = cofi_tensor_data(t);
    }
    return COF_OK;
}

/* ---- calls ---------------------------------------------------------------------------------- */

struct shapes {
    int64_t x[4];
    cof_dtype dtype, mask_dtype;
};

static cof_status read_sizes(const struct cofi_tri_plan *plan, const cof_trimul_args *a,
                             struct shapes *shapes, struct cofi_tri_call *call)
{
    const cof_trimul_params *p = &plan->params;
    const int64_t least = p->shard == COF_TRIMUL_EXPLICIT ? p->n_rows : 1;
    call->n = a->n ? a->n : p->n_rows;
    COF_FAIL_IF(call->n < least || call->n > p->n_rows, COF_ERR_INVALID,
                "args.n = %lld: wanted %lld .. %lld, or 0", (long long)a->n, (long long)least,
                (long long)p->n_rows);
    COF_FAIL_IF(!a->x, COF_ERR_INVALID, "x: NULL, wanted a tensor");
    COF_FAIL_IF(a->x->ndim != 4 || !a->x->shape, COF_ERR_INVALID, "x: ndim = %d, wanted 4",
                a->x->ndim);
    call->n_batch = a->x->shape[0];
    COF_FAIL_IF(call->n_batch < 0 || call->n_batch > p->n_batch, COF_ERR_INVALID,
                "x: dim 0 (B) = %lld, wanted 0 .. %lld", (long long)call->n_batch,
                (long long)p->n_batch);
    const cof_trimul_block block = cofi_tri_block(p, plan->rank, call->n);
    *shapes = (struct shapes){{call->n_batch, block.n_rows, block.n_cols, p->dim},
                              p->dtype, p->mask_dtype};
    return COF_OK;
}

static cof_status read_forward(const cof_trimul_args *a, const struct shapes *s,
                               struct cofi_tri_call *call)
{
    const struct named x = {"x", a->x}, mask = {"mask", a->mask}, out = {"out", a->out},
                       residual = {"residual", a->residual}, saved = {"saved", a->saved};
    COF_FAIL_IF(a->in_place != 0 && a->in_place != 1, COF_ERR_INVALID,
                "args.in_place = %d: wanted 0 or 1", a->in_place);
    COF_TRY(read_tensor(&out, s->dtype, s->x, &call->out));
    if (a->residual)
        COF_TRY(read_tensor(&residual, s->dtype, s->x, &call->residual));
    COF_FAIL_IF(a->in_place && !is_same(&call->x, &call->out) && s->x[0] * s->x[1] * s->x[2] > 0,
                COF_ERR_INVALID, "out: not x itself, wanted with args.in_place = 1");
    if (!a->in_place)
        COF_TRY(check_apart(&out, &x));
    if (!is_same(&call->residual, &call->out))
        COF_TRY(check_apart(&out, &residual));
    COF_TRY(check_apart(&out, &mask));
    for (const struct named *other = (const struct named[]){x, mask, residual, out, {NULL, NULL}};
         other->name; other++)
        COF_TRY(check_apart(&saved, other));
    return COF_OK;
}

static cof_status read_backward(const struct cofi_tri_plan *plan, const cof_trimul_args *a,
                                const struct shapes *s, struct cofi_tri_call *call)
{
    const struct named x = {"x", a->x}, mask = {"mask", a->mask}, dout = {"dout", a->dout},
                       dx = {"dx", a->dx}, saved = {"saved", a->saved};
    struct cofi_tri_tensor residual = {0};
    COF_TRY(read_tensor(&dout, s->dtype, s->x, &call->dout));
    COF_TRY(read_tensor(&dx, s->dtype, s->x, &call->dx));
    if (a->residual) {
        const struct named named = {"residual", a->residual};
        COF_TRY(read_tensor(&named, s->dtype, s->x, &residual));
    }
    call->add_dout = is_same(&residual, &call->x);
    if (!is_same(&call->dx, &call->dout))
        COF_TRY(check_apart(&dx, &dout));
    COF_TRY(check_apart(&dx, &x));
    COF_TRY(check_apart(&dx, &mask));
    COF_TRY(check_apart(&dx, &saved));
    const struct named others[] = {x, mask, dout, dx, saved};
    return read_grads(plan, a->grads, others, 5, call);
}

static cof_status read_call(const struct cofi_tri_plan *plan, const cof_trimul_args *given,
                            bool backward, struct cofi_tri_call *call)
{
    cof_trimul_args a;
    struct shapes s;
    *call = (struct cofi_tri_call){.backward = backward, .n_empty = plan->n_empty};
    COF_TRY(cofi_sized_read(&a, sizeof a, COFI_SIZE_THROUGH(cof_trimul_args, in_place), given,
                            "args"));
    COF_TRY(read_sizes(plan, &a, &s, call));
    COF_TRY(read_tensor(&(struct named){"x", a.x}, s.dtype, s.x, &call->x));
    if (a.mask)
        COF_TRY(read_mask(a.mask, s.mask_dtype, s.x, &call->mask));
    COF_TRY(read_saved(plan, a.saved, call));
    return backward ? read_backward(plan, &a, &s, call) : read_forward(&a, &s, call);
}

static cof_status find_plan(cof_plan *base, struct cofi_tri_plan **plan)
{
    COF_FAIL_IF(!base, COF_ERR_INVALID, "plan: NULL");
    COF_FAIL_IF(strcmp(base->op, "trimul"), COF_ERR_INVALID, "plan: a plan of %s, wanted trimul",
                base->op);
    *plan = (struct cofi_tri_plan *)base;
    return COF_OK;
}

/* Whether a call may be enqueued. */
static cof_status check_state(struct cofi_tri_plan *plan)
{
    COF_TRY(cofi_team_status(plan->base.team));
    if (cofi_arena_status(plan->binding.arena) != COF_OK)
        return cofi_fail_text(COF_ERR_POISONED, cof_last_error());
    return cofi_call_allowed(&plan->binding);
}

static cof_status run(cof_plan *base, const cof_trimul_args *args, cof_stream stream, bool backward)
{
    struct cofi_tri_plan *plan = NULL;
    struct cofi_tri_call call;
    COF_TRY(find_plan(base, &plan));
    COF_FAIL_IF(backward && plan->params.forward_only, COF_ERR_INVALID,
                "plan: made with forward_only = 1, it has no backward");
    COF_TRY(read_call(plan, args, backward, &call));
    COF_TRY(check_state(plan));
    COF_FAIL_IF(!plan->has_weights, COF_ERR_INVALID,
                "plan: it has no weights, wanted cof_trimul_set_weights before");
    if (call.n_batch > 0 || cofi_tri_wants_grads(&call)) /* those of an empty sum are zeros */
        COF_TRY(plan->backend->run(plan, &call, stream));
    plan->n_empty += call.n_batch == 0; /* on all ranks, or they find out by the count */
    return COF_OK;
}

cof_status cof_trimul_forward(cof_plan *plan, const cof_trimul_args *args, cof_stream stream)
{
    return run(plan, args, stream, false);
}

cof_status cof_trimul_backward(cof_plan *plan, const cof_trimul_args *args, cof_stream stream)
{
    return run(plan, args, stream, true);
}

/* ---- weights -------------------------------------------------------------------------------- */

static cof_status read_weights(const struct cofi_tri_plan *plan, const cof_trimul_weights *given,
                               struct cofi_tri_weights *weights)
{
    cof_trimul_weights w;
    COF_TRY(cofi_sized_read(&w, sizeof w, COFI_SIZE_THROUGH(cof_trimul_weights, g_out_b), given,
                            "weights"));
    const cof_tensor *const tensors[COFI_TRI_WEIGHTS] = {
        w.norm_in_w, w.norm_in_b, w.p_in, w.p_in_b, w.g_in, w.g_in_b,
        w.norm_out_w, w.norm_out_b, w.p_out, w.p_out_b, w.g_out, w.g_out_b};
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++) {
        const struct named named = {cofi_tri_weight_names[i], tensors[i]};
        const bool is_norm = cofi_tri_is_norm(i);
        const cof_dtype dtype = is_norm ? plan->params.norm_dtype : plan->params.dtype;
        const bool is_matrix = i == COFI_TRI_P_IN || i == COFI_TRI_G_IN || i == COFI_TRI_P_OUT ||
                               i == COFI_TRI_G_OUT;
        char name[40];
        int64_t stride[8];
        COF_FAIL_IF(!tensors[i] && is_matrix, COF_ERR_INVALID, "weights.%s: NULL, wanted a tensor",
                    named.name);
        if (!tensors[i])
            continue;
        COF_TRY(check_weight(plan, &named, i, dtype, name, sizeof name, "weights"));
        cofi_tensor_strides(tensors[i], stride);
        weights->data[i] = cofi_tensor_data(tensors[i]);
        weights->pitch[i] = is_matrix ? stride[0] * cofi_dtype_bytes(dtype) : 0;
    }
    return COF_OK;
}

cof_status cof_trimul_set_weights(cof_plan *base, const cof_trimul_weights *given, unsigned flags,
                                  cof_stream stream)
{
    struct cofi_tri_plan *plan = NULL;
    COF_TRY(find_plan(base, &plan));
    struct cofi_tri_weights weights = {.flags = flags, .n_empty = plan->n_empty};
    COF_FAIL_IF(flags & ~COF_TRIMUL_CHECK, COF_ERR_INVALID, "flags = %#x: wanted 0 or %#x", flags,
                COF_TRIMUL_CHECK);
    COF_TRY(read_weights(plan, given, &weights));
    COF_TRY(check_state(plan));
    COF_TRY(plan->backend->set_weights(plan, &weights, stream));
    plan->has_weights = true;
    return COF_OK;
}
