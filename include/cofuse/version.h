/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Version and export macro.
 *
 * The soname carries COF_VERSION_MAJOR: within one major number functions are only added, structs
 * that begin with `size_t size` only grow at the end, and enumerators keep their values. A struct
 * of an older header is filled up with zeros, one of a newer header is taken when the fields that
 * this library does not know are zero.
 */
#ifndef COFUSE_VERSION_H
#define COFUSE_VERSION_H

#include <stddef.h>
#include <stdint.h>

#define COF_VERSION_MAJOR 0
#define COF_VERSION_MINOR 1
#define COF_VERSION_PATCH 0

#if defined(__GNUC__)
#define COF_API __attribute__((visibility("default")))
#else
#define COF_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** The version of the loaded library as "0.1.0"; compare with the macros of the header. */
COF_API const char *cof_version(void);

#ifdef __cplusplus
}
#endif
#endif
