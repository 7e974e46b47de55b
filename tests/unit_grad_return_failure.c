/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks that disagree or fall away around a grad_return plan: an error on every rank that names the
 * rank, the step and the values; outputs NaN; nothing hangs. Ranks are threads. */
#include <time.h>

#include "test_grad_return.h"

static const struct difference {
    const char *text;
    size_t offset; /* of an int or enum in the params, 1 on the rank that differs */
} differences[] = {
    {"partial=f32 | partial=bf16", offsetof(cof_grad_return_params, partial_f32)},
    {"wire=f32 | wire=bf16", offsetof(cof_grad_return_params, wire_f32)},
    {"layout=contiguous | layout=zigzag", offsetof(cof_grad_return_params, layout)},
    {"chunking=padded | chunking=balanced", offsetof(cof_grad_return_params, chunking)},
    {"transfer=pull | transfer=push", offsetof(cof_grad_return_params, transfer)},
    {"by=section | by=whole", offsetof(cof_grad_return_params, by_section)},
};

static void params_differ(int rank, int n_ranks, const char *job, void *arg)
{
    struct test_gr_memory *m = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_plan *plan;
    cof_grad_return_params p = test_gr_params(50);
    p.dtype = COF_BF16;
    for (size_t i = 0; i < sizeof differences / sizeof differences[0]; i++) {
        cof_grad_return_params q = p;
        int one = 1;
        if (rank == 0)
            memcpy((char *)&q + differences[i].offset, &one, sizeof one);
        CHECK_FAILS(cof_grad_return_plan_create(team, &q, NULL, &plan), COF_ERR_MISMATCH,
                    differences[i].text);
        CHECK(!plan, "a plan came out");
    }
    p.n_rows = 50 + (rank == 2);
    CHECK_FAILS(cof_grad_return_plan_create(team, &p, NULL, &plan), COF_ERR_MISMATCH,
                "ranks 0 and 2 differ: S=50 | S=51");
    p.n_rows = 50;
    p.n_heads = rank == 1 ? 0 : 2;
    CHECK_FAILS(cof_grad_return_plan_create(team, &p, NULL, &plan),
                rank == 1 ? COF_ERR_INVALID : COF_ERR_MISMATCH, "params.n_heads = 0");
    p = rank == 1 ? test_gr_peer_params(48, m) : test_gr_params(48);
    p.chunking = COF_CHUNKING_PADDED;
    CHECK_FAILS(cof_grad_return_plan_create(team, &p, NULL, &plan), COF_ERR_MISMATCH,
                "ranks 0 and 1 differ: transfer=push | transfer=caller");
    p = test_gr_params(50); /* and the team still works */
    CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
    cof_plan_destroy(plan);
    CHECK_OK(cof_team_barrier(team));
    cof_world_destroy(w);
}

struct fixture {
    cof_world *world;
    cof_team *team;
    cof_plan *plan;
    cof_stream stream;
    struct test_gr t;
};

/* With a call behind it that passes. */
static void set_up(struct fixture *f, const cof_grad_return_params *p, int rank, int n_ranks,
                   const char *job, double run_timeout)
{
    f->world = test_world(rank, n_ranks, job, run_timeout);
    f->team = cof_world_team(f->world);
    test_gr_make(&f->t, p, rank, n_ranks, 1);
    CHECK_OK(cof_grad_return_plan_create(f->team, p, NULL, &f->plan));
    CHECK_OK(cof_stream_create(f->world, 1, &f->stream));
    f->t.args.epoch = p->peers ? 1 : 0;
    CHECK_OK(test_gr_run(f->plan, &f->t, f->stream));
    CHECK_OK(cof_stream_sync(f->stream));
    CHECK(test_gr_wrong(&f->t) == 0, "%lld elements", (long long)test_gr_wrong(&f->t));
    CHECK_OK(cof_team_barrier(f->team));
    test_gr_poison(&f->t);
    f->t.args.epoch += p->peers ? 1 : 0;
}

static void tear_down(struct fixture *f)
{
    CHECK_OK(cof_team_barrier(f->team));
    cof_stream_destroy(f->stream);
    cof_plan_destroy(f->plan);
    cof_world_destroy(f->world);
    test_gr_free(&f->t);
}

/* A new plan on the same team works. */
static void begin_again(struct fixture *f)
{
    cof_stream_destroy(f->stream);
    cof_plan_destroy(f->plan);
    CHECK_OK(cof_team_query(f->team));
    CHECK_OK(cof_team_barrier(f->team));
    CHECK_OK(cof_grad_return_plan_create(f->team, &f->t.params, NULL, &f->plan));
    CHECK_OK(cof_stream_create(f->world, 1, &f->stream));
    f->t.args.writers = COF_WRITERS_ALL;
    CHECK_OK(test_gr_run(f->plan, &f->t, f->stream));
    CHECK_OK(cof_stream_sync(f->stream));
    CHECK(test_gr_wrong(&f->t) == 0, "%lld elements", (long long)test_gr_wrong(&f->t));
}

/* After a failure: the plan is refused, the team tells, and goes on. */
static void look_after(struct fixture *f)
{
    cof_status status = cof_grad_return_run(f->plan, &f->t.args, COF_STREAM_NOW);
    CHECK(status != COF_OK, "a call on a failed plan passed");
    test_gr_poison(&f->t);
    status = cof_grad_return_run(f->plan, &f->t.args, COF_STREAM_NOW);
    CHECK(status == COF_ERR_POISONED, "%s: %s", cof_status_name(status), cof_last_error());
    CHECK(test_gr_untouched(&f->t), "a refused call touched the outputs");
    CHECK(cof_team_query(f->team) != COF_OK, "the team knows of nothing");
    begin_again(f);
}

static void disagree(struct fixture *f)
{
    bool refused;
    CHECK_FAILS_OR_REFUSED(refused, test_gr_run(f->plan, &f->t, f->stream),
                           cof_stream_sync(f->stream), COF_ERR_MISMATCH,
                           "ranks disagree about this call");
    CHECK(refused ? test_gr_untouched(&f->t) : test_gr_all_nan(&f->t), "outputs");
}

/* Rank 0 has other writers than the rest. */
static void writers_differ(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_grad_return_params p = test_gr_params(50);
    p.transfer = *(cof_grad_return_transfer *)arg;
    set_up(&f, &p, rank, n_ranks, job, 20);
    f.t.args.writers = rank == 0 ? COF_WRITERS_CAUSAL : COF_WRITERS_ALL;
    disagree(&f);
    look_after(&f);
    tear_down(&f);
}

/* Rank 1 waits for no rows by its own writers: the others' announcements tell it all the same. */
static void quiet_rank_differs(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_grad_return_params p = test_gr_params(50);
    p.layout = COF_LAYOUT_CONTIGUOUS;
    p.transfer = *(cof_grad_return_transfer *)arg;
    set_up(&f, &p, rank, n_ranks, job, 20);
    f.t.args.writers = rank == 1 ? COF_WRITERS_CAUSAL : COF_WRITERS_ALL;
    disagree(&f);
    look_after(&f);
    tear_down(&f);
}

/* Tables that differ in one bit. */
static void tables_differ(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_grad_return_params p = test_gr_params(50);
    uint64_t table[2 * TEST_GR_RANKS];
    p.transfer = *(cof_grad_return_transfer *)arg;
    set_up(&f, &p, rank, n_ranks, job, 20);
    memset(table, 0xff, sizeof table);
    table[2] = rank == 1 ? ~UINT64_C(1) : ~UINT64_C(0);
    f.t.args.writers = COF_WRITERS_TABLE;
    f.t.args.writer_table = table;
    disagree(&f);
    f.t.args.writer_table = NULL;
    f.t.args.writers = COF_WRITERS_ALL;
    look_after(&f);
    tear_down(&f);
}

/* By section the failure may come before the call that has the outputs: then that call is refused,
 * or it leaves NaN. */
static void sections_differ(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_grad_return_params p = test_gr_params(50);
    p.transfer = *(cof_grad_return_transfer *)arg;
    p.by_section = 1;
    set_up(&f, &p, rank, n_ranks, job, 20);
    f.t.args.writers = rank == 0 ? COF_WRITERS_CAUSAL : COF_WRITERS_ALL;
    cof_status status = test_gr_run(f.plan, &f.t, f.stream);
    bool refused = status != COF_OK;
    status = cof_stream_sync(f.stream);
    CHECK(refused || status == COF_ERR_MISMATCH, "%s", cof_status_name(status));
    CHECK(refused ? test_gr_untouched(&f.t) : test_gr_all_nan(&f.t), "outputs");
    cof_stream_destroy(f.stream);
    f.stream = (cof_stream){0};
    tear_down(&f);
}

/* Rank 1 does not call: the others' deadline passes, and names it. */
static void one_absent(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_grad_return_params p = test_gr_params(50);
    p.transfer = *(cof_grad_return_transfer *)arg;
    set_up(&f, &p, rank, n_ranks, job, 2);
    if (rank != 1) {
        CHECK_OK(test_gr_run(f.plan, &f.t, f.stream));
        CHECK_FAILS(cof_stream_sync(f.stream), COF_ERR_TIMEOUT, "rank 1 at");
        CHECK(strstr(cof_last_error(), "wanted epoch 2"), "%s", cof_last_error());
        CHECK(test_gr_all_nan(&f.t), "outputs are not NaN");
        test_meet(n_ranks);
    } else {
        test_meet(n_ranks);
        CHECK_FAILS(cof_grad_return_run(f.plan, &f.t.args, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                    "told by rank");
        CHECK(test_gr_all_nan(&f.t), "outputs are not NaN");
    }
    look_after(&f);
    tear_down(&f);
}

/* In the caller's memory a failure stays with its rank: the ranks that wait have their deadline,
 * and one that comes late finds what they sent. */
static void one_absent_from_peers(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_grad_return_params p = test_gr_peer_params(48, arg);
    set_up(&f, &p, rank, n_ranks, job, 2);
    if (rank != 1) {
        char text[64];
        snprintf(text, sizeof text, "rank %d waited for rank 1 at \"gradient returned\"", rank);
        CHECK_OK(test_gr_run(f.plan, &f.t, f.stream));
        CHECK_FAILS(cof_stream_sync(f.stream), COF_ERR_TIMEOUT, text);
        CHECK(strstr(cof_last_error(), "wanted epoch 2, saw 1"), "%s", cof_last_error());
        CHECK(test_gr_all_nan(&f.t), "outputs are not NaN");
        test_meet(n_ranks);
        CHECK_OK(cof_team_barrier(f.team)); /* rank 1 reads what was sent until then */
        f.t.args.epoch++;
        test_gr_poison(&f.t);
        cof_status status = cof_grad_return_run(f.plan, &f.t.args, COF_STREAM_NOW);
        CHECK(status == COF_ERR_TIMEOUT || status == COF_ERR_POISONED, "%s: a failed plan went on",
              cof_status_name(status));
        CHECK(test_gr_all_nan(&f.t), "outputs are not NaN");
    } else {
        test_meet(n_ranks);
        CHECK_OK(test_gr_run(f.plan, &f.t, COF_STREAM_NOW));
        CHECK(test_gr_wrong(&f.t) == 0, "%lld elements", (long long)test_gr_wrong(&f.t));
        CHECK_OK(cof_team_barrier(f.team));
    }
    CHECK_OK(cof_team_query(f.team));
    tear_down(&f);
}

/* Rank 1 leaves the world in order, without its part of the call. */
static void one_leaves(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_grad_return_params p = test_gr_params(48);
    if (arg)
        p = test_gr_peer_params(48, arg);
    set_up(&f, &p, rank, n_ranks, job, 30);
    if (rank != 1) {
        bool refused;
        CHECK_FAILS_OR_REFUSED(refused, test_gr_run(f.plan, &f.t, f.stream),
                               cof_stream_sync(f.stream), COF_ERR_PEER_DEAD, "rank 1");
        CHECK(refused ? test_gr_untouched(&f.t) : test_gr_all_nan(&f.t), "outputs");
        test_meet(n_ranks - 1);
    }
    cof_stream_destroy(f.stream);
    cof_plan_destroy(f.plan);
    cof_world_destroy(f.world);
    test_gr_free(&f.t);
}

/* The first section alone, as its stream is through: the plan's own one waits for other ranks. */
static void run_first(struct fixture *f)
{
    cof_grad_return_args first = f->t.args;
    first.dk = &f->t.in[0][0];
    first.dv = &f->t.in[0][1];
    first.dk_out = first.dv_out = NULL;
    CHECK_OK(cof_grad_return_run(f->plan, &first, f->stream));
    CHECK_OK(cof_stream_sync(f->stream));
}

static void destroy_at_once(struct fixture *f)
{
    struct timespec begin, end;
    char text[512];
    snprintf(text, sizeof text, "%s", cof_last_error());
    clock_gettime(CLOCK_MONOTONIC, &begin);
    cof_plan_destroy(f->plan);
    clock_gettime(CLOCK_MONOTONIC, &end);
    f->plan = NULL;
    CHECK(end.tv_sec - begin.tv_sec < 20, "it took %lld s", (long long)(end.tv_sec - begin.tv_sec));
    CHECK(!strcmp(text, cof_last_error()), "\"%s\" became \"%s\"", text, cof_last_error());
}

struct way {
    cof_grad_return_transfer transfer;
    struct test_gr_memory *memory; /* NULL: none of the caller's */
};

/* Rank 0 gives a whole by section up after its first call, which no other rank has made: it waits
 * for nobody, and tells who comes late. In the caller's memory nobody is told. */
static void one_gives_up(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    const struct way *way = arg;
    cof_grad_return_params p = way->memory ? test_gr_peer_params(48, way->memory)
                                           : test_gr_params(50);
    bool refused;
    p.transfer = way->transfer;
    p.by_section = 1;
    set_up(&f, &p, rank, n_ranks, job, 60);
    if (rank == 0) {
        run_first(&f);
        destroy_at_once(&f);
    }
    test_meet(n_ranks);
    if (rank != 0 && !way->memory) {
        CHECK_FAILS_OR_REFUSED(refused, test_gr_run(f.plan, &f.t, f.stream),
                               cof_stream_sync(f.stream), COF_ERR_POISONED, "told by rank 0");
        CHECK(strstr(cof_last_error(), "plan destroyed after 1 of "), "%s", cof_last_error());
        CHECK(refused ? test_gr_untouched(&f.t) : test_gr_all_nan(&f.t), "outputs");
    }
    if (!way->memory)
        begin_again(&f);
    tear_down(&f);
}

static void with_memory(int n_ranks, test_rank_fn fn)
{
    struct test_gr_memory m;
    test_gr_memory_make(&m, n_ranks, 1 << 16);
    test_ranks(n_ranks, fn, &m);
    test_gr_memory_free(&m, n_ranks);
}

static void give_up(int n_ranks)
{
    struct test_gr_memory m;
    struct way ways[] = {{COF_TRANSFER_PUSH, NULL}, {COF_TRANSFER_PULL, NULL},
                         {COF_TRANSFER_PUSH, &m}};
    test_gr_memory_make(&m, n_ranks, 1 << 16);
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++)
        test_ranks(n_ranks, one_gives_up, &ways[i]);
    test_gr_memory_free(&m, n_ranks);
}

int main(void)
{
    cof_grad_return_transfer ways[] = {COF_TRANSFER_PUSH, COF_TRANSFER_PULL};
    with_memory(3, params_differ);
    for (int i = 0; i < 2; i++) {
        for (int n = 2; n <= 3; n++) {
            test_ranks(n, writers_differ, &ways[i]);
            test_ranks(n, sections_differ, &ways[i]);
            test_ranks(n, one_absent, &ways[i]);
        }
        test_ranks(2, quiet_rank_differs, &ways[i]);
        test_ranks(3, tables_differ, &ways[i]);
    }
    for (int n = 2; n <= 3; n++)
        give_up(n);
    with_memory(2, one_absent_from_peers);
    with_memory(3, one_absent_from_peers);
    test_ranks(3, one_leaves, NULL);
    with_memory(3, one_leaves);
    return test_done();
}
