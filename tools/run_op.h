/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What `cofuse run` is the same in for every operator: options, ranks, tensors of files. Functions
 * that return bool do so false after a message. */
#ifndef COFI_RUN_OP_H
#define COFI_RUN_OP_H

#include <stdbool.h>
#include <stddef.h>

#include "cofuse/cofuse.h"
#include "option_table.h"
#include "ranks.h"
#include "safetensors.h"

/* ---- options -------------------------------------------------------------------------------- */

enum { COFI_RUN_MAX_NAMES = 4 };

/* The first member of an operator's own options. */
struct cofi_run_options {
    const char *input, *output;
    int64_t n_threads, repeat;
    int device, engine_word; /* 1: cuda; "thread|shm", -1: not given */
    cof_engine engine;       /* after cofi_run_settle */
    bool compare;
    const char *keys[COFI_RUN_MAX_NAMES]; /* of the inputs in the file */
    const char *const *names;             /* what --names calls them */
    int n_names;
    char keys_text[512];
};

/* As they are without options; a key is the tensor's name. */
struct cofi_run_options cofi_run_options_make(const char *const names[], int n_names);

/* Lines of an operator's table. */
/* Tables of options count from here: `run` is the first member of an operator's own options. */
#define COFI_RUN_FIRST(options) \
    _Static_assert(offsetof(options, run) == 0, "run is not the first member")
#define COFI_RUN_AT(member) offsetof(struct cofi_run_options, member)
#define COFI_RUN_INPUT(help)                                                                       \
    {"input", COFI_OPTION_TEXT, COFI_RUN_AT(input), NULL, 0, 0, 'i', "FILE", help}
#define COFI_RUN_OUTPUT                                                                            \
    {"output", COFI_OPTION_TEXT, COFI_RUN_AT(output), NULL, 0, 0, 'o', "FILE",                     \
     "written to a temporary name, then renamed"}
#define COFI_RUN_DEVICE                                                                            \
    {"device", COFI_OPTION_CHOICE, COFI_RUN_AT(device), "cpu|cuda", 0, 0, 0, "D",                  \
     "cpu; cuda: ranks are processes on the CUDA devices, in turn [cpu]"}
#define COFI_RUN_ENGINE                                                                            \
    {"engine", COFI_OPTION_CHOICE, COFI_RUN_AT(engine_word), "thread|shm", 0, 0, 0, "E",           \
     "shm: processes; thread: threads of this process [COFUSE_ENGINE]"}
#define COFI_RUN_THREADS                                                                           \
    {"threads", COFI_OPTION_INT, COFI_RUN_AT(n_threads), NULL, 0, 256, 0, "N",                     \
     "per rank; 0: COFUSE_THREADS, else cores / ranks [0]"}
#define COFI_RUN_COMPARE(help)                                                                     \
    {"compare", COFI_OPTION_FLAG, COFI_RUN_AT(compare), NULL, 0, 0, 0, NULL, help}
#define COFI_RUN_REPEAT                                                                            \
    {"repeat", COFI_OPTION_INT, COFI_RUN_AT(repeat), NULL, 1, 1000, 0, "N",                        \
     "timed calls after one to warm up; the best counts [3]"}
#define COFI_RUN_NAMES(value, help)                                                                \
    {"names", COFI_OPTION_CALL, 0, NULL, 0, 0, 0, value, help}

/* All words of a command, as cofi_option_read_command. */
bool cofi_run_read(int argc, char **argv, const char *usage, const struct cofi_option *table,
                   struct cofi_run_options *options, int *code_out);

/* The rest, after the operator's own rules: an input, an output that can be begun, the environment,
 * device and engine. COFI_EXIT_OK or the exit code after a message. `tensors`: what is read. */
int cofi_run_settle(struct cofi_run_options *options, const char *tensors);

/* ---- ranks ---------------------------------------------------------------------------------- */

/* What the block of memory that parent and ranks share begins with. */
struct cofi_run_head {
    size_t bytes; /* of the block */
    cof_engine engine;
    int n_threads, n_ranks, repeat;
    double seconds; /* that a wait may last where the environment says nothing */
    char describe[1024];
};

struct cofi_run_head cofi_run_head_make(const struct cofi_run_options *options, int n_ranks,
                                        double seconds);

/* Runs the block's ranks; the exit code for all of them. The second one in a process that is a rank
 * (cofi_job_is_rank): head_bytes is the size of the block's struct. */
int cofi_run_ranks(struct cofi_run_head *head, cofi_rank_fn body, int shared_fd, int argc,
                   char **argv);
int cofi_run_as_rank(size_t head_bytes, cofi_rank_fn body);

/* A rank's life: `work` in its world, then `close` whatever work came to, then the world's end.
 * Returns the exit code, after a message where it is not 0. */
int cofi_run_rank(const cof_world_options *options, int rank,
                  cof_status (*work)(void *arg, cof_world *world), void (*close)(void *arg),
                  void *arg);

/* The plan's describe line, by rank 0. */
void cofi_run_describe(struct cofi_run_head *head, int rank, const cof_plan *plan);

/* Of times[i * stride] of every rank i the largest. */
double cofi_run_slowest(const double *times, int n_ranks, int stride);

/* ---- tensors -------------------------------------------------------------------------------- */

/* tensor_files.h, with the message. can_make: an output of NULL is none. */
bool cofi_run_open(const char *input, const char *const keys[], int n_keys,
                   struct cofi_st_file *file);
bool cofi_run_can_make(const char *output, const struct cofi_st_tensor *tensors, int n_tensors);
bool cofi_run_load(const struct cofi_st_tensor *tensor, void *dst);
bool cofi_run_write(const char *output, const struct cofi_st_metadata *metadata, int n_metadata,
                    const struct cofi_st_tensor *tensors, int n_tensors);

/* The block for a run of so many bytes, with `layout`, its struct, at its head. */
void *cofi_run_block(const void *layout, size_t layout_bytes, size_t bytes, int *fd_out);

/* Whether the file's metadata, if it has any, is of this operator. */
bool cofi_run_is_of(const struct cofi_st_file *file, const char *op);

/* A tensor by its key in the file; NULL after a message. `name` is what the operator calls it. */
const struct cofi_st_tensor *cofi_run_find(const struct cofi_st_file *file, const char *key,
                                           const char *name);

/* "[2, 37, 4]" */
void cofi_run_shape(const int64_t *shape, int ndim, char *text, size_t bytes);

/* Whether a tensor has this shape, which the letters "[T, H]" name; the dtype of x, or F32. */
bool cofi_run_has_shape(const struct cofi_st_tensor *t, const int64_t *wanted, int ndim,
                        const char *letters);
bool cofi_run_has_dtype(const struct cofi_st_tensor *t, const struct cofi_st_tensor *x,
                        bool or_f32);

#endif
