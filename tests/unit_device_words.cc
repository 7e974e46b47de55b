/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Words beside those of calls: counts, as cof_signal and cof_wait keep them on a device
 * (symm/kernels_cuda.cu, one thread each), and tagged words (tagged.h). */
#include "device_model.h"

/* ---- counts --------------------------------------------------------------------------------- */

/* cofk_runtime_signal */
static void signal_count(struct cofd_arena *a, int peer, int word)
{
    if (cofd_is_dead(a))
        return;
    const uint64_t count = ++a->sent[word * a->n_ranks + peer];
    struct cofi_line *line = cofd_line(a, peer, a->user_words_offset, uint32_t(word), a->rank);
    cofd_store_release_sys(&line->value, count);
}

/* cofk_runtime_wait */
static bool wait_count(struct cofd_arena *a, int peer, int word, const struct cofd_wait_options *o)
{
    if (cofd_is_dead(a))
        return false;
    const uint64_t count = ++a->awaited[word * a->n_ranks + peer];
    const struct cofi_line *line =
        cofd_line(a, a->rank, a->user_words_offset, uint32_t(word), peer);
    const struct cofd_wait wait = {a, nullptr, peer, COFI_COUNT, &line->value, count, o};
    return cofd_wait(&wait);
}

enum { FULL, EMPTY, N_WORDS, N_SLOTS = 2, ROW = 33 };

/* Each rank puts rows into two slots of the next one, which tells when a slot is empty: signals run
 * ahead of waits. Rounds are as a graph of two puts replays them. */
static void ring(int n_ranks, int n_rounds)
{
    model m({n_ranks, 1, false, N_WORDS});
    m.run([&](int r) {
        struct cofd_arena *a = m.arena(r);
        const struct cofd_wait_options o = wait_options(BREAK ? 2 : 30, "cof_wait");
        const int to = (r + 1) % n_ranks, from = (r + n_ranks - 1) % n_ranks;
        delays d = {uint64_t(r)};
        int n_bad = 0;
        bool ok = true;
        for (int i = 0; i < n_rounds * N_SLOTS && ok; i++) {
            uint32_t *out = reinterpret_cast<uint32_t *>(m.data(to)) + i % N_SLOTS * ROW;
            const uint32_t *in = reinterpret_cast<uint32_t *>(m.data(r)) + i % N_SLOTS * ROW;
            if (i >= N_SLOTS && BREAK != NO_CREDIT)
                ok = wait_count(a, to, EMPTY, &o);
            if (BREAK == COUNT_BEFORE_DATA)
                signal_count(a, to, FULL);
            for (int k = 0; k < ROW; k++)
                out[k] = uint32_t(mix(uint64_t(i * 8 + r)) + uint64_t(k));
            if (BREAK != COUNT_BEFORE_DATA)
                signal_count(a, to, FULL);
            d.maybe(32, 200);
            ok = ok && wait_count(a, from, FULL, &o);
            for (int k = 0; k < ROW; k++)
                n_bad += in[k] != uint32_t(mix(uint64_t(i * 8 + from)) + uint64_t(k));
            d.maybe(32, 200);
            signal_count(a, from, EMPTY);
        }
        CHECK(ok && n_bad == 0, "rank %d: %d wrong", r, n_bad);
    });
}

/* A wait of no call ends like one: by the deadline, with a record that names none. */
static void nobody_signals()
{
    model m({2, 1, false, N_WORDS});
    const struct cofd_wait_options o = wait_options(0.2, "cof_wait");
    m.run([&](int r) {
        if (r == 0)
            signal_count(m.arena(0), 1, FULL);
        const bool ok = wait_count(m.arena(r), 1 - r, FULL, &o);
        CHECK(ok == (r == 1), "rank %d: %d", r, ok);
        if (r == 1)
            CHECK(!wait_count(m.arena(1), 0, FULL, &o), "a second signal");
    });
    const struct cofi_fault &f = m.control(0)->fault;
    if (f.status != 0) /* else rank 1 was first */
        CHECK(f.kind == COFI_COUNT && f.want == 1 && f.seen == 0 && f.name[0] == 0, "record");
    CHECK(m.control(0)->poison.value != 0 && m.control(1)->poison.value != 0, "poison");
    const uint64_t sent = m.ranks[0].sent[FULL * 2 + 1];
    signal_count(m.arena(0), 1, FULL);
    CHECK(m.ranks[0].sent[FULL * 2 + 1] == sent, "a dead arena signals");
}

/* ---- tagged words --------------------------------------------------------------------------- */

enum { PAIRS_MAX = 9 };

static void store_pair(uint64_t *at, const uint32_t payload[2], uint32_t epoch)
{
    if (BREAK != TAG_BEFORE_PAYLOAD) {
        cofd_tagged_store2(at, payload, epoch);
        return;
    }
    uint32_t *halves = reinterpret_cast<uint32_t *>(at); /* little-endian: payload, tag */
    __atomic_store_n(&halves[1], epoch, __ATOMIC_RELAXED);
    __atomic_store_n(&halves[3], epoch, __ATOMIC_RELAXED);
    __atomic_store_n(&halves[0], payload[0], __ATOMIC_RELAXED);
    __atomic_store_n(&halves[2], payload[1], __ATOMIC_RELAXED);
}

static uint32_t number(int writer, uint32_t epoch, int i)
{
    return uint32_t(mix(uint64_t(writer) << 40 | uint64_t(epoch) << 8 | uint64_t(i)));
}

/* Numbers for all others in each call, without an ack: who has finished call n has seen that all
 * have begun it, hence left n-1; so two halves by the epoch's parity are enough. An odd count
 * leaves the second word of the last pair unused. */
static void exchange(int n_ranks, int n_rounds)
{
    model m({n_ranks, 1, true});
    plan p(&m, true);
    auto slot = [&](int reader, int writer, uint32_t epoch) {
        const int half = BREAK == ONE_HALF ? 0 : int(epoch & 1);
        return reinterpret_cast<uint64_t *>(m.data(reader)) +
               (half * n_ranks + writer) * PAIRS_MAX * 2;
    };
    m.run([&](int r) {
        struct cofd_binding *b = p.binding(r);
        const struct cofd_wait_options o = wait_options(BREAK ? 2 : 30, "tagged");
        delays d = {uint64_t(r)};
        int n_bad = 0;
        bool ok = true;
        for (int i = 0; i < n_rounds && ok; i++) {
            const int n = 1 + int(mix(uint64_t(i)) % (2 * PAIRS_MAX));
            const struct cofd_call c = p.call_of(r, n);
            ok = cofd_call_begin(b, &c);
            d.maybe(4096, 200);
            for (int k = 1; k < n_ranks; k++)
                for (int j = 0; j < n; j += 2) {
                    const uint32_t pair[2] = {number(r, b->epoch, j),
                                              j + 1 < n ? number(r, b->epoch, j + 1) : 0};
                    const int to = (r + k) % n_ranks;
                    store_pair(slot(to, r, b->epoch) + j, pair, b->epoch);
                }
            for (int k = 1; k < n_ranks; k++)
                for (int j = 0; j < n && ok; j += 2) {
                    const int from = (r + k) % n_ranks;
                    uint32_t pair[2];
                    ok = cofd_tagged_wait2(b, from, slot(r, from, b->epoch) + j, pair, &o);
                    n_bad += ok && pair[0] != number(from, b->epoch, j);
                    n_bad += ok && j + 1 < n && pair[1] != number(from, b->epoch, j + 1);
                }
        }
        CHECK(ok && n_bad == 0, "rank %d: %d wrong, epoch %u", r, n_bad, b->epoch);
    });
}

/* A pair of which one word has come is not there; the record tells the tag that is missing. */
static void half_a_pair()
{
    model m({2});
    plan p(&m, true);
    struct cofd_binding *b = p.binding(0);
    b->epoch = 3;
    uint64_t *at = reinterpret_cast<uint64_t *>(m.data(0));
    cofd_tagged_store(at, 5, 3);
    cofd_tagged_store(at + 1, 6, 2);
    uint32_t pair[2], seen;
    CHECK(!cofd_tagged_load2(at, 3, pair, &seen) && seen == 2, "seen %u", seen);
    const struct cofd_wait_options o = wait_options(0.01, "half");
    CHECK(!cofd_tagged_wait2(b, 1, at, pair, &o), "half a pair");
    const struct cofi_fault &f = m.control(0)->fault;
    CHECK(f.want == 3 && f.seen == 2 && f.writer == 1, "seen %llu",
          static_cast<unsigned long long>(f.seen));
    cofd_tagged_store(at + 1, 6, 3);
    CHECK(cofd_tagged_load2(at, 3, pair, &seen) && pair[0] == 5 && pair[1] == 6, "the pair");
}

int main()
{
    half_a_pair();
    nobody_signals();
    for (int n = 1; n <= MAX_RANKS; n++)
        ring(n, IS_SLOW ? 1000 : 4000);
    exchange(2, IS_SLOW ? 20000 : 100000);
    exchange(3, IS_SLOW ? 2000 : 10000);
    return test_done();
}
