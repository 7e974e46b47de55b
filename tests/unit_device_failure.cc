/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Waits of devices that end badly (spin.h): every rank ends, with the poison and the record from
 * which the host makes its text, and nobody reads what a failed call never wrote. */
#include "device_model.h"

enum { N_MAX = 16 };

static int status_of(uint64_t word)
{
    return static_cast<int16_t>(word & 0xffff);
}

static bool has_step(const struct cofi_fault &f, const char *step)
{
    char text[sizeof f.step + 1] = {};
    memcpy(text, f.step, sizeof f.step);
    return strcmp(text, step) == 0;
}

/* Until the arena is dead, or `most` calls. */
static void calls(plan *p, int r, int most, int n, delays *d)
{
    for (int i = 0; i < most; i++)
        if (!p->call(r, n, N_MAX, d))
            return;
}

static double seconds_since(uint64_t begin)
{
    return static_cast<double>(cofd_now_ns() - begin) * 1e-9;
}

/* All ranks are told, and whoever is named has left a record of this status. */
static void check_ends(model *m, int status, uint64_t begin, double most)
{
    CHECK(seconds_since(begin) < most, "took %g s", seconds_since(begin));
    for (int r = 0; r < m->spec.n_ranks; r++) {
        const uint64_t code = m->control(r)->poison.value;
        const int by = static_cast<int>(code >> 32) - 1;
        CHECK(status_of(code) == status && (code & COFI_POISON_FAULT) != 0,
              "rank %d: poison %llx, wanted %d", r, static_cast<unsigned long long>(code), status);
        CHECK(m->arena(r)->dead != 0, "rank %d lives", r);
        CHECK(by >= 0 && by < m->spec.n_ranks && status_of(m->control(by)->fault.status) == status,
              "named: rank %d", by);
    }
}

/* Nothing happens any more: no epoch, no word. */
static void check_silent(model *m, plan *p)
{
    const size_t bytes = m->next_words;
    for (int r = 0; r < m->spec.n_ranks; r++) {
        std::vector<char> before(m->ranks[size_t(r)].slab.at, m->ranks[size_t(r)].slab.at + bytes);
        const uint32_t epoch = m->arena(r)->epoch;
        const struct cofi_fault fault = m->control(r)->fault;
        delays d = {0};
        for (int q = 0; q < m->spec.n_ranks; q++)
            CHECK(!p->call(q, 1, N_MAX, &d), "rank %d goes on", q);
        CHECK(m->arena(r)->epoch == epoch, "rank %d is at epoch %u", r, m->arena(r)->epoch);
        CHECK(memcmp(before.data(), m->ranks[size_t(r)].slab.at, bytes) == 0, "rank %d", r);
        CHECK(memcmp(&fault, &m->control(r)->fault, sizeof fault) == 0, "rank %d", r);
    }
}

/* ---- ranks that disagree -------------------------------------------------------------------- */

/* The last rank has another number of rows in call 5. */
static void sizes_differ(int n_ranks, uint32_t n_threads)
{
    model m({n_ranks, 1, false, 0, n_threads});
    plan p(&m, true);
    const uint64_t begin = cofd_now_ns();
    m.run([&](int r) {
        delays d = {uint64_t(r)};
        calls(&p, r, 4, 3, &d);
        const bool ok = p.call(r, 3 + (r == n_ranks - 1), N_MAX, &d);
        /* A rank that met no disagreeing one is told in the next call. */
        CHECK(!ok || n_ranks > 2, "rank %d agrees", r);
        calls(&p, r, 10000, 3, &d);
    });
    check_ends(&m, COFD_ERR_MISMATCH, begin, 10);
    check_silent(&m, &p);
    for (int r = 0; r < n_ranks; r++) {
        const struct cofi_fault &f = m.control(r)->fault;
        if (f.status == 0) /* told by another */
            continue;
        CHECK(f.want == 5 && f.direction == 1 && f.kind == COFI_READY && has_step(f, "ready"),
              "rank %d: want %llu kind %llu", r, static_cast<unsigned long long>(f.want),
              static_cast<unsigned long long>(f.kind));
        CHECK(memcmp(f.name, "push", 5) == 0, "name");
        CHECK(f.digest == p.call_of(r, 3 + (r == n_ranks - 1)).digest, "digest");
    }
}

/* Rank 0 calls another plan: the words that are waited for are never stored. */
static void orders_differ(int n_ranks)
{
    model m({n_ranks});
    plan a(&m, true), b(&m, false);
    const uint64_t begin = cofd_now_ns();
    m.run([&](int r) {
        delays d = {uint64_t(r)};
        calls(&a, r, 3, 3, &d);
        calls(r == 0 ? &b : &a, r, 10000, 3, &d);
    });
    check_ends(&m, COFD_ERR_MISMATCH, begin, 10);
    check_silent(&m, &a);
}

/* ---- ranks that do not come ----------------------------------------------------------------- */

static void late(int n_ranks, uint32_t n_threads)
{
    model m({n_ranks, 1, false, 0, n_threads});
    plan p(&m, false, 0.2);
    const uint64_t begin = cofd_now_ns();
    m.run([&](int r) {
        delays d = {uint64_t(r)};
        const uint64_t *poison = &m.control(0)->poison.value;
        for (int ms = 0; r == 0 && ms < 40000 && cofd_load_acquire_sys(poison) == 0; ms++)
            sleep_us(1000);
        calls(&p, r, 1000, 5, &d);
    });
    CHECK(seconds_since(begin) > 0.2, "%g s", seconds_since(begin));
    check_ends(&m, COFD_ERR_TIMEOUT, begin, 50);
    check_silent(&m, &p);
    const int by = static_cast<int>(m.control(0)->poison.value >> 32) - 1;
    const struct cofi_fault &f = m.control(by)->fault;
    CHECK(f.kind == COFI_READY && f.writer == 0 && f.want == 1 && f.seen == 0, "writer %llu",
          static_cast<unsigned long long>(f.writer));
    CHECK(f.timeout_ns == 200000000 && f.direction == 1 && f.digest == p.call_of(by, 5).digest,
          "timeout %llu", static_cast<unsigned long long>(f.timeout_ns));
    CHECK(memcmp(f.name, "pull", 5) == 0 && has_step(f, "ready"), "name, step");
}

/* The end of the team is known to rank 0 alone. */
static void team_ended(int n_ranks)
{
    model m({n_ranks});
    plan p(&m, true);
    const uint64_t begin = cofd_now_ns();
    m.run([&](int r) {
        delays d = {uint64_t(r)};
        calls(&p, r, 10, 5, &d);
        if (r == 0)
            cofd_store_release_sys(&m.ranks[0].abort_word,
                                   COFD_STATUS_BITS(COFD_ERR_TIMEOUT) | uint64_t(n_ranks) << 32);
        if (r < n_ranks - 1)
            calls(&p, r, 10000, 5, &d);
    });
    m.arena(n_ranks - 1)->dead = m.control(n_ranks - 1)->poison.value; /* as its next look would */
    check_ends(&m, COFD_ERR_PEER_DEAD, begin, 10);
}

/* Who only ends a call, and waits for nothing more, looks at the poison too; and passes it on where
 * copies follow, for who failed may not have come to tell the others. */
static void told_at_the_end()
{
    model m({3});
    CHECK(!cofd_is_told(m.arena(1)), "nobody failed");
    m.control(1)->poison.value = COFD_STATUS_BITS(COFD_ERR_TIMEOUT) | UINT64_C(1) << 32;
    CHECK(cofd_is_told(m.arena(1)) && cofd_is_dead(m.arena(1)), "not told");
    CHECK(m.control(1)->fault.status == 0 && m.control(0)->poison.value == 0, "a failure again");
    cofd_pass_on(m.arena(1));
    for (int r : {0, 2})
        CHECK(m.control(r)->poison.value == m.control(1)->poison.value && !cofd_is_dead(m.arena(r)),
              "rank %d: not passed on", r);
}

static void peer_left(int n_ranks)
{
    model m({n_ranks});
    plan p(&m, true);
    const uint64_t begin = cofd_now_ns();
    m.run([&](int r) {
        delays d = {uint64_t(r)};
        calls(&p, r, 10, 5, &d);
        if (r == n_ranks - 1) /* rank 0 alone knows */
            __atomic_store_n(&m.ranks[0].peer_state[size_t(r)], COFD_PEER_LEFT, __ATOMIC_RELEASE);
        else
            calls(&p, r, 10000, 5, &d);
    });
    m.arena(n_ranks - 1)->dead = m.control(n_ranks - 1)->poison.value;
    check_ends(&m, COFD_ERR_PEER_DEAD, begin, 10);
}

/* ---- one wait, step by step ----------------------------------------------------------------- */

struct one_wait {
    model m{{2}};
    plan p{&m, true};
    struct cofd_wait_options options = wait_options(0.2, "one");
    struct cofd_patience patience = {0, 0, 0};
    struct cofd_wait wait = {m.arena(0), p.binding(0), 1, COFI_READY,
                             &cofd_line(m.arena(0), 0, p.bindings[0].words_offset, READY_WORD, 1)
                                  ->value,
                             1, &options};
    one_wait() { p.bindings[0].epoch = 1; }
    /* Looks that find nothing, up to one at which the wait looks around. */
    bool looks_around()
    {
        do
            if (!cofd_wait_goes_on(&wait, &patience, 0))
                return false;
        while (patience.looks == 1 || (patience.looks - 1) % COFD_LOOKS != 0);
        return true;
    }
};

/* The peer's word comes after a look at it, and the peer leaves before the look at who left. */
static void word_of_one_who_left()
{
    one_wait w;
    __atomic_store_n(&w.m.ranks[0].peer_state[1], uint32_t(COFD_PEER_LEFT), __ATOMIC_RELEASE);
    CHECK(w.looks_around(), "failed before one more look at the word");
    CHECK(!cofd_wait_goes_on(&w.wait, &w.patience, 0), "waits for one who left");
    CHECK(status_of(w.m.control(0)->fault.status) == COFD_ERR_PEER_DEAD, "status");
}

/* Likewise where the deadline passed while this rank had no turn on its device. */
static void word_behind_the_deadline()
{
    one_wait w;
    w.patience.begin = cofd_now_ns() - UINT64_C(1000000000);
    CHECK(w.looks_around(), "failed before one more look at the word");
    CHECK(!cofd_wait_goes_on(&w.wait, &w.patience, 0), "waits after its deadline");
    CHECK(status_of(w.m.control(1)->poison.value) == COFD_ERR_TIMEOUT, "poison");
}

/* The count of looks comes round; the deadline does not begin anew. */
static void many_looks()
{
    one_wait w;
    CHECK(cofd_wait_goes_on(&w.wait, &w.patience, 0), "first look");
    const uint64_t begin = w.patience.begin;
    w.patience.looks = UINT32_MAX - 3;
    for (int i = 0; i < 10; i++)
        CHECK(cofd_wait_goes_on(&w.wait, &w.patience, 0), "look %d", i);
    CHECK(begin != 0 && w.patience.begin == begin, "the deadline began anew");
}

/* ---- several at once ------------------------------------------------------------------------ */

/* Blocks of one rank wait for all its peers and fail at the same time: one of them tells. */
static void blocks_fail_together()
{
    enum { N_BLOCKS = 4 };
    for (int i = 0; i < (IS_SLOW ? 20 : 40); i++) {
        model m({3});
        plan p(&m, true, 0.001);
        std::atomic<int> n_failed{0};
        m.run([&](int r) {
            struct cofd_binding *b = p.binding(r);
            const struct cofd_call c = p.call_of(r, 3);
            const struct cofd_wait_options o = wait_options(0.001, "block");
            CHECK(cofd_call_begin(b, &c), "rank %d", r);
            std::vector<std::thread> blocks;
            for (int k = 0; k < N_BLOCKS; k++)
                blocks.emplace_back([&, k] {
                    n_failed += !cofd_call_wait_ready(b, (r + 1 + k % 2) % 3, READY_WORD, &o);
                });
            for (std::thread &t : blocks)
                t.join();
        });
        CHECK(n_failed == 3 * N_BLOCKS, "%d", n_failed.load());
        int n_records = 0;
        for (int r = 0; r < 3; r++) {
            const struct cofi_fault &f = m.control(r)->fault;
            CHECK(m.control(r)->poison.value != 0, "rank %d was not told", r);
            if (f.status == 0)
                continue;
            n_records++;
            CHECK(status_of(f.status) == COFD_ERR_TIMEOUT, "record of rank %d", r);
            CHECK(f.writer < 3 && f.writer != uint64_t(r), "writer in the record of rank %d", r);
        }
        CHECK(n_records >= 1, "no record");
    }
}

/* Poison first, release second: a rank runs out of patience with a slow reader, before it has
 * written anew. plan::call compares every number that is read. */
static void impatient(int n_ranks, uint64_t seed)
{
    model m({n_ranks});
    plan p(&m, seed & 1);
    const int who = static_cast<int>(seed % uint64_t(n_ranks));
    m.run([&](int r) {
        delays d = {seed * 16 + uint64_t(r)};
        calls(&p, r, 3, 9, &d);
        if (r == (who + 1) % n_ranks)
            p.ack_late_us[size_t(r)] = 30000;
        calls(&p, r, 1, 9, &d);
        if (r == who)
            p.seconds[size_t(r)] = 1e-9;
        calls(&p, r, 10000, 9, &d);
    });
    for (int r = 0; r < n_ranks; r++)
        CHECK(m.control(r)->poison.value != 0 && m.arena(r)->dead != 0, "rank %d was not told", r);
}

int main()
{
    word_of_one_who_left();
    word_behind_the_deadline();
    many_looks();
    told_at_the_end();
    for (int n = 2; n <= MAX_RANKS; n++) {
        sizes_differ(n, 1);
        sizes_differ(n, 3);
        orders_differ(n);
        late(n, 1);
        late(n, 2);
        team_ended(n);
        peer_left(n);
        for (uint64_t seed = 0; seed < (IS_SLOW ? 6 : 12); seed++)
            impatient(n, seed);
    }
    blocks_fail_together();
    return test_done();
}
