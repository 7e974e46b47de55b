/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Bad parameters and tensors of allreduce_rmsnorm: each is refused with a text that names the
 * argument, its value and the rule, leaves outputs as they were, and breaks nothing. */
#include "test_allreduce_rmsnorm.h"

static cof_team *team;

#define REFUSED(change, status, part)                                                              \
    do {                                                                                           \
        cof_allreduce_rmsnorm_params p = test_arn_params(16, 8);                                   \
        cof_plan *plan;                                                                            \
        change;                                                                                    \
        CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan), status, part);       \
        CHECK(!plan, "a plan came out");                                                           \
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;                                      \
        CHECK_FAILS(cof_allreduce_rmsnorm_workspace(team, &p, &sizes), status, part);              \
    } while (0)

static void test_params(void)
{
    REFUSED(p.size = 3, COF_ERR_INVALID, "params.size = 3");
    REFUSED(p.dtype = COF_I32, COF_ERR_INVALID, "params.dtype = i32: wanted bf16, f16 or f32");
    REFUSED(p.dtype = (cof_dtype){0}, COF_ERR_INVALID, "params.dtype = dtype(0,0,0): wanted");
    REFUSED((p.dtype = COF_BF16, p.weight_dtype = COF_F16), COF_ERR_INVALID,
            "params.weight_dtype = f16: wanted bf16, as dtype, or f32");
    REFUSED(p.weight_dtype = COF_I32, COF_ERR_INVALID, "params.weight_dtype = i32: wanted f32");
    REFUSED(p.hidden = 0, COF_ERR_INVALID, "params.hidden = 0: wanted 1 .. ");
    REFUSED(p.hidden = -7, COF_ERR_INVALID, "params.hidden = -7: wanted 1 .. ");
    REFUSED(p.max_tokens = 0, COF_ERR_INVALID, "params.max_tokens = 0: wanted 1 .. ");
    REFUSED(p.max_tokens = INT64_MAX, COF_ERR_INVALID, "params.max_tokens = 9223372036854775807: ");
    REFUSED((p.max_tokens = INT64_C(1) << 40, p.hidden = INT64_C(1) << 40), COF_ERR_INVALID,
            "params: max_tokens * hidden is past the address space");
    REFUSED(p.variant = (cof_allreduce_variant)3, COF_ERR_INVALID, "params.variant = 3: wanted 0");
    REFUSED(p.variant = (cof_allreduce_variant)-1, COF_ERR_INVALID, "params.variant = -1: wanted");
    REFUSED(p.rounding = (cof_allreduce_rounding)2, COF_ERR_INVALID,
            "params.rounding = 2: wanted 0 (match unfused) or 1 (exact)");
    REFUSED(p.algorithm = (cof_allreduce_algorithm)3, COF_ERR_INVALID,
            "params.algorithm = 3: wanted 0 (auto), 1 (one shot) or 2 (two shot)");
    REFUSED(p.algorithm = (cof_allreduce_algorithm)-1, COF_ERR_INVALID,
            "params.algorithm = -1: wanted 0 (auto)");
    REFUSED(p.eps = 0, COF_ERR_INVALID, "params.eps = 0: wanted a finite number > 0");
    REFUSED(p.eps = -1e-6f, COF_ERR_INVALID, "params.eps = -1e-06: wanted a finite number > 0");
    REFUSED(p.eps = NAN, COF_ERR_INVALID, "params.eps = nan: wanted");
    REFUSED(p.eps = INFINITY, COF_ERR_INVALID, "params.eps = inf: wanted");
    REFUSED(p.variant = COF_ALLREDUCE_ONLY, COF_ERR_INVALID,
            "params.eps = 1e-05: wanted 0 with variant 2");
    REFUSED(p.weight_bias = 2, COF_ERR_INVALID, "params.weight_bias = 2: wanted 0 or 1");
    REFUSED(p.weight_bias = -1, COF_ERR_INVALID, "params.weight_bias = -1: wanted 0 or 1");
    REFUSED(p.one_shot_bytes = -1, COF_ERR_INVALID, "params.one_shot_bytes = -1: wanted 0 .. ");
    REFUSED(p.max_ctas = -1, COF_ERR_INVALID, "params.max_ctas = -1: wanted 0 .. ");
    cof_allreduce_rmsnorm_params p = test_arn_params(16, 8);
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_plan *plan;
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(team, NULL, NULL, &plan), COF_ERR_INVALID,
                "params: NULL");
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(NULL, &p, NULL, &plan), COF_ERR_INVALID,
                "team: NULL");
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, NULL), COF_ERR_INVALID,
                "plan_out: NULL");
    CHECK_FAILS(cof_allreduce_rmsnorm_workspace(team, &p, NULL), COF_ERR_INVALID, "sizes_out");
    CHECK_FAILS(cof_allreduce_rmsnorm_workspace(NULL, &p, &sizes), COF_ERR_INVALID, "team: NULL");
    CHECK_FAILS(cof_allreduce_rmsnorm_workspace(team, NULL, &sizes), COF_ERR_INVALID,
                "params: NULL");
}

static void test_describe(void)
{
    cof_allreduce_rmsnorm_params p = test_arn_params(16, 8);
    cof_plan *plan;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan));
    const char *text = "allreduce_rmsnorm dtype=f32 weight=f32 H=16 max_tokens=8 "
                       "variant=residual_norm rounding=match_unfused eps=9.99999975e-06 "
                       "weight_bias=0 algorithm=auto one_shot_bytes=all part=8 P=1 engine=thread "
                       "arena=own device=cpu isa=";
    CHECK(!strncmp(cof_plan_describe(plan), text, strlen(text)), "%s", cof_plan_describe(plan));
    cof_plan_destroy(plan);
    p.variant = COF_ALLREDUCE_ONLY;
    p.eps = 0;
    p.dtype = COF_BF16;
    p.algorithm = COF_ALLREDUCE_TWO_SHOT;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan));
    text = "allreduce_rmsnorm dtype=bf16 weight=none H=16 max_tokens=8 variant=only "
           "rounding=match_unfused eps=0 weight_bias=0 algorithm=two_shot part=8 P=1";
    CHECK(!strncmp(cof_plan_describe(plan), text, strlen(text)), "%s", cof_plan_describe(plan));
    cof_plan_destroy(plan);
}

/* The call with one thing changed is refused; the outputs keep every byte. */
#define CALL_REFUSED(change, status, part)                                                         \
    do {                                                                                           \
        struct test_arn t;                                                                         \
        test_arn_make(&t, p, 6, 0, 1, 1);                                                          \
        cof_tensor kept[2] = {t.residual_out, t.norm_out};                                         \
        int64_t other[4] = {t.pitch, 1, 1, 1}, dims[4] = {6, p->hidden, p->hidden, p->hidden};     \
        cof_tensor view = t.x;                                                                     \
        view.shape = dims;                                                                         \
        view.strides = other;                                                                      \
        (void)view;                                                                                \
        change;                                                                                    \
        CHECK_FAILS(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW), status, part);       \
        t.residual_out = kept[0];                                                                  \
        t.norm_out = kept[1];                                                                      \
        CHECK(test_arn_untouched(&t), "outputs changed");                                          \
        test_arn_free(&t);                                                                         \
    } while (0)

#define VIEW(...) (t.args.x = &view, __VA_ARGS__)

static void refuse_tensors(const cof_allreduce_rmsnorm_params *p, cof_plan *plan)
{
    CALL_REFUSED(t.args.size = 1, COF_ERR_INVALID, "args.size = 1");
    CALL_REFUSED(t.args.x = NULL, COF_ERR_INVALID, "x: NULL, wanted a tensor");
    CALL_REFUSED(t.args.residual = NULL, COF_ERR_INVALID, "residual: NULL, wanted a tensor");
    CALL_REFUSED(t.args.weight = NULL, COF_ERR_INVALID, "weight: NULL, wanted a tensor");
    CALL_REFUSED(t.args.residual_out = NULL, COF_ERR_INVALID, "residual_out: NULL, wanted");
    CALL_REFUSED(t.args.norm_out = NULL, COF_ERR_INVALID, "norm_out: NULL, wanted a tensor");
    CALL_REFUSED(t.x.ndim = 1, COF_ERR_INVALID, "x: ndim = 1, wanted 2 .. 8");
    CALL_REFUSED(t.norm_out.ndim = 9, COF_ERR_INVALID, "norm_out: ndim = 9, wanted 2 .. 8");
    CALL_REFUSED(t.x.shape = NULL, COF_ERR_INVALID, "x: shape is NULL");
    CALL_REFUSED(VIEW(dims[1] = 15), COF_ERR_INVALID, "x: dim 1 (H) = 15, wanted 16");
    CALL_REFUSED(VIEW(dims[0] = -1), COF_ERR_INVALID, "x: dim 0 (T) = -1, wanted 0 .. ");
    CALL_REFUSED(VIEW(dims[0] = INT64_MAX), COF_ERR_INVALID, "x: dim 0 (T) = 92233720368");
    CALL_REFUSED(VIEW(dims[0] = dims[1] = INT64_C(1) << 40, view.ndim = 3), COF_ERR_INVALID,
                 "x: more than 72057594037927936 rows");
    CALL_REFUSED(VIEW(dims[0] = 5), COF_ERR_INVALID, "residual: 6 rows, wanted 5, as x has");
    CALL_REFUSED((dims[0] = 7, t.residual_out.shape = dims), COF_ERR_INVALID,
                 "residual_out: 7 rows, wanted 6, as x has");
    CALL_REFUSED(t.x.dtype = COF_BF16, COF_ERR_INVALID, "x: dtype bf16, wanted f32");
    CALL_REFUSED(t.weight.dtype = COF_F16, COF_ERR_INVALID, "weight: dtype f16, wanted f32");
    CALL_REFUSED(t.weight_shape.dim[0] = 17, COF_ERR_INVALID, "weight: dim 0 (H) = 17, wanted 16");
    CALL_REFUSED(t.weight.ndim = 2, COF_ERR_INVALID, "weight: ndim = 2, wanted 1");
    CALL_REFUSED(t.weight.data = NULL, COF_ERR_INVALID, "weight: data is NULL");
    CALL_REFUSED((other[0] = 2, t.weight.strides = other), COF_ERR_UNSUPPORTED,
                 "weight: stride of the last dim (H) = 2, wanted 1");
    CALL_REFUSED(t.x.device.device_type = COF_DEVICE_CUDA, COF_ERR_INVALID,
                 "x: device type 2, wanted 1 (CPU)");
    CALL_REFUSED(t.norm_out.data = NULL, COF_ERR_INVALID, "norm_out: data is NULL");
    CALL_REFUSED(t.residual.byte_offset = 2, COF_ERR_INVALID, "wanted alignment to 4 bytes");
    CALL_REFUSED(VIEW(other[0] = 15), COF_ERR_INVALID, "x: stride of dim 0 (T) = 15 makes");
    CALL_REFUSED(VIEW(other[0] = -16), COF_ERR_UNSUPPORTED, "x: stride of dim 0 (T) = -16");
    CALL_REFUSED(VIEW(other[1] = 2), COF_ERR_UNSUPPORTED, "x: stride of the last dim (H) = 2");
    CALL_REFUSED(VIEW(view.ndim = 3, dims[0] = 2, dims[1] = 3, other[0] = 4 * t.pitch,
                      other[1] = t.pitch),
                 COF_ERR_UNSUPPORTED, "x: stride of dim 0 = 76, wanted 57: rows evenly spaced");
}

static void refuse_overlaps(const cof_allreduce_rmsnorm_params *p, cof_plan *plan)
{
    CALL_REFUSED(t.args.norm_out = &t.residual_out, COF_ERR_INVALID,
                 "residual_out: its memory overlaps that of norm_out");
    CALL_REFUSED(t.args.residual_out = &t.x, COF_ERR_INVALID,
                 "residual_out: its memory overlaps that of x");
    CALL_REFUSED(t.args.norm_out = &t.residual, COF_ERR_INVALID,
                 "norm_out: its memory overlaps that of residual");
    CALL_REFUSED((dims[0] = 1, view = t.residual_out, view.shape = dims + 1, view.ndim = 1,
                  view.strides = NULL, t.args.weight = &view),
                 COF_ERR_INVALID, "residual_out: its memory overlaps that of weight");
    CALL_REFUSED((view = t.norm_out, view.shape = dims + 1, view.ndim = 1, view.strides = NULL,
                  t.args.weight = &view),
                 COF_ERR_INVALID, "norm_out: its memory overlaps that of weight");
    /* Itself is allowed, a neighbour is not, nor the same memory with other rows. */
    CALL_REFUSED((view = t.x, view.byte_offset = 4, t.args.norm_out = &view), COF_ERR_INVALID,
                 "norm_out: its memory overlaps that of x");
    CALL_REFUSED((view.strides = other, other[0] = 16, t.args.norm_out = &view), COF_ERR_INVALID,
                 "norm_out: its memory overlaps that of x");
    CALL_REFUSED((view = t.residual, view.byte_offset = 8, t.args.residual_out = &view),
                 COF_ERR_INVALID, "residual_out: its memory overlaps that of residual");
}

static void pass_after_refusals(const cof_allreduce_rmsnorm_params *p, cof_plan *plan)
{
    struct test_arn t;
    test_arn_make(&t, p, 6, 0, 1, 1);
    CHECK_FAILS(cof_allreduce_rmsnorm_run(NULL, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: NULL");
    CHECK_FAILS(cof_allreduce_rmsnorm_run(plan, NULL, COF_STREAM_NOW), COF_ERR_INVALID,
                "args: NULL");
    CHECK_FAILS(cof_allreduce_rmsnorm_run(plan, &t.args, (cof_stream){9, NULL}), COF_ERR_INVALID,
                "stream: kind = 9");
    CHECK(test_arn_untouched(&t), "outputs changed");
    CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW)); /* nothing was broken */
    CHECK(test_arn_wrong(&t) == 0, "%lld elements", (long long)test_arn_wrong(&t));
    test_arn_free(&t);
}

static void test_calls(void)
{
    cof_allreduce_rmsnorm_params params = test_arn_params(16, 8), *p = &params;
    cof_plan *plan;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, p, NULL, &plan));
    refuse_tensors(p, plan);
    refuse_overlaps(p, plan);
    CALL_REFUSED(t.args.x_source = -1, COF_ERR_INVALID, "args.x_source = -1: wanted 0 or COF_IN_A");
    CALL_REFUSED(t.args.x_source = COF_IN_ARENA(0), COF_ERR_INVALID,
                 "args.x_source = 1: wanted 0 for a plan without an arena of the caller's");
    pass_after_refusals(p, plan);
    cof_plan_destroy(plan);
}

static void test_variants(void)
{
    cof_allreduce_rmsnorm_params params = test_arn_params(16, 8), *p = &params;
    cof_plan *plan;
    p->variant = COF_ALLREDUCE_NORM;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, p, NULL, &plan));
    CALL_REFUSED(t.args.residual = &t.residual, COF_ERR_INVALID,
                 "residual: given, wanted NULL with variant 1");
    CALL_REFUSED(t.args.weight = NULL, COF_ERR_INVALID, "weight: NULL, wanted a tensor");
    CALL_REFUSED(t.args.norm_out = NULL, COF_ERR_INVALID, "norm_out: NULL, wanted a tensor");
    cof_plan_destroy(plan);
    p->variant = COF_ALLREDUCE_ONLY;
    p->eps = 0;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, p, NULL, &plan));
    CALL_REFUSED(t.args.residual = &t.residual, COF_ERR_INVALID,
                 "residual: given, wanted NULL with variant 2");
    CALL_REFUSED(t.args.weight = &t.weight, COF_ERR_INVALID,
                 "weight: given, wanted NULL with variant 2");
    CALL_REFUSED(t.args.norm_out = &t.norm_out, COF_ERR_INVALID,
                 "norm_out: given, wanted NULL with variant 2");
    CALL_REFUSED(t.args.residual_out = NULL, COF_ERR_INVALID, "residual_out: NULL, wanted");
    cof_plan_destroy(plan);
}

static void pass_in_arena(const cof_allreduce_rmsnorm_params *p, cof_plan *plan, char *base,
                          size_t at)
{
    struct test_arn t;
    test_arn_make(&t, p, 6, 0, 1, 1);
    t.x.data = base + at;
    t.args.x_source = COF_IN_ARENA(at);
    test_arn_fill(&t);
    CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW));
    CHECK(test_arn_wrong(&t) == 0, "%lld elements", (long long)test_arn_wrong(&t));
    test_arn_free(&t);
}

/* x in the arena: 6 rows of pitch 19 floats, 440 bytes from the first to the last element. */
static void test_in_arena(void)
{
    cof_allreduce_rmsnorm_params params = test_arn_params(16, 8), *p = &params;
    cof_arena_pointers view_of = COF_ARENA_POINTERS_INIT;
    cof_arena *arena;
    cof_plan *plan;
    size_t at;
    char text[80];
    CHECK_OK(cof_arena_create(team, 65536, 0, &arena));
    CHECK_OK(cof_arena_alloc(arena, 4096, &at));
    CHECK_OK(cof_arena_view(arena, &view_of));
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, p, arena, &plan));
    char *base = view_of.base[0];
    snprintf(text, sizeof text, "which is offset %zu (args.x_source) of the arena", at);
    CALL_REFUSED(t.args.x_source = COF_IN_ARENA(at), COF_ERR_INVALID, text);
    CALL_REFUSED((view.data = base + at + 128, VIEW(t.args.x_source = COF_IN_ARENA(at))),
                 COF_ERR_INVALID, text);
    CALL_REFUSED((view.data = base + 65536 - 440,
                  VIEW(t.args.x_source = COF_IN_ARENA(65536 - 440))),
                 COF_ERR_INVALID, "args.x_source: x at offset 65096 of the arena, wanted within");
    CALL_REFUSED((view.data = base + at, VIEW(t.args.x_source = COF_IN_ARENA(at)),
                  t.args.norm_out = &view),
                 COF_ERR_INVALID, "norm_out: its memory overlaps that of x");
    pass_in_arena(p, plan, base, at);
    cof_plan_destroy(plan);
    cof_arena_destroy(arena);
}

/* In the exchange buffers of the plan x has no place. */
static void test_in_buffers(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_allreduce_rmsnorm_params params = test_arn_params(16, 8);
    cof_arena_pointers view = COF_ARENA_POINTERS_INIT;
    cof_arena *arena;
    cof_plan *plan;
    struct test_arn t;
    (void)arg;
    CHECK_OK(cof_arena_create(cof_world_team(w), 65536, 0, &arena));
    CHECK_OK(cof_arena_view(arena, &view));
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &params, arena, &plan));
    test_arn_make(&t, &params, 6, rank, n_ranks, 1);
    t.x.data = (char *)view.base[rank] + 128;
    t.args.x_source = COF_IN_ARENA(128);
    CHECK_FAILS(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "args.x_source: x at offset 128 of the arena, wanted within the memory of");
    CHECK(test_arn_untouched(&t), "outputs changed");
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    test_arn_free(&t);
    cof_plan_destroy(plan);
    cof_arena_destroy(arena);
    cof_world_destroy(w);
}

/* What workspace says is what a plan on a caller's arena takes: that much is enough, less is not.
 */
static void test_workspace(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *three = cof_world_team(w);
    cof_allreduce_rmsnorm_params p = test_arn_params(1000, 50);
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_plan *plan;
    cof_arena *arena;
    (void)arg;
    CHECK_OK(cof_allreduce_rmsnorm_workspace(three, &p, &sizes));
    /* two halves of 50 rows and a third of the sums, 4000 bytes a row */
    size_t payload = 2 * 200064 + 17 * 4000;
    CHECK(sizes.symmetric >= payload && sizes.symmetric < payload + 16384, "%zu", sizes.symmetric);
    CHECK(sizes.saved == 0 && sizes.words > 0 && sizes.local > 0, "%zu %zu %zu", sizes.saved,
          sizes.words, sizes.local);
    CHECK_OK(cof_arena_create(three, payload + sizes.words + 128, 0, &arena));
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(three, &p, arena, &plan));
    cof_plan_destroy(plan);
    CHECK_OK(cof_team_barrier(three));
    cof_arena_destroy(arena);
    CHECK_OK(cof_arena_create(three, payload, 0, &arena));
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(three, &p, arena, &plan), COF_ERR_NOMEM,
                "no room for");
    CHECK_OK(cof_team_barrier(three));
    cof_arena_destroy(arena);
    cof_world_destroy(w);
}

static void test_most_ranks(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_allreduce_rmsnorm_params p = test_arn_params(16, 8);
    cof_plan *plan;
    (void)arg;
    if (n_ranks <= 16)
        CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &p, NULL, &plan));
    else
        CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &p, NULL, &plan),
                    COF_ERR_UNSUPPORTED, "team: 17 ranks, wanted at most 16");
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

static void test_other_operator(void)
{
    cof_attention_params q = test_attention_params(10);
    cof_allreduce_rmsnorm_params p = test_arn_params(16, 8);
    struct test_arn t;
    cof_plan *attention;
    CHECK_OK(cof_attention_plan_create(team, &q, NULL, &attention));
    test_arn_make(&t, &p, 6, 0, 1, 1);
    CHECK_FAILS(cof_allreduce_rmsnorm_run(attention, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: a plan of attention, wanted allreduce_rmsnorm");
    CHECK(test_arn_untouched(&t), "outputs changed");
    test_arn_free(&t);
    cof_plan_destroy(attention);
}

/* More than any machine has: refused before anything is touched. */
static void test_memory(void)
{
    cof_allreduce_rmsnorm_params p = test_arn_params(INT64_C(1) << 47, 1);
    cof_plan *plan;
    p.dtype = COF_BF16;
    p.rounding = COF_ALLREDUCE_EXACT; /* keeps a row in fp32 */
    CHECK_FAILS(cof_allreduce_rmsnorm_plan_create(team, &p, NULL, &plan), COF_ERR_NOMEM,
                "bytes wanted");
    CHECK_OK(cof_team_query(team));
}

int main(void)
{
    cof_world *world = test_world(0, 1, NULL, 10);
    team = cof_world_team(world);
    test_params();
    test_describe();
    test_calls();
    test_variants();
    test_in_arena();
    test_other_operator();
    test_memory();
    cof_world_destroy(world);
    test_ranks(2, test_in_buffers, NULL);
    test_ranks(3, test_workspace, NULL);
    test_ranks(16, test_most_ranks, NULL);
    test_ranks(17, test_most_ranks, NULL);
    return test_done();
}
