/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The public put, get, signal and wait. Counts advance where the stream runs the call. */
#include <string.h>

#include "symm/engine.h"
#include "symm/stream.h"

struct transfer {
    cof_arena *arena;
    int peer, word;
    size_t offset, bytes; /* in the peer's data */
    const void *src;
    void *dst;
};

static size_t place(const cof_arena *a, int word, int peer)
{
    return (size_t)word * (size_t)a->n_ranks + (size_t)peer;
}

/* ---- on the stream -------------------------------------------------------------------------- */

static cof_status look(cof_arena *a)
{
    COF_TRY(cofi_team_status(a->team));
    return cofi_arena_look(a);
}

static cof_status run_put(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    const struct transfer *t = args;
    COF_TRY(look(t->arena));
    if (t->bytes) /* else `src` may be NULL, which is nothing to copy from */
        t->arena->ops->put(t->arena, t->peer, t->arena->data_offset + t->offset, t->src, t->bytes);
    return COF_OK;
}

static cof_status run_get(struct cofi_cpu_stream *s, const void *args)
{
    const struct transfer *t = args;
    cof_status status = cofi_cpu_stream_status(s);
    if (status == COF_OK)
        status = look(t->arena);
    if (t->bytes == 0)
        return status;
    if (status == COF_OK)
        t->arena->ops->get(t->arena, t->dst, t->peer, t->arena->data_offset + t->offset, t->bytes);
    else
        memset(t->dst, 0xff, t->bytes);
    return status;
}

static cof_status run_signal(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    const struct transfer *t = args;
    cof_arena *a = t->arena;
    COF_TRY(look(a));
    a->ops->signal(a, t->peer, cofi_line_offset(a, a->user_words_offset, t->word, a->rank),
                   ++a->sent[place(a, t->word, t->peer)]);
    return COF_OK;
}

static cof_status run_wait(struct cofi_cpu_stream *s, const void *args)
{
    (void)s;
    const struct transfer *t = args;
    cof_arena *a = t->arena;
    COF_TRY(look(a));
    return cofi_arena_wait(&(struct cofi_word){
        .arena = a, .writer = t->peer,
        .offset = cofi_line_offset(a, a->user_words_offset, t->word, t->peer), .kind = COFI_COUNT,
        .want = ++a->awaited[place(a, t->word, t->peer)], .step = "cof_wait"});
}

/* ---- by a device ---------------------------------------------------------------------------- */

static cof_status launch_put(const struct transfer *t, void *stream)
{
    return t->bytes ? t->arena->ops->device->put(t->arena, t->peer, t->offset, t->src, t->bytes,
                                                 stream)
                    : COF_OK;
}

static cof_status launch_get(const struct transfer *t, void *stream)
{
    return t->bytes ? t->arena->ops->device->get(t->arena, t->dst, t->peer, t->offset, t->bytes,
                                                 stream)
                    : COF_OK;
}

static cof_status launch_fill(const struct transfer *t, void *stream)
{
    return t->bytes ? t->arena->ops->device->fill(t->arena, t->dst, t->bytes, stream) : COF_OK;
}

static cof_status launch_signal(const struct transfer *t, void *stream)
{
    return t->arena->ops->device->signal(t->arena, t->peer, t->word, stream);
}

static cof_status launch_wait(const struct transfer *t, void *stream)
{
    return t->arena->ops->device->wait(t->arena, t->peer, t->word, stream);
}

/* Memory of the caller's that a device is to read or write. */
static cof_status check_memory(cof_arena *a, const char *name, const void *at, size_t bytes)
{
    COF_FAIL_IF(!at && bytes, COF_ERR_INVALID, "%s: NULL", name);
    return a->ops->device && bytes ? a->ops->device->check_memory(a, name, at) : COF_OK;
}

/* ---- enqueuing ------------------------------------------------------------------------------ */

static cof_status check_peer(const cof_arena *a, int peer)
{
    COF_FAIL_IF(!a, COF_ERR_INVALID, "arena: NULL");
    COF_FAIL_IF(peer < 0 || peer >= a->n_ranks, COF_ERR_INVALID, "peer = %d: wanted 0 .. %d", peer,
                a->n_ranks - 1);
    return COF_OK;
}

static cof_status check_range(const cof_arena *a, const char *name, size_t offset, size_t bytes)
{
    COF_FAIL_IF(offset > a->data_bytes || bytes > a->data_bytes - offset, COF_ERR_INVALID,
                "%s = %zu, bytes = %zu: the arena has %zu bytes", name, offset, bytes,
                a->data_bytes);
    return COF_OK;
}

static cof_status check_word(const cof_arena *a, int word)
{
    COF_FAIL_IF(word < 0 || word >= a->n_words, COF_ERR_INVALID,
                "word = %d: the arena has %d words (n_words)", word, a->n_words);
    return COF_OK;
}

/* What a transfer is: on the stream of a CPU, and by a device. */
struct action {
    cofi_call_fn run;
    cof_status (*launch)(const struct transfer *t, void *stream);
    cof_status (*launch_failed)(const struct transfer *t, void *stream); /* NULL: nothing */
};

/* The status of a failed arena, or stream, is returned, whatever is still enqueued. */
static cof_status launch(const struct transfer *t, const struct action *action, cof_stream stream)
{
    void *handle;
    char text[COFI_ERROR_TEXT_BYTES];
    cof_status status = look(t->arena);
    if (status != COF_OK && !action->launch_failed)
        return status;
    if (status != COF_OK)
        memcpy(text, cof_last_error(), sizeof text);
    COF_TRY(cofi_stream_begin_device(t->arena->team->world, stream, &handle));
    cof_status launched = status == COF_OK ? action->launch(t, handle)
                                           : action->launch_failed(t, handle);
    if (status != COF_OK && launched == COF_OK)
        launched = cofi_fail_text(status, text);
    return cofi_stream_end_device(t->arena, stream, launched);
}

static cof_status enqueue(const struct transfer *t, const struct action *action, unsigned flags,
                          cof_stream stream)
{
    cof_world *world = t->arena->team->world;
    struct cofi_cpu_stream *s;
    if (t->arena->ops->device)
        return launch(t, action, stream);
    cof_status status = look(t->arena);
    if (status != COF_OK && !(flags & COFI_CALL_ALWAYS))
        return status;
    COF_TRY(cofi_stream_begin(world, stream, &s));
    if (status == COF_OK)
        status = cofi_cpu_stream_sticky(s);
    cof_status enqueued = cofi_cpu_enqueue(s, action->run, t, sizeof *t, flags);
    return cofi_stream_end(world, stream, enqueued != COF_OK ? enqueued : status);
}

cof_status cof_put(cof_arena *arena, int peer, size_t dst_offset, const void *src, size_t bytes,
                   cof_stream stream)
{
    COF_TRY(check_peer(arena, peer));
    COF_TRY(check_range(arena, "dst_offset", dst_offset, bytes));
    COF_TRY(check_memory(arena, "src", src, bytes));
    struct transfer t = {.arena = arena, .peer = peer, .offset = dst_offset, .bytes = bytes,
                         .src = src};
    return enqueue(&t, &(struct action){run_put, launch_put, NULL}, 0, stream);
}

cof_status cof_get(cof_arena *arena, void *dst, int peer, size_t src_offset, size_t bytes,
                   cof_stream stream)
{
    COF_TRY(check_peer(arena, peer));
    COF_TRY(check_range(arena, "src_offset", src_offset, bytes));
    COF_TRY(check_memory(arena, "dst", dst, bytes));
    struct transfer t = {.arena = arena, .peer = peer, .offset = src_offset, .bytes = bytes,
                         .dst = dst};
    return enqueue(&t, &(struct action){run_get, launch_get, launch_fill}, COFI_CALL_ALWAYS,
                   stream);
}

cof_status cof_signal(cof_arena *arena, int peer, int word, cof_stream stream)
{
    COF_TRY(check_peer(arena, peer));
    COF_TRY(check_word(arena, word));
    struct transfer t = {.arena = arena, .peer = peer, .word = word};
    return enqueue(&t, &(struct action){run_signal, launch_signal, NULL}, 0, stream);
}

cof_status cof_wait(cof_arena *arena, int peer, int word, cof_stream stream)
{
    COF_TRY(check_peer(arena, peer));
    COF_TRY(check_word(arena, word));
    struct transfer t = {.arena = arena, .peer = peer, .word = word};
    return enqueue(&t, &(struct action){run_wait, launch_wait, NULL}, 0, stream);
}
