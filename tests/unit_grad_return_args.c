/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Bad parameters, peers, tensors, writers and epochs of grad_return: each is refused with a text
 * that names the argument, its value and the rule, leaves outputs as they were, and breaks nothing.
 */
#include "test_grad_return.h"

static cof_team *team;

#define REFUSED(change, status, part)                                                              \
    do {                                                                                           \
        cof_grad_return_params p = test_gr_params(10);                                             \
        cof_plan *plan;                                                                            \
        change;                                                                                    \
        CHECK_FAILS(cof_grad_return_plan_create(team, &p, NULL, &plan), status, part);             \
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;                                      \
        CHECK_FAILS(cof_grad_return_workspace(team, &p, &sizes), status, part);                    \
    } while (0)

static void test_params(void)
{
    REFUSED(p.size = 3, COF_ERR_INVALID, "params.size = 3");
    REFUSED(p.dtype = COF_I32, COF_ERR_INVALID, "params.dtype = i32: wanted bf16, f16 or f32");
    REFUSED(p.partial_f32 = 2, COF_ERR_INVALID, "params.partial_f32 = 2: wanted 0 or 1");
    REFUSED(p.driver_wait = 2, COF_ERR_INVALID, "params.driver_wait = 2: wanted 0 or 1");
    REFUSED(p.driver_wait = 1, COF_ERR_INVALID, "wanted 0 without params.peers");
    REFUSED(p.max_ctas = -1, COF_ERR_INVALID, "params.max_ctas = -1");
    REFUSED(p.wire_f32 = -1, COF_ERR_INVALID, "params.wire_f32 = -1: wanted 0 or 1");
    REFUSED(p.by_section = 3, COF_ERR_INVALID, "params.by_section = 3: wanted 0 or 1");
    REFUSED(p.caller_orders_reuse = 2, COF_ERR_INVALID, "params.caller_orders_reuse = 2: wanted");
    REFUSED(p.layout = (cof_layout_kind)3, COF_ERR_INVALID, "params.layout = 3: wanted 0 (zigzag)");
    REFUSED(p.chunking = (cof_chunking)2, COF_ERR_INVALID, "params.chunking = 2: wanted 0");
    REFUSED(p.transfer = (cof_grad_return_transfer)2, COF_ERR_INVALID,
            "params.transfer = 2: wanted 0 (push) or 1 (pull)");
    REFUSED(p.n_batch = 0, COF_ERR_INVALID, "params.n_batch = 0: wanted 1 .. ");
    REFUSED(p.n_rows = -1, COF_ERR_INVALID, "params.n_rows = -1: wanted 0 .. ");
    REFUSED(p.n_heads = 0, COF_ERR_INVALID, "params.n_heads = 0: wanted 1 .. ");
    REFUSED(p.head_dim_k = 0, COF_ERR_INVALID, "params.head_dim_k = 0: wanted 1 .. 65536");
    REFUSED(p.head_dim_k = 65537, COF_ERR_INVALID, "params.head_dim_k = 65537: wanted 1 .. 65536");
    REFUSED(p.head_dim_v = -4, COF_ERR_INVALID, "params.head_dim_v = -4: wanted 1 .. 65536");
    REFUSED(p.n_rows = INT64_C(1) << 50, COF_ERR_INVALID, "past the address space");
    REFUSED(p.n_rows = INT64_MAX, COF_ERR_INVALID, "params.n_rows = 9223372036854775807: wanted");
    REFUSED((p.n_batch = INT64_C(1) << 55, p.n_heads = INT64_C(1) << 55), COF_ERR_INVALID,
            "past the address space");
    REFUSED(p.caller_orders_reuse = 1, COF_ERR_INVALID, "params.peers NULL: wanted with");
    cof_grad_return_params p = test_gr_params(10);
    cof_plan *plan;
    CHECK_FAILS(cof_grad_return_plan_create(team, NULL, NULL, &plan), COF_ERR_INVALID,
                "params: NULL");
    CHECK_FAILS(cof_grad_return_plan_create(NULL, &p, NULL, &plan), COF_ERR_INVALID, "team: NULL");
    CHECK_FAILS(cof_grad_return_plan_create(team, &p, NULL, NULL), COF_ERR_INVALID, "plan_out");
    CHECK_FAILS(cof_grad_return_workspace(team, &p, NULL), COF_ERR_INVALID, "sizes_out");
    CHECK_FAILS(cof_grad_return_workspace(NULL, &p, NULL), COF_ERR_INVALID, "team: NULL");
}

/* On memory of two ranks, of which only the sizes are looked at: 10 rows in 12 places. */
#define PEERS_REFUSED(change, status, part)                                                        \
    do {                                                                                           \
        struct test_gr_memory m;                                                                   \
        test_gr_memory_make(&m, 2, 4096);                                                          \
        void *dk = m.dk[1], *dv = m.dv[1];                                                         \
        uint32_t *ready = m.ready[1];                                                              \
        cof_grad_return_params p = test_gr_peer_params(10, &m);                                    \
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;                                      \
        CHECK_OK(cof_grad_return_workspace(two, &p, &sizes));                                      \
        change;                                                                                    \
        CHECK_FAILS(cof_grad_return_workspace(two, &p, &sizes), status, part);                     \
        m.dk[1] = dk;                                                                              \
        m.dv[1] = dv;                                                                              \
        m.ready[1] = ready;                                                                        \
        test_gr_memory_free(&m, 2);                                                                \
    } while (0)

static void test_peers(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *two = cof_world_team(w);
    PEERS_REFUSED(m.peers.size = 8, COF_ERR_INVALID, "params.peers.size = 8");
    PEERS_REFUSED(m.peers.n_ranks = 3, COF_ERR_INVALID, "params.peers.n_ranks = 3: wanted 2");
    PEERS_REFUSED(m.peers.dk = NULL, COF_ERR_INVALID, "params.peers.dk: NULL");
    PEERS_REFUSED(m.peers.dv = NULL, COF_ERR_INVALID, "params.peers.dv: NULL");
    PEERS_REFUSED(m.peers.ready = NULL, COF_ERR_INVALID, "params.peers.ready: NULL");
    PEERS_REFUSED(m.peers.ready_stride = 6, COF_ERR_INVALID, "ready_stride = 6: wanted a multiple");
    PEERS_REFUSED(m.dk[1] = NULL, COF_ERR_INVALID, "params.peers: entry 1 is dk (nil), dv");
    PEERS_REFUSED(m.dv[1] = NULL, COF_ERR_INVALID, "dv (nil), ready");
    PEERS_REFUSED(m.ready[1] = NULL, COF_ERR_INVALID, "ready (nil): wanted addresses aligned");
    PEERS_REFUSED(m.dk[1] = (char *)dk + 2, COF_ERR_INVALID, "params.peers: entry 1 is dk");
    PEERS_REFUSED(m.dv[1] = (char *)dv + 1, COF_ERR_INVALID, "params.peers: entry 1 is dk");
    PEERS_REFUSED(m.ready[1] = (uint32_t *)(uintptr_t)((uintptr_t)ready + 2), COF_ERR_INVALID,
                  "params.peers: entry 1 is dk");
    /* 2 writers x 6 rows x 2 x 2 heads x 8 (5) x 4 bytes */
    PEERS_REFUSED(m.peers.dk_bytes = 1535, COF_ERR_INVALID, "dk_bytes = 1535: wanted at least");
    PEERS_REFUSED(m.peers.dv_bytes = 959, COF_ERR_INVALID, "dv_bytes = 959: wanted at least 960");
    PEERS_REFUSED((p.chunking = COF_CHUNKING_BALANCED, p.n_rows = 11), COF_ERR_INVALID,
                  "params.n_rows = 11: rank 0 has 5 rows, rank 1 has 6");
    PEERS_REFUSED(p.driver_wait = COF_DRIVER_WAIT, COF_ERR_UNSUPPORTED,
                  "params.driver_wait = 1: wanted 0 on the CPU");
    PEERS_REFUSED(p.wire_f32 = 1, COF_ERR_UNSUPPORTED, "params.wire_f32: with peers");
    PEERS_REFUSED(p.transfer = COF_TRANSFER_PULL, COF_ERR_UNSUPPORTED, "params.transfer: with");
    PEERS_REFUSED(p.caller_orders_reuse = 0, COF_ERR_INVALID, "params.peers given: wanted with");
    CHECK_OK(cof_team_barrier(two));
    cof_world_destroy(w);
}

/* Sizes that only fit without the padding of the other ranks' rows. */
static void test_padded_sizes(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    cof_grad_return_params p = test_gr_params(1);
    cof_attention_params q = test_attention_params(1);
    p.n_batch = INT64_C(1) << 40;
    p.n_heads = 1;
    p.head_dim_k = 65536;
    p.chunking = COF_CHUNKING_PADDED;
    p.transfer = COF_TRANSFER_PULL;
    CHECK_FAILS(cof_grad_return_workspace(cof_world_team(w), &p, &sizes), COF_ERR_INVALID,
                "with the rows of 16 ranks filled up to 2 each, is past the address space");
    p.n_batch >>= 5;
    CHECK_OK(cof_grad_return_workspace(cof_world_team(w), &p, &sizes));
    CHECK(sizes.symmetric > (size_t)1 << 56, "%zu bytes", sizes.symmetric);
    p.n_batch = p.n_heads = INT64_C(1) << 56; /* 2^128 with the head dim */
    CHECK_FAILS(cof_grad_return_workspace(cof_world_team(w), &p, &sizes), COF_ERR_INVALID,
                "past the address space");
    q.n_batch = INT64_C(1) << 47;
    q.n_heads = 1;
    q.save_kv = 1;
    CHECK_FAILS(cof_attention_workspace(cof_world_team(w), &q, &sizes), COF_ERR_INVALID,
                "with the rows of 16 ranks filled up to 1 each, is past the address space");
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}

/* A writer would store where its owner does not look. */
static void test_strides(int rank, int n_ranks, const char *job, void *arg)
{
    struct test_gr_memory *m = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_grad_return_peers peers = m->peers;
    cof_grad_return_params p = test_gr_peer_params(10, m);
    cof_plan *plan;
    p.peers = &peers;
    peers.ready_stride = rank == 1 ? 8 : 0;
    CHECK_FAILS(cof_grad_return_plan_create(cof_world_team(w), &p, NULL, &plan), COF_ERR_MISMATCH,
                "ready_stride=4 | ready_stride=8");
    peers.ready_stride = rank == 1 ? 4 : 0; /* which is 4 */
    CHECK_OK(cof_grad_return_plan_create(cof_world_team(w), &p, NULL, &plan));
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

static void test_arena_with_peers(void)
{
    struct test_gr_memory m;
    cof_arena *arena;
    cof_plan *plan;
    test_gr_memory_make(&m, 1, 4096);
    cof_grad_return_params p = test_gr_peer_params(10, &m);
    CHECK_OK(cof_arena_create(team, 65536, 0, &arena));
    CHECK_FAILS(cof_grad_return_plan_create(team, &p, arena, &plan), COF_ERR_INVALID,
                "arena: wanted NULL with params.peers");
    cof_arena_destroy(arena);
    test_gr_memory_free(&m, 1);
}

/* The call with one thing changed is refused; the outputs keep every byte. */
#define CALL_REFUSED(change, status, part)                                                         \
    do {                                                                                           \
        struct test_gr t;                                                                          \
        test_gr_make(&t, p, 0, 1, 1);                                                              \
        void *kept[2] = {t.out[0].data, t.out[1].data};                                            \
        int64_t strides[4] = {32, 16, 8, 1};                                                       \
        uint64_t table[1] = {1};                                                                   \
        cof_tensor other = t.in[0][1];                                                             \
        (void)strides, (void)table, (void)other;                                                   \
        change;                                                                                    \
        CHECK_FAILS(cof_grad_return_run(plan, &t.args, COF_STREAM_NOW), status, part);             \
        t.out[0].data = kept[0];                                                                   \
        t.out[1].data = kept[1];                                                                   \
        CHECK(test_gr_untouched(&t), "outputs changed");                                           \
        test_gr_free(&t);                                                                          \
    } while (0)

static void refuse_tensors(const cof_grad_return_params *p, cof_plan *plan)
{
    CALL_REFUSED(t.args.size = 1, COF_ERR_INVALID, "args.size = 1");
    CALL_REFUSED(t.args.dk = NULL, COF_ERR_INVALID, "dk: NULL");
    CALL_REFUSED(t.args.dv = NULL, COF_ERR_INVALID, "dv: NULL");
    CALL_REFUSED(t.args.dk_out = NULL, COF_ERR_INVALID, "dk_out: NULL");
    CALL_REFUSED(t.args.dv_out = NULL, COF_ERR_INVALID, "dv_out: NULL");
    CALL_REFUSED(t.in[0][0].ndim = 3, COF_ERR_INVALID, "dk: ndim = 3, wanted 4");
    CALL_REFUSED(t.in_shape[0][0].dim[0] = 9, COF_ERR_INVALID, "dk: dim 0 (S) = 9, wanted 10");
    CALL_REFUSED(t.in_shape[0][1].dim[1] = 1, COF_ERR_INVALID, "dv: dim 1 (B) = 1, wanted 2");
    CALL_REFUSED(t.in_shape[0][1].dim[2] = 3, COF_ERR_INVALID, "dv: dim 2 (Hkv) = 3, wanted 2");
    CALL_REFUSED(t.in_shape[0][1].dim[3] = 8, COF_ERR_INVALID, "dv: dim 3 (D) = 8, wanted 5");
    CALL_REFUSED(t.out_shape[0].dim[0] = 11, COF_ERR_INVALID, "dk_out: dim 0 (S) = 11, wanted 10");
    CALL_REFUSED(t.out_shape[1].dim[3] = 8, COF_ERR_INVALID, "dv_out: dim 3 (D) = 8, wanted 5");
    CALL_REFUSED(t.in[0][0].dtype = COF_BF16, COF_ERR_INVALID, "dk: dtype bf16, wanted f32");
    CALL_REFUSED(t.out[1].dtype = COF_BF16, COF_ERR_INVALID, "dv_out: dtype bf16, wanted f32");
    CALL_REFUSED(t.out[0].data = NULL, COF_ERR_INVALID, "dk_out: data is NULL");
    CALL_REFUSED((strides[2] = 4, t.out[0].strides = strides), COF_ERR_INVALID, "elements overlap");
    CALL_REFUSED((strides[3] = 2, t.in[0][0].strides = strides), COF_ERR_UNSUPPORTED,
                 "dk: stride of the last dim (D) = 2, wanted 1");
    CALL_REFUSED(t.out[1].data = kept[0], COF_ERR_INVALID, "overlaps that of");
    CALL_REFUSED(t.out[0].data = t.in[0][0].data, COF_ERR_INVALID,
                 "dk_out: its memory overlaps that of dk");
    CALL_REFUSED((other.data = t.out[0].data, t.args.dv = &other), COF_ERR_INVALID,
                 "dk_out: its memory overlaps that of dv");
    CALL_REFUSED(t.out[1].data = t.in[0][0].data, COF_ERR_INVALID, /* the smaller one */
                 "dv_out: its memory overlaps that of dk");
    CALL_REFUSED(t.out[1].data = t.in[0][1].data, COF_ERR_INVALID,
                 "dv_out: its memory overlaps that of dv");
}

static void refuse_writers(const cof_grad_return_params *p, cof_plan *plan)
{
    CALL_REFUSED(t.args.writers = (cof_writers)3, COF_ERR_INVALID, "args.writers = 3: wanted 0");
    CALL_REFUSED(t.args.writers = COF_WRITERS_TABLE, COF_ERR_INVALID,
                 "args.writer_table NULL with writers = 2");
    CALL_REFUSED(t.args.writer_table = table, COF_ERR_INVALID,
                 "args.writer_table given with writers = 0");
    CALL_REFUSED((t.args.writers = COF_WRITERS_CAUSAL, t.args.writer_table = table),
                 COF_ERR_INVALID, "args.writer_table given with writers = 1");
    CALL_REFUSED(t.args.epoch = 1, COF_ERR_INVALID, "args.epoch = 1: wanted 0 without");
}

/* By one rank: its only section is the last. */
static void test_calls(void)
{
    for (int by_section = 0; by_section < 2; by_section++) {
        cof_grad_return_params params = test_gr_params(10), *p = &params;
        struct test_gr t;
        cof_plan *plan;
        params.by_section = by_section;
        CHECK_OK(cof_grad_return_plan_create(team, p, NULL, &plan));
        refuse_tensors(p, plan);
        refuse_writers(p, plan);
        test_gr_make(&t, p, 0, 1, 1);
        CHECK_FAILS(cof_grad_return_run(NULL, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                    "plan: NULL");
        CHECK_FAILS(cof_grad_return_run(plan, NULL, COF_STREAM_NOW), COF_ERR_INVALID, "args: NULL");
        CHECK_FAILS(cof_grad_return_run(plan, &t.args, (cof_stream){9, NULL}), COF_ERR_INVALID,
                    "stream: kind = 9");
        CHECK(test_gr_untouched(&t), "outputs changed");
        CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW)); /* refusals broke nothing */
        CHECK(test_gr_wrong(&t) == 0, "%lld elements", (long long)test_gr_wrong(&t));
        test_gr_free(&t);
        cof_plan_destroy(plan);
    }
}

static void test_other_operator(void)
{
    cof_attention_params p = test_attention_params(10);
    cof_grad_return_params q = test_gr_params(10);
    struct test_attention a;
    struct test_gr t;
    cof_plan *attention, *plan;
    CHECK_OK(cof_attention_plan_create(team, &p, NULL, &attention));
    CHECK_OK(cof_grad_return_plan_create(team, &q, NULL, &plan));
    test_attention_make(&a, &p, 0, 1, 1);
    test_gr_make(&t, &q, 0, 1, 1);
    CHECK_FAILS(cof_grad_return_run(attention, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: a plan of attention, wanted grad_return");
    CHECK_FAILS(cof_attention_forward(plan, &a.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: a plan of grad_return, wanted attention");
    test_attention_free(&a);
    test_gr_free(&t);
    cof_plan_destroy(attention);
    cof_plan_destroy(plan);
}

/* The caller's epochs: from any on, one more each whole. */
static void test_epochs(void)
{
    struct test_gr_memory m;
    struct test_gr t;
    cof_plan *plan;
    test_gr_memory_make(&m, 1, 4096);
    cof_grad_return_params p = test_gr_peer_params(10, &m);
    CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan));
    CHECK(strstr(cof_plan_describe(plan), "transfer=caller"), "%s", cof_plan_describe(plan));
    test_gr_make(&t, &p, 0, 1, 1);
    static const struct {
        uint32_t epoch;
        const char *text;
    } calls[] = {{0, "args.epoch = 0: wanted 1 .. 2147483647"},
                 {UINT32_C(1) << 31, "args.epoch = 2147483648: wanted 1 .. 2147483647"},
                 {INT32_MAX - 2, NULL},
                 {INT32_MAX - 2, "args.epoch = 2147483645: wanted 2147483646, one more than"},
                 {INT32_MAX, "args.epoch = 2147483647: wanted 2147483646, one more than"},
                 {INT32_MAX - 1, NULL},
                 {INT32_MAX, NULL},
                 {1, "args.epoch = 1: wanted 2147483648"}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        test_gr_poison(&t);
        t.args.epoch = calls[i].epoch;
        if (calls[i].text) {
            CHECK_FAILS(test_gr_run(plan, &t, COF_STREAM_NOW), COF_ERR_INVALID, calls[i].text);
            CHECK(test_gr_untouched(&t), "outputs changed");
        } else {
            CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
            CHECK(test_gr_wrong(&t) == 0, "epoch %u", calls[i].epoch);
        }
    }
    test_gr_free(&t);
    cof_plan_destroy(plan);
    test_gr_memory_free(&m, 1);
}

/* Refused in the middle of a whole on both ranks, which then goes on. */
static void test_sections(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_grad_return_params p = test_gr_params(11);
    cof_plan *plan;
    struct test_gr t;
    uint64_t table[4] = {3, 3, 3, 3};
    p.by_section = 1;
    CHECK_OK(cof_grad_return_plan_create(cof_world_team(w), &p, NULL, &plan));
    test_gr_make(&t, &p, rank, n_ranks, 1);
    cof_grad_return_args first = t.args, last = t.args;
    first.dk = &t.in[0][0];
    first.dv = &t.in[0][1];
    first.dk_out = first.dv_out = NULL;
    if (t.in_shape[0][0].dim[0] != t.in_shape[1][0].dim[0])
        CHECK_FAILS(cof_grad_return_run(plan, &last, COF_STREAM_NOW), COF_ERR_INVALID,
                    "dk: dim 0 (S)");
    CHECK_OK(cof_grad_return_run(plan, &first, COF_STREAM_NOW));
    last.writers = COF_WRITERS_CAUSAL;
    CHECK_FAILS(cof_grad_return_run(plan, &last, COF_STREAM_NOW), COF_ERR_INVALID,
                "args.writers: other ones than in the first of these 2 calls (call 2)");
    last.writers = COF_WRITERS_TABLE;
    last.writer_table = table;
    CHECK_FAILS(cof_grad_return_run(plan, &last, COF_STREAM_NOW), COF_ERR_INVALID, "other ones");
    last = t.args;
    last.dv_out = NULL;
    CHECK_FAILS(cof_grad_return_run(plan, &last, COF_STREAM_NOW), COF_ERR_INVALID, "dv_out: NULL");
    CHECK(test_gr_untouched(&t), "outputs changed");
    CHECK_OK(cof_grad_return_run(plan, &t.args, COF_STREAM_NOW));
    CHECK(test_gr_wrong(&t) == 0, "%lld elements", (long long)test_gr_wrong(&t));
    t.args.writers = COF_WRITERS_CAUSAL; /* another whole, other writers */
    CHECK_OK(test_gr_run(plan, &t, COF_STREAM_NOW));
    CHECK(test_gr_wrong(&t) == 0, "%lld elements", (long long)test_gr_wrong(&t));
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    test_gr_free(&t);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

/* The same, of epochs: one for the calls of a whole. */
static void test_section_epochs(int rank, int n_ranks, const char *job, void *arg)
{
    struct test_gr_memory *m = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_grad_return_params p = test_gr_peer_params(10, m);
    cof_plan *plan;
    struct test_gr t;
    p.by_section = 1;
    CHECK_OK(cof_grad_return_plan_create(cof_world_team(w), &p, NULL, &plan));
    test_gr_make(&t, &p, rank, n_ranks, 1);
    cof_grad_return_args first = t.args, last = t.args;
    first.dk = &t.in[0][0];
    first.dv = &t.in[0][1];
    first.epoch = 7;
    CHECK_OK(cof_grad_return_run(plan, &first, COF_STREAM_NOW));
    last.epoch = 8;
    CHECK_FAILS(cof_grad_return_run(plan, &last, COF_STREAM_NOW), COF_ERR_INVALID,
                "args.epoch = 8: wanted 7, equal to the last call's");
    last.epoch = 7;
    CHECK_OK(cof_grad_return_run(plan, &last, COF_STREAM_NOW));
    CHECK(test_gr_wrong(&t) == 0, "%lld elements", (long long)test_gr_wrong(&t));
    CHECK_FAILS(cof_grad_return_run(plan, &first, COF_STREAM_NOW), COF_ERR_INVALID,
                "args.epoch = 7: wanted 8, one more than the last call's");
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    test_gr_free(&t);
    cof_plan_destroy(plan);
    cof_world_destroy(w);
}

static cof_grad_return_args section_args(const struct test_gr *t, int section)
{
    cof_grad_return_args args = t->args;
    args.dk = &t->in[section][0];
    args.dv = &t->in[section][1];
    return args;
}

/* One whole at a time on an arena: the other plans are refused in the middle, and no call is lost.
 */
static void test_sections_between(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *three = cof_world_team(w);
    cof_attention_params q = test_attention_params(10);
    cof_grad_return_params p = test_gr_params(11);
    cof_plan *plan[2], *attention;
    cof_arena *arena;
    struct test_attention a;
    struct test_gr t;
    p.by_section = 1;
    CHECK_OK(cof_arena_create(three, 1 << 20, 0, &arena));
    for (int i = 0; i < 2; i++)
        CHECK_OK(cof_grad_return_plan_create(three, &p, arena, &plan[i]));
    CHECK_OK(cof_attention_plan_create(three, &q, arena, &attention));
    test_gr_make(&t, &p, rank, n_ranks, 1);
    test_attention_make(&a, &q, rank, n_ranks, 1);
    for (int s = 0; s < n_ranks; s++) {
        cof_grad_return_args first = section_args(&t, 0), args = section_args(&t, s);
        char text[80];
        CHECK_OK(cof_grad_return_run(plan[0], &args, COF_STREAM_NOW));
        if (s == n_ranks - 1)
            break;
        snprintf(text, sizeof text, "plan 0 (grad_return) has made %d of the 3 calls", s + 1);
        CHECK_FAILS(cof_grad_return_run(plan[1], &first, COF_STREAM_NOW), COF_ERR_INVALID, text);
        CHECK_FAILS(cof_attention_forward(attention, &a.args, COF_STREAM_NOW), COF_ERR_INVALID,
                    text);
    }
    for (int i = 0; i < 3; i++) {
        if (i > 0)
            CHECK_OK(test_gr_run(plan[i % 2], &t, COF_STREAM_NOW));
        CHECK(test_gr_wrong(&t) == 0, "whole %d", i);
        test_gr_poison(&t);
        CHECK_OK(cof_attention_forward(attention, &a.args, COF_STREAM_NOW));
    }
    CHECK_OK(cof_team_barrier(three));
    test_gr_free(&t);
    test_attention_free(&a);
    cof_plan_destroy(attention);
    cof_plan_destroy(plan[0]);
    cof_plan_destroy(plan[1]);
    cof_arena_destroy(arena);
    cof_world_destroy(w);
}

/* More than any machine has: refused before anything is touched. */
static void test_memory(void)
{
    cof_grad_return_params p = test_gr_params(INT64_C(1) << 37);
    cof_plan *plan;
    CHECK_OK(cof_grad_return_plan_create(team, &p, NULL, &plan)); /* one rank holds nothing */
    cof_plan_destroy(plan);
}

static void test_memory_of_two(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_grad_return_params p = test_gr_params(INT64_C(1) << 37);
    cof_plan *plan;
    CHECK_FAILS(cof_grad_return_plan_create(cof_world_team(w), &p, NULL, &plan), COF_ERR_NOMEM,
                "bytes wanted");
    CHECK_OK(cof_team_query(cof_world_team(w)));
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}

int main(void)
{
    struct test_gr_memory m;
    cof_world *world = test_world(0, 1, NULL, 10);
    team = cof_world_team(world);
    test_params();
    test_arena_with_peers();
    test_calls();
    test_other_operator();
    test_epochs();
    test_memory();
    cof_world_destroy(world);
    test_ranks(2, test_peers, NULL);
    test_ranks(16, test_padded_sizes, NULL);
    test_ranks(2, test_sections, NULL);
    test_ranks(3, test_sections_between, NULL);
    test_gr_memory_make(&m, 2, 4096);
    test_ranks(2, test_strides, &m);
    test_ranks(2, test_section_epochs, &m);
    test_gr_memory_free(&m, 2);
    test_ranks(2, test_memory_of_two, NULL);
    return test_done();
}
