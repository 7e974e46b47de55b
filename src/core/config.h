/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The one table of environment variables: feeds the parser, `cofuse info` and docs/environment.md.
 * Variables are read at creation calls only, never while a plan runs. */
#ifndef COFI_CONFIG_H
#define COFI_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "cofuse/status.h"

enum cofi_var_type { COFI_INT, COFI_SECONDS, COFI_CHOICE, COFI_TEXT };

/* X(symbol, name, type, default, choices or unit, help) */
#define COFI_VARIABLES(X)                                                                          \
    X(RANK, "COFUSE_RANK", COFI_INT, "0", "", "rank of this process; set by `cofuse launch`")      \
    X(SIZE, "COFUSE_SIZE", COFI_INT, "1", "", "number of ranks; set by `cofuse launch`")           \
    X(JOB, "COFUSE_JOB", COFI_TEXT, "", "", "token of the job; set by `cofuse launch`")            \
    X(FDS, "COFUSE_FDS", COFI_TEXT, "", "",                                                        \
      "inherited sockets, by peer rank, comma-separated; set by `cofuse launch`")                  \
    X(ENGINE, "COFUSE_ENGINE", COFI_CHOICE, "shm", "thread|shm|cuda", "how ranks share memory")    \
    X(INIT_TIMEOUT, "COFUSE_INIT_TIMEOUT", COFI_SECONDS, "120", "s, 0 = none",                     \
      "deadline of every collective call")                                                         \
    X(TIMEOUT, "COFUSE_TIMEOUT", COFI_SECONDS, "600", "s, 0 = none",                               \
      "deadline of every wait of a running plan")                                                  \
    X(THREADS, "COFUSE_THREADS", COFI_INT, "0", "0 = cores / ranks on this host",                  \
      "threads of a CPU stream")                                                                   \
    X(PIN, "COFUSE_PIN", COFI_CHOICE, "auto", "auto|no",                                           \
      "pin threads to cores: where ranks x threads fit, or never")                                 \
    X(GEMM, "COFUSE_GEMM", COFI_CHOICE, "auto", "auto|onednn|plain",                               \
      "matrix products on the CPU: oneDNN where it can be loaded, or plain C")                     \
    X(CPU_ISA, "COFUSE_CPU_ISA", COFI_CHOICE, "auto", "auto|scalar|avx2|avx512|avx512_bf16",       \
      "highest instruction set to use; auto: avx512_bf16 where that is faster than fp32")          \
    X(FORCE_STAGED, "COFUSE_FORCE_STAGED", COFI_CHOICE, "0", "0|1",                                \
      "transfers through staging buffers even where peers are mapped (tests)")                     \
    X(DEVICE, "COFUSE_DEVICE", COFI_TEXT, "", "number or UUID",                                    \
      "CUDA device of this rank; else the thread's current one, else rank modulo devices")         \
    X(MAX_CTAS, "COFUSE_MAX_CTAS", COFI_INT, "0", "0 = what runs at once / ranks of the device",   \
      "blocks that one kernel on a CUDA device may use")                                           \
    X(CUDA_MEMORY, "COFUSE_CUDA_MEMORY", COFI_CHOICE, "auto", "auto|vmm|ipc",                      \
      "device memory between ranks: descriptors of cuMem*, or the older handles of cudaIpc*")      \
    X(CUDNN_PATH, "COFUSE_CUDNN_PATH", COFI_TEXT, "", "file or folder",                            \
      "libcudnn.so.9 for attention on CUDA devices; else searched for")                            \
    X(TAGGED_UNITS, "COFUSE_TAGGED_UNITS", COFI_CHOICE, "auto", "auto|lines|words",                \
      "what carries its own signal between devices: 128-byte lines (auto: over NVLink), 16 bytes") \
    X(ATTENTION_ENGINE, "COFUSE_ATTENTION_ENGINE", COFI_CHOICE, "auto", "auto|cudnn|exact",        \
      "attention on CUDA devices: cuDNN where it can (auto), cuDNN, or kernels in fp32")           \
    X(LOG, "COFUSE_LOG", COFI_CHOICE, "0", "0|1|2|3",                                              \
      "log to stderr: 1 errors, 2 also once per process, 3 also once per plan")

enum cofi_var {
#define COFI_VAR_ENUM(symbol, ...) COFI_VAR_##symbol,
    COFI_VARIABLES(COFI_VAR_ENUM)
#undef COFI_VAR_ENUM
        COFI_N_VARS
};

struct cofi_var_info {
    const char *name;
    enum cofi_var_type type;
    const char *default_text;
    const char *rule; /* choices, or the unit and range */
    const char *help;
};

const struct cofi_var_info *cofi_var_info(enum cofi_var var);

/* The text in force: the environment's, or the default when unset or empty. */
const char *cofi_config_text(enum cofi_var var);

/* The value in force; one that does not parse counts as the default (cofi_config_check says so). */
int64_t cofi_config_int(enum cofi_var var);
double cofi_config_seconds(enum cofi_var var);

/* COF_ERR_INVALID naming the first variable whose text breaks its rule. COFUSE_RANK to COFUSE_FDS
 * only `with_launcher`: they are not read where the caller says which rank this is. */
cof_status cofi_config_check(bool with_launcher);

#endif
