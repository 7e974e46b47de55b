/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Calls that one kernel of several blocks makes (grid_call.h), whose rows carry their own signal
 * (lines.h), without acks: ranks run ahead of each other as far as the protocol lets them. A block
 * is one thread; a barrier of a rank's blocks stands for the end of its kernel. */
#include <memory>

#include "device_model.h"

static thread_local uint32_t own_grid_block, own_grid_size = 1;

static inline uint32_t model_grid_block()
{
    return own_grid_block;
}

static inline uint32_t model_grid_size()
{
    return own_grid_size;
}

#define cofd_block model_grid_block
#define cofd_n_blocks model_grid_size
#include "device/grid_call.h"
#include "device/lines.h"

enum { MAX_ROWS = 5, ROW_BYTES = 200 };

template <class Code> struct grid_plan {
    model *m;
    int n_blocks;
    uint64_t ordinal, tagged;
    std::vector<struct cofd_binding> bindings;
    std::vector<pthread_barrier_t> kernel_end;
    std::vector<std::atomic<bool>> has_failed; /* on any block of the rank */
    double seconds = BREAK ? 2 : 10;

    grid_plan(model *on, int blocks)
        : m(on), n_blocks(blocks), ordinal(on->n_plans++), tagged(ordinal * half_bytes() * 2),
          bindings(size_t(on->spec.n_ranks)), kernel_end(bindings.size()),
          has_failed(bindings.size())
    {
        for (int r = 0; r < m->spec.n_ranks; r++) {
            struct cofd_binding &b = bindings[size_t(r)];
            b = {};
            b.arena = m->arena(r);
            b.words_offset = m->next_words;
            b.ordinal = ordinal;
            memcpy(b.name, "grid", 4);
            b.n_purposes = COFD_GRID_PURPOSES;
            b.tagged_offset = m->data_offset + tagged;
            b.tagged_bytes = half_bytes() * 2;
            b.tagged_wait = wait_options(seconds, "rows");
            m->ranks[size_t(r)].bindings[ordinal] = reinterpret_cast<uintptr_t>(&b);
            pthread_barrier_init(&kernel_end[size_t(r)], nullptr, unsigned(blocks));
        }
        m->next_words += sizeof(struct cofi_line) * COFD_GRID_PURPOSES * size_t(m->spec.n_ranks);
    }
    grid_plan(const grid_plan &) = delete;

    uint64_t row_bytes() const { return Code::n_slots(ROW_BYTES) * 16; }
    uint64_t half_bytes() const { return row_bytes() * MAX_ROWS * uint64_t(m->spec.n_ranks); }

    char *place(int reader, int writer, uint32_t epoch, int row) const
    {
        const uint64_t half = BREAK == ONE_HALF ? 0 : epoch & 1;
        return m->data(reader) + tagged + half * half_bytes() +
               uint64_t(writer * MAX_ROWS + row) * row_bytes();
    }

    uint32_t number(int writer, uint32_t epoch, int row, uint32_t slot) const
    {
        return uint32_t(mix(mix(uint64_t(writer) << 32 | epoch) + uint64_t(row) * 64 + slot));
    }

    void push(int r, const struct cofd_grid *g, int row) const
    {
        const uint32_t epoch = g->epoch;
        for (uint32_t slot = 0; slot < Code::n_slots(ROW_BYTES); slot++) {
            struct cofd_slot s = {{number(r, epoch, row, slot), ~slot, 7, 9}};
            for (int i = 1; i < m->spec.n_ranks; i++)
                Code::store(place((r + i) % m->spec.n_ranks, r, epoch, row), slot, &s,
                            cofd_grid_tag(g));
        }
    }

    bool take(const struct cofd_grid *g, int r, int writer, int row, int *n_bad) const
    {
        const char *at = place(r, writer, g->epoch, row);
        for (uint32_t slot = 0; slot < Code::n_slots(ROW_BYTES); slot++) {
            struct cofd_grid_wait wait = {writer, 0, {0, 0, 0}};
            struct cofd_raw_slot raw = Code::look(at, slot);
            for (; !Code::has_arrived(raw, slot, cofd_grid_tag(g)); raw = Code::look(at, slot)) {
                wait.seen = Code::tag_in(raw, slot, cofd_grid_tag(g));
                if (!cofd_grid_goes_on(g, &wait))
                    return false;
            }
            const struct cofd_slot s = Code::data(raw, slot);
            *n_bad += s.word[0] != number(writer, g->epoch, row, slot) || s.word[1] != ~slot;
        }
        return true;
    }

    /* One block's part of a call with n rows. */
    bool call(int r, int n, delays *d)
    {
        const struct cofd_wait_options announced = wait_options(seconds, "announced");
        struct cofd_grid_call c = {};
        c.arena = m->arena(r);
        c.binding = &bindings[size_t(r)];
        for (int i = 0; i < m->spec.n_ranks; i++)
            c.slab[i] = m->arena(r)->base[i];
        c.words_offset = c.binding->words_offset;
        c.ordinal = ordinal;
        c.rank = r;
        c.n_ranks = m->spec.n_ranks;
        c.is_private = m->arena(r)->is_private != 0;
        c.announces = !Code::has_digest;
        c.call.digest = mix(mix(ordinal) + uint64_t(n)) & COFI_DIGEST_MASK;
        c.call.sizes[0] = uint64_t(n);
        c.call.timeout_ns = announced.timeout_ns;
        struct cofd_grid g = {&c, 0};
        bool ok = cofd_grid_begin(&g);
        int n_bad = 0;
        if (ok && cofd_block() == 0 && c.announces)
            cofd_grid_announce(&g);
        for (int row = int(cofd_block()); ok && row < n; row += n_blocks)
            push(r, &g, row);
        if (ok)
            cofd_grid_arrive(&g);
        d->maybe(16, 300);
        for (int row = int(cofd_block()); row < n; row += n_blocks)
            for (int i = 1; ok && i < m->spec.n_ranks; i++)
                ok = take(&g, r, (r + i) % m->spec.n_ranks, row, &n_bad);
        d->maybe(16, 300);
        if (ok && cofd_block() == 0 && c.announces && BREAK != NO_READY_WAIT)
            ok = cofd_grid_wait_announced(g);
        if (ok)
            cofd_grid_end(&g);
        CHECK(n_bad == 0, "rank %d, block %u, epoch %u: %d slots of %d rows", r, cofd_block(),
              g.epoch, n_bad, n);
        if (!ok)
            has_failed[size_t(r)] = true;
        pthread_barrier_wait(&kernel_end[size_t(r)]);
        ok = !has_failed[size_t(r)];
        pthread_barrier_wait(&kernel_end[size_t(r)]);
        return ok;
    }
};

/* fn on every block of every rank. */
static void run_blocks(int n_ranks, int n_blocks, const std::function<void(int)> &fn)
{
    std::vector<std::thread> threads;
    for (int r = 0; r < n_ranks; r++)
        for (int block = 0; block < n_blocks; block++)
            threads.emplace_back([=, &fn] {
                own_grid_block = uint32_t(block);
                own_grid_size = uint32_t(n_blocks);
                fn(r);
            });
    for (std::thread &t : threads)
        t.join();
}

/* T changes up and down; plans take turns where there are two. */
template <class Code>
static void calls(int n_ranks, int n_blocks, int n_plans, uint32_t first_epoch, int n_calls)
{
    model m({n_ranks, first_epoch, n_plans == 1});
    std::vector<std::unique_ptr<grid_plan<Code>>> plans;
    for (int i = 0; i < n_plans; i++)
        plans.emplace_back(new grid_plan<Code>(&m, n_blocks));
    run_blocks(n_ranks, n_blocks, [&](int r) {
        delays d = {uint64_t(r * 16) + cofd_block()};
        bool ok = true;
        int i = 0;
        for (; i < n_calls && ok; i++) {
            const uint64_t x = mix(uint64_t(i));
            ok = plans[x % uint64_t(n_plans)]->call(r, 1 + int(x / 4 % MAX_ROWS), &d);
        }
        CHECK(ok, "rank %d, block %u: call %d failed", r, cofd_block(), i - 1);
    });
}

/* The rank with fewer rows, and the one that waits for more, both fail; nobody waits for long. */
template <class Code> static void sizes_differ(int n_more)
{
    model m({2, 1, true});
    grid_plan<Code> p(&m, 2);
    run_blocks(2, 2, [&](int r) {
        delays d = {uint64_t(r)};
        bool ok = p.call(r, 3, &d);
        CHECK(ok, "the first call");
        p.call(r, r == 0 ? 1 : 1 + n_more, &d);
        CHECK(cofd_is_told(m.arena(r)), "rank %d does not know", r);
        CHECK(!p.call(r, 1, &d), "a dead arena goes on");
    });
    for (int r = 0; r < 2; r++)
        CHECK(m.control(r)->poison.value != 0, "rank %d has no poison", r);
    const struct cofi_fault &f = m.control(0)->fault.status ? m.control(0)->fault
                                                            : m.control(1)->fault;
    CHECK(f.status == COFD_STATUS_BITS(COFD_ERR_MISMATCH), "status %llx",
          (unsigned long long)f.status);
}

int main()
{
    const int n = IS_SLOW ? 150 : 600;
    for (int n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++) {
        calls<cofd_wides>(n_ranks, 1, 1, 1, n);
        calls<cofd_lines>(n_ranks, 3, 1, 1, n);
        calls<cofd_wides>(n_ranks, 3, 2, 1, n);
    }
    calls<cofd_wides>(2, 2, 1, UINT32_MAX - 20, 60);
    calls<cofd_lines>(3, 2, 2, UINT32_MAX - 20, 60);
    calls<cofd_lines>(3, 2, 2, 0x40000000 - 20, 60);
    for (int n_more = 1; n_more < MAX_ROWS; n_more++) {
        sizes_differ<cofd_wides>(n_more);
        sizes_differ<cofd_lines>(n_more);
    }
    return test_done();
}
