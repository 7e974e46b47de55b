/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops/trimul/trimul_check_weights.h"

#include <stddef.h>
#include <string.h>

#define PLACES(member)                                                                             \
    offsetof(cof_trimul_weights, member), offsetof(cof_trimul_grads, member),                      \
        offsetof(struct cofi_trimul_ref_weights, member),                                          \
        offsetof(struct cofi_trimul_ref_grads, member)

const struct cofi_tm_weight_info cofi_tm_weights[COFI_TRI_WEIGHTS] = {
    [COFI_TRI_NORM_IN_W] = {"norm_in.weight", false, 'D', 0, PLACES(norm_in_w)},
    [COFI_TRI_NORM_IN_B] = {"norm_in.bias", false, 'D', 0, PLACES(norm_in_b)},
    [COFI_TRI_P_IN] = {"p_in.weight", true, '2', 'D', PLACES(p_in)},
    [COFI_TRI_P_IN_B] = {"p_in.bias", false, '2', 0, PLACES(p_in_b)},
    [COFI_TRI_G_IN] = {"g_in.weight", true, '2', 'D', PLACES(g_in)},
    [COFI_TRI_G_IN_B] = {"g_in.bias", false, '2', 0, PLACES(g_in_b)},
    [COFI_TRI_NORM_OUT_W] = {"norm_out.weight", false, 'H', 0, PLACES(norm_out_w)},
    [COFI_TRI_NORM_OUT_B] = {"norm_out.bias", false, 'H', 0, PLACES(norm_out_b)},
    [COFI_TRI_P_OUT] = {"p_out.weight", true, 'D', 'H', PLACES(p_out)},
    [COFI_TRI_P_OUT_B] = {"p_out.bias", false, 'D', 0, PLACES(p_out_b)},
    [COFI_TRI_G_OUT] = {"g_out.weight", true, 'D', 'D', PLACES(g_out)},
    [COFI_TRI_G_OUT_B] = {"g_out.bias", false, 'D', 0, PLACES(g_out_b)},
};

static int64_t size_of(char letter, int64_t dim, int64_t hidden)
{
    return letter == 'D' ? dim : letter == 'H' ? hidden : 2 * hidden;
}

int cofi_tm_weight_shape(int which, int64_t dim, int64_t hidden, int64_t shape_out[2])
{
    const struct cofi_tm_weight_info *info = &cofi_tm_weights[which];
    shape_out[0] = size_of(info->n_out, dim, hidden);
    shape_out[1] = info->n_in ? size_of(info->n_in, dim, hidden) : 1;
    return info->n_in ? 2 : 1;
}

int64_t cofi_tm_weight_elements(int which, int64_t dim, int64_t hidden)
{
    int64_t shape[2];
    cofi_tm_weight_shape(which, dim, hidden, shape);
    return shape[0] * shape[1];
}

static void set_pointer(void *base, size_t place, const void *value)
{
    memcpy((char *)base + place, &value, sizeof value);
}

void cofi_tm_weights_bind(cof_trimul_weights *weights, int which, const cof_tensor *tensor)
{
    set_pointer(weights, cofi_tm_weights[which].in_weights, tensor);
}

void cofi_tm_grads_bind(cof_trimul_grads *grads, int which, const cof_tensor *tensor)
{
    set_pointer(grads, cofi_tm_weights[which].in_grads, tensor);
}

void cofi_tm_ref_bind(struct cofi_trimul_ref_weights *weights, int which, const double *data)
{
    set_pointer(weights, cofi_tm_weights[which].in_ref, data);
}

void cofi_tm_ref_grads_bind(struct cofi_trimul_ref_grads *grads, int which, double *data)
{
    set_pointer(grads, cofi_tm_weights[which].in_ref_grads, data);
}
