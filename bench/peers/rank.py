# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a process set: makes the tensors, checks the rivals against Cofuse, times all."""

import os
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

import cofuse
from comparison import relative
from comparison_cpu import largest
from rivals import rivals_of
from sections import KERNEL, fastest_forms

WARMUP = 1  # turns; the check against Cofuse has called each once already
LEAST_CALLS = 3
# Largest relative root mean square difference between a rival and Cofuse, of each result.
BOUNDS = {"bf16": 2e-2, "f32": 1e-4}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
# From the word of rank 0 to the start of a call, so that all ranks wait for the same moment.
LEAD_S = 0.003
LATE_S = 1e-4


class Cofuse:
    """The calls of Cofuse with outputs made before."""

    def __init__(self, team, options, n_rows, q, k, v):
        self.plan = cofuse.AttentionPlan(
            team, dtype=options["dtype"], n_batch=1, n_rows=n_rows, n_heads=options["heads"],
            n_kv_heads=options["kv_heads"], head_dim_qk=options["dim"], mask=options["mask"])
        self.inputs = (q, k, v)
        self.o = torch.empty_like(q)
        self.lse = torch.empty(1, q.shape[2], q.shape[1])
        self.gradients = [torch.empty_like(t) for t in self.inputs]

    def forward(self, q, k, v):
        self.plan.forward(q, k, v, self.o, self.lse)
        return self.o.transpose(1, 2), self.lse

    def backward(self, dout):
        self.plan.backward(*self.inputs, self.o, self.lse, dout, *self.gradients)
        return tuple(t.transpose(1, 2) for t in self.gradients)


def _results(contender, tensors):
    q, k, v, dout = tensors
    out = contender.forward(q, k, v)
    return [t.clone() for t in (*out, *contender.backward(dout))]


def _checked(contenders, tensors, bound):
    """Those whose results are Cofuse's, and texts about the others."""
    wanted = _results(contenders["cofuse"], tensors)
    good, failures, differences = {"cofuse": contenders["cofuse"]}, {}, {}
    for name, contender in contenders.items():
        if name == "cofuse":
            continue
        found = _results(contender, tensors)
        worst = largest(*map(relative, found, wanted))
        differences[name] = dict(zip(("o", "lse", "dq", "dk", "dv"), worst))
        if max(worst) <= bound:
            good[name] = contender
        else:
            texts = (f"{what} {d:.1e}" for what, d in differences[name].items())
            failures[name] = f"differs from Cofuse by {', '.join(texts)}; allowed {bound:.0e}"
    return good, failures, differences


def _told(*values):
    """The values of rank 0."""
    word = torch.tensor(values, dtype=torch.float64)
    dist.broadcast(word, 0)
    return word.tolist()


def _common_start(spin):
    """A moment that rank 0 names and all wait for; spin: with a core for each thread."""
    (start,) = _told(time.monotonic() + LEAD_S)
    time.sleep(max(0.0, start - time.monotonic() - (LEAD_S / 4 if spin else 0)))
    while time.monotonic() < start:
        pass
    return start


def _timed(call, spin):
    """(seconds from the start to the end of the slowest rank, whether a rank began late)."""
    start = _common_start(spin)
    begun = time.monotonic()
    call()
    word = torch.tensor([time.monotonic() - start, begun - start], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return float(word[0]), float(word[1]) > LATE_S


def _calls(contenders, tensors):
    q, k, v, dout = tensors

    def both(contender):
        contender.forward(q, k, v)
        contender.backward(dout)

    calls = {(n, "forward"): partial(c.forward, q, k, v) for n, c in contenders.items()}
    calls.update({(n, "both"): partial(both, c) for n, c in contenders.items()})
    return calls


def _measure(contenders, tensors, options):
    """Seconds of each (contender, call), which take turns, and how many began late.

    Ends by `repeat` or `seconds`. A call with a late rank counts only where too few have none.
    """
    calls = _calls(contenders, tensors)
    times = {key: [] for key in calls}
    spin = dist.get_world_size() * options["threads"] <= len(os.sched_getaffinity(0))
    end = time.monotonic() + options["seconds"]
    for turn in range(WARMUP + options["repeat"]):
        (over,) = _told(time.monotonic() > end)
        if over and turn >= WARMUP + LEAST_CALLS:
            break
        for key, call in calls.items():
            found = _timed(call, spin)
            if turn >= WARMUP:
                times[key].append(found)
    kept = {}
    for key, found in times.items():
        prompt = [seconds for seconds, late in found if not late]
        kept[key] = prompt if len(prompt) >= LEAST_CALLS else [seconds for seconds, _ in found]
    return kept, sum(late for found in times.values() for _, late in found)


def _tensors(options, n_rows, rank, size):
    rows = torch.from_numpy(cofuse.Layout(n_rows, size).global_rows(rank))
    torch.manual_seed(n_rows)  # every rank draws the whole and takes its rows
    kind = DTYPES[options["dtype"]]
    heads = (options["heads"], options["kv_heads"], options["kv_heads"], options["heads"])
    whole = (torch.randn(1, n_rows, h, options["dim"]) for h in heads)
    return [t[:, rows].to(kind).contiguous() for t in whole]


def _case(world, options, n_rows):
    rank, size = world.rank, world.size
    tensors = _tensors(options, n_rows, rank, size)
    forms = [fastest_forms(*tensors[:3])]
    dist.broadcast_object_list(forms, 0)
    contenders = {"cofuse": Cofuse(world.team, options, n_rows, *tensors[:3])}
    for name, rival in rivals_of(size).items():
        contenders[name] = rival(rank, size, options["mask"] == "causal", forms[0], *tensors[:2])
    good, failures, differences = _checked(contenders, tensors, BOUNDS[options["dtype"]])
    times, late = _measure(good, tensors, options)
    describe = contenders["cofuse"].plan.describe
    world.team.barrier()  # nobody destroys what another still reads
    contenders["cofuse"].plan.destroy()
    return {
        "rows": n_rows,
        "kernel": KERNEL,
        "forms": {direction: form.name for direction, form in forms[0].items()},
        "plan": describe,
        "differences": differences,
        "failures": failures,
        "late_starts": late,
        "times_s": {f"{name} {call}": t for (name, call), t in times.items()},
        "medians_s": {f"{n} {c}": statistics.median(t) for (n, c), t in times.items()},
    }


def cases(world, options):
    return [_case(world, options, n_rows) for n_rows in options["rows"]]
