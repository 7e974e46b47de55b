/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse bench runtime`: the cases, and how they run on the CPU. */
#include "ops/runtime/runtime_bench.h"

#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/error.h"
#include "symm/symm.h"
#include "tools/option_table.h"
#ifdef COFI_CUDA
#include "ops/runtime/runtime_bench_cuda.h"
#endif

enum { MAX_COUNT = 10000, MAX_BLOCKS = 1024, COUNT = 100, LEAST_TRANSFERS = 4 };
#define MAX_BYTES (INT64_C(1) << 34)
#define MOVED_BYTES (INT64_C(1) << 30) /* by the transfers of a call, about */
#define CACHED_BYTES (INT64_C(1) << 28) /* buffers rotate over so much: past the L2 of any device */
#define SHORT_BYTES (INT64_C(64) << 10) /* up to there it matters what enqueuing costs */
#define N_WORDS 1

/* ---- the case ------------------------------------------------------------------------------- */

#define AT(member) offsetof(struct cofi_rb_case, member)

static const struct cofi_option words[] = {
    COFI_WORD_CHOICE("form", AT(form), "put|get|round|signal|empty"),
    COFI_WORD_CHOICE("by", AT(by), "call|engine|kernel|stream"),
    COFI_WORD_CHOICE("ways", AT(ways), "both|one"),
    COFI_WORD_CHOICE("how", AT(how), "eager|graph"),
    COFI_WORD_INT("bytes", AT(bytes), 1, MAX_BYTES),
    COFI_WORD_INT("blocks", AT(blocks), 1, MAX_BLOCKS),
    COFI_WORD_INT("count", AT(count), 1, MAX_COUNT),
    COFI_WORD_INT("busy", AT(busy), 0, 1),
    {0}};

static bool is_transfer(const struct cofi_rb_case *c)
{
    return c->form == COFI_RB_PUT || c->form == COFI_RB_GET;
}

/* What goes together. */
static cof_status check_words(const struct cofi_rb_case *c)
{
    static const unsigned by[] = { /* of each form */
        [COFI_RB_PUT] = 1 << COFI_RB_CALL | 1 << COFI_RB_ENGINE | 1 << COFI_RB_KERNEL,
        [COFI_RB_GET] = 1 << COFI_RB_CALL | 1 << COFI_RB_ENGINE | 1 << COFI_RB_KERNEL,
        [COFI_RB_ROUND] = 1 << COFI_RB_CALL | 1 << COFI_RB_KERNEL | 1 << COFI_RB_STREAM,
        [COFI_RB_SIGNAL] = 1 << COFI_RB_CALL,
        [COFI_RB_EMPTY] = 1 << COFI_RB_KERNEL};
    COF_FAIL_IF(is_transfer(c) != (c->bytes > 0), COF_ERR_INVALID,
                "bytes = %lld: wanted with form=put and form=get, and with them alone",
                (long long)c->bytes);
    COF_FAIL_IF(!(by[c->form] >> c->by & 1), COF_ERR_INVALID,
                "by: no such way of this form; wanted call, engine, kernel of put and get, call, "
                "kernel, stream of round, call of signal, kernel of empty");
    COF_FAIL_IF(c->form == COFI_RB_ROUND && c->by == COFI_RB_KERNEL && c->how == COFI_RB_GRAPH,
                COF_ERR_INVALID, "how = graph: wanted eager of rounds within one kernel");
    return COF_OK;
}

static cof_status read_case(const char *line, struct cofi_rb_case *c)
{
    *c = (struct cofi_rb_case){.form = -1, .blocks = 32};
    COF_TRY(cofi_option_read_line(line, words, c));
    COF_FAIL_IF(c->form < 0, COF_ERR_INVALID, "form is missing: wanted put, get, round, signal or "
                "empty");
    COF_TRY(check_words(c));
    if (c->count == 0 && is_transfer(c)) {
        c->count = MOVED_BYTES / c->bytes;
        c->count = c->count < LEAST_TRANSFERS ? LEAST_TRANSFERS
                   : c->count > COUNT         ? COUNT
                                              : c->count;
    }
    c->count = c->count ? c->count : COUNT;
    return COF_OK;
}

static cof_status size_case(const char *line, int n_ranks, struct cofi_bench_size *size_out)
{
    struct cofi_rb_case c;
    COF_TRY(read_case(line, &c));
    int n_flows = !is_transfer(&c) ? 0 : c.ways == COFI_RB_ONE ? 1 : n_ranks;
    double bytes = (double)c.bytes * n_flows;
    *size_out = (struct cofi_bench_size){
        .n_directions = is_transfer(&c) && c.bytes > SHORT_BYTES ? 1 : 2,
        .set_bytes = 2 * (size_t)c.bytes * (size_t)n_ranks,
        .wire_bytes = {bytes},
        .n_flows = n_flows,
    };
    return COF_OK;
}

/* ---- a rank --------------------------------------------------------------------------------- */

/* Transfers go to the next rank, rounds are made by pairs; who is alone is its own peer, and the
 * last of an odd number has no part. */
static int choose_peer(const struct cofi_rb_case *c, int rank, int n_ranks)
{
    if (n_ranks == 1)
        return 0;
    if (c->form == COFI_RB_ROUND)
        return (rank ^ 1) < n_ranks ? rank ^ 1 : -1;
    return c->ways == COFI_RB_ONE && rank > 0 ? -1 : (rank + 1) % n_ranks;
}

static bool is_on_cpu(const struct cofi_rb *b)
{
    return !b->job.world->device;
}

cof_status cofi_rb_call(struct cofi_rb *b, int64_t idx)
{
    const struct cofi_rb_case *c = &b->c;
    size_t bytes = (size_t)c->bytes, at = (size_t)(idx % b->n_slots) * bytes;
    bool begins = b->job.rank <= b->peer;
    switch (c->form) {
    case COFI_RB_PUT: return cof_put(b->arena, b->peer, at, b->local + at, bytes, b->stream);
    case COFI_RB_GET: return cof_get(b->arena, b->local + at, b->peer, at, bytes, b->stream);
    case COFI_RB_SIGNAL: return cof_signal(b->arena, b->peer, 0, b->stream);
    default: break;
    }
    if (begins)
        COF_TRY(cof_signal(b->arena, b->peer, 0, b->stream));
    COF_TRY(cof_wait(b->arena, b->peer, 0, b->stream));
    return begins ? COF_OK : cof_signal(b->arena, b->peer, 0, b->stream);
}

/* A first round, which is not timed, brings the pair together. */
static cof_status time_on_cpu(struct cofi_rb *b, int direction, double *seconds)
{
    if (b->c.form == COFI_RB_ROUND) {
        COF_TRY(cofi_rb_call(b, 0));
        COF_TRY(cof_stream_sync(b->stream));
    }
    int64_t begin = cofi_now(), end;
    for (int64_t i = 0; i < b->c.count; i++)
        COF_TRY(cofi_rb_call(b, i));
    end = cofi_now();
    COF_TRY(cof_stream_sync(b->stream));
    end = direction == COFI_RB_ENQUEUE ? end : cofi_now();
    *seconds = (double)(end - begin) * 1e-9 / (double)b->c.count;
    return COF_OK;
}

static cof_status open_on_cpu(struct cofi_rb *b)
{
    const struct cofi_rb_case *c = &b->c;
    COF_FAIL_IF(c->by != COFI_RB_CALL || c->how != COFI_RB_EAGER || c->busy, COF_ERR_UNSUPPORTED,
                "by, how, busy: wanted by=call how=eager busy=0 on the CPU");
    b->local = aligned_alloc(64, (size_t)c->bytes / 64 * 64 + 64);
    COF_FAIL_IF(!b->local, COF_ERR_NOMEM, "bench: no memory for %lld bytes", (long long)c->bytes);
    memset(b->local, 1, (size_t)c->bytes);
    return cof_stream_create(b->job.world, 1, &b->stream);
}

static cof_status open_bench(struct cofi_rb *b)
{
    size_t bytes = (size_t)b->n_slots * (size_t)b->c.bytes;
    COF_TRY(cof_arena_create(b->job.team, bytes, N_WORDS, &b->arena));
    if (is_on_cpu(b))
        return open_on_cpu(b);
#ifdef COFI_CUDA
    return cofi_rb_cuda_open(b);
#else
    return COF_FAIL(COF_ERR_INTERNAL, "bench: a device in a build without CUDA");
#endif
}

static void destroy(void *bench)
{
    struct cofi_rb *b = bench;
    if (!b)
        return;
    if (is_on_cpu(b)) {
        cof_stream_destroy(b->stream);
        free(b->local);
    }
#ifdef COFI_CUDA
    else
        cofi_rb_cuda_close(b);
#endif
    cof_arena_destroy(b->arena);
    free(b);
}

static cof_status create(struct cofi_job *job, const char *line, int n_sets, void **bench_out)
{
    (void)n_sets; /* the slots are enough */
    struct cofi_rb *b = calloc(1, sizeof *b);
    COF_FAIL_IF(!b, COF_ERR_NOMEM, "bench: no memory");
    *b = (struct cofi_rb){.job = *job};
    cof_status status = read_case(line, &b->c);
    if (status == COF_OK) {
        int64_t n = b->c.bytes && !is_on_cpu(b) ? CACHED_BYTES / b->c.bytes : 1;
        n = n > b->c.count ? b->c.count : n;
        b->n_slots = n < 1 ? 1 : (int)n;
        b->peer = choose_peer(&b->c, job->rank, job->n_ranks);
        status = open_bench(b);
    }
    if (status == COF_OK)
        *bench_out = b;
    else
        destroy(b);
    return status;
}

/* A rank without a part is there all the same: the start is one for all. */
static cof_status time_call(void *bench, int direction, int set, double *seconds)
{
    (void)set;
    struct cofi_rb *b = bench;
    *seconds = 0;
    if (is_on_cpu(b))
        return b->peer < 0 ? COF_OK : time_on_cpu(b, direction, seconds);
#ifdef COFI_CUDA
    COF_TRY(cofi_rb_cuda_time(b, direction, seconds));
#endif
    return cof_team_query(b->job.team);
}

const struct cofi_op_bench cofi_runtime_bench = {
    .shapes = cofi_bench_shapes_runtime,
    .cuda_shapes = cofi_bench_shapes_runtime_cuda,
    .directions = {"run", "enqueue"},
    .size = size_case,
    .create = create,
    .time = time_call,
    .destroy = destroy,
};
