/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What -i and -o of `cofuse run` name: a safetensors file, or a list "q=a.npy,k=b.npy" with a .npy
 * file for each tensor. A list has no metadata. Each function that returns false has written one
 * line to `error`, of COFI_FILE_ERROR_BYTES. */
#ifndef COFI_TENSOR_FILES_H
#define COFI_TENSOR_FILES_H

#include "safetensors.h"

/* Opens the input and checks all headers. The keys of a list must be among `names`.
 * cofi_st_close ends it; after false *file owns nothing and may be closed, too. */
bool cofi_tensors_open(const char *input, const char *const names[], int n_names,
                       struct cofi_st_file *file, char *error);

/* A word of the file's metadata as the place of one of "a|b|c"; `given` instead where an option
 * gave one (>= 0); 0 where neither did. False after a message of its own. */
bool cofi_tensors_choice(const struct cofi_st_file *file, const char *key, const char *choices,
                         int given, int *value_out);

/* Whether the output could be begun: each file may be written, and is neither an input nor named
 * twice. For saying so before hours of work. */
bool cofi_tensors_may_write(const char *input, const char *output, char *error);

/* Whether `tensors`, which the run will make, hold all that the output names, in dtypes that its
 * format has. Their data is not looked at. */
bool cofi_tensors_check(const char *output, const struct cofi_st_tensor *tensors, int n_tensors,
                        char *error);

/* Writes the safetensors file with all of them and the metadata, or each .npy file of the list; by
 * cofi_file_replace. */
bool cofi_tensors_write(const char *output, const struct cofi_st_metadata *metadata, int n_metadata,
                        const struct cofi_st_tensor *tensors, int n_tensors, char *error);

#endif
