/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Compiled without contraction: every operation of the first half is one of fp32, rounded. */
#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_ref.h"

#include <math.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/check.h"
#include "ops/check_elem.h"

enum { SEGMENT = 256 };

static float load(const void *row, cof_dtype dtype, int64_t h)
{
    return cofi_check_elem_load(row, cofi_elem_of(dtype), h);
}

static float weight_at(const struct cofi_arn_ref *ref, int64_t h)
{
    const cof_allreduce_rmsnorm_params *p = ref->params;
    cof_dtype dtype = p->weight_dtype.bits ? p->weight_dtype : p->dtype;
    float weight = load(ref->weight, dtype, h);
    return p->weight_bias ? weight + 1.0f : weight;
}

static bool norms(const struct cofi_arn_ref *ref)
{
    return ref->params->variant != COF_ALLREDUCE_ONLY;
}

/* ---- the bits ------------------------------------------------------------------------------- */

/* A NaN has all bits but the sign's. */
static void store(void *row, cof_dtype dtype, int64_t h, float value)
{
    if (!isnan(value))
        cofi_check_store(row, dtype, h, value);
    else if (dtype.bits == 32)
        ((uint32_t *)row)[h] = 0x7fffffff;
    else
        ((uint16_t *)row)[h] = 0x7fff;
}

static float rounded(float value, cof_dtype dtype)
{
    return cofi_check_elem_round(value, cofi_elem_of(dtype));
}

/* reduced = x_0 + x_1 + ... + x_{P-1} */
static float reduce(const struct cofi_arn_ref *ref, int64_t h)
{
    float reduced = load(ref->x[0], ref->params->dtype, h);
    for (int r = 1; r < ref->n_ranks; r++)
        reduced = reduced + load(ref->x[r], ref->params->dtype, h);
    return reduced;
}

/* MATCH_UNFUSED  z = round(round(reduced) + residual)
 * EXACT          z = reduced + residual */
static float z_at(const struct cofi_arn_ref *ref, int64_t h)
{
    cof_dtype dtype = ref->params->dtype;
    bool rounds = ref->params->rounding == COF_ALLREDUCE_MATCH_UNFUSED;
    float z = reduce(ref, h);
    z = rounds ? rounded(z, dtype) : z;
    if (ref->params->variant != COF_ALLREDUCE_RESIDUAL_NORM)
        return z;
    z = z + load(ref->residual, dtype, h);
    return rounds ? rounded(z, dtype) : z;
}

/* (e0 + e1) + (e2 + e3) + ...: halves of halves. n is a power of 2. */
static float tree(const float *e, int n)
{
    return n == 1 ? e[0] : tree(e, n / 2) + tree(e + n / 2, n / 2);
}

/* The sum of z^2 over the elements of one segment that the row has; the others are 0. */
static float segment_sum(const struct cofi_arn_ref *ref, int64_t first)
{
    float square[SEGMENT] = {0};
    for (int i = 0; i < SEGMENT && first + i < ref->params->hidden; i++) {
        float z = z_at(ref, first + i);
        square[i] = z * z;
    }
    return tree(square, SEGMENT);
}

static float sum_of_squares(const struct cofi_arn_ref *ref)
{
    float sum = segment_sum(ref, 0);
    for (int64_t first = SEGMENT; first < ref->params->hidden; first += SEGMENT)
        sum = sum + segment_sum(ref, first);
    return sum;
}

/* residual_out = round(z)
 * norm_out     = round((z * inv) * (weight + weight_bias)),  inv = 1 / sqrt(sum z^2 / H + eps) */
void cofi_arn_ref_bits(const struct cofi_arn_ref *ref, void *residual_out, void *norm_out)
{
    const cof_allreduce_rmsnorm_params *p = ref->params;
    for (int64_t h = 0; residual_out && h < p->hidden; h++)
        store(residual_out, p->dtype, h, z_at(ref, h));
    if (!norm_out || !norms(ref))
        return;
    float mean = sum_of_squares(ref) / (float)p->hidden;
    float inv = 1.0f / sqrtf(mean + p->eps);
    for (int64_t h = 0; h < p->hidden; h++) {
        float scaled = z_at(ref, h) * inv;
        store(norm_out, p->dtype, h, scaled * weight_at(ref, h));
    }
}

/* ---- the values ----------------------------------------------------------------------------- */

/* Half a unit in the last place of fp32, of a value of size 1: what one operation may add. */
#define UNIT32 0x1p-24

/* A value and how far it may be off. */
struct near {
    double value, slack;
};

/* Rounded to the type, and what the slack can make of it. */
static struct near round_near(struct near x, cof_dtype dtype)
{
    double value = rounded((float)x.value, dtype);
    double above = rounded((float)(x.value + x.slack), dtype) - value;
    double below = value - rounded((float)(x.value - x.slack), dtype);
    return (struct near){value, fmax(above, below)};
}

static struct near reduce_near(const struct cofi_arn_ref *ref, int64_t h)
{
    double sum = 0, size = 0;
    for (int r = 0; r < ref->n_ranks; r++) {
        double x = load(ref->x[r], ref->params->dtype, h);
        sum += x;
        size += fabs(x);
    }
    return (struct near){sum, (ref->n_ranks - 1) * UNIT32 * size};
}

/* z before its last rounding. */
static struct near z_near(const struct cofi_arn_ref *ref, int64_t h)
{
    bool rounds = ref->params->rounding == COF_ALLREDUCE_MATCH_UNFUSED;
    struct near z = reduce_near(ref, h);
    if (ref->params->variant != COF_ALLREDUCE_RESIDUAL_NORM)
        return z;
    if (rounds)
        z = round_near(z, ref->params->dtype);
    z.value += load(ref->residual, ref->params->dtype, h);
    z.slack += UNIT32 * (fabs(z.value) + z.slack);
    return z;
}

/* sum z^2, and how far the slacks of z may move it. */
static struct near squares_near(const struct cofi_arn_ref *ref, const struct cofi_arn_exact *z)
{
    struct near sum = {0, 0};
    for (int64_t h = 0; h < ref->params->hidden; h++) {
        double value = z[h].norm_out, slack = z[h].norm_slack;
        sum.value += value * value;
        sum.slack += 2 * fabs(value) * slack + slack * slack;
    }
    return sum;
}

static const double largest_square = 1e37; /* sums of a row stay within fp32 */

static void norm_near(const struct cofi_arn_ref *ref, struct cofi_arn_exact *exact)
{
    const cof_allreduce_rmsnorm_params *p = ref->params;
    struct near sum = squares_near(ref, exact);
    double least = fmax(sum.value - sum.slack, 0) / (double)p->hidden + p->eps;
    double inv = 1 / sqrt(sum.value / (double)p->hidden + p->eps), inv_most = 1 / sqrt(least);
    for (int64_t h = 0; h < p->hidden; h++) {
        double z = exact[h].norm_out, slack = exact[h].norm_slack, weight = weight_at(ref, h);
        bool is_in_range = sum.value < largest_square; /* false for NaN */
        exact[h].norm_out = is_in_range ? z * inv * weight : NAN;
        exact[h].norm_slack = (fabs(z) * (inv_most - inv) + slack * inv_most) * fabs(weight);
    }
}

void cofi_arn_ref_exact(const struct cofi_arn_ref *ref, struct cofi_arn_exact *exact)
{
    const cof_allreduce_rmsnorm_params *p = ref->params;
    for (int64_t h = 0; h < p->hidden; h++) {
        struct near z = z_near(ref, h), used = z;
        if (p->rounding == COF_ALLREDUCE_MATCH_UNFUSED)
            used = round_near(z, p->dtype);
        exact[h] = (struct cofi_arn_exact){z.value, z.slack, used.value, used.slack};
    }
    if (norms(ref))
        norm_near(ref, exact);
    for (int64_t h = 0; !norms(ref) && h < p->hidden; h++)
        exact[h].norm_out = NAN;
}

static double ulp(double x, cof_dtype dtype)
{
    bool is_half = cofi_elem_of(dtype) == COFI_ELEM_F16;
    double normal = fmax(fabs(x), is_half ? 0x1p-14 : 0x1p-126);
    uint64_t bits;
    memcpy(&bits, &normal, sizeof bits);
    bits = (bits & UINT64_C(0x7ff0000000000000)) - ((is_half ? UINT64_C(10) : UINT64_C(7)) << 52);
    memcpy(&normal, &bits, sizeof normal); /* the power of 2 in it, so many places down */
    return normal;
}

bool cofi_arn_ref_is_near(double ours, double exact, double slack, cof_dtype dtype)
{
    double largest = cofi_elem_of(dtype) == COFI_ELEM_F16 ? 65504 : 0x1p127;
    double bound = slack + (dtype.bits == 32 ? 2e-6 * fabs(exact) + 0x1p-149 : ulp(exact, dtype));
    if (!isfinite(ours) || !isfinite(exact) || !isfinite(slack) || fabs(exact) + bound >= largest)
        return true;
    return fabs(ours - exact) <= bound;
}
