/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* memfd_create, sched_getaffinity */
#include "ops/check.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/error.h"
#include "ops/check_elem.h"
#include "symm/engine.h"
#include "tools/cli.h"

/* ---- Random data ---- */

/* The finaliser of splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

uint64_t cofi_check_random(uint64_t seed, uint64_t tensor, uint64_t idx)
{
    uint64_t key = mix(seed + UINT64_C(0x9e3779b97f4a7c15) * (tensor + 1));
    return mix(key + UINT64_C(0x9e3779b97f4a7c15) * (idx + 1));
}

/* Box-Muller on the two halves of one random word. */
float cofi_check_normal(uint64_t seed, uint64_t tensor, uint64_t idx)
{
    uint64_t x = cofi_check_random(seed, tensor, idx);
    float u = ((float)(x >> 40) + 0.5f) * 0x1p-24f; /* 0 < u < 1 */
    float angle = (float)(x & 0xffffff) * (float)(2 * M_PI * 0x1p-24);
    return sqrtf(-2 * logf(u)) * cosf(angle);
}

float cofi_check_integer(uint64_t seed, uint64_t tensor, uint64_t idx, int most)
{
    return (float)((int)(cofi_check_random(seed, tensor, idx) % (uint64_t)(2 * most + 1)) - most);
}

/* ---- Elements ---- */

float cofi_check_load(const void *data, cof_dtype dtype, int64_t idx)
{
    return cofi_check_elem_load(data, cofi_elem_of(dtype), idx);
}

void cofi_check_store(void *data, cof_dtype dtype, int64_t idx, float value)
{
    switch (cofi_elem_of(dtype)) {
    case COFI_ELEM_F32: ((float *)data)[idx] = value; break;
    case COFI_ELEM_BF16: ((uint16_t *)data)[idx] = cofi_check_to_bf16(value); break;
    case COFI_ELEM_F16: ((uint16_t *)data)[idx] = cofi_check_to_f16(value); break;
    }
}

double cofi_check_rounded(double x, cof_dtype dtype)
{
    return cofi_check_elem_round((float)x, cofi_elem_of(dtype));
}

/* ---- The error rule ---- */

void cofi_check_error_add(struct cofi_check_error *e, double ours, double plain, double ref)
{
    if (!isfinite(ours) || !isfinite(plain) || !isfinite(ref)) {
        e->n_bad += !(isnan(ref) ? isnan(ours) : !isfinite(ref) && ours == ref);
        return;
    }
    e->n++;
    double err = fabs(ours - ref), plain_err = fabs(plain - ref);
    e->err2 += err * err;
    e->plain_err2 += plain_err * plain_err;
    e->ref2 += ref * ref;
    e->max_err = fmax(e->max_err, err);
    e->max_plain = fmax(e->max_plain, plain_err);
    e->max_ref = fmax(e->max_ref, fabs(ref));
}

cof_status cofi_check_error_combine(cof_team *team, struct cofi_check_error *errors, int n)
{
    int n_ranks = cof_team_size(team);
    struct cofi_check_error *all = malloc((size_t)n_ranks * (size_t)n * sizeof *all);
    COF_FAIL_IF(!all, COF_ERR_NOMEM, "check: no memory for the errors of %d ranks", n_ranks);
    cof_status status = cof_team_allgather(team, errors, all, (size_t)n * sizeof *all);
    memset(errors, 0, (size_t)n * sizeof *errors);
    for (int i = 0; i < n_ranks * n && status == COF_OK; i++) {
        struct cofi_check_error *e = &errors[i % n];
        e->err2 += all[i].err2;
        e->plain_err2 += all[i].plain_err2;
        e->ref2 += all[i].ref2;
        e->max_err = fmax(e->max_err, all[i].max_err);
        e->max_plain = fmax(e->max_plain, all[i].max_plain);
        e->max_ref = fmax(e->max_ref, all[i].max_ref);
        e->n += all[i].n;
        e->n_bad += all[i].n_bad;
    }
    free(all);
    return status;
}

cof_status cofi_check_max(cof_team *team, double *values, int n)
{
    int n_ranks = cof_team_size(team);
    double *all = malloc((size_t)n_ranks * (size_t)n * sizeof *all);
    COF_FAIL_IF(!all, COF_ERR_NOMEM, "check: no memory for the values of %d ranks", n_ranks);
    cof_status status = cof_team_allgather(team, values, all, (size_t)n * sizeof *all);
    for (int i = 0; i < n_ranks * n && status == COF_OK; i++)
        values[i % n] = fmax(values[i % n], all[i]);
    free(all);
    return status;
}

bool cofi_check_error_judge(const struct cofi_check_error *e, cof_dtype dtype, double scale,
                            const char *name, char *text, size_t bytes)
{
    const enum cofi_elem elem = cofi_elem_of(dtype);
    int digits = elem == COFI_ELEM_BF16 ? 8 : elem == COFI_ELEM_F16 ? 11 : 24;
    double u = ldexp(1, -digits), s = fmax(scale, e->max_ref);
    double normal = fmax(e->max_ref, elem == COFI_ELEM_F16 ? 0x1p-14 : 0x1p-126);
    double ulp = e->max_ref > 0 ? ldexp(1, ilogb(normal) - digits + 1) : 0;
    double factor = e->n < 1024 ? 3 : 2;
    double max_bound = factor * e->max_plain + ulp + e->input_error * e->max_ref;
    bool ok = e->n_bad == 0;
    if (e->n_bad)
        cofi_check_append(text, bytes, " %s has %lld values that are not finite", name,
                          (long long)e->n_bad);
    if (e->max_ref < u * s) {
        max_bound = factor * e->max_plain + 4 * u * s;
        cofi_check_append(text, bytes, " %s", name);
    } else if (e->ref2 > 0) {
        double rmse = sqrt(e->err2 / e->ref2), plain = sqrt(e->plain_err2 / e->ref2);
        double bound = fmax(2 * plain, fmax(u, e->input_error));
        ok = ok && rmse <= bound;
        cofi_check_append(text, bytes, " %s rmse %.2g%s%.2g", name, rmse,
                          rmse <= bound ? "<=" : " OVER ", bound);
    }
    ok = ok && e->max_err <= max_bound;
    if (e->max_err > 0 || max_bound > 0)
        cofi_check_append(text, bytes, " max %.2g%s%.2g", e->max_err,
                          e->max_err <= max_bound ? "<=" : " OVER ", max_bound);
    return ok;
}

/* ---- The device ---- */

#ifdef COFI_CUDA
extern const struct cofi_check_device cofi_check_device_cuda;
#endif

const struct cofi_check_device *cofi_check_cuda(void)
{
#ifdef COFI_CUDA
    return &cofi_check_device_cuda;
#else
    return NULL;
#endif
}

const struct cofi_check_device *cofi_check_device(const cof_world *world)
{
    return world->ops->device ? cofi_check_cuda() : NULL;
}

/* ---- Guarded buffers ---- */

enum { RED_BYTES = 4096 };

void cofi_check_red_fill(void *data, size_t bytes)
{
    unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        p[i] = i % 2 ? 0xff : 0xfe; /* 0xfffe: a NaN in every type, unlike the poison */
}

bool cofi_check_red_intact(const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != (i % 2 ? 0xff : 0xfe))
            return false;
    return true;
}

cof_status cofi_guard_alloc(struct cofi_guard *guard, size_t bytes)
{
    return cofi_guard_alloc_for(NULL, guard, bytes);
}

cof_status cofi_guard_alloc_for(const struct cofi_check_device *device, struct cofi_guard *guard,
                                size_t bytes)
{
    *guard = (struct cofi_guard){.bytes = bytes, .device = device};
    if (device)
        guard->base = device->alloc(bytes + 2 * RED_BYTES);
    else if (posix_memalign((void **)&guard->base, 128, bytes + 2 * RED_BYTES) != 0)
        guard->base = NULL;
    COF_FAIL_IF(!guard->base, COF_ERR_NOMEM, "check: no memory for a buffer of %zu bytes", bytes);
    guard->data = guard->base + RED_BYTES;
    cofi_check_red_fill(guard->base, RED_BYTES);
    cofi_check_red_fill(guard->data + bytes, RED_BYTES);
    cofi_guard_poison(guard);
    return COF_OK;
}

void cofi_guard_free(struct cofi_guard *guard)
{
    if (guard->device)
        guard->device->free(guard->base);
    else
        free(guard->base);
    *guard = (struct cofi_guard){0};
}

void cofi_guard_poison(struct cofi_guard *guard)
{
    memset(guard->data, 0xff, guard->bytes);
}

bool cofi_guard_intact(const struct cofi_guard *guard)
{
    return cofi_check_red_intact(guard->base, RED_BYTES) &&
           cofi_check_red_intact(guard->data + guard->bytes, RED_BYTES);
}

uint64_t cofi_guard_hash(const struct cofi_guard *guard)
{
    uint64_t hash = guard->bytes, word = 0;
    size_t i = 0;
    for (; i + 8 <= guard->bytes; i += 8) {
        memcpy(&word, guard->data + i, 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    word = 0;
    memcpy(&word, guard->data + i, guard->bytes - i);
    return mix(hash ^ word);
}

/* ---- Arenas ---- */

/* Where a rank's block is to be found by the others. */
struct place {
    int32_t pid, fd;
    uint64_t bytes;
};

static cof_status map_block(const struct place *place, int rank, void **base_out)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)place->pid, (int)place->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    COF_FAIL_IF(fd < 0, COF_ERR_SYSTEM, "check: block of rank %d: %s: %s", rank, path,
                strerror(errno));
    void *base = mmap(NULL, place->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    COF_FAIL_IF(base == MAP_FAILED, COF_ERR_NOMEM, "check: block of rank %d: mapping %llu bytes",
                rank, (unsigned long long)place->bytes);
    *base_out = base;
    return COF_OK;
}

static cof_status make_block(size_t bytes, int *fd_out)
{
    int fd = *fd_out = memfd_create("cofuse-check", MFD_CLOEXEC);
    COF_FAIL_IF(fd < 0, COF_ERR_SYSTEM, "check: memfd_create: %s", strerror(errno));
    int error = posix_fallocate(fd, 0, (off_t)bytes);
    COF_FAIL_IF(error, COF_ERR_NOMEM, "check: a block of %zu bytes: %s", bytes, strerror(error));
    return COF_OK;
}

static cof_status exchange_blocks(cof_team *team, struct cofi_check_blocks *b, struct place *places)
{
    int rank = cof_team_rank(team);
    cof_status status = b->base && b->bytes
                            ? make_block(places[rank].bytes, &b->fd)
                            : COF_FAIL(COF_ERR_NOMEM, "check: no memory for the blocks of %d ranks",
                                       b->n_ranks);
    struct place own = {(int32_t)getpid(), status == COF_OK ? b->fd : -1, places[rank].bytes};
    COF_TRY(cof_team_allgather(team, &own, places, sizeof own));
    for (int r = 0; r < b->n_ranks && status == COF_OK; r++) {
        COF_FAIL_IF(places[r].fd < 0, COF_ERR_NOMEM, "check: rank %d has no block", r);
        status = map_block(&places[r], r, &b->base[r]);
        b->bytes[r] = places[r].bytes;
    }
    return status;
}

cof_status cofi_check_host_blocks_open(cof_team *team, size_t bytes, struct cofi_check_blocks *b)
{
    size_t n = (size_t)cof_team_size(team);
    struct place places[COFI_MAX_RANKS] = {0};
    *b = (struct cofi_check_blocks){.n_ranks = (int)n, .fd = -1, .base = calloc(n, sizeof *b->base),
                                    .bytes = calloc(n, sizeof *b->bytes)};
    places[cof_team_rank(team)].bytes = bytes;
    return exchange_blocks(team, b, places);
}

cof_status cofi_check_blocks_open(cof_team *team, size_t bytes, struct cofi_check_blocks *b)
{
    const struct cofi_check_device *device = cofi_check_device(team->world);
    return device ? device->blocks_open(team, bytes, b)
                  : cofi_check_host_blocks_open(team, bytes, b);
}

void cofi_check_blocks_close(struct cofi_check_blocks *b)
{
    if (b->device) {
        b->device->blocks_close(b);
        return;
    }
    for (int r = 0; b->base && b->bytes && r < b->n_ranks; r++)
        if (b->base[r])
            munmap(b->base[r], b->bytes[r]);
    if (b->base && b->fd >= 0)
        close(b->fd);
    free(b->base);
    free(b->bytes);
    *b = (struct cofi_check_blocks){.fd = -1};
}

/* What a caller's memory may hold: attaching zeroes it. */
static cof_status spoil_front(cof_team *team, void *front, size_t bytes)
{
    const struct cofi_check_device *device = cofi_check_device(team->world);
    if (device)
        return device->fill(team->world, front, 0xa5, bytes);
    memset(front, 0xa5, bytes);
    return COF_OK;
}

cof_status cofi_check_arena_open(const struct cofi_job *job, cof_team *team, size_t bytes,
                                 int n_words, uint32_t first_epoch, struct cofi_check_arena *a)
{
    struct cofi_arena_spec spec = {.bytes = bytes, .n_words = n_words, .first_epoch = first_epoch};
    cof_status own = COF_OK;
    *a = (struct cofi_check_arena){.blocks.fd = -1};
    if (job->attach) {
        int n_ranks = cof_team_size(team), rank = cof_team_rank(team);
        spec.bytes = cof_arena_attach_bytes(team, bytes, n_words);
        own = cofi_check_blocks_open(team, spec.bytes, &a->blocks);
        spec.peers = a->blocks.base;
        if (own == COF_OK)
            own = spoil_front(team, a->blocks.base[rank], cofi_arena_front_bytes(n_ranks, n_words));
    }
    cof_status status = cofi_arena_open(team, &spec, own, &a->arena);
    if (a->blocks.fd >= 0) /* all have mapped it, or will not */
        close(a->blocks.fd);
    a->blocks.fd = -1;
    if (status != COF_OK)
        cofi_check_arena_close(a);
    return status;
}

void cofi_check_arena_close(struct cofi_check_arena *a)
{
    cof_arena_destroy(a->arena);
    a->arena = NULL;
    cofi_check_blocks_close(&a->blocks);
}

/* ---- Results ---- */

void cofi_check_append(char *text, size_t bytes, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, bytes - used, format, args);
    va_end(args);
}

void cofi_check_fail(struct cofi_check_result *result, const char *format, ...)
{
    if (result->verdict == COFI_FAILED)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(result->text, sizeof result->text, format, args);
    va_end(args);
    result->verdict = COFI_FAILED;
}

cof_status cofi_check_agree(cof_team *team, struct cofi_check_result *result)
{
    int n_ranks = cof_team_size(team), worst = 0;
    struct cofi_check_result *all = malloc((size_t)n_ranks * sizeof *all);
    COF_FAIL_IF(!all, COF_ERR_NOMEM, "check: no memory for the results of %d ranks", n_ranks);
    cof_status status = cof_team_allgather(team, result, all, sizeof *result);
    if (status == COF_OK) {
        for (int r = 0; r < n_ranks; r++)
            if (all[r].verdict == COFI_FAILED && all[worst].verdict != COFI_FAILED)
                worst = r;
        for (int r = 0; r < n_ranks; r++)
            if (all[r].verdict == COFI_SKIPPED && all[worst].verdict == COFI_PASSED)
                worst = r;
        result->verdict = all[worst].verdict;
        if (all[worst].verdict == COFI_FAILED && n_ranks > 1)
            snprintf(result->text, sizeof result->text, "rank %d: %.380s", worst, all[worst].text);
        else
            memcpy(result->text, all[worst].text, sizeof result->text);
    }
    free(all);
    return status;
}

/* ---- Shared work ---- */

enum { MAX_THREADS = 8 };

struct share {
    int64_t first, step, n_items;
    cofi_check_item_fn fn;
    void *arg;
    cof_status status;
    char text[400];
    pthread_t thread;
};

static void *share_main(void *arg)
{
    struct share *s = arg;
    for (int64_t i = s->first; i < s->n_items && s->status == COF_OK; i += s->step)
        s->status = s->fn(s->arg, i);
    if (s->status != COF_OK)
        snprintf(s->text, sizeof s->text, "%.399s", cof_last_error());
    return NULL;
}

static int threads_per_rank(const struct cofi_job *job)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) / job->n_ranks : 1;
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

cof_status cofi_check_share(const struct cofi_job *job, int64_t n_items, cofi_check_item_fn fn,
                            void *arg)
{
    struct share shares[MAX_THREADS];
    int n_threads = threads_per_rank(job), n_started = 0;
    for (int i = 0; i < n_threads; i++)
        shares[i] = (struct share){.first = job->rank + (int64_t)i * job->n_ranks,
                                   .step = (int64_t)n_threads * job->n_ranks,
                                   .n_items = n_items, .fn = fn, .arg = arg};
    for (int i = 1; i < n_threads && shares[i].first < n_items; i++, n_started++)
        if (pthread_create(&shares[i].thread, NULL, share_main, &shares[i]) != 0)
            break;
    share_main(&shares[0]);
    for (int i = 1; i <= n_started; i++)
        pthread_join(shares[i].thread, NULL);
    for (int i = n_started + 1; i < n_threads; i++)
        share_main(&shares[i]); /* no thread was to be had, or nothing to do */
    for (int i = 0; i < n_threads; i++)
        if (shares[i].status != COF_OK)
            return COF_FAIL(shares[i].status, "%s", shares[i].text);
    return cof_team_barrier(job->team);
}
