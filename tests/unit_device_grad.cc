/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The way home of gradients on devices (grad_return_lane.cuh): slots, signals of pieces and acks of
 * lanes, by push and by pull, in one launch and in several; and the arithmetic of grains. A block
 * is one thread; a barrier of a rank's blocks stands for the end of a kernel. */
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
#include "ops/grad_return/grad_return_lane.cuh"

enum { N_PIECES = 3, PIECE = 4 }; /* numbers of a piece */

struct grad_plan {
    model *m;
    int n_ranks, n_lanes;
    bool is_pull, by_steps;
    int n_blocks;
    uint64_t ordinal, tagged, payload;
    struct cofi_gr_cut cut;
    std::vector<struct cofd_binding> bindings;
    std::vector<pthread_barrier_t> kernel_end;
    std::vector<std::atomic<bool>> has_failed;
    std::vector<std::vector<uint64_t>> acc; /* by rank: [lane][piece][PIECE]; order and sum */
    double seconds = BREAK ? 2 : 20;

    enum form { TOGETHER, APART, BY_STEPS };
    grad_plan(model *on, int lanes, bool pull, form how)
        : m(on), n_ranks(on->spec.n_ranks), n_lanes(lanes), is_pull(pull),
          by_steps(how == BY_STEPS), n_blocks(how == APART ? 2 * lanes : lanes),
          ordinal(on->n_plans++), payload(0), bindings(size_t(n_ranks)),
          kernel_end(bindings.size()), has_failed(bindings.size()), acc(bindings.size())
    {
        cut = {uint32_t(lanes), N_PIECES, PIECE};
        const uint64_t tags = cofd_gr_ready_bytes(&cut, n_ranks) + cofd_gr_ack_bytes(&cut, n_ranks);
        tagged = 8192 * (ordinal + 1);
        CHECK(tags <= 8192 && slot_bytes() * uint64_t(n_ranks) <= 8192, "sizes of the test");
        for (int r = 0; r < n_ranks; r++) {
            struct cofd_binding &b = bindings[size_t(r)];
            b = {};
            b.arena = m->arena(r);
            b.words_offset = m->next_words;
            b.ordinal = ordinal;
            memcpy(b.name, "grad", 4);
            b.n_purposes = COFD_GRID_PURPOSES;
            b.tagged_offset = m->data_offset + tagged;
            b.tagged_bytes = tags;
            acc[size_t(r)].resize(size_t(lanes * N_PIECES * PIECE));
            m->ranks[size_t(r)].bindings[ordinal] = reinterpret_cast<uintptr_t>(&b);
            pthread_barrier_init(&kernel_end[size_t(r)], nullptr, unsigned(n_blocks));
        }
        m->next_words += sizeof(struct cofi_line) * COFD_GRID_PURPOSES * size_t(n_ranks);
    }
    grad_plan(const grad_plan &) = delete;

    uint64_t slot_bytes() const { return uint64_t(n_lanes) * N_PIECES * PIECE * 8; }

    uint64_t *place(int rank, int slot, uint32_t lane, uint32_t piece) const
    {
        return reinterpret_cast<uint64_t *>(m->data(rank) + payload +
                                            uint64_t(slot) * slot_bytes()) +
               (lane * N_PIECES + piece) * PIECE;
    }

    static uint64_t number(int writer, int owner, uint32_t epoch, uint32_t lane, uint32_t piece,
                           int i)
    {
        return mix(mix(uint64_t(writer) << 40 | uint64_t(owner) << 32 | epoch) +
                   (lane * N_PIECES + piece) * PIECE + uint64_t(i));
    }

    struct mover {
        const grad_plan &p;
        const struct cofd_gr_call &c;
        const struct cofd_grid &g;
        int r;
        int *n_bad;
        delays *d;

        void move(struct cofd_gr_item push, struct cofd_gr_item sum) const
        {
            const uint32_t lane = cofd_gr_lane(&c), parts = cofd_gr_parts(&c);
            d->maybe(32, 300);
            for (int i = 0; push.step && (parts & COFD_GR_STORE) && i < PIECE; i++) {
                const int owner = cofd_gr_owner(&c, push.step);
                uint64_t *to = p.is_pull ? p.place(r, owner, lane, push.piece)
                                         : p.place(owner, (push.step - 1) & 1, lane, push.piece);
                to[i] = number(r, owner, g.epoch, lane, push.piece, i);
            }
            for (int i = 0; sum.step && (parts & COFD_GR_ADD) && i < PIECE; i++)
                add(sum, lane, i);
        }

        /* Values, and by a hash the order in which they come. */
        void add(struct cofd_gr_item sum, uint32_t lane, int i) const
        {
            uint64_t &acc = p_acc(lane, sum.piece, i);
            if (sum.step == 1)
                acc = 0;
            if (sum.step >= p.n_ranks)
                return;
            const int writer = cofd_gr_writer(&c, sum.step);
            const uint64_t x = p.is_pull ? p.place(writer, r, lane, sum.piece)[i]
                                         : p.place(r, (sum.step - 1) & 1, lane, sum.piece)[i];
            *n_bad += x != number(writer, r, g.epoch, lane, sum.piece, i);
            acc = mix(acc + x);
        }

        uint64_t &p_acc(uint32_t lane, uint32_t piece, int i) const
        {
            return const_cast<uint64_t &>(
                p.acc[size_t(r)][size_t((lane * N_PIECES + piece) * PIECE) + size_t(i)]);
        }
    };

    struct cofd_gr_call call_of(int r, uint64_t writers) const
    {
        const struct cofd_wait_options o = wait_options(seconds, "gradient");
        struct cofd_gr_call c = {};
        c.grid.arena = m->arena(r);
        c.grid.binding = const_cast<struct cofd_binding *>(&bindings[size_t(r)]);
        for (int i = 0; i < n_ranks; i++)
            c.grid.slab[i] = m->arena(r)->base[i];
        c.grid.words_offset = c.grid.binding->words_offset;
        c.grid.ordinal = ordinal;
        c.grid.rank = r;
        c.grid.n_ranks = n_ranks;
        c.grid.is_private = m->arena(r)->is_private != 0;
        c.grid.call.digest = mix(mix(ordinal) + writers) & COFI_DIGEST_MASK;
        c.grid.call.timeout_ns = o.timeout_ns;
        c.is_free = c.is_ready = o;
        c.cut = cut;
        c.ready = c.grid.binding->tagged_offset;
        c.ack = c.ready + cofd_gr_ready_bytes(&cut, n_ranks);
        return c;
    }

    /* One launch, on one block. */
    bool launch(struct cofd_gr_call *c, uint32_t parts, int push, int last_push, int sum,
                int last_sum, delays *d)
    {
        const int r = c->grid.rank;
        struct cofd_grid g = {&c->grid, 0};
        uint32_t last = 0;
        int n_bad = 0;
        c->parts = parts | (is_pull ? uint32_t(COFD_GR_PULL) : 0);
        if (BREAK == NO_READY_WAIT)
            c->parts &= ~uint32_t(COFD_GR_WAIT_READY);
        if (BREAK == NO_ACK_WAIT)
            c->parts &= ~uint32_t(COFD_GR_WAIT_FREE);
        c->first_push = push;
        c->last_push = last_push;
        c->first_sum = sum;
        c->last_sum = last_sum;
        bool ok = cofd_gr_begin(c, &g, &last);
        const mover io = {*this, *c, g, r, &n_bad, d};
        if (ok)
            ok = cofd_gr_run_lane(c, &g, last, io);
        if (ok && (parts & COFD_GR_BEGIN))
            cofd_grid_end(&g);
        CHECK(n_bad == 0, "rank %d, lane %u, epoch %u: %d numbers", r, cofd_block(), g.epoch,
              n_bad);
        if (ok && (cofd_gr_parts(c) & COFD_GR_FINISH))
            check_order(r, cofd_gr_lane(c), g.epoch);
        if (!ok)
            has_failed[size_t(r)] = true;
        pthread_barrier_wait(&kernel_end[size_t(r)]);
        ok = !has_failed[size_t(r)];
        pthread_barrier_wait(&kernel_end[size_t(r)]);
        return ok;
    }

    /* rank+1, rank+2, ... */
    void check_order(int r, uint32_t lane, uint32_t epoch) const
    {
        int n_bad = 0;
        for (uint32_t piece = 0; piece < N_PIECES; piece++)
            for (int i = 0; i < PIECE; i++) {
                uint64_t want = 0;
                for (int s = 1; s < n_ranks; s++)
                    want = mix(want + number((r + s) % n_ranks, r, epoch, lane, piece, i));
                n_bad += want != acc[size_t(r)][(lane * N_PIECES + piece) * PIECE + size_t(i)];
            }
        CHECK(n_bad == 0, "rank %d, lane %u: %d sums", r, lane, n_bad);
    }

    bool whole(int r, uint64_t writers, delays *d)
    {
        struct cofd_gr_call c = call_of(r, writers);
        const int last = n_ranks - 1;
        const uint32_t apart = n_blocks > n_lanes ? uint32_t(COFD_GR_APART) : 0;
        return launch(&c, COFD_GR_WHOLE | apart, 1, last, 1, last > 0 ? last : 1, d);
    }

    /* As on one stream: a step's rows go out before those of the same step are summed. */
    bool steps(int r, uint64_t writers, delays *d)
    {
        struct cofd_gr_call c = call_of(r, writers);
        struct cofd_binding *b = c.grid.binding;
        bool ok = true;
        if (cofd_block() == 0)
            ok = cofd_call_begin(b, &c.grid.call);
        if (!ok)
            has_failed[size_t(r)] = true;
        pthread_barrier_wait(&kernel_end[size_t(r)]);
        for (int i = 1; i < n_ranks && !has_failed[size_t(r)]; i++) {
            launch(&c, COFD_GR_WAIT_FREE | COFD_GR_STORE, i, i, 1, 0, d);
            launch(&c, COFD_GR_READY, i, i, 1, 0, d);
            launch(&c, COFD_GR_WAIT_READY | COFD_GR_ADD | COFD_GR_ACK, 1, 0, i, i, d);
        }
        if (!has_failed[size_t(r)])
            launch(&c, COFD_GR_FINISH, 1, 0, n_ranks, n_ranks, d);
        ok = !has_failed[size_t(r)];
        if (cofd_block() == 0 && ok) {
            b->mark[COFD_GR_MARK] = b->epoch;
            cofd_call_end(b);
        }
        pthread_barrier_wait(&kernel_end[size_t(r)]);
        return ok;
    }

    bool call(int r, uint64_t writers, delays *d)
    {
        return by_steps ? steps(r, writers, d) : whole(r, writers, d);
    }
};

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

struct shape {
    int n_ranks, n_lanes, n_plans;
    bool is_pull;
    grad_plan::form form;
    uint32_t first_epoch;
};

/* Plans take turns where there are two, on one payload; the second goes the other way. */
static void calls(const shape &s, int n_calls)
{
    model_spec spec = {s.n_ranks, s.first_epoch, s.n_plans == 1};
    model m(spec);
    std::vector<std::unique_ptr<grad_plan>> plans;
    for (int i = 0; i < s.n_plans; i++)
        plans.emplace_back(new grad_plan(&m, s.n_lanes, s.is_pull != (i == 1), s.form));
    run_blocks(s.n_ranks, plans[0]->n_blocks, [&](int r) {
        delays d = {uint64_t(r * 16) + cofd_block()};
        bool ok = true;
        int i = 0;
        for (; i < n_calls && ok; i++)
            ok = plans[mix(uint64_t(i)) % uint64_t(s.n_plans)]->call(r, uint64_t(i % 3), &d);
        CHECK(ok, "rank %d, block %u: call %d failed", r, cofd_block(), i - 1);
    });
}

/* Ranks that pass other writers find out, all of them, and nobody waits for long. */
static void writers_differ(int n_ranks, grad_plan::form form)
{
    model m({n_ranks, 1, true});
    grad_plan p(&m, 2, false, form);
    run_blocks(n_ranks, p.n_blocks, [&](int r) {
        delays d = {uint64_t(r)};
        const bool ok = p.call(r, 0, &d);
        CHECK(ok, "the first call");
        const bool passed = p.call(r, r == 0, &d);
        CHECK(!passed, "rank %d does not know", r);
    });
    const struct cofi_fault *f = &m.control(0)->fault;
    for (int r = 1; r < n_ranks && f->status == 0; r++)
        f = &m.control(r)->fault;
    CHECK(f->status == COFD_STATUS_BITS(COFD_ERR_MISMATCH), "status %llx",
          (unsigned long long)f->status);
}

/* ---- grains --------------------------------------------------------------------------------- */

static void divisors()
{
    int n_bad = 0;
    for (uint32_t by = 1; by < 3000; by++) {
        const struct cofi_gr_divisor d = cofi_gr_divisor_make(by);
        for (uint32_t k = 0; k < 40; k++) {
            const uint32_t n = k < 4 ? k : uint32_t(mix(by * 64 + k)) >> (1 + k % 16);
            const uint32_t near = n / by * by;
            n_bad += cofi_gr_divide(n, d) != n / by;
            n_bad += cofi_gr_divide(near, d) != near / by;
            n_bad += near > 0 && cofi_gr_divide(near - 1, d) != (near - 1) / by;
        }
        n_bad += cofi_gr_divide(0x7fffffff, d) != 0x7fffffff / by;
    }
    for (uint32_t by : {0x7fffffffu, 0x40000000u, 0x40000001u, 0x3fffffffu, 65536u * 8191u}) {
        const struct cofi_gr_divisor d = cofi_gr_divisor_make(by);
        for (uint32_t n : {0u, by - 1, by, 0x7fffffffu, 0x7ffffffeu})
            n_bad += cofi_gr_divide(n, d) != n / by;
    }
    CHECK(n_bad == 0, "%d quotients", n_bad);
}

/* Every grain of every owner is in one piece, and lies where loops over rows would come to it. */
static void grains(int n_rows, int n_batch, int n_heads, int dim_k, int dim_v, int lanes)
{
    const int grain = dim_k % 8 == 0 && dim_v % 8 == 0 ? 8 : 1;
    const struct cofi_gr_shape shape[2] = {cofi_gr_shape_make(n_batch, n_heads, dim_k, grain),
                                           cofi_gr_shape_make(n_batch, n_heads, dim_v, grain)};
    const uint32_t n = uint32_t(n_rows) * (shape[0].row.by + shape[1].row.by);
    const struct cofi_gr_cut cut = cofi_gr_cut_make(n + 700, lanes); /* another owner has more */
    CHECK(uint64_t(cut.n_lanes) * cut.n_pieces * cut.piece >= n + 700, "%u grains", n);
    std::vector<int> seen(n);
    uint32_t g = 0;
    int n_bad = 0;
    for (uint32_t lane = 0; lane < cut.n_lanes; lane++)
        for (uint32_t piece = 0; piece < cut.n_pieces; piece++) {
            uint32_t begin, end;
            cofi_gr_piece(&cut, lane, piece, n, &begin, &end);
            for (uint32_t i = begin; i < end; i++)
                seen[i]++;
        }
    for (int count : seen)
        n_bad += count != 1;
    CHECK(n_bad == 0, "%d of %u grains are not in one piece", n_bad, n);
    for (int v = 0; v < 2; v++)
        for (int row = 0, in = 0; row < n_rows; row++)
            for (int b = 0; b < n_batch; b++)
                for (int h = 0; h < n_heads; h++)
                    for (int d = 0; d < (v ? dim_v : dim_k) / grain; d++, g++, in++) {
                        const struct cofi_gr_at at = cofi_gr_find(shape, n_rows, g);
                        n_bad += at.is_v != v || at.row != row || at.batch != b || at.head != h ||
                                 at.in_head != d || at.in_slot != uint32_t(in);
                    }
    CHECK(n_bad == 0 && g == n, "%d of %u grains are elsewhere", n_bad, n);
    CHECK(cut.n_lanes <= uint32_t(lanes) && cut.n_pieces <= COFI_GR_MAX_PIECES, "%u lanes",
          cut.n_lanes);
}

/* The sizes that matter are cut into whole turns. */
static void cuts()
{
    for (int log = 12; log <= 24; log++) {
        const struct cofi_gr_cut c = cofi_gr_cut_make(uint64_t(1) << log, 64);
        CHECK(uint64_t(c.n_lanes) * c.n_pieces * c.piece == uint64_t(1) << log, "2^%d grains", log);
        CHECK(c.n_pieces == 1 || c.piece % COFI_GR_TURN == 0, "pieces of %u", c.piece);
    }
    for (uint64_t n = 1; n < UINT64_C(1) << 31; n = n * 3 / 2 + 1)
        for (int lanes : {1, 5, 64, 127, 128}) {
            const struct cofi_gr_cut c = cofi_gr_cut_make(n, lanes);
            CHECK(uint64_t(c.n_lanes) * c.n_pieces * c.piece >= n && c.n_pieces >= 1 &&
                      c.n_pieces <= COFI_GR_MAX_PIECES && int(c.n_lanes) <= lanes,
                  "%llu grains, %u lanes of %u pieces of %u", (unsigned long long)n, c.n_lanes,
                  c.n_pieces, c.piece);
        }
}

static void rows()
{
    const struct cofi_gr_rows r = {12, 6, {4, 5}, {100, 700}};
    for (int row = 0; row < 12; row++) {
        const int64_t want = row < 4 ? 100 + row : row >= 6 && row < 11 ? 700 + row - 6 : -1;
        CHECK(cofi_gr_source(&r, row) == want, "row %d", row);
        CHECK(cofi_gr_half(&r, row) == (row >= 6), "row %d", row);
    }
    const struct cofi_gr_rows one = {3, 3, {2, 0}, {INT64_C(1) << 40, 0}};
    CHECK(cofi_gr_source(&one, 1) == (INT64_C(1) << 40) + 1 && cofi_gr_source(&one, 2) == -1,
          "one half");
}

int main()
{
    const int n = IS_SLOW ? 60 : 200;
    for (int n_ranks = 1; n_ranks <= MAX_RANKS + 1; n_ranks++)
        for (int how = 0; how < 6; how++) {
            const bool is_pull = how & 1;
            const auto form = static_cast<grad_plan::form>(how / 2);
            if (n_ranks == 1 && form == grad_plan::APART)
                continue;
            calls({n_ranks, 1, 1, is_pull, form, 1}, n);
            calls({n_ranks, 2, 2, is_pull, form, 1}, n);
        }
    for (int how = 0; how < 6; how++) {
        const bool is_pull = how & 1;
        const auto form = static_cast<grad_plan::form>(how / 2);
        calls({2, 2, 1, is_pull, form, UINT32_MAX - 10}, 40);
        calls({3, 2, 2, is_pull, form, UINT32_MAX - 20}, 60);
        calls({3, 1, 2, is_pull, form, 0x80000000u - 20}, 60);
        calls({3, 2, 1, is_pull, form, 0xc0000000u - 9}, 40);
    }
    writers_differ(2, grad_plan::TOGETHER);
    writers_differ(3, grad_plan::APART);
    writers_differ(2, grad_plan::BY_STEPS);
    divisors();
    cuts();
    rows();
    grains(0, 1, 1, 8, 8, 4);
    grains(1, 1, 1, 5, 3, 4);
    grains(7, 2, 3, 192, 128, 3);
    grains(129, 1, 8, 64, 64, 128);
    grains(301, 2, 3, 5, 3, 7);
    grains(2999, 1, 8, 64, 64, 5);
    return test_done();
}
