/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CUDA devices where a rank is killed, passes another T, or never comes: an
 * error by the deadline on whoever is left, outputs NaN, and a device that can be used again. Ranks
 * are processes, made by exec: this program once more. Skipped where no device is. */
#define _GNU_SOURCE
#include "test_allreduce_rmsnorm.h"
#include "test_cuda_ranks.h"

#ifdef COFI_CUDA
enum { TOKENS = 6, HIDDEN = 1000, MAX_TOKENS = 4 };

/* ---- tensors on the device ------------------------------------------------------------------ */

/* The host's tensors and their copies, which calls get. */
static struct {
    struct test_arn host;
    cof_tensor x, residual, weight, residual_out, norm_out;
    cof_allreduce_rmsnorm_args args;
} own;

static cof_allreduce_rmsnorm_params params;

static cof_tensor on_device(const cof_tensor *host, size_t bytes, int device)
{
    cof_tensor t = *host;
    t.device = (cof_device){COF_DEVICE_CUDA, device};
    t.data = test_cuda_alloc(bytes);
    test_cuda_copy(t.data, host->data, bytes);
    return t;
}

static void make_rows(int64_t n_tokens, const cof_world *world, int seed)
{
    int device = cof_world_device(world);
    test_arn_make(&own.host, &params, n_tokens, cof_world_rank(world), cof_world_size(world), seed);
    const size_t bytes = test_arn_bytes(&own.host);
    cudaSetDevice(device);
    own.x = on_device(&own.host.x, bytes, device);
    own.residual = on_device(&own.host.residual, bytes, device);
    own.residual_out = on_device(&own.host.residual_out, bytes, device);
    own.norm_out = on_device(&own.host.norm_out, bytes, device);
    own.weight = on_device(&own.host.weight, (size_t)params.hidden * sizeof(float), device);
    own.args = (cof_allreduce_rmsnorm_args){.size = sizeof own.args, .x = &own.x,
                                            .residual = &own.residual, .weight = &own.weight,
                                            .residual_out = &own.residual_out,
                                            .norm_out = &own.norm_out};
}

static void make_tensors(struct test_cuda_rank *r, int seed)
{
    make_rows(TOKENS, r->world, seed);
}

static void free_tensors(struct test_cuda_rank *r)
{
    cof_tensor *all[] = {&own.x, &own.residual, &own.weight, &own.residual_out, &own.norm_out};
    (void)r;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        cudaFree(all[i]->data);
    test_arn_free(&own.host);
}

static void poison(struct test_cuda_rank *r)
{
    const size_t bytes = test_arn_bytes(&own.host);
    (void)r;
    test_arn_poison(&own.host);
    test_cuda_copy(own.residual_out.data, own.host.residual_out.data, bytes);
    test_cuda_copy(own.norm_out.data, own.host.norm_out.data, bytes);
}

static void check(struct test_cuda_rank *r, bool are_nan)
{
    const size_t bytes = test_arn_bytes(&own.host);
    (void)r;
    test_cuda_copy(own.host.residual_out.data, own.residual_out.data, bytes);
    test_cuda_copy(own.host.norm_out.data, own.norm_out.data, bytes);
    if (are_nan) {
        CHECK(test_arn_all_nan(&own.host), "outputs are not NaN");
    } else {
        int64_t n_wrong = test_arn_wrong(&own.host);
        CHECK(n_wrong == 0, "%lld elements", (long long)n_wrong);
    }
}

/* ---- calls and cases ------------------------------------------------------------------------ */

static const struct form {
    cof_allreduce_algorithm algorithm;
    const char *units, *name;
} forms[] = {{COF_ALLREDUCE_ONE_SHOT, "auto", "one-shot, units=auto"},
             {COF_ALLREDUCE_TWO_SHOT, "auto", "two-shot, units=auto"},
             {COF_ALLREDUCE_ONE_SHOT, "words", "one-shot, units=words"}};
enum { N_FORMS = sizeof forms / sizeof forms[0] };

static cof_status make_plan(struct test_cuda_rank *r)
{
    params = test_arn_params(HIDDEN, MAX_TOKENS);
    params.algorithm = forms[r->form].algorithm;
    return cof_allreduce_rmsnorm_plan_create(r->team, &params, NULL, &r->plan);
}

static cof_status call(struct test_cuda_rank *r)
{
    return cof_allreduce_rmsnorm_run(r->plan, &own.args, COF_STREAM_NOW);
}

/* Rank 1 has one row. */
static void tokens_differ(struct test_cuda_rank *r, const char *job)
{
    if (r->rank == 1) {
        free_tensors(r);
        make_rows(1, r->world, 1);
    }
    CHECK_FAILS(call(r), COF_ERR_MISMATCH, "ranks disagree about this call");
    check(r, true);
    CHECK_OK(cof_team_barrier(r->team)); /* nobody leaves while the other one waits */
    test_cuda_look_after(r, job);
}

static void absent(struct test_cuda_rank *r, const char *job)
{
    test_cuda_absent(r, job, "rank 0 waited for rank 1 at \"rows", "told by rank 0");
}

static const struct test_cuda_case cases[] = {{"killed", test_cuda_killed, true, "30"},
                                              {"tokens_differ", tokens_differ, false, "30"},
                                              {"absent", absent, false, "1"}};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static const struct test_cuda_op op = {
    .name = "allreduce",
    .n_ranks = 2,
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
    for (int i = 0; i < N_CASES; i++)
        for (int form = 0; form < N_FORMS; form++) {
            setenv("COFUSE_TAGGED_UNITS", forms[form].units, 1);
            test_cuda_run(&op, i, form, forms[form].name);
        }
    return test_done();
}
#endif
