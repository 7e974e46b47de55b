/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Joining by the caller's all-gather, past strangers at the address, and late to a world that has
 * failed. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "core/clock.h"
#include "core/hash.h"
#include "symm/bootstrap.h"
#include "test.h"

/* ---- the caller's all-gather ---------------------------------------------------------------- */

enum fault { NONE, ORDER, ERROR, HOST, NAMESPACE, VERSION, USER, EMPTY, N_FAULTS };

/* In memory that threads and processes share. */
struct meeting {
    pthread_barrier_t barrier;
    struct cofi_record records[8];
    int n_calls[8];
    enum fault fault;
};

struct caller {
    struct meeting *meeting;
    int rank, n_ranks;
};

static int allgather(void *ctx, const void *src, void *dst, size_t bytes)
{
    const struct caller *c = ctx;
    struct meeting *m = c->meeting;
    if (bytes != sizeof m->records[0])
        return 100;
    m->n_calls[c->rank]++;
    memcpy(&m->records[c->rank], src, bytes);
    pthread_barrier_wait(&m->barrier);
    struct cofi_record *all = dst;
    memcpy(all, m->records, (size_t)c->n_ranks * bytes);
    struct cofi_record first = all[0];
    switch (m->fault) {
    case ORDER: all[0] = all[1], all[1] = first; break;
    case ERROR: return c->rank == 1 ? 7 : 0;
    case HOST: all[1].boot ^= 1; break;
    case NAMESPACE: all[1].net ^= 1; break;
    case VERSION: all[1].version ^= c->rank == 1 ? 0 : 1; break;
    case USER: all[1].user++; break;
    case EMPTY: all[1] = (struct cofi_record){0}; break;
    default: break;
    }
    return 0;
}

static struct meeting *meeting_new(int n_ranks, enum fault fault)
{
    struct meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    if (m == MAP_FAILED)
        exit(1);
    pthread_barrierattr_t attr;
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&m->barrier, &attr, (unsigned)n_ranks);
    pthread_barrierattr_destroy(&attr);
    m->fault = fault;
    return m;
}

static void meeting_free(struct meeting *m)
{
    pthread_barrier_destroy(&m->barrier);
    munmap(m, sizeof *m);
}

static cof_world_options options(struct caller *c, cof_engine engine)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = c->rank;
    o.n_ranks = c->n_ranks;
    o.engine = engine;
    o.n_threads = 1;
    o.init_timeout = 30;
    o.allgather = allgather;
    o.allgather_ctx = c;
    return o;
}

static cof_status join_and_leave(struct caller *c, cof_engine engine)
{
    cof_world_options o = options(c, engine);
    cof_world *w;
    cof_status status = cof_world_create(&o, &w);
    if (status != COF_OK)
        return status;
    int all[8];
    status = cof_team_allgather(cof_world_team(w), &c->rank, all, sizeof c->rank);
    for (int r = 0; r < c->n_ranks && status == COF_OK; r++)
        CHECK(all[r] == r, "rank %d sent %d", r, all[r]);
    if (status == COF_OK)
        status = cof_team_barrier(cof_world_team(w));
    cof_world_destroy(w);
    return status;
}

static void join_as_thread(int rank, int n_ranks, const char *job, void *arg)
{
    (void)job;
    struct caller c = {arg, rank, n_ranks};
    CHECK_OK(join_and_leave(&c, COF_ENGINE_THREAD));
    CHECK_OK(join_and_leave(&c, COF_ENGINE_SHM));
    CHECK(c.meeting->n_calls[rank] == 2, "%d calls for two worlds", c.meeting->n_calls[rank]);
}

static void join_wrongly(int rank, int n_ranks, const char *job, void *arg)
{
    static const struct {
        cof_status status;
        const char *text;
    } wanted[N_FAULTS] = {
        [ORDER] = {COF_ERR_MISMATCH, "place 0 holds the record of rank 1; wanted rank order"},
        [HOST] = {COF_ERR_UNSUPPORTED, "rank 1 is on another host than rank 0"},
        [NAMESPACE] = {COF_ERR_UNSUPPORTED, "rank 1 is in another network namespace than rank 0"},
        [VERSION] = {COF_ERR_MISMATCH, "rank 1 has Cofuse version"},
        [USER] = {COF_ERR_MISMATCH, "rank 1 runs as user"},
        [EMPTY] = {COF_ERR_MISMATCH, "place 1 holds no record of a rank"},
    };
    (void)job;
    struct caller c = {arg, rank, n_ranks};
    cof_world_options o = options(&c, COF_ENGINE_THREAD);
    cof_world *w;
    enum fault fault = c.meeting->fault;
    if (fault == ERROR) {
        o.init_timeout = rank == 1 ? 30 : 1;
        CHECK_FAILS(cof_world_create(&o, &w), rank == 1 ? COF_ERR_SYSTEM : COF_ERR_TIMEOUT,
                    rank == 1 ? "options.allgather returned 7; wanted 0" : "did not arrive: 1");
    } else if (fault != VERSION || rank != 1) {
        CHECK_FAILS(cof_world_create(&o, &w), wanted[fault].status, wanted[fault].text);
    } else { /* its record is as it gave it: only the others see a difference */
        o.init_timeout = 0.2;
        CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_TIMEOUT, "rank 0 of job");
    }
    CHECK(c.meeting->n_calls[rank] == 1, "%d calls", c.meeting->n_calls[rank]);
}

/* What rank 1 does wrong. */
enum { BAD_ENGINE, RANK_BELOW, RANK_ABOVE, LATER_VERSION, NO_WORLD_OUT, N_BAD };

static cof_status create_wrongly(cof_world_options *o, int bad)
{
    cof_world *w;
    struct {
        cof_world_options known;
        uint64_t unknown;
    } later = {.unknown = 1};
    switch (bad) {
    case BAD_ENGINE: o->engine = (cof_engine)9; break;
    case RANK_BELOW: o->rank = -1; break;
    case RANK_ABOVE: o->rank = o->n_ranks; break;
    case NO_WORLD_OUT: return cof_world_create(o, NULL);
    default:
        later.known = *o;
        later.known.size = sizeof later;
        return cof_world_create(&later.known, &w);
    }
    return cof_world_create(o, &w);
}

/* A rank that breaks a rule is in the callback as the others are. */
static void one_is_bad(int rank, int n_ranks, const char *job, void *arg)
{
    static const char *const wanted[N_BAD] = {"options.engine = 9", "options.rank = -1",
                                              "options.rank = 3", "in a field that version",
                                              "world_out: NULL"};
    (void)job;
    struct caller c = {arg, rank, n_ranks};
    for (int bad = 0; bad < N_BAD; bad++) {
        cof_world_options o = options(&c, COF_ENGINE_THREAD);
        cof_world *w;
        if (rank == 1)
            CHECK_FAILS(create_wrongly(&o, bad), COF_ERR_INVALID, wanted[bad]);
        else
            CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_MISMATCH,
                        "rank 1 could not join (COF_ERR_INVALID)");
        CHECK(c.meeting->n_calls[rank] == bad + 1, "%d calls", c.meeting->n_calls[rank]);
    }
}

/* Exits with how many checks failed; the matrix product is chosen once in a process. */
static void as_process_without_gemm(struct caller *c)
{
    cof_world_options o = options(c, COF_ENGINE_SHM);
    cof_world *w;
    if (c->rank == 1) {
        setenv("COFUSE_GEMM", "onednn", 1);
        setenv("COFUSE_CPU_ISA", "scalar", 1);
        CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_UNSUPPORTED, "COFUSE_GEMM=onednn");
    } else {
        CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_MISMATCH,
                    "rank 1 could not join (COF_ERR_UNSUPPORTED)");
    }
    fflush(NULL);
    _exit(test_n_failed);
}

static void test_one_without_gemm(void)
{
    struct meeting *m = meeting_new(2, NONE);
    pid_t pid[2];
    fflush(NULL);
    for (int r = 0; r < 2; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            alarm(60); /* a rank that waits alone in the callback waits for ever */
            as_process_without_gemm(&(struct caller){m, r, 2});
        }
    }
    for (int r = 0; r < 2; r++) {
        int end = -1;
        waitpid(pid[r], &end, 0);
        CHECK(end == 0 && m->n_calls[r] == 1, "rank %d: %d, %d calls", r, end, m->n_calls[r]);
    }
    meeting_free(m);
}

static void test_as_processes(void)
{
    struct meeting *m = meeting_new(3, NONE);
    pid_t pid[3];
    fflush(NULL);
    for (int r = 0; r < 3; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            struct caller c = {m, r, 3};
            cof_status status = join_and_leave(&c, COF_ENGINE_SHM);
            if (status != COF_OK)
                fprintf(stderr, "rank %d: %s\n", r, cof_last_error());
            _exit(status != COF_OK || test_n_failed);
        }
    }
    for (int r = 0; r < 3; r++) {
        int end = -1;
        waitpid(pid[r], &end, 0);
        CHECK(end == 0 && m->n_calls[r] == 1, "rank %d: %d, %d calls", r, end, m->n_calls[r]);
    }
    meeting_free(m);
}

static void test_allgather(void)
{
    struct meeting *m = meeting_new(4, NONE);
    test_ranks(4, join_as_thread, m);
    meeting_free(m);
    for (enum fault fault = NONE + 1; fault < N_FAULTS; fault++) {
        m = meeting_new(2, fault);
        test_ranks(2, join_wrongly, m);
        meeting_free(m);
    }
    m = meeting_new(3, NONE);
    test_ranks(3, one_is_bad, m);
    meeting_free(m);
}

static void test_options(void)
{
    struct caller c = {NULL, 0, 0};
    cof_world *w = NULL;
    cof_world_options o = options(&c, COF_ENGINE_THREAD);
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.allgather with n_ranks = 0");
    o.n_ranks = 1; /* nobody to gather from: not called */
    CHECK_OK(cof_world_create(&o, &w));
    cof_world_destroy(w);
    /* A caller of the version before: its struct ends where the callback begins. */
    o.size = offsetof(cof_world_options, allgather);
    o.n_ranks = 2;
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "options.job is NULL");
}

/* ---- strangers ------------------------------------------------------------------------------ */

static socklen_t address_of(const char *job, struct sockaddr_un *address)
{
    uint64_t hash = cofi_hash_u64(COFI_HASH_SEED, (uint64_t)getuid());
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "cofuse-%016llx",
                     (unsigned long long)cofi_hash(hash, job, strlen(job)));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* A connection to where rank 0 of the job listens, as soon as it does. */
static int knock(const char *job)
{
    struct sockaddr_un address;
    socklen_t bytes = address_of(job, &address);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    for (int i = 0; i < 2000 && connect(fd, (struct sockaddr *)&address, bytes) != 0; i++)
        usleep(10000);
    return fd;
}

/* Hangs up is what rank 0 does: no byte comes. */
static bool is_refused(int fd)
{
    char byte;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 20000) == 1 && recv(fd, &byte, 1, 0) <= 0;
}

/* Strangers come before rank 1 does: silent ones, a wrong token, a wrong magic, half a hello. */
static void past_strangers(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    if (rank == 1) {
        int silent[8], talking[3];
        for (int i = 0; i < 8; i++)
            silent[i] = knock(job);
        struct cofi_hello hello = {.magic = COFI_HELLO_MAGIC, .token = 1, .rank = 1, .n_ranks = 2};
        for (int i = 0; i < 3; i++) {
            talking[i] = knock(job);
            hello.magic += i == 1;
            size_t bytes = i == 2 ? 20 : sizeof hello;
            CHECK(send(talking[i], &hello, bytes, MSG_NOSIGNAL) == (ssize_t)bytes, "send");
            CHECK(is_refused(talking[i]), "stranger %d got an answer", i);
            close(talking[i]);
        }
        int64_t begin = cofi_now();
        cof_world *w = test_world(rank, n_ranks, job, 10);
        CHECK(cofi_now() - begin < 8 * (int64_t)1e9, "silent strangers held the ranks up");
        CHECK_OK(cof_team_barrier(cof_world_team(w)));
        cof_world_destroy(w);
        for (int i = 0; i < 8; i++)
            close(silent[i]);
        return;
    }
    cof_world *w = test_world(rank, n_ranks, job, 10);
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}

/* ---- late ----------------------------------------------------------------------------------- */

struct late {
    atomic_bool has_failed; /* rank 1 has the verdict */
    atomic_bool was_told;   /* rank 2 got it too */
};

/* Rank 1 makes the world fail; rank 2 comes after that and still learns why. */
static void late_for_verdict(int rank, int n_ranks, const char *job, void *arg)
{
    struct late *late = arg;
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    cof_world *w;
    o.rank = rank;
    o.n_ranks = rank == 1 ? n_ranks + 1 : n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_THREAD;
    o.n_threads = 1;
    o.init_timeout = rank == 2 ? 1 : 30;
    while (rank == 2 && !late->has_failed)
        usleep(1000);
    cof_status status = cof_world_create(&o, &w);
    bool was_told = status == COF_ERR_MISMATCH &&
                    strstr(cof_last_error(), "rank 1 has n_ranks = 4");
    if (rank == 1)
        late->has_failed = true;
    if (rank == 2)
        late->was_told = was_told;
    else
        CHECK(was_told, "rank %d: %s", rank, cof_last_error());
}

/* Rank 2 has half a second, which a busy machine may take from it. */
static void test_late(void)
{
    struct late late = {false, false};
    for (int i = 0; i < 5 && !late.was_told; i++) {
        late.has_failed = false;
        test_ranks(3, late_for_verdict, &late);
    }
    CHECK(late.was_told, "a late rank never got the verdict");
}

/* ---- rank 0 twice --------------------------------------------------------------------------- */

static cof_world_options patient(int rank, int n_ranks, const char *job)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_THREAD;
    o.n_threads = 1;
    o.init_timeout = 60;
    return o;
}

/* Of three ranks; the third one of the job never comes, and need not. */
static void twice_rank0(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w;
    cof_world_options o = patient(rank == 2 ? 0 : rank, n_ranks, job);
    int64_t begin = cofi_now();
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_MISMATCH, "two ranks call themselves rank 0");
    CHECK(cofi_now() - begin < 30 * INT64_C(1000000000), "it came by the deadline");
}

/* A process that has the address and is no rank 0. */
static void address_taken(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w;
    struct sockaddr_un address;
    socklen_t bytes = address_of(job, &address);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(bind(fd, (struct sockaddr *)&address, bytes) == 0 && listen(fd, 4) == 0, "no address");
    cof_world_options o = patient(rank, n_ranks + 1, job);
    CHECK_FAILS(cof_world_create(&o, &w), COF_ERR_INVALID, "is in use by another process");
    close(fd);
}

int main(void)
{
    test_as_processes(); /* processes first: no thread has been started yet */
    test_one_without_gemm();
    test_allgather();
    test_options();
    test_ranks(2, past_strangers, NULL);
    test_late();
    test_ranks(3, twice_rank0, NULL);
    test_ranks(1, address_taken, NULL);
    return test_done();
}
