/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A section's forward pass as a graph of cuDNN's.
 *
 * Where every query row sees every key, one operation does it (from 9.13.1 on). Else the parts of
 * the softmax are written down one by one, in the order in which cuDNN knows them for attention and
 * makes one kernel of them:
 *
 *     s = q k^T;  s *= scale
 *     right side of the band:  s = row + right >= col ? s : -inf
 *     left side:               s = col + left > row ? s : -inf
 *     m = max s;  e = exp(s - m);  l = sum e;  lse = m + log l;  p = e / l;  o = p v
 *
 * cuDNN's kernels want a key for every row, so the graph is of the rows that see one. */
#include <math.h>
#include <stdlib.h>

#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_engine.h"

enum {
    COLUMN = 3, ROW = 2,      /* dims of scores */
    MAX_SHIFT = 1 << 24,      /* integers up to it are exact in fp32 */
    BROKEN_FIRST = 91000,     /* attention is wrong in 9.10.0 and 9.10.1 */
    BROKEN_LAST = 91001,
    WINDOW_BROKEN = 91400,    /* in 9.14.0: a left side alone, over 1024 keys */
    LEFT_ALONE_SINCE = 91002, /* a left side without a right one */
    ODD_SHIFT_SINCE = 90600,  /* off the diagonal, of rows and keys in no multiples of 64 */
    INF_SINCE = 91000,        /* before it, masks are of the least finite number */
};

/* ---- what a band leaves --------------------------------------------------------------------- */

static int64_t clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* a - b and a + b of a value and a limit that may be INT64_MAX, which stays so. */
static int64_t reach(int64_t limit, int64_t shift)
{
    int64_t sum;
    if (limit == INT64_MAX || __builtin_add_overflow(limit, shift, &sum))
        return INT64_MAX;
    return sum;
}

void cofi_cudnn_part(const struct cofi_attention_shape *s, struct cofi_cudnn_part *part)
{
    /* j <= i + right and j > i - left, of the section's rows. */
    const struct cofi_band *band = &s->band;
    int64_t right = reach(band->right, band->diag);
    int64_t left = reach(band->left == INT64_MAX ? INT64_MAX : band->left + 1, -band->diag);
    /* Row i sees a key where i + right >= 0 and i - left < k_rows - 1. */
    int64_t first = right >= 0 ? 0 : -right;
    int64_t last = left >= s->q_rows ? s->q_rows - 1 : s->k_rows - 2 + left;
    first = clamp(first, 0, s->q_rows);
    last = clamp(last, -1, s->q_rows - 1);
    *part = (struct cofi_cudnn_part){0};
    if (first > last || (left != INT64_MAX && right != INT64_MAX && left < 1 - right))
        return;
    int64_t k_first = left > first ? 0 : first - left + 1;
    int64_t k_last = right >= s->k_rows - 1 - last ? s->k_rows - 1 : last + right;
    part->q_begin = first;
    part->q_rows = last - first + 1;
    part->k_begin = clamp(k_first, 0, s->k_rows - 1);
    part->k_rows = clamp(k_last, 0, s->k_rows - 1) - part->k_begin + 1;
    part->right = reach(right, first - part->k_begin);
    part->left = reach(left, part->k_begin - first);
    part->has_right = part->right < part->k_rows - 1;
    part->has_left = part->left < part->q_rows;
}

/* ---- what cuDNN has ------------------------------------------------------------------------- */

static bool is_aligned(const struct cofi_attention_strides *t)
{
    return t->batch % 8 == 0 && t->row % 8 == 0 && t->head % 8 == 0 && t->batch >= 0 &&
           t->row > 0 && t->head >= 0;
}

/* Limits and faults of cuDNN's releases, as its frontend has them. */
static cof_status check_band(const struct cofi_cudnn *lib, const struct cofi_cudnn_part *p)
{
    const int version = lib->version;
    char text[24];
    cofi_cudnn_version_text(version, text);
    COF_FAIL_IF(version >= BROKEN_FIRST && version <= BROKEN_LAST, COF_ERR_UNSUPPORTED,
                "cuDNN %s: attention is wrong in it: wanted 9.10.2 or later, or one before 9.10",
                text);
    COF_FAIL_IF(version == WINDOW_BROKEN && p->has_left && !p->has_right && p->k_rows > 1024,
                COF_ERR_UNSUPPORTED, "cuDNN %s: windows without a right side are wrong in it: "
                "wanted 9.14.1 or later", text);
    if (p->has_left && !p->has_right)
        COF_TRY(cofi_cudnn_check_version(lib, LEFT_ALONE_SINCE, "a window without a right side"));
    if (p->has_right && p->right && (p->q_rows % 64 || p->k_rows % 64))
        COF_TRY(cofi_cudnn_check_version(lib, ODD_SHIFT_SINCE, "a band off the diagonal"));
    COF_FAIL_IF(p->has_left && p->q_rows > p->k_rows, COF_ERR_UNSUPPORTED,
                "cuDNN: a window of %lld rows on %lld keys: wanted no more rows than keys",
                (long long)p->q_rows, (long long)p->k_rows);
    COF_FAIL_IF((p->has_right && llabs(p->right) >= MAX_SHIFT) ||
                    (p->has_left && llabs(p->left) >= MAX_SHIFT), COF_ERR_UNSUPPORTED,
                "cuDNN: a band %lld rows off the diagonal: wanted less than %d",
                (long long)(p->has_right ? p->right : p->left), (int)MAX_SHIFT);
    return COF_OK;
}

cof_status cofi_cudnn_forward_check(const struct cofi_cudnn *lib,
                                    const struct cofi_attention_shape *s,
                                    const struct cofi_cudnn_part *part)
{
    COF_TRY(cofi_cudnn_check_version(lib, COFI_CUDNN_OLDEST, "attention"));
    COF_FAIL_IF(s->elem != COFI_ELEM_BF16 && s->elem != COFI_ELEM_F16, COF_ERR_UNSUPPORTED,
                "cuDNN: the dtype is float32: wanted bfloat16 or float16");
    COF_FAIL_IF(s->o_f32, COF_ERR_UNSUPPORTED, "cuDNN: o is float32: wanted the dtype of q");
    COF_FAIL_IF(!(s->scale > 0), COF_ERR_UNSUPPORTED, "cuDNN: scale %g: wanted above 0",
                (double)s->scale); /* kernels may take the maximum before they scale */
    COF_FAIL_IF(s->dim_qk % 8 || s->dim_v % 8, COF_ERR_UNSUPPORTED,
                "cuDNN: head dims %lld and %lld: wanted multiples of 8", (long long)s->dim_qk,
                (long long)s->dim_v);
    COF_FAIL_IF(s->dim_qk > 256 || s->dim_v > 256, COF_ERR_UNSUPPORTED,
                "cuDNN: head dims %lld and %lld: wanted at most 256", (long long)s->dim_qk,
                (long long)s->dim_v);
    COF_FAIL_IF(s->n_heads % s->n_kv_heads, COF_ERR_UNSUPPORTED,
                "cuDNN: %lld heads over %lld: wanted a multiple", (long long)s->n_heads,
                (long long)s->n_kv_heads);
    COF_FAIL_IF(!is_aligned(&s->q) || !is_aligned(&s->k) || !is_aligned(&s->v) ||
                    !is_aligned(&s->o), COF_ERR_UNSUPPORTED,
                "cuDNN: strides: wanted positive multiples of 8 elements");
    return check_band(lib, part);
}

/* ---- the graph ------------------------------------------------------------------------------ */

struct build {
    struct cofi_cudnn_graph *graph;
    int64_t scores[4], rows[4]; /* dims: [B, H, q_rows, k_rows] and [B, H, q_rows, 1] */
    float masked;
};

/* out = mode(x, b), of x's dims. */
static cofi_cudnn_tensor_ref apply(const struct build *b, int mode, int math, int type,
                                   cofi_cudnn_tensor_ref x, cofi_cudnn_tensor_ref y)
{
    cofi_cudnn_tensor_ref out = x ? cofi_cudnn_between(b->graph, type, x->dim) : NULL;
    cofi_cudnn_pointwise(b->graph, &(struct cofi_cudnn_pointwise){
                                       .mode = mode, .math = math, .x = x, .b = y, .out = out});
    return out;
}

static cofi_cudnn_tensor_ref index_of(const struct build *b, int axis, cofi_cudnn_tensor_ref x)
{
    cofi_cudnn_tensor_ref out = cofi_cudnn_between(b->graph, COFI_CUDNN_INT32, b->scores);
    cofi_cudnn_pointwise(b->graph, &(struct cofi_cudnn_pointwise){
                                       .mode = COFI_CUDNN_INDEX, .math = COFI_CUDNN_FLOAT,
                                       .axis = axis, .x = x, .out = out});
    return out;
}

/* scores where `seen`, else masked. */
static cofi_cudnn_tensor_ref keep(const struct build *b, cofi_cudnn_tensor_ref scores,
                                  cofi_cudnn_tensor_ref masked, cofi_cudnn_tensor_ref seen)
{
    cofi_cudnn_tensor_ref out = cofi_cudnn_between(b->graph, COFI_CUDNN_FLOAT, b->scores);
    cofi_cudnn_pointwise(b->graph, &(struct cofi_cudnn_pointwise){
                                       .mode = COFI_CUDNN_SELECT, .math = COFI_CUDNN_FLOAT,
                                       .x = scores, .b = masked, .t = seen, .out = out});
    return out;
}

static cofi_cudnn_tensor_ref mask_right(const struct build *b, cofi_cudnn_tensor_ref scores,
                                        int64_t right)
{
    cofi_cudnn_tensor_ref masked = cofi_cudnn_float(b->graph, b->masked);
    cofi_cudnn_tensor_ref row = index_of(b, ROW, scores), column = index_of(b, COLUMN, scores);
    if (right)
        row = apply(b, COFI_CUDNN_ADD, COFI_CUDNN_INT32, COFI_CUDNN_INT32, row,
                    cofi_cudnn_int(b->graph, (int32_t)right));
    return keep(b, scores, masked, apply(b, COFI_CUDNN_GREATER_EQUAL, COFI_CUDNN_BOOL,
                                         COFI_CUDNN_BOOL, row, column));
}

static cofi_cudnn_tensor_ref mask_left(const struct build *b, cofi_cudnn_tensor_ref scores,
                                       int64_t left)
{
    cofi_cudnn_tensor_ref masked = cofi_cudnn_float(b->graph, b->masked);
    cofi_cudnn_tensor_ref row = index_of(b, ROW, scores), column = index_of(b, COLUMN, scores);
    column = apply(b, COFI_CUDNN_ADD, COFI_CUDNN_FLOAT, COFI_CUDNN_FLOAT, column,
                   cofi_cudnn_float(b->graph, (float)left));
    return keep(b, scores, masked, apply(b, COFI_CUDNN_GREATER, COFI_CUDNN_BOOL, COFI_CUDNN_BOOL,
                                         column, row));
}

static cofi_cudnn_tensor_ref row_wise(const struct build *b, int mode, cofi_cudnn_tensor_ref x)
{
    cofi_cudnn_tensor_ref out = cofi_cudnn_between(b->graph, COFI_CUDNN_FLOAT, b->rows);
    cofi_cudnn_reduce(b->graph, mode, x, out);
    return out;
}

/* Probabilities in `type`; lse is written. */
static cofi_cudnn_tensor_ref softmax(const struct build *b, cofi_cudnn_tensor_ref scores, int type,
                                     cofi_cudnn_tensor_ref lse)
{
    const int f32 = COFI_CUDNN_FLOAT;
    cofi_cudnn_tensor_ref most = row_wise(b, COFI_CUDNN_REDUCE_MAX, scores);
    cofi_cudnn_tensor_ref shifted = apply(b, COFI_CUDNN_SUB, f32, f32, scores, most);
    cofi_cudnn_tensor_ref e = apply(b, COFI_CUDNN_EXP, f32, f32, shifted, NULL);
    cofi_cudnn_tensor_ref sum = row_wise(b, COFI_CUDNN_REDUCE_ADD, e);
    cofi_cudnn_tensor_ref log_sum = apply(b, COFI_CUDNN_LOG, f32, f32, sum, NULL);
    cofi_cudnn_pointwise(b->graph, &(struct cofi_cudnn_pointwise){
                                       .mode = COFI_CUDNN_ADD, .math = f32, .x = most,
                                       .b = log_sum, .out = lse});
    return apply(b, COFI_CUDNN_DIV, f32, type, e, sum);
}

static cofi_cudnn_tensor_ref view(struct cofi_cudnn_graph *g, int64_t uid, int type,
                                  const int64_t dim[4], const struct cofi_attention_strides *t)
{
    const int64_t stride[4] = {t->batch, t->head, t->row, 1};
    return cofi_cudnn_tensor(g, uid, type, dim, stride);
}

bool cofi_cudnn_forward_is_unified(const struct cofi_cudnn *lib, const struct cofi_cudnn_part *part)
{
    return !part->has_left && !part->has_right && lib->version >= COFI_CUDNN_UNIFIED;
}

void cofi_cudnn_forward_graph(struct cofi_cudnn_graph *g, const struct cofi_attention_shape *s,
                              const struct cofi_cudnn_part *part, bool is_unified)
{
    const int type = s->elem == COFI_ELEM_BF16 ? COFI_CUDNN_BFLOAT16 : COFI_CUDNN_HALF;
    const int64_t rows = part->q_rows, keys = part->k_rows;
    const int64_t q_dim[4] = {s->n_batch, s->n_heads, rows, s->dim_qk};
    const int64_t k_dim[4] = {s->n_batch, s->n_kv_heads, keys, s->dim_qk};
    const int64_t kt_dim[4] = {s->n_batch, s->n_kv_heads, s->dim_qk, keys};
    const int64_t kt_stride[4] = {s->k.batch, s->k.head, 1, s->k.row};
    const int64_t v_dim[4] = {s->n_batch, s->n_kv_heads, keys, s->dim_v};
    const int64_t o_dim[4] = {s->n_batch, s->n_heads, rows, s->dim_v};
    const int64_t lse_stride[4] = {s->lse_batch, s->lse_head, 1, 1};
    const struct build b = {
        g, {s->n_batch, s->n_heads, rows, keys}, {s->n_batch, s->n_heads, rows, 1},
        g->lib->version < INF_SINCE ? -3.402823466e38f : -INFINITY};
    cofi_cudnn_tensor_ref q = view(g, COFI_CUDNN_Q, type, q_dim, &s->q);
    cofi_cudnn_tensor_ref v = view(g, COFI_CUDNN_V, type, v_dim, &s->v);
    cofi_cudnn_tensor_ref o = view(g, COFI_CUDNN_O, type, o_dim, &s->o);
    cofi_cudnn_tensor_ref lse =
        cofi_cudnn_tensor(g, COFI_CUDNN_LSE, COFI_CUDNN_FLOAT, b.rows, lse_stride);
    cofi_cudnn_tensor_ref scale = cofi_cudnn_float(g, s->scale);
    if (is_unified) {
        cofi_cudnn_tensor_ref k = view(g, COFI_CUDNN_K, type, k_dim, &s->k);
        cofi_cudnn_attention(g, q, k, v, scale, o, lse);
        return;
    }
    cofi_cudnn_tensor_ref kt = cofi_cudnn_tensor(g, COFI_CUDNN_K, type, kt_dim, kt_stride);
    cofi_cudnn_tensor_ref scores = cofi_cudnn_between(g, COFI_CUDNN_FLOAT, b.scores);
    cofi_cudnn_matmul(g, q, kt, scores);
    scores = apply(&b, COFI_CUDNN_MUL, COFI_CUDNN_FLOAT, COFI_CUDNN_FLOAT, scores, scale);
    if (part->has_right)
        scores = mask_right(&b, scores, part->right);
    if (part->has_left)
        scores = mask_left(&b, scores, part->left);
    cofi_cudnn_matmul(g, softmax(&b, scores, type, lse), v, o);
}
