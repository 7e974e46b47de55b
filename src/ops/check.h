/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the checks of all operators share: random data by index, the error rule, guarded buffers.
 * Compiled into the program and the tests, never into the library. */
#ifndef COFI_CHECK_H
#define COFI_CHECK_H

#include "ops/ops.h"

/* Random data. A value depends on seed, tensor and index alone, so any rank can make any part. */

uint64_t cofi_check_random(uint64_t seed, uint64_t tensor, uint64_t idx);
float cofi_check_normal(uint64_t seed, uint64_t tensor, uint64_t idx);
/* An integer in -most .. most. */
float cofi_check_integer(uint64_t seed, uint64_t tensor, uint64_t idx, int most);

/* Elements of fp32, bf16 and fp16 tensors. */

float cofi_check_load(const void *data, cof_dtype dtype, int64_t idx);
void cofi_check_store(void *data, cof_dtype dtype, int64_t idx, float value); /* nearest even */
/* x as the dtype would hold it. */
double cofi_check_rounded(double x, cof_dtype dtype);

/* The error rule. `plain` is the unblocked implementation in the same type whose
 * error is the yardstick. A value that is not finite counts as bad unless the reference is the same
 * infinity or NaN too; so does a plain value that is not finite where the reference is. */
/* No intermediate excuses more than this: scores whose lse is rounded further are not judged well.
 */
#define COFI_CHECK_MAX_INPUT_ERROR 1e-3

struct cofi_check_error {
    double err2, plain_err2, ref2;       /* sums of squares */
    double max_err, max_plain, max_ref;  /* largest magnitudes */
    int64_t n, n_bad;
    /* Set before judging, 0 for none: the relative error that the rounding of an intermediate which
     * the caller hands over allows anybody to have. Takes the place of u where larger, and adds
     * input_error * max |ref| to the second bound. */
    double input_error;
};

void cofi_check_error_add(struct cofi_check_error *error, double ours, double plain, double ref);

/* Sums and maxima over the ranks; collective. n <= 64. */
cof_status cofi_check_error_combine(cof_team *team, struct cofi_check_error *errors, int n);

/* The rule:  rel-RMSE(ours) <= max(2 rel-RMSE(plain), u)
 *            max err(ours)  <= 2 max err(plain) + 1 ulp(max |ref|)
 * with u the rounding unit of dtype (2^-8, 2^-11, 2^-24), and 3 max err(plain) for fewer than 1024
 * values, whose largest errors differ by more than 2 between equally good results now and then.
 * `scale` is the size that the terms of a result have which cancels to 0: where max |ref| < u scale
 * only  max err(ours) <= 2 max err(plain) + 4 u scale  is asked.
 * Appends "name error<=bound" to text; false when the rule is broken. */
bool cofi_check_error_judge(const struct cofi_check_error *error, cof_dtype dtype, double scale,
                            const char *name, char *text, size_t bytes);

/* Elementwise maxima over the ranks; collective. n <= 64. */
cof_status cofi_check_max(cof_team *team, double *values, int n);

/* ---- the device of a job's ranks ---- */

struct cofi_check_blocks;
struct cofi_runtime_device;

/* Work to be enqueued, at once or into a graph. */
struct cofi_check_work {
    cof_status (*fn)(void *arg, cof_stream stream);
    void *arg;
};

/* What checks need of it. Host memory comes from a pool that is taken by `open`, for taking and
 * giving back more would wait for kernels of all ranks in the process. */
struct cofi_check_device {
    cof_status (*available)(void); /* before any rank: COF_ERR_UNSUPPORTED where there is none */
    /* Local, once for each rank, before ranks of this process wait for each other on the device. */
    cof_status (*open)(cof_world *world);
    void (*close)(void);
    void *(*alloc)(size_t bytes); /* host memory that devices reach, 4096-byte aligned; or NULL */
    void (*free)(void *data);
    /* Between any memory of host and device; done when they return, whatever other streams do. */
    cof_status (*copy)(cof_world *world, void *dst, const void *src, size_t bytes);
    cof_status (*fill)(cof_world *world, void *dst, int byte, size_t bytes);
    cof_status (*blocks_open)(cof_team *team, size_t bytes, struct cofi_check_blocks *blocks);
    void (*blocks_close)(struct cofi_check_blocks *blocks);
    /* Memory of the device, zeroed; neither waits for other streams. */
    cof_status (*memory_open)(cof_world *world, size_t bytes, void **data_out);
    void (*memory_close)(cof_world *world, void *data); /* NULL is fine */
    /* What `work` enqueues, as a graph. No rank's work is on while another one makes its graph. */
    cof_status (*capture)(cof_world *world, const struct cofi_check_work *work, cof_stream stream,
                          void **graph_out);
    cof_status (*replay)(cof_world *world, void *graph, cof_stream stream);
    void (*release)(cof_world *world, void *graph); /* NULL is fine */
    /* Seconds of the work on the device, by events before and behind it; waits for the end. */
    cof_status (*time)(cof_world *world, void *timer, const struct cofi_check_work *work,
                       cof_stream stream, double *seconds_out);
    cof_status (*timer_open)(cof_world *world, void **timer_out);
    void (*timer_close)(cof_world *world, void *timer); /* NULL is fine */
    const struct cofi_runtime_device *runtime; /* for `cofuse check runtime` alone */
};

/* NULL in a build without. */
const struct cofi_check_device *cofi_check_cuda(void);
/* NULL: the world's ranks work on the CPU. */
const struct cofi_check_device *cofi_check_device(const cof_world *world);

void cofi_check_red_fill(void *data, size_t bytes);
bool cofi_check_red_intact(const void *data, size_t bytes);

/* A buffer between two red zones. Red zones and poison are NaN in every type and differ. */
struct cofi_guard {
    unsigned char *data; /* 128-byte aligned; a few bytes are had for size 0 too */
    size_t bytes;
    unsigned char *base;
    uint64_t hash;
    const struct cofi_check_device *device; /* whose pool it is from; NULL: the heap */
};

cof_status cofi_guard_alloc(struct cofi_guard *guard, size_t bytes); /* poisoned */
/* The same in host memory that the device reaches; NULL: none. */
cof_status cofi_guard_alloc_for(const struct cofi_check_device *device, struct cofi_guard *guard,
                                size_t bytes);
void cofi_guard_free(struct cofi_guard *guard);
void cofi_guard_poison(struct cofi_guard *guard);
bool cofi_guard_intact(const struct cofi_guard *guard); /* the red zones are untouched */
uint64_t cofi_guard_hash(const struct cofi_guard *guard);

/* ---- arenas of the engine in hand: thread, shm, cuda, or attach ---- */

/* Blocks of shared memory, one per rank of a team, that every rank has mapped: what a caller of
 * cof_arena_attach brings. Of the device's memory where ranks work on one. The ranks are processes.
 * Collective; a rank that fails says so in the next collective call, with the status it got.
 * `bytes` may differ over the ranks. */
struct cofi_check_blocks {
    void **base; /* by rank */
    size_t *bytes;
    int n_ranks;
    int fd; /* the own block's, for the others to open; -1 */
    const struct cofi_check_device *device;
    void *own; /* the device's */
};

/* Memory of the host, whatever the ranks work on. */
cof_status cofi_check_host_blocks_open(cof_team *team, size_t bytes,
                                       struct cofi_check_blocks *blocks);
cof_status cofi_check_blocks_open(cof_team *team, size_t bytes, struct cofi_check_blocks *blocks);
/* Local: every rank has a mapping of its own, so this takes nothing from the others. */
void cofi_check_blocks_close(struct cofi_check_blocks *blocks);

struct cofi_check_arena {
    cof_arena *arena;
    struct cofi_check_blocks blocks; /* with job->attach */
};

/* Collective over `team`; first_epoch = 0: 1. The front of attached blocks holds garbage before. */
cof_status cofi_check_arena_open(const struct cofi_job *job, cof_team *team, size_t bytes,
                                 int n_words, uint32_t first_epoch,
                                 struct cofi_check_arena *arena_out);
void cofi_check_arena_close(struct cofi_check_arena *arena); /* local; again is fine */

/* Appends to a text, cut at `bytes`. */
void cofi_check_append(char *text, size_t bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Fails the result with a text, unless it has failed before. */
void cofi_check_fail(struct cofi_check_result *result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The worst verdict of all ranks, with the text of the first rank that found it; collective. */
cof_status cofi_check_agree(cof_team *team, struct cofi_check_result *result);

/* fn(arg, item) for the items of this rank, over a few threads: item % n_ranks == rank. Returns the
 * first failure. The ranks then meet (cof_team_barrier). Collective. */
typedef cof_status (*cofi_check_item_fn)(void *arg, int64_t item);
cof_status cofi_check_share(const struct cofi_job *job, int64_t n_items, cofi_check_item_fn fn,
                            void *arg);

#endif
