/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The protocol headers of src/device on the host: arenas of ranks that are a block of one or more
 * threads, with slabs and control blocks in plain memory. Payload is read and written plainly, so
 * that ThreadSanitizer sees every hand-over that no signal word and no barrier of a block orders.
 *
 * The variable MODEL_BREAK names a step to be left out or weakened, here or in the test
 * (tests/negative_device.sh wants each to be noticed); the headers stay as they are. */
#ifndef COFUSE_DEVICE_MODEL_H
#define COFUSE_DEVICE_MODEL_H

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

/* X(step, number); barriers of a block by their place in device_call.h: those of a reset stand
 * beside others. */
#define MODEL_STEPS(X)                                                                             \
    X(STORE_RELAXED, 1)                                                                            \
    X(LOAD_RELAXED, 2)                                                                             \
    X(NO_READY_WAIT, 3)                                                                            \
    X(NO_ACK_WAIT, 4)                                                                              \
    X(NO_END_ACK_WAIT, 5)                                                                          \
    X(NO_RESET, 6)                                                                                 \
    X(SIGNAL_BEFORE_DATA, 7)                                                                       \
    X(ACK_BEFORE_READ, 8)                                                                          \
    X(END_BEFORE_READ, 9)                                                                          \
    X(RELEASE_AFTER_FAILURE, 10)                                                                   \
    X(COUNT_BEFORE_DATA, 11)                                                                       \
    X(NO_CREDIT, 12)                                                                               \
    X(TAG_BEFORE_PAYLOAD, 13)                                                                      \
    X(ONE_HALF, 14)                                                                                \
    X(ACKS_OF_ZERO, 15)                                                                            \
    X(NO_SYNC_SIGNAL, 20)                                                                          \
    X(NO_SYNC_BEGIN_READ, 23)                                                                      \
    X(NO_SYNC_BEGIN, 24)                                                                           \
    X(NO_SYNC_END, 25)

enum model_step {
#define MODEL_STEP(step, number) step = number,
    MODEL_STEPS(MODEL_STEP)
#undef MODEL_STEP
};

static int model_broken_step()
{
    const char *name = getenv("MODEL_BREAK");
    if (!name)
        return 0;
#define MODEL_STEP(step, number)                                                                   \
    if (!strcmp(name, #step))                                                                      \
        return number;
    MODEL_STEPS(MODEL_STEP)
#undef MODEL_STEP
    fprintf(stderr, "MODEL_BREAK=%s: there is no such step\n", name);
    exit(2);
}

static const int BREAK = model_broken_step(); /* 0: none */

#include "device/order.h"

static inline void model_store_release_sys(uint64_t *at, uint64_t value)
{
    if (BREAK == STORE_RELAXED)
        cofd_store_relaxed_sys(at, value);
    else
        cofd_store_release_sys(at, value);
}

static inline uint64_t model_load_acquire_sys(const uint64_t *at)
{
    return BREAK == LOAD_RELAXED ? cofd_load_relaxed_sys(at) : cofd_load_acquire_sys(at);
}

#define cofd_store_release_sys model_store_release_sys
#define cofd_load_acquire_sys model_load_acquire_sys

/* Blocks of several threads: barriers that a kernel would not come out of hang here too. */
struct model_block {
    uint32_t n_threads;
    pthread_barrier_t barrier;
    std::vector<char> votes;
};
static thread_local model_block *own_block; /* nullptr: of this thread alone */
static thread_local uint32_t own_thread;

static inline uint32_t model_thread()
{
    return own_thread;
}

static inline uint32_t model_n_threads()
{
    return own_block ? own_block->n_threads : 1;
}

/* `idx` numbers the places that call it. */
static inline void model_block_sync(int idx)
{
    if (own_block && BREAK != NO_SYNC_SIGNAL + idx)
        pthread_barrier_wait(&own_block->barrier);
}

static inline bool model_block_all(bool is_true)
{
    if (!own_block)
        return is_true;
    own_block->votes[own_thread] = is_true;
    pthread_barrier_wait(&own_block->barrier);
    for (uint32_t t = 0; t < own_block->n_threads; t++)
        is_true &= own_block->votes[t] != 0;
    pthread_barrier_wait(&own_block->barrier);
    return is_true;
}

#define cofd_thread model_thread
#define cofd_n_threads model_n_threads
#define cofd_block_sync() model_block_sync(__COUNTER__)
#define cofd_block_all model_block_all

#include "device/device_call.h"
#include "device/tagged.h"

static std::atomic<int> test_n_failed, test_n_passed;

#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (cond) {                                                                                \
            test_n_passed++;                                                                       \
        } else if (test_n_failed++ < 20) {                                                         \
            printf("not ok %s:%d: %s: ", __func__, __LINE__, #cond);                               \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            if (BREAK)                                                                             \
                exit_at_once();                                                                    \
        }                                                                                          \
    } while (0)

/* A broken variant has been noticed. */
[[noreturn]] static inline void exit_at_once()
{
    fflush(stdout);
    _exit(1);
}

static inline int test_done()
{
    printf("%d checks passed, %d failed\n", test_n_passed.load(), test_n_failed.load());
    return test_n_failed != 0 || test_n_passed == 0;
}

/* ThreadSanitizer costs about a factor of ten. */
#ifdef __SANITIZE_THREAD__
enum { IS_SLOW = 1, MAX_RANKS = 3 };
#else
enum { IS_SLOW = 0, MAX_RANKS = 4 };
#endif

/* splitmix64 */
static inline uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static inline void sleep_us(unsigned us)
{
    const struct timespec t = {us / 1000000, static_cast<long>(us % 1000000) * 1000};
    nanosleep(&t, nullptr);
}

/* Late now and then, each rank at places of its own. */
struct delays {
    uint64_t state;
    void maybe(unsigned one_in, unsigned max_us)
    {
        state = mix(state + own_thread);
        if (state % one_in == 0)
            sleep_us(static_cast<unsigned>(state >> 32) % max_us);
    }
};

/* ---- memory --------------------------------------------------------------------------------- */

/* Zeroed, on a line of its own. */
template <typename T> struct lines {
    T *at;
    explicit lines(size_t n)
    {
        const size_t bytes = (n * sizeof(T) + COFI_LINE - 1) / COFI_LINE * COFI_LINE;
        at = static_cast<T *>(aligned_alloc(COFI_LINE, bytes));
        memset(static_cast<void *>(at), 0, bytes);
    }
    lines(lines &&other) noexcept : at(other.at) { other.at = nullptr; }
    ~lines() { free(at); }
};

struct model_rank {
    struct cofd_arena arena = {};
    lines<char> slab;
    lines<struct cofi_control> control{1};
    std::vector<char *> base;
    std::vector<struct cofi_control *> controls;
    std::vector<uint32_t> peer_state;
    std::vector<int32_t> world_rank;
    std::vector<uint64_t> sent, awaited, bindings;
    uint64_t abort_word = 0;
    explicit model_rank(size_t slab_bytes) : slab(slab_bytes), bindings(COFD_MAX_PLANS) {}
};

struct model_spec {
    int n_ranks;
    uint32_t first_epoch = 1;
    bool is_private = false;
    int n_words = 0;
    uint32_t n_threads = 1; /* of each rank's block */
    size_t data_bytes = 1 << 16; /* payload; the words of plans lie behind it */
};

/* An arena on all ranks. */
struct model {
    model_spec spec;
    size_t data_offset, next_words;
    uint64_t n_plans = 0;
    std::vector<model_rank> ranks;

    enum { PLAN_LINES_BYTES = 32 * 1024 };

    explicit model(const model_spec &s) : spec(s)
    {
        const int n = s.n_ranks;
        const size_t user = sizeof(struct cofi_control) +
                            sizeof(struct cofi_line) * COFI_ARENA_PURPOSES * size_t(n);
        data_offset = user + sizeof(struct cofi_line) * size_t(s.n_words) * size_t(n);
        next_words = data_offset + (s.data_bytes + COFI_LINE - 1) / COFI_LINE * COFI_LINE;
        for (int r = 0; r < n; r++)
            ranks.emplace_back(next_words + PLAN_LINES_BYTES);
        for (int r = 0; r < n; r++)
            make_rank(r, user);
    }

    void make_rank(int r, size_t user)
    {
        model_rank &m = ranks[size_t(r)];
        for (int q = 0; q < spec.n_ranks; q++) {
            m.base.push_back(ranks[size_t(q)].slab.at);
            m.controls.push_back(ranks[size_t(q)].control.at);
            m.world_rank.push_back(q);
        }
        m.peer_state.resize(size_t(spec.n_ranks));
        m.sent.resize(size_t(spec.n_ranks * spec.n_words) + 1);
        m.awaited.resize(m.sent.size());
        struct cofd_arena &a = m.arena;
        a.rank = r;
        a.n_ranks = spec.n_ranks;
        a.is_private = spec.is_private;
        a.first_epoch = spec.first_epoch;
        a.user_words_offset = user;
        a.base = m.base.data();
        a.control = m.controls.data();
        a.abort = &m.abort_word;
        a.peer_state = m.peer_state.data();
        a.world_rank = m.world_rank.data();
        a.sent = m.sent.data();
        a.awaited = m.awaited.data();
        a.bindings = m.bindings.data();
        cofd_set_words(&a, cofd_words_of_arena(), COFI_END_ACK, spec.first_epoch - 1);
    }

    struct cofd_arena *arena(int r) { return &ranks[size_t(r)].arena; }
    char *data(int r) { return ranks[size_t(r)].slab.at + data_offset; }
    struct cofi_control *control(int r) { return ranks[size_t(r)].control.at; }

    /* On every thread of every rank. */
    void run(const std::function<void(int)> &fn)
    {
        std::vector<std::thread> threads;
        std::vector<model_block> blocks(size_t(spec.n_ranks));
        for (int r = 0; r < spec.n_ranks; r++) {
            model_block *block = &blocks[size_t(r)];
            block->n_threads = spec.n_threads;
            block->votes.resize(spec.n_threads);
            pthread_barrier_init(&block->barrier, nullptr, spec.n_threads);
            for (uint32_t t = 0; t < spec.n_threads; t++)
                threads.emplace_back([=, &fn] {
                    own_block = block;
                    own_thread = t;
                    fn(r);
                });
        }
        for (std::thread &t : threads)
            t.join();
        for (model_block &block : blocks)
            pthread_barrier_destroy(&block.barrier);
    }
};

/* ---- plans ---------------------------------------------------------------------------------- */

enum { READY_WORD, ACK_WORD, N_PURPOSES, READ_MARK = 0 };

static inline struct cofd_wait_options wait_options(double seconds, const char *step)
{
    struct cofd_wait_options o = {};
    o.timeout_ns = static_cast<uint64_t>(seconds * 1e9);
    memcpy(o.step, step, strnlen(step, sizeof o.step));
    return o;
}

/* An operator of the tests: every rank gives every other `n` numbers of its own in each call. By
 * pull it lays them into its own slab, by push into the reader's. */
struct plan {
    model *m;
    bool is_push;
    uint64_t ordinal;
    /* By rank. */
    std::vector<struct cofd_binding> bindings;
    std::vector<uint64_t> n_made;      /* calls so far */
    std::vector<double> seconds;       /* deadline of its waits */
    std::vector<unsigned> ack_late_us; /* slow readers */

    plan(model *on, bool push, double deadline = BREAK ? 2 : 30)
        : m(on), is_push(push), ordinal(on->n_plans++), bindings(size_t(on->spec.n_ranks)),
          n_made(bindings.size()), seconds(bindings.size(), deadline), ack_late_us(bindings.size())
    {
        for (int r = 0; r < m->spec.n_ranks; r++) {
            struct cofd_binding &b = bindings[size_t(r)];
            b = {};
            b.arena = m->arena(r);
            b.words_offset = m->next_words;
            b.ordinal = ordinal;
            memcpy(b.name, is_push ? "push" : "pull", 4);
            b.n_purposes = N_PURPOSES;
            b.acks = 1u << ACK_WORD;
            const uint32_t now = b.arena->epoch; /* as begin_words and begin_acks of src/symm */
            cofd_set_words(b.arena, b.words_offset, ACK_WORD,
                           BREAK == ACKS_OF_ZERO ? 0 : now ? now : m->spec.first_epoch - 1);
            m->ranks[size_t(r)].bindings[ordinal] = reinterpret_cast<uintptr_t>(&b);
        }
        m->next_words += sizeof(struct cofi_line) * N_PURPOSES * size_t(m->spec.n_ranks);
    }
    plan(const plan &) = delete;

    struct cofd_binding *binding(int r) { return &bindings[size_t(r)]; }

    struct cofd_call call_of(int r, int n, uint32_t direction = 1) const
    {
        struct cofd_call c = {};
        c.direction = direction;
        c.digest = mix(mix(ordinal * 4 + direction) + uint64_t(n)) & COFI_DIGEST_MASK;
        c.sizes[0] = uint64_t(n);
        if (BREAK == NO_RESET)
            c.left_out = COFD_LEAVE_RESET;
        if (BREAK == NO_END_ACK_WAIT)
            c.left_out = COFD_LEAVE_END_ACK_WAIT;
        c.timeout_ns = wait_options(seconds[size_t(r)], "").timeout_ns;
        return c;
    }

    uint32_t value(int writer, uint64_t call, int i) const
    {
        return uint32_t(mix(mix(ordinal * 64 + uint64_t(writer)) + call * 4096 + uint64_t(i)));
    }

    /* Where the numbers of `writer` for `reader` lie. */
    uint32_t *place(int writer, int reader, int n_max)
    {
        return reinterpret_cast<uint32_t *>(m->data(is_push ? reader : writer)) +
               (is_push ? writer * n_max : 0);
    }

    void write(int r, int reader, int n, int n_max)
    {
        uint32_t *at = place(r, reader, n_max);
        for (int i = int(own_thread); i < n; i += int(cofd_n_threads()))
            at[i] = value(r, n_made[size_t(r)], i);
    }

    int n_wrong(int r, int writer, int n, int n_max)
    {
        const uint32_t *at = place(writer, r, n_max);
        int n_bad = 0;
        for (int i = int(own_thread + 1) % int(cofd_n_threads()); i < n; i += int(cofd_n_threads()))
            n_bad += at[i] != value(writer, n_made[size_t(r)], i);
        return n_bad;
    }

    void write_all(int r, int n, int n_max)
    {
        const int n_ranks = m->spec.n_ranks;
        for (int i = 1; i < n_ranks; i++)
            if (is_push || i == 1)
                write(r, (r + i) % n_ranks, n, n_max);
    }

    bool read_all(int r, int n, int n_max, delays *d)
    {
        const int n_ranks = m->spec.n_ranks;
        struct cofd_binding *b = binding(r);
        const struct cofd_wait_options o = wait_options(seconds[size_t(r)], "ready");
        for (int i = 1; i < n_ranks; i++) {
            const int from = (r + i) % n_ranks;
            if (BREAK != NO_READY_WAIT && !cofd_call_wait_ready(b, from, READY_WORD, &o))
                return false;
            if (BREAK == ACK_BEFORE_READ)
                cofd_call_signal(b, from, ACK_WORD);
            if (BREAK == END_BEFORE_READ && i == n_ranks - 1)
                cofd_call_end(b);
            d->maybe(16, 200);
            if (ack_late_us[size_t(r)])
                sleep_us(ack_late_us[size_t(r)]);
            const int n_bad = n_wrong(r, from, n, n_max);
            CHECK(n_bad == 0, "rank %d, call %u: %d of %d from rank %d", r, b->epoch, n_bad, n,
                  from);
            if (BREAK != ACK_BEFORE_READ)
                cofd_call_signal(b, from, ACK_WORD);
        }
        return true;
    }

    /* n_max: the most of any call, the same on all ranks. False once the arena is dead. */
    bool call(int r, int n, int n_max, delays *d, uint32_t direction = 1)
    {
        struct cofd_binding *b = binding(r);
        const struct cofd_call c = call_of(r, n, direction);
        const struct cofd_wait_options o = wait_options(seconds[size_t(r)], "slot free");
        if (!cofd_call_begin(b, &c))
            return false;
        if (BREAK != NO_ACK_WAIT &&
            !cofd_call_wait_ack(b, COFD_ALL_OTHERS, ACK_WORD, b->mark[READ_MARK], &o)) {
            if (BREAK == RELEASE_AFTER_FAILURE)
                cofd_call_signal(b, COFD_ALL_OTHERS, READY_WORD);
            return false;
        }
        d->maybe(16, 300);
        if (BREAK == SIGNAL_BEFORE_DATA)
            cofd_call_signal(b, COFD_ALL_OTHERS, READY_WORD);
        write_all(r, n, n_max);
        if (BREAK != SIGNAL_BEFORE_DATA)
            cofd_call_signal(b, COFD_ALL_OTHERS, READY_WORD);
        if (own_thread == 0)
            b->mark[READ_MARK] = b->epoch;
        if (!read_all(r, n, n_max, d))
            return false;
        if (!is_push && m->spec.n_ranks > 1) { /* what only the end of the call gives away */
            const int n_bad = n_wrong(r, r, n, n_max);
            CHECK(n_bad == 0, "rank %d, call %u: %d of its own %d", r, b->epoch, n_bad, n);
        }
        if (BREAK != END_BEFORE_READ)
            cofd_call_end(b);
        if (own_thread == 0)
            n_made[size_t(r)]++;
        return true;
    }
};

#endif
