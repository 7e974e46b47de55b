/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check runtime`: what every engine must keep. The cases use engines through the public
 * calls and the arena and call functions alone, and ask the capability bits what may be tried. */
#ifndef COFI_RUNTIME_CHECK_H
#define COFI_RUNTIME_CHECK_H

#include "core/error.h"
#include "ops/check.h"
#include "symm/call.h"
#include "symm/engine.h"

/* One rank in one case. */
struct cofi_runtime {
    struct cofi_job *job;
    const struct cofi_check_options *options;
    struct cofi_check_result *result;
    uint64_t arg; /* of the case, from its line in the table */
    int rank, n_ranks;
    const struct cofi_engine_ops *ops; /* of arenas made by cofi_runtime_arena */
    uint64_t n_random;
};

#define COFI_RUNTIME_MAX_RANKS 256

typedef cof_status (*cofi_runtime_fn)(struct cofi_runtime *rt);

struct cofi_runtime_case {
    const char *line; /* "case=put_get bytes=1" */
    cofi_runtime_fn fn;
    uint64_t arg;
    int min_ranks;
    unsigned caps; /* without these the case is skipped */
};

/* ---- helpers: runtime_check_local.c ---- */

/* Fails the case on this rank, and goes on. */
#define COFI_EXPECT(rt, cond, ...)                                                                 \
    do {                                                                                           \
        if (!(cond))                                                                               \
            cofi_check_fail((rt)->result, __VA_ARGS__);                                            \
    } while (0)

/* The status is the wanted one, and its text has the part (NULL: any text). */
void cofi_runtime_wants(struct cofi_runtime *rt, const char *what, cof_status status,
                        cof_status wanted, const char *part);

/* n, or fewer where processes share a device and run on it by turns, but enough to mean something:
 * a rank that waits keeps the device until its turn ends, so what ranks do after one another takes
 * a turn each, of milliseconds. Alike on all ranks. */
int cofi_runtime_turns(const struct cofi_runtime *rt, int n);
/* The same, and ten times as many with --full. */
int cofi_runtime_rounds(const struct cofi_runtime *rt, int n);

/* After the i-th of calls of the operator for tests that nobody waits for: waits now and then, so
 * that no device's queue is full. The launch that finds it so may keep all ranks of the process
 * from launching what empties it. */
cof_status cofi_runtime_pace(const struct cofi_runtime *rt, int i, cof_stream stream);

/* On devices; processes there have one rank each. */
bool cofi_runtime_are_threads(const cof_world *world);
/* Before or after something is destroyed between calls: CUDA may wait for all kernels of the
 * process then, so ranks that are threads on devices meet. Others do not. */
cof_status cofi_runtime_settle(struct cofi_runtime *rt);

/* This rank's next random number, below n. */
unsigned cofi_runtime_random(struct cofi_runtime *rt, unsigned n);
void cofi_runtime_sleep_us(unsigned us);

/* Zeroed memory for messages, which the ranks' device reaches too. */
void *cofi_runtime_alloc(const cof_world *world, size_t bytes);
void cofi_runtime_free(const cof_world *world, void *data);

/* Message `idx` of rank `from` to rank `to`: every byte of it depends on all. */
void cofi_runtime_fill(void *data, size_t bytes, uint64_t from, uint64_t to, uint64_t idx);
/* -1, or the first byte that differs. */
long cofi_runtime_compare(const void *data, size_t bytes, uint64_t from, uint64_t to, uint64_t idx);

/* A world of its own, of the job's engine and ranks. */
cof_status cofi_runtime_world(struct cofi_runtime *rt, cof_world **world_out);

/* n_words = 4. */
cof_status cofi_runtime_arena(struct cofi_runtime *rt, cof_team *team, size_t bytes,
                              uint32_t first_epoch, struct cofi_check_arena *arena_out);

/* Open descriptors, lines of /proc/self/maps, and bytes mapped by this process. */
struct cofi_runtime_use {
    long n_fds, n_maps;
    size_t bytes;
    size_t device_bytes; /* taken of the device, by all processes */
};
struct cofi_runtime_use cofi_runtime_use(const cof_world *world);

/* This rank's own data, wherever it lies. No call that uses those bytes is on. */
cof_status cofi_runtime_read(cof_arena *arena, size_t offset, void *dst, size_t bytes);
cof_status cofi_runtime_write(cof_arena *arena, size_t offset, const void *src, size_t bytes);
cof_status cofi_runtime_set(cof_arena *arena, size_t offset, int byte, size_t bytes);
/* The same at a pointer of cof_arena_view. */
cof_status cofi_runtime_copy(cof_arena *arena, void *dst, const void *src, size_t bytes);
/* All of it, to look at: itself, or a copy. NULL after the case failed. */
const unsigned char *cofi_runtime_look(struct cofi_runtime *rt, cof_arena *arena);
void cofi_runtime_look_end(cof_arena *arena, const unsigned char *data);

/* Of the last call. The ranks stand still. */
uint32_t cofi_runtime_epoch(cof_arena *arena);
cof_status cofi_runtime_set_epoch(cof_arena *arena, uint32_t epoch);

/* ---- an operator for tests: runtime_check_op.c ----
 *
 * Each call hands every rank a message of every other rank.
 *   pull  the owner writes its message into its own slab, the readers fetch it from there
 *   push  the writer stores its message into a slot of each reader
 * Words: READY "my message is there", writer to all; ACK "I have read your message", reader to
 * writer, waited for before the writer's next message. */
enum cofi_runtime_form { COFI_RUNTIME_PULL, COFI_RUNTIME_PUSH };
enum cofi_runtime_point { COFI_RUNTIME_BEGUN, COFI_RUNTIME_PUBLISHED };

struct cofi_runtime_op {
    struct cofi_binding binding;
    enum cofi_runtime_form form;
    size_t max_bytes;   /* of a message */
    uint64_t n_made;    /* calls enqueued, alike on all ranks: numbers the messages */
    uint64_t n_empty;
    char *fetched;      /* a message that was fetched, or the staged form of one to store */
    char wrong[200];    /* the first message that was not as it should be */
    /* Within a call; NULL: none. Where ranks work on a device, in a thread of CUDA's. */
    void (*hook)(void *arg, enum cofi_runtime_point point);
    void *hook_arg;
    struct cofi_runtime_op_cuda *on_device; /* NULL: the CPU's */
};

struct cofi_runtime_call {
    size_t bytes; /* of this call's messages: a size of the run, compared by the digest */
    uint32_t direction;
    /* microseconds of sleep: before the message is written, before each one is read */
    unsigned write_delay, read_delay;
};

/* Collective over the team. */
cof_status cofi_runtime_op_open(cof_team *team, cof_arena *arena, const char *name,
                                enum cofi_runtime_form form, size_t max_bytes,
                                struct cofi_runtime_op *op);
/* Of its slab; words come on top. */
size_t cofi_runtime_op_payload(int n_ranks, enum cofi_runtime_form form, size_t max_bytes);
cof_status cofi_runtime_op_call(cof_world *world, struct cofi_runtime_op *op,
                                const struct cofi_runtime_call *call, cof_stream stream);
void cofi_runtime_op_close(struct cofi_runtime_op *op); /* local */
/* The first message that was wrong, or "". After the stream was synchronised. */
const char *cofi_runtime_op_wrong(struct cofi_runtime_op *op);
/* Fails the case when there is one. */
void cofi_runtime_op_inspect(struct cofi_runtime *rt, struct cofi_runtime_op *op);

static inline size_t cofi_runtime_op_slot(size_t max_bytes)
{
    return (max_bytes + COFI_LINE - 1) / COFI_LINE * COFI_LINE;
}
enum { COFI_RUNTIME_READY, COFI_RUNTIME_ACK, COFI_RUNTIME_PURPOSES };
enum { COFI_RUNTIME_PUBLISHED_MARK }; /* the last call that published */

/* ---- what the suite needs of CUDA: runtime_check_cuda.c ---- */

struct cofi_runtime_device {
    const struct cofi_runtime_case *cases; /* that other devices do not have */
    int n_cases;
    void (*name)(const cof_world *world, char *text, size_t bytes); /* its device, for options */
    /* Processes that take turns on a device, on the one that has the most: alike on all ranks. */
    int (*n_turns)(const cof_world *world);
    size_t (*used_bytes)(const cof_world *world);
    cof_status (*epoch)(cof_arena *arena, uint32_t *epoch_out);
    cof_status (*set_epoch)(cof_arena *arena, uint32_t epoch);
    cof_status (*op_open)(struct cofi_runtime_op *op);
    cof_status (*op_call)(cof_world *world, struct cofi_runtime_op *op,
                          const struct cofi_runtime_call *call, cof_stream stream);
    void (*op_inspect)(struct cofi_runtime_op *op); /* fills in op->wrong */
    void (*op_close)(struct cofi_runtime_op *op);
};
/* NULL: the world's ranks work on the CPU. */
const struct cofi_runtime_device *cofi_runtime_device(const cof_world *world);

/* ---- cases ---- */

cof_status cofi_runtime_capabilities(struct cofi_runtime *rt);
cof_status cofi_runtime_zeroed(struct cofi_runtime *rt);
cof_status cofi_runtime_flat(struct cofi_runtime *rt);
cof_status cofi_runtime_two_arenas(struct cofi_runtime *rt);
cof_status cofi_runtime_refused(struct cofi_runtime *rt);
cof_status cofi_runtime_differ(struct cofi_runtime *rt);
cof_status cofi_runtime_wrong_peers(struct cofi_runtime *rt);

cof_status cofi_runtime_put_get(struct cofi_runtime *rt); /* arg: bytes */
cof_status cofi_runtime_ranges(struct cofi_runtime *rt);
cof_status cofi_runtime_message_passing(struct cofi_runtime *rt); /* arg: bytes */
cof_status cofi_runtime_causality(struct cofi_runtime *rt);
cof_status cofi_runtime_signal_count(struct cofi_runtime *rt);
cof_status cofi_runtime_next_signal(struct cofi_runtime *rt);

cof_status cofi_runtime_calls(struct cofi_runtime *rt); /* arg: form */
cof_status cofi_runtime_skew(struct cofi_runtime *rt);  /* arg: form */
cof_status cofi_runtime_wrap(struct cofi_runtime *rt);  /* arg: form | epoch of the reset << 1 */
cof_status cofi_runtime_lap(struct cofi_runtime *rt);   /* arg: form */
cof_status cofi_runtime_overlay(struct cofi_runtime *rt); /* arg: number of plans */
cof_status cofi_runtime_rebind(struct cofi_runtime *rt);
cof_status cofi_runtime_late(struct cofi_runtime *rt); /* arg: 1: the epoch jumps there */
cof_status cofi_runtime_words_reused(struct cofi_runtime *rt);
cof_status cofi_runtime_no_room(struct cofi_runtime *rt);

cof_status cofi_runtime_digest(struct cofi_runtime *rt); /* arg: COFI_RUNTIME_SIZES .. */
enum { COFI_RUNTIME_SIZES, COFI_RUNTIME_DIRECTION, COFI_RUNTIME_ORDER, COFI_RUNTIME_EMPTY };
cof_status cofi_runtime_empty(struct cofi_runtime *rt);
cof_status cofi_runtime_poison(struct cofi_runtime *rt); /* arg: 1: rank 0, else the last */
cof_status cofi_runtime_no_signal(struct cofi_runtime *rt);

cof_status cofi_runtime_worlds(struct cofi_runtime *rt);
cof_status cofi_runtime_teams(struct cofi_runtime *rt);
cof_status cofi_runtime_reinit(struct cofi_runtime *rt);

/* ---- ranks that die or stop: runtime_check_child.c, runtime_check_death.c ----
 *
 * The ranks of the case start a process each, which make a world of their own. */
enum cofi_runtime_end {
    COFI_RUNTIME_IN_CALL,     /* after the beginning of a call, before it publishes */
    COFI_RUNTIME_AT_PUBLISH,  /* right after publishing */
    COFI_RUNTIME_IN_WAIT,     /* while it waits for a signal */
    COFI_RUNTIME_IN_BARRIER,  /* while the ranks meet, again and again */
    COFI_RUNTIME_IN_CREATE,   /* while they make and destroy arenas, again and again */
    COFI_RUNTIME_ENDS
};
#define COFI_RUNTIME_STOPS 0x100  /* SIGSTOP instead of SIGKILL */
#define COFI_RUNTIME_RANK0 0x200  /* rank 0 instead of the last one */

cof_status cofi_runtime_death(struct cofi_runtime *rt); /* arg: end and flags */

/* The whole of `cofuse check --child WORDS`; returns the exit code. */
int cofi_runtime_child(const char *words);

#endif
