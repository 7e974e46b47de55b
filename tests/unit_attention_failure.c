/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks that disagree or fall away around an attention plan: an error on every rank, naming the
 * rank, the step and the values; outputs NaN; nothing hangs. Ranks are threads. */
#include <math.h>
#include <stdbool.h>

#include "test.h"

static bool all_nan(const cof_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    for (int64_t i = 0; i < n; i++)
        if (!isnan(((float *)t->data)[i]))
            return false;
    return true;
}

static void params_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 10);
    cof_plan *plan;
    cof_attention_params p = test_attention_params(50);
    p.mask = rank == 2 ? COF_MASK_NONE : COF_MASK_CAUSAL;
    CHECK_FAILS(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan), COF_ERR_MISMATCH,
                "ranks 0 and 2 differ: mask=causal | mask=none");
    p = test_attention_params(50 + (rank == 1));
    CHECK_FAILS(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan), COF_ERR_MISMATCH,
                "ranks 0 and 1 differ: S=50 | S=51");
    p = test_attention_params(50);
    p.n_kv_heads = rank == 1 ? 7 : 1;
    CHECK_FAILS(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan),
                rank == 1 ? COF_ERR_INVALID : COF_ERR_MISMATCH, "params.n_kv_heads = 7");
    CHECK(!plan, "a plan came out");
    p = test_attention_params(50); /* and the team still works */
    CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
    cof_plan_destroy(plan);
    cof_team_barrier(cof_world_team(w));
    cof_world_destroy(w);
}

struct fixture {
    cof_world *world;
    cof_plan *plan;
    struct test_attention t;
};

static void set_up(struct fixture *f, int rank, int n_ranks, const char *job, double run_timeout)
{
    f->world = test_world(rank, n_ranks, job, run_timeout);
    cof_attention_params p = test_attention_params(50);
    test_attention_make(&f->t, &p, rank, n_ranks, (unsigned)rank);
    CHECK_OK(cof_attention_plan_create(cof_world_team(f->world), &p, NULL, &f->plan));
    CHECK_OK(cof_attention_forward(f->plan, &f->t.args, COF_STREAM_NOW));
    CHECK_OK(cof_attention_backward(f->plan, &f->t.args, COF_STREAM_NOW));
    /* What a rank does next must not meet a slower one in these calls. */
    CHECK_OK(cof_team_barrier(cof_world_team(f->world)));
}

/* After a failure: the plan is refused, the team tells, a new plan on the same team works. */
static void look_after(struct fixture *f)
{
    cof_status status = cof_attention_forward(f->plan, &f->t.args, COF_STREAM_NOW);
    CHECK(status != COF_OK, "a call on a failed plan passed"); /* a late rank learns of it here */
    size_t bytes = (size_t)(f->t.rows * f->t.params.n_heads * f->t.params.head_dim_qk) *
                   sizeof(float);
    memset(f->t.o.data, 0x5a, bytes);
    status = cof_attention_forward(f->plan, &f->t.args, COF_STREAM_NOW);
    CHECK(status == COF_ERR_POISONED, "%s: %s", cof_status_name(status), cof_last_error());
    for (size_t i = 0; i < bytes; i++)
        CHECK(((unsigned char *)f->t.o.data)[i] == 0x5a, "a refused call touched o at %zu", i);
    CHECK(cof_team_query(cof_world_team(f->world)) != COF_OK, "the team knows of nothing");
    cof_plan_destroy(f->plan);
    CHECK_OK(cof_team_query(cof_world_team(f->world)));
    CHECK_OK(cof_team_barrier(cof_world_team(f->world)));
    CHECK_OK(cof_attention_plan_create(cof_world_team(f->world), &f->t.params, NULL, &f->plan));
    CHECK_OK(cof_attention_forward(f->plan, &f->t.args, COF_STREAM_NOW));
}

static void tear_down(struct fixture *f)
{
    cof_plan_destroy(f->plan);
    cof_team_barrier(cof_world_team(f->world));
    cof_world_destroy(f->world);
    test_attention_free(&f->t);
}

/* Rank 1 does not call: the others' deadline passes, and names it. */
static void one_absent(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    struct fixture f;
    set_up(&f, rank, n_ranks, job, 2);
    if (rank != 1) {
        cof_status status = cof_attention_forward(f.plan, &f.t.args, COF_STREAM_NOW);
        CHECK_FAILS(status, COF_ERR_TIMEOUT, "waited for rank 1 at");
        CHECK(strstr(cof_last_error(), "wanted epoch 3") &&
                  strstr(cof_last_error(), "in its call 2"),
              "%s", cof_last_error());
        CHECK(all_nan(&f.t.o) && all_nan(&f.t.lse), "outputs are not NaN");
        test_meet(n_ranks);
    } else {
        test_meet(n_ranks);
        CHECK_FAILS(cof_attention_forward(f.plan, &f.t.args, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                    "told by rank");
    }
    look_after(&f);
    tear_down(&f);
}

/* Rank 0 runs backward while the others run forward. */
static void directions_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    struct fixture f;
    set_up(&f, rank, n_ranks, job, 20);
    cof_status status = rank == 0 ? cof_attention_backward(f.plan, &f.t.args, COF_STREAM_NOW)
                                  : cof_attention_forward(f.plan, &f.t.args, COF_STREAM_NOW);
    CHECK_FAILS(status, COF_ERR_MISMATCH, "ranks disagree about this call");
    CHECK(rank == 0 ? all_nan(&f.t.dq) && all_nan(&f.t.dk) && all_nan(&f.t.dv) : all_nan(&f.t.o),
          "outputs are not NaN");
    look_after(&f);
    tear_down(&f);
}

/* Rank 1 leaves the world in order, without its part of the call. */
static void one_leaves(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    struct fixture f;
    set_up(&f, rank, n_ranks, job, 30);
    if (rank != 1) {
        cof_status status = cof_attention_forward(f.plan, &f.t.args, COF_STREAM_NOW);
        CHECK_FAILS(status, COF_ERR_PEER_DEAD, "rank 1");
        CHECK(all_nan(&f.t.o), "outputs are not NaN");
        test_meet(n_ranks - 1);
    }
    cof_plan_destroy(f.plan);
    cof_world_destroy(f.world);
    test_attention_free(&f.t);
}

/* An error of one plan on a caller's stream does not leave another plan's peers waiting. */
static void sticky_stream(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    struct fixture f;
    set_up(&f, rank, n_ranks, job, 2);
    cof_stream stream;
    CHECK_OK(cof_stream_create(f.world, 1, &stream));
    if (rank == 0) {
        CHECK_OK(cof_attention_forward(f.plan, &f.t.args, stream));
        CHECK_FAILS(cof_stream_sync(stream), COF_ERR_TIMEOUT, "waited for rank 1");
        CHECK_FAILS(cof_stream_sync(stream), COF_ERR_TIMEOUT, "waited for rank 1");
        CHECK(all_nan(&f.t.o), "outputs are not NaN");
    }
    test_meet(n_ranks);
    cof_stream_destroy(stream);
    look_after(&f);
    tear_down(&f);
}

#ifdef COFI_FAULTS
/* Rank 1 is refused its memory: all ranks get COF_ERR_NOMEM, none keeps anything, the team lives.
 */
static void memory_refused(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = *(cof_engine *)arg;
    o.n_threads = 1;
    cof_world *w;
    cof_plan *plan;
    cof_attention_params p = test_attention_params(50);
    CHECK_OK(cof_world_create(&o, &w));
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    setenv("COFUSE_FAULT", "ARENA_NOMEM:1", 1);
    CHECK_FAILS(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan), COF_ERR_NOMEM,
                rank == 1 ? "refused by a fault hook" : "on rank 1: arena: refused");
    CHECK(!plan, "a plan came out");
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    setenv("COFUSE_FAULT", "", 1);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
    cof_plan_destroy(plan);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}
#endif

int main(void)
{
#ifdef COFI_FAULTS
    if (getenv("COFUSE_FAULT")) { /* tests/negative_poison.sh */
        test_ranks(2, one_absent, NULL);
        return test_done();
    }
    cof_engine engines[] = {COF_ENGINE_THREAD, COF_ENGINE_SHM};
    for (int i = 0; i < 2; i++)
        test_ranks(3, memory_refused, &engines[i]);
    return test_done();
#endif
    test_ranks(3, params_differ, NULL);
    test_ranks(2, one_absent, NULL);
    test_ranks(3, one_absent, NULL);
    test_ranks(2, directions_differ, NULL);
    test_ranks(3, directions_differ, NULL);
    test_ranks(3, one_leaves, NULL);
    test_ranks(2, sticky_stream, NULL);
    return test_done();
}
