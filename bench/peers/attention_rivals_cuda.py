# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Causal context-parallel attention, forward, over the ranks of one host: by Cofuse, and by what
torch, cuDNN and NCCL bring.

A contender has call(i), and outputs(i): (o [S_local, H, D], lse [H, S_local]). Inputs are
[1, S_local, heads, D]; rank r holds chunks r and 2P-1-r of 2P equal ones.
"""

import torch
import torch.distributed as dist

import cofuse
from sections_cuda import check_merge, compiled_merge, merge


class Inputs:
    def __init__(self, own, n_rows, n_heads, n_kv_heads, head_dim):
        generator = torch.Generator(own.device).manual_seed(n_rows + own.rank)
        n_local = n_rows // own.size
        self.own, self.n_rows, self.n_local, self.half = own, n_rows, n_local, n_local // 2
        self.q, self.k, self.v = (
            torch.randn(1, n_local, heads, head_dim, device=own.device, generator=generator,
                        dtype=torch.float32).to(own.dtype)
            for heads in (n_heads, n_kv_heads, n_kv_heads))


class Cofuse:
    def __init__(self, inputs, schedule, is_graph):
        own, q = inputs.own, inputs.q
        self.inputs, self.is_graph = inputs, is_graph
        self.plan = cofuse.AttentionPlan(
            own.world.team, dtype=own.dtype, n_batch=1, n_rows=inputs.n_rows, n_heads=q.shape[2],
            n_kv_heads=inputs.k.shape[2], head_dim_qk=q.shape[3], mask="causal",
            schedule=schedule, forward_only=True)
        self.o = torch.empty_like(q)
        self.lse = torch.empty(1, q.shape[2], q.shape[1], device=q.device)

    def call(self, i):
        t = self.inputs
        stream = None if t.own.is_dry else torch.cuda.current_stream()
        self.plan.forward(t.q, t.k, t.v, self.o, self.lse, stream=stream)

    def outputs(self, i):
        return self.o[0], self.lse[0]


class _Rival:
    is_graph = False

    def __init__(self, inputs, how=merge):
        self.inputs, self.merge = inputs, how
        self.rank, self.size = inputs.own.rank, inputs.own.size
        self.forward = inputs.own.sections
        self.heads = tuple(t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        self.o = self.lse = None

    def prepare(self):
        check_merge(self.merge, self.inputs.own.device, self.inputs.own.dtype)

    def outputs(self, i):
        return self.o[0].transpose(0, 1), self.lse[0]


class Ring(_Rival):
    """K and V go round by grouped send and receive, beside the section of the last ones."""

    def __init__(self, *args):
        super().__init__(*args)
        t = self.inputs
        self.rooms = [[torch.empty_like(x) for x in (t.k, t.v)] for _ in range(min(self.size, 2))]

    def _pass(self, held, room):
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = [dist.P2POp(dist.isend, t, after) for t in held]
        moves += [dist.P2POp(dist.irecv, t, before) for t in room]
        return dist.batch_isend_irecv(moves)

    def call(self, i):
        half, q = self.inputs.half, self.heads[0]
        held = [self.inputs.k, self.inputs.v]
        for step in range(self.size):
            room = self.rooms[step % 2]
            moves = self._pass(held, room) if step + 1 < self.size else []
            owner = (self.rank - step) % self.size
            first = half if owner > self.rank else 0
            n_keys = half if owner < self.rank else 2 * half
            keys, values = (t[:, :n_keys].transpose(1, 2) for t in held)
            part, part_lse = self.forward(q[:, :, first:], keys, values, step == 0)
            if step == 0:
                # Between two ranks each row is merged once at most, else sums are in float32.
                o, lse = part if self.size < 3 else part.float(), part_lse
            else:
                self.merge(o[:, :, first:], lse[:, :, first:], part, part_lse)
            for move in moves:
                move.wait()
            held = room
        self.o, self.lse = o.to(q.dtype), lse


class Gather(_Rival):
    """All K and V to every rank; meanwhile the causal squares of both chunks, then what lies before
    each chunk, without a mask (the kernel's causal mask begins at the first key)."""

    def __init__(self, *args):
        super().__init__(*args)
        t, n = self.inputs, self.size
        self.all = [torch.empty(n, *x.shape[1:], device=x.device, dtype=x.dtype)
                    for x in (t.k, t.v)]
        order = [2 * min(c, 2 * n - 1 - c) + (c >= n) for c in range(2 * n)]
        self.order = torch.tensor(order[: 2 * n - 1 - self.rank], device=t.q.device)

    def call(self, i):
        t, half = self.inputs, self.inputs.half
        moves = [dist.all_gather_into_tensor(room, x, async_op=True)
                 for room, x in zip(self.all, (t.k, t.v))]
        halves = (x[0].unflatten(0, (2, half)).transpose(1, 2) for x in (t.q, t.k, t.v))
        self.o, self.lse = self.forward(*halves, True)
        for move in moves:
            move.wait()
        ordered = []
        for room in self.all:
            chunks = room.flatten(0, 1).unflatten(0, (2 * self.size, half))
            ordered.append(torch.index_select(chunks, 0, self.order).flatten(0, 1)[None]
                           .transpose(1, 2))
        for at, n_chunks in enumerate((self.rank, 2 * self.size - 1 - self.rank)):
            if n_chunks:
                seen = (x[:, :, : n_chunks * half] for x in ordered)
                query = self.heads[0][:, :, at * half : (at + 1) * half]
                part, part_lse = self.forward(query, *seen, False)
                self.merge(self.o[at : at + 1], self.lse[at : at + 1], part, part_lse)

    def outputs(self, i):
        return self.o.transpose(1, 2).flatten(0, 1), self.lse.transpose(0, 1).flatten(1)


class Ulysses(_Rival):
    """Heads for sequence: an all-to-all, one causal call with all rows, and an all-to-all back."""

    def __init__(self, inputs):
        super().__init__(inputs)
        n, heads = self.size, [x.shape[2] for x in (inputs.q, inputs.k, inputs.v)]
        if any(h % n for h in heads):
            raise ValueError(f"{heads} heads: wanted multiples of {n}")
        self.shares = [h // n for h in heads]
        head_dim, q = inputs.q.shape[3], inputs.q
        n_each = [inputs.n_local * h * head_dim for h in self.shares]
        self.n_each = n_each
        self.out, self.back = (torch.empty(n, sum(n_each), device=q.device, dtype=q.dtype)
                               for _ in range(2))
        self.o_out, self.o_back = (
            torch.empty(n, inputs.n_local, self.shares[0], head_dim, device=q.device, dtype=q.dtype)
            for _ in range(2))
        self.lse_out, self.lse_back = (
            torch.empty(n, 2, self.shares[0], inputs.half, device=q.device) for _ in range(2))
        owners = [min(c, 2 * n - 1 - c) for c in range(2 * n)]
        halves = [int(c >= n) for c in range(2 * n)]
        # Of a global chunk: owner and half. Of a rank's half: the global chunk.
        self.owners, self.halves = (torch.tensor(x, device=q.device) for x in (owners, halves))
        self.chunks = torch.tensor([[r, 2 * n - 1 - r] for r in range(n)], device=q.device)

    def _parts(self, flat):
        """Views of q, k, v in a buffer: [P, S_local, heads of a rank, D]."""
        t, head_dim = self.inputs, self.inputs.q.shape[3]
        parts = torch.split(flat, self.n_each, 1)
        return [p.unflatten(1, (t.n_local, h, head_dim)) for p, h in zip(parts, self.shares)]

    def call(self, i):
        t, n, half = self.inputs, self.size, self.inputs.half
        for place, x, h in zip(self._parts(self.out), (t.q, t.k, t.v), self.shares):
            place.copy_(x[0].unflatten(1, (n, h)).transpose(0, 1))
        dist.all_to_all_single(self.back, self.out)
        whole = []
        for part in self._parts(self.back):
            chunks = part.unflatten(1, (2, half))[self.owners, self.halves]
            whole.append(chunks.flatten(0, 1)[None].transpose(1, 2))
        o, lse = self.forward(*whole, True)
        by_chunk = o[0].transpose(0, 1).unflatten(0, (2 * n, half))
        self.o_out.copy_(by_chunk[self.chunks].flatten(1, 2))
        lse_by_chunk = lse[0].unflatten(1, (2 * n, half)).transpose(0, 1)
        self.lse_out.copy_(lse_by_chunk[self.chunks])
        dist.all_to_all_single(self.o_back, self.o_out)
        dist.all_to_all_single(self.lse_back, self.lse_out)
        self.o = self.o_back.transpose(0, 1).flatten(1, 2)
        # [P, 2, h, half] -> [P, h, 2, half] -> [H, S_local]
        self.lse = self.lse_back.transpose(1, 2).flatten(2).flatten(0, 1)

    def outputs(self, i):
        return self.o, self.lse


class Alone(_Rival):
    """The sections of this rank's ring and nothing else: no transfers, no merges."""

    def call(self, i):
        half, (q, k, v) = self.inputs.half, self.heads
        for step in range(self.size):
            owner = (self.rank - step) % self.size
            first = half if owner > self.rank else 0
            n_keys = half if owner < self.rank else 2 * half
            self.forward(q[:, :, first:], k[:, :, :n_keys], v[:, :, :n_keys], step == 0)


class Graph:
    """Another contender's calls, replayed as a CUDA graph."""

    is_graph = True

    def __init__(self, contender):
        self.call, self.outputs, self.prepare = (
            contender.call, contender.outputs, contender.prepare)


def make_contenders(inputs, options):
    """{name: maker}, in the order in which they take turns."""
    first, *more = options["schedules"].split(",")

    def ours(schedule, is_graph=False):
        return lambda: Cofuse(inputs, schedule, is_graph)

    return {
        "cofuse": ours(first),
        **{f"cofuse:{s}": ours(s) for s in more},
        "cofuse-graph": ours(first, True),
        "ring": lambda: Ring(inputs),
        "ring-compiled": lambda: Ring(inputs, compiled_merge),
        "ring-compiled-graph": lambda: Graph(Ring(inputs, compiled_merge)),
        "gather": lambda: Gather(inputs),
        "gather-compiled": lambda: Gather(inputs, compiled_merge),
        "ulysses": lambda: Ulysses(inputs),
        "sections-alone": lambda: Alone(inputs),
    }
