/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef COFI_STREAM_H
#define COFI_STREAM_H

#include "symm/symm.h"

/* The queue behind a public stream; NOW is the world's own. COF_ERR_INVALID for anything else. */
cof_status cofi_stream_resolve(cof_world *world, cof_stream stream, struct cofi_cpu_stream **out);

#endif
