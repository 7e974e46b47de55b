/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What `cofuse run` is the same in for every operator: engine, keys of tensors, ranks. */
#ifndef COFI_RUN_OP_H
#define COFI_RUN_OP_H

#include <stdbool.h>
#include <stddef.h>

#include "cofuse/cofuse.h"
#include "safetensors.h"

/* The value of --engine; and what holds without it: COFUSE_ENGINE's, else shm. */
bool cofi_run_engine(const char *text, cof_engine *engine_out);
void cofi_run_engine_default(cof_engine *engine);

/* "q=a,k=b" given for --names into keys[], by the place of "q" and "k" in names[]. The words are
 * kept in `buffer`. False after a message. */
bool cofi_run_names(const char *text, const char *const names[], int n_names, char *keys[],
                    char *buffer, size_t bytes);

/* Whether the file's metadata, if it has any, is of this operator. False after a message. */
bool cofi_run_is_of(const struct cofi_st_file *file, const char *op);

/* A tensor by its key in the file; NULL after a message. `name` is what the operator calls it. */
const struct cofi_st_tensor *cofi_run_find(const struct cofi_st_file *file, const char *key,
                                           const char *name);

/* "[2, 37, 4]" */
void cofi_run_shape(const int64_t *shape, int ndim, char *text, size_t bytes);

/* In a rank that is a process: the parent's memory. It begins with a struct of head_bytes that has
 * the size of all of it, a size_t, at `bytes_at`. NULL after a message. */
void *cofi_run_memory(size_t head_bytes, size_t bytes_at);

/* The exit code of a rank, after a message where it is not 0. */
int cofi_run_exit(int rank, cof_status status);

#endif
