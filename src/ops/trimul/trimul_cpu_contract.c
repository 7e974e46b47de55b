/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs, step 6 and its backward: products of the planes of one feature, N x N x N, by
 * square tiles of the result. Rows and columns of a plane past N, up to whole tiles, exist and hold
 * anything: they reach only results that are dropped. Operands of the type of products are read
 * where they lie; others go through fp32 panels, K_BLOCK of the sum at a time. */
#include <string.h>

#include "ops/trimul/trimul_cpu.h"

#define K_BLOCK 512

/* A plane of one feature and batch entry. */
struct plane {
    const char *data;
    int64_t pitch; /* bytes */
    enum cofi_elem elem;
};

/* c = a b in one of the forms of products, element [m, n] to row m and column n of tri, d a or d b.
 */
struct product {
    enum cofi_gemm_form form;
    struct plane a, b;
    enum cofi_tri_exchange to;
    int half;
    int64_t h, batch;
};

struct contraction {
    struct cofi_tri_plan *plan;
    struct cofi_tri_cpu_state *st;
    int64_t begin, n_row_tiles;
    bool is_grad;
};

/* A worker's panels and result. */
struct space {
    const struct cofi_vec_ops *vec;
    struct cofi_gemm *gemm;
    float *a, *b, *c;
};

static bool is_direct(const struct cofi_tri_cpu_state *st, const struct plane *p)
{
    return p->elem == (st->type == COFI_GEMM_BF16 ? COFI_ELEM_BF16 : COFI_ELEM_F32);
}

/* Rows and columns of a plane, [row, row + n_rows) and so on, as an operand of `ld`: in place, or a
 * panel with zeros past the plane's N rows and columns. */
static const void *operand(const struct cofi_tri_cpu_state *st, const struct space *space,
                           const struct plane *p, int64_t row, int64_t n_rows, int64_t col,
                           int64_t n_cols, float *panel, int64_t *ld)
{
    const int64_t item = cofi_elem_bytes(p->elem), n = st->shape.n;
    const char *at = p->data + row * p->pitch + col * item;
    if (is_direct(st, p)) {
        *ld = p->pitch / item;
        return at;
    }
    const int64_t valid = col + n_cols <= n ? n_cols : n - col;
    *ld = n_cols;
    for (int64_t i = 0; i < n_rows; i++) {
        float *to = panel + i * n_cols;
        const int64_t have = row + i < n ? valid : 0;
        if (have)
            cofi_vec_load(space->vec, p->elem, to, at + i * p->pitch, have);
        memset(to + have, 0, (size_t)(n_cols - have) * sizeof *to);
    }
    return panel;
}

/* The part of an operand for rows (of the result) [first, first + tile) and the sum's [k, k + n_k).
 */
static const void *part(const struct cofi_tri_cpu_state *st, const struct space *space,
                        const struct plane *p, bool k_is_row, int64_t first, int64_t k, int64_t n_k,
                        float *panel, int64_t *ld)
{
    const int64_t tile = st->shape.tile;
    return k_is_row ? operand(st, space, p, k, n_k, first, tile, panel, ld)
                    : operand(st, space, p, first, tile, k, n_k, panel, ld);
}

/* Rows and columns [m, m + tile), [n, n + tile) of the result to the owners of their tokens. */
static void store_tile(struct cofi_tri_plan *plan, const struct space *space,
                       const struct product *x, int64_t m, int64_t n)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_shape *s = &st->shape;
    const int64_t m_end = m + s->tile < s->n ? m + s->tile : s->n;
    const int64_t n_end = n + s->tile < s->n ? n + s->tile : s->n;
    for (int r = 0; r < plan->n_ranks; r++) {
        const cof_trimul_block block = cofi_tri_block(&plan->params, r, s->n);
        const struct cofi_tri_port *port = st->ports + x->to * plan->n_ranks + r;
        const int64_t i0 = block.row > m ? block.row : m, j0 = block.col > n ? block.col : n;
        const int64_t i_end = block.row + block.n_rows, j_end = block.col + block.n_cols;
        const int64_t i1 = i_end < m_end ? i_end : m_end, j1 = j_end < n_end ? j_end : n_end;
        for (int64_t i = i0; i < i1 && j0 < j1; i++)
            cofi_vec_store(space->vec, cofi_tri_cpu_elem(plan, x->to),
                           cofi_tri_port_at(port, x->half, x->h, x->batch, i, j0),
                           space->c + (i - m) * s->tile + j0 - n, j1 - j0);
    }
}

/* The tiles of the result with rows from m on. A panel of a serves all of them where it has the
 * whole sum. */
static void row_of_tiles(struct cofi_tri_plan *plan, const struct space *space,
                         const struct product *x, int64_t m)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const int64_t size = st->shape.n, tile = st->shape.tile;
    const bool direct = is_direct(st, &x->a) && is_direct(st, &x->b);
    const int64_t k_block = direct || size < K_BLOCK ? size : K_BLOCK;
    const void *a = NULL;
    int64_t lda = 0, ldb;
    for (int64_t n = 0; n < size; n += tile) {
        for (int64_t k = 0; k < size; k += k_block) {
            const int64_t n_k = size - k < k_block ? size - k : k_block;
            if (n == 0 || k_block < size)
                a = part(st, space, &x->a, x->form == COFI_GEMM_TN, m, k, n_k, space->a, &lda);
            const void *b =
                part(st, space, &x->b, x->form != COFI_GEMM_NT, n, k, n_k, space->b, &ldb);
            cofi_gemm_note(&st->failure,
                           cofi_gemm_run(space->gemm, x->form, st->type, tile, tile, n_k, a, lda, b,
                                         ldb, k > 0, space->c, tile));
        }
        store_tile(plan, space, x, m, n);
    }
}

static struct plane plane_of(const struct cofi_tri_plan *plan, enum cofi_tri_exchange e, int half,
                             int64_t h, int64_t b)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_port *in = &st->inbox[e];
    return (struct plane){cofi_tri_port_at(in, half, h, b, 0, 0), in->row,
                          cofi_tri_cpu_elem(plan, e)};
}

/* Outgoing tri = a b^T:  d a = d tri b,    d b = d tri^T a.
 * Incoming tri = a^T b:  d a = b d tri^T,  d b = a d tri. */
static struct product product_of(const struct cofi_tri_plan *plan, bool is_grad, int half,
                                 int64_t h, int64_t b)
{
    const bool incoming = plan->params.direction == COF_TRIMUL_INCOMING;
    const struct plane pa = plane_of(plan, COFI_TRI_AB, 0, h, b);
    const struct plane pb = plane_of(plan, COFI_TRI_AB, 1, h, b);
    struct product x = {.a = pa, .b = pb, .to = COFI_TRI_TRI, .half = half, .h = h, .batch = b,
                        .form = incoming ? COFI_GEMM_TN : COFI_GEMM_NT};
    if (!is_grad)
        return x;
    const struct plane dtri = plane_of(plan, COFI_TRI_DTRI, 0, h, b);
    x.to = COFI_TRI_DAB;
    x.a = incoming ? (half ? pa : pb) : dtri;
    x.b = incoming ? dtri : (half ? pa : pb);
    x.form = incoming ? (half ? COFI_GEMM_NN : COFI_GEMM_NT) : (half ? COFI_GEMM_TN : COFI_GEMM_NN);
    return x;
}

static void contract_task(void *arg, int64_t task, struct cofi_cpu_worker *worker)
{
    const struct contraction *c = arg;
    const int64_t tile = c->st->shape.tile, n_batch = c->st->shape.n_batch;
    const int64_t m = task % c->n_row_tiles * tile, plane = task / c->n_row_tiles;
    const int64_t panel = tile * K_BLOCK;
    float *at = worker->scratch;
    const struct space space = {.vec = cofi_vec(), .gemm = worker->gemm, .a = at, .b = at + panel,
                                .c = at + 2 * panel};
    for (int half = 0; half <= c->is_grad; half++) {
        const struct product x = product_of(c->plan, c->is_grad, half, c->begin + plane / n_batch,
                                            plane % n_batch);
        row_of_tiles(c->plan, &space, &x, m);
    }
}

static void contract(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, int64_t begin,
                     int64_t end, bool is_grad)
{
    struct cofi_tri_cpu_state *st = plan->state;
    struct contraction c = {plan, st, begin, st->shape.plane_rows / st->shape.tile, is_grad};
    if (begin < end)
        cofi_cpu_parallel(s, (end - begin) * st->shape.n_batch * c.n_row_tiles, contract_task, &c);
    cofi_tri_cpu_deliver(plan, is_grad ? COFI_TRI_DAB : COFI_TRI_TRI, begin, end);
}

void cofi_tri_cpu_contract(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, int64_t begin,
                           int64_t end)
{
    contract(s, plan, begin, end, false);
}

void cofi_tri_cpu_contract_grad(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    const int64_t hidden = plan->params.hidden;
    contract(s, plan, cofi_tri_first_feature(hidden, plan->rank, plan->n_ranks),
             cofi_tri_first_feature(hidden, plan->rank + 1, plan->n_ranks), true);
}
