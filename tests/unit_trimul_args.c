/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Bad parameters, weights and tensors of trimul: each is refused with a text that names the
 * argument, its value and the rule, and leaves outputs as they were. */
#include "ops/trimul/trimul_cases.h"
#include "test_trimul.h"

static cof_team *team;

static cof_trimul_params params_of(void)
{
    cof_trimul_params p = COF_TRIMUL_PARAMS_INIT;
    p.dtype = COF_F32;
    p.n_rows = 6;
    p.n_batch = 2;
    p.dim = 8;
    p.hidden = 16;
    return p;
}

#define REFUSED(change, status, part)                                                              \
    do {                                                                                           \
        cof_trimul_params p = params_of();                                                         \
        cof_plan *plan;                                                                            \
        change;                                                                                    \
        CHECK_FAILS(cof_trimul_plan_create(team, &p, NULL, &plan), status, part);                  \
        CHECK(!plan, "a plan came out");                                                           \
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;                                      \
        CHECK_FAILS(cof_trimul_workspace(team, &p, &sizes), status, part);                         \
        cof_trimul_block block;                                                                    \
        CHECK_FAILS(cof_trimul_block_of(&p, 1, 0, 6, &block), status, part);                       \
    } while (0)

static void test_params(void)
{
    static const int64_t whole[] = {0, 6}, part[] = {0, 5}, late[] = {1, 6}, back[] = {0, 7};
    REFUSED(p.size = 3, COF_ERR_INVALID, "params.size = 3");
    REFUSED(p.dtype = COF_I32, COF_ERR_INVALID, "params.dtype = i32: wanted bf16, f16 or f32");
    REFUSED((p.dtype = COF_BF16, p.norm_dtype = COF_F16), COF_ERR_INVALID,
            "params.norm_dtype = f16: wanted bf16, as dtype, or f32");
    REFUSED(p.mask_dtype = COF_BF16, COF_ERR_INVALID, "params.mask_dtype = bf16: wanted f32");
    REFUSED(p.direction = (cof_trimul_direction)2, COF_ERR_INVALID, "params.direction = 2: wanted");
    REFUSED(p.shard = (cof_trimul_shard)3, COF_ERR_INVALID, "params.shard = 3: wanted 0");
    REFUSED(p.save = (cof_trimul_save)2, COF_ERR_INVALID, "params.save = 2: wanted 0 (none)");
    REFUSED((p.save = COF_TRIMUL_SAVE_AB, p.forward_only = 1), COF_ERR_INVALID,
            "params.save = 1: wanted 0 with forward_only");
    REFUSED(p.forward_only = 2, COF_ERR_INVALID, "params.forward_only = 2: wanted 0 or 1");
    REFUSED(p.reduce_param_grads = -1, COF_ERR_INVALID, "params.reduce_param_grads = -1: wanted");
    REFUSED(p.eps_in = -1, COF_ERR_INVALID, "params.eps_in = -1: wanted a number > 0");
    REFUSED(p.eps_in = 1e300, COF_ERR_INVALID, "params.eps_in = 1e+300: wanted");
    REFUSED(p.eps_out = NAN, COF_ERR_INVALID, "params.eps_out = nan: wanted");
    REFUSED(p.n_batch = -1, COF_ERR_INVALID, "params.n_batch = -1: wanted 1 .. ");
    REFUSED(p.n_rows = 0, COF_ERR_INVALID, "params.n_rows = 0: wanted 1 .. ");
    REFUSED(p.dim = 0, COF_ERR_INVALID, "params.dim = 0: wanted 1 .. 8192");
    REFUSED(p.dim = 8193, COF_ERR_INVALID, "params.dim = 8193: wanted 1 .. 8192");
    REFUSED(p.hidden = -8, COF_ERR_INVALID, "params.hidden = -8: wanted 1 .. 8192");
    REFUSED(p.chunk_features = 12, COF_ERR_INVALID, "params.chunk_features = 12: wanted a mult");
    REFUSED(p.chunk_features = -8, COF_ERR_INVALID, "params.chunk_features = -8: wanted 0 .. ");
    REFUSED(p.max_ctas = -1, COF_ERR_INVALID, "params.max_ctas = -1: wanted 0 .. ");
    REFUSED(p.n_rows = INT64_C(1) << 30, COF_ERR_INVALID, "is past the address space");
    REFUSED(p.grid_rows = 2, COF_ERR_INVALID, "a grid of 2 x 1 ranks, wanted 1 ranks");
    REFUSED(p.grid_cols = -1, COF_ERR_INVALID, "params.grid_cols = -1: wanted at least 0");
    REFUSED(p.row_offsets = whole, COF_ERR_INVALID, "params.row_offsets: given, wanted NULL");
    REFUSED(p.shard = COF_TRIMUL_EXPLICIT, COF_ERR_INVALID, "params.row_offsets: NULL, wanted");
    REFUSED((p.shard = COF_TRIMUL_EXPLICIT, p.row_offsets = part, p.col_offsets = whole),
            COF_ERR_INVALID, "params.row_offsets[1] = 5: wanted 6 .. 6");
    REFUSED((p.shard = COF_TRIMUL_EXPLICIT, p.row_offsets = late, p.col_offsets = whole),
            COF_ERR_INVALID, "params.row_offsets[0] = 1: wanted 0 .. 0");
    REFUSED((p.shard = COF_TRIMUL_EXPLICIT, p.row_offsets = whole, p.col_offsets = back),
            COF_ERR_INVALID, "params.col_offsets[1] = 7: wanted 6 .. 6");
    cof_trimul_params p = params_of();
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_plan *plan;
    CHECK_FAILS(cof_trimul_plan_create(team, NULL, NULL, &plan), COF_ERR_INVALID, "params: NULL");
    CHECK_FAILS(cof_trimul_plan_create(NULL, &p, NULL, &plan), COF_ERR_INVALID, "team: NULL");
    CHECK_FAILS(cof_trimul_plan_create(team, &p, NULL, NULL), COF_ERR_INVALID, "plan_out: NULL");
    CHECK_FAILS(cof_trimul_workspace(NULL, &p, &sizes), COF_ERR_INVALID, "team: NULL");
}

/* ---- blocks --------------------------------------------------------------------------------- */

/* The parts of a grid tile the pairs, in the order of ranks. */
static void test_blocks(void)
{
    static const int grids[][2] = {{1, 1}, {2, 3}, {5, 1}, {1, 7}, {4, 4}};
    cof_trimul_params p = params_of();
    p.n_rows = 100;
    for (int shard = 0; shard < 2; shard++)
        for (size_t g = 0; g < sizeof grids / sizeof grids[0]; g++)
            for (int64_t n = 1; n <= 23; n += 11) {
                const int cp0 = grids[g][0], cp1 = grids[g][1];
                int64_t row = 0;
                p.shard = (cof_trimul_shard)shard;
                p.grid_rows = cp0;
                p.grid_cols = cp1;
                for (int i = 0; i < cp0; i++) {
                    int64_t col = 0, n_rows = 0;
                    for (int j = 0; j < cp1; j++) {
                        cof_trimul_block b;
                        CHECK_OK(cof_trimul_block_of(&p, cp0 * cp1, i * cp1 + j, n, &b));
                        CHECK(b.row == row && b.col == col, "block %d, %d of N=%d", i, j, (int)n);
                        col += b.n_cols;
                        n_rows = b.n_rows;
                    }
                    CHECK(col == n, "columns %d of %d", (int)col, (int)n);
                    row += n_rows;
                }
                CHECK(row == n, "rows %d of %d", (int)row, (int)n);
            }
    cof_trimul_block b;
    p = params_of();
    CHECK_FAILS(cof_trimul_block_of(&p, 1, 1, 6, &b), COF_ERR_INVALID, "rank = 1: wanted 0 .. 0");
    CHECK_FAILS(cof_trimul_block_of(&p, 1, 0, 7, &b), COF_ERR_INVALID, "n = 7: wanted 1 .. 6");
    CHECK_FAILS(cof_trimul_block_of(&p, 0, 0, 6, &b), COF_ERR_INVALID, "n_ranks = 0: wanted");
    CHECK_FAILS(cof_trimul_block_of(&p, 1, 0, 6, NULL), COF_ERR_INVALID, "block_out: NULL");
}

/* ---- calls ---------------------------------------------------------------------------------- */

struct fixture {
    struct test_tri t;
    struct test_tri_part part;
    cof_plan *plan;
};

static void set_up(struct fixture *f, const cof_trimul_params *params)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    const struct test_tri_problem p = {.params = *params, .n = 6, .n_batch = 2, .n_ranks = 1,
                                       .with_mask = true, .with_biases = true,
                                       .with_residual = true, .with_grads = true, .seed = 1};
    test_tri_make(&f->t, &p);
    CHECK_OK(cof_trimul_workspace(team, params, &sizes));
    CHECK_OK(cof_trimul_plan_create(team, params, NULL, &f->plan));
    test_tri_part_make(&f->part, &f->t, 0, sizes.saved);
    memset(f->part.out.data, 0x5a, 4 * 64);
    memset(f->part.dx.data, 0x5a, 4 * 64);
}

static void tear_down(struct fixture *f)
{
    cof_plan_destroy(f->plan);
    test_tri_part_free(&f->part);
    test_tri_free(&f->t);
}

static bool is_untouched(const cof_tensor *t)
{
    const unsigned char *bytes = t->data;
    return bytes[0] == 0x5a && bytes[255] == 0x5a;
}

#define CALL_REFUSED(call, change, status, text)                                                   \
    do {                                                                                           \
        cof_trimul_args a = f->part.args;                                                          \
        cof_tensor x = f->part.x, out = f->part.out, mask = f->part.mask, dout = f->part.dout;     \
        cof_tensor dx = f->part.dx, residual = f->part.residual;                                   \
        cof_trimul_grads g = f->part.grad_args;                                                    \
        int64_t dims[4] = {2, 6, 6, 8}, strides[4] = {288, 48, 8, 1};                              \
        a.x = &x, a.out = &out, a.mask = &mask, a.dout = &dout, a.dx = &dx;                        \
        a.residual = &residual, a.grads = &g, a.in_place = 0;                                      \
        (void)dims, (void)strides;                                                                 \
        change;                                                                                    \
        CHECK_FAILS(call(f->plan, &a, COF_STREAM_NOW), status, text);                              \
        CHECK(is_untouched(&f->part.out) && is_untouched(&f->part.dx), "outputs changed");         \
    } while (0)

static void refuse_forward(struct fixture *f)
{
    CALL_REFUSED(cof_trimul_forward, a.size = 1, COF_ERR_INVALID, "args.size = 1");
    CALL_REFUSED(cof_trimul_forward, a.n = 7, COF_ERR_INVALID, "args.n = 7: wanted 1 .. 6, or 0");
    CALL_REFUSED(cof_trimul_forward, a.n = -1, COF_ERR_INVALID, "args.n = -1: wanted");
    CALL_REFUSED(cof_trimul_forward, a.n = 5, COF_ERR_INVALID, "x: dim 1 (Ni) = 6, wanted 5");
    CALL_REFUSED(cof_trimul_forward, a.x = NULL, COF_ERR_INVALID, "x: NULL, wanted a tensor");
    CALL_REFUSED(cof_trimul_forward, a.out = NULL, COF_ERR_INVALID, "out: NULL, wanted a tensor");
    CALL_REFUSED(cof_trimul_forward, x.ndim = 3, COF_ERR_INVALID, "x: ndim = 3, wanted 4");
    CALL_REFUSED(cof_trimul_forward, (dims[0] = 3, x.shape = dims), COF_ERR_INVALID,
                 "x: dim 0 (B) = 3, wanted 0 .. 2");
    CALL_REFUSED(cof_trimul_forward, (dims[3] = 9, x.shape = dims), COF_ERR_INVALID,
                 "x: dim 3 (D) = 9, wanted 8");
    CALL_REFUSED(cof_trimul_forward, (dims[0] = 1, out.shape = dims), COF_ERR_INVALID,
                 "out: dim 0 (B) = 1, wanted 2");
    CALL_REFUSED(cof_trimul_forward, x.dtype = COF_BF16, COF_ERR_INVALID,
                 "x: dtype bf16, wanted f32");
    CALL_REFUSED(cof_trimul_forward, mask.dtype = COF_BF16, COF_ERR_INVALID,
                 "mask: dtype bf16, wanted f32");
    CALL_REFUSED(cof_trimul_forward, mask.ndim = 4, COF_ERR_INVALID, "mask: ndim = 4, wanted 3");
    CALL_REFUSED(cof_trimul_forward, mask.shape = NULL, COF_ERR_INVALID, "mask: shape is NULL");
    CALL_REFUSED(cof_trimul_forward, (dims[2] = 5, mask.shape = dims), COF_ERR_INVALID,
                 "mask: dim 2 (Nj) = 5, wanted 6");
    CALL_REFUSED(cof_trimul_forward, (strides[2] = 0, mask.strides = strides), COF_ERR_INVALID,
                 "mask: stride of dim 2 (Nj) = 0 makes elements overlap");
    CALL_REFUSED(cof_trimul_forward, (strides[2] = -1, mask.strides = strides),
                 COF_ERR_UNSUPPORTED, "mask: stride of dim 2 (Nj) = -1, wanted >= 0");
    CALL_REFUSED(cof_trimul_forward, (strides[3] = 2, x.strides = strides), COF_ERR_UNSUPPORTED,
                 "x: stride of the last dim (D) = 2, wanted 1");
    CALL_REFUSED(cof_trimul_forward, (strides[2] = 7, x.strides = strides), COF_ERR_INVALID,
                 "x: stride of dim 2 (Nj) = 7 makes");
    CALL_REFUSED(cof_trimul_forward, a.out = &x, COF_ERR_INVALID, "out: its memory overlaps");
    CALL_REFUSED(cof_trimul_forward, a.in_place = 1, COF_ERR_INVALID, "out: not x itself");
    CALL_REFUSED(cof_trimul_forward, a.in_place = 2, COF_ERR_INVALID, "args.in_place = 2: wanted");
    CALL_REFUSED(cof_trimul_forward, mask.data = (char *)out.data + 16, COF_ERR_INVALID,
                 "out: its memory overlaps that of mask");
    CALL_REFUSED(cof_trimul_forward, residual.data = (char *)out.data + 16, COF_ERR_INVALID,
                 "out: its memory overlaps that of residual");
    CALL_REFUSED(cof_trimul_forward, a.saved = NULL, COF_ERR_INVALID, "saved: NULL, wanted");
    cof_tensor saved = f->part.saved;
    cof_shape few = {{64}};
    saved.shape = few.dim;
    CALL_REFUSED(cof_trimul_forward, a.saved = &saved, COF_ERR_INVALID, "saved: 64 bytes, wanted");
    saved = f->part.saved;
    saved.byte_offset = 64;
    CALL_REFUSED(cof_trimul_forward, a.saved = &saved, COF_ERR_INVALID, "alignment to 128 bytes");
}

static void refuse_backward(struct fixture *f)
{
    cof_tensor grad = f->part.grads[2];
    CALL_REFUSED(cof_trimul_backward, a.dout = NULL, COF_ERR_INVALID, "dout: NULL, wanted");
    CALL_REFUSED(cof_trimul_backward, a.dx = NULL, COF_ERR_INVALID, "dx: NULL, wanted a tensor");
    CALL_REFUSED(cof_trimul_backward, a.dx = &x, COF_ERR_INVALID, "dx: its memory overlaps");
    CALL_REFUSED(cof_trimul_backward, dx.data = (char *)dout.data + 4, COF_ERR_INVALID,
                 "dx: its memory overlaps that of dout");
    CALL_REFUSED(cof_trimul_backward, g.size = 1, COF_ERR_INVALID, "args.grads.size = 1");
    CALL_REFUSED(cof_trimul_backward, (g.p_in = &grad, grad.dtype = COF_BF16), COF_ERR_INVALID,
                 "grads.p_in: dtype bf16, wanted f32");
    CALL_REFUSED(cof_trimul_backward, g.p_in = &f->part.grads[8], COF_ERR_INVALID,
                 "grads.p_in: dim 0 (rows) = 8, wanted 32");
    CALL_REFUSED(cof_trimul_backward, g.g_in = &f->part.grads[2], COF_ERR_INVALID,
                 "grads.g_in: its memory overlaps that of grads.p_in");
    int64_t pitch[2] = {9, 1};
    grad = f->part.grads[2];
    grad.strides = pitch;
    CALL_REFUSED(cof_trimul_backward, g.p_in = &grad, COF_ERR_UNSUPPORTED,
                 "grads.p_in: stride of dim 0 = 9, wanted 8: compact");
}

static void refuse_weights(struct fixture *f)
{
    cof_trimul_weights w = f->part.weight_args;
    cof_tensor t = f->part.weights[2];
    w.g_out = NULL;
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &w, 0, COF_STREAM_NOW), COF_ERR_INVALID,
                "weights.g_out: NULL, wanted a tensor");
    w = f->part.weight_args;
    w.p_in = &f->part.weights[8];
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &w, 0, COF_STREAM_NOW), COF_ERR_INVALID,
                "weights.p_in: dim 0 (rows) = 8, wanted 32");
    w.p_in = &t;
    t.dtype = COF_F16;
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &w, 0, COF_STREAM_NOW), COF_ERR_INVALID,
                "weights.p_in: dtype f16, wanted f32");
    w = f->part.weight_args;
    w.p_in_b = &f->part.weights[9];
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &w, 0, COF_STREAM_NOW), COF_ERR_INVALID,
                "weights.p_in_b: dim 0 (entries) = 8, wanted 32");
    w = f->part.weight_args;
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &w, 2, COF_STREAM_NOW), COF_ERR_INVALID,
                "flags = 0x2: wanted 0 or 0x1");
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &w, 0, (cof_stream){COF_STREAM_KIND_CPU, NULL}),
                COF_ERR_INVALID, "stream");
    w.size = 7;
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &w, 0, COF_STREAM_NOW), COF_ERR_INVALID,
                "weights.size = 7");
    CHECK_FAILS(cof_trimul_set_weights(NULL, &w, 0, COF_STREAM_NOW), COF_ERR_INVALID, "plan: NULL");
}

static void test_calls(void)
{
    struct fixture f;
    cof_trimul_params p = params_of();
    p.save = COF_TRIMUL_SAVE_AB;
    set_up(&f, &p);
    CHECK_FAILS(cof_trimul_forward(f.plan, &f.part.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: it has no weights");
    refuse_weights(&f);
    CHECK_FAILS(cof_trimul_forward(f.plan, &f.part.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: it has no weights");
    CHECK_OK(cof_trimul_set_weights(f.plan, &f.part.weight_args, 0, COF_STREAM_NOW));
    refuse_forward(&f);
    refuse_backward(&f);
    CHECK_FAILS(cof_trimul_forward(NULL, &f.part.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: NULL");
    CHECK_OK(cof_trimul_forward(f.plan, &f.part.args, COF_STREAM_NOW));
    CHECK_OK(cof_trimul_backward(f.plan, &f.part.args, COF_STREAM_NOW));
    tear_down(&f);
    p.save = COF_TRIMUL_SAVE_NONE;
    p.forward_only = 1;
    set_up(&f, &p);
    CHECK_OK(cof_trimul_set_weights(f.plan, &f.part.weight_args, 0, COF_STREAM_NOW));
    CHECK_FAILS(cof_trimul_backward(f.plan, &f.part.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: made with forward_only = 1");
    f.part.args.saved = &f.part.saved;
    CHECK_FAILS(cof_trimul_forward(f.plan, &f.part.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "saved: given, wanted NULL with save = 0");
    tear_down(&f);
}

static void test_describe(void)
{
    cof_trimul_params p = params_of();
    cof_plan *plan;
    const char *text = "trimul dtype=f32 norm=f32 mask=f32 direction=incoming B=2 N=6 D=8 H=16 "
                       "grid=1x1 shard=balanced eps_in=1e-05 eps_out=0.5 save=none forward_only=0 "
                       "reduce=0 chunk=16 chunks=1 slices=32 isa=";
    p.direction = COF_TRIMUL_INCOMING;
    p.eps_out = 0.5;
    CHECK_OK(cof_trimul_plan_create(team, &p, NULL, &plan));
    CHECK(!strncmp(cof_plan_describe(plan), text, strlen(text)), "%s", cof_plan_describe(plan));
    CHECK(strstr(cof_plan_describe(plan), " P=1 engine=thread arena=own device=cpu"), "%s",
          cof_plan_describe(plan));
    cof_plan_destroy(plan);
}

/* What a case is run with is what its line says. */
#define SAME(member)                                                                               \
    CHECK(read.member == c.member, "%s: " #member " = %lld", line, (long long)c.member)
static void test_case_line(const struct cofi_check_options *options, int64_t idx)
{
    struct cofi_tm_case c, read = {.b = 1};
    char line[1024];
    cofi_tm_case(options, idx, &c);
    cofi_tm_case_line(options, idx, line, sizeof line);
    CHECK_OK(cofi_option_read_line(line, cofi_tm_check_words, &read));
    SAME(n.n);
    for (int i = 0; i < c.n.n; i++)
        SAME(n.at[i]);
    for (int i = 0; i < 2; i++)
        SAME(grid.at[i]);
    for (int i = 0; i < c.rows.n; i++)
        SAME(rows.at[i]);
    for (int i = 0; i < c.cols.n; i++)
        SAME(cols.at[i]);
    SAME(rows.n); SAME(cols.n); SAME(b); SAME(d); SAME(h); SAME(chunk); SAME(dtype); SAME(norm);
    SAME(mask_dtype); SAME(direction); SAME(shard); SAME(save); SAME(reduce); SAME(bias);
    SAME(mask); SAME(residual); SAME(calls); SAME(grads); SAME(two_plans); SAME(data); SAME(layout);
    SAME(delays); SAME(epoch); SAME(mean);
}

static void test_case_lines(void)
{
    for (int p = 1; p <= 4; p++) {
        const struct cofi_check_options options = {.n_ranks = p};
        const int64_t n = cofi_tm_n_cases(&options);
        CHECK(n > 50, "%lld cases", (long long)n);
        for (int64_t i = 0; i < n; i++)
            test_case_line(&options, i);
    }
}

int main(void)
{
    cof_world *world = test_world(0, 1, "args", 20);
    team = cof_world_team(world);
    test_params();
    test_blocks();
    test_calls();
    test_describe();
    test_case_lines();
    cof_world_destroy(world);
    return test_done();
}
