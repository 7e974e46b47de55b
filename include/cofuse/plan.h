/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Plans: an operator made ready once, run many times.
 *
 * Creating a plan is collective: it validates, compares the description over the ranks, chooses
 * kernels and allocates. Running it only enqueues: no allocation by Cofuse, no lock held over work,
 * no environment, no wait for the host (a CPU stream's full queue excepted). A plan may be used
 * from any thread, by one at a time.
 */
#ifndef COFUSE_PLAN_H
#define COFUSE_PLAN_H

#include "arena.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cof_plan cof_plan;

/** What a plan will hold, in bytes per rank; filled before anything is allocated. */
typedef struct cof_workspace_sizes {
    size_t size;      /* sizeof(cof_workspace_sizes), set by the caller */
    size_t local;     /* ordinary memory */
    size_t symmetric; /* symmetric memory, control words included */
    size_t saved;     /* buffer the caller keeps from forward to backward; 0 without save_kv */
    size_t words;     /* what of `symmetric` plans do not share: an arena for several of them has
                         the largest `symmetric` and the sum of `words` as its bytes */
} cof_workspace_sizes;
#ifdef __cplusplus
#define COF_WORKSPACE_SIZES_INIT {sizeof(cof_workspace_sizes)}
#else
#define COF_WORKSPACE_SIZES_INIT {.size = sizeof(cof_workspace_sizes)}
#endif

/**
 * One line of key=value words: operator, shapes, dtype, ranks, engine, schedule, kernels. Owned by
 * the plan, valid until it is destroyed.
 */
COF_API const char *cof_plan_describe(const cof_plan *plan);

/**
 * Frees the plan. Local, never waits for other ranks; the caller has synchronised the streams the
 * plan ran on. Symmetric memory lives until the last rank has let go of it. NULL is allowed.
 */
COF_API void cof_plan_destroy(cof_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
