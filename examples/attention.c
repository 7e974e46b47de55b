/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Causal attention over 1000 rows. With q = k = 0 each row of o is the mean of the rows of v up to
 * it, and v holds its row's number. Alone: build/examples/attention; as four ranks:
 * build/cofuse launch -n 4 -- build/examples/attention */
#include <cofuse/cofuse.h>
#include <stdio.h>

#define TRY(call)                                                                                  \
    if ((call) != COF_OK)                                                                          \
    return fprintf(stderr, "%s\n", cof_last_error()), 1

enum { S = 1000, H = 4, D = 64 };
static float zeros[S * H * D], v_data[S * H * D], o_data[S * H * D], lse_data[S * H];

int main(void)
{
    cof_world *world;
    cof_plan *plan;
    cof_attention_params params = {.size = sizeof params, .dtype = COF_F32, .n_batch = 1,
        .n_rows = S, .n_heads = H, .head_dim_qk = D, .mask = COF_MASK_CAUSAL};
    TRY(cof_world_create(NULL, &world)); /* a world of one, or the launcher's ranks */
    TRY(cof_attention_plan_create(cof_world_team(world), &params, NULL, &plan));

    int rank = cof_world_rank(world); /* it has the chunks rank and 2P-1-rank of 2P */
    cof_layout layout = {.n_ranks = cof_world_size(world), .n_rows = S};
    int64_t n = cof_layout_local_rows(&layout, rank);
    for (int64_t i = 0; i < n * H * D; i++)
        v_data[i] = (float)cof_layout_global_row(&layout, rank, i / (H * D));

    cof_shape dims = {{1, n, H, D}}, lse_dims = {{1, H, n}};
    cof_device cpu = {COF_DEVICE_CPU, 0};
    cof_tensor zero = cof_tensor_make(zeros, cpu, COF_F32, 4, &dims);
    cof_tensor v = cof_tensor_make(v_data, cpu, COF_F32, 4, &dims);
    cof_tensor o = cof_tensor_make(o_data, cpu, COF_F32, 4, &dims);
    cof_tensor lse = cof_tensor_make(lse_data, cpu, COF_F32, 3, &lse_dims);
    cof_attention_args args = {.size = sizeof args, .q = &zero, .k = &zero, .v = &v, .o = &o,
        .lse = &lse};
    TRY(cof_attention_forward(plan, &args, COF_STREAM_NOW));

    printf("rank %d of %d: o of row %d is %.1f\n", rank, layout.n_ranks,
           (int)cof_layout_global_row(&layout, rank, n - 1), o_data[(n - 1) * H * D]);
    cof_plan_destroy(plan);
    cof_world_destroy(world);
}
