/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef COFI_STREAM_H
#define COFI_STREAM_H

#include "cofuse/arena.h"
#include "symm/symm.h"

/* Around the enqueuing of one call. begin gives the queue behind a public stream; for
 * COF_STREAM_NOW that is the world's own, which one thread at a time may have. end returns the
 * call's status: `enqueued`, and for NOW, once the work is done, how it ended. */
cof_status cofi_stream_begin(cof_world *world, cof_stream stream, struct cofi_cpu_stream **out);
cof_status cofi_stream_end(cof_world *world, cof_stream stream, cof_status enqueued);

/* The same where ranks work on devices: begin gives the device's stream, end looks at the arena
 * after it has waited. */
cof_status cofi_stream_begin_device(cof_world *world, cof_stream stream, void **out);
cof_status cofi_stream_end_device(cof_arena *arena, cof_stream stream, cof_status enqueued);

#endif
