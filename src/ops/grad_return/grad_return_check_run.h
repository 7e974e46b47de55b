/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* One case on one rank, and the tensors of its calls. */
#ifndef COFI_GRAD_RETURN_CHECK_RUN_H
#define COFI_GRAD_RETURN_CHECK_RUN_H

#include "ops/check_memory.h"
#include "ops/grad_return/grad_return_cases.h"

enum { COFI_GR_MAX_CALLS = 3, COFI_GR_MAX_PLANS = 2 };

/* Of a call: [rows, B, H, D], with gaps when padded. */
struct cofi_gr_check_tensor {
    struct cofi_check_memory memory; /* where the rank works */
    cof_tensor view;
    int64_t shape[4], strides[4];
    uint64_t hash;
};

struct cofi_gr_check_section {
    struct cofi_gr_check_tensor in[2]; /* dk, dv */
};

struct cofi_gr_check_call {
    struct cofi_gr_check_section *section; /* by_section: P of them; else one */
    struct cofi_gr_check_tensor out[2];
    uint64_t *table;
    uint64_t kept[2]; /* hashes of the outputs of the first round */
};

struct cofi_gr_check {
    struct cofi_job *job;
    struct cofi_gr_case c;
    const struct cofi_check_device *device; /* NULL: the CPU */
    uint64_t seed, n_delays;
    cof_layout layout;
    int64_t dim[2], local_rows;
    int n_sections, n_plans;
    cof_dtype partial;
    struct cofi_check_arena arena;
    cof_grad_return_params params[COFI_GR_MAX_PLANS];
    cof_plan *plan[COFI_GR_MAX_PLANS];
    cof_stream stream;
    void *graph; /* of all calls of a round */
    uint32_t epoch;
    struct cofi_gr_check_call call[COFI_GR_MAX_CALLS];
    /* The caller's memory. */
    void **peers; /* dk, dv, ready, by rank */
    cof_grad_return_peers peers_struct;
    struct cofi_check_blocks blocks; /* on devices */
};

/* ---- grad_return_check_data.c ---- */

cof_status cofi_gr_check_make_call(struct cofi_gr_check *run, int call);
void cofi_gr_check_free_calls(struct cofi_gr_check *run);
cof_status cofi_gr_check_poison(struct cofi_gr_check *run);
/* Every element of the first round; later ones have its bits. */
cof_status cofi_gr_check_inspect(struct cofi_gr_check *run, int call, int round,
                                 struct cofi_check_result *result);

#endif
