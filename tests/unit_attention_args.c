/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Bad parameters and tensors of attention: each is refused with a text that names the argument, its
 * value and the rule, and leaves outputs as they were. */
#include <stdbool.h>

#include "test.h"

static cof_team *team;

#define REFUSED(change, status, part)                                                              \
    do {                                                                                           \
        cof_attention_params p = test_attention_params(10);                                        \
        cof_plan *plan;                                                                            \
        change;                                                                                    \
        CHECK_FAILS(cof_attention_plan_create(team, &p, NULL, &plan), status, part);               \
        cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;                                      \
        CHECK_FAILS(cof_attention_workspace(team, &p, &sizes), status, part);                      \
    } while (0)

static void test_params(void)
{
    REFUSED(p.size = 3, COF_ERR_INVALID, "params.size = 3");
    REFUSED(p.dtype = COF_I32, COF_ERR_INVALID, "params.dtype = i32: wanted bf16, f16 or f32");
    REFUSED(p.format = (cof_attention_format)2, COF_ERR_INVALID, "params.format = 2");
    REFUSED(p.mask = (cof_mask)5, COF_ERR_INVALID, "params.mask = 5");
    REFUSED(p.layout = (cof_layout_kind)3, COF_ERR_INVALID, "params.layout = 3");
    REFUSED(p.chunking = (cof_chunking)3, COF_ERR_INVALID, "params.chunking = 3");
    REFUSED(p.schedule = (cof_attention_schedule)9, COF_ERR_INVALID, "params.schedule = 9");
    REFUSED(p.n_batch = 0, COF_ERR_INVALID, "params.n_batch = 0");
    REFUSED(p.n_rows = -1, COF_ERR_INVALID, "params.n_rows = -1");
    REFUSED(p.n_heads = 0, COF_ERR_INVALID, "params.n_heads = 0");
    REFUSED(p.n_kv_heads = 3, COF_ERR_INVALID, "params.n_kv_heads = 3: wanted a divisor");
    REFUSED(p.head_dim_qk = 513, COF_ERR_INVALID, "params.head_dim_qk = 513");
    REFUSED(p.head_dim_v = -4, COF_ERR_INVALID, "params.head_dim_v = -4");
    REFUSED(p.n_rows = INT64_C(1) << 60, COF_ERR_INVALID, "past the address space");
    REFUSED((p.n_batch = INT64_C(1) << 62, p.n_heads = INT64_C(1) << 62, p.n_kv_heads = 1),
            COF_ERR_INVALID, "past the address space");
    REFUSED(p.scale = 1e39, COF_ERR_INVALID, "params.scale = 1e+39");
    REFUSED(p.scale = 1.0 / 0.0, COF_ERR_INVALID, "params.scale = inf");
    REFUSED(p.forward_only = 2, COF_ERR_INVALID, "params.forward_only");
    REFUSED(p.wire_f32 = -1, COF_ERR_INVALID, "params.wire_f32");
    REFUSED(p.save_kv = 2, COF_ERR_INVALID, "params.save_kv = 2");
    REFUSED(p.has_window = 2, COF_ERR_INVALID, "params.has_window = 2");
    REFUSED(p.only_compact = -1, COF_ERR_INVALID, "params.only_compact = -1");
    REFUSED(p.window_left = 1, COF_ERR_INVALID, "params.window_left = 1: wanted 0 without");
    REFUSED((p.has_window = 1, p.window_left = -2), COF_ERR_INVALID, "params.window_left = -2");
    REFUSED((p.has_window = 1, p.window_right = INT64_MAX), COF_ERR_INVALID,
            "params.window_right = 9223372036854775807: wanted -1");
    REFUSED((p.save_kv = 1, p.forward_only = 1), COF_ERR_INVALID, "with forward_only nothing");
    REFUSED(p.schedule = (cof_attention_schedule)3, COF_ERR_INVALID, "params.schedule = 3");
    cof_plan *plan;
    cof_attention_params p = test_attention_params(10);
    CHECK_FAILS(cof_attention_plan_create(team, NULL, NULL, &plan), COF_ERR_INVALID,
                "params: NULL");
    CHECK_FAILS(cof_attention_plan_create(NULL, &p, NULL, &plan), COF_ERR_INVALID, "team: NULL");
    CHECK_FAILS(cof_attention_plan_create(team, &p, NULL, NULL), COF_ERR_INVALID, "plan_out");
    CHECK_FAILS(cof_attention_workspace(team, &p, NULL), COF_ERR_INVALID, "sizes_out");
}

/* The call with one thing changed is refused; the outputs keep every byte. */
#define CALL_REFUSED(change, status, part)                                                         \
    do {                                                                                           \
        struct test_attention t;                                                                   \
        test_attention_make(&t, &p, 0, 1, 1);                                                      \
        memset(t.o.data, 0x5a, 10 * 2 * 16 * 4);                                                   \
        memset(t.dq.data, 0x5a, 10 * 2 * 16 * 4);                                                  \
        int64_t strides[4] = {10 * 2 * 16, 2 * 16, 16, 1};                                         \
        (void)strides;                                                                             \
        change;                                                                                    \
        CHECK_FAILS(cof_attention_backward(plan, &t.args, COF_STREAM_NOW), status, part);          \
        for (int i = 0; i < 10 * 2 * 16 * 4; i++)                                                  \
            CHECK(((unsigned char *)t.dq.data)[i] == 0x5a, "byte %d of dq changed", i);            \
        test_attention_free(&t);                                                                   \
    } while (0)

static void test_tensors(void)
{
    cof_attention_params p = test_attention_params(10);
    cof_plan *plan;
    CHECK_OK(cof_attention_plan_create(team, &p, NULL, &plan));
    CALL_REFUSED(t.args.size = 1, COF_ERR_INVALID, "args.size = 1");
    CALL_REFUSED(t.args.q = NULL, COF_ERR_INVALID, "q: NULL");
    CALL_REFUSED(t.args.lse = NULL, COF_ERR_INVALID, "lse: NULL");
    CALL_REFUSED(t.args.dout = NULL, COF_ERR_INVALID, "dout: NULL");
    CALL_REFUSED(t.k.ndim = 3, COF_ERR_INVALID, "k: ndim = 3, wanted 4");
    CALL_REFUSED(t.k.ndim = 30, COF_ERR_INVALID, "k: ndim = 30, wanted 4");
    CALL_REFUSED(t.k.shape = NULL, COF_ERR_INVALID, "k: shape is NULL");
    CALL_REFUSED(t.v_shape.dim[1] = 11, COF_ERR_INVALID, "v: dim 1 (S_local) = 11, wanted 10");
    CALL_REFUSED(t.lse_shape.dim[2] = 9, COF_ERR_INVALID, "lse: dim 2 (S_local) = 9");
    CALL_REFUSED(t.dk.dtype = COF_BF16, COF_ERR_INVALID, "dk: dtype bf16, wanted f32");
    CALL_REFUSED(t.lse.dtype = COF_BF16, COF_ERR_INVALID, "lse: dtype bf16, wanted f32");
    CALL_REFUSED(t.q.device.device_type = COF_DEVICE_CUDA, COF_ERR_INVALID, "q: device type 2");
    CALL_REFUSED((strides[3] = 2, t.q.strides = strides), COF_ERR_UNSUPPORTED,
                 "q: stride of the last dim (D) = 2, wanted 1");
    CALL_REFUSED((strides[1] = -32, t.q.strides = strides), COF_ERR_UNSUPPORTED,
                 "q: stride of dim 1 (S_local) = -32");
    CALL_REFUSED((strides[2] = 8, t.dv.strides = strides), COF_ERR_INVALID, "elements overlap");
    CALL_REFUSED((strides[1] = 0, t.dv.strides = strides), COF_ERR_INVALID, "elements overlap");
    CALL_REFUSED((strides[1] = INT64_MAX / 2, t.dv.strides = strides), COF_ERR_INVALID,
                 "past the address space");
    CALL_REFUSED(t.o.byte_offset = 2, COF_ERR_INVALID, "alignment to 4 bytes");
    CALL_REFUSED(t.args.dk = &t.dv, COF_ERR_INVALID, "dv: its memory overlaps that of dk");
    CALL_REFUSED(t.args.dk = &t.q, COF_ERR_INVALID, "dk: its memory overlaps that of q");
    struct test_attention t;
    test_attention_make(&t, &p, 0, 1, 1);
    void *data = t.dout.data;
    t.dout.data = NULL;
    CHECK_FAILS(cof_attention_backward(plan, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "dout: data is NULL");
    t.dout.data = data;
    CHECK_FAILS(cof_attention_forward(plan, &t.args, (cof_stream){9, NULL}), COF_ERR_INVALID,
                "stream: kind = 9");
    CHECK_FAILS(cof_attention_forward(plan, &t.args, (cof_stream){COF_STREAM_KIND_CPU, NULL}),
                COF_ERR_INVALID, "stream: handle is NULL");
    CHECK_FAILS(cof_attention_forward(NULL, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "plan: NULL");
    CHECK_OK(cof_attention_forward(plan, &t.args, COF_STREAM_NOW));
    CHECK_OK(cof_attention_backward(plan, &t.args, COF_STREAM_NOW)); /* refusals broke nothing */
    test_attention_free(&t);
    cof_plan_destroy(plan);
}

/* saved_kv is written by forward and read by backward: apart from what else is there. */
static void test_saved(void)
{
    cof_attention_params p = test_attention_params(10);
    cof_plan *plan;
    struct test_attention t;
    cof_shape shape = {{1024}};
    p.save_kv = 1;
    CHECK_OK(cof_attention_plan_create(team, &p, NULL, &plan));
    test_attention_make(&t, &p, 0, 1, 1);
    cof_tensor saved = t.q;
    saved.dtype = COF_U8;
    saved.ndim = 1;
    saved.shape = shape.dim;
    saved.data = aligned_alloc(128, 4096);
    t.args.saved_kv = &saved;
    const struct {
        const char *name;
        cof_tensor *tensor;
        bool is_forward, is_backward; /* refused there */
    } others[] = {{"q", &t.q, true, false},     {"k", &t.k, true, false},
                  {"v", &t.v, true, false},     {"o", &t.o, true, false},
                  {"lse", &t.lse, true, false}, {"dq", &t.dq, false, true},
                  {"dk", &t.dk, false, true},   {"dv", &t.dv, false, true}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        void *data = others[i].tensor->data;
        others[i].tensor->data = (char *)saved.data + 512;
        for (int backward = 0; backward < 2; backward++) {
            cof_status status = backward
                                    ? cof_attention_backward(plan, &t.args, COF_STREAM_NOW)
                                    : cof_attention_forward(plan, &t.args, COF_STREAM_NOW);
            bool refused = backward ? others[i].is_backward : others[i].is_forward;
            CHECK(status == (refused ? COF_ERR_INVALID : COF_OK) &&
                      (!refused || strstr(cof_last_error(), "saved_kv")),
                  "%s in %s: %s", others[i].name, backward ? "backward" : "forward",
                  cof_status_name(status));
        }
        others[i].tensor->data = data;
    }
    free(saved.data);
    test_attention_free(&t);
    cof_plan_destroy(plan);
}

static void test_forward_only(void)
{
    cof_attention_params p = test_attention_params(10);
    cof_plan *plan;
    cof_workspace_sizes both = COF_WORKSPACE_SIZES_INIT, forward = COF_WORKSPACE_SIZES_INIT;
    CHECK_OK(cof_attention_workspace(team, &p, &both));
    p.forward_only = 1;
    CHECK_OK(cof_attention_workspace(team, &p, &forward));
    CHECK(forward.local < both.local && both.saved == 0, "%zu, %zu", forward.local, both.local);
    CHECK_OK(cof_attention_plan_create(team, &p, NULL, &plan));
    struct test_attention t;
    test_attention_make(&t, &p, 0, 1, 1);
    CHECK_OK(cof_attention_forward(plan, &t.args, COF_STREAM_NOW));
    CHECK_FAILS(cof_attention_backward(plan, &t.args, COF_STREAM_NOW), COF_ERR_INVALID,
                "forward_only = 1");
    CHECK(strstr(cof_plan_describe(plan), "direction=forward"), "%s", cof_plan_describe(plan));
    test_attention_free(&t);
    cof_plan_destroy(plan);
}

/* More than any machine has: refused before anything is touched. */
static void test_memory(void)
{
    cof_attention_params p = test_attention_params(INT64_C(1) << 40);
    cof_plan *plan;
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    CHECK_OK(cof_attention_workspace(team, &p, &sizes));
    CHECK(sizes.local > (size_t)1 << 46, "%zu bytes", sizes.local);
    CHECK_FAILS(cof_attention_plan_create(team, &p, NULL, &plan), COF_ERR_NOMEM, "bytes wanted");
    CHECK_OK(cof_team_query(team));
}

int main(void)
{
    cof_world *world = test_world(0, 1, NULL, 10);
    team = cof_world_team(world);
    test_params();
    test_tensors();
    test_saved();
    test_forward_only();
    test_memory();
    cof_world_destroy(world);
    return test_done();
}
