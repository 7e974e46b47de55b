/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What an operator may promise about the bits of its products on the CPU. The rule:
 *
 *     The product of all ranks is cut into tiles of one size, with corners at multiples of it in
 *     the global matrix. A tile is one cofi_gemm_run of that size over all of K. Rows and columns
 *     that this rank does not have are zeros, in a copy; whole operands may stay where they are.
 *
 * Under it an element has the same bits wherever local ranges begin and end, whatever the leading
 * dimensions, the alignment, the place in a batch, the operands beside it, and the thread. The same
 * provider and instruction set are taken for granted. Controls show that no part of the rule can
 * go: products of the ranges' own sizes and tiles that begin with the range are rounded otherwise
 * by oneDNN, though not by plain C; K in two parts is by both. Memory around the operands is NaN.
 * Each setting has a process of its own, because the choice is the process's. */
#include <math.h>
#include <sys/wait.h>

#include "backend/cpu/gemm.h"
#include "backend/cpu/vec.h"
#include "test.h"

enum { N_SHARDS = 3, MAX_TILE_PRODUCT = 7 << 20 };

static const int64_t depths[] = {8, 96, 128, 256, 1000, 4096};
static const int64_t tile_sizes[][2] = {{32, 48}, {64, 64}, {96, 128}};
static const char *const form_names[] = {"NT", "NN", "TN"};
static const char *const elem_names[] = {
    [COFI_ELEM_F32] = "fp32", [COFI_ELEM_BF16] = "bf16", [COFI_ELEM_F16] = "fp16"};

/* Where a matrix lies: elements between its rows, elements past a page, matrices before it. */
struct place {
    int64_t pad, offset, batch;
};

/* A or B: n vectors of length k, each contiguous (`k_inner`) or each a column. */
struct operand {
    int64_t n, k, ld;
    bool k_inner;
    size_t elem_bytes;
    char *memory, *data;
};

struct problem {
    enum cofi_gemm_form form;
    enum cofi_gemm_type type;
    enum cofi_elem elem;
    int64_t m, n, k, tile_m, tile_n;
    struct operand a, b;
    float *want; /* [m][n]: whole tiles by one rank, packed and aligned */
    char text[96];
};

/* The ranges of rows and columns that ranks have: bounds in ascending order. Tiles begin with the
 * range where `is_local`, against the rule. */
struct cut {
    int64_t rows[N_SHARDS + 1], cols[N_SHARDS + 1];
    bool is_local;
};

/* Vectors [begin, end) of the global matrix, in the tile that begins at `first`. */
struct range {
    int64_t first, begin, end;
};

/* The copies of a tile's operands, and its result. */
struct tile {
    struct operand a, b;
    float *c_memory, *c;
    int64_t ldc;
};

static void *allocate(size_t bytes)
{
    size_t rounded = (bytes + 8191) / 4096 * 4096;
    void *memory = aligned_alloc(4096, rounded);
    if (!memory)
        abort();
    return memset(memory, 0xff, rounded); /* NaN in fp32 and in bf16 */
}

static struct operand operand_make(int64_t n, int64_t k, bool k_inner, size_t elem_bytes,
                                   struct place place)
{
    struct operand op = {n, k, (k_inner ? k : n) + place.pad, k_inner, elem_bytes, NULL, NULL};
    int64_t stride = (k_inner ? n : k) * op.ld + 7;
    op.memory = allocate((size_t)((place.batch + 1) * stride + place.offset) * elem_bytes);
    op.data = op.memory + (size_t)(place.batch * stride + place.offset) * elem_bytes;
    return op;
}

static char *at(const struct operand *op, int64_t i, int64_t k)
{
    return op->data + (size_t)(op->k_inner ? i * op->ld + k : k * op->ld + i) * op->elem_bytes;
}

/* Vectors [begin, end) of `src` to `dst`, from its vector `to` on. */
static void operand_copy(const struct operand *dst, int64_t to, const struct operand *src,
                         int64_t begin, int64_t end)
{
    for (int64_t i = begin; src->k_inner && i < end; i++)
        memcpy(at(dst, to + i - begin, 0), at(src, i, 0), (size_t)src->k * src->elem_bytes);
    for (int64_t k = 0; !src->k_inner && k < src->k; k++)
        memcpy(at(dst, to, k), at(src, begin, k), (size_t)(end - begin) * src->elem_bytes);
}

static void operand_zero(const struct operand *op)
{
    for (int64_t row = 0; row < (op->k_inner ? op->n : op->k); row++)
        memset(op->data + (size_t)(row * op->ld) * op->elem_bytes, 0,
               (size_t)(op->k_inner ? op->k : op->n) * op->elem_bytes);
}

/* Random values of the element type; fp32 holds them where its products do not run natively. */
static void operand_fill(const struct operand *op, enum cofi_elem elem, unsigned *seed)
{
    for (int64_t i = 0; i < op->n; i++)
        for (int64_t k = 0; k < op->k; k++) {
            float value = (float)(rand_r(seed) % 65536 - 32768) / 3001, rounded;
            char bits[sizeof value];
            cofi_vec_store(cofi_vec(), elem, bits, &value, 1);
            cofi_vec_load(cofi_vec(), elem, &rounded, bits, 1);
            memcpy(at(op, i, k), op->elem_bytes == 2 ? bits : (char *)&rounded, op->elem_bytes);
        }
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The operand of a tile: where it is if the range fills the tile, else a zero-padded copy. */
static struct operand tile_operand(const struct operand *global, struct range range,
                                   const struct operand *copy, bool in_place)
{
    if (in_place && range.end - range.begin == copy->n) {
        struct operand view = *global;
        view.data = at(global, range.begin, 0);
        return view;
    }
    operand_zero(copy);
    operand_copy(copy, range.begin - range.first, global, range.begin, range.end);
    return *copy;
}

static struct tile tile_make(const struct problem *problem, struct place place)
{
    const struct operand *a = &problem->a, *b = &problem->b;
    struct tile tile = {.ldc = problem->tile_n + place.pad};
    tile.a = operand_make(problem->tile_m, problem->k, a->k_inner, a->elem_bytes, place);
    tile.b = operand_make(problem->tile_n, problem->k, b->k_inner, b->elem_bytes, place);
    tile.c_memory =
        allocate(sizeof *tile.c * (size_t)(problem->tile_m * tile.ldc + place.offset));
    tile.c = tile.c_memory + place.offset;
    return tile;
}

static void tile_free(struct tile *tile)
{
    free(tile->a.memory);
    free(tile->b.memory);
    free(tile->c_memory);
}

static void run_tile(struct cofi_gemm *gemm, const struct problem *problem, struct range rows,
                     struct range cols, const struct tile *tile, bool in_place, float *result)
{
    struct operand a = tile_operand(&problem->a, rows, &tile->a, in_place);
    struct operand b = tile_operand(&problem->b, cols, &tile->b, in_place);
    CHECK_OK(cofi_gemm_run(gemm, problem->form, problem->type, problem->tile_m, problem->tile_n,
                           problem->k, a.data, a.ld, b.data, b.ld, false, tile->c, tile->ldc));
    for (int64_t i = rows.begin; i < rows.end; i++)
        memcpy(result + i * problem->n + cols.begin,
               tile->c + (i - rows.first) * tile->ldc + cols.begin - cols.first,
               sizeof *result * (size_t)(cols.end - cols.begin));
}

/* The tiles of rank `shard`. */
static void run_shard(struct cofi_gemm *gemm, const struct problem *problem, const struct cut *cut,
                      int shard, const struct tile *tile, bool in_place, float *result)
{
    const int64_t *rows = cut->rows + shard / N_SHARDS, *cols = cut->cols + shard % N_SHARDS;
    const int64_t tile_m = problem->tile_m, tile_n = problem->tile_n;
    const int64_t first_m = cut->is_local ? rows[0] : rows[0] / tile_m * tile_m;
    const int64_t first_n = cut->is_local ? cols[0] : cols[0] / tile_n * tile_n;
    for (int64_t i = first_m; i < rows[1]; i += tile_m)
        for (int64_t j = first_n; j < cols[1]; j += tile_n) {
            struct range r = {i, max_i64(i, rows[0]), min_i64(i + tile_m, rows[1])};
            struct range c = {j, max_i64(j, cols[0]), min_i64(j + tile_n, cols[1])};
            run_tile(gemm, problem, r, c, tile, in_place, result);
        }
}

/* All shards; the result is the caller's to free. */
static float *run_cut(struct cofi_gemm *gemm, const struct problem *problem, const struct cut *cut,
                      struct place place, bool in_place)
{
    float *result = allocate(sizeof *result * (size_t)(problem->m * problem->n));
    struct tile tile = tile_make(problem, place);
    for (int shard = 0; shard < N_SHARDS * N_SHARDS; shard++)
        run_shard(gemm, problem, cut, shard, &tile, in_place, result);
    tile_free(&tile);
    return result;
}

static struct cut whole_cut(const struct problem *problem)
{
    int64_t m = problem->m, n = problem->n;
    return (struct cut){{0, m, m, m}, {0, n, n, n}, false};
}

/* One rank has a single row, one begins with a tile and has it whole; of the columns, one range has
 * parts of three tiles. */
static struct cut uneven_cut(const struct problem *problem)
{
    int64_t m = problem->m, n = problem->n, tile_m = problem->tile_m, tile_n = problem->tile_n;
    return (struct cut){{0, 1, tile_m, m}, {0, tile_n - 17, 2 * tile_n + 1, n}, false};
}

/* Elements whose bits differ from the wanted ones. Takes `got`. */
static int n_different(const struct problem *problem, float *got)
{
    int n = 0;
    for (int64_t i = 0; i < problem->m * problem->n; i++)
        n += memcmp(&got[i], &problem->want[i], sizeof *got) != 0;
    free(got);
    return n;
}

/* The same values elsewhere. */
static void operand_move(struct operand *op, struct place place)
{
    struct operand moved = operand_make(op->n, op->k, op->k_inner, op->elem_bytes, place);
    operand_copy(&moved, 0, op, 0, op->n);
    free(op->memory);
    *op = moved;
}

static void check_sane(const struct problem *problem)
{
    double sum = 0;
    for (int64_t k = 0; problem->type == COFI_GEMM_F32 && k < problem->k; k++)
        sum += (double)*(float *)at(&problem->a, problem->m - 1, k) *
               (double)*(float *)at(&problem->b, problem->n - 1, k);
    float last = problem->want[problem->m * problem->n - 1];
    CHECK(problem->type != COFI_GEMM_F32 || fabs((double)last - sum) < 0.01, "%s: %g, not %g",
          problem->text, (double)last, sum);
}

static struct problem problem_make(struct cofi_gemm *gemm, enum cofi_gemm_form form,
                                   enum cofi_elem elem, int64_t k, const int64_t *tile_size)
{
    struct problem problem = {.form = form, .type = COFI_GEMM_F32, .elem = elem, .k = k,
                              .m = 2 * tile_size[0] + 6, .n = 2 * tile_size[1] + 14,
                              .tile_m = tile_size[0], .tile_n = tile_size[1]};
    if (elem == COFI_ELEM_BF16 && cofi_gemm_has(COFI_GEMM_BF16))
        problem.type = COFI_GEMM_BF16;
    snprintf(problem.text, sizeof problem.text, "%s %s, tiles %dx%d, K %d", form_names[form],
             elem_names[elem], (int)problem.tile_m, (int)problem.tile_n, (int)k);
    const size_t elem_bytes = problem.type == COFI_GEMM_BF16 ? 2 : 4;
    unsigned seed = (unsigned)k;
    problem.a = operand_make(problem.m, k, form != COFI_GEMM_TN, elem_bytes, (struct place){0});
    problem.b = operand_make(problem.n, k, form == COFI_GEMM_NT, elem_bytes, (struct place){0});
    operand_fill(&problem.a, elem, &seed);
    operand_fill(&problem.b, elem, &seed);
    struct cut whole = whole_cut(&problem);
    problem.want = run_cut(gemm, &problem, &whole, (struct place){0}, false);
    check_sane(&problem);
    return problem;
}

static void problem_free(struct problem *problem)
{
    free(problem->a.memory);
    free(problem->b.memory);
    free(problem->want);
}

static void test_cuts(struct cofi_gemm *gemm, struct problem *problem)
{
    const struct cut cut = uneven_cut(problem);
    int n = n_different(problem, run_cut(gemm, problem, &cut, (struct place){3, 5, 0}, false));
    CHECK(n == 0, "%s: %d elements differ when cut unevenly", problem->text, n);
    operand_move(&problem->a, (struct place){24, 1, 1});
    operand_move(&problem->b, (struct place){24, 1, 1});
    n = n_different(problem, run_cut(gemm, problem, &cut, (struct place){0}, true));
    CHECK(n == 0, "%s: %d elements differ when whole operands stay in place", problem->text, n);
}

/* Paddings that make leading dimensions odd, multiples of a vector, and of a page. */
static void test_places(struct cofi_gemm *gemm, const struct problem *problem)
{
    const struct place places[] = {{0, 1, 0}, {1, 0, 0}, {8, 0, 1}, {1024, 7, 2},
                                   {1024 - problem->k % 1024, 0, 0},
                                   {1024 - problem->tile_n, 0, 0}};
    const struct cut whole = whole_cut(problem);
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        int n = n_different(problem, run_cut(gemm, problem, &whole, places[i], false));
        CHECK(n == 0, "%s: %d elements differ with padding %d, offset %d", problem->text, n,
              (int)places[i].pad, (int)places[i].offset);
    }
}

/* Control: tiles that begin with the range. */
static int n_different_local(struct cofi_gemm *gemm, const struct problem *problem)
{
    struct cut cut = uneven_cut(problem);
    cut.is_local = true;
    return n_different(problem, run_cut(gemm, problem, &cut, (struct place){0}, false));
}

/* Control: the same ranges, each as one product of its own size. */
static int n_different_unpadded(struct cofi_gemm *gemm, const struct problem *problem)
{
    const struct cut cut = uneven_cut(problem);
    float *result = allocate(sizeof *result * (size_t)(problem->m * problem->n));
    for (int i = 0; i < N_SHARDS * N_SHARDS; i++) {
        const int64_t *rows = cut.rows + i / N_SHARDS, *cols = cut.cols + i % N_SHARDS;
        CHECK_OK(cofi_gemm_run(gemm, problem->form, problem->type, rows[1] - rows[0],
                               cols[1] - cols[0], problem->k, at(&problem->a, rows[0], 0),
                               problem->a.ld, at(&problem->b, cols[0], 0), problem->b.ld, false,
                               result + rows[0] * problem->n + cols[0], problem->n));
    }
    return n_different(problem, result);
}

/* Control: K in two parts is another sum, and the comparison sees it. The first part is odd: blocks
 * of the provider may begin at powers of two anyway. */
static void test_split(struct cofi_gemm *gemm, const struct problem *problem)
{
    float *result = allocate(sizeof *result * (size_t)(problem->m * problem->n));
    const int64_t first = (problem->k / 3) | 1;
    for (int part = 0; part < 2; part++) {
        int64_t begin = part ? first : 0, k = part ? problem->k - first : first;
        CHECK_OK(cofi_gemm_run(gemm, problem->form, problem->type, problem->m, problem->n, k,
                               at(&problem->a, 0, begin), problem->a.ld,
                               at(&problem->b, 0, begin), problem->b.ld, part, result,
                               problem->n));
    }
    CHECK(n_different(problem, result) > 0, "%s: a split K gave the same bits", problem->text);
}

/* Elements that the controls found to differ. */
struct controls {
    int n_unpadded, n_local;
};

static void test_problems(struct cofi_gemm *gemm, enum cofi_gemm_form form, enum cofi_elem elem,
                          struct controls *controls)
{
    for (size_t s = 0; s < sizeof tile_sizes / sizeof tile_sizes[0]; s++)
        for (size_t d = 0; d < sizeof depths / sizeof depths[0]; d++) {
            int64_t k = depths[d];
            if (k * tile_sizes[s][0] * tile_sizes[s][1] > MAX_TILE_PRODUCT)
                continue; /* for time: every depth is had by the smaller tiles */
            struct problem problem = problem_make(gemm, form, elem, k, tile_sizes[s]);
            if (k <= 256) {
                controls->n_unpadded += n_different_unpadded(gemm, &problem);
                controls->n_local += n_different_local(gemm, &problem);
            }
            if (k >= 96 && k <= 1000)
                test_split(gemm, &problem);
            if (k <= 256 && (elem == COFI_ELEM_F32 || problem.type == COFI_GEMM_BF16))
                test_places(gemm, &problem);
            test_cuts(gemm, &problem);
            problem_free(&problem);
        }
}

/* Two threads with providers of their own, in opposite orders. */
struct thread_args {
    const struct problem *problems;
    bool is_backward;
};

static void *thread_main(void *user)
{
    const struct thread_args *args = user;
    struct cofi_gemm *gemm = NULL;
    CHECK_OK(cofi_gemm_open(&gemm));
    for (int i = 0; gemm && i < 12; i++) {
        const struct problem *problem = &args->problems[args->is_backward ? (11 - i) % 3 : i % 3];
        const struct cut cut = uneven_cut(problem);
        int n = n_different(problem, run_cut(gemm, problem, &cut, (struct place){0, i, 0}, true));
        CHECK(n == 0, "%s: %d elements differ on another thread", problem->text, n);
    }
    cofi_gemm_close(gemm);
    return NULL;
}

static void test_threads(struct cofi_gemm *gemm)
{
    struct problem problems[3];
    for (int form = 0; form < 3; form++)
        problems[form] = problem_make(gemm, (enum cofi_gemm_form)form, COFI_ELEM_F32, 256,
                                      tile_sizes[form]);
    struct thread_args args[2] = {{problems, false}, {problems, true}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, thread_main, &args[i]) != 0)
            abort();
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int form = 0; form < 3; form++)
        problem_free(&problems[form]);
}

enum { EXIT_SKIPPED = 77 };

static void tell_control(const char *isa, const char *control, int n)
{
    if (n)
        printf("# %s %s: %d elements differ with %s\n", cofi_gemm_name(), isa, n, control);
    else
        printf("# %s %s, control: %s # skip: the same bits from this provider\n", cofi_gemm_name(),
               isa, control);
}

static int child(const char *provider, const char *isa)
{
    struct cofi_gemm *gemm = NULL;
    setenv("COFUSE_GEMM", provider, 1);
    setenv("COFUSE_CPU_ISA", isa, 1);
    cof_status status = cofi_gemm_init();
    if (status == COF_ERR_UNSUPPORTED && strstr(cof_last_error(), "cannot be loaded")) {
        printf("ok %s %s # skip: %s\n", provider, isa, cof_last_error());
        return EXIT_SKIPPED;
    }
    CHECK_OK(status);
    if (strcmp(cofi_isa_name(cofi_isa()), isa) != 0) {
        printf("ok %s %s # skip: this processor runs %s\n", provider, isa,
               cofi_isa_name(cofi_isa()));
        return EXIT_SKIPPED;
    }
    CHECK_OK(cofi_gemm_open(&gemm));
    struct controls controls = {0};
    for (int form = 0; gemm && form < 3; form++)
        for (int elem = 0; elem < 3; elem++)
            test_problems(gemm, (enum cofi_gemm_form)form, (enum cofi_elem)elem, &controls);
    if (gemm)
        test_threads(gemm);
    tell_control(isa, "products of the ranges' own sizes", controls.n_unpadded);
    tell_control(isa, "tiles that begin with the ranges", controls.n_local);
    cofi_gemm_close(gemm);
    return test_done();
}

int main(void)
{
    static const char *const settings[][2] = {
        {"plain", "scalar"}, {"plain", "avx2"},    {"plain", "avx512"},
        {"onednn", "avx2"},  {"onednn", "avx512"}, {"onednn", "avx512_bf16"}};
    int n_bad = 0;
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        if (TEST_FEWER && i % 3 != 1)
            continue;
        fflush(stdout);
        pid_t pid = fork(); /* before this process has touched OpenMP */
        if (pid == 0) {
            int result = child(settings[i][0], settings[i][1]);
            fflush(stdout);
            _exit(result);
        }
        int result = 1;
        waitpid(pid, &result, 0);
        bool is_skipped = WIFEXITED(result) && WEXITSTATUS(result) == EXIT_SKIPPED;
        bool is_ok = WIFEXITED(result) && WEXITSTATUS(result) == 0;
        if (!is_skipped)
            printf("%s %s %s\n", is_ok ? "ok" : "not ok", settings[i][0], settings[i][1]);
        n_bad += !is_ok && !is_skipped;
    }
    return n_bad != 0;
}
