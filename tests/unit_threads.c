/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Many threads, worlds and teams at once, as world.h promises: several worlds of different sizes,
 * teams that overlap, one rank used from several threads, and ranks that leave while others are in
 * a call. Ranks are threads; also for the thread sanitizer, hence few of them. */
#include <dirent.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "core/clock.h"
#include "symm/links.h"
#include "test.h"

#ifdef __SANITIZE_THREAD__
enum { N_CYCLES = 60, N_ROUNDS = 10, N_LEAVES = 20 };
#else
enum { N_CYCLES = 200, N_ROUNDS = 50, N_LEAVES = 100 };
#endif

/* Everybody's number arrives in the team's order. */
static void check_allgather(cof_team *team, const int *members, int tag)
{
    int n = cof_team_size(team), mine[2] = {members[cof_team_rank(team)], tag}, all[16][2];
    CHECK_OK(cof_team_allgather(team, mine, all, sizeof mine));
    for (int i = 0; i < n; i++)
        CHECK(all[i][0] == members[i] && all[i][1] == tag, "rank %d of %d: %d, %d", i, n, all[i][0],
              all[i][1]);
}

/* ---- worlds and teams at once --------------------------------------------------------------- */

static const int in_order[] = {0, 1, 2, 3, 4, 5, 6, 7};

/* Every thread has a world of its own, one with all, and the first two have one more. */
static void several_worlds(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    char pair_job[80];
    snprintf(pair_job, sizeof pair_job, "%s-pair", job);
    cof_world *all = test_world(rank, n_ranks, job, 20), *pair = NULL;
    if (rank < 2)
        pair = test_world(rank, 2, pair_job, 20);
    for (int i = 0; i < N_ROUNDS; i++) {
        cof_world *own = test_world(0, 1, NULL, 20);
        check_allgather(cof_world_team(all), in_order, i);
        if (pair)
            check_allgather(cof_world_team(pair), in_order, i + 1000);
        check_allgather(cof_world_team(own), in_order, i);
        CHECK_OK(cof_team_query(cof_world_team(all)));
        cof_world_destroy(own);
    }
    CHECK_OK(cof_team_barrier(cof_world_team(all))); /* nobody leaves while another looks */
    cof_world_destroy(all);
    if (pair)
        CHECK_OK(cof_team_barrier(cof_world_team(pair))); /* whatever became of the other world */
    cof_world_destroy(pair);
}

/* Teams that share ranks, called in the same order by the ranks that they share. */
static void overlapping_teams(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    static const int members[][3] = {{0, 1}, {2, 1}, {2, 0}, {1, 2, 0}, {2, 1, 0}, {1}};
    static const int sizes[] = {2, 2, 2, 3, 3, 1};
    enum { N_TEAMS = 6 };
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *teams[N_TEAMS] = {NULL};
    for (int t = 0; t < N_TEAMS; t++)
        for (int i = 0; i < sizes[t]; i++)
            if (members[t][i] == rank)
                CHECK_OK(cof_team_create(w, members[t], sizes[t], (uint64_t)t, &teams[t]));
    for (int i = 0; i < N_ROUNDS; i++)
        for (int t = 0; t < N_TEAMS; t++)
            if (teams[t])
                check_allgather(teams[t], members[t], i * N_TEAMS + t);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    for (int t = 0; t < N_TEAMS; t++)
        cof_team_destroy(teams[t]);
    cof_world_destroy(w);
}

/* ---- nothing is left ------------------------------------------------------------------------ */

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

/* In an order that changes from cycle to cycle; the world before its teams, too. */
static void destroy_all(cof_world *w, cof_team **teams, int n, int order)
{
    if (order % 3 == 0)
        cof_world_destroy(w);
    for (int i = 0; i < n; i++)
        cof_team_destroy(teams[order % 2 ? i : n - 1 - i]);
    if (order % 3)
        cof_world_destroy(w);
}

static void one_cycle(int rank, int n_ranks, const char *job, void *arg)
{
    const int reversed[] = {2, 1, 0}, two[] = {0, 2};
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *teams[4] = {NULL};
    cof_stream stream;
    CHECK_OK(cof_team_create(w, reversed, 3, 1, &teams[0]));
    CHECK_OK(cof_team_split(teams[0], 3, &teams[1], &teams[2]));
    if (rank != 1)
        CHECK_OK(cof_team_create(w, two, 2, 2, &teams[3]));
    CHECK_OK(cof_stream_create(w, 1, &stream));
    CHECK_OK(cof_team_barrier(teams[1]));
    cof_stream_destroy(stream);
    destroy_all(w, teams, 4, *(const int *)arg);
}

static void cycles(void)
{
    int n_fds = 0, n_threads = 0;
    for (int i = 0; i < N_CYCLES; i++) {
        if (i == 5) { /* after the first ones, which load and cache */
            n_fds = count_entries("/proc/self/fd");
            n_threads = count_entries("/proc/self/task");
        }
        test_ranks(3, one_cycle, &i);
    }
    int fds = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    CHECK(fds == n_fds, "%d descriptors, before %d", fds, n_fds);
    CHECK(threads == n_threads, "%d threads, before %d", threads, n_threads);
}

/* ---- one rank, several threads -------------------------------------------------------------- */

struct member {
    cof_world *world;
    cof_team *part;
    cof_plan *plan;
    struct test_attention attention;
    pthread_mutex_t turn; /* orders the rank's collective calls */
    int n_calls;
    atomic_bool stop;
    cof_stream stream; /* goes from thread to thread under its lock */
    pthread_mutex_t stream_lock;
};

static void *look(void *arg)
{
    struct member *m = arg;
    while (!m->stop) {
        CHECK_OK(cof_team_query(cof_world_team(m->world)));
        CHECK_OK(cof_team_query(m->part));
        CHECK(cof_team_size(m->part) == cof_world_size(m->world), "sizes");
        sched_yield();
    }
    return NULL;
}

/* The n-th call of the rank is the same on all ranks, whatever thread makes it. */
static void *take_turns(void *arg)
{
    struct member *m = arg;
    static const int backwards[] = {2, 1, 0};
    for (bool more = true; more; sched_yield()) {
        pthread_mutex_lock(&m->turn);
        more = m->n_calls < 2 * N_ROUNDS;
        int n = m->n_calls++;
        if (more && n % 2)
            check_allgather(m->part, backwards, n);
        else if (more)
            check_allgather(cof_world_team(m->world), in_order, n);
        pthread_mutex_unlock(&m->turn);
    }
    return NULL;
}

static void *use_stream(void *arg)
{
    struct member *m = arg;
    for (int i = 0; i < N_ROUNDS; i++) {
        pthread_mutex_lock(&m->stream_lock);
        CHECK_OK(cof_attention_forward(m->plan, &m->attention.args, m->stream));
        if (i % 4 == 0)
            CHECK_OK(cof_stream_sync(m->stream));
        pthread_mutex_unlock(&m->stream_lock);
    }
    return NULL;
}

static void *make_streams(void *arg)
{
    struct member *m = arg;
    for (int i = 0; i < N_ROUNDS / 5; i++) {
        cof_stream own;
        cof_event event;
        CHECK_OK(cof_stream_create(m->world, 1, &own));
        CHECK_OK(cof_event_record(own, &event));
        CHECK_OK(cof_stream_sync(own));
        cof_stream_destroy(own);
    }
    return NULL;
}

static void many_threads(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    const int backwards[] = {2, 1, 0};
    void *(*const fns[])(void *) = {look, take_turns, take_turns, use_stream, use_stream,
                                    make_streams};
    enum { N_THREADS = 6 };
    pthread_t ids[N_THREADS];
    struct member m = {.world = test_world(rank, n_ranks, job, 20),
                       .turn = PTHREAD_MUTEX_INITIALIZER,
                       .stream_lock = PTHREAD_MUTEX_INITIALIZER};
    cof_attention_params p = test_attention_params(24);
    test_attention_make(&m.attention, &p, rank, n_ranks, 1);
    CHECK_OK(cof_team_create(m.world, backwards, 3, 1, &m.part));
    CHECK_OK(cof_attention_plan_create(m.part, &p, NULL, &m.plan));
    CHECK_OK(cof_stream_create(m.world, 1, &m.stream));
    for (int i = 0; i < N_THREADS; i++)
        pthread_create(&ids[i], NULL, fns[i], &m);
    for (int i = 1; i < N_THREADS; i++)
        pthread_join(ids[i], NULL);
    m.stop = true;
    pthread_join(ids[0], NULL);
    CHECK_OK(cof_stream_sync(m.stream));
    CHECK_OK(cof_team_barrier(cof_world_team(m.world))); /* nobody leaves while another looks */
    cof_stream_destroy(m.stream);
    cof_plan_destroy(m.plan);
    cof_team_destroy(m.part);
    cof_world_destroy(m.world);
    test_attention_free(&m.attention);
}

/* ---- one rank leaves while the others are in a call that it never joins --------------------- */

struct end {
    cof_team *team;
    cof_status status;
    char text[512];
};

static void *look_until_end(void *arg)
{
    struct end *end = arg;
    while ((end->status = cof_team_query(end->team)) == COF_OK)
        ;
    snprintf(end->text, sizeof end->text, "%s", cof_last_error());
    return NULL;
}

static void leaves_from_a_call(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = test_world(rank, n_ranks, job, 20);
    if (rank != *(const int *)arg) {
        struct end end = {.team = cof_world_team(w)};
        pthread_t looker;
        pthread_create(&looker, NULL, look_until_end, &end);
        CHECK_FAILS(cof_team_barrier(cof_world_team(w)), COF_ERR_PEER_DEAD, "has left");
        pthread_join(looker, NULL);
        CHECK(end.status == COF_ERR_PEER_DEAD && strstr(end.text, "has left"), "%s", end.text);
    }
    cof_world_destroy(w);
}

/* The same on one socket: looks for the bye while another thread reads what comes before it. */
struct reading {
    int socket;
    atomic_bool is_done;
};

static void *read_all(void *arg)
{
    struct reading *r = arg;
    char message[40];
    cof_status status;
    int n = 0;
    while ((status = cofi_link_wait(r->socket, COFI_NEVER)) == COF_OK) {
        CHECK_OK(cofi_link_recv(r->socket, message, sizeof message, COFI_NEVER));
        CHECK(message[0] == 'm' && message[39] == (char)n, "message %d was not read whole", n);
        n++;
    }
    CHECK(status == COF_ERR_PEER_DEAD && n == 100, "%d messages, then %s", n,
          cof_status_name(status));
    r->is_done = true;
    return NULL;
}

static void looks_while_reading(void)
{
    int pair[2];
    char message[40] = "message";
    CHECK(cofi_link_pair(pair) == 0, "no sockets");
    for (int i = 0; i < 100; i++) {
        message[39] = (char)i;
        CHECK_OK(cofi_link_send(pair[0], message, sizeof message, COFI_NEVER));
    }
    cofi_link_say_bye(pair[0]);
    cofi_link_close(pair[0]);
    struct reading r = {.socket = pair[1]};
    pthread_t reader;
    pthread_create(&reader, NULL, read_all, &r);
    while (!r.is_done)
        CHECK(cofi_link_said_bye(pair[1]), "no bye was seen");
    pthread_join(reader, NULL);
    CHECK(cofi_link_said_bye(pair[1]), "the bye was read");
    cofi_link_close(pair[1]);
}

int main(void)
{
    for (int i = 0; i < N_LEAVES; i++)
        looks_while_reading();
    test_ranks(3, several_worlds, NULL);
    test_ranks(3, overlapping_teams, NULL);
    cycles();
    test_ranks(3, many_threads, NULL);
    for (int i = 0; i < N_LEAVES; i++) {
        int leaver = i % 3;
        test_ranks(3, leaves_from_a_call, &leaver);
    }
    return test_done();
}
