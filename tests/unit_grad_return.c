/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return in company: with other plans on one arena, several calls in flight, round the wrap of
 * the epoch, without rows, by one rank; its memory is what the workspace says, and goes back. Ranks
 * are threads. */
#include <dirent.h>
#include <malloc.h>

#include "ops/grad_return/grad_return.h"
#include "symm/arena.h"
#include "test_grad_return.h"

struct way {
    int transfer, by_section; /* transfer 2: the caller's memory */
    struct test_gr_memory *memory;
};

static cof_grad_return_params params_of(const struct way *way, int64_t n_rows)
{
    cof_grad_return_params p = way->transfer == 2 ? test_gr_peer_params(n_rows, way->memory)
                                                  : test_gr_params(n_rows);
    p.transfer = way->transfer == 1 ? COF_TRANSFER_PULL : COF_TRANSFER_PUSH;
    p.by_section = way->by_section;
    return p;
}

/* Runs fn in every way, on the caller's memory too when `peers`. */
static void each_way(int n_ranks, bool peers, test_rank_fn fn)
{
    for (int i = 0; i < (peers ? 6 : 4); i++) {
        struct test_gr_memory memory;
        struct way way = {i / 2, i % 2, &memory};
        test_gr_memory_make(&memory, n_ranks, 1 << 18);
        test_ranks(n_ranks, fn, &way);
        test_gr_memory_free(&memory, n_ranks);
    }
}

static void check_sums(const struct test_gr *t, const char *what, int idx)
{
    int64_t n = test_gr_wrong(t);
    CHECK(n == 0, "%s %d (%s): %lld elements are wrong", what, idx,
          t->params.by_section ? "by section" : "whole", (long long)n);
}

/* ---- sizes ---- */

/* What the plan has allocated is what the workspace says, but for the rounding of malloc. */
static void workspace(int rank, int n_ranks, const char *job, void *arg)
{
    const struct way *way = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_grad_return_params p = params_of(way, 200);
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_plan *plan;
    CHECK_OK(cof_grad_return_workspace(team, &p, &sizes));
    CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
    const struct cofi_grad_return_plan *own = (const struct cofi_grad_return_plan *)plan;
    size_t slab = own->binding.arena ? own->binding.arena->slab_bytes : 0;
    CHECK(sizes.symmetric == slab, "symmetric %zu, the arena has %zu", sizes.symmetric, slab);
    size_t local = sizes.local - sizeof *own, usable = malloc_usable_size(own->memory);
    CHECK(n_ranks == 1 ? local == 0 : local <= usable && usable < local + 4096,
          "local %zu beside the plan, allocated %zu", local, usable);
    CHECK(sizes.saved == 0, "%zu", sizes.saved);
    /* and an arena of that many bytes, beside the words, has room for it */
    cof_plan *second = NULL;
    cof_arena *arena = NULL;
    if (way->transfer != 2) {
        CHECK_OK(cof_arena_create(team, sizes.symmetric + sizes.words, 0, &arena));
        CHECK_OK(cof_grad_return_plan_create(team, &p, arena, &second));
        CHECK(strstr(cof_plan_describe(second), "arena=shared"), "%s", cof_plan_describe(second));
    } else {
        CHECK(sizes.symmetric == 0 && sizes.words == 0, "%zu %zu", sizes.symmetric, sizes.words);
    }
    CHECK_OK(cof_team_barrier(team));
    cof_plan_destroy(second);
    cof_arena_destroy(arena);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

/* Push holds two slots, whatever the number of ranks; pull holds all rows. */
static void growth(int rank, int n_ranks, const char *job, void *arg)
{
    size_t *bytes = arg; /* by transfer */
    cof_world *w = test_world(rank, n_ranks, job, 20);
    for (int i = 0; i < 2 && rank == 0; i++) {
        cof_grad_return_params p = test_gr_params(1000 * n_ranks);
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
        p.transfer = (cof_grad_return_transfer)i;
        CHECK_OK(cof_grad_return_workspace(cof_world_team(w), &p, &sizes));
        bytes[i] = sizes.symmetric - sizes.words;
    }
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}

static void test_growth(void)
{
    size_t three[2], six[2], row = 2 * 2 * (8 + 5) * sizeof(float), slack = 16384;
    test_ranks(3, growth, three);
    test_ranks(6, growth, six);
    CHECK(three[0] >= 2000 * row && six[0] < 2000 * row + slack, "push: %zu, %zu", three[0],
          six[0]);
    CHECK(six[1] >= 6000 * row && six[1] < 6000 * row + slack, "pull: %zu", six[1]);
}

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int n = 0;
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n;
}

struct census {
    int n_fds, n_threads;
};

/* Of the process, while all ranks stand still: counting takes a descriptor. */
static struct census take_census(cof_team *team, int rank)
{
    struct census c = {0, 0};
    CHECK_OK(cof_team_barrier(team));
    if (rank == 0)
        c = (struct census){count_entries("/proc/self/fd"), count_entries("/proc/self/task")};
    CHECK_OK(cof_team_barrier(team));
    return c;
}

/* 200 plans, each with a call; descriptors and threads are then as before. */
static void lifetime(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_grad_return_params p = params_of(arg, 48);
    struct test_gr t;
    struct census before = {0, 0};
    test_gr_make(&t, &p, rank, n_ranks, 1);
    for (int i = 0; i < 220; i++) {
        cof_plan *plan;
        if (i == 20)
            before = take_census(team, rank);
        CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
        t.args.epoch = p.peers ? (uint32_t)i + 1 : 0;
        CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
        cof_plan_destroy(plan);
    }
    check_sums(&t, "plan", 220);
    struct census after = take_census(team, rank);
    CHECK(after.n_fds == before.n_fds, "%d descriptors, before %d", after.n_fds, before.n_fds);
    CHECK(after.n_threads == before.n_threads, "%d threads, before %d", after.n_threads,
          before.n_threads);
    test_gr_free(&t);
    cof_world_destroy(w);
}

/* ---- calls ---- */

enum { N_CALLS = 6 };

/* Wholes with writers of their own, all enqueued before the first is waited for; by section, the
 * sections of several wholes are in flight. The caller's memory has one call at a time. */
static void in_flight(int rank, int n_ranks, const char *job, void *arg)
{
    const struct way *way = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_grad_return_params p = params_of(way, way->transfer == 2 ? 60 : 67);
    struct test_gr t[N_CALLS];
    uint64_t table[2 * TEST_GR_RANKS];
    cof_plan *plan;
    cof_stream stream;
    for (int i = 0; i < 2 * TEST_GR_RANKS; i++)
        table[i] = UINT64_C(0x9d) >> i % 5;
    CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
    CHECK_OK(cof_stream_create(w, 1, &stream));
    for (int i = 0; i < N_CALLS; i++) {
        test_gr_make(&t[i], &p, rank, n_ranks, i);
        t[i].args.writers = (cof_writers)(i % 3);
        t[i].args.writer_table = i % 3 == COF_WRITERS_TABLE ? table : NULL;
        t[i].args.epoch = p.peers ? (uint32_t)i + 1 : 0;
    }
    for (int round = 0; round < (p.peers ? 1 : 3); round++) {
        if (rank == round % n_ranks)
            usleep(2000);
        for (int i = 0; i < N_CALLS; i++) {
            test_gr_poison(&t[i]);
            CHECK_OK(test_gr_run(plan, &t[i], stream));
            if (p.peers) {
                CHECK_OK(cof_stream_sync(stream));
                CHECK_OK(cof_team_barrier(team));
            }
        }
        CHECK_OK(cof_stream_sync(stream));
        for (int i = 0; i < N_CALLS; i++)
            check_sums(&t[i], "call", i);
    }
    CHECK_OK(cof_team_barrier(team));
    cof_stream_destroy(stream);
    cof_plan_destroy(plan);
    for (int i = 0; i < N_CALLS; i++)
        test_gr_free(&t[i]);
    cof_world_destroy(w);
}

/* Plans with arenas of their own, on two streams that nothing orders. */
static void several_plans(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    struct test_gr t[3];
    cof_plan *plan[3];
    cof_stream stream[2];
    for (int i = 0; i < 2; i++)
        CHECK_OK(cof_stream_create(w, 1, &stream[i]));
    for (int i = 0; i < 3; i++) {
        cof_grad_return_params p = params_of(arg, 30 + 11 * i);
        test_gr_make(&t[i], &p, rank, n_ranks, i);
        CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan[i]));
    }
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 3; i++) {
            test_gr_poison(&t[i]);
            CHECK_OK(test_gr_run(plan[i], &t[i], stream[i % 2]));
        }
        for (int i = 0; i < 2; i++)
            CHECK_OK(cof_stream_sync(stream[i]));
        for (int i = 0; i < 3; i++)
            check_sums(&t[i], "plan", i);
    }
    CHECK_OK(cof_team_barrier(team));
    for (int i = 0; i < 2; i++)
        cof_stream_destroy(stream[i]);
    for (int i = 0; i < 3; i++) {
        cof_plan_destroy(plan[i]);
        test_gr_free(&t[i]);
    }
    cof_world_destroy(w);
}

/* Rows of nobody: nothing happens but that arguments are looked at, and the epoch of the caller's
 * memory counts on. */
static void no_rows(int rank, int n_ranks, const char *job, void *arg)
{
    const struct way *way = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_grad_return_params p = params_of(way, 0);
    struct test_gr t;
    cof_plan *plan;
    test_gr_make(&t, &p, rank, n_ranks, 1);
    CHECK(t.rows == 0, "%lld rows", (long long)t.rows);
    CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
    for (uint32_t i = 1; i <= 3; i++) {
        t.args.epoch = p.peers ? i : 0;
        CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
    }
    t.args.dk_out = NULL;
    t.args.epoch = p.peers ? 4 : 0;
    cof_status status = test_gr_run(plan, &t, COF_STREAM_NOW);
    CHECK(status == COF_ERR_INVALID, "%s", cof_status_name(status));
    CHECK_OK(cof_team_barrier(team));
    cof_plan_destroy(plan);
    test_gr_free(&t);
    cof_world_destroy(w);
}

/* Fewer rows than chunks: owners and writers of none. */
static void few_rows(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    for (int rows = 1; rows < 2 * n_ranks; rows++) {
        cof_grad_return_params p = params_of(arg, rows);
        struct test_gr t;
        cof_plan *plan;
        test_gr_make(&t, &p, rank, n_ranks, rows);
        CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
        for (int i = 0; i < 3; i++) {
            t.args.writers = i == 1 ? COF_WRITERS_CAUSAL : COF_WRITERS_ALL;
            CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
            check_sums(&t, "rows", rows);
        }
        CHECK_OK(cof_team_barrier(team));
        cof_plan_destroy(plan);
        test_gr_free(&t);
    }
    cof_world_destroy(w);
}

/* One rank: fp32 partials are rounded once; its bit may be missing from a table. */
static void one_rank(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_grad_return_params p = params_of(arg, 9);
    struct test_gr t;
    cof_plan *plan;
    uint64_t table[2] = {0, 1};
    test_gr_make(&t, &p, rank, n_ranks, 1);
    CHECK_OK(cof_grad_return_plan_create(cof_world_team(w), &p, NULL, &plan));
    t.args.writers = COF_WRITERS_TABLE;
    t.args.writer_table = table;
    t.args.epoch = p.peers ? 1 : 0;
    CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
    check_sums(&t, "one rank", 0);
    cof_plan_destroy(plan);

    p.dtype = COF_BF16;
    p.partial_f32 = 1;
    CHECK_OK(cof_grad_return_plan_create(cof_world_team(w), &p, NULL, &plan));
    ((float *)t.in[0][0].data)[3] = 1 + 0x3p-9f; /* between two bf16, nearer to the upper */
    ((float *)t.in[0][0].data)[4] = 1 + 0x1p-8f; /* in the middle: to even */
    t.out[0].dtype = t.out[1].dtype = COF_BF16;
    t.args.writers = COF_WRITERS_ALL;
    t.args.writer_table = NULL;
    CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
    const uint16_t *out = t.out[0].data;
    CHECK(out[3] == 0x3f81 && out[4] == 0x3f80, "%04x %04x", out[3], out[4]);
    cof_plan_destroy(plan);
    test_gr_free(&t);
    cof_world_destroy(w);
}

/* ---- one arena ---- */

enum { N_SHARED = 3, ATTACHED = 1 << 18 };

struct setting {
    struct way way;
    uint32_t first_epoch;
    bool attach;
    void *block[N_SHARED]; /* of the caller's memory, to attach */
};

static cof_arena *make_arena(cof_team *team, const cof_grad_return_params *p,
                             const cof_attention_params *q, const struct setting *s)
{
    cof_workspace_sizes a = COF_WORKSPACE_SIZES_INIT, b = a;
    cof_arena *arena = NULL;
    CHECK_OK(cof_grad_return_workspace(team, p, &a));
    CHECK_OK(cof_attention_workspace(team, q, &b));
    size_t largest = a.symmetric > b.symmetric ? a.symmetric : b.symmetric;
    struct cofi_arena_spec spec = {.bytes = largest + a.words + b.words,
                                   .first_epoch = s->first_epoch};
    if (s->attach) {
        spec.bytes = cof_arena_attach_bytes(team, spec.bytes, 0);
        spec.peers = s->block;
        CHECK(spec.bytes <= ATTACHED, "%zu bytes", spec.bytes);
    }
    CHECK_OK(cofi_arena_open(team, &spec, COF_OK, &arena));
    return arena;
}

/* Returns of gradients between forward and backward of another plan, round the wrap: sums are
 * right, and attention has the bits that it has by itself. */
static void shared(int rank, int n_ranks, const char *job, void *arg)
{
    const struct setting *s = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_grad_return_params p = params_of(&s->way, 67);
    cof_attention_params q = test_attention_params(40);
    struct test_gr t;
    struct test_attention a;
    cof_plan *plan, *attention;
    cof_stream stream;
    CHECK_OK(cof_stream_create(w, 1, &stream));
    test_gr_make(&t, &p, rank, n_ranks, 1);
    test_attention_make(&a, &q, rank, n_ranks, (unsigned)rank);
    size_t bytes = (size_t)a.rows * 2 * 16 * sizeof(float);
    void *o = malloc(bytes + 1), *dk = malloc(bytes + 1);
    CHECK_OK(cof_attention_plan_create(team, &q, NULL, &attention));
    CHECK_OK(cof_attention_forward(attention, &a.args, COF_STREAM_NOW));
    CHECK_OK(cof_attention_backward(attention, &a.args, COF_STREAM_NOW));
    memcpy(o, a.o.data, bytes);
    memcpy(dk, a.dk.data, bytes);
    cof_plan_destroy(attention);

    cof_arena *arena = make_arena(team, &p, &q, s);
    CHECK_OK(cof_grad_return_plan_create(team, &p, arena, &plan));
    CHECK(!strstr(cof_plan_describe(plan), "engine=attach") == !s->attach, "%s",
          cof_plan_describe(plan));
    CHECK_OK(cof_attention_plan_create(team, &q, arena, &attention));
    for (int round = 0; round < 6; round++) {
        if (rank == round % n_ranks)
            usleep(2000);
        test_gr_poison(&t);
        memset(a.o.data, 0, bytes);
        memset(a.dk.data, 0, bytes);
        t.args.writers = round % 2 ? COF_WRITERS_CAUSAL : COF_WRITERS_ALL;
        CHECK_OK(cof_attention_forward(attention, &a.args, stream));
        CHECK_OK(test_gr_run(plan, &t, stream));
        CHECK_OK(cof_attention_backward(attention, &a.args, stream));
        for (int i = 0; i < round % 3; i++)
            CHECK_OK(test_gr_run(plan, &t, stream));
        CHECK_OK(cof_stream_sync(stream));
        check_sums(&t, "round", round);
        CHECK(!memcmp(o, a.o.data, bytes) && !memcmp(dk, a.dk.data, bytes),
              "attention differs in round %d", round);
    }
    CHECK_OK(cof_team_barrier(team));
    cof_plan_destroy(plan);
    cof_plan_destroy(attention);
    cof_stream_destroy(stream);
    cof_arena_destroy(arena);
    test_gr_free(&t);
    test_attention_free(&a);
    free(o);
    free(dk);
    cof_world_destroy(w);
}

/* On the caller's epochs there is no wrap, but the last one is far. */
static void last_epochs(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_grad_return_params p = test_gr_peer_params(60, arg);
    struct test_gr t;
    cof_plan *plan;
    CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
    for (int i = 3; i >= 0; i--) {
        test_gr_make(&t, &p, rank, n_ranks, i);
        t.args.epoch = (uint32_t)(INT32_MAX - i);
        CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
        check_sums(&t, "epochs before the last", i);
        CHECK_OK(cof_team_barrier(team));
        test_gr_free(&t);
    }
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

static void test_shared(void)
{
    static const uint32_t first[] = {1, 0x3ffffffa, 0x7ffffff5, 0xfffffff5};
    void *block[N_SHARED];
    for (int r = 0; r < N_SHARED; r++)
        block[r] = memset(aligned_alloc(128, ATTACHED), 0x5a, ATTACHED);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 5; k++) {
            struct setting s = {.way = {i / 2, i % 2, NULL}, .first_epoch = first[k % 4],
                                .attach = k == 4};
            memcpy(s.block, block, sizeof block);
            test_ranks(N_SHARED, shared, &s);
        }
    for (int r = 0; r < N_SHARED; r++)
        free(block[r]);
    struct test_gr_memory memory;
    test_gr_memory_make(&memory, 3, 1 << 16);
    test_ranks(3, last_epochs, &memory);
    test_gr_memory_free(&memory, 3);
}

int main(void)
{
    for (int n = 1; n <= 3; n++)
        each_way(n, true, workspace);
    test_growth();
    each_way(3, true, lifetime);
    for (int n = 1; n <= 5; n += 2)
        each_way(n, true, in_flight);
    each_way(2, true, in_flight);
    each_way(3, false, several_plans);
    each_way(1, true, no_rows);
    each_way(3, true, no_rows);
    each_way(4, false, few_rows);
    each_way(1, true, one_rank);
    test_shared();
    return test_done();
}
