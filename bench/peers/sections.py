# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of one section (query rows x key rows) by torch's kernels for the CPU.

Tensors of a section are [B, H, S, D]. Forward returns lse, by which sections are merged; backward
takes o and lse of all keys, so that gradients of sections add up.
"""

import math
import time

import torch

_ATEN = torch.ops.aten
_FLASH = getattr(_ATEN, "_scaled_dot_product_flash_attention_for_cpu", None)
_FLASH_BACKWARD = getattr(_ATEN, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
KERNEL = "math" if _FLASH is None or _FLASH_BACKWARD is None else "flash"

# Rows at which forms are compared. Backward in bfloat16 takes seconds on machines without
# instructions for it, hence fewer.
_TRIAL_ROWS = {"forward": 768, "backward": 256}
_TRIAL_TURNS = 6


def _probabilities(q, k, causal, lse=None):
    group = q.shape[1] // k.shape[1]
    score = q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3)
    score /= math.sqrt(q.shape[3])
    if causal:
        seen = torch.ones(score.shape[2:], dtype=torch.bool).tril()
        score.masked_fill_(~seen, -math.inf)
    if lse is None:
        lse = score.logsumexp(3)
    return (score - lse[..., None]).exp(), lse


def _math_forward(q, k, v, causal):
    p, lse = _probabilities(q, k, causal)
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (p @ values).to(q.dtype), lse


def _math_backward(dout, q, k, v, o, lse, causal):
    group = q.shape[1] // k.shape[1]
    p, _ = _probabilities(q, k, causal, lse)
    g, values = dout.float(), v.float().repeat_interleave(group, 1)
    delta = (g * o.float()).sum(3, keepdim=True)
    ds = p * (g @ values.transpose(2, 3) - delta) / math.sqrt(q.shape[3])
    dq = ds @ k.float().repeat_interleave(group, 1)
    dk = (ds.transpose(2, 3) @ q.float()).unflatten(1, (-1, group)).sum(2)
    dv = (p.transpose(2, 3) @ g).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


def forward(q, k, v, causal):
    """(o, lse); a causal section is square."""
    if KERNEL == "math":
        return _math_forward(q, k, v, causal)
    return _FLASH(q, k, v, 0.0, causal)


def backward(dout, q, k, v, o, lse, causal):
    """(dq, dk, dv) of this section."""
    if KERNEL == "math":
        return _math_backward(dout, q, k, v, o, lse, causal)
    return _FLASH_BACKWARD(dout, q, k, v, o, lse, 0.0, causal)


class Form:
    """How the kernels get their tensors: as they lie, with heads outermost, or in float32 too."""

    NAMES = ("as-is", "heads-first", "float32")

    def __init__(self, name):
        self.name = name

    def dtype(self, dtype):
        return torch.float32 if self.name == "float32" else dtype

    def empty(self, n_batch, n_rows, n_heads, head_dim, dtype, n=1):
        """n tensors [B, H, S, D] in one, [n, B, H, S, D]."""
        kind = self.dtype(dtype)
        if self.name == "as-is":
            return torch.empty(n, n_batch, n_rows, n_heads, head_dim, dtype=kind).transpose(2, 3)
        return torch.empty(n, n_batch, n_heads, n_rows, head_dim, dtype=kind)

    def of(self, tensor):
        """[B, H, S, D] of [B, S, H, D]."""
        heads = tensor.transpose(1, 2)
        if self.name == "as-is":
            return heads
        return heads.to(self.dtype(tensor.dtype), memory_format=torch.contiguous_format)

    def again(self, tensor, dtype):
        """A tensor [B, H, S, D] of another form in this one; dtype is that of the inputs."""
        return tensor.to(self.dtype(dtype))


def _trial(form, direction, q, k, v):
    """A call that converts and computes; what it needs of a forward is made now."""
    if direction == "forward":
        return lambda: forward(*(form.of(t) for t in (q, k, v)), False)
    o, lse = forward(*(form.of(t) for t in (q, k, v)), False)

    def call():
        a, b, c, dout = (form.of(t) for t in (q, k, v, q))
        backward(dout, a, b, c, o, lse, False)

    return call


def _fastest(calls):
    """Name of the call with the smallest time; they take turns, hopeless ones only once."""
    best = {}
    for _ in range(_TRIAL_TURNS):
        least = min(best.values(), default=0.0)
        for name, call in calls.items():
            if best.get(name, 0.0) > 4 * least:
                continue
            start = time.perf_counter()
            call()
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
    return min(best, key=best.get)


def fastest_forms(q, k, v):
    """{"forward": Form, "backward": Form}: the fastest here and now, conversions included."""
    names = [n for n in Form.NAMES if n != "float32" or q.dtype != torch.float32]
    chosen = {}
    for direction, limit in _TRIAL_ROWS.items():
        some = [t[:, :limit].contiguous() for t in (q, k, v)]
        calls = {name: _trial(Form(name), direction, *some) for name in names}
        chosen[direction] = Form(_fastest(calls))
    return chosen


def merge(o, lse, o_more, lse_more):
    """Merges float32 o [B, H, S, D] and lse, in place, with those of more keys."""
    weight = torch.sigmoid(lse_more - lse)
    o.lerp_(o_more.float(), weight[..., None])
    lse.copy_(torch.logaddexp(lse, lse_more))
