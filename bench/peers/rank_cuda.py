# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a process set on GPUs: makes the buffers, checks all contenders, times them."""

import math

import torch

import cofuse
from comparison import relative
from device_rank import DeviceRank, text_of
from rivals_cuda import EPS, Buffers, Eager, make_contenders, symmetric_memory

# Relative root mean square error of results against fp64, for two ranks: some roundings of each
# element. A sum that lacks a rank is off by 0.5 and more.
BOUNDS = {"bf16": 5e-3, "f16": 7e-4, "f32": 1e-6}
ROTATE_BYTES = 256 << 20  # of x and residual, several times an H200's second-level cache
MAX_SETS = 16


class Rank(DeviceRank):
    def __init__(self, options, rank, folder):
        super().__init__(options, rank, folder)
        n = max(self._sets(n) * n for n in options["tokens"]) * options["hidden"]
        if self.is_dry or self.shares:  # its contenders are left out
            self.symmetric = torch.empty(n, dtype=self.dtype, device=self.device)
        else:
            self.symmetric = symmetric_memory(n, self.dtype, self.device, self.group)

    def _sets(self, n_tokens):
        """Sets of buffers that calls take in turn."""
        one = 2 * n_tokens * self.options["hidden"] * self.dtype.itemsize
        return max(4, min(MAX_SETS, math.ceil(ROTATE_BYTES / one)))

    # ---- checking ----

    def exact(self, buffers, i):
        """(norm_out, residual_out, sum) in fp64."""
        total = sum(p.double() for p in self.gathered(buffers.kept[i]))
        z = total + buffers.residual[i].double()
        scale = torch.rsqrt(z.square().mean(1, keepdim=True) + EPS)
        return z * scale * buffers.weight.double(), z, total

    def same_bits(self, ours):
        """Whether rank 0 has the same."""
        if ours is None:
            return True
        theirs = self.sent(ours, 0)
        return torch.equal(theirs.view(torch.uint8), ours.contiguous().view(torch.uint8))

    def check(self, contender, buffers, exact):
        """(largest errors of norm_out and residual_out, same bits on all ranks) of one call."""
        i = buffers.n_sets - 1
        buffers.restore()
        buffers.norm_out[i].fill_(math.nan)
        buffers.residual_out[i].fill_(math.nan)
        self.meet()
        contender.call(i)
        norm_out, residual_out = contender.outputs(i)
        wanted = exact[1] if norm_out is not None else exact[2]
        pairs = (norm_out, exact[0]), (residual_out, wanted)
        errors = [0.0 if ours is None else relative(ours, right) for ours, right in pairs]
        same = self.same_bits(norm_out) and self.same_bits(residual_out)
        found = self.largest(*errors, 0.0 if same else 1.0)
        return found[:2], found[2] == 0

    def checked(self, contenders, buffers, case):
        """Those whose results are right; errors of all go into the case."""
        exact, good = self.exact(buffers, buffers.n_sets - 1), {}
        bound = BOUNDS[self.options["dtype"]] * math.sqrt(self.size / 2)
        for name, contender in contenders.items():
            trouble = ""
            try:
                errors, same = self.check(contender, buffers, exact)
            except (RuntimeError, cofuse.Error) as error:  # alike on all ranks, or the set ends
                trouble, errors, same = text_of(error), None, None
            else:
                if max(errors) > bound:
                    trouble = f"errors {errors} against fp64, allowed {bound:.1e}"
                case["errors"][name], case["same_bits"][name] = errors, same
            if trouble:
                case["failures"].append(dict(contender=name, error=trouble))
            else:
                good[name] = contender
        return good

    # ---- timing ----

    def enqueuer(self, contender, n_sets):
        """What enqueues all calls of a sample."""
        def calls():
            for i in range(self.options["calls"]):
                contender.call(i % n_sets)

        return calls if isinstance(contender, Eager) else self.captured(calls)

    def case(self, n_tokens):
        n_sets, item = self._sets(n_tokens), self.dtype.itemsize
        buffers = Buffers(self.symmetric, n_tokens, n_sets, self.options["hidden"], self.rank)
        case = dict(tokens=n_tokens, bytes=n_tokens * self.options["hidden"] * item,
                    buffers=n_sets, errors={}, same_bits={}, failures=[], plan=None)
        makers = make_contenders(self.world.team, self.group, buffers, self.options)
        contenders = self.made(self.chosen(makers), case["failures"])
        plans = [p for c in contenders.values() if (p := getattr(c, "plan", None))]
        if plans:
            case["plan"] = plans[0].describe
        good = self.checked(contenders, buffers, case)
        n_calls = self.options["calls"]
        ready = {name: (self.enqueuer(c, n_sets), n_calls) for name, c in good.items()}
        case["times_s"] = self.times(ready, buffers.restore)
        return self.ended(case, contenders, ready, tokens=n_tokens)


def main(options, rank, folder, path):
    Rank(options, rank, folder).run(options["tokens"], path)
