/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/**
 * Cofuse: operators in which communication and computation are one thing.
 *
 * Four ideas carry the whole interface.
 *
 *   World, team   A world is this process's membership of a job; a team is an ordered subset of its
 *                 ranks. Collective calls are made by every rank of the team, in the same order.
 *   Symmetric     Memory that every rank of a team has and can reach on the others. Operators keep
 *   memory        their exchange buffers and signal words there; callers need not know it.
 *   Plan          An operator made ready for fixed shapes: validated, compared over the ranks, with
 *                 everything allocated. `cof_<op>_plan_create`, then run as often as wanted.
 *   Stream        An in-order queue. Running a plan enqueues on a stream and returns;
 *                 COF_STREAM_NOW waits for the end instead.
 *
 * Every wait has a deadline, and every disagreement between ranks is an error with a text
 * (cof_last_error) on every surviving rank: never a hang, never a silently wrong result.
 */
#ifndef COFUSE_H
#define COFUSE_H

#include "allreduce_rmsnorm.h"
#include "arena.h"
#include "attention.h"
#include "grad_return.h"
#include "layout.h"
#include "plan.h"
#include "status.h"
#include "stream.h"
#include "tensor.h"
#include "trimul.h"
#include "version.h"
#include "world.h"

#endif
