/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs: calls and their protocol. All of a call runs on the thread that dispatches its
 * stream and its helpers, step by step:
 *
 *   forward   chunks of features: front(0) AB | front(1) AB, wait AB(0), contract(0) | front(2) ...
 *             TRI to all, wait for all | back
 *   backward  front and contraction again, unless a, b and tri were saved | back_grad, DTRI to all,
 *             wait for all | contract_grad, DAB to all, wait for all | front_grad
 *   and with reduce_param_grads: each rank's share of the sums to it, PARTS, wait | its sums to
 *   all, SUMS, wait.
 *   set_weights with CHECK: hashes to all, HASH, wait | compare, HASHED to all, wait
 *
 * Words and buffers (w -> r: stored by rank w in r's slab)
 *   AB(c)  w -> r  w's a and b of r's chunk c are there     region AB
 *   TRI    w -> r  tri of all of w's features, likewise     region TRI
 *   DTRI   w -> r  d tri of w's tokens                      region DTRI
 *   DAB    w -> r  d a and d b of w's features              region DAB
 *   PARTS  w -> r  w's gradients of r's share               parts[w]
 *   SUMS   w -> r  w's share, summed                        sums
 *   HASH   w -> r  w's hash                                 hash[w]
 *   HASHED w -> r  w has read all hashes
 * Each word goes from every rank to every rank in every call that has it, data or not, after the
 * last store of its step; it is a release of these, and the wait for it an acquire. A step with a
 * product that failed sends none: the arena fails instead.
 *
 * Nothing is acknowledged. An exchange ends on a rank when it has all ranks' words of it, so when
 * all have begun it and left what is before it. Every call has at least two exchanges, with regions
 * of their own, and a rank begins a call after its last one has ended. So a region is stored to
 * again only past another exchange than its own, whose words every reader sends after it has read
 * the region; and so is a word, by which its readers have seen it (models/trimul_exchanges.pml;
 * trimul_chunks.pml: JOIN WORDS_AFTER_CHUNK NO_AB_FREE_WAIT NO_TRI_FREE_WAIT). */
#include <math.h>
#include <string.h>

#include "core/faults.h"
#include "ops/trimul/trimul_cpu.h"
#include "symm/call.h"
#include "symm/stream.h"

/* Bytes of the call in hand that one entry of a stream carries. */
#define PART_BYTES 144

/* ---- words ---------------------------------------------------------------------------------- */

static int word(const struct cofi_tri_plan *plan, int which)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    return st->sizes.n_chunks + which;
}

static int peer_of(const struct cofi_tri_plan *plan, int i)
{
    return (plan->rank + i) % plan->n_ranks;
}

/* Poison first: nobody may go on with what a failed product has left. */
static cof_status check_products(struct cofi_tri_plan *plan)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    cof_status status = cofi_gemm_failed(&st->failure, "trimul");
    return status == COF_OK ? COF_OK : cofi_arena_fail(plan->binding.arena, status);
}

static cof_status signal_all(struct cofi_tri_plan *plan, int purpose)
{
    COF_TRY(check_products(plan));
    for (int i = 1; i < plan->n_ranks; i++)
        cofi_call_signal(&plan->binding, peer_of(plan, i), purpose);
    return COF_OK;
}

static cof_status wait_all(struct cofi_tri_plan *plan, int purpose, const char *step)
{
    for (int i = 1; i < plan->n_ranks; i++)
        COF_TRY(cofi_call_wait_ready(&plan->binding, peer_of(plan, i), purpose, step));
    return COF_OK;
}

/* All ranks have come to the end of a step. */
static cof_status exchange(struct cofi_tri_plan *plan, int which, bool skip_wait, const char *step)
{
    COF_TRY(signal_all(plan, word(plan, which)));
    return skip_wait ? COF_OK : wait_all(plan, word(plan, which), step);
}

/* ---- forward -------------------------------------------------------------------------------- */

static cof_status front(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, int chunk)
{
    cofi_tri_cpu_front(s, plan, chunk);
    return signal_all(plan, chunk);
}

static cof_status contract(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, int chunk)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const int64_t hidden = plan->params.hidden;
    const int64_t first = cofi_tri_first_feature(hidden, plan->rank, plan->n_ranks);
    const int64_t last = cofi_tri_first_feature(hidden, plan->rank + 1, plan->n_ranks);
    const int64_t begin = first + chunk * st->sizes.chunk, end = begin + st->sizes.chunk;
    if (!COFI_FAULT(TRI_AB_WAIT, plan->rank))
        COF_TRY(wait_all(plan, chunk, "features projected"));
    cofi_tri_cpu_contract(s, plan, begin, end < last ? end : last);
    return COF_OK;
}

/* What of a, b and tri backward needs, in `saved`: copied out of the regions, or read there. */
static char *saved_at(const struct cofi_tri_cpu_state *st, enum cofi_tri_exchange e)
{
    return st->call.saved +
           (e == COFI_TRI_AB ? 0 : cofi_round_up(st->sizes.bytes[COFI_TRI_AB], COFI_LINE));
}

/* While the region is this rank's: a and b before their end is told. */
static void save(const struct cofi_tri_plan *plan, enum cofi_tri_exchange e)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    if (st->call.saved && !st->call.backward)
        memcpy(saved_at(st, e), st->inbox[e].base,
               (size_t)((e == COFI_TRI_AB ? 2 : 1) * st->inbox[e].half));
}

/* a, b and tri, where they are read. One rank has nobody to wait for, and contracts a chunk while
 * it is in its caches. */
static cof_status make_tri(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const int n_chunks = st->sizes.n_chunks, ahead = plan->n_ranks > 1;
    for (int c = 0; c < n_chunks + ahead; c++) {
        if (c < n_chunks)
            COF_TRY(front(s, plan, c));
        if (c >= ahead)
            COF_TRY(contract(s, plan, c - ahead));
    }
    save(plan, COFI_TRI_AB);
    return exchange(plan, COFI_TRI_WORD_TRI, COFI_FAULT(TRI_TRI_WAIT, plan->rank),
                    "triangles summed");
}

static cof_status forward(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    COF_TRY(make_tri(s, plan));
    cofi_tri_cpu_back(s, plan);
    save(plan, COFI_TRI_TRI);
    return COF_OK;
}

/* ---- backward ------------------------------------------------------------------------------- */

static int64_t share_begin(const struct cofi_tri_plan *plan, int rank)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    return st->sizes.n_grads * rank / plan->n_ranks;
}

/* Sums over the ranks, in rank order, of this rank's share; then everybody's. */
static cof_status reduce_grads(struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const size_t slot = (size_t)st->sizes.max_share * sizeof(float);
    char *data = cofi_arena_data(plan->binding.arena);
    const int64_t first = share_begin(plan, plan->rank);
    const int64_t n = share_begin(plan, plan->rank + 1) - first;
    for (int r = 0; r < plan->n_ranks; r++)
        cofi_tri_cpu_send(plan, r, st->sizes.parts_offset + (size_t)plan->rank * slot,
                          st->grads + share_begin(plan, r),
                          (size_t)(share_begin(plan, r + 1) - share_begin(plan, r)) *
                              sizeof(float));
    COF_TRY(exchange(plan, COFI_TRI_WORD_PARTS, COFI_FAULT(TRI_PARTS_WAIT, plan->rank),
                     "gradients of weights"));
    float *sum = st->grads + first;
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int r = 0; r < plan->n_ranks; r++)
        cofi_vec()->add_f32(sum,
                            (const float *)(const void *)(data + st->sizes.parts_offset +
                                                          (size_t)r * slot),
                            n);
    for (int r = 0; r < plan->n_ranks; r++)
        cofi_tri_cpu_send(plan, r, st->sizes.sums_offset + (size_t)first * sizeof(float), sum,
                          (size_t)n * sizeof(float));
    COF_TRY(exchange(plan, COFI_TRI_WORD_SUMS, COFI_FAULT(TRI_SUMS_WAIT, plan->rank),
                     "sums of gradients of weights"));
    cofi_tri_cpu_store_grads(plan, (const float *)(const void *)(data + st->sizes.sums_offset));
    return COF_OK;
}

static cof_status finish_grads(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    cofi_tri_cpu_sum_slices(s, plan);
    if (plan->params.reduce_param_grads && plan->n_ranks > 1)
        return reduce_grads(plan);
    cofi_tri_cpu_store_grads(plan, st->grads);
    return COF_OK;
}

static cof_status backward(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const bool wants_grads = cofi_tri_wants_grads(&st->call);
    if (plan->params.save == COF_TRIMUL_SAVE_NONE)
        COF_TRY(make_tri(s, plan));
    for (int e = COFI_TRI_AB; e <= COFI_TRI_TRI && st->call.saved; e++)
        st->inbox[e].base = saved_at(st, e);
    if (wants_grads)
        cofi_tri_cpu_clear_slices(s, plan);
    cofi_tri_cpu_back_grad(s, plan);
    COF_TRY(exchange(plan, COFI_TRI_WORD_DTRI, COFI_FAULT(TRI_DTRI_WAIT, plan->rank),
                     "gradients of triangles"));
    cofi_tri_cpu_contract_grad(s, plan);
    COF_TRY(exchange(plan, COFI_TRI_WORD_DAB, COFI_FAULT(TRI_DAB_WAIT, plan->rank),
                     "gradients of features"));
    cofi_tri_cpu_front_grad(s, plan);
    return wants_grads ? finish_grads(s, plan) : COF_OK;
}

/* ---- calls ---------------------------------------------------------------------------------- */

/* A tensor of this rank's block, as a call that failed leaves it: NaN. */
static void fill_nan(const struct cofi_tri_plan *plan, const struct cofi_tri_tensor *t)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const cof_trimul_block block = cofi_tri_block(&plan->params, plan->rank, st->call.n);
    const size_t bytes = (size_t)(plan->params.dim * cofi_elem_bytes(plan->elem));
    for (int64_t b = 0; b < st->call.n_batch && t->data; b++)
        for (int64_t i = 0; i < block.n_rows; i++)
            for (int64_t j = 0; j < block.n_cols; j++)
                memset(cofi_tri_at(t, b, i, j), 0xff, bytes);
}

static void fill_grads(const struct cofi_tri_plan *plan, float value)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++) {
        int64_t shape[2];
        cofi_tri_weight_shape(&plan->params, i, shape);
        for (int64_t k = 0; k < shape[0] * shape[1] && st->call.grads[i]; k++)
            st->call.grads[i][k] = value;
    }
}

static void fail_outputs(const struct cofi_tri_plan *plan)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    fill_nan(plan, st->call.backward ? &st->call.dx : &st->call.out);
    fill_grads(plan, NAN);
}

static uint64_t wanted_grads(const struct cofi_tri_call *call)
{
    uint64_t wanted = 0;
    for (int i = 0; i < COFI_TRI_WEIGHTS; i++)
        wanted |= (uint64_t)(call->grads[i] != NULL) << i;
    return wanted;
}

static cof_status run_steps(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan)
{
    struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_tri_call *c = &st->call;
    const struct cofi_call call = {
        .direction = c->backward ? 2 : 1,
        .n_empty = c->n_empty,
        .sizes = {(uint64_t)c->n, (uint64_t)c->n_batch,
                  plan->params.reduce_param_grads ? wanted_grads(c) : 0}};
    if (c->n_batch == 0) { /* local: the other ranks are not asked */
        fill_grads(plan, 0);
        return COF_OK;
    }
    COF_TRY(cofi_call_begin(&plan->binding, &call));
    st->shape = cofi_tri_cpu_shape(plan, c->n, c->n_batch);
    cofi_tri_cpu_set_tiles(plan);
    cofi_tri_cpu_set_ports(plan);
    COF_TRY(c->backward ? backward(s, plan) : forward(s, plan));
    COF_TRY(check_products(plan));
    cofi_call_end(&plan->binding);
    return COF_OK;
}

/* A part of a struct that is too long for one entry of a stream. */
struct part_args {
    char *to;
    size_t bytes;
    char part[PART_BYTES];
};

static cof_status take_part(struct cofi_cpu_stream *s, const void *args)
{
    const struct part_args *a = args;
    (void)s;
    memcpy(a->to, a->part, a->bytes);
    return COF_OK;
}

static cof_status run_call(struct cofi_cpu_stream *s, const void *args)
{
    struct cofi_tri_plan *plan = *(struct cofi_tri_plan *const *)args;
    cof_status status = cofi_call_failure(&plan->binding, s);
    if (status == COF_OK)
        status = run_steps(s, plan);
    if (status != COF_OK)
        fail_outputs(plan);
    return status;
}

/* ---- weights -------------------------------------------------------------------------------- */

/* The rank whose hash most ranks share, the first of such. */
static int usual_rank(const char *hashes, int n_ranks)
{
    int best = 0, most = 0;
    for (int i = 0; i < n_ranks; i++) {
        int n = 0;
        for (int j = 0; j < n_ranks; j++)
            n += !memcmp(hashes + i * COFI_LINE, hashes + j * COFI_LINE, sizeof(uint64_t));
        best = n > most ? i : best;
        most = n > most ? n : most;
    }
    return best;
}

static cof_status compare(const struct cofi_tri_plan *plan, const char *hashes)
{
    const int *world_rank = plan->base.team->world_rank;
    const int usual = usual_rank(hashes, plan->n_ranks);
    for (int r = 0; r < plan->n_ranks; r++) {
        uint64_t hash, wanted;
        memcpy(&hash, hashes + r * COFI_LINE, sizeof hash);
        memcpy(&wanted, hashes + usual * COFI_LINE, sizeof wanted);
        COF_FAIL_IF(hash != wanted, COF_ERR_MISMATCH,
                    "trimul weights: those of rank %d (hash %016llx) differ from those of rank %d "
                    "(hash %016llx)",
                    world_rank[r], (unsigned long long)hash, world_rank[usual],
                    (unsigned long long)wanted);
    }
    return COF_OK;
}

static cof_status check_weights(struct cofi_tri_plan *plan)
{
    const struct cofi_tri_cpu_state *st = plan->state;
    const struct cofi_call call = {.n_empty = st->given.n_empty};
    const uint64_t hash = cofi_tri_cpu_hash_weights(plan);
    char *hashes = cofi_arena_data(plan->binding.arena) + st->sizes.hash_offset;
    COF_TRY(cofi_call_begin(&plan->binding, &call));
    for (int r = 0; r < plan->n_ranks; r++)
        cofi_tri_cpu_send(plan, r, st->sizes.hash_offset + (size_t)plan->rank * COFI_LINE, &hash,
                          sizeof hash);
    COF_TRY(exchange(plan, COFI_TRI_WORD_HASH, COFI_FAULT(TRI_HASH_WAIT, plan->rank),
                     "hash of weights"));
    cof_status status = compare(plan, hashes);
    if (status != COF_OK)
        return cofi_arena_fail(plan->binding.arena, status);
    COF_TRY(exchange(plan, COFI_TRI_WORD_HASHED, false, "hashes of weights compared"));
    cofi_call_end(&plan->binding);
    return COF_OK;
}

static cof_status run_weights(struct cofi_cpu_stream *s, const void *args)
{
    struct cofi_tri_plan *plan = *(struct cofi_tri_plan *const *)args;
    const struct cofi_tri_cpu_state *st = plan->state;
    COF_TRY(cofi_call_failure(&plan->binding, s));
    if (st->given.flags & COF_TRIMUL_CHECK)
        COF_TRY(check_weights(plan));
    cofi_tri_cpu_take_weights(plan);
    return COF_OK;
}

/* ---- enqueuing ------------------------------------------------------------------------------ */

/* Every part, and then fn, in the order of the stream: calls of a plan come one after the other,
 * so that parts of two never mix. */
static cof_status enqueue_parts(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, void *to,
                                const void *from, size_t bytes, cofi_call_fn fn)
{
    for (size_t at = 0; at < bytes; at += PART_BYTES) {
        struct part_args a = {.to = (char *)to + at, .bytes = bytes - at};
        a.bytes = a.bytes < PART_BYTES ? a.bytes : PART_BYTES;
        memcpy(a.part, (const char *)from + at, a.bytes);
        COF_TRY(cofi_cpu_enqueue(s, take_part, &a, sizeof a, COFI_CALL_ALWAYS));
    }
    return cofi_cpu_enqueue(s, fn, &plan, sizeof plan, COFI_CALL_ALWAYS);
}

static cof_status enqueue(struct cofi_tri_plan *plan, void *to, const void *from, size_t bytes,
                          cofi_call_fn fn, cof_stream stream)
{
    cof_world *world = plan->base.team->world;
    struct cofi_cpu_stream *s;
    COF_TRY(cofi_stream_begin(world, stream, &s));
    cof_status status = cofi_cpu_stream_sticky(s);
    if (status != COF_OK) /* its outputs are NaN all the same */
        cofi_arena_fail(plan->binding.arena, status);
    cof_status enqueued = enqueue_parts(s, plan, to, from, bytes, fn);
    if (enqueued != COF_OK)
        cofi_arena_fail(plan->binding.arena, enqueued);
    return cofi_stream_end(world, stream, status != COF_OK ? status : enqueued);
}

static cof_status run(struct cofi_tri_plan *plan, const struct cofi_tri_call *call,
                      cof_stream stream)
{
    struct cofi_tri_cpu_state *st = plan->state;
    return enqueue(plan, &st->call, call, sizeof *call, run_call, stream);
}

static cof_status set_weights(struct cofi_tri_plan *plan, const struct cofi_tri_weights *weights,
                              cof_stream stream)
{
    struct cofi_tri_cpu_state *st = plan->state;
    return enqueue(plan, &st->given, weights, sizeof *weights, run_weights, stream);
}

const struct cofi_tri_backend cofi_tri_cpu = {
    .name = "cpu", .lay_out = cofi_tri_cpu_lay_out, .describe = cofi_tri_cpu_describe,
    .open = cofi_tri_cpu_open, .close = cofi_tri_cpu_close, .set_weights = set_weights,
    .run = run};
