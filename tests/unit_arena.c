/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Arenas through the public calls: arguments, regions, attached memory, what a failure leaves. That
 * engines keep their promises is the matter of `cofuse check runtime`. */
#include <sys/mman.h>

#include "test.h"

static void test_arguments(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_arena *a = NULL;
    size_t offset;
    char byte = 0;
    cof_arena_pointers pointers = COF_ARENA_POINTERS_INIT;
    CHECK_FAILS(cof_arena_create(NULL, 1, 0, &a), COF_ERR_INVALID, "team: NULL");
    CHECK_FAILS(cof_arena_create(team, 1, 0, NULL), COF_ERR_INVALID, "arena_out: NULL");
    CHECK_FAILS(cof_arena_create(team, 1, -1, &a), COF_ERR_INVALID, "n_words = -1");
    CHECK_FAILS(cof_arena_create(team, 1, 70000, &a), COF_ERR_INVALID, "wanted 0 .. 65535");
    CHECK_FAILS(cof_arena_create(team, SIZE_MAX, 0, &a), COF_ERR_INVALID, "past the address space");
    CHECK(cof_arena_attach_bytes(team, 1, 65535) > 0, "no bytes");
    CHECK(cof_arena_attach_bytes(NULL, 1, 0) == 0 && cof_arena_attach_bytes(team, 1, -1) == 0 &&
              cof_arena_attach_bytes(team, 1, 65536) == 0 &&
              cof_arena_attach_bytes(team, SIZE_MAX - 5, 0) == 0 &&
              cof_arena_attach_bytes(team, SIZE_MAX / 2, 0) == 0,
          "a number of bytes came out");
    CHECK(!a, "an arena came out");
    CHECK_OK(cof_arena_create(team, 1000, 2, &a));
    CHECK(cof_arena_bytes(a) == 1024, "%zu bytes", cof_arena_bytes(a));
    CHECK_FAILS(cof_put(NULL, 0, 0, &byte, 1, COF_STREAM_NOW), COF_ERR_INVALID, "arena: NULL");
    CHECK_FAILS(cof_put(a, n_ranks, 0, &byte, 1, COF_STREAM_NOW), COF_ERR_INVALID, "peer = 2");
    CHECK_FAILS(cof_put(a, 0, 1024, &byte, 1, COF_STREAM_NOW), COF_ERR_INVALID,
                "dst_offset = 1024");
    CHECK_FAILS(cof_put(a, 0, 8, &byte, SIZE_MAX - 4, COF_STREAM_NOW), COF_ERR_INVALID, "bytes = ");
    CHECK_FAILS(cof_put(a, 0, 0, NULL, 1, COF_STREAM_NOW), COF_ERR_INVALID, "src: NULL");
    CHECK_FAILS(cof_get(a, NULL, 0, 0, 1, COF_STREAM_NOW), COF_ERR_INVALID, "dst: NULL");
    CHECK_FAILS(cof_get(a, &byte, 0, 1020, 5, COF_STREAM_NOW), COF_ERR_INVALID,
                "src_offset = 1020");
    CHECK_FAILS(cof_signal(a, 0, 2, COF_STREAM_NOW), COF_ERR_INVALID, "word = 2");
    CHECK_FAILS(cof_wait(a, -1, 0, COF_STREAM_NOW), COF_ERR_INVALID, "peer = -1");
    CHECK_FAILS(cof_wait(a, 0, -1, COF_STREAM_NOW), COF_ERR_INVALID, "word = -1");
    CHECK_FAILS(cof_arena_view(a, NULL), COF_ERR_INVALID, "pointers: NULL");
    pointers.size = 8;
    CHECK_FAILS(cof_arena_view(a, &pointers), COF_ERR_INVALID, "pointers->size = 8");
    CHECK_FAILS(cof_arena_alloc(a, 0, &offset), COF_ERR_INVALID, "bytes = 0");
    CHECK_FAILS(cof_arena_alloc(a, 1, NULL), COF_ERR_INVALID, "offset_out");
    CHECK_OK(cof_put(a, 0, 1024, NULL, 0, COF_STREAM_NOW));
    CHECK_OK(cof_get(a, NULL, 0, 1024, 0, COF_STREAM_NOW));
    CHECK_OK(cof_team_barrier(team)); /* nobody leaves while another looks */
    cof_arena_destroy(a);
    cof_arena_destroy(NULL);
    cof_world_destroy(w);
}

/* Regions lie at the end, apart, the same on all ranks, and run out with an error on all. */
static void test_regions(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_arena *a;
    size_t offset[4], all[16];
    CHECK_OK(cof_arena_create(team, 1024, 0, &a));
    CHECK_OK(cof_arena_alloc(a, 100, &offset[0]));
    CHECK_OK(cof_arena_alloc(a, 256, &offset[1]));
    CHECK(offset[0] == 896 && offset[1] == 640, "at %zu and %zu", offset[0], offset[1]);
    CHECK_FAILS(cof_arena_alloc(a, 700, &offset[2]), COF_ERR_NOMEM, "no room for 768 more");
    CHECK_FAILS(cof_arena_alloc(a, 5000, &offset[2]), COF_ERR_NOMEM, "bytes = 5000");
    CHECK_OK(cof_arena_alloc(a, 640, &offset[2]));
    CHECK(offset[2] == 0, "at %zu", offset[2]);
    CHECK_OK(cof_team_allgather(team, &offset[1], all, sizeof offset[1]));
    for (int r = 0; r < n_ranks; r++)
        CHECK(all[r] == offset[1], "rank %d has %zu", r, all[r]);
    cof_arena_destroy(a);
    cof_world_destroy(w);
}

static void test_differ(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_arena *a = NULL;
    size_t offset;
    CHECK_FAILS(cof_arena_create(team, rank == 1 ? 2048 : 1024, 0, &a), COF_ERR_MISMATCH,
                "bytes = 1024 on rank 0, 2048 on rank 1");
    CHECK_FAILS(cof_arena_create(team, 1024, rank, &a), COF_ERR_MISMATCH,
                "n_words = 0 on rank 0, 1 on rank 1");
    CHECK_OK(cof_arena_create(team, 1024, 0, &a));
    CHECK_FAILS(cof_arena_alloc(a, rank == 1 ? 2 : 1, &offset), COF_ERR_MISMATCH,
                "bytes = 1 on rank 0, 2 on rank 1");
    CHECK_OK(cof_arena_alloc(a, 1, &offset)); /* nothing is lost by it */
    CHECK(offset == 896, "at %zu", offset);
    cof_arena_destroy(a);
    /* One rank's bad argument is an error on all. */
    cof_status status = cof_arena_create(team, 1024, rank == 1 ? -1 : 0, &a);
    CHECK(status == COF_ERR_INVALID && strstr(cof_last_error(), "n_words = -1"), "%s: %s",
          cof_status_name(status), cof_last_error());
    CHECK_OK(cof_team_query(team));
    CHECK_OK(cof_team_barrier(team));
    cof_world_destroy(w);
}

/* ---- attached memory ------------------------------------------------------------------------ */

enum { BLOCK = 8192 };
static _Alignas(128) char blocks[3][BLOCK];

static cof_peers peers_of(void *const *base, int n_ranks)
{
    cof_peers p = COF_PEERS_INIT;
    p.n_ranks = n_ranks;
    p.base = base;
    p.bytes = BLOCK;
    p.n_words = 1;
    return p;
}

static void test_attach_arguments(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_arena *a = NULL;
    void *base[3] = {blocks[0], blocks[1], blocks[2]};
    void *nothing = mmap(NULL, BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK_FAILS(cof_arena_attach(team, NULL, &a), COF_ERR_INVALID, "peers: NULL");
    cof_peers p = peers_of(base, n_ranks + 1);
    CHECK_FAILS(cof_arena_attach(team, &p, &a), COF_ERR_INVALID, "peers.n_ranks = 4: wanted 3");
    p = peers_of(base, n_ranks);
    p.bytes = 256;
    CHECK_FAILS(cof_arena_attach(team, &p, &a), COF_ERR_INVALID, "peers.bytes = 256");
    p = peers_of(NULL, n_ranks);
    CHECK_FAILS(cof_arena_attach(team, &p, &a), COF_ERR_INVALID, "peers.base: NULL");
    p = peers_of(base, n_ranks);
    p.n_words = -1;
    CHECK_FAILS(cof_arena_attach(team, &p, &a), COF_ERR_INVALID, "peers.n_words = -1");
    /* What is wrong on one rank is an error on all. */
    struct {
        void *entry;
        const char *text;
    } wrong[] = {{NULL, "peers.base[2] = "},
                 {blocks[2] + 64, "aligned to 128"},
                 {nothing, "can be read there"},
                 {blocks[0], "is not the block of rank 2"}};
    p = peers_of(base, n_ranks);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        base[2] = rank == 1 ? wrong[i].entry : blocks[2];
        CHECK_FAILS(cof_arena_attach(team, &p, &a), COF_ERR_INVALID, wrong[i].text);
    }
    base[2] = blocks[2];
    CHECK(!a, "an arena came out");
    CHECK_OK(cof_team_query(team));
    CHECK_OK(cof_team_barrier(team));
    munmap(nothing, BLOCK);
    cof_world_destroy(w);
}

/* A block that cannot be written, or has a hole in its front, is an error and no signal. */
static void test_attach_protected(int rank, int n_ranks, const char *job, void *arg)
{
    static char *shared[2];
    enum { N_WORDS = 64, PAGES = 16 };
    (void)arg;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    cof_arena *a = NULL;
    shared[rank] = mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                        0);
    CHECK_OK(cof_team_barrier(team));
    void *base[2] = {shared[0], shared[1]};
    cof_peers p = peers_of(base, n_ranks);
    p.bytes = PAGES * page;
    p.n_words = N_WORDS;
    CHECK(cof_arena_attach_bytes(team, 0, N_WORDS) > 3 * page, "the front has too few pages");
    static const struct {
        int from, to, access;
        const char *text;
    } rows[] = {{0, PAGES, PROT_READ, "byte 0 of the own block cannot be written"},
                {2, 3, PROT_READ, "of the own block cannot be written"},
                {1, 2, PROT_NONE, "cannot be read"},
                {PAGES - 1, PAGES, PROT_NONE, "can be read there"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rank == 1)
            mprotect(shared[1] + (size_t)rows[i].from * page,
                     (size_t)(rows[i].to - rows[i].from) * page, rows[i].access);
        CHECK_OK(cof_team_barrier(team));
        CHECK_FAILS(cof_arena_attach(team, &p, &a), COF_ERR_INVALID, rows[i].text);
        CHECK_OK(cof_team_barrier(team));
        if (rank == 1)
            mprotect(shared[1], PAGES * page, PROT_READ | PROT_WRITE);
        CHECK_OK(cof_team_barrier(team));
    }
    CHECK_OK(cof_arena_attach(team, &p, &a));
    CHECK_OK(cof_team_barrier(team));
    cof_arena_destroy(a);
    CHECK_OK(cof_team_barrier(team)); /* nobody unmaps while another looks */
    munmap(shared[rank], PAGES * page);
    cof_world_destroy(w);
}

/* Data behind the front stays; words begin at zero although the memory was used before. */
static void test_attach(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    void *base[3] = {blocks[0], blocks[1], blocks[2]};
    cof_peers p = peers_of(base, n_ranks);
    size_t front = cof_arena_attach_bytes(team, 0, 1);
    int next = (rank + 1) % n_ranks, previous = (rank + n_ranks - 1) % n_ranks;
    memset(blocks[rank], 0xa5, BLOCK);
    for (int round = 0; round < 3; round++) {
        cof_arena *a;
        cof_arena_pointers at = COF_ARENA_POINTERS_INIT;
        CHECK_OK(cof_arena_attach(team, &p, &a));
        CHECK(cof_arena_bytes(a) == BLOCK - front, "%zu bytes", cof_arena_bytes(a));
        CHECK_OK(cof_arena_view(a, &at));
        CHECK(at.base[rank] == blocks[rank] + front && at.n_ranks == 3 && at.word_stride == 128,
              "the view lies elsewhere");
        CHECK((unsigned char)blocks[rank][front + 100] == 0xa5, "data was touched");
        char sent = (char)(10 * round + rank), got = 0;
        CHECK_OK(cof_put(a, next, 7, &sent, 1, COF_STREAM_NOW));
        CHECK_OK(cof_signal(a, next, 0, COF_STREAM_NOW));
        CHECK_OK(cof_wait(a, previous, 0, COF_STREAM_NOW));
        CHECK_OK(cof_get(a, &got, rank, 7, 1, COF_STREAM_NOW));
        CHECK(got == 10 * round + previous, "got %d from %d in round %d", got, previous, round);
        cof_arena_destroy(a);
        CHECK_OK(cof_team_barrier(team));
    }
    cof_world_destroy(w);
}

/* ---- failure -------------------------------------------------------------------------------- */

/* A wait without a signal: the deadline ends the arena, not the team once it is destroyed. */
static void test_deadline(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    (void)n_ranks;
    cof_world *w = test_world(rank, n_ranks, job, 0.3);
    cof_team *team = cof_world_team(w);
    cof_arena *a, *b;
    cof_stream stream;
    unsigned char got[8] = {0};
    CHECK_OK(cof_arena_create(team, 4096, 1, &a));
    CHECK_OK(cof_arena_create(team, 4096, 1, &b));
    CHECK_OK(cof_stream_create(w, 1, &stream));
    if (rank == 0) {
        CHECK_OK(cof_wait(a, 1, 0, stream));
        CHECK_OK(cof_get(a, got, 1, 0, sizeof got, stream));
        CHECK_FAILS(cof_stream_sync(stream), COF_ERR_TIMEOUT,
                    "cof_wait: rank 0 waited for rank 1: deadline passed");
        CHECK(got[0] == 0xff && got[7] == 0xff, "bytes of a failed get are %02x", got[0]);
        CHECK_FAILS(cof_signal(a, 1, 0, COF_STREAM_NOW), COF_ERR_TIMEOUT, "wanted signal 1, saw 0");
        memset(got, 0, sizeof got);
        CHECK_FAILS(cof_get(a, got, 1, 0, sizeof got, COF_STREAM_NOW), COF_ERR_TIMEOUT, "deadline");
        CHECK(got[3] == 0xff, "bytes of a failed get are %02x", got[3]);
        memset(got, 0, sizeof got); /* the stream has failed, whatever the arena */
        CHECK_FAILS(cof_get(b, got, 1, 0, sizeof got, stream), COF_ERR_TIMEOUT, "deadline");
        CHECK_FAILS(cof_put(b, 1, 0, got, 1, stream), COF_ERR_TIMEOUT, "deadline");
        CHECK_FAILS(cof_stream_sync(stream), COF_ERR_TIMEOUT, "deadline");
        CHECK(got[7] == 0xff, "bytes of a failed get are %02x", got[7]);
    }
    CHECK_OK(cof_team_barrier(team));
    CHECK_FAILS(cof_put(a, 0, 0, got, 1, COF_STREAM_NOW), COF_ERR_TIMEOUT,
                "rank 0 waited for rank 1");
    CHECK_FAILS(cof_team_query(team), COF_ERR_TIMEOUT, "rank 0 waited for rank 1");
    cof_stream_destroy(stream);
    cof_arena_destroy(a);
    cof_arena_destroy(b);
    CHECK_OK(cof_team_query(team));
    CHECK_OK(cof_team_barrier(team));
    cof_world_destroy(w);
}

/* Nothing more is made of an arena that has failed, on either rank. */
static void test_failed(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 0.3);
    cof_team *team = cof_world_team(w);
    cof_arena *a;
    cof_plan *plan = NULL;
    size_t offset = 7;
    cof_arena_pointers pointers = COF_ARENA_POINTERS_INIT;
    cof_attention_params params = test_attention_params(33);
    const char *why = "rank 0 waited for rank 1";
    CHECK_OK(cof_arena_create(team, 1 << 20, 1, &a));
    if (rank == 0)
        CHECK_FAILS(cof_wait(a, 1, 0, COF_STREAM_NOW), COF_ERR_TIMEOUT, why);
    test_meet(n_ranks);
    CHECK_FAILS(cof_arena_alloc(a, 1000, &offset), COF_ERR_TIMEOUT, why);
    CHECK_FAILS(cof_arena_alloc(a, 1 << 21, &offset), COF_ERR_TIMEOUT, why);
    CHECK(offset == 7, "a region at %zu", offset);
    CHECK_FAILS(cof_attention_plan_create(team, &params, a, &plan), COF_ERR_TIMEOUT, why);
    CHECK(!plan, "a plan came out");
    CHECK_FAILS(cof_arena_view(a, &pointers), COF_ERR_TIMEOUT, why);
    CHECK(!pointers.base, "pointers came out");
    CHECK_OK(cof_team_barrier(team)); /* nobody leaves while another looks */
    cof_arena_destroy(a);
    cof_world_destroy(w);
}

int main(void)
{
    test_ranks(2, test_arguments, NULL);
    test_ranks(3, test_regions, NULL);
    test_ranks(2, test_differ, NULL);
    test_ranks(3, test_attach_arguments, NULL);
    test_ranks(2, test_attach_protected, NULL);
    test_ranks(3, test_attach, NULL);
    test_ranks(2, test_deadline, NULL);
    test_ranks(2, test_failed, NULL);
    return test_done();
}
