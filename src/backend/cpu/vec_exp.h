/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* exp and the sum of lanes, for files that set W and INLINE as for vec_lanes.h. */
#ifndef COFI_VEC_EXP_H
#define COFI_VEC_EXP_H

#include "backend/cpu/vec_lanes.h"

#define N_EXP 4 /* vectors of one exp_block; even */
#define EACH for (int u = 0; u < N_EXP; u++)

/* Pairs of halves: lane j meets lane j + W/2, and so on. What comes to lanes past 0 is not used. */
#define ROTATED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)

INLINE float sum_lanes(vf x)
{
#if W == 16
    x += ROTATED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += ROTATED(x, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3);
    x += ROTATED(x, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1);
    x += ROTATED(x, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0);
#elif W == 8
    x += ROTATED(x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += ROTATED(x, 2, 3, 4, 5, 6, 7, 0, 1);
    x += ROTATED(x, 1, 2, 3, 4, 5, 6, 7, 0);
#else
    x += ROTATED(x, 2, 3, 0, 1);
    x += ROTATED(x, 1, 2, 3, 0);
#endif
    return x[0];
}

/* x[u] = exp(x[u]) for N_EXP vectors, step by step over all of them: one exp is a chain of some 50
 * cycles, and a processor looks ahead over few such chains.
 *
 * exp(x) = 2^k e^r with k = round(x / ln 2) and |r| <= ln 2 / 2. ln 2 is subtracted in two parts,
 * the first of 9 bits so that k times it is exact. e^r = 1 + r + r^2 q(r), q minimax of degree 4:
 * relative error below 2^-28. 2^k is applied as 2^floor(k/2) 2^ceil(k/2): k runs from -150 to
 * 128, beyond one fp32 factor. Only the last product rounds when the result is subnormal.
 *
 * Adding `magic` leaves k + 254 in the low 9 bits of the sum: halved, it is an exponent with its
 * bias of 127, and the shift by 23 drops the rest. Past the clamps the result is 0 or inf by
 * itself: e^-104 < 2^-150, e^89 > 2^128. NaN fails every comparison and stays NaN in products. */
INLINE void exp_block(vf x[N_EXP])
{
    const float magic = 12582912.0f + 254.0f; /* 1.5 * 2^23 + 254 */
    vf whole[N_EXP], square[N_EXP], e[N_EXP];
    vu bits[N_EXP], half[N_EXP];
    EACH x[u] = blend((vi)(x[u] < -104.0f), splat(-104.0f), x[u]);
    EACH x[u] = blend((vi)(x[u] > 89.0f), splat(89.0f), x[u]);
    EACH whole[u] = x[u] * 1.44269504f + magic;
    EACH bits[u] = (vu)whole[u];
    EACH whole[u] -= magic;
    EACH x[u] -= whole[u] * 0.693359375f;
    EACH x[u] -= whole[u] * -2.12194440e-4f;
    EACH square[u] = x[u] * x[u];
    EACH e[u] = x[u] * 8.368745446e-3f + 4.166838899e-2f;
    EACH e[u] = square[u] * 1.381454058e-3f + e[u];
    EACH e[u] = e[u] * square[u] + (x[u] * 1.666652113e-1f + 4.999999404e-1f);
    EACH e[u] = e[u] * square[u] + (x[u] + 1.0f);
    EACH half[u] = bits[u] >> 1;
    EACH e[u] *= (vf)(half[u] << 23);
    EACH x[u] = e[u] * (vf)((bits[u] - half[u]) << 23);
}

INLINE vf exp_one(vf x)
{
    vf block[N_EXP];
    for (int u = 0; u < N_EXP; u++)
        block[u] = x;
    exp_block(block);
    return block[0];
}

#endif
