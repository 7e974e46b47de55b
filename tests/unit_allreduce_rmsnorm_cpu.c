/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CPUs, every bit: algorithms, parts, rows read in the arena, aliasing, plans
 * on one arena, empty calls, ranks delayed at random, a caller that flushes subnormals. */
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "test_allreduce_rmsnorm.h"

static void delay(unsigned *seed)
{
    if (rand_r(seed) % 4 == 0)
        usleep((useconds_t)(rand_r(seed) % 2000));
}

static const int64_t token_counts[] = {1, 2, 3, 0, 7, 5, 64, 4, 33, 1, 6, 17};

/* Calls back to back on one plan, T up and down, above max_tokens too. */
static void many_calls(cof_team *team, const cof_allreduce_rmsnorm_params *p, int rank, int n_ranks)
{
    cof_plan *plan;
    unsigned seed = (unsigned)rank;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, p, NULL, &plan));
    for (int i = 0; i < 24; i++) {
        struct test_arn t;
        test_arn_make(&t, p, token_counts[i % 12], rank, n_ranks, i);
        delay(&seed);
        CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW));
        CHECK(test_arn_wrong(&t) == 0, "call %d of %s: %lld elements", i, cof_plan_describe(plan),
              (long long)test_arn_wrong(&t));
        test_arn_free(&t);
    }
    CHECK_OK(cof_team_barrier(team));
    cof_plan_destroy(plan);
}

static void test_calls(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    for (int a = COF_ALLREDUCE_AUTO; a <= COF_ALLREDUCE_TWO_SHOT; a++)
        for (int v = COF_ALLREDUCE_RESIDUAL_NORM; v <= COF_ALLREDUCE_ONLY; v++) {
            cof_allreduce_rmsnorm_params p = test_arn_params(v == 1 ? 300 : 1000, v == 2 ? 5 : 100);
            p.algorithm = (cof_allreduce_algorithm)a;
            p.variant = (cof_allreduce_variant)v;
            p.eps = v == COF_ALLREDUCE_ONLY ? 0 : p.eps;
            p.one_shot_bytes = a == COF_ALLREDUCE_AUTO ? 8000 : 0; /* both, by turns */
            many_calls(cof_world_team(w), &p, rank, n_ranks);
        }
    (void)arg;
    cof_world_destroy(w);
}

/* x in the arena is written again as soon as a call has ended; between the calls another plan
 * works on the same arena. */
static void test_arena(int rank, int n_ranks, const char *job, void *arg)
{
    const cof_allreduce_algorithm *algorithm = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_allreduce_rmsnorm_params p = test_arn_params(300, 8), q = test_arn_params(64, 8);
    unsigned seed = (unsigned)rank;
    cof_arena *arena;
    cof_plan *plan, *other;
    size_t offset;
    p.algorithm = q.algorithm = *algorithm;
    CHECK_OK(cof_arena_create(team, 1 << 20, 0, &arena));
    CHECK_OK(cof_arena_alloc(arena, 64 * 303 * sizeof(float), &offset));
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, &p, arena, &plan));
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(team, &q, arena, &other));
    cof_arena_pointers view = COF_ARENA_POINTERS_INIT;
    CHECK_OK(cof_arena_view(arena, &view));
    for (int i = 0; i < 24; i++) {
        struct test_arn t, u;
        test_arn_make(&t, &p, token_counts[i % 12], rank, n_ranks, i);
        test_arn_make(&u, &q, 3, rank, n_ranks, i);
        t.x.data = (char *)view.base[rank] + offset;
        t.args.x_source = COF_IN_ARENA(offset);
        test_arn_fill(&t);
        delay(&seed);
        CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW));
        memset(t.x.data, 0xff, test_arn_bytes(&t));
        CHECK(test_arn_wrong(&t) == 0, "call %d: %lld elements", i, (long long)test_arn_wrong(&t));
        if (i % 3 == 0) {
            CHECK_OK(cof_allreduce_rmsnorm_run(other, &u.args, COF_STREAM_NOW));
            CHECK(test_arn_wrong(&u) == 0, "call %d of the other plan", i);
        }
        test_arn_free(&t);
        test_arn_free(&u);
    }
    CHECK_OK(cof_team_barrier(team));
    cof_plan_destroy(plan);
    cof_plan_destroy(other);
    cof_arena_destroy(arena);
    cof_world_destroy(w);
}

/* Outputs that are inputs, on a stream, calls in flight. */
static void test_aliases(int rank, int n_ranks, const char *job, void *arg)
{
    enum { CALLS = 5 };
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_allreduce_rmsnorm_params p = test_arn_params(517, 16);
    struct test_arn t[CALLS];
    cof_stream stream;
    cof_plan *plan;
    p.algorithm = *(cof_allreduce_algorithm *)arg;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &p, NULL, &plan));
    CHECK_OK(cof_stream_create(w, 2, &stream));
    for (int i = 0; i < CALLS; i++) {
        test_arn_make(&t[i], &p, 23, rank, n_ranks, i);
        t[i].args.residual_out = i & 1 ? &t[i].residual : &t[i].residual_out;
        t[i].args.norm_out = i & 2 ? &t[i].x : &t[i].norm_out;
        CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t[i].args, stream));
    }
    CHECK_OK(cof_stream_sync(stream));
    for (int i = 0; i < CALLS; i++) {
        CHECK(test_arn_wrong(&t[i]) == 0, "call %d: %lld", i, (long long)test_arn_wrong(&t[i]));
        test_arn_free(&t[i]);
    }
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_stream_destroy(stream);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

/* Rows in three dims, residual_out not wanted, rows of more than one part. */
static void test_shapes(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_allreduce_rmsnorm_params p = test_arn_params(512, 4096);
    struct test_arn t;
    cof_plan *plan;
    (void)arg;
    p.variant = COF_ALLREDUCE_NORM;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &p, NULL, &plan));
    test_arn_make(&t, &p, 1200, rank, n_ranks, 1); /* 2.4 MB a rank */
    cof_shape shape = {{6, 1, 200, 512}};
    int64_t strides[4] = {200 * t.pitch, 77, t.pitch, 1};
    t.x.ndim = 4;
    t.x.shape = shape.dim;
    t.x.strides = strides;
    t.args.residual_out = NULL;
    CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW));
    CHECK(test_arn_wrong(&t) == 0, "%lld elements", (long long)test_arn_wrong(&t));
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    test_arn_free(&t);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

/* The world is made by a thread that flushes subnormals. */
static void test_subnormals(int rank, int n_ranks, const char *job, void *arg)
{
    cof_allreduce_rmsnorm_params p = test_arn_params(64, 4);
    struct test_arn t;
    cof_plan *plan;
    (void)arg;
    p.variant = COF_ALLREDUCE_ONLY;
    p.eps = 0;
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
#endif
    cof_world *w = test_world(rank, n_ranks, job, 20);
#if defined(__SSE2__)
    _mm_setcsr(before);
#endif
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &p, NULL, &plan));
    test_arn_make(&t, &p, 2, rank, n_ranks, 1);
    for (int64_t i = 0; i < 2 * t.pitch; i++)
        ((float *)t.x.data)[i] = 1e-40f;
    CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, COF_STREAM_NOW));
    CHECK(((float *)t.residual_out.data)[5] == 1e-40f + 1e-40f, "subnormals were flushed");
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    test_arn_free(&t);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

static uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float wide_value(int who, int64_t h)
{
    return (float)((h * 7 + who * 3) % 15 - 7);
}

enum { WIDE = (3 << 20) + 5 };

static void check_wide(const struct test_arn *t, int n_ranks)
{
    float *z = malloc(WIDE * sizeof *z), total = 0;
    int64_t n_wrong = 0;
    for (int64_t i = 0; i < WIDE; i += TEST_ARN_SEGMENT) {
        float squares[TEST_ARN_SEGMENT] = {0};
        for (int64_t h = i; h < WIDE && h < i + TEST_ARN_SEGMENT; h++) {
            z[h] = wide_value(n_ranks, h);
            for (int r = 0; r < n_ranks; r++)
                z[h] += wide_value(r, h);
            squares[h - i] = z[h] * z[h];
        }
        total += test_arn_tree(squares, TEST_ARN_SEGMENT);
    }
    float mean = total / (float)WIDE, inv = 1.0f / sqrtf(mean + t->params.eps);
    for (int64_t i = 0; i < 3 * WIDE; i++) {
        n_wrong += ((uint16_t *)t->residual_out.data)[i] != bf16_of(z[i % WIDE]);
        n_wrong += ((uint16_t *)t->norm_out.data)[i] != bf16_of(z[i % WIDE] * inv);
    }
    CHECK(n_wrong == 0, "%lld elements", (long long)n_wrong);
    free(z);
}

/* Rows in fp32 that no worker's scratch holds, on a stream of several threads. */
static void test_wide(int rank, int n_ranks, const char *job, void *arg)
{
    cof_allreduce_rmsnorm_params p = test_arn_params(WIDE, 2);
    cof_world *w = test_world(rank, n_ranks, job, 20);
    struct test_arn t;
    cof_stream stream;
    cof_plan *plan;
    p.algorithm = *(cof_allreduce_algorithm *)arg;
    p.dtype = COF_BF16;
    p.rounding = COF_ALLREDUCE_EXACT;
    CHECK_OK(cof_allreduce_rmsnorm_plan_create(cof_world_team(w), &p, NULL, &plan));
    CHECK_OK(cof_stream_create(w, 3, &stream));
    test_arn_make(&t, &p, 3, rank, n_ranks, 1);
    cof_tensor *all[] = {&t.x, &t.residual, &t.residual_out, &t.norm_out, &t.weight};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        all[i]->dtype = COF_BF16;
        all[i]->strides = NULL;
    }
    for (int64_t i = 0; i < 3 * WIDE; i++) {
        ((uint16_t *)t.x.data)[i] = bf16_of(wide_value(rank, i % WIDE));
        ((uint16_t *)t.residual.data)[i] = bf16_of(wide_value(n_ranks, i % WIDE));
        ((uint16_t *)t.weight.data)[i % WIDE] = bf16_of(1);
    }
    CHECK_OK(cof_allreduce_rmsnorm_run(plan, &t.args, stream));
    CHECK_OK(cof_stream_sync(stream));
    check_wide(&t, n_ranks);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    test_arn_free(&t);
    cof_stream_destroy(stream);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

int main(void)
{
    cof_allreduce_algorithm ways[] = {COF_ALLREDUCE_ONE_SHOT, COF_ALLREDUCE_TWO_SHOT};
    for (int staged = 0; staged < 2; staged++) {
        setenv("COFUSE_FORCE_STAGED", staged ? "1" : "0", 1);
        for (int n = 1; n <= (TEST_FEWER ? 3 : 5); n++)
            test_ranks(n, test_calls, NULL);
        for (int i = 0; i < 2; i++) {
            if (TEST_FEWER && i != staged)
                continue;
            test_ranks(1, test_arena, &ways[i]);
            test_ranks(3, test_arena, &ways[i]);
            test_ranks(3, test_aliases, &ways[i]);
            if (!TEST_FEWER || staged)
                test_ranks(2, test_wide, &ways[i]);
        }
        test_ranks(3, test_shapes, NULL);
    }
    test_ranks(2, test_subnormals, NULL);
    return test_done();
}
