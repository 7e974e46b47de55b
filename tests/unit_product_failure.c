/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A matrix product that fails on one rank in the middle of a call: an error on every rank whose
 * results need that product, with outputs NaN and the text of the product; right results on the
 * others. The program is linked with the steps of trimul and cofi_gemm_run wrapped. */
#include "ops/trimul/trimul_cpu.h"
#include "test_trimul.h"

enum step { FRONT, CONTRACT, BACK, BACK_GRAD, CONTRACT_GRAD, FRONT_GRAD, N_STEPS };

static _Atomic int failing_step = -1; /* of trimul, on rank 0 */
static atomic_bool all_fail;          /* every product, on all ranks */
static atomic_bool helper_fails;      /* the products of a stream's helper */
static atomic_bool helper_failed;
static _Thread_local bool is_in_failing_step, is_dispatcher;

cof_status __real_cofi_gemm_run(struct cofi_gemm *gemm, enum cofi_gemm_form form,
                                enum cofi_gemm_type type, int64_t m, int64_t n, int64_t k,
                                const void *a, int64_t lda, const void *b, int64_t ldb,
                                bool accumulate, float *c, int64_t ldc);
cof_status __wrap_cofi_gemm_run(struct cofi_gemm *gemm, enum cofi_gemm_form form,
                                enum cofi_gemm_type type, int64_t m, int64_t n, int64_t k,
                                const void *a, int64_t lda, const void *b, int64_t ldb,
                                bool accumulate, float *c, int64_t ldc);

/* A helper has its failure before the dispatcher has taken all tasks. */
static bool is_to_fail(void)
{
    if (!atomic_load(&helper_fails))
        return atomic_load(&all_fail) || is_in_failing_step;
    if (!is_dispatcher) {
        atomic_store(&helper_failed, true);
        return true;
    }
    for (int i = 0; i < 60000 && !atomic_load(&helper_failed); i++)
        usleep(1000);
    CHECK(atomic_load(&helper_failed), "no helper took a task");
    return false;
}

cof_status __wrap_cofi_gemm_run(struct cofi_gemm *gemm, enum cofi_gemm_form form,
                                enum cofi_gemm_type type, int64_t m, int64_t n, int64_t k,
                                const void *a, int64_t lda, const void *b, int64_t ldb,
                                bool accumulate, float *c, int64_t ldc)
{
    COF_FAIL_IF(is_to_fail(), COF_ERR_NOMEM, "a product refused by a test");
    return __real_cofi_gemm_run(gemm, form, type, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
}

#define STEP(which, name, more_parameters, more)                                                   \
    void __real_cofi_tri_cpu_##name(struct cofi_cpu_stream *s,                                     \
                                    struct cofi_tri_plan *plan more_parameters);                   \
    void __wrap_cofi_tri_cpu_##name(struct cofi_cpu_stream *s,                                     \
                                    struct cofi_tri_plan *plan more_parameters);                   \
    void __wrap_cofi_tri_cpu_##name(struct cofi_cpu_stream *s,                                     \
                                    struct cofi_tri_plan *plan more_parameters)                    \
    {                                                                                              \
        is_dispatcher = true;                                                                      \
        is_in_failing_step = atomic_load(&failing_step) == (which) && plan->rank == 0;             \
        __real_cofi_tri_cpu_##name(s, plan more);                                                  \
        is_in_failing_step = false;                                                                \
    }
#define COMMA ,
STEP(FRONT, front, COMMA int round, COMMA round)
STEP(CONTRACT, contract, COMMA int64_t begin COMMA int64_t end, COMMA begin COMMA end)
STEP(BACK, back, , )
STEP(BACK_GRAD, back_grad, , )
STEP(CONTRACT_GRAD, contract_grad, , )
STEP(FRONT_GRAD, front_grad, , )

/* ---- trimul --------------------------------------------------------------------------------- */

struct fixture {
    cof_world *world;
    cof_plan *plan;
    struct test_tri t;
    struct test_tri_part part;
};

static void set_up(struct fixture *f, int rank, int n_ranks, const char *job, bool reduce)
{
    struct test_tri_problem p = {.params = COF_TRIMUL_PARAMS_INIT, .n = 9, .n_batch = 2,
                                 .n_ranks = n_ranks, .with_biases = true, .with_grads = true,
                                 .seed = 5};
    p.params.dtype = COF_F32;
    p.params.n_rows = 9;
    p.params.n_batch = 2;
    p.params.dim = 8;
    p.params.hidden = 48;
    p.params.chunk_features = 8;
    p.params.reduce_param_grads = reduce;
    f->world = test_world(rank, n_ranks, job, 60);
    test_tri_make(&f->t, &p);
    CHECK_OK(cof_trimul_plan_create(cof_world_team(f->world), &p.params, NULL, &f->plan));
    test_tri_part_make(&f->part, &f->t, rank, 0);
    CHECK_OK(cof_trimul_set_weights(f->plan, &f->part.weight_args, 0, COF_STREAM_NOW));
}

static void tear_down(struct fixture *f)
{
    cof_plan_destroy(f->plan);
    test_tri_part_free(&f->part);
    test_tri_free(&f->t);
    cof_world_destroy(f->world);
}

static int64_t floats_of(const cof_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

static int64_t count_nan(const cof_tensor *t)
{
    int64_t n = 0;
    for (int64_t i = 0; i < floats_of(t); i++)
        n += isnan(((float *)t->data)[i]) != 0;
    return n;
}

struct failure {
    enum step step;
    bool backward, reduce;
    bool is_local; /* no other rank needs what the step makes: it may end before it is told */
};

static cof_status call(struct fixture *f, const struct failure *x)
{
    return (x->backward ? cof_trimul_backward : cof_trimul_forward)(f->plan, &f->part.args,
                                                                    COF_STREAM_NOW);
}

/* The outputs of the call: all NaN, or as they were before. */
static void check_outputs(const struct fixture *f, const struct failure *x, bool want_nan,
                          const float *before)
{
    const cof_tensor *out = x->backward ? &f->part.dx : &f->part.out;
    const int64_t n = floats_of(out);
    CHECK(want_nan ? count_nan(out) == n
                   : !memcmp(out->data, before, (size_t)n * sizeof *before),
          "step %d, backward %d, reduce %d: %s", x->step, x->backward, x->reduce,
          want_nan ? "outputs are not NaN" : "outputs changed");
    for (int i = 0; i < TEST_TRI_WEIGHTS && x->backward; i++)
        CHECK(count_nan(&f->part.grads[i]) == (want_nan ? floats_of(&f->part.grads[i]) : 0),
              "step %d, reduce %d: gradient %d is %s NaN", x->step, x->reduce, i,
              want_nan ? "not" : "partly");
}

static void fail_on_one_rank(int rank, int n_ranks, const char *job, void *arg)
{
    const struct failure *x = arg;
    struct fixture f;
    set_up(&f, rank, n_ranks, job, x->reduce);
    const cof_tensor *out = x->backward ? &f.part.dx : &f.part.out;
    const size_t bytes = (size_t)floats_of(out) * sizeof(float);
    float *before = malloc(bytes);
    CHECK_OK(call(&f, x));
    memcpy(before, out->data, bytes);
    test_meet(n_ranks);
    atomic_store(&failing_step, (int)x->step);
    test_meet(n_ranks);
    const cof_status status = call(&f, x);
    if (status != COF_OK || rank == 0 || !x->is_local)
        CHECK(status == COF_ERR_NOMEM && strstr(cof_last_error(), "a product refused by a test"),
              "step %d, backward %d: %s: %s", x->step, x->backward, cof_status_name(status),
              status == COF_OK ? "" : cof_last_error());
    check_outputs(&f, x, status != COF_OK, before);
    test_meet(n_ranks);
    atomic_store(&failing_step, -1);
    CHECK(call(&f, x) != COF_OK, "the plan lives on after step %d", x->step);
    free(before);
    tear_down(&f);
}

/* The text of a failure on a helper's thread is that of the call. */
static void fail_on_helper(int rank, int n_ranks, const char *job, void *arg)
{
    struct fixture f;
    cof_stream stream;
    (void)arg;
    set_up(&f, rank, n_ranks, job, false);
    CHECK_OK(cof_stream_create(f.world, 2, &stream));
    atomic_store(&helper_fails, true);
    CHECK_OK(cof_trimul_forward(f.plan, &f.part.args, stream));
    CHECK_FAILS(cof_stream_sync(stream), COF_ERR_NOMEM, "a product refused by a test");
    atomic_store(&helper_fails, false);
    cof_stream_destroy(stream);
    tear_down(&f);
}

static void test_trimul(void)
{
    static const struct failure failures[] = {
        {FRONT, false, false, false},        {CONTRACT, false, false, false},
        {BACK, false, false, true},          {FRONT, true, true, false},
        {CONTRACT, true, true, false},       {BACK_GRAD, true, true, false},
        {CONTRACT_GRAD, true, true, false},  {FRONT_GRAD, true, true, false},
        {FRONT_GRAD, true, false, true}};
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++)
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++)
            test_ranks(n_ranks, fail_on_one_rank, (void *)(uintptr_t)&failures[i]);
    test_ranks(1, fail_on_helper, NULL);
}

/* ---- attention ------------------------------------------------------------------------------ */

/* Products fail on all ranks: each of them owes a gradient that it does not send, and none waits
 * for it until the deadline. */
static void fail_attention(int rank, int n_ranks, const char *job, void *arg)
{
    const cof_attention_schedule *schedule = arg;
    struct test_attention t;
    cof_attention_params p = test_attention_params(50);
    cof_plan *plan;
    cof_world *w = test_world(rank, n_ranks, job, 60);
    p.schedule = *schedule;
    test_attention_make(&t, &p, rank, n_ranks, (unsigned)rank);
    for (int backward = 0; backward < 2; backward++) {
        CHECK_OK(cof_attention_plan_create(cof_world_team(w), &p, NULL, &plan));
        CHECK_OK(cof_attention_forward(plan, &t.args, COF_STREAM_NOW));
        test_meet(n_ranks);
        atomic_store(&all_fail, true);
        test_meet(n_ranks);
        CHECK_FAILS((backward ? cof_attention_backward : cof_attention_forward)(plan, &t.args,
                                                                               COF_STREAM_NOW),
                    COF_ERR_NOMEM, "a product refused by a test");
        CHECK(isnan(((float *)(backward ? &t.dq : &t.o)->data)[0]), "outputs are not NaN");
        CHECK(!backward || isnan(((float *)t.dk.data)[0]), "dk is not NaN");
        test_meet(n_ranks);
        atomic_store(&all_fail, false);
        test_meet(n_ranks);
        CHECK_FAILS(cof_attention_forward(plan, &t.args, COF_STREAM_NOW), COF_ERR_POISONED,
                    "a product refused by a test");
        cof_plan_destroy(plan);
    }
    test_attention_free(&t);
    cof_world_destroy(w);
}

int main(void)
{
    static const cof_attention_schedule schedules[] = {COF_SCHEDULE_RING, COF_SCHEDULE_GATHER};
    test_trimul();
    for (int i = 0; i < 2; i++)
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++)
            test_ranks(n_ranks, fail_attention, (void *)(uintptr_t)&schedules[i]);
    return test_done();
}
