/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Worlds and teams from the inside. */
#ifndef COFI_SYMM_H
#define COFI_SYMM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "backend/cpu/cpu_stream.h"
#include "core/error.h"
#include "core/process.h"
#include "cofuse/world.h"
#include "symm/links.h"

struct cofi_engine_ops;

#define COFI_JOB_BYTES 80 /* of a world's name, its end included */

/* What ranks tell each other when they join: compared, or reduced to the common set. */
struct cofi_hello {
    uint64_t magic, token; /* token: that it knows the job, not only the address */
    uint32_t version, engine;
    int32_t rank, n_ranks;
    int32_t pid, isa;
    char gemm[32];
};

/* A collective call of a team. */
struct cofi_call_id {
    uint64_t team, call;
};

/* What a rank remembers of the exchanges with another one (messages.h). */
struct cofi_stale {
    struct cofi_call_id *answered; /* by an error, before its request came, which is skipped then */
    int n_answered;
    uint64_t n_sent;            /* requests to it so far: numbers them from 1 */
    uint64_t open;              /* its request that was read and has no reply yet; 0: none */
    uint64_t last;              /* its last request that has one */
    size_t owed;                /* bytes of a message that stopped when it was of no use any more */
    bool is_cut_in, is_cut_out; /* a deadline passed within a message from it, to it */
};

/* A rank's part of an agreement. */
struct cofi_vote {
    int32_t status;
    char text[COFI_ERROR_TEXT_BYTES];
};

struct cof_world {
    int rank, n_ranks;
    cof_engine engine;
    const struct cofi_engine_ops *ops;
    double init_timeout, run_timeout; /* seconds; <= 0: none */
    int n_threads;
    bool own_cores; /* ranks x threads <= cores: threads may spin, and be pinned */
    char job[COFI_JOB_BYTES];
    int *socket;               /* by rank; -1 for this one */
    struct cofi_hello *hello;  /* by rank */
    _Atomic int *state;        /* by rank: enum cofi_peer_state */
    struct cofi_stale *stale;  /* by rank; of the thread that is in a collective call */
    atomic_flag now_in_use;    /* by the thread that is in a COF_STREAM_NOW call */
    struct cofi_cpu_stream *stream; /* serves COF_STREAM_NOW; NULL where ranks work on devices */
    struct cofi_cuda_world *device; /* engine_cuda's; NULL: the CPU's */
    bool is_made;                   /* its peers are past the bootstrap */
    cof_team *team;
    /* Guards the lists of teams and of their arenas, and what is found at a socket that hung up; a
     * running plan takes it only when a rank has gone. Held across fork, so never while waiting. */
    pthread_mutex_t lock;
    struct cof_team *teams;
    int n_holders;            /* the caller and each team; under the lock; the last one frees it */
    _Atomic bool is_destroyed; /* by the caller: teams may still hold it */
    struct cofi_process made_by;
    struct cof_world *next;   /* in the process's list (fork.c) */
    uint64_t *dead_teams; /* numbers of teams that lost a rank and were destroyed; under the lock */
    int n_dead_teams;
};

struct cof_team {
    cof_world *world;
    int rank, n_ranks;
    int *world_rank;
    int hub;           /* the member that exchanges go through: that of the lowest world rank */
    uint64_t id;       /* hash of members and tag */
    uint64_t n_calls;  /* collective calls so far, compared on every exchange */
    uint64_t n_plans;  /* plans made so far: numbers them alike on all members */
    void *table;       /* a struct cofi_vote by rank, for the collective call that is on */
    /* Abort word: what ended the team, status (16 bits) | world rank + 1 (from bit 32 on); 0 while
     * it lives. Every wait of the team's arenas reads it; a device's kernels too, so there it lies
     * in a page of the world. */
    _Atomic uint64_t *abort;
    _Atomic uint64_t own_abort;
    _Atomic int status;     /* what ended the team: cof_status; the text is written before it */
    char text[COFI_ERROR_TEXT_BYTES];
    struct cof_arena *arenas; /* alive; under the world's lock */
    struct cof_team *next;    /* in the world's list */
};

enum cofi_peer_state { COFI_PEER_ALIVE, COFI_PEER_LEFT, COFI_PEER_DEAD };

/* bootstrap.c: sockets to rank 0, from inherited descriptors or an abstract name. Fills
 * world->socket and world->hello[] (own entry given). */
cof_status cofi_bootstrap(cof_world *world, int64_t deadline);

/* world.c */
/* Looks at the peers' sockets; a dead one ends every team that holds it. */
void cofi_world_poll(cof_world *world);
/* COF_ERR_INVALID in a child of the process that made it, and once it is destroyed. */
cof_status cofi_world_usable(const cof_world *world);
void cofi_world_release(cof_world *world); /* one holder less */

/* team.c */
cof_status cofi_team_make(cof_world *world, const int *ranks, int n, uint64_t tag,
                          cof_team **team_out);
/* Where ranks work on devices: moves the abort word of a new team to where kernels see it. */
cof_status cofi_team_take_abort_word(cof_team *team);
/* Ends the team on this rank. First call wins. */
void cofi_team_abort(cof_team *team, cof_status status, int world_rank, const char *text);
/* COF_OK while calls on the team are possible, else the error with its text. */
cof_status cofi_team_status(cof_team *team);

/* exchange.c */
/* allgather for internal use; `what` names the call in errors (at most 15 bytes). */
cof_status cofi_team_exchange(cof_team *team, const char *what, const void *src, void *dst,
                              size_t bytes);
/* The status of the first rank whose own is an error, the same on all ranks: all succeed or all
 * fail. On failure the text names that rank and has its text. `what` as above. */
cof_status cofi_team_agree(cof_team *team, const char *what, cof_status own);
/* Rank 0's descriptor to all members (each owns what it gets; rank 0 keeps its own). An exchange
 * follows it on every rank that succeeded, where it also learns of a rank 0 that did not. */
cof_status cofi_team_bcast_fd(cof_team *team, int fd, int *fd_out);
/* Rank 0's pointer to all members: ranks that are threads of one process. */
cof_status cofi_team_bcast_pointer(cof_team *team, void *pointer, void **pointer_out);
#endif
