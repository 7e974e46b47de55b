/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Worlds and teams.
 *
 * A *world* is this process's (or this thread's) membership of a job: n_ranks ranks, numbered from
 * 0. A *team* is an ordered subset of a world's ranks; operators run on teams. "All ranks" in these
 * headers means all ranks of the team named in the call: such a call is collective, made once by
 * every rank, each from one thread, in the same order on all of them.
 *
 * Every collective call has a deadline (cof_world_options.init_timeout): a rank that is missing,
 * dead or in another call becomes an error on every rank that is there, naming it.
 * That error ends the team (cof_team_query tells); other teams of the same ranks go on, but for
 * those that hold a rank that died. An argument that breaks a rule ends no team.
 *
 * Threads. Collective calls of one world come from one thread at a time, not always the same one;
 * the caller orders them (a lock, a join). A stream and a plan are used by one thread at a time,
 * and so is COF_STREAM_NOW of one world. Any thread at any time, also while another one is in a
 * collective call or runs a plan: cof_team_query, the calls marked "any thread", cof_last_error
 * (whose text is the thread's own), and creating streams. Different worlds are independent: any
 * number of them, of any size, may be in one process, and each may have a thread in a collective
 * call. Destroying is for the last user: no other thread is in a call on the object, or makes one.
 *
 * fork. A child of a rank is no rank: it has no threads of Cofuse, and the sockets to the other
 * ranks are closed in it, so that it does not make a rank that dies seem alive. Every call there on
 * an object that was made before the fork (world, team, arena, stream, plan) returns
 * COF_ERR_INVALID; those without a status (rank, size, names) go on answering. Destroying the
 * child's copies is allowed, returns at once and concerns no other process; it is not required:
 * exec and exit do as well. CUDA cannot be used in a child at all. Symmetric memory of the shm
 * engine is not mapped in the child: a pointer of cof_arena_view that was taken before faults
 * there. That of the thread engine is a copy, as all of the process's own memory, and stays until
 * the child calls exec or exits; what is attached is as the caller mapped it. A child may make
 * worlds of its own. All this is done by a handler of fork(), in place from the first world of the
 * process on: no other thread forks while that one is made. Children of vfork, posix_spawn and
 * clone must call exec, which closes everything.
 */
#ifndef COFUSE_WORLD_H
#define COFUSE_WORLD_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cof_world cof_world;
typedef struct cof_team cof_team;

/** How ranks share memory. */
typedef enum cof_engine {
    COF_ENGINE_DEFAULT = 0, /* the variable COFUSE_ENGINE, else shm */
    COF_ENGINE_THREAD = 1,  /* ranks are threads of one process; memory from its heap */
    COF_ENGINE_SHM = 2,     /* ranks are processes of one host; memfd passed over sockets */
    COF_ENGINE_CUDA = 3     /* ranks work on CUDA devices of one host: threads or processes, one or
                               several to a device; device memory mapped between them */
} cof_engine;

/**
 * Options of cof_world_create. Zero means default everywhere.
 *
 * With n_ranks = 0 rank, size and job come from the environment: the variables of `cofuse launch`
 * and `cofuse run`, of torchrun, Open MPI, PMI (MPICH, srun) or Slurm, the first that is there; a
 * world of one without any. The n-th world that a process makes so meets the n-th of the others; a
 * call that fails by an option or a variable of its own is not counted.
 *
 * With n_ranks >= 1 they are explicit: `rank` is this rank and `job` a text that is the same on all
 * ranks of this world and that no other world of the same user on this host uses at the same time.
 *
 * With n_ranks >= 2 and `allgather`, a function of the caller's takes the place of `job`: each
 * rank's cof_world_create calls it exactly once, on the calling thread, to gather `bytes` bytes (64
 * today) of every rank into `dst`, in rank order; it returns 0, or a value that ends the call with
 * COF_ERR_SYSTEM. An MPI_Allgather, or the all-gather of any other runtime. While the callback
 * waits, no deadline of ours can act: so a rank that has failed already, by an option or a variable
 * that breaks its rule, calls it as well, and the others return COF_ERR_MISMATCH. It is not called
 * where `size` is none or n_ranks is not 2 .. 32767.
 *
 * In every form all ranks are on one host, in one network namespace.
 */
typedef struct cof_world_options {
    size_t size;         /* sizeof(cof_world_options) */
    int n_ranks;         /* 0: from the environment */
    int rank;            /* 0 .. n_ranks-1 */
    const char *job;     /* required with n_ranks >= 2, unless there is a callback */
    cof_engine engine;   /* the same on all ranks */
    int n_threads;       /* threads per CPU stream; 0: COFUSE_THREADS, else cores / ranks */
    double init_timeout; /* seconds for every collective; 0: COFUSE_INIT_TIMEOUT, else 120 */
    double run_timeout;  /* seconds for every wait in a run; 0: COFUSE_TIMEOUT, else 600;
                            negative: none */
    int (*allgather)(void *ctx, const void *src, void *dst, size_t bytes); /* NULL: `job` */
    void *allgather_ctx; /* handed to it */
    const char *device;  /* engine cuda: number, as CUDA counts in this process, or UUID ("GPU-..",
                            "MIG-.."); NULL: COFUSE_DEVICE, else the device whose context is current
                            on this thread, else rank modulo the number of devices */
    int max_ctas;        /* engine cuda: blocks that one kernel may use at most; 0: COFUSE_MAX_CTAS,
                            else what the device runs at once, shared among its ranks */
} cof_world_options;
#ifdef __cplusplus
#define COF_WORLD_OPTIONS_INIT {sizeof(cof_world_options)}
#else
#define COF_WORLD_OPTIONS_INIT {.size = sizeof(cof_world_options)}
#endif

/**
 * Joins the world. Collective over all ranks of the job; options = NULL is all defaults.
 *
 * On success *world_out owns sockets to the other ranks, one CPU stream and its threads. On failure
 * *world_out is NULL and nothing is left.
 *
 * On a world of CUDA devices it owns a CUDA stream, a page of host memory and, with other ranks, a
 * thread that looks at the sockets; no CPU stream. The device's primary context is made and stays,
 * and so does another stream, one in the process for each device. The calling thread's current
 * device is left as it was, here and in every call. The ranks prove with real bytes that each
 * reaches the memory of all others.
 *
 * COF_ERR_INVALID      an option or a launcher's variable breaks its rule (named in the text), or a
 *                      process that is no rank of the job has its address
 * COF_ERR_UNSUPPORTED  ranks are on several hosts, or in several network namespaces; engine cuda:
 *                      the library was built without it, there is no driver or no device that it
 *                      can use, or the ranks' devices do not reach each other (they are named)
 * COF_ERR_MISMATCH     ranks disagree in size, engine or library version, or two have one rank
 * COF_ERR_TIMEOUT      ranks did not arrive in time (the text names them)
 * COF_ERR_PEER_DEAD    a rank went away while joining
 * COF_ERR_NOMEM
 * COF_ERR_SYSTEM       also: the caller's all-gather returned an error
 */
COF_API cof_status cof_world_create(const cof_world_options *options, cof_world **world_out);

/**
 * Leaves the world: local, never waits for other ranks. The caller has synchronised its own streams
 * and destroyed its plans, arenas and streams of this world. Teams made from it may be destroyed
 * later: they keep the memory that they need, and calls on them return COF_ERR_INVALID. NULL is
 * allowed.
 */
COF_API void cof_world_destroy(cof_world *world);

/** This rank, 0 .. size-1. Local, any thread. */
COF_API int cof_world_rank(const cof_world *world);
/** Number of ranks. Local, any thread. */
COF_API int cof_world_size(const cof_world *world);

/** The engine's name: "thread", "shm" or "cuda". Local, any thread. */
COF_API const char *cof_world_engine(const cof_world *world);

/**
 * The CUDA device that this rank works on, as CUDA numbers it in this process: streams and memory
 * for the world's calls are made there (cudaSetDevice). -1 on an engine of the CPU. Local, any
 * thread.
 */
COF_API int cof_world_device(const cof_world *world);

/** The team of all ranks, in order; owned by the world, not to be destroyed. Any thread. */
COF_API cof_team *cof_world_team(cof_world *world);

/**
 * Makes a team of `n` world ranks: ranks[i] becomes rank i of the team. Collective over the members
 * only; other ranks do not call. `tag` is any number that is the same on all members, and another
 * one for each team of the same list that lives at the same time: members that mix two such teams
 * up are told so by their tags alone. One exchange, no device memory. A world of CUDA devices has
 * at most 512 teams at a time (COF_ERR_NOMEM).
 *
 * A member whose own list breaks a rule, or who finds no memory, returns before it meets the
 * others: they wait for it until the deadline (COF_ERR_TIMEOUT). Members that name the same ranks
 * in another order, or another tag, are told at once.
 *
 * COF_ERR_INVALID   n < 1, a rank out of range or named twice, or the caller is not a member
 * COF_ERR_MISMATCH  members passed different lists or tags
 * COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_NOMEM
 */
COF_API cof_status cof_team_create(cof_world *world, const int *ranks, int n, uint64_t tag,
                                   cof_team **team_out);

/**
 * Splits a team into groups of `inner` consecutive ranks. *inner_out is the team of this rank's
 * group, in order:            inner rank = rank % inner, inner ranks;
 * *outer_out that of the ranks with the same place in their groups, in order of the groups:
 *                             outer rank = rank / inner, size / inner ranks.
 *
 * Collective over all ranks of `team`, which is left as it is; teams may be split again, any number
 * of times. One exchange, no device memory. All ranks return the same status; on failure both are
 * NULL and nothing is left. Both are destroyed by the caller, before or after `team`.
 *
 * COF_ERR_INVALID   inner < 1 or it does not divide the size
 * COF_ERR_MISMATCH  ranks passed different values (the text has both), or are in another call
 * COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_NOMEM
 */
COF_API cof_status cof_team_split(cof_team *team, int inner, cof_team **inner_out,
                                  cof_team **outer_out);

/**
 * Lets go of a team: local, never blocks. Its plans and arenas must be destroyed before. Not for
 * the team of cof_world_team. NULL is allowed.
 */
COF_API void cof_team_destroy(cof_team *team);

/** This rank within the team, 0 .. size-1. Local, any thread. */
COF_API int cof_team_rank(const cof_team *team);
/** Number of ranks of the team. Local, any thread. */
COF_API int cof_team_size(const cof_team *team);

/**
 * COF_OK while the team can be used, else the first error found (of the team, of a rank that has
 * left, or of an arena of one of its plans), with its text in cof_last_error(). Local, any thread;
 * looks at the sockets of the team's ranks, waits for nothing, never touches a stream.
 */
COF_API cof_status cof_team_query(cof_team *team);

/**
 * Waits until all ranks of the team have called it. Collective, host only: orders nothing on
 * streams. COF_ERR_TIMEOUT, COF_ERR_PEER_DEAD, COF_ERR_MISMATCH (a rank is in another collective).
 */
COF_API cof_status cof_team_barrier(cof_team *team);

/**
 * Gathers `bytes` bytes (<= 1 MiB, the same on all ranks) of every rank: dst holds
 * cof_team_size(team) * bytes, in rank order. Collective, host only.
 */
COF_API cof_status cof_team_allgather(cof_team *team, const void *src, void *dst, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
