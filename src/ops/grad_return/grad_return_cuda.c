/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return on CUDA devices: sizes, memory, kernels. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "core/config.h"
#include "ops/grad_return/grad_return_plan_cuda.h"
#include "symm/call_cuda.h"
#include "symm/engine_cuda.h"

/* 32 blocks fill the link; twice as many hide what a block waits for. A power of two cuts usual
 * sizes into whole turns. */
#define DEFAULT_LANES 64
#define MAX_LANES 64
#define MAX_GRAINS (INT64_C(1) << 31)
#define DRIVER_PATIENCE_MS 1000

/* ---- sizes ---------------------------------------------------------------------------------- */

static enum cofi_gr_elem elem_of(enum cofi_elem elem)
{
    return elem == COFI_ELEM_BF16 ? COFI_GR_BF16 : elem == COFI_ELEM_F16 ? COFI_GR_F16
                                                                         : COFI_GR_F32;
}

static bool is_staged(const struct cofi_grad_return_plan *plan)
{
    return plan->n_ranks > 1 && plan->transport != &cofi_gr_caller &&
           cofi_config_int(COFI_VAR_FORCE_STAGED) != 0;
}

static bool by_steps(const struct cofi_grad_return_plan *plan)
{
    return plan->params.by_section || is_staged(plan) || plan->transport == &cofi_gr_caller;
}

/* Sums that one launch leaves to another, or one step to the next. */
static bool has_acc(const struct cofi_grad_return_plan *plan)
{
    return plan->n_ranks > 2 || (plan->n_ranks == 2 && by_steps(plan));
}

static int grain_of(const struct cofi_grad_return_plan *plan)
{
    return plan->dim[0] % 8 == 0 && plan->dim[1] % 8 == 0 ? 8 : 1;
}

static cof_status count_grains(const struct cofi_grad_return_plan *plan, int64_t *n_out)
{
    const int64_t row = plan->home.row_elements[0] + plan->home.row_elements[1];
    const int64_t rows = plan->max_rows > 1 ? plan->max_rows : 1;
    const __int128 n = (__int128)rows * (row / grain_of(plan));
    COF_FAIL_IF(n >= MAX_GRAINS, COF_ERR_UNSUPPORTED,
                "params.n_rows = %lld: %lld rows of %lld elements on one rank: wanted less than "
                "2^31 groups of %d on a CUDA device",
                (long long)plan->params.n_rows, (long long)plan->max_rows, (long long)row,
                grain_of(plan));
    *n_out = (int64_t)n;
    return COF_OK;
}

/* Of n blocks. Those that store and those that sum run beside each other, by one launch or several,
 * and may wait for the other's on other ranks. Some room stays free for blocks of another plan,
 * which may have come first on another rank and fill the device there. */
static int choose_lanes(const struct cofi_grad_return_plan *plan, int n)
{
    const int by = plan->n_ranks > 1 && n > 1 ? 2 : 1;
    int lanes = 1;
    if (plan->params.max_ctas)
        return n / by < MAX_LANES ? n / by : MAX_LANES;
    while (2 * lanes * by <= n - n / 32 && lanes < DEFAULT_LANES)
        lanes *= 2;
    return lanes;
}

static const void *fast_kernel(const struct cofi_grad_return_plan *plan)
{
    return grain_of(plan) == 8 ? cofi_gr_kernel_fast(elem_of(plan->elem), plan->params.partial_f32,
                                                     plan->params.wire_f32)
                               : NULL;
}

/* The same on all ranks, or they find out by the describe line. */
static cof_status choose_cut(const struct cofi_grad_return_plan *plan, struct cofi_gr_cut *cut,
                             bool *is_apart)
{
    const void *fast = fast_kernel(plan);
    const int most = plan->params.max_ctas;
    int64_t n_grains = 0;
    int n = 1, n_fast = 1;
    COF_TRY(count_grains(plan, &n_grains));
    COF_TRY(cofi_cuda_max_blocks(plan->base.team, cofi_gr_kernel_any(), COFI_GR_THREADS, 0, most,
                                 &n));
    if (fast) {
        COF_TRY(cofi_cuda_max_blocks(plan->base.team, fast, COFI_GR_THREADS, 0, most, &n_fast));
        n = n_fast < n ? n_fast : n;
    }
    *cut = cofi_gr_cut_make((uint64_t)n_grains, choose_lanes(plan, n));
    *is_apart = plan->n_ranks > 1 && n >= 2 * (int)cut->n_lanes;
    return COF_OK;
}

/* Bytes of local memory; sets the pointers when `base` is not NULL. */
static size_t lay_out_local(struct cofi_grad_return_plan *plan, struct cofi_gr_cuda *st, char *base)
{
    size_t used = 0;
    const int64_t k = plan->local_rows * plan->home.row_elements[0];
    const int64_t v = plan->local_rows * plan->home.row_elements[1];
    if (has_acc(plan)) {
        float *acc = cofi_take(base, &used, (size_t)(k + v) * sizeof(float));
        if (st) {
            st->acc = acc;
            st->acc_v = (uint64_t)k;
        }
    }
    if (is_staged(plan) && plan->transport == &cofi_gr_pull)
        plan->staging = cofi_gr_take_rows(plan, base, &used, plan->local_rows);
    for (int s = 0; is_staged(plan) && plan->transport == &cofi_gr_push &&
                    s < cofi_grad_slots(plan->n_ranks); s++)
        plan->home.outbox[s] = cofi_gr_take_rows(plan, base, &used, plan->max_rows);
    return used;
}

static cof_status lay_out(struct cofi_grad_return_plan *plan)
{
    struct cofi_gr_cut cut;
    bool is_apart;
    COF_FAIL_IF(plan->n_ranks > COFD_GRID_MAX_RANKS, COF_ERR_UNSUPPORTED,
                "team: %d ranks, wanted at most %d on CUDA devices", plan->n_ranks,
                COFD_GRID_MAX_RANKS);
    COF_TRY(choose_cut(plan, &cut, &is_apart));
    plan->has_arena = true; /* of the caller's memory: for failures */
    plan->n_purposes = COFD_GRID_PURPOSES;
    plan->acks = 0;
    plan->tagged_bytes = 0;
    if (plan->n_ranks > 1 && plan->transport != &cofi_gr_caller)
        plan->tagged_bytes = cofd_gr_ready_bytes(&cut, plan->n_ranks) +
                             cofd_gr_ack_bytes(&cut, plan->n_ranks);
    plan->local_bytes = lay_out_local(plan, NULL, NULL);
    return COF_OK;
}

static void describe(const struct cofi_grad_return_plan *plan, char *text, size_t bytes)
{
    struct cofi_gr_cut cut;
    bool is_apart;
    if (choose_cut(plan, &cut, &is_apart) != COF_OK) /* lay_out had it */
        return;
    snprintf(text, bytes, "max_ctas=%d lanes=%u pieces=%u", plan->params.max_ctas, cut.n_lanes,
             cut.n_pieces);
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* No first launch has to wait behind a kernel that waits. */
static cof_status load_kernels(const struct cofi_gr_cuda *st)
{
    const void *const kernels[] = {st->any, cofi_gr_kernel_wait(), st->fast};
    struct cudaFuncAttributes attributes;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (kernels[i])
            COF_CUDA(cudaFuncGetAttributes(&attributes, kernels[i]));
    return COF_OK;
}

static cof_status take_memory(struct cofi_grad_return_plan *plan, struct cofi_gr_cuda *st)
{
    const struct cofi_cuda_world *w = plan->base.team->world->device;
    if (plan->local_bytes == 0)
        return COF_OK;
    COF_TRY(cofi_cuda_block_make(w->device, w->memory == COFI_MEMORY_VMM, plan->local_bytes,
                                 &st->local));
    lay_out_local(plan, st, st->local.base);
    return COF_OK;
}

static cof_status make_events(struct cofi_gr_cuda *st)
{
    COF_CUDA(cudaStreamCreateWithFlags(&st->comm, cudaStreamNonBlocking));
    COF_CUDA(cudaEventCreateWithFlags(&st->fork, cudaEventDisableTiming));
    COF_CUDA(cudaEventCreateWithFlags(&st->joined, cudaEventDisableTiming));
    return COF_OK;
}

static cof_status open_here(struct cofi_grad_return_plan *plan, struct cofi_gr_cuda *st)
{
    COF_TRY(load_kernels(st));
    COF_TRY(take_memory(plan, st));
    return st->by_steps && plan->n_ranks > 1 ? make_events(st) : COF_OK;
}

static cof_status check_reach(const char *name, int rank, const void *at)
{
    int device;
    COF_FAIL_IF(cofi_cuda_memory_type(at, &device) == cudaMemoryTypeUnregistered, COF_ERR_INVALID,
                "params.peers.%s: entry %d is %p: wanted memory that CUDA knows, as devices store "
                "there", name, rank, at);
    return COF_OK;
}

static cof_status keep_peers(struct cofi_grad_return_plan *plan, struct cofi_gr_cuda *st)
{
    const cof_grad_return_peers *p = plan->params.peers;
    st->peers_aligned = true;
    st->ready_stride = cofi_gr_ready_stride(p);
    for (int r = 0; r < plan->n_ranks; r++) {
        COF_TRY(check_reach("dk", r, p->dk[r]));
        COF_TRY(check_reach("dv", r, p->dv[r]));
        COF_TRY(check_reach("ready", r, p->ready[r]));
        st->peer[0][r] = p->dk[r];
        st->peer[1][r] = p->dv[r];
        st->ready[r] = (char *)p->ready[r];
        st->peers_aligned &= (uintptr_t)p->dk[r] % 16 == 0 && (uintptr_t)p->dv[r] % 16 == 0;
    }
    return COF_OK;
}

static cof_status open_plan(struct cofi_grad_return_plan *plan)
{
    struct cofi_cuda_scope scope;
    struct cofi_gr_cuda *st = calloc(1, sizeof *st);
    COF_FAIL_IF(!st, COF_ERR_NOMEM, "grad_return plan: no memory");
    plan->state = st;
    st->grain = grain_of(plan);
    st->any = cofi_gr_kernel_any();
    st->fast = fast_kernel(plan);
    st->by_steps = by_steps(plan);
    st->is_staged = is_staged(plan);
    COF_TRY(choose_cut(plan, &st->cut, &st->is_apart));
    COF_TRY(cofi_cuda_enter(plan->base.team->world->device->device, &scope));
    cof_status status = open_here(plan, st);
    if (status == COF_OK && plan->params.peers)
        status = keep_peers(plan, st);
    cofi_cuda_leave(&scope);
    return status;
}

static bool is_running(cudaStream_t stream)
{
    const cudaError_t error = cudaStreamQuery(stream);
    if (error != cudaSuccess)
        cudaGetLastError();
    return error == cudaErrorNotReady;
}

/* C has work where a whole was not made to its end, or where a call failed and could not be joined.
 * The arena has failed then, which ends waits of kernels. Those of the driver are released, by a
 * write that may stand behind one of them in a queue of the device: false where it does. */
static bool end_comm(const struct cofi_grad_return_plan *plan, const struct cofi_gr_cuda *st)
{
    cof_arena *a = plan->binding.arena;
    if (!st->comm || !a || (plan->section == 0 && cofi_arena_status(a) == COF_OK) ||
        !is_running(st->comm))
        return true;
    if (!plan->params.driver_wait) {
        if (cudaStreamSynchronize(st->comm) != cudaSuccess)
            cudaGetLastError();
        return true;
    }
    cofi_gr_cuda_release(plan, plan->last_epoch);
    for (int ms = 0; ms < DRIVER_PATIENCE_MS && is_running(st->comm); ms++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return !is_running(st->comm);
}

static void close_here(struct cofi_gr_cuda *st)
{
    if (st->fork)
        cudaEventDestroy(st->fork);
    if (st->joined)
        cudaEventDestroy(st->joined);
    if (st->comm)
        cudaStreamDestroy(st->comm);
    cofi_cuda_block_close(&st->local);
}

static bool close_plan(struct cofi_grad_return_plan *plan)
{
    struct cofi_gr_cuda *st = plan->state;
    struct cofi_cuda_scope scope;
    bool is_ended = true;
    if (st && cofi_cuda_enter(plan->base.team->world->device->device, &scope) == COF_OK) {
        is_ended = end_comm(plan, st);
        if (is_ended)
            close_here(st);
        cofi_cuda_leave(&scope);
    }
    if (is_ended)
        free(st);
    return is_ended;
}

static const struct cofi_gr_backend backend = {.name = "cuda", .lay_out = lay_out,
                                               .describe = describe, .open = open_plan,
                                               .close = close_plan, .run = cofi_gr_cuda_run};

const struct cofi_gr_backend *cofi_gr_cuda(void)
{
    return &backend;
}
