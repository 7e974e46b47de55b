/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Plans' calls as kernels make them (device_call.h): ready words and acks, plans that overlay each
 * other's payload, and epochs that come round. */
#include "device_model.h"

static_assert(sizeof(struct cofi_line) == COFI_LINE, "a line");
static_assert(sizeof(struct cofi_control) == 4 * COFI_LINE + COFI_CONTROL_TEXT_BYTES, "as in C");

enum { N_MAX = 48 };

/* The same on all ranks. */
static int size_of(uint64_t call)
{
    return 1 + static_cast<int>(mix(call) % N_MAX);
}

/* ---- calls one after the other -------------------------------------------------------------- */

static void one_plan(int n_ranks, bool is_push, bool is_private, uint32_t n_threads, int n_calls)
{
    model m({n_ranks, 1, is_private, 0, n_threads});
    plan p(&m, is_push);
    m.run([&](int r) {
        delays d = {uint64_t(r)};
        for (int i = 0; i < n_calls; i++)
            if (!p.call(r, size_of(uint64_t(i)), N_MAX, &d))
                break;
    });
    for (int r = 0; r < n_ranks; r++) {
        CHECK(p.n_made[size_t(r)] == uint64_t(n_calls), "rank %d made %llu calls", r,
              static_cast<unsigned long long>(p.n_made[size_t(r)]));
        CHECK(m.arena(r)->epoch == uint32_t(n_calls), "epoch %u", m.arena(r)->epoch);
    }
}

/* Three plans over the same bytes, in an order made up by the seed: runs of one plan too. */
static void overlay(int n_ranks, uint32_t n_threads, int n_calls)
{
    model m({n_ranks, 1, false, 0, n_threads});
    plan a(&m, false), b(&m, true), c(&m, false);
    plan *plans[] = {&a, &b, &c};
    m.run([&](int r) {
        delays d = {uint64_t(100 + r)};
        bool ok = true;
        for (int i = 0; i < n_calls && ok; i++) {
            plan *p = plans[mix(uint64_t(i) / 2) % 3];
            ok = p->call(r, size_of(uint64_t(i)), N_MAX, &d, uint32_t(i) % 2 + 1);
        }
        CHECK(ok, "rank %d stopped", r);
    });
}

/* What a rank is doing, as others read it. */
static void records()
{
    model m({2});
    plan p(&m, true);
    m.run([&](int r) {
        delays d = {0};
        p.call(r, 7, N_MAX, &d, 2);
    });
    const struct cofi_call_record &rec = m.control(1)->record;
    const uint64_t digest = p.call_of(1, 7, 2).digest;
    CHECK(rec.call == 1 && rec.detail == (2 | digest << 32) && rec.sizes[0] == 7,
          "call %llx detail %llx", static_cast<unsigned long long>(rec.call),
          static_cast<unsigned long long>(rec.detail));
    CHECK(memcmp(&rec.name[0], "push", 5) == 0, "name");
}

/* Read while it is written: the digest that is found with a call is that call's. */
static void records_while_written()
{
    enum { N_CALLS = IS_SLOW ? 20000 : 100000 };
    model m({2});
    plan p(&m, true);
    m.run([&](int r) {
        struct cofd_binding *b = p.binding(0);
        const struct cofi_call_record *rec = &m.control(0)->record;
        struct cofd_call c = {};
        uint32_t last = 0;
        for (uint32_t e = 1; r == 0 && e <= N_CALLS; e++) {
            b->epoch = e;
            b->digest = mix(e) & COFI_DIGEST_MASK;
            cofd_record_call(b, &c);
        }
        while (r == 1 && last < N_CALLS) {
            const uint64_t call = cofd_load_acquire_sys(&rec->call);
            const uint64_t detail = cofd_load_acquire_sys(&rec->detail);
            if (call == 0 || cofd_load_acquire_sys(&rec->call) != call)
                continue;
            last = uint32_t(call);
            if (detail >> 32 != (mix(last) & COFI_DIGEST_MASK)) {
                CHECK(false, "another call's digest with call %u", last);
                return;
            }
        }
    });
}

/* ---- where the epoch comes round ------------------------------------------------------------ */

static const uint32_t resets[] = {(UINT32_C(1) << 30) + 1, (UINT32_C(1) << 31) + 1,
                                  (UINT32_C(3) << 30) + 1, 1};

static uint32_t after(uint32_t epoch, unsigned n)
{
    const uint32_t later = epoch + n;
    return later < epoch ? later + 1 : later; /* epoch 0 is left out */
}

/* From a few before a reset to a few after it, and seldom of a second plan. */
static void wrap(int n_ranks, bool is_push, uint32_t reset, uint32_t n_threads)
{
    const uint32_t first = reset == 1 ? UINT32_MAX - 4 : reset - 5;
    model m({n_ranks, first, false, 0, n_threads});
    plan often(&m, is_push), seldom(&m, !is_push);
    m.run([&](int r) {
        delays d = {uint64_t(200 + r)};
        for (unsigned i = 0; i < 14; i++) {
            plan *p = i == 2 || i == 10 ? &seldom : &often;
            if (!p->call(r, size_of(i), N_MAX, &d))
                break;
            CHECK(p->binding(r)->epoch == after(first, i), "call %u has epoch %u", i,
                  p->binding(r)->epoch);
        }
    });
    for (int r = 0; r < n_ranks; r++)
        CHECK(seldom.n_made[size_t(r)] == 2 && often.n_made[size_t(r)] == 12, "rank %d", r);
}

/* As after as many calls of the last plan as that takes; the ranks stand still. */
static void jump(model *m, int r, uint32_t epoch, pthread_barrier_t *barrier)
{
    pthread_barrier_wait(barrier);
    m->arena(r)->epoch = epoch;
    pthread_barrier_wait(barrier);
}

/* All the way round: the seldom used plan comes again at the epoch of its last call, where words
 * that were not reset would look like this call's. One rank publishes late. */
static void lap(int n_ranks, bool is_push)
{
    model m({n_ranks});
    plan often(&m, is_push), seldom(&m, is_push);
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, nullptr, unsigned(n_ranks));
    m.run([&](int r) {
        delays d = {uint64_t(300 + r)};
        bool ok = true;
        auto calls = [&](plan *p, int n) {
            for (int i = 0; i < n && ok; i++)
                ok = p->call(r, size_of(p->n_made[size_t(r)]), N_MAX, &d);
        };
        calls(&often, 6);
        calls(&seldom, 1);
        calls(&often, 2);
        for (uint32_t reset : resets) {
            jump(&m, r, reset - 2 - (reset == 1), &barrier);
            calls(&often, 4);
        }
        calls(&often, 3);
        if (r == n_ranks - 1)
            sleep_us(20000);
        calls(&seldom, 1);
        CHECK(ok && seldom.binding(r)->epoch == 7, "rank %d: epoch %u, wanted 7 again", r,
              seldom.binding(r)->epoch);
        calls(&often, 3);
        CHECK(ok, "rank %d ended at epoch %u", r, m.arena(r)->epoch);
    });
    pthread_barrier_destroy(&barrier);
}

/* A plan that is made when the epoch is beyond 2^31, where an ack of 0 is one to come. */
static void late_plan(int n_ranks, bool is_push)
{
    model m({n_ranks});
    plan early(&m, is_push);
    auto calls = [&](plan *p) {
        m.run([&](int r) {
            delays d = {uint64_t(400 + r)};
            for (int i = 0; i < 20 && p->call(r, size_of(uint64_t(i)), N_MAX, &d); i++)
                if (r == n_ranks - 1)
                    p->ack_late_us[size_t(r)] = 300;
        });
    };
    calls(&early);
    for (int r = 0; r < n_ranks; r++)
        m.arena(r)->epoch = UINT32_C(3) << 30 | 99;
    plan late(&m, is_push);
    calls(&late);
    for (int r = 0; r < n_ranks; r++)
        CHECK(late.n_made[size_t(r)] == 20, "rank %d", r);
}

int main()
{
    records();
    records_while_written();
    for (int n = 1; n <= MAX_RANKS; n++) {
        const int n_calls = IS_SLOW ? 1000 : 3000;
        for (int form = 0; form < 4; form++)
            one_plan(n, form & 1, form & 2, 1, n_calls);
        overlay(n, 1, n_calls);
        for (uint32_t reset : resets)
            for (int form = 0; form < 4; form++)
                wrap(n, form & 1, reset, form & 2 ? 3 : 1);
        lap(n, false);
        lap(n, true);
        late_plan(n, false);
        late_plan(n, true);
        /* Blocks of more and of fewer threads than there are others to signal. */
        one_plan(n, true, true, 2, n_calls / 10);
        overlay(n, 2, n_calls / 10);
        overlay(n, 4, n_calls / 20);
    }
    return test_done();
}
