# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual and RMSNorm of one case on a GPU: by Cofuse, and by what torch brings.

A contender has call(i) for the i-th set of buffers, and outputs(i): (norm_out, residual_out).
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F

import cofuse

EPS = 1e-6


def _add_norm(total, residual, weight):
    z = total + residual
    return z, F.rms_norm(z, weight.shape, weight, EPS)


# For each T anew: a kernel of any T would be another rival, and one more compilation.
_compiled_add_norm = torch.compile(_add_norm, dynamic=False)


class Buffers:
    """Sets of tensors that calls take in turn; x in ordinary and in torch's symmetric memory.

    Rivals that work in place change x: restore() makes it what it was.
    """

    def __init__(self, symmetric, n_tokens, n_sets, hidden, rank):
        def shaped(*lead):
            return torch.empty(*lead, n_tokens, hidden, dtype=symmetric.dtype,
                               device=symmetric.device)

        self.n_sets = n_sets
        n = n_tokens * hidden
        self.places = [shaped(n_sets), symmetric[: n_sets * n].view(n_sets, n_tokens, hidden)]
        generator = torch.Generator(symmetric.device)
        self.kept = shaped(n_sets)
        self.kept.normal_(generator=generator.manual_seed(100 + rank))
        self.residual = shaped(n_sets)
        self.residual.normal_(generator=generator.manual_seed(1))  # the same on all ranks
        self.weight = shaped()[0].normal_(1.0, 0.1, generator=generator.manual_seed(2))
        self.residual = self.residual.unbind(0)
        self.x, self.x_symmetric = (place.unbind(0) for place in self.places)
        self.reduced, self.residual_out, self.norm_out = (
            shaped(n_sets).unbind(0) for _ in range(3))
        self.restore()

    def restore(self):
        for place in self.places:
            place.copy_(self.kept)


class Cofuse:
    def __init__(self, team, buffers, options, algorithm):
        n_tokens, hidden = buffers.x[0].shape
        self.buffers = buffers
        self.is_dry = options["dry_run"]
        self.plan = cofuse.AllreduceRmsnormPlan(
            team, dtype=buffers.kept.dtype, hidden=hidden, max_tokens=n_tokens, eps=EPS,
            algorithm=algorithm)

    def call(self, i):
        b = self.buffers
        self.plan.run(b.x[i], b.residual[i], b.weight, b.residual_out[i], b.norm_out[i],
                      stream=None if self.is_dry else torch.cuda.current_stream())

    def outputs(self, i):
        return self.buffers.norm_out[i], self.buffers.residual_out[i]


class Rival:
    """An all-reduce, then addition and norm in two kernels of torch's, or one compiled for it."""

    def __init__(self, group, buffers, how, is_compiled):
        self.group = group
        self.buffers = buffers
        self.how = how
        self.is_compiled = is_compiled
        self.last = {}

    def nccl(self, i):
        dist.all_reduce(self.buffers.x[i], group=self.group)
        return self.buffers.x[i]

    def one_shot(self, i):
        b = self.buffers
        return torch.ops.symm_mem.one_shot_all_reduce_out(
            b.x_symmetric[i], "sum", self.group.group_name, b.reduced[i])

    def two_shot(self, i):
        return torch.ops.symm_mem.two_shot_all_reduce_(
            self.buffers.x_symmetric[i], "sum", self.group.group_name)

    def call(self, i):
        total, b = getattr(self, self.how)(i), self.buffers
        if self.is_compiled:
            residual_out, norm_out = _compiled_add_norm(total, b.residual[i], b.weight)
        else:
            residual_out = torch.add(total, b.residual[i], out=b.residual_out[i])
            norm_out = F.rms_norm(residual_out, b.weight.shape, b.weight, EPS)
        self.last[i] = norm_out, residual_out

    def outputs(self, i):
        return self.last[i]


class Alone(Rival):
    """The all-reduce, and nothing after it."""

    def call(self, i):
        self.last[i] = None, getattr(self, self.how)(i)


class Eager:
    """Another contender's calls, enqueued by the host each time instead of replayed."""

    def __init__(self, contender):
        self.call, self.outputs = contender.call, contender.outputs
        self.plan = getattr(contender, "plan", None)


def make_contenders(team, group, buffers, options):
    """{name: maker}, in the order in which they take turns."""
    first, *more = options["algorithms"].split(",")
    torch.compiler.reset()  # there is a limit to how often one function is compiled

    def ours(algorithm):
        return lambda: Cofuse(team, buffers, options, algorithm)

    def rival(kind, *how):
        return lambda: kind(group, buffers, *how)

    makers = {"cofuse": ours(first), **{f"cofuse:{a}": ours(a) for a in more}}
    for how in ("nccl", "one_shot", "two_shot"):
        name = how.replace("_", "-")
        makers[name] = rival(Rival, how, False)
        makers[f"{name}-compiled"] = rival(Rival, how, True)
        makers[f"{name}-alone"] = rival(Alone, how, False)
    makers["cofuse-eager"] = lambda: Eager(ours(first)())
    makers["nccl-eager"] = lambda: Eager(rival(Rival, "nccl", False)())
    return makers


def symmetric_memory(n_elements, dtype, device, group):
    whole = symm_mem.empty(n_elements, dtype=dtype, device=device)
    symm_mem.rendezvous(whole, group.group_name)
    return whole
