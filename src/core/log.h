/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Log lines, with levels by how often they occur. A run logs nothing but its errors. */
#ifndef COFI_LOG_H
#define COFI_LOG_H

enum { COFI_LOG_ERROR = 1, COFI_LOG_PROCESS = 2, COFI_LOG_PLAN = 3 };

void cofi_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
