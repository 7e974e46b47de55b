/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What a block of allreduce_rmsnorm takes of a device (allreduce_rmsnorm_block.cuh): every float
 * that * its kernels touch lies within, and longer rows than a device has memory for are told
 * apart. */
#include "device_model.h"

#include "ops/allreduce_rmsnorm/allreduce_rmsnorm_block.cuh"

enum { SEGMENT = 256, VECTOR = 8 };

/* Floats that slots of a row are unpacked to, as cofk_keep_slot does. */
template <class Code> static int64_t unpacked(int64_t hidden, int64_t elem_bytes)
{
    const int64_t per_word = 4 / elem_bytes;
    int64_t end = 0;
    for (uint32_t slot = 0; slot < Code::n_slots(uint64_t(hidden * elem_bytes)); slot++) {
        const int64_t last = (Code::offset(slot) / 4 + Code::n_words(slot)) * per_word;
        end = last > end ? last : end;
    }
    return end;
}

/* x in the data type, sums in it or in fp32; segments, which cofk_finish_row keeps whole. */
template <class Code> static void fits(int64_t hidden, int64_t elem_bytes)
{
    const struct cofi_arn_block b = cofk_block_of<Code>(hidden, elem_bytes);
    const int64_t row = int64_t(b.shared_bytes / sizeof(float)) - b.n_threads * VECTOR;
    const int64_t x = unpacked<Code>(hidden, elem_bytes), sums = unpacked<Code>(hidden, 4);
    const int64_t segments = (hidden + SEGMENT - 1) / SEGMENT * SEGMENT;
    CHECK(b.n_threads % 32 == 0 && b.n_threads >= 32 && b.n_threads <= COFI_ARN_CUDA_THREADS,
          "H = %lld: %d threads", (long long)hidden, b.n_threads);
    CHECK(row >= x && row >= sums && row >= segments && (row == x || row == segments),
          "H = %lld, %lld bytes: %lld floats, for %lld of x, %lld of sums, %lld of segments",
          (long long)hidden, (long long)elem_bytes, (long long)row, (long long)x, (long long)sums,
          (long long)segments);
}

template <class Code> static void limit(int64_t elem_bytes, size_t kib, int64_t wanted)
{
    const size_t bytes = kib << 10;
    const int64_t most = cofk_most_hidden<Code>(elem_bytes, bytes);
    CHECK(most == wanted, "%zu KiB, %lld bytes: H up to %lld, wanted %lld", kib,
          (long long)elem_bytes, (long long)most, (long long)wanted);
}

int main()
{
    for (int64_t hidden = 1; hidden <= COFI_ARN_CUDA_MAX_HIDDEN; hidden += hidden < 2000 ? 1 : 61) {
        for (int64_t elem_bytes = 2; elem_bytes <= 4; elem_bytes += 2) {
            fits<cofd_lines>(hidden, elem_bytes);
            fits<cofd_wides>(hidden, elem_bytes);
        }
    }
    /* sm_86 and sm_89, sm_80, sm_90 */
    static const struct {
        size_t kib;
        int64_t lines[2], wides[2];
    } devices[] = {{99, {20460, 20460}, {20448, 20472}},
                   {163, {32768, 32768}, {32768, 32768}},
                   {227, {32768, 32768}, {32768, 32768}}};
    for (const auto &d : devices)
        for (int is_f32 = 0; is_f32 < 2; is_f32++) {
            limit<cofd_lines>(2 + 2 * is_f32, d.kib, d.lines[is_f32]);
            limit<cofd_wides>(2 + 2 * is_f32, d.kib, d.wides[is_f32]);
        }
    return test_done();
}
