/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Joining, teams and exchanges, and every way they can go wrong: bad options, ranks that do not
 * come, that leave, that disagree. Ranks are threads. */
#include "core/clock.h"
#include "symm/symm.h"
#include "test.h"

static cof_world_options options(int rank, int n_ranks, const char *job)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_THREAD;
    o.n_threads = 1;
    o.init_timeout = 20; /* patience for what shall succeed, or fail at once */
    return o;
}

static void test_bad_options(void)
{
    cof_world *w;
    cof_world_options o = options(0, 1, NULL);
    CHECK_FAILS(cof_world_create(&o, NULL), COF_ERR_INVALID, "world_out");
    o.size = 8;
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.size = 8");
    o = options(2, 2, "x");
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.rank = 2: wanted 0 .. 1");
    o = options(0, -3, "x");
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.n_ranks = -3");
    o = options(0, 2, NULL);
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.job is NULL");
    o = options(0, 1, NULL);
    o.engine = (cof_engine)9;
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.engine = 9");
    o = options(0, 1, NULL);
    o.n_threads = 1000;
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.n_threads = 1000");
    setenv("COFUSE_THREADS", "300", 1);
    o = options(0, 1, NULL);
    o.n_threads = 0;
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "variable COFUSE_THREADS = 300");
    unsetenv("COFUSE_THREADS");
    setenv("COFUSE_RANK", "abc", 1); /* not read with options.n_ranks */
    o = options(0, 1, NULL);
    CHECK_OK(cof_world_create(&o, &w));
    cof_world_destroy(w);
    unsetenv("COFUSE_RANK");
    setenv("COFUSE_TIMEOUT", "soon", 1);
    o = options(0, 1, NULL);
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "COFUSE_TIMEOUT = \"soon\"");
    unsetenv("COFUSE_TIMEOUT");
    setenv("COFUSE_SIZE", "4", 1);
    setenv("COFUSE_RANK", "1", 1);
    CHECK_FAILS(cof_world_create(NULL, &w), COF_ERR_INVALID, "COFUSE_SIZE = 4, but neither");
    unsetenv("COFUSE_SIZE");
    unsetenv("COFUSE_RANK");
    CHECK(w == NULL, "a world came out");
}

static void one_missing(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w;
    cof_world_options o = options(rank, n_ranks, job);
    o.init_timeout = 1;
    if (rank == 2) /* never comes */
        return;
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_TIMEOUT, "did not arrive: 2");
}

static void rank0_missing(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w;
    cof_world_options o = options(rank, n_ranks, job);
    o.init_timeout = 0.5;
    if (rank > 0)
        CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_TIMEOUT, "rank 0 of job");
}

static void sizes_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w;
    cof_world_options o = options(rank, rank == 1 ? n_ranks + 1 : n_ranks, job);
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_MISMATCH, "rank 1 has n_ranks = 3, rank 0 has 2");
}

static void twice_rank1(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = NULL;
    cof_world_options o = options(rank == 2 ? 1 : rank, n_ranks, job);
    cof_status status = cof_world_create(&o, &w);
    CHECK(status == COF_ERR_MISMATCH, "%s: %s", cof_status_name(status), cof_last_error());
    cof_world_destroy(w);
}

static void engines_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w;
    cof_world_options o = options(rank, n_ranks, job);
    o.engine = rank ? COF_ENGINE_SHM : COF_ENGINE_THREAD;
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_MISMATCH, "engine");
}

static void exchanges(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 10);
    cof_team *team = cof_world_team(w), *part = NULL;
    int mine[2] = {rank, rank * rank}, all[16][2];
    CHECK(cof_world_rank(w) == rank && cof_world_size(w) == n_ranks, "rank and size");
    CHECK_OK(cof_team_barrier(team));
    CHECK_OK(cof_team_allgather(team, mine, all, sizeof mine));
    for (int r = 0; r < n_ranks; r++)
        CHECK(all[r][0] == r && all[r][1] == r * r, "rank %d sent %d %d", r, all[r][0], all[r][1]);
    /* a team of the odd ranks backwards, and one of the even */
    int odd[8], even[8], n_odd = 0, n_even = 0;
    for (int r = n_ranks - 1; r >= 0; r--)
        if (r % 2)
            odd[n_odd++] = r;
        else
            even[n_even++] = r;
    CHECK_OK(cof_team_create(w, rank % 2 ? odd : even, rank % 2 ? n_odd : n_even, 7, &part));
    CHECK_OK(cof_team_allgather(part, &rank, all, sizeof rank));
    CHECK(((int *)all)[0] == (rank % 2 ? odd : even)[0], "first of the team is %d",
          ((int *)all)[0]);
    CHECK(cof_team_size(part) == (rank % 2 ? n_odd : n_even), "team of %d", cof_team_size(part));
    CHECK_OK(cof_team_barrier(part));
    CHECK_OK(cof_team_query(team));
    cof_team_destroy(part);
    int outside[1] = {(rank + 1) % n_ranks}, twice[2] = {rank, rank}, far[1] = {n_ranks};
    CHECK_FAILS(cof_team_create(w, far, 1, 0, &part), COF_ERR_INVALID, "ranks[0] = ");
    CHECK_FAILS(cof_team_create(w, far, 0, 0, &part), COF_ERR_INVALID, "n = 0");
    if (n_ranks > 1) {
        CHECK_FAILS(cof_team_create(w, outside, 1, 0, &part), COF_ERR_INVALID, "is not among them");
        CHECK_FAILS(cof_team_create(w, twice, 2, 0, &part), COF_ERR_INVALID, "are both");
    }
    CHECK_OK(cof_team_barrier(team)); /* nobody leaves while another looks */
    cof_world_destroy(w);
}

static cof_world *join(int rank, int n_ranks, const char *job, double init_timeout)
{
    cof_world_options o = options(rank, n_ranks, job);
    cof_world *w = NULL;
    o.init_timeout = init_timeout;
    CHECK_OK(cof_world_create(&o, &w));
    return w;
}

static void different_calls(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    int x = 0, all[16];
    cof_status status = rank == 1 ? cof_team_allgather(team, &x, all, sizeof x)
                                  : cof_team_barrier(team);
    CHECK_FAILS(status, COF_ERR_MISMATCH,
                "rank 1 is in \"allgather\" while rank 0 is in \"barrier\"");
    CHECK_FAILS(cof_team_query(team), COF_ERR_MISMATCH, "allgather"); /* the team is done for */
    cof_world_destroy(w);
}

/* The answer of a rank 0 that has failed and left is read by a rank that comes after. */
static void late_to_failure(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 20);
    int x = 0, all[16];
    if (rank == 2)
        usleep(300000);
    cof_status status = rank == 1 ? cof_team_allgather(cof_world_team(w), &x, all, sizeof x)
                                  : cof_team_barrier(cof_world_team(w));
    CHECK_FAILS(status, COF_ERR_MISMATCH, "rank 1 is in \"allgather\" while rank 0 is in");
    cof_world_destroy(w);
}

/* Every rank returns the status of the first one that failed, whatever its own is. */
static void failures_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_status own = rank == 1   ? COF_FAIL(COF_ERR_UNSUPPORTED, "first")
                     : rank == 2 ? COF_FAIL(COF_ERR_NOMEM, "second")
                                 : COF_OK;
    CHECK_FAILS(cofi_team_agree(team, "test", own), COF_ERR_UNSUPPORTED,
                rank == 1 ? "first" : "on rank 1: first");
    CHECK_OK(cofi_team_agree(team, "test", COF_OK));
    CHECK_OK(cof_team_barrier(team)); /* nobody leaves while another looks */
    cof_world_destroy(w);
}

/* A message that a deadline cut off spoils its socket, and the next team says so at once. */
static void cut_message(int rank, int n_ranks, const char *job, void *arg)
{
    enum { BYTES = 1 << 20 }; /* more than a socket holds */
    static char src[2][BYTES], dst[2][2 * BYTES];
    atomic_int *n_done = arg;
    cof_world *w = join(rank, n_ranks, job, 1);
    cof_team *team = cof_world_team(w), *next;
    int ranks[2] = {0, 1};
    while (rank == 0 && *n_done == 0)
        usleep(1000);
    cof_status status = cof_team_allgather(team, src[rank], dst[rank], BYTES);
    CHECK(status == COF_ERR_TIMEOUT, "%s: %s", cof_status_name(status), cof_last_error());
    ++*n_done;
    CHECK_FAILS(cof_team_create(w, ranks, n_ranks, 1, &next), COF_ERR_TIMEOUT, "was cut off");
    ++*n_done;
    while (*n_done < 2 * n_ranks) /* nobody leaves while another looks */
        usleep(1000);
    cof_world_destroy(w);
}

/* Rank 0 cannot hand its descriptor to all: every rank hears why, also those that have it. */
static void broken_handover(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 60);
    cof_team *team = cof_world_team(w);
    int fd = -1;
    CHECK_OK(cof_team_barrier(team));
    if (rank == 0)
        w->stale[2].is_cut_out = true;
    int64_t begin = cofi_now();
    cof_status status = rank == 2 ? COF_OK : cofi_team_bcast_fd(team, rank ? -1 : 2, &fd);
    if (rank == 1 && status == COF_OK) /* it came before the failure */
        status = cofi_team_agree(team, "test", COF_OK);
    if (rank != 2)
        CHECK(status == COF_ERR_TIMEOUT && strstr(cof_last_error(), "between ranks 0 and 2"),
              "%s: %s", cof_status_name(status), cof_last_error());
    CHECK(cofi_now() - begin < 40 * INT64_C(1000000000), "the error came by the deadline");
    if (rank == 1 && fd >= 0)
        close(fd);
    cof_world_destroy(w);
}

static void teams_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 20);
    cof_team *part;
    int ranks[2] = {0, 1};
    CHECK_FAILS(cof_team_create(w, ranks, 2, rank == 1 ? 5 : 4, &part), COF_ERR_MISMATCH,
                "on another team");
    CHECK(!part, "a team came out");
    CHECK_OK(cof_team_barrier(cof_world_team(w))); /* its sockets serve the other teams still */
    CHECK_FAILS(cof_team_create(w, ranks, 2, rank == 0 ? 5 : 4, &part), COF_ERR_MISMATCH,
                "on another team");
    CHECK_OK(cof_team_create(w, ranks, 2, 6, &part));
    CHECK_OK(cof_team_query(cof_world_team(w)));
    CHECK_OK(cof_team_barrier(part)); /* nobody leaves while another looks */
    cof_team_destroy(part);
    cof_world_destroy(w);
}

static void one_late(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 2);
    if (rank == 1)
        test_meet(n_ranks);
    cof_status status = cof_team_barrier(cof_world_team(w));
    if (rank != 1) {
        CHECK_FAILS(status, COF_ERR_TIMEOUT, "rank 1 did not come within 2 s");
        test_meet(n_ranks);
    } else {
        CHECK(status != COF_OK, "the late rank passed a barrier that had failed");
    }
    test_meet(n_ranks); /* so that the late rank gets the answer, not a hang-up */
    cof_world_destroy(w);
}

/* A team fails over a rank that comes late; what that rank sends then is not taken for what another
 * team waits for. */
static void late_in_one_team(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 3);
    cof_team *part;
    int ranks[3] = {2, 1, 0}, all[3] = {0};
    CHECK_OK(cof_team_create(w, ranks, 3, 1, &part));
    if (rank == 1)
        test_meet(n_ranks);
    CHECK_FAILS(cof_team_allgather(part, &rank, all, sizeof rank), COF_ERR_TIMEOUT, "rank 1");
    if (rank != 1)
        test_meet(n_ranks);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    CHECK_OK(cof_team_allgather(cof_world_team(w), &rank, all, sizeof rank));
    CHECK(all[0] == 0 && all[1] == 1 && all[2] == 2, "%d %d %d", all[0], all[1], all[2]);
    CHECK_FAILS(cof_team_barrier(part), COF_ERR_TIMEOUT, "rank 1");
    cof_team_destroy(part);
    CHECK_OK(cof_team_create(w, ranks, 3, 1, &part)); /* the same once more */
    CHECK_OK(cof_team_allgather(part, &rank, all, sizeof rank));
    CHECK(all[0] == 2 && all[1] == 1 && all[2] == 0, "%d %d %d", all[0], all[1], all[2]);
    cof_team_destroy(part);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}

static void one_leaves(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 20);
    if (rank != 2) {
        cof_status status = cof_team_barrier(cof_world_team(w));
        CHECK(status == COF_ERR_PEER_DEAD || status == COF_ERR_MISMATCH, "%s", cof_last_error());
    }
    cof_world_destroy(w);
}

/* Who is where after a split, twice over, with the parts used in between. */
static void splits(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world *w = join(rank, n_ranks, job, 20);
    const int inner = *(const int *)arg, n_groups = n_ranks / inner;
    cof_team *in[2], *out[2];
    int got[16];
    for (int i = 0; i < 2; i++) {
        CHECK_OK(cof_team_split(cof_world_team(w), inner, &in[i], &out[i]));
        CHECK(cof_team_size(in[i]) == inner && cof_team_rank(in[i]) == rank % inner,
              "inner team of %d: rank %d", cof_team_size(in[i]), cof_team_rank(in[i]));
        CHECK(cof_team_size(out[i]) == n_groups && cof_team_rank(out[i]) == rank / inner,
              "outer team of %d: rank %d", cof_team_size(out[i]), cof_team_rank(out[i]));
    }
    for (int i = 0; i < 4; i++) {
        cof_team *part = i < 2 ? in[i] : out[i - 2];
        CHECK_OK(cof_team_allgather(part, &rank, got, sizeof rank));
        for (int r = 0; r < cof_team_size(part); r++) {
            int want = i < 2 ? rank / inner * inner + r : rank % inner + r * inner;
            CHECK(got[r] == want, "part %d: rank %d is %d, wanted %d", i, r, got[r], want);
        }
    }
    cof_team *in_in, *in_out; /* a part can be split again */
    CHECK_OK(cof_team_split(out[1], 1, &in_in, &in_out));
    CHECK_OK(cof_team_allgather(in_out, &rank, got, sizeof rank));
    CHECK(got[0] == rank % inner, "first of the outer team is %d", got[0]);
    CHECK_OK(cof_team_barrier(cof_world_team(w))); /* nobody leaves while another looks */
    cof_world_destroy(w); /* the teams may come after */
    CHECK_FAILS(cof_team_barrier(in[0]), COF_ERR_INVALID, "its world has been destroyed");
    CHECK_FAILS(cof_team_query(out[1]), COF_ERR_INVALID, "its world has been destroyed");
    for (int i = 0; i < 2; i++) {
        cof_team_destroy(out[i]);
        cof_team_destroy(in[i]);
    }
    cof_team_destroy(in_in);
    cof_team_destroy(in_out);
}

/* Ranks that mix up their parts are told, also where members and sizes are the same. */
static void splits_mixed_up(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 20);
    cof_team *in[2], *out[2];
    for (int i = 0; i < 2; i++)
        CHECK_OK(cof_team_split(cof_world_team(w), n_ranks, &in[i], &out[i]));
    CHECK_FAILS(cof_team_barrier(in[rank == 1]), COF_ERR_MISMATCH, "on another team");
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    for (int i = 0; i < 2; i++) {
        cof_team_destroy(out[i]);
        cof_team_destroy(in[i]);
    }
    cof_world_destroy(w);
}

static void bad_splits(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w), *in = team, *out = team;
    CHECK_FAILS(cof_team_split(NULL, 1, &in, &out), COF_ERR_INVALID, "team: NULL");
    CHECK_FAILS(cof_team_split(team, 1, NULL, &out), COF_ERR_INVALID, "inner_out: NULL");
    CHECK_FAILS(cof_team_split(team, 1, &in, NULL), COF_ERR_INVALID, "outer_out: NULL");
    const int bad[] = {0, -2, 3, 5};
    for (int i = 0; i < 4; i++) {
        char part[64];
        snprintf(part, sizeof part, "inner = %d: wanted a divisor of the team's size, 4", bad[i]);
        CHECK_FAILS(cof_team_split(team, bad[i], &in, &out), COF_ERR_INVALID, part);
        CHECK(!in && !out, "a team came out of inner = %d", bad[i]);
    }
    CHECK_FAILS(cof_team_split(team, rank == 2 ? 1 : 2, &in, &out), COF_ERR_MISMATCH,
                "inner = 2 on rank 0, 1 on rank 2");
    CHECK_FAILS(cof_team_split(team, rank == 0 ? 7 : 2, &in, &out), COF_ERR_MISMATCH,
                "inner = 7 on rank 0, 2 on rank 1");
    CHECK(!in && !out, "a team came out");
    CHECK_OK(cof_team_split(team, 2, &in, &out)); /* the parent is as it was */
    CHECK_OK(cof_team_barrier(out));
    CHECK_OK(cof_team_barrier(team));
    cof_team_destroy(in);
    cof_team_destroy(out);
    cof_world_destroy(w);
}

int main(void)
{
    test_bad_options();
    test_ranks(4, one_missing, NULL);
    test_ranks(3, rank0_missing, NULL);
    test_ranks(2, sizes_differ, NULL);
    test_ranks(3, twice_rank1, NULL);
    test_ranks(2, engines_differ, NULL);
    const int sizes[] = {1, 2, 3, 5, 8};
    for (int i = 0; i < 5; i++)
        test_ranks(sizes[i], exchanges, NULL);
    test_ranks(3, different_calls, NULL);
    test_ranks(3, late_to_failure, NULL);
    test_ranks(4, failures_differ, NULL);
    atomic_int n_done = 0;
    test_ranks(2, cut_message, &n_done);
    test_ranks(3, broken_handover, NULL);
    test_ranks(2, teams_differ, NULL);
    test_ranks(3, one_late, NULL);
    test_ranks(3, late_in_one_team, NULL);
    test_ranks(3, one_leaves, NULL);
    const int split_of[][2] = {{1, 1}, {2, 1}, {2, 2}, {6, 2}, {6, 3}, {8, 4}};
    for (int i = 0; i < 6; i++)
        test_ranks(split_of[i][0], splits, (void *)&split_of[i][1]);
    test_ranks(3, splits_mixed_up, NULL);
    test_ranks(4, bad_splits, NULL);
    return test_done();
}
