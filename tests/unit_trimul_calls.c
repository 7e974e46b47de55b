/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Calls of trimul on CPUs: N and B up and down on one plan, streams, strides, tensors in each
 * other's place, mixed types, weights that change, plans on one arena, NaN, ranks delayed. */
#include "test_trimul.h"

static struct test_tri_problem problem_of(cof_dtype dtype, int64_t n, int n_ranks)
{
    struct test_tri_problem p = {.params = COF_TRIMUL_PARAMS_INIT, .n = n, .n_batch = 1,
                                 .n_ranks = n_ranks, .with_mask = true, .with_biases = true,
                                 .with_residual = true, .with_grads = true, .seed = 5};
    p.params.dtype = dtype;
    p.params.n_rows = n;
    p.params.dim = 12;
    p.params.hidden = 24;
    return p;
}

/* ---- many calls on one plan ----------------------------------------------------------------- */

enum { N_CALLS = 9 };

/* Two plans on one arena, one of them with a row and a batch entry more at most; calls in turn. */
struct shared {
    struct test_tri calls[N_CALLS];
    cof_trimul_params params[2];
};

static void delay(unsigned *seed)
{
    if (rand_r(seed) % 3 == 0)
        usleep((useconds_t)(rand_r(seed) % 1500));
}

static void run_shared(int rank, int n_ranks, const char *job, void *arg)
{
    struct shared *shared = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_plan *plan[2];
    cof_arena *arena;
    cof_stream stream;
    unsigned seed = (unsigned)rank;
    size_t bytes = 0, saved[2];
    for (int i = 0; i < 2; i++) {
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
        CHECK_OK(cof_trimul_workspace(team, &shared->params[i], &sizes));
        bytes = (sizes.symmetric > bytes ? sizes.symmetric : bytes) + sizes.words;
        saved[i] = sizes.saved;
    }
    CHECK_OK(cof_arena_create(team, bytes, 0, &arena));
    for (int i = 0; i < 2; i++)
        CHECK_OK(cof_trimul_plan_create(team, &shared->params[i], arena, &plan[i]));
    CHECK_OK(cof_stream_create(w, 2, &stream)); /* two threads */
    for (int i = 0; i < N_CALLS; i++) {
        delay(&seed);
        test_tri_call(&shared->calls[i], plan[i % 2], rank, saved[i % 2],
                      i % 3 ? stream : COF_STREAM_NOW);
    }
    CHECK_OK(cof_team_barrier(team));
    cof_stream_destroy(stream);
    cof_plan_destroy(plan[0]);
    cof_plan_destroy(plan[1]);
    cof_arena_destroy(arena);
    cof_world_destroy(w);
}

static void test_many_calls(int n_ranks, int grid_cols)
{
    static const int64_t sizes[N_CALLS][2] = {{19, 2}, {3, 1}, {20, 1}, {19, 3}, {1, 2},
                                              {7, 1},  {16, 3}, {18, 2}, {20, 3}};
    struct shared shared;
    for (int i = 0; i < 2; i++) {
        struct test_tri_problem p = problem_of(COF_F32, 20, n_ranks);
        p.params.n_batch = 3;
        p.params.grid_cols = grid_cols;
        p.params.save = i ? COF_TRIMUL_SAVE_AB : COF_TRIMUL_SAVE_NONE;
        p.params.reduce_param_grads = i;
        p.params.direction = i ? COF_TRIMUL_INCOMING : COF_TRIMUL_OUTGOING;
        shared.params[i] = p.params;
    }
    for (int i = 0; i < N_CALLS; i++) {
        struct test_tri_problem p = problem_of(COF_F32, sizes[i][0], n_ranks);
        p.params = shared.params[i % 2];
        p.n_batch = sizes[i][1];
        p.seed = i;
        test_tri_make(&shared.calls[i], &p);
    }
    test_ranks(n_ranks, run_shared, &shared);
    for (int i = 0; i < N_CALLS; i++) {
        test_tri_compare(&shared.calls[i], 1e-5, 1e-5);
        test_tri_free(&shared.calls[i]);
    }
}

/* ---- one rank, with the call changed -------------------------------------------------------- */

struct local {
    cof_world *world;
    cof_plan *plan;
    struct test_tri t;
    struct test_tri_part part;
};

static void local_open(struct local *l, const struct test_tri_problem *p)
{
    l->world = test_world(0, 1, "local", 20);
    test_tri_make(&l->t, p);
    CHECK_OK(cof_trimul_plan_create(cof_world_team(l->world), &p->params, NULL, &l->plan));
    test_tri_part_make(&l->part, &l->t, 0, 0);
    CHECK_OK(cof_trimul_set_weights(l->plan, &l->part.weight_args, 0, COF_STREAM_NOW));
    CHECK_OK(cof_trimul_forward(l->plan, &l->part.args, COF_STREAM_NOW));
    CHECK_OK(cof_trimul_backward(l->plan, &l->part.args, COF_STREAM_NOW));
}

static void local_close(struct local *l)
{
    cof_plan_destroy(l->plan);
    cof_world_destroy(l->world);
    test_tri_part_free(&l->part);
    test_tri_free(&l->t);
}

static bool is_equal(const void *a, const void *b, int64_t n)
{
    return !memcmp(a, b, (size_t)n * sizeof(float));
}

/* Row `row` of a view [2, 10, 10, ...]. */
static float *row_of(const cof_tensor *view, int64_t row)
{
    return (float *)view->data + row / 100 * view->strides[0] +
           row / 10 % 10 * view->strides[1] + row % 10 * view->strides[2];
}

/* Rows as in a compact tensor, poison between them; it is poison then. */
static void check_rows(const cof_tensor *view, const float *compact, int64_t n_floats,
                       const char *name)
{
    const unsigned char *bytes = view->data;
    int n_bad = 0;
    for (int64_t row = 0; row < 200; row++) {
        CHECK(is_equal(row_of(view, row), compact + row * 12, 12), "%s: row %d", name, (int)row);
        memset(row_of(view, row), 0xff, 12 * sizeof(float));
    }
    for (int64_t i = 0; i < n_floats * 4; i++)
        n_bad += bytes[i] != 0xff;
    CHECK(n_bad == 0, "%s: %d bytes written between rows", name, n_bad);
}

/* Every tensor in strides of its own. */
static void test_strides(void)
{
    enum { MASK, X, RESIDUAL, DOUT, OUT, DX, N_VIEWS, N_FLOATS = 4096 };
    static int64_t strides[N_VIEWS][4] = {
        [MASK] = {100, 1, 10}, /* rows and columns the other way round */
        [X] = {1700, 17, 170, 1},
        [RESIDUAL] = {12, 24, 240, 1}, /* batch entries side by side */
        [DOUT] = {2000, 13, 140, 1},
        [OUT] = {1500, 140, 14, 1},
        [DX] = {13, 300, 28, 1}};
    static float memory[N_VIEWS][N_FLOATS];
    struct local l;
    struct test_tri_problem p = problem_of(COF_F32, 10, 1);
    p.n_batch = p.params.n_batch = 2;
    local_open(&l, &p);
    const cof_tensor *own[N_VIEWS] = {&l.part.mask, &l.part.x,   &l.part.residual,
                                      &l.part.dout, &l.part.out, &l.part.dx};
    cof_tensor view[N_VIEWS];
    memset(memory, 0xff, sizeof memory);
    for (int i = 0; i < N_VIEWS; i++) {
        const int64_t width = i == MASK ? 1 : 12;
        view[i] = *own[i];
        view[i].data = memory[i];
        view[i].strides = strides[i];
        for (int64_t row = 0; row < 200 && i < OUT; row++)
            memcpy(row_of(&view[i], row), (const float *)own[i]->data + row * width,
                   (size_t)width * sizeof(float));
    }
    cof_trimul_args args = l.part.args;
    args.x = &view[X], args.mask = &view[MASK], args.residual = &view[RESIDUAL];
    args.out = &view[OUT], args.dout = &view[DOUT], args.dx = &view[DX];
    CHECK_OK(cof_trimul_forward(l.plan, &args, COF_STREAM_NOW));
    CHECK_OK(cof_trimul_backward(l.plan, &args, COF_STREAM_NOW));
    check_rows(&view[OUT], l.part.out.data, N_FLOATS, "out");
    check_rows(&view[DX], l.part.dx.data, N_FLOATS, "dx");
    local_close(&l);
}

/* out in the place of x or of the residual, dx in that of dout, a residual that is x. */
static void test_places(void)
{
    struct local l;
    struct test_tri_problem p = problem_of(COF_F32, 9, 1);
    local_open(&l, &p);
    const int64_t n = l.t.n_pairs * p.params.dim;
    float *out = l.part.out.data, *dx = l.part.dx.data, *x = l.part.x.data;
    float *work = malloc((size_t)n * sizeof *work), *kept = malloc((size_t)n * sizeof *kept);
    cof_tensor view = l.part.x;
    cof_trimul_args args = l.part.args;
    view.data = work;
    memcpy(work, x, (size_t)n * sizeof *work);
    args.x = args.out = &view;
    args.in_place = 1;
    CHECK_OK(cof_trimul_forward(l.plan, &args, COF_STREAM_NOW));
    CHECK(is_equal(work, out, n), "out is x");
    memcpy(work, l.part.residual.data, (size_t)n * sizeof *work);
    args = l.part.args;
    args.residual = args.out = &view;
    CHECK_OK(cof_trimul_forward(l.plan, &args, COF_STREAM_NOW));
    CHECK(is_equal(work, out, n), "out is the residual");
    memcpy(work, l.part.dout.data, (size_t)n * sizeof *work);
    args = l.part.args;
    args.dout = args.dx = &view;
    memcpy(kept, dx, (size_t)n * sizeof *kept);
    CHECK_OK(cof_trimul_backward(l.plan, &args, COF_STREAM_NOW));
    CHECK(is_equal(work, kept, n), "dx is dout");
    args = l.part.args;
    args.residual = &l.part.x;
    CHECK_OK(cof_trimul_backward(l.plan, &args, COF_STREAM_NOW));
    int64_t n_bad = 0;
    for (int64_t i = 0; i < n; i++)
        n_bad += dx[i] != kept[i] + ((float *)l.part.dout.data)[i];
    CHECK(n_bad == 0, "dx of a residual that is x: %d", (int)n_bad);
    free(work);
    free(kept);
    local_close(&l);
}

/* A mask and norms in fp32 beside bf16 give what the same values in bf16 give. */
static void test_mixes(void)
{
    struct local l, mixed;
    struct test_tri_problem p = problem_of(COF_BF16, 9, 1);
    local_open(&l, &p);
    p.params.norm_dtype = p.params.mask_dtype = COF_F32;
    mixed.world = test_world(0, 1, "mixed", 20);
    test_tri_make(&mixed.t, &p);
    test_tri_part_make(&mixed.part, &mixed.t, 0, 0);
    static const int norms[] = {0, 1, 6, 7};
    for (int i = 0; i < 4; i++) {
        cof_tensor *w = &mixed.part.weights[norms[i]];
        w->dtype = COF_F32;
        memcpy(w->data, mixed.t.weights[norms[i]],
               (size_t)mixed.t.weight_elements[norms[i]] * sizeof(float));
    }
    mixed.part.mask.dtype = COF_F32;
    memcpy(mixed.part.mask.data, mixed.t.mask, (size_t)mixed.t.n_pairs * sizeof(float));
    CHECK_OK(cof_trimul_plan_create(cof_world_team(mixed.world), &p.params, NULL, &mixed.plan));
    CHECK_OK(cof_trimul_set_weights(mixed.plan, &mixed.part.weight_args, 0, COF_STREAM_NOW));
    CHECK_OK(cof_trimul_forward(mixed.plan, &mixed.part.args, COF_STREAM_NOW));
    CHECK_OK(cof_trimul_backward(mixed.plan, &mixed.part.args, COF_STREAM_NOW));
    const int64_t n = l.t.n_pairs * p.params.dim / 2;
    CHECK(is_equal(l.part.out.data, mixed.part.out.data, n), "out of mixed types");
    CHECK(is_equal(l.part.dx.data, mixed.part.dx.data, n), "dx of mixed types");
    local_close(&mixed);
    local_close(&l);
}

/* NaN in x[i0, j0]: outgoing, a and b of that pair reach row i0 of tri (as a) and column i0 (as b);
 * incoming, row j0 and column j0. Nothing else. */
static void test_nan(int direction)
{
    struct local l;
    struct test_tri_problem p = problem_of(COF_F32, 11, 1);
    const int64_t i0 = 3, j0 = 7, line = direction ? j0 : i0;
    p.params.direction = (cof_trimul_direction)direction;
    local_open(&l, &p);
    float *clean = l.part.out.data, *out = malloc((size_t)l.t.n_pairs * 12 * sizeof *out);
    ((float *)l.part.x.data)[(i0 * p.n + j0) * 12 + 5] = NAN;
    cof_trimul_args args = l.part.args;
    cof_tensor view = l.part.out;
    view.data = out;
    args.out = &view;
    CHECK_OK(cof_trimul_forward(l.plan, &args, COF_STREAM_NOW));
    for (int64_t i = 0; i < p.n; i++)
        for (int64_t j = 0; j < p.n; j++)
            for (int64_t k = (i * p.n + j) * 12; k < (i * p.n + j + 1) * 12; k++) {
                const bool reached = i == line || j == line || (i == i0 && j == j0);
                CHECK(reached ? isnan(out[k]) : is_equal(&out[k], &clean[k], 1),
                      "NaN, direction %d, element %d of pair %d, %d: %g, without it %g", direction,
                      (int)(k % 12), (int)i, (int)j, (double)out[k], (double)clean[k]);
            }
    free(out);
    local_close(&l);
}

/* Rows of zeros, and means far from 0. */
static void test_rows(void)
{
    struct test_tri t;
    struct test_tri_problem p = problem_of(COF_F32, 9, 1);
    p.offset = 100;
    test_tri_make(&t, &p);
    for (int64_t i = 0; i < t.n_pairs; i += 3)
        memset(t.x + i * 12, 0, 12 * sizeof(float));
    test_tri_run(&t);
    test_tri_compare(&t, 2e-4, 2e-4); /* x has an ulp of 2^-17 there */
    test_tri_free(&t);
}

/* Weights are read when their stream gets there, and the next call has them. */
static void test_weights(void)
{
    struct local l;
    cof_stream stream;
    struct test_tri_problem p = problem_of(COF_F32, 9, 1);
    local_open(&l, &p);
    const int64_t n = l.t.n_pairs * p.params.dim;
    float *first = malloc((size_t)n * sizeof *first), *bias = l.part.weights[11].data;
    memcpy(first, l.part.out.data, (size_t)n * sizeof *first);
    CHECK_OK(cof_stream_create(l.world, 1, &stream));
    const float kept = bias[0];
    bias[0] += 1;
    CHECK_OK(cof_trimul_set_weights(l.plan, &l.part.weight_args, COF_TRIMUL_CHECK, stream));
    CHECK_OK(cof_trimul_forward(l.plan, &l.part.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    CHECK(!is_equal(first, l.part.out.data, n), "new weights changed nothing");
    bias[0] = kept;
    CHECK_OK(cof_trimul_set_weights(l.plan, &l.part.weight_args, 0, stream));
    CHECK_OK(cof_trimul_forward(l.plan, &l.part.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    CHECK(is_equal(first, l.part.out.data, n), "the old weights give other bits");
    free(first);
    cof_stream_destroy(stream);
    local_close(&l);
}

/* Gradients of some weights only. */
static void test_some_grads(void)
{
    struct local l;
    struct test_tri_problem p = problem_of(COF_F32, 9, 1);
    local_open(&l, &p);
    const int64_t n = l.t.weight_elements[4];
    float *kept = malloc((size_t)n * sizeof *kept), *grad = l.part.grads[4].data;
    memcpy(kept, grad, (size_t)n * sizeof *kept);
    memset(grad, 0xff, (size_t)n * sizeof *grad);
    cof_trimul_grads some = COF_TRIMUL_GRADS_INIT;
    some.g_in = &l.part.grads[4];
    l.part.args.grads = &some;
    CHECK_OK(cof_trimul_backward(l.plan, &l.part.args, COF_STREAM_NOW));
    CHECK(is_equal(kept, grad, n), "the gradient of g_in alone differs");
    free(kept);
    local_close(&l);
}

/* Calls without entries leave out and dx alone, and zeros in the gradients of some weights or all,
 * in stream order. */
static void run_empty(int rank, int n_ranks, const char *job, void *arg)
{
    struct local l;
    cof_stream stream;
    struct test_tri_problem p = problem_of(COF_F32, 9, n_ranks);
    p.params.reduce_param_grads = *(int *)arg;
    l.world = test_world(rank, n_ranks, job, 20);
    test_tri_make(&l.t, &p);
    CHECK_OK(cof_trimul_plan_create(cof_world_team(l.world), &p.params, NULL, &l.plan));
    CHECK_OK(cof_stream_create(l.world, 1, &stream));
    test_tri_part_make(&l.part, &l.t, rank, 0);
    CHECK_OK(cof_trimul_set_weights(l.plan, &l.part.weight_args, 0, stream));
    CHECK_OK(cof_trimul_backward(l.plan, &l.part.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    memset(l.part.out.data, 0x5a, 64);
    memset(l.part.dx.data, 0x5a, 64);
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++)
        memset(l.part.grads[i].data, 0xff, (size_t)l.t.weight_elements[i] * sizeof(float));
    l.part.shape.dim[0] = 0;
    l.part.grad_args.norm_out_b = NULL;
    CHECK_OK(cof_trimul_forward(l.plan, &l.part.args, stream));
    CHECK_OK(cof_trimul_backward(l.plan, &l.part.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    CHECK(((unsigned char *)l.part.out.data)[63] == 0x5a, "a call without entries wrote to out");
    CHECK(((unsigned char *)l.part.dx.data)[63] == 0x5a, "a call without entries wrote to dx");
    for (int i = 0; i < TEST_TRI_WEIGHTS; i++) {
        const uint32_t *bits = l.part.grads[i].data;
        int64_t n_bad = 0;
        for (int64_t k = 0; k < l.t.weight_elements[i]; k++)
            n_bad += bits[k] != (i == 7 ? UINT32_MAX : 0);
        CHECK(n_bad == 0, "gradient %d of no entries: %d wrong", i, (int)n_bad);
    }
    l.part.shape.dim[0] = 1;
    CHECK_OK(cof_trimul_backward(l.plan, &l.part.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    cof_stream_destroy(stream);
    local_close(&l);
}

static void test_empty(void)
{
    for (int reduce = 0; reduce < 2; reduce++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++)
            test_ranks(n_ranks, run_empty, &reduce);
}

static void test_import(void)
{
    float src[6 * 2], dst[6 * 2];
    cof_shape shape = {{6, 2}};
    const cof_device cpu = {COF_DEVICE_CPU, 0};
    cof_tensor from = cof_tensor_make(src, cpu, COF_F32, 2, &shape);
    cof_tensor to = cof_tensor_make(dst, cpu, COF_F32, 2, &shape);
    static const int rows[2][2][6] = {{{0, 1, 2, 3, 4, 5}, {3, 4, 5, 0, 1, 2}},
                                      {{0, 2, 4, 1, 3, 5}, {1, 3, 5, 0, 2, 4}}};
    for (int i = 0; i < 12; i++)
        src[i] = (float)i;
    for (int order = 0; order < 2; order++)
        for (int swap = 0; swap < 2; swap++) {
            CHECK_OK(cof_trimul_import_rows(&from, (cof_trimul_order)order, swap, &to));
            for (int i = 0; i < 12; i++)
                CHECK((int)dst[i] == 2 * rows[order][swap][i / 2] + i % 2,
                      "order %d, swap %d, item %d: %g", order, swap, i, (double)dst[i]);
        }
    CHECK_FAILS(cof_trimul_import_rows(&from, (cof_trimul_order)2, 0, &to), COF_ERR_INVALID,
                "order = 2: wanted 0 (stacked)");
    CHECK_FAILS(cof_trimul_import_rows(&from, COF_TRIMUL_STACKED, 0, &from), COF_ERR_INVALID,
                "overlaps");
    CHECK_FAILS(cof_trimul_import_rows(&from, COF_TRIMUL_STACKED, 2, &to), COF_ERR_INVALID,
                "swap_ab = 2");
    cof_shape odd = {{5, 2}};
    from.shape = odd.dim;
    CHECK_FAILS(cof_trimul_import_rows(&from, COF_TRIMUL_STACKED, 0, &to), COF_ERR_INVALID,
                "src: dim 0 (2H) = 5, wanted an even number");
}

int main(void)
{
    for (int staged = 0; staged < 2; staged++) {
        setenv("COFUSE_FORCE_STAGED", staged ? "1" : "0", 1);
        test_many_calls(1, 1);
        test_many_calls(3, 1);
        test_many_calls(4, 2);
    }
    test_strides();
    test_places();
    test_mixes();
    test_nan(0);
    test_nan(1);
    test_rows();
    test_weights();
    test_some_grads();
    test_empty();
    test_import();
    return test_done();
}
