# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on torch alone: `sdpa` (one rank), `ring` and `gather`.

Each rival has forward(q, k, v) -> (o, lse), which keeps what backward(dout) -> (dq, dk, dv) needs.
Inputs are [B, S_local, H, D]; o and gradients come out as [B, H, S_local, D] in the same type, lse
as [B, H, S_local]. Under a causal mask rank r holds chunks r and 2P-1-r of 2P. Buffers are made
once. No section has a mask other than the causal one of a square, and none is empty.
"""

import torch
import torch.distributed as dist

from sections import backward, forward, merge


class _Rival:
    def __init__(self, rank, size, causal, forms, q, k):
        self.rank, self.size, self.causal = rank, size, causal
        self.form, self.back = forms["forward"], forms["backward"]
        self.dtype = q.dtype
        self.n_batch, self.n_local, self.n_heads, self.head_dim = q.shape
        self.half = self.n_local // 2
        self.kv_shape = tuple(k.shape)
        self.grad_shape = (k.shape[0], k.shape[2], k.shape[1], k.shape[3])

    def _keep(self, q, k, v, ready, o, lse):
        """ready: the form's q, or None; used again where backward has the same form."""
        self.kept = (q, k, v, ready if self.form.name == self.back.name else None, o, lse)
        return o.to(self.dtype), lse

    def _kept(self, dout):
        """q, k, v as given, then q, dout, o in the form of backward, and lse."""
        q, k, v, ready, o, lse = self.kept
        rows = self.back.of(q) if ready is None else ready
        return q, k, v, rows, self.back.of(dout), self.back.again(o, self.dtype), lse


class Sdpa(_Rival):
    """One rank: a call of torch's kernel."""

    def forward(self, q, k, v):
        rows = [self.form.of(t) for t in (q, k, v)]
        o, lse = forward(*rows, self.causal)
        return self._keep(q, k, v, rows, o, lse)

    def backward(self, dout):
        q, k, v, rows, g, o, lse = self._kept_all(dout)
        return tuple(t.to(self.dtype) for t in backward(g, *rows, o, lse, self.causal))

    def _kept_all(self, dout):
        q, k, v, ready, o, lse = self.kept
        rows = ready or [self.back.of(t) for t in (q, k, v)]
        return q, k, v, rows, self.back.of(dout), self.back.again(o, self.dtype), lse


class Ring(_Rival):
    """K and V go round by isend/irecv while the section of the last ones is computed.

    Backward sends them round once more, and dK, dV after them in the type of the inputs.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.kv = [torch.empty(2, *self.kv_shape, dtype=self.dtype) for _ in range(2)]
        self.grad_out = torch.empty(2, *self.grad_shape, dtype=self.dtype)
        self.grad_in = torch.empty_like(self.grad_out)

    def _pass(self, send, receive, tag):
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return [dist.isend(send, after, tag=tag), dist.irecv(receive, before, tag=tag)]

    def _sections(self, k, v, form):
        """(first query row, key rows, causal, K, V) step by step; K and V in the form."""
        held, incoming = self.kv
        held[0].copy_(k)
        held[1].copy_(v)
        for step in range(self.size):
            moves = self._pass(held, incoming, 0) if step + 1 < self.size else []
            owner = (self.rank - step) % self.size
            first, n_keys = 0, self.n_local
            if self.causal and owner < self.rank:
                n_keys = self.half
            elif self.causal and owner > self.rank:
                first = self.half
            rows = (form.of(held[i][:, :n_keys]) for i in range(2))
            yield (first, n_keys, self.causal and step == 0, *rows)
            for move in moves:
                move.wait()
            held, incoming = incoming, held

    def forward(self, q, k, v):
        rows = self.form.of(q)
        for step, (first, _, causal, keys, values) in enumerate(self._sections(k, v, self.form)):
            part, part_lse = forward(rows[:, :, first:], keys, values, causal)
            if step == 0:
                o, lse = part.float(), part_lse.contiguous()
            else:
                merge(o[:, :, first:], lse[:, :, first:], part, part_lse)
        return self._keep(q, k, v, rows, o, lse)

    def backward(self, dout):
        _, k, v, rows, g, o, lse = self._kept(dout)
        moves = []
        for step, (first, n_keys, causal, keys, values) in enumerate(
            self._sections(k, v, self.back)
        ):
            part = backward(g[:, :, first:], rows[:, :, first:], keys, values, o[:, :, first:],
                            lse[:, :, first:], causal)
            if step == 0:
                dq = part[0].float()
            else:
                dq[:, :, first:] += part[0]
            for move in moves:
                move.wait()
            self._add(part[1:], n_keys, step)
            moves = self._pass(self.grad_out, self.grad_in, 1)
        for move in moves:
            move.wait()
        return dq.to(self.dtype), self.grad_in[0], self.grad_in[1]

    def _add(self, part, n_keys, step):
        """grad_out = grad_in + part; a sum is rounded once, when it is stored."""
        for out, last, more in zip(self.grad_out, self.grad_in, part):
            if step == 0:
                out.copy_(more)
                continue
            out[:, :, :n_keys] = last[:, :, :n_keys] + more
            out[:, :, n_keys:] = last[:, :, n_keys:]


class Gather(_Rival):
    """All K and V to every rank once; backward sends each owner its part of dK, dV and sums.

    Backward uses the K and V that forward has gathered.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.own = torch.empty(2, *self.kv_shape, dtype=self.dtype)
        self.all = torch.empty(self.size, *self.own.shape, dtype=self.dtype)
        self.grad_out = torch.empty(self.size, 2, *self.grad_shape, dtype=self.dtype)
        self.grad_in = torch.empty_like(self.grad_out)
        self.placed = {f.name: self._room(f) for f in (self.form, self.back)}
        n_batch, n_heads, _, head_dim = self.grad_shape
        self.grad = torch.empty(2, n_batch, n_heads, self.n_local * self.size, head_dim)

    def _room(self, form):
        n_batch, n_rows, n_heads, head_dim = self.kv_shape
        return form.empty(n_batch, n_rows * self.size, n_heads, head_dim, self.dtype, 2)

    def _pieces(self):
        """(owner, first row at the owner, first global row, rows)."""
        if not self.causal:
            return [(r, 0, r * self.n_local, self.n_local) for r in range(self.size)]
        n, last = self.half, 2 * self.size - 1
        firsts = [(r, 0, r * n, n) for r in range(self.size)]
        return firsts + [(r, n, (last - r) * n, n) for r in range(self.size)]

    def _place(self, form):
        """What this rank's rows see of K and V, in global order."""
        room = self.placed[form.name]
        n_seen = (2 * self.size - self.rank) * self.half if self.causal else room.shape[3]
        for owner, local, row, n in self._pieces():
            if row < n_seen:
                rows = self.all[owner, :, :, local : local + n]
                room[:, :, :, row : row + n] = rows.transpose(2, 3)
        return room

    def _sections(self):
        """(query rows, key rows, causal)."""
        if not self.causal:
            return [(slice(None), slice(None), False)]
        n, sections = self.half, []
        for i, chunk in enumerate((self.rank, 2 * self.size - 1 - self.rank)):
            queries = slice(i * n, (i + 1) * n)
            sections.append((queries, slice(chunk * n, (chunk + 1) * n), True))
            if chunk:
                sections.append((queries, slice(0, chunk * n), False))
        return sections

    def forward(self, q, k, v):
        self.own[0].copy_(k)
        self.own[1].copy_(v)
        dist.all_gather(list(self.all.unbind(0)), self.own)
        rows, (keys, values) = self.form.of(q), self._place(self.form)
        o = torch.empty(self.n_batch, self.n_heads, self.n_local, self.head_dim)
        lse = torch.empty(self.n_batch, self.n_heads, self.n_local)
        for at, seen, causal in self._sections():
            part, part_lse = forward(rows[:, :, at], keys[:, :, seen], values[:, :, seen], causal)
            if causal or not self.causal:
                o[:, :, at], lse[:, :, at] = part, part_lse
            else:
                merge(o[:, :, at], lse[:, :, at], part, part_lse)
        return self._keep(q, k, v, rows, o, lse)

    def backward(self, dout):
        _, _, _, rows, g, o, lse = self._kept(dout)
        same = self.form.name == self.back.name
        keys, values = self.placed[self.back.name] if same else self._place(self.back)
        dq = torch.zeros(self.n_batch, self.n_heads, self.n_local, self.head_dim)
        self.grad.zero_()
        for at, seen, causal in self._sections():
            part = backward(g[:, :, at], rows[:, :, at], keys[:, :, seen], values[:, :, seen],
                            o[:, :, at], lse[:, :, at], causal)
            dq[:, :, at] += part[0]
            self.grad[0, :, :, seen] += part[1]
            self.grad[1, :, :, seen] += part[2]
        return (dq.to(self.dtype), *self._return())

    def _return(self):
        for owner, local, row, n in self._pieces():
            self.grad_out[owner, :, :, :, local : local + n] = self.grad[:, :, :, row : row + n]
        dist.all_to_all_single(self.grad_in, self.grad_out)
        return self.grad_in.sum(0, dtype=torch.float32).to(self.dtype)


def rivals_of(size):
    return {"sdpa": Sdpa} if size == 1 else {"ring": Ring, "gather": Gather}
