/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* After an exchange that failed: the sockets serve the other teams, whoever was late, never came,
 * mixed something up or sent a lot. Ranks are threads. */
#include "core/clock.h"
#include "symm/symm.h"
#include "test.h"

enum { PATIENCE_S = 60 };
#define SHORT_S 0.5 /* for what shall pass its deadline */

static int both[2] = {0, 1};

static cof_world *join(int rank, int n_ranks, const char *job, cof_engine engine)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = engine;
    o.n_threads = 1;
    o.init_timeout = PATIENCE_S;
    cof_world *w = NULL;
    if (cof_world_create(&o, &w) != COF_OK) {
        printf("not ok rank %d: %s\n", rank, cof_last_error());
        exit(1);
    }
    return w;
}

static void check_soon(int64_t begin)
{
    CHECK(cofi_now() - begin < PATIENCE_S / 2 * INT64_C(1000000000), "it came by the deadline");
}

/* New teams of ranks 0 and 1, and the team of all. */
static void check_others_work(cof_world *w, uint64_t tag)
{
    int rank = cof_world_rank(w), all[8];
    for (uint64_t i = 0; i < 3 && rank < 2; i++) {
        cof_team *t = NULL;
        CHECK_OK(cof_team_create(w, both, 2, tag + i, &t));
        if (!t)
            continue;
        CHECK_OK(cof_team_allgather(t, &rank, all, sizeof rank));
        CHECK(all[0] == 0 && all[1] == 1, "%d %d", all[0], all[1]);
        cof_team_destroy(t);
    }
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    CHECK_OK(cof_team_allgather(cof_world_team(w), &rank, all, sizeof rank));
    CHECK(all[0] == 0 && all[1] == 1, "%d %d", all[0], all[1]);
}

/* Both make the same calls; one comes to one of them when the other has given it up. */
static void late_once(int rank, int n_ranks, const char *job, void *arg)
{
    const int late = *(const int *)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    cof_team *t = NULL;
    cof_arena *a = NULL;
    CHECK_OK(cof_team_create(w, both, 2, 5, &t));
    if (rank == late)
        test_meet(2);
    else
        w->init_timeout = SHORT_S;
    int64_t begin = cofi_now();
    char text[32];
    snprintf(text, sizeof text, "rank %d did not come", late);
    CHECK_FAILS(cof_arena_create(t, 4096, 0, &a), COF_ERR_TIMEOUT, text);
    check_soon(begin);
    if (rank != late)
        test_meet(2);
    w->init_timeout = PATIENCE_S;
    cof_team_destroy(t);
    check_others_work(w, 5);
    cof_world_destroy(w);
}

/* One has an error of its own, and calls again. */
static void wrong_once(int rank, int n_ranks, const char *job, void *arg)
{
    const int wrong = *(const int *)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    cof_team *t;
    int bad[2] = {rank, 7};
    if (rank == wrong) {
        CHECK_FAILS(cof_team_create(w, bad, 2, 5, &t), COF_ERR_INVALID, "ranks[1] = 7");
    } else {
        w->init_timeout = SHORT_S;
        CHECK_FAILS(cof_team_create(w, both, 2, 5, &t), COF_ERR_TIMEOUT, "did not come");
    }
    test_meet(2);
    w->init_timeout = PATIENCE_S;
    check_others_work(w, 6);
    cof_world_destroy(w);
}

/* One never makes a call of a side team. */
static void never_called(int rank, int n_ranks, const char *job, void *arg)
{
    const int absent = *(const int *)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    cof_team *t = NULL;
    CHECK_OK(cof_team_create(w, both, 2, 5, &t));
    if (rank != absent) {
        w->init_timeout = SHORT_S;
        CHECK_FAILS(cof_team_barrier(t), COF_ERR_TIMEOUT, "did not come");
        w->init_timeout = PATIENCE_S;
    }
    test_meet(2);
    check_others_work(w, 6);
    if (rank != absent || absent == 1) /* rank 1 has been told, by what it read past */
        CHECK_FAILS(cof_team_barrier(t), COF_ERR_TIMEOUT, "did not come");
    cof_team_destroy(t);
    CHECK_OK(cof_team_create(w, both, 2, 5, &t)); /* the same once more */
    CHECK_OK(cof_team_barrier(t));
    CHECK_OK(cof_team_barrier(t));
    cof_team_destroy(t);
    cof_world_destroy(w);
}

/* Each is rank 0 of the team that it names. */
static void orders_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    cof_team *t = NULL;
    int list[2] = {rank, 1 - rank};
    int64_t begin = cofi_now();
    CHECK_FAILS(cof_team_create(w, list, 2, 5, &t), COF_ERR_MISMATCH, "on another team");
    check_soon(begin);
    CHECK(!t, "a team came out");
    check_others_work(w, 5);
    cof_world_destroy(w);
}

/* A team like the world's own has a number of its own. */
static void like_the_worlds(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    cof_team *t = NULL;
    CHECK_OK(cof_team_create(w, both, 2, 0, &t));
    CHECK_OK(cof_team_barrier(cof_world_team(w))); /* each has made one call */
    CHECK_FAILS(cof_team_barrier(rank ? t : cof_world_team(w)), COF_ERR_MISMATCH,
                "on another team");
    test_meet(2);
    cof_team_destroy(t);
    cof_world_destroy(w);
}

/* ---- more than a socket holds --------------------------------------------------------------- */

enum { BIG = 1 << 20 };
static char src[3][BIG], dst[3][3 * BIG];

static void check_pair_works(cof_world *w)
{
    int rank = cof_world_rank(w), pair[2] = {0, 2};
    cof_team *t = NULL;
    CHECK_OK(cof_team_create(w, pair, 2, 9, &t));
    memset(src[rank], rank + 1, BIG);
    if (t)
        CHECK_OK(cof_team_allgather(t, src[rank], dst[rank], BIG));
    CHECK(dst[rank][0] == 1 && dst[rank][BIG - 1] == 1 && dst[rank][2 * BIG - 1] == 3,
          "rank %d got %d %d %d", rank, dst[rank][0], dst[rank][BIG - 1], dst[rank][2 * BIG - 1]);
    cof_team_destroy(t);
}

static void big_and_mixed_up(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    cof_team *t = cof_world_team(w);
    int64_t begin = cofi_now();
    CHECK_FAILS(rank == 1 ? cof_team_barrier(t)
                          : cof_team_allgather(t, src[rank], dst[rank], BIG),
                COF_ERR_MISMATCH, "rank 1 is in \"barrier\" while rank 0 is in \"allgather\"");
    check_soon(begin);
    if (rank != 1)
        check_pair_works(w);
    test_meet(3);
    cof_world_destroy(w);
}

/* Rank 2 sends when rank 0 has failed: more than the socket holds, by much or by the last byte. */
static void big_and_left(int rank, int n_ranks, const char *job, void *arg)
{
    const size_t bytes = *(const size_t *)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    if (rank == 1)
        cof_world_destroy(w);
    for (int r = 0; r < 3; r += 2) {
        if (rank == r) {
            int64_t begin = cofi_now();
            CHECK_FAILS(cof_team_allgather(cof_world_team(w), src[rank], dst[rank], bytes),
                        COF_ERR_PEER_DEAD, "rank 1 ");
            check_soon(begin);
        }
        test_meet(3);
    }
    if (rank != 1)
        check_pair_works(w);
    test_meet(3);
    if (rank != 1)
        cof_world_destroy(w);
}

/* ---- handovers from a rank that is not the hub ---------------------------------------------- */

static void hand_over_backwards(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_SHM);
    cof_team *t = NULL;
    cof_arena *a = NULL;
    int list[3] = {2, 1, 0};
    CHECK_OK(cof_team_create(w, list, n_ranks, 1, &t));
    CHECK_OK(cof_arena_create(t, 4096, 0, &a));
    CHECK_OK(cof_put(a, 0, (size_t)rank, &(char){(char)(rank + 1)}, 1, COF_STREAM_NOW));
    CHECK_OK(cof_team_barrier(t));
    char got[3] = "";
    CHECK_OK(cof_get(a, got, 0, 0, 3, COF_STREAM_NOW));
    CHECK(got[0] == 1 && got[1] == 2 && got[2] == 3, "%d %d %d", got[0], got[1], got[2]);
    CHECK_OK(cof_team_barrier(t)); /* nobody leaves while another looks */
    cof_arena_destroy(a);
    cof_team_destroy(t);
    cof_world_destroy(w);
}

/* Rank 2 cannot hand its descriptor to all: the hub, which has it, hears why. */
static void broken_handover(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = join(rank, n_ranks, job, COF_ENGINE_THREAD);
    cof_team *t = NULL;
    int list[3] = {2, 0, 1}, fd = -1;
    CHECK_OK(cof_team_create(w, list, n_ranks, 1, &t));
    if (rank == 2)
        w->stale[1].is_cut_out = true;
    int64_t begin = cofi_now();
    cof_status status = rank == 1 ? COF_OK : cofi_team_bcast_fd(t, rank ? 2 : -1, &fd);
    if (rank == 0) {
        CHECK_OK(status);
        status = cofi_team_agree(t, "test", COF_OK);
    }
    if (rank != 1)
        CHECK(status == COF_ERR_TIMEOUT && strstr(cof_last_error(), "between ranks 2 and 1"),
              "%s: %s", cof_status_name(status), cof_last_error());
    check_soon(begin);
    if (rank == 0 && fd >= 0)
        close(fd);
    test_meet(3);
    cof_team_destroy(t);
    check_others_work(w, 5);
    cof_world_destroy(w);
}

int main(void)
{
    for (int r = 0; r < 2; r++) {
        test_ranks(2, late_once, &r);
        test_ranks(2, wrong_once, &r);
        test_ranks(2, never_called, &r);
    }
    test_ranks(2, orders_differ, NULL);
    test_ranks(2, like_the_worlds, NULL);
    test_ranks(3, big_and_mixed_up, NULL);
    /* What a socket holds is near 210000 bytes; sent in pieces, it depends on the kernel. */
    const size_t sizes[] = {BIG, 208000, 209000, 210000, 210097, 212000};
    for (int i = 0; i < 6; i++)
        test_ranks(3, big_and_left, (void *)&sizes[i]);
    test_ranks(3, hand_over_backwards, NULL);
    test_ranks(3, broken_handover, NULL);
    return test_done();
}
