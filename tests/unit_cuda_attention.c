/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Attention on CUDA devices where a rank is killed, or comes too late: an error by the deadline on
 * whoever is left, also in the middle of a ring; outputs NaN, and a device that can be used again.
 * And what plans on devices refuse. Ranks are processes, made by exec: this program once more.
 * Skipped where no device is. */
#define _GNU_SOURCE
#include <math.h>

#include "test_cuda_ranks.h"

#ifdef COFI_CUDA
enum { HEADS = 2, DIM = 8, ROWS = 66 };

/* ---- tensors on the device ------------------------------------------------------------------ */

enum { Q, K, V, O, LSE, N_TENSORS };

/* q = 0, so that every query takes the mean of v, whose rows hold their own numbers. */
static struct {
    int64_t n_rows; /* local */
    float *host[N_TENSORS];
    cof_shape shape[N_TENSORS];
    cof_tensor tensor[N_TENSORS];
    cof_attention_args args;
} own;

static size_t bytes_of(int which)
{
    return (size_t)(own.n_rows * HEADS * (which == LSE ? 1 : DIM)) * sizeof(float);
}

static float value_of(int which, int64_t global, int64_t i)
{
    switch (which) {
    case K: return (float)(i % 5) - 2;
    case V: return (float)global;
    case Q: return 0;
    default: return NAN;
    }
}

static void fill(int which, const cof_layout *layout, int rank)
{
    int64_t per_row = which == LSE ? HEADS : HEADS * DIM;
    for (int64_t i = 0; i < own.n_rows * per_row; i++)
        own.host[which][i] = value_of(which, cof_layout_global_row(layout, rank, i / per_row), i);
    test_cuda_copy(own.tensor[which].data, own.host[which], bytes_of(which));
}

static void make_tensors(struct test_cuda_rank *r, int seed)
{
    const int rank = cof_world_rank(r->world);
    cof_layout layout = {COF_LAYOUT_ZIGZAG, COF_CHUNKING_BALANCED, cof_world_size(r->world), ROWS};
    cof_device device = {COF_DEVICE_CUDA, cof_world_device(r->world)};
    (void)seed;
    cudaSetDevice(device.device_id);
    own.n_rows = cof_layout_local_rows(&layout, rank);
    for (int i = 0; i < N_TENSORS; i++) {
        own.host[i] = malloc(bytes_of(i));
        own.shape[i] = i == LSE ? (cof_shape){{1, HEADS, own.n_rows}}
                                : (cof_shape){{1, own.n_rows, HEADS, DIM}};
        own.tensor[i] = cof_tensor_make(test_cuda_alloc(bytes_of(i)), device, COF_F32,
                                        i == LSE ? 3 : 4, &own.shape[i]);
        fill(i, &layout, rank);
    }
    own.args = (cof_attention_args){.size = sizeof own.args, .q = &own.tensor[Q],
                                    .k = &own.tensor[K], .v = &own.tensor[V],
                                    .o = &own.tensor[O], .lse = &own.tensor[LSE]};
}

static void free_tensors(struct test_cuda_rank *r)
{
    (void)r;
    for (int i = 0; i < N_TENSORS; i++) {
        cudaFree(own.tensor[i].data);
        free(own.host[i]);
    }
}

static void poison(struct test_cuda_rank *r)
{
    (void)r;
    for (int which = O; which <= LSE; which++) {
        memset(own.host[which], 0, bytes_of(which));
        test_cuda_copy(own.tensor[which].data, own.host[which], bytes_of(which));
    }
}

static void check(struct test_cuda_rank *r, bool are_nan)
{
    const double wanted[] = {[O] = (ROWS - 1) / 2.0, [LSE] = log((double)ROWS)};
    (void)r;
    for (int which = O; which <= LSE; which++) {
        int64_t n = (int64_t)(bytes_of(which) / sizeof(float)), n_bad = 0;
        test_cuda_copy(own.host[which], own.tensor[which].data, bytes_of(which));
        for (int64_t i = 0; i < n; i++) {
            double x = own.host[which][i];
            n_bad += are_nan ? !isnan(x) : !(fabs(x - wanted[which]) < 1e-3);
        }
        CHECK(n_bad == 0, "%s: %lld of %lld elements are not %s, the first is %g",
              which == O ? "o" : "lse", (long long)n_bad, (long long)n, are_nan ? "NaN" : "right",
              (double)own.host[which][0]);
    }
}

/* ---- calls and cases ------------------------------------------------------------------------ */

static const char *const forms[] = {[COF_SCHEDULE_RING] = "ring", [COF_SCHEDULE_GATHER] = "gather"};
static cof_attention_params params;

static cof_status make_plan(struct test_cuda_rank *r)
{
    params = (cof_attention_params)COF_ATTENTION_PARAMS_INIT;
    params.dtype = COF_F32;
    params.n_batch = 1;
    params.n_rows = ROWS;
    params.n_heads = HEADS;
    params.head_dim_qk = DIM;
    params.forward_only = 1;
    params.schedule = (cof_attention_schedule)r->form;
    return cof_attention_plan_create(r->team, &params, NULL, &r->plan);
}

static cof_status call(struct test_cuda_rank *r)
{
    return cof_attention_forward(r->plan, &own.args, COF_STREAM_NOW);
}

static void absent(struct test_cuda_rank *r, const char *job)
{
    test_cuda_absent(r, job, "keys published", "told by rank");
}

/* Strides of other tensors, and what there is none of on devices yet. */
static void refused(struct test_cuda_rank *r, const char *job)
{
    cof_attention_params p = params;
    cof_plan *plan = NULL;
    (void)job;
    p.forward_only = 0;
    CHECK_FAILS(cof_attention_plan_create(r->team, &p, NULL, &plan), COF_ERR_UNSUPPORTED,
                "set params.forward_only");
    CHECK(plan == NULL, "a plan");
    p = params;
    p.only_compact = 1;
    CHECK_OK(cof_attention_plan_create(r->team, &p, NULL, &plan));
    if (plan) {
        cof_shape strides = {{0, HEADS * DIM, DIM, 1}};
        cof_tensor half = own.tensor[Q]; /* every head row twice as far from the next */
        strides.dim[1] *= 2;
        half.strides = strides.dim;
        cof_attention_args args = own.args;
        args.q = &half;
        CHECK_FAILS(cof_attention_forward(plan, &args, COF_STREAM_NOW), COF_ERR_INVALID,
                    "only_compact");
        CHECK_OK(cof_attention_forward(plan, &own.args, COF_STREAM_NOW));
        check(r, false);
        CHECK_OK(cof_team_barrier(r->team));
        cof_plan_destroy(plan);
    }
    test_cuda_leave(r);
}

/* Killed: of the two that are left one waits in the first step of its ring, and the other one in
 * the second, with a section done. */
static const struct test_cuda_case cases[] = {{"killed", test_cuda_killed, true, "30"},
                                              {"absent", absent, false, "1"},
                                              {"refused", refused, false, "30"}};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static const struct test_cuda_op op = {
    .name = "attention",
    .n_ranks = 3,
    .cases = cases,
    .make_plan = make_plan,
    .make_tensors = make_tensors,
    .free_tensors = free_tensors,
    .poison = poison,
    .call = call,
    .check = check,
};

int main(int argc, char **argv)
{
    if (argc == TEST_CUDA_WORDS)
        return test_cuda_rank_main(&op, argv);
    if (!test_cuda_devices())
        return 77;
    for (int i = 0; i < N_CASES; i++) {
        test_cuda_run(&op, i, COF_SCHEDULE_RING, forms[COF_SCHEDULE_RING]);
        test_cuda_run(&op, i, COF_SCHEDULE_GATHER, forms[COF_SCHEDULE_GATHER]);
    }
    return test_done();
}
#endif
