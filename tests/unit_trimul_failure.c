/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Ranks that disagree or fall away around a trimul plan: an error on every rank that names the
 * rank, the step and the values; outputs NaN; nothing hangs. Ranks are threads, but for the one
 * that is killed. */
#include <signal.h>
#include <sys/wait.h>

#include "test_trimul.h"

static struct test_tri_problem problem_of(int n_ranks)
{
    struct test_tri_problem p = {.params = COF_TRIMUL_PARAMS_INIT, .n = 9, .n_batch = 2,
                                 .n_ranks = n_ranks, .with_biases = true, .with_grads = true,
                                 .seed = 5};
    p.params.dtype = COF_F32;
    p.params.n_rows = 9;
    p.params.n_batch = 2;
    p.params.dim = 8;
    p.params.hidden = 24;
    p.params.reduce_param_grads = 1;
    return p;
}

static void params_differ(int rank, int n_ranks, const char *job, void *arg)
{
    static const int64_t offsets[2][3] = {{0, 4, 9}, {0, 5, 9}}, cols[] = {0, 9};
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_plan *plan;
    (void)arg;
#define DIFFERS(change, part)                                                                      \
    do {                                                                                           \
        cof_trimul_params p = problem_of(n_ranks).params;                                          \
        if (rank == 1) {                                                                           \
            change;                                                                                \
        }                                                                                          \
        CHECK_FAILS(cof_trimul_plan_create(team, &p, NULL, &plan), COF_ERR_MISMATCH, part);        \
        CHECK(!plan, "a plan came out");                                                           \
    } while (0)
    DIFFERS(p.dtype = COF_BF16, "dtype=f32 | dtype=bf16");
    DIFFERS(p.n_rows = 10, "N=9 | N=10");
    DIFFERS(p.hidden = 16, "H=24 | H=16");
    DIFFERS(p.direction = COF_TRIMUL_INCOMING, "direction=outgoing | direction=incoming");
    DIFFERS(p.grid_rows = 1, "grid=2x1 | grid=1x2");
    DIFFERS(p.shard = COF_TRIMUL_CHUNK, "shard=balanced | shard=chunk");
    DIFFERS(p.eps_out = 2e-5, "eps_out=1e-05 | eps_out=2e-05");
    DIFFERS(p.save = COF_TRIMUL_SAVE_AB, "save=none | save=ab");
    DIFFERS(p.reduce_param_grads = 0, "reduce=1 | reduce=0");
    cof_trimul_params p = problem_of(n_ranks).params;
    p.shard = COF_TRIMUL_EXPLICIT;
    p.row_offsets = offsets[rank];
    p.col_offsets = cols;
    CHECK_FAILS(cof_trimul_plan_create(team, &p, NULL, &plan), COF_ERR_MISMATCH, "shard=explicit:");
    p = problem_of(n_ranks).params;
    p.dim = rank == 1 ? 0 : 8;
    CHECK_FAILS(cof_trimul_plan_create(team, &p, NULL, &plan),
                rank == 1 ? COF_ERR_INVALID : COF_ERR_MISMATCH, "params.dim = 0");
    p = problem_of(n_ranks).params; /* and the team still works */
    CHECK_OK(cof_trimul_plan_create(team, &p, NULL, &plan));
    cof_plan_destroy(plan);
    CHECK_OK(cof_team_barrier(team));
    cof_world_destroy(w);
}

/* ---- calls ---------------------------------------------------------------------------------- */

struct fixture {
    cof_world *world;
    cof_plan *plan;
    cof_stream stream;
    struct test_tri t;
    struct test_tri_part part;
};

static void set_up(struct fixture *f, int rank, int n_ranks, const char *job, double run_timeout)
{
    const struct test_tri_problem p = problem_of(n_ranks);
    f->world = test_world(rank, n_ranks, job, run_timeout);
    test_tri_make(&f->t, &p);
    CHECK_OK(cof_trimul_plan_create(cof_world_team(f->world), &p.params, NULL, &f->plan));
    CHECK_OK(cof_stream_create(f->world, 1, &f->stream));
    test_tri_part_make(&f->part, &f->t, rank, 0);
    CHECK_OK(cof_trimul_set_weights(f->plan, &f->part.weight_args, COF_TRIMUL_CHECK, f->stream));
    CHECK_OK(cof_trimul_forward(f->plan, &f->part.args, f->stream));
    CHECK_OK(cof_stream_sync(f->stream));
    CHECK_OK(cof_team_barrier(cof_world_team(f->world)));
}

static void tear_down(struct fixture *f)
{
    cof_stream_destroy(f->stream);
    cof_plan_destroy(f->plan);
    test_tri_part_free(&f->part);
    test_tri_free(&f->t);
    cof_world_destroy(f->world);
}

static bool is_nan(const cof_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    for (int64_t i = 0; i < n; i++)
        if (!isnan(((float *)t->data)[i]))
            return false;
    return true;
}

/* After a failure the plan is refused, and the team lives. */
static void look_after(struct fixture *f)
{
    CHECK_FAILS(cof_trimul_forward(f->plan, &f->part.args, COF_STREAM_NOW), COF_ERR_POISONED, "");
    CHECK_FAILS(cof_trimul_set_weights(f->plan, &f->part.weight_args, 0, COF_STREAM_NOW),
                COF_ERR_POISONED, "");
    CHECK(cof_team_query(cof_world_team(f->world)) != COF_OK, "the team knows of nothing");
    CHECK_OK(cof_team_barrier(cof_world_team(f->world)));
    tear_down(f);
}

/* The last rank has other weights: a value in the last place, a bias less. */
static void weights_differ(int rank, int n_ranks, const char *job, void *arg)
{
    for (int way = 0; way < 2; way++) {
        struct fixture f;
        char text[80];
        (void)arg;
        set_up(&f, rank, n_ranks, job, 20);
        if (rank == n_ranks - 1 && way == 0)
            ((float *)f.part.weights[10].data)[63] *= 1.0000002f;
        if (rank == n_ranks - 1 && way == 1)
            f.part.weight_args.p_out_b = NULL;
        snprintf(text, sizeof text, "trimul weights: those of rank %d (hash ", n_ranks - 1);
        bool refused;
        CHECK_FAILS_OR_REFUSED(
            refused,
            cof_trimul_set_weights(f.plan, &f.part.weight_args, COF_TRIMUL_CHECK, f.stream),
            cof_stream_sync(f.stream), COF_ERR_MISMATCH, text);
        look_after(&f);
    }
}

/* Ranks of other sizes store where each other's values are before they find out. It is dropped, but
 * ThreadSanitizer sees it. */
#if defined(__SANITIZE_THREAD__)
enum { FIRST_WAY = 2 };
#else
enum { FIRST_WAY = 0 };
#endif

/* The last rank has another N, another B, or wants other gradients summed. */
static void calls_differ(int rank, int n_ranks, const char *job, void *arg)
{
    for (int way = FIRST_WAY; way < 3; way++) {
        struct fixture f;
        (void)arg;
        set_up(&f, rank, n_ranks, job, 20);
        if (rank == n_ranks - 1 && way == 0) {
            struct test_tri_part part = f.part;
            f.t.p.n = 8;
            test_tri_part_free(&part);
            test_tri_part_make(&f.part, &f.t, rank, 0);
        }
        if (rank == n_ranks - 1 && way == 1)
            f.part.shape.dim[0] = 1;
        if (rank == n_ranks - 1 && way == 2)
            f.part.grad_args.g_in = NULL;
        bool refused;
        CHECK_FAILS_OR_REFUSED(refused,
                               way < 2 ? cof_trimul_forward(f.plan, &f.part.args, f.stream)
                                       : cof_trimul_backward(f.plan, &f.part.args, f.stream),
                               cof_stream_sync(f.stream), COF_ERR_MISMATCH,
                               "ranks disagree about this call");
        CHECK(refused || is_nan(way < 2 ? &f.part.out : &f.part.dx), "way %d: outputs", way);
        CHECK(refused || way < 2 || is_nan(&f.part.grads[2]), "gradients are not NaN");
        look_after(&f);
    }
}

/* A call without entries on one rank alone shows at the next call. */
static void empty_differs(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    (void)arg;
    set_up(&f, rank, n_ranks, job, 20);
    if (rank == 0) {
        f.part.shape.dim[0] = 0;
        CHECK_OK(cof_trimul_forward(f.plan, &f.part.args, f.stream));
        f.part.shape.dim[0] = 2;
    }
    bool refused;
    CHECK_FAILS_OR_REFUSED(refused, cof_trimul_forward(f.plan, &f.part.args, f.stream),
                           cof_stream_sync(f.stream), COF_ERR_MISMATCH,
                           "ranks disagree about this call");
    look_after(&f);
}

/* The last rank does not come. */
static void one_stays_away(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    (void)arg;
    set_up(&f, rank, n_ranks, job, 2);
    if (rank != n_ranks - 1) {
        CHECK_OK(cof_trimul_backward(f.plan, &f.part.args, f.stream));
        CHECK_FAILS(cof_stream_sync(f.stream), COF_ERR_TIMEOUT, "trimul backward: rank ");
        CHECK(is_nan(&f.part.dx) && is_nan(&f.part.grads[0]), "outputs are not NaN");
    }
    test_meet(n_ranks);
    if (rank == n_ranks - 1)
        CHECK_FAILS(cof_trimul_forward(f.plan, &f.part.args, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                    "told by rank ");
    look_after(&f);
}

/* ---- a rank that dies ----------------------------------------------------------------------- */

static cof_world *process_world(int rank, int n_ranks, const char *job)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_SHM;
    o.n_threads = 1;
    o.init_timeout = 20;
    o.run_timeout = 20;
    cof_world *world = NULL;
    CHECK_OK(cof_world_create(&o, &world));
    return world;
}

static int die_or_see(int rank, int n_ranks, const char *job)
{
    struct fixture f;
    const struct test_tri_problem p = problem_of(n_ranks);
    f.world = process_world(rank, n_ranks, job);
    if (!f.world)
        return 1;
    test_tri_make(&f.t, &p);
    CHECK_OK(cof_trimul_plan_create(cof_world_team(f.world), &p.params, NULL, &f.plan));
    test_tri_part_make(&f.part, &f.t, rank, 0);
    CHECK_OK(cof_trimul_set_weights(f.plan, &f.part.weight_args, 0, COF_STREAM_NOW));
    CHECK_OK(cof_trimul_forward(f.plan, &f.part.args, COF_STREAM_NOW));
    test_meet(n_ranks);
    if (rank == 1)
        raise(SIGKILL);
    CHECK_FAILS(cof_trimul_forward(f.plan, &f.part.args, COF_STREAM_NOW), COF_ERR_PEER_DEAD,
                "rank 1");
    CHECK(is_nan(&f.part.out), "outputs are not NaN");
    cof_plan_destroy(f.plan);
    cof_world_destroy(f.world);
    return test_n_failed != 0;
}

static void test_death(void)
{
    enum { RANKS = 3 };
    char job[40];
    pid_t pids[RANKS];
    snprintf(job, sizeof job, "trimul-death-%d", (int)getpid());
    for (int r = 0; r < RANKS; r++) {
        fflush(stdout);
        pids[r] = fork(); /* before this process has any thread */
        if (pids[r] == 0) {
            int result = die_or_see(r, RANKS, job);
            fflush(stdout);
            _exit(result);
        }
    }
    for (int r = 0; r < RANKS; r++) {
        int status = 0;
        waitpid(pids[r], &status, 0);
        CHECK(r == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "rank %d ended with %#x", r, (unsigned)status);
    }
}

int main(void)
{
    test_death();
    test_ranks(2, params_differ, NULL);
    test_ranks(2, weights_differ, NULL);
    test_ranks(3, weights_differ, NULL);
    test_ranks(3, calls_differ, NULL);
    test_ranks(2, empty_differs, NULL);
    test_ranks(3, one_stays_away, NULL);
    return test_done();
}
