/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* allreduce_rmsnorm on CPUs: what its three files share. allreduce_rmsnorm_cpu.c has the calls and
 * their protocol, _cpu_plan.c sizes and memory, _cpu_rows.c what is done to the rows of a part. */
#ifndef COFI_ALLREDUCE_RMSNORM_CPU_H
#define COFI_ALLREDUCE_RMSNORM_CPU_H

#include <stdbool.h>

#include "backend/cpu/cpu_stream.h"
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm.h"

/* Everything that is laid out, here and nowhere else. */
struct cofi_arn_cpu_sizes {
    int64_t capacity;      /* rows of a part */
    enum cofi_elem sums;   /* type of what two shots exchange */
    int64_t sums_row_bytes;
    size_t half_bytes;     /* of the published rows */
    size_t sums_bytes;     /* of the rank that has the largest share */
    /* Local; 0: not needed. */
    size_t stage_x, stage_sums, wide_row;
};

struct cofi_arn_cpu_state {
    struct cofi_arn_cpu_sizes sizes;
    int64_t one_shot_bytes; /* calls with more take two shots */
    char *stage_x;          /* by peer, one half's bytes each */
    char *stage_sums;       /* of all shares, by row of the part */
    float *wide_row;        /* for rows that a worker's scratch does not hold: one at a time */
    _Alignas(COFI_LINE) char memory[];
};

struct cofi_arn_cpu_part {
    struct cofi_arn_plan *plan;
    struct cofi_arn_cpu_state *state;
    const struct cofi_arn_call *call;
    int64_t first, n; /* rows of the call */
    bool two_shots;
    int ready;     /* purpose */
    size_t half;   /* offsets in the arena's data */
    size_t sums;
    int64_t share; /* the own one's first row in the part */
    /* By rank: where its first row is read, its pitch; its share's first row of sums. */
    const char *x[COFI_ARN_MAX_RANKS], *sums_of[COFI_ARN_MAX_RANKS];
    int64_t x_pitch[COFI_ARN_MAX_RANKS];
    int64_t begin, end, per_task; /* rows of the section at work, and of one of its tasks */
};

/* The norm is taken of what is stored, in one of the outputs; else of fp32 that no output has. */
static inline bool cofi_arn_cpu_z_is_wide(const struct cofi_arn_plan *plan)
{
    return plan->elem != COFI_ELEM_F32 && plan->params.rounding == COF_ALLREDUCE_EXACT &&
           plan->params.variant != COF_ALLREDUCE_ONLY;
}

static inline int64_t cofi_arn_cpu_share_begin(int64_t n, int rank, int n_ranks)
{
    return n * rank / n_ranks;
}

/* payload_bytes, tagged_bytes, local_bytes. */
void cofi_arn_cpu_lay_out(struct cofi_arn_plan *plan);
void cofi_arn_cpu_describe(const struct cofi_arn_plan *plan, char *text, size_t bytes);
cof_status cofi_arn_cpu_open(struct cofi_arn_plan *plan);
void cofi_arn_cpu_close(struct cofi_arn_plan *plan);

/* The following run on a stream's dispatcher and return when the work is done. */

/* Copies x to where peers read it. */
void cofi_arn_cpu_publish(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p);
/* Where rows [begin, end) of a peer's x are read from now on. */
void cofi_arn_cpu_find_x(struct cofi_arn_cpu_part *p, int peer, int64_t begin, int64_t end);
/* Rows [begin, end), the own share, as the second hop sends them. */
void cofi_arn_cpu_reduce_share(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p,
                               int64_t begin, int64_t end);
/* Where the rows of an owner's share are read. */
void cofi_arn_cpu_find_sums(struct cofi_arn_cpu_part *p, int owner);
/* Both outputs, of all rows. */
void cofi_arn_cpu_finish(struct cofi_cpu_stream *s, struct cofi_arn_cpu_part *p);
/* What a call that failed leaves of an output. */
void cofi_arn_cpu_fill_nan(const struct cofi_arn_plan *plan, const struct cofi_arn_rows *rows,
                           int64_t n);

#endif
