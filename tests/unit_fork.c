/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Children of ranks. Ranks are processes, forked before this one has any thread; each may fork
 * children of its own, who must not keep it alive, nor hang, nor disturb it. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "symm/symm.h"
#include "test_grad_return.h"

#define N_RANKS 3
#define PATIENCE_S 60 /* a process that takes longer hangs */

static struct shared {
    _Atomic int64_t killed_at; /* ns */
    atomic_int n_done;
} *shared;

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static _Noreturn void leave_process(void)
{
    int failed = test_n_failed > 0;
    fflush(stdout);
    _exit(failed);
}

/* A child that must end by itself; its checks count as one of the parent's. */
static void check_child(void (*fn)(void *), void *arg)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(PATIENCE_S);
        test_n_failed = 0;
        fn(arg);
        leave_process();
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "child ended with %s %d", WIFSIGNALED(status) ? "signal" : "code",
          WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

/* A child that does nothing until it is killed with its rank's process group. */
static void fork_sleeper(void)
{
    if (fork() == 0)
        for (;;)
            pause();
}

typedef void (*rank_fn)(int rank, const char *job);

/* fn in N_RANKS processes, each with a process group of its own that is killed at the end.
 * `killed`: the rank that ends by SIGKILL, or -1. */
static void run_ranks(const char *name, rank_fn fn, int killed)
{
    pid_t pids[N_RANKS];
    char job[64];
    memset(shared, 0, sizeof *shared);
    snprintf(job, sizeof job, "fork-%d-%s", (int)getpid(), name);
    fflush(stdout);
    for (int r = 0; r < N_RANKS; r++)
        if ((pids[r] = fork()) == 0) {
            setpgid(0, 0);
            test_n_failed = 0;
            alarm(PATIENCE_S);
            fn(r, job);
            leave_process();
        }
    for (int r = 0; r < N_RANKS; r++) {
        int status = 0;
        waitpid(pids[r], &status, 0);
        if (r == killed)
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "%s: rank %d", name, r);
        else
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: rank %d: status %x", name, r,
                  (unsigned)status);
        kill(-pids[r], SIGKILL);
    }
}

static cof_world *join(int rank, const char *job)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = N_RANKS;
    o.job = job;
    o.engine = COF_ENGINE_SHM;
    o.n_threads = 2;
    o.init_timeout = PATIENCE_S / 2;
    o.run_timeout = PATIENCE_S / 2;
    cof_world *w = NULL;
    CHECK_OK(cof_world_create(&o, &w));
    if (!w)
        leave_process();
    return w;
}

/* Looks until the team is no more, or for 20 s. */
static cof_status look_for_end(cof_team *team)
{
    cof_status status = COF_OK;
    for (int i = 0; i < 4000 && status == COF_OK; i++) {
        usleep(5000);
        status = cof_team_query(team);
    }
    return status;
}

static void die(void)
{
    atomic_store(&shared->killed_at, now());
    raise(SIGKILL);
}

static void see_rank1_die(cof_world *w)
{
    CHECK_FAILS(look_for_end(cof_world_team(w)), COF_ERR_PEER_DEAD, "rank 1 (process ");
    CHECK(strstr(cof_last_error(), "died"), "%s", cof_last_error());
    double s = (double)(now() - atomic_load(&shared->killed_at)) * 1e-9;
    CHECK(s < 5, "seen after %g s", s); /* within 1 s, on a machine that is not crowded */
    CHECK_FAILS(cof_team_barrier(cof_world_team(w)), COF_ERR_PEER_DEAD, "rank 1");
    cof_world_destroy(w);
}

/* ---- a rank with a child is killed ---------------------------------------------------------- */

static void killed_with_child(int rank, const char *job)
{
    cof_world *w = join(rank, job);
    if (rank == 1)
        fork_sleeper();
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    if (rank == 1)
        die();
    see_rank1_die(w);
}

static atomic_bool stop;

static void *fork_in_a_loop(void *arg)
{
    for (int i = 0; i < *(int *)arg && !stop; i++) {
        fork_sleeper();
        usleep(500);
    }
    return NULL;
}

static void world_of_one(void);

/* Children made while the world is: of the listener and of half a world too. */
static void killed_with_early_children(int rank, const char *job)
{
    pthread_t forker;
    int n = rank == 1 ? 100 : 20;
    world_of_one(); /* the first one brings the handlers */
    pthread_create(&forker, NULL, fork_in_a_loop, &n);
    if (rank != 1)
        usleep(20000);
    cof_world *w = join(rank, job);
    stop = true;
    pthread_join(forker, NULL);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    if (rank == 1)
        die();
    see_rank1_die(w);
}

/* A rank that leaves in order has left, whether it has a child or not. */
static void leaves_with_child(int rank, const char *job)
{
    cof_world *w = join(rank, job);
    if (rank == 1)
        fork_sleeper();
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    if (rank != 1) {
        CHECK_FAILS(look_for_end(cof_world_team(w)), COF_ERR_PEER_DEAD, "rank 1 has left");
        if (rank == 0)
            CHECK_FAILS(cof_team_barrier(cof_world_team(w)), COF_ERR_PEER_DEAD, "has left");
        for (shared->n_done++; shared->n_done < 2;) /* nobody leaves while another looks */
            usleep(1000);
    }
    cof_world_destroy(w);
}

/* One survivor knows of the death and goes on to a team of the living; the other one is still in
 * the team that lost a rank, and may meet the message of the living there. */
static void death_beside_the_living(int rank, const char *job)
{
    cof_world *w = join(rank, job);
    cof_team *dead = NULL, *living = NULL;
    const int ahead = job[strlen(job) - 1] - '0'; /* the other one is the first of the living */
    int all[N_RANKS] = {0, 1, 2}, two[2] = {1 - ahead, ahead};
    CHECK_OK(cof_team_create(w, all, N_RANKS, 1, &dead));
    if (rank != 2)
        CHECK_OK(cof_team_create(w, two, 2, 2, &living));
    CHECK_OK(cof_team_barrier(dead));
    test_meet(N_RANKS);
    if (rank == 2)
        die();
    if (rank == ahead) {
        CHECK_FAILS(look_for_end(dead), COF_ERR_PEER_DEAD, "rank 2");
        shared->n_done++;
    }
    while (shared->n_done == 0)
        usleep(1000);
    char byte; /* requests go to the lower rank: there it waits already */
    while (rank == 0 && ahead == 1 && !cofi_link_peek(w->socket[1], &byte, 1))
        usleep(1000);
    CHECK_FAILS(cof_team_barrier(dead), COF_ERR_PEER_DEAD, "rank 2");
    CHECK_OK(cof_team_barrier(living));
    CHECK_OK(cof_team_barrier(living));
    cof_team_destroy(living);
    cof_team_destroy(dead);
    cof_world_destroy(w);
}

/* ---- what a child can do with what it has copies of ----------------------------------------- */

struct objects {
    cof_world *world;
    cof_team *part;
    cof_stream stream;
    cof_plan *plan, *whole; /* of grad_return, by section: in the middle */
    struct test_attention attention;
    struct test_gr grads;
    int n_sockets; /* of the process, before there was a world */
};

static int count_sockets(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        char target[64] = "";
        if (readlinkat(dirfd(dir), e->d_name, target, sizeof target - 1) > 0)
            n += !strncmp(target, "socket:", 7);
    }
    if (dir)
        closedir(dir);
    return n;
}

static void check_refused(struct objects *o)
{
    const char *why = "before fork";
    cof_team *in, *out, *team = cof_world_team(o->world);
    cof_stream stream;
    cof_event event;
    int x = 0, all[N_RANKS], self = cof_world_rank(o->world);
    CHECK_FAILS(cof_team_barrier(team), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_team_allgather(o->part, &x, all, sizeof x), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_team_query(team), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_team_create(o->world, &self, 1, 1, &out), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_team_split(o->part, 1, &in, &out), COF_ERR_INVALID, why);
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_attention_params attention = test_attention_params(33);
    CHECK_FAILS(cof_attention_workspace(o->part, &attention, &sizes), COF_ERR_INVALID, why);
    cof_grad_return_params grad = COF_GRAD_RETURN_PARAMS_INIT;
    CHECK_FAILS(cof_grad_return_workspace(o->part, &grad, &sizes), COF_ERR_INVALID, why);
    cof_allreduce_rmsnorm_params norm = COF_ALLREDUCE_RMSNORM_PARAMS_INIT;
    CHECK_FAILS(cof_allreduce_rmsnorm_workspace(o->part, &norm, &sizes), COF_ERR_INVALID, why);
    cof_trimul_params trimul = COF_TRIMUL_PARAMS_INIT;
    CHECK_FAILS(cof_trimul_workspace(o->part, &trimul, &sizes), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_stream_create(o->world, 1, &stream), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_stream_sync(o->stream), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_event_record(o->stream, &event), COF_ERR_INVALID, why);
    event = (cof_event){o->stream, 1};
    CHECK_FAILS(cof_stream_wait_event(o->stream, event), COF_ERR_INVALID, why);
    CHECK_FAILS(cof_attention_forward(o->plan, &o->attention.args, o->stream), COF_ERR_INVALID,
                why);
    CHECK_FAILS(cof_attention_forward(o->plan, &o->attention.args, COF_STREAM_NOW),
                COF_ERR_INVALID, why);
}

static void world_of_one(void)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.n_ranks = 1;
    o.n_threads = 2;
    cof_world *w = NULL;
    struct test_attention t;
    cof_attention_params p = test_attention_params(33);
    cof_plan *plan = NULL;
    CHECK_OK(cof_world_create(&o, &w));
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    CHECK_OK(cof_team_query(cof_world_team(w)));
    test_attention_make(&t, &p, 0, 1, 5);
    CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
    CHECK_OK(cof_attention_forward(plan, &t.args, COF_STREAM_NOW));
    cof_plan_destroy(plan);
    cof_world_destroy(w);
    test_attention_free(&t);
}

__attribute__((unused)) static void use_own_world(void *arg)
{
    (void)arg;
    world_of_one();
}

static void use_copies(void *arg)
{
    struct objects *o = arg;
    CHECK(count_sockets() == o->n_sockets, "%d sockets, %d of its own", count_sockets(),
          o->n_sockets);
    check_refused(o);
#ifndef __SANITIZE_THREAD__ /* which lets no child of a process with threads make threads */
    world_of_one();
    check_child(use_own_world, NULL); /* and so does a child of the child */
#endif
    int pair[2], made = pipe(pair); /* may have the numbers of sockets that were closed */
    cof_plan_destroy(o->plan);
    cof_plan_destroy(o->whole);
    cof_stream_destroy(o->stream);
    cof_team_destroy(o->part);
    cof_world_destroy(o->world);
    CHECK(made == 0 && fcntl(pair[0], F_GETFD) >= 0 && fcntl(pair[1], F_GETFD) >= 0,
          "a descriptor of the child's own was closed");
}

static void *look_all_the_time(void *arg)
{
    struct objects *o = arg;
    while (!stop) {
        CHECK_OK(cof_team_query(cof_world_team(o->world)));
        CHECK_OK(cof_team_query(o->part));
    }
    return NULL;
}

/* So that most forks would come while it is held. */
static void *hold_the_lock(void *arg)
{
    struct objects *o = arg;
    while (!stop) {
        pthread_mutex_lock(&o->world->lock);
        usleep(500);
        pthread_mutex_unlock(&o->world->lock);
        usleep(100);
    }
    return NULL;
}

static void run_section(struct objects *o, int section)
{
    cof_grad_return_args args = o->grads.args;
    args.dk = &o->grads.in[section][0];
    args.dv = &o->grads.in[section][1];
    CHECK_OK(cof_grad_return_run(o->whole, &args, o->stream));
}

/* What children destroy in the middle goes on here. */
static void begin_whole(struct objects *o, int rank)
{
    cof_grad_return_params p = test_gr_params(33);
    p.by_section = 1;
    CHECK_OK(cof_grad_return_plan_create(cof_world_team(o->world), &p, NULL, &o->whole));
    test_gr_make(&o->grads, &p, rank, N_RANKS, 1);
    run_section(o, 0);
    CHECK_OK(cof_stream_sync(o->stream));
}

static void end_whole(struct objects *o)
{
    for (int section = 1; section < N_RANKS; section++)
        run_section(o, section);
    CHECK_OK(cof_stream_sync(o->stream));
    CHECK(test_gr_wrong(&o->grads) == 0, "%lld elements", (long long)test_gr_wrong(&o->grads));
}

static void children_of_all_kinds(int rank, const char *job)
{
    struct objects o = {.n_sockets = count_sockets()};
    cof_attention_params p = test_attention_params(33);
    int members[N_RANKS] = {2, 0, 1};
    o.world = join(rank, job);
    CHECK_OK(cof_team_create(o.world, members, N_RANKS, 1, &o.part));
    CHECK_OK(cof_stream_create(o.world, 2, &o.stream));
    test_attention_make(&o.attention, &p, rank, N_RANKS, 1);
    CHECK_OK(cof_attention_plan_create(cof_world_team(o.world), &p, NULL, &o.plan));
    CHECK_OK(cof_attention_forward(o.plan, &o.attention.args, o.stream));
    CHECK_OK(cof_stream_sync(o.stream));
    begin_whole(&o, rank);
    pthread_t looker, holder;
    pthread_create(&looker, NULL, look_all_the_time, &o);
    pthread_create(&holder, NULL, hold_the_lock, &o);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    const int n_rounds = 3;
#else
    const int n_rounds = 10;
#endif
    for (int i = 0; i < n_rounds && test_n_failed == 0; i++) {
        check_child(use_copies, &o);
        CHECK_OK(cof_attention_forward(o.plan, &o.attention.args, o.stream));
        CHECK_OK(cof_team_barrier(o.part));
    }
    stop = true;
    pthread_join(looker, NULL);
    pthread_join(holder, NULL);
    CHECK_OK(cof_stream_sync(o.stream));
    end_whole(&o);
    CHECK_OK(cof_team_barrier(cof_world_team(o.world))); /* nobody leaves while another looks */
    cof_plan_destroy(o.plan);
    cof_plan_destroy(o.whole);
    cof_stream_destroy(o.stream);
    cof_team_destroy(o.part);
    cof_world_destroy(o.world);
    test_attention_free(&o.attention);
    test_gr_free(&o.grads);
    CHECK(count_sockets() == o.n_sockets, "%d sockets, %d before", count_sockets(), o.n_sockets);
}

/* ---- one rank leaves while the others are in a call it never joins -------------------------- */

struct look {
    cof_team *team;
    cof_status status;
    char text[512];
};

static void *look_until_end(void *arg)
{
    struct look *look = arg;
    while ((look->status = cof_team_query(look->team)) == COF_OK)
        ;
    snprintf(look->text, sizeof look->text, "%s", cof_last_error());
    return NULL;
}

static void leaves_from_a_call(int rank, const char *job)
{
    cof_world *w = join(rank, job);
    if (rank != 2) {
        struct look look = {.team = cof_world_team(w)};
        pthread_t looker;
        pthread_create(&looker, NULL, look_until_end, &look);
        CHECK_FAILS(cof_team_barrier(cof_world_team(w)), COF_ERR_PEER_DEAD, "has left");
        pthread_join(looker, NULL);
        CHECK(look.status == COF_ERR_PEER_DEAD && strstr(look.text, "has left"), "%s", look.text);
    }
    cof_world_destroy(w);
}

int main(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    run_ranks("killed", killed_with_child, 1);
    run_ranks("early", killed_with_early_children, 1);
    run_ranks("leaves", leaves_with_child, -1);
    run_ranks("living0", death_beside_the_living, 2);
    run_ranks("living1", death_beside_the_living, 2);
    run_ranks("children", children_of_all_kinds, -1);
    for (int i = 0; i < 20; i++) {
        char name[32];
        snprintf(name, sizeof name, "call%d", i);
        run_ranks(name, leaves_from_a_call, -1);
    }
    return test_done();
}
