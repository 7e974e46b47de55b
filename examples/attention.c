/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Causal attention over 1000 rows, each rank with its part of them. With q = k = 0 a row of o is
 * the mean of the rows of v up to it, and v holds its row's number: o of the last row is 499.5. */
#include <cofuse/cofuse.h>
#include <stdio.h>

enum { S = 1000, H = 4, D = 64 };
static float zeros[S * H * D], values[S * H * D], means[S * H * D], sums[S * H];

int main(void)
{
    cof_world *world;
    cof_plan *plan;
    cof_attention_params params = {.size = sizeof params, .dtype = COF_F32, .n_batch = 1,
        .n_rows = S, .n_heads = H, .head_dim_qk = D, .mask = COF_MASK_CAUSAL};
    if (cof_world_create(NULL, &world) != COF_OK || /* a world of one, or the launcher's ranks */
        cof_attention_plan_create(cof_world_team(world), &params, NULL, &plan) != COF_OK)
        return fprintf(stderr, "%s\n", cof_last_error()), 1;

    cof_layout layout = {.n_ranks = cof_world_size(world), .n_rows = S};
    int rank = cof_world_rank(world);
    int64_t n = cof_layout_local_rows(&layout, rank), last = n - 1;
    for (int64_t i = 0; i < n * H * D; i++)
        values[i] = (float)cof_layout_global_row(&layout, rank, i / (H * D));

    cof_device cpu = {COF_DEVICE_CPU, 0};
    cof_shape rows = {{1, n, H, D}}, row_sums = {{1, H, n}};
    cof_tensor q = cof_tensor_make(zeros, cpu, COF_F32, 4, &rows), v = q, o = q;
    cof_tensor lse = cof_tensor_make(sums, cpu, COF_F32, 3, &row_sums);
    v.data = values, o.data = means;
    cof_attention_args args = {.size = sizeof args, .q = &q, .k = &q, .v = &v, .o = &o,
        .lse = &lse};
    if (cof_attention_forward(plan, &args, COF_STREAM_NOW) != COF_OK)
        return fprintf(stderr, "%s\n", cof_last_error()), 1;
    printf("rank %d of %d: o of row %lld is %.1f\n", rank, layout.n_ranks,
           (long long)cof_layout_global_row(&layout, rank, last), means[last * H * D]);
    cof_plan_destroy(plan);
    cof_world_destroy(world);
}
