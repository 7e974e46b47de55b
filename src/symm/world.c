/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/cpu/vec.h"
#include "core/clock.h"
#include "core/config.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/sized.h"
#include "symm/bootstrap.h"
#include "symm/engine.h"
#include "symm/fork.h"
#include "symm/launcher.h"
#include "symm/symm.h"

#define WORLD_TEAM_SEED UINT64_C(0x776f726c647465)

/* ---- options -------------------------------------------------------------------------------- */

static cof_status identity_from_environment(cof_world *w, struct cofi_identity *id)
{
    COF_TRY(cofi_launcher_identity(id));
    w->n_ranks = id->n_ranks;
    w->rank = id->rank;
    return COF_OK;
}

/* Last, when nothing breaks a rule any more: the number and the inherited sockets of a world that
 * this rank refuses serve the one that it makes instead. */
static cof_status number_world(cof_world *w, const struct cofi_identity *id)
{
    static atomic_int n_worlds; /* of this process, made from the environment */
    if (id->n_ranks == 1)
        return COF_OK;
    int ordinal = atomic_fetch_add(&n_worlds, 1);
    if (ordinal == 0 && id->has_sockets)
        return COF_OK; /* job stays "": the inherited sockets */
    COF_FAIL_IF(!*id->job, COF_ERR_INVALID,
                "variable COFUSE_FDS is for the first world of a process; this is world %d and "
                "wants COFUSE_JOB, the same on all ranks", ordinal + 1);
    snprintf(w->job, sizeof w->job, "%s#%d", id->job, ordinal);
    return COF_OK;
}

static cof_status identity_from_options(cof_world *w, const cof_world_options *o)
{
    COF_FAIL_IF(o->n_ranks < 1 || o->n_ranks > INT16_MAX, COF_ERR_INVALID,
                "options.n_ranks = %d: wanted 1 .. %d", o->n_ranks, INT16_MAX);
    COF_FAIL_IF(o->rank < 0 || o->rank >= o->n_ranks, COF_ERR_INVALID,
                "options.rank = %d: wanted 0 .. %d", o->rank, o->n_ranks - 1);
    w->n_ranks = o->n_ranks;
    w->rank = o->rank;
    if (o->n_ranks == 1 || o->allgather)
        return COF_OK;
    COF_FAIL_IF(!o->job || !*o->job || strlen(o->job) >= sizeof w->job, COF_ERR_INVALID,
                "options.job %s: wanted a text of 1 .. %zu bytes with n_ranks = %d",
                o->job ? "is empty or too long" : "is NULL", sizeof w->job - 1, o->n_ranks);
    snprintf(w->job, sizeof w->job, "%s", o->job);
    return COF_OK;
}

static cof_status check_seconds(double option, const char *name)
{
    COF_FAIL_IF(isnan(option), COF_ERR_INVALID, "options.%s = %g: wanted a number of seconds", name,
                option);
    return COF_OK;
}

static double seconds(double option, enum cofi_var var)
{
    return option < 0 ? 0 : option > 0 ? option : cofi_config_seconds(var);
}

static int allowed_cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* All ranks are on this host, so its cores are theirs. */
static cof_status choose_threads(cof_world *w, int64_t wanted)
{
    int cores = allowed_cores();
    const char *name = wanted == 0 ? "variable COFUSE_THREADS" : "options.n_threads";
    if (wanted == 0)
        wanted = cofi_config_int(COFI_VAR_THREADS);
    COF_FAIL_IF(wanted < 0 || wanted > 256, COF_ERR_INVALID,
                "%s = %lld: wanted 1 .. 256, or 0 for cores / ranks", name, (long long)wanted);
    if (wanted == 0)
        wanted = cores / w->n_ranks > 1 ? cores / w->n_ranks : 1;
    w->n_threads = (int)wanted;
    w->own_cores = w->n_ranks * wanted <= cores;
    return COF_OK;
}

static cof_status choose_engine(cof_world *w, const cof_world_options *o)
{
    const char *name = cofi_config_text(COFI_VAR_ENGINE);
    w->engine = o->engine;
    if (w->engine == COF_ENGINE_DEFAULT)
        w->engine = !strcmp(name, "thread") ? COF_ENGINE_THREAD
                    : !strcmp(name, "cuda") ? COF_ENGINE_CUDA
                                            : COF_ENGINE_SHM;
    w->ops = cofi_engine(w->engine);
    COF_FAIL_IF(!w->ops && w->engine == COF_ENGINE_CUDA, COF_ERR_UNSUPPORTED,
                "%s: this library was built without CUDA",
                o->engine == COF_ENGINE_CUDA ? "options.engine = 3 (cuda)"
                                             : "variable COFUSE_ENGINE = cuda");
    COF_FAIL_IF(!w->ops, COF_ERR_INVALID,
                "options.engine = %d: wanted 1 (thread), 2 (shm) or 3 (cuda)", (int)o->engine);
    return COF_OK;
}

static cof_status read_other_options(cof_world *w, const cof_world_options *o)
{
    COF_TRY(cofi_config_check(o->n_ranks == 0));
    COF_TRY(choose_engine(w, o));
    COF_TRY(check_seconds(o->init_timeout, "init_timeout"));
    COF_TRY(check_seconds(o->run_timeout, "run_timeout"));
    if (!w->ops->device)
        COF_TRY(cofi_gemm_init());
    w->init_timeout = seconds(o->init_timeout, COFI_VAR_INIT_TIMEOUT);
    w->run_timeout = seconds(o->run_timeout, COFI_VAR_TIMEOUT);
    return choose_threads(w, o->n_threads);
}

static cof_status read_options(cof_world *w, const cof_world_options *o)
{
    struct cofi_identity id = {.n_ranks = 1};
    COF_FAIL_IF(o->allgather && o->n_ranks == 0, COF_ERR_INVALID,
                "options.allgather with n_ranks = 0: wanted rank and n_ranks of the callback");
    COF_TRY(o->n_ranks == 0 ? identity_from_environment(w, &id) : identity_from_options(w, o));
    COF_TRY(read_other_options(w, o));
    return number_world(w, &id);
}

/* A caller of a later version, who sets what this one does not know, has a callback all the same:
 * so the options are there also after an error. */
static cof_status copy_options(const cof_world_options *given, cof_world_options *o)
{
    if (!given)
        return COF_OK;
    cof_status status = cofi_sized_read(
        o, sizeof *o, COFI_SIZE_THROUGH(cof_world_options, run_timeout), given, "options");
    if (status != COF_OK && given->size > sizeof *o && given->size <= COFI_SIZED_MAX_BYTES)
        memcpy(o, given, sizeof *o);
    return status;
}

/* ---- create and destroy --------------------------------------------------------------------- */

static cof_status allocate_tables(cof_world *w)
{
    size_t n = (size_t)w->n_ranks;
    w->socket = malloc(n * sizeof *w->socket);
    w->hello = calloc(n, sizeof *w->hello);
    w->state = calloc(n, sizeof *w->state);
    w->stale = calloc(n, sizeof *w->stale);
    COF_FAIL_IF(!w->socket || !w->hello || !w->state || !w->stale, COF_ERR_NOMEM,
                "world of %d: no memory", w->n_ranks);
    for (size_t r = 0; r < n; r++)
        w->socket[r] = -1;
    struct cofi_hello *h = &w->hello[w->rank];
    h->version = COF_VERSION_MAJOR << 16 | COF_VERSION_MINOR << 8 | COF_VERSION_PATCH;
    h->engine = (uint32_t)w->engine;
    h->rank = w->rank;
    h->n_ranks = w->n_ranks;
    h->pid = (int32_t)getpid();
    h->isa = cofi_isa();
    if (!w->ops->device)
        snprintf(h->gemm, sizeof h->gemm, "%s", cofi_gemm_name());
    return COF_OK;
}

/* Kernels are chosen from what all ranks have. */
static void agree_capabilities(cof_world *w)
{
    if (w->ops->device)
        return; /* a device's: device->join */
    int isa = w->hello[0].isa;
    bool same_gemm = true;
    for (int r = 1; r < w->n_ranks; r++) {
        isa = w->hello[r].isa < isa ? w->hello[r].isa : isa;
        same_gemm &= !strncmp(w->hello[r].gemm, w->hello[0].gemm, sizeof w->hello[0].gemm);
    }
    cofi_isa_cap((enum cofi_isa)isa);
    if (!same_gemm) {
        cofi_log(COFI_LOG_PROCESS, "ranks have different matrix products: plain C on all");
        cofi_gemm_use_plain();
    }
}

static cof_status check_engine_fits(const cof_world *w)
{
    bool processes = w->ops->caps & COFI_CAP_PROCESSES;
    for (int r = 0; r < w->n_ranks && !processes; r++)
        COF_FAIL_IF(w->hello[r].pid != (int32_t)getpid(), COF_ERR_INVALID,
                    "engine %s: rank %d is process %d, rank %d is process %d; wanted one process",
                    w->ops->name, r, w->hello[r].pid, w->rank, (int)getpid());
    return COF_OK;
}

static bool pins_threads(const cof_world *w)
{
    return w->own_cores && strcmp(cofi_config_text(COFI_VAR_PIN), "no") != 0;
}

cof_status cofi_world_stream_open(cof_world *w, int n_threads, bool with_gemm, const char *name,
                                  struct cofi_cpu_stream **out)
{
    /* Only the world's own stream is pinned: others share its cores. */
    bool first = with_gemm && !w->stream;
    return cofi_cpu_stream_open(
        &(struct cofi_cpu_stream_options){.n_threads = n_threads, .with_gemm = with_gemm,
                                          .pin = first && pins_threads(w),
                                          .first_core = w->rank * w->n_threads,
                                          .run_timeout = w->run_timeout, .name = name},
        out);
}

static cof_status make_world_team(cof_world *w)
{
    int *ranks = malloc((size_t)w->n_ranks * sizeof *ranks);
    COF_FAIL_IF(!ranks, COF_ERR_NOMEM, "world of %d: no memory", w->n_ranks);
    for (int r = 0; r < w->n_ranks; r++)
        ranks[r] = r;
    cof_status status = cofi_team_make(w, ranks, w->n_ranks, 0, &w->team);
    free(ranks);
    if (status == COF_OK) /* no tag of cof_team_create gives this number */
        w->team->id = cofi_hash_u64(WORLD_TEAM_SEED, (uint64_t)w->n_ranks);
    return status;
}

/* What the world's own calls run on. */
static cof_status open_here(cof_world *w, const cof_world_options *o)
{
    if (!w->ops->device)
        return cofi_world_stream_open(w, w->n_threads, true, "cofuse-now", &w->stream);
    COF_TRY(w->ops->device->open(w, o));
    return cofi_team_take_abort_word(w->team);
}

static cof_status join(cof_world *w, const cof_world_options *o)
{
    COF_TRY(allocate_tables(w));
    COF_TRY(cofi_bootstrap(w, cofi_deadline(w->init_timeout)));
    COF_TRY(check_engine_fits(w));
    agree_capabilities(w);
    COF_TRY(make_world_team(w));
    cof_status status = open_here(w, o);
    w->is_made = true;
    COF_TRY(cofi_team_agree(w->team, "world create", status));
    return w->ops->device ? w->ops->device->join(w) : COF_OK;
}

/* All that can fail before this rank meets the others. */
static cof_status prepare(const cof_world_options *o, cof_world **out)
{
    cof_world *w = *out = calloc(1, sizeof *w);
    COF_FAIL_IF(!w, COF_ERR_NOMEM, "world: no memory");
    pthread_mutex_init(&w->lock, NULL);
    w->n_holders = 1;
    COF_TRY(cofi_process_this(&w->made_by));
    COF_TRY(cofi_fork_add_world(w));
    return read_options(w, o);
}

/* Also with an error of its own: the others are in the callback already. */
static cof_status meet(const cof_world_options *o, cof_world *w, cof_status own)
{
    char job[COFI_JOB_BYTES] = "";
    if (!o->allgather || o->n_ranks < 2 || o->n_ranks > INT16_MAX)
        return own;
    COF_TRY(cofi_bootstrap_allgather(o, own, job));
    memcpy(w->job, job, sizeof job);
    return COF_OK;
}

cof_status cof_world_create(const cof_world_options *options, cof_world **world_out)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    cof_world *w = NULL;
    cof_status status = copy_options(options, &o);
    if (!world_out)
        status = COF_FAIL(COF_ERR_INVALID, "world_out: NULL");
    else
        *world_out = NULL;
    if (status == COF_OK)
        status = prepare(&o, &w);
    status = meet(&o, w, status);
    if (status == COF_OK)
        status = join(w, &o);
    if (status != COF_OK) {
        char text[COFI_ERROR_TEXT_BYTES];
        memcpy(text, cof_last_error(), sizeof text);
        cof_world_destroy(w);
        return cofi_fail_text(status, text);
    }
    if (!w->ops->device)
        cofi_log(COFI_LOG_PROCESS, "rank %d of %d, engine %s, %d threads%s, %s, gemm %s", w->rank,
                 w->n_ranks, w->ops->name, w->n_threads, pins_threads(w) ? " pinned" : "",
                 cofi_isa_name(cofi_isa()), cofi_gemm_name());
    *world_out = w;
    return COF_OK;
}

/* A world that is only half made says no bye: its peers read something else at that point. */
static void close_sockets(cof_world *w, bool is_made)
{
    for (int r = 0; w->socket && r < w->n_ranks; r++)
        if (w->socket[r] >= 0) {
            if (is_made)
                cofi_link_say_bye(w->socket[r]);
            cofi_link_close(w->socket[r]);
            w->socket[r] = -1;
        }
}

void cof_world_destroy(cof_world *w)
{
    if (!w)
        return;
    atomic_store(&w->is_destroyed, true);
    cofi_cpu_stream_close(w->stream);
    cof_team_destroy(w->team);
    if (w->device)
        w->ops->device->close(w); /* and the thread that looks at the sockets, before they go */
    if (cofi_process_is_this(&w->made_by)) /* else they are closed, and their numbers used again */
        close_sockets(w, w->is_made);
    cofi_world_release(w);
}

void cofi_world_release(cof_world *w)
{
    pthread_mutex_lock(&w->lock);
    int left = --w->n_holders;
    pthread_mutex_unlock(&w->lock);
    if (left > 0)
        return;
    cofi_fork_remove_world(w);
    pthread_mutex_destroy(&w->lock);
    free(w->socket);
    free(w->hello);
    free((void *)w->state);
    for (int r = 0; w->stale && r < w->n_ranks; r++)
        free(w->stale[r].answered);
    free(w->stale);
    free(w->dead_teams);
    free(w);
}

cof_status cofi_world_usable(const cof_world *w)
{
    COF_TRY(cofi_process_check(&w->made_by, "world"));
    COF_FAIL_IF(atomic_load_explicit(&w->is_destroyed, memory_order_relaxed), COF_ERR_INVALID,
                "team: its world has been destroyed");
    return COF_OK;
}

int cof_world_rank(const cof_world *w)
{
    return w->rank;
}

int cof_world_size(const cof_world *w)
{
    return w->n_ranks;
}

const char *cof_world_engine(const cof_world *w)
{
    return w->ops->name;
}

int cof_world_device(const cof_world *w)
{
    return w->ops->device ? w->ops->device->number(w) : -1;
}

cof_team *cof_world_team(cof_world *w)
{
    return w->team;
}

/* ---- liveness ------------------------------------------------------------------------------- */

/* Under the world's lock. */
static void end_teams_of(cof_world *w, int dead_rank)
{
    char text[120];
    snprintf(text, sizeof text, "rank %d (process %d) died; seen by rank %d", dead_rank,
             w->hello[dead_rank].pid, w->rank);
    for (cof_team *t = w->teams; t; t = t->next)
        for (int i = 0; i < t->n_ranks; i++)
            if (t->world_rank[i] == dead_rank)
                cofi_team_abort(t, COF_ERR_PEER_DEAD, dead_rank, text);
}

void cofi_world_poll(cof_world *w)
{
    for (int r = 0; r < w->n_ranks; r++) {
        if (w->socket[r] < 0 || atomic_load(&w->state[r]) != COFI_PEER_ALIVE ||
            !cofi_link_hung_up(w->socket[r]))
            continue;
        bool left = cofi_link_said_bye(w->socket[r]);
        pthread_mutex_lock(&w->lock);
        if (atomic_load(&w->state[r]) == COFI_PEER_ALIVE) {
            if (!left)
                end_teams_of(w, r);
            atomic_store(&w->state[r], left ? COFI_PEER_LEFT : COFI_PEER_DEAD);
        }
        pthread_mutex_unlock(&w->lock);
    }
}
