# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a process set of grad_return_cuda.py: dK, dV to the owners of their rows, by Cofuse
and by NCCL's reduce-scatter; checks all, times them.

A contender has call(i) for the i-th set of buffers, and outputs(i): [2, S_local, Hkv, D].
"""

import math

import torch
import torch.distributed as dist

import cofuse
from comparison import relative
from device_rank import DeviceRank, text_of

# Relative root mean square error against fp64, for two ranks: some roundings of each element. A sum
# that lacks a rank is off by 0.7.
BOUNDS = {"bf16": 5e-3, "f16": 7e-4, "f32": 1e-6}
ROTATE_BYTES = 256 << 20  # of partials, several times an H200's second-level cache
MAX_SETS = 16


class Buffers:
    """Sets of partials [2 (dK, dV), S, Hkv, D], in the order of global rows, and of outputs."""

    def __init__(self, own, payload, n_heads, head_dim):
        item = own.dtype.itemsize
        self.n_local = payload // (2 * n_heads * head_dim * item)
        self.n_rows = self.n_local * own.size
        self.n_sets = max(1, min(MAX_SETS, ROTATE_BYTES // (payload * own.size)))
        self.own, self.n_heads, self.head_dim = own, n_heads, head_dim
        generator = torch.Generator(own.device).manual_seed(100 + own.rank)
        shape = (n_heads, head_dim)
        self.partial = torch.empty(self.n_sets, 2, self.n_rows, *shape, device=own.device,
                                   dtype=own.dtype).normal_(generator=generator)
        self.out = torch.empty(self.n_sets, 2, self.n_local, *shape, device=own.device,
                               dtype=own.dtype)

    def pieces(self, i):
        """The set's partials in chunks, as the owners want them: for each owner its halves of dK,
        then of dV."""
        n = 2 * self.own.size
        chunks = self.partial[i].unflatten(1, (n, self.n_local // 2))
        return [chunks[kv, chunk] for owner in range(self.own.size) for kv in range(2)
                for chunk in (owner, n - 1 - owner)]


class Cofuse:
    def __init__(self, buffers, transfer, is_graph):
        own = buffers.own
        self.buffers, self.is_graph = buffers, is_graph
        self.plan = cofuse.GradReturnPlan(
            own.world.team, dtype=own.dtype, n_batch=1, n_rows=buffers.n_rows,
            n_heads=buffers.n_heads, head_dim_k=buffers.head_dim, transfer=transfer)

    def call(self, i):
        b = self.buffers
        stream = None if b.own.is_dry else torch.cuda.current_stream()
        dk, dv = (t[:, None] for t in b.partial[i])
        dk_out, dv_out = (t[:, None] for t in b.out[i])
        self.plan.run(dk, dv, dk_out, dv_out, stream=stream)

    def outputs(self, i):
        return self.buffers.out[i]


class Nccl:
    """Partials put into the owners' order by one torch.cat, then a reduce-scatter."""

    def __init__(self, buffers, is_graph):
        self.buffers, self.is_graph = buffers, is_graph
        b = buffers
        self.ordered = torch.empty(2 * b.n_rows, b.n_heads, b.head_dim, device=b.partial.device,
                                   dtype=b.partial.dtype)

    def call(self, i):
        b = self.buffers
        torch.cat(b.pieces(i), out=self.ordered)
        dist.reduce_scatter_tensor(b.out[i].flatten(0, 1), self.ordered)

    def outputs(self, i):
        return self.buffers.out[i]


class Alone(Nccl):
    """The reduce-scatter of partials that lie in the owners' order as they are: not all there is
    to do, so never the best rival."""

    def call(self, i):
        b = self.buffers
        dist.reduce_scatter_tensor(b.out[i].flatten(0, 1), b.partial[i].flatten(0, 1))

    def outputs(self, i):
        return None


def make_contenders(buffers):
    """{name: maker}, in the order in which they take turns."""
    def ours(transfer, is_graph):
        return lambda: Cofuse(buffers, transfer, is_graph)

    return {
        "cofuse": ours("push", False),
        "cofuse-graph": ours("push", True),
        "cofuse:pull": ours("pull", False),
        "cofuse:pull-graph": ours("pull", True),
        "nccl": lambda: Nccl(buffers, False),
        "nccl-graph": lambda: Nccl(buffers, True),
        "nccl-alone": lambda: Alone(buffers, False),
        "nccl-alone-graph": lambda: Alone(buffers, True),
    }


class Rank(DeviceRank):
    def exact(self, buffers, i):
        """The own rows' sums in fp64."""
        layout = cofuse.Layout(buffers.n_rows, self.size)
        rows = torch.from_numpy(layout.global_rows(self.rank)).to(self.device)
        total = torch.zeros(buffers.out[i].shape, dtype=torch.float64, device=self.device)
        for writer in range(self.size):
            total += self.sent(buffers.partial[i], writer)[:, rows]
        return total

    def check(self, contender, buffers, exact, ours):
        """(error against fp64, whether the bits are ours, text about what is wrong)."""
        i, text, error, same = buffers.n_sets - 1, "", math.inf, False
        buffers.out.fill_(math.nan)
        self.meet()
        try:
            contender.call(i)
            self.finish()
            found = contender.outputs(i)
            error = 0.0 if found is None else relative(found, exact)
            same = ours is None or found is None or torch.equal(found, ours)
        except (RuntimeError, cofuse.Error) as failure:
            text = text_of(failure)
        text = self.trouble(text)
        error, differs = self.largest(error, 0.0 if same else 1.0)
        bound = BOUNDS[self.options["dtype"]] * math.sqrt(self.size / 2)
        if not text and error > bound:
            text = f"error {error:.1e} against fp64, allowed {bound:.1e}"
        return error, not differs, text

    def checked(self, contenders, buffers, case):
        """Those whose results are right; all of Cofuse's have the same bits."""
        exact, good, ours = self.exact(buffers, buffers.n_sets - 1), {}, None
        for name, contender in contenders.items():
            error, same, text = self.check(contender, buffers, exact, ours)
            if not text and name.startswith("cofuse") and not same:
                text = "other bits than the first of Cofuse's"
            case["errors"][name], case["same_bits"][name] = error, same
            if text:
                case["failures"].append(dict(contender=name, error=text))
                continue
            good[name] = contender
            if name.startswith("cofuse") and ours is None:
                ours = contender.outputs(buffers.n_sets - 1).clone()
        return good

    def case(self, payload):
        buffers = Buffers(self, payload, self.options["heads"], self.options["dim"])
        case = dict(payload_bytes=payload, rows=buffers.n_rows, buffers=buffers.n_sets, errors={},
                    same_bits={}, failures=[], plan=None)
        contenders = self.made(self.chosen(make_contenders(buffers)), case["failures"])
        plans = [c.plan for c in contenders.values() if hasattr(c, "plan")]
        if plans:
            case["plan"] = plans[0].describe
        good = self.checked(contenders, buffers, case)
        ready = self.rounds(good, buffers.n_sets, case["failures"])
        case["times_s"] = self.times(ready)
        return self.ended(case, contenders, ready, payload_bytes=payload)


def main(options, rank, folder, path):
    Rank(options, rank, folder).run(options["payloads"], path)
