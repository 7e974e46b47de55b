/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* fp32 products in plain C: blocks of A and B are packed into panels that a kernel reads in order.
 *
 *     A panel [k][TILE_M], B panel [k][tile_n], both zero-padded:  C tile += A panel^T B panel
 *
 * The kernel exists once per instruction set and is chosen by cofi_isa(), not by an ifunc: the cap
 * of COFUSE_CPU_ISA holds here too, and sanitizers dislike resolvers. An element of C is the sum
 * over k in order, in blocks of BLOCK_K, whatever M, N and the leading dimensions are. */
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/gemm_provider.h"
#include "backend/cpu/vec.h"

/* 6 rows of two vectors leave 4 of the 16 registers of SSE2 and AVX2 for A and B. A block of A is
 * 96 KiB, one of B 256 KiB: together they fit an L2 of 512 KiB. */
#define TILE_M 6
#define MAX_TILE_N 32
#define BLOCK_M (16 * TILE_M)
#define BLOCK_N 256
#define BLOCK_K 256

struct cofi_gemm_plain {
    float a_panels[BLOCK_M * BLOCK_K];
    float b_panels[BLOCK_N * BLOCK_K];
    float edge[TILE_M * MAX_TILE_N]; /* a tile that C has no room for */
};

/* The TILE_M x tile_n tile at c, set or added to. */
typedef void (*kernel_fn)(int64_t k, const float *a, const float *b, float *c, int64_t ldc,
                          bool accumulate);

/* Rows are written out because an array of accumulators does not reliably stay in registers. */
#define FOR_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define ROW_DECLARE(i) vf c##i##0 = {0}, c##i##1 = {0};
#define ROW_ADD(i) c##i##0 += a[i] * b0, c##i##1 += a[i] * b1;
#define ROW_ADD_C(i)                                                                               \
    c##i##0 += *(vf_mem *)(c + i * ldc), c##i##1 += *(vf_mem *)(c + i * ldc + width);
#define ROW_STORE(i) *(vf_mem *)(c + i * ldc) = c##i##0, *(vf_mem *)(c + i * ldc + width) = c##i##1;

#define DEFINE_KERNEL(name, vector_width, attributes)                                              \
    attributes static void name(int64_t k, const float *a, const float *b, float *c, int64_t ldc,  \
                                bool accumulate)                                                   \
    {                                                                                              \
        enum { width = vector_width };                                                             \
        typedef float vf __attribute__((vector_size(4 * width)));                                  \
        typedef float vf_mem __attribute__((vector_size(4 * width), aligned(4), may_alias));       \
        FOR_ROWS(ROW_DECLARE)                                                                      \
        for (; k > 0; k--, a += TILE_M, b += 2 * width) {                                          \
            vf b0 = *(const vf_mem *)b, b1 = *(const vf_mem *)(b + width);                         \
            FOR_ROWS(ROW_ADD)                                                                      \
        }                                                                                          \
        if (accumulate) {                                                                          \
            FOR_ROWS(ROW_ADD_C)                                                                    \
        }                                                                                          \
        FOR_ROWS(ROW_STORE)                                                                        \
    }

DEFINE_KERNEL(kernel_baseline, 4, )
#if defined(__x86_64__)
DEFINE_KERNEL(kernel_avx2, 8, __attribute__((target("avx2,fma"))))
DEFINE_KERNEL(kernel_avx512, 16, __attribute__((target("avx512f,fma"))))
#endif

static kernel_fn kernel_for(enum cofi_isa isa, int64_t *tile_n_out)
{
#if defined(__x86_64__)
    if (isa >= COFI_ISA_AVX512)
        return *tile_n_out = 32, kernel_avx512;
    if (isa >= COFI_ISA_AVX2)
        return *tile_n_out = 16, kernel_avx2;
#endif
    (void)isa;
    return *tile_n_out = 8, kernel_baseline;
}

/* Packs `rows` x `depth` elements into panels of `tile` rows, [depth][tile] each. In the source, a
 * row is contiguous over the depth (`rows_contiguous`), or the rows are at each depth. */
static void pack(float *panels, int64_t tile, const float *src, int64_t ld, bool rows_contiguous,
                 int64_t rows, int64_t depth)
{
    for (int64_t first = 0; first < rows; first += tile, panels += tile * depth) {
        int64_t n = rows - first < tile ? rows - first : tile;
        if (n < tile)
            memset(panels, 0, sizeof(float) * (size_t)(tile * depth));
        if (rows_contiguous) {
            for (int64_t r = 0; r < n; r++)
                for (int64_t d = 0; d < depth; d++)
                    panels[d * tile + r] = src[(first + r) * ld + d];
        } else {
            for (int64_t d = 0; d < depth; d++)
                for (int64_t r = 0; r < n; r++)
                    panels[d * tile + r] = src[d * ld + first + r];
        }
    }
}

static void edge_tile(const float *tile, int64_t tile_n, int64_t rows, int64_t cols, float *c,
                      int64_t ldc, bool accumulate)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            c[i * ldc + j] = (accumulate ? c[i * ldc + j] : 0) + tile[i * tile_n + j];
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* C block [rows, cols] from packed panels of depth k. */
static void run_block(struct cofi_gemm_plain *plain, kernel_fn kernel, int64_t tile_n, int64_t rows,
                      int64_t cols, int64_t k, float *c, int64_t ldc, bool accumulate)
{
    for (int64_t j = 0; j < cols; j += tile_n)
        for (int64_t i = 0; i < rows; i += TILE_M) {
            const float *a = plain->a_panels + i * k, *b = plain->b_panels + j * k;
            float *tile = c + i * ldc + j;
            if (i + TILE_M <= rows && j + tile_n <= cols) {
                kernel(k, a, b, tile, ldc, accumulate);
            } else {
                kernel(k, a, b, plain->edge, tile_n, false);
                edge_tile(plain->edge, tile_n, min_i64(rows - i, TILE_M), min_i64(cols - j, tile_n),
                          tile, ldc, accumulate);
            }
        }
}

void cofi_gemm_plain_run(struct cofi_gemm_plain *plain, const struct cofi_gemm_call *call)
{
    int64_t tile_n, lda = call->lda, ldb = call->ldb;
    kernel_fn kernel = kernel_for(cofi_isa(), &tile_n);
    bool a_is_mk = call->form != COFI_GEMM_TN, b_is_nk = call->form == COFI_GEMM_NT;
    for (int64_t n0 = 0; n0 < call->n; n0 += BLOCK_N)
        for (int64_t k0 = 0; k0 < call->k; k0 += BLOCK_K) {
            int64_t cols = min_i64(call->n - n0, BLOCK_N), depth = min_i64(call->k - k0, BLOCK_K);
            const float *b = (const float *)call->b + (b_is_nk ? n0 * ldb + k0 : k0 * ldb + n0);
            pack(plain->b_panels, tile_n, b, ldb, b_is_nk, cols, depth);
            for (int64_t m0 = 0; m0 < call->m; m0 += BLOCK_M) {
                int64_t rows = min_i64(call->m - m0, BLOCK_M);
                const float *a = (const float *)call->a + (a_is_mk ? m0 * lda + k0 : k0 * lda + m0);
                pack(plain->a_panels, TILE_M, a, lda, a_is_mk, rows, depth);
                run_block(plain, kernel, tile_n, rows, cols, depth, call->c + m0 * call->ldc + n0,
                          call->ldc, call->accumulate || k0 > 0);
            }
        }
}

struct cofi_gemm_plain *cofi_gemm_plain_open(void)
{
    return malloc(sizeof(struct cofi_gemm_plain));
}

void cofi_gemm_plain_close(struct cofi_gemm_plain *plain)
{
    free(plain);
}
